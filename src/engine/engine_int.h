/*
 * What the engine's files share: requests and their choices, steps in flight, the engine itself. Three files
 * own it together: requests.c accepts requests (any thread, under the lock), choice.c handles the tokens of
 * one choice, engine.c has the thread and its steps. Nobody else includes this.
 */
#ifndef STEEL_ENGINE_ENGINE_INT_H
#define STEEL_ENGINE_ENGINE_INT_H

#include "engine/engine.h"
#include "engine/masks.h"
#include "engine/scheduler.h"

#include <pthread.h>
#include <stdatomic.h>

struct choice {
    struct seq seq; /* first: the scheduler returns it */
    struct request *req;
    int index;
    struct sampler *sampler; /* from the first step on */
    struct output out;
    int64_t entered_ns, first_ns, last_ns;
    int at[2];    /* its index in the steps in flight, + 1; 0 = not in that one */
    bool refused; /* its constraint and biases leave no token */
    bool drafted; /* its last token is a placeholder for one that a step in flight will choose */
    struct draft_count drafts[N_DRAFT_SOURCES]; /* its part of engine_stats */
    int n_disk;                                 /* prompt tokens read from disk */
    int n_told;           /* prompt tokens whose log-probabilities were reported */
    struct mask_job mask; /* seq.held: the background computes it */
    bool costly;          /* its last mask took longer than a step waits */
    bool reread; /* a step in flight reads its last token in vain: it is dropped from the cache */
};

struct request {
    struct engine *engine;
    struct request *next; /* in the inbox */
    atomic_int refs;      /* of the caller's handle and the engine */
    atomic_bool cancelled;
    struct request_spec spec; /* with copies of all it points to */
    struct choice *choices;   /* (n) */
    struct prompt_rows *rows; /* of embeds and rope_pos; NULL = neither */
    float *embeds;            /* what rows points to, of spans without an owner */
    struct held_rows {
        void *owner;
        void (*release)(void *owner);
    } * held; /* (n_held) */
    int n_held;
    size_t embed_bytes; /* its part of the engine's */
    int n, n_open;
    int64_t submitted_ns;
};

/* A step in flight. */
struct engine_step {
    struct step_item *items; /* (max_seqs) */
    struct seq **seqs;       /* (max_seqs) as planned; NULL = has left since */
    struct request **ended;  /* (n_ended) have left since; the device may read their embeddings */
    int n_ended;
    int slot;                          /* its index in choice.at */
    bool follows;                      /* drafts are made after it (draft.h) */
    bool sampled;                      /* step_sample was called; false: its samplers must wait */
    bool records;                      /* the backend recorded it: its time is no measure */
    int n, n_decode, n_read, n_forced; /* n 0 = none */
    int64_t start_ns, draw_ns;         /* draw_ns: the host's draws */
};

/* Work of another thread for the engine's thread: engine_call. */
struct engine_call {
    struct engine_call *next;
    void (*fn)(void *arg);
    void *arg;
    enum { CALL_WAITS, CALL_DONE, CALL_DROPPED } state;
};

struct engine {
    pthread_t thread;
    struct image_cache *images; /* features of recent images */
    bool has_thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under lock */
    struct request *inbox, **inbox_end;
    struct engine_call *calls, **calls_end;
    int n_queued; /* choices in the inbox or waiting for their first step */
    struct queue_share {
        uint64_t client;
        int n;
        size_t embed_bytes;
    } * shares;         /* (n_shares) of n_queued and embed_bytes, by client */
    size_t embed_bytes; /* of requests that have not ended */
    int n_shares, shares_cap;
    bool quit, cancels, masks_done;
    bool restored; /* keeper_done has choices */
    enum engine_state state;
    struct error error;
    struct engine_stats shown;
    uint64_t n_rejected;
    /* the thread's own */
    char *path;
    struct engine_options opt;
    struct runtime *rt; /* set before READY, then constant */
    int context;
    struct scheduler sched;
    struct drafter spec; /* opt.from 0: no drafts */
    int *wants;          /* (max_seqs) scratch: drafts wanted by the sequences of a step */
    struct engine_step steps[2], *now, *next; /* on async backends next starts before now ends */
    int64_t end_ns;                           /* of the last step */
    bool was_idle;                            /* since then */
    struct touched {
        struct events *q;
        struct buf staged;
    } * touched; /* (n_touched of touched_cap) queues with events to deliver */
    int n_touched, touched_cap;
    struct buf text;
    float *logits;               /* (n_vocab) */
    struct choice **constrained; /* (max_seqs) scratch */
    struct mask_job **mask_jobs; /* (max_seqs) scratch */
    struct mask_maker *masks;
    struct keeper *keep;     /* NULL = prefixes are not kept on disk */
    int n_held;              /* choices whose seq is held */
    int64_t try_ns;          /* what the engine has waited for masks since the last plan */
    int64_t step_ns;         /* of the last step */
    struct logit_bias *ends; /* (n_ends) bans of every end token */
    int n_ends;
    struct engine_stats stats;
    void (*on_step)(void *arg, int n_items);
    void *on_step_arg;
    atomic_int percent;
};

/* engine.c. Runs fn(arg) on the engine's thread while no step is in flight, and waits for it. It must be short.
 * False: the engine closes or has failed, and fn did not run. Not for the engine's thread. */
bool engine_call(struct engine *e, void (*fn)(void *arg), void *arg);
void engine_wake(struct engine *e); /* keeper_done has a choice */

/* requests.c */
/* The last of its choices has ended. */
void request_end(struct engine *e, struct request *r);
/* Frees a place in the queue; takes the lock. */
void requests_leave_queue(struct engine *e, const struct request *r);

/* choice_mask.c */
/* Computes the masks of the next choices of a step's sequences, or holds those whose masks take long. Where a mask
 * leaves one token, that is taken as if it had been chosen: steps in flight need not choose it, and the next step
 * reads what has accumulated like a piece of a prompt. */
void choices_prepare(struct engine *e, struct engine_step *f);
/* The same for choices (n, reordered) that a step in flight does not have, without forced tokens. */
void choices_prepare_planned(struct engine *e, struct choice **choices, int n);
/* Ends the holding of those whose masks are ready. */
void choices_release(struct engine *e);
/* drafter.fit. */
int choice_fit_drafts(void *engine, struct seq *q, int32_t *drafts, int n, int most, int *n_kept);
/* Gives the mask of c up, if it is held. */
void choice_drop_mask(struct engine *e, struct choice *c);
/* The CPU time that masks may take in the background during the next step; as much as they can use while idle. */
void choices_grant(struct engine *e, bool idle);

/* choice.c. Events are staged during a step and delivered at its end. */
void choice_start(struct engine *e, struct choice *c); /* before its first step */
/* Appends a token to c. False: c has ended and may be freed. */
bool choice_take_token(struct engine *e, struct choice *c, int32_t token, struct engine_event *ev);
/* The only way to end a choice: leaves the scheduler, sends EVENT_DONE. It may be freed afterwards. */
void choice_end(struct engine *e, struct choice *c, enum finish how, int stop, const char *error);
/* Ends cancelled choices, or all when the engine closes or has failed. */
void choices_drop(struct engine *e, bool all);
/* Reports log-probabilities of a step's prompt rows as events. */
void choice_score_prompt(struct engine *e, struct choice *c, const struct step_item *it);
void choices_deliver(struct engine *e);
void choices_show_stats(struct engine *e);

#endif
