/* Connections. See the invariants in http.h. */
#include "server/http/http.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "server/http/forwarded.h"

#include <errno.h>
#include <event2/buffer.h>
#include <event2/bufferevent.h>
#include <event2/bufferevent_ssl.h>
#include <event2/event.h>
#include <event2/listener.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

enum {
    DRAINED = 16 << 10,    /* unsent bytes below which a stream continues */
    MAX_BEHIND = 64 << 10, /* unsent bytes of replies above which the next request waits */
    MAX_AHEAD = 64 << 10,  /* input kept while a reply is pending */
    LINGER_S = 2,          /* for a peer to read an early reply to an unfinished request */
    LINGER_BYTES = 64 << 20,
    DIRECT_BYTES = 1 << 20, /* of a body in one turn of the loop, read past libevent */
    OTHER_FILES = 128,      /* descriptors reserved for other uses */
};

enum conn_state { CONN_HEAD, CONN_BODY, CONN_BUSY, CONN_FLUSH, CONN_LINGER };

struct http_exchange {
    struct http_exchange *prev, *next; /* connections of the server */
    struct http *http;
    struct bufferevent *bev;
    struct event *timer;
    enum conn_state state;
    char address[48], peer[64], client[INET6_ADDRSTRLEN];
    uint64_t from; /* the key of the per-address connection count */
    char id[132];
    struct http_head head;
    struct http_chunks chunks;
    struct buf body;
    int64_t body_start_ns;
    size_t counted;           /* bytes of the body counted in http->buffered */
    struct evbuffer *headers; /* of the reply */
    bool started, streaming, chunked, keep_alive, head_only;
    bool unread; /* part of the request was not read: linger before closing */
    bool choked; /* a stream, or the next request, waits until the output is small */
    bool failed; /* its timer, already active, resets it */
    size_t discarded;
    void *user;
    void (*closed)(void *user), (*drained)(void *user);
};

struct http {
    struct event_base *base;
    struct http_options opt;
    struct evconnlistener *listener;
    struct event *retry; /* accepting again after running out of descriptors */
    SSL_CTX *tls;
    struct http_exchange *conns;
    int n_conns;
    uint64_t n_requests, id_secret;
    size_t buffered;
    bool draining;
};

static void conn_free(struct http_exchange *x)
{
    struct http *h = x->http;
    void (*closed)(void *) = x->closed;
    void *user = x->user;
    *(x->prev ? &x->prev->next : &h->conns) = x->next;
    if (x->next)
        x->next->prev = x->prev;
    h->n_conns--;
    http_body_done(x);
    bufferevent_free(x->bev);
    event_free(x->timer);
    evbuffer_free(x->headers);
    http_head_clear(&x->head);
    buf_clear(&x->body);
    mem_free(x);
    if (closed)
        closed(user);
}

/* Resets a connection later, from the loop, so that callers may still use x. Needs no memory. */
static void reset(struct http_exchange *x)
{
    if (x->failed)
        return;
    x->failed = true;
    struct linger now = {.l_onoff = 1};
    setsockopt(bufferevent_getfd(x->bev), SOL_SOCKET, SO_LINGER, &now, sizeof now);
    bufferevent_disable(x->bev, EV_READ | EV_WRITE);
    event_active(x->timer, EV_TIMEOUT, 0);
}

static void set_timer_ns(struct http_exchange *x, int64_t ns)
{
    if (x->failed)
        return;
    ns = ns > 1000 ? ns : 1000;
    if (event_add(x->timer, &(struct timeval){ns / 1000000000, ns % 1000000000 / 1000}))
        reset(x);
}

static void set_timer(struct http_exchange *x, int seconds)
{
    if (seconds > 0)
        set_timer_ns(x, (int64_t)seconds * 1000000000);
    else if (!x->failed)
        event_del(x->timer);
}

static void refuse(struct http_exchange *x, int status, const char *why)
{
    x->keep_alive = false;
    x->unread = true;
    x->state = CONN_BUSY;
    http_body_done(x);
    buf_clear(&x->body);
    x->http->opt.refuse(x->http->opt.arg, x, status, why);
}

static void on_timer(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct http_exchange *x = arg;
    if (!x->failed && ((x->state == CONN_HEAD && x->started) || x->state == CONN_BODY))
        refuse(x, 408, "the request did not arrive in time");
    else
        conn_free(x);
}

/* All is written: closes the connection, after lingering if the request was not read completely. */
static void finish_closing(struct http_exchange *x)
{
    if (x->http->tls) /* send close_notify, do not wait for the peer's */
        SSL_shutdown(bufferevent_openssl_get_ssl(x->bev));
    if (!x->unread || x->http->tls) {
        conn_free(x);
        return;
    }
    x->state = CONN_LINGER;
    shutdown(bufferevent_getfd(x->bev), SHUT_WR);
    evbuffer_drain(bufferevent_get_input(x->bev), SIZE_MAX);
    set_timer(x, LINGER_S);
}

/* The replies are written and no more follow. */
static void flush(struct http_exchange *x)
{
    x->state = CONN_FLUSH;
    set_timer(x, x->http->opt.write_s);
    if (http_unsent(x) == 0)
        finish_closing(x);
}

/* Waits for a request. The next pipelined one is parsed from the loop, to avoid recursion. */
static void wait_for_request(struct http_exchange *x)
{
    set_timer(x, x->http->opt.idle_s);
    if (evbuffer_get_length(bufferevent_get_input(x->bev)))
        bufferevent_trigger(x->bev, EV_READ, BEV_TRIG_DEFER_CALLBACKS);
}

static void next_request(struct http_exchange *x)
{
    x->closed = x->drained = NULL;
    x->user = NULL;
    if (x->failed)
        return;
    http_body_done(x);
    http_head_clear(&x->head);
    buf_clear(&x->body);
    evbuffer_drain(x->headers, SIZE_MAX);
    x->chunks = (struct http_chunks){0};
    x->started = x->streaming = x->choked = false;
    x->id[0] = 0;
    if (!x->keep_alive || x->http->draining) {
        flush(x);
        return;
    }
    x->state = CONN_HEAD;
    x->choked = http_unsent(x) > MAX_BEHIND;
    if (x->choked)
        set_timer(x, 0); /* the timeout of stuck output remains */
    else
        wait_for_request(x);
}

static void handle(struct http_exchange *x)
{
    x->state = CONN_BUSY;
    set_timer(x, 0);
    x->http->opt.handler(x->http->opt.arg, x);
}

/* Reserves n more bytes for the body; false: refused. */
static bool body_room(struct http_exchange *x, size_t n)
{
    struct http *h = x->http;
    size_t after = x->body.len + n;
    size_t counts = after > HTTP_SMALL_BODY ? after - HTTP_SMALL_BODY : 0;
    if (counts > x->counted && h->buffered + (counts - x->counted) > h->opt.max_buffered) {
        refuse(x, 503, "too many large requests are buffered (--max-buffered); try again later");
        return false;
    }
    if (!buf_try_reserve(&x->body, n)) {
        refuse(x, 503, "out of memory for the request; try again later");
        return false;
    }
    h->buffered += counts - x->counted;
    x->counted = counts;
    return true;
}

void http_body_done(struct http_exchange *x)
{
    x->http->buffered -= x->counted;
    x->counted = 0;
}

/* The timeout of the whole body: read_s plus its size at the minimum rate. */
static void set_body_timer(struct http_exchange *x)
{
    int64_t earned = (int64_t)x->body.len * (1000000000 / HTTP_MIN_RATE);
    int64_t until = x->body_start_ns + (int64_t)x->http->opt.read_s * 1000000000 + earned;
    set_timer_ns(x, until - clock_ns());
}

static void refuse_large(struct http_exchange *x)
{
    char why[128];
    size_t max = x->http->opt.max_body;
    if (max % (1 << 20))
        snprintf(why, sizeof why, "the request body is larger than %zu bytes (--max-body)", max);
    else
        snprintf(why, sizeof why, "the request body is larger than %zu MB (--max-body)", max >> 20);
    refuse(x, 413, why);
}

static void add_body(struct http_exchange *x, size_t n)
{
    x->body.len += n;
    x->body.p[x->body.len] = 0;
}

/* libevent takes 4 KB from a socket at a time. The rest of a long body that has arrived is read here. Ends and errors are
 * left for libevent to find. False: refused. */
static bool read_direct(struct http_exchange *x)
{
    int fd = bufferevent_getfd(x->bev), waiting = 0;
    for (size_t turn = 0; !x->http->tls && turn < DIRECT_BYTES; turn += (size_t)waiting) {
        size_t left = (size_t)x->head.length - x->body.len;
        if (!left || ioctl(fd, FIONREAD, &waiting) != 0 || waiting <= 0)
            break;
        size_t n = (size_t)waiting < left ? (size_t)waiting : left;
        if (!body_room(x, n))
            return false;
        ssize_t got = recv(fd, x->body.p + x->body.len, n, MSG_DONTWAIT);
        if (got <= 0)
            break;
        add_body(x, (size_t)got);
    }
    return true;
}

static void read_length(struct http_exchange *x, struct evbuffer *in)
{
    size_t have = evbuffer_get_length(in);
    size_t left = (size_t)x->head.length - x->body.len, n = have < left ? have : left;
    if (n) {
        if (!body_room(x, n))
            return;
        if (evbuffer_remove(in, x->body.p + x->body.len, n) != (int)n) {
            reset(x);
            return;
        }
        add_body(x, n);
    }
    if (n && n < left && !read_direct(x))
        return;
    if (x->body.len == (size_t)x->head.length)
        handle(x);
    else if (n)
        set_body_timer(x);
}

static void read_chunks(struct http_exchange *x, struct evbuffer *in)
{
    while (evbuffer_get_length(in)) {
        size_t n = evbuffer_get_contiguous_space(in), used = 0;
        n = n ? n : 1;
        if (!body_room(x, n))
            return;
        const char *p = (const char *)evbuffer_pullup(in, (ssize_t)n);
        if (!p) {
            reset(x);
            return;
        }
        enum http_chunks_result res =
            http_chunks_feed(&x->chunks, p, n, x->http->opt.max_body, &x->body, &used);
        evbuffer_drain(in, used);
        if (res == CHUNKS_MORE)
            continue;
        if (res == CHUNKS_DONE)
            handle(x);
        else if (res == CHUNKS_BAD)
            refuse(x, 400, "malformed chunked body");
        else
            refuse_large(x);
        return;
    }
    set_body_timer(x);
}

static void read_body(struct http_exchange *x)
{
    struct evbuffer *in = bufferevent_get_input(x->bev);
    if (x->head.chunked)
        read_chunks(x, in);
    else
        read_length(x, in);
}

/* The head is complete. It is admitted or refused before any of the body is buffered. */
static void begin_body(struct http_exchange *x)
{
    bool has_body = x->head.chunked || x->head.length > 0, keep_alive = x->keep_alive;
    if (x->head.length > 0 && (size_t)x->head.length > x->http->opt.max_body) {
        refuse_large(x);
        return;
    }
    x->state = CONN_BUSY;
    x->unread = has_body;
    x->keep_alive = keep_alive && !has_body; /* if admit replies */
    set_timer(x, 0);                         /* or will reply: the wait is not the peer's */
    if (!x->http->opt.admit(x->http->opt.arg, x))
        return;
    x->keep_alive = keep_alive;
    x->unread = false;
    x->state = CONN_BODY;
    x->body_start_ns = clock_ns();
    set_body_timer(x);
    static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
    if (x->head.expect_continue && has_body && bufferevent_write(x->bev, go_on, sizeof go_on - 1))
        reset(x);
    if (!x->failed)
        read_body(x);
}

/* Uses the client's id if it is safe in a header and in the log. */
static void set_id(struct http_exchange *x)
{
    static const char word[] =
        "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.:/+=@";
    const char *own = http_header(&x->head, "X-Request-Id");
    size_t n = own ? strlen(own) : 0;
    if (n && n <= 128 && strspn(own, word) == n)
        memcpy(x->id, own, n + 1);
    else
        snprintf(x->id, sizeof x->id, "req_%08llx%012llx",
                 (unsigned long long)(x->http->id_secret & 0xffffffff),
                 (unsigned long long)++x->http->n_requests);
}

static void read_head(struct http_exchange *x)
{
    struct evbuffer *in = bufferevent_get_input(x->bev);
    size_t have = evbuffer_get_length(in), blank = 0;
    char *start = (char *)evbuffer_pullup(in, -1);
    if (!start) {
        if (have)
            reset(x);
        return;
    }
    while (blank < have && (start[blank] == '\r' || start[blank] == '\n'))
        blank++; /* some clients send a blank line after a body */
    start += blank;
    have -= blank;
    if (have && !x->started) { /* the timeout is for the whole head */
        x->started = true;
        set_timer(x, x->http->opt.read_s);
    }
    size_t end = have ? http_head_end(start, have) : 0;
    if (!end || end > HTTP_MAX_HEAD) {
        if (have >= HTTP_MAX_HEAD)
            refuse(x, 431, "the request head is too large");
        else
            evbuffer_drain(in, blank);
        return;
    }
    const char *why;
    int status = http_head_parse(start, end, &x->head, &why);
    evbuffer_drain(in, blank + end);
    x->started = false;
    x->keep_alive = status == 0 && x->head.keep_alive;
    x->head_only = status == 0 && !strcmp(x->head.method, "HEAD");
    set_id(x);
    forwarded_client(x->http->opt.proxies, x->http->opt.n_proxies, x->address, &x->head, x->client);
    if (status)
        refuse(x, status, why);
    else
        begin_body(x);
}

static void discard(struct http_exchange *x, struct evbuffer *in)
{
    size_t n = evbuffer_get_length(in);
    evbuffer_drain(in, n);
    x->discarded += n;
    if (x->discarded > LINGER_BYTES)
        conn_free(x);
}

static void on_read(struct bufferevent *bev, void *arg)
{
    struct http_exchange *x = arg;
    struct evbuffer *in = bufferevent_get_input(bev);
    if (x->failed)
        return;
    if (x->state == CONN_HEAD && !x->choked) {
        read_head(x);
    } else if (x->state == CONN_BODY) {
        read_body(x);
    } else if (x->state == CONN_LINGER || x->state == CONN_FLUSH) {
        discard(x, in);
    } else if (x->unread || evbuffer_get_length(in) > MAX_AHEAD) {
        /* The socket is always read, so that a disconnect is noticed. */
        x->unread = true;
        x->keep_alive = false;
        if (x->state == CONN_HEAD)
            flush(x);
        discard(x, in);
    }
    /* else a pipelined request waits in the buffer */
}

static void on_write(struct bufferevent *bev, void *arg)
{
    struct http_exchange *x = arg;
    size_t left = evbuffer_get_length(bufferevent_get_output(bev));
    if (x->failed)
        return;
    if (x->state == CONN_FLUSH && left == 0) {
        finish_closing(x);
    } else if (x->state == CONN_BUSY && x->choked && left <= DRAINED) {
        x->choked = false;
        if (x->drained)
            x->drained(x->user);
    } else if (x->state == CONN_HEAD && x->choked) {
        x->choked = false;
        wait_for_request(x);
    }
}

static void on_event(struct bufferevent *bev, short what, void *arg)
{
    (void)bev;
    struct http_exchange *x = arg;
    if (what & BEV_EVENT_CONNECTED) /* TLS is up */
        return;
    /* A half-closed peer may still read a finished reply. */
    if ((what & BEV_EVENT_EOF) && x->state == CONN_FLUSH)
        return;
    conn_free(x);
}

static void set_socket_options(int fd)
{
    int one = 1, unsent = 128 << 10;
    /* A small kernel buffer: unsent data stays here, where small writes are merged. */
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &unsent, sizeof unsent);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    /* TCP keep-alive detects a vanished peer within a minute. */
    os_keep_alive(fd, 30, 10, 3);
}

static struct bufferevent *socket_new(struct http *h, evutil_socket_t fd)
{
    if (!h->tls)
        return bufferevent_socket_new(h->base, fd, BEV_OPT_CLOSE_ON_FREE);
    SSL *ssl = SSL_new(h->tls);
    struct bufferevent *bev =
        ssl ? bufferevent_openssl_socket_new(h->base, fd, ssl, BUFFEREVENT_SSL_ACCEPTING,
                                             BEV_OPT_CLOSE_ON_FREE | BEV_OPT_DEFER_CALLBACKS)
            : NULL;
    if (bev)
        bufferevent_openssl_set_allow_dirty_shutdown(bev, 1);
    return bev;
}

/* NULL: no memory; fd stays open. */
static struct http_exchange *conn_new(struct http *h, evutil_socket_t fd)
{
    struct http_exchange *x = mem_ask(sizeof *x);
    if (!x)
        return NULL;
    memset(x, 0, sizeof *x);
    x->http = h;
    x->timer = evtimer_new(h->base, on_timer, x);
    x->headers = evbuffer_new();
    x->bev = x->timer && x->headers ? socket_new(h, fd) : NULL;
    if (!x->bev) {
        if (x->timer)
            event_free(x->timer);
        if (x->headers)
            evbuffer_free(x->headers);
        mem_free(x);
        return NULL;
    }
    x->next = h->conns;
    if (x->next)
        x->next->prev = x;
    h->conns = x;
    h->n_conns++;
    bufferevent_setcb(x->bev, on_read, on_write, on_event, x);
    bufferevent_setwatermark(x->bev, EV_WRITE, DRAINED, 0);
    if (bufferevent_set_timeouts(x->bev, NULL, &(struct timeval){h->opt.write_s, 0}) ||
        bufferevent_enable(x->bev, EV_READ | EV_WRITE))
        reset(x);
    return x;
}

/* An address as a number. IPv6 addresses count by /64, which one client owns whole. */
static uint64_t address_key(const struct sockaddr *addr)
{
    uint64_t key = 0;
    if (addr->sa_family == AF_INET) {
        key = ((const struct sockaddr_in *)addr)->sin_addr.s_addr;
    } else if (addr->sa_family == AF_INET6) {
        const struct in6_addr *a = &((const struct sockaddr_in6 *)addr)->sin6_addr;
        if (IN6_IS_ADDR_V4MAPPED(a))
            memcpy(&key, a->s6_addr + 12, 4);
        else
            memcpy(&key, a->s6_addr, 8);
    }
    return key;
}

/* Whether this address has its maximum of connections. */
static bool has_too_many(const struct http *h, uint64_t from)
{
    int most = h->opt.max_conns_each, n = 0;
    most = most ? most : h->opt.max_conns - h->opt.max_conns / 8;
    if (h->n_conns < most)
        return false;
    for (const struct http_exchange *x = h->conns; x; x = x->next)
        n += x->from == from;
    return n >= most;
}

static void on_accept(struct evconnlistener *l, evutil_socket_t fd, struct sockaddr *addr, int len,
                      void *arg)
{
    (void)l;
    struct http *h = arg;
    uint64_t from = address_key(addr);
    char address[sizeof h->conns->address], port[8] = "?";
    if (getnameinfo(addr, (socklen_t)len, address, sizeof address, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV))
        snprintf(address, sizeof address, "?");
    /* A trusted proxy has the connections of many clients. */
    bool many =
        has_too_many(h, from) && !forwarded_trusts(h->opt.proxies, h->opt.n_proxies, address);
    if (h->n_conns >= h->opt.max_conns || many) {
        static const char busy[] = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n"
                                   "Retry-After: 1\r\nConnection: close\r\n\r\n";
        if (!h->tls) {
            ssize_t n = os_send(fd, busy, sizeof busy - 1, false);
            (void)n;
        }
        evutil_closesocket(fd);
        return;
    }
    set_socket_options(fd);
    struct http_exchange *x = conn_new(h, fd);
    if (!x) {
        evutil_closesocket(fd);
        return;
    }
    x->from = from;
    memcpy(x->address, address, sizeof address);
    snprintf(x->client, sizeof x->client, "%.*s", (int)sizeof x->client - 1, address);
    snprintf(x->peer, sizeof x->peer, "%s:%s", x->address, port);
    set_timer(x, h->opt.read_s);
}

static void on_retry(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct http *h = arg;
    if (h->listener && !h->draining)
        evconnlistener_enable(h->listener);
}

static void on_accept_error(struct evconnlistener *l, void *arg)
{
    struct http *h = arg;
    evconnlistener_disable(l); /* most likely out of descriptors: do not spin */
    event_add(h->retry, &(struct timeval){0, 200000});
}

static bool open_tls(struct http *h, struct error *err)
{
    const struct http_options *o = &h->opt;
    if (!o->cert_file && !o->key_file)
        return true;
    if (!o->cert_file || !o->key_file)
        return error_set(err, "TLS needs both a certificate and a key");
    h->tls = SSL_CTX_new(TLS_server_method());
    if (!h->tls)
        return error_set(err, "no memory for TLS");
    SSL_CTX_set_min_proto_version(h->tls, TLS1_2_VERSION);
    SSL_CTX_set_mode(h->tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_RELEASE_BUFFERS);
    const char *what = NULL;
    if (SSL_CTX_use_certificate_chain_file(h->tls, o->cert_file) != 1)
        what = o->cert_file;
    else if (SSL_CTX_use_PrivateKey_file(h->tls, o->key_file, SSL_FILETYPE_PEM) != 1 ||
             SSL_CTX_check_private_key(h->tls) != 1)
        what = o->key_file;
    if (!what)
        return true;
    unsigned long e = ERR_get_error();
    const char *why = e ? ERR_reason_error_string(e) : NULL;
    if (e && ERR_SYSTEM_ERROR(e)) /* OpenSSL has no text for these */
        why = strerror(ERR_GET_REASON(e));
    return error_set(err, "%s: %s", what, why ? why : "cannot be used");
}

static bool open_listener(struct http *h, struct error *err)
{
    char port[8];
    snprintf(port, sizeof port, "%d", h->opt.port);
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list;
    int rc = getaddrinfo(h->opt.host, port, &hints, &list);
    if (rc)
        return error_set(err, "%s: %s", h->opt.host, gai_strerror(rc));
    int why = 0;
    for (struct addrinfo *a = list; a && !h->listener; a = a->ai_next) {
        h->listener = evconnlistener_new_bind(h->base, on_accept, h,
                                              LEV_OPT_CLOSE_ON_FREE | LEV_OPT_REUSEABLE |
                                                  LEV_OPT_CLOSE_ON_EXEC,
                                              1024, a->ai_addr, (int)a->ai_addrlen);
        why = errno;
    }
    freeaddrinfo(list);
    if (!h->listener)
        return error_set(err, "cannot listen on %s:%d: %s", h->opt.host, h->opt.port,
                         strerror(why));
    evconnlistener_set_error_cb(h->listener, on_accept_error);
    h->retry = evtimer_new(h->base, on_retry, h);
    return h->retry || error_set(err, "out of memory for the listener");
}

/* Raises the limit of open files, and bounds the connections by it: a connection that cannot be
 * accepted would wait without a reply. */
static void bound_conns(struct http_options *o)
{
    struct rlimit lim;
    if (getrlimit(RLIMIT_NOFILE, &lim))
        return;
    if (lim.rlim_cur < lim.rlim_max) {
        struct rlimit all = {lim.rlim_max, lim.rlim_max};
        if (setrlimit(RLIMIT_NOFILE, &all) == 0)
            lim = all;
    }
    rlim_t files = lim.rlim_cur, others = files / 4 < OTHER_FILES ? files / 4 : OTHER_FILES;
    rlim_t most = (files - others) / (rlim_t)(o->files_each ? o->files_each : 1);
    if (files != RLIM_INFINITY && most < (rlim_t)o->max_conns)
        o->max_conns = most ? (int)most : 1;
}

struct http *http_open(struct event_base *base, const struct http_options *opt, struct error *err)
{
    struct http *h = mem_zalloc(1, sizeof *h);
    h->base = base;
    h->opt = *opt;
    bound_conns(&h->opt);
    if (!os_random(&h->id_secret, sizeof h->id_secret))
        h->id_secret = (uint64_t)clock_ns();
    if (!open_tls(h, err) || !open_listener(h, err)) {
        http_close(h);
        return NULL;
    }
    return h;
}

int http_port(const struct http *h)
{
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    char port[8];
    if (getsockname(evconnlistener_get_fd(h->listener), (struct sockaddr *)&a, &n) ||
        getnameinfo((struct sockaddr *)&a, n, NULL, 0, port, sizeof port, NI_NUMERICSERV))
        return 0;
    int v = 0;
    sscanf(port, "%d", &v);
    return v;
}

int http_n_conns(const struct http *h)
{
    return h->n_conns;
}

int http_max_conns(const struct http *h)
{
    return h->opt.max_conns;
}

size_t http_buffered(const struct http *h)
{
    return h->buffered;
}

void http_drain(struct http *h)
{
    h->draining = true;
    if (h->listener)
        evconnlistener_free(h->listener);
    h->listener = NULL;
    for (struct http_exchange *x = h->conns, *next; x; x = next) {
        next = x->next;
        if (x->state == CONN_HEAD && http_unsent(x))
            flush(x);
        else if (x->state == CONN_HEAD || x->state == CONN_LINGER)
            conn_free(x);
    }
}

void http_close(struct http *h)
{
    if (!h)
        return;
    while (h->conns)
        conn_free(h->conns);
    if (h->listener)
        evconnlistener_free(h->listener);
    if (h->retry)
        event_free(h->retry);
    SSL_CTX_free(h->tls);
    mem_free(h);
}

const struct http_head *http_request(const struct http_exchange *x)
{
    return &x->head;
}

char *http_take_body(struct http_exchange *x, size_t *n)
{
    *n = x->body.len;
    return buf_take(&x->body);
}

const char *http_peer(const struct http_exchange *x)
{
    return x->peer;
}

const char *http_address(const struct http_exchange *x)
{
    return x->address;
}

const char *http_client(const struct http_exchange *x)
{
    return x->client;
}

const char *http_id(const struct http_exchange *x)
{
    return x->id;
}

void http_watch(struct http_exchange *x, void *user, void (*closed)(void *user),
                void (*drained)(void *user))
{
    x->user = user;
    x->closed = closed;
    x->drained = drained;
}

void http_add_header(struct http_exchange *x, const char *name, const char *value)
{
    if (evbuffer_add_printf(x->headers, "%s: %s\r\n", name, value) < 0)
        reset(x);
}

static void put(struct http_exchange *x, const void *p, size_t n)
{
    if (!x->failed && n && evbuffer_add(bufferevent_get_output(x->bev), p, n))
        reset(x);
}

/* Sends at once what the socket takes, if nothing waits before it. The loop sends the rest: for it, a token would cost two
 * changes of its list of sockets and a wait besides. A broken socket is left to the loop. More than DRAINED bytes are the
 * loop's, too: whoever writes so much continues when `drained` is called. */
static void put_now(struct http_exchange *x, struct iovec *parts, int n)
{
    ssize_t sent = 0;
    size_t all = 0;
    for (int i = 0; i < n; i++)
        all += parts[i].iov_len;
    if (!x->http->tls && !x->failed && all <= DRAINED && http_unsent(x) == 0)
        sent = os_send_parts(bufferevent_getfd(x->bev), parts, n);
    size_t skip = sent > 0 ? (size_t)sent : 0;
    for (int i = 0; i < n; i++) {
        size_t done = skip < parts[i].iov_len ? skip : parts[i].iov_len;
        skip -= done;
        put(x, (char *)parts[i].iov_base + done, parts[i].iov_len - done);
    }
}

static void send_head(struct http_exchange *x, int status, const char *type, int64_t length)
{
    char text[800], date[40];
    time_t now = time(NULL);
    struct tm tm;
    if (!x->id[0]) /* without a head */
        set_id(x);
    strftime(date, sizeof date, "%a, %d %b %Y %H:%M:%S GMT", gmtime_r(&now, &tm));
    if (x->http->draining)
        x->keep_alive = false;
    int n = snprintf(text, sizeof text, "HTTP/1.1 %d %s\r\nDate: %s\r\nServer: steel\r\n", status,
                     http_status_text(status), date);
    if (type)
        n += snprintf(text + n, sizeof text - (size_t)n, "Content-Type: %s\r\n", type);
    if (length >= 0)
        n += snprintf(text + n, sizeof text - (size_t)n, "Content-Length: %lld\r\n",
                      (long long)length);
    else if (x->chunked)
        n += snprintf(text + n, sizeof text - (size_t)n, "Transfer-Encoding: chunked\r\n");
    /* OpenAI's clients read the first header, Anthropic's the second. */
    n += snprintf(text + n, sizeof text - (size_t)n,
                  "Connection: %s\r\nX-Request-Id: %s\r\nRequest-Id: %s\r\n",
                  x->keep_alive ? "keep-alive" : "close", x->id, x->id);
    put(x, text, (size_t)n);
    if (!x->failed && evbuffer_add_buffer(bufferevent_get_output(x->bev), x->headers))
        reset(x);
    put(x, "\r\n", 2);
}

bool http_has_room(const struct http_exchange *x, size_t n)
{
    const struct http *h = x->http;
    size_t own = 0, all = 0, most = h->opt.max_unsent;
    if (n <= HTTP_SMALL_REPLY || !most)
        return true;
    for (const struct http_exchange *c = h->conns; c; c = c->next) {
        size_t unsent = http_unsent(c);
        all += unsent;
        own += strcmp(c->client, x->client) ? 0 : unsent;
    }
    return own ? own + n <= most && all + n <= HTTP_UNSENT_ALL * most
               : !all || all + n <= 2 * HTTP_UNSENT_ALL * most;
}

void http_reply(struct http_exchange *x, int status, const char *type, const void *body, size_t n)
{
    CHECK(!x->streaming, "a reply inside a stream");
    x->chunked = false;
    bool bare = status == 204 || status == 304; /* replies without a body */
    send_head(x, status, type, bare ? -1 : (int64_t)n);
    if (!x->head_only && !bare)
        put(x, body, n);
    next_request(x);
}

void http_stream_start(struct http_exchange *x, int status, const char *type)
{
    x->chunked = x->head.minor >= 1;
    if (!x->chunked)
        x->keep_alive = false; /* the end of the connection ends the body */
    send_head(x, status, type, -1);
    x->streaming = true;
}

void http_stream_start_sized(struct http_exchange *x, int status, const char *type, int64_t n)
{
    x->chunked = false;
    send_head(x, status, type, n);
    x->streaming = true;
}

void http_stream(struct http_exchange *x, const void *data, size_t n)
{
    if (!n || x->head_only)
        return;
    static const char hex[] = "0123456789abcdef";
    char size[24] = "", *p = size + sizeof size;
    *--p = '\n';
    *--p = '\r';
    for (size_t left = n; left; left /= 16)
        *--p = hex[left % 16];
    struct iovec parts[] = {{p, (size_t)(size + sizeof size - p)},
                            {(void *)(uintptr_t)data, n},
                            {(void *)(uintptr_t) "\r\n", 2}};
    if (x->chunked)
        put_now(x, parts, 3);
    else
        put_now(x, parts + 1, 1);
    if (http_unsent(x) > DRAINED)
        x->choked = true;
}

void http_stream_end(struct http_exchange *x)
{
    if (x->chunked && !x->head_only)
        put(x, "0\r\n\r\n", 5);
    next_request(x);
}

void http_abort(struct http_exchange *x)
{
    x->closed = x->drained = NULL;
    reset(x);
}

size_t http_unsent(const struct http_exchange *x)
{
    return evbuffer_get_length(bufferevent_get_output(x->bev));
}
