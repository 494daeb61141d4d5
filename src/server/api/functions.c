/*
 * Translates other forms of tools in a chat body to tools and tool_choice: the older `functions` and
 * `function_call`, and a tool_choice of allowed_tools. JSON to JSON. reply_openai.c writes replies in the
 * older form.
 */
#include "server/api/prepare_int.h"

#include <stdio.h>
#include <string.h>

static bool add_functions(json_t *out, const json_t *list, struct api_error *err)
{
    size_t i;
    json_t *f, *tools = json_array();
    json_object_set_new(out, "tools", tools);
    if (!json_is_array(list))
        return api_invalid(err, "functions", "functions must be an array");
    json_array_foreach((json_t *)list, i, f)
    {
        char where[64];
        snprintf(where, sizeof where, "functions[%zu].name", i);
        if (!json_is_string(json_object_get(f, "name")))
            return api_invalid(err, where, "%s must be a string", where);
        json_array_append_new(tools, json_pack("{s:s,s:O}", "type", "function", "function", f));
    }
    return true;
}

/* "none", "auto" or {"name": ...}. */
static bool add_choice(json_t *out, const json_t *v, struct api_error *err)
{
    json_t *name = json_object_get(v, "name");
    const char *word = json_string_value(v);
    if (word && (!strcmp(word, "none") || !strcmp(word, "auto")))
        json_object_set(out, "tool_choice", (json_t *)v);
    else if (json_is_string(name))
        json_object_set_new(
            out, "tool_choice",
            json_pack("{s:s,s:{s:O}}", "type", "function", "function", "name", name));
    else
        return api_invalid(err, "function_call",
                           "function_call must be \"none\", \"auto\" or an object with a name");
    return true;
}

/* Translates function_call to a tool call, and role function to role tool. A call and its result are
 * adjacent, so all can have the same id. */
static json_t *message_of(const json_t *m)
{
    json_t *out = json_copy((json_t *)m), *call = (json_t *)api_member(m, "function_call");
    const char *role = json_string_value(json_object_get(m, "role"));
    if (call && !api_member(m, "tool_calls"))
        json_object_set_new(
            out, "tool_calls",
            json_pack("[{s:s,s:s,s:O}]", "id", "call_0", "type", "function", "function", call));
    json_object_del(out, "function_call");
    if (role && !strcmp(role, "function")) {
        json_object_set_new(out, "role", json_string("tool"));
        json_object_set_new(out, "tool_call_id", json_string("call_0"));
    }
    return out;
}

static bool is_legacy(const json_t *messages)
{
    size_t i;
    json_t *m;
    json_array_foreach((json_t *)messages, i, m)
    {
        const char *role = json_string_value(json_object_get(m, "role"));
        if (api_member(m, "function_call") || (role && !strcmp(role, "function")))
            return true;
    }
    return false;
}

static void add_messages(json_t *out, const json_t *messages)
{
    size_t i;
    json_t *m, *list = json_array();
    json_array_foreach((json_t *)messages, i, m)
    {
        json_array_append_new(list, json_is_object(m) ? message_of(m) : json_incref(m));
    }
    json_object_set_new(out, "messages", list);
}

static const char *name_of(const json_t *tool)
{
    return json_string_value(json_object_get(json_object_get(tool, "function"), "name"));
}

/* name -> the first tool of that name. */
static json_t *tools_by_name(const json_t *tools)
{
    size_t i;
    json_t *t, *out = json_object();
    json_array_foreach((json_t *)tools, i, t)
    {
        if (name_of(t) && !json_object_get(out, name_of(t)))
            json_object_set(out, name_of(t), t);
    }
    return out;
}

/* {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}: the model is not shown the
 * other tools. */
static bool add_allowed(json_t *out, const json_t *choice, struct api_error *err)
{
    const json_t *a = api_member(choice, "allowed_tools"), *list = api_member(a, "tools");
    const char *mode = json_string_value(json_object_get(a, "mode"));
    size_t i;
    json_t *t, *tools = json_array();
    if (!json_is_array(list) || !json_array_size(list)) {
        json_decref(tools);
        return api_invalid(err, "tool_choice.allowed_tools.tools",
                           "tool_choice.allowed_tools.tools must be an array of tools");
    }
    json_t *known = tools_by_name(json_object_get(out, "tools"));
    bool ok = (mode && (!strcmp(mode, "auto") || !strcmp(mode, "required"))) ||
              api_invalid(err, "tool_choice.allowed_tools.mode",
                          "tool_choice.allowed_tools.mode must be auto or required");
    json_array_foreach((json_t *)list, i, t)
    {
        const char *name = name_of(t);
        json_t *tool = name ? json_object_get(known, name) : NULL;
        if (ok && !tool)
            ok = api_invalid(err, "tool_choice.allowed_tools.tools",
                             "tool_choice.allowed_tools.tools[%zu] names '%.100s', which is not in "
                             "tools",
                             i, name ? name : "?");
        if (tool && json_is_object(tool)) {
            json_array_append(tools, tool);
            json_object_set_new(known, name, json_true()); /* once */
        }
    }
    if (ok) {
        json_object_set_new(out, "tool_choice", json_string(mode));
        json_object_set(out, "tools", tools);
    }
    json_decref(known);
    json_decref(tools);
    return ok;
}

json_t *functions_translate(const json_t *body, bool *legacy, struct api_error *err)
{
    const json_t *functions = api_member(body, "functions"), *tools = api_member(body, "tools");
    const json_t *call = api_member(body, "function_call"),
                 *messages = api_member(body, "messages");
    const json_t *choice = api_member(body, "tool_choice");
    const char *type = json_string_value(json_object_get(choice, "type"));
    json_t *out = json_copy((json_t *)body);
    bool ok = true;
    *legacy = functions && !tools;
    if (*legacy) {
        ok = add_functions(out, functions, err) && (!call || add_choice(out, call, err));
        json_object_set_new(out, "parallel_tool_calls", json_false()); /* one call per message */
    }
    if (is_legacy(messages))
        add_messages(out, messages);
    if (ok && type && !strcmp(type, "allowed_tools"))
        ok = add_allowed(out, choice, err);
    if (ok)
        return out;
    json_decref(out);
    return NULL;
}
