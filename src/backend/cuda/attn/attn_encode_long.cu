/*
 * Encoder attention on Hopper with wgmma, for sequences of hundreds of rows that see all of each other: the patches of an image.
 * A block has 128 rows of one head: two consumer warpgroups of 64 rows, and one producer warpgroup that copies tiles of 128 keys
 * and values into a ring of stages. As in attn_prefill.cu, a consumer issues q K^T of a round together with P V of the round
 * before, computes the round's softmax while that P V is in flight, and takes turns with the other consumer.
 * A row of 64 fp16 is a swizzled line of a panel; heads of more than 64 have a second panel, of which only the first pieces are
 * used. Its pieces after a head of 72 are zeros.
 */
#include "backend/cuda/attn/attn_encode.cuh"
#include "backend/cuda/core/wgmma.cuh"

enum { LONG_KEYS = 128, LONG_TILE_ROWS = 64, LONG_CONSUMERS = 2 };
enum {
    LONG_THREADS = 128 * (LONG_CONSUMERS + 1),
    LONG_PANEL = LONG_KEYS * 128, /* 64 elements of each of the tile's keys */
    LONG_BARS = 256,
};
/* Registers per thread of consumers and producer, redistributed by setmaxnreg. */
enum { LONG_CONSUMER_REGS = 232, LONG_PRODUCER_REGS = 40 };

/* Sizes for heads of D. PADDED: columns of q and k that are multiplied. */
template <int D> struct long_shape {
    enum {
        PADDED = (D + 15) / 16 * 16,
        PANELS = (D + 63) / 64,
        PIECES = D / 8,
        TILE = PANELS * LONG_PANEL, /* keys, or values */
        STAGE = 2 * TILE,
        STAGES = 3,
        BYTES = 1024 + STAGES * STAGE + LONG_BARS
    };
};
enum { LONG_STAGES = 3 };

/* Keys loaded, values loaded, and stage free. */
struct long_bars {
    uint64_t keys[LONG_STAGES], values[LONG_STAGES], empty[LONG_STAGES];
};

/* Where piece `piece` of a key is in a tile. */
DEVICE int long_place(int key, int piece)
{
    return (piece >> 3) * LONG_PANEL + key * 128 + (((piece & 7) ^ (key & 7)) << 4);
}

/* The producer warpgroup. keys: the first key's head; values follow n_kv heads later. */
template <int D>
DEVICE void long_producer(const struct encode_args &p, const uint16_t *keys, int n, int rounds,
                          uint8_t *shared, struct long_bars *bars)
{
    typedef long_shape<D> shape;
    int id = (int)threadIdx.x & 127, stage = 0, phase = 1;
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        bar_wait(&bars->empty[stage], phase);
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const uint16_t *base = keys + (size_t)(v * p.n_kv * D);
            uint8_t *to = shared + stage * shape::STAGE + v * shape::TILE;
#pragma unroll 4
            for (int i = id; i < LONG_KEYS * shape::PIECES; i += 128) {
                int key = i / shape::PIECES, piece = i - key * shape::PIECES;
                int real = min(round * LONG_KEYS + key, n - 1);
                copy_async16(to + long_place(key, piece),
                             base + (size_t)real * (size_t)p.stride + (size_t)(piece * 8));
            }
            bar_arrive_copies(v ? &bars->values[stage] : &bars->keys[stage]);
        }
        if (++stage == LONG_STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
}

/* Products of q and k to probabilities; keys from n on are hidden. As softmax_tile, with st.top in units of the products: one
 * multiply-add scales and shifts. */
DEVICE void long_softmax(float (&s)[LONG_KEYS / 2], struct softmax_rows &st, float to_log2,
                         int base, int n)
{
    float m[2] = {st.top[0], st.top[1]};
    if (base + LONG_KEYS > n)
#pragma unroll
        for (int i = 0; i < LONG_KEYS / 2; i++)
            if (base + (i >> 2) * 8 + 2 * (lane_id() & 3) + (i & 1) >= n)
                s[i] = -INFINITY;
#pragma unroll
    for (int i = 0; i < LONG_KEYS / 2; i++)
        m[i >> 1 & 1] = fmaxf(m[i >> 1 & 1], s[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m[r] = fmaxf(m[r], __shfl_xor_sync(FULL_WARP, m[r], 1));
        m[r] = fmaxf(m[r], __shfl_xor_sync(FULL_WARP, m[r], 2));
        st.shrink[r] = fast_exp2((st.top[r] - m[r]) * to_log2);
        st.top[r] = m[r];
        m[r] *= -to_log2;
        st.total[r] *= st.shrink[r];
    }
#pragma unroll
    for (int i = 0; i < LONG_KEYS / 2; i++) {
        s[i] = fast_exp2(fmaf(s[i], to_log2, m[i >> 1 & 1]));
        st.total[i >> 1 & 1] += s[i];
    }
}

DEVICE void long_pack(const float (&s)[LONG_KEYS / 2], uint32_t (&pf)[LONG_KEYS / 16][4])
{
#pragma unroll
    for (int i = 0; i < LONG_KEYS / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            pf[i][j] = pack_half2(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
}

/* A fragments of the queries of this warp's rows g and g+8, of `rows` rows from row0 on. */
template <int D>
DEVICE void long_queries(const struct encode_args &p, int h, int row0, int rows,
                         uint32_t (&qf)[long_shape<D>::PADDED / 16][4])
{
    int w = warp_id() & 3, g = lane_id() >> 2, c = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < long_shape<D>::PADDED / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = min(w * 16 + g + 8 * (j & 1), rows - 1), d = i * 16 + 2 * c + 8 * (j >> 1);
            const uint16_t *at =
                p.qkv + (size_t)(row0 + r) * (size_t)p.stride + (size_t)(h * D + d);
            qf[i][j] = d < D ? *(const uint32_t *)at : 0;
        }
}

/* Grid: (heads, tiles of 64 rows). A block has a sequence's even tile and the odd one after it. */
template <int D>
static __global__ void __launch_bounds__(LONG_THREADS, 1)
    attn_encode_long_kernel(const __grid_constant__ struct encode_args p)
{
    typedef long_shape<D> shape;
    SHARED_BYTES(raw);
    uint8_t *shared = shared_align(raw, 1024);
    struct long_bars *bars = (struct long_bars *)(shared + shape::STAGES * shape::STAGE);
    dependency_wait();
    dependency_trigger();
    int2 tile = p.tiles[blockIdx.y];
    int start = p.q_start[tile.x], n = p.q_start[tile.x + 1] - start;
    if ((tile.y - start) / LONG_TILE_ROWS % LONG_CONSUMERS)
        return;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < LONG_STAGES; i++) {
            bar_init(&bars->keys[i], 128);
            bar_init(&bars->values[i], 128);
            bar_init(&bars->empty[i], LONG_CONSUMERS * 4);
        }
        bar_ready();
    }
    for (int i = (int)threadIdx.x; i < LONG_STAGES * LONG_KEYS; i += LONG_THREADS)
        for (int piece = shape::PIECES; piece < shape::PADDED / 8; piece++)
            *(uint4 *)(shared + i / LONG_KEYS * shape::STAGE + long_place(i % LONG_KEYS, piece)) =
                make_uint4(0, 0, 0, 0);
    wgmma_publish();
    __syncthreads();
    int lane = lane_id(), w = warp_id() & 3, wg = warp_id() >> 2;
    int h = (int)blockIdx.x, H = p.n_heads, kv_head = h * p.n_kv / H;
    int rounds = (n + LONG_KEYS - 1) / LONG_KEYS;
    if (wg == LONG_CONSUMERS) {
        registers_lower<LONG_PRODUCER_REGS>();
        long_producer<D>(p, p.qkv + (size_t)start * (size_t)p.stride + (size_t)((H + kv_head) * D),
                         n, rounds, shared, bars);
        return;
    }
    registers_raise<LONG_CONSUMER_REGS>();
    int row0 = tile.y + wg * LONG_TILE_ROWS, rows = min((int)LONG_TILE_ROWS, start + n - row0);

    uint32_t qf[shape::PADDED / 16][4];
    long_queries<D>(p, h, rows > 0 ? row0 : tile.y, rows > 0 ? rows : 1, qf);
    struct softmax_rows st;
    softmax_clear(st);
    float out[D / 2] = {}, s[LONG_KEYS / 2] = {};
    uint32_t pf[LONG_KEYS / 16][4];
    wgmma_use(out);
    wgmma_use(s);
    auto keys = [&](int round) {
        bar_wait(&bars->keys[round % LONG_STAGES], round / LONG_STAGES);
        wgmma_publish();
        wgmma_fence();
        uint64_t desc = wgmma_desc(shared + round % LONG_STAGES * shape::STAGE);
#pragma unroll
        for (int i = 0; i < shape::PADDED / 16; i++) {
            uint64_t at = desc + (uint64_t)((i >> 2) * (LONG_PANEL >> 4) + (i & 3) * 2);
            if (i == 0)
                wgmma<LONG_KEYS, false, true>(s, qf[i], at);
            else
                wgmma<LONG_KEYS>(s, qf[i], at);
        }
        wgmma_commit();
    };
    auto values = [&](int round) {
        bar_wait(&bars->values[round % LONG_STAGES], round / LONG_STAGES);
        wgmma_publish();
        wgmma_fence();
        uint64_t desc = wgmma_desc_transposed(
            shared + round % LONG_STAGES * shape::STAGE + shape::TILE, LONG_PANEL);
#pragma unroll
        for (int i = 0; i < LONG_KEYS / 16; i++)
            wgmma<D, false, false, true>(out, pf[i], desc + (uint64_t)(i * (2048 >> 4)));
        wgmma_commit();
    };
    keys(0);
    wgmma_wait<0>();
    wgmma_use(s);
    long_softmax(s, st, p.to_log2, 0, n);
    long_pack(s, pf);
    if (wg == 1 && rounds > 1)
        named_barrier_arrive(1, 256);
#pragma unroll 1
    for (int round = 1; round < rounds; round++) {
        named_barrier_sync(1 + wg, 256);
        keys(round);
        values(round - 1);
        if (wg == 0 || round + 1 < rounds)
            named_barrier_arrive(2 - wg, 256);
        wgmma_wait<1>();
        wgmma_use(s);
        long_softmax(s, st, p.to_log2, round * LONG_KEYS, n);
        wgmma_wait<0>();
        if (lane == 0)
            bar_arrive(&bars->empty[(round - 1) % LONG_STAGES]);
        wgmma_use(out);
        wgmma_use(s); /* the fragments pf must not be overwritten before P V has finished */
        long_pack(s, pf);
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            out[i] *= st.shrink[i >> 1 & 1];
    }
    values(rounds - 1);
    wgmma_wait<0>();
    wgmma_use(out);
    attn_encode_write<D>(
        p, st, [&](int j, int k) { return out[4 * j + k]; }, h, row0 + w * 16, rows - w * 16);
}

/* Host */

template <int D>
static void attn_encode_long_launch(struct cuda_backend *cu, const struct encode_args &p)
{
    cuda_launch(cu, attn_encode_long_kernel<D>,
                dim3((unsigned)p.n_heads, (unsigned)cu->step.layout.n_q_tiles), LONG_THREADS,
                (size_t)long_shape<D>::BYTES, LAUNCH_EARLY, p);
}

bool attn_encode_long_fits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    int D = l->k_dim;
    bool known = D == 64 || D == 72 || D == 80 || D == 96 || D == 128;
    return known && cu->can.wgmma && attn_encode_fits(l) && !l->window && !l->spans &&
           (size_t)long_shape<128>::BYTES <= cu->shared_limit;
}

void attn_encode_long(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                      struct rows *a)
{
    struct encode_args p = attn_encode_args(cu, l, s, a);
    switch (l->k_dim) {
    case 64:
        attn_encode_long_launch<64>(cu, p);
        break;
    case 72:
        attn_encode_long_launch<72>(cu, p);
        break;
    case 80:
        attn_encode_long_launch<80>(cu, p);
        break;
    case 96:
        attn_encode_long_launch<96>(cu, p);
        break;
    default:
        attn_encode_long_launch<128>(cu, p);
        break;
    }
}
