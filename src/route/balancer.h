/*
 * Chooses the replica for a request. Keeps a table of prompt prefixes and the replicas that have them
 * cached, a table of pins (ids of kept responses, which only one replica has), and the load and health
 * of every replica. Pure bookkeeping: no I/O, no clock of its own, one thread.
 *
 * Invariants:
 *  1. Both tables have a fixed size and evict the least recently used entry.
 *  2. The replica with the lowest score is chosen: its load minus the value of the cached part of the
 *     prompt. A prefix that is common to many prompts (a system prompt), not an earlier turn of this
 *     conversation, adds a term for how full the replica's cache is, so that all caches fill.
 *  3. A replica that is out of rotation, full, or not in `among` is never chosen.
 *  4. A replica leaves the rotation after `fails` bad probes or bad responses in a row, and at once if
 *     it reports that it is unhealthy or refuses connections. Only a good response resets the count of
 *     bad responses. Bad responses exclude it for a time that doubles with each exclusion.
 *  5. A replica enters the rotation after `rises` good probes in a row, the first time after one. Its
 *     share of traffic then grows from a tenth to all within slow_start_ns.
 */
#ifndef STEEL_ROUTE_BALANCER_H
#define STEEL_ROUTE_BALANCER_H

#include "route/prefix_hash.h"

enum { BALANCER_MAX_REPLICAS = 64 };

struct balancer_options {
    int n; /* replicas */
    int fails, rises;
    int64_t slow_start_ns;
    int max_load;      /* concurrent requests of one replica */
    size_t n_prefixes; /* entries of the prefix table */
    size_t n_pins;
};

struct balancer_replica {
    bool in, was_in;
    int load;
    int n_bad_probes, n_good_probes, n_bad_answers;
    int64_t in_since_ns; /* 0 = since the start: no slow start */
    int64_t out_until_ns, penalty_ns;
    double given;    /* recent prompt bytes that were not in its cache (decaying sum) */
    uint64_t chosen; /* the clock's value when it was last chosen */
};

struct balancer;
struct balancer *balancer_new(const struct balancer_options *opt);
void balancer_free(struct balancer *bal);
const struct balancer_replica *balancer_replica(const struct balancer *bal, int i);
int balancer_n_in(const struct balancer *bal);

enum balancer_reason { BALANCER_BY_PREFIX, BALANCER_BY_LOAD, BALANCER_NONE_IN, BALANCER_ALL_FULL };
/* Returns the replica for a request, or -1, and the reason in *why. hashes may be NULL. `among` has a
 * bit for each candidate. */
int balancer_choose(struct balancer *bal, const struct prefix_hashes *hashes, uint64_t among,
                    int64_t now_ns, enum balancer_reason *why);
/* A request starts on replica i, and its prefixes are recorded; a request ends. */
void balancer_begin(struct balancer *bal, int i, const struct prefix_hashes *hashes);
void balancer_end(struct balancer *bal, int i);
void balancer_forget(struct balancer *bal, int i); /* its cache is lost */

void balancer_pin(struct balancer *bal, uint64_t hash, int i);
int balancer_pinned(const struct balancer *bal, uint64_t hash); /* -1 = unknown */

/* The results of probes and responses. True: the replica entered or left the rotation. */
bool balancer_probe_good(struct balancer *bal, int i, int64_t now_ns);
bool balancer_probe_bad(struct balancer *bal, int i, bool at_once);
void balancer_answer_good(struct balancer *bal, int i);
bool balancer_answer_bad(struct balancer *bal, int i, int64_t now_ns);

#endif
