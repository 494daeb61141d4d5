/*
 * Sums over ranks (dist/ranks.h) by threads instead of processes: rows of which ranks have some, few and many,
 * come out as when all ranks send all; what ranks lack is not sent. Waits in company. And experts by load (dist/expert_load.h).
 */
#include "base/clock.h"
#include "base/mem.h"
#include "dist/ranks.h"
#include "dist/ranks_link.h"
#include "dist/expert_load.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>

enum { MOST = 5, WIDTH = 40, OPS = 64 };

/* Operations as MPI has them: those of a group are matched in the order they are begun, and each ends when all ranks
 * have begun it and have taken what is theirs. Ranks that begin different ones in the same place are caught. */
enum op { GATHER, EXCHANGE, COMPLETE };

struct meeting {
    int here, taken; /* ranks */
    enum op op;
    size_t bytes;
    const void *mine[MOST];
    const int *n[MOST], *at[MOST];
};

struct request {
    struct meeting *of;
    void *all;
    const int *got, *got_at;
    bool taken, used;
    int late; /* looks until it is seen */
};

static struct {
    int tp;
    pthread_mutex_t lock;
    struct meeting meetings[RANKS_GROUPS][OPS];
    int exchanged[MOST]; /* floats to others */
} wire = {.lock = PTHREAD_MUTEX_INITIALIZER};

static _Thread_local int tp_rank;
static _Thread_local int n_begun[RANKS_GROUPS];
static _Thread_local struct request requests[8];
static _Thread_local unsigned dice;

static void *begin(int group, enum op op, size_t bytes, const void *mine, const int *n,
                   const int *at, struct request with)
{
    pthread_mutex_lock(&wire.lock);
    if (group < 1 || group >= RANKS_GROUPS || n_begun[group] >= OPS)
        abort();
    struct meeting *m = &wire.meetings[group][n_begun[group]++];
    if (m->here++ > 0 && (m->op != op || m->bytes != bytes))
        abort(); /* MPI forbids it */
    m->op = op;
    m->bytes = bytes;
    m->mine[tp_rank] = mine;
    m->n[tp_rank] = n;
    m->at[tp_rank] = at;
    pthread_mutex_unlock(&wire.lock);
    int i = 0;
    while (requests[i].used)
        i++;
    dice = dice * 1103515245 + 12345;
    requests[i] = with;
    requests[i].of = m;
    requests[i].used = true;
    requests[i].late = (int)(dice >> 16) % 40;
    return &requests[i];
}

static void *link_allgather(const void *mine, void *all, size_t each, int group)
{
    return begin(group, GATHER, each, mine, NULL, NULL, (struct request){.all = all});
}

static void *link_exchange(const float *mine, const int *n, const int *at, float *all,
                           const int *got, const int *got_at, int group)
{
    for (int t = 0; t < wire.tp; t++)
        wire.exchanged[tp_rank] += t == tp_rank ? 0 : n[t];
    return begin(group, EXCHANGE, 0, mine, n, at,
                 (struct request){.all = all, .got = got, .got_at = got_at});
}

static void *link_complete(float *all, const int *n, const int *at, int group)
{
    return begin(group, COMPLETE, 0, all, n, at,
                 (struct request){.all = all, .got = n, .got_at = at});
}

/* What rank t has for this one. */
static void take(const struct request *q, int t)
{
    const struct meeting *m = q->of;
    size_t each = m->bytes, to = (size_t)t * each;
    if (m->op == GATHER) {
        memcpy((char *)q->all + to, m->mine[t], each);
    } else if (m->op == COMPLETE) {
        if (m->n[t][t] != q->got[t] || m->at[t][t] != q->got_at[t])
            abort();
        if (t != tp_rank)
            memcpy((float *)q->all + q->got_at[t], (const float *)m->mine[t] + q->got_at[t],
                   (size_t)q->got[t] * sizeof(float));
    } else {
        if (m->n[t][tp_rank] != q->got[t])
            abort(); /* both sides count alike */
        memcpy((float *)q->all + q->got_at[t], (const float *)m->mine[t] + m->at[t][tp_rank],
               (size_t)q->got[t] * sizeof(float));
    }
}

static int link_test(void *request)
{
    struct request *q = request;
    if (!q->used)
        abort(); /* it had ended */
    pthread_mutex_lock(&wire.lock);
    if (q->of->here == wire.tp && !q->taken) {
        for (int t = 0; t < wire.tp; t++)
            take(q, t);
        q->taken = true;
        q->of->taken++;
    }
    bool over = q->of->taken == wire.tp && q->late-- <= 0;
    pthread_mutex_unlock(&wire.lock);
    q->used = !over;
    return over;
}

static const struct ranks_link threads = {.version = RANKS_LINK_VERSION,
                                          .allgather = link_allgather,
                                          .exchange = link_exchange,
                                          .complete = link_complete,
                                          .test = link_test};

struct job {
    int tp_rank, rows;
    const uint64_t *from;
    float *dense, *sparse; /* (rows, WIDTH) */
};

static void *run_rank(void *arg)
{
    struct job *j = arg;
    struct ranks r = {.link = &threads, .size = wire.tp, .tp = wire.tp, .pp = 1};
    r.rank = r.tp_rank = tp_rank = j->tp_rank;
    dice = (unsigned)(7919 * tp_rank + j->rows);
    memset(n_begun, 0, sizeof n_begun);
    atomic_store(&r.timeout_s, 10);
    ranks_reserve(&r, (size_t)(j->rows + wire.tp) * WIDTH);
    r.comm.n_on_device = j->rows % 2; /* as on GPUs: from a copy */
    ranks_sum(&r, j->dense, (size_t)j->rows * WIDTH);
    r.comm.n_on_device = 0;
    ranks_sum_rows(&r, j->sparse, j->rows, WIDTH, j->from);
    ranks_release(&r);
    return NULL;
}

/* What rank t has of (row, column). */
static float value_of(int t, int tp, int row, int column, const uint64_t *from)
{
    return from[row] >> t & 1 ? (float)(t + 1) / (float)(row + column + 3 + tp) : 0;
}

static void job_init(struct job *j, int t, int tp, int rows, const uint64_t *from)
{
    size_t n = (size_t)rows * WIDTH;
    *j = (struct job){.tp_rank = t, .rows = rows, .from = from};
    j->dense = mem_zalloc(n, sizeof(float));
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < WIDTH; k++)
            j->dense[i * WIDTH + k] = value_of(t, tp, i, k, from);
    j->sparse = mem_zalloc(n, sizeof(float));
    memcpy(j->sparse, j->dense, n * sizeof(float));
}

/* Floats that rank t has for others, where rows are shared out. */
static int floats_for_others(int t, int tp, int rows, const uint64_t *from)
{
    struct range own = range_share(rows, 1, t, tp);
    int n = 0;
    for (int i = 0; i < rows; i++) {
        bool mine = i >= own.first && i < own.first + own.n;
        n += (from[i] >> t & 1) && !mine ? WIDTH : 0;
    }
    return n;
}

/* The same where all ranks have all: floats are shared out, not rows. */
static int all_for_others(int t, int tp, int rows)
{
    return rows * WIDTH - range_share(rows * WIDTH, (rows * WIDTH + tp - 1) / tp, t, tp).n;
}

static bool is_large(int rows)
{
    return (size_t)rows * WIDTH * sizeof(float) > RANKS_GATHER_BYTES;
}

static void check_sum(int tp, int rows)
{
    struct job jobs[MOST];
    pthread_t ids[MOST];
    uint64_t *from = mem_zalloc((size_t)rows, sizeof *from);
    size_t bytes = (size_t)rows * WIDTH * sizeof(float);
    memset(wire.meetings, 0, sizeof wire.meetings);
    memset(wire.exchanged, 0, sizeof wire.exchanged);
    wire.tp = tp;
    for (int i = 0; i < rows; i++)
        from[i] = (uint64_t)(i * 7 % 31) & ((1u << tp) - 1); /* none, some or all */
    for (int t = 0; t < tp; t++)
        job_init(&jobs[t], t, tp, rows, from);
    for (int t = 0; t < tp; t++)
        pthread_create(&ids[t], NULL, run_rank, &jobs[t]);
    for (int t = 0; t < tp; t++)
        pthread_join(ids[t], NULL);
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < WIDTH; k++) {
            float sum = value_of(0, tp, i, k, from);
            for (int t = 1; t < tp; t++)
                sum += value_of(t, tp, i, k, from);
            assert_memory_equal(&jobs[0].dense[i * WIDTH + k], &sum, sizeof sum);
        }
    for (int t = 0; t < tp; t++) {
        int sent = is_large(rows) ? floats_for_others(t, tp, rows, from) : 0;
        sent += is_large(rows) ? all_for_others(t, tp, rows) : 0;
        assert_memory_equal(jobs[t].dense, jobs[0].dense, bytes);
        assert_memory_equal(jobs[t].sparse, jobs[0].dense, bytes);
        assert_int_equal(wire.exchanged[t], sent);
    }
    for (int t = 0; t < tp; t++) {
        mem_free(jobs[t].dense);
        mem_free(jobs[t].sparse);
    }
    mem_free(from);
}

static void test_rows_of_some_ranks(void **state)
{
    (void)state;
    for (int tp = 2; tp <= MOST; tp++) {
        int most = RANKS_GATHER_BYTES / (WIDTH * 4); /* rows that go whole */
        check_sum(tp, 1);
        check_sum(tp, most);
        check_sum(tp, most + 1);
        check_sum(tp, 3 * most + tp - 1);
    }
}

static void test_runs(void **state)
{
    (void)state;
    for (int n = 1; n < 40; n++)
        for (int of = 1; of <= n && of < 9; of++)
            for (int i = 0; i < n; i++) {
                int at = range_owner(n, 1, i, of);
                struct range r = range_share(n, 1, at, of);
                assert_true(at < of && i >= r.first && i < r.first + r.n);
            }
}

static double heaviest(const float *counts, const int32_t *order, int n, int tp)
{
    double most = 0;
    for (int t = 0; t < tp; t++) {
        struct range r = range_share(n, 1, t, tp);
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
    for (int tp = 2; tp <= 5; tp++) {
        bool seen[64] = {false};
        expert_load_share(counts, 64, 0, tp, order);
        for (int i = 0; i < 64; i++) {
            assert_true(order[i] >= 0 && order[i] < 64 && !seen[order[i]]);
            seen[order[i]] = true;
        }
        assert_true(heaviest(counts, plain, 64, tp) > 1.9 * all / tp);
        assert_true(heaviest(counts, order, 64, tp) < 1.2 * all / tp);
    }
    /* groups of eight stay whole, and where ranks would cut them nothing moves */
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

static int test_broken(void *request)
{
    (void)request;
    return -1;
}

/* A sum that breaks: nothing is waited for, and later sums do nothing. */
static void test_breaks(void **state)
{
    (void)state;
    static const struct ranks_link one = {.version = RANKS_LINK_VERSION,
                                          .allgather = link_allgather,
                                          .exchange = link_exchange,
                                          .test = test_broken};
    for (int large = 0; large < 2; large++) {
        struct ranks r = {.link = &one, .size = 2, .tp = 2, .pp = 1, .alarm = -1};
        int n = large ? 2 * RANKS_GATHER_BYTES : 8;
        float *rows = mem_zalloc((size_t)n, sizeof *rows);
        memset(wire.meetings, 0, sizeof wire.meetings);
        memset(n_begun, 0, sizeof n_begun);
        memset(requests, 0, sizeof requests);
        tp_rank = 0;
        atomic_store(&r.timeout_s, 10);
        ranks_reserve(&r, (size_t)n);
        ranks_sum(&r, rows, (size_t)n);
        assert_false(ranks_ok(&r, NULL));
        assert_non_null(strstr(r.failure.msg, "a sum: another rank has ended"));
        ranks_sum(&r, rows, (size_t)n);
        ranks_release(&r);
        mem_free(rows);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows_of_some_ranks),
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_experts_by_load),
        cmocka_unit_test(test_naps_in_company),
        cmocka_unit_test(test_breaks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
