#version 460
/* The recurrence of a gated delta net, one workgroup per v head, sequence and 128 of its columns. */
#include "common.glsl"
#include "state.glsl"

layout(push_constant) uniform Push { delta_args p; };

shared float q[DEPTH];
shared float k[DEPTH];

/* x = from / |from| * scale, with zeros after the end */
void unit(Floats from, bool is_q)
{
    float sum = 0;
    for (uint i = TID; i < p.k_dim; i += THREADS)
        sum += from.v[i] * from.v[i];
    float f = 1 / sqrt(group_sum(sum) + 1e-6) * (is_q ? 1 / sqrt(float(p.k_dim)) : 1);
    for (uint i = TID; i < DEPTH; i += THREADS) {
        float v = i < p.k_dim ? from.v[i] * f : 0;
        if (is_q)
            q[i] = v;
        else
            k[i] = v;
    }
}

void main()
{
    Ints step = Ints(p.step);
    uint h = gl_WorkGroupID.x, seq = gl_WorkGroupID.y, j = gl_WorkGroupID.z * THREADS + TID;
    uint kh = p.tiled != 0 ? h % p.n_k_heads : h * p.n_k_heads / p.n_v_heads;
    int first = step.v[step.v[STEP_Q_START] + seq], end = step.v[step.v[STEP_Q_START] + seq + 1];
    int slot = step.v[step.v[STEP_STATE_OUT] + seq], save_rows = step.v[step.v[STEP_SAVE_ROWS] + seq];
    uint64_t state = p.state + 4 * uint64_t(h) * p.k_dim * p.v_dim;
    if (slot < 0) { /* padding */
        for (int t = first; t < end && j < p.v_dim; t++)
            floats(p.to, uint64_t(t) * p.ld_to + h * p.v_dim).v[j] = 0;
        return;
    }
    state_load(state, step.v[step.v[STEP_STATE_IN] + seq], p.state_len, p.k_dim, p.v_dim, j);
    for (int t = first; t < end; t++) {
        Floats u = floats(p.u, uint64_t(t) * p.ld), ba = floats(p.ba, uint64_t(t) * p.ld_ba);
        barrier();
        unit(floats(uint64_t(u), kh * p.k_dim), true);
        unit(floats(uint64_t(u), (p.n_k_heads + kh) * p.k_dim), false);
        barrier();
        float keep = exp(-Floats(p.decay).v[h] * softplus(ba.v[p.n_v_heads + h] + Floats(p.dt_bias).v[h]));
        float seen = 0, sum = 0;
        for (uint i = 0; i < DEPTH; i++) {
            column[i] *= keep;
            seen += column[i] * k[i];
        }
        float v = j < p.v_dim ? u.v[2 * p.n_k_heads * p.k_dim + h * p.v_dim + j] : 0;
        float wrong = p.beta_scale * sigmoid(ba.v[h]) * (v - seen);
        for (uint i = 0; i < DEPTH; i++) {
            column[i] += k[i] * wrong;
            sum += column[i] * q[i];
        }
        if (j < p.v_dim)
            floats(p.to, uint64_t(t) * p.ld_to + h * p.v_dim).v[j] = sum;
        if (t - first + 1 == save_rows)
            state_store(state, step.v[step.v[STEP_SAVE_STATE] + seq], p.state_len, p.k_dim, p.v_dim, j);
    }
    state_store(state, slot, p.state_len, p.k_dim, p.v_dim, j);
}
