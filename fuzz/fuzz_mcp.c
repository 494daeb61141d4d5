/* libFuzzer entry: what an MCP server may send. An event stream, whole and split in three at any places, has the same events; each is
 * read as a message, as a list of tools and as a result, and everything stays within its bound. The file of --mcp-config, too. */
#include "base/mem.h"
#include "server/mcp/mcp_config.h"
#include "server/mcp/mcp_message.h"

#include <string.h>

static void check_tools(const struct mcp_tools *t)
{
    CHECK(t->n <= MCP_MAX_TOOLS && t->bytes <= MCP_MAX_LIST, "too many tools");
    for (int i = 0; i < t->n; i++) {
        const struct mcp_tool *v = &t->v[i];
        CHECK(v->name[0] && strlen(v->name) <= MCP_MAX_TOOL_NAME, "a name of %zu bytes",
              strlen(v->name));
        CHECK(strlen(v->description) <= MCP_MAX_DESCRIPTION, "a long description");
        json_t *schema = json_loads(v->parameters, JSON_ALLOW_NUL, NULL);
        CHECK(json_is_object(schema), "parameters that are no object");
        json_decref(schema);
        for (int k = 0; k < i; k++)
            CHECK(strcmp(v->name, t->v[k].name) != 0, "two tools of one name");
    }
}

static void read_result(const json_t *result)
{
    struct mcp_tools tools = {0};
    struct buf text = {0};
    struct error err = {0};
    char *cursor;
    bool is_error;
    for (int page = 0; page < 2; page++) {
        bool ok = mcp_tools_read(result, &tools, &cursor, &err);
        CHECK(ok || (!cursor && err.msg[0]), "an error without a reason");
        check_tools(&tools);
        mem_free(cursor);
    }
    mcp_result_read(result, &text, &is_error);
    CHECK(text.len <= MCP_MAX_RESULT + 100, "a result of %zu bytes", text.len);
    buf_clear(&text);
    mcp_tools_clear(&tools);
}

static void read_one(const json_t *v)
{
    struct mcp_message m;
    mcp_message_read(v, &m);
    CHECK(m.kind == MCP_INVALID || (m.kind == MCP_REQUEST && m.method && m.request_id) ||
              (m.kind == MCP_NOTIFICATION && m.method) ||
              (m.kind == MCP_RESULT && json_is_object(m.result)) ||
              (m.kind == MCP_ERROR && strlen(m.error) <= MCP_MAX_ERROR),
          "a message with holes");
    if (m.kind == MCP_RESULT)
        read_result(m.result);
}

static void read_message(void *arg, const char *text, size_t n)
{
    struct error err = {0};
    size_t i;
    json_t *one, *v = mcp_parse(text, n, &err);
    CHECK(v || err.msg[0], "an error without a reason");
    if (json_is_array(v))
        json_array_foreach(v, i, one) read_one(one);
    else if (v)
        read_one(v);
    json_decref(v);
    if (arg) {
        buf_add(arg, text, n);
        buf_addc(arg, 0);
    }
}

static void run_stream(const char *p, size_t n, const size_t cuts[2], struct buf *out)
{
    struct mcp_sse s = {0};
    size_t at[] = {0, cuts[0], cuts[1], n};
    for (int i = 0; i < 3; i++)
        CHECK(mcp_sse_feed(&s, p + at[i], at[i + 1] - at[i], read_message, out),
              "a short stream is too long");
    mcp_sse_clear(&s);
}

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t n);
int LLVMFuzzerTestOneInput(const unsigned char *data, size_t n)
{
    if (n < 3)
        return 0;
    const char *p = (const char *)data + 3;
    size_t len = n - 3, a = data[1] * len / 255, b = data[2] * len / 255;
    if (data[0] % 3 == 0) {
        struct buf whole = {0}, split = {0};
        run_stream(p, len, (size_t[]){len, len}, &whole);
        run_stream(p, len, (size_t[]){a < b ? a : b, a < b ? b : a}, &split);
        CHECK(whole.len == split.len && (!whole.len || !memcmp(whole.p, split.p, whole.len)),
              "the split shows");
        buf_clear(&whole);
        buf_clear(&split);
    } else if (data[0] % 3 == 1) {
        read_message(NULL, p, len);
    } else {
        struct mcp_config c;
        struct error err = {0};
        bool ok = mcp_config_parse(p, len, &c, &err);
        CHECK(ok || err.msg[0], "an error without a reason");
        for (int i = 0; ok && i < c.n; i++)
            CHECK(!c.servers[i].command != !c.servers[i].url, "a server of two kinds");
        mcp_config_clear(&c);
    }
    return 0;
}
