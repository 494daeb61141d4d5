#version 460
/*
 * The token of each row: its best, or one drawn from its candidates, in the order in which sample/sampler.c adds them up,
 * so that a seed gives the same token. Flat rows, whose choice depends on more candidates than the list holds, are drawn
 * in the vocabulary's order above a threshold. One workgroup per row.
 */
#include "sample.glsl"

shared uint list_keys[SAMPLE_LIST];
shared uint list_tokens[SAMPLE_LIST];
shared uint found;
shared uint64_t found_sum;

struct draw {
    row_sampler s;
    float top;
    uint least; /* the key of the least candidate */
    Words l;
    int unit;
};

/* total * fraction, rounded up or down */
uint64_t part_of(uint64_t total, uint fraction, bool up)
{
    uint64_t low = (total & 0xffffffffUL) * fraction;
    uint64_t whole = (total >> 32) * fraction + (low >> 32);
    return up && (low & 0xffffffffUL) != 0 ? whole + 1 : whole;
}

uint64_t weigh(draw d, uint key)
{
    return fixed_of(weight_of(key_value(key), d.top, d.s.temp), d.unit);
}

bool comes_first(uint a, uint b, bool by_token)
{
    if (by_token || list_keys[a] == list_keys[b])
        return list_tokens[a] < list_tokens[b];
    return list_keys[a] > list_keys[b];
}

/* Sorts the list: the best first, or by token. */
void sort_list(uint n, bool by_token)
{
    uint size = 1;
    while (size < n)
        size *= 2;
    for (uint i = n + TID; i < size; i += THREADS) {
        list_keys[i] = 0;
        list_tokens[i] = NONE;
    }
    for (uint run = 2; run <= size; run *= 2)
        for (uint gap = run / 2; gap > 0; gap /= 2) {
            barrier();
            for (uint i = TID; i < size; i += THREADS) {
                uint o = i ^ gap;
                if (o < i || comes_first(o, i, by_token) != ((i & run) == 0))
                    continue;
                uint k = list_keys[i], t = list_tokens[i];
                list_keys[i] = list_keys[o];
                list_tokens[i] = list_tokens[o];
                list_keys[o] = k;
                list_tokens[o] = t;
            }
        }
    barrier();
}

/* What the first n of the list weigh. Each invocation has adjacent ones; sums[] has their sums. */
uint64_t list_total(draw d, uint n)
{
    uint each = (n + THREADS - 1) / THREADS;
    uint64_t sum = 0;
    for (uint i = TID * each; i < min(TID * each + each, n); i++)
        sum += weigh(d, list_keys[i]);
    return group_total(sum);
}

/* After list_total: found = how many of the list weigh `goal` or more, n if all do not; found_sum = what they weigh. */
void list_find(draw d, uint n, uint64_t total, uint64_t goal)
{
    uint each = (n + THREADS - 1) / THREADS;
    uint64_t sum = 0;
    goal = goal > 0 ? goal : 1;
    for (uint i = 0; i < TID; i++)
        sum += sums[i];
    barrier();
    if (TID == 0) {
        found = n;
        found_sum = total;
    }
    barrier();
    for (uint i = TID * each; i < min(TID * each + each, n); i++) {
        uint64_t with = sum + weigh(d, list_keys[i]);
        if (sum < goal && with >= goal) {
            found = i + 1;
            found_sum = with;
        }
        sum = with;
    }
    barrier();
}

/* cut: top_k leaves out candidates. total: of all candidates, for a list that has only the best of them; 0 = the list has
 * all that may be drawn. NONE: the list has too few. */
uint draw_listed(draw d, uint n, bool cut, uint64_t total)
{
    sort_list(n, !cut && d.s.top_p == 0);
    n = cut ? d.s.top_k : n;
    uint64_t listed = list_total(d, n);
    if (d.s.top_p != 0) {
        uint64_t goal = part_of(total != 0 ? total : listed, d.s.top_p, true);
        if (listed < goal && total != 0)
            return NONE;
        list_find(d, n, listed, goal);
        listed = found_sum;
        n = found;
        list_total(d, n);
    }
    list_find(d, n, listed, part_of(listed, d.s.random, false) + 1);
    return list_tokens[found - 1];
}

/* Counts the tokens from `key` on, and what they weigh. */
void tally(draw d, uint key, out uint count, out uint64_t mass)
{
    uint n = 0;
    uint64_t m = 0;
    for (uint i = TID; i < p.n_vocab; i += THREADS) {
        uint k = key_of(d.l.v[i]);
        if (k < key)
            continue;
        n++;
        m += weigh(d, k);
    }
    count = uint(group_total(n));
    mass = group_total(m);
}

/* The largest key that `want` tokens reach, or tokens that weigh `goal`. */
uint raise_threshold(draw d, uint key, uint want, uint64_t goal)
{
    uint end = key_of(floatBitsToUint(d.top)) + 1;
    while (end - key > 1) {
        uint middle = key + (end - key) / 2, count;
        uint64_t mass;
        tally(d, middle, count, mass);
        if (want != 0 ? count >= want : mass >= goal)
            key = middle;
        else
            end = middle;
    }
    return key;
}

/* Draws from the tokens of a range, in their order: the one in whose weight `target` falls. total 0: target is a part
 * of what the range weighs. */
uint draw_walking(draw d, uint key, uvec2 range, uint64_t target, bool is_target)
{
    uint each = (range.y - range.x + THREADS - 1) / THREADS;
    uint from = min(range.x + TID * each, range.y), to = min(from + each, range.y);
    uint64_t sum = 0;
    for (uint i = from; i < to; i++) {
        uint k = key_of(d.l.v[i]);
        if (k >= key)
            sum += weigh(d, k);
    }
    uint64_t total = group_total(sum);
    if (!is_target)
        target = part_of(total, d.s.random, false);
    sum = 0;
    for (uint i = 0; i < TID; i++)
        sum += sums[i];
    barrier();
    if (TID == 0)
        found = NONE;
    barrier();
    for (uint i = from; i < to; i++) {
        uint k = key_of(d.l.v[i]);
        if (k < key)
            continue;
        uint64_t with = sum + weigh(d, k);
        if (sum <= target && target < with)
            found = i;
        sum = with;
    }
    barrier();
    return found;
}

uint draw_token(draw d, Words state)
{
    uint n = state.v[SAMPLE_ALL], listed = min(state.v[SAMPLE_LISTED], uint(SAMPLE_LIST));
    bool cut = d.s.top_k > 0 && d.s.top_k < n;
    uint64_t total = 0;
    for (uint i = 0; i < SAMPLE_PARTS; i++)
        total += uint64_t(state.v[SAMPLE_MASS + 2 * i]) | uint64_t(state.v[SAMPLE_MASS + 2 * i + 1]) << 32;
    for (uint i = TID; i < listed; i += THREADS) {
        list_keys[i] = state.v[SAMPLE_TOKENS + 2 * i];
        list_tokens[i] = state.v[SAMPLE_TOKENS + 2 * i + 1];
    }
    barrier();
    bool whole = listed == n || (cut && d.s.top_k <= listed);
    if (whole || (!cut && d.s.top_p != 0 && listed > 0)) {
        d.unit = whole ? LIST_UNIT : WIDE_UNIT;
        uint token = draw_listed(d, listed, cut, whole ? 0 : total);
        if (token != NONE)
            return token;
    }
    d.unit = WIDE_UNIT;
    if (!cut && d.s.top_p == 0) { /* the part in which the draw falls */
        uint64_t target = part_of(total, d.s.random, false);
        uint part = 0;
        for (; part + 1 < SAMPLE_PARTS; part++) {
            uint64_t mass = uint64_t(state.v[SAMPLE_MASS + 2 * part]) |
                            uint64_t(state.v[SAMPLE_MASS + 2 * part + 1]) << 32;
            if (target < mass)
                break;
            target -= mass;
        }
        return draw_walking(d, d.least, part_range(part), target, true);
    }
    uint key = d.least, count;
    if (cut)
        key = raise_threshold(d, key, d.s.top_k, 0);
    if (d.s.top_p != 0) {
        tally(d, key, count, total);
        key = raise_threshold(d, key, 0, part_of(total, d.s.top_p, true));
    }
    return draw_walking(d, key, uvec2(0, p.n_vocab), 0, false);
}

/* The log-probability of the token before bias and penalties. */
void tell(uint r, row_sampler s, uint token)
{
    float raw = uintBitsToFloat(row_logits(r).v[token]);
    barrier();
    if (TID == 0)
        found = NONE;
    barrier();
    for (uint i = TID; i < s.n_edits; i += THREADS)
        if (Words(p.edits).v[EDIT_WORDS * (s.edits_at + i)] == token)
            found = i;
    barrier();
    if (found != NONE)
        raw = Floats(p.raw).v[s.edits_at + found];
    if (TID == 0)
        Floats(p.probs).v[PROBS_WORDS * r] = raw - Floats(p.norms).v[r];
}

void main()
{
    for (uint r = group_id(); r < p.rows; r += gl_NumWorkGroups.x * gl_NumWorkGroups.y) {
        row_sampler s = Samplers(p.samplers).v[r];
        Words state = row_state(r);
        uint key, best;
        row_best(state, key, best);
        uint token = best != NONE ? best : 0;
        if (s.draws != 0 && is_finite(key)) {
            float top = key_value(key);
            draw d = draw(s, top, key_of(floatBitsToUint(top + s.log_floor)), row_logits(r), 0);
            uint drawn = draw_token(d, state);
            token = drawn != NONE ? drawn : token;
        }
        if (TID == 0) {
            Words(p.tokens).v[r] = token;
            Words(p.chosen).v[r] = token;
        }
        if (s.n_top >= 0)
            tell(r, s, token);
        barrier();
    }
}
