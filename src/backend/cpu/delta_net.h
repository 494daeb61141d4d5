/*
 * The interface between the driver of the CPU's gated delta net (delta_net.c) and its kernels, which are
 * compiled per instruction set (delta_net_kernel.h). Private to these files.
 */
#ifndef STEEL_BACKEND_CPU_DELTA_NET_H
#define STEEL_BACKEND_CPU_DELTA_NET_H

#include "base/cpu.h"

#include <stddef.h>

enum {
    DELTA_PANEL = 16, /* columns of a head's state that are stored and computed together */
};

struct delta_kernels {
    /* y[c] = silu(sum_i x[i][c] * w[i*stride + c]), i < taps, c < n; y may be x[taps - 1] */
    void (*conv)(const float *const *x, const float *w, size_t stride, int taps, int n, float *y);
    /* x = x / |x| * scale */
    void (*unit)(float *x, int n, float scale);
    /*
     * One row through `width` columns of a state (Dk, width):
     *   S = from * decay; S += k (beta * (v - S^T k))^T; o = S^T q; to = S.
     * from NULL: zeros.
     */
    void (*step)(const float *from, float *to, const float *q, const float *k, const float *v,
                 float decay, float beta, int Dk, int width, float *o);
    /* a = a / sqrt(mean(a^2) + eps) * gain * silu(z) */
    void (*gate)(float *a, const float *z, const float *gain, float eps, int n);
    /* a *= 1 / (1 + exp(-z)) */
    void (*sigmoid)(float *a, const float *z, int n);
};

extern const struct delta_kernels delta_kernels_c, delta_kernels_avx2, delta_kernels_avx512,
    delta_kernels_neon;

/* The best kernels that isa supports. */
static inline const struct delta_kernels *delta_kernels(enum isa isa)
{
#ifdef __x86_64__
    if (isa_has(isa, ISA_AVX512))
        return &delta_kernels_avx512;
    if (isa_has(isa, ISA_AVX2))
        return &delta_kernels_avx2;
#elif defined __aarch64__
    if (isa_has(isa, ISA_NEON))
        return &delta_kernels_neon;
#endif
    (void)isa;
    return &delta_kernels_c;
}

#endif
