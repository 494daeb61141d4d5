/*
 * Which experts one row takes, and what they weigh, found by a warp: from a router's logits, or
 * from sums that the blocks of the product in front of a router left in its place. moe_gemv.cu
 * chooses by it; batches have ways of their own.
 */
#ifndef STEEL_BACKEND_CUDA_ROUTE_CUH
#define STEEL_BACKEND_CUDA_ROUTE_CUH

#include "backend/cuda/cuda.h"

#include <math.h>

/* How experts are chosen. */
struct route_rule {
    int n_expert, used;
    bool renormalise;
    float scale;
};

/*
 * Logits of a router that has no kernel of its own. They are linear in the residual but for the
 * norm's scalar, so each block of the output projection adds what its 16 columns come to, in
 * integers (of SUM_UNIT), whose sum does not depend on who comes first. Sums of four experts
 * share a sector and are 128 bytes from the next four, so that adding is shared out over the L2.
 */
enum { SUM_EXPERTS = 128, SUM_STRIDE = SUM_WORDS * 4 / SUM_EXPERTS };
#define SUM_UNIT 0x1p-36f
#define SUM_MOST 0x1p19f /* what a block may add: SUM_BLOCKS times that is in range */

struct route_sums {
    uint64_t *sums; /* (SUM_WORDS) NULL: the logits are there */
    uint64_t *next; /* (SUM_WORDS) those of the layer to come, zeroed meanwhile */
    float *squares; /* (n) sums of squares of 16 columns each */
    int n;          /* blocks that add, at most SUM_BLOCKS */
    float inv_n, eps;
};

DEVICE int sum_at(int expert)
{
    return (expert >> 2) * SUM_STRIDE + (expert & 3);
}
DEVICE uint64_t sum_part(float v)
{
    v = fminf(fmaxf(v, -SUM_MOST), SUM_MOST); /* NaN becomes a number, too */
    return (uint64_t)(int64_t)(v * (1.0f / SUM_UNIT));
}
DEVICE float sum_value(uint64_t sum)
{
    return (float)(int64_t)sum * SUM_UNIT;
}
/* 1 / rms of the row; every lane gets it. */
DEVICE float sum_scale(const struct route_sums &r)
{
    float v[4], s = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = 32 * i + lane_id() < r.n ? load_float_l2(r.squares + 32 * i + lane_id()) : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++)
        s += v[i];
    return rsqrtf(warp_sum(s) * r.inv_n + r.eps);
}

/* The experts a row chose, as a warp finds them, largest logit first: every warp for itself,
 * since meeting the others would take longer. The order is that of the logits' upper 32 - BITS
 * bits (their difference from the rest is below what rounding upstream makes of them), then of
 * the lower index: both in one integer, so that one reduction finds the next. PER: logits a lane
 * holds. */
template <int PER, int BITS> struct chooser {
    uint32_t key[PER]; /* PER 4: in order, largest first */
};

template <int PER, int BITS>
DEVICE void chooser_set(struct chooser<PER, BITS> &c, int i, int expert, float logit, int n_expert)
{
    const uint32_t low = (1u << BITS) - 1;
    c.key[i] = expert < n_expert ? (float_order(logit) & ~low) | (low - (uint32_t)expert) : 0;
}

template <int PER, int BITS> DEVICE void chooser_sort(struct chooser<PER, BITS> &c)
{
    auto swap = [&](int i, int j) {
        uint32_t a = c.key[i], b = c.key[j];
        c.key[i] = a > b ? a : b;
        c.key[j] = a > b ? b : a;
    };
    if (PER == 4)
        swap(0, 1), swap(2, 3), swap(0, 2), swap(1, 3), swap(1, 2);
}

template <int PER, int BITS>
DEVICE void chooser_start(struct chooser<PER, BITS> &c, const float *logits, int n_expert)
{
    float v[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        v[i] = i * 32 + lane_id() < n_expert ? load_float_l2(logits + i * 32 + lane_id()) : 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++)
        chooser_set(c, i, i * 32 + lane_id(), v[i], n_expert);
    chooser_sort(c);
}

DEVICE void chooser_start(struct chooser<4, 7> &c, const struct route_sums &r, int n_expert)
{
    const uint4 *at = (const uint4 *)(r.sums + lane_id() * SUM_STRIDE);
    uint4 a = load_l2(at), b = load_l2(at + 1);
    uint64_t sum[4] = {(uint64_t)a.y << 32 | a.x, (uint64_t)a.w << 32 | a.z,
                       (uint64_t)b.y << 32 | b.x, (uint64_t)b.w << 32 | b.z};
#pragma unroll
    for (int i = 0; i < 4; i++)
        chooser_set(c, i, 4 * lane_id() + i, sum_value(sum[i]), n_expert);
    chooser_sort(c);
}

/* The next expert, the same for every lane. */
template <int PER, int BITS> DEVICE int chooser_next(struct chooser<PER, BITS> &c, int n_expert)
{
    const uint32_t low = (1u << BITS) - 1;
    uint32_t best = c.key[0];
    if (PER == 4) {
        best = warp_max_u32(best);
        bool mine = c.key[0] == best;
#pragma unroll
        for (int i = 0; i < PER; i++)
            c.key[i] = mine ? (i + 1 < PER ? c.key[(i + 1) % PER] : 0) : c.key[i];
    } else {
#pragma unroll
        for (int i = 1; i < PER; i++)
            best = c.key[i] > best ? c.key[i] : best;
        best = warp_max_u32(best);
#pragma unroll
        for (int i = 0; i < PER; i++)
            c.key[i] = c.key[i] == best ? 0 : c.key[i];
    }
    return min((int)(low - (best & low)), n_expert - 1);
}

/* The expert chosen as number `pick`; lane k gets number k as *all, of the first `n`. */
template <int PER, int BITS>
DEVICE int choose_from(struct chooser<PER, BITS> &c, const struct route_rule &rule, int pick, int n,
                       int *all)
{
    int found = 0;
    *all = 0;
#pragma unroll 1
    for (int k = 0; k < n; k++) {
        int e = chooser_next(c, rule.n_expert);
        found = k == pick ? e : found;
        *all = k == lane_id() ? e : *all;
    }
    return found;
}

DEVICE int choose(const float *logits, const struct route_rule &rule, int pick, int n, int *all)
{
    if (rule.n_expert <= 128) {
        struct chooser<4, 7> c;
        chooser_start(c, logits, rule.n_expert);
        return choose_from(c, rule, pick, n, all);
    }
    struct chooser<MAX_EXPERTS / 32, 9> c;
    chooser_start(c, logits, rule.n_expert);
    return choose_from(c, rule, pick, n, all);
}
DEVICE int choose_sums(const struct route_sums &sums, const struct route_rule &rule, int pick,
                       int n, int *all)
{
    struct chooser<4, 7> c;
    chooser_start(c, sums, rule.n_expert);
    return choose_from(c, rule, pick, n, all);
}

/* The weight of the expert lane k knows to be number k. SUMS: by them. */
template <bool SUMS>
DEVICE float weigh(const float *logits, const struct route_sums &sums,
                   const struct route_rule &rule, int expert)
{
    int lane = lane_id();
    float scale = SUMS ? sum_scale(sums) : 1.0f;
    auto logit = [&](int e) {
        return SUMS ? sum_value(load_u64_l2(sums.sums + sum_at(e))) * scale
                    : load_float_l2(logits + e);
    };
    float v = logit(expert), top = __shfl_sync(FULL_WARP, v, 0);
    float w = lane < rule.used ? fast_exp(v - top) : 0.0f;
    float total = rule.renormalise ? w : 0.0f;
    if (!rule.renormalise)
#pragma unroll 1
        for (int e = lane; e < rule.n_expert; e += 32)
            total += fast_exp(logit(e) - top);
    return w / warp_sum(total) * rule.scale;
}

/* Which experts a row chose: the order is moe_gemv.cu's, the logits' upper 32 - BITS bits, then the
 * lower index, both in one key (0: no expert). Lane i % 32 holds expert i's; lane k gets the k-th
 * largest. */
template <int BITS> DEVICE uint32_t choice_key(float logit, int expert)
{
    const uint32_t low = (1u << BITS) - 1;
    return (float_order(logit) & ~low) | (low - (uint32_t)expert);
}
template <int PER, int BITS> DEVICE int choose_largest(uint32_t (&key)[PER], int used, int n_expert)
{
    const uint32_t low = (1u << BITS) - 1;
    uint32_t mine = 0;
#pragma unroll 1
    for (int k = 0; k < used; k++) {
        uint32_t best = key[0];
#pragma unroll
        for (int i = 1; i < PER; i++)
            best = key[i] > best ? key[i] : best;
        best = warp_max_u32(best);
        mine = lane_id() == k ? best : mine;
#pragma unroll
        for (int i = 0; i < PER; i++)
            key[i] = key[i] == best ? 0 : key[i];
    }
    return min((int)(low - (mine & low)), n_expert - 1);
}

static inline struct route_rule route_rule_of(const struct shape *s, int n_expert)
{
    struct route_rule r = {n_expert, s->n_expert_used, s->norm_topk, s->expert_scale};
    return r;
}
/* A row's experts, from its logits (lane i % 32 has expert i's, -infinity where there is none):
 * lane k of `used` gets the k-th and its weight. */
template <int PER, int BITS>
DEVICE float route_choice(const float (&v)[PER], const struct route_rule &rule, int *expert)
{
    int lane = lane_id();
    uint32_t key[PER];
    float top = -INFINITY, total = 0.0f, mine = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        key[i] = e < rule.n_expert ? choice_key<BITS>(v[i], e) : 0;
        top = fmaxf(top, v[i]);
    }
    top = warp_max(top);
    int e = choose_largest<PER, BITS>(key, rule.used, rule.n_expert);
#pragma unroll
    for (int i = 0; i < PER; i++) { /* the logit of the chosen: lane e % 32 has it */
        float u = __shfl_sync(FULL_WARP, v[i], e & 31);
        mine = e >> 5 == i ? u : mine;
    }
    float w = lane < rule.used ? fast_exp(mine - top) : 0.0f;
    if (rule.renormalise)
        total = w;
    else
#pragma unroll
        for (int i = 0; i < PER; i++)
            total += fast_exp(v[i] - top);
    total = warp_sum(total);
    *expert = e;
    return w / total * rule.scale;
}

#endif
