/*
 * State and basic arithmetic (products, norms) shared by the files of the reference. ref.c: backend, step, embeddings,
 * head. ref_mixer.c: mixers. ref_mlp.c: mlps.
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
    struct batch batch; /* views into the caller's arrays, valid from begin to end */
    float *x;           /* (max_tokens, E) the residual stream */
    int rows;           /* rows of x in use */
    int32_t *row_of;    /* (max_tokens) the batch row of each row of x */
    bool narrow;        /* x has only the output rows */
    float *streams; /* (N, max_tokens, E) by batch rows: parts of the stream; NULL = it has one */
    float *layer_embeds; /* (max_tokens, n_layers, P) or NULL */
    float *logits[2];    /* (max_out, n_vocab or E) of two steps in flight */
    int readable;        /* which of them ref_logits reads */
    float *q, *gate, *a; /* (max_tokens, widest H*D) queries, gates, outputs of attention */
    float *qkv;          /* one row of the projection */
    float *rel;          /* (max_tokens, widest wrel) of relative positions */
    float *before;       /* (max_tokens, E) what the mixer read, by rows of x */
    float *late;         /* (max_tokens, E) results of late experts, by batch rows */
    float *mixes;        /* (max_tokens, 2*N + N*N) of hyper-connections, by batch rows */
    float *compressed;   /* a row's product of a compressor, and an entry */
    int32_t *visible;    /* (longest context) slots of the rows that a row sees */
    float *n, *y;        /* (2 * E), (E) one row: the normed input, the block's result */
    float *part, *sum;   /* (E or L) one expert's result, and the sum over experts */
    float *to_experts;   /* (L) a latent expert's input */
    float *weighed;      /* (E or L) an expert's input times its weight */
    float *row;          /* one row of floats, of a weight or of the cache */
    double *mean;        /* as wide: attention's weighted sum of values */
    float *hidden;       /* one row of gate and up */
    float *latent;       /* (4, widest latent) */
    float *kept;         /* (max_tokens, E) rows stored by keep; NULL = no MTP block */
    float *joined;       /* (2, E) one row's embedding and kept row; with taps (max_tokens, 2, E) */
    float *taps;         /* (max_tokens, n_taps, E) rows stored by tap */
    float *merged;       /* (MERGER_MAX_STEPS, 3, widest row) rows inside a merger */
    float *clipped;      /* a product's bounded input */
    float **features;    /* (n_mergers) -> (max_tokens / rows, n_out) */
    int n_features;
    float *scores; /* (longest context) */
    /* Indexers: queries and weights of all rows, one key; a row's choices, (max_tokens, groups, n_chosen), and their
     * lengths, -1 = all keys; NULL = none. They stay for layers that reuse them. */
    float *index_q, *index_w, *index_k;
    int32_t *chosen, *n_chosen;
    bool *seen;          /* (longest context) the keys of a row that were chosen */
    float *probs, *keys; /* (n_expert) */
    float *gap;          /* (max_tokens) per batch row: see backend_ref_gap */
    int32_t *sampled[2]; /* (max_out) each, of the steps in flight */
    struct sample_probs *told[2];
    int32_t *tokens; /* (max_tokens) of the step, with sampled tokens in place of -1-r */
    int n_out[2], now;
    unsigned n_begun, n_ended;
    int64_t stage_start; /* profile clock */
    int at;              /* the batch row being computed, which determines its adapters */
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
/* y (n_out) = x W^T + bias for expert e, plus the adapters of row r->at */
void ref_matvec(struct ref *r, const struct weight *weight, int e, const float *x, float *y);
/* Rows [first, first + n) of the same, where clip bounds inputs and outputs. clip NULL: no bounds. */
void ref_matvec_rows(struct ref *r, const struct weight *weight, int first, int n,
                     const struct clip *clip, const float *x, float *y);
void ref_norm_row(const struct norm *norm, const float *x, float *out, int n); /* out may be x */
/* x = sum(x + scale * out(y)), or with keep, of in(x); overwrites y */
void ref_block_add(struct ref *r, const struct block *b, float *y, float *x);
/* Row t through a convolution of `width` channels, whose state begins at `at` in the layer's. */
void ref_conv_row(struct ref *r, int layer, const struct row_conv *c, size_t at, int t, int width,
                  float *y);
void ref_narrow(struct ref *r); /* the stream becomes the output rows */

/* ref_index.c. Row t's queries and weights of the indexer, and its key to the cache. n: the mixer's input, u: the indexer's. */
void ref_index_row(struct ref *r, const struct indexer *x, const struct kv_layer *kv, int t,
                   const float *n, const float *u);
/* Keys that a row at `pos` could see: its own and those before it, or entries. */
int ref_index_keys(const struct indexer *x, int pos);
/* Chooses the keys of all rows, for n_groups groups of heads. */
void ref_index_choose(struct ref *r, const struct indexer *x, const struct kv_layer *kv,
                      int n_groups);
/* r->seen: the keys up to `last` that row t sees, for a group of heads; without an indexer all. */
void ref_index_seen(struct ref *r, const struct indexer *x, int t, int group, int last);
/* Turns the first dims of a head of row t. */
void ref_rotate(const struct rope *rope, const struct batch *b, int t, float *head);
void ref_deinterleave(struct ref *r, float *x, int n); /* pairs (2i, 2i + 1) become (i, i + n/2) */
size_t ref_kv_at(const struct bounds *s, int slot, int n_heads, int head, int dim);
/* Parts of the stream (altup). i: a row of x. */
void ref_streams_begin(struct ref *r, int i);
void ref_streams_predict(struct ref *r, const struct altup *a, int i);
void ref_streams_correct(struct ref *r, const struct altup *a, int i);
void ref_streams_add(struct ref *r, const float *y, int i); /* to all parts but x_0 */
void ref_streams_end(struct ref *r, int i);

/* Hyper-connections: before a block of row i of x, after it with its result y, and before the head. */
void ref_hyper_begin(struct ref *r, int i);
void ref_hyper_read(struct ref *r, const struct hyper *h, int i);
void ref_hyper_write(struct ref *r, const float *y, int i);
/* ref_compressed.c. Adds row t, whose input is n, to the sums of a compressor. True: an entry is complete, in `entry`. */
bool ref_compress(struct ref *r, const struct compressor *c, int t, const float *n, float *sums,
                  float *entry);
/* The slot of entry w in a plane whose pages have `rows` rows, entries from row `first` on. */
int ref_entry_slot(const struct ref *r, const struct compressor *c, int seq, int w, int rows,
                   int first);
/* Turns the last dims of a head by pos, in adjacent pairs. */
void ref_turn_last(const struct rope *rope, int pos, float *head, int dim);
void ref_mix_compressed(struct ref *r, const struct mixer *m, int layer);
/* r->n = the input of mixer m for row t */
void ref_read_stream(struct ref *r, const struct mixer *m, int t);

/* The ops. */
void ref_mixer(struct backend *be, const struct mixer *m, int layer);
void ref_mlp(struct backend *be, const struct mlp *m, int layer);
void ref_merge(struct backend *be, const struct merger *m, int index);
void ref_experts(struct backend *be, const struct mlp *m, const int32_t *chosen,
                 const float *weights, int used, const float *x, float *y, int rows);

#endif
