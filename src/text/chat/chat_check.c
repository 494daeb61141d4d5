/* Validates messages and tools; stops at the first error. */
#include "text/chat/chat_check.h"

#include <stdio.h>
#include <string.h>

static bool check_content(const json_t *v, const char *where, struct error *err)
{
    size_t i;
    const json_t *part;
    if (!v || json_is_null(v) || json_is_string(v))
        return true;
    if (!json_is_array(v))
        return error_set(err, "%s must be a string or an array of parts", where);
    json_array_foreach((json_t *)v, i, part)
    {
        if (!json_is_object(part) || !json_is_string(json_object_get(part, "type")))
            return error_set(err, "%s[%zu] must be an object with a type", where, i);
    }
    return true;
}

static bool check_calls(const json_t *v, const char *where, struct error *err)
{
    size_t i;
    const json_t *call;
    if (!v || json_is_null(v))
        return true;
    if (!json_is_array(v))
        return error_set(err, "%s must be an array", where);
    json_array_foreach((json_t *)v, i, call)
    {
        const json_t *f = json_object_get(call, "function");
        const json_t *args = json_object_get(f, "arguments");
        if (!json_is_string(json_object_get(f, "name")))
            return error_set(err, "%s[%zu].function.name must be a string", where, i);
        if (args && !json_is_string(args) && !json_is_object(args))
            return error_set(err, "%s[%zu].function.arguments must be a string", where, i);
    }
    return true;
}

bool chat_check_messages(const json_t *v, char *where, struct error *err)
{
    static const char *const roles[] = {"system",    "developer", "user",
                                        "assistant", "tool",      "function"};
    size_t i;
    const json_t *m;
    snprintf(where, CHAT_WHERE, "messages");
    if (!json_is_array(v) || !json_array_size(v))
        return error_set(err, "messages must be an array with at least one message");
    json_array_foreach((json_t *)v, i, m)
    {
        const char *role = json_string_value(json_object_get(m, "role"));
        bool known = false;
        for (size_t k = 0; role && k < sizeof roles / sizeof *roles; k++)
            known |= !strcmp(role, roles[k]);
        snprintf(where, CHAT_WHERE, "messages[%zu].role", i);
        if (!known)
            return error_set(err, "%s must be system, developer, user, assistant or tool", where);
        snprintf(where, CHAT_WHERE, "messages[%zu].content", i);
        const json_t *content = json_object_get(m, "content");
        if (!check_content(content, where, err))
            return false;
        if ((!content || json_is_null(content)) && strcmp(role, "assistant"))
            return error_set(err, "%s is missing", where);
        snprintf(where, CHAT_WHERE, "messages[%zu].tool_calls", i);
        if (!check_calls(json_object_get(m, "tool_calls"), where, err))
            return false;
    }
    return true;
}

bool chat_check_tools(const json_t *v, char *where, struct error *err)
{
    size_t i;
    const json_t *t;
    snprintf(where, CHAT_WHERE, "tools");
    if (!v)
        return true;
    if (!json_is_array(v))
        return error_set(err, "tools must be an array");
    json_array_foreach((json_t *)v, i, t)
    {
        const json_t *f = json_object_get(t, "function");
        const json_t *params = json_object_get(f, "parameters");
        const char *type = json_string_value(json_object_get(t, "type"));
        snprintf(where, CHAT_WHERE, "tools[%zu].type", i);
        if (!type || strcmp(type, "function"))
            return error_set(err, "%s must be \"function\"", where);
        snprintf(where, CHAT_WHERE, "tools[%zu].function.name", i);
        const char *name = json_string_value(json_object_get(f, "name"));
        if (!name || !*name || strlen(name) > 256 || strpbrk(name, "\"\\\n<>"))
            return error_set(err, "%s must be a name of up to 256 characters", where);
        snprintf(where, CHAT_WHERE, "tools[%zu].function.parameters", i);
        if (params && !json_is_null(params) && !json_is_object(params))
            return error_set(err, "%s must be a JSON schema object", where);
    }
    return true;
}
