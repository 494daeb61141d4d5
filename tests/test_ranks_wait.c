/*
 * Every wait of ranks ends (dist/ranks.h, dist/ranks_line.h): nobody answers, and each wait is over when its limit
 * says, not before. The clock of this program goes on by itself and by most of a second whenever somebody looks whether
 * an answer has come, so that an hour is short.
 * Jobs of real processes: test_ranks_failure.py.
 */
#include "base/clock.h"
#include "dist/ranks.h"
#include "dist/ranks_line.h"
#include "dist/ranks_link.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <arpa/inet.h>
#include <cmocka.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { HOUR = 3600 };
#define SECOND 1000000000LL
#define STEP   (RANKS_AWAY_MS * 900000LL) /* a longer one is of who stood still */

static _Atomic int64_t ahead; /* of the real one */
static int64_t step = STEP;

/* In place of the library's. */
int clock_gettime(clockid_t id, struct timespec *t)
{
    long rc = syscall(SYS_clock_gettime, id, t);
    int64_t ns = t->tv_sec * SECOND + t->tv_nsec + atomic_load(&ahead);
    t->tv_sec = ns / SECOND;
    t->tv_nsec = ns % SECOND;
    return (int)rc;
}

/* MPI that nobody answers. */
static struct {
    int64_t asked; /* when it was last asked whether something has come */
    int64_t until; /* something comes then */
} wire;
static char request;

static int link_test(void *of)
{
    (void)of;
    atomic_fetch_add(&ahead, step);
    wire.asked = clock_ns();
    return wire.until && wire.asked > wire.until;
}

static void *link_bcast(void *buf, size_t bytes, int root, int group)
{
    (void)buf, (void)bytes, (void)root, (void)group;
    return &request;
}

static void *link_allgather(const void *mine, void *all, size_t bytes, int group)
{
    (void)mine, (void)all, (void)bytes, (void)group;
    return &request;
}

static void link_poke(void)
{
}

static _Noreturn void hang(void)
{
    for (;;) {
        atomic_fetch_add(&ahead, SECOND);
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    }
}

static _Noreturn int link_split(int color, int key)
{
    (void)color, (void)key;
    hang();
}

static const struct ranks_link nobody = {.version = RANKS_LINK_VERSION,
                                         .bcast = link_bcast,
                                         .allgather = link_allgather,
                                         .test = link_test,
                                         .poke = link_poke,
                                         .split = link_split,
                                         .finalize = hang};

/* A rank of two, with its thread. */
static void begin(struct ranks *r, int rank, int timeout_s, bool lined)
{
    *r = (struct ranks){.link = &nobody, .rank = rank, .size = 2, .tp = 2, .pp = 1, .alarm = -1};
    atomic_store(&r->timeout_s, timeout_s);
    r->line = ranks_line_new(r);
    assert_non_null(r->line);
    ranks_line_ready(r->line);
    r->lined = lined;
}

/* Seconds from `start` until nobody asked any more. */
static double waited(int64_t start)
{
    return (double)(wire.asked - start) / 1e9;
}

/* The wait that is to come ends after so long: not before, and not more than a minute later. */
#define assert_ends_after(r, call, seconds)                                                        \
    do {                                                                                           \
        int64_t start_ = clock_ns();                                                               \
        wire.until = 0;                                                                            \
        assert_false(call);                                                                        \
        assert_non_null(strstr((r)->failure.msg, "no answer from another rank"));                  \
        assert_true(waited(start_) >= (seconds));                                                  \
        assert_true(waited(start_) < (seconds) + 60);                                              \
    } while (0)

static void test_a_step(void **state)
{
    (void)state;
    struct ranks r;
    char buf[4], all[8];
    begin(&r, 1, 100, true);
    assert_ends_after(&r, ranks_broadcast(&r, buf, sizeof buf, false), 100);
    assert_false(ranks_allgather(&r, buf, all, sizeof buf)); /* nothing is waited for any more */
    ranks_line_free(r.line);
    begin(&r, 0, 100, false);
    assert_ends_after(&r, ranks_barrier(&r), 100);
    ranks_line_free(r.line);
}

/* Who stood still itself, however long, waits as long as before. */
static void test_stopped_meanwhile(void **state)
{
    (void)state;
    struct ranks r;
    char buf[4];
    begin(&r, 1, 100, true);
    step = HOUR * SECOND;
    wire.until = clock_ns() + 50 * HOUR * SECOND;
    assert_true(ranks_broadcast(&r, buf, sizeof buf, false));
    step = STEP;
    assert_ends_after(&r, ranks_broadcast(&r, buf, sizeof buf, false), 100);
    ranks_line_free(r.line);
}

/* All have lines, and none says that anybody works. */
static void test_opening_and_nobody_works(void **state)
{
    (void)state;
    struct ranks r;
    char mine[4] = {0}, all[8];
    begin(&r, 1, 100, true);
    assert_ends_after(&r, ranks_allgather(&r, mine, all, sizeof mine), 100);
    ranks_line_free(r.line);
}

/* Who knows? */
static void test_opening_without_lines(void **state)
{
    (void)state;
    struct ranks r;
    char mine[4] = {0}, all[8];
    begin(&r, 1, 100, false);
    assert_ends_after(&r, ranks_allgather(&r, mine, all, sizeof mine), HOUR);
    ranks_line_free(r.line);
}

/* The other rank says that it works, and does so for ever. */
static void test_opening_and_one_works(void **state)
{
    (void)state;
    struct ranks first, second;
    struct ranks_offer offer;
    char mine[4] = {0}, all[8];
    begin(&first, 0, HOUR - 400, true);
    begin(&second, 1, HOUR - 400, true);
    ranks_line_listen(first.line, true, &offer);
    assert_true(ranks_line_dial(second.line, &offer, true));
    step = SECOND / 2; /* its beats are of real time */
    assert_ends_after(&first, ranks_allgather(&first, mine, all, sizeof mine), HOUR);
    step = STEP;
    ranks_line_free(second.line);
    ranks_line_free(first.line);
}

/* A rank that fails tells rank 0 at once, in its own words, and not when it gets to its end. */
static void test_one_fails(void **state)
{
    (void)state;
    struct ranks first, second;
    struct ranks_offer offer;
    begin(&first, 0, HOUR, true);
    begin(&second, 1, HOUR, true);
    atomic_store(&first.said, true); /* this program goes on */
    ranks_line_listen(first.line, true, &offer);
    assert_true(ranks_line_dial(second.line, &offer, true));
    ranks_fail(&second, "the device is gone");
    ranks_fail(&second, "and more");
    assert_string_equal(second.failure.msg, "rank 1: the device is gone");
    for (int i = 0; i < 2000 && !atomic_load(&first.stop); i++)
        nanosleep(&(struct timespec){0, 1000000}, NULL);
    assert_true(atomic_load(&first.stop));
    assert_string_equal(first.lost.msg, "rank 1: the device is gone");
    ranks_line_free(second.line);
    ranks_line_free(first.line);
}

static void *refuse_bcast(void *buf, size_t bytes, int root, int group)
{
    (void)buf, (void)bytes, (void)root, (void)group;
    return NULL;
}

static void *refuse_send(const void *buf, size_t bytes, int to, int tag)
{
    (void)buf, (void)bytes, (void)to, (void)tag;
    return NULL;
}

/* What MPI does not even begin loses the job, for whoever watches the alarm too: nobody waits for it later. */
static void test_refused(void **state)
{
    (void)state;
    static const struct ranks_link refusing = {
        .version = RANKS_LINK_VERSION, .bcast = refuse_bcast, .send = refuse_send};
    for (int tells = 0; tells < 2; tells++) {
        struct ranks r;
        char buf[4] = {0};
        uint64_t rings = 0;
        begin(&r, 0, 100, true);
        atomic_store(&r.said, true); /* else the line says it, and ends this program */
        r.link = &refusing;
        r.alarm = eventfd(0, EFD_NONBLOCK);
        assert_null(tells ? ranks_broadcast_begin(&r, buf, sizeof buf)
                          : ranks_send_begin(&r, buf, sizeof buf, 1));
        assert_true(atomic_load(&r.stop));
        assert_int_equal(read(r.alarm, &rings, sizeof rings), sizeof rings);
        assert_string_equal(r.lost.msg, tells ? "rank 0: a broadcast: MPI refused it"
                                              : "rank 0: rows for another rank: MPI refused them");
        assert_string_equal(r.failure.msg, r.lost.msg);
        close(r.alarm);
        ranks_line_free(r.line);
    }
}

static bool answers_at(const char *host, int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, host, &at.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    bool ok = connect(fd, (struct sockaddr *)&at, sizeof at) == 0;
    close(fd);
    return ok;
}

/* Where rank 0 hears on its own machine: nowhere else than said. Only rank 0 need know the name. */
static void check_address(const char *named, const char *heard, const char *deaf)
{
    struct ranks first, second;
    struct ranks_offer offer;
    begin(&first, 0, 100, true);
    begin(&second, 1, 100, true);
    setenv("STEEL_RANK_ADDRESS", named, 1);
    ranks_line_listen(first.line, true, &offer);
    unsetenv("STEEL_RANK_ADDRESS");
    assert_int_equal(offer.port != 0, heard != NULL);
    if (heard) {
        assert_true(answers_at(heard, offer.port));
        assert_false(answers_at(deaf, offer.port));
    }
    assert_int_equal(ranks_line_dial(second.line, &offer, true), heard != NULL);
    ranks_line_free(second.line);
    ranks_line_free(first.line);
}

static void test_address(void **state)
{
    (void)state;
    check_address("", "127.0.0.1", "127.0.0.2");
    check_address("127.0.0.2", "127.0.0.2", "127.0.0.1");
    check_address("240.0.0.1", NULL, NULL); /* nobody's */
    check_address("no address", NULL, NULL);
}

/* For the next step: as long as rank 0 lives; where no line says that it does, not for ever. */
static void test_for_word(void **state)
{
    (void)state;
    struct ranks r;
    char buf[4];
    begin(&r, 1, 100, true);
    wire.until = clock_ns() + 2 * HOUR * SECOND;
    assert_true(ranks_broadcast(&r, buf, sizeof buf, true));
    ranks_line_free(r.line);
    begin(&r, 1, 100, false);
    assert_ends_after(&r, ranks_broadcast(&r, buf, sizeof buf, true), HOUR);
    ranks_line_free(r.line);
}

/* A process of its own, which must end, with 1: what it said. read_it: else its stderr is full from the start. */
static void check_process(void (*run)(void), bool read_it, const char *said)
{
    int ends[2], status = 0;
    char text[1024] = "";
    assert_int_equal(pipe(ends), 0);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(ends[1], STDERR_FILENO);
        alarm(60); /* hang detection */
        if (!read_it) {
            char full[4096] = {0};
            fcntl(STDERR_FILENO, F_SETFL, O_NONBLOCK);
            while (write(STDERR_FILENO, full, sizeof full) > 0)
                ;
            fcntl(STDERR_FILENO, F_SETFL, 0);
        }
        run();
        _exit(0);
    }
    close(ends[1]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (read_it)
        assert_true(read(ends[0], text, sizeof text - 1) > 0);
    close(ends[0]);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 1);
    assert_true(!read_it || !strcmp(text, said));
}

static void never_begin(void)
{
    static struct ranks r;
    atomic_store(&r.timeout_s, 10);
    if (ranks_line_new(&r))
        hang();
}

static void never_group(void)
{
    static struct ranks r;
    struct error err;
    begin(&r, 1, 10, true);
    ranks_arrange(&r, 2, 1, false, &err);
}

static void never_end(void)
{
    static struct ranks r;
    begin(&r, 1, 10, true);
    ranks_close(&r);
}

static void never_say(void)
{
    static struct ranks r;
    begin(&r, 0, 10, true);
    ranks_lose(&r, "rank 1 has ended");
    hang();
}

/* What MPI does without coming back ends with the process. */
static void test_mpi_hangs(void **state)
{
    (void)state;
    check_process(never_begin, true, "steel: the ranks have not found each other in two minutes\n");
    check_process(never_group, true, "steel: MPI has not made a group of ranks in two minutes\n");
    check_process(never_end, true, "steel: the ranks have not ended together (--rank-timeout)\n");
}

/* Nobody reads what is said: that keeps no process. */
static void test_nobody_reads(void **state)
{
    (void)state;
    check_process(never_say, true, "steel: rank 1 has ended\n");
    check_process(never_say, false, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_mpi_hangs), /* forks: before there are threads */
        cmocka_unit_test(test_nobody_reads),
        cmocka_unit_test(test_a_step),
        cmocka_unit_test(test_stopped_meanwhile),
        cmocka_unit_test(test_opening_and_nobody_works),
        cmocka_unit_test(test_opening_without_lines),
        cmocka_unit_test(test_opening_and_one_works),
        cmocka_unit_test(test_one_fails),
        cmocka_unit_test(test_for_word),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_address),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
