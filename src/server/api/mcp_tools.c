/*
 * Tools of type mcp in a body of /v1/responses. The model is offered them as functions named
 * SERVER__TOOL. JSON to JSON. Clients name servers by server_label; they cannot supply addresses.
 */
#include "server/api/mcp_loop.h"
#include "base/mem.h"

#include <limits.h>
#include <stdio.h>
#include <string.h>

void responses_mcp_free(struct responses_mcp *m)
{
    if (!m)
        return;
    json_decref(m->labels);
    json_decref(m->lists);
    json_decref(m->approved);
    buf_clear(&m->chat);
    buf_clear(&m->items);
    mem_free(m);
}

json_t *mcp_flat_name(const char *server, const char *tool)
{
    struct buf b = {0};
    buf_addf(&b, "%s__%s", server, tool);
    for (char *p = b.p; *p; p++)
        if (!strchr("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-", *p))
            *p = '_';
    json_t *out = json_stringn(b.p, b.len);
    buf_clear(&b);
    return out;
}

/* Filters: an array of names, or {"tool_names", "read_only"}. */

static bool check_filter(const json_t *v, const char *where, struct api_error *err)
{
    const json_t *names = json_is_array(v) ? v : api_member(v, "tool_names"), *name;
    const json_t *read_only = json_is_array(v) ? NULL : api_member(v, "read_only");
    size_t i;
    bool ok = json_is_array(v) || json_is_object(v);
    ok = ok && (!names || json_is_array(names)) && (!read_only || json_is_boolean(read_only));
    json_array_foreach((json_t *)names, i, name)
    {
        ok = ok && json_is_string(name);
    }
    return ok || api_invalid(err, where,
                             "%s must be an array of names or an object with tool_names and "
                             "read_only",
                             where);
}

static bool filter_has(const json_t *v, const struct mcp_tool *t)
{
    const json_t *names = json_is_array(v) ? v : api_member(v, "tool_names"), *name;
    const json_t *read_only = json_is_array(v) ? NULL : api_member(v, "read_only");
    bool found = !names;
    size_t i;
    json_array_foreach((json_t *)names, i, name)
    {
        found |= !strcmp(json_string_value(name), t->name);
    }
    return found && (!read_only || json_is_true(read_only) == t->read_only);
}

/* "always" (the default), "never", or {"always": FILTER, "never": FILTER}: what `never` does not name needs approval. */
static bool check_approval(const json_t *v, const char *where, struct api_error *err)
{
    const char *word = json_string_value(v);
    const json_t *always = api_member(v, "always"), *never = api_member(v, "never");
    if (!v || (word && (!strcmp(word, "always") || !strcmp(word, "never"))))
        return true;
    if (!json_is_object(v))
        return api_invalid(err, where, "%s must be always, never or an object of both", where);
    return (!always || check_filter(always, where, err)) &&
           (!never || check_filter(never, where, err));
}

static bool needs_approval(const json_t *v, const struct mcp_tool *t)
{
    const char *word = json_string_value(v);
    const json_t *never = json_is_object(v) ? api_member(v, "never") : NULL;
    return word ? strcmp(word, "never") != 0 : !never || !filter_has(never, t);
}

/* Whether tool_choice's allowed_tools name the tool, or its whole server. */
static bool is_allowed(const json_t *allowed, const char *server, const char *tool)
{
    size_t i;
    const json_t *a;
    json_array_foreach((json_t *)allowed, i, a)
    {
        const char *label = json_string_value(json_object_get(a, "server_label"));
        const char *name = json_string_value(json_object_get(a, "name"));
        if (label && !strcmp(label, server) && (!name || !strcmp(name, tool)))
            return true;
    }
    return !allowed;
}

/* A name for the model that no function of the client has. */
static json_t *free_name(const char *server, const char *tool, const json_t *seen)
{
    json_t *name = mcp_flat_name(server, tool);
    for (int i = 2; json_object_get(seen, json_string_value(name)); i++) {
        json_decref(name);
        json_t *base = mcp_flat_name(server, tool);
        name = json_sprintf("%s_%d", json_string_value(base), i);
        json_decref(base);
    }
    return name;
}

static void add_tool(struct responses_request *r, const struct mcp_server *s,
                     const struct mcp_tool *t, bool approve, json_t *list, json_t *seen)
{
    json_t *flat = free_name(s->name, t->name, seen);
    json_t *schema = json_loads(t->parameters, JSON_ALLOW_NUL, NULL);
    json_array_append_new(list, json_pack("{s:s,s:{s:O,s:s,s:o}}", "type", "function", "function",
                                          "name", flat, "description", t->description, "parameters",
                                          schema ? schema : json_object()));
    json_object_set_new(
        r->tool_names, json_string_value(flat),
        json_pack("{s:s,s:s,s:b}", "name", t->name, "server", s->name, "approve", approve));
    json_object_set_new(seen, json_string_value(flat), json_true());
    json_decref(flat);
}

static json_t *listed(const struct mcp_tool *t)
{
    json_t *schema = json_loads(t->parameters, JSON_ALLOW_NUL, NULL);
    return json_pack("{s:s,s:s,s:o,s:{s:b}}", "name", t->name, "description", t->description,
                     "input_schema", schema ? schema : json_object(), "annotations", "read_only",
                     t->read_only);
}

/* The item mcp_list_tools of a server, unless an earlier response of the conversation has one. */
static void add_list(struct responses_request *r, const struct mcp_server *s, json_t *tools)
{
    json_t *item = json_pack("{s:s,s:O}", "server_label", s->name, "tools", tools);
    if (s->state != MCP_RUNNING)
        json_object_set_new(item, "error",
                            json_string(s->error ? s->error : "the server is still starting"));
    if (!json_object_get(r->listed, s->name) || s->state != MCP_RUNNING)
        json_array_append(r->mcp->lists, item);
    json_decref(item);
}

static bool check_fields(const json_t *tool, const char *where, struct api_error *err)
{
    static const char *const foreign[] = {"server_url", "connector_id", "tunnel_id", "headers",
                                          "authorization"};
    char at[80];
    for (size_t i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (api_member(tool, foreign[i])) {
            snprintf(at, sizeof at, "%.50s.%s", where, foreign[i]);
            return api_invalid(err, at,
                               "%s is not supported: tools of the servers of --mcp-config only, "
                               "by server_label",
                               at);
        }
    snprintf(at, sizeof at, "%.50s.allowed_tools", where);
    const json_t *names = api_member(tool, "allowed_tools");
    if (names && !check_filter(names, at, err))
        return false;
    snprintf(at, sizeof at, "%.50s.require_approval", where);
    return check_approval(api_member(tool, "require_approval"), at, err);
}

bool mcp_tools_add(struct responses_request *r, const json_t *tool, const json_t *allowed,
                   json_t *list, json_t *seen, const char *where, struct api_error *err)
{
    const char *label = json_string_value(json_object_get(tool, "server_label"));
    const json_t *names = api_member(tool, "allowed_tools");
    char at[80];
    if (!check_fields(tool, where, err))
        return false;
    snprintf(at, sizeof at, "%.50s.server_label", where);
    const struct mcp_server *s = label ? mcp_find_server(r->servers, label) : NULL;
    if (!s)
        return api_invalid(err, at, "%s '%.64s' is no server of --mcp-config", at,
                           label ? label : "");
    if (!r->mcp) {
        r->mcp = mem_zalloc(1, sizeof *r->mcp);
        r->mcp->labels = json_object();
        r->mcp->lists = json_array();
        r->mcp->approved = json_incref(r->approved);
    }
    if (json_object_get(r->mcp->labels, label))
        return api_invalid(err, at, "two tools have the server_label '%.64s'", label);
    json_object_set_new(r->mcp->labels, label, json_true());
    json_t *shown = json_array();
    for (int i = 0; i < s->tools.n; i++) {
        const struct mcp_tool *t = &s->tools.v[i];
        if (names && !filter_has(names, t))
            continue;
        json_array_append_new(shown, listed(t));
        if (is_allowed(allowed, s->name, t->name))
            add_tool(r, s, t, needs_approval(api_member(tool, "require_approval"), t), list, seen);
    }
    add_list(r, s, shown);
    json_decref(shown);
    return true;
}

bool mcp_tool_choice(json_t *out, const json_t *choice, struct api_error *err)
{
    const char *label = json_string_value(json_object_get(choice, "server_label"));
    const char *name = json_string_value(json_object_get(choice, "name"));
    if (!label)
        return api_invalid(err, "tool_choice.server_label",
                           "tool_choice.server_label must be a string");
    if (!name)
        return api_invalid(err, "tool_choice.name", "tool_choice.name must be a string");
    json_object_set_new(out, "tool_choice",
                        json_pack("{s:s,s:{s:o}}", "type", "function", "function", "name",
                                  mcp_flat_name(label, name)));
    return true;
}

bool mcp_tools_finish(struct responses_request *r, const json_t *body, struct api_error *err)
{
    int most = -1;
    const char *id;
    json_t *item;
    if (!api_int(body, "max_tool_calls", 0, INT_MAX, &most, err))
        return false;
    if (r->mcp)
        r->mcp->max_calls = most;
    json_object_foreach(r->approved, id, item)
    {
        const char *label = json_string_value(json_object_get(item, "server_label"));
        const char *name = json_string_value(json_object_get(item, "name"));
        json_t *flat = mcp_flat_name(label, name);
        const json_t *tool = json_object_get(r->tool_names, json_string_value(flat));
        json_decref(flat);
        if (!r->mcp || !json_object_get(tool, "server"))
            return api_invalid(err, "tools",
                               "the approved call is of the tool '%.100s' of '%.64s', which is not "
                               "in tools",
                               name, label);
    }
    return true;
}
