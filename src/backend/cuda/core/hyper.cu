/*
 * Hyper-connections (struct hyper of layer.h). One kernel between two blocks adds the result of the first to all parts and
 * makes what the second reads.
 * Mapping: a block has a slice of HYPER_COLUMNS columns of all parts, of R rows: it mixes them, stores them and computes
 * its share of the product with W. The last block of a row group to finish adds the shares in order, balances M, and makes
 * x; with many rows a second kernel does that. A row's sums do not depend on the number of rows.
 * Limit: latency for few rows; bytes of the parts for many.
 */
#include "backend/cuda/core/streams.h"
#include "backend/cuda/core/rows.cuh"

enum {
    HYPER_THREADS = 256,
    HYPER_WARPS = HYPER_THREADS / 32,
    HYPER_COLUMNS = 64,
    HYPER_AT_ONCE = 3, /* outputs of a warp */
    HYPER_FINISH = 64  /* rows from which on a second kernel finishes them */
};

struct hyper_args {
    const float *w; /* F32 tiles */
    int n_kt, n_out, n_parts, width, rows, slices;
    const float *scale, *base;
    float eps, offset;
    int rounds;
    bool fresh;                /* all parts are x */
    const float *d, *beside;   /* what the block before adds; NULL: nothing */
    float by;                  /* factor of both */
    float *x;                  /* (rows, width) */
    float *parts;              /* (n_parts, plane, width) */
    size_t plane;              /* floats */
    const float *mixes_before; /* (rows, N*(N+2)) */
    float *mixes;              /* may be the same */
    float *sums;               /* (groups, n_out + 1, R, slices) */
    int32_t *count;            /* (groups) */
    bool finish;               /* the last block finishes */
};

DEVICE float4 hyper_weights(const struct hyper_args &p, int o, int k)
{
    size_t tile = (size_t)(o / TILE_ROWS) * (size_t)p.n_kt + (size_t)(k / TILE_K);
    return *(const float4 *)(p.w + tile * (TILE_ROWS * TILE_K) + o % TILE_ROWS * TILE_K +
                             k % TILE_K);
}

DEVICE float dot4(const float4 &a, const float4 &b)
{
    return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

DEVICE void add4(float4 *to, float by, const float4 &v)
{
    to->x += by * v.x;
    to->y += by * v.y;
    to->z += by * v.z;
    to->w += by * v.w;
}

DEVICE float4 load4_l2(const float *p)
{
    uint4 v = load_l2((const uint4 *)p);
    return make_float4(float_of(v.x), float_of(v.y), float_of(v.z), float_of(v.w));
}

/* Makes M (N, N), NM its room, nearly doubly stochastic. One thread. */
template <int NM> DEVICE void hyper_balance(float (&M)[NM][NM], int N, float offset, int rounds)
{
#pragma unroll
    for (int j = 0; j < NM; j++) {
        float top = -INFINITY, sum = 0.0f;
#pragma unroll
        for (int k = 0; k < NM; k++)
            top = k < N ? fmaxf(top, M[j][k]) : top;
#pragma unroll
        for (int k = 0; k < NM; k++) {
            M[j][k] = j < N && k < N ? expf(M[j][k] - top) : 0.0f;
            sum += M[j][k];
        }
#pragma unroll
        for (int k = 0; k < NM; k++)
            M[j][k] = j < N && k < N ? fast_divide(M[j][k], sum) + offset : 0.0f;
    }
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
#pragma unroll
        for (int j = 0; j < NM; j++) {
            float sum = offset;
#pragma unroll
            for (int k = 0; k < NM; k++)
                sum += M[j][k];
            float by = round && j < N ? fast_divide(1.0f, sum) : 1.0f; /* rows: not at first */
#pragma unroll
            for (int k = 0; k < NM; k++)
                M[j][k] *= by;
        }
#pragma unroll
        for (int k = 0; k < NM; k++) {
            float sum = offset;
#pragma unroll
            for (int j = 0; j < NM; j++)
                sum += M[j][k];
            float by = k < N ? fast_divide(1.0f, sum) : 0.0f;
#pragma unroll
            for (int j = 0; j < NM; j++)
                M[j][k] *= by;
        }
    }
}

DEVICE float hyper_sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* What one block needs to finish n rows. */
template <int R, int NM> struct hyper_finish_shared {
    float mix[R][NM * (NM + 2) + 1]; /* the sums; then pre, post and M before its balance */
};

/* A block finishes rows first .. first + n - 1 of a group of R rows. */
template <int R, int NM>
DEVICE void hyper_finish(const struct hyper_args &p, int group, int first, int n,
                         struct hyper_finish_shared<R, NM> *sh)
{
    int N = p.n_parts, tid = (int)threadIdx.x, lane = lane_id(), outs = p.n_out + 1;
    for (int i = warp_id(); i < outs * n; i += HYPER_WARPS) {
        int o = i / n, r = i - o * n;
        const float *from =
            p.sums + (((size_t)group * (size_t)outs + (size_t)o) * R + (size_t)(first + r)) *
                         (size_t)p.slices;
        float sum = 0.0f;
        for (int k = lane; k < p.slices; k += 32)
            sum += load_float_l2(from + k);
        sum = warp_sum(sum);
        if (lane == 0)
            sh->mix[r][o] = sum;
    }
    __syncthreads();
    for (int i = tid; i < p.n_out * n; i += HYPER_THREADS) {
        int r = i / p.n_out, o = i - r * p.n_out, run = o < N ? 0 : o < 2 * N ? 1 : 2;
        float by = rsqrtf(sh->mix[r][p.n_out] / (float)(N * p.width) + p.eps);
        float m = sh->mix[r][o] * by * p.scale[run] + p.base[o];
        sh->mix[r][o] = run == 0   ? hyper_sigmoid(m) + p.offset
                        : run == 1 ? 2.0f * hyper_sigmoid(m)
                                   : m;
    }
    __syncthreads();
    int row0 = group * R + first;
    /* The last warp balances M, a lane per row, beside the others. */
    if (warp_id() == HYPER_WARPS - 1) {
        if (p.n_out > N && lane < n) {
            float M[NM][NM], *to = p.mixes + (size_t)(row0 + lane) * (size_t)(N * (N + 2));
            const float *from = sh->mix[lane] + 2 * N;
#pragma unroll
            for (int i = 0; i < NM * NM; i++)
                M[i / NM][i % NM] = i / NM < N && i % NM < N ? from[i / NM * N + i % NM] : 0.0f;
            hyper_balance<NM>(M, N, p.offset, p.rounds);
            for (int k = 0; k < N; k++)
                to[N + k] = sh->mix[lane][N + k];
#pragma unroll
            for (int i = 0; i < NM * NM; i++)
                if (i / NM < N && i % NM < N)
                    to[2 * N + i / NM * N + i % NM] = M[i / NM][i % NM];
        }
        return;
    }
    int quads = p.width / 4;
    for (int i = tid; i < n * quads; i += HYPER_THREADS - 32) {
        int r = i / quads;
        size_t at = (size_t)(row0 + r) * (size_t)p.width + (size_t)(i - r * quads) * 4;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < NM; j++)
            if (j < N)
                add4(&x, sh->mix[r][j], load4_l2(p.parts + (size_t)j * p.plane + at));
        *(float4 *)(p.x + at) = x;
    }
}

/* Four columns of all parts of a row, after the result of the block before has gone to them. post: then M, of the row. */
template <int NM>
DEVICE void hyper_mix(const struct hyper_args &p, const float *post, size_t at, float4 (&v)[NM])
{
    int N = p.n_parts;
    if (p.fresh) {
        float4 x = *(const float4 *)(p.x + at);
#pragma unroll
        for (int j = 0; j < NM; j++)
            v[j] = x;
    } else {
        float4 old[NM], y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < NM; j++)
            old[j] = j < N ? *(const float4 *)(p.parts + (size_t)j * p.plane + at)
                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        add4(&y, p.by, *(const float4 *)(p.d + at));
        if (p.beside)
            add4(&y, p.by, *(const float4 *)(p.beside + at));
#pragma unroll
        for (int k = 0; k < NM; k++) {
            v[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (k >= N)
                break;
            add4(&v[k], post[k], y);
#pragma unroll
            for (int j = 0; j < NM; j++)
                if (j < N)
                    add4(&v[k], post[N + j * N + k], old[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < NM; j++)
        if (j < N)
            *(float4 *)(p.parts + (size_t)j * p.plane + at) = v[j];
}

/* Grid: (slices, groups of R rows). NM: room for parts. */
template <int R, int NM>
static __global__ void __launch_bounds__(HYPER_THREADS)
    hyper_kernel(const __grid_constant__ struct hyper_args p)
{
    enum { QUADS = HYPER_COLUMNS / 4, EACH = NM * QUADS / 32, MIXES = NM * (NM + 2) };
    __shared__ float4 s[R][NM][QUADS];
    __shared__ float mix[R][MIXES];
    __shared__ struct hyper_finish_shared<R, NM> finish;
    __shared__ bool is_last;
    int N = p.n_parts, tid = (int)threadIdx.x, lane = lane_id(), warp = warp_id();
    int first = (int)blockIdx.x * HYPER_COLUMNS, group = (int)blockIdx.y, row0 = group * R;
    float4 w[HYPER_AT_ONCE][EACH];
    auto load = [&](int o0) {
#pragma unroll
        for (int i = 0; i < HYPER_AT_ONCE; i++)
#pragma unroll
            for (int q = 0; q < EACH; q++) {
                int o = o0 + i * HYPER_WARPS, at = lane + 32 * q, j = at / QUADS;
                int e = first + at % QUADS * 4;
                w[i][q] = o < p.n_out && j < N && e < p.width ? hyper_weights(p, o, j * p.width + e)
                                                              : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
    };
    load(warp);
    dependency_trigger();
    dependency_wait();
    for (int i = tid; i < R * N * (N + 2) && !p.fresh; i += HYPER_THREADS) {
        int r = i / (N * (N + 2)), k = i - r * N * (N + 2);
        mix[r][k] =
            row0 + r < p.rows ? p.mixes_before[(size_t)row0 * (size_t)(N * (N + 2)) + i] : 0.0f;
    }
    __syncthreads();
    for (int i = tid; i < R * QUADS; i += HYPER_THREADS) {
        int r = i / QUADS, e = first + i % QUADS * 4;
        float4 v[NM] = {};
        if (row0 + r < p.rows && e < p.width)
            hyper_mix<NM>(p, mix[r] + N, (size_t)(row0 + r) * (size_t)p.width + (size_t)e, v);
#pragma unroll
        for (int j = 0; j < NM; j++)
            s[r][j][i % QUADS] = v[j];
    }
    __syncthreads();
    float *sums = p.sums + (size_t)group * (size_t)(p.n_out + 1) * (size_t)(R * p.slices) +
                  (size_t)blockIdx.x;
    for (int o0 = warp; o0 < p.n_out; o0 += HYPER_AT_ONCE * HYPER_WARPS) {
        if (o0 != warp)
            load(o0);
#pragma unroll 2
        for (int r = 0; r < R; r++) {
            float acc[HYPER_AT_ONCE] = {};
#pragma unroll
            for (int q = 0; q < EACH; q++) {
                float4 a = s[r][(lane + 32 * q) / QUADS][(lane + 32 * q) % QUADS];
#pragma unroll
                for (int i = 0; i < HYPER_AT_ONCE; i++)
                    acc[i] += dot4(w[i][q], a);
            }
#pragma unroll
            for (int i = 0; i < HYPER_AT_ONCE; i++) {
                int o = o0 + i * HYPER_WARPS;
                acc[i] = warp_sum(acc[i]);
                if (lane == 0 && o < p.n_out)
                    sums[(size_t)(o * R + r) * (size_t)p.slices] = acc[i];
            }
        }
    }
    for (int r = warp; r < R; r += HYPER_WARPS) {
        float squares = 0.0f;
#pragma unroll
        for (int q = 0; q < EACH; q++) {
            float4 a = s[r][(lane + 32 * q) / QUADS][(lane + 32 * q) % QUADS];
            squares += dot4(a, a);
        }
        squares = warp_sum(squares);
        if (lane == 0)
            sums[(size_t)(p.n_out * R + r) * (size_t)p.slices] = squares;
    }
    if (!p.finish)
        return;
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        is_last = atomicAdd(&p.count[group], 1) == p.slices - 1;
        if (is_last)
            p.count[group] = 0;
    }
    __syncthreads();
    if (!is_last)
        return;
    __threadfence();
    hyper_finish<R, NM>(p, group, 0, min(R, p.rows - row0), &finish);
}

/* Grid: (rows). */
template <int R, int NM>
static __global__ void __launch_bounds__(HYPER_THREADS)
    hyper_finish_kernel(const __grid_constant__ struct hyper_args p)
{
    __shared__ struct hyper_finish_shared<R, NM> finish;
    dependency_trigger();
    dependency_wait();
    hyper_finish<R, NM>(p, (int)blockIdx.x / R, (int)blockIdx.x % R, 1, &finish);
}

/* Host */

/* Rows of a group. */
static int hyper_group(int n_parts, int rows)
{
    if (n_parts > 4)
        return 4;
    return rows == 1 ? 1 : rows <= 16 ? 4 : 16;
}

size_t hyper_sums(const struct network *net, int rows)
{
    int N = net->streams.n, slices = ceil_div(net->n_embd, HYPER_COLUMNS);
    return (size_t)(align_up((size_t)rows, 16) * (size_t)(N * (N + 2) + 1)) * (size_t)slices;
}

template <int R, int NM> static void hyper_launch(struct cuda_backend *cu, struct hyper_args p)
{
    p.finish = p.rows < HYPER_FINISH;
    cuda_launch(cu, hyper_kernel<R, NM>, dim3((unsigned)p.slices, (unsigned)ceil_div(p.rows, R)),
                HYPER_THREADS, 0, LAUNCH_EARLY, p);
    if (!p.finish)
        cuda_launch(cu, hyper_finish_kernel<R, NM>, dim3((unsigned)p.rows), HYPER_THREADS, 0,
                    LAUNCH_EARLY, p);
}

void hyper_read(struct cuda_backend *cu, const struct hyper *h)
{
    struct stream_parts *s = cu->streams;
    struct resid *r = &cu->resid;
    if (!h->w || !r->rows)
        return;
    struct hyper_args p = {};
    int now = r->parts_narrow;
    p.fresh = r->parts_fresh;
    r->parts_fresh = false;
    if (!p.fresh)
        p.d = resid_take(cu, r, &p.beside, &p.by);
    CHECK(p.fresh || p.d, "a block without a result");
    step_mark(cu);
    const struct matrix *w = cuda_matrix(h->w);
    p.w = (const float *)w->seg[0].base;
    p.n_kt = w->n_kt;
    p.n_out = w->n_out;
    p.n_parts = cu->net->streams.n;
    p.width = cu->shape.n_embd;
    p.rows = r->rows;
    p.slices = ceil_div(p.width, HYPER_COLUMNS);
    p.scale = h->scale;
    p.base = h->base;
    p.eps = h->eps;
    p.offset = h->offset;
    p.rounds = h->rounds;
    p.x = r->x;
    p.parts = s->parts[now];
    p.plane = (size_t)s->rows[now] * (size_t)p.width;
    p.mixes = s->mixes[now];
    p.mixes_before = s->mixes[now];
    p.sums = s->sums;
    p.count = s->count;
    int group = hyper_group(p.n_parts, p.rows);
    if (p.n_parts > 4)
        hyper_launch<4, 8>(cu, p);
    else if (group == 1)
        hyper_launch<1, 4>(cu, p);
    else if (group == 4)
        hyper_launch<4, 4>(cu, p);
    else
        hyper_launch<16, 4>(cu, p);
    step_mark_end(cu, STAGE_NORM);
}
