/* Which steps a GPU keeps recorded (backend/cuda/core/recordings.h), with made-up steps. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "backend/cuda/core/recordings.h"
#include "base/mem.h"

enum { REPLAYED, RECORDED, LAUNCHED };

/* A step of n sequences as cuda_replay and cuda_record run it. */
static int run(struct recordings *r, int n)
{
    uint64_t hash = recordings_mix(7, (uint64_t)n);
    if (recordings_find(r, hash) >= 0)
        return REPLAYED;
    int place = recordings_place(r, hash, n);
    if (place < 0)
        return LAUNCHED;
    assert_in_range(place, 0, MAX_GRAPHS - 1);
    recordings_add(r, place, hash);
    return RECORDED;
}

/* Small steps are recorded at once, large ones when they come again. */
static void test_when(void **state)
{
    (void)state;
    struct recordings *r = mem_zalloc(1, sizeof *r);
    assert_int_equal(run(r, 1), RECORDED);
    assert_int_equal(run(r, RECORD_ALWAYS), RECORDED);
    assert_int_equal(run(r, 500), LAUNCHED);
    assert_int_equal(run(r, 501), LAUNCHED);
    assert_int_equal(run(r, 500), RECORDED);
    assert_int_equal(run(r, 1), REPLAYED);
    assert_int_equal(run(r, 500), REPLAYED);
    assert_int_equal(run(r, 502), LAUNCHED);
    assert_int_equal(r->n, 3);
    mem_free(r);
}

/* A thousand sizes in turn: those that found a place keep it, the others are launched, and nothing is recorded over and
 * over. A single user who comes later gets a place at once. */
static void test_crowd(void **state)
{
    (void)state;
    struct recordings *r = mem_zalloc(1, sizeof *r);
    int n[3] = {0};
    for (int round = 0; round < 10; round++)
        for (int k = 65; k <= 1024; k++)
            n[run(r, k)]++;
    assert_int_equal(n[RECORDED], MAX_GRAPHS);
    assert_in_range(n[REPLAYED], 7 * MAX_GRAPHS, 9 * MAX_GRAPHS);
    assert_int_equal(run(r, 1), RECORDED);
    assert_int_equal(run(r, 2), LAUNCHED); /* not another one at once */
    for (int t = 0; t < RECORD_REST; t++)
        assert_int_equal(run(r, 1), REPLAYED);
    assert_int_equal(run(r, 2), RECORDED);
    /* Where more small layouts take turns than there are places, few of their steps record. */
    int small[3] = {0};
    for (int t = 0; t < 64 * RECORD_REST; t++) {
        uint64_t hash = recordings_mix(8, (uint64_t)(t * 7919 % 900));
        if (recordings_find(r, hash) >= 0) {
            small[REPLAYED]++;
            continue;
        }
        int place = recordings_place(r, hash, 4);
        small[place < 0 ? LAUNCHED : RECORDED]++;
        if (place >= 0)
            recordings_add(r, place, hash);
    }
    assert_in_range(small[RECORDED], 1, 64 + MAX_GRAPHS);
    assert_true(small[REPLAYED] > small[LAUNCHED]);
    assert_int_equal(r->n, MAX_GRAPHS);
    mem_free(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_when), cmocka_unit_test(test_crowd)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
