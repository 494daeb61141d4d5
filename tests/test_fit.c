/*
 * What runtime_plan says of memory, held against what a runtime then allocates: golden and synthetic models of several
 * formats, with several settings. Every aligned block is counted as it is allocated and freed (the linker wraps
 * mem_aligned), by no code that the plan shares. Then speeds between the measured points.
 */
#include "backend/backend.h"
#include "base/mem.h"
#include "engine/probe.h"
#include "engine/runtime.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

static _Atomic size_t live;

void *__real_mem_aligned(size_t bytes);
void __real_mem_aligned_free(void *p, size_t bytes);
void *__wrap_mem_aligned(size_t bytes);
void __wrap_mem_aligned_free(void *p, size_t bytes);

void *__wrap_mem_aligned(size_t bytes)
{
    void *p = __real_mem_aligned(bytes);
    if (p)
        atomic_fetch_add(&live, bytes);
    return p;
}

void __wrap_mem_aligned_free(void *p, size_t bytes)
{
    if (p)
        atomic_fetch_sub(&live, bytes);
    __real_mem_aligned_free(p, bytes);
}

struct setting {
    const char *model; /* a golden model, or arguments of synth_gguf.py with a hole for weights */
    struct runtime_options opt;
};

static char folder[] = "/tmp/steel-fit-XXXXXX";

/* The path of a setting's model. */
static const char *model_path(const struct setting *s, char path[64])
{
    char command[256];
    if (s->model[0] != '-')
        return s->model;
    snprintf(path, 64, "%s/m.gguf", folder);
    snprintf(command, sizeof command, "python3 bench/synth_gguf.py %s %s --empty 2>/dev/null", path,
             s->model);
    assert_int_equal(system(command), 0);
    return path;
}

static void check_setting(const struct setting *s)
{
    struct error err = {0};
    struct runtime_plan *p = mem_zalloc(1, sizeof *p);
    char made[64];
    const char *path = model_path(s, made);
    struct tensorfile *f = tensorfile_open(path, &err);
    assert_non_null(f);
    struct runtime_options opt = s->opt;
    opt.backend.device = "cpu";
    opt.backend.threads = 2;
    if (!runtime_plan(f, &opt, p, &err) || !p->fits)
        fail_msg("%s: %s%s", path, err.msg, p->why.msg);
    tensorfile_close(f);
    size_t said = fit_memory(&p->weights) + p->more_weights + p->kv + p->states + p->step;
    assert_int_equal(live, 0); /* planning leaves nothing */
    struct runtime *rt = runtime_open(path, &opt, &err);
    if (!rt)
        fail_msg("%s: %s", path, err.msg);
    double off = fabs((double)said - (double)live) / (double)live;
    printf("%-44s %10zu bytes, %10zu planned, %.2f %%\n", s->model, (size_t)live, said, 100 * off);
    if (off > 0.03)
        fail_msg("%s: the plan is %.1f %% off", s->model, 100 * off);
    assert_int_equal(rt->context, p->context);
    assert_int_equal(rt->kv->pool_bytes / 1024, p->kv / 1024);
    assert_int_equal(stepper_limits(rt->step)->max_tokens, p->max_tokens);
    runtime_close(rt);
    assert_int_equal(live, 0);
    mem_free(p);
}

static void test_bytes(void **state)
{
    (void)state;
    static const struct setting settings[] = {
        {"tests/golden/qwen3moe", {.context = 256}},
        {"tests/golden/gemma3", {.max_seqs = 16, .k_type = DT_Q8_0, .v_type = DT_Q8_0}},
        {"tests/golden/deepseek_v3", {.context = 128, .max_tokens = 64}},
        {"tests/golden/qwen3_5_moe", {.max_seqs = 4, .draft = DRAFT_AUTO}},
        {"tests/golden/gpt_oss_mxfp4", {.max_tokens = 128}},
        {"tests/golden/nemotron_h", {.max_seqs = 2}},
        {"tests/golden/falcon_h1", {.max_seqs = 2}},
        {"tests/golden/jamba", {.max_seqs = 4}},
        {"tests/golden/glm_moe_dsa", {.context = 1024}},
        {"tests/golden/minimax_m3", {.max_seqs = 4, .k_type = DT_BF16}},
        {"tests/golden/inkling", {.context = 256}}, /* experts of two tensors */
        {"--shape tiny-moe --quant q4_k_m", {.context = 4096}},
        {"--shape tiny-moe --quant q2_k", {.max_tokens = 2048}},
        {"--shape tiny-moe --quant iq2_xxs",
         {.context = 1024}}, /* packed, it is larger than its file */
        {"--shape tiny-moe --quant q3_k_m", {.backend.no_repack = true}},
        {"--shape qwen3-0.6b --layers 4 --vocab 4096 --quant iq3_s", {.max_seqs = 8}},
        {"--shape qwen3-0.6b --layers 2 --quant q8_0", {.context = 2000, .k_type = DT_BF16}},
    };
    assert_non_null(mkdtemp(folder));
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++)
        check_setting(&settings[i]);
    char path[64];
    snprintf(path, sizeof path, "%s/m.gguf", folder);
    unlink(path);
    rmdir(folder);
}

/* A context that cannot fit is no failure of the plan: it says why, and what is needed. */
static void test_too_large(void **state)
{
    (void)state;
    struct error err = {0};
    struct runtime_plan *p = mem_zalloc(1, sizeof *p);
    struct tensorfile *f = tensorfile_open("tests/golden/qwen3", &err);
    struct runtime_options opt = {.backend.device = "cpu", .context = 1 << 28, .max_seqs = 4096};
    opt.kv_tokens = 2000000000;
    assert_true(runtime_plan(f, &opt, p, &err));
    assert_false(p->fits);
    assert_non_null(strstr(p->why.msg, "would fit"));
    assert_true(fit_memory(&p->weights) > 0);
    tensorfile_close(f);
    mem_free(p);
}

static void test_speeds(void **state)
{
    (void)state;
    struct probe p = {.seconds[DT_Q4_K] = {1, 2, 8, 64}};
    assert_true(probe_seconds(&p, DT_Q4_K, 1) == 1 && probe_seconds(&p, DT_Q4_K, 0.5) == 1);
    assert_true(fabs(probe_seconds(&p, DT_Q4_K, 8) - 2) < 1e-9);
    assert_true(fabs(probe_seconds(&p, DT_Q4_K, 512) - 64) < 1e-9);
    assert_true(fabs(probe_seconds(&p, DT_Q4_K, 1024) - 128) < 1e-9);
    assert_true(fabs(probe_seconds(&p, DT_Q4_K, sqrt(8.0 * 64)) - 4) < 1e-9);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_speeds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
