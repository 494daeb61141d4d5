/*
 * The Vulkan backend. Kernels are GLSL, compiled to SPIR-V at build time; pointers are device addresses, so nothing is
 * bound but pipelines and push constants. Activations are floats.
 *
 *  1. A step is recorded in a command buffer and submitted by launch(). With a key the command buffer is kept, and later
 *     steps of the same shape replay it: what changes from step to step lies in the step block (shaders/args.h).
 *  2. Every dispatch waits for those before it, except between vulkan_apart(true) and vulkan_apart(false).
 *  3. The first failure is kept; nothing is submitted after it.
 *  4. Limits of the device are read when it is opened. Nothing assumes a width of subgroups.
 *  5. Two steps may be in flight (struct vulkan_flight). The host writes a step's block to its flight; the device copies it
 *     to the block that kernels read when the step begins.
 */
#ifndef STEEL_BACKEND_VULKAN_H
#define STEEL_BACKEND_VULKAN_H

#include "backend/backend.h"
#include "backend/vulkan/loader.h"
#include "backend/vulkan/shaders/args.h"

#include <pthread.h>

/* clang-format off */
/* The kernels: shaders/NAME.comp. */
#define VULKAN_KERNELS(X)                                                                          \
    X(EMBED, embed) X(NORM, norm) X(ADD, add) X(ROPE, rope) X(HEADS, heads) X(ATTN, attn)          \
    X(ATTN_JOIN, attn_join) X(GATE, gate) X(ACT, act) X(ROUTE, route) X(COMBINE, combine)          \
    X(GATHER, gather) X(SCALE, scale) X(GIVEN, given) X(CONV, conv) X(DELTA, delta) X(SSM, ssm)    \
    X(GNORM, gnorm) X(GEMV, gemv) X(GEMM, gemm) X(HALF, half) X(GROUP, group) X(SPREAD, spread)    \
    X(GEMM_COOP, gemm_coop) X(SAMPLE_PROBS, sample_probs) X(SAMPLE_MASK, sample_mask)              \
    X(SAMPLE_EDIT, sample_edit) X(SAMPLE_BEST, sample_best) X(SAMPLE_WEIGH, sample_weigh)          \
    X(SAMPLE_COLLECT, sample_collect) X(SAMPLE_DRAW, sample_draw) X(LORA_A, lora_a)                \
    X(LORA_B, lora_b) X(PATCH, patch) X(CLIP, clip) X(JOIN, join) X(ADD_BYTES, add_bytes)           \
    X(ATTN_GROUP, attn_group) X(ATTN_COOP, attn_coop) X(SCAN, scan) X(STREAMS, streams) X(LEVEL, level) X(TOP, top) X(GEMM_COOP_FEW, gemm_coop_few) X(INDEX_SCORE, index_score) X(INDEX_CHOOSE, index_choose)                                \
    X(BYTES, bytes) X(GEMV_DOT, gemv_dot)
/* clang-format on */

enum vulkan_kernel {
#define X(upper, name) KERNEL_##upper,
    VULKAN_KERNELS(X)
#undef X
        N_KERNELS
};

/* A piece of device memory that allocations are cut from; large allocations have one of their own. */
struct vulkan_block {
    VkDeviceMemory memory;
    VkBuffer buffer;
    uint64_t at; /* device address */
    size_t size, used;
    char *host; /* NULL = not mapped */
    int n_live; /* allocations in it; at 0 it is used from its start again, or freed if large */
};

/* A buffer of host memory that the device reads or writes. */
struct vulkan_shared {
    VkDeviceMemory memory;
    VkBuffer buffer;
    uint64_t at;
    void *host;
    size_t size;
};

struct vulkan_recording {
    uint64_t key, shape; /* key 0 = empty */
    VkCommandBuffer cmd;
};
enum { VULKAN_RECORDINGS = 64, VULKAN_STAMPS = 1024 };

/* One of two steps in flight: what the host writes for it and reads from it. */
struct vulkan_flight {
    struct vulkan_shared step, embeds; /* step block; given rows */
    struct vulkan_shared settings;     /* of samplers (sample.c) */
    struct vulkan_shared results;      /* chosen tokens and log-probabilities */
    struct vulkan_shared vectors;      /* head's rows, for networks without head.w */
    VkCommandBuffer load_cmd, step_cmd, tail_cmd;
    VkFence fence;
    const struct vulkan_recording *used; /* the recording that the step replays or made */
    size_t words, n_embeds;              /* of the step block; given rows */
    int n_out;
    bool loaded, fenced; /* the copy of the block is submitted; the fence is */
    bool *sampled;       /* (max_out) the row has a sampler */
};

/* One row range of a weight, all of one format. Rows are row_words words long (pack.c). */
struct vulkan_segment {
    uint32_t format, rows, first, row_words, tail, group_len;
    uint64_t at, perm; /* perm: GPTQ's order of inputs, 0 = none */
};

struct vulkan_weight {
    struct vulkan_segment seg[3];
    int n_seg;
    void *memory;
    size_t bytes;
    uint64_t bias; /* (n_expert, n_out); 0 = none */
    int lora;      /* its number among those that adapters may change, from 1 on; 0 = none */
};

/* The arguments of a product: rows of x (rows / x_div), rows of y. Device addresses. */
struct product {
    const struct weight *w;
    uint64_t x, y, chosen; /* chosen: the expert of each row; 0 = expert 0 */
    uint32_t ldx, ldy, rows, x_div, expert_first,
        cycle; /* cycle: row r uses matrix r % cycle; 0 = no */
};

/* Scratch of steps: device addresses of (max_tokens, ld) floats each. */
struct vulkan_scratch {
    uint64_t x, n, y, before, qkv, q, a, gate, hidden, part, sum, narrow;
    uint64_t router, chosen, weights, logits;
    uint64_t to_experts, from_experts; /* latent experts' inputs, and the sums of their outputs */
    uint64_t index_q, index_w, index_k, index_scores, chosen_keys; /* index.c */
    uint64_t streams, laurel, layer_embeds;                        /* streams.c */
    uint64_t late;               /* what the next layer adds to the stream */
    uint64_t step, embeds;       /* the step block and the given rows of the current step */
    uint64_t tokens;             /* (max_out) the tokens chosen last */
    uint64_t kept, joined;       /* of the MTP block */
    uint64_t lora_table, lora_t; /* lora.c */
    uint64_t patches, merged[2], features, clip_in, clip_out; /* tower.c */
    uint64_t sampling, edited, norms;                         /* sample.c */
    uint64_t parts;            /* sums of attention over splits of the keys */
    uint64_t groups;           /* the rows of each expert (shaders/tiles.glsl) */
    uint64_t half, half_scale; /* a product's inputs as fp16, and what their rows were divided by */
    uint32_t ld_half;
    uint64_t bytes[2]; /* a product's inputs for integer dot products (shaders/bytes.glsl) */
    uint64_t absorbed, summed; /* latent attention: queries and sums of latents, of every head */
    uint64_t *ropes;           /* (n_ropes): cos and sin of every row */
    uint64_t *freqs, *planes;
    uint32_t ld_x, ld_qkv, ld_heads, ld_hidden, ld_gate, ld_expert, ld_latent;
};

/* Adapters (lora.c). Other threads change `generation` alone. */
struct vulkan_lora_weight {
    const struct weight *w;
    int rank; /* the largest of any adapter so far; 0: no adapter changes the weight */
};
struct vulkan_loras {
    struct vulkan_lora_weight *weights; /* (n_weights) */
    uint64_t *column;                   /* (n_weights) */
    int n_weights, ldt;
    unsigned generation, seen[LORA_MAX_ADAPTERS];
    unsigned epoch; /* counts changes of a weight's rank */
    int n_uses;     /* most adapters of a row of the step */
};

/* Offsets within a flight's settings and results. */
struct sampling_layout {
    size_t edits_at, masks_at, probs_at;
    int max_edits, mask_words;
};

enum {
    VULKAN_MAX_PICKS = 16,
    VULKAN_ATTN_PICKS = 3,
    VULKAN_FIRST = 33, /* a kernel's constants are below these */
    VULKAN_SECOND = 129
};

struct vulkan {
    struct backend be;
    struct error error;
    bool failed;

    VkPhysicalDevice physical;
    VkDevice device;
    VkQueue queue;
    uint32_t family;
    VkPhysicalDeviceMemoryProperties memory_types;
    size_t max_allocation;
    uint32_t max_groups[3]; /* workgroups of a dispatch */
    uint32_t shared;        /* bytes of shared memory */
    bool full_subgroups;
    bool coop;               /* cooperative matrices of 16 x 16 x 16, fp16 with sums of floats */
    bool dot;                /* integer dot products of four bytes */
    bool shuffle;            /* values pass between invocations of a subgroup */
    uint32_t subgroup, wide; /* wide: invocations of a workgroup of WIDE kernels */

    pthread_mutex_t lock; /* blocks, copies, the queue */
    struct vulkan_block *blocks;
    int n_blocks;
    size_t allocated;
    struct vulkan_shared staging;
    VkCommandPool pool;
    VkCommandBuffer copy_cmd;
    VkFence copy_fence;

    VkPipelineLayout layout;
    VkPipeline pipelines[N_KERNELS][VULKAN_FIRST][VULKAN_SECOND];
    uint64_t grid; /* points of the IQ formats */

    const struct network *net;
    struct network_max max;
    struct bounds bounds;
    struct vulkan_scratch s;
    void *owned[64]; /* what prepare() allocated */
    size_t owned_bytes[64];
    int n_owned;

    /* the step begun last */
    struct batch batch;
    struct vulkan_flight flights[2];
    uint64_t n_begun, n_ended;
    struct sampling_layout sampling;
    struct vulkan_loras loras;
    float *logits_row;   /* (n_vocab) of a row that the host samples */
    VkCommandBuffer cmd; /* being recorded or to be submitted; NULL = none */
    VkFence fence;
    struct vulkan_recording recordings[VULKAN_RECORDINGS];
    struct vulkan_recording *keep; /* the recording that cmd becomes */
    uint64_t shape;                /* of the current step */
    int next_recording, rows;      /* rows: of the stream */
    int reach;                     /* no sequence of the step is longer */
    bool narrow, apart, dirty, replayed;
    bool late;                   /* scratch.late is not added to the stream yet */
    bool parallel;               /* a block reads the stream that the one before read */
    const struct block *pending; /* its result is not added to the stream yet; NULL = none */
    /* The layer's rows are listed by expert, in tiles of `grouped` rows. 0: they are not. */
    uint32_t grouped;
    uint64_t bytes_at, bytes_of; /* scratch.bytes has the rows that lie here; 0 = none */
    bool angles;                 /* cos and sin of the step's rows are enqueued */

    /* the profile: timestamps of the step, and the stage that begins at each */
    VkQueryPool stamps;
    float tick_ns; /* 0 = the device has no timestamps */
    int n_stamps;
    uint8_t stages[VULKAN_STAMPS];

    char *forced; /* STEEL_PICK */
    uint64_t runs[VULKAN_MAX_PICKS], attn_runs[VULKAN_ATTN_PICKS];
};

static inline struct vulkan *vulkan_self(struct backend *be)
{
    return (struct vulkan *)be;
}

static inline uint64_t vulkan_address(const void *p)
{
    return (uint64_t)(uintptr_t)p;
}

static inline const struct vulkan_weight *vulkan_matrix(const struct weight *w)
{
    return w->impl;
}

static inline uint32_t vulkan_ld(int width)
{
    return ((uint32_t)width + 7) / 8 * 8;
}

/* Keeps the first failure. Returns false if r is one. */
bool vulkan_try(struct vulkan *v, VkResult r, const char *what);

/* memory.c */
bool vulkan_memory_open(struct vulkan *v, struct error *err);
void vulkan_memory_close(struct vulkan *v);
void *vulkan_alloc(struct backend *be, size_t bytes, const char *what, struct error *err);
void vulkan_free(struct backend *be, void *p, size_t bytes);
void vulkan_copy_in(struct backend *be, void *dst, const void *host, size_t bytes);
void vulkan_copy_out(struct backend *be, void *host, const void *src, size_t bytes);
/* Host memory for the device. fast: device memory that the host can write, if there is such; else cached. */
bool vulkan_share(struct vulkan *v, struct vulkan_shared *s, size_t bytes, bool fast,
                  struct error *err);
void vulkan_unshare(struct vulkan *v, struct vulkan_shared *s);
/* Enqueues a copy of device memory to host memory, after what was dispatched. */
void vulkan_copy_to(struct vulkan *v, VkCommandBuffer cmd, uint64_t from,
                    const struct vulkan_shared *to, size_t bytes);
/* The other way, before what is dispatched next. */
void vulkan_copy_from(struct vulkan *v, VkCommandBuffer cmd, const struct vulkan_shared *from,
                      uint64_t to, size_t bytes);
size_t vulkan_heap(VkPhysicalDevice d, size_t *used); /* bytes of the device's own memory */

/* pipeline.c */
bool vulkan_pipelines_open(struct vulkan *v, struct error *err);
void vulkan_pipelines_close(struct vulkan *v);
/* Makes the pipeline of a kernel with its two constants, unless it is there. */
VkPipeline vulkan_pipeline(struct vulkan *v, enum vulkan_kernel k, uint32_t a, uint32_t b);
bool vulkan_has_constants(enum vulkan_kernel k);
/* Enqueues x * y * z workgroups. args: push constants. */
void vulkan_run(struct vulkan *v, enum vulkan_kernel k, uint32_t a, uint32_t b, const void *args,
                size_t bytes, uint32_t x, uint32_t y, uint32_t z);
/* The same with n workgroups, folded into a grid; kernels read group_id(). */
void vulkan_run_flat(struct vulkan *v, enum vulkan_kernel k, uint32_t a, uint32_t b,
                     const void *args, size_t bytes, uint32_t n);
void vulkan_apart(struct vulkan *v,
                  bool on); /* the dispatches until off do not wait for each other */

/* pack.c */
bool vulkan_upload(struct backend *be, const struct raw_weight *src, enum weight_role role,
                   struct weight *w, struct error *err);
void vulkan_release(struct backend *be, struct weight *w);
uint32_t vulkan_cache_format(enum dtype t);

/* prepare.c */
bool vulkan_supports(struct backend *be, const struct network *net, struct error *err);
bool vulkan_prepare(struct backend *be, const struct network *net, const struct bounds *bounds,
                    struct error *err);
void vulkan_unprepare(struct vulkan *v);
/* Device memory until unprepare. */
bool vulkan_own(struct vulkan *v, uint64_t *to, size_t bytes, struct error *err);

/* step.c */
VkCommandBuffer vulkan_cmd(struct vulkan *v); /* where ops record */
void vulkan_flush(struct vulkan *v);          /* submits what is recorded and waits for it */
void vulkan_begin(struct backend *be, const struct batch *b);
bool vulkan_replay(struct backend *be, uint64_t key);
void vulkan_launch(struct backend *be);
bool vulkan_end(struct backend *be, int32_t *tokens, struct error *err);
void vulkan_logits(struct backend *be, int row, float *host);
void vulkan_forget_recordings(struct vulkan *v);
struct vulkan_flight *vulkan_flight(struct vulkan *v); /* of the step begun last */
/* Commands after a step's network, which are not part of its recording. */
bool vulkan_tail_begin(struct vulkan *v);
void vulkan_tail_submit(struct vulkan *v);
extern const struct stream_ops vulkan_stream;

extern const struct draft_ops vulkan_draft;

/* Activations of `width` outputs: h[i] = act(h[i], h[width + i]). */
void vulkan_activate(struct vulkan *v, const struct ffn *f, uint64_t h, uint32_t ld, int width,
                     int rows);
/* Rows of `from` to rows of `to`. */
void vulkan_copy_rows(struct vulkan *v, uint64_t from, uint32_t ld_from, uint64_t to,
                      uint32_t ld_to, int width, int rows);

/* tower.c */
extern const struct tower_ops vulkan_tower;
bool vulkan_tower_supported(const struct network *net, struct error *err);
bool vulkan_tower_prepare(struct vulkan *v, struct error *err);
void vulkan_patches(struct vulkan *v, const struct embed *e); /* the stream of a step of patches */
/* A product whose outputs are n parts of widths[k], bounded by clips[k]. */
void vulkan_clipped(struct vulkan *v, const struct product *p, const struct clip *clips,
                    const int *widths, int n);

/* lora.c */
extern const struct adapter_ops vulkan_adapters;
bool vulkan_lora_prepare(struct vulkan *v, struct error *err);
void vulkan_lora_close(struct vulkan *v);
size_t vulkan_lora_words(const struct vulkan *v); /* most words of a step block */
/* begin: finds the adapters of the step; adds its lists to the block `to` at *used. */
void vulkan_lora_begin(struct vulkan *v);
void vulkan_lora_put(const struct vulkan *v, int32_t *to, int *used);
/* After a product: adds what the adapters of its rows change. */
void vulkan_lora_add(struct vulkan *v, const struct product *p);

/* sample.c */
bool vulkan_sample_prepare(struct vulkan *v, struct error *err);
void vulkan_sample(struct backend *be, struct sampler *const *samplers);
void vulkan_probs(struct backend *be, int row, struct sample_probs *out);
int32_t vulkan_token(const struct vulkan_flight *f, int row); /* after end; -1 = none */

/* timing.c: what is enqueued from here on belongs to a stage (enum stage), if there is a profile. */
bool vulkan_timing_open(struct vulkan *v);
void vulkan_timing_close(struct vulkan *v);
void vulkan_timing_begin(struct vulkan *v, VkCommandBuffer cmd);
void vulkan_stage(struct vulkan *v, int stage);
void vulkan_timing_end(struct vulkan *v); /* once the step has ended */

/* ops.c */
void vulkan_embed(struct backend *be, const struct embed *e);
void vulkan_head(struct backend *be, const struct head *h);
/* to += the rows of the tokens' embeddings per layer */
void vulkan_lookup_layers(struct vulkan *v, const struct embed_layers *e, uint64_t to, uint32_t ld);
int vulkan_logits_width(const struct vulkan *v);
void vulkan_norm(struct vulkan *v, const struct norm *n, uint64_t x, uint32_t ldx, uint64_t y,
                 uint32_t ldy, int width, int rows);
/* The stream is scratch.x, plus a block's result in scratch.y if one is pending: whoever reads the stream next adds it. */
void vulkan_block_add(struct vulkan *v, const struct block *b); /* makes scratch.y pending */
void vulkan_settle(struct vulkan *v);                           /* adds it now */
void vulkan_read(struct vulkan *v, const struct norm *norm, uint64_t n, uint32_t ldn);
void vulkan_read_block(struct vulkan *v, const struct block *b); /* scratch.n = the block's input */
/* The stream becomes the output rows, and so do the rows of *a, if not NULL. */
void vulkan_narrow(struct vulkan *v, uint64_t *a, uint32_t lda, int width);
/* x = (x * scale * sigmoid(gate of the row)) + y */
void vulkan_scale(struct vulkan *v, const struct scale_args *a);
uint32_t vulkan_wide(int width); /* workgroups across a row */
void vulkan_angles(
    struct vulkan *v); /* once a step: cos and sin of all rows, for every RoPE table */

/* mixer.c, mixer_latent.c, mixer_state.c, mlp.c */
bool vulkan_latent_supported(const struct latent *l, int i, struct error *err);
uint32_t vulkan_mix_latent(struct vulkan *v, const struct mixer *m,
                           int layer); /* returns scratch.a's ld */
bool vulkan_state_supported(const struct mixer *m, int i, struct error *err);
void vulkan_mix_state(struct vulkan *v, const struct mixer *m, int layer);
void vulkan_mixer(struct backend *be, const struct mixer *m, int layer);
void vulkan_mlp(struct backend *be, const struct mlp *m, int layer);

/* attend.c: runs attention. args: without splits, parts and bytes. format_k, format_v: of the cache. */
void vulkan_attend(struct vulkan *v, struct attn_args *args, uint32_t format_k, uint32_t format_v);
bool vulkan_attn_pick_info(const struct vulkan *v, int i, struct pick_info *out);

/* index.c: which keys the step's rows see. u: the rows that index queries are made of; index keys are made of scratch.n. */
bool vulkan_index_supported(const struct mixer *m, int i, struct error *err);
bool vulkan_index_prepare(struct vulkan *v, struct error *err);
void vulkan_index(struct vulkan *v, const struct indexer *x, const struct kv_layer *kv, uint64_t u,
                  uint32_t ldu, int n_kv_heads);

/* streams.c */
uint64_t vulkan_part(const struct vulkan *v, int j); /* the stream's j-th part */
void vulkan_streams_begin(struct vulkan *v);
void vulkan_streams_end(struct vulkan *v);
void vulkan_streams_predict(struct vulkan *v, int layer); /* before a layer */
/* After a layer: corrects the parts, and adds the layer's embeddings. */
void vulkan_streams_correct(struct vulkan *v, const struct mlp *m, int layer);
void vulkan_laurel_begin(
    struct vulkan *v, const struct mixer *m); /* of the stream before the mixer's result is added */
void vulkan_laurel_end(struct vulkan *v, const struct mixer *m); /* and after */
void vulkan_layer_embeds(struct vulkan *v, const struct embed_layers *e);
void vulkan_keep_top(struct vulkan *v, const struct ffn *f, uint64_t g, uint32_t ld, int rows);

/* dot.c */
bool vulkan_dot_fits(const struct vulkan *v, const struct product *p);
void vulkan_run_dot(struct vulkan *v, const struct product *p, const struct vulkan_segment *g,
                    struct product_args *unused);
void vulkan_run_dot_tiles(struct vulkan *v, const struct product *p, const struct vulkan_segment *g,
                          struct product_args *listed);
/* y = act(gate, up) of a product of both, in one kernel. false: no such kernel fits, and nothing was done. act: the kernels'
 * number. */
bool vulkan_product_act(struct vulkan *v, const struct product *p, const struct ffn *f, uint act);
/* to = the weighted sum of each token's `used` experts. false: as above. */
bool vulkan_product_combined(struct vulkan *v, const struct product *p, uint32_t used, uint64_t to);
/* Where a kernel that writes `rows` rows of `width` values puts them once more as inputs of an integer dot product; 0 = nowhere.
 * After its dispatch vulkan_has_bytes(v, the rows' address). */
uint64_t vulkan_bytes(const struct vulkan *v, int rows, int width);
void vulkan_has_bytes(struct vulkan *v, uint64_t x, uint64_t bytes);

/* pick.c */
/* Lists a product's rows by expert in tiles of `tile`, once a layer, and sets args->chosen. Returns a bound of the number of tiles. */
uint32_t vulkan_group(struct vulkan *v, const struct product *p, struct product_args *args,
                      uint32_t tile);
bool vulkan_picks_dot(struct vulkan *v, const struct product *p); /* counts it, too */
bool vulkan_is_forced(const struct vulkan *v, const char *name,
                      bool without); /* STEEL_PICK lists it, or -name */
void vulkan_product(struct vulkan *v, const struct product *p);
/* Whether cooperative matrices compute this product: of formats whose values fp16 has. */
/* Parts into which the keys of few rows are split, so that a large GPU is full; 1 = none. */
enum { VULKAN_SPLITS = 32 };
uint32_t vulkan_splits(int rows, int heads);
bool vulkan_coop_fits(const struct vulkan *v, const struct vulkan_segment *g);
bool vulkan_pick_info(struct backend *be, int i, struct pick_info *out);
bool vulkan_picks_exist(const char *names, struct error *err);
extern const struct pick_ops vulkan_picks;

#endif
