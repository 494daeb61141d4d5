/*
 * A shared object for LD_PRELOAD that makes the k-th allocation, read, write, accept or thread start of
 * a program fail, once. The file named by STEEL_FAULTS is shared with the test, which says what should
 * fail and reads how far it got, at any time. Counting starts with main: what the loader does is not
 * ours. Descriptors that only the program itself uses (eventfds, its pipe for signals) never fail in
 * earnest and are left alone.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { ALLOC, READ, WRITE, ACCEPT, THREAD, N_KINDS };

struct control {
    atomic_int kind;           /* what fails */
    atomic_int at;             /* which one, from 1; 0 = none */
    atomic_int row;            /* and so many after it */
    atomic_int n_failed;       /* since the test set this to 0 */
    atomic_int count[N_KINDS]; /* since the test set these to 0 */
};

static struct control *control;

static bool fails(enum kind kind)
{
    struct control *c = control;
    if (!c)
        return false;
    int n = atomic_fetch_add(&c->count[kind], 1) + 1;
    int at = atomic_load(&c->at);
    if (atomic_load(&c->kind) != (int)kind || !at || n < at || n > at + atomic_load(&c->row))
        return false;
    atomic_fetch_add(&c->n_failed, 1);
    return true;
}

#define REAL(name, type) ((type)dlsym(RTLD_NEXT, #name))

/* What is asked for before main comes from here and stays: looking the real functions up may itself
 * allocate, and a sanitizer that starts up must not be asked yet. */
static _Alignas(64) char early[4 << 20];
static atomic_size_t n_early;
static bool started;

static void *(*real_malloc)(size_t);
static void *(*real_calloc)(size_t, size_t);
static void *(*real_realloc)(void *, size_t);
static int (*real_posix_memalign)(void **, size_t, size_t);
static void (*real_free)(void *);

static void find_heap(void)
{
    real_malloc = REAL(malloc, void *(*)(size_t));
    real_calloc = REAL(calloc, void *(*)(size_t, size_t));
    real_realloc = REAL(realloc, void *(*)(void *, size_t));
    real_posix_memalign = REAL(posix_memalign, int (*)(void **, size_t, size_t));
    real_free = REAL(free, void (*)(void *));
    started = true;
}

/* The size stands before the block. */
static void *early_alloc(size_t bytes)
{
    size_t at = atomic_fetch_add(&n_early, (bytes + 127) & ~(size_t)63) + 64;
    if (at + bytes > sizeof early)
        return NULL;
    memcpy(early + at - sizeof bytes, &bytes, sizeof bytes);
    return early + at;
}

static bool is_early(const void *p)
{
    return (const char *)p >= early && (const char *)p < early + sizeof early;
}

void *malloc(size_t n)
{
    if (!started)
        return early_alloc(n);
    return fails(ALLOC) ? (errno = ENOMEM, NULL) : real_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    if (!started)
        return early_alloc(n * size);
    return fails(ALLOC) ? (errno = ENOMEM, NULL) : real_calloc(n, size);
}

void *realloc(void *p, size_t n)
{
    if (p && is_early(p)) {
        size_t old;
        memcpy(&old, (char *)p - sizeof old, sizeof old);
        void *q = malloc(n);
        return q ? memcpy(q, p, old < n ? old : n) : NULL;
    }
    if (!started)
        return early_alloc(n);
    return fails(ALLOC) ? (errno = ENOMEM, NULL) : real_realloc(p, n);
}

int posix_memalign(void **p, size_t align, size_t n)
{
    if (!started)
        return align <= 64 && (*p = early_alloc(n)) ? 0 : ENOMEM;
    return fails(ALLOC) ? ENOMEM : real_posix_memalign(p, align, n);
}

void free(void *p)
{
    if (p && !is_early(p) && started)
        real_free(p);
}

void *mmap(void *addr, size_t n, int prot, int flags, int fd, off_t at)
{
    static void *(*real)(void *, size_t, int, int, int, off_t);
    if (!real)
        real = REAL(mmap, void *(*)(void *, size_t, int, int, int, off_t));
    return fails(ALLOC) ? (errno = ENOMEM, MAP_FAILED) : real(addr, n, prot, flags, fd, at);
}

/* Files, terminals, pipes and connections can fail; what a process tells itself does not. */
static bool can_fail(int fd)
{
    int saved = errno;
    struct stat st;
    struct sockaddr_storage a;
    socklen_t n = sizeof a;
    bool yes = fstat(fd, &st) == 0 && (st.st_mode & S_IFMT) != 0;
    if (yes && S_ISSOCK(st.st_mode))
        yes = getsockname(fd, (struct sockaddr *)&a, &n) == 0 && a.ss_family != AF_UNIX;
    if (yes && S_ISFIFO(st.st_mode))
        yes = fd <= STDERR_FILENO;
    errno = saved;
    return yes;
}

#define FAILING_IO(kind, name, params, args)                                                       \
    ssize_t name params                                                                            \
    {                                                                                              \
        static ssize_t(*real) params;                                                              \
        if (!real)                                                                                 \
            real = REAL(name, ssize_t(*) params);                                                  \
        return can_fail(fd) && fails(kind) ? (errno = EIO, -1) : real args;                        \
    }

FAILING_IO(READ, read, (int fd, void *p, size_t n), (fd, p, n))
FAILING_IO(READ, pread, (int fd, void *p, size_t n, off_t at), (fd, p, n, at))
FAILING_IO(READ, pread64, (int fd, void *p, size_t n, off_t at), (fd, p, n, at))
FAILING_IO(READ, readv, (int fd, const struct iovec *v, int n), (fd, v, n))
FAILING_IO(READ, recv, (int fd, void *p, size_t n, int flags), (fd, p, n, flags))
FAILING_IO(WRITE, write, (int fd, const void *p, size_t n), (fd, p, n))
FAILING_IO(WRITE, writev, (int fd, const struct iovec *v, int n), (fd, v, n))
FAILING_IO(WRITE, send, (int fd, const void *p, size_t n, int flags), (fd, p, n, flags))
FAILING_IO(WRITE, sendmsg, (int fd, const struct msghdr *m, int flags), (fd, m, flags))

int accept4(int fd, struct sockaddr *a, socklen_t *n, int flags)
{
    static int (*real)(int, struct sockaddr *, socklen_t *, int);
    if (!real)
        real = REAL(accept4, int (*)(int, struct sockaddr *, socklen_t *, int));
    return fails(ACCEPT) ? (errno = EMFILE, -1) : real(fd, a, n, flags);
}

int accept(int fd, struct sockaddr *a, socklen_t *n)
{
    return accept4(fd, a, n, 0);
}

int pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (!real)
        real = REAL(pthread_create,
                    int (*)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *));
    return fails(THREAD) ? EAGAIN : real(t, attr, fn, arg);
}

static int (*real_main)(int, char **, char **);

static int counted_main(int argc, char **argv, char **env)
{
    find_heap();
    const char *path = getenv("STEEL_FAULTS");
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd >= 0) {
        void *p = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        control = p == MAP_FAILED ? NULL : p;
    }
    return real_main(argc, argv, env);
}

int __libc_start_main(int (*main_fn)(int, char **, char **), int argc, char **argv,
                      void (*init)(void), void (*fini)(void), void (*end)(void), void *stack);
int __libc_start_main(int (*main_fn)(int, char **, char **), int argc, char **argv,
                      void (*init)(void), void (*fini)(void), void (*end)(void), void *stack)
{
    typeof(&__libc_start_main) real = REAL(__libc_start_main, typeof(&__libc_start_main));
    real_main = main_fn;
    return real(counted_main, argc, argv, init, fini, end, stack);
}
