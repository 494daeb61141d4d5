/* A choice while it is generated: turns tokens into segments and log-probabilities. Knows no reply
 * format. */
#include "server/api/server_int.h"
#include "base/clock.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

struct segment *api_choice_append(struct api_choice *o, enum segment_kind kind)
{
    o->segments = mem_realloc(o->segments, (size_t)o->n_segments + 1, sizeof *o->segments);
    struct segment *g = &o->segments[o->n_segments++];
    *g = (struct segment){.kind = kind, .round = o->round};
    return g;
}

void api_choice_put(struct api_choice *o, struct segment *g, const char *text, size_t n)
{
    buf_add(&g->text, text, n);
    o->n_text_kept += n;
}

static void api_choice_add(struct api_choice *o, enum segment_kind kind, const char *text, size_t n)
{
    struct segment *g = o->n_segments ? &o->segments[o->n_segments - 1] : NULL;
    if (!n && kind != SEGMENT_TOOL)
        return;
    if (!g || g->kind != kind || (kind == SEGMENT_TOOL && !o->in_tool) ||
        o->flushed == o->n_segments || o->new_round)
        g = api_choice_append(o, kind);
    o->new_round = false;
    api_choice_put(o, g, text, n);
}

size_t api_choice_kept(const struct api_choice *o)
{
    return o->n_text_kept + logprobs_kept(&o->logprobs) + o->tokens.n * sizeof *o->tokens.ids;
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
    token_list_clear(&o->tokens);
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

/* The length of the text before the first character of a line that is indented too little, or n. */
static size_t indented(struct api_choice *o, int least, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        bool blank = text[i] == ' ' || text[i] == '\t';
        if (text[i] == '\n') {
            o->new_line = o->in_indent = true;
            o->indent = 0;
        } else if (o->in_indent && blank) {
            o->indent++;
        } else if (o->in_indent && o->indent < least) {
            return i;
        } else {
            o->in_indent = false;
        }
    }
    return n;
}

/* Adds text of an output without a parser, as far as the limits of indentation and time allow. */
static void add_limited(struct api_request *req, struct api_choice *o, const char *text, size_t n)
{
    const struct completion_options *opt = &req->completion;
    int64_t now = opt->max_predict_ms > 0 ? clock_ns() : 0;
    size_t kept = indented(o, opt->n_indent, text, n);
    api_choice_add(o, SEGMENT_TEXT, text, kept);
    if (!o->first_ns)
        o->first_ns = now;
    bool late = now && o->new_line && now - o->first_ns > (int64_t)opt->max_predict_ms * 1000000;
    if (kept == n && !late)
        return;
    o->stopped_by_parser = o->limited = true;
    struct segment *g = kept < n && o->n_segments ? &o->segments[o->n_segments - 1] : NULL;
    for (; g && g->text.len > g->sent; g->text.len--, o->n_text_kept--) {
        char last = g->text.p[g->text.len - 1];
        if (last != ' ' && last != '\t') /* the indentation of the line that was left out */
            break;
    }
}

void api_choice_token(struct api_request *req, struct api_choice *o, const struct engine_event *ev)
{
    if ((ev->kind == EVENT_TOKEN || ev->kind == EVENT_PROMPT) && req->p.logprobs)
        logprobs_add(&o->logprobs, ev, req->p.n_top);
    if (ev->kind == EVENT_TOKEN)
        o->usage.n_generated++;
    if (ev->kind == EVENT_TOKEN && req->completion.keep_tokens && !o->stopped_by_parser)
        token_list_add(&o->tokens, ev->token);
    if (!ev->n_text || o->stopped_by_parser)
        return;
    o->thinking = false;
    if (!o->parser)
        add_limited(req, o, ev->text, ev->n_text);
    else
        chat_parser_push(o->parser, ev->text, ev->n_text);
    o->n_reasoning += ev->kind == EVENT_TOKEN && o->thinking;
}

void api_choice_finish(struct api_choice *o)
{
    if (o->parser && !o->stopped_by_parser)
        chat_parser_finish(o->parser);
}

static void open_parser(struct api_request *req, struct api_choice *o)
{
    int i = (int)(o - req->choices);
    if (!req->chat)
        return;
    struct chat_parse_options opt = {.thoughts = req->chat->thoughts,
                                     .tools = req->chat->tools,
                                     .reasoning = !req->chat->continues || req->chat->in_reasoning,
                                     .in_reasoning = req->chat->in_reasoning,
                                     .continues = req->chat->continues,
                                     .id_seed = req->server->id_secret ^ (uint64_t)req->start_ns ^
                                                (uint64_t)i << 56 ^ (uint64_t)o->n_segments << 40,
                                     .schema = req->chat->schema,
                                     .event = on_chat_event,
                                     .arg = o};
    o->one_call = req->chat->one_call;
    o->parser = chat_parser_new(req->chat->format, &opt);
}

void api_choice_init(struct api_request *req, struct api_choice *o)
{
    int i = (int)(o - req->choices);
    o->stop = o->slot = -1;
    if (req->echo)
        api_choice_add(o, SEGMENT_TEXT, req->echo[i / req->p.n].p, req->echo[i / req->p.n].len);
    open_parser(req, o);
}

static void add_drafts(struct usage_count *sum, const struct usage_count *u)
{
    for (int i = 0; i < N_DRAFT_SOURCES; i++) {
        sum->drafts[i].drafted += u->drafts[i].drafted;
        sum->drafts[i].accepted += u->drafts[i].accepted;
    }
}

void api_choice_end_round(struct api_choice *o)
{
    struct usage_count *sum = &o->before, *u = &o->usage;
    sum->n_prompt += u->n_prompt;
    sum->n_cached += u->n_cached;
    sum->n_disk += u->n_disk;
    sum->n_generated += u->n_generated;
    sum->n_preempted += u->n_preempted;
    add_drafts(sum, u);
    sum->queue_ns = sum->queue_ns ? sum->queue_ns : u->queue_ns;
    sum->first_ns = sum->first_ns ? sum->first_ns : u->first_ns;
    *u = (struct usage_count){0};
}

void api_choice_next_round(struct api_request *req, struct api_choice *o)
{
    chat_parser_free(o->parser);
    o->parser = NULL;
    o->done = o->stopped_by_parser = o->thinking = o->in_tool = false;
    o->new_round = true;
    o->round++;
    o->stop = -1;
    open_parser(req, o);
}

void api_choice_clear(struct api_choice *o)
{
    for (int i = 0; i < o->n_segments; i++) {
        buf_clear(&o->segments[i].text);
        mem_free(o->segments[i].name);
        mem_free(o->segments[i].approved);
        mcp_call_free(o->segments[i].call);
    }
    mem_free(o->segments);
    token_list_clear(&o->tokens);
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
        const struct usage_count *v = &req->choices[i].usage, *before = &req->choices[i].before;
        if (i % req->p.n == 0) { /* the choices of a prompt share it */
            u.n_prompt += v->n_prompt + before->n_prompt;
            u.n_cached += v->n_cached + before->n_cached;
            u.n_disk += v->n_disk + before->n_disk;
        }
        u.n_generated += v->n_generated + before->n_generated;
        u.n_preempted += v->n_preempted + before->n_preempted;
        add_drafts(&u, v);
        add_drafts(&u, before);
        if (!u.queue_ns)
            u.queue_ns = before->n_prompt ? before->queue_ns : v->queue_ns;
        int64_t first_ns = before->n_prompt ? before->first_ns : v->first_ns;
        if (!u.first_ns || (first_ns && first_ns < u.first_ns))
            u.first_ns = first_ns;
        thinking += req->choices[i].n_reasoning;
    }
    if (n_reasoning)
        *n_reasoning = thinking;
    return u;
}
