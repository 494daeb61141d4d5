#version 460
/*
 * y = x W^T + bias for many rows on cooperative matrices (VK_NV_cooperative_matrix) of 16 x 16 x 16, fp16 with sums of
 * floats. A workgroup of four subgroups computes a tile of 64 outputs of 64 rows, a subgroup 32 x 32 of it. Weights are
 * decoded to fp16 in shared memory, 32 columns at a time. x: rows of half.comp. GROUPED: the rows of a tile have one
 * expert.
 */
#extension GL_NV_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#include "common.glsl"
#include "formats.glsl"

layout(push_constant) uniform Push { product_args p; };

#include "tiles.glsl"

const uint DEEP = 32;
const uint LD = DEEP / 8 + 1; /* uvec4 per row, one of them unused: rows begin in other banks */
shared uvec4 ws[TILE * LD];
shared uvec4 xs[TILE * LD];
shared float ys[TILE * TILE];

uvec4 packed(eight v)
{
    return uvec4(packHalf2x16(v.a.xy), packHalf2x16(v.a.zw), packHalf2x16(v.b.xy), packHalf2x16(v.b.zw));
}

void main()
{
    uint o0 = group_id() * TILE;
    tile_rows t = tile_of(gl_WorkGroupID.z, p.chosen, p.rows);
    if (t.n == 0)
        return;
    row_layout l = row_layout(p.tail, p.group_len, p.n_in, p.grid);
    uint mine = TID / 2, side = TID % 2 * 2; /* two units of a row of each */
    uint64_t row = uint64_t(t.expert) * p.n_out + min(o0 + mine, p.n_out - 1);
    uint64_t w = p.w + 4 * row * p.row_words;
    uint64_t x = p.x + 2 * uint64_t(tile_row(t, min(mine, t.n - 1)) / p.x_div) * p.ldx;
    uint so = gl_SubgroupID % 2 * 32, sr = gl_SubgroupID / 2 * 32;
    fcoopmatNV<32, gl_ScopeSubgroup, 16, 16> sum[2][2];
    for (uint i = 0; i < 2; i++)
        for (uint j = 0; j < 2; j++)
            sum[i][j] = fcoopmatNV<32, gl_ScopeSubgroup, 16, 16>(0.0);
    for (uint k = 0; k < p.n_in; k += DEEP) {
        uvec4 wu[2], xu[2];
        for (uint i = 0; i < 2; i++) {
            uint u = k / 8 + side + i;
            bool in_row = 8 * u < p.n_in;
            wu[i] = in_row ? packed(decode(Words(w), u, l)) : uvec4(0);
            xu[i] = in_row ? Quads(x).v[u] : uvec4(0);
        }
        barrier();
        for (uint i = 0; i < 2; i++) {
            ws[mine * LD + side + i] = wu[i];
            xs[mine * LD + side + i] = xu[i];
        }
        barrier();
        for (uint d = 0; d < DEEP / 8; d += 2) {
            fcoopmatNV<16, gl_ScopeSubgroup, 16, 16> a[2], b[2];
            for (uint i = 0; i < 2; i++) {
                coopMatLoadNV(a[i], ws, (so + 16 * i) * LD + d, LD, false);
                coopMatLoadNV(b[i], xs, (sr + 16 * i) * LD + d, LD, true);
            }
            for (uint i = 0; i < 2; i++)
                for (uint j = 0; j < 2; j++)
                    sum[i][j] = coopMatMulAddNV(a[i], b[j], sum[i][j]);
        }
    }
    for (uint i = 0; i < 2; i++)
        for (uint j = 0; j < 2; j++)
            coopMatStoreNV(sum[i][j], ys, (sr + 16 * j) * TILE + so + 16 * i, TILE, true);
    barrier();
    for (uint i = TID; i < TILE * TILE; i += THREADS) {
        uint r = tile_row(t, min(i / TILE, t.n - 1)), o = o0 + i % TILE;
        if (i / TILE < t.n && o < p.n_out)
            Floats(p.y + 4 * (uint64_t(r) * p.ldy + p.first)).v[o] =
                ys[i] * Floats(p.scale).v[r / p.x_div] +
                (p.bias != 0 ? Floats(p.bias).v[t.expert * p.n_all_out + p.first + o] : 0);
    }
}
