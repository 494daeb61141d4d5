/*
 * Hyper-connections: the stream's parts s_0 .. s_N-1 lie side by side in a row of N*E values, which is also the input of the product
 * that mixes them. A row's arithmetic does not depend on other rows.
 */
#include "backend/cpu/hyper.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"

#include <math.h>
#include <string.h>

/* Values of a vector sum, and columns of a piece: a row is shared by all threads in a decode. */
enum { LANES = 16, COLUMNS = 256 };

struct hyper_state {
    float *parts[2]; /* (max_tokens, N*E), (max_out, N*E) */
    float *mixes[2]; /* (rows, 2*N + N*N): the product; then pre, post and M */
    int now;         /* 1: the output rows */
};

bool cpu_hyper_prepare(struct cpu_backend *cb, const struct network *net, struct error *err)
{
    struct hyper_state all = {0};
    int N = net->streams.n, rows[] = {cb->bounds.max_tokens, cb->bounds.max_out};
    cb->hyper = NULL;
    if (!net->streams.head.w)
        return true;
    for (int i = 0; i < 2; i++)
        if (!(all.parts[i] = cpu_rows(cb, rows[i], N * net->n_embd, "parts of the stream", err)) ||
            !(all.mixes[i] = cpu_rows(cb, rows[i], N * (N + 2), "mixes of the stream", err)))
            return false;
    cb->hyper = cpu_scratch(cb, sizeof *cb->hyper, "parts of the stream", err);
    if (cb->hyper && !cb->measured)
        *cb->hyper = all;
    return cb->hyper != NULL;
}

struct hyper_job {
    const struct cpu_backend *cb;
    const struct hyper *h;
    float *parts, *mixes;
    int N, E;
};

static struct hyper_job job_of(const struct cpu_backend *cb, const struct hyper *h)
{
    const struct hyper_state *s = cb->hyper;
    return (struct hyper_job){
        cb, h, s->parts[s->now], s->mixes[s->now], cb->net->streams.n, cb->net->n_embd};
}

static void begin_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct hyper_job *j = arg;
    size_t E = (size_t)j->E;
    for (size_t i = (size_t)first * (size_t)j->N; i < (size_t)last * (size_t)j->N; i++)
        memcpy(j->parts + i * E, j->cb->stream.x + i / (size_t)j->N * E, E * sizeof(float));
}

void cpu_hyper_begin(struct cpu_backend *cb)
{
    cb->hyper->now = 0;
    struct hyper_job j = job_of(cb, NULL);
    pool_each(cb->pool, cb->stream.rows, POOL_EVEN, begin_rows, &j);
}

/* Makes M (N, N) nearly doubly stochastic. */
static void balance(const struct hyper *h, float *M, int N)
{
    for (int j = 0; j < N; j++) {
        float max = -INFINITY, sum = 0;
        for (int k = 0; k < N; k++)
            max = M[j * N + k] > max ? M[j * N + k] : max;
        for (int k = 0; k < N; k++)
            sum += M[j * N + k] = expf(M[j * N + k] - max);
        for (int k = 0; k < N; k++)
            M[j * N + k] = M[j * N + k] / sum + h->offset;
    }
    for (int step = 1; step < 2 * h->rounds; step++) { /* columns, then rows and columns */
        int along = step % 2 ? N : 1, across = step % 2 ? 1 : N;
        for (int a = 0; a < N; a++) {
            float sum = h->offset;
            for (int b = 0; b < N; b++)
                sum += M[b * along + a * across];
            for (int b = 0; b < N; b++)
                M[b * along + a * across] /= sum;
        }
    }
}

static float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* What a row's parts are mixed by: pre, post and M. */
static void mix_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct hyper_job *j = arg;
    const struct hyper *h = j->h;
    int N = j->N, E = j->E, n_out = h->w->n_out;
    for (int i = first; i < last; i++) {
        const float *s = j->parts + (size_t)i * (size_t)(N * E);
        float *m = j->mixes + (size_t)i * (size_t)n_out, square[LANES] = {0}, sum = 0;
        int e = 0;
        for (; e + LANES <= N * E; e += LANES)
            for (int k = 0; k < LANES; k++)
                square[k] += s[e + k] * s[e + k];
        for (; e < N * E; e++)
            sum += s[e] * s[e];
        for (int k = 0; k < LANES; k++)
            sum += square[k];
        float scale = 1.0f / sqrtf(sum / (float)(N * E) + h->eps);
        for (int k = 0; k < n_out; k++) {
            int run = k < N ? 0 : k < 2 * N ? 1 : 2;
            m[k] = m[k] * scale * h->scale[run] + h->base[k];
            m[k] = run == 0 ? sigmoid(m[k]) + h->offset : run == 1 ? 2 * sigmoid(m[k]) : m[k];
        }
        if (n_out > N)
            balance(h, m + 2 * N, N);
    }
}

static struct pool_work rows_work(void *arg)
{
    const struct hyper_job *j = arg;
    return (struct pool_work){j->cb->stream.rows, POOL_EVEN};
}

static int pieces_of(const struct hyper_job *j)
{
    return (j->E + COLUMNS - 1) / COLUMNS;
}

static struct pool_work pieces_work(void *arg)
{
    const struct hyper_job *j = arg;
    return (struct pool_work){j->cb->stream.rows * pieces_of(j), POOL_EVEN};
}

/* The row and the columns of piece i. */
static int piece_at(const struct hyper_job *j, int i, int *col, int *n)
{
    *col = i % pieces_of(j) * COLUMNS;
    *n = j->E - *col < COLUMNS ? j->E - *col : COLUMNS;
    return i / pieces_of(j);
}

/* x = sum over parts of pre * part */
static void read_pieces(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct hyper_job *j = arg;
    int N = j->N, E = j->E, col, n;
    for (int i = first; i < last; i++) {
        size_t row = (size_t)piece_at(j, i, &col, &n);
        const float *s = j->parts + row * (size_t)(N * E) + col;
        const float *m = j->mixes + row * (size_t)j->h->w->n_out;
        float *x = j->cb->stream.x + row * (size_t)E + col;
        for (int k = 0; k < N; k++) {
            float by = m[k];
            for (int e = 0; e < n; e++)
                x[e] = k ? x[e] + by * s[k * E + e] : by * s[e];
        }
    }
}

void cpu_hyper_read(struct cpu_backend *cb, const struct hyper *h)
{
    static const struct pool_phase phases[] = {{rows_work, mix_rows}, {pieces_work, read_pieces}};
    struct hyper_job j = job_of(cb, h);
    cpu_stage_begin(cb);
    gemm_linear(cb, h->w, j.parts, j.mixes, cb->stream.rows);
    pool_phases(cb->pool, phases, 2, &j);
    cb->stream.pending = false;
    cpu_stage_end(cb, STAGE_NORM);
}

/* part k = post k * result + sum over parts of M(part, k) * part */
static void write_pieces(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct hyper_job *j = arg;
    int N = j->N, E = j->E, col, n;
    for (int i = first; i < last; i++) {
        size_t row = (size_t)piece_at(j, i, &col, &n);
        const float *y = j->cb->stream.d + row * (size_t)E + col;
        const float *post = j->mixes + row * (size_t)(N * (N + 2)) + N, *M = post + N;
        float *s = j->parts + row * (size_t)(N * E) + col, old[STREAMS_MAX][COLUMNS];
        for (int k = 0; k < N; k++)
            memcpy(old[k], s + k * E, (size_t)n * sizeof *s);
        for (int k = 0; k < N; k++) {
            float *to = s + k * E, by = post[k];
            for (int e = 0; e < n; e++)
                to[e] = by * y[e];
            for (int from = 0; from < N; from++) {
                by = M[from * N + k];
                for (int e = 0; e < n; e++)
                    to[e] += by * old[from][e];
            }
        }
    }
}

void cpu_hyper_write(struct cpu_backend *cb)
{
    struct hyper_job j = job_of(cb, NULL);
    pool_each(cb->pool, pieces_work(&j).n, POOL_EVEN, write_pieces, &j);
    cb->stream.pending = false;
}

void cpu_hyper_narrow(struct cpu_backend *cb)
{
    struct hyper_state *s = cb->hyper;
    const struct batch *b = &cb->batch;
    int N = cb->net->streams.n;
    cpu_gather(s->parts[0], b->out_rows, b->n_out, N * cb->net->n_embd, s->parts[1], cb->pool);
    cpu_gather(s->mixes[0], b->out_rows, b->n_out, N * (N + 2), s->mixes[1], cb->pool);
    s->now = 1;
}
