/*
 * HTTP/1.1 connections over libevent: one loop, one thread. Parses requests, passes each complete
 * request to a handler, sends replies whole or as a stream, and reports disconnected peers. Knows
 * neither models nor JSON.
 *
 * Invariants:
 *  1. A connection has at most one exchange in progress; pipelined requests wait in its input buffer, also until the
 *     peer has read earlier replies. A peer that sends more than fits there is disconnected after the current reply.
 *  2. The socket is read while a reply is pending, so that a disconnect is noticed at once.
 *  3. Every exchange ends with exactly one of: http_reply, http_stream_end, http_abort, the `closed`
 *     callback.
 *  4. Every wait for a peer has a timer: idle, head, body, unsent output, closing. The timeouts of head
 *     and body cover the whole head and the whole body.
 *  5. No body is read before `admit` has accepted the head. The bodies of all connections together stay
 *     within max_buffered.
 *  6. If memory runs out, the connection is reset: the peer never takes a partial reply for a whole one.
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
    int port;                         /* 0 = any free port: see http_port */
    const char *cert_file, *key_file; /* both or none: TLS */
    size_t max_body;                  /* of one request */
    size_t max_buffered; /* of all requests together; the first 64 kB of each are not counted */
    size_t max_unsent;   /* of replies to one client: see http_has_room. 0 = no limit */
    int max_conns;
    int max_conns_each; /* per address (per /64 in IPv6); 0 = 7/8 of max_conns */
    int files_each;     /* descriptors per connection, which bounds max_conns; 0 = 1 */
    const struct forwarded_net *proxies; /* (n_proxies) trusted proxies */
    int n_proxies;
    int idle_s, read_s, write_s; /* keep-alive; head, or body at HTTP_MIN_RATE; output stuck */
    /* The head is complete. True: read the body, then call handler. False: it has replied, or will. */
    bool (*admit)(void *arg, struct http_exchange *x);
    void (*handler)(void *arg, struct http_exchange *x);
    /* A request that breaks the protocol or a limit: replies with status. The head may be empty. */
    void (*refuse)(void *arg, struct http_exchange *x, int status, const char *why);
    void *arg;
};
/* HTTP_MIN_RATE (bytes/s) extends the timeout of large bodies. Bodies up to HTTP_SMALL_BODY do not
 * count as buffered, so that large ones cannot block all other clients. */
enum { HTTP_MIN_RATE = 32 << 10, HTTP_SMALL_BODY = 64 << 10 };
enum { HTTP_SMALL_REPLY = 64 << 10, HTTP_UNSENT_ALL = 4 };

struct http *http_open(struct event_base *base, const struct http_options *opt, struct error *err);
int http_port(const struct http *h);
/* Stops accepting, closes idle connections, and the others after their reply. */
void http_drain(struct http *h);
int http_n_conns(const struct http *h);
int http_max_conns(const struct http *h);   /* the option, or what the limit of open files allows */
size_t http_buffered(const struct http *h); /* bytes of bodies that count against max_buffered */
void http_close(struct http *h);            /* at once */

/* The request; valid until the exchange ends. */
const struct http_head *http_request(const struct http_exchange *x);
/* Transfers the body to the caller (mem_free). It counts as buffered until http_body_done or the end. */
char *http_take_body(struct http_exchange *x, size_t *n);
void http_body_done(struct http_exchange *x);
const char *http_peer(const struct http_exchange *x);    /* address and port */
const char *http_address(const struct http_exchange *x); /* without the port */
/* The client's address: the peer's, or the forwarded one behind a trusted proxy. */
const char *http_client(const struct http_exchange *x);
/* The id in the reply's X-Request-Id and Request-Id: the client's X-Request-Id if it is a word of up to
 * 128 characters, else a generated one. */
const char *http_id(const struct http_exchange *x);
/* closed: the connection ended before the reply was complete; the exchange is freed.
 * drained: the unsent output is small again. */
void http_watch(struct http_exchange *x, void *user, void (*closed)(void *user),
                void (*drained)(void *user));

/* Whether a reply of n bytes may wait for its reader. A client's replies stay within max_unsent, or it has only one;
 * those of all within HTTP_UNSENT_ALL times that, and twice that for clients that have read all others. Small replies
 * always have room. */
bool http_has_room(const struct http_exchange *x, size_t n);
/* The reply. Headers first, then http_reply or a stream. */
void http_add_header(struct http_exchange *x, const char *name, const char *value);
void http_reply(struct http_exchange *x, int status, const char *type, const void *body, size_t n);
void http_stream_start(struct http_exchange *x, int status, const char *type);
/* The same with a Content-Length: http_stream must be called with exactly that many bytes. */
void http_stream_start_sized(struct http_exchange *x, int status, const char *type, int64_t n);
void http_stream(struct http_exchange *x, const void *data, size_t n);
void http_stream_end(struct http_exchange *x);
/* The reply cannot be completed: resets the connection. */
void http_abort(struct http_exchange *x);
size_t http_unsent(const struct http_exchange *x); /* bytes not yet written to the socket */

#endif
