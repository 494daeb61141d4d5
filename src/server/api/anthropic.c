/*
 * Translates bodies of Anthropic's /v1/messages to OpenAI's format: content blocks to messages, tool_use to
 * tool_calls, tool_result to tool messages, input_schema to parameters. Pure JSON to JSON; fuzzed.
 */
#include "server/api/prepare_int.h"
#include "base/mem.h"

#include "server/http/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Returns the text of a string or of text blocks. */
static bool text_of(const json_t *v, const char *where, struct buf *out, struct api_error *err)
{
    size_t i;
    const json_t *b;
    if (json_is_string(v)) {
        buf_add(out, json_string_value(v), json_string_length(v));
        return true;
    }
    if (!json_is_array(v))
        return api_invalid(err, where, "%s must be a string or an array of blocks", where);
    json_array_foreach((json_t *)v, i, b)
    {
        const json_t *text = json_object_get(b, "text");
        const char *type = json_string_value(json_object_get(b, "type"));
        if (!type || strcmp(type, "text") || !json_is_string(text))
            return api_invalid(err, where, "%s[%zu]: only text blocks are supported here", where,
                               i);
        if (out->len)
            buf_addc(out, '\n');
        buf_add(out, json_string_value(text), json_string_length(text));
    }
    return true;
}

/* Claude Code writes this line at the head of its system prompt. It differs in every request, so that with it no two
 * requests would share a prefix. */
static bool is_billing_line(const json_t *v)
{
    static const char head[] = "x-anthropic-billing-header:";
    const char *text = json_string_value(v);
    return text && !strncmp(text, head, sizeof head - 1);
}

/* The text of a system prompt, without a billing line at its head. */
static bool system_text(const json_t *v, struct buf *out, struct api_error *err)
{
    if (is_billing_line(v)) {
        const char *text = json_string_value(v), *line = strchr(text, '\n');
        text = line ? line + strspn(line, "\n") : text + strlen(text);
        buf_add(out, text, json_string_length(v) - (size_t)(text - json_string_value(v)));
        return true;
    }
    json_t *rest = json_copy((json_t *)v);
    const json_t *first = json_object_get(json_array_get(v, 0), "text");
    if (is_billing_line(first) && !strchr(json_string_value(first), '\n'))
        json_array_remove(rest, 0);
    bool ok = text_of(rest, "system", out, err);
    json_decref(rest);
    return ok;
}

static json_t *string_of(const struct buf *b)
{
    return json_stringn(b->p ? b->p : "", b->len);
}

struct blocks {
    struct buf text, thinking;
    json_t *calls, *results; /* arrays */
};

static void add_text(struct buf *out, const char *before, const json_t *v, const char *after)
{
    buf_adds(out, before);
    buf_add(out, json_string_value(v), json_string_length(v));
    buf_adds(out, after);
}

/* A document: text, or blocks of text, under its title. Other documents are refused by the caller. */
static bool add_document(struct buf *out, const json_t *b, const char *where, struct api_error *err)
{
    const json_t *source = json_object_get(b, "source"), *data = json_object_get(source, "data");
    const json_t *title = json_object_get(b, "title"), *context = json_object_get(b, "context");
    const char *type = json_string_value(json_object_get(source, "type"));
    if (json_is_string(title))
        add_text(out, "", title, "\n");
    if (json_is_string(context))
        add_text(out, "", context, "\n");
    if (type && !strcmp(type, "text") && json_is_string(data)) {
        add_text(out, "", data, "");
        return true;
    }
    if (type && !strcmp(type, "content")) {
        struct buf text = {0};
        bool ok = text_of(json_object_get(source, "content"), where, &text, err);
        buf_add(out, text.p, text.len);
        buf_clear(&text);
        return ok;
    }
    return api_invalid(err, where,
                       "%s.document: the source '%.40s' is not supported: this model reads text "
                       "only",
                       where, type ? type : "?");
}

/* A result of a search: its source, its title and the text it found. */
static bool add_search_result(struct buf *out, const json_t *b, const char *where,
                              struct api_error *err)
{
    const json_t *source = json_object_get(b, "source"), *title = json_object_get(b, "title");
    struct buf text = {0};
    if (json_is_string(title))
        add_text(out, "", title, "\n");
    if (json_is_string(source))
        add_text(out, "", source, "\n");
    bool ok = text_of(json_object_get(b, "content"), where, &text, err);
    buf_add(out, text.p, text.len);
    buf_clear(&text);
    return ok;
}

static bool has_type(const json_t *b, const char *type)
{
    const char *t = json_string_value(json_object_get(b, "type"));
    return t && !strcmp(t, type);
}

/* A block with text in it: text, a document, or a search result. *known: it is one of them. */
static bool add_readable(struct buf *out, const json_t *b, const char *where, bool *known,
                         struct api_error *err)
{
    const json_t *text = json_object_get(b, "text");
    *known = true;
    if (out->len)
        buf_addc(out, '\n');
    if (has_type(b, "document"))
        return add_document(out, b, where, err);
    if (has_type(b, "search_result"))
        return add_search_result(out, b, where, err);
    *known = has_type(b, "text");
    if (*known && !json_is_string(text))
        return api_invalid(err, where, "%s.text must be a string", where);
    if (*known)
        buf_add(out, json_string_value(text), json_string_length(text));
    return true;
}

/* The content of a tool's result. What the model cannot read must not end the conversation: it becomes a text that
 * says so. */
static bool result_text(const json_t *v, const char *where, struct buf *out, struct api_error *err)
{
    size_t i;
    const json_t *b;
    if (!json_is_array(v))
        return text_of(v, where, out, err);
    json_array_foreach((json_t *)v, i, b)
    {
        char at[80];
        bool known;
        snprintf(at, sizeof at, "%.50s[%zu]", where, i);
        const json_t *source = json_object_get(b, "source");
        bool unread =
            has_type(b, "document") && !has_type(source, "text") && !has_type(source, "content");
        if (!has_type(b, "image") && !unread && !has_type(b, "tool_reference")) {
            if (!add_readable(out, b, at, &known, err))
                return false;
            if (!known)
                return api_invalid(err, at, "%s: only blocks of text are supported here", at);
            continue;
        }
        const json_t *name = json_object_get(b, "tool_name");
        if (out->len)
            buf_addc(out, '\n');
        if (has_type(b, "tool_reference"))
            add_text(out, "The tool ", name, " is loaded: call it like any other.");
        else
            buf_adds(out, unread ? "[document: this model reads text only]" : API_NO_IMAGE);
    }
    return true;
}

static bool add_tool_result(struct blocks *s, const json_t *b, const char *where,
                            struct api_error *err)
{
    json_t *id = json_object_get(b, "tool_use_id");
    const json_t *content = api_member(b, "content");
    struct buf out = {0};
    bool ok = json_is_string(id) || api_invalid(err, where, "%s: tool_use_id is missing", where);
    ok = ok && (!content || result_text(content, where, &out, err));
    if (ok)
        json_array_append_new(s->results, json_pack("{s:s,s:O,s:o}", "role", "tool", "tool_call_id",
                                                    id, "content", string_of(&out)));
    buf_clear(&out);
    return ok;
}

static bool add_tool_use(struct blocks *s, const json_t *b, const char *where,
                         struct api_error *err)
{
    json_t *id = json_object_get(b, "id"), *name = json_object_get(b, "name");
    json_t *input = json_object_get(b, "input");
    if (!json_is_string(id) || !json_is_string(name) || !json_is_object(input))
        return api_invalid(err, where, "%s: tool_use needs id, name and input", where);
    char *args = json_dumps(input, JSON_COMPACT);
    json_array_append_new(s->calls,
                          json_pack("{s:O,s:s,s:{s:O,s:s}}", "id", id, "type", "function",
                                    "function", "name", name, "arguments", args ? args : "{}"));
    mem_free(args);
    return true;
}

/* Calls that Anthropic's servers ran, and their results. The model reads both as text: it was never told of such
 * tools. */
static bool add_server_tool(struct blocks *s, const json_t *b, const char *type)
{
    const json_t *name = json_object_get(b, "name");
    const json_t *v = json_object_get(b, strcmp(type, "server_tool_use") ? "content" : "input");
    size_t n = strlen(type);
    bool result = n > 12 && !strcmp(type + n - 12, "_tool_result");
    if (strcmp(type, "server_tool_use") != 0 && !result)
        return false;
    if (s->text.len)
        buf_addc(&s->text, '\n');
    char *text = v ? json_dumps(v, JSON_COMPACT | JSON_ENCODE_ANY) : NULL;
    buf_addf(&s->text, "[%s%s%s: %s]", type, json_is_string(name) ? " " : "",
             json_is_string(name) ? json_string_value(name) : "", text ? text : "");
    mem_free(text);
    return true;
}

static bool add_block(struct blocks *s, const json_t *b, const char *where, struct api_error *err)
{
    const char *type = json_string_value(json_object_get(b, "type"));
    const json_t *thinking = json_object_get(b, "thinking");
    bool known;
    if (!type)
        return api_invalid(err, where, "%s must be an object with a type", where);
    if (!strcmp(type, "tool_use"))
        return add_tool_use(s, b, where, err);
    if (!strcmp(type, "tool_result"))
        return add_tool_result(s, b, where, err);
    if (!strcmp(type, "redacted_thinking"))
        return true;
    if (!strcmp(type, "thinking")) {
        if (!json_is_string(thinking))
            return api_invalid(err, where, "%s.thinking must be a string", where);
        buf_add(&s->thinking, json_string_value(thinking), json_string_length(thinking));
        return true;
    }
    if (add_server_tool(s, b, type))
        return true;
    if (strcmp(type, "text") && strcmp(type, "document") && strcmp(type, "search_result"))
        /* Claude Code finds a picture by this path, and leaves it out from then on. */
        return !strcmp(type, "image")
                   ? api_invalid(err, where, "%s.image: not supported: this model reads text only",
                                 where)
                   : api_invalid(err, where, "%s: a block of type '%.40s' is not supported", where,
                                 type);
    return add_readable(&s->text, b, where, &known, err);
}

/* Translates one message: its tool results first, then the message itself. */
static bool add_message(json_t *out, const json_t *m, size_t index, struct api_error *err)
{
    char where[64];
    const char *role = json_string_value(json_object_get(m, "role"));
    const json_t *content = json_object_get(m, "content"), *b;
    snprintf(where, sizeof where, "messages[%zu].role", index);
    if (!role || (strcmp(role, "user") && strcmp(role, "assistant") && strcmp(role, "system")))
        return api_invalid(err, where, "%s must be user or assistant", where);
    snprintf(where, sizeof where, "messages[%zu].content", index);
    struct blocks s = {.calls = json_array(), .results = json_array()};
    bool ok = true;
    if (json_is_array(content)) {
        size_t i;
        json_array_foreach((json_t *)content, i, b)
        {
            snprintf(where, sizeof where, "messages[%zu].content[%zu]", index, i);
            ok = ok && add_block(&s, b, where, err);
        }
    } else {
        ok = text_of(content, where, &s.text, err);
    }
    if (ok) {
        json_array_extend(out, s.results);
        json_t *msg = json_pack("{s:s,s:o}", "role", role, "content", string_of(&s.text));
        if (s.thinking.len)
            json_object_set_new(msg, "reasoning_content", string_of(&s.thinking));
        if (json_array_size(s.calls))
            json_object_set(msg, "tool_calls", s.calls);
        if (s.text.len || !json_array_size(s.results))
            json_array_append(out, msg);
        json_decref(msg);
    }
    json_decref(s.calls);
    json_decref(s.results);
    buf_clear(&s.text);
    buf_clear(&s.thinking);
    return ok;
}

/* Tools that Anthropic's servers run; their types end in a date. */
static bool is_server_tool(const char *type)
{
    static const char *const heads[] = {"web_search_",       "web_fetch_", "code_execution_",
                                        "tool_search_tool_", "advisor_",   "mcp_toolset"};
    for (size_t i = 0; type && i < sizeof heads / sizeof *heads; i++)
        if (!strncmp(type, heads[i], strlen(heads[i])))
            return true;
    return false;
}

/* Logged once. */
static void warn_left_out(const char *type)
{
    static _Atomic(bool) told;
    if (!told)
        log_line(LOG_WARN, "a tool that the server would have to run is left out",
                 LOG_TEXT("type", type));
    told = true;
}

static bool add_tools(json_t *out, const json_t *tools, struct api_error *err)
{
    size_t i;
    const json_t *t;
    if (!json_is_array(tools))
        return api_invalid(err, "tools", "tools must be an array");
    json_t *list = json_array();
    json_object_set_new(out, "tools", list);
    json_array_foreach((json_t *)tools, i, t)
    {
        char where[64];
        json_t *name = json_object_get(t, "name"), *schema = json_object_get(t, "input_schema");
        const char *type = json_string_value(json_object_get(t, "type"));
        snprintf(where, sizeof where, "tools[%zu]", i);
        if (!schema && is_server_tool(type)) {
            warn_left_out(type);
            continue;
        }
        if (!json_is_string(name) || !json_is_object(schema))
            return api_invalid(err, where, "%s needs a name and an input_schema", where);
        json_t *f = json_pack("{s:O,s:O}", "name", name, "parameters", schema);
        json_t *about = json_object_get(t, "description");
        if (json_is_string(about))
            json_object_set(f, "description", about);
        if (json_is_true(json_object_get(t, "strict")))
            json_object_set_new(f, "strict", json_true());
        json_array_append_new(list, json_pack("{s:s,s:o}", "type", "function", "function", f));
    }
    return true;
}

static bool add_tool_choice(json_t *out, const json_t *v, struct api_error *err)
{
    const char *type = json_string_value(json_object_get(v, "type"));
    json_t *name = json_object_get(v, "name");
    bool single = false;
    if (!type)
        return api_invalid(err, "tool_choice", "tool_choice must be an object with a type");
    if (!api_bool(v, "disable_parallel_tool_use", &single, err))
        return false;
    if (!strcmp(type, "auto") || !strcmp(type, "none"))
        json_object_set_new(out, "tool_choice", json_string(type));
    else if (!strcmp(type, "any"))
        json_object_set_new(out, "tool_choice", json_string("required"));
    else if (!strcmp(type, "tool") && json_is_string(name))
        json_object_set_new(
            out, "tool_choice",
            json_pack("{s:s,s:{s:O}}", "type", "function", "function", "name", name));
    else
        return api_invalid(err, "tool_choice", "tool_choice must be auto, any, none or a tool");
    json_object_set_new(out, "parallel_tool_calls", json_boolean(!single));
    return true;
}

static bool translate(const json_t *body, json_t *out, struct api_error *err)
{
    const json_t *list = api_member(body, "messages"), *system = api_member(body, "system");
    const json_t *tools = api_member(body, "tools"), *choice = api_member(body, "tool_choice");
    const json_t *m;
    json_t *messages = json_array();
    size_t i;
    json_object_set_new(out, "messages", messages);
    if (system) {
        struct buf text = {0};
        bool ok = system_text(system, &text, err);
        if (ok && text.len)
            json_array_append_new(
                messages, json_pack("{s:s,s:o}", "role", "system", "content", string_of(&text)));
        buf_clear(&text);
        if (!ok)
            return false;
    }
    if (!json_is_array(list) || !json_array_size(list))
        return api_invalid(err, "messages", "messages must be an array with at least one message");
    json_array_foreach((json_t *)list, i, m)
    {
        if (!add_message(messages, m, i, err))
            return false;
    }
    /* The output continues a last message of the assistant. */
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const char *role = json_string_value(json_object_get(last, "role"));
    if (role && !strcmp(role, "assistant") && !json_object_get(last, "tool_calls") &&
        json_array_size(messages) > 1)
        json_object_set_new(out, "continue_final_message", json_true());
    thinking_copy(body, out);
    const json_t *config = api_member(body, "output_config");
    const char *effort = NULL;
    if (config && !json_is_object(config))
        return api_invalid(err, "output_config", "output_config must be an object");
    if (!api_effort(config, "effort", "output_config.effort", &effort, err))
        return false;
    if (effort)
        json_object_set_new(out, "reasoning_effort", json_string(effort));
    const json_t *format = api_member(config, "format");
    format = format ? format : api_member(body, "output_format");
    if (format) {
        const char *type = json_string_value(json_object_get(format, "type"));
        json_t *schema = json_object_get(format, "schema");
        if (!type || strcmp(type, "json_schema") || !schema)
            return api_invalid(
                err, "output_config.format",
                "output_config.format must be {\"type\": \"json_schema\", \"schema\": ...}");
        json_object_set_new(
            out, "response_format",
            json_pack("{s:s,s:{s:O}}", "type", type, "json_schema", "schema", schema));
    }
    if (tools && !add_tools(out, tools, err))
        return false;
    return !choice || add_tool_choice(out, choice, err);
}

json_t *anthropic_translate(const json_t *body, bool answer, struct api_error *err)
{
    if (answer && !api_member(body, "max_tokens")) {
        api_invalid(err, "max_tokens", "max_tokens is missing");
        return NULL;
    }
    json_t *out = json_object();
    if (translate(body, out, err))
        return out;
    json_decref(out);
    return NULL;
}
