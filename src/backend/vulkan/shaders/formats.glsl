/*
 * Weight formats: eight adjacent values of a row at a time. A row is `tail` words of blocks, and then the parts that
 * would leave the blocks unaligned, such as scales (vulkan/pack.c says which). Every format's branch but one is removed
 * when the pipeline is made.
 */
layout(constant_id = 0) const uint FORMAT = 0;

struct eight {
    vec4 a, b;
};

/* Where a weight's row has what is not in its blocks. */
struct row_layout {
    uint tail, group_len, n_in;
    uint64_t grid;
};

uint byte_of(Words w, uint at)
{
    return w.v[at >> 2] >> 8 * (at & 3u) & 255u;
}

/* Two words from an even word on, and four from a multiple of four on: rows are aligned to 16 bytes. */
uvec2 pair_of(Words w, uint at)
{
    return Pairs(uint64_t(w)).v[at / 2];
}

uvec4 quad_of(Words w, uint at)
{
    return Quads(uint64_t(w)).v[at / 4];
}

uint half_of(Words w, uint at) /* the at-th 16 bits */
{
    return w.v[at >> 1] >> 16 * (at & 1u) & 0xffffu;
}

float tail_scale(Words w, uint tail, uint i)
{
    return half_value(half_of(w, 2 * tail + i));
}

const uvec4 BYTES = uvec4(0, 8, 16, 24);

uvec4 bits_of(uint word, uint shift, uint mask)
{
    return uvec4(word) >> (BYTES + shift) & mask;
}

eight scaled(uvec4 a, uvec4 b, float d, float less)
{
    return eight(vec4(a) * d - less, vec4(b) * d - less);
}

eight centred(uvec4 a, uvec4 b, float d, int zero)
{
    return eight(vec4(ivec4(a) - zero) * d, vec4(ivec4(b) - zero) * d);
}

/* Bit i of eight bits, as i-th value. */
uvec4 bit_each(uint bits, uint from)
{
    return uvec4(bits) >> (uvec4(0, 1, 2, 3) + from) & 1u;
}

ivec4 signed_bytes(uint word)
{
    return ivec4(bitfieldExtract(int(word), 0, 8), bitfieldExtract(int(word), 8, 8),
                 bitfieldExtract(int(word), 16, 8), bitfieldExtract(int(word), 24, 8));
}

/* The 16 levels of IQ4, and those of MXFP4, doubled, as signed bytes. */
const uint IQ4[4] = uint[4](0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);
const uint FP4[4] = uint[4](0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu);

int iq4_level(uint c)
{
    return bitfieldExtract(int(IQ4[c >> 2]), int(8 * (c & 3u)), 8);
}

int fp4_level(uint c)
{
    return bitfieldExtract(int(FP4[c >> 2]), int(8 * (c & 3u)), 8);
}

vec4 iq4_levels(uvec4 c)
{
    return vec4(iq4_level(c.x), iq4_level(c.y), iq4_level(c.z), iq4_level(c.w));
}

vec4 fp4_levels(uvec4 c)
{
    return vec4(fp4_level(c.x), fp4_level(c.y), fp4_level(c.z), fp4_level(c.w));
}

/* The levels of bitsandbytes' 4 bits. */
const float NF4[16] = float[16](-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
                                -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
                                0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
                                0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
                                0.7229568362236023, 1.0);
const float BNB_FP4[8] = float[8](0.0, 0.0625 / 12.0, 8.0 / 12.0, 1.0, 4.0 / 12.0, 0.5, 2.0 / 12.0, 0.25);

float bnb_level(uint c)
{
    if (FORMAT == FORMAT_NF4)
        return NF4[c];
    return c < 8 ? BNB_FP4[c] : -BNB_FP4[c - 8];
}

vec4 bnb_levels(uvec4 c)
{
    return vec4(bnb_level(c.x), bnb_level(c.y), bnb_level(c.z), bnb_level(c.w));
}

/* Scale and minimum of sub-block j of Q4_K and Q5_K: 12 bytes, after the block's first word. */
uvec2 k4_scale_min(uvec4 head, uint j)
{
    uint k = 8 * (j & 3u), a = head.y >> k, b = head.z >> k, c = head.w >> k;
    if (j < 4)
        return uvec2(a & 63u, b & 63u);
    return uvec2((c & 15u) | (a >> 6 & 3u) << 4, (c >> 4 & 15u) | (b >> 6 & 3u) << 4);
}

int q3k_scale(Words w, uint at, uint j) /* at: the byte of the 12 */
{
    uint low = j < 8 ? byte_of(w, at + j) & 15u : byte_of(w, at + j - 8) >> 4;
    return int(low | (byte_of(w, at + 8 + j % 4) >> 2 * (j / 4) & 3u) << 4) - 32;
}

uint even_signs(uint bits)
{
    return bits | uint(bitCount(bits) & 1) << 7;
}

/* d times grid bytes (not negative), negated where a bit of signs is set */
eight signed_grid(uint g0, uint g1, uint signs, float d)
{
    vec4 a = vec4(bits_of(g0, 0, 255u)), b = vec4(bits_of(g1, 0, 255u));
    a = mix(a, -a, equal(bit_each(signs, 0), uvec4(1)));
    b = mix(b, -b, equal(bit_each(signs, 4), uvec4(1)));
    return eight(a * d, b * d);
}

eight shifted_grid(uint g0, uint g1, int shift, float d)
{
    return eight(vec4(signed_bytes(g0) + shift) * d, vec4(signed_bytes(g1) + shift) * d);
}

/* Where a format's grid begins among all points (quant/grids.c). */
const uint GRID_IQ3_S = 0, GRID_IQ3_XXS = 512, GRID_IQ2_XXS = 768, GRID_IQ2_XS = 1024, GRID_IQ2_S = 1536,
           GRID_IQ1 = 2560;

uvec2 grid_point(uint64_t grid, uint i)
{
    Words g = Words(grid);
    return uvec2(g.v[2 * i], g.v[2 * i + 1]);
}

float trit(uint q, uint n)
{
    const uint pow3[5] = uint[5](1, 3, 9, 27, 81);
    return float(int((q * pow3[n] & 255u) * 3u >> 8) - 1);
}

float tq1_value(Words w, uint at, uint i)
{
    if (i < 160)
        return trit(byte_of(w, 4 * at + i % 32), i / 32);
    if (i < 240)
        return trit(byte_of(w, 4 * at + 32 + (i - 160) % 16), (i - 160) / 16);
    return trit(byte_of(w, 4 * at + 48 + (i - 240) % 4), (i - 240) / 4);
}

float mxfp4_scale(uint e)
{
    return uintBitsToFloat(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

/* Formats whose values are plain numbers, GPTQ, NVFP4, NF4 and FP4. */
eight decode_plain(Words w, uint u, row_layout l)
{
    if (FORMAT == FORMAT_F32) {
        return eight(uintBitsToFloat(quad_of(w, 8 * u)), uintBitsToFloat(quad_of(w, 8 * u + 4)));
    }
    if (FORMAT == FORMAT_F16) {
        uvec4 v = quad_of(w, 4 * u);
        return eight(vec4(unpackHalf2x16(v.x), unpackHalf2x16(v.y)),
                     vec4(unpackHalf2x16(v.z), unpackHalf2x16(v.w)));
    }
    if (FORMAT == FORMAT_BF16) {
        uvec4 v = quad_of(w, 4 * u);
        uvec4 low = v << 16, high = v & 0xffff0000u;
        return eight(uintBitsToFloat(uvec4(low.x, high.x, low.y, high.y)),
                     uintBitsToFloat(uvec4(low.z, high.z, low.w, high.w)));
    }
    if (FORMAT == FORMAT_F8_E4M3) {
        float d = uintBitsToFloat(w.v[l.tail + u / 16]);
        uvec4 a = bits_of(w.v[2 * u], 0, 255u), b = bits_of(w.v[2 * u + 1], 0, 255u);
        return eight(d * vec4(f8_value(a.x), f8_value(a.y), f8_value(a.z), f8_value(a.w)),
                     d * vec4(f8_value(b.x), f8_value(b.y), f8_value(b.z), f8_value(b.w)));
    }
    if (FORMAT == FORMAT_GPTQ4) {
        uint groups = (l.n_in + l.group_len - 1) / l.group_len, g = 8 * u / l.group_len, v = w.v[u];
        float d = tail_scale(w, l.tail, g);
        int zero = int(byte_of(w, 4 * (l.tail + (groups + 1) / 2) + g));
        uvec4 a = uvec4(v) >> uvec4(0, 4, 8, 12) & 15u, b = uvec4(v) >> uvec4(16, 20, 24, 28) & 15u;
        return centred(a, b, d, zero);
    }
    if (FORMAT == FORMAT_NF4 || FORMAT == FORMAT_FP4) {
        uint first = u / 8 * 9, v = w.v[first + 1 + u % 8];
        float d = uintBitsToFloat(w.v[first]);
        uvec4 a = uvec4(v) >> uvec4(0, 4, 8, 12) & 15u, b = uvec4(v) >> uvec4(16, 20, 24, 28) & 15u;
        return eight(bnb_levels(a) * d, bnb_levels(b) * d);
    }
    uint at = u / 8 * 9, s = u % 8, e = byte_of(w, 4 * at + s / 2); /* NVFP4 */
    float d = e == 0x7fu ? 0 : e == 0xffu ? 240 : 0.5 * f8_value(e & 0x7fu);
    uint q = at + 1 + s / 2 * 2, shift = (s & 1u) * 4;
    vec4 a = fp4_levels(bits_of(w.v[q], shift, 15u)), b = fp4_levels(bits_of(w.v[q + 1], shift, 15u));
    float all = uintBitsToFloat(w.v[l.tail]);
    return eight(a * d * all, b * d * all);
}

/* Blocks of 32 values, and Q1_0 and Q2_0. */
eight decode_small(Words w, uint u, uint tail)
{
    uint b = u / 4, s = u % 4, pair = (s & 1u) * 2, shift = s / 2 * 4;
    if (FORMAT == FORMAT_Q4_0) {
        uint q = 4 * b + pair;
        return centred(bits_of(w.v[q], shift, 15u), bits_of(w.v[q + 1], shift, 15u),
                       tail_scale(w, tail, b), 8);
    }
    if (FORMAT == FORMAT_Q4_1) {
        vec2 dm = unpackHalf2x16(w.v[5 * b]);
        uint q = 5 * b + 1 + pair;
        return scaled(bits_of(w.v[q], shift, 15u), bits_of(w.v[q + 1], shift, 15u), dm.x, -dm.y);
    }
    if (FORMAT == FORMAT_Q5_0) {
        uint q = 5 * b + 1 + pair, high = w.v[5 * b] >> 8 * s;
        return centred(bits_of(w.v[q], shift, 15u) | bit_each(high, 0) << 4,
                       bits_of(w.v[q + 1], shift, 15u) | bit_each(high, 4) << 4,
                       tail_scale(w, tail, b), 16);
    }
    if (FORMAT == FORMAT_Q5_1) {
        vec2 dm = unpackHalf2x16(w.v[6 * b]);
        uint q = 6 * b + 2 + pair, high = w.v[6 * b + 1] >> 8 * s;
        return scaled(bits_of(w.v[q], shift, 15u) | bit_each(high, 0) << 4,
                      bits_of(w.v[q + 1], shift, 15u) | bit_each(high, 4) << 4, dm.x, -dm.y);
    }
    if (FORMAT == FORMAT_Q8_0) {
        float d = tail_scale(w, tail, b);
        uvec2 q = pair_of(w, 2 * u);
        return eight(vec4(signed_bytes(q.x)) * d, vec4(signed_bytes(q.y)) * d);
    }
    if (FORMAT == FORMAT_IQ4_NL) {
        float d = tail_scale(w, tail, b);
        uint q = 4 * b + pair;
        return eight(iq4_levels(bits_of(w.v[q], shift, 15u)) * d,
                     iq4_levels(bits_of(w.v[q + 1], shift, 15u)) * d);
    }
    if (FORMAT == FORMAT_MXFP4) {
        float d = mxfp4_scale(byte_of(w, 4 * tail + b));
        uint q = 4 * b + pair;
        return eight(fp4_levels(bits_of(w.v[q], shift, 15u)) * d,
                     fp4_levels(bits_of(w.v[q + 1], shift, 15u)) * d);
    }
    if (FORMAT == FORMAT_Q1_0) { /* 16 units, a bit each value */
        float d = tail_scale(w, tail, u / 16);
        uint bits = byte_of(w, u);
        return eight(vec4(bit_each(bits, 0)) * 2 * d - d, vec4(bit_each(bits, 4)) * 2 * d - d);
    }
    float d = tail_scale(w, tail, u / 8); /* Q2_0: 8 units */
    uint v = half_of(w, u);
    return centred(uvec4(v) >> uvec4(0, 2, 4, 6) & 3u, uvec4(v) >> uvec4(8, 10, 12, 14) & 3u, d, 1);
}

/* K-quants and IQ4_XS: blocks of 256 values. */
eight decode_k(Words w, uint u, uint tail)
{
    uint b = u / 32, s = u % 32, j = s / 4, quarter = s & 3u;
    if (FORMAT == FORMAT_Q2_K) {
        uint at = 21 * b, sc = byte_of(w, 4 * at + s / 2);
        vec2 dm = unpackHalf2x16(w.v[at + 20]);
        uint q = at + 4 + s / 16 * 8 + quarter * 2, shift = (j & 3u) * 2;
        return scaled(bits_of(w.v[q], shift, 3u), bits_of(w.v[q + 1], shift, 3u),
                      dm.x * float(sc & 15u), dm.y * float(sc >> 4));
    }
    if (FORMAT == FORMAT_Q3_K) {
        uint at = 27 * b, h = at + quarter * 2;
        float d = tail_scale(w, tail, b) * float(q3k_scale(w, 4 * (at + 24), s / 2));
        uint q = at + 8 + s / 16 * 8 + quarter * 2, shift = (j & 3u) * 2;
        return centred(bits_of(w.v[q], shift, 3u) | bits_of(w.v[h], j, 1u) << 2,
                       bits_of(w.v[q + 1], shift, 3u) | bits_of(w.v[h + 1], j, 1u) << 2, d, 4);
    }
    if (FORMAT == FORMAT_Q4_K || FORMAT == FORMAT_Q5_K) {
        bool five = FORMAT == FORMAT_Q5_K;
        uint at = (five ? 44 : 36) * b;
        uvec4 head = quad_of(w, at);
        vec2 dm = unpackHalf2x16(head.x);
        uvec2 sm = k4_scale_min(head, j), q = pair_of(w, at + (five ? 12 : 4) + j / 2 * 8 + quarter * 2);
        uint shift = (j & 1u) * 4;
        uvec4 x = bits_of(q.x, shift, 15u), y = bits_of(q.y, shift, 15u);
        if (five) {
            uvec2 h = pair_of(w, at + 4 + quarter * 2);
            x |= bits_of(h.x, j, 1u) << 4;
            y |= bits_of(h.y, j, 1u) << 4;
        }
        return scaled(x, y, dm.x * float(sm.x), dm.y * float(sm.y));
    }
    if (FORMAT == FORMAT_Q6_K) {
        uint at = 52 * b, part = j & 3u, sc = byte_of(w, 4 * (at + 48) + s / 2);
        float d = tail_scale(w, tail, b) * float(bitfieldExtract(int(sc), 0, 8));
        uvec2 q = pair_of(w, at + s / 16 * 16 + (part & 1u) * 8 + quarter * 2);
        uvec2 h = pair_of(w, at + 32 + s / 16 * 8 + quarter * 2);
        uint shift = part / 2 * 4;
        return centred(bits_of(q.x, shift, 15u) | bits_of(h.x, 2 * part, 3u) << 4,
                       bits_of(q.y, shift, 15u) | bits_of(h.y, 2 * part, 3u) << 4, d, 32);
    }
    uint at = 34 * b, head = w.v[at]; /* IQ4_XS */
    uint low = w.v[at + 1] >> 4 * j & 15u, high = head >> 16 + 2 * j & 3u;
    float d = half_value(head & 0xffffu) * float(int(low | high << 4) - 32);
    uint q = at + 2 + 4 * j + (quarter & 1u) * 2, shift = quarter / 2 * 4;
    return eight(iq4_levels(bits_of(w.v[q], shift, 15u)) * d,
                 iq4_levels(bits_of(w.v[q + 1], shift, 15u)) * d);
}

/* Formats with grids, and ternary ones: blocks of 256 values. */
eight decode_grid(Words w, uint u, uint tail, uint64_t grid)
{
    uint b = u / 32, s = u % 32, j = s / 4, i = s & 3u;
    if (FORMAT == FORMAT_IQ2_XXS) {
        uint at = 16 * b, v = w.v[at + 2 * j + 1];
        float d = tail_scale(w, tail, b) * 0.125 * float(2 * (v >> 28) + 1);
        uvec2 g = grid_point(grid, GRID_IQ2_XXS + byte_of(w, 4 * at + 8 * j + i));
        return signed_grid(g.x, g.y, even_signs(v >> 7 * i & 127u), d);
    }
    if (FORMAT == FORMAT_IQ2_XS) {
        uint at = 18 * b, q = half_of(w, 2 * at + s);
        uint sc = byte_of(w, 4 * (at + 16) + s / 4) >> 4 * (s / 2 & 1u) & 15u;
        float d = tail_scale(w, tail, b) * 0.125 * float(2 * sc + 1);
        uvec2 g = grid_point(grid, GRID_IQ2_XS + (q & 511u));
        return signed_grid(g.x, g.y, even_signs(q >> 9), d);
    }
    if (FORMAT == FORMAT_IQ2_S) {
        uint at = 20 * b, q = byte_of(w, 4 * at + s) | (byte_of(w, 4 * at + 64 + j) >> 2 * i & 3u) << 8;
        uint sc = byte_of(w, 4 * at + 72 + s / 4) >> 4 * (s / 2 & 1u) & 15u;
        float d = tail_scale(w, tail, b) * 0.125 * float(2 * sc + 1);
        uvec2 g = grid_point(grid, GRID_IQ2_S + q);
        return signed_grid(g.x, g.y, byte_of(w, 4 * at + 32 + s), d);
    }
    if (FORMAT == FORMAT_IQ3_XXS) {
        uint at = 24 * b, v = w.v[at + 16 + j], q = half_of(w, 2 * at + s);
        float d = tail_scale(w, tail, b) * 0.25 * float(2 * (v >> 28) + 1);
        return signed_grid(grid_point(grid, GRID_IQ3_XXS + (q & 255u)).x,
                           grid_point(grid, GRID_IQ3_XXS + (q >> 8)).x,
                           even_signs(v >> 7 * i & 127u), d);
    }
    if (FORMAT == FORMAT_IQ3_S) {
        uint at = 27 * b, q = half_of(w, 2 * at + s), high = byte_of(w, 4 * (at + 16) + j) >> 2 * i;
        uint sc = byte_of(w, 4 * (at + 26) + s / 8) >> (s / 4 & 1u) * 4 & 15u;
        float d = tail_scale(w, tail, b) * float(2 * sc + 1);
        return signed_grid(grid_point(grid, GRID_IQ3_S + (q & 255u | (high & 1u) << 8)).x,
                           grid_point(grid, GRID_IQ3_S + (q >> 8 | (high & 2u) << 7)).x,
                           byte_of(w, 4 * (at + 18) + s), d);
    }
    if (FORMAT == FORMAT_IQ1_S) {
        uint at = 12 * b, h = half_of(w, 2 * (at + 8) + j);
        float d = tail_scale(w, tail, b) * 0.125 * float(2 * (h >> 12 & 7u) + 1);
        uvec2 g = grid_point(grid, GRID_IQ1 + (byte_of(w, 4 * at + s) | (h >> 3 * i & 7u) << 8));
        return shifted_grid(g.x, g.y, (h & 0x8000u) != 0 ? -1 : 1, d);
    }
    if (FORMAT == FORMAT_IQ1_M) {
        uint at = 14 * b, s0 = w.v[at + 12], s1 = w.v[at + 13];
        uint bits = (s0 >> 12 & 15u) | (s0 >> 28) << 4 | (s1 >> 12 & 15u) << 8 | (s1 >> 28) << 12;
        uint sc = half_of(w, 2 * (at + 12) + s / 8) >> 3 * (s / 2 & 3u) & 7u;
        float d = half_value(bits) * 0.125 * float(2 * sc + 1);
        uint h = byte_of(w, 4 * (at + 8) + s / 2) >> 4 * (s & 1u);
        uvec2 g = grid_point(grid, GRID_IQ1 + (byte_of(w, 4 * at + s) | (h & 7u) << 8));
        return shifted_grid(g.x, g.y, (h & 8u) != 0 ? -1 : 1, d);
    }
    if (FORMAT == FORMAT_TQ1_0) {
        uint at = 13 * b, k = 8 * s;
        float d = tail_scale(w, tail, b);
        return eight(d * vec4(tq1_value(w, at, k), tq1_value(w, at, k + 1), tq1_value(w, at, k + 2),
                              tq1_value(w, at, k + 3)),
                     d * vec4(tq1_value(w, at, k + 4), tq1_value(w, at, k + 5),
                              tq1_value(w, at, k + 6), tq1_value(w, at, k + 7)));
    }
    uint q = 16 * b + s / 16 * 8 + i * 2, shift = (j & 3u) * 2; /* TQ2_0 */
    return centred(bits_of(w.v[q], shift, 3u), bits_of(w.v[q + 1], shift, 3u),
                   tail_scale(w, tail, b), 1);
}

/* Values 8u .. 8u + 7 of the row that begins at w. */
eight decode(Words w, uint u, row_layout l)
{
    if (FORMAT <= FORMAT_BF16 || FORMAT == FORMAT_F8_E4M3 || FORMAT == FORMAT_GPTQ4 ||
        FORMAT == FORMAT_NVFP4 || FORMAT == FORMAT_NF4 || FORMAT == FORMAT_FP4)
        return decode_plain(w, u, l);
    if (FORMAT <= FORMAT_Q8_0 || FORMAT == FORMAT_IQ4_NL || FORMAT == FORMAT_MXFP4 ||
        FORMAT == FORMAT_Q1_0 || FORMAT == FORMAT_Q2_0)
        return decode_small(w, u, l.tail);
    if (FORMAT <= FORMAT_IQ4_XS)
        return decode_k(w, u, l.tail);
    return decode_grid(w, u, l.tail, l.grid);
}

/* Eight inputs from x on, of which the first n count; perm: where they lie. */
eight inputs(Floats x, uint64_t perm, uint k, uint n_in)
{
    eight r = eight(vec4(0), vec4(0));
    if (FORMAT == FORMAT_GPTQ4 && perm != 0) {
        Ints p = Ints(perm);
        for (uint i = 0; i < 8 && k + i < n_in; i++) {
            float v = x.v[p.v[k + i]];
            if (i < 4)
                r.a[i] = v;
            else
                r.b[i - 4] = v;
        }
        return r;
    }
    if (k + 8 <= n_in) { /* rows begin at multiples of four values */
        Vectors v = Vectors(uint64_t(x) + 4 * k);
        return eight(v.v[0], v.v[1]);
    }
    for (uint i = 0; k + i < n_in; i++) {
        if (i < 4)
            r.a[i] = x.v[k + i];
        else
            r.b[i - 4] = x.v[k + i];
    }
    return r;
}
