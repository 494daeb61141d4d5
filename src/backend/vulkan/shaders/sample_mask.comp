#version 460
/* Logits outside a row's mask become -inf. Grid: (parts, rows). */
#include "sample.glsl"

void main()
{
    uvec2 range = part_range(gl_WorkGroupID.x);
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        if (Samplers(p.samplers).v[r].masked == 0)
            continue;
        Words l = row_logits(r), mask = Words(p.masks + 4 * uint64_t(r) * p.mask_words);
        for (uint i = range.x + TID; i < range.y; i += THREADS)
            if ((mask.v[i / 32] >> (i & 31u) & 1u) == 0)
                l.v[i] = 0xff800000u;
    }
}
