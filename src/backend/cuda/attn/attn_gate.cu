/*
 * The gate of attention's result that has a matrix of its own (struct attention.wgate): a *= f(g). Mapping: a thread has
 * four elements of a head. Limit: bytes.
 */
#include "backend/cuda/attn/attn_layer.h"

#include <math.h>

enum { GATE_THREADS = 256 };

DEVICE float gate_of(float g, bool softplus)
{
    if (softplus)
        return g > 20.0f ? g : log1pf(expf(g));
    return 1.0f / (1.0f + expf(-g));
}

/* Grid: (blocks of 4 GATE_THREADS elements of a row, rows). */
static __global__ void __launch_bounds__(GATE_THREADS)
    attn_gate_kernel(float *a, const float *g, int n_heads, int v_dim, int width, bool softplus)
{
    dependency_wait();
    dependency_trigger();
    int i = (int)(blockIdx.x * GATE_THREADS + threadIdx.x) * 4, n = n_heads * v_dim;
    size_t t = blockIdx.y;
    if (i >= n)
        return;
    float *to = a + t * (size_t)n + (size_t)i;
    const float *from = g + t * (size_t)width;
    float v[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (i + k < n)
            v[k] = to[k] * gate_of(from[width == n ? i + k : (i + k) / v_dim], softplus);
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (i + k < n)
            to[k] = v[k];
}

void attn_gate(struct cuda_backend *cu, float *a, const float *g, int rows, int n_heads, int v_dim,
               int width, bool softplus)
{
    dim3 grid((unsigned)ceil_div(n_heads * v_dim, 4 * GATE_THREADS), (unsigned)rows);
    if (rows)
        cuda_launch(cu, attn_gate_kernel, grid, GATE_THREADS, 0, LAUNCH_EARLY, a, g, n_heads, v_dim,
                    width, softplus);
}
