/*
 * Low-rank adapters (LoRA) as data. An adapter changes some of the weights: for the rows that use it,
 *   y = x W^T + s * (x A^T) B^T
 * where s is the scale of the request. batch.loras lists which rows use which adapters. weight.lora holds each
 * adapter's change in the backend's form. Base weights are never modified. Knows no files and names.
 */
#ifndef STEEL_BACKEND_LORA_H
#define STEEL_BACKEND_LORA_H

#include <stddef.h>
#include <stdint.h>

enum {
    LORA_MAX_ADAPTERS = 256, /* loaded at once; an adapter's number is below this */
    LORA_MAX_RANK = 1024,
    LORA_MAX_PARTS = 3, /* ranges of a weight's rows */
    LORA_MAX_USES = 4,  /* adapters used by one sequence */
};

/* The change of a range of weight rows: y[first + i] += b[i] . (A x)[at..at + rank). */
struct lora_part {
    int first, n;
    int at, rank;
    float *b; /* (n, rank), multiplied by the adapter's own scale */
};

/* The change of one matrix. Parts may use the same rows of a. */
struct lora_matrix {
    int rank; /* rows of a; 0 = no change */
    float *a; /* (rank, n_in) */
    int n_parts;
    struct lora_part parts[LORA_MAX_PARTS];
};

/* One adapter's change of one weight, in host memory. adapt() converts it to the backend's form. */
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
int lora_rank(const struct lora *l); /* largest rank over the experts */
/* The specification: y (n_out) += scale * B (A x), for expert e. */
void lora_add(const struct lora *l, int e, float scale, const float *x, float *y);
/* w (n_in) += scale * (B A)[row], for expert e. */
void lora_add_row(const struct lora *l, int e, int row, float scale, float *w);

#endif
