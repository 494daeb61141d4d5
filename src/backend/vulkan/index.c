/* Sparse attention on the Vulkan backend: index queries and keys, and the choice of the keys that a row sees, as bits. */
#include "backend/vulkan/vulkan.h"

/* Rows whose scores are computed at once, and keys of a workgroup. */
enum { SLICE = 16, KEYS = 128, MAX_DIM = 256 };

static size_t longest(const struct vulkan *v)
{
    size_t n = (size_t)v->bounds.max_pages * (size_t)v->bounds.page_len;
    return (n + KEYS - 1) / KEYS * KEYS; /* whole chunks */
}

bool vulkan_index_supported(const struct mixer *m, int i, struct error *err)
{
    const struct indexer *x = mixer_index(m);
    if (x && x->n_chosen && (x->dim % 8 || x->dim > MAX_DIM))
        return error_set(
            err, "layer %d: index keys of %d values are not supported on vulkan (%d at most)", i,
            x->dim, MAX_DIM);
    return true;
}

bool vulkan_index_prepare(struct vulkan *v, struct error *err)
{
    const struct network_max *m = &v->max;
    struct vulkan_scratch *s = &v->s;
    size_t tokens = (size_t)v->bounds.max_tokens, groups = (size_t)m->index_groups, dim = 0;
    if (!m->index)
        return true;
    for (int i = 0; i < v->net->n_layers; i++) {
        const struct indexer *x = mixer_index(&v->net->layers[i].mixer);
        dim = x && (size_t)x->dim > dim ? (size_t)x->dim : dim;
    }
    size_t bits = CHOSEN_WORDS + tokens * groups * longest(v) / 32;
    return vulkan_own(v, &s->index_q, 4 * tokens * (size_t)m->index, err) &&
           vulkan_own(v, &s->index_w, 4 * tokens * (size_t)m->index_heads, err) &&
           vulkan_own(v, &s->index_k, 4 * tokens * dim, err) &&
           vulkan_own(v, &s->index_scores, 4 * SLICE * groups * longest(v), err) &&
           vulkan_own(v, &s->chosen_keys, 4 * bits, err);
}

static void product(struct vulkan *v, const struct weight *w, uint64_t x, uint32_t ldx, uint64_t y)
{
    vulkan_product(v, &(struct product){.w = w,
                                        .x = x,
                                        .y = y,
                                        .ldx = ldx,
                                        .ldy = (uint32_t)w->n_out,
                                        .rows = (uint32_t)v->rows,
                                        .x_div = 1});
}

/* Norm and RoPE of heads, in place or to the cache. */
static void finish(struct vulkan *v, const struct indexer *x, const struct norm *norm,
                   uint64_t from, int heads, uint64_t to, uint32_t store)
{
    const struct heads_args args = {.step = v->s.step,
                                    .in_rows = from,
                                    .to = to,
                                    .rope = x->rope ? v->s.ropes[x->rope - v->net->ropes] : 0,
                                    .gain = vulkan_address(norm->gain),
                                    .bias = vulkan_address(norm->bias),
                                    .rows = (uint)v->rows,
                                    .n_heads = (uint)heads,
                                    .dim = (uint)x->dim,
                                    .ld_in = (uint)(heads * x->dim),
                                    .stride = (uint)x->dim,
                                    .ld_to = (uint)(heads * x->dim),
                                    .page_len = (uint)v->bounds.page_len,
                                    .kind = (uint)norm->kind,
                                    .half_rot = x->rope ? (uint)x->rope->n_rot / 2 : 0,
                                    .flags = x->interleaved ? HEADS_INTERLEAVED : 0u,
                                    .store = store,
                                    .eps = norm->eps,
                                    .norm_dim = (uint)x->dim};
    vulkan_run(v, KERNEL_HEADS, 0, 0, &args, sizeof args, args.n_heads, args.rows, 1);
}

void vulkan_index(struct vulkan *v, const struct indexer *x, const struct kv_layer *kv, uint64_t u,
                  uint32_t ldu, int n_kv_heads)
{
    const struct vulkan_scratch *s = &v->s;
    if (!x->n_chosen || x->reuse)
        return;
    product(v, x->wq, u, ldu, s->index_q);
    finish(v, x, &x->q_norm, s->index_q, x->n_heads, s->index_q, 0);
    if (x->ww)
        product(v, x->ww, s->n, s->ld_x, s->index_w);
    product(v, x->wk, s->n, s->ld_x, s->index_k);
    finish(v, x, &x->k_norm, s->index_k, 1, vulkan_address(kv->index),
           vulkan_cache_format(v->bounds.k_type) + 1);
    struct index_args args = {.step = s->step,
                              .q = s->index_q,
                              .w = s->index_w,
                              .k = vulkan_address(kv->index),
                              .scores = s->index_scores,
                              .bits = s->chosen_keys,
                              .dim = (uint)x->dim,
                              .n_heads = (uint)x->n_heads,
                              .block = (uint)x->block,
                              .n_groups = x->block ? (uint)n_kv_heads : 1,
                              .n_chosen = (uint)x->n_chosen,
                              .page_len = (uint)v->bounds.page_len,
                              .ldq = (uint)(x->n_heads * x->dim),
                              .ld_scores = (uint)longest(v),
                              .ld_bits = (uint)(longest(v) / 32)};
    uint32_t unit = x->block ? (uint32_t)x->block : 1;
    uint32_t units = ((uint32_t)v->reach + unit - 1) / unit, chunks = (units + KEYS - 1) / KEYS;
    for (int first = 0; first < v->rows; first += SLICE) {
        uint32_t n = (uint32_t)(v->rows - first < SLICE ? v->rows - first : SLICE);
        args.first = (uint)first;
        vulkan_run(v, KERNEL_INDEX_SCORE, vulkan_cache_format(v->bounds.k_type), 0, &args,
                   sizeof args, chunks, n, args.n_groups);
        vulkan_run(v, KERNEL_INDEX_CHOOSE, 0, 0, &args, sizeof args, 1, n, args.n_groups);
    }
}
