/*
 * Floats to blocks: the inverse of quant_dequantize, with the error-minimising search of scales
 * that low-bit formats need. One implementation, compiled for several instruction sets with
 * bit-identical results. Knows nothing of files; callers split rows.
 */
#ifndef STEEL_QUANT_QUANTIZE_H
#define STEEL_QUANT_QUANTIZE_H

#include "quant/quant.h"

/* Whether quantize_rows can write the type: every weight type of GGUF down to IQ3_S. */
bool quantize_supported(enum dtype t);

/*
 * Writes rows * n values (n a multiple of block_len) as blocks to dst. importance (n) or NULL:
 * weight of the squared error in each column, positive, any scale. Values must be finite.
 */
void quantize_rows(enum dtype t, const float *src, void *dst, size_t rows, size_t n,
                   const float *importance);

/* Like quant_dequantize, but fast for F16 and BF16. */
void quantize_load(enum dtype t, const void *src, float *dst, size_t n);
/* Largest |x|. Not finite if any x is NaN or infinite. */
float quantize_amax(const float *x, size_t n);

#endif
