/* The reference and the backend under test side by side. See duo.h. */
#include "duo.h"

#include "backend/cpu/kvtile.h"
#ifdef STEEL_CUDA_SIM
#include "backend/cuda/device.h"
#endif
#include "base/clock.h"
#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *backend_name;
int light;
bool small;
double product_tol;
bool host_is_exact;
int n_checks, n_failed;
double worst;
uint64_t rng = 42;
const char *filter;
const char *forced;
uint64_t picked[128];
int64_t report_from;

void fail_if(bool bad, const char *what)
{
    if (bad) {
        fprintf(stderr, "test_ops: %s\n", what);
        exit(1);
    }
}

struct dims base_dims(void)
{
    return (struct dims){
        .n_embd = 256,
        .n_heads = 8,
        .n_kv_heads = 2,
        .head_dim = 64,
        .n_rot = 64,
        .n_vocab = 600,
        .n_ff = 512,
        .n_expert = 16,
        .n_expert_used = 4,
        .n_ff_exp = 256,
        .norm_topk = true,
        .expert_scale = 1.0f,
        .b = {.page_len = 16,
              .n_pages = 64,
              .k_type = DT_F16,
              .v_type = DT_F16,
              .max_tokens = 320,
              .max_seqs = 80,
              .max_out = 320,
              .max_pages = 40},
    };
}

static struct backend *open_named(bool host_experts, struct error *err)
{
    struct backend_options opt = {
        .device = backend_name, .threads = 2, .host_experts = host_experts};
#ifdef STEEL_CUDA_SIM
    opt.host = !host_experts   ? NULL
               : host_is_exact ? backend_open_ref()
                               : backend_open_cpu(&opt, err);
    return cuda_device.open(&opt, err);
#else
    return backend_open(&opt, err);
#endif
}

void duo_open(struct duo *d, const struct dims *s, int n_layers)
{
    struct error err = {0};
    memset(d, 0, sizeof *d);
    d->s = *s;
    d->rows = s->b.max_tokens;
    d->be[REF] = backend_open_ref();
    d->be[DEV] = open_named(s->n_host > 0, &err);
    fail_if(!d->be[DEV], err.msg);
    if (d->be[DEV]->ops->picks && forced)
        d->be[DEV]->ops->picks->force(d->be[DEV], forced);
    for (int i = 0; i < s->n_rot / 2; i++)
        d->freq[i] = powf(10000.0f, -2.0f * (float)i / (float)s->n_rot);
    for (int i = 0; i < s->n_rot / 2; i++) /* interleaved in small heads, else sections */
        d->plane[i] = (uint8_t)(s->head_dim < 128 ? i % 3 : 3 * i / (s->n_rot / 2));
    d->ropes[0] = (struct rope){s->n_rot, d->freq, 1.0f, s->heads & HEADS_PLANES ? d->plane : NULL};
    d->ropes[1] = (struct rope){s->n_rot / 4 * 2, d->freq, 0.8f, NULL};
    d->no_head = (struct weight){.n_in = s->n_embd, .n_out = s->n_vocab, .n_expert = 1};
    EACH(side)
    {
        d->net[side] = (struct network){.n_layers = n_layers,
                                        .n_embd = s->n_embd,
                                        .n_vocab = s->n_vocab,
                                        .layers = d->layers[side],
                                        .head.w = &d->no_head,
                                        .ropes = d->ropes,
                                        .n_ropes = 2};
        for (int i = 0; i < n_layers; i++)
            d->layers[side][i].mixer.attention =
                (struct attention){.n_heads = s->n_heads,
                                   .n_kv_heads = s->n_kv_heads,
                                   .k_dim = s->head_dim,
                                   .v_dim = s->head_dim,
                                   .rope = s->n_rot ? &d->ropes[0] : NULL,
                                   .scale = 1.0f / sqrtf((float)s->head_dim)};
    }
}

bool duo_runs(struct duo *d, const char *group)
{
    struct error err = {0};
    if (d->be[DEV]->ops->supports(d->be[DEV], &d->net[DEV], &err))
        return true;
    printf("skipped: %s: %s\n", group, err.msg);
    return false;
}

bool has_host_experts(const char *group)
{
    struct error err = {0};
    struct backend *be = open_named(false, &err);
    fail_if(!be, err.msg);
    bool can = be->own_memory && be->ops->tier;
    if (!can)
        printf("skipped: %s: all experts are in this backend's memory\n", group);
    be->ops->close(be);
    return can;
}

void duo_prepare(struct duo *d)
{
    struct error err = {0};
    EACH(side)
    {
        struct backend *be = d->be[side];
        fail_if(!be->ops->supports(be, &d->net[side], &err), err.msg);
        fail_if(!be->ops->prepare(be, &d->net[side], &d->s.b, &err), err.msg);
    }
}

void duo_close(struct duo *d)
{
    struct pick_info info;
    struct backend *dev = d->be[DEV];
    for (int i = 0; dev->ops->picks && dev->ops->picks->row(dev, i, &info); i++)
        picked[i] += info.runs;
    EACH(side)
    d->be[side]->ops->close(d->be[side]);
}

float *random_floats(size_t n, float scale)
{
    float *h = mem_alloc(n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        h[i] = scale * random_float(&rng);
    return h;
}

struct array array_random(struct duo *d, size_t n, float scale)
{
    struct error err = {0};
    struct array a = {.n = n};
    float *h = random_floats(n, scale);
    EACH(side)
    {
        struct backend *be = d->be[side];
        a.on[side] = be->ops->alloc(be, n * sizeof(float), "a test", &err);
        fail_if(!a.on[side], err.msg);
        be->ops->copy_in(be, a.on[side], h, n * sizeof(float));
    }
    mem_free(h);
    return a;
}

void array_free(struct duo *d, struct array *a)
{
    EACH(side)
    d->be[side]->ops->free(d->be[side], a->on[side], a->n * sizeof(float));
}

double distance(const float *got, const float *want, size_t n)
{
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        diff += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    return norm > 0 ? sqrt(diff / norm) : sqrt(diff);
}

void check_close(const char *what, const float *got, const float *want, size_t n, double tol)
{
    double e = distance(got, want, n);
    n_checks++;
    if (e > worst)
        worst = e;
    if (!(e <= tol)) {
        n_failed++;
        size_t bad = 0;
        double most = -1;
        for (size_t i = 0; i < n; i++) {
            double di = fabs((double)got[i] - want[i]);
            if (!(di <= most)) {
                most = di;
                bad = i;
                if (isnan(di))
                    break;
            }
        }
        printf("FAIL  %s: error %.3g (allowed %.3g); element %zu of %zu is %g, not %g\n", what, e,
               tol, bad, n, (double)got[bad], (double)want[bad]);
    }
}

/* The reference's copy: as floats, which the values are exactly. From anything else it makes floats anew
 * for every row of a step: as is only where most experts are not read at all. */
static bool weight_give(struct duo *d, const struct raw_weight *w, enum weight_role role,
                        struct weight *to, struct error *err)
{
    struct backend *be = d->be[REF];
    if (w->n_expert > 1 && w->n_expert > d->rows * d->s.n_expert_used)
        return be->ops->upload(be, w, role, to, err);
    size_t each = (size_t)w->n_in * (size_t)w->n_out;
    float *values = mem_alloc((size_t)w->n_expert * each * sizeof(float));
    const uint8_t **data = mem_alloc((size_t)w->n_expert * sizeof *data);
    for (int e = 0; e < w->n_expert; e++) {
        float *of = values + (size_t)e * each;
        for (int row = 0; row < w->n_out; row++)
            raw_weight_row(w, e, row, of + (size_t)row * (size_t)w->n_in);
        data[e] = (const uint8_t *)of;
    }
    struct raw_weight plain = {.n_in = w->n_in,
                               .n_out = w->n_out,
                               .n_expert = w->n_expert,
                               .n_seg = 1,
                               .seg = {{.type = DT_F32, .rows = w->n_out, .data = data}},
                               .bias = w->bias,
                               .transient = true};
    bool ok = be->ops->upload(be, &plain, role, to, err);
    mem_free(values);
    mem_free((void *)data);
    return ok;
}

void weight_new(struct duo *d, struct duo_weight *w, enum weight_role role,
                const struct random_spec *spec)
{
    struct error err = {0};
    struct random_weight host;
    random_weight_make(&host, spec, &rng);
    struct backend *dev = d->be[DEV];
    fail_if(!weight_give(d, &host.raw, role, &w->on[REF], &err), err.msg);
    host.raw.n_host = spec->n_host;
    fail_if(!dev->ops->upload(dev, &host.raw, role, &w->on[DEV], &err), err.msg);
    random_weight_free(&host); /* transient: both must have copied */
}

void weight_free(struct duo *d, struct duo_weight *w)
{
    EACH(side)
    d->be[side]->ops->release(d->be[side], &w->on[side]);
}

void mlp_new(struct duo *d, int layer, struct duo_mlp *m, int n_expert, int n_ff,
             enum dtype up_type, enum dtype down_type, enum dtype router_type)
{
    const struct dims *s = &d->s;
    enum weight_role role = n_expert <= 1 ? WEIGHT_LINEAR
                            : s->other    ? WEIGHT_EXPERTS_SHARED
                                          : WEIGHT_EXPERTS;
    struct random_spec router = {
        .n_in = s->n_embd, .n_expert = 1, .n_seg = 1, .rows = {n_expert}, .type = {router_type}};
    router.alike = s->alike;
    router.nudge = s->nudge;
    int own = n_expert > 1 && s->n_own ? s->n_own : n_expert;
    struct random_spec up = {.n_in = s->n_embd,
                             .n_expert = own,
                             .n_seg = 2,
                             .rows = {n_ff, n_ff},
                             .type = {up_type, up_type},
                             .group_len = n_expert > 1 ? 128 : 64};
    struct random_spec down = {.n_in = n_ff,
                               .n_expert = own,
                               .n_seg = 1,
                               .rows = {s->n_embd},
                               .type = {down_type},
                               .group_len = 32};
    router.bias = up.bias = down.bias = s->other;
    up.n_host = down.n_host = n_expert > 1 ? s->n_host : 0;
    if (own < n_expert && own > 1 && !s->other) { /* nobody may touch what nobody chooses */
        router.bias = true;
        router.low = s->first_own + 1;
        up.bad = down.bad = 1;
    }
    if (s->fused) {
        up.n_seg = 1;
        up.rows[0] = 2 * n_ff;
    }
    m->experts = n_expert > 1;
    m->other = s->other;
    if (m->other) {
        m->choice = array_random(d, (size_t)n_expert, 0.2f);
        m->scale = array_random(d, (size_t)n_expert, 1.0f);
    }
    if (m->experts)
        weight_new(d, &m->router, WEIGHT_ROUTER, &router);
    weight_new(d, &m->gate_up, role, &up);
    weight_new(d, &m->down, role, &down);
    bool shared = m->experts && m->other;
    if (shared) {
        struct random_spec gate = {
            .n_in = s->n_embd, .n_expert = 1, .n_seg = 1, .rows = {1}, .type = {DT_F32}};
        up.n_expert = down.n_expert = 1;
        up.n_host = down.n_host = 0;
        weight_new(d, &m->shared_up, WEIGHT_LINEAR, &up);
        weight_new(d, &m->shared_down, WEIGHT_LINEAR, &down);
        weight_new(d, &m->gate, WEIGHT_LINEAR, &gate);
    }
    EACH(side)
    {
        struct mlp *l = &d->layers[side][layer].mlp;
        if (m->experts)
            l->router = (struct router){.w = &m->router.on[side],
                                        .n_used = s->n_expert_used,
                                        .renorm = s->norm_topk,
                                        .scale = s->expert_scale};
        *(m->experts ? &l->experts : &l->dense) =
            (struct ffn){.gate_up = &m->gate_up.on[side],
                         .down = &m->down.on[side],
                         .act = s->other ? ACT_SWIGLU_CLAMP : ACT_SILU,
                         .alpha = 1.702f,
                         .limit = 0.6f};
        l->expert_first = s->first_own;
        if (!shared)
            continue;
        l->router.kind = ROUTER_SIGMOID;
        l->router.choice_bias = m->choice.on[side];
        l->router.expert_scale = m->scale.on[side];
        l->dense = l->experts;
        l->dense.gate_up = &m->shared_up.on[side];
        l->dense.down = &m->shared_down.on[side];
        l->dense_gate = &m->gate.on[side];
    }
}

void mlp_free(struct duo *d, struct duo_mlp *m)
{
    if (m->experts)
        weight_free(d, &m->router);
    weight_free(d, &m->gate_up);
    weight_free(d, &m->down);
    if (m->other && m->experts) {
        weight_free(d, &m->shared_up);
        weight_free(d, &m->shared_down);
        weight_free(d, &m->gate);
    }
    if (m->other) {
        array_free(d, &m->choice);
        array_free(d, &m->scale);
    }
}

void plan_planes(struct plan *p)
{
    for (int i = 0; i < 3 * p->b.n_tokens; i++)
        p->rope_pos[i] = (int32_t)(random_u64(&rng) % 1000);
    p->b.rope_pos = p->rope_pos;
}

void plan_embeds(struct plan *p, const struct dims *s, int every)
{
    size_t width = (size_t)(s->n_embd * (1 + s->n_levels));
    p->embed_rows = random_floats((size_t)p->b.n_tokens * width, 1.0f);
    p->b.embeds = p->embeds;
    p->b.n_embeds = 0;
    for (int i = p->b.n_tokens - 1; i >= 0; i--) {
        if (i % every)
            continue;
        p->embeds[p->b.n_embeds] = p->embed_rows + (size_t)i * width;
        p->tokens[i] = s->n_vocab + p->b.n_embeds++;
    }
}

void plan_make(struct plan *p, const struct dims *s, const int (*seqs)[2], int n, bool pad)
{
    memset(p, 0, sizeof *p);
    p->pages = mem_zalloc((size_t)(n * s->b.max_pages), sizeof(int32_t));
    int32_t *free_pages = mem_zalloc((size_t)s->b.n_pages, sizeof(int32_t));
    for (int i = 0; i < s->b.n_pages; i++)
        free_pages[i] = i;
    for (int i = s->b.n_pages; i > 1; i--) {
        int j = (int)(random_u64(&rng) % (uint64_t)i);
        int32_t t = free_pages[i - 1];
        free_pages[i - 1] = free_pages[j];
        free_pages[j] = t;
    }
    int used = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < n; i++) {
            if ((seqs[i][1] == 1) != (pass == 0))
                continue;
            int seq = p->b.n_seqs++, len = seqs[i][0] + seqs[i][1];
            int32_t *table = p->pages + (size_t)seq * (size_t)s->b.max_pages;
            for (int j = 0; j * s->b.page_len < len; j++) {
                fail_if(used == s->b.n_pages || j == s->b.max_pages, "the plan needs more pages");
                table[j] = free_pages[used++];
            }
            bool hidden = pad && i == n - 1;
            for (int j = 0; j < seqs[i][1]; j++) {
                int t = p->b.n_tokens++, at = seqs[i][0] + j;
                p->tokens[t] = (int32_t)(random_u64(&rng) % (uint64_t)s->n_vocab);
                p->pos[t] = at;
                p->slot[t] =
                    hidden ? -1 : table[at / s->b.page_len] * s->b.page_len + at % s->b.page_len;
                if (j == seqs[i][1] - 1)
                    p->out_rows[p->b.n_out++] = t;
            }
            p->kv_len[seq] = len;
            p->q_start[seq + 1] = p->b.n_tokens;
            p->b.n_decode += seqs[i][1] == 1;
        }
    mem_free(free_pages);
    p->b.max_pages = s->b.max_pages;
    p->b.tokens = p->tokens;
    p->b.pos = p->pos;
    p->b.slot = p->slot;
    p->b.q_start = p->q_start;
    p->b.kv_len = p->kv_len;
    p->b.pages = p->pages;
    p->b.out_rows = p->out_rows;
}

void plan_rows(struct plan *p, const struct dims *s, int rows)
{
    plan_make(p, s, (const int[][2]){{0, rows}}, 1, true);
    p->b.n_out = rows;
    for (int i = 0; i < rows; i++)
        p->out_rows[i] = i;
}

void begin(struct duo *d, struct plan *p)
{
    EACH(side)
    {
        p->b.kv = d->kv[side];
        d->be[side]->ops->begin(d->be[side], &p->b);
    }
}

void end(struct duo *d, int32_t *ref_tokens, int32_t *dev_tokens)
{
    struct error err = {0};
    fail_if(!d->be[REF]->ops->end(d->be[REF], ref_tokens, &err), err.msg);
    fail_if(!d->be[DEV]->ops->end(d->be[DEV], dev_tokens, &err), err.msg);
}

void stream_put(struct duo *d, const float *x, int rows)
{
    EACH(side)
    d->be[side]->ops->stream->put(d->be[side], x, rows);
}

static bool is_zero(const float *v, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (v[i] != 0)
            return false;
    return true;
}

int n_untouched;

void stream_check(struct duo *d, const char *what, const float *x, int rows, double tol)
{
    size_t n = (size_t)rows * (size_t)d->s.n_embd;
    float *y[SIDES];
    EACH(side)
    {
        y[side] = mem_alloc(n * sizeof(float));
        d->be[side]->ops->stream->get(d->be[side], y[side], rows);
        for (size_t i = 0; x && i < n; i++)
            y[side][i] -= x[i];
    }
    check_close(what, y[DEV], y[REF], n, tol);
    for (int t = 0; x && t < rows; t++) {
        size_t E = (size_t)d->s.n_embd;
        const float *row = y[DEV] + (size_t)t * E;
        if (!is_zero(y[REF] + (size_t)t * E, E))
            continue;
        n_untouched++;
        n_checks++;
        if (!is_zero(row, E)) {
            n_failed++;
            printf("FAIL  %s: row %d gets something, not nothing\n", what, t);
        }
    }
    EACH(side)
    mem_free(y[side]);
}

void logits_poison(struct duo *d, int rows)
{
    size_t n = (size_t)rows * (size_t)d->s.n_vocab;
    float *h = mem_alloc(n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        h[i] = NAN;
    EACH(side)
    d->be[side]->ops->stream->put_logits(d->be[side], h, rows);
    mem_free(h);
}

void logits_get(struct duo *d, int side, int rows, float *out)
{
    for (int i = 0; i < rows; i++)
        d->be[side]->ops->logits(d->be[side], i, out + (size_t)i * (size_t)d->s.n_vocab);
}

void logits_check(struct duo *d, const char *what, int rows, double tol)
{
    size_t n = (size_t)rows * (size_t)d->s.n_vocab;
    float *y[SIDES];
    EACH(side)
    {
        y[side] = mem_alloc(n * sizeof(float));
        logits_get(d, side, rows, y[side]);
    }
    check_close(what, y[DEV], y[REF], n, tol);
    EACH(side)
    mem_free(y[side]);
}

bool wanted(const char *group)
{
    if (filter && !strstr(group, filter))
        return false;
    worst = 0;
    return true;
}

void report(const char *group, int before)
{
    int64_t now = clock_ns();
    printf("%-5s %-28s worst error %.2e, %d checks, %.1f s\n", n_failed ? "FAIL" : "ok", group,
           worst, n_checks - before, (double)(now - report_from) * 1e-9);
    fflush(stdout);
    report_from = now;
}

static size_t kv_values(const struct dims *s)
{
    return (size_t)s->b.n_pages * (size_t)s->b.page_len * (size_t)(s->n_kv_heads * s->head_dim);
}

static enum dtype kv_type(const struct dims *s, bool is_k)
{
    return is_k ? s->b.k_type : s->b.v_type;
}

static size_t kv_bytes(const struct dims *s, bool is_k)
{
    return dtype_bytes(kv_type(s, is_k), kv_values(s));
}

/* The order of values inside a tile is private to a backend. Device cpu with STEEL_ISA=ref is the reference. */
enum tile_order { ORDER_REF, ORDER_CPU, ORDER_GPU };

static enum tile_order tile_order(const struct duo *d)
{
    const char *name = d->be[DEV]->ops->name;
    return !strcmp(name, "ref") ? ORDER_REF : !strcmp(name, "cpu") ? ORDER_CPU : ORDER_GPU;
}

/* Keys of the CPU's tiles are (D, page_len), all others (page_len, D). Transposes a plane of keys. */
static void turn_keys(const struct duo *d, int layer, const uint8_t *from, uint8_t *to, bool to_cpu)
{
    const struct dims *s = &d->s;
    size_t size = s->b.k_type == DT_F32 ? 4 : 2;
    size_t D = (size_t)d->layers[REF][layer].mixer.attention.k_dim;
    size_t len = (size_t)s->b.page_len, tiles = kv_values(s) / (D * len);
    for (size_t t = 0; t < tiles; t++)
        for (size_t i = 0; i < len; i++)
            for (size_t j = 0; j < D; j++) {
                size_t plain = (t * len + i) * D + j, turned = t * len * D + j * len + i;
                memcpy(to + size * (to_cpu ? turned : plain),
                       from + size * (to_cpu ? plain : turned), size);
            }
}

/* Codes of a token on the GPU, and its scales: codes of all tokens of a tile come first. Q4_0: of eight
 * values, the even ones are the nibbles of the low 16 bits, the odd ones those of the high 16. */
static void gpu_block(enum dtype t, uint8_t *tile, size_t len, size_t D, size_t off, size_t block,
                      float *x, bool put)
{
    size_t row = t == DT_Q4_0 ? D / 2 : D;
    uint8_t *codes = tile + off * row + block * row / (D / 32), code[32];
    uint16_t *scale = (uint16_t *)(tile + len * row) + off * (D / 32) + block;
    uint32_t words[4] = {0};
    if (t == DT_F8_E4M3) {
        for (int i = 0; i < 32; i++)
            put ? (void)(codes[i] = kv_put_fp8(x[i])) : (void)(x[i] = kv_get_fp8(codes[i]));
        return;
    }
    if (t == DT_Q8_0 && put)
        *scale = kv_put_q8(x, (int8_t *)codes);
    for (int i = 0; t == DT_Q8_0 && !put && i < 32; i++)
        x[i] = f16_to_f32(*scale) * (float)(int8_t)codes[i];
    if (t == DT_Q8_0)
        return;
    if (put)
        *scale = kv_put_q4(x, code);
    else
        memcpy(words, codes, 16);
    for (int i = 0; i < 32; i++) {
        int shift = 4 * (i / 2 % 4 + 4 * (i % 2));
        if (put)
            words[i / 8] |= (uint32_t)code[i] << shift;
        else
            x[i] = f16_to_f32(*scale) * (float)((int)(words[i / 8] >> shift & 15) - 8);
    }
    if (put)
        memcpy(codes, words, 16);
}

bool tiled_rows(const struct duo *d)
{
    return !strcmp(d->be[DEV]->ops->name, "vulkan");
}

void tiled_rows_put(const struct duo *d, const float *values, int width, uint8_t *plane)
{
    enum dtype type = d->s.b.k_type;
    size_t len = (size_t)d->s.b.page_len, D = (size_t)width;
    for (size_t page = 0; page < (size_t)d->s.b.n_pages;
         page++, plane += kv_tile_bytes(type, len, D))
        for (size_t i = 0; i < len; i++)
            for (size_t b = 0; b < D / 32; b++, values += 32) {
                float block[32];
                memcpy(block, values, sizeof block);
                gpu_block(type, plane, len, D, i, b, block, true);
            }
}

/* Converts a plane of quantised tiles from or to floats, one head at a time. */
static void quant_heads(const struct duo *d, bool is_k, uint8_t *plane, float *values, bool put)
{
    const struct dims *s = &d->s;
    enum dtype type = kv_type(s, is_k);
    bool cpu = tile_order(d) == ORDER_CPU;
    size_t D = (size_t)s->head_dim, len = (size_t)s->b.page_len;
    size_t tile = kv_tile_bytes(type, len, D), tiles = kv_values(s) / (D * len);
    for (size_t t = 0; t < tiles; t++)
        for (size_t i = 0; i < len; i++, values += D) {
            for (size_t b = 0; !cpu && b < D / 32; b++)
                gpu_block(type, plane + t * tile, len, D, i, b, values + 32 * b, put);
            if (put && cpu)
                kv_tile_put(type, values, plane + t * tile, is_k, len, D, i);
            for (size_t j = 0; cpu && !put && j < D; j++)
                values[j] = kv_tile_get(type, plane + t * tile, is_k, len, D, i, j);
        }
}

static bool turned(const struct duo *d, bool is_k)
{
    return is_k && tile_order(d) == ORDER_CPU;
}

void kv_new(struct duo *d, int layer)
{
    struct error err = {0};
    size_t n = kv_values(&d->s);
    for (int is_k = 0; is_k < 2; is_k++) {
        size_t bytes = kv_bytes(&d->s, is_k);
        uint8_t *host = mem_alloc(bytes);
        void *plane[SIDES];
        EACH(side)
        {
            plane[side] = d->be[side]->ops->alloc(d->be[side], bytes, "kv", &err);
            fail_if(!plane[side], err.msg);
            *(is_k ? &d->kv[side][layer].k : &d->kv[side][layer].v) = plane[side];
        }
        float *values = random_floats(n, 1.0f);
        enum dtype type = kv_type(&d->s, is_k);
        kv_row_put(type, values, (int)n, plane[REF]);
        memcpy(host, plane[REF], bytes);
        if (kv_quantised(type) && tile_order(d) != ORDER_REF)
            quant_heads(d, is_k, host, values, true);
        else if (!kv_quantised(type) && turned(d, is_k))
            turn_keys(d, layer, plane[REF], host, true);
        d->be[DEV]->ops->copy_in(d->be[DEV], plane[DEV], host, bytes);
        mem_free(values);
        mem_free(host);
    }
}

void kv_free(struct duo *d, int layer)
{
    EACH(side)
    {
        d->be[side]->ops->free(d->be[side], d->kv[side][layer].k, kv_bytes(&d->s, true));
        d->be[side]->ops->free(d->be[side], d->kv[side][layer].v, kv_bytes(&d->s, false));
    }
}

/* A plane of the backend under test, in the reference's order. */
static void read_plane(struct duo *d, int layer, bool is_k, uint8_t *out)
{
    size_t bytes = kv_bytes(&d->s, is_k);
    const struct kv_layer *kv = &d->kv[DEV][layer];
    uint8_t *got = mem_alloc(bytes);
    d->be[DEV]->ops->copy_out(d->be[DEV], got, is_k ? kv->k : kv->v, bytes);
    memcpy(out, got, bytes);
    if (turned(d, is_k) && !kv_quantised(d->s.b.k_type))
        turn_keys(d, layer, got, out, false);
    mem_free(got);
}

void kv_check(struct duo *d, int layer, const char *what)
{
    size_t n = kv_values(&d->s);
    bool k_larger = kv_bytes(&d->s, true) > kv_bytes(&d->s, false);
    uint8_t *got = mem_alloc(kv_bytes(&d->s, k_larger));
    float *a = mem_alloc(n * sizeof(float)), *b = mem_alloc(n * sizeof(float));
    for (int is_k = 0; is_k < 2; is_k++) {
        char text[200];
        const struct kv_layer *kv = &d->kv[REF][layer];
        snprintf(text, sizeof text, "%s of %s", is_k ? "k" : "v", what);
        read_plane(d, layer, is_k, got);
        enum dtype type = kv_type(&d->s, is_k);
        if (kv_quantised(type) && tile_order(d) != ORDER_REF)
            quant_heads(d, is_k, got, a, false);
        else
            kv_row_get(type, got, (int)n, a);
        kv_row_get(type, is_k ? kv->k : kv->v, (int)n, b);
        /* Some values fall on the other side of a step. A step of Q4_0 is 0.4 of a value's deviation, and fp16 takes
         * up to one value in 2,000 across: 0.4 * sqrt(1 / 2000). */
        double rounding = type == DT_Q4_0      ? 8e-3
                          : kv_quantised(type) ? 4e-3
                          : type == DT_BF16    ? 2e-3
                                               : 1e-3;
        check_close(text, a, b, n, rounding > product_tol ? rounding : product_tol);
    }
    mem_free(got);
    mem_free(a);
    mem_free(b);
}

void kv_copy_back(struct duo *d, int layer)
{
    read_plane(d, layer, true, d->kv[REF][layer].k);
    read_plane(d, layer, false, d->kv[REF][layer].v);
}
