#version 460
/*
 * cos and sin of every row's position, once a step for each RoPE table. Vulkan promises little about sin and cos of large
 * angles, so the angle is first reduced to a quarter turn, with pi / 2 in three parts.
 */
#include "common.glsl"

layout(push_constant) uniform Push { rope_args p; };

vec2 cos_sin(float angle)
{
    float turns = round(angle * 0.636619772);
    precise float x = fma(-turns, 1.5703125, angle);
    x = fma(-turns, 4.837512969970703125e-4, x);
    x = fma(-turns, 7.54978995489188e-8, x);
    float z = x * x;
    float s = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * x + x;
    float c = ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2) * z * z -
              0.5 * z + 1;
    uint quarter = uint(int(turns)) & 3u;
    if ((quarter & 1u) != 0) {
        float t = s;
        s = c;
        c = -t;
    }
    return quarter >= 2 ? -vec2(c, s) : vec2(c, s);
}

void main()
{
    Ints step = Ints(p.step);
    uint n = p.rows * p.half_rot, all = gl_NumWorkGroups.x * THREADS;
    for (uint i = gl_WorkGroupID.x * THREADS + TID; i < n; i += all) {
        uint t = i / p.half_rot, k = i % p.half_rot;
        int pos = step.v[step.v[STEP_POS] + t];
        if (p.plane != 0 && step.v[STEP_HAS_ROPE_POS] != 0)
            pos = step.v[step.v[STEP_ROPE_POS] + 3 * t + Words(p.plane).v[k]];
        vec2 cs = cos_sin(float(pos) * Floats(p.freq).v[k]) * p.mscale;
        Floats to = floats(p.to, 2 * uint64_t(i));
        to.v[0] = cs.x;
        to.v[1] = cs.y;
    }
}
