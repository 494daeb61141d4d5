/*
 * How a model would be placed on several ranks, without loading it: each rank's network is made and cut by
 * the very code that a rank runs (dist/split.h), and what comes out is counted. Reads names and shapes of
 * tensors, never their data. `steel plan` prints it, predict.h says how fast it would be.
 */
#ifndef STEEL_ENGINE_PLACEMENT_H
#define STEEL_ENGINE_PLACEMENT_H

#include "dist/ranks.h"
#include "engine/predict.h"
#include "model/model.h"

/* Over the layers that have such a part; most 0: none has. */
struct placement_span {
    int least, most;
};

struct placement_rank {
    int rank, stage, tp_rank;
    struct range layers; /* of the model's */
    struct placement_span heads, kv_heads, ff, ff_exp;
    struct range experts; /* n 0: there are none */
    struct range vocab;   /* rows of the head, or of the embedding; n 0: it has neither */
    size_t weights;       /* bytes, in the file's own formats, vectors and biases as floats */
    size_t whole;         /* of which every rank of the stage has its own copy */
    size_t token_bytes, state_bytes; /* of the cache: a token, and a sequence whatever its length */
    size_t scratch;                  /* working memory of a step, about */
    struct predict_work work;
    struct predict_talk talk;
};

/* Something that every rank has whole. */
struct placement_copy {
    const char *part;
    char why[160];
    int layers;   /* how many layers; 0: it is of none */
    size_t bytes; /* of one copy, in all stages */
};
enum { PLACEMENT_COPIES = 24 };

struct placement {
    int tp, pp;
    bool ep;
    struct placement_rank one; /* as a single process has it */
    struct placement_rank *ranks;
    int n_ranks;
    struct placement_copy copies[PLACEMENT_COPIES];
    int n_copies;
};

struct placement_options {
    int tp, pp; /* 1 and more */
    bool ep;
    bool gpu; /* every rank has one of its own: some things are cut otherwise there */
    enum dtype k_type, v_type;
    int max_tokens, max_seqs; /* rows and sequences of a step */
};

bool placement_make(const struct tensorfile *f, const struct config *c,
                    const struct placement_options *o, struct placement *out, struct error *err);
void placement_clear(struct placement *p);

#endif
