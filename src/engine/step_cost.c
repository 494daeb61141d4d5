/* Learned costs of steps: see step_cost.h. */
#include "engine/step_cost.h"

#include <stdbool.h>
#include <stddef.h>

static int bucket(int n)
{
    int b = 0;
    while (b < COST_BUCKETS - 1 && 1 << b < n)
        b++;
    return b;
}

/* The cost of n rows, interpolated. Beyond the largest size that was measured the line through the last two goes on, at a
 * quarter of proportional growth at least; with one measured size, at half of it. Below the smallest, `least` of its
 * cost stays. */
static double cost_at(const struct cost_point *points, int n, double least)
{
    const struct cost_point *before = NULL, *below = NULL, *above = NULL;
    for (int b = 0; b < COST_BUCKETS && !above; b++) {
        const struct cost_point *p = &points[b];
        if (p->ns <= 0)
            continue;
        if (p->rows > n) {
            above = p;
        } else {
            before = below;
            below = p;
        }
    }
    if (!below)
        return above ? above->ns * (least + (1 - least) * n / above->rows) : 0;
    double more = n - below->rows, slope = below->ns / below->rows;
    if (above)
        return below->ns + (above->ns - below->ns) * more / (above->rows - below->rows);
    if (before) {
        double line = (below->ns - before->ns) / (below->rows - before->rows);
        slope = line > slope ? slope : line > slope / 4 ? line : slope / 4;
    } else {
        slope /= 2;
    }
    return below->ns + slope * more;
}

double step_cost_decode(const struct step_cost *c, int n)
{
    return n > 0 ? cost_at(c->decode, n, 1) : 0;
}

double step_cost_read(const struct step_cost *c, int n)
{
    return n > 0 ? cost_at(c->read, n, 0) : 0;
}

/* The largest n of `most` whose cost is `ns` at most. A noisy measurement may hide a larger one. */
static int most_in(double (*cost)(const struct step_cost *, int), const struct step_cost *c,
                   double ns, int most)
{
    int low = 0, high = most;
    while (low < high) {
        int n = low + (high - low + 1) / 2;
        if (cost(c, n) <= ns)
            low = n;
        else
            high = n - 1;
    }
    return low;
}

int step_cost_reads_in(const struct step_cost *c, double ns, int most)
{
    return most_in(step_cost_read, c, ns, most);
}

int step_cost_decodes_in(const struct step_cost *c, double ns, int most)
{
    double largest = 0;
    for (int b = 0; b < COST_BUCKETS; b++)
        largest = c->decode[b].ns > 0 ? c->decode[b].rows : largest;
    int n = most_in(step_cost_decode, c, ns, most);
    double far = 2 * largest > COST_FIRST ? 2 * largest : COST_FIRST;
    return n > far ? (int)far : n;
}

/* Slow steps weigh more than fast ones. */
static double weight(double mean, double seen)
{
    return mean <= 0 ? 1 : seen > mean ? 0.5 : 0.2;
}

static void learn_point(struct cost_point *points, int n, double ns)
{
    struct cost_point *p = &points[bucket(n)];
    double w = weight(p->ns, ns);
    p->ns += w * (ns - p->ns);
    p->rows += w * (n - p->rows);
}

/* A step of decodes beside prompts has taken `ratio` times what was expected. Where every step reads prompts, decodes alone are
 * never measured, so these steps count, too: a little, since the prompts may be to blame. */
static void learn_mixed(struct cost_point *p, int n, double decode, double ratio)
{
    enum { PATIENCE = 32, DRIFT = 16 };
    if (p->ns <= 0)
        *p = (struct cost_point){.rows = n, .ns = decode, .mixed = PATIENCE};
    p->mixed += p->mixed < PATIENCE;
    if (p->mixed == PATIENCE)
        p->ns *= 1 + (ratio - 1) / DRIFT;
}

void step_cost_learn(struct step_cost *c, int n_decode, int n_read, double ns)
{
    double decode = step_cost_decode(c, n_decode), read = step_cost_read(c, n_read);
    if (!n_read) {
        if (n_decode) {
            learn_point(c->decode, n_decode, ns);
            c->decode[bucket(n_decode)].mixed = 0;
        }
        return;
    }
    if (decode > 0 && read > 0)
        learn_mixed(&c->decode[bucket(n_decode)], n_decode, decode, ns / (decode + read));
    /* Without measured decodes the whole step is charged to reading; at least a tenth of it always is. */
    double extra = ns - decode;
    extra = extra > 0.1 * ns ? extra : 0.1 * ns;
    c->read_ns += weight(c->read_ns, extra / n_read) * (extra / n_read - c->read_ns);
    if (read > 0) /* deeper prompts cost more at every size */
        for (int b = 0; b < COST_BUCKETS; b++)
            c->read[b].ns *= 1 + weight(read, extra) * (extra / read - 1);
    learn_point(c->read, n_read, extra);
    c->most_read = n_read > c->most_read ? n_read : c->most_read;
}
