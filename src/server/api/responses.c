/*
 * Translates bodies of OpenAI's /v1/responses to those of chat completions: items to messages, flat
 * tools to nested ones, text.format to response_format. The items of earlier responses come first. JSON
 * to JSON; the only state is the store. Unsupported fields are refused by name.
 */
#include "server/api/responses.h"
#include "engine/images.h"
#include "base/json_guard.h"
#include "base/mem.h"
#include "server/api/mcp_loop.h"
#include "server/api/store.h"
#include "server/http/jsonout.h"
#include "server/http/log.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HISTORY_MAX = 32 << 20, MAX_REFERENCES = 1000 };

void responses_request_free(struct responses_request *r)
{
    if (!r)
        return;
    buf_clear(&r->echo);
    kept_items_clear(&r->input);
    json_decref(r->tool_names);
    json_decref(r->listed);
    json_decref(r->approved);
    responses_mcp_free(r->mcp);
    mem_free(r->previous);
    mem_free(r->conversation);
    mem_free(r);
}

/* State of a translation. */
struct responses_reader {
    json_t *messages;
    json_t *last; /* assistant message that tool calls and thinking are added to; NULL = none */
    struct buf thinking; /* not yet part of a message */
    struct store *store;
    const char *owner;
    struct prompt_images *images;
    int n_references;
    size_t n_read;             /* bytes of kept items parsed so far */
    size_t n_items;            /* of the history */
    struct json_counts counts; /* values in them */
    json_t *beside;            /* items of the response `beside_id`; owned */
    char beside_id[64];
    json_t *tools;      /* of items of type additional_tools; owned; NULL = none */
    int n_client_calls; /* see add_client_call */
    json_t *results;    /* messages of tools that follow the last message; owned */
    char round[64];     /* of the calls that these are of */
    json_t *requests;   /* id -> item of type mcp_approval_request; owned */
    json_t *approved;   /* those of them that are approved and have not run; borrowed */
    json_t *listed;     /* of responses_request; borrowed */
    struct api_error *err;
};

static json_t *string_of(const struct buf *b)
{
    return json_stringn(b->p ? b->p : "", b->len);
}

static void add_string(struct buf *out, const json_t *v)
{
    buf_add(out, json_string_value(v), json_string_length(v));
}

/* Returns the text of content: a string, or text parts. images: takes images; NULL = the model reads text. `shown`: the
 * text that then replaces an image. It is NULL if the model cannot do without what a part holds: images, audio and
 * encrypted parts are refused then. */
static bool content_text(const json_t *v, const char *where, struct prompt_images *images,
                         const char *shown, struct buf *out, struct api_error *err)
{
    size_t i;
    const json_t *part;
    if (json_is_string(v)) {
        add_string(out, v);
        return true;
    }
    if (!json_is_array(v))
        return api_invalid(err, where, "%s must be a string or an array of parts", where);
    json_array_foreach((json_t *)v, i, part)
    {
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *text = json_object_get(part, "text");
        if (images && image_is_part(part)) {
            struct error e = {0};
            char at[IMAGES_WHERE];
            snprintf(at, sizeof at, "%.40s[%zu]", where, i);
            if (!prompt_images_add_part(images, part, at, out, &e))
                return api_invalid(err, at, "%s", e.msg);
            continue;
        }
        if (shown && type && !strcmp(type, "input_image")) {
            buf_adds(out, shown);
            continue;
        }
        if (shown && type && !strcmp(type, "input_audio")) {
            buf_adds(out, "[audio: this model cannot hear it]");
            continue;
        }
        if (shown && type && !strcmp(type, "encrypted_content")) {
            buf_adds(out, "[encrypted]");
            continue;
        }
        if (type && !strcmp(type, "refusal"))
            text = json_object_get(part, "refusal");
        else if (!type || (strcmp(type, "input_text") && strcmp(type, "output_text") &&
                           strcmp(type, "text") && strcmp(type, "summary_text") &&
                           strcmp(type, "reasoning_text")))
            return api_invalid(err, where,
                               "%s[%zu]: a part of type '%.40s' is not supported: this "
                               "model reads text",
                               where, i, type ? type : "?");
        if (!json_is_string(text))
            return api_invalid(err, where, "%s[%zu].text must be a string", where, i);
        add_string(out, text);
    }
    return true;
}

/* Returns the open assistant message, which collects text, thinking and tool calls. */
static json_t *assistant(struct responses_reader *r)
{
    if (!r->last) {
        r->last = json_pack("{s:s,s:s}", "role", "assistant", "content", "");
        json_array_append_new(r->messages, r->last);
    }
    if (r->thinking.len)
        json_object_set_new(r->last, "reasoning_content", string_of(&r->thinking));
    buf_reset(&r->thinking);
    return r->last;
}

static bool add_message(struct responses_reader *r, const json_t *item, const char *where)
{
    static const char *const roles[] = {"user", "assistant", "system", "developer"};
    const char *role = json_string_value(json_object_get(item, "role"));
    bool known = false;
    for (size_t i = 0; role && i < 4; i++)
        known |= !strcmp(role, roles[i]);
    if (!known)
        return api_invalid(r->err, where, "%s.role must be user, assistant, system or developer",
                           where);
    char at[80];
    snprintf(at, sizeof at, "%s.content", where);
    struct buf text = {0};
    bool ok = content_text(json_object_get(item, "content"), at, r->images, NULL, &text, r->err);
    if (ok && !strcmp(role, "assistant")) {
        const json_t *had = json_object_get(r->last, "content");
        /* Text after a tool call begins a new message. */
        if (r->last && (json_object_get(r->last, "tool_calls") || json_string_length(had)))
            r->last = NULL;
        json_object_set_new(assistant(r), "content", string_of(&text));
    } else if (ok) {
        r->last = NULL;
        json_array_append_new(r->messages,
                              json_pack("{s:s,s:o}", "role", role, "content", string_of(&text)));
    }
    buf_clear(&text);
    return ok;
}

/* Appends a call to the open assistant message. Takes name and args, strings. */
static void append_call(struct responses_reader *r, const json_t *id, json_t *name, json_t *args)
{
    json_t *msg = assistant(r), *calls = json_object_get(msg, "tool_calls");
    if (!calls) {
        calls = json_array();
        json_object_set_new(msg, "tool_calls", calls);
    }
    json_array_append_new(calls,
                          json_pack("{s:O,s:s,s:{s:o,s:o}}", "id", (json_t *)id, "type", "function",
                                    "function", "name", name, "arguments", args));
}

static bool add_call(struct responses_reader *r, const json_t *item, const char *where)
{
    const json_t *id = json_object_get(item, "call_id"), *name = json_object_get(item, "name");
    json_t *args = json_object_get(item, "arguments");
    if (!json_is_string(id) || !json_is_string(name) || !json_is_string(args))
        return api_invalid(r->err, where, "%s needs call_id, name and arguments (strings)", where);
    append_call(r, id, responses_flat_name(json_object_get(item, "namespace"), name),
                json_incref(args));
    return true;
}

/* The call of a custom tool, whose input is one string. */
static bool add_custom_call(struct responses_reader *r, const json_t *item, const char *where)
{
    const json_t *id = json_object_get(item, "call_id"), *name = json_object_get(item, "name");
    json_t *input = json_object_get(item, "input");
    if (!json_is_string(id) || !json_is_string(name) || !json_is_string(input))
        return api_invalid(r->err, where, "%s needs call_id, name and input (strings)", where);
    json_t *object = json_pack("{s:O}", "input", input);
    char *text = json_dumps(object, JSON_COMPACT);
    append_call(r, id, responses_flat_name(json_object_get(item, "namespace"), name),
                json_string(text ? text : "{}"));
    mem_free(text);
    json_decref(object);
    return true;
}

/* The call of OpenAI's own shell, in the history of a client that used it elsewhere. Old clients send `id` alone. */
static bool add_shell_call(struct responses_reader *r, const json_t *item, const char *where)
{
    const json_t *id = api_member(item, "call_id"), *action = json_object_get(item, "action");
    if (!id)
        id = json_object_get(item, "id");
    if (!json_is_string(id) || !json_is_object(action))
        return api_invalid(r->err, where, "%s needs call_id (a string) and action (an object)",
                           where);
    char *text = json_dumps(action, JSON_COMPACT);
    append_call(r, id, json_string("local_shell"), json_string(text ? text : "{}"));
    mem_free(text);
    return true;
}

/* A result that names its tool and answers no call: the client ran the tool by itself (Codex sends the objective of a
 * goal like this). Templates print results only after calls, so the model is shown a call without arguments. Returns
 * the call's id, a new reference. */
static json_t *add_client_call(struct responses_reader *r, const json_t *item, const json_t *name)
{
    json_t *id = json_sprintf("client_%d", r->n_client_calls++);
    append_call(r, id, responses_flat_name(json_object_get(item, "namespace"), name),
                json_string("{}"));
    return id;
}

static bool add_result(struct responses_reader *r, const json_t *item, const char *where)
{
    json_t *id = json_object_get(item, "call_id");
    const json_t *name = json_object_get(item, "name"), *space = api_member(item, "namespace");
    bool unasked = !api_member(item, "call_id") && json_string_length(name);
    char at[80];
    struct buf text = {0};
    snprintf(at, sizeof at, "%s.output", where);
    if (!json_is_string(id) && !unasked)
        return api_invalid(r->err, where, "%s.call_id must be a string", where);
    if (unasked && space && !json_is_string(space))
        return api_invalid(r->err, where, "%s.namespace must be a string", where);
    bool ok =
        content_text(json_object_get(item, "output"), at, r->images, API_NO_IMAGE, &text, r->err);
    if (ok) {
        id = unasked ? add_client_call(r, item, name) : json_incref(id);
        json_array_append_new(r->messages,
                              json_pack("{s:s,s:o,s:o}", "role", "tool", "tool_call_id", id,
                                        "content", string_of(&text)));
    }
    r->last = NULL;
    buf_clear(&text);
    return ok;
}

/* A message of another agent of the client: a task, or the answer to one. */
static bool add_agent_message(struct responses_reader *r, const json_t *item, const char *where)
{
    const json_t *author = json_object_get(item, "author");
    char at[80];
    struct buf text = {0};
    snprintf(at, sizeof at, "%s.content", where);
    if (!json_is_string(author))
        return api_invalid(r->err, where, "%s.author must be a string", where);
    buf_adds(&text, "Message from the agent ");
    add_string(&text, author);
    buf_adds(&text, ":\n");
    bool ok = content_text(json_object_get(item, "content"), at, NULL, API_NO_IMAGE, &text, r->err);
    if (ok)
        json_array_append_new(r->messages,
                              json_pack("{s:s,s:o}", "role", "user", "content", string_of(&text)));
    r->last = NULL;
    buf_clear(&text);
    return ok;
}

/* Tools of MCP servers */

/* Adds the results of the calls before, which together are one round of the model. */
static void end_calls(struct responses_reader *r)
{
    if (!json_array_size(r->results))
        return;
    json_array_extend(r->messages, r->results);
    json_array_clear(r->results);
    r->last = NULL;
}

/* A call of the model with its result, which takes `text`. */
static void append_result(struct responses_reader *r, const json_t *item, const json_t *id,
                          json_t *text)
{
    json_t *name = mcp_flat_name(json_string_value(json_object_get(item, "server_label")),
                                 json_string_value(json_object_get(item, "name")));
    append_call(r, id, name, json_incref(json_object_get(item, "arguments")));
    json_array_append_new(r->results, json_pack("{s:s,s:O,s:o}", "role", "tool", "tool_call_id",
                                                (json_t *)id, "content", text));
}

static bool check_mcp_item(struct responses_reader *r, const json_t *item, const char *where)
{
    static const char *const names[] = {"id", "server_label", "name", "arguments"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const json_t *v = json_object_get(item, names[i]);
        if (!json_is_string(v) || strlen(json_string_value(v)) != json_string_length(v))
            return api_invalid(r->err, where, "%s.%s must be a string", where, names[i]);
    }
    return true;
}

/* Calls of one round have ids that differ only between the last '_' and the 'r' before the round's number. */
static bool add_mcp_call(struct responses_reader *r, const json_t *item, const char *where)
{
    const json_t *output = api_member(item, "output"), *error = api_member(item, "error");
    const json_t *approval = api_member(item, "approval_request_id"), *text;
    char round[sizeof r->round] = "";
    if (!check_mcp_item(r, item, where))
        return false;
    if ((output && !json_is_string(output)) || (error && !json_is_string(error)))
        return api_invalid(r->err, where, "%s.output and %s.error must be strings", where, where);
    const char *id = json_string_value(json_object_get(item, "id"));
    const char *end = strrchr(id, '_'), *number = end ? strchr(end, 'r') : NULL;
    if (number)
        snprintf(round, sizeof round, "%.*s%s", (int)(end - id), id, number);
    if (!round[0] || strcmp(round, r->round) != 0)
        end_calls(r);
    snprintf(r->round, sizeof r->round, "%s", round);
    text = error ? error : output;
    append_result(r, item, json_object_get(item, "id"),
                  text ? json_incref((json_t *)text) : json_string(""));
    if (json_is_string(approval))
        json_object_del(r->approved, json_string_value(approval));
    return true;
}

/* The model is shown its own request for approval only when that is answered. */
static bool add_approval(struct responses_reader *r, const json_t *item, const char *where)
{
    const json_t *id = json_object_get(item, "approval_request_id"), *reason;
    const json_t *yes = json_object_get(item, "approve");
    json_t *asked = json_object_get(r->requests, json_is_string(id) ? json_string_value(id) : "");
    char at[100];
    if (!r->requests)
        return true; /* an item alone: its request may be elsewhere */
    snprintf(at, sizeof at, "%s.approval_request_id", where);
    if (!asked)
        return api_invalid(r->err, at, "%s names no mcp_approval_request before it", at);
    if (!json_is_boolean(yes))
        return api_invalid(r->err, where, "%s.approve must be a boolean", where);
    if (json_is_true(yes)) {
        json_object_set(r->approved, json_string_value(id), asked);
        return true;
    }
    reason = api_member(item, "reason");
    end_calls(r);
    append_result(r, asked, id,
                  json_is_string(reason)
                      ? json_sprintf("The user refused this call: %s", json_string_value(reason))
                      : json_string("The user refused this call."));
    return true;
}

/* *handled: it is an item of an MCP server's tool. */
static bool add_mcp_item(struct responses_reader *r, const char *type, const json_t *item,
                         const char *where, bool *handled)
{
    *handled = true;
    if (!strcmp(type, "mcp_call"))
        return add_mcp_call(r, item, where);
    if (!strcmp(type, "mcp_approval_response"))
        return add_approval(r, item, where);
    if (!strcmp(type, "mcp_approval_request")) {
        if (!check_mcp_item(r, item, where))
            return false;
        json_object_set(r->requests, json_string_value(json_object_get(item, "id")),
                        (json_t *)item);
        return true;
    }
    *handled = !strcmp(type, "mcp_list_tools");
    const char *label = json_string_value(json_object_get(item, "server_label"));
    if (*handled && label && json_array_size(json_object_get(item, "tools")))
        json_object_set_new(r->listed, label, json_true());
    return true;
}

/* Thinking precedes its message. Encrypted thinking comes from another server and is left out. */
static bool add_reasoning(struct responses_reader *r, const json_t *item, const char *where)
{
    const json_t *content = api_member(item, "content"), *summary = api_member(item, "summary");
    r->last = NULL;
    buf_reset(&r->thinking);
    if (json_array_size(content))
        return content_text(content, where, NULL, NULL, &r->thinking, r->err);
    return !json_array_size(summary) ||
           content_text(summary, where, NULL, NULL, &r->thinking, r->err);
}

/* Parses kept items. All kept items of a request together stay within the limits of a body. NULL with an
 * error. */
static json_t *parse_kept(struct responses_reader *r, const struct buf *items, const char *where)
{
    struct buf list = {0};
    struct error why = {0};
    json_t *v = NULL;
    r->n_read += items->len;
    buf_addf(&list, "[%s]", items->p ? items->p : "");
    if (r->n_read > HISTORY_MAX)
        api_invalid(r->err, where, "%s: over %d MB of earlier items", where, HISTORY_MAX >> 20);
    else if (!json_guard(list.p, list.len, &json_limits_request, &r->counts, &why))
        api_fail(r->err, 413, "invalid_request_error", "%s: the earlier items have %s", where,
                 why.msg);
    else if (!(v = json_loadb(list.p, list.len, JSON_ALLOW_NUL, NULL)))
        api_fail(r->err, 500, "server_error", "%s: the kept items cannot be read", where);
    if (!v)
        snprintf(r->err->param, sizeof r->err->param, "%s", where);
    buf_clear(&list);
    return v;
}

/* Returns the item with this id, a new reference. Items of the same response are parsed once. */
static bool find_item(struct responses_reader *r, const char *id, const char *where, json_t **out)
{
    struct buf text = {0};
    size_t i;
    json_t *v;
    *out = NULL;
    bool found = store_items_beside(r->store, id, r->owner, HISTORY_MAX, &text, r->beside_id);
    if (!found || text.len) {
        json_decref(r->beside);
        r->beside = found ? parse_kept(r, &text, where) : NULL;
    }
    bool ok = !found || r->beside;
    if (!r->beside)
        r->beside_id[0] = 0;
    buf_clear(&text);
    json_array_foreach(r->beside, i, v)
    {
        const char *name = json_string_value(json_object_get(v, "id"));
        if (name && !strcmp(name, id) && !*out)
            *out = json_incref(v);
    }
    if (ok && !*out) {
        api_fail(r->err, 404, "invalid_request_error", "item '%.64s' was not found", id);
        snprintf(r->err->param, sizeof r->err->param, "%s", where);
    }
    return *out != NULL;
}

/* Tools that a client adds in the middle of a conversation, or that a search of its own has found. */
static bool add_item_tools(struct responses_reader *r, const json_t *item, const char *where)
{
    json_t *tools = json_object_get(item, "tools");
    if (!json_is_array(tools))
        return api_invalid(r->err, where, "%s.tools must be an array", where);
    if (!r->tools)
        r->tools = json_array();
    json_array_extend(r->tools, tools);
    return true;
}

/* Items that another server made with its own tools, or encrypted: nothing of them can be shown to the model. Each
 * type is logged once. */
static bool is_left_out(const char *type)
{
    static const char *const types[] = {
        "web_search_call",       "file_search_call", "code_interpreter_call",
        "image_generation_call", "compaction",       "compaction_summary",
        "context_compaction",    "ghost_snapshot",   "tool_search_call"};
    static _Atomic(bool) told[sizeof types / sizeof *types];
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (!strcmp(types[i], type)) {
            if (!told[i])
                log_line(LOG_WARN, "an input item of another server is left out",
                         LOG_TEXT("type", type));
            told[i] = true;
            return true;
        }
    return false;
}

static bool add_item(struct responses_reader *r, const json_t *item, const char *where,
                     bool referred)
{
    const char *type = json_string_value(json_object_get(item, "type"));
    if (!json_is_object(item))
        return api_invalid(r->err, where, "%s must be an object", where);
    bool handled = false, ok = !type || add_mcp_item(r, type, item, where, &handled);
    if (!ok || handled)
        return ok;
    end_calls(r);
    if (!type || !strcmp(type, "message"))
        return add_message(r, item, where);
    if (!strcmp(type, "function_call"))
        return add_call(r, item, where);
    if (!strcmp(type, "custom_tool_call"))
        return add_custom_call(r, item, where);
    if (!strcmp(type, "function_call_output") || !strcmp(type, "custom_tool_call_output"))
        return add_result(r, item, where);
    if (!strcmp(type, "local_shell_call"))
        return add_shell_call(r, item, where);
    if (!strcmp(type, "agent_message"))
        return add_agent_message(r, item, where);
    if (!strcmp(type, "additional_tools") || !strcmp(type, "tool_search_output"))
        return add_item_tools(r, item, where);
    if (!strcmp(type, "reasoning"))
        return add_reasoning(r, item, where);
    if (!strcmp(type, "item_reference") && !referred) {
        const char *id = json_string_value(json_object_get(item, "id"));
        if (++r->n_references > MAX_REFERENCES)
            return api_invalid(r->err, where, "more than %d item references", MAX_REFERENCES);
        json_t *v = NULL;
        if (!find_item(r, id ? id : "", where, &v))
            return false;
        ok = add_item(r, v, where, true);
        json_decref(v);
        return ok;
    }
    return is_left_out(type) ||
           api_invalid(r->err, where, "%s: an item of type '%.40s' is not supported", where, type);
}

static bool add_items(struct responses_reader *r, const json_t *items, const char *name)
{
    size_t i;
    const json_t *item;
    json_array_foreach((json_t *)items, i, item)
    {
        char where[64];
        snprintf(where, sizeof where, "%s[%zu]", name, i);
        if (!add_item(r, item, where, false))
            return false;
    }
    end_calls(r);
    return true;
}

/* Adds the items of the previous responses, or of a conversation. */
static bool add_history(struct responses_reader *r, const char *id, bool conversation,
                        size_t *bytes)
{
    struct buf text = {0};
    char missing[64];
    const char *name = conversation ? "conversation" : "previous_response_id";
    bool ok = !strncmp(id, conversation ? "conv_" : "resp_", 5);
    if (ok)
        ok = store_history(r->store, id, r->owner, HISTORY_MAX, &text, missing);
    else
        snprintf(missing, sizeof missing, "%s", id);
    if (!ok && missing[0] && conversation) {
        api_fail(r->err, 404, "invalid_request_error", "Conversation with id '%s' not found.",
                 missing);
        snprintf(r->err->param, sizeof r->err->param, "%s", name);
    } else if (!ok && missing[0]) {
        api_fail(r->err, 404, "invalid_request_error", "Previous response with id '%s' not found.",
                 missing);
        r->err->code = "previous_response_not_found";
        snprintf(r->err->param, sizeof r->err->param, "%s", name);
    } else if (!ok) {
        api_invalid(r->err, name, "the conversation before this response is over %d MB",
                    HISTORY_MAX >> 20);
    } else {
        *bytes = text.len;
        json_t *items = parse_kept(r, &text, name);
        ok = items && add_items(r, items, name);
        r->n_items = json_array_size(items);
        json_decref(items);
    }
    buf_clear(&text);
    return ok;
}

/* The prefix of an item's id. */
static const char *id_prefix(const char *type)
{
    return !strcmp(type, "message")            ? "msg"
           : !strcmp(type, "function_call")    ? "fc"
           : !strcmp(type, "custom_tool_call") ? "ctc"
           : !strcmp(type, "reasoning")        ? "rs"
           : !strncmp(type, "mcp_", 4)         ? "mcp"
                                               : "fco";
}

/* A message's text as a list of one part, as it is listed. */
static json_t *part_of(const json_t *item, json_t *text)
{
    const char *role = json_string_value(json_object_get(item, "role"));
    return role && !strcmp(role, "assistant")
               ? json_pack("[{s:s,s:O,s:[],s:[]}]", "type", "output_text", "text", text,
                           "annotations", "logprobs")
               : json_pack("[{s:s,s:O}]", "type", "input_text", "text", text);
}

void responses_keep_items(struct kept_items *l, const json_t *input, const char *hex)
{
    size_t i;
    const json_t *item;
    json_t *list = json_is_array(input)
                       ? json_incref((json_t *)input)
                       : json_pack("[{s:s,s:O}]", "role", "user", "content", input);
    json_array_foreach(list, i, item)
    {
        enum { ID_MOST = 64 };
        json_t *copy = json_copy((json_t *)item), *text = json_object_get(copy, "content");
        const char *type = json_string_value(json_object_get(item, "type"));
        const char *id = json_string_value(json_object_get(copy, "id"));
        char made[64 + 32];
        struct buf b = {0};
        if (!type)
            json_object_set_new(copy, "type", json_string(type = "message"));
        if (!id || !*id || strlen(id) > ID_MOST) {
            snprintf(made, sizeof made, "%s_%s_i%zu", id_prefix(type), hex, i);
            json_object_set_new(copy, "id", json_string(id = made));
        }
        if (!strcmp(type, "message")) {
            if (json_is_string(text))
                json_object_set_new(copy, "content", part_of(copy, text));
            if (!api_member(copy, "status"))
                json_object_set_new(copy, "status", json_string("completed"));
        }
        jsonout_value(&b, copy);
        kept_items_add(l, id, b.p, b.len);
        buf_clear(&b);
        json_decref(copy);
    }
    json_decref(list);
}

/* text.format is response_format with one level less. */
static bool add_format(json_t *out, const json_t *text, struct api_error *err)
{
    const json_t *f = api_member(text, "format");
    if (!json_is_object(text))
        return api_invalid(err, "text", "text must be an object");
    if (!f)
        return true;
    const char *type = json_string_value(json_object_get(f, "type"));
    if (!type)
        return api_invalid(err, "text.format", "text.format must be an object with a type");
    if (!strcmp(type, "json_schema")) {
        json_t *inner = json_copy((json_t *)f);
        json_object_del(inner, "type");
        json_object_set_new(out, "response_format",
                            json_pack("{s:s,s:o}", "type", type, "json_schema", inner));
    } else {
        json_object_set(out, "response_format", (json_t *)f);
    }
    return true;
}

static bool add_reasoning_wish(json_t *out, const json_t *v, struct responses_request *r,
                               struct api_error *err)
{
    const char *effort = NULL, *summary = NULL;
    if (!json_is_object(v))
        return api_invalid(err, "reasoning", "reasoning must be an object");
    if (!api_effort(v, "effort", "reasoning.effort", &effort, err) ||
        !api_string(v, "summary", &summary, err))
        return false;
    json_object_set(out, "reasoning", (json_t *)v);
    r->summary = summary != NULL;
    return true;
}

/* Writes the request fields that the reply repeats, with their defaults. */
static void make_echo(const json_t *body, struct buf *b)
{
    static const struct {
        const char *name, *absent;
    } fields[] = {
        {"background", "false"},
        {"instructions", "null"},
        {"max_output_tokens", "null"},
        {"max_tool_calls", "null"},
        {"metadata", "{}"},
        {"parallel_tool_calls", "true"},
        {"previous_response_id", "null"},
        {"prompt_cache_key", "null"},
        {"reasoning", "{\"effort\":null,\"summary\":null}"},
        {"safety_identifier", "null"},
        {"service_tier", "\"default\""},
        {"store", "true"},
        {"text", "{\"format\":{\"type\":\"text\"},\"verbosity\":\"medium\"}"},
        {"tool_choice", "\"auto\""},
        {"tools", "[]"},
        {"top_logprobs", "0"},
        {"truncation", "\"disabled\""},
        {"user", "null"},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        const json_t *v = api_member(body, fields[i].name);
        buf_addf(b, ",\"%s\":", fields[i].name);
        if (v)
            jsonout_value(b, v);
        else
            buf_adds(b, fields[i].absent);
    }
}

static void add_conversation(const struct responses_request *r, struct buf *b)
{
    buf_adds(b, r->conversation ? ",\"conversation\":{\"id\":" : ",\"conversation\":");
    jsonout_text(b, r->conversation);
    if (r->conversation)
        buf_addc(b, '}');
}

static bool refuse_unsupported(const json_t *body, struct api_error *err)
{
    return !api_member(body, "prompt") || api_invalid(err, "prompt", "prompt is not supported");
}

/* The id of `conversation`: a string, or an object with one. */
static bool read_conversation(const json_t *body, struct responses_request *r,
                              struct api_error *err)
{
    static const char name[] = "conversation";
    const json_t *v = api_member(body, name), *id = json_is_object(v) ? api_member(v, "id") : v;
    if (!v)
        return true;
    if (!json_is_string(id))
        return api_invalid(err, name, "conversation must be an id, or an object with one");
    if (api_member(body, "previous_response_id"))
        return api_invalid(err, name, "conversation and previous_response_id exclude each other");
    r->conversation = mem_strdup(json_string_value(id));
    return true;
}

bool responses_truncation(const json_t *body, bool *on, struct api_error *err)
{
    const char *word = "disabled";
    if (!api_string(body, "truncation", &word, err))
        return false;
    *on = !strcmp(word, "auto");
    return *on || !strcmp(word, "disabled") ||
           api_invalid(err, "truncation", "truncation must be auto or disabled");
}

/* Reads "include", where log-probabilities are requested. */
static bool read_include(const json_t *body, json_t *out, struct api_error *err)
{
    size_t i;
    const json_t *list = api_member(body, "include"), *v;
    if (list && !json_is_array(list))
        return api_invalid(err, "include", "include must be an array of strings");
    json_array_foreach((json_t *)list, i, v)
    {
        const char *name = json_string_value(v);
        if (name && !strcmp(name, "message.output_text.logprobs"))
            json_object_set_new(out, "logprobs", json_true());
    }
    if (!json_object_get(out, "logprobs"))
        json_object_del(out, "top_logprobs");
    return true;
}

static bool translate(const json_t *body, json_t *out, struct responses_reader *rd, const char *hex,
                      struct responses_request *r)
{
    struct api_error *err = rd->err;
    const json_t *input = api_member(body, "input"),
                 *instructions = api_member(body, "instructions");
    const json_t *tools = api_member(body, "tools"), *choice = api_member(body, "tool_choice");
    const json_t *text = api_member(body, "text"), *thinking = api_member(body, "reasoning");
    const json_t *allowed = NULL;
    const char *previous = NULL;
    r->keep = true;
    if (!refuse_unsupported(body, err) ||
        !api_string(body, "previous_response_id", &previous, err) ||
        !api_bool(body, "store", &r->keep, err) ||
        !api_bool(body, "background", &r->background, err) || !read_conversation(body, r, err) ||
        !responses_truncation(body, &r->truncate, err) || !read_include(body, out, err))
        return false;
    if (r->background && (!r->keep || !store_max_bytes(rd->store)))
        return api_invalid(err, "background", "background needs %s",
                           r->keep ? "a server that keeps responses (--store-mb)" : "store");
    if (instructions && !json_is_string(instructions))
        return api_invalid(err, "instructions", "instructions must be a string");
    if (instructions)
        json_array_append_new(rd->messages, json_pack("{s:s,s:O}", "role", "system", "content",
                                                      (json_t *)instructions));
    const char *history = previous ? previous : r->conversation;
    if (history && !add_history(rd, history, !previous, &r->n_history))
        return false;
    r->previous = previous ? mem_strdup(previous) : NULL;
    if (r->keep && json_array_size(input) > STORE_ITEMS_MOST)
        return api_invalid(err, "input", "an input that is kept (store) has at most %d items",
                           STORE_ITEMS_MOST);
    if (r->conversation && rd->n_items + json_array_size(input) >= STORE_ITEMS_MOST)
        return api_invalid(err, "conversation", "a conversation has at most %d items",
                           STORE_ITEMS_MOST);
    if (json_is_string(input)) {
        rd->last = NULL;
        json_array_append_new(rd->messages,
                              json_pack("{s:s,s:O}", "role", "user", "content", (json_t *)input));
    } else if (!json_is_array(input)) {
        return api_invalid(err, "input", "input must be a string or an array of items");
    } else if (!add_items(rd, input, "input")) {
        return false;
    }
    if (!json_array_size(rd->messages))
        return api_invalid(err, "input", "input is empty");
    responses_keep_items(&r->input, input, hex);
    int most = 0;
    if (!api_int(body, "max_output_tokens", -1, INT_MAX, &most, err))
        return false;
    if (most || api_member(body, "max_output_tokens")) {
        if (!most)
            return api_invalid(err, "max_output_tokens", "max_output_tokens must be at least 1");
        json_object_set_new(out, "max_completion_tokens", json_integer(most));
    }
    if (choice && !responses_tool_choice(out, choice, r->servers, &allowed, err))
        return false;
    r->tool_names = json_object();
    if ((tools || rd->tools) && !responses_add_tools(out, r, tools, rd->tools, allowed, err))
        return false;
    if (!mcp_tools_finish(r, body, err))
        return false;
    if (text && !add_format(out, text, err))
        return false;
    return !thinking || add_reasoning_wish(out, thinking, r, err);
}

json_t *responses_translate(const json_t *body, struct store *store, const char *owner,
                            const char *hex, struct responses_request *r, struct api_error *err)
{
    static const char *const taken[] = {"input",
                                        "instructions",
                                        "tools",
                                        "tool_choice",
                                        "text",
                                        "reasoning",
                                        "previous_response_id",
                                        "conversation",
                                        "store",
                                        "n",
                                        "max_output_tokens",
                                        "include",
                                        "truncation"};
    json_t *out = json_copy((json_t *)body);
    r->listed = json_object();
    r->approved = json_object();
    struct responses_reader rd = {.messages = json_array(),
                                  .store = store,
                                  .owner = owner,
                                  .images = r->images,
                                  .results = json_array(),
                                  .requests = json_object(),
                                  .approved = r->approved,
                                  .listed = r->listed,
                                  .err = err};
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        json_object_del(out, taken[i]);
    json_object_set_new(out, "messages", rd.messages);
    bool ok = translate(body, out, &rd, hex, r);
    buf_clear(&rd.thinking);
    json_decref(rd.beside);
    json_decref(rd.tools);
    json_decref(rd.results);
    json_decref(rd.requests);
    if (ok) {
        make_echo(body, &r->echo);
        add_conversation(r, &r->echo);
        return out;
    }
    json_decref(out);
    return NULL;
}

bool responses_check_items(const json_t *items, const char *name, struct api_error *err)
{
    struct responses_reader rd = {.messages = json_array(), .results = json_array(), .err = err};
    bool ok = true;
    for (size_t i = 0; ok && i < json_array_size(items); i++) {
        const char *type = json_string_value(json_object_get(json_array_get(items, i), "type"));
        if (type && !strcmp(type, "item_reference"))
            ok = api_invalid(err, name, "%s[%zu]: an item_reference cannot be kept", name, i);
    }
    ok = ok && add_items(&rd, items, name);
    buf_clear(&rd.thinking);
    json_decref(rd.tools);
    json_decref(rd.results);
    json_decref(rd.messages);
    return ok;
}

json_t *responses_continue(const struct buf *chat, const struct buf *items, struct api_error *err)
{
    json_t *out = json_loadb(chat->p, chat->len, JSON_ALLOW_NUL, NULL), *unused = json_object();
    struct responses_reader rd = {.messages = json_object_get(out, "messages"),
                                  .results = json_array(),
                                  .requests = unused,
                                  .approved = unused,
                                  .listed = unused,
                                  .err = err};
    json_t *list = parse_kept(&rd, items, "output");
    bool ok = list && add_items(&rd, list, "output");
    buf_clear(&rd.thinking);
    json_decref(list);
    json_decref(rd.results);
    json_decref(unused);
    if (ok)
        return out;
    json_decref(out);
    return NULL;
}

/* A turn begins with a user message after a message of another role. */

static bool begins_turn(const json_t *messages, size_t i)
{
    const char *role = json_string_value(json_object_get(json_array_get(messages, i), "role"));
    const char *before =
        i ? json_string_value(json_object_get(json_array_get(messages, i - 1), "role")) : "";
    return role && !strcmp(role, "user") && (!before || strcmp(before, "user"));
}

static bool is_system(const json_t *messages, size_t i)
{
    const char *role = json_string_value(json_object_get(json_array_get(messages, i), "role"));
    return role && (!strcmp(role, "system") || !strcmp(role, "developer"));
}

int responses_n_turns(const json_t *messages)
{
    int n = 0;
    for (size_t i = 0; i < json_array_size(messages); i++)
        n += begins_turn(messages, i);
    return n;
}

json_t *responses_drop_turns(const json_t *messages, int k)
{
    json_t *out = json_array();
    size_t n = json_array_size(messages), i = 0;
    int turns = 0;
    for (; i < n && is_system(messages, i); i++)
        json_array_append(out, json_array_get(messages, i));
    for (; i < n; i++) {
        turns += begins_turn(messages, i);
        if (turns > k || is_system(messages, i))
            json_array_append(out, json_array_get(messages, i));
    }
    return out;
}
