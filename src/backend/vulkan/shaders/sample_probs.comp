#version 460
/*
 * Log-probabilities of the raw logits, for rows that ask for them: the row's norm, and its best tokens. Each invocation
 * holds the best of its tokens that is not told yet. One workgroup per row.
 */
#include "sample.glsl"

void main()
{
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        int n_top = Samplers(p.samplers).v[r].n_top, have = 0;
        if (n_top < 0)
            continue;
        Words l = row_logits(r), probs = Words(p.probs + 4 * uint64_t(PROBS_WORDS) * r);
        uint mine = 0, my_token = NONE;
        for (uint i = TID; i < p.n_vocab; i += THREADS) {
            uint k = key_of(l.v[i]);
            if (k > mine) {
                mine = k;
                my_token = i;
            }
        }
        uint key = mine, token = my_token;
        group_best(key, token);
        float top = key_value(key);
        uint64_t sum = 0;
        for (uint i = TID; i < p.n_vocab; i += THREADS) {
            uint k = key_of(l.v[i]);
            if (k != 0)
                sum += fixed_of(exp_below(key_value(k) - top), WIDE_UNIT);
        }
        float norm = top + log(fixed_value(group_total(sum), WIDE_UNIT));
        for (; have < n_top && token != NONE; have++) {
            if (TID == 0) {
                probs.v[2 + 2 * have] = token;
                probs.v[3 + 2 * have] = floatBitsToUint(key_value(key) - norm);
            }
            uint owner = token % THREADS, next = 0, next_token = NONE;
            for (uint i = owner + THREADS * TID; i < p.n_vocab; i += THREADS * THREADS) {
                uint k = key_of(l.v[i]);
                if ((k < key || (k == key && i > token)) && k > next) {
                    next = k;
                    next_token = i;
                }
            }
            group_best(next, next_token);
            if (TID == owner) {
                mine = next;
                my_token = next_token;
            }
            key = mine;
            token = my_token;
            group_best(key, token);
        }
        if (TID == 0) {
            Floats(p.norms).v[r] = norm;
            probs.v[1] = uint(have);
        }
        barrier();
    }
}
