#version 460
/* y = norm(x), one workgroup per row; y may be x. */
#include "common.glsl"
#include "norms.glsl"

layout(push_constant) uniform Push { norm_args p; };

void main()
{
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        Floats x = floats(p.x, uint64_t(r) * p.ldx), y = floats(p.y, uint64_t(r) * p.ldy);
        vec2 stats = norm_stats(x, p.width, p.kind, p.eps);
        for (uint i = TID; i < p.width; i += THREADS)
            y.v[i] = norm_value(x.v[i], stats, i, p.kind, p.gain, p.bias);
    }
}
