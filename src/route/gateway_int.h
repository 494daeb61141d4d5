/*
 * Inside the gateway. One thread, one loop. A pass is one client's request on its way to a replica and
 * its answer on the way back; a gathering asks every replica the same and makes one reply of what
 * they say.
 *
 * Invariants:
 *  1. a pass has at most one call to a replica, which counts in that replica's load
 *  2. a pass has begun when a byte of its answer went to the client. Before that it may be tried
 *     elsewhere: where the request cannot have begun there, where doing it twice is safe, or where
 *     the replica said that it did nothing. After that it ends whole, or visibly cut
 *  3. of an answer at most UPSTREAM_AHEAD bytes wait here twice: as read, and as not yet sent
 *  4. a client that leaves takes its pass with it, and the replica is told by the connection's end
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
    struct upstream_exchange *probe; /* NULL = none on its way */
    bool of_models;                  /* what the probe asks for */
    int probe_status;
    bool seen;         /* it was in, or it was said that it is not there */
    bool hung;         /* why it is out: what waits there waits in vain */
    int64_t models_ns; /* when it was last asked for them */
    struct buf text;   /* of the probe's answer */
    char **models;     /* (n_models) owned; none = not known */
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

/* gateway_headers.c: heads as they are passed on. What belongs to a connection stays behind. */
void gateway_request_head(const struct gateway *gw, const struct replica *to,
                          struct http_exchange *x, size_t n_body, struct buf *out);
/* A GET of our own, with x's key (NULL: without) or the one for upstreams. */
void gateway_own_head(const struct gateway *gw, const struct replica *to, const char *path,
                      struct http_exchange *x, struct buf *out);
bool gateway_forwards_header(const struct http_head *h, const char *name);

/* gateway_proxy.c */
void proxy_start(struct gateway *gw, struct http_exchange *x);
void proxy_leave_replica(struct gateway *gw,
                         int replica);  /* what has not begun there goes elsewhere */
void proxy_cut_all(struct gateway *gw); /* the grace time is over: everybody is told */

/* gateway_probe.c */
void replica_start(struct replica *p);
void replica_stop(struct replica *p);
void replica_probe_now(struct replica *p);
/* What a pass found out about it. */
void replica_answered(struct replica *p, int status);
void replica_failed(struct replica *p, enum upstream_failure kind, const char *why);
/* Replicas that have this model, if any says so; else all. */
uint64_t replicas_with(const struct gateway *gw, const char *model);
void replica_learn_models(struct replica *p, const char *json, size_t n);

/* gateway_gather.c: a GET that all replicas are asked. e merges lists or metrics. */
void gather_start(struct gateway *gw, struct http_exchange *x, const struct endpoint *e);
void gather_stop_all(struct gateway *gw);

#endif
