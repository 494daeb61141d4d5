/* Where a model runs: every case of the choice, and that a machine without a GPU is told nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "engine/device.h"
#include "engine/runtime.h"

static void every_case(void **state)
{
    (void)state;
    const size_t GB = 1000000000;
    const struct {
        struct device_facts f;
        const char *device, *notice; /* notice: a part of it, or NULL = none */
    } cases[] = {
        {{.asked = NULL, .room = 80 * GB, .weights = GB}, "cpu", NULL},
        {{.asked = "cpu", .room = 80 * GB, .weights = GB}, "cpu", NULL},
        {{.asked = "cuda:1", .room = 0, .weights = GB}, "cuda:1", NULL},
        {{.asked = "cuda", .deterministic = true, .room = 80 * GB}, "cuda", NULL},
        {{.asked = "auto", .weights = GB}, "cpu", NULL},
        {{.asked = "auto", .deterministic = true, .weights = GB}, "cpu", NULL},
        {{.asked = "auto", .room = 80 * GB, .weights = 18 * GB, .kv = GB, .scratch = GB},
         "cuda",
         NULL},
        {{.asked = "auto", .room = 20 * GB, .weights = 18 * GB, .kv = GB, .scratch = GB},
         "cuda",
         NULL},
        {{.asked = "auto", .room = 20 * GB - 1, .weights = 18 * GB, .kv = GB, .scratch = GB},
         "cpu",
         "needs 20.0 GB"},
        {{.asked = "auto", .room = 80 * GB, .weights = GB, .deterministic = true},
         "cpu",
         "--deterministic"},
        {{.asked = "auto", .room = 80 * GB, .weights = GB, .no_repack = true},
         "cpu",
         "--no-repack"},
        {{.asked = "auto", .room = 80 * GB, .weights = GB, .isa_forced = true}, "cpu", NULL},
        {{.asked = "auto", .room = 80 * GB, .weights = 7000000}, "cpu", NULL},
        {{.asked = "cuda", .room = 80 * GB, .weights = 7000000}, "cuda", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct error notice;
        assert_string_equal(device_choose(&cases[i].f, &notice), cases[i].device);
        if (cases[i].notice)
            assert_non_null(strstr(notice.msg, cases[i].notice));
        else
            assert_string_equal(notice.msg, "");
    }
}

static void what_would_fit(void **state)
{
    (void)state;
    const size_t GB = 1000000000;
    struct error err = {0};
    struct device_facts f = {.asked = "cuda",
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_case),
        cmocka_unit_test(what_would_fit),
        cmocka_unit_test(auto_opens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
