#version 460
/* Lists the best candidates of rows that draw: all of them, or those of as many buckets as the list holds. The list is in
 * no order. Grid: (parts, rows). */
#include "sample.glsl"

shared uint counts[THREADS];
shared uint n_buckets; /* those that are listed */

/* How many buckets the list takes: all that fit, but none after those that hold top_k. */
void choose_buckets(Words state, row_sampler s)
{
    const uint each = SAMPLE_BUCKETS / THREADS;
    uint n = 0;
    for (uint i = 0; i < each; i++)
        n += state.v[SAMPLE_HIST + TID * each + i];
    barrier();
    counts[TID] = n;
    if (TID == 0)
        n_buckets = SAMPLE_BUCKETS;
    barrier();
    uint before = 0;
    for (uint i = 0; i < TID; i++)
        before += counts[i];
    for (uint i = 0; i < each; i++) {
        uint with = before + state.v[SAMPLE_HIST + TID * each + i];
        if (s.top_k > 0 && before < s.top_k && with >= s.top_k)
            atomicMin(n_buckets, TID * each + i + 1);
        if (with > SAMPLE_LIST)
            atomicMin(n_buckets, TID * each + i);
        before = with;
    }
    barrier();
}

void main()
{
    uvec2 range = part_range(gl_WorkGroupID.x);
    for (uint r = gl_WorkGroupID.y; r < p.rows; r += gl_NumWorkGroups.y) {
        row_sampler s = Samplers(p.samplers).v[r];
        Words l = row_logits(r), state = row_state(r);
        uint key, token;
        row_best(state, key, token);
        if (s.draws == 0 || !is_finite(key))
            continue;
        uint n = state.v[SAMPLE_ALL];
        if (n > SAMPLE_LIST && s.top_p == 0 && (s.top_k == 0 || s.top_k >= n))
            continue; /* drawn in the vocabulary's order */
        float top = key_value(key);
        uint least = key_of(floatBitsToUint(top + s.log_floor));
        choose_buckets(state, s);
        for (uint i = range.x + TID; i < range.y; i += THREADS) {
            uint k = key_of(l.v[i]);
            if (k < least || bucket_of(key_value(k), top, s.log_floor) >= n_buckets)
                continue;
            uint at = atomicAdd(state.v[SAMPLE_LISTED], 1u);
            if (at < SAMPLE_LIST) {
                state.v[SAMPLE_TOKENS + 2 * at] = k;
                state.v[SAMPLE_TOKENS + 2 * at + 1] = i;
            }
        }
    }
}
