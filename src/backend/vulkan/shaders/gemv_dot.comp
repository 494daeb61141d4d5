#version 460
/*
 * gemv on integer dot products: inputs are bytes (bytes.comp), weights stay codes. Eight codes are two words of bytes, and
 * a value is d * code - less. The instruction is SPV_KHR_integer_dot_product's, which glslc knows no function for.
 */
#extension GL_EXT_spirv_intrinsics : require
#include "common.glsl"
#include "formats.glsl"

layout(constant_id = 1) const uint SHAPE = 1; /* as gemv */
const uint ROWS = (SHAPE - 1) % 8 + 1;
const uint OUTS = 2 << (SHAPE - 1) / 8;
layout(push_constant) uniform Push { product_args p; };

/* OpSDotKHR; format 0: four bytes a word */
spirv_instruction(extensions = ["SPV_KHR_integer_dot_product"], capabilities = [6018, 6019], id = 4450)
int dot_bytes(uint a, uint b, spirv_literal int format);

shared float part[OUTS * ROWS * (THREADS / 4)];

struct codes {
    uint a, b; /* bytes */
    float d, less;
};

/* The levels of FP4 plus 12: 0 1 2 3 4 6 8 12, and below 12 their negatives. */
uint fp4_bytes(uint c)
{
    const uint ONES = 0x01010101u;
    uint b2 = c >> 2 & ONES, b1 = c >> 1 & ONES, b0 = c & ONES;
    uint level = (c & 0x07070707u) + (b2 & b0) + ((b2 & b1) << 1) + ((b2 & b1 & b0) << 1);
    uint minus = (c >> 3 & ONES) * 255u;
    return 0x0c0c0c0cu + (level & ~minus) - (level & minus);
}

codes codes_of(Words w, uint u, row_layout l)
{
    uint b = u / 4, s = u % 4, pair = (s & 1u) * 2, shift = s / 2 * 4;
    if (FORMAT == FORMAT_Q8_0) {
        uvec2 q = pair_of(w, 2 * u);
        return codes(q.x, q.y, tail_scale(w, l.tail, b), 0);
    }
    if (FORMAT == FORMAT_Q4_0) {
        uvec2 q = pair_of(w, 4 * b + pair) >> shift & 0x0f0f0f0fu;
        float d = tail_scale(w, l.tail, b);
        return codes(q.x, q.y, d, 8 * d);
    }
    if (FORMAT == FORMAT_MXFP4) {
        uvec2 q = pair_of(w, 4 * b + pair) >> shift & 0x0f0f0f0fu;
        float d = mxfp4_scale(byte_of(w, 4 * l.tail + b));
        return codes(fp4_bytes(q.x), fp4_bytes(q.y), d, 12 * d);
    }
    b = u / 32;
    s = u % 32;
    uint j = s / 4, quarter = s & 3u;
    if (FORMAT == FORMAT_Q6_K) {
        uint at = 52 * b, which = j & 3u, sc = byte_of(w, 4 * (at + 48) + s / 2);
        float d = tail_scale(w, l.tail, b) * float(bitfieldExtract(int(sc), 0, 8));
        uvec2 q = pair_of(w, at + s / 16 * 16 + (which & 1u) * 8 + quarter * 2) >> which / 2 * 4;
        uvec2 h = pair_of(w, at + 32 + s / 16 * 8 + quarter * 2) >> 2 * which;
        q = (q & 0x0f0f0f0fu) | (h & 0x03030303u) << 4;
        return codes(q.x, q.y, d, 32 * d);
    }
    bool five = FORMAT == FORMAT_Q5_K; /* or Q4_K */
    uint at = (five ? 44 : 36) * b;
    uvec4 head = quad_of(w, at);
    vec2 dm = unpackHalf2x16(head.x);
    uvec2 sm = k4_scale_min(head, j);
    uvec2 q = pair_of(w, at + (five ? 12 : 4) + j / 2 * 8 + quarter * 2) >> (j & 1u) * 4 & 0x0f0f0f0fu;
    if (five)
        q |= (pair_of(w, at + 4 + quarter * 2) >> j & 0x01010101u) << 4;
    return codes(q.x, q.y, dm.x * float(sm.x), dm.y * float(sm.y));
}

void main()
{
    uint o0 = group_id() * OUTS;
    if (o0 >= p.n_out)
        return;
    row_layout l = row_layout(p.tail, p.group_len, p.n_in, p.grid);
    uint units = p.n_in / 8;
    for (uint r = gl_WorkGroupID.z * ROWS; r < p.rows; r += gl_NumWorkGroups.z * ROWS) {
        uint e = 0;
        if (p.chosen != 0) {
            e = Words(p.chosen).v[r] - p.expert_first;
            if (e >= p.n_own)
                continue; /* another process has it */
        }
        float sum[OUTS][ROWS];
        for (uint i = 0; i < OUTS; i++)
            for (uint j = 0; j < ROWS; j++)
                sum[i][j] = 0;
        for (uint u = TID; u < units; u += THREADS) {
            uvec2 x[ROWS];
            float d[ROWS], total[ROWS];
            for (uint j = 0; j < ROWS; j++) {
                uint64_t row = min(r + j, p.rows - 1) / p.x_div;
                x[j] = Pairs(p.x + row * p.ldx).v[u];
                d[j] = floats(p.scale, row * (p.ldx / 32)).v[u / 4];
                total[j] = float(dot_bytes(x[j].x, 0x01010101u, 0) + dot_bytes(x[j].y, 0x01010101u, 0));
            }
            for (uint i = 0; i < OUTS; i++) {
                uint64_t row = uint64_t(e) * p.n_out + min(o0 + i, p.n_out - 1);
                codes c = codes_of(Words(p.w + 4 * row * p.row_words), u, l);
                for (uint j = 0; j < ROWS; j++)
                    sum[i][j] += d[j] * (c.d * float(dot_bytes(c.a, x[j].x, 0) + dot_bytes(c.b, x[j].y, 0)) -
                                         c.less * total[j]);
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
