/*
 * Shared by the files of the CUDA backend: the device form of a weight, the step block, the backend
 * struct, and how kernels are launched.
 * 1. One stream carries everything. No op allocates, synchronises or reads the device.
 * 2. Nothing outside src/backend/cuda includes this header.
 * 3. It knows nothing of layers and op tables. host.h adds those for files without kernels, so that
 *    kernels are not recompiled when they change.
 */
#ifndef STEEL_BACKEND_CUDA_CUDA_H
#define STEEL_BACKEND_CUDA_CUDA_H

#include "backend/cuda/core/recordings.h"
#include "backend/cuda/core/gpu.cuh"

#include <stdio.h>

#ifndef _Noreturn
#define _Noreturn __attribute__((noreturn))
#endif
extern "C" {
#include "backend/profile.h"
#include "base/error.h"
#include "quant/quant.h"
extern const struct dtype_info dtype_table[DT_COUNT]; /* quant.h hides it from nvcc */
}

struct attn_layer;
struct backend;
struct kv_layer;
struct logit_edit;
struct mlp;
struct network;
struct offload_layer;
struct rope;
struct sampler;
struct stream_parts;
struct weight;

/*
 * Weights on the device are cut into tiles of 16 rows x 256 columns (padded with zeros): 16 rows
 * are one tensor-core fragment, 256 columns one K-quant block. Tiles of a row tile are contiguous
 * along k; row tiles are consecutive, and so are experts. The layout inside a tile depends on its
 * kind: see format.cuh.
 */
enum { TILE_ROWS = 16, TILE_K = 256 };

enum tile_kind {
    TILE_Q4_K,
    TILE_Q6_K,
    TILE_Q8_0, /* from here to GPTQ4: other quantised kinds */
    TILE_Q4_0,
    TILE_Q4_1,
    TILE_Q5_1, /* also Q5_0 */
    TILE_Q5_K,
    TILE_Q3_K,
    TILE_Q2_K, /* also TQ1_0, TQ2_0 */
    TILE_IQ4_NL,
    TILE_IQ4_XS,
    TILE_MXFP4,
    TILE_IQ3_S,
    TILE_IQ3_XXS,
    TILE_IQ2, /* IQ2_XXS, IQ2_XS, IQ2_S */
    TILE_IQ1, /* IQ1_S, IQ1_M */
    TILE_NVFP4,
    TILE_GPTQ4,
    TILE_F16, /* also BF16: in practice every bf16 weight is exact in fp16 */
    TILE_F8,
    TILE_LEVELS, /* NF4, FP4 */
    TILE_F32,
    TILE_KINDS
};

/* Kinds that a kernel instance supports. Fewer kinds need fewer registers. */
enum tile_set {
    SET_K,     /* Q4_K, Q6_K */
    SET_CODES, /* and all other quantised kinds */
    SET_FAST,  /* and F16, F8, LEVELS */
    SET_ALL,
    N_SETS
};
/* Template arguments in place of a kind: any kind of SET_K, or of SET_CODES. */
enum { ANY_K = -1, ANY_CODES = -2 };

struct seg {
    const uint8_t *base; /* (n_expert, n_tiles, n_kt, tile_bytes) */
    size_t expert_bytes; /* n_tiles * n_kt * tile_bytes */
    int kind, dtype, tile_bytes;
    int row0, rows;     /* output rows [row0, row0 + rows) */
    int tile0, n_tiles; /* row tiles [tile0, tile0 + n_tiles) of the matrix */
};

enum { MAX_SEGS = 3 };

struct matrix {
    int n_in, n_out, n_expert;
    int n_kt, n_tiles; /* tiles along k; row tiles, all segments */
    int n_seg, set, max_tile_bytes;
    struct seg seg[MAX_SEGS];
    const float *bias; /* (n_expert, n_out) or NULL */
};

/* Parameters of h = act(gate, up) of layer.h: g = min(gate, limit), u = up clamped to +-limit; h =
 * g / (1 + exp(-(linear g + cubic g^3))) * (u + offset). plain: g / (1 + exp(-g)) * u. */
struct gating {
    bool plain;
    bool erf;     /* 0.5 gate (1 + erf(gate / sqrt(2))) * up */
    bool ungated; /* no up: it counts as 1 */
    float linear, cubic, limit, offset;
};

/* How a row's experts are chosen and weighted: struct router of layer.h, see route.cuh. */
struct route_rule {
    int n_expert, used;
    bool shared; /* the last expert is used by every row; included in both numbers */
    bool gated;  /* the shared expert's weight is the sigmoid of its logit, not 1 */
    bool renormalise;
    bool given;    /* set by router_select: logits are weights, or -infinity */
    bool sigmoid;  /* of the logits, instead of a softmax */
    bool softplus; /* for router_select: the square root of the logits' softplus */
    bool spread;   /* `given`, and other processes hold other experts */
    float scale;
    const float *choice_bias, *expert_scale; /* (n_expert) or NULL */
    int n_groups, n_groups_used;             /* for router_select; 0: no groups */
};

/* The experts of a layer. */
struct experts {
    const struct matrix *gate_up, *down, *router;
    struct gating act;
    struct route_rule rule;
    bool give; /* rule is the rule after router_select has applied `full` */
    struct route_rule full;
    int first;  /* rule.spread: index of the first expert on this rank */
    bool mixer; /* the weights of SparseMixer, by router_select */
    float jitter;
    const float *by_token; /* (n_vocab, used) the experts of each token, or NULL */
    int same_from;         /* experts from here on return their input; 0: none do */
    /* rule.spread: the host computes the experts that have no slot (moe/offload.h), of these rows; NULL = none */
    const struct offload_layer *offload;
    const float *offload_x; /* (rows, n_in) */
    bool
        routed; /* routing.own has the weights already: a group of experts that were copied from the host (moe/stream.h) */
    bool adds;  /* the result is added to y */
};

/* The device form behind struct weight.impl. */
struct cuda_weight {
    struct matrix m;
    void *data;
    size_t bytes;
    bool room;   /* experts: there is space for one more after the last */
    bool joined; /* a router: its last expert is the shared one (join.cu) */
    /* moe/offload.h; NULL: all experts are on the device */
    struct weight *host;           /* the last experts, in the host's form */
    float *host_bias;              /* device (experts on the host, n_out), or NULL */
    const void *host_pinned;       /* the host's memory of them, if it is pinned */
    struct offload_layer *offload; /* of gate and up, once prepared */
};

/* Offsets of the step's arrays within the block, in ints. Set by begin and part of recorded steps,
 * since they depend on the counts alone. Only the page table's stride may differ between
 * replays. */
struct step_layout {
    int n_tokens, n_seqs, n_decode, n_out;
    bool out_is_all; /* out_rows is 0..n_tokens-1 */
    bool deep;       /* a decode has many keys (pick_deep), which selects other kernels */
    bool beyond;     /* a sequence has more keys than model_shape.limit */
    bool decodes;    /* every sequence has one row */
    bool exact;      /* cuda_backend.exact: its steps have no decodes, so n_decode is 0 */
    int n_q_tiles;   /* tiles of 64 prompt rows */
    int tokens, pos, slot, q_start, kv_len, out_rows, seq_of, q_tiles, pages; /* offsets */
    int states, types, rope_pos;
    int n_embeds, embeds; /* addresses of rows */
};

/* Head of the block. */
enum {
    STEP_PAGE_STRIDE, /* ints per sequence in the page table */
    STEP_INTS,        /* ints in use */
    STEP_HEAD = 16
};

/* A row's sampling parameters, in pinned memory with its logit edits and mask. Written when the
 * previous tokens are known, so after the step block. */
struct row_sampler {
    int32_t draws; /* 0: greedy */
    int32_t top_k;
    float temp, top_p, min_p, uniform;
    int32_t n_edits, edits_at; /* struct logit_edit */
    int32_t masked;            /* only tokens whose bits are set in the row's mask */
    int32_t n_top;             /* log-probabilities of the token and of n_top best; -1 = none */
    int32_t by_host;           /* the host samples */
};

/* Sampling (sample.cu). The pinned blocks alternate between the steps in flight. */
struct sampling {
    uint8_t *host[2], *mapped[2];
    size_t edits_at, masks_at, tokens_at, probs_at; /* offsets in bytes; rows are at 0 */
    int max_edits, mask_words;
    float *raw;            /* device (max_edits) logits before their edits */
    float *norm;           /* device (max_out) log of the sum of exp(logits), if wanted */
    float *logits_row;     /* pinned (n_vocab), for rows that the host samples */
    float *argmax_value;   /* device (max_out, ARGMAX_BLOCKS) */
    int32_t *argmax_index; /* device (max_out, ARGMAX_BLOCKS) */
    int32_t *argmax_count; /* device (max_out) */
    int32_t *chosen; /* device (max_out): the last step's tokens, for the step begun after it */
};

/* A step as kernels see it. */
struct step {
    const int32_t *head;
    const int32_t *tokens, *pos, *slot; /* (n_tokens) */
    const int32_t *q_start, *kv_len;    /* (n_seqs + 1), (n_seqs) */
    const int32_t *seq_of;              /* (n_tokens) */
    const int32_t *out_rows;            /* (n_out) */
    const int32_t *pages;               /* (n_seqs, head[STEP_PAGE_STRIDE]) */
    const float2 *rope;                 /* (n_tokens, n_rot/2) cos, sin, of the layer's table */
    int n_tokens, n_seqs, n_decode, n_out;
    /* (4, n_seqs) recurrent states: slot read, slot written, rows until a save, slot of the save */
    const int32_t *states;
    const int32_t *types; /* (n_tokens), for networks that embed token types */
};

/* Rows of activations, and the forms in which they exist. The backend has one buffer per other form
 * (struct activation_forms), so these are valid only until other rows are written there: at most
 * until the product they were made for. */
struct rows {
    float *floats; /* (n, width) */
    int n, width;
    int n_floats; /* rows from here on exist in fp16 only */
    bool fp16;    /* also in forms.fp16, with forms.scale */
    bool records; /* also in forms.records */
    bool panels;  /* also in forms.panels */
};

/* Gain and eps of a norm; gain NULL: no norm. layer: LayerNorm, not RMS (encoder.cu). */
struct gain {
    const float *gain; /* (width) */
    float eps;
    bool layer;
    const float *bias; /* (width) of a LayerNorm, or NULL */
};

/* Epilogue of a block beyond adding to the stream (struct block, struct mlp of layer.h): x = (x +
 * scale * out(norm(y) + beside_norm(beside)) + after) * stream_scale; or, with `sum` and without the
 * others, x = sum(x + scale * y). */
struct resid_epilogue {
    bool set;
    bool alone;               /* x itself is not added */
    const float *after;       /* (rows, n_embd) or NULL */
    const float *beside;      /* (rows, n_embd) output of the dense part beside experts, or NULL */
    const float *beside_gate; /* (rows) its gate, through a sigmoid, or NULL */
    struct gain norm, beside_norm, out, sum;
    float scale, stream_scale;
};

/* Outputs of the experts of many rows, not yet added up. */
struct expert_sum {
    const uint16_t *out; /* (rows, used, width) fp16, see pick.cu; NULL = none */
    const float *weight; /* (rows, used) */
    float *y;            /* (rows, width) output of a separate sum */
    int rows, used, width;
    bool adds; /* to y */
};

enum resid_add {
    ADD_NONE,
    ADD_ROWS,    /* d */
    ADD_EXPERTS, /* the weighted sum of a row's experts */
    ADD_PRODUCT  /* a W^T, one row */
};

/*
 * The residual stream: x, and what is pending, still to be added to it. Every block leaves its
 * output in the cheapest form (mixer: ADD_ROWS, or ADD_PRODUCT where the output table says so; mlp:
 * ADD_ROWS or ADD_EXPERTS). The next block's kernel adds it while reading if it can; otherwise
 * residual.cu does. Between two ops this is the stream's whole state, and a recorded step stores
 * it.
 */
struct resid {
    float *x;     /* (rows, n_embd) */
    float *other; /* (NORM_ROWS, n_embd) destination of the sum while other blocks still read x */
    int rows;
    bool narrow; /* the rows are the out rows */
    enum resid_add add;
    const float *d;                 /* ROWS: (rows, n_embd) */
    struct expert_sum experts;      /* EXPERTS */
    const struct matrix *w;         /* PRODUCT */
    struct rows a;                  /* PRODUCT: (1, w->n_in) */
    struct resid_epilogue epilogue; /* ROWS, EXPERTS */
    const float *before; /* (rows, n_embd) x as the last mixer read it, if a block needs it */
    bool reads_before;   /* a block that reads it is running */
    /* Of a stream of several parts (streams.h): all parts are still x; they are those of the output rows. */
    bool parts_fresh, parts_narrow;
};

enum { MAX_KERNELS = 256, MAX_PICKS = 128 };
/* Limits of the kernels for any shape. Larger networks are refused at load. */
enum {
    MAX_HEAD_DIM = 1024,
    MAX_EXPERTS = 512,
    MAX_USED = 16,
    MAX_GROUPS = 32, /* of experts */
    MORE_NORMS = 2,  /* of one row */
    MAX_GRID = 65535
};
enum { MAX_MARKS = 1024 };
/* Row capacities of kernels and buffers. (The thresholds are in pick.cu.) */
enum {
    HIDDEN_ROWS = 8,  /* hidden units stored as floats */
    FEW_ROWS = 8,     /* gemm_few.cu, moe_few.cu: columns of the tensor core */
    NORM_ROWS = 16,   /* rows whose norm may be fused into a product or a router */
    QUAD_ROWS = 24,   /* moe_quad.cu */
    LIST_ROWS = 256,  /* moe_grouped.cu */
    PANEL_ROWS = 256, /* gemm_cluster.cu */
    ARGMAX_BLOCKS = 32
};
enum { SUM_WORDS = 512, SUM_BLOCKS = 128 }; /* route.cuh: words; most blocks */

/* What kernels are made for: the widest heads and the largest mlp of any layer, and the engine's
 * bounds. A layer's own heads: attn_layer.h. */
struct model_shape {
    int n_layers, n_embd;
    int n_vocab;                           /* width of the head's output; n_embd without a head */
    int heads;                             /* widest row of queries, or of a mixer's output */
    int n_ff;                              /* dense layers; 0 if none */
    int n_expert, n_expert_used, n_ff_exp; /* 0 if no MoE layers */
    int page_len, n_pages;
    enum dtype k_type, v_type; /* of the cache: see struct bounds */
    enum dtype kv_type;        /* of both, if F32, F16 or BF16; else NONE: kv_quant.cuh */
    int max_tokens, max_seqs, max_out, max_pages, max_embeds;
    int limit; /* keys that every row sees: index_limit; 0: there is no limit */
};

/* The RoPE tables of a network: frequencies, and where the step's cos and sin are. */
enum { MAX_ROPES = 8 };
struct rope_tables {
    int n, pairs; /* pairs: in all tables */
    bool planes;  /* some table has planes: the step block has rope_pos */
    struct {
        int half; /* rotated pairs */
        int at;   /* index of its first frequency; its cos and sin start at max_tokens * at */
        float mscale;
        bool planes; /* M-RoPE: rope_state.plane has the position that each pair turns by */
    } of[MAX_ROPES];
};

/* A recorded step, and the residual stream's state after it. */
struct step_graph {
    uint64_t key;
    struct step_layout layout;
    cudaGraphExec_t exec;
    struct resid resid;
};

/* A step begun and not yet ended. */
struct step_flight {
    int n_out;
    bool *chosen; /* (max_out) rows that get a token */
    bool launched;
    cudaEvent_t done;
};

/* What the device and the other backends on it allow. */
struct device_abilities {
    bool wgmma;             /* gemm_wgmma.cu can be used */
    bool grid_barrier;      /* kernels whose blocks wait for each other may be launched */
    bool cluster_attention; /* attention may combine blocks through shared memory */
    int clusters_of[8];     /* clusters of n + 1 blocks that run at a time, one block per SM */
};

/* Launching (launch.cu). */
struct launch_state {
    const void *known[MAX_KERNELS]; /* kernels cuda_set_attributes has seen; hashed by address */
    FILE *log;                      /* or NULL */
    void *trace;                    /* struct trace on the device, with STEEL_CUDA_TRACE */
};

/* Device memory of the backend's own: freed at close. */
struct owned_block {
    void *p;
    size_t bytes;
};
struct device_memory {
    struct owned_block *owned; /* (n_owned) */
    int n_owned;
    size_t bytes; /* allocated on the device, weights and cache included */
};

/* The ring of buffers through which weights are uploaded (weights.cu). */
struct upload_ring {
    uint8_t *host[4]; /* pinned */
    cudaEvent_t done[4];
    uint8_t *dev; /* (slots, piece) */
    size_t piece; /* bytes of a slot; 0 = not open */
    int next;
    struct pool *pool;
};

/* Choice of kernels (pick.cu). */
struct pick_state {
    char *forced;              /* STEEL_PICK: names of rows, or NULL */
    uint64_t count[MAX_PICKS]; /* how often each row was picked */
};

/* Activations as floats. */
struct activation_buffers {
    float *stream;     /* (max_tokens, n_embd) the residual stream */
    float *stream_out; /* (max_out, n_embd) the residual stream of out rows */
    float *shadow;     /* (NORM_ROWS, n_embd) struct resid.other */
    float *norm;       /* (max_tokens, n_embd) normed rows */
    float *block;      /* (max_tokens, n_embd) outputs of a block */
    float *qkv;        /* (max_tokens, widest wqkv) raw projections */
    float *q, *attn;   /* (max_tokens, heads) queries; outputs of attention */
    float *attn_out;   /* (max_out, heads) */
    float *logits;     /* (max_out, n_vocab) */
    float *ones;       /* (n_embd) the gain of norms without one */
    float *before;     /* (max_tokens, n_embd) what a mixer read, for blocks in parallel; or NULL */
    float *before_out; /* (max_out, n_embd) the same of out rows */
    float *gates;      /* (max_tokens, widest) a gate of attention's result with its own matrix */
};

/* The input rows of a product in other forms than floats: see struct rows. */
struct activation_forms {
    uint16_t *fp16;   /* (max_tokens, widest n_in) in the order of fragment_slot */
    float *scale;     /* (max_tokens) inverse of a row's scale: of all three forms */
    uint8_t *records; /* (LIST_ROWS, widest n_kt): rows.cuh */
    int n_records;    /* capacity */
    uint8_t *panels;  /* of at most PANEL_ROWS rows: gemm_cluster.cu; or NULL */
};

/* Scratch of feed-forwards and experts. */
struct mlp_buffers {
    float *dense;      /* (max_tokens, n_embd) output of a dense mlp beside experts, or NULL */
    float *dense_gate; /* (max_tokens) its gate */
    float *late,
        *late_out; /* (max_tokens, n_embd) results of experts that the next layer adds; of output rows; or NULL */
    float *router_in;        /* (max_tokens, n_embd) input of a router with its own norm, or NULL */
    float *experts_in;       /* (NORM_ROWS, n_embd) input of experts with their own norm, or NULL */
    float *hidden;           /* (HIDDEN_ROWS * used, n_ff_exp) or (HIDDEN_ROWS, n_ff) */
    uint16_t *hidden_fp16;   /* (max_tokens * used, n_ff_exp) or (max_tokens, n_ff) */
    uint8_t *hidden_records; /* see moe_quad.cu, moe_grouped.cu */
    float *expert_out;       /* (max_tokens * used, n_embd) */
    void *grid_barrier;      /* struct grid_barrier: moe_quad.cu */
    float *layer_embeds;     /* (max_tokens, n_layers, P) or NULL */
    float *layer_gate;       /* (max_tokens, P) */
    /* moe/apart.cu; each NULL if no layer needs it */
    float *raw;                    /* gate and up of rows, or of their experts */
    float *units;                  /* (max_tokens, n_ff) hidden units */
    float *units_scale;            /* (max_tokens * used) of hidden_fp16 */
    float *latent_in, *latent_out; /* (max_tokens, L) of experts on projections of their input */
};

/* The router's results. */
struct routing_buffers {
    float *logits;   /* (k tiles of n_embd, max_tokens, n_expert): router.cu */
    float *own;      /* (max_tokens, experts here) weights of experts spread over processes */
    uint64_t *sums;  /* (2, SUM_WORDS) alternating by layer: route.cuh; the first starts at 0 */
    float *squares;  /* (SUM_BLOCKS) */
    int n_summed;    /* layers of this step that had sums */
    int32_t *tables; /* struct route_tables of many rows: pick.cu */
    float *weight;   /* (max_tokens * used) */
    float *same;     /* (max_tokens) weight of experts that return their input, or NULL */
};

struct rope_state {
    struct rope_tables tables;
    float *freq;     /* device (tables.pairs) */
    uint8_t *plane;  /* device (tables.pairs), set for tables with planes */
    float2 *cos_sin; /* device (tables.pairs, max_tokens), table after table */
};

/* The step block: the batch's arrays. Two pinned blocks alternate between the steps in flight. */
struct step_block {
    int32_t *host, *mapped; /* this step's, as the host and as the device sees it */
    int32_t *hosts[2], *mappeds[2];
    int32_t *dev;
    size_t capacity; /* ints */
    /* Pinned (max_embeds, network_embed_width): rows of batch.embeds that are not pinned; NULL if max_embeds is 0. */
    float *embeds_hosts[2], *embeds_mappeds[2];
    struct step_layout layout;
};

/* Steps in flight, at most two. Step number n has steps[n % 2]. */
struct step_queue {
    struct step_flight steps[2];
    unsigned n_begun, n_ended;
};

struct step_recording {
    struct recordings kept;
    struct step_graph graphs[MAX_GRAPHS]; /* (kept.n) */
    uint64_t key;                         /* key of the recording in progress; 0: none */
    int place;                            /* of the recording in progress */
};

/* Attention of decodes, with keys split over blocks. */
struct attn_split_buffers {
    float *acc;     /* (units, 8, D) of the layer that needs most */
    float *ml;      /* (units, 8, 2) */
    int32_t *count; /* (max_seqs, K * groups, 8) arrivals; zero between launches */
    float *records; /* attn_decode_split.cu: partial results; all ones between launches */
};

/* attn_prefill_quant.cu: keys and values of a quantised cache as fp16. */
struct dequant_buffers {
    uint8_t *kv;
    int32_t *pages; /* (max_seqs, max_pages) */
};

/* --profile: a pair of events around each op. */
struct op_timing {
    struct {
        cudaEvent_t a, b;
        int stage;
    } events[MAX_MARKS];
    int n, n_created;
};

struct cuda_backend {
    struct backend *be;   /* host.h: the backend this is part of */
    int device, sm, n_sm; /* sm: 90 = Hopper */
    size_t shared_limit;  /* bytes of shared memory of a block, */
    size_t shared_per_sm; /* of an SM */
    cudaStream_t stream;
    struct error error; /* the first failure */
    bool failed;
    /* backend.deterministic of the step begun last: pick.cu chooses kernels whose result for a row
     * depends on that row alone, and a decode is computed as a prompt of one row. */
    bool exact;
    struct device_abilities can;
    struct device_memory memory;
    struct launch_state launch;
    struct upload_ring upload;
    struct pick_state picks;
    uint16_t *grids; /* device (QUANT_GRID_POINTS) */

    const struct network *net;
    struct model_shape shape;
    bool prepared;
    struct rope_state rope;

    struct step_block step;
    struct step_queue queue;
    struct step_recording recording;
    struct op_timing timing;
    struct sampling sampling;
    struct resid resid;
    const struct kv_layer *kv; /* the step's: (n_layers) */

    struct activation_buffers act;
    struct activation_forms forms;
    struct mlp_buffers mlp;
    struct routing_buffers routing;
    struct attn_split_buffers split;
    struct dequant_buffers dequant;
    float *splitk_sums; /* gemm_wgmma.cu: sums of k splits */
    struct ssm_scratch *ssm;
    struct delta_scratch *delta; /* mixers.h: for networks with such mixers, else NULL */
    struct latent_scratch *latent;
    struct index_scratch *index;           /* attn/index.h: likewise */
    struct encoder_scratch *encoder;       /* encoder.h: likewise */
    struct stream_parts *streams;          /* streams.h: likewise */
    struct compressed_scratch *compressed; /* mixers.h: likewise */
    struct row_conv_scratch *convs;        /* mixers.h: likewise */
};

/* Keeps the first error. After it no kernel is launched and no recorded step replayed. */
void cuda_fail(struct cuda_backend *cu, cudaError_t e, const char *what);
#define CUDA_TRY(cu, call)                                                                         \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess)                                                                     \
            cuda_fail(cu, e_, #call);                                                              \
    } while (0)

enum {
    LAUNCH_PLAIN,
    LAUNCH_EARLY,       /* may start before its predecessor ends */
    LAUNCH_CLUSTER = 16 /* LAUNCH_EARLY + n * LAUNCH_CLUSTER: clusters of n blocks along x */
};

/* Sets a kernel's attributes once: all the shared memory there is, and the same L1 split for every
 * kernel. Where the split changes between two kernels, the second waits for an empty SM. */
void cuda_set_attributes(struct cuda_backend *cu, const void *fn);
/* Whether blocks of one launch may wait for each other, and clusters exist. Not in the simulator,
 * which runs one block after another. */
bool cuda_blocks_concurrent(void);
/* The log of launches (STEEL_LAUNCHES). */
void cuda_log_open(struct cuda_backend *cu);
void cuda_log_close(struct cuda_backend *cu);
void cuda_log_step(struct cuda_backend *cu);
void cuda_log_launch(struct cuda_backend *cu, const void *fn, dim3 grid, int block, size_t shared,
                     int mode);

/* Kernels are plain functions with plain arguments. */
template <class... P, class... A>
static inline void cuda_launch(struct cuda_backend *cu, void (*fn)(P...), dim3 grid, int block,
                               size_t shared, int mode, A... args)
{
    if (cu->failed) /* its inputs may never have been written */
        return;
    if (cu->launch.log)
        cuda_log_launch(cu, (const void *)fn, grid, block, shared, mode);
#ifdef STEEL_CUDA_SIM
    CUDA_TRY(cu,
             sim_launch(cu->stream, grid, dim3((unsigned)block), shared, [=] { fn(P(args)...); }));
#else
#ifdef STEEL_CUDA_TRACE
    static bool attached; /* every file with kernels has its own copy of the pointer */
    if (!attached)
        cudaMemcpyToSymbol(trace_to, &cu->launch.trace, sizeof(void *));
    attached = true;
#endif
    cuda_set_attributes(cu, (const void *)fn);
    cudaLaunchConfig_t cfg = {};
    cfg.gridDim = grid;
    cfg.blockDim = dim3((unsigned)block);
    cfg.dynamicSmemBytes = shared;
    cfg.stream = cu->stream;
    cudaLaunchAttribute attr[2] = {};
    attr[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[0].val.programmaticStreamSerializationAllowed = 1;
    attr[1].id = cudaLaunchAttributeClusterDimension;
    attr[1].val.clusterDim.x = (unsigned)(mode / LAUNCH_CLUSTER);
    attr[1].val.clusterDim.y = attr[1].val.clusterDim.z = 1;
    cfg.attrs = attr;
    cfg.numAttrs = mode == LAUNCH_PLAIN || cu->sm < 90 ? 0 : mode / LAUNCH_CLUSTER > 1 ? 2 : 1;
    CUDA_TRY(cu, cudaLaunchKernelEx(&cfg, fn, P(args)...));
#endif
}

static inline int ceil_div(int a, int b)
{
    return (a + b - 1) / b;
}
static inline size_t align_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* weights.cu */
void cuda_ring_free(struct cuda_backend *cu);

struct norm_in { /* input of a product: norm(x + d); gain NULL: x as it is */
    const float *x, *d, *gain;
    float *x_out; /* destination of x + d; not x */
    float eps;
};

/* step.cu */
void step_gather(struct cuda_backend *cu, const struct step *s, const float *src, float *dst,
                 int width);
struct step cuda_step(const struct cuda_backend *cu);
/* Puts addresses of n rows of `bytes` bytes each into the step block, from `used` on. Rows in pinned memory are read where they
 * are, others from a copy at `copy`, which the device sees at `mapped`. NULL rows stay NULL. Returns where the addresses end. */
int step_put_rows(struct cuda_backend *cu, const void *const *rows, int n, size_t bytes, void *copy,
                  const void *mapped, int used);
/* The step's embedding rows, (n_embeds) addresses. */
static inline const float *const *cuda_embeds(const struct cuda_backend *cu)
{
    return (const float *const *)(cu->step.dev + cu->step.layout.embeds);
}
/* The step's cos and sin for a table of the network; NULL: none. */
const float2 *step_rope(const struct cuda_backend *cu, const struct rope *rope);
/* --profile: ops enqueued between the two calls belong to this stage. Pairs do not nest. */
void step_mark(struct cuda_backend *cu);
void step_mark_end(struct cuda_backend *cu, enum stage stage);

/* residual.cu: the stream. resid_norm: x += what is pending; returns norm(x) in the forms that a
 * product of as many rows reads, and as floats unless there are many rows and `floats` is false. */
struct rows resid_norm(struct cuda_backend *cu, struct resid *r, struct gain gain, bool floats);
/* Like resid_norm, with n more norms of x as floats, at most MORE_NORMS. */
struct norm_more {
    struct gain gain;
    float *y; /* (rows, n_embd) */
};
struct rows resid_norms(struct cuda_backend *cu, struct resid *r, struct gain gain, bool floats,
                        const struct norm_more *more, int n);
/* For a kernel with the norm fused in: the stream is x + d afterwards. At most NORM_ROWS rows, and
 * only if what is pending is a plain addition (resid_adds). */
bool resid_adds(const struct resid *r);
struct norm_in resid_norm_in(struct cuda_backend *cu, struct resid *r, struct gain gain);
/* What is pending, taken from the stream in place of being added to it: by * (rows + *beside), where *beside may become
 * NULL. NULL: nothing is pending. */
const float *resid_take(struct cuda_backend *cu, struct resid *r, const float **beside, float *by);
/* x itself, after adding what is pending. */
struct rows resid_plain(struct cuda_backend *cu, struct resid *r);
/* Keeps x in r->before, for a block that runs in parallel with the next mixer. */
void resid_keep(struct cuda_backend *cu, struct resid *r);

/* Rows in general. */
struct rows rows_of(float *floats, int n, int width);
void rows_norm(struct cuda_backend *cu, const float *x, struct gain gain, float *y, int rows,
               int width);
void rows_to_fp16(struct cuda_backend *cu, struct rows *x);   /* unless it exists */
void rows_to_floats(struct cuda_backend *cu, struct rows *x); /* the rows that exist in fp16 only */
/* Also converts the first n rows, where the others are in fp16 already. */
void rows_join_fp16(struct cuda_backend *cu, const struct rows *x, int n);
/* y (rows, width) = the weighted sum of cu->mlp.expert_out, as floats. some: skips experts of
 * weight 0. */
void resid_sum_floats(struct cuda_backend *cu, float *y, int rows, int used, int width, bool some,
                      bool adds);
/* The same for s.out; writes s.y. */
void resid_sum_some(struct cuda_backend *cu, const struct expert_sum &s);

/* pick.cu */
enum pick_op {
    PICK_LINEAR, /* y = x W^T + bias */
    PICK_QKV,    /* the projection before attention */
    PICK_OUTPUT, /* the projection after attention */
    PICK_FFN,
    PICK_MOE,
    PICK_ROUTER, /* choice of experts and work list, for many rows */
    PICK_LOGITS, /* a router's logits, optionally with the norm fused in: pick_case.in, y */
    PICK_DECODE, /* attention */
    PICK_PROMPT,
    PICK_DELTA_DECODE, /* a delta net: sequences of one row; others */
    PICK_DELTA_PROMPT,
    PICK_HEADS,         /* one matrix per head of latent attention */
    PICK_LATENT_DECODE, /* attention over latents */
    PICK_LATENT_PROMPT,
    PICK_COMPRESSED, /* compressed attention, and latents that an indexer chose */
    PICK_ENCODE,     /* projection and bidirectional attention */
    PICK_UNGATED,    /* an mlp without a gate */
    PICK_AWAY,       /* experts in host memory: where a step's are computed */
    PICK_OPS
};

/* FFN, UNGATED, MOE */
struct mlp_case {
    const struct matrix *down;
    struct gating act;
};

/* MOE; OUTPUT: experts that may take over the product, or NULL */
struct moe_case {
    const struct experts *experts;
    const struct matrix *router;
    struct rows *router_x; /* what the router reads, if it is not x */
};

/* ROUTER */
struct routing_case {
    const struct experts *experts;
    struct moe_route_args *args;
    bool listed; /* the work list is moe_grouped.cu's */
};

/* QKV, DECODE, PROMPT, ENCODE */
struct attention_case {
    const struct attn_layer *layer;
    const struct attn_args *args; /* DECODE, PROMPT */
    struct rows *out;             /* DECODE, PROMPT, ENCODE: results, and their form */
    bool raw;                     /* QKV, DECODE: decodes, which attention itself rotates */
};

/* A case of an op: the fields of all ops, then each op's own. Its input is x. If `stream` is set, x
 * is made from the stream once the kernel is known (pick_input), unless `made`. */
struct pick_case {
    int rows;
    const struct matrix *w; /* LINEAR, QKV, OUTPUT, ROUTER; gate and up of FFN, MOE */
    struct rows *x;         /* (rows, n_in) */
    struct resid *stream;   /* the source of x, or NULL; OUTPUT, FFN, MOE add to it */
    struct gain gain;       /* of the norm between stream and x, or NULL */
    bool made;              /* x exists already: the stream is only added to */
    struct norm_in in;      /* for kernels with TAKES_NORM: the stream, and the norm */
    float *y;               /* (rows, n_out); QKV: q */
    const struct step *step;
    bool forced; /* set by pick_find */

    struct mlp_case mlp;
    struct moe_case moe;
    struct routing_case routing;
    struct attention_case attn;
    const struct delta_args *delta;           /* DELTA_*: delta_net.cuh */
    const struct latent_args *latent;         /* LATENT_*: latent.cuh */
    const struct compressed_args *compressed; /* COMPRESSED: compressed.cuh */
    struct latent_heads *heads;               /* HEADS: latent.cuh */
};

enum pick_takes {
    TAKES_ROWS,
    TAKES_NORM,   /* the norm is fused in: pick_case.in */
    TAKES_PRODUCT /* and the product before the norm: ADD_PRODUCT */
};

enum pick_needs {
    NEEDS_NOTHING,
    NEEDS_WGMMA,
    NEEDS_GRID_BARRIER /* blocks that may wait for each other: device_abilities.grid_barrier */
};

/* The arithmetic of a kernel whose result for a row depends on that row alone: not on the number of
 * rows, on their order, or on where they are in memory. Two kernels of one class give the same bits
 * for the same row. */
enum pick_class {
    CLASS_NONE,   /* it may depend on more */
    CLASS_WGMMA,  /* products: fp16 rows and weights on wgmma, k split by the shape of the weight */
    CLASS_CHUNKS, /* products: the same on mma.sync, the whole of k in order */
    CLASS_SPLITK, /* products: k split over the warps of gemm_splitk.cu */
    CLASS_OWN     /* the kernel is alone in its class */
};
/* The numbers of rows for which a kernel of a class runs in an exact step; to 0: no end. A row from 1
 * without an end offers its class to the op; others share in it. */
struct pick_exact {
    enum pick_class is;
    int from, to;
};

/* A row of the table. The first row that suits a case runs. */
struct cuda_pick {
    const char *name;
    enum pick_op op;
    unsigned formats; /* bits: supported sets of kinds */
    int from, to;     /* rows where it pays, measured; to 0: no end */
    enum pick_needs needs;
    enum pick_takes takes;
    bool (*pays)(const struct cuda_backend *cu, const struct pick_case *c); /* NULL: always */
    bool (*fits)(const struct cuda_backend *cu, const struct pick_case *c); /* NULL: always */
    void (*run)(struct cuda_backend *cu,
                const struct pick_case *c); /* NULL: the caller launches it */
    struct pick_exact exact;                /* steps of cuda_backend.exact */
};
const struct cuda_pick *pick_find(const struct cuda_backend *cu, enum pick_op op,
                                  struct pick_case *c);
/* Makes c->x in the form the kernel reads. */
void pick_input(struct cuda_backend *cu, const struct cuda_pick *p, struct pick_case *c);
void pick_go(struct cuda_backend *cu, const struct cuda_pick *p, const struct pick_case *c);
/* All three, timed as `stage`; N_STAGES: part of the stage being timed. */
void pick_run(struct cuda_backend *cu, enum pick_op op, struct pick_case *c, enum stage stage);
bool pick_deep(int keys); /* whether a step with this many keys counts as deep */
/* Products of this many rows read fp16 only. Never in an exact step. */
bool pick_fp16_only(const struct cuda_backend *cu, int rows);
/* gemv.cu: products of one row, or a few one by one */
void gemv_linear(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                 float *y, int rows);
void gemv_ffn(struct cuda_backend *cu, const struct matrix *gate_up, const struct matrix *down,
              const struct gating &act, const struct norm_in *in, float *y, int rows);

/* gemm_quad.cu: 2 to 4 rows of K-quants, of floats */
bool gemm_quad_fits(const struct cuda_backend *cu, const struct matrix *w, int rows);
void gemm_quad(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in, float *y,
               int rows);

/* gemm_few.cu: 2 to FEW_ROWS rows of K-quants */
bool gemm_few_fits(const struct cuda_backend *cu, const struct matrix *w, int rows);
void gemm_few(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in, float *y,
              int rows);
/* The rows are taken from cu->forms.records. */
bool gemm_few_records_fit(const struct cuda_backend *cu, const struct matrix *w, int rows);
void gemm_few_records(struct cuda_backend *cu, const struct matrix *w, float *y, int rows);

/* gemm_cluster.cu: up to PANEL_ROWS rows of K-quants */
void gemm_cluster_prepare(struct cuda_backend *cu);
int gemm_cluster_width(int rows); /* rows of a tile of panels */
size_t gemm_cluster_bytes(const struct cuda_backend *cu);
/* whether cu->forms.panels can hold them */
bool gemm_cluster_fits(const struct cuda_backend *cu, int rows, int padded);
/* The rows are taken from cu->forms.panels. */
bool gemm_cluster_suits(const struct cuda_backend *cu, const struct matrix *w, int rows);
void gemm_cluster(struct cuda_backend *cu, const struct matrix *w, float *y, int rows);

/* gemm_wgmma.cu */
bool gemm_wgmma_available(struct cuda_backend *cu,
                          int *scratch); /* scratch: an int on the device */
size_t gemm_wgmma_part_bytes(const struct cuda_backend *cu);
bool gemm_wgmma_suits(const struct cuda_backend *cu, const struct matrix *w, bool pair);

/* router.cu. Logits (rows, n_expert) are written to cu->routing.logits; with a norm, n gets the
 * normed rows. */
void router_row(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in, float *n,
                int rows);
void router_block(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                  float *n, int rows);
/* Like router_block; also writes the normed rows to cu->forms.records. */
size_t router_records_shared(const struct matrix *w);
void router_records(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                    int rows);
/* For choices that need all logits of a row at once (struct experts.give): logits (splits, rows,
 * n_expert) become the weights of the chosen experts, -infinity for others. Does nothing for other
 * experts. */
void router_select(struct cuda_backend *cu, const struct experts *e, int parts, int rows);
/* Its result: cu->routing.logits, or for spread experts (rows, own) in cu->routing.own. */
static inline const float *router_selected(const struct cuda_backend *cu, const struct experts *e)
{
    return e->rule.spread ? cu->routing.own : cu->routing.logits;
}
/* y (rows, width) += x times each row's weight of experts that return their input, after router_select. */
void router_add_same(struct cuda_backend *cu, const float *x, float *y, int rows, int width);
/* Logits as n_kt partial sums of (rows, n_expert) each. */
void router_rows(struct cuda_backend *cu, const struct matrix *w, const float *x, int rows);

/* moe_gemv.cu: experts of one row, or a few one by one, with logits in cu->routing.logits */
bool moe_gemv_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                   const struct matrix *down);
void moe_gemv(struct cuda_backend *cu, const struct experts *e, const float *x, float *y, int rows);
/* One row, with the preceding product: x += a W^T; y = experts of norm(x), with in's gain. */
bool moe_gemv_routed_fits(const struct cuda_backend *cu, const struct matrix *w,
                          const struct experts *e);
void moe_gemv_routed(struct cuda_backend *cu, const struct matrix *w, const float *a,
                     const struct experts *e, const struct norm_in *in, float *x, float *y);

/* moe_few.cu: experts of up to FEW_ROWS rows of K-quants. Rows are taken from cu->forms.records,
 * logits from cu->routing.logits. */
bool moe_few_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                  const struct matrix *down, int rows);
void moe_few(struct cuda_backend *cu, const struct experts *e, float *y, int rows);

/* moe_quad.cu: experts of up to QUAD_ROWS rows of K-quants, with the same inputs as moe_few.cu. */
bool moe_quad_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                   const struct matrix *down, int rows);
size_t grid_barrier_bytes(void);
void moe_quad(struct cuda_backend *cu, const struct experts *e, float *y, int rows);

/* moe_grouped.cu: experts of up to LIST_ROWS rows of K-quants */
int moe_grouped_records(const struct model_shape *s);        /* of cu->forms.records */
int moe_grouped_hidden_records(const struct model_shape *s); /* of cu->mlp.hidden_records */
enum { RECORD = 576 };                                       /* bytes of a record: see rows.cuh */

/* moe_route.cu */
size_t moe_route_ints(const struct model_shape *s); /* ints in cu->routing.tables */

/* sample.cu: samples a token for each row of the step begun last; samplers (rows). */
bool sample_prepare(struct cuda_backend *cu, struct error *err);
void sample_close(struct cuda_backend *cu);
void sample_tokens(struct cuda_backend *cu, struct sampler *const *samplers, int rows);
/* The results, after the step has ended. turn: of its step_flight. */
const int32_t *sample_tokens_of(const struct cuda_backend *cu, int turn); /* (max_out) */
const struct sample_probs *sample_probs_of(const struct cuda_backend *cu, int turn);

#endif
