/* A choice while it is generated: turns tokens into segments and log-probabilities. Knows no reply
 * format. */
#include "server/api/server_int.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

void api_choice_add(struct api_choice *o, enum segment_kind kind, const char *text, size_t n)
{
    struct segment *g = o->n_segments ? &o->segments[o->n_segments - 1] : NULL;
    if (!n && kind != SEGMENT_TOOL)
        return;
    if (!g || g->kind != kind || (kind == SEGMENT_TOOL && !o->in_tool) ||
        o->flushed == o->n_segments) {
        o->segments = mem_realloc(o->segments, (size_t)o->n_segments + 1, sizeof *o->segments);
        g = &o->segments[o->n_segments++];
        *g = (struct segment){.kind = kind};
    }
    buf_add(&g->text, text, n);
    o->n_text_kept += n;
}

size_t api_choice_kept(const struct api_choice *o)
{
    return o->n_text_kept + logprobs_kept(&o->logprobs);
}

size_t segment_next(const struct segment *g)
{
    enum { PIECE = 16 << 10 };
    size_t n = g->text.len - g->sent;
    if (n <= PIECE)
        return n;
    const char *text = g->text.p + g->sent;
    for (n = PIECE; n > PIECE - 4 && (text[n] & 0xc0) == 0x80; n--)
        ; /* at a character boundary */
    return n;
}

void api_choice_sent(struct api_choice *o, struct segment *g, size_t n)
{
    o->n_text_kept -= n;
    g->sent += n;
    if (g->sent < g->text.len)
        return;
    g->sent = 0;
    if (g->text.cap > 64 << 10)
        buf_clear(&g->text);
    else
        buf_reset(&g->text);
}

void api_choice_forget(struct api_choice *o)
{
    for (int i = 0; i < o->n_segments; i++)
        buf_clear(&o->segments[i].text);
    o->n_text_kept = 0;
    logprobs_clear(&o->logprobs);
}

/* The last segment is not a tool call after all. It is removed unless its start was already sent. */
static void take_back(struct api_choice *o)
{
    struct segment *g = &o->segments[o->n_segments - 1];
    if (g->opened) {
        g->broken = true;
        o->n_broken++;
        return;
    }
    o->n_text_kept -= g->text.len;
    buf_clear(&g->text);
    mem_free(g->name);
    o->n_segments--;
    o->n_tools--;
}

/* Adds what the parser found. */
static void on_chat_event(void *arg, const struct chat_event *e)
{
    struct api_choice *o = arg;
    if (o->stopped_by_parser)
        return;
    o->thinking |= e->type == CHAT_REASONING;
    switch (e->type) {
    case CHAT_CONTENT:
        api_choice_add(o, SEGMENT_TEXT, e->text, e->len);
        break;
    case CHAT_REASONING:
        api_choice_add(o, SEGMENT_REASONING, e->text, e->len);
        break;
    case CHAT_TOOL_BEGIN: {
        o->in_tool = false; /* each tool call is a new segment */
        api_choice_add(o, SEGMENT_TOOL, "", 0);
        o->in_tool = true;
        struct segment *g = &o->segments[o->n_segments - 1];
        snprintf(g->id, sizeof g->id, "%s", e->id);
        g->name = mem_strndup(e->text, e->len);
        g->tool = o->n_tools++;
        break;
    }
    case CHAT_TOOL_ARGS:
        api_choice_add(o, SEGMENT_TOOL, e->text, e->len);
        break;
    case CHAT_TOOL_END:
        o->in_tool = false;
        o->stopped_by_parser = o->one_call;
        break;
    case CHAT_TOOL_BROKEN:
        o->in_tool = false;
        take_back(o);
        break;
    }
}

void api_choice_token(struct api_request *req, struct api_choice *o, const struct engine_event *ev)
{
    if ((ev->kind == EVENT_TOKEN || ev->kind == EVENT_PROMPT) && req->p.logprobs)
        logprobs_add(&o->logprobs, ev, req->p.n_top);
    if (ev->kind == EVENT_TOKEN)
        o->usage.n_generated++;
    if (!ev->n_text || o->stopped_by_parser)
        return;
    o->thinking = false;
    if (!o->parser)
        api_choice_add(o, SEGMENT_TEXT, ev->text, ev->n_text);
    else
        chat_parser_push(o->parser, ev->text, ev->n_text);
    o->n_reasoning += ev->kind == EVENT_TOKEN && o->thinking;
}

void api_choice_finish(struct api_choice *o)
{
    if (o->parser && !o->stopped_by_parser)
        chat_parser_finish(o->parser);
}

void api_choice_init(struct api_request *req, struct api_choice *o)
{
    int i = (int)(o - req->choices);
    o->stop = -1;
    if (req->echo)
        api_choice_add(o, SEGMENT_TEXT, req->echo[i / req->p.n].p, req->echo[i / req->p.n].len);
    if (!req->chat)
        return;
    struct chat_parse_options opt = {.tools = req->chat->tools,
                                     .reasoning = true,
                                     .in_reasoning = req->chat->in_reasoning,
                                     .id_seed = req->server->id_secret ^ (uint64_t)req->start_ns ^
                                                (uint64_t)i << 56,
                                     .schema = req->chat->schema,
                                     .event = on_chat_event,
                                     .arg = o};
    o->one_call = req->chat->one_call;
    o->parser = chat_parser_new(req->chat->format, &opt);
}

void api_choice_clear(struct api_choice *o)
{
    for (int i = 0; i < o->n_segments; i++) {
        buf_clear(&o->segments[i].text);
        mem_free(o->segments[i].name);
    }
    mem_free(o->segments);
    logprobs_clear(&o->logprobs);
    mem_free(o->error);
    chat_parser_free(o->parser);
}

const char *api_choice_finish_reason(const struct api_request *req, const struct api_choice *o)
{
    (void)req;
    if (o->n_tools > o->n_broken && o->finish != FINISH_LENGTH)
        return "tool_calls";
    return o->finish == FINISH_LENGTH ? "length" : "stop";
}

struct usage_count api_request_usage(const struct api_request *req, int *n_reasoning)
{
    struct usage_count u = {0};
    int thinking = 0;
    for (int i = 0; i < req->n_choices; i++) {
        const struct usage_count *v = &req->choices[i].usage;
        if (i % req->p.n == 0) { /* the choices of a prompt share it */
            u.n_prompt += v->n_prompt;
            u.n_cached += v->n_cached;
        }
        u.n_generated += v->n_generated;
        u.n_preempted += v->n_preempted;
        if (!u.queue_ns)
            u.queue_ns = v->queue_ns;
        if (!u.first_ns || (v->first_ns && v->first_ns < u.first_ns))
            u.first_ns = v->first_ns;
        thinking += req->choices[i].n_reasoning;
    }
    if (n_reasoning)
        *n_reasoning = thinking;
    return u;
}
