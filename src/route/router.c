/* The router: who may ask, health, signals, the loop. Passes and gatherings do the rest. */
#include "route/router_int.h"
#include "base/clock.h"
#include "base/mem.h"

#include <arpa/inet.h>
#include <event2/dns.h>
#include <event2/event.h>
#include <malloc.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>

enum {
    KEEP_S = 30,     /* an unused connection to a replica; less than servers usually wait */
    KEPT_MOST = 256, /* of them, for each replica */
    PINS = 1 << 16,  /* kept responses whose replica is remembered */
    LAST_MS = 700,   /* for clients to hear that the grace time is over */
};

/* Replies of our own */

void router_reply(struct router *r, struct http_exchange *x, int status, const char *type,
                  const struct buf *body)
{
    r->n_http[status / 100]++;
    http_reply(x, status, type, body->p ? body->p : "", body->len);
}

void router_fail(struct router *r, struct http_exchange *x, int status, const char *type,
                 const char *fmt, ...)
{
    struct api_error err;
    struct buf b = {0};
    char msg[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    api_fail(&err, status, type, "%s", msg);
    if (status == 401) {
        err.code = "invalid_api_key";
        http_add_header(x, "WWW-Authenticate", "Bearer");
    }
    if (status == 503)
        http_add_header(x, "Retry-After", "2");
    api_error_json(&b, &err, api_dialect(http_request(x)));
    router_reply(r, x, status, "application/json", &b);
    buf_clear(&b);
}

static void get_health(struct router *r, struct http_exchange *x)
{
    struct buf b = {0};
    int n = route_n_in(r->route);
    if (r->draining) {
        router_fail(r, x, 503, "unavailable_error", "the router is shutting down");
    } else if (!n) {
        router_fail(r, x, 503, "unavailable_error", "no replica is available");
    } else {
        buf_addf(&b, "{\"status\":\"ok\",\"replicas\":%d,\"available\":%d}", r->n, n);
        router_reply(r, x, 200, "application/json", &b);
    }
    buf_clear(&b);
}

/* Heads */

/* What replicas show to everybody: the page, which asks for a key itself. */
static bool is_open(const char *path)
{
    return !strcmp(path, "/") || !strcmp(path, "/index.html") || !strncmp(path, "/web/", 5) ||
           !strcmp(path, "/api/version");
}

static bool on_head(void *arg, struct http_exchange *x)
{
    struct router *r = arg;
    const struct access_rules *a = &r->opt.access;
    const struct http_head *h = http_request(x);
    bool looks = !strcmp(h->method, "GET") || !strcmp(h->method, "HEAD");
    log_line(LOG_DEBUG, "request", LOG_TEXT("id", http_id(x)), LOG_TEXT("method", h->method),
             LOG_TEXT("path", h->path), LOG_TEXT("peer", http_peer(x)),
             LOG_TEXT("client", http_client(x)));
    if (!access_host(a, x)) {
        router_fail(r, x, 403, "permission_error",
                    "the Host header '%.100s' is not a name of this router; if it should be, start "
                    "it with --allowed-hosts",
                    http_header(h, "Host"));
        return false;
    }
    access_add_cors(a, x);
    if (!strcmp(h->method, "OPTIONS")) {
        r->n_http[2]++;
        access_preflight(x);
    } else if (looks && (!strcmp(h->path, "/health") || !strcmp(h->path, "/v1/health"))) {
        get_health(r, x);
    } else if (!(looks && is_open(h->path)) && !access_key(a, x)) {
        router_fail(r, x, 401, "authentication_error", "missing or wrong API key");
    } else if (!looks && !access_origin(a, x)) {
        const char *origin = http_header(h, "Origin");
        router_fail(r, x, 403, "permission_error",
                    "a page of another site may not post here; to allow it, start the router with "
                    "--cors-origin %.100s",
                    origin ? origin : "ORIGIN");
    } else if (!looks && !access_type(x)) {
        router_fail(r, x, 415, "invalid_request_error",
                    "send the body as application/json, not as %.60s",
                    http_header(h, "Content-Type"));
    } else if (r->draining) {
        router_fail(r, x, 503, "unavailable_error", "the router is shutting down");
    } else if (gather_start(r, x)) {
        return false;
    } else if (!route_n_in(r->route)) {
        router_fail(r, x, 503, "unavailable_error", "no replica is available");
    } else {
        return true;
    }
    return false;
}

static void on_request(void *arg, struct http_exchange *x)
{
    struct router *r = arg;
    if (r->draining) /* since its head came */
        router_fail(r, x, 503, "unavailable_error", "the router is shutting down");
    else
        pass_start(r, x);
}

static void on_refuse(void *arg, struct http_exchange *x, int status, const char *why)
{
    router_fail(arg, x, status, status == 503 ? "unavailable_error" : "invalid_request_error", "%s",
                why);
}

/* The loop's other events */

static bool is_idle(const struct router *r)
{
    return !r->n_passes && !r->gatherings && http_n_conns(r->http) == 0;
}

static void on_tick(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct router *r = arg;
    if (!r->was_ready && route_n_in(r->route)) {
        r->was_ready = true;
        log_line(LOG_INFO, "ready", LOG_NUM("replicas", route_n_in(r->route)), LOG_NUM("of", r->n));
    }
    if (r->draining && is_idle(r))
        event_base_loopbreak(r->base);
}

static void on_last(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    event_base_loopbreak(((struct router *)arg)->base);
}

static void on_grace(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct router *r = arg;
    log_line(LOG_WARN, "grace time is over", LOG_NUM("requests", r->n_passes));
    passes_cut(r);
    gatherings_stop(r);
    event_add(r->last, &(struct timeval){0, LAST_MS * 1000});
}

static void on_signal(evutil_socket_t sig, short what, void *arg)
{
    (void)what;
    struct router *r = arg;
    r->exit_code = sig == SIGINT ? 130 : 0;
    if (++r->n_signals > 1) {
        event_base_loopbreak(r->base);
        return;
    }
    r->draining = true;
    http_drain(r->http);
    log_line(LOG_INFO, "shutting down", LOG_NUM("running", r->n_passes),
             LOG_NUM("grace_s", r->opt.grace_s));
    event_add(r->grace, &(struct timeval){r->opt.grace_s, 0});
    if (is_idle(r))
        event_base_loopbreak(r->base);
}

/* Start and end */

static bool open_tls(struct router *r, struct error *err)
{
    const struct router_options *o = &r->opt;
    r->tls = SSL_CTX_new(TLS_client_method());
    if (!r->tls)
        return error_set(err, "no memory for TLS");
    SSL_CTX_set_min_proto_version(r->tls, TLS1_2_VERSION);
    SSL_CTX_set_mode(r->tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_verify(r->tls, o->insecure ? SSL_VERIFY_NONE : SSL_VERIFY_PEER, NULL);
    int ok = o->ca_file ? SSL_CTX_load_verify_locations(r->tls, o->ca_file, NULL)
                        : SSL_CTX_set_default_verify_paths(r->tls);
    if (ok == 1)
        return true;
    unsigned long e = ERR_get_error();
    return error_set(err, "%s: %s", o->ca_file ? o->ca_file : "the system's certificates",
                     e ? ERR_reason_error_string(e) : "cannot be used");
}

static bool is_name(const char *host)
{
    unsigned char a[16];
    return inet_pton(AF_INET, host, a) != 1 && inet_pton(AF_INET6, host, a) != 1;
}

/* The URLs; a resolver and TLS where they need them. */
static bool open_replicas(struct router *r, struct error *err)
{
    bool names = false, tls = false;
    for (int i = 0; i < r->n; i++) {
        struct replica *p = &r->replicas[i];
        if (!upstream_url_parse(r->opt.upstreams[i], &p->url, err))
            return error_prefix(err, "--upstream");
        size_t n = strlen(p->url.path);
        if (n >= 3 && !strcmp(p->url.path + n - 3, "/v1")) /* as clients are given it */
            p->url.path[n - 3] = 0;
        for (int j = 0; j < i; j++)
            if (!strcmp(r->replicas[j].url.name, p->url.name) &&
                !strcmp(r->replicas[j].url.path, p->url.path))
                return error_set(err, "--upstream %s: given twice", r->opt.upstreams[i]);
        names |= is_name(p->url.host);
        tls |= p->url.tls;
    }
    if (tls && !open_tls(r, err))
        return false;
    if (names) {
        r->dns = evdns_base_new(r->base, EVDNS_BASE_INITIALIZE_NAMESERVERS |
                                             EVDNS_BASE_DISABLE_WHEN_INACTIVE);
        if (!r->dns) /* no nameserver: /etc/hosts alone */
            r->dns = evdns_base_new(r->base, EVDNS_BASE_DISABLE_WHEN_INACTIVE);
        if (!r->dns)
            return error_set(err, "no memory for a resolver");
        evdns_base_load_hosts(r->dns, "/etc/hosts");
    }
    for (int i = 0; i < r->n; i++) {
        struct replica *p = &r->replicas[i];
        p->router = r;
        p->index = i;
        const struct upstream_options o = {.base = r->base,
                                           .dns = r->dns,
                                           .tls = r->tls,
                                           .connect_s = r->opt.connect_s,
                                           .write_s = r->opt.http.write_s,
                                           .idle_s = r->opt.idle_s,
                                           .keep_s = KEEP_S,
                                           .max_kept = KEPT_MOST};
        p->up = upstream_new(&p->url, &o);
    }
    return true;
}

static struct event *event_of(struct router *r, int fd, short what,
                              void (*fn)(evutil_socket_t, short, void *))
{
    struct event *e = event_new(r->base, fd, what, fn, r);
    if (!e)
        mem_die(event_get_struct_event_size());
    return e;
}

static void loop(struct router *r)
{
    const struct http_options *h = &r->opt.http;
    struct event *term = event_of(r, SIGTERM, EV_SIGNAL | EV_PERSIST, on_signal);
    struct event *intr = event_of(r, SIGINT, EV_SIGNAL | EV_PERSIST, on_signal);
    r->tick = event_of(r, -1, EV_PERSIST, on_tick);
    r->grace = event_of(r, -1, 0, on_grace);
    r->last = event_of(r, -1, 0, on_last);
    event_add(term, NULL);
    event_add(intr, NULL);
    event_add(r->tick, &(struct timeval){0, 20000});
    char url[128];
    snprintf(url, sizeof url, "%s://%s:%d", h->cert_file ? "https" : "http", h->host,
             http_port(r->http));
    log_line(LOG_INFO, "listening", LOG_TEXT("url", url), LOG_NUM("replicas", r->n));
    if (http_max_conns(r->http) < h->max_conns)
        log_line(LOG_WARN, "fewer connections than --max-connections",
                 LOG_NUM("most", http_max_conns(r->http)),
                 LOG_TEXT("why", "the limit of open files (ulimit -n)"));
    if (!r->opt.access.n_keys && r->opt.upstream_key && !access_is_loopback(h->host))
        log_line(LOG_WARN, "anybody who reaches this address may use the models",
                 LOG_TEXT("why", "--host is not loopback, there is an --upstream-api-key and no "
                                 "--api-key"));
    for (int i = 0; i < r->n; i++)
        replica_start(&r->replicas[i]);
    event_base_dispatch(r->base);
    struct event *all[] = {term, intr, r->tick, r->grace, r->last};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        event_free(all[i]);
}

static void router_free(struct router *r)
{
    http_close(r->http); /* passes and gatherings end with their clients */
    for (int i = 0; i < r->n; i++) {
        replica_stop(&r->replicas[i]);
        upstream_free(r->replicas[i].up);
    }
    if (r->base) /* callbacks that were put off hold on to what they are of */
        event_base_loop(r->base, EVLOOP_NONBLOCK);
    route_free(r->route);
    if (r->dns)
        evdns_base_free(r->dns, 0);
    SSL_CTX_free(r->tls);
    if (r->base)
        event_base_free(r->base);
    mem_free(r->replicas);
    mem_free(r);
}

int router_run(const struct router_options *opt, struct error *err)
{
    struct router *r = mem_zalloc(1, sizeof *r);
    r->opt = *opt;
    r->opt.http.admit = on_head;
    r->opt.http.handler = on_request;
    r->opt.http.refuse = on_refuse;
    r->opt.http.arg = r;
    r->opt.http.files_each = 2; /* the client's and the replica's */
    r->opt.access.host = opt->http.host;
    r->n = opt->n_upstreams;
    r->exit_code = 1;
    if (getrandom(&r->secret, sizeof r->secret, 0) != (ssize_t)sizeof r->secret)
        r->secret = (uint64_t)clock_ns();
    signal(SIGPIPE, SIG_IGN);
#ifdef __GLIBC__
    mallopt(M_MMAP_THRESHOLD, 256 << 10); /* large bodies go back to the system at once */
#endif
    event_set_mem_functions(mem_ask, mem_ask_again, mem_free);
    r->replicas = mem_zalloc((size_t)r->n, sizeof *r->replicas);
    const struct route_options route = {
        .n = r->n,
        .fails = opt->fails,
        .rises = opt->rises,
        .slow_start_ns = (int64_t)opt->slow_start_s * 1000000000,
        .max_load = opt->max_per_upstream,
        .n_prefixes = (size_t)opt->n_prefixes,
        .n_pins = PINS,
    };
    r->route = route_new(&route);
    r->base = event_base_new();
    if (!r->base)
        error_set(err, "no memory for an event loop");
    if (r->base && open_replicas(r, err) && (r->http = http_open(r->base, &r->opt.http, err))) {
        log_start();
        mem_reserve();
        r->exit_code = 0;
        loop(r);
    }
    int rc = r->exit_code;
    router_free(r);
    log_stop();
    return rc;
}
