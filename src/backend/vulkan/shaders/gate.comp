#version 460
/* An output gate of attention with a matrix of its own: a *= sigmoid(g) or ln(1 + exp(g)). */
#include "common.glsl"

layout(push_constant) uniform Push { gate_args p; };

void main()
{
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y)
        for (uint i = gl_WorkGroupID.x * THREADS + TID; i < p.width; i += gl_NumWorkGroups.x * THREADS) {
            float g = floats(p.g, uint64_t(r) * p.ldg).v[i / p.each];
            float f = p.softplus == 0 ? sigmoid(g) : max(g, 0) + log(1 + exp(-abs(g)));
            floats(p.a, uint64_t(r) * p.lda).v[i] *= f;
        }
}
