/* Reads the file of --mcp-config. See mcp_config.h. */
#include "server/mcp/mcp_config.h"
#include "base/buf.h"
#include "base/input.h"
#include "base/json_guard.h"
#include "base/mem.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

enum { MAX_FILE = 1 << 20, MAX_LIST = 1024 };

/* Where an error is: mcpServers.NAME.FIELD. */
struct place {
    const char *list, *server;
    struct error *err;
};

static bool bad(const struct place *at, const char *field, const char *what)
{
    return error_set(at->err, "%s.%s.%s %s", at->list, at->server, field, what);
}

/* A string that can be passed to a system call. */
static bool read_string(const struct place *at, const char *field, const json_t *v, char **out)
{
    const char *s = json_string_value(v);
    if (!s || !*s || strlen(s) != json_string_length(v))
        return bad(at, field, "must be a string that is not empty");
    *out = mem_strdup(s);
    return true;
}

static bool read_args(const struct place *at, const json_t *v, struct mcp_server_config *s)
{
    size_t i, n = json_array_size(v);
    const json_t *arg;
    if (!json_is_array(v) || n > MAX_LIST)
        return bad(at, "args", "must be an array of strings");
    s->args = mem_zalloc(n + 1, sizeof *s->args);
    json_array_foreach((json_t *)v, i, arg)
    {
        char field[32];
        snprintf(field, sizeof field, "args[%zu]", i);
        const char *text = json_string_value(arg);
        if (!text || strlen(text) != json_string_length(arg))
            return bad(at, field, "must be a string");
        s->args[s->n_args++] = mem_strdup(text);
    }
    return true;
}

/* Whether it can be the name of an environment variable or of a header. */
static bool is_word(const char *s)
{
    for (const char *p = s; *p; p++)
        if (*p <= ' ' || *p >= 127 || strchr("=:\"", *p))
            return false;
    return *s != 0;
}

static bool read_pairs(const struct place *at, const char *field, const json_t *v,
                       struct mcp_server_config *s)
{
    const char *name;
    json_t *value;
    if (!json_is_object(v) || json_object_size(v) > MAX_LIST)
        return bad(at, field, "must be an object of strings");
    s->pairs = mem_zalloc(json_object_size(v) + 1, sizeof *s->pairs);
    json_object_foreach((json_t *)v, name, value)
    {
        char where[100];
        snprintf(where, sizeof where, "%s.%.60s", field, name);
        const char *text = json_string_value(value);
        if (!text || strlen(text) != json_string_length(value) || strpbrk(text, "\r\n"))
            return bad(at, where, "must be a string of one line");
        if (!is_word(name))
            return bad(at, where, "is no name");
        s->pairs[s->n_pairs++] =
            (struct mcp_pair){.name = mem_strdup(name), .value = mem_strdup(text)};
    }
    return true;
}

static bool read_url(const struct place *at, const json_t *v, struct mcp_server_config *s)
{
    if (!read_string(at, "url", v, &s->url))
        return false;
    if (strncmp(s->url, "http://", 7) != 0 && strncmp(s->url, "https://", 8) != 0)
        return bad(at, "url", "must begin with http:// or https://");
    return !strpbrk(s->url, " \t\r\n") || bad(at, "url", "must not have spaces");
}

/* "type" repeats what "command" or "url" say. */
static bool check_type(const struct place *at, const json_t *v, const struct mcp_server_config *s)
{
    static const char *const remote[] = {"http", "streamable-http", "streamableHttp"};
    const char *type = json_string_value(v);
    bool fits = type && s->command && !strcmp(type, "stdio");
    for (size_t i = 0; type && s->url && i < sizeof remote / sizeof *remote; i++)
        fits |= !strcmp(type, remote[i]);
    return !v || fits ||
           bad(at, "type",
               s->command ? "must be \"stdio\" beside command"
                          : "must be \"http\" (streamable HTTP) beside url");
}

static bool read_server(const struct place *at, const json_t *v, struct mcp_server_config *s)
{
    const char *key;
    json_t *field;
    if (!json_is_object(v))
        return error_set(at->err, "%s.%s must be an object", at->list, at->server);
    const bool is_program = json_object_get(v, "command"), is_url = json_object_get(v, "url");
    if (is_program == is_url)
        return error_set(at->err, "%s.%s must have either command or url", at->list, at->server);
    json_object_foreach((json_t *)v, key, field)
    {
        bool ok = true;
        if (is_program && !strcmp(key, "command"))
            ok = read_string(at, key, field, &s->command);
        else if (is_program && !strcmp(key, "args"))
            ok = read_args(at, field, s);
        else if (is_program && !strcmp(key, "cwd"))
            ok = read_string(at, key, field, &s->cwd);
        else if (is_url && !strcmp(key, "url"))
            ok = read_url(at, field, s);
        else if (!strcmp(key, is_program ? "env" : "headers"))
            ok = read_pairs(at, key, field, s);
        else if (strcmp(key, "type") != 0)
            ok = error_set(at->err, "%s.%s.%.60s is not a field of a server with %s", at->list,
                           at->server, key, is_program ? "a command" : "a url");
        if (!ok)
            return false;
    }
    return check_type(at, json_object_get(v, "type"), s);
}

/* Clients name a server by it, and the names of its tools begin with it. */
static bool check_name(const char *list, const char *name, struct error *err)
{
    size_t n = strlen(name);
    bool ok = n > 0 && n <= MCP_MAX_SERVER_NAME;
    for (size_t i = 0; ok && i < n; i++)
        ok = name[i] >= ' ' && name[i] < 127 && !strchr("\"\\<>", name[i]);
    return ok || error_set(err,
                           "%s: a server's name must be 1 to %d printable ASCII characters, and "
                           "none of \"\\<>",
                           list, MCP_MAX_SERVER_NAME);
}

static bool read_config(const json_t *root, struct mcp_config *out, struct error *err)
{
    static const char *const lists[] = {"mcpServers", "servers"};
    const char *list = NULL, *key;
    json_t *v;
    json_object_foreach((json_t *)root, key, v)
    {
        const char *known = NULL;
        for (size_t i = 0; i < 2; i++)
            known = !strcmp(key, lists[i]) ? lists[i] : known;
        if (!known)
            return error_set(err, "%.60s is not a field of this file: mcpServers is", key);
        if (list)
            return error_set(err, "there are both mcpServers and servers");
        list = known;
    }
    const json_t *servers = list ? json_object_get(root, list) : NULL;
    if (!json_is_object(servers))
        return error_set(err, "mcpServers must be an object of servers");
    if (json_object_size(servers) > MCP_MAX_SERVERS)
        return error_set(err, "%s has %zu servers: at most %d", list, json_object_size(servers),
                         MCP_MAX_SERVERS);
    out->servers = mem_zalloc(json_object_size(servers) + 1, sizeof *out->servers);
    json_object_foreach((json_t *)servers, key, v)
    {
        if (!check_name(list, key, err))
            return false;
        struct mcp_server_config *s = &out->servers[out->n++];
        s->name = mem_strdup(key);
        if (!read_server(&(struct place){.list = list, .server = key, .err = err}, v, s))
            return false;
    }
    return true;
}

bool mcp_config_parse(const char *text, size_t n, struct mcp_config *out, struct error *err)
{
    json_error_t why;
    *out = (struct mcp_config){0};
    if (!json_guard(text, n, &json_limits_request, NULL, err))
        return false;
    json_t *root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &why);
    bool ok = root ? json_is_object(root) || error_set(err, "the file must be a JSON object")
                   : error_set(err, "line %d: %s", why.line, why.text);
    ok = ok && read_config(root, out, err);
    json_decref(root);
    return ok;
}

bool mcp_config_load(const char *path, struct mcp_config *out, struct error *err)
{
    struct buf text = {0};
    char piece[4096];
    size_t n;
    *out = (struct mcp_config){0};
    FILE *f = input_open(path, err);
    if (!f)
        return false;
    while (text.len <= MAX_FILE && (n = fread(piece, 1, sizeof piece, f)) > 0)
        buf_add(&text, piece, n);
    bool ok = !ferror(f) || error_set(err, "%s: %s", path, strerror(errno));
    fclose(f);
    if (ok && text.len > MAX_FILE)
        ok = error_set(err, "%s: more than %d bytes", path, MAX_FILE);
    else if (ok && !mcp_config_parse(text.p ? text.p : "", text.len, out, err))
        ok = error_prefix(err, "%s", path);
    buf_clear(&text);
    return ok;
}

void mcp_config_clear(struct mcp_config *c)
{
    for (int i = 0; i < c->n; i++) {
        struct mcp_server_config *s = &c->servers[i];
        for (int k = 0; k < s->n_args; k++)
            mem_free(s->args[k]);
        for (int k = 0; k < s->n_pairs; k++) {
            mem_free(s->pairs[k].name);
            mem_free(s->pairs[k].value);
        }
        mem_free(s->args);
        mem_free(s->pairs);
        mem_free(s->name);
        mem_free(s->command);
        mem_free(s->cwd);
        mem_free(s->url);
    }
    mem_free(c->servers);
    *c = (struct mcp_config){0};
}
