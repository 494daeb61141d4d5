/*
 * HTTP/1.1 connections over libevent: one loop, one thread. Parses requests, hands each complete one
 * to a handler, sends replies whole or as a stream, and says when the peer has gone. Knows neither
 * models nor JSON.
 *
 * Invariants:
 *  1. a connection has at most one exchange in hand; further requests wait in its input (bounded)
 *  2. the socket is read while a reply is pending, so that a peer that leaves is noticed at once
 *  3. every exchange ends in exactly one of: http_reply, http_stream_end, the `closed` callback
 *  4. no step waits for a peer without a timer running: idle, head, body, unsent output, closing
 */
#ifndef STEEL_SERVER_HTTP_H
#define STEEL_SERVER_HTTP_H

#include "base/error.h"
#include "server/http_parse.h"

struct event_base;
struct http;
struct http_exchange;

struct http_options {
    const char *host;
    int port;                         /* 0 = any free one: see http_port */
    const char *cert_file, *key_file; /* both or none: TLS */
    size_t max_body;
    int max_conns;
    int idle_s, read_s, write_s; /* keep-alive; head or body without progress; output stuck */
    void (*handler)(void *arg, struct http_exchange *x);
    void *arg;
};

struct http *http_open(struct event_base *base, const struct http_options *opt, struct error *err);
int http_port(const struct http *h);
/* Accepts no more connections, closes idle ones, and lets the others go after their reply. */
void http_drain(struct http *h);
int http_n_conns(const struct http *h);
void http_close(struct http *h); /* at once */

/* The request; valid until the exchange ends. */
const struct http_head *http_request(const struct http_exchange *x);
const char *http_body(const struct http_exchange *x, size_t *n);
char *http_take_body(struct http_exchange *x, size_t *n); /* the caller's now: mem_free */
const char *http_peer(const struct http_exchange *x);
/* closed: the peer left, or was cut off, before the reply was complete; the exchange is gone.
 * drained: little is unsent now. */
void http_watch(struct http_exchange *x, void *user, void (*closed)(void *user),
                void (*drained)(void *user));

/* The reply. Headers first (name: value), then one of reply and stream. */
void http_add_header(struct http_exchange *x, const char *name, const char *value);
void http_reply(struct http_exchange *x, int status, const char *type, const void *body, size_t n);
void http_stream_start(struct http_exchange *x, int status, const char *type);
void http_stream(struct http_exchange *x, const void *data, size_t n);
void http_stream_end(struct http_exchange *x);
size_t http_unsent(const struct http_exchange *x); /* bytes the peer has not taken yet */

#endif
