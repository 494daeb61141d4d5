/*
 * Sums over lanes (base/ranks.h) by threads instead of processes: rows of which lanes have some, few and many,
 * come out as when all lanes send all; what lanes lack is not sent. Waits in company. And experts by load
 * (model/expert_load.h).
 */
#include "base/clock.h"
#include "base/mem.h"
#include "base/ranks.h"
#include "base/ranks_link.h"
#include "model/expert_load.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>

enum { MOST = 5, WIDTH = 40 };

static struct {
    int lanes;
    pthread_barrier_t meet;
    const float *mine[MOST];
    const int *n[MOST], *at[MOST];
    int exchanged[MOST]; /* floats to others */
} wire;
static _Thread_local int lane;
static char done;

static void *link_allgather(const void *mine, void *all, size_t each, int group)
{
    (void)group;
    wire.mine[lane] = mine;
    pthread_barrier_wait(&wire.meet);
    for (int t = 0; t < wire.lanes; t++)
        memcpy((char *)all + (size_t)t * each, wire.mine[t], each);
    pthread_barrier_wait(&wire.meet);
    return &done;
}

static void *link_alltoall(const void *mine, void *all, size_t each, int group)
{
    (void)group;
    wire.mine[lane] = mine;
    pthread_barrier_wait(&wire.meet);
    for (int t = 0; t < wire.lanes; t++)
        memcpy((char *)all + (size_t)t * each, (const char *)wire.mine[t] + (size_t)lane * each,
               each);
    pthread_barrier_wait(&wire.meet);
    return &done;
}

static void *link_exchange(const float *mine, const int *n, const int *at, float *all,
                           const int *got, const int *got_at, int group)
{
    (void)group;
    wire.mine[lane] = mine;
    wire.n[lane] = n;
    wire.at[lane] = at;
    for (int t = 0; t < wire.lanes; t++)
        wire.exchanged[lane] += t == lane ? 0 : n[t];
    pthread_barrier_wait(&wire.meet);
    for (int t = 0; t < wire.lanes; t++) {
        if (wire.n[t][lane] != got[t])
            abort(); /* both sides count alike */
        memcpy(all + got_at[t], wire.mine[t] + wire.at[t][lane], (size_t)got[t] * sizeof *all);
    }
    pthread_barrier_wait(&wire.meet);
    return &done;
}

static int link_test(void *request)
{
    return request == &done;
}

static const struct ranks_link threads = {.version = RANKS_LINK_VERSION,
                                          .allgather = link_allgather,
                                          .alltoall = link_alltoall,
                                          .exchange = link_exchange,
                                          .test = link_test};

struct job {
    int lane, rows;
    const uint64_t *from;
    float *dense, *sparse; /* (rows, WIDTH) */
};

static void *run_lane(void *arg)
{
    struct job *j = arg;
    struct ranks r = {.link = &threads, .size = wire.lanes, .tp = wire.lanes, .pp = 1};
    r.rank = r.lane = lane = j->lane;
    atomic_store(&r.timeout_s, 10);
    ranks_reserve(&r, (size_t)(j->rows + wire.lanes) * WIDTH);
    ranks_sum(&r, j->dense, (size_t)j->rows * WIDTH);
    ranks_sum_rows(&r, j->sparse, j->rows, WIDTH, j->from);
    mem_free(r.scratch);
    return NULL;
}

static void check_sum(int lanes, int rows, bool large)
{
    struct job jobs[MOST];
    pthread_t ids[MOST];
    uint64_t *from = mem_zalloc((size_t)rows, sizeof *from);
    int there[MOST] = {0};
    memset(&wire, 0, sizeof wire);
    wire.lanes = lanes;
    pthread_barrier_init(&wire.meet, NULL, (unsigned)lanes);
    for (int i = 0; i < rows; i++)
        from[i] = (uint64_t)(i * 7 % 31) & ((1u << lanes) - 1); /* none, some or all */
    for (int t = 0; t < lanes; t++) {
        size_t n = (size_t)rows * WIDTH;
        jobs[t] = (struct job){t, rows, from, mem_zalloc(n, sizeof(float)), NULL};
        jobs[t].sparse = mem_zalloc(n, sizeof(float));
        struct run own = run_of(rows, 1, t, lanes);
        for (int i = 0; i < rows; i++) {
            bool has = from[i] >> t & 1;
            there[t] += has && (i < own.first || i >= own.first + own.n) ? WIDTH : 0;
            for (int k = 0; has && k < WIDTH; k++)
                jobs[t].dense[i * WIDTH + k] = jobs[t].sparse[i * WIDTH + k] =
                    (float)(t + 1) / (float)(i + k + 3);
        }
    }
    for (int t = 0; t < lanes; t++)
        pthread_create(&ids[t], NULL, run_lane, &jobs[t]);
    for (int t = 0; t < lanes; t++)
        pthread_join(ids[t], NULL);
    for (int t = 0; t < lanes; t++) {
        assert_memory_equal(jobs[t].dense, jobs[0].dense, (size_t)rows * WIDTH * sizeof(float));
        assert_memory_equal(jobs[t].sparse, jobs[0].dense, (size_t)rows * WIDTH * sizeof(float));
        assert_int_equal(wire.exchanged[t], large ? there[t] : 0);
    }
    for (int t = 0; t < lanes; t++) {
        mem_free(jobs[t].dense);
        mem_free(jobs[t].sparse);
    }
    pthread_barrier_destroy(&wire.meet);
    mem_free(from);
}

static void test_rows_of_some_lanes(void **state)
{
    (void)state;
    for (int lanes = 2; lanes <= MOST; lanes++) {
        int most = RANKS_GATHER_BYTES / (WIDTH * 4); /* rows that go whole */
        check_sum(lanes, 1, false);
        check_sum(lanes, most, false);
        check_sum(lanes, most + 1, true);
        check_sum(lanes, 3 * most + lanes - 1, true);
    }
}

static void test_runs(void **state)
{
    (void)state;
    for (int n = 1; n < 40; n++)
        for (int of = 1; of <= n && of < 9; of++)
            for (int i = 0; i < n; i++) {
                int at = run_at(n, 1, i, of);
                struct run r = run_of(n, 1, at, of);
                assert_true(at < of && i >= r.first && i < r.first + r.n);
            }
}

static double heaviest(const float *counts, const int32_t *order, int n, int lanes)
{
    double most = 0;
    for (int t = 0; t < lanes; t++) {
        struct run r = run_of(n, 1, t, lanes);
        double sum = 0;
        for (int i = r.first; i < r.first + r.n; i++)
            sum += (double)counts[order[i]];
        most = sum > most ? sum : most;
    }
    return most;
}

static void test_experts_by_load(void **state)
{
    (void)state;
    float counts[64];
    int32_t order[64], plain[64];
    double all = 0;
    for (int i = 0; i < 64; i++) {
        counts[i] =
            i < 16 ? (float)(100 - i) : (float)(i % 5); /* the first quarter does the work */
        all += (double)counts[i];
        plain[i] = i;
    }
    for (int lanes = 2; lanes <= 5; lanes++) {
        bool seen[64] = {false};
        expert_load_share(counts, 64, 0, lanes, order);
        for (int i = 0; i < 64; i++) {
            assert_true(order[i] >= 0 && order[i] < 64 && !seen[order[i]]);
            seen[order[i]] = true;
        }
        assert_true(heaviest(counts, plain, 64, lanes) > 1.9 * all / lanes);
        assert_true(heaviest(counts, order, 64, lanes) < 1.2 * all / lanes);
    }
    /* groups of eight stay whole, and where lanes would cut them nothing moves */
    expert_load_share(counts, 64, 8, 4, order);
    for (int i = 0; i < 64; i++)
        assert_int_equal(order[i] % 8, i % 8);
    assert_true(heaviest(counts, order, 64, 4) < heaviest(counts, plain, 64, 4));
    expert_load_share(counts, 64, 8, 3, order);
    assert_memory_equal(order, plain, sizeof plain);
}

static struct {
    int64_t until;
    int looks;
} slow;

static void *link_slow(void *buf, size_t bytes, int from, int tag)
{
    (void)buf, (void)bytes, (void)from, (void)tag;
    slow.until = clock_ns() + 5000000;
    return &slow;
}

static int test_slow(void *request)
{
    (void)request;
    slow.looks++;
    return clock_ns() >= slow.until;
}

/* Where other programs want the core a wait is a row of naps: at most one look in 20 us after the first few. */
static void test_naps_in_company(void **state)
{
    (void)state;
    static const struct ranks_link one = {
        .version = RANKS_LINK_VERSION, .recv = link_slow, .test = test_slow};
    struct ranks r = {.link = &one, .size = 2, .tp = 1, .pp = 2, .crowded = 2};
    char byte;
    atomic_store(&r.timeout_s, 10);
    int64_t began = clock_ns();
    assert_true(ranks_recv(&r, &byte, 1, 1));
    int64_t naps = (clock_ns() - began) / 20000;
    /* 5 us of looking are not more than 500 looks on any machine */
    assert_true(slow.looks >= 1 && slow.looks <= naps + 500);
    assert_int_equal(r.crowded, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_of_some_lanes),
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_experts_by_load),
        cmocka_unit_test(test_naps_in_company),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
