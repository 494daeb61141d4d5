/*
 * Steel as a library: a model in, text out, many requests at once. Link with libsteel.a.
 *
 *   engine   a loaded model with a thread of its own that batches whatever is submitted
 *   request  a prompt on its way to an answer; any thread may submit, any thread may cancel
 *   event    a piece of news about a request: it started, it got a token, it is done
 *   queue    where events arrive; a request has its own unless it shares one
 *   chat     a conversation, rendered by the model's own template
 *   embedder a model that makes vectors of texts, or scores of documents
 *   answer   the next message of a chat on its way: thinking, text and tool calls, told apart
 *
 * Functions that can fail return NULL, false or a negative count and fill the caller's steel_error
 * (which may be NULL). Everything a call points to is copied. Handles are freed by the caller:
 * answers and requests first, then chats, engines last. Texts are UTF-8. JSON goes in and out as text.
 */
#ifndef STEEL_H
#define STEEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

struct steel_engine;
struct steel_request;
struct steel_queue;
struct steel_chat;
struct steel_answer;

enum steel_error_kind {
    STEEL_OK,
    STEEL_INVALID,   /* bad file, bad request: the message says what */
    STEEL_TOO_LONG,  /* the prompt does not fit the context */
    STEEL_FULL,      /* too many requests wait: try again later */
    STEEL_NOT_READY, /* the engine is closing or has failed */
    STEEL_NO_CHAT,   /* the model has no chat template */
};
struct steel_error {
    enum steel_error_kind kind;
    char message[1024];
};

const char *steel_version(void); /* "0.2.0" */

/* Engines */

struct steel_engine_options {
    const char *device; /* "cpu", "cuda", "cuda:1"; NULL = a GPU the model fits, or the CPU */
    int threads;        /* 0 = all cores */
    int context;        /* tokens a request may have; 0 = the model's own, or what fits */
    int max_requests; /* answers generated at once; 0 = 16, on a GPU up to 256 as its cache holds */
    int max_queue;    /* requests that may wait beyond those; 0 = 512 */
    int max_per_client; /* answers of one client generated at once; 0 = no bound but its share */
    size_t kv_bytes;    /* most memory for the KV cache; 0 = what context x max_requests needs */
    size_t
        state_bytes; /* for checkpoints of recurrent states; 0 = two for each request, or fewer */
    double step_ms;  /* how long a step may keep running answers waiting; 0 = automatic */
    bool deterministic;   /* the same request gives the same bytes in any company */
    bool no_prefix_cache; /* do not keep prompts for requests that begin alike */
    bool no_repack;       /* compute from the mapped file: starts at once, runs slower */
    bool profile;         /* measure where the time goes: steel_engine_profile */
    const char *kv_type;  /* "f16", "bf16", "f32", "q8_0", "fp8", "q4_0"; NULL = f16 */
    int page_len;         /* tokens a page of the KV cache; 0 = 16 */
    float gpu_memory;     /* share of a GPU's memory that may be in use; 0 = 0.9 */
    /* Called while the model loads; false gives up. */
    bool (*progress)(void *arg, int percent);
    void *progress_arg;
    const char *k_type, *v_type; /* of keys and of values apart; NULL = kv_type */
    /* (n_loras) LoRA adapters, "[NAME=]PATH[:SCALE]" each: a PEFT folder or a GGUF adapter. Requests
     * choose by name. */
    const char *const *loras;
    int n_loras;
    int max_lora_rank; /* more may be loaded later, up to this rank; 0 = none */
    int draft; /* tokens that the model's MTP block drafts ahead; 0 = one where it has such, -1 = none */
};

/* Loads a GGUF file or a Hugging Face folder; NULL options and zero fields are defaults; NULL path:
 * the built-in model. Returns when the model is ready. */
struct steel_engine *steel_engine_open(const char *path, const struct steel_engine_options *options,
                                       struct steel_error *error);
/* Ends running requests (their queues hear of it) and frees the engine. */
void steel_engine_close(struct steel_engine *engine);

int steel_engine_context(const struct steel_engine *engine);
int steel_engine_n_vocab(const struct steel_engine *engine);

struct steel_info {
    const char *path, *family, *device; /* hold as long as the engine */
    const char *notice;                 /* what its user should know; "" = nothing */
    uint64_t n_params, n_active;        /* active: used for one token */
    uint64_t bytes;                     /* of weights */
};
void steel_engine_info(const struct steel_engine *engine, struct steel_info *out);
/* Where the time went, as a table, if asked for when the engine was opened. Writes at most `cap` bytes,
 * the closing 0 included; returns the length of all. Call it while no request runs. */
int steel_engine_profile(const struct steel_engine *engine, char *text, int cap);

/* Adapters while the engine runs: steel_engine_options.max_lora_rank allows it. Unloading one that
 * requests use fails: STEEL_FULL, try again later. Any thread. */
bool steel_engine_load_lora(struct steel_engine *engine, const char *name, const char *path,
                            float scale, struct steel_error *error);
bool steel_engine_unload_lora(struct steel_engine *engine, const char *name,
                              struct steel_error *error);

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
    size_t n_text;         /* (bytes of it; 0 = up to its closing 0) */
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
    int repeat_last_n;    /* tokens it looks back on; -1 = all */
    float presence_penalty, frequency_penalty;
    uint64_t seed;           /* same request, same seed: same answer */
    const char *const *stop; /* (n_stop) texts that end the answer */
    int n_stop;
    const struct steel_bias *bias; /* (n_bias) */
    int n_bias;
    int top_logprobs; /* -1 = none; 0..20 = that many alternatives with every token */
    /* What the answer fits, to the last byte; at most one of these, NULL = anything. It then ends where
     * it is complete; when max_tokens runs low, it ends as soon as it can. */
    const char *json_schema; /* a JSON Schema */
    bool json;               /* any JSON object */
    const char *regex;       /* a regular expression that all of it matches */
    const char *grammar;     /* a GBNF grammar that begins at `root` */
    const char *one_of;      /* a JSON array of strings */
    /* Of chats with tools: "none", "required", or the name of the tool to call; NULL = as the model
     * likes. Arguments follow a tool's schema where it is "strict" or a call is required. */
    const char *tool_choice;
    bool one_call; /* at most one call */
    bool ignore_eos;
    bool show_special;         /* control tokens appear in the text */
    bool read_only;            /* reads the prompt into the cache and generates nothing */
    uint64_t client;           /* whose it is: clients take turns, whatever each asks for */
    const char *cache_salt;    /* share cached prompts only with requests of the same salt */
    struct steel_queue *queue; /* NULL = one of its own: steel_request_next */
    void *user;                /* comes back in every event */
    const char
        *lora; /* adapters to use, "NAME[:SCALE]", several with commas; NULL = the model alone */
};
/* Defaults: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05, the rest off. Start from these, or
 * from what the model's author advises. */
struct steel_request_options steel_request_options(void);
struct steel_request_options steel_engine_request_options(const struct steel_engine *engine);

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
    int n_drafted, n_accepted;              /* tokens drafted ahead, and of those the right ones */
};

/* The next event of a request with a queue of its own; its pointers hold until the next call. Waits
 * up to timeout_ms (-1 = for ever). False: nothing came, or all is done (steel_request_done). */
bool steel_request_next(struct steel_request *request, struct steel_event *event, int timeout_ms);
bool steel_request_done(const struct steel_request *request);
int steel_request_fd(const struct steel_request *request); /* of its own queue; -1 = shared */

/* One queue for many requests, read by one thread. The descriptor is readable while events wait. */
struct steel_queue *steel_queue_new(void); /* NULL: no file descriptor is left */
bool steel_queue_next(struct steel_queue *queue, struct steel_event *event, int timeout_ms);
int steel_queue_fd(const struct steel_queue *queue);
void steel_queue_free(struct steel_queue *queue); /* when all its requests are done */

/* Chats: one thread at a time uses a chat and its answer; any thread may cancel the answer. */

/* template_path: a file with a Jinja template, a GGUF file or a folder whose template is used in place
 * of the model's own (NULL). */
struct steel_chat *steel_chat_new(struct steel_engine *engine, const char *template_path,
                                  struct steel_error *error);
void steel_chat_free(struct steel_chat *chat);

/* What every prompt is rendered with, from now on. tools: a JSON array of {"type": "function",
 * "function": {"name", "description", "parameters"}}; variables: a JSON object of further variables
 * for the template, as {"reasoning_effort": "low"}; format: how the model writes its calls ("hermes",
 * "qwen3_coder", "llama3_json", "pythonic", "mistral", "deepseek_r1", "gpt_oss", "none"). NULL: none,
 * or what the template tells. */
enum steel_thinking { STEEL_THINK_AUTO, STEEL_THINK_ON, STEEL_THINK_OFF };
bool steel_chat_set_system(struct steel_chat *chat, const char *text, struct steel_error *error);
bool steel_chat_set_tools(struct steel_chat *chat, const char *json, struct steel_error *error);
bool steel_chat_set_variables(struct steel_chat *chat, const char *json, struct steel_error *error);
bool steel_chat_set_format(struct steel_chat *chat, const char *name, struct steel_error *error);
void steel_chat_set_thinking(struct steel_chat *chat, enum steel_thinking thinking);

struct steel_message {
    const char *role;       /* "user", "assistant", "tool", "system" */
    const char *content;    /* NULL only beside calls */
    const char *thinking;   /* of an assistant; NULL = none */
    const char *tool_calls; /* of an assistant: a JSON array as in OpenAI's API; NULL = none */
    const char *call_id;    /* of a tool: the call whose result this is */
};
bool steel_chat_add(struct steel_chat *chat, const struct steel_message *message,
                    struct steel_error *error);
/* One message or an array of them as in OpenAI's API. All are added or none. */
bool steel_chat_add_json(struct steel_chat *chat, const char *json, struct steel_error *error);
int steel_chat_n_messages(const struct steel_chat *chat);          /* the system text aside */
const char *steel_chat_role(const struct steel_chat *chat, int i); /* of message i */
void steel_chat_cut(struct steel_chat *chat, int n);               /* keeps the first n messages */
/* The messages from `first` on as a JSON array, and the prompt of the next answer. Both write at most
 * `cap` bytes, the closing 0 included, and return the length of all; negative on failure. */
int steel_chat_json(const struct steel_chat *chat, int first, char *text, int cap);
int steel_chat_render(const struct steel_chat *chat, char *text, int cap,
                      struct steel_error *error);

/* Answers the conversation as it stands. Of the options the prompt, the queue, choices and
 * show_special do not count. One answer at a time: it joins the conversation with STEEL_CHAT_DONE,
 * also when it was cancelled, if it has begun. */
struct steel_answer *steel_chat_answer(struct steel_chat *chat,
                                       const struct steel_request_options *options,
                                       struct steel_error *error);
void steel_answer_cancel(struct steel_answer *answer);
/* Frees the handle; an answer that is not done is cancelled and does not join the conversation. */
void steel_answer_free(struct steel_answer *answer);

enum steel_chat_event_kind {
    STEEL_CHAT_STARTED,
    STEEL_CHAT_THINKING,  /* a piece of text */
    STEEL_CHAT_TEXT,      /* a piece of text */
    STEEL_CHAT_CALL,      /* a tool is called: text is its name */
    STEEL_CHAT_ARGUMENTS, /* a piece of the call's arguments, which together are a JSON object */
    STEEL_CHAT_CALL_END,
    STEEL_CHAT_DONE, /* the last one, always */
    /* Instead of STEEL_CHAT_CALL_END: the call was none, or was cut. Its whole text follows as
     * STEEL_CHAT_TEXT; the next call has its number. */
    STEEL_CHAT_CALL_BROKEN,
};
struct steel_chat_event {
    enum steel_chat_event_kind kind;
    const char *text; /* (n_text) whole characters, not NUL-terminated */
    size_t n_text;
    int call;               /* number of the call in this answer, from 0 */
    const char *call_id;    /* with STEEL_CHAT_CALL */
    struct steel_event end; /* with STEEL_CHAT_DONE: how it finished, counts, times */
};
/* The next event; its pointers hold until the next call. As steel_request_next. The descriptor is
 * readable while news of the engine wait: then call with timeout 0 until it says false. */
bool steel_answer_next(struct steel_answer *answer, struct steel_chat_event *event, int timeout_ms);
int steel_answer_fd(const struct steel_answer *answer);

/* Templates rewrite the past (earlier thinking goes): this reads what the next turn will begin with
 * into the cache, in the background, while nobody asks anything. The next answer then reads only what
 * is new in it. Harmless at any time, and never waits. */
void steel_chat_settle(struct steel_chat *chat);

/* Embeddings: vectors of texts, by an encoder (BERT, XLM-RoBERTa, ModernBERT) or any decoder, and scores
 * of documents by a reranker. Any number of threads may ask at once: their texts share steps. */

struct steel_embedder;
struct steel_embedder_options {
    const char *device;  /* as an engine's */
    int threads;         /* 0 = all cores */
    int context;         /* tokens a text may have; 0 = the model's own, 8192 at most */
    const char *pooling; /* "none", "cls", "mean", "last", "rank"; NULL = the model's own */
    bool unnormalized;   /* vectors as they come, not of length 1 */
    bool rank;           /* for steel_rerank */
    bool deterministic;  /* the same text gives the same bytes in any company */
    float gpu_memory;    /* share of a GPU's memory that may be in use; 0 = 0.9 */
};
struct steel_embedder *steel_embedder_open(const char *path,
                                           const struct steel_embedder_options *options,
                                           struct steel_error *error);
void steel_embedder_close(struct steel_embedder *embedder);
int steel_embedder_width(const struct steel_embedder *embedder); /* floats of a vector */
int steel_embedder_context(const struct steel_embedder *embedder);

enum { STEEL_TRUNCATE = 1 }; /* texts that are too long are cut rather than refused */
/* vectors: (n, width). All texts, or none. */
bool steel_embed(struct steel_embedder *embedder, const char *const *texts, int n, int flags,
                 float *vectors, struct steel_error *error);
/* One text as token ids; out: (width), or, with pooling "none", the last hidden state of every token:
 * (n, width). */
bool steel_embed_tokens(struct steel_embedder *embedder, const int32_t *tokens, int n, float *out,
                        struct steel_error *error);
/* scores: (n), larger is better; a sigmoid makes them 0 to 1. */
bool steel_rerank(struct steel_embedder *embedder, const char *query, const char *const *documents,
                  int n, int flags, float *scores, struct steel_error *error);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif
