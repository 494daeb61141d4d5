#version 460
/* The recurrence of a state-space model, one workgroup per head, sequence and 128 of the head's values. */
#include "common.glsl"
#include "state.glsl"

layout(push_constant) uniform Push { ssm_args p; };

shared float b[DEPTH];
shared float c[DEPTH];

void main()
{
    Ints step = Ints(p.step);
    uint h = gl_WorkGroupID.x, seq = gl_WorkGroupID.y, j = gl_WorkGroupID.z * THREADS + TID;
    uint values = p.n_heads * p.head_dim, group = h * p.n_groups / p.n_heads;
    int first = step.v[step.v[STEP_Q_START] + seq], end = step.v[step.v[STEP_Q_START] + seq + 1];
    int slot = step.v[step.v[STEP_STATE_OUT] + seq], save_rows = step.v[step.v[STEP_SAVE_ROWS] + seq];
    uint64_t state = p.state + 4 * uint64_t(h) * p.state_dim * p.head_dim;
    if (slot < 0) { /* padding */
        for (int t = first; t < end && j < p.head_dim; t++)
            floats(p.to, uint64_t(t) * p.ld_to + h * p.head_dim).v[j] = 0;
        return;
    }
    state_load(state, step.v[step.v[STEP_STATE_IN] + seq], p.state_len, p.state_dim, p.head_dim, j);
    for (int t = first; t < end; t++) {
        Floats x = floats(p.row, uint64_t(t) * p.ld + values); /* after z */
        barrier();
        for (uint i = TID; i < DEPTH; i += THREADS) {
            uint at = values + group * p.state_dim + i;
            b[i] = i < p.state_dim ? x.v[at] : 0;
            c[i] = i < p.state_dim ? x.v[at + p.n_groups * p.state_dim] : 0;
        }
        barrier();
        float dt = 1;
        if (p.dt_bias != 0)
            dt = softplus(x.v[values + 2 * p.n_groups * p.state_dim + h] + Floats(p.dt_bias).v[h]);
        dt = max(dt, p.dt_min);
        if (p.dt_max != 0)
            dt = min(dt, p.dt_max);
        float keep = exp(-Floats(p.decay).v[h] * dt);
        float v = j < p.head_dim ? x.v[h * p.head_dim + j] : 0, sum = 0;
        for (uint i = 0; i < DEPTH; i++) {
            column[i] = column[i] * keep + b[i] * (dt * v);
            sum += column[i] * c[i];
        }
        if (j < p.head_dim)
            floats(p.to, uint64_t(t) * p.ld_to + h * p.head_dim).v[j] =
                sum + (p.skip != 0 ? Floats(p.skip).v[h] * v : 0);
        if (t - first + 1 == save_rows)
            state_store(state, step.v[step.v[STEP_SAVE_STATE] + seq], p.state_len, p.state_dim,
                        p.head_dim, j);
    }
    state_store(state, slot, p.state_len, p.state_dim, p.head_dim, j);
}
