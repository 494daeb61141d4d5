/*
 * HTTP/1.1 connections over libevent: one loop, one thread. Parses requests, hands each complete one
 * to a handler, sends replies whole or as a stream, and says when the peer has gone. Knows neither
 * models nor JSON.
 *
 * Invariants:
 *  1. a connection has at most one exchange in hand; further requests wait in its input. A peer that
 *     sends more ahead than is kept loses the connection after the reply in hand
 *  2. the socket is read while a reply is pending, so that a peer that leaves is noticed at once
 *  3. every exchange ends in exactly one of: http_reply, http_stream_end, http_abort, the `closed`
 *     callback
 *  4. no step waits for a peer without a timer running: idle, head, body, unsent output, closing. The
 *     times for head and body are for the whole of them
 *  5. no body is read before `admit` has seen the head, and bodies of all connections together stay
 *     within max_buffered
 *  6. a connection for which memory ran out is reset: the peer never takes half a reply for a whole
 */
#ifndef STEEL_SERVER_HTTP_H
#define STEEL_SERVER_HTTP_H

#include "base/error.h"
#include "server/http/http_parse.h"

struct event_base;
struct forwarded_net; /* server/http/forwarded.h */
struct http;
struct http_exchange;

struct http_options {
    const char *host;
    int port;                         /* 0 = any free one: see http_port */
    const char *cert_file, *key_file; /* both or none: TLS */
    size_t max_body;                  /* of one request */
    size_t max_buffered; /* of all requests together; the first 64 kB of each are not counted */
    int max_conns;
    int max_conns_each; /* of one address (of one network of 2^64 in IPv6); 0 = 7/8 of max_conns */
    int files_each;     /* that a connection needs: max_conns is bounded by it; 0 = 1 */
    const struct forwarded_net *proxies; /* (n_proxies) who may say for whom they ask */
    int n_proxies;
    int idle_s, read_s, write_s; /* keep-alive; head, or body at HTTP_MIN_RATE; output stuck */
    /* The head has come. True: read the body, then call handler. False: it has replied, or will. */
    bool (*admit)(void *arg, struct http_exchange *x);
    void (*handler)(void *arg, struct http_exchange *x);
    /* A request that breaks the protocol or a limit: replies with status. The head may be empty. */
    void (*refuse)(void *arg, struct http_exchange *x, int status, const char *why);
    void *arg;
};
/* Bytes a second by which a body earns time beyond read_s; bodies up to HTTP_SMALL_BODY are always
 * read, so that those who hold large ones cannot shut out everybody else. */
enum { HTTP_MIN_RATE = 32 << 10, HTTP_SMALL_BODY = 64 << 10 };

struct http *http_open(struct event_base *base, const struct http_options *opt, struct error *err);
int http_port(const struct http *h);
/* Accepts no more connections, closes idle ones, and lets the others go after their reply. */
void http_drain(struct http *h);
int http_n_conns(const struct http *h);
int http_max_conns(const struct http *h);   /* as asked for, or as many as files may be open */
size_t http_buffered(const struct http *h); /* bytes of bodies that count against max_buffered */
void http_close(struct http *h);            /* at once */

/* The request; valid until the exchange ends. */
const struct http_head *http_request(const struct http_exchange *x);
/* The body: the caller's now: mem_free. It still counts as buffered until http_body_done or the end. */
char *http_take_body(struct http_exchange *x, size_t *n);
void http_body_done(struct http_exchange *x);
const char *http_peer(const struct http_exchange *x);    /* address and port */
const char *http_address(const struct http_exchange *x); /* without the port */
/* The address of whoever asks: behind a proxy that is trusted, the one it speaks for. */
const char *http_client(const struct http_exchange *x);
/* What the reply names the exchange by, in X-Request-Id and Request-Id: the client's own
 * X-Request-Id, where it is a word of up to 128 characters, or one made here. */
const char *http_id(const struct http_exchange *x);
/* closed: the peer left, or was cut off, before the reply was complete; the exchange is gone.
 * drained: little is unsent now. */
void http_watch(struct http_exchange *x, void *user, void (*closed)(void *user),
                void (*drained)(void *user));

/* The reply. Headers first (name: value), then one of reply and stream. */
void http_add_header(struct http_exchange *x, const char *name, const char *value);
void http_reply(struct http_exchange *x, int status, const char *type, const void *body, size_t n);
void http_stream_start(struct http_exchange *x, int status, const char *type);
/* The same for a body whose length is known: http_stream has to bring exactly that. */
void http_stream_start_sized(struct http_exchange *x, int status, const char *type, int64_t n);
void http_stream(struct http_exchange *x, const void *data, size_t n);
void http_stream_end(struct http_exchange *x);
/* The reply cannot be completed: the peer is told by a reset. */
void http_abort(struct http_exchange *x);
size_t http_unsent(const struct http_exchange *x); /* bytes the peer has not taken yet */

#endif
