/*
 * Steel as a library: a model in, text out, many requests at once. Link with libsteel.a.
 *
 *   engine   a loaded model with a thread of its own that batches whatever is submitted
 *   request  a prompt on its way to an answer; any thread may submit, any thread may cancel
 *   event    a piece of news about a request: it started, it got a token, it is done
 *   queue    where events arrive; a request has its own unless it shares one
 *
 * Functions that can fail return NULL (or a negative count) and fill the caller's steel_error.
 * Everything a call points to is copied. Handles are freed by the caller; engines last.
 */
#ifndef STEEL_H
#define STEEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct steel_engine;
struct steel_request;
struct steel_queue;

enum steel_error_kind {
    STEEL_OK,
    STEEL_INVALID,   /* bad file, bad request: the message says what */
    STEEL_TOO_LONG,  /* the prompt does not fit the context */
    STEEL_FULL,      /* too many requests wait: try again later */
    STEEL_NOT_READY, /* the engine is closing or has failed */
};
struct steel_error {
    enum steel_error_kind kind;
    char message[1024];
};

/* Engines */

struct steel_engine_options {
    const char *device;   /* "cpu", "cuda"; NULL = a GPU the model fits, or the CPU */
    int threads;          /* 0 = all cores */
    int context;          /* tokens a request may have; 0 = the model's own, or what fits */
    int max_requests;     /* answers generated at once; 0 = 16 */
    int max_queue;        /* requests that may wait beyond those; 0 = 512 */
    size_t kv_bytes;      /* most memory for the KV cache; 0 = what context x max_requests needs */
    double step_ms;       /* how long a step may keep running answers waiting; 0 = automatic */
    bool deterministic;   /* the same request gives the same bytes in any company */
    bool no_prefix_cache; /* do not keep prompts for requests that begin alike */
    /* Called while the model loads; false gives up. */
    bool (*progress)(void *arg, int percent);
    void *progress_arg;
};

/* Loads a GGUF file or a Hugging Face folder; NULL options and zero fields are defaults; NULL path:
 * the built-in model. Returns when the model is ready. */
struct steel_engine *steel_engine_open(const char *path, const struct steel_engine_options *options,
                                       struct steel_error *error);
/* Ends running requests (their queues hear of it) and frees the engine. */
void steel_engine_close(struct steel_engine *engine);

int steel_engine_context(const struct steel_engine *engine);
int steel_engine_n_vocab(const struct steel_engine *engine);

struct steel_stats {
    int running, waiting; /* answers */
    int kv_pages, kv_pages_held, kv_pages_cached;
    uint64_t prompt_tokens, cached_tokens, generated_tokens;
    uint64_t steps, preemptions, cancellations;
};
void steel_engine_stats(struct steel_engine *engine, struct steel_stats *out);

/* Text. Both write at most `cap` items and return how many there are in all; negative on failure. */
enum {
    STEEL_PARSE_SPECIAL = 1, /* "<|im_end|>" in the text is that token */
    STEEL_ADD_SPECIAL = 2,   /* add what the model wants at the beginning */
};
int steel_engine_tokenize(const struct steel_engine *engine, const char *text, size_t len,
                          int flags, int32_t *ids, int cap, struct steel_error *error);
int steel_engine_detokenize(const struct steel_engine *engine, const int32_t *ids, int n,
                            char *text, int cap, struct steel_error *error);

/* Requests */

struct steel_bias {
    int32_t token;
    float bias; /* added to the logit; -INFINITY bans */
};

struct steel_request_options {
    const char *text;      /* the prompt: text, or */
    const int32_t *tokens; /* (n_tokens) token ids */
    int n_tokens;
    int choices;    /* answers to the one prompt; 0 = 1. Answer i draws with seed + i */
    int max_tokens; /* 0 = as many as the context holds */
    int min_tokens;
    float temperature;    /* 0 = always the likeliest token */
    int top_k;            /* 0 = off */
    float top_p;          /* 1 = off */
    float min_p;          /* 0 = off */
    float repeat_penalty; /* 1 = off */
    float presence_penalty, frequency_penalty;
    uint64_t seed;           /* same request, same seed: same answer */
    const char *const *stop; /* (n_stop) texts that end the answer */
    int n_stop;
    const struct steel_bias *bias; /* (n_bias) */
    int n_bias;
    int top_logprobs; /* -1 = none; 0..20 = that many alternatives with every token */
    bool ignore_eos;
    bool show_special;         /* control tokens appear in the text */
    const char *cache_salt;    /* share cached prompts only with requests of the same salt */
    struct steel_queue *queue; /* NULL = one of its own: steel_request_next */
    void *user;                /* comes back in every event */
};
/* Defaults: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05, the rest off. Start from these. */
struct steel_request_options steel_request_options(void);

struct steel_request *steel_request_submit(struct steel_engine *engine,
                                           const struct steel_request_options *options,
                                           struct steel_error *error);
/* Takes effect before the engine's next step. */
void steel_request_cancel(struct steel_request *request);
/* Frees the handle; a request with a queue of its own that is not done is cancelled first. */
void steel_request_free(struct steel_request *request);

/* Events */

enum steel_event_kind { STEEL_STARTED, STEEL_TOKEN, STEEL_DONE };
enum steel_finish { STEEL_STOP, STEEL_LENGTH, STEEL_CANCELLED, STEEL_FAILED };

struct steel_logprob {
    int32_t token;
    float logprob;
};

struct steel_event {
    enum steel_event_kind kind;
    void *user; /* of the request */
    int choice;
    int32_t token;
    const char *text; /* (n_text) new text, whole characters, not NUL-terminated; often empty */
    size_t n_text;
    float logprob;
    const struct steel_logprob *top; /* (n_top) */
    int n_top;
    /* with STEEL_DONE, which every choice gets exactly once */
    enum steel_finish finish;
    const char *error; /* with STEEL_FAILED */
    int n_prompt, n_cached, n_generated;
    double queue_s, first_token_s, total_s; /* since submission */
};

/* The next event of a request with a queue of its own; its pointers hold until the next call. Waits
 * up to timeout_ms (-1 = for ever). False: nothing came, or all is done (steel_request_done). */
bool steel_request_next(struct steel_request *request, struct steel_event *event, int timeout_ms);
bool steel_request_done(const struct steel_request *request);

/* One queue for many requests, read by one thread. The descriptor is readable while events wait. */
struct steel_queue *steel_queue_new(void);
bool steel_queue_next(struct steel_queue *queue, struct steel_event *event, int timeout_ms);
int steel_queue_fd(const struct steel_queue *queue);
void steel_queue_free(struct steel_queue *queue); /* when all its requests are done */

#ifdef __cplusplus
}
#endif

#endif
