/*
 * Submits requests to the engine: checks a request, copies all it points to, reserves a place in the queue and adds it
 * to the inbox. Runs on any thread. State shared with the engine's thread is under the lock.
 */
#include "engine/engine_int.h"
#include "backend/backend.h"
#include "base/clock.h"
#include "base/mem.h"
#include "text/grammar/grammar.h"

#include <string.h>

static void rows_free(struct prompt_rows *rows)
{
    if (!rows)
        return;
    mem_free((void *)(uintptr_t)rows->embeds);
    mem_free((void *)(uintptr_t)rows->rope_pos);
    mem_free((void *)(uintptr_t)rows->spans);
    mem_free((void *)(uintptr_t)rows->content);
    mem_free(rows);
}

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
    mem_free((void *)r->spec.sample.dry_breakers);
    mem_free((char *)r->spec.salt);
    mem_free((char *)r->spec.think_open);
    mem_free((char *)r->spec.think_close);
    rows_free(r->rows);
    mem_free(r->embeds);
    for (int i = 0; i < r->n_held; i++)
        r->held[i].release(r->held[i].owner);
    mem_free(r->held);
    grammar_free(r->spec.grammar);
    token_rules_free(r->spec.rules);
    mem_free((void *)r->spec.stop_tokens);
    mem_free((void *)r->spec.replay);
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

/* The root of its chain of pages. It depends on the adapters, since pages computed with one must not be used without. */
static uint64_t root_of(const struct engine *e, const struct request_spec *spec)
{
    struct buf key = {0};
    for (int i = 0; i < spec->n_loras; i++) {
        const struct lora_pick *p = &spec->loras[i];
        buf_add(&key, &p->serial, sizeof p->serial);
        buf_add(&key, &p->scale, sizeof p->scale);
    }
    if (spec->n_loras) /* differs from every salt, which has no NUL */
        buf_add(&key, "\0lora", 6);
    if (spec->salt)
        buf_adds(&key, spec->salt);
    uint64_t root = prefix_root(e->rt->kv->prefix, key.p, key.len);
    buf_clear(&key);
    return root;
}

/* The name of an embedding row: its image, its index in the image, and its position relative to the prompt's. */
struct embed_name {
    uint8_t id[32];
    int32_t index, pos[3];
};

/* Tokens need content ids as well, because their M-RoPE position may differ from the index. */
static uint64_t *content_of(const struct engine *e, const struct request_spec *s)
{
    uint64_t *content = mem_alloc((size_t)s->n_prompt * sizeof *content);
    const struct prompt_embeds *next = s->embeds, *end = s->embeds + s->n_embeds;
    for (int i = 0; i < s->n_prompt; i++) {
        const int32_t *pos = s->rope_pos ? s->rope_pos + 3 * (size_t)i : NULL;
        while (next < end && i >= next->at + next->n)
            next++;
        content[i] = prefix_text(s->prompt[i], pos ? pos[0] - i : 0);
        if (next == end || i < next->at)
            continue;
        struct embed_name name = {.index = next->first + i - next->at};
        memcpy(name.id, next->id, sizeof name.id);
        for (int k = 0; k < 3; k++)
            name.pos[k] = pos ? pos[k] - i : 0;
        content[i] = prefix_embed(e->rt->kv->prefix, &name, sizeof name);
    }
    return content;
}

static size_t embed_bytes(const struct engine *e, const struct request_spec *s)
{
    size_t n = 0;
    for (int i = 0; i < s->n_embeds; i++)
        n += (size_t)s->embeds[i].n;
    return n * (size_t)network_embed_width(&e->rt->model->net) * sizeof(float);
}

/* The rows of a span: its owner's, or a copy at `copy`, which moves on. */
static const float *take_span(struct request *r, const struct prompt_embeds *span, size_t width,
                              float **copy)
{
    const float *rows = span->rows;
    if (span->hold) {
        span->hold(span->owner);
        r->held[r->n_held++] = (struct held_rows){span->owner, span->release};
        return rows;
    }
    memcpy(*copy, rows, (size_t)span->n * width * sizeof **copy);
    rows = *copy;
    *copy += (size_t)span->n * width;
    return rows;
}

/* Takes the prompt's embeddings and positions. */
static void copy_rows(struct request *r, const struct request_spec *s)
{
    size_t n = (size_t)s->n_prompt, E = (size_t)network_embed_width(&r->engine->rt->model->net);
    size_t copied = 0;
    if (!s->n_embeds && !s->rope_pos)
        return;
    for (int i = 0; i < s->n_embeds; i++)
        copied += s->embeds[i].hold ? 0 : (size_t)s->embeds[i].n * E;
    struct prompt_rows *rows = r->rows = mem_zalloc(1, sizeof *rows);
    rows->n = s->n_prompt;
    const float **embeds = mem_zalloc(n, sizeof *embeds);
    int32_t *spans = s->n_embeds && s->embeds[0].two_way ? mem_zalloc(2 * n, sizeof *spans) : NULL;
    rows->embeds = embeds;
    rows->spans = spans;
    r->embed_bytes = embed_bytes(r->engine, s);
    float *copy = r->embeds = mem_alloc((copied + 1) * sizeof *r->embeds);
    r->held = mem_zalloc((size_t)s->n_embeds + 1, sizeof *r->held);
    for (int i = 0; i < s->n_embeds; i++) {
        const struct prompt_embeds *span = &s->embeds[i];
        const float *from = take_span(r, span, E, &copy);
        for (int k = 0; k < span->n; k++) {
            embeds[span->at + k] = from + (size_t)k * E;
            if (spans) {
                spans[2 * (span->at + k)] = span->at;
                spans[2 * (span->at + k) + 1] = span->at + span->n;
            }
        }
    }
    if (s->rope_pos) {
        int32_t *pos = mem_alloc(3 * n * sizeof *pos), largest = 0;
        memcpy(pos, s->rope_pos, 3 * n * sizeof *pos);
        rows->rope_pos = pos;
        for (size_t i = 0; i < 3 * n; i++)
            largest = pos[i] > largest ? pos[i] : largest;
        rows->rope_delta = largest + 1 - s->n_prompt;
    }
    if (r->engine->rt->kv->prefix)
        rows->content = content_of(r->engine, s);
}

static int32_t *copy_ids(const int32_t *ids, int n)
{
    int32_t *own = mem_zalloc((size_t)n, sizeof *own);
    if (n)
        memcpy(own, ids, (size_t)n * sizeof *own);
    return own;
}

static void copy_breakers(struct request *r, const struct request_spec *spec)
{
    r->spec.sample.dry_breakers = copy_ids(spec->sample.dry_breakers, spec->sample.n_dry_breakers);
    /* No sequence is longer than the context. */
    if (spec->sample.dry_last_n < 0 || spec->sample.dry_last_n > r->engine->context)
        r->spec.sample.dry_last_n = r->engine->context;
}

/* Recurrent states are saved where messages of the prompt end. */
static void mark_turns(const struct engine *e, struct seq *q)
{
    const struct tokenizer *t = e->rt->tokenizer;
    for (int i = 0; t && e->rt->kv->states && i < q->n_prompt; i++)
        if (tokenizer_is_end(t, q->tokens[i]))
            seq_turn(q, i + 1);
}

/* Runs under mem_try: a long prompt with many choices may need more memory than there is. */
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
    r->spec.rules = spec->rules ? token_rules_ref(spec->rules) : NULL;
    r->spec.stop_tokens = copy_ids(spec->stop_tokens, spec->n_stop_tokens);
    r->spec.replay = copy_ids(spec->replay, spec->n_replay);
    /* The bans of min_tokens come after the caller's biases, so that sampler_keep_bias can drop them. */
    int n_bias = spec->sample.n_bias, ends = e->n_ends, stops = spec->n_stop_tokens;
    int bans = spec->min_tokens > 0 ? ends + stops : 0;
    struct logit_bias *bias = mem_zalloc((size_t)(n_bias + bans), sizeof *bias);
    if (n_bias)
        memcpy(bias, spec->sample.bias, (size_t)n_bias * sizeof *bias);
    if (bans)
        memcpy(bias + n_bias, e->ends, (size_t)ends * sizeof *bias);
    for (int i = 0; bans && i < stops; i++)
        bias[n_bias + ends + i] = (struct logit_bias){spec->stop_tokens[i], -__builtin_inff()};
    r->spec.sample.bias = bias;
    r->spec.sample.n_bias = n_bias + bans;
    copy_breakers(r, spec);
    int most = e->context - spec->n_prompt;
    if (r->spec.max_tokens <= 0 || r->spec.max_tokens > most)
        r->spec.max_tokens = most;
    if (spec->read_only)
        r->spec.max_tokens = 1; /* so that no step is started ahead for it */
    copy_rows(r, spec);
    r->choices = mem_zalloc((size_t)r->n, sizeof *r->choices);
    for (int i = 0; i < r->n; i++) {
        struct choice *c = &r->choices[i];
        c->req = r;
        c->index = i;
        c->out = (struct output){.stop = stop,
                                 .n_stop = spec->n_stop,
                                 .special = spec->special,
                                 .include_stop = spec->include_stop};
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
        c->seq.arrived_ns = (double)r->submitted_ns;
        c->seq.tokens = mem_alloc((size_t)spec->n_prompt * sizeof *c->seq.tokens);
        memcpy(c->seq.tokens, spec->prompt, (size_t)spec->n_prompt * sizeof *c->seq.tokens);
        mark_turns(e, &c->seq);
        c->seq.rows = r->rows;
        c->seq.unfollowed = r->rows != NULL; /* the MTP block reads tokens only */
        c->seq.loras = r->spec.loras;
        c->seq.n_loras = r->spec.n_loras;
        c->seq.no_draft = r->spec.no_draft;
        if (e->rt->kv->prefix && (r->spec.salt || r->spec.n_loras))
            c->seq.root = root_of(e, &r->spec);
    }
}

/* Checks that embeddings are within the prompt, in order and do not overlap, and that a token has three equal
 * positions. */
static bool check_rows(const struct engine *e, const struct request_spec *s, struct error *err)
{
    int end = 0, at = 0;
    if (s->n_embeds && !stepper_limits(e->rt->step)->max_embeds)
        return error_set(err, "embeddings in a prompt are not supported here");
    if (e->rt->be->comm && (s->n_embeds || s->rope_pos))
        return error_set(err, "embeddings in a prompt are not supported by several processes");
    for (int i = 0; i < s->n_embeds; i++) {
        const struct prompt_embeds *span = &s->embeds[i];
        if (span->at < end || span->n < 1 || span->n > s->n_prompt - span->at)
            return error_set(err, "embeds[%d]: rows %d to %d of a prompt of %d", i, span->at,
                             span->at + span->n - 1, s->n_prompt);
        end = span->at + span->n;
        if (span->two_way && (span->n > scheduler_most_whole(&e->sched) || s->prompt_logprobs))
            return error_set(
                err,
                s->prompt_logprobs
                    ? "log-probabilities of a prompt with images are not supported by this model"
                    : "an image of %d tokens, which this model reads at once: a step has room for "
                      "%d",
                span->n, scheduler_most_whole(&e->sched));
    }
    for (int i = 0; s->rope_pos && i < s->n_prompt; i++) {
        const int32_t *p = s->rope_pos + 3 * (size_t)i;
        while (at < s->n_embeds && i >= s->embeds[at].at + s->embeds[at].n)
            at++;
        bool text = at == s->n_embeds || i < s->embeds[at].at;
        for (int k = 0; k < 3; k++)
            if (p[k] < 0 || p[k] >= e->context || (text && p[k] != p[0]))
                return error_set(err, "rope_pos[%d] is %d, %d, %d", i, p[0], p[1], p[2]);
    }
    return true;
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
    bool ok = check_rows(e, s, err);
    if (!ok)
        return SUBMIT_INVALID;
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
    if (ok &&
        (s->n < 0 || s->n > most)) /* more choices than the queue holds could never be accepted */
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

/* Returns what the client has in the queue and of embeddings, then adds n choices and `bytes` to it. Call under the lock. */
static struct queue_share share_add(struct engine *e, uint64_t client, int n, int64_t bytes)
{
    int i = 0;
    while (i < e->n_shares && e->shares[i].client != client)
        i++;
    if (i == e->n_shares) {
        if (n <= 0 && bytes <= 0)
            return (struct queue_share){client, 0, 0};
        if (e->n_shares == e->shares_cap) {
            e->shares_cap += e->shares_cap + 16;
            e->shares = mem_realloc(e->shares, (size_t)e->shares_cap, sizeof *e->shares);
        }
        e->shares[e->n_shares++] = (struct queue_share){client, 0, 0};
    }
    struct queue_share had = e->shares[i];
    e->shares[i].n += n;
    e->shares[i].embed_bytes += (size_t)bytes;
    e->n_queued += n;
    e->embed_bytes += (size_t)bytes;
    if (!e->shares[i].n && !e->shares[i].embed_bytes)
        e->shares[i] = e->shares[--e->n_shares];
    return had;
}

/* Whether n more choices fit. A client without queued choices may use up to twice the limit, so that others cannot
 * lock it out. */
static bool queue_has_room(struct engine *e, uint64_t client, int n)
{
    int64_t most = e->opt.max_queue;
    if (share_add(e, client, 0, 0).n == 0)
        most *= 2;
    return n <= most - e->n_queued;
}

/* Counts the prompt's embeddings before they are copied. A client that has none may exceed the limit as it may the
 * queue's. The only prompt with embeddings is always taken: its length is bounded by the context. */
static bool take_embeds(struct engine *e, const struct request_spec *spec, struct error *err)
{
    size_t bytes = embed_bytes(e, spec), most = e->opt.embed_bytes;
    if (!bytes)
        return true;
    pthread_mutex_lock(&e->lock);
    if (share_add(e, spec->client, 0, 0).embed_bytes == 0)
        most *= 2;
    size_t held = e->embed_bytes;
    bool fits = !held || (held < most && bytes <= most - held);
    if (fits)
        share_add(e, spec->client, 0, (int64_t)bytes);
    else
        e->n_rejected++;
    pthread_mutex_unlock(&e->lock);
    return fits ||
           error_set(err, "the images of other requests fill the memory for them: %zu of %zu MB",
                     held >> 20, e->opt.embed_bytes >> 20);
}

static void give_back(struct engine *e, const struct request_spec *spec, size_t bytes)
{
    if (spec->n_loras)
        adapters_give_back(e->rt->adapters, spec->loras, spec->n_loras);
    if (!bytes)
        return;
    pthread_mutex_lock(&e->lock);
    share_add(e, spec->client, 0, -(int64_t)bytes);
    pthread_mutex_unlock(&e->lock);
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
    if (!take_embeds(e, spec, err)) {
        give_back(e, spec, 0);
        return SUBMIT_FULL;
    }
    if (!mem_try(request_new, &job)) {
        give_back(e, spec, embed_bytes(e, spec));
        error_set(err, "not enough memory for the request; try again later");
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
        share_add(e, spec->client, r->n, 0);
        *e->inbox_end = r;
        e->inbox_end = &r->next;
        pthread_cond_broadcast(&e->changed);
    }
    pthread_mutex_unlock(&e->lock);
    if (res != SUBMIT_OK) {
        give_back(e, spec, r->embed_bytes);
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

void request_end(struct engine *e, struct request *r)
{
    give_back(e, &r->spec, r->embed_bytes);
    request_unref(r);
}

void requests_leave_queue(struct engine *e, const struct request *r)
{
    pthread_mutex_lock(&e->lock);
    share_add(e, r->spec.client, -1, 0);
    pthread_mutex_unlock(&e->lock);
}
