/*
 * Building a network. A family names the tensors of each part and gets the weights and vectors that
 * the layers point to. Only metadata, tensor sizes and RoPE factors are read here: that is enough for
 * a backend to say whether it can run the network. weights.c then loads the listed tensors.
 */
#ifndef STEEL_MODEL_BUILD_H
#define STEEL_MODEL_BUILD_H

#include "backend/layer.h"
#include "model/config.h"

struct cut; /* model/cut.h */

/*
 * The name of a tensor in a GGUF and in a Hugging Face folder, without ".weight". The first %d is the
 * layer, the second the expert. A name with one %d holds all experts in one 3-D tensor, as a GGUF
 * always does. "%.0d" stands for no layer, where matrices of layer 0 are numbered. "=name" is the whole name; only "_bias" and similar suffixes are added to it. Folder
 * names start with "model." or "lm_head"; build_name puts config.hf_model and hf_head in their place.
 */
struct tensor_name {
    const char *gguf, *hf;
};

/*
 * Rows of a weight that come from one tensor. Row i of the weight is by default row i of the tensor.
 *   interleaved = 128          GGUF, llama: in heads of 128 rows, model row j * 64 + i is tensor row
 *                              2 * i + j
 *   first = 1, step = 2,       folder, gpt-oss: the up rows of a tensor that alternates gate and up
 *   tensor_rows = 2 * F
 *   transposed                 folder, gpt-oss: the tensor is (n_in, tensor_rows)
 *   step = 512, run_length = 128  Qwen3-Next: 128 rows out of every 512
 *   stride = 256, offset = 128 DeepSeek kv_b: one matrix per head; head h starts at tensor row
 *                              256 * h + 128
 */
/* The place of a rotary pair's two dims in a head of d rows. Pairs 0 .. d/4-1 turn by one axis of an image, the others by
 * the other; text has one axis. In the model pair p is at p and p + d/2. */
enum rotary_rows {
    ROTARY_PLAIN,           /* as in the model */
    ROTARY_ADJACENT,        /* 2p, 2p + 1 */
    ROTARY_HALVES,          /* pair i of axis h: h * d/2 + i, and d/4 further */
    ROTARY_HALVES_ADJACENT, /* h * d/2 + 2i, and the next */
    ROTARY_WOVEN,           /* 4i + 2h, and the next */
};

struct weight_rows {
    const struct tensor_name *name;
    int n;
    int interleaved; /* rows of a head whose rotary pairs are adjacent in a GGUF; 0 = none are */
    int n_rot;       /* only the first n_rot of them form pairs; 0 = all */
    bool interleaved_folder; /* the pairs are adjacent in folders too */
    /* of an image tower: instead of interleaved_folder; interleaved is the head's rows */
    enum rotary_rows tower_gguf, tower_folder;
    /* Row i is tensor row first + step * (i / run_length) + i % run_length, in folders (also_gguf:
     * and in GGUFs). tensor_rows: the tensor's rows; 0: it has exactly n. run_length 0 means 1. */
    int first, step, tensor_rows;
    bool transposed, also_gguf;
    int run_length;
    /* One matrix per head, in both kinds of file. Head h's rows (transposed: columns) start at
     * stride * h + offset. stride 0: the tensor is not split by heads. */
    int stride, offset;
    /* For `convert`: the first fold[0].n rows are multiplied by fold[0].times, and so on, for readers that do not know
     * these factors. n 0 ends. */
    struct row_fold {
        int n;
        float times;
    } fold[SSM_PARTS + 1];
    /* The last n_more experts come from another tensor, whose rows are laid out in the same way, or (more_whole) are
     * these rows alone. `convert` keeps the two apart. */
    const struct tensor_name *more;
    int n_more;
    bool more_whole;
    bool flat; /* a convolution's tensor: its dims multiply to n * n_in, outputs outermost */
    /* GGUF only: after the first `plain` rows (columns), heads of `len` rows are tiled. Head j of
     * group g is stored at j * groups + g. For `convert`; the readers use delta_net.tiled. */
    struct head_tiles {
        int plain, groups, each, len;
        bool columns;
    } tiles;
};

/* The order of rotary pairs in the file. */
static inline enum rotary_rows rows_order(const struct weight_rows *rows, bool is_gguf)
{
    if (!rows->interleaved)
        return ROTARY_PLAIN;
    if (rows->tower_gguf || rows->tower_folder)
        return is_gguf ? rows->tower_gguf : rows->tower_folder;
    return is_gguf || rows->interleaved_folder ? ROTARY_ADJACENT : ROTARY_PLAIN;
}

/* The tensor row of the weight's row i, for pairs in this order. */
static inline int rows_to_tensor(const struct weight_rows *rows, enum rotary_rows order, int i)
{
    if (!rows->interleaved)
        return i;
    int in = i % rows->interleaved, n = rows->n_rot ? rows->n_rot : rows->interleaved;
    int pair = in % (n / 2), second = in / (n / 2), axis = pair / (n / 4 ? n / 4 : 1),
        k = pair % (n / 4 ? n / 4 : 1), head = i - in;
    if (in >= n)
        return i;
    switch (order) {
    case ROTARY_ADJACENT:
        return head + 2 * pair + second;
    case ROTARY_HALVES:
        return head + axis * (n / 2) + second * (n / 4) + k;
    case ROTARY_HALVES_ADJACENT:
        return head + axis * (n / 2) + 2 * k + second;
    case ROTARY_WOVEN:
        return head + 4 * k + 2 * axis + second;
    case ROTARY_PLAIN:
        break;
    }
    return i;
}

/* The weight's row of tensor row i. */
static inline int rows_from_tensor(const struct weight_rows *rows, enum rotary_rows order, int i)
{
    int head = i - i % rows->interleaved, at = head;
    while (rows_to_tensor(rows, order, at) != i)
        at++;
    return at;
}

/* Changes to a vector's values at loading: value = (stored + add) * times, with add for folders only.
 * `convert` multiplies the values it writes by fold, for readers that do not know that factor.
 * 0 = no change. */
struct adjust {
    float add, times, fold;
    float fill; /* a folder has no such tensor: its values, all the same; 0 = it has one */
    int below;  /* whole numbers from 0 to below - 1, in a tensor of integers; 0 = not so */
    bool decay; /* stored as a logarithm in a folder, negated in a GGUF */
    int wrap;   /* length of the rows in which a GGUF stores the vector; 0 = one row */
    int n_tail; /* the last values, which no file has: */
    float tail;
};

/* A weight or vector of the network, and the tensors it is assembled from. */
struct tensor_spec {
    struct weight *w; /* NULL: a vector */
    float *vector;    /* (n_in) backend memory */
    float *values;    /* (n_in) of a vector that no file has, owned; NULL = it is read */
    enum weight_role role;
    int layer, n_in, n_expert;
    int net_layer;  /* the network's layer (model_family.parts) */
    int gguf_layer; /* for `convert`: 1 + the number in the GGUF's name; 0 = layer's */
    int n_rows;
    struct weight_rows rows[3];
    struct adjust adjust; /* of a vector */
    bool is_bias;         /* the vector is the bias of that name */
    int width;            /* row length if the vector is a table; 0 = it is not */
    /* For `convert`: all rows are written to one tensor of this name. as_is: in the folder's order, matrices of heads as one. */
    const struct tensor_name *as;
    bool as_is;
    bool eagle;      /* in the file of c->eagle (model/eagle.h) */
    bool copy;       /* for `convert`: another vector has this tensor, too */
    struct cut *cut; /* the part that is kept, owned; NULL = all */
};

struct net_builder {
    const struct tensorfile *f;
    const struct config *c;
    struct backend *be; /* NULL: sizes only; vectors then get placeholder memory */
    struct network *net;
    struct tensor_spec *specs; /* (n_specs) */
    int n_specs, cap;
    int spare_ropes; /* room that build_ropes leaves for further RoPE tables */
    int part;        /* which of a layer's parts is being built (model_family.parts) */
    struct error *err;
    bool failed; /* err says why */
};

/* The file that has the spec's tensors, and its config, which names them. */
void build_source(const struct tensor_spec *spec, const struct tensorfile **f,
                  const struct config **c);

/* Writes the tensor's full name; suffix: "weight", "bias", ... */
void build_name(const struct tensorfile *f, const struct config *c, const struct tensor_name *n,
                int layer, int expert, const char *suffix, char *out, size_t size);
const struct tensor *build_find(const struct tensorfile *f, const struct config *c,
                                const struct tensor_name *n, int layer, int expert,
                                const char *suffix);
/* NAME.scale of an NVFP4 weight in a GGUF: one factor per matrix. NULL = none. */
const struct tensor *build_scale(const struct tensorfile *f, const struct config *c,
                                 const struct tensor_name *n, int layer);
/* Whether the file stores all experts of this name in one tensor. */
bool build_stacked(const struct tensorfile *f, const struct tensor_name *n);
/* Whether the file has the matrix, plain or packed. Of experts the first one is looked up. */
bool build_present(const struct tensorfile *f, const struct config *c, const struct tensor_name *n,
                   int layer);
/* build_present for the builder's file. */
bool build_has(const struct net_builder *b, const struct tensor_name *n, int layer);

/* A matrix, or n_expert of them, assembled from up to three tensors. It has a bias if one of them has. */
const struct weight *build_weight(struct net_builder *b, enum weight_role role, int layer, int n_in,
                                  int n_expert, int n_rows, const struct weight_rows *rows);
const struct weight *build_matrix(struct net_builder *b, enum weight_role role, int layer,
                                  const struct tensor_name *name, int n_in, int n_out);
struct norm build_rms(struct net_builder *b, int layer, const struct tensor_name *name, int width);
struct norm build_rms_adjusted(struct net_builder *b, int layer, const struct tensor_name *name,
                               int width, struct adjust adjust);
/* LayerNorm, with the bias that belongs to the name if the file has one. */
struct norm build_layer_norm_of(struct net_builder *b, int layer, const struct tensor_name *name,
                                int width, struct adjust adjust);
/* LayerNorm. The bias has its own tensor name ("=...") and is optional. */
struct norm build_layer_norm(struct net_builder *b, int layer, const struct tensor_name *gain,
                             const struct tensor_name *bias, int width);
/* Floats (width) in backend memory: sinks, biases, scales. NULL after a failure. */
const float *build_vector(struct net_builder *b, int layer, const struct tensor_name *name,
                          int width, struct adjust adjust);
/* The same of values that follow from the metadata. */
const float *build_values(struct net_builder *b, int layer, const float *values, int width);
/* A table (rows, width) of whole numbers below a bound. */
const float *build_numbers(struct net_builder *b, int layer, const struct tensor_name *name,
                           int rows, int width, int below);
/* A table (rows, width) in backend memory. */
const float *build_table(struct net_builder *b, int layer, const struct tensor_name *name, int rows,
                         int width);
/* A table of three tensors of rows[i] rows each, one after the other. */
const float *build_tables(struct net_builder *b, int layer, const struct tensor_name *names,
                          const int *rows, int width);
/* The value of a tensor with one element; 1 if the file has no such tensor. */
float build_scalar(struct net_builder *b, int layer, const struct tensor_name *name);
/* RoPE from b->c, with the file's frequency factors if it has any. NULL: the model has no RoPE. */
const struct rope *build_rope(struct net_builder *b);
/* Several RoPE tables: rope i has configs[i] and n_rot[i] dims. Only the first uses the factors. */
const struct rope *build_ropes(struct net_builder *b, int n,
                               const struct rope_config *const *configs, const int *n_rot);

/* Frees weights, vectors, layers and RoPE tables. */
void build_free(struct backend *be, struct network *net, struct tensor_spec *specs, int n_specs);

#endif
