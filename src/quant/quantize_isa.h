/* The function table that one compilation of quantize_lanes.h exports; quantize.c picks one. */
#ifndef STEEL_QUANT_QUANTIZE_ISA_H
#define STEEL_QUANT_QUANTIZE_ISA_H

#include "quant/quant.h"

struct quantize_isa {
    /* rows * n values; importance (n) or NULL */
    void (*rows[DT_COUNT])(const float *src, void *dst, size_t rows, size_t n,
                           const float *importance);
    void (*load_f16)(const uint8_t *src, float *dst, size_t n); /* n a multiple of 16 */
    void (*load_bf16)(const uint8_t *src, float *dst, size_t n);
    float (*amax)(const float *x, size_t n);
};

/* The same for every instruction set (quantize_iq3.c). */
void quantize_iq3_s(const float *src, void *dst, size_t rows, size_t n, const float *importance);

extern const struct quantize_isa quantize_base, quantize_avx2, quantize_avx512, quantize_neon;

#endif
