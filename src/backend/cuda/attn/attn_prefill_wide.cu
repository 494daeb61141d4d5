/*
 * Prefill attention with mma.sync for every option a layer may have (sinks, softcap, window, output
 * gate) and heads of 64 to 512. A block of 8 warps has 64 rows. Queries stay in shared memory;
 * tiles of 64 keys and values pass through it.
 *
 * PAIR: two heads that share a kv head, four warps each. Otherwise one head: two warps share 16
 * rows. Each computes half of the keys' scores, they exchange these, and each has half of the
 * values' columns. This keeps the accumulators at 128 per thread or fewer.
 *
 * QUANT: keys and values are dequantised to fp16 on their way to shared memory. If the values were
 * Hadamard-rotated, a second kernel undoes that on the result and applies the gate.
 */
#include "backend/cuda/attn/attn.cuh"
#include "backend/cuda/attn/attn_softmax.cuh"
#include "backend/cuda/attn/kv_quant.cuh"

enum { WIDE_ROWS = 64, WIDE_KEYS = 64, WIDE_THREADS = 256, WIDE_S_ROW = WIDE_KEYS + 8 };

/* Shared memory. Rows are padded by 16 bytes, so that eight consecutive rows are free of bank
 * conflicts. */
template <int D, bool PAIR> struct attn_prefill_wide_shared {
    enum {
        ROW = 2 * D + 16,
        BUFFERS = D > 256 ? 1 : 2,
        Q_ROWS = WIDE_ROWS * (PAIR ? 2 : 1),
        S_ROWS = PAIR ? 0 : WIDE_ROWS
    };
    uint8_t q[Q_ROWS * ROW];
    uint8_t k[BUFFERS][WIDE_KEYS * ROW];
    uint8_t v[BUFFERS][WIDE_KEYS * ROW];
    float s[S_ROWS * WIDE_S_ROW + 4];
};

/* A block's tile: up to 64 rows of a sequence, and the keys they see. */
struct attn_prefill_wide_tile {
    int row0, rows, first_pos, last_pos, from, kv_head;
    const int32_t *pages;
};

/* The block copies 64 keys or values. Those past the last are copies of the last. */
template <int D>
DEVICE void attn_prefill_wide_fetch(const struct attn_args &p,
                                    const struct attn_prefill_wide_tile &t, const uint8_t *pool,
                                    int base, uint8_t *to)
{
    enum { PIECES = D / 8, ROW = 2 * D + 16 };
    if (base <= t.last_pos)
#pragma unroll 4
        for (int i = (int)threadIdx.x; i < WIDE_KEYS * PIECES; i += WIDE_THREADS) {
            int key = i / PIECES, piece = i - key * PIECES, real = min(base + key, t.last_pos);
            copy_async16(to + key * ROW + piece * 16,
                         pool + 2 * key_offset(p.kv, t.pages, real, t.kv_head, D) +
                             (size_t)piece * 16);
        }
    copy_async_commit();
}

/* The same for a quantised cache: loads eight values at a time and stores them as fp16. */
template <int D, class T>
DEVICE void attn_prefill_wide_fetch_quant(const struct attn_args &p,
                                          const struct attn_prefill_wide_tile &t,
                                          const uint8_t *pool, int base, uint8_t *to)
{
    enum {
        PIECES = D / 8,
        ROW = 2 * D + 16,
        CODES = D / 32 * T::BLOCK,
        SCALES = T::SCALED ? D / 16 : 0 /* bytes per row */
    };
    if (base > t.last_pos)
        return;
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < WIDE_KEYS * PIECES; i += WIDE_THREADS) {
        int key = i / PIECES, piece = i - key * PIECES, real = min(base + key, t.last_pos);
        int off = real & (p.kv.page_len - 1);
        size_t page = (size_t)t.pages[real >> p.kv.page_shift] * (size_t)p.kv.n_kv;
        const uint8_t *at =
            pool + (page + (size_t)t.kv_head) * (size_t)(p.kv.page_len * (CODES + SCALES));
        uint32_t scale = 0;
        if (T::SCALED)
            scale = kv_scale_pair((const uint16_t *)(at + p.kv.page_len * CODES + off * SCALES) +
                                  (piece >> 2));
        *(uint4 *)(to + key * ROW + piece * 16) =
            T::eight(at + off * CODES + piece * (T::BLOCK / 4), scale);
    }
}

/* Loads a tile of keys or of values in whichever type the cache has. */
template <int D, bool QUANT>
DEVICE void attn_prefill_wide_load(const struct attn_args &p,
                                   const struct attn_prefill_wide_tile &t, bool values, int base,
                                   uint8_t *to)
{
    const uint8_t *pool = values ? p.kv.v : p.kv.k;
    if (!QUANT)
        return attn_prefill_wide_fetch<D>(p, t, pool, base, to);
    kv_with(values ? kv_values(p.kv.type) : kv_keys(p.kv.type), [&](auto type) {
        attn_prefill_wide_fetch_quant<D, decltype(type)>(p, t, pool, base, to);
    });
    copy_async_commit();
}

/* Stores the tile's queries, scaled, in shared memory. Rows past the last are copies of the
 * last. */
template <int D, bool BF16, bool PAIR>
DEVICE void attn_prefill_wide_queries(const struct attn_args &p,
                                      const struct attn_prefill_wide_tile &t, int h0, uint8_t *to)
{
    enum { ROW = 2 * D + 16, Q_ROWS = attn_prefill_wide_shared<D, PAIR>::Q_ROWS };
    const float by = p.softcap != 0.0f ? p.scale : 1.4426950408889634f * p.scale;
    for (int i = (int)threadIdx.x; i < Q_ROWS * (D / 4); i += WIDE_THREADS) {
        int r = i / (D / 4), at = (i - r * (D / 4)) * 4, h = h0 + r / WIDE_ROWS;
        int row = t.row0 + min(r % WIDE_ROWS, t.rows - 1);
        float4 e = *(const float4 *)(p.q + ((size_t)row * (size_t)p.n_heads + (size_t)h) * D + at);
        *(uint2 *)(to + r * ROW + at * 2) =
            make_uint2(pack_kv<BF16>(e.x * by, e.y * by), pack_kv<BF16>(e.z * by, e.w * by));
    }
}

/* Grid: (heads or pairs of heads, tiles of 64 rows). The last tiles start first because they
 * have the most keys. */
template <int D, bool BF16, bool PAIR, bool QUANT>
static __global__ void __launch_bounds__(WIDE_THREADS, D > 128 ? 1 : 2)
    attn_prefill_wide_kernel(const __grid_constant__ struct attn_args p, const int2 *tiles)
{
    typedef attn_prefill_wide_shared<D, PAIR> place;
    enum {
        ROW = place::ROW,
        TWO = place::BUFFERS == 2,
        OWN = PAIR ? WIDE_KEYS : WIDE_KEYS / 2, /* keys a warp scores */
        COLUMNS = PAIR ? D : D / 2              /* columns of the values it has */
    };
    SHARED_BYTES(shared);
    place &sh = *(place *)shared;
    dependency_wait();
    dependency_trigger();
    int lane = lane_id(), w = warp_id() & 3, side = warp_id() >> 2, g = lane >> 2, c = lane & 3;
    int h0 = (int)blockIdx.x * (PAIR ? 2 : 1), h = h0 + (PAIR ? side : 0);
    int2 tile = tiles[gridDim.y - 1 - blockIdx.y]; /* sequence, first row */
    struct attn_prefill_wide_tile t;
    t.row0 = tile.y;
    t.rows = min((int)WIDE_ROWS, p.step.q_start[tile.x + 1] - t.row0);
    t.pages = p.step.pages + (size_t)tile.x * (size_t)p.step.head[STEP_PAGE_STRIDE];
    t.first_pos = p.step.pos[t.row0];
    t.last_pos = t.first_pos + t.rows - 1;
    t.from = p.window && t.first_pos - p.window + 1 > 0 ? t.first_pos - p.window + 1 : 0;
    t.from &= p.exact ? ~(WIDE_KEYS - 1) : ~15; /* the same rounds, whichever row is first */
    t.kv_head = h0 * p.kv.n_kv / p.n_heads;

    attn_prefill_wide_load<D, QUANT>(p, t, false, t.from, sh.k[0]);
    if (TWO)
        attn_prefill_wide_load<D, QUANT>(p, t, true, t.from, sh.v[0]);
    attn_prefill_wide_queries<D, BF16, PAIR>(p, t, h0, sh.q);

    const uint8_t *q_at =
        sh.q + ((PAIR ? side * WIDE_ROWS : 0) + w * 16 + (lane & 15)) * ROW + (lane >> 4) * 16;
    int own = PAIR ? 0 : side * OWN, column0 = PAIR ? 0 : side * COLUMNS;
    int pos[2] = {t.first_pos + w * 16 + g, t.first_pos + w * 16 + g + 8};
    float out[COLUMNS / 8][4] = {};
    struct softmax_rows st;
    softmax_clear(st);
#pragma unroll 1
    for (int base = t.from, n = 0; base <= t.last_pos; base += WIDE_KEYS, n ^= TWO) {
        if (TWO)
            copy_async_wait<1>(); /* keys have arrived; values are still in flight */
        else
            copy_async_wait<0>();
        __syncthreads(); /* and all warps have finished the previous round */
        if (TWO) {
            attn_prefill_wide_load<D, QUANT>(p, t, false, base + WIDE_KEYS, sh.k[n ^ TWO]);
            attn_prefill_wide_load<D, QUANT>(p, t, true, base + WIDE_KEYS, sh.v[n ^ TWO]);
        } else {
            attn_prefill_wide_load<D, QUANT>(p, t, true, base, sh.v[0]);
        }
        float s[WIDE_KEYS / 8][4] = {};
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            uint32_t a[4];
            ldmatrix4(a, q_at + i * 32);
#pragma unroll
            for (int j = 0; j < OWN / 16; j++) {
                /* keys 0-7 k 0-7, keys 0-7 k 8-15, keys 8-15 k 0-7, keys 8-15 k 8-15 */
                int key = own + j * 16 + (lane >> 4) * 8 + (lane & 7);
                uint32_t b[4];
                ldmatrix4(b, sh.k[n] + key * ROW + i * 32 + (lane >> 3 & 1) * 16);
                mma_kv<BF16>(s[2 * j], a, b[0], b[1]);
                mma_kv<BF16>(s[2 * j + 1], a, b[2], b[3]);
            }
        }
        bool edge = base + WIDE_KEYS - 1 > t.first_pos + w * 16 ||
                    (p.window && base <= t.first_pos + w * 16 + 15 - p.window);
#pragma unroll
        for (int j = 0; j < OWN / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = base + own + j * 8 + 2 * c + (i & 1);
                if (p.softcap != 0.0f)
                    s[j][i] = 1.4426950408889634f * score_capped(s[j][i], p.softcap);
                if (edge && (key > pos[i >> 1] || (p.window && key <= pos[i >> 1] - p.window)))
                    s[j][i] = -INFINITY;
            }
        if (!PAIR) {
#pragma unroll
            for (int j = 0; j < OWN / 8; j++)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    *(float2 *)(sh.s + (w * 16 + g + 8 * r) * WIDE_S_ROW + own + j * 8 + 2 * c) =
                        make_float2(s[j][2 * r], s[j][2 * r + 1]);
        }
        if (TWO)
            copy_async_wait<2>(); /* values have arrived; the next round is in flight */
        else
            copy_async_wait<0>();
        __syncthreads();
        if (!TWO)
            attn_prefill_wide_load<D, QUANT>(p, t, false, base + WIDE_KEYS, sh.k[0]);
        if (!PAIR) {
#pragma unroll
            for (int j = 0; j < WIDE_KEYS / 8; j++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float2 e =
                        *(const float2 *)(sh.s + (w * 16 + g + 8 * r) * WIDE_S_ROW + j * 8 + 2 * c);
                    s[j][2 * r] = e.x, s[j][2 * r + 1] = e.y;
                }
        }
        softmax_tile<WIDE_KEYS / 2>([&](int i) -> float & { return s[i >> 2][i & 3]; }, st);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[j][i] *= st.shrink[i >> 1];
#pragma unroll
        for (int i = 0; i < WIDE_KEYS / 16; i++) {
            uint32_t pf[4] = {pack_kv<BF16>(s[2 * i][0], s[2 * i][1]),
                              pack_kv<BF16>(s[2 * i][2], s[2 * i][3]),
                              pack_kv<BF16>(s[2 * i + 1][0], s[2 * i + 1][1]),
                              pack_kv<BF16>(s[2 * i + 1][2], s[2 * i + 1][3])};
            const uint8_t *row =
                sh.v[n] + (i * 16 + (lane & 15)) * ROW + column0 * 2 + (lane >> 4) * 16;
#pragma unroll
            for (int j = 0; j < COLUMNS / 16; j++) {
                /* transposed: keys 0-7 d 0-7, keys 8-15 d 0-7, keys 0-7 d 8-15, keys 8-15 d 8-15 */
                uint32_t b[4];
                ldmatrix4_trans(b, row + j * 32);
                mma_kv<BF16>(out[2 * j], pf, b[0], b[1]);
                mma_kv<BF16>(out[2 * j + 1], pf, b[2], b[3]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = softmax_total(st, r);
        int row = w * 16 + g + 8 * r;
        if (row >= t.rows)
            continue;
        bool hidden = p.step.slot[t.row0 + row] < 0;
        float by = hidden ? 0.0f : 1.0f / (total + attn_sink(p, h, st.top[r]));
        float *to = p.a + ((size_t)(t.row0 + row) * (size_t)p.n_heads + (size_t)h) * D;
        const float *gate = attn_gate(p, t.row0 + row, h);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
            int at = column0 + j * 8 + 2 * c;
            float x = hidden ? 0.0f : out[j][2 * r] * by,
                  y = hidden ? 0.0f : out[j][2 * r + 1] * by;
            if (gate)
                x *= sigmoid(gate[at]), y *= sigmoid(gate[at + 1]);
            *(float2 *)(to + at) = make_float2(x, y);
        }
    }
}

/* Undoes the Hadamard rotation of the result and applies the gate, rows from `first` on. Grid:
 * (heads / 8, rows); one warp per head. */
static __global__ void __launch_bounds__(WIDE_THREADS)
    attn_prefill_wide_rotate_kernel(const __grid_constant__ struct attn_args p, int first)
{
    SHARED_BYTES(shared);
    dependency_wait();
    dependency_trigger();
    int D = p.v_dim, h = (int)blockIdx.x * 8 + warp_id(), t = first + (int)blockIdx.y;
    if (h >= p.n_heads)
        return;
    float *head = (float *)shared + warp_id() * D;
    float *row = p.a + ((size_t)t * (size_t)p.n_heads + (size_t)h) * (size_t)D;
    const float *gate = attn_gate(p, t, h);
    for (int i = lane_id(); i < D; i += 32)
        head[i] = row[i];
    kv_head_rotate(head, D);
    for (int i = lane_id(); i < D; i += 32)
        row[i] = gate ? head[i] * sigmoid(gate[i]) : head[i];
}

/* Host */

template <int D, bool BF16, bool PAIR, bool QUANT>
static void attn_prefill_wide_launch(struct cuda_backend *cu, const struct attn_args &p)
{
    dim3 grid((unsigned)(PAIR ? p.n_heads / 2 : p.n_heads), (unsigned)cu->step.layout.n_q_tiles);
    cuda_launch(cu, attn_prefill_wide_kernel<D, BF16, PAIR, QUANT>, grid, WIDE_THREADS,
                sizeof(struct attn_prefill_wide_shared<D, PAIR>), LAUNCH_EARLY, p,
                (const int2 *)(cu->step.dev + cu->step.layout.q_tiles));
}

template <int D, bool BF16, bool CAN_PAIR, bool QUANT>
static void attn_prefill_wide_pair(struct cuda_backend *cu, const struct attn_args &p)
{
    if (CAN_PAIR && p.n_heads / p.kv.n_kv % 2 == 0)
        attn_prefill_wide_launch<D, BF16, CAN_PAIR, QUANT>(cu, p);
    else
        attn_prefill_wide_launch<D, BF16, false, QUANT>(cu, p);
}

template <int D, bool CAN_PAIR>
static void attn_prefill_wide_type(struct cuda_backend *cu, const struct attn_args &p)
{
    if (cu->shape.kv_type == DT_F16)
        attn_prefill_wide_pair<D, false, CAN_PAIR, false>(cu, p);
    else if (cu->shape.kv_type == DT_BF16)
        attn_prefill_wide_pair<D, true, CAN_PAIR, false>(cu, p);
    else
        attn_prefill_wide_pair<D, false, CAN_PAIR, true>(cu, p);
}

template <int D, bool PAIR> static size_t attn_prefill_wide_bytes(void)
{
    return sizeof(struct attn_prefill_wide_shared<D, PAIR>);
}

static bool attn_prefill_wide_has_room(const struct cuda_backend *cu, int D)
{
    size_t bytes = D <= 96    ? attn_prefill_wide_bytes<96, true>()
                   : D <= 128 ? attn_prefill_wide_bytes<128, true>()
                   : D <= 256 ? attn_prefill_wide_bytes<256, true>()
                              : attn_prefill_wide_bytes<512, false>();
    return bytes <= cu->shared_limit;
}

bool attn_prefill_wide_fits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    return attn_wide_suits(cu, l) && attn_prefill_wide_has_room(cu, l->k_dim);
}

bool attn_prefill_wide_quant_fits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    return attn_quant_suits(cu, l) && attn_prefill_wide_has_room(cu, l->k_dim);
}

static void attn_prefill_wide_dim(struct cuda_backend *cu, const struct attn_args &p)
{
    switch (p.kv.head_dim) {
    case 64:
        attn_prefill_wide_type<64, true>(cu, p);
        break;
    case 96:
        attn_prefill_wide_type<96, true>(cu, p);
        break;
    case 128:
        attn_prefill_wide_type<128, true>(cu, p);
        break;
    case 256:
        attn_prefill_wide_type<256, true>(cu, p);
        break;
    default:
        attn_prefill_wide_type<512, false>(cu, p);
        break;
    }
}

void attn_prefill_wide(struct cuda_backend *cu, const struct attn_args &p)
{
    enum dtype v = cu->shape.v_type;
    if (v != DT_Q8_0 && v != DT_Q4_0) {
        attn_prefill_wide_dim(cu, p);
        return;
    }
    struct attn_args ungated = p;
    ungated.gate = NULL;
    attn_prefill_wide_dim(cu, ungated);
    int rows = p.step.n_tokens - p.step.n_decode;
    cuda_launch(cu, attn_prefill_wide_rotate_kernel,
                dim3((unsigned)ceil_div(p.n_heads, 8), (unsigned)rows), WIDE_THREADS,
                (size_t)(8 * p.v_dim * 4), LAUNCH_EARLY, p, p.step.n_decode);
}
