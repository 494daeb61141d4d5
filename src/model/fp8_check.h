/*
 * Finds NaN codes in FP8 (E4M3: 0x7f and 0xff) weights. Fast kernels may read a NaN as 480, so
 * single-row and batched kernels would give different results; loading refuses such a file. The
 * check is nearly free where a backend reads the file piece by piece, because each piece is in the
 * CPU cache anyway. Bytes not read that way are checked afterwards by a few threads.
 */
#ifndef STEEL_MODEL_FP8_CHECK_H
#define STEEL_MODEL_FP8_CHECK_H

#include "backend/rawweight.h"
#include "file/tensorfile.h"

#include <stdatomic.h>

struct fp8_check {
    const struct tensorfile *f;
    const struct raw_weight *w;
    size_t total;       /* bytes of codes */
    atomic_size_t seen; /* checked so far */
    atomic_bool bad;
};

/* Installs the checking read function in w. c and w must not move until fp8_check_end. */
void fp8_check_begin(struct fp8_check *c, const struct tensorfile *f, struct raw_weight *w);
/* After the upload, while the file is still mapped: true if no code is NaN. */
bool fp8_check_end(struct fp8_check *c);
/* Index of the first NaN code, or n. */
size_t fp8_check_find(const uint8_t *codes, size_t n);

#endif
