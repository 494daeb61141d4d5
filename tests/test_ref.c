/*
 * The reference's parts one by one, against what their equations (layer.h) give when they are written
 * down directly, in double, for networks so small that this is easy: one layer of a few columns, float
 * weights, a cache of floats. Parts that other tests reach through whole models are not repeated. And
 * what backends refuse, by name.
 */
#include "backend/backend.h"
#include "base/mem.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { E = 6, ROWS = 9, VOCAB = 11, PAGE = 4, MAX_WEIGHTS = 16, FF = 5, EXPERTS = 8 };

static uint32_t seed;

/* About uniform in -1..1 */
static float noise(void)
{
    seed = seed * 1664525u + 1013904223u;
    return (float)(int32_t)seed * 0x1p-31f;
}

/* A network of one or two layers, its weights, and a step of one sequence of ROWS rows. */
struct rig {
    struct backend *be;
    struct network net;
    struct layer layers[2];
    struct weight weights[MAX_WEIGHTS];
    float *values[MAX_WEIGHTS], *biases[MAX_WEIGHTS];
    int n_weights;
    struct kv_layer kv[2];
    size_t kv_bytes;
    struct batch b;
    int32_t tokens[ROWS], pos[ROWS], slot[ROWS], q_start[2], kv_len[1], pages[4], out_rows[ROWS];
    float x[ROWS * E], after[ROWS * E];
};

static void rig_open(struct rig *r)
{
    memset(r, 0, sizeof *r);
    seed = 7;
    r->be = backend_open_ref();
    r->net = (struct network){.n_layers = 2, .n_embd = E, .n_vocab = VOCAB, .layers = r->layers};
    for (int i = 0; i < 2; i++)
        r->layers[i].mixer.attention = (struct attention){
            .n_heads = 4, .n_kv_heads = 2, .k_dim = 4, .v_dim = 4, .scale = 0.5f};
    for (int i = 0; i < ROWS * E; i++)
        r->x[i] = 2 * noise();
    for (int i = 0; i < ROWS; i++) {
        r->tokens[i] = i;
        r->pos[i] = r->out_rows[i] = i;
    }
    r->pages[0] = 2, r->pages[1] = 0, r->pages[2] = 1;
    for (int i = 0; i < ROWS; i++)
        r->slot[i] = r->pages[i / PAGE] * PAGE + i % PAGE;
    r->q_start[1] = r->kv_len[0] = ROWS;
    r->b = (struct batch){.n_tokens = ROWS,
                          .n_seqs = 1,
                          .n_out = ROWS,
                          .max_pages = 4,
                          .tokens = r->tokens,
                          .pos = r->pos,
                          .slot = r->slot,
                          .q_start = r->q_start,
                          .kv_len = r->kv_len,
                          .pages = r->pages,
                          .out_rows = r->out_rows,
                          .kv = r->kv};
    struct error err;
    r->kv_bytes = sizeof(float) * 3 * PAGE * 64;
    for (int i = 0; i < 2; i++) {
        r->kv[i].k = r->be->ops->alloc(r->be, r->kv_bytes, "keys", &err);
        r->kv[i].v = r->be->ops->alloc(r->be, r->kv_bytes, "values", &err);
    }
}

/* A random float weight; its values are w->values[i], in the order of making. */
static const struct weight *weight_of(struct rig *r, int n_out, int n_in, int n_expert, bool bias)
{
    int i = r->n_weights++;
    size_t each = (size_t)n_out * (size_t)n_in, n = each * (size_t)n_expert;
    float *v = r->values[i] = mem_zalloc(n, sizeof *v);
    for (size_t j = 0; j < n; j++)
        v[j] = noise();
    if (bias) {
        r->biases[i] = mem_zalloc((size_t)(n_out * n_expert), sizeof(float));
        for (int j = 0; j < n_out * n_expert; j++)
            r->biases[i][j] = noise();
    }
    const uint8_t *data[EXPERTS];
    for (int e = 0; e < n_expert; e++)
        data[e] = (const uint8_t *)(v + (size_t)e * each);
    struct raw_weight raw = {.n_in = n_in,
                             .n_out = n_out,
                             .n_expert = n_expert,
                             .n_seg = 1,
                             .seg = {{.type = DT_F32, .rows = n_out, .data = data}},
                             .bias = r->biases[i],
                             .transient = true};
    struct error err;
    assert_true(r->be->ops->upload(r->be, &raw, WEIGHT_LINEAR, &r->weights[i], &err));
    return &r->weights[i];
}

static void rig_prepare(struct rig *r)
{
    struct bounds b = {.page_len = PAGE,
                       .n_pages = 3,
                       .k_type = DT_F32,
                       .v_type = DT_F32,
                       .max_tokens = ROWS,
                       .max_seqs = 1,
                       .max_out = ROWS,
                       .max_pages = 4};
    struct error err = {{0}};
    if (!r->be->ops->supports(r->be, &r->net, &err))
        fail_msg("%s", err.msg);
    assert_true(r->be->ops->prepare(r->be, &r->net, &b, &err));
    r->be->ops->begin(r->be, &r->b);
    r->be->ops->stream->put(r->be, r->x, ROWS);
}

static void rig_close(struct rig *r)
{
    r->be->ops->end(r->be, NULL, NULL);
    for (int i = 0; i < r->n_weights; i++) {
        r->be->ops->release(r->be, &r->weights[i]);
        mem_free(r->values[i]);
        mem_free(r->biases[i]);
    }
    for (int i = 0; i < 2; i++) {
        r->be->ops->free(r->be, r->kv[i].k, r->kv_bytes);
        r->be->ops->free(r->be, r->kv[i].v, r->kv_bytes);
    }
    r->be->ops->close(r->be);
}

/* y = W x + bias, of weight number i, expert e */
static void times(const struct rig *r, int i, int e, const double *x, double *y)
{
    const struct weight *w = &r->weights[i];
    for (int o = 0; o < w->n_out; o++) {
        y[o] = r->biases[i] ? r->biases[i][e * w->n_out + o] : 0;
        for (int k = 0; k < w->n_in; k++)
            y[o] += r->values[i][((size_t)e * (size_t)w->n_out + (size_t)o) * (size_t)w->n_in +
                                 (size_t)k] *
                    x[k];
    }
}

static void row_of(const struct rig *r, int t, double *x)
{
    for (int i = 0; i < E; i++)
        x[i] = r->x[t * E + i];
}

static void check_row(const struct rig *r, int t, const double *want)
{
    for (int i = 0; i < E; i++)
        if (!(fabs(r->after[t * E + i] - want[i]) <= 2e-5 * (1 + fabs(want[i]))))
            fail_msg("row %d, column %d: %.7g, not %.7g", t, i, (double)r->after[t * E + i],
                     want[i]);
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static void rms(double *x, const float *gain, double eps, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += x[i] * x[i];
    for (int i = 0; i < n; i++)
        x[i] *= (gain ? gain[i] : 1) / sqrt(sum / n + eps);
}

/* Attention of one layer by its equations: weight 0 is wqkv, weight 1 wo. What it adds to row t. */
static void attend(const struct rig *r, const struct attention *a, double (*y)[E])
{
    int H = a->n_heads, K = a->n_kv_heads, Dk = a->k_dim, Dv = a->v_dim;
    int each = Dk + (a->gated ? Dv : 0);
    static double q[ROWS][64], k[ROWS][64], v[ROWS][64], gate[ROWS][64];
    for (int t = 0; t < ROWS; t++) {
        double x[E], all[128];
        row_of(r, t, x);
        times(r, 0, 0, x, all);
        for (int h = 0; h < H; h++)
            for (int i = 0; i < each; i++)
                *(i < Dk ? &q[t][h * Dk + i] : &gate[t][h * Dv + i - Dk]) = all[h * each + i];
        memcpy(k[t], all + H * each, sizeof(double) * (size_t)(K * Dk));
        memcpy(v[t], all + H * each + (a->k_is_v ? 0 : K * Dk), sizeof(double) * (size_t)(K * Dv));
        if (a->norm_whole) {
            rms(q[t], a->q_norm.gain, (double)a->q_norm.eps, H * Dk);
            rms(k[t], a->k_norm.gain, (double)a->k_norm.eps, K * Dk);
        }
        for (int h = 0; h < K && a->v_norm.kind; h++)
            rms(v[t] + h * Dv, a->v_norm.gain, (double)a->v_norm.eps, Dv);
        for (int h = 0; a->rope && h < H + K; h++) {
            double *head = h < H ? q[t] + h * Dk : k[t] + (h - H) * Dk;
            for (int i = 0; i < a->rope->n_rot / 2; i++) {
                double angle = (double)((float)t * a->rope->freq[i]), m = (double)a->rope->mscale;
                double *p = &head[i], *s = &head[i + a->rope->n_rot / 2], was = *p;
                *p = m * (was * cos(angle) - *s * sin(angle));
                *s = m * (*s * cos(angle) + was * sin(angle));
            }
        }
    }
    for (int t = 0; t < ROWS; t++) {
        double out[64];
        double warm = a->temp_beta != 0 ? 1 + (double)a->temp_beta * log(1 + t / a->temp_len) : 1;
        for (int h = 0; h < H; h++) {
            double p[ROWS], total = a->sinks ? exp((double)a->sinks[h]) : 0;
            for (int j = 0; j < ROWS; j++) {
                bool sees = a->bidirectional ? !a->window || abs(j - t) < a->window
                                             : j <= t && (!a->window || j > t - a->window);
                double s = 0;
                for (int i = 0; i < Dk; i++)
                    s += q[t][h * Dk + i] * k[j][h * K / H * Dk + i];
                s *= (double)a->scale * warm;
                if (a->softcap != 0)
                    s = (double)a->softcap * tanh(s / (double)a->softcap);
                p[j] = sees ? exp(s) : 0;
                total += p[j];
            }
            for (int i = 0; i < Dv; i++) {
                double sum = 0;
                for (int j = 0; j < ROWS; j++)
                    sum += p[j] / total * v[j][h * K / H * Dv + i];
                out[h * Dv + i] = sum * (a->gated ? sigmoid(gate[t][h * Dv + i]) : 1);
            }
        }
        times(r, 1, 0, out, y[t]);
    }
}

/* One mixer with what `change` sets, against the equations. */
static void check_attention(void (*change)(struct rig *, struct attention *))
{
    struct rig r;
    rig_open(&r);
    struct attention *a = &r.layers[0].mixer.attention;
    change(&r, a);
    int H = a->n_heads, K = a->n_kv_heads;
    int rows =
        H * (a->k_dim + (a->gated ? a->v_dim : 0)) + K * a->k_dim + (a->k_is_v ? 0 : K * a->v_dim);
    a->wqkv = weight_of(&r, rows, E, 1, true);
    a->wo = weight_of(&r, E, H * a->v_dim, 1, true);
    rig_prepare(&r);
    r.be->ops->mixer(r.be, &r.layers[0].mixer, 0);
    r.be->ops->stream->get(r.be, r.after, ROWS);
    double y[ROWS][E];
    attend(&r, a, y);
    for (int t = 0; t < ROWS; t++) {
        for (int i = 0; i < E; i++)
            y[t][i] += r.x[t * E + i];
        check_row(&r, t, y[t]);
    }
    rig_close(&r);
}

static const float sinks[] = {0.5f, -1, 2, 0},
                   gains[] = {1, 2, -1, 0.5f, 3, 1, 1, 2, 1, 1, 1, 2, 1, 1, 1, 1};
static const float freq[] = {1, 0.25f};
static const struct rope ropes[] = {{2, freq, 1, NULL}, {4, freq, 1.2f, NULL}};

static void plain(struct rig *r, struct attention *a)
{
    (void)r, (void)a;
}

static void with_sinks(struct rig *r, struct attention *a)
{
    (void)r;
    a->sinks = sinks;
}

static void with_window(struct rig *r, struct attention *a)
{
    (void)r;
    a->window = 3;
    a->sinks = sinks;
}

static void with_softcap(struct rig *r, struct attention *a)
{
    (void)r;
    a->softcap = 0.75f;
}

static void with_partial_rope(struct rig *r, struct attention *a)
{
    r->net.ropes = ropes;
    r->net.n_ropes = 2;
    a->rope = &ropes[0];
}

static void with_rope_scale(struct rig *r, struct attention *a)
{
    with_partial_rope(r, a);
    a->rope = &ropes[1];
}

static void with_gate(struct rig *r, struct attention *a)
{
    (void)r;
    a->gated = true;
}

static void with_whole_norm(struct rig *r, struct attention *a)
{
    (void)r;
    a->norm_whole = true;
    a->q_norm = a->k_norm = (struct norm){NORM_RMS, gains, NULL, 1e-3f};
}

static void with_temperature(struct rig *r, struct attention *a)
{
    (void)r;
    a->temp_beta = 0.5f;
    a->temp_len = 2;
}

static void with_one_kv(struct rig *r, struct attention *a)
{
    with_partial_rope(r, a);
    a->k_is_v = true;
    a->v_norm = (struct norm){NORM_RMS, NULL, NULL, 1e-6f};
}

static void with_own_dims(struct rig *r, struct attention *a)
{
    (void)r;
    a->n_heads = 6;
    a->n_kv_heads = 3;
    a->v_dim = 3;
}

static void both_ways(struct rig *r, struct attention *a)
{
    (void)r;
    a->bidirectional = true;
}

static void both_ways_near(struct rig *r, struct attention *a)
{
    (void)r;
    a->bidirectional = true;
    a->window = 3;
}

static void test_attention_parts(void **state)
{
    (void)state;
    void (*const parts[])(struct rig *, struct attention *) = {
        plain,           with_sinks, with_window,     with_softcap,     with_partial_rope,
        with_rope_scale, with_gate,  with_whole_norm, with_temperature, with_one_kv,
        with_own_dims,   both_ways,  both_ways_near};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        check_attention(parts[i]);
}

/* A layer that shares another's keys and values reads that cache and stores nothing. */
static void test_shared_kv(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r);
    struct attention *a = &r.layers[0].mixer.attention, *b = &r.layers[1].mixer.attention;
    a->wqkv = weight_of(&r, 4 * 4 + 2 * 4 + 2 * 4, E, 1, false);
    a->wo = weight_of(&r, E, 16, 1, false);
    const struct weight *whole = a->wqkv;
    /* The second layer's q is that of the first: its rows alone. */
    struct weight only_q = *whole;
    float *rows = r.values[0];
    const uint8_t *data = (const uint8_t *)rows;
    struct raw_weight raw = {.n_in = E,
                             .n_out = 16,
                             .n_expert = 1,
                             .n_seg = 1,
                             .seg = {{.type = DT_F32, .rows = 16, .data = &data}}};
    struct error err;
    assert_true(r.be->ops->upload(r.be, &raw, WEIGHT_LINEAR, &only_q, &err));
    *b = *a;
    b->wqkv = &only_q;
    b->shares_kv = true;
    r.net.n_layers = 3; /* neither is the last */
    struct layer three[3] = {r.layers[0], r.layers[1], r.layers[1]};
    r.net.layers = three;
    rig_prepare(&r);
    r.be->ops->mixer(r.be, &three[0].mixer, 0);
    r.be->ops->stream->get(r.be, r.after, ROWS);
    float again[ROWS * E];
    r.be->ops->stream->put(r.be, r.x, ROWS);
    r.be->ops->mixer(r.be, &three[1].mixer, 1);
    r.be->ops->stream->get(r.be, again, ROWS);
    assert_memory_equal(again, r.after, sizeof again);
    for (size_t i = 0; i < r.kv_bytes; i++)
        assert_int_equal(((const uint8_t *)r.kv[1].k)[i], 0);
    r.be->ops->release(r.be, &only_q);
    r.net.layers = r.layers;
    rig_close(&r);
}

static double act_of(const struct ffn *f, double g, double u)
{
    double lim = (double)f->limit;
    switch (f->act) {
    case ACT_SILU:
        return g * sigmoid(g) * u;
    case ACT_GELU_TANH:
        return 0.5 * g * (1 + tanh(sqrt(2 / 3.14159265358979) * (g + 0.044715 * g * g * g))) * u;
    case ACT_GELU:
        return 0.5 * g * (1 + erf(g / sqrt(2))) * u;
    case ACT_SWIGLU_CLAMP:
        g = fmin(g, lim);
        u = fmax(fmin(u, lim), -lim);
        return g * sigmoid((double)f->alpha * g) * (u + 1);
    case ACT_SILU_CLAMP:
        g = fmin(g, lim);
        return g * sigmoid(g) * fmax(fmin(u, lim), -lim);
    case ACT_SILU_LIMIT:
        return fmin(g * sigmoid(g), lim) * fmax(fmin(u, lim), -lim);
    case ACT_RELU2:
        return g > 0 ? g * g * u : 0;
    case ACT_PLAIN_RELU2:
        return g > 0 ? g * g : 0;
    case ACT_PLAIN_XIELU:
        return (double)f->beta * g + (g > 0 ? (double)f->alpha * g * g : lim * (exp(g) - 1 - g));
    case ACT_PLAIN_GELU:
        return 0.5 * g * (1 + erf(g / sqrt(2)));
    case ACT_PLAIN_GELU_TANH:
        return 0.5 * g * (1 + tanh(sqrt(2 / 3.14159265358979) * (g + 0.044715 * g * g * g)));
    case ACT_PLAIN_QUICK_GELU:
        return g * sigmoid(1.702 * g);
    case ACT_NONE:
        return g;
    }
    return NAN;
}

/* y = ffn of weights number i (gate and up) and i + 1 (down) */
static void ffn_of(const struct rig *r, const struct ffn *f, int i, int e, const double *x,
                   double *y)
{
    double h[2 * FF], out[FF];
    times(r, i, e, x, h);
    for (int j = 0; j < FF; j++)
        out[j] = act_of(f, h[j], activation_is_gated(f->act) ? h[FF + j] : 0);
    times(r, i + 1, e, out, y);
}

static void test_activations(void **state)
{
    (void)state;
    for (enum activation act = ACT_SILU; act <= ACT_NONE; act++) {
        struct rig r;
        rig_open(&r);
        struct mlp *m = &r.layers[0].mlp;
        m->dense = (struct ffn){
            .gate_up = weight_of(&r, activation_is_gated(act) ? 2 * FF : FF, E, 1, true),
            .down = weight_of(&r, E, FF, 1, true),
            .act = act,
            .alpha = 1.702f,
            .limit = 0.8f,
            .beta = 0.3f};
        rig_prepare(&r);
        r.be->ops->mlp(r.be, m, 0);
        r.be->ops->stream->get(r.be, r.after, ROWS);
        for (int t = 0; t < ROWS; t++) {
            double x[E], y[E];
            row_of(&r, t, x);
            ffn_of(&r, &m->dense, 0, 0, x, y);
            for (int i = 0; i < E; i++)
                y[i] += x[i];
            check_row(&r, t, y);
        }
        rig_close(&r);
    }
}

static const float tens[] = {1, -2, 0.5f, 3, 1, 2}, shift[] = {0.1f, 0, -1, 2, 0, 0.3f};

/* Norms before, after and of the sum; both kinds; the residual scale, and that of the stream. */
static void test_norms(void **state)
{
    (void)state;
    for (int kind = NORM_RMS; kind <= NORM_LAYER; kind++) {
        struct rig r;
        rig_open(&r);
        struct mlp *m = &r.layers[0].mlp;
        struct norm n = {kind, tens, kind == NORM_LAYER ? shift : NULL, 1e-2f};
        m->block = (struct block){.in = n, .out = n, .sum = n, .scale = 0.25f};
        m->dense = (struct ffn){.gate_up = weight_of(&r, 2 * FF, E, 1, false),
                                .down = weight_of(&r, E, FF, 1, false)};
        m->stream_scale = 1.5f;
        rig_prepare(&r);
        r.be->ops->mlp(r.be, m, 0);
        r.be->ops->stream->get(r.be, r.after, ROWS);
        for (int t = 0; t < ROWS; t++) {
            double x[E], rows[3][E] = {{0}};
            row_of(&r, t, x);
            memcpy(rows[0], x, sizeof x);
            for (int k = 0; k < 3; k++) { /* in, out, sum */
                double mean = 0, var = 0;
                for (int i = 0; i < E; i++)
                    mean += kind == NORM_LAYER ? rows[k][i] / E : 0;
                for (int i = 0; i < E; i++)
                    var += (rows[k][i] - mean) * (rows[k][i] - mean) / E;
                for (int i = 0; i < E; i++)
                    rows[k][i] = (rows[k][i] - mean) / sqrt(var + (double)1e-2f) * tens[i] +
                                 (kind == NORM_LAYER ? shift[i] : 0);
                if (k == 0)
                    ffn_of(&r, &m->dense, 0, 0, rows[0], rows[1]);
                for (int i = 0; k == 1 && i < E; i++)
                    rows[2][i] = x[i] + 0.25 * rows[1][i];
            }
            for (int i = 0; i < E; i++)
                rows[2][i] *= 1.5;
            check_row(&r, t, rows[2]);
        }
        rig_close(&r);
    }
}

static const float choice[EXPERTS] = {0, 0.4f, -0.3f, 0.1f, 0.2f, -0.1f, 0.3f, 0},
                   per_expert[EXPERTS] = {1, 2, 0.5f, 1, 3, 1, 1, 2};

/* weight[e] of one row; 0 = not chosen. Groups are pairs of experts. */
static void route_of(const struct router *t, const double *l, double *weight)
{
    double p[EXPERTS], key[EXPERTS], total = 0, kept = 0;
    for (int e = 0; e < EXPERTS; e++)
        total += exp(l[e]);
    for (int e = 0; e < EXPERTS; e++) {
        p[e] = t->kind == ROUTER_SOFTMAX   ? exp(l[e]) / total
               : t->kind == ROUTER_SIGMOID ? sigmoid(l[e])
                                           : l[e];
        key[e] = p[e] + (t->choice_bias ? t->choice_bias[e] : 0);
        weight[e] = 0;
    }
    for (int g = 0; t->n_groups && g < EXPERTS / 2; g++) {
        int better = 0;
        for (int o = 0; o < EXPERTS / 2; o++)
            better += key[2 * o] + key[2 * o + 1] > key[2 * g] + key[2 * g + 1];
        if (better >= t->n_groups_used)
            p[2 * g] = p[2 * g + 1] = NAN; /* out of the game */
    }
    for (int e = 0; e < EXPERTS; e++) {
        int better = 0;
        for (int o = 0; o < EXPERTS; o++)
            better += !isnan(p[o]) && key[o] > key[e];
        if (!isnan(p[e]) && better < t->n_used)
            weight[e] = t->kind == ROUTER_SOFTMAX_TOP ? exp(l[e]) : p[e];
        kept += weight[e];
    }
    for (int e = 0; e < EXPERTS; e++) {
        if (t->renorm || t->kind == ROUTER_SOFTMAX_TOP)
            weight[e] /= kept;
        weight[e] *= t->scale == 0 ? 1 : (double)t->scale;
        weight[e] *= t->expert_scale ? t->expert_scale[e] : 1;
    }
}

/* Experts with biases, by every kind of router, beside a dense mlp with a gate, each with its norms. */
static void test_routers(void **state)
{
    (void)state;
    const struct router kinds[] = {
        {.kind = ROUTER_SOFTMAX, .n_used = 3, .renorm = true},
        {.kind = ROUTER_SOFTMAX, .n_used = 2, .scale = 2.5f, .expert_scale = per_expert},
        {.kind = ROUTER_SOFTMAX_TOP, .n_used = 3},
        {.kind = ROUTER_SIGMOID, .n_used = 2, .renorm = true, .choice_bias = choice, .scale = 1.5f},
        {.kind = ROUTER_SIGMOID,
         .n_used = 3,
         .renorm = true,
         .choice_bias = choice,
         .n_groups = 4,
         .n_groups_used = 2},
    };
    for (size_t c = 0; c < sizeof kinds / sizeof *kinds; c++)
        for (int both = 0; both < 2; both++) {
            struct rig r;
            rig_open(&r);
            struct mlp *m = &r.layers[0].mlp;
            struct norm norm = {NORM_RMS, tens, NULL, 1e-5f};
            m->router = kinds[c];
            m->router.w = weight_of(&r, EXPERTS, E, 1, true);
            m->experts = (struct ffn){.gate_up = weight_of(&r, 2 * FF, E, EXPERTS, true),
                                      .down = weight_of(&r, E, FF, EXPERTS, true)};
            if (both) {
                m->dense = (struct ffn){.gate_up = weight_of(&r, 2 * FF, E, 1, false),
                                        .down = weight_of(&r, E, FF, 1, false)};
                m->dense_gate = weight_of(&r, 1, E, 1, false);
                m->block.in = m->dense_out = m->experts_out = norm;
                m->experts_in = (struct norm){NORM_RMS, NULL, NULL, 1e-5f};
                m->router.norm = (struct norm){NORM_RMS, shift, NULL, 1e-5f};
            }
            rig_prepare(&r);
            r.be->ops->mlp(r.be, m, 0);
            r.be->ops->stream->get(r.be, r.after, ROWS);
            for (int t = 0; t < ROWS; t++) {
                double x[E], n[E], in[E], to_router[E], l[EXPERTS], weight[EXPERTS];
                double sum[E] = {0}, dense[E] = {0}, want[E], gate;
                row_of(&r, t, x);
                memcpy(n, x, sizeof n);
                memcpy(in, x, sizeof in);
                memcpy(to_router, x, sizeof to_router);
                if (both) {
                    rms(n, tens, (double)1e-5f, E);
                    rms(in, NULL, (double)1e-5f, E);
                    rms(to_router, shift, (double)1e-5f, E);
                }
                times(&r, 0, 0, to_router, l);
                route_of(&m->router, l, weight);
                for (int e = 0; e < EXPERTS; e++) {
                    double y[E];
                    ffn_of(&r, &m->experts, 1, e, in, y);
                    for (int i = 0; i < E; i++)
                        sum[i] += weight[e] * y[i];
                }
                if (both) {
                    ffn_of(&r, &m->dense, 3, 0, n, dense);
                    times(&r, 5, 0, n, &gate);
                    for (int i = 0; i < E; i++)
                        dense[i] *= sigmoid(gate);
                    rms(dense, tens, (double)1e-5f, E);
                    rms(sum, tens, (double)1e-5f, E);
                }
                for (int i = 0; i < E; i++)
                    want[i] = x[i] + sum[i] + dense[i];
                check_row(&r, t, want);
            }
            rig_close(&r);
        }
}

/* Embedding with scale, positions, types, a norm and values per layer; the layer that adds those; and a
 * head with scale and softcap, then one without a matrix. */
static void test_embed_head(void **state)
{
    (void)state;
    enum { P = 3 };
    struct rig r;
    rig_open(&r);
    struct embed *e = &r.net.embed;
    int32_t types[ROWS];
    e->tokens = weight_of(&r, VOCAB, E, 1, false);           /* 0 */
    e->positions = weight_of(&r, ROWS + 2, E, 1, false);     /* 1 */
    e->types = weight_of(&r, 2, E, 1, false);                /* 2 */
    e->layers.table = weight_of(&r, VOCAB, 2 * P, 1, false); /* 3 */
    e->layers.project = weight_of(&r, 2 * P, E, 1, false);   /* 4 */
    struct layer_embed *l = &r.layers[0].mlp.embed;
    l->gate = weight_of(&r, P, E, 1, false);          /* 5 */
    l->project = weight_of(&r, E, P, 1, false);       /* 6 */
    r.net.head.w = weight_of(&r, VOCAB, E, 1, false); /* 7 */
    e->scale = 2;
    e->pos_offset = 2;
    e->norm = l->norm = (struct norm){NORM_RMS, tens, NULL, 1e-5f};
    l->act = ACT_GELU_TANH;
    e->layers.width = P;
    e->layers.norm = (struct norm){NORM_RMS, shift, NULL, 1e-5f};
    e->layers.table_scale = 3;
    e->layers.project_scale = 0.5f;
    e->layers.scale = 0.7f;
    r.net.head.scale = 0.3f;
    r.net.head.softcap = 0.9f;
    for (int t = 0; t < ROWS; t++)
        types[t] = t % 2;
    r.b.types = types;
    rig_prepare(&r);
    r.be->ops->embed(r.be, e);
    r.be->ops->mlp(r.be, &r.layers[0].mlp, 0);
    r.be->ops->stream->get(r.be, r.after, ROWS);
    r.be->ops->head(r.be, &r.net.head);
    for (int t = 0; t < ROWS; t++) {
        double x[E], pro[2 * P], g[P], y[E], logits[VOCAB];
        for (int i = 0; i < E; i++)
            x[i] = 2.0 * r.values[0][t * E + i] + r.values[1][(t + 2) * E + i] +
                   r.values[2][t % 2 * E + i];
        rms(x, tens, (double)1e-5f, E);
        times(&r, 4, 0, x, pro);
        for (int i = 0; i < 2 * P; i++)
            pro[i] *= 0.5;
        rms(pro, shift, (double)1e-5f, P);
        times(&r, 5, 0, x, g);
        for (int i = 0; i < P; i++)
            g[i] = act_of(&(struct ffn){.act = ACT_GELU_TANH}, g[i],
                          (pro[i] + 3.0 * r.values[3][t * 2 * P + i]) * (double)0.7f);
        times(&r, 6, 0, g, y);
        rms(y, tens, (double)1e-5f, E);
        for (int i = 0; i < E; i++)
            x[i] += y[i];
        check_row(&r, t, x);
        float got[VOCAB];
        r.be->ops->logits(r.be, t, got);
        times(&r, 7, 0, x, logits);
        for (int i = 0; i < VOCAB; i++)
            assert_true(fabs(got[i] - 0.9 * tanh(logits[i] * (double)0.3f / 0.9)) < 1e-5);
    }
    rig_close(&r);
}

/* Rows that need no logits stop in the last layer, after their keys and values are stored. */
static void test_out_rows(void **state)
{
    (void)state;
    struct rig r;
    rig_open(&r);
    for (int i = 0; i < 2; i++) {
        struct attention *a = &r.layers[i].mixer.attention;
        a->wqkv = weight_of(&r, 32, E, 1, false);
        a->wo = weight_of(&r, E, 16, 1, false);
        r.layers[i].mlp.dense = (struct ffn){.gate_up = weight_of(&r, 2 * FF, E, 1, false),
                                             .down = weight_of(&r, E, FF, 1, false)};
    }
    r.net.head.w = weight_of(&r, VOCAB, E, 1, false);
    float all[ROWS][VOCAB], some[VOCAB];
    for (int pass = 0; pass < 2; pass++) {
        if (pass) {
            r.be->ops->end(r.be, NULL, NULL);
            r.b.n_out = 2;
            r.out_rows[0] = 3;
            r.out_rows[1] = 8;
        }
        rig_prepare(&r);
        for (int i = 0; i < 2; i++) {
            r.be->ops->mixer(r.be, &r.layers[i].mixer, i);
            r.be->ops->mlp(r.be, &r.layers[i].mlp, i);
        }
        r.be->ops->head(r.be, &r.net.head);
        for (int i = 0; i < r.b.n_out; i++) {
            r.be->ops->logits(r.be, i, pass ? some : all[i]);
            if (pass)
                assert_memory_equal(some, all[r.out_rows[i]], sizeof some);
        }
    }
    rig_close(&r);
}

/* A network that needs a part is refused by the backend that lacks it, with layer and part. */
static void refused(struct backend *be, const struct network *net, const char *why)
{
    struct error err = {{0}};
    assert_false(be->ops->supports(be, net, &err));
    assert_string_equal(err.msg, why);
}

static void test_supports(void **state)
{
    (void)state;
    struct backend_options opt = {.threads = 1};
    struct error err = {{0}};
    struct backend *cpu = backend_open_cpu(&opt, &err), *ref = backend_open_ref();
    if (cpu->ops == ref->ops) {
        cpu->ops->close(cpu);
        ref->ops->close(ref);
        print_message("skipped: this CPU has no kernels\n");
        skip();
    }
    struct weight w = {.n_in = 64, .n_out = 64, .n_expert = 1};
    struct weight many = {.n_in = 64, .n_out = 64, .n_expert = 8, .bias = true};
    struct layer plain_layer = {
        .mixer = {.block.in = {NORM_RMS, gains, NULL, 1e-6f},
                  .attention = {.n_heads = 2, .n_kv_heads = 2, .k_dim = 32, .v_dim = 32}},
        .mlp = {.block.in = {NORM_RMS, gains, NULL, 1e-6f}, .dense = {.gate_up = &w, .down = &w}}};
    struct layer layers[4] = {plain_layer, plain_layer, plain_layer, plain_layer};
    struct network net = {
        .n_layers = 4, .n_embd = 64, .n_vocab = 64, .layers = layers, .head.w = &w};
    assert_true(cpu->ops->supports(cpu, &net, &err));
    layers[3].mixer.attention.sinks = sinks;
    layers[3].mixer.attention.gated = true;
    assert_true(ref->ops->supports(ref, &net, &err));
    assert_true(cpu->ops->supports(cpu, &net, &err));
    layers[3].mixer.attention.norm_whole = true;
    assert_true(ref->ops->supports(ref, &net, &err));
    refused(cpu, &net,
            "layer 3: a gate beside whole norms or shared projections is not supported on cpu");
    layers[3] = plain_layer;
    layers[3].mixer.attention.bidirectional = true;
    layers[2].mlp.dense.act = ACT_PLAIN_GELU;
    layers[1].mixer.block.in.kind = NORM_LAYER;
    net.embed.positions = &w;
    assert_true(cpu->ops->supports(cpu, &net, &err));
    assert_true(ref->ops->supports(ref, &net, &err));
    net.embed.positions = NULL;
    layers[1] = layers[2] = layers[3] = plain_layer;
    layers[0].mixer.attention.v_dim = 16;
    assert_true(cpu->ops->supports(cpu, &net, &err));
    layers[0].mixer.attention.gated = true;
    refused(cpu, &net,
            "layer 0: a value dimension of its own beside a gate is not supported on cpu");
    layers[0] = plain_layer;
    layers[0].mlp.router = (struct router){.w = &w, .n_used = 2, .kind = ROUTER_SIGMOID};
    layers[0].mlp.router.n_groups = 300;
    layers[0].mlp.experts = (struct ffn){.gate_up = &many, .down = &many};
    refused(cpu, &net, "layer 0: more than 256 groups of experts are not supported on cpu");
    layers[0] = plain_layer;
    layers[2].mixer =
        (struct mixer){.kind = MIXER_LATENT, .latent = {.kv_rank = 1000, .rope_dim = 64}};
    assert_true(ref->ops->supports(ref, &net, &err));
    refused(cpu, &net, "layer 2: a latent of more than 1024 values is not supported on cpu");
    layers[2].mixer = (struct mixer){.kind = MIXER_DELTA_NET, .delta_net = {.conv_len = 65}};
    assert_true(ref->ops->supports(ref, &net, &err));
    refused(cpu, &net, "layer 2: a convolution of more than 64 rows is not supported on cpu");
    layers[2] = plain_layer;
    cpu->ops->close(cpu);
    ref->ops->close(ref);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_parts), cmocka_unit_test(test_shared_kv),
        cmocka_unit_test(test_activations),     cmocka_unit_test(test_norms),
        cmocka_unit_test(test_routers),         cmocka_unit_test(test_embed_head),
        cmocka_unit_test(test_out_rows),        cmocka_unit_test(test_supports),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
