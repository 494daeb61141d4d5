/*
 * Inside the server. Three threads' worth of work: the loop (connections, replies), workers (jobs.h:
 * reading bodies, templates, tokenising: a long prompt must not hold up other people's tokens) and
 * the engine. A call is one API request; it belongs to the loop, except between api_request_dispatch and
 * the return of its worker, when the worker may write its `prepared` part.
 *
 * Invariants:
 *  1. a call is freed when its worker is back and every request it submitted is done, not before
 *  2. a call whose client has left (x == NULL) has cancelled its requests and writes no more
 *  3. what goes to a slow client waits in the call as text, not as bytes of protocol: at most
 *     UNSENT_LIMIT bytes are handed to the connection ahead of its reading, and one turn of the loop
 *     makes no more than that
 *  4. `kept` of a call is what waits in it, and never more than opt.max_unsent; all calls together
 *     stay within KEPT_REQUESTS times that
 */
#ifndef STEEL_SERVER_SERVER_INT_H
#define STEEL_SERVER_SERVER_INT_H

#include "base/budget.h"
#include "engine/embed.h"
#include "server/http/jobs.h"
#include "server/http/jsonout.h"
#include "server/http/log.h"
#include "server/api/endpoints.h"
#include "server/api/params.h"
#include "server/api/server.h"
#include "text/chat/chat.h"
#include "text/chat/chat_grammar.h"

#include <pthread.h>
#include <stdatomic.h>

enum {
    UNSENT_LIMIT = 64 << 10,
    MAX_PROMPTS = 64,
    WHOLE_ONCE = 256 << 10,  /* a larger reply that does not stream is sent in pieces */
    WHOLE_EARLY = 4 << 20,   /* kept bytes from which it is sent while its last answers still run */
    KEPT_REQUESTS = 4,       /* calls that may keep max_unsent each */
    LARGE_REQUEST = 1 << 20, /* after which free memory is given back */
};

/* A stretch of an answer: what a client sees as one block. */
enum segment_kind { SEGMENT_TEXT, SEGMENT_REASONING, SEGMENT_TOOL };
struct segment {
    enum segment_kind kind;
    bool opened;     /* the client was told of it */
    bool broken;     /* a tool's: and of a call that was none; its text follows */
    struct buf text; /* tool: the arguments, JSON */
    size_t sent;
    char id[32]; /* tool */
    char *name;  /* tool; owned */
    int tool;    /* number among the tools */
};

/* Log-probabilities of an answer that were not sent yet. */
struct logprobs {
    struct token_prob *v; /* (n, stride) the token, then the alternatives; token -1 = no more */
    int n, cap, stride;
    size_t at; /* characters of text before the first that was not sent */
    /* The writer's place: sent ones, list, entry of it, whether the list is open. */
    int sent, field, entry;
    bool opened;
};
enum logprobs_field {
    LOGPROBS_OBJECTS, /* chat's list */
    LOGPROBS_TOKENS,  /* completions' */
    LOGPROBS_VALUES,
    LOGPROBS_TOPS,
    LOGPROBS_OFFSETS
};

struct api_choice {
    struct segment *segments;          /* (n) */
    int n_segments, n_tools, n_broken; /* n_broken: of the tools */
    int flushed;                       /* segments before this one are with the client entirely */
    size_t n_text_kept;                /* bytes of segments that were not sent */
    struct logprobs logprobs;
    bool role_sent, done, finish_sent, stopped_by_parser;
    enum finish finish;
    int stop;
    char *error;  /* owned; FINISH_ERROR */
    bool refused; /* ... which the request itself made */
    struct usage_count usage;
    int n_reasoning;            /* tokens */
    struct chat_parser *parser; /* NULL = plain text */
    bool thinking;              /* the last token brought reasoning */
    bool in_tool;               /* the last segment is a call that goes on */
    bool one_call;
};

/* How the answers to a prompt are to be parsed. */
struct chat_prompt {
    enum chat_format format;
    bool tools, in_reasoning;
    const char *think_open, *think_close; /* marks around thinking */
    enum chat_thinking thinking;
    bool required, one_call; /* a call is asked for; the answer ends with its first */
    char *only;              /* the tool that is to be called; owned; NULL = any */
    bool legacy;             /* a call is a function_call, as before there were tools */
    bool hide_thinking;      /* nobody asked for it */
    json_t *schema;          /* the tools; owned */
};

struct api_request;
struct prompt_request { /* one prompt of a call: one request to the engine */
    struct api_request *req;
    int first; /* choice */
    struct request *request;
};

struct server;
struct api_request {
    struct job job;                  /* with_worker */
    struct api_request *prev, *next; /* all calls */
    struct server *server;
    struct http_exchange *x; /* NULL: the client has left */
    const struct endpoint *endpoint;
    char id[40];
    int64_t created; /* unix time */
    int64_t start_ns, last_write_ns;
    bool with_worker;
    atomic_bool cancelled; /* nobody waits for it any more: whoever prepares it may give up */
    char *body;            /* for the worker; owned */
    size_t n_body;
    char *key; /* API key it came with; owned, NULL = none, or the cache is shared */
    char
        *owner; /* the same, whatever it salts: whose kept responses it may see; owned, "" = none */
    /* prepared */
    struct budget budget; /* what preparing may cost */
    struct api_error err;
    struct gen_params p;
    struct token_list *prompts; /* (n_prompts) */
    struct buf *echo;           /* (n_prompts) text to repeat, or NULL */
    int n_prompts;
    struct lora_pick loras[LORA_MAX_USES]; /* (n_loras) */
    int n_loras;
    char *model;                         /* its name in the reply; owned; NULL = the server's */
    bool special;                        /* the parser needs to see control tokens */
    struct chat_prompt *chat;            /* how to parse the answer; NULL = plain text */
    struct responses_request *responses; /* /v1/responses; else NULL */
    struct grammar *grammar;     /* what the answer must fit; NULL = anything; a reference */
    struct embed_request *embed; /* vectors are wanted: embeddings.h */
    struct buf reply;            /* JSON to send as it is; empty = generate */
    size_t n_reply_sent;
    /* running */
    struct prompt_request *parts; /* (n_prompts) */
    struct api_choice *choices;   /* (n_prompts * p.n) */
    int n_choices, n_open;
    bool streaming, over;
    int block;                /* messages: number of the open content block, -1 = none yet */
    int turn;                 /* choice that may write first */
    size_t kept, n_kept_most; /* bytes of answers that the client has not been sent; ever */
    struct {
        bool sending, opened, in_choice;
        int choice;
    } whole; /* how far a reply that does not stream is written */
};

struct route_counts {
    uint64_t n[8]; /* by status class */
};

struct server {
    struct server_options opt;
    struct event_base *base;
    struct http *http;
    struct engine *engine;
    struct events *events;
    struct chat *chat; /* NULL: the model has no usable template; chat_error says why */
    struct error chat_error;
    enum chat_format format; /* where opt.chat_format names one */
    bool ready, failed, draining;
    bool engine_failed; /* after it was ready */
    int n_signals, exit_code;
    char name[128]; /* of the model */
    char fingerprint[32];
    int64_t started; /* unix time */
    struct event *on_events, *more_events, *on_jobs, *job_tick, *tick, *grace, *last;
    struct api_request *requests;
    int n_requests;
    size_t kept;        /* of all calls */
    bool trim_due;      /* a large request is gone */
    uint64_t n_http[6]; /* replies by status class */
    uint64_t next_id, id_secret;
    struct store *store; /* kept responses */
    struct grammar_cache *grammars;
    struct embedder *embedder, *reranker; /* or NULL */
    char embed_name[128], rerank_name[128];
    pthread_mutex_t embed_lock;
    struct embed_request *embedded; /* done, not yet seen by the loop; under embed_lock */
    struct jobs *jobs;
    int jobs_fd; /* eventfd */
    /* What Retry-After is reckoned from. */
    uint64_t n_tokens, n_tokens_then; /* generated; at rate_ns */
    int64_t rate_ns;
    double rate;        /* tokens a second of late */
    double mean_tokens; /* of an answer */
};

/* What a reply calls the model. */
static inline const char *api_request_model(const struct api_request *req)
{
    return req->model ? req->model : req->server->name;
}

/* server.c: what a model is called, by its path */
void server_name_of(const char *path, char *name, size_t size);

/* api_request.c */
void api_request_run(struct job *job); /* a worker's: prepares the call */
void api_request_dispatch(struct server *s, struct http_exchange *x,
                          const struct endpoint *endpoint);
void api_requests_prepared(struct server *s); /* workers have finished some */
void api_requests_event(struct server *s, const struct engine_event *ev); /* from the engine */
void api_requests_tick(struct server *s); /* comments on silent streams, speed, memory */
void api_requests_cut(struct server *s, const char *why); /* the end: everybody is told */
int api_requests_wait_s(
    const struct server *s); /* until what is asked now would be answered: Retry-After */
void api_request_pump(struct api_request *req); /* sends what can be sent */
void reply_error(struct http_exchange *x, struct server *s, const struct api_error *err,
                 enum dialect dialect);
void reply_json(struct http_exchange *x, struct server *s, int status, const struct buf *body);

/* prepare.c: a worker's job; fills the prepared part or err */
void api_request_prepare(struct api_request *req);
void chat_prompt_free(struct chat_prompt *p);

/* api_choice.c: the answer, as it grows */
void api_choice_add(struct api_choice *o, enum segment_kind kind, const char *text, size_t n);
void api_choice_token(struct api_request *req, struct api_choice *o, const struct engine_event *ev);
void api_choice_finish(struct api_choice *o);
void api_choice_init(struct api_request *req, struct api_choice *o);
void api_choice_clear(struct api_choice *o);
const char *api_choice_finish_reason(const struct api_request *req, const struct api_choice *o);
size_t api_choice_kept(const struct api_choice *o); /* bytes that the client was not sent yet */
size_t segment_next(const struct segment *g);       /* bytes of it for the next piece of a stream */
void api_choice_sent(struct api_choice *o, struct segment *g,
                     size_t n);               /* n bytes of its segment g */
void api_choice_forget(struct api_choice *o); /* all of it was sent */

/* logprobs.c. logprobs_write: those before `upto` that were not sent, as one JSON value; false: b has
 * reached `room` bytes, and the rest is written when it is called again. */
void logprobs_add(struct logprobs *l, const struct engine_event *ev, int n_top);
bool logprobs_write(struct logprobs *l, bool chat, int upto, const struct tokenizer *t,
                    struct buf *b, size_t room);
size_t logprobs_kept(const struct logprobs *l);
void logprobs_clear(struct logprobs *l);
/* Those from `from` on as chat's objects, separated by commas; forgets nothing. */
void logprobs_list(const struct logprobs *l, int from, const struct tokenizer *t, struct buf *b);

/* reply_*.c. stream_flush writes what is new of one choice until out has
 * `room` bytes, and says whether that was all; finish and usage once. whole: the reply of a call that
 * does not stream, from where it stopped, as far as choices are done and room goes; true: to its end.
 */
struct reply_style {
    void (*stream_open)(struct api_request *req, struct buf *out);
    bool (*stream_flush)(struct api_request *req, int choice, struct buf *out, size_t room);
    void (*stream_finish)(struct api_request *req, int choice, struct buf *out);
    void (*stream_close)(struct api_request *req, struct buf *out);
    void (*stream_error)(struct api_request *req, const struct api_error *err, struct buf *out);
    bool (*whole)(struct api_request *req, struct buf *out, size_t room);
    const char *ping; /* NULL: the format has no room for one */
    const char *type; /* of a stream; NULL = text/event-stream */
};
extern const struct reply_style reply_chat, reply_completions, reply_anthropic, reply_responses,
    reply_ollama_chat, reply_ollama_generate;
struct usage_count api_request_usage(const struct api_request *req,
                                     int *n_reasoning); /* of all choices */

/* metrics.c */
void metrics_write(struct server *s, struct buf *out);

/* lookup.c: what is looked up rather than generated. Paths are those of the routes. */
void get_response(struct server *s, struct http_exchange *x);
void get_response_items(struct server *s, struct http_exchange *x);
void delete_response(struct server *s, struct http_exchange *x);
void get_ollama_tags(struct server *s, struct http_exchange *x);
void get_ollama_ps(struct server *s, struct http_exchange *x);
void get_ollama_version(struct server *s, struct http_exchange *x);
void ollama_loaded(struct api_request *req);                  /* so does this, in reply_ollama.c */
void add_capabilities(const struct server *s, struct buf *b); /* what the model's template can do */

/* web.c: the web page and its files */
void get_page(struct server *s, struct http_exchange *x);
void get_page_file(struct server *s, struct http_exchange *x);

/* server.c */
void get_health(struct server *s, struct http_exchange *x);
void get_metrics(struct server *s, struct http_exchange *x);
void get_models(struct server *s, struct http_exchange *x);
void get_model(struct server *s, struct http_exchange *x);
void server_load_chat(struct server *s); /* prepare_chat.c; sets chat or chat_error */
void server_unload_chat(struct server *s);

#endif
