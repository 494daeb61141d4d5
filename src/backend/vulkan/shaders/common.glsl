/* Shared by all kernels: pointers, the workgroup, reductions. */
#extension GL_EXT_buffer_reference : require
#extension GL_EXT_shader_explicit_arithmetic_types_int64 : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_arithmetic : require
#extension GL_EXT_control_flow_attributes : enable
#include "args.h"

layout(buffer_reference, std430, buffer_reference_align = 4) buffer Words { uint v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Ints { int v[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) buffer Floats { float v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Vectors { vec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer Quads { uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer Pairs { uvec2 v[]; };

/* Workgroups have 128 invocations, which every device allows. Those of WIDE kernels have more where the device allows it,
 * and kernels that name their number run on other devices not at all. */
#ifdef WIDE
layout(local_size_x_id = 2) in;
#define THREADS gl_WorkGroupSize.x
#else
#ifndef THREADS
#define THREADS 128
#endif
layout(local_size_x = THREADS) in;
#endif
#define TID gl_LocalInvocationID.x

/* The workgroup's number, however its grid is folded. */
uint group_id()
{
    return gl_WorkGroupID.x + gl_WorkGroupID.y * gl_NumWorkGroups.x;
}

Floats floats(uint64_t base, uint64_t at)
{
    return Floats(base + 4 * at);
}

/* Subgroups have 4 invocations or more, workgroups at most 256. */
shared float reduce_part[64];

/* The sum over the workgroup, on all its invocations. */
float group_sum(float x)
{
    x = subgroupAdd(x);
    barrier();
    if (subgroupElect())
        reduce_part[gl_SubgroupID] = x;
    barrier();
    float sum = 0;
    for (uint i = 0; i < gl_NumSubgroups; i++)
        sum += reduce_part[i];
    return sum;
}

float group_max(float x)
{
    x = subgroupMax(x);
    barrier();
    if (subgroupElect())
        reduce_part[gl_SubgroupID] = x;
    barrier();
    float best = reduce_part[0];
    for (uint i = 1; i < gl_NumSubgroups; i++)
        best = max(best, reduce_part[i]);
    return best;
}

/* fp16 bits of x, rounded to nearest even: packHalf2x16 may round otherwise. */
uint half_bits(float x)
{
    uint u = floatBitsToUint(x), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return sign | 0x7e00u | (a >> 13 & 0x1ffu);
    if (a >= 0x477ff000u)
        return sign | 0x7c00u;
    if (a < 0x38800000u) /* the result is subnormal */
        return sign | (floatBitsToUint(uintBitsToFloat(a) + 0.5) - 0x3f000000u);
    a += 0xfffu + (a >> 13 & 1u);
    return sign | (a - 0x38000000u) >> 13;
}

float half_value(uint h)
{
    uint sign = (h & 0x8000u) << 16, e = h >> 10 & 31u, m = h & 1023u;
    if (e == 31u)
        return uintBitsToFloat(sign | 0x7f800000u | m << 13);
    if (e != 0u)
        return uintBitsToFloat(sign | (e + 112u) << 23 | m << 13);
    float f = float(m) * 5.9604644775390625e-8;
    return sign != 0u ? -f : f;
}

uint bf16_bits(float x)
{
    uint u = floatBitsToUint(x);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return u >> 16 | 64u;
    return (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}

float f8_value(uint b)
{
    uint e = b >> 3 & 15u, m = b & 7u, sign = (b & 0x80u) << 24;
    if ((b & 0x7fu) == 0x7fu)
        return uintBitsToFloat(sign | 0x7fc00000u);
    if (e != 0u)
        return uintBitsToFloat(sign | (e + 120u) << 23 | m << 20);
    float f = float(m) * 0.001953125;
    return sign != 0u ? -f : f;
}

/* exp whose argument may be far below zero; tanh and sigmoid that never overflow */
float sigmoid(float x)
{
    float e = exp(-abs(x));
    return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}

float tanh_of(float x)
{
    float e = exp(-2 * abs(x));
    float t = (1 - e) / (1 + e);
    /* near zero 1 - e cancels */
    if (abs(x) < 0.01)
        t = abs(x) * (1 - x * x / 3);
    return x >= 0 ? t : -t;
}
