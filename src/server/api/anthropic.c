/*
 * Translates bodies of Anthropic's /v1/messages to OpenAI's format: content blocks to messages, tool_use to
 * tool_calls, tool_result to tool messages, input_schema to parameters. Pure JSON to JSON; fuzzed.
 */
#include "server/api/prepare_int.h"

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

static json_t *string_of(const struct buf *b)
{
    return json_stringn(b->p ? b->p : "", b->len);
}

struct blocks {
    struct buf text, thinking;
    json_t *calls, *results; /* arrays */
};

static bool add_block(struct blocks *s, const json_t *b, const char *where, struct api_error *err)
{
    const char *type = json_string_value(json_object_get(b, "type"));
    const json_t *text = json_object_get(b, "text"), *thinking = json_object_get(b, "thinking");
    if (type && !strcmp(type, "text") && json_is_string(text)) {
        if (s->text.len)
            buf_addc(&s->text, '\n');
        buf_add(&s->text, json_string_value(text), json_string_length(text));
    } else if (type && !strcmp(type, "thinking") && json_is_string(thinking)) {
        buf_add(&s->thinking, json_string_value(thinking), json_string_length(thinking));
    } else if (type && !strcmp(type, "redacted_thinking")) {
        return true;
    } else if (type && !strcmp(type, "tool_use")) {
        json_t *id = json_object_get(b, "id"), *name = json_object_get(b, "name");
        json_t *input = json_object_get(b, "input");
        if (!json_is_string(id) || !json_is_string(name) || !json_is_object(input))
            return api_invalid(err, where, "%s: tool_use needs id, name and input", where);
        char *args = json_dumps(input, JSON_COMPACT);
        json_array_append_new(s->calls,
                              json_pack("{s:O,s:s,s:{s:O,s:s}}", "id", id, "type", "function",
                                        "function", "name", name, "arguments", args ? args : "{}"));
        free(args);
    } else if (type && !strcmp(type, "tool_result")) {
        json_t *id = json_object_get(b, "tool_use_id");
        const json_t *content = api_member(b, "content");
        struct buf out = {0};
        bool ok =
            json_is_string(id) || api_invalid(err, where, "%s: tool_use_id is missing", where);
        ok = ok && (!content || text_of(content, where, &out, err));
        if (ok)
            json_array_append_new(s->results,
                                  json_pack("{s:s,s:O,s:o}", "role", "tool", "tool_call_id", id,
                                            "content", string_of(&out)));
        buf_clear(&out);
        return ok;
    } else if (type && (!strcmp(type, "text") || !strcmp(type, "thinking"))) {
        return api_invalid(err, where, "%s.%s must be a string", where, type);
    } else if (!type) {
        return api_invalid(err, where, "%s must be an object with a type", where);
    } else {
        return api_invalid(err, where, "%s: a block of type '%.40s' is not supported", where, type);
    }
    return true;
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
        snprintf(where, sizeof where, "tools[%zu]", i);
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
    const json_t *thinking = api_member(body, "thinking"), *m;
    json_t *messages = json_array();
    size_t i;
    json_object_set_new(out, "messages", messages);
    if (system) {
        struct buf text = {0};
        bool ok = text_of(system, "system", &text, err);
        if (ok)
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
    if (thinking) {
        const char *type = json_string_value(json_object_get(thinking, "type"));
        if (!type)
            return api_invalid(err, "thinking", "thinking must be an object with a type");
        if (!strcmp(type, "enabled") || !strcmp(type, "disabled"))
            json_object_set_new(out, "enable_thinking", json_boolean(!strcmp(type, "enabled")));
    }
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
