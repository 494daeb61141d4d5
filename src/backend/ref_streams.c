/* The specification of streams of several parts (layer.h, altup). See ref.c. x_0 is a row of x, the other parts and,
 * between mixer and mlp, p_0 are rows of r->streams. */
#include "backend/ref.h"

#include <string.h>

static float *part_of(struct ref *r, int j, int i)
{
    size_t row = (size_t)j * (size_t)r->bounds.max_tokens + (size_t)r->row_of[i];
    return r->streams + row * (size_t)r->net->n_embd;
}

/* sqrt(max(mean(v^2), 1e-5)) */
static float magnitude(const float *v, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += (double)v[i] * v[i];
    return (float)sqrt(sum / n > 1e-5 ? sum / n : 1e-5);
}

void ref_streams_begin(struct ref *r, int i)
{
    int E = r->net->n_embd;
    const float *x = ref_stream_row(r, i);
    for (int j = 1; j < r->net->streams.n; j++) {
        float *y = part_of(r, j, i);
        ref_matvec(r, r->net->streams.project, j - 1, x, y);
        float scale = magnitude(x, E) / magnitude(y, E);
        for (int e = 0; e < E; e++)
            y[e] *= scale;
    }
}

/* out (N) = tanh(norm(x) Wr^T / E) */
static void route(struct ref *r, const struct altup *a, const float *x, float *out)
{
    int E = r->net->n_embd;
    ref_norm_row(&a->norm, x, r->part, E);
    for (int j = 0; j < r->net->streams.n; j++)
        out[j] = tanhf(ref_dot(r->part, a->router + (size_t)j * (size_t)E, E) / (float)E);
}

void ref_streams_predict(struct ref *r, const struct altup *a, int i)
{
    int E = r->net->n_embd, N = r->net->streams.n;
    float *x = ref_stream_row(r, i), *part[STREAMS_MAX] = {part_of(r, 0, i)};
    float mix[STREAMS_MAX * STREAMS_MAX], old[STREAMS_MAX], kind[STREAMS_MAX];
    route(r, a, x, kind);
    for (int c = 0; c < N * N; c++)
        mix[c] = ref_dot(kind, a->predict + c * N, N);
    for (int j = 0; j < N; j++)
        part[j] = part_of(r, j, i);
    for (int e = 0; e < E; e++) {
        for (int j = 0; j < N; j++)
            old[j] = j ? part[j][e] : x[e];
        for (int j = 0; j < N; j++)
            part[j][e] = old[j] + ref_dot(mix + j * N, old, N);
        x[e] = part[0][e];
    }
}

void ref_streams_correct(struct ref *r, const struct altup *a, int i)
{
    int E = r->net->n_embd, N = r->net->streams.n;
    float *x = ref_stream_row(r, i), *part[STREAMS_MAX] = {part_of(r, 0, i)};
    float kind[STREAMS_MAX], mix[STREAMS_MAX];
    route(r, a, x, kind);
    for (int j = 0; j < N; j++) {
        part[j] = part_of(r, j, i);
        mix[j] = 1 + ref_dot(kind, a->correct + j * N, N);
    }
    for (int e = 0; e < E; e++) {
        float change = x[e] - part[0][e];
        for (int j = 0; j < N; j++)
            part[j][e] += mix[j] * change;
        x[e] = part[0][e];
    }
}

void ref_streams_add(struct ref *r, const float *y, int i)
{
    for (int j = 1; j < r->net->streams.n; j++)
        for (int e = 0; e < r->net->n_embd; e++)
            part_of(r, j, i)[e] += y[e];
}

void ref_streams_end(struct ref *r, int i)
{
    int E = r->net->n_embd, N = r->net->streams.n;
    float *x = ref_stream_row(r, i), size = magnitude(x, E);
    for (int j = 1; j < N; j++) {
        ref_matvec(r, r->net->streams.unproject, j - 1, part_of(r, j, i), r->part);
        float scale = size / magnitude(r->part, E);
        for (int e = 0; e < E; e++)
            x[e] += scale * r->part[e];
    }
    for (int e = 0; e < E; e++)
        x[e] /= (float)N;
}
