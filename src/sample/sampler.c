/* The host sampler. Owns its token counts and candidate buffer. Allocates nothing after
 * sampler_new, except in its constraint. */
#include "sample/sampler.h"
#include "sample/sample_chain.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/mem.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct sampler {
    struct sample_params p;
    struct logit_bias *bias; /* (p.n_bias) own copy */
    int32_t *by_token;       /* (n_by_token) valid indices into bias, sorted by token */
    struct logit_bias *sums; /* (n_sums) total bias per token, sorted by token */
    int n_by_token, n_sums;
    int n_vocab;
    int32_t *recent; /* (recent_cap) ring of the last tokens, for the repeat penalty */
    int recent_cap;
    int64_t n_seen;
    uint32_t *seen;      /* (n_vocab) occurrences inside the ring; NULL if unused */
    uint32_t *generated; /* (n_vocab) occurrences among generated tokens; NULL if unused */
    int32_t *counted;    /* (n_counted <= n_vocab) every token counted in seen or generated */
    uint8_t *is_counted; /* (n_vocab) */
    int n_counted;
    struct sample_chain *chain; /* stages that only the host has; NULL = none */
    struct candidate *cand;     /* (n_vocab) */
    float *edited;              /* (n_vocab) edited copy if raw logits are needed; else NULL */
    uint64_t counter;
    uint64_t expected;                   /* tokens picked but not accepted yet */
    struct sample_constraint constraint; /* state NULL = none */
    uint32_t *mask;                      /* bits of the tokens allowed next */
    bool masked;                         /* mask is up to date */
    bool allows_every;                   /* mask allows every token */
    int32_t only;                        /* the only token the mask allows, or -1 */
    struct error failed;                 /* error of the constraint; empty = none */
    int32_t pending;                     /* accepted, not yet by the constraint; -1 = none */
    bool (*go_on)(void *arg);            /* of the sampler_prepare_paced under way */
    void *go_on_arg;
    bool given_up; /* by go_on */
};

struct sample_params sample_params_default(void)
{
    return (struct sample_params){.temp = 0.8f,
                                  .top_k = 40,
                                  .top_p = 0.95f,
                                  .min_p = 0.05f,
                                  .repeat_penalty = 1.0f,
                                  .repeat_last_n = 64,
                                  .typical_p = 1,
                                  .xtc_threshold = 0.1f,
                                  .dynatemp_exponent = 1,
                                  .mirostat_tau = 5,
                                  .mirostat_eta = 0.1f,
                                  .dry_base = 1.75f,
                                  .dry_allowed_length = 2,
                                  .dry_last_n = -1};
}

/* Sums the biases of each token, in the order given. */
static void sum_bias(struct sampler *s)
{
    s->n_sums = 0;
    for (int i = 0; i < s->n_by_token; i++) {
        const struct logit_bias *b = &s->bias[s->by_token[i]];
        if (s->by_token[i] >= s->p.n_bias)
            continue;
        if (!s->n_sums || s->sums[s->n_sums - 1].token != b->token)
            s->sums[s->n_sums++] = (struct logit_bias){b->token, 0};
        s->sums[s->n_sums - 1].bias += b->bias;
    }
}

static int compare_entries(const void *a, const void *b, void *list)
{
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    int32_t tx = ((struct logit_bias *)list)[x].token, ty = ((struct logit_bias *)list)[y].token;
    return tx != ty ? (tx > ty) - (tx < ty) : (x > y) - (x < y);
}

static void copy_bias(struct sampler *s, const struct sample_params *p)
{
    size_t n = (size_t)p->n_bias;
    s->bias = mem_zalloc(n, sizeof *s->bias);
    s->by_token = mem_zalloc(n, sizeof *s->by_token);
    s->sums = mem_zalloc(n, sizeof *s->sums);
    if (n)
        memcpy(s->bias, p->bias, n * sizeof *s->bias);
    for (int i = 0; i < p->n_bias; i++)
        if (s->bias[i].token >= 0 && s->bias[i].token < s->n_vocab)
            s->by_token[s->n_by_token++] = i;
    qsort_r(s->by_token, (size_t)s->n_by_token, sizeof *s->by_token, compare_entries, s->bias);
    sum_bias(s);
}

static float bias_of(const struct sampler *s, int32_t token)
{
    int lo = 0, hi = s->n_sums;
    while (lo < hi) {
        int mid = lo + (hi - lo) / 2;
        if (s->sums[mid].token < token)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < s->n_sums && s->sums[lo].token == token ? s->sums[lo].bias : 0;
}

struct sampler *sampler_new(const struct sample_params *p, int n_vocab)
{
    struct sampler *s = mem_zalloc(1, sizeof *s);
    size_t n = (size_t)n_vocab;
    s->p = *p;
    s->n_vocab = n_vocab;
    s->pending = -1;
    copy_bias(s, p);
    s->p.bias = s->bias;
    if (p->repeat_penalty != 1.0f && p->repeat_last_n != 0) {
        s->seen = mem_zalloc(n, sizeof *s->seen);
        s->recent_cap = p->repeat_last_n < 0 ? 0 : p->repeat_last_n; /* 0: unlimited */
        s->recent = mem_zalloc((size_t)s->recent_cap, sizeof *s->recent);
    }
    if (p->presence_penalty != 0 || p->frequency_penalty != 0)
        s->generated = mem_zalloc(n, sizeof *s->generated);
    if (s->seen || s->generated) {
        s->counted = mem_zalloc(n, sizeof *s->counted);
        s->is_counted = mem_zalloc(n, sizeof *s->is_counted);
    }
    s->chain = sample_chain_new(p, n_vocab);
    if (p->temp > 0 || s->chain)
        s->cand = mem_zalloc(n, sizeof *s->cand);
    if (p->logprobs)
        s->edited = mem_zalloc(n, sizeof *s->edited);
    return s;
}

void sampler_free(struct sampler *s)
{
    if (!s)
        return;
    mem_free(s->bias);
    mem_free(s->by_token);
    mem_free(s->sums);
    mem_free(s->recent);
    mem_free(s->seen);
    mem_free(s->generated);
    mem_free(s->counted);
    mem_free(s->is_counted);
    sample_chain_free(s->chain);
    mem_free(s->cand);
    mem_free(s->edited);
    if (s->constraint.state)
        s->constraint.free(s->constraint.state);
    mem_free(s->mask);
    mem_free(s);
}

void sampler_constrain(struct sampler *s, const struct sample_constraint *c)
{
    CHECK(!s->constraint.state, "a sampler has one constraint");
    s->constraint = *c;
    size_t most = (size_t)(c->n_tokens > s->n_vocab ? c->n_tokens : s->n_vocab);
    s->mask = mem_zalloc((most + 31) / 32, sizeof *s->mask);
}

bool sampler_is_constrained(const struct sampler *s)
{
    return s->constraint.state != NULL;
}

/* Returns the only token a mask allows, or -1. */
static int32_t only_token(const uint32_t *mask, int n_vocab)
{
    int32_t only = -1;
    for (int i = 0; i < n_vocab; i += 32) {
        uint32_t bits = mask[i / 32];
        if (!bits)
            continue;
        if (only >= 0 || bits & (bits - 1))
            return -1;
        only = i + __builtin_ctz(bits);
    }
    return only < n_vocab ? only : -1;
}

/* Whether a mask allows every token. */
static bool allows_all(const uint32_t *mask, int n_vocab)
{
    for (int i = 0; i < n_vocab / 32; i++)
        if (mask[i] != UINT32_MAX)
            return false;
    uint32_t rest = (1u << n_vocab % 32) - 1;
    return !rest || (mask[n_vocab / 32] & rest) == rest;
}

/* Whether a mask allows any token. */
static bool allows_some(const uint32_t *mask, int n_vocab)
{
    uint32_t some = 0, rest = (1u << n_vocab % 32) - 1;
    for (int i = 0; i < n_vocab / 32; i++)
        some |= mask[i];
    return some || (rest && mask[n_vocab / 32] & rest);
}

/* Computes the constraint's mask minus banned tokens. *fits: some token satisfies the constraint.
 * Returns false if no token is left or the constraint has failed. */
static bool make_mask(struct sampler *s, bool *fits)
{
    *fits = false;
    if (!s->constraint.mask(s->constraint.state, s->mask, &s->failed)) {
        if (!s->failed.msg[0] && !s->given_up)
            error_set(&s->failed, "the constraint failed without a reason");
        return false;
    }
    s->allows_every = allows_all(s->mask, s->n_vocab);
    *fits = allows_some(s->mask, s->n_vocab);
    for (int i = 0; !s->allows_every && i < s->n_sums; i++)
        if (s->sums[i].bias == -INFINITY)
            s->mask[s->sums[i].token / 32] &= ~(1u << s->sums[i].token % 32);
    return allows_some(s->mask, s->n_vocab);
}

/* Hands the last token to the constraint. False: it does not fit, or this was given up. */
static bool accept_pending(struct sampler *s)
{
    if (s->pending < 0)
        return true;
    bool ok = s->constraint.accept(s->constraint.state, s->pending, &s->failed);
    if (!ok && !s->failed.msg[0] && !s->given_up)
        error_set(&s->failed, "the token does not fit the constraint");
    if (!s->given_up)
        s->pending = -1;
    return ok;
}

static void prepare(struct sampler *s)
{
    s->allows_every = false;
    s->only = -1;
    if (s->failed.msg[0] || !accept_pending(s)) /* the next token will not be accepted */
        return;
    bool fits, left = make_mask(s, &fits);
    if (!left && fits && s->constraint.relax) { /* all tokens that end soonest are banned */
        s->constraint.relax(s->constraint.state);
        left = make_mask(s, &fits);
    }
    if (s->given_up)
        return;
    if (left)
        s->only = only_token(s->mask, s->n_vocab);
    else if (!s->failed.msg[0])
        error_set(&s->failed,
                  fits ? "logit_bias bans every token that fits the constraint after %llu tokens"
                       : "no token of the vocabulary fits the constraint after %llu tokens",
                  (unsigned long long)s->counter);
}

static bool sampler_goes_on(void *arg)
{
    struct sampler *s = arg;
    s->given_up = s->given_up || !s->go_on(s->go_on_arg);
    return !s->given_up;
}

bool sampler_prepare_paced(struct sampler *s, bool (*go_on)(void *arg), void *arg)
{
    struct sample_constraint *c = &s->constraint;
    if (!c->state || s->masked)
        return true;
    s->given_up = false;
    s->go_on = go_on;
    s->go_on_arg = arg;
    if (c->pace)
        c->pace(c->state, go_on ? sampler_goes_on : NULL, s);
    prepare(s);
    if (c->pace)
        c->pace(c->state, NULL, NULL);
    s->masked = !s->given_up;
    return s->masked;
}

static bool one_piece_less(void *arg)
{
    return (*(int *)arg)-- > 0;
}

int sampler_foresee(struct sampler *s, int32_t *tokens, int n, int most, int pieces, int *n_kept)
{
    struct sample_constraint *c = &s->constraint;
    int32_t asked[FORESEE_MOST];
    *n_kept = n;
    if (!c->state || !c->foresee || !s->masked || s->pending >= 0 || s->failed.msg[0] ||
        n > FORESEE_MOST || (!n && s->only < 0))
        return n;
    memcpy(asked, tokens, (size_t)n * sizeof *asked);
    if (c->pace)
        c->pace(c->state, one_piece_less, &pieces);
    int k = c->foresee(c->state, tokens, n, most);
    if (c->pace)
        c->pace(c->state, NULL, NULL);
    *n_kept = k < n ? k : n;
    while (*n_kept > 0 && asked[*n_kept - 1] != tokens[*n_kept - 1])
        --*n_kept; /* another one is forced instead */
    return k;
}

bool sampler_is_prepared(const struct sampler *s)
{
    return !s->constraint.state || s->masked;
}

void sampler_prepare(struct sampler *s)
{
    sampler_prepare_paced(s, NULL, NULL);
}

const uint32_t *sampler_mask(const struct sampler *s)
{
    CHECK(!s->constraint.state || s->masked, "sampler_prepare makes the mask");
    return s->constraint.state && !s->allows_every ? s->mask : NULL;
}

int32_t sampler_forced(const struct sampler *s)
{
    bool known = s->constraint.state && s->masked && !s->failed.msg[0];
    return known && !s->p.logprobs ? s->only : -1;
}

bool sampler_ok(const struct sampler *s, struct error *err)
{
    if (s->failed.msg[0])
        *err = s->failed;
    return !s->failed.msg[0];
}

const struct sample_params *sampler_params(const struct sampler *s)
{
    return &s->p;
}

void sampler_keep_bias(struct sampler *s, int n_bias)
{
    if (n_bias < s->p.n_bias) {
        s->p.n_bias = n_bias;
        sum_bias(s);
    }
}

uint64_t sampler_counter(const struct sampler *s)
{
    return s->counter + s->expected;
}

/* No default case: a field without a case does not compile. */
static bool is_used(const struct sampler *s, enum sample_field f)
{
    const struct sample_params *p = &s->p;
    bool draws = p->temp > 0, dry = p->dry_multiplier != 0;
    switch (f) {
    case SAMPLE_TEMP:
    case SAMPLE_SEED:
        return draws;
    case SAMPLE_TOP_K:
        return draws && p->top_k > 0;
    case SAMPLE_TOP_P:
        return draws && p->top_p < 1;
    case SAMPLE_MIN_P:
        return draws && p->min_p > 0;
    case SAMPLE_REPEAT_PENALTY:
    case SAMPLE_REPEAT_LAST_N:
        return s->seen != NULL;
    case SAMPLE_PRESENCE_PENALTY:
        return p->presence_penalty != 0;
    case SAMPLE_FREQUENCY_PENALTY:
        return p->frequency_penalty != 0;
    case SAMPLE_BIAS:
    case SAMPLE_N_BIAS:
        return s->n_sums > 0;
    case SAMPLE_TYPICAL_P:
        return draws && p->typical_p > 0 && p->typical_p < 1;
    case SAMPLE_TOP_N_SIGMA:
        return draws && p->top_n_sigma > 0;
    case SAMPLE_XTC_PROBABILITY:
    case SAMPLE_XTC_THRESHOLD:
        return draws && p->xtc_probability > 0;
    case SAMPLE_DYNATEMP_RANGE:
    case SAMPLE_DYNATEMP_EXPONENT:
        return draws && p->dynatemp_range > 0;
    case SAMPLE_MIROSTAT:
    case SAMPLE_MIROSTAT_TAU:
    case SAMPLE_MIROSTAT_ETA:
        return draws && p->mirostat != 0;
    case SAMPLE_DRY_MULTIPLIER:
    case SAMPLE_DRY_BASE:
    case SAMPLE_DRY_ALLOWED_LENGTH:
    case SAMPLE_DRY_LAST_N:
        return dry;
    case SAMPLE_DRY_BREAKERS:
    case SAMPLE_N_DRY_BREAKERS:
        return dry && p->n_dry_breakers > 0;
    case SAMPLE_ORDER:
        return p->order != 0;
    case SAMPLE_LOGPROBS:
        return p->logprobs;
    case SAMPLE_N_TOP:
        return p->logprobs && p->n_top > 0;
    case SAMPLE_CONSTRAINT:
        return s->constraint.state != NULL;
    case N_SAMPLE_FIELDS:
        break;
    }
    return false;
}

uint32_t sampler_uses(const struct sampler *s)
{
    uint32_t bits = 0;
    for (int f = 0; f < N_SAMPLE_FIELDS; f++)
        bits |= (uint32_t)is_used(s, (enum sample_field)f) << f;
    return bits;
}

bool sampler_has_memory(const struct sampler *s)
{
    return s->seen || s->generated || s->constraint.state ||
           (s->chain && sample_chain_has_memory(s->chain));
}

void sampler_expect(struct sampler *s)
{
    s->expected++;
}

/* Drops a constraint that allows everything from now on. */
static void drop_if_done(struct sampler *s)
{
    struct sample_constraint *c = &s->constraint;
    if (!c->state || !c->done || !s->masked || s->failed.msg[0] || !c->done(c->state))
        return;
    c->free(c->state);
    c->state = NULL;
}

void sampler_accept(struct sampler *s, int32_t token, bool generated)
{
    if (token < 0 || token >= s->n_vocab)
        return;
    if (s->chain)
        sample_chain_accept(s->chain, token, generated);
    if (s->is_counted && !s->is_counted[token] && (s->seen || generated)) {
        s->is_counted[token] = 1;
        s->counted[s->n_counted++] = token;
    }
    if (s->seen) {
        if (s->recent_cap) {
            int32_t *slot = &s->recent[s->n_seen % s->recent_cap];
            if (s->n_seen >= s->recent_cap)
                s->seen[*slot]--;
            *slot = token;
        }
        s->seen[token]++;
        s->n_seen++;
    }
    if (generated) {
        if (s->generated)
            s->generated[token]++;
        s->counter++;
        s->expected -= s->expected > 0;
    }
    if (generated)
        drop_if_done(s);
    if (s->constraint.state && generated && !s->failed.msg[0]) {
        s->given_up = false;
        accept_pending(s); /* two tokens without a mask between them */
        s->masked = false;
        s->pending = token;
    }
}

static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

float sampler_uniform(uint64_t seed, uint64_t counter)
{
    uint64_t z = mix(mix(seed + 0x9e3779b97f4a7c15u) + (counter + 1) * 0x9e3779b97f4a7c15u);
    return (float)(z >> 40) * 0x1p-24f;
}

/* Effect of the penalties on a counted token: divisor of a positive logit, and subtrahend. */
static float repeat_divisor(const struct sampler *s, int32_t token)
{
    return s->seen && s->seen[token] ? s->p.repeat_penalty : 1.0f;
}

static float penalty_of(const struct sampler *s, int32_t token)
{
    uint32_t n = s->generated ? s->generated[token] : 0;
    return n ? s->p.presence_penalty + s->p.frequency_penalty * (float)n : 0.0f;
}

static float penalised(const struct sampler *s, int32_t token, float logit)
{
    float by = repeat_divisor(s, token);
    return (logit > 0 ? logit / by : logit * by) - penalty_of(s, token);
}

/* Adds the biases. The penalties are a stage of the chain if there is one. */
static void apply_penalties(struct sampler *s, float *logits)
{
    for (int i = 0; i < s->n_sums; i++)
        logits[s->sums[i].token] += s->sums[i].bias;
    for (int i = 0; !s->chain && i < s->n_counted; i++) {
        float *l = &logits[s->counted[i]];
        *l = penalised(s, s->counted[i], *l);
    }
}

/* Linear in the number of edits, except for one binary search per counted token among the
 * biases. */
int sampler_edits(const struct sampler *s, struct logit_edit *out, int max)
{
    int n = 0;
    for (int i = 0; i < s->n_counted; i++) {
        struct logit_edit e = {.token = s->counted[i]};
        e.repeat = repeat_divisor(s, e.token);
        e.less = penalty_of(s, e.token);
        if (e.repeat == 1.0f && e.less == 0)
            continue;
        e.bias = bias_of(s, e.token);
        if (n == max)
            return -1;
        out[n++] = e;
    }
    for (int i = 0; i < s->n_sums; i++) {
        int32_t token = s->sums[i].token;
        if (repeat_divisor(s, token) != 1.0f || penalty_of(s, token) != 0)
            continue; /* counted: already in the list */
        if (n == max)
            return -1;
        out[n++] = (struct logit_edit){token, s->sums[i].bias, 1, 0};
    }
    return n;
}

/* ---- passes over all logits ---- */

/* Per-block maxima, so that a search for the largest logits can skip most blocks. */
enum { SCAN_BLOCKS = 2048, SCAN_MIN_STEP = 64, LANES = 8 };
struct scan {
    float max_of[SCAN_BLOCKS]; /* (n_blocks) maximum of each block, NaN ignored */
    int n_blocks, step, n;
    float max;
};

static inline int scan_end(const struct scan *sc, int block)
{
    int end = (block + 1) * sc->step;
    return end < sc->n ? end : sc->n;
}

/* The loops are also compiled for wider vectors where the CPU has them (CPU_WIDE). Sums are always kept in LANES partial
 * sums, so results are bit-identical for every register width. */
#define LOOP static inline __attribute__((always_inline))

LOOP float largest_loop(const float *l, int n)
{
    float most[LANES], max = -INFINITY;
    for (int k = 0; k < LANES; k++)
        most[k] = -INFINITY;
    int whole = n / LANES * LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int k = 0; k < LANES; k++)
            most[k] = l[i + k] > most[k] ? l[i + k] : most[k];
    for (int k = 0; k < LANES; k++)
        max = most[k] > max ? most[k] : max;
    for (int i = whole; i < n; i++)
        max = l[i] > max ? l[i] : max;
    return max;
}

LOOP float blocks_loop(struct scan *sc, const float *logits)
{
    float max = -INFINITY;
    for (int b = 0; b < sc->n_blocks; b++) {
        int from = b * sc->step;
        sc->max_of[b] = largest_loop(logits + from, scan_end(sc, b) - from);
        max = sc->max_of[b] > max ? sc->max_of[b] : max;
    }
    return max;
}
CPU_WIDE(float, blocks, (struct scan * sc, const float *logits), (sc, logits))

static void scan_logits(struct scan *sc, const float *logits, int n)
{
    sc->step = (n + SCAN_BLOCKS - 1) / SCAN_BLOCKS;
    sc->step = sc->step > SCAN_MIN_STEP ? (sc->step + LANES - 1) / LANES * LANES : SCAN_MIN_STEP;
    sc->n = n;
    sc->n_blocks = (n + sc->step - 1) / sc->step;
    sc->max = blocks(sc, logits);
}

/* Index of the first maximum. NaN is skipped, except at index 0. */
static int32_t scan_first(const struct scan *sc, const float *logits)
{
    for (int b = 0; b < sc->n_blocks && !isnan(logits[0]); b++)
        for (int i = b * sc->step; sc->max_of[b] == sc->max && i < scan_end(sc, b); i++)
            if (logits[i] == sc->max)
                return i;
    return 0;
}

/* Vectors of LANES elements, independent of the register width. */
typedef float floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t ints __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint32_t uints __attribute__((vector_size(LANES * sizeof(uint32_t))));

/* sum(exp(logits - max)), each term at float precision. NaN propagates. */
LOOP double weights_loop(const float *logits, int n, float max)
{
    enum { SUM_TERMS = 256 }; /* terms per float partial sum */
    double sum = 0;
    for (int at = 0; at < n; at += SUM_TERMS) {
        int end = at + SUM_TERMS < n ? at + SUM_TERMS : n;
        floats part = {0};
        for (int i = at; i < end; i += LANES) {
            floats x, low = (floats){0} - 87.0f;
            if (i + LANES <= n)
                memcpy(&x, logits + i, sizeof x);
            else
                for (int k = 0; k < LANES; k++)
                    x[k] = i + k < n ? logits[i + k] : -INFINITY;
            x -= max;
            ints in = x < low, tiny = (ints)low & in;
            x = (floats)(((ints)x & ~in) | tiny);
            floats near = x * 1.44269504f + 12582912.0f; /* nearest integer, in the low bits */
            uints whole = (uints)near;
            near -= 12582912.0f;
            floats r = x - near * 0.693359375f + near * 2.12194440e-4f;
            floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
            y = y * r + 8.3334519073e-3f;
            y = y * r + 4.1665795894e-2f;
            y = y * r + 1.6666665459e-1f;
            y = y * r + 5.0000001201e-1f;
            y = y * r * r + r + 1.0f;
            part += y * (floats)((whole + 127) << 23); /* 2^whole */
        }
        for (int k = 0; k < LANES; k++)
            sum += (double)part[k];
    }
    return sum;
}
CPU_WIDE(double, weights, (const float *logits, int n, float max), (logits, n, max))

/* Log-probability of `token`, and the n best tokens in `top`. */
static float scan_logprobs(const struct scan *sc, const float *logits, int32_t token,
                           struct token_prob *top, int n)
{
    float norm = sc->max + (float)log(weights(logits, sc->n, sc->max));
    int have = 0;
    for (int b = 0; n > 0 && b < sc->n_blocks; b++) {
        if (have == n && !(sc->max_of[b] > top[n - 1].logprob))
            continue;
        for (int i = b * sc->step; i < scan_end(sc, b); i++) {
            if (isnan(logits[i]) || (have == n && !(logits[i] > top[n - 1].logprob)))
                continue;
            int at = have < n ? have++ : n - 1;
            for (; at > 0 && logits[i] > top[at - 1].logprob; at--)
                top[at] = top[at - 1];
            top[at] = (struct token_prob){i, logits[i]};
        }
    }
    for (int i = 0; i < n; i++) /* with fewer than n numbers the remaining entries are NaN */
        top[i] = i < have ? (struct token_prob){top[i].token, top[i].logprob - norm}
                          : (struct token_prob){token, NAN};
    return logits[token] - norm;
}

float sample_logprobs(const float *logits, int n_vocab, int32_t token, struct token_prob *top,
                      int n)
{
    struct scan scan;
    scan_logits(&scan, logits, n_vocab);
    return scan_logprobs(&scan, logits, token, top, n);
}

/* ---- the choice ---- */

/* The nucleus: returns how many of the sorted candidates hold top_p of the total mass of all n.
 * Sorts no more candidates than needed. Each weighs exp((logit - max) / temp). */
static int nucleus(struct candidate *c, int n, float max, float temp, float top_p)
{
    double total = 0;
    for (int i = 0; i < n; i++)
        total += (double)expf((c[i].logit - max) / temp);
    for (int k = 64;; k *= 8) {
        if (k > n)
            k = n;
        candidates_select(c, n, k);
        double sum = 0;
        for (int i = 0; i < k; i++) {
            sum += (double)expf((c[i].logit - max) / temp);
            if (sum >= (double)top_p * total)
                return i + 1;
        }
        if (k == n)
            return n;
    }
}

static void apply_mask(const struct sampler *s, float *logits)
{
    for (int at = 0; at < s->n_vocab; at += 32) {
        uint32_t bits = s->mask[at / 32];
        int n = s->n_vocab - at < 32 ? s->n_vocab - at : 32;
        for (int i = 0; bits != UINT32_MAX && i < n; i++)
            logits[at + i] = bits >> i & 1 ? logits[at + i] : -INFINITY;
    }
}

/* Whether mask, bias or penalties change any logit. */
static bool edits_any(const struct sampler *s)
{
    return (s->constraint.state && !s->allows_every) || s->n_sums || (s->n_counted && !s->chain);
}

static void edit_logits(struct sampler *s, float *logits)
{
    if (s->constraint.state && !s->allows_every)
        apply_mask(s, logits);
    apply_penalties(s, logits);
}

/*
 * Draws from many candidates without sorting them (151,936 take 0.9 ms; sorting took 20 ms). A
 * histogram by logit holds the number and the mass of the candidates of each bucket. A position in
 * the sorted order is found by walking the buckets. Only the candidates of the bucket it falls into
 * are sorted, and a large bucket is divided again first. Ties need no sorting: candidates are
 * collected in the order of their ids.
 */
enum { FLAT_MIN = 1024, BUCKET_BITS = 11, BUCKET_SORT = 256 };

struct logit_histogram {
    int shift; /* bucket of a key relative to `first`: key >> shift */
    uint32_t first;
    int count[1 << BUCKET_BITS];
    double mass[1 << BUCKET_BITS];
};

struct flat_row {
    const float *logits;
    const struct scan *scan;
    float max, temp, floor;   /* floor: the least logit of a candidate */
    struct candidate *bucket; /* (n_vocab) scratch */
    struct logit_histogram all;
};

/* The first n candidates in sorted order, their mass, and the last of them. */
struct mass_prefix {
    int n;
    double mass;
    int32_t last;
};

/* A prefix is long enough with n candidates, or with this mass. */
struct mass_goal {
    int n;
    double mass;
    bool above; /* the mass must exceed `mass`, not only reach it */
};

static bool goal_reached(const struct mass_goal *g, int n, double mass)
{
    return n >= g->n || (g->above ? mass > g->mass : mass >= g->mass);
}

static double flat_weight(const struct flat_row *f, float logit)
{
    return (double)expf((logit - f->max) / f->temp);
}

/* The distance from the largest logit, in representable numbers: ascending in sorted order. */
static uint32_t flat_key(const struct flat_row *f, float logit)
{
    uint32_t bits[2];
    float v[2] = {f->max + 0.0f, logit + 0.0f}; /* no negative zero */
    memcpy(bits, v, sizeof bits);
    for (int i = 0; i < 2; i++)
        bits[i] = bits[i] >> 31 ? ~bits[i] : bits[i] | 1u << 31;
    return bits[0] - bits[1];
}

/* Prepares an empty histogram of keys first .. last. */
static void histogram_begin(struct logit_histogram *h, uint32_t first, uint32_t last)
{
    h->first = first;
    h->shift = 0;
    while ((last - first) >> h->shift >> BUCKET_BITS)
        h->shift++;
    memset(h->count, 0, sizeof h->count);
    memset(h->mass, 0, sizeof h->mass);
}

static inline void histogram_add(struct logit_histogram *h, const struct flat_row *f, float logit)
{
    uint32_t b = (flat_key(f, logit) - h->first) >> h->shift;
    h->count[b]++;
    h->mass[b] += flat_weight(f, logit);
}

/* The bucket in which the goal is reached. Adds the buckets before it to *p. */
static uint32_t histogram_find(const struct logit_histogram *h, const struct mass_goal *g,
                               struct mass_prefix *p)
{
    uint32_t found = 0;
    struct mass_prefix at = *p;
    for (uint32_t b = 0; b < 1u << BUCKET_BITS; b++) {
        if (!h->count[b])
            continue;
        found = b;
        *p = at;
        at.n += h->count[b];
        at.mass += h->mass[b];
        if (goal_reached(g, at.n, at.mass))
            break;
    }
    return found;
}

/* Collects the candidates with keys first .. last; returns their number. */
static int flat_collect(const struct flat_row *f, uint32_t first, uint32_t last)
{
    const struct scan *sc = f->scan;
    int n = 0;
    for (int b = 0; b < sc->n_blocks; b++) {
        if (!(sc->max_of[b] >= f->floor) || flat_key(f, sc->max_of[b]) > last)
            continue;
        for (int i = b * sc->step; i < scan_end(sc, b); i++) {
            float l = f->logits[i];
            if (l >= f->floor && flat_key(f, l) - first <= last - first)
                f->bucket[n++] = (struct candidate){l, i};
        }
    }
    return n;
}

/* The shortest prefix that reaches the goal. */
static struct mass_prefix flat_find(struct flat_row *f, const struct mass_goal *g)
{
    struct logit_histogram part;
    struct mass_prefix p = {0};
    uint32_t b = histogram_find(&f->all, g, &p);
    int shift = f->all.shift;
    uint32_t first = b << shift, last = first + (1u << shift) - 1;
    int n = flat_collect(f, first, last);
    while (n > BUCKET_SORT && shift) {
        histogram_begin(&part, first, last);
        for (int i = 0; i < n; i++)
            histogram_add(&part, f, f->bucket[i].logit);
        shift = part.shift;
        first += histogram_find(&part, g, &p) << shift;
        last = first + (1u << shift) - 1;
        int kept = 0;
        for (int i = 0; i < n; i++)
            if (flat_key(f, f->bucket[i].logit) - first <= last - first)
                f->bucket[kept++] = f->bucket[i];
        n = kept;
    }
    if (shift)
        qsort(f->bucket, (size_t)n, sizeof *f->bucket, candidates_compare);
    for (int i = 0; i < n; i++) {
        p.n++;
        p.mass += flat_weight(f, f->bucket[i].logit);
        p.last = f->bucket[i].id;
        if (goal_reached(g, p.n, p.mass))
            break;
    }
    return p;
}

/* Draws from n candidates with a small top-k or top-p: the same token as choose_sorted. */
static int32_t choose_flat(struct sampler *s, float u, struct flat_row *f, int n)
{
    const struct scan *sc = f->scan;
    double total = 0;
    histogram_begin(&f->all, 0, flat_key(f, f->floor));
    for (int b = 0; b < sc->n_blocks; b++)
        for (int i = b * sc->step; sc->max_of[b] >= f->floor && i < scan_end(sc, b); i++)
            if (f->logits[i] >= f->floor)
                histogram_add(&f->all, f, f->logits[i]);
    for (int b = 0; b < 1 << BUCKET_BITS; b++)
        total += f->all.mass[b];
    if (s->p.top_k > 0 && s->p.top_k < n) {
        struct mass_goal all = {.n = s->p.top_k, .mass = INFINITY};
        struct mass_prefix p = flat_find(f, &all);
        n = p.n;
        total = p.mass;
    }
    if (s->p.top_p < 1) {
        struct mass_goal nucleus = {.n = n, .mass = (double)s->p.top_p * total};
        struct mass_prefix p = flat_find(f, &nucleus);
        n = p.n;
        total = p.mass;
    }
    struct mass_goal drawn = {.n = n, .mass = (double)u * total, .above = true};
    return flat_find(f, &drawn).last;
}

/* Draws from all candidates, in the order of their ids. */
static int32_t choose_any(float u, const struct flat_row *f)
{
    const struct scan *sc = f->scan;
    CHECK(sc->n_blocks > 0 && sc->n_blocks <= SCAN_BLOCKS, "a scan has blocks");
    double sum = 0, before[SCAN_BLOCKS]; /* before: the sum at the start of a block */
    for (int b = 0; b < sc->n_blocks; b++) {
        before[b] = sum;
        for (int i = b * sc->step; sc->max_of[b] >= f->floor && i < scan_end(sc, b); i++)
            if (f->logits[i] >= f->floor)
                sum += flat_weight(f, f->logits[i]);
    }
    double target = (double)u * sum;
    int32_t token = 0;
    int b = sc->n_blocks - 1;
    while (b > 0 && before[b] > target)
        b--;
    for (sum = before[b]; b < sc->n_blocks; b++)
        for (int i = b * sc->step; sc->max_of[b] >= f->floor && i < scan_end(sc, b); i++) {
            if (!(f->logits[i] >= f->floor))
                continue;
            token = i;
            sum += flat_weight(f, f->logits[i]);
            if (target < sum)
                return token;
        }
    return token;
}

/* Draws from the first n entries of s->cand. */
static int32_t choose_sorted(struct sampler *s, float u, float max, int n)
{
    const struct sample_params *p = &s->p;
    if (p->top_k > 0 && p->top_k < n) {
        candidates_select(s->cand, n, p->top_k);
        n = p->top_k;
    }
    if (p->top_p < 1)
        n = nucleus(s->cand, n, max, p->temp, p->top_p);
    double total = 0;
    for (int i = 0; i < n; i++)
        total += (double)expf((s->cand[i].logit - max) / p->temp);
    double target = (double)u * total, sum = 0;
    for (int i = 0; i < n; i++) {
        sum += (double)expf((s->cand[i].logit - max) / p->temp);
        if (target < sum)
            return s->cand[i].id;
    }
    return s->cand[n - 1].id;
}

static int32_t choose_by_chain(struct sampler *s, uint64_t draw, const float *logits, int32_t best)
{
    int n = 0;
    for (int i = 0; i < s->n_vocab; i++)
        if (logits[i] > -INFINITY)
            s->cand[n++] = (struct candidate){logits[i], i};
    return n ? sample_chain_pick(s->chain, s->cand, n, draw, s, penalised) : best;
}

/* Picks a token from edited logits; `scan` belongs to them. */
static int32_t choose_token(struct sampler *s, uint64_t draw, const float *logits,
                            const struct scan *scan)
{
    const struct sample_params *p = &s->p;
    int32_t best = scan_first(scan, logits);
    float max = logits[best];
    if (s->chain && isfinite(max))
        return choose_by_chain(s, draw, logits, best);
    if (p->temp <= 0 || !isfinite(max))
        return best;
    /* Candidates below min-p are never considered. Below 1e-9 of the best, a float draw cannot hit
     * one. */
    float floor_p = p->min_p > 1e-9f ? p->min_p : 1e-9f;
    float floor_logit = max + p->temp * logf(floor_p), u = sampler_uniform(p->seed, draw);
    int n = 0;
    for (int b = 0; b < scan->n_blocks; b++) {
        int from = b * scan->step, end = scan_end(scan, b);
        for (int i = from; scan->max_of[b] >= floor_logit && i < end; i++)
            if (logits[i] >= floor_logit)
                s->cand[n++] = (struct candidate){logits[i], i};
    }
    if (n == 0) /* all logits are NaN */
        return best;
    if (n <= FLAT_MIN || (p->top_k > 0 && p->top_k <= FLAT_MIN))
        return choose_sorted(s, u, max, n);
    struct flat_row f = {.logits = logits,
                         .scan = scan,
                         .max = max,
                         .temp = p->temp,
                         .floor = floor_logit,
                         .bucket = s->cand};
    if (p->top_p >= 1 && (p->top_k <= 0 || p->top_k >= n))
        return choose_any(u, &f);
    return choose_flat(s, u, &f, n);
}

int32_t sampler_pick(struct sampler *s, float *logits, struct sample_probs *probs)
{
    return sampler_pick_at(s, sampler_counter(s), logits, probs);
}

int32_t sampler_pick_at(struct sampler *s, uint64_t draw, float *logits, struct sample_probs *probs)
{
    struct scan raw, own;
    sampler_prepare(s);
    bool edited = edits_any(s), wanted = s->p.logprobs;
    float *l = logits;
    CHECK(!wanted || probs, "a place for log-probabilities");
    if (wanted || !edited)
        scan_logits(&raw, logits, s->n_vocab);
    if (edited) {
        if (wanted) /* log-probabilities are reported for the raw logits */
            l = memcpy(s->edited, logits, (size_t)s->n_vocab * sizeof *logits);
        edit_logits(s, l);
        scan_logits(&own, l, s->n_vocab);
    }
    int32_t token = choose_token(s, draw, l, edited ? &own : &raw);
    if (wanted) {
        int n = s->p.n_top < SAMPLE_MAX_TOP ? s->p.n_top : SAMPLE_MAX_TOP;
        probs->n_top = n < s->n_vocab ? n : s->n_vocab;
        probs->logprob = scan_logprobs(&raw, logits, token, probs->top, probs->n_top);
    }
    return token;
}
