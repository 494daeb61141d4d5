/*
 * Every op of the CUDA backend against ref.c: every number format, ragged shapes, one to many rows,
 * decodes, prompts and mixes of them, all cache types; and recorded steps against the same steps run
 * op by op. Runs on a GPU (make test-gpu) and, linked with cudasim.cpp, on any CPU (smaller shapes).
 * Outputs are poisoned with NaNs before each op. Errors are ||out - ref|| / ||ref||.
 *   test_ops [filter [seed]]: only the groups whose name contains it; other random numbers
 */
#include "base/mem.h"
#include "duo.h"
#include "sample/sampler.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const enum dtype all_types[] = {DT_F32,   DT_F16,   DT_BF16,    DT_Q4_0,   DT_Q4_1,
                                       DT_Q5_0,  DT_Q5_1,  DT_Q8_0,    DT_Q2_K,   DT_Q3_K,
                                       DT_Q4_K,  DT_Q5_K,  DT_Q6_K,    DT_IQ4_NL, DT_IQ4_XS,
                                       DT_MXFP4, DT_IQ3_S, DT_F8_E4M3, DT_GPTQ4};
enum { N_TYPES = (int)(sizeof all_types / sizeof *all_types) };

/* y = x W^T on both, y left for the caller to compare and free. x: (rows, n_in), freed. */
static struct array linear_both(struct duo *d, const struct shape *s,
                                const struct random_spec *spec, struct array x, int rows)
{
    int n_out = 0;
    for (int i = 0; i < spec->n_seg; i++)
        n_out += spec->rows[i];
    struct duo_weight w;
    weight_new(d, &w, spec);
    struct array y = array_new(d, (size_t)(n_out * rows));
    poison(d, &y);
    struct plan p;
    plan_make(&p, s, (const int[][2]){{0, 1}}, 1, false);
    begin(d, &p.b);
    d->ref->ops->linear(d->ref, &w.ref, x.ref, y.ref, rows);
    d->gpu->ops->linear(d->gpu, &w.gpu, x.gpu, y.gpu, rows);
    end(d, NULL, NULL);
    array_free(d, &x);
    weight_free(d, &w);
    mem_free(p.pages);
    return y;
}

/* A product of random rows, named `what` and its sizes. */
static void check_linear(struct duo *d, const struct shape *s, const struct random_spec *spec,
                         int rows, const char *what)
{
    struct array y =
        linear_both(d, s, spec, array_random(d, (size_t)(spec->n_in * rows), 1.0f), rows);
    char name[100];
    snprintf(name, sizeof name, "%s %d x %d, %d rows", what, spec->n_in, (int)y.n / rows, rows);
    array_check(d, name, &y, y.n, TOL);
    array_free(d, &y);
}

static void test_linear(void)
{
    int before = n_checks;
    if (!wanted("linear"))
        return;
    struct shape s = base_shape();
    s.n_ff = 4352; /* the widest row */
    struct duo d;
    duo_open(&d, &s);
    const int shapes[][3] = {{256, 528, 1},     {512, 544, 3},    {768, 530, 8},    {1024, 560, 9},
                             {2304, 528, 2},    {512, 640, 37},   {256, 1100, 70},  {512, 520, 130},
                             {256, 4400, 1},    {256, 528, 300},  {512, 560, 20},   {4352, 544, 5},
                             {1280, 4400, 300}, {256, 1040, 400}, {256, 16900, 300}};
    for (int i = 0; i < N_TYPES; i++)
        for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++) {
            enum dtype t = all_types[i];
            int n_in = shapes[j][0], n_out = shapes[j][1], rows = shapes[j][2];
            if (SIM && j > 4 && t != DT_Q4_K && t != DT_Q6_K && t != DT_F16 && t != DT_Q5_0)
                continue;
            /* rings that go round with whole k tiles, blocks that take several tiles: slow to check, so not with
             * every format */
            if (rows * n_out > 1000000 && (SIM || (t != DT_Q4_K && t != DT_Q6_K)))
                continue;
            if (dtype_table[t].block_len < 256 && j % 2 == 0)
                n_in -= 32; /* a row that does not fill its tile */
            struct random_spec spec = {.n_in = n_in,
                                       .n_expert = 1,
                                       .n_seg = 1,
                                       .rows = {n_out},
                                       .type = {t},
                                       .bias = j & 1,
                                       .act_order = j == 2,
                                       .group_len = j == 3 ? 32 : 128};
            char what[40];
            snprintf(what, sizeof what, "linear %s", dtype_name(t));
            check_linear(&d, &s, &spec, rows, what);
        }
    duo_close(&d);
    report("linear", before);
}

/* Rows as long as models have them, at every number of rows that changes a kernel's layout: what
 * fits one machine's shared memory at one size does not at another. */
static void test_shapes(void)
{
    int before = n_checks;
    if (!wanted("shapes"))
        return;
    static const int widths[] = {256, 768, 896, 1024, 2048, 2560, 3072, 4096, 9728, 14336};
    static const enum dtype types[] = {DT_Q4_K, DT_Q6_K, DT_Q8_0, DT_BF16, DT_Q5_K};
    static const int rows_of[] = {1, 3, 5, 9, 17, 40, 70, 260};
    struct shape s = base_shape();
    s.n_embd = 14336; /* what scratch is sized by */
    struct duo d;
    duo_open(&d, &s);
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (size_t j = 0; j < sizeof types / sizeof *types; j++)
            for (size_t k = 0; k < sizeof rows_of / sizeof *rows_of; k++) {
                int n_in = widths[i], n_out = 48 + 16 * (int)(i % 2), rows = rows_of[k];
                if ((dtype_table[types[j]].block_len == 256 && n_in % 256) ||
                    (SIM && (rows > 40 || (size_t)n_in * (size_t)rows > 100000 || (i + j + k) % 2)))
                    continue;
                struct random_spec spec = {.n_in = n_in,
                                           .n_expert = 1,
                                           .n_seg = 2, /* one would be kept in floats */
                                           .rows = {n_out, 16},
                                           .type = {types[j], types[j]}};
                check_linear(&d, &s, &spec, rows, dtype_name(types[j]));
            }
    duo_close(&d);
    report("shapes", before);
}

/* Segments of several formats, values far from 1, rows that differ by orders of magnitude. */
static void test_segments(void)
{
    int before = n_checks;
    if (!wanted("segments"))
        return;
    struct shape s = base_shape();
    struct duo d;
    duo_open(&d, &s);
    const enum dtype mixes[][3] = {{DT_Q4_K, DT_Q4_K, DT_Q6_K},
                                   {DT_Q6_K, DT_Q4_K, DT_Q8_0},
                                   {DT_Q8_0, DT_F16, DT_GPTQ4},
                                   {DT_Q4_K, DT_F32, DT_Q5_K}};
    for (int i = 0; i < 4; i++)
        for (int rows = 1; rows <= 40; rows += rows < 5 ? 1 : 12) {
            struct random_spec spec = {.n_in = 512,
                                       .n_expert = 1,
                                       .n_seg = 3,
                                       .rows = {256, 40, 72},
                                       .type = {mixes[i][0], mixes[i][1], mixes[i][2]},
                                       .bias = true,
                                       .group_len = 64};
            float *h = mem_alloc((size_t)(512 * rows) * sizeof(float));
            for (int t = 0; t < rows; t++)
                for (int k = 0; k < 512; k++)
                    h[t * 512 + k] =
                        random_float(&rng) * (rows <= 8 ? powf(10, (float)(t * 5 - 15)) : 3.0f);
            struct array x = array_new(&d, (size_t)(512 * rows));
            array_set(&d, &x, h);
            mem_free(h);
            struct array y = linear_both(&d, &s, &spec, x, rows);
            float *got = mem_alloc(y.n * sizeof(float));
            d.gpu->ops->copy_out(d.gpu, got, y.gpu, y.n * sizeof(float));
            for (int t = 0; t < rows; t++) {
                char what[100];
                snprintf(what, sizeof what, "segments %d row %d of %d", i, t, rows);
                check_close(what, got + t * 368, y.ref + t * 368, 368, TOL);
            }
            mem_free(got);
            array_free(&d, &y);
        }
    duo_close(&d);
    report("segments", before);
}

/* Batches of K-quants: every width of a tile of rows, k in one piece and in many, segments that begin in
 * the middle of a block. */
static void test_batches(void)
{
    int before = n_checks;
    if (!wanted("batches"))
        return;
    static const int widths[] = {512, 1280, 2048, 4096}, rows_of[] = {9, 32, 33, 90, 128, 131, 256};
    struct shape s = base_shape();
    s.n_embd = 4096;
    struct duo d;
    duo_open(&d, &s);
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (size_t k = 0; k < sizeof rows_of / sizeof *rows_of; k++) {
            int n_in = widths[i], rows = rows_of[k];
            if (SIM && (size_t)n_in * (size_t)rows > 100000)
                continue;
            struct random_spec spec = {.n_in = n_in,
                                       .n_expert = 1,
                                       .n_seg = 3,
                                       .rows = {256, 64, 72},
                                       .type = {DT_Q4_K, DT_Q4_K, k % 2 ? DT_Q6_K : DT_Q4_K},
                                       .bias = i % 2 == 1};
            check_linear(&d, &s, &spec, rows, "batch");
        }
    duo_close(&d);
    report("batches", before);
}

/* Embedding rows are exact: this proves the packing of every format, element by element. */
static void test_embed(void)
{
    int before = n_checks;
    if (!wanted("embed"))
        return;
    struct shape s = base_shape();
    s.n_vocab = 536;
    for (int i = 0; i < N_TYPES; i++) {
        struct duo d;
        enum dtype t = all_types[i];
        int n_in = dtype_table[t].block_len < 256 ? 544 : 512;
        s.n_embd = n_in;
        duo_open(&d, &s);
        struct random_spec spec = {
            .n_in = n_in, .n_expert = 1, .n_seg = 1, .rows = {536}, .type = {t}, .group_len = 32};
        struct duo_weight w;
        weight_new(&d, &w, &spec);
        struct plan p;
        plan_make(&p, &s, (const int[][2]){{0, 60}, {3, 1}, {0, 40}}, 3, false);
        p.tokens[0] = 0;
        p.tokens[1] = 535;
        struct array x = array_new(&d, (size_t)(p.b.n_tokens * n_in));
        poison(&d, &x);
        begin(&d, &p.b);
        d.ref->ops->embed(d.ref, &w.ref, x.ref);
        d.gpu->ops->embed(d.gpu, &w.gpu, x.gpu);
        end(&d, NULL, NULL);
        char what[100];
        snprintf(what, sizeof what, "embed %s", dtype_name(t));
        array_check(&d, what, &x, x.n, 1e-6);
        array_free(&d, &x);
        weight_free(&d, &w);
        mem_free(p.pages);
        duo_close(&d);
    }
    report("embed", before);
}

static void test_norm_gather(void)
{
    int before = n_checks;
    if (!wanted("norm, gather"))
        return;
    const int widths[] = {256, 100, 896};
    for (int i = 0; i < 3; i++)
        for (int big = 0; big < 2; big++) {
            struct shape s = base_shape();
            struct duo d;
            s.n_embd = widths[i];
            duo_open(&d, &s);
            struct plan p;
            if (big)
                plan_make(&p, &s, (const int[][2]){{0, 30}, {5, 1}, {9, 1}, {7, 12}}, 4, false);
            else
                plan_make(&p, &s, (const int[][2]){{5, 1}, {9, 1}, {7, 4}}, 3, false);
            int rows = p.b.n_tokens;
            size_t n = (size_t)(rows * widths[i]);
            struct array x = array_random(&d, n, 5.0f), dd = array_random(&d, n, 2.0f);
            struct array gain = array_random(&d, (size_t)widths[i], 1.0f), out = array_new(&d, n);
            struct array g = array_new(&d, (size_t)(p.b.n_out * widths[i]));
            for (int with_d = 0; with_d < 2; with_d++) {
                poison(&d, &out);
                poison(&d, &g);
                begin(&d, &p.b);
                d.ref->ops->add_norm(d.ref, x.ref, with_d ? dd.ref : NULL, gain.ref, out.ref, rows);
                d.gpu->ops->add_norm(d.gpu, x.gpu, with_d ? dd.gpu : NULL, gain.gpu, out.gpu, rows);
                d.ref->ops->gather(d.ref, x.ref, g.ref, widths[i]);
                d.gpu->ops->gather(d.gpu, x.gpu, g.gpu, widths[i]);
                end(&d, NULL, NULL);
                array_check(&d, "add_norm n", &out, n, 1e-6);
                array_check(&d, "add_norm x", &x, n, 1e-6);
                array_check(&d, "gather", &g, g.n, 1e-6);
            }
            array_free(&d, &x);
            array_free(&d, &dd);
            array_free(&d, &gain);
            array_free(&d, &out);
            array_free(&d, &g);
            mem_free(p.pages);
            duo_close(&d);
        }
    report("norm, gather", before);
}

static void kv_check(struct duo *d, const char *what, const void *ref, const void *gpu)
{
    size_t bytes = kv_bytes(&d->s), n = bytes / (d->s.kv_type == DT_F32 ? 4 : 2);
    uint8_t *got = mem_alloc(bytes);
    float *a = mem_alloc(n * sizeof(float)), *b = mem_alloc(n * sizeof(float));
    d->gpu->ops->copy_out(d->gpu, got, gpu, bytes);
    quant_dequantize(d->s.kv_type, got, a, n);
    quant_dequantize(d->s.kv_type, ref, b, n);
    check_close(what, a, b, n, d->s.kv_type == DT_BF16 ? 2e-3 : TOL);
    mem_free(got);
    mem_free(a);
    mem_free(b);
}

static void one_attention(const struct shape *s, bool norms, int window, const int (*seqs)[2],
                          int n_seqs, bool pad, const char *what)
{
    struct duo d;
    duo_open(&d, s);
    struct plan p;
    plan_make(&p, s, seqs, n_seqs, pad);
    int H = s->n_heads, K = s->n_kv_heads, D = s->head_dim, rows = p.b.n_tokens;
    struct random_spec spec = {.n_in = s->n_embd,
                               .n_expert = 1,
                               .n_seg = 3,
                               .rows = {H * D, K * D, K * D},
                               .type = {DT_Q4_K, DT_Q4_K, DT_Q6_K},
                               .bias = !norms};
    struct duo_weight w;
    weight_new(&d, &w, &spec);
    struct array n = array_random(&d, (size_t)(rows * s->n_embd), 1.0f);
    struct random_spec out = {.n_in = H * D,
                              .n_expert = 1,
                              .n_seg = 2, /* one would be kept in floats */
                              .rows = {s->n_embd - 64, 64},
                              .type = {DT_F16, DT_F16}};
    struct duo_weight wo;
    if (H * D % 256 == 0)
        out.type[0] = out.type[1] = DT_Q4_K;
    weight_new(&d, &wo, &out);
    struct array q = array_new(&d, (size_t)(rows * H * D)), a = array_new(&d, q.n);
    struct array o = array_new(&d, n.n);
    struct array qn = array_random(&d, (size_t)D, 1.0f), kn = array_random(&d, (size_t)D, 1.0f);
    struct kv_layer kr, kg;
    kv_new(&d, &kr, &kg);
    struct attn_layer lr = {&w.ref, norms ? qn.ref : NULL, norms ? kn.ref : NULL, kr, window};
    struct attn_layer lg = {&w.gpu, norms ? qn.gpu : NULL, norms ? kn.gpu : NULL, kg, window};
    char text[200];
    for (int see_q = 0; see_q < 2; see_q++) { /* looking at q in between must not change a thing */
        poison(&d, &q);
        poison(&d, &a);
        begin(&d, &p.b);
        d.ref->ops->attn_in(d.ref, &lr, n.ref, q.ref);
        d.gpu->ops->attn_in(d.gpu, &lg, n.gpu, q.gpu);
        snprintf(text, sizeof text, "q of %s", what);
        if (see_q)
            array_check(&d, text, &q, q.n, TOL);
        d.ref->ops->attention(d.ref, &lr, q.ref, a.ref);
        d.gpu->ops->attention(d.gpu, &lg, q.gpu, a.gpu);
        d.ref->ops->linear(d.ref, &wo.ref, a.ref, o.ref, rows);
        d.gpu->ops->linear(d.gpu, &wo.gpu, a.gpu, o.gpu, rows);
        end(&d, NULL, NULL);
        double tol = s->kv_type == DT_BF16 ? 6e-3 : 2e-3;
        snprintf(text, sizeof text, "a of %s", what);
        array_check(&d, text, &a, a.n, tol);
        snprintf(text, sizeof text, "output of %s", what);
        array_check(&d, text, &o, o.n, tol);
        snprintf(text, sizeof text, "k of %s", what);
        kv_check(&d, text, kr.k, kg.k);
        snprintf(text, sizeof text, "v of %s", what);
        kv_check(&d, text, kr.v, kg.v);
    }
    kv_free(&d, &kr, &kg);
    array_free(&d, &n);
    array_free(&d, &q);
    array_free(&d, &a);
    array_free(&d, &o);
    array_free(&d, &qn);
    array_free(&d, &kn);
    weight_free(&d, &w);
    weight_free(&d, &wo);
    mem_free(p.pages);
    duo_close(&d);
}

/* prompts: steps with some, otherwise without. */
static void test_attention(bool prompts)
{
    int before = n_checks;
    const char *group = prompts ? "attention, prompts" : "attention, decodes";
    if (!wanted(group))
        return;
    const struct {
        int H, K, D, rot, page;
        enum dtype kv;
    } shapes[] = {{8, 1, 128, 128, 16, DT_F16}, {8, 2, 64, 64, 32, DT_F16},
                  {8, 1, 128, 64, 16, DT_BF16}, {12, 1, 64, 32, 16, DT_BF16},
                  {6, 6, 128, 128, 16, DT_F16}, {4, 2, 32, 32, 16, DT_F16},
                  {4, 2, 64, 64, 5, DT_F16},    {4, 2, 64, 64, 16, DT_F32}};
    static const int decode[][2] = {{0, 1}, {15, 1}, {16, 1}, {300, 1}, {63, 1}, {64, 1}};
    static const int mixed[][2] = {{20, 1}, {0, 70}, {33, 17}, {5, 1}, {100, 2}, {0, 64}};
    static const int one[][2] = {{200, 1}};
    static const int prompt[][2] = {{0, 130}};
    static const int chunk[][2] = {{3, 1}, {410, 100}, {0, 150}}; /* more keys than a ring holds */
    static const int wide[][2] = {{7, 1}, {0, 200}, {40, 90}};    /* q, k, v turned on the way */
    static const int deep[][2] = {{2600, 1}, {700, 1}}; /* more stretches than a warp has lanes */
    static const int few[][2] = {{2600, 1}, {3, 1}, {300, 1}, {16, 1}, {127, 1}};
    int many[76][2]; /* blocks enough that each takes a sequence */
    for (int i = 0; i < 76; i++) {
        many[i][0] = i % 9 == 4 ? 100 + i : i % 32;
        many[i][1] = 1;
    }
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int window = 0; window < 2; window++) {
            struct shape s = base_shape();
            s.n_heads = shapes[i].H;
            s.n_kv_heads = shapes[i].K;
            s.head_dim = shapes[i].D;
            s.n_rot = shapes[i].rot;
            s.page_len = shapes[i].page;
            s.kv_type = shapes[i].kv;
            s.n_pages = 3600 / s.page_len;
            s.max_pages = 2700 / s.page_len;
            s.attn_scale = 1.0f / sqrtf((float)s.head_dim);
            int win = window ? 24 : 0;
            char what[150];
            const struct {
                const char *name;
                const int (*seqs)[2];
                int n;
                bool pad;
            } runs[] = {{"decode", decode, 6, false}, {"padded decode", decode, 6, true},
                        {"mixed", mixed, 6, false},   {"one", one, 1, false},
                        {"prompt", prompt, 1, false}, {"deep", deep, 2, false},
                        {"chunk", chunk, 3, false},   {"many", many, 76, true},
                        {"fewer", many, 55, false},   {"few, one deep", few, 5, true},
                        {"one deep", deep, 1, false}, {"wide", wide, 3, false},
                        {"dozen", many, 13, true}};
            for (int j = 0; j < 13; j++) {
                if (j == 12 && i) /* its rows go straight to a product of few rows */
                    continue;
                s.n_heads = j == 12 ? 32 : shapes[i].H;
                s.n_kv_heads = j == 12 ? 4 : shapes[i].K;
                if (prompts != (j == 2 || j == 4 || j == 6 || j == 11))
                    continue;
                if (SIM && ((i + (size_t)j + (size_t)window) % 2 || (j == 5 && i > 3) ||
                            (j == 6 && i != 0 && i != 2) || (j == 11 && i > 1) ||
                            (j > 6 && j < 11 && (i == 0 || i > 4)) || (j > 8 && j < 11 && window)))
                    continue;
                snprintf(what, sizeof what, "%s, H %d K %d D %d, page %d, %s, window %d",
                         runs[j].name, s.n_heads, s.n_kv_heads, s.head_dim, s.page_len,
                         dtype_name(s.kv_type), win);
                one_attention(&s, (i + (size_t)j) % 3 != 0, win, runs[j].seqs, runs[j].n,
                              runs[j].pad, what);
            }
        }
    report(group, before);
}

static void test_ffn(void)
{
    int before = n_checks;
    if (!wanted("ffn"))
        return;
    const enum dtype types[][2] = {{DT_Q4_K, DT_Q6_K},
                                   {DT_Q8_0, DT_Q8_0},
                                   {DT_F32, DT_Q5_1},
                                   {DT_GPTQ4, DT_GPTQ4},
                                   {DT_BF16, DT_F8_E4M3}};
    const int rows_of[] = {1, 3, 8, 9, 70, 300};
    for (int i = 0; i < 5; i++)
        for (int j = 0; j < 6; j++) {
            if (SIM && j > 3 && i > 1)
                continue;
            struct shape s = base_shape();
            int n_ff = i == 0 ? 512 : 352, rows = rows_of[j]; /* 352: not whole k tiles */
            s.n_embd = 256;
            s.n_ff = n_ff;
            struct duo d;
            duo_open(&d, &s);
            struct random_spec up = {.n_in = 256,
                                     .n_expert = 1,
                                     .n_seg = 2,
                                     .rows = {n_ff, n_ff},
                                     .type = {types[i][0], types[i][0]},
                                     .group_len = 64};
            struct random_spec down = {.n_in = n_ff,
                                       .n_expert = 1,
                                       .n_seg = 1,
                                       .rows = {256},
                                       .type = {types[i][1]},
                                       .group_len = 32};
            struct duo_weight u, v;
            weight_new(&d, &u, &up);
            weight_new(&d, &v, &down);
            struct array x = array_random(&d, (size_t)(256 * rows), 3.0f);
            struct array y = array_new(&d, x.n);
            poison(&d, &y);
            struct plan p;
            plan_make(&p, &s, (const int[][2]){{0, 1}}, 1, false);
            begin(&d, &p.b);
            d.ref->ops->ffn(d.ref, &u.ref, &v.ref, x.ref, y.ref, rows);
            d.gpu->ops->ffn(d.gpu, &u.gpu, &v.gpu, x.gpu, y.gpu, rows);
            end(&d, NULL, NULL);
            char what[100];
            snprintf(what, sizeof what, "ffn %s, %d rows", dtype_name(types[i][0]), rows);
            array_check(&d, what, &y, y.n, TOL * 1.5);
            array_free(&d, &x);
            array_free(&d, &y);
            weight_free(&d, &u);
            weight_free(&d, &v);
            mem_free(p.pages);
            duo_close(&d);
        }
    report("ffn", before);
}

/* Experts of n_ff_exp hidden units over n_embd columns, `rows` rows. */
static void moe_case(const struct shape *s, const enum dtype *types, enum dtype router_type,
                     int rows)
{
    struct duo d;
    duo_open(&d, s);
    struct random_spec router = {
        .n_in = s->n_embd, .n_expert = 1, .n_seg = 1, .rows = {s->n_expert}, .type = {router_type}};
    struct random_spec up = {.n_in = s->n_embd,
                             .n_expert = s->n_expert,
                             .n_seg = 2,
                             .rows = {s->n_ff_exp, s->n_ff_exp},
                             .type = {types[0], types[0]},
                             .group_len = 128};
    struct random_spec down = {.n_in = s->n_ff_exp,
                               .n_expert = s->n_expert,
                               .n_seg = 1,
                               .rows = {s->n_embd},
                               .type = {types[1]},
                               .group_len = 32};
    struct duo_weight wr, u, v;
    weight_new(&d, &wr, &router);
    weight_new(&d, &u, &up);
    weight_new(&d, &v, &down);
    struct array x = array_random(&d, (size_t)(s->n_embd * rows), 5.0f);
    struct array y = array_new(&d, x.n);
    poison(&d, &y);
    struct plan p;
    plan_make(&p, s, (const int[][2]){{0, 1}}, 1, false);
    begin(&d, &p.b);
    struct moe_layer mr = {&wr.ref, &u.ref, &v.ref}, mg = {&wr.gpu, &u.gpu, &v.gpu};
    d.ref->ops->moe(d.ref, &mr, x.ref, y.ref, rows);
    d.gpu->ops->moe(d.gpu, &mg, x.gpu, y.gpu, rows);
    end(&d, NULL, NULL);
    char what[100];
    snprintf(what, sizeof what, "moe %s/%s, %d of %d experts, %d rows", dtype_name(types[0]),
             dtype_name(types[1]), s->n_expert_used, s->n_expert, rows);
    array_check(&d, what, &y, y.n, TOL * 1.5);
    if (rows > 256) { /* and where a norm adds up what the experts came to */
        struct array sum = array_random(&d, x.n, 1.0f), n = array_new(&d, x.n);
        struct array gain = array_random(&d, (size_t)s->n_embd, 1.0f);
        poison(&d, &n);
        begin(&d, &p.b);
        d.ref->ops->moe(d.ref, &mr, x.ref, y.ref, rows);
        d.gpu->ops->moe(d.gpu, &mg, x.gpu, y.gpu, rows);
        d.ref->ops->add_norm(d.ref, sum.ref, y.ref, gain.ref, n.ref, rows);
        d.gpu->ops->add_norm(d.gpu, sum.gpu, y.gpu, gain.gpu, n.gpu, rows);
        end(&d, NULL, NULL);
        array_check(&d, what, &sum, sum.n, TOL * 1.5);
        array_check(&d, what, &n, n.n, TOL * 1.5);
        array_free(&d, &sum);
        array_free(&d, &n);
        array_free(&d, &gain);
    }
    array_free(&d, &x);
    array_free(&d, &y);
    weight_free(&d, &wr);
    weight_free(&d, &u);
    weight_free(&d, &v);
    mem_free(p.pages);
    duo_close(&d);
}

static void test_moe(void)
{
    int before = n_checks;
    if (!wanted("moe"))
        return;
    const enum dtype types[][2] = {
        {DT_Q4_K, DT_Q6_K},       {DT_Q4_K, DT_Q4_K}, {DT_Q8_0, DT_Q8_0}, {DT_GPTQ4, DT_GPTQ4},
        {DT_F8_E4M3, DT_F8_E4M3}, {DT_BF16, DT_BF16}, {DT_Q5_K, DT_Q3_K}};
    const int rows_of[] = {1, 2, 8, 9, 33, 100, 300};
    for (int i = 0; i < 7; i++)
        for (int j = 0; j < 7; j++) {
            if (SIM && ((j == 4 && i > 1) || (j == 5 && i != 1) || (j == 6 && i % 3 != 1)))
                continue;
            struct shape s = base_shape();
            s.n_expert = i % 2 ? 8 : i == 0 && !SIM ? 128 : 40;
            s.n_expert_used = i % 2 ? 3 : 8;
            s.n_ff_exp = i < 2 ? 512 : i == 6 ? 256 : 96; /* K-quants need whole blocks */
            s.norm_topk = i != 2;
            s.expert_scale = i == 3 ? 2.5f : 1.0f;
            moe_case(&s, types[i], i == 5 ? DT_BF16 : DT_F32, rows_of[j]);
        }
    report("moe", before);
}

/* K-quants over several slices of k, at the numbers of rows that change how few rows are shared
 * out; in the last ones experts have more rows than fit one entry of the list. */
static void test_few_experts(void)
{
    int before = n_checks;
    if (!wanted("few experts"))
        return;
    const enum dtype types[][2] = {{DT_Q4_K, DT_Q6_K}, {DT_Q4_K, DT_Q4_K}, {DT_Q6_K, DT_Q4_K}};
    const int rows_of[] = {2, 3, 4, 5, 8, 12, 20, 32};
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 8; j++) {
            if (SIM && (i + j) % 3 == 1)
                continue;
            struct shape s = base_shape();
            s.n_embd = 768;
            s.n_expert = i == 1 ? 12 : 24;
            s.n_expert_used = i == 1 ? 6 : 8;
            s.n_ff_exp = i == 2 ? 256 : 512;
            s.norm_topk = i != 2;
            s.expert_scale = i == 1 ? 2.5f : 1.0f;
            moe_case(&s, types[i], DT_F32, rows_of[j]);
        }
    report("few experts", before);
}

/* Whether a token is among those that top-k, top-p and min-p leave (ties and rounding allowed). */
static bool may_draw(const float *l, int n, int32_t token, const struct sample_params *p)
{
    double top = -INFINITY, above = 0, total = 0;
    int n_above = 0;
    if (token < 0 || token >= n)
        return false;
    for (int i = 0; i < n; i++)
        top = l[i] > top ? (double)l[i] : top;
    double least = top + (double)p->temp * log(p->min_p > 1e-9f ? (double)p->min_p : 1e-9);
    for (int i = 0; i < n; i++) {
        double w = (double)l[i] >= least ? exp(((double)l[i] - top) / (double)p->temp) : 0;
        total += w;
        above += l[i] > l[token] ? w : 0;
        n_above += l[i] > l[token];
    }
    return (double)l[token] >= least - 1e-5 && (!p->top_k || n_above < p->top_k) &&
           above <= ((double)p->top_p + 1e-5) * total;
}

/* Tokens drawn on the device against the host's sampler, on the same logits. */
static void test_sampling(void)
{
    int before = n_checks;
    if (!wanted("sampling"))
        return;
    static const struct sample_params kinds[] = {
        {.temp = 0, .top_p = 1, .repeat_penalty = 1},
        {.temp = 0.8f, .top_k = 40, .top_p = 0.95f, .min_p = 0.05f, .repeat_penalty = 1},
        {.temp = 1, .top_k = 7, .top_p = 1, .repeat_penalty = 1},
        {.temp = 1.3f, .top_p = 1, .min_p = 0.3f, .repeat_penalty = 1},
        {.temp = 1, .top_p = 1, .repeat_penalty = 1},
        {.temp = 0.7f, .top_p = 0.6f, .repeat_penalty = 1},
        {.temp = 2, .top_k = 3000, .top_p = 0.9f, .repeat_penalty = 1},
        {.temp = 0, .top_p = 1, .repeat_penalty = 1.3f, .repeat_last_n = 16},
        {.temp = 0.9f,
         .top_k = 20,
         .top_p = 0.9f,
         .repeat_penalty = 1.1f,
         .repeat_last_n = -1,
         .presence_penalty = 0.5f,
         .frequency_penalty = 0.2f},
    };
    enum { KINDS = (int)(sizeof kinds / sizeof *kinds), ROWS = 4 * KINDS };
    static const int vocabs[] = {600, 1024, 5003, 9000};
    static const float scales[] = {1, 12};
    for (int c = 0; c < 8; c++) {
        struct shape s = base_shape();
        struct duo d;
        s.n_vocab = vocabs[c / 2];
        duo_open(&d, &s);
        struct array logits = array_random(&d, (size_t)(ROWS * s.n_vocab), scales[c % 2]);
        float *host = mem_alloc(logits.n * sizeof(float));
        struct sampler *samplers[ROWS];
        int seqs[ROWS][2];
        for (int i = 0; i < ROWS; i++) {
            struct sample_params p = kinds[i % KINDS];
            struct logit_bias bias[] = {{5, 3}, {i, -INFINITY}, {5, -1}, {77, 9}, {s.n_vocab, 1}};
            p.seed = random_u64(&rng);
            p.bias = bias;
            p.n_bias = i % 5 == 4 ? 5 : 0;
            samplers[i] = sampler_new(&p, s.n_vocab);
            for (int k = 0; k < 40; k++)
                sampler_accept(samplers[i],
                               (int32_t)(random_u64(&rng) % (uint64_t)(k % 2 ? 600 : 90)), k > 10);
            seqs[i][0] = 3;
            seqs[i][1] = 1;
        }
        struct plan p;
        plan_make(&p, &s, (const int(*)[2])seqs, ROWS, false);
        p.b.samplers = samplers;
        int32_t rt[ROWS], gt[ROWS];
        begin(&d, &p.b);
        d.ref->ops->sample(d.ref, logits.ref);
        d.gpu->ops->sample(d.gpu, logits.gpu);
        end(&d, rt, gt);
        d.gpu->ops->copy_out(d.gpu, host, logits.gpu, logits.n * sizeof(float));
        for (int i = 0; i < ROWS; i++) {
            const struct sample_params *k = sampler_params(samplers[i]);
            const float *row = host + (size_t)i * (size_t)s.n_vocab;
            char what[120];
            snprintf(what, sizeof what, "edited logits, kind %d, %d tokens", i % KINDS, s.n_vocab);
            /* -INFINITY takes part in no distance */
            if (i % 5 == 4) {
                host[(size_t)i * (size_t)s.n_vocab + (size_t)i] = 0;
                logits.ref[(size_t)i * (size_t)s.n_vocab + (size_t)i] = 0;
            }
            check_close(what, row, logits.ref + (size_t)i * (size_t)s.n_vocab, (size_t)s.n_vocab,
                        1e-6);
            /* With more candidates than its list holds the device goes in another order. */
            bool listed = s.n_vocab <= 1024 || k->temp <= 0 || (k->top_k && k->top_k <= 1024) ||
                          k->top_p >= 1;
            n_checks++;
            if (listed ? gt[i] != rt[i] : !may_draw(row, s.n_vocab, gt[i], k)) {
                n_failed++;
                printf("FAIL  sampling kind %d, %d tokens, scale %g: %d, not %d\n", i % KINDS,
                       s.n_vocab, (double)scales[c % 2], gt[i], rt[i]);
            }
            sampler_free(samplers[i]);
        }
        mem_free(p.pages);
        mem_free(host);
        array_free(&d, &logits);
        duo_close(&d);
    }
    report("sampling", before);
}

int main(int argc, char **argv)
{
    filter = argc > 1 ? argv[1] : NULL;
    rng = argc > 2 ? strtoull(argv[2], NULL, 10) : rng;
    test_embed();
    test_norm_gather();
    test_linear();
    test_shapes();
    test_segments();
    test_batches();
    test_ffn();
    test_moe();
    test_few_experts();
    test_attention(false);
    test_attention(true);
    test_forward();
    test_routed();
    test_sampling();
    printf("%d checks, %d failed\n", n_checks, n_failed);
    return n_failed != 0 || n_checks == 0;
}
