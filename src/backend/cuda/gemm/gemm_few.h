/*
 * gemm_few.cu with two groups of eight rows a block: every weight is made fragments once for sixteen
 * rows. The rows are those of cu->records. Rings have four tiles, or, where those do not fit, two.
 */
#ifndef STEEL_BACKEND_CUDA_GEMM_FEW_H
#define STEEL_BACKEND_CUDA_GEMM_FEW_H

#include "backend/cuda/core/cuda.h"

bool gemm_few_pairs_fit(const struct cuda_backend *cu, const struct matrix *w, int rows);
void gemm_few_pairs(struct cuda_backend *cu, const struct matrix *w, float *y, int rows);
bool gemm_few_short_fits(const struct cuda_backend *cu, const struct matrix *w, int rows);
void gemm_few_short(struct cuda_backend *cu, const struct matrix *w, float *y, int rows);

#endif
