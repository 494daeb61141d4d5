/*
 * Matrix products of the CPU backend: the layout of weights, the forms of inputs, and the product itself. linear, ffn
 * and moe are built on gemm_block, which multiplies a range of weight rows with a list of input rows, using the kernel
 * that pick.c chooses.
 *
 * Rows are independent. The order of additions for one (input row, weight row) pair depends only on the weight, so a
 * row's result does not depend on the rest of the batch or on the number of threads.
 */
#ifndef STEEL_BACKEND_CPU_GEMM_H
#define STEEL_BACKEND_CPU_GEMM_H

#include "backend/batch.h"
#include "backend/rawweight.h"
#include "backend/cpu/lora.h"
#include "base/cpu.h"
#include "base/pool.h"

enum {
    GEMM_PANEL = 16,  /* weight rows that packed layouts interleave */
    GEMM_UNIT = 32,   /* weight rows of one unit of work: two panels */
    GEMM_CHUNK = 128, /* input rows a thread takes at a time */
    GEMM_MANY = 512,  /* the same for kernels that first convert a whole weight row */
    GEMM_TILE = GEMM_MANY * GEMM_UNIT, /* floats of results that pass through a thread's scratch */
    GEMM_PAD = 31 /* rows after the last one that these kernels may read without using them */
};

struct expert_panels;

/* One row segment of a weight. Packed: (n_expert, n_panels) panels of panel_bytes. */
struct gemm_seg {
    enum dtype type;
    bool packed;
    int first_row, rows, n_panels; /* first_row: in the weight; packed ones start on a panel */
    size_t panel_bytes;
    const uint8_t *data; /* packed only */
    int group_len;       /* GPTQ4 */
    const int32_t *perm; /* (n_expert, n_in) GPTQ4 act-order: column j multiplies input perm[j] */
};

struct gemm_weight {
    int n_in, n_out, n_expert, n_seg;
    struct gemm_seg seg[3];
    bool wants_q, wants_x;  /* packed segments read quantised input, the others floats */
    bool wants_fine;        /* some packed segments also read the fine part */
    struct raw_weight *raw; /* view or copy, for segments that are not packed; NULL if none */
    float *bias;            /* (n_expert, n_out) or NULL */
    uint8_t *mem;           /* (mem_bytes) packed panels of all segments, then perms */
    size_t mem_bytes;
    /* Experts that are partly in the file (tier.h): mem has some of them. place: (n_expert) their places. NULL = all are in
     * mem, in order. */
    struct tier_weight *tier;
    int32_t *place;
};

/* Input rows in the forms that a weight's segments read. */
struct gemm_x {
    int n_in;
    const float *x;   /* (rows, n_in), or NULL if no segment reads floats */
    const uint8_t *q; /* (rows) records of panel.h, or NULL */
    const uint8_t *h; /* (rows + GEMM_PAD) rows of bf16, gemm_bf16_stride() bytes apart, or NULL */
    bool split;       /* h: each row's n_in values are followed by their n_in rounding errors */
    unsigned stamp;   /* equal stamp and pointers mean equal contents; 0 = unknown */
};

/* Memory that is read right after a product. Kernels bound by arithmetic prefetch it while they run. */
struct gemm_prefetch {
    int n;
    const char *at[32];
    size_t bytes[32]; /* (n) */
};

struct gemm_call {
    const struct gemm_weight *w;
    const struct gemm_seg *seg;
    int expert;
    int row, n_rows; /* rows of the segment; packed kernels: row is a multiple of GEMM_PANEL */
    const struct gemm_x *x;
    const int32_t *rows; /* (n) rows of x, or NULL: 0..n-1 */
    int n;
    float *y; /* y[i * stride + j], i < n, j < n_rows */
    size_t stride;
    const float *bias;                    /* (n_rows) or NULL */
    void *scratch;                        /* this thread's, gemm_scratch_bytes */
    const struct gemm_prefetch *prefetch; /* or NULL */
};

enum { MOE_MAX_GROUPS = 256 };

struct moe_state;
struct cpu_backend;

/* Scratch of linear, ffn and moe; made by prepare(). */
struct gemm {
    size_t thread_bytes;
    uint8_t *threads;  /* (n_threads, thread_bytes) */
    unsigned stamp;    /* of the current op */
    float *hidden;     /* (max_tokens * experts per token, n_ff): input of the down projection */
    uint8_t *hidden_q; /* the same as records */
    uint8_t *xq;       /* (max_tokens) records of the op's input */
    uint8_t *xh,
        *hidden_h; /* input and hidden as rows of bf16, or of two, in the order of experts' slots for
                               moe; NULL without AMX */
    struct moe_state *moe; /* NULL without experts */
};

/* A weight in the backend's form. With repack, segments with a packed layout are interleaved. All others are read in
 * place from the file's blocks, which are copied if src is transient. */
struct gemm_weight *gemm_weight_new(const struct raw_weight *src, bool repack, struct pool *pool,
                                    struct error *err);
/* Per-head matrices, packed. Formats without a packed layout are converted to F16: these matrices are a hundredth of a
 * model's weights. */
struct gemm_weight *gemm_weight_heads(const struct raw_weight *src, struct pool *pool,
                                      struct error *err);
void gemm_weight_free(struct gemm_weight *w);
/* A packed weight without its panels. */
struct gemm_weight *gemm_weight_shape(const struct raw_weight *src);
/* Bytes that gemm_weight_new, or with heads gemm_weight_heads, allocates for src, whose data is not read. *mapped: bytes
 * that stay in the file's blocks. */
size_t gemm_weight_bytes(const struct raw_weight *src, bool heads, bool repack, size_t *mapped);
void gemm_weight_row(const struct gemm_weight *w, int row, float *dst); /* expert 0, exact */
/* expert_ops.panels */
bool gemm_weight_panels(const struct gemm_weight *w, int seg, struct expert_panels *out);

bool gemm_init(struct cpu_backend *cb, struct error *err);
void gemm_clear(struct cpu_backend *cb);

/* y[i*stride + j] = x[rows[i]] . W_e[r0 + j] + bias_e[r0 + j], i < n, j < r1 - r0. n <= gemm_most(x);
 * rows is NULL with bf16. Runs on the calling thread, number ith of the team. */
void gemm_block(const struct cpu_backend *cb, int ith, const struct gemm_weight *w, int e, int r0,
                int r1, const struct gemm_x *x, const int32_t *rows, int n, float *y,
                size_t stride);
/* hidden[slot + i][h0..h1) = act(gate, up) of input rows rows[i] (NULL: i), in the forms of
 * `hidden`, which f's down reads; h0 a multiple of GEMM_UNIT; n * (h1 - h0) <= GEMM_TILE. What adapters
 * change of it is in chunks [c0, c1) of `lora`, whose rows are slots. */
void gemm_glu_block(const struct cpu_backend *cb, int ith, const struct ffn *f,
                    const struct gemm_x *hidden, int e, int h0, int h1, const struct gemm_x *x,
                    const int32_t *rows, const float *weights, int n, int slot,
                    const struct lora_work *lora, int c0, int c1);
/* g[i] = act(g[i], u[i]) of layer.h, i < n. */
void gemm_activate(const struct cpu_backend *cb, const struct ffn *f, float *g, const float *u,
                   int n);
/* Whether w is best multiplied as bf16 where each of its rows meets `load` input rows. */
bool gemm_takes_bf16(const struct cpu_backend *cb, const struct gemm_weight *w, int load);
/* Input rows one call of gemm_block may take. */
static inline int gemm_most(const struct gemm_x *x)
{
    return x->h ? GEMM_MANY : GEMM_CHUNK;
}
/* The conversion of input rows into the forms a weight reads, as pieces of a phase of its own. */
struct gemm_source {
    struct gemm_x x;             /* the converted rows, in the backend's scratch */
    const struct gemm_weight *w; /* the weight that reads them */
    const float *from;           /* (rows, n_in) */
    const int32_t *order;        /* (n) bf16 only: row i is row order[i] of from; NULL: i */
    int n_pieces;                /* 0: no conversion is needed */
};

/* Rows x (rows, w->n_in) as w reads them; as bf16: where gemm_takes_bf16 says so. */
struct gemm_source gemm_source(const struct cpu_backend *cb, const struct gemm_weight *w,
                               const float *x, int rows, bool bf16);
/* Rows order[i] of x as bf16, in that order, i < n. */
struct gemm_source gemm_source_ordered(const struct cpu_backend *cb, const struct gemm_weight *w,
                                       const float *x, const int32_t *order, int n);
void gemm_convert(const struct cpu_backend *cb, const struct gemm_source *s, int first, int last);
struct gemm_x gemm_hidden(const struct cpu_backend *cb, const struct gemm_weight *down, bool bf16);
struct gemm_x gemm_x_at(struct gemm_x x, int row);              /* rows from `row` on */
float *gemm_tile(const struct cpu_backend *cb, int ith, int i); /* (GEMM_TILE), i < 3 */
/* Matrices of heads: y[i*stride + j] = from[i*apart ..] . W_e[j], i < n <= gemm_head_most, j < n_out.
 * Rows take the forms w reads in this thread's tiles. */
int gemm_head_most(const struct cpu_backend *cb, const struct gemm_weight *w, bool bf16);
void gemm_head(const struct cpu_backend *cb, int ith, const struct gemm_weight *w, int e,
               const float *from, size_t apart, int n, bool bf16, float *y, size_t stride);
/* Counts the kernels of a product in the pick table. Called by one thread, once an op. */
void gemm_count(struct cpu_backend *cb, const struct gemm_weight *w, int load, bool bf16);
/* Whether kernels read a range of w in one pass for `rows` input rows (pick_row.stream). */
bool gemm_stream(const struct cpu_backend *cb, const struct gemm_weight *w, int rows);
/* Units of weight rows per call where results pass through a tile. As many as fit for kernels that read ranges in one
 * pass or convert weights, else one. */
int gemm_width(const struct cpu_backend *cb, const struct gemm_weight *w, int n, bool bf16);
/* How threads claim units of weight rows. With few input rows memory is the limit, and long ranges are best. */
static inline enum pool_cut gemm_cut(const struct cpu_backend *cb, const struct gemm_weight *w,
                                     int rows)
{
    return gemm_stream(cb, w, rows) ? POOL_LONG : POOL_EVEN;
}
void gemm_start(struct gemm *m); /* begins an op with a new stamp */
/* y = x w^T + bias + the adapters' changes; rows: all current rows of the stream. */
void gemm_linear(struct cpu_backend *cb, const struct weight *w, const float *x, float *y,
                 int rows);
/* The same with matrix e of a weight of several (WEIGHT_HEADS); no adapters. */
void gemm_linear_of(struct cpu_backend *cb, const struct weight *w, int e, const float *x, float *y,
                    int rows);
void gemm_ffn(struct cpu_backend *cb, const struct ffn *f, const float *x, float *y, int rows);

bool moe_init(struct cpu_backend *cb, struct error *err);
void moe_clear(struct cpu_backend *cb);
/* y = the weighted sum of l's experts over rows of x. The router reads router_x, which may differ from x. */
void moe_run(struct cpu_backend *cb, const struct mlp *l, const float *router_x, const float *x,
             float *y, int rows);
/* y (rows, down's rows) = the weighted sum of the experts chosen (rows, used), -1 = none, with these weights. */
void moe_run_given(struct cpu_backend *cb, const struct mlp *l, const int32_t *chosen,
                   const float *weights, int used, const float *x, float *y, int rows);
/* With a tier: remembers which experts layer `next` would choose for x (rows, E), the stream before this layer's mlp. They
 * are read while this layer computes. Does nothing for many rows. */
void moe_look_ahead(struct cpu_backend *cb, const struct mlp *next, const float *x, int rows);
/* After moe_run, and valid until the next one: (rows) bit masks of the processes that have experts of a row. */
const uint64_t *moe_members(struct cpu_backend *cb, const struct mlp *l, int rows, int n_members);
/* After moe_run: y (rows, E) += what experts without weights return for x (rows, E). */
void moe_add_same(struct cpu_backend *cb, const struct mlp *l, const float *x, float *y, int rows);

#endif
