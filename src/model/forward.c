/*
 * THE forward pass: Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE; prefill, decode and every mix of them.
 * Families differ by data (a bias present, a q_norm absent, a router present). Rows that need no
 * logits stop after the last layer's keys and values are stored.
 */
#include "backend/profile.h"
#include "model/model.h"

static void linear(struct backend *be, enum stage stage, const struct weight *w, const float *x,
                   float *y, int rows)
{
    if (be->profile)
        be->profile->linear_stage = stage;
    be->ops->linear(be, w, x, y, rows);
}

static void run_ops(struct model *m, const struct batch *b, const struct kv_layer *kv,
                    struct scratch *s)
{
    struct backend *be = m->be;
    const struct backend_ops *op = be->ops;
    const struct config *c = &m->config;
    float *x = s->x, *a = s->a, *d = NULL; /* d: what the last block adds to the residual x */
    int rows = b->n_tokens;

    op->embed(be, &m->emb, x);
    for (int i = 0; i < c->n_layers; i++) {
        const struct layer *l = &m->layers[i];
        const struct attn_layer attn = {&l->wqkv, l->q_norm, l->k_norm, kv[i], l->window};
        op->add_norm(be, x, d, l->attn_norm, s->n, rows);
        op->attn_in(be, &attn, s->n, s->q);
        op->attention(be, &attn, s->q, s->a);
        if (i == c->n_layers - 1) {
            op->gather(be, s->x, s->xo, c->n_embd);
            op->gather(be, s->a, s->ao, c->n_heads * c->head_dim);
            x = s->xo;
            a = s->ao;
            rows = b->n_out;
        }
        d = s->d;
        linear(be, STAGE_OUTPUT, &l->wo, a, d, rows);
        op->add_norm(be, x, d, l->ffn_norm, s->n, rows);
        if (l->router.n_out)
            op->moe(be, &(struct moe_layer){&l->router, &l->gate_up, &l->down}, s->n, d, rows);
        else
            op->ffn(be, &l->gate_up, &l->down, s->n, d, rows);
    }
    op->add_norm(be, x, d, m->norm, s->n, rows);
    linear(be, STAGE_HEAD, c->tied ? &m->emb : &m->head, s->n, s->logits, rows);
    op->sample(be, s->logits);
}

void forward(struct model *m, const struct batch *b, const struct kv_layer *kv, struct scratch *s,
             uint64_t key)
{
    const struct backend_ops *op = m->be->ops;
    op->begin(m->be, b);
    if (!key || !op->replay(m->be, key)) {
        if (key)
            op->record(m->be, key);
        run_ops(m, b, kv, s);
    }
    op->launch(m->be);
}
