#version 460
/* y[r][o] += scale * B[o] . t[r][u], for the adapters of each row. Grid: (outputs, rows). */
#include "lora.glsl"

void main()
{
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y)
        for (uint u = 0; u < p.n_uses; u++) {
            change c = change_of(r, u);
            if (c.at == 0 || c.of.v[0] == 0)
                continue;
            Floats t = floats(p.t, (uint64_t(r) * p.n_uses + u) * p.ldt);
            for (uint o = gl_WorkGroupID.x * THREADS + TID; o < p.n_out; o += gl_NumWorkGroups.x * THREADS)
                for (uint part = 0; part < c.of.v[1]; part++) {
                    uint head = 3 + 5 * part, i = o - c.of.v[head], rank = c.of.v[head + 3];
                    if (o < c.of.v[head] || i >= c.of.v[head + 1])
                        continue;
                    Floats b = floats(c.at, uint64_t(c.of.v[head + 4]) + uint64_t(i) * rank);
                    float sum = 0;
                    for (uint k = 0; k < rank; k++)
                        sum += b.v[k] * t.v[c.of.v[head + 2] + k];
                    floats(p.y, uint64_t(r) * p.ldy).v[o] += c.scale * sum;
                }
        }
}
