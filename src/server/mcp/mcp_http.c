/*
 * An MCP server that is reached over HTTP (the transport "streamable HTTP"): every message is a POST,
 * whose response is a JSON message or an event stream of messages. One GET is kept open for messages
 * that the server sends of its own accord, if it has such a stream. Redirects are not followed: the
 * configured headers may be secrets. A link whose session the server has forgotten is closed.
 */
#include "server/mcp/mcp_link.h"
#include "base/curl.h"
#include "base/mem.h"
#include "server/mcp/mcp_message.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

enum {
    CONNECT_S = 10,
    NOTIFY_S = 10,       /* for a message without a reply */
    DELETE_MS = 400,     /* for the request that ends the session */
    MAX_TRANSFERS = 300, /* at a time */
    MAX_SESSION = 1000,  /* bytes of a session's id */
    STREAM_MS = 2000,    /* before the stream of the GET is opened again */
};

struct http_transfer {
    struct http_transfer *next;
    struct http_link *l;
    CURL *easy;
    struct curl_slist *headers;
    char *body; /* owned; the message that is sent */
    int64_t id; /* of the request in it, or -1 */
    bool is_stream, is_delete;
    bool begun, done, dropped;
    CURLcode result;
    bool events, json; /* the response's type */
    bool too_large;
    struct buf text;    /* a response that is JSON, or the beginning of an error's text */
    struct mcp_sse sse; /* a response that is an event stream */
    char error[CURL_ERROR_SIZE];
};

struct http_link {
    struct mcp_link link;
    CURLM *multi;
    struct http_transfer *transfers; /* the oldest first */
    int n_transfers;
    char *session; /* of Mcp-Session-Id; owned; NULL = none */
    char version[32];
    bool closed, may_stream, streaming;
    bool says_goodbye; /* ends the session with a DELETE */
    int64_t stream_ns; /* when the GET may be sent again */
    int64_t stop_ns;
};

static long status_of(const struct http_transfer *t)
{
    long status = 0;
    curl.easy_getinfo(t->easy, CURLINFO_RESPONSE_CODE, &status);
    return status;
}

static void say_closed(struct http_link *l, const char *why)
{
    if (!l->closed && !l->stop_ns) {
        l->closed = true;
        l->link.h.closed(l->link.h.user, why);
    }
}

/* Responses */

/* Only collects: libcurl allows no new transfers inside its callbacks. */
static size_t on_body(char *p, size_t size, size_t n, void *arg)
{
    struct http_transfer *t = arg;
    size_t len = size * n, most = t->json || t->events ? MCP_MAX_MESSAGE : 4096;
    t->too_large = (t->json || t->events) && t->text.len + len > most;
    if (t->too_large)
        return 0;
    if (t->text.len < most)
        buf_add(&t->text, p, len < most - t->text.len ? len : most - t->text.len);
    return len;
}

static void on_event(void *arg, const char *data, size_t n)
{
    struct http_transfer *t = arg;
    if (!t->l->closed && !t->dropped && n)
        t->l->link.h.message(t->l->link.h.user, data, n);
}

/* Delivers the events that have arrived. */
static void feed(struct http_transfer *t)
{
    if (!t->events || !t->text.len)
        return;
    if (!mcp_sse_feed(&t->sse, t->text.p, t->text.len, on_event, t)) {
        t->too_large = t->done = true;
        t->result = CURLE_WRITE_ERROR;
    }
    buf_reset(&t->text);
}

/* The value of a header line, or NULL if it has another name. */
static const char *value_of(const char *line, size_t n, const char *name, size_t *len)
{
    size_t k = strlen(name);
    if (n <= k || line[k] != ':' || strncasecmp(line, name, k) != 0)
        return NULL;
    const char *p = line + k + 1, *end = line + n;
    while (p < end && (*p == ' ' || *p == '\t'))
        p++;
    while (end > p && (end[-1] == '\r' || end[-1] == '\n' || end[-1] == ' '))
        end--;
    *len = (size_t)(end - p);
    return p;
}

static bool is_type(const char *value, size_t n, const char *type)
{
    size_t k = strlen(type);
    return n >= k && !strncasecmp(value, type, k) && (n == k || strchr("; \t", value[k]));
}

static size_t on_header(char *p, size_t size, size_t n, void *arg)
{
    struct http_transfer *t = arg;
    size_t len = size * n, k;
    const char *v;
    long status = status_of(t);
    bool ok = status >= 200 && status < 300;
    if (ok && (v = value_of(p, len, "Content-Type", &k))) {
        t->events = is_type(v, k, "text/event-stream");
        t->json = is_type(v, k, "application/json");
    } else if (ok && !t->l->session && (v = value_of(p, len, "Mcp-Session-Id", &k)) && k &&
               k <= MAX_SESSION && !memchr(v, 0, k)) {
        t->l->session = mem_strndup(v, k);
    }
    return len;
}

/* Requests */

static void add_header(struct http_transfer *t, const char *name, const char *value)
{
    struct buf line = {0};
    buf_addf(&line, *value ? "%s: %s" : "%s;", name, value);
    struct curl_slist *more = curl.slist_append(t->headers, line.p);
    t->headers = more ? more : t->headers;
    buf_clear(&line);
}

static void add_headers(struct http_transfer *t, const char *accept)
{
    const struct http_link *l = t->l;
    const struct mcp_server_config *c = l->link.config;
    if (accept)
        add_header(t, "Accept", accept);
    if (t->body)
        add_header(t, "Content-Type", "application/json");
    if (l->session)
        add_header(t, "Mcp-Session-Id", l->session);
    if (l->version[0])
        add_header(t, "MCP-Protocol-Version", l->version);
    for (int i = 0; i < c->n_pairs; i++)
        add_header(t, c->pairs[i].name, c->pairs[i].value);
    struct curl_slist *more = curl.slist_append(t->headers, "Expect:"); /* no 100-continue */
    t->headers = more ? more : t->headers;
}

static void free_transfer(struct http_transfer *t)
{
    struct http_link *l = t->l;
    struct http_transfer **at = &l->transfers;
    while (*at && *at != t)
        at = &(*at)->next;
    if (*at) {
        *at = t->next;
        l->n_transfers--;
    }
    if (t->begun)
        curl.multi_remove_handle(l->multi, t->easy);
    if (t->easy)
        curl.easy_cleanup(t->easy);
    curl.slist_free_all(t->headers);
    mem_free(t->body);
    buf_clear(&t->text);
    mcp_sse_clear(&t->sse);
    mem_free(t);
}

static bool begin(struct http_link *l, const char *method, const char *text, size_t n, int64_t id)
{
    struct http_transfer *t = mem_zalloc(1, sizeof *t);
    t->l = l;
    t->id = id;
    t->body = text ? mem_strndup(text, n) : NULL;
    t->is_stream = !strcmp(method, "GET");
    t->is_delete = !strcmp(method, "DELETE");
    add_headers(t, text           ? "application/json, text/event-stream"
                   : t->is_stream ? "text/event-stream"
                                  : NULL);
    CURL *h = t->easy = curl.easy_init();
    bool ok = h && curl.easy_setopt(h, CURLOPT_URL, l->link.config->url) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_FOLLOWLOCATION, 0L) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_S) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_TCP_KEEPALIVE, 1L) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_USERAGENT, "steel") == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_HTTPHEADER, t->headers) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_ERRORBUFFER, t->error) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_WRITEFUNCTION, on_body) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_WRITEDATA, t) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_HEADERFUNCTION, on_header) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_HEADERDATA, t) == CURLE_OK &&
              curl.easy_setopt(h, CURLOPT_PRIVATE, t) == CURLE_OK;
    if (ok && text)
        ok = curl.easy_setopt(h, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)n) == CURLE_OK &&
             curl.easy_setopt(h, CURLOPT_POSTFIELDS, t->body) == CURLE_OK;
    else if (ok && t->is_delete)
        ok = curl.easy_setopt(h, CURLOPT_CUSTOMREQUEST, "DELETE") == CURLE_OK &&
             curl.easy_setopt(h, CURLOPT_TIMEOUT_MS, (long)DELETE_MS) == CURLE_OK;
    if (ok && text && id < 0)
        ok = curl.easy_setopt(h, CURLOPT_TIMEOUT, (long)NOTIFY_S) == CURLE_OK;
    struct http_transfer **at = &l->transfers;
    while (*at)
        at = &(*at)->next;
    *at = t;
    l->n_transfers++;
    l->link.soon = true; /* `service` starts it */
    if (!ok)
        free_transfer(t);
    return ok;
}

/* Begins transfers, in order: a message without a reply, such as notifications/initialized, must have arrived before the
 * next one is sent. False: libcurl does not take one. */
static bool begin_transfers(struct http_link *l)
{
    for (struct http_transfer *t = l->transfers; t; t = t->next) {
        if (!t->begun)
            t->begun = curl.multi_add_handle(l->multi, t->easy) == CURLM_OK;
        if (!t->begun)
            return false;
        if (t->body && t->id < 0)
            break;
    }
    return true;
}

static bool send_text(struct mcp_link *link, const char *text, size_t n, int64_t id)
{
    struct http_link *l = (struct http_link *)link;
    return l->n_transfers < MAX_TRANSFERS && begin(l, "POST", text, n, id);
}

static void drop(struct mcp_link *link, int64_t id)
{
    struct http_link *l = (struct http_link *)link;
    for (struct http_transfer *t = l->transfers; t; t = t->next)
        t->dropped |= t->id == id && id >= 0;
    link->soon = true; /* `service` ends them */
}

static void ready(struct mcp_link *link, const char *version)
{
    struct http_link *l = (struct http_link *)link;
    snprintf(l->version, sizeof l->version, "%s", version);
    l->may_stream = true;
}

void mcp_http_done(CURL *easy, CURLcode result)
{
    char *p = NULL;
    curl.easy_getinfo(easy, CURLINFO_PRIVATE, &p);
    struct http_transfer *t = (struct http_transfer *)(void *)p;
    t->done = true;
    t->result = result;
}

/* Why a transfer yielded no message. */
static void explain(const struct http_transfer *t, long status, char why[300])
{
    if (t->too_large)
        snprintf(why, 300, "a message has more than %d bytes", MCP_MAX_MESSAGE);
    else if (t->result != CURLE_OK)
        snprintf(why, 300, "%.280s", t->error[0] ? t->error : curl.easy_strerror(t->result));
    else if (status >= 300 && status < 400)
        snprintf(why, 300,
                 "HTTP status %ld: redirects are not followed, so url must be the final one",
                 status);
    else if (status >= 300)
        snprintf(why, 300, "HTTP status %ld%s%.200s", status, t->text.len ? ": " : "",
                 t->text.len ? t->text.p : "");
    else
        snprintf(why, 300, "the response has no reply");
}

static void finish_stream(struct http_link *l, struct http_transfer *t, long status, int64_t now_ns)
{
    l->streaming = false;
    l->may_stream = status == 200 && t->events; /* 405: the server has none */
    l->stream_ns = now_ns + (int64_t)STREAM_MS * 1000000;
}

static void finish(struct http_link *l, struct http_transfer *t, int64_t now_ns)
{
    long status = status_of(t);
    char why[300];
    bool ok = t->result == CURLE_OK && status >= 200 && status < 300;
    if (t->is_stream)
        finish_stream(l, t, status, now_ns);
    if (t->is_stream || t->is_delete || t->dropped || l->closed)
        return;
    if (ok && t->json && t->text.len)
        l->link.h.message(l->link.h.user, t->text.p, t->text.len);
    if (l->closed)
        return;
    explain(t, status, why);
    if (status == 404 && l->session)
        say_closed(l, "the server has forgotten the session");
    else if (t->result == CURLE_COULDNT_CONNECT || t->result == CURLE_COULDNT_RESOLVE_HOST)
        say_closed(l, why);
    else if (t->id >= 0) /* ignored if the reply has come */
        l->link.h.failed(l->link.h.user, t->id, why);
}

static void service(struct mcp_link *link, int64_t now_ns)
{
    struct http_link *l = (struct http_link *)link;
    if (l->may_stream && !l->streaming && !l->stop_ns && !l->closed && now_ns >= l->stream_ns)
        l->streaming = begin(l, "GET", NULL, 0, -1);
    link->soon = false;
    for (struct http_transfer *t = l->transfers, *next; t; t = next) {
        next = t->next;
        feed(t);
        if (!t->done && !t->dropped)
            continue;
        if (t->done)
            finish(l, t, now_ns);
        next = t->next; /* a handler may have sent something */
        free_transfer(t);
    }
    if (!begin_transfers(l))
        say_closed(l, "libcurl cannot start a transfer");
}

static int fds(struct mcp_link *link, struct pollfd *out)
{
    (void)link, (void)out;
    return 0; /* libcurl has them */
}

/* Frees no transfers, since a handler may call it: `service` does. */
static void stop(struct mcp_link *link, int64_t now_ns)
{
    struct http_link *l = (struct http_link *)link;
    l->stop_ns = now_ns;
    link->soon = true;
    for (struct http_transfer *t = l->transfers; t; t = t->next)
        t->dropped = true;
    l->says_goodbye = l->session && !l->closed;
}

static bool stopped(struct mcp_link *link, int64_t now_ns)
{
    struct http_link *l = (struct http_link *)link;
    service(link, now_ns);
    if (l->says_goodbye && begin(l, "DELETE", NULL, 0, -1) && !begin_transfers(l))
        free_transfer(l->transfers);
    l->says_goodbye = false;
    return !l->transfers;
}

static void free_link(struct mcp_link *link)
{
    struct http_link *l = (struct http_link *)link;
    while (l->transfers)
        free_transfer(l->transfers);
    mem_free(l->session);
    mem_free(l);
}

static const struct mcp_link_functions functions = {
    .send = send_text,
    .drop = drop,
    .ready = ready,
    .fds = fds,
    .service = service,
    .stop = stop,
    .stopped = stopped,
    .free = free_link,
};

struct mcp_link *mcp_http_open(const struct mcp_server_config *c, CURLM *multi,
                               const struct mcp_link_handler *h)
{
    struct http_link *l = mem_zalloc(1, sizeof *l);
    l->link = (struct mcp_link){.f = &functions, .config = c, .h = *h};
    l->multi = multi;
    return &l->link;
}
