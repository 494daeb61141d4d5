/*
 * Internals of the gateway. One thread, one event loop. A proxied request is forwarded to one replica,
 * and its response back to the client. A gather sends one request to all replicas and merges their
 * responses.
 *
 * Invariants:
 *  1. A proxied request has at most one exchange with a replica, which counts in that replica's load.
 *  2. A proxied request has begun when the first byte of its response was sent to the client. Before
 *     that it may be retried on another replica if the first one cannot have seen it, if repeating it
 *     is safe, or if the replica declined it. After that it ends complete, or visibly broken off.
 *  3. At most UPSTREAM_AHEAD bytes of a response are buffered on each side: read from the replica, and
 *     not yet sent to the client.
 *  4. A client that disconnects ends its request, and the connection to the replica is closed.
 */
#ifndef STEEL_ROUTE_GATEWAY_INT_H
#define STEEL_ROUTE_GATEWAY_INT_H

#include "server/api/endpoints.h"
#include "server/http/log.h"
#include "route/balancer.h"
#include "route/gateway.h"
#include "route/upstream.h"

struct event;
struct gateway;

struct replica {
    struct gateway *gateway;
    int index;
    struct upstream_url url;
    struct upstream *up;
    /* probing */
    struct event *timer;
    struct upstream_exchange *probe; /* NULL = none in flight */
    bool of_models;                  /* the probe asks for the models, not the health */
    int probe_status;
    bool seen; /* its first state was logged */
    bool hung; /* it left the rotation because it hangs: requests in flight there never end */
    int64_t models_ns; /* when its models were last requested */
    struct buf text;   /* the body of the probe's response */
    char **models;     /* (n_models) owned; 0 = unknown */
    int n_models;
    /* counts */
    uint64_t n_requests, n_failures, n_outs;
};

struct proxied_request;
struct gather;
struct gateway {
    struct gateway_options opt;
    struct event_base *base;
    struct http *http;
    struct evdns_base *dns;
    struct ssl_ctx_st *tls;
    struct balancer *balancer;
    struct replica *replicas; /* (n) */
    int n;
    struct proxied_request *proxied;
    struct gather *gathers;
    int n_proxied, n_gathers;
    struct event *tick, *grace, *last;
    bool draining, was_ready;
    int n_signals, exit_code;
    uint64_t secret;
    /* counts */
    uint64_t n_by_prefix, n_by_load, n_by_pin, n_retries, n_cut, n_left, n_http[6];
};

/* gateway.c */
void gateway_fail(struct gateway *gw, struct http_exchange *x, int status, const char *type,
                  const char *fmt, ...) __attribute__((format(printf, 5, 6)));
void gateway_reply(struct gateway *gw, struct http_exchange *x, int status, const char *type,
                   const struct buf *body);

/* gateway_headers.c: headers as they are forwarded, without hop-by-hop headers. */
void gateway_request_head(const struct gateway *gw, const struct replica *to,
                          struct http_exchange *x, size_t n_body, struct buf *out);
/* A GET of the gateway itself, with the key of x (NULL: none) or the upstream key. */
void gateway_own_head(const struct gateway *gw, const struct replica *to, const char *path,
                      struct http_exchange *x, struct buf *out);
bool gateway_forwards_header(const struct http_head *h, const char *name);

/* gateway_proxy.c */
void proxy_start(struct gateway *gw, struct http_exchange *x);
void proxy_leave_replica(struct gateway *gw,
                         int replica);  /* retries elsewhere what has not begun */
void proxy_cut_all(struct gateway *gw); /* ends all requests with an error */

/* gateway_probe.c */
void replica_start(struct replica *p);
void replica_stop(struct replica *p);
void replica_probe_now(struct replica *p);
/* The outcome of a proxied request. */
void replica_answered(struct replica *p, int status);
void replica_failed(struct replica *p, enum upstream_failure kind, const char *why);
/* The replicas that list this model; all if none does. */
uint64_t replicas_with(const struct gateway *gw, const char *model);
void replica_learn_models(struct replica *p, const char *json, size_t n);

/* gateway_gather.c: sends a GET to all replicas and merges lists or metrics, as e says. */
void gather_start(struct gateway *gw, struct http_exchange *x, const struct endpoint *e);
void gather_stop_all(struct gateway *gw);

#endif
