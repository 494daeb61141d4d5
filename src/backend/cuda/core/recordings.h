/*
 * Which steps stay recorded. A recorded step takes memory on both sides, and recording one takes as long as launching it
 * several times; but a small step that is launched kernel by kernel waits for the host. So
 *  1. a step of up to RECORD_ALWAYS sequences is recorded when it first runs, a larger one when its layout runs again:
 *     with a thousand sequences the number in a step changes all the time, and the device is busy longer than the host;
 *  2. at most MAX_GRAPHS are kept. A new one takes the place of the one used longest ago, if that has not run for
 *     RECORD_STALE steps; for a small one also if RECORD_REST steps have passed since the last exchange. So many layouts do not
 *     take each other's places in turn, and a single user who follows a crowd gets one at once.
 * Plain C, and knows steps by a hash of their layout only: the caller compares layouts.
 */
#ifndef STEEL_CUDA_RECORDINGS_H
#define STEEL_CUDA_RECORDINGS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    MAX_GRAPHS = 512,
    RECORD_ALWAYS = 64,
    RECORD_STALE = 4096,
    RECORD_REST = 256,
    RECORD_SEEN = 2048
};

struct recordings {
    int n;
    uint64_t turn;              /* counts steps */
    uint64_t exchanged;         /* turn of the last exchange */
    uint64_t hash[MAX_GRAPHS];  /* (n) */
    uint64_t used[MAX_GRAPHS];  /* (n) turn of the last replay */
    uint64_t seen[RECORD_SEEN]; /* large steps that ran once, by hash */
};

static inline uint64_t recordings_mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* A step begins. The place of its recording; -1 = it has none. */
static inline int recordings_find(struct recordings *r, uint64_t hash)
{
    r->turn++;
    for (int i = 0; i < r->n; i++)
        if (r->hash[i] == hash) {
            r->used[i] = r->turn;
            return i;
        }
    return -1;
}

/* The place to record that step at, whose old recording, if there is one, goes; -1 = it is not recorded now. */
static inline int recordings_place(struct recordings *r, uint64_t hash, int n_seqs)
{
    uint64_t *seen = &r->seen[hash % RECORD_SEEN];
    int oldest = 0;
    if (n_seqs > RECORD_ALWAYS && *seen != hash) {
        *seen = hash;
        return -1;
    }
    if (r->n < MAX_GRAPHS)
        return r->n;
    for (int i = 1; i < r->n; i++)
        oldest = r->used[i] < r->used[oldest] ? i : oldest;
    uint64_t unused = r->turn - r->used[oldest];
    bool small = n_seqs <= RECORD_ALWAYS && r->turn - r->exchanged > RECORD_REST;
    return unused > RECORD_STALE || (small && unused > RECORD_REST) ? oldest : -1;
}

/* The step is recorded at that place. */
static inline void recordings_add(struct recordings *r, int place, uint64_t hash)
{
    r->exchanged = place < r->n ? r->turn : r->exchanged;
    r->hash[place] = hash;
    r->used[place] = r->turn;
    r->n += place == r->n;
}

#endif
