/* Which experts stay in host memory (engine/offload.h): by size, by llama.cpp's flags, and flags that cannot be obeyed. */
#include "engine/offload.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <string.h>

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
            offload_choose(layers, LAYERS, &(struct offload_wish){0}, cases[i].room, &o, &err));
        check(&o, cases[i].want);
        offload_free(&o);
    }
    struct offload all;
    struct error err;
    assert_true(offload_choose(layers, LAYERS, &(struct offload_wish){0}, 3200, &all, &err));
    assert_null(all.n_host);
    assert_int_equal(all.device, 3200);
    offload_free(&all);
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
        assert_true(offload_choose(layers, LAYERS, &cases[i].wish, 0, &o, &err));
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
                                    0, &o, &err));
        assert_non_null(strstr(err.msg, wrong[i][1]));
        assert_null(o.n_host);
        offload_free(&o);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(by_size), cmocka_unit_test(by_flags),
                                       cmocka_unit_test(refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
