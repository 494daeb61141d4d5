#version 460
/* to[r] = from[r], bounded */
#include "common.glsl"

layout(push_constant) uniform Push { clip_args p; };

void main()
{
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y)
        for (uint i = gl_WorkGroupID.x * THREADS + TID; i < p.width; i += gl_NumWorkGroups.x * THREADS)
            floats(p.to, uint64_t(r) * p.ld_to).v[i] =
                clamp(floats(p.from, uint64_t(r) * p.ld_from).v[i], p.least, p.most);
}
