#version 460
/*
 * y = x W^T + bias for up to 32 rows a tile on cooperative matrices. A workgroup computes 32 outputs; its eight subgroups divide the
 * columns, 32 at a time, and work apart until their sums are added. So weights stream through many small workgroups. x: rows of
 * half.comp. GROUPED: the rows of a tile have one expert (tiles.glsl).
 */
#define THREADS 256
#include "common.glsl"
#include "formats.glsl"
#include "coop.glsl"

layout(constant_id = 1) const uint GROUPED = 0;
const uint TILE = 32;
layout(push_constant) uniform Push { product_args p; };

#include "tiles.glsl"

const uint OUTS = 32, DEEP = 32, SUBGROUPS = 8;
const uint LD = DEEP / 8 + 1; /* uvec4 per row, one of them unused: rows begin in other banks */
const uint HALF = OUTS * LD, ROOM = 2 * HALF;
shared uvec4 room[SUBGROUPS * ROOM]; /* of each subgroup: weights, inputs; then sums */

uvec4 packed(eight v)
{
    return uvec4(packHalf2x16(v.a.xy), packHalf2x16(v.a.zw), packHalf2x16(v.b.xy), packHalf2x16(v.b.zw));
}

/* The sums of all subgroups, four outputs of a row an invocation. */
void write_sums(tile_rows t, uint o0)
{
    uint in_tile = TID / (OUTS / 4), o = o0 + TID % (OUTS / 4) * 4;
    vec4 v = vec4(0);
    for (uint s = 0; s < SUBGROUPS; s++)
        v += uintBitsToFloat(room[s * ROOM + TID]);
    if (in_tile >= t.n)
        return;
    uint r = tile_row(t, in_tile);
    v *= Floats(p.scale).v[r / p.x_div];
    Floats y = Floats(p.y + 4 * (uint64_t(r) * p.ldy + p.first));
    for (uint n = 0; n < 4; n++)
        if (o + n < p.n_out)
            y.v[o + n] = v[n] + (p.bias != 0 ? Floats(p.bias).v[t.expert * p.n_all_out + p.first + o + n] : 0);
}

void main()
{
    uint o0 = group_id() * OUTS, lane = gl_SubgroupInvocationID, mine = gl_SubgroupID * ROOM;
    tile_rows t = tile_of(gl_WorkGroupID.z, p.chosen, p.rows);
    if (t.n == 0)
        return;
    row_layout l = row_layout(p.tail, p.group_len, p.n_in, p.grid);
    uint64_t row = uint64_t(t.expert) * p.n_out + min(o0 + lane, p.n_out - 1);
    Words w = Words(p.w + 4 * row * p.row_words);
    Quads x = Quads(p.x + 2 * uint64_t(tile_row(t, min(lane, t.n - 1)) / p.x_div) * p.ldx);
    SUM sum[2][2];
    [[unroll]] for (uint i = 0; i < 2; i++)
        [[unroll]] for (uint j = 0; j < 2; j++)
            sum[i][j] = SUM(0.0);
    for (uint k = gl_SubgroupID * DEEP; k < p.n_in; k += SUBGROUPS * DEEP) {
        uvec4 wu[DEEP / 8], xu[DEEP / 8];
        [[unroll]] for (uint i = 0; i < DEEP / 8; i++) {
            uint u = k / 8 + i;
            wu[i] = 8 * u < p.n_in ? packed(decode(w, u, l)) : uvec4(0);
            xu[i] = 8 * u < p.n_in ? x.v[u] : uvec4(0);
        }
        subgroupBarrier();
        [[unroll]] for (uint i = 0; i < DEEP / 8; i++) {
            room[mine + lane * LD + i] = wu[i];
            room[mine + HALF + lane * LD + i] = xu[i];
        }
        subgroupMemoryBarrierShared();
        subgroupBarrier();
        [[unroll]] for (uint d = 0; d < DEEP / 8; d += 2) {
            LEFT a[2];
            RIGHT b[2];
            [[unroll]] for (uint i = 0; i < 2; i++) {
                coopMatLoadNV(a[i], room, mine + 16 * i * LD + d, LD, false);
                coopMatLoadNV(b[i], room, mine + HALF + 16 * i * LD + d, LD, true);
            }
            [[unroll]] for (uint i = 0; i < 2; i++)
                [[unroll]] for (uint j = 0; j < 2; j++)
                    sum[i][j] = coopMatMulAddNV(a[i], b[j], sum[i][j]);
        }
    }
    subgroupBarrier();
    [[unroll]] for (uint i = 0; i < 2; i++)
        [[unroll]] for (uint j = 0; j < 2; j++)
            coopMatStoreNV(sum[i][j], room, mine + 16 * j * (OUTS / 4) + 4 * i, OUTS / 4, true);
    barrier();
    write_sums(t, o0);
}
