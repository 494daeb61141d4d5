/* Steps through the stages of a pipeline: see pipeline.h. Owns the buffers between them. */
#include "model/pipeline.h"
#include "base/mem.h"
#include "base/ranks.h"

#include <string.h>

/* A part of a step: its rows [row, row + b.n_tokens), and its arrays. */
struct micro {
    struct batch b;
    int row, out; /* the first of each */
    int32_t *q_start, *kv_len, *out_rows, *pages;
    int32_t *states; /* (4, max_seqs) */
    float *rows;     /* (max_tokens, E) of the stream */
    struct ranks_wait *sent;
};

struct pipeline {
    struct model *m;
    struct ranks *r;
    int max_seqs;
    struct micro part[PIPELINE_PARTS];
    float *logits; /* (max_out, n_vocab) */
};

struct pipeline *pipeline_new(struct model *m, int max_tokens, int max_seqs, int max_out)
{
    struct pipeline *p = mem_zalloc(1, sizeof *p);
    size_t tokens = (size_t)max_tokens, seqs = (size_t)max_seqs + 1;
    p->m = m;
    p->r = m->be->ranks;
    p->max_seqs = max_seqs;
    for (int i = 0; i < PIPELINE_PARTS; i++) {
        struct micro *t = &p->part[i];
        t->q_start = mem_zalloc(seqs, sizeof(int32_t));
        t->kv_len = mem_zalloc(seqs, sizeof(int32_t));
        t->out_rows = mem_zalloc((size_t)max_out, sizeof(int32_t));
        t->states = mem_zalloc(4 * seqs, sizeof(int32_t));
        t->rows = mem_zalloc(tokens * (size_t)m->net.n_embd, sizeof(float));
    }
    p->logits = mem_zalloc((size_t)max_out * (size_t)model_row_width(m), sizeof(float));
    return p;
}

void pipeline_free(struct pipeline *p)
{
    if (!p)
        return;
    for (int i = 0; i < PIPELINE_PARTS; i++) {
        struct micro *t = &p->part[i];
        void *owned[] = {t->q_start, t->kv_len, t->out_rows, t->states, t->rows};
        for (size_t k = 0; k < sizeof owned / sizeof *owned; k++)
            mem_free(owned[k]);
    }
    mem_free(p->logits);
    mem_free(p);
}

/* Where to cut: between sequences if there are several, else in the middle of a long prompt. */
static int middle(const struct batch *b)
{
    int half = b->n_tokens / 2;
    for (int i = 1; i < b->n_seqs; i++)
        if (b->q_start[i] >= half)
            return b->q_start[i];
    return b->n_seqs > 1 ? b->q_start[b->n_seqs - 1] : b->n_tokens >= PIPELINE_PART_ROWS ? half : 0;
}

/* Rows [first, last) of b. A sequence that is cut goes on from where its first part leaves it. */
static void take_part(const struct pipeline *p, const struct batch *b, int first, int last,
                      struct micro *t)
{
    size_t n = (size_t)p->max_seqs;
    int32_t *states[4] = {t->states, t->states + n, t->states + 2 * n, t->states + 3 * n};
    t->b = *b;
    t->row = first;
    t->b.tokens += first;
    t->b.pos += first;
    t->b.slot += first;
    t->b.types += b->types ? first : 0;
    t->b.n_tokens = last - first;
    t->b.n_seqs = t->b.n_decode = t->b.n_out = 0;
    t->b.q_start = t->q_start;
    t->b.kv_len = t->kv_len;
    t->b.out_rows = t->out_rows;
    t->b.n_loras = 0;
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
    t->out = -1;
    for (int i = 0; i < b->n_out; i++)
        if (b->out_rows[i] >= first && b->out_rows[i] < last) {
            t->out = t->out < 0 ? i : t->out;
            t->out_rows[t->b.n_out++] = b->out_rows[i] - first;
        }
    if (b->state_in) {
        t->b.state_in = states[0];
        t->b.state_out = states[1];
        t->b.save_rows = states[2];
        t->b.save_state = states[3];
    }
}

/* This stage's layers over one part. */
static void run_part(struct pipeline *p, struct micro *t)
{
    struct backend *be = p->m->be;
    const struct network *net = &p->m->net;
    const struct backend_ops *op = be->ops;
    size_t bytes = (size_t)t->b.n_tokens * (size_t)net->n_embd * sizeof(float);
    op->begin(be, &t->b);
    if (!net->comes_in || net->embed.layers.width)
        op->embed(be, &net->embed);
    if (net->comes_in) {
        ranks_recv(p->r, t->rows, bytes, p->r->rank - p->r->tp);
        op->stream_put(be, t->rows, t->b.n_tokens);
    }
    forward_layers(p->m);
    if (!net->goes_on)
        op->head(be, &net->head);
    op->launch(be);
    if (net->goes_on) {
        op->stream_get(be, t->rows, t->b.n_tokens);
        t->sent = ranks_send_begin(p->r, t->rows, bytes, p->r->rank + p->r->tp);
    }
}

/* The last stage has computed the logits, rank 0 chooses by them. */
static void give_logits(struct pipeline *p, struct micro *t)
{
    struct backend *be = p->m->be;
    size_t width = (size_t)model_row_width(p->m);
    be->ops->end(be, NULL, &p->r->failure);
    if (p->r->lane > 0 || t->b.n_out == 0)
        return;
    float *rows = p->logits + (size_t)t->out * width;
    for (int i = 0; i < t->b.n_out; i++)
        be->ops->logits(be, i, rows + (size_t)i * width);
    t->sent = ranks_send_begin(p->r, rows, (size_t)t->b.n_out * width * sizeof(float), 0);
}

/* The step as a whole: what is chosen is chosen of all its rows. */
static void take_logits(struct pipeline *p, const struct batch *b, int n)
{
    struct backend *be = p->m->be;
    size_t width = (size_t)model_row_width(p->m);
    be->ops->end(be, NULL, &p->r->failure);
    be->ops->begin(be, b);
    for (int i = 0; i < n; i++) {
        const struct micro *t = &p->part[i];
        if (t->b.n_out)
            ranks_recv(p->r, p->logits + (size_t)t->out * width,
                       (size_t)t->b.n_out * width * sizeof(float), p->r->size - p->r->tp);
    }
    be->ops->logits_put(be, p->logits, b->n_out);
    be->ops->launch(be);
}

void pipeline_forward(struct pipeline *p, const struct batch *b)
{
    struct backend *be = p->m->be;
    const struct network *net = &p->m->net;
    int cut = middle(b), n = cut > 0 && cut < b->n_tokens ? 2 : 1;
    for (int i = 0; i < n; i++) {
        struct micro *t = &p->part[i];
        take_part(p, b, i ? cut : 0, i == n - 1 ? b->n_tokens : cut, t);
        run_part(p, t);
        if (!net->goes_on)
            give_logits(p, t);
        else if (p->r->rank > 0 || i < n - 1)
            be->ops->end(be, NULL, &p->r->failure);
    }
    if (p->r->rank == 0)
        take_logits(p, b, n);
    for (int i = 0; i < n; i++)
        ranks_wait_end(p->r, &p->part[i].sent);
}
