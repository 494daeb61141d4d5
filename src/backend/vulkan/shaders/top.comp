#version 460
/* Gaussian top-k: g = max(g - mean(g) - sparsity * std(g), 0) over a row. One workgroup per row. */
#include "common.glsl"

layout(push_constant) uniform Push { top_args p; };

void main()
{
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        Floats g = floats(p.g, uint64_t(r) * p.ld);
        float mean = 0, var = 0;
        for (uint i = TID; i < p.width; i += THREADS)
            mean += g.v[i];
        mean = group_sum(mean) / float(p.width);
        for (uint i = TID; i < p.width; i += THREADS)
            var += (g.v[i] - mean) * (g.v[i] - mean);
        float cut = mean + p.sparsity * sqrt(group_sum(var) / float(p.width));
        for (uint i = TID; i < p.width; i += THREADS)
            g.v[i] = max(g.v[i] - cut, 0);
    }
}
