/*
 * Adapters on the CPU: y += s B (A x), within the products of gemm.c and moe.c. A and B are stored as fp16 in panels of
 * 16 outputs, so one kernel serves both. A's outputs are the low-rank values t, B's outputs are the weight's rows.
 * t = A x is computed while the product's input is converted (cpu_lora_low). B t is added to each tile of the result
 * while the tile is in the cache (cpu_lora_up). Rows are grouped by adapter, at most LORA_ROWS together.
 *
 * A row's result does not depend on other rows or on the number of threads. If no row uses an adapter, none of this
 * runs.
 */
#ifndef STEEL_BACKEND_CPU_LORA_H
#define STEEL_BACKEND_CPU_LORA_H

#include "backend/batch.h"
#include "base/cpu.h"

struct backend;
struct cpu_backend;
struct gemm_prefetch;

enum { LORA_PANEL = 16, LORA_ROWS = 4 };

/* One use of an adapter by a row of a product. */
struct lora_entry {
    int32_t row;  /* of the result */
    int32_t from; /* of the input */
    int32_t adapter;
    float scale;
};

/* Entries [first, first + n) of one adapter. */
struct lora_chunk {
    int first, n;
    const struct cpu_lora_matrix *m;
    int unit; /* of cpu_lora_low: its first one */
};

/* The adapter work of one product. n_chunks 0 = none. */
struct lora_work {
    const struct lora_entry *entries;
    struct lora_chunk *chunks;
    int n_chunks;
    int n_units; /* pieces of cpu_lora_low */
};

enum lora_place {
    LORA_FIRST,
    LORA_SECOND,
    LORA_PLACES
}; /* two products may be in progress at once */

bool cpu_lora_init(struct cpu_backend *cb, struct error *err); /* prepare() */
void cpu_lora_clear(struct cpu_backend *cb);
void cpu_lora_begin(struct cpu_backend *cb);  /* a step */
void cpu_lora_narrow(struct cpu_backend *cb); /* the stream has narrowed to its output rows */
void *cpu_lora_adapt(struct backend *be, const struct weight *w, const struct lora *l,
                     struct error *err);
void cpu_lora_unadapt(struct backend *be, void *change);

/* Whether rows of the stream use an adapter that changes w. */
bool cpu_lora_changes(const struct cpu_backend *cb, const struct weight *w);
/* The adapter work of a product of the stream's rows with w. */
struct lora_work cpu_lora_work(struct cpu_backend *cb, const struct weight *w,
                               enum lora_place place);
/* The same for experts. Slots (n_slots) are sorted by expert, and expert e's slots start at start[e]. The row of a slot
 * is token[slot]. first[e] (n_expert + 1) receives e's first chunk. */
struct lora_work cpu_lora_experts(struct cpu_backend *cb, const struct weight *w,
                                  enum lora_place place, const int32_t *start, const int32_t *token,
                                  int32_t *first);
/* t = A x of the entries' input rows; x: (rows, n_in), by `from`, or with by_row by `row`. */
void cpu_lora_low(const struct cpu_backend *cb, const struct lora_work *l, const float *x, int n_in,
                  bool by_row, int first, int last);
/* Lists the parts of B that cpu_lora_up will read for chunks [c0, c1) and weight rows [r0, r1), as far as the list has
 * room. */
void cpu_lora_prefetch(const struct lora_work *l, int c0, int c1, int r0, int r1,
                       struct gemm_prefetch *prefetch);
/* y[(row - row0) * stride + r - r0] += B t, of entries of chunks [c0, c1) with rows [row0, row0 + n), and
 * rows [r0, r1) of the weight. */
void cpu_lora_up(const struct cpu_backend *cb, const struct lora_work *l, int c0, int c1, int row0,
                 int n, int r0, int r1, float *y, size_t stride);

/* out[i][j] = sum_k m[k][j] * x[i][k]: a panel (k, 16) of fp16 times n <= LORA_ROWS rows. */
typedef void lora_low_fn(const uint16_t *m, int k, const float *const *x, int n,
                         float (*out)[LORA_PANEL]);
/* y[i][16 p + j] += scale * sum_k m[p][k][j] * t[i][k]: panels (n_panels, k, 16). */
typedef void lora_up_fn(const uint16_t *m, int k, int n_panels, const float *const *t, int n,
                        float scale, float *const *y);
lora_low_fn lora_low_c, lora_low_avx2, lora_low_avx512, lora_low_neon;
lora_up_fn lora_up_c, lora_up_avx2, lora_up_avx512, lora_up_neon;

#endif
