/* The host sampler. Owns its token counts and candidate buffer. Allocates nothing after
 * sampler_new, except in its constraint. */
#include "sample/sampler.h"
#include "sample/draw.h"
#include "sample/sample_chain.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/mem.h"
#include "base/os.h"

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
    double draw_ns;                      /* sampler_draw_ns */
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
    os_sort(s->by_token, (size_t)s->n_by_token, sizeof *s->by_token, compare_entries, s->bias);
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

double sampler_draw_ns(const struct sampler *s)
{
    return s->draw_ns;
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
    int32_t token = draw_token(&(struct draw){.p = p,
                                              .logits = logits,
                                              .scan = scan,
                                              .max = max,
                                              .u = sampler_uniform(p->seed, draw),
                                              .cand = s->cand});
    return token >= 0 ? token : best;
}

int32_t sampler_pick(struct sampler *s, float *logits, struct sample_probs *probs)
{
    return sampler_pick_at(s, sampler_counter(s), logits, probs);
}

int32_t sampler_pick_at(struct sampler *s, uint64_t draw, float *logits, struct sample_probs *probs)
{
    enum { MEAN_OF = 4 };
    struct scan raw, own;
    sampler_prepare(s);
    int64_t start = clock_ns();
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
    s->draw_ns += ((double)(clock_ns() - start) - s->draw_ns) / MEAN_OF;
    return token;
}
