/*
 * LoRA adapters on the Vulkan backend (backend/lora.h): y += s B (A x) after the products of the base weights. A table on
 * the device has the address of each adapter's change of each weight; the step block lists the adapters of its rows. So a
 * recorded step is replayed with other adapters.
 *
 *  1. Row a of the table is w->lora[a] of all weights, as of generation seen[a]. Only adapters of the step are looked up.
 *  2. A weight's rank never decreases. epoch counts its changes, and is part of a recording's shape.
 */
#include "backend/lora.h"
#include "backend/vulkan/vulkan.h"
#include "base/mem.h"

#include <string.h>

/* A change on the device: heads of all experts, then their matrices, as floats. */
struct change {
    void *memory;
    size_t bytes;
    int rank;
};

static size_t change_words(const struct lora *l)
{
    size_t n = (size_t)l->n_expert * LORA_WORDS;
    for (int e = 0; e < l->n_expert; e++) {
        const struct lora_matrix *m = &l->of[e];
        n += (size_t)m->rank * (size_t)l->n_in;
        for (int i = 0; i < m->n_parts; i++)
            n += (size_t)m->parts[i].n * (size_t)m->parts[i].rank;
    }
    return n;
}

static uint32_t put_floats(uint32_t *to, size_t *used, const float *from, size_t n)
{
    size_t at = *used;
    memcpy(to + at, from, n * sizeof *from);
    *used = at + n;
    return (uint32_t)at;
}

static void pack(const struct lora *l, uint32_t *to)
{
    size_t used = (size_t)l->n_expert * LORA_WORDS;
    for (int e = 0; e < l->n_expert; e++) {
        const struct lora_matrix *m = &l->of[e];
        uint32_t *head = to + (size_t)e * LORA_WORDS;
        if (!m->rank)
            continue;
        head[0] = (uint32_t)m->rank;
        head[1] = (uint32_t)m->n_parts;
        head[2] = put_floats(to, &used, m->a, (size_t)m->rank * (size_t)l->n_in);
        for (int i = 0; i < m->n_parts; i++) {
            const struct lora_part *p = &m->parts[i];
            uint32_t *part = head + 3 + 5 * i;
            part[0] = (uint32_t)p->first;
            part[1] = (uint32_t)p->n;
            part[2] = (uint32_t)p->at;
            part[3] = (uint32_t)p->rank;
            part[4] = put_floats(to, &used, p->b, (size_t)p->n * (size_t)p->rank);
        }
    }
}
_Static_assert(3 + 5 * LORA_MAX_PARTS <= LORA_WORDS, "the head of a change");

static void *adapt(struct backend *be, const struct weight *w, const struct lora *l,
                   struct error *err)
{
    struct vulkan *v = vulkan_self(be);
    size_t words = change_words(l);
    (void)w;
    if (words > UINT32_MAX) {
        error_set(err, "an adapter's change of %zu GiB is not supported on vulkan", words >> 28);
        return NULL;
    }
    struct change *c = mem_zalloc(1, sizeof *c);
    uint32_t *host = mem_zalloc(words, sizeof *host);
    c->bytes = words * sizeof *host;
    c->rank = lora_rank(l);
    c->memory = vulkan_alloc(be, c->bytes, "an adapter", err);
    pack(l, host);
    if (c->memory)
        vulkan_copy_in(be, c->memory, host, c->bytes);
    mem_free(host);
    if (!c->memory) {
        mem_free(c);
        return NULL;
    }
    __atomic_add_fetch(&v->loras.generation, 1, __ATOMIC_ACQ_REL);
    return c;
}

static void unadapt(struct backend *be, void *change)
{
    struct change *c = change;
    vulkan_free(be, c->memory, c->bytes); /* waits for steps that may still read it */
    mem_free(c);
    __atomic_add_fetch(&vulkan_self(be)->loras.generation, 1, __ATOMIC_ACQ_REL);
}

const struct adapter_ops vulkan_adapters = {.adapt = adapt, .unadapt = unadapt};

static void add_weight(struct vulkan_loras *a, const struct weight *w)
{
    if (!w || !w->lora)
        return;
    if (a->weights) {
        a->weights[a->n_weights].w = w;
        ((struct vulkan_weight *)w->impl)->lora = a->n_weights + 1;
    }
    a->n_weights++;
}

/* Every weight of the network that adapters may change. Without a->weights they are only counted. */
static void add_weights(struct vulkan_loras *a, const struct network *net)
{
    a->n_weights = 0;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *x = &net->layers[i].mixer;
        const struct mlp *m = &net->layers[i].mlp;
        const struct weight *lists[][4] = {
            [MIXER_ATTENTION] = {x->attention.wqkv, x->attention.wo},
            [MIXER_LATENT] = {x->latent.wqa, x->latent.wqb, x->latent.wkva, x->latent.wo},
            [MIXER_DELTA_NET] = {x->delta_net.wqkv, x->delta_net.wz, x->delta_net.wba,
                                 x->delta_net.wo},
            [MIXER_SSM] = {x->ssm.w_in, x->ssm.w_out},
            [MIXER_SHORT_CONV] = {x->short_conv.w_in, x->short_conv.w_out}};
        bool known = x->kind >= 0 && (size_t)x->kind < sizeof lists / sizeof *lists;
        for (int k = 0; known && k < 4; k++)
            add_weight(a, lists[x->kind][k]);
        const struct weight *mlp[] = {m->dense.gate_up, m->dense.down, m->dense_gate};
        for (int k = 0; k < 3; k++)
            add_weight(a, mlp[k]);
        if (!m->router.w)
            continue;
        add_weight(a, m->router.w);
        add_weight(a, m->experts.gate_up);
        add_weight(a, m->experts.down);
    }
    add_weight(a, net->head.w);
}

bool vulkan_lora_prepare(struct vulkan *v, struct error *err)
{
    struct vulkan_loras *a = &v->loras;
    size_t used = (size_t)(v->max.n_expert_used > 1 ? v->max.n_expert_used : 1);
    if (!v->bounds.lora_rank)
        return true;
    add_weights(a, v->net);
    size_t n = (size_t)a->n_weights + 1;
    a->weights = mem_zalloc(n, sizeof *a->weights);
    a->column = mem_zalloc(n, sizeof *a->column);
    add_weights(a, v->net);
    a->ldt = (int)vulkan_ld(v->bounds.lora_rank);
    memset(a->seen, 0, sizeof a->seen);
    a->generation++;
    size_t t = used * (size_t)v->bounds.max_tokens * LORA_MAX_USES * (size_t)a->ldt;
    return vulkan_own(v, &v->s.lora_table, n * LORA_MAX_ADAPTERS * sizeof(uint64_t), err) &&
           vulkan_own(v, &v->s.lora_t, t * sizeof(float), err);
}

void vulkan_lora_close(struct vulkan *v)
{
    struct vulkan_loras *a = &v->loras;
    mem_free(a->weights);
    mem_free(a->column);
    a->weights = NULL;
    a->column = NULL;
    a->n_weights = 0;
}

size_t vulkan_lora_words(const struct vulkan *v)
{
    size_t rows = (size_t)v->bounds.max_tokens + (size_t)v->bounds.max_out;
    return v->bounds.lora_rank ? 2 * LORA_MAX_USES * rows : 0;
}

/* Brings the adapter's row of the table up to date. */
static void refresh(struct vulkan *v, int adapter)
{
    struct vulkan_loras *a = &v->loras;
    unsigned now = __atomic_load_n(&a->generation, __ATOMIC_ACQUIRE);
    if (a->seen[adapter] == now || !a->n_weights)
        return;
    a->seen[adapter] = now;
    for (int i = 0; i < a->n_weights; i++) {
        struct vulkan_lora_weight *w = &a->weights[i];
        const struct change *c = w->w->lora[adapter];
        a->column[i] = c ? vulkan_address(c->memory) : 0;
        if (!c || c->rank <= w->rank)
            continue;
        CHECK(c->rank <= v->bounds.lora_rank, "an adapter of rank %d", c->rank);
        w->rank = c->rank;
        a->epoch++;
    }
    size_t bytes = (size_t)a->n_weights * sizeof *a->column;
    vulkan_copy_in(&v->be, (void *)(uintptr_t)(v->s.lora_table + (size_t)adapter * bytes),
                   a->column, bytes);
}

void vulkan_lora_begin(struct vulkan *v)
{
    const struct batch *b = &v->batch;
    struct vulkan_loras *a = &v->loras;
    a->n_uses = 0;
    for (int i = 0; i < b->n_loras; i++) {
        const struct lora_use *u = &b->loras[i];
        refresh(v, u->adapter);
        int before = 1; /* how many adapters the most used of these rows has */
        for (int k = 0; k < i; k++)
            before +=
                b->loras[k].first < u->first + u->n && u->first < b->loras[k].first + b->loras[k].n;
        a->n_uses = before > a->n_uses ? before : a->n_uses;
    }
    a->n_uses = a->n_uses < LORA_MAX_USES ? a->n_uses : LORA_MAX_USES;
}

/* One list: (uses, rows, 2). at: the row of the step that each row is; NULL = the same. */
static void put_list(const struct vulkan *v, int32_t *to, const int32_t *at, int rows)
{
    const struct batch *b = &v->batch;
    for (int i = 0; i < v->loras.n_uses * rows; i++)
        to[2 * i] = -1;
    for (int r = 0; r < rows; r++) {
        int row = at ? at[r] : r, n = 0;
        for (int i = 0; i < b->n_loras; i++) {
            const struct lora_use *u = &b->loras[i];
            if (row < u->first || row >= u->first + u->n)
                continue;
            CHECK(n < v->loras.n_uses, "more adapters of a row than were counted");
            int32_t *entry = to + 2 * ((ptrdiff_t)n++ * rows + r);
            entry[0] = u->adapter;
            memcpy(entry + 1, &u->scale, 4);
        }
    }
}

void vulkan_lora_put(const struct vulkan *v, int32_t *to, int *used)
{
    const struct batch *b = &v->batch;
    if (!v->loras.n_uses)
        return;
    to[STEP_LORAS] = *used;
    put_list(v, to + *used, NULL, b->n_tokens);
    *used += 2 * v->loras.n_uses * b->n_tokens;
    to[STEP_OUT_LORAS] = *used;
    put_list(v, to + *used, b->out_rows, b->n_out);
    *used += 2 * v->loras.n_uses * b->n_out;
}

void vulkan_lora_add(struct vulkan *v, const struct product *p)
{
    const struct vulkan_loras *a = &v->loras;
    int number = vulkan_matrix(p->w)->lora - 1, rank = a->weights[number].rank;
    bool out = v->narrow && v->batch.n_out != v->batch.n_tokens;
    const struct lora_args args = {.step = v->s.step,
                                   .table = v->s.lora_table,
                                   .x = p->x,
                                   .y = p->y,
                                   .t = v->s.lora_t,
                                   .chosen = p->chosen,
                                   .lists = out ? STEP_OUT_LORAS : STEP_LORAS,
                                   .n_weights = (uint)a->n_weights,
                                   .weight = (uint)number,
                                   .n_uses = (uint)a->n_uses,
                                   .rows = p->rows,
                                   .row_div = p->rows / (uint)v->rows,
                                   .list_rows = (uint)v->rows,
                                   .n_in = (uint)p->w->n_in,
                                   .n_out = (uint)p->w->n_out,
                                   .ldx = p->ldx,
                                   .ldy = p->ldy,
                                   .ldt = (uint)a->ldt,
                                   .x_div = p->x_div,
                                   .n_own = (uint)p->w->n_expert,
                                   .expert_first = p->expert_first};
    if (!rank)
        return;
    vulkan_run(v, KERNEL_LORA_A, 0, 0, &args, sizeof args, (uint32_t)rank, p->rows, args.n_uses);
    vulkan_run(v, KERNEL_LORA_B, 0, 0, &args, sizeof args, vulkan_wide(p->w->n_out), p->rows, 1);
}
