/* `steel route`: one address in front of several servers of the same models. */
#ifndef STEEL_ROUTE_GATEWAY_H
#define STEEL_ROUTE_GATEWAY_H

#include "server/http/access.h"

struct gateway_options {
    struct http_options http;     /* handlers and arg are the gateway's own */
    struct access_rules access;   /* host is the gateway's own */
    const char *const *upstreams; /* (n_upstreams) URLs */
    int n_upstreams;
    const char *upstream_key; /* replaces the client's; NULL = forward the client's */
    const char *ca_file;      /* CA of the upstreams; NULL = the system's */
    bool insecure;            /* do not verify the upstreams' certificates */
    const char *health_path;
    int connect_s, answer_s, idle_s; /* timeouts of upstreams: see upstream.h */
    int health_ms, health_timeout_s; /* interval of probes; timeout of one */
    int fails, rises, slow_start_s;  /* see balancer.h */
    int retries;                     /* on other replicas */
    int max_per_upstream;            /* concurrent requests */
    int n_prefixes;                  /* entries of the prefix table */
    int grace_s;                     /* for requests in flight after SIGTERM */
};

/* Runs until SIGTERM, SIGINT or failure to start. Returns the program's exit code. */
int gateway_run(const struct gateway_options *opt, struct error *err);

#endif
