#version 460
/* Inputs of experts that are weighted: to[r * n_used + k] = weights[r][k] * x[r]. */
#include "common.glsl"

layout(push_constant) uniform Push { spread_args p; };

void main()
{
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        float w = Floats(p.weights).v[r];
        for (uint i = gl_WorkGroupID.x * THREADS + TID; i < p.width; i += gl_NumWorkGroups.x * THREADS)
            floats(p.to, uint64_t(r) * p.ld).v[i] = w * floats(p.x, uint64_t(r / p.n_used) * p.ld).v[i];
    }
}
