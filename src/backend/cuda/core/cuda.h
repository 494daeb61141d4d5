/*
 * What the files of the CUDA backend share: the device form of a weight, the per-step block, the
 * backend struct, and how kernels are launched. One stream carries everything; no op allocates,
 * synchronises or reads the device. Nothing outside src/backend/cuda includes this. It knows nothing
 * of layers and op tables, which host.h adds for the files that run no kernels' code, so that kernels
 * are not compiled again when those change.
 */
#ifndef STEEL_BACKEND_CUDA_CUDA_H
#define STEEL_BACKEND_CUDA_CUDA_H

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
struct rope;
struct sampler;

/*
 * Weights on the device are cut into tiles of 16 rows x 256 columns (both padded with zeros), since
 * 16 rows are one tensor-core fragment and 256 columns one K-quant block. Tiles of a row tile are
 * contiguous along k, row tiles follow each other, experts follow each other. How a tile lays out
 * its bytes depends on its kind: see format.cuh.
 */
enum { TILE_ROWS = 16, TILE_K = 256 };

enum tile_kind {
    TILE_Q4_K,
    TILE_Q6_K,
    TILE_Q8_0, /* from here to GPTQ4: other kinds of codes */
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
    TILE_F16, /* also BF16: every bf16 that matters is an exact half */
    TILE_F8,
    TILE_F32,
    TILE_KINDS
};

/* Which kinds a kernel was compiled for: fewer kinds, fewer registers. */
enum tile_set {
    SET_K,     /* Q4_K, Q6_K */
    SET_CODES, /* and all others of codes */
    SET_FAST,  /* and F16, F8 */
    SET_ALL,
    N_SETS
};
/* As a kernel's template argument in place of a kind: the kinds of one of these sets, as they come.
 */
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

/* h = act(gate, up) of layer.h as numbers: g = min(gate, limit), u = up within +-limit;
 * h = g / (1 + exp(-(linear g + cubic g^3))) * (u + offset). Plain: g / (1 + exp(-g)) * u. */
struct gating {
    bool plain;
    bool erf;     /* 0.5 gate (1 + erf(gate / sqrt(2))) * up */
    bool ungated; /* without up, which counts as 1 */
    float linear, cubic, limit, offset;
};

/* How a row's experts are chosen and weighed: struct router of layer.h, see route.cuh. */
struct route_rule {
    int n_expert, used;
    bool shared; /* the last expert is used by every row, and counts in both numbers */
    bool gated;  /* it weighs the sigmoid of its logit, not 1 */
    bool renormalise;
    bool given;   /* router_give was there: logits are weights of the chosen, -infinity of others */
    bool sigmoid; /* of logits, in place of their softmax */
    bool spread; /* given, and other ranks have other experts: of a row's, some are here, or none */
    float scale;
    const float *choice_bias, *expert_scale; /* (n_expert) or NULL */
    int n_groups, n_groups_used;             /* router_give's; 0: no groups */
};

/* The experts of a layer. */
struct experts {
    const struct matrix *gate_up, *down, *router;
    struct gating act;
    struct route_rule rule;
    bool give; /* rule is what router_give makes of `full` */
    struct route_rule full;
    int first; /* rule.spread: of all experts, those from this one on are here */
};

/* The device form behind struct weight.impl. */
struct cuda_weight {
    struct matrix m;
    void *data;
    size_t bytes;
    bool room;   /* experts: behind the last there is room for one more */
    bool joined; /* a router: the last of its experts is the shared one (join.cu) */
};

/* Where the step's arrays lie in the block, in ints. Set by begin, baked into recorded steps: it
 * depends on the counts alone. Only the page table's stride may differ between replays. */
struct step_layout {
    int n_tokens, n_seqs, n_decode, n_out;
    bool out_is_all; /* out_rows is 0..n_tokens-1 */
    bool deep;       /* a decode has many keys (pick_deep): other kernels for it */
    int n_q_tiles;   /* tiles of 64 prompt rows */
    int tokens, pos, slot, q_start, kv_len, out_rows, seq_of, q_tiles, pages; /* offsets */
    int states, types;
};

/* Head of the block. */
enum {
    STEP_PAGE_STRIDE, /* ints per sequence in the page table */
    STEP_INTS,        /* ints in use */
    STEP_HEAD = 16
};

/* How an out row's token is chosen: what a sampler says, in pinned memory, with the edits of its
 * logits and its mask beside it. Written when the tokens before are known, so behind the step's block. */
struct row_sampler {
    int32_t draws; /* 0: the largest logit */
    int32_t top_k;
    float temp, top_p, min_p, uniform;
    int32_t n_edits, edits_at; /* struct logit_edit's */
    int32_t masked;            /* only tokens whose bits are set in its mask */
    int32_t n_top;             /* log-probabilities of the token and so many best; -1 = none */
    int32_t by_host;           /* the host chooses */
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
    const float2 *rope; /* (n_tokens, n_rot/2) cos, sin of each row's position: the layer's */
    int n_tokens, n_seqs, n_decode, n_out;
    /* (4, n_seqs) slots of recurrent states: read, written; rows until a save, and its slot */
    const int32_t *states;
    const int32_t *types; /* (n_tokens), of networks that embed them */
};

/* Rows of activations, and the forms they are in. Forms other than floats lie in the backend's one
 * place for each, so they are good until other rows are put there: nobody keeps them past the
 * product they were made for. */
struct rows {
    float *floats; /* (n, width) */
    int n, width;
    int n_floats; /* those from here on are halves only */
    bool fp16;    /* fp16_in, and what undoes their scale in fp16_scale */
    bool records; /* also in records */
    bool panels;  /* also in panels */
};

/* A gain and the eps of its norm; gain NULL: there is no norm. layer: LayerNorm, not RMS (encoder.cu). */
struct gain {
    const float *gain; /* (width) */
    float eps;
    bool layer;
    const float *bias; /* (width) of a LayerNorm, or NULL */
};

/* What is done to a block's rows beyond adding them to the stream (struct block, struct mlp of
 * layer.h): x = (x + scale * out(norm(y) + beside_norm(beside))) * stream_scale; or, with `sum` and
 * without the others, x = sum(x + scale * y). */
struct resid_epilogue {
    bool set;
    const float *beside;      /* (rows, n_embd) the dense part beside experts, or NULL */
    const float *beside_gate; /* (rows) times the sigmoid of this, or NULL */
    struct gain norm, beside_norm, out, sum;
    float scale, stream_scale;
};

/* What the experts of many rows came to, not yet added up. */
struct expert_sum {
    const uint16_t *out; /* (rows, used, width) halves, see pick.cu; NULL = there is none */
    const float *weight; /* (rows, used) */
    float *y;            /* (rows, width) where a sum by itself goes */
    int rows, used, width;
};

enum resid_add {
    ADD_NONE,
    ADD_ROWS,    /* d */
    ADD_EXPERTS, /* the weighted sum of what a row's experts came to */
    ADD_PRODUCT  /* a W^T, of one row */
};

/*
 * The residual stream: x, and what is still to be added to it. Blocks leave it in the form that was
 * cheapest for them (mixer: ADD_ROWS or, as pick.cu's table of outputs says, ADD_PRODUCT; mlp:
 * ADD_ROWS or ADD_EXPERTS); the next one's kernel takes what it can along, and residual.cu does the
 * rest. Between two ops there is nothing else to know about it, and a recorded step stores it.
 */
struct resid {
    float *x;     /* (rows, n_embd) */
    float *other; /* (NORM_ROWS, n_embd) the sum goes there while other blocks still read x */
    int rows;
    bool narrow; /* the rows are the out rows */
    enum resid_add add;
    const float *d;              /* ROWS: (rows, n_embd) */
    struct expert_sum experts;   /* EXPERTS */
    const struct matrix *w;      /* PRODUCT */
    struct rows a;               /* PRODUCT: (1, w->n_in) */
    struct resid_epilogue close; /* ROWS, EXPERTS */
};

enum { MAX_KERNELS = 256, MAX_PICKS = 128 };
/* What the kernels for any shape have room for: others are refused at load. */
enum {
    MAX_HEAD_DIM = 1024,
    MAX_EXPERTS = 512,
    MAX_USED = 16,
    MAX_GROUPS = 32, /* of experts */
    MORE_NORMS = 2,  /* of one row */
    MAX_GRID = 65535
};
enum { MAX_GRAPHS = 512, MAX_MARKS = 1024 };
/* Rows that kernels and buffers have room for. (What is worth it: pick.cu.) */
enum {
    HIDDEN_ROWS = 8,  /* hidden units as floats */
    FEW_ROWS = 8,     /* gemm_few.cu, moe_few.cu: columns of the tensor core */
    NORM_ROWS = 16,   /* whose norm may become part of a product, or a router */
    QUAD_ROWS = 24,   /* moe_quad.cu */
    LIST_ROWS = 256,  /* moe_grouped.cu */
    PANEL_ROWS = 256, /* gemm_cluster.cu */
    ARGMAX_BLOCKS = 32
};
enum { SUM_WORDS = 512, SUM_BLOCKS = 128 }; /* route.cuh: a router's sums, and who adds to them */

/* What the kernels are made for: the widest heads and the largest mlp of any layer, and the engine's
 * bounds. A layer's own heads: attn_layer.h. */
struct kernel_limits {
    int n_layers, n_embd;
    int n_vocab;                           /* values of a row behind the head: n_embd without one */
    int heads;                             /* widest row of queries, or of a mixer's output */
    int n_ff;                              /* dense layers; 0 if none */
    int n_expert, n_expert_used, n_ff_exp; /* 0 if no MoE layers */
    int page_len, n_pages;
    enum dtype k_type, v_type; /* of the cache: see struct bounds */
    enum dtype kv_type;        /* of both, if that is F32 F16 or BF16; else NONE: kv_quant.cuh */
    int max_tokens, max_seqs, max_out, max_pages;
};

/* The RoPE tables of a network: their frequencies, and where a step has the turns of its rows. */
enum { MAX_ROPES = 8 };
struct rope_tables {
    int n, pairs; /* pairs: of all of them */
    struct {
        int half; /* pairs that turn */
        int at;   /* the first of its frequencies; its turns begin at max_tokens * at */
        float mscale;
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
    const void *known[MAX_KERNELS]; /* kernels cuda_know has seen; hashed by address */
    FILE *log;                      /* or NULL */
    void *trace;                    /* struct trace on the device, with STEEL_CUDA_TRACE */
};

/* Device memory of the backend's own: freed at close. */
struct device_memory {
    struct {
        void *p;
        size_t bytes;
    } owned[96];
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
    float *dense;          /* (max_tokens, n_embd) output of a dense mlp beside experts, or NULL */
    float *dense_gate;     /* (max_tokens) its gate */
    float *router_in;      /* (max_tokens, n_embd) input of a router with its own norm, or NULL */
    float *experts_in;     /* (NORM_ROWS, n_embd) input of experts with their own norm, or NULL */
    float *hidden;         /* (HIDDEN_ROWS * used, n_ff_exp) or (HIDDEN_ROWS, n_ff) */
    uint16_t *hidden_fp16; /* (max_tokens * used, n_ff_exp) or (max_tokens, n_ff) */
    uint8_t *hidden_records; /* see moe_quad.cu, moe_grouped.cu */
    float *expert_out;       /* (max_tokens * used, n_embd) */
    void *grid_barrier;      /* struct grid_barrier: moe_quad.cu */
    float *layer_embeds;     /* (max_tokens, n_layers, P) or NULL */
    float *layer_gate;       /* (max_tokens, P) */
};

/* The router's results. */
struct routing_buffers {
    float *logits;   /* (k tiles of n_embd, max_tokens, n_expert): router.cu */
    float *own;      /* (max_tokens, experts here) weights of experts spread over ranks */
    uint64_t *sums;  /* (2, SUM_WORDS) alternating by layer: route.cuh; the first starts at 0 */
    float *squares;  /* (SUM_BLOCKS) */
    int n_summed;    /* layers of this step that had sums */
    int32_t *tables; /* struct route_tables of many rows: pick.cu */
    float *weight;   /* (max_tokens * used) */
};

struct rope_state {
    struct rope_tables tables;
    float *freq;     /* device (tables.pairs) */
    float2 *cos_sin; /* device (tables.pairs, max_tokens), table after table */
};

/* The step block: the batch's arrays. Two pinned blocks alternate between the steps in flight. */
struct step_block {
    int32_t *host, *mapped; /* this step's, as the host and as the device sees it */
    int32_t *hosts[2], *mappeds[2];
    int32_t *dev;
    size_t capacity; /* ints */
    struct step_layout layout;
};

/* Steps in flight, at most two. Step number n has steps[n % 2]. */
struct step_queue {
    struct step_flight steps[2];
    unsigned n_begun, n_ended;
};

struct step_recording {
    struct step_graph graphs[MAX_GRAPHS];
    int n;
    uint64_t key; /* of the recording under way; 0: none */
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
    struct device_abilities can;
    struct device_memory memory;
    struct launch_state launch;
    struct upload_ring upload;
    struct pick_state picks;
    uint16_t *grids; /* device (QUANT_GRID_POINTS) */

    const struct network *net;
    struct kernel_limits shape;
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
    float *splitk_sums;          /* gemm_wgmma.cu: sums of k splits */
    struct delta_scratch *delta; /* mixers.h: for networks with such mixers, else NULL */
    struct latent_scratch *latent;
    struct encoder_scratch *encoder; /* encoder.h: likewise */
};

/* Keeps the first error. */
void cuda_fail(struct cuda_backend *cu, cudaError_t e, const char *what);
#define CUDA_TRY(cu, call)                                                                         \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess)                                                                     \
            cuda_fail(cu, e_, #call);                                                              \
    } while (0)

enum {
    LAUNCH_PLAIN,
    LAUNCH_EARLY,       /* may start before its predecessor ends: it calls
                                     dependency_wait before touching any result */
    LAUNCH_CLUSTER = 16 /* LAUNCH_EARLY + n * LAUNCH_CLUSTER: clusters of n blocks along x */
};

/* Tells the runtime once what a kernel may use: all the shared memory there is. The same split of
 * the L1 for every kernel, too: where it changes between two, the second waits for an empty SM. */
void cuda_know(struct cuda_backend *cu, const void *fn);
/* Blocks of one launch may wait for each other, and clusters exist: not where the simulator runs
 * one block after another. */
bool cuda_blocks_meet(void);
/* The log of launches, where one is asked for. */
void cuda_log_open(struct cuda_backend *cu);
void cuda_log_close(struct cuda_backend *cu);
void cuda_log_step(struct cuda_backend *cu);
void cuda_log_launch(struct cuda_backend *cu, const void *fn, dim3 grid, int block, size_t shared,
                     int mode);

/* Kernels are plain functions of plain arguments. */
template <class... P, class... A>
static inline void cuda_launch(struct cuda_backend *cu, void (*fn)(P...), dim3 grid, int block,
                               size_t shared, int mode, A... args)
{
    if (cu->launch.log)
        cuda_log_launch(cu, (const void *)fn, grid, block, shared, mode);
#ifdef STEEL_CUDA_SIM
    sim_launch(cu->stream, grid, dim3((unsigned)block), shared, [=] { fn(P(args)...); });
#else
#ifdef STEEL_CUDA_TRACE
    static bool attached; /* a pointer of its own in every file of kernels */
    if (!attached)
        cudaMemcpyToSymbol(trace_to, &cu->launch.trace, sizeof(void *));
    attached = true;
#endif
    cuda_know(cu, (const void *)fn);
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

struct norm_in { /* add + norm in front of a product; gain NULL: x is taken as it is */
    const float *x, *d, *gain;
    float *x_out; /* where x + d goes; not x */
    float eps;
};

/* step.cu */
void step_gather(struct cuda_backend *cu, const struct step *s, const float *src, float *dst,
                 int width);
struct step cuda_step(const struct cuda_backend *cu);
/* The step's turns by a table of the network; NULL: none. */
const float2 *step_rope(const struct cuda_backend *cu, const struct rope *rope);
/* --profile: what is enqueued between the two is of this stage. They do not nest. */
void step_mark(struct cuda_backend *cu);
void step_mark_end(struct cuda_backend *cu, enum stage stage);

/* residual.cu: the stream. resid_norm: x += what is to be added; the norm of x, as what a product of
 * it will want, and as floats unless there are many rows and nobody is to read those. */
struct rows resid_norm(struct cuda_backend *cu, struct resid *r, struct gain gain, bool floats);
/* The same, and other norms of x as floats: more (n, at most MORE_NORMS). */
struct norm_more {
    struct gain gain;
    float *y; /* (rows, n_embd) */
};
struct rows resid_norms(struct cuda_backend *cu, struct resid *r, struct gain gain, bool floats,
                        const struct norm_more *more, int n);
/* The same for a kernel that does it on the way: the stream is x + d from there on. At most
 * NORM_ROWS rows, and nothing but adding to be done (resid_adds). */
bool resid_adds(const struct resid *r);
struct norm_in resid_norm_in(struct cuda_backend *cu, struct resid *r, struct gain gain);
/* x itself: nothing is left to be added. */
struct rows resid_plain(struct cuda_backend *cu, struct resid *r);

/* And rows in general. */
struct rows rows_of(float *floats, int n, int width);
void rows_norm(struct cuda_backend *cu, const float *x, struct gain gain, float *y, int rows,
               int width);
void rows_to_fp16(struct cuda_backend *cu, struct rows *x);   /* unless they are there */
void rows_to_floats(struct cuda_backend *cu, struct rows *x); /* those that are not there */
/* The first n, which are not there, where the others are. */
void rows_join_fp16(struct cuda_backend *cu, const struct rows *x, int n);
/* y (rows, width) = the weighted sum of cu->mlp.expert_out, floats. some: what weighs 0 is not there. */
void resid_sum_floats(struct cuda_backend *cu, float *y, int rows, int used, int width, bool some);
/* The same of s.out, in s.y. */
void resid_sum_some(struct cuda_backend *cu, const struct expert_sum &s);

/* pick.cu */
enum pick_op {
    PICK_LINEAR, /* y = x W^T + bias */
    PICK_QKV,    /* the projection in front of attention */
    PICK_OUTPUT, /* and the one behind it */
    PICK_FFN,
    PICK_MOE,
    PICK_ROUTER, /* of experts that walk a work list */
    PICK_LOGITS, /* of a router, maybe with the norm in front: pick_case.in, y */
    PICK_DECODE, /* attention */
    PICK_PROMPT,
    PICK_DELTA_DECODE, /* a delta net: sequences of one row, and the others */
    PICK_DELTA_PROMPT,
    PICK_HEADS,         /* a matrix for each head of latent attention */
    PICK_LATENT_DECODE, /* attention over latents */
    PICK_LATENT_PROMPT,
    PICK_ENCODE,  /* projection and attention where rows see each other both ways */
    PICK_UNGATED, /* an mlp without a gate */
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
    const struct delta_args *delta;   /* DELTA_*: delta_net.cuh */
    const struct latent_args *latent; /* LATENT_*: latent.cuh */
    struct latent_heads *heads;       /* HEADS: latent.cuh */
};

enum pick_takes {
    TAKES_ROWS,
    TAKES_NORM,   /* the kernel makes the norm in front: pick_case.in */
    TAKES_PRODUCT /* and the product in front of that: ADD_PRODUCT */
};

enum pick_needs {
    NEEDS_NOTHING,
    NEEDS_WGMMA,
    NEEDS_WAITS /* blocks that may wait for each other: cuda_backend.may_wait */
};

/* A row of a table: the first that suits a case runs. */
struct cuda_pick {
    const char *name;
    enum pick_op op;
    unsigned formats; /* bits: sets of kinds of tiles */
    int from, to;     /* rows, as measured; to 0: no end */
    enum pick_needs needs;
    enum pick_takes takes;
    bool (*pays)(const struct cuda_backend *cu, const struct pick_case *c); /* NULL: always */
    bool (*fits)(const struct cuda_backend *cu, const struct pick_case *c); /* NULL: always */
    void (*run)(struct cuda_backend *cu, const struct pick_case *c); /* NULL: the caller knows */
};
const struct cuda_pick *pick_find(const struct cuda_backend *cu, enum pick_op op,
                                  struct pick_case *c);
/* Makes x what the row reads. */
void pick_input(struct cuda_backend *cu, const struct cuda_pick *p, struct pick_case *c);
void pick_go(struct cuda_backend *cu, const struct cuda_pick *p, const struct pick_case *c);
/* All three, timed as `stage`; N_STAGES: as part of what is being timed. */
void pick_run(struct cuda_backend *cu, enum pick_op op, struct pick_case *c, enum stage stage);
bool pick_deep(int keys);      /* so many that the step counts as deep */
bool pick_fp16_only(int rows); /* products of so many rows read them as halves alone */
/* gemv.cu: products of one row, or a few */
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
/* The rows are those of cu->forms.records. */
bool gemm_few_records_fit(const struct cuda_backend *cu, const struct matrix *w, int rows);
void gemm_few_records(struct cuda_backend *cu, const struct matrix *w, float *y, int rows);

/* gemm_cluster.cu: up to PANEL_ROWS rows of K-quants */
void gemm_cluster_prepare(struct cuda_backend *cu);
int gemm_cluster_width(int rows); /* rows of a tile of panels */
size_t gemm_cluster_bytes(const struct cuda_backend *cu);
/* cu->forms.panels can hold them */
bool gemm_cluster_fits(const struct cuda_backend *cu, int rows, int padded);
/* The rows are those of cu->forms.panels. */
bool gemm_cluster_suits(const struct cuda_backend *cu, const struct matrix *w, int rows);
void gemm_cluster(struct cuda_backend *cu, const struct matrix *w, float *y, int rows);

/* gemm_wgmma.cu */
bool gemm_wgmma_available(struct cuda_backend *cu,
                          int *scratch); /* scratch: an int on the device */
size_t gemm_wgmma_part_bytes(const struct cuda_backend *cu);
bool gemm_wgmma_suits(const struct cuda_backend *cu, const struct matrix *w, bool pair);

/* router.cu. Logits (rows, n_expert) go to cu->routing.logits; with a norm in front, n gets the normed
 * rows. */
void router_row(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in, float *n,
                int rows);
void router_block(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                  float *n, int rows);
/* The same, and the normed rows go to cu->forms.records. */
size_t router_records_shared(const struct matrix *w);
void router_records(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                    int rows);
/* Choices that need all logits of a row at once (struct experts.give): logits (parts, rows,
 * n_expert) become weights of the chosen, and -infinity of the others. Nothing is done for experts
 * that need none of it. */
void router_give(struct cuda_backend *cu, const struct experts *e, int parts, int rows);
/* Where they are then: in cu->routing.logits, or of experts that are spread, (rows, own), beside it. */
static inline const float *router_given(const struct cuda_backend *cu, const struct experts *e)
{
    return e->rule.spread ? cu->routing.own : cu->routing.logits;
}
/* Logits as n_kt sums of which each is (rows, n_expert). */
void router_rows(struct cuda_backend *cu, const struct matrix *w, const float *x, int rows);

/* moe_gemv.cu: experts of one row, or a few, whose logits are in cu->routing.logits */
bool moe_gemv_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                   const struct matrix *down);
void moe_gemv(struct cuda_backend *cu, const struct experts *e, const float *x, float *y, int rows);
/* One row with the product in front: x += a W^T; y = experts of norm(x), with in's gain. */
bool moe_gemv_routed_fits(const struct cuda_backend *cu, const struct matrix *w,
                          const struct experts *e);
void moe_gemv_routed(struct cuda_backend *cu, const struct matrix *w, const float *a,
                     const struct experts *e, const struct norm_in *in, float *x, float *y);

/* moe_few.cu: experts of up to FEW_ROWS rows of K-quants. The rows are those of cu->forms.records, their
 * logits in cu->routing.logits. */
bool moe_few_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                  const struct matrix *down, int rows);
void moe_few(struct cuda_backend *cu, const struct experts *e, float *y, int rows);

/* moe_quad.cu: experts of up to QUAD_ROWS rows of K-quants, as moe_few.cu. */
bool moe_quad_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                   const struct matrix *down, int rows);
size_t moe_quad_meeting_bytes(void);
void moe_quad(struct cuda_backend *cu, const struct experts *e, float *y, int rows);

/* moe_grouped.cu: experts of up to LIST_ROWS rows of K-quants */
int moe_grouped_records(const struct kernel_limits *s);        /* of cu->forms.records */
int moe_grouped_hidden_records(const struct kernel_limits *s); /* of cu->mlp.hidden_records */
enum { RECORD = 576 };                                         /* bytes of one: see rows.cuh */

/* moe_route.cu */
size_t moe_route_ints(const struct kernel_limits *s); /* ints in cu->routing.tables */

/* sample.cu: a token for each of the rows of the step begun last; samplers (rows). */
bool sample_prepare(struct cuda_backend *cu, struct error *err);
void sample_close(struct cuda_backend *cu);
void sample_tokens(struct cuda_backend *cu, struct sampler *const *samplers, int rows);
/* What came of it, after the step has ended. turn: of its flight. */
const int32_t *sample_tokens_of(const struct cuda_backend *cu, int turn); /* (max_out) */
const struct sample_probs *sample_probs_of(const struct cuda_backend *cu, int turn);

#endif
