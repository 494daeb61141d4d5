#version 460
/* The given row that a token names (batch.embeds): its first values to `patches`, the next ones to x. */
#include "common.glsl"

layout(push_constant) uniform Push { patch_args p; };

void main()
{
    Ints step = Ints(p.step);
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        int given = step.v[step.v[STEP_TOKENS] + r] - p.n_vocab;
        Floats from = floats(p.embeds, uint64_t(max(given, 0)) * p.embed_width);
        for (uint i = gl_WorkGroupID.x * THREADS + TID; i < p.embed_width; i += gl_NumWorkGroups.x * THREADS) {
            float f = given >= 0 ? from.v[i] : 0;
            if (i < p.width)
                floats(p.patches, uint64_t(r) * p.ldp).v[i] = f;
            else
                floats(p.x, uint64_t(r) * p.ldx).v[i - p.width] = f;
        }
    }
}
