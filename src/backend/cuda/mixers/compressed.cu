/*
 * Compressed attention (struct compressed of layer.h) around its attention: queries and keys of the step's rows, and
 * compressors. A compressor's window is summed by the block of the row that ends it, from the sequence's state and the
 * step's rows in order, so prompts run in parallel and a row's bytes do not depend on how its prompt was cut. New states are
 * made in the same kernel if all sequences have one row, else in a second one.
 *
 * Owns the scratch of these layers and the layout of a state: that of the keys' compressor, then that of the indexer's; in
 * each, for every series, maxima, weights and weighted values, D each.
 */
#include "backend/cuda/mixers/compressed.cuh"
#include "backend/cuda/mixers/latent_row.cuh"
#include "backend/cuda/mixers/mixers.h"

extern "C" {
#include "base/mem.h"
}

#include <math.h>

enum { COMPRESS_THREADS = 256, COMPRESS_MAX = 2 /* compressors of a layer */ };

struct compressed_scratch {
    float *raw, *u, *kv;      /* (max_tokens, .): q_rank, q_rank (normed), D */
    float *cz[COMPRESS_MAX];  /* (max_tokens, 2*S*D) */
    uint16_t *sums;           /* (G, max_tokens, ldx) */
    float *part, *ml;         /* of splits */
    struct latent_heads outs; /* the products of groups */
    unsigned step;            /* of which outs has the work list */
    int most_entries;         /* of a sequence, with the longest windows */
};

/* Rows: u = norm(raw); k = norm(kv), turned and stored. */
struct compressed_rows_args {
    struct step step;
    const float *raw;
    float *u, *kv;
    struct gain q_norm, kv_norm;
    int q_rank, dim;
    const float2 *rope;
    int half;
    uint8_t *cache;
    int type, page_len, page_rows;
};

/* Turns pairs of the last values of a row in shared or global memory. A block. */
DEVICE void turn_last(float *row, int dim, const float2 *cos_sin, int half)
{
    float *x = row + dim - 2 * half;
    for (int i = (int)threadIdx.x; i < half; i += COMPRESS_THREADS) {
        float2 cs = cos_sin[i];
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cs.x - b * cs.y;
        x[2 * i + 1] = b * cs.x + a * cs.y;
    }
}

DEVICE bool cache_is_quant(int type)
{
    return type == DT_Q8_0 || type == DT_Q4_0 || type == DT_F8_E4M3;
}

/* A block stores a row of dim values as row number `at` of a plane. */
DEVICE void store_row(uint8_t *plane, int type, size_t at, const float *row, int dim)
{
    size_t first = at * (size_t)dim;
    if (cache_is_quant(type)) {
        for (int i = (int)threadIdx.x & ~31; i < dim; i += COMPRESS_THREADS)
            latent_put_block(plane, type, first + (size_t)i, row[i + lane_id()]);
        return;
    }
    for (int i = (int)threadIdx.x; i < dim; i += COMPRESS_THREADS)
        latent_put(plane, type, first + (size_t)i, row[i]);
}

/* A block: row *= norm */
DEVICE void norm_row(const struct gain &norm, float *row, int n, float *part)
{
    if (!norm.gain)
        return;
    float by = latent_rms(row, n, norm.eps, part);
    for (int i = (int)threadIdx.x; i < n; i += COMPRESS_THREADS)
        row[i] *= by * norm.gain[i];
}

/* Grid: (rows). */
static __global__ void __launch_bounds__(COMPRESS_THREADS)
    compressed_rows_kernel(const __grid_constant__ struct compressed_rows_args p)
{
    __shared__ float part[32];
    SHARED_BYTES(shared);
    float *row = (float *)shared; /* (dim) */
    dependency_trigger();
    dependency_wait();
    int t = (int)blockIdx.x, slot = p.step.slot[t], tid = (int)threadIdx.x;
    const float *raw = p.raw + (size_t)t * (size_t)p.q_rank;
    float *u = p.u + (size_t)t * (size_t)p.q_rank;
    float by = p.q_norm.gain ? latent_rms(raw, p.q_rank, p.q_norm.eps, part) : 1.0f;
    for (int i = tid; i < p.q_rank; i += COMPRESS_THREADS)
        u[i] = raw[i] * by * (p.q_norm.gain ? p.q_norm.gain[i] : 1.0f);
    if (slot < 0)
        return;
    for (int i = tid; i < p.dim; i += COMPRESS_THREADS)
        row[i] = p.kv[(size_t)t * (size_t)p.dim + (size_t)i];
    __syncthreads();
    norm_row(p.kv_norm, row, p.dim, part);
    __syncthreads();
    turn_last(row, p.dim, p.rope + (size_t)t * (size_t)p.half, p.half);
    __syncthreads();
    int page = slot / p.page_len;
    store_row(p.cache, p.type,
              (size_t)page * (size_t)p.page_rows + (size_t)(slot - page * p.page_len), row, p.dim);
}

/* Grid: (heads / 8, rows). A warp norms and turns a head of q in place, two adjacent values a lane. */
static __global__ void __launch_bounds__(256)
    compressed_heads_kernel(float *q, struct gain norm, const float2 *rope, int half, int n_heads,
                            int dim)
{
    dependency_trigger();
    dependency_wait();
    int h = (int)blockIdx.x * 8 + warp_id(), t = (int)blockIdx.y, lane = lane_id();
    if (h >= n_heads)
        return;
    float2 *head = (float2 *)(q + ((size_t)t * (size_t)n_heads + (size_t)h) * (size_t)dim);
    float sum = 0.0f;
    for (int i = lane; i < dim / 2; i += 32)
        sum += head[i].x * head[i].x + head[i].y * head[i].y;
    sum = warp_sum(sum);
    float by = norm.gain ? rsqrtf(sum / (float)dim + norm.eps) : 1.0f;
    for (int i = lane; i < dim / 2; i += 32) {
        float2 v = head[i];
        float a = v.x * by, b = v.y * by;
        if (norm.gain) {
            a *= norm.gain[2 * i];
            b *= norm.gain[2 * i + 1];
        }
        int pair = i - (dim / 2 - half);
        v = make_float2(a, b);
        if (pair >= 0) {
            float2 cs = rope[(size_t)t * (size_t)half + (size_t)pair];
            v = make_float2(a * cs.x - b * cs.y, b * cs.x + a * cs.y);
        }
        head[i] = v;
    }
}

struct compress_one {
    const float *cz, *bias; /* (n_tokens, 2*S*D), (rate, S*D) */
    int dim, series;        /* D, S */
    size_t at;              /* in a state */
    struct gain norm;
    const float *freq; /* (half) */
    int half;
    float mscale;
    uint8_t *plane;
    struct entry_layout entries;
};

struct compress_args {
    struct step step;
    struct compress_one of[COMPRESS_MAX];
    float *states;
    size_t len; /* of a state */
    int type;
};

/* The sums of a channel: the largest exponent, the sum of weights, that of weighted values. */
struct window_sum {
    float top, weight, value;
};

DEVICE void window_add(struct window_sum *s, float z, float c)
{
    float top = s->weight == 0.0f || z > s->top ? z : s->top;
    float old = s->weight == 0.0f ? 0.0f : expf(s->top - top), now = expf(z - top);
    s->top = top;
    s->weight = s->weight * old + now;
    s->value = s->value * old + now * c;
}

/* A sequence of the step: its rows from row `first` on, at positions from pos0 on, after its state `in` (< 0: none). */
struct window_seq {
    int first, pos0, in, open; /* open: the window that the state has begun */
};

DEVICE struct window_seq window_seq_of(const struct compress_args &p, int seq, int rate)
{
    int first = p.step.q_start[seq], pos0 = p.step.pos[first];
    struct window_seq s = {first, pos0, p.step.states[seq], pos0 / rate};
    return s;
}

/* Adds the rows of positions from .. to - 1 that are in the step to half `half` of channel d. */
DEVICE void window_rows(const struct compress_one &c, const struct window_seq &s, int from, int to,
                        int half, int d, struct window_sum *sum)
{
    size_t wide = (size_t)(c.series * c.dim), at = (size_t)(half * c.dim + d);
    for (int pos = max(from, s.pos0); pos < to; pos++) {
        const float *row = c.cz + (size_t)(s.first + pos - s.pos0) * 2 * wide;
        window_add(sum, row[wide + at] + c.bias[(size_t)(pos % c.entries.rate) * wide + at],
                   row[at]);
    }
}

/* Series i of the state's sums of channel d, of a slot. */
DEVICE float *window_state(const struct compress_args &p, const struct compress_one &c, int slot,
                           int i, int d)
{
    return p.states + (size_t)slot * p.len + c.at + (size_t)(3 * i) * (size_t)c.dim + (size_t)d;
}

DEVICE struct window_sum window_read(const struct compress_args &p, const struct compress_one &c,
                                     int slot, int i, int d)
{
    struct window_sum s = {0.0f, 0.0f, 0.0f};
    if (slot >= 0) {
        const float *from = window_state(p, c, slot, i, d);
        s.top = from[0];
        s.weight = from[c.dim];
        s.value = from[2 * c.dim];
    }
    return s;
}

/* The sums of channel d of window w, after the row at `last`. */
DEVICE struct window_sum window_sums(const struct compress_args &p, const struct compress_one &c,
                                     const struct window_seq &s, int w, int last, int d)
{
    int rate = c.entries.rate, ahead = w - s.open;
    struct window_sum sum = {0.0f, 0.0f, 0.0f};
    if (ahead < c.series)
        sum = window_read(p, c, s.in, ahead, d);
    if (c.series > 1 && ahead > 0)
        window_rows(c, s, (w - 1) * rate, w * rate, 0, d, &sum);
    window_rows(c, s, w * rate, last + 1, c.series - 1, d, &sum);
    return sum;
}

/* The state of channel d after the sequence's first n rows. */
struct window_after {
    struct window_sum of[2];
};
DEVICE struct window_after window_after_rows(const struct compress_args &p,
                                             const struct compress_one &c,
                                             const struct window_seq &s, int n, int d)
{
    int last = s.pos0 + n - 1, rate = c.entries.rate, w = (last + 1) / rate;
    struct window_after a;
    a.of[0] = window_sums(p, c, s, w, last, d);
    a.of[1] = window_sum{0.0f, 0.0f, 0.0f};
    if (c.series > 1) { /* of the window after it */
        if (w == s.open)
            a.of[1] = window_read(p, c, s.in, 1, d);
        window_rows(c, s, w * rate, last + 1, 0, d, &a.of[1]);
    }
    return a;
}

DEVICE void window_write(const struct compress_args &p, const struct compress_one &c,
                         const struct window_after &a, int slot, int d)
{
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (i < c.series) {
            float *to = window_state(p, c, slot, i, d);
            to[0] = a.of[i].top;
            to[c.dim] = a.of[i].weight;
            to[2 * c.dim] = a.of[i].value;
        }
}

/* New states of channel d of a sequence. The final slot may be the one read, so all is read first. */
DEVICE void window_states(const struct compress_args &p, const struct compress_one &c, int seq,
                          int d)
{
    int n = p.step.n_seqs, out = p.step.states[n + seq], save = p.step.states[2 * n + seq];
    if (out < 0) /* padding */
        return;
    struct window_seq s = window_seq_of(p, seq, c.entries.rate);
    int rows = p.step.q_start[seq + 1] - s.first;
    struct window_after last = window_after_rows(p, c, s, rows, d);
    if (save)
        window_write(p, c, window_after_rows(p, c, s, save, d), p.step.states[3 * n + seq], d);
    window_write(p, c, last, out, d);
}

/* Grid: (rows, compressors). A row that ends a window makes its entry. STATES: sequences have one row each, and the block
 * also makes its new state. */
template <bool STATES>
static __global__ void __launch_bounds__(COMPRESS_THREADS)
    compress_kernel(const __grid_constant__ struct compress_args p)
{
    __shared__ float part[32];
    __shared__ float2 cos_sin[LATENT_MAX_ROPE / 2];
    SHARED_BYTES(shared);
    float *entry = (float *)shared; /* (D) */
    dependency_trigger();
    dependency_wait();
    const struct compress_one &c = p.of[blockIdx.y];
    int t = (int)blockIdx.x, pos = p.step.pos[t], seq = p.step.seq_of[t], rate = c.entries.rate;
    int w = pos / rate, tid = (int)threadIdx.x;
    bool ends = p.step.slot[t] >= 0 && pos % rate == rate - 1;
    if (!STATES && !ends)
        return;
    struct window_seq s = window_seq_of(p, seq, rate);
    for (int d = tid; d < c.dim; d += COMPRESS_THREADS) {
        if (ends) {
            struct window_sum sum = window_sums(p, c, s, w, pos, d);
            entry[d] = sum.value / sum.weight;
        }
        if (STATES)
            window_states(p, c, seq, d);
    }
    if (!ends)
        return;
    for (int i = tid; i < c.half; i += COMPRESS_THREADS) {
        float angle = (float)(w * rate) * c.freq[i], sin, cos;
        sincosf(angle, &sin, &cos);
        cos_sin[i] = make_float2(cos * c.mscale, sin * c.mscale);
    }
    __syncthreads();
    norm_row(c.norm, entry, c.dim, part);
    __syncthreads();
    turn_last(entry, c.dim, cos_sin, c.half);
    __syncthreads();
    const int32_t *pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    store_row(c.plane, p.type, entry_row(c.entries, pages, w), entry, c.dim);
}

/* Grid: (blocks of 256 channels, sequences, compressors). */
static __global__ void __launch_bounds__(COMPRESS_THREADS)
    compress_states_kernel(const __grid_constant__ struct compress_args p)
{
    dependency_trigger();
    dependency_wait();
    const struct compress_one &c = p.of[blockIdx.z];
    int d = (int)(blockIdx.x * COMPRESS_THREADS + threadIdx.x);
    if (d < c.dim)
        window_states(p, c, (int)blockIdx.y, d);
}

/* Host */

bool compressed_supported(const struct cuda_backend *cu, const struct mixer *m, int layer,
                          struct error *err)
{
    const struct compressed *l = &m->compressed;
    const struct indexer *x = &l->index;
    const struct norm *norms[] = {&l->q_norm, &l->head_norm, &l->kv_norm, &l->compressor.norm,
                                  &x->compressor.norm};
    bool fits = l->dim % 2 == 0 && l->dim <= MAX_HEAD_DIM && l->window > 0 && l->rope &&
                l->rope->n_rot <= LATENT_MAX_ROPE && !l->rope->plane && !m->block.parallel &&
                !l->woa->bias && l->woa->n_in % 8 == 0;
    if (x->n_chosen)
        fits = fits && x->compressor.rate == l->compressor.rate && x->rope_last && !x->reuse &&
               !x->block && x->rope && x->rope->n_rot <= LATENT_MAX_ROPE && !x->rope->plane;
    for (int i = 0; i < 5; i++)
        fits = fits && norms[i]->kind <= NORM_RMS;
    if (align_up((size_t)l->woa->n_in, TILE_K) * sizeof(float) > cu->shared_limit)
        fits = false;
    return fits || network_refuse(err, layer, "such compressed attention is", "cuda");
}

bool compressed_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err)
{
    const struct network *net = cu->net;
    size_t tokens = (size_t)b->max_tokens, rank = 0, dim = 0, cz[COMPRESS_MAX] = {}, sums = 0;
    size_t groups = 0, part = 0;
    int entries = 0;
    bool quant = b->k_type == DT_Q8_0 || b->k_type == DT_Q4_0;
    for (int i = 0; i < net->n_layers; i++) {
        const struct compressed *l = &net->layers[i].mixer.compressed;
        if (net->layers[i].mixer.kind != MIXER_COMPRESSED)
            continue;
        if (quant && l->dim % 32)
            return error_set(err,
                             "layer %d: keys of %d in a quantised cache are not supported on cuda",
                             i, l->dim);
        const struct compressor *all[] = {&l->compressor, &l->index.compressor};
        if (all[0]->rate && !l->index.n_chosen)
            entries = b->max_pages * b->page_len / all[0]->rate;
        const size_t need[] = {(size_t)l->q_rank,
                               (size_t)l->dim,
                               all[0]->rate ? (size_t)all[0]->w->n_out : 0,
                               l->index.n_chosen ? (size_t)all[1]->w->n_out : 0,
                               (size_t)l->n_groups * align_up((size_t)l->woa->n_in, TILE_K),
                               (size_t)l->n_groups,
                               l->dim == LATENT_RANK ? list_attn_rows(cu) * (size_t)l->dim : 0};
        size_t *const most[] = {&rank, &dim, &cz[0], &cz[1], &sums, &groups, &part};
        for (size_t j = 0; j < sizeof need / sizeof *need; j++)
            *most[j] = need[j] > *most[j] ? need[j] : *most[j];
    }
    if (!groups)
        return true;
    struct compressed_scratch *s = (struct compressed_scratch *)mem_zalloc(1, sizeof *s);
    cu->compressed = s;
    s->most_entries = entries;
    size_t tiles = 3 * groups * (tokens / MOE_ROUTE_MIN_TILE + 1);
    int32_t *list = NULL;
    const struct device_buffer buffers[] = {{(void **)&s->raw, tokens * rank * 4},
                                            {(void **)&s->u, tokens * rank * 4},
                                            {(void **)&s->kv, tokens * dim * 4},
                                            {(void **)&s->cz[0], tokens * cz[0] * 4},
                                            {(void **)&s->cz[1], tokens * cz[1] * 4},
                                            {(void **)&s->sums, tokens * sums * 2},
                                            {(void **)&s->part, part * 4},
                                            {(void **)&s->ml, part * 4},
                                            {(void **)&list, (16 + tiles + groups * tokens) * 4}};
    if (!cuda_own(cu, buffers, (int)(sizeof buffers / sizeof *buffers), err))
        return false;
    s->outs.list.n_tiles = list;
    s->outs.list.tiles = list + 16;
    s->outs.list.pairs = list + 16 + tiles;
    return true;
}

void compressed_close(struct cuda_backend *cu)
{
    mem_free(cu->compressed);
}

static const float *freq_of(const struct cuda_backend *cu, const struct rope *rope)
{
    return cu->rope.freq + cu->rope.tables.of[rope - cu->net->ropes].at;
}

/* The products of what the mixer reads. Those of the indexer take their inputs as two parts. */
static void project(struct cuda_backend *cu, const struct mixer *m)
{
    const struct compressed *l = &m->compressed;
    struct compressed_scratch *b = cu->compressed;
    const struct mixer_product products[] = {
        {cuda_matrix(l->wqa), b->raw},
        {cuda_matrix(l->wkv), b->kv},
        {l->compressor.rate ? cuda_matrix(l->compressor.w) : NULL, b->cz[0]}};
    int n = l->compressor.rate ? 3 : 2;
    if (!l->index.n_chosen) {
        mixer_products(cu, &m->block.in, products, n);
        return;
    }
    struct rows x = resid_norm(cu, &cu->resid, cuda_gain(cu, &m->block.in), true);
    for (int i = 0; i < n; i++) {
        struct pick_case c = {};
        c.rows = x.n;
        c.x = &x;
        c.w = products[i].w;
        c.y = products[i].y;
        pick_run(cu, PICK_LINEAR, &c, STAGE_QKV);
    }
    step_mark(cu);
    index_product(cu, l->index.compressor.w, x.floats, x.n, b->cz[1]);
    step_mark_end(cu, STAGE_QKV);
}

/* u, keys and queries. */
static void finish_rows(struct cuda_backend *cu, const struct mixer *m, int layer,
                        const struct step *s)
{
    const struct compressed *l = &m->compressed;
    struct compressed_scratch *b = cu->compressed;
    struct compressed_rows_args p = {};
    p.step = *s;
    p.raw = b->raw;
    p.u = b->u;
    p.kv = b->kv;
    p.q_norm = cuda_gain(cu, &l->q_norm);
    p.kv_norm = cuda_gain(cu, &l->kv_norm);
    p.q_rank = l->q_rank;
    p.dim = l->dim;
    p.rope = step_rope(cu, l->rope);
    p.half = l->rope->n_rot / 2;
    p.cache = (uint8_t *)cu->kv[layer].k;
    p.type = cu->shape.k_type;
    p.page_len = cu->shape.page_len;
    p.page_rows = mixer_page_rows(m, cu->shape.page_len);
    step_mark(cu);
    cuda_launch(cu, compressed_rows_kernel, dim3((unsigned)s->n_tokens), COMPRESS_THREADS,
                (size_t)l->dim * 4, LAUNCH_EARLY, p);
    step_mark_end(cu, STAGE_QKV);
    struct rows u = rows_of(b->u, s->n_tokens, l->q_rank);
    struct pick_case c = {};
    c.rows = s->n_tokens;
    c.x = &u;
    c.w = cuda_matrix(l->wqb);
    c.y = cu->act.q;
    pick_run(cu, PICK_LINEAR, &c, STAGE_QKV);
    step_mark(cu);
    cuda_launch(cu, compressed_heads_kernel,
                dim3((unsigned)ceil_div(l->n_heads, 8), (unsigned)s->n_tokens), 256, 0,
                LAUNCH_EARLY, cu->act.q, cuda_gain(cu, &l->head_norm), p.rope, p.half, l->n_heads,
                l->dim);
    step_mark_end(cu, STAGE_QKV);
}

static struct compress_one compressor_of(const struct cuda_backend *cu, const struct compressor *c,
                                         const struct rope *rope, const float *cz)
{
    struct compress_one o = {};
    o.cz = cz;
    o.bias = c->bias;
    o.dim = c->dim;
    o.series = compressor_series(c);
    o.norm = cuda_gain(cu, &c->norm);
    o.freq = freq_of(cu, rope);
    o.half = rope->n_rot / 2;
    o.mscale = rope->mscale;
    o.entries.rate = c->rate;
    o.entries.page_len = cu->shape.page_len;
    return o;
}

static void compress(struct cuda_backend *cu, const struct mixer *m, int layer,
                     const struct step *s)
{
    const struct compressed *l = &m->compressed;
    const struct compressed_scratch *b = cu->compressed;
    int len = cu->shape.page_len, n = 1, dim = l->dim;
    struct compress_args p = {};
    if (!l->compressor.rate)
        return;
    p.step = *s;
    p.states = cu->kv[layer].state;
    p.len = mixer_state_len(m);
    p.type = cu->shape.k_type;
    p.of[0] = compressor_of(cu, &l->compressor, l->rope, b->cz[0]);
    p.of[0].plane = (uint8_t *)cu->kv[layer].k;
    p.of[0].entries.rows = mixer_page_rows(m, len);
    p.of[0].entries.first = len;
    if (l->index.n_chosen) {
        const struct compressor *c = &l->index.compressor;
        p.of[1] = compressor_of(cu, c, l->index.rope, b->cz[1]);
        p.of[1].plane = (uint8_t *)cu->kv[layer].index;
        p.of[1].entries.rows = compressor_page_rows(c, len);
        p.of[1].at = (size_t)(3 * compressor_series(&l->compressor) * l->dim);
        dim = c->dim > dim ? c->dim : dim;
        n = 2;
    }
    bool one = cu->step.layout.decodes;
    step_mark(cu);
    cuda_launch(cu, one ? compress_kernel<true> : compress_kernel<false>,
                dim3((unsigned)s->n_tokens, (unsigned)n), COMPRESS_THREADS, (size_t)dim * 4,
                LAUNCH_EARLY, p);
    if (!one)
        cuda_launch(
            cu, compress_states_kernel,
            dim3((unsigned)ceil_div(dim, COMPRESS_THREADS), (unsigned)s->n_seqs, (unsigned)n),
            COMPRESS_THREADS, 0, LAUNCH_EARLY, p);
    step_mark_end(cu, STAGE_ATTENTION);
}

/* y (rows, G*R) = the products of the groups' sums */
static void group_outputs(struct cuda_backend *cu, const struct compressed *l, const struct step *s,
                          int ldx)
{
    struct compressed_scratch *b = cu->compressed;
    struct latent_args at = {}; /* where the sums are */
    at.step = *s;
    at.sums = b->sums;
    at.ldx = ldx;
    at.rank = l->woa->n_in;
    at.n_heads = l->n_groups;
    b->outs.x = b->sums;
    b->outs.n_heads = l->n_groups;
    b->outs.attn = &at;
    b->outs.splits = latent_splits{};
    struct pick_case c = {};
    c.rows = s->n_tokens;
    c.w = cuda_matrix(l->woa);
    c.y = cu->act.attn;
    c.step = s;
    c.heads = &b->outs;
    const struct cuda_pick *pick = pick_find(cu, PICK_HEADS, &c);
    step_mark(cu);
    pick_go(cu, pick, &c);
    step_mark_end(cu, STAGE_ATTENTION);
    b->outs.attn = NULL;
}

struct rows compressed_mix(struct cuda_backend *cu, const struct mixer *m, int layer)
{
    const struct compressed *l = &m->compressed;
    struct compressed_scratch *b = cu->compressed;
    struct step s = cuda_step(cu);
    struct index_choice choice;
    if (b->step != cu->queue.n_begun || b->outs.n_heads != l->n_groups)
        b->outs.width = 0; /* the work list depends on the step's rows only */
    b->step = cu->queue.n_begun;
    project(cu, m);
    finish_rows(cu, m, layer, &s);
    compress(cu, m, layer, &s);
    struct compressed_args p = {};
    if (l->index.n_chosen && index_choose(cu, m, layer, &s, &choice))
        p.choice = choice;
    p.step = s;
    p.cache = (const uint8_t *)cu->kv[layer].k;
    p.type = cu->shape.k_type;
    p.window = l->window;
    p.entries.rate = l->compressor.rate;
    p.entries.page_len = p.entries.first = cu->shape.page_len;
    p.entries.rows = mixer_page_rows(m, cu->shape.page_len);
    p.q = cu->act.q;
    p.rope = step_rope(cu, l->rope);
    p.half = l->rope->n_rot / 2;
    p.sinks = l->sinks;
    p.scale = l->scale;
    p.n_heads = l->n_heads;
    p.dim = l->dim;
    p.group = l->n_heads / l->n_groups;
    p.sums = b->sums;
    p.ldx = (int)align_up((size_t)l->woa->n_in, TILE_K);
    int entries = !l->compressor.rate ? 0 : l->index.n_chosen ? l->index.n_chosen : b->most_entries;
    p.most_keys = l->window + entries;
    p.n_split = 1;
    p.part = b->part;
    p.ml = b->ml;
    struct pick_case c = {};
    c.rows = s.n_tokens;
    c.step = &s;
    c.compressed = &p;
    pick_run(cu, PICK_COMPRESSED, &c, STAGE_ATTENTION);
    group_outputs(cu, l, &s, p.ldx);
    return rows_of(cu->act.attn, s.n_tokens, l->wob->n_in);
}
