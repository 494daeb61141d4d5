#version 460
/* Rows in place: times a scale, times sigmoid(gate of the row), softcapped, plus y. */
#include "common.glsl"

layout(push_constant) uniform Push { scale_args p; };

void main()
{
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        float f = p.scale * (p.gate != 0 ? sigmoid(Floats(p.gate).v[r]) : 1);
        for (uint i = gl_WorkGroupID.x * THREADS + TID; i < p.width; i += gl_NumWorkGroups.x * THREADS) {
            Floats x = floats(p.x, uint64_t(r) * p.ldx);
            float v = f * x.v[i];
            if (p.softcap != 0)
                v = p.softcap * tanh_of(v / p.softcap);
            if (p.y != 0)
                v += floats(p.y, uint64_t(r) * p.ldy).v[i];
            x.v[i] = v;
        }
    }
}
