/* Parses what MCP servers send. See mcp_message.h. */
#include "server/mcp/mcp_message.h"
#include "base/json_guard.h"
#include "base/mem.h"
#include "server/http/jsonout.h"

#include <stdio.h>
#include <string.h>

json_t *mcp_parse(const char *text, size_t n, struct error *err)
{
    json_error_t why;
    if (n > MCP_MAX_MESSAGE) {
        error_set(err, "a message has more than %d bytes", MCP_MAX_MESSAGE);
        return NULL;
    }
    if (!json_guard(text, n, &json_limits_request, NULL, err))
        return NULL;
    json_t *v = json_loadb(text, n, JSON_ALLOW_NUL, &why);
    if (!v)
        error_set(err, "invalid JSON: %.100s", why.text);
    return v;
}

/* The length of the longest prefix of whole characters that has at most `most` bytes. */
static size_t cut_at(const char *text, size_t n, size_t most)
{
    if (n <= most)
        return n;
    while (most > 0 && ((unsigned char)text[most] & 0xc0) == 0x80)
        most--;
    return most;
}

void mcp_message_read(const json_t *v, struct mcp_message *out)
{
    const json_t *id = json_object_get(v, "id"), *error = json_object_get(v, "error");
    const json_t *version = json_object_get(v, "jsonrpc");
    *out =
        (struct mcp_message){.id = -1, .method = json_string_value(json_object_get(v, "method"))};
    if (!json_is_string(version) || strcmp(json_string_value(version), "2.0") != 0)
        return;
    if (out->method) {
        if (!id)
            out->kind = MCP_NOTIFICATION;
        else if (json_is_integer(id) || (json_is_string(id) && json_string_length(id) <= 256))
            out->kind = MCP_REQUEST;
        out->request_id = id;
        return;
    }
    if (json_is_integer(id) && json_integer_value(id) >= 0)
        out->id = json_integer_value(id);
    if (json_is_object(error)) {
        const json_t *text = json_object_get(error, "message");
        const char *s = json_is_string(text) ? json_string_value(text) : "no message";
        out->kind = MCP_ERROR;
        snprintf(out->error, sizeof out->error, "%.*s", (int)cut_at(s, strlen(s), MCP_MAX_ERROR),
                 s);
    } else if (json_is_object(json_object_get(v, "result"))) {
        out->kind = MCP_RESULT;
        out->result = json_object_get(v, "result");
    }
}

/* Tools */

void mcp_tools_clear(struct mcp_tools *t)
{
    for (int i = 0; i < t->n; i++) {
        mem_free(t->v[i].name);
        mem_free(t->v[i].description);
        mem_free(t->v[i].parameters);
    }
    mem_free(t->v);
    *t = (struct mcp_tools){0};
}

/* Names reach prompts and grammars. */
static bool is_tool_name(const json_t *v)
{
    const char *s = json_string_value(v);
    size_t n = json_string_length(v);
    bool ok = s && n > 0 && n <= MCP_MAX_TOOL_NAME;
    for (size_t i = 0; ok && i < n; i++)
        ok = s[i] > ' ' && s[i] < 127 && !strchr("\"\\<>", s[i]);
    return ok;
}

static bool has_tool(const struct mcp_tools *t, const char *name)
{
    for (int i = 0; i < t->n; i++)
        if (!strcmp(t->v[i].name, name))
            return true;
    return false;
}

static bool add_tool(const json_t *v, struct mcp_tools *t)
{
    const json_t *name = json_object_get(v, "name"), *about = json_object_get(v, "description");
    const json_t *schema = json_object_get(v, "inputSchema");
    struct buf text = {0}, parameters = {0};
    bool ok = t->n < MCP_MAX_TOOLS && is_tool_name(name) && json_is_object(schema) &&
              !has_tool(t, json_string_value(name));
    if (ok)
        jsonout_value(&parameters, schema);
    if (ok && json_is_string(about)) {
        const char *s = json_string_value(about);
        buf_add(&text, s, cut_at(s, strlen(s), MCP_MAX_DESCRIPTION));
    }
    size_t bytes = text.len + parameters.len + json_string_length(name);
    ok = ok && parameters.len <= MCP_MAX_SCHEMA && t->bytes + bytes <= MCP_MAX_LIST;
    if (ok) {
        const json_t *hints = json_object_get(v, "annotations");
        t->v = mem_realloc(t->v, (size_t)t->n + 1, sizeof *t->v);
        t->v[t->n++] = (struct mcp_tool){
            .name = mem_strdup(json_string_value(name)),
            .description = buf_take(&text),
            .parameters = buf_take(&parameters),
            .read_only = json_is_true(json_object_get(hints, "readOnlyHint")),
        };
        t->bytes += bytes;
    }
    buf_clear(&text);
    buf_clear(&parameters);
    return ok;
}

bool mcp_tools_read(const json_t *result, struct mcp_tools *t, char **cursor, struct error *err)
{
    const json_t *list = json_object_get(result, "tools"), *tool;
    const json_t *next = json_object_get(result, "nextCursor");
    size_t i;
    *cursor = NULL;
    if (!json_is_array(list))
        return error_set(err, "the result of tools/list has no array of tools");
    json_array_foreach((json_t *)list, i, tool)
    {
        t->n_dropped += !add_tool(tool, t);
    }
    if (!next || json_is_null(next))
        return true;
    if (!json_is_string(next) || json_string_length(next) > MCP_MAX_CURSOR)
        return error_set(err, "nextCursor of tools/list must be a string of up to %d bytes",
                         MCP_MAX_CURSOR);
    *cursor = mem_strndup(json_string_value(next), json_string_length(next));
    return true;
}

/* Results */

static void add_text(struct buf *out, const json_t *v)
{
    buf_add(out, json_string_value(v), json_string_length(v));
}

/* A part that is not text: its kind, type or address. */
static void describe(const json_t *part, const char *type, struct buf *out)
{
    const json_t *mime = json_object_get(part, "mimeType"), *uri = json_object_get(part, "uri");
    buf_addf(out, "[%.40s", type);
    if (json_is_string(uri))
        buf_addf(out, ": %.500s", json_string_value(uri));
    else if (json_is_string(mime))
        buf_addf(out, ": %.100s", json_string_value(mime));
    buf_addc(out, ']');
}

static void add_part(const json_t *part, struct buf *out)
{
    const char *type = json_string_value(json_object_get(part, "type"));
    const json_t *text = json_object_get(part, "text");
    const json_t *resource = json_object_get(part, "resource");
    const json_t *inner = json_object_get(resource, "text");
    if (type && !strcmp(type, "text") && json_is_string(text))
        add_text(out, text);
    else if (type && !strcmp(type, "resource") && json_is_string(inner))
        add_text(out, inner);
    else if (type)
        describe(resource ? resource : part, type, out);
}

void mcp_result_read(const json_t *result, struct buf *text, bool *is_error)
{
    const json_t *content = json_object_get(result, "content"), *part;
    const json_t *structured = json_object_get(result, "structuredContent");
    size_t i, begin = text->len;
    *is_error = json_is_true(json_object_get(result, "isError"));
    json_array_foreach((json_t *)content, i, part)
    {
        if (text->len - begin > MCP_MAX_RESULT)
            break;
        if (i)
            buf_addc(text, '\n');
        add_part(part, text);
    }
    if (!json_array_size(content) && structured)
        jsonout_value(text, structured);
    size_t n = text->len - begin;
    if (n > MCP_MAX_RESULT) {
        text->len = begin + cut_at(text->p + begin, n, MCP_MAX_RESULT);
        buf_addf(text, "\n[cut: the result has more than %d bytes]", MCP_MAX_RESULT);
    }
}

/* Event streams */

static void end_line(struct mcp_sse *s)
{
    const char *p = s->line.p;
    size_t n = s->line.len;
    if (n >= 5 && !memcmp(p, "data:", 5)) {
        size_t skip = n > 5 && p[5] == ' ' ? 6 : 5;
        if (s->has_data)
            buf_addc(&s->data, '\n');
        buf_add(&s->data, p + skip, n - skip);
        s->has_data = true;
    }
    buf_reset(&s->line);
}

bool mcp_sse_feed(struct mcp_sse *s, const char *p, size_t n,
                  void (*event)(void *arg, const char *data, size_t n), void *arg)
{
    const char *end = p + n;
    while (p < end) {
        if (s->after_cr && *p == '\n') { /* of \r\n */
            s->after_cr = false;
            p++;
            continue;
        }
        s->after_cr = false;
        const char *stop = p;
        while (stop < end && *stop != '\n' && *stop != '\r')
            stop++;
        buf_add(&s->line, p, (size_t)(stop - p));
        if (s->line.len + s->data.len > MCP_MAX_MESSAGE)
            return false;
        if (stop == end)
            return true;
        s->after_cr = *stop == '\r';
        p = stop + 1;
        bool ends_event = s->line.len == 0;
        end_line(s);
        if (ends_event && s->has_data) {
            s->has_data = false;
            event(arg, s->data.p ? s->data.p : "", s->data.len);
            buf_reset(&s->data);
        }
    }
    return true;
}

void mcp_sse_clear(struct mcp_sse *s)
{
    buf_clear(&s->line);
    buf_clear(&s->data);
    *s = (struct mcp_sse){0};
}
