#version 460
/*
 * Rows as fp16 for products on cooperative matrices, one workgroup per row: times a power of two that brings the largest
 * value to 2^8 to 2^9, and its inverse to `scale`. Values after the row's end, up to ldy, are zeros.
 */
#include "common.glsl"

layout(push_constant) uniform Push { half_args p; };

void main()
{
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        Floats x = floats(p.x, uint64_t(r) * p.ldx);
        Words y = Words(p.y + 2 * uint64_t(r) * p.ldy);
        float most = 0;
        for (uint i = TID; i < p.width; i += THREADS)
            most = max(most, abs(x.v[i]));
        most = group_max(most);
        /* the exponent of most is cleared: most * f is in [2^8, 2^9) */
        int e = clamp(int(floatBitsToUint(most) >> 23), 9, 253);
        float f = uintBitsToFloat(uint(clamp(127 + 8 + 127 - e, 1, 254)) << 23);
        for (uint i = TID; i < p.ldy / 2; i += THREADS) {
            float a = 2 * i < p.width ? x.v[2 * i] : 0, b = 2 * i + 1 < p.width ? x.v[2 * i + 1] : 0;
            y.v[i] = packHalf2x16(vec2(a, b) * f);
        }
        if (TID == 0)
            Floats(p.scale).v[r] = 1 / f;
    }
}
