#version 460
/* Bias and penalties of a row's list. The logits before them are kept for log-probabilities. One workgroup per row. */
#include "sample.glsl"

void main()
{
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        row_sampler s = Samplers(p.samplers).v[r];
        Floats l = Floats(p.logits + 4 * uint64_t(r) * p.n_vocab);
        for (uint i = TID; i < s.n_edits; i += THREADS) {
            uint64_t at = p.edits + 4 * uint64_t(EDIT_WORDS) * (s.edits_at + i);
            uint token = Words(at).v[0];
            float v = l.v[token];
            Floats(p.raw).v[s.edits_at + i] = v;
            v += Floats(at).v[1];
            l.v[token] = (v > 0 ? divide(v, Floats(at).v[2]) : v * Floats(at).v[2]) - Floats(at).v[3];
        }
    }
}
