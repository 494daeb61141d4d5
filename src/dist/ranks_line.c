/* Lines from each rank to rank 0, and the thread that watches them: see ranks_line.h. Owns the thread.
 *
 * All members of struct ranks_line are protected by its lock, except those marked as the thread's. */
#include "dist/ranks_line.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    BEAT_MS = 500,
    REPORT_MS =
        500, /* rank 0's main thread has this long to report the reason; launchers wait a second */
    STDERR_MS = 500,   /* for stderr to become writable */
    CONNECT_MS = 2000, /* for an address to accept, or for a client to identify itself */
    VISITORS = 64,     /* clients that have not identified themselves yet */
};
#define SECOND 1000000000LL

enum { FRAME_BEAT, FRAME_BYE, FRAME_WHY };

struct frame {
    uint8_t kind, busy;
    uint16_t timeout_s; /* from rank 0; the others adopt it */
    char text[508];
};

struct hello {
    uint64_t key[2];
    int32_t rank, unused;
};

struct peer {
    int fd;    /* -1: none */
    bool bye;  /* it ends normally */
    bool told; /* it ends with an error, which it has reported or will report */
    int64_t heard_ns, busy_ns;
    struct frame in;
    size_t have;
};

struct visitor {
    int fd;
    int64_t until_ns;
    struct hello in;
    size_t have;
};

struct ranks_line {
    struct ranks *r;
    pthread_t thread;
    pthread_mutex_t lock;
    int wake; /* os_wake_fd */
    bool quit;
    int rank; /* a copy of r->rank, which is known only after the thread has started */
    int listener;
    uint64_t key[2];
    int n_peers;
    struct peer peers[RANKS_MOST]; /* by rank; only [0] on ranks other than 0 */
    struct visitor visitors[VISITORS];
    struct pollfd polled[RANKS_MOST + VISITORS + 2]; /* the thread's */
    int64_t beat_ns;                                 /* time of the next beat */
    int64_t seen_ns;                                 /* when the thread last ran */
    int64_t lost_ns; /* when the thread noticed that the job is lost; 0 = it is not */
    int64_t end_ns;  /* when to end the process; 0 = never */
    const char *end_why;
    unsigned last_done; /* r->done at the last beat */
    bool busy;          /* as of the last beat */
};

void ranks_line_wake(struct ranks_line *l)
{
    os_wake(l->wake);
}

static void report(const char *why)
{
    char line[1200];
    int n = snprintf(line, sizeof line, "steel: %s\n", why);
    struct pollfd room = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&room, 1, STDERR_MS) != 1) /* nobody reads stderr */
        return;
    ssize_t done =
        write(STDERR_FILENO, line, (size_t)n); /* a hung thread may hold the lock of stdio */
    (void)done;
}

static void hang_up(struct peer *p)
{
    close(p->fd);
    p->fd = -1;
}

static void send_frame(struct ranks_line *l, struct peer *p, int kind, const char *text)
{
    struct frame f = {.kind = (uint8_t)kind,
                      .busy = l->busy,
                      .timeout_s = (uint16_t)atomic_load(&l->r->timeout_s)};
    if (text)
        snprintf(f.text, sizeof f.text, "%s", text);
    /* If the socket's buffer is full, the peer does not read, and the beat may be dropped. */
    ssize_t n = p->fd < 0 ? 0 : os_send(p->fd, &f, sizeof f, false);
    (void)n;
}

/* A peer is lost. If it is rank 0, rank 1 reports it to the user instead. */
static void lose_peer(struct ranks_line *l, int rank, const char *how)
{
    bool first = ranks_lose(l->r, "rank %d %s", rank, how);
    if (first && l->rank == 1 && !l->peers[0].told)
        report(l->r->lost.msg);
}

static void take_frame(struct ranks_line *l, int rank, struct peer *p)
{
    struct frame *f = &p->in;
    f->text[sizeof f->text - 1] = 0;
    p->heard_ns = clock_ns();
    if (f->busy)
        p->busy_ns = p->heard_ns;
    if (l->rank > 0 && f->timeout_s)
        atomic_store(&l->r->timeout_s, f->timeout_s);
    p->bye |= f->kind == FRAME_BYE;
    p->told |= f->kind == FRAME_WHY;
    if (f->kind == FRAME_WHY && rank > 0)
        ranks_lose(l->r, "%s", f->text);
}

/* Receives a peer's frames. A connection that closes without FRAME_BYE loses the job. */
static void receive(struct ranks_line *l, int rank, struct peer *p)
{
    while (p->fd >= 0) {
        ssize_t n = recv(p->fd, (char *)&p->in + p->have, sizeof p->in - p->have, MSG_DONTWAIT);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n <= 0) {
            hang_up(p);
            if (!p->bye)
                lose_peer(l, rank, "has ended");
            return;
        }
        p->have += (size_t)n;
        if (p->have == sizeof p->in) {
            p->have = 0;
            take_frame(l, rank, p);
        }
    }
}

static void drop_visitor(struct visitor *v)
{
    close(v->fd);
    v->fd = -1;
}

/* A free visitor slot. NULL: all are taken by clients that have not identified themselves yet. */
static struct visitor *free_slot(struct ranks_line *l)
{
    for (int i = 0; i < VISITORS; i++)
        if (l->visitors[i].fd < 0)
            return &l->visitors[i];
    return NULL;
}

static void accept_visitor(struct ranks_line *l)
{
    struct visitor *v = free_slot(l);
    int fd = v ? os_accept(l->listener) : -1;
    if (fd >= 0)
        *v = (struct visitor){.fd = fd, .until_ns = clock_ns() + CONNECT_MS * 1000000LL};
}

/* A client that sends the key becomes a peer; others are disconnected. */
static void check_visitor(struct ranks_line *l, struct visitor *v)
{
    ssize_t n = recv(v->fd, (char *)&v->in + v->have, sizeof v->in - v->have, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    v->have += n > 0 ? (size_t)n : 0;
    if (n > 0 && v->have < sizeof v->in)
        return;
    int rank = v->in.rank, one = 1;
    bool known = n > 0 && !memcmp(v->in.key, l->key, sizeof l->key) && rank > 0 &&
                 rank < l->n_peers && l->peers[rank].fd < 0;
    if (!known) {
        drop_visitor(v);
        return;
    }
    setsockopt(v->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (os_send(v->fd, l->key, sizeof l->key, false) != (ssize_t)sizeof l->key) {
        drop_visitor(v);
        return;
    }
    l->peers[rank].fd = v->fd;
    l->peers[rank].heard_ns = l->peers[rank].busy_ns = clock_ns();
    v->fd = -1;
}

static void serve_visitors(struct ranks_line *l, int64_t now)
{
    if (l->listener >= 0)
        accept_visitor(l);
    for (int i = 0; i < VISITORS; i++) {
        struct visitor *v = &l->visitors[i];
        if (v->fd >= 0)
            check_visitor(l, v);
        if (v->fd >= 0 && (now > v->until_ns || l->listener < 0))
            drop_visitor(v);
    }
}

/* Sends a heartbeat: whether this rank is busy, and from rank 0 whether any rank is. */
static void beat(struct ranks_line *l, int64_t now)
{
    unsigned done = atomic_load(&l->r->done);
    l->busy = !atomic_load(&l->r->waiting) || done != l->last_done;
    l->last_done = done;
    for (int i = 0; l->rank == 0 && i < l->n_peers; i++)
        l->busy |= l->peers[i].fd >= 0 && now - l->peers[i].busy_ns < 2 * BEAT_MS * 1000000LL;
    for (int i = 0; i < l->n_peers; i++)
        send_frame(l, &l->peers[i], FRAME_BEAT, NULL);
    l->beat_ns = now + BEAT_MS * 1000000LL;
}

/* Time during which this thread did not run does not count as a peer's silence. */
static void forgive_pause(struct ranks_line *l)
{
    int64_t now = clock_ns(), away = now - l->seen_ns;
    l->seen_ns = now;
    if (away < RANKS_AWAY_MS * 1000000LL)
        return;
    for (int i = 0; i < l->n_peers; i++) {
        l->peers[i].heard_ns += away;
        l->peers[i].busy_ns += away;
    }
}

static void serve_peers(struct ranks_line *l)
{
    for (int i = 0; i < l->n_peers; i++)
        receive(l, i, &l->peers[i]);
    int64_t now = clock_ns();
    int timeout = atomic_load(&l->r->timeout_s);
    for (int i = 0; i < l->n_peers; i++) {
        const struct peer *p = &l->peers[i];
        char how[64];
        snprintf(how, sizeof how, "has not answered for %d s (--rank-timeout)", timeout);
        if (p->fd >= 0 && !p->bye && now - p->heard_ns > timeout * SECOND)
            lose_peer(l, i, how);
    }
    if (now >= l->beat_ns)
        beat(l, now);
}

/* Ends this process when its time is up and nothing else has ended it. */
static void check_end(struct ranks_line *l, int64_t now)
{
    struct ranks *r = l->r;
    bool lost = atomic_load(&r->stop);
    if (lost && !l->lost_ns) {
        l->lost_ns = now;
        l->end_ns = now + RANKS_LAST * SECOND;
        for (int i = 0; i < l->n_peers; i++) /* the others send it to rank 0, which forwards it */
            send_frame(l, &l->peers[i], FRAME_WHY, r->lost.msg);
    }
    if (lost && l->rank == 0 && !atomic_load(&r->said) &&
        now - l->lost_ns >= REPORT_MS * 1000000LL) {
        report(r->lost.msg);
        os_exit(1);
    }
    if (!l->end_ns || now < l->end_ns)
        return;
    if (!lost &&
        (l->n_peers || ranks_first())) /* without lines only rank 0 reports, or all ranks would */
        report(l->end_why);
    os_exit(1);
}

static int add_polled(struct ranks_line *l, int n, int fd)
{
    if (fd >= 0)
        l->polled[n++] = (struct pollfd){.fd = fd, .events = POLLIN};
    return n;
}

static void *watch(void *arg)
{
    struct ranks_line *l = arg;
    os_name_thread("steel-ranks");
    pthread_mutex_lock(&l->lock);
    while (!l->quit) {
        int n = add_polled(l, 0, l->wake);
        n = add_polled(
            l, n, free_slot(l) ? l->listener : -1); /* without a slot, poll would return at once */
        for (int i = 0; i < VISITORS; i++)
            n = add_polled(l, n, l->visitors[i].fd);
        for (int i = 0; i < l->n_peers; i++)
            n = add_polled(l, n, l->peers[i].fd);
        pthread_mutex_unlock(&l->lock);
        poll(l->polled, (nfds_t)n, BEAT_MS / 4);
        os_woken(l->wake);
        pthread_mutex_lock(&l->lock);
        forgive_pause(l);
        serve_visitors(l, clock_ns());
        serve_peers(l);
        check_end(l, clock_ns());
    }
    pthread_mutex_unlock(&l->lock);
    return NULL;
}

struct ranks_line *ranks_line_new(struct ranks *r)
{
    struct ranks_line *l = mem_zalloc(1, sizeof *l);
    l->r = r;
    l->rank = r->rank;
    l->listener = -1;
    for (int i = 0; i < VISITORS; i++)
        l->visitors[i].fd = -1;
    for (int i = 0; i < RANKS_MOST; i++)
        l->peers[i].fd = -1;
    pthread_mutex_init(&l->lock, NULL);
    l->seen_ns = clock_ns();
    l->end_ns = l->seen_ns + RANKS_START * SECOND;
    l->end_why = "the ranks have not found each other in two minutes";
    l->wake = os_wake_fd();
    /* Signals are handled by the program's other threads. */
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    bool ok = l->wake >= 0 && pthread_create(&l->thread, NULL, watch, l) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (ok)
        return l;
    if (l->wake >= 0)
        close(l->wake);
    pthread_mutex_destroy(&l->lock);
    mem_free(l);
    return NULL;
}

/* Lists the addresses at which other machines may reach this one. */
static void list_addresses(struct ranks_offer *o)
{
    int most = (int)(sizeof o->address / sizeof *o->address);
    const char *named = getenv("STEEL_RANK_ADDRESS");
    struct ifaddrs *list = NULL;
    o->named = named && named[0];
    if (o->named)
        snprintf(o->address[o->n++], sizeof o->address[0], "%s", named);
    else if (getifaddrs(&list) != 0)
        return;
    for (struct ifaddrs *a = list; a && o->n < most; a = a->ifa_next) {
        int family = a->ifa_addr ? a->ifa_addr->sa_family : AF_UNSPEC;
        size_t size = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
        if ((family != AF_INET && family != AF_INET6) || !(a->ifa_flags & IFF_UP) ||
            (a->ifa_flags & IFF_LOOPBACK))
            continue;
        const struct sockaddr_in6 *six = (const void *)a->ifa_addr;
        if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr))
            continue; /* not valid on other machines */
        if (getnameinfo(a->ifa_addr, (socklen_t)size, o->address[o->n], sizeof o->address[0], NULL,
                        0, NI_NUMERICHOST) == 0)
            o->n++;
    }
    freeifaddrs(list);
}

/* A socket that listens at an address, on a port that the system chooses; -1 = failed. */
static int listen_at(const char *host, int *port)
{
    struct addrinfo hint = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
                            .ai_socktype = SOCK_STREAM};
    struct addrinfo *at = NULL;
    union {
        struct sockaddr any;
        struct sockaddr_in four;
        struct sockaddr_in6 six;
    } is = {0};
    socklen_t size = sizeof is;
    int no = 0;
    if (getaddrinfo(host, "0", &hint, &at) != 0)
        return -1;
    int fd = os_socket(at->ai_family, SOCK_STREAM, 0, false);
    if (fd >= 0 && at->ai_family == AF_INET6) /* "::" accepts IPv4 connections, too */
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
    bool ok = fd >= 0 && bind(fd, at->ai_addr, at->ai_addrlen) == 0 &&
              listen(fd, RANKS_MOST) == 0 && getsockname(fd, &is.any, &size) == 0;
    freeaddrinfo(at);
    if (!ok && fd >= 0)
        close(fd);
    *port = ntohs(is.any.sa_family == AF_INET ? is.four.sin_port : is.six.sin6_port);
    return ok ? fd : -1;
}

static void know_rank(struct ranks_line *l)
{
    pthread_mutex_lock(&l->lock);
    l->rank = l->r->rank;
    pthread_mutex_unlock(&l->lock);
}

void ranks_line_listen(struct ranks_line *l, bool nearby, struct ranks_offer *offer)
{
    int port = 0;
    know_rank(l);
    *offer = (struct ranks_offer){0};
    if (!os_random(offer->key, sizeof offer->key))
        return;
    list_addresses(offer);
    int fd = listen_at(!nearby ? "::" : offer->named ? offer->address[0] : "127.0.0.1", &port);
    if (fd < 0 && !nearby)
        fd = listen_at("0.0.0.0", &port);
    offer->port = fd < 0 ? 0 : port;
    pthread_mutex_lock(&l->lock);
    memcpy(l->key, offer->key, sizeof l->key);
    l->n_peers = l->r->size;
    l->listener = fd;
    pthread_mutex_unlock(&l->lock);
    ranks_line_wake(l);
}

static bool wait_socket(int fd, short what)
{
    struct pollfd p = {.fd = fd, .events = what};
    return poll(&p, 1, CONNECT_MS) == 1;
}

/* Connects to rank 0 and checks that it knows the key. -1: failed. */
static int connect_to(const char *host, const struct ranks_offer *offer, int rank)
{
    char port[16];
    struct addrinfo hint = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV,
                            .ai_socktype = SOCK_STREAM};
    struct addrinfo *to = NULL;
    snprintf(port, sizeof port, "%d", (int)offer->port);
    if (getaddrinfo(host, port, &hint, &to) != 0)
        return -1;
    int fd = os_socket(to->ai_family, SOCK_STREAM, 0, false), bad = 0, one = 1;
    socklen_t size = sizeof bad;
    bool ok = fd >= 0 && (connect(fd, to->ai_addr, to->ai_addrlen) == 0 || errno == EINPROGRESS) &&
              wait_socket(fd, POLLOUT) && getsockopt(fd, SOL_SOCKET, SO_ERROR, &bad, &size) == 0 &&
              bad == 0;
    freeaddrinfo(to);
    struct hello me = {.key = {offer->key[0], offer->key[1]}, .rank = rank};
    uint64_t echo[2] = {0};
    ok = ok && setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0 &&
         os_send(fd, &me, sizeof me, true) == (ssize_t)sizeof me && wait_socket(fd, POLLIN) &&
         recv(fd, echo, sizeof echo, 0) == (ssize_t)sizeof echo &&
         !memcmp(echo, offer->key, sizeof echo);
    if (!ok && fd >= 0)
        close(fd);
    return ok ? fd : -1;
}

bool ranks_line_dial(struct ranks_line *l, const struct ranks_offer *offer, bool nearby)
{
    int fd = -1, most = (int)(sizeof offer->address / sizeof *offer->address);
    know_rank(l);
    if (!offer->port)
        return false;
    if (nearby && !offer->named)
        fd = connect_to("127.0.0.1", offer, l->rank);
    for (int i = 0; fd < 0 && i < offer->n && i < most; i++)
        fd = connect_to(offer->address[i], offer, l->rank);
    if (fd < 0)
        return false;
    pthread_mutex_lock(&l->lock);
    l->n_peers = 1;
    l->peers[0].fd = fd;
    l->peers[0].heard_ns = l->peers[0].busy_ns = clock_ns();
    pthread_mutex_unlock(&l->lock);
    ranks_line_wake(l);
    return true;
}

void ranks_line_ready(struct ranks_line *l)
{
    pthread_mutex_lock(&l->lock);
    if (l->listener >= 0)
        close(l->listener);
    l->listener = -1;
    if (!l->lost_ns)
        l->end_ns = 0;
    pthread_mutex_unlock(&l->lock);
}

void ranks_line_limit(struct ranks_line *l, int seconds, const char *why)
{
    pthread_mutex_lock(&l->lock);
    l->end_ns = l->lost_ns ? l->end_ns : clock_ns() + seconds * SECOND;
    l->end_why = why;
    pthread_mutex_unlock(&l->lock);
}

void ranks_line_beat(struct ranks_line *l)
{
    pthread_mutex_lock(&l->lock);
    beat(l, clock_ns());
    pthread_mutex_unlock(&l->lock);
}

bool ranks_line_busy(struct ranks_line *l)
{
    bool busy = false;
    pthread_mutex_lock(&l->lock);
    forgive_pause(l);
    int64_t since = l->seen_ns - atomic_load(&l->r->timeout_s) * SECOND;
    for (int i = 0; i < l->n_peers; i++)
        busy |= l->peers[i].fd >= 0 && l->peers[i].busy_ns > since;
    pthread_mutex_unlock(&l->lock);
    return busy;
}

void ranks_line_tell(struct ranks_line *l, const char *why)
{
    bool open = true;
    pthread_mutex_lock(&l->lock);
    for (int i = 0; i < l->n_peers; i++)
        send_frame(l, &l->peers[i], FRAME_WHY, why);
    pthread_mutex_unlock(&l->lock);
    for (int i = 0; l->rank > 0 && open && i < RANKS_LAST * 100; i++) {
        nanosleep(&(struct timespec){0, 10000000}, NULL);
        pthread_mutex_lock(&l->lock);
        open = l->peers[0].fd >= 0;
        pthread_mutex_unlock(&l->lock);
    }
}

void ranks_line_bye(struct ranks_line *l)
{
    pthread_mutex_lock(&l->lock);
    for (int i = 0; i < l->n_peers; i++)
        send_frame(l, &l->peers[i], FRAME_BYE, NULL);
    pthread_mutex_unlock(&l->lock);
    ranks_line_limit(l, atomic_load(&l->r->timeout_s),
                     "the ranks have not ended together (--rank-timeout)");
}

void ranks_line_free(struct ranks_line *l)
{
    if (!l)
        return;
    pthread_mutex_lock(&l->lock);
    l->quit = true;
    pthread_mutex_unlock(&l->lock);
    ranks_line_wake(l);
    pthread_join(l->thread, NULL);
    for (int i = 0; i < VISITORS; i++)
        if (l->visitors[i].fd >= 0)
            close(l->visitors[i].fd);
    for (int i = 0; i < RANKS_MOST; i++)
        if (l->peers[i].fd >= 0)
            close(l->peers[i].fd);
    if (l->listener >= 0)
        close(l->listener);
    close(l->wake);
    pthread_mutex_destroy(&l->lock);
    mem_free(l);
}
