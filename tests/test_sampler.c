/* The sampler: what it does to logits itself, the list of changes for a device, and draws from many
 * candidates. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "sample/sampler.h"

#include <math.h>
#include <string.h>

enum { VOCAB = 500, MAX = 300 };

static uint32_t next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Logits after sampler_pick are the logits after the list, bit by bit or to a rounding. */
static void edits_are_what_pick_does(void **state)
{
    (void)state;
    static const struct sample_params kinds[] = {
        {.temp = 0, .top_p = 1, .repeat_penalty = 1},
        {.temp = 0, .top_p = 1, .repeat_penalty = 1.3f, .repeat_last_n = 8},
        {.temp = 0, .top_p = 1, .repeat_penalty = 0.8f, .repeat_last_n = -1},
        {.temp = 0, .top_p = 1, .repeat_penalty = 1, .presence_penalty = 0.7f},
        {.temp = 0,
         .top_p = 1,
         .repeat_penalty = 1.1f,
         .repeat_last_n = 20,
         .presence_penalty = -0.3f,
         .frequency_penalty = 0.4f},
    };
    const struct logit_bias bias[] = {{3, 2},   {499, -INFINITY}, {3, 1},
                                      {7, 100}, {500, 1},         {-1, 1}};
    uint32_t random = 5;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int n_bias = 0; n_bias <= 6; n_bias += 6) {
            struct sample_params p = kinds[k];
            p.bias = bias;
            p.n_bias = n_bias;
            struct sampler *s = sampler_new(&p, VOCAB);
            for (int i = 0; i < 60; i++)
                sampler_accept(s, (int32_t)(next(&random) % 90), i > 20);
            float own[VOCAB], listed[VOCAB];
            for (int i = 0; i < VOCAB; i++)
                own[i] = listed[i] = (float)(int)(next(&random) % 2001 - 1000) / 100;
            int32_t token = sampler_pick(s, own, NULL);
            struct logit_edit e[MAX];
            int n = sampler_edits(s, e, MAX);
            assert_in_range(n, 0, MAX);
            assert_int_equal(n == 0, k == 0 && n_bias == 0);
            for (int i = 0; i < n; i++) {
                for (int j = 0; j < i; j++)
                    assert_int_not_equal(e[i].token, e[j].token);
                float *l = &listed[e[i].token];
                *l += e[i].bias;
                *l = (*l > 0 ? *l / e[i].repeat : *l * e[i].repeat) - e[i].less;
            }
            int best = 0;
            for (int i = 0; i < VOCAB; i++) {
                assert_true(own[i] == listed[i] || fabsf(own[i] - listed[i]) < 1e-5f);
                best = listed[i] > listed[best] ? i : best;
            }
            assert_int_equal(token, best);
            if (n > 0)
                assert_int_equal(sampler_edits(s, e, n - 1), -1);
            assert_int_equal(sampler_edits(s, e, n), n);
            sampler_free(s);
        }
}

/* The repeat penalty forgets what left its window; frequency counts. */
static void penalties_follow_the_window(void **state)
{
    (void)state;
    struct sample_params p = {
        .top_p = 1, .repeat_penalty = 2, .repeat_last_n = 2, .frequency_penalty = 1};
    struct sampler *s = sampler_new(&p, VOCAB);
    const int32_t tokens[] = {1, 2, 2, 3};
    for (int i = 0; i < 4; i++)
        sampler_accept(s, tokens[i], i > 0);
    float l[VOCAB];
    for (int i = 0; i < VOCAB; i++)
        l[i] = 8;
    sampler_pick(s, l, NULL);
    assert_true(l[0] == 8 && l[1] == 8); /* never seen; out of the window and of the prompt */
    assert_true(l[2] == 2 && l[3] == 3); /* 8 / 2 - 2; 8 / 2 - 1 */
    sampler_free(s);
}

/* A constraint whose mask is the bits at its state; it takes any token. */
static size_t own_words;
static bool own_mask(void *state, uint32_t *bits, struct error *err)
{
    (void)err;
    memcpy(bits, state, own_words * sizeof *bits);
    return true;
}
static bool own_accept(void *state, int32_t token, struct error *err)
{
    (void)state;
    (void)token;
    (void)err;
    return true;
}
static void own_free(void *state)
{
    (void)state;
}

/* Where a constraint allows every token there is no mask, for devices neither; and with one missing there
 * is. */
static void free_text_has_no_mask(void **state)
{
    (void)state;
    uint32_t bits[3] = {UINT32_MAX, UINT32_MAX, 0};
    struct sample_params p = sample_params_default();
    for (int n = 64; n < 80; n++) {
        struct sampler *s = sampler_new(&p, n);
        struct sample_constraint fit = {
            .mask = own_mask, .accept = own_accept, .free = own_free, .state = bits, .n_tokens = n};
        own_words = (size_t)(n + 31) / 32;
        bits[1] = UINT32_MAX;
        bits[2] = (1u << n % 32) - 1;
        sampler_constrain(s, &fit);
        sampler_prepare(s);
        assert_null(sampler_mask(s));
        assert_true(sampler_is_constrained(s) && sampler_has_memory(s));
        bits[n == 64] &= ~(1u << 31); /* token 31 or 63 */
        float logits[80] = {0};
        int32_t banned = n == 64 ? 63 : 31;
        logits[banned] = 50;
        assert_int_equal(sampler_pick(s, logits, NULL), banned);
        sampler_accept(s, banned, true);
        sampler_prepare(s);
        assert_non_null(sampler_mask(s));
        memset(logits, 0, sizeof logits);
        logits[banned] = 50;
        assert_int_not_equal(sampler_pick(s, logits, NULL), banned);
        bits[0] = UINT32_MAX;
        sampler_free(s);
    }
}

/* What is banned is not in the mask: one that is left is forced, and if none is, that is an error, and not
 * token 0 because it happens to fit. */
static void bans_are_masked(void **state)
{
    (void)state;
    struct logit_bias list[] = {{0, -INFINITY}, {5, -INFINITY}, {70, -INFINITY}, {70, 100}};
    struct sample_params p = sample_params_default();
    p.bias = list;
    p.n_bias = 4;
    own_words = 3;
    for (int left = 0; left < 3; left++) {
        uint32_t bits[3] = {1u | 1u << 5, left > 1, 1u << 6 | (left ? 1u << 7 : 0)};
        struct sampler *s = sampler_new(&p, 80);
        struct sample_constraint fit = {.mask = own_mask,
                                        .accept = own_accept,
                                        .free = own_free,
                                        .state = bits,
                                        .n_tokens = 80};
        struct error err = {0};
        sampler_constrain(s, &fit);
        sampler_prepare(s);
        assert_int_equal(sampler_forced(s), left == 1 ? 71 : -1);
        assert_int_equal(sampler_ok(s, &err), left > 0);
        assert_true(left || strstr(err.msg, "logit_bias bans every token"));
        assert_false(sampler_mask(s)[0] || sampler_mask(s)[2] & 1u << 6);
        sampler_free(s);
    }
    uint32_t none[3] = {0, 0, 1u << 16}; /* token 80: there is none */
    struct sampler *s = sampler_new(&p, 80);
    struct error err = {0};
    sampler_constrain(s, &(struct sample_constraint){.mask = own_mask,
                                                     .accept = own_accept,
                                                     .free = own_free,
                                                     .state = none,
                                                     .n_tokens = 96});
    sampler_prepare(s);
    assert_false(sampler_ok(s, &err));
    assert_non_null(strstr(err.msg, "no token of the vocabulary"));
    sampler_free(s);
}

/* Log-probabilities, the best tokens and the largest logit of vocabularies of all sizes, against plain
 * loops in double; ties go to the lower token, NaN is never the best. */
static void passes_find_what_loops_find(void **state)
{
    (void)state;
    static const int sizes[] = {1, 5, 8, 63, 64, 65, 200, 1023, 4096, 131072 + 7, 200003};
    uint32_t random = 9;
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
        for (int odd = 0; odd < 3; odd++) {
            int n = sizes[k], n_top = n < 5 ? n : 5;
            float *l = malloc((size_t)n * sizeof *l);
            for (int i = 0; i < n; i++) /* coarse: there are ties */
                l[i] = (float)(int)(next(&random) % 4001 - 2000) / 100;
            if (odd == 1 && n > 5)
                l[n / 2] = l[n - 1] = NAN;
            if (odd == 2)
                for (int i = 1; i < n; i += 2)
                    l[i] = -INFINITY;
            int best = 0;
            double sum = 0;
            for (int i = 0; i < n; i++)
                best = l[i] > l[best] ? i : best;
            for (int i = 0; i < n; i++)
                sum += isnan(l[i]) ? 0 : exp((double)l[i] - (double)l[best]);
            struct sample_params p = {.top_p = 1, .repeat_penalty = 1, .logprobs = true};
            p.n_top = n_top;
            struct sampler *s = sampler_new(&p, n);
            struct sample_probs probs;
            assert_int_equal(sampler_pick(s, l, &probs), best);
            assert_int_equal(probs.n_top, n_top);
            double last = INFINITY;
            for (int i = 0; i < n_top; i++) {
                int at = probs.top[i].token, before = 0;
                for (int j = 0; j < n; j++)
                    before += l[j] > l[at] || (l[j] == l[at] && j < at);
                assert_int_equal(before, i);
                assert_true(!((double)probs.top[i].logprob > last));
                last = (double)probs.top[i].logprob;
            }
            assert_int_equal(probs.top[0].token, best);
            if (odd == 1 && n > 5)
                assert_true(isnan(probs.logprob)); /* what is broken is not hidden */
            else
                assert_true(fabs((double)probs.logprob + log(sum)) < 1e-5 * (1 + log(sum)));
            sampler_free(s);
            free(l);
        }
}

/* Elements that the sampler has sorted: it calls this one instead of the C library's. */
static size_t n_sorted;
struct comparison {
    int (*of)(const void *, const void *);
};
static int compare_plain(const void *a, const void *b, void *comparison)
{
    return ((const struct comparison *)comparison)->of(a, b);
}
void qsort(void *base, size_t n, size_t size, int (*compare)(const void *, const void *))
{
    n_sorted += n;
    qsort_r(base, n, size, compare_plain, &(struct comparison){compare});
}

struct sorted_logit {
    float logit;
    int32_t id;
};

static int by_logit(const void *a, const void *b, void *unused)
{
    (void)unused;
    const struct sorted_logit *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* The definition: sort all candidates, keep top-k, keep top-p, draw in that order. Without top-k and
 * top-p the order is that of the ids. */
static int32_t pick_sorted(const struct sample_params *p, uint64_t draw, const float *l,
                           int n_vocab, struct sorted_logit *c)
{
    float max = -INFINITY, least = p->min_p > 1e-9f ? p->min_p : 1e-9f;
    int n = 0;
    for (int i = 0; i < n_vocab; i++)
        max = l[i] > max ? l[i] : max;
    for (int i = 0; i < n_vocab; i++)
        if (l[i] >= max + p->temp * logf(least))
            c[n++] = (struct sorted_logit){l[i], i};
    double total = 0, sum = 0;
    bool cut = p->top_k > 0 && p->top_k < n;
    if (cut || p->top_p < 1)
        qsort_r(c, (size_t)n, sizeof *c, by_logit, NULL);
    n = cut ? p->top_k : n;
    for (int i = 0; i < n; i++)
        total += (double)expf((c[i].logit - max) / p->temp);
    for (int i = 0; p->top_p < 1 && i < n; i++) {
        sum += (double)expf((c[i].logit - max) / p->temp);
        if (sum >= (double)p->top_p * total)
            n = i + 1;
    }
    total = p->top_p < 1 && sum > 0 ? sum : total;
    double target = (double)sampler_uniform(p->seed, draw) * total;
    sum = 0;
    for (int i = 0; i < n; i++) {
        sum += (double)expf((c[i].logit - max) / p->temp);
        if (target < sum)
            return c[i].id;
    }
    return c[n - 1].id;
}

/* Logits of several shapes. */
static void fill_logits(int shape, float *l, int n, uint32_t *random)
{
    for (int i = 0; i < n; i++) {
        float a = (float)next(random) / 16777216, b = (float)next(random) / 16777216;
        float bell = sqrtf(-2 * logf(a + 1e-7f)) * cosf(6.2831853f * b);
        static const float steps[] = {0, -0.0f, 1, 1, 2.5f};
        l[i] = shape == 0   ? bell * 2
               : shape == 1 ? roundf(bell * 4) / 4            /* ties */
               : shape == 2 ? 3                               /* one tie of all */
               : shape == 3 ? steps[next(random) % 5]         /* few values, two zeros */
               : shape == 4 ? (i % 97 ? a * 1e-6f : 8 * b)    /* nearly all in one bucket */
               : shape == 5 ? (i % 3 ? bell : -INFINITY)      /* masked */
                            : 20 * a * a - 1e-30f * (float)i; /* all of one sign or tiny */
    }
    if (shape == 5)
        l[n / 2] = NAN;
}

/* A draw from many candidates takes the token that sorting them all would give, and sorts few. */
static void flat_draws_are_sorted_draws(void **state)
{
    (void)state;
    static const struct sample_params kinds[] = {
        {.temp = 5, .top_p = 0.999f},
        {.temp = 5, .top_p = 0.5f},
        {.temp = 1, .top_p = 0.95f},
        {.temp = 0.3f, .top_p = 0.9999f},
        {.temp = 2, .top_p = 1},
        {.temp = 2, .top_p = 1, .top_k = 20000},
        {.temp = 2, .top_p = 0.9f, .top_k = 5000},
        {.temp = 2, .top_p = 0.9f, .top_k = 1000},
        {.temp = 2, .top_p = 1, .top_k = 40},
        {.temp = 0.7f, .top_p = 0.8f, .top_k = 1},
        {.temp = 9, .top_p = 0.95f, .top_k = 1024, .min_p = 0.01f},
        {.temp = 5, .top_p = 0.99f, .min_p = 0.2f},
        {.temp = 1000, .top_p = 1e-6f},
    };
    static const int sizes[] = {1000, 4096, 33333, 151936};
    uint32_t random = 3;
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        int n = sizes[k], draws = n > 100000 ? 1 : n > 10000 ? 4 : 12;
        float *l = malloc((size_t)n * sizeof *l), *own = malloc((size_t)n * sizeof *l);
        struct sorted_logit *c = malloc((size_t)n * sizeof *c);
        for (int shape = 0; shape < 7; shape++)
            for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
                struct sample_params p = kinds[i];
                p.repeat_penalty = 1;
                p.seed = next(&random);
                fill_logits(shape, l, n, &random);
                struct sampler *s = sampler_new(&p, n);
                for (int d = 0; d < draws; d++) {
                    memcpy(own, l, (size_t)n * sizeof *l);
                    n_sorted = 0;
                    int32_t token = sampler_pick_at(s, (uint64_t)d, own, NULL);
                    assert_in_range(n_sorted, 0, 4096);
                    assert_int_equal(token, pick_sorted(&p, (uint64_t)d, l, n, c));
                }
                sampler_free(s);
            }
        free(l);
        free(own);
        free(c);
    }
}

/* ---- the stages of sample_chain.h, against plain arithmetic ---- */

enum { SMALL = 12, DRAWS = 20000 };

struct plain {
    double logit[SMALL];
    bool in[SMALL];
};

/* Probabilities of the tokens that are in. */
static void plain_probs(const struct plain *d, double *p)
{
    double sum = 0;
    for (int i = 0; i < SMALL; i++)
        sum += p[i] = d->in[i] ? exp(d->logit[i]) : 0;
    for (int i = 0; i < SMALL; i++)
        p[i] /= sum;
}

static int plain_count(const struct plain *d)
{
    int n = 0;
    for (int i = 0; i < SMALL; i++)
        n += d->in[i];
    return n;
}

static double plain_entropy(const struct plain *d)
{
    double p[SMALL], h = 0;
    plain_probs(d, p);
    for (int i = 0; i < SMALL; i++)
        h -= p[i] > 0 ? p[i] * log(p[i]) : 0;
    return h;
}

/* Keeps the tokens with the smallest keys until `most` of them or a mass of `mass`. */
static void plain_keep(struct plain *d, const double *key, int most, double mass)
{
    double p[SMALL], sum = 0;
    bool keep[SMALL] = {false};
    plain_probs(d, p);
    for (int k = 0; k < most && sum < mass; k++) {
        int best = -1;
        for (int i = 0; i < SMALL; i++)
            if (d->in[i] && !keep[i] && (best < 0 || key[i] < key[best]))
                best = i;
        if (best < 0)
            break;
        keep[best] = true;
        sum += p[best];
    }
    memcpy(d->in, keep, sizeof keep);
}

static void plain_stage(struct plain *d, int stage, const struct sample_params *p, bool xtc)
{
    double prob[SMALL], key[SMALL], mean = 0, var = 0, h = plain_entropy(d);
    int n = plain_count(d), best = -1, least = -1, above = 0;
    plain_probs(d, prob);
    for (int i = 0; i < SMALL; i++) {
        key[i] = -d->logit[i];
        if (!d->in[i])
            continue;
        mean += d->logit[i] / n;
        best = best < 0 || d->logit[i] > d->logit[best] ? i : best;
        if (prob[i] >= (double)p->xtc_threshold) {
            above++;
            least = least < 0 || prob[i] < prob[least] ? i : least;
        }
    }
    double most = d->logit[best], top = prob[best];
    for (int i = 0; i < SMALL; i++)
        var += d->in[i] ? (d->logit[i] - mean) * (d->logit[i] - mean) / n : 0;
    double t = (double)p->temp, r = (double)p->dynatemp_range;
    if (r > 0) {
        double lo = t > r ? t - r : 0;
        t = lo + (t + r - lo) * pow(h / log(n), (double)p->dynatemp_exponent);
    }
    for (int i = 0; i < SMALL; i++) {
        if (stage == STAGE_TOP_N_SIGMA && p->top_n_sigma > 0)
            d->in[i] &= d->logit[i] >= most - (double)p->top_n_sigma * sqrt(var);
        if (stage == STAGE_TEMPERATURE)
            d->logit[i] /= t;
        if (stage == STAGE_MIN_P)
            d->in[i] &= prob[i] >= (double)p->min_p * top;
        if (stage == STAGE_XTC && xtc && above > 1)
            d->in[i] &= prob[i] < (double)p->xtc_threshold || i == least;
        if (stage == STAGE_TYPICAL)
            key[i] = fabs(-log(prob[i]) - h);
    }
    if (stage == STAGE_TOP_K && p->top_k)
        plain_keep(d, key, p->top_k, 2);
    if (stage == STAGE_TOP_P)
        plain_keep(d, key, SMALL, (double)p->top_p);
    if (stage == STAGE_TYPICAL && p->typical_p > 0 && p->typical_p < 1)
        plain_keep(d, key, SMALL, (double)p->typical_p);
}

static void plain_run(const double *logits, const struct sample_params *p, bool xtc, double *out)
{
    struct plain d;
    uint64_t order = p->order ? p->order : 0x987654321u;
    for (int i = 0; i < SMALL; i++) {
        d.logit[i] = logits[i];
        d.in[i] = true;
    }
    for (; order; order >>= 4)
        plain_stage(&d, (int)(order & 15), p, xtc);
    plain_probs(&d, out);
}

/* Draws have the frequencies p; what cannot be drawn is not. */
static void check_draws(struct sampler *s, const double *logits, const double *p)
{
    int count[SMALL] = {0};
    for (int k = 0; k < DRAWS; k++) {
        float l[SMALL];
        for (int i = 0; i < SMALL; i++)
            l[i] = (float)logits[i];
        count[sampler_pick_at(s, (uint64_t)k, l, NULL)]++;
    }
    for (int i = 0; i < SMALL; i++) {
        assert_true(p[i] > 0 || count[i] == 0);
        assert_true(fabs(count[i] - p[i] * DRAWS) <= 5 * sqrt(p[i] * (1 - p[i]) * DRAWS) + 1);
    }
}

static void stages_draw_what_they_say(void **state)
{
    (void)state;
    static const struct sample_params kinds[] = {
        {.temp = 1, .top_p = 1, .top_n_sigma = 1},
        {.temp = 1.5f, .top_p = 1, .top_n_sigma = 0.7f, .top_k = 4},
        {.temp = 1, .top_p = 1, .typical_p = 0.5f},
        {.temp = 0.7f, .top_p = 0.9f, .typical_p = 0.8f, .min_p = 0.05f},
        {.temp = 1, .top_p = 1, .xtc_probability = 1, .xtc_threshold = 0.1f},
        {.temp = 1, .top_p = 1, .xtc_probability = 0.3f, .xtc_threshold = 0.08f},
        {.temp = 1, .top_p = 1, .xtc_probability = 1, .xtc_threshold = 0.6f},
        {.temp = 1, .top_p = 1, .dynatemp_range = 0.5f, .dynatemp_exponent = 1},
        {.temp = 1.2f, .top_p = 1, .dynatemp_range = 2, .dynatemp_exponent = 1.7f, .top_k = 5},
        /* top_k comes after min_p, and temperature last */
        {.temp = 3,
         .top_p = 0.5f,
         .min_p = 0.1f,
         .top_k = 3,
         .order = STAGE_MIN_P | STAGE_TOP_K << 4 | STAGE_TEMPERATURE << 8},
        {.temp = 2, .top_p = 0.6f, .min_p = 0.3f, .order = STAGE_TOP_P | STAGE_TEMPERATURE << 4},
        {.temp = 2, .top_p = 0.6f, .order = STAGE_TEMPERATURE | STAGE_TOP_P << 4},
    };
    uint32_t random = 11;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        for (int shape = 0; shape < 3; shape++) {
            struct sample_params p = kinds[k];
            double logits[SMALL], with[SMALL], without[SMALL];
            p.repeat_penalty = 1;
            p.seed = 3 + k;
            for (int i = 0; i < SMALL; i++)
                logits[i] =
                    (double)(float)((double)(next(&random) % 4000) / 1000 * (shape + 1) / 2);
            plain_run(logits, &p, true, with);
            plain_run(logits, &p, false, without);
            double share = p.xtc_threshold > 0.5f ? 0 : (double)p.xtc_probability;
            for (int i = 0; i < SMALL; i++)
                with[i] = share * with[i] + (1 - share) * without[i];
            struct sampler *s = sampler_new(&p, SMALL);
            check_draws(s, logits, with);
            sampler_free(s);
        }
}

/* The longest sequence before place `at` that is also at the end of the history. */
static int plain_match(const int32_t *t, int n, int at, int32_t breaker)
{
    int len = 0;
    while (len < at && t[at - 1 - len] == t[n - 1 - len] && t[n - 1 - len] != breaker)
        len++;
    return len;
}

static void dry_lowers_what_would_repeat(void **state)
{
    (void)state;
    enum { LONG = 200, WINDOW = 60, BREAKER = 1 };
    uint32_t random = 21;
    int n_lowered = 0;
    for (int round = 0; round < 30; round++) {
        const int32_t breaker = BREAKER;
        struct sample_params p = {.temp = 1,
                                  .top_p = 1,
                                  .repeat_penalty = 1,
                                  .dry_multiplier = 0.8f,
                                  .dry_base = 1.5f,
                                  .dry_allowed_length = 1 + round % 3,
                                  .dry_last_n = round % 2 ? WINDOW : -1,
                                  .dry_breakers = &breaker,
                                  .n_dry_breakers = 1,
                                  .seed = (uint64_t)round};
        struct sampler *s = sampler_new(&p, SMALL);
        int32_t t[LONG];
        for (int i = 0; i < LONG; i++) {
            t[i] = i > 20 && next(&random) % 8 ? t[i - 7] : (int32_t)(next(&random) % 5);
            sampler_accept(s, t[i], i > 100);
        }
        int from = p.dry_last_n > 0 ? LONG - WINDOW : 0;
        struct plain d;
        double probs[SMALL], logits[SMALL] = {0};
        int longest[SMALL] = {0};
        for (int at = from + 1; at < LONG; at++) {
            int len = plain_match(t + from, LONG - from, at - from, BREAKER);
            if (t[at] != BREAKER && len > longest[t[at]])
                longest[t[at]] = len;
        }
        for (int i = 0; i < SMALL; i++) {
            int over = longest[i] - p.dry_allowed_length;
            d.in[i] = true;
            d.logit[i] = over < 0 ? 0 : -(double)p.dry_multiplier * pow((double)p.dry_base, over);
            n_lowered += over >= 0;
        }
        plain_probs(&d, probs);
        check_draws(s, logits, probs);
        sampler_free(s);
    }
    assert_true(n_lowered > 20);
}

/* Mirostat 2 token by token, and that both versions hold the mean surprise near tau. */
static void mirostat_holds_the_surprise(void **state)
{
    (void)state;
    enum { MANY = 400, LAST = 3000 };
    for (int version = 1; version <= 2; version++) {
        struct sample_params p = {.temp = 1,
                                  .top_p = 0.1f, /* not used */
                                  .repeat_penalty = 1,
                                  .mirostat = version,
                                  .mirostat_tau = 3,
                                  .mirostat_eta = 0.1f,
                                  .seed = 4};
        struct sampler *s = sampler_new(&p, MANY);
        assert_true(sampler_has_memory(s));
        double mu = 6, mean = 0, total = 0, prob[MANY];
        for (int i = 0; i < MANY; i++)
            total += prob[i] = 1 / pow(i + 1, 1.1);
        for (int k = 0; k < LAST; k++) {
            float l[MANY];
            for (int i = 0; i < MANY; i++)
                l[i] = (float)log(prob[i]);
            int32_t token = sampler_pick(s, l, NULL);
            int n = 0;
            double kept = 0, sum = 0;
            while (n < MANY && (n == 0 || -log2(prob[n] / total) <= mu))
                kept += prob[n++];
            int want = 0;
            double target = (double)sampler_uniform(p.seed, (uint64_t)k) * kept;
            while (want < n - 1 && (sum += prob[want]) <= target)
                want++;
            if (version == 2 && k < 200)
                assert_int_equal(token, want);
            mu -= (double)p.mirostat_eta * (-log2(prob[want] / kept) - (double)p.mirostat_tau);
            mean += -log2(prob[token] / total) / LAST;
            sampler_accept(s, token, true);
        }
        assert_true(mean > 2.5 && mean < 4.5); /* all candidates: 5.8 bits */
        sampler_free(s);
    }
}

/* Penalties are a stage: an order without them leaves them out. Greedy choices see them, and DRY. */
static void an_order_has_the_penalties_or_not(void **state)
{
    (void)state;
    for (int with = 0; with < 2; with++)
        for (int dry = 0; dry < 2; dry++) {
            struct sample_params p = {.top_p = 1,
                                      .repeat_penalty = 4,
                                      .repeat_last_n = 8,
                                      .dry_multiplier = 10,
                                      .dry_base = 2,
                                      .dry_allowed_length = 1,
                                      .dry_last_n = -1,
                                      .order = STAGE_TOP_K | (with ? STAGE_PENALTIES << 4 : 0) |
                                               (dry ? STAGE_DRY << 8 : 0)};
            const int32_t tokens[] = {6, 7, 2, 3, 6, 7};
            struct sampler *s = sampler_new(&p, SMALL);
            for (int i = 0; i < 6; i++)
                sampler_accept(s, tokens[i], true);
            float l[SMALL] = {[2] = 9, [4] = 1, [3] = 8};
            assert_int_equal(sampler_pick(s, l, NULL), dry ? 3 : 2);
            float m[SMALL] = {[7] = 9, [4] = 5};
            assert_int_equal(sampler_pick(s, m, NULL), with ? 4 : 7);
            sampler_free(s);
        }
}

static void stages_have_names(void **state)
{
    (void)state;
    static const char *const names[] = {"penalties", "dry",   "top_n_sigma", "top_k", "temperature",
                                        "typ_p",     "top_p", "min_p",       "xtc"};
    static const char letters[] = "edsktypmx";
    for (int i = 0; i < 9; i++) {
        assert_int_equal(sample_stage_named(names[i]), i + 1);
        assert_int_equal(sample_stage_letter(letters[i]), i + 1);
    }
    assert_int_equal(sample_stage_named("nothing"), 0);
    assert_int_equal(sample_stage_letter('i'), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(edits_are_what_pick_does),
        cmocka_unit_test(penalties_follow_the_window),
        cmocka_unit_test(free_text_has_no_mask),
        cmocka_unit_test(bans_are_masked),
        cmocka_unit_test(passes_find_what_loops_find),
        cmocka_unit_test(flat_draws_are_sorted_draws),
        cmocka_unit_test(stages_draw_what_they_say),
        cmocka_unit_test(dry_lowers_what_would_repeat),
        cmocka_unit_test(mirostat_holds_the_surprise),
        cmocka_unit_test(an_order_has_the_penalties_or_not),
        cmocka_unit_test(stages_have_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
