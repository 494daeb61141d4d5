/*
 * Matrix products of the CPU backend: how a weight lies in memory, the forms its inputs take, and the
 * one way to multiply. linear, ffn and moe are built on gemm_block, which computes a range of weight
 * rows for a list of input rows with the kernel that pick.c gives.
 *
 * Rows are independent: a kernel adds the products of one (input row, weight row) pair in an order
 * that depends on the weight alone, so a row's result does not change with the batch around it, and
 * never with the number of threads.
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
    GEMM_PAD = 31 /* rows behind the last that such kernels may read (and not use) */
};

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
    bool wants_fine;        /* and some the fine part of it */
    struct raw_weight *raw; /* view or copy, for segments that are not packed; NULL if none */
    float *bias;            /* (n_expert, n_out) or NULL */
    uint8_t *mem;           /* (mem_bytes) packed panels of all segments, then perms */
    size_t mem_bytes;
};

/* Input rows, in the forms that the segments of a weight read. */
struct gemm_x {
    int n_in;
    const float *x;   /* (rows, n_in) or NULL where nobody reads it */
    const uint8_t *q; /* (rows) records of panel.h, or NULL */
    const uint8_t *h; /* (rows + GEMM_PAD) rows of bf16, gemm_half_stride() bytes apart, or NULL */
    bool split;       /* h: each row's n_in values are followed by what rounding them lost */
    unsigned stamp;   /* equal stamp and pointers: equal contents; 0: nothing is known */
};

/* Memory that is read right behind a product: kernels that are bound by arithmetic ask for it as they go. */
struct gemm_ahead {
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
    const float *bias;              /* (n_rows) or NULL */
    void *scratch;                  /* this thread's, gemm_scratch_bytes */
    const struct gemm_ahead *ahead; /* or NULL */
};

enum { MOE_MAX_GROUPS = 256 };

struct moe_state;
struct cpu_backend;

/* Scratch of linear, ffn and moe; made by prepare(). */
struct gemm {
    size_t thread_bytes;
    uint8_t *threads;  /* (n_threads, thread_bytes) */
    unsigned stamp;    /* of the op in work */
    float *hidden;     /* (max_tokens * experts per token, n_ff): input of the down projection */
    uint8_t *hidden_q; /* the same as records */
    uint8_t *xq;       /* (max_tokens) records of the op's input */
    uint8_t *xh,
        *hidden_h; /* input and hidden as rows of bf16, or of two, in the order of experts' slots for
                               moe; NULL without AMX */
    size_t hidden_bytes, hidden_q_bytes, xq_bytes, xh_bytes, hidden_h_bytes;
    struct moe_state *moe; /* NULL without experts */
};

/* A weight in the backend's form. repack: interleave what has a packed layout; else, and for what
 * has none, the file's blocks are read in place (copied where src is transient). */
struct gemm_weight *gemm_weight_new(const struct raw_weight *src, bool repack, struct pool *pool,
                                    struct error *err);
/* Heads' matrices, packed. Those in a format that has no packed layout become F16: they are a hundredth of a
 * model's weights. */
struct gemm_weight *gemm_weight_heads(const struct raw_weight *src, struct pool *pool,
                                      struct error *err);
void gemm_weight_free(struct gemm_weight *w);
void gemm_weight_row(const struct gemm_weight *w, int row, float *dst); /* expert 0, exact */

bool gemm_init(struct cpu_backend *cb, struct error *err);
void gemm_clear(struct cpu_backend *cb);

/* y[i*stride + j] = x[rows[i]] . W_e[r0 + j] + bias_e[r0 + j], i < n, j < r1 - r0. n <= gemm_most(x);
 * rows is NULL with halves. Runs on the calling thread, number ith of the team. */
void gemm_block(const struct cpu_backend *cb, int ith, const struct gemm_weight *w, int e, int r0,
                int r1, const struct gemm_x *x, const int32_t *rows, int n, float *y,
                size_t stride);
/* hidden[slot + i][h0..h1) = act(gate, up) of input rows rows[i] (NULL: i), in the forms of
 * `hidden`, which f's down reads; h0 a multiple of GEMM_UNIT; n * (h1 - h0) <= GEMM_TILE. What adapters
 * change of it is in chunks [c0, c1) of `lora`, whose rows are slots. */
void gemm_glu_block(const struct cpu_backend *cb, int ith, const struct ffn *f,
                    const struct gemm_x *hidden, int e, int h0, int h1, const struct gemm_x *x,
                    const int32_t *rows, int n, int slot, const struct lora_work *lora, int c0,
                    int c1);
/* g[i] = act(g[i], u[i]) of layer.h, i < n. */
void gemm_activate(const struct cpu_backend *cb, const struct ffn *f, float *g, const float *u,
                   int n);
/* Whether w is best multiplied as bf16 where each of its rows meets `load` input rows. */
bool gemm_halves(const struct cpu_backend *cb, const struct gemm_weight *w, int load);
/* Input rows one call of gemm_block may take. */
static inline int gemm_most(const struct gemm_x *x)
{
    return x->h ? GEMM_MANY : GEMM_CHUNK;
}
/* How input rows get into the forms that a weight reads: the pieces of a phase of its own. */
struct gemm_source {
    struct gemm_x x;             /* what the rows will be, in the backend's scratch */
    const struct gemm_weight *w; /* who reads them */
    const float *from;           /* (rows, n_in) */
    const int32_t *order;        /* (n) halves only: row i is row order[i] of from; NULL: i */
    int n_pieces;                /* 0: the rows are read as they are */
};

/* Rows x (rows, w->n_in) as w reads them; as halves: where gemm_halves says so. */
struct gemm_source gemm_source(const struct cpu_backend *cb, const struct gemm_weight *w,
                               const float *x, int rows, bool halves);
/* Rows order[i] of x as halves, in that order, i < n. */
struct gemm_source gemm_source_ordered(const struct cpu_backend *cb, const struct gemm_weight *w,
                                       const float *x, const int32_t *order, int n);
void gemm_convert(const struct cpu_backend *cb, const struct gemm_source *s, int first, int last);
struct gemm_x gemm_hidden(const struct cpu_backend *cb, const struct gemm_weight *down,
                          bool halves);
struct gemm_x gemm_x_at(struct gemm_x x, int row);              /* rows from `row` on */
float *gemm_tile(const struct cpu_backend *cb, int ith, int i); /* (GEMM_TILE), i < 3 */
/* Matrices of heads: y[i*stride + j] = from[i*apart ..] . W_e[j], i < n <= gemm_head_most, j < n_out.
 * Rows take the forms w reads in this thread's tiles. */
int gemm_head_most(const struct cpu_backend *cb, const struct gemm_weight *w, bool halves);
void gemm_head(const struct cpu_backend *cb, int ith, const struct gemm_weight *w, int e,
               const float *from, size_t apart, int n, bool halves, float *y, size_t stride);
/* Counts the kernels of a product in the pick table. Called by one thread, once an op. */
void gemm_count(struct cpu_backend *cb, const struct gemm_weight *w, int load, bool halves);
/* Whether a range of w is best read in one go, for `rows` input rows at once (pick.h). */
bool gemm_stream(const struct cpu_backend *cb, const struct gemm_weight *w, int rows);
/* Weight rows to take at a time, in units, where results pass through a tile: all that fit where
 * ranges are read in one go, and for kernels that convert them; else one unit. */
int gemm_width(const struct cpu_backend *cb, const struct gemm_weight *w, int n, bool halves);
/* How units of weight rows are claimed: few input rows leave the memory the bound, so that ranges
 * should be long. */
static inline enum pool_cut gemm_cut(const struct cpu_backend *cb, const struct gemm_weight *w,
                                     int rows)
{
    return gemm_stream(cb, w, rows) ? POOL_LONG : POOL_EVEN;
}
void gemm_start(struct gemm *m); /* of an op: a new stamp */
/* y = x w^T + bias and what adapters change of it; rows: all rows of the stream as it is now. */
void gemm_linear(struct cpu_backend *cb, const struct weight *w, const float *x, float *y,
                 int rows);
void gemm_ffn(struct cpu_backend *cb, const struct ffn *f, const float *x, float *y, int rows);

bool moe_init(struct cpu_backend *cb, struct error *err);
void moe_clear(struct cpu_backend *cb);
/* The experts of l, chosen by its router from rows of `asked`, applied to rows of x, and added up. */
void moe_run(struct cpu_backend *cb, const struct mlp *l, const float *asked, const float *x,
             float *y, int rows);
/* After moe_run: which of n_members processes have experts of each row, a bit each; (rows), until the next one. */
const uint64_t *moe_members(struct cpu_backend *cb, const struct mlp *l, int rows, int n_members);

#endif
