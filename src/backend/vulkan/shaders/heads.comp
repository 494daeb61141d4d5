#version 460
/*
 * The heads of a projection, one workgroup per row and head: norm, RoPE and the queries' temperature; then q goes to a
 * buffer, k and v go to the cache in its type.
 */
#include "common.glsl"
#include "norms.glsl"
#include "kv.glsl"

layout(push_constant) uniform Push { heads_args p; };

const uint MAX_DIM = 1024;
shared float x[MAX_DIM];
shared float turned[MAX_DIM];

void norm_head()
{
    if (p.kind == KIND_NONE)
        return;
    float mean = 0, sum = 0;
    for (uint i = TID; p.kind == KIND_LAYER && i < p.norm_dim; i += THREADS)
        mean += x[i];
    mean = group_sum(mean) / float(p.norm_dim);
    for (uint i = TID; i < p.norm_dim; i += THREADS)
        sum += (x[i] - mean) * (x[i] - mean);
    sum = group_sum(sum);
    vec2 stats = vec2(mean, 1 / sqrt(sum / float(p.norm_dim) + p.eps));
    barrier();
    for (uint i = TID; i < p.norm_dim; i += THREADS)
        x[i] = norm_value(x[i], stats, i, p.kind, p.gain, p.bias);
    barrier();
}

void rotate(uint t)
{
    Floats cs = floats(p.rope, 2 * uint64_t(t) * p.half_rot);
    bool apart = (p.flags & HEADS_INTERLEAVED) != 0;
    for (uint i = TID; i < p.half_rot; i += THREADS) {
        uint first = p.rope_at + (apart ? 2 * i : i), second = apart ? first + 1 : first + p.half_rot;
        float a = x[first], b = x[second], c = cs.v[2 * i], s = cs.v[2 * i + 1];
        turned[i] = a * c - b * s;
        turned[i + p.half_rot] = b * c + a * s;
    }
    barrier();
    for (uint i = TID; i < 2 * p.half_rot; i += THREADS)
        x[p.rope_at + i] = turned[i];
    barrier();
}

/* Times an orthonormal Hadamard matrix, in runs of the largest power of two that divides dim. */
void turn()
{
    uint run = turn_run(p.dim);
    for (uint half_run = 1; half_run < run; half_run *= 2) {
        barrier();
        for (uint i = TID; i < p.dim / 2; i += THREADS) {
            uint at = i / half_run * 2 * half_run + i % half_run;
            float a = x[at], b = x[at + half_run];
            x[at] = a + b;
            x[at + half_run] = a - b;
        }
    }
    barrier();
    for (uint i = TID; i < p.dim; i += THREADS)
        x[i] *= 1 / sqrt(float(run));
    barrier();
}

uint round_even(float v)
{
    precise float r = v + 12582912.0;
    return floatBitsToUint(r);
}

/* A block of 32 values' scale bits; d: the scale as stored. */
uint block_scale(uint at, bool four, out float d)
{
    float most = 0;
    uint key = 0;
    for (uint i = 0; i < 32; i++) {
        uint a = floatBitsToUint(x[at + i]);
        key = max(key, four ? a << 1 | a >> 31 : a & 0x7fffffffu);
    }
    most = uintBitsToFloat(four ? key >> 1 | key << 31 : key);
    uint bits = half_bits(clamp(most * (four ? -0.125 : 1.0 / 127.0), -65504, 65504));
    d = half_value(bits);
    return bits;
}

uint fp8_bits(float v)
{
    uint bits = floatBitsToUint(v), sign = bits >> 24 & 0x80u, a = bits & 0x7fffffffu;
    a = a > 0x7f800000u ? 0 : min(a, 0x43e00000u);
    float size = uintBitsToFloat(a);
    uint low = round_even(size < 1 ? size * 512 : 0) & 0xffu;
    uint high = (a + 0x7ffffu + (a >> 20 & 1u) >> 20) - (120 << 3);
    return sign | (a < 0x3c800000u ? low : high) & 0x7fu;
}

void store_block(uint64_t tile, uint off, uint block)
{
    float d;
    bool four = p.store - 1 == FORMAT_Q4_0;
    uint bits = block_scale(32 * block, four, d), shift;
    Words s = Words(kv_scale_at(p.store - 1, tile, p.page_len, p.dim, off, block, shift));
    atomicAnd(s.v[0], ~(0xffffu << shift));
    atomicOr(s.v[0], bits << shift);
    Words w = Words(kv_row(p.store - 1, tile, p.dim, off));
    float inverse = d != 0 ? 1 / d : 0;
    for (uint i = 0; i < (four ? 4 : 8); i++) {
        uint word = 0;
        if (four)
            for (uint k = 0; k < 8; k++) {
                float v = clamp(x[32 * block + 8 * i + k] * inverse + 8, 0, 15);
                word |= (round_even(v) & 15u) << 4 * (k / 2 + 4 * (k & 1u));
            }
        else
            for (uint k = 0; k < 4; k++) {
                float v = clamp(x[32 * block + 4 * i + k] * inverse, -127, 127);
                word |= (round_even(v) & 255u) << 8 * k;
            }
        w.v[(four ? 4 : 8) * block + i] = word;
    }
}

void store(uint64_t tile, uint off)
{
    uint type = p.store - 1;
    Words w = Words(kv_row(type, tile, p.dim, off));
    if (type == FORMAT_Q8_0 || type == FORMAT_Q4_0) {
        for (uint b = TID; b < p.dim / 32; b += THREADS)
            store_block(tile, off, b);
        return;
    }
    if (type == FORMAT_F32)
        for (uint i = TID; i < p.dim; i += THREADS)
            w.v[i] = floatBitsToUint(x[i]);
    else if (type == FORMAT_F8_E4M3)
        for (uint i = TID; i < p.dim / 4; i += THREADS)
            w.v[i] = fp8_bits(x[4 * i]) | fp8_bits(x[4 * i + 1]) << 8 |
                     fp8_bits(x[4 * i + 2]) << 16 | fp8_bits(x[4 * i + 3]) << 24;
    else
        for (uint i = TID; i < p.dim / 2; i += THREADS) {
            float a = x[2 * i], b = x[2 * i + 1];
            w.v[i] = type == FORMAT_F16 ? half_bits(a) | half_bits(b) << 16
                                        : bf16_bits(a) | bf16_bits(b) << 16;
        }
}

void main()
{
    Ints step = Ints(p.step);
    uint h = gl_WorkGroupID.x;
    for (uint t = gl_WorkGroupID.y; t < p.rows; t += gl_NumWorkGroups.y) {
        int slot = step.v[step.v[STEP_SLOT] + t];
        if (p.store != 0 && slot < 0)
            continue; /* padding */
        Floats from = floats(p.in_rows, uint64_t(t) * p.ld_in + p.first + h * p.stride);
        barrier();
        for (uint i = TID; i < p.dim; i += THREADS)
            x[i] = from.v[i];
        barrier();
        bool late = (p.flags & HEADS_LATE) != 0 && p.rope != 0;
        if (!late)
            norm_head();
        if (p.rope != 0)
            rotate(t);
        if (late)
            norm_head();
        if (p.temp_beta != 0) {
            int at = step.v[step.v[STEP_POS] + t] + p.temp_offset;
            float warm = 1 + p.temp_beta * log(1 + float(at / p.temp_len));
            for (uint i = TID; i < p.dim; i += THREADS)
                x[i] *= warm;
            barrier();
        }
        if ((p.flags & HEADS_TURN) != 0)
            turn();
        if (p.store == 0) {
            Floats to = floats(p.to, uint64_t(t) * p.ld_to + h * p.dim);
            for (uint i = TID; i < p.dim; i += THREADS)
                to.v[i] = x[i];
        } else {
            uint64_t tile = uint64_t(uint(slot) / p.page_len) * p.n_heads + h;
            store(p.to + tile * kv_tile_bytes(p.store - 1, p.page_len, p.dim), uint(slot) % p.page_len);
        }
    }
}
