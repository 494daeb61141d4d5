/*
 * The life of a choice (one answer to a request): its sampler and start, its tokens and their text, its end; and its
 * events and statistics. Only the engine's thread calls these functions.
 */
#include "engine/engine_int.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/keeper.h"
#include "text/grammar/grammar.h"

#include <math.h>
#include <string.h>

const double histogram_bounds[HISTOGRAM_BUCKETS] = {
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5,   0.75,   1,     2.5,  5,     10,   20,    40,  80,   160, 320};

static void histogram_add(struct histogram *h, int64_t ns)
{
    double s = (double)ns * 1e-9;
    int i = 0;
    while (i < HISTOGRAM_BUCKETS && s > histogram_bounds[i])
        i++;
    h->count[i]++;
    h->sum += s;
}

static void emit(struct engine *e, const struct choice *c, struct engine_event *ev)
{
    struct events *q = c->req->spec.queue;
    ev->user = c->req->spec.user;
    ev->index = c->index;
    int i = e->n_touched - 1; /* the last one is the likeliest */
    while (i >= 0 && e->touched[i].q != q)
        i--;
    if (i < 0) {
        i = e->n_touched++;
        if (i == e->touched_cap) {
            int cap = e->touched_cap + e->touched_cap + 16;
            e->touched = mem_realloc(e->touched, (size_t)cap, sizeof *e->touched);
            memset(e->touched + i, 0, (size_t)(cap - i) * sizeof *e->touched);
            e->touched_cap = cap;
        }
        e->touched[i].q = q;
    }
    events_stage(&e->touched[i].staged, ev);
}

void choices_show_stats(struct engine *e)
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
    st->itl_ms = e->opt.itl_ms;
    st->ttft_ms = e->opt.ttft_ms;
    st->most_running = scheduler_most_running(s);
    pthread_mutex_lock(&e->lock);
    st->n_waiting = s->waiting.n;
    for (const struct request *r = e->inbox; r; r = r->next)
        st->n_waiting += r->n;
    e->shown = *st;
    pthread_mutex_unlock(&e->lock);
}

/* Statistics first, so that the reader of an event finds it counted. */
void choices_deliver(struct engine *e)
{
    choices_show_stats(e);
    for (int i = 0; i < e->n_touched; i++)
        events_flush(e->touched[i].q, &e->touched[i].staged);
    e->n_touched = 0;
}

static struct usage_count count_usage(const struct choice *c, int64_t now)
{
    int64_t t0 = c->req->submitted_ns;
    struct usage_count u = {
        .n_prompt = c->seq.n_prompt,
        .n_cached = c->seq.n_cached,
        .n_disk = c->n_disk < c->seq.n_cached ? c->n_disk : c->seq.n_cached,
        .n_generated = c->seq.n_tokens - c->seq.n_prompt,
        .n_preempted = c->seq.n_preempted,
        .queue_ns = (c->entered_ns ? c->entered_ns : now) - t0,
        .first_ns = c->first_ns ? c->first_ns - t0 : 0,
        .total_ns = now - t0,
    };
    memcpy(u.drafts, c->drafts, sizeof u.drafts);
    return u;
}

/* Counts whether a choice met the targets of the first token and of the mean time between tokens. */
static void judge(struct engine *e, const struct choice *c)
{
    const struct engine_options *o = &e->opt;
    int n = c->seq.n_tokens - c->seq.n_prompt;
    if ((o->ttft_ms <= 0 && o->itl_ms <= 0) || !c->first_ns)
        return;
    bool first =
        o->ttft_ms <= 0 || (double)(c->first_ns - c->req->submitted_ns) <= o->ttft_ms * 1e6;
    bool gaps =
        o->itl_ms <= 0 || n < 2 || (double)(c->last_ns - c->first_ns) / (n - 1) <= o->itl_ms * 1e6;
    e->stats.n_judged++;
    e->stats.n_ttft_met += first;
    e->stats.n_itl_met += gaps;
    e->stats.n_both_met += first && gaps;
}

void choice_end(struct engine *e, struct choice *c, enum finish how, int stop, const char *error)
{
    struct request *r = c->req;
    for (int i = 0; i < 2; i++) /* steps in flight drop its results */
        if (c->at[i]) {
            struct engine_step *f = &e->steps[i];
            f->seqs[c->at[i] - 1] = NULL;
            f->items[c->at[i] - 1].seq = NULL;
            c->at[i] = 0;
            if (!r->n_held)
                continue;
            atomic_fetch_add(&r->refs, 1);
            f->ended[f->n_ended++] = r;
        }
    if (e->now->follows && c->seq.running) { /* no other step is in flight */
        draft_settle(&e->spec, &c->seq);
        scheduler_index(&e->sched, &c->seq);
    }
    if (c->drafted) { /* removes the placeholder of a token that was never chosen */
        if (c->seq.kv.n_tokens == c->seq.n_tokens)
            kvcache_cut(e->rt->kv, &c->seq.kv, c->seq.n_tokens - 1);
        c->seq.n_tokens--;
        c->drafted = false;
    }
    /* A step in flight has read the last token, but sequences that continue this prefix may not have that token.
     * So the recurrent state is reset to the one before it, unless the token filled a page. */
    struct kv_seq *kv = &c->seq.kv;
    if (kv->back && c->seq.n_indexed * e->rt->kv->page_len <= kv->back_at)
        kvcache_cut(e->rt->kv, kv, kv->back_at);
    if (c->entered_ns && how != FINISH_ERROR && c->seq.n_tokens - 1 > c->seq.n_prompt)
        keeper_save(e->keep, c, c->seq.n_tokens - 1);
    draft_leave(&e->spec, &c->seq, how == FINISH_STOP || how == FINISH_LENGTH);
    scheduler_remove(&e->sched, &c->seq);
    if (!c->entered_ns)
        requests_leave_queue(e, c->req);
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
                              .refused = c->refused,
                              .text = e->text.p,
                              .n_text = e->text.len,
                              .usage = count_usage(c, now)};
    emit(e, c, &ev);
    buf_reset(&e->text);
    e->stats.finished[how]++;
    if (how == FINISH_STOP || how == FINISH_LENGTH)
        histogram_add(&e->stats.total, now - r->submitted_ns);
    if (how == FINISH_STOP || how == FINISH_LENGTH)
        judge(e, c);
    /* Large memory is freed now, not when the caller drops its handle. */
    choice_drop_mask(e, c);
    sampler_free(c->sampler);
    c->sampler = NULL;
    if (--r->n_open == 0)
        request_end(e, r);
}

bool choice_take_token(struct engine *e, struct choice *c, int32_t token, struct engine_event *ev)
{
    const struct request_spec *spec = &c->req->spec;
    struct runtime *rt = e->rt;
    int64_t now = clock_ns();
    if (spec->read_only) {
        choice_end(e, c, FINISH_LENGTH, -1, NULL);
        return false;
    }
    if (!c->first_ns) {
        keeper_save(e->keep, c, c->seq.n_prompt);
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
        c->refused = true;
        choice_end(e, c, FINISH_ERROR, -1, why.msg);
        return false;
    }
    if (c->drafted)
        c->drafted = false; /* the placeholder has been replaced already */
    else
        seq_append(&c->seq, token);
    int n = c->seq.n_tokens - c->seq.n_prompt;
    if (n == spec->min_tokens)
        sampler_keep_bias(c->sampler, spec->sample.n_bias - e->n_ends - spec->n_stop_tokens);
    if (!spec->ignore_eos && rt->tokenizer && tokenizer_is_end(rt->tokenizer, token)) {
        choice_end(e, c, FINISH_STOP, -1, NULL);
        return false;
    }
    bool stop_token = false;
    for (int i = 0; i < spec->n_stop_tokens; i++)
        stop_token |= spec->stop_tokens[i] == token;
    if (stop_token && !spec->include_stop) {
        choice_end(e, c, FINISH_STOP, -1, NULL);
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
    full |= stop_token;
    if (stop >= 0 || full)
        choice_end(e, c, stop >= 0 || stop_token ? FINISH_STOP : FINISH_LENGTH, stop, NULL);
    return stop < 0 && !full;
}

struct new_sampler {
    struct sample_params p;
    int n_vocab;
    const struct request_spec *spec;
    const struct grammar_vocab *vocab;
    int n_tokens; /* in the tokenizer's vocabulary */
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
static void fit_relax(void *m)
{
    grammar_set_budget(m, 0);
}
static void fit_pace(void *m, bool (*go_on)(void *arg), void *arg)
{
    grammar_set_pace(m, go_on, arg);
}
static int fit_foresee(void *m, int32_t *tokens, int n, int most)
{
    return grammar_foresee(m, tokens, n, most);
}
static void fit_free(void *m)
{
    grammar_matcher_free(m);
}

static void make_sampler(void *arg)
{
    struct new_sampler *job = arg;
    job->sampler = sampler_new(&job->p, job->n_vocab);
    struct sample_constraint fit = {0};
    if (job->spec->grammar) {
        fit = (struct sample_constraint){.mask = fit_mask,
                                         .accept = fit_accept,
                                         .relax = fit_relax,
                                         .pace = fit_pace,
                                         .foresee = fit_foresee,
                                         .free = fit_free,
                                         .n_tokens = job->n_tokens};
        fit.state = grammar_matcher_new(job->spec->grammar, job->vocab);
        grammar_set_budget(fit.state, job->spec->max_tokens);
    }
    if (job->spec->rules)
        fit = token_rules_match(job->spec->rules, fit, job->n_vocab);
    if (fit.state)
        sampler_constrain(job->sampler, &fit);
}

static bool bans(const struct sample_params *p, int32_t token)
{
    for (int i = 0; i < p->n_bias; i++)
        if (p->bias[i].token == token && p->bias[i].bias == -INFINITY)
            return true;
    return false;
}

bool engine_may_end(const struct engine *e, const struct sample_params *p)
{
    for (int i = 0; i < e->n_ends; i++)
        if (!bans(p, e->ends[i].token))
            return true;
    return !e->n_ends;
}

bool engine_may_fit(struct engine *e, const struct sample_params *p, struct grammar *g,
                    struct error *err)
{
    if (!engine_may_end(e, p))
        return error_set(err, "logit_bias bans every token that ends an answer, and a constraint "
                              "decides where it ends");
    enum { FORCED_MOST = 16 };                 /* tokens checked, since each mask takes time */
    struct mem_job *outer = mem_job_suspend(); /* cached masks outlive this job */
    struct request_spec spec = {.grammar = g};
    struct new_sampler job = {.p = *p,
                              .n_vocab = e->rt->model->config.n_vocab,
                              .spec = &spec,
                              .vocab = runtime_grammar_vocab(e->rt),
                              .n_tokens = tokenizer_n_vocab(e->rt->tokenizer)};
    make_sampler(&job);
    sampler_prepare(job.sampler);
    for (int n = 0; n < FORCED_MOST && sampler_forced(job.sampler) >= 0; n++) {
        sampler_accept(job.sampler, sampler_forced(job.sampler), true);
        sampler_prepare(job.sampler);
    }
    bool ok = sampler_ok(job.sampler, err);
    sampler_free(job.sampler);
    mem_job_resume(outer);
    return ok;
}

/* Reports the log-probability of a prompt token. */
static void report_prompt_token(struct engine *e, struct choice *c, int at, float logprob,
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

/* If there is no memory for its sampler, the choice fails at the end of its first step. */
void choice_start(struct engine *e, struct choice *c)
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
    requests_leave_queue(e, c->req);
    histogram_add(&e->stats.queued, c->entered_ns - c->req->submitted_ns);
    e->stats.prompt_tokens += (uint64_t)c->seq.n_prompt;
    struct engine_event ev = {
        .kind = EVENT_START, .token = -1, .stop = -1, .usage = count_usage(c, c->entered_ns)};
    emit(e, c, &ev);
    if (spec->prompt_logprobs)
        report_prompt_token(e, c, 0, NAN, NULL, 0);
}

void choices_drop(struct engine *e, bool all)
{
    const char *failed = e->state == ENGINE_FAILED ? e->error.msg : NULL;
    struct seq *lists[] = {e->sched.waiting.first, e->sched.running.first};
    for (int l = 0; l < 2; l++)
        for (struct seq *q = lists[l], *next; q; q = next) {
            struct choice *c = (struct choice *)q;
            next = q->next;
            if (atomic_load(&c->req->cancelled) || (all && !failed))
                choice_end(e, c, FINISH_CANCEL, -1, NULL);
            else if (all)
                choice_end(e, c, FINISH_ERROR, -1, failed);
        }
}

/* The row before a token has its log-probability. Tokens that were reported before a preemption are not reported
 * again. */
void choice_score_prompt(struct engine *e, struct choice *c, const struct step_item *it)
{
    int n_vocab = e->rt->model->config.n_vocab, from = c->seq.kv.n_tokens - it->n_tokens;
    int n_top = c->req->spec.n_top < n_vocab ? c->req->spec.n_top : n_vocab;
    struct token_prob top[ENGINE_MAX_LOGPROBS];
    for (int i = 0; i < it->n_tokens && from + i + 1 < c->seq.n_prompt; i++) {
        int at = from + i + 1;
        if (at < c->n_told)
            continue;
        step_logits(e->rt->step, it->first_row + i, e->logits);
        if (!step_ok(e->rt->step, NULL))
            return;
        float p = sample_logprobs(e->logits, n_vocab, c->seq.tokens[at], top, n_top);
        report_prompt_token(e, c, at, p, top, n_top);
    }
}
