/*
 * Attention, for test_ops.c: one mixer over sequences of given lengths against the reference, its rows
 * and what it leaves in the cache; and every part that heads may have, over widths of 32 to 512, pages
 * and caches, alone and together.
 */
#include "duo.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

static void heads_set(struct attention *a, unsigned parts, const float *sinks)
{
    a->sinks = parts & HEADS_SINKS ? sinks : NULL;
    a->softcap = parts & HEADS_SOFTCAP ? 0.7f : 0;
    a->gated = parts & HEADS_GATE;
    a->norm_whole = parts & HEADS_WHOLE;
    a->k_is_v = parts & HEADS_K_IS_V;
    a->temp_beta = parts & HEADS_TEMP ? 0.3f : 0;
    a->temp_len = 8;
    if (parts & HEADS_V_NORM)
        a->v_norm = (struct norm){NORM_RMS, NULL, NULL, 1e-4f};
}

/* One mixer, first without a norm and as any layer, then with one and as the last, whose stream is
 * narrowed to the out rows. */
void attention_case(const struct dims *s, bool norms, int window, const int (*seqs)[2], int n_seqs,
                    bool pad, const char *what)
{
    struct duo d;
    duo_open(&d, s, 2);
    int H = s->n_heads, K = s->n_kv_heads, D = s->head_dim;
    bool whole = s->heads & HEADS_WHOLE;
    struct random_spec qkv = {.n_in = s->n_embd,
                              .n_expert = 1,
                              .n_seg = s->heads & HEADS_K_IS_V ? 2 : 3,
                              .rows = {s->heads & HEADS_GATE ? 2 * H * D : H * D, K * D, K * D},
                              .type = {DT_Q4_K, DT_Q4_K, DT_Q6_K},
                              .bias = !norms};
    /* Rows rounded to eight bits carry keys and values over the borders of a cache's steps, and with so
     * many on the other side one row tells little of attention: there products are of floats. */
    if (product_tol > 1e-3 && (kv_quantised(s->b.k_type) || kv_quantised(s->b.v_type)))
        qkv.type[0] = qkv.type[1] = qkv.type[2] = DT_F16;
    struct random_spec out = {.n_in = H * D,
                              .n_expert = 1,
                              .n_seg = 2,
                              .rows = {s->n_embd - 64, 64},
                              .type = {DT_F16, DT_F16}};
    struct duo_weight wqkv, wo;
    if (H * D % 256 == 0)
        out.type[0] = out.type[1] = DT_Q4_K;
    weight_new(&d, &wqkv, WEIGHT_LINEAR, &qkv);
    weight_new(&d, &wo, WEIGHT_LINEAR, &out);
    struct array qn = array_random(&d, (size_t)(whole ? H * D : D), 1.0f);
    struct array kn = array_random(&d, (size_t)(whole ? K * D : D), 1.0f);
    struct array sinks = array_random(&d, (size_t)H, 2.0f);
    struct array gain = array_random(&d, (size_t)s->n_embd, 1.0f);
    kv_new(&d, 0);
    EACH(side)
    {
        struct layer *l = d.layers[side];
        struct attention *a = &l[0].mixer.attention;
        a->wqkv = &wqkv.on[side];
        a->wo = &wo.on[side];
        a->window = window;
        if (norms) {
            a->q_norm = (struct norm){NORM_RMS, qn.on[side], NULL, 1e-6f};
            a->k_norm = (struct norm){NORM_RMS, kn.on[side], NULL, 1e-6f};
        }
        heads_set(a, s->heads, sinks.on[side]);
        l[1] = l[0];
        l[1].mixer.block.in = (struct norm){NORM_RMS, gain.on[side], NULL, 1e-6f};
        d.kv[side][1] = d.kv[side][0];
    }
    duo_prepare(&d);
    if (bytes_only) { /* steps that follow each other: a cache for each layer */
        kv_new(&d, 1);
        invariant_cuts(&d, what, false);
        kv_free(&d, 1);
    }
    struct plan p;
    plan_make(&p, s, seqs, n_seqs, pad);
    if (s->heads & HEADS_PLANES)
        plan_planes(&p);
    float *x = random_floats((size_t)(p.b.n_tokens * s->n_embd), 1.0f);
    float *x_out = mem_alloc((size_t)(p.b.n_out * s->n_embd) * sizeof *x_out);
    for (int i = 0; i < p.b.n_out; i++)
        memcpy(x_out + (size_t)i * (size_t)s->n_embd, x + (size_t)p.out_rows[i] * (size_t)s->n_embd,
               (size_t)s->n_embd * sizeof *x);
    for (int layer = 0; layer < 2 && !bytes_only; layer++) {
        begin(&d, &p);
        stream_put(&d, x, p.b.n_tokens);
        EACH(side)
        d.be[side]->ops->mixer(d.be[side], &d.layers[side][layer].mixer, layer);
        char text[200];
        /* A value near the border of two steps may get the other: of Q4_0 there are sixteen. */
        bool q4 = s->b.k_type == DT_Q4_0 || s->b.v_type == DT_Q4_0;
        bool bf16 = s->b.k_type == DT_BF16 || s->b.v_type == DT_BF16;
        bool fp8 =
            s->b.k_type == DT_F8_E4M3 || s->b.v_type == DT_F8_E4M3; /* steps of 1/8 to 1/16 */
        bool q8 = s->b.k_type == DT_Q8_0 || s->b.v_type == DT_Q8_0;
        double tol = q4 ? 5e-2 : fp8 ? 2e-2 : bf16 || q8 ? 6e-3 : 2e-3;
        tol = product_tol * 2 > tol ? product_tol * 2 : tol;
        snprintf(text, sizeof text, "layer %d, %s", layer, what);
        stream_check(&d, text, layer ? x_out : x, layer ? p.b.n_out : p.b.n_tokens, tol);
        end(&d, NULL, NULL);
        kv_check(&d, 0, text);
    }
    kv_free(&d, 0);
    array_free(&d, &qn);
    array_free(&d, &kn);
    array_free(&d, &sinks);
    array_free(&d, &gain);
    weight_free(&d, &wqkv);
    weight_free(&d, &wo);
    mem_free(p.pages);
    mem_free(x);
    mem_free(x_out);
    duo_close(&d);
}

/* Parts of heads. Every shape over decodes, deep ones, and prompts beside decodes. */
void test_heads(void)
{
    int before = n_checks;
    if (!wanted("heads"))
        return;
    enum { ALL = HEADS_SINKS | HEADS_SOFTCAP | HEADS_GATE | HEADS_V_NORM | HEADS_TEMP };
    static const struct {
        int H, K, D, rot, page, window;
        unsigned parts;
        enum dtype kv;
    } shapes[] = {
        {8, 1, 64, 64, 16, 0, HEADS_SINKS, DT_F16},
        {8, 2, 64, 64, 32, 40, HEADS_SINKS, DT_F16},
        {12, 1, 64, 32, 16, 0, HEADS_SOFTCAP, DT_BF16},
        {8, 2, 64, 64, 16, 0, HEADS_WHOLE, DT_F16},
        {3, 3, 96, 96, 16, 0, HEADS_SOFTCAP | HEADS_SINKS, DT_F16},
        {4, 2, 96, 48, 16, 24, 0, DT_BF16},
        {4, 2, 128, 128, 16, 0, HEADS_TEMP, DT_F16},
        {8, 1, 128, 128, 16, 40, HEADS_GATE | HEADS_SINKS, DT_F16},
        {8, 1, 256, 64, 32, 0, HEADS_GATE, DT_F16},
        {4, 4, 256, 256, 16, 70, HEADS_V_NORM, DT_F16},
        {4, 2, 256, 256, 16, 24, ALL, DT_BF16},
        {8, 1, 512, 128, 16, 0, HEADS_V_NORM | HEADS_K_IS_V, DT_F16},
        {3, 1, 512, 512, 16, 40, ALL, DT_BF16},
        {4, 2, 32, 16, 16, 24, ALL, DT_F16},
        {4, 2, 32, 16, 16, 0, (ALL & ~HEADS_GATE) | HEADS_K_IS_V, DT_F16},
        {4, 2, 64, 64, 5, 24, ALL, DT_F16},
        {4, 2, 128, 128, 16, 0, ALL, DT_F32},
    };
    static const int decode[][2] = {{0, 1}, {15, 1}, {16, 1}, {300, 1}, {63, 1}, {64, 1}};
    static const int deep[][2] = {{2600, 1}, {700, 1}};
    static const int mixed[][2] = {{20, 1}, {0, 70}, {33, 17}, {5, 1}, {100, 2}};
    static const int chunk[][2] = {{3, 1}, {410, 100}};
    const struct {
        const char *name;
        const int (*seqs)[2];
        int n;
        bool pad;
    } runs[] = {{"padded decode", decode, 6, true},
                {"deep", deep, 2, false},
                {"mixed", mixed, 5, false},
                {"chunk", chunk, 2, false}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t j = 0; j < 4; j++) {
            struct dims s = base_dims();
            char what[150];
            if (light && ((i + j) % (light > 1 ? 4 : 2) || (light > 2 && j == 1 && i > 4)))
                continue;
            s.n_heads = shapes[i].H;
            s.n_kv_heads = shapes[i].K;
            s.head_dim = shapes[i].D;
            s.n_rot = shapes[i].rot;
            s.heads = shapes[i].parts | ((i + j / 2) % 2 ? HEADS_PLANES : 0);
            s.b.page_len = shapes[i].page;
            s.b.k_type = s.b.v_type = shapes[i].kv;
            s.b.n_pages = 3600 / s.b.page_len;
            s.b.max_pages = 2700 / s.b.page_len;
            snprintf(what, sizeof what, "%s, H %d K %d D %d, page %d, %s, window %d, parts %x",
                     runs[j].name, s.n_heads, s.n_kv_heads, s.head_dim, s.b.page_len,
                     dtype_name(s.b.k_type), shapes[i].window, s.heads);
            attention_case(&s, (i + j) % 3 != 0 || s.heads & HEADS_WHOLE, shapes[i].window,
                           runs[j].seqs, runs[j].n, runs[j].pad, what);
        }
    report("heads", before);
}

/* Keys and values of types of their own: every pair with some shape, every shape that kernels have with
 * some pair, and shapes that only the kernels for anything take. Not on the CPU, whose products round to
 * 8 bits: test_attention.c has its pairs. */
void test_cache_types(int part, int parts)
{
    int before = n_checks;
    if (!wanted("cache types") || !strcmp(backend_name, "cpu"))
        return;
    enum { ALL = HEADS_SINKS | HEADS_SOFTCAP | HEADS_GATE | HEADS_V_NORM | HEADS_TEMP };
    static const enum dtype types[] = {DT_F16, DT_Q8_0, DT_F8_E4M3, DT_Q4_0, DT_BF16, DT_F32};
    enum { N = sizeof types / sizeof *types };
    static const struct {
        int H, K, D, rot, page, window;
        unsigned parts;
    } shapes[] = {
        {8, 1, 128, 128, 16, 0, 0},  {8, 2, 64, 64, 32, 40, HEADS_SINKS},
        {3, 3, 96, 96, 16, 0, ALL},  {4, 2, 256, 64, 16, 24, ALL},
        {12, 1, 128, 64, 64, 0, 0},  {8, 1, 512, 128, 16, 0, HEADS_K_IS_V | HEADS_SOFTCAP},
        {4, 2, 128, 128, 5, 0, ALL}, {8, 2, 64, 64, 16, 0, HEADS_WHOLE},
        {4, 2, 32, 16, 16, 24, ALL}, {16, 2, 128, 128, 32, 100, 0},
    };
    enum { SHAPES = sizeof shapes / sizeof *shapes };
    static const int decode[][2] = {{0, 1}, {15, 1}, {16, 1}, {300, 1}, {63, 1}, {64, 1}};
    static const int deep[][2] = {{2600, 1}, {700, 1}};
    static const int mixed[][2] = {{20, 1}, {0, 70}, {33, 17}, {5, 1}, {100, 2}};
    static const int chunk[][2] = {{3, 1}, {410, 100}, {0, 150}};
    int many[76][2];
    for (int i = 0; i < 76; i++) {
        many[i][0] = i % 9 == 4 ? 100 + i : i % 32;
        many[i][1] = 1;
    }
    const struct {
        const char *name;
        const int (*seqs)[2];
        int n;
        bool pad;
    } runs[] = {{"padded decode", decode, 6, true},
                {"deep", deep, 2, false},
                {"mixed", mixed, 5, false},
                {"chunk", chunk, 3, false},
                {"many", (const int(*)[2])many, 76, true}};
    enum { RUNS = sizeof runs / sizeof *runs };
    for (int i = 0, n = 0; i < N * N * SHAPES * RUNS; i++) {
        int pair = i / (SHAPES * RUNS), at = i % (SHAPES * RUNS), shape = at / RUNS,
            run = at % RUNS;
        enum dtype k = types[pair / N], v = types[pair % N];
        /* One type for both: the three share all cases out, where that is slow half of them. Others:
         * two of each pair, or one, that differ from pair to pair. */
        int every = k == v ? (light ? 6 : 3) : light ? 50 : 25;
        if ((k == v && !kv_quantised(k)) || (at + 11 * pair) % every || n++ % parts != part)
            continue;
        struct dims s = base_dims();
        char what[150];
        s.n_heads = shapes[shape].H;
        s.n_kv_heads = shapes[shape].K;
        s.head_dim = shapes[shape].D;
        s.n_rot = shapes[shape].rot;
        s.heads = shapes[shape].parts;
        s.b.page_len = shapes[shape].page;
        s.b.k_type = k;
        s.b.v_type = v;
        s.b.n_pages = 4000 / s.b.page_len + 80;
        s.b.max_pages = 2700 / s.b.page_len;
        snprintf(what, sizeof what, "%s, H %d K %d D %d, page %d, %s and %s, window %d, parts %x",
                 runs[run].name, s.n_heads, s.n_kv_heads, s.head_dim, s.b.page_len, dtype_name(k),
                 dtype_name(v), shapes[shape].window, s.heads);
        attention_case(&s, (shape + run) % 3 != 0 || s.heads & HEADS_WHOLE, shapes[shape].window,
                       runs[run].seqs, runs[run].n, runs[run].pad, what);
    }
    report("cache types", before);
}
