#version 460
/*
 * The recurrence of a selective scan, one invocation per channel and sequence, which keeps the channel's state in registers.
 * Rows are [x z], those of `low` [dt b c]; `to` has dt of each channel before and the result after.
 */
#include "common.glsl"
#include "state.glsl"

layout(push_constant) uniform Push { scan_args p; };

void save(uint i, int slot)
{
    Floats s = floats(p.state, uint64_t(slot) * p.state_len + i * p.state_dim);
    for (uint n = 0; n < DEPTH; n++)
        if (n < p.state_dim)
            s.v[n] = column[n];
}

void main()
{
    Ints step = Ints(p.step);
    uint i = gl_WorkGroupID.x * THREADS + TID, seq = gl_WorkGroupID.y;
    if (i >= p.n_channels)
        return;
    int first = step.v[step.v[STEP_Q_START] + seq], end = step.v[step.v[STEP_Q_START] + seq + 1];
    int slot = step.v[step.v[STEP_STATE_OUT] + seq], from = step.v[step.v[STEP_STATE_IN] + seq];
    int save_rows = step.v[step.v[STEP_SAVE_ROWS] + seq];
    float decay[DEPTH], skip = Floats(p.skip).v[i];
    for (uint n = 0; n < DEPTH; n++) {
        bool has = n < p.state_dim;
        decay[n] = has ? floats(p.decay, i * p.state_dim).v[n] : 0;
        column[n] = has && from >= 0 ? floats(p.state, uint64_t(from) * p.state_len + i * p.state_dim).v[n] : 0;
    }
    for (int t = first; t < end; t++) {
        Floats to = floats(p.to, uint64_t(t) * p.ld_to), row = floats(p.row, uint64_t(t) * p.ld);
        if (slot < 0) { /* padding */
            to.v[i] = 0;
            continue;
        }
        Floats b = floats(p.low, uint64_t(t) * p.ld_low + p.dt_rank), c = Floats(uint64_t(b) + 4 * p.state_dim);
        float dt = softplus(to.v[i]), x = row.v[i], z = row.v[p.n_channels + i], sum = 0;
        for (uint n = 0; n < DEPTH; n++)
            if (n < p.state_dim) {
                column[n] = column[n] * exp(-decay[n] * dt) + b.v[n] * (dt * x);
                sum += column[n] * c.v[n];
            }
        to.v[i] = (sum + skip * x) * z * sigmoid(z);
        if (t - first + 1 == save_rows)
            save(i, step.v[step.v[STEP_SAVE_STATE] + seq]);
    }
    if (slot >= 0)
        save(i, slot);
}
