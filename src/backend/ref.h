/*
 * What the files of the reference share: its state, and the sums and norms that all ops are made of. ref.c has the backend,
 * the step, embeddings and the head; ref_mixer.c what mixes positions; ref_mlp.c what each position does alone.
 */
#ifndef STEEL_BACKEND_REF_H
#define STEEL_BACKEND_REF_H

#include "backend/backend.h"
#include "backend/profile.h"
#include "base/clock.h"

#include <math.h>

enum { REF_MAX_USED = 256 }; /* experts of a row */

struct ref {
    struct backend be;
    const struct network *net;
    struct network_max max;
    struct bounds bounds;
    struct batch batch;  /* views into the caller's arrays, valid from begin to end */
    float *x;            /* (max_tokens, E) the residual stream */
    int rows;            /* rows of it */
    int32_t *row_of;     /* (max_tokens) which row of the batch each of them is */
    bool narrow;         /* it has the out rows only */
    float *layer_embeds; /* (max_tokens, n_layers, P) or NULL */
    float *logits;       /* (max_out, n_vocab or E) */
    float *q, *gate, *a; /* (max_tokens, widest H*D) queries, gates, outputs of attention */
    float *qkv;          /* one row of the projection */
    float *n, *y;        /* (E) one row: normed, what a block adds */
    float *part, *sum;   /* (E) one expert of that, and the sum of all */
    float *row;          /* one row of floats, of a weight or of the cache */
    double *mean;        /* as wide: what attention gathers */
    float *hidden;       /* one row of gate and up */
    float *latent;       /* (4, widest latent) */
    float *kept;         /* (max_tokens, E) for drafts; NULL = there is no MTP block */
    float *joined;       /* (2, E) one row of it beside an embedding */
    float *scores;       /* (longest context) */
    float *probs, *keys; /* (n_expert) */
    float *gap;          /* (max_tokens) of the batch's rows: backend_ref_gap */
    int32_t *sampled[2]; /* (max_out) each, of the steps under way */
    struct sample_probs *told[2];
    int32_t *tokens; /* (max_tokens) of the step, all known */
    int n_out[2], now;
    unsigned n_begun, n_ended;
    int64_t stage_start; /* profile clock */
    int at;              /* the batch's row in work: it says which adapters are used */
};

static inline struct ref *ref_self(struct backend *be)
{
    return (struct ref *)be;
}

static inline const struct raw_weight *ref_raw(const struct weight *w)
{
    return w->impl;
}

static inline void ref_stage_begin(struct ref *r)
{
    if (r->be.profile)
        r->stage_start = clock_ns();
}

static inline void ref_stage_end(struct ref *r, enum stage stage)
{
    struct profile *p = r->be.profile;
    if (p)
        p->ns[p->phase][stage] += (double)(clock_ns() - r->stage_start);
}

static inline float ref_or_one(float scale)
{
    return scale == 0 ? 1.0f : scale;
}

static inline float ref_sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

static inline float *ref_stream_row(struct ref *r, int i)
{
    return r->x + (size_t)i * (size_t)r->net->n_embd;
}

float ref_dot(const float *a, const float *b, int n);
/* y (n_out) = x W^T + bias, of expert e, with what the adapters of row r->at change of it */
void ref_matvec(struct ref *r, const struct weight *weight, int e, const float *x, float *y);
void ref_norm_row(const struct norm *norm, const float *x, float *out, int n); /* out may be x */
/* x = sum(x + scale * out(y)); y is changed */
void ref_block_add(struct ref *r, const struct block *b, float *y, float *x);
void ref_narrow(struct ref *r); /* the stream becomes the out rows */

/* The ops. */
void ref_mixer(struct backend *be, const struct mixer *m, int layer);
void ref_mlp(struct backend *be, const struct mlp *m, int layer);

#endif
