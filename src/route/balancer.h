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
#ifndef STEEL_ROUTE_BALANCER_H
#define STEEL_ROUTE_BALANCER_H

#include "route/prefix_hash.h"

enum { BALANCER_MAX_REPLICAS = 64 };

struct balancer_options {
    int n; /* replicas */
    int fails, rises;
    int64_t slow_start_ns;
    int max_load;      /* requests of one replica at once */
    size_t n_prefixes; /* entries of the table */
    size_t n_pins;
};

struct balancer_replica {
    bool in, was_in;
    int load;
    int n_bad_probes, n_good_probes, n_bad_answers;
    int64_t in_since_ns; /* 0 = from the start: it gets its whole share */
    int64_t out_until_ns, penalty_ns;
    double given;    /* bytes of prompts that were new to it, of late */
    uint64_t chosen; /* when it was chosen last, counted */
};

struct balancer;
struct balancer *balancer_new(const struct balancer_options *opt);
void balancer_free(struct balancer *bal);
const struct balancer_replica *balancer_replica(const struct balancer *bal, int i);
int balancer_n_in(const struct balancer *bal);

enum balancer_reason { BALANCER_BY_PREFIX, BALANCER_BY_LOAD, BALANCER_NONE_IN, BALANCER_ALL_FULL };
/* The replica for a request; hashes may be NULL. -1: *why says which. */
int balancer_choose(struct balancer *bal, const struct prefix_hashes *hashes, uint64_t among,
                    int64_t now_ns, enum balancer_reason *why);
/* A request goes there (its beginnings are remembered); it is over. */
void balancer_begin(struct balancer *bal, int i, const struct prefix_hashes *hashes);
void balancer_end(struct balancer *bal, int i);
void balancer_forget(struct balancer *bal, int i); /* its cache is gone */

void balancer_pin(struct balancer *bal, uint64_t what, int i);
int balancer_pinned(const struct balancer *bal, uint64_t what); /* -1 = not known */

/* What was learnt of a replica. True: it changed sides. */
bool balancer_probe_good(struct balancer *bal, int i, int64_t now_ns);
bool balancer_probe_bad(struct balancer *bal, int i, bool at_once);
void balancer_answer_good(struct balancer *bal, int i);
bool balancer_answer_bad(struct balancer *bal, int i, int64_t now_ns);

#endif
