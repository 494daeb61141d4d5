/*
 * The life of a call: to a worker and back, into the engine, events into text, text to the client.
 * See the invariants in server_int.h.
 */
#include "server/server_int.h"
#include "base/clock.h"
#include "base/mem.h"

#include <event2/event.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

static const struct reply_style *style_of(const struct call *c)
{
    return c->kind == CALL_MESSAGES ? &reply_messages : &reply_openai;
}

static bool is_anthropic(const struct call *c)
{
    return c->kind == CALL_MESSAGES || c->kind == CALL_COUNT_TOKENS;
}

void reply_json(struct http_exchange *x, struct server *s, int status, const struct buf *body)
{
    s->n_http[status / 100 % 6]++;
    http_reply(x, status, "application/json", body->p ? body->p : "", body->len);
}

void reply_error(struct http_exchange *x, struct server *s, const struct api_error *err,
                 bool anthropic)
{
    struct buf b = {0};
    api_error_json(&b, err, anthropic);
    if (err->status == 429 || err->status == 503)
        http_add_header(x, "Retry-After", err->status == 429 ? "1" : "5");
    if (err->status == 401)
        http_add_header(x, "WWW-Authenticate", "Bearer");
    reply_json(x, s, err->status, &b);
    buf_clear(&b);
}

static void call_free(struct call *c)
{
    struct server *s = c->server;
    *(c->prev ? &c->prev->next : &s->calls) = c->next;
    if (c->next)
        c->next->prev = c->prev;
    s->n_calls--;
    for (int i = 0; i < c->n_choices; i++)
        choice_clear(&c->choices[i]);
    for (int i = 0; i < c->n_prompts; i++) {
        token_list_clear(&c->prompts[i]);
        if (c->echo)
            buf_clear(&c->echo[i]);
        if (c->parts)
            request_free(c->parts[i].request);
    }
    mem_free(c->prompts);
    mem_free(c->echo);
    mem_free(c->parts);
    mem_free(c->choices);
    chat_prompt_free(c->chat);
    gen_params_clear(&c->p);
    buf_clear(&c->reply);
    mem_free(c->body);
    mem_free(c->key);
    mem_free(c);
}

static void call_release(struct call *c)
{
    if (!c->with_worker && c->n_open == 0 && !c->x)
        call_free(c);
}

static void cancel(struct call *c)
{
    for (int i = 0; c->parts && i < c->n_prompts; i++)
        if (c->parts[i].request)
            request_cancel(c->parts[i].request);
}

/* One line per call, when it is over for the client. */
static void log_call(const struct call *c, int status, const char *how)
{
    static const char *const names[] = {"chat",     "completions", "messages", "count_tokens",
                                        "tokenize", "detokenize",  "template"};
    struct usage_count u = call_usage(c, NULL);
    double ms = (double)(clock_ns() - c->start_ns) * 1e-6;
    if (!c->parts) {
        log_line(LOG_INFO, names[c->kind], LOG_TEXT("id", c->id), LOG_NUM("status", status),
                 LOG_NUM("ms", ms), LOG_TEXT("end", how));
        return;
    }
    log_line(LOG_INFO, names[c->kind], LOG_TEXT("id", c->id), LOG_NUM("status", status),
             LOG_NUM("prompt", u.n_prompt), LOG_NUM("cached", u.n_cached),
             LOG_NUM("tokens", u.n_generated), LOG_NUM("queue_ms", (double)u.queue_ns * 1e-6),
             LOG_NUM("first_ms", (double)u.first_ns * 1e-6), LOG_NUM("ms", ms),
             LOG_NUM("preempted", u.n_preempted), LOG_TEXT("end", how));
}

static void on_closed(void *user)
{
    struct call *c = user;
    c->x = NULL;
    atomic_store(&c->cancelled, true);
    cancel(c);
    log_call(c, 499, "client left");
    call_release(c);
}

static void on_drained(void *user)
{
    call_pump(user);
    call_release(user);
}

/* The reply is complete: the exchange is no longer ours. */
static void detach(struct call *c)
{
    http_watch(c->x, NULL, NULL, NULL);
    c->x = NULL;
    c->over = true;
}

static void fail(struct call *c, const struct api_error *err)
{
    struct http_exchange *x = c->x;
    log_call(c, err->status, err->msg);
    if (!x)
        return;
    detach(c);
    reply_error(x, c->server, err, is_anthropic(c));
}

/* To the workers */

void call_dispatch(struct server *s, struct http_exchange *x, enum call_kind kind)
{
    static const char *const prefixes[] = {"chatcmpl-", "cmpl-", "msg_"};
    struct call *c = mem_zalloc(1, sizeof *c);
    c->server = s;
    c->kind = kind;
    c->x = x;
    c->created = time(NULL);
    c->start_ns = c->last_write_ns = clock_ns();
    c->block = -1;
    snprintf(c->id, sizeof c->id, "%s%08llx%012llx", kind <= CALL_MESSAGES ? prefixes[kind] : "",
             (unsigned long long)(s->id_secret & 0xffffffff), (unsigned long long)++s->next_id);
    c->body = http_take_body(x, &c->n_body);
    c->key = s->opt.salt_by_key ? server_key_of(x) : NULL;
    c->next = s->calls;
    if (c->next)
        c->next->prev = c;
    s->calls = c;
    s->n_calls++;
    http_watch(x, c, on_closed, on_drained);
    c->with_worker = true;
    pthread_mutex_lock(&s->lock);
    *s->jobs_end = c;
    s->jobs_end = &c->job_next;
    pthread_cond_signal(&s->wake);
    pthread_mutex_unlock(&s->lock);
}

void *worker_main(void *arg)
{
    struct server *s = arg;
    pthread_setname_np(pthread_self(), "steel-worker");
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->jobs && !s->stop_workers)
            pthread_cond_wait(&s->wake, &s->lock);
        struct call *c = s->jobs;
        if (!c)
            break;
        s->jobs = c->job_next;
        if (!s->jobs)
            s->jobs_end = &s->jobs;
        pthread_mutex_unlock(&s->lock);
        call_prepare(c);
        pthread_mutex_lock(&s->lock);
        c->job_next = s->finished;
        s->finished = c;
        uint64_t one = 1;
        ssize_t n = write(s->jobs_fd, &one, sizeof one);
        (void)n;
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

/* Into the engine */

static void set_submit_error(struct call *c, enum submit_result res, const struct error *e,
                             int part)
{
    struct api_error *err = &c->err;
    const char *param = c->kind == CALL_COMPLETIONS ? "prompt" : "messages";
    if (res == SUBMIT_FULL) {
        api_fail(err, 429, "rate_limit_error", "%s; try again later", e->msg);
        err->code = "queue_full";
    } else if (res == SUBMIT_NOT_READY) {
        api_fail(err, 503, "unavailable_error", "%s", e->msg);
    } else {
        api_invalid(err, param, "%s", e->msg);
        if (res == SUBMIT_TOO_LONG) {
            err->code = "context_length_exceeded";
            err->n_prompt = (int)c->prompts[part].n;
            err->n_ctx = engine_context(c->server->engine);
        }
    }
}

static bool submit(struct call *c)
{
    struct server *s = c->server;
    int most = engine_max_queue(s->engine);
    if (c->n_prompts * c->p.n > most)
        return api_invalid(&c->err, "n", "%d answers in one request; the queue holds %d",
                           c->n_prompts * c->p.n, most);
    c->n_choices = c->n_prompts * c->p.n;
    c->parts = mem_zalloc((size_t)c->n_prompts, sizeof *c->parts);
    c->choices = mem_zalloc((size_t)c->n_choices, sizeof *c->choices);
    for (int i = 0; i < c->n_choices; i++)
        choice_init(c, &c->choices[i]);
    if (!c->p.has_seed && getrandom(&c->p.sample.seed, 8, 0) != 8)
        c->p.sample.seed = (uint64_t)clock_ns();
    struct buf salt = {0};
    if (c->key || c->p.salt)
        buf_addf(&salt, "%s\n%s", c->key ? c->key : "", c->p.salt ? c->p.salt : "");
    bool ok = true;
    for (int i = 0; ok && i < c->n_prompts; i++) {
        struct call_part *part = &c->parts[i];
        *part = (struct call_part){.call = c, .first = i * c->p.n};
        struct request_spec spec = {
            .prompt = c->prompts[i].ids,
            .n_prompt = c->prompts[i].n > INT32_MAX ? INT32_MAX : (int)c->prompts[i].n,
            .n = c->p.n,
            .sample = c->p.sample,
            .max_tokens = c->p.max_tokens,
            .min_tokens = c->p.min_tokens,
            .ignore_eos = c->p.ignore_eos,
            .special = c->special,
            .no_cache = c->p.no_cache,
            .logprobs = c->p.logprobs,
            .n_top = c->p.n_top,
            .stop = (const char *const *)c->p.stop,
            .n_stop = c->p.n_stop,
            .salt = salt.p,
            .queue = s->events,
            .user = part,
        };
        struct error e = {0};
        enum submit_result res = engine_submit(s->engine, &spec, &part->request, &e);
        ok = res == SUBMIT_OK;
        if (ok)
            c->n_open += c->p.n;
        else
            set_submit_error(c, res, &e, i);
    }
    buf_clear(&salt);
    if (!ok)
        cancel(c); /* accepted whole or not at all */
    return ok;
}

static void begin_reply(struct call *c)
{
    c->streaming = c->p.stream;
    if (!c->streaming)
        return;
    http_add_header(c->x, "Cache-Control", "no-cache");
    http_add_header(c->x, "X-Accel-Buffering", "no"); /* proxies pass tokens on as they come */
    c->server->n_http[2]++;
    http_stream_start(c->x, 200, "text/event-stream; charset=utf-8");
    struct buf out = {0};
    style_of(c)->stream_open(c, &out);
    http_stream(c->x, out.p, out.len);
    buf_clear(&out);
}

static void prepared(struct call *c)
{
    c->with_worker = false;
    if (!c->x) {
        call_release(c);
        return;
    }
    if (c->err.status) {
        fail(c, &c->err);
    } else if (c->reply.len) {
        struct http_exchange *x = c->x;
        log_call(c, 200, "ok");
        detach(c);
        reply_json(x, c->server, 200, &c->reply);
    } else if (!submit(c)) {
        fail(c, &c->err);
    } else {
        begin_reply(c);
    }
    call_release(c);
}

void calls_prepared(struct server *s)
{
    uint64_t n;
    ssize_t got = read(s->jobs_fd, &n, sizeof n);
    (void)got;
    pthread_mutex_lock(&s->lock);
    struct call *c = s->finished;
    s->finished = NULL;
    pthread_mutex_unlock(&s->lock);
    for (struct call *next; c; c = next) {
        next = c->job_next;
        prepared(c);
    }
}

/* To the client */

static void end_stream(struct call *c)
{
    struct http_exchange *x = c->x;
    struct buf out = {0};
    style_of(c)->stream_close(c, &out);
    http_stream(x, out.p, out.len);
    buf_clear(&out);
    detach(c);
    http_stream_end(x);
}

/* The engine failed in mid-answer: the stream says so and ends. */
static void fail_stream(struct call *c, const char *why)
{
    struct http_exchange *x = c->x;
    struct api_error err;
    struct buf out = {0};
    api_fail(&err, 500, "server_error", "%s", why);
    style_of(c)->stream_error(c, &err, &out);
    http_stream(x, out.p, out.len);
    buf_clear(&out);
    log_call(c, 500, why);
    cancel(c);
    detach(c);
    http_stream_end(x);
}

static const char *first_error(const struct call *c)
{
    for (int i = 0; i < c->n_choices; i++)
        if (c->choices[i].done && c->choices[i].finish == FINISH_ERROR)
            return c->choices[i].error;
        else if (c->choices[i].done && c->choices[i].finish == FINISH_CANCEL &&
                 !c->choices[i].stopped_by_parser)
            return "the server is shutting down";
    return NULL;
}

static void pump_stream(struct call *c)
{
    const struct reply_style *style = style_of(c);
    struct buf out = {0};
    int finished = 0;
    for (int i = 0; i < c->n_choices; i++) {
        struct choice_out *o = &c->choices[i];
        if (http_unsent(c->x) + out.len > UNSENT_LIMIT)
            break;
        if (!o->finish_sent) {
            style->stream_flush(c, i, &out);
            if (o->done) {
                style->stream_finish(c, i, &out);
                o->finish_sent = true;
            }
        }
        finished += o->finish_sent;
    }
    if (out.len) {
        c->last_write_ns = clock_ns();
        http_stream(c->x, out.p, out.len);
    }
    buf_clear(&out);
    if (finished == c->n_choices) {
        log_call(c, 200, choice_finish_reason(c, &c->choices[0]));
        end_stream(c);
    }
}

void call_pump(struct call *c)
{
    if (!c->x || !c->choices)
        return;
    const char *error = first_error(c);
    if (error && c->streaming) {
        fail_stream(c, error);
    } else if (error) {
        struct api_error err;
        api_fail(&err, 500, "server_error", "%s", error);
        cancel(c);
        fail(c, &err);
    } else if (c->streaming) {
        pump_stream(c);
    } else if (c->n_open == 0) {
        struct http_exchange *x = c->x;
        struct buf out = {0};
        style_of(c)->whole(c, &out);
        log_call(c, 200, choice_finish_reason(c, &c->choices[0]));
        detach(c);
        reply_json(x, c->server, 200, &out);
        buf_clear(&out);
    }
}

void calls_event(struct server *s, const struct engine_event *ev)
{
    (void)s;
    struct call_part *part = ev->user;
    struct call *c = part->call;
    struct choice_out *o = &c->choices[part->first + ev->index];
    if (ev->kind == EVENT_DONE) {
        c->n_open--;
        o->done = true;
        o->finish = ev->finish;
        o->stop = ev->stop;
        o->usage = ev->usage;
        if (ev->error)
            o->error = mem_strdup(ev->error);
    } else if (ev->kind == EVENT_START) {
        o->usage = ev->usage;
    }
    if (c->x) {
        choice_token(c, o, ev);
        if (ev->kind == EVENT_DONE)
            choice_finish(o);
        else if (o->stopped_by_parser && c->p.n == 1)
            request_cancel(part->request); /* nobody reads on */
        call_pump(c);
    }
    call_release(c);
}

void calls_tick(struct server *s)
{
    int64_t now = clock_ns();
    for (struct call *c = s->calls; c; c = c->next)
        if (c->x && c->streaming && now - c->last_write_ns >= (int64_t)s->opt.ping_s * 1000000000 &&
            http_unsent(c->x) == 0) {
            const char *ping = style_of(c)->ping;
            c->last_write_ns = now;
            http_stream(c->x, ping, strlen(ping));
        }
}
