/* include/steel.h over the engine: translates structs, owns a request's own queue. Nothing else. */
#include "base/mem.h"
#include "engine/engine.h"

#include <steel.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

struct steel_engine {
    struct engine *e;
};

struct steel_queue {
    struct events *q;
};

struct steel_request {
    struct request *r;
    struct steel_queue *own; /* NULL: shared */
    int n_open;              /* choices not done, as its reader has seen */
};

static void set_error(struct steel_error *out, enum steel_error_kind kind, const char *msg)
{
    if (!out)
        return;
    out->kind = kind;
    snprintf(out->message, sizeof out->message, "%s", msg);
}

/* Reports progress from the caller's thread: the engine's own must not run foreign code. */
static bool wait_ready(struct engine *e, const struct steel_engine_options *o, struct error *err)
{
    int percent, shown = -1;
    while (o->progress && engine_state(e, &percent, NULL) == ENGINE_LOADING) {
        if (percent != shown && !o->progress(o->progress_arg, percent))
            return error_set(err, "given up by the caller");
        shown = percent;
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    }
    return engine_wait(e, err);
}

struct steel_engine *steel_engine_open(const char *path, const struct steel_engine_options *options,
                                       struct steel_error *error)
{
    struct steel_engine_options o = {0};
    if (options)
        o = *options;
    struct engine_options opt = {
        .runtime = {.backend = {.device = o.device ? o.device : "auto",
                                .threads = o.threads,
                                .deterministic = o.deterministic},
                    .context = o.context,
                    .max_seqs = o.max_requests,
                    .kv_bytes = o.kv_bytes},
        .max_queue = o.max_queue,
        .step_ms = o.step_ms,
        .no_prefix_cache = o.no_prefix_cache,
    };
    struct engine *e = engine_open(path, &opt);
    struct error err = {0};
    if (!wait_ready(e, &o, &err)) {
        set_error(error, STEEL_INVALID, err.msg);
        engine_close(e);
        return NULL;
    }
    struct steel_engine *engine = mem_zalloc(1, sizeof *engine);
    engine->e = e;
    return engine;
}

void steel_engine_close(struct steel_engine *engine)
{
    if (!engine)
        return;
    engine_close(engine->e);
    mem_free(engine);
}

int steel_engine_context(const struct steel_engine *engine)
{
    return engine_context(engine->e);
}

int steel_engine_n_vocab(const struct steel_engine *engine)
{
    return engine_runtime(engine->e)->model->config.n_vocab;
}

void steel_engine_stats(struct steel_engine *engine, struct steel_stats *out)
{
    struct engine_stats s;
    engine_stats(engine->e, &s);
    *out = (struct steel_stats){
        .running = s.n_running,
        .waiting = s.n_waiting,
        .kv_pages = s.pages_total,
        .kv_pages_held = s.pages_held,
        .kv_pages_cached = s.pages_idle,
        .prompt_tokens = s.prompt_tokens,
        .cached_tokens = s.cache_hits,
        .generated_tokens = s.generated_tokens,
        .steps = s.n_steps,
        .preemptions = s.n_preempted,
        .cancellations = s.finished[FINISH_CANCEL],
    };
}

static const struct tokenizer *tokenizer_of(const struct steel_engine *engine,
                                            struct steel_error *error)
{
    const struct runtime *rt = engine_runtime(engine->e);
    if (!rt->tokenizer)
        set_error(error, STEEL_INVALID, rt->tokenizer_error.msg);
    return rt->tokenizer;
}

int steel_engine_tokenize(const struct steel_engine *engine, const char *text, size_t len,
                          int flags, int32_t *ids, int cap, struct steel_error *error)
{
    const struct tokenizer *t = tokenizer_of(engine, error);
    struct token_list list = {0};
    struct error err = {0};
    int how = (flags & STEEL_PARSE_SPECIAL ? TOKENIZE_SPECIAL : 0) |
              (flags & STEEL_ADD_SPECIAL ? TOKENIZE_BOS : 0);
    int n = -1;
    if (t && !tokenizer_encode(t, text, len, how, &list, &err))
        set_error(error, STEEL_INVALID, err.msg);
    else if (t && list.n <= INT32_MAX)
        n = (int)list.n;
    for (int i = 0; i < n && i < cap; i++)
        ids[i] = list.ids[i];
    token_list_clear(&list);
    return n;
}

int steel_engine_detokenize(const struct steel_engine *engine, const int32_t *ids, int n,
                            char *text, int cap, struct steel_error *error)
{
    const struct tokenizer *t = tokenizer_of(engine, error);
    if (!t)
        return -1;
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= tokenizer_n_vocab(t)) {
            set_error(error, STEEL_INVALID, "a token id outside the vocabulary");
            return -1;
        }
    struct buf out = {0};
    tokenizer_decode(t, ids, (size_t)n, true, &out);
    int len = out.len <= INT32_MAX ? (int)out.len : -1;
    if (cap > 0 && len > 0)
        memcpy(text, out.p, (size_t)(len < cap ? len : cap));
    if (len >= 0 && len < cap)
        text[len] = 0;
    buf_clear(&out);
    return len;
}

struct steel_request_options steel_request_options(void)
{
    struct sample_params p = sample_params_default();
    return (struct steel_request_options){.temperature = p.temp,
                                          .top_k = p.top_k,
                                          .top_p = p.top_p,
                                          .min_p = p.min_p,
                                          .repeat_penalty = p.repeat_penalty,
                                          .top_logprobs = -1};
}

static enum steel_error_kind kind_of(enum submit_result res)
{
    static const enum steel_error_kind kinds[] = {[SUBMIT_OK] = STEEL_OK,
                                                  [SUBMIT_INVALID] = STEEL_INVALID,
                                                  [SUBMIT_TOO_LONG] = STEEL_TOO_LONG,
                                                  [SUBMIT_FULL] = STEEL_FULL,
                                                  [SUBMIT_NOT_READY] = STEEL_NOT_READY};
    return kinds[res];
}

_Static_assert(sizeof(struct steel_bias) == sizeof(struct logit_bias) &&
                   offsetof(struct steel_bias, bias) == offsetof(struct logit_bias, bias),
               "the public bias is the sampler's");
_Static_assert(sizeof(struct steel_logprob) == sizeof(struct token_prob) &&
                   offsetof(struct steel_logprob, logprob) == offsetof(struct token_prob, logprob),
               "the public log-probability is the engine's");

struct steel_request *steel_request_submit(struct steel_engine *engine,
                                           const struct steel_request_options *o,
                                           struct steel_error *error)
{
    struct token_list prompt = {0};
    struct error err = {0};
    if (o->text) {
        const struct tokenizer *t = tokenizer_of(engine, error);
        if (!t)
            return NULL;
        if (!tokenizer_encode(t, o->text, strlen(o->text), TOKENIZE_SPECIAL | TOKENIZE_BOS, &prompt,
                              &err)) {
            set_error(error, STEEL_INVALID, err.msg);
            return NULL;
        }
    }
    struct steel_request *r = mem_zalloc(1, sizeof *r);
    if (!o->queue)
        r->own = steel_queue_new();
    struct request_spec spec = {
        .prompt = o->text ? prompt.ids : o->tokens,
        .n_prompt = o->text ? (int)prompt.n : o->n_tokens,
        .n = o->choices,
        .sample = {.temp = o->temperature,
                   .top_k = o->top_k,
                   .top_p = o->top_p,
                   .min_p = o->min_p,
                   .repeat_penalty = o->repeat_penalty,
                   .presence_penalty = o->presence_penalty,
                   .frequency_penalty = o->frequency_penalty,
                   .repeat_last_n = 64,
                   .seed = o->seed,
                   .bias = (const struct logit_bias *)o->bias,
                   .n_bias = o->n_bias},
        .max_tokens = o->max_tokens,
        .min_tokens = o->min_tokens,
        .ignore_eos = o->ignore_eos,
        .special = o->show_special,
        .logprobs = o->top_logprobs >= 0,
        .n_top = o->top_logprobs > 0 ? o->top_logprobs : 0,
        .stop = o->stop,
        .n_stop = o->n_stop,
        .salt = o->cache_salt,
        .queue = o->queue ? o->queue->q : r->own->q,
        .user = o->user,
    };
    enum submit_result res = engine_submit(engine->e, &spec, &r->r, &err);
    token_list_clear(&prompt);
    r->n_open = o->choices > 0 ? o->choices : 1;
    if (res == SUBMIT_OK)
        return r;
    set_error(error, kind_of(res), err.msg);
    steel_queue_free(r->own);
    mem_free(r);
    return NULL;
}

void steel_request_cancel(struct steel_request *request)
{
    request_cancel(request->r);
}

void steel_request_free(struct steel_request *request)
{
    if (!request)
        return;
    struct steel_event ev;
    if (request->own && request->n_open)
        request_cancel(request->r);
    while (request->own && request->n_open)
        steel_request_next(request, &ev, -1);
    request_free(request->r);
    steel_queue_free(request->own);
    mem_free(request);
}

static void translate(const struct engine_event *in, struct steel_event *out)
{
    *out = (struct steel_event){
        .kind = (enum steel_event_kind)in->kind,
        .user = in->user,
        .choice = in->index,
        .token = in->token,
        .text = in->text,
        .n_text = in->n_text,
        .logprob = in->logprob,
        .top = (const struct steel_logprob *)in->top,
        .n_top = in->n_top,
        .finish = (enum steel_finish)in->finish,
        .error = in->error,
        .n_prompt = in->usage.n_prompt,
        .n_cached = in->usage.n_cached,
        .n_generated = in->usage.n_generated,
        .queue_s = (double)in->usage.queue_ns * 1e-9,
        .first_token_s = (double)in->usage.first_ns * 1e-9,
        .total_s = (double)in->usage.total_ns * 1e-9,
    };
}
_Static_assert((int)STEEL_STARTED == (int)EVENT_START && (int)STEEL_DONE == (int)EVENT_DONE &&
                   (int)STEEL_FAILED == (int)FINISH_ERROR &&
                   (int)STEEL_CANCELLED == (int)FINISH_CANCEL,
               "public and internal enums agree");

bool steel_queue_next(struct steel_queue *queue, struct steel_event *event, int timeout_ms)
{
    struct engine_event ev;
    if (!events_next(queue->q, &ev, timeout_ms))
        return false;
    translate(&ev, event);
    return true;
}

bool steel_request_next(struct steel_request *request, struct steel_event *event, int timeout_ms)
{
    if (!request->own || !request->n_open || !steel_queue_next(request->own, event, timeout_ms))
        return false;
    request->n_open -= event->kind == STEEL_DONE;
    return true;
}

bool steel_request_done(const struct steel_request *request)
{
    return request->n_open == 0;
}

struct steel_queue *steel_queue_new(void)
{
    struct steel_queue *q = mem_zalloc(1, sizeof *q);
    q->q = events_new();
    return q;
}

int steel_queue_fd(const struct steel_queue *queue)
{
    return events_fd(queue->q);
}

void steel_queue_free(struct steel_queue *queue)
{
    if (!queue)
        return;
    events_free(queue->q);
    mem_free(queue);
}
