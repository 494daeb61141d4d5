/* See draw.h. */
#include "sample/draw.h"
#include "base/error.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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

/* A float's place in the order of all floats. */
static inline uint32_t float_order(float v)
{
    uint32_t bits;
    v += 0.0f; /* no negative zero */
    memcpy(&bits, &v, sizeof bits);
    return bits ^ ((uint32_t)((int32_t)bits >> 31) | 1u << 31);
}

static inline float float_of_order(uint32_t order)
{
    uint32_t bits = order >> 31 ? order ^ 1u << 31 : ~order;
    float v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

/* The distance from the largest logit, in representable numbers: ascending in sorted order. */
static uint32_t flat_key(const struct flat_row *f, float logit)
{
    return float_order(f->max) - float_order(logit);
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
    uint32_t top = float_order(f->max), below_zero = float_order(0) - 1;
    /* keys are of +0, never of -0, which is no less than +0 */
    float hi = float_of_order(top - first == below_zero ? below_zero - 1 : top - first);
    float lo = last < flat_key(f, f->floor) ? float_of_order(top - last) : f->floor;
    return scan_collect(f->scan, f->logits, lo, hi, f->bucket);
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

/* Draws from n candidates with a small top-k or top-p: the same token as draw_sorted. */
static int32_t draw_flat(const struct draw *d, struct flat_row *f, int n)
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
    if (d->p->top_k > 0 && d->p->top_k < n) {
        struct mass_goal all = {.n = d->p->top_k, .mass = INFINITY};
        struct mass_prefix p = flat_find(f, &all);
        n = p.n;
        total = p.mass;
    }
    if (d->p->top_p < 1) {
        struct mass_goal nucleus = {.n = n, .mass = (double)d->p->top_p * total};
        struct mass_prefix p = flat_find(f, &nucleus);
        n = p.n;
        total = p.mass;
    }
    struct mass_goal drawn = {.n = n, .mass = (double)d->u * total, .above = true};
    return flat_find(f, &drawn).last;
}

/* Draws from all candidates, in the order of their ids. */
static int32_t draw_any(const struct draw *d, const struct flat_row *f)
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
    double target = (double)d->u * sum;
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

/* Draws from the first n entries of cand. */
static int32_t draw_sorted(const struct draw *d, int n)
{
    const struct sample_params *p = d->p;
    if (p->top_k > 0 && p->top_k < n) {
        candidates_select(d->cand, n, p->top_k);
        n = p->top_k;
    }
    if (p->top_p < 1)
        n = nucleus(d->cand, n, d->max, p->temp, p->top_p);
    double total = 0;
    for (int i = 0; i < n; i++)
        total += (double)expf((d->cand[i].logit - d->max) / p->temp);
    double target = (double)d->u * total, sum = 0;
    for (int i = 0; i < n; i++) {
        sum += (double)expf((d->cand[i].logit - d->max) / p->temp);
        if (target < sum)
            return d->cand[i].id;
    }
    return d->cand[n - 1].id;
}

/* Collects the top_k best of many candidates, sorted; returns top_k. As many blocks have a candidate that is no less
 * than the top_k-th largest of their maxima, so lesser ones are not looked at. */
static int collect_best(const struct draw *d, float floor)
{
    const struct scan *sc = d->scan;
    int k = d->p->top_k;
    for (int b = 0; b < sc->n_blocks; b++)
        d->cand[b] = (struct candidate){sc->max_of[b], b};
    candidates_select(d->cand, sc->n_blocks, k);
    float lo = d->cand[k - 1].logit > floor ? d->cand[k - 1].logit : floor;
    int n = scan_collect(sc, d->logits, lo, sc->max, d->cand);
    candidates_select(d->cand, n, k);
    return k;
}

int32_t draw_token(const struct draw *d)
{
    const struct sample_params *p = d->p;
    /* Candidates below min-p are never considered. Below 1e-9 of the best, a float draw cannot hit
     * one. */
    float floor_p = p->min_p > 1e-9f ? p->min_p : 1e-9f, floor = d->max + p->temp * logf(floor_p);
    int n = scan_count(d->scan, d->logits, floor);
    if (n == 0) /* all logits are NaN */
        return -1;
    if (n <= FLAT_MIN)
        return draw_sorted(d, scan_collect(d->scan, d->logits, floor, d->max, d->cand));
    if (p->top_k > 0 && p->top_k <= FLAT_MIN && p->top_k <= d->scan->n_blocks)
        return draw_sorted(d, collect_best(d, floor));
    struct flat_row f = {.logits = d->logits,
                         .scan = d->scan,
                         .max = d->max,
                         .temp = p->temp,
                         .floor = floor,
                         .bucket = d->cand};
    if (p->top_p >= 1 && (p->top_k <= 0 || p->top_k >= n))
        return draw_any(d, &f);
    return draw_flat(d, &f, n);
}
