/* Which experts stay in host memory (engine/offload.h): by size, by llama.cpp's flags, and flags that cannot be obeyed. */
#include "engine/offload.h"
#include "engine/uses.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { LAYERS = 5, EXPERTS = 8 };

/* Layer 0 is dense; the others have 8 experts of 100 bytes, 120 in host memory. */
static void make(struct expert_layer *layers)
{
    memset(layers, 0, LAYERS * sizeof *layers);
    for (int i = 1; i < LAYERS; i++)
        layers[i] = (struct expert_layer){
            .layer = i, .n_expert = EXPERTS, .bytes = 100 * EXPERTS, .host_bytes = 120 * EXPERTS};
}

static void check(const struct offload *o, const int *want)
{
    size_t device = 0, host = 0;
    int layers = 0;
    for (int i = 1; i < LAYERS; i++) {
        assert_int_equal(o->n_host[i], want[i]);
        device += 100 * (size_t)(EXPERTS - want[i]);
        host += 120 * (size_t)want[i];
        layers += want[i] > 0;
    }
    assert_int_equal(o->n_host[0], 0);
    assert_int_equal(o->device, device);
    assert_int_equal(o->host, host);
    assert_int_equal(o->layers, layers);
    assert_int_equal(o->of, LAYERS - 1);
}

static void by_size(void **state)
{
    (void)state;
    struct expert_layer layers[LAYERS];
    static const struct {
        size_t room;
        int want[LAYERS];
    } cases[] = {{3199, {0, 1, 0, 0, 0}}, {3000, {0, 2, 0, 0, 0}}, {2400, {0, 8, 0, 0, 0}},
                 {2301, {0, 8, 1, 0, 0}}, {150, {0, 8, 8, 8, 7}},  {0, {0, 8, 8, 8, 8}}};
    make(layers);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct offload o;
        struct error err;
        assert_true(
            offload_choose(layers, LAYERS, &(struct offload_wish){0}, cases[i].room, 0, &o, &err));
        check(&o, cases[i].want);
        offload_free(&o);
    }
    struct offload all;
    struct error err;
    assert_true(offload_choose(layers, LAYERS, &(struct offload_wish){0}, 3200, 0, &all, &err));
    assert_null(all.n_host);
    assert_int_equal(all.device, 3200);
    offload_free(&all);
}

/* The host keeps all: every layer has as many experts on the device. */
static void by_use(void **state)
{
    (void)state;
    struct expert_layer layers[LAYERS];
    static const struct {
        size_t room, host_room;
        bool all;
        int want[LAYERS];
    } cases[] = {{3199, 3840, true, {0, 0, 0, 0, 1}}, {1600, 3840, true, {0, 4, 4, 4, 4}},
                 {1850, 9999, true, {0, 3, 3, 4, 4}}, {400, 3840, true, {0, 7, 7, 7, 7}},
                 {399, 3840, false, {0, 8, 8, 8, 5}}, {1600, 3839, false, {0, 8, 8, 0, 0}}};
    make(layers);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct offload o;
        struct error err;
        assert_true(offload_choose(layers, LAYERS, &(struct offload_wish){0}, cases[i].room,
                                   cases[i].host_room, &o, &err));
        assert_int_equal(o.all, cases[i].all);
        size_t kept = o.host;
        if (o.all) /* of layers that have experts on the host alone, all */
            o.host = 0;
        for (int k = 1; o.all && k < LAYERS; k++) {
            o.host += 120 * (size_t)o.n_host[k];
            kept -= o.n_host[k] ? 120 * EXPERTS : 0;
        }
        assert_true(!o.all || !kept);
        check(&o, cases[i].want);
        offload_free(&o);
    }
    struct offload o;
    struct error err;
    assert_true(
        offload_choose(layers, LAYERS, &(struct offload_wish){.layers = 2}, 1600, 9999, &o, &err));
    assert_false(o.all); /* the user said which */
    offload_free(&o);
}

static void by_flags(void **state)
{
    (void)state;
    struct expert_layer layers[LAYERS];
    static const struct {
        struct offload_wish wish;
        int want[LAYERS];
    } cases[] = {{{.layers = -1}, {0, 8, 8, 8, 8}},
                 {{.layers = 2}, {0, 8, 0, 0, 0}}, /* of layers 0 and 1 */
                 {{.layers = 99}, {0, 8, 8, 8, 8}},
                 {{.tensors = "exps=CPU"}, {0, 8, 8, 8, 8}},
                 {{.tensors = "\\.ffn_(up|gate|down)_exps\\.=CPU"}, {0, 8, 8, 8, 8}},
                 {{.tensors = "blk\\.[23]\\.ffn_down_exps=CPU"}, {0, 0, 8, 8, 0}},
                 {{.tensors = "blk\\.\\d+\\.ffn_up_exps=CPU"}, {0, 8, 8, 8, 8}},
                 {{.tensors = "blk\\.1\\..*exps=CPU,blk\\.4\\..*exps=CPU"}, {0, 8, 0, 0, 8}},
                 {{.layers = 2, .tensors = "blk\\.4\\..*exps=CPU"}, {0, 8, 0, 0, 8}}};
    make(layers);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct offload o;
        struct error err;
        assert_true(offload_choose(layers, LAYERS, &cases[i].wish, 0, 0, &o, &err));
        check(&o, cases[i].want);
        offload_free(&o);
    }
}

static void refused(void **state)
{
    (void)state;
    struct expert_layer layers[LAYERS];
    static const char *const wrong[][2] = {{"exps", "expected REGEX=CPU"},
                                           {"=CPU", "expected REGEX=CPU"},
                                           {"exps=CUDA0", "expected REGEX=CPU"},
                                           {"exps=CPU2", "expected REGEX=CPU"},
                                           {"exps=CPU,,", "expected REGEX=CPU"},
                                           {"blk\\.(=CPU", "not a regular expression"},
                                           {"attn_q=CPU", "matches no experts"},
                                           {"blk\\.0\\..*exps=CPU", "matches no experts"},
                                           {"exps=CPU,blk\\.77\\.=CPU", "matches no experts"}};
    make(layers);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct offload o;
        struct error err = {0};
        assert_false(offload_choose(layers, LAYERS, &(struct offload_wish){.tensors = wrong[i][0]},
                                    0, 0, &o, &err));
        assert_non_null(strstr(err.msg, wrong[i][1]));
        assert_null(o.n_host);
        offload_free(&o);
    }
}

/* Counts of experts between starts: as written; of another model, cut, longer, or no numbers: none. */
static void kept_uses(void **state)
{
    (void)state;
    char folder[] = "/tmp/steel-uses-XXXXXX", model[64], file[256], other[256];
    float values[4] = {1, 0, 2.5f, 7}, got[5] = {0}, bad[4] = {1, -1, 0, 0};
    assert_non_null(mkdtemp(folder));
    snprintf(model, sizeof model, "%s/m.gguf", folder);
    assert_false(uses_place(folder, model, 4, file, sizeof file)); /* no such model */
    FILE *f = fopen(model, "w");
    fputs("model", f);
    fclose(f);
    assert_true(uses_place(folder, model, 4, file, sizeof file));
    assert_true(uses_place(folder, model, 5, other, sizeof other));
    assert_string_not_equal(file, other);
    assert_false(uses_read(file, got, 4));
    assert_true(uses_write(file, values, 4));
    assert_true(uses_read(file, got, 4));
    assert_memory_equal(got, values, sizeof values);
    assert_false(uses_read(file, got, 3));
    assert_false(uses_read(file, got, 5));
    f = fopen(file, "a");
    fputc(0, f);
    fclose(f);
    assert_false(uses_read(file, got, 4));
    assert_true(uses_write(file, values, 4));
    assert_int_equal(truncate(file, 20), 0);
    assert_false(uses_read(file, got, 4));
    assert_true(uses_write(file, bad, 4));
    assert_false(uses_read(file, got, 4));
    assert_false(uses_write("/proc/no/such/folder", values, 4));
    unlink(file);
    unlink(model);
    rmdir(folder);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(by_size), cmocka_unit_test(by_use),
                                       cmocka_unit_test(by_flags), cmocka_unit_test(refused),
                                       cmocka_unit_test(kept_uses)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
