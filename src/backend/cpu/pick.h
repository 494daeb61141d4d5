/*
 * Which kernel runs: per op one ordered table. The first row that fits what is asked runs, the last
 * one always fits. All thresholds of the CPU backend stand in pick.c. STEEL_PICK=name[,name] forces
 * rows, one per op, whatever the number of input rows: for tests and experiments. What a forced row
 * has no format for goes on as usual; a weight or a cache of its formats that it cannot run is an
 * error, and so is a model that has nothing for it. Tests force rows with pick_force, which refuses
 * nothing: a row runs where it can.
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
    PICK_ATTN,   /* scores, softmax and weighted values of a unit of attention */
    PICK_LATENT, /* the same over a cache of rows */
    PICK_OPS
};

/* The form of input rows that a product reads. */
enum pick_input { INPUT_FLOATS, INPUT_CODES, INPUT_HALVES };

/* What is asked for. */
struct pick_ask {
    enum dtype type;   /* of the weight's segment, or of keys in the cache */
    enum dtype v_type; /* ... and of values */
    int rows;          /* input rows that meet a weight row, or query rows of a unit */
    bool deterministic;
    const struct gemm_weight *w; /* products */
    const struct gemm_seg *seg;
    int head_dim, page_len; /* attention */
    int v_dim;              /* latents */
};

struct pick_formats {
    uint64_t bits; /* 1 << dtype */
    const char *names;
};

struct pick_row {
    const char *name;
    const struct pick_formats *formats;
    int rows_from, rows_to; /* what it is best at */
    enum isa isa;           /* features it needs */
    bool (*fits)(const struct pick_ask *a);
    void (*gemm)(const struct gemm_call *c);
    const struct attn_kernels *attn;
    enum pick_input input;
    bool stream; /* products: a range of weight rows is read in one go, for all input rows at once;
                    else two panels at a time, which stay in the cache */
    bool pack;   /* attention: a block of K and V is converted first, for many query rows */
};

enum { PICK_MAX_ROWS = 24 }; /* of a table */

/* How a backend picks. */
struct pick {
    enum isa isa;
    bool deterministic;
    const struct pick_row *forced[PICK_OPS]; /* NULL: none */
    bool strict;                             /* they came from STEEL_PICK */
    bool used;                               /* some weight can take the forced product */
    uint64_t runs[PICK_OPS][PICK_MAX_ROWS];  /* ops that a row ran */
};

const struct pick_row *pick_rows(enum pick_op op, int *n);

/* Reads STEEL_PICK. */
bool pick_init(struct pick *p, enum isa isa, bool deterministic, struct error *err);
void pick_force(struct pick *p, const char *names); /* NULL: none */
/* Row i of all tables, one after another; false past the last. */
bool pick_describe(const struct pick *p, int i, struct pick_info *out);
/* Counts an op. Called by one thread. */
void pick_count(struct pick *p, enum pick_op op, const struct pick_row *row);
/* Whether a forced row can run a weight that was uploaded, and at the end, what a network needs. */
bool pick_check_weight(struct pick *p, const struct gemm_weight *w, struct error *err);
bool pick_check_network(const struct pick *p, const struct network *net, const struct bounds *b,
                        struct error *err);

/* The kernel for a segment of w where each weight row meets `rows` input rows. Its input may be
 * INPUT_HALVES: then all segments of w take it. */
const struct pick_row *pick_gemm(const struct pick *p, const struct gemm_weight *w,
                                 const struct gemm_seg *seg, int rows);
/* The same where the input's form is settled: halves, or not halves. */
const struct pick_row *pick_gemm_for(const struct pick *p, const struct gemm_weight *w,
                                     const struct gemm_seg *seg, int rows, bool halves);
const struct pick_row *pick_attn(const struct pick *p, enum dtype k_type, enum dtype v_type,
                                 int head_dim, int page_len, int rows);

const struct pick_row *pick_latent(const struct pick *p, enum dtype type, int dim, int v_dim,
                                   int rows);

/* Whether work is too small to be worth waking the team: floats, but for attention. */
enum pick_small {
    SMALL_EMBED,
    SMALL_ROPE,
    SMALL_POST,
    SMALL_NORM,
    SMALL_GATHER,
    SMALL_ATTN,
    SMALL_DELTA
};
bool pick_alone(enum pick_small what, size_t work);

/* Prints what the tables give the network's shapes for some numbers of rows. */
void pick_print_shapes(const struct pick *p, const struct network *net, const struct bounds *b,
                       FILE *out);

#endif
