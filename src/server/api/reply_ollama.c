/*
 * Replies of Ollama's /api/chat and /api/generate: one object per line while streaming, or one object.
 * The arguments of a tool call are an object, so a tool call is sent when it is complete.
 */
#include "server/api/server_int.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static bool is_chat(const struct api_request *req)
{
    return req->endpoint->reply == &reply_ollama_chat;
}

static void open_line(const struct api_request *req, struct buf *b)
{
    struct timespec now;
    struct tm tm;
    char date[32];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%S", &tm);
    buf_adds(b, "{\"model\":");
    jsonout_text(b, api_request_model(req));
    buf_addf(b, ",\"created_at\":\"%s.%06ldZ\",", date, now.tv_nsec / 1000);
}

static void add_text(const struct segment *g, size_t n, struct buf *b)
{
    jsonout_string(b, g->text.p ? g->text.p + g->sent : "", n);
}

static void add_call(const struct segment *g, struct buf *b)
{
    buf_addf(b, "{\"id\":\"%s\",\"function\":{\"name\":", g->id);
    jsonout_text(b, g->name);
    buf_adds(b, ",\"arguments\":");
    json_t *args = json_loadb(g->text.p ? g->text.p : "", g->text.len, 0, NULL);
    if (json_is_object(args))
        jsonout_value(b, args);
    else /* invalid JSON is sent as text */
        buf_adds(b, "{\"arguments\":"), add_text(g, g->text.len, b), buf_addc(b, '}');
    json_decref(args);
    buf_adds(b, "}}");
}

/* The log-probabilities since the last time. */
static void add_logprobs(const struct api_request *req, struct api_choice *o, struct buf *b)
{
    struct logprobs *l = &o->logprobs;
    if (!req->p.logprobs || l->sent == l->n)
        return;
    buf_adds(b, ",\"logprobs\":[");
    logprobs_list(l, l->sent, engine_tokenizer(req->loaded->engine, NULL), b);
    buf_addc(b, ']');
    l->sent = l->n;
}

/* Writes a line with n new bytes of a segment. */
static void add_line(const struct api_request *req, struct api_choice *o, const struct segment *g,
                     size_t n, struct buf *b)
{
    open_line(req, b);
    if (!is_chat(req)) {
        buf_adds(b, g->kind == SEGMENT_REASONING ? "\"response\":\"\",\"thinking\":"
                                                 : "\"response\":");
        add_text(g, n, b);
    } else {
        buf_adds(b, "\"message\":{\"role\":\"assistant\",\"content\":");
        if (g->kind == SEGMENT_TEXT) {
            add_text(g, n, b);
        } else if (g->kind == SEGMENT_REASONING) {
            buf_adds(b, "\"\",\"thinking\":");
            add_text(g, n, b);
        } else {
            buf_adds(b, "\"\",\"tool_calls\":[");
            add_call(g, b);
            buf_addc(b, ']');
        }
        buf_addc(b, '}');
    }
    add_logprobs(req, o, b);
    buf_adds(b, ",\"done\":false}\n");
}

static void stream_open(struct api_request *req, struct buf *b)
{
    (void)req, (void)b;
}

static bool stream_flush(struct api_request *req, int i, struct buf *b, size_t room)
{
    struct api_choice *o = &req->choices[i];
    while (o->flushed < o->n_segments) {
        struct segment *g = &o->segments[o->flushed];
        bool last = o->flushed == o->n_segments - 1, call = g->kind == SEGMENT_TOOL;
        size_t n = call ? g->text.len : segment_next(g);
        if (b->len >= room)
            return false;
        if (call && last && o->in_tool && !o->done)
            break; /* not complete */
        if (call ? !g->opened : n > 0) {
            add_line(req, o, g, n, b);
            g->opened = true;
            api_choice_sent(o, g, n);
        } else if (last) {
            break; /* it may grow */
        } else {
            o->flushed++;
        }
    }
    return true;
}

static void add_end(const struct api_request *req, struct api_choice *o, struct buf *b)
{
    add_logprobs(req, o, b);
    struct usage_count u = api_request_usage(req, NULL);
    int64_t total = o->usage.total_ns, read = u.first_ns > u.queue_ns ? u.first_ns - u.queue_ns : 0;
    buf_addf(b,
             ",\"done\":true,\"done_reason\":\"%s\",\"total_duration\":%lld,\"load_duration\":%lld,"
             "\"prompt_eval_count\":%d,\"prompt_eval_duration\":%lld,\"eval_count\":%d,"
             "\"eval_duration\":%lld}\n",
             o->finish == FINISH_LENGTH ? "length" : "stop", (long long)total,
             (long long)u.queue_ns, u.n_prompt, (long long)read, u.n_generated,
             (long long)(total > u.first_ns ? total - u.first_ns : 0));
}

static void stream_finish(struct api_request *req, int i, struct buf *b)
{
    open_line(req, b);
    buf_adds(b, is_chat(req) ? "\"message\":{\"role\":\"assistant\",\"content\":\"\"}"
                             : "\"response\":\"\"");
    add_end(req, &req->choices[i], b);
}

static void stream_close(struct api_request *req, struct buf *b)
{
    (void)req, (void)b;
}

static void stream_error(struct api_request *req, const struct api_error *err, struct buf *b)
{
    (void)req;
    api_error_json(b, err, DIALECT_OLLAMA);
    buf_addc(b, '\n');
}

/* Writes the text of all segments of a kind as the member `name`; nothing if there is none. */
static void add_all(const struct api_choice *o, enum segment_kind kind, const char *name,
                    bool always, struct buf *b)
{
    struct buf all = {0};
    for (int i = 0; i < o->n_segments; i++)
        if (o->segments[i].kind == kind)
            buf_add(&all, o->segments[i].text.p, o->segments[i].text.len);
    if (all.len || always) {
        buf_addf(b, "%s\"%s\":", always ? "" : ",", name);
        jsonout_string(b, all.p ? all.p : "", all.len);
    }
    buf_clear(&all);
}

static bool whole(struct api_request *req, struct buf *b, size_t room)
{
    (void)room;
    struct api_choice *o = &req->choices[0];
    if (!o->done)
        return false;
    open_line(req, b);
    if (is_chat(req))
        buf_adds(b, "\"message\":{\"role\":\"assistant\",");
    add_all(o, SEGMENT_TEXT, is_chat(req) ? "content" : "response", true, b);
    add_all(o, SEGMENT_REASONING, "thinking", false, b);
    for (int i = 0, n = 0; is_chat(req) && i < o->n_segments; i++)
        if (o->segments[i].kind == SEGMENT_TOOL) {
            buf_adds(b, n++ ? "," : ",\"tool_calls\":[");
            add_call(&o->segments[i], b);
        }
    if (is_chat(req))
        buf_adds(b, o->n_tools ? "]}" : "}");
    add_end(req, o, b);
    return true;
}

static void reply_nothing(struct api_request *req, const char *why)
{
    open_line(req, &req->reply);
    buf_adds(&req->reply, is_chat(req) ? "\"message\":{\"role\":\"assistant\",\"content\":\"\"}"
                                       : "\"response\":\"\"");
    buf_addf(&req->reply, ",\"done\":true,\"done_reason\":\"%s\"}\n", why);
}

void ollama_loaded(struct api_request *req)
{
    reply_nothing(req, "load");
}

void ollama_unloaded(struct api_request *req)
{
    reply_nothing(req, "unload");
}

#define STYLE                                                                                      \
    {                                                                                              \
        .stream_open = stream_open, .stream_flush = stream_flush, .stream_finish = stream_finish,  \
        .stream_close = stream_close, .stream_error = stream_error, .whole = whole,                \
        .type = "application/x-ndjson",                                                            \
    }
const struct reply_style reply_ollama_chat = STYLE, reply_ollama_generate = STYLE;
