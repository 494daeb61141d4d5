#version 460
/* Rows of `from` in the order of a list of the step block; index 0: in their own order. */
#include "common.glsl"

layout(push_constant) uniform Push { gather_args p; };

void main()
{
    Ints step = Ints(p.step);
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        uint at = p.index != 0 ? uint(step.v[step.v[p.index] + r]) : r;
        for (uint i = gl_WorkGroupID.x * THREADS + TID; i < p.width; i += gl_NumWorkGroups.x * THREADS)
            floats(p.to, uint64_t(r) * p.ld_to).v[i] = floats(p.from, uint64_t(at) * p.ld_from).v[i];
    }
}
