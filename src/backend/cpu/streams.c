/*
 * Streams of several parts: between layers x_0 is the backend's stream, and cb->streams has the other parts by batch
 * rows; between mixer and mlp it has the predictions of all parts. A row's arithmetic does not depend on other rows.
 */
#include "backend/cpu/streams.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "base/mem.h"

#include <math.h>
#include <string.h>

enum { LANES = 8 };

static float dot(const float *a, const float *b, int n)
{
    float sum[LANES] = {0}, all = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++)
            sum[k] += a[i + k] * b[i + k];
    for (; i < n; i++)
        all += a[i] * b[i];
    for (int k = 0; k < LANES; k++)
        all += sum[k];
    return all;
}

static float magnitude(const float *v, int n)
{
    float mean = dot(v, v, n) / (float)n;
    return sqrtf(mean > 1e-5f ? mean : 1e-5f);
}

static float *part_of(const struct cpu_backend *cb, int j, int i)
{
    size_t row = (size_t)(cb->stream.narrow ? cb->batch.out_rows[i] : i);
    return cb->streams +
           ((size_t)j * (size_t)cb->bounds.max_tokens + row) * (size_t)cb->net->n_embd;
}

static float *row_of(const struct cpu_backend *cb, float *rows, int i)
{
    return rows + (size_t)i * (size_t)cb->net->n_embd;
}

bool cpu_streams_prepare(struct cpu_backend *cb, const struct network *net, int max_tokens,
                         struct error *err)
{
    int rank = 0, E = net->n_embd, T = max_tokens;
    for (int i = 0; i < net->n_layers; i++) {
        const struct weight *left = net->layers[i].mixer.laurel.left;
        rank = left && left->n_out > rank ? left->n_out : rank;
    }
    cb->streams = NULL;
    return (!net->streams.project ||
            (cb->streams = cpu_rows(cb, net->streams.n * T, E, "parts of the stream", err))) &&
           (!rank || ((cb->laurel = cpu_rows(cb, T, E, "low-rank residuals", err)) &&
                      (cb->laurel_low = cpu_rows(cb, T, rank, "low-rank residuals", err))));
}

struct streams_job {
    const struct cpu_backend *cb;
    const struct altup *a;
    int part;
};

/* The part gets the magnitude of x_0. */
static void scale_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct streams_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    int E = cb->net->n_embd;
    for (int i = first; i < last; i++) {
        float *y = part_of(cb, j->part, i);
        float scale = magnitude(row_of(cb, cb->stream.x, i), E) / magnitude(y, E);
        for (int e = 0; e < E; e++)
            y[e] *= scale;
    }
}

void cpu_streams_begin(struct cpu_backend *cb)
{
    for (int k = 1; k < cb->net->streams.n; k++) {
        struct streams_job j = {cb, NULL, k};
        gemm_linear_of(cb, cb->net->streams.project, k - 1, cb->stream.x, part_of(cb, k, 0),
                       cb->stream.rows);
        pool_each(cb->pool, cb->stream.rows, POOL_EVEN, scale_rows, &j);
    }
}

/* out (N) = tanh(norm(x) Wr^T / E) */
static void route(const struct streams_job *j, int ith, const float *x, float *out)
{
    const struct cpu_backend *cb = j->cb;
    int E = cb->net->n_embd;
    float *n = gemm_tile(cb, ith, 0);
    memcpy(n, x, (size_t)E * sizeof *n);
    cpu_norm_alone(&j->a->norm, n, 1, E, cb->isa);
    for (int k = 0; k < cb->net->streams.n; k++)
        out[k] = tanhf(dot(n, j->a->router + (size_t)k * (size_t)E, E) / (float)E);
}

static void predict_rows(void *arg, int ith, int first, int last)
{
    const struct streams_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    int E = cb->net->n_embd, N = cb->net->streams.n;
    for (int i = first; i < last; i++) {
        float *x = row_of(cb, cb->stream.x, i), *part[STREAMS_MAX] = {part_of(cb, 0, i)};
        float mix[STREAMS_MAX * STREAMS_MAX] = {0}, old[STREAMS_MAX], kind[STREAMS_MAX];
        route(j, ith, x, kind);
        for (int c = 0; c < N * N; c++)
            mix[c] = dot(kind, j->a->predict + (size_t)c * (size_t)N, N);
        for (int k = 0; k < N; k++) {
            part[k] = part_of(cb, k, i);
            mix[k * N + k] += 1;
        }
        for (int e = 0; e < E; e++) {
            for (int k = 0; k < N; k++)
                old[k] = k ? part[k][e] : x[e];
            for (int k = 0; k < N; k++) {
                float sum = 0;
                for (int from = 0; from < N; from++)
                    sum += mix[k * N + from] * old[from];
                part[k][e] = sum;
            }
            x[e] = part[0][e];
        }
    }
}

static void correct_rows(void *arg, int ith, int first, int last)
{
    const struct streams_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    int E = cb->net->n_embd, N = cb->net->streams.n;
    for (int i = first; i < last; i++) {
        float *x = row_of(cb, cb->stream.x, i), kind[STREAMS_MAX];
        const float *before = part_of(cb, 0, i);
        route(j, ith, x, kind);
        for (int k = 1; k < N; k++) {
            float *part = part_of(cb, k, i);
            float mix = 1 + dot(kind, j->a->correct + (size_t)k * (size_t)N, N);
            for (int e = 0; e < E; e++)
                part[e] += mix * (x[e] - before[e]);
        }
        float mix = 1 + dot(kind, j->a->correct, N);
        for (int e = 0; e < E; e++)
            x[e] = before[e] + mix * (x[e] - before[e]);
    }
}

static void each_row(struct cpu_backend *cb, void (*rows)(void *, int, int, int),
                     const struct altup *a)
{
    struct streams_job j = {cb, a, 0};
    cpu_settle(cb);
    cpu_stage_begin(cb);
    pool_each(cb->pool, cb->stream.rows, POOL_EVEN, rows, &j);
    cpu_stage_end(cb, STAGE_NORM);
}

void cpu_streams_predict(struct cpu_backend *cb, const struct altup *a)
{
    each_row(cb, predict_rows, a);
}

void cpu_streams_correct(struct cpu_backend *cb, const struct altup *a)
{
    each_row(cb, correct_rows, a);
}

static void scaled_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct streams_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    for (int i = first; i < last; i++) {
        const float *x = row_of(cb, cb->stream.x, i);
        float *to = row_of(cb, cb->n, i);
        for (int e = 0; e < cb->net->n_embd; e++)
            to[e] = x[e] * j->a->scale[e];
    }
}

const float *cpu_streams_scaled(struct cpu_backend *cb, const struct altup *a)
{
    struct streams_job j = {cb, a, 0};
    pool_each(cb->pool, cb->stream.rows, POOL_EVEN, scaled_rows, &j);
    return cb->n;
}

static void add_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct streams_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    for (int i = first; i < last; i++) {
        const float *d = row_of(cb, cb->stream.d, i);
        for (int k = 1; k < cb->net->streams.n; k++) {
            float *part = part_of(cb, k, i);
            for (int e = 0; e < cb->net->n_embd; e++)
                part[e] += d[e];
        }
    }
}

void cpu_streams_add(struct cpu_backend *cb)
{
    struct streams_job j = {cb, NULL, 0};
    pool_each(cb->pool, cb->stream.rows, POOL_EVEN, add_rows, &j);
}

/* cb->n = the part's output rows */
static void gather_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct streams_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    for (int i = first; i < last; i++)
        memcpy(row_of(cb, cb->n, i), part_of(cb, j->part, i),
               (size_t)cb->net->n_embd * sizeof(float));
}

/* Part 0 collects the sum; d has the product of the part. */
static void collect_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct streams_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    int E = cb->net->n_embd, N = cb->net->streams.n;
    for (int i = first; i < last; i++) {
        float *x = row_of(cb, cb->stream.x, i), *sum = part_of(cb, 0, i);
        const float *z = row_of(cb, cb->stream.d, i);
        float scale = magnitude(x, E) / magnitude(z, E);
        for (int e = 0; e < E; e++)
            sum[e] = (j->part == 1 ? x[e] : sum[e]) + scale * z[e];
        for (int e = 0; j->part == N - 1 && e < E; e++)
            x[e] = sum[e] / (float)N;
    }
}

void cpu_streams_end(struct cpu_backend *cb)
{
    int rows = cb->stream.rows;
    cpu_settle(cb);
    cpu_stage_begin(cb);
    for (int k = 1; k < cb->net->streams.n; k++) {
        struct streams_job j = {cb, NULL, k};
        pool_each(cb->pool, rows, POOL_EVEN, gather_rows, &j);
        gemm_linear_of(cb, cb->net->streams.unproject, k - 1, cb->n, cb->stream.d, rows);
        pool_each(cb->pool, rows, POOL_EVEN, collect_rows, &j);
    }
    cpu_stage_end(cb, STAGE_HEAD);
}

void cpu_laurel(struct cpu_backend *cb, const struct laurel *l, const float *n)
{
    int rows = cb->stream.rows, E = cb->net->n_embd;
    cpu_stage_begin(cb);
    gemm_linear(cb, l->left, n, cb->laurel_low, rows);
    gemm_linear(cb, l->right, cb->laurel_low, cb->laurel, rows);
    cpu_add_norm(cb->laurel, NULL, &l->norm, cb->laurel, rows, E, cb->pool, cb->isa);
    cpu_add_scale(cb->laurel, n, 1, rows, E, cb->pool);
    cpu_stage_end(cb, STAGE_FFN);
}

static void laurel_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct streams_job *j = arg;
    const struct cpu_backend *cb = j->cb;
    for (int i = first; i < last; i++) {
        const float *l = row_of(cb, cb->laurel, cb->stream.narrow ? cb->batch.out_rows[i] : i);
        float *x = row_of(cb, cb->stream.x, i);
        for (int e = 0; e < cb->net->n_embd; e++)
            x[e] = (x[e] + l[e]) * 0.70710678f;
    }
}

void cpu_laurel_add(struct cpu_backend *cb)
{
    each_row(cb, laurel_rows, NULL);
}

void cpu_keep_top(float sparsity, float *g, int n)
{
    float mean = 0, var = 0, sum[LANES] = {0}, square[LANES] = {0};
    int whole = n / LANES * LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int k = 0; k < LANES; k++)
            sum[k] += g[i + k];
    for (int i = whole; i < n; i++)
        sum[0] += g[i];
    for (int k = 0; k < LANES; k++)
        mean += sum[k] / (float)n;
    for (int i = 0; i < whole; i += LANES)
        for (int k = 0; k < LANES; k++)
            square[k] += (g[i + k] - mean) * (g[i + k] - mean);
    for (int i = whole; i < n; i++)
        square[0] += (g[i] - mean) * (g[i] - mean);
    for (int k = 0; k < LANES; k++)
        var += square[k] / (float)n;
    float cut = mean + sparsity * sqrtf(var);
    for (int i = 0; i < n; i++)
        g[i] = g[i] > cut ? g[i] - cut : 0;
}
