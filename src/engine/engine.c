/* The engine's thread, from loading to closing: plans, starts and finishes steps. See the invariants in engine.h. */
#include "engine/engine_int.h"
#include "backend/backend.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "engine/images.h"
#include "engine/keeper.h"
#include "engine/workers.h"

#include <stdio.h>
#include <string.h>

enum {
    DEFAULT_QUEUE = 512,
    DEFAULT_EMBED_MB = 1024,
    DEFAULT_SEQS = 16,
    MOST_SEQS_GPU = 1024,
    QUEUE_TURNS = 2, /* waiting choices for each that may run */
    MIN_ROWS_TO_READ = 64
};

/* Whether the next n + 1 tokens can be sampled without knowing the tokens between them. */
static bool picks_chained(const struct choice *c, int n)
{
    int now = c->seq.n_tokens - c->seq.n_prompt, least = c->req->spec.min_tokens;
    return !sampler_has_memory(c->sampler) && (now >= least || now + n < least);
}

/* Whether the step chooses the next token of item i. */
static bool chooses(const struct step_item *it, const struct seq *q)
{
    return it->want != LOGITS_NONE && it->n_tokens - it->n_draft == seq_unread(q);
}

/* Plans a step of the sequences whose masks are ready: where a new one's is not, the plan is made again without its
 * last token. Returns the number of items. */
static int plan_step(struct engine *e, struct engine_step *f)
{
    struct scheduler *s = &e->sched;
    choices_grant(e, false);
    s->now_ns = s->ttft_ns > 0 ? (double)clock_ns() : 0;
    for (;;) {
        int n = scheduler_plan(s, f->items), n_held = e->n_held, n_choosing = 0;
        for (int i = 0; i < n; i++) {
            struct choice *c = (struct choice *)s->planned[i];
            if (!c->entered_ns)
                choice_start(e, c);
            if (!c->drafted && chooses(&f->items[i], &c->seq))
                e->constrained[n_choosing++] = c;
        }
        choices_prepare_planned(e, e->constrained, n_choosing);
        if (e->n_held == n_held)
            return n;
    }
}

enum started { STARTED, NOTHING_TO_DO, NOT_STARTED };

/* Plans a step and launches it as `f`. NOT_STARTED: the planned choices have failed; others may continue. */
static enum started start_step(struct engine *e, struct engine_step *f)
{
    struct scheduler *s = &e->sched;
    int n = plan_step(e, f);
    if (!n)
        return NOTHING_TO_DO;
    for (int i = 0; i < n; i++) {
        struct choice *c = (struct choice *)s->planned[i];
        struct step_item *it = &f->items[i];
        if (chooses(it, &c->seq))
            it->sampler = c->sampler;
        it->chained = it->sampler && e->rt->be->async && picks_chained(c, it->n_draft);
        f->seqs[i] = &c->seq;
        c->at[f->slot] = i + 1;
    }
    if (e->n_touched &&
        !e->rt->be->async) /* delivers EVENT_START before a step that may take long */
        choices_deliver(e);
    if (e->on_step)
        e->on_step(e->on_step_arg, n);
    f->follows = draft_follows(&e->spec, f->items, f->seqs, n);
    f->n = n;
    f->n_decode = s->n_decode;
    f->n_read = s->n_read;
    f->n_forced = s->n_forced;
    f->sampled = false;
    f->start_ns = clock_ns();
    struct error err = {0};
    uint64_t recorded = e->rt->be->n_recorded;
    if (step_start(e->rt->step, f->items, n, &err)) {
        f->records = e->rt->be->n_recorded != recorded;
        for (int i = 0; i < n; i++)
            f->seqs[i]->n_open = f->items[i].n_draft;
        return STARTED;
    }
    for (int i = 0; i < n; i++)
        choice_end(e, (struct choice *)f->seqs[i], FINISH_ERROR, -1, err.msg);
    f->n = 0;
    return NOT_STARTED;
}

static bool has_inbox(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    bool any = e->inbox || e->calls || e->cancels || e->quit;
    pthread_mutex_unlock(&e->lock);
    return any;
}

/* Samples the step started last. Masks are computed while its network runs. */
static void sample_step(struct engine *e, struct engine_step *f)
{
    choices_prepare(e, f);
    int64_t start = clock_ns();
    step_sample(e->rt->step);
    f->draw_ns = e->rt->be->async ? 0 : clock_ns() - start;
    f->sampled = true;
}

/* What the host's draws of a step have cost. Those of a device are the device's. */
static void learn_draws(struct engine *e, const struct engine_step *f, int64_t ns)
{
    double sum = 0;
    for (int i = 0; i < f->n; i++) {
        struct choice *c = (struct choice *)f->seqs[i];
        if (!c || !f->items[i].sampler)
            continue;
        c->seq.draw_ns = sampler_draw_ns(c->sampler);
        sum += c->seq.draw_ns;
        if (seq_draws_much(&c->seq))
            scheduler_charge(&e->sched, &c->seq, (int64_t)c->seq.draw_ns);
    }
    if (!f->n_read && !f->n_forced)
        scheduler_drew(&e->sched, (double)ns, (double)f->draw_ns, sum);
}

/* Starts the next step before the current one has ended, so that the device never waits for the host. Its input tokens
 * are placeholders for the tokens that the current step will choose, so every sequence must choose one. A sequence
 * that turns out to have ended wastes a row. If sampling depends on tokens that the host must see first (a
 * constraint, penalties), the network runs ahead and only sampling waits (see loop). */
static void start_ahead(struct engine *e)
{
    const struct scheduler *s = &e->sched;
    const struct engine_step *f = e->now;
    if (!e->rt->be->async || f->follows || e->rt->be->profile || s->waiting.n ||
        s->running.n != f->n || kvcache_available(s->kv) < s->running.n || has_inbox(e))
        return;
    bool wait = false;
    for (int i = 0; i < f->n; i++) {
        const struct choice *c = (const struct choice *)f->seqs[i];
        if (!c || !c->sampler || c->seq.held || f->items[i].want != LOGITS_LAST)
            return;
        if (c->costly && e->rt->kv->states) /* its row could not be read again */
            return;
        int n = c->seq.n_tokens + 1 - c->seq.n_prompt; /* generated tokens when `now` ends */
        wait |= sampler_has_memory(c->sampler) || n == c->req->spec.min_tokens;
    }
    for (int i = 0; i < f->n; i++) {
        struct choice *c = (struct choice *)f->seqs[i];
        if (seq_unread(&c->seq) > 0) /* forced: the next token is known */
            continue;
        if (c->seq.n_tokens + 1 - c->seq.n_prompt >= c->req->spec.max_tokens ||
            c->seq.n_tokens + 1 >= e->context)
            continue; /* ends with `now` */
        seq_append(&c->seq, -1 - f->items[i].first_row);
        sampler_expect(c->sampler);
        c->drafted = true;
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

/* After a failure the device's results cannot be trusted, so nothing runs any more. */
static void fail_engine(struct engine *e, const struct error *why)
{
    if (e->state != ENGINE_FAILED)
        set_state(e, ENGINE_FAILED, why);
    choices_drop(e, true);
}

/* The token after the known ones of c that was chosen from its logits, or the one that is replayed instead. */
static int32_t replayed(const struct choice *c, int32_t token)
{
    int at = c->seq.n_tokens - c->drafted - c->seq.n_prompt;
    return at < c->req->spec.n_replay ? c->req->spec.replay[at] : token;
}

/* Appends the token that a step chose for c, then verifies its drafts: each is accepted if the sampler chooses it from
 * the row before. False: c has ended and may be freed. */
static bool take_chosen(struct engine *e, struct choice *c, const struct step_item *it)
{
    struct sample_probs probs = {0};
    int row = step_chosen_row(it);
    int32_t token = replayed(c, it->token);
    bool logprobs = c->req->spec.logprobs, accepted = true;
    if (logprobs)
        step_probs(e->rt->step, row, &probs);
    int n_accepted = 0;
    for (int i = 0; i < it->n_draft; i++) {
        e->stats.n_drafted[draft_source_of(&c->seq, i)]++;
        c->drafts[draft_source_of(&c->seq, i)].drafted++;
    }
    for (int i = 0; accepted; i++) {
        struct engine_event ev = {.stop = -1};
        if (logprobs) {
            ev.logprob = probs.logprob;
            ev.top = probs.top;
            ev.n_top = probs.n_top;
        }
        accepted = i < it->n_draft && token == c->seq.tokens[c->seq.n_tokens];
        if (accepted) {
            e->stats.n_accepted[draft_source_of(&c->seq, i)]++;
            c->drafts[draft_source_of(&c->seq, i)].accepted++;
            n_accepted++;
        }
        c->seq.n_open =
            it->n_draft - i; /* if c ends with this token, the token is not in the cache */
        if (!choice_take_token(e, c, token, &ev))
            return false;
        if (accepted)
            choices_prepare_planned(e, &(struct choice *){c}, 1);
        if (c->seq.held) /* its row is read again */
            return true;
        if (accepted) {
            c->seq.n_open--;
            token = it->chained ? step_token(e->rt->step, row + i + 1) : -1;
            if (token >= 0 && logprobs)
                step_probs(e->rt->step, row + i + 1, &probs);
            if (token < 0) {
                step_logits(e->rt->step, row + i + 1, e->logits);
                if (!step_ok(e->rt->step, NULL))
                    return true;
                token = sampler_pick(c->sampler, e->logits, &probs);
            }
            token = replayed(c, token);
        }
    }
    draft_verified(&e->spec, &c->seq, it->n_draft, n_accepted);
    return true;
}

/* After a step: makes the drafts for the next one, and drops the unverified drafts of this one. */
static void draft_tokens(struct engine *e, const struct engine_step *f, int64_t ns)
{
    struct error err = {0};
    for (int i = 0; i < f->n; i++) {
        const struct choice *c = (const struct choice *)f->seqs[i];
        if (c) /* the last allowed token is never drafted */
            e->wants[i] = c->req->spec.max_tokens - (c->seq.n_tokens - c->seq.n_prompt) - 1;
    }
    bool ok = draft_make(&e->spec, f->items, f->seqs, e->wants, f->n, &err);
    for (int i = 0; i < f->n; i++)
        if (f->seqs[i])
            draft_settle(&e->spec, f->seqs[i]);
    scheduler_commit_step(&e->sched, f->seqs, f->n, f->n_forced ? 0 : f->n_decode,
                          f->n_forced ? 0 : f->n_read, ns);
    if (!ok)
        fail_engine(e, &err);
}

/* Takes the results of item i of a step. */
static void take_item(struct engine *e, struct engine_step *f, int i)
{
    const struct step_item *it = &f->items[i];
    struct choice *c = (struct choice *)f->seqs[i];
    if (c->sampler && it->want == LOGITS_ALL)
        choice_score_prompt(e, c, it);
    if (!step_ok(e->rt->step, NULL))
        return;
    if (!c->sampler) {
        choice_end(e, c, FINISH_ERROR, -1, "there is no memory for the answer; try again later");
        f->seqs[i] = NULL;
    } else if (it->sampler) {
        if (!take_chosen(e, c, it))
            f->seqs[i] = NULL;
        else if (!f->follows)
            kvcache_settle(e->rt->kv, &c->seq.kv);
    }
}

/* Ends a choice whose page i is not to be found again. */
static void drop_choice(struct engine *e, struct choice *c, int i, const struct error *why)
{
    e->stats.n_wrong_pages++;
    c->seq.n_open = 0;
    c->reread = false;
    kvcache_lose(e->rt->kv, &c->seq.kv, i);
    choice_end(e, c, FINISH_ERROR, -1, why->msg);
}

/* Ends the choices that have read a page of another sequence, and those whose pages they have written to. Nothing of
 * them stays in the cache. */
static void drop_wrong(struct engine *e, struct engine_step *f)
{
    for (int i = 0; i < f->n; i++) {
        struct choice *c = (struct choice *)f->seqs[i];
        const struct step_item *it = &f->items[i];
        struct error why;
        if (!c || step_item_ok(it, &why))
            continue;
        for (struct seq *q = e->sched.running.first, *next; q; q = next) {
            next = q->next;
            if (q != &c->seq && kvcache_contested(&q->kv, &c->seq.kv))
                drop_choice(e, (struct choice *)q, 0, &why);
        }
        drop_choice(e, c, it->wrong - 1, &why);
    }
}

/* What lies between two steps besides the device's time is part of the inter-token latency. */
static void learn_gap(struct engine *e, const struct engine_step *f)
{
    enum { MEAN_OF = 8 };
    double gap = f->start_ns > e->end_ns ? (double)(f->start_ns - e->end_ns) : 0;
    if (e->end_ns && !e->was_idle)
        e->sched.host_ns += (gap - e->sched.host_ns) / MEAN_OF;
    e->was_idle = false;
}

/* Waits for the current step and appends its tokens. */
static void release_ended(struct engine_step *f)
{
    while (f->n_ended)
        request_free(f->ended[--f->n_ended]);
}

static void finish_step(struct engine *e)
{
    struct engine_step *f = e->now;
    struct error err = {0};
    bool ok = step_finish(e->rt->step, &err);
    int64_t end = clock_ns();
    release_ended(f);
    int64_t ns = end - (f->start_ns > e->end_ns ? f->start_ns : e->end_ns);
    /* what the device waited for the host before a step that could not be started ahead */
    int64_t gap = e->rt->be->async && f->start_ns > e->end_ns ? f->start_ns - e->end_ns : 0;
    gap = gap > e->spec.made_ns ? gap - e->spec.made_ns : 0; /* drafts have a cost of their own */
    e->spec.made_ns = 0;
    learn_gap(e, f);
    gap = gap < ns ? gap : 0; /* the engine was idle */
    e->end_ns = end;
    e->step_ns = ns;
    e->stats.n_steps++;
    e->stats.busy_s += (double)ns * 1e-9;
    bool reads = f->n_read || f->n_forced;
    if (ok)
        drop_wrong(e, f);
    *(reads ? &e->stats.read_s : &e->stats.decode_s) += (double)ns * 1e-9;
    e->stats.read_tokens += (uint64_t)f->n_read;
    e->stats.n_read_steps += reads;
    for (int i = 0; i < f->n; i++) {
        struct choice *c = (struct choice *)f->seqs[i];
        if (!c)
            continue;
        c->at[f->slot] = 0;
        if (!ok) /* step_finish has removed its rows */
            c->seq.n_open = 0;
        if (ok && c->drafted)
            c->seq.tokens[c->seq.n_tokens - 1] = replayed(c, f->items[i].token);
        if (ok && c->reread)
            kvcache_cut(e->rt->kv, &c->seq.kv, c->seq.kv.n_tokens - 1);
        c->reread = false;
    }
    if (ok && !e->rt->be->async)
        learn_draws(e, f, ns);
    if (ok && e->spec.opt.from && !reads && !f->records)
        draft_learn(&e->spec, f->items, f->n, f->follows, ns + gap);
    if (ok && !f->follows)
        scheduler_commit_step(&e->sched, f->seqs, f->n, f->n_forced ? 0 : f->n_decode,
                              f->n_forced ? 0 : f->n_read, ns);
    for (int i = 0; ok && i < f->n; i++) {
        if (f->seqs[i])
            take_item(e, f, i);
        ok = step_ok(e->rt->step, &err);
    }
    if (ok)
        choices_prepare(e, f);
    else
        fail_engine(e, &err);
    if (ok && f->follows)
        draft_tokens(e, f, ns);
    else if (ok && e->spec.opt.from)
        draft_note(&e->spec, f->seqs, f->n);
    if (e->rt->encoder)
        encoder_beside_step(e->rt->encoder,
                            f->n_decode ? (int64_t)scheduler_decode_ns(&e->sched, f->n_decode) : 0);
    f->n = 0;
    e->now = e->next;
    e->next = f;
}

/* Waits until something has changed. Sends other processes a sign of life if they need one. */
static void wait_for_change(struct engine *e)
{
    int64_t patience = e->rt ? workers_patience_ns(e->rt) : 0;
    if (!patience) {
        pthread_cond_wait(&e->changed, &e->lock);
        return;
    }
    int64_t until = clock_ns() + patience;
    struct timespec end = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    if (pthread_cond_clockwait(&e->changed, &e->lock, CLOCK_MONOTONIC, &end) == 0)
        return;
    pthread_mutex_unlock(&e->lock);
    workers_keep_alive(e->rt);
    pthread_mutex_lock(&e->lock);
}

/* Schedules the choices whose segments have been read. True: one has been cancelled meanwhile. */
static bool take_restored(struct engine *e)
{
    struct choice *c;
    bool cancelled = false;
    while ((c = keeper_done(e->keep))) {
        scheduler_add(&e->sched, &c->seq);
        cancelled |= atomic_load(&c->req->cancelled);
    }
    return cancelled;
}

void engine_wake(struct engine *e)
{
    pthread_mutex_lock(&e->lock);
    e->restored = true;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

/* Waits for work and moves the inbox to the scheduler. False: the engine closes. */
static bool take_inbox(struct engine *e, bool idle)
{
    pthread_mutex_lock(&e->lock);
    while (idle && !e->inbox && !e->calls && !e->quit && !e->cancels && !e->masks_done &&
           !e->restored)
        wait_for_change(e);
    struct request *r = e->inbox;
    e->inbox = NULL;
    e->inbox_end = &e->inbox;
    bool cancels = e->cancels, quit = e->quit;
    bool restored = e->restored;
    e->cancels = e->restored = false;
    pthread_mutex_unlock(&e->lock);
    if (restored)
        cancels |= take_restored(e);
    for (struct request *next; r; r = next) {
        next = r->next;
        e->stats.n_requests++;
        for (int i = 0; i < r->n; i++)
            if (!keeper_take(e->keep, &r->choices[i]))
                scheduler_add(&e->sched, &r->choices[i].seq);
    }
    bool failed = e->state == ENGINE_FAILED;
    if (cancels || quit || failed)
        choices_drop(e, quit || failed);
    return !quit;
}

bool engine_call(struct engine *e, void (*fn)(void *arg), void *arg)
{
    struct engine_call c = {.fn = fn, .arg = arg};
    pthread_mutex_lock(&e->lock);
    if (e->state != ENGINE_READY || e->quit)
        c.state = CALL_DROPPED;
    if (c.state == CALL_WAITS) {
        *e->calls_end = &c;
        e->calls_end = &c.next;
        pthread_cond_broadcast(&e->changed);
    }
    while (c.state == CALL_WAITS)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
    return c.state == CALL_DONE;
}

/* Runs the first call, or drops it. False: there is none. */
static bool take_call(struct engine *e, bool drop)
{
    pthread_mutex_lock(&e->lock);
    struct engine_call *c = e->calls;
    if (c) {
        e->calls = c->next;
        e->calls_end = c->next ? e->calls_end : &e->calls;
    }
    pthread_mutex_unlock(&e->lock);
    if (!c)
        return false;
    if (!drop)
        c->fn(c->arg);
    pthread_mutex_lock(&e->lock);
    c->state = drop ? CALL_DROPPED : CALL_DONE;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    return true;
}

/* On async backends a step's events are delivered while the next step runs. A step that was started ahead and waits for
 * tokens is sampled as soon as they are known. */
static void loop(struct engine *e)
{
    bool idle = false;
    while (take_inbox(e, idle)) {
        enum started how = STARTED;
        choices_release(e);
        if (!e->now->n) /* one call between two steps */
            take_call(e, e->state == ENGINE_FAILED);
        if (!e->now->n)
            do
                how = start_step(e, e->now);
            while (how == NOT_STARTED);
        idle = how == NOTHING_TO_DO;
        e->was_idle |= idle;
        if (e->now->n && !e->now->sampled)
            sample_step(e, e->now);
        CHECK(!idle || e->n_held || e->sched.running.n + e->sched.waiting.n == 0,
              "%d sequences wait and nothing runs", e->sched.waiting.n);
        if (idle && e->rt->encoder)
            encoder_beside_step(e->rt->encoder, 0);
        if (idle && e->n_held)
            choices_grant(e, true);
        else if (idle)
            kvcache_trim(e->rt->kv);
        else
            start_ahead(e);
        if (idle || e->rt->be->async)
            choices_deliver(e);
        if (!idle)
            finish_step(e);
        if (!e->rt->be->async)
            choices_deliver(e);
    }
    while (e->now->n)
        finish_step(e);
    while (take_call(e, true))
        ;
    keeper_stop(e->keep); /* its calls return at once from here on */
    take_restored(e);
    choices_drop(e, true);
    choices_deliver(e);
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

/* A mask that was computed in the background is ready. */
static void on_mask(void *arg)
{
    struct engine *e = arg;
    pthread_mutex_lock(&e->lock);
    e->masks_done = true;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
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
    scheduler_init(&e->sched, kv, lim, e->context, e->opt.itl_ms);
    e->sched.itl_ns = e->opt.itl_ms * 1e6;
    e->sched.ttft_ns = e->opt.ttft_ms * 1e6;
    if (e->opt.max_queue <= 0)
        e->opt.max_queue = lim->max_seqs > DEFAULT_QUEUE / QUEUE_TURNS ? QUEUE_TURNS * lim->max_seqs
                                                                       : DEFAULT_QUEUE;
    e->sched.max_per_client = e->opt.max_per_client;
    e->sched.records = e->rt->be->records && !e->rt->be->comm;
    struct draft_options draft = {
        .from = e->rt->draft_from,
        .fixed = e->rt->draft_fixed,
        .most_head = e->rt->draft,
        .model = e->rt->small ? draft_model_new(e->rt->small, &e->rt->small_vocab) : NULL,
        .async = e->rt->be->async};
    if (draft.async && kv->states &&
        !draft.fixed) /* rows that are read again are no recorded step */
        draft.most_head = draft.most_head > 0;
    draft_init(&e->spec, &e->sched, e->rt->step, &draft, e->rt->model->config.n_vocab);
    e->spec.fit = choice_fit_drafts;
    e->spec.fit_arg = e;
    e->wants = mem_zalloc((size_t)lim->max_seqs, sizeof *e->wants);
    for (int i = 0; i < 2; i++) {
        struct engine_step *f = &e->steps[i];
        f->slot = i;
        f->items = mem_zalloc((size_t)lim->max_seqs, sizeof *f->items);
        f->seqs = mem_zalloc((size_t)lim->max_seqs, sizeof *f->seqs);
        f->ended = mem_zalloc((size_t)lim->max_seqs, sizeof(struct request *));
    }
    e->now = &e->steps[0];
    e->next = &e->steps[1];
    e->logits = mem_zalloc((size_t)e->rt->model->config.n_vocab, sizeof *e->logits);
    e->constrained = mem_zalloc((size_t)lim->max_seqs, sizeof(struct choice *));
    e->mask_jobs = mem_zalloc((size_t)lim->max_seqs, sizeof(struct mask_job *));
    e->masks = masks_new(on_mask, e);
    find_ends(e);
    return true;
}

static void start_keeping(struct engine *e)
{
    const struct keep_options *o = &e->opt.keep;
    struct error why = {0};
    if (!o->dir || !o->most_bytes || runtime_info(e->rt).weight_bytes < o->least_weights)
        return;
    e->keep = keeper_new(e, o, &why);
    if (!e->keep)
        fprintf(stderr, "steel: prefixes are not kept on disk: %s\n", why.msg);
}

static void *engine_main(void *arg)
{
    struct engine *e = arg;
    os_name_thread("steel-engine");
    bool ok = start(e);
    if (ok) {
        start_keeping(e);
        mem_reserve(); /* from here on clients depend on this process */
        choices_show_stats(e);
    }
    set_state(e, ok ? ENGINE_READY : ENGINE_FAILED, NULL);
    if (ok) {
        loop(e);
        scheduler_clear(&e->sched);
        draft_clear(&e->spec);
    }
    return NULL;
}

struct engine *engine_open(const char *path, const struct engine_options *opt)
{
    struct engine *e = mem_zalloc(1, sizeof *e);
    e->path = path ? mem_strdup(path) : NULL;
    e->opt = *opt;
    struct runtime_options *r = &e->opt.runtime;
    if (!e->opt.embed_bytes)
        e->opt.embed_bytes = (size_t)DEFAULT_EMBED_MB << 20;
    if (r->max_seqs <= 0) {
        r->max_seqs = DEFAULT_SEQS;
        r->max_seqs_gpu = MOST_SEQS_GPU;
    }
    r->read_rows = MIN_ROWS_TO_READ; /* decodes must leave rows for prompt chunks */
    e->images = image_cache_new();
    e->inbox_end = &e->inbox;
    e->calls_end = &e->calls;
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

void engine_flush(struct engine *e, int ms)
{
    if (e && engine_state(e, NULL, NULL) == ENGINE_READY)
        keeper_flush(e->keep, ms);
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
    keeper_free(e->keep);
    runtime_close(e->rt);
    for (int i = 0; i < 2; i++) {
        mem_free(e->steps[i].items);
        mem_free(e->steps[i].seqs);
        release_ended(&e->steps[i]);
        mem_free(e->steps[i].ended);
    }
    image_cache_free(e->images);
    mem_free(e->shares);
    for (int i = 0; i < e->touched_cap; i++)
        buf_clear(&e->touched[i].staged);
    mem_free(e->touched);
    mem_free(e->logits);
    mem_free(e->constrained);
    mem_free(e->mask_jobs);
    masks_free(e->masks);
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

struct engine_info engine_info(const struct engine *e)
{
    return runtime_info(e->rt);
}

const struct tokenizer *engine_tokenizer(const struct engine *e, struct error *why)
{
    if (!e->rt->tokenizer && why)
        *why = e->rt->tokenizer_error;
    return e->rt->tokenizer;
}

const struct tensorfile *engine_file(const struct engine *e)
{
    return e->rt->file;
}

int engine_context(const struct engine *e)
{
    return e->context;
}

bool engine_two_way(const struct engine *e)
{
    return e->rt->model->config.sees_both_ways;
}

struct encoder *engine_encoder(const struct engine *e)
{
    return e->rt ? e->rt->encoder : NULL;
}

struct image_cache *engine_image_cache(const struct engine *e)
{
    return e->images;
}

struct adapters *engine_adapters(const struct engine *e)
{
    return e->rt->adapters;
}

int engine_max_queue(const struct engine *e)
{
    return e->opt.max_queue;
}

static void image_stats(const struct engine *e, struct engine_image_times *out)
{
    struct encoder_times tower;
    struct image_times pixels;
    encoder_times(e->rt->encoder, &tower);
    image_cache_times(e->images, &pixels);
    *out = (struct engine_image_times){.n_views = tower.n_views,
                                       .n_steps = tower.n_steps,
                                       .decode = pixels.decode,
                                       .patches = pixels.patches,
                                       .rows = tower.rows,
                                       .waiting = tower.waiting,
                                       .steps = tower.steps,
                                       .fetch = tower.fetch,
                                       .copy = tower.copy};
}

void engine_stats(struct engine *e, struct engine_stats *out)
{
    pthread_mutex_lock(&e->lock);
    *out = e->shown;
    out->n_rejected = e->n_rejected;
    bool ready = e->state == ENGINE_READY;
    pthread_mutex_unlock(&e->lock);
    if (ready)
        keeper_stats(e->keep, out);
    if (ready && engine_encoder(e))
        image_stats(e, &out->images);
}

struct copied_cost {
    struct engine *e;
    struct draft_cost cost;
};

static void copy_cost(void *arg)
{
    struct copied_cost *c = arg;
    c->cost = c->e->spec.cost;
}

struct draft_cost engine_draft_cost(struct engine *e)
{
    struct copied_cost c = {.e = e};
    engine_call(e, copy_cost, &c);
    return c.cost;
}

void engine_on_step(struct engine *e, void (*fn)(void *arg, int n_items), void *arg)
{
    e->on_step_arg = arg;
    e->on_step = fn;
}

void engine_on_draft(struct engine *e, bool makes,
                     int (*fn)(void *arg, const int32_t *tokens, int n_tokens, int32_t *drafts,
                               int n, int most),
                     void *arg)
{
    e->spec.hook_arg = arg;
    e->spec.hook = fn;
    e->spec.hook_makes = makes;
}
