/*
 * Joins a shared expert to the experts: if its shapes and formats match, it becomes the last
 * expert, which every row uses. Then the kernels for experts include it, and no other kernels run
 * beside them. Done once, before the first step. Its tiles are copied after those of the others
 * (upload left space), and the router gets one more row, that of the shared expert's gate (zeros if
 * it has none and its weight is 1). layer.h's numbers do not change; struct route_rule and the
 * matrices count one more.
 */
#include "backend/cuda/heads/embed.cuh"
#include "backend/cuda/core/host.h"

static struct cuda_weight *weight_of(const struct weight *w)
{
    return (struct cuda_weight *)w->impl;
}

bool join_is_done(const struct mlp *m)
{
    return m->router.w && weight_of(m->router.w)->joined;
}

static bool is_alike(const struct matrix *a, const struct matrix *b)
{
    bool alike =
        a->n_in == b->n_in && a->n_out == b->n_out && a->n_seg == b->n_seg && !a->bias == !b->bias;
    for (int i = 0; alike && i < a->n_seg; i++) {
        const struct seg *s = &a->seg[i], *t = &b->seg[i];
        alike = s->kind == t->kind && s->dtype == t->dtype && s->rows == t->rows &&
                s->tile_bytes == t->tile_bytes;
    }
    return alike;
}

static bool can_join(const struct mlp *m)
{
    const struct ffn *d = &m->dense, *e = &m->experts;
    if (!m->router.w || !d->gate_up || m->dense_partial != m->experts_partial ||
        m->router.norm.kind || m->experts_in.kind || m->experts_out.kind || m->dense_out.kind ||
        m->router.n_same || m->experts_late || apart_dense(m) || apart_experts(m) ||
        d->act != e->act || d->alpha != e->alpha || d->limit != e->limit)
        return false;
    return weight_of(e->gate_up)->room && weight_of(e->down)->room && m->router.n_used < MAX_USED &&
           m->router.w->n_out < MAX_EXPERTS &&
           is_alike(cuda_matrix(e->gate_up), cuda_matrix(d->gate_up)) &&
           is_alike(cuda_matrix(e->down), cuda_matrix(d->down));
}

static void copy(struct cuda_backend *cu, void *to, const void *from, size_t bytes)
{
    CUDA_TRY(cu, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cu->stream));
}

static void append(struct cuda_backend *cu, struct cuda_weight *to, const struct matrix *from)
{
    struct matrix *m = &to->m;
    size_t n = (size_t)m->n_expert;
    for (int i = 0; i < m->n_seg; i++)
        copy(cu, (uint8_t *)m->seg[i].base + n * m->seg[i].expert_bytes, from->seg[i].base,
             m->seg[i].expert_bytes);
    if (m->bias)
        copy(cu, (float *)m->bias + n * (size_t)m->n_out, from->bias,
             (size_t)m->n_out * sizeof(float));
    m->n_expert++;
    to->room = false;
}

/* Adds a row of floats to the router. A tile holds TILE_ROWS x TILE_K of them. */
static bool widen_router(struct cuda_backend *cu, struct cuda_weight *w, const struct matrix *gate,
                         struct error *err)
{
    struct matrix m = w->m;
    struct seg *s = &m.seg[0];
    int n = m.n_out++;
    s->rows = m.n_out;
    s->n_tiles = m.n_tiles = ceil_div(m.n_out, TILE_ROWS);
    size_t row = (size_t)m.n_kt * (size_t)s->tile_bytes, was = s->expert_bytes;
    s->expert_bytes = (size_t)s->n_tiles * row;
    size_t bias_bytes = m.bias ? align_up((size_t)m.n_out * sizeof(float), 256) : 0;
    size_t bytes = align_up(s->expert_bytes, 256) + bias_bytes;
    uint8_t *data = (uint8_t *)cuda_alloc(cu->be, bytes, "a router", err);
    if (!data)
        return false;
    CUDA_TRY(cu, cudaMemsetAsync(data, 0, bytes, cu->stream));
    copy(cu, data, s->base, was);
    s->base = data;
    if (m.bias) {
        float *bias = (float *)(data + align_up(s->expert_bytes, 256));
        copy(cu, bias, m.bias, (size_t)n * sizeof(float));
        m.bias = bias;
    }
    if (gate) { /* a row is contiguous within a tile; its next columns are one tile further */
        float *to = (float *)(data + (size_t)(n / TILE_ROWS) * row) + n % TILE_ROWS * TILE_K;
        embed_row(cu, gate, 0, to, s->tile_bytes / (int)sizeof(float));
    }
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
    cuda_free(cu->be, w->data, w->bytes);
    w->m = m;
    w->data = data;
    w->bytes = bytes;
    w->joined = true;
    return true;
}

bool join_experts(struct cuda_backend *cu, const struct mlp *m, struct error *err)
{
    if (!can_join(m) || join_is_done(m))
        return true;
    const struct matrix *gate = m->dense_gate ? cuda_matrix(m->dense_gate) : NULL;
    if (!widen_router(cu, weight_of(m->router.w), gate, err))
        return false;
    append(cu, weight_of(m->experts.gate_up), cuda_matrix(m->dense.gate_up));
    append(cu, weight_of(m->experts.down), cuda_matrix(m->dense.down));
    return true;
}
