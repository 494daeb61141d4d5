#version 460
/* Of `each` adjacent rows of x one row of y: interleaved, or their mean. */
#include "common.glsl"

layout(push_constant) uniform Push { join_args p; };

void main()
{
    uint wide = p.mean != 0 ? p.width : p.width * p.each;
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        Floats x = floats(p.x, uint64_t(r) * p.each * p.width), y = floats(p.y, uint64_t(r) * wide);
        for (uint i = gl_WorkGroupID.x * THREADS + TID; i < wide; i += gl_NumWorkGroups.x * THREADS) {
            if (p.mean == 0) {
                y.v[i] = x.v[i % p.each * p.width + i / p.each];
                continue;
            }
            float sum = 0;
            for (uint k = 0; k < p.each; k++)
                sum += x.v[k * p.width + i];
            y.v[i] = sum / float(p.each);
        }
    }
}
