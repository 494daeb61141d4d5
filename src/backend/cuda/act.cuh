/*
 * What becomes of gate and up in a feed-forward: one function for every kernel's epilogue. Which
 * activation it is stands in the kernel's arguments, so that the choice is the same for all threads.
 */
#ifndef STEEL_BACKEND_CUDA_ACT_CUH
#define STEEL_BACKEND_CUDA_ACT_CUH

#include "backend/cuda/cuda.h"

#include <math.h>

DEVICE float gated(const struct gating &a, float gate, float up)
{
    if (a.plain)
        return silu(gate) * up;
    if (a.erf)
        return 0.5f * gate * (1.0f + erff(gate * 0.70710678f)) * up;
    float g = fminf(gate, a.limit), u = fminf(fmaxf(up, -a.limit), a.limit) + a.offset;
    return fast_divide(g, 1.0f + fast_exp(-g * (a.linear + a.cubic * g * g))) * u;
}

#endif
