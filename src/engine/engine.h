/*
 * The engine: one thread that owns a model, its KV cache and the scheduler, and turns requests into
 * events. Everything else talks to it through two queues: requests go in (engine_submit, any thread),
 * events come out (events.h). Knows tokens, not prompts: templates and protocols are above.
 *
 * Invariants:
 *  1. only the engine thread touches the model, the KV cache, the scheduler and a request's choices
 *  2. every choice of an accepted request gets exactly one EVENT_DONE, also when it is cancelled, when
 *     the step fails or the engine closes; nothing of that choice comes after it
 *  3. a cancelled request is out of the scheduler, its pages given back, before the next step is
 *     planned; where steps run ahead (backend.h), one may have been planned already
 *  4. at most max_queue choices wait for their first step, and as many again of clients that had none
 *     waiting; a request is accepted whole or not at all
 *  5. what a request generates depends on its prompt, parameters and seed alone: not on when it was
 *     batched, preempted or served from the cache (to the bit with backend.deterministic)
 */
#ifndef STEEL_ENGINE_ENGINE_H
#define STEEL_ENGINE_ENGINE_H

#include "engine/events.h"
#include "engine/info.h"
#include "engine/runtime.h"
#include "engine/draft.h"

enum { ENGINE_MAX_LOGPROBS = SAMPLE_MAX_TOP, ENGINE_MAX_CHOICES = 128, ENGINE_MAX_STOPS = 64 };

struct engine_options {
    struct runtime_options
        runtime; /* max_seqs 0 = 16, on a GPU what its cache holds; progress is the engine's own */
    int max_queue;        /* choices that may wait; 0 = 512 */
    int max_per_client;   /* choices of one client that run at once; 0 = no bound but its share */
    double step_ms;       /* time budget of a step with decodes; 0 = automatic */
    bool no_prefix_cache; /* pages are shared while in use, not kept */
};

/* FAILED: the model could not be loaded, or a step failed since. Requests then get that error, and
 * the engine runs no more. */
enum engine_state { ENGINE_LOADING, ENGINE_READY, ENGINE_FAILED };

/* Everything but queue and user is copied. Zero is a sensible value for all but prompt and sample. */
struct request_spec {
    const int32_t *prompt; /* (n_prompt) */
    int n_prompt;
    int n;                       /* choices; 0 = 1. Choice i draws with seed + i */
    struct sample_params sample; /* seed included */
    int max_tokens;              /* 0 = as many as the context holds */
    int min_tokens;              /* no end token before that many */
    bool ignore_eos;
    bool special;            /* control tokens show in the text */
    bool no_cache;           /* read the whole prompt anew */
    bool read_only;          /* no answer: the prompt is read into the cache, then DONE */
    bool logprobs;           /* with n_top best tokens each */
    int n_top;               /* 0..ENGINE_MAX_LOGPROBS */
    bool prompt_logprobs;    /* of the prompt's tokens too: EVENT_PROMPT. All of it is computed */
    const char *const *stop; /* (n_stop) */
    int n_stop;
    /* Stop strings do not count inside thinking: between these marks, of which the first may only
     * begin the answer. NULL = there is none. */
    const char *think_open, *think_close;
    bool in_thinking; /* the prompt has opened it */
    struct grammar
        *grammar;     /* what the answer must fit (text/grammar/grammar.h); NULL = anything */
    uint64_t client;  /* whose it is: clients take turns; 0 is one like the others */
    const char *salt; /* keeps cached pages among requests of the same salt; NULL = common */
    struct lora_pick loras[LORA_MAX_USES]; /* (n_loras) adapters, as adapters.h knows them */
    int n_loras;
    struct events *queue;
    void *user;
};

enum submit_result {
    SUBMIT_OK,
    SUBMIT_INVALID,   /* the request can never run */
    SUBMIT_TOO_LONG,  /* ... because its prompt does not fit the context */
    SUBMIT_FULL,      /* try again later */
    SUBMIT_NOT_READY, /* loading, failed, closing or out of memory */
};

enum { HISTOGRAM_BUCKETS = 22 };
extern const double histogram_bounds[HISTOGRAM_BUCKETS]; /* seconds, upper ends */
struct histogram {
    uint64_t count[HISTOGRAM_BUCKETS + 1]; /* the last: above all bounds */
    double sum;
};

struct engine_stats {
    int n_running, n_waiting; /* choices */
    int pages_total, pages_held, pages_idle;
    uint64_t n_steps, n_requests;
    uint64_t n_ahead;       /* steps started before the one before them ended */
    uint64_t n_read_steps;  /* that read several tokens of a sequence: prompts, forced ones */
    uint64_t n_drafted;     /* tokens drafted and read (draft.h) */
    uint64_t n_accepted;    /* of those, right */
    uint64_t n_forced;      /* tokens that a constraint left no choice about: fed unchosen */
    uint64_t prompt_tokens; /* of requests that started */
    uint64_t read_tokens;   /* prompt tokens computed, again after preemption included */
    uint64_t generated_tokens;
    uint64_t cache_queries, cache_hits; /* prompt tokens */
    uint64_t n_preempted, n_evicted;
    uint64_t finished[N_FINISHES];   /* choices */
    uint64_t n_rejected;             /* queue full */
    double busy_s, read_s, decode_s; /* time in steps; with and without reading */
    struct histogram first_token, inter_token, total, queued; /* seconds */
    double decode_ms, read_us; /* learned: a step of the present decodes, a token */
    double budget_ms;          /* of a step while answers run */
    int64_t max_gap_ns;        /* the longest time between two tokens of one choice */
};

struct engine;
struct request;

/* Returns at once; the engine's thread loads the model (NULL: the built-in one). engine_wait: until it is ready or failed. */
struct engine *engine_open(const char *path, const struct engine_options *opt);
enum engine_state engine_state(struct engine *e, int *percent, struct error *err);
bool engine_wait(struct engine *e, struct error *err);
void engine_wait_ms(struct engine *e, int ms); /* ... but no longer than that */
/* Ends running requests (FINISH_CANCEL) and the thread. */
void engine_close(struct engine *e);

/* Valid once the engine is ready. */
struct engine_info engine_info(const struct engine *e);
/* NULL: the model has no vocabulary, and why (may be NULL) says so. */
const struct tokenizer *engine_tokenizer(const struct engine *e, struct error *why);
const struct tensorfile *engine_file(const struct engine *e); /* for its metadata */
const struct runtime *
engine_runtime(const struct engine *e);     /* for the engine's own files and tests */
int engine_context(const struct engine *e); /* tokens a sequence may have */
int engine_max_queue(const struct engine *e);
struct adapters *engine_adapters(const struct engine *e); /* NULL: there are none */

/* On SUBMIT_OK *out (may be NULL: never cancelled) is the caller's handle until request_free. */
enum submit_result engine_submit(struct engine *e, const struct request_spec *spec,
                                 struct request **out, struct error *err);
/* Whether the biases leave a token that ends an answer; and besides a beginning to what g allows, as far as
 * that can be said before anything is chosen. Any thread; takes as long as some masks. */
bool engine_may_end(const struct engine *e, const struct sample_params *p);
bool engine_may_fit(struct engine *e, const struct sample_params *p, struct grammar *g,
                    struct error *err);
void request_cancel(struct request *r); /* any thread; takes effect before the next step */
void request_free(struct request *r);   /* the handle only: the request goes on */

void engine_stats(struct engine *e, struct engine_stats *out);
/* For tests: called by the engine thread before every step with the number of sequences in it. */
void engine_on_step(struct engine *e, void (*fn)(void *arg, int n_items), void *arg);
/* For tests: says what is drafted in the place of the model's block. Before the first request. */
void engine_on_draft(struct engine *e,
                     void (*fn)(void *arg, const int32_t *tokens, int n_tokens, int32_t *drafts,
                                int n),
                     void *arg);

#endif
