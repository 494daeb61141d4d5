/* `steel route`: one address in front of several servers of the same models. */
#ifndef STEEL_ROUTE_GATEWAY_H
#define STEEL_ROUTE_GATEWAY_H

#include "server/http/access.h"

struct gateway_options {
    struct http_options http;     /* handlers and arg are the gateway's own */
    struct access_rules access;   /* host is the gateway's own */
    const char *const *upstreams; /* (n_upstreams) URLs */
    int n_upstreams;
    const char *upstream_key; /* sent in place of the client's; NULL = the client's is passed on */
    const char *ca_file;      /* of upstreams' certificates; NULL = the system's */
    bool insecure;            /* upstreams' certificates are not checked */
    const char *health_path;
    int connect_s, answer_s, idle_s; /* waits for upstreams: see upstream.h */
    int health_ms, health_timeout_s; /* between probes; of one */
    int fails, rises, slow_start_s;  /* see balancer.h */
    int retries;                     /* other replicas that a request is tried on */
    int max_per_upstream;            /* requests at once */
    int n_prefixes;                  /* that are remembered */
    int grace_s;                     /* for running answers after SIGTERM */
};

/* Runs until SIGTERM, SIGINT or failure to start. Returns the program's exit code. */
int gateway_run(const struct gateway_options *opt, struct error *err);

#endif
