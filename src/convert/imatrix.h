/*
 * Importance matrices: per weight, the mean square of each column's input over some text. Reads
 * both formats in use: GGUF (type "imatrix") and the older .dat. Nothing is copied; a matrix's
 * weights are computed on request.
 */
#ifndef STEEL_CONVERT_IMATRIX_H
#define STEEL_CONVERT_IMATRIX_H

#include "base/error.h"

#include <stddef.h>

struct imatrix;

struct imatrix *imatrix_open(const char *path, struct error *err);
void imatrix_close(struct imatrix *m);
size_t imatrix_count(const struct imatrix *m);

enum imatrix_fit { IMATRIX_NONE, IMATRIX_FITS, IMATRIX_MISFIT };
/* Whether the file has weights for n_mats matrices of n columns under this name. */
enum imatrix_fit imatrix_check(const struct imatrix *m, const char *name, size_t n, size_t n_mats);
/* out[n] = weights of matrix i, mean 1, minimum 1e-4. False: no data, all weights are equal. */
bool imatrix_weights(const struct imatrix *m, const char *name, size_t i, size_t n, float *out);

#endif
