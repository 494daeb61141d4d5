/*
 * Hidden units from gate and up as floats (apart.cu): activation, top-k, norm, and conversion to fp16.
 * Mapping: one block per row, whose threads keep their columns over all passes; without a pass that needs the whole row,
 * more blocks share it. Limit: bytes.
 */
#include "backend/cuda/gemm/gemm.cuh"
#include "backend/cuda/moe/apart.cuh"

#include <math.h>

enum { UNITS_THREADS = 512 };

DEVICE float units_act(const struct apart_units &p, float g, float u)
{
    if (p.kind == APART_RELU2) {
        g = fmaxf(g, 0.0f);
        return g * g * u;
    }
    if (p.kind == APART_XIELU)
        return p.beta * g + (g > 0.0f ? p.alpha * g * g : p.limit * (expm1f(g) - g));
    if (p.kind == APART_SILU_LIMIT)
        return fminf(silu(g), p.limit) * fminf(fmaxf(u, -p.limit), p.limit);
    return gated(p.act, g, u);
}

/* A sum and a maximum over the threads of a block; every thread gets both. part: (2, 32) */
DEVICE float2 units_reduce(float sum, float most, float *part)
{
    int warps = UNITS_THREADS / 32, lane = lane_id();
    sum = warp_sum(sum);
    most = warp_max(most);
    __syncthreads(); /* part is free */
    if (lane == 0) {
        part[warp_id()] = sum;
        part[32 + warp_id()] = most;
    }
    __syncthreads();
    return make_float2(warp_sum(lane < warps ? part[lane] : 0.0f),
                       warp_max(lane < warps ? part[32 + lane] : 0.0f));
}

/* The cut below which a row's gates count as 0: mean + sparsity * standard deviation. */
DEVICE float units_cut(const struct apart_units &p, const float *g, float by, float *part)
{
    float sum = 0.0f, squares = 0.0f;
    for (int i = (int)threadIdx.x; i < p.width; i += UNITS_THREADS)
        sum += by * g[i];
    float mean = units_reduce(sum, 0.0f, part).x / (float)p.width;
    for (int i = (int)threadIdx.x; i < p.width; i += UNITS_THREADS)
        squares += (by * g[i] - mean) * (by * g[i] - mean);
    return mean + p.sparsity * sqrtf(units_reduce(squares, 0.0f, part).x / (float)p.width);
}

/* Grid: (n, parts of a row; 1 where a pass needs the whole row). */
static __global__ void __launch_bounds__(UNITS_THREADS)
    apart_units_kernel(const __grid_constant__ struct apart_units p)
{
    __shared__ float part[64];
    dependency_wait();
    dependency_trigger();
    int row = (int)blockIdx.x, pair = p.pairs ? p.pairs[row] : row;
    if (pair < 0)
        return;
    float *raw = p.raw + (size_t)row * (size_t)(p.act.ungated ? p.width : 2 * p.width);
    float *to = p.hidden ? p.hidden + (size_t)row * (size_t)p.width : raw;
    float by = p.weight ? p.weight[pair] : 1.0f, squares = 0.0f, top = 0.0f;
    float cut = p.sparse ? units_cut(p, raw, by, part) : 0.0f;
    int first = (int)(blockIdx.y * UNITS_THREADS + threadIdx.x);
    int step = (int)gridDim.y * UNITS_THREADS;
#pragma unroll 4
    for (int i = first; i < p.width; i += step) {
        float g = by * raw[i], u = p.act.ungated ? 1.0f : by * raw[p.width + i];
        g = p.sparse ? fmaxf(g - cut, 0.0f) : g;
        float h = units_act(p, g, u);
        to[i] = h;
        squares += h * h;
        top = fmaxf(top, fabsf(p.mid.gain ? h * p.mid.gain[i] : h));
    }
    if (!p.mid.gain && !p.fp16)
        return;
    float2 r = units_reduce(squares, top, part);
    float rms = p.mid.gain ? rsqrtf(r.x / (float)p.width + p.mid.eps) : 1.0f;
    for (int i = first; i < p.width && p.mid.gain; i += step) /* a thread's own columns */
        to[i] *= rms * p.mid.gain[i];
    if (!p.fp16)
        return;
    /* Scaled by a power of two so that the largest value is about 1024, as in residual.cu. */
    uint32_t e = bits_of(r.y * rms) >> 23;
    e = e < 16 ? 16 : e;
    float f = float_of((264 - e) << 23);
    uint16_t *fp16 = p.fp16 + (size_t)row * (size_t)p.padded;
    for (int i = first; i < p.padded; i += step)
        fp16[fragment_slot(i)] = i < p.width ? float_to_half(to[i] * f) : 0;
    if (first == 0)
        p.scale[row] = float_of((e - 10) << 23);
}

static __global__ void __launch_bounds__(256) apart_ones_kernel(float *weight, int n)
{
    dependency_wait();
    dependency_trigger();
    int i = (int)(blockIdx.x * 256 + threadIdx.x);
    if (i < n && weight[i] != 0.0f)
        weight[i] = 1.0f;
}

/* Host */

void apart_units(struct cuda_backend *cu, const struct apart_units &p, int n)
{
    bool whole = p.sparse || p.mid.gain || p.fp16;
    dim3 grid((unsigned)n, whole ? 1u : (unsigned)ceil_div(p.width, 4 * UNITS_THREADS));
    cuda_launch(cu, apart_units_kernel, grid, UNITS_THREADS, 0, LAUNCH_EARLY, p);
}

void apart_ones(struct cuda_backend *cu, float *weight, int n)
{
    cuda_launch(cu, apart_ones_kernel, dim3((unsigned)ceil_div(n, 256)), 256, 0, LAUNCH_EARLY,
                weight, n);
}
