/*
 * The life of a call: to a worker and back, into the engine, events into text, text to the client.
 * See the invariants in server_int.h.
 */
#include "server/api/server_int.h"
#include "server/api/embeddings.h"
#include "server/api/responses.h"
#include "text/grammar/grammar.h"
#include "base/clock.h"
#include "base/mem.h"

#include <event2/event.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

static const struct {
    const char *name;   /* in the log */
    const char *prefix; /* of ids */
    const char *input;  /* the field that holds the prompt */
    enum dialect dialect;
    const struct reply_style *style; /* NULL: nothing is generated */
} kinds[] = {
    [CALL_CHAT] = {"chat", "chatcmpl-", "messages", DIALECT_OPENAI, &reply_openai},
    [CALL_COMPLETIONS] = {"completions", "cmpl-", "prompt", DIALECT_OPENAI, &reply_openai},
    [CALL_MESSAGES] = {"messages", "msg_", "messages", DIALECT_ANTHROPIC, &reply_messages},
    [CALL_RESPONSES] = {"responses", "resp_", "input", DIALECT_OPENAI, &reply_responses},
    [CALL_OLLAMA_CHAT] = {"ollama chat", "", "messages", DIALECT_OLLAMA, &reply_ollama},
    [CALL_OLLAMA_GENERATE] = {"ollama generate", "", "prompt", DIALECT_OLLAMA, &reply_ollama},
    [CALL_OLLAMA_SHOW] = {"ollama show", "", "", DIALECT_OLLAMA, NULL},
    [CALL_EMBEDDINGS] = {"embeddings", "", "input", DIALECT_OPENAI, NULL},
    [CALL_RERANK] = {"rerank", "rerank-", "documents", DIALECT_OPENAI, NULL},
    [CALL_OLLAMA_EMBED] = {"ollama embed", "", "input", DIALECT_OLLAMA, NULL},
    [CALL_OLLAMA_EMBEDDINGS] = {"ollama embeddings", "", "prompt", DIALECT_OLLAMA, NULL},
    [CALL_COUNT_TOKENS] = {"count_tokens", "", "messages", DIALECT_ANTHROPIC, NULL},
    [CALL_TOKENIZE] = {"tokenize", "", "", DIALECT_OPENAI, NULL},
    [CALL_DETOKENIZE] = {"detokenize", "", "", DIALECT_OPENAI, NULL},
    [CALL_TEMPLATE] = {"template", "", "", DIALECT_OPENAI, NULL},
    [CALL_LOAD_LORA] = {"load adapter", "", "", DIALECT_OPENAI, NULL},
    [CALL_UNLOAD_LORA] = {"unload adapter", "", "", DIALECT_OPENAI, NULL},
};

static const struct reply_style *style_of(const struct call *c)
{
    return kinds[c->kind].style;
}

void reply_json(struct http_exchange *x, struct server *s, int status, const struct buf *body)
{
    s->n_http[status / 100 % 6]++;
    http_reply(x, status, "application/json", body->p ? body->p : "", body->len);
}

void reply_error(struct http_exchange *x, struct server *s, const struct api_error *err,
                 enum dialect dialect)
{
    struct buf b = {0};
    api_error_json(&b, err, dialect);
    if (err->status == 429 || err->status == 503) {
        char wait[16];
        snprintf(wait, sizeof wait, "%d", calls_wait_s(s));
        http_add_header(x, "Retry-After", wait);
    }
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
    s->kept -= c->kept;
    s->trim_due |= c->n_body >= LARGE_REQUEST || c->n_kept_most >= LARGE_REQUEST;
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
    responses_call_free(c->responses);
    grammar_free(c->grammar);
    embed_call_free(c->embed);
    gen_params_clear(&c->p);
    buf_clear(&c->reply);
    mem_free(c->body);
    mem_free(c->key);
    mem_free(c->owner);
    mem_free(c->model);
    mem_free(c);
}

static void call_release(struct call *c)
{
    if (!c->with_worker && c->n_open == 0 && !c->x)
        call_free(c);
}

/* Nobody waits for it any more: it leaves the workers' queue, or its worker may stop. */
static void cancel(struct call *c)
{
    atomic_store(&c->cancelled, true);
    if (c->with_worker && jobs_remove(c->server->jobs, &c->job))
        c->with_worker = false;
    if (!c->with_worker && c->embed) /* a worker that has it is making it, or writing the reply */
        embed_cancel(c->embed);
    for (int i = 0; c->parts && i < c->n_prompts; i++)
        if (c->parts[i].request)
            request_cancel(c->parts[i].request);
}

/* One line per call, when it is over for the client. */
static void log_call(const struct call *c, int status, const char *how)
{
    const char *name = kinds[c->kind].name;
    struct usage_count u = call_usage(c, NULL);
    double ms = (double)(clock_ns() - c->start_ns) * 1e-6;
    if (!c->parts) {
        log_line(LOG_INFO, name, LOG_TEXT("id", c->id), LOG_NUM("status", status),
                 LOG_NUM("ms", ms), LOG_TEXT("end", how));
        return;
    }
    log_line(LOG_INFO, name, LOG_TEXT("id", c->id), LOG_NUM("status", status),
             LOG_NUM("prompt", u.n_prompt), LOG_NUM("cached", u.n_cached),
             LOG_NUM("tokens", u.n_generated), LOG_NUM("queue_ms", (double)u.queue_ns * 1e-6),
             LOG_NUM("first_ms", (double)u.first_ns * 1e-6), LOG_NUM("ms", ms),
             LOG_NUM("preempted", u.n_preempted), LOG_TEXT("end", how));
}

static void on_closed(void *user)
{
    struct call *c = user;
    c->x = NULL;
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
    reply_error(x, c->server, err, kinds[c->kind].dialect);
}

/* To the workers */

void call_dispatch(struct server *s, struct http_exchange *x, enum call_kind kind)
{
    struct call *c = mem_zalloc(1, sizeof *c);
    c->server = s;
    c->kind = kind;
    c->x = x;
    c->created = time(NULL);
    c->start_ns = c->last_write_ns = clock_ns();
    c->block = -1;
    snprintf(c->id, sizeof c->id, "%s%08llx%012llx", kinds[kind].prefix,
             (unsigned long long)(s->id_secret & 0xffffffff), (unsigned long long)++s->next_id);
    c->body = http_take_body(x, &c->n_body);
    const char *key = access_bearer(x);
    c->key = key && !s->opt.share_prefix_cache ? mem_strdup(key) : NULL;
    c->owner = key ? mem_strdup(key) : NULL;
    c->next = s->calls;
    if (c->next)
        c->next->prev = c;
    s->calls = c;
    s->n_calls++;
    http_watch(x, c, on_closed, on_drained);
    c->with_worker = true;
    c->job.client = access_client(&s->opt.access, s->id_secret, x);
    c->job.bytes = c->n_body;
    jobs_add(s->jobs, &c->job, c->start_ns);
    if (!event_pending(s->job_tick, EV_TIMEOUT, NULL))
        event_add(s->job_tick, &(struct timeval){0, JOB_SHORT_MS * 500});
}

static void prepare(void *arg)
{
    call_prepare(arg);
}

void call_run(struct job *job)
{
    struct call *c = (struct call *)job;
    if (mem_try(prepare, c))
        return;
    /* What was prepared is freed already. */
    memset(&c->p, 0, sizeof c->p);
    c->prompts = NULL;
    c->echo = NULL;
    c->n_prompts = 0;
    c->model = NULL;
    c->chat = NULL;
    if (c->embed && !embed_call_done(c->embed))
        c->embed = NULL;
    c->reply = (struct buf){0};
    api_fail(&c->err, 503, "unavailable_error", "there is no memory for this request now");
}

/* Into the engine */

static void set_submit_error(struct call *c, enum submit_result res, const struct error *e,
                             int part)
{
    struct api_error *err = &c->err;
    const char *param = kinds[c->kind].input;
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

/* What waits in the call was `before` bytes in some choice, and is `after` now. */
static void keep(struct call *c, size_t before, size_t after)
{
    c->kept += after - before;
    c->server->kept += after - before;
    if (c->kept > c->n_kept_most)
        c->n_kept_most = c->kept;
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
            .prompt_logprobs = c->p.echo && c->p.logprobs,
            .read_only = c->p.no_answer,
            .stop = (const char *const *)c->p.stop,
            .n_stop = c->p.n_stop,
            .think_open = c->chat ? c->chat->think_open : NULL,
            .think_close = c->chat ? c->chat->think_close : NULL,
            .in_thinking = c->chat && c->chat->in_reasoning,
            .client = c->job.client,
            .salt = salt.p,
            .queue = s->events,
            .user = part,
            .grammar = c->grammar,
            .n_loras = c->n_loras,
        };
        memcpy(spec.loras, c->loras, sizeof spec.loras);
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
    for (int i = 0; ok && i < c->n_choices; i++)
        keep(c, 0, choice_kept(&c->choices[i]));
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
    const char *type = style_of(c)->type;
    http_stream_start(c->x, 200, type ? type : "text/event-stream; charset=utf-8");
    struct buf out = {0};
    style_of(c)->stream_open(c, &out);
    http_stream(c->x, out.p, out.len);
    buf_clear(&out);
}

static void prepared(struct call *c)
{
    c->with_worker = false;
    c->server->trim_due |= c->n_body >= LARGE_REQUEST;
    if (!c->x) {
        call_release(c);
        return;
    }
    if (!c->embed || !embed_call_done(c->embed))
        http_body_done(c->x);
    if (c->err.status) {
        fail(c, &c->err);
    } else if (c->reply.len) {
        keep(c, 0, c->reply.len);
        call_pump(c);
    } else if (!(c->embed ? embed_submit(c) : submit(c))) {
        fail(c, &c->err);
    } else if (!c->embed) {
        begin_reply(c);
    }
    call_release(c);
}

/* Its vectors are there: a worker writes the reply. */
static void embedded(struct call *c)
{
    struct server *s = c->server;
    if (c->x && c->err.status) {
        fail(c, &c->err);
    } else if (c->x) {
        c->with_worker = true;
        jobs_add(s->jobs, &c->job, clock_ns());
        if (!event_pending(s->job_tick, EV_TIMEOUT, NULL))
            event_add(s->job_tick, &(struct timeval){0, JOB_SHORT_MS * 500});
    }
    call_release(c);
}

void calls_prepared(struct server *s)
{
    struct job *job = jobs_finished(s->jobs);
    for (struct job *next; job; job = next) {
        next = job->next;
        prepared((struct call *)job);
    }
    for (struct call *c; (c = embed_next_done(s));)
        embedded(c);
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

/* No whole answer will come: the client is told so in whatever way is left. */
static void fail_answer(struct call *c, const struct api_error *err)
{
    struct http_exchange *x = c->x;
    cancel(c);
    if (!c->streaming && !c->whole.sending) {
        fail(c, err);
        return;
    }
    log_call(c, err->status, err->msg);
    detach(c);
    if (c->whole.sending) {
        http_abort(x); /* half an object, and no end of it */
        return;
    }
    struct buf out = {0};
    style_of(c)->stream_error(c, err, &out);
    http_stream(x, out.p, out.len);
    buf_clear(&out);
    http_stream_end(x);
}

/* Whether an answer has failed, and how. */
static bool first_error(const struct call *c, struct api_error *err)
{
    for (int i = 0; c->choices && i < c->n_choices; i++) {
        const struct choice_out *o = &c->choices[i];
        if (!o->done)
            continue;
        if (o->finish == FINISH_ERROR && o->refused) {
            api_invalid(err, NULL, "%s", o->error);
            err->code = "constraint_failed";
            return true;
        }
        if (o->finish == FINISH_ERROR)
            return !api_fail(err, 500, "server_error", "%s", o->error);
        if (o->finish == FINISH_CANCEL && !o->stopped_by_parser)
            return !api_fail(err, 503, "unavailable_error", "the server is shutting down");
    }
    return false;
}

/* Bytes that may be written now. */
static size_t room_of(const struct call *c)
{
    size_t unsent = http_unsent(c->x);
    return unsent < UNSENT_LIMIT ? UNSENT_LIMIT - unsent : 0;
}

static void pump_stream(struct call *c)
{
    const struct reply_style *style = style_of(c);
    struct buf out = {0};
    size_t room = room_of(c);
    int n_finished = 0, full = -1;
    for (int k = 0; c->choices && k < c->n_choices; k++) {
        int i = (c->turn + k) % c->n_choices;
        struct choice_out *o = &c->choices[i];
        n_finished += o->finish_sent;
        if (o->finish_sent)
            continue;
        size_t before = choice_kept(o);
        bool all = out.len < room && style->stream_flush(c, i, &out, room);
        if (all && o->done) {
            style->stream_finish(c, i, &out);
            o->finish_sent = true;
            n_finished++;
        }
        keep(c, before, choice_kept(o));
        if (!all) {
            full = i;
            break;
        }
    }
    if (full >= 0)
        c->turn = full; /* who had no room goes first next time */
    if (out.len) {
        c->last_write_ns = clock_ns();
        http_stream(c->x, out.p, out.len);
    }
    buf_clear(&out);
    if (n_finished == c->n_choices) {
        log_call(c, 200, choice_finish_reason(c, &c->choices[0]));
        end_stream(c);
    }
}

/* The next piece of a reply that does not stream; true: it is the last. */
static bool next_piece(struct call *c, struct buf *out, size_t room)
{
    if (c->reply.len) {
        size_t left = c->reply.len - c->n_reply_sent, n = left < room ? left : room;
        buf_add(out, c->reply.p + c->n_reply_sent, n);
        c->n_reply_sent += n;
        keep(c, n, 0);
        return n == left;
    }
    size_t before = 0, after = 0;
    for (int i = c->whole.choice; i < c->n_choices; i++)
        before += choice_kept(&c->choices[i]);
    bool all = style_of(c)->whole(c, out, room);
    for (int i = c->whole.choice; i < c->n_choices; i++)
        after += choice_kept(&c->choices[i]);
    keep(c, before, after);
    return all;
}

static void pump_whole(struct call *c)
{
    struct http_exchange *x = c->x;
    bool early = c->n_open && c->kept >= WHOLE_EARLY && c->choices && c->choices[0].done;
    if (!c->whole.sending && c->n_open && !early)
        return;
    size_t room = c->whole.sending ? room_of(c) : WHOLE_ONCE;
    struct buf out = {0};
    bool all = room && next_piece(c, &out, room);
    const char *how = c->n_choices ? choice_finish_reason(c, &c->choices[0]) : "ok";
    if (all)
        log_call(c, 200, how);
    if (all && !c->whole.sending) {
        detach(c);
        reply_json(x, c->server, 200, &out);
    } else {
        if (!c->whole.sending) {
            c->server->n_http[2]++;
            http_stream_start(x, 200, "application/json");
        }
        c->whole.sending = true;
        http_stream(x, out.p, out.len);
        if (all) {
            detach(c);
            http_stream_end(x);
        }
    }
    buf_clear(&out);
}

/* A client that reads more slowly than its answers are written, or asks for more than it may. */
static void check_kept(struct call *c)
{
    struct server *s = c->server;
    size_t most = s->opt.max_unsent;
    struct call *largest = c;
    struct api_error err;
    if (c->kept > most) {
        api_fail(
            &err, 400, "invalid_request_error",
            "%zu bytes of answers wait to be sent, and %zu is the limit (--max-unsent): ask for "
            "fewer tokens, choices or log-probabilities, or read them faster as a stream",
            c->kept, most);
    } else if (s->kept > KEPT_CALLS * most) {
        for (struct call *k = s->calls; k; k = k->next)
            if (k->x && k->kept > largest->kept)
                largest = k;
        api_fail(&err, 503, "unavailable_error",
                 "too many answers wait to be sent; this was the largest of them");
    } else {
        return;
    }
    fail_answer(largest, &err);
    if (largest != c)
        call_release(largest);
}

void call_pump(struct call *c)
{
    struct api_error err;
    if (!c->x || (!c->choices && !c->reply.len))
        return;
    if (first_error(c, &err))
        fail_answer(c, &err);
    else if (c->streaming)
        pump_stream(c);
    else
        pump_whole(c);
}

void calls_event(struct server *s, const struct engine_event *ev)
{
    struct call_part *part = ev->user;
    struct call *c = part->call;
    struct choice_out *o = &c->choices[part->first + ev->index];
    s->n_tokens += ev->kind == EVENT_TOKEN;
    if (ev->kind == EVENT_DONE) {
        c->n_open--;
        o->done = true;
        o->finish = ev->finish;
        o->stop = ev->stop;
        o->usage = ev->usage;
        o->refused = ev->refused;
        if (ev->error)
            o->error = mem_strdup(ev->error);
        if (ev->finish == FINISH_STOP || ev->finish == FINISH_LENGTH)
            s->mean_tokens += (ev->usage.n_generated - s->mean_tokens) / (s->mean_tokens ? 16 : 1);
    } else if (ev->kind == EVENT_START) {
        o->usage = ev->usage;
    }
    if (c->x) {
        size_t before = choice_kept(o);
        choice_token(c, o, ev);
        if (ev->kind == EVENT_DONE)
            choice_finish(o);
        else if (o->stopped_by_parser && c->p.n == 1)
            request_cancel(part->request); /* nobody reads on */
        keep(c, before, choice_kept(o));
        call_pump(c);
        if (c->x)
            check_kept(c);
    }
    call_release(c);
}

/* Of the answers that are running or waiting: tokens to come, as far as one can know. */
static double tokens_to_come(const struct server *s)
{
    double n = 0;
    for (const struct call *c = s->calls; c; c = c->next)
        for (int i = 0; i < c->n_choices; i++) {
            const struct choice_out *o = &c->choices[i];
            int most = c->p.max_tokens ? c->p.max_tokens : engine_context(s->engine);
            double left = most - o->usage.n_generated;
            double usual = s->mean_tokens - o->usage.n_generated;
            if (s->mean_tokens && left > usual)
                left = usual > s->mean_tokens / 4 ? usual : s->mean_tokens / 4;
            n += o->done || left < 0 ? 0 : left;
        }
    return n;
}

int calls_wait_s(const struct server *s)
{
    enum { LEAST = 1, MOST = 600 };
    double rate = s->rate;
    if (rate <= 0 && s->ready) { /* nothing measured yet: over all the time */
        struct engine_stats e;
        engine_stats(s->engine, &e);
        rate = e.busy_s > 0 ? (double)e.generated_tokens / e.busy_s : 0;
    }
    double wait = rate > 0 ? tokens_to_come(s) / rate : LEAST;
    return wait < LEAST ? LEAST : wait > MOST ? MOST : (int)(wait + 0.5);
}

static void measure_rate(struct server *s, int64_t now)
{
    double dt = (double)(now - s->rate_ns) * 1e-9;
    if (dt < 0.5)
        return;
    double rate = (double)(s->n_tokens - s->n_tokens_then) / dt;
    bool fresh = s->n_tokens_then && s->rate > 0 && dt < 3;
    if (rate > 0)
        s->rate = fresh ? s->rate + (rate - s->rate) / 2 : rate;
    s->n_tokens_then = s->n_tokens;
    s->rate_ns = now;
}

void calls_tick(struct server *s)
{
    int64_t now = clock_ns();
    measure_rate(s, now);
    if (s->trim_due)
        jobs_trim(s->jobs);
    s->trim_due = false;
    for (struct call *c = s->calls; c; c = c->next)
        if (c->x && c->streaming && now - c->last_write_ns >= (int64_t)s->opt.ping_s * 1000000000 &&
            http_unsent(c->x) == 0 && style_of(c)->ping) {
            const char *ping = style_of(c)->ping;
            c->last_write_ns = now;
            http_stream(c->x, ping, strlen(ping));
        }
}

void calls_cut(struct server *s, const char *why)
{
    struct api_error err;
    api_fail(&err, 503, "unavailable_error", "%s", why);
    for (struct call *c = s->calls, *next; c; c = next) {
        next = c->next;
        if (c->x)
            fail_answer(c, &err);
        call_release(c);
    }
}
