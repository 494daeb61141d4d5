/* Runs steps in one process or over several: see executor.h. */
#include "engine/executor.h"
#include "backend/backend.h"
#include "base/mem.h"
#include "dist/follow.h"
#include "dist/pipeline.h"
#include "file/tensorfile.h"

#include <string.h>

/* A step over pipeline stages. Its tokens are sampled as logits arrive, maybe after the next step has started. */
struct staged_step {
    bool sampled;
    struct row_choice *choices; /* (max_out) */
    uint64_t *draws;            /* (max_out) */
};

struct executor {
    struct model *m;
    struct bounds bounds;
    struct ranks *r;              /* NULL: a single process */
    struct follow_sender *sender; /* broadcasts steps to the other processes, or NULL */
    struct pipeline *pipeline;    /* NULL: this process has all layers */
    int32_t *sampled;             /* (max_out) */
    struct sampler **samplers;    /* (max_out) */
    int n_out;                    /* output rows of the step started last */
    unsigned turn;                /* counts steps */
    /* With a pipeline: */
    struct staged_step steps[2]; /* in flight, oldest first */
    int n_steps;
    int n_taken;                /* logits rows of the oldest step that have arrived */
    struct sample_probs *probs; /* (max_out) */
};

static void pipeline_init(struct executor *x)
{
    size_t outs = (size_t)x->bounds.max_out;
    x->pipeline = pipeline_new(x->m, x->r, &x->bounds);
    x->probs = mem_zalloc(outs, sizeof *x->probs);
    for (int i = 0; i < 2; i++) {
        x->steps[i].choices = mem_zalloc(outs, sizeof *x->steps[i].choices);
        x->steps[i].draws = mem_zalloc(outs, sizeof *x->steps[i].draws);
    }
}

struct executor *executor_new(struct model *m, const struct bounds *bounds, struct error *err)
{
    struct executor *x = mem_zalloc(1, sizeof *x);
    struct ranks *r = ranks_from(m->be->comm);
    size_t outs = (size_t)bounds->max_out;
    x->m = m;
    x->r = r;
    x->bounds = *bounds;
    x->sampled = mem_zalloc(outs, sizeof *x->sampled);
    x->samplers = mem_zalloc(outs, sizeof(struct sampler *));
    if (r) {
        size_t stream = (size_t)(bounds->max_tokens + r->tp) * (size_t)m->net.n_embd,
               logits = outs * (size_t)m->net.n_vocab;
        ranks_reserve(r, stream > logits ? stream : logits);
        x->sender = follow_sender_new(r, bounds);
    }
    if (!m->be->ops->prepare(m->be, &m->net, bounds, err)) {
        executor_free(x);
        return NULL;
    }
    if (r && r->pp > 1)
        pipeline_init(x);
    return x;
}

void executor_free(struct executor *x)
{
    if (!x)
        return;
    pipeline_free(x->pipeline);
    follow_sender_free(x->sender);
    for (int i = 0; i < 2; i++) {
        mem_free(x->steps[i].choices);
        mem_free(x->steps[i].draws);
    }
    mem_free(x->probs);
    mem_free(x->samplers);
    mem_free(x->sampled);
    mem_free(x);
}

/* Sends the step to the other processes, which run it as well. */
static void send_step(struct executor *x, const struct batch *b, uint64_t key)
{
    if (x->sender)
        follow_send_step(x->sender, b, (struct follow_step){key, x->m->be->deterministic});
}

/* Waits for the next logits of the oldest step and samples their tokens. */
static void take_logits(struct executor *x)
{
    const struct staged_step *s = &x->steps[0];
    struct range outs = pipeline_take(x->pipeline);
    for (int r = outs.first; r < outs.first + outs.n; r++) {
        const struct row_choice *c = s->sampled ? &s->choices[r] : NULL;
        x->sampled[r] = c && c->sampler && *c->owner
                            ? sampler_pick_at(c->sampler, s->draws[r],
                                              pipeline_logits(x->pipeline, r), &x->probs[r])
                            : -1;
    }
    x->n_taken = outs.n ? outs.first + outs.n : x->bounds.max_out;
}

/* Starts the parts of a step. A part whose rows need tokens of the previous step waits for those tokens only. */
static void start_stages(struct executor *x, const struct batch *b, int32_t *tokens,
                         const int32_t *after)
{
    int n = pipeline_begin(x->pipeline, b);
    for (int i = 0; i < n; i++) {
        struct range rows = pipeline_rows(x->pipeline, i);
        for (int r = rows.first; r < rows.first + rows.n; r++) {
            bool known = tokens[r] >= 0;
            int from = known ? after[r] - 1 : -1 - tokens[r];
            while (x->n_steps && x->n_taken <= from)
                take_logits(x);
            /* If there is no token, that step has failed, which its end reports. */
            if (!known)
                tokens[r] = x->sampled[from] > 0 ? x->sampled[from] : 0;
        }
        pipeline_part(x->pipeline, i);
    }
    x->steps[x->n_steps++].sampled = false;
}

void executor_start(struct executor *x, const struct batch *b, int32_t *tokens,
                    const int32_t *after, uint64_t key)
{
    x->n_out = b->n_out;
    send_step(x, b, key);
    mem_guard_enter();
    if (x->pipeline)
        start_stages(x, b, tokens, after);
    else
        forward(x->m, b, key);
    mem_guard_leave();
}

void executor_sample(struct executor *x, const struct row_choice *choices)
{
    if (x->pipeline) {
        struct staged_step *s = &x->steps[x->n_steps - 1];
        memcpy(s->choices, choices, (size_t)x->n_out * sizeof *choices);
        for (int i = 0; i < x->n_out; i++) {
            if (i > 0 && choices[i].owner == choices[i - 1].owner)
                s->choices[i].sampler = NULL; /* only the first of a sequence's rows is sampled */
            if (s->choices[i].sampler)
                s->draws[i] = sampler_counter(choices[i].sampler);
        }
        s->sampled = true;
        return;
    }
    for (int i = 0; i < x->n_out; i++)
        x->samplers[i] = choices[i].sampler;
    mem_guard_enter();
    x->m->be->ops->sample(x->m->be, x->samplers);
    mem_guard_leave();
}

/* If steps read weights from the mapped file, checks that it has not been truncated. */
static bool check_file(struct executor *x, struct error *err)
{
    x->turn = (x->turn + 1) & INT32_MAX;
    for (int i = 0; i < 2; i++)
        if (x->m->reads[i] && !tensorfile_is_whole(x->m->reads[i], x->turn, err))
            return false;
    return true;
}

static void end_stages(struct executor *x)
{
    while (x->n_taken < x->bounds.max_out)
        take_logits(x);
    pipeline_end(x->pipeline);
    struct staged_step done = x->steps[0];
    x->steps[0] = x->steps[1];
    x->steps[1] = done;
    x->n_steps--;
    x->n_taken = 0;
}

bool executor_end(struct executor *x, struct error *err)
{
    bool ok = true;
    mem_guard_enter();
    if (x->pipeline)
        end_stages(x);
    else
        ok = x->m->be->ops->end(x->m->be, x->sampled, err);
    mem_guard_leave();
    return ok && ranks_ok(x->r, err) && check_file(x, err);
}

bool executor_draft(struct executor *x, const struct batch *b, uint64_t key,
                    struct sampler *sampler, struct error *err)
{
    bool ok = true;
    send_step(x, b, key);
    mem_guard_enter();
    if (x->pipeline) {
        pipeline_draft(x->pipeline, b);
        for (int i = 0; i < b->n_out; i++)
            x->sampled[i] = sampler_pick(sampler, pipeline_logits(x->pipeline, i), &x->probs[i]);
    } else {
        for (int i = 0; i < b->n_out; i++)
            x->samplers[i] = sampler;
        forward(x->m, b, key);
        x->m->be->ops->sample(x->m->be, x->samplers);
        ok = x->m->be->ops->end(x->m->be, x->sampled, err);
    }
    mem_guard_leave();
    return ok && ranks_ok(x->r, err);
}

bool executor_follow(struct executor *x, const struct batch *b, uint64_t key, struct error *err)
{
    bool ok = true;
    mem_guard_enter();
    if (x->pipeline && b->from) {
        pipeline_draft(x->pipeline, b);
    } else if (x->pipeline) {
        int n = pipeline_begin(x->pipeline, b);
        for (int i = 0; i < n; i++)
            pipeline_part(x->pipeline, i);
        while (x->r->rank == 0 && pipeline_take(x->pipeline).n)
            continue; /* only in tests, where rank 0 is a follower */
        pipeline_end(x->pipeline);
    } else {
        forward(x->m, b, key);
        ok = x->m->be->ops->end(x->m->be, NULL, err);
    }
    mem_guard_leave();
    return ok && check_file(x, err);
}

int32_t executor_token(const struct executor *x, int row)
{
    return x->sampled[row];
}

void executor_probs(struct executor *x, int row, struct sample_probs *out)
{
    if (x->pipeline)
        *out = x->probs[row];
    else
        x->m->be->ops->probs(x->m->be, row, out);
}

void executor_logits(struct executor *x, int row, float *out)
{
    if (x->pipeline)
        memcpy(out, pipeline_logits(x->pipeline, row), (size_t)model_row_width(x->m) * sizeof *out);
    else
        x->m->be->ops->logits(x->m->be, row, out);
}
