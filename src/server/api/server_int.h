/*
 * Internals of the server. Work is divided between the event loop (connections, replies), workers
 * (jobs.h: parsing bodies, templates, tokenising, so that a long prompt does not delay other clients'
 * tokens) and the engine's thread. An API request belongs to the loop, except between
 * api_request_dispatch and the return of its worker, which may write its `prepared` part.
 *
 * Invariants:
 *  1. An API request is freed once its worker has returned and all its engine requests are done.
 *  2. Once its client has disconnected (x == NULL), its engine requests are cancelled and it writes no
 *     more. A background response (background.h) has no client, and writes to its readers and the store.
 *  3. Output for a slow client is buffered in the API request as text, not yet encoded. At most
 *     UNSENT_LIMIT encoded bytes wait in the connection, and one iteration of the loop encodes no more.
 *  4. `kept` counts the text buffered in an API request. It stays within opt.max_unsent, and the sum over
 *     all API requests within KEPT_REQUESTS times that.
 */
#ifndef STEEL_SERVER_SERVER_INT_H
#define STEEL_SERVER_SERVER_INT_H

#include "base/budget.h"
#include "engine/images.h"
#include "server/http/jobs.h"
#include "server/http/jsonout.h"
#include "server/http/log.h"
#include "server/mcp/mcp.h"
#include "server/api/endpoints.h"
#include "server/api/models.h"
#include "server/api/params.h"
#include "server/api/server.h"
#include "server/api/store.h"
#include "text/chat/chat.h"
#include "text/chat/chat_grammar.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    UNSENT_LIMIT = 64 << 10,
    MAX_PROMPTS = 64,
    WHOLE_ONCE = 256 << 10, /* larger non-streaming replies are sent in pieces */
    WHOLE_EARLY =
        4 << 20, /* kept bytes from which a reply is sent before its last choice is done */
    KEPT_REQUESTS = HTTP_UNSENT_ALL, /* limit of all kept bytes, in units of max_unsent */
    LARGE_REQUEST = 1 << 20,         /* after a request of this size free memory is returned */
};

/* A part of a choice that clients see as one block. */
enum segment_kind {
    SEGMENT_TEXT,
    SEGMENT_REASONING,
    SEGMENT_TOOL,
    SEGMENT_LIST /* the tools of an MCP server, JSON */
};
struct segment {
    enum segment_kind kind;
    bool opened;     /* its start was sent to the client */
    bool broken;     /* the text was not a tool call after all; it follows as a text segment */
    struct buf text; /* tool call: the arguments, JSON */
    size_t sent;
    char id[32]; /* tool call */
    char *name;  /* of the tool; owned */
    int tool;    /* index among the tool calls */
    /* of a call that Steel runs (mcp_loop.h) */
    struct mcp_call *call; /* owned; NULL = not started */
    bool is_called;        /* it has come back */
    bool args_sent;
    char *approved; /* id of the client's approval; owned; NULL = it needed none */
    int round;      /* of the engine request whose output it is */
};

/* Log-probabilities that were not sent yet. */
struct logprobs {
    struct token_prob *v; /* (n, stride) the token, then its alternatives; token -1 = end */
    int n, cap, stride;
    size_t at; /* character offset of the first unsent token in the text */
    /* Position of the writer: entries sent, current list, entry in it, is the list open. */
    int sent, field, entry;
    bool opened;
};
enum logprobs_field {
    LOGPROBS_OBJECTS, /* the list of chat */
    LOGPROBS_TOKENS,  /* the lists of completions */
    LOGPROBS_VALUES,
    LOGPROBS_TOPS,
    LOGPROBS_OFFSETS
};

/* Options of llama.cpp's /completion and /infill. */
struct completion_options {
    json_t *fields; /* response_fields; owned; NULL = all */
    bool keep_tokens, return_tokens, timings_per_token;
    bool truncated;                    /* the prompt was cut to fit */
    int id_slot;                       /* -1 = any */
    int n_indent;                      /* a later line with less indentation ends the output */
    int max_prompt_ms, max_predict_ms; /* <= 0: none */
};

struct api_choice {
    struct segment *segments;          /* (n) */
    int n_segments, n_tools, n_broken; /* n_broken: tool segments that are broken */
    int flushed;                       /* segments before this one were sent completely */
    size_t n_text_kept;                /* unsent bytes of all segments */
    struct logprobs logprobs;
    bool role_sent, done, finish_sent, stopped_by_parser;
    enum finish finish;
    int stop;
    char *error;  /* owned; FINISH_ERROR */
    bool refused; /* the error is the request's fault */
    struct usage_count usage;
    struct usage_count before;  /* of earlier rounds (mcp_loop.h) */
    int n_reasoning;            /* tokens */
    int slot;                   /* slots.h; -1 = none */
    struct chat_parser *parser; /* NULL = plain text */
    bool thinking;              /* the last token was reasoning */
    int round;                  /* mcp_loop.h */
    bool new_round;             /* the next text begins a segment */
    bool in_tool;               /* the last segment is an unfinished tool call */
    bool one_call;
    struct token_list tokens; /* unsent, if they are kept */
    bool new_line;            /* the text has one */
    bool in_indent;           /* at the beginning of a line ... */
    int indent;               /* ... with this many blanks */
    int64_t first_ns;         /* when its first token came, if its time is limited */
    bool limited;             /* ended by a limit of time or indentation */
};

/* How the output for a prompt is parsed. */
struct chat_prompt {
    enum chat_format format;
    bool tools, in_reasoning;
    bool continues;                       /* the prompt has the beginning of the answer */
    const char *think_open, *think_close; /* delimiters of thinking */
    enum chat_thinking thinking;
    enum chat_thoughts thoughts;
    bool required, one_call; /* a tool call is required; the output ends after the first */
    char *only;              /* the only tool that may be called; owned; NULL = any */
    bool legacy;             /* reply with function_call, the older form of tool_calls */
    int budget;              /* most tokens of thinking; -1 = no limit */
    bool hide_thinking;      /* thinking was not requested: leave it out */
    json_t *schema;          /* the tools; owned */
};

struct api_request;
struct prompt_request { /* one prompt of an API request: one engine request */
    struct api_request *req;
    int first; /* its first choice */
    struct request *request;
};

struct server;
struct api_request {
    struct job job;                  /* queued or running while with_worker */
    struct api_request *prev, *next; /* in server->requests */
    struct server *server;
    struct http_exchange *x; /* NULL: the client has disconnected, or it has a reply already */
    const struct endpoint *endpoint;
    struct loaded *loaded; /* its model (models.h); a reference; NULL = it needs none, or waits */
    struct model_entry *entry;        /* the model to wait for; NULL = none */
    struct api_request *next_waiting; /* in models->waiting */
    int64_t wait_until_ns;            /* waiting ends; 0 = it does not wait */
    int64_t keep_ns;                  /* keep_alive for its model; only with has_keep */
    bool has_keep;
    char id[48];     /* the endpoint's prefix and 128 random bits, so that it cannot be guessed */
    int64_t created; /* unix time */
    int64_t start_ns, last_write_ns;
    bool with_worker;
    atomic_bool cancelled; /* the client has disconnected: the worker may stop */
    char *body;            /* for the worker; owned */
    char *path, *query;    /* of a request to an endpoint whose path has an id; owned; else NULL */
    size_t n_body;
    char *key;   /* API key that salts its cache entries; owned; NULL = none, or a shared cache */
    char *owner; /* of kept responses (access_owner); owned */
    /* prepared */
    struct budget budget; /* bound on the work of preparing */
    struct api_error err;
    struct gen_params p;
    struct token_list *prompts; /* (n_prompts) */
    struct buf *echo;           /* (n_prompts) text repeated before the output, or NULL */
    int n_prompts;
    struct lora_pick loras[LORA_MAX_USES]; /* (n_loras) */
    int n_loras;
    char *model;              /* the model's name in the reply; owned; NULL = the server's */
    bool special;             /* the parser needs control tokens in the text */
    struct chat_prompt *chat; /* how to parse the output; NULL = plain text */
    struct responses_request *responses; /* /v1/responses; else NULL */
    struct background *background;       /* it runs without a client (background.h); else NULL */
    struct grammar *grammar;             /* constraint on the output; NULL = none; a reference */
    struct token_rules *rules;           /* other rules about its tokens; NULL = none */
    struct completion_options completion;
    struct event *prompt_timer;   /* limit on the time to the first token, or NULL */
    struct embed_request *embed;  /* embeddings or rerank scores; else NULL */
    struct prompt_images *images; /* of the prompt; NULL = none */
    struct image_fetches fetches;
    /* What a worker has left for one of slow_jobs, since it may take long: all, or encoding images. */
    enum { WORK_NONE, WORK_PREPARE, WORK_ENCODE } slow_work;
    bool is_slow;              /* with slow_jobs: its worker may wait */
    struct mcp_list *mcp_list; /* MCP servers when the request came; NULL = none */
    struct mcp_call *mcp_call; /* /mcp/call; else NULL */
    struct buf reply;          /* JSON to send unchanged; empty = generate */
    size_t n_reply_sent;
    /* running */
    struct prompt_request *parts; /* (n_prompts) */
    struct api_choice *choices;   /* (n_prompts * p.n) */
    int n_choices, n_open;
    bool streaming, over;
    struct buf event_head; /* what all events of the stream begin with; empty = not written yet */
    int block;             /* Anthropic: index of the open content block, -1 = none yet */
    int turn;              /* the choice that writes first (round robin) */
    size_t kept, n_kept_most; /* unsent bytes of all choices; the maximum so far */
    struct {
        bool sending, opened, in_choice;
        int choice;
    } whole; /* how much of a non-streaming reply is written */
};

struct server {
    struct server_options opt;
    struct event_base *base;
    struct http *http;
    struct models *models;
    struct events *events;
    enum chat_format format; /* if opt.chat_format names one */
    bool ready, failed, draining;
    int n_signals, exit_code;
    char fingerprint[32];
    int64_t started; /* unix time */
    struct event *on_events, *more_events, *on_jobs, *job_tick, *tick, *grace, *last;
    struct api_request *requests;
    int n_requests;
    struct background *backgrounds; /* background.h */
    struct pull *pull;              /* pulls.h; NULL = nothing is being pulled */
    struct buf out;                 /* scratch: what a stream sends now */
    size_t kept;                    /* the sum over all API requests */
    bool trim_due;                  /* a large request was freed */
    uint64_t n_http[6];             /* replies by status class */
    uint64_t id_secret;
    struct store *store; /* kept responses */
    struct grammar_cache *grammars;
    struct mcp *mcp; /* NULL without --mcp-config */
    pthread_mutex_t embed_lock;
    struct embed_request *embedded; /* done, to be collected by the loop; under embed_lock */
    struct jobs *jobs;
    struct jobs *slow_jobs; /* of requests that wait for images or files; NULL = none came yet */
    int jobs_fd;            /* os_wake_fd */
    /* For the estimate of Retry-After. */
    uint64_t n_tokens, n_tokens_then; /* generated; at rate_ns */
    int64_t rate_ns;
    double rate;        /* recent tokens per second */
    double mean_tokens; /* average length of an output */
};

/* The model's name in the reply. */
static inline const char *api_request_model(const struct api_request *req)
{
    return req->model ? req->model : req->loaded ? req->loaded->entry->name : "";
}

/* api_request.c */
void api_request_run(struct job *job); /* on a worker: prepares the request */
void api_request_dispatch(struct server *s, struct http_exchange *x,
                          const struct endpoint *endpoint);
void api_requests_prepared(struct server *s); /* collects finished jobs */
void api_requests_event(struct server *s, const struct engine_event *ev); /* from the engine */
void api_requests_tick(struct server *s); /* comments on silent streams, speed, memory */
void api_requests_cut(struct server *s, const char *why); /* shutdown: ends all with an error */
int api_requests_wait_s(const struct server *s); /* estimated wait of a new request: Retry-After */
void api_request_pump(struct api_request *req);  /* sends what the client can take */
/* Ends its work, with a line in the log. */
void api_request_stop(struct api_request *req, int status, const char *how);
void api_request_release(struct api_request *req); /* frees it if nothing needs it */
/* Ends the wait for its model: it is prepared again, or fails. */
void api_request_resume(struct api_request *req);
void api_request_fail(struct api_request *req, const struct api_error *err);
/* A part of the request had `before` unsent bytes and has `after` now. */
void api_request_keep(struct api_request *req, size_t before, size_t after);
void reply_error(struct http_exchange *x, struct server *s, const struct api_error *err,
                 enum dialect dialect);
/* False: a reply of n bytes has no room (http_has_room), and an error was sent. */
bool reply_has_room(struct http_exchange *x, struct server *s, size_t n);
void reply_json(struct http_exchange *x, struct server *s, int status, const struct buf *body);

/* prepare.c, on a worker: fills the prepared part, or err */
void api_request_prepare(struct api_request *req);
void chat_prompt_free(struct chat_prompt *p);

/* api_choice.c: a choice while it is generated */
void api_choice_token(struct api_request *req, struct api_choice *o, const struct engine_event *ev);
void api_choice_finish(struct api_choice *o);
void api_choice_init(struct api_request *req, struct api_choice *o);
/* Appends a segment, and text to the last one. */
struct segment *api_choice_append(struct api_choice *o, enum segment_kind kind);
void api_choice_put(struct api_choice *o, struct segment *g, const char *text, size_t n);
/* Another engine request will continue the choice; it has been prepared. */
void api_choice_end_round(struct api_choice *o);
void api_choice_next_round(struct api_request *req, struct api_choice *o);
void api_choice_clear(struct api_choice *o);
const char *api_choice_finish_reason(const struct api_request *req, const struct api_choice *o);
size_t api_choice_kept(const struct api_choice *o); /* unsent bytes */
size_t segment_next(const struct segment *g);       /* length of the next piece to stream */
void api_choice_sent(struct api_choice *o, struct segment *g,
                     size_t n);               /* n bytes of segment g were sent */
void api_choice_forget(struct api_choice *o); /* all was sent: frees the text */

/* logprobs.c. logprobs_write writes the unsent entries before `upto` as one JSON value. False: b has
 * reached `room` bytes; call it again for the rest. */
void logprobs_add(struct logprobs *l, const struct engine_event *ev, int n_top);
bool logprobs_write(struct logprobs *l, bool chat, int upto, const struct tokenizer *t,
                    struct buf *b, size_t room);
size_t logprobs_kept(const struct logprobs *l);
void logprobs_clear(struct logprobs *l);
/* Writes the entries from `from` on as objects of chat, separated by commas. Marks nothing as sent. */
void logprobs_list(const struct logprobs *l, int from, const struct tokenizer *t, struct buf *b);

/* How a dialect writes generated output (reply_*.c). stream_flush writes the new output of one choice
 * until out has `room` bytes; true: all of it. stream_finish is called once per choice. `whole` continues
 * a non-streaming reply as far as choices are done and room allows; true: it is complete. */
struct reply_style {
    void (*stream_open)(struct api_request *req, struct buf *out);
    bool (*stream_flush)(struct api_request *req, int choice, struct buf *out, size_t room);
    void (*stream_finish)(struct api_request *req, int choice, struct buf *out);
    void (*stream_close)(struct api_request *req, struct buf *out);
    void (*stream_error)(struct api_request *req, const struct api_error *err, struct buf *out);
    bool (*whole)(struct api_request *req, struct buf *out, size_t room);
    const char *ping; /* sent on silent streams; NULL: the format has no comments */
    const char *type; /* Content-Type of a stream; NULL = text/event-stream */
    /* clients look for a prompt that exceeds the context among the events */
    bool too_long_in_stream;
};
extern const struct reply_style reply_chat, reply_completions, reply_anthropic, reply_responses,
    reply_ollama_chat, reply_ollama_generate, reply_llamacpp;
/* Writes how many of the cached tokens came from disk, if any did, as a further member. */
static inline void api_add_disk_tokens(const struct usage_count *u, struct buf *b)
{
    if (u->n_disk)
        buf_addf(b, ",\"disk_tokens\":%d", u->n_disk);
}

/* Adds draft tokens by source to the details of generated tokens, if there were any. Clients check that details are numbers. */
static inline void api_add_draft_tokens(const struct usage_count *u, struct buf *b)
{
    for (int i = 0; i < N_DRAFT_SOURCES; i++) {
        const struct draft_count *d = &u->drafts[i];
        if (d->drafted)
            buf_addf(b, ",\"%s_draft_tokens\":%d,\"%s_draft_tokens_accepted\":%d",
                     draft_source_name(i), d->drafted, draft_source_name(i), d->accepted);
    }
}
struct usage_count api_request_usage(const struct api_request *req,
                                     int *n_reasoning); /* of all choices */

/* reply_llamacpp.c: writes llama.cpp's generation_settings */
void llamacpp_add_settings(const struct gen_params *p, const struct completion_options *o,
                           struct buf *b);

/* llamacpp.c, slots.c, openapi.c */
void get_props(struct server *s, struct http_exchange *x);
void get_slots(struct server *s, struct http_exchange *x);
void get_openapi(struct server *s, struct http_exchange *x);
void get_version(struct server *s, struct http_exchange *x);

/* mcp_endpoints.c: the tools of MCP servers. On the loop, mcp_submit starts the call of /mcp/call, and
 * mcp_write writes its reply. */
void get_mcp_tools(struct server *s, struct http_exchange *x);
void mcp_submit(struct api_request *req);
void mcp_write(struct api_request *req);

/* metrics.c */
void metrics_write(struct server *s, struct buf *out);

/* background.c */
void post_response_cancel(struct server *s, struct http_exchange *x);

/* conversations.c */
void get_conversation(struct server *s, struct http_exchange *x);
void get_conversation_items(struct server *s, struct http_exchange *x);
void get_conversation_item(struct server *s, struct http_exchange *x);
void delete_conversation(struct server *s, struct http_exchange *x);
void delete_conversation_item(struct server *s, struct http_exchange *x);

/* lookup.c: handlers of GET and DELETE endpoints */
enum { RESPONSE_ID_SIZE = 64 };
void response_path_id(struct http_exchange *x, char id[RESPONSE_ID_SIZE]);
void response_missing(struct server *s, struct http_exchange *x, const char *id);
/* A part of a kept response that the client owns. */
bool response_look_up(struct server *s, struct http_exchange *x, const char *id,
                      enum store_part part, struct buf *out);
void get_response(struct server *s, struct http_exchange *x);
void get_response_items(struct server *s, struct http_exchange *x);
void delete_response(struct server *s, struct http_exchange *x);
void get_ollama_tags(struct server *s, struct http_exchange *x);
void get_ollama_ps(struct server *s, struct http_exchange *x);
void get_ollama_version(struct server *s, struct http_exchange *x);
/* reply_ollama.c: the replies to requests that only load or unload a model */
void ollama_loaded(struct api_request *req);
void ollama_unloaded(struct api_request *req);
void add_capabilities(const struct loaded *l, struct buf *b); /* of the model and its template */
void add_file_capabilities(const struct model_entry *e, struct buf *b); /* of one not in memory */

/* web.c: the web page and its files */
void get_page(struct server *s, struct http_exchange *x);
void get_page_file(struct server *s, struct http_exchange *x);

/* server.c */
void get_health(struct server *s, struct http_exchange *x);
void get_metrics(struct server *s, struct http_exchange *x);
/* Whether a model that must be there is loading or has failed; replies 503 then. */
bool reply_if_not_ready(struct server *s, struct http_exchange *x);
/* models_list.c */
void get_models(struct server *s, struct http_exchange *x);
void get_model(struct server *s, struct http_exchange *x);
/* Replies 503 if no model is in memory for a request without a body. */
struct loaded *models_shown_or_reply(struct server *s, struct http_exchange *x);

#endif
