/*
 * What the products of several token rows share: the order of fp16 activations in fragments,
 * activation tiles in shared memory, and the routing tables that map rows to experts.
 */
#ifndef STEEL_BACKEND_CUDA_GEMM_CUH
#define STEEL_BACKEND_CUDA_GEMM_CUH

#include "backend/cuda/core/act.cuh"
#include "backend/cuda/core/dot.cuh"
#include "backend/cuda/moe/route.cuh"

/* The hidden units of a feed-forward are stored as fp16, scaled by 1/16 so that large ones do not
 * overflow. */
#define HIDDEN_SCALE 0.0625f

/* Position of column k (0..15) within a fragment's row: lane c's columns 4c..4c+3 are stored at 2c,
 * 2c+1, 2c+8, 2c+9. */
DEVICE int fragment_slot(int k)
{
    return (k & ~15) + 2 * (k >> 2 & 3) + (k & 1) + 8 * (k >> 1 & 1);
}
DEVICE float clamp_half(float v)
{
    return fminf(fmaxf(v, -65504.0f), 65504.0f);
}

/* Routing tables. They are offsets in ints from the start of cu->routing.tables. */
struct route_tables {
    int32_t *n_tiles; /* entries of the work list; [1], [2]: arrival counters */
    int32_t *tiles;   /* (max tiles, 3): expert, first sorted pair, pairs */
    int32_t *pairs;   /* (rows * used) pair = row * used + k, sorted by expert */
    int32_t *chosen;  /* (rows * used) expert of each pair */
    /* For many rows, each expert has a list with room for every row, so pairs need no sorting. */
    int32_t *lists;  /* (n_expert, room) or NULL */
    int32_t *counts; /* (n_expert) zero between steps */
    int32_t *places; /* (max tiles) first pair of a tile within lists */
    int32_t *done;   /* (max tiles) gemm_persistent.cu: finished blocks of a tile's hidden units */
    int room;
};

/* Epilogue of the q, k, v projection for heads of 128: normalises and rotates q and k, writes q to
 * `q` and k, v to the KV cache. Output rows 128h .. 128h+127 are head h. Query heads come first,
 * then keys, then values. */
struct gemm_heads {
    bool set, bf16;
    float *q;                     /* (n_tokens, H, 128) */
    uint16_t *k, *v;              /* (n_pages, K, page_len, 128) */
    const float *q_norm, *k_norm; /* (128) or NULL */
    const float2 *rope;           /* (n_tokens, 64) */
    const int32_t *slot;          /* (n_tokens) */
    int n_heads, n_kv, page_len;
    float eps;
};

struct gemm_args {
    struct matrix w;
    const uint16_t *x;    /* (., ldx) fp16 */
    const float *x_scale; /* (.) inverse of a row's scale; NULL = 1 */
    float *y;             /* (., ldy), or NULL */
    uint16_t *y_fp16;     /* PAIR: hidden units (., ldy) */
    struct gating act;    /* PAIR */
    int ldx, rows, ldy;
    float unscale;    /* factor of the result */
    int stages, slot; /* ring stages per warp; bytes of a stage (one tile) */
    /* experts */
    bool moe, sorted_in; /* sorted_in: x rows are sorted pairs (hidden units), not token rows */
    int used;
    struct route_tables route;
    /* gemm_wgmma.cu */
    float *part; /* partial sums of a split-k product, or NULL */
    bool narrow; /* y is fp16, scaled by HIDDEN_SCALE */
    int kt_per;  /* k tiles of one k split */
    int width;   /* rows of a tile of a dense product */
    int blocks;  /* blocks of 128 output rows */
    struct gemm_heads heads;
    /* gemm_splitk.cu */
    int n_units, units_per_block, k_warps, groups;
    bool b_in_ring, sums_in_ring;
};

/* The rows of a block's tile: input row, output row, and inverse scale of each. */
struct gemm_rows {
    int *in, *out; /* (BN) -1 = none */
    float *scale;  /* (BN) */
    int expert, count;
};

/* Fills r for tile number `tile` of `width` rows. `room` is the tables' capacity (0: width).
 * Returns false past the end of the work list. Ends with a barrier. */
DEVICE bool gemm_rows_load(const struct gemm_args &p, struct gemm_rows &r, int tile, int width,
                           int room = 0)
{
    room = room ? room : width;
    int first = tile * width;
    r.expert = 0;
    r.count = min(width, p.rows - first);
    if (p.moe) {
        if (tile >= *p.route.n_tiles)
            return false;
        const int32_t *t = p.route.tiles + 3 * tile;
        r.expert = t[0];
        first = t[1];
        r.count = t[2];
    }
    for (int i = (int)threadIdx.x; i < room; i += (int)blockDim.x) {
        int in = -1, out = -1;
        if (i < r.count) {
            in = out = first + i;
            if (p.moe) {
                const struct route_tables &t = p.route;
                int pair = t.lists ? t.lists[t.places[tile] + i] : t.pairs[first + i];
                in = p.sorted_in ? first + i : pair / p.used;
                out = p.sorted_in ? pair : first + i;
            }
        }
        r.in[i] = in;
        r.out[i] = out;
        r.scale[i] = (p.x_scale && in >= 0 ? p.x_scale[in] : 1.0f) * p.unscale;
    }
    __syncthreads();
    return true;
}

/* Writes one output of the mma.sync kernels: output row `row` of segment s, for the tile's row
 * `col`. */
DEVICE void gemm_store(const struct gemm_args &p, const struct gemm_rows &rows, const struct seg *s,
                       int col, int row, float v)
{
    if (row < s->rows)
        p.y[(size_t)rows.out[col] * (size_t)p.ldy + (size_t)(s->row0 + row)] =
            v * rows.scale[col] +
            (p.w.bias ? p.w.bias[rows.expert * p.w.n_out + s->row0 + row] : 0.0f);
}
/* Writes one hidden unit, from gate and up. Hidden units that pad a tile are 0. */
DEVICE void gemm_store_pair(const struct gemm_args &p, const struct gemm_rows &rows,
                            const struct seg *s, int col, int row, float gate, float up)
{
    gate *= rows.scale[col];
    up *= rows.scale[col];
    if (row >= s->rows)
        gate = up = 0.0f;
    else if (p.w.bias) {
        const float *bias = p.w.bias + rows.expert * p.w.n_out;
        gate += bias[row];
        up += bias[p.w.n_out / 2 + row];
    }
    p.y_fp16[(size_t)rows.out[col] * (size_t)p.ldy + (size_t)fragment_slot(row)] =
        float_to_half(clamp_half(gated(p.act, gate, up) * HIDDEN_SCALE));
}
/* Clears the hidden units from the last one of `tiles` up to a whole k tile. */
DEVICE void gemm_zero_tail(const struct gemm_args &p, const struct gemm_rows &rows, int tiles)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < rows.count * TILE_K; i += (int)blockDim.x) {
        int col = tiles * TILE_ROWS + (i & (TILE_K - 1));
        if (col < p.ldy)
            p.y_fp16[(size_t)rows.out[i / TILE_K] * (size_t)p.ldy + (size_t)col] = 0;
    }
}

/* acc += tiles x B for 64 columns. bs is a k tile of the activations in shared memory: rows of 512
 * bytes, whose 16-byte pieces are swizzled by the row. With ALL, columns past n_active are computed
 * too (nobody reads the results): without branches, loads overlap with products. */
template <int NT, bool ALL = false, int TILES>
DEVICE void chunk_mma(const uint32_t (&a)[TILES][4][4], const uint8_t *bs, int q, int n_active,
                      float (&acc)[TILES][NT][4])
{
    int lane = lane_id();
    if constexpr (NT == 1) {
#pragma unroll
        for (int j = 0; j < 4; j += 2) {
            int row = lane & 7, piece = q * 8 + j * 2 + (lane >> 3);
            uint32_t b[4];
            ldmatrix4(b, bs + row * (TILE_K * 2) + ((piece ^ row) << 4));
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                mma_f16(acc[i][0], a[i][j], b[0], b[1]);
                mma_f16(acc[i][0], a[i][j + 1], b[2], b[3]);
            }
        }
    } else {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int piece = q * 8 + j * 2 + (lane >> 3 & 1);
#pragma unroll
            for (int n = 0; n < NT / 2; n++) {
                if (ALL || n * 2 < n_active) {
                    int row = n * 16 + (lane >> 4) * 8 + (lane & 7);
                    uint32_t b[4];
                    ldmatrix4(b, bs + row * (TILE_K * 2) + ((piece ^ (row & 7)) << 4));
#pragma unroll
                    for (int i = 0; i < TILES; i++) {
                        mma_f16(acc[i][2 * n], a[i][j], b[0], b[1]);
                        mma_f16(acc[i][2 * n + 1], a[i][j], b[2], b[3]);
                    }
                }
            }
        }
    }
}

/* Loads the B fragments of 32 columns (column group `group`) for NT tiles of 8 rows: b[n] = {k
 * 0-15: 2 registers, k 16-31: 2 registers}. */
template <int NT> DEVICE void group_rows(const uint8_t *bs, int group, uint32_t (&b)[NT][4])
{
    int lane = lane_id();
    if constexpr (NT == 1) {
        int row = lane & 7, piece = group * 4 + (lane >> 3);
        ldmatrix4(b[0], bs + row * (TILE_K * 2) + ((piece ^ row) << 4));
    } else {
#pragma unroll
        for (int n = 0; n < NT; n += 2)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                int row = n * 8 + (lane >> 4) * 8 + (lane & 7);
                int piece = group * 4 + j * 2 + (lane >> 3 & 1);
                uint32_t r[4];
                ldmatrix4(r, bs + row * (TILE_K * 2) + ((piece ^ (row & 7)) << 4));
                b[n][2 * j] = r[0], b[n][2 * j + 1] = r[1];
                b[n + 1][2 * j] = r[2], b[n + 1][2 * j + 1] = r[3];
            }
    }
}

/* acc += tile x B for few rows, without converting weights to fp16, which would take more
 * instructions. Codes go to the tensor core as in dot.cuh. A fragment of constants first adds the
 * negated contribution of the code offset (and, for codes without a zero point, the factors of the
 * minima). Scales multiply the float sums of each group. */
template <int KIND, int NT>
DEVICE void tile_few(const uint8_t *tile, const uint8_t *bs, float (&acc)[NT][4])
{
    typedef format<KIND> F;
    typedef typename F::codes C;
    static_assert(F::MINS == 0 || (F::MINS == 1 && C::BYTE_ZERO == 0), "what minima multiply");
    int lane = lane_id();
    const uint32_t low = H2_LESS_1024(C::less(0) - 1024.0f),
                   high = H2_LESS_1024(C::less(1) - 1024.0f);
    const uint32_t less[4] = {low, high, low, high};
    const float zero[4] = {};
    float scaled[NT][4] = {}, minima[NT][4] = {};
    typename F::scales sc;
#pragma unroll 1
    for (int q = 0; q < 4; q++) {
        C w;
        w.fetch(tile, q, lane);
        sc.fetch(tile + F::SCALES_AT, q, lane >> 2);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t a[2][4], b[NT][4];
            w.raw(2 * h, a[0]);
            w.raw(2 * h + 1, a[1]);
            group_rows<NT>(bs, 2 * q + h, b);
#pragma unroll
            for (int n = 0; n < NT; n++) {
                float t[2][4];
                mma_f16_from(t[0], less, b[n][0], b[n][1], zero);
                if constexpr (F::GROUP == 32) {
                    float c[4];
                    mma_f16_from(t[1], less, b[n][2], b[n][3], t[0]);
                    mma_f16_from(c, a[0], b[n][0], b[n][1], t[1]);
                    mma_f16(c, a[1], b[n][2], b[n][3]);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        scaled[n][e] += sc.scale(e >> 1, h) * c[e];
                        if constexpr (F::MINS != 0)
                            minima[n][e] += sc.least(e >> 1, h) * t[1][e];
                    }
                } else {
                    mma_f16_from(t[1], less, b[n][2], b[n][3], zero);
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        mma_f16(t[i], a[i], b[n][2 * i], b[n][2 * i + 1]);
#pragma unroll
                        for (int e = 0; e < 4; e++)
                            scaled[n][e] += sc.scale(e >> 1, 2 * h + i) * t[i][e];
                    }
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            acc[n][e] += sc.row(e >> 1) * C::unit(e >> 1) * scaled[n][e];
            if constexpr (F::MINS != 0)
                acc[n][e] -= sc.row_least(e >> 1) * 0x1p-10f * minima[n][e];
        }
}

/* Calls f(SET, NT, PAIR), each wrapped by kind_is: the kernel instance for tiles of `width` rows.
 * Not every set has every width, to limit compile time. */
template <class F>
static inline void gemm_variant(const struct matrix &w, bool pair, int width, F f)
{
    auto sized = [&](auto is_pair) {
        if (w.set != SET_K)
            f(kind_is<SET_FAST>(), kind_is<2>(), is_pair);
        else if (width == 8)
            f(kind_is<SET_K>(), kind_is<1>(), is_pair);
        else if (width == 16)
            f(kind_is<SET_K>(), kind_is<2>(), is_pair);
        else
            f(kind_is<SET_K>(), kind_is<4>(), is_pair);
    };
    pair ? sized(kind_is<true>()) : sized(kind_is<false>());
}

/* moe_route.cu: turns router logits into weights and tables. moe_route_tiles: most entries of a
 * work list of `width` rows each. moe_route_tables: the tables within cu->routing.tables. */
struct moe_route_args {
    const float *logits; /* (splits, rows, n_expert), added up by the kernel */
    int parts, rows, width;
    struct route_rule rule;
    bool even; /* an expert's tiles get about equal sizes, not full tiles and a rest */
    struct route_tables t;
    float *weight; /* (rows * used) */
};
enum { MOE_ROUTE_MIN_TILE = 8 };
int moe_route_tiles(int rows, int used, int n_expert, int width);
struct route_tables moe_route_tables(const struct cuda_backend *cu);
void moe_route(struct cuda_backend *cu, const struct moe_route_args &p);
/* moe_grouped.cu: runs the experts of a sorted list of at most `most` entries of `width` rows, from
 * cu->forms.records to cu->mlp.expert_out. narrow: the output is fp16, scaled by 1/16. */
bool moe_grouped_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                      const struct matrix *down, int n_pairs, int most, int width);
void moe_grouped(struct cuda_backend *cu, const struct experts *e, const struct route_tables *route,
                 int n_pairs, int most, int width, bool narrow);
/* Builds the work list of experts already chosen and weighted. */
void moe_grouped_route(struct cuda_backend *cu, const struct route_tables *route,
                       const struct route_rule &rule, int rows, int width);
/* router.cu: logits, experts and weights of a batch in one kernel */
bool router_choose_fits(const struct cuda_backend *cu, const struct matrix *w);
void router_choose(struct cuda_backend *cu, const struct matrix *w, const struct route_rule &rule,
                   const struct route_tables *route, const float *x, int rows);
/* gemm_stream.cu; blocks: of one launch */
bool gemm_stream_fits(const struct cuda_backend *cu, const struct gemm_args &p, bool pair,
                      int width);
int gemm_stream_blocks(const struct cuda_backend *cu, const struct gemm_args &p, bool pair,
                       int width);
void gemm_stream(struct cuda_backend *cu, const struct gemm_args &p, bool pair, int width, int y);
/* gemm_splitk.cu */
void gemm_splitk(struct cuda_backend *cu, struct gemm_args p, bool pair, int width, int y);
/* gemm_mma.cu; fits: shared memory holds its blocks */
bool gemm_mma_fits(const struct cuda_backend *cu, const struct matrix *w);
void gemm_mma(struct cuda_backend *cu, struct gemm_args p, bool pair, int width, int y);
/* gemm_fp16.cu: many rows, fp16 weights */
bool gemm_fp16_suits(const struct cuda_backend *cu, const struct matrix *w);
int gemm_fp16_tiles(const struct matrix *w, int rows); /* tiles of the result */
void gemm_fp16(struct cuda_backend *cu, const struct gemm_args &p);
/* gemm_wgmma.cu: tiles of WGMMA_ROWS rows */
enum { WGMMA_ROWS = 128 };
void gemm_wgmma(struct cuda_backend *cu, const struct gemm_args &p, bool pair, int y);
/* gemm_persistent.cu: quantised experts, many rows, persistent blocks */
enum { PERSISTENT_ROWS = 128 };
bool gemm_persistent_suits(const struct cuda_backend *cu, const struct matrix *gate_up,
                           const struct matrix *down);
int gemm_persistent_expert_rows(int pairs,
                                int n_expert); /* largest tile of the work list, in rows */
void gemm_persistent_experts(struct cuda_backend *cu, const struct gemm_args &in,
                             const struct gemm_args &out, int width);

#endif
