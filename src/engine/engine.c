/* The engine thread. See the invariants in engine.h. */
#include "engine/engine.h"
#include "base/clock.h"
#include "base/mem.h"
#include "text/grammar.h"
#include "engine/scheduler.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { DEFAULT_QUEUE = 512, DEFAULT_SEQS = 16, MOST_SEQS_GPU = 256, MIN_ROWS_TO_READ = 64 };

const double histogram_bounds[HISTOGRAM_BUCKETS] = {
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5,   0.75,   1,     2.5,  5,     10,   20,    40,  80,   160, 320};

struct choice {
    struct seq seq; /* first: the scheduler hands it back */
    struct request *req;
    int index;
    struct sampler *sampler; /* from the first step on */
    struct output out;
    int64_t entered_ns, first_ns, last_ns;
    int at[2];                 /* where it is in the steps under way, plus 1; 0 = not in that one */
    bool guessed;              /* its last token stands for one that a step under way will choose */
    int n_drafted, n_accepted; /* its part of engine_stats' */
    int n_told;                /* tokens of the prompt whose log-probabilities were told */
};

struct request {
    struct engine *engine;
    struct request *next; /* in the inbox */
    atomic_int refs;      /* the caller's handle, the engine */
    atomic_bool cancelled;
    struct request_spec spec; /* with copies of all it points to */
    struct choice *choices;   /* (n) */
    int n, n_open;
    int64_t submitted_ns;
};

/* A step under way. */
struct flight {
    struct step_item *items;           /* (max_seqs) */
    struct seq **seqs;                 /* (max_seqs) as planned; NULL: left since */
    int slot;                          /* its place in struct choice.at */
    bool sampled;                      /* its tokens are being chosen; false: their samplers wait */
    int n, n_decode, n_read, n_forced; /* n 0 = none */
    int64_t start_ns;
};

struct engine {
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* under lock */
    struct request *inbox, **inbox_end;
    int n_queued; /* choices in the inbox or waiting for their first step */
    struct queue_share {
        uint64_t client;
        int n;
    } * shares; /* (n_shares) of n_queued, by client */
    int n_shares, shares_cap;
    bool quit, cancels;
    enum engine_state state;
    struct error error;
    struct engine_stats shown;
    uint64_t n_rejected;
    /* the thread's own */
    char *path;
    struct engine_options opt;
    struct runtime *rt; /* set before READY, then constant */
    int context;
    struct scheduler sched;
    struct spec spec; /* most 0: nothing is guessed */
    int *wants;       /* (max_seqs) scratch: guesses that sequences of a step have a use for */
    struct flight flights[2], *now, *next; /* next is started before now ends, where that goes */
    int64_t end_ns;                        /* of the last step */
    struct events **touched;               /* (max_seqs) queues with staged events */
    int n_touched, touched_cap;
    struct buf text;
    float *logits;                /* (n_vocab) */
    struct sampler **constrained; /* (max_seqs) scratch */
    struct logit_bias *ends;      /* (n_ends) bans of every end token */
    int n_ends;
    struct engine_stats stats;
    void (*on_step)(void *arg, int n_items);
    void *on_step_arg;
    atomic_int percent;
};

static void histogram_add(struct histogram *h, int64_t ns)
{
    double s = (double)ns * 1e-9;
    int i = 0;
    while (i < HISTOGRAM_BUCKETS && s > histogram_bounds[i])
        i++;
    h->count[i]++;
    h->sum += s;
}

/* Requests */

static void request_unref(struct request *r)
{
    if (atomic_fetch_sub(&r->refs, 1) > 1)
        return;
    for (int i = 0; i < r->n; i++) {
        seq_clear(&r->choices[i].seq);
        sampler_free(r->choices[i].sampler);
        output_clear(&r->choices[i].out);
    }
    for (int i = 0; i < r->spec.n_stop; i++)
        mem_free((char *)r->spec.stop[i]);
    mem_free((void *)r->spec.stop);
    mem_free((void *)r->spec.sample.bias);
    mem_free((char *)r->spec.salt);
    mem_free((char *)r->spec.think_open);
    mem_free((char *)r->spec.think_close);
    grammar_free(r->spec.grammar);
    mem_free(r->choices);
    mem_free(r);
}

void request_free(struct request *r)
{
    if (r)
        request_unref(r);
}

void request_cancel(struct request *r)
{
    atomic_store(&r->cancelled, true);
    pthread_mutex_lock(&r->engine->lock);
    r->engine->cancels = true;
    pthread_cond_broadcast(&r->engine->changed);
    pthread_mutex_unlock(&r->engine->lock);
}

struct new_request {
    struct engine *e;
    const struct request_spec *spec;
    struct request *r;
};

/* Where the chain of its pages starts: what was computed with an adapter is of use with that alone. */
static uint64_t root_of(const struct engine *e, const struct request_spec *spec)
{
    struct buf key = {0};
    for (int i = 0; i < spec->n_loras; i++) {
        const struct lora_pick *p = &spec->loras[i];
        buf_add(&key, &p->serial, sizeof p->serial);
        buf_add(&key, &p->scale, sizeof p->scale);
    }
    if (spec->n_loras) /* no salt reads like this: it has no NUL */
        buf_add(&key, "\0lora", 6);
    if (spec->salt)
        buf_adds(&key, spec->salt);
    uint64_t root = prefix_root(e->rt->kv->prefix, key.p, key.len);
    buf_clear(&key);
    return root;
}

/* A job (mem_try): a long prompt with many choices may be more than there is memory for. */
static void request_new(void *arg)
{
    struct new_request *job = arg;
    struct engine *e = job->e;
    const struct request_spec *spec = job->spec;
    struct request *r = job->r = mem_zalloc(1, sizeof *r);
    r->engine = e;
    r->spec = *spec;
    r->n = r->n_open = spec->n > 0 ? spec->n : 1;
    atomic_init(&r->refs, 2);
    r->submitted_ns = clock_ns();
    const char **stop = mem_zalloc((size_t)spec->n_stop, sizeof *stop);
    for (int i = 0; i < spec->n_stop; i++)
        stop[i] = mem_strdup(spec->stop[i]);
    r->spec.stop = stop;
    r->spec.salt = spec->salt ? mem_strdup(spec->salt) : NULL;
    r->spec.think_open = spec->think_open ? mem_strdup(spec->think_open) : NULL;
    r->spec.think_close = spec->think_close ? mem_strdup(spec->think_close) : NULL;
    r->spec.grammar = spec->grammar ? grammar_ref(spec->grammar) : NULL;
    /* The bans of min_tokens stand behind the caller's biases: sampler_keep_bias drops them. */
    int n_bias = spec->sample.n_bias, bans = spec->min_tokens > 0 ? e->n_ends : 0;
    struct logit_bias *bias = mem_zalloc((size_t)(n_bias + bans), sizeof *bias);
    if (n_bias)
        memcpy(bias, spec->sample.bias, (size_t)n_bias * sizeof *bias);
    if (bans)
        memcpy(bias + n_bias, e->ends, (size_t)bans * sizeof *bias);
    r->spec.sample.bias = bias;
    r->spec.sample.n_bias = n_bias + bans;
    int most = e->context - spec->n_prompt;
    if (r->spec.max_tokens <= 0 || r->spec.max_tokens > most)
        r->spec.max_tokens = most;
    if (spec->read_only)
        r->spec.max_tokens = 1; /* nothing is started ahead for it */
    r->choices = mem_zalloc((size_t)r->n, sizeof *r->choices);
    for (int i = 0; i < r->n; i++) {
        struct choice *c = &r->choices[i];
        c->req = r;
        c->index = i;
        c->out = (struct output){.stop = stop, .n_stop = spec->n_stop, .special = spec->special};
        c->seq.n_tokens = c->seq.cap = c->seq.n_prompt = spec->n_prompt;
        c->out.think_open = r->spec.think_open;
        c->out.think_close = r->spec.think_close;
        if (r->spec.think_close)
            c->out.zone = spec->in_thinking    ? OUTPUT_THINKING
                          : r->spec.think_open ? OUTPUT_START
                                               : OUTPUT_ANSWER;
        c->seq.no_cache = spec->no_cache || spec->prompt_logprobs;
        c->seq.all_rows = spec->prompt_logprobs;
        c->seq.client = spec->client;
        c->seq.tokens = mem_alloc((size_t)spec->n_prompt * sizeof *c->seq.tokens);
        memcpy(c->seq.tokens, spec->prompt, (size_t)spec->n_prompt * sizeof *c->seq.tokens);
        c->seq.loras = r->spec.loras;
        c->seq.n_loras = r->spec.n_loras;
        if (e->rt->kv->prefix && (r->spec.salt || r->spec.n_loras))
            c->seq.root = root_of(e, &r->spec);
    }
}

static enum submit_result check_spec(struct engine *e, const struct request_spec *s,
                                     struct error *err)
{
    int n_vocab = e->rt->model->config.n_vocab;
    if (s->n_prompt < 1) {
        error_set(err, "the prompt is empty");
        return SUBMIT_INVALID;
    }
    if (s->n_prompt >= e->context) {
        error_set(err, "the prompt has %d tokens; the context holds %d, the answer included",
                  s->n_prompt, e->context);
        return SUBMIT_TOO_LONG;
    }
    for (int i = 0; i < s->n_prompt; i++)
        if (s->prompt[i] < 0 || s->prompt[i] >= n_vocab) {
            error_set(err, "prompt token %d is %d; ids go from 0 to %d", i, s->prompt[i],
                      n_vocab - 1);
            return SUBMIT_INVALID;
        }
    bool ok = true;
    if (s->grammar && !e->rt->tokenizer)
        ok = error_set(err, "this model has no vocabulary: nothing can be constrained");
    else if (s->prompt_logprobs && !s->logprobs)
        ok = error_set(err, "log-probabilities of the prompt without those of the answer");
    else if (s->grammar && (s->ignore_eos || s->min_tokens > 0))
        ok = error_set(err, "a constraint decides where the answer ends: ignore_eos and min_tokens "
                            "do not go with it");
    else if (s->n_loras < 0 || s->n_loras > LORA_MAX_USES || (s->n_loras && !e->rt->adapters))
        ok = error_set(err, "%d adapters; at most %d", s->n_loras,
                       e->rt->adapters ? LORA_MAX_USES : 0);
    int most = e->opt.max_queue < ENGINE_MAX_CHOICES ? e->opt.max_queue : ENGINE_MAX_CHOICES;
    if (ok && (s->n < 0 || s->n > most)) /* more than the queue holds would be refused for ever */
        ok = error_set(err, "n is %d; at most %d choices", s->n, most);
    else if (ok && (s->n_stop < 0 || s->n_stop > ENGINE_MAX_STOPS))
        ok = error_set(err, "%d stop strings; at most %d", s->n_stop, ENGINE_MAX_STOPS);
    else if (ok && (s->n_top < 0 || s->n_top > ENGINE_MAX_LOGPROBS))
        ok = error_set(err, "%d log-probabilities; at most %d", s->n_top, ENGINE_MAX_LOGPROBS);
    for (int i = 0; ok && i < s->n_stop; i++)
        if (!*s->stop[i])
            ok = error_set(err, "stop string %d is empty", i);
    return ok ? SUBMIT_OK : SUBMIT_INVALID;
}

/* How much of the queue is a client's; counts n more for it. Under the lock. */
static int queue_share(struct engine *e, uint64_t client, int n)
{
    int i = 0;
    while (i < e->n_shares && e->shares[i].client != client)
        i++;
    if (i == e->n_shares) {
        if (n <= 0)
            return 0;
        if (e->n_shares == e->shares_cap) {
            e->shares_cap += e->shares_cap + 16;
            e->shares = mem_realloc(e->shares, (size_t)e->shares_cap, sizeof *e->shares);
        }
        e->shares[e->n_shares++] = (struct queue_share){client, 0};
    }
    int had = e->shares[i].n;
    e->shares[i].n += n;
    e->n_queued += n;
    if (!e->shares[i].n)
        e->shares[i] = e->shares[--e->n_shares];
    return had;
}

/* Whether n more fit. A queue full of others' requests has room for a client that has none in it. */
static bool queue_has_room(struct engine *e, uint64_t client, int n)
{
    int64_t most = e->opt.max_queue;
    if (queue_share(e, client, 0) == 0)
        most *= 2;
    return n <= most - e->n_queued;
}

static void give_back(const struct engine *e, const struct request_spec *spec)
{
    if (spec->n_loras)
        adapters_give_back(e->rt->adapters, spec->loras, spec->n_loras);
}

enum submit_result engine_submit(struct engine *e, const struct request_spec *spec,
                                 struct request **out, struct error *err)
{
    if (engine_state(e, NULL, err) != ENGINE_READY) {
        if (!err->msg[0])
            error_set(err, "the model is loading");
        return SUBMIT_NOT_READY;
    }
    enum submit_result res = check_spec(e, spec, err);
    if (res != SUBMIT_OK)
        return res;
    struct new_request job = {e, spec, NULL};
    if (spec->n_loras && !adapters_take(e->rt->adapters, spec->loras, spec->n_loras, err))
        return SUBMIT_INVALID;
    if (!mem_try(request_new, &job)) {
        give_back(e, spec);
        error_set(err, "there is no memory for the request; try again later");
        return SUBMIT_NOT_READY;
    }
    struct request *r = job.r;
    pthread_mutex_lock(&e->lock);
    if (e->quit || e->state != ENGINE_READY) {
        error_set(err, "the engine is closing");
        res = SUBMIT_NOT_READY;
    } else if (!queue_has_room(e, spec->client, r->n)) {
        error_set(err, "the queue is full: %d of %d requests wait", e->n_queued, e->opt.max_queue);
        e->n_rejected++;
        res = SUBMIT_FULL;
    } else {
        queue_share(e, spec->client, r->n);
        *e->inbox_end = r;
        e->inbox_end = &r->next;
        pthread_cond_broadcast(&e->changed);
    }
    pthread_mutex_unlock(&e->lock);
    if (res != SUBMIT_OK) {
        give_back(e, spec);
        atomic_store(&r->refs, 1);
        request_unref(r);
        return res;
    }
    if (out)
        *out = r;
    else
        request_unref(r);
    return SUBMIT_OK;
}

/* Events, staged during a step, delivered at its end */

static void emit(struct engine *e, const struct choice *c, struct engine_event *ev)
{
    struct events *q = c->req->spec.queue;
    ev->user = c->req->spec.user;
    ev->index = c->index;
    if (!events_stage(q, ev))
        return;
    if (e->n_touched == e->touched_cap) {
        e->touched_cap += e->touched_cap + 16;
        e->touched = mem_realloc(e->touched, (size_t)e->touched_cap, sizeof *e->touched);
    }
    e->touched[e->n_touched++] = q;
}

static void show_stats(struct engine *e)
{
    const struct scheduler *s = &e->sched;
    struct engine_stats *st = &e->stats;
    st->n_running = s->running.n;
    st->pages_total = s->kv->n_pages;
    st->pages_idle = s->kv->prefix ? prefix_n_idle(s->kv->prefix) : 0;
    st->pages_held = s->kv->n_pages - kvcache_available(s->kv);
    st->n_evicted = s->kv->prefix ? (uint64_t)prefix_n_evicted(s->kv->prefix) : 0;
    st->cache_queries = (uint64_t)s->cache_queries;
    st->cache_hits = (uint64_t)s->cache_hits;
    st->n_preempted = (uint64_t)s->n_preempted;
    st->decode_ms = scheduler_decode_ns(s, s->running.n) * 1e-6;
    st->read_us = s->cost.read_ns * 1e-3;
    st->budget_ms = scheduler_budget_ns(s, s->running.n ? s->running.n : 1) * 1e-6;
    pthread_mutex_lock(&e->lock);
    st->n_waiting = s->waiting.n;
    for (const struct request *r = e->inbox; r; r = r->next)
        st->n_waiting += r->n;
    e->shown = *st;
    pthread_mutex_unlock(&e->lock);
}

/* Figures first: who reads an event finds it counted. */
static void deliver(struct engine *e)
{
    show_stats(e);
    for (int i = 0; i < e->n_touched; i++)
        events_flush(e->touched[i]);
    e->n_touched = 0;
}

static void leave_queue(struct engine *e, const struct choice *c)
{
    pthread_mutex_lock(&e->lock);
    queue_share(e, c->req->spec.client, -1);
    pthread_mutex_unlock(&e->lock);
}

static struct usage_count count_usage(const struct choice *c, int64_t now)
{
    int64_t t0 = c->req->submitted_ns;
    return (struct usage_count){
        .n_prompt = c->seq.n_prompt,
        .n_cached = c->seq.n_cached,
        .n_generated = c->seq.n_tokens - c->seq.n_prompt,
        .n_preempted = c->seq.n_preempted,
        .n_drafted = c->n_drafted,
        .n_accepted = c->n_accepted,
        .queue_ns = (c->entered_ns ? c->entered_ns : now) - t0,
        .first_ns = c->first_ns ? c->first_ns - t0 : 0,
        .total_ns = now - t0,
    };
}

/* The one way out: out of the scheduler, EVENT_DONE. The choice may be gone afterwards. */
static void finish(struct engine *e, struct choice *c, enum finish how, int stop, const char *error)
{
    struct request *r = c->req;
    for (int i = 0; i < 2; i++) /* what the steps under way compute for it is nobody's */
        if (c->at[i]) {
            e->flights[i].seqs[c->at[i] - 1] = NULL;
            e->flights[i].items[c->at[i] - 1].seq = NULL;
            c->at[i] = 0;
        }
    if (e->spec.most && c->seq.running) { /* no step is under way */
        spec_settle(&e->spec, &c->seq);
        scheduler_index(&e->sched, &c->seq);
    }
    if (c->guessed) { /* the token never came */
        if (c->seq.kv.n_tokens == c->seq.n_tokens)
            kvcache_cut(e->rt->kv, &c->seq.kv, c->seq.n_tokens - 1);
        c->seq.n_tokens--;
        c->guessed = false;
    }
    /* A step under way has read the last token, which those who go on may not have: its state is the
     * one before, unless that token filled a page. */
    struct kv_seq *kv = &c->seq.kv;
    if (kv->back && c->seq.n_indexed * e->rt->kv->page_len <= kv->back_at)
        kvcache_cut(e->rt->kv, kv, kv->back_at);
    scheduler_remove(&e->sched, &c->seq);
    if (!c->entered_ns)
        leave_queue(e, c);
    if (stop < 0 && (how == FINISH_STOP || how == FINISH_LENGTH)) {
        int hit = output_finish(&c->out, &e->text);
        if (hit >= 0) {
            stop = hit;
            how = FINISH_STOP;
        }
    }
    int64_t now = clock_ns();
    struct engine_event ev = {.kind = EVENT_DONE,
                              .token = -1,
                              .finish = how,
                              .stop = stop,
                              .error = error,
                              .text = e->text.p,
                              .n_text = e->text.len,
                              .usage = count_usage(c, now)};
    emit(e, c, &ev);
    buf_reset(&e->text);
    e->stats.finished[how]++;
    if (how == FINISH_STOP || how == FINISH_LENGTH)
        histogram_add(&e->stats.total, now - r->submitted_ns);
    /* The heavy parts go now, not when the caller drops its handle. */
    sampler_free(c->sampler);
    c->sampler = NULL;
    if (--r->n_open == 0) {
        give_back(e, &r->spec);
        request_unref(r);
    }
}

/* A token was chosen for c. False: it has ended, and may be gone. */
static bool take_token(struct engine *e, struct choice *c, int32_t token, struct engine_event *ev)
{
    const struct request_spec *spec = &c->req->spec;
    struct runtime *rt = e->rt;
    int64_t now = clock_ns();
    if (spec->read_only) {
        finish(e, c, FINISH_LENGTH, -1, NULL);
        return false;
    }
    if (!c->first_ns) {
        c->first_ns = now;
        histogram_add(&e->stats.first_token, now - c->req->submitted_ns);
    } else {
        histogram_add(&e->stats.inter_token, now - c->last_ns);
        if (now - c->last_ns > e->stats.max_gap_ns)
            e->stats.max_gap_ns = now - c->last_ns;
    }
    c->last_ns = now;
    e->stats.generated_tokens++;
    struct error why = {0};
    sampler_accept(c->sampler, token, true);
    if (!sampler_ok(c->sampler, &why)) {
        finish(e, c, FINISH_ERROR, -1, why.msg);
        return false;
    }
    if (c->guessed)
        c->guessed = false; /* it stands there already */
    else
        seq_append(&c->seq, token);
    int n = c->seq.n_tokens - c->seq.n_prompt;
    if (n == spec->min_tokens)
        sampler_keep_bias(c->sampler, spec->sample.n_bias - e->n_ends);
    if (!spec->ignore_eos && rt->tokenizer && tokenizer_is_end(rt->tokenizer, token)) {
        finish(e, c, FINISH_STOP, -1, NULL);
        return false;
    }
    int stop = output_push(&c->out, rt->tokenizer, token, &e->text);
    bool full = n >= spec->max_tokens || c->seq.n_tokens >= e->context;
    ev->kind = EVENT_TOKEN;
    ev->token = token;
    ev->text = e->text.p;
    ev->n_text = e->text.len;
    emit(e, c, ev);
    buf_reset(&e->text);
    if (stop >= 0 || full)
        finish(e, c, stop >= 0 ? FINISH_STOP : FINISH_LENGTH, stop, NULL);
    return stop < 0 && !full;
}

struct new_sampler {
    struct sample_params p;
    int n_vocab;
    const struct request_spec *spec;
    const struct grammar_vocab *vocab;
    int n_tokens; /* of the vocabulary */
    struct sampler *sampler;
};

static bool fit_mask(void *m, uint32_t *bits, struct error *err)
{
    return grammar_mask(m, bits, err);
}
static bool fit_accept(void *m, int32_t token, struct error *err)
{
    return grammar_accept(m, token, err);
}
static void fit_free(void *m)
{
    grammar_matcher_free(m);
}

static void make_sampler(void *arg)
{
    struct new_sampler *job = arg;
    job->sampler = sampler_new(&job->p, job->n_vocab);
    if (job->spec->grammar) {
        struct sample_constraint fit = {
            .mask = fit_mask, .accept = fit_accept, .free = fit_free, .n_tokens = job->n_tokens};
        fit.state = grammar_matcher_new(job->spec->grammar, job->vocab);
        grammar_set_budget(fit.state, job->spec->max_tokens);
        sampler_constrain(job->sampler, &fit);
    }
}

/* A token of the prompt, and what the model thought of it. */
static void tell_prompt(struct engine *e, struct choice *c, int at, float logprob,
                        const struct token_prob *top, int n_top)
{
    struct engine_event ev = {.kind = EVENT_PROMPT,
                              .token = c->seq.tokens[at],
                              .stop = -1,
                              .logprob = logprob,
                              .top = top,
                              .n_top = n_top};
    emit(e, c, &ev);
    c->n_told = at + 1;
}

/* Before the first step of a choice. Without memory for its sampler it fails at the step's end. */
static void start_choice(struct engine *e, struct choice *c)
{
    const struct request_spec *spec = &c->req->spec;
    struct new_sampler job = {
        .p = spec->sample, .n_vocab = e->rt->model->config.n_vocab, .spec = spec};
    if (spec->grammar) {
        job.vocab = runtime_grammar_vocab(e->rt);
        job.n_tokens = tokenizer_n_vocab(e->rt->tokenizer);
    }
    job.p.seed += (uint64_t)c->index;
    job.p.logprobs = spec->logprobs;
    job.p.n_top = spec->n_top;
    if (mem_try(make_sampler, &job))
        c->sampler = job.sampler;
    for (int i = 0; c->sampler && i < c->seq.n_prompt; i++)
        sampler_accept(c->sampler, c->seq.tokens[i], false);
    c->entered_ns = clock_ns();
    leave_queue(e, c);
    histogram_add(&e->stats.queued, c->entered_ns - c->req->submitted_ns);
    e->stats.prompt_tokens += (uint64_t)c->seq.n_prompt;
    struct engine_event ev = {
        .kind = EVENT_START, .token = -1, .stop = -1, .usage = count_usage(c, c->entered_ns)};
    emit(e, c, &ev);
    if (spec->prompt_logprobs)
        tell_prompt(e, c, 0, NAN, NULL, 0);
}

/* What is cancelled leaves; when the engine closes or has failed, all leave. */
static void drop_cancelled(struct engine *e, bool all)
{
    const char *failed = e->state == ENGINE_FAILED ? e->error.msg : NULL;
    struct seq *lists[] = {e->sched.waiting.first, e->sched.running.first};
    for (int l = 0; l < 2; l++)
        for (struct seq *q = lists[l], *next; q; q = next) {
            struct choice *c = (struct choice *)q;
            next = q->next;
            if (atomic_load(&c->req->cancelled) || (all && !failed))
                finish(e, c, FINISH_CANCEL, -1, NULL);
            else if (all)
                finish(e, c, FINISH_ERROR, -1, failed);
        }
}

/* Whether item i of a step chooses under a constraint. */
static bool is_constrained(const struct flight *f, int i)
{
    const struct choice *c = (const struct choice *)f->seqs[i];
    return c && c->sampler && f->items[i].want != LOGITS_NONE && sampler_is_constrained(c->sampler);
}

/* Makes the masks that the next choices of a step's sequences need. Where a mask leaves one choice, the
 * token is taken as if it had been chosen: the rows of steps under way that would choose it need not,
 * and the next step reads what has come together like a piece of a prompt. */
static void feed_forced(struct engine *e, struct flight *f)
{
    int n = 0;
    for (int i = 0; i < f->n; i++)
        if (is_constrained(f, i))
            e->constrained[n++] = ((const struct choice *)f->seqs[i])->sampler;
    if (!n)
        return;
    step_prepare(e->rt->step, e->constrained, n);
    for (int i = 0; i < f->n; i++) {
        if (!is_constrained(f, i))
            continue;
        struct choice *c = (struct choice *)f->seqs[i];
        for (int32_t token; (token = sampler_forced(c->sampler)) >= 0;) {
            for (int k = 0; k < 2; k++)
                if (c->at[k])
                    e->flights[k].items[c->at[k] - 1].sampler = NULL;
            e->stats.n_forced++;
            if (!take_token(e, c, token, &(struct engine_event){.stop = -1})) {
                f->seqs[i] = NULL;
                break;
            }
            sampler_prepare(c->sampler);
        }
    }
}

/* The rows of an item are those before the tokens they tell of. What was told before the sequence
 * lost its pages is not told again. */
static void score_prompt(struct engine *e, struct choice *c, const struct step_item *it)
{
    int n_vocab = e->rt->model->config.n_vocab, from = c->seq.kv.n_tokens - it->n_tokens;
    int n_top = c->req->spec.n_top < n_vocab ? c->req->spec.n_top : n_vocab;
    struct token_prob top[ENGINE_MAX_LOGPROBS];
    for (int i = 0; i < it->n_tokens && from + i + 1 < c->seq.n_prompt; i++) {
        int at = from + i + 1;
        if (at < c->n_told)
            continue;
        step_logits(e->rt->step, it->first_row + i, e->logits);
        float p = sample_logprobs(e->logits, n_vocab, c->seq.tokens[at], top, n_top);
        tell_prompt(e, c, at, p, top, n_top);
    }
}

enum started { STARTED, NOTHING_TO_DO, NOT_STARTED };

/* Plans a step and launches it as `f`. NOT_STARTED: those that were planned have failed, the others
 * may go on. */
static enum started start_step(struct engine *e, struct flight *f)
{
    struct scheduler *s = &e->sched;
    int n = scheduler_plan(s, f->items);
    if (!n)
        return NOTHING_TO_DO;
    for (int i = 0; i < n; i++) {
        struct choice *c = (struct choice *)s->planned[i];
        if (!c->entered_ns)
            start_choice(e, c);
        struct step_item *it = &f->items[i];
        if (it->want != LOGITS_NONE && it->n_tokens - it->n_guess == seq_unread(&c->seq))
            it->sampler = c->sampler;
        f->seqs[i] = &c->seq;
        c->at[f->slot] = i + 1;
    }
    if (e->n_touched && !e->rt->be->ahead) /* tell of starts before a step that may take long */
        deliver(e);
    if (e->on_step)
        e->on_step(e->on_step_arg, n);
    f->n = n;
    f->n_decode = s->n_decode;
    f->n_read = s->n_read;
    f->n_forced = s->n_forced;
    f->sampled = false;
    f->start_ns = clock_ns();
    struct error err = {0};
    if (step_start(e->rt->step, f->items, n, &err)) {
        for (int i = 0; i < n; i++)
            f->seqs[i]->n_open = f->items[i].n_guess;
        return STARTED;
    }
    for (int i = 0; i < n; i++)
        finish(e, (struct choice *)f->seqs[i], FINISH_ERROR, -1, err.msg);
    f->n = 0;
    return NOT_STARTED;
}

static bool has_inbox(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    bool any = e->inbox || e->cancels || e->quit;
    pthread_mutex_unlock(&e->lock);
    return any;
}

/* The tokens of the step started last: masks are made while it computes. */
static void sample_step(struct engine *e, struct flight *f)
{
    feed_forced(e, f);
    step_sample(e->rt->step);
    f->sampled = true;
}

/* Starts the step after the one under way, with the tokens that one will choose, so that the device
 * never waits for the host. Only where all of them will be chosen. A sequence that then turns out to
 * have ended wasted a row. Where choices depend on tokens that the host has to see first (a constraint,
 * penalties), the network computes meanwhile, and the choosing waits: see loop(). */
static void start_ahead(struct engine *e)
{
    const struct scheduler *s = &e->sched;
    const struct flight *f = e->now;
    if (!e->rt->be->ahead || e->spec.most || e->rt->be->profile || s->waiting.n ||
        s->running.n != f->n || kvcache_available(s->kv) < s->running.n || has_inbox(e))
        return;
    bool wait = false;
    for (int i = 0; i < f->n; i++) {
        const struct choice *c = (const struct choice *)f->seqs[i];
        if (!c || !c->sampler || f->items[i].want != LOGITS_LAST)
            return;
        int n = c->seq.n_tokens + 1 - c->seq.n_prompt; /* answer tokens when `now` ends */
        wait |= sampler_has_memory(c->sampler) || n == c->req->spec.min_tokens;
    }
    for (int i = 0; i < f->n; i++) {
        struct choice *c = (struct choice *)f->seqs[i];
        if (seq_unread(&c->seq) > 0) /* forced: what comes next is known */
            continue;
        if (c->seq.n_tokens + 1 - c->seq.n_prompt >= c->req->spec.max_tokens ||
            c->seq.n_tokens + 1 >= e->context)
            continue; /* ends with `now` */
        seq_append(&c->seq, -1 - f->items[i].first_row);
        sampler_expect(c->sampler);
        c->guessed = true;
    }
    if (start_step(e, e->next) != STARTED)
        return;
    e->stats.n_ahead++;
    if (!wait)
        sample_step(e, e->next);
}

static void set_state(struct engine *e, enum engine_state state, const struct error *err)
{
    pthread_mutex_lock(&e->lock);
    e->state = state;
    if (err)
        e->error = *err;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

/* A device that failed once gives no answers that can be trusted: nothing runs after that. */
static void fail_engine(struct engine *e, const struct error *why)
{
    if (e->state != ENGINE_FAILED)
        set_state(e, ENGINE_FAILED, why);
    drop_cancelled(e, true);
}

/* Hands on what a step chose for c, and behind it the guesses it has read for as long as they are what the
 * sampler chooses from the row before. False: c has ended, and may be gone. */
static bool take_chosen(struct engine *e, struct choice *c, const struct step_item *it)
{
    struct sample_probs probs = {0};
    int row = step_chosen_row(it);
    int32_t token = it->token;
    bool told = c->req->spec.logprobs, right = true;
    if (told)
        step_probs(e->rt->step, row, &probs);
    e->stats.n_drafted += (uint64_t)it->n_guess;
    c->n_drafted += it->n_guess;
    for (int i = 0; right; i++) {
        struct engine_event ev = {.stop = -1};
        if (told) {
            ev.logprob = probs.logprob;
            ev.top = probs.top;
            ev.n_top = probs.n_top;
        }
        right = i < it->n_guess && token == c->seq.tokens[c->seq.n_tokens];
        c->n_accepted += right;
        e->stats.n_accepted += right;
        c->seq.n_open =
            it->n_guess - i; /* where it ends with this token, that is not in the cache */
        if (!take_token(e, c, token, &ev))
            return false;
        if (right) {
            c->seq.n_open--;
            step_logits(e->rt->step, row + i + 1, e->logits);
            token = sampler_pick(c->sampler, e->logits, &probs);
        }
    }
    return true;
}

/* After a step: the guesses for the next one, and an end to those of this one. */
static void guess_tokens(struct engine *e, const struct flight *f, int64_t ns, int n_right)
{
    struct error err = {0};
    int64_t start = clock_ns();
    for (int i = 0; i < f->n; i++) {
        const struct choice *c = (const struct choice *)f->seqs[i];
        if (c) /* the last token is chosen, never guessed */
            e->wants[i] = c->req->spec.max_tokens - (c->seq.n_tokens - c->seq.n_prompt) - 1;
    }
    bool ok = spec_guess(&e->spec, f->items, f->seqs, e->wants, f->n, &err);
    if (!f->n_read && !f->n_forced)
        spec_learn(&e->spec, f->items, f->n, n_right, ns + clock_ns() - start);
    for (int i = 0; i < f->n; i++)
        if (f->seqs[i])
            spec_settle(&e->spec, f->seqs[i]);
    scheduler_commit_step(&e->sched, f->seqs, f->n, f->n_forced ? 0 : f->n_decode,
                          f->n_forced ? 0 : f->n_read, ns);
    if (!ok)
        fail_engine(e, &err);
}

/* Waits for the step under way and hands its tokens on. */
static void finish_step(struct engine *e)
{
    struct flight *f = e->now;
    struct error err = {0};
    bool ok = step_finish(e->rt->step, &err);
    int64_t end = clock_ns();
    int64_t ns = end - (f->start_ns > e->end_ns ? f->start_ns : e->end_ns);
    e->end_ns = end;
    e->stats.n_steps++;
    e->stats.busy_s += (double)ns * 1e-9;
    uint64_t n_right = e->stats.n_accepted; /* before */
    bool reads = f->n_read || f->n_forced;
    *(reads ? &e->stats.read_s : &e->stats.decode_s) += (double)ns * 1e-9;
    e->stats.read_tokens += (uint64_t)f->n_read;
    e->stats.n_read_steps += reads;
    for (int i = 0; i < f->n; i++) {
        struct choice *c = (struct choice *)f->seqs[i];
        if (!c)
            continue;
        c->at[f->slot] = 0;
        if (!ok) /* step_finish took its rows back */
            c->seq.n_open = 0;
        if (ok && c->guessed)
            c->seq.tokens[c->seq.n_tokens - 1] = f->items[i].token;
    }
    if (ok && !e->spec.most)
        scheduler_commit_step(&e->sched, f->seqs, f->n, f->n_forced ? 0 : f->n_decode,
                              f->n_forced ? 0 : f->n_read, ns);
    for (int i = 0; i < f->n; i++) {
        const struct step_item *it = &f->items[i];
        struct choice *c = (struct choice *)f->seqs[i];
        if (!c)
            continue;
        if (!ok)
            continue;
        if (c->sampler && it->want == LOGITS_ALL)
            score_prompt(e, c, it);
        if (!c->sampler) {
            finish(e, c, FINISH_ERROR, -1, "there is no memory for the answer; try again later");
            f->seqs[i] = NULL;
        } else if (it->sampler) {
            if (!take_chosen(e, c, it))
                f->seqs[i] = NULL;
            else if (!e->spec.most)
                kvcache_settle(e->rt->kv, &c->seq.kv);
        }
    }
    if (ok)
        feed_forced(e, f);
    else
        fail_engine(e, &err);
    if (ok && e->spec.most)
        guess_tokens(e, f, ns, (int)(e->stats.n_accepted - n_right));
    f->n = 0;
    e->now = e->next;
    e->next = f;
}

/* Waits for work and takes the inbox over; false when the engine closes. */
static bool take_inbox(struct engine *e, bool idle)
{
    pthread_mutex_lock(&e->lock);
    while (idle && !e->inbox && !e->quit && !e->cancels)
        pthread_cond_wait(&e->changed, &e->lock);
    struct request *r = e->inbox;
    e->inbox = NULL;
    e->inbox_end = &e->inbox;
    bool cancels = e->cancels, quit = e->quit;
    e->cancels = false;
    pthread_mutex_unlock(&e->lock);
    for (struct request *next; r; r = next) {
        next = r->next;
        e->stats.n_requests++;
        for (int i = 0; i < r->n; i++)
            scheduler_add(&e->sched, &r->choices[i].seq);
    }
    bool failed = e->state == ENGINE_FAILED;
    if (cancels || quit || failed)
        drop_cancelled(e, quit || failed);
    return !quit;
}

/* On a device events of a step are told while the next one runs. A step that was started ahead and
 * waits for tokens chooses its own as soon as they are there. */
static void loop(struct engine *e)
{
    bool idle = false;
    while (take_inbox(e, idle)) {
        enum started how = STARTED;
        if (!e->now->n)
            do
                how = start_step(e, e->now);
            while (how == NOT_STARTED);
        idle = how == NOTHING_TO_DO;
        if (e->now->n && !e->now->sampled)
            sample_step(e, e->now);
        CHECK(!idle || e->sched.running.n + e->sched.waiting.n == 0,
              "%d sequences wait and nothing runs", e->sched.waiting.n);
        if (idle)
            kvcache_trim(e->rt->kv);
        else
            start_ahead(e);
        if (idle || e->rt->be->ahead)
            deliver(e);
        if (!idle)
            finish_step(e);
        if (!e->rt->be->ahead)
            deliver(e);
    }
    while (e->now->n)
        finish_step(e);
    deliver(e);
}

static bool on_progress(void *arg, size_t done, size_t total)
{
    struct engine *e = arg;
    atomic_store(&e->percent, total ? (int)(100.0 * (double)done / (double)total) : 100);
    pthread_mutex_lock(&e->lock);
    bool quit = e->quit;
    pthread_mutex_unlock(&e->lock);
    return !quit;
}

static void find_ends(struct engine *e)
{
    const struct tokenizer *t = e->rt->tokenizer;
    for (int i = 0; t && i < tokenizer_n_vocab(t); i++) {
        if (!tokenizer_is_end(t, i))
            continue;
        e->ends = mem_realloc(e->ends, (size_t)e->n_ends + 1, sizeof *e->ends);
        e->ends[e->n_ends++] = (struct logit_bias){i, -__builtin_inff()};
    }
}

static bool start(struct engine *e)
{
    struct progress progress = {on_progress, e};
    struct runtime_options opt = e->opt.runtime;
    opt.progress = &progress;
    e->rt = runtime_open(e->path, &opt, &e->error);
    if (!e->rt)
        return false;
    struct kvcache *kv = e->rt->kv;
    const struct step_limits *lim = stepper_limits(e->rt->step);
    int64_t room = (int64_t)kv->n_pages * kv->page_len;
    e->context = room < e->rt->context ? (int)room : e->rt->context;
    kv->prefix = prefix_new(kv->n_pages, kv->page_len, !e->opt.no_prefix_cache);
    scheduler_init(&e->sched, kv, lim, e->context, e->opt.step_ms);
    e->sched.max_per_client = e->opt.max_per_client;
    e->sched.records = e->rt->be->ahead && !e->rt->draft;
    spec_init(&e->spec, &e->sched, e->rt->step, e->rt->draft, DRAFT_SEQS,
              e->opt.runtime.draft == DRAFT_AUTO);
    e->wants = mem_zalloc((size_t)lim->max_seqs, sizeof *e->wants);
    for (int i = 0; i < 2; i++) {
        struct flight *f = &e->flights[i];
        f->slot = i;
        f->items = mem_zalloc((size_t)lim->max_seqs, sizeof *f->items);
        f->seqs = mem_zalloc((size_t)lim->max_seqs, sizeof *f->seqs);
    }
    e->now = &e->flights[0];
    e->next = &e->flights[1];
    e->logits = mem_zalloc((size_t)e->rt->model->config.n_vocab, sizeof *e->logits);
    e->constrained = mem_zalloc((size_t)lim->max_seqs, sizeof(struct sampler *));
    find_ends(e);
    return true;
}

static void *engine_main(void *arg)
{
    struct engine *e = arg;
    pthread_setname_np(pthread_self(), "steel-engine");
    bool ok = start(e);
    if (ok) {
        mem_reserve(); /* from here on others depend on this process */
        show_stats(e);
    }
    set_state(e, ok ? ENGINE_READY : ENGINE_FAILED, NULL);
    if (ok) {
        loop(e);
        scheduler_clear(&e->sched);
        spec_clear(&e->spec);
    }
    return NULL;
}

struct engine *engine_open(const char *path, const struct engine_options *opt)
{
    struct engine *e = mem_zalloc(1, sizeof *e);
    e->path = path ? mem_strdup(path) : NULL;
    e->opt = *opt;
    struct runtime_options *r = &e->opt.runtime;
    if (e->opt.max_queue <= 0)
        e->opt.max_queue = DEFAULT_QUEUE;
    if (r->max_seqs <= 0) {
        r->max_seqs = DEFAULT_SEQS;
        r->max_seqs_gpu = MOST_SEQS_GPU;
    }
    r->read_rows = MIN_ROWS_TO_READ; /* decodes must leave rows for prompts */
    e->inbox_end = &e->inbox;
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    int rc = pthread_create(&e->thread, NULL, engine_main, e);
    e->has_thread = rc == 0;
    if (rc) {
        error_set(&e->error, "cannot start the engine's thread: %s", strerror(rc));
        e->state = ENGINE_FAILED;
    }
    return e;
}

enum engine_state engine_state(struct engine *e, int *percent, struct error *err)
{
    pthread_mutex_lock(&e->lock);
    enum engine_state state = e->state;
    if (state == ENGINE_FAILED && err)
        *err = e->error;
    pthread_mutex_unlock(&e->lock);
    if (percent)
        *percent = state == ENGINE_READY ? 100 : atomic_load(&e->percent);
    return state;
}

bool engine_wait(struct engine *e, struct error *err)
{
    pthread_mutex_lock(&e->lock);
    while (e->state == ENGINE_LOADING)
        pthread_cond_wait(&e->changed, &e->lock);
    bool ok = e->state == ENGINE_READY;
    if (!ok && err)
        *err = e->error;
    pthread_mutex_unlock(&e->lock);
    return ok;
}

void engine_wait_ms(struct engine *e, int ms)
{
    int64_t until = clock_ns() + (int64_t)ms * 1000000;
    struct timespec end = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    pthread_mutex_lock(&e->lock);
    while (e->state == ENGINE_LOADING &&
           pthread_cond_clockwait(&e->changed, &e->lock, CLOCK_MONOTONIC, &end) == 0)
        ;
    pthread_mutex_unlock(&e->lock);
}

void engine_close(struct engine *e)
{
    if (!e)
        return;
    pthread_mutex_lock(&e->lock);
    e->quit = true;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    if (e->has_thread)
        pthread_join(e->thread, NULL);
    runtime_close(e->rt);
    for (int i = 0; i < 2; i++) {
        mem_free(e->flights[i].items);
        mem_free(e->flights[i].seqs);
    }
    mem_free(e->shares);
    mem_free(e->touched);
    mem_free(e->logits);
    mem_free(e->constrained);
    mem_free(e->wants);
    mem_free(e->ends);
    buf_clear(&e->text);
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->changed);
    mem_free(e->path);
    mem_free(e);
}

const struct runtime *engine_runtime(const struct engine *e)
{
    return e->rt;
}

int engine_context(const struct engine *e)
{
    return e->context;
}

struct adapters *engine_adapters(const struct engine *e)
{
    return e->rt->adapters;
}

int engine_max_queue(const struct engine *e)
{
    return e->opt.max_queue;
}

void engine_stats(struct engine *e, struct engine_stats *out)
{
    pthread_mutex_lock(&e->lock);
    *out = e->shown;
    out->n_rejected = e->n_rejected;
    pthread_mutex_unlock(&e->lock);
}

void engine_on_step(struct engine *e, void (*fn)(void *arg, int n_items), void *arg)
{
    e->on_step_arg = arg;
    e->on_step = fn;
}

void engine_on_guess(struct engine *e,
                     void (*fn)(void *arg, const int32_t *tokens, int n_tokens, int32_t *guesses,
                                int n),
                     void *arg)
{
    e->spec.guess_arg = arg;
    e->spec.guess = fn;
}
