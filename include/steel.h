/*
 * Steel as a library: load a model, submit requests, read events. Many requests run at once. Link
 * with libsteel.a.
 *
 *   engine    a loaded model with its own thread, which batches all submitted requests
 *   request   one prompt being answered; any thread may submit or cancel
 *   event     what happened to a request: it started, generated a token, or finished
 *   queue     where events arrive; a request has its own queue or shares one with others
 *   chat      a conversation, rendered with the model's chat template
 *   answer    the next message of a chat while it is generated: thinking, text and tool calls
 *   embedder  a model that turns texts into vectors, or scores documents for a query
 *
 * Errors: a function that can fail returns NULL, false or a negative count and fills the caller's
 * struct steel_error, which may be NULL.
 *
 * Ownership: texts and arrays passed in are copied and need not outlive the call. The caller frees
 * the handles it gets, in this order: answers and requests, then chats and queues, then the engine.
 * Freeing NULL is allowed.
 *
 * Texts are UTF-8. JSON is passed as text.
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
    STEEL_INVALID,   /* the file or the request is invalid: see the message */
    STEEL_TOO_LONG,  /* the prompt is longer than the context */
    STEEL_FULL,      /* the waiting line is full, or the object is in use: try again later */
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
    const char *device; /* "cpu", "cuda", "cuda:1"; NULL = a GPU if the model fits, else the CPU */
    int threads;        /* CPU threads; 0 = one per core */
    int context;      /* most tokens of a request; 0 = the model's limit, or what fits in memory */
    int max_requests; /* answers generated at once; 0 = 16, on a GPU what its cache holds, up to 1,024 */
    int max_queue;      /* requests that may wait besides those; 0 = twice as many, at least 512 */
    int max_per_client; /* answers generated at once per client; 0 = no limit but a fair share */
    size_t kv_bytes;    /* size of the KV cache; 0 = enough for context x max_requests */
    size_t state_bytes; /* size of checkpoints of recurrent states; 0 = two per request, or fewer */
    double itl_ms;      /* target between two tokens of an answer, in ms; 0 = automatic */
    bool deterministic; /* a request gives the same bytes whatever runs beside it */
    bool no_prefix_cache; /* do not reuse cached prompts for requests with the same prefix */
    bool no_repack;       /* compute from the mapped file: starts faster, runs slower */
    bool profile;         /* measure the time of each stage: steel_engine_profile */
    const char *kv_type;  /* "f16", "bf16", "f32", "q8_0", "fp8", "q4_0"; NULL = f16 */
    int page_len;         /* tokens per page of the KV cache; 0 = 16 */
    float gpu_memory;     /* share of a GPU's memory that may be in use; 0 = 0.9 */
    /* Called while the model loads. Return false to abort loading. */
    bool (*progress)(void *arg, int percent);
    void *progress_arg;
    const char *k_type, *v_type; /* types of keys and of values; NULL = kv_type */
    /* (n_loras) LoRA adapters, each "[NAME=]PATH[:SCALE]": a PEFT folder or a GGUF adapter. Requests
     * select them by name. */
    const char *const *loras;
    int n_loras;
    int max_lora_rank; /* adapters up to this rank may be loaded later; 0 = none */
    /* Draft tokens per step: 0 = as many as pay, -1 = none, N = always N from the draft model, or from the model's MTP
     * block or EAGLE-3 head. */
    int draft;
    bool images;          /* load the model's image tower, if it has one that runs here */
    const char *mmproj;   /* the image tower of a GGUF; NULL = mmproj*.gguf beside it, if it fits */
    int max_image_tokens; /* most tokens of an image; larger images are resized. 0 = 4096 */
    const char *
        draft_from; /* "text" (earlier text), "head" (the block or EAGLE-3 head), "model"; NULL = whichever pays */
    size_t
        expert_bytes; /* memory for experts; the others are read from the file. 0 = all, or what is free */
    /* A small model with the same vocabulary, or an EAGLE-3 head for this model, which drafts; NULL = none. */
    const char *draft_model;
    const char *draft_device; /* its device; NULL = the model's */
    double ttft_ms;           /* target of an answer's first token, in ms; 0 = none */
    size_t
        gpu_bytes; /* of a GPU's memory at most; experts that do not fit stay in host memory. 0 = no limit */
    int host_layers; /* number of layers, from the first, whose experts stay in host memory; -1 = all; 0 = only experts that do not fit */
    const char *
        host_tensors; /* and of layers with tensors of matching names: "REGEX=CPU,..."; NULL = none */
    int gpu_layers; /* as llama.cpp's n_gpu_layers: at least the model's layers, else an error; 0 = not given */
};

/* Loads a model: a GGUF file or a Hugging Face folder; path NULL = the built-in model. options
 * NULL, or zero fields, mean defaults. Returns when the model is ready, or NULL. */
struct steel_engine *steel_engine_open(const char *path, const struct steel_engine_options *options,
                                       struct steel_error *error);
/* Ends running requests, which get STEEL_DONE events, and frees the engine. */
void steel_engine_close(struct steel_engine *engine);

/* The most tokens of a request, and the size of the vocabulary. */
int steel_engine_context(const struct steel_engine *engine);
int steel_engine_n_vocab(const struct steel_engine *engine);

struct steel_info {
    const char *path, *family, *device; /* valid as long as the engine */
    const char *notice;          /* a warning for the user, such as a reduced context; "" = none */
    uint64_t n_params, n_active; /* parameters; active: those used for one token */
    uint64_t bytes;              /* size of the weights */
};
/* Fills *out with facts about the loaded model. */
void steel_engine_info(const struct steel_engine *engine, struct steel_info *out);

/* Writes the time of each stage as a text table; needs steel_engine_options.profile. Writes at
 * most `cap` bytes, terminating 0 included, and returns the length of the whole text. Call it
 * while no request runs. */
int steel_engine_profile(const struct steel_engine *engine, char *text, int cap);

/* Load or unload a LoRA adapter while the engine runs. Loading needs
 * steel_engine_options.max_lora_rank. Unloading an adapter that requests use fails with
 * STEEL_FULL: try again later. May be called from any thread. */
bool steel_engine_load_lora(struct steel_engine *engine, const char *name, const char *path,
                            float scale, struct steel_error *error);
bool steel_engine_unload_lora(struct steel_engine *engine, const char *name,
                              struct steel_error *error);

struct steel_stats {
    int running, waiting; /* answers being generated; requests waiting */
    int kv_pages;         /* pages of the KV cache */
    int kv_pages_held;    /* used by running requests */
    int kv_pages_cached;  /* kept for later requests with the same prefix */
    uint64_t prompt_tokens, cached_tokens, generated_tokens; /* totals since the engine opened */
    uint64_t steps, preemptions, cancellations;
};
/* A snapshot of the engine's counters. May be called from any thread. */
void steel_engine_stats(struct steel_engine *engine, struct steel_stats *out);

/* Tokenizer. Both functions write at most `cap` items and return the number of all items, which
 * may be larger; negative on failure. They may be called from any thread. */
enum {
    STEEL_PARSE_SPECIAL = 1, /* control tokens in the text, such as "<|im_end|>", become tokens */
    STEEL_ADD_SPECIAL = 2,   /* add the model's special tokens, such as BOS */
};
int steel_engine_tokenize(const struct steel_engine *engine, const char *text, size_t len,
                          int flags, int32_t *ids, int cap, struct steel_error *error);
int steel_engine_detokenize(const struct steel_engine *engine, const int32_t *ids, int n,
                            char *text, int cap, struct steel_error *error);

/* Requests */

struct steel_bias {
    int32_t token;
    float bias; /* added to the token's logit; -INFINITY forbids the token */
};

struct steel_request_options {
    const char *text;      /* the prompt as text, or NULL: see tokens */
    size_t n_text;         /* bytes of text; 0 = it is NUL-terminated */
    const int32_t *tokens; /* (n_tokens) the prompt as token ids */
    int n_tokens;
    int choices;          /* answers to generate for the prompt; 0 = 1. Answer i uses seed + i */
    int max_tokens;       /* most tokens to generate; 0 = until the context is full */
    int min_tokens;       /* no end before this many tokens */
    float temperature;    /* 0 = greedy: always the most likely token */
    int top_k;            /* 0 = off */
    float top_p;          /* 1 = off */
    float min_p;          /* 0 = off */
    float repeat_penalty; /* 1 = off */
    int repeat_last_n;    /* tokens the penalties look back on; -1 = all */
    float presence_penalty, frequency_penalty;
    float typical_p;   /* 1 = off */
    float top_n_sigma; /* keep logits within this many standard deviations of the best; 0 = off */
    float xtc_probability; /* how often the best tokens are left out; 0 = off */
    float xtc_threshold;   /* ... those with at least this probability, but for the last of them */
    float dynatemp_range;  /* the temperature follows the entropy, this far up and down; 0 = off */
    float dynatemp_exponent;
    int mirostat; /* 1 or 2: keep the surprise near mirostat_tau; 0 = off */
    float mirostat_tau, mirostat_eta;
    /* DRY: tokens that would continue a repetition of more than dry_allowed_length tokens lose
     * dry_multiplier * dry_base ^ (length - dry_allowed_length). 0 = off */
    float dry_multiplier, dry_base;
    int dry_allowed_length, dry_last_n; /* dry_last_n: tokens to look back on; -1 = all */
    const char *const *dry_breakers;    /* (n_dry_breakers) no repetition goes across these texts;
                                         * NULL = newline, colon, quote and asterisk */
    int n_dry_breakers;
    /* The sampling stages, separated by ";" or ",": penalties, dry, top_n_sigma, top_k, temperature,
     * typ_p, top_p, min_p, xtc. Others are off. NULL = all, in this order */
    const char *samplers;
    uint64_t seed;           /* the same request with the same seed gives the same answer */
    const char *const *stop; /* (n_stop) the answer ends before the first of these texts */
    int n_stop;
    const struct steel_bias *bias; /* (n_bias) changes to logits */
    int n_bias;
    int top_logprobs; /* -1 = no logprobs; 0..20 = logprobs, with this many alternatives per token */
    /* Constraint on the answer: set at most one; NULL = none. The whole answer satisfies it. It
     * ends when it is complete. When max_tokens runs low, it is completed in the shortest way. */
    const char *json_schema; /* a value that is valid under this JSON Schema */
    bool json;               /* any JSON object */
    const char *regex;       /* a text that matches this regular expression entirely */
    const char *grammar;     /* a text of this GBNF grammar, start symbol `root` */
    const char *one_of;      /* one of the strings of this JSON array */
    /* For chats with tools: "none", "required", or the name of the tool to call; NULL = the
     * model decides. Arguments follow the tool's schema if it is "strict" or if a call is
     * required. */
    const char *tool_choice;
    /* For chats: most tokens of thinking; then the model's own end of thinking is written. -1 = no
     * limit, 0 = none */
    int thinking_budget;
    bool one_call;             /* at most one tool call */
    bool ignore_eos;           /* do not stop at the model's end tokens */
    bool show_special;         /* control tokens are part of the text */
    bool read_only;            /* only reads the prompt into the cache; generates nothing */
    uint64_t client;           /* id of the client; clients share the engine equally */
    const char *cache_salt;    /* reuse cached prompts only among requests with the same salt */
    struct steel_queue *queue; /* where events go; NULL = its own: steel_request_next */
    void *user;                /* copied to every event */
    const char *lora;          /* LoRA adapters, "NAME[:SCALE]", comma-separated; NULL = none */
};
/* Default options. The first: temperature 0.8, top_k 40, top_p 0.95, min_p 0.05, everything else
 * off. The second: the sampling settings the model's authors recommend, where the model says so.
 * Start from one of these; options that are all zeros are not the defaults. */
struct steel_request_options steel_request_options(void);
struct steel_request_options steel_engine_request_options(const struct steel_engine *engine);

/* Submits a request. Returns at once; events follow. NULL: the request is invalid or was refused. */
struct steel_request *steel_request_submit(struct steel_engine *engine,
                                           const struct steel_request_options *options,
                                           struct steel_error *error);
/* Cancels the request before the engine's next step. Its STEEL_DONE event still comes. */
void steel_request_cancel(struct steel_request *request);
/* Frees the handle. A request with its own queue is cancelled first if it is not done. A request
 * with a shared queue goes on; its events still come. */
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
    void *user; /* steel_request_options.user */
    int choice; /* which answer to the prompt, from 0 */
    int32_t token;
    const char *text; /* (n_text) new text in whole characters, not NUL-terminated; may be empty */
    size_t n_text;
    float logprob;
    const struct steel_logprob *top; /* (n_top) the most likely alternatives */
    int n_top;
    /* Set with STEEL_DONE, which every choice gets exactly once. */
    enum steel_finish finish;
    const char *error;                   /* with STEEL_FAILED: why */
    int n_prompt, n_cached, n_generated; /* tokens; cached: prompt tokens reused from the cache */
    double queue_s, first_token_s, total_s; /* seconds from submission to start, TTFT, end */
    int n_drafted, n_accepted;              /* draft tokens, and how many were accepted */
};

/* Waits up to timeout_ms (-1 = forever) for the next event of a request that has its own queue.
 * The event's pointers are valid until the next call. Returns false on timeout, or when the
 * request is done and all events were read (steel_request_done tells which). */
bool steel_request_next(struct steel_request *request, struct steel_event *event, int timeout_ms);
/* True once the last event of all choices has been read. */
bool steel_request_done(const struct steel_request *request);
/* A file descriptor that is readable while events wait; -1 if the queue is shared. */
int steel_request_fd(const struct steel_request *request);

/* A queue shared by many requests and read by one thread. steel_queue_next is as
 * steel_request_next; false means timeout. The descriptor is readable while events wait. Free a
 * queue after all of its requests are done. */
struct steel_queue *steel_queue_new(void); /* NULL: out of file descriptors */
bool steel_queue_next(struct steel_queue *queue, struct steel_event *event, int timeout_ms);
int steel_queue_fd(const struct steel_queue *queue);
void steel_queue_free(struct steel_queue *queue);

/* Chats. Only one thread at a time may use a chat and its answer; any thread may cancel the
 * answer. */

/* Creates an empty conversation. template_path: a Jinja template, or a GGUF file or model folder
 * whose template is used; NULL = the model's own. */
struct steel_chat *steel_chat_new(struct steel_engine *engine, const char *template_path,
                                  struct steel_error *error);
void steel_chat_free(struct steel_chat *chat);

/* Settings for all following answers:
 *   system     the system text; NULL = none
 *   tools      a JSON array of {"type": "function", "function": {"name", "description", "parameters"}};
 *              NULL = none
 *   variables  a JSON object of further template variables, such as {"reasoning_effort": "low"};
 *              NULL = none
 *   format     how the model writes tool calls: "hermes", "qwen3_coder", "llama3_json", "pythonic",
 *              "mistral", "deepseek_r1", "gpt_oss" or "none"; NULL = detected from the template
 *   thinking   whether the model thinks before it answers; AUTO = as the template does by default */
enum steel_thinking { STEEL_THINK_AUTO, STEEL_THINK_ON, STEEL_THINK_OFF };
bool steel_chat_set_system(struct steel_chat *chat, const char *text, struct steel_error *error);
bool steel_chat_set_tools(struct steel_chat *chat, const char *json, struct steel_error *error);
bool steel_chat_set_variables(struct steel_chat *chat, const char *json, struct steel_error *error);
bool steel_chat_set_format(struct steel_chat *chat, const char *name, struct steel_error *error);
void steel_chat_set_thinking(struct steel_chat *chat, enum steel_thinking thinking);

struct steel_message {
    const char *role;       /* "user", "assistant", "tool", "system" */
    const char *content;    /* may be NULL only if tool_calls is set */
    const char *thinking;   /* assistant only; NULL = none */
    const char *tool_calls; /* assistant only: a JSON array as in OpenAI's API; NULL = none */
    const char *call_id;    /* tool only: id of the call this is the result of */
};
/* Appends a message to the conversation. */
bool steel_chat_add(struct steel_chat *chat, const struct steel_message *message,
                    struct steel_error *error);
/* An image (n bytes of a PNG, JPEG, WebP, GIF or BMP file) for the next message of the user. It
 * needs steel_engine_options.images. Messages in JSON may have images, too, as data: URLs. An
 * image that cannot be decoded fails the next answer. */
bool steel_chat_add_image(struct steel_chat *chat, const void *bytes, size_t n,
                          struct steel_error *error);
/* Appends one message, or an array of messages, in the JSON of OpenAI's API. Adds all of them or
 * none. */
bool steel_chat_add_json(struct steel_chat *chat, const char *json, struct steel_error *error);
/* The number of messages, system text excluded; the role of message i; removal of all but the first n
 * messages. */
int steel_chat_n_messages(const struct steel_chat *chat);
const char *steel_chat_role(const struct steel_chat *chat, int i);
void steel_chat_cut(struct steel_chat *chat, int n);
/* steel_chat_json writes the messages from `first` on as a JSON array. steel_chat_render writes
 * the prompt of the next answer. Both write at most `cap` bytes, terminating 0 included, and
 * return the length of the whole text; negative on failure. */
int steel_chat_json(const struct steel_chat *chat, int first, char *text, int cap);
int steel_chat_render(const struct steel_chat *chat, char *text, int cap,
                      struct steel_error *error);

/* Starts the answer to the conversation. The options' prompt, queue, choices and show_special
 * are ignored. A chat has one answer at a time. With STEEL_CHAT_DONE it is appended to the
 * conversation; so is a cancelled answer if it has begun. */
struct steel_answer *steel_chat_answer(struct steel_chat *chat,
                                       const struct steel_request_options *options,
                                       struct steel_error *error);
/* Cancels the answer. STEEL_CHAT_DONE still comes. May be called from any thread. */
void steel_answer_cancel(struct steel_answer *answer);
/* Frees the handle. An answer that is not done is cancelled and not appended. */
void steel_answer_free(struct steel_answer *answer);

enum steel_chat_event_kind {
    STEEL_CHAT_STARTED,
    STEEL_CHAT_THINKING,  /* a piece of the model's thinking */
    STEEL_CHAT_TEXT,      /* a piece of the answer */
    STEEL_CHAT_CALL,      /* a tool call starts: text is the tool's name */
    STEEL_CHAT_ARGUMENTS, /* a piece of the call's arguments; the pieces form a JSON object */
    STEEL_CHAT_CALL_END,
    STEEL_CHAT_DONE, /* always the last event */
    /* Comes instead of STEEL_CHAT_CALL_END if the text was not a valid call, or was cut off. The
     * call's whole text follows as STEEL_CHAT_TEXT, and its number is reused. */
    STEEL_CHAT_CALL_BROKEN,
};
struct steel_chat_event {
    enum steel_chat_event_kind kind;
    const char *text; /* (n_text) in whole characters, not NUL-terminated */
    size_t n_text;
    int call;               /* the call's number in this answer, from 0 */
    const char *call_id;    /* with STEEL_CHAT_CALL */
    struct steel_event end; /* with STEEL_CHAT_DONE: reason, counts and times */
};
/* Waits for the next event, as steel_request_next does. The descriptor is readable while engine
 * events wait. Then call steel_answer_next with timeout 0 until it returns false. */
bool steel_answer_next(struct steel_answer *answer, struct steel_chat_event *event, int timeout_ms);
int steel_answer_fd(const struct steel_answer *answer);

/* Templates change past messages (most drop earlier thinking), so the cached prompt no longer
 * matches. This reads the start of the next turn's prompt into the cache in the background,
 * while the user types. The next answer then only has to read what is new. Always safe to call;
 * never waits. */
void steel_chat_settle(struct steel_chat *chat);

/* Embeddings: vectors of texts, by an encoder (BERT, XLM-RoBERTa, ModernBERT) or any decoder,
 * and scores of documents by a reranker. Any number of threads may use an embedder at once;
 * their texts are batched. */

struct steel_embedder;
struct steel_embedder_options {
    const char *device;  /* as steel_engine_options.device */
    int threads;         /* CPU threads; 0 = one per core */
    int context;         /* most tokens of a text; 0 = the model's limit, at most 8192 */
    const char *pooling; /* "none", "cls", "mean", "last", "rank"; NULL = the model's default */
    bool unnormalized;   /* do not scale vectors to length 1 */
    bool rank;           /* open a reranker, for steel_rerank */
    bool deterministic;  /* a text gives the same bytes whatever is computed beside it */
    float gpu_memory;    /* share of a GPU's memory that may be in use; 0 = 0.9 */
};
/* Loads a model, as steel_engine_open does. */
struct steel_embedder *steel_embedder_open(const char *path,
                                           const struct steel_embedder_options *options,
                                           struct steel_error *error);
void steel_embedder_close(struct steel_embedder *embedder);
int steel_embedder_width(const struct steel_embedder *embedder);   /* floats per vector */
int steel_embedder_context(const struct steel_embedder *embedder); /* most tokens per text */

enum { STEEL_TRUNCATE = 1 }; /* cut texts that are too long, instead of failing */
/* Computes the vectors (n, width) of n texts. Fails for all of them if one is invalid. */
bool steel_embed(struct steel_embedder *embedder, const char *const *texts, int n, int flags,
                 float *vectors, struct steel_error *error);
/* The vector of one text given as token ids: out is (width). With pooling "none", out is (n,
 * width), the last hidden state of every token. */
bool steel_embed_tokens(struct steel_embedder *embedder, const int32_t *tokens, int n, float *out,
                        struct steel_error *error);
/* Scores n documents by how well they answer the query; larger is better. scores: (n) logits;
 * apply a sigmoid to map them to 0 .. 1. */
bool steel_rerank(struct steel_embedder *embedder, const char *query, const char *const *documents,
                  int n, int flags, float *scores, struct steel_error *error);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif

#endif
