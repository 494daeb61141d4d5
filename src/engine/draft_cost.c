/* Learned costs and probabilities of drafts: see draft_cost.h. */
#include "engine/draft_cost.h"

#include <math.h>

/* FEW: measurements that a mean needs. Until then it is the shortest one. */
enum { MEAN_OF = 16, FEW = 4, STALE = 1024, STALE_FEW = 64 };

/* PRIOR_ROW: the time of a draft's row before any is measured, in parts of a row's time in a plain step. LEAST_GAIN: drafts must
 * promise that much more tokens per time, since what is learned is noisy. */
#define PRIOR_ROW  0.3
#define LEAST_GAIN 1.03
#define SHRINK     0.9 /* of a stale ratio's excess, each STALE steps */
#define OUTLIER    4.0 /* a step may count for this many times the mean */
#define TRY_SHARE  0.01

const int draft_levels[DRAFT_LEVELS] = {0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32};

static int level_of(int n_rows)
{
    int level = 0;
    while (level < DRAFT_LEVELS - 1 && draft_levels[level + 1] <= n_rows)
        level++;
    return level;
}

/* The first of n measurements does not count: kernels may be loaded in its step. */
static double mean_of(double mean, int *n, double seen)
{
    *n += *n <= MEAN_OF;
    int weight = *n - 1;
    if (weight < 2)
        return seen;
    if (weight < FEW)
        return fmin(mean, seen);
    return mean + (fmin(seen, OUTLIER * mean) - mean) / weight;
}

void draft_cost_learn(struct draft_cost *c, int n, int n_rows, bool waits, int64_t ns)
{
    if (n < 1 || n > DRAFT_CROWD || ns <= 0)
        return;
    c->turn++;
    c->credit = fmin(c->credit + TRY_SHARE, 1);
    int level = level_of(n_rows);
    if (draft_levels[level] != n_rows) /* some drafts had no room */
        return;
    if (!n_rows && (!waits || !draft_cost_known(c, n))) {
        c->plain_ns[n] = mean_of(c->plain_ns[n], &c->n_plain[n], (double)ns);
        return;
    }
    if (!draft_cost_known(c, n))
        return;
    struct draft_cell *cell = &c->cells[n][level];
    cell->ratio = (float)mean_of(cell->ratio, &cell->n, (double)ns / c->plain_ns[n]);
    cell->at = c->turn;
}

bool draft_cost_known(const struct draft_cost *c, int n)
{
    return n <= DRAFT_CROWD && c->n_plain[n] > 2;
}

/* A measured ratio; 0 = none. */
static double cell_ratio(const struct draft_cost *c, int n, int level)
{
    const struct draft_cell *cell = &c->cells[n][level];
    if (cell->n < 2)
        return level ? 0 : 1;
    double age = (double)(c->turn - cell->at) / (cell->n > FEW ? STALE : STALE_FEW);
    return cell->ratio > 1 ? 1 + (cell->ratio - 1) * pow(SHRINK, floor(age)) : cell->ratio;
}

double draft_cost_ratio(const struct draft_cost *c, int n, int level)
{
    int low = level, high = level;
    double x = draft_levels[level], found = cell_ratio(c, n, level);
    if (found > 0)
        return found;
    while (low > 0 && cell_ratio(c, n, low) <= 0)
        low--;
    while (high < DRAFT_LEVELS && cell_ratio(c, n, high) <= 0)
        high++;
    double x0 = draft_levels[low], r0 = cell_ratio(c, n, low);
    if (high < DRAFT_LEVELS) {
        double x1 = draft_levels[high], r1 = cell_ratio(c, n, high);
        return r0 + (r1 - r0) * (x - x0) / (x1 - x0);
    }
    /* beyond what was measured: as each row did until there, but no more than is expected of a row. The first rows may
     * cost more than all others, and what seems too dear is never measured. */
    double slope = low ? (r0 - cell_ratio(c, n, 0)) / x0 : PRIOR_ROW / n;
    slope = fmax(fmin(slope, PRIOR_ROW / n), 0.01);
    return r0 + slope * (x - x0);
}

static void rate_add(struct draft_rate *r, int n, bool failed, float keep)
{
    for (int i = 0; i < n + failed; i++) {
        r->tried = r->tried * keep + 1;
        r->right = r->right * keep + (i < n);
    }
}

void draft_rate_learn(struct draft_cost *c, struct draft_rate *own, int class, int n, bool failed)
{
    rate_add(&c->rates[class], n, failed, 0.99f);
    rate_add(&own[class], n, failed, 0.97f);
}

double draft_rate_of(const struct draft_cost *c, const struct draft_rate *own, int class,
                     double prior)
{
    const double least = 8, few = 4; /* weights of what a rate starts from */
    const struct draft_rate *all = &c->rates[class];
    double p = (all->right + least * prior) / (all->tried + least);
    p = (own[class].right + few * p) / (own[class].tried + few);
    return p < 0.99 ? p : 0.99;
}

bool draft_rate_try(struct draft_cost *c, int class, int n, double make)
{
    double cost = draft_cost_ratio(c, n, 1) - 1 + make;
    if (++c->skipped[class] < DRAFT_TRY || cost > fmax(c->credit, 0.01))
        return false;
    c->credit -= cost;
    c->skipped[class] = 0;
    return true;
}

void draft_rate_rest(struct draft_rate *rates)
{
    for (int i = 0; i < DRAFT_CLASSES; i++) {
        rates[i].tried *= 0.995f;
        rates[i].right *= 0.995f;
    }
}

/* The probability that draft k + 1 of an offer and all before it are accepted, from that of the k before. */
static double next_of(const struct draft_offer *o, double all)
{
    return o->depth < o->most && o->depth < DRAFT_DEPTH ? all * o->p[o->depth > 0] : 0;
}

/* Accepted drafts that are read again if the next one is rejected. */
static double again_of(const struct draft_offer *o, double all)
{
    return o->again ? o->depth * all * (1 - o->p[1]) : 0;
}

/* The time of the passes that make the drafts. */
static double made_of(const int *deepest, const double *make)
{
    double time = 0;
    for (int k = 0; k < DRAFT_MAKERS; k++)
        time += deepest[k] * make[k];
    return time;
}

int draft_cost_choose(const struct draft_cost *c, int n, struct draft_offer *offers, int n_offers,
                      const double *make, bool waits, double *rate)
{
    double all[DRAFT_CROWD], tokens = n, again = 0, row = draft_cost_ratio(c, n, 1) - 1;
    int order[DRAFT_ROWS], deepest[DRAFT_MAKERS] = {0}, n_best = 0;
    double none = n / (waits ? draft_cost_ratio(c, n, 0) : 1), best = none * LEAST_GAIN;
    for (int i = 0; i < n_offers; i++) {
        offers[i].depth = 0;
        all[i] = 1;
    }
    for (int x = 0, level = 1; x < DRAFT_ROWS; x++) {
        int top = -1;
        for (int i = 0; i < n_offers; i++)
            if (next_of(&offers[i], all[i]) > (top < 0 ? 0 : next_of(&offers[top], all[top])))
                top = i;
        if (top < 0)
            break;
        struct draft_offer *o = &offers[top];
        again += again_of(o, all[top]);
        all[top] = next_of(o, all[top]);
        tokens += all[top];
        order[x] = top;
        o->depth++;
        deepest[o->maker] = o->depth > deepest[o->maker] ? o->depth : deepest[o->maker];
        if (x + 1 < draft_levels[level])
            continue;
        double time = draft_cost_ratio(c, n, level) + made_of(deepest, make) + again * fmax(row, 0);
        if (tokens / time > best) {
            best = tokens / time;
            n_best = x + 1;
        }
        if (++level == DRAFT_LEVELS)
            break;
    }
    for (int i = 0; i < n_offers; i++)
        offers[i].depth = 0;
    for (int x = 0; x < n_best; x++)
        offers[order[x]].depth++;
    if (rate)
        *rate = (n_best ? best : none) / n;
    return n_best;
}
