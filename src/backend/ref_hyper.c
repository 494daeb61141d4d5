/* The specification of hyper-connections (layer.h). See ref.c. The parts s_j of the stream are rows of r->streams; a row of x is what
 * a block reads. */
#include "backend/ref.h"

#include <string.h>

static float *part_of(struct ref *r, int j, int i)
{
    size_t row = (size_t)j * (size_t)r->bounds.max_tokens + (size_t)r->row_of[i];
    return r->streams + row * (size_t)r->net->n_embd;
}

/* Post and M of row i, which its block's result needs. */
static float *mixes_of(struct ref *r, int i)
{
    int N = r->net->streams.n;
    return r->mixes + (size_t)r->row_of[i] * (size_t)(N * (N + 2));
}

void ref_hyper_begin(struct ref *r, int i)
{
    for (int j = 0; j < r->net->streams.n; j++)
        memcpy(part_of(r, j, i), ref_stream_row(r, i), (size_t)r->net->n_embd * sizeof(float));
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
    for (int step = 1; step < 2 * h->rounds; step++) /* columns, then rows and columns */
        for (int a = 0; a < N; a++) {
            float sum = h->offset;
            for (int b = 0; b < N; b++)
                sum += step % 2 ? M[b * N + a] : M[a * N + b];
            for (int b = 0; b < N; b++)
                *(step % 2 ? &M[b * N + a] : &M[a * N + b]) /= sum;
        }
}

void ref_hyper_read(struct ref *r, const struct hyper *h, int i)
{
    int E = r->net->n_embd, N = r->net->streams.n, n_out = h->w->n_out;
    float *s = r->part, *m = mixes_of(r, i), *x = ref_stream_row(r, i);
    for (int j = 0; j < N; j++)
        memcpy(s + j * E, part_of(r, j, i), (size_t)E * sizeof *s);
    float scale = 1 / sqrtf(ref_dot(s, s, N * E) / (float)(N * E) + h->eps);
    ref_matvec(r, h->w, 0, s, m);
    for (int k = 0; k < n_out; k++) {
        int run = k < N ? 0 : k < 2 * N ? 1 : 2;
        m[k] = m[k] * scale * h->scale[run] + h->base[k];
        m[k] = run == 0 ? ref_sigmoid(m[k]) + h->offset : run == 1 ? 2 * ref_sigmoid(m[k]) : m[k];
    }
    if (n_out > N)
        balance(h, m + 2 * N, N);
    for (int e = 0; e < E; e++) {
        double sum = 0;
        for (int j = 0; j < N; j++)
            sum += (double)m[j] * s[j * E + e];
        x[e] = (float)sum;
    }
}

void ref_hyper_write(struct ref *r, const float *y, int i)
{
    int E = r->net->n_embd, N = r->net->streams.n;
    const float *post = mixes_of(r, i) + N, *M = post + N;
    float *part[STREAMS_MAX], old[STREAMS_MAX];
    for (int j = 0; j < N; j++)
        part[j] = part_of(r, j, i);
    for (int e = 0; e < E; e++) {
        for (int j = 0; j < N; j++)
            old[j] = part[j][e];
        for (int k = 0; k < N; k++) {
            double sum = (double)post[k] * y[e];
            for (int j = 0; j < N; j++)
                sum += (double)M[j * N + k] * old[j];
            part[k][e] = (float)sum;
        }
    }
}
