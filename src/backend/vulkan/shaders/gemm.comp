#version 460
/*
 * y = x W^T + bias for many rows: a workgroup computes a tile of 64 outputs of 64 rows. Weights and inputs of 16 columns
 * at a time lie in shared memory as floats; an invocation has 8 x 4 sums. GROUPED: the rows of a tile have one expert.
 */
#include "common.glsl"
#include "formats.glsl"

layout(push_constant) uniform Push { product_args p; };

layout(constant_id = 1) const uint GROUPED = 0;
const uint TILE = 64;
#include "tiles.glsl"

const uint DEEP = 16;
shared float ws[DEEP][TILE];
shared float xs[DEEP][TILE];

void store(uint half_unit, uint at, eight v, bool weights)
{
    for (uint i = 0; i < 8; i++) {
        float f = i < 4 ? v.a[i] : v.b[i - 4];
        if (weights)
            ws[8 * half_unit + i][at] = f;
        else
            xs[8 * half_unit + i][at] = f;
    }
}

void main()
{
    uint o0 = group_id() * TILE, mine = TID / 2, side = TID % 2;
    tile_rows t = tile_of(gl_WorkGroupID.z, p.chosen, p.rows);
    if (t.n == 0)
        return;
    uint64_t row = uint64_t(t.expert) * p.n_out + min(o0 + mine, p.n_out - 1);
    row_layout l = row_layout(p.tail, p.group_len, p.n_in, p.grid);
    Words w = Words(p.w + 4 * row * p.row_words);
    Floats x = floats(p.x, uint64_t(tile_row(t, min(mine, t.n - 1)) / p.x_div) * p.ldx);
    uint64_t perm = p.perm != 0 ? p.perm + 4 * uint64_t(t.expert) * p.n_in : 0;
    uint oo = TID % 8 * 8, rr = TID / 8 * 4;
    float sum[8][4];
    for (uint i = 0; i < 8; i++)
        for (uint j = 0; j < 4; j++)
            sum[i][j] = 0;
    for (uint k = 0; k < p.n_in; k += DEEP) {
        uint at = k + 8 * side;
        eight v = eight(vec4(0), vec4(0)), a = v;
        if (at < p.n_in) {
            v = decode(w, at / 8, l);
            a = inputs(x, perm, at, p.n_in);
        }
        barrier();
        store(side, mine, v, true);
        store(side, mine, a, false);
        barrier();
        for (uint i = 0; i < DEEP; i++) {
            float wv[8], xv[4];
            for (uint j = 0; j < 8; j++)
                wv[j] = ws[i][oo + j];
            for (uint j = 0; j < 4; j++)
                xv[j] = xs[i][rr + j];
            for (uint m = 0; m < 8; m++)
                for (uint n = 0; n < 4; n++)
                    sum[m][n] += wv[m] * xv[n];
        }
    }
    for (uint n = 0; n < 4; n++)
        for (uint m = 0; m < 8; m++) {
            uint o = o0 + oo + m;
            if (rr + n < t.n && o < p.n_out)
                floats(p.y, uint64_t(tile_row(t, rr + n)) * p.ldy + p.first).v[o] =
                    sum[m][n] +
                    (p.bias != 0 ? Floats(p.bias).v[t.expert * p.n_all_out + p.first + o] : 0);
        }
}
