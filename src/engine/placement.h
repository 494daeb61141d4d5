/*
 * How a model would be placed on several ranks, without loading it. Each rank's network is made and cut by the code
 * that ranks run (dist/split.h), then its bytes and operations are counted. Reads names and shapes of tensors, never
 * their data. `steel plan` prints the result; predict.h estimates its speed.
 */
#ifndef STEEL_ENGINE_PLACEMENT_H
#define STEEL_ENGINE_PLACEMENT_H

#include "dist/ranks.h"
#include "engine/predict.h"
#include "model/model.h"

/* The smallest and largest number over the layers that have such a part; most 0: no layer has. */
struct placement_span {
    int least, most;
};

struct placement_rank {
    int rank, stage, tp_rank;
    struct range layers; /* of the model */
    struct placement_span heads, kv_heads, ff, ff_exp;
    struct range experts; /* n 0: the model has none */
    struct range vocab; /* rows of the head, or else of the embedding; n 0: this rank has neither */
    size_t weights;     /* bytes in the file's formats; vectors and biases are floats */
    size_t whole;       /* bytes among `weights` that every rank of the stage has a copy of */
    size_t token_bytes,
        state_bytes; /* cache bytes per token, and per sequence regardless of its length */
    size_t scratch;  /* working memory of a step, estimated */
    struct predict_work work;
    struct predict_comm comm;
};

/* A part of the model that every rank has a full copy of, and the reason. */
struct placement_copy {
    const char *part;
    char why[160];
    int layers;   /* number of layers; 0: not part of a layer */
    size_t bytes; /* of one copy, in all stages */
};
enum { PLACEMENT_COPIES = 24 };

struct placement {
    int tp, pp;
    bool ep;
    struct placement_rank one; /* for a single process */
    struct placement_rank *ranks;
    int n_ranks;
    struct placement_copy copies[PLACEMENT_COPIES];
    int n_copies;
};

struct placement_options {
    int tp, pp; /* at least 1 */
    bool ep;
    bool gpu; /* every rank has a GPU of its own, which changes how experts and the head are cut */
    enum dtype k_type, v_type;
    int max_tokens, max_seqs; /* rows and sequences of a step */
};

/* The sizes and formats of a weight of an outline (model.h), without data: for backend.h's plan_ops. transient: its rows are
 * not in the file as they are. */
struct raw_weight;
struct tensor_spec;
bool placement_shape(const struct tensorfile *f, const struct config *c,
                     const struct tensor_spec *spec, struct raw_weight *out, struct error *err);

bool placement_make(const struct tensorfile *f, const struct config *c,
                    const struct placement_options *o, struct placement *out, struct error *err);
void placement_clear(struct placement *p);

#endif
