/*
 * A weight matrix in host memory, in the file's own blocks. Loading passes it to a backend; the reference ops and the
 * generic CPU kernels compute from it. It has up to three row segments, each with its own dtype (Q4_K_M mixes Q4_K
 * and Q6_K within q/k/v). Each expert has its own pointers, so experts are slices of a 3-D tensor or separate tensors,
 * without a copy.
 */
#ifndef STEEL_BACKEND_RAWWEIGHT_H
#define STEEL_BACKEND_RAWWEIGHT_H

#include "quant/quant.h"

struct raw_seg {
    enum dtype type;
    int rows;
    const uint8_t *const *data; /* (n_expert) -> (rows, n_in) blocks, rows contiguous */
    /* Planes of planar types, else NULL:
     *   DT_F8_E4M3  scale: float (rows, ceil(n_in/128)): value = code * scale; NULL: scale 1
     *   DT_NVFP4    scale: one float for all values; NULL: 1
     *   DT_GPTQ4    data: (rows, n_in/2), low nibble first; scale: fp16 (rows, n_groups);
     *               zero: u8 (rows, n_groups); value = (code - zero) * scale, column j in
     *               group j / group_len */
    const void *const *scale;   /* (n_expert) */
    const uint8_t *const *zero; /* (n_expert) */
    /* GPTQ act-order: stored column j multiplies input perm[j]; NULL = identity. */
    const int32_t *const *perm; /* (n_expert) -> (n_in) */
    int group_len;
};

enum { RAW_FETCH_ALIGN = 4096 };

struct raw_weight {
    int n_in, n_out; /* n_out = sum of seg rows */
    int n_expert;    /* 1 for a plain matrix */
    int n_host; /* its last experts stay in host memory and are computed there (options.h: host_experts) */
    int n_seg;
    struct raw_seg seg[3];
    const float *bias; /* (n_expert, n_out) or NULL */
    /* For a backend that makes its own copy; may be NULL. Returns where the source bytes can be read: buf (bytes),
     * after reading them from the file, or `data` if it is plain memory. A read is cheaper than page faults and leaves
     * no pages mapped. Returns NULL if the file could not be read. Safe from many threads. */
    const uint8_t *(*read)(void *arg, const uint8_t *data, size_t bytes, uint8_t *buf);
    void *read_arg;
    /* The same as long as the file is open, not only during upload, and without filling the page cache where the
     * system can. buf: aligned to RAW_FETCH_ALIGN, (bytes + 2 * RAW_FETCH_ALIGN). NULL: the data is not in a file as it
     * is. A read fails when the file was cut. */
    const uint8_t *(*fetch)(void *arg, const uint8_t *data, size_t bytes, uint8_t *buf);
    void *fetch_arg;
    /* the data is valid only during upload; a backend that needs it later copies it */
    bool transient;
};

size_t raw_seg_row_bytes(const struct raw_seg *s, int n_in); /* bytes of data per row */
size_t raw_weight_bytes(const struct raw_weight *w);         /* data and planes of all experts */
/* Experts [first, first + n) of src alone: pointers into src's tables. */
struct raw_weight raw_weight_experts(const struct raw_weight *src, int first, int n);

/* dst (n_in) = row `row` (0..n_out) of expert e as floats, exact, in input order (perm undone). */
void raw_weight_row(const struct raw_weight *w, int e, int row, float *dst);

/* A deep copy in one allocation; not transient. NULL: out of memory. */
struct raw_weight *raw_weight_copy(const struct raw_weight *w);
/* A copy of the descriptor and its pointer tables; the data is shared. */
struct raw_weight *raw_weight_view(const struct raw_weight *w);
void raw_weight_free(struct raw_weight *w); /* of raw_weight_copy or raw_weight_view */

#endif
