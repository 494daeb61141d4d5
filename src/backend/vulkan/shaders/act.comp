#version 460
/* Activations: h[i] = act(h[i], h[width + i]). With `bytes` an invocation computes 16 values. */
#include "common.glsl"
#include "act.glsl"
#include "bytes.glsl"

layout(push_constant) uniform Push { act_args p; };

float apply(float g, float u)
{
    return activation_of(g, u, p.act, p.alpha, p.limit, p.beta);
}

void whole_units()
{
    uint units = p.width / 16;
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y)
        for (uint u = gl_WorkGroupID.x * THREADS + TID; u < units; u += gl_NumWorkGroups.x * THREADS) {
            uint64_t h = p.h + 4 * (uint64_t(r) * p.ldh + 16 * u);
            sixteen a = load_sixteen(h), b = a;
            if (p.act < KERNEL_ACT_PLAIN_RELU2)
                b = load_sixteen(h + 4 * p.width);
            for (uint i = 0; i < 4; i++)
                for (uint k = 0; k < 4; k++)
                    a.v[i][k] = apply(a.v[i][k], b.v[i][k]);
            store_sixteen(h, a);
            put_bytes(p.bytes, uint64_t(r) * units + u, a);
        }
}

void main()
{
    if (p.bytes != 0) {
        whole_units();
        return;
    }
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y)
        for (uint i = gl_WorkGroupID.x * THREADS + TID; i < p.width; i += gl_NumWorkGroups.x * THREADS) {
            Floats h = floats(p.h, uint64_t(r) * p.ldh);
            h.v[i] = apply(h.v[i], p.act < KERNEL_ACT_PLAIN_RELU2 ? h.v[p.width + i] : 0);
        }
}
