/* A family of image towers: tensor names, settings, and the functions in which it differs from others. */
#ifndef STEEL_VISION_FAMILY_H
#define STEEL_VISION_FAMILY_H

#include "base/buf.h"
#include "model/families/family.h"
#include "vision/image_plan.h"
#include "vision/tower.h"

struct norm_name {
    struct tensor_name gain, bias;
};

/* Names in a GGUF are llama.cpp's. In a folder "model." stands for the tower's prefix and "lm_head" for the merger's
 * (tower_roots). A name without a tensor in the file is a part that the tower does not have. */
struct tower_names {
    struct tensor_name patches, positions, class_token;
    struct norm_name patch_norm, pre_norm; /* before and after positions are added */
    struct norm_name attn_norm, ffn_norm, attn_post, ffn_post;
    struct tensor_name qkv, q, k, v, o, q_norm, k_norm;
    struct tensor_name attn_scale, ffn_scale; /* layer scale */
    struct tensor_name gate, up, down;
};

/* What joins the rows of four patches in the middle: attention inside the four, then a merger whose result is added to
 * their mean. */
struct tower_join {
    struct tower_names attn;
    struct norm_name norm;
    struct tensor_name up, down;
};

struct tower_roots {
    const char *tower, *merger;
};

/* The order of q's and k's rows in a file: which two rows form a RoPE pair. */
struct tower_pairs {
    enum rotary_rows gguf, folder; /* build.h */
};

enum { TOWER_MAX_TYPES = 6, TOWER_MAX_ROOTS = 4 };

struct tower_family {
    const char *name;                   /* clip.projector_type */
    const char *types[TOWER_MAX_TYPES]; /* model_type of config.json */
    struct tower_roots roots[TOWER_MAX_ROOTS];
    struct tower_names names;
    const struct tower_join *join; /* NULL = none */
    enum norm_kind norm;
    enum activation gelu; /* what a GGUF calls gelu */
    struct tower_pairs pairs;
    bool split_qkv;      /* fused in folders only; q, k and v then name the fused tensor there */
    bool grid_positions; /* of features in the decoder (M-RoPE) */
    /* Marks of an image in a prompt. `feature` stands for one feature; begin and end may be NULL. */
    const char *begin, *feature, *end;
    void (*defaults)(struct config *c, struct tower_config *t);
    /* Reads this family's own settings, after the common ones. From a folder, in->hf is vision_config and in->f->config
     * the whole config.json. */
    bool (*read)(const struct meta_reader *in, struct tower_config *t);
    /* Reads preprocessor_config.json (o). o is NULL for a GGUF or a missing file: the published values apply. */
    bool (*read_pixels)(const struct meta_reader *in, const json_t *o, struct tower_config *t);
    bool (*plan)(const struct tower_config *t, int width, int height, struct image_plan *out,
                 struct error *err);
    /* Limits images to n features by resizing. False: this tower's sizes are fixed. */
    bool (*limit)(struct tower_config *t, int n);
    /* Patches of the largest view. */
    int (*most)(const struct tower_config *t);
    /* Writes an image's marks, one `feature` for each run of features. NULL: begin, feature, end. */
    void (*text)(const struct tower_config *t, const struct image_plan *p, int index,
                 struct buf *out);
    bool row_runs; /* each row of features is a run */
    /* The token between those rows. llama.cpp's mmproj files have its embedding, since it reads the rows of an image as one
     * run. NULL = none */
    const char *row_mark;
    bool square_table; /* a GGUF's table of positions has a dim for each axis */
    bool wide_layers;  /* feed_forward_length of a GGUF is the merger's (tower_config.n_hidden) */
    /* For `convert`: keys that only this family has; NULL = none. */
    void (*write)(const struct config *c, struct gguf_writer *w);
    void (*merge)(struct net_builder *b);
};

extern const struct tower_family *const tower_families[]; /* ends with NULL */
extern const struct tower_family tower_qwen3, tower_qwen25, tower_glm, tower_gemma3, tower_gemma4,
    tower_pixtral, tower_intern, tower_smol, tower_lfm2, tower_minicpm, tower_kimi, tower_llava;

/* tower_build.c */
void tower_build(struct net_builder *b);
struct norm tower_norm(struct net_builder *b, int layer, const struct norm_name *n, int width);
/* Appends a step to the tower's first merger. */
struct merge_step *tower_step(struct net_builder *b);

/* The name of a bound of a product (layer.h, struct clip): in a folder it is beside ".linear". */
void tower_bound_name(const struct tensorfile *f, const struct config *c,
                      const struct tensor_name *name, int layer, const char *suffix, char *out,
                      size_t size);

/* Reads a preprocessing number: `key` of `o` in a folder, clip.vision.GGUF_KEY in a GGUF. Unchanged if the key is
 * absent or NULL. */
bool tower_number(const struct meta_reader *in, const json_t *o, const char *key,
                  const char *gguf_key, double lo, double hi, double *out);
bool tower_int(const struct meta_reader *in, const json_t *o, const char *key, const char *gguf_key,
               int lo, int hi, int *out);
bool tower_bool(const struct meta_reader *in, const json_t *o, const char *key,
                const char *gguf_key, bool *out);

/* CLIP's mean and deviation of each channel. */
#define TOWER_CLIP_MEAN                                                                            \
    {                                                                                              \
        0.48145466f, 0.4578275f, 0.40821073f                                                       \
    }
#define TOWER_CLIP_STD                                                                             \
    {                                                                                              \
        0.26862954f, 0.26130258f, 0.27577711f                                                      \
    }

/* Names that several families share. */
#define TOWER_NORM(gguf, hf)                                                                       \
    {                                                                                              \
        {gguf, hf},                                                                                \
        {                                                                                          \
            "=" gguf ".bias", "=" hf ".bias"                                                       \
        }                                                                                          \
    }
#define TOWER_BLOCK(part)    "v.blk.%d." part
#define TOWER_GGUF_PATCHES   "v.patch_embd"
#define TOWER_GGUF_POSITIONS "v.position_embd"
/* SigLIP and CLIP as transformers saves them. */
#define TOWER_SIGLIP_LAYER(part) "model.encoder.layers.%d." part
#define TOWER_SIGLIP                                                                               \
    .patches = {TOWER_GGUF_PATCHES, "model.embeddings.patch_embedding"},                           \
    .positions = {TOWER_GGUF_POSITIONS, "model.embeddings.position_embedding"},                    \
    .attn_norm = TOWER_NORM(TOWER_BLOCK("ln1"), TOWER_SIGLIP_LAYER("layer_norm1")),                \
    .ffn_norm = TOWER_NORM(TOWER_BLOCK("ln2"), TOWER_SIGLIP_LAYER("layer_norm2")),                 \
    .q = {TOWER_BLOCK("attn_q"), TOWER_SIGLIP_LAYER("self_attn.q_proj")},                          \
    .k = {TOWER_BLOCK("attn_k"), TOWER_SIGLIP_LAYER("self_attn.k_proj")},                          \
    .v = {TOWER_BLOCK("attn_v"), TOWER_SIGLIP_LAYER("self_attn.v_proj")},                          \
    .o = {TOWER_BLOCK("attn_out"), TOWER_SIGLIP_LAYER("self_attn.out_proj")},                      \
    .up = {TOWER_BLOCK("ffn_up"), TOWER_SIGLIP_LAYER("mlp.fc1")},                                  \
    .down = {TOWER_BLOCK("ffn_down"), TOWER_SIGLIP_LAYER("mlp.fc2")}

#endif
