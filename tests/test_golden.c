/*
 * The whole path from file to logits against what other software computed (../shared/golden): the
 * reference ops almost exactly, the default kernels within a KL divergence, and on quantised models
 * never further from the exact logits than llama.cpp is.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>
#include <sys/stat.h>
#include <unistd.h>

#include "golden.h"

#define MODELS GOLDEN "models/"

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
};

static const char *const quants[] = {"Q8_0", "Q4_K_M", "IQ4_XS", "MXFP4_MOE"};

enum { N_MODELS = sizeof models / sizeof *models, N_QUANTS = sizeof quants / sizeof *quants };

static void skip_if_absent(void)
{
    if (golden_present())
        return;
    print_message("no ../shared/golden here\n");
    skip();
}

/* On a GPU machine (STEEL_TEST_DEVICE) some of the models will do; elsewhere all must be there. */
static bool left_out(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, MODELS "%s", name);
    size_t n = strlen(path);
    struct stat st;
    if (!getenv("STEEL_TEST_DEVICE"))
        return false;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) /* a folder without its weights is left out */
        snprintf(path + n, sizeof path - n, "/model.safetensors");
    if (access(path, R_OK) == 0)
        return false;
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

static void reference_is_exact(void **state)
{
    (void)state;
    skip_if_absent();
    setenv("STEEL_ISA", "ref", 1);
    for (int i = 0; i < N_MODELS; i++) {
        if (left_out(models[i].golden) || left_out(models[i].model))
            continue;
        struct logits g = read_golden(models[i].golden);
        const int chunks[] = {0, 1, 7};
        for (int k = 0; k < 3; k++) {
            struct logits mine = compute(models[i].model, &g, chunks[k], DT_F32);
            double diff = logits_max_diff(&g, &mine);
            print_message("%-28s chunk %d: largest difference %.2g\n", models[i].model, chunks[k],
                          diff);
            assert_true(diff <= 2e-3);
            logits_free(&mine);
        }
        logits_free(&g);
    }
    unsetenv("STEEL_ISA");
}

static void default_kernels_are_close(void **state)
{
    (void)state;
    skip_if_absent();
    for (int i = 0; i < N_MODELS; i++) {
        if (left_out(models[i].golden) || left_out(models[i].model))
            continue;
        struct logits g = read_golden(models[i].golden);
        struct logits mine = compute(models[i].model, &g, 0, DT_NONE);
        double kl = logits_kl(&g, &mine);
        print_message("%-28s mean KL %.3g\n", models[i].model, kl);
        assert_true(kl <= 2e-4);
        logits_free(&mine);
        logits_free(&g);
    }
}

static void quantised_models(void **state)
{
    (void)state;
    skip_if_absent();
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

static void encoders_are_refused(void **state)
{
    (void)state;
    skip_if_absent();
    if (left_out("bert"))
        return;
    struct error err = {0};
    struct runtime_options opt = {0};
    assert_null(runtime_open(MODELS "bert", &opt, &err));
    assert_non_null(strstr(err.msg, "BertModel"));
    assert_non_null(strstr(err.msg, "not supported"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_is_exact),
        cmocka_unit_test(default_kernels_are_close),
        cmocka_unit_test(quantised_models),
        cmocka_unit_test(encoders_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
