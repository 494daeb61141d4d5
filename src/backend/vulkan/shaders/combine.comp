#version 460
/* The weighted sum of a row's experts, in the order of their choice. */
#include "common.glsl"

layout(push_constant) uniform Push { combine_args p; };

void main()
{
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y)
        for (uint i = gl_WorkGroupID.x * THREADS + TID; i < p.width; i += gl_NumWorkGroups.x * THREADS) {
            float sum = 0;
            for (uint k = 0; k < p.n_used; k++) {
                uint at = r * p.n_used + k;
                uint e = Words(p.chosen).v[at];
                float w = Floats(p.weights).v[at];
                if (e >= p.n_real)
                    sum += w * floats(p.x, uint64_t(r) * p.ldx).v[i];
                if (e >= p.n_real || e - p.expert_first >= p.n_own)
                    continue; /* another process has it */
                sum += (p.weigh != 0 ? w : 1) * floats(p.part, uint64_t(at) * p.ldp).v[i];
            }
            floats(p.y, uint64_t(r) * p.ldy).v[i] = sum;
        }
}
