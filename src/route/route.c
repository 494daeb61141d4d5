/* The choice of a replica. See the invariants in route.h. */
#include "route/route.h"
#include "base/error.h"
#include "base/mem.h"

#include <string.h>

enum { WAYS = 8 };

struct entry {
    uint64_t what;                /* a hash; 0 = empty */
    uint64_t who;                 /* bit per replica; of a pin, its number */
    uint64_t used : 63, leaf : 1; /* leaf: prompts ended here, none went on from here */
};

/* Sets of WAYS entries; the least recently used of a set gives way. */
struct table {
    struct entry *e; /* (n) */
    size_t n;        /* a power of two, at least WAYS */
};

struct route {
    struct route_options opt;
    struct route_replica replicas[ROUTE_MAX_REPLICAS];
    struct table prefixes, pins;
    uint64_t clock; /* of uses */
    int n_in;
    double given; /* by all replicas */
};

static void table_init(struct table *t, size_t n)
{
    for (t->n = WAYS; t->n < n;)
        t->n *= 2;
    t->e = mem_zalloc(t->n, sizeof *t->e);
}

static struct entry *table_find(const struct table *t, uint64_t what)
{
    struct entry *set = t->e + (what & (t->n - 1) & ~(uint64_t)(WAYS - 1));
    for (int i = 0; i < WAYS; i++)
        if (set[i].what == what)
            return &set[i];
    return NULL;
}

/* The entry of `what`, a new one if need be. */
static struct entry *table_put(struct table *t, uint64_t what, uint64_t clock)
{
    struct entry *e = table_find(t, what);
    if (!e) {
        struct entry *set = t->e + (what & (t->n - 1) & ~(uint64_t)(WAYS - 1));
        e = set;
        for (int i = 1; i < WAYS; i++)
            if (set[i].used < e->used)
                e = &set[i];
        *e = (struct entry){.what = what};
    }
    e->used = clock;
    return e;
}

struct route *route_new(const struct route_options *opt)
{
    CHECK(opt->n > 0 && opt->n <= ROUTE_MAX_REPLICAS, "%d replicas", opt->n);
    struct route *r = mem_zalloc(1, sizeof *r);
    r->opt = *opt;
    table_init(&r->prefixes, opt->n_prefixes);
    table_init(&r->pins, opt->n_pins);
    return r;
}

void route_free(struct route *r)
{
    if (!r)
        return;
    mem_free(r->prefixes.e);
    mem_free(r->pins.e);
    mem_free(r);
}

const struct route_replica *route_replica(const struct route *r, int i)
{
    return &r->replicas[i];
}

int route_n_in(const struct route *r)
{
    return r->n_in;
}

/* Choosing */

/* What one more request would make of its load, as seen from its share. */
static double burden(const struct route *r, const struct route_replica *p, int64_t now_ns)
{
    double share = 1;
    if (p->in_since_ns && r->opt.slow_start_ns > 0) {
        share = (double)(now_ns - p->in_since_ns) / (double)r->opt.slow_start_ns;
        share = share < 0.1 ? 0.1 : share > 1 ? 1 : share;
    }
    return (p->load + 1) / share;
}

/* How much of the prompt each replica has likely read, 0 to 1; and those that read a whole prompt which
 * this one goes on from. */
static uint64_t match(const struct route *r, const struct route_marks *m, double out[])
{
    uint64_t seen = 0, going_on = 0;
    for (int j = m ? m->n - 1 : -1; j >= 0; j--) {
        const struct entry *e = table_find(&r->prefixes, m->hash[j]);
        for (uint64_t left = e ? e->who & ~seen : 0; left; left &= left - 1)
            out[__builtin_ctzll(left)] = m->at[j] / (double)m->length;
        going_on |= e && e->leaf ? e->who & ~seen : 0;
        seen |= e ? e->who : 0;
    }
    return going_on;
}

/* How much more than its part it has been given to remember: -2, nothing yet, to 4. */
static double surfeit(const struct route *r, const struct route_replica *p)
{
    if (!(r->given > 0))
        return 0;
    double over = 2 * (p->given * r->opt.n / r->given - 1);
    return over < 4 ? over : 4;
}

int route_choose(struct route *r, const struct route_marks *marks, uint64_t among, int64_t now_ns,
                 enum route_reason *why)
{
    double matched[ROUTE_MAX_REPLICAS] = {0}, least = 0, best_score = 0;
    int best = -1;
    bool any_in = false, any = false;
    uint64_t can = 0;
    for (int i = 0; i < r->opt.n; i++) {
        const struct route_replica *p = &r->replicas[i];
        if (!p->in || !(among >> i & 1))
            continue;
        any_in = true;
        if (p->load >= r->opt.max_load)
            continue;
        can |= (uint64_t)1 << i;
        double b = burden(r, p, now_ns);
        least = any && least < b ? least : b;
        any = true;
    }
    uint64_t going_on = match(r, marks, matched);
    /* What a whole prompt in the cache is worth in requests waiting longer. */
    double worth = 8 + least / 2;
    for (int i = 0; i < r->opt.n; i++) {
        const struct route_replica *p = &r->replicas[i];
        if (!(can >> i & 1))
            continue;
        double score = burden(r, p, now_ns);
        if (going_on >> i & 1)
            score -= worth * (matched[i] > 0.5 ? matched[i] : 0.5);
        else if (marks && marks->n)
            score += surfeit(r, p) - worth * matched[i];
        if (best < 0 || score < best_score ||
            (score <= best_score && p->chosen < r->replicas[best].chosen)) {
            best = i;
            best_score = score;
        }
    }
    if (best < 0)
        *why = any_in ? ROUTE_ALL_FULL : ROUTE_NONE_IN;
    else
        *why = matched[best] > 0 ? ROUTE_BY_PREFIX : ROUTE_BY_LOAD;
    return best;
}

void route_begin(struct route *r, int i, const struct route_marks *marks)
{
    enum { OF_LATE = 64 << 20 };
    struct route_replica *p = &r->replicas[i];
    uint32_t known = 0;
    p->load++;
    p->chosen = ++r->clock;
    for (int j = 0; marks && j < marks->n; j++) {
        struct entry *e = table_put(&r->prefixes, marks->hash[j], r->clock);
        if (e->who >> i & 1)
            known = marks->at[j];
        e->leaf = (e->leaf || !e->who) && j == marks->n - 1;
        e->who |= (uint64_t)1 << i;
    }
    double new_bytes = marks && marks->n ? marks->length - known : 0;
    p->given += new_bytes;
    r->given += new_bytes;
    if (r->given > OF_LATE) {
        r->given /= 2;
        for (int j = 0; j < r->opt.n; j++)
            r->replicas[j].given /= 2;
    }
}

void route_end(struct route *r, int i)
{
    CHECK(r->replicas[i].load > 0, "replica %d has no request to end", i);
    r->replicas[i].load--;
}

void route_forget(struct route *r, int i)
{
    for (size_t j = 0; j < r->prefixes.n; j++)
        r->prefixes.e[j].who &= ~((uint64_t)1 << i);
    r->given -= r->replicas[i].given;
    r->replicas[i].given = 0;
}

void route_pin(struct route *r, uint64_t what, int i)
{
    table_put(&r->pins, what, ++r->clock)->who = (uint64_t)i;
}

int route_pinned(const struct route *r, uint64_t what)
{
    const struct entry *e = table_find(&r->pins, what);
    return e ? (int)e->who : -1;
}

/* Health */

static void go_out(struct route *r, struct route_replica *p)
{
    p->in = false;
    p->n_good_probes = 0;
    r->n_in--;
}

bool route_probe_good(struct route *r, int i, int64_t now_ns)
{
    struct route_replica *p = &r->replicas[i];
    p->n_bad_probes = 0;
    p->n_good_probes++;
    if (p->in || now_ns < p->out_until_ns || p->n_good_probes < (p->was_in ? r->opt.rises : 1))
        return false;
    p->in_since_ns = p->was_in ? now_ns : 0;
    p->in = p->was_in = true;
    p->n_bad_answers = 0;
    r->n_in++;
    return true;
}

bool route_probe_bad(struct route *r, int i, bool at_once)
{
    struct route_replica *p = &r->replicas[i];
    p->n_good_probes = 0;
    p->n_bad_probes++;
    if (!p->in || (!at_once && p->n_bad_probes < r->opt.fails))
        return false;
    go_out(r, p);
    return true;
}

void route_answer_good(struct route *r, int i)
{
    r->replicas[i].n_bad_answers = 0;
    r->replicas[i].penalty_ns = 0;
}

bool route_answer_bad(struct route *r, int i, int64_t now_ns)
{
    enum { FIRST_MS = 1000, LAST_MS = 60000 };
    struct route_replica *p = &r->replicas[i];
    p->n_bad_answers++;
    if (!p->in || p->n_bad_answers < r->opt.fails)
        return false;
    p->penalty_ns = p->penalty_ns ? 2 * p->penalty_ns : FIRST_MS * (int64_t)1000000;
    if (p->penalty_ns > LAST_MS * (int64_t)1000000)
        p->penalty_ns = LAST_MS * (int64_t)1000000;
    p->out_until_ns = now_ns + p->penalty_ns;
    go_out(r, p);
    return true;
}
