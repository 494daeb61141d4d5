/*
 * h = act(gate, up): the activation of a feed-forward, one function for every kernel's epilogue.
 * The kernel's arguments say which activation it is, so all threads branch alike.
 */
#ifndef STEEL_BACKEND_CUDA_ACT_CUH
#define STEEL_BACKEND_CUDA_ACT_CUH

#include "backend/cuda/core/cuda.h"

#include <math.h>

/* erf(x) with an error below 5e-7 (Abramowitz and Stegun, 7.1.26, in floats). No branch: the
 * epilogue of a product of a few hundred columns computes it for every result. */
DEVICE float erf_near(float x)
{
    float z = fabsf(x), t = fast_divide(1.0f, 1.0f + 0.3275911f * z);
    float y =
        t * (0.254829592f +
             t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    return copysignf(1.0f - y * fast_exp(-z * z), x);
}

DEVICE float gated(const struct gating &a, float gate, float up)
{
    if (a.plain)
        return silu(gate) * up;
    if (a.erf)
        return 0.5f * gate * (1.0f + erf_near(gate * 0.70710678f)) * up;
    float g = fminf(gate, a.limit), u = fminf(fmaxf(up, -a.limit), a.limit) + a.offset;
    return fast_divide(g, 1.0f + fast_exp(-g * (a.linear + a.cubic * g * g))) * u;
}
/* PLAIN: the activation is known to be SwiGLU. */
template <bool PLAIN> DEVICE float gated_as(const struct gating &a, float gate, float up)
{
    return PLAIN ? silu(gate) * up : gated(a, gate, up);
}

#endif
