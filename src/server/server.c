/* The server: routes, keys, CORS, loading, signals, shutdown. Runs the loop. */
#include "server/server_int.h"
#include "base/clock.h"
#include "base/mem.h"
#include "sample/sample_advice.h"
#include "server/web.h"

#include <event2/event.h>
#include <openssl/crypto.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

const struct runtime *server_runtime(const struct server *s)
{
    return engine_runtime(s->engine);
}

/* Access */

static const char *bearer(struct http_exchange *x)
{
    const char *v = http_header(http_request(x), "Authorization");
    if (v && !strncasecmp(v, "Bearer ", 7))
        return v + 7 + strspn(v + 7, " ");
    return http_header(http_request(x), "X-Api-Key"); /* Anthropic's clients */
}

char *server_key_of(struct http_exchange *x)
{
    const char *key = bearer(x);
    return key ? mem_strdup(key) : NULL;
}

/* Takes the same time whatever the key's content. */
static bool is_allowed(const struct server *s, struct http_exchange *x)
{
    const char *key = bearer(x);
    bool found = s->opt.n_keys == 0;
    for (int i = 0; key && i < s->opt.n_keys; i++) {
        size_t n = strlen(s->opt.keys[i]);
        if (strlen(key) == n && !CRYPTO_memcmp(key, s->opt.keys[i], n))
            found = true;
    }
    return found;
}

static void add_cors(const struct server *s, struct http_exchange *x)
{
    const char *origin = http_header(http_request(x), "Origin");
    for (int i = 0; origin && i < s->opt.n_origins; i++) {
        bool any = !strcmp(s->opt.origins[i], "*");
        if (!any && strcmp(s->opt.origins[i], origin))
            continue;
        http_add_header(x, "Access-Control-Allow-Origin", any ? "*" : origin);
        if (!any)
            http_add_header(x, "Vary", "Origin");
        return;
    }
}

static void preflight(struct server *s, struct http_exchange *x)
{
    const char *want = http_header(http_request(x), "Access-Control-Request-Headers");
    http_add_header(x, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
    http_add_header(x, "Access-Control-Allow-Headers",
                    want ? want : "Authorization, Content-Type, X-Api-Key");
    http_add_header(x, "Access-Control-Max-Age", "86400");
    s->n_http[2]++;
    http_reply(x, 204, NULL, "", 0);
}

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
    reply_error(x, s, &err, !strncmp(http_request(x)->path, "/v1/messages", 12));
}

static void get_page(struct server *s, struct http_exchange *x)
{
    http_add_header(x, "Content-Security-Policy",
                    "default-src 'none'; connect-src 'self'; img-src data:; "
                    "style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; "
                    "form-action 'none'; frame-ancestors 'none'");
    http_add_header(x, "X-Content-Type-Options", "nosniff");
    http_add_header(x, "Cache-Control", "no-cache");
    s->n_http[2]++;
    http_reply(x, 200, "text/html; charset=utf-8", web_page, (size_t)(web_page_end - web_page));
}

static bool reply_if_not_ready(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    int percent;
    struct error e = {0};
    enum engine_state state = engine_state(s->engine, &percent, &e);
    if (s->ready && state != ENGINE_FAILED)
        return false;
    struct api_error err;
    if (state == ENGINE_FAILED)
        api_fail(&err, 503, "unavailable_error", "%s", e.msg);
    else
        api_fail(&err, 503, "unavailable_error", "the model is loading: %d %%", percent);
    api_error_json(&b, &err, false);
    b.len--; /* our own fields beside "error" */
    buf_addf(&b, ",\"status\":\"%s\",\"percent\":%d}", state == ENGINE_FAILED ? "error" : "loading",
             percent);
    http_add_header(x, "Retry-After", "2");
    reply_json(x, s, err.status, &b);
    buf_clear(&b);
    return true;
}

static void get_health(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    if (s->draining) {
        fail(s, x, 503, "unavailable_error", "the server is shutting down");
        return;
    }
    if (reply_if_not_ready(s, x))
        return;
    buf_adds(&b, "{\"status\":\"ok\"}");
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}

static void get_metrics(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    metrics_write(s, &b);
    s->n_http[2]++;
    http_reply(x, 200, "text/plain; version=0.0.4; charset=utf-8", b.p, b.len);
    buf_clear(&b);
}

static void add_model(struct server *s, struct buf *b)
{
    const struct runtime *rt = server_runtime(s);
    buf_adds(b, "{\"id\":");
    jsonout_text(b, s->name);
    buf_addf(b, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"steel\",\"root\":",
             (long long)s->started);
    jsonout_text(b, s->opt.model);
    buf_addf(b,
             ",\"parent\":null,\"max_model_len\":%d,\"meta\":{\"n_vocab\":%d,\"n_ctx\":%d,"
             "\"n_ctx_train\":%d,\"n_embd\":%d,\"n_params\":%lld,\"size\":%zu}}",
             engine_context(s->engine), rt->model->config.n_vocab, engine_context(s->engine),
             rt->model->config.context, rt->model->config.n_embd, (long long)rt->model->n_params,
             rt->model->bytes);
}

static void get_models(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    if (reply_if_not_ready(s, x))
        return;
    buf_adds(&b, "{\"object\":\"list\",\"data\":[");
    add_model(s, &b);
    buf_adds(&b, "]}");
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}

static void get_model(struct server *s, struct http_exchange *x)
{
    const char *id = strrchr(http_request(x)->path, '/') + 1;
    const char *full = http_request(x)->path + strlen("/v1/models/");
    struct buf b = {0};
    if (reply_if_not_ready(s, x))
        return;
    if (strcmp(full, s->name) && strcmp(id, s->name)) {
        struct api_error err;
        api_fail(&err, 404, "not_found_error", "the model '%.100s' does not exist", full);
        err.code = "model_not_found";
        snprintf(err.param, sizeof err.param, "model");
        reply_error(x, s, &err, false);
        return;
    }
    add_model(s, &b);
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}

/* Routes */

struct route {
    const char *method, *path;
    void (*get)(struct server *s, struct http_exchange *x);
    enum call_kind kind; /* where get is NULL */
    bool open;           /* needs no key */
};

static const struct route routes[] = {
    {"GET", "/", get_page, 0, true},
    {"GET", "/index.html", get_page, 0, true},
    {"GET", "/health", get_health, 0, true},
    {"GET", "/v1/health", get_health, 0, true},
    {"GET", "/metrics", get_metrics, 0, false},
    {"GET", "/v1/models", get_models, 0, false},
    {"GET", "/models", get_models, 0, false},
    {"POST", "/v1/chat/completions", NULL, CALL_CHAT, false},
    {"POST", "/chat/completions", NULL, CALL_CHAT, false},
    {"POST", "/v1/completions", NULL, CALL_COMPLETIONS, false},
    {"POST", "/completions", NULL, CALL_COMPLETIONS, false},
    {"POST", "/v1/messages", NULL, CALL_MESSAGES, false},
    {"POST", "/v1/messages/count_tokens", NULL, CALL_COUNT_TOKENS, false},
    {"POST", "/tokenize", NULL, CALL_TOKENIZE, false},
    {"POST", "/detokenize", NULL, CALL_DETOKENIZE, false},
    {"POST", "/apply-template", NULL, CALL_TEMPLATE, false},
};

static void on_request(void *arg, struct http_exchange *x)
{
    struct server *s = arg;
    const struct http_head *h = http_request(x);
    const struct route *route = NULL;
    static const struct route one_model = {"GET", "", get_model, 0, false};
    bool known = false, posts = false;
    const char *method = !strcmp(h->method, "HEAD") ? "GET" : h->method;
    add_cors(s, x);
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++)
        if (!strcmp(routes[i].path, h->path)) {
            known = true;
            posts |= routes[i].method[0] == 'P';
            if (!strcmp(routes[i].method, method))
                route = &routes[i];
        }
    if (!strncmp(h->path, "/v1/models/", 11) && h->path[11]) {
        known = true;
        route = !strcmp(method, "GET") ? &one_model : NULL;
    }
    log_line(LOG_DEBUG, "request", LOG_TEXT("method", h->method), LOG_TEXT("path", h->path),
             LOG_TEXT("peer", http_peer(x)));
    if (!strcmp(h->method, "OPTIONS") && (known || !strcmp(h->path, "*")))
        preflight(s, x);
    else if (!known)
        fail(s, x, 404, "not_found_error", "there is nothing at %.8s %.200s", h->method, h->path);
    else if (!route) {
        http_add_header(x, "Allow", posts ? "POST, OPTIONS" : "GET, HEAD, OPTIONS");
        fail(s, x, 405, "invalid_request_error", "%.200s does not take %.8s", h->path, h->method);
    } else if (!route->open && !is_allowed(s, x))
        fail(s, x, 401, "authentication_error", "missing or wrong API key");
    else if (route->get)
        route->get(s, x);
    else if (s->draining)
        fail(s, x, 503, "unavailable_error", "the server is shutting down");
    else if (!reply_if_not_ready(s, x))
        call_dispatch(s, x, route->kind);
}

/* The loop's other events */

enum { EVENTS_A_TURN = 512 };

static void on_events(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct server *s = arg;
    struct engine_event ev;
    for (int n = 0; events_next(s->events, &ev, 0); n++) {
        calls_event(s, &ev);
        if (n == EVENTS_A_TURN) { /* a fast model must not keep the loop from its sockets */
            event_active(s->on_events, EV_READ, 0);
            return;
        }
    }
}

static void on_jobs(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    calls_prepared(arg);
}

static void become_ready(struct server *s)
{
    const struct runtime *rt = server_runtime(s);
    server_load_chat(s);
    sample_params_advise(&s->opt.sample, rt->file);
    s->ready = true;
    log_line(LOG_INFO, "ready", LOG_TEXT("model", s->name), LOG_TEXT("device", rt->be->ops->name),
             LOG_NUM("load_s", rt->load_ns * 1e-9), LOG_NUM("context", engine_context(s->engine)),
             LOG_NUM("kv_pages", rt->kv->n_pages), LOG_NUM("kv_mb", rt->kv->pool_bytes / 1e6),
             LOG_NUM("weights_mb", rt->model->bytes / 1e6));
    if (rt->notice.msg[0])
        log_line(LOG_WARN, "device", LOG_TEXT("why", rt->notice.msg));
    if (!s->chat)
        log_line(LOG_WARN, "no chat template", LOG_TEXT("why", s->chat_error.msg));
}

static void on_tick(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct server *s = arg;
    if (!s->ready && !s->failed) {
        struct error e = {0};
        enum engine_state state = engine_state(s->engine, NULL, &e);
        if (state == ENGINE_READY) {
            become_ready(s);
            struct timeval second = {1, 0};
            event_add(s->tick, &second);
        } else if (state == ENGINE_FAILED) {
            s->failed = true;
            log_line(LOG_ERROR, "the model cannot be loaded", LOG_TEXT("why", e.msg));
            s->exit_code = 1;
            event_base_loopbreak(s->base);
        }
    }
    struct error why = {0};
    if (s->ready && !s->engine_failed && engine_state(s->engine, NULL, &why) == ENGINE_FAILED) {
        s->engine_failed = true; /* the server stays, and says so to whoever asks */
        log_line(LOG_ERROR, "the engine failed", LOG_TEXT("why", why.msg));
    }
    calls_tick(s);
    if (s->draining && s->n_calls == 0 && http_n_conns(s->http) == 0)
        event_base_loopbreak(s->base);
}

static void on_grace(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct server *s = arg;
    log_line(LOG_WARN, "grace time is over", LOG_NUM("calls", s->n_calls));
    event_base_loopbreak(s->base);
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
    s->draining = true;
    http_drain(s->http);
    log_line(LOG_INFO, "shutting down", LOG_NUM("running", s->n_calls),
             LOG_NUM("grace_s", s->opt.grace_s));
    event_add(s->grace, &(struct timeval){s->opt.grace_s, 0});
    event_del(s->tick);
    event_add(s->tick, &(struct timeval){0, 20000});
    if (s->n_calls == 0 && http_n_conns(s->http) == 0)
        event_base_loopbreak(s->base);
}

static void name_model(struct server *s)
{
    const char *path = s->opt.model ? s->opt.model : "steel-demo", *base;
    size_t n = strlen(path);
    if (s->opt.alias) {
        snprintf(s->name, sizeof s->name, "%s", s->opt.alias);
        return;
    }
    while (n && path[n - 1] == '/')
        n--;
    for (base = path + n; base > path && base[-1] != '/'; base--)
        ;
    snprintf(s->name, sizeof s->name, "%.*s", (int)(path + n - base), base);
    char *dot = strrchr(s->name, '.');
    if (dot && !strcasecmp(dot, ".gguf"))
        *dot = 0;
}

static void start_workers(struct server *s)
{
    s->jobs_end = &s->jobs;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->wake, NULL);
    s->jobs_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    for (s->n_workers = 0; s->n_workers < 2; s->n_workers++)
        CHECK(!pthread_create(&s->workers[s->n_workers], NULL, worker_main, s), "no thread");
}

static void stop_workers(struct server *s)
{
    pthread_mutex_lock(&s->lock);
    s->stop_workers = true;
    pthread_cond_broadcast(&s->wake);
    pthread_mutex_unlock(&s->lock);
    for (int i = 0; i < s->n_workers; i++)
        pthread_join(s->workers[i], NULL);
}

static struct event *watch(struct server *s, int fd, short what,
                           void (*fn)(evutil_socket_t, short, void *))
{
    struct event *e = event_new(s->base, fd, what, fn, s);
    event_add(e, NULL);
    return e;
}

static void loop(struct server *s)
{
    struct event *term = watch(s, SIGTERM, EV_SIGNAL | EV_PERSIST, on_signal);
    struct event *intr = watch(s, SIGINT, EV_SIGNAL | EV_PERSIST, on_signal);
    s->on_events = watch(s, events_fd(s->events), EV_READ | EV_PERSIST, on_events);
    s->on_jobs = watch(s, s->jobs_fd, EV_READ | EV_PERSIST, on_jobs);
    s->tick = event_new(s->base, -1, EV_PERSIST, on_tick, s);
    s->grace = evtimer_new(s->base, on_grace, s);
    event_add(s->tick, &(struct timeval){0, 20000}); /* until the model is there */
    const struct http_options *h = &s->opt.http;
    char url[128];
    snprintf(url, sizeof url, "%s://%s:%d", h->cert_file ? "https" : "http", h->host,
             http_port(s->http));
    log_line(LOG_INFO, "listening", LOG_TEXT("url", url));
    event_base_dispatch(s->base);
    /* Whoever is still there is cut off; the engine answers for what it has. */
    http_close(s->http);
    stop_workers(s);
    calls_prepared(s);
    engine_close(s->engine);
    struct engine_event ev;
    while (events_next(s->events, &ev, 0))
        calls_event(s, &ev);
    CHECK(s->n_calls == 0, "%d calls are left", s->n_calls);
    struct event *events[] = {term, intr, s->on_events, s->on_jobs, s->tick, s->grace};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        event_free(events[i]);
}

int server_run(const struct server_options *opt, struct error *err)
{
    struct server *s = mem_zalloc(1, sizeof *s);
    s->opt = *opt;
    s->opt.http.handler = on_request;
    s->opt.http.arg = s;
    s->started = time(NULL);
    if (getrandom(&s->id_secret, sizeof s->id_secret, 0) != (ssize_t)sizeof s->id_secret)
        s->id_secret = (uint64_t)clock_ns();
    name_model(s);
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
             opt->engine.runtime.backend.deterministic ? "deterministic" : "default");
    signal(SIGPIPE, SIG_IGN);
    s->base = event_base_new();
    s->http = http_open(s->base, &s->opt.http, err);
    int rc = 1;
    if (s->http) {
        s->events = events_new();
        s->engine = engine_open(opt->model, &opt->engine);
        start_workers(s);
        loop(s);
        rc = s->exit_code;
        if (s->failed)
            error_set(err, "the model cannot be loaded"); /* the log has said why */
        server_unload_chat(s);
        events_free(s->events);
        close(s->jobs_fd);
        pthread_mutex_destroy(&s->lock);
        pthread_cond_destroy(&s->wake);
    }
    event_base_free(s->base);
    mem_free(s);
    return rc;
}
