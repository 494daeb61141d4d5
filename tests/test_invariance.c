/*
 * A sequence's logits do not depend on its company: alone, cut into chunks, decoded token by token,
 * batched with others, mixed with others' prompts, computed again on other pages: the same within 1e-5 relative,
 * with F32 KV. With STEEL_TEST_DEVICE=cuda, the same bytes, with F16 KV; of one family with STEEL_TEST_FAMILY=name,
 * and with STEEL_TEST_BRIEF, for the simulator, over fewer steps.
 * Also: pages are all given back, and a full cache or context is refused without side effects.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "golden.h"

static const char *const micro[] = {MICRO "qwen3moe",
                                    MICRO "mistral-window",
                                    MICRO "qwen2",
                                    MICRO "mixtral",
                                    MICRO "phi3",
                                    MICRO "ministral3",
                                    MICRO "minimax_m2",
                                    MICRO "gpt_oss",
                                    MICRO "gpt_oss_mxfp4",
                                    MICRO "gemma3",
                                    MICRO "gemma4",
                                    MICRO "gemma4_moe",
                                    MICRO "glm4_moe",
                                    MICRO "qwen3_5",
                                    MICRO "qwen3_5_moe",
                                    MICRO "qwen3_next",
                                    MICRO "deepseek_v3",
                                    MICRO "glm4_moe_lite",
                                    MICRO "dots1",
                                    MICRO "exaone4",
                                    MICRO "exaone_moe",
                                    MICRO "gemma2",
                                    MICRO "granite",
                                    MICRO "granitemoe",
                                    MICRO "hy_v3",
                                    MICRO "mellum",
                                    MICRO "olmo2",
                                    MICRO "olmo3",
                                    MICRO "olmoe",
                                    MICRO "qwen2_moe",
                                    MICRO "seed_oss",
                                    MICRO "smollm3",
                                    MICRO "solar_open",
                                    MICRO "ernie4_5",
                                    MICRO "ernie4_5_moe",
                                    MICRO "glm4",
                                    MICRO "granitemoehybrid",
                                    MICRO "mamba2",
                                    MICRO "falcon_h1",
                                    MICRO "jamba",
                                    MICRO "olmo_hybrid",
                                    MICRO "deepseek_v32",
                                    MICRO "glm_moe_dsa",
                                    MICRO "minimax_m3",
                                    MICRO "lfm2",
                                    MICRO "lfm2_moe",
                                    MICRO "nemotron_h",
                                    MICRO "arcee",
                                    MICRO "nemotron",
                                    MICRO "starcoder2",
                                    MICRO "stablelm",
                                    MICRO "cohere2",
                                    MICRO "cohere2_moe",
                                    MICRO "flex_olmo",
                                    MICRO "mistral4",
                                    MICRO "axk1",
                                    MICRO "afmoe",
                                    MICRO "muse_glimmer",
                                    MICRO "laguna",
                                    MICRO "step3p7",
                                    MICRO "llama4",
                                    MICRO "hunyuan_v1_dense",
                                    MICRO "hunyuan_v1_moe",
                                    MICRO "apertus",
                                    MICRO "bitnet",
                                    MICRO "gpt_neox",
                                    MICRO "gpt2",
                                    MICRO "phimoe",
                                    MICRO "mimo_v2_flash",
                                    MICRO "gemma3n",
                                    MICRO "longcat_flash",
                                    MICRO "minimax",
                                    MICRO "deepseek_v4",
                                    MICRO "inkling"};

static const char *const larger[] = {
    GOLDEN "models/qwen3moe",
    GOLDEN "models/qwen3moe/quant/Q4_K_M.gguf",
    GOLDEN "models/qwen3moe-gptq",
    GOLDEN "models/qwen3moe-tied-nonorm",
};

enum { LEN = 45 };

static const char *device(void)
{
    return getenv("STEEL_TEST_DEVICE");
}

static struct runtime *open_model(const char *path)
{
    enum dtype kv = device() ? DT_F16 : DT_F32;
    struct runtime_options opt = {.context = 64,
                                  .k_type = kv,
                                  .v_type = kv,
                                  .max_seqs = 8,
                                  .max_tokens = 128,
                                  .max_out = 128};
    opt.backend.threads = 2;
    opt.backend.deterministic = true; /* on a CPU it changes nothing but on AMX */
    opt.backend.device = device();
    struct error err = {0};
    struct runtime *rt = runtime_open(path, &opt, &err);
    CHECK(rt, "%s", err.msg);
    return rt;
}

static void ids_of(struct runtime *rt, int which, int32_t *ids, int n)
{
    uint32_t s = 17u * (uint32_t)which + 3;
    for (int i = 0; i < n; i++) {
        s = s * 1664525u + 1013904223u;
        ids[i] = (int32_t)((s >> 8) % (uint32_t)rt->model->config.n_vocab);
    }
}

/* Largest difference relative to the row's largest logit. */
static double difference(const float *a, const float *b, int n)
{
    double diff = 0, scale = 1e-30;
    for (int i = 0; i < n; i++) {
        diff = fmax(diff, fabs((double)a[i] - (double)b[i]));
        scale = fmax(scale, fabs((double)a[i]));
    }
    return diff / scale;
}

struct seq_run {
    struct kv_seq seq;
    int32_t ids[LEN];
    int fed;
    float *rows; /* (LEN, n_vocab) */
};

/* One step: each sequence i advances by take[i] tokens (0 = stays out). */
static void advance(struct runtime *rt, struct seq_run *runs, const int *take, int n)
{
    struct step_item items[8];
    struct seq_run *who[8];
    int k = 0, V = rt->model->config.n_vocab;
    for (int i = 0; i < n; i++) {
        if (!take[i])
            continue;
        who[k] = &runs[i];
        items[k++] = (struct step_item){.seq = &runs[i].seq,
                                        .tokens = runs[i].ids + runs[i].fed,
                                        .n_tokens = take[i],
                                        .want = LOGITS_ALL};
    }
    struct error err = {0};
    CHECK(step_run(rt->step, items, k, &err), "%s", err.msg);
    for (int j = 0; j < k; j++) {
        for (int t = 0; t < items[j].n_tokens; t++)
            step_logits(rt->step, items[j].first_row + t,
                        who[j]->rows + (size_t)(who[j]->fed + t) * (size_t)V);
        who[j]->fed += items[j].n_tokens;
    }
}

static void runs_init(struct runtime *rt, struct seq_run *runs, int n)
{
    for (int i = 0; i < n; i++) {
        runs[i] = (struct seq_run){0};
        runs[i].rows = mem_zalloc((size_t)LEN * (size_t)rt->model->config.n_vocab, 4);
        ids_of(rt, i, runs[i].ids, LEN);
    }
}

static void runs_clear(struct runtime *rt, struct seq_run *runs, int n)
{
    for (int i = 0; i < n; i++) {
        kvcache_release(rt->kv, &runs[i].seq);
        mem_free(runs[i].rows);
    }
}

static void compare(struct runtime *rt, const struct seq_run *a, const float *b, int n,
                    const char *what)
{
    int V = rt->model->config.n_vocab;
    double most = 0;
    for (int t = 0; t < n; t++)
        most =
            fmax(most, difference(a->rows + (size_t)t * (size_t)V, b + (size_t)t * (size_t)V, V));
    print_message("  %-12s largest relative difference %.2g\n", what, most);
    assert_true(most <= 1e-5);
    if (device())
        assert_memory_equal(a->rows, b, (size_t)n * (size_t)V * sizeof *b);
}

static void company_does_not_matter(const char *const *paths, size_t n)
{
    const char *only = getenv("STEEL_TEST_FAMILY");
    for (size_t p = 0; p < n; p++) {
        const char *name = strrchr(paths[p], '/') + 1;
        if (only && strcmp(only, name) != 0)
            continue;
        if (device_refuses(paths[p], NULL))
            continue;
        print_message("%s\n", paths[p]);
        struct runtime *rt = open_model(paths[p]);
        struct seq_run alone[1], runs[5];
        runs_init(rt, alone, 1);
        advance(rt, alone, (int[]){LEN}, 1);
        float *want = alone[0].rows;
        int singles = getenv("STEEL_TEST_BRIEF") ? 5 : LEN; /* the last rows, one by one */

        runs_init(rt, runs, 1); /* chunks of 7 */
        while (runs[0].fed < LEN)
            advance(rt, runs, (int[]){LEN - runs[0].fed < 7 ? LEN - runs[0].fed : 7}, 1);
        compare(rt, &runs[0], want, LEN, "chunks of 7");
        runs_clear(rt, runs, 1);

        runs_init(rt, runs, 1); /* token by token */
        if (singles < LEN)
            advance(rt, runs, (int[]){LEN - singles}, 1);
        while (runs[0].fed < LEN)
            advance(rt, runs, (int[]){1}, 1);
        compare(rt, &runs[0], want, LEN, "one by one");
        runs_clear(rt, runs, 1);

        runs_init(rt, runs, 5); /* five decode side by side */
        for (int i = 0; i < 5 && singles < LEN; i++)
            advance(rt, runs, (int[]){i ? 0 : LEN - singles, i == 1, i == 2, i == 3, i == 4}, 5);
        for (int t = LEN - singles; t < LEN; t++)
            advance(rt, runs, (int[]){1, 1, 1, 1, 1}, 5);
        compare(rt, &runs[0], want, LEN, "batched");
        runs_clear(rt, runs, 5);

        runs_init(rt, runs, 5); /* decodes mixed with prompts of others */
        int first = singles < LEN ? LEN - 9 : 9;
        advance(rt, runs, (int[]){first, 0, 5, 0, 0}, 5);
        if (singles < LEN)
            advance(rt, runs, (int[]){1, 31, 1, 0, 4}, 5);
        for (int t = runs[0].fed; t < LEN; t++)
            advance(rt, runs,
                    (int[]){1, t == 12 ? 31 : 0, 1, t == 20 ? 45 : 0, t % 3 == 0 && t < 40 ? 4 : 0},
                    5);
        compare(rt, &runs[0], want, LEN, "mixed");
        /* Preempted: its pages and slots go, others take them, and it is computed again elsewhere. */
        kvcache_release(rt->kv, &runs[0].seq);
        runs[0].fed = 0;
        runs[4].fed = 0;
        kvcache_release(rt->kv, &runs[4].seq);
        advance(rt, runs, (int[]){0, 0, 0, 0, 20}, 5);
        advance(rt, runs, (int[]){singles < LEN ? LEN - 3 : 30, 0, 0, 0, 1}, 5);
        while (runs[0].fed < LEN)
            advance(rt, runs, (int[]){1, 0, 0, 0, runs[4].fed < LEN}, 5);
        compare(rt, &runs[0], want, LEN, "preempted");
        runs_clear(rt, runs, 5);
        runs_clear(rt, alone, 1);
        assert_int_equal(rt->kv->n_free, rt->kv->n_pages);
        runtime_close(rt);
    }
}

static void micro_models(void **state)
{
    (void)state;
    company_does_not_matter(micro, sizeof micro / sizeof *micro);
}

static void larger_models(void **state)
{
    (void)state;
    GOLDEN_NEEDED(GOLDEN "models");
    company_does_not_matter(larger, sizeof larger / sizeof *larger);
}

static void limits_are_errors(void **state)
{
    (void)state;
    struct runtime_options opt = {.context = 40, .kv_tokens = 40, .max_seqs = 2, .max_tokens = 128};
    struct error err = {0};
    struct runtime *rt = runtime_open(micro[0], &opt, &err);
    assert_non_null(rt);
    int32_t ids[64];
    ids_of(rt, 0, ids, 64);
    struct kv_seq a = {0}, b = {0};
    struct step_item item = {.seq = &a, .tokens = ids, .n_tokens = 41};
    assert_false(step_run(rt->step, &item, 1, &err));
    assert_non_null(strstr(err.msg, "41"));
    assert_non_null(strstr(err.msg, "40"));
    assert_int_equal(rt->kv->n_free, rt->kv->n_pages);
    item.n_tokens = 40;
    assert_true(step_run(rt->step, &item, 1, &err));
    int free_pages = rt->kv->n_free;
    item = (struct step_item){.seq = &b, .tokens = ids, .n_tokens = 40};
    assert_false(step_run(rt->step, &item, 1, &err));
    assert_non_null(strstr(err.msg, "KV cache is full"));
    assert_int_equal(rt->kv->n_free, free_pages);
    kvcache_release(rt->kv, &a);
    kvcache_release(rt->kv, &b);
    runtime_close(rt);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(micro_models),
        cmocka_unit_test(larger_models),
        cmocka_unit_test(limits_are_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
