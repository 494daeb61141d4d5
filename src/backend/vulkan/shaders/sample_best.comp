#version 460
/* The best logit of each part of a row, and the row's counters cleared. Grid: (parts, rows). */
#include "sample.glsl"

void main()
{
    uint part = gl_WorkGroupID.x;
    uvec2 range = part_range(part);
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        Words l = row_logits(r), state = row_state(r);
        uint key = 0, token = NONE;
        for (uint i = range.x + TID; i < range.y; i += THREADS) {
            uint k = key_of(l.v[i]);
            if (k > key) {
                key = k;
                token = i;
            }
        }
        group_best(key, token);
        if (TID == 0) {
            state.v[SAMPLE_BEST + 2 * part] = key;
            state.v[SAMPLE_BEST + 2 * part + 1] = token;
        }
        for (uint i = part * THREADS + TID; i < SAMPLE_TOKENS - SAMPLE_HIST; i += SAMPLE_PARTS * THREADS)
            state.v[SAMPLE_HIST + i] = 0;
    }
}
