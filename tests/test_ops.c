/*
 * The CPU backend's products (head, dense mlp, experts, embed) against ref.c: every format, every
 * instruction set this machine has, one to many threads, ragged shapes, mixed segments. Inputs on
 * the grid of the 8-bit activations must agree to float rounding; other inputs within the error of
 * rounding to 8 bits. A row's bytes must not depend on its batch or on the number of threads.
 */
#include "backend/backend.h"
#include "quant/quant.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "isas.h"
#include "size.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t rng_state = 1;

static uint32_t rnd(void)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng_state >> 33);
}

static float uniform(float lo, float hi)
{
    return lo + (hi - lo) * (float)(rnd() >> 7) / 16777216.0f;
}

static const enum dtype all_types[] = {
    DT_F32,     DT_F16,   DT_BF16,  DT_Q4_0,  DT_Q4_1,    DT_Q5_0,   DT_Q5_1,   DT_Q8_0,
    DT_Q2_K,    DT_Q3_K,  DT_Q4_K,  DT_Q5_K,  DT_Q6_K,    DT_IQ4_NL, DT_IQ4_XS, DT_MXFP4,
    DT_F8_E4M3, DT_GPTQ4, DT_IQ1_S, DT_IQ1_M, DT_IQ2_XXS, DT_IQ2_XS, DT_IQ2_S,  DT_IQ3_XXS,
    DT_IQ3_S,   DT_TQ1_0, DT_TQ2_0, DT_NVFP4, DT_NF4,     DT_FP4,
};
enum { N_TYPES = sizeof all_types / sizeof *all_types };

static uint16_t small_half(void)
{
    return f32_to_f16(uniform(0.002f, 0.02f));
}

/* One block of random but finite values. */
static void random_block(enum dtype t, uint8_t *p)
{
    int bytes = dtype_table[t].block_bytes;
    for (int i = 0; i < bytes; i++)
        p[i] = (uint8_t)rnd();
    float f = uniform(-1, 1);
    uint16_t h = f32_to_f16(f), b = f32_to_bf16(f), d = small_half(), m = small_half();
    switch (t) {
    case DT_F32:
        memcpy(p, &f, 4);
        break;
    case DT_F16:
        memcpy(p, &h, 2);
        break;
    case DT_BF16:
        memcpy(p, &b, 2);
        break;
    case DT_Q4_0:
    case DT_Q5_0:
    case DT_Q8_0:
    case DT_IQ4_NL:
    case DT_IQ4_XS:
    case DT_IQ1_S:
    case DT_IQ2_XXS:
    case DT_IQ2_XS:
    case DT_IQ2_S:
    case DT_IQ3_XXS:
    case DT_IQ3_S:
        memcpy(p, &d, 2);
        break;
    case DT_IQ1_M: /* a nibble of d at the top of each 16 bits of scales */
        for (int i = 0; i < 4; i++)
            p[49 + 2 * i] = (uint8_t)((p[49 + 2 * i] & 15) | (d >> 4 * i & 15) << 4);
        break;
    case DT_TQ1_0:
        memcpy(p + offsetof(struct block_tq1_0, d), &d, 2);
        break;
    case DT_TQ2_0:
        memcpy(p + offsetof(struct block_tq2_0, d), &d, 2);
        break;
    case DT_NF4:
    case DT_FP4:
        f = uniform(0.02f, 0.2f);
        memcpy(p, &f, 4);
        break;
    case DT_NVFP4:
        for (int i = 0; i < 4; i++)
            p[i] = (uint8_t)(8 + rnd() % 24);
        break;
    case DT_Q4_1:
    case DT_Q5_1:
    case DT_Q4_K:
    case DT_Q5_K:
        memcpy(p, &d, 2);
        memcpy(p + 2, &m, 2);
        break;
    case DT_Q2_K:
        memcpy(p + offsetof(struct block_q2_k, d), &d, 2);
        memcpy(p + offsetof(struct block_q2_k, dmin), &m, 2);
        break;
    case DT_Q3_K:
        memcpy(p + offsetof(struct block_q3_k, d), &d, 2);
        break;
    case DT_Q6_K:
        memcpy(p + offsetof(struct block_q6_k, d), &d, 2);
        break;
    case DT_MXFP4:
        p[0] = (uint8_t)(116 + rnd() % 10);
        break;
    case DT_F8_E4M3:
        p[0] = (uint8_t)(rnd() & 0xff);
        if ((p[0] & 0x7f) == 0x7f)
            p[0] = 0x3a;
        break;
    default:
        break;
    }
}

struct made {
    struct raw_weight w;
    void *owned[64];
    int n_owned;
};

static void *own(struct made *m, size_t bytes)
{
    assert_true(m->n_owned < 64);
    return m->owned[m->n_owned++] = mem_alloc(bytes ? bytes : 1);
}

static void made_free(struct made *m)
{
    for (int i = 0; i < m->n_owned; i++)
        mem_free(m->owned[i]);
}

static void add_seg(struct made *m, enum dtype t, int rows, bool act_order)
{
    struct raw_weight *w = &m->w;
    struct raw_seg *s = &w->seg[w->n_seg++];
    *s = (struct raw_seg){.type = t, .rows = rows};
    const uint8_t **data = own(m, (size_t)w->n_expert * sizeof *data);
    const void **scale = own(m, (size_t)w->n_expert * sizeof *scale);
    const uint8_t **zero = own(m, (size_t)w->n_expert * sizeof *zero);
    const int32_t **perm = own(m, (size_t)w->n_expert * sizeof *perm);
    size_t bytes = dtype_bytes(t, (size_t)w->n_in) * (size_t)rows;
    size_t blocks = bytes / (size_t)dtype_table[t].block_bytes;
    for (int e = 0; e < w->n_expert; e++) {
        uint8_t *p = own(m, bytes);
        for (size_t i = 0; i < blocks; i++)
            random_block(t, p + i * (size_t)dtype_table[t].block_bytes);
        data[e] = p;
        if (t == DT_F8_E4M3) {
            size_t n = (size_t)rows * (size_t)((w->n_in + 127) / 128);
            float *f = own(m, n * sizeof *f);
            for (size_t i = 0; i < n; i++)
                f[i] = uniform(0.001f, 0.01f);
            scale[e] = f;
        } else if (t == DT_NVFP4) {
            float *f = own(m, sizeof *f);
            *f = uniform(0.01f, 0.1f);
            scale[e] = f;
        } else if (t == DT_GPTQ4) {
            s->group_len = w->n_in % 128 == 0 ? 128 : 32;
            size_t n = (size_t)rows * (size_t)((w->n_in + s->group_len - 1) / s->group_len);
            uint16_t *h = own(m, n * sizeof *h);
            uint8_t *z = own(m, n);
            int32_t *order = own(m, (size_t)w->n_in * sizeof *order);
            for (size_t i = 0; i < n; i++) {
                h[i] = small_half();
                z[i] = (uint8_t)(rnd() % 17);
            }
            for (int i = 0; i < w->n_in; i++)
                order[i] = i;
            for (int i = w->n_in - 1; i > 0; i--) {
                int j = (int)(rnd() % (uint32_t)(i + 1)), swap = order[i];
                order[i] = order[j];
                order[j] = swap;
            }
            scale[e] = h;
            zero[e] = z;
            perm[e] = order;
        }
    }
    s->data = data;
    if (t == DT_F8_E4M3 || t == DT_GPTQ4 || t == DT_NVFP4)
        s->scale = scale;
    if (t == DT_GPTQ4) {
        s->zero = zero;
        s->perm = act_order ? perm : NULL;
    }
    w->n_out += rows;
}

static void add_bias(struct made *m)
{
    float *b = own(m, (size_t)m->w.n_out * sizeof *b);
    for (int i = 0; i < m->w.n_out; i++)
        b[i] = uniform(-1, 1);
    m->w.bias = b;
}

/* Integers up to 127, each of +-127 at least once in any 32 columns: 8 bits hold them exactly. */
static void fill_grid(float *x, int rows, int n_in)
{
    for (int t = 0; t < rows; t++)
        for (int i = 0; i < n_in; i++)
            x[t * n_in + i] = i % 32 == (t + i / 32) % 32 ? (rnd() & 1 ? 127.0f : -127.0f)
                                                          : (float)((int)(rnd() % 255) - 127);
}

static void fill_random(float *x, int rows, int n_in)
{
    for (int i = 0; i < rows * n_in; i++)
        x[i] = uniform(-1, 1) * uniform(0, 1) * 3.0f;
}

enum { MAX_ROWS = 150, SMALL_ROWS = 33 };

/* A network of nothing but one layer's mlp and a head, and a step of `rows` rows, all of them out. */
struct rig {
    struct network net;
    struct layer layer;
    struct bounds bounds;
    struct batch b;
    int32_t tokens[MAX_ROWS], pos[MAX_ROWS], slot[MAX_ROWS], out_rows[MAX_ROWS];
    int32_t q_start[2], kv_len[1], pages[MAX_ROWS];
};

static void rig_init(struct rig *r, int n_embd, int n_vocab)
{
    *r = (struct rig){
        .net = {.n_layers = 1, .n_embd = n_embd, .n_vocab = n_vocab, .layers = &r->layer},
        .layer.mixer.attention = {.n_heads = 1, .n_kv_heads = 1, .k_dim = 64, .v_dim = 64},
        .bounds = {.page_len = 16,
                   .n_pages = 1,
                   .k_type = DT_F32,
                   .v_type = DT_F32,
                   .max_tokens = MAX_ROWS,
                   .max_seqs = 1,
                   .max_out = MAX_ROWS,
                   .max_pages = MAX_ROWS},
    };
    for (int i = 0; i < MAX_ROWS; i++) {
        r->slot[i] = -1;
        r->pos[i] = r->out_rows[i] = i;
    }
}

static void rig_begin(struct rig *r, struct backend *be, int rows)
{
    r->q_start[1] = r->kv_len[0] = rows;
    r->b = (struct batch){.n_tokens = rows,
                          .n_seqs = 1,
                          .n_out = rows,
                          .max_pages = MAX_ROWS,
                          .tokens = r->tokens,
                          .pos = r->pos,
                          .slot = r->slot,
                          .q_start = r->q_start,
                          .kv_len = r->kv_len,
                          .pages = r->pages,
                          .out_rows = r->out_rows};
    be->ops->begin(be, &r->b);
}

/* y (rows, n_out) = x W^T + bias, by way of a head without a norm */
static void linear(struct rig *r, struct backend *be, const struct weight *w, const float *x,
                   float *y, int rows)
{
    rig_begin(r, be, rows);
    be->ops->stream->put(be, x, rows);
    be->ops->head(be, &(struct head){.w = w});
    assert_true(be->ops->end(be, NULL, NULL));
    for (int i = 0; i < rows; i++)
        be->ops->logits(be, i, y + (size_t)i * (size_t)w->n_out);
}

static struct backend *open_with(enum isa isa, struct backend_options opt)
{
    struct error err = {{0}};
    setenv("STEEL_ISA", isa_name(isa), 1);
    opt.device = "cpu";
    struct backend *be = backend_open_cpu(&opt, &err);
    unsetenv("STEEL_ISA");
    if (!be)
        fail_msg("%s", err.msg);
    return be;
}

static struct backend *open_cpu(enum isa isa, int threads, bool no_repack)
{
    return open_with(isa, (struct backend_options){
                              .threads = threads, .deterministic = true, .no_repack = no_repack});
}

static void prepare(struct backend *be, struct rig *r)
{
    struct error err = {{0}};
    if (!be->ops->supports(be, &r->net, &err) || !be->ops->prepare(be, &r->net, &r->bounds, &err))
        fail_msg("%s", err.msg);
}

static struct weight upload(struct backend *be, const struct raw_weight *raw, enum weight_role role)
{
    struct error err = {{0}};
    struct weight w;
    if (!be->ops->upload(be, raw, role, &w, &err))
        fail_msg("%s", err.msg);
    return w;
}

static float *floats(size_t n)
{
    return mem_zalloc(n + 16, sizeof(float));
}

/* Norms of each output: |w_row| * |x_row|, what errors are measured against. */
static void norms(const struct raw_weight *w, const float *x, int rows, float *out)
{
    float *row = floats((size_t)w->n_in);
    for (int o = 0; o < w->n_out; o++) {
        raw_weight_row(w, 0, o, row);
        double ww = 0;
        for (int i = 0; i < w->n_in; i++)
            ww += (double)row[i] * row[i];
        for (int t = 0; t < rows; t++) {
            double xx = 0;
            for (int i = 0; i < w->n_in; i++)
                xx += (double)x[t * w->n_in + i] * x[t * w->n_in + i];
            out[t * w->n_out + o] = (float)sqrt(ww * xx) + 1e-6f;
        }
    }
    mem_free(row);
}

static void check_near(const char *what, const float *y, const float *ref, const float *norm,
                       size_t n, float tolerance)
{
    for (size_t i = 0; i < n; i++) {
        float diff = fabsf(y[i] - ref[i]) / norm[i];
        if (!(diff <= tolerance))
            fail_msg("%s: element %zu is %g, not %g (error %g of its norm, allowed %g)", what, i,
                     (double)y[i], (double)ref[i], (double)diff, (double)tolerance);
    }
}

static const int row_counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 24, 31, 64, MAX_ROWS};

static void check_linear(const struct made *m, const char *name)
{
    const struct raw_weight *raw = &m->w;
    size_t n_in = (size_t)raw->n_in, n_out = (size_t)raw->n_out;
    const int most = test_small() ? SMALL_ROWS : MAX_ROWS;
    const size_t n_all = (size_t)most * n_out;
    float *grid = floats(MAX_ROWS * n_in), *x = floats(MAX_ROWS * n_in);
    float *want_grid = floats(MAX_ROWS * n_out), *want = floats(MAX_ROWS * n_out);
    float *norm_grid = floats(MAX_ROWS * n_out), *norm = floats(MAX_ROWS * n_out);
    float *y = floats(MAX_ROWS * n_out), *all = floats(MAX_ROWS * n_out);
    fill_grid(grid, most, raw->n_in);
    fill_random(x, most, raw->n_in);
    struct rig *rig = mem_zalloc(1, sizeof *rig);
    rig_init(rig, raw->n_in, raw->n_out);
    struct backend *ref = backend_open_ref();
    struct weight rw = upload(ref, raw, WEIGHT_HEAD);
    rig->net.head.w = &rw;
    prepare(ref, rig);
    linear(rig, ref, &rw, grid, want_grid, most);
    linear(rig, ref, &rw, x, want, most);
    ref->ops->release(ref, &rw);
    ref->ops->close(ref);
    norms(raw, grid, most, norm_grid);
    norms(raw, x, most, norm);

    enum isa isa;
    for (int set = 1; isa_at(set, &isa); set++) {
        for (int mode = 0; mode < 4; mode++) {
            if (test_small() && mode == 1)
                continue;
            int threads = 1 + mode % 3;
            char what[200];
            snprintf(what, sizeof what, "linear %s (%d x %d), %s, %d threads%s", name, raw->n_out,
                     raw->n_in, isa_name(isa), threads, mode == 3 ? ", no repack" : "");
            struct backend *be = open_cpu(isa, threads, mode == 3);
            struct weight w = upload(be, raw, WEIGHT_HEAD);
            rig->net.head.w = &w;
            prepare(be, rig);
            assert_int_equal(w.bytes, raw_weight_bytes(raw));
            linear(rig, be, &w, grid, y, most);
            check_near(what, y, want_grid, norm_grid, n_all, 2e-6f);
            float *rows = mode == 0 ? all : y;
            linear(rig, be, &w, x, rows, most);
            check_near(what, rows, want, norm, n_all, 6e-3f);
            if (mode == 1 || mode == 2)
                assert_memory_equal(y, all, n_all * sizeof(float));
            for (size_t i = 0; mode == 0 && i < sizeof row_counts / sizeof *row_counts; i++) {
                if (row_counts[i] > most)
                    break;
                size_t n = (size_t)row_counts[i], first = ((size_t)most - n) / 2;
                memset(y, 0x7f, n_all * sizeof(float));
                linear(rig, be, &w, x + first * n_in, y, row_counts[i]);
                if (memcmp(y, all + first * n_out, n * n_out * sizeof(float)))
                    fail_msg("%s: a batch of %zu rows differs from the large one", what, n);
            }
            be->ops->release(be, &w);
            be->ops->close(be);
        }
    }
    float *owned[] = {grid, x, want_grid, want, norm_grid, norm, y, all};
    mem_free(rig);
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        mem_free(owned[i]);
}

static void linear_every_format(void **state)
{
    (void)state;
    static const int shapes[][2] = {{256, 48}, {768, 33}, {512, 7}, {1280, 80}};
    for (int i = 0; i < N_TYPES; i++)
        for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
            if (test_small() && k == 3 && i % 7) /* the largest */
                continue;
            struct made m = {.w = {.n_in = shapes[k][0], .n_expert = 1}};
            add_seg(&m, all_types[i], shapes[k][1], k == 2);
            if (k == 1)
                add_bias(&m);
            check_linear(&m, dtype_name(all_types[i]));
            made_free(&m);
        }
}

/* Formats whose blocks are 32 or 1 long take widths that are no multiple of 256, or of anything. */
static void linear_odd_widths(void **state)
{
    (void)state;
    static const enum dtype small[] = {DT_F32,    DT_F16,   DT_BF16, DT_Q8_0, DT_Q4_0,
                                       DT_IQ4_NL, DT_MXFP4, DT_Q5_1, DT_GPTQ4};
    for (size_t i = 0; i < sizeof small / sizeof *small; i++)
        for (int n_in = 32; n_in <= 160; n_in += 64) {
            struct made m = {.w = {.n_in = n_in, .n_expert = 1}};
            add_seg(&m, small[i], 40, false);
            check_linear(&m, dtype_name(small[i]));
            made_free(&m);
        }
    static const int widths[] = {1, 7, 50, 99};
    for (size_t i = 0; i < 3; i++)
        for (size_t k = 0; k < sizeof widths / sizeof *widths; k++) {
            struct made m = {.w = {.n_in = widths[k], .n_expert = 1}};
            add_seg(&m, small[i], 21, false);
            check_linear(&m, dtype_name(small[i]));
            made_free(&m);
        }
}

static void linear_mixed_segments(void **state)
{
    (void)state;
    static const enum dtype mixes[][3] = {
        {DT_Q4_K, DT_Q4_K, DT_Q6_K}, {DT_Q8_0, DT_Q2_K, DT_Q4_K}, {DT_F16, DT_MXFP4, DT_Q6_K}};
    for (size_t i = 0; i < 3; i++) {
        struct made m = {.w = {.n_in = 512, .n_expert = 1}};
        add_seg(&m, mixes[i][0], 64, false);
        add_seg(&m, mixes[i][1], 24, false);
        add_seg(&m, mixes[i][2], 13, false);
        add_bias(&m);
        check_linear(&m, "mixed");
        made_free(&m);
    }
}

/* The data of a transient weight may vanish after upload. */
static void transient_weights_are_copied(void **state)
{
    (void)state;
    for (int i = 0; i < N_TYPES; i++) {
        struct made m = {.w = {.n_in = 256, .n_expert = 1, .transient = true}};
        add_seg(&m, all_types[i], 20, true);
        float x[256], y[20], want[20], norm[20];
        fill_grid(x, 1, 256);
        struct rig rig;
        rig_init(&rig, 256, 20);
        struct backend *ref = backend_open_ref();
        struct weight rw = upload(ref, &m.w, WEIGHT_HEAD);
        rig.net.head.w = &rw;
        prepare(ref, &rig);
        linear(&rig, ref, &rw, x, want, 1);
        ref->ops->release(ref, &rw);
        ref->ops->close(ref);
        norms(&m.w, x, 1, norm);
        for (int no_repack = 0; no_repack < 2; no_repack++) {
            struct made copy = {.w = m.w};
            struct backend *be = open_cpu(isa_best(), 2, no_repack);
            struct weight w = upload(be, &copy.w, WEIGHT_HEAD);
            if (no_repack == 1) /* the last use: the source goes away */
                made_free(&m);
            rig.net.head.w = &w;
            prepare(be, &rig);
            linear(&rig, be, &w, x, y, 1);
            check_near(dtype_name(all_types[i]), y, want, norm, 20, 2e-6f);
            be->ops->release(be, &w);
            be->ops->close(be);
        }
    }
}

static void embed_is_exact(void **state)
{
    (void)state;
    for (int i = 0; i < N_TYPES; i++) {
        struct made m = {.w = {.n_in = 512, .n_expert = 1}};
        add_seg(&m, all_types[i], 37, true);
        struct rig rig;
        rig_init(&rig, 512, 37);
        for (int t = 0; t < 37; t++)
            rig.tokens[t] = (t * 5) % 37;
        float *want = floats(37 * 512), *x = floats(37 * 512);
        for (int t = 0; t < 37; t++)
            raw_weight_row(&m.w, 0, rig.tokens[t], want + t * 512);
        enum isa isa;
        for (int set = 1; isa_at(set, &isa); set++)
            for (int no_repack = 0; no_repack < 2; no_repack++) {
                struct backend *be = open_cpu(isa, 2, no_repack);
                struct weight w = upload(be, &m.w, WEIGHT_EMBED);
                rig.net.embed.tokens = rig.net.head.w = &w;
                prepare(be, &rig);
                rig_begin(&rig, be, 37);
                be->ops->embed(be, &rig.net.embed);
                be->ops->stream->get(be, x, 37);
                be->ops->end(be, NULL, NULL);
                if (memcmp(x, want, 37 * 512 * sizeof(float)))
                    fail_msg("embed %s on %s is not exact", dtype_name(all_types[i]),
                             isa_name(isa));
                be->ops->release(be, &w);
                be->ops->close(be);
            }
        mem_free(want);
        mem_free(x);
        made_free(&m);
    }
}

/* Relative error of a whole output, for ops with rounding inside. */
static void check_close(const char *what, const float *y, const float *want, size_t n, double limit)
{
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        diff += ((double)y[i] - want[i]) * ((double)y[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    if (!(diff <= limit * limit * norm))
        fail_msg("%s: relative error %g, allowed %g", what, sqrt(diff / norm), limit);
}

struct test_mlp {
    struct made router, gate_up, down;
    int n_embd, n_ff, n_expert, used;
    const char *name;
};

static struct test_mlp make_mlp(enum dtype gu, enum dtype dn, int n_embd, int n_ff, int n_expert,
                                int used)
{
    struct test_mlp m = {.n_embd = n_embd, .n_ff = n_ff, .n_expert = n_expert, .used = used};
    int experts = n_expert ? n_expert : 1;
    m.gate_up.w = (struct raw_weight){.n_in = n_embd, .n_expert = experts};
    m.down.w = (struct raw_weight){.n_in = n_ff, .n_expert = experts};
    m.router.w = (struct raw_weight){.n_in = n_embd, .n_expert = 1};
    if (n_ff % 32) {
        add_seg(&m.gate_up, gu, 2 * n_ff, false);
    } else {
        add_seg(&m.gate_up, gu, n_ff, false);
        add_seg(&m.gate_up, gu, n_ff, false);
    }
    add_seg(&m.down, dn, n_embd, false);
    if (n_expert)
        add_seg(&m.router, DT_F32, n_expert, false);
    m.name = dtype_name(gu);
    return m;
}

static void mlp_free(struct test_mlp *m)
{
    made_free(&m->router);
    made_free(&m->gate_up);
    made_free(&m->down);
}

/* y = what the mlp adds to x */
static void run_mlp(struct backend *be, const struct test_mlp *m, const float *x, float *y,
                    int rows)
{
    struct weight gu = upload(be, &m->gate_up.w, m->n_expert ? WEIGHT_EXPERTS : WEIGHT_LINEAR);
    struct weight dn = upload(be, &m->down.w, m->n_expert ? WEIGHT_EXPERTS : WEIGHT_LINEAR);
    struct weight ro = {0}, head = {.n_in = m->n_embd, .n_out = 64, .n_expert = 1};
    struct rig rig;
    rig_init(&rig, m->n_embd, 64);
    rig.net.head.w = &head;
    struct mlp *l = &rig.layer.mlp;
    if (m->n_expert) {
        ro = upload(be, &m->router.w, WEIGHT_ROUTER);
        l->router = (struct router){.w = &ro, .n_used = m->used, .renorm = true};
    }
    *(m->n_expert ? &l->experts : &l->dense) = (struct ffn){.gate_up = &gu, .down = &dn};
    prepare(be, &rig);
    rig_begin(&rig, be, rows);
    be->ops->stream->put(be, x, rows);
    be->ops->mlp(be, l, 0);
    be->ops->stream->get(be, y, rows);
    assert_true(be->ops->end(be, NULL, NULL));
    for (size_t i = 0; i < (size_t)rows * (size_t)m->n_embd; i++)
        y[i] -= x[i];
    be->ops->release(be, &gu);
    be->ops->release(be, &dn);
    if (m->n_expert)
        be->ops->release(be, &ro);
}

static void check_mlp(struct test_mlp *m, double limit)
{
    size_t n = (size_t)m->n_embd;
    const int most = test_small() ? SMALL_ROWS : MAX_ROWS;
    float *x = floats(MAX_ROWS * n), *want = floats(MAX_ROWS * n), *y = floats(MAX_ROWS * n);
    float *all = floats(MAX_ROWS * n);
    fill_random(x, most, m->n_embd);
    for (size_t i = 0; i < (size_t)most * n; i++)
        x[i] *= 0.1f;
    struct backend *ref = backend_open_ref();
    run_mlp(ref, m, x, want, most);
    ref->ops->close(ref);
    enum isa isa;
    for (int set = 1; isa_at(set, &isa); set++)
        for (int threads = 1; threads <= (test_small() ? 2 : 3); threads++) {
            char what[160];
            snprintf(what, sizeof what, "%s %s %d/%d, %s, %d threads", m->n_expert ? "moe" : "ffn",
                     m->name, m->n_embd, m->n_ff, isa_name(isa), threads);
            struct backend *be = open_cpu(isa, threads, false);
            run_mlp(be, m, x, threads == 1 ? all : y, most);
            if (threads == 1)
                check_close(what, all, want, (size_t)most * n, limit);
            else if (memcmp(all, y, (size_t)most * n * sizeof(float)))
                fail_msg("%s: the bytes depend on the threads", what);
            static const int counts[] = {1, 2, 5, 9, 40};
            for (size_t i = 0; threads == 2 && i < sizeof counts / sizeof *counts; i++) {
                size_t rows = (size_t)counts[i], first = (size_t)most / 2;
                if (first + rows > (size_t)most)
                    break;
                run_mlp(be, m, x + first * n, y, counts[i]);
                if (memcmp(all + first * n, y, rows * n * sizeof(float)))
                    fail_msg("%s: the bytes of %zu rows depend on the batch", what, rows);
            }
            be->ops->close(be);
        }
    /* Without promises about bytes, other kernels may be chosen; by the rows of the batch or by those
     * that an expert gets. One row alone may be worse than the mean of all. */
    for (int set = 1; isa_at(set, &isa); set++) {
        static const int counts[] = {1, 5, 16, 26, 40, 100, MAX_ROWS};
        struct backend *be = open_with(isa, (struct backend_options){.threads = 2});
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            if (counts[i] > most)
                break;
            char what[160];
            snprintf(what, sizeof what, "%s %s %d/%d, %s, %d rows", m->n_expert ? "moe" : "ffn",
                     m->name, m->n_embd, m->n_ff, isa_name(isa), counts[i]);
            size_t first = (size_t)(most - counts[i]) / 2;
            run_mlp(be, m, x + first * n, y, counts[i]);
            check_close(what, y, want + first * n, (size_t)counts[i] * n, 2 * limit);
        }
        be->ops->close(be);
    }
    mem_free(x);
    mem_free(want);
    mem_free(y);
    mem_free(all);
}

static void ffn_and_moe(void **state)
{
    (void)state;
    static const struct {
        enum dtype gu, dn;
        int n_embd, n_ff, n_expert, used;
        double limit;
    } cases[] = {
        {DT_F32, DT_F32, 50, 21, 0, 0, 1e-5},
        {DT_F32, DT_F32, 50, 21, 6, 3, 1e-5},
        {DT_BF16, DT_F16, 96, 64, 5, 2, 1e-2},
        {DT_Q4_K, DT_Q6_K, 512, 256, 0, 0, 1.5e-2},
        {DT_Q4_K, DT_Q6_K, 512, 256, 8, 3, 1.5e-2},
        {DT_Q4_K, DT_Q4_K, 256, 512, 4, 1, 1.5e-2},
        {DT_Q8_0, DT_Q8_0, 128, 96, 7, 7, 1.5e-2},
        {DT_Q8_0, DT_Q8_0, 64, 160, 0, 0, 1.5e-2},
        {DT_Q5_K, DT_Q5_K, 256, 256, 6, 2, 1.5e-2},
        {DT_IQ4_XS, DT_IQ4_XS, 256, 256, 6, 2, 1.5e-2},
        {DT_MXFP4, DT_MXFP4, 96, 64, 9, 4, 1.5e-2},
        {DT_GPTQ4, DT_GPTQ4, 256, 128, 6, 2, 1.5e-2},
        {DT_Q4_0, DT_Q4_0, 96, 64, 9, 4, 1.5e-2},
        {DT_F8_E4M3, DT_F8_E4M3, 256, 128, 6, 2, 1.5e-2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct test_mlp m = make_mlp(cases[i].gu, cases[i].dn, cases[i].n_embd, cases[i].n_ff,
                                     cases[i].n_expert, cases[i].used);
        check_mlp(&m, cases[i].limit);
        mlp_free(&m);
    }
}

int main(void)
{
    if (!isa_has(isa_best(), FIRST_ISA)) {
        puts(NO_KERNELS);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_every_format),   cmocka_unit_test(linear_odd_widths),
        cmocka_unit_test(linear_mixed_segments), cmocka_unit_test(transient_weights_are_copied),
        cmocka_unit_test(embed_is_exact),        cmocka_unit_test(ffn_and_moe),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
