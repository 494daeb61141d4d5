/* Connections to a server. See the invariants in upstream.h. */
#include "route/upstream.h"
#include "base/mem.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/bufferevent_ssl.h>
#include <event2/dns.h>
#include <event2/event.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

enum exchange_state { EXCHANGE_CONNECTING, EXCHANGE_SENT, EXCHANGE_READING, EXCHANGE_POOLED };

/* A connection, and its request unless it is idle in the pool. */
struct upstream_exchange {
    struct upstream_exchange *prev, *next; /* in up->busy or up->pool */
    struct upstream *up;
    struct bufferevent *bev;
    struct event *timer;
    enum exchange_state state;
    bool reused;     /* it has served requests before */
    bool single_use; /* it is not returned to the pool */
    bool no_sock;    /* connecting failed at once; the timer, already active, reports it */
    bool paused, eof;
    bool entered; /* inside a head or data callback */
    bool over;    /* free it when that callback returns */
    struct http_response response;
    int answer_s;
    const struct upstream_handler *handler;
    void *user;
};

struct upstream {
    struct upstream_url url;
    struct upstream_options opt;
    struct upstream_exchange *busy, *pool;
    int n_busy, n_pooled;
    struct buf piece; /* of a response body */
};

struct upstream_body *upstream_body_new(char *p, size_t n)
{
    struct upstream_body *b = mem_alloc(sizeof *b);
    *b = (struct upstream_body){.p = p, .n = n, .refs = 1};
    return b;
}

void upstream_body_release(struct upstream_body *b)
{
    if (!b || --b->refs)
        return;
    mem_free(b->p);
    mem_free(b);
}

static void release_reference(const void *data, size_t n, void *arg)
{
    (void)data, (void)n;
    upstream_body_release(arg);
}

static bool parse_port(const char *p, int *port)
{
    int v = 0;
    size_t n = strlen(p);
    if (n < 1 || n > 5 || strspn(p, "0123456789") != n)
        return false;
    for (; *p; p++)
        v = v * 10 + (*p - '0');
    *port = v;
    return v > 0 && v < 65536;
}

bool upstream_url_parse(const char *text, struct upstream_url *out, struct error *err)
{
    memset(out, 0, sizeof *out);
    out->tls = !strncasecmp(text, "https://", 8);
    if (!out->tls && strncasecmp(text, "http://", 7))
        return error_set(err, "%s: must begin with http:// or https://", text);
    const char *p = text + (out->tls ? 8 : 7);
    const char *slash = p + strcspn(p, "/");
    for (const char *c = text; *c; c++)
        if ((unsigned char)*c <= 32 || *c == 127 || strchr("?#@\"\\", *c))
            return error_set(err, "%s: '%c' is not allowed in a URL", text, *c > 32 ? *c : ' ');
    char where[280];
    if ((size_t)(slash - p) >= sizeof where)
        return error_set(err, "%s: the name is too long", text);
    snprintf(where, sizeof where, "%.*s", (int)(slash - p), p);
    char *host = where, *port = strrchr(where, ':');
    if (*host == '[') { /* an IPv6 address */
        char *end = strchr(++host, ']');
        if (!end || (end[1] && end[1] != ':'))
            return error_set(err, "%s: malformed address", text);
        port = end[1] ? end + 1 : NULL;
        *end = 0;
    }
    if (port)
        *port++ = 0;
    out->port = out->tls ? 443 : 80;
    if (port && !parse_port(port, &out->port))
        return error_set(err, "%s: '%s' is no port", text, port);
    if (!*host || strlen(host) >= sizeof out->host)
        return error_set(err, "%s: no host", text);
    memcpy(out->host, host, strlen(host) + 1);
    size_t n = strlen(slash);
    while (n && slash[n - 1] == '/')
        n--;
    if (n >= sizeof out->path)
        return error_set(err, "%s: the path is too long", text);
    snprintf(out->path, sizeof out->path, "%.*s", (int)n, slash);
    snprintf(out->name, sizeof out->name, strchr(host, ':') ? "[%s]:%d" : "%s:%d", out->host,
             out->port);
    return true;
}

/* Connections */

static void set_timer(struct upstream_exchange *c, int seconds)
{
    if (seconds <= 0)
        event_del(c->timer);
    else if (event_add(c->timer, &(struct timeval){seconds, 0}))
        event_active(c->timer, EV_TIMEOUT, 0); /* no memory: treated as a timeout */
}

static void unlink_exchange(struct upstream_exchange *c)
{
    struct upstream *u = c->up;
    bool pooled = c->state == EXCHANGE_POOLED;
    *(c->prev ? &c->prev->next : pooled ? &u->pool : &u->busy) = c->next;
    if (c->next)
        c->next->prev = c->prev;
    c->prev = c->next = NULL;
    --*(pooled ? &u->n_pooled : &u->n_busy);
}

static void link_call(struct upstream_exchange *c)
{
    struct upstream *u = c->up;
    bool pooled = c->state == EXCHANGE_POOLED;
    struct upstream_exchange **list = pooled ? &u->pool : &u->busy;
    c->next = *list;
    if (c->next)
        c->next->prev = c;
    *list = c;
    ++*(pooled ? &u->n_pooled : &u->n_busy);
}

static void call_free(struct upstream_exchange *c)
{
    unlink_exchange(c);
    bufferevent_free(c->bev);
    event_free(c->timer);
    http_response_clear(&c->response);
    mem_free(c);
}

/* Closes and frees the connection, after the running callback if there is one. */
static void drop(struct upstream_exchange *c)
{
    if (!c->entered) {
        call_free(c);
        return;
    }
    c->over = true;
    event_del(c->timer);
    bufferevent_disable(c->bev, EV_READ | EV_WRITE);
}

static void fail(struct upstream_exchange *c, enum upstream_failure kind, const char *why)
{
    const struct upstream_handler *h = c->handler;
    void *user = c->user;
    char text[256]; /* `why` may point into the exchange */
    snprintf(text, sizeof text, "%s", why);
    drop(c);
    h->failed(user, kind, text);
}

/* The response is complete. */
static void finish(struct upstream_exchange *c)
{
    const struct upstream_handler *h = c->handler;
    void *user = c->user;
    struct upstream *u = c->up;
    bool keep = !c->single_use && http_response_keeps_alive(&c->response) && !c->eof &&
                u->n_pooled < u->opt.max_idle &&
                evbuffer_get_length(bufferevent_get_output(c->bev)) == 0 &&
                evbuffer_get_length(bufferevent_get_input(c->bev)) == 0;
    if (keep) {
        unlink_exchange(c);
        c->state = EXCHANGE_POOLED;
        link_call(c);
        http_response_clear(&c->response);
        c->reused = true;
        set_timer(c, u->opt.pool_s);
    } else {
        call_free(c);
    }
    h->end(user);
}

static void on_closed(struct upstream_exchange *c, bool reset, const char *reason)
{
    const char *why = "";
    char text[200];
    bool silent = c->state == EXCHANGE_SENT && !c->response.text.len && !c->response.n_interim;
    if (!reset && http_response_close(&c->response, &why) == RESPONSE_END) {
        finish(c);
        return;
    }
    if (reset) {
        snprintf(text, sizeof text, "the connection failed: %s", reason);
        why = text;
    }
    fail(c, !silent ? UPSTREAM_BAD : c->reused ? UPSTREAM_STALE : UPSTREAM_CLOSED, why);
}

/* False: the exchange has ended or is paused. */
static bool take_piece(struct upstream_exchange *c, struct evbuffer *in, bool *more)
{
    size_t n = evbuffer_get_contiguous_space(in), used = 0;
    const char *why = "", *p = n ? (const char *)evbuffer_pullup(in, (ssize_t)n) : "";
    struct buf *piece = &c->up->piece;
    buf_reset(piece);
    enum http_response_result res = http_response_feed(&c->response, p, n, piece, &used, &why);
    *more = res != RESPONSE_MORE || evbuffer_get_length(in) > used;
    if (res == RESPONSE_BAD) {
        fail(c, UPSTREAM_BAD, why);
        return false;
    }
    evbuffer_drain(in, used);
    if (res == RESPONSE_END) {
        finish(c);
        return false;
    }
    if (res == RESPONSE_MORE)
        return true;
    c->entered = true;
    if (res == RESPONSE_HEAD) {
        c->state = EXCHANGE_READING;
        c->handler->head(c->user, &c->response.head);
    } else {
        c->handler->data(c->user, piece->p, piece->len);
    }
    c->entered = false;
    if (c->over)
        call_free(c);
    else
        return !c->paused;
    return false;
}

static void on_read(struct bufferevent *bev, void *arg)
{
    struct upstream_exchange *c = arg;
    struct evbuffer *in = bufferevent_get_input(bev);
    if (c->state == EXCHANGE_POOLED) { /* data without a request */
        call_free(c);
        return;
    }
    if (c->paused || c->state == EXCHANGE_CONNECTING)
        return;
    bool more = true;
    while (more)
        if (!take_piece(c, in, &more))
            return;
    if (c->eof)
        on_closed(c, false, "");
    else if (c->state == EXCHANGE_READING)
        set_timer(c, c->up->opt.idle_s);
}

static void describe(struct upstream_exchange *c, char *text, size_t size)
{
    int e = EVUTIL_SOCKET_ERROR(), dns = bufferevent_socket_get_dns_error(c->bev);
    unsigned long tls = c->up->url.tls ? bufferevent_get_openssl_error(c->bev) : 0;
    const char *reason = tls ? ERR_reason_error_string(tls) : NULL;
    if (dns)
        snprintf(text, size, "%s", evutil_gai_strerror(dns));
    else if (reason)
        snprintf(text, size, "%s", reason);
    else
        snprintf(text, size, "%s", e ? strerror(e) : "closed");
}

static void on_event(struct bufferevent *bev, short what, void *arg)
{
    struct upstream_exchange *c = arg;
    const struct upstream_options *o = &c->up->opt;
    char reason[128] = "", why[200];
    int e = EVUTIL_SOCKET_ERROR();
    if (what & BEV_EVENT_CONNECTED) {
        int one = 1;
        setsockopt(bufferevent_getfd(bev), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        c->state = EXCHANGE_SENT;
        set_timer(c, c->answer_s);
        bufferevent_set_timeouts(bev, NULL, &(struct timeval){o->write_s, 0});
        return;
    }
    if (c->state == EXCHANGE_POOLED) {
        call_free(c);
        return;
    }
    describe(c, reason, sizeof reason);
    if (c->state == EXCHANGE_CONNECTING) {
        snprintf(why, sizeof why, "no connection: %s", reason);
        bool ours = e == EMFILE || e == ENFILE || e == ENOMEM || e == ENOBUFS;
        fail(c,
             ours                ? UPSTREAM_NO_SOCKET
             : e == ECONNREFUSED ? UPSTREAM_REFUSED
                                 : UPSTREAM_UNREACHABLE,
             why);
    } else if (what & BEV_EVENT_TIMEOUT) {
        fail(c, UPSTREAM_SLOW, "it does not take the request");
    } else if ((what & BEV_EVENT_EOF) && c->paused) {
        c->eof = true; /* handled after the buffered data */
    } else {
        on_closed(c, !(what & BEV_EVENT_EOF), reason);
    }
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct upstream_exchange *c = arg;
    char why[96];
    switch (c->state) {
    case EXCHANGE_POOLED:
        call_free(c);
        break;
    case EXCHANGE_CONNECTING:
        snprintf(why, sizeof why, "no connection within %d s", c->up->opt.connect_s);
        fail(c, UPSTREAM_UNREACHABLE, c->no_sock ? "no connection" : why);
        break;
    case EXCHANGE_SENT:
        snprintf(why, sizeof why, "no response within %d s", c->answer_s);
        fail(c, UPSTREAM_SLOW, why);
        break;
    case EXCHANGE_READING:
        snprintf(why, sizeof why, "its response has stalled for %d s", c->up->opt.idle_s);
        fail(c, UPSTREAM_SLOW, why);
        break;
    }
}

static SSL *tls_new(struct upstream *u)
{
    SSL *ssl = SSL_new(u->opt.tls);
    unsigned char address[16];
    if (!ssl)
        return NULL;
    bool numeric = inet_pton(AF_INET, u->url.host, address) == 1 ||
                   inet_pton(AF_INET6, u->url.host, address) == 1;
    bool ok = numeric ? X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), u->url.host) == 1
                      : SSL_set1_host(ssl, u->url.host) == 1 &&
                            SSL_set_tlsext_host_name(ssl, u->url.host) == 1;
    if (ok)
        return ssl;
    SSL_free(ssl);
    return NULL;
}

/* Callbacks are deferred, so that none comes from inside upstream_start. */
static struct bufferevent *socket_new(struct upstream *u)
{
    const int flags = BEV_OPT_CLOSE_ON_FREE | BEV_OPT_DEFER_CALLBACKS;
    if (!u->url.tls)
        return bufferevent_socket_new(u->opt.base, -1, flags);
    SSL *ssl = tls_new(u);
    return ssl ? bufferevent_openssl_socket_new(u->opt.base, -1, ssl, BUFFEREVENT_SSL_CONNECTING,
                                                flags)
               : NULL;
}

static struct upstream_exchange *call_new(struct upstream *u)
{
    struct upstream_exchange *c = mem_ask(sizeof *c);
    if (!c)
        return NULL;
    memset(c, 0, sizeof *c);
    c->up = u;
    c->timer = evtimer_new(u->opt.base, on_timer, c);
    c->bev = c->timer ? socket_new(u) : NULL;
    if (!c->bev) {
        if (c->timer)
            event_free(c->timer);
        mem_free(c);
        return NULL;
    }
    c->state = EXCHANGE_CONNECTING;
    bufferevent_setcb(c->bev, on_read, NULL, on_event, c);
    bufferevent_setwatermark(c->bev, EV_READ, 0, UPSTREAM_AHEAD);
    link_call(c);
    return c;
}

static bool put_request(struct upstream_exchange *c, const struct upstream_request *r)
{
    struct evbuffer *out = bufferevent_get_output(c->bev);
    if (evbuffer_add(out, r->head, r->n_head))
        return false;
    if (!r->body || !r->body->n)
        return true;
    r->body->refs++;
    if (evbuffer_add_reference(out, r->body->p, r->body->n, release_reference, r->body) == 0)
        return true;
    r->body->refs--;
    return false;
}

struct upstream_exchange *upstream_start(struct upstream *u, const struct upstream_request *r,
                                         const struct upstream_handler *h, void *user)
{
    struct upstream_exchange *c = r->fresh ? NULL : u->pool;
    if (c) {
        unlink_exchange(c);
        c->state = EXCHANGE_SENT;
        link_call(c);
        set_timer(c, r->answer_s);
    } else {
        c = call_new(u);
        if (!c)
            return NULL;
        set_timer(c, u->opt.connect_s);
    }
    c->handler = h;
    c->user = user;
    c->answer_s = r->answer_s;
    c->single_use = r->fresh;
    c->response.head_request = r->head_request;
    if (!put_request(c, r) || bufferevent_enable(c->bev, EV_READ | EV_WRITE)) {
        call_free(c);
        return NULL;
    }
    if (c->state == EXCHANGE_CONNECTING &&
        bufferevent_socket_connect_hostname(c->bev, u->opt.dns, AF_UNSPEC, u->url.host,
                                            u->url.port)) {
        c->no_sock = true;
        event_active(c->timer, EV_TIMEOUT, 0);
    }
    return c;
}

void upstream_cancel(struct upstream_exchange *c)
{
    if (c)
        drop(c);
}

void upstream_pause(struct upstream_exchange *c)
{
    c->paused = true;
    bufferevent_disable(c->bev, EV_READ);
    event_del(c->timer);
}

void upstream_resume(struct upstream_exchange *c)
{
    if (!c->paused)
        return;
    c->paused = false;
    set_timer(c, c->up->opt.idle_s);
    bufferevent_enable(c->bev, EV_READ);
    if (!c->entered)
        bufferevent_trigger(c->bev, EV_READ, BEV_TRIG_DEFER_CALLBACKS);
}

struct upstream *upstream_new(const struct upstream_url *url, const struct upstream_options *opt)
{
    struct upstream *u = mem_zalloc(1, sizeof *u);
    u->url = *url;
    u->opt = *opt;
    return u;
}

void upstream_drop_pool(struct upstream *u)
{
    while (u->pool)
        call_free(u->pool);
}

void upstream_free(struct upstream *u)
{
    if (!u)
        return;
    CHECK(!u->busy, "an exchange with %s is in flight", u->url.name);
    upstream_drop_pool(u);
    buf_clear(&u->piece);
    mem_free(u);
}

int upstream_n_conns(const struct upstream *u)
{
    return u->n_busy + u->n_pooled;
}
