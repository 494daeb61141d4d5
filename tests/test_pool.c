/*
 * The thread team: every piece once, phases in order, and above all progress where helpers do not
 * run. A helper is taken away as a scheduler would do it, at any instruction outside a piece: by a
 * signal whose handler blocks. Also the CPUs that a cgroup pays for, from made-up /proc files.
 */
#include "base/clock.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/os.h"
#include "base/pool.h"
#include "base/topology.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

enum { MAX_THREADS = 5, MAX_PIECES = 300, N_PHASES = 4 };
static const int64_t HANG_NS = 300000000000; /* a wait as long as this is taken for a hang */

/* A job that checks itself: how often each piece ran, and that phases do not overlap. */
struct counted {
    int n[N_PHASES];
    enum pool_cut cut;
    int begun;                     /* phases begun; written by begin, read by pieces */
    int ran[N_PHASES][MAX_PIECES]; /* plain ints: a piece is one thread's */
    _Atomic int by[MAX_THREADS];   /* pieces run by each thread */
    _Atomic int wrong;             /* pieces that ran outside their phase */
};

static struct pool_work counted_begin(struct counted *c, int phase)
{
    if (c->begun != phase)
        atomic_fetch_add(&c->wrong, 1);
    for (int k = 0; phase > 0 && k < c->n[phase - 1]; k++)
        if (c->ran[phase - 1][k] != 1)
            atomic_fetch_add(&c->wrong, 1);
    c->begun++;
    return (struct pool_work){c->n[phase], c->cut};
}

static void counted_run(struct counted *c, int phase, int ith, int first, int last)
{
    if (c->begun != phase + 1 || first >= last || last > c->n[phase])
        atomic_fetch_add(&c->wrong, 1);
    for (int k = first; k < last; k++)
        c->ran[phase][k]++;
    atomic_fetch_add(&c->by[ith], last - first);
}

#define PHASE(i)                                                                                   \
    static struct pool_work begin##i(void *arg)                                                    \
    {                                                                                              \
        return counted_begin(arg, i);                                                              \
    }                                                                                              \
    static void run##i(void *arg, int ith, int first, int last)                                    \
    {                                                                                              \
        counted_run(arg, i, ith, first, last);                                                     \
    }
PHASE(0)
PHASE(1)
PHASE(2)
PHASE(3)

static const struct pool_phase phases[N_PHASES] = {
    {begin0, run0}, {begin1, run1}, {begin2, run2}, {begin3, run3}};

static struct counted job_of(unsigned seed)
{
    struct counted c = {.cut = (enum pool_cut)(seed % 3)};
    for (int i = 0; i < N_PHASES; i++) {
        seed = seed * 1664525 + 1013904223;
        unsigned kind = seed >> 28;
        c.n[i] = kind < 3 ? 0 : kind < 6 ? 1 : (int)(seed >> 8) % MAX_PIECES;
    }
    return c;
}

static void check(const struct counted *c)
{
    assert_int_equal(c->wrong, 0);
    assert_int_equal(c->begun, N_PHASES);
    for (int i = 0; i < N_PHASES; i++)
        for (int k = 0; k < MAX_PIECES; k++)
            assert_int_equal(c->ran[i][k], k < c->n[i]);
}

static void test_every_piece_once(void **state)
{
    (void)state;
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        struct pool *p = pool_new(threads);
        assert_int_equal(pool_size(p), threads);
        for (unsigned seed = 0; seed < 300; seed++) {
            struct counted c = job_of(seed);
            pool_phases(p, phases, N_PHASES, &c);
            check(&c);
        }
        pool_free(p);
    }
}

/* Short phases of changing size, as fast as they go: a claim for the phase before, or the one after,
 * would run a piece twice. */
static void test_short_phases(void **state)
{
    (void)state;
    for (int threads = 2; threads <= 3; threads++) {
        struct pool *p = pool_new(threads);
        for (unsigned seed = 0; seed < 30000; seed++) {
            struct counted c = {.cut = (enum pool_cut)(seed % 3)};
            for (int i = 0; i < N_PHASES; i++)
                c.n[i] = (int)(seed >> i) % 4 ? 2 : 20;
            pool_phases(p, phases, N_PHASES, &c);
            assert_int_equal(c.wrong, 0);
            for (int i = 0; i < N_PHASES; i++)
                for (int k = 0; k < c.n[i]; k++)
                    assert_int_equal(c.ran[i][k], 1);
        }
        pool_free(p);
    }
}

static void count_pieces(void *arg, int ith, int first, int last)
{
    (void)ith;
    _Atomic int *ran = arg;
    for (int i = first; i < last; i++)
        atomic_fetch_add(&ran[i], 1);
}

static void test_each(void **state)
{
    (void)state;
    struct pool *p = pool_new(3);
    for (int n = 0; n <= 40; n++)
        for (int cut = POOL_EVEN; cut <= POOL_SINGLE; cut++) {
            _Atomic int ran[41] = {0};
            pool_each(p, n, (enum pool_cut)cut, count_pieces, ran);
            for (int i = 0; i < 41; i++)
                assert_int_equal(ran[i], i < n);
        }
    pool_free(p);
}

struct parts {
    pthread_t caller;
    int n;
    _Atomic int ran[MAX_THREADS], strange;
};

static void count_part(void *arg, int i, int n)
{
    struct parts *s = arg;
    atomic_fetch_add(&s->ran[i], 1);
    if (n != s->n || (i == 0 && !pthread_equal(pthread_self(), s->caller)))
        atomic_fetch_add(&s->strange, 1);
}

static void test_parts(void **state)
{
    (void)state;
    for (int threads = 1; threads <= MAX_THREADS; threads++) {
        struct pool *p = pool_new(threads);
        for (int rep = 0; rep < 100; rep++) {
            struct parts s = {.caller = pthread_self(), .n = threads};
            pool_run(p, count_part, &s);
            assert_int_equal(s.strange, 0);
            for (int i = 0; i < MAX_THREADS; i++)
                assert_int_equal(s.ran[i], i < threads);
        }
        pool_free(p);
    }
}

/* Helpers that are taken away */

static int entered[2], release[2]; /* pipes of the handler */

static void hold(int sig)
{
    (void)sig;
    char c = 0;
    if (write(entered[1], &c, 1) != 1 || read(release[0], &c, 1) != 1)
        _exit(9);
}

struct meeting {
    _Atomic int met;
    pthread_t thread[MAX_THREADS];
    _Atomic bool known[MAX_THREADS];
};

/* Lets every thread introduce itself. */
static void introduce(void *arg, int ith, int first, int last)
{
    (void)first, (void)last;
    struct meeting *m = arg;
    if (!atomic_load(&m->known[ith])) {
        m->thread[ith] = pthread_self();
        atomic_store(&m->known[ith], true);
        atomic_fetch_add(&m->met, 1);
    }
}

static void test_progress_without_helpers(void **state)
{
    (void)state;
    enum { TEAM = 3 };
    struct pool *p = pool_new(TEAM);
    struct meeting m = {0};
    int64_t start = clock_ns();
    while (atomic_load(&m.met) < TEAM) {
        pool_each(p, 200, POOL_SINGLE, introduce, &m);
        assert_true(clock_ns() - start < HANG_NS);
    }
    assert_int_equal(pipe(entered), 0);
    assert_int_equal(pipe(release), 0);
    struct sigaction act = {.sa_handler = hold}, before;
    sigaction(SIGUSR1, &act, &before);
    /* Between jobs no helper holds a piece. One is taken away first, then both. */
    for (int gone = 1; gone < TEAM; gone++) {
        pthread_kill(m.thread[gone], SIGUSR1);
        /* ThreadSanitizer delivers a signal at the next call it knows, which no piece makes: so where
         * it takes long, a job leads the helper there. */
        struct pollfd fd = {.fd = entered[0], .events = POLLIN};
        start = clock_ns();
        while (poll(&fd, 1, 200) != 1) {
            pool_each(p, 200, POOL_SINGLE, introduce, &m);
            assert_true(clock_ns() - start < HANG_NS);
        }
        char c;
        assert_int_equal(read(entered[0], &c, 1), 1);
        for (unsigned seed = 0; seed < 200; seed++) {
            struct counted job = job_of(seed);
            pool_phases(p, phases, N_PHASES, &job);
            check(&job);
            for (int i = 1; i <= gone; i++)
                assert_int_equal(job.by[i], 0);
        }
    }
    /* Given back, they take part again. */
    assert_int_equal(write(release[1], "xx", 2), 2);
    for (int i = 0; i < MAX_THREADS; i++)
        atomic_store(&m.known[i], false);
    atomic_store(&m.met, 0);
    start = clock_ns();
    while (atomic_load(&m.met) < TEAM) {
        pool_each(p, 200, POOL_SINGLE, introduce, &m);
        assert_true(clock_ns() - start < HANG_NS);
    }
    sigaction(SIGUSR1, &before, NULL);
    pool_free(p);
    for (int i = 0; i < 2; i++) {
        close(entered[i]);
        close(release[i]);
    }
}

/* A helper that is taken away inside a piece: the others do all the rest meanwhile. */
struct stuck {
    int n;
    _Atomic int done, claimed;
    _Atomic bool hung;
};

static void stick(void *arg, int ith, int first, int last)
{
    struct stuck *s = arg;
    if (ith && !atomic_fetch_add(&s->claimed, 1)) {
        int64_t start = clock_ns();
        while (atomic_load(&s->done) < s->n - (last - first))
            if (clock_ns() - start > HANG_NS) {
                atomic_store(&s->hung, true);
                break;
            }
    }
    atomic_fetch_add(&s->done, last - first);
}

static void test_stuck_in_a_piece(void **state)
{
    (void)state;
    struct pool *p = pool_new(2);
    int64_t start = clock_ns();
    for (int stuck = 0; stuck < 20;) {
        struct stuck s = {.n = 50};
        pool_each(p, s.n, POOL_SINGLE, stick, &s);
        assert_int_equal(s.done, s.n);
        assert_false(s.hung);
        stuck += s.claimed > 0;
        assert_true(clock_ns() - start < HANG_NS);
    }
    pool_free(p);
}

/* Threads that wait long sleep: helpers between jobs, and the caller while a helper is in a piece. */

struct thread {
    pid_t tid; /* 0: not known yet */
    clockid_t cpu;
};

static struct thread this_thread(void)
{
    struct thread t = {.tid = gettid()};
    assert_int_equal(pthread_getcpuclockid(pthread_self(), &t.cpu), 0);
    return t;
}

/* Whether a thread sleeps, and how often it has gone to sleep so far. */
static bool is_asleep(struct thread t, long *switches)
{
    char path[64], line[256], state = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/status", (int)t.tid);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    for (*switches = 0; fgets(line, sizeof line, f);) {
        sscanf(line, "State: %c", &state);
        sscanf(line, "voluntary_ctxt_switches: %ld", switches);
    }
    fclose(f);
    return state == 'S';
}

static double cpu_seconds(struct thread t)
{
    struct timespec now;
    clock_gettime(t.cpu, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* False: the thread has computed for 0.3 s instead, thousands of times what it may spin. */
static bool goes_to_sleep(struct thread t, long *switches)
{
    for (double start = cpu_seconds(t); !is_asleep(t, switches); sched_yield())
        if (cpu_seconds(t) - start > 0.3)
            return false;
    return true;
}

enum { SLEEPERS = 4 };

struct sleepers {
    struct thread threads[SLEEPERS]; /* the first is the caller */
    _Atomic int slow;                /* helpers that have waited for the caller to sleep */
    _Atomic bool spins;              /* the caller did not */
};

static void slow_helper(void *arg, int ith, int first, int last)
{
    struct sleepers *s = arg;
    (void)first, (void)last;
    long switches;
    s->threads[ith] = this_thread();
    if (ith && !atomic_fetch_add(&s->slow, 1) && !goes_to_sleep(s->threads[0], &switches))
        atomic_store(&s->spins, true);
}

static void test_waiting_sleeps(void **state)
{
    (void)state;
    struct pool *p = pool_new(SLEEPERS);
    struct sleepers s = {.threads = {this_thread()}};
    int64_t start = clock_ns();
    for (int met = 0; met < SLEEPERS;) {
        pool_each(p, 100, POOL_SINGLE, slow_helper, &s);
        met = 0;
        for (int i = 0; i < SLEEPERS; i++)
            met += s.threads[i].tid != 0;
        assert_true(clock_ns() - start < HANG_NS);
    }
    assert_false(s.spins);
    long before[SLEEPERS], after[SLEEPERS];
    for (int i = 1; i < SLEEPERS; i++)
        assert_true(goes_to_sleep(s.threads[i], &before[i]));
    nanosleep(&(struct timespec){.tv_nsec = 100000000}, NULL);
    for (int i = 1; i < SLEEPERS; i++) {
        assert_true(is_asleep(s.threads[i], &after[i]));
        assert_int_equal(after[i], before[i]); /* it has not been up in between */
    }
    pool_free(p);
}

static void *hog(void *arg)
{
    _Atomic bool *stop = arg;
    while (!atomic_load_explicit(stop, memory_order_relaxed))
        ;
    return NULL;
}

/* More threads than processors and neighbours that never rest: everything is done, and right. */
static void test_busy_neighbours(void **state)
{
    (void)state;
    enum { HOGS = 4 };
    _Atomic bool stop = false;
    pthread_t hogs[HOGS];
    struct pool *p = pool_new(MAX_THREADS);
    for (int i = 0; i < HOGS; i++)
        assert_int_equal(pthread_create(&hogs[i], NULL, hog, &stop), 0);
    for (unsigned seed = 0; seed < 50; seed++) {
        struct counted c = job_of(seed);
        pool_phases(p, phases, N_PHASES, &c);
        check(&c);
    }
    atomic_store(&stop, true);
    for (int i = 0; i < HOGS; i++)
        pthread_join(hogs[i], NULL);
    pool_free(p);
}

/* The quota of a cgroup */

static void put(const char *root, const char *path, const char *text)
{
    char full[512];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *s = full + strlen(root) + 1; (s = strchr(s, '/')); s++) {
        *s = '\0';
        mkdir(full, 0755);
        *s = '/';
    }
    FILE *f = fopen(full, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

struct quota_case {
    const char *what, *cgroup, *mounts;
    const char *files[6]; /* path, text, path, text */
    int expect;
};

#define V2 "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
#define V1 "33 30 0:30 / /sys/fs/cgroup/cpu,cpuacct rw shared:12 - cgroup cgroup rw,cpu,cpuacct\n"

static void test_quota(void **state)
{
    (void)state;
    static const struct quota_case cases[] = {
        {"no cgroups", "", "", {0}, 0},
        {"v2, no limit", "0::/a\n", V2, {"/sys/fs/cgroup/a/cpu.max", "max 100000\n"}, 0},
        {"v2, two", "0::/a\n", V2, {"/sys/fs/cgroup/a/cpu.max", "200000 100000\n"}, 2},
        {"v2, rounded up", "0::/a\n", V2, {"/sys/fs/cgroup/a/cpu.max", "150000 100000\n"}, 2},
        {"v2, less than one", "0::/a\n", V2, {"/sys/fs/cgroup/a/cpu.max", "5000 100000\n"}, 1},
        {"v2, the parent's",
         "0::/a/b/c\n",
         V2,
         {"/sys/fs/cgroup/a/cpu.max", "300000 100000\n", "/sys/fs/cgroup/a/b/c/cpu.max",
          "800000 100000\n"},
         3},
        {"v2, a namespace", "0::/\n", V2, {"/sys/fs/cgroup/cpu.max", "400000 100000\n"}, 4},
        {"v2, a part of the tree is mounted",
         "0::/docker/x\n",
         "30 24 0:26 /docker/x /sys/fs/cgroup ro - cgroup2 cgroup rw\n",
         {"/sys/fs/cgroup/cpu.max", "700000 100000\n"},
         7},
        {"v2, garbage", "0::/a\n", V2, {"/sys/fs/cgroup/a/cpu.max", "\x01lots\n"}, 0},
        {"v2, a period of nothing", "0::/a\n", V2, {"/sys/fs/cgroup/a/cpu.max", "100 0\n"}, 0},
        {"v2, more than an int",
         "0::/a\n",
         V2,
         {"/sys/fs/cgroup/a/cpu.max", "9000000000000000000 1\n"},
         INT32_MAX},
        {"v1",
         "5:cpu,cpuacct:/a\n4:memory:/b\n",
         V1,
         {"/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "250000\n",
          "/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n"},
         3},
        {"v1, no limit",
         "5:cpu,cpuacct:/a\n",
         V1,
         {"/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n",
          "/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n"},
         0},
        {"v1, cpuset is another controller",
         "5:cpuset:/a\n",
         "33 30 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n",
         {"/sys/fs/cgroup/cpuset/a/cpu.cfs_quota_us", "100000\n",
          "/sys/fs/cgroup/cpuset/a/cpu.cfs_period_us", "100000\n"},
         0},
        {"both: the lesser",
         "5:cpu,cpuacct:/a\n0::/a\n",
         V1 V2,
         {"/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "500000\n",
          "/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n", "/sys/fs/cgroup/a/cpu.max",
          "600000 100000\n"},
         5},
        {"lines cut short", "0:\n5\n", "1 2 3\n30 24 0:26 / /x rw - cgroup2\n", {0}, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct quota_case *q = &cases[i];
        char root[] = "/tmp/steel_quota_XXXXXX", command[64];
        assert_non_null(mkdtemp(root));
        put(root, "/proc/self/cgroup", q->cgroup);
        put(root, "/proc/self/mountinfo", q->mounts);
        for (int k = 0; k < 6 && q->files[k]; k += 2)
            put(root, q->files[k], q->files[k + 1]);
        int got = cpu_quota(root);
        if (got != q->expect)
            print_error("%s: %d, not %d\n", q->what, got, q->expect);
        assert_int_equal(got, q->expect);
        snprintf(command, sizeof command, "rm -r %s", root);
        assert_int_equal(system(command), 0);
    }
    assert_int_equal(cpu_quota("/tmp/steel_no_such_folder"), 0);
    assert_true(pool_cpu_count() >= 1);
}

struct topology_case {
    const char *what, *files[40], *allowed, *text;
    int cpus, cores, sockets, nodes, slow;
};

#define CPU  "/sys/devices/system/cpu/"
#define NODE "/sys/devices/system/node/"

/* Machines as sysfs describes them: threads of cores, sockets, NUMA nodes and cores of two speeds. */
static void test_topology(void **state)
{
    (void)state;
    static const struct topology_case cases[] = {
        {"nothing is known", {0}, NULL, NULL, 0, 0, 0, 0, 0},
        {"a list that is garbage", {CPU "online", "0-\n"}, NULL, NULL, 0, 0, 0, 0, 0},
        {"more than a set holds", {CPU "online", "0-99999\n"}, NULL, NULL, 0, 0, 0, 0, 0},
        {"only a list", {CPU "online", "0-3\n"}, NULL, "4 cores", 4, 4, 1, 1, 0},
        {"SMT: two cores of two threads",
         {CPU "online", "0-3\n", CPU "cpu0/topology/core_cpus_list", "0,2\n",
          CPU "cpu1/topology/core_cpus_list", "1,3\n", CPU "cpu2/topology/core_cpus_list", "0,2\n",
          CPU "cpu3/topology/core_cpus_list", "1,3\n"},
         NULL,
         "2 cores, 2 threads each",
         4,
         2,
         1,
         1,
         0},
        {"an older kernel, a CPU that is offline, one that is not ours",
         {CPU "online", "0-1,3\n", CPU "cpu0/topology/thread_siblings_list", "0-1\n",
          CPU "cpu1/topology/thread_siblings_list", "0-1\n",
          CPU "cpu3/topology/thread_siblings_list", "3\n"},
         "0-1",
         "1 core, 2 threads each",
         2,
         1,
         1,
         1,
         0},
        {"two sockets, each a node",
         {CPU "online", "0-3\n", CPU "cpu0/topology/physical_package_id", "0\n",
          CPU "cpu1/topology/physical_package_id", "0\n", CPU "cpu2/topology/physical_package_id",
          "1\n", CPU "cpu3/topology/physical_package_id", "1\n", NODE "node0/cpulist", "0-1\n",
          NODE "node1/cpulist", "2-3\n"},
         NULL,
         "4 cores, 2 sockets, 2 NUMA nodes",
         4,
         4,
         2,
         2,
         0},
        {"the same, on one node",
         {CPU "online", "0-3\n", CPU "cpu2/topology/physical_package_id", "1\n",
          CPU "cpu3/topology/physical_package_id", "1\n", NODE "node0/cpulist", "0-1\n",
          NODE "node1/cpulist", "2-3\n", NODE "node2/cpulist", "\n"},
         "2,3",
         "2 cores",
         2,
         2,
         1,
         1,
         0},
        {"P cores of two threads, E cores of one",
         {CPU "online", "0-5\n", CPU "cpu0/topology/core_cpus_list", "0-1\n",
          CPU "cpu1/topology/core_cpus_list", "0-1\n", CPU "cpu2/topology/core_cpus_list", "2-3\n",
          CPU "cpu3/topology/core_cpus_list", "2-3\n", "/sys/devices/cpu_atom/cpus", "4-5\n"},
         NULL,
         "4 cores, 2 for performance and 2 for efficiency",
         6,
         4,
         1,
         1,
         2},
        {"efficiency cores alone",
         {CPU "online", "0-5\n", "/sys/devices/cpu_atom/cpus", "4-5\n"},
         "4-5",
         "2 cores",
         2,
         2,
         1,
         1,
         0},
        {"ARM: capacities",
         {CPU "online", "0-3\n", CPU "cpu0/cpu_capacity", "446\n", CPU "cpu1/cpu_capacity", "446\n",
          CPU "cpu2/cpu_capacity", "1024\n", CPU "cpu3/cpu_capacity", "1024\n"},
         NULL,
         "4 cores, 2 for performance and 2 for efficiency",
         4,
         4,
         1,
         1,
         2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct topology_case *c = &cases[i];
        char root[] = "/tmp/steel_cores_XXXXXX", command[64], text[200] = "";
        struct cpu_list allowed = {0};
        struct topology t;
        assert_non_null(mkdtemp(root));
        for (int k = 0; c->files[k]; k += 2)
            put(root, c->files[k], c->files[k + 1]);
        if (c->allowed)
            assert_true(cpu_list_parse(c->allowed, &allowed));
        bool ok = topology_read(root, c->allowed ? &allowed : NULL, &t);
        if (ok)
            topology_describe(&t, text, sizeof text);
        if (ok != (c->text != NULL) || (ok && strcmp(text, c->text)))
            print_error("%s: %s\n", c->what, text);
        assert_int_equal(ok, c->text != NULL);
        if (ok) {
            assert_string_equal(text, c->text);
            assert_int_equal(t.n_cpus, c->cpus);
            assert_int_equal(t.n_cores, c->cores);
            assert_int_equal(t.n_sockets, c->sockets);
            assert_int_equal(t.n_nodes, c->nodes);
            assert_int_equal(t.n_slow, c->slow);
        }
        snprintf(command, sizeof command, "rm -r %s", root);
        assert_int_equal(system(command), 0);
    }
    struct topology here;
    struct cpu_list own;
    assert_true(os_cpu_set(own.bits, sizeof own.bits / sizeof *own.bits));
    if (topology_read("", &own, &here)) {
        assert_int_equal(here.n_cpus, os_cpus());
        assert_in_range(here.n_cores, 1, here.n_cpus);
    }
}

/* Sets of features: what STEEL_ISA names must be included in what the machine has. */
static void test_isa(void **state)
{
    (void)state;
    struct error err = {0};
    enum isa isa, best = isa_best();
    int n = 0;
    for (; isa_at(n, &isa); n++) {
        assert_true(isa_has(best, isa));
        setenv("STEEL_ISA", isa_name(isa), 1);
        enum isa got;
        assert_true(isa_choose(&got, &err));
        assert_int_equal(got, isa);
    }
    assert_int_equal(isa, best); /* the last is the largest */
    assert_true(n > 0 && isa_has(ISA_VNNI, ISA_AVX2) && !isa_has(ISA_AVX2, ISA_VNNI));
    assert_true(isa_has(ISA_I8MM, ISA_NEON) && !isa_has(ISA_AMX, ISA_NEON));
    setenv("STEEL_ISA", "neon512", 1);
    assert_false(isa_choose(&isa, &err));
    assert_non_null(strstr(err.msg, "unknown"));
    setenv("STEEL_ISA", "amx", 1);
    if (!isa_has(best, ISA_AMX)) {
        assert_false(isa_choose(&isa, &err));
        assert_non_null(strstr(err.msg, "has no more than"));
    }
    unsetenv("STEEL_ISA");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_piece_once),
        cmocka_unit_test(test_short_phases),
        cmocka_unit_test(test_each),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_progress_without_helpers),
        cmocka_unit_test(test_stuck_in_a_piece),
        cmocka_unit_test(test_waiting_sleeps),
        cmocka_unit_test(test_busy_neighbours),
        cmocka_unit_test(test_quota),
        cmocka_unit_test(test_topology),
        cmocka_unit_test(test_isa),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
