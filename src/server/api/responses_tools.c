/*
 * Tools of /v1/responses: the model is offered functions only. Tools of a namespace get flat names, tools of
 * type `custom` become functions with one string, and reply_responses.c names both as the client did. Tools that
 * OpenAI's servers run (web_search ...) are left out with a warning. JSON to JSON.
 */
#include "server/api/mcp_loop.h"
#include "server/api/responses.h"
#include "server/http/log.h"

#include <stdio.h>
#include <string.h>

/* Tools that another server would run. */
static const char *const hosted[] = {"web_search",
                                     "web_search_preview",
                                     "web_search_2025_08_26",
                                     "web_search_preview_2025_03_11",
                                     "file_search",
                                     "code_interpreter",
                                     "image_generation",
                                     "mcp",
                                     "local_shell",
                                     "shell",
                                     "apply_patch",
                                     "tool_search",
                                     "computer",
                                     "computer_use",
                                     "computer_use_preview"};
enum { N_HOSTED = sizeof hosted / sizeof *hosted };

static int hosted_index(const char *type)
{
    for (int i = 0; type && i < N_HOSTED; i++)
        if (!strcmp(hosted[i], type))
            return i;
    return -1;
}

/* A tool that the client expects the server to run. */
static bool responses_is_hosted(const char *type)
{
    return hosted_index(type) >= 0;
}

/* Logs each type once. */
static void warn_left_out(int type)
{
    static _Atomic(bool) told[N_HOSTED];
    if (!told[type]) {
        told[type] = true;
        log_line(LOG_WARN, "a tool that the server would have to run is left out",
                 LOG_TEXT("type", hosted[type]));
    }
}

json_t *responses_flat_name(const json_t *space, const json_t *name)
{
    const char *s = json_string_value(space), *n = json_string_value(name);
    if (!s || !*s || !n)
        return json_incref((json_t *)name);
    bool joined = s[strlen(s) - 1] == '_';
    return json_sprintf("%s%s%s", s, joined ? "" : "__", n);
}

struct responses_tool responses_tool_of(const json_t *names, const char *flat)
{
    const json_t *v = json_object_get(names, flat);
    const char *name = json_string_value(json_object_get(v, "name"));
    return (struct responses_tool){
        .name = name ? name : flat,
        .space = json_string_value(json_object_get(v, "namespace")),
        .server = json_string_value(json_object_get(v, "server")),
        .custom = json_is_true(json_object_get(v, "custom")),
        .approve = json_is_true(json_object_get(v, "approve")),
    };
}

struct tools_reader {
    json_t *list; /* functions of chat completions */
    struct responses_request *request;
    json_t *names; /* its tool_names: flat name -> {"name", "namespace"?, "custom"?, "server"?,
                      "approve"?} where they differ */
    json_t *seen;  /* flat name -> true */
    const json_t *allowed; /* tool_choice's tools; NULL = all */
    json_t *allowed_names; /* their name -> true */
    bool later;            /* tools of input items, which may come again: the first counts */
    struct api_error *err;
};

static bool is_allowed(const struct tools_reader *r, const json_t *name, const json_t *flat)
{
    return !r->allowed || json_object_get(r->allowed_names, json_string_value(name)) ||
           json_object_get(r->allowed_names, json_string_value(flat));
}

/* Appends the function f, its members in the order in which chat clients send them: templates print that
 * order, and models were trained on it. The client calls it `name` of the namespace `space` (or NULL). Takes f. */
static bool append_tool(struct tools_reader *r, json_t *f, const json_t *name, const json_t *space,
                        bool custom, const char *where)
{
    json_t *flat = responses_flat_name(space, name);
    const char *key = json_string_value(flat);
    bool again = json_object_get(r->seen, key) != NULL;
    bool ok = !again || r->later ||
              api_invalid(r->err, where, "%s: two tools are named '%.100s'", where, key);
    if (ok && !again && is_allowed(r, name, flat)) {
        json_object_set_new(r->seen, key, json_true());
        json_array_append_new(r->list, json_pack("{s:s,s:{s:O,s:O*,s:O*,s:O*}}", "type", "function",
                                                 "function", "name", flat, "description",
                                                 json_object_get(f, "description"), "parameters",
                                                 json_object_get(f, "parameters"), "strict",
                                                 json_object_get(f, "strict")));
        if (custom || space) {
            json_t *v = json_pack("{s:O,s:b}", "name", (json_t *)name, "custom", custom);
            if (space)
                json_object_set(v, "namespace", (json_t *)space);
            json_object_set_new(r->names, key, v);
        }
    }
    json_decref(f);
    json_decref(flat);
    return ok;
}

/* The text before a description, separated by an empty line; NULL if both are missing. */
static json_t *joined_text(const json_t *before, const json_t *text)
{
    struct buf b = {0};
    if (json_is_string(before))
        buf_add(&b, json_string_value(before), json_string_length(before));
    if (b.len && json_string_length(text))
        buf_adds(&b, "\n\n");
    if (json_is_string(text))
        buf_add(&b, json_string_value(text), json_string_length(text));
    json_t *out = b.len ? json_stringn(b.p, b.len) : NULL;
    buf_clear(&b);
    return out;
}

/* A custom tool takes any text, or a text of its format: {"input": "..."}. Regular expressions and Lark grammars
 * are enforced. A Lark grammar is shown to the model in the description; prepare_chat.c hides x-lark. */
static bool add_custom(struct tools_reader *r, const json_t *t, const json_t *space,
                       const char *where)
{
    const json_t *format = api_member(t, "format"), *rule = json_object_get(format, "definition");
    const char *kind = json_string_value(json_object_get(format, "type"));
    const char *syntax = json_string_value(json_object_get(format, "syntax"));
    json_t *input = json_pack("{s:s}", "type", "string");
    json_t *about = json_incref((json_t *)api_member(t, "description"));
    if (format && (!kind || (strcmp(kind, "text") && strcmp(kind, "grammar"))))
        goto bad;
    if (kind && !strcmp(kind, "grammar")) {
        if (!syntax || !json_is_string(rule) ||
            (strcmp(syntax, "lark") != 0 && strcmp(syntax, "regex") != 0))
            goto bad;
        if (!strcmp(syntax, "regex")) {
            json_object_set_new(input, "pattern",
                                json_sprintf("^(?:%s)$", json_string_value(rule)));
        } else {
            json_object_set(input, "x-lark", (json_t *)rule);
            json_t *shown =
                json_sprintf("The input follows this Lark grammar:\n%s", json_string_value(rule));
            json_t *both = joined_text(about, shown);
            json_decref(about);
            json_decref(shown);
            about = both;
        }
    }
    json_t *f =
        json_pack("{s:{s:s,s:{s:o},s:[s],s:b},s:b}", "parameters", "type", "object", "properties",
                  "input", input, "required", "input", "additionalProperties", 0, "strict", 1);
    if (json_is_string(about))
        json_object_set(f, "description", about);
    json_decref(about);
    return append_tool(r, f, json_object_get(t, "name"), space, true, where);
bad:
    json_decref(input);
    json_decref(about);
    return api_invalid(r->err, where,
                       "%s.format must be {\"type\": \"text\"} or {\"type\": \"grammar\", "
                       "\"syntax\": \"lark\" or \"regex\", \"definition\": ...}",
                       where);
}

static bool add_tools(struct tools_reader *r, const json_t *tools, const json_t *space,
                      const json_t *about, const char *where);

/* A function, a custom tool, a namespace or a hosted tool. `about`: text before its description. */
static bool add_tool(struct tools_reader *r, const json_t *t, const json_t *space,
                     const json_t *about, const char *where)
{
    static const char *const keys[] = {"parameters", "strict"};
    const char *type = json_string_value(json_object_get(t, "type"));
    const json_t *name = json_object_get(t, "name");
    int left_out = hosted_index(type);
    bool custom = type && !strcmp(type, "custom");
    if (type && !strcmp(type, "mcp") && r->request->servers)
        return mcp_tools_add(r->request, t, r->allowed, r->list, r->seen, where, r->err);
    if (left_out >= 0) {
        warn_left_out(left_out);
        return true;
    }
    if (!type || (strcmp(type, "function") && !custom && (space || strcmp(type, "namespace"))))
        return api_invalid(r->err, where, "%s.type '%.40s' is not supported", where,
                           type ? type : "?");
    if (!json_is_string(name) || !json_string_length(name))
        return api_invalid(r->err, where, "%s.name must be a string", where);
    if (custom)
        return add_custom(r, t, space, where);
    if (!strcmp(type, "namespace")) {
        char at[80];
        snprintf(at, sizeof at, "%.50s.tools", where);
        return add_tools(r, api_member(t, "tools"), name, api_member(t, "description"), at);
    }
    json_t *f = json_object(), *text = joined_text(about, api_member(t, "description"));
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (api_member(t, keys[i]))
            json_object_set(f, keys[i], (json_t *)api_member(t, keys[i]));
    if (text)
        json_object_set_new(f, "description", text);
    return append_tool(r, f, name, space, false, where);
}

/* The description of a namespace precedes that of its first tool. */
static bool add_tools(struct tools_reader *r, const json_t *tools, const json_t *space,
                      const json_t *about, const char *where)
{
    size_t i;
    const json_t *t;
    if (!json_is_array(tools))
        return api_invalid(r->err, where, "%s must be an array", where);
    json_array_foreach((json_t *)tools, i, t)
    {
        char at[80];
        snprintf(at, sizeof at, "%.56s[%zu]", where, i);
        if (!add_tool(r, t, space, i ? NULL : about, at))
            return false;
    }
    return true;
}

/* The names in a list of objects as the keys of an object. */
static json_t *names_of(const json_t *list)
{
    size_t i;
    const json_t *t;
    json_t *names = json_object();
    json_array_foreach((json_t *)list, i, t)
    {
        const char *name = json_string_value(json_object_get(t, "name"));
        if (name)
            json_object_set_new(names, name, json_true());
    }
    return names;
}

bool responses_add_tools(json_t *out, struct responses_request *request, const json_t *tools,
                         const json_t *more, const json_t *allowed, struct api_error *err)
{
    struct tools_reader r = {.list = json_array(),
                             .request = request,
                             .names = request->tool_names,
                             .seen = json_object(),
                             .allowed = allowed,
                             .allowed_names = names_of(allowed),
                             .err = err};
    json_object_set_new(out, "tools", r.list);
    bool ok = !tools || add_tools(&r, tools, NULL, NULL, "tools");
    r.later = true;
    ok = ok && (!more || add_tools(&r, more, NULL, NULL, "input.tools"));
    json_decref(r.seen);
    json_decref(r.allowed_names);
    return ok;
}

/* The tool that a choice of type function or custom names. */
static json_t *chosen(const json_t *v)
{
    json_t *flat = responses_flat_name(json_object_get(v, "namespace"), json_object_get(v, "name"));
    return json_pack("{s:s,s:{s:o}}", "type", "function", "function", "name", flat);
}

bool responses_tool_choice(json_t *out, const json_t *v, bool has_mcp, const json_t **allowed,
                           struct api_error *err)
{
    const char *type = json_string_value(json_object_get(v, "type"));
    const char *mode = json_string_value(json_object_get(v, "mode"));
    const json_t *list = json_object_get(v, "tools");
    bool named = json_is_string(json_object_get(v, "name"));
    if (json_is_string(v)) {
        json_object_set(out, "tool_choice", (json_t *)v);
    } else if (type && (!strcmp(type, "function") || !strcmp(type, "custom")) && named) {
        json_object_set_new(out, "tool_choice", chosen(v));
    } else if (type &&
               (!strcmp(type, "auto") || !strcmp(type, "none") || !strcmp(type, "required"))) {
        json_object_set_new(out, "tool_choice", json_string(type));
    } else if (has_mcp && type && !strcmp(type, "mcp")) {
        return mcp_tool_choice(out, v, err);
    } else if (responses_is_hosted(type)) {
        return api_invalid(err, "tool_choice",
                           "tool_choice demands '%.40s', which this server does not run", type);
    } else if (type && !strcmp(type, "allowed_tools") && json_is_array(list)) {
        if (!mode || (strcmp(mode, "auto") && strcmp(mode, "required")))
            return api_invalid(err, "tool_choice.mode",
                               "tool_choice.mode must be auto or required");
        json_object_set_new(out, "tool_choice", json_string(mode));
        *allowed = list;
    } else {
        return api_invalid(err, "tool_choice",
                           "tool_choice must be auto, none, required, a "
                           "function or allowed_tools");
    }
    return true;
}
