#version 460
/*
 * y = x W^T + bias for many rows on cooperative matrices. A workgroup of eight subgroups computes a tile of 128 outputs of ROWS
 * rows, a subgroup FRAGS * 16 outputs of 32 rows. Weights are decoded to fp16 in shared memory, 32 columns at a time, while
 * the columns before are multiplied. x: rows of half.comp. GROUPED: the rows of a tile have one expert (tiles.glsl).
 */
#define THREADS 256
#include "common.glsl"
#include "formats.glsl"
#include "coop.glsl"

layout(constant_id = 1) const uint SHAPE = 0; /* 0 to 2: tiles of 32, 64 or 128 rows; 4 more: grouped */
const uint GROUPED = SHAPE / 4;
const uint TILE = 32 << (SHAPE & 3u);
layout(push_constant) uniform Push { product_args p; };

#include "tiles.glsl"

const uint OUTS = 128, DEEP = 32, FRAGS = 1 << (SHAPE & 3u);
const uint LD = DEEP / 8 + 1; /* uvec4 per row, one of them unused: rows begin in other banks */
const uint HELD = (TILE * DEEP / 8 + THREADS - 1) / THREADS; /* uvec4 of x that an invocation copies */
shared uvec4 ws[2][OUTS * LD];
shared uvec4 xs[2][TILE * LD];

uvec4 packed(eight v)
{
    return uvec4(packHalf2x16(v.a.xy), packHalf2x16(v.a.zw), packHalf2x16(v.b.xy), packHalf2x16(v.b.zw));
}

void main()
{
    uint o0 = group_id() * OUTS;
    tile_rows t = tile_of(gl_WorkGroupID.z, p.chosen, p.rows);
    if (t.n == 0)
        return;
    row_layout l = row_layout(p.tail, p.group_len, p.n_in, p.grid);
    uint mine = TID / 2, side = TID % 2 * 2; /* two units of a row of weights */
    uint64_t row = uint64_t(t.expert) * p.n_out + min(o0 + mine, p.n_out - 1);
    Words w = Words(p.w + 4 * row * p.row_words);
    Quads x[HELD];
    [[unroll]] for (uint i = 0; i < HELD; i++) {
        uint r = min((TID + i * THREADS) / (DEEP / 8), t.n - 1);
        x[i] = Quads(p.x + 2 * uint64_t(tile_row(t, r) / p.x_div) * p.ldx);
    }
    uint so = gl_SubgroupID / (TILE / 32) * FRAGS * 16, sr = gl_SubgroupID % (TILE / 32) * 32;
    SUM sum[FRAGS][2];
    [[unroll]] for (uint i = 0; i < FRAGS; i++)
        [[unroll]] for (uint j = 0; j < 2; j++)
            sum[i][j] = SUM(0.0);
    uvec4 wu[2], xu[HELD]; /* of the next columns */
    for (uint k = 0, now = 0;; k += DEEP, now ^= 1) {
        [[unroll]] for (uint i = 0; i < 2; i++) {
            uint u = k / 8 + side + i;
            wu[i] = 8 * u < p.n_in ? packed(decode(w, u, l)) : uvec4(0);
        }
        [[unroll]] for (uint i = 0; i < HELD; i++) {
            uint u = k / 8 + (TID + i * THREADS) % (DEEP / 8);
            xu[i] = 8 * u < p.n_in ? x[i].v[u] : uvec4(0);
        }
        if (k > 0)
            [[unroll]] for (uint d = 0; d < DEEP / 8; d += 2) {
                LEFT a[FRAGS];
                RIGHT b[2];
                [[unroll]] for (uint i = 0; i < FRAGS; i++)
                    coopMatLoadNV(a[i], ws[now ^ 1], (so + 16 * i) * LD + d, LD, false);
                [[unroll]] for (uint j = 0; j < 2; j++)
                    coopMatLoadNV(b[j], xs[now ^ 1], (sr + 16 * j) * LD + d, LD, true);
                [[unroll]] for (uint i = 0; i < FRAGS; i++)
                    [[unroll]] for (uint j = 0; j < 2; j++)
                        sum[i][j] = coopMatMulAddNV(a[i], b[j], sum[i][j]);
            }
        if (k >= p.n_in)
            break;
        [[unroll]] for (uint i = 0; i < 2; i++)
            ws[now][mine * LD + side + i] = wu[i];
        [[unroll]] for (uint i = 0; i < HELD; i++) {
            uint at = TID + i * THREADS;
            if (at < TILE * DEEP / 8)
                xs[now][at / (DEEP / 8) * LD + at % (DEEP / 8)] = xu[i];
        }
        barrier();
    }
    barrier();
    /* Each subgroup has room for one matrix of floats: 16 outputs of each of 16 rows. */
    uint room = gl_SubgroupID * 64;
    [[unroll]] for (uint i = 0; i < FRAGS; i++)
        [[unroll]] for (uint j = 0; j < 2; j++) {
            coopMatStoreNV(sum[i][j], ws[0], room, 4, true);
            subgroupMemoryBarrierShared();
            subgroupBarrier();
            for (uint at = gl_SubgroupInvocationID; at < 64; at += gl_SubgroupSize) {
                uint in_tile = sr + 16 * j + at / 4, o = o0 + so + 16 * i + at % 4 * 4;
                if (in_tile >= t.n)
                    continue;
                uint r = tile_row(t, in_tile);
                vec4 v = uintBitsToFloat(ws[0][room + at]) * Floats(p.scale).v[r / p.x_div];
                Floats y = Floats(p.y + 4 * (uint64_t(r) * p.ldy + p.first));
                for (uint n = 0; n < 4; n++)
                    if (o + n < p.n_out)
                        y.v[o + n] = v[n] + (p.bias != 0 ? Floats(p.bias).v[t.expert * p.n_all_out + p.first + o + n] : 0);
            }
            subgroupBarrier();
        }
}
