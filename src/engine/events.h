/*
 * Events of requests, from engines' threads to a reader: a queue shared by any number of requests and engines, with one
 * reader. An engine stages a step's events in a buffer of its own and delivers them with one lock and one wake-up. A reader sleeps in
 * events_next, or watches events_fd in an event loop. Events are stored in byte buffers that swap roles, so
 * nothing is allocated once they have grown.
 */
#ifndef STEEL_ENGINE_EVENTS_H
#define STEEL_ENGINE_EVENTS_H

#include "base/buf.h"
#include "base/error.h"
#include "engine/draft_count.h"
#include "engine/output.h"
#include "sample/sampler.h"

#include <stdint.h>

enum event_kind {
    EVENT_START, /* left the queue for the first time */
    EVENT_TOKEN,
    EVENT_DONE, /* always the last one of a choice */
    EVENT_PROMPT, /* a token of the prompt, in order, between START and the answer; logprob NaN: the first */
};

enum finish { FINISH_STOP, FINISH_LENGTH, FINISH_CANCEL, FINISH_ERROR, N_FINISHES };

struct usage_count {
    int n_prompt, n_cached, n_generated, n_preempted;
    int n_disk; /* the part of n_cached that was read from disk */
    struct draft_count drafts[N_DRAFT_SOURCES];
    int64_t queue_ns, first_ns, total_ns; /* since submission; first_ns 0 = no token */
};

struct engine_event {
    enum event_kind kind;
    void *user; /* of the request */
    int index;  /* of the choice */
    int32_t token;
    const char *text; /* (n_text) whole characters; not NUL-terminated */
    size_t n_text;
    float logprob;                /* of the token, if requested */
    const struct token_prob *top; /* (n_top) best tokens */
    int n_top;
    /* DONE (usage.n_prompt and n_cached at START too) */
    enum finish finish;
    int stop;          /* the stop string that ended it, or -1 */
    const char *error; /* NUL-terminated; NULL unless FINISH_ERROR */
    bool refused;      /* the error is the request's own: it cannot be satisfied */
    struct usage_count usage;
};

struct events;
struct events *events_new(void);    /* NULL: no file descriptor is available */
void events_free(struct events *q); /* every request sent to it must be done */

/* The next event; its pointers hold until the next call. Waits up to timeout_ms (-1 = for ever). */
bool events_next(struct events *q, struct engine_event *ev, int timeout_ms);
/* Readable while events wait; events_next with timeout 0 until it says false. */
int events_fd(const struct events *q);

/* For an engine: its thread stages events for one queue, then flushes them, which empties the buffer. The queue is not
 * touched after events_flush: the reader may have freed it. */
void events_stage(struct buf *staged, const struct engine_event *ev);
void events_flush(struct events *q, struct buf *staged);

#endif
