/*
 * The choice of kernels, as one ordered table per op. The first row that fits is used, and the last row
 * always fits. All thresholds of the CPU backend are in pick.c.
 *
 * STEEL_PICK=name[,name] forces rows, one per op, for any number of input rows; for tests and
 * experiments. -name leaves a row out wherever another one can run. Formats that a forced row does not cover are picked as usual. It is an error if a forced
 * row cannot run a weight or cache of its formats, or if the model has none of them. pick_force, for
 * tests, never fails: a row is used where it can run.
 */
#ifndef STEEL_BACKEND_CPU_PICK_H
#define STEEL_BACKEND_CPU_PICK_H

#include "backend/batch.h"
#include "backend/cpu/gemm.h"
#include "base/cpu.h"

#include <stdio.h>

struct pick_info; /* backend/backend.h */
struct attn_kernels;
struct gemm_call;

enum pick_op {
    PICK_GEMM,   /* every product with a weight: linear, ffn, router, experts, head */
    PICK_ATTN,   /* scores, softmax and weighted values of one unit of attention */
    PICK_LATENT, /* the same over a cache of rows (latent attention) */
    PICK_OPS
};

/* The form of input rows that a product reads. */
enum pick_input { INPUT_FLOATS, INPUT_INT8, INPUT_BF16 };

/* The work a kernel is picked for. */
struct pick_query {
    enum dtype type;   /* of the weight's segment, or of keys in the cache */
    enum dtype v_type; /* ... and of values */
    int rows;          /* input rows per weight row, or query rows of a unit */
    bool deterministic;
    const struct gemm_weight *w; /* products */
    const struct gemm_seg *seg;
    int head_dim, page_len; /* attention */
    int v_dim;              /* of attention's values */
    bool relative;          /* scores have relative positions */
};

struct pick_formats {
    uint64_t bits; /* 1 << dtype */
    const char *names;
};

struct pick_row {
    const char *name;
    const struct pick_formats *formats;
    int rows_from, rows_to; /* range of rows where the kernel is used */
    enum isa isa;           /* features the kernel needs */
    bool (*fits)(const struct pick_query *a);
    void (*gemm)(const struct gemm_call *c);
    const struct attn_kernels *attn;
    enum pick_input input;
    bool
        stream; /* gemm: reads a range of weight rows in one pass for all input rows. Otherwise it reads two panels at a time, which stay in the cache. */
    bool pack; /* attention: converts each block of K and V first, which pays for many query rows */
};

enum { PICK_MAX_ROWS = 24 }; /* rows of a table */

/* A backend's settings for the choice, and its statistics. */
struct pick {
    enum isa isa;
    bool deterministic;
    const struct pick_row *forced[PICK_OPS]; /* NULL: none */
    const struct pick_row *left_out;         /* NULL: none */
    bool strict;                             /* forced rows come from STEEL_PICK */
    bool used;                               /* some weight can run on the forced gemm row */
    uint64_t runs[PICK_OPS][PICK_MAX_ROWS];  /* ops that used each row */
};

const struct pick_row *pick_rows(enum pick_op op, int *n);

/* names: of STEEL_PICK, or NULL. */
bool pick_init(struct pick *p, enum isa isa, bool deterministic, const char *names,
               struct error *err);
void pick_force(struct pick *p, const char *names); /* NULL: none */
/* Describes row i, counting through all tables; false past the last. */
bool pick_describe(const struct pick *p, int i, struct pick_info *out);
/* Counts an op that uses `row`. Called by one thread. */
void pick_count(struct pick *p, enum pick_op op, const struct pick_row *row);
/* Whether forced rows can run an uploaded weight; after the last upload, the whole network. */
bool pick_check_weight(struct pick *p, const struct gemm_weight *w, struct error *err);
bool pick_check_network(const struct pick *p, const struct network *net, const struct bounds *b,
                        struct error *err);

/* The kernel for a segment of w where each weight row meets `rows` input rows. If its input is
 * INPUT_BF16, all segments of w take bf16. */
const struct pick_row *pick_gemm(const struct pick *p, const struct gemm_weight *w,
                                 const struct gemm_seg *seg, int rows);
/* The same for a given form of the input: bf16, or any other form. */
const struct pick_row *pick_gemm_for(const struct pick *p, const struct gemm_weight *w,
                                     const struct gemm_seg *seg, int rows, bool bf16);
const struct pick_row *pick_attn(const struct pick *p, enum dtype k_type, enum dtype v_type,
                                 int head_dim, int v_dim, int page_len, bool relative, int rows);

const struct pick_row *pick_latent(const struct pick *p, enum dtype type, int dim, int v_dim,
                                   int rows);

/* Whether an op is too small to wake the other threads. Work counts floats, except for
 * attention. */
enum pick_small {
    SMALL_EMBED,
    SMALL_ROPE,
    SMALL_POST,
    SMALL_NORM,
    SMALL_GATHER,
    SMALL_ATTN,
    SMALL_DELTA
};
bool pick_single_thread(enum pick_small what, size_t work);

/* Prints the rows picked for the network's shapes at several numbers of input rows. */
void pick_print_shapes(const struct pick *p, const struct network *net, const struct bounds *b,
                       FILE *out);

#endif
