/*
 * The interface between the driver of state-space models and of short convolutions (ssm.c) and their kernels,
 * which are compiled per instruction set (ssm_kernel.h). Private to these files.
 */
#ifndef STEEL_BACKEND_CPU_SSM_H
#define STEEL_BACKEND_CPU_SSM_H

#include "base/cpu.h"

#include <stdbool.h>
#include <stddef.h>

enum {
    SSM_PANEL = 16, /* columns of a head's state that are stored and computed together */
};

struct ssm_kernels {
    /* y[c] = sum_i x[i][c] * w[i*stride + c] + bias[c], i < taps, c < n; then silu if asked. bias may be NULL; y may be
     * x[taps - 1]. */
    void (*conv)(const float *const *x, const float *w, size_t stride, int taps, const float *bias,
                 bool silu, int n, float *y);
    /*
     * One row through `width` columns of a state (N, width):
     *   to = from * decay + b (dt * x)^T; o = to^T c + skip * x.
     * from NULL: zeros.
     */
    void (*step)(const float *from, float *to, const float *b, const float *c, const float *x,
                 float decay, float dt, float skip, int N, int width, float *o);
    /*
     * One row through `width` channels of a selective scan, whose states are (N, width):
     *   to = from * 2^(decay * dt) + b * dt x; o = to . c + skip * x. from NULL: zeros. decay: (N, width). o may be dt.
     */
    void (*scan)(const float *from, float *to, const float *decay, const float *b, const float *c,
                 const float *x, const float *dt, const float *skip, int N, int width, float *o);
    /* o *= silu(z), or sigmoid(z) */
    void (*gate)(float *o, const float *z, bool sigmoid, int n);
    /* o = o / sqrt(mean(o^2) + eps) * gain; gain may be NULL */
    void (*norm)(float *o, const float *gain, float eps, int n);
    /* y = a * b */
    void (*multiply)(float *y, const float *a, const float *b, int n);
};

extern const struct ssm_kernels ssm_kernels_c, ssm_kernels_avx2, ssm_kernels_avx512,
    ssm_kernels_neon;

/* The best kernels that isa supports. */
static inline const struct ssm_kernels *ssm_kernels(enum isa isa)
{
#ifdef __x86_64__
    if (isa_has(isa, ISA_AVX512))
        return &ssm_kernels_avx512;
    if (isa_has(isa, ISA_AVX2))
        return &ssm_kernels_avx2;
#elif defined __aarch64__
    if (isa_has(isa, ISA_NEON))
        return &ssm_kernels_neon;
#endif
    (void)isa;
    return &ssm_kernels_c;
}

#endif
