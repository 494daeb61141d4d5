#version 460
/*
 * y = x W^T + bias for few rows on integer dot products. Inputs are pairs of bytes (bytes.glsl), weights stay codes: a value is
 * d * code - less. A subgroup computes OUTS outputs of up to ROWS rows; each invocation takes pieces of 32 codes, which are
 * two runs of 16 inputs, in loads of 16 bytes. The instruction is SPV_KHR_integer_dot_product's, which glslc knows no
 * function for. Modes:
 *   PLAIN: one matrix, or with `chosen` row r has expert chosen[r], and ROWS is 1.
 *   TILES: `chosen` is the table of tiles (tiles.glsl), and a tile's rows share an expert.
 *   PAIRS: y = act(gate, up) of a row, 16 adjacent values a workgroup; ROWS is 1.
 *   COMBINED: the weighted sum over the experts of a row; ROWS is 1.
 */
#extension GL_EXT_spirv_intrinsics : require
#include "common.glsl"
#include "formats.glsl"
#include "act.glsl"
#include "bytes.glsl"

layout(constant_id = 1) const uint SHAPE = 1; /* rows 1 to 8 + 8 * log2 of outputs + 32 * mode */
const uint ROWS = (SHAPE - 1) % 8 + 1;
const uint OUTS = 1 << (SHAPE - 1) % 32 / 8;
const uint MODE = (SHAPE - 1) / 32, PLAIN = 0, TILES = 1, PAIRS = 2, COMBINED = 3;
layout(push_constant) uniform Push { dot_args p; };

/* OpSDotKHR; format 0: four bytes a word */
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_bytes(uint a, uint b, spirv_literal int format);

int dot_sixteen(uvec4 a, uvec4 b)
{
    return dot_bytes(a.x, b.x, 0) + dot_bytes(a.y, b.y, 0) + dot_bytes(a.z, b.z, 0) + dot_bytes(a.w, b.w, 0);
}

struct piece {
    uvec4 a, b; /* codes of two runs of 16 values */
    vec2 d, less;
};

/* The levels of FP4 plus 12: 0 1 2 3 4 6 8 12, and below 12 their negatives. */
uvec4 fp4_bytes(uvec4 c)
{
    const uvec4 ONES = uvec4(0x01010101u);
    uvec4 b2 = c >> 2 & ONES, b1 = c >> 1 & ONES, b0 = c & ONES;
    uvec4 level = (c & 0x07070707u) + (b2 & b0) + ((b2 & b1) << 1) + ((b2 & b1 & b0) << 1);
    uvec4 minus = (c >> 3 & ONES) * 255u;
    return 0x0c0c0c0cu + (level & ~minus) - (level & minus);
}

piece piece_of(Words w, uint i, uint tail)
{
    const uint LOW = 0x0f0f0f0fu;
    if (FORMAT == FORMAT_Q8_0)
        return piece(quad_of(w, 8 * i), quad_of(w, 8 * i + 4), vec2(tail_scale(w, tail, i)), vec2(0));
    if (FORMAT == FORMAT_Q4_0) {
        uvec4 q = quad_of(w, 4 * i);
        float d = tail_scale(w, tail, i);
        return piece(q & LOW, q >> 4 & LOW, vec2(d), vec2(8 * d));
    }
    if (FORMAT == FORMAT_MXFP4) {
        uvec4 q = quad_of(w, 4 * i);
        float d = mxfp4_scale(byte_of(w, 4 * tail + i));
        return piece(fp4_bytes(q & LOW), fp4_bytes(q >> 4 & LOW), vec2(d), vec2(12 * d));
    }
    uint b = i / 8, s = i % 8, h = s & 1u;
    if (FORMAT == FORMAT_Q6_K) {
        uint at = 52 * b, n = s / 4, side = s / 2 & 1u, shift = 8 * (2 * side + h);
        uvec4 q = quad_of(w, at + 4 * s), high = quad_of(w, at + 32 + 8 * n + 4 * h) >> 2 * side;
        uvec2 sc = pair_of(w, at + 48 + 2 * n);
        vec2 d = tail_scale(w, tail, b) * vec2(bitfieldExtract(int(sc.x), int(shift), 8),
                                               bitfieldExtract(int(sc.y), int(shift), 8));
        return piece(q & LOW | (high & 0x03030303u) << 4, q >> 4 & LOW | (high >> 4 & 0x03030303u) << 4, d, 32 * d);
    }
    bool five = FORMAT == FORMAT_Q5_K; /* or Q4_K */
    uint at = (five ? 44 : 36) * b, j = s & 6u;
    uvec4 head = quad_of(w, at), q = quad_of(w, at + (five ? 12 : 4) + 4 * s);
    vec2 dm = unpackHalf2x16(head.x);
    uvec2 one = k4_scale_min(head, j), two = k4_scale_min(head, j + 1);
    uvec4 low = q & LOW, high = q >> 4 & LOW;
    if (five) {
        uvec4 fifth = quad_of(w, at + 4 + 4 * h) >> j;
        low |= (fifth & 0x01010101u) << 4;
        high |= (fifth >> 1 & 0x01010101u) << 4;
    }
    return piece(low, high, dm.x * vec2(one.x, two.x), dm.y * vec2(one.y, two.y));
}

/* Which 16 inputs a piece's two runs meet. */
uvec2 runs_of(uint i)
{
    uint b = i / 8 * 16, s = i % 8;
    if (FORMAT == FORMAT_Q6_K)
        return b + s / 4 * 8 + (s & 3u) / 2 * 2 + (s & 1u) + uvec2(0, 4);
    if (FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K)
        return b + s / 2 * 4 + (s & 1u) + uvec2(0, 2);
    return 2 * i + uvec2(0, 1);
}

/* d * code - less times 16 inputs */
float run_dot(uvec4 codes, float d, float less, uint64_t unit)
{
    Quads x = Quads(p.x + 48 * unit);
    vec4 s = uintBitsToFloat(x.v[2]);
    return d * s.x * float(256 * dot_sixteen(codes, x.v[0]) + dot_sixteen(codes, x.v[1])) - less * s.y;
}

/* The input row of output row r of the tile. */
uint row_of(uint r, uint list)
{
    return MODE == TILES ? Words(p.chosen).v[list + r] : r;
}

/* Rows from r on, n of them. list: of the tile. */
void product(uint e, uint o0, uint r, uint n, uint list)
{
    uint64_t x[ROWS];
    float sum[OUTS][ROWS];
    [[unroll]] for (uint j = 0; j < ROWS; j++)
        x[j] = uint64_t(row_of(r + min(j, n - 1), list) / p.x_div) * (p.ldx / 16);
    [[unroll]] for (uint i = 0; i < OUTS; i++)
        [[unroll]] for (uint j = 0; j < ROWS; j++)
            sum[i][j] = 0;
    for (uint at = gl_SubgroupInvocationID; at < p.n_in / 32; at += gl_SubgroupSize) {
        uvec2 runs = runs_of(at);
        piece c[OUTS];
        [[unroll]] for (uint i = 0; i < OUTS; i++) {
            uint64_t row = uint64_t(e) * p.n_out + min(o0 + i, p.n_out - 1);
            c[i] = piece_of(Words(p.w + 4 * row * p.row_words), at, p.tail);
        }
        [[unroll]] for (uint j = 0; j < ROWS; j++)
            [[unroll]] for (uint i = 0; i < OUTS && j < n; i++)
                sum[i][j] += run_dot(c[i].a, c[i].d.x, c[i].less.x, x[j] + runs.x) +
                             run_dot(c[i].b, c[i].d.y, c[i].less.y, x[j] + runs.y);
    }
    [[unroll]] for (uint i = 0; i < OUTS; i++)
        [[unroll]] for (uint j = 0; j < ROWS; j++)
            sum[i][j] = subgroupAdd(sum[i][j]);
    if (!subgroupElect())
        return;
    [[unroll]] for (uint i = 0; i < OUTS; i++)
        [[unroll]] for (uint j = 0; j < ROWS; j++)
            if (o0 + i < p.n_out && j < n) {
                float bias = p.bias != 0 ? Floats(p.bias).v[e * p.n_all_out + p.first + o0 + i] : 0;
                floats(p.y, uint64_t(row_of(r + j, list)) * p.ldy + p.first).v[o0 + i] = sum[i][j] + bias;
            }
}

shared float values[16];

/* Row r's values from o0 on: subgroups have adjacent ones, and of each the gate's row and the up's. */
void pairs(uint e, uint o0, uint r)
{
    uint first = o0 + gl_SubgroupID * (OUTS / 2);
    uint64_t x = uint64_t(r / p.x_div) * (p.ldx / 16);
    float sum[OUTS];
    [[unroll]] for (uint i = 0; i < OUTS; i++)
        sum[i] = 0;
    for (uint at = gl_SubgroupInvocationID; at < p.n_in / 32; at += gl_SubgroupSize) {
        uvec2 runs = runs_of(at);
        [[unroll]] for (uint i = 0; i < OUTS; i++) {
            uint64_t row = uint64_t(e) * p.first + first + i / 2;
            piece c = piece_of(Words((i % 2 == 0 ? p.w : p.pair) + 4 * row * p.row_words), at, p.tail);
            sum[i] += run_dot(c.a, c.d.x, c.less.x, x + runs.x) + run_dot(c.b, c.d.y, c.less.y, x + runs.y);
        }
    }
    [[unroll]] for (uint i = 0; i < OUTS; i++) {
        sum[i] = subgroupAdd(sum[i]);
        if (p.bias != 0)
            sum[i] += Floats(p.bias).v[e * p.n_all_out + i % 2 * p.n_out + first + i / 2];
    }
    if (subgroupElect())
        [[unroll]] for (uint i = 0; i < OUTS; i += 2)
            values[first - o0 + i / 2] = activation_of(sum[i], sum[i + 1], p.act, p.alpha, p.limit, p.beta);
    barrier();
    if (TID == 0) {
        sixteen h;
        for (uint i = 0; i < 4; i++)
            h.v[i] = vec4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
        store_sixteen(p.y + 4 * (uint64_t(r) * p.ldy + o0), h);
        put_bytes(p.bytes, uint64_t(r) * (p.n_out / 16) + o0 / 16, h);
    }
    barrier();
}

/* The pieces of all experts of token t follow each other. */
void combined(uint o0, uint t)
{
    uint pieces = p.n_in / 32;
    float sum[OUTS];
    [[unroll]] for (uint i = 0; i < OUTS; i++)
        sum[i] = 0;
    for (uint n = gl_SubgroupInvocationID; n < pieces * p.x_div; n += gl_SubgroupSize) {
        uint at = n % pieces, r = t * p.x_div + n / pieces, e = Words(p.chosen).v[r] - p.expert_first;
        if (e >= p.n_own)
            continue; /* another process has it */
        uvec2 runs = runs_of(at);
        uint64_t x = uint64_t(r) * (p.ldx / 16);
        float weight = Floats(p.weights).v[r];
        [[unroll]] for (uint i = 0; i < OUTS; i++) {
            uint64_t row = uint64_t(e) * p.n_out + min(o0 + i, p.n_out - 1);
            piece c = piece_of(Words(p.w + 4 * row * p.row_words), at, p.tail);
            sum[i] += weight * (run_dot(c.a, c.d.x, c.less.x, x + runs.x) + run_dot(c.b, c.d.y, c.less.y, x + runs.y));
        }
    }
    [[unroll]] for (uint i = 0; i < OUTS; i++)
        sum[i] = subgroupAdd(sum[i]);
    if (!subgroupElect())
        return;
    [[unroll]] for (uint i = 0; i < OUTS && o0 + i < p.n_out; i++) {
        for (uint r = t * p.x_div; p.bias != 0 && r < (t + 1) * p.x_div; r++) {
            uint e = Words(p.chosen).v[r] - p.expert_first;
            if (e < p.n_own)
                sum[i] += Floats(p.weights).v[r] * Floats(p.bias).v[e * p.n_all_out + p.first + o0 + i];
        }
        floats(p.y, uint64_t(t) * p.ldy + p.first).v[o0 + i] = sum[i];
    }
}

void main()
{
    if (MODE == PAIRS) {
        for (uint r = gl_WorkGroupID.z; r < p.rows; r += gl_NumWorkGroups.z) {
            uint e = p.chosen != 0 ? Words(p.chosen).v[r] - p.expert_first : 0;
            if (group_id() * 16 < p.n_out && (p.chosen == 0 || e < p.n_own))
                pairs(e, group_id() * 16, r);
        }
        return;
    }
    uint o0 = (group_id() * gl_NumSubgroups + gl_SubgroupID) * OUTS;
    if (o0 >= p.n_out)
        return;
    if (MODE == COMBINED) {
        for (uint t = gl_WorkGroupID.z; t < p.rows; t += gl_NumWorkGroups.z)
            combined(o0, t);
        return;
    }
    if (MODE == TILES) {
        Words g = Words(p.chosen);
        uint at = 4 + 3 * gl_WorkGroupID.z;
        if (gl_WorkGroupID.z < g.v[0])
            product(g.v[at], o0, g.v[at + 1], g.v[at + 2], g.v[1]);
        return;
    }
    for (uint r = gl_WorkGroupID.z * ROWS; r < p.rows; r += gl_NumWorkGroups.z * ROWS) {
        uint e = p.chosen != 0 ? Words(p.chosen).v[r] - p.expert_first : 0;
        if (p.chosen == 0 || e < p.n_own) /* else another process has it */
            product(e, o0, r, min(ROWS, p.rows - r), 0);
    }
}
