/* Gemma 3n's parts on the Vulkan backend: streams of several parts, low-rank residuals, embeddings per layer. */
#include "backend/vulkan/vulkan.h"

#include <math.h>

/* w's matrix e as a weight of its own. m: receives what it points to. */
static struct weight matrix_of(const struct weight *w, int e, struct vulkan_weight *m)
{
    struct weight one = *w;
    *m = *vulkan_matrix(w);
    for (int i = 0; i < m->n_seg; i++) {
        struct vulkan_segment *g = &m->seg[i];
        g->at += 4 * (uint64_t)e * g->rows * g->row_words;
        g->perm += g->perm ? 4 * (uint64_t)e * (uint64_t)w->n_in : 0;
    }
    m->bias += m->bias ? 4 * (uint64_t)e * (uint64_t)w->n_out : 0;
    one.n_expert = 1;
    one.impl = m;
    return one;
}

static void product(struct vulkan *v, const struct weight *w, int e, uint64_t x, uint32_t ldx,
                    uint64_t y, uint32_t ldy)
{
    struct vulkan_weight m;
    const struct weight one = matrix_of(w, e, &m);
    vulkan_product(v, &(struct product){.w = &one,
                                        .x = x,
                                        .y = y,
                                        .ldx = ldx,
                                        .ldy = ldy,
                                        .rows = (uint32_t)v->rows,
                                        .x_div = 1});
}

uint64_t vulkan_part(const struct vulkan *v, int j)
{
    return v->s.streams + 4 * (uint64_t)j * (uint64_t)v->bounds.max_tokens * v->s.ld_x;
}

/* x = scale * x + y */
static void add(struct vulkan *v, uint64_t x, uint64_t y, float scale)
{
    vulkan_scale(v, &(struct scale_args){.x = x,
                                         .y = y,
                                         .width = (uint)v->net->n_embd,
                                         .rows = (uint)v->rows,
                                         .ldx = v->s.ld_x,
                                         .ldy = v->s.ld_x,
                                         .scale = scale});
}

static void level(struct vulkan *v, uint64_t x, uint64_t y, uint64_t sum)
{
    const struct level_args args = {x, y, sum, (uint)v->net->n_embd, (uint)v->rows, v->s.ld_x};
    vulkan_run_flat(v, KERNEL_LEVEL, 0, 0, &args, sizeof args, args.rows);
}

void vulkan_streams_begin(struct vulkan *v)
{
    const struct streams *n = &v->net->streams;
    for (int j = 1; j < n->n; j++) {
        product(v, n->project, j - 1, v->s.x, v->s.ld_x, vulkan_part(v, j), v->s.ld_x);
        level(v, v->s.x, vulkan_part(v, j), 0);
    }
}

void vulkan_streams_end(struct vulkan *v)
{
    const struct streams *n = &v->net->streams;
    const struct vulkan_scratch *s = &v->s;
    vulkan_settle(v);
    vulkan_norm(v, &(struct norm){0}, s->x, s->ld_x, s->sum, s->ld_x, v->net->n_embd, v->rows);
    for (int j = 1; j < n->n; j++) {
        product(v, n->unproject, j - 1, vulkan_part(v, j), s->ld_x, s->y, s->ld_x);
        level(v, s->x, s->y, s->sum);
    }
    add(v, s->sum, 0, 1.0f / (float)n->n);
    vulkan_norm(v, &(struct norm){0}, s->sum, s->ld_x, s->x, s->ld_x, v->net->n_embd, v->rows);
}

/* Predicts the parts from those before the layer, or corrects them by what the layer made of the first. */
static void altup(struct vulkan *v, const struct altup *a, bool correct)
{
    const struct streams_args args = {v->s.x,
                                      v->s.streams,
                                      vulkan_address(a->norm.gain),
                                      vulkan_address(a->norm.bias),
                                      vulkan_address(a->router),
                                      vulkan_address(correct ? a->correct : a->predict),
                                      (uint64_t)v->bounds.max_tokens * v->s.ld_x,
                                      (uint)v->net->n_embd,
                                      (uint)v->rows,
                                      v->s.ld_x,
                                      (uint)v->net->streams.n,
                                      (uint)a->norm.kind,
                                      correct,
                                      a->norm.eps};
    vulkan_run_flat(v, KERNEL_STREAMS, 0, 0, &args, sizeof args, args.rows);
}

void vulkan_streams_predict(struct vulkan *v, int layer)
{
    const struct altup *a = &v->net->layers[layer].altup;
    if (!a->router)
        return;
    vulkan_settle(v);
    altup(v, a, false);
}

void vulkan_laurel_begin(struct vulkan *v, const struct mixer *m)
{
    const struct vulkan_scratch *s = &v->s;
    const struct laurel *l = &m->laurel;
    if (!l->left)
        return;
    vulkan_norm(v, &m->block.in, s->x, s->ld_x, s->n, s->ld_x, v->net->n_embd, v->rows);
    product(v, l->left, 0, s->n, s->ld_x, s->hidden, s->ld_hidden);
    product(v, l->right, 0, s->hidden, s->ld_hidden, s->laurel, s->ld_x);
    vulkan_norm(v, &l->norm, s->laurel, s->ld_x, s->laurel, s->ld_x, v->net->n_embd, v->rows);
    add(v, s->laurel, s->n, 1);
}

void vulkan_laurel_end(struct vulkan *v, const struct mixer *m)
{
    if (!m->laurel.left)
        return;
    vulkan_settle(v);
    add(v, v->s.x, v->s.laurel, 1);
    add(v, v->s.x, 0, sqrtf(0.5f));
}

void vulkan_layer_embeds(struct vulkan *v, const struct embed_layers *e)
{
    int n = v->net->n_layers * e->width;
    uint64_t to = v->s.layer_embeds;
    struct scale_args scale = {.x = to,
                               .width = (uint)n,
                               .rows = (uint)v->rows,
                               .ldx = (uint)n,
                               .scale = e->project_scale};
    if (!e->width)
        return;
    product(v, e->project, 0, v->s.x, v->s.ld_x, to, (uint32_t)n);
    vulkan_scale(v, &scale);
    vulkan_norm(v, &e->norm, to, (uint32_t)e->width, to, (uint32_t)e->width, e->width,
                v->rows * v->net->n_layers);
    vulkan_lookup_layers(v, e, to, (uint32_t)n);
    scale.scale = e->scale;
    vulkan_scale(v, &scale);
}

/* x or the stream's other parts += norm((act(x Wg^T) * e) Wp^T) */
static void add_layer_embed(struct vulkan *v, const struct layer_embed *l, int layer,
                            const struct altup *a)
{
    const struct vulkan_scratch *s = &v->s;
    int P = l->gate->n_out, all = v->net->n_layers * P;
    uint64_t x = s->x;
    bool gather = v->narrow && v->batch.n_out != v->batch.n_tokens;
    if (a->router && a->scale) {
        const struct norm scaled = {.kind = NORM_AFFINE, .gain = a->scale};
        vulkan_norm(v, &scaled, s->x, s->ld_x, s->n, s->ld_x, v->net->n_embd, v->rows);
        x = s->n;
    }
    product(v, l->gate, 0, x, s->ld_x, s->hidden, s->ld_hidden);
    const struct gather_args own = {s->layer_embeds + 4 * (uint64_t)layer * (uint64_t)P,
                                    s->hidden + 4 * (uint64_t)P,
                                    s->step,
                                    (uint)P,
                                    (uint)v->rows,
                                    (uint)all,
                                    s->ld_hidden,
                                    gather ? STEP_OUT_ROWS : 0};
    vulkan_run(v, KERNEL_GATHER, 0, 0, &own, sizeof own, vulkan_wide(P), own.rows, 1);
    vulkan_activate(v, &(struct ffn){.act = l->act}, s->hidden, s->ld_hidden, P, v->rows);
    product(v, l->project, 0, s->hidden, s->ld_hidden, s->y, s->ld_x);
    vulkan_norm(v, &l->norm, s->y, s->ld_x, s->y, s->ld_x, v->net->n_embd, v->rows);
    if (!a->router)
        add(v, s->x, s->y, 1);
    for (int j = 1; a->router && j < v->net->streams.n; j++)
        add(v, vulkan_part(v, j), s->y, 1);
}

void vulkan_streams_correct(struct vulkan *v, const struct mlp *m, int layer)
{
    const struct altup *a = &v->net->layers[layer].altup;
    if (!a->router && !m->embed.gate)
        return;
    vulkan_settle(v);
    if (a->router)
        altup(v, a, true);
    if (m->embed.gate)
        add_layer_embed(v, &m->embed, layer, a);
}

void vulkan_keep_top(struct vulkan *v, const struct ffn *f, uint64_t g, uint32_t ld, int rows)
{
    const struct top_args args = {g, (uint)f->down->n_in, (uint)rows, ld, f->sparsity};
    if (f->sparse)
        vulkan_run_flat(v, KERNEL_TOP, 0, 0, &args, sizeof args, args.rows);
}
