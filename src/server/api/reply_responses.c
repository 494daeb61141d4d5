/*
 * Replies of /v1/responses, whole and streamed. Each segment is an output item. The ids of items contain
 * the response's id, so that an item can be found in the store. A finished response is stored exactly as
 * it was sent.
 */
#include "server/api/background.h"
#include "server/api/mcp_loop.h"
#include "server/api/responses.h"
#include "server/api/server_int.h"
#include "server/api/store.h"

#include <string.h>
#include <time.h>

static const char *hex_of(const struct api_request *req)
{
    return req->id + strlen("resp_");
}

/* The kinds of output items. */
enum item {
    ITEM_MESSAGE,
    ITEM_REASONING,
    ITEM_FUNCTION,
    ITEM_LIST,
    ITEM_CUSTOM, /* its input is a text, where a function's is JSON */
    ITEM_MCP,    /* a call that Steel runs */
    ITEM_APPROVAL,
    N_ITEMS
};

static struct responses_tool tool_of(const struct api_request *req, const struct segment *g)
{
    return responses_tool_of(req->responses->tool_names, g->name);
}

static enum item item_of(const struct api_request *req, const struct segment *g)
{
    if (g->kind != SEGMENT_TOOL)
        return (enum item)g->kind;
    struct responses_tool t = tool_of(req, g);
    if (t.server)
        return t.approve && !g->approved ? ITEM_APPROVAL : ITEM_MCP;
    return t.custom ? ITEM_CUSTOM : ITEM_FUNCTION;
}

enum { ITEM_ID_SIZE = 64 };
static void item_id(const struct api_request *req, const struct segment *g, int index,
                    char id[ITEM_ID_SIZE])
{
    static const char *const prefixes[] = {"msg", "rs", "fc", "mcpl", "ctc", "mcp", "mcpr"};
    enum item item = item_of(req, g);
    int n = snprintf(id, ITEM_ID_SIZE, "%s_%s_%d", prefixes[item], hex_of(req), index);
    if (item == ITEM_MCP) /* responses.c reads it */
        snprintf(id + n, ITEM_ID_SIZE - (size_t)n, "r%d", g->round);
}

static void add_item_id(const struct api_request *req, const struct segment *g, int index,
                        struct buf *b)
{
    char id[ITEM_ID_SIZE];
    item_id(req, g, index, id);
    buf_addf(b, "\"%s\"", id);
}

static void add_text(const struct segment *g, struct buf *b)
{
    jsonout_string(b, g->text.p ? g->text.p : "", g->text.len);
}

/* The input of a custom tool, from {"input": "..."}; a call that was cut keeps its JSON. */
static void add_input(const struct segment *g, struct buf *b)
{
    json_t *args = json_loadb(g->text.p ? g->text.p : "", g->text.len, JSON_ALLOW_NUL, NULL);
    const json_t *input = json_object_get(args, "input");
    if (json_is_string(input))
        jsonout_string(b, json_string_value(input), json_string_length(input));
    else
        add_text(g, b);
    json_decref(args);
}

static void add_call(const struct api_request *req, const struct segment *g, bool full,
                     struct buf *b)
{
    struct responses_tool t = tool_of(req, g);
    buf_addf(b, ",\"type\":\"%s\",\"call_id\":\"%s\",\"name\":",
             t.custom ? "custom_tool_call" : "function_call", g->id);
    jsonout_text(b, t.name);
    if (t.space) {
        buf_adds(b, ",\"namespace\":");
        jsonout_text(b, t.space);
    }
    buf_adds(b, t.custom ? ",\"input\":" : ",\"arguments\":");
    if (!full)
        buf_adds(b, "\"\"");
    else if (t.custom)
        add_input(g, b);
    else
        add_text(g, b);
    buf_addc(b, '}');
}

static void add_arguments(const struct segment *g, struct buf *b)
{
    if (g->text.len)
        add_text(g, b);
    else
        buf_adds(b, "\"{}\"");
}

static bool has_failed(const struct segment *g)
{
    return !g->call || g->call->failed || g->call->is_error;
}

/* The call of an MCP server's tool, with its result once that is there. */
static void add_mcp_call(const struct api_request *req, const struct segment *g, bool full,
                         struct buf *b)
{
    struct responses_tool t = tool_of(req, g);
    buf_addf(b, ",\"status\":\"%s\",\"type\":\"mcp_call\",\"approval_request_id\":",
             !full           ? "in_progress"
             : !g->call      ? "incomplete"
             : has_failed(g) ? "failed"
                             : "completed");
    jsonout_text(b, g->approved);
    buf_adds(b, ",\"arguments\":");
    if (full)
        add_arguments(g, b);
    else
        buf_adds(b, "\"\"");
    const struct buf *text = full && g->call ? &g->call->text : NULL;
    const char *p = text && text->p ? text->p : "";
    buf_adds(b, ",\"error\":");
    if (text && has_failed(g))
        jsonout_string(b, p, text->len);
    else
        buf_adds(b, full && !g->call ? "\"the call is incomplete and did not run\"" : "null");
    buf_adds(b, ",\"name\":");
    jsonout_text(b, t.name);
    buf_adds(b, ",\"output\":");
    if (text && !has_failed(g))
        jsonout_string(b, p, text->len);
    else
        buf_adds(b, "null");
    buf_adds(b, ",\"server_label\":");
    jsonout_text(b, t.server);
    buf_addc(b, '}');
}

/* A call that the client has to approve. */
static void add_approval(const struct api_request *req, const struct segment *g, struct buf *b)
{
    struct responses_tool t = tool_of(req, g);
    buf_adds(b, ",\"type\":\"mcp_approval_request\",\"arguments\":");
    add_arguments(g, b);
    buf_adds(b, ",\"name\":");
    jsonout_text(b, t.name);
    buf_adds(b, ",\"server_label\":");
    jsonout_text(b, t.server);
    buf_addc(b, '}');
}

/* The tools of an MCP server. The segment's text is an object. */
static void add_list(const struct segment *g, bool full, struct buf *b)
{
    buf_adds(b, ",\"type\":\"mcp_list_tools\",");
    if (full) {
        buf_add(b, g->text.p + 1, g->text.len - 1);
        return;
    }
    json_t *v = json_loadb(g->text.p, g->text.len, JSON_ALLOW_NUL, NULL);
    buf_adds(b, "\"server_label\":");
    jsonout_value(b, json_object_get(v, "server_label"));
    buf_adds(b, ",\"tools\":[]}");
    json_decref(v);
}

/* {"type":"output_text",...}: the only part of a message or of thinking. */
static void add_part(const struct api_request *req, const struct api_choice *o,
                     const struct segment *g, bool full, bool probs, struct buf *b)
{
    if (g->kind == SEGMENT_REASONING) {
        buf_addf(b, "{\"type\":\"%s\",\"text\":",
                 req->responses->summary ? "summary_text" : "reasoning_text");
    } else {
        buf_adds(b, "{\"type\":\"output_text\",\"annotations\":[],\"logprobs\":[");
        if (probs)
            logprobs_list(&o->logprobs, 0, engine_tokenizer(req->loaded->engine, NULL), b);
        buf_adds(b, "],\"text\":");
    }
    if (full)
        add_text(g, b);
    else
        buf_adds(b, "\"\"");
    buf_addc(b, '}');
}

static void add_item(const struct api_request *req, const struct api_choice *o, int index,
                     bool full, bool probs, struct buf *b)
{
    const struct segment *g = &o->segments[index];
    bool cut = g->broken || (o->done && o->finish == FINISH_LENGTH && index == o->n_segments - 1);
    buf_adds(b, "{\"id\":");
    add_item_id(req, g, index, b);
    enum item item = item_of(req, g);
    if (item == ITEM_LIST)
        add_list(g, full, b);
    else if (item == ITEM_MCP)
        add_mcp_call(req, g, full, b);
    else if (item == ITEM_APPROVAL)
        add_approval(req, g, b);
    if (item == ITEM_LIST || item == ITEM_MCP || item == ITEM_APPROVAL)
        return;
    buf_addf(b, ",\"status\":\"%s\"", !full ? "in_progress" : cut ? "incomplete" : "completed");
    if (g->kind == SEGMENT_TOOL) {
        add_call(req, g, full, b);
        return;
    }
    bool summary = g->kind == SEGMENT_REASONING && req->responses->summary;
    if (g->kind == SEGMENT_TEXT)
        buf_adds(b, ",\"type\":\"message\",\"role\":\"assistant\",\"content\":[");
    else
        buf_addf(b, ",\"type\":\"reasoning\",\"encrypted_content\":null,%s",
                 summary ? "\"summary\":[" : "\"summary\":[],\"content\":[");
    if (full)
        add_part(req, o, g, true, probs, b);
    buf_adds(b, "]}");
}

static void add_output(const struct api_request *req, struct buf *b)
{
    const struct api_choice *o = &req->choices[0];
    for (int i = 0; i < o->n_segments; i++) {
        if (i)
            buf_addc(b, ',');
        add_item(req, o, i, true, true, b);
    }
}

/* The output for the store, where each text is stored once. */
static void keep_output(const struct api_request *req, struct kept_items *l)
{
    const struct api_choice *o = &req->choices[0];
    for (int i = 0; i < o->n_segments; i++) {
        char id[ITEM_ID_SIZE];
        struct buf b = {0};
        if (o->segments[i].broken)
            continue;
        item_id(req, &o->segments[i], i, id);
        add_item(req, o, i, true, true, &b);
        kept_items_add(l, id, b.p, b.len);
        buf_clear(&b);
    }
}

void responses_add_items(const struct api_request *req, struct buf *b)
{
    const struct api_choice *o = &req->choices[0];
    for (int i = 0, n = 0; i < o->n_segments; i++) {
        if (o->segments[i].broken)
            continue;
        if (n++)
            buf_addc(b, ',');
        add_item(req, o, i, true, false, b);
    }
}

static bool is_stopped(const struct api_request *req)
{
    return req->responses->mcp && req->responses->mcp->stopped;
}

static const char *final_status(const struct api_request *req)
{
    return req->choices[0].finish == FINISH_LENGTH || is_stopped(req) ? "incomplete" : "completed";
}

/* OpenAI's error codes. */
static const char *code_of(const struct api_error *err)
{
    if (err->n_ctx)
        return "context_length_exceeded";
    return err->status < 500 ? "invalid_prompt" : "server_error";
}

/* Writes the response object, of a failed response if err. */
static void add_response(const struct api_request *req, const char *status,
                         const struct api_error *err, struct buf *b)
{
    bool over = !strcmp(status, "completed") || !strcmp(status, "incomplete");
    buf_addf(b, "{\"id\":\"%s\",\"object\":\"response\",\"created_at\":%lld,\"status\":\"%s\",",
             req->id, (long long)req->created, status);
    buf_adds(b, "\"error\":");
    if (err) {
        buf_addf(b, "{\"code\":\"%s\",\"message\":", code_of(err));
        jsonout_text(b, err->msg);
        buf_addc(b, '}');
    } else {
        buf_adds(b, "null");
    }
    buf_addf(b, ",\"incomplete_details\":%s,\"model\":",
             strcmp(status, "incomplete") != 0 ? "null"
             : is_stopped(req)                 ? "{\"reason\":\"mcp_max_rounds\"}"
                                               : "{\"reason\":\"max_output_tokens\"}");
    jsonout_text(b, api_request_model(req));
    buf_adds(b, ",\"output\":[");
    if (over)
        add_output(req, b);
    buf_adds(b, "]");
    buf_add(b, req->responses->echo.p, req->responses->echo.len);
    buf_adds(b, ",\"temperature\":");
    jsonout_number(b, (double)req->p.sample.temp);
    buf_adds(b, ",\"top_p\":");
    jsonout_number(b, (double)req->p.sample.top_p);
    if (over)
        buf_addf(b, ",\"completed_at\":%lld", (long long)time(NULL));
    buf_adds(b, ",\"usage\":");
    if (over) {
        int thinking;
        struct usage_count u = api_request_usage(req, &thinking);
        buf_addf(b, "{\"input_tokens\":%d,\"input_tokens_details\":{\"cached_tokens\":%d",
                 u.n_prompt, u.n_cached);
        api_add_disk_tokens(&u, b);
        buf_addf(b, "},\"output_tokens\":%d,\"output_tokens_details\":{\"reasoning_tokens\":%d",
                 u.n_generated, thinking);
        api_add_draft_tokens(&u, b);
        buf_addf(b, "},\"total_tokens\":%d}}", u.n_prompt + u.n_generated);
    } else {
        buf_adds(b, "null}");
    }
}

/* Stores a response that is over. Without room for the events they are left out. */
static bool keep(struct api_request *req, const char *reply, struct kept_items *output)
{
    struct responses_request *rr = req->responses;
    const struct buf *events = req->background ? background_events(req->background) : NULL;
    struct stored r = {.id = req->id,
                       .owner = req->owner,
                       .previous = rr->previous,
                       .reply = reply,
                       .input = &rr->input,
                       .output = output,
                       .events = events ? events->p : NULL,
                       .background = rr->background};
    if (store_put(req->server->store, &r))
        return true;
    r.events = NULL;
    return store_put(req->server->store, &r);
}

/* Appends the items of the request and of its output to its conversation. */
static void add_to_conversation(const struct api_request *req, const struct kept_items *output)
{
    struct kept_items all = {0};
    if (!req->responses->conversation)
        return;
    kept_items_copy(&all, &req->responses->input);
    kept_items_copy(&all, output);
    if (store_append(req->server->store, req->responses->conversation, req->owner, &all) !=
        STORE_OK)
        log_line(LOG_WARN, "a conversation was deleted or has no room for a response",
                 LOG_TEXT("id", req->id));
    kept_items_clear(&all);
}

void responses_keep_failed(struct api_request *req, const char *status, const struct api_error *err)
{
    struct buf b = {0};
    add_response(req, status, err, &b);
    if (!keep(req, b.p, NULL)) { /* its input alone is too large */
        kept_items_clear(&req->responses->input);
        keep(req, b.p, NULL);
    }
    buf_clear(&b);
}

/* Stores the finished response, whose object is `reply`, and adds it to its conversation. */
static void keep_finished(struct api_request *req, const char *reply)
{
    struct kept_items output = {0};
    keep_output(req, &output);
    add_to_conversation(req, &output);
    if (req->responses->keep && !keep(req, reply, &output) && req->background) {
        struct api_error err;
        api_fail(&err, 500, "server_error", "the response is larger than the store (--store-mb)");
        responses_keep_failed(req, "failed", &err);
    }
    kept_items_clear(&output);
}

/* Writes the finished response and stores it. One in the background is stored after its last event. */
static void finish(struct api_request *req, struct buf *b)
{
    size_t at = b->len;
    add_response(req, final_status(req), NULL, b);
    if (!req->background)
        keep_finished(req, b->p + at);
}

void responses_keep_finished(struct api_request *req)
{
    struct buf b = {0};
    add_response(req, final_status(req), NULL, &b);
    keep_finished(req, b.p);
    buf_clear(&b);
}

/* The status of a response in the background. */
static const char *status_now(const struct api_request *req)
{
    const struct api_choice *o = &req->choices[0];
    return o->usage.n_prompt || o->before.n_prompt ? "in_progress" : "queued";
}

void responses_add_now(const struct api_request *req, struct buf *b)
{
    add_response(req, status_now(req), NULL, b);
}

/* Events */

static void event(struct api_request *req, struct buf *b, const char *name)
{
    buf_addf(b, "event: %s\ndata: {\"type\":\"%s\",\"sequence_number\":%d", name, name,
             req->responses->sequence++);
}

static void item_event(struct api_request *req, const struct segment *g, int index, struct buf *b,
                       const char *name)
{
    event(req, b, name);
    buf_adds(b, ",\"item_id\":");
    add_item_id(req, g, index, b);
    buf_addf(b, ",\"output_index\":%d", index);
    if (g->kind < SEGMENT_TOOL)
        buf_adds(b, g->kind == SEGMENT_REASONING && req->responses->summary
                        ? ",\"summary_index\":0"
                        : ",\"content_index\":0");
}

static void end_event(struct buf *b)
{
    buf_adds(b, "}\n\n");
}

static void response_event(struct api_request *req, struct buf *b, const char *name,
                           const char *status)
{
    event(req, b, name);
    buf_adds(b, ",\"response\":");
    add_response(req, status, NULL, b);
    end_event(b);
}

/* Events have no name of their own for a cancelled response. */
void responses_add_cancelled(struct api_request *req, struct buf *b)
{
    response_event(req, b, "response.failed", "cancelled");
}

static void stream_open(struct api_request *req, struct buf *b)
{
    req->responses->queued = req->responses->background;
    if (req->responses->queued) {
        response_event(req, b, "response.created", "queued");
        response_event(req, b, "response.queued", "queued");
        return;
    }
    response_event(req, b, "response.created", "in_progress");
    response_event(req, b, "response.in_progress", "in_progress");
}

/* Names of a segment's events: part added, delta, text done, part done. */
static const char *name_of(const struct api_request *req, const struct segment *g, int which)
{
    static const char *const summary[4] = {
        "response.reasoning_summary_part.added", "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done", "response.reasoning_summary_part.done"};
    static const char *const names[N_ITEMS][4] = {
        [ITEM_MESSAGE] = {"response.content_part.added", "response.output_text.delta",
                          "response.output_text.done", "response.content_part.done"},
        [ITEM_REASONING] = {"response.content_part.added", "response.reasoning_text.delta",
                            "response.reasoning_text.done", "response.content_part.done"},
        [ITEM_FUNCTION] = {NULL, "response.function_call_arguments.delta",
                           "response.function_call_arguments.done", NULL},
        [ITEM_CUSTOM] = {NULL, "response.custom_tool_call_input.delta",
                         "response.custom_tool_call_input.done", NULL},
        [ITEM_MCP] = {NULL, "response.mcp_call_arguments.delta", "response.mcp_call_arguments.done",
                      NULL},
    };
    if (g->kind == SEGMENT_REASONING && req->responses->summary)
        return summary[which];
    return names[item_of(req, g)][which];
}

static void part_event(struct api_request *req, const struct api_choice *o, int index, bool full,
                       struct buf *b, const char *name)
{
    const struct segment *g = &o->segments[index];
    if (!name)
        return;
    item_event(req, g, index, b, name);
    buf_adds(b, ",\"part\":");
    add_part(req, o, g, full, false, b);
    end_event(b);
}

/* An event without a value of its own. */
static void bare_event(struct api_request *req, const struct segment *g, int index, struct buf *b,
                       const char *name)
{
    item_event(req, g, index, b, name);
    end_event(b);
}

static void open_item(struct api_request *req, struct api_choice *o, int index, struct buf *b)
{
    struct segment *g = &o->segments[index];
    enum item item = item_of(req, g);
    event(req, b, "response.output_item.added");
    buf_addf(b, ",\"output_index\":%d,\"item\":", index);
    add_item(req, o, index, false, false, b);
    end_event(b);
    if (item == ITEM_MCP)
        bare_event(req, g, index, b, "response.mcp_call.in_progress");
    else if (item == ITEM_LIST)
        bare_event(req, g, index, b, "response.mcp_list_tools.in_progress");
    else if (item != ITEM_APPROVAL)
        part_event(req, o, index, false, b, name_of(req, g, 0));
    g->opened = true;
}

/* The input of a custom tool is known when its JSON is complete: one delta. */
static void close_custom(struct api_request *req, const struct segment *g, int index, struct buf *b)
{
    for (int which = 1; which <= 2; which++) {
        item_event(req, g, index, b, name_of(req, g, which));
        buf_adds(b, which == 1 ? ",\"delta\":" : ",\"input\":");
        add_input(g, b);
        end_event(b);
    }
}

static void close_text(struct api_request *req, struct api_choice *o, int index, struct buf *b)
{
    const struct segment *g = &o->segments[index];
    item_event(req, g, index, b, name_of(req, g, 2));
    if (g->kind == SEGMENT_TOOL) {
        buf_adds(b, ",\"name\":");
        jsonout_text(b, tool_of(req, g).name);
    }
    buf_adds(b, g->kind == SEGMENT_TOOL ? ",\"arguments\":" : ",\"text\":");
    add_text(g, b);
    if (g->kind == SEGMENT_TEXT)
        buf_adds(b, ",\"logprobs\":[]");
    end_event(b);
    part_event(req, o, index, true, b, name_of(req, g, 3));
}

/* The arguments of an MCP server's tool are complete. */
static void end_arguments(struct api_request *req, struct segment *g, int index, struct buf *b)
{
    if (g->args_sent)
        return;
    g->args_sent = true;
    item_event(req, g, index, b, name_of(req, g, 2));
    buf_adds(b, ",\"arguments\":");
    add_arguments(g, b);
    end_event(b);
}

static void close_list(struct api_request *req, const struct segment *g, int index, struct buf *b)
{
    json_t *v = json_loadb(g->text.p, g->text.len, JSON_ALLOW_NUL, NULL);
    bare_event(req, g, index, b,
               json_object_get(v, "error") ? "response.mcp_list_tools.failed"
                                           : "response.mcp_list_tools.completed");
    json_decref(v);
}

static void close_item(struct api_request *req, struct api_choice *o, int index, struct buf *b)
{
    struct segment *g = &o->segments[index];
    enum item item = item_of(req, g);
    if (item == ITEM_CUSTOM) {
        close_custom(req, g, index, b);
    } else if (item == ITEM_MCP) {
        end_arguments(req, g, index, b);
        bare_event(req, g, index, b,
                   has_failed(g) ? "response.mcp_call.failed" : "response.mcp_call.completed");
    } else if (item == ITEM_LIST) {
        close_list(req, g, index, b);
    } else if (item != ITEM_APPROVAL) {
        close_text(req, o, index, b);
    }
    event(req, b, "response.output_item.done");
    buf_addf(b, ",\"output_index\":%d,\"item\":", index);
    add_item(req, o, index, true, false, b);
    end_event(b);
}

static void add_delta(struct api_request *req, struct api_choice *o, int index, size_t n,
                      struct buf *b)
{
    struct segment *g = &o->segments[index];
    enum item item = item_of(req, g);
    if (item == ITEM_CUSTOM || item == ITEM_LIST || item == ITEM_APPROVAL) {
        g->sent += n;
        return;
    }
    item_event(req, g, index, b, name_of(req, g, 1));
    buf_adds(b, ",\"delta\":");
    jsonout_string(b, g->text.p + g->sent, n);
    if (g->kind == SEGMENT_TEXT) {
        buf_adds(b, ",\"logprobs\":[");
        logprobs_list(&o->logprobs, req->responses->n_probs,
                      engine_tokenizer(req->loaded->engine, NULL), b);
        buf_addc(b, ']');
        req->responses->n_probs = o->logprobs.n;
    }
    end_event(b);
    g->sent += n;
}

/* Whether nothing more will come for an item. */
static bool is_complete(const struct api_request *req, const struct api_choice *o, int index)
{
    const struct segment *g = &o->segments[index];
    enum item item = item_of(req, g);
    if (item == ITEM_LIST || (item == ITEM_MCP && g->call))
        return item == ITEM_LIST || g->is_called;
    return index < o->n_segments - 1 && (item != ITEM_MCP || g->broken);
}

/* Texts are not freed: the events that close an item and the response repeat them. */
static bool stream_flush(struct api_request *req, int i, struct buf *b, size_t room)
{
    struct api_choice *o = &req->choices[i];
    if (req->responses->queued && o->usage.n_prompt) {
        req->responses->queued = false;
        response_event(req, b, "response.in_progress", "in_progress");
    }
    while (o->flushed < o->n_segments) {
        struct segment *g = &o->segments[o->flushed];
        size_t n = segment_next(g);
        bool complete = is_complete(req, o, o->flushed);
        if (b->len >= room)
            return false;
        if (!complete && item_of(req, g) == ITEM_APPROVAL)
            break; /* it is sent whole */
        if (!g->opened)
            open_item(req, o, o->flushed, b);
        if (n) {
            add_delta(req, o, o->flushed, n, b);
        } else if (complete) {
            close_item(req, o, o->flushed++, b);
        } else {
            if (g->call)
                end_arguments(req, g, o->flushed, b);
            break;
        }
    }
    return true;
}

static void stream_finish(struct api_request *req, int i, struct buf *b)
{
    struct api_choice *o = &req->choices[i];
    for (; o->flushed < o->n_segments; o->flushed++) {
        if (!o->segments[o->flushed].opened)
            open_item(req, o, o->flushed, b);
        close_item(req, o, o->flushed, b);
    }
}

static void stream_close(struct api_request *req, struct buf *b)
{
    bool cut = !strcmp(final_status(req), "incomplete");
    event(req, b, cut ? "response.incomplete" : "response.completed");
    buf_adds(b, ",\"response\":");
    struct buf text = {0};
    finish(req, &text);
    buf_add(b, text.p, text.len);
    buf_clear(&text);
    end_event(b);
}

static void stream_error(struct api_request *req, const struct api_error *err, struct buf *b)
{
    event(req, b, "error");
    buf_addf(b, ",\"code\":\"%s\",\"message\":", code_of(err));
    jsonout_text(b, err->msg);
    buf_adds(b, ",\"param\":null");
    end_event(b);
    event(req, b, "response.failed");
    buf_adds(b, ",\"response\":");
    add_response(req, "failed", err, b);
    end_event(b);
}

/* One choice is small enough to write at once. */
static bool whole(struct api_request *req, struct buf *b, size_t room)
{
    (void)room;
    if (!req->choices[0].done)
        return false;
    finish(req, b);
    return true;
}

const struct reply_style reply_responses = {
    .stream_open = stream_open,
    .stream_flush = stream_flush,
    .stream_finish = stream_finish,
    .stream_close = stream_close,
    .stream_error = stream_error,
    .whole = whole,
    .ping = ":\n\n",
    .too_long_in_stream = true, /* Codex compacts its conversation then */
};
