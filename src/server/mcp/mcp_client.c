/* The protocol with one MCP server. See mcp_client.h. */
#include "server/mcp/mcp_client.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/version.h"
#include "server/http/jsonout.h"
#include "server/http/log.h"

#include <stdio.h>
#include <string.h>

enum {
    START_S = 60, /* for initialize: npx may have to download the server first */
    LIST_S = 30,
    MAX_PAGES = 64,    /* of tools/list */
    MAX_WAITING = 128, /* requests without a reply */
    MAX_EACH = 32,     /* of one client */
    BACKOFF_MS = 500,  /* after the first failure; doubled with each */
    BACKOFF_MAX_MS = 60000,
    STEADY_S = 60,        /* after this time the backoff begins anew */
    WINDOW_S = 10,        /* the window of the next limit */
    WINDOW_UNASKED = 5000 /* messages per window that are no replies */
};
#define NS 1000000000LL

/* Newest first. Steel offers the first. */
static const char *const versions[] = {"2025-06-18", "2025-03-26", "2024-11-05"};

enum ask { ASK_INITIALIZE, ASK_LIST, ASK_CALL };
struct waiting {
    int64_t id, deadline;
    enum ask ask;
    struct mcp_call *call; /* ASK_CALL */
};

enum phase { PHASE_DOWN, PHASE_CONNECTING, PHASE_UP, PHASE_ENDING };

struct mcp_client {
    struct mcp_client_options opt;
    struct mcp_link *link; /* NULL while down */
    enum phase phase;
    bool stopping, changed, closing;
    char why[400]; /* of the last failure; "" = none */
    int64_t next_id, up_ns, retry_ns, window_ns;
    int backoff_ms, n_unasked;
    struct waiting *waiting; /* (n_waiting) */
    int n_waiting;
    struct mcp_tools tools, listing;
    bool has_tools; /* the server offers tools */
    bool is_listing, relist;
    int n_pages;
};

static const char *name_of(const struct mcp_client *c)
{
    return c->opt.config->name;
}

/* Calls */

static void give_back(struct mcp_client *c, struct mcp_call *call, const char *why)
{
    if (why) {
        buf_reset(&call->text);
        buf_adds(&call->text, why);
        call->failed = true;
    }
    c->opt.done(c->opt.arg, call);
}

/* Takes the request out of the list. */
static struct waiting take(struct mcp_client *c, int i)
{
    struct waiting w = c->waiting[i];
    c->waiting[i] = c->waiting[--c->n_waiting];
    return w;
}

static void fail_all(struct mcp_client *c, const char *why)
{
    while (c->n_waiting) {
        struct waiting w = take(c, c->n_waiting - 1);
        if (w.call)
            give_back(c, w.call, why);
    }
}

/* Ends a failed connection. It is made again later. */
static void fail(struct mcp_client *c, const char *why)
{
    char text[500];
    if (c->phase == PHASE_ENDING || c->phase == PHASE_DOWN)
        return;
    int64_t now = clock_ns();
    if (c->phase == PHASE_UP && now - c->up_ns > STEADY_S * NS)
        c->backoff_ms = 0;
    c->backoff_ms = !c->backoff_ms ? BACKOFF_MS : c->backoff_ms * 2;
    if (c->backoff_ms > BACKOFF_MAX_MS)
        c->backoff_ms = BACKOFF_MAX_MS;
    snprintf(c->why, sizeof c->why, "%s", why);
    log_line(LOG_WARN, "mcp: a server failed", LOG_TEXT("server", name_of(c)),
             LOG_TEXT("why", c->why), LOG_NUM("again_ms", c->backoff_ms));
    c->phase = PHASE_ENDING;
    c->changed = true;
    c->retry_ns = now + c->backoff_ms * 1000000LL;
    snprintf(text, sizeof text, "the MCP server %.64s failed: %s", name_of(c), why);
    fail_all(c, text);
    mcp_tools_clear(&c->tools);
    mcp_tools_clear(&c->listing);
    c->is_listing = c->relist = c->has_tools = false;
    if (c->link)
        c->link->f->stop(c->link, now);
}

/* Sending */

static bool send_buf(struct mcp_client *c, struct buf *b, int64_t id)
{
    bool ok = c->link->f->send(c->link, b->p, b->len, id);
    buf_clear(b);
    if (!ok)
        fail(c, "it does not read its messages");
    return ok;
}

/* params: JSON, or NULL. */
static void notify(struct mcp_client *c, const char *method, const char *params)
{
    struct buf b = {0};
    buf_addf(&b, "{\"jsonrpc\":\"2.0\",\"method\":\"%s\"%s%s}", method,
             params ? ",\"params\":" : "", params ? params : "");
    send_buf(c, &b, -1);
}

/* call: NULL unless `what` is ASK_CALL; then it is owned by the list, or given back. */
static void ask(struct mcp_client *c, enum ask what, const char *method, const char *params,
                struct mcp_call *call)
{
    int seconds = what == ASK_INITIALIZE ? START_S : what == ASK_LIST ? LIST_S : c->opt.call_s;
    struct buf b = {0};
    int64_t id = c->next_id++;
    c->waiting = mem_realloc(c->waiting, (size_t)c->n_waiting + 1, sizeof *c->waiting);
    c->waiting[c->n_waiting++] = (struct waiting){
        .id = id, .deadline = clock_ns() + seconds * NS, .ask = what, .call = call};
    buf_addf(&b, "{\"jsonrpc\":\"2.0\",\"id\":%lld,\"method\":\"%s\",\"params\":", (long long)id,
             method);
    buf_adds(&b, params);
    buf_addc(&b, '}');
    send_buf(c, &b, id);
}

static void list_tools(struct mcp_client *c, const char *cursor)
{
    struct buf params = {0};
    if (!cursor) {
        mcp_tools_clear(&c->listing);
        c->n_pages = 0;
        c->is_listing = true;
        c->relist = false;
    }
    buf_addc(&params, '{');
    if (cursor) {
        buf_adds(&params, "\"cursor\":");
        jsonout_text(&params, cursor);
    }
    buf_addc(&params, '}');
    ask(c, ASK_LIST, "tools/list", params.p, NULL);
    buf_clear(&params);
}

void mcp_client_call(struct mcp_client *c, struct mcp_call *call)
{
    char why[500];
    struct buf params = {0};
    if (c->phase != PHASE_UP) {
        snprintf(why, sizeof why, "the MCP server %.64s is not running%s%s", name_of(c),
                 c->why[0] ? ": " : " yet", c->why);
        give_back(c, call, why);
        return;
    }
    int n_own = 0;
    for (int i = 0; i < c->n_waiting; i++)
        n_own += c->waiting[i].call && c->waiting[i].call->client == call->client;
    if (c->n_waiting >= MAX_WAITING || n_own >= MAX_EACH) {
        snprintf(why, sizeof why, "the MCP server %.64s has %d calls already, %d of this client",
                 name_of(c), c->n_waiting, n_own);
        give_back(c, call, why);
        return;
    }
    buf_adds(&params, "{\"name\":");
    jsonout_text(&params, call->tool);
    buf_adds(&params, ",\"arguments\":");
    buf_adds(&params, call->arguments);
    buf_addc(&params, '}');
    ask(c, ASK_CALL, "tools/call", params.p, call);
    buf_clear(&params);
}

/* Replies */

static void on_initialized(struct mcp_client *c, const json_t *result)
{
    const char *version = json_string_value(json_object_get(result, "protocolVersion"));
    const char *known = NULL;
    char why[200];
    for (size_t i = 0; version && i < sizeof versions / sizeof *versions; i++)
        known = !strcmp(version, versions[i]) ? versions[i] : known;
    if (!known) {
        snprintf(why, sizeof why, "it speaks version '%.40s' of the protocol, which Steel does not",
                 version ? version : "?");
        fail(c, why);
        return;
    }
    c->link->f->ready(c->link, known);
    notify(c, "notifications/initialized", NULL);
    c->has_tools =
        json_is_object(json_object_get(json_object_get(result, "capabilities"), "tools"));
    if (c->phase != PHASE_CONNECTING)
        return;
    if (c->has_tools) {
        list_tools(c, NULL);
    } else {
        c->phase = PHASE_UP;
        c->up_ns = clock_ns();
        c->changed = true;
        c->why[0] = 0;
        log_line(LOG_WARN, "mcp: a server has no tools", LOG_TEXT("server", name_of(c)));
    }
}

static void on_listed(struct mcp_client *c, const json_t *result)
{
    char *cursor;
    struct error err = {0};
    if (!mcp_tools_read(result, &c->listing, &cursor, &err)) {
        fail(c, err.msg);
        return;
    }
    bool more = cursor && ++c->n_pages < MAX_PAGES && c->listing.n < MCP_MAX_TOOLS;
    if (more)
        list_tools(c, cursor);
    mem_free(cursor);
    if (more)
        return;
    mcp_tools_clear(&c->tools);
    c->tools = c->listing;
    c->listing = (struct mcp_tools){0};
    c->is_listing = false;
    c->changed = true;
    c->why[0] = 0;
    if (c->phase == PHASE_CONNECTING) {
        c->phase = PHASE_UP;
        c->up_ns = clock_ns();
    }
    log_line(LOG_INFO, "mcp: a server's tools", LOG_TEXT("server", name_of(c)),
             LOG_NUM("tools", c->tools.n));
    if (c->tools.n_dropped)
        log_line(LOG_WARN, "mcp: tools are left out", LOG_TEXT("server", name_of(c)),
                 LOG_NUM("tools", c->tools.n_dropped),
                 LOG_TEXT("why", "too many or too large, or without a name and inputSchema"));
}

static void on_reply(struct mcp_client *c, const struct mcp_message *m)
{
    int i = 0;
    while (i < c->n_waiting && c->waiting[i].id != m->id)
        i++;
    if (i == c->n_waiting) {
        c->n_unasked++;
        return;
    }
    struct waiting w = take(c, i);
    char why[MCP_MAX_ERROR + 100];
    snprintf(why, sizeof why, "%s: %.*s", w.ask == ASK_INITIALIZE ? "initialize" : "tools/list",
             MCP_MAX_ERROR, m->error);
    if (w.ask == ASK_CALL && m->kind == MCP_RESULT) {
        mcp_result_read(m->result, &w.call->text, &w.call->is_error);
        give_back(c, w.call, NULL);
    } else if (w.ask == ASK_CALL) {
        give_back(c, w.call, m->error);
    } else if (m->kind == MCP_ERROR) {
        fail(c, why);
    } else if (w.ask == ASK_INITIALIZE) {
        on_initialized(c, m->result);
    } else {
        on_listed(c, m->result);
    }
}

/* Of the server's own requests only ping is answered; others get an error. */
static void on_request(struct mcp_client *c, const struct mcp_message *m)
{
    struct buf b = {0};
    buf_adds(&b, "{\"jsonrpc\":\"2.0\",\"id\":");
    jsonout_value(&b, m->request_id);
    buf_adds(&b, !strcmp(m->method, "ping") ? ",\"result\":{}}"
                                            : ",\"error\":{\"code\":-32601,\"message\":"
                                              "\"Method not found: Steel offers tools only\"}}");
    send_buf(c, &b, -1);
}

static void on_one(struct mcp_client *c, const json_t *v)
{
    struct mcp_message m;
    mcp_message_read(v, &m);
    c->n_unasked += m.kind < MCP_RESULT;
    switch (m.kind) {
    case MCP_RESULT:
    case MCP_ERROR:
        on_reply(c, &m);
        break;
    case MCP_REQUEST:
        on_request(c, &m);
        break;
    case MCP_NOTIFICATION:
        c->relist |= !strcmp(m.method, "notifications/tools/list_changed");
        break;
    case MCP_INVALID:
        break;
    }
}

static bool is_open(const struct mcp_client *c)
{
    return c->link && (c->phase == PHASE_CONNECTING || c->phase == PHASE_UP);
}

static void on_message(void *user, const char *text, size_t n)
{
    struct mcp_client *c = user;
    struct error err = {0};
    size_t i;
    json_t *one, *v = is_open(c) ? mcp_parse(text, n, &err) : NULL;
    if (!v && is_open(c)) {
        if (!c->n_unasked) /* once per window: the server must not fill the log */
            log_line(LOG_WARN, "mcp: a message is left out", LOG_TEXT("server", name_of(c)),
                     LOG_TEXT("why", err.msg));
        c->n_unasked++;
    }
    if (json_is_array(v)) {
        json_array_foreach(v, i, one)
        {
            if (is_open(c) && c->n_unasked <= WINDOW_UNASKED)
                on_one(c, one);
        }
    } else if (v) {
        on_one(c, v);
    }
    json_decref(v);
    if (c->n_unasked > WINDOW_UNASKED)
        fail(c, "it floods Steel with messages");
}

static void on_failed(void *user, int64_t id, const char *why)
{
    struct mcp_client *c = user;
    for (int i = 0; i < c->n_waiting; i++)
        if (c->waiting[i].id == id) {
            struct waiting w = take(c, i);
            if (w.call)
                give_back(c, w.call, why);
            else
                fail(c, why);
            return;
        }
}

static void on_closed(void *user, const char *why)
{
    fail(user, why);
}

/* Time */

static void connect_link(struct mcp_client *c)
{
    struct error err = {0};
    struct mcp_link_handler h = {
        .message = on_message, .failed = on_failed, .closed = on_closed, .user = c};
    struct buf params = {0};
    c->phase = PHASE_CONNECTING;
    c->n_unasked = 0;
    c->changed = true;
    c->link = c->opt.config->command ? mcp_stdio_open(c->opt.config, &h, &err)
                                     : mcp_http_open(c->opt.config, c->opt.multi, &h);
    if (!c->link) {
        fail(c, err.msg);
        return;
    }
    buf_addf(&params,
             "{\"protocolVersion\":\"%s\",\"capabilities\":{},\"clientInfo\":{\"name\":\"steel\","
             "\"version\":\"%s\"}}",
             versions[0], version_number());
    ask(c, ASK_INITIALIZE, "initialize", params.p, NULL);
    buf_clear(&params);
}

/* Cancels a call at the server. */
static void abandon(struct mcp_client *c, int64_t id, const char *reason)
{
    char params[100];
    snprintf(params, sizeof params, "{\"requestId\":%lld,\"reason\":\"%s\"}", (long long)id,
             reason);
    c->link->f->drop(c->link, id);
    notify(c, "notifications/cancelled", params);
}

static void check_waiting(struct mcp_client *c, int64_t now)
{
    char why[200];
    for (int i = 0; i < c->n_waiting && is_open(c);) {
        struct waiting *w = &c->waiting[i];
        bool cancelled = w->call && atomic_load(&w->call->cancelled);
        if (!cancelled && now < w->deadline) {
            i++;
            continue;
        }
        struct waiting one = take(c, i);
        if (one.call) {
            snprintf(why, sizeof why, "the MCP server %.64s did not reply within %d s", name_of(c),
                     c->opt.call_s);
            give_back(c, one.call, cancelled ? "cancelled" : why);
            abandon(c, one.id, cancelled ? "cancelled" : "timeout");
        } else {
            fail(c, one.ask == ASK_INITIALIZE ? "it did not reply to initialize in time"
                                              : "it did not reply to tools/list in time");
        }
    }
}

int mcp_client_turn(struct mcp_client *c, int64_t now)
{
    if (c->phase == PHASE_DOWN && !c->stopping && now >= c->retry_ns)
        connect_link(c);
    if (now - c->window_ns > WINDOW_S * NS) {
        c->window_ns = now;
        c->n_unasked = 0;
    }
    if (c->link)
        c->link->f->service(c->link, now);
    check_waiting(c, now);
    if (c->relist && !c->is_listing && c->phase == PHASE_UP && c->has_tools)
        list_tools(c, NULL);
    if (c->phase == PHASE_ENDING && (!c->link || c->link->f->stopped(c->link, now))) {
        if (c->link)
            c->link->f->free(c->link);
        c->link = NULL;
        c->phase = PHASE_DOWN;
    }
    if ((c->link && c->link->soon) || c->phase == PHASE_ENDING)
        return 10;
    return c->n_waiting || c->phase == PHASE_DOWN ? 100 : 1000;
}

/* The owner's view */

struct mcp_client *mcp_client_new(const struct mcp_client_options *opt)
{
    struct mcp_client *c = mem_zalloc(1, sizeof *c);
    c->opt = *opt;
    c->changed = true;
    c->window_ns = clock_ns();
    return c;
}

void mcp_client_free(struct mcp_client *c)
{
    if (c->link)
        c->link->f->free(c->link);
    mcp_tools_clear(&c->tools);
    mcp_tools_clear(&c->listing);
    mem_free(c->waiting);
    mem_free(c);
}

int mcp_client_fds(struct mcp_client *c, struct pollfd fds[MCP_LINK_FDS])
{
    return c->link ? c->link->f->fds(c->link, fds) : 0;
}

void mcp_client_stop(struct mcp_client *c, int64_t now)
{
    c->stopping = true;
    fail_all(c, "the server is shutting down");
    if (is_open(c)) {
        c->phase = PHASE_ENDING;
        c->link->f->stop(c->link, now);
    }
}

bool mcp_client_stopped(struct mcp_client *c, int64_t now)
{
    mcp_client_turn(c, now);
    return c->phase == PHASE_DOWN;
}

bool mcp_client_changed(const struct mcp_client *c)
{
    return c->changed;
}

void mcp_client_describe(struct mcp_client *c, struct mcp_server *out)
{
    bool down = c->phase == PHASE_DOWN || c->phase == PHASE_ENDING || c->why[0];
    *out = (struct mcp_server){.name = mem_strdup(name_of(c))};
    out->state = c->phase == PHASE_UP ? MCP_RUNNING : down ? MCP_FAILED : MCP_STARTING;
    out->error = out->state == MCP_FAILED ? mem_strdup(c->why) : NULL;
    out->tools.v = mem_zalloc((size_t)c->tools.n + 1, sizeof *out->tools.v);
    for (int i = 0; i < c->tools.n; i++)
        out->tools.v[out->tools.n++] =
            (struct mcp_tool){.name = mem_strdup(c->tools.v[i].name),
                              .description = mem_strdup(c->tools.v[i].description),
                              .parameters = mem_strdup(c->tools.v[i].parameters),
                              .read_only = c->tools.v[i].read_only};
    c->changed = false;
}
