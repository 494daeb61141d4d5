/*
 * The CUDA backend: the op table, its memory, and the step. Owns the stream, the scratch, the step
 * block and the recorded graphs. mixer, mlp and head are made of parts (add_norm, attn_in,
 * attention, linear, ffn, moe, gather) that only pick kernels; the kernels live beside.
 *
 * Three things are put off so that small steps need fewer kernels. add_norm waits for the part that
 * reads n (attn_in, moe, ffn, linear) and becomes one with it; the residual it writes goes to a
 * shadow of x (see struct cuda_backend.alias), since other blocks still read x. attn_in of a
 * decode-only step leaves the raw projections for attention to rotate and store. A product of one
 * row (linear) waits for experts that read its sum, whose router it can take along. Whatever is
 * still put off when something else wants to see it is done then (flush).
 */
#include "backend/cuda/cuda.h"

extern "C" {
#include "base/mem.h"
#include "sample/sampler.h"
const uint16_t *quant_grids(void);
}

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void cuda_fail(struct cuda_backend *cu, cudaError_t e, const char *what)
{
    if (cu->failed)
        return;
    cu->failed = true;
    error_set(&cu->error, "CUDA: %s (%s) in %.100s", cudaGetErrorString(e), cudaGetErrorName(e),
              what);
}

/* Memory */

static double gib(size_t bytes)
{
    return (double)bytes / (double)(1 << 30);
}

static void *cuda_alloc(struct backend *be, size_t bytes, const char *what, struct error *err)
{
    struct cuda_backend *cu = cuda_self(be);
    void *p = NULL;
    size_t rounded = align_up(bytes ? bytes : 1, 256);
    cudaError_t e = cudaMalloc(&p, rounded);
    if (e != cudaSuccess) {
        size_t free_bytes = 0, total = 0;
        cudaGetLastError();
        cudaMemGetInfo(&free_bytes, &total);
        error_set(err,
                  "out of GPU memory: %.2f GiB for %s, but %.2f of %.2f GiB are free and this "
                  "process holds %.2f",
                  gib(rounded), what, gib(free_bytes), gib(total), gib(cu->allocated));
        return NULL;
    }
    cu->allocated += rounded;
    CUDA_TRY(cu, cudaMemsetAsync(p, 0, rounded, cu->stream));
    return p;
}

static void cuda_free(struct backend *be, void *p, size_t bytes)
{
    struct cuda_backend *cu = cuda_self(be);
    if (!p)
        return;
    cudaStreamSynchronize(cu->stream);
    cudaFree(p);
    cu->allocated -= align_up(bytes ? bytes : 1, 256);
}

static void flush(struct cuda_backend *cu);
static void *real(struct cuda_backend *cu, const void *p);

static void cuda_copy_in(struct backend *be, void *dst, const void *host, size_t bytes)
{
    struct cuda_backend *cu = cuda_self(be);
    flush(cu);
    cu->half_of = cu->panels_of = cu->records_of = NULL;
    CUDA_TRY(cu, cudaMemcpyAsync(real(cu, dst), host, bytes, cudaMemcpyHostToDevice, cu->stream));
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
}

static void cuda_copy_out(struct backend *be, void *host, const void *src, size_t bytes)
{
    struct cuda_backend *cu = cuda_self(be);
    flush(cu);
    resid_floats(cu, cu->owed);
    CUDA_TRY(cu, cudaMemcpyAsync(host, real(cu, src), bytes, cudaMemcpyDeviceToHost, cu->stream));
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
}

/* Scratch */

struct want {
    void **p;
    size_t bytes;
};

static bool allocate(struct cuda_backend *cu, const struct want *list, int n, struct error *err)
{
    for (int i = 0; i < n; i++) {
        CHECK(cu->n_owned < (int)(sizeof cu->owned / sizeof *cu->owned), "too many blocks");
        *list[i].p = cuda_alloc(&cu->be, list[i].bytes, "working memory", err);
        if (!*list[i].p)
            return false;
        cu->owned[cu->n_owned].p = *list[i].p;
        cu->owned[cu->n_owned++].bytes = list[i].bytes;
    }
    return true;
}

static bool pinned(void **host, void **mapped, size_t bytes, struct error *err)
{
    if (cudaHostAlloc(host, bytes, cudaHostAllocMapped) != cudaSuccess)
        return error_set(err, "no pinned host memory (%zu bytes)", bytes);
    if (mapped && cudaHostGetDevicePointer(mapped, *host, 0) != cudaSuccess)
        return error_set(err, "pinned host memory cannot be mapped");
    return true;
}

static size_t max_split_units(const struct cuda_backend *cu)
{
    const struct shape *s = &cu->shape;
    size_t most = 0;
    for (int n = 1; n <= s->max_seqs; n++) {
        size_t u = (size_t)n * (size_t)s->n_kv_heads *
                   (size_t)ceil_div(s->n_heads / s->n_kv_heads, 8) * (size_t)attn_splits(cu, n);
        most = u > most ? u : most;
    }
    return most;
}

/* A network the kernels can run has one set of heads, one router and one eps, which stand in
 * cu->shape; experts that differ between layers, or are too many, are refused. */
static bool mlp_supported(const struct network *net, int i, const struct mlp **first,
                          struct error *err)
{
    const struct mlp *m = &net->layers[i].mlp;
    if (!m->router.w)
        return true;
    if (!*first)
        *first = m;
    const struct router *r = &m->router, *f = &(*first)->router;
    if (r->w->n_out > MAX_EXPERTS || r->n_used > MAX_USED)
        return error_set(err,
                         "layer %d: %d of %d experts are not supported on cuda (%d of %d at most)",
                         i, r->n_used, r->w->n_out, MAX_USED, MAX_EXPERTS);
    if (net->n_embd % 8 || m->experts.gate_up->n_in % 8)
        return network_refuse(err, i, "experts of a width that is no multiple of 8 are", "cuda");
    if (r->w->n_out != f->w->n_out || r->n_used != f->n_used || r->renorm != f->renorm ||
        r->scale != f->scale || m->experts.down->n_in != (*first)->experts.down->n_in)
        return network_refuse(err, i, "experts unlike those of the layers before are", "cuda");
    return true;
}

static bool cuda_supports(struct backend *be, const struct network *net, struct error *err)
{
    const struct mlp *first = NULL;
    float eps = net->head.norm.eps;
    struct network_max max;
    network_measure(net, &max);
    /* A row passes through a block's shared memory on its way to halves. */
    int widest = max.heads > net->n_embd ? max.heads : net->n_embd;
    if ((align_up((size_t)widest, TILE_K) + 64) * sizeof(float) > cuda_self(be)->shared_limit)
        return error_set(err, "rows of %d are not supported on cuda", widest);
    if (!network_check(net, 0, "cuda", err))
        return false;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *m = &net->layers[i].mixer;
        const struct attention *l = &m->attention;
        const struct norm *norms[] = {&m->block.in, &net->layers[i].mlp.block.in, &l->q_norm,
                                      &l->k_norm};
        if (l->k_dim > MAX_HEAD_DIM)
            return error_set(err, "layer %d: heads of %d are not supported on cuda (%d at most)", i,
                             l->k_dim, MAX_HEAD_DIM);
        for (int j = 0; j < 4; j++) {
            if (norms[j]->kind && eps == 0)
                eps = norms[j]->eps;
            if (norms[j]->kind && norms[j]->eps != eps)
                return network_refuse(err, i, "norms of several eps are", "cuda");
        }
        if (!mlp_supported(net, i, &first, err))
            return false;
    }
    return true;
}

/* What cuda_supports has made sure of, in one place. */
static struct shape shape_of(const struct network *net, const struct bounds *b)
{
    struct network_max max;
    network_measure(net, &max);
    struct shape s = {};
    s.n_layers = net->n_layers;
    s.n_embd = net->n_embd;
    s.n_vocab = net->n_vocab;
    s.n_heads = s.n_kv_heads = s.head_dim = 1; /* a network of no layers: tests */
    s.n_ff = max.n_ff;
    s.n_expert = max.n_expert;
    s.n_expert_used = max.n_expert_used;
    s.n_ff_exp = max.n_ff_exp;
    s.expert_scale = s.rope_mscale = 1;
    s.norm_eps = net->head.norm.eps;
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *m = &net->layers[i].mixer;
        const struct attention *l = &m->attention;
        const struct router *r = &net->layers[i].mlp.router;
        s.n_heads = l->n_heads;
        s.n_kv_heads = l->n_kv_heads;
        s.head_dim = l->k_dim;
        s.attn_scale = l->scale;
        s.n_rot = l->rope ? l->rope->n_rot : 0;
        s.rope_mscale = l->rope ? l->rope->mscale : 1;
        if (r->w) {
            s.norm_topk = r->renorm;
            s.expert_scale = r->scale == 0 ? 1 : r->scale;
        }
        const struct norm *norms[] = {&m->block.in, &net->layers[i].mlp.block.in, &l->q_norm,
                                      &l->k_norm};
        for (int j = 0; j < 4; j++)
            s.norm_eps = norms[j]->kind ? norms[j]->eps : s.norm_eps;
    }
    s.page_len = b->page_len;
    s.n_pages = b->n_pages;
    s.kv_type = b->kv_type;
    s.max_tokens = b->max_tokens;
    s.max_seqs = b->max_seqs;
    s.max_out = b->max_out;
    s.max_pages = b->max_pages;
    return s;
}

static bool cuda_prepare(struct backend *be, const struct network *net, const struct bounds *bounds,
                         struct error *err)
{
    struct cuda_backend *cu = cuda_self(be);
    CHECK(!cu->prepared, "prepare is called once");
    if (bounds->max_tokens > MAX_GRID)
        return error_set(err, "steps of %d rows are not supported on cuda (%d at most)",
                         bounds->max_tokens, MAX_GRID);
    cuda_ring_free(cu);
    cu->net = net;
    cu->shape = shape_of(net, bounds);
    const struct shape *s = &cu->shape;
    size_t tokens = (size_t)s->max_tokens, seqs = (size_t)s->max_seqs, out = (size_t)s->max_out;
    size_t embd = (size_t)s->n_embd, heads = (size_t)(s->n_heads * s->head_dim);
    size_t kv = (size_t)(s->n_kv_heads * s->head_dim), used = (size_t)s->n_expert_used;
    size_t ff = align_up((size_t)s->n_ff, TILE_K), ffe = align_up((size_t)s->n_ff_exp, TILE_K);
    size_t widest = embd > heads ? embd : heads;
    size_t hidden = used * ffe > ff ? used * ffe : ff;
    size_t groups = (size_t)(s->n_kv_heads * ceil_div(s->n_heads / s->n_kv_heads, 8));
    size_t units = max_split_units(cu);
    cu->max_edits = AHEAD_MAX_BIAS + 64 * s->max_out;
    cu->n_records = moe_grouped_records(s);
    cu->step_cap = STEP_HEAD + 64 + 4 * tokens + 2 * seqs + out + 16 +
                   2 * (tokens / 64 + seqs + 1) + seqs * (size_t)s->max_pages +
                   out * sizeof(struct row_sampler) / 4 +
                   (size_t)cu->max_edits * sizeof(struct row_edit) / 4;
    cu->edits = (struct logit_edit *)mem_zalloc((size_t)cu->max_edits, sizeof *cu->edits);
    for (int i = 0; i < 2; i++) {
        struct flight *f = &cu->flights[i];
        f->by_host = (bool *)mem_zalloc(out + 1, sizeof *f->by_host);
        f->samplers = (struct sampler **)mem_zalloc(out + 1, sizeof *f->samplers);
        cudaError_t e = cudaEventCreateWithFlags(&f->done, cudaEventDisableTiming);
        if (e != cudaSuccess)
            return error_set(err, "CUDA: %s", cudaGetErrorString(e));
        if (!pinned((void **)&cu->step_hosts[i], (void **)&cu->step_mappeds[i], cu->step_cap * 4,
                    err))
            return false;
    }
    struct want list[] = {
        {(void **)&cu->all, tokens * embd * 4},
        {(void **)&cu->out, (out + 1) * embd * 4},
        {(void **)&cu->n, tokens * embd * 4},
        {(void **)&cu->d, tokens * embd * 4},
        {(void **)&cu->q, tokens * heads * 4},
        {(void **)&cu->a, tokens * heads * 4},
        {(void **)&cu->a_out, (out + 1) * heads * 4},
        {(void **)&cu->logits_all, (out + 1) * (size_t)s->n_vocab * 4},
        {(void **)&cu->ones, embd * 4},
        {(void **)&cu->rope_freq, (size_t)(s->n_rot / 2 + 1) * 4},
        {(void **)&cu->rope, tokens * (size_t)(s->n_rot / 2 + 1) * sizeof(float2)},
        {(void **)&cu->step_dev, cu->step_cap * 4},
        {(void **)&cu->shadow, NORM_ROWS * embd * 4},
        {(void **)&cu->qkv, tokens * (heads + 2 * kv) * 4},
        {(void **)&cu->split_acc, units * 8 * (size_t)s->head_dim * 4},
        {(void **)&cu->split_ml, units * 16 * 4},
        {(void **)&cu->split_count, seqs * groups * 8 * 4},
        {(void **)&cu->split_records, attn_decode_split_record_bytes(cu)},
        {(void **)&cu->router,
         tokens * (size_t)(s->n_expert + 1) * 4 * (align_up(embd, TILE_K) / TILE_K)},
        {(void **)&cu->route_sums, 2 * SUM_WORDS * 8},
        {(void **)&cu->route_squares, SUM_BLOCKS * 4},
        {(void **)&cu->hidden, HIDDEN_ROWS * (hidden + 1) * 4},
        {(void **)&cu->records, (size_t)moe_grouped_records(s) * RECORD},
        {(void **)&cu->hidden_records, (size_t)moe_grouped_hidden_records(s) * RECORD},
        {(void **)&cu->panels, gemm_cluster_bytes(cu)},
        {(void **)&cu->moe_quad_meeting, moe_quad_meeting_bytes()},
        {(void **)&cu->half_in, tokens * align_up(widest, TILE_K) * 2},
        {(void **)&cu->half_scale, tokens * 4},
        {(void **)&cu->half_hidden, tokens * (hidden + 1) * 2},
        {(void **)&cu->expert_out, tokens * (used * embd + 1) * 4},
        {(void **)&cu->wide_part, gemm_wgmma_part_bytes(cu)},
        {(void **)&cu->route, moe_route_ints(s) * 4},
        {(void **)&cu->route_weight, tokens * (used + 1) * 4},
        {(void **)&cu->argmax_value, (out + 1) * ARGMAX_BLOCKS * 4},
        {(void **)&cu->argmax_index, (out + 1) * ARGMAX_BLOCKS * 4},
        {(void **)&cu->argmax_count, (out + 1) * 4},
        {(void **)&cu->chosen, (out + 1) * 4},
    };
    if (!allocate(cu, list, (int)(sizeof list / sizeof *list), err) ||
        !pinned((void **)&cu->tokens_host, (void **)&cu->tokens_mapped, 2 * (out + 1) * 4, err) ||
        !pinned((void **)&cu->logits_row, NULL, (size_t)s->n_vocab * 4, err))
        return false;
    CUDA_TRY(cu, cudaMemsetAsync(cu->split_records, 0xff, attn_decode_split_record_bytes(cu),
                                 cu->stream));
    moe_quad_prepare(cu);
    if (s->n_rot)
        cuda_copy_in(be, cu->rope_freq, net->layers[0].mixer.attention.rope->freq,
                     (size_t)(s->n_rot / 2) * 4);
    float *ones = (float *)mem_alloc(embd * sizeof *ones);
    for (size_t i = 0; i < embd; i++)
        ones[i] = 1;
    cuda_copy_in(be, cu->ones, ones, embd * sizeof *ones);
    mem_free(ones);
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
    cu->prepared = true;
    if (cu->failed && err)
        *err = cu->error;
    return !cu->failed;
}

/* The step */

struct step cuda_step(const struct cuda_backend *cu)
{
    const struct step_layout *l = &cu->layout;
    const int32_t *d = cu->step_dev;
    struct step s = {d,
                     d + l->tokens,
                     d + l->pos,
                     d + l->slot,
                     d + l->q_start,
                     d + l->kv_len,
                     d + l->seq_of,
                     d + l->out_rows,
                     d + l->pages,
                     cu->rope,
                     l->n_tokens,
                     l->n_seqs,
                     l->n_decode,
                     l->n_out};
    return s;
}

static int put_ints(struct cuda_backend *cu, int *used, const int32_t *src, int n)
{
    int at = *used;
    CHECK((size_t)(at + n) <= cu->step_cap, "the step block is full");
    memcpy(cu->step_host + at, src, (size_t)n * 4);
    *used = (at + n + 3) & ~3;
    return at;
}

/* Says how each out row's token is chosen. What bias and penalties change goes to the end of the
 * block; a row for whose changes there is no room is left to the host. */
static int put_samplers(struct cuda_backend *cu, struct flight *f, const struct batch *b, int used)
{
    struct row_sampler *rows = (struct row_sampler *)(cu->step_host + cu->layout.row_samplers);
    struct row_edit *edits = (struct row_edit *)(cu->step_host + used);
    int n_edits = 0;
    for (int i = 0; i < b->n_out; i++) {
        struct sampler *s = b->samplers ? b->samplers[i] : NULL;
        struct row_sampler r = {};
        f->samplers[i] = s;
        f->by_host[i] = false;
        if (s) {
            const struct sample_params *p = sampler_params(s);
            int n = sampler_edits(s, cu->edits, cu->max_edits - n_edits);
            f->by_host[i] = n < 0;
            for (int k = 0; k < n; k++) {
                const struct logit_edit *e = &cu->edits[k];
                struct row_edit to = {i, e->token, e->bias, e->repeat, e->less};
                edits[n_edits++] = to;
            }
            r.draws = n >= 0 && p->temp > 0;
            r.top_k = p->top_k;
            r.temp = p->temp;
            r.top_p = p->top_p;
            r.min_p = p->min_p;
            r.uniform = sampler_uniform(p->seed, sampler_counter(s));
        }
        rows[i] = r;
    }
    cu->step_host[STEP_EDITS] = n_edits;
    cu->step_host[STEP_EDITS_AT] = used;
    return used + n_edits * (int)(sizeof(struct row_edit) / 4);
}

static void cuda_begin(struct backend *be, const struct batch *b)
{
    struct cuda_backend *cu = cuda_self(be);
    struct step_layout *l = &cu->layout;
    CHECK(b->n_tokens <= cu->shape.max_tokens && b->n_seqs <= cu->shape.max_seqs &&
              b->n_out <= cu->shape.max_out,
          "a step of %d rows, %d sequences, %d outputs", b->n_tokens, b->n_seqs, b->n_out);
    CHECK(cu->n_begun - cu->n_ended < 2, "two steps are under way");
    int turn = (int)(cu->n_begun++ % 2);
    struct flight *f = &cu->flights[turn];
    f->n_out = b->n_out;
    f->launched = false;
    cu->step_host = cu->step_hosts[turn];
    cu->step_mapped = cu->step_mappeds[turn];
    cu->step_host[STEP_TOKENS_TO] = turn * (cu->shape.max_out + 1);
    cu->kv = b->kv;
    cu->pending.set = false;
    cu->linear.set = false;
    cu->n_routed = 0;
    cu->sum.y = NULL;
    cu->raw_qkv.set = false;
    cu->n_aliases = 0;
    cu->logits = NULL;
    cu->half_of = cu->panels_of = cu->records_of = NULL;
    cu->n_marks = 0;
    memset(l, 0, sizeof *l);
    l->n_tokens = b->n_tokens;
    l->n_seqs = b->n_seqs;
    l->n_decode = b->n_decode;
    l->n_out = b->n_out;
    l->out_is_all = b->n_out == b->n_tokens; /* ascending, so they are all of them */
    int used = STEP_HEAD;
    l->tokens = put_ints(cu, &used, b->tokens, b->n_tokens);
    l->pos = put_ints(cu, &used, b->pos, b->n_tokens);
    l->slot = put_ints(cu, &used, b->slot, b->n_tokens);
    l->q_start = put_ints(cu, &used, b->q_start, b->n_seqs + 1);
    l->kv_len = put_ints(cu, &used, b->kv_len, b->n_seqs);
    l->out_rows = put_ints(cu, &used, b->out_rows, b->n_out);
    l->row_samplers = used;
    used += b->n_out * (int)(sizeof(struct row_sampler) / 4);
    used = (used + 3) & ~3;
    l->seq_of = used;
    for (int i = 0; i < b->n_seqs; i++)
        for (int t = b->q_start[i]; t < b->q_start[i + 1]; t++)
            cu->step_host[l->seq_of + t] = i;
    l->q_tiles = used = (used + b->n_tokens + 3) & ~3;
    for (int i = b->n_decode; i < b->n_seqs; i++)
        for (int t = b->q_start[i]; t < b->q_start[i + 1]; t += 64) {
            cu->step_host[used++] = i;
            cu->step_host[used++] = t;
            l->n_q_tiles++;
        }
    l->pages = used = (used + 3) & ~3;
    int stride = 1;
    for (int i = 0; i < b->n_seqs; i++) {
        l->deep |= i < b->n_decode && b->kv_len[i] > DEEP_KEYS;
        int n = ceil_div(b->kv_len[i], cu->shape.page_len);
        stride = n > stride ? n : stride;
    }
    stride = stride < b->max_pages ? stride : b->max_pages;
    for (int i = 0; i < b->n_seqs; i++)
        memcpy(cu->step_host + used + (size_t)i * (size_t)stride,
               b->pages + (size_t)i * (size_t)b->max_pages, (size_t)stride * 4);
    used = put_samplers(cu, f, b, used + b->n_seqs * stride);
    CHECK((size_t)used <= cu->step_cap, "the step block is full");
    cu->step_host[STEP_PAGE_STRIDE] = stride;
    cu->step_host[STEP_INTS] = used;
    step_load(cu, used);
    if (be->profile) {
        be->profile->phase = b->n_decode == b->n_seqs;
        be->profile->steps[be->profile->phase]++;
        be->profile->tokens[be->profile->phase] += b->n_tokens;
    }
}

static bool same_layout(const struct step_layout *a, const struct step_layout *b)
{
    return a->n_tokens == b->n_tokens && a->n_seqs == b->n_seqs && a->n_decode == b->n_decode &&
           a->n_out == b->n_out && a->n_q_tiles == b->n_q_tiles && a->deep == b->deep;
}

static bool cuda_replay(struct backend *be, uint64_t key)
{
    struct cuda_backend *cu = cuda_self(be);
    if (be->profile) /* stages are timed op by op */
        return false;
    for (int i = 0; i < cu->n_graphs; i++) {
        struct graph *g = &cu->graphs[i];
        if (g->key != key || !same_layout(&g->layout, &cu->layout))
            continue;
        memcpy(cu->alias, g->alias, sizeof cu->alias);
        cu->n_aliases = g->n_aliases;
        cu->x = g->x;
        cu->logits = g->logits;
        CUDA_TRY(cu, cudaGraphLaunch(g->exec, cu->stream));
        return true;
    }
    return false;
}

static void cuda_record(struct backend *be, uint64_t key)
{
    struct cuda_backend *cu = cuda_self(be);
    /* Work that only prompts have is launched with sizes of its own: not recorded. */
    if (be->profile || cu->n_graphs == MAX_GRAPHS || cu->layout.n_decode != cu->layout.n_seqs)
        return;
    cudaError_t e = cudaStreamBeginCapture(cu->stream, cudaStreamCaptureModeThreadLocal);
    if (e != cudaSuccess)
        cuda_fail(cu, e, "the start of a recording");
    else
        cu->recording = key;
}

static void finish_recording(struct cuda_backend *cu)
{
    cudaGraph_t graph = NULL;
    struct graph *g = &cu->graphs[cu->n_graphs];
    g->key = cu->recording;
    g->layout = cu->layout;
    g->logits = cu->logits;
    memcpy(g->alias, cu->alias, sizeof g->alias);
    g->n_aliases = cu->n_aliases;
    g->x = cu->x;
    cu->recording = 0;
    cudaError_t e = cudaStreamEndCapture(cu->stream, &graph);
    if (e == cudaSuccess)
        e = cudaGraphInstantiate(&g->exec, graph, 0);
    if (e != cudaSuccess) {
        cuda_fail(cu, e, "the end of a recording");
    } else {
        cu->n_graphs++;
        CUDA_TRY(cu, cudaGraphLaunch(g->exec, cu->stream));
    }
    if (graph)
        cudaGraphDestroy(graph);
}

/* Profile: a pair of events around each op, read at the end of the step. */

static void mark_begin(struct cuda_backend *cu)
{
    if (!cu->be.profile || cu->n_marks == MAX_MARKS)
        return;
    if (cu->n_marks == cu->n_marks_made) {
        CUDA_TRY(cu, cudaEventCreateWithFlags(&cu->marks[cu->n_marks].a, cudaEventDefault));
        CUDA_TRY(cu, cudaEventCreateWithFlags(&cu->marks[cu->n_marks].b, cudaEventDefault));
        cu->n_marks_made++;
    }
    CUDA_TRY(cu, cudaEventRecord(cu->marks[cu->n_marks].a, cu->stream));
}

static void mark_end(struct cuda_backend *cu, enum stage stage)
{
    if (!cu->be.profile || cu->n_marks == MAX_MARKS)
        return;
    cu->marks[cu->n_marks].stage = stage;
    CUDA_TRY(cu, cudaEventRecord(cu->marks[cu->n_marks].b, cu->stream));
    cu->n_marks++;
}

static void read_marks(struct cuda_backend *cu)
{
    struct profile *p = cu->be.profile;
    for (int i = 0; p && i < cu->n_marks; i++) {
        float ms = 0;
        CUDA_TRY(cu, cudaEventElapsedTime(&ms, cu->marks[i].a, cu->marks[i].b));
        p->ns[p->phase][cu->marks[i].stage] += (double)ms * 1e6;
    }
    cu->n_marks = 0;
}

static void cuda_launch_step(struct backend *be)
{
    struct cuda_backend *cu = cuda_self(be);
    struct flight *f = &cu->flights[(cu->n_begun + 1) % 2]; /* the one begun last */
    if (f->launched)
        return;
    flush(cu);
    if (cu->recording)
        finish_recording(cu);
    CUDA_TRY(cu, cudaEventRecord(f->done, cu->stream));
    f->launched = true;
}

static bool cuda_end(struct backend *be, int32_t *tokens, struct error *err)
{
    struct cuda_backend *cu = cuda_self(be);
    int turn = (int)(cu->n_ended % 2);
    struct flight *f = &cu->flights[turn];
    if (cu->n_ended + 1 == cu->n_begun)
        cuda_launch_step(be);
    cu->n_ended++;
    CUDA_TRY(cu, cudaEventSynchronize(f->done));
    CUDA_TRY(cu, cudaGetLastError());
    read_marks(cu);
    const int32_t *chosen = cu->tokens_host + turn * (cu->shape.max_out + 1);
    for (int i = 0; i < f->n_out && tokens; i++) {
        struct sampler *s = f->samplers[i];
        tokens[i] = -1;
        if (!s || !cu->logits || cu->failed)
            continue;
        if (!f->by_host[i]) {
            tokens[i] = chosen[i];
            continue;
        }
        CHECK(cu->n_begun == cu->n_ended, "the logits are gone");
        size_t n = (size_t)cu->shape.n_vocab;
        cuda_copy_out(be, cu->logits_row, cu->logits + (size_t)i * n, n * sizeof(float));
        tokens[i] = sampler_pick(s, cu->logits_row);
    }
    if (!cu->failed)
        return true;
    if (err)
        *err = cu->error;
    return false;
}

/* Ops */

static const struct matrix *matrix_of(const struct weight *w)
{
    return &((const struct cuda_weight *)w->impl)->m;
}

static void *real(struct cuda_backend *cu, const void *p)
{
    for (int i = 0; i < cu->n_aliases; i++)
        if (cu->alias[i].named == p)
            return cu->alias[i].real;
    return (void *)p;
}

static void set_alias(struct cuda_backend *cu, const void *named, void *where)
{
    int i = 0;
    if (cu->half_of == named) /* written anew */
        cu->half_of = NULL;
    if (cu->panels_of == named)
        cu->panels_of = NULL;
    if (cu->records_of == named)
        cu->records_of = NULL;
    while (i < cu->n_aliases && cu->alias[i].named != named)
        i++;
    if (named == where) {
        if (i < cu->n_aliases)
            cu->alias[i] = cu->alias[--cu->n_aliases];
        return;
    }
    CHECK(i < MAX_ALIASES, "too many buffers live elsewhere");
    cu->alias[i].named = named;
    cu->alias[i].real = where;
    cu->n_aliases = i == cu->n_aliases ? i + 1 : cu->n_aliases;
}

/* The pending norm as the input of a small product; x + d then lives in the other buffer. */
static struct norm_in take_norm(struct cuda_backend *cu)
{
    struct pending_norm *p = &cu->pending;
    CHECK(!cu->linear.set, "a product put off for too long");
    struct norm_in in = {};
    in.x = (const float *)real(cu, p->x);
    in.d = (const float *)real(cu, p->d);
    in.gain = p->gain;
    in.eps = cu->shape.norm_eps;
    p->set = false;
    if (!p->d) /* x itself does not change */
        return in;
    in.x_out = in.x == cu->shadow ? p->x : cu->shadow;
    set_alias(cu, p->x, in.x_out);
    return in;
}

static void flush_linear(struct cuda_backend *cu)
{
    struct pending_linear *p = &cu->linear;
    if (!p->set)
        return;
    struct norm_in in = {};
    in.x = p->x;
    p->set = false;
    gemv_linear(cu, p->w, &in, p->y, 1);
}

static void norm_now(struct cuda_backend *cu, bool floats)
{
    struct pending_norm *p = &cu->pending;
    if (!p->set)
        return;
    flush_linear(cu);
    p->set = false;
    resid_floats(cu, (const float *)real(cu, p->d));
    resid_norm(cu, (float *)real(cu, p->x), (const float *)real(cu, p->d), p->gain, p->n, p->rows,
               floats);
}

static void flush_norm(struct cuda_backend *cu)
{
    norm_now(cu, true);
}

/* Before an op that reads x, maybe as halves only, when the norm is of many rows. */
static void norm_before(struct cuda_backend *cu, const float *x, bool floats)
{
    if (!cu->pending.set || cu->pending.rows <= NORM_ROWS)
        return;
    mark_begin(cu);
    norm_now(cu, floats || cu->pending.n != x);
    mark_end(cu, STAGE_NORM);
}

/* What ops put off for the one after them, other than norms. */
static void flush_rest(struct cuda_backend *cu)
{
    resid_sum(cu);
    flush_linear(cu);
    if (!cu->raw_qkv.set)
        return;
    cu->raw_qkv.set = false;
    struct step s = cuda_step(cu);
    attn_rotate(cu, &cu->raw_qkv.layer, &s, cu->qkv, cu->raw_qkv.q);
}

static void flush(struct cuda_backend *cu)
{
    norm_before(cu, NULL, true);
    resid_sum(cu);
    flush_norm(cu);
    flush_rest(cu);
}

/* True if `n` is what the pending norm will be, and a small product can make it on the way. */
static bool takes_norm(struct cuda_backend *cu, const float *n, int rows)
{
    if (cu->pending.set && cu->pending.n == n && cu->pending.rows == rows)
        return true;
    flush_norm(cu);
    return false;
}

static void start_stream(struct cuda_backend *cu, int rows)
{
    struct stream x = {cu->all, rows, false, false};
    flush(cu);
    set_alias(cu, cu->all, cu->all);
    cu->x = x;
}

static void op_embed(struct backend *be, const struct embed *e)
{
    struct cuda_backend *cu = cuda_self(be);
    struct step s = cuda_step(cu);
    start_stream(cu, s.n_tokens);
    mark_begin(cu);
    cuda_embed(cu, matrix_of(e->tokens), &s, cu->x.x);
    mark_end(cu, STAGE_EMBED);
}

/* x += d (may be NULL); n = norm(x) * gain */
static void add_norm(struct cuda_backend *cu, float *x, const float *d, const float *gain, float *n,
                     int rows)
{
    struct pending_norm p = {true, x, n, d, gain, rows};
    bool of_sum = d && cu->sum.y == d && cu->sum.rows == rows; /* resid_norm makes it */
    bool of_linear = d && cu->linear.set && cu->linear.y == d && rows == 1;
    if (!of_sum && !of_linear)
        flush(cu);
    if (rows)
        cu->pending = p;
    if (rows <= PANEL_ROWS) /* more wait for the op that reads n, and may want but halves */
        norm_before(cu, NULL, true);
}

static struct norm_in input_of(struct cuda_backend *cu, const float *x, int rows)
{
    if (takes_norm(cu, x, rows))
        return take_norm(cu);
    struct norm_in in = {};
    in.x = (const float *)real(cu, x);
    resid_floats(cu, in.x);
    return in;
}

/* Runs the row of the table that suits; x as the ops name it. A norm of x that waits becomes
 * part of it, or is made before. */
static void run_pick(struct cuda_backend *cu, enum pick_op op, struct pick_case *c, const float *x)
{
    struct norm_in in;
    c->norm_waits = cu->pending.set;
    c->x = (const float *)real(cu, x);
    const struct pick *p = pick_find(cu, op, c);
    if (p->takes == TAKES_NORM) {
        c->n = cu->pending.n;
        in = input_of(cu, x, c->rows);
        c->in = &in;
    } else {
        flush_norm(cu);
        c->x = (const float *)real(cu, x);
    }
    pick_go(cu, p, c);
}

static void linear_any(struct cuda_backend *cu, const struct matrix *w, const float *x, float *y,
                       int rows)
{
    struct pick_case c = {};
    c.rows = rows;
    c.w = w;
    c.y = y;
    run_pick(cu, PICK_LINEAR, &c, x);
}

/* [q k v] = n W^T; norms, RoPE; k and v to the cache */
static void attn_in(struct cuda_backend *cu, const struct attn_layer *l, const float *n, float *q)
{
    struct step s = cuda_step(cu);
    norm_before(cu, n, false);
    flush_rest(cu);
    set_alias(cu, q, q);
    mark_begin(cu);
    const struct matrix *w = matrix_of(l->wqkv);
    bool decodes = s.n_decode == s.n_tokens && attn_tensor(cu); /* turned there */
    struct pick_case c = {};
    c.rows = s.n_tokens;
    c.w = w;
    c.y = q;
    c.raw = decodes;
    c.layer = l;
    c.step = &s;
    const struct pick *p = pick_find(cu, PICK_QKV, &c);
    if (p->run) {
        flush_norm(cu);
        c.x = (const float *)real(cu, n);
    }
    pick_go(cu, p, &c);
    if (p->run) {
        mark_end(cu, STAGE_QKV);
        return;
    }
    linear_any(cu, w, n, cu->qkv, s.n_tokens);
    cu->raw_qkv.set = true;
    cu->raw_qkv.layer = *l;
    cu->raw_qkv.q = q;
    if (!decodes)
        flush_rest(cu);
    mark_end(cu, STAGE_QKV);
}

static void attention(struct cuda_backend *cu, const struct attn_layer *l, const float *q, float *a)
{
    struct step s = cuda_step(cu);
    bool raw = cu->raw_qkv.set && cu->raw_qkv.q == q;
    norm_before(cu, NULL, true);
    flush_norm(cu);
    if (!raw)
        flush_rest(cu);
    cu->raw_qkv.set = false;
    set_alias(cu, a, a);
    mark_begin(cu);
    attn_attend(cu, l, &s, raw ? cu->qkv : (const float *)real(cu, q), raw, a);
    mark_end(cu, STAGE_ATTENTION);
}

/* A product that might be one in front of experts: nothing that is timed by itself. (Behind
 * attn_decode_split.cu, which lets the next kernel start late, a router of its own was faster.) */
static bool may_route(struct cuda_backend *cu, const struct matrix *w, const float *x, int rows)
{
    return rows == 1 && cu->shape.n_expert && !cu->be.profile && !cu->layout.deep &&
           w->n_in % 8 == 0 && w->n_out == cu->shape.n_embd && !takes_norm(cu, x, 1);
}

/* y = x W^T + bias */
static void linear(struct cuda_backend *cu, const struct weight *w, const float *x, float *y,
                   int rows, enum stage stage)
{
    if (!rows)
        return;
    norm_before(cu, x, false);
    flush_rest(cu);
    mark_begin(cu);
    if (may_route(cu, matrix_of(w), x, rows)) {
        struct pending_linear put_off = {true, matrix_of(w), (const float *)real(cu, x), y};
        cu->linear = put_off;
    } else {
        linear_any(cu, matrix_of(w), x, y, rows);
    }
    set_alias(cu, y, y);
    mark_end(cu, stage);
}

static void ffn(struct cuda_backend *cu, const struct weight *gate_up, const struct weight *down,
                const float *x, float *y, int rows)
{
    if (!rows)
        return;
    norm_before(cu, x, false);
    flush_rest(cu);
    mark_begin(cu);
    struct pick_case c = {};
    c.rows = rows;
    c.w = matrix_of(gate_up);
    c.down = matrix_of(down);
    c.y = y;
    run_pick(cu, PICK_FFN, &c, x);
    set_alias(cu, y, y);
    mark_end(cu, STAGE_FFN);
}

static void moe(struct cuda_backend *cu, const struct mlp *l, const float *x, float *y, int rows)
{
    const struct matrix *router = matrix_of(l->router.w), *gu = matrix_of(l->experts.gate_up);
    const struct matrix *down = matrix_of(l->experts.down);
    const struct pending_linear *o = &cu->linear;
    const struct pending_norm *norm = &cu->pending;
    if (!rows)
        return;
    struct pick_case c = {};
    c.rows = rows;
    c.w = gu;
    c.down = down;
    c.router = router;
    c.y = y;
    /* The product in front waits, and nobody has seen its result but through the norm. */
    if (o->set && o->y == y && norm->set && norm->n == x && norm->d == y && rows == 1 &&
        norm->rows == 1)
        c.before = o;
    const struct pick *p = c.before ? pick_find(cu, PICK_MOE, &c) : NULL;
    bool product = p && p->takes == TAKES_PRODUCT;
    if (!product) {
        c.before = NULL;
        norm_before(cu, x, true); /* the router reads floats */
        flush_rest(cu);
        resid_floats(cu, (const float *)real(cu, x));
    }
    mark_begin(cu);
    if (product) {
        struct norm_in in = {};
        in.gain = norm->gain;
        in.eps = cu->shape.norm_eps;
        c.in = &in;
        c.stream = (float *)real(cu, norm->x);
        cu->linear.set = cu->pending.set = false;
        pick_go(cu, p, &c);
    } else {
        run_pick(cu, PICK_MOE, &c, x);
    }
    set_alias(cu, y, y);
    mark_end(cu, STAGE_EXPERTS);
}

/* dst = the out rows of src */
static void gather(struct cuda_backend *cu, const float *src, float *dst, int width)
{
    struct step s = cuda_step(cu);
    flush(cu);
    resid_floats(cu, (const float *)real(cu, src));
    if (cu->layout.out_is_all && s.n_tokens <= 4) {
        set_alias(cu, dst, real(cu, src));
        return;
    }
    set_alias(cu, dst, dst);
    step_gather(cu, &s, (const float *)real(cu, src), dst, width);
}

/* The rows a block reads: n = norm(x + d), or x itself where there is no norm. */
static const float *norm_stream(struct cuda_backend *cu, const struct norm *norm)
{
    struct stream *x = &cu->x;
    bool is_norm = norm->kind != NORM_NONE;
    if (is_norm || x->pending)
        add_norm(cu, x->x, x->pending ? cu->d : NULL, is_norm ? norm->gain : cu->ones, cu->n,
                 x->rows);
    x->pending = false;
    return is_norm ? cu->n : x->x;
}

static void narrow(struct cuda_backend *cu)
{
    struct stream *x = &cu->x;
    static const struct norm none = {NORM_NONE, NULL, NULL, 0};
    if (x->narrow)
        return;
    norm_stream(cu, &none);
    gather(cu, x->x, cu->out, cu->shape.n_embd);
    x->x = cu->out;
    x->rows = cu->layout.n_out;
    x->narrow = true;
}

static void op_mixer(struct backend *be, const struct mixer *m, int layer)
{
    struct cuda_backend *cu = cuda_self(be);
    const struct attention *a = &m->attention;
    struct attn_layer l = {a->wqkv, a->q_norm.gain, a->k_norm.gain, cu->kv[layer], a->window};
    const float *n = norm_stream(cu, &m->block.in), *rows = cu->a;
    attn_in(cu, &l, n, cu->q);
    attention(cu, &l, cu->q, cu->a);
    if (layer == cu->shape.n_layers - 1) {
        narrow(cu);
        gather(cu, cu->a, cu->a_out, cu->shape.n_heads * cu->shape.head_dim);
        rows = cu->a_out;
    }
    linear(cu, a->wo, rows, cu->d, cu->x.rows, STAGE_OUTPUT);
    cu->x.pending = cu->x.rows > 0;
}

static void op_mlp(struct backend *be, const struct mlp *m, int layer)
{
    (void)layer;
    struct cuda_backend *cu = cuda_self(be);
    const float *n = norm_stream(cu, &m->block.in);
    if (m->router.w)
        moe(cu, m, n, cu->d, cu->x.rows);
    else
        ffn(cu, m->dense.gate_up, m->dense.down, n, cu->d, cu->x.rows);
    cu->x.pending = cu->x.rows > 0;
}

static void op_head(struct backend *be, const struct head *h)
{
    struct cuda_backend *cu = cuda_self(be);
    narrow(cu);
    const float *n = norm_stream(cu, &h->norm);
    linear(cu, h->w, n, cu->logits_all, cu->x.rows, STAGE_HEAD);
}

static void op_sample(struct backend *be)
{
    struct cuda_backend *cu = cuda_self(be);
    flush(cu);
    mark_begin(cu);
    cu->logits = cu->logits_all;
    sample_tokens(cu, cu->logits, cu->layout.n_out);
    mark_end(cu, STAGE_SAMPLING);
}

static void op_logits(struct backend *be, int row, float *host)
{
    struct cuda_backend *cu = cuda_self(be);
    size_t n = (size_t)cu->shape.n_vocab;
    cuda_copy_out(be, host, cu->logits_all + (size_t)row * n, n * sizeof(float));
}

static void op_stream_put(struct backend *be, const float *host, int rows)
{
    struct cuda_backend *cu = cuda_self(be);
    start_stream(cu, rows);
    cuda_copy_in(be, cu->all, host, (size_t)rows * (size_t)cu->shape.n_embd * sizeof(float));
}

static void op_stream_get(struct backend *be, float *host, int rows)
{
    struct cuda_backend *cu = cuda_self(be);
    static const struct norm none = {NORM_NONE, NULL, NULL, 0};
    norm_stream(cu, &none);
    cuda_copy_out(be, host, cu->x.x, (size_t)rows * (size_t)cu->shape.n_embd * sizeof(float));
}

static void op_logits_put(struct backend *be, const float *host, int rows)
{
    struct cuda_backend *cu = cuda_self(be);
    cuda_copy_in(be, cu->logits_all, host, (size_t)rows * (size_t)cu->shape.n_vocab * 4);
}

/* Blocks that wait for each other must all be on the GPU at once, which two such kernels side by
 * side might keep each other from: of the backends that share a device, the first may launch
 * them. */
enum { MAX_DEVICES = 64 };
static bool waits_taken[MAX_DEVICES];

static bool take_waits(int device)
{
    return device < MAX_DEVICES &&
           !__atomic_exchange_n(&waits_taken[device], true, __ATOMIC_ACQ_REL);
}

static void cuda_close(struct backend *be)
{
    struct cuda_backend *cu = cuda_self(be);
    if (cu->stream)
        cudaStreamSynchronize(cu->stream);
    cuda_ring_free(cu);
    for (int i = 0; i < cu->n_graphs; i++)
        cudaGraphExecDestroy(cu->graphs[i].exec);
    for (int i = 0; i < cu->n_marks_made; i++) {
        cudaEventDestroy(cu->marks[i].a);
        cudaEventDestroy(cu->marks[i].b);
    }
    for (int i = 0; i < cu->n_owned; i++)
        cuda_free(be, cu->owned[i].p, cu->owned[i].bytes);
    void *host[] = {cu->step_hosts[0], cu->step_hosts[1], cu->tokens_host, cu->logits_row};
    for (int i = 0; i < 4; i++)
        if (host[i])
            cudaFreeHost(host[i]);
    for (int i = 0; i < 2; i++) {
        if (cu->flights[i].done)
            cudaEventDestroy(cu->flights[i].done);
        mem_free(cu->flights[i].samplers);
        mem_free(cu->flights[i].by_host);
    }
    if (cu->stream)
        cudaStreamDestroy(cu->stream);
    if (cu->may_wait)
        __atomic_store_n(&waits_taken[cu->device], false, __ATOMIC_RELEASE);
    cuda_log_close(cu);
    mem_free(cu->forced);
    mem_free(cu->edits);
    mem_free(cu);
}

static struct backend_ops make_ops(void)
{
    struct backend_ops o = {};
    o.name = "cuda";
    o.close = cuda_close;
    o.alloc = cuda_alloc;
    o.free = cuda_free;
    o.copy_in = cuda_copy_in;
    o.copy_out = cuda_copy_out;
    o.supports = cuda_supports;
    o.upload = cuda_upload;
    o.release = cuda_release;
    o.prepare = cuda_prepare;
    o.begin = cuda_begin;
    o.replay = cuda_replay;
    o.record = cuda_record;
    o.launch = cuda_launch_step;
    o.end = cuda_end;
    o.embed = op_embed;
    o.mixer = op_mixer;
    o.mlp = op_mlp;
    o.head = op_head;
    o.sample = op_sample;
    o.logits = op_logits;
    o.stream_put = op_stream_put;
    o.stream_get = op_stream_get;
    o.logits_put = op_logits_put;
    o.pick = pick_info;
    o.pick_force = pick_force;
    return o;
}

/* Every one of "a,b" is a row of pick.cu. */
static bool picks_exist(struct cuda_backend *cu, const char *names, struct error *err)
{
    for (const char *at = names; *at;) {
        int n = (int)strcspn(at, ",");
        struct pick_info p;
        bool found = !n;
        for (int i = 0; !found && pick_info(&cu->be, i, &p); i++)
            found = (int)strlen(p.name) == n && !strncmp(p.name, at, (size_t)n);
        if (!found)
            return error_set(err, "STEEL_PICK: no kernel is called %.*s (steel bench --kernels)", n,
                             at);
        at += n + (at[n] == ',');
    }
    return true;
}

static bool open_device(struct cuda_backend *cu, int device, struct error *err)
{
    cudaDeviceProp prop;
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0)
        return error_set(err, "no CUDA device: %s",
                         e != cudaSuccess ? cudaGetErrorString(e) : "none found");
    if (device >= n)
        return error_set(err, "no CUDA device %d: this machine has %d", device, n);
    if ((e = cudaSetDevice(device)) != cudaSuccess ||
        (e = cudaGetDeviceProperties(&prop, device)) != cudaSuccess)
        return error_set(err, "CUDA device %d: %s", device, cudaGetErrorString(e));
    cuda_log_open(cu);
    const char *names = getenv("STEEL_PICK");
    if (names && !picks_exist(cu, names, err))
        return false;
    pick_force(&cu->be, names);
    cu->device = device;
    cu->sm = prop.major * 10 + prop.minor;
    cu->n_sm = prop.multiProcessorCount;
    cu->shared_limit = prop.sharedMemPerBlockOptin;
    cu->shared_per_sm = prop.sharedMemPerMultiprocessor;
    if (cu->sm < 80)
        return error_set(err, "CUDA device %d (%s): compute capability %d.%d, 8.0 is needed",
                         device, prop.name, prop.major, prop.minor);
    if ((e = cudaStreamCreateWithFlags(&cu->stream, cudaStreamNonBlocking)) != cudaSuccess)
        return error_set(err, "CUDA device %d: %s", device, cudaGetErrorString(e));
#ifdef STEEL_CUDA_TRACE
    cudaMalloc(&cu->trace, sizeof(struct trace));
    cudaMemset(cu->trace, 0, sizeof(struct trace));
#endif
    struct want grid = {(void **)&cu->grids, QUANT_GRID_POINTS * sizeof(uint16_t)};
    if (!allocate(cu, &grid, 1, err))
        return false;
    cu->wgmma = gemm_wgmma_there(cu, (int *)cu->grids);
    cu->clusters = attn_clusters(cu);
    gemm_cluster_prepare(cu);
    cu->may_wait = cuda_blocks_meet() && take_waits(device);
    cuda_copy_in(&cu->be, cu->grids, quant_grids(), QUANT_GRID_POINTS * sizeof(uint16_t));
    if (cu->failed && err)
        *err = cu->error;
    return !cu->failed;
}

/* "cuda:N", "cuda" or NULL */
static int device_number(const char *device)
{
    int n = device && !strncmp(device, "cuda:", 5) ? atoi(device + 5) : 0;
    return n < 0 ? 0 : n;
}

extern "C" bool cuda_found(void)
{
    int n = 0;
    bool found = cudaGetDeviceCount(&n) == cudaSuccess && n > 0;
    cudaGetLastError();
    return found;
}

extern "C" size_t cuda_room(const char *device, double fraction)
{
    int n = 0, at = device_number(device);
    size_t free_bytes = 0, total = 0;
    cudaDeviceProp prop;
    if (cudaGetDeviceCount(&n) != cudaSuccess || at >= n || cudaSetDevice(at) != cudaSuccess ||
        cudaGetDeviceProperties(&prop, at) != cudaSuccess || prop.major < 8 ||
        cudaMemGetInfo(&free_bytes, &total) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    size_t used = total - free_bytes, allowed = (size_t)((double)total * fraction);
    return allowed > used ? allowed - used : 0;
}

extern "C" struct backend *backend_open_cuda(const struct backend_options *opt, struct error *err)
{
    static struct backend_ops ops;
    ops = make_ops();
    struct cuda_backend *cu = (struct cuda_backend *)mem_zalloc(1, sizeof *cu);
    cu->be.ops = &ops;
    cu->be.ahead = true;
    if (!open_device(cu, device_number(opt->device), err)) {
        cuda_close(&cu->be);
        return NULL;
    }
    return &cu->be;
}
