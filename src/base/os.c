/* Linux with glibc or musl: see os.h. */
#include "base/os.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <malloc.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

int os_wake_fd(void)
{
    return eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
}

void os_wake(int fd)
{
    uint64_t one = 1;
    ssize_t n = write(fd, &one, sizeof one);
    (void)n; /* fails only if the counter is full: it is readable then */
}

void os_woken(int fd)
{
    uint64_t count;
    ssize_t n = read(fd, &count, sizeof count);
    (void)n; /* fails only if nobody has woken it */
}

bool os_random(void *to, size_t n)
{
    return getrandom(to, n, 0) == (ssize_t)n;
}

void os_sleep_while(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

void os_wake_all(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

int os_cpus(void)
{
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
    long online = n < 1 ? sysconf(_SC_NPROCESSORS_ONLN) : 0;
    return n > 0 ? n : online > 0 ? (int)online : 1;
}

bool os_cpu_set(uint64_t *bits, int n_words)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set))
        return false;
    for (int i = 0; i < 64 * n_words; i++) {
        bits[i / 64] &= ~((uint64_t)1 << i % 64);
        if (i < CPU_SETSIZE && CPU_ISSET(i, &set))
            bits[i / 64] |= (uint64_t)1 << i % 64;
    }
    return true;
}

void os_cpu_model(char *out, size_t size)
{
    snprintf(out, size, "unknown");
    FILE *f = fopen("/proc/cpuinfo", "re");
    if (!f)
        return;
    char line[256];
    while (fgets(line, sizeof line, f)) {
        const char *colon = strchr(line, ':');
        if (!strncmp(line, "model name", 10) && colon) {
            snprintf(out, size, "%s", colon + 2);
            out[strcspn(out, "\n")] = 0;
            break;
        }
    }
    fclose(f);
}

void os_name_thread(const char *name)
{
    pthread_setname_np(pthread_self(), name);
}

void os_exact_naps(void)
{
    prctl(PR_SET_TIMERSLACK, 1);
}

void os_background(void)
{
    setpriority(PRIO_PROCESS, (id_t)gettid(), 5); /* Linux: of one thread */
}

void os_short_slice(uint64_t ns)
{
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } slice = {.size = sizeof slice}; /* the C library has no call for it */
    if (syscall(SYS_sched_getattr, 0, &slice, sizeof slice, 0) == 0 &&
        slice.policy == SCHED_OTHER) {
        slice.runtime = ns;
        syscall(SYS_sched_setattr, 0, &slice, 0);
    }
}

_Noreturn void os_exit(int status)
{
    for (;;)
        syscall(SYS_exit_group, status);
}

void os_end_with_parent(int sig)
{
    prctl(PR_SET_PDEATHSIG, sig);
}

static void read_link(const char *path, char *out, size_t size)
{
    ssize_t n = readlink(path, out, size - 1);
    out[n > 0 ? n : 0] = 0;
}

void os_program(char *out, size_t size)
{
    read_link("/proc/self/exe", out, size);
}

void os_run_self(char **argv)
{
    execv("/proc/self/exe", argv);
}

void os_network_name(char *out, size_t size)
{
    char host[64] = "", boot[64] = "", net[64] = "";
    gethostname(host, sizeof host - 1);
    FILE *f = fopen("/proc/sys/kernel/random/boot_id", "re");
    if (f && !fgets(boot, sizeof boot, f))
        boot[0] = 0;
    if (f)
        fclose(f);
    read_link("/proc/self/ns/net", net, sizeof net);
    snprintf(out, size, "%s %s %s", host, boot, net);
}

int os_open_direct(int fd)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d",
             fd); /* the same file, even if its name has another by now */
    return open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
}

bool os_reserve_file(int fd, off_t bytes)
{
    return fallocate(fd, 0, 0, bytes) == 0;
}

void os_read_in_order(int fd)
{
    posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
}

void os_forget_range(int fd, off_t from, off_t bytes)
{
    posix_fadvise(fd, from, bytes, POSIX_FADV_DONTNEED);
}

struct timespec os_file_time(const struct stat *st)
{
    return st->st_mtim;
}

int os_socket(int family, int type, int protocol, bool blocks)
{
    return socket(family, type | SOCK_CLOEXEC | (blocks ? 0 : SOCK_NONBLOCK), protocol);
}

int os_accept(int listener)
{
    return accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
}

bool os_pipe(int ends[2])
{
    return pipe2(ends, O_CLOEXEC) == 0;
}

ssize_t os_send(int fd, const void *data, size_t n, bool waits)
{
    return send(fd, data, n, MSG_NOSIGNAL | (waits ? 0 : MSG_DONTWAIT));
}

ssize_t os_send_parts(int fd, struct iovec *parts, int n)
{
    struct msghdr all = {.msg_iov = parts, .msg_iovlen = (size_t)n};
    return sendmsg(fd, &all, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void os_keep_alive(int fd, int idle_s, int interval_s, int count)
{
    int one = 1;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

void os_cond_init(pthread_cond_t *c)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
}

int os_cond_wait_until(pthread_cond_t *c, pthread_mutex_t *m, int64_t until_ns)
{
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    return pthread_cond_timedwait(c, m, &until);
}

void os_sort(void *list, size_t n, size_t size, int (*compare)(const void *, const void *, void *),
             void *with)
{
    qsort_r(list, n, size, compare, with);
}

void os_sincos(double x, double *sine, double *cosine)
{
    sincos(x, sine, cosine);
}

void os_bound_heap(int n_arenas)
{
#ifdef __GLIBC__
    if (n_arenas)
        mallopt(M_ARENA_MAX, n_arenas);
    mallopt(M_MMAP_THRESHOLD, 256 << 10);
    mallopt(M_TRIM_THRESHOLD, 1 << 20);
#else
    (void)n_arenas;
#endif
}

void os_trim_heap(void)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
}
