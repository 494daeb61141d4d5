/* Cooperative matrices: words of SPV_NV_cooperative_matrix become those of SPV_KHR_cooperative_matrix (backend/vulkan/coop.c). */
#include "backend/vulkan/coop.h"
#include "base/mem.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#define OP(op, n) ((uint32_t)(n) << 16 | (op))

/* clang-format off */
/* A module with a left factor, a right one, whose scope is 5, and a sum; loads, a product and a store. */
static const uint32_t module[] = {
    0x07230203, 0x10500, 0, 40, 0,
    OP(17, 2), 5357,
    OP(10, 8), 0x5f565053, 0x635f564e, 0x65706f6f, 0x69746172, 0x6d5f6576, 0x69727461, 0x78,
    OP(21, 4), 1, 32, 0,
    OP(22, 3), 2, 16,
    OP(22, 3), 3, 32,
    OP(20, 2), 4,
    OP(43, 4), 1, 5, 3,
    OP(43, 4), 1, 6, 5,
    OP(43, 4), 1, 7, 16,
    OP(41, 3), 4, 8,
    OP(42, 3), 4, 9,
    OP(5358, 6), 10, 2, 5, 7, 7,
    OP(5358, 6), 11, 2, 6, 7, 7,
    OP(5358, 6), 12, 3, 5, 7, 7,
    OP(5359, 6), 10, 20, 30, 31, 9,
    OP(5359, 8), 11, 21, 30, 31, 8, 0x20, 5,
    OP(5361, 6), 12, 22, 20, 21, 23,
    OP(5360, 5), 32, 22, 31, 8,
};
enum { N = sizeof module / sizeof *module, FIRST = 40 /* the ids of 0, 1, 2 and 3 */ };

static const uint32_t expected[] = {
    0x07230203, 0x10500, 0, FIRST + 4, 0,
    OP(17, 2), 6022,
    OP(10, 8), 0x5f565053, 0x5f52484b, 0x706f6f63, 0x74617265, 0x5f657669, 0x7274616d, 0x7869,
    OP(21, 4), 1, 32, 0,
    OP(22, 3), 2, 16,
    OP(22, 3), 3, 32,
    OP(20, 2), 4,
    OP(43, 4), 1, 5, 3,
    OP(43, 4), 1, 6, 5,
    OP(43, 4), 1, 7, 16,
    OP(41, 3), 4, 8,
    OP(42, 3), 4, 9,
    OP(43, 4), 1, FIRST, 0,
    OP(43, 4), 1, FIRST + 1, 1,
    OP(43, 4), 1, FIRST + 2, 2,
    OP(43, 4), 1, FIRST + 3, 3,
    OP(4456, 7), 10, 2, FIRST + 3, 7, 7, FIRST,
    OP(4456, 7), 11, 2, FIRST + 3, 7, 7, FIRST + 1,
    OP(4456, 7), 12, 3, FIRST + 3, 7, 7, FIRST + 2,
    OP(4457, 6), 10, 20, 30, FIRST, 31,
    OP(4457, 8), 11, 21, 30, FIRST + 1, 31, 0x20, 5,
    OP(4459, 6), 12, 22, 20, 21, 23,
    OP(4458, 5), 32, 22, FIRST + 1, 31,
};

/* clang-format on */

static void test_rewrite(void **state)
{
    (void)state;
    size_t n = 0;
    uint32_t *words = vulkan_coop_words(module, N, &n);
    assert_non_null(words);
    assert_int_equal(n, sizeof expected / sizeof *expected);
    for (size_t i = 0; i < n; i++)
        if (words[i] != expected[i])
            fail_msg("word %zu is %u, expected %u", i, words[i], expected[i]);
    mem_free(words);
}

/* Whether an instruction begins at word n, or the module ends there. */
static bool is_boundary(size_t n)
{
    size_t at = 5;
    while (at < n)
        at += module[at] >> 16;
    return at == n;
}

/* A module cut inside an instruction is refused. */
static void test_cut(void **state)
{
    (void)state;
    for (size_t n = 0; n <= N; n++) {
        uint32_t *part = mem_zalloc(n + 1, sizeof *part);
        size_t got = 0;
        memcpy(part, module, n * sizeof *part);
        uint32_t *words = vulkan_coop_words(part, n, &got);
        assert_true((words != NULL) == (n >= 5 && is_boundary(n)));
        mem_free(words);
        mem_free(part);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rewrite), cmocka_unit_test(test_cut)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
