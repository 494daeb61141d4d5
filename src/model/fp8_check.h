/*
 * FP8 codes that are no numbers: E4M3 has two, 0x7f and 0xff, and a weight has neither. Fast kernels may take them for 480, so
 * that one row and many would differ; a file with one is refused when it is loaded. Looking costs next to
 * nothing where a backend reads the file piece by piece, for it looks at pieces that are in the cache anyway; what no
 * one read that way is looked at afterwards, by a few threads.
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
    atomic_size_t seen; /* of them */
    atomic_bool bad;
};

/* Gives w its way to read the file; c and w stay where they are until the end. */
void fp8_check_begin(struct fp8_check *c, const struct tensorfile *f, struct raw_weight *w);
/* After the upload, while the data is there: whether all codes are numbers. */
bool fp8_check_end(struct fp8_check *c);
/* The first code of n that is no number, or n. */
size_t fp8_check_find(const uint8_t *codes, size_t n);

#endif
