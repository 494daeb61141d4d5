/* GET /mcp/tools and POST /mcp/call: the tools of the servers of --mcp-config, for the web page. */
#include "server/api/prepare_int.h"

#include <stdio.h>
#include <string.h>

enum { MAX_ARGUMENTS = 1 << 20 };

static bool fail_without_config(struct api_error *err)
{
    return api_fail(err, 404, "not_found_error",
                    "there are no MCP servers: start the server with --mcp-config FILE");
}

static void add_tool(const struct mcp_server *s, const struct mcp_tool *t, struct buf *b)
{
    buf_adds(b, "{\"server\":");
    jsonout_text(b, s->name);
    buf_adds(b, ",\"name\":");
    jsonout_text(b, t->name);
    buf_adds(b, ",\"description\":");
    jsonout_text(b, t->description);
    buf_adds(b, ",\"parameters\":");
    buf_adds(b, t->parameters);
    buf_addc(b, '}');
}

void get_mcp_tools(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    if (!s->mcp) { /* not an error: the page asks each server */
        buf_adds(&b, "{\"tools\":[],\"servers\":[]}");
        reply_json(x, s, 200, &b);
        buf_clear(&b);
        return;
    }
    struct mcp_list *l = mcp_list_get(s->mcp);
    buf_adds(&b, "{\"tools\":[");
    for (int i = 0, n = 0; i < l->n; i++)
        for (int k = 0; k < l->servers[i].tools.n; k++) {
            if (n++)
                buf_addc(&b, ',');
            add_tool(&l->servers[i], &l->servers[i].tools.v[k], &b);
        }
    buf_adds(&b, "],\"servers\":[");
    for (int i = 0; i < l->n; i++) {
        buf_adds(&b, i ? ",{\"name\":" : "{\"name\":");
        jsonout_text(&b, l->servers[i].name);
        buf_addf(&b, ",\"state\":\"%s\"", mcp_state_name(l->servers[i].state));
        if (l->servers[i].error) {
            buf_adds(&b, ",\"error\":");
            jsonout_text(&b, l->servers[i].error);
        }
        buf_addc(&b, '}');
    }
    buf_adds(&b, "]}");
    mcp_list_release(l);
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}

bool prepare_mcp_call(struct api_request *req, const json_t *body)
{
    const char *server = NULL, *tool = NULL;
    const json_t *arguments = api_member(body, "arguments");
    struct buf text = {0};
    struct api_error *err = &req->err;
    if (!req->mcp_list)
        return fail_without_config(err);
    if (!api_string(body, "server", &server, err) || !api_string(body, "name", &tool, err))
        return false;
    if (!server)
        return api_invalid(err, "server", "server is missing");
    if (!tool)
        return api_invalid(err, "name", "name is missing");
    if (arguments && !json_is_object(arguments))
        return api_invalid(err, "arguments", "arguments must be an object");
    const struct mcp_server *s = mcp_find_server(req->mcp_list, server);
    if (!s || (s->state == MCP_RUNNING && !mcp_find_tool(s, tool))) {
        api_fail(err, 404, "not_found_error",
                 s ? "the server has no tool '%.100s'" : "there is no MCP server '%.100s'",
                 s ? tool : server);
        snprintf(err->param, sizeof err->param, "%s", s ? "name" : "server");
        return false;
    }
    if (arguments)
        jsonout_value(&text, arguments);
    else
        buf_adds(&text, "{}");
    bool ok = text.len <= MAX_ARGUMENTS ||
              api_invalid(err, "arguments", "arguments have more than %d bytes", MAX_ARGUMENTS);
    if (ok)
        req->mcp_call = mcp_call_new(server, tool, text.p);
    buf_clear(&text);
    return ok;
}

void mcp_submit(struct api_request *req)
{
    req->n_open = 1;
    req->mcp_call->user = req;
    req->mcp_call->client = req->job.client;
    mcp_call_start(req->server->mcp, req->mcp_call);
}

/* A failure is a result as well: the model may try again. */
void mcp_write(struct api_request *req)
{
    const struct mcp_call *c = req->mcp_call;
    buf_adds(&req->reply, "{\"content\":[{\"type\":\"text\",\"text\":");
    jsonout_string(&req->reply, c->text.p ? c->text.p : "", c->text.len);
    buf_addf(&req->reply, "}],\"isError\":%s}", c->failed || c->is_error ? "true" : "false");
}
