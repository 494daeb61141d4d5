#version 460
/* The end of a recurrent mixer: a norm over each part of a row, and the gate silu(z) or sigmoid(z) before or after it. */
#include "common.glsl"
#include "norms.glsl"

layout(push_constant) uniform Push { gnorm_args p; };

float gate_of(float z)
{
    return p.plain_gate != 0 ? sigmoid(z) : z * sigmoid(z);
}

void main()
{
    uint part = gl_WorkGroupID.x;
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        Floats o = floats(p.o, uint64_t(r) * p.ldo + part * p.width);
        Floats z = floats(p.z, uint64_t(r) * p.ldz + part * p.width);
        for (uint i = TID; p.first == 0 && i < p.width; i += THREADS)
            o.v[i] *= gate_of(z.v[i]);
        /* norm_stats reads the values that this invocation wrote */
        vec2 stats = norm_stats(o, p.width, p.kind, p.eps);
        uint64_t gain = p.gain != 0 ? p.gain + 4 * part * p.gain_stride : 0;
        for (uint i = TID; i < p.width; i += THREADS) {
            float v = norm_value(o.v[i], stats, i, p.kind, gain, p.bias);
            o.v[i] = p.first != 0 ? v * gate_of(z.v[i]) : v;
        }
    }
}
