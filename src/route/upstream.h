/*
 * The client side of HTTP/1.1: requests to one server, whose answers come as they are read. Keeps
 * connections that can be used again. Same loop and thread as http.h's; knows neither models, nor
 * JSON, nor whose requests these are.
 *
 * Invariants:
 *  1. every call ends in exactly one of: end, failed, upstream_cancel. None of them is called from
 *     inside upstream_start
 *  2. no step waits for the server without a timer running: connecting, sending, the whole head, each
 *     piece of the body, resting in the pool. A call that its reader has paused waits for the reader
 *  3. at most UPSTREAM_AHEAD bytes of an answer are held; the rest stays with the server
 *  4. a connection goes back to the pool only after a whole answer to a request that was sent whole,
 *     with nothing behind it
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
    struct evdns_base *dns;         /* for hosts that are names */
    struct ssl_ctx_st *tls;         /* for https */
    int connect_s, write_s, idle_s; /* idle: between pieces of a body */
    int keep_s;                     /* in the pool */
    int max_kept;                   /* connections there */
};

enum upstream_failure {
    UPSTREAM_REFUSED,     /* nothing listens there: the request never began */
    UPSTREAM_UNREACHABLE, /* no connection for another reason: nor did it */
    UPSTREAM_NO_SOCKET,   /* none is left here: says nothing about the server, nor did it begin */
    UPSTREAM_STALE,       /* a kept connection had ended: says nothing about the server */
    UPSTREAM_CLOSED,      /* ended without a byte of an answer */
    UPSTREAM_BAD,         /* what came is no answer, or only a part of one */
    UPSTREAM_SLOW,        /* the answer did not come, or did not go on, in time */
};

struct upstream_handler {
    void (*head)(void *user, const struct http_head *h);
    void (*data)(void *user, const char *p, size_t n);
    void (*end)(void *user);
    void (*failed)(void *user, enum upstream_failure kind, const char *why);
};

/* A body that several calls may send, one after the other. */
struct upstream_body {
    char *p; /* (n) owned */
    size_t n;
    int refs;
};
struct upstream_body *upstream_body_new(char *p, size_t n); /* takes p over */
void upstream_body_release(struct upstream_body *b);

/* Where a server is: scheme://host[:port][/path]. */
struct upstream_url {
    bool tls;
    char host[256], path[256]; /* path: without the last slash */
    int port;
    char name[280]; /* host:port */
};
bool upstream_url_parse(const char *text, struct upstream_url *out, struct error *err);

struct upstream *upstream_new(const struct upstream_url *url, const struct upstream_options *opt);
void upstream_free(struct upstream *u); /* no call may be going on */
int upstream_n_conns(const struct upstream *u);
void upstream_drop_kept(struct upstream *u); /* closes the pool's connections */

struct upstream_request {
    const char *head; /* (n_head) request line and headers, the empty line too */
    size_t n_head;
    struct upstream_body *body; /* NULL = none */
    bool to_head;               /* the method is HEAD */
    bool fresh;                 /* over a connection of its own, which is not kept */
    int answer_s;               /* for the whole head of the answer */
};
/* NULL: there is no memory, or no file descriptor. */
struct upstream_exchange *upstream_start(struct upstream *u, const struct upstream_request *r,
                                         const struct upstream_handler *h, void *user);
void upstream_cancel(struct upstream_exchange *c);
/* No more data for now; what was read already may still come, from inside upstream_resume's loop. */
void upstream_pause(struct upstream_exchange *c);
void upstream_resume(struct upstream_exchange *c);

#endif
