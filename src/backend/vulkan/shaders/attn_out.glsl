/* The result of attention for a row and head: the sum of values in q becomes their mean, rotated back and gated. */
#include "bytes.glsl"

const uint MAX_DIM = 1024;
shared float q[MAX_DIM];

void turn(uint dim)
{
    uint run = turn_run(dim);
    for (uint half_run = 1; half_run < run; half_run *= 2) {
        barrier();
        for (uint i = TID; i < dim / 2; i += THREADS) {
            uint at = i / half_run * 2 * half_run + i % half_run;
            float a = q[at], b = q[at + half_run];
            q[at] = a + b;
            q[at + half_run] = a - b;
        }
    }
    barrier();
    for (uint i = TID; i < dim; i += THREADS)
        q[i] *= 1 / sqrt(float(run));
    barrier();
}

void attn_out(uint t, uint h, bool padding, float total)
{
    for (uint i = TID; i < p.v_dim && !padding; i += THREADS)
        q[i] /= total;
    barrier();
    if ((p.flags & ATTN_TURN) != 0 && !padding)
        turn(p.v_dim);
    Floats to = floats(p.a, uint64_t(t) * p.lda + h * p.v_dim);
    for (uint i = TID; i < p.v_dim; i += THREADS) {
        float v = padding ? 0 : q[i];
        if (p.gate != 0)
            v *= sigmoid(floats(p.gate, uint64_t(t) * p.ld_gate + h * p.gate_stride).v[i]);
        to.v[i] = v;
        if (p.bytes != 0)
            q[i] = v;
    }
    if (p.bytes == 0 || (p.flags & ATTN_CHOSEN) != 0)
        return;
    barrier();
    uint units = p.v_dim / 16;
    for (uint u = TID; u < units; u += THREADS) {
        sixteen x;
        for (uint i = 0; i < 4; i++)
            x.v[i] = vec4(q[16 * u + 4 * i], q[16 * u + 4 * i + 1], q[16 * u + 4 * i + 2], q[16 * u + 4 * i + 3]);
        put_bytes(p.bytes, (uint64_t(t) * p.n_heads + h) * units + u, x);
    }
}
