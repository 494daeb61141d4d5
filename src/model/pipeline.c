/* Steps through the stages of a pipeline: see pipeline.h. Owns the buffers between them. */
#include "model/pipeline.h"
#include "backend/lora.h"
#include "base/mem.h"

#include <string.h>

enum { FLIGHTS = 2 }; /* steps under way */

/* A part of a step: its rows [row, row + b.n_tokens), and its arrays. */
struct micro {
    struct batch b;
    int row, out;        /* the first of each */
    const int32_t *told; /* its tokens where the step has them: they may come later */
    int32_t *tokens, *q_start, *kv_len, *out_rows;
    int32_t *states; /* (4, max_seqs) */
    struct lora_use *loras;
    float *rows; /* (max_tokens, E) of the stream, on its way out */
    struct ranks_wait *sent, *given;
};

struct flight {
    struct micro *parts; /* (most) */
    int n_parts, n_taken;
    bool late; /* tokens of it were not known when it began */
};

struct pipeline {
    struct model *m;
    struct ranks *r;
    int most; /* parts of a step: so many that every stage has one */
    int max_seqs;
    bool whole;     /* sequences are not cut: a row sees those behind it */
    bool all_embed; /* stages behind the first need tokens, too */
    struct flight flights[FLIGHTS];
    uint64_t begun, ended; /* counts of steps */
    float *logits;         /* (max_out, width) of the step that is being taken */
    float *given;          /* (FLIGHTS, max_out, width) on the last stage, until they are sent */
    float *in;             /* (max_tokens, E) from the stage in front */
    size_t max_out;
};

static void micro_init(const struct pipeline *p, struct micro *t, size_t tokens, size_t outs)
{
    size_t seqs = (size_t)p->max_seqs + 1;
    t->tokens = mem_zalloc(tokens, sizeof(int32_t));
    t->q_start = mem_zalloc(seqs, sizeof(int32_t));
    t->kv_len = mem_zalloc(seqs, sizeof(int32_t));
    t->out_rows = mem_zalloc(outs, sizeof(int32_t));
    t->states = mem_zalloc(4 * seqs, sizeof(int32_t));
    t->loras = mem_zalloc(seqs * LORA_MAX_USES, sizeof *t->loras);
    t->rows = mem_zalloc(tokens * (size_t)p->m->net.n_embd, sizeof(float));
}

struct pipeline *pipeline_new(struct model *m, int max_tokens, int max_seqs, int max_out)
{
    struct pipeline *p = mem_zalloc(1, sizeof *p);
    size_t width = (size_t)model_row_width(m), outs = (size_t)max_out;
    p->m = m;
    p->r = m->be->ranks;
    p->most = p->r->pp;
    p->max_seqs = max_seqs;
    p->max_out = outs;
    p->all_embed = m->net.embed.layers.width > 0;
    for (int i = 0; i < m->net.n_layers; i++) {
        const struct mixer *x = &m->net.layers[i].mixer;
        p->whole |= x->kind == MIXER_ATTENTION && x->attention.bidirectional;
    }
    for (int f = 0; f < FLIGHTS; f++) {
        p->flights[f].parts = mem_zalloc((size_t)p->most, sizeof *p->flights[f].parts);
        for (int i = 0; i < p->most; i++)
            micro_init(p, &p->flights[f].parts[i], (size_t)max_tokens, outs);
    }
    if (p->r->rank == 0)
        p->logits = mem_zalloc(outs * width, sizeof(float));
    if (!m->net.goes_on)
        p->given = mem_zalloc(FLIGHTS * outs * width, sizeof(float));
    if (m->net.comes_in)
        p->in = mem_zalloc((size_t)max_tokens * (size_t)m->net.n_embd, sizeof(float));
    return p;
}

void pipeline_free(struct pipeline *p)
{
    if (!p)
        return;
    for (int f = 0; f < FLIGHTS; f++) {
        for (int i = 0; i < p->most; i++) {
            struct micro *t = &p->flights[f].parts[i];
            void *owned[] = {t->tokens, t->q_start, t->kv_len, t->out_rows,
                             t->states, t->loras,   t->rows};
            for (size_t k = 0; k < sizeof owned / sizeof *owned; k++)
                mem_free(owned[k]);
        }
        mem_free(p->flights[f].parts);
    }
    mem_free(p->logits);
    mem_free(p->given);
    mem_free(p->in);
    mem_free(p);
}

/* Where to cut near row `at`, behind row `after`: inside a long prompt, or else where a sequence ends. 0:
 * nowhere. */
static int cut_near(const struct pipeline *p, const struct batch *b, int at, int after)
{
    int i = 0;
    while (i < b->n_seqs - 1 && b->q_start[i + 1] <= at)
        i++;
    int first = b->q_start[i] > after ? b->q_start[i] : after, last = b->q_start[i + 1];
    if (!p->whole && at - first >= PIPELINE_PART_ROWS && last - at >= PIPELINE_PART_ROWS)
        return at;
    bool up = last < b->n_tokens && (first <= after || last - at < at - first);
    at = up ? last : first;
    return at > after && at < b->n_tokens ? at : 0;
}

/* Rows [first, last) of b. A sequence that is cut goes on from where its first part leaves it. */
static void take_rows(const struct pipeline *p, const struct batch *b, int first, int last,
                      struct micro *t)
{
    size_t n = (size_t)p->max_seqs;
    int32_t *states[4] = {t->states, t->states + n, t->states + 2 * n, t->states + 3 * n};
    t->b = *b;
    t->row = first;
    t->told = b->tokens + first;
    t->b.pos += first;
    t->b.slot += first;
    t->b.types += b->types ? first : 0;
    t->b.n_tokens = last - first;
    t->b.n_seqs = t->b.n_decode = t->b.n_out = t->b.n_loras = 0;
    t->b.tokens = t->tokens;
    t->b.q_start = t->q_start;
    t->b.kv_len = t->kv_len;
    t->b.out_rows = t->out_rows;
    t->b.loras = t->loras;
    t->q_start[0] = 0;
    for (int i = 0; i < b->n_seqs; i++) {
        int from = b->q_start[i] > first ? b->q_start[i] : first;
        int to = b->q_start[i + 1] < last ? b->q_start[i + 1] : last;
        if (from >= to)
            continue;
        int k = t->b.n_seqs++, before = from - b->q_start[i];
        if (k == 0)
            t->b.pages = b->pages + (size_t)i * (size_t)b->max_pages;
        t->q_start[k + 1] = to - first;
        t->kv_len[k] = b->kv_len[i] - (b->q_start[i + 1] - to);
        t->b.n_decode += to - from == 1;
        if (!b->state_in)
            continue;
        int save = b->save_rows[i] - before;
        bool saves = save > 0 && save <= to - from;
        states[0][k] = before ? b->state_out[i] : b->state_in[i];
        states[1][k] = b->state_out[i];
        states[2][k] = saves ? save : 0;
        states[3][k] = saves ? b->save_state[i] : -1;
    }
    for (int i = 0; i < b->n_loras; i++) {
        struct lora_use u = b->loras[i];
        int from = u.first > first ? u.first : first,
            to = u.first + u.n < last ? u.first + u.n : last;
        if (from < to)
            t->loras[t->b.n_loras++] =
                (struct lora_use){u.adapter, from - first, to - from, u.scale};
    }
    t->out = 0;
    for (int i = 0; i < b->n_out; i++)
        if (b->out_rows[i] >= first && b->out_rows[i] < last)
            t->out_rows[t->b.n_out++] = b->out_rows[i] - first;
        else
            t->out += b->out_rows[i] < first;
    if (b->state_in) {
        t->b.state_in = states[0];
        t->b.state_out = states[1];
        t->b.save_rows = states[2];
        t->b.save_state = states[3];
    }
}

static struct flight *latest(struct pipeline *p)
{
    return &p->flights[(p->begun - 1) % FLIGHTS];
}

int pipeline_begin(struct pipeline *p, const struct batch *b)
{
    CHECK(p->begun - p->ended < FLIGHTS, "%d steps are under way", FLIGHTS);
    p->begun++;
    struct flight *f = latest(p);
    f->n_parts = f->n_taken = 0;
    f->late = false;
    for (int i = 0; i < b->n_tokens; i++)
        f->late |= b->tokens[i] < 0;
    int most = b->keep ? 1 : p->most; /* what is kept is kept of all rows at once */
    for (int i = 1, first = 0; i <= most; i++) {
        int at = (int)((int64_t)b->n_tokens * i / most);
        int last = i == most ? b->n_tokens : cut_near(p, b, at, first);
        if (last <= first)
            continue;
        struct micro *t = &f->parts[f->n_parts++];
        ranks_wait_end(p->r, &t->sent);
        ranks_wait_end(p->r, &t->given);
        take_rows(p, b, first, last, t);
        first = last;
    }
    return f->n_parts;
}

struct run pipeline_rows(const struct pipeline *p, int i)
{
    const struct micro *t = &p->flights[(p->begun - 1) % FLIGHTS].parts[i];
    return (struct run){t->row, t->b.n_tokens};
}

/* The last stage has computed the logits, rank 0 chooses by them. */
static void give_logits(struct pipeline *p, struct micro *t)
{
    struct backend *be = p->m->be;
    size_t width = (size_t)model_row_width(p->m), at = (p->begun - 1) % FLIGHTS;
    if (p->r->lane > 0 || t->b.n_out == 0)
        return;
    float *rows = p->given + (at * p->max_out + (size_t)t->out) * width;
    for (int i = 0; i < t->b.n_out; i++)
        be->ops->logits(be, i, rows + (size_t)i * width);
    t->given = ranks_send_begin(p->r, rows, (size_t)t->b.n_out * width * sizeof(float), 0);
}

void pipeline_part(struct pipeline *p, int i)
{
    struct backend *be = p->m->be;
    const struct network *net = &p->m->net;
    const struct backend_ops *op = be->ops;
    struct flight *f = latest(p);
    struct micro *t = &f->parts[i];
    size_t bytes = (size_t)t->b.n_tokens * (size_t)net->n_embd * sizeof(float);
    memcpy(t->tokens, t->told, (size_t)t->b.n_tokens * sizeof *t->tokens);
    /* Only rank 0 reads tokens where one rank is the first stage. */
    if (f->late && (p->r->tp > 1 || p->all_embed))
        ranks_tell(p->r, t->tokens, (size_t)t->b.n_tokens * sizeof *t->tokens, false);
    op->begin(be, &t->b);
    if (!net->comes_in || net->embed.layers.width)
        op->embed(be, &net->embed);
    if (net->comes_in) {
        ranks_recv(p->r, p->in, bytes, p->r->rank - p->r->tp);
        op->stream_put(be, p->in, t->b.n_tokens);
    }
    forward_layers(p->m);
    if (t->b.keep && !net->goes_on)
        op->keep(be, &net->head.norm);
    if (!net->goes_on)
        op->head(be, &net->head);
    op->launch(be);
    if (net->goes_on) {
        op->stream_get(be, t->rows, t->b.n_tokens);
        t->sent = ranks_send_begin(p->r, t->rows, bytes, p->r->rank + p->r->tp);
    }
    op->end(be, NULL, &p->r->failure);
    if (!net->goes_on)
        give_logits(p, t);
}

void pipeline_guess(struct pipeline *p, const struct batch *b)
{
    struct backend *be = p->m->be;
    size_t width = (size_t)model_row_width(p->m), bytes = (size_t)b->n_out * width * sizeof(float);
    CHECK(p->begun == p->ended, "a step is under way");
    if (!p->m->net.goes_on) {
        forward_guess(p->m, b, 0);
        be->ops->end(be, NULL, &p->r->failure);
        for (int i = 0; p->r->lane == 0 && i < b->n_out; i++)
            be->ops->logits(be, i, p->given + (size_t)i * width);
        if (p->r->lane == 0 && b->n_out)
            ranks_send(p->r, p->given, bytes, 0);
    } else if (p->r->rank == 0 && b->n_out) {
        ranks_recv(p->r, p->logits, bytes, p->r->size - p->r->tp);
    }
}

struct run pipeline_take(struct pipeline *p)
{
    struct flight *f = &p->flights[p->ended % FLIGHTS];
    size_t width = (size_t)model_row_width(p->m);
    CHECK(p->ended < p->begun, "no step is under way");
    while (f->n_taken < f->n_parts) {
        const struct micro *t = &f->parts[f->n_taken++];
        if (t->b.n_out == 0)
            continue;
        ranks_recv(p->r, p->logits + (size_t)t->out * width,
                   (size_t)t->b.n_out * width * sizeof(float), p->r->size - p->r->tp);
        return (struct run){t->out, t->b.n_out};
    }
    return (struct run){0};
}

float *pipeline_logits(const struct pipeline *p, int row)
{
    return p->logits + (size_t)row * (size_t)model_row_width(p->m);
}

void pipeline_end(struct pipeline *p)
{
    p->ended++;
}
