/* Weights cut for several processes (model/cut.h): every row of a part has the values that the whole has there, whatever
 * the lengths of its groups of columns. */
#include "backend/rawweight.h"
#include "base/mem.h"
#include "model/cut.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { ROWS = 5, COLS = 768 };

/* What cut_weight asks for, until the test has read it. */
struct heap {
    void *held[64];
    int n;
};

static void *give(void *arg, size_t count, size_t size)
{
    struct heap *h = arg;
    assert_true(h->n < 64);
    return h->held[h->n++] = mem_zalloc(count, size);
}

static void heap_clear(struct heap *h)
{
    for (int i = 0; i < h->n; i++)
        mem_free(h->held[i]);
}

/* The columns of `cut` of a GPTQ4 weight with a scale and a zero for each group of so many. */
static void check_groups(int group_len, int n_cols, const struct range *cols)
{
    size_t groups = (size_t)(COLS + group_len - 1) / (size_t)group_len;
    struct heap heap = {0};
    uint8_t *codes = give(&heap, ROWS, COLS / 2), *zeros = give(&heap, ROWS, groups);
    uint16_t *scales = give(&heap, ROWS * groups, sizeof *scales);
    for (size_t i = 0; i < ROWS * COLS / 2; i++)
        codes[i] = (uint8_t)(i * 7 + i / 13);
    for (size_t i = 0; i < ROWS * groups; i++) {
        zeros[i] = (uint8_t)(i % 16);
        scales[i] = (uint16_t)(0x3c00 + i); /* 1 and a little more for each */
    }
    const uint8_t *const data[] = {codes}, *const zero[] = {zeros};
    const void *const scale[] = {scales};
    struct raw_weight whole = {
        .n_in = COLS,
        .n_out = ROWS,
        .n_expert = 1,
        .n_seg = 1,
        .seg = {{DT_GPTQ4, ROWS, data, scale, zero, NULL, group_len}},
    };
    struct raw_weight part = whole;
    struct cut cut = {.n_cols = n_cols};
    memcpy(cut.cols, cols, (size_t)n_cols * sizeof *cols);
    struct error err = {0};
    assert_true(cut_weight(&part, &cut, give, &heap, &err));
    float all[COLS], mine[COLS];
    for (int r = 0; r < ROWS; r++) {
        raw_weight_row(&whole, 0, r, all);
        raw_weight_row(&part, 0, r, mine);
        for (int i = 0, at = 0; i < n_cols; i++)
            for (int k = 0; k < cols[i].n; k++)
                assert_true(mine[at++] == all[cols[i].first + k]);
    }
    heap_clear(&heap);
}

static void test_groups(void **state)
{
    (void)state;
    static const int lens[] = {32, 64, 128, 192, 256, 384, COLS};
    for (size_t i = 0; i < sizeof lens / sizeof *lens; i++) {
        check_groups(lens[i], 1, (struct range[]){{0, 384}});
        check_groups(lens[i], 1, (struct range[]){{384, 384}});
        check_groups(lens[i], 1, (struct range[]){{640, 128}});
        check_groups(lens[i], 2, (struct range[]){{128, 128}, {512, 256}});
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_groups)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
