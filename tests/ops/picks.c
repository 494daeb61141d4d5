/*
 * What picks kernels, and experts, for test_ops.c. Every row of a backend's pick tables is forced in
 * turn, over cases it was not measured for too, and must run. And experts whose logits are equal, or
 * differ in their last bits: whichever way a step takes, the same ones must be chosen. And experts of
 * which other ranks have some.
 */
#include "duo.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* Experts in two halves whose rows of the router are the same: of two equal logits the lower index
 * is chosen. Or the other half's are larger by 2^-17 of themselves, some 100 units in the last
 * place: then those are. An odd number is chosen, so that the last one decides between two. */
void test_ties(void)
{
    int before = n_checks;
    if (!wanted("ties"))
        return;
    static const int rows_of[] = {1, 2, 3, 5, 9, 20, 40, 70, 300};
    static const enum dtype types[] = {DT_Q4_K, DT_Q8_0};
    for (int near = 0; near < 2; near++)
        for (int i = 0; i < (light ? 3 : 4); i++) {
            struct dims s = base_dims();
            struct mlp_net n;
            s.n_expert = i < 2 ? 16 : 160; /* one key a lane; several */
            s.n_expert_used = 3;
            s.n_ff_exp = 256;
            s.alike = s.n_expert / 2;
            s.nudge = near ? 0x1p-17f : 0;
            mlp_open(&n, &s, s.n_expert, s.n_ff_exp, types[i % 2], types[i % 2], DT_F32, 70);
            for (size_t j = 0; j < sizeof rows_of / sizeof *rows_of; j++)
                if (!light || (j <= 6 && (!i || j % 2)))
                    mlp_check(&n, rows_of[j], 1.0f);
            mlp_close(&n);
        }
    /* One row behind an output projection. */
    for (int near = 0; near < 2; near++) {
        struct dims s = base_dims();
        s.n_embd = 512;
        s.n_heads = 16;
        s.n_expert_used = 3;
        s.alike = s.n_expert / 2;
        s.nudge = near ? 0x1p-17f : 0;
        routed_case(&s, (const enum dtype[]){DT_Q4_K, DT_Q4_K, DT_Q6_K}, 1.0f, 1, false);
    }
    report("ties", before);
}

/* Experts that are spread over ranks: half of them are here, all but one, or one: then most rows have
 * none of theirs. */
static const int spread_own[][2] = {{4, 8}, {1, 15}, {15, 1}};
enum { N_SPREAD = sizeof spread_own / sizeof *spread_own };

static struct dims spread_dims(int own)
{
    struct dims s = base_dims();
    s.first_own = spread_own[own][0];
    s.n_own = spread_own[own][1];
    return s;
}

/* With long rows of down. */
static void spread_long(enum dtype t, int rows)
{
    struct dims s = base_dims();
    s.n_embd = 352;
    s.n_expert = 8;
    s.first_own = 2;
    s.n_own = 4;
    s.other = true;
    mlp_case(&s, s.n_expert, 2080, t, t, DT_F32, rows, 5.0f);
}
/* More than a warp looks at in one go. */
static void spread_many(enum dtype t, int rows)
{
    struct dims s = base_dims();
    s.n_expert = 200;
    s.n_expert_used = 8;
    s.first_own = 30;
    s.n_own = 140;
    mlp_case(&s, s.n_expert, 256, t, t, DT_F32, rows, 3.0f);
}

void test_spread(void)
{
    int before = n_checks, untouched = n_untouched;
    if (!wanted("spread experts"))
        return;
    static const int rows_of[] = {1, 2, 3, 8, 12, 20, 40, 70, 300};
    static const enum dtype types[] = {DT_Q4_K, DT_Q8_0, DT_BF16};
    for (int own = 0; own < N_SPREAD; own++)
        for (int i = 0; i < 3; i++) {
            struct dims s = spread_dims(own);
            struct mlp_net n;
            s.other = (own + i) % 3 == 1;
            s.norm_topk = i != 1;
            mlp_open(&n, &s, s.n_expert, s.n_ff_exp, types[i], types[i], DT_F32, 300);
            for (size_t j = 0; j < sizeof rows_of / sizeof *rows_of; j++)
                if (!light || (!i && j < 7) || (j + (size_t)(own + i)) % 3 == 0)
                    mlp_check(&n, rows_of[j], 3.0f);
            mlp_close(&n);
        }
    for (int rows = 1; rows <= 5; rows += 2)
        spread_many(DT_Q4_K, rows);
    spread_long(DT_MXFP4, 1);
    n_checks++;
    if (n_untouched == untouched) {
        n_failed++;
        printf("FAIL  every row had an expert here\n");
    }
    report("spread experts", before);
}

/* The CPU rounds inputs to eight bits. */
static const double host_tol = 2e-2;

/* Experts that the host has for a device with memory of its own: one, half, all but one, all. rows_from: 2 without decodes, which
 * the host computes. */
static void host_experts(const enum dtype *types, int n_types, int rows_from)
{
    static const int n_host[] = {8, 16, 1, 15};
    static const int rows_of[] = {1, 3, 8, 20, 70, 300};
    for (int i = 0; i < n_types; i++)
        for (int k = 0; k < 4; k++) {
            struct dims s = base_dims();
            struct mlp_net n;
            if (light && (i + k) % 2)
                continue;
            s.n_host = n_host[k];
            s.other = (i + k) % 3 == 1;
            s.norm_topk = i != 1;
            mlp_open(&n, &s, s.n_expert, s.n_ff_exp, types[i], types[i], DT_F32, 300);
            for (size_t j = 0; j < sizeof rows_of / sizeof *rows_of; j++)
                if (rows_of[j] >= rows_from &&
                    (!light || (i < 3 ? j + (size_t)i < 5 : j == 3) || (i == 0 && k == 0)))
                    mlp_check(&n, rows_of[j], 3.0f);
            mlp_close(&n);
        }
}

/* Where such experts are computed, forced: copied to the device, in every format that can be, or by the host. */
static void force_away(bool copied)
{
    static const enum dtype types[] = {DT_Q4_K, DT_Q6_K, DT_Q8_0,   DT_MXFP4, DT_BF16, DT_F16,
                                       DT_F32,  DT_Q5_K, DT_Q4_0,   DT_Q4_1,  DT_Q5_0, DT_Q5_1,
                                       DT_Q2_K, DT_Q3_K, DT_IQ4_NL, DT_IQ4_XS};
    double before = product_tol;
    if (!copied && product_tol < host_tol)
        product_tol = host_tol;
    host_experts(types, copied ? 16 : 1, copied ? 2 : 1);
    product_tol = before;
}

void test_host_experts(void)
{
    static const enum dtype types[] = {DT_Q4_K, DT_Q8_0, DT_MXFP4, DT_BF16};
    int before = n_checks;
    double tol = product_tol;
    if (!wanted("host experts") || !has_host_experts("host experts"))
        return;
    product_tol = tol > host_tol ? tol : host_tol;
    host_experts(types, 4, 1);
    /* Experts from 128 on, of which rows have few or none on the host. */
    struct dims s = base_dims();
    s.n_expert = 200;
    s.n_host = 20;
    s.n_expert_used = 8;
    mlp_case(&s, s.n_expert, 256, DT_Q4_K, DT_Q6_K, DT_F32, 5, 3.0f);
    product_tol = tol;
    report("host experts", before);
}

/* expert_ops of a backend that can be another's host: rows with some of their experts, with none, and with all. */
void test_given_experts(void)
{
    static const int rows_of[] = {1, 2, 9, 40, 300};
    static const enum dtype types[][2] = {
        {DT_Q4_K, DT_Q6_K}, {DT_Q8_0, DT_Q8_0}, {DT_BF16, DT_F16}, {DT_MXFP4, DT_MXFP4}};
    int before = n_checks;
    if (!wanted("given experts"))
        return;
    for (int i = 0; i < 4; i++) {
        struct dims s = base_dims();
        struct mlp_net n;
        s.n_expert_used = 3;
        mlp_open(&n, &s, s.n_expert, 256, types[i][0], types[i][1], DT_F32, 300);
        struct backend *dev = n.d.be[DEV];
        if (!dev->ops->experts) {
            printf("skipped: given experts: %s is nobody's host\n", dev->ops->name);
            mlp_close(&n);
            return;
        }
        for (size_t j = 0; j < sizeof rows_of / sizeof *rows_of; j++) {
            int rows = rows_of[j], uses = rows * s.n_expert_used;
            size_t values = (size_t)(rows * s.n_embd);
            int32_t *chosen = mem_zalloc((size_t)uses, sizeof *chosen);
            float *weights = random_floats((size_t)uses, 1.0f), *x = random_floats(values, 3.0f);
            float *y[SIDES];
            for (int k = 0; k < uses; k++)
                chosen[k] = k / s.n_expert_used % 3 == 1 ? -1
                            : k % 4                      ? (int32_t)(random_u64(&rng) % 16)
                                                         : -1;
            EACH(side)
            {
                y[side] = random_floats(values, 100.0f); /* overwritten */
                n.d.be[side]->ops->experts->run(n.d.be[side], &n.d.layers[side][0].mlp, chosen,
                                                weights, s.n_expert_used, x, y[side], rows);
            }
            check_close("given experts", y[DEV], y[REF], values, 2 * product_tol);
            EACH(side)
            mem_free(y[side]);
            mem_free(chosen);
            mem_free(weights);
            mem_free(x);
        }
        mlp_close(&n);
    }
    report("given experts", before);
}

/* Whether a row's formats, names with blanks between them, hold a type. "codes": what is repacked
 * as codes. */
static bool takes(const char *formats, enum dtype t)
{
    const char *name = dtype_name(t), *at = formats;
    size_t n = strlen(name);
    bool few = t == DT_Q1_0 || t == DT_Q2_0; /* for CUDA they become Q4_0 when a model is read */
    if (few && !strcmp(backend_name, "cuda"))
        return false;
    if (!strcmp(formats, "any"))
        return true;
    bool apart = t == DT_F8_E4M3 || t == DT_NF4 || t == DT_FP4; /* named beside the codes */
    if (!strncmp(formats, "codes", 5) && t >= DT_Q4_0 && !apart)
        return true;
    for (; (at = strstr(at, name)); at += n)
        if ((at == formats || at[-1] == ' ') && (at[n] == ' ' || !at[n]))
            return true;
    return false;
}

/* Every format a row takes, the usual ones at every number of rows, others at some. */
static void force_linear(const char *formats)
{
    static const int rows_of[] = {1, 2, 4, 8, 16, 24, 40, 100, 260};
    struct duo d;
    head_open(&d, 512, 560);
    for (enum dtype t = DT_F32; t <= DT_GPTQ4; t++)
        for (size_t i = 0; takes(formats, t) && i < sizeof rows_of / sizeof *rows_of; i++) {
            bool usual = t == DT_Q4_K || t == DT_Q6_K || t == DT_Q8_0;
            if ((light || !usual) && i != t % 5 && i != 5 + t % 4)
                continue;
            if (light && i > 6 && t != DT_Q4_K)
                continue;
            struct random_spec spec = {.n_in = 512,
                                       .n_expert = 1,
                                       .n_seg = 1,
                                       .rows = {560},
                                       .type = {t},
                                       .bias = i % 2,
                                       .group_len = 64};
            check_linear(&d, &spec, rows_of[i], forced);
        }
    duo_close(&d);
    head_open(&d, 2880, 560); /* wide rows of large tiles, of which few fit shared memory */
    for (int rows = 2; rows <= 4 && takes(formats, DT_Q8_0); rows += 2) {
        struct random_spec spec = {.n_in = 2880,
                                   .n_expert = 1,
                                   .n_seg = 1,
                                   .rows = {560},
                                   .type = {DT_Q8_0},
                                   .bias = true};
        check_linear(&d, &spec, rows, forced);
    }
    duo_close(&d);
}

/* Experts that are spread over ranks, of every set of formats that the row takes. */
static void force_spread(const char *formats)
{
    static const enum dtype types[] = {DT_Q4_K, DT_Q6_K, DT_MXFP4, DT_Q8_0, DT_F16, DT_F32};
    static const int rows_of[] = {1, 3, 8, 13, 24, 70, 260};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        for (size_t j = 0; takes(formats, types[i]) && j < sizeof rows_of / sizeof *rows_of; j++)
            for (int own = 0; own < N_SPREAD; own++) {
                struct dims s = spread_dims(own);
                if ((i || light) && (int)(i + j) % N_SPREAD != own)
                    continue;
                if (light && (i ? (int)j != (int)(i + strlen(forced)) % 6 : j > 5)) /* slow */
                    continue;
                s.other = (i + j) % 4 == 3;
                mlp_case(&s, s.n_expert, 256, types[i], types[i], DT_F32, rows_of[j], 3.0f);
            }
    if (takes(formats, DT_Q4_K)) {
        spread_many(DT_Q4_K, 1);
        spread_many(DT_Q4_K, 6);
    }
    if (takes(formats, DT_MXFP4))
        spread_long(DT_MXFP4, 2);
}

/* Experts of rows of more than eight slices, with more outputs than the device has SMs, some with biases. */
static void force_wide(const char *formats)
{
    static const enum dtype types[][2] = {
        {DT_MXFP4, DT_MXFP4}, {DT_Q4_K, DT_Q6_K}, {DT_Q8_0, DT_IQ4_NL}};
    static const int rows_of[] = {2, 4, 7, 13};
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < 4 && takes(formats, types[i][0]) && takes(formats, types[i][1]); j++) {
            struct dims s = base_dims();
            if (light && (i + j) % 3)
                continue;
            s.n_embd = i == 1 ? 4096 : 2336; /* 146 tiles */
            s.n_expert = j ? 6 : 9;
            s.n_expert_used = 3;
            s.other = i != 1;
            mlp_case(&s, s.n_expert, i == 1 ? 256 : 288, types[i][0], types[i][1], DT_F32,
                     rows_of[j], j % 2 ? 5.0f : 0.05f); /* little beside the biases, or much */
        }
}

/* The same for experts and dense mlps; down has the format of gate and up, or another the row takes. */
static void force_mlp(bool experts, const char *formats)
{
    static const int rows_of[] = {1, 2, 4, 8, 16, 24, 70, 100, 260};
    enum dtype other = DT_Q6_K;
    for (enum dtype t = DT_F32; t <= DT_GPTQ4; t++)
        for (size_t i = 0; takes(formats, t) && i < sizeof rows_of / sizeof *rows_of; i++) {
            struct dims s = base_dims();
            if (t == DT_Q4_K ? light && (i % 2 || i > 6) : i != t % 7)
                continue;
            s.n_ff = s.n_ff_exp = 256;
            for (int more = 0; more < (t == DT_Q4_K || t == DT_MXFP4 ? 3 : 1); more++) {
                if (t == DT_Q4_K && i > 5 && more != (int)i % 3) /* the reference is slow */
                    continue;
                bool ragged = more == 1 && t == DT_MXFP4; /* no whole tiles along down's k */
                s.other = more == 1;
                s.fused = more;
                s.n_ff = s.n_ff_exp = ragged ? 224 : 256;
                mlp_case(&s, experts ? s.n_expert : 1, s.n_ff, t, ragged || i % 2 ? t : other,
                         DT_F32, rows_of[i], 3.0f);
            }
            other = t;
        }
    if (experts) {
        force_spread(formats);
        force_wide(formats);
    }
    struct dims s = base_dims();
    s.n_embd = 512;
    s.n_heads = 16;
    if (experts) /* one row behind an output projection */
        routed_case(&s, (const enum dtype[]){DT_Q4_K, DT_Q4_K, DT_Q6_K}, 1.0f, 2, false);
}

static void force_attention(void)
{
    static const int decode[][2] = {
        {0, 1}, {15, 1}, {600, 1}, {64, 1}}; /* one is cut where it may be */
    static const int mixed[][2] = {{20, 1}, {0, 70}, {33, 17}};
    static const int wide[][2] = {{7, 1}, {0, 200}, {40, 90}};
    static const int twelve[][2] = {{1, 1}, {2, 1}, {3, 1},  {40, 1}, {50, 1}, {60, 1},
                                    {7, 1}, {8, 1}, {90, 1}, {10, 1}, {11, 1}, {12, 1}};
    struct dims s = base_dims();
    s.head_dim = s.n_rot = 128;
    s.n_heads = 8;
    s.n_kv_heads = 2;
    bool quant = strstr(forced, "quant"), prompts = !strstr(forced, "decode");
    if (!quant) {
        attention_case(&s, true, 0, decode, 4, false, forced);
        attention_case(&s, true, 24, mixed, 3, false, forced);
    }
    if (strstr(forced, "vnni") || strstr(forced, "madd") || quant) { /* it reads codes */
        s.b.k_type = s.b.v_type = DT_Q8_0;
        attention_case(&s, true, 0, decode, 4, false, forced);
        attention_case(&s, true, 24, mixed, 3, false, forced);
    }
    if (quant) {
        s.b.v_type = DT_F8_E4M3;
        attention_case(&s, true, 0, decode, 4, false, forced);
        s.b.k_type = DT_F16;
        attention_case(&s, true, 0, mixed, 3, false, forced);
        s.b.k_type = s.b.v_type = DT_Q4_0;
        attention_case(&s, true, 0, mixed, 3, false, forced);
    }
    const enum dtype own = strstr(forced, "_q4")    ? DT_Q4_0
                           : strstr(forced, "_fp8") ? DT_F8_E4M3
                                                    : DT_NONE;
    if (own != DT_NONE) { /* kernels of one type */
        s.b.k_type = s.b.v_type = own;
        attention_case(&s, true, 0, decode, 4, false, forced);
        attention_case(&s, true, 24, mixed, 3, false, forced);
    }
    s.b.k_type = s.b.v_type = quant ? DT_Q8_0 : DT_F16;
    if (strstr(forced, "wide") || strstr(forced, "any")) { /* rows for every part */
        s.head_dim = 256;
        s.n_heads = 4;
        s.heads = HEADS_SINKS | HEADS_SOFTCAP | HEADS_GATE;
        attention_case(&s, true, 24, mixed, 3, false, forced);
        s.head_dim = 128;
        s.heads = 0;
    }
    s.n_heads = 16; /* eight heads to a block: rows may be left as records */
    attention_case(&s, true, 0, twelve, 12, false, forced);
    s.n_heads = 8; /* or as panels */
    if (!prompts)
        attention_case(&s, true, 0, twelve, 12, false, forced);
    s.n_heads = 16;
    bool fp16_alone = !strcmp(forced, "attn_prefill") || !strcmp(forced, "attn_prefill_quant");
    if ((!light && prompts) || fp16_alone) /* slow */
        attention_case(&s, true, 0, wide, 3, false, forced);
}

/* A row that serves every product: each of its formats, alone and in an mlp, and beside others in one
 * weight. */
static void force_gemm(const char *formats)
{
    static const int rows_of[] = {1, 7, 33, 70};
    const int n_rows_of = light > 2 ? 3 : 4;
    struct duo d;
    head_open(&d, 512, 264);
    for (enum dtype t = DT_F32; t <= DT_GPTQ4; t++) {
        if (!takes(formats, t))
            continue;
        for (int i = 0; i < n_rows_of; i++) {
            if (light && i % 2 == (int)t % 2)
                continue;
            struct random_spec spec = {.n_in = 512,
                                       .n_expert = 1,
                                       .n_seg = 1,
                                       .rows = {264},
                                       .type = {t},
                                       .bias = i % 2,
                                       .act_order = i == 2,
                                       .group_len = 128};
            check_linear(&d, &spec, rows_of[i], forced);
        }
        struct random_spec mixed = {.n_in = 512,
                                    .n_expert = 1,
                                    .n_seg = 3,
                                    .rows = {128, 56, 80},
                                    .type = {t, DT_F16, DT_Q6_K},
                                    .bias = true,
                                    .group_len = 128};
        if (light <= 2 || t % 4 == 0)
            check_linear(&d, &mixed, 33, forced);
        for (int experts = 0; experts < 2; experts++) {
            if (light && (experts == (int)t % 2 || (light > 2 && t % 3)))
                continue;
            struct dims s = base_dims();
            s.n_ff = s.n_ff_exp = 256;
            mlp_case(&s, experts ? s.n_expert : 1, 256, t, t, DT_F32, light > 2 ? 9 : 20, 3.0f);
        }
    }
    duo_close(&d);
}

/*
 * Small: a few cases a row, for tools that make every access to memory slow (compute-sanitizer). A
 * format of each set, the fewest rows the kernel was measured for and some more, and shapes that go
 * round every ring where the device is played with 16 SMs (STEEL_SMS).
 */
static const enum dtype small_types[] = {DT_Q4_K, DT_Q8_0, DT_F16, DT_F32};
enum { N_SMALL = sizeof small_types / sizeof *small_types };

static int small_rows(const struct pick_info *p, int i)
{
    int more = p->rows_from + (i ? 0 : 3);             /* the first format: a ragged tile */
    if (!strcmp(p->op, "router") && p->rows_from < 40) /* of experts that walk a list */
        return 40;
    return p->rows_to && more > p->rows_to ? p->rows_to : more;
}

static void small_linear(const struct pick_info *p)
{
    bool few = p->rows_from < 33;
    int n_in = 1280, n_out = few ? 2320 : 400;
    struct duo d;
    head_open(&d, n_in, n_out);
    for (int i = 0; i < N_SMALL; i++) {
        struct random_spec spec = {.n_in = n_in,
                                   .n_expert = 1,
                                   .n_seg = 2,
                                   .rows = {n_out - 40, 40},
                                   .type = {small_types[i], small_types[i]},
                                   .bias = i % 2};
        if (takes(p->formats, small_types[i]))
            check_linear(&d, &spec, small_rows(p, i), forced);
    }
    duo_close(&d);
}

static void small_mlp(bool experts, const struct pick_info *p, const char *formats)
{
    for (int i = 0; i < N_SMALL; i++) {
        struct dims s = base_dims();
        bool wide = i % 2 && p->rows_from < 33; /* else as many tiles of down as SMs: some wait */
        s.n_embd = wide ? 768 : 256;
        s.n_ff = s.n_ff_exp = wide ? 512 : 256;
        if (takes(formats, small_types[i]))
            mlp_case(&s, experts ? s.n_expert : 1, s.n_ff, small_types[i], small_types[i], DT_F32,
                     small_rows(p, i), 3.0f);
    }
    for (int own = 0; own < N_SPREAD && experts; own++) {
        struct dims s = spread_dims(own);
        enum dtype t = takes(formats, DT_Q4_K) ? DT_Q4_K : DT_F16;
        mlp_case(&s, s.n_expert, 256, t, t, DT_F32, small_rows(p, own), 3.0f);
    }
    struct dims s = base_dims();
    s.n_embd = 512;
    s.n_heads = 16;
    if (experts && p->rows_from == 1)
        routed_case(&s, (const enum dtype[]){DT_Q4_K, DT_Q4_K, DT_Q6_K}, 1.0f, 2, false);
}

static void small_attention(const struct pick_info *p)
{
    static const int decode[][2] = {{0, 1}, {600, 1}, {64, 1}};
    static const int prompt[][2] = {{20, 1}, {250, 17}, {0, 70}}; /* round the ring */
    static const int wide[][2] = {{7, 1}, {0, 200}, {40, 90}};    /* more than 256 rows */
    static const int ten[][2] = {{1, 1},  {2, 1}, {3, 1}, {40, 1}, {50, 1},
                                 {60, 1}, {7, 1}, {8, 1}, {90, 1}, {10, 1}};
    struct dims s = base_dims();
    s.head_dim = s.n_rot = 128;
    s.n_heads = 8;
    s.n_kv_heads = 2;
    bool quant = strstr(forced, "quant"), decodes = strstr(forced, "decode");
    static const enum dtype caches[] = {DT_F16, DT_Q8_0, DT_Q4_0, DT_F8_E4M3};
    int own = quant;
    while (own < 3 && !quant && *p->formats &&
           !takes(p->formats, caches[own])) /* "": all of them */
        own++;
    s.b.k_type = s.b.v_type = caches[own];
    attention_case(&s, true, 0, decode, 3, false, forced);
    attention_case(&s, true, 0, prompt, 3, false, forced);
    if (quant) { /* and others, a type for each */
        s.b.k_type = DT_F8_E4M3;
        s.b.v_type = DT_Q4_0;
        attention_case(&s, true, 0, decodes ? decode : prompt, 3, false, forced);
    }
    s.n_heads = 16; /* eight heads to a block: rows may be left as records */
    if (strstr(forced, "batch"))
        attention_case(&s, true, 0, ten, 10, false, forced);
    s.n_heads = 8; /* or as panels */
    if (strstr(forced, "decode"))
        attention_case(&s, true, 0, ten, 10, false, forced);
    s.n_heads = 16;
    if (strstr(forced, "prefill") || strstr(forced, "qkv_wgmma"))
        attention_case(&s, true, 0, wide, 3, false, forced);
}

/* The cases of one row of the tables, which is forced. */
static void force_row(const struct pick_info *p)
{
    bool routes = !strcmp(p->op, "router") || !strcmp(p->op, "logits") || !strcmp(p->op, "output");
    bool experts = routes || !strcmp(p->op, "moe");
    const char *formats = routes ? "Q4_K Q6_K Q8_0" : p->formats;
    if (!strcmp(p->op, "gemm"))
        force_gemm(p->formats);
    else if (!strcmp(p->op, "linear"))
        small ? small_linear(p) : force_linear(p->formats);
    else if (experts || !strcmp(p->op, "ffn"))
        small ? small_mlp(experts, p, formats) : force_mlp(experts, formats);
    else if (!strcmp(p->op, "away"))
        force_away(!strcmp(p->name, "away_copied"));
    else if (!strncmp(p->op, "delta", 5))
        force_delta_net();
    else if (!strcmp(p->op, "encode") || !strcmp(p->op, "ungated")) {
        force_encoders(takes, p->formats);
        if (!strcmp(p->name, "encode_long"))
            force_towers();
    } else if (!strcmp(p->op, "listed"))
        force_compressed();
    else if (!strcmp(p->op, "heads") || !strncmp(p->op, "latent", 6))
        force_latent(takes, small ? "" : p->formats);
    else
        small ? small_attention(p) : force_attention();
}

/* The tables, read by a backend that is closed again: of those open at a time, only the first may run
 * kernels whose blocks wait for each other. */
static int read_picks(struct pick_info *list, int most)
{
    struct duo d;
    int n = 0;
    head_open(&d, 256, 64);
    struct backend *dev = d.be[DEV];
    if (!dev->ops->picks)
        printf("skipped: picks: %s has no tables of kernels\n", backend_name);
    while (n < most && dev->ops->picks && dev->ops->picks->row(dev, n, &list[n]))
        n++;
    duo_close(&d);
    return n;
}

void test_picks(int part, int parts)
{
    int before = n_checks;
    struct pick_info list[128];
    const char *only = filter && !strncmp(filter, "picks=", 6) ? filter + 6 : NULL;
    if (!only && !wanted("picks"))
        return;
    int n = read_picks(list, 128);
    for (int i = part; i < n; i += parts) {
        const struct pick_info *p = &list[i];
        int row = 0; /* the first of this op and name: several differ in their rows alone */
        while (strcmp(list[row].name, p->name) || strcmp(list[row].op, p->op))
            row++;
        if (row < i || (only && strcmp(only, p->name)))
            continue;
        if (!p->available) {
            printf("skipped: %s %s needs a device that is %s\n", p->op, p->name, p->device);
            continue;
        }
        uint64_t runs = picked[i];
        double before_row = product_tol;
        if (!strcmp(p->device, "dot")) /* inputs of eight bits, as on the CPU */
            product_tol = 1.5e-2;
        forced = p->name;
        force_row(p);
        forced = NULL;
        product_tol = before_row;
        n_checks++;
        if (picked[i] == runs) {
            n_failed++;
            printf("FAIL  %s %s was forced and never ran\n", p->op, p->name);
        }
    }
    report("picks", before);
}
