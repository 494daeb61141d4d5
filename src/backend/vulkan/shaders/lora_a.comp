#version 460
/* t[r][u][k] = A[k] . x[r / x_div], for the adapters of each row. Grid: (rank, rows, uses). */
#include "lora.glsl"

void main()
{
    uint k = gl_WorkGroupID.x, u = gl_WorkGroupID.z;
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        change c = change_of(r, u);
        if (c.at == 0 || k >= c.of.v[0])
            continue;
        Floats a = floats(c.at, uint64_t(c.of.v[2]) + uint64_t(k) * p.n_in);
        Floats x = floats(p.x, uint64_t(r / p.x_div) * p.ldx);
        float sum = 0;
        for (uint i = TID; i < p.n_in; i += THREADS)
            sum += a.v[i] * x.v[i];
        sum = group_sum(sum);
        if (TID == 0)
            floats(p.t, (uint64_t(r) * p.n_uses + u) * p.ldt).v[k] = sum;
    }
}
