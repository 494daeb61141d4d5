/*
 * Prefill attention on Hopper with wgmma: heads of 128, fp16 or bf16 cache. The kernel is
 * warp-specialised: two consumer warpgroups have the same 64 rows of two heads that share a kv
 * head, and one producer warpgroup copies tiles of 128 keys and values into a ring of three stages.
 * A consumer issues q K^T of a round together with P V of the previous round, and computes the
 * round's softmax while that P V is in flight. The consumers take turns issuing MMA (ping-pong).
 * Everything else goes to attn_prefill_mma.cu and attn_prefill_wide.cu.
 */
#include "backend/cuda/attn/attn.cuh"
#include "backend/cuda/attn/attn_softmax.cuh"
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/core/wgmma.cuh"

enum {
    PREFILL_ROWS = 64,
    PREFILL_KEYS = 128,
    PREFILL_D = 128,
    PREFILL_STAGES = 3,
    PREFILL_HEADS = 2
};
enum {
    PREFILL_PANEL = PREFILL_KEYS * 128, /* 64 elements of each of the tile's keys */
    PREFILL_TILE = 2 * PREFILL_PANEL,   /* keys, or values */
    PREFILL_STAGE = 2 * PREFILL_TILE,   /* both */
    PREFILL_CONSUMERS = PREFILL_HEADS * 128,
    PREFILL_THREADS = PREFILL_CONSUMERS + 128,
    PREFILL_SHARED = 1024 + PREFILL_STAGES * PREFILL_STAGE + 256
};
/* Registers per thread of consumers and producer. The block starts with 168 for each of three
 * warpgroups; setmaxnreg only redistributes them. */
enum { PREFILL_CONSUMER_REGS = 232, PREFILL_PRODUCER_REGS = 40 };

/* Keys loaded, values loaded, and stage free. */
struct attn_prefill_bars {
    uint64_t keys[PREFILL_STAGES], values[PREFILL_STAGES], empty[PREFILL_STAGES];
};

struct attn_prefill_args {
    const uint8_t *k, *v; /* (n_pages, K, page_len, D) */
    struct step step;
    const float *q;     /* (n_tokens, H, D) */
    float *a;           /* (n_tokens, H, D) */
    uint16_t *fp16_out; /* (n_tokens, H * D) the result as the next GEMM reads it, or NULL */
    float *fp16_scale;  /* (n_tokens) */
    const int2 *tiles;  /* sequence, first row */
    int n_tiles, n_heads, n_kv, page_len, page_shift, window;
    float scale;
};

/* Scores to probabilities. edge: the mask hides some of these keys from some rows. */
DEVICE void attn_prefill_softmax(float (&s)[PREFILL_KEYS / 2], struct softmax_rows &st,
                                 const int (&pos)[2], int base, bool edge, int window)
{
    auto sum = [&](int i) -> float & { return s[i]; };
    if (edge)
        softmax_mask<PREFILL_KEYS / 2>(sum, pos, base, window);
    softmax_tile<PREFILL_KEYS / 2>(sum, st);
}

template <bool BF16>
DEVICE void attn_prefill_pack(const float (&s)[PREFILL_KEYS / 2],
                              uint32_t (&pf)[PREFILL_KEYS / 16][4])
{
#pragma unroll
    for (int i = 0; i < PREFILL_KEYS / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            pf[i][j] = pack_kv<BF16>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
}

/* The keys a block reads: `from` .. `last` of a sequence, in rounds of PREFILL_KEYS. */
struct attn_prefill_span {
    const int32_t *pages;
    int from, last, rounds, kv_head;
};

/* The producer warpgroup. */
DEVICE void attn_prefill_producer(const struct attn_prefill_args &p,
                                  const struct attn_prefill_span &f, uint8_t *shared,
                                  struct attn_prefill_bars *bars)
{
    const int PER = PREFILL_KEYS / 16;
    int id = (int)threadIdx.x & 127, piece = id & 7, key0 = id >> 3, stage = 0, phase = 1;
    uint8_t *to = shared + key0 * 128 + ((piece ^ (key0 & 7)) << 4);
#pragma unroll 1
    for (int round = 0; round < f.rounds; round++) {
        uint32_t row[PER]; /* of the cache */
#pragma unroll
        for (int i = 0; i < PER; i++) {
            int key = min(f.from + round * PREFILL_KEYS + i * 16 + key0, f.last);
            uint32_t page = (uint32_t)f.pages[key >> p.page_shift];
            row[i] = ((page * (uint32_t)p.n_kv + (uint32_t)f.kv_head) << p.page_shift) +
                     (uint32_t)(key & (p.page_len - 1));
        }
        bar_wait(&bars->empty[stage], phase);
#pragma unroll
        for (int v = 0; v < 2; v++) {
            uint8_t *at = to + stage * PREFILL_STAGE + v * PREFILL_TILE;
            const uint8_t *base = (v ? p.v : p.k) + piece * 16;
#pragma unroll
            for (int i = 0; i < PER; i++) {
                const uint8_t *key = base + (size_t)row[i] * (PREFILL_D * 2);
                copy_async16(at + i * 2048, key);
                copy_async16(at + i * 2048 + PREFILL_PANEL, key + 128);
            }
            bar_arrive_copies(v ? &bars->values[stage] : &bars->keys[stage]);
        }
        if (++stage == PREFILL_STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
    copy_async_commit();
    copy_async_wait<0>();
}

/* A fragments of the queries of this warp's rows g and g+8, scaled to units of log2. */
template <bool BF16>
DEVICE void attn_prefill_queries(const struct attn_prefill_args &p, int h, int row0, int rows,
                                 uint32_t (&qf)[PREFILL_D / 16][4])
{
    int w = warp_id() & 3, g = lane_id() >> 2, c = lane_id() & 3, H = p.n_heads;
    const float to_log2 = 1.4426950408889634f * p.scale;
#pragma unroll
    for (int i = 0; i < PREFILL_D / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = min(w * 16 + g + 8 * (j & 1), rows - 1), d = i * 16 + 2 * c + 8 * (j >> 1);
            float2 e =
                *(const float2 *)(p.q + ((size_t)(row0 + r) * (size_t)H + (size_t)h) * PREFILL_D +
                                  (size_t)d);
            qf[i][j] = pack_kv<BF16>(e.x * to_log2, e.y * to_log2);
        }
}

/* Epilogue: writes a warpgroup's 64 rows, of which `rows` exist, as floats or as fp16. */
DEVICE void attn_prefill_write(const struct attn_prefill_args &p, const struct softmax_rows &st,
                               const float (&out)[PREFILL_D / 2], int h, int row0, int rows)
{
    int w = warp_id() & 3, g = lane_id() >> 2, c = lane_id() & 3, H = p.n_heads;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = softmax_total(st, r);
        int row = w * 16 + g + 8 * r;
        bool mine = row < rows, hidden = !mine || p.step.slot[row0 + row] < 0;
        float inv = hidden ? 0.0f : 1.0f / total;
        size_t at = ((size_t)(row0 + row) * (size_t)H + (size_t)h) * PREFILL_D;
#pragma unroll
        for (int j = 0; j < PREFILL_D / 8; j += 2) {
            float v[4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = hidden ? 0.0f : out[4 * (j + i / 2) + 2 * r + i % 2] * inv;
            if (mine && p.a) {
                *(float2 *)(p.a + at + j * 8 + 2 * c) = make_float2(v[0], v[1]);
                *(float2 *)(p.a + at + j * 8 + 2 * c + 8) = make_float2(v[2], v[3]);
            }
            if (!p.fp16_out)
                continue;
            /* fp16 does not overflow: a mean of values is no larger than the largest value. */
            softmax_fp16_put(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]),
                             p.fp16_out + at + j * 8, mine);
        }
        if (p.fp16_out && mine && h == 0 && c == 0)
            p.fp16_scale[row0 + row] = 1.0f;
    }
}

/* Grid: (pairs of heads, tiles of 64 rows). The last tiles start first because they have the
 * most keys. */
template <bool BF16>
static __global__ void __launch_bounds__(PREFILL_THREADS, 1)
    attn_prefill_kernel(const __grid_constant__ struct attn_prefill_args p)
{
    SHARED_BYTES(raw);
    uint8_t *shared = shared_align(raw, 1024);
    struct attn_prefill_bars *bars =
        (struct attn_prefill_bars *)(shared + PREFILL_STAGES * PREFILL_STAGE);
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < PREFILL_STAGES; i++) {
            bar_init(&bars->keys[i], 128);
            bar_init(&bars->values[i], 128);
            bar_init(&bars->empty[i], PREFILL_CONSUMERS / 32);
        }
        bar_ready();
    }
    dependency_wait();
    dependency_trigger();
    __syncthreads();
    int lane = lane_id(), w = warp_id() & 3, g = lane >> 2, wg = warp_id() >> 2;
    int h = (int)blockIdx.x * PREFILL_HEADS + min(wg, PREFILL_HEADS - 1), H = p.n_heads;
    int2 tile = p.tiles[p.n_tiles - 1 - (int)blockIdx.y];
    int seq = tile.x, row0 = tile.y, rows = min((int)PREFILL_ROWS, p.step.q_start[seq + 1] - row0);
    int first_pos = p.step.pos[row0];
    int from = p.window && first_pos - p.window + 1 > 0 ? first_pos - p.window + 1 : 0;
    from &= ~(PREFILL_KEYS - 1);
    struct attn_prefill_span f;
    f.pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    f.from = from;
    f.last = first_pos + rows - 1;
    f.rounds = (f.last - from) / PREFILL_KEYS + 1;
    f.kv_head = h * p.n_kv / H;
    if (wg == PREFILL_HEADS) {
        registers_lower<PREFILL_PRODUCER_REGS>();
        attn_prefill_producer(p, f, shared, bars);
        return;
    }
    registers_raise<PREFILL_CONSUMER_REGS>();
    int rounds = f.rounds;

    uint32_t qf[PREFILL_D / 16][4];
    attn_prefill_queries<BF16>(p, h, row0, rows, qf);
    struct softmax_rows st;
    softmax_clear(st);
    const int pos[2] = {first_pos + w * 16 + g, first_pos + w * 16 + g + 8};
    float out[PREFILL_D / 2] = {}, s[PREFILL_KEYS / 2] = {};
    uint32_t pf[PREFILL_KEYS / 16][4];
    wgmma_use(out);
    wgmma_use(s);
    auto keys = [&](int round) {
        bar_wait(&bars->keys[round % PREFILL_STAGES], round / PREFILL_STAGES);
        wgmma_publish();
        wgmma_fence();
        const uint8_t *ks = shared + round % PREFILL_STAGES * PREFILL_STAGE;
        uint64_t desc = wgmma_desc(ks);
#pragma unroll
        for (int i = 0; i < PREFILL_D / 16; i++) {
            uint64_t at = desc + (uint64_t)((i >> 2) * (PREFILL_PANEL >> 4) + (i & 3) * 2);
            if (i == 0)
                wgmma<PREFILL_KEYS, BF16, true>(s, qf[i], at);
            else
                wgmma<PREFILL_KEYS, BF16>(s, qf[i], at);
        }
        wgmma_commit();
    };
    auto values = [&](int round) {
        bar_wait(&bars->values[round % PREFILL_STAGES], round / PREFILL_STAGES);
        wgmma_publish();
        wgmma_fence();
        const uint8_t *vs = shared + round % PREFILL_STAGES * PREFILL_STAGE + PREFILL_TILE;
        uint64_t desc = wgmma_desc_transposed(vs, PREFILL_PANEL);
#pragma unroll
        for (int i = 0; i < PREFILL_KEYS / 16; i++)
            wgmma<PREFILL_D, BF16, false, true>(out, pf[i], desc + (uint64_t)(i * (2048 >> 4)));
        wgmma_commit();
    };
    auto edge = [&](int round) {
        return from + (round + 1) * PREFILL_KEYS - 1 > first_pos + w * 16 || p.window;
    };
    keys(0);
    wgmma_wait<0>();
    wgmma_use(s);
    attn_prefill_softmax(s, st, pos, from, edge(0), p.window);
    attn_prefill_pack<BF16>(s, pf);
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
        attn_prefill_softmax(s, st, pos, from + round * PREFILL_KEYS, edge(round), p.window);
        wgmma_wait<0>();
        if (lane == 0)
            bar_arrive(&bars->empty[(round - 1) % PREFILL_STAGES]);
        wgmma_use(out);
        wgmma_use(s); /* the fragments pf must not be overwritten before P V has finished */
        attn_prefill_pack<BF16>(s, pf);
#pragma unroll
        for (int i = 0; i < PREFILL_D / 2; i++)
            out[i] *= st.shrink[i >> 1 & 1];
    }
    values(rounds - 1);
    wgmma_wait<0>();
    wgmma_use(out);
    attn_prefill_write(p, st, out, h, row0, rows);
}

bool attn_prefill_suits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    return cu->can.wgmma && l->k_dim == PREFILL_D && l->n_heads / l->n_kv % PREFILL_HEADS == 0 &&
           PREFILL_SHARED <= cu->shared_limit;
}

void attn_prefill_part(struct cuda_backend *cu, const struct attn_args &from, bool fp16_out,
                       int first, int n)
{
    struct attn_prefill_args p = {};
    p.k = from.kv.k;
    p.v = from.kv.v;
    p.step = from.step;
    p.q = from.q;
    p.a = fp16_out ? NULL : from.a;
    p.tiles = (const int2 *)(cu->step.dev + cu->step.layout.q_tiles) + first;
    p.n_tiles = n;
    p.n_heads = from.n_heads;
    p.n_kv = from.kv.n_kv;
    p.page_len = from.kv.page_len;
    p.page_shift = from.kv.page_shift;
    p.window = from.window;
    p.scale = from.scale;
    p.fp16_out = fp16_out ? cu->forms.fp16 : NULL;
    p.fp16_scale = cu->forms.scale;
    dim3 grid((unsigned)(p.n_heads / PREFILL_HEADS), (unsigned)p.n_tiles);
    auto kernel = from.kv.type == DT_F16 ? attn_prefill_kernel<false> : attn_prefill_kernel<true>;
    cuda_launch(cu, kernel, grid, PREFILL_THREADS, PREFILL_SHARED, LAUNCH_EARLY, p);
}

void attn_prefill(struct cuda_backend *cu, const struct attn_args &p, bool fp16_out)
{
    attn_prefill_part(cu, p, fp16_out, 0, cu->step.layout.n_q_tiles);
}
