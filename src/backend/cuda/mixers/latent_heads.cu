/*
 * MLA's per-head matrices for one decode or a few: y_h = x_h W_h^T. A matrix is small (512 x 192)
 * and there are many, so latency is the limit. A block has one head of one row and eight tiles of
 * 16 x 256, one per warp, whose loads are issued before dependency_wait. The neighbouring
 * operations are fused. With the product before attention: RoPE of the queries, and the cache row
 * in a block of its own. With the product after attention: combining the splits of the keys.
 */
#include "backend/cuda/mixers/latent_row.cuh"
#include "backend/cuda/core/ring.cuh"

enum { HEADS_WARPS = 8, HEADS_PREFETCH = 8 /* splits loaded at once */ };

struct heads_gemv_args {
    struct matrix w;
    float *y;    /* (rows, H, n_out) */
    int n_heads; /* H */
    int tiles;   /* tiles per block; each spans all of k */
    int blocks;  /* blocks per head */
    /* queries */
    float *q; /* (rows, H, Dn + Dr): the first Dn are the product's input, the others get RoPE */
    int nope, rotate_blocks; /* rotate_blocks: blocks that apply RoPE */
    bool store;              /* also stores the row in the cache */
    struct latent_row_args row;
    /* the result of attention */
    struct latent_args attn;
    struct latent_splits splits;
};

/* One block: the attention result of row t and head h, its splits combined, to x (C floats). */
DEVICE void heads_gather(const struct heads_gemv_args &p, int t, int h, float *x)
{
    const struct latent_args &a = p.attn;
    int tid = (int)threadIdx.x, lane = lane_id(), n = p.splits.n_split;
    if (n <= 1) {
        for (int i = tid; i < a.rank; i += HEADS_WARPS * 32)
            x[i] = half_to_float(*latent_sum_at(a, t, h, i));
        return;
    }
    /* Only splits up to the last key have been written. */
    int M = p.splits.rows, last = a.step.pos[t], live = 0;
    if (last >= 0)
        live = last / latent_part_keys(last, n) + 1;
    size_t unit = (size_t)t * (size_t)((p.n_heads + M - 1) / M) + (size_t)(h / M);
    size_t row0 = unit * (size_t)n * (size_t)M + (size_t)(h % M);
    const float *part = a.part + row0 * LATENT_RANK + 2 * tid;
    size_t stride = (size_t)M * LATENT_RANK;
    float2 v[HEADS_PREFETCH];
#pragma unroll
    for (int j = 0; j < HEADS_PREFETCH; j++)
        v[j] = j < live ? *(const float2 *)(part + (size_t)j * stride) : make_float2(0.0f, 0.0f);
    float m[LATENT_MAX_SPLIT / 32], f[LATENT_MAX_SPLIT / 32], top = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LATENT_MAX_SPLIT / 32; i++) {
        int j = lane + 32 * i;
        float2 ml = make_float2(0.0f, 0.0f);
        if (j < live)
            ml = *(const float2 *)(a.ml + 2 * (row0 + (size_t)j * (size_t)M));
        f[i] = ml.y;
        m[i] = ml.y > 0.0f ? ml.x : -INFINITY;
        top = fmaxf(top, m[i]);
    }
    top = warp_max(top);
    top = top == -INFINITY ? 0.0f : top;
#pragma unroll
    for (int i = 0; i < LATENT_MAX_SPLIT / 32; i++) {
        f[i] *= fast_exp2(m[i] - top);
        sum += f[i];
    }
    sum = warp_sum(sum);
    float scale = sum > 0.0f ? 1.0f / sum : 0.0f;
    float2 all = make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (int i = 0; i < live; i += HEADS_PREFETCH) {
#pragma unroll
        for (int j = 0; j < HEADS_PREFETCH; j++) {
            float w = __shfl_sync(FULL_WARP, i < 32 ? f[0] : f[1], (i + j) & 31) * scale;
            if (i + j < live) {
                all.x += w * v[j].x;
                all.y += w * v[j].y;
            }
        }
#pragma unroll
        for (int j = 0; j < HEADS_PREFETCH; j++)
            if (i + HEADS_PREFETCH + j < live)
                v[j] = *(const float2 *)(part + (size_t)(i + HEADS_PREFETCH + j) * stride);
    }
    *(float2 *)(x + 2 * tid) = all;
}

template <int SET, class SLICE>
DEVICE void heads_dot(const struct seg *s, const uint8_t *tile, const SLICE &x, float (&sum)[2])
{
    if constexpr (SET == SET_K)
        tile_dot(s->kind == TILE_Q6_K, tile, x, 1.0f, sum);
    else if constexpr (SET == SET_CODES)
        tile_dot_codes<4>(s->kind, tile, x, 1.0f, sum);
    else
        tile_dot<SET>(s, tile, x, 1.0f, sum);
}

DEVICE float *heads_query(const struct heads_gemv_args &p, int t, int h)
{
    return p.q + ((size_t)t * (size_t)p.n_heads + (size_t)h) * (size_t)(p.nope + p.row.rope.n);
}

/* Block i of the blocks without a product: applies RoPE to eight queries. The one after them
 * stores the cache row. */
template <bool QUANT>
DEVICE void heads_no_product(const struct heads_gemv_args &p, int t, int i, float *part)
{
    struct latent_angles angles = latent_angles_of(p.row.rope, p.row.step.pos[t]);
    int h = i * HEADS_WARPS + warp_id();
    dependency_trigger();
    dependency_wait();
    if (i == p.rotate_blocks)
        latent_row<QUANT>(p.row, t, angles, part);
    else if (h < p.n_heads)
        latent_rotate(p.row.rope, angles, heads_query(p, t, h) + p.nope);
}

/* Grid: (heads * blocks per head [+ blocks without a product], rows). Warp w: tile w / n_kt of
 * the block, k slice w % n_kt. */
template <int SET, bool QUERIES, bool QUANT>
static __global__ void __launch_bounds__(HEADS_WARPS * 32, 2)
    heads_gemv_kernel(const __grid_constant__ struct heads_gemv_args p)
{
    SHARED_BYTES(shared);
    int t = (int)blockIdx.y, h = (int)blockIdx.x / p.blocks, w = warp_id(), lane = lane_id();
    int first = ((int)blockIdx.x - h * p.blocks) * p.tiles, n_kt = p.w.n_kt;
    float *sums = (float *)shared, *row = sums + HEADS_WARPS * TILE_ROWS;
    if (QUERIES && h >= p.n_heads) {
        heads_no_product<QUANT>(p, t, (int)blockIdx.x - p.n_heads * p.blocks, sums);
        return;
    }
    uint8_t *slot = (uint8_t *)(row + (QUERIES ? 0 : (p.w.n_in + 3) / 4 * 4)) +
                    (size_t)w * (size_t)p.w.max_tile_bytes;
    int of = w / n_kt, slice = w - of * n_kt, tile = first + of;
    bool mine = of < p.tiles && tile < p.w.n_tiles;
    const struct seg *s = seg_of(p.w, mine ? tile : 0);
    if (mine)
        tile_fetch(slot, tile_address(p.w, s, h, tile, slice), s->tile_bytes);
    copy_async_commit();
    dependency_trigger();
    dependency_wait();
    if (!QUERIES) {
        heads_gather(p, t, h, row);
        __syncthreads();
    }
    if (mine) {
        float v[8], sum[2] = {};
        load_lane(QUERIES ? heads_query(p, t, h) : row, slice, p.w.n_in, v);
        typename slice_of<SET>::type x;
        slice_make(x, v);
        copy_async_wait<0>();
        __syncwarp();
        heads_dot<SET>(s, slot, x, sum);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], 1);
            sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], 2);
            if (!(lane & 3))
                sums[w * TILE_ROWS + (lane >> 2) + 8 * i] = sum[i];
        }
    }
    __syncthreads();
    of = (int)threadIdx.x / TILE_ROWS;
    tile = first + of;
    if (of >= p.tiles || tile >= p.w.n_tiles)
        return;
    s = seg_of(p.w, tile);
    int out = (tile - s->tile0) * TILE_ROWS + (int)threadIdx.x % TILE_ROWS;
    float v = 0.0f;
    for (int k = 0; k < n_kt; k++)
        v += sums[(of * n_kt + k) * TILE_ROWS + (int)threadIdx.x % TILE_ROWS];
    if (out < s->rows)
        p.y[((size_t)t * (size_t)p.n_heads + (size_t)h) * (size_t)p.w.n_out +
            (size_t)(s->row0 + out)] = v;
}

/* Host */

static size_t heads_gemv_shared(const struct matrix *w, bool queries)
{
    return (size_t)HEADS_WARPS * (TILE_ROWS * 4 + (size_t)w->max_tile_bytes) +
           (queries ? 0 : align_up((size_t)w->n_in, 4) * 4);
}

bool latent_heads_gemv_fits(const struct cuda_backend *cu, const struct matrix *w,
                            const struct latent_heads *h, const struct step *s)
{
    const struct latent_row_args *row = &h->row;
    bool whole = h->queries ? (w->n_in + row->rope.n) % 4 == 0 : true;
    return s->n_decode == s->n_tokens && w->n_in % 8 == 0 && whole && w->n_kt <= HEADS_WARPS &&
           w->n_tiles > 0 && heads_gemv_shared(w, h->queries) <= cu->shared_limit;
}

template <int SET>
static void heads_gemv_launch(struct cuda_backend *cu, const struct heads_gemv_args &p,
                              const struct latent_heads *h, int rows)
{
    dim3 grid((unsigned)(p.n_heads * p.blocks + (h->queries ? p.rotate_blocks + p.store : 0)),
              (unsigned)rows);
    auto kernel = !h->queries ? heads_gemv_kernel<SET, false, false>
                  : h->quant  ? heads_gemv_kernel<SET, true, true>
                              : heads_gemv_kernel<SET, true, false>;
    cuda_launch(cu, kernel, grid, HEADS_WARPS * 32, heads_gemv_shared(&p.w, h->queries),
                LAUNCH_EARLY, p);
}

void latent_heads_gemv(struct cuda_backend *cu, const struct matrix *w,
                       const struct latent_heads *h, float *y, int rows)
{
    struct heads_gemv_args p = {};
    p.w = *w;
    p.y = y;
    p.n_heads = h->n_heads;
    p.tiles = HEADS_WARPS / w->n_kt;
    p.blocks = ceil_div(w->n_tiles, p.tiles);
    p.q = h->q;
    p.nope = w->n_in;
    p.rotate_blocks = ceil_div(h->n_heads, HEADS_WARPS);
    p.store = h->store;
    p.row = h->row;
    if (!h->queries) {
        p.attn = *h->attn;
        p.splits = h->splits;
    }
    if (w->set == SET_K)
        heads_gemv_launch<SET_K>(cu, p, h, rows);
    else if (w->set == SET_CODES)
        heads_gemv_launch<SET_CODES>(cu, p, h, rows);
    else if (w->set == SET_FAST)
        heads_gemv_launch<SET_FAST>(cu, p, h, rows);
    else
        heads_gemv_launch<SET_ALL>(cu, p, h, rows);
}
