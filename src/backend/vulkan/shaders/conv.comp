#version 460
/*
 * The convolution over the last W rows of each channel, one invocation per channel and sequence: u = silu(conv(u) + bias)
 * in place; or of a short convolution, whose rows are [b c x]: to = c * (conv(b * x) + bias).
 */
#include "common.glsl"

layout(push_constant) uniform Push { conv_args p; };

const uint MAX_LEN = 8;

void main()
{
    Ints step = Ints(p.step);
    uint c = gl_WorkGroupID.x * THREADS + TID;
    if (c >= p.width)
        return;
    for (uint seq = gl_WorkGroupID.y; seq < p.n_seqs; seq += gl_NumWorkGroups.y) {
        int first = step.v[step.v[STEP_Q_START] + seq], end = step.v[step.v[STEP_Q_START] + seq + 1];
        int slot_in = step.v[step.v[STEP_STATE_IN] + seq], slot = step.v[step.v[STEP_STATE_OUT] + seq];
        int save_rows = step.v[step.v[STEP_SAVE_ROWS] + seq];
        float past[MAX_LEN], w[MAX_LEN];
        uint n = p.conv_len - 1;
        for (uint i = 0; i < p.conv_len; i++)
            w[i] = p.conv != 0 ? Floats(p.conv).v[c * p.conv_len + i] : 1; /* without one, conv_len is 1 */
        for (uint i = 0; i < n; i++)
            past[i] = slot < 0 || slot_in < 0
                          ? 0
                          : floats(p.state, uint64_t(slot_in) * p.state_len + i * p.width).v[c];
        float bias = p.bias != 0 ? Floats(p.bias).v[c] : 0;
        for (int t = first; t < end; t++) {
            Floats u = floats(p.u, uint64_t(t) * p.ld);
            float now = p.is_short != 0 ? u.v[c] * u.v[2 * p.width + c] : u.v[c];
            float sum = w[n] * now + bias;
            for (uint i = 0; i < n; i++)
                sum += w[i] * past[i];
            for (uint i = 0; i + 1 < n; i++)
                past[i] = past[i + 1];
            if (n > 0)
                past[n - 1] = now;
            if (p.is_short != 0)
                floats(p.to, uint64_t(t) * p.ld_to).v[c] = slot < 0 ? 0 : u.v[p.width + c] * sum;
            else
                u.v[c] = sum * sigmoid(sum);
            if (slot >= 0 && t - first + 1 == save_rows)
                for (uint i = 0; i < n; i++)
                    floats(p.state, uint64_t(step.v[step.v[STEP_SAVE_STATE] + seq]) * p.state_len +
                                        i * p.width).v[c] = past[i];
        }
        for (uint i = 0; slot >= 0 && i < n; i++)
            floats(p.state, uint64_t(slot) * p.state_len + i * p.width).v[c] = past[i];
    }
}
