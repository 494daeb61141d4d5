#version 460
/* Rows as bytes for integer dot products: 32 values share a factor, the largest of them / 127. One workgroup per row. */
#include "common.glsl"

layout(push_constant) uniform Push { half_args p; };

shared float most[THREADS];

void main()
{
    uint units = p.width / 8;
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        Words y = Words(p.y + uint64_t(r) * p.ldy);
        Floats scale = floats(p.scale, uint64_t(r) * (p.ldy / 32));
        for (uint u0 = 0; u0 < units; u0 += THREADS) {
            uint u = u0 + TID;
            vec4 a = vec4(0), b = vec4(0);
            if (u < units) {
                Vectors x = Vectors(p.x + 4 * (uint64_t(r) * p.ldx + 8 * u));
                a = x.v[0];
                b = x.v[1];
            }
            vec4 m = max(abs(a), abs(b));
            barrier();
            most[TID] = max(max(m.x, m.y), max(m.z, m.w));
            barrier();
            uint at = TID & ~3u;
            float d = max(max(most[at], most[at + 1]), max(most[at + 2], most[at + 3])) / 127;
            if (u >= units)
                continue;
            float f = d > 0 ? 1 / d : 0;
            ivec4 i = ivec4(roundEven(a * f)), j = ivec4(roundEven(b * f));
            i = clamp(i, -127, 127) & 255;
            j = clamp(j, -127, 127) & 255;
            y.v[2 * u] = uint(i.x | i.y << 8 | i.z << 16 | i.w << 24);
            y.v[2 * u + 1] = uint(j.x | j.y << 8 | j.z << 16 | j.w << 24);
            if ((u & 3u) == 0)
                scale.v[u / 4] = d;
        }
    }
}
