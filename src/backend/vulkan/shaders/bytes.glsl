/*
 * A product's inputs for integer dot products. A unit of 16 values x is 48 bytes: 16 high bytes, 16 low bytes, a factor d
 * and d times the sum of the 16 integers, for formats whose values are d * code - less. x = d * (256 * high + low), which
 * keeps 15 bits of the largest value.
 */
const uint UNIT_BYTES = 48;

struct sixteen {
    vec4 v[4];
};

layout(buffer_reference, std430, buffer_reference_align = 16) writeonly buffer FourWords { uvec4 v[]; };
layout(buffer_reference, std430, buffer_reference_align = 16) writeonly buffer FourFloats { vec4 v[]; };

void store_sixteen(uint64_t x, sixteen s)
{
    FourFloats f = FourFloats(x);
    for (uint i = 0; i < 4; i++)
        f.v[i] = s.v[i];
}

sixteen load_sixteen(uint64_t x)
{
    Vectors f = Vectors(x);
    return sixteen(vec4[4](f.v[0], f.v[1], f.v[2], f.v[3]));
}

/* unit: among those of all rows */
void put_bytes(uint64_t bytes, uint64_t unit, sixteen x)
{
    vec4 m = max(max(abs(x.v[0]), abs(x.v[1])), max(abs(x.v[2]), abs(x.v[3])));
    float d = max(max(m.x, m.y), max(m.z, m.w)) / 32512, f = d > 0 ? 1 / d : 0;
    uint high[4], low[4];
    ivec4 sum = ivec4(0);
    for (uint i = 0; i < 4; i++) {
        ivec4 q = clamp(ivec4(roundEven(x.v[i] * f)), -32512, 32512), h = (q + 128) >> 8, l = q & 255;
        sum += q;
        h &= 255;
        high[i] = uint(h.x | h.y << 8 | h.z << 16 | h.w << 24);
        low[i] = uint(l.x | l.y << 8 | l.z << 16 | l.w << 24);
    }
    FourWords to = FourWords(bytes + UNIT_BYTES * unit);
    to.v[0] = uvec4(high[0], high[1], high[2], high[3]);
    to.v[1] = uvec4(low[0], low[1], low[2], low[3]);
    to.v[2] = floatBitsToUint(vec4(d, d * float(sum.x + sum.y + sum.z + sum.w), 0, 0));
}
