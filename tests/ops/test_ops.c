/*
 * Every op of a backend against ref.c, through embed, mixer, mlp, head and sample as the forward pass
 * calls them: every number format, ragged shapes, one to many rows, with and without norms, decodes,
 * prompts and mixes of them, all cache types; and recorded steps against the same steps run op by op
 * (steps.c). For CUDA it runs on a GPU (make test-gpu) and, linked with cudasim.cpp, on any CPU
 * (smaller shapes); for the CPU it is part of make test. Logits are poisoned with NaNs before each
 * step. Errors are ||out - ref|| / ||ref||.
 *   test_ops [--backend NAME] [--jobs N] [--small] [filter [seed]]: groups side by side; a few cases of
 *   each, for tools that slow kernels down a hundredfold; only those whose name contains the filter
 *   (picks=NAME: only that row of the tables of kernels); other numbers
 */
#include "base/clock.h"
#include "base/mem.h"
#include "duo.h"
#include "sample/sampler.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static const enum dtype all_types[] = {
    DT_F32,     DT_F16,     DT_BF16,  DT_Q4_0,  DT_Q4_1,  DT_Q5_0,    DT_Q5_1,   DT_Q8_0,
    DT_Q2_K,    DT_Q3_K,    DT_Q4_K,  DT_Q5_K,  DT_Q6_K,  DT_IQ4_NL,  DT_IQ4_XS, DT_MXFP4,
    DT_IQ3_S,   DT_F8_E4M3, DT_GPTQ4, DT_IQ1_S, DT_IQ1_M, DT_IQ2_XXS, DT_IQ2_XS, DT_IQ2_S,
    DT_IQ3_XXS, DT_TQ1_0,   DT_TQ2_0, DT_NVFP4, DT_NF4,   DT_FP4};
enum { N_TYPES = (int)(sizeof all_types / sizeof *all_types) };

/* A network of a head alone, of n_in columns and n_out rows, for up to 400 rows. */
void head_open(struct duo *d, int n_in, int n_out)
{
    struct dims s = base_dims();
    s.n_embd = n_in;
    s.n_vocab = n_out;
    s.b.max_tokens = s.b.max_out = 400;
    duo_open(d, &s, 1);
    duo_prepare(d);
}

/* Logits x W^T of both, left to be compared. x: (rows, n_in), freed. */
static void head_both(struct duo *d, const struct random_spec *spec, float *x, int rows)
{
    struct duo_weight w;
    struct plan p;
    weight_new(d, &w, WEIGHT_HEAD, spec);
    plan_rows(&p, &d->s, rows);
    logits_poison(d, rows);
    begin(d, &p);
    stream_put(d, x, rows);
    EACH(side)
    d->be[side]->ops->head(d->be[side], &(struct head){.w = &w.on[side]});
    end(d, NULL, NULL);
    weight_free(d, &w);
    mem_free(p.pages);
    mem_free(x);
}

/* A product of random rows, named `what` and its sizes. */
void check_linear(struct duo *d, const struct random_spec *spec, int rows, const char *what)
{
    char name[100];
    head_both(d, spec, random_floats((size_t)(spec->n_in * rows), 1.0f), rows);
    snprintf(name, sizeof name, "%s %d x %d, %d rows", what, spec->n_in, d->s.n_vocab, rows);
    logits_check(d, name, rows, product_tol);
}

static void test_linear(void)
{
    int before = n_checks;
    if (!wanted("linear"))
        return;
    const int shapes[][3] = {{256, 528, 1},     {512, 544, 3},    {768, 530, 8},    {1024, 560, 9},
                             {2304, 528, 2},    {512, 640, 37},   {256, 1100, 70},  {512, 520, 130},
                             {256, 4400, 1},    {256, 528, 300},  {512, 560, 20},   {4352, 544, 5},
                             {1280, 4400, 300}, {256, 1040, 400}, {256, 16900, 300}};
    for (size_t j = 0; j < sizeof shapes / sizeof *shapes; j++)
        for (int ragged = 0; ragged < 2; ragged++) { /* a row that does not fill its tile */
            int n_in = shapes[j][0] - (j % 4 ? 64 : 32) * ragged, n_out = shapes[j][1],
                rows = shapes[j][2];
            struct duo d;
            bool open = false;
            for (int i = 0; i < N_TYPES; i++) {
                enum dtype t = all_types[i];
                if (ragged != (dtype_table[t].block_len < 256 && j % 2 == 0) ||
                    n_in % dtype_table[t].block_len)
                    continue;
                if (light && j > 4 && t != DT_Q4_K && t != DT_Q6_K && t != DT_F16 && t != DT_Q5_0)
                    continue;
                /* rings that go round with whole k tiles, blocks that take several tiles: slow to
                 * check, so not with every format */
                if (rows * n_out > 1000000 && (light || (t != DT_Q4_K && t != DT_Q6_K)))
                    continue;
                if (!open)
                    head_open(&d, n_in, n_out);
                open = true;
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
                check_linear(&d, &spec, rows, what);
            }
            if (open)
                duo_close(&d);
        }
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
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        int n_in = widths[i], n_out = 64 + 16 * (int)(i % 2);
        struct duo d;
        head_open(&d, n_in, n_out);
        for (size_t j = 0; j < sizeof types / sizeof *types; j++)
            for (size_t k = 0; k < sizeof rows_of / sizeof *rows_of; k++) {
                int rows = rows_of[k];
                if ((dtype_table[types[j]].block_len == 256 && n_in % 256) ||
                    (light &&
                     (rows > 40 || (size_t)n_in * (size_t)rows > 100000 || (i + j + k) % 2)))
                    continue;
                struct random_spec spec = {.n_in = n_in,
                                           .n_expert = 1,
                                           .n_seg = 2,
                                           .rows = {n_out - 16, 16},
                                           .type = {types[j], types[j]}};
                check_linear(&d, &spec, rows, dtype_name(types[j]));
            }
        duo_close(&d);
    }
    report("shapes", before);
}

/* Segments of several formats, values far from 1, rows that differ by orders of magnitude. */
static void test_segments(void)
{
    int before = n_checks;
    if (!wanted("segments"))
        return;
    struct duo d;
    head_open(&d, 512, 368);
    const enum dtype mixes[][3] = {{DT_Q4_K, DT_Q4_K, DT_Q6_K}, {DT_Q6_K, DT_Q4_K, DT_Q8_0},
                                   {DT_Q8_0, DT_F16, DT_GPTQ4}, {DT_Q4_K, DT_F32, DT_Q5_K},
                                   {DT_Q2_K, DT_Q3_K, DT_Q4_K}, {DT_IQ3_S, DT_IQ4_XS, DT_Q5_K},
                                   {DT_MXFP4, DT_BF16, DT_Q4_1}};
    for (int i = 0; i < 7; i++)
        for (int rows = 1; rows <= 40; rows += rows < 5 ? 1 : 12) {
            struct random_spec spec = {.n_in = 512,
                                       .n_expert = 1,
                                       .n_seg = 3,
                                       .rows = {256, 40, 72},
                                       .type = {mixes[i][0], mixes[i][1], mixes[i][2]},
                                       .bias = true,
                                       .group_len = 64};
            float *x = random_floats((size_t)(512 * rows), 1.0f);
            for (int t = 0; t < rows; t++)
                for (int k = 0; k < 512; k++)
                    x[t * 512 + k] *= rows <= 8 ? powf(10, (float)(t * 5 - 15)) : 3.0f;
            head_both(&d, &spec, x, rows);
            float y[SIDES][368];
            for (int t = 0; t < rows; t++) {
                char what[100];
                snprintf(what, sizeof what, "segments %d row %d of %d", i, t, rows);
                EACH(side)
                d.be[side]->ops->logits(d.be[side], t, y[side]);
                check_close(what, y[DEV], y[REF], 368, product_tol);
            }
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
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        struct duo d;
        head_open(&d, widths[i], 392);
        for (size_t k = 0; k < sizeof rows_of / sizeof *rows_of; k++) {
            int n_in = widths[i], rows = rows_of[k];
            if (light && (size_t)n_in * (size_t)rows > 100000)
                continue;
            struct random_spec spec = {.n_in = n_in,
                                       .n_expert = 1,
                                       .n_seg = 3,
                                       .rows = {256, 64, 72},
                                       .type = {DT_Q4_K, DT_Q4_K, k % 2 ? DT_Q6_K : DT_Q4_K},
                                       .bias = i % 2 == 1};
            check_linear(&d, &spec, rows, "batch");
        }
        duo_close(&d);
    }
    report("batches", before);
}

/* Embedding rows are exact: this proves the packing of every format, element by element. */
static void test_embed(void)
{
    int before = n_checks;
    if (!wanted("embed"))
        return;
    for (int i = 0; i < N_TYPES; i++) {
        struct duo d;
        struct dims s = base_dims();
        enum dtype t = all_types[i];
        s.n_vocab = 536;
        s.n_embd = dtype_table[t].block_len < 64 ? 544 : 512; /* whole blocks of NVFP4 */
        s.b.max_embeds = 101;
        duo_open(&d, &s, 1);
        struct random_spec spec = {.n_in = s.n_embd,
                                   .n_expert = 1,
                                   .n_seg = 1,
                                   .rows = {536},
                                   .type = {t},
                                   .group_len = 32};
        struct duo_weight w;
        weight_new(&d, &w, i % 2 ? WEIGHT_EMBED : WEIGHT_HEAD, &spec);
        EACH(side)
        d.net[side].embed.tokens = &w.on[side];
        duo_prepare(&d);
        struct plan p;
        plan_make(&p, &s, (const int[][2]){{0, 60}, {3, 1}, {0, 40}}, 3, false);
        p.tokens[0] = 0;
        p.tokens[1] = 535;
        for (int every = 0; every < 3; every++) { /* tokens; tokens and rows; rows alone */
            if (every)
                plan_embeds(&p, &s, 3 - every);
            begin(&d, &p);
            EACH(side)
            {
                d.net[side].embed.scale = every ? 3 : 0;
                d.be[side]->ops->embed(d.be[side], &d.net[side].embed);
            }
            char what[100];
            snprintf(what, sizeof what, "embed %s, %d rows given", dtype_name(t), p.b.n_embeds);
            stream_check(&d, what, NULL, p.b.n_tokens, 1e-6);
            end(&d, NULL, NULL);
            mem_free(p.embed_rows);
        }
        weight_free(&d, &w);
        mem_free(p.pages);
        duo_close(&d);
    }
    report("embed", before);
}

/* The norm in front of a head, of odd widths, of all rows and of some; and that of a block, whose sum
 * is exact. */
static void test_norm(void)
{
    int before = n_checks;
    if (!wanted("norm, out rows"))
        return;
    const int widths[] = {256, 100, 896};
    for (int i = 0; i < 3; i++)
        for (int big = 0; big < 2; big++) {
            struct dims s = base_dims();
            struct duo d;
            s.n_embd = widths[i];
            s.n_vocab = 96;
            duo_open(&d, &s, 2);
            struct random_spec spec = {
                .n_in = s.n_embd, .n_expert = 1, .n_seg = 1, .rows = {96}, .type = {DT_F32}};
            struct duo_weight w;
            struct duo_mlp m;
            weight_new(&d, &w, WEIGHT_HEAD, &spec);
            mlp_new(&d, 0, &m, 1, 64, DT_F32, DT_F32, DT_F32);
            struct array gain = array_random(&d, (size_t)s.n_embd, 1.0f);
            EACH(side)
            {
                struct norm norm = {NORM_RMS, gain.on[side], NULL, 1e-6f};
                d.net[side].head = (struct head){.norm = norm, .w = &w.on[side]};
                d.layers[side][0].mlp.block.in = norm;
            }
            duo_prepare(&d);
            struct plan p;
            if (big)
                plan_make(&p, &s, (const int[][2]){{0, 30}, {5, 1}, {9, 1}, {7, 12}}, 4, false);
            else
                plan_make(&p, &s, (const int[][2]){{5, 1}, {9, 1}, {7, 4}}, 3, false);
            float *x = random_floats((size_t)(p.b.n_tokens * s.n_embd), 5.0f);
            for (int with_mlp = 0; with_mlp < 2; with_mlp++) {
                logits_poison(&d, p.b.n_out);
                begin(&d, &p);
                stream_put(&d, x, p.b.n_tokens);
                EACH(side)
                {
                    const struct backend_ops *op = d.be[side]->ops;
                    if (with_mlp)
                        op->mlp(d.be[side], &d.layers[side][0].mlp, 0);
                    op->head(d.be[side], &d.net[side].head);
                }
                end(&d, NULL, NULL);
                logits_check(&d, "norm and head", p.b.n_out, product_tol * 2);
                stream_check(&d, "out rows", NULL, p.b.n_out, with_mlp ? product_tol : 1e-6);
            }
            mem_free(x);
            array_free(&d, &gain);
            weight_free(&d, &w);
            mlp_free(&d, &m);
            mem_free(p.pages);
            duo_close(&d);
        }
    report("norm, out rows", before);
}

/* prompts: steps with some, otherwise without. Shapes part, part + parts and so on. */
static void test_attention(bool prompts, int part, int parts)
{
    int before = n_checks;
    const char *group = prompts ? "attention, prompts" : "attention, decodes";
    if (!wanted(group))
        return;
    const struct {
        int H, K, D, rot, page;
        enum dtype kv;
    } shapes[] = {
        {8, 1, 128, 128, 16, DT_F16}, {8, 2, 64, 64, 32, DT_F16},     {8, 1, 128, 64, 16, DT_BF16},
        {12, 1, 64, 32, 16, DT_BF16}, {6, 6, 128, 128, 16, DT_F16},   {4, 2, 32, 32, 16, DT_F16},
        {4, 2, 64, 64, 5, DT_F16},    {4, 2, 64, 64, 16, DT_F32},     {8, 1, 128, 128, 16, DT_Q8_0},
        {4, 2, 64, 64, 32, DT_Q4_0},  {12, 1, 64, 32, 16, DT_F8_E4M3}};
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
    for (size_t i = (size_t)part; i < sizeof shapes / sizeof *shapes; i += (size_t)parts)
        for (int window = 0; window < 2; window++) {
            struct dims s = base_dims();
            s.n_heads = shapes[i].H;
            s.n_kv_heads = shapes[i].K;
            s.head_dim = shapes[i].D;
            s.n_rot = shapes[i].rot;
            s.b.page_len = shapes[i].page;
            s.b.k_type = s.b.v_type = shapes[i].kv;
            s.b.n_pages = 3600 / s.b.page_len;
            s.b.max_pages = 2700 / s.b.page_len;
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
                if (light &&
                    ((i + (size_t)j + (size_t)window) % 2 || (j == 5 && i > 3) ||
                     (j == 6 && i != 0 && i != 2) || (j == 11 && i > 1) ||
                     (j > 6 && j < 11 && (i == 0 || i > 4)) || (j > 8 && j < 11 && window) ||
                     (light > 1 && (j == 5 || j == 6 || j == 9 || j == 10) && i != 1)))
                    continue;
                if (light > 2 && j > 4 && j < 12 && (i != 1 || window)) /* long ones */
                    continue;
                snprintf(what, sizeof what, "%s, H %d K %d D %d, page %d, %s, window %d",
                         runs[j].name, s.n_heads, s.n_kv_heads, s.head_dim, s.b.page_len,
                         dtype_name(s.b.k_type), win);
                attention_case(&s, (i + (size_t)j) % 3 != 0, win, runs[j].seqs, runs[j].n,
                               runs[j].pad, what);
            }
        }
    report(group, before);
}

/* Other rows of x in place of those whose experts are so close, without being equal, that the order of
 * a sum decides: the reference says which. The mlp of either layer. */
static void decide_rows(struct duo *d, struct plan *p, float *x, int rows, float scale)
{
    struct backend *ref = d->be[REF];
    int E = d->s.n_embd, close = 1;
    for (int tries = 0; close; tries++) {
        fail_if(tries == 100, "every row is close to a tie between experts");
        close = 0;
        for (int layer = 0; layer < 2; layer++) {
            struct error err = {0};
            p->b.kv = d->kv[REF];
            ref->ops->begin(ref, &p->b);
            ref->ops->stream->put(ref, x, rows);
            ref->ops->mlp(ref, &d->layers[REF][layer].mlp, layer);
            fail_if(!ref->ops->end(ref, NULL, &err), err.msg);
            for (int i = 0; i < rows; i++) {
                float gap = backend_ref_gap(ref, i);
                if ((gap == 0 && d->s.nudge == 0) || gap > 1.2e-6f)
                    continue; /* equal on purpose, or far enough */
                close++;
                for (int k = 0; k < E; k++)
                    x[i * E + k] = scale * random_float(&rng);
            }
        }
    }
}

/* A network of one mlp, alone and, as a second layer, behind a norm and in front of a head. rows: the
 * most of its steps, about. */
void mlp_open(struct mlp_net *n, const struct dims *s, int n_expert, int n_ff, enum dtype up,
              enum dtype down, enum dtype router, int rows)
{
    struct duo *d = &n->d;
    struct dims head = *s;
    head.n_vocab = 96;
    duo_open(d, &head, 2);
    d->rows = rows;
    n->s = *s;
    n->n_expert = n_expert;
    mlp_new(d, 0, &n->m, n_expert, n_ff, up, down, router);
    struct random_spec spec = {
        .n_in = s->n_embd, .n_expert = 1, .n_seg = 1, .rows = {96}, .type = {DT_F16}};
    weight_new(d, &n->head, WEIGHT_HEAD, &spec);
    n->gain = array_random(d, (size_t)s->n_embd, 1.0f);
    EACH(side)
    {
        struct norm norm = {NORM_RMS, n->gain.on[side], NULL, 1e-6f};
        d->net[side].head = (struct head){.norm = norm, .w = &n->head.on[side]};
        d->layers[side][1] = d->layers[side][0];
        d->layers[side][1].mlp.block.in = norm;
    }
    duo_prepare(d);
    int len = snprintf(n->what, sizeof n->what, "%s%s %s/%s, %d of %d", s->other ? "other " : "",
                       n_expert > 1 ? "moe" : "ffn", dtype_name(up), dtype_name(down),
                       n_expert > 1 ? s->n_expert_used : 1, n_expert);
    if (n_expert > 1 && s->n_own)
        snprintf(n->what + len, sizeof n->what - (size_t)len, ", %d from %d on", s->n_own,
                 s->first_own);
}

/* `rows` rows: what the mlp adds without a norm in front; then with one, and a head behind that reads the
 * sum. */
void mlp_check(struct mlp_net *n, int rows, float scale)
{
    struct duo *d = &n->d;
    char what[120];
    snprintf(what, sizeof what, "%s, %d rows", n->what, rows);
    struct plan p;
    plan_rows(&p, &n->s, rows);
    float *x = random_floats((size_t)(n->s.n_embd * rows), scale);
    /* One expert's error is all there is where the others are elsewhere. */
    double tol = product_tol * (n->s.n_own ? 2 : 1.5);
    if (n->n_expert > 1)
        decide_rows(d, &p, x, rows, scale);
    for (int layer = 0; layer < 2; layer++) {
        logits_poison(d, rows);
        begin(d, &p);
        stream_put(d, x, rows);
        EACH(side)
        {
            const struct backend_ops *op = d->be[side]->ops;
            op->mlp(d->be[side], &d->layers[side][layer].mlp, layer);
            if (layer)
                op->head(d->be[side], &d->net[side].head);
        }
        stream_check(d, what, x, rows, tol);
        end(d, NULL, NULL);
        if (layer)
            logits_check(d, what, rows, tol);
    }
    mem_free(x);
    mem_free(p.pages);
}

void mlp_close(struct mlp_net *n)
{
    array_free(&n->d, &n->gain);
    mlp_free(&n->d, &n->m);
    weight_free(&n->d, &n->head);
    duo_close(&n->d);
}

void mlp_case(const struct dims *s, int n_expert, int n_ff, enum dtype up, enum dtype down,
              enum dtype router, int rows, float scale)
{
    struct mlp_net n;
    mlp_open(&n, s, n_expert, n_ff, up, down, router, rows);
    mlp_check(&n, rows, scale);
    mlp_close(&n);
}

static void test_ffn(void)
{
    int before = n_checks;
    if (!wanted("ffn"))
        return;
    const enum dtype types[][2] = {{DT_Q4_K, DT_Q6_K},   {DT_Q8_0, DT_Q8_0},    {DT_F32, DT_Q5_1},
                                   {DT_GPTQ4, DT_GPTQ4}, {DT_BF16, DT_F8_E4M3}, {DT_Q4_0, DT_Q5_0},
                                   {DT_IQ4_NL, DT_MXFP4}};
    const int rows_of[] = {1, 3, 8, 9, 70, 300};
    for (int i = 0; i < 7; i++) {
        struct dims s = base_dims();
        struct mlp_net n;
        s.n_embd = 256;
        s.n_ff = i == 0 ? 512 : 352; /* 352: not whole k tiles */
        mlp_open(&n, &s, 1, s.n_ff, types[i][0], types[i][1], DT_F32, 300);
        for (int j = 0; j < 6; j++)
            if (!light || j <= 3 || i <= 1)
                mlp_check(&n, rows_of[j], 3.0f);
        mlp_close(&n);
    }
    report("ffn", before);
}

static void test_moe(void)
{
    int before = n_checks;
    if (!wanted("moe"))
        return;
    const enum dtype types[][2] = {
        {DT_Q4_K, DT_Q6_K},       {DT_Q4_K, DT_Q4_K}, {DT_Q8_0, DT_Q8_0}, {DT_GPTQ4, DT_GPTQ4},
        {DT_F8_E4M3, DT_F8_E4M3}, {DT_BF16, DT_BF16}, {DT_Q5_K, DT_Q3_K}, {DT_NF4, DT_FP4}};
    const int rows_of[] = {1, 2, 8, 9, 33, 100, 300};
    for (int i = 0; i < 8; i++) {
        struct dims s = base_dims();
        struct mlp_net n;
        s.n_expert = i % 2 ? 8 : i == 0 && !light ? 128 : 40;
        s.n_expert_used = i % 2 ? 3 : 8;
        s.n_ff_exp = i < 2 ? 512 : i == 6 ? 256 : i == 7 ? 128 : 96; /* whole blocks */
        s.norm_topk = i != 2;
        s.expert_scale = i == 3 ? 2.5f : 1.0f;
        mlp_open(&n, &s, s.n_expert, s.n_ff_exp, types[i][0], types[i][1],
                 i == 5 ? DT_BF16 : DT_F32, light ? 33 : 300);
        for (int j = 0; j < 7; j++)
            if (!light || ((j != 4 || i <= 1) && (j != 5 || i == 1) && (j != 6 || i % 3 == 1) &&
                           (light <= 1 || j <= 4)))
                mlp_check(&n, rows_of[j], 5.0f);
        mlp_close(&n);
    }
    /* One row, and two, of experts of one kind, which have kernels of their own. */
    const enum dtype one[] = {DT_MXFP4,  DT_Q8_0,  DT_Q4_0,  DT_Q5_K,  DT_Q3_K,   DT_Q2_K,
                              DT_IQ4_XS, DT_IQ3_S, DT_NVFP4, DT_GPTQ4, DT_F8_E4M3};
    for (int i = 0; i < 11; i++)
        for (int rows = 1; rows <= 2; rows++) {
            struct dims s = base_dims();
            if (light && i && rows == 2)
                continue;
            s.n_embd = i ? 768 : rows == 1 ? 352 : 864;
            s.n_expert = 8;
            s.n_expert_used = i ? 3 : 4;
            s.n_ff_exp = i ? 512 : rows == 1 ? 2080 : 608; /* long rows of down, and short ones */
            s.other = !i;                                  /* with biases */
            mlp_case(&s, s.n_expert, s.n_ff_exp, one[i], one[i], DT_F32, rows, 5.0f);
        }
    report("moe", before);
}

/* Codes over several slices of k, at the numbers of rows that change how few rows are shared
 * out; in the last ones experts have more rows than fit one entry of the list. */
static void test_few_experts(void)
{
    int before = n_checks;
    if (!wanted("few experts"))
        return;
    const enum dtype types[][2] = {{DT_Q4_K, DT_Q6_K}, {DT_Q4_K, DT_Q4_K}, {DT_Q6_K, DT_Q4_K},
                                   {DT_Q5_K, DT_Q6_K}, {DT_Q4_0, DT_Q4_1}, {DT_IQ4_XS, DT_IQ4_NL},
                                   {DT_MXFP4, DT_Q8_0}};
    const int rows_of[] = {2, 3, 4, 5, 8, 12, 20, 32};
    for (int i = 0; i < 7; i++) {
        struct dims s = base_dims();
        struct mlp_net n;
        s.n_embd = 768;
        s.n_expert = i == 1 ? 12 : light > 2 ? 10 : 24;
        s.n_expert_used = i == 1 ? 6 : light > 2 ? 4 : 8;
        s.n_ff_exp = i == 2 ? 256 : 512;
        s.norm_topk = i != 2;
        s.expert_scale = i == 1 ? 2.5f : 1.0f;
        mlp_open(&n, &s, s.n_expert, s.n_ff_exp, types[i][0], types[i][1], DT_F32, 32);
        for (int j = 0; j < 8; j++)
            if (!light || ((i + j) % 3 != 1 && ((light <= 2 && i <= 2) || (i + j) % 3 == 0)))
                mlp_check(&n, rows_of[j], 5.0f);
        mlp_close(&n);
    }
    report("few experts", before);
}

/* Many rows of experts of one kind, which have kernels of their own, and of Q4_K beside Q6_K. `n_expert` sets the rows
 * of an expert, so that every size of tile occurs. */
static void test_many_rows(void)
{
    static const enum dtype types[] = {DT_MXFP4,  DT_Q8_0,  DT_Q4_0,  DT_Q5_K,  DT_Q3_K, DT_Q2_K,
                                       DT_IQ4_XS, DT_IQ3_S, DT_NVFP4, DT_GPTQ4, DT_Q4_K};
    static const int n_expert[] = {8, 12, 16, 24, 40},
                     rows_of[] = {257, 300, 510}; /* a plan has 512 */
    int before = n_checks;
    if (!wanted("experts of many rows"))
        return;
    for (int i = 0; i < 11; i += light ? 2 : 1) {
        struct dims s = base_dims();
        struct mlp_net n;
        enum dtype t = types[i];
        bool narrow =
            t == DT_MXFP4 || t == DT_Q8_0 || t == DT_Q4_0 || t == DT_NVFP4 || t == DT_GPTQ4;
        s.n_embd = !narrow ? 512 : i ? 384 : 352;
        s.n_expert = n_expert[(2 * i + 3) % 5];
        s.n_expert_used = 3;
        s.n_ff_exp = !narrow ? 256 : i ? 384 : 608; /* 608: not whole blocks, nor k tiles */
        s.other = !i;                               /* with biases */
        s.b.max_tokens = s.b.max_out = 512;
        mlp_open(&n, &s, s.n_expert, s.n_ff_exp, t, t == DT_Q4_K ? DT_Q6_K : t, DT_F32,
                 light ? 257 : 510);
        for (int j = 0; j < (light ? 1 : 3); j++)
            mlp_check(&n, rows_of[j], 5.0f);
        mlp_close(&n);
    }
    report("experts of many rows", before);
}

/* The network is refused, with an error that says `why`. */
static void check_refused(struct duo *d, const char *why)
{
    struct error err = {0};
    struct backend *be = d->be[DEV];
    n_checks++;
    if (be->ops->supports(be, &d->net[DEV], &err) || !strstr(err.msg, why)) {
        n_failed++;
        printf("FAIL  \"%s\", not \"%s\"\n", err.msg, why);
    }
}

/* What kernels cannot take is refused when a model is loaded, with layer and part: nothing aborts
 * later. */
static void test_supports(void)
{
    int before = n_checks;
    if (!wanted("supports"))
        return;
    struct dims s = base_dims();
    struct duo d;
    bool cuda = !strcmp(backend_name, "cuda");
    duo_open(&d, &s, 3);
    struct layer plain = d.layers[DEV][1], *l = &d.layers[DEV][1];
    struct weight router = {.n_in = s.n_embd, .n_out = 4096, .n_expert = 1};
    struct weight up = {.n_in = s.n_embd, .n_out = 512, .n_expert = 4096};
    struct weight down = {.n_in = 256, .n_out = s.n_embd, .n_expert = 4096};
    struct error err = {0};
    fail_if(!d.be[DEV]->ops->supports(d.be[DEV], &d.net[DEV], &err), err.msg);
    l->mlp.block.sum = (struct norm){.kind = NORM_RMS, .eps = 1e-6f};
    fail_if(!d.be[DEV]->ops->supports(d.be[DEV], &d.net[DEV], &err), err.msg);
    l->mlp.block.out = l->mlp.block.sum;
    if (cuda)
        check_refused(&d, "layer 1: a norm of a block's sum beside others is not supported on");
    *l = plain;
    l->mlp.block.out = (struct norm){.kind = NORM_LAYER, .eps = 1e-6f};
    if (cuda)
        check_refused(&d, "layer 1: LayerNorm of a block's output is not supported on");
    *l = plain;
    l->mixer.attention.bidirectional = true;
    if (cuda)
        check_refused(&d, "layer 1: bidirectional attention in only some of the layers is not "
                          "supported on");
    *l = plain;
    l->mlp.experts = (struct ffn){.gate_up = &up, .down = &down};
    l->mlp.router = (struct router){.w = &router, .n_used = 256};
    if (cuda)
        check_refused(&d, "layer 1: 256 of 4096 experts are not supported on cuda");
    router.n_out = up.n_expert = down.n_expert = 512;
    l->mlp.router.n_used = 16;
    fail_if(!d.be[DEV]->ops->supports(d.be[DEV], &d.net[DEV], &err), err.msg);
    l->mlp.router.n_groups = 64;
    l->mlp.router.n_groups_used = 4;
    if (cuda)
        check_refused(&d, "layer 1: such a choice of expert groups is not supported on");
    l->mlp.router.n_groups = 0;
    l->mlp.experts.act = ACT_PLAIN_GELU;
    fail_if(!d.be[DEV]->ops->supports(d.be[DEV], &d.net[DEV], &err), err.msg);
    *l = plain;
    l->mixer.attention.k_dim = l->mixer.attention.v_dim = 2048;
    if (cuda)
        check_refused(&d, "layer 1: ");
    duo_close(&d);
    report("supports", before);
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

/* A constraint of the test's own: state is its mask. */
struct fixed_mask {
    uint32_t bits[320];
    int n_words;
};

static bool fixed_bits(void *state, uint32_t *bits, struct error *err)
{
    (void)err;
    const struct fixed_mask *m = state;
    memcpy(bits, m->bits, (size_t)m->n_words * sizeof *bits);
    return true;
}

static bool fixed_accept(void *state, int32_t token, struct error *err)
{
    (void)state, (void)token, (void)err;
    return true;
}

static void fixed_free(void *state)
{
    (void)state; /* the test's */
}

/* The log-probabilities of a row as the backend and the reference tell them. */
static void check_probs(struct duo *d, int row, const struct sample_params *p, bool same_token,
                        const char *what)
{
    struct sample_probs a, b;
    d->be[REF]->ops->probs(d->be[REF], row, &a);
    d->be[DEV]->ops->probs(d->be[DEV], row, &b);
    float want[1 + SAMPLE_MAX_TOP] = {a.logprob}, got[1 + SAMPLE_MAX_TOP] = {b.logprob};
    want[0] = same_token ? want[0] : got[0];
    bool same = a.n_top == b.n_top && a.n_top == p->n_top;
    for (int i = 0; same && i < a.n_top; i++) {
        same = a.top[i].token == b.top[i].token;
        want[1 + i] = a.top[i].logprob;
        got[1 + i] = b.top[i].logprob;
    }
    n_checks++;
    if (!same) {
        n_failed++;
        printf("FAIL  %s: not the same best tokens\n", what);
    } else {
        check_close(what, got, want, (size_t)(1 + a.n_top), 1e-5);
    }
}

/* Tokens drawn by the backend against the reference's sampler, on the same logits; with masks and
 * log-probabilities too. */
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
    int rows = small ? KINDS : ROWS;
    for (int c = 0; c < 8; c++) {
        struct dims s = base_dims();
        struct duo d;
        if (small && c != 0 && c != 5) /* all in one list of candidates; more than it holds */
            continue;
        s.n_vocab = vocabs[c / 2];
        s.b.max_out = ROWS;
        /* In the last case there are so many biases that some rows are left to the host. */
        enum { MANY = 2000 };
        static struct logit_bias many[MANY];
        int n_many = c == 7 ? MANY : 0;
        duo_open(&d, &s, 1);
        duo_prepare(&d);
        size_t n = (size_t)s.n_vocab;
        float *logits = random_floats(ROWS * n, scales[c % 2]);
        float *row[SIDES] = {mem_alloc(n * sizeof(float)), mem_alloc(n * sizeof(float))};
        struct sampler *samplers[SIDES][ROWS];
        static struct fixed_mask masks[ROWS];
        int seqs[ROWS][2];
        for (int i = 0; i < rows; i++) {
            struct sample_params p = kinds[i % KINDS];
            struct logit_bias bias[] = {{5, 3}, {i, -INFINITY}, {5, -1}, {77, 9}, {s.n_vocab, 1}};
            p.seed = random_u64(&rng);
            p.bias = bias;
            p.n_bias = i % 5 == 4 ? 5 : 0;
            for (int k = 0; k < n_many; k++)
                many[k] = (struct logit_bias){4 * k + i, (float)(k % 9 - 4) / 2};
            if (n_many) {
                p.bias = many;
                p.n_bias = n_many;
            }
            p.logprobs = i % 4 == 2;
            p.n_top = i % 8 == 2 ? 5 : 20;
            masks[i].n_words = (s.n_vocab + 31) / 32;
            for (int w = 0; w < masks[i].n_words; w++) /* of few tokens, of many, of whole words */
                masks[i].bits[w] = i % 7 == 1   ? (uint32_t)random_u64(&rng)
                                   : i % 7 == 2 ? (w == i % 18 ? 1u << i % 32 : 0)
                                                : (w % 3 ? 0 : UINT32_MAX);
            struct sample_constraint fit = {.mask = fixed_bits,
                                            .accept = fixed_accept,
                                            .free = fixed_free,
                                            .state = &masks[i],
                                            .n_tokens = s.n_vocab};
            EACH(side)
            {
                samplers[side][i] = sampler_new(&p, s.n_vocab);
                if (i % 7 < 4 && i % 7 > 0)
                    sampler_constrain(samplers[side][i], &fit);
            }
            for (int k = 0; k < 40; k++) {
                int32_t token = (int32_t)(random_u64(&rng) % (uint64_t)(k % 2 ? 600 : 90));
                EACH(side)
                sampler_accept(samplers[side][i], token, k > 10);
            }
            EACH(side)
            sampler_prepare(samplers[side][i]);
            seqs[i][0] = 3;
            seqs[i][1] = 1;
        }
        struct plan p;
        plan_make(&p, &s, (const int(*)[2])seqs, rows, false);
        int32_t rt[ROWS], gt[ROWS];
        EACH(side)
        {
            d.be[side]->ops->begin(d.be[side], &p.b);
            d.be[side]->ops->stream->put_logits(d.be[side], logits, rows);
            d.be[side]->ops->sample(d.be[side], samplers[side]);
        }
        end(&d, rt, gt);
        for (int i = 0; i < rows; i++) {
            const struct sample_params *k = sampler_params(samplers[DEV][i]);
            char what[120];
            snprintf(what, sizeof what, "edited logits, kind %d, %d tokens", i % KINDS, s.n_vocab);
            EACH(side)
            d.be[side]->ops->logits(d.be[side], i, row[side]);
            /* Logits whose raw values are told are kept by hosts, and edited by devices. */
            bool kept = k->logprobs || n_many;
            for (size_t v = 0; v < n; v++) /* -INFINITY takes part in no distance */
                if (row[DEV][v] == -INFINITY && (kept || row[REF][v] == -INFINITY))
                    row[REF][v] = row[DEV][v] = -1e9f;
            if (!kept)
                check_close(what, row[DEV], row[REF], n, 1e-6);
            if (k->logprobs)
                check_probs(&d, i, k, gt[i] == rt[i], what);
            /* With more candidates than its list holds a device goes in another order. */
            bool listed = s.n_vocab <= 1024 || k->temp <= 0 || (k->top_k && k->top_k <= 1024) ||
                          k->top_p >= 1;
            n_checks++;
            if (gt[i] != rt[i] && (listed || !may_draw(row[DEV], s.n_vocab, gt[i], k))) {
                n_failed++;
                printf("FAIL  sampling kind %d, %d tokens, scale %g: %d, not %d\n", i % KINDS,
                       s.n_vocab, (double)scales[c % 2], gt[i], rt[i]);
            }
            EACH(side)
            sampler_free(samplers[side][i]);
        }
        mem_free(p.pages);
        mem_free(logits);
        EACH(side)
        mem_free(row[side]);
        duo_close(&d);
    }
    report("sampling", before);
}

static void test_decodes(int part, int parts)
{
    test_attention(false, part, parts);
}
static void test_prompts(int part, int parts)
{
    test_attention(true, part, parts);
}

/* The longest first. cut: in so many parts, where groups run side by side, that none lasts longer than
 * all the others take together. */
static const struct group {
    void (*whole)(void);
    void (*cut)(int part, int parts);
    int parts;
} groups[] = {
    {NULL, test_picks, 24},       {NULL, test_cache_types, 6},   {NULL, test_lora, 2},
    {NULL, test_prompts, 4},      {NULL, test_decodes, 4},       {NULL, test_invariant, 9},
    {test_linear, NULL, 1},       {test_shapes, NULL, 1},        {test_heads, NULL, 1},
    {test_forward, NULL, 1},      {test_moe, NULL, 1},           {test_few_experts, NULL, 1},
    {test_many_rows, NULL, 1},    {test_ties, NULL, 1},          {test_spread, NULL, 1},
    {test_ffn, NULL, 1},          {test_parts, NULL, 1},         {test_encoders, NULL, 1},
    {test_towers, NULL, 1},       {test_delta_net, NULL, 1},     {test_ssm, NULL, 1},
    {test_short_conv, NULL, 1},   {test_row_conv, NULL, 1},      {test_latent, NULL, 1},
    {test_sparse, NULL, 1},       {test_scan, NULL, 1},          {test_compressed, NULL, 1},
    {test_segments, NULL, 1},     {test_batches, NULL, 1},       {test_routed, NULL, 1},
    {test_drafts, NULL, 1},       {test_norm, NULL, 1},          {test_sampling, NULL, 1},
    {test_embed, NULL, 1},        {test_supports, NULL, 1},      {test_host_experts, NULL, 1},
    {test_host_forward, NULL, 1}, {test_given_experts, NULL, 1},
};
enum { N_GROUPS = sizeof groups / sizeof *groups };

static void group_run(const struct group *g, int part, int parts)
{
    report_from = clock_ns();
    if (g->cut)
        g->cut(part, parts);
    else
        g->whole();
}

/* A process has ended: what it counted came through the pipe. */
static void collect(int pipe_end)
{
    int counts[2], status;
    fail_if(wait(&status) < 0, "no child");
    if (status != 0) {
        n_failed++;
        printf("FAIL  a group ended with status %d\n", status);
        return;
    }
    fail_if(read(pipe_end, counts, sizeof counts) != (ssize_t)sizeof counts, "no counts");
    n_checks += counts[0];
    n_failed += counts[1];
}

/* A process of its own for each group, or part of one, `jobs` of them at a time: the reference takes most
 * of the time, and has one thread. */
static void run_apart(int jobs)
{
    int fds[2], running = 0;
    fail_if(pipe(fds) != 0, "no pipe");
    for (int i = 0; i < N_GROUPS; i++)
        for (int part = 0; part < groups[i].parts; part++) {
            if (running == jobs) {
                collect(fds[0]);
                running--;
            }
            pid_t child = fork();
            fail_if(child < 0, "no process");
            if (child == 0) {
                n_checks = n_failed = 0;
                group_run(&groups[i], part, groups[i].parts);
                int counts[2] = {n_checks, n_failed};
                fflush(stdout);
                _exit(write(fds[1], counts, sizeof counts) != (ssize_t)sizeof counts);
            }
            running++;
        }
    for (; running; running--)
        collect(fds[0]);
}

int main(int argc, char **argv)
{
    int at = 1, jobs = 1;
    setvbuf(stdout, NULL, _IOLBF, 0);
#if defined(STEEL_CUDA_SIM) || defined(STEEL_CUDA)
    backend_name = "cuda";
#else
    backend_name = "cpu";
#endif
    if (argc > at + 1 && !strcmp(argv[at], "--backend")) {
        backend_name = argv[at + 1];
        at += 2;
    }
    if (argc > at + 1 && !strcmp(argv[at], "--jobs")) {
        jobs = atoi(argv[at + 1]);
        at += 2;
    }
    small = argc > at && !strcmp(argv[at], "--small");
    at += small;
    bool cpu = !strcmp(backend_name, "cpu");
    light = cpu ? 2 + small : SIM || small;
    product_tol = cpu ? 1.5e-2 : 1e-3;
    filter = argc > at ? argv[at] : NULL;
    rng = argc > at + 1 ? strtoull(argv[at + 1], NULL, 10) : rng;
    if (jobs > 1)
        run_apart(jobs);
    uint64_t seed = rng;
    for (int i = 0; jobs <= 1 && i < N_GROUPS; i++)
        for (int part = 0; part < groups[i].parts; part++) {
            rng = seed; /* the same cases as with --jobs */
            group_run(&groups[i], part, groups[i].parts);
        }
    printf("%d checks, %d failed\n", n_checks, n_failed);
    return n_failed != 0 || n_checks == 0;
}
