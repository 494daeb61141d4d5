/* steel route: the flags of the gateway. */
#include "cli/listen.h"
#include "route/balancer.h"
#include "route/gateway.h"

#include <stdio.h>
#include <string.h>

/* Whether the text is safe inside a header line. */
static bool is_header_text(const char *s)
{
    for (; *s; s++)
        if ((unsigned char)*s < 33 || *s == 127)
            return false;
    return true;
}

static bool finish_options(const struct usage *u, const struct opt_list *upstreams,
                           float interval_s, struct gateway_options *o)
{
    o->upstreams = upstreams->items;
    o->n_upstreams = upstreams->n;
    o->health_ms = (int)(interval_s * 1000);
    if (!upstreams->n)
        args_usage_error(u, "--upstream is missing: the URL of at least one server");
    else if (upstreams->n > BALANCER_MAX_REPLICAS)
        args_usage_error(u, "%d times --upstream: at most %d", upstreams->n, BALANCER_MAX_REPLICAS);
    else if (o->upstream_key && (!*o->upstream_key || !is_header_text(o->upstream_key)))
        args_usage_error(u, "--upstream-api-key: a key has no blanks or control characters");
    else if (*o->health_path != '/' || !is_header_text(o->health_path))
        args_usage_error(u, "--health-path %s: use a path such as /health", o->health_path);
    else
        return true;
    return false;
}

int cmd_route(int argc, char **argv)
{
    struct listen_flags listen = listen_flags_default();
    struct opt_list upstreams = {0};
    float interval_s = 2;
    struct gateway_options o = {.health_path = "/health",
                                .connect_s = 5,
                                .answer_s = 600,
                                .idle_s = 120,
                                .health_timeout_s = 5,
                                .fails = 2,
                                .rises = 2,
                                .slow_start_s = 10,
                                .retries = 3,
                                .max_per_upstream = 1024,
                                .n_prefixes = 1 << 18};
    const struct opt opts[] = {
        {OPT_LIST, 'u', "upstream", 0, &upstreams, 0, 0, "URL",
         "a server such as http://host:8080 (repeatable, up to 64)"},
        {OPT_STRING, 0, "upstream-api-key", 0, &o.upstream_key, 0, 0, "KEY",
         "key for the servers, replaces the client's"},
        {OPT_STRING, 0, "upstream-ca-file", 0, &o.ca_file, 0, 0, "FILE",
         "CA certificates of https servers, PEM (default: the system's)"},
        {OPT_FLAG, 0, "upstream-insecure", 0, &o.insecure, 0, 0, 0,
         "do not verify certificates of https servers"},
        {OPT_INT, 0, "max-per-upstream", 0, &o.max_per_upstream, 1, 65536, "N",
         "concurrent requests per server (default 1024); 503 if all are full"},
        {OPT_INT, 0, "retries", 0, &o.retries, 0, 64, "N",
         "retries on other servers before the first byte (default 3)"},
        {OPT_INT, 0, "prefixes", 0, &o.n_prefixes, 8, 1 << 24, "N",
         "entries of the prompt prefix table, 24 bytes each (default 262144)"},
        {OPT_HEADING, 0, "health", 0, 0, 0, 0, 0, 0},
        {OPT_STRING, 0, "health-path", 0, &o.health_path, 0, 0, "PATH",
         "path of health probes; 2xx is healthy (default /health)"},
        {OPT_FLOAT, 0, "health-interval", 0, &interval_s, 0.01, 3600, "S",
         "interval of probes (default 2)"},
        {OPT_INT, 0, "health-timeout", 0, &o.health_timeout_s, 1, 3600, "S",
         "timeout of a probe (default 5)"},
        {OPT_INT, 0, "health-fails", 0, &o.fails, 1, 100, "N",
         "failures in a row before a server is removed (default 2)"},
        {OPT_INT, 0, "health-rises", 0, &o.rises, 1, 100, "N",
         "successes in a row before it returns (default 2)"},
        {OPT_INT, 0, "slow-start", 0, &o.slow_start_s, 0, 86400, "S",
         "time until it gets its full share again (default 10)"},
        {OPT_HEADING, 0, "timeouts of servers", 0, 0, 0, 0, 0, 0},
        {OPT_INT, 0, "connect-timeout", 0, &o.connect_s, 1, 3600, "S", "to connect (default 5)"},
        {OPT_INT, 0, "answer-timeout", 0, &o.answer_s, 1, 86400, "S",
         "to the response head; then 504 (default 600)"},
        {OPT_INT, 0, "idle-timeout", 0, &o.idle_s, 1, 86400, "S",
         "between pieces of the body; then it is cut off (default 120)"},
        {OPT_HEADING, 0, "clients", 0, 0, 0, 0, 0, 0},
        LISTEN_ROWS(listen),
        {OPT_INT, 0, "keep-alive", 0, &listen.http.idle_s, 1, 86400, "S",
         NULL}, /* its older name */
    };
    const struct usage u = {
        .command = "route",
        .synopsis = "--upstream URL --upstream URL ... [options]",
        .about =
            "A gateway in front of several servers. A request goes to the server that probably "
            "has its\n"
            "prefix cached, else to the least loaded one. Unhealthy servers get no requests, "
            "and requests\n"
            "that have not begun are retried. /health, /v1/models and /metrics cover all "
            "servers.",
        .examples = "  steel serve model.gguf --port 8081 &\n"
                    "  steel serve model.gguf --port 8082 &\n"
                    "  steel route --upstream http://127.0.0.1:8081 --upstream "
                    "http://127.0.0.1:8082\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 0,
        .max_args = 0,
    };
    int n = args_parse(&u, argc, argv, NULL);
    if (n < 0)
        return cli_args_exit(n);
    if (!finish_options(&u, &upstreams, interval_s, &o) || !listen_flags_finish(&u, &listen))
        return EXIT_USAGE;
    struct error err = {0};
    int rc = EXIT_FAIL;
    o.http = listen.http;
    o.grace_s = listen.grace_s;
    if (listen_access(&listen, &o.access, &err))
        rc = gateway_run(&o, &err);
    if (rc == EXIT_FAIL)
        cli_fail(&err);
    listen_flags_clear(&listen);
    return rc;
}
