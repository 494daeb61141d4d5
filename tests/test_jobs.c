/* The workers' queue: who goes first, who runs beside whom, and what turns long. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/os.h"
#include "base/clock.h"
#include "server/http/jobs.h"

#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* A job that says when it starts and ends when it is let go. */
struct gated {
    struct job job;
    char name;
    bool started, go;
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static char order[64]; /* names, as they started */

static void run(struct job *job)
{
    struct gated *g = (struct gated *)job;
    pthread_mutex_lock(&lock);
    order[strlen(order)] = g->name;
    g->started = true;
    pthread_cond_broadcast(&changed);
    while (!g->go)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void wait_started(struct gated *g)
{
    pthread_mutex_lock(&lock);
    while (!g->started)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void let_go(struct gated *g)
{
    pthread_mutex_lock(&lock);
    g->go = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

static struct jobs *open_jobs(int n_long, int n_short, int *fd)
{
    memset(order, 0, sizeof order);
    *fd = eventfd(0, EFD_NONBLOCK);
    struct jobs *q = jobs_new(n_long, 1, n_short, run, *fd);
    assert_non_null(q);
    return q;
}

static void add(struct jobs *q, struct gated *g, char name, uint64_t client, size_t bytes,
                int64_t now)
{
    *g = (struct gated){.job = {.client = client, .bytes = bytes}, .name = name};
    jobs_add(q, &g->job, now);
}

/* Until n more jobs have finished. */
static void wait_finished(struct jobs *q, int fd, int n)
{
    while (n > 0) {
        assert_int_equal(poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, 60000), 1);
        os_woken(fd);
        for (struct job *j = jobs_finished(q); j; j = j->next)
            n--;
    }
    assert_int_equal(n, 0);
}

static void close_jobs(struct jobs *q, int fd)
{
    jobs_stop(q);
    jobs_free(q);
    close(fd);
}

enum { LONG = 1 << 20, SHORT = 1000 };

/* One long job runs, nine wait, and a short one that comes last is taken at once. */
static void test_short_overtakes(void **state)
{
    (void)state;
    int fd;
    struct jobs *q = open_jobs(1, 2, &fd);
    struct gated g[10], s;
    for (int i = 0; i < 10; i++)
        add(q, &g[i], (char)('a' + i), (uint64_t)i, LONG, i);
    wait_started(&g[0]);
    add(q, &s, 'S', 99, SHORT, 10);
    wait_started(&s);
    struct jobs_count n = jobs_count(q);
    assert_int_equal(n.waiting, 9);
    assert_int_equal(n.running_long, 1);
    assert_int_equal(n.running_short, 1);
    let_go(&s);
    for (int i = 0; i < 10; i++)
        let_go(&g[i]);
    wait_finished(q, fd, 11);
    assert_string_equal(order, "aSbcdefghij");
    close_jobs(q, fd);
}

/* Little work first, but whoever has waited for long enough goes before newcomers. */
static void test_turns(void **state)
{
    (void)state;
    int fd;
    struct jobs *q = open_jobs(1, 1, &fd);
    struct gated first, g[6];
    add(q, &first, '-', 1, SHORT, 0);
    wait_started(&first);
    int64_t ms = 1000000;
    add(q, &g[0], 'a', 2, 60000, 0);       /* turn at 60 ms */
    add(q, &g[1], 'b', 3, 30000, 1);       /* 30 */
    add(q, &g[2], 'c', 4, 1000, 2);        /* 1 */
    add(q, &g[3], 'd', 5, 1000, 50 * ms);  /* 51 */
    add(q, &g[4], 'e', 6, 1000, 100 * ms); /* 101: behind the large one, which came long ago */
    add(q, &g[5], 'f', 7, 100, 101 * ms);  /* 101.1 */
    let_go(&first);
    for (int i = 0; i < 6; i++)
        let_go(&g[i]);
    wait_finished(q, fd, 7);
    assert_string_equal(order, "-cbdaef");
    close_jobs(q, fd);
}

/* One client's many jobs do not delay another's first. */
static void test_clients(void **state)
{
    (void)state;
    int fd;
    struct jobs *q = open_jobs(1, 1, &fd);
    struct gated first, g[8];
    add(q, &first, '-', 1, SHORT, 0);
    wait_started(&first);
    for (int i = 0; i < 6; i++)
        add(q, &g[i], (char)('a' + i), 1, 50000, 0);
    add(q, &g[6], 'X', 2, 50000, 0);
    add(q, &g[7], 'Y', 2, 50000, 0);
    let_go(&first);
    for (int i = 0; i < 8; i++)
        let_go(&g[i]);
    wait_finished(q, fd, 9);
    /* X counts from now, a from the end of the client's first job: X is before it, Y before b. */
    assert_string_equal(order, "-XaYbcdef");
    close_jobs(q, fd);
}

/* Of two places for long jobs a client gets one. */
static void test_one_long_a_client(void **state)
{
    (void)state;
    int fd;
    struct jobs *q = open_jobs(2, 1, &fd);
    struct gated a, b, c, d;
    add(q, &a, 'a', 1, LONG, 0);
    wait_started(&a);
    add(q, &b, 'b', 1, LONG, 0);
    add(q, &c, 'c', 2, 5 * LONG, 0); /* a later turn than b's, and yet it runs */
    wait_started(&c);
    add(q, &d, 'd', 3, LONG, 0);
    assert_int_equal(jobs_count(q).running_long, 2);
    assert_int_equal(jobs_count(q).waiting, 2);
    let_go(&a);
    let_go(&b);
    let_go(&d);
    wait_finished(q, fd, 3);
    let_go(&c);
    wait_finished(q, fd, 1);
    close_jobs(q, fd);
}

/* A short job that takes long gives its place to others, as long as threads are left. */
static void test_turns_long(void **state)
{
    (void)state;
    int fd;
    struct jobs *q = open_jobs(1, 1, &fd);
    struct gated a, b, c, l;
    add(q, &a, 'a', 1, SHORT, 0);
    wait_started(&a);
    add(q, &b, 'b', 2, SHORT, 0);
    assert_true(jobs_check(q, clock_ns()));
    assert_int_equal(jobs_count(q).waiting, 1);
    assert_true(jobs_check(q, clock_ns() + 1000000000));
    wait_started(&b);
    assert_int_equal(jobs_count(q).running_long, 1);
    add(q, &l, 'l', 3, LONG, 0); /* a takes the place of long ones now */
    jobs_check(q, clock_ns() + 1000000000);
    add(q, &c, 'c', 4, SHORT, 0);
    wait_started(&c);
    assert_int_equal(jobs_count(q).waiting, 1);
    let_go(&a);
    let_go(&b);
    let_go(&c);
    let_go(&l);
    wait_finished(q, fd, 4);
    assert_string_equal(order, "abcl");
    assert_false(jobs_check(q, clock_ns()));
    close_jobs(q, fd);
}

static void test_remove_and_stop(void **state)
{
    (void)state;
    int fd;
    struct jobs *q = open_jobs(1, 1, &fd);
    struct gated a, b, c, d;
    add(q, &a, 'a', 1, SHORT, 0);
    wait_started(&a);
    add(q, &b, 'b', 2, SHORT, 0);
    add(q, &c, 'c', 3, SHORT, 0);
    add(q, &d, 'd', 4, SHORT, 0);
    assert_true(jobs_remove(q, &c.job));
    assert_false(jobs_remove(q, &c.job));
    assert_false(jobs_remove(q, &a.job)); /* it runs */
    let_go(&a);
    let_go(&b);
    wait_finished(q, fd, 2);
    wait_started(&d);
    add(q, &b, 'b', 2, SHORT, 0);
    let_go(&d);
    let_go(&b); /* it may have been taken before the end, or not */
    jobs_trim(q);
    jobs_stop(q);
    wait_finished(q, fd, 2);
    assert_true(!strcmp(order, "abd") || !strcmp(order, "abdb"));
    jobs_free(q);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_short_overtakes), cmocka_unit_test(test_turns),
        cmocka_unit_test(test_clients),         cmocka_unit_test(test_one_long_a_client),
        cmocka_unit_test(test_turns_long),      cmocka_unit_test(test_remove_and_stop),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
