/*
 * Streams of several parts besides hyper-connections (hyper.cu): AltUp and low-rank residuals (LAuReL), and the buffers of
 * all of them. x_0 is the stream of struct resid. A kernel has one block per row. Limit: latency.
 */
#include "backend/cuda/core/streams.h"
#include "backend/cuda/core/rows.cuh"

extern "C" {
#include "base/mem.h"
}

enum { STREAM_THREADS = 256, STREAM_WARPS = STREAM_THREADS / 32 };

/* Sums n numbers over the threads of a block. Every thread gets all sums. part: (n, STREAM_WARPS) */
template <int N> DEVICE void stream_sums(float (&v)[N], float (*part)[STREAM_WARPS])
{
    __syncthreads(); /* part is free */
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = warp_sum(v[i]);
        if (lane_id() == 0)
            part[i][warp_id()] = v[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = 0.0f;
#pragma unroll
        for (int w = 0; w < STREAM_WARPS; w++)
            v[i] += part[i][w];
    }
}

struct altup_args {
    float *x;     /* (rows, width) x_0 */
    float *parts; /* (N, plane / width, width) */
    size_t plane;
    struct gain norm;
    const float *router, *mix; /* (N, width), predict (N*N, N) or correct (N, N) */
    int n_parts, width;
};

/* kind (N) = tanh(norm(x) Wr^T / width) of a row x. */
DEVICE void altup_route(const struct altup_args &p, const float *x, float (*part)[STREAM_WARPS],
                        float (&kind)[STREAMS_MAX])
{
    float sums[STREAMS_MAX + 1] = {};
    for (int e = (int)threadIdx.x; e < p.width; e += STREAM_THREADS) {
        float v = x[e], n = v * p.norm.gain[e];
        sums[STREAMS_MAX] += v * v;
#pragma unroll
        for (int j = 0; j < STREAMS_MAX; j++)
            if (j < p.n_parts)
                sums[j] += n * p.router[(size_t)j * (size_t)p.width + (size_t)e];
    }
    stream_sums(sums, part);
    float by = rsqrtf(sums[STREAMS_MAX] / (float)p.width + p.norm.eps) / (float)p.width;
#pragma unroll
    for (int j = 0; j < STREAMS_MAX; j++)
        kind[j] = tanhf(sums[j] * by);
}

/* mix (n) = the products of n rows of a table with kind. */
DEVICE void altup_mix(const struct altup_args &p, int n, const float (&kind)[STREAMS_MAX],
                      float *mix)
{
    for (int c = (int)threadIdx.x; c < n; c += STREAM_THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < STREAMS_MAX; k++)
            if (k < p.n_parts)
                sum += p.mix[c * p.n_parts + k] * kind[k];
        mix[c] = sum;
    }
    __syncthreads();
}

/* Grid: (rows). p_j = x_j + sum_k P[j][k] x_k; x_0 = p_0 */
static __global__ void __launch_bounds__(STREAM_THREADS)
    altup_predict_kernel(const __grid_constant__ struct altup_args p)
{
    __shared__ float part[STREAMS_MAX + 1][STREAM_WARPS], mix[STREAMS_MAX * STREAMS_MAX];
    dependency_trigger();
    dependency_wait();
    int N = p.n_parts;
    size_t row = (size_t)blockIdx.x * (size_t)p.width;
    float *x = p.x + row, kind[STREAMS_MAX];
    altup_route(p, x, part, kind);
    altup_mix(p, N * N, kind, mix);
    for (int e = (int)threadIdx.x; e < p.width; e += STREAM_THREADS) {
        float *parts = p.parts + row + (size_t)e, old[STREAMS_MAX];
#pragma unroll
        for (int j = 0; j < STREAMS_MAX; j++)
            old[j] = j == 0 ? x[e] : j < N ? parts[(size_t)j * p.plane] : 0.0f;
#pragma unroll
        for (int j = 0; j < STREAMS_MAX; j++) {
            if (j >= N)
                break;
            float sum = old[j];
#pragma unroll
            for (int k = 0; k < STREAMS_MAX; k++)
                if (k < N)
                    sum += mix[j * N + k] * old[k];
            parts[(size_t)j * p.plane] = sum;
            if (j == 0)
                x[e] = sum;
        }
    }
}

/* Grid: (rows). x_j = p_j + C_j (x_0 - p_0) */
static __global__ void __launch_bounds__(STREAM_THREADS)
    altup_correct_kernel(const __grid_constant__ struct altup_args p)
{
    __shared__ float part[STREAMS_MAX + 1][STREAM_WARPS], mix[STREAMS_MAX];
    dependency_trigger();
    dependency_wait();
    int N = p.n_parts;
    size_t row = (size_t)blockIdx.x * (size_t)p.width;
    float *x = p.x + row, kind[STREAMS_MAX];
    altup_route(p, x, part, kind);
    altup_mix(p, N, kind, mix);
    for (int e = (int)threadIdx.x; e < p.width; e += STREAM_THREADS) {
        float *parts = p.parts + row + (size_t)e, change = x[e] - parts[0];
#pragma unroll
        for (int j = 0; j < STREAMS_MAX; j++) {
            if (j >= N)
                break;
            float v = parts[(size_t)j * p.plane] + (1.0f + mix[j]) * change;
            if (j == 0)
                x[e] = v;
            else
                parts[(size_t)j * p.plane] = v;
        }
    }
}

/* |v| of a row: sqrt(max(mean(v^2), 1e-5)), of x and y. */
DEVICE float2 stream_sizes(const float *x, const float *y, int width, float (*part)[STREAM_WARPS])
{
    float sums[2] = {};
    for (int e = (int)threadIdx.x; e < width; e += STREAM_THREADS) {
        sums[0] += x[e] * x[e];
        sums[1] += y[e] * y[e];
    }
    stream_sums(sums, part);
    return make_float2(sqrtf(fmaxf(sums[0] / (float)width, 1e-5f)),
                       sqrtf(fmaxf(sums[1] / (float)width, 1e-5f)));
}

/* Grid: (rows). y *= |x| / |y| */
static __global__ void __launch_bounds__(STREAM_THREADS)
    stream_begin_kernel(const float *x, float *y, int width)
{
    __shared__ float part[2][STREAM_WARPS];
    dependency_trigger();
    dependency_wait();
    size_t row = (size_t)blockIdx.x * (size_t)width;
    float2 size = stream_sizes(x + row, y + row, width, part);
    for (int e = (int)threadIdx.x; e < width; e += STREAM_THREADS)
        y[row + (size_t)e] *= size.x / size.y;
}

/* Grid: (rows). sum += z * |x| / |z|; first: sum is x before; last: x = sum / n */
static __global__ void __launch_bounds__(STREAM_THREADS)
    stream_end_kernel(float *x, const float *z, float *sum, int width, bool first, int n)
{
    __shared__ float part[2][STREAM_WARPS];
    dependency_trigger();
    dependency_wait();
    size_t row = (size_t)blockIdx.x * (size_t)width;
    float2 size = stream_sizes(x + row, z + row, width, part);
    for (int e = (int)threadIdx.x; e < width; e += STREAM_THREADS) {
        size_t at = row + (size_t)e;
        float v = (first ? x[at] : sum[at]) + z[at] * (size.x / size.y);
        if (n)
            x[at] = v / (float)n;
        else
            sum[at] = v;
    }
}

/* Grid: (blocks of 256 columns, rows). y = x * scale */
static __global__ void __launch_bounds__(STREAM_THREADS)
    stream_scale_kernel(const float *x, const float *scale, float *y, int width)
{
    dependency_trigger();
    dependency_wait();
    int e = (int)(blockIdx.x * STREAM_THREADS + threadIdx.x);
    size_t at = (size_t)blockIdx.y * (size_t)width + (size_t)e;
    if (e < width)
        y[at] = x[at] * (scale ? scale[e] : 1.0f);
}

/* Grid: (blocks of 256 values, parts). A part += y. */
static __global__ void __launch_bounds__(STREAM_THREADS)
    stream_add_kernel(float *parts, size_t plane, const float *y, size_t n)
{
    dependency_trigger();
    dependency_wait();
    size_t i = (size_t)blockIdx.x * STREAM_THREADS + threadIdx.x;
    if (i < n)
        parts[(size_t)blockIdx.y * plane + i] += y[i];
}

/* Grid: (blocks of 256 columns, output rows, planes). */
static __global__ void __launch_bounds__(STREAM_THREADS)
    stream_gather_kernel(const float *from, size_t from_plane, const int32_t *rows, float *to,
                         size_t to_plane, int width)
{
    dependency_trigger();
    dependency_wait();
    int e = (int)(blockIdx.x * STREAM_THREADS + threadIdx.x);
    if (e < width)
        to[(size_t)blockIdx.z * to_plane + (size_t)blockIdx.y * (size_t)width + (size_t)e] =
            from[(size_t)blockIdx.z * from_plane + (size_t)rows[blockIdx.y] * (size_t)width +
                 (size_t)e];
}

/* Grid: (rows). r = n + norm(r) */
static __global__ void __launch_bounds__(STREAM_THREADS)
    laurel_kernel(const float *n, float *r, struct gain norm, int width)
{
    __shared__ float part[1][STREAM_WARPS];
    dependency_trigger();
    dependency_wait();
    size_t row = (size_t)blockIdx.x * (size_t)width;
    float squares[1] = {};
    for (int e = (int)threadIdx.x; e < width; e += STREAM_THREADS)
        squares[0] += r[row + (size_t)e] * r[row + (size_t)e];
    stream_sums(squares, part);
    float by = norm.gain ? rsqrtf(squares[0] / (float)width + norm.eps) : 1.0f;
    for (int e = (int)threadIdx.x; e < width; e += STREAM_THREADS) {
        size_t at = row + (size_t)e;
        r[at] = n[at] + r[at] * by * (norm.gain ? norm.gain[e] : 1.0f);
    }
}

/* Host */

static bool layer_supported(const struct network *net, int i, struct error *err)
{
    const struct layer *l = &net->layers[i];
    const struct block *a = &l->mixer.block, *b = &l->mlp.block;
    const struct mlp *m = &l->mlp;
    bool odd = mlp_is_none(m) || !mixer_out(&l->mixer) || a->parallel || b->parallel || a->joined ||
               a->keep != 0 || b->keep != 0 || a->sum.kind || b->sum.kind || !a->in.kind ||
               a->in.kind == NORM_LAYER || a->out.kind > NORM_RMS || b->out.kind > NORM_RMS;
    if (net->streams.head.w)
        odd = odd || m->embed.gate || m->deepstack || m->experts_late ||
              (m->stream_scale != 0 && m->stream_scale != 1);
    else
        odd = odd || m->deepstack || l->altup.norm.kind == NORM_LAYER ||
              l->mixer.laurel.norm.kind > NORM_RMS ||
              (m->stream_scale != 0 && m->stream_scale != 1);
    return !odd ||
           network_refuse(err, i, "such a layer between streams of several parts is", "cuda");
}

bool streams_supported(const struct cuda_backend *cu, const struct network *net, struct error *err)
{
    const struct streams *s = &net->streams;
    (void)cu;
    for (int i = 0; i < net->n_layers; i++) {
        const struct laurel *l = &net->layers[i].mixer.laurel;
        if (s->n && !layer_supported(net, i, err))
            return false;
        if (l->left && (!s->project || net->layers[i].mixer.block.out.kind > NORM_RMS))
            return network_refuse(err, i, "such a low-rank residual is", "cuda");
    }
    if (s->n && (net->n_embd % 4 || net->mtp.fc || net->n_mergers))
        return network_refuse(err, -1, "such streams of several parts are", "cuda");
    return true;
}

bool streams_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err)
{
    const struct network *net = cu->net;
    size_t N = (size_t)net->streams.n, E = (size_t)net->n_embd, rank = 0, laurel = 0;
    if (!N)
        return true;
    struct stream_parts *s = (struct stream_parts *)mem_zalloc(1, sizeof *s);
    cu->streams = s;
    s->rows[0] = b->max_tokens;
    s->rows[1] = b->max_out + 1;
    for (int i = 0; i < net->n_layers; i++) {
        const struct weight *left = net->layers[i].mixer.laurel.left;
        rank = left && (size_t)left->n_out > rank ? (size_t)left->n_out : rank;
        laurel = left ? E : laurel;
    }
    s->has_laurel = laurel > 0;
    bool hyper = net->streams.head.w != NULL;
    struct device_buffer list[8];
    int n = 0;
    for (int i = 0; i < 2; i++) {
        size_t rows = (size_t)s->rows[i];
        list[n++] = device_buffer{(void **)&s->parts[i], rows * N * E * 4};
        list[n++] = device_buffer{(void **)&s->mixes[i], hyper ? rows * N * (N + 2) * 4 : 0};
        list[n++] = device_buffer{(void **)&s->laurel[i], rows * laurel * 4};
    }
    list[n++] = device_buffer{(void **)&s->sums, hyper ? hyper_sums(net, b->max_tokens) * 4 : 0};
    list[n++] = device_buffer{(void **)&s->count, hyper ? (size_t)b->max_tokens * 4 : 0};
    const struct device_buffer low[] = {{(void **)&s->low, (size_t)b->max_tokens * rank * 4}};
    if (!cuda_own(cu, list, n, err) || !cuda_own(cu, low, 1, err))
        return false;
    if (hyper)
        CUDA_TRY(cu, cudaMemsetAsync(s->count, 0, (size_t)b->max_tokens * 4, cu->stream));
    return true;
}

void streams_close(struct cuda_backend *cu)
{
    mem_free(cu->streams);
}

static float *plane_of(const struct cuda_backend *cu, int j)
{
    const struct stream_parts *s = cu->streams;
    int now = cu->resid.parts_narrow;
    return s->parts[now] + (size_t)j * (size_t)s->rows[now] * (size_t)cu->shape.n_embd;
}

/* y = x times matrix j of several. */
static void part_product(struct cuda_backend *cu, const struct weight *w, int j, float *x, float *y)
{
    struct matrix m = *cuda_matrix(w);
    struct rows in = rows_of(x, cu->resid.rows, m.n_in);
    struct pick_case c = {};
    for (int i = 0; i < m.n_seg; i++)
        m.seg[i].base += (size_t)j * m.seg[i].expert_bytes;
    m.n_expert = 1;
    c.rows = in.n;
    c.w = &m;
    c.x = &in;
    c.y = y;
    pick_run(cu, PICK_LINEAR, &c, N_STAGES);
}

void streams_begin(struct cuda_backend *cu)
{
    struct resid *r = &cu->resid;
    if (!cu->streams)
        return;
    r->parts_fresh = true;
    for (int j = 1; j < cu->net->streams.n && cu->net->streams.project && r->rows; j++) {
        resid_plain(cu, r);
        part_product(cu, cu->net->streams.project, j - 1, r->x, plane_of(cu, j));
        cuda_launch(cu, stream_begin_kernel, dim3((unsigned)r->rows), STREAM_THREADS, 0,
                    LAUNCH_EARLY, (const float *)r->x, plane_of(cu, j), cu->shape.n_embd);
    }
}

static void gather(struct cuda_backend *cu, const struct step *s, const float *from,
                   size_t from_rows, float *to, size_t to_rows, int width, int planes)
{
    cuda_launch(
        cu, stream_gather_kernel,
        dim3((unsigned)ceil_div(width, STREAM_THREADS), (unsigned)s->n_out, (unsigned)planes),
        STREAM_THREADS, 0, LAUNCH_EARLY, from, from_rows * (size_t)width, s->out_rows, to,
        to_rows * (size_t)width, width);
}

void streams_narrow(struct cuda_backend *cu, const struct step *s)
{
    struct stream_parts *p = cu->streams;
    int N = cu->net->streams.n, E = cu->shape.n_embd;
    if (!p)
        return;
    cu->resid.parts_narrow = 1;
    if (!s->n_out)
        return;
    size_t from = (size_t)p->rows[0], to = (size_t)p->rows[1];
    gather(cu, s, p->parts[0], from, p->parts[1], to, E, N);
    if (cu->net->streams.head.w)
        gather(cu, s, p->mixes[0], from, p->mixes[1], to, N * (N + 2), 1);
    if (p->has_laurel)
        gather(cu, s, p->laurel[0], from, p->laurel[1], to, E, 1);
}

void streams_end(struct cuda_backend *cu)
{
    struct resid *r = &cu->resid;
    const struct streams *s = &cu->net->streams;
    if (!cu->streams || !r->rows)
        return;
    hyper_read(cu, &s->head);
    if (!s->unproject)
        return;
    resid_plain(cu, r);
    for (int j = 1; j < s->n; j++) {
        part_product(cu, s->unproject, j - 1, plane_of(cu, j), cu->act.block);
        cuda_launch(cu, stream_end_kernel, dim3((unsigned)r->rows), STREAM_THREADS, 0, LAUNCH_EARLY,
                    r->x, (const float *)cu->act.block, plane_of(cu, 0), cu->shape.n_embd, j == 1,
                    j + 1 == s->n ? s->n : 0);
    }
}

static struct altup_args altup_of(struct cuda_backend *cu, const struct altup *a, const float *mix)
{
    const struct stream_parts *s = cu->streams;
    struct altup_args p = {};
    p.x = cu->resid.x;
    p.parts = s->parts[cu->resid.parts_narrow];
    p.plane = (size_t)s->rows[cu->resid.parts_narrow] * (size_t)cu->shape.n_embd;
    p.norm = cuda_gain(cu, &a->norm);
    p.norm.gain = p.norm.gain ? p.norm.gain : cu->act.ones;
    p.router = a->router;
    p.mix = mix;
    p.n_parts = cu->net->streams.n;
    p.width = cu->shape.n_embd;
    return p;
}

static void altup_launch(struct cuda_backend *cu, void (*kernel)(struct altup_args),
                         const struct altup *a, const float *mix)
{
    if (!a->router || !cu->resid.rows)
        return;
    resid_plain(cu, &cu->resid);
    step_mark(cu);
    cuda_launch(cu, kernel, dim3((unsigned)cu->resid.rows), STREAM_THREADS, 0, LAUNCH_EARLY,
                altup_of(cu, a, mix));
    step_mark_end(cu, STAGE_NORM);
}

void streams_predict(struct cuda_backend *cu, const struct altup *a)
{
    altup_launch(cu, altup_predict_kernel, a, a->predict);
}

void streams_correct(struct cuda_backend *cu, const struct altup *a)
{
    altup_launch(cu, altup_correct_kernel, a, a->correct);
}

struct rows streams_scaled(struct cuda_backend *cu, const struct altup *a)
{
    struct rows x = resid_plain(cu, &cu->resid);
    if (!a->scale)
        return x;
    cuda_launch(cu, stream_scale_kernel,
                dim3((unsigned)ceil_div(x.width, STREAM_THREADS), (unsigned)x.n), STREAM_THREADS, 0,
                LAUNCH_EARLY, (const float *)x.floats, a->scale, cu->act.norm, x.width);
    return rows_of(cu->act.norm, x.n, x.width);
}

void streams_add(struct cuda_backend *cu, const float *y)
{
    const struct stream_parts *s = cu->streams;
    size_t E = (size_t)cu->shape.n_embd, n = (size_t)cu->resid.rows * E;
    size_t plane = (size_t)s->rows[cu->resid.parts_narrow] * E;
    cuda_launch(cu, stream_add_kernel,
                dim3((unsigned)((n + STREAM_THREADS - 1) / STREAM_THREADS),
                     (unsigned)(cu->net->streams.n - 1)),
                STREAM_THREADS, 0, LAUNCH_EARLY, plane_of(cu, 1), plane, y, n);
}

void streams_laurel(struct cuda_backend *cu, const struct norm *in, const struct laurel *l)
{
    struct stream_parts *s = cu->streams;
    struct resid *r = &cu->resid;
    if (!l->left || !r->rows)
        return;
    struct rows n = resid_norm(cu, r, cuda_gain(cu, in), true);
    struct rows low = rows_of(s->low, r->rows, l->left->n_out);
    struct pick_case c = {};
    c.rows = r->rows;
    c.w = cuda_matrix(l->left);
    c.x = &n;
    c.y = s->low;
    pick_run(cu, PICK_LINEAR, &c, STAGE_QKV);
    c.w = cuda_matrix(l->right);
    c.x = &low;
    c.y = s->laurel[0];
    pick_run(cu, PICK_LINEAR, &c, STAGE_QKV);
    step_mark(cu);
    cuda_launch(cu, laurel_kernel, dim3((unsigned)r->rows), STREAM_THREADS, 0, LAUNCH_EARLY,
                (const float *)n.floats, s->laurel[0], cuda_gain(cu, &l->norm), cu->shape.n_embd);
    step_mark_end(cu, STAGE_NORM);
}

const float *streams_laurel_rows(const struct cuda_backend *cu)
{
    return cu->streams->laurel[cu->resid.parts_narrow];
}
