#version 460
/*
 * y = x W^T + bias for few rows: a workgroup computes OUTS outputs of up to ROWS rows. Its invocations read adjacent units of
 * eight values, and use each input for all its outputs. With `chosen` a row's expert is read on the device, with `cycle`
 * rows take turns with matrices (ROWS is 1 then).
 */
#include "common.glsl"
#include "formats.glsl"

layout(constant_id = 1) const uint SHAPE = 1; /* rows 1 to 8 with two outputs, then with four, then with eight */
const uint ROWS = (SHAPE - 1) % 8 + 1;
const uint OUTS = 2 << (SHAPE - 1) / 8;
layout(push_constant) uniform Push { product_args p; };

shared float part[OUTS * ROWS * (THREADS / 4)];

void main()
{
    uint o0 = group_id() * OUTS;
    if (o0 >= p.n_out)
        return;
    row_layout l = row_layout(p.tail, p.group_len, p.n_in, p.grid);
    uint units = (p.n_in + 7) / 8;
    for (uint r = gl_WorkGroupID.z * ROWS; r < p.rows; r += gl_NumWorkGroups.z * ROWS) {
        uint e = p.cycle != 0 ? r % p.cycle : 0;
        if (p.chosen != 0) {
            e = Words(p.chosen).v[r] - p.expert_first;
            if (e >= p.n_own)
                continue; /* another process has it */
        }
        uint64_t perm = p.perm != 0 ? p.perm + 4 * uint64_t(e) * p.n_in : 0;
        float sum[OUTS][ROWS];
        for (uint i = 0; i < OUTS; i++)
            for (uint j = 0; j < ROWS; j++)
                sum[i][j] = 0;
        for (uint u = TID; u < units; u += THREADS) {
            eight x[ROWS];
            for (uint j = 0; j < ROWS; j++)
                x[j] = inputs(floats(p.x, uint64_t(min(r + j, p.rows - 1) / p.x_div) * p.ldx), perm,
                              8 * u, p.n_in);
            for (uint i = 0; i < OUTS; i++) {
                uint64_t row = uint64_t(e) * p.n_out + min(o0 + i, p.n_out - 1);
                eight v = decode(Words(p.w + 4 * row * p.row_words), u, l);
                for (uint j = 0; j < ROWS; j++)
                    sum[i][j] += dot(v.a, x[j].a) + dot(v.b, x[j].b);
            }
        }
        for (uint i = 0; i < OUTS; i++)
            for (uint j = 0; j < ROWS; j++) {
                float s = subgroupAdd(sum[i][j]);
                if (subgroupElect())
                    part[(i * ROWS + j) * gl_NumSubgroups + gl_SubgroupID] = s;
            }
        barrier();
        uint o = o0 + TID / ROWS, at = r + TID % ROWS;
        if (TID < OUTS * ROWS && o < p.n_out && at < p.rows) {
            float s = p.bias != 0 ? Floats(p.bias).v[e * p.n_all_out + p.first + o] : 0;
            for (uint i = 0; i < gl_NumSubgroups; i++)
                s += part[TID * gl_NumSubgroups + i];
            floats(p.y, uint64_t(at) * p.ldy + p.first).v[o] = s;
        }
        barrier();
    }
}
