/* Learned costs and probabilities of drafts: see draft_cost.h. */
#include "engine/draft_cost.h"

#include <math.h>

enum { MEAN_OF = 16, STALE = 1024 };

/* PRIOR_ROW: the time of a draft's row before any is measured, in parts of a row's time in a plain step. LEAST_GAIN: drafts must
 * promise that much more tokens per time, since what is learned is noisy. */
#define PRIOR_ROW  0.3
#define LEAST_GAIN 1.03
#define SHRINK     0.9 /* of a stale ratio's excess, each STALE steps */
#define OUTLIER    4.0 /* a step may count for this many times the mean */

const int draft_levels[DRAFT_LEVELS] = {0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32};

static int level_of(int n_rows)
{
    int level = 0;
    while (level < DRAFT_LEVELS - 1 && draft_levels[level + 1] <= n_rows)
        level++;
    return level;
}

/* The first of n measurements does not count: in its step a GPU records the work that later ones replay. */
static double mean_of(double mean, int *n, double seen)
{
    *n += *n <= MEAN_OF;
    int weight = *n - 1;
    if (weight > 2 && seen > OUTLIER * mean)
        seen = OUTLIER * mean;
    return weight < 2 ? seen : mean + (seen - mean) / weight;
}

void draft_cost_learn(struct draft_cost *c, int n, int n_rows, bool waits, int64_t ns)
{
    if (n < 1 || n > DRAFT_CROWD || ns <= 0)
        return;
    c->turn++;
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
    double age = (double)(c->turn - cell->at) / STALE;
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
    /* beyond what was measured: as each row did until there */
    double slope = low ? (r0 - cell_ratio(c, n, 0)) / x0 : PRIOR_ROW / n;
    slope = slope > 0.01 ? slope : 0.01;
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

bool draft_rate_try(struct draft_cost *c, int class)
{
    c->skipped[class] = (c->skipped[class] + 1) % DRAFT_TRY;
    return c->skipped[class] == 0;
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

int draft_cost_choose(const struct draft_cost *c, int n, struct draft_offer *offers, int n_offers,
                      double make, bool waits)
{
    double all[DRAFT_CROWD], tokens = n, again = 0, row = draft_cost_ratio(c, n, 1) - 1;
    int order[DRAFT_ROWS], best = 0, deepest = 0;
    double rate = n * LEAST_GAIN / (waits ? draft_cost_ratio(c, n, 0) : 1);
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
        again += again_of(&offers[top], all[top]);
        all[top] = next_of(&offers[top], all[top]);
        tokens += all[top];
        order[x] = top;
        deepest = ++offers[top].depth > deepest ? offers[top].depth : deepest;
        if (x + 1 < draft_levels[level])
            continue;
        double time = draft_cost_ratio(c, n, level) + deepest * make + again * fmax(row, 0);
        if (tokens / time > rate) {
            rate = tokens / time;
            best = x + 1;
        }
        if (++level == DRAFT_LEVELS)
            break;
    }
    for (int i = 0; i < n_offers; i++)
        offers[i].depth = 0;
    for (int x = 0; x < best; x++)
        offers[order[x]].depth++;
    return best;
}
