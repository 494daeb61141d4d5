#version 460
/* Joins the sums of a row and head over the splits of its keys. */
#include "common.glsl"
#include "kv.glsl"

layout(push_constant) uniform Push { attn_args p; };
#include "attn_out.glsl"

void main()
{
    Ints step = Ints(p.step);
    uint h = gl_WorkGroupID.x, n_rows = uint(step.v[STEP_ROWS]), each = p.v_dim + 2;
    for (uint t = gl_WorkGroupID.y; t < n_rows; t += gl_NumWorkGroups.y) {
        bool padding = step.v[step.v[STEP_SLOT] + t] < 0;
        Floats from = floats(p.parts, (uint64_t(t) * p.n_heads + h) * p.splits * each);
        float top = -1.0 / 0.0, total = 0;
        for (uint s = 0; s < p.splits; s++)
            top = max(top, from.v[s * each + p.v_dim]);
        for (uint s = 0; s < p.splits; s++)
            total += from.v[s * each + p.v_dim + 1] * exp(from.v[s * each + p.v_dim] - top);
        barrier();
        for (uint i = TID; i < p.v_dim && !padding; i += THREADS) {
            float sum = 0;
            for (uint s = 0; s < p.splits; s++)
                sum += from.v[s * each + i] * exp(from.v[s * each + p.v_dim] - top);
            q[i] = sum;
        }
        barrier();
        attn_out(t, h, padding, total);
    }
}
