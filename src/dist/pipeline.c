/* Steps through the stages of a pipeline: see pipeline.h. Owns the buffers between them. */
#include "dist/pipeline.h"
#include "backend/backend.h"
#include "backend/lora.h"
#include "base/mem.h"
#include "dist/parts.h"
#include "dist/stages.h"

#include <math.h>
#include <string.h>

enum { IN_FLIGHT = 2 }; /* steps */

/* A part of a step in flight. */
struct micro_batch {
    struct batch_part part;
    const int32_t *source; /* its tokens in the step's batch; some may be filled in later */
    struct ranks_wait *sent, *shared, *logits;
};

struct pipeline_step {
    struct micro_batch *parts; /* (most) */
    int n_parts, n_taken;
    /* Shared by all parts; each uses its own rows: */
    int32_t *tokens, *out_rows; /* (max_tokens), (max_out) */
    float *rows;                /* (max_tokens, E) the residual stream, for the next stage */
    float *outs;                /* (max_out, E) its output rows, for rank 0's shard of the head */
    float *logits;              /* (max_out, width) logits on the last stage */
    bool late;                  /* some tokens were unknown when the step started */
};

struct pipeline {
    struct model *m;
    struct ranks *r;
    int most; /* the most parts of a step */
    int max_seqs;
    int overhead;   /* of pipeline_parts */
    bool whole;     /* sequences are not cut, because rows attend to later ones */
    bool all_embed; /* later stages need token ids, too */
    struct pipeline_step steps[IN_FLIGHT];
    uint64_t begun, ended; /* number of steps */
    float *logits;         /* (max_out, width) of the oldest step, on rank 0 */
    float *in;             /* (max_tokens, E) from the previous stage */
    /* If the first stage has rows of the head (stages.h): */
    bool shares_head;
    struct range head;    /* this rank's rows */
    float *outs, *theirs; /* on rank 0: (max_out, E) the stream, (max_out, rest of width) logits */
    int32_t *each;        /* (max_out) 0, 1, ... */
    struct lora_use *loras;
};

static void step_init(const struct pipeline *p, struct pipeline_step *f, size_t tokens, size_t outs)
{
    const struct network *net = &p->m->net;
    size_t embd = (size_t)net->n_embd;
    f->parts = mem_zalloc((size_t)p->most, sizeof *f->parts);
    for (int i = 0; i < p->most; i++)
        batch_part_init(&f->parts[i].part, p->max_seqs);
    f->tokens = mem_zalloc(tokens, sizeof(int32_t));
    f->out_rows = mem_zalloc(outs, sizeof(int32_t));
    if (net->has_next_stage)
        f->rows = mem_zalloc(tokens * embd, sizeof(float));
    else
        f->logits = mem_zalloc(outs * (size_t)model_row_width(p->m), sizeof(float));
    if (!net->has_next_stage && p->shares_head)
        f->outs = mem_zalloc(outs * embd, sizeof(float));
}

/* Buffers of rank 0's part of the head. */
static void head_init(struct pipeline *p, size_t outs)
{
    const struct network *net = &p->m->net;
    size_t seqs = (size_t)p->max_seqs + 1, rest = (size_t)(net->n_vocab - p->head.n);
    p->outs = mem_zalloc(outs * (size_t)net->n_embd, sizeof(float));
    p->theirs = mem_zalloc(outs * rest, sizeof(float));
    p->each = mem_zalloc(outs, sizeof *p->each);
    for (size_t i = 0; i < outs; i++)
        p->each[i] = (int32_t)i;
    p->loras = mem_zalloc(seqs * LORA_MAX_USES, sizeof *p->loras);
}

struct pipeline *pipeline_new(struct model *m, struct ranks *r, const struct bounds *bounds)
{
    struct pipeline *p = mem_zalloc(1, sizeof *p);
    size_t width = (size_t)model_row_width(m), outs = (size_t)bounds->max_out;
    p->m = m;
    p->r = r;
    p->most = p->r->pp > PIPELINE_PARTS ? p->r->pp : PIPELINE_PARTS;
    p->max_seqs = bounds->max_seqs;
    p->overhead = p->r->comm.n_on_device > 0 ? 0 : PIPELINE_PART_OVERHEAD;
    p->all_embed = m->net.embed.layers.width > 0;
    p->head = stages_head(p->r, m->net.n_vocab);
    p->shares_head =
        m->net.head.w && p->head.n && m->net.head.w->n_out == p->head.n && p->r->tp == 1;
    p->whole = parts_whole_seqs(&m->net);
    for (int f = 0; f < IN_FLIGHT; f++)
        step_init(p, &p->steps[f], (size_t)bounds->max_tokens, outs);
    if (p->r->rank == 0)
        p->logits = mem_zalloc(outs * width, sizeof(float));
    if (p->r->rank == 0 && p->shares_head)
        head_init(p, outs);
    if (m->net.has_prev_stage)
        p->in = mem_zalloc((size_t)bounds->max_tokens * (size_t)m->net.n_embd, sizeof(float));
    return p;
}

static void free_all(void *const *owned, size_t n)
{
    for (size_t i = 0; i < n; i++)
        mem_free(owned[i]);
}

/* Waits until a step's messages are sent, so that its buffers can be reused. */
static void wait_sent(struct pipeline *p, struct pipeline_step *f)
{
    for (int i = 0; i < p->most; i++) {
        ranks_wait_end(p->r, &f->parts[i].sent);
        ranks_wait_end(p->r, &f->parts[i].shared);
        ranks_wait_end(p->r, &f->parts[i].logits);
    }
}

void pipeline_free(struct pipeline *p)
{
    if (!p)
        return;
    for (int i = 0; i < IN_FLIGHT; i++) {
        struct pipeline_step *f = &p->steps[i];
        wait_sent(p, f);
        for (int k = 0; k < p->most; k++)
            batch_part_clear(&f->parts[k].part);
        free_all((void *[]){f->parts, f->tokens, f->out_rows, f->rows, f->outs, f->logits}, 6);
    }
    free_all((void *[]){p->logits, p->in, p->outs, p->theirs, p->each, p->loras, p}, 7);
}

/* Rows [first, last) of b. */
static void take_rows(const struct batch *b, int first, int last, const struct pipeline_step *f,
                      struct micro_batch *t)
{
    batch_part_take(&t->part, b, first, last, f->out_rows);
    t->source = t->part.b.tokens;
    t->part.b.tokens = f->tokens + first;
}

static struct pipeline_step *latest(struct pipeline *p)
{
    return &p->steps[(p->begun - 1) % IN_FLIGHT];
}

int pipeline_parts(int pp, int overhead, double rows, double seqs, double outs)
{
    /* One part per stage for three kinds of step. Decodes circulate through the stages. A prompt chunk that needs no
     * logits is followed by the next chunk without a gap. Where every row needs logits, the head dominates. */
    if (rows <= seqs || outs == 0 || outs >= rows || !overhead || pp == 1)
        return (int)fmin(pp, fmax(seqs, floor(rows / PARTS_ROWS)));
    int most = pp > PIPELINE_PARTS ? pp : PIPELINE_PARTS, best = 1;
    /* n parts take the time of pp + n - 1 parts in one stage. */
    for (int n = 1; n <= most && n * PARTS_ROWS <= rows; n++)
        if ((pp + n - 1) * (rows / n + overhead) < (pp + best - 1) * (rows / best + overhead))
            best = n;
    return (int)fmax(best, fmin(pp, seqs));
}

int pipeline_begin(struct pipeline *p, const struct batch *b)
{
    CHECK(p->begun - p->ended < IN_FLIGHT, "%d steps are in flight", IN_FLIGHT);
    p->begun++;
    struct pipeline_step *f = latest(p);
    f->n_parts = f->n_taken = 0;
    f->late = false;
    for (int i = 0; i < b->n_tokens; i++)
        f->late |= b->tokens[i] < 0;
    wait_sent(p, f);
    int most =
        b->keep ? 1 : pipeline_parts(p->r->pp, p->overhead, b->n_tokens, b->n_seqs, b->n_out);
    for (int i = 1, first = 0; i <= most; i++) {
        int at = (int)((int64_t)b->n_tokens * i / most);
        int last = i == most ? b->n_tokens : parts_cut(b, p->whole, at, first);
        if (last <= first)
            continue;
        take_rows(b, first, last, f, &f->parts[f->n_parts++]);
        first = last;
    }
    return f->n_parts;
}

struct range pipeline_rows(const struct pipeline *p, int i)
{
    const struct micro_batch *t = &p->steps[(p->begun - 1) % IN_FLIGHT].parts[i];
    return (struct range){t->part.row, t->part.b.n_tokens};
}

/* A failed op ends the job, since the other stages would wait forever for its rows. */
static void end_ops(struct pipeline *p)
{
    struct error err = {0};
    if (!p->m->be->ops->end(p->m->be, NULL, &err))
        ranks_fail(p->r, err.msg);
}

/* The last stage sends the output rows, for rank 0's shard of the head. */
static void share_outs(struct pipeline *p, const struct pipeline_step *f, struct micro_batch *t)
{
    struct backend *be = p->m->be;
    size_t embd = (size_t)p->m->net.n_embd;
    float *rows = f->outs + (size_t)t->part.out * embd;
    be->ops->stream->get(be, rows, t->part.b.n_out);
    t->shared = ranks_send_begin(p->r, rows, (size_t)t->part.b.n_out * embd * sizeof(float), 0);
}

/* The last stage sends its logits to rank 0, which samples. */
static void send_logits(struct pipeline *p, const struct pipeline_step *f, struct micro_batch *t)
{
    struct backend *be = p->m->be;
    size_t width = (size_t)(p->shares_head ? p->head.n : model_row_width(p->m));
    if (p->r->tp_rank > 0 || t->part.b.n_out == 0)
        return;
    float *rows = f->logits + (size_t)t->part.out * width;
    for (int i = 0; i < t->part.b.n_out; i++)
        be->ops->logits(be, i, rows + (size_t)i * width);
    t->logits = ranks_send_begin(p->r, rows, (size_t)t->part.b.n_out * width * sizeof(float), 0);
}

/* The output rows of a part as a batch of their own, for the head alone. */
static struct batch outs_of(const struct pipeline *p, const struct micro_batch *t)
{
    struct batch b = t->part.b;
    b.n_tokens = b.n_out;
    b.out_rows = p->each;
    b.loras = p->loras;
    b.n_loras = 0;
    for (int i = 0; i < t->part.b.n_loras; i++) {
        struct lora_use u = t->part.b.loras[i];
        int first = 0, last;
        while (first < b.n_out && t->part.b.out_rows[first] < u.first)
            first++;
        for (last = first; last < b.n_out && t->part.b.out_rows[last] < u.first + u.n; last++)
            continue;
        if (first < last)
            p->loras[b.n_loras++] = (struct lora_use){u.adapter, first, last - first, u.scale};
    }
    return b;
}

/* On rank 0: to (n_out, n_vocab) = a part's logits, joined from this rank's shard of the head and the last stage's. */
static void take_shared(struct pipeline *p, const struct micro_batch *t, float *to)
{
    struct backend *be = p->m->be;
    const struct backend_ops *op = be->ops;
    struct profile *profile = be->profile;
    int last = p->r->size - 1, n = t->part.b.n_out;
    size_t width = (size_t)p->m->net.n_vocab, mine = (size_t)p->head.n, rest = width - mine;
    ranks_recv(p->r, p->outs, (size_t)n * (size_t)p->m->net.n_embd * sizeof(float), last);
    struct batch b = outs_of(p, t);
    be->profile = NULL; /* not counted as a step */
    op->begin(be, &b);
    be->profile = profile;
    op->stream->put(be, p->outs, n);
    op->head(be, &p->m->net.head);
    op->launch(be);
    end_ops(p);
    for (int i = 0; i < n; i++)
        op->logits(be, i, to + (size_t)i * width);
    ranks_recv(p->r, p->theirs, (size_t)n * rest * sizeof(float), last);
    for (int i = 0; i < n; i++)
        memcpy(to + (size_t)i * width + mine, p->theirs + (size_t)i * rest, rest * sizeof(float));
}

void pipeline_part(struct pipeline *p, int i)
{
    struct backend *be = p->m->be;
    const struct network *net = &p->m->net;
    const struct backend_ops *op = be->ops;
    struct pipeline_step *f = latest(p);
    struct micro_batch *t = &f->parts[i];
    size_t bytes = (size_t)t->part.b.n_tokens * (size_t)net->n_embd * sizeof(float);
    int32_t *tokens = f->tokens + t->part.row;
    float *rows = net->has_next_stage ? f->rows + (size_t)t->part.row * (size_t)net->n_embd : NULL;
    memcpy(tokens, t->source, (size_t)t->part.b.n_tokens * sizeof *tokens);
    /* If the first stage has one rank, only rank 0 reads tokens. */
    if (f->late && (p->r->tp > 1 || p->all_embed))
        ranks_broadcast(p->r, tokens, (size_t)t->part.b.n_tokens * sizeof *tokens, false);
    op->begin(be, &t->part.b);
    if (!net->has_prev_stage || net->embed.layers.width)
        op->embed(be, &net->embed);
    if (net->has_prev_stage) {
        ranks_recv(p->r, p->in, bytes, p->r->rank - p->r->tp);
        op->stream->put(be, p->in, t->part.b.n_tokens);
    }
    forward_layers(p->m);
    if (t->part.b.keep && !net->has_next_stage)
        op->draft->keep(be, &net->head.norm);
    if (!net->has_next_stage && p->shares_head && t->part.b.n_out)
        share_outs(p, f, t);
    if (!net->has_next_stage)
        op->head(be, &net->head);
    op->launch(be);
    if (net->has_next_stage) {
        op->stream->get(be, rows, t->part.b.n_tokens);
        t->sent = ranks_send_begin(p->r, rows, bytes, p->r->rank + p->r->tp);
    }
    end_ops(p);
    if (!net->has_next_stage)
        send_logits(p, f, t);
}

void pipeline_draft(struct pipeline *p, const struct batch *b)
{
    struct backend *be = p->m->be;
    size_t width = (size_t)model_row_width(p->m), bytes = (size_t)b->n_out * width * sizeof(float);
    CHECK(p->begun == p->ended, "a step is in flight");
    float *logits = p->steps[0].logits;
    if (!p->m->net.has_next_stage) {
        forward(p->m, b, 0);
        end_ops(p);
        for (int i = 0; p->r->tp_rank == 0 && i < b->n_out; i++)
            be->ops->logits(be, i, logits + (size_t)i * width);
        if (p->r->tp_rank == 0 && b->n_out)
            ranks_send(p->r, logits, bytes, 0);
    } else if (p->r->rank == 0 && b->n_out) {
        ranks_recv(p->r, p->logits, bytes, p->r->size - p->r->tp);
    }
}

struct range pipeline_take(struct pipeline *p)
{
    struct pipeline_step *f = &p->steps[p->ended % IN_FLIGHT];
    size_t width = (size_t)model_row_width(p->m);
    CHECK(p->ended < p->begun, "no step is in flight");
    while (f->n_taken < f->n_parts) {
        const struct micro_batch *t = &f->parts[f->n_taken++];
        if (t->part.b.n_out == 0)
            continue;
        float *to = p->logits + (size_t)t->part.out * width;
        if (p->shares_head)
            take_shared(p, t, to);
        else
            ranks_recv(p->r, to, (size_t)t->part.b.n_out * width * sizeof(float),
                       p->r->size - p->r->tp);
        return (struct range){t->part.out, t->part.b.n_out};
    }
    return (struct range){0};
}

float *pipeline_logits(const struct pipeline *p, int row)
{
    return p->logits + (size_t)row * (size_t)model_row_width(p->m);
}

void pipeline_end(struct pipeline *p)
{
    p->ended++;
}
