/* The gateway: access checks, its own health, signals, the event loop. gateway_proxy.c and
 * gateway_gather.c handle the requests. */
#include "route/gateway_int.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"

#include <arpa/inet.h>
#include <event2/dns.h>
#include <event2/event.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

enum {
    IDLE_S = 30,    /* of an idle connection to a replica; below the usual server timeouts */
    MAX_IDLE = 256, /* idle connections per replica */
    PINS = 1 << 16, /* entries of the table of kept responses */
    LAST_MS = 700,  /* to flush the last errors after the grace time */
};

/* The gateway's own replies */

void gateway_reply(struct gateway *gw, struct http_exchange *x, int status, const char *type,
                   const struct buf *body)
{
    gw->n_http[status / 100]++;
    http_reply(x, status, type, body->p ? body->p : "", body->len);
}

void gateway_fail(struct gateway *gw, struct http_exchange *x, int status, const char *type,
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
    api_error_json(&b, &err, endpoint_dialect(http_request(x)));
    gateway_reply(gw, x, status, "application/json", &b);
    buf_clear(&b);
}

static void get_health(struct gateway *gw, struct http_exchange *x)
{
    struct buf b = {0};
    int n = balancer_n_in(gw->balancer);
    if (gw->draining) {
        gateway_fail(gw, x, 503, "unavailable_error", "the gateway is shutting down");
    } else if (!n) {
        gateway_fail(gw, x, 503, "unavailable_error", "no replica is available");
    } else {
        buf_addf(&b, "{\"status\":\"ok\",\"replicas\":%d,\"available\":%d}", gw->n, n);
        gateway_reply(gw, x, 200, "application/json", &b);
    }
    buf_clear(&b);
}

/* Heads */

/* Whether a decoded path has a segment "." or "..". A replica, or a proxy before it, might resolve
 * it to a path that was not checked here. */
static bool climbs(const char *path)
{
    for (const char *at = path; (at = strpbrk(at, "/\\"));) {
        size_t n = strcspn(++at, "/\\");
        if ((n == 1 && at[0] == '.') || (n == 2 && !strncmp(at, "..", 2)))
            return true;
    }
    return false;
}

static bool on_head(void *arg, struct http_exchange *x)
{
    struct gateway *gw = arg;
    const struct access_rules *a = &gw->opt.access;
    const struct http_head *h = http_request(x);
    bool looks = !strcmp(h->method, "GET") || !strcmp(h->method, "HEAD");
    const struct endpoint *e = endpoint_find(h, NULL);
    enum endpoint_gateway role = e ? e->gateway : GATEWAY_FORWARDS;
    log_line(LOG_DEBUG, "request", LOG_TEXT("id", http_id(x)), LOG_TEXT("method", h->method),
             LOG_TEXT("path", h->path), LOG_TEXT("peer", http_peer(x)),
             LOG_TEXT("client", http_client(x)));
    if (!access_host(a, x)) {
        gateway_fail(
            gw, x, 403, "permission_error",
            "the Host header '%.100s' is not a name of this gateway; if it should be, start "
            "it with --allowed-hosts",
            http_header(h, "Host"));
        return false;
    }
    access_add_cors(a, x);
    if (climbs(h->path)) {
        gateway_fail(gw, x, 400, "invalid_request_error", "the path has a segment \"..\" or \".\"");
    } else if (!strcmp(h->method, "OPTIONS")) {
        gw->n_http[2]++;
        access_preflight(x);
    } else if (role == GATEWAY_RESPONDS) {
        get_health(gw, x);
    } else if (!(e && e->open) && !access_key(a, x)) {
        gateway_fail(gw, x, 401, "authentication_error", "missing or wrong API key");
    } else if (!looks && !access_origin(a, x)) {
        const char *origin = http_header(h, "Origin");
        gateway_fail(
            gw, x, 403, "permission_error",
            "a page of another site may not post here; to allow it, start the gateway with "
            "--cors-origin %.100s",
            origin ? origin : "ORIGIN");
    } else if (!looks && !access_type(x)) {
        gateway_fail(gw, x, 415, "invalid_request_error",
                     "send the body as application/json, not as %.60s",
                     http_header(h, "Content-Type"));
    } else if (gw->draining) {
        gateway_fail(gw, x, 503, "unavailable_error", "the gateway is shutting down");
    } else if (role != GATEWAY_FORWARDS) {
        gather_start(gw, x, e);
    } else if (!balancer_n_in(gw->balancer)) {
        gateway_fail(gw, x, 503, "unavailable_error", "no replica is available");
    } else {
        return true;
    }
    return false;
}

static void on_request(void *arg, struct http_exchange *x)
{
    struct gateway *gw = arg;
    if (gw->draining) /* since its head was checked */
        gateway_fail(gw, x, 503, "unavailable_error", "the gateway is shutting down");
    else
        proxy_start(gw, x);
}

static void on_refuse(void *arg, struct http_exchange *x, int status, const char *why)
{
    gateway_fail(arg, x, status, status == 503 ? "unavailable_error" : "invalid_request_error",
                 "%s", why);
}

/* Timers and signals */

static bool is_idle(const struct gateway *gw)
{
    return !gw->n_proxied && !gw->gathers && http_n_conns(gw->http) == 0;
}

static void on_tick(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct gateway *gw = arg;
    if (!gw->was_ready && balancer_n_in(gw->balancer)) {
        gw->was_ready = true;
        log_line(LOG_INFO, "ready", LOG_NUM("replicas", balancer_n_in(gw->balancer)),
                 LOG_NUM("of", gw->n));
    }
    if (gw->draining && is_idle(gw))
        event_base_loopbreak(gw->base);
}

static void on_last(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    event_base_loopbreak(((struct gateway *)arg)->base);
}

static void on_grace(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct gateway *gw = arg;
    log_line(LOG_WARN, "grace time is over", LOG_NUM("requests", gw->n_proxied));
    proxy_cut_all(gw);
    gather_stop_all(gw);
    event_add(gw->last, &(struct timeval){0, LAST_MS * 1000});
}

static void on_signal(evutil_socket_t sig, short what, void *arg)
{
    (void)what;
    struct gateway *gw = arg;
    gw->exit_code = sig == SIGINT ? 130 : 0;
    if (++gw->n_signals > 1) {
        event_base_loopbreak(gw->base);
        return;
    }
    gw->draining = true;
    http_drain(gw->http);
    log_line(LOG_INFO, "shutting down", LOG_NUM("running", gw->n_proxied),
             LOG_NUM("grace_s", gw->opt.grace_s));
    event_add(gw->grace, &(struct timeval){gw->opt.grace_s, 0});
    if (is_idle(gw))
        event_base_loopbreak(gw->base);
}

/* Start and end */

static bool open_tls(struct gateway *gw, struct error *err)
{
    const struct gateway_options *o = &gw->opt;
    gw->tls = SSL_CTX_new(TLS_client_method());
    if (!gw->tls)
        return error_set(err, "no memory for TLS");
    SSL_CTX_set_min_proto_version(gw->tls, TLS1_2_VERSION);
    SSL_CTX_set_mode(gw->tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_verify(gw->tls, o->insecure ? SSL_VERIFY_NONE : SSL_VERIFY_PEER, NULL);
    int ok = o->ca_file ? SSL_CTX_load_verify_locations(gw->tls, o->ca_file, NULL)
                        : SSL_CTX_set_default_verify_paths(gw->tls);
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

/* Parses the URLs and opens a resolver and TLS if a URL needs them. */
static bool open_replicas(struct gateway *gw, struct error *err)
{
    bool names = false, tls = false;
    for (int i = 0; i < gw->n; i++) {
        struct replica *p = &gw->replicas[i];
        if (!upstream_url_parse(gw->opt.upstreams[i], &p->url, err))
            return error_prefix(err, "--upstream");
        size_t n = strlen(p->url.path);
        if (n >= 3 && !strcmp(p->url.path + n - 3, "/v1")) /* a base URL as clients write it */
            p->url.path[n - 3] = 0;
        for (int j = 0; j < i; j++)
            if (!strcmp(gw->replicas[j].url.name, p->url.name) &&
                !strcmp(gw->replicas[j].url.path, p->url.path))
                return error_set(err, "--upstream %s: given twice", gw->opt.upstreams[i]);
        names |= is_name(p->url.host);
        tls |= p->url.tls;
    }
    if (tls && !open_tls(gw, err))
        return false;
    if (names) {
        gw->dns = evdns_base_new(gw->base, EVDNS_BASE_INITIALIZE_NAMESERVERS |
                                               EVDNS_BASE_DISABLE_WHEN_INACTIVE);
        if (!gw->dns) /* without a nameserver: /etc/hosts only */
            gw->dns = evdns_base_new(gw->base, EVDNS_BASE_DISABLE_WHEN_INACTIVE);
        if (!gw->dns)
            return error_set(err, "no memory for a resolver");
        evdns_base_load_hosts(gw->dns, "/etc/hosts");
    }
    for (int i = 0; i < gw->n; i++) {
        struct replica *p = &gw->replicas[i];
        p->gateway = gw;
        p->index = i;
        const struct upstream_options o = {.base = gw->base,
                                           .dns = gw->dns,
                                           .tls = gw->tls,
                                           .connect_s = gw->opt.connect_s,
                                           .write_s = gw->opt.http.write_s,
                                           .idle_s = gw->opt.idle_s,
                                           .pool_s = IDLE_S,
                                           .max_idle = MAX_IDLE};
        p->up = upstream_new(&p->url, &o);
    }
    return true;
}

static struct event *event_of(struct gateway *gw, int fd, short what,
                              void (*fn)(evutil_socket_t, short, void *))
{
    struct event *e = event_new(gw->base, fd, what, fn, gw);
    if (!e)
        mem_die(event_get_struct_event_size());
    return e;
}

static void loop(struct gateway *gw)
{
    const struct http_options *h = &gw->opt.http;
    struct event *term = event_of(gw, SIGTERM, EV_SIGNAL | EV_PERSIST, on_signal);
    struct event *intr = event_of(gw, SIGINT, EV_SIGNAL | EV_PERSIST, on_signal);
    gw->tick = event_of(gw, -1, EV_PERSIST, on_tick);
    gw->grace = event_of(gw, -1, 0, on_grace);
    gw->last = event_of(gw, -1, 0, on_last);
    event_add(term, NULL);
    event_add(intr, NULL);
    event_add(gw->tick, &(struct timeval){0, 20000});
    char url[128];
    snprintf(url, sizeof url, "%s://%s:%d", h->cert_file ? "https" : "http", h->host,
             http_port(gw->http));
    log_line(LOG_INFO, "listening", LOG_TEXT("url", url), LOG_NUM("replicas", gw->n));
    if (http_max_conns(gw->http) < h->max_conns)
        log_line(LOG_WARN, "fewer connections than --max-connections",
                 LOG_NUM("most", http_max_conns(gw->http)),
                 LOG_TEXT("why", "the limit of open files (ulimit -n)"));
    if (!gw->opt.access.n_keys && gw->opt.upstream_key && !access_is_loopback(h->host))
        log_line(LOG_WARN, "anybody who reaches this address may use the models",
                 LOG_TEXT("why", "--host is not loopback, there is an --upstream-api-key and no "
                                 "--api-key"));
    for (int i = 0; i < gw->n; i++)
        replica_start(&gw->replicas[i]);
    event_base_dispatch(gw->base);
    struct event *all[] = {term, intr, gw->tick, gw->grace, gw->last};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        event_free(all[i]);
}

static void gateway_free(struct gateway *gw)
{
    http_close(gw->http); /* also ends all requests in flight */
    for (int i = 0; i < gw->n; i++) {
        replica_stop(&gw->replicas[i]);
        upstream_free(gw->replicas[i].up);
    }
    if (gw->base) /* deferred callbacks hold references until they run */
        event_base_loop(gw->base, EVLOOP_NONBLOCK);
    balancer_free(gw->balancer);
    if (gw->dns)
        evdns_base_free(gw->dns, 0);
    SSL_CTX_free(gw->tls);
    if (gw->base)
        event_base_free(gw->base);
    mem_free(gw->replicas);
    mem_free(gw);
}

int gateway_run(const struct gateway_options *opt, struct error *err)
{
    struct gateway *gw = mem_zalloc(1, sizeof *gw);
    gw->opt = *opt;
    gw->opt.http.admit = on_head;
    gw->opt.http.handler = on_request;
    gw->opt.http.refuse = on_refuse;
    gw->opt.http.arg = gw;
    gw->opt.http.files_each = 2; /* the client's and the replica's */
    gw->opt.access.host = opt->http.host;
    gw->n = opt->n_upstreams;
    gw->exit_code = 1;
    if (!os_random(&gw->secret, sizeof gw->secret))
        gw->secret = (uint64_t)clock_ns();
    signal(SIGPIPE, SIG_IGN);
    os_bound_heap(0); /* freed bodies return to the system at once */
    event_set_mem_functions(mem_ask, mem_ask_again, mem_free);
    gw->replicas = mem_zalloc((size_t)gw->n, sizeof *gw->replicas);
    const struct balancer_options balancer = {
        .n = gw->n,
        .fails = opt->fails,
        .rises = opt->rises,
        .slow_start_ns = (int64_t)opt->slow_start_s * 1000000000,
        .max_load = opt->max_per_upstream,
        .n_prefixes = (size_t)opt->n_prefixes,
        .n_pins = PINS,
    };
    gw->balancer = balancer_new(&balancer);
    gw->base = event_base_new();
    if (!gw->base)
        error_set(err, "no memory for an event loop");
    if (gw->base && open_replicas(gw, err) &&
        (gw->http = http_open(gw->base, &gw->opt.http, err))) {
        log_start();
        mem_reserve();
        gw->exit_code = 0;
        loop(gw);
    }
    int rc = gw->exit_code;
    gateway_free(gw);
    log_stop();
    return rc;
}
