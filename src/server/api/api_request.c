/*
 * An API request from its body to its reply: to a worker and back, into the engine, engine events to
 * text, text to the client.
 * See the invariants in server_int.h.
 */
#include "server/api/server_int.h"
#include "server/api/background.h"
#include "server/api/embeddings.h"
#include "server/api/mcp_loop.h"
#include "server/api/responses.h"
#include "server/api/slots.h"
#include "text/grammar/grammar.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"

#include <event2/event.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { QUEUE_TICK_US = 100000, SLOW_WORKERS_MOST = 12 };

static const struct reply_style *style_of(const struct api_request *req)
{
    return req->endpoint->reply;
}

bool reply_has_room(struct http_exchange *x, struct server *s, size_t n)
{
    struct api_error err;
    if (http_has_room(x, n))
        return true;
    api_fail(&err, 503, "unavailable_error",
             "too many bytes of earlier replies are unread (--max-unsent); try again later");
    reply_error(x, s, &err, endpoint_dialect(http_request(x)));
    return false;
}

void reply_json(struct http_exchange *x, struct server *s, int status, const struct buf *body)
{
    if (!reply_has_room(x, s, body->len))
        return;
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
        snprintf(wait, sizeof wait, "%d", api_requests_wait_s(s));
        http_add_header(x, "Retry-After", wait);
    }
    if (err->status == 401)
        http_add_header(x, "WWW-Authenticate", "Bearer");
    reply_json(x, s, err->status, &b);
    buf_clear(&b);
}

static void api_request_free(struct api_request *req)
{
    struct server *s = req->server;
    *(req->prev ? &req->prev->next : &s->requests) = req->next;
    if (req->next)
        req->next->prev = req->prev;
    s->n_requests--;
    s->kept -= req->kept;
    s->trim_due |= req->n_body >= LARGE_REQUEST || req->n_kept_most >= LARGE_REQUEST;
    for (int i = 0; i < req->n_choices; i++)
        api_choice_clear(&req->choices[i]);
    for (int i = 0; i < req->n_prompts; i++) {
        token_list_clear(&req->prompts[i]);
        if (req->echo)
            buf_clear(&req->echo[i]);
        if (req->parts)
            request_free(req->parts[i].request);
    }
    mem_free(req->prompts);
    mem_free(req->echo);
    mem_free(req->parts);
    mem_free(req->choices);
    chat_prompt_free(req->chat);
    responses_request_free(req->responses);
    grammar_free(req->grammar);
    token_rules_free(req->rules);
    embed_request_free(req->embed);
    mcp_call_free(req->mcp_call);
    prompt_images_free(req->images);
    mcp_list_release(req->mcp_list);
    gen_params_clear(&req->p);
    json_decref(req->completion.fields);
    if (req->prompt_timer)
        event_free(req->prompt_timer);
    buf_clear(&req->reply);
    buf_clear(&req->event_head);
    mem_free(req->body);
    mem_free(req->path);
    mem_free(req->query);
    mem_free(req->key);
    mem_free(req->owner);
    mem_free(req->model);
    models_release(s->models, req);
    mem_free(req);
}

/* Whether its output goes anywhere. */
static bool is_wanted(const struct api_request *req)
{
    return req->x || req->background;
}

void api_request_release(struct api_request *req)
{
    if (!req->with_worker && req->n_open == 0 && !is_wanted(req))
        api_request_free(req);
}

/* Cancels its job and its engine requests. */
static void cancel(struct api_request *req)
{
    atomic_store(&req->cancelled, true);
    models_leave(req->server->models, req);
    struct jobs *jobs = req->is_slow ? req->server->slow_jobs : req->server->jobs;
    if (req->with_worker && jobs_remove(jobs, &req->job))
        req->with_worker = req->is_slow = false;
    if (!req->with_worker && req->embed) /* a worker still uses it */
        embed_cancel(req->embed);
    if (!req->with_worker && req->mcp_call && req->n_open)
        mcp_call_cancel(req->server->mcp, req->mcp_call);
    mcp_loop_cancel(req);
    for (int i = 0; req->parts && i < req->n_prompts; i++)
        if (req->parts[i].request)
            request_cancel(req->parts[i].request);
}

/* One line per request, when its reply ends. */
static void log_request(const struct api_request *req, int status, const char *how)
{
    const char *name = req->endpoint->name;
    struct usage_count u = api_request_usage(req, NULL);
    double ms = (double)(clock_ns() - req->start_ns) * 1e-6;
    if (!req->parts) {
        log_line(LOG_INFO, name, LOG_TEXT("id", req->id), LOG_NUM("status", status),
                 LOG_NUM("ms", ms), LOG_TEXT("end", how));
        return;
    }
    log_line(LOG_INFO, name, LOG_TEXT("id", req->id), LOG_NUM("status", status),
             LOG_NUM("prompt", u.n_prompt), LOG_NUM("cached", u.n_cached),
             LOG_NUM("disk", u.n_disk), LOG_NUM("tokens", u.n_generated),
             LOG_NUM("queue_ms", (double)u.queue_ns * 1e-6),
             LOG_NUM("first_ms", (double)u.first_ns * 1e-6), LOG_NUM("ms", ms),
             LOG_NUM("preempted", u.n_preempted), LOG_TEXT("end", how));
}

void api_request_stop(struct api_request *req, int status, const char *how)
{
    cancel(req);
    log_request(req, status, how);
}

static void on_closed(void *user)
{
    struct api_request *req = user;
    req->x = NULL;
    api_request_stop(req, 499, "client left");
    api_request_release(req);
}

static void on_drained(void *user)
{
    api_request_pump(user);
    api_request_release(user);
}

/* The reply is complete: lets go of the exchange. */
static void detach(struct api_request *req)
{
    http_watch(req->x, NULL, NULL, NULL);
    req->x = NULL;
    req->over = true;
}

static void fail(struct api_request *req, const struct api_error *err)
{
    struct http_exchange *x = req->x;
    char what[sizeof err->type + sizeof err->param + 2];
    snprintf(what, sizeof what, "%s%s%s", err->type, err->param[0] ? ": " : "", err->param);
    /* The message of a refused request may quote it, which has no place in a log. */
    log_request(req, err->status, err->status < 500 ? what : err->msg);
    if (!x)
        return;
    detach(req);
    reply_error(x, req->server, err, req->endpoint->dialect);
}

/* To the workers */

void api_request_dispatch(struct server *s, struct http_exchange *x,
                          const struct endpoint *endpoint)
{
    struct api_request *req = mem_zalloc(1, sizeof *req);
    req->server = s;
    req->endpoint = endpoint;
    req->x = x;
    req->created = time(NULL);
    req->start_ns = req->last_write_ns = clock_ns();
    req->block = req->completion.id_slot = -1;
    unsigned long long id[2];
    CHECK(os_random(id, sizeof id), "the kernel has no random bytes");
    snprintf(req->id, sizeof req->id, "%s%016llx%016llx",
             endpoint->id_prefix ? endpoint->id_prefix : "", id[0], id[1]);
    req->body = http_take_body(x, &req->n_body);
    if (strchr(endpoint->paths[0], '*')) {
        req->path = mem_strdup(endpoint_path(http_request(x)));
        req->query = mem_strdup(http_request(x)->query);
    }
    const char *key = access_bearer(x);
    req->key = key && !s->opt.share_prefix_cache ? mem_strdup(key) : NULL;
    req->owner = access_owner(&s->opt.access, x);
    req->mcp_list = s->mcp ? mcp_list_get(s->mcp) : NULL;
    req->next = s->requests;
    if (req->next)
        req->next->prev = req;
    s->requests = req;
    s->n_requests++;
    http_watch(x, req, on_closed, on_drained);
    req->with_worker = true;
    req->job.client = access_client(&s->opt.access, s->id_secret, x);
    req->job.bytes = req->n_body;
    jobs_add(s->jobs, &req->job, req->start_ns);
    if (!event_pending(s->job_tick, EV_TIMEOUT, NULL))
        event_add(s->job_tick, &(struct timeval){0, JOB_SHORT_MS * 500});
}

static void prepare(void *arg)
{
    api_request_prepare(arg);
}

static void fail_for_memory(struct api_request *req)
{
    api_fail(&req->err, 503, "unavailable_error",
             "out of memory for this request; try again later");
}

void api_request_run(struct job *job)
{
    struct api_request *req = (struct api_request *)job;
    if (mem_try(prepare, req))
        return;
    if (req->is_slow && req->slow_work == WORK_ENCODE) { /* what was prepared before is there */
        prompt_images_encode_abandon(req->images);
        fail_for_memory(req);
        return;
    }
    /* mem_try has freed what was prepared. */
    if (!req->choices) { /* else they are of an earlier round */
        memset(&req->p, 0, sizeof req->p);
        req->model = NULL;
        req->responses = NULL;
    }
    req->prompts = NULL;
    req->echo = NULL;
    req->n_prompts = 0;
    req->chat = NULL;
    req->mcp_call = NULL;
    prompt_images_abandon(req->images);
    req->images = NULL;
    req->rules = NULL;
    if (req->embed && !embed_request_done(req->embed))
        req->embed = NULL;
    req->completion = (struct completion_options){.id_slot = -1};
    req->reply = (struct buf){0};
    fail_for_memory(req);
}

/* Into the engine */

static void set_submit_error(struct api_request *req, enum submit_result res, const struct error *e,
                             int part)
{
    struct api_error *err = &req->err;
    const char *param = req->endpoint->prompt_field;
    if (res == SUBMIT_FULL) {
        api_fail(err, 429, "rate_limit_error", "%s; try again later", e->msg);
        err->code = "queue_full";
    } else if (res == SUBMIT_NOT_READY) {
        api_fail(err, 503, "unavailable_error", "%s", e->msg);
    } else {
        api_invalid(err, param, "%s", e->msg);
        if (res == SUBMIT_TOO_LONG) {
            int n = (int)req->prompts[part].n, context = engine_context(req->loaded->engine);
            /* Agents look for OpenAI's words, read both numbers and compact their conversation
             * (tests/test_overflow_words.py). */
            api_invalid(err, param,
                        "This model's maximum context length is %d tokens. However, your prompt "
                        "resulted in %d tokens, and the answer must fit, too. Please reduce the "
                        "length of the messages.",
                        context, n);
            err->code = "context_length_exceeded";
            err->n_prompt = n;
            err->n_ctx = context;
        }
    }
}

void api_request_keep(struct api_request *req, size_t before, size_t after)
{
    req->kept += after - before;
    req->server->kept += after - before;
    if (req->kept > req->n_kept_most)
        req->n_kept_most = req->kept;
}

static void make_choices(struct api_request *req, int n)
{
    req->n_choices = n;
    req->choices = mem_zalloc((size_t)n, sizeof *req->choices);
    for (int i = 0; i < n; i++)
        api_choice_init(req, &req->choices[i]);
    mcp_loop_begin(req);
}

static bool submit(struct api_request *req)
{
    struct server *s = req->server;
    int most = engine_max_queue(req->loaded->engine);
    if (req->n_prompts * req->p.n > most)
        return api_invalid(&req->err, "n", "%d choices in one request, and the queue holds %d",
                           req->n_prompts * req->p.n, most);
    req->parts = mem_zalloc((size_t)req->n_prompts, sizeof *req->parts);
    bool first = !req->choices;
    if (first)
        make_choices(req, req->n_prompts * req->p.n);
    else
        api_choice_next_round(req, &req->choices[0]);
    if (!req->p.has_seed && !os_random(&req->p.sample.seed, 8))
        req->p.sample.seed = (uint64_t)clock_ns();
    char *salt = api_request_salt(req, req->p.salt);
    bool ok = true;
    for (int i = 0; ok && i < req->n_prompts; i++) {
        struct prompt_request *part = &req->parts[i];
        *part = (struct prompt_request){.req = req, .first = i * req->p.n};
        struct request_spec spec = {
            .prompt = req->prompts[i].ids,
            .n_prompt = req->prompts[i].n > INT32_MAX ? INT32_MAX : (int)req->prompts[i].n,
            .n = req->p.n,
            .sample = req->p.sample,
            .max_tokens = req->p.max_tokens,
            .min_tokens = req->p.min_tokens,
            .ignore_eos = req->p.ignore_eos,
            .special = req->special,
            .no_cache = req->p.no_cache,
            .logprobs = req->p.logprobs,
            .n_top = req->p.n_top,
            .prompt_logprobs = req->p.echo && req->p.logprobs,
            .read_only = req->p.no_answer,
            .stop = (const char *const *)req->p.stop,
            .n_stop = req->p.n_stop,
            .think_open = req->chat ? req->chat->think_open : NULL,
            .think_close = req->chat ? req->chat->think_close : NULL,
            .in_thinking = req->chat && req->chat->in_reasoning,
            .client = req->job.client,
            .salt = salt,
            .queue = s->events,
            .user = part,
            .grammar = req->grammar,
            .rules = req->rules,
            .stop_tokens = req->p.stop_tokens.ids,
            .n_stop_tokens = (int)req->p.stop_tokens.n,
            .include_stop = req->p.include_stop,
            .n_loras = req->n_loras,
        };
        memcpy(spec.loras, req->loras, sizeof spec.loras);
        prompt_images_submit(req->images, &spec);
        struct error e = {0};
        enum submit_result res = engine_submit(req->loaded->engine, &spec, &part->request, &e);
        ok = res == SUBMIT_OK;
        if (ok)
            req->n_open += req->p.n;
        else
            set_submit_error(req, res, &e, i);
    }
    mem_free(salt);
    prompt_images_rest(req->images); /* the engine has copied what it needs */
    if (!req->responses || !req->responses->mcp) {
        prompt_images_free(req->images);
        req->images = NULL;
    }
    if (!ok)
        cancel(req); /* all prompts are accepted, or none */
    for (int i = 0; ok && first && i < req->n_choices; i++)
        api_request_keep(req, 0, api_choice_kept(&req->choices[i]));
    return ok;
}

/* The prompt was not read in time: its choices end without text. */
static void on_prompt_late(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct api_request *req = arg;
    for (int i = 0; i < req->n_choices; i++) {
        struct api_choice *o = &req->choices[i];
        if (o->done || o->usage.n_generated)
            continue;
        o->stopped_by_parser = o->limited = true;
        request_cancel(req->parts[i / req->p.n].request);
    }
}

/* A request that only fills the cache is never late. llama.vim sends a limit of 1 ms with it. */
static void limit_prompt(struct api_request *req)
{
    int ms = req->completion.max_prompt_ms;
    if (ms <= 0 || req->p.no_answer)
        return;
    req->prompt_timer = evtimer_new(req->server->base, on_prompt_late, req);
    if (!req->prompt_timer)
        mem_die(event_get_struct_event_size());
    event_add(req->prompt_timer, &(struct timeval){ms / 1000, ms % 1000 * 1000});
}

static void begin_reply(struct api_request *req)
{
    req->streaming = req->p.stream;
    if (req->responses && req->responses->background) {
        background_begin(req);
        return;
    }
    if (!req->streaming)
        return;
    http_add_header(req->x, "Cache-Control", "no-cache");
    http_add_header(req->x, "X-Accel-Buffering", "no"); /* nginx: do not buffer */
    req->server->n_http[2]++;
    const char *type = style_of(req)->type;
    http_stream_start(req->x, 200, type ? type : "text/event-stream; charset=utf-8");
    struct buf out = {0};
    style_of(req)->stream_open(req, &out);
    http_stream(req->x, out.p, out.len);
    buf_clear(&out);
}

static void fail_background(struct api_request *req, const struct api_error *err)
{
    struct buf out = {0};
    if (req->streaming) {
        style_of(req)->stream_error(req, err, &out);
        background_write(req->background, &out);
    }
    buf_clear(&out);
    responses_keep_failed(req, "failed", err);
    api_request_stop(req, err->status, err->msg);
    background_end(req);
}

/* The reply cannot be completed: sends an error reply, an error event, or a reset. */
static void fail_answer(struct api_request *req, const struct api_error *err)
{
    struct http_exchange *x = req->x;
    if (req->background) {
        fail_background(req, err);
        return;
    }
    cancel(req);
    if (!req->streaming && !req->whole.sending) {
        fail(req, err);
        return;
    }
    log_request(req, err->status, err->msg);
    detach(req);
    if (req->whole.sending) {
        http_abort(x); /* a part of the JSON was sent */
        return;
    }
    struct buf out = {0};
    style_of(req)->stream_error(req, err, &out);
    http_stream(x, out.p, out.len);
    buf_clear(&out);
    http_stream_end(x);
}

static void to_worker(struct api_request *req)
{
    struct server *s = req->server;
    req->with_worker = true;
    jobs_add(s->jobs, &req->job, clock_ns());
    if (!event_pending(s->job_tick, EV_TIMEOUT, NULL))
        event_add(s->job_tick, &(struct timeval){0, JOB_SHORT_MS * 500});
}

/* Fetching and encoding images and reading and writing files takes long. Those requests have workers of their own, so that
 * no other waits for them, and a client has half of these at most. */
static bool to_slow_worker(struct api_request *req)
{
    struct server *s = req->server;
    long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    int n = cpus >= 16 ? SLOW_WORKERS_MOST : cpus >= 8 ? 8 : 4;
    if (!s->slow_jobs)
        s->slow_jobs = jobs_new(n, n / 2, 0, api_request_run, s->jobs_fd);
    if (!s->slow_jobs)
        return api_fail(&req->err, 503, "unavailable_error", "no thread for slow requests is left");
    req->with_worker = req->is_slow = true;
    if (req->job.bytes <= JOB_SHORT_BYTES)
        req->job.bytes = JOB_SHORT_BYTES + 1;
    jobs_add(s->slow_jobs, &req->job, clock_ns());
    return true;
}

/* A worker has returned. True: another one continues. */
static bool continues_slowly(struct api_request *req)
{
    bool was_slow = req->is_slow;
    req->with_worker = req->is_slow = false;
    if (req->slow_work && !was_slow && !req->err.status && is_wanted(req))
        return to_slow_worker(req);
    req->slow_work = WORK_NONE;
    return false;
}

static void prepared_again(struct api_request *req);

static void on_queue_tick(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct api_request *req = arg;
    mem_free(req->parts);
    req->parts = NULL;
    req->err = (struct api_error){0};
    atomic_store(&req->cancelled, false); /* submit has set it */
    req->slow_work = prompt_images_count(req->images) ? WORK_ENCODE : WORK_NONE;
    if (!req->slow_work || !is_wanted(req) || !to_slow_worker(req))
        prepared_again(req);
}

/* The queue is full, but the response has begun, and its calls have run: it tries again soon. */
static void wait_for_queue(struct api_request *req)
{
    log_line(LOG_DEBUG, "a round waits for the queue", LOG_TEXT("id", req->id));
    if (!req->prompt_timer)
        req->prompt_timer = evtimer_new(req->server->base, on_queue_tick, req);
    if (!req->prompt_timer)
        mem_die(event_get_struct_event_size());
    event_add(req->prompt_timer, &(struct timeval){0, QUEUE_TICK_US});
}

/* The next round of a response is prepared. */
static void prepared_again(struct api_request *req)
{
    bool ok = !is_wanted(req) || (!req->err.status && submit(req));
    if (!ok && req->err.code && !strcmp(req->err.code, "queue_full"))
        wait_for_queue(req);
    else if (!ok)
        fail_answer(req, &req->err);
    api_request_release(req);
}

/* A response begins with calls that its client has approved. */
static bool begin_with_calls(struct api_request *req)
{
    if (!req->responses || !req->responses->mcp || !json_object_size(req->responses->mcp->approved))
        return false;
    make_choices(req, 1);
    api_request_keep(req, 0, api_choice_kept(&req->choices[0]));
    begin_reply(req);
    mcp_loop_run_approved(req);
    if (mcp_loop_is_due(req))
        to_worker(req);
    api_request_pump(req);
    return true;
}

void api_request_resume(struct api_request *req)
{
    to_worker(req);
}

void api_request_fail(struct api_request *req, const struct api_error *err)
{
    fail(req, err);
    api_request_release(req);
}

static void prepared(struct api_request *req)
{
    if (continues_slowly(req))
        return;
    if (req->choices) {
        prepared_again(req);
        return;
    }
    req->server->trim_due |= req->n_body >= LARGE_REQUEST;
    if (!req->x) {
        api_request_release(req);
        return;
    }
    bool waits = req->entry && !req->err.status;
    if (!waits && (!req->embed || !embed_request_done(req->embed)))
        http_body_done(req->x);
    if (req->err.status || (waits && !models_wait(req->server->models, req))) {
        fail(req, &req->err);
    } else if (waits) {
        ;
    } else if (req->reply.len) {
        api_request_keep(req, 0, req->reply.len);
        api_request_pump(req);
    } else if (req->responses && req->responses->background && !background_admit(req)) {
        fail(req, &req->err);
    } else if (req->mcp_call) {
        mcp_submit(req);
    } else if (begin_with_calls(req)) {
        ;
    } else if (!(req->embed ? embed_submit(req) : submit(req))) {
        bool background = req->responses && req->responses->background;
        if (req->err.n_ctx && req->p.stream && style_of(req)->too_long_in_stream && !background) {
            begin_reply(req);
            fail_answer(req, &req->err);
        } else {
            fail(req, &req->err);
        }
    } else if (!req->embed) {
        limit_prompt(req);
        begin_reply(req);
    }
    api_request_release(req);
}

/* Its embeddings are computed: a worker writes the reply. */
static void embedded(struct api_request *req)
{
    if (req->x && req->err.status)
        fail(req, &req->err);
    else if (req->x)
        to_worker(req);
    api_request_release(req);
}

static void check_kept(struct api_request *req);

/* A tool of an MCP server has replied. */
static void called(struct mcp_call *call)
{
    struct api_request *req = call->user;
    req->n_open--;
    if (req->choices) {
        size_t before = api_choice_kept(&req->choices[0]);
        mcp_loop_called(req, call);
        api_request_keep(req, before, api_choice_kept(&req->choices[0]));
        if (is_wanted(req) && mcp_loop_is_due(req))
            to_worker(req);
        api_request_pump(req);
        if (is_wanted(req))
            check_kept(req);
    } else if (req->x) {
        mcp_write(req);
        api_request_keep(req, 0, req->reply.len);
        api_request_pump(req);
    }
    api_request_release(req);
}

static void take_finished(struct jobs *q)
{
    struct job *job = jobs_finished(q);
    for (struct job *next; job; job = next) {
        next = job->next;
        prepared((struct api_request *)job);
    }
}

void api_requests_prepared(struct server *s)
{
    os_woken(
        s->jobs_fd); /* before any list is taken: what finishes meanwhile wakes the loop again */
    take_finished(s->jobs);
    if (s->slow_jobs)
        take_finished(s->slow_jobs);
    for (struct api_request *req; (req = embed_next_done(s));)
        embedded(req);
    for (struct mcp_call *call; s->mcp && (call = mcp_next_done(s->mcp));)
        called(call);
}

/* To the client */

static void end_stream(struct api_request *req)
{
    struct http_exchange *x = req->x;
    struct buf out = {0};
    style_of(req)->stream_close(req, &out);
    if (req->background) {
        background_write(req->background, &out);
        buf_clear(&out);
        responses_keep_finished(req);
        background_end(req);
        return;
    }
    http_stream(x, out.p, out.len);
    buf_clear(&out);
    detach(req);
    http_stream_end(x);
}

/* Whether a choice has failed, and the error. */
static bool first_error(const struct api_request *req, struct api_error *err)
{
    for (int i = 0; req->choices && i < req->n_choices; i++) {
        const struct api_choice *o = &req->choices[i];
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

/* How many bytes may be written now. */
static size_t room_of(const struct api_request *req)
{
    if (req->background)
        return SIZE_MAX;
    size_t unsent = http_unsent(req->x);
    return unsent < UNSENT_LIMIT ? UNSENT_LIMIT - unsent : 0;
}

static void pump_stream(struct api_request *req)
{
    const struct reply_style *style = style_of(req);
    struct buf *out = &req->server->out;
    size_t room = room_of(req);
    buf_reset(out);
    int n_finished = 0, full = -1;
    for (int k = 0; req->choices && k < req->n_choices; k++) {
        int i = (req->turn + k) % req->n_choices;
        struct api_choice *o = &req->choices[i];
        n_finished += o->finish_sent;
        if (o->finish_sent)
            continue;
        size_t before = api_choice_kept(o);
        bool all = out->len < room && style->stream_flush(req, i, out, room);
        if (all && o->done) {
            style->stream_finish(req, i, out);
            o->finish_sent = true;
            n_finished++;
        }
        api_request_keep(req, before, api_choice_kept(o));
        if (!all) {
            full = i;
            break;
        }
    }
    if (full >= 0)
        req->turn = full; /* the choice without room goes first next time */
    if (out->len) {
        req->last_write_ns = clock_ns();
        if (req->background)
            background_write(req->background, out);
        else
            http_stream(req->x, out->p, out->len);
    }
    if (n_finished == req->n_choices) {
        log_request(req, 200, api_choice_finish_reason(req, &req->choices[0]));
        end_stream(req);
    }
}

/* Writes the next piece of a non-streaming reply; true: the last one. */
static bool next_piece(struct api_request *req, struct buf *out, size_t room)
{
    if (req->reply.len) {
        size_t left = req->reply.len - req->n_reply_sent, n = left < room ? left : room;
        buf_add(out, req->reply.p + req->n_reply_sent, n);
        req->n_reply_sent += n;
        api_request_keep(req, n, 0);
        return n == left;
    }
    size_t before = 0, after = 0;
    for (int i = req->whole.choice; i < req->n_choices; i++)
        before += api_choice_kept(&req->choices[i]);
    bool all = style_of(req)->whole(req, out, room);
    for (int i = req->whole.choice; i < req->n_choices; i++)
        after += api_choice_kept(&req->choices[i]);
    api_request_keep(req, before, after);
    return all;
}

static void pump_whole(struct api_request *req)
{
    struct http_exchange *x = req->x;
    bool early = req->n_open && req->kept >= WHOLE_EARLY && req->choices && req->choices[0].done;
    bool between = req->choices && !req->choices[0].done; /* two rounds */
    if (!req->whole.sending && (req->n_open || req->with_worker || between) && !early)
        return;
    if (req->background) {
        if (req->n_open)
            return;
        responses_keep_finished(req);
        log_request(req, 200, api_choice_finish_reason(req, &req->choices[0]));
        background_end(req);
        return;
    }
    size_t room = req->whole.sending ? room_of(req) : WHOLE_ONCE;
    struct buf out = {0};
    bool all = room && next_piece(req, &out, room);
    const char *how = req->n_choices ? api_choice_finish_reason(req, &req->choices[0]) : "ok";
    if (all)
        log_request(req, 200, how);
    if (all && !req->whole.sending) {
        detach(req);
        reply_json(x, req->server, 200, &out);
    } else {
        if (!req->whole.sending) {
            req->server->n_http[2]++;
            http_stream_start(x, 200, "application/json");
        }
        req->whole.sending = true;
        http_stream(x, out.p, out.len);
        if (all) {
            detach(req);
            http_stream_end(x);
        }
    }
    buf_clear(&out);
}

/* Ends a request whose unsent output exceeds the limits. */
static void check_kept(struct api_request *req)
{
    struct server *s = req->server;
    size_t most = s->opt.max_unsent;
    struct api_request *largest = req;
    struct api_error err;
    if (req->kept > most) {
        api_fail(&err, 400, "invalid_request_error",
                 "%zu bytes of output are unsent, and %zu is the limit (--max-unsent): request "
                 "fewer tokens, choices or log-probabilities, or read a stream faster",
                 req->kept, most);
    } else if (s->kept > KEPT_REQUESTS * most) {
        for (struct api_request *k = s->requests; k; k = k->next)
            if (is_wanted(k) && k->kept > largest->kept)
                largest = k;
        api_fail(&err, 503, "unavailable_error",
                 "too much unsent output on the server; this request had the most");
    } else {
        return;
    }
    fail_answer(largest, &err);
    if (largest != req)
        api_request_release(largest);
}

void api_request_pump(struct api_request *req)
{
    struct api_error err;
    if (!is_wanted(req) || (!req->choices && !req->reply.len))
        return;
    if (first_error(req, &err))
        fail_answer(req, &err);
    else if (req->streaming)
        pump_stream(req);
    else
        pump_whole(req);
}

/* The engine is done with a choice. Its response may continue after calls of tools. */
static void finish_choice(struct api_request *req, struct api_choice *o)
{
    api_choice_finish(o);
    o->done = !mcp_loop_continue(req);
    if (!o->done && mcp_loop_is_due(req)) /* none of them could be started */
        to_worker(req);
}

void api_requests_event(struct server *s, const struct engine_event *ev)
{
    struct prompt_request *part = ev->user;
    struct api_request *req = part->req;
    struct api_choice *o = &req->choices[part->first + ev->index];
    s->n_tokens += ev->kind == EVENT_TOKEN;
    if (ev->kind == EVENT_DONE) {
        slots_end(req->loaded->slots, o);
        req->n_open--;
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
        slots_start(req->loaded->slots, req, o);
    } else if (ev->kind == EVENT_TOKEN) {
        slots_token(req->loaded->slots, o, ev->token);
    }
    if (is_wanted(req)) {
        size_t before = api_choice_kept(o);
        api_choice_token(req, o, ev);
        if (ev->kind == EVENT_DONE)
            finish_choice(req, o);
        else if (o->stopped_by_parser && req->p.n == 1)
            request_cancel(part->request); /* the rest would be discarded */
        api_request_keep(req, before, api_choice_kept(o));
        api_request_pump(req);
        if (is_wanted(req))
            check_kept(req);
    }
    api_request_release(req);
}

/* Estimates the tokens that running and waiting choices will still generate. */
static double tokens_to_come(const struct server *s)
{
    double n = 0;
    for (const struct api_request *req = s->requests; req; req = req->next)
        for (int i = 0; i < req->n_choices; i++) {
            const struct api_choice *o = &req->choices[i];
            int most = req->p.max_tokens ? req->p.max_tokens : engine_context(req->loaded->engine);
            double left = most - o->usage.n_generated;
            double usual = s->mean_tokens - o->usage.n_generated;
            if (s->mean_tokens && left > usual)
                left = usual > s->mean_tokens / 4 ? usual : s->mean_tokens / 4;
            n += o->done || left < 0 ? 0 : left;
        }
    return n;
}

int api_requests_wait_s(const struct server *s)
{
    enum { LEAST = 1, MOST = 600 };
    double rate = s->rate;
    if (rate <= 0 && s->models) { /* nothing measured yet: the average since the start */
        struct engine_stats e;
        models_stats(s->models, &e);
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

void api_requests_tick(struct server *s)
{
    int64_t now = clock_ns();
    measure_rate(s, now);
    if (s->trim_due)
        jobs_trim(s->jobs);
    s->trim_due = false;
    for (struct api_request *req = s->requests; req; req = req->next)
        if (req->x && req->streaming &&
            now - req->last_write_ns >= (int64_t)s->opt.ping_s * 1000000000 &&
            http_unsent(req->x) == 0 && style_of(req)->ping) {
            const char *ping = style_of(req)->ping;
            req->last_write_ns = now;
            http_stream(req->x, ping, strlen(ping));
        }
    background_tick(s, now);
}

void api_requests_cut(struct server *s, const char *why)
{
    struct api_error err;
    api_fail(&err, 503, "unavailable_error", "%s", why);
    for (struct api_request *req = s->requests, *next; req; req = next) {
        next = req->next;
        if (is_wanted(req))
            fail_answer(req, &err);
        api_request_release(req);
    }
}
