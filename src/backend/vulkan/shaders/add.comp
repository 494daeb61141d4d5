#version 460
/* The end of a block, x = sum(x + scale * out(y)), and the norm that reads it. One workgroup per row. */
#include "common.glsl"
#include "norms.glsl"

layout(push_constant) uniform Push { add_args p; };

void main()
{
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        Floats x = floats(p.x, uint64_t(r) * p.ldx), y = floats(p.y, uint64_t(r) * p.ldy);
        vec2 stats = norm_stats(y, p.width, p.out_kind, p.out_eps);
        for (uint i = TID; i < p.width; i += THREADS)
            x.v[i] += p.scale * norm_value(y.v[i], stats, i, p.out_kind, p.out_gain, p.out_bias);
        if (p.sum_kind != KIND_NONE) {
            stats = norm_stats(x, p.width, p.sum_kind, p.sum_eps);
            for (uint i = TID; i < p.width; i += THREADS)
                x.v[i] = norm_value(x.v[i], stats, i, p.sum_kind, p.sum_gain, p.sum_bias);
        }
        if (p.n == 0)
            continue;
        stats = norm_stats(x, p.width, p.in_kind, p.in_eps);
        for (uint i = TID; i < p.width; i += THREADS)
            floats(p.n, uint64_t(r) * p.ldn).v[i] =
                norm_value(x.v[i], stats, i, p.in_kind, p.in_gain, p.in_bias);
    }
}
