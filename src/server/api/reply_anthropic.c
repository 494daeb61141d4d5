/* Replies of /v1/messages, whole and streamed, as Anthropic's clients expect them. */
#include "server/api/server_int.h"

#include <string.h>

static const char *stop_reason(const struct api_request *req, const struct api_choice *o)
{
    const char *r = api_choice_finish_reason(req, o);
    if (!strcmp(r, "length"))
        return "max_tokens";
    if (!strcmp(r, "tool_calls"))
        return "tool_use";
    return o->stop >= 0 ? "stop_sequence" : "end_turn";
}

static void add_stop(const struct api_request *req, const struct api_choice *o, struct buf *b)
{
    buf_addf(b, "\"stop_reason\":\"%s\",\"stop_sequence\":", stop_reason(req, o));
    jsonout_text(b, o->stop >= 0 && o->stop < req->p.n_stop ? req->p.stop[o->stop] : NULL);
}

/* input_tokens does not count cached tokens. */
static void add_usage(const struct api_request *req, int n_out, struct buf *b)
{
    struct usage_count u = api_request_usage(req, NULL);
    buf_addf(b,
             "\"usage\":{\"input_tokens\":%d,\"cache_creation_input_tokens\":0,"
             "\"cache_read_input_tokens\":%d,\"output_tokens\":%d}",
             u.n_prompt - u.n_cached, u.n_cached, n_out);
}

static void open_message(const struct api_request *req, struct buf *b)
{
    buf_addf(b, "{\"id\":\"%s\",\"type\":\"message\",\"role\":\"assistant\",\"model\":", req->id);
    jsonout_text(b, api_request_model(req));
    buf_adds(b, ",\"content\":[");
}

static void event(struct buf *b, const char *name)
{
    buf_addf(b, "event: %s\ndata: {\"type\":\"%s\"", name, name);
}

static void end_event(struct buf *b)
{
    buf_adds(b, "}\n\n");
}

/* message_start has the number of cached tokens, so it waits for the engine's start event. */
static void stream_open(struct api_request *req, struct buf *b)
{
    (void)req, (void)b;
}

static void start_message(struct api_request *req, struct api_choice *o, struct buf *b)
{
    if (o->role_sent)
        return;
    o->role_sent = true;
    event(b, "message_start");
    buf_adds(b, ",\"message\":");
    open_message(req, b);
    buf_adds(b, "],\"stop_reason\":null,\"stop_sequence\":null,");
    add_usage(req, 0, b);
    buf_addc(b, '}');
    end_event(b);
}

static void open_block(struct api_request *req, struct segment *g, struct buf *b)
{
    event(b, "content_block_start");
    buf_addf(b, ",\"index\":%d,\"content_block\":", ++req->block);
    if (g->kind == SEGMENT_TOOL) {
        buf_addf(b, "{\"type\":\"tool_use\",\"id\":\"%s\",\"name\":", g->id);
        jsonout_text(b, g->name);
        buf_adds(b, ",\"input\":{}}");
    } else if (g->kind == SEGMENT_REASONING) {
        buf_adds(b, "{\"type\":\"thinking\",\"thinking\":\"\",\"signature\":\"\"}");
    } else {
        buf_adds(b, "{\"type\":\"text\",\"text\":\"\"}");
    }
    end_event(b);
    g->opened = true;
}

static void close_block(const struct api_request *req, struct buf *b)
{
    event(b, "content_block_stop");
    buf_addf(b, ",\"index\":%d", req->block);
    end_event(b);
}

/* Skips thinking that was not requested. */
static bool is_hidden(const struct api_request *req, const struct segment *g)
{
    return g->kind == SEGMENT_REASONING && req->chat->hide_thinking;
}

static bool stream_flush(struct api_request *req, int i, struct buf *b, size_t room)
{
    static const char *const deltas[] = {
        "\"text_delta\",\"text\":", "\"thinking_delta\",\"thinking\":",
        "\"input_json_delta\",\"partial_json\":"};
    struct api_choice *o = &req->choices[i];
    start_message(req, o, b);
    while (o->flushed < o->n_segments) {
        struct segment *g = &o->segments[o->flushed];
        size_t n = segment_next(g);
        bool hidden = is_hidden(req, g);
        if (b->len >= room)
            return false;
        if (!g->opened && !hidden)
            open_block(req, g, b);
        if (n && hidden) {
            api_choice_sent(o, g, n);
        } else if (n) {
            event(b, "content_block_delta");
            buf_addf(b, ",\"index\":%d,\"delta\":{\"type\":%s", req->block, deltas[g->kind]);
            jsonout_string(b, g->text.p + g->sent, n);
            buf_addc(b, '}');
            end_event(b);
            api_choice_sent(o, g, n);
        } else if (o->flushed == o->n_segments - 1) {
            break; /* it may grow */
        } else {
            if (!hidden)
                close_block(req, b);
            o->flushed++;
        }
    }
    return true;
}

static void stream_finish(struct api_request *req, int i, struct buf *b)
{
    struct api_choice *o = &req->choices[i];
    if (o->n_segments && !is_hidden(req, &o->segments[o->n_segments - 1]))
        close_block(req, b);
    event(b, "message_delta");
    buf_adds(b, ",\"delta\":{");
    add_stop(req, o, b);
    buf_adds(b, "},");
    add_usage(req, o->usage.n_generated, b);
    end_event(b);
}

static void stream_close(struct api_request *req, struct buf *b)
{
    (void)req;
    event(b, "message_stop");
    end_event(b);
}

static void stream_error(struct api_request *req, const struct api_error *err, struct buf *b)
{
    (void)req;
    buf_adds(b, "event: error\ndata: ");
    api_error_json(b, err, DIALECT_ANTHROPIC);
    buf_adds(b, "\n\n");
}

/* One choice without log-probabilities is small enough to write at once. */
static bool whole(struct api_request *req, struct buf *b, size_t room)
{
    (void)room;
    struct api_choice *o = &req->choices[0];
    if (!o->done)
        return false;
    open_message(req, b);
    for (int i = 0, n = 0; i < o->n_segments; i++) {
        const struct segment *g = &o->segments[i];
        if (is_hidden(req, g))
            continue;
        if (n++)
            buf_addc(b, ',');
        if (g->kind == SEGMENT_TOOL) {
            buf_addf(b, "{\"type\":\"tool_use\",\"id\":\"%s\",\"name\":", g->id);
            jsonout_text(b, g->name);
            /* The arguments are an object, or invalid JSON, which is sent as text. */
            json_t *input = json_loadb(g->text.p ? g->text.p : "", g->text.len, 0, NULL);
            buf_adds(b, ",\"input\":");
            if (json_is_object(input)) {
                jsonout_value(b, input);
            } else {
                buf_adds(b, "{\"arguments\":");
                jsonout_string(b, g->text.p ? g->text.p : "", g->text.len);
                buf_addc(b, '}');
            }
            json_decref(input);
            buf_addc(b, '}');
        } else {
            const char *name = g->kind == SEGMENT_REASONING ? "thinking" : "text";
            buf_addf(b, "{\"type\":\"%s\",\"%s\":", name, name);
            jsonout_string(b, g->text.p ? g->text.p : "", g->text.len);
            buf_adds(b, g->kind == SEGMENT_REASONING ? ",\"signature\":\"\"}" : "}");
        }
    }
    buf_adds(b, "],");
    add_stop(req, o, b);
    buf_addc(b, ',');
    add_usage(req, o->usage.n_generated, b);
    buf_addc(b, '}');
    return true;
}

const struct reply_style reply_anthropic = {
    .stream_open = stream_open,
    .stream_flush = stream_flush,
    .stream_finish = stream_finish,
    .stream_close = stream_close,
    .stream_error = stream_error,
    .whole = whole,
    .ping = "event: ping\ndata: {\"type\":\"ping\"}\n\n",
};
