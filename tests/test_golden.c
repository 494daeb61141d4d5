/*
 * The whole path from file to logits against what other software computed: the reference ops almost
 * exactly, the default kernels within a KL divergence, and on quantised models never further from
 * the exact logits than llama.cpp is. tests/golden has a small model of every family, also of those
 * that Steel does not run yet: each is a test of its own, skipped by name if the family is refused.
 * More formats and larger models lie in ../shared/golden, where that is present.
 *   test_golden [FAMILY...]: only these folders of tests/golden
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "golden.h"
#include "size.h"

#define MODELS GOLDEN "models/"

/* Families that run: a refusal of these is a failure, not a skip. */
static const char *const running[] = {"gpt_oss_mxfp4",
                                      "gemma3",
                                      "gemma4",
                                      "gemma4_moe",
                                      "glm4_moe",
                                      "gpt_oss",
                                      "llama3-rope",
                                      "minimax_m2",
                                      "ministral3",
                                      "mistral-window",
                                      "mixtral",
                                      "phi3",
                                      "qwen2",
                                      "qwen3",
                                      "qwen3moe",
                                      "qwen3_5",
                                      "qwen3_5_moe",
                                      "qwen3_next",
                                      "deepseek_v3",
                                      "glm4_moe_lite",
                                      "dots1",
                                      "exaone4",
                                      "exaone_moe",
                                      "gemma2",
                                      "granite",
                                      "granitemoe",
                                      "hy_v3",
                                      "mellum",
                                      "olmo2",
                                      "olmo3",
                                      "olmoe",
                                      "qwen2_moe",
                                      "seed_oss",
                                      "smollm3",
                                      "solar_open",
                                      "ernie4_5",
                                      "ernie4_5_moe",
                                      "glm4",
                                      "granitemoehybrid",
                                      "mamba2",
                                      "falcon_h1",
                                      "jamba",
                                      "olmo_hybrid",
                                      "deepseek_v32",
                                      "glm_moe_dsa",
                                      "minimax_m3",
                                      "lfm2",
                                      "lfm2_moe",
                                      "nemotron_h",
                                      "arcee",
                                      "nemotron",
                                      "starcoder2",
                                      "stablelm",
                                      "cohere2",
                                      "cohere2_moe",
                                      "flex_olmo",
                                      "mistral4",
                                      "axk1",
                                      "afmoe",
                                      "muse_glimmer",
                                      "laguna",
                                      "step3p7",
                                      "llama4",
                                      "hunyuan_v1_dense",
                                      "hunyuan_v1_moe",
                                      "apertus",
                                      "bitnet",
                                      "gpt_neox",
                                      "gpt2",
                                      "phimoe",
                                      "longcat_flash",
                                      "minimax",
                                      "deepseek_v4",
                                      "inkling",
                                      "mimo_v2_flash",
                                      "gemma3n",
                                      "bitnet_packed"};

static const struct {
    const char *model, *golden;
} models[] = {
    {"qwen3moe", "qwen3moe/golden.bin"},
    {"qwen3moe-gptq", "qwen3moe-gptq/golden.bin"},
    {"qwen3moe-fp8", "qwen3moe-fp8/golden.bin"},
    {"qwen3moe-tied-nonorm", "qwen3moe-tied-nonorm/golden.bin"},
    {"qwen3", "qwen3/golden.bin"},
    {"qwen2", "qwen2/golden.bin"},
    {"qwen2/model-bf16.gguf", "qwen2/golden.bin"},
    {"llama3-rope", "llama3-rope/golden.bin"},
    {"llama3-rope/model-bf16.gguf", "llama3-rope/golden.bin"},
    {"mistral-window", "mistral-window/golden.bin"},
    /* packed by other tools */
    {"../families/qwen3moe-awq", "../families/qwen3moe-awq/golden.bin"},
    {"../families/qwen3moe-ct-int4", "../families/qwen3moe-ct-int4/golden.bin"},
    {"../families/qwen3moe-ct-fp8", "../families/qwen3moe-ct-fp8/golden.bin"},
    {"../families/qwen3moe-ct-nvfp4", "../families/qwen3moe-ct-nvfp4/golden.bin"},
    {"../families/qwen3moe-modelopt-nvfp4", "../families/qwen3moe-modelopt-nvfp4/golden.bin"},
};

static const char *const quants[] = {"Q8_0", "Q4_K_M", "IQ4_XS", "MXFP4_MOE"};

enum { N_MODELS = sizeof models / sizeof *models, N_QUANTS = sizeof quants / sizeof *quants };

/* A folder without its weights is left out: on a GPU machine some of the models will do. */
static bool left_out(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, MODELS "%s", name);
    size_t n = strlen(path);
    struct stat st;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        snprintf(path + n, sizeof path - n, "/model.safetensors");
    if (golden_here(path))
        return false;
    if (!getenv("STEEL_TEST_DEVICE"))
        fail_msg("%s is missing", path);
    print_message("%-28s is not here\n", name);
    return true;
}

static struct logits read_golden(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, MODELS "%s", name);
    return logits_read(path);
}

static struct logits compute(const char *name, const struct logits *ids, int chunk, enum dtype kv)
{
    char path[256];
    snprintf(path, sizeof path, MODELS "%s", name);
    return logits_compute(path, ids, chunk, kv);
}

/* Its authors round the inputs of products to 8 bits, so that single logits jump. Steel does not. */
static bool rounds_inputs(const char *name)
{
    return !strcmp(name, "bitnet_packed");
}

/* The reference ops, whatever the prompt is cut into; with an adapter where one is named. */
static void check_adapted_reference(const char *path, const char *adapter, const char *name,
                                    const struct logits *g)
{
    const int chunks[] = {0, 1, 7};
    int n = test_kernels_alone() ? 0 : test_small() ? 1 : 3;
    setenv("STEEL_ISA", "ref", 1);
    for (int k = 0; k < n; k++) {
        struct logits mine = logits_adapted(path, adapter, g, chunks[k], DT_F32);
        double diff = logits_max_diff(g, &mine);
        print_message("%-28s chunk %d: largest difference %.2g\n", name, chunks[k], diff);
        assert_true(rounds_inputs(name) ? logits_kl(g, &mine) <= 5e-4 : diff <= 2e-3);
        logits_free(&mine);
    }
    unsetenv("STEEL_ISA");
}

static void check_reference(const char *path, const char *name, const struct logits *g)
{
    check_adapted_reference(path, NULL, name, g);
}

/* Models whose random weights attend so sharply that a cache of halves chooses other experts or keys, by any
 * kernels: they are compared with a cache of floats. */
static bool is_sharp(const char *name)
{
    return !strcmp(name, "gemma4_moe") || !strcmp(name, "deepseek_v32");
}

/* A GPU's products round to halves, which those models do not bear either. */
static bool is_too_sharp(const char *name)
{
    bool keys =
        !strcmp(name, "glm_moe_dsa"); /* KL at three positions: 8e-3 to 7e-2, else below 1e-4 */
    bool sharp = getenv("STEEL_TEST_DEVICE") && (is_sharp(name) || keys);
    if (sharp)
        print_message("skipped: %s: fp16 chooses other %s (bench/notes/correctness.md)\n", name,
                      keys ? "keys" : "experts");
    return sharp;
}

static void check_adapted_default(const char *path, const char *adapter, const char *name,
                                  const struct logits *g)
{
    bool halves = getenv("STEEL_TEST_DEVICE") != NULL;
    struct logits mine = logits_adapted(path, adapter, g, 0, is_sharp(name) ? DT_F32 : DT_NONE);
    double kl = logits_kl(g, &mine);
    print_message("%-28s mean KL %.3g\n", name, kl);
    assert_true(kl <= (halves || rounds_inputs(name) ? 5e-4 : 2e-4));
    logits_free(&mine);
}

static void check_default(const char *path, const char *name, const struct logits *g)
{
    check_adapted_default(path, NULL, name, g);
}

/* A folder with an adapter, called after the model beside it. */
static void check_adapter(const char *adapter, const char *model_dir)
{
    const char *name = strrchr(adapter, '/') + 1;
    char base[256], file[300];
    snprintf(base, sizeof base, "%s%.*s", model_dir, (int)(strlen(name) - strlen("-lora")), name);
    snprintf(file, sizeof file, "%s/golden.bin", adapter);
    struct logits g = logits_read(file);
    check_adapted_reference(base, adapter, name, &g);
    if (device_refuses(base, adapter)) {
        logits_free(&g);
        return;
    }
    check_adapted_default(base, adapter, name, &g);
    struct logits plain = logits_compute(base, &g, 0, DT_NONE); /* it does change something */
    assert_true(logits_kl(&g, &plain) > 1e-3);
    logits_free(&plain);
    logits_free(&g);
}

static void all_models(void (*check)(const char *, const char *, const struct logits *))
{
    for (int i = 0; i < N_MODELS; i++) {
        if (left_out(models[i].golden) || left_out(models[i].model))
            continue;
        char path[256];
        snprintf(path, sizeof path, MODELS "%s", models[i].model);
        struct logits g = read_golden(models[i].golden);
        check(path, models[i].model, &g);
        logits_free(&g);
    }
}

static void reference_is_exact(void **state)
{
    (void)state;
    GOLDEN_NEEDED(MODELS);
    all_models(check_reference);
}

static void default_kernels_are_close(void **state)
{
    (void)state;
    GOLDEN_NEEDED(MODELS);
    all_models(check_default);
}

static void quantised_models(void **state)
{
    (void)state;
    GOLDEN_NEEDED(MODELS);
    for (int i = 0; i < N_QUANTS; i++) {
        char model[64], name[64];
        snprintf(model, sizeof model, "qwen3moe/quant/%s.gguf", quants[i]);
        if (left_out(model))
            continue;
        snprintf(name, sizeof name, "qwen3moe/quant/%s.exact.bin", quants[i]);
        struct logits exact = read_golden(name);
        snprintf(name, sizeof name, "qwen3moe/quant/%s.llamacpp.bin", quants[i]);
        struct logits peer = read_golden(name);
        setenv("STEEL_ISA", "ref", 1);
        struct logits ref = compute(model, &exact, 0, DT_F32);
        unsetenv("STEEL_ISA");
        struct logits fast = compute(model, &exact, 0, DT_NONE);
        struct logits one = compute(model, &exact, 1, DT_NONE);
        double diff = logits_max_diff(&exact, &ref), kl = logits_kl(&exact, &fast);
        double kl_one = logits_kl(&exact, &one), kl_peer = logits_kl(&exact, &peer);
        print_message("%-10s reference %.2g; KL %.3g (one token at a time %.3g), llama.cpp %.3g\n",
                      quants[i], diff, kl, kl_one, kl_peer);
        assert_true(diff <= 2e-3);
        assert_true(kl <= kl_peer);
        assert_true(kl_one <= kl_peer);
        logits_free(&exact);
        logits_free(&peer);
        logits_free(&ref);
        logits_free(&fast);
        logits_free(&one);
    }
}

/* One family of tests/golden; *state is its folder. */
static void micro_family(void **state)
{
    const char *path = *state, *name = path + strlen(MICRO);
    char file[256];
    snprintf(file, sizeof file, "%s/adapter_config.json", path);
    if (golden_here(file)) {
        check_adapter(path, MICRO);
        return;
    }
    bool must_run = false;
    for (size_t i = 0; i < sizeof running / sizeof *running; i++)
        must_run |= !strcmp(name, running[i]);
    struct error err = {0};
    struct runtime_options opt = {.context = 64, .backend = {.threads = 1}};
    struct runtime *rt = runtime_open(path, &opt, &err);
    if (!rt && must_run)
        fail_msg("%s", err.msg);
    if (!rt) { /* it says what it refuses */
        assert_non_null(strstr(err.msg, path));
        print_message("%s\n", err.msg);
        print_message("skipped: family %s not supported yet\n", name);
        skip();
    }
    runtime_close(rt);
    snprintf(file, sizeof file, "%s/golden.bin", path);
    struct logits g = logits_read(file);
    check_reference(path, name, &g);
    bool left = is_too_sharp(name) || device_refuses(path, NULL);
    if (!left)
        check_default(path, name, &g);
    logits_free(&g);
    if (left)
        skip();
}

/* A copy of a folder in `to` (below TMPDIR) whose config.json has another member. */
static void with_member(const char *path, const char *member, char *to, size_t size)
{
    char full[PATH_MAX], file[PATH_MAX + 32], at[300], text[1 << 16];
    const char *tmp = getenv("TMPDIR");
    snprintf(to, size, "%s/steel-golden-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(to));
    assert_non_null(realpath(path, full));
    snprintf(file, sizeof file, "%s/model.safetensors", full);
    snprintf(at, sizeof at, "%s/model.safetensors", to);
    assert_int_equal(symlink(file, at), 0);
    snprintf(file, sizeof file, "%s/config.json", full);
    FILE *f = fopen(file, "r");
    assert_non_null(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = 0;
    snprintf(at, sizeof at, "%s/config.json", to);
    f = fopen(at, "w");
    assert_non_null(f);
    fprintf(f, "{%s, %s", member, strchr(text, '{') + 1);
    assert_int_equal(fclose(f), 0);
}

static void remove_copy(const char *folder)
{
    static const char *const files[] = {"model.safetensors", "config.json"};
    char at[300];
    for (size_t i = 0; i < 2; i++) {
        snprintf(at, sizeof at, "%s/%s", folder, files[i]);
        unlink(at);
    }
    rmdir(folder);
}

/* The same families, larger. */
static void larger_families(void **state)
{
    (void)state;
    GOLDEN_NEEDED(GOLDEN "families/");
    for (size_t i = 0; i < 2 * (sizeof running / sizeof *running); i++) {
        char path[256], file[300];
        const char *name = running[i / 2];
        snprintf(path, sizeof path, GOLDEN "families%s/%s", i % 2 ? "2" : "", name);
        snprintf(file, sizeof file, "%s/golden.bin", path);
        if (!golden_here(file))
            continue; /* it is in models/ */
        struct logits g = logits_read(file);
        char copy[256];
        bool whole = !strcmp(name, "mamba2"); /* transformers norms all groups at once */
        if (whole) {
            with_member(path, "\"norm_count\": 1", copy, sizeof copy);
            memcpy(path, copy, sizeof path);
        }
        bool sees = !strcmp(name, "muse_glimmer"); /* transformers reads placeholders as padding */
        for (int k = 0; sees && k < g.n_tokens; k++)
            g.ids[k] = g.ids[k] >= g.n_vocab - 2 ? 0 : g.ids[k];
        check_reference(path, name, &g);
        if (!is_too_sharp(name) && !device_refuses(path, NULL))
            check_default(path, name, &g);
        logits_free(&g);
        if (whole)
            remove_copy(copy);
    }
}

static void larger_adapters(void **state)
{
    (void)state;
    GOLDEN_NEEDED(GOLDEN "families/qwen3-lora");
    check_adapter(GOLDEN "families/qwen3-lora", MODELS);
    check_adapter(GOLDEN "families/qwen3moe-lora", MODELS);
}

enum { MAX_FAMILIES = 100 };

/* Whether the arguments name this test; without arguments all run. */
static bool is_wanted(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], name))
            return true;
    return argc < 2;
}

int main(int argc, char **argv)
{
    struct CMUnitTest tests[MAX_FAMILIES + 5] = {
        cmocka_unit_test(reference_is_exact), cmocka_unit_test(default_kernels_are_close),
        cmocka_unit_test(quantised_models),   cmocka_unit_test(larger_families),
        cmocka_unit_test(larger_adapters),
    };
    size_t n = argc < 2 ? 5 : 0;
    glob_t g = {0};
    glob(MICRO "*", GLOB_ONLYDIR, NULL, &g);
    CHECK((argc > 1 || g.gl_pathc >= sizeof running / sizeof *running) &&
              g.gl_pathc <= MAX_FAMILIES,
          "%zu families in " MICRO, g.gl_pathc);
    for (size_t i = 0; i < g.gl_pathc; i++) {
        char pooled[300];
        snprintf(pooled, sizeof pooled, "%s/pooled.bin", g.gl_pathv[i]);
        if (golden_here(pooled) || /* test_embed.c has these */
            !is_wanted(argc, argv, g.gl_pathv[i] + strlen(MICRO)))
            continue;
        tests[n++] = (struct CMUnitTest){.name = g.gl_pathv[i] + strlen(MICRO),
                                         .test_func = micro_family,
                                         .initial_state = g.gl_pathv[i]};
    }
    CHECK(argc < 2 || (int)n == argc - 1, "%zu of %d families are in " MICRO, n, argc - 1);
    int rc = _cmocka_run_group_tests("golden", tests, n, NULL, NULL);
    globfree(&g);
    return rc;
}
