/*
 * An HTTP/1.1 client: requests to one server, whose responses are delivered as they are read, and a
 * pool of idle connections. It runs on the loop and thread of http.h and knows neither models nor JSON
 * nor clients.
 *
 * Invariants:
 *  1. Every exchange ends with exactly one of: end, failed, upstream_cancel. None of the callbacks runs
 *     inside upstream_start.
 *  2. Every wait for the server has a timer: connecting, sending, the whole head, each piece of the
 *     body, idling in the pool. A paused exchange waits for its reader.
 *  3. At most UPSTREAM_AHEAD bytes of a response are buffered; the rest stays with the server.
 *  4. A connection returns to the pool only after a complete response to a completely sent request, and
 *     if no bytes follow.
 */
#ifndef STEEL_ROUTE_UPSTREAM_H
#define STEEL_ROUTE_UPSTREAM_H

#include "base/error.h"
#include "route/http_response.h"

struct event_base;
struct evdns_base;
struct ssl_ctx_st;
struct upstream;
struct upstream_exchange;

enum { UPSTREAM_AHEAD = 64 << 10 };

struct upstream_options {
    struct event_base *base;
    struct evdns_base *dns;         /* for host names */
    struct ssl_ctx_st *tls;         /* for https */
    int connect_s, write_s, idle_s; /* timeouts; idle: between pieces of a body */
    int pool_s;                     /* of a connection in the pool */
    int max_idle;                   /* connections in the pool */
};

enum upstream_failure {
    UPSTREAM_REFUSED,     /* connection refused: the request was not sent */
    UPSTREAM_UNREACHABLE, /* no connection for another reason: the request was not sent */
    UPSTREAM_NO_SOCKET,   /* no file descriptor left here; not the server's fault, not sent */
    UPSTREAM_STALE,       /* an idle connection was closed by the server; not a failure */
    UPSTREAM_CLOSED,      /* closed before the first byte of a response */
    UPSTREAM_BAD,         /* malformed or incomplete response */
    UPSTREAM_SLOW,        /* timeout */
};

struct upstream_handler {
    void (*head)(void *user, const struct http_head *h);
    void (*data)(void *user, const char *p, size_t n);
    void (*end)(void *user);
    void (*failed)(void *user, enum upstream_failure kind, const char *why);
};

/* A request body, shared by retries. */
struct upstream_body {
    char *p; /* (n) owned */
    size_t n;
    int refs;
};
struct upstream_body *upstream_body_new(char *p, size_t n); /* takes ownership of p */
void upstream_body_release(struct upstream_body *b);

/* scheme://host[:port][/path] */
struct upstream_url {
    bool tls;
    char host[256], path[256]; /* path: without a trailing slash */
    int port;
    char name[280]; /* host:port */
};
bool upstream_url_parse(const char *text, struct upstream_url *out, struct error *err);

struct upstream *upstream_new(const struct upstream_url *url, const struct upstream_options *opt);
void upstream_free(struct upstream *u); /* without exchanges in flight */
int upstream_n_conns(const struct upstream *u);
void upstream_drop_pool(struct upstream *u); /* closes idle connections */

struct upstream_request {
    const char *head; /* (n_head) request line and headers, with the empty line */
    size_t n_head;
    struct upstream_body *body; /* NULL = none */
    bool head_request;          /* the method is HEAD */
    bool fresh;                 /* over a new connection, which is not pooled */
    int answer_s;               /* timeout of the whole response head */
};
/* NULL: no memory or no file descriptor. */
struct upstream_exchange *upstream_start(struct upstream *u, const struct upstream_request *r,
                                         const struct upstream_handler *h, void *user);
void upstream_cancel(struct upstream_exchange *c);
/* Pauses the data callback. Bytes already read may still be delivered by upstream_resume. */
void upstream_pause(struct upstream_exchange *c);
void upstream_resume(struct upstream_exchange *c);

#endif
