/* Where a model runs: every case of the choice, and that a machine without a GPU is told nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "engine/device.h"
#include "backend/backend.h"
#include "engine/runtime.h"

static void every_case(void **state)
{
    (void)state;
    const size_t GB = 1000000000;
    const struct {
        struct device_facts f;
        enum device_kind device;
        const char *notice; /* a part of it, or NULL = none */
    } cases[] = {
        {{.asked = DEVICE_CPU, .room = 80 * GB, .weights = GB}, DEVICE_CPU, NULL},
        {{.asked = DEVICE_OTHER, .room = 80 * GB, .weights = GB}, DEVICE_OTHER, NULL},
        {{.asked = DEVICE_GPU, .room = 0, .weights = GB}, DEVICE_GPU, NULL},
        {{.asked = DEVICE_GPU, .deterministic = true, .room = 80 * GB}, DEVICE_GPU, NULL},
        {{.asked = DEVICE_AUTO, .weights = GB}, DEVICE_CPU, NULL},
        {{.asked = DEVICE_AUTO, .deterministic = true, .weights = GB}, DEVICE_CPU, NULL},
        {{.asked = DEVICE_AUTO, .room = 80 * GB, .weights = 18 * GB, .kv = GB, .scratch = GB},
         DEVICE_GPU,
         NULL},
        {{.asked = DEVICE_AUTO, .room = 20 * GB, .weights = 18 * GB, .kv = GB, .scratch = GB},
         DEVICE_GPU,
         NULL},
        {{.asked = DEVICE_AUTO, .room = 20 * GB - 1, .weights = 18 * GB, .kv = GB, .scratch = GB},
         DEVICE_CPU,
         "needs 20.0 GB"},
        {{.asked = DEVICE_AUTO, .room = 80 * GB, .weights = GB, .deterministic = true},
         DEVICE_CPU,
         "--deterministic"},
        {{.asked = DEVICE_AUTO, .room = 80 * GB, .weights = GB, .no_repack = true},
         DEVICE_CPU,
         "--no-repack"},
        {{.asked = DEVICE_AUTO, .room = 80 * GB, .weights = GB, .isa_forced = true},
         DEVICE_CPU,
         NULL},
        {{.asked = DEVICE_AUTO, .room = 80 * GB, .weights = 7000000}, DEVICE_CPU, NULL},
        {{.asked = DEVICE_GPU, .room = 80 * GB, .weights = 7000000}, DEVICE_GPU, NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct error notice;
        assert_int_equal(device_choose(&cases[i].f, &notice), cases[i].device);
        if (cases[i].notice)
            assert_non_null(strstr(notice.msg, cases[i].notice));
        else
            assert_string_equal(notice.msg, "");
    }
}

static void names(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        enum device_kind kind;
    } cases[] = {{NULL, DEVICE_CPU},      {"cpu", DEVICE_CPU},    {"auto", DEVICE_AUTO},
                 {"cuda", DEVICE_GPU},    {"cuda:1", DEVICE_GPU}, {"cudax", DEVICE_OTHER},
                 {"cpu:1", DEVICE_OTHER}, {"", DEVICE_OTHER}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        assert_int_equal(device_kind(cases[i].name), cases[i].kind);
    assert_int_equal(device_kind(device_default(DEVICE_CPU)), DEVICE_CPU);
    assert_int_equal(device_kind(device_default(DEVICE_GPU)), DEVICE_GPU);
}

static void what_would_fit(void **state)
{
    (void)state;
    const size_t GB = 1000000000;
    struct error err = {0};
    struct device_facts f = {.asked = DEVICE_GPU,
                             .name = "cuda",
                             .room = 12 * GB,
                             .weights = 18 * GB,
                             .kv = GB,
                             .scratch = GB,
                             .n_params = 30 * (int64_t)GB};
    assert_false(device_fits(&f, &err));
    assert_non_null(strstr(err.msg, "needs 20.0 GB"));
    assert_non_null(strstr(err.msg, "weights of 2.7 bits")); /* 10 GB for 30 G weights */
    assert_non_null(strstr(err.msg, "it has 4.8"));
    f.room = 20 * GB;
    assert_true(device_fits(&f, &err));
    f.room = 0; /* no such GPU */
    assert_true(device_fits(&f, &err));
}

/* As many sequences as the cache holds of 1,024 tokens each; not under 16, not over what is asked. */
static void sequences(void **state)
{
    (void)state;
    const size_t GB = 1000000000, token = 98304 + 8; /* of Qwen3-30B-A3B */
    assert_int_equal(device_sequences(100 * GB, token, 0, 40960, 256), 256);
    assert_int_equal(device_sequences(10 * GB, token, 0, 40960, 256), 99);
    assert_int_equal(device_sequences(2 * GB, token, 0, 40960, 256), 19);
    assert_int_equal(device_sequences(GB / 2, token, 0, 40960, 256), 16);
    assert_int_equal(device_sequences(0, token, 0, 40960, 256), 16);
    assert_int_equal(device_sequences(10 * GB, token, 0, 256, 256), 256); /* short contexts */
    assert_int_equal(device_sequences(10 * GB, token, 400000000, 40960, 256), 19); /* states */
    assert_int_equal(device_sequences(10 * GB, token, 0, 40960, 8), 8);
    assert_int_equal(device_sequences(10 * GB, 0, 0, 40960, 256), 256);
}

/* "auto" opens something everywhere; where the kernels of the CPU are named, the CPU, silently. */
static void auto_opens(void **state)
{
    (void)state;
    struct error err = {0};
    struct runtime_options opt = {.backend = {.device = "auto", .threads = 1}, .context = 64};
    setenv("STEEL_ISA", "ref", 1);
    struct runtime *rt = runtime_open(NULL, &opt, &err);
    unsetenv("STEEL_ISA");
    if (!rt && strstr(err.msg, "built-in")) {
        print_message("skipped: this build carries no model\n");
        skip();
    }
    assert_non_null(rt);
    assert_string_equal(rt->be->ops->name, "ref");
    assert_string_equal(rt->notice.msg, "");
    runtime_close(rt);
    opt.backend.device = "tpu";
    assert_null(runtime_open(NULL, &opt, &err));
    assert_non_null(strstr(err.msg, "unknown device"));
}

/* Without a GPU that opens: a line that says what is so and what to do. */
static void no_gpu(void **state)
{
    (void)state;
    const struct {
        int driver, needed;
        const char *says[3];
    } cases[] = {
        {0, 13000, {"no NVIDIA driver was found", "--device cpu", "install it"}},
        {12020, 13000, {"too old", "up to 12.2", "needs 13.0"}},
        {13000, 13000, {"driver is here", "CUDA 13.0", "nothing there"}},
        {13010, 12080, {"driver is here", "CUDA 13.1", "nvidia-smi"}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct error err = {0};
        assert_false(device_none(cases[i].driver, cases[i].needed, "nothing there", &err));
        for (int k = 0; k < 3; k++)
            assert_non_null(strstr(err.msg, cases[i].says[k]));
        assert_non_null(strstr(err.msg, "--device cpu"));
        assert_null(strchr(err.msg, '\n'));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_case),     cmocka_unit_test(names),
        cmocka_unit_test(what_would_fit), cmocka_unit_test(sequences),
        cmocka_unit_test(auto_opens),     cmocka_unit_test(no_gpu),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
