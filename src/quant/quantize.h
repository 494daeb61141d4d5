/*
 * Floats to blocks: the inverse of quant_dequantize, with the error-minimising search of scales that
 * makes low-bit formats usable. One implementation, compiled for several instruction sets, with the
 * same bits from each. Knows nothing of files; callers cut rows.
 */
#ifndef STEEL_QUANT_QUANTIZE_H
#define STEEL_QUANT_QUANTIZE_H

#include "quant/quant.h"

/* Types quantize_rows can make: every weight type of GGUF down to IQ3_S. */
bool quantize_supported(enum dtype t);

/*
 * Writes rows * n values (n a multiple of block_len) as blocks to dst. `importance` (n), or NULL: how
 * much a squared error in each column counts, positive, any scale. Values must be finite.
 */
void quantize_rows(enum dtype t, const float *src, void *dst, size_t rows, size_t n,
                   const float *importance);

/* dst[0..n) = values; like quant_dequantize, fast for F16 and BF16. */
void quantize_load(enum dtype t, const void *src, float *dst, size_t n);
/* Largest |x|; NaN and infinities give a value that is not finite. */
float quantize_amax(const float *x, size_t n);

#endif
