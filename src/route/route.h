/*
 * Which replica gets a request: a table of beginnings of prompts and the replicas that have read
 * them, a table of things only one replica has (kept responses), how much each has to do, and whether
 * it is well. Pure bookkeeping: no I/O, no clock of its own, one thread.
 *
 * Invariants:
 *  1. both tables have a fixed size; what was used least recently gives way
 *  2. the choice is the least of: requests there, less what the cached part of the prompt is worth.
 *     Where that part is not the end of an earlier prompt (a conversation that goes on), but something
 *     that many begin with, replicas that were given less to remember go before: all caches fill
 *  3. a replica that is out, full, or not among those asked for is never chosen
 *  4. a replica goes out after `fails` bad probes or bad answers in a row, at once where it says that
 *     it is not well or nothing listens; bad answers are forgiven by good answers only, and keep it out for a
 *     time that doubles
 *  5. it comes in after `rises` good probes in a row, the first time after one, and then gets a share
 *     that grows from a tenth to all within slow_start_ns
 */
#ifndef STEEL_SERVER_ROUTE_H
#define STEEL_SERVER_ROUTE_H

#include "route/route_marks.h"

enum { ROUTE_MAX_REPLICAS = 64 };

struct route_options {
    int n; /* replicas */
    int fails, rises;
    int64_t slow_start_ns;
    int max_load;      /* requests of one replica at once */
    size_t n_prefixes; /* entries of the table */
    size_t n_pins;
};

struct route_replica {
    bool in, was_in;
    int load;
    int n_bad_probes, n_good_probes, n_bad_answers;
    int64_t in_since_ns; /* 0 = from the start: it gets its whole share */
    int64_t out_until_ns, penalty_ns;
    double given;    /* bytes of prompts that were new to it, of late */
    uint64_t chosen; /* when it was chosen last, counted */
};

struct route;
struct route *route_new(const struct route_options *opt);
void route_free(struct route *r);
const struct route_replica *route_replica(const struct route *r, int i);
int route_n_in(const struct route *r);

enum route_reason { ROUTE_BY_PREFIX, ROUTE_BY_LOAD, ROUTE_NONE_IN, ROUTE_ALL_FULL };
/* The replica for a request; marks may be NULL. -1: *why says which. */
int route_choose(struct route *r, const struct route_marks *marks, uint64_t among, int64_t now_ns,
                 enum route_reason *why);
/* A request goes there (its beginnings are remembered); it is over. */
void route_begin(struct route *r, int i, const struct route_marks *marks);
void route_end(struct route *r, int i);
void route_forget(struct route *r, int i); /* its cache is gone */

void route_pin(struct route *r, uint64_t what, int i);
int route_pinned(const struct route *r, uint64_t what); /* -1 = not known */

/* What was learnt of a replica. True: it changed sides. */
bool route_probe_good(struct route *r, int i, int64_t now_ns);
bool route_probe_bad(struct route *r, int i, bool at_once);
void route_answer_good(struct route *r, int i);
bool route_answer_bad(struct route *r, int i, int64_t now_ns);

#endif
