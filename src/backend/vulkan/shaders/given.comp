#version 460
/* Adds the values of given rows (batch.embeds) from `at` on to the stream: deepstack. */
#include "common.glsl"

layout(push_constant) uniform Push { given_args p; };

void main()
{
    Ints step = Ints(p.step);
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        uint t = p.narrow != 0 ? uint(step.v[step.v[STEP_OUT_ROWS] + r]) : r;
        int given = step.v[step.v[STEP_TOKENS] + t] - p.n_vocab;
        if (given < 0)
            continue;
        Floats from = floats(p.embeds, uint64_t(given) * p.embed_width + p.at);
        for (uint i = gl_WorkGroupID.x * THREADS + TID; i < p.width; i += gl_NumWorkGroups.x * THREADS)
            floats(p.x, uint64_t(r) * p.ldx).v[i] += from.v[i];
    }
}
