/* Replies of OpenAI's chat and completions endpoints, whole and streamed. */
#include "server/api/server_int.h"

#include <stdio.h>
#include <string.h>

static bool is_chat(const struct api_request *req)
{
    return req->endpoint->reply == &reply_chat;
}

/* {"id":...,"choices":[ */
static void open_object(const struct api_request *req, bool chunk, struct buf *b)
{
    buf_addf(b, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%lld,\"model\":", req->id,
             !is_chat(req) ? "text_completion"
             : chunk       ? "chat.completion.chunk"
                           : "chat.completion",
             (long long)req->created);
    jsonout_text(b, api_request_model(req));
    buf_addf(b, ",\"system_fingerprint\":\"%s\",\"choices\":[", req->server->fingerprint);
}

static void add_usage(const struct api_request *req, struct buf *b)
{
    int thinking;
    struct usage_count u = api_request_usage(req, &thinking);
    buf_addf(b,
             "{\"prompt_tokens\":%d,\"completion_tokens\":%d,\"total_tokens\":%d,"
             "\"prompt_tokens_details\":{\"cached_tokens\":%d",
             u.n_prompt, u.n_generated, u.n_prompt + u.n_generated, u.n_cached);
    api_add_disk_tokens(&u, b);
    buf_addf(b, "},\"completion_tokens_details\":{\"reasoning_tokens\":%d", thinking);
    api_add_draft_tokens(&u, b);
    buf_adds(b, "}}");
}

static void add_timings(const struct api_request *req, struct buf *b)
{
    struct usage_count u = api_request_usage(req, NULL);
    double queue = (double)u.queue_ns * 1e-6, first = (double)u.first_ns * 1e-6, total = 0;
    for (int i = 0; i < req->n_choices; i++)
        if ((double)req->choices[i].usage.total_ns * 1e-6 > total)
            total = (double)req->choices[i].usage.total_ns * 1e-6;
    double read = first > queue ? first - queue : 0, write = first ? total - first : 0;
    buf_addf(b,
             ",\"timings\":{\"queue_ms\":%.3f,\"prompt_n\":%d,\"cache_n\":%d,\"prompt_ms\":%.3f,"
             "\"predicted_n\":%d,\"predicted_ms\":%.3f,\"predicted_per_second\":%.3f}",
             queue, u.n_prompt - u.n_cached, u.n_cached, read, u.n_generated, write,
             write > 0 ? (u.n_generated - req->n_choices) / write * 1e3 : 0.0);
}

static void begin_event(struct api_request *req, struct buf *b)
{
    struct buf *head = &req->event_head;
    if (!head->len) {
        buf_adds(head, "data: ");
        open_object(req, true, head);
    }
    buf_add(b, head->p, head->len);
}

static void end_event(const struct api_request *req, struct buf *b)
{
    buf_adds(b, req->p.include_usage ? "],\"usage\":null}\n\n" : "]}\n\n");
}

enum { LOGPROBS_A_PIECE = 16 }; /* entries per event: about 40 kB with 20 alternatives each */

static const struct tokenizer *tokenizer_of(const struct api_request *req)
{
    return engine_tokenizer(req->loaded->engine, NULL);
}

/* Writes "logprobs":... with some of the unsent entries. */
static void add_logprobs(struct api_request *req, struct api_choice *o, struct buf *b)
{
    struct logprobs *l = &o->logprobs;
    int n = l->n - l->sent < LOGPROBS_A_PIECE ? l->n - l->sent : LOGPROBS_A_PIECE;
    buf_adds(b, ",\"logprobs\":");
    if (!n) {
        buf_adds(b, "null");
        return;
    }
    logprobs_write(l, is_chat(req), l->sent + n, tokenizer_of(req), b, SIZE_MAX);
}

static void begin_choice(struct api_request *req, int i, struct buf *b)
{
    begin_event(req, b);
    buf_adds(b, "{\"index\":");
    buf_addi(b, i);
    buf_adds(b, is_chat(req) ? ",\"delta\":{" : ",");
}

static void end_choice(struct api_request *req, struct api_choice *o, struct buf *b)
{
    if (is_chat(req))
        buf_addc(b, '}');
    add_logprobs(req, o, b);
    buf_adds(b, ",\"finish_reason\":null}");
    end_event(req, b);
}

static void stream_open(struct api_request *req, struct buf *b)
{
    for (int i = 0; is_chat(req) && i < req->n_choices; i++) {
        begin_choice(req, i, b);
        buf_adds(b, "\"role\":\"assistant\",\"content\":\"\"");
        end_choice(req, &req->choices[i], b);
    }
}

static bool is_legacy(const struct api_request *req)
{
    return req->chat && req->chat->legacy;
}

static const char *finish_reason(const struct api_request *req, const struct api_choice *o)
{
    const char *r = api_choice_finish_reason(req, o);
    return is_legacy(req) && !strcmp(r, "tool_calls") ? "function_call" : r;
}

/* "function_call":{...}, the older form of a tool call. */
static void add_function_delta(struct segment *g, size_t n, struct buf *b)
{
    buf_adds(b, "\"function_call\":{");
    if (!g->opened) {
        buf_adds(b, "\"name\":");
        jsonout_text(b, g->name);
        buf_addc(b, ',');
    }
    buf_adds(b, "\"arguments\":");
    jsonout_string(b, n ? g->text.p + g->sent : "", n);
    buf_addc(b, '}');
}

static void add_tool_delta(struct segment *g, size_t n, struct buf *b)
{
    buf_addf(b, "\"tool_calls\":[{\"index\":%d,", g->tool);
    if (!g->opened) {
        buf_addf(b, "\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":", g->id);
        jsonout_text(b, g->name);
        buf_adds(b, ",\"arguments\":");
    } else {
        buf_adds(b, "\"function\":{\"arguments\":");
    }
    jsonout_string(b, n ? g->text.p + g->sent : "", n);
    buf_adds(b, "}}]");
}

static void add_piece(struct api_request *req, int i, struct segment *g, size_t n, struct buf *b)
{
    const char *text = g->text.p ? g->text.p + g->sent : "";
    begin_choice(req, i, b);
    if (!is_chat(req)) {
        buf_adds(b, "\"text\":");
        jsonout_string(b, text, n);
    } else if (g->kind == SEGMENT_TOOL) {
        is_legacy(req) ? add_function_delta(g, n, b) : add_tool_delta(g, n, b);
    } else if (g->kind == SEGMENT_REASONING) {
        buf_adds(b, "\"reasoning_content\":");
        jsonout_string(b, text, n);
        buf_adds(b, ",\"reasoning\":");
        jsonout_string(b, text, n);
    } else {
        buf_adds(b, "\"content\":");
        jsonout_string(b, text, n);
    }
    end_choice(req, &req->choices[i], b);
    g->opened = true;
    api_choice_sent(&req->choices[i], g, n);
}

static bool stream_flush(struct api_request *req, int i, struct buf *b, size_t room)
{
    struct api_choice *o = &req->choices[i];
    while (o->flushed < o->n_segments) {
        struct segment *g = &o->segments[o->flushed];
        size_t n = segment_next(g);
        if (n || (g->kind == SEGMENT_TOOL && !g->opened)) {
            if (b->len >= room)
                return false;
            add_piece(req, i, g, n, b);
        } else if (o->flushed == o->n_segments - 1) {
            break; /* it may grow */
        } else {
            o->flushed++;
        }
    }
    /* Sends the log-probabilities that remain after large pieces of text. */
    while (o->logprobs.n - o->logprobs.sent > LOGPROBS_A_PIECE) {
        if (b->len >= room)
            return false;
        begin_choice(req, i, b);
        buf_adds(b, is_chat(req) ? "" : "\"text\":\"\"");
        end_choice(req, o, b);
    }
    return true;
}

static void stream_finish(struct api_request *req, int i, struct buf *b)
{
    struct api_choice *o = &req->choices[i];
    begin_event(req, b);
    buf_addf(b, "{\"index\":%d,%s", i, is_chat(req) ? "\"delta\":{}" : "\"text\":\"\"");
    add_logprobs(req, o, b);
    buf_addf(b, ",\"finish_reason\":\"%s\"", finish_reason(req, o));
    if (o->stop >= 0 && o->stop < req->p.n_stop) {
        buf_adds(b, ",\"stop_reason\":");
        jsonout_text(b, req->p.stop[o->stop]);
    }
    buf_addc(b, '}');
    end_event(req, b);
}

static void stream_close(struct api_request *req, struct buf *b)
{
    if (req->p.include_usage) {
        begin_event(req, b);
        buf_adds(b, "],\"usage\":");
        add_usage(req, b);
        add_timings(req, b);
        buf_adds(b, "}\n\n");
    }
    buf_adds(b, "data: [DONE]\n\n");
}

static void stream_error(struct api_request *req, const struct api_error *err, struct buf *b)
{
    (void)req;
    buf_adds(b, "data: ");
    api_error_json(b, err, DIALECT_OPENAI);
    buf_adds(b, "\n\ndata: [DONE]\n\n");
}

/* Writes the text of all segments of a kind; false if there is none. */
static bool add_text(const struct api_choice *o, enum segment_kind kind, struct buf *b)
{
    struct buf all = {0};
    bool any = false;
    for (int i = 0; i < o->n_segments; i++)
        if (o->segments[i].kind == kind) {
            buf_add(&all, o->segments[i].text.p, o->segments[i].text.len);
            any = true;
        }
    jsonout_string(b, all.p ? all.p : "", all.len);
    buf_clear(&all);
    return any;
}

static void add_calls(const struct api_choice *o, bool legacy, struct buf *b)
{
    for (int i = 0, n = 0; i < o->n_segments; i++) {
        const struct segment *g = &o->segments[i];
        if (g->kind != SEGMENT_TOOL)
            continue;
        if (legacy)
            buf_adds(b, ",\"function_call\":{\"name\":");
        else
            buf_addf(b, "%s{\"id\":\"%s\",\"type\":\"function\",\"function\":{\"name\":",
                     n++ ? "," : ",\"tool_calls\":[", g->id);
        jsonout_text(b, g->name);
        buf_adds(b, ",\"arguments\":");
        jsonout_string(b, g->text.p ? g->text.p : "", g->text.len);
        buf_adds(b, legacy ? "}" : "}}");
        if (legacy)
            return; /* this form has only one call */
    }
    if (o->n_tools)
        buf_addc(b, ']');
}

static void add_message(const struct api_choice *o, bool legacy, struct buf *b)
{
    buf_adds(b, "\"message\":{\"role\":\"assistant\",\"content\":");
    bool has_text = false, thinks = false;
    for (int i = 0; i < o->n_segments; i++) {
        has_text |= o->segments[i].kind == SEGMENT_TEXT;
        thinks |= o->segments[i].kind == SEGMENT_REASONING;
    }
    if (o->n_tools && !has_text)
        buf_adds(b, "null");
    else
        add_text(o, SEGMENT_TEXT, b);
    buf_adds(b, ",\"refusal\":null");
    if (thinks) {
        buf_adds(b, ",\"reasoning_content\":");
        add_text(o, SEGMENT_REASONING, b);
        buf_adds(b, ",\"reasoning\":");
        add_text(o, SEGMENT_REASONING, b);
    }
    add_calls(o, legacy, b);
    buf_addc(b, '}');
}

static void open_choice(struct api_request *req, int i, struct buf *b)
{
    const struct api_choice *o = &req->choices[i];
    buf_addf(b, "%s{\"index\":%d,", i ? "," : "", i);
    if (is_chat(req)) {
        add_message(o, is_legacy(req), b);
    } else {
        buf_adds(b, "\"text\":");
        add_text(o, SEGMENT_TEXT, b);
    }
    buf_addf(b, ",\"finish_reason\":\"%s\"", finish_reason(req, o));
    if (o->stop >= 0 && o->stop < req->p.n_stop) {
        buf_adds(b, ",\"stop_reason\":");
        jsonout_text(b, req->p.stop[o->stop]);
    }
    buf_adds(b, ",\"logprobs\":");
}

static bool whole(struct api_request *req, struct buf *b, size_t room)
{
    if (!req->whole.opened)
        open_object(req, false, b);
    req->whole.opened = true;
    for (; req->whole.choice < req->n_choices; req->whole.choice++) {
        struct api_choice *o = &req->choices[req->whole.choice];
        if (!o->done || b->len >= room)
            return false;
        if (!req->whole.in_choice)
            open_choice(req, req->whole.choice, b);
        req->whole.in_choice = true;
        if (!o->logprobs.n)
            buf_adds(b, "null");
        else if (!logprobs_write(&o->logprobs, is_chat(req), o->logprobs.n, tokenizer_of(req), b,
                                 room))
            return false;
        buf_addc(b, '}');
        req->whole.in_choice = false;
        api_choice_forget(o);
    }
    buf_adds(b, "],\"usage\":");
    add_usage(req, b);
    add_timings(req, b);
    buf_addc(b, '}');
    return true;
}

#define STYLE                                                                                      \
    {                                                                                              \
        .stream_open = stream_open, .stream_flush = stream_flush, .stream_finish = stream_finish,  \
        .stream_close = stream_close, .stream_error = stream_error, .whole = whole,                \
        .ping = ":\n\n",                                                                           \
    }
const struct reply_style reply_chat = STYLE, reply_completions = STYLE;
