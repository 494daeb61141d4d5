/* See sample_chain.h. Allocates nothing after sample_chain_new. */
#include "sample/sample_chain.h"
#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct sample_chain {
    struct sample_params p;
    uint64_t order;
    int n_vocab;
    /* DRY */
    int32_t *history; /* (window) ring of the last tokens */
    int window;
    int64_t n_seen;
    int32_t *latest;     /* (window) the history, newest first */
    int32_t *common;     /* (window) length of the match with the newest tokens at each place */
    int32_t *repeats;    /* (n_vocab) longest repetition that the token would continue */
    uint8_t *is_breaker; /* (n_vocab) */
    int32_t *touched;    /* (n_touched <= window) tokens with repeats > 0 */
    int n_touched;
    /* mirostat */
    double mu;
    int32_t picked; /* last pick and its surprise in bits; -1 = none */
    double surprise;
};

static const uint64_t default_order = 0x987654321u;

static const struct {
    const char *name;
    char letter;
} stages[N_STAGES_END] = {
    [STAGE_PENALTIES] = {"penalties", 'e'},
    [STAGE_DRY] = {"dry", 'd'},
    [STAGE_TOP_N_SIGMA] = {"top_n_sigma", 's'},
    [STAGE_TOP_K] = {"top_k", 'k'},
    [STAGE_TEMPERATURE] = {"temperature", 't'},
    [STAGE_TYPICAL] = {"typ_p", 'y'},
    [STAGE_TOP_P] = {"top_p", 'p'},
    [STAGE_MIN_P] = {"min_p", 'm'},
    [STAGE_XTC] = {"xtc", 'x'},
};

int sample_stage_named(const char *name)
{
    if (!strcmp(name, "typical_p") || !strcmp(name, "typical"))
        return STAGE_TYPICAL;
    for (int i = 1; i < N_STAGES_END; i++)
        if (!strcmp(stages[i].name, name))
            return i;
    return 0;
}

int sample_stage_letter(char letter)
{
    for (int i = 1; i < N_STAGES_END; i++)
        if (stages[i].letter == letter)
            return i;
    return 0;
}

bool sample_order_add(uint64_t *order, int n, int stage)
{
    for (int i = 0; i < n; i++)
        if ((*order >> 4 * i & 15) == (uint64_t)stage)
            return false;
    *order |= (uint64_t)stage << 4 * n;
    return true;
}

bool sample_order_parse(const char *text, uint64_t *order, struct error *err)
{
    int n = 0;
    bool letters = !strpbrk(text, ";,") && !sample_stage_named(text);
    *order = 0;
    for (const char *s = text; *s; n++) {
        char name[32];
        size_t len = letters ? 1 : strcspn(s, ";,");
        snprintf(name, sizeof name, "%.*s", (int)(len < 31 ? len : 31), s);
        int stage = letters ? sample_stage_letter(*s) : sample_stage_named(name);
        if (!stage)
            return error_set(err,
                             "samplers: '%s' is unknown; known: penalties, dry, top_n_sigma, "
                             "top_k, temperature, typ_p, top_p, min_p, xtc",
                             name);
        if (!sample_order_add(order, n, stage))
            return error_set(err, "samplers: '%s' is there twice", name);
        s += len;
        s += *s == ';' || *s == ',';
    }
    return n > 0 || error_set(err, "samplers: the list is empty");
}

static bool has_stage(uint64_t order, enum sample_stage stage)
{
    for (; order; order >>= 4)
        if ((order & 15) == (uint64_t)stage)
            return true;
    return false;
}

struct sample_chain *sample_chain_new(const struct sample_params *p, int n_vocab)
{
    bool draws = p->temp > 0;
    bool used = p->order || p->dry_multiplier != 0 ||
                (draws && (p->mirostat || p->top_n_sigma > 0 || p->xtc_probability > 0 ||
                           p->dynatemp_range > 0 || (p->typical_p > 0 && p->typical_p < 1)));
    if (!used)
        return NULL;
    struct sample_chain *c = mem_zalloc(1, sizeof *c);
    size_t n = (size_t)n_vocab;
    c->p = *p;
    c->p.bias = NULL;
    c->p.dry_breakers = NULL;
    c->order = p->order ? p->order : default_order;
    c->n_vocab = n_vocab;
    c->mu = 2 * (double)p->mirostat_tau;
    c->picked = -1;
    if (p->dry_multiplier == 0 || !p->dry_last_n || !has_stage(c->order, STAGE_DRY))
        return c;
    c->window = p->dry_last_n > 0 ? p->dry_last_n : SAMPLE_DRY_WINDOW;
    c->history = mem_zalloc((size_t)c->window, sizeof *c->history);
    c->latest = mem_zalloc((size_t)c->window, sizeof *c->latest);
    c->common = mem_zalloc((size_t)c->window, sizeof *c->common);
    c->touched = mem_zalloc((size_t)c->window, sizeof *c->touched);
    c->repeats = mem_zalloc(n, sizeof *c->repeats);
    c->is_breaker = mem_zalloc(n, sizeof *c->is_breaker);
    for (int i = 0; i < p->n_dry_breakers; i++)
        if (p->dry_breakers[i] >= 0 && p->dry_breakers[i] < n_vocab)
            c->is_breaker[p->dry_breakers[i]] = 1;
    return c;
}

void sample_chain_free(struct sample_chain *c)
{
    if (!c)
        return;
    mem_free(c->history);
    mem_free(c->latest);
    mem_free(c->common);
    mem_free(c->touched);
    mem_free(c->repeats);
    mem_free(c->is_breaker);
    mem_free(c);
}

bool sample_chain_has_memory(const struct sample_chain *c)
{
    return c->history || (c->p.temp > 0 && c->p.mirostat);
}

void sample_chain_accept(struct sample_chain *c, int32_t token, bool generated)
{
    if (c->history)
        c->history[c->n_seen++ % c->window] = token;
    if (generated && token == c->picked)
        c->mu -= (double)c->p.mirostat_eta * (c->surprise - (double)c->p.mirostat_tau);
    c->picked = -1;
}

/* common[k]: how many tokens before place k equal the newest ones (Z-algorithm). */
static void match_newest(struct sample_chain *c, int n)
{
    const int32_t *t = c->latest;
    int from = 0, end = 0; /* the match that reaches furthest: t[from..end) = t[0..end - from) */
    for (int k = 1; k < n; k++) {
        int len = k < end ? (c->common[k - from] < end - k ? c->common[k - from] : end - k) : 0;
        while (k + len < n && t[k + len] == t[len])
            len++;
        c->common[k] = len;
        if (k + len > end) {
            from = k;
            end = k + len;
        }
    }
}

/* For every token that once followed the newest tokens: the length of the longest such sequence. */
static void find_repeats(struct sample_chain *c)
{
    int n = c->n_seen < c->window ? (int)c->n_seen : c->window, most = 0;
    for (int i = 0; i < n; i++)
        c->latest[i] = c->history[(c->n_seen - 1 - i) % c->window];
    while (most < n && !c->is_breaker[c->latest[most]]) /* nothing repeats across a breaker */
        most++;
    c->n_touched = 0;
    if (most < c->p.dry_allowed_length)
        return;
    match_newest(c, n);
    for (int k = 1; k < n; k++) {
        int len = c->common[k] < most ? c->common[k] : most;
        int32_t follower = c->latest[k - 1];
        if (len < c->p.dry_allowed_length || len <= c->repeats[follower] || c->is_breaker[follower])
            continue;
        if (!c->repeats[follower])
            c->touched[c->n_touched++] = follower;
        c->repeats[follower] = len;
    }
}

static void stage_dry(struct sample_chain *c, struct candidate *l, int n)
{
    if (!c->history)
        return;
    find_repeats(c);
    for (int i = 0; c->n_touched && i < n; i++) {
        int len = c->repeats[l[i].id];
        if (!len)
            continue;
        double by = pow((double)c->p.dry_base, len - c->p.dry_allowed_length);
        double less = (double)c->p.dry_multiplier * (by < 1e30 ? by : 1e30);
        l[i].logit = (float)((double)l[i].logit - less);
    }
    for (int i = 0; i < c->n_touched; i++)
        c->repeats[c->touched[i]] = 0;
}

static float largest(const struct candidate *l, int n)
{
    float max = l[0].logit;
    for (int i = 1; i < n; i++)
        max = l[i].logit > max ? l[i].logit : max;
    return max;
}

/* The sum of exp(logit - max). */
static double sum_weights(const struct candidate *l, int n, float max)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += exp((double)l[i].logit - (double)max);
    return sum;
}

/* The entropy in nats. */
static double entropy(const struct candidate *l, int n)
{
    float max = largest(l, n);
    double norm = log(sum_weights(l, n, max)) + (double)max, h = 0;
    for (int i = 0; i < n; i++) {
        double logp = (double)l[i].logit - norm, p = exp(logp);
        h -= p > 0 ? p * logp : 0;
    }
    return h;
}

/* Keeps logits of at least `floor`. */
static int keep_from(struct candidate *l, int n, double floor)
{
    int kept = 0;
    for (int i = 0; i < n; i++)
        if ((double)l[i].logit >= floor)
            l[kept++] = l[i];
    return kept;
}

static int stage_top_n_sigma(const struct sample_chain *c, struct candidate *l, int n)
{
    double mean = 0, var = 0, max = (double)largest(l, n);
    if (c->p.top_n_sigma <= 0)
        return n;
    for (int i = 0; i < n; i++)
        mean += (double)l[i].logit / n;
    for (int i = 0; i < n; i++)
        var += ((double)l[i].logit - mean) * ((double)l[i].logit - mean) / n;
    return keep_from(l, n, max - (double)c->p.top_n_sigma * sqrt(var));
}

static int stage_top_k(struct candidate *l, int n, int k)
{
    if (k <= 0 || k >= n)
        return n;
    candidates_select(l, n, k);
    return k;
}

static int stage_temperature(const struct sample_chain *c, struct candidate *l, int n)
{
    double t = (double)c->p.temp, range = (double)c->p.dynatemp_range;
    if (range > 0 && n > 1) {
        double lo = t > range ? t - range : 0, share = entropy(l, n) / log(n);
        t = lo + (t + range - lo) * pow(share, (double)c->p.dynatemp_exponent);
    }
    if (!(t > 1e-6)) { /* certain: the best alone is left */
        candidates_select(l, n, 1);
        return 1;
    }
    float max = largest(l, n); /* kept as it is, so that no logit overflows */
    for (int i = 0; i < n; i++)
        l[i].logit = (float)(((double)l[i].logit - (double)max) / t);
    return n;
}

/* Keeps the candidates whose surprise is nearest to the entropy, until they have a mass of p. In
 * sorted order they are neighbours. */
static int stage_typical(const struct sample_chain *c, struct candidate *l, int n)
{
    double p = (double)c->p.typical_p, sum = 0;
    if (!(p > 0 && p < 1))
        return n;
    double h = entropy(l, n);
    candidates_select(l, n, n);
    double norm = log(sum_weights(l, n, l[0].logit)) + (double)l[0].logit;
    int end = 0;
    while (end < n && norm - (double)l[end].logit < h)
        end++;
    int first = end; /* kept: [first, end) */
    while (first > 0 || end < n) {
        double above = first > 0 ? h - (norm - (double)l[first - 1].logit) : INFINITY;
        double below = end < n ? norm - (double)l[end].logit - h : INFINITY;
        double logit = (double)(above <= below ? l[--first] : l[end++]).logit;
        sum += exp(logit - norm);
        if (sum > p)
            break;
    }
    memmove(l, l + first, (size_t)(end - first) * sizeof *l);
    return end - first;
}

static int stage_top_p(const struct sample_chain *c, struct candidate *l, int n)
{
    double sum = 0;
    if (c->p.top_p >= 1)
        return n;
    float max = largest(l, n);
    double total = sum_weights(l, n, max);
    for (int k = 64;; k *= 8) { /* sorts no more than needed */
        k = k < n ? k : n;
        candidates_select(l, n, k);
        sum = 0;
        for (int i = 0; i < k; i++) {
            sum += exp((double)l[i].logit - (double)max);
            if (sum >= (double)c->p.top_p * total)
                return i + 1;
        }
        if (k == n)
            return n;
    }
}

static int stage_min_p(const struct sample_chain *c, struct candidate *l, int n)
{
    if (c->p.min_p <= 0)
        return n;
    double max = (double)largest(l, n);
    return keep_from(l, n, max + log((double)c->p.min_p < 1 ? (double)c->p.min_p : 1));
}

/* With xtc_probability: removes all candidates of at least the threshold but the least likely of
 * them. */
static int stage_xtc(const struct sample_chain *c, struct candidate *l, int n, uint64_t draw)
{
    enum { XTC_SEED = 0x787463 };
    double share = (double)c->p.xtc_threshold;
    if (c->p.xtc_probability <= 0 || share > 0.5 ||
        sampler_uniform(c->p.seed ^ XTC_SEED, draw) >= c->p.xtc_probability)
        return n;
    float max = largest(l, n);
    double total = sum_weights(l, n, max);
    int above = 0, least = -1, kept = 0;
    for (int i = 0; i < n; i++)
        if (exp((double)l[i].logit - (double)max) >= share * total) {
            above++;
            least = least < 0 || l[i].logit <= l[least].logit ? i : least;
        }
    if (above < 2)
        return n;
    float from = l[least].logit;
    int32_t id = l[least].id;
    for (int i = 0; i < n; i++)
        if (l[i].id == id || l[i].logit < from)
            l[kept++] = l[i];
    return kept;
}

/* ---- the choice ---- */

/* Draws one of n candidates by weight: its index. */
static int draw_one(const struct candidate *l, int n, float u)
{
    float max = largest(l, n);
    double target = (double)u * sum_weights(l, n, max), sum = 0;
    for (int i = 0; i < n; i++) {
        sum += exp((double)l[i].logit - (double)max);
        if (target < sum)
            return i;
    }
    return n - 1;
}

/* Mirostat 1: the number of candidates whose expected surprise is mu, for the exponent of Zipf's
 * law that the best candidates suggest. The list is sorted. */
static int mirostat_k(const struct sample_chain *c, const struct candidate *l, int n)
{
    enum { SAMPLE = 100 };
    double tb = 0, tt = 0;
    for (int i = 0; i + 1 < n && i + 1 < SAMPLE; i++) {
        double t = log((i + 2.0) / (i + 1.0)), b = (double)l[i].logit - (double)l[i + 1].logit;
        tb += t * b;
        tt += t * t;
    }
    double s = tt > 0 ? tb / tt : 0, e = s - 1;
    if (!(s > 1e-6) || fabs(e) < 1e-6)
        return n;
    double k = pow(e * pow(2, c->mu) / (1 - pow(c->n_vocab, -e)), 1 / s);
    return !(k >= 1) ? 1 : k > n ? n : (int)k;
}

static int32_t pick_mirostat(struct sample_chain *c, struct candidate *l, int n, float u)
{
    n = stage_temperature(c, l, n);
    candidates_select(l, n, n);
    double norm = log(sum_weights(l, n, l[0].logit)) + (double)l[0].logit;
    int kept = 0;
    if (c->p.mirostat == 1)
        kept = mirostat_k(c, l, n);
    else
        while (kept < n && (norm - (double)l[kept].logit) / M_LN2 <= c->mu)
            kept++;
    kept = kept > 0 ? kept : 1;
    int at = draw_one(l, kept, u);
    double own = log(sum_weights(l, kept, l[0].logit)) + (double)l[0].logit;
    c->picked = l[at].id;
    c->surprise = (own - (double)l[at].logit) / M_LN2;
    return c->picked;
}

int32_t sample_chain_pick(struct sample_chain *c, struct candidate *l, int n, uint64_t draw,
                          const struct sampler *s, sample_penalty *penalty)
{
    bool draws = c->p.temp > 0;
    float u = sampler_uniform(c->p.seed, draw);
    for (uint64_t order = c->order; order; order >>= 4) {
        enum sample_stage stage = (enum sample_stage)(order & 15);
        if (stage == STAGE_PENALTIES)
            for (int i = 0; i < n; i++)
                l[i].logit = penalty(s, l[i].id, l[i].logit);
        else if (stage == STAGE_DRY)
            stage_dry(c, l, n);
        else if (!draws || c->p.mirostat)
            continue;
        else if (stage == STAGE_TOP_N_SIGMA)
            n = stage_top_n_sigma(c, l, n);
        else if (stage == STAGE_TOP_K)
            n = stage_top_k(l, n, c->p.top_k);
        else if (stage == STAGE_TEMPERATURE)
            n = stage_temperature(c, l, n);
        else if (stage == STAGE_TYPICAL)
            n = stage_typical(c, l, n);
        else if (stage == STAGE_TOP_P)
            n = stage_top_p(c, l, n);
        else if (stage == STAGE_MIN_P)
            n = stage_min_p(c, l, n);
        else if (stage == STAGE_XTC)
            n = stage_xtc(c, l, n, draw);
    }
    if (!draws) {
        candidates_select(l, n, 1);
        return l[0].id;
    }
    return c->p.mirostat ? pick_mirostat(c, l, n, u) : l[draw_one(l, n, u)].id;
}
