/*
 * Connections while memory runs out: every allocation of the server's thread, libevent's included,
 * fails once, one after the other. Whatever fails, a client gets a whole reply or sees that it has
 * none, and the next client is served.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/buf.h"
#include "base/mem.h"
#include "server/http/http.h"

#include <arpa/inet.h>
#include <errno.h>
#include <event2/event.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

void *__real_malloc(size_t n);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *p, size_t n);

enum { FOR_GOOD = 300, NEVER = -1000000 }; /* allocations */

static _Thread_local bool faulty; /* this thread's allocations may fail */
static atomic_int countdown;      /* 1: the next one fails; 0 or less: none */
static atomic_bool for_good;      /* and those after it */
static atomic_int n_failed;

static bool fails(void)
{
    if (!faulty)
        return false;
    int left = atomic_fetch_sub(&countdown, 1);
    if (left != 1 && !(left < 1 && left > -FOR_GOOD && atomic_load(&for_good)))
        return false;
    atomic_fetch_add(&n_failed, 1);
    return true;
}

void *__wrap_malloc(size_t n)
{
    return fails() ? NULL : __real_malloc(n);
}

void *__wrap_calloc(size_t n, size_t size)
{
    return fails() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *p, size_t n)
{
    return fails() ? NULL : __real_realloc(p, n);
}

/* The server: /whole and /stream answer with PATTERN, /late too, but not from the handler. */

enum { REPLY = 150000 };
static char pattern[REPLY];
static struct http *http;
static struct event_base *base;
static int stop_pipe[2];
static atomic_int n_open; /* exchanges that were handed over and have not ended */

static bool on_head(void *arg, struct http_exchange *x)
{
    (void)arg;
    if (strcmp(http_request(x)->path, "/closed"))
        return true;
    http_add_header(x, "X-Why", "closed");
    http_reply(x, 401, "text/plain", "no\n", 3);
    return false;
}

static void on_refuse(void *arg, struct http_exchange *x, int status, const char *why)
{
    (void)arg;
    http_reply(x, status, "text/plain", why, strlen(why));
}

struct late {
    struct http_exchange *x;
    struct event *timer;
    size_t sent;
};

static void late_end(struct late *l)
{
    atomic_fetch_sub(&n_open, 1);
    event_free(l->timer);
    free(l);
}

static void late_closed(void *user)
{
    late_end(user);
}

static void late_drained(void *user)
{
    (void)user;
}

static void on_late(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what;
    struct late *l = arg;
    struct http_exchange *x = l->x;
    if (l->sent == 0)
        http_stream_start(x, 200, "text/plain");
    size_t n = REPLY - l->sent < 10000 ? REPLY - l->sent : 10000;
    http_stream(x, pattern + l->sent, n);
    l->sent += n;
    if (l->sent < REPLY) {
        faulty = false; /* the test's own timer */
        event_add(l->timer, &(struct timeval){0, 100});
        faulty = true;
        return;
    }
    http_watch(x, NULL, NULL, NULL);
    late_end(l);
    http_stream_end(x);
}

static void on_request(void *arg, struct http_exchange *x)
{
    (void)arg;
    size_t n;
    bool was = faulty;
    faulty = false; /* the copy of an empty body is the test's own */
    char *body = http_take_body(x, &n);
    faulty = was;
    const char *path = http_request(x)->path;
    bool wrong = n && (n != REPLY || memcmp(body, pattern, n));
    mem_free(body);
    if (wrong) {
        http_reply(x, 400, "text/plain", "wrong body\n", 11);
    } else if (!strcmp(path, "/stream")) {
        http_stream_start(x, 200, "text/plain");
        for (size_t at = 0; at < REPLY; at += 5000)
            http_stream(x, pattern + at, 5000);
        http_stream_end(x);
    } else if (!strcmp(path, "/late")) {
        faulty = false;
        struct late *l = calloc(1, sizeof *l);
        l->x = x;
        l->timer = evtimer_new(base, on_late, l);
        event_add(l->timer, &(struct timeval){0, 100});
        faulty = true;
        atomic_fetch_add(&n_open, 1);
        http_watch(x, l, late_closed, late_drained);
    } else {
        http_add_header(x, "X-Test", "1");
        http_reply(x, 200, "text/plain", pattern, REPLY);
    }
}

static void on_stop(evutil_socket_t fd, short what, void *arg)
{
    (void)fd, (void)what, (void)arg;
    event_base_loopbreak(base);
}

static void *server_main(void *arg)
{
    (void)arg;
    faulty = true;
    event_base_dispatch(base);
    faulty = false;
    return NULL;
}

/* The client. */

static int dial(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct timeval wait = {30, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
    assert_int_equal(connect(fd, (struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

/* Sends what the server takes, and gets what comes; false: it was reset. */
static bool talk(int port, const struct buf *request, struct buf *reply)
{
    int fd = dial(port);
    for (size_t at = 0; at < request->len;) {
        ssize_t n = send(fd, request->p + at, request->len - at, MSG_NOSIGNAL);
        if (n <= 0)
            break;
        at += (size_t)n;
    }
    char piece[16384];
    ssize_t n;
    while ((n = recv(fd, piece, sizeof piece, 0)) > 0)
        buf_add(reply, piece, (size_t)n);
    int why = errno;
    close(fd);
    assert_false(n < 0 && why == EAGAIN); /* nobody hangs */
    return n == 0;
}

/* The body of a complete reply, or false. */
static bool body_of(const struct buf *reply, int *status, struct buf *body)
{
    const char *end = reply->len ? strstr(reply->p, "\r\n\r\n") : NULL, *v;
    if (!end || sscanf(reply->p, "HTTP/1.1 %d", status) != 1)
        return false;
    const char *p = end + 4;
    size_t left = reply->len - (size_t)(p - reply->p);
    if ((v = strcasestr(reply->p, "Content-Length: ")) && v < end) {
        size_t n = strtoul(v + 16, NULL, 10);
        buf_add(body, p, left < n ? left : n);
        return left >= n;
    }
    struct http_chunks c = {0};
    size_t used;
    return http_chunks_feed(&c, p, left, SIZE_MAX / 2, body, &used) == CHUNKS_DONE;
}

static void make_request(struct buf *out, const char *path, int kind)
{
    buf_addf(out, "%s %s HTTP/1.1\r\nHost: a\r\nConnection: close\r\n", kind ? "POST" : "GET",
             path);
    if (kind == 0) {
        buf_adds(out, "\r\n");
    } else if (kind == 1) {
        buf_addf(out, "Content-Length: %d\r\n\r\n", REPLY);
        buf_add(out, pattern, REPLY);
    } else {
        buf_adds(out, "Transfer-Encoding: chunked\r\n\r\n");
        for (size_t at = 0; at < REPLY; at += 3000) {
            buf_adds(out, "bb8\r\n");
            buf_add(out, pattern + at, 3000);
            buf_adds(out, "\r\n");
        }
        buf_adds(out, "0\r\n\r\n");
    }
}

/* 200 with the right body, 0 for none, or the status of a complete error. */
static int ask(int port, const char *path, int kind)
{
    struct buf request = {0}, reply = {0}, body = {0};
    int status = 0;
    make_request(&request, path, kind);
    talk(port, &request, &reply);
    bool whole = body_of(&reply, &status, &body);
    if (whole && status == 200)
        assert_true(body.len == REPLY && !memcmp(body.p, pattern, REPLY));
    buf_clear(&request);
    buf_clear(&reply);
    buf_clear(&body);
    return whole ? status : 0;
}

static void test_every_allocation(void **state)
{
    (void)state;
    static const struct {
        const char *path;
        int kind, status;
    } cases[] = {{"/whole", 1, 200}, {"/stream", 0, 200}, {"/late", 2, 200}, {"/closed", 1, 401}};
    for (int i = 0; i < REPLY; i++)
        pattern[i] = (char)('a' + i * 7 % 23);
    event_set_mem_functions(malloc, realloc, free);
    base = event_base_new();
    assert_int_equal(pipe(stop_pipe), 0);
    struct event *stop = event_new(base, stop_pipe[0], EV_READ, on_stop, NULL);
    event_add(stop, NULL);
    struct http_options opt = {.host = "127.0.0.1",
                               .max_body = 1 << 20,
                               .max_buffered = 8 << 20,
                               .max_conns = 16,
                               .idle_s = 1,
                               .read_s = 1,
                               .write_s = 1,
                               .admit = on_head,
                               .handler = on_request,
                               .refuse = on_refuse};
    struct error err;
    http = http_open(base, &opt, &err);
    assert_non_null(http);
    int port = http_port(http);
    pthread_t thread;
    atomic_store(&countdown, NEVER);
    assert_int_equal(pthread_create(&thread, NULL, server_main, NULL), 0);
    int n_whole = 0, n_error = 0, n_none = 0;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (int good = 0; good < 2; good++) {
            assert_int_equal(ask(port, cases[c].path, cases[c].kind), cases[c].status);
            for (int k = 1;; k++) {
                atomic_store(&n_failed, 0);
                atomic_store(&for_good, good);
                atomic_store(&countdown, k);
                int status = ask(port, cases[c].path, cases[c].kind);
                atomic_store(&countdown, NEVER);
                ++*(status == cases[c].status ? &n_whole : status ? &n_error : &n_none);
                assert_true(status == 0 || status == cases[c].status || status == 503);
                if (!atomic_load(&n_failed))
                    break;
                assert_true(k < 2000);
            }
            /* It is well again, once the connections that were cut off have ended on its side, too. */
            int status = ask(port, cases[c].path, cases[c].kind);
            for (int tries = 0; status == 503 && tries < 100; tries++) {
                usleep(50000);
                status = ask(port, cases[c].path, cases[c].kind);
            }
            assert_int_equal(status, cases[c].status);
        }
    printf("%d replies whole, %d said 503, %d cut off\n", n_whole, n_error, n_none);
    assert_true(n_whole > 0 && n_none > 0);
    assert_int_equal(write(stop_pipe[1], "x", 1), 1);
    pthread_join(thread, NULL);
    http_close(http);
    assert_int_equal(http ? atomic_load(&n_open) : 1, 0);
    event_free(stop);
    event_base_free(base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_every_allocation)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
