#version 460
/* y is scaled to the magnitude of x, sqrt(max(mean(x^2), 1e-5)), in place, or added so to `sum`. One workgroup per row. */
#include "common.glsl"

layout(push_constant) uniform Push { level_args p; };

float magnitude(Floats x)
{
    float sum = 0;
    for (uint e = TID; e < p.width; e += THREADS)
        sum += x.v[e] * x.v[e];
    return sqrt(max(group_sum(sum) / float(p.width), 1e-5));
}

void main()
{
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        uint64_t at = uint64_t(r) * p.ld;
        Floats x = floats(p.x, at), y = floats(p.y, at);
        float f = magnitude(x) / magnitude(y);
        for (uint e = TID; e < p.width; e += THREADS)
            if (p.sum != 0)
                floats(p.sum, at).v[e] += f * y.v[e];
            else
                y.v[e] *= f;
    }
}
