#version 460
/* The candidates of rows that draw: how many lie in each bucket of logits, and what each part's weigh. Grid: (parts, rows). */
#include "sample.glsl"

shared uint hist[SAMPLE_BUCKETS];

void main()
{
    uint part = gl_WorkGroupID.x;
    uvec2 range = part_range(part);
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        row_sampler s = Samplers(p.samplers).v[r];
        Words l = row_logits(r), state = row_state(r);
        uint key, token;
        row_best(state, key, token);
        if (s.draws == 0 || !is_finite(key))
            continue;
        float top = key_value(key);
        uint least = key_of(floatBitsToUint(top + s.log_floor)), n = 0;
        uint64_t mass = 0;
        barrier();
        for (uint i = TID; i < SAMPLE_BUCKETS; i += THREADS)
            hist[i] = 0;
        barrier();
        for (uint i = range.x + TID; i < range.y; i += THREADS) {
            uint k = key_of(l.v[i]);
            if (k < least)
                continue;
            float v = key_value(k);
            atomicAdd(hist[bucket_of(v, top, s.log_floor)], 1u);
            mass += fixed_of(weight_of(v, top, s.temp), WIDE_UNIT);
            n++;
        }
        mass = group_total(mass);
        for (uint i = TID; i < SAMPLE_BUCKETS; i += THREADS)
            if (hist[i] != 0)
                atomicAdd(state.v[SAMPLE_HIST + i], hist[i]);
        n = subgroupAdd(n);
        if (subgroupElect() && n != 0)
            atomicAdd(state.v[SAMPLE_ALL], n);
        if (TID == 0) {
            state.v[SAMPLE_MASS + 2 * part] = uint(mass);
            state.v[SAMPLE_MASS + 2 * part + 1] = uint(mass >> 32);
        }
    }
}
