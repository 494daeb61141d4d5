/*
 * gemm_few.cu with two groups of eight rows per block: every weight becomes a fragment once for
 * sixteen rows. The rows are taken from cu->forms.records. Rings have four stages, or two where
 * four do not fit.
 */
#ifndef STEEL_BACKEND_CUDA_GEMM_FEW_H
#define STEEL_BACKEND_CUDA_GEMM_FEW_H

#include "backend/cuda/core/cuda.h"

bool gemm_few_pairs_fit(const struct cuda_backend *cu, const struct matrix *w, int rows);
void gemm_few_pairs(struct cuda_backend *cu, const struct matrix *w, float *y, int rows);
bool gemm_few_short_fits(const struct cuda_backend *cu, const struct matrix *w, int rows);
void gemm_few_short(struct cuda_backend *cu, const struct matrix *w, float *y, int rows);

#endif
