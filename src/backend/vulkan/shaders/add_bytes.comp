#version 460
/*
 * add.comp for rows of whole units of 16 values that fit registers: reads each value once. One workgroup per row. The row
 * that the norm leaves is written as floats and, with `bytes`, for integer dot products.
 */
#define WIDE
#include "common.glsl"
#include "norms.glsl"
#include "bytes.glsl"

layout(push_constant) uniform Push { add_args p; };

const uint HELD = 4; /* units of an invocation */

float sum_of(vec4 v)
{
    return v.x + v.y + v.z + v.w;
}

/* mean and factor of the row whose units are h */
vec2 stats_of(sixteen h[HELD], uint units, uint kind, float eps)
{
    if (kind != KIND_RMS && kind != KIND_LAYER)
        return vec2(0, 1);
    vec4 sum = vec4(0);
    float mean = 0;
    if (kind == KIND_LAYER) {
        for (uint k = 0; k < HELD; k++)
            for (uint i = 0; i < 4; i++)
                sum += h[k].v[i]; /* units after the row's end are zeros */
        mean = group_sum(sum_of(sum)) / float(16 * units);
        sum = vec4(0);
    }
    for (uint k = 0; k < HELD; k++)
        for (uint i = 0; i < 4 && TID + k * THREADS < units; i++)
            sum += (h[k].v[i] - mean) * (h[k].v[i] - mean);
    return vec2(mean, 1 / sqrt(group_sum(sum_of(sum)) / float(16 * units) + eps));
}

sixteen normed(sixteen h, vec2 stats, uint u, uint kind, uint64_t gain, uint64_t bias)
{
    if (kind == KIND_NONE)
        return h;
    for (uint i = 0; i < 4; i++) {
        vec4 g = gain != 0 ? Vectors(gain + 64 * u).v[i] : vec4(1), b = bias != 0 ? Vectors(bias + 64 * u).v[i] : vec4(0);
        h.v[i] = kind == KIND_AFFINE ? (h.v[i] + b) * g : (h.v[i] - stats.x) * stats.y * g + b;
    }
    return h;
}

void main()
{
    uint units = p.width / 16;
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        sixteen x[HELD], y[HELD];
        uint64_t to = p.x + 4 * uint64_t(r) * p.ldx;
        for (uint k = 0; k < HELD; k++) {
            uint u = TID + k * THREADS;
            x[k] = y[k] = sixteen(vec4[4](vec4(0), vec4(0), vec4(0), vec4(0)));
            if (u < units) {
                x[k] = load_sixteen(to + 64 * u);
                y[k] = load_sixteen(p.y + 4 * (uint64_t(r) * p.ldy + 16 * u));
            }
        }
        vec2 stats = stats_of(y, units, p.out_kind, p.out_eps);
        for (uint k = 0; k < HELD; k++) {
            uint u = TID + k * THREADS;
            if (u >= units)
                continue;
            sixteen h = normed(y[k], stats, u, p.out_kind, p.out_gain, p.out_bias);
            for (uint i = 0; i < 4; i++)
                x[k].v[i] += p.scale * h.v[i];
        }
        if (p.sum_kind != KIND_NONE) {
            stats = stats_of(x, units, p.sum_kind, p.sum_eps);
            for (uint k = 0; k < HELD; k++) {
                uint u = TID + k * THREADS;
                if (u < units)
                    x[k] = normed(x[k], stats, u, p.sum_kind, p.sum_gain, p.sum_bias);
            }
        }
        for (uint k = 0; k < HELD; k++)
            if (TID + k * THREADS < units)
                store_sixteen(to + 64 * (TID + k * THREADS), x[k]);
        if (p.n == 0)
            continue;
        stats = stats_of(x, units, p.in_kind, p.in_eps);
        for (uint k = 0; k < HELD; k++) {
            uint u = TID + k * THREADS;
            if (u >= units)
                continue;
            sixteen h = normed(x[k], stats, u, p.in_kind, p.in_gain, p.in_bias);
            store_sixteen(p.n + 4 * (uint64_t(r) * p.ldn + 16 * u), h);
            if (p.bytes != 0)
                put_bytes(p.bytes, uint64_t(r) * units + u, h);
        }
    }
}
