#version 460
/*
 * The n_chosen units with the largest scores of a row and group, the lower index of equal ones, as a list of bits; all if there
 * are no more. One workgroup. The threshold is found eight bits of the scores' order at a time.
 */
#include "common.glsl"

layout(push_constant) uniform Push { index_args p; };

shared uint bins[256];
shared uint bits[THREADS / 32];
shared uint equal_of[THREADS];
shared uint found, left;

/* Integers in the order of floats. 0 and -0 are equal. */
uint ordered(float f)
{
    uint u = floatBitsToUint(f + 0.0);
    return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

void main()
{
    Ints step = Ints(p.step);
    uint t = p.first + gl_WorkGroupID.y, group = gl_WorkGroupID.z, each = max(p.block, 1);
    uint n = (uint(step.v[step.v[STEP_POS] + t]) + each) / each;
    bool all = n <= p.n_chosen || step.v[step.v[STEP_SLOT] + t] < 0;
    Floats scores = floats(p.scores, (uint64_t(gl_WorkGroupID.y) * p.n_groups + group) * p.ld_scores);
    Words to = Words(p.bits + 4 * (CHOSEN_WORDS + (uint64_t(t) * p.n_groups + group) * p.ld_bits));
    if (TID == 0) {
        Words head = Words(p.bits);
        head.v[0] = each;
        head.v[1] = p.n_groups;
        head.v[2] = p.ld_bits;
        found = 0;
        left = p.n_chosen; /* of those that are equal to `found` in the bits looked at */
    }
    for (int shift = 24; shift >= 0 && !all; shift -= 8) {
        for (uint i = TID; i < 256; i += THREADS)
            bins[i] = 0;
        barrier();
        for (uint i = TID; i < n; i += THREADS) {
            uint key = ordered(scores.v[i]);
            if (shift == 24 || key >> shift + 8 == found >> shift + 8)
                atomicAdd(bins[key >> shift & 255u], 1);
        }
        barrier();
        if (TID == 0) {
            uint bin = 255;
            while (bin > 0 && bins[bin] < left)
                left -= bins[bin--];
            found |= bin << shift;
        }
        barrier();
    }
    barrier();
    uint taken = 0; /* of those equal to the threshold */
    for (uint base = 0; base < n; base += THREADS) {
        uint i = base + TID, key = i < n && !all ? ordered(scores.v[i]) : 0;
        bool equal = !all && i < n && key == found;
        if (TID < THREADS / 32)
            bits[TID] = 0;
        equal_of[TID] = equal ? 1 : 0;
        barrier();
        uint before = taken, in_chunk = 0;
        for (uint k = 0; k < THREADS && !all; k++) {
            before += k < TID ? equal_of[k] : 0;
            in_chunk += equal_of[k];
        }
        if (i < n && (all || key > found || (equal && before < left)))
            atomicOr(bits[TID / 32], 1u << (TID & 31u));
        taken += in_chunk;
        barrier();
        if (TID < THREADS / 32)
            to.v[base / 32 + TID] = bits[TID];
        barrier();
    }
}
