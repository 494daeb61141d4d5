/* The server: dispatch by the table of endpoints, access checks, loading, signals, shutdown. Runs the
 * event loop. */
#include "server/api/server_int.h"
#include "server/api/background.h"
#include "server/api/models_int.h"
#include "server/api/pulls.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "dist/job.h"
#include "server/api/store.h"
#include "text/grammar/grammar.h"

#include <event2/event.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { GRAMMARS_KEPT = 64, HEAP_ARENAS = 4 };
enum { FLUSH_MS = 5000 };        /* for prefixes that are not on disk yet when the server ends */
enum { STORE_AGE_S = 6 * 3600 }; /* unused responses are dropped after this time */

/* Small replies */

static void fail(struct server *s, struct http_exchange *x, int status, const char *type,
                 const char *fmt, ...) __attribute__((format(printf, 5, 6)));
static void fail(struct server *s, struct http_exchange *x, int status, const char *type,
                 const char *fmt, ...)
{
    struct api_error err;
    char msg[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof msg, fmt, ap);
    va_end(ap);
    api_fail(&err, status, type, "%s", msg);
    if (status == 401)
        err.code = "invalid_api_key";
    reply_error(x, s, &err, endpoint_dialect(http_request(x)));
}

/* Requests that http.c refuses: malformed, or over a limit. */
static void on_refuse(void *arg, struct http_exchange *x, int status, const char *why)
{
    fail(arg, x, status, status == 503 ? "unavailable_error" : "invalid_request_error", "%s", why);
}

bool reply_if_not_ready(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    int percent = 0;
    struct error e = {0};
    bool failed = models_failed(s->models, &e);
    if (s->ready && !failed)
        return false;
    if (!s->ready)
        percent = models_progress(s->models);
    struct api_error err;
    if (failed)
        api_fail(&err, 503, "unavailable_error", "%s", e.msg);
    else
        api_fail(&err, 503, "unavailable_error", "the model is loading: %d %%", percent);
    api_error_json(&b, &err, DIALECT_OPENAI);
    b.len--; /* adds fields beside "error" */
    buf_addf(&b, ",\"status\":\"%s\",\"percent\":%d}", failed ? "error" : "loading", percent);
    http_add_header(x, "Retry-After", "2");
    reply_json(x, s, err.status, &b);
    buf_clear(&b);
    return true;
}

void get_health(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    if (s->draining) {
        fail(s, x, 503, "unavailable_error", "the server is shutting down");
        return;
    }
    if (reply_if_not_ready(s, x))
        return;
    const char *failed = models_helper_failed(s->models);
    if (failed) {
        fail(s, x, 503, "unavailable_error", "%s", failed);
        return;
    }
    buf_adds(&b, "{\"status\":\"ok\"}");
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}

void get_metrics(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    metrics_write(s, &b);
    s->n_http[2]++;
    http_reply(x, 200, "text/plain; version=0.0.4; charset=utf-8", b.p, b.len);
    buf_clear(&b);
}

/* Checks a request's head and responds to requests without a body. True: read the body. */
static bool on_head(void *arg, struct http_exchange *x)
{
    struct server *s = arg;
    const struct http_head *h = http_request(x);
    char allow[ENDPOINT_ALLOW_SIZE + 16];
    const struct endpoint *e = endpoint_find(h, allow);
    bool known = e || allow[0];
    log_line(LOG_DEBUG, "request", LOG_TEXT("id", http_id(x)), LOG_TEXT("method", h->method),
             LOG_TEXT("path", h->path), LOG_TEXT("peer", http_peer(x)),
             LOG_TEXT("client", http_client(x)));
    if (!access_host(&s->opt.access, x)) {
        fail(
            s, x, 403, "permission_error",
            "the Host header '%.100s' is not a name of this server; if it should be, start it with "
            "--allowed-hosts",
            http_header(h, "Host"));
        return false;
    }
    access_add_cors(&s->opt.access, x);
    if (!strcmp(h->method, "OPTIONS") && (known || !strcmp(h->path, "*"))) {
        s->n_http[2]++;
        access_preflight(x);
    } else if (!known)
        fail(s, x, 404, "not_found_error", "there is nothing at %.8s %.200s", h->method, h->path);
    else if (!e) {
        snprintf(allow + strlen(allow), sizeof allow - strlen(allow), ", OPTIONS");
        http_add_header(x, "Allow", allow);
        fail(s, x, 405, "invalid_request_error", "%.200s does not take %.8s", h->path, h->method);
    } else if (!e->open && !access_key(&s->opt.access, x))
        fail(s, x, 401, "authentication_error", "missing or wrong API key");
    else if (e->respond && strcmp(e->method, "POST"))
        e->respond(s, x);
    else if (!access_origin(&s->opt.access, x))
        fail(s, x, 403, "permission_error",
             "a page of another site may not post here; to allow it, start the server with "
             "--cors-origin %.100s",
             http_header(h, "Origin") ? http_header(h, "Origin") : "ORIGIN");
    else if (!access_type(x))
        fail(s, x, 415, "invalid_request_error", "send the body as application/json, not as %.60s",
             http_header(h, "Content-Type"));
    else if (!access_encoding(x)) {
        http_add_header(x, "Accept-Encoding", "identity");
        fail(s, x, 415, "invalid_request_error",
             "Content-Encoding %.40s is not supported: send the body uncompressed",
             http_header(h, "Content-Encoding"));
    } else if (s->draining)
        fail(s, x, 503, "unavailable_error", "the server is shutting down");
    else
        return !reply_if_not_ready(s, x);
    return false;
}

static void on_request(void *arg, struct http_exchange *x)
{
    struct server *s = arg;
    const struct endpoint *e = endpoint_find(http_request(x), NULL);
    if (s->draining) /* since its head was checked */
        fail(s, x, 503, "unavailable_error", "the server is shutting down");
    else if (e->respond)
        e->respond(s, x);
    else
        api_request_dispatch(s, x, e);
}

/* Events, timers and signals */

/* Engine events handled per iteration of the loop, so that sockets are not starved. */
enum { EVENTS_A_TURN = 512, TURN_NS = 4000000 };

static void on_events(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct server *s = arg;
    struct engine_event ev;
    int64_t start = clock_ns();
    for (int n = 1; events_next(s->events, &ev, 0); n++) {
        api_requests_event(s, &ev);
        if (n == EVENTS_A_TURN || clock_ns() - start > TURN_NS) {
            /* A timer runs the rest in the next iteration; event_active would run it in this one. */
            event_add(s->more_events, &(struct timeval){0, 0});
            return;
        }
    }
}

static void on_jobs(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct server *s = arg;
    api_requests_prepared(s);
    models_advance(s->models);
}

static void on_job_tick(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct server *s = arg;
    if (jobs_check(s->jobs, clock_ns()))
        event_add(s->job_tick, &(struct timeval){0, JOB_SHORT_MS * 500});
}

/* After the grace time: to flush errors to clients; then for workers and the engine to stop. */
enum { LAST_MS = 700, CLOSE_MS = 1000 };

/* Ends all requests with an error and flushes it. Launchers kill before grace_s is over. */
static void end_soon(struct server *s, const char *why)
{
    s->draining = true;
    http_drain(s->http);
    api_requests_cut(s, why);
    event_add(s->last, &(struct timeval){0, LAST_MS / 2 * 1000});
}

/* Another process of the job was lost: the server cannot continue. */
static void on_job_lost(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct server *s = arg;
    const char *why = job_lost();
    if (!why)
        return;
    log_line(LOG_ERROR, "the job ends", LOG_TEXT("why", why));
    event_del(s->tick); /* the engine fails too: do not log that again */
    s->exit_code = 1;
    end_soon(s, why);
}

static void on_tick(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct server *s = arg;
    models_check(s->models);
    models_advance(s->models);
    api_requests_tick(s);
    if (s->draining)
        background_drain(s);
    if (s->draining && s->n_requests == 0 && http_n_conns(s->http) == 0)
        event_base_loopbreak(s->base);
}

static void on_last(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    event_base_loopbreak(((struct server *)arg)->base);
}

/* Ends all requests with an error and flushes it. */
static void on_grace(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct server *s = arg;
    log_line(LOG_WARN, "grace time is over", LOG_NUM("requests", s->n_requests));
    api_requests_cut(s, "the server is shutting down");
    event_add(s->last, &(struct timeval){LAST_MS / 1000, LAST_MS % 1000 * 1000});
}

/* Bounds the time that a worker or a step may still run after the loop has ended. */
static volatile sig_atomic_t exit_code_now;
static void on_alarm(int sig)
{
    (void)sig;
    os_exit((int)exit_code_now);
}

static void limit_ending(int code)
{
    exit_code_now = code;
    struct sigaction act = {.sa_handler = on_alarm};
    sigaction(SIGALRM, &act, NULL);
    struct timeval left = {CLOSE_MS / 1000, CLOSE_MS % 1000 * 1000};
    setitimer(ITIMER_REAL, &(struct itimerval){.it_value = left}, NULL);
}

static void on_signal(evutil_socket_t sig, short what, void *arg)
{
    (void)what;
    struct server *s = arg;
    s->exit_code = sig == SIGINT ? 130 : 0;
    if (++s->n_signals > 1) {
        event_base_loopbreak(s->base);
        return;
    }
    if (job_alarm() >= 0) {
        log_line(LOG_INFO, "shutting down", LOG_NUM("running", s->n_requests));
        end_soon(s, "the server is shutting down");
        return;
    }
    s->draining = true;
    http_drain(s->http);
    log_line(LOG_INFO, "shutting down", LOG_NUM("running", s->n_requests),
             LOG_NUM("grace_s", s->opt.grace_s));
    event_add(s->grace, &(struct timeval){s->opt.grace_s, 0});
    event_del(s->tick);
    event_add(s->tick, &(struct timeval){0, 20000});
    background_drain(s);
    if (s->n_requests == 0 && http_n_conns(s->http) == 0)
        event_base_loopbreak(s->base);
}

void server_name_of(const char *path, char *name, size_t size)
{
    const char *base;
    size_t n = strlen(path);
    while (n && path[n - 1] == '/')
        n--;
    for (base = path + n; base > path && base[-1] != '/'; base--)
        ;
    snprintf(name, size, "%.*s", (int)(path + n - base), base);
    char *dot = strrchr(name, '.');
    if (dot && !strcasecmp(dot, ".gguf"))
        *dot = 0;
}

static bool start_workers(struct server *s, struct error *err)
{
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int n_long = cpus >= 16 ? 3 : cpus >= 8 ? 2 : 1;
    s->jobs_fd = os_wake_fd();
    s->jobs = s->jobs_fd >= 0 ? jobs_new(n_long, 1, n_long + 1, api_request_run, s->jobs_fd) : NULL;
    return s->jobs || error_set(err, "cannot start worker threads");
}

static struct event *watch(struct server *s, int fd, short what,
                           void (*fn)(evutil_socket_t, short, void *))
{
    struct event *e = event_new(s->base, fd, what, fn, s);
    if (!e || event_add(e, NULL))
        mem_die(event_get_struct_event_size());
    return e;
}

static struct event *timer(struct server *s, short what, void (*fn)(evutil_socket_t, short, void *))
{
    struct event *e = event_new(s->base, -1, what, fn, s);
    if (!e)
        mem_die(event_get_struct_event_size());
    return e;
}

static void loop(struct server *s)
{
    struct event *term = watch(s, SIGTERM, EV_SIGNAL | EV_PERSIST, on_signal);
    struct event *intr = watch(s, SIGINT, EV_SIGNAL | EV_PERSIST, on_signal);
    struct event *lost = job_alarm() >= 0 ? watch(s, job_alarm(), EV_READ, on_job_lost) : NULL;
    s->on_events = watch(s, events_fd(s->events), EV_READ | EV_PERSIST, on_events);
    s->on_jobs = watch(s, s->jobs_fd, EV_READ | EV_PERSIST, on_jobs);
    s->more_events = timer(s, 0, on_events);
    s->job_tick = timer(s, 0, on_job_tick);
    s->tick = timer(s, EV_PERSIST, on_tick);
    s->grace = timer(s, 0, on_grace);
    s->last = timer(s, 0, on_last);
    event_add(s->tick, &(struct timeval){1, 0});
    const struct http_options *h = &s->opt.http;
    char url[128];
    snprintf(url, sizeof url, "%s://%s:%d", h->cert_file ? "https" : "http", h->host,
             http_port(s->http));
    log_line(LOG_INFO, "listening", LOG_TEXT("url", url));
    if (http_max_conns(s->http) < h->max_conns)
        log_line(LOG_WARN, "fewer connections than --max-connections",
                 LOG_NUM("most", http_max_conns(s->http)),
                 LOG_TEXT("why", "the limit of open files (ulimit -n)"));
    if (!s->opt.access.n_keys && !access_is_loopback(h->host))
        log_line(LOG_WARN, "anybody who reaches this address may use the model",
                 LOG_TEXT("why", "--host is not loopback and there is no --api-key"));
    event_base_dispatch(s->base);
    /* Closes the remaining connections; the engine ends its requests. */
    if (s->n_signals < 2 && !s->failed)
        models_flush(s->models, FLUSH_MS);
    limit_ending(s->exit_code);
    pulls_stop(s);
    mcp_stop(s->mcp);
    http_close(s->http);
    jobs_stop(s->jobs);
    jobs_stop(s->slow_jobs);
    api_requests_prepared(s);
    models_stop(s->models);
    mcp_close(s->mcp);
    api_requests_prepared(s);
    models_end(s->models);
    struct engine_event ev;
    while (events_next(s->events, &ev, 0))
        api_requests_event(s, &ev);
    CHECK(s->n_requests == 0, "%d requests are left", s->n_requests);
    struct event *events[] = {term,        intr,    s->on_events, s->more_events, s->on_jobs,
                              s->job_tick, s->tick, s->grace,     s->last};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        event_free(events[i]);
    if (lost)
        event_free(lost);
}

static bool open_mcp(struct server *s, struct error *err)
{
    struct mcp_options opt = {
        .config = s->opt.mcp, .call_s = s->opt.mcp_call_s, .done_fd = s->jobs_fd};
    s->mcp = s->opt.mcp ? mcp_open(&opt, err) : NULL;
    return s->mcp || !s->opt.mcp;
}

/* Loads libcurl where it is needed, before there are other threads. */
static bool open_network(struct server *s, struct error *err)
{
    return open_mcp(s, err) && (!s->opt.image_origins.n || image_fetch_prepare(err)) &&
           (!s->opt.allow_pull || s->opt.store_prepare(err));
}

int server_run(const struct server_options *opt, struct error *err)
{
    struct server *s = mem_zalloc(1, sizeof *s);
    s->opt = *opt;
    s->opt.http.admit = on_head;
    s->opt.http.handler = on_request;
    s->opt.http.refuse = on_refuse;
    s->opt.http.arg = s;
    s->opt.http.max_unsent = s->opt.max_unsent;
    s->opt.access.host = opt->http.host;
    s->jobs_fd = -1;
    s->started = time(NULL);
    if (!os_random(&s->id_secret, sizeof s->id_secret))
        s->id_secret = (uint64_t)clock_ns();
    if (opt->chat_format && !chat_format_from_name(opt->chat_format, &s->format)) {
        mem_free(s);
        struct buf names = {0};
        for (int i = 0; i < CHAT_N_FORMATS; i++)
            buf_addf(&names, "%s%s", i ? ", " : "", chat_format_name((enum chat_format)i));
        error_set(err, "--chat-format %s: unknown; one of %s", opt->chat_format, names.p);
        buf_clear(&names);
        return 1;
    }
    snprintf(s->fingerprint, sizeof s->fingerprint, "steel-%s",
             opt->n_models && opt->models[0].engine.runtime.backend.deterministic ? "deterministic"
                                                                                  : "default");
    signal(SIGPIPE, SIG_IGN);
    os_bound_heap(HEAP_ARENAS);
    s->grammars = grammar_cache_new(GRAMMARS_KEPT);
    s->store = store_new(opt->store_bytes, STORE_AGE_S);
    log_start();
    event_set_mem_functions(mem_ask, mem_ask_again, mem_free);
    int rc = 1;
    s->base = event_base_new();
    s->http = s->base ? http_open(s->base, &s->opt.http, err) : NULL;
    if (!s->base)
        error_set(err, "no memory for an event loop");
    bool ok = s->http && start_workers(s, err);
    if (ok && !(s->events = events_new()))
        ok = error_set(err, "no file descriptor is left");
    ok = ok && (s->models = models_new(s, err)) && open_network(s, err) &&
         models_start(s->models, err);
    if (ok) {
        loop(s);
        rc = s->exit_code;
        if (s->failed)
            error_set(err, "the model cannot be loaded"); /* the reason is in the log */
    } else {
        http_close(s->http);
        jobs_stop(s->jobs);
        jobs_stop(s->slow_jobs);
        mcp_close(s->mcp);
    }
    models_free(s->models);
    events_free(s->events);
    jobs_free(s->jobs);
    buf_clear(&s->out);
    jobs_free(s->slow_jobs);
    mcp_free(s->mcp);
    if (s->jobs_fd >= 0)
        close(s->jobs_fd);
    if (s->base)
        event_base_free(s->base);
    store_free(s->store);
    grammar_cache_free(s->grammars);
    mem_free(s);
    log_stop();
    setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
    return rc;
}
