/*
 * LoRA adapters on the host's side: uploads their matrices as fp16, lists the rows of a step per
 * adapter, and launches the kernels (lora_kernels.cu) around products of base weights, or in place
 * of fused ones. Owns the table of changes and the scratch of adapters. See lora.h.
 */
#include "backend/cuda/lora/lora.cuh"
#include "backend/cuda/core/host.h"
#include "backend/cuda/core/pick.cuh"
#include "backend/cuda/heads/mtp.h"

extern "C" {
#include "base/mem.h"
uint16_t f32_to_f16(float f); /* quant.h hides it from nvcc */
}

#include <math.h>
#include <stdlib.h>
#include <string.h>

static_assert((int)LORA_PARTS == (int)LORA_MAX_PARTS, "parts of a change");
enum { LORA_CHUNK_ROWS = 8 }; /* rows per chunk: LORA_ROWS of lora_kernels.cu */

static struct cuda_loras *loras_of(const struct cuda_backend *cu)
{
    return &((struct cuda_whole *)cu->be)->loras;
}

/*
 * Changes: one device allocation per weight, struct lora_change of all experts first.
 */

struct cuda_lora {
    struct lora_change *of; /* device (n_expert), followed by the fp16 matrices */
    int rank;               /* largest rank of any expert */
};

/* The power of two that scales the largest of n values to about 1, to use fp16's range. */
static float scale_for(const float *v, size_t n)
{
    float most = 0;
    int e = 0;
    for (size_t i = 0; i < n; i++)
        most = fabsf(v[i]) > most ? fabsf(v[i]) : most;
    if (most > 0)
        frexpf(most, &e);
    return ldexpf(1, e);
}

static int padded(int n)
{
    return (n + 7) & ~7;
}

static size_t change_fp16_len(const struct lora *l, const struct lora_matrix *m)
{
    size_t n = (size_t)m->rank * (size_t)padded(l->n_in);
    for (int i = 0; i < m->n_parts; i++)
        n += (size_t)m->parts[i].n * (size_t)padded(m->parts[i].rank);
    return n;
}

/* Stores (rows, columns) floats as fp16, divided by `scale`, rows padded. Returns the end. */
static uint16_t *pack(uint16_t *to, const float *from, int rows, int columns, float scale)
{
    size_t n = (size_t)columns, ld = (size_t)padded(columns);
    for (size_t r = 0; r < (size_t)rows; r++)
        for (size_t k = 0; k < n; k++)
            to[r * ld + k] = f32_to_f16(from[r * n + k] / scale);
    return to + (size_t)rows * ld;
}

/* Fills the host copy of an allocation. host: that copy. dev: where it will be on the device. */
static void pack_change(const struct lora *l, struct lora_change *to, uint16_t *fp16,
                        const uint8_t *host, const uint8_t *dev)
{
    auto on_device = [&](const uint16_t *p) {
        return (const uint16_t *)(dev + ((const uint8_t *)p - host));
    };
    for (int e = 0; e < l->n_expert; e++) {
        const struct lora_matrix *m = &l->of[e];
        struct lora_change *c = &to[e];
        if (!m->rank)
            continue;
        c->rank = m->rank;
        c->n_parts = m->n_parts;
        c->ld = padded(l->n_in);
        c->scale = scale_for(m->a, (size_t)m->rank * (size_t)l->n_in);
        c->a = on_device(fp16);
        fp16 = pack(fp16, m->a, m->rank, l->n_in, c->scale);
        for (int i = 0; i < m->n_parts; i++) {
            const struct lora_part *from = &m->parts[i];
            struct lora_change_part *p = &c->parts[i];
            p->first = from->first;
            p->n = from->n;
            p->at = from->at;
            p->rank = from->rank;
            p->ld = padded(from->rank);
            p->scale = scale_for(from->b, (size_t)from->n * (size_t)from->rank);
            p->b = on_device(fp16);
            fp16 = pack(fp16, from->b, from->n, from->rank, p->scale);
        }
    }
}

/* Copies to the device on its own stream, because another thread may be running or recording
 * steps. */
static cudaError_t upload(void *to, const void *from, size_t bytes)
{
    cudaStream_t stream = NULL;
    cudaError_t e = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(stream);
    if (stream)
        cudaStreamDestroy(stream);
    return e;
}

void *lora_adapt(struct backend *be, const struct weight *w, const struct lora *l,
                 struct error *err)
{
    struct cuda_backend *cu = cuda_self(be);
    if (((const struct cuda_weight *)w->impl)->host) {
        error_set(err, "adapters of experts that are in part in host memory are not supported");
        return NULL;
    }
    size_t head = align_up((size_t)l->n_expert * sizeof(struct lora_change), 16), fp16_len = 0;
    for (int e = 0; e < l->n_expert; e++)
        fp16_len += change_fp16_len(l, &l->of[e]);
    size_t bytes = head + fp16_len * sizeof(uint16_t);
    struct cuda_lora *c = (struct cuda_lora *)mem_zalloc(1, sizeof *c);
    uint8_t *host = (uint8_t *)mem_zalloc(1, bytes);
    c->rank = lora_rank(l);
    cudaSetDevice(cu->device);
    cudaError_t e = cudaMalloc((void **)&c->of, bytes);
    if (e == cudaSuccess) {
        pack_change(l, (struct lora_change *)host, (uint16_t *)(host + head), host,
                    (const uint8_t *)c->of);
        e = upload(c->of, host, bytes);
    }
    mem_free(host);
    if (e == cudaSuccess) {
        __atomic_add_fetch(&loras_of(cu)->generation, 1, __ATOMIC_ACQ_REL);
        return c;
    }
    cudaGetLastError();
    if (c->of)
        cudaFree(c->of);
    mem_free(c);
    error_set(err, "%s: %zu bytes for a LoRA adapter",
              e == cudaErrorMemoryAllocation ? "out of GPU memory" : cudaGetErrorString(e), bytes);
    return NULL;
}

void lora_unadapt(struct backend *be, void *change)
{
    struct cuda_backend *cu = cuda_self(be);
    struct cuda_lora *c = (struct cuda_lora *)change;
    cudaSetDevice(cu->device);
    cudaFree(c->of); /* cudaFree waits for steps that may still read it */
    mem_free(c);
    __atomic_add_fetch(&loras_of(cu)->generation, 1, __ATOMIC_ACQ_REL);
}

/*
 * prepare
 */

static void add_weight(struct cuda_loras *a, const struct weight *w)
{
    if (!w || !w->lora)
        return;
    if (a->weights) {
        a->weights[a->n_weights].m = cuda_matrix(w);
        a->weights[a->n_weights].w = w;
    }
    a->n_weights++;
}

/* Lists every weight of the network that an adapter may change. If a->weights is NULL it only
 * counts them. */
static void add_weights(struct cuda_loras *a, const struct network *net)
{
    a->n_weights = 0;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *x = &net->layers[i].mixer;
        const struct mlp *m = &net->layers[i].mlp;
        const struct weight *attention[] = {x->attention.wqkv, x->attention.wo};
        const struct weight *latent[] = {x->latent.wqa, x->latent.wqb, x->latent.wkva,
                                         x->latent.wo};
        const struct weight *delta[] = {x->delta_net.wqkv, x->delta_net.wz, x->delta_net.wba,
                                        x->delta_net.wo};
        const struct weight *ssm[] = {x->ssm.w_in, x->ssm.w_out, x->ssm.w_z};
        const struct weight *conv[] = {x->short_conv.w_in, x->short_conv.w_out};
        const struct weight *const *list = x->kind == MIXER_LATENT       ? latent
                                           : x->kind == MIXER_DELTA_NET  ? delta
                                           : x->kind == MIXER_SSM        ? ssm
                                           : x->kind == MIXER_SHORT_CONV ? conv
                                                                         : attention;
        for (int k = 0; k < (list == latent || list == delta ? 4 : list == ssm ? 3 : 2); k++)
            add_weight(a, list[k]);
        const struct weight *mlp[] = {m->dense.gate_up,   m->dense.down,   m->dense_gate,
                                      m->router.w,        m->embed.gate,   m->embed.project,
                                      m->experts.gate_up, m->experts.down, NULL};
        for (int k = 0; k < (m->router.w ? 8 : 6); k++)
            add_weight(a, mlp[k]);
    }
    add_weight(a, net->embed.layers.project);
    add_weight(a, net->head.w);
}

static int by_matrix(const void *a, const void *b)
{
    const struct lora_weight *x = (const struct lora_weight *)a, *y = (const struct lora_weight *)b;
    return x->m < y->m ? -1 : x->m > y->m;
}

bool lora_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err)
{
    struct cuda_loras *a = loras_of(cu);
    const struct model_shape *s = &cu->shape;
    if (!b->lora_rank)
        return true;
    size_t tokens = (size_t)s->max_tokens, used = (size_t)(s->n_expert_used ? s->n_expert_used : 1);
    size_t ff = (size_t)s->n_ff;
    a->t_len = padded(b->lora_rank);
    a->n_ff = s->n_ff;
    if ((align_up(ff, TILE_K) + 64) * sizeof(float) > cu->shared_limit ||
        (size_t)LORA_CHUNK_ROWS * (size_t)(a->t_len + 8) * sizeof(float) > cu->shared_limit)
        return error_set(err, "adapters of rank %d over mlps of %d are not supported on cuda",
                         b->lora_rank, s->n_ff);
    add_weights(a, cu->net);
    int n = a->n_weights;
    a->weights = (struct lora_weight *)mem_zalloc((size_t)n + 1, sizeof *a->weights);
    a->column = (const struct lora_change **)mem_zalloc((size_t)n + 1, sizeof *a->column);
    a->count = (int32_t *)mem_zalloc(tokens + 1, sizeof *a->count);
    a->out_of = (int32_t *)mem_zalloc(tokens + 1, sizeof *a->out_of);
    add_weights(a, cu->net);
    qsort(a->weights, (size_t)n, sizeof *a->weights, by_matrix);
    a->generation++; /* changes made before are not in the table yet */
    struct device_buffer list[] = {
        {(void **)&a->table, (size_t)(n + 1) * LORA_MAX_ADAPTERS * sizeof *a->table},
        {(void **)&a->t,
         (used > LORA_MAX_USES ? used : LORA_MAX_USES) * tokens * (size_t)a->t_len * sizeof(float)},
    };
    return cuda_own(cu, list, (int)(sizeof list / sizeof *list), err);
}

void lora_close(struct cuda_backend *cu)
{
    struct cuda_loras *a = loras_of(cu);
    mem_free(a->weights);
    mem_free(a->column);
    mem_free(a->count);
    mem_free(a->out_of);
}

size_t lora_step_ints(const struct cuda_backend *cu)
{
    /* per row and use: two ints of by_row, one of members, three of chunks; two lists, each
     * aligned */
    return loras_of(cu)->t_len
               ? (size_t)LORA_LISTS * LORA_MAX_USES * (6 * (size_t)cu->shape.max_tokens + 16)
               : 0;
}

size_t lora_widest(const struct cuda_backend *cu)
{
    return (size_t)loras_of(cu)->n_ff;
}

/*
 * begin
 */

/* Updates column `adapter` of the device table if changes were made since. */
static void refresh(struct cuda_backend *cu, int adapter)
{
    struct cuda_loras *a = loras_of(cu);
    unsigned now = __atomic_load_n(&a->generation, __ATOMIC_ACQUIRE);
    if (a->seen[adapter] == now)
        return;
    a->seen[adapter] = now;
    for (int i = 0; i < a->n_weights; i++) {
        struct lora_weight *w = &a->weights[i];
        const struct cuda_lora *c = (const struct cuda_lora *)w->w->lora[adapter];
        a->column[i] = c ? c->of : NULL;
        if (c && c->rank > w->rank) {
            CHECK(c->rank <= a->t_len, "an adapter of rank %d", c->rank);
            w->rank = c->rank;
            a->epoch++;
        }
    }
    size_t n = (size_t)a->n_weights;
    if (n)
        CUDA_TRY(cu,
                 cudaMemcpyAsync((void *)(a->table + (size_t)adapter * n), (const void *)a->column,
                                 n * sizeof *a->column, cudaMemcpyHostToDevice, cu->stream));
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream)); /* a->column will be reused */
}

static int take_ints(struct cuda_backend *cu, int *used, int n)
{
    int at = *used;
    CHECK((size_t)(at + n) <= cu->step.capacity, "the step block is full");
    *used = (at + n + 3) & ~3;
    return at;
}

/* Adds row to the last chunk of use u, or starts a new chunk. */
static void add_member(struct lora_list *l, int32_t *block, int u, int *n, int row, int adapter)
{
    int32_t *last = block + l->chunks[u] + 3 * (l->n_chunks[u] - 1);
    if (!l->n_chunks[u] || last[0] != adapter || last[2] == LORA_CHUNK_ROWS) {
        last += 3;
        l->n_chunks[u]++;
        last[0] = adapter;
        last[1] = *n;
        last[2] = 0;
    }
    last[2]++;
    block[l->members[u] + (*n)++] = row;
}

/* Writes one list. out_of: maps a row of the step to a row of the list, -1: not in it; NULL: the
 * identity. */
static int put_list(struct cuda_backend *cu, const struct batch *b, struct lora_list *l, int rows,
                    const int32_t *out_of, int used)
{
    struct cuda_loras *a = loras_of(cu);
    int32_t *block = cu->step.host;
    int n[LORA_MAX_USES] = {0};
    memset(l, 0, sizeof *l);
    l->rows = rows;
    l->by_row = take_ints(cu, &used, 2 * rows * a->step.n_uses);
    memset(block + l->by_row, -1, (size_t)(2 * rows * a->step.n_uses) * sizeof *block);
    for (int u = 0; u < a->step.n_uses && a->step.grouped; u++) {
        l->members[u] = take_ints(cu, &used, rows);
        l->chunks[u] = take_ints(cu, &used, 3 * rows);
    }
    memset(a->count, 0, (size_t)b->n_tokens * sizeof *a->count);
    for (int i = 0; i < b->n_loras; i++) {
        const struct lora_use *x = &b->loras[i];
        for (int t = x->first; t < x->first + x->n; t++) {
            int u = a->count[t]++, row = out_of ? out_of[t] : t;
            if (row < 0)
                continue;
            int32_t *to = block + l->by_row + 2 * (u * rows + row);
            to[0] = x->adapter;
            memcpy(&to[1], &x->scale, sizeof x->scale);
            if (a->step.grouped)
                add_member(l, block, u, &n[u], row, x->adapter);
        }
    }
    return used;
}

int lora_put(struct cuda_backend *cu, const struct batch *b, int used)
{
    struct cuda_loras *a = loras_of(cu);
    a->step.on = b->n_loras > 0;
    if (!a->step.on)
        return used;
    CHECK(a->t_len, "a step with adapters");
    /* a step with drafts may be recorded, and how many groups there are depends on the adapters */
    a->step.grouped = b->n_decode != b->n_seqs && !mtp_of(cu)->stride;
    a->step.n_uses = 0;
    memset(a->count, 0, (size_t)b->n_tokens * sizeof *a->count);
    for (int i = 0; i < b->n_loras; i++) {
        refresh(cu, b->loras[i].adapter);
        for (int t = b->loras[i].first; t < b->loras[i].first + b->loras[i].n; t++)
            a->step.n_uses = ++a->count[t] > a->step.n_uses ? a->count[t] : a->step.n_uses;
    }
    CHECK(a->step.n_uses <= LORA_MAX_USES, "%d adapters of a row", a->step.n_uses);
    used = put_list(cu, b, &a->step.lists[LORA_ALL], b->n_tokens, NULL, used);
    a->step.lists[LORA_OUT] = a->step.lists[LORA_ALL];
    if (b->n_out == b->n_tokens)
        return used;
    memset(a->out_of, -1, (size_t)b->n_tokens * sizeof *a->out_of);
    for (int i = 0; i < b->n_out; i++)
        a->out_of[b->out_rows[i]] = i;
    return put_list(cu, b, &a->step.lists[LORA_OUT], b->n_out, a->out_of, used);
}

uint64_t lora_key(const struct cuda_backend *cu, uint64_t key)
{
    const struct cuda_loras *a = loras_of(cu);
    return a->step.on ? key | (uint64_t)a->step.n_uses << 28 | (uint64_t)a->epoch << 32 : key;
}

/*
 * Products
 */

static const struct lora_weight *find_weight(const struct cuda_loras *a, const struct matrix *w)
{
    int low = 0, high = a->n_weights;
    while (low < high) {
        int at = (low + high) / 2;
        if (a->weights[at].m == w)
            return &a->weights[at];
        if (a->weights[at].m < w)
            low = at + 1;
        else
            high = at;
    }
    return NULL;
}

bool lora_changes(const struct cuda_backend *cu, const struct matrix *w)
{
    const struct cuda_loras *a = loras_of(cu);
    const struct lora_weight *x = a->step.on && w ? find_weight(a, w) : NULL;
    return x && x->rank > 0;
}

static bool changes(const struct cuda_backend *cu, const struct weight *w)
{
    return w && lora_changes(cu, cuda_matrix(w));
}

bool lora_changes_experts(const struct cuda_backend *cu, const struct mlp *m)
{
    return changes(cu, m->experts.gate_up) || changes(cu, m->experts.down) ||
           changes(cu, m->router.w) ||
           (join_is_done(m) && (changes(cu, m->dense.gate_up) || changes(cu, m->dense.down) ||
                                changes(cu, m->dense_gate)));
}

void lora_input(struct cuda_backend *cu, struct pick_case *c)
{
    struct resid *r = c->made ? NULL : c->stream;
    if (r)
        *c->x = c->gain.gain ? resid_norm(cu, r, c->gain, true) : resid_plain(cu, r);
    rows_to_floats(cu, c->x);
    c->gain = gain{};
}

static const struct lora_list *list_of(const struct cuda_backend *cu)
{
    return &loras_of(cu)->step.lists[cu->resid.narrow ? LORA_OUT : LORA_ALL];
}

/* Arguments for use u of the rows of the residual stream. */
static struct lora_args args_of(struct cuda_backend *cu, const struct lora_weight *w, int u)
{
    const struct cuda_loras *a = loras_of(cu);
    const struct lora_list *l = list_of(cu);
    struct lora_args p = {};
    p.table = a->table;
    p.n_weights = a->n_weights;
    p.weight = w && w->rank ? (int)(w - a->weights) : -1;
    p.shared = p.shared_weight = -1;
    p.by_row = cu->step.dev + l->by_row + 2 * u * l->rows;
    p.t = a->t;
    p.t_len = a->t_len;
    return p;
}

/* The same for a plain product. *blocks: rows, or chunks of them. */
static struct lora_args linear_args(struct cuda_backend *cu, const struct lora_weight *w, int u,
                                    int *blocks)
{
    const struct cuda_loras *a = loras_of(cu);
    const struct lora_list *l = list_of(cu);
    struct lora_args p = args_of(cu, w, u);
    *blocks = a->step.grouped ? l->n_chunks[u] : l->rows;
    if (a->step.grouped) {
        p.members = cu->step.dev + l->members[u];
        p.chunks = cu->step.dev + l->chunks[u];
    }
    p.t += (size_t)u * (size_t)l->rows * (size_t)a->t_len;
    p.n_in = w->w->n_in;
    p.n_out = w->w->n_out;
    return p;
}

void lora_before(struct cuda_backend *cu, const struct matrix *m, const struct rows *x)
{
    const struct cuda_loras *a = loras_of(cu);
    const struct lora_weight *w = find_weight(a, m);
    CHECK(x->n == list_of(cu)->rows, "a product of %d rows, of %d", x->n, list_of(cu)->rows);
    for (int u = 0, blocks; u < a->step.n_uses; u++) {
        struct lora_args p = linear_args(cu, w, u, &blocks);
        p.x = x->floats;
        p.ldx = x->width;
        if (blocks)
            lora_shrink(cu, p, blocks, w->rank);
    }
}

void lora_add(struct cuda_backend *cu, const struct matrix *m, float *y, int ldy)
{
    const struct cuda_loras *a = loras_of(cu);
    const struct lora_weight *w = find_weight(a, m);
    for (int u = 0, blocks; u < a->step.n_uses; u++) {
        struct lora_args p = linear_args(cu, w, u, &blocks);
        p.y = y;
        p.ldy = ldy;
        if (blocks)
            lora_expand(cu, p, blocks);
    }
}

bool lora_changes_router(const struct cuda_backend *cu, const struct mlp *m)
{
    return changes(cu, m->router.w) || (join_is_done(m) && changes(cu, m->dense_gate));
}

void lora_add_logits(struct cuda_backend *cu, const struct mlp *m, const struct rows *x)
{
    const struct matrix *w = cuda_matrix(m->router.w);
    if (changes(cu, m->router.w)) {
        lora_before(cu, w, x);
        lora_add(cu, w, cu->routing.logits, w->n_out);
    }
    if (join_is_done(m) && changes(cu, m->dense_gate)) {
        lora_before(cu, cuda_matrix(m->dense_gate), x);
        lora_add(cu, cuda_matrix(m->dense_gate), cu->routing.logits + w->n_out - 1, w->n_out);
    }
}

void lora_add_experts(struct cuda_backend *cu, const struct pick_case *c, const struct mlp *m,
                      const float *x, const struct route_tables &t, bool down)
{
    const struct cuda_loras *a = loras_of(cu);
    const struct matrix *w = down ? c->mlp.down : c->w;
    const struct lora_weight *of = find_weight(a, w), *shared = NULL;
    if (join_is_done(m))
        shared = find_weight(a, cuda_matrix(down ? m->dense.down : m->dense.gate_up));
    int rank = of ? of->rank : 0, blocks = c->rows * c->moe.experts->rule.used;
    rank = shared && shared->rank > rank ? shared->rank : rank;
    for (int u = 0; u < a->step.n_uses && rank; u++) {
        struct lora_args p = args_of(cu, of, u);
        if (shared) {
            p.shared = c->moe.experts->rule.n_expert - 1;
            p.shared_weight = shared->rank ? (int)(shared - a->weights) : -1;
        }
        p.pairs = t.pairs;
        p.chosen = t.chosen;
        p.used = c->moe.experts->rule.used;
        p.x_sorted = p.y_pairs = down;
        p.x = down ? cu->mlp.raw : x;
        p.n_in = w->n_in;
        p.ldx = down ? c->w->n_out : w->n_in;
        p.y = down ? cu->mlp.expert_out : cu->mlp.raw;
        p.ldy = p.n_out = w->n_out;
        lora_shrink(cu, p, blocks, rank);
        lora_expand(cu, p, blocks);
    }
}
