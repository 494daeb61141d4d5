/* The SIGBUS handler and its fixed table of watched maps. Every field that the handler reads is
 * atomic, because a signal handler takes no lock. An entry is in use while `from` is set; it is set
 * last. */
#include "file/filemap.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_WATCHES = 4096 };

static struct watch {
    _Atomic uintptr_t from; /* 0 = unused */
    _Atomic size_t bytes;
    atomic_int fd;
    atomic_bool damaged;
} watches[MAX_WATCHES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction before;
static bool installed;
static uintptr_t page_size;

/* Maps zeros over the rest of the file beyond its end, or over a single page after a disk error. */
static bool cover(struct watch *w, uintptr_t from, uintptr_t at)
{
    struct stat st;
    uintptr_t page = at / page_size * page_size, end = from + atomic_load(&w->bytes);
    bool ended = fstat(atomic_load(&w->fd), &st) == 0 && page - from >= (uintptr_t)st.st_size;
    size_t n = ended ? (end - page + page_size - 1) / page_size * page_size : page_size;
    atomic_store(&w->damaged, true);
    return mmap((void *)page, n, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) !=
           MAP_FAILED;
}

static void on_bus(int sig, siginfo_t *info, void *context)
{
    (void)sig, (void)context;
    int saved = errno;
    uintptr_t at = (uintptr_t)info->si_addr;
    for (int i = 0; i < MAX_WATCHES; i++) {
        uintptr_t from = atomic_load(&watches[i].from);
        if (from && at >= from && at - from < atomic_load(&watches[i].bytes) &&
            cover(&watches[i], from, at)) {
            errno = saved;
            return;
        }
    }
    sigaction(SIGBUS, &before, NULL); /* the access is retried and meets the earlier handler */
    errno = saved;
}

static void install(void)
{
    if (installed)
        return;
    page_size = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction act = {.sa_sigaction = on_bus, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigemptyset(&act.sa_mask);
    installed = sigaction(SIGBUS, &act, &before) == 0;
}

int filemap_watch(const void *p, size_t bytes, int fd)
{
    int found = -1;
    pthread_mutex_lock(&lock);
    install();
    for (int i = 0; i < MAX_WATCHES && found < 0; i++)
        if (!atomic_load(&watches[i].from))
            found = i;
    if (found >= 0) {
        struct watch *w = &watches[found];
        atomic_store(&w->bytes, bytes);
        atomic_store(&w->fd, fd);
        atomic_store(&w->damaged, false);
        atomic_store(&w->from, (uintptr_t)p);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

void filemap_unwatch(int watch)
{
    if (watch >= 0)
        atomic_store(&watches[watch].from, 0);
}

bool filemap_is_damaged(int watch)
{
    return watch >= 0 && atomic_load(&watches[watch].damaged);
}
