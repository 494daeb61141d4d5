/* See pulls.h. */
#include "server/api/pulls.h"
#include "base/mem.h"
#include "base/os.h"
#include "server/api/models_made.h"
#include "server/api/server_int.h"

#include <event2/event.h>
#include <stdio.h>
#include <string.h>

enum { PROGRESS_MS = 250, BODY_MOST = 64 << 10 };

struct pull {
    struct server *server;
    struct http_exchange *x; /* NULL: the client has left, or has its reply */
    bool stream;
    char name[MODEL_NAME_MOST];
    struct pull_watch watch;
    int64_t told; /* bytes downloaded by the last line's count */
    struct event *tick;
    pthread_t thread;
    atomic_bool done; /* then ok and err do not change */
    bool ok;
    struct error err;
};

static void *pull_main(void *arg)
{
    struct pull *p = arg;
    os_name_thread("steel-pull");
    p->ok = p->server->opt.store_pull(p->name, &p->watch, &p->err);
    if (p->ok)
        models_scan(p->server->models);
    atomic_store(&p->done, true);
    return NULL;
}

static void write_line(struct pull *p, const struct buf *line)
{
    if (p->x && p->stream)
        http_stream(p->x, line->p, line->len);
}

static void write_progress(struct pull *p)
{
    struct buf b = {0};
    int64_t have = atomic_load(&p->watch.have), total = atomic_load(&p->watch.total);
    if (!total || have == p->told || (p->x && http_unsent(p->x) > UNSENT_LIMIT))
        return;
    p->told = have;
    buf_adds(&b, "{\"status\":\"pulling ");
    buf_addf(&b, "%s\",\"digest\":\"%s\",\"total\":%lld,\"completed\":%lld}\n", p->name, p->name,
             (long long)total, (long long)have);
    write_line(p, &b);
    buf_clear(&b);
}

static void on_left(void *user)
{
    struct pull *p = user;
    p->x = NULL;
    atomic_store(&p->watch.stop, true);
}

/* Writes the last line and frees p. */
static void finish(struct pull *p)
{
    struct server *s = p->server;
    struct http_exchange *x = p->x;
    struct buf b = {0};
    pthread_join(p->thread, NULL);
    log_line(p->ok ? LOG_INFO : LOG_WARN, "pull", LOG_TEXT("model", p->name),
             LOG_TEXT("end", p->ok ? "done" : p->err.msg));
    if (x)
        http_watch(x, NULL, NULL, NULL);
    if (x && p->stream) {
        if (!p->ok) {
            buf_adds(&b, "{\"error\":");
            jsonout_text(&b, p->err.msg);
            buf_adds(&b, "}\n");
        }
        const char *end = "{\"status\":\"success\"}\n";
        http_stream(x, p->ok ? end : b.p, p->ok ? strlen(end) : b.len);
        http_stream_end(x);
    } else if (x && p->ok) {
        buf_adds(&b, "{\"status\":\"success\"}");
        reply_json(x, s, 200, &b);
    } else if (x) {
        struct api_error err = {0};
        api_fail(&err, 502, "server_error", "%s", p->err.msg);
        reply_error(x, s, &err, DIALECT_OLLAMA);
    }
    s->pull = NULL;
    event_free(p->tick);
    buf_clear(&b);
    mem_free(p);
}

static void on_tick(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct pull *p = arg;
    write_progress(p);
    if (p->server->draining)
        atomic_store(&p->watch.stop, true);
    if (atomic_load(&p->done))
        finish(p);
}

/* Reads the body. False: err. */
static bool read_body(struct http_exchange *x, char name[MODEL_NAME_MOST], bool *stream,
                      struct api_error *err)
{
    size_t n;
    char *text = http_take_body(x, &n);
    const char *model = NULL, *older = NULL;
    bool insecure = false;
    json_t *body = n <= BODY_MOST ? api_parse(text, n, err) : NULL;
    if (n > BODY_MOST)
        api_fail(err, 413, "invalid_request_error", "the body is too large");
    mem_free(text);
    http_body_done(x);
    bool ok = body && api_string(body, "model", &model, err) &&
              api_string(body, "name", &older, err) && api_bool(body, "stream", stream, err) &&
              api_bool(body, "insecure", &insecure, err);
    model = model ? model : older;
    if (ok && (!model || !*model || strlen(model) >= MODEL_NAME_MOST))
        ok = api_invalid(err, "model", "model is missing, or its name is too long");
    else if (ok && insecure)
        ok = api_invalid(err, "insecure", "insecure is not supported");
    for (const char *p = model ? model : ""; ok && *p; p++)
        if ((unsigned char)*p <= ' ' || strchr("\"\\\177", *p))
            ok = api_invalid(err, "model", "model is not a name of the Hub");
    if (ok)
        snprintf(name, MODEL_NAME_MOST, "%s", model);
    json_decref(body);
    return ok;
}

void post_pull(struct server *s, struct http_exchange *x)
{
    struct api_error err = {0};
    char name[MODEL_NAME_MOST] = "";
    bool stream = true, ok = models_may_change(s, &err) && read_body(x, name, &stream, &err);
    if (ok && s->pull)
        ok = api_fail(&err, 429, "rate_limit_error", "%s is being pulled; try again later",
                      s->pull->name);
    if (!ok) {
        reply_error(x, s, &err, DIALECT_OLLAMA);
        return;
    }
    struct pull *p = mem_zalloc(1, sizeof *p);
    p->server = s;
    p->stream = stream;
    memcpy(p->name, name, sizeof name);
    p->tick = event_new(s->base, -1, EV_PERSIST, on_tick, p);
    if (!p->tick)
        mem_die(event_get_struct_event_size());
    if (pthread_create(&p->thread, NULL, pull_main, p)) {
        event_free(p->tick);
        mem_free(p);
        api_fail(&err, 503, "unavailable_error", "no thread is left; try again later");
        reply_error(x, s, &err, DIALECT_OLLAMA);
        return;
    }
    event_add(p->tick, &(struct timeval){0, PROGRESS_MS * 1000});
    s->pull = p;
    p->x = x;
    http_watch(x, p, on_left, NULL);
    if (!stream)
        return;
    struct buf line = {0};
    s->n_http[2]++;
    http_stream_start(x, 200, "application/x-ndjson");
    buf_adds(&line, "{\"status\":\"pulling manifest\"}\n");
    write_line(p, &line);
    buf_clear(&line);
}

void pulls_stop(struct server *s)
{
    if (!s->pull)
        return;
    atomic_store(&s->pull->watch.stop, true);
    s->pull->x = NULL;
    finish(s->pull);
}
