/*
 * The engine: one thread that owns a model, its KV cache and the scheduler, and turns requests into
 * events. Everything else talks to it through two queues: requests go in (engine_submit, any thread),
 * events come out (events.h). It knows tokens, not prompts: templates and protocols are above it.
 *
 * Invariants:
 *  1. Only the engine thread touches the model, the KV cache, the scheduler and a request's choices.
 *  2. Every choice of an accepted request gets exactly one EVENT_DONE, also when it is cancelled, when a
 *     step fails or when the engine closes. It is the choice's last event.
 *  3. A cancelled request has left the scheduler and released its pages before the next step is planned.
 *     On async backends (backend.h) one step may have been planned already.
 *  4. At most max_queue choices wait for their first step, and as many again of clients that had none
 *     waiting. A request is accepted whole or not at all.
 *  5. The tokens of a request depend on its prompt, parameters and seed alone. They do not depend on
 *     batching, preemption or the prefix cache (bit by bit with backend.deterministic).
 */
#ifndef STEEL_ENGINE_ENGINE_H
#define STEEL_ENGINE_ENGINE_H

#include "engine/events.h"
#include "engine/info.h"
#include "engine/runtime.h"
#include "engine/token_rules.h"
#include "engine/draft.h"

enum { ENGINE_MAX_LOGPROBS = SAMPLE_MAX_TOP, ENGINE_MAX_CHOICES = 128, ENGINE_MAX_STOPS = 64 };

/* Prefixes on disk (keeper.h). */
struct keep_options {
    const char *dir;  /* NULL = none */
    const char *name; /* the model's, for lists */
    uint64_t most_bytes;
    size_t least_weights; /* smaller models compute faster than they read */
};

struct engine_options {
    /* max_seqs 0 = 16, or what a GPU's cache holds; progress is set by the engine */
    struct runtime_options runtime;
    int max_queue;      /* waiting choices; 0 = two for each sequence of a step, at least 512 */
    size_t embed_bytes; /* of embeddings in the prompts of waiting and running requests; 0 = 1 GB */
    int max_per_client; /* running choices of one client; 0 = its share is the only bound */
    double itl_ms;      /* target between two tokens of an answer; 0 = automatic */
    double ttft_ms;     /* target of the first token; 0 = none */
    bool no_prefix_cache; /* pages are shared while held, and not kept afterwards */
    struct keep_options keep;
};

/* FAILED: the model could not be loaded, or a step has failed. Requests get that error, and no more steps
 * run. */
enum engine_state { ENGINE_LOADING, ENGINE_READY, ENGINE_FAILED };

/* Rows of a prompt that are embeddings, such as an image's features. */
struct prompt_embeds {
    int at, n;         /* they replace prompt tokens [at, at + n), which are placeholders */
    const float *rows; /* (n, network_embed_width) */
    int first;         /* their number among the rows of the same id */
    bool two_way;      /* the rows see each other, also later ones. Not with prompt_logprobs */
    /* hold keeps the rows until release, from any thread. NULL: the engine copies them. */
    void *owner;
    void (*hold)(void *owner), (*release)(void *owner);
    uint8_t id[32]; /* a hash of the content: equal ids mean equal rows. Cached pages rely on it */
};

/* All is copied but queue and user, and rows that have an owner. Zero is a valid default for everything but prompt and sample. */
struct request_spec {
    const int32_t *prompt; /* (n_prompt) */
    int n_prompt;
    /* (n_embeds) ascending; runtime_options.embeds allows them */
    const struct prompt_embeds *embeds;
    int n_embeds;
    const int32_t *rope_pos;     /* (n_prompt, 3) M-RoPE positions; NULL = the index three times */
    int n;                       /* choices; 0 = 1. Choice i draws with seed + i */
    struct sample_params sample; /* seed included */
    int max_tokens;              /* 0 = as many as the context holds */
    int min_tokens;              /* end tokens are banned before */
    bool ignore_eos;
    bool special;            /* control tokens are part of the text */
    bool no_cache;           /* compute the whole prompt */
    bool read_only;          /* nothing is generated: the prompt is read into the cache */
    bool logprobs;           /* of each token, and of the n_top best */
    int n_top;               /* 0..ENGINE_MAX_LOGPROBS */
    bool prompt_logprobs;    /* of the prompt too: EVENT_PROMPT. The whole prompt is computed */
    const char *const *stop; /* (n_stop) */
    int n_stop;
    /* Stop strings do not apply to thinking, the text between these marks. The opening mark counts only at the
     * beginning. NULL = no thinking. */
    const char *think_open, *think_close;
    bool in_thinking; /* the prompt ends inside it */
    struct grammar
        *grammar; /* constrains the generated text (text/grammar/grammar.h); NULL = free */
    struct token_rules *rules; /* further rules about tokens (token_rules.h); NULL = none */
    const int32_t
        *stop_tokens; /* (n_stop_tokens) tokens that end the answer, besides the model's */
    int n_stop_tokens;
    bool include_stop; /* the stop string, or the text of the stop token, is part of the answer */
    uint64_t client;   /* clients take turns; 0 is a client like the others */
    const char *salt;  /* cached pages are shared within one salt only; NULL = no salt */
    struct lora_pick loras[LORA_MAX_USES]; /* (n_loras) adapters, from adapters.h */
    int n_loras;
    bool no_draft; /* no drafts are made for it */
    /* For benchmarks: (n_replay) the answer's first tokens, whatever the logits are. The work is that of choosing them. */
    const int32_t *replay;
    int n_replay;
    struct events *queue;
    void *user;
};

enum submit_result {
    SUBMIT_OK,
    SUBMIT_INVALID,   /* can never run */
    SUBMIT_TOO_LONG,  /* can never run: the prompt does not fit the context */
    SUBMIT_FULL,      /* try again later */
    SUBMIT_NOT_READY, /* loading, failed, closing or out of memory */
};

enum { HISTOGRAM_BUCKETS = 22 };
extern const double histogram_bounds[HISTOGRAM_BUCKETS]; /* seconds, upper ends */
struct histogram {
    uint64_t count[HISTOGRAM_BUCKETS + 1]; /* the last: above all bounds */
    double sum;
};

/* Seconds in which prefixes were read from disk: all of them, and parts. */
struct engine_disk_times {
    double all, wait; /* wait: for files that are being read and checked */
    double call;      /* on the engine's thread: copies into the cache, and its steps before them */
    double pin, copy; /* parts of call */
};

/* Seconds of images by part: those of images.h and encoder.h. */
struct engine_image_times {
    uint64_t n_views, n_steps;
    double decode, patches, rows, waiting, steps, fetch, copy;
};

struct engine_stats {
    int n_running, n_waiting; /* choices */
    int pages_total, pages_held, pages_idle;
    uint64_t n_steps, n_requests;
    uint64_t n_ahead;      /* steps started before the one before them ended */
    uint64_t n_read_steps; /* steps with several tokens of a sequence: prompts, forced tokens */
    uint64_t n_drafted[N_DRAFT_SOURCES];  /* draft tokens read (draft.h) */
    uint64_t n_accepted[N_DRAFT_SOURCES]; /* draft tokens accepted */
    uint64_t n_held;        /* times a choice sat steps out because its mask was not ready */
    double mask_s;          /* CPU time of masks */
    uint64_t n_forced;      /* tokens that a constraint determined: fed without sampling */
    uint64_t prompt_tokens; /* of started requests */
    uint64_t read_tokens;   /* prompt tokens computed, also again after preemption */
    uint64_t generated_tokens;
    uint64_t cache_queries, cache_hits; /* prompt tokens */
    uint64_t n_preempted, n_evicted;
    uint64_t n_wrong_pages;        /* choices that --kv-canary has ended */
    uint64_t finished[N_FINISHES]; /* choices */
    uint64_t n_rejected;           /* queue full */
    uint64_t disk_written, disk_read, disk_tokens, disk_damaged; /* bytes, bytes, tokens, files */
    struct engine_disk_times disk_times;
    struct engine_image_times images;
    double busy_s, read_s, decode_s; /* time in steps: all, with and without prompt chunks */
    struct histogram first_token, inter_token, total, queued; /* seconds */
    double decode_ms, read_us; /* learned costs: a step of the current decodes, a prompt token */
    double budget_ms;          /* of a step with decodes */
    double itl_ms, ttft_ms;    /* targets; 0 = none */
    /* Choices that ended by themselves, by the targets that they met; without a target nothing is counted. itl: the mean
     * of a choice. */
    uint64_t n_ttft_met, n_itl_met, n_both_met, n_judged;
    int most_running;   /* sequences that are admitted */
    int64_t max_gap_ns; /* longest inter-token latency of a choice */
};

struct engine;
struct request;

/* Returns at once; the engine's thread loads the model (NULL: the built-in one). engine_wait returns when the engine is
 * ready or has failed. */
struct engine *engine_open(const char *path, const struct engine_options *opt);
enum engine_state engine_state(struct engine *e, int *percent, struct error *err);
bool engine_wait(struct engine *e, struct error *err);
void engine_wait_ms(struct engine *e, int ms); /* the same with a bound */
/* Waits until kept prefixes are on disk, at most ms. Not on the engine's thread. */
void engine_flush(struct engine *e, int ms);
/* Ends running requests (FINISH_CANCEL) and the thread. */
void engine_close(struct engine *e);

/* Valid once the engine is ready. */
struct engine_info engine_info(const struct engine *e);
/* NULL where the model has no vocabulary; *why (may be NULL) gets the reason. */
const struct tokenizer *engine_tokenizer(const struct engine *e, struct error *why);
const struct tensorfile *engine_file(const struct engine *e); /* for its metadata */
const struct runtime *
engine_runtime(const struct engine *e);     /* for the engine's own files and tests */
int engine_context(const struct engine *e); /* the most tokens of a sequence */
int engine_max_queue(const struct engine *e);
struct adapters *engine_adapters(const struct engine *e); /* NULL = none */
struct encoder *engine_encoder(const struct engine *e);   /* of images; NULL = none */
bool engine_two_way(const struct engine *e); /* the model attends both ways inside an image */
struct image_cache *engine_image_cache(const struct engine *e); /* engine/images.h */

/* On SUBMIT_OK *out is the caller's handle until request_free. out may be NULL: the request is never cancelled. */
enum submit_result engine_submit(struct engine *e, const struct request_spec *spec,
                                 struct request **out, struct error *err);
/* engine_may_end: whether the logit biases leave an end token possible. engine_may_fit: whether they also leave a first
 * token that g allows, as far as this is known before sampling. Any thread; takes the time of a few masks. */
bool engine_may_end(const struct engine *e, const struct sample_params *p);
bool engine_may_fit(struct engine *e, const struct sample_params *p, struct grammar *g,
                    struct error *err);
void request_cancel(struct request *r); /* any thread; takes effect before the next step */
void request_free(struct request *r);   /* frees the handle only: the request continues */

void engine_stats(struct engine *e, struct engine_stats *out);
/* For benchmarks: what the engine has learned of drafts. Between requests. */
struct draft_cost engine_draft_cost(struct engine *e);
/* For tests: called by the engine thread before every step with the number of sequences in it. */
void engine_on_step(struct engine *e, void (*fn)(void *arg, int n_items), void *arg);
/* For tests and benchmarks: replaces the n drafts after tokens (n_tokens) by others, `most` at most; returns their number.
 * makes: also where there are none. Call it before the first request. */
void engine_on_draft(struct engine *e, bool makes,
                     int (*fn)(void *arg, const int32_t *tokens, int n_tokens, int32_t *drafts,
                               int n, int most),
                     void *arg);

#endif
