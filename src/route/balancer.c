/* Load balancing by cached prefixes. See the invariants in balancer.h. */
#include "route/balancer.h"
#include "base/error.h"
#include "base/mem.h"

#include <string.h>

enum { WAYS = 8 };

struct balancer_entry {
    uint64_t hash;                /* the hash of a prefix or an id; 0 = an empty entry */
    uint64_t replicas;            /* prefixes: a bit per replica; pins: the replica */
    uint64_t used : 63, leaf : 1; /* leaf: prompts end here, and no longer one was seen */
};

/* Set-associative: sets of WAYS entries, the least recently used one of a set is evicted. */
struct balancer_table {
    struct balancer_entry *e; /* (n) */
    size_t n;                 /* a power of two, at least WAYS */
};

struct balancer {
    struct balancer_options opt;
    struct balancer_replica replicas[BALANCER_MAX_REPLICAS];
    struct balancer_table prefixes, pins;
    uint64_t clock; /* counts uses, for LRU */
    int n_in;
    double given; /* the sum over all replicas */
};

static void table_init(struct balancer_table *t, size_t n)
{
    for (t->n = WAYS; t->n < n;)
        t->n *= 2;
    t->e = mem_zalloc(t->n, sizeof *t->e);
}

static struct balancer_entry *table_find(const struct balancer_table *t, uint64_t hash)
{
    struct balancer_entry *set = t->e + (hash & (t->n - 1) & ~(uint64_t)(WAYS - 1));
    for (int i = 0; i < WAYS; i++)
        if (set[i].hash == hash)
            return &set[i];
    return NULL;
}

/* Returns the entry of `hash`, which is inserted if it is absent. */
static struct balancer_entry *table_put(struct balancer_table *t, uint64_t hash, uint64_t clock)
{
    struct balancer_entry *e = table_find(t, hash);
    if (!e) {
        struct balancer_entry *set = t->e + (hash & (t->n - 1) & ~(uint64_t)(WAYS - 1));
        e = set;
        for (int i = 1; i < WAYS; i++)
            if (set[i].used < e->used)
                e = &set[i];
        *e = (struct balancer_entry){.hash = hash};
    }
    e->used = clock;
    return e;
}

struct balancer *balancer_new(const struct balancer_options *opt)
{
    CHECK(opt->n > 0 && opt->n <= BALANCER_MAX_REPLICAS, "%d replicas", opt->n);
    struct balancer *bal = mem_zalloc(1, sizeof *bal);
    bal->opt = *opt;
    table_init(&bal->prefixes, opt->n_prefixes);
    table_init(&bal->pins, opt->n_pins);
    return bal;
}

void balancer_free(struct balancer *bal)
{
    if (!bal)
        return;
    mem_free(bal->prefixes.e);
    mem_free(bal->pins.e);
    mem_free(bal);
}

const struct balancer_replica *balancer_replica(const struct balancer *bal, int i)
{
    return &bal->replicas[i];
}

int balancer_n_in(const struct balancer *bal)
{
    return bal->n_in;
}

/* Choosing */

/* The replica's load with one more request, divided by its share of traffic (slow start). */
static double weighted_load(const struct balancer *bal, const struct balancer_replica *p,
                            int64_t now_ns)
{
    double share = 1;
    if (p->in_since_ns && bal->opt.slow_start_ns > 0) {
        share = (double)(now_ns - p->in_since_ns) / (double)bal->opt.slow_start_ns;
        share = share < 0.1 ? 0.1 : share > 1 ? 1 : share;
    }
    return (p->load + 1) / share;
}

/* Sets out[i] to the part of the prompt that replica i probably has in its cache, 0 to 1. Returns the
 * replicas whose cache has an earlier turn of this conversation, a bit each. */
static uint64_t match(const struct balancer *bal, const struct prefix_hashes *m, double out[])
{
    uint64_t seen = 0, continued = 0;
    for (int j = m ? m->n - 1 : -1; j >= 0; j--) {
        const struct balancer_entry *e = table_find(&bal->prefixes, m->hash[j]);
        for (uint64_t left = e ? e->replicas & ~seen : 0; left; left &= left - 1)
            out[__builtin_ctzll(left)] = m->at[j] / (double)m->length;
        continued |= e && e->leaf ? e->replicas & ~seen : 0;
        seen |= e ? e->replicas : 0;
    }
    return continued;
}

/* How full its cache is relative to the average: -2 (nothing new was sent to it) to 4. */
static double cache_pressure(const struct balancer *bal, const struct balancer_replica *p)
{
    if (!(bal->given > 0))
        return 0;
    double over = 2 * (p->given * bal->opt.n / bal->given - 1);
    return over < 4 ? over : 4;
}

int balancer_choose(struct balancer *bal, const struct prefix_hashes *hashes, uint64_t among,
                    int64_t now_ns, enum balancer_reason *why)
{
    double matched[BALANCER_MAX_REPLICAS] = {0}, least = 0, best_score = 0;
    int best = -1;
    bool any_in = false, any = false;
    uint64_t can = 0;
    for (int i = 0; i < bal->opt.n; i++) {
        const struct balancer_replica *p = &bal->replicas[i];
        if (!p->in || !(among >> i & 1))
            continue;
        any_in = true;
        if (p->load >= bal->opt.max_load)
            continue;
        can |= (uint64_t)1 << i;
        double b = weighted_load(bal, p, now_ns);
        least = any && least < b ? least : b;
        any = true;
    }
    uint64_t continued = match(bal, hashes, matched);
    /* A fully cached prompt outweighs this many requests of load. */
    double worth = 8 + least / 2;
    for (int i = 0; i < bal->opt.n; i++) {
        const struct balancer_replica *p = &bal->replicas[i];
        if (!(can >> i & 1))
            continue;
        double score = weighted_load(bal, p, now_ns);
        if (continued >> i & 1)
            score -= worth * (matched[i] > 0.5 ? matched[i] : 0.5);
        else if (hashes && hashes->n)
            score += cache_pressure(bal, p) - worth * matched[i];
        if (best < 0 || score < best_score ||
            (score <= best_score && p->chosen < bal->replicas[best].chosen)) {
            best = i;
            best_score = score;
        }
    }
    if (best < 0)
        *why = any_in ? BALANCER_ALL_FULL : BALANCER_NONE_IN;
    else
        *why = matched[best] > 0 ? BALANCER_BY_PREFIX : BALANCER_BY_LOAD;
    return best;
}

void balancer_begin(struct balancer *bal, int i, const struct prefix_hashes *hashes)
{
    enum { OF_LATE = 64 << 20 };
    struct balancer_replica *p = &bal->replicas[i];
    uint32_t known = 0;
    p->load++;
    p->chosen = ++bal->clock;
    for (int j = 0; hashes && j < hashes->n; j++) {
        struct balancer_entry *e = table_put(&bal->prefixes, hashes->hash[j], bal->clock);
        if (e->replicas >> i & 1)
            known = hashes->at[j];
        e->leaf = (e->leaf || !e->replicas) && j == hashes->n - 1;
        e->replicas |= (uint64_t)1 << i;
    }
    double new_bytes = hashes && hashes->n ? hashes->length - known : 0;
    p->given += new_bytes;
    bal->given += new_bytes;
    if (bal->given > OF_LATE) {
        bal->given /= 2;
        for (int j = 0; j < bal->opt.n; j++)
            bal->replicas[j].given /= 2;
    }
}

void balancer_end(struct balancer *bal, int i)
{
    CHECK(bal->replicas[i].load > 0, "replica %d has no request to end", i);
    bal->replicas[i].load--;
}

void balancer_forget(struct balancer *bal, int i)
{
    for (size_t j = 0; j < bal->prefixes.n; j++)
        bal->prefixes.e[j].replicas &= ~((uint64_t)1 << i);
    bal->given -= bal->replicas[i].given;
    bal->replicas[i].given = 0;
}

void balancer_pin(struct balancer *bal, uint64_t hash, int i)
{
    table_put(&bal->pins, hash, ++bal->clock)->replicas = (uint64_t)i;
}

int balancer_pinned(const struct balancer *bal, uint64_t hash)
{
    const struct balancer_entry *e = table_find(&bal->pins, hash);
    return e ? (int)e->replicas : -1;
}

/* Health */

static void take_out(struct balancer *bal, struct balancer_replica *p)
{
    p->in = false;
    p->n_good_probes = 0;
    bal->n_in--;
}

bool balancer_probe_good(struct balancer *bal, int i, int64_t now_ns)
{
    struct balancer_replica *p = &bal->replicas[i];
    p->n_bad_probes = 0;
    p->n_good_probes++;
    if (p->in || now_ns < p->out_until_ns || p->n_good_probes < (p->was_in ? bal->opt.rises : 1))
        return false;
    p->in_since_ns = p->was_in ? now_ns : 0;
    p->in = p->was_in = true;
    p->n_bad_answers = 0;
    bal->n_in++;
    return true;
}

bool balancer_probe_bad(struct balancer *bal, int i, bool at_once)
{
    struct balancer_replica *p = &bal->replicas[i];
    p->n_good_probes = 0;
    p->n_bad_probes++;
    if (!p->in || (!at_once && p->n_bad_probes < bal->opt.fails))
        return false;
    take_out(bal, p);
    return true;
}

void balancer_answer_good(struct balancer *bal, int i)
{
    bal->replicas[i].n_bad_answers = 0;
    bal->replicas[i].penalty_ns = 0;
}

bool balancer_answer_bad(struct balancer *bal, int i, int64_t now_ns)
{
    enum { FIRST_MS = 1000, LAST_MS = 60000 };
    struct balancer_replica *p = &bal->replicas[i];
    p->n_bad_answers++;
    if (!p->in || p->n_bad_answers < bal->opt.fails)
        return false;
    p->penalty_ns = p->penalty_ns ? 2 * p->penalty_ns : FIRST_MS * (int64_t)1000000;
    if (p->penalty_ns > LAST_MS * (int64_t)1000000)
        p->penalty_ns = LAST_MS * (int64_t)1000000;
    p->out_until_ns = now_ns + p->penalty_ns;
    take_out(bal, p);
    return true;
}
