/* Embeddings and reranking: see embed.h. */
#include "engine/embed.h"
#include "backend/backend.h"
#include "base/mem.h"
#include "model/families/family.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum {
    MAX_SEQS = 256,
    STEP_TOKENS = 2048,
    STEP_TOKENS_GPU = 16896, /* for encoders: 128 per SM of a large GPU with 132 SMs */
    MAX_CONTEXT = 8192,
    MAX_QUEUE = 16384
};

/* The queued jobs of one client. Clients form a ring. */
struct client {
    uint64_t id;
    struct embed_job *first, *last;
    struct client *next;
};

/* The texts of a step and their jobs. */
struct embed_step {
    struct step_item *items;   /* (max_seqs) */
    struct kv_seq *seqs;       /* (max_seqs) */
    struct embed_job **jobs;   /* (max_seqs) the job of item i */
    struct embed_text **texts; /* (max_seqs) */
    int n;
};

struct embedder {
    struct runtime *rt;
    struct pooling pooling;
    int max_queue;
    /* used by the thread only */
    /* on async backends one computes while the other is finished */
    struct embed_step steps[2];
    float *rows; /* (rows of the longest text, n_embd) */
    void *tmp;   /* scratch for pooling */
    pthread_t thread;
    bool started;
    /* shared */
    pthread_mutex_t lock;
    pthread_cond_t work;
    struct client *ring; /* the client whose turn it is; NULL = no jobs wait */
    bool closing, broken;
    struct error why; /* if broken: the error of the step */
    struct embed_stats stats;
};

const struct runtime *embedder_runtime(const struct embedder *e)
{
    return e->rt;
}

struct engine_info embedder_info(const struct embedder *e)
{
    return runtime_info(e->rt);
}

const struct pooling *embedder_pooling(const struct embedder *e)
{
    return &e->pooling;
}

int embedder_width(const struct embedder *e)
{
    return e->pooling.width;
}

int embedder_context(const struct embedder *e)
{
    return e->rt->context;
}

static bool is_encoder(const struct embedder *e)
{
    return e->rt->model->config.family->encoder;
}

/* The queue, under the lock. */

static struct client *client_of(struct embedder *e, uint64_t id)
{
    struct client *c = e->ring;
    if (c)
        do
            if (c->id == id)
                return c;
        while ((c = c->next) != e->ring);
    c = mem_zalloc(1, sizeof *c);
    c->id = id;
    if (e->ring) { /* after all others */
        struct client *last = e->ring;
        while (last->next != e->ring)
            last = last->next;
        last->next = c;
        c->next = e->ring;
    } else {
        c->next = c;
        e->ring = c;
    }
    return c;
}

/* Removes the client whose turn it is from the ring. */
static void drop_client(struct embedder *e)
{
    struct client *c = e->ring, *before = c;
    while (before->next != c)
        before = before->next;
    before->next = c->next;
    e->ring = c->next == c ? NULL : c->next;
    mem_free(c);
}

/* Takes the text whose turn it is. NULL: it has more than `room` tokens and stays queued. */
static struct embed_text *take_text(struct embedder *e, int room, struct embed_job **job)
{
    struct client *c = e->ring;
    struct embed_job *j = c->first;
    struct embed_text *t = &j->texts[j->next];
    if (t->n > room)
        return NULL;
    *job = j;
    e->stats.n_waiting--;
    if (++j->next == j->n) {
        c->first = j->link;
        if (!c->first) {
            drop_client(e);
            return t;
        }
    }
    e->ring = c->next;
    return t;
}

/* Counts n_texts of a job as done, and ends the job after its last one. */
static void job_end(struct embed_job *j, int n_texts)
{
    j->left -= n_texts;
    if (j->left == 0) {
        j->ok = !j->err.msg[0];
        j->done(j);
    }
}

/* Ends all waiting jobs with an error. Call without the lock. */
static void end_all(struct embedder *e, const struct error *why)
{
    for (;;) {
        pthread_mutex_lock(&e->lock);
        struct embed_job *j = NULL;
        if (e->ring) {
            j = e->ring->first;
            e->ring->first = j->link;
            e->stats.n_waiting -= j->n - j->next;
            if (!e->ring->first)
                drop_client(e);
        }
        pthread_mutex_unlock(&e->lock);
        if (!j)
            return;
        j->err = *why;
        job_end(j, j->n - j->next);
    }
}

/* Steps */

static enum logits_want want_of(const struct pooling *p)
{
    enum pooling_kind row = p->kind == POOLING_RANK ? p->row : p->kind;
    return row == POOLING_CLS ? LOGITS_FIRST : row == POOLING_LAST ? LOGITS_LAST : LOGITS_ALL;
}

/* Fills a step with texts. Texts of cancelled jobs are dropped later. wait: waits for the first text. False: the
 * embedder closes. */
static bool gather(struct embedder *e, struct embed_step *f, bool wait)
{
    const struct step_limits *lim = stepper_limits(e->rt->step);
    int room = lim->max_tokens;
    f->n = 0;
    pthread_mutex_lock(&e->lock);
    while (wait && !e->ring && !e->closing)
        pthread_cond_wait(&e->work, &e->lock);
    bool more = !e->closing;
    while (more && e->ring && f->n < lim->max_seqs) {
        struct embed_job *job;
        /* A text longer than a step gets several steps of its own. */
        struct embed_text *t = take_text(e, f->n ? room : INT32_MAX, &job);
        if (!t)
            break;
        f->jobs[f->n] = job;
        f->texts[f->n++] = t;
        room -= t->n;
        if (room <= 0)
            break;
    }
    pthread_mutex_unlock(&e->lock);
    return more;
}

/* Drops the texts of cancelled jobs. */
static void drop_cancelled(struct embed_step *f)
{
    int kept = 0;
    for (int i = 0; i < f->n; i++) {
        if (atomic_load(&f->jobs[i]->cancel)) {
            error_set(&f->jobs[i]->err, "cancelled");
            job_end(f->jobs[i], 1);
            continue;
        }
        f->jobs[kept] = f->jobs[i];
        f->texts[kept++] = f->texts[i];
    }
    f->n = kept;
}

/* Fails text i if its result is not finite. */
static void check_text(struct embedder *e, const struct embed_step *f, int i)
{
    const struct pooling *p = &e->pooling;
    const struct embed_text *t = f->texts[i];
    int dims = f->jobs[i]->dims, width = dims > 0 && dims < p->width ? dims : p->width;
    size_t n = p->kind == POOLING_NONE ? (size_t)t->n * (size_t)p->n_embd : (size_t)width;
    for (size_t k = 0; k < n; k++)
        if (!isfinite(t->out[k])) {
            error_set(&f->jobs[i]->err, "the model computed numbers that are not finite");
            return;
        }
}

/* Pools the computed rows of text i. */
static void finish_text(struct embedder *e, const struct embed_step *f, int i)
{
    const struct pooling *p = &e->pooling;
    const struct embed_text *t = f->texts[i];
    size_t E = (size_t)p->n_embd;
    int first, count;
    pooling_rows(p, t->n, &first, &count);
    float *to = p->kind == POOLING_NONE ? t->out : e->rows;
    if (!step_item_ok(&f->items[i], &f->jobs[i]->err))
        return;
    for (int r = 0; r < count; r++)
        step_logits(e->rt->step, f->items[i].first_row + r, to + (size_t)r * E);
    if (p->kind != POOLING_NONE)
        pooling_apply(p, to, count, f->jobs[i]->dims, e->tmp, t->out);
    check_text(e, f, i);
}

/* Runs a text longer than a step in chunks. Causal models only. */
static bool run_long(struct embedder *e, struct embed_step *f, struct error *err)
{
    const struct step_limits *lim = stepper_limits(e->rt->step);
    const struct pooling *p = &e->pooling;
    const struct embed_text *t = f->texts[0];
    size_t E = (size_t)p->n_embd;
    enum logits_want want = want_of(p);
    float *all = want == LOGITS_ALL ? mem_zalloc((size_t)t->n * E, sizeof *all) : e->rows;
    float *to = p->kind == POOLING_NONE ? t->out : all;
    bool ok = true;
    for (int at = 0; ok && at < t->n; at += lim->max_tokens) {
        int n = t->n - at < lim->max_tokens ? t->n - at : lim->max_tokens;
        bool here = want == LOGITS_ALL || (want == LOGITS_FIRST ? at == 0 : at + n == t->n);
        f->items[0] = (struct step_item){.seq = &f->seqs[0],
                                         .tokens = t->ids + at,
                                         .types = t->types ? t->types + at : NULL,
                                         .n_tokens = n,
                                         .want = here ? want : LOGITS_NONE};
        ok = step_run(e->rt->step, f->items, 1, err);
        for (int r = 0; ok && here && r < (want == LOGITS_ALL ? n : 1); r++)
            step_logits(e->rt->step, f->items[0].first_row + r,
                        to + (want == LOGITS_ALL ? (size_t)(at + r) * E : 0));
        ok = ok && step_ok(e->rt->step, err);
    }
    if (ok && p->kind != POOLING_NONE)
        pooling_apply(p, to, want == LOGITS_ALL ? t->n : 1, f->jobs[0]->dims, e->tmp, t->out);
    if (ok)
        check_text(e, f, 0);
    if (all != e->rows)
        mem_free(all);
    return ok;
}

static bool is_long(const struct embedder *e, const struct embed_step *f)
{
    return f->n == 1 && f->texts[0]->n > stepper_limits(e->rt->step)->max_tokens;
}

/* Whether there are free pages for it besides the step in flight. */
static bool has_room(const struct embedder *e, const struct embed_step *f)
{
    int pages = 0, len = e->rt->kv->page_len;
    for (int i = 0; i < f->n; i++)
        pages += (f->texts[i]->n + len - 1) / len;
    return pages <= kvcache_available(e->rt->kv);
}

static bool start_step(struct embedder *e, struct embed_step *f, struct error *err)
{
    enum logits_want want = want_of(&e->pooling);
    for (int i = 0; i < f->n; i++)
        f->items[i] = (struct step_item){.seq = &f->seqs[i],
                                         .tokens = f->texts[i]->ids,
                                         .types = f->texts[i]->types,
                                         .n_tokens = f->texts[i]->n,
                                         .want = want};
    return step_start(e->rt->step, f->items, f->n, err);
}

/* Counts the texts of a step as done; !ok: they have failed. */
static void end_step(struct embedder *e, struct embed_step *f, bool ok, const struct error *err)
{
    int tokens = 0;
    for (int i = 0; i < f->n; i++) {
        kvcache_release(e->rt->kv, &f->seqs[i]);
        tokens += f->texts[i]->n;
    }
    pthread_mutex_lock(&e->lock);
    e->stats.n_steps += f->n > 0;
    e->stats.n_texts += (uint64_t)f->n;
    e->stats.n_tokens += (uint64_t)tokens;
    if (!ok) {
        e->broken = true;
        e->why = *err;
    }
    pthread_mutex_unlock(&e->lock);
    for (int i = 0; i < f->n; i++) {
        if (!ok)
            f->jobs[i]->err = *err;
        job_end(f->jobs[i], 1);
    }
    f->n = 0;
}

/* Waits for the step in flight. */
static bool finish_step(struct embedder *e, struct embed_step *f, struct error *err)
{
    bool ok = step_finish(e->rt->step, err);
    for (int i = 0; ok && i < f->n; i++)
        finish_text(e, f, i);
    ok = ok && step_ok(e->rt->step, err);
    end_step(e, f, ok, err);
    return ok;
}

/* Starts the step in f, which becomes the step in flight. The previous one is finished first if both do not fit, or
 * while f computes. */
static bool run_step(struct embedder *e, struct embed_step *f, struct embed_step **in_flight,
                     struct error *err)
{
    bool alone = is_long(e, f), ok = true;
    if (*in_flight && (alone || !has_room(e, f))) {
        ok = finish_step(e, *in_flight, err);
        *in_flight = NULL;
    }
    bool starts = ok && f->n && !alone;
    if (starts)
        ok = start_step(e, f, err);
    else if (ok && alone)
        ok = run_long(e, f, err);
    if (!starts || !ok)
        end_step(e, f, ok, err);
    if (*in_flight && !finish_step(e, *in_flight, err))
        ok = false;
    *in_flight = f->n ? f : NULL;
    if (*in_flight && (!ok || !e->rt->be->async)) {
        ok = finish_step(e, f, err) && ok;
        *in_flight = NULL;
    }
    return ok;
}

static void *run_thread(void *arg)
{
    struct embedder *e = arg;
    struct embed_step *in_flight = NULL;
    struct error err = {0};
    bool ok = true, more = true;
    while (ok && (more || in_flight)) {
        struct embed_step *f = &e->steps[in_flight == &e->steps[0]];
        more = gather(e, f, !in_flight);
        drop_cancelled(f);
        ok = run_step(e, f, &in_flight, &err);
    }
    if (!ok)
        end_all(e, &err);
    return NULL;
}

bool embedder_submit(struct embedder *e, struct embed_job *job, struct error *err)
{
    job->next = 0;
    job->left = job->n;
    job->link = NULL;
    job->ok = false;
    job->err = (struct error){0};
    if (job->n == 0) {
        job->ok = true;
        job->done(job);
        return true;
    }
    pthread_mutex_lock(&e->lock);
    bool ok = !e->closing && !e->broken;
    if (!ok)
        error_set(err, "%s", e->broken ? e->why.msg : "closing");
    /* An empty queue accepts any job, or a job larger than the queue would never run. */
    if (ok && e->stats.n_waiting && e->stats.n_waiting + job->n > e->max_queue) {
        ok = error_set(err, "%d texts wait already: try again later", e->stats.n_waiting);
        e->stats.n_rejected++;
    }
    if (ok) {
        struct client *c = client_of(e, job->client);
        if (c->first)
            c->last->link = job;
        else
            c->first = job;
        c->last = job;
        e->stats.n_waiting += job->n;
        pthread_cond_signal(&e->work);
    }
    pthread_mutex_unlock(&e->lock);
    return ok;
}

bool embedder_failed(struct embedder *e, struct error *err)
{
    pthread_mutex_lock(&e->lock);
    bool failed = e->broken;
    if (failed)
        *err = e->why;
    pthread_mutex_unlock(&e->lock);
    return failed;
}

struct waiter {
    pthread_mutex_t lock;
    pthread_cond_t done;
    bool over;
};

static void wake(struct embed_job *job)
{
    struct waiter *w = job->user;
    pthread_mutex_lock(&w->lock);
    w->over = true;
    pthread_cond_signal(&w->done);
    pthread_mutex_unlock(&w->lock);
}

bool embedder_run(struct embedder *e, struct embed_job *job, struct error *err)
{
    struct waiter w = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false};
    job->done = wake;
    job->user = &w;
    if (!embedder_submit(e, job, err))
        return false;
    pthread_mutex_lock(&w.lock);
    while (!w.over)
        pthread_cond_wait(&w.done, &w.lock);
    pthread_mutex_unlock(&w.lock);
    return job->ok || error_set(err, "%s", job->err.msg);
}

void embedder_stats(struct embedder *e, struct embed_stats *out)
{
    pthread_mutex_lock(&e->lock);
    *out = e->stats;
    pthread_mutex_unlock(&e->lock);
}

/* Opening and closing */

/* Sets up a decoder that was trained to answer yes or no. */
static bool load_yes_no(struct embedder *e, struct error *err)
{
    const struct tokenizer *t = e->rt->tokenizer;
    if (!t)
        return error_set(err, "%s: ranking needs its tokenizer: %s", e->rt->file->path,
                         e->rt->tokenizer_error.msg);
    if (tokenizer_find(t, "<|im_start|>", 12) < 0)
        return error_set(err,
                         "%s: no classification head to rank by, and no reranker that answers yes "
                         "or no",
                         e->rt->file->path);
    return pooling_yes_no(e->rt->file, &e->rt->model->config, tokenizer_find(t, "yes", 3),
                          tokenizer_find(t, "no", 2), &e->pooling, err);
}

static bool load_pooling(struct embedder *e, const struct embed_options *opt, struct error *err)
{
    const struct config *c = &e->rt->model->config;
    int kind = opt->rank ? POOLING_RANK : opt->pooling;
    bool asks = kind == POOLING_RANK && !c->family->encoder && !pooling_has_head(e->rt->file);
    bool ok = asks ? load_yes_no(e, err) : pooling_load(e->rt->file, c, kind, &e->pooling, err);
    if (ok && opt->normalize >= 0)
        e->pooling.normalize = opt->normalize;
    return ok;
}

/* Sizes of steps. A bidirectional model needs steps that hold the longest text. */
static bool size_of(const char *path, const struct embed_options *opt, struct runtime_options *out,
                    struct error *err)
{
    struct tensorfile *f = tensorfile_open(path, err);
    struct config c;
    bool ok = f && config_load(f, &c, err);
    *out = opt->runtime;
    out->embed = true;
    if (ok) {
        if (out->context <= 0)
            out->context = c.context < MAX_CONTEXT ? c.context : MAX_CONTEXT;
        if (out->context > c.context)
            ok = error_set(err, "%s: a context of %d tokens: the model has %d", f->path,
                           out->context, c.context);
        out->max_seqs = out->max_seqs > 0 ? out->max_seqs : MAX_SEQS;
        out->max_seqs_gpu = 0;
        if (out->max_tokens <= 0) {
            out->max_tokens = STEP_TOKENS;
            out->max_tokens_gpu = c.family->encoder ? STEP_TOKENS_GPU : 0;
        }
        if (c.family->encoder && out->max_tokens < out->context)
            out->max_tokens = out->context;
        /* A text's last page may be almost empty. The runtime adds a page per sequence for that. */
        out->kv_tokens = out->max_tokens > out->context ? out->max_tokens : out->context;
    }
    tensorfile_close(f);
    return ok;
}

struct embedder *embedder_open(const char *path, const struct embed_options *opt, struct error *err)
{
    struct runtime_options ro;
    if (!size_of(path, opt, &ro, err))
        return NULL;
    struct embedder *e = mem_zalloc(1, sizeof *e);
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->work, NULL);
    e->max_queue = opt->max_queue > 0 ? opt->max_queue : MAX_QUEUE;
    e->rt = runtime_open(path, &ro, err);
    if (!e->rt || !load_pooling(e, opt, err)) {
        embedder_close(e);
        return NULL;
    }
    size_t seqs = (size_t)ro.max_seqs, E = (size_t)e->pooling.n_embd;
    for (int i = 0; i < 2; i++) {
        struct embed_step *f = &e->steps[i];
        f->items = mem_zalloc(seqs, sizeof *f->items);
        f->seqs = mem_zalloc(seqs, sizeof *f->seqs);
        f->jobs = mem_zalloc(seqs, sizeof *f->jobs);
        f->texts = mem_zalloc(seqs, sizeof *f->texts);
    }
    e->rows = mem_zalloc((size_t)stepper_limits(e->rt->step)->max_tokens * E, sizeof *e->rows);
    e->tmp = mem_zalloc(pooling_scratch(&e->pooling), 1);
    e->started = pthread_create(&e->thread, NULL, run_thread, e) == 0;
    if (!e->started) {
        error_set(err, "no thread for the model");
        embedder_close(e);
        return NULL;
    }
    return e;
}

void embedder_close(struct embedder *e)
{
    if (!e)
        return;
    pthread_mutex_lock(&e->lock);
    e->closing = true;
    pthread_cond_signal(&e->work);
    pthread_mutex_unlock(&e->lock);
    if (e->started)
        pthread_join(e->thread, NULL);
    struct error why = {0};
    error_set(&why, "closing");
    end_all(e, &why);
    runtime_close(e->rt);
    pooling_clear(&e->pooling);
    for (int i = 0; i < 2; i++) {
        struct embed_step *f = &e->steps[i];
        mem_free(f->items);
        mem_free(f->seqs);
        mem_free(f->jobs);
        mem_free(f->texts);
    }
    mem_free(e->rows);
    mem_free(e->tmp);
    pthread_cond_destroy(&e->work);
    pthread_mutex_destroy(&e->lock);
    mem_free(e);
}

/* Texts */

void embed_text_clear(struct embed_text *t)
{
    mem_free(t->ids);
    mem_free(t->types);
    t->ids = t->types = NULL;
    t->n = 0;
}

static bool encode(const struct embedder *e, const char *text, size_t len, int flags,
                   struct budget *budget, struct token_list *out, struct error *err)
{
    if (!e->rt->tokenizer)
        return error_set(err, "%s: no tokenizer: %s", e->rt->file->path,
                         e->rt->tokenizer_error.msg);
    return tokenizer_encode_within(e->rt->tokenizer, text, len, flags, budget, out, err);
}

/* The number of tokens that the tokenizer appends to a text. They are kept when the text is cut. */
static size_t n_appended(const struct embedder *e, const struct token_list *l)
{
    return l->n > 1 && tokenizer_kind(e->rt->tokenizer, l->ids[l->n - 1]) == TOKEN_CONTROL;
}

static bool too_long(const struct embedder *e, size_t n, struct error *err)
{
    return error_set(err, "the text has %zu tokens, the model takes %d (truncate cuts it)", n,
                     e->rt->context);
}

bool embed_encode(const struct embedder *e, const char *text, size_t len, bool truncate,
                  struct budget *budget, struct embed_text *out, struct error *err)
{
    struct token_list l = {0};
    size_t most = (size_t)e->rt->context;
    bool ok = encode(e, text, len, TOKENIZE_BOS, budget, &l, err);
    if (ok && l.n == 0)
        ok = error_set(err, "a text of no tokens has no embedding");
    if (ok && l.n > most) {
        ok = truncate || too_long(e, l.n, err);
        size_t tail = n_appended(e, &l);
        if (tail)
            l.ids[most - 1] = l.ids[l.n - 1];
        l.n = most;
    }
    if (!ok) {
        token_list_clear(&l);
        return false;
    }
    out->ids = l.ids;
    out->types = NULL;
    out->n = (int)l.n;
    return true;
}

/* Encodes the prompt of Qwen's decoder rerankers. */
static bool encode_question(const struct embedder *e, const char *query, size_t n_query,
                            const char *doc, size_t n_doc, const char *instruct, bool truncate,
                            struct budget *budget, struct embed_text *out, struct error *err)
{
    static const char head[] =
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        "and the Instruct provided. Note that the answer can only be \"yes\" or "
        "\"no\".<|im_end|>\n<|im_start|>user\n";
    static const char tail[] = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
    struct token_list l = {0}, end = {0};
    struct buf text = {0};
    buf_addf(&text, "<Instruct>: %s\n<Query>: ",
             instruct ? instruct
                      : "Given a web search query, retrieve relevant passages that answer the "
                        "query");
    buf_add(&text, query, n_query);
    buf_adds(&text, "\n<Document>: ");
    buf_add(&text, doc, n_doc);
    /* Special tokens are parsed in the template only, not in the user's text. */
    bool ok = encode(e, head, sizeof head - 1, TOKENIZE_SPECIAL, budget, &l, err) &&
              encode(e, text.p, text.len, 0, budget, &l, err) &&
              encode(e, tail, sizeof tail - 1, TOKENIZE_SPECIAL, budget, &end, err);
    size_t most = (size_t)e->rt->context;
    if (ok && l.n + end.n > most) {
        ok = (truncate && end.n < most) || too_long(e, l.n + end.n, err);
        l.n = ok ? most - end.n : l.n;
    }
    for (size_t i = 0; ok && i < end.n; i++)
        token_list_add(&l, end.ids[i]);
    token_list_clear(&end);
    buf_clear(&text);
    if (!ok) {
        token_list_clear(&l);
        return false;
    }
    out->ids = l.ids;
    out->types = NULL;
    out->n = (int)l.n;
    return true;
}

/* Encodes [CLS] query [SEP] document [SEP]. RoBERTa models have two </s> between query and document. */
bool embed_encode_pair(const struct embedder *e, const char *query, size_t n_query, const char *doc,
                       size_t n_doc, const char *instruct, bool truncate, struct budget *budget,
                       struct embed_text *out, struct error *err)
{
    if (!is_encoder(e))
        return encode_question(e, query, n_query, doc, n_doc, instruct, truncate, budget, out, err);
    struct token_list l = {0}, d = {0};
    bool ok = encode(e, query, n_query, TOKENIZE_BOS, budget, &l, err) &&
              encode(e, doc, n_doc, TOKENIZE_BOS, budget, &d, err);
    size_t first = l.n, most = (size_t)e->rt->context;
    if (ok) {
        const struct tokenizer *t = e->rt->tokenizer;
        int32_t end = l.n ? l.ids[l.n - 1] : -1;
        size_t len = 0, skip = d.n && l.n && d.ids[0] == l.ids[0];
        const char *begin = l.n ? tokenizer_piece(t, l.ids[0], &len) : "";
        if (len == 3 && !memcmp(begin, "<s>", 3))
            token_list_add(&l, end);
        for (size_t i = skip; i < d.n; i++)
            token_list_add(&l, d.ids[i]);
        if (l.n > most) {
            ok = (truncate && first < most) || too_long(e, l.n, err);
            if (ok && n_appended(e, &l))
                l.ids[most - 1] = l.ids[l.n - 1];
            l.n = ok ? most : l.n;
        }
    }
    token_list_clear(&d);
    if (!ok) {
        token_list_clear(&l);
        return false;
    }
    out->ids = l.ids;
    out->n = (int)l.n;
    const struct weight *types = e->rt->model->net.embed.types;
    out->types = types && types->n_out > 1 ? mem_zalloc(l.n, sizeof *out->types) : NULL;
    for (size_t i = first; out->types && i < l.n; i++)
        out->types[i] = 1;
    return true;
}
