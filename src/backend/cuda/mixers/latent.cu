/*
 * Multi-head latent attention (MLA), absorbed. The cache holds one row of C + Dr values per token,
 * whose first C values are both key and value for all heads:
 *    q'_h = q_h W_kb,h (into the latent space),  o'_h = softmax(q'_h K^T) K[:C],  o_h = o'_h W_vb,h^T
 * Attention over latents is in latent_attn.cu; the fallback kernel for any sizes is here. Also
 * here: norms and RoPE, new cache rows, the scratch of these layers, and the work list that lets a
 * MoE GEMM run per-head products (a head as an expert).
 */
#include "backend/cuda/attn/index.h"
#include "backend/cuda/mixers/compressed.cuh"
#include "backend/cuda/mixers/latent_row.cuh"
#include "backend/cuda/lora/lora.h"
#include "backend/cuda/mixers/mixers.h"
#include "backend/cuda/heads/mtp.h"

extern "C" {
#include "base/mem.h"
}

#include <math.h>

/* Grid: (rows). Norm of the low-rank query, and the cache row. */
template <bool QUANT>
static __global__ void __launch_bounds__(256)
    latent_row_kernel(const __grid_constant__ struct latent_row_args p)
{
    SHARED_BYTES(shared);
    float *part = (float *)shared;
    int t = (int)blockIdx.x;
    struct latent_angles angles = latent_angles_of(p.rope, p.step.pos[t]);
    dependency_wait();
    dependency_trigger();
    if (p.low_q) {
        const float *x = p.from_q + (size_t)t * (size_t)p.ld_q;
        float *y = p.low_q + (size_t)t * (size_t)p.q_rank;
        float rms = latent_rms(x, p.q_rank, p.q_eps, part);
        for (int i = (int)threadIdx.x; i < p.q_rank; i += 256)
            y[i] = x[i] * rms * (p.q_gain ? p.q_gain[i] : 1.0f);
    }
    latent_row<QUANT>(p, t, angles, part);
}

/* Grid: (heads / 4, rows from `first` on). One warp per query: its first Dn values to fp16 as
 * input of its head's product (x, or NULL), RoPE of the rest in place. */
static __global__ void __launch_bounds__(128)
    latent_query_kernel(const __grid_constant__ struct step s, float *q, uint16_t *x, int ldx,
                        int n_heads, int nope, const struct latent_rope rope, int first)
{
    int t = first + (int)blockIdx.y, h = (int)blockIdx.x * 4 + warp_id();
    struct latent_angles angles = latent_angles_of(rope, s.pos[t]);
    dependency_wait();
    dependency_trigger();
    if (h >= n_heads)
        return;
    float *from = q + ((size_t)t * (size_t)n_heads + (size_t)h) * (size_t)(nope + rope.n);
    if (x) {
        uint16_t *to = x + ((size_t)h * (size_t)s.n_tokens + (size_t)t) * (size_t)ldx;
        for (int i = lane_id(); i < nope; i += 32)
            to[fragment_slot(i)] = float_to_half(clamp_half(from[i]));
    }
    latent_rotate(rope, angles, from + nope);
}

/* Grid: (blocks of 1,024 values of a row, rows). q *= 1 + beta * ln(1 + floor(pos / len)) */
static __global__ void __launch_bounds__(256)
    latent_temperature_kernel(const __grid_constant__ struct step s, float *q, int width,
                              float beta, int len)
{
    dependency_wait();
    dependency_trigger();
    int first = (int)(blockIdx.x * 1024 + threadIdx.x), t = (int)blockIdx.y;
    float by = 1.0f + beta * logf(1.0f + (float)(s.pos[t] / len));
    float *row = q + (size_t)t * (size_t)width;
#pragma unroll
    for (int i = 0; i < 1024; i += 256)
        if (first + i < width)
            row[first + i] *= by;
}

/* Builds the work list. Inputs of head h are rows h * rows.. of x; the result of row t, head h
 * is row t * H + h. */
static __global__ void __launch_bounds__(256)
    latent_list_kernel(const struct route_tables list, int n_heads, int rows, int width)
{
    dependency_wait();
    dependency_trigger();
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), per = (rows + width - 1) / width;
    if (i == 0)
        *list.n_tiles = n_heads * per;
    if (i < n_heads * per) {
        int h = i / per, first = i % per * width;
        list.tiles[3 * i] = h;
        list.tiles[3 * i + 1] = h * rows + first;
        list.tiles[3 * i + 2] = min(width, rows - first);
    }
    if (i < n_heads * rows)
        list.pairs[i] = i % rows * n_heads + i / rows;
}

/* Attention over latents of any size: one warp per (row, head), float arithmetic. */
template <bool QUANT>
static __global__ void __launch_bounds__(128)
    latent_any_kernel(const __grid_constant__ struct latent_args p, int first)
{
    SHARED_BYTES(shared);
    dependency_wait();
    dependency_trigger();
    int C = p.rank, Dr = p.rope_dim, width = C + Dr, H = p.n_heads, lane = lane_id(), w = warp_id();
    int h = (int)blockIdx.x * 4 + w, t = first + (int)blockIdx.y;
    if (h >= H)
        return;
    float *q = (float *)shared + w * (2 * C + Dr + 32), *acc = q + width, *prob = acc + C;
    size_t row = (size_t)t * (size_t)H + (size_t)h;
    int last = p.step.slot[t] < 0 ? -1 : p.step.pos[t], seq = p.step.seq_of[t];
    const int32_t *pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    for (int i = lane; i < width; i += 32)
        q[i] = p.scale *
               (i < C ? p.q[row * (size_t)C + (size_t)i]
                      : p.qr[row * (size_t)(p.nope_dim + Dr) + (size_t)(p.nope_dim + i - C)]);
    for (int i = lane; i < C; i += 32)
        acc[i] = 0.0f;
    __syncwarp();
    float top = -INFINITY, total = 0.0f;
    auto at = [&](int key) {
        return ((size_t)pages[key / p.page_len] * (size_t)p.page_len + (size_t)(key % p.page_len)) *
               (size_t)width;
    };
    for (int base = 0; base <= last; base += 32) {
        float s = -INFINITY;
        if (base + lane <= last) {
            size_t k = at(base + lane);
            s = 0.0f;
            for (int i = 0; i < width; i++)
                s += q[i] * latent_get<QUANT>(p.cache, p.type, k + (size_t)i);
        }
        float m = fmaxf(top, warp_max(s)), shrink = expf(top - m);
        prob[lane] = expf(s - m);
        total = total * shrink + warp_sum(prob[lane]);
        top = m;
        __syncwarp();
        int n = min(32, last - base + 1);
        for (int i = lane; i < C; i += 32) {
            float v = acc[i] * shrink;
            for (int j = 0; j < n; j++)
                v += prob[j] * latent_get<QUANT>(p.cache, p.type, at(base + j) + (size_t)i);
            acc[i] = v;
        }
        __syncwarp();
    }
    for (int i = lane; i < C; i += 32)
        *latent_sum_at(p, t, h, i) =
            float_to_half(clamp_half(total > 0.0f ? acc[i] / total : 0.0f));
}

/* Host */

static bool latent_quant(const struct cuda_backend *cu)
{
    enum dtype t = cu->shape.k_type;
    return t == DT_Q8_0 || t == DT_Q4_0 || t == DT_F8_E4M3;
}

struct latent_scratch {
    float *raw_q, *low_q, *low; /* row widths: q_rank, q_rank (normed), q_rank + C + Dr */
    float *q, *wide, *a;        /* row widths: H*(Dn+Dr), H*C, H*Dv */
    uint16_t *x, *sums;         /* (H, max_tokens, .) fp16: queries, attention results */
    int32_t *lists;             /* (2, list_len) */
    size_t list_len;
    float *part, *ml;
    float *freq; /* (n_ropes, LATENT_MAX_ROPE / 2) */
    struct latent_heads heads[3];
    struct latent_expand expand; /* max_keys 0: not available */
    int first;                   /* first MLA layer */
};

static size_t latent_any_shared(const struct latent *l)
{
    return 4 * (size_t)(2 * l->kv_rank + l->rope_dim + 32) * 4;
}

bool latent_supported(const struct cuda_backend *cu, const struct latent *l, int layer,
                      struct error *err)
{
    if (latent_any_shared(l) > cu->shared_limit)
        return error_set(err, "layer %d: latents of %d + %d are not supported on cuda", layer,
                         l->kv_rank, l->rope_dim);
    if (!l->rope || l->rope_dim > LATENT_MAX_ROPE || l->rope->n_rot != l->rope_dim)
        return network_refuse(err, layer, "this rotation of latent attention is", "cuda");
    if ((l->wqa && l->q_norm.kind != NORM_RMS) || l->kv_norm.kind != NORM_RMS)
        return network_refuse(err, layer, "latent attention without its norms is", "cuda");
    if (l->wkb->bias || l->wvb->bias)
        return network_refuse(err, layer, "a bias of latent attention's heads is", "cuda");
    return true;
}

static size_t padded(int n)
{
    return align_up((size_t)n, TILE_K);
}

bool latent_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err)
{
    const struct network *net = cu->net;
    size_t low_q = 0, low = 0, q = 0, wide = 0, a = 0, x = 0, sums = 0, heads = 0, rank = 0,
           units = 0;
    size_t tokens = (size_t)b->max_tokens;
    int first = -1;
    for (int i = 0; i < net->n_layers; i++) {
        const struct latent *l = &net->layers[i].mixer.latent;
        if (net->layers[i].mixer.kind != MIXER_LATENT)
            continue;
        first = first < 0 ? i : first;
        size_t H = (size_t)l->n_heads, C = (size_t)l->kv_rank, Dr = (size_t)l->rope_dim;
        size_t all = latent_attn_units(cu, b->max_seqs, l->n_heads);
        const size_t need[] = {(size_t)l->q_rank,
                               (size_t)l->q_rank + C + Dr,
                               H * ((size_t)l->nope_dim + Dr),
                               H * C,
                               H * (size_t)l->v_dim,
                               H * padded(l->nope_dim),
                               H * padded(l->kv_rank),
                               H,
                               C,
                               l->index.n_chosen && list_attn_rows(cu) > all ? list_attn_rows(cu)
                                                                             : all};
        size_t *const most[] = {&low_q, &low, &q, &wide, &a, &x, &sums, &heads, &rank, &units};
        for (size_t j = 0; j < sizeof need / sizeof *need; j++)
            *most[j] = need[j] > *most[j] ? need[j] : *most[j];
    }
    if (first < 0)
        return true;
    struct latent_scratch *s = (struct latent_scratch *)mem_zalloc(1, sizeof *s);
    cu->latent = s;
    s->first = first;
    s->list_len = 16 + 3 * heads * (tokens / MOE_ROUTE_MIN_TILE + 1) + heads * tokens;
    size_t freq = (size_t)net->n_ropes * (LATENT_MAX_ROPE / 2) * 4;
    const struct device_buffer list[] = {
        {(void **)&s->raw_q, tokens * low_q * 4},  {(void **)&s->low_q, tokens * low_q * 4},
        {(void **)&s->low, tokens * low * 4},      {(void **)&s->q, tokens * q * 4},
        {(void **)&s->wide, tokens * wide * 4},    {(void **)&s->a, tokens * a * 4},
        {(void **)&s->x, tokens * x * 2},          {(void **)&s->sums, tokens * sums * 2},
        {(void **)&s->lists, 2 * s->list_len * 4}, {(void **)&s->part, units * rank * 4},
        {(void **)&s->ml, units * 2 * 4},          {(void **)&s->freq, freq}};
    if (!cuda_own(cu, list, (int)(sizeof list / sizeof *list), err))
        return false;
    for (int i = 0; i < net->n_ropes; i++)
        if (net->ropes[i].n_rot <= LATENT_MAX_ROPE)
            cuda_copy_in(cu->be, s->freq + i * (LATENT_MAX_ROPE / 2), net->ropes[i].freq,
                         (size_t)(net->ropes[i].n_rot / 2) * 4);
    for (int i = 0; i < 2; i++) {
        int32_t *at = s->lists + (size_t)i * s->list_len;
        s->heads[i].list.n_tiles = at;
        s->heads[i].list.tiles = at + 16;
        s->heads[i].list.pairs = at + 16 + 3 * heads * (tokens / MOE_ROUTE_MIN_TILE + 1);
    }
    s->expand.list = &s->heads[2];
    return latent_expand_prepare(cu, &s->expand, b, err);
}

void latent_close(struct cuda_backend *cu)
{
    mem_free(cu->latent);
}

void latent_heads_list(struct cuda_backend *cu, struct latent_heads *h, int rows, int width)
{
    if (h->width == width)
        return;
    h->width = width;
    cuda_launch(cu, latent_list_kernel, dim3((unsigned)ceil_div(h->n_heads * rows, 256)), 256, 0,
                LAUNCH_EARLY, h->list, h->n_heads, rows, width);
}

void latent_attn_any(struct cuda_backend *cu, const struct latent_args &p, int first, int rows)
{
    size_t shared = 4 * (size_t)(2 * p.rank + p.rope_dim + 32) * 4;
    auto kernel = latent_quant(cu) ? latent_any_kernel<true> : latent_any_kernel<false>;
    cuda_launch(cu, kernel, dim3((unsigned)ceil_div(p.n_heads, 4), (unsigned)rows), 128, shared,
                LAUNCH_EARLY, p, first);
}

static void latent_rows(struct cuda_backend *cu, const struct latent_row_args &p, int rows,
                        bool quant)
{
    auto kernel = quant ? latent_row_kernel<true> : latent_row_kernel<false>;
    step_mark(cu);
    cuda_launch(cu, kernel, dim3((unsigned)rows), 256, 32 * 4, LAUNCH_EARLY, p);
    step_mark_end(cu, STAGE_QKV);
}

/* Fuses both down-projections of the stream into one matrix if possible: output rows of wqa,
 * then of wkva. */
static bool latent_fuse_down(const struct cuda_backend *cu, const struct latent *l,
                             struct matrix *m)
{
    if (!l->wqa)
        return false;
    const struct matrix *a = cuda_matrix(l->wqa), *b = cuda_matrix(l->wkva);
    if (a->bias || b->bias || a->n_seg + b->n_seg > MAX_SEGS || lora_changes(cu, a) ||
        lora_changes(cu, b))
        return false;
    *m = *a;
    for (int i = 0; i < b->n_seg; i++) {
        struct seg *s = &m->seg[m->n_seg++];
        *s = b->seg[i];
        s->row0 += a->n_out;
        s->tile0 += a->n_tiles;
    }
    m->n_out += b->n_out;
    m->n_tiles += b->n_tiles;
    m->set = b->set > m->set ? b->set : m->set;
    m->max_tile_bytes =
        b->max_tile_bytes > m->max_tile_bytes ? b->max_tile_bytes : m->max_tile_bytes;
    return true;
}

/* Down-projections of the stream: the low-rank query (or, without one, the queries) and the
 * latents, all raw. p records where they are. */
static void latent_project_down(struct cuda_backend *cu, const struct mixer *m,
                                struct latent_row_args *p)
{
    const struct latent *l = &m->latent;
    struct latent_scratch *b = cu->latent;
    struct matrix both;
    p->low = b->low;
    p->ld_low = l->kv_rank + l->rope_dim;
    p->from_q = b->raw_q;
    p->ld_q = l->q_rank;
    if (latent_fuse_down(cu, l, &both)) {
        const struct mixer_product product = {&both, b->low};
        mixer_products(cu, &m->block.in, &product, 1);
        p->from_q = b->low;
        p->low = b->low + l->q_rank;
        p->ld_low = p->ld_q = both.n_out;
    } else {
        const struct mixer_product products[] = {
            {cuda_matrix(l->wqa ? l->wqa : l->wqb), l->wqa ? b->raw_q : b->q},
            {cuda_matrix(l->wkva), b->low}};
        mixer_products(cu, &m->block.in, products, 2);
    }
}

/* Queries (rows, H*(Dn+Dr)) from the low-rank query. Returns true if the GEMV kernel of a single
 * row applied the norm itself; otherwise latent_row_kernel ran and has also stored the cache
 * rows. */
static bool latent_project_q_up(struct cuda_backend *cu, const struct latent *l, int rows,
                                struct latent_row_args *p, bool quant)
{
    struct latent_scratch *b = cu->latent;
    struct rows x = rows_of(b->low_q, rows, l->q_rank);
    struct pick_case c = {};
    c.rows = rows;
    c.w = cuda_matrix(l->wqb);
    c.x = &x;
    c.y = b->q;
    const struct cuda_pick *pick = pick_find(cu, PICK_LINEAR, &c);
    if (rows == 1 && pick->takes == TAKES_NORM && l->q_norm.gain && !lora_changes(cu, c.w)) {
        c.in = norm_in{};
        c.in.x = p->from_q;
        c.in.gain = l->q_norm.gain;
        c.in.eps = l->q_norm.eps;
        step_mark(cu);
        pick_go(cu, pick, &c);
        step_mark_end(cu, STAGE_QKV);
        return true;
    }
    p->low_q = b->low_q;
    latent_rows(cu, *p, rows, quant);
    p->low_q = NULL;
    pick_run(cu, PICK_LINEAR, &c, STAGE_QKV);
    return false;
}

/* y (rows, H, n_out): every head's x times its matrix. Returns true if the kernel for few rows
 * does the neighbouring operations, too. dry_run: returns that without launching. */
static bool latent_product(struct cuda_backend *cu, const struct weight *w, int i,
                           const struct step *s, float *y, enum stage stage, bool dry_run)
{
    struct pick_case c = {};
    c.rows = s->n_tokens;
    c.w = cuda_matrix(w);
    c.y = y;
    c.step = s;
    c.heads = &cu->latent->heads[i];
    const struct cuda_pick *p = pick_find(cu, PICK_HEADS, &c);
    if (!dry_run) {
        step_mark(cu);
        pick_go(cu, p, &c);
        step_mark_end(cu, stage);
    }
    return p->takes == TAKES_NORM;
}

/* Computes queries (rows, H*(Dn+Dr)) and latents. Returns true if the latents are in the cache;
 * otherwise p has the remaining work. */
static bool latent_project(struct cuda_backend *cu, const struct mixer *m, int layer,
                           const struct latent_rope &rope, const struct step *s,
                           struct latent_row_args *p)
{
    const struct latent *l = &m->latent;
    p->step = *s;
    p->q_gain = l->q_norm.gain;
    p->kv_gain = l->kv_norm.gain;
    p->q_eps = l->q_norm.eps;
    p->kv_eps = l->kv_norm.eps;
    p->q_rank = l->q_rank;
    p->rank = l->kv_rank;
    p->rope = rope;
    p->cache = (uint8_t *)cu->kv[layer].k;
    p->type = cu->shape.k_type;
    latent_project_down(cu, m, p);
    return l->wqa && !latent_project_q_up(cu, l, s->n_tokens, p, latent_quant(cu));
}

/* Queries from row `first` on: applies RoPE, and converts to fp16 for the per-head product. */
static void latent_queries(struct cuda_backend *cu, const struct latent *l, const struct step *s,
                           const struct latent_rope &rope, int first, bool to_fp16)
{
    struct latent_scratch *b = cu->latent;
    int rows = s->n_tokens - first;
    step_mark(cu);
    cuda_launch(cu, latent_query_kernel, dim3((unsigned)ceil_div(l->n_heads, 4), (unsigned)rows),
                128, 0, LAUNCH_EARLY, *s, b->q, to_fp16 ? b->x : NULL, (int)padded(l->nope_dim),
                l->n_heads, l->nope_dim, rope, first);
    step_mark_end(cu, STAGE_QKV);
}

/* The rows of s, absorbed: queries into the latent space, attention there, and back to b->a.
 * row: the cache rows still to be stored, or NULL. choice: the keys that rows see; NULL = all. */
static void latent_absorbed(struct cuda_backend *cu, const struct latent *l, struct latent_args p,
                            const struct step *s, const struct latent_row_args *row,
                            const struct latent_rope &rope, const struct index_choice *choice)
{
    struct latent_scratch *b = cu->latent;
    struct latent_heads *in = &b->heads[0], *out = &b->heads[1];
    bool quant = latent_quant(cu);
    int T = s->n_tokens;
    in->x = b->x;
    in->q = b->q;
    in->queries = true;
    in->quant = quant;
    in->store = row != NULL;
    in->row = row ? *row : latent_row_args{};
    in->row.step = *s;
    in->row.rope = rope;
    if (!latent_product(cu, l->wkb, 0, s, b->wide, STAGE_QKV, true)) {
        if (row)
            latent_rows(cu, *row, T, quant);
        latent_queries(cu, l, s, rope, 0, true);
    }
    latent_product(cu, l->wkb, 0, s, b->wide, STAGE_QKV, false);
    p.step = *s;
    out->x = b->sums;
    out->attn = &p;
    out->splits = latent_splits{};
    p.splits = latent_product(cu, l->wvb, 1, s, b->a, STAGE_ATTENTION, true) ? &out->splits : NULL;
    struct pick_case c = {};
    c.step = s;
    c.latent = &p;
    step_mark(cu);
    p.choice = choice;
    if ((c.rows = T) && choice)
        pick_run(cu, PICK_COMPRESSED, &c, N_STAGES);
    if ((c.rows = s->n_decode) && !choice)
        pick_run(cu, PICK_LATENT_DECODE, &c, N_STAGES);
    p.expand = NULL;
    if ((c.rows = T - s->n_decode) && !choice)
        pick_run(cu, PICK_LATENT_PROMPT, &c, N_STAGES);
    step_mark_end(cu, STAGE_ATTENTION);
    latent_product(cu, l->wvb, 1, s, b->a, STAGE_ATTENTION, false);
    out->attn = NULL;
}

struct rows latent_mix(struct cuda_backend *cu, const struct mixer *m, int layer)
{
    const struct latent *l = &m->latent;
    struct latent_scratch *b = cu->latent;
    struct step s = mtp_rows(cu);
    int T = s.n_tokens, H = l->n_heads;
    struct latent_rope rope = {b->freq + (l->rope - cu->net->ropes) * (LATENT_MAX_ROPE / 2),
                               l->rope->mscale, l->rope_dim, l->interleaved};
    /* Work lists depend on the step's rows only and serve all its layers. A step of an MTP block
     * has one layer, so it rebuilds them. */
    for (int i = 0; i < 3; i++) {
        if (layer == b->first || layer == network_depth(cu->net) || b->heads[i].n_heads != H)
            b->heads[i].width = 0;
        b->heads[i].n_heads = H;
    }
    struct latent_row_args row = {};
    struct index_choice choice;
    bool chosen = index_choose(cu, m, layer, &s, &choice);
    bool stored = latent_project(cu, m, layer, rope, &s, &row);
    if (l->temp_beta != 0) {
        int width = H * (l->nope_dim + l->rope_dim);
        cuda_launch(cu, latent_temperature_kernel,
                    dim3((unsigned)ceil_div(width, 1024), (unsigned)T), 256, 0, LAUNCH_EARLY, s,
                    b->q, width, l->temp_beta, l->temp_len);
    }
    struct latent_args p = {};
    p.step = s;
    p.cache = (const uint8_t *)cu->kv[layer].k;
    p.page_len = cu->shape.page_len;
    p.type = cu->shape.k_type;
    p.q = b->wide;
    p.qr = b->q;
    p.sums = b->sums;
    p.ldx = (int)padded(l->kv_rank);
    p.n_heads = H;
    p.nope_dim = l->nope_dim;
    p.rope_dim = l->rope_dim;
    p.rank = l->kv_rank;
    p.scale = l->scale;
    p.part = b->part;
    p.ml = b->ml;
    b->expand.wkb = cuda_matrix(l->wkb);
    b->expand.wvb = cuda_matrix(l->wvb);
    b->expand.v_dim = l->v_dim;
    b->expand.a = b->a;
    b->expand.fp16_out = pick_fp16_only(cu, T) && H * l->v_dim % TILE_K == 0;
    p.expand = b->expand.max_keys ? &b->expand : NULL;
    struct pick_case c = {};
    c.step = &s;
    c.latent = &p;
    c.rows = T - s.n_decode;
    const struct cuda_pick *prompt =
        c.rows && !chosen ? pick_find(cu, PICK_LATENT_PROMPT, &c) : NULL;
    if (!prompt || prompt->takes != TAKES_NORM) {
        latent_absorbed(cu, l, p, &s, stored ? NULL : &row, rope, chosen ? &choice : NULL);
        return rows_of(b->a, T, H * l->v_dim);
    }
    if (!stored)
        latent_rows(cu, row, T, latent_quant(cu));
    struct step decodes = s;
    decodes.n_tokens = decodes.n_seqs = s.n_decode;
    if (s.n_decode)
        latent_absorbed(cu, l, p, &decodes, NULL, rope, NULL);
    latent_queries(cu, l, &s, rope, s.n_decode, false);
    step_mark(cu);
    pick_go(cu, prompt, &c);
    step_mark_end(cu, STAGE_ATTENTION);
    struct rows a = rows_of(b->a, T, H * l->v_dim);
    a.fp16 = b->expand.fp16_out;
    a.n_floats = a.fp16 ? s.n_decode : T;
    if (a.fp16 && s.n_decode)
        rows_join_fp16(cu, &a, s.n_decode);
    return a;
}
