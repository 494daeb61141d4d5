/* The rounds of a response with tools of MCP servers. See mcp_loop.h. Runs on the loop. */
#include "server/api/mcp_loop.h"
#include "base/mem.h"
#include "server/api/server_int.h"
#include "text/grammar/grammar.h"

#include <stdio.h>
#include <string.h>

enum { MAX_ARGUMENTS = 1 << 20 };

static struct responses_tool tool_of(const struct api_request *req, const struct segment *g)
{
    return responses_tool_of(req->responses->tool_names, g->name);
}

static struct responses_mcp *mcp_of(const struct api_request *req)
{
    return req->responses ? req->responses->mcp : NULL;
}

/* The first round's segments */

void mcp_loop_begin(struct api_request *req)
{
    struct responses_mcp *m = mcp_of(req);
    struct api_choice *o = &req->choices[0];
    size_t i;
    const char *id;
    json_t *item;
    if (!m)
        return;
    m->max_tokens = req->p.max_tokens;
    json_array_foreach(m->lists, i, item)
    {
        struct segment *g = api_choice_append(o, SEGMENT_LIST);
        struct buf text = {0};
        jsonout_value(&text, item);
        api_choice_put(o, g, text.p, text.len);
        buf_clear(&text);
    }
    m->first = o->n_segments;
    json_object_foreach(m->approved, id, item)
    {
        struct segment *g = api_choice_append(o, SEGMENT_TOOL);
        const json_t *args = json_object_get(item, "arguments");
        json_t *name = mcp_flat_name(json_string_value(json_object_get(item, "server_label")),
                                     json_string_value(json_object_get(item, "name")));
        g->name = mem_strdup(json_string_value(name));
        g->approved = mem_strdup(id);
        g->tool = o->n_tools++;
        api_choice_put(o, g, json_string_value(args), json_string_length(args));
        json_decref(name);
    }
}

/* Running calls */

/* The arguments without the model's line breaks, which would end a message. False: they are no object. */
static bool compact(const struct buf *text, struct buf *out)
{
    json_t *v = text->len ? json_loadb(text->p, text->len, JSON_ALLOW_NUL, NULL) : json_object();
    bool ok = json_is_object(v);
    if (ok)
        jsonout_value(out, v);
    else
        buf_adds(out, "{}");
    json_decref(v);
    return ok;
}

/* Starts the call of a segment, or ends it with the reason why it does not run. */
static void start_call(struct api_request *req, struct segment *g, const char *why)
{
    struct responses_mcp *m = mcp_of(req);
    struct responses_tool t = tool_of(req, g);
    struct buf args = {0};
    bool is_object = compact(&g->text, &args);
    g->call = mcp_call_new(t.server, t.name, args.p);
    buf_clear(&args);
    if (!why && m->max_calls >= 0 && m->n_calls >= m->max_calls)
        why = "not run: max_tool_calls is reached";
    else if (!why && g->text.len > MAX_ARGUMENTS)
        why = "not run: the arguments are too long";
    else if (!why && !is_object)
        why = "not run: the arguments are no JSON object";
    if (why) {
        buf_adds(&g->call->text, why);
        g->call->failed = g->is_called = true;
        return;
    }
    m->n_calls++;
    req->n_open++;
    g->call->user = req;
    g->call->client = req->job.client;
    mcp_call_start(req->server->mcp, g->call);
}

/* Runs the calls of the round. True: there were any. *asks: the client has to continue, as it must approve a call or
 * run one of its own functions. */
static bool run_round(struct api_request *req, const char *why, bool *asks)
{
    struct api_choice *o = &req->choices[0];
    bool any = false;
    *asks = false;
    for (int i = mcp_of(req)->first; i < o->n_segments; i++) {
        struct segment *g = &o->segments[i];
        if (g->kind != SEGMENT_TOOL || g->broken)
            continue;
        struct responses_tool t = tool_of(req, g);
        if (!t.server || (t.approve && !g->approved)) {
            *asks = true;
            continue;
        }
        any = true;
        start_call(req, g, why);
    }
    return any;
}

bool mcp_loop_run_approved(struct api_request *req)
{
    struct responses_mcp *m = mcp_of(req);
    bool asks;
    return m && json_object_size(m->approved) && run_round(req, NULL, &asks);
}

bool mcp_loop_continue(struct api_request *req)
{
    struct responses_mcp *m = mcp_of(req);
    struct api_choice *o = req->choices;
    char why[80];
    if (!m || (o->finish != FINISH_STOP && !(o->finish == FINISH_CANCEL && o->stopped_by_parser)))
        return false;
    m->begun = true;
    m->stopped = ++m->n_rounds > req->server->opt.mcp_rounds;
    snprintf(why, sizeof why, "not run: --mcp-max-rounds %d is reached",
             req->server->opt.mcp_rounds);
    bool any = run_round(req, m->stopped ? why : NULL, &m->is_last);
    m->stopped &= any;
    return any && !m->stopped;
}

static struct segment *segment_of(const struct api_choice *o, const struct mcp_call *call)
{
    for (int i = 0; i < o->n_segments; i++)
        if (o->segments[i].call == call)
            return &o->segments[i];
    CHECK(false, "the call of an MCP server's tool belongs to no segment");
}

void mcp_loop_called(struct api_request *req, struct mcp_call *call)
{
    struct api_choice *o = &req->choices[0];
    segment_of(o, call)->is_called = true;
    o->n_text_kept += call->text.len;
}

/* The tokens that are left of max_output_tokens, 0 = no limit. False: none is left. */
static bool tokens_left(const struct api_request *req, int *left)
{
    int most = mcp_of(req)->max_tokens;
    *left = most ? most - req->choices[0].before.n_generated : 0;
    return !most || *left > 0;
}

/* Frees what the last round was prepared from. */
static void forget_prompt(struct api_request *req)
{
    for (int i = 0; i < req->n_prompts; i++) {
        token_list_clear(&req->prompts[i]);
        if (req->parts)
            request_free(req->parts[i].request);
    }
    mem_free(req->prompts);
    mem_free(req->parts);
    req->prompts = NULL;
    req->parts = NULL;
    req->n_prompts = 0;
    chat_prompt_free(req->chat);
    grammar_free(req->grammar);
    token_rules_free(req->rules);
    req->chat = NULL;
    req->grammar = NULL;
    req->rules = NULL;
}

bool mcp_loop_is_due(struct api_request *req)
{
    struct responses_mcp *m = mcp_of(req);
    struct api_choice *o = &req->choices[0];
    if (req->n_open || o->done)
        return false;
    api_choice_end_round(o);
    if (m->is_last || !tokens_left(req, &req->p.max_tokens)) {
        o->done = true;
        o->finish = m->is_last ? FINISH_STOP : FINISH_LENGTH;
        return false;
    }
    buf_reset(&m->items);
    responses_add_items(req, &m->items);
    m->first = o->n_segments;
    m->is_again = true;
    forget_prompt(req);
    return true;
}

void mcp_loop_cancel(struct api_request *req)
{
    for (int i = 0; mcp_of(req) && req->choices && i < req->choices[0].n_segments; i++) {
        struct segment *g = &req->choices[0].segments[i];
        if (g->call && !g->is_called)
            mcp_call_cancel(req->server->mcp, g->call);
    }
}
