/*
 * Low-rank changes of weights (LoRA), as data. An adapter changes some weights: y = x W^T + s * (x A^T) B^T
 * of the rows that use it, s being what the request asks for. A step says which rows use which adapters
 * (batch.loras); a weight holds each adapter's change in the backend's form (weight.lora). Base weights
 * are never touched. Knows nothing of files and names.
 */
#ifndef STEEL_BACKEND_LORA_H
#define STEEL_BACKEND_LORA_H

#include <stddef.h>
#include <stdint.h>

enum {
    LORA_MAX_ADAPTERS = 256, /* loaded at once: numbers 0.. */
    LORA_MAX_RANK = 1024,
    LORA_MAX_PARTS = 3, /* of a weight: its runs of rows */
    LORA_MAX_USES = 4,  /* adapters of one sequence */
};

/* Rows of the weight, and what is added to them: y[first + i] += b[i] . (A x)[at..at + rank). */
struct lora_part {
    int first, n;
    int at, rank;
    float *b; /* (n, rank), the adapter's own scale in it */
};

/* The change of one matrix. Parts may share rows of a. */
struct lora_matrix {
    int rank; /* rows of a; 0 = no change */
    float *a; /* (rank, n_in) */
    int n_parts;
    struct lora_part parts[LORA_MAX_PARTS];
};

/* One adapter's change of one weight, in host memory: what a backend is given. */
struct lora {
    int n_in, n_out, n_expert;
    struct lora_matrix *of; /* (n_expert) */
};

/* Rows [first, first + n) of a batch use an adapter. */
struct lora_use {
    int32_t adapter, first, n;
    float scale;
};

struct lora *lora_new(int n_in, int n_out, int n_expert);
struct lora *lora_copy(const struct lora *l);
void lora_free(struct lora *l);
int lora_rank(const struct lora *l); /* the most rows of any a */
/* y (n_out) += scale * B (A x), of expert e: what it means. */
void lora_add(const struct lora *l, int e, float scale, const float *x, float *y);
/* w (n_in) += scale * what the change adds to row `row` of expert e's matrix itself. */
void lora_add_row(const struct lora *l, int e, int row, float scale, float *w);

#endif
