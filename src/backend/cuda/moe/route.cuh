/*
 * Top-k expert selection and weights, computed by a warp.
 * 1. All paths use one rule: the largest logits (or sigmoids of them, plus a bias: struct
 *    route_rule), compared as whole floats. Ties go to the lower index (0 and -0 are equal).
 * 2. So two paths with the same logits choose the same experts. If they add up in another order,
 *    logits closer than that rounding may swap.
 * 3. Logits come from a router kernel (router.cu), or from sums that the blocks of the preceding
 *    product accumulated instead.
 */
#ifndef STEEL_BACKEND_CUDA_ROUTE_CUH
#define STEEL_BACKEND_CUDA_ROUTE_CUH

#include "backend/cuda/core/cuda.h"

#include <math.h>

/*
 * Logits of a router without a kernel of its own. They are linear in the residual except for the
 * norm's scalar. Each block of the output projection adds the contribution of its 16 columns as an
 * integer multiple of SUM_UNIT, so the sum does not depend on the order of the blocks. Sums of four
 * experts share a sector and are 128 bytes from the next four, to spread the atomics over the L2.
 */
enum { SUM_EXPERTS = 128, SUM_STRIDE = SUM_WORDS * 4 / SUM_EXPERTS };
#define SUM_UNIT 0x1p-36f
#define SUM_MOST 0x1p19f /* largest contribution of a block: SUM_BLOCKS times that is in range */

struct route_sums {
    uint64_t *sums; /* (SUM_WORDS) NULL: use logits */
    uint64_t *next; /* (SUM_WORDS) sums of the next layer, cleared meanwhile */
    float *squares; /* (n) sums of squares of 16 columns each */
    int n;          /* number of contributing blocks, at most SUM_BLOCKS */
    float inv_n, eps;
};

DEVICE int sum_at(int expert)
{
    return (expert >> 2) * SUM_STRIDE + (expert & 3);
}
DEVICE uint64_t sum_part(float v)
{
    v = fminf(fmaxf(v, -SUM_MOST), SUM_MOST); /* also maps NaN to a number */
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

/*
 * The rule of most models, a softmax over the logits of at most 128 experts, has a type and kernels
 * of its own. A choice runs once per kernel, so its time is that of fetching its instructions,
 * including branches not taken. (H200, 64 rows: router_choose takes 10.3 us; with every rule
 * compiled in, 14.5.)
 */
struct plain_rule : route_rule {
};
enum { PLAIN_EXPERTS = 128 };

static inline bool route_is_plain(const struct route_rule &r)
{
    return r.n_expert <= PLAIN_EXPERTS && !r.shared && !r.given && !r.sigmoid && !r.choice_bias &&
           !r.expert_scale;
}
/* Whether the experts also have nothing but SwiGLU without biases. */
static inline bool experts_are_plain(const struct experts *e)
{
    return route_is_plain(e->rule) && e->act.plain && !e->gate_up->bias && !e->down->bias;
}
template <bool PLAIN> struct rule_type {
    typedef struct route_rule type;
};
template <> struct rule_type<true> {
    typedef struct plain_rule type;
};
template <bool PLAIN> DEVICE const typename rule_type<PLAIN>::type &rule_as(const route_rule &r)
{
    return (const typename rule_type<PLAIN>::type &)r;
}
/* Properties of a rule that a plain one does not have. */
DEVICE bool rule_shares(const struct route_rule &r)
{
    return r.shared;
}
DEVICE bool rule_shares(const struct plain_rule &)
{
    return false;
}
DEVICE bool rule_by_logit(const struct route_rule &r) /* chosen by the logit alone */
{
    return !r.sigmoid && !r.choice_bias;
}
DEVICE bool rule_by_logit(const struct plain_rule &)
{
    return true;
}
DEVICE bool rule_by_softmax(const struct route_rule &r) /* weighted by a softmax */
{
    return !r.given && !r.sigmoid;
}
DEVICE bool rule_by_softmax(const struct plain_rule &)
{
    return true;
}

/* Experts to choose from, and number to choose. */
template <class RULE> DEVICE int route_choices(const RULE &rule)
{
    return rule.n_expert - (rule_shares(rule) ? 1 : 0);
}
template <class RULE> DEVICE int route_chosen(const RULE &rule)
{
    return rule.used - (rule_shares(rule) ? 1 : 0);
}

DEVICE float route_sigmoid(float logit)
{
    return fast_divide(1.0f, 1.0f + fast_exp(-logit));
}
DEVICE float route_key(const struct route_rule &rule, int e, float logit)
{
    float p = rule.sigmoid ? route_sigmoid(logit) : logit;
    return p + (rule.choice_bias && e < route_choices(rule) ? rule.choice_bias[e] : 0.0f);
}

/* Logits as integers in the same order, PER per lane; 0: no expert. With four per lane they are
 * sorted, so that only one number per lane is compared. */
template <int PER> struct route_keys {
    uint32_t key[PER];
    int at[PER == 4 ? 4 : 1]; /* expert of key i; if PER is not 4: expert 32 i + lane */
};

template <int PER>
DEVICE void route_set(struct route_keys<PER> &r, int i, int expert, float logit, int n_expert)
{
    r.key[i] = expert < n_expert ? float_order(logit + 0.0f) : 0; /* -0 becomes 0 */
    if (PER == 4)
        r.at[i % 4] = expert;
}

DEVICE void route_sort(struct route_keys<4> &r)
{
    auto swap = [&](int i, int j) {
        uint32_t a = r.key[i], b = r.key[j];
        int x = r.at[i], y = r.at[j];
        bool keep = a > b || (a == b && x < y);
        r.key[i] = keep ? a : b, r.key[j] = keep ? b : a;
        r.at[i] = keep ? x : y, r.at[j] = keep ? y : x;
    };
    swap(0, 1), swap(2, 3), swap(0, 2), swap(1, 3), swap(1, 2);
}
template <int PER> DEVICE void route_sort(struct route_keys<PER> &r)
{
    (void)r;
}

/* Removes and returns the next expert, the same for every lane: the largest key, ties to the lowest
 * index. */
DEVICE int route_next(struct route_keys<4> &r)
{
    uint32_t best = warp_max_u32(r.key[0]);
    uint32_t low = r.key[0] == best ? (uint32_t)(MAX_EXPERTS - r.at[0]) : 0;
    int e = MAX_EXPERTS - (int)warp_max_u32(low);
    bool mine = r.at[0] == e;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        r.key[i] = mine ? (i < 3 ? r.key[(i + 1) & 3] : 0) : r.key[i];
        r.at[i] = mine && i < 3 ? r.at[(i + 1) & 3] : r.at[i];
    }
    return e;
}
template <int PER> DEVICE int route_next(struct route_keys<PER> &r)
{
    uint32_t best = 0, low = 0;
#pragma unroll
    for (int i = 0; i < PER; i++)
        best = r.key[i] > best ? r.key[i] : best;
    best = warp_max_u32(best);
#pragma unroll
    for (int i = PER - 1; i >= 0; i--)
        low = r.key[i] == best ? (uint32_t)(MAX_EXPERTS - i * 32) : low;
    int e = MAX_EXPERTS - (int)warp_max_u32(low ? low - (uint32_t)lane_id() : 0);
#pragma unroll
    for (int i = 0; i < PER; i++)
        r.key[i] = i == e >> 5 && lane_id() == (e & 31) ? 0 : r.key[i];
    return e;
}

/* Lane k gets the k-th of the first n experts. */
template <int PER, class RULE>
DEVICE int route_top(struct route_keys<PER> &r, int n, const RULE &rule)
{
    int mine = 0;
    route_sort(r);
#pragma unroll 1
    for (int k = 0; k < min(n, route_chosen(rule)); k++) {
        int e = route_next(r);
        mine = k == lane_id() ? e : mine;
    }
    mine = rule_shares(rule) && lane_id() == rule.used - 1 ? rule.n_expert - 1 : mine;
    return min(mine, rule.n_expert - 1); /* NaN logits may have selected no expert */
}

/* Like route_top, for a row's logits in registers: v[i] of lane l belongs to expert 32 i + l. */
template <int PER, class RULE> DEVICE int route_choose(const float (&v)[PER], const RULE &rule)
{
    struct route_keys<PER> r;
    if (rule_by_logit(rule)) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            route_set(r, i, i * 32 + lane_id(), v[i], route_choices(rule));
    } else {
#pragma unroll
        for (int i = 0; i < PER; i++)
            route_set(r, i, i * 32 + lane_id(), route_key(rule, i * 32 + lane_id(), v[i]),
                      route_choices(rule));
    }
    return route_top(r, rule.used, rule);
}

/* Like route_choose, for logits in memory or sums; the first n experts. */
template <int PER, class RULE>
DEVICE int route_choose_from(const float *logits, const RULE &rule, int n)
{
    float v[PER];
    struct route_keys<PER> r;
#pragma unroll
    for (int i = 0; i < PER; i++)
        v[i] =
            i * 32 + lane_id() < rule.n_expert ? load_float_l2(logits + i * 32 + lane_id()) : 0.0f;
    if (!rule_by_logit(rule))
#pragma unroll
        for (int i = 0; i < PER; i++)
            v[i] = route_key(rule, i * 32 + lane_id(), v[i]);
#pragma unroll
    for (int i = 0; i < PER; i++)
        route_set(r, i, i * 32 + lane_id(), v[i], route_choices(rule));
    return route_top(r, n, rule);
}
DEVICE int route_choose_first(const float *logits, const struct route_rule &rule, int n)
{
    int from = route_choices(rule);
    return from <= 128   ? route_choose_from<4>(logits, rule, n)
           : from <= 256 ? route_choose_from<8>(logits, rule, n)
                         : route_choose_from<MAX_EXPERTS / 32>(logits, rule, n);
}
DEVICE int route_choose_first(const float *logits, const struct plain_rule &rule, int n)
{
    return route_choose_from<PLAIN_EXPERTS / 32>(logits, rule, n);
}
template <class RULE>
DEVICE int route_choose_first(const struct route_sums &sums, const RULE &rule, int n)
{
    const uint4 *at = (const uint4 *)(sums.sums + lane_id() * SUM_STRIDE);
    uint4 a = load_l2(at), b = load_l2(at + 1);
    uint64_t sum[4] = {(uint64_t)a.y << 32 | a.x, (uint64_t)a.w << 32 | a.z,
                       (uint64_t)b.y << 32 | b.x, (uint64_t)b.w << 32 | b.z};
    struct route_keys<4> r;
#pragma unroll
    for (int i = 0; i < 4; i++)
        route_set(r, i, 4 * lane_id() + i, sum_value(sum[i]), rule.n_expert);
    return route_top(r, n, rule);
}

/* Weight w divided by the total, with the rule's scales; v: the logit of lane k's expert. */
DEVICE float route_scaled(const struct route_rule &rule, int expert, float v, float w, float total)
{
    w = w / total * rule.scale;
    if (rule.expert_scale && lane_id() < route_chosen(rule))
        w *= rule.expert_scale[expert];
    if (rule.shared && lane_id() == rule.used - 1)
        w = rule.gated ? route_sigmoid(v) : 1.0f;
    return w;
}

/* Weights other than a softmax over logits. */
DEVICE float route_weigh_other(const struct route_rule &rule, int expert, float v)
{
    if (rule.given)
        return lane_id() < rule.used ? v : 0.0f;
    float w = lane_id() < route_chosen(rule) ? route_sigmoid(v) : 0.0f;
    return route_scaled(rule, expert, v, w, rule.renormalise ? warp_sum(w) : 1.0f);
}

DEVICE float route_scaled(const struct plain_rule &rule, int, float, float w, float total)
{
    return w / total * rule.scale;
}

/* The weight of lane k's expert, which is number k. logit(e) returns the logit of expert e. */
template <class RULE, class F> DEVICE float route_weigh(const RULE &rule, int expert, F logit)
{
    float v = logit(expert), top = __shfl_sync(FULL_WARP, v, 0);
    if (!rule_by_softmax(rule))
        return route_weigh_other(rule, expert, v);
    float w = lane_id() < route_chosen(rule) ? fast_exp(v - top) : 0.0f, total = w;
    if (!rule.renormalise) {
        total = 0.0f;
#pragma unroll 1
        for (int e = lane_id(); e < route_choices(rule); e += 32)
            total += fast_exp(logit(e) - top);
    }
    return route_scaled(rule, expert, v, w, warp_sum(total));
}

/* Like route_weigh, for logits in registers; missing ones are -infinity. */
template <int PER, class RULE>
DEVICE float route_weigh(const RULE &rule, int expert, const float (&v)[PER])
{
    float mine = 0.0f, total = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++) { /* lane e % 32 has the logit of e */
        float u = __shfl_sync(FULL_WARP, v[i], expert & 31);
        mine = expert >> 5 == i ? u : mine;
    }
    if (!rule_by_softmax(rule))
        return route_weigh_other(rule, expert, mine);
    float top = __shfl_sync(FULL_WARP, mine, 0);
    float w = lane_id() < route_chosen(rule) ? fast_exp(mine - top) : 0.0f;
    if (rule.renormalise)
        total = w;
    else
#pragma unroll
        for (int i = 0; i < PER; i++)
            total += i * 32 + lane_id() < route_choices(rule) ? fast_exp(v[i] - top) : 0.0f;
    return route_scaled(rule, expert, mine, w, warp_sum(total));
}

/*
 * Experts spread over processes (route_rule.spread). All make the same choice in router_select
 * and get the chosen weights as input. So there is no search for the largest, and a row's experts
 * are taken in index order. These kernels are separate instances; experts elsewhere never
 * enter their lists.
 */
enum { NO_EXPERT = 0xffff }; /* replaces an expert's index, in 16 bits */

/* Lane k gets the k-th of the row's experts on this rank, lanes from *here on some valid expert.
 * Weights in registers: v[i] of lane l belongs to expert 32 i + l. */
template <int PER>
DEVICE int route_present(const float (&v)[PER], const struct route_rule &rule, int *here)
{
    int mine = 0, n = 0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        uint32_t some =
            __ballot_sync(FULL_WARP, i * 32 + lane_id() < rule.n_expert && v[i] != -INFINITY);
#pragma unroll 1
        for (; some && n < rule.used; some &= some - 1, n++)
            mine = n == lane_id() ? i * 32 + __ffs((int)some) - 1 : mine;
    }
    *here = n;
    return mine;
}
/* Like route_present, for weights in memory. */
template <int PER>
DEVICE int route_present_in(const float *given, const struct route_rule &rule, int *here)
{
    float v[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        v[i] =
            i * 32 + lane_id() < rule.n_expert ? load_float_l2(given + i * 32 + lane_id()) : 0.0f;
    return route_present(v, rule, here);
}
DEVICE int route_present(const float *given, const struct route_rule &rule, int *here)
{
    return rule.n_expert <= 128 ? route_present_in<4>(given, rule, here)
                                : route_present_in<MAX_EXPERTS / 32>(given, rule, here);
}

#endif
