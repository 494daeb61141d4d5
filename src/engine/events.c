/* The event queue. A record is the struct, then its text, its error and its top list, padded to 8. */
#include "engine/events.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

struct events {
    pthread_mutex_t lock;
    pthread_cond_t arrived;
    struct buf pending; /* delivered, under lock */
    struct buf taken;   /* the reader's; unread from `at` */
    size_t at;
    int fd;
};

struct record {
    size_t size; /* of the whole record, padded */
    struct engine_event ev;
    size_t n_error;
};

struct events *events_new(void)
{
    int fd = os_wake_fd();
    if (fd < 0)
        return NULL;
    struct events *q = mem_zalloc(1, sizeof *q);
    q->fd = fd;
    pthread_mutex_init(&q->lock, NULL);
    os_cond_init(&q->arrived);
    return q;
}

void events_free(struct events *q)
{
    if (!q)
        return;
    pthread_mutex_lock(&q->lock); /* waits until the engine has left events_flush */
    pthread_mutex_unlock(&q->lock);
    pthread_mutex_destroy(&q->lock);
    pthread_cond_destroy(&q->arrived);
    close(q->fd);
    buf_clear(&q->pending);
    buf_clear(&q->taken);
    mem_free(q);
}

int events_fd(const struct events *q)
{
    return q->fd;
}

void events_stage(struct buf *staged, const struct engine_event *ev)
{
    struct record r = {.ev = *ev, .n_error = ev->error ? strlen(ev->error) + 1 : 0};
    size_t top = (size_t)ev->n_top * sizeof *ev->top;
    size_t size = sizeof r + top + ev->n_text + r.n_error;
    r.size = (size + 7) & ~(size_t)7;
    buf_add(staged, &r, sizeof r);
    buf_add(staged, ev->top, top);
    buf_add(staged, ev->text, ev->n_text);
    buf_add(staged, ev->error, r.n_error);
    buf_add(staged, "\0\0\0\0\0\0\0", r.size - size);
}

void events_flush(struct events *q, struct buf *staged)
{
    pthread_mutex_lock(&q->lock);
    bool was_empty = q->pending.len == 0;
    if (was_empty) {
        struct buf empty = q->pending;
        q->pending = *staged;
        *staged = empty;
    } else {
        buf_add(&q->pending, staged->p, staged->len);
    }
    buf_reset(staged);
    if (was_empty && q->pending.len) {
        os_wake(q->fd);
        pthread_cond_signal(&q->arrived);
    }
    pthread_mutex_unlock(&q->lock);
}

/* Waits for events and takes all of them. False: the timeout has passed. */
static bool take(struct events *q, int timeout_ms)
{
    int64_t until = clock_ns() + (int64_t)timeout_ms * 1000000;
    int rc = timeout_ms == 0 ? ETIMEDOUT : 0;
    pthread_mutex_lock(&q->lock);
    while (q->pending.len == 0 && rc == 0)
        rc = timeout_ms < 0 ? pthread_cond_wait(&q->arrived, &q->lock)
                            : os_cond_wait_until(&q->arrived, &q->lock, until);
    struct buf old = q->taken;
    buf_reset(&old);
    q->taken = q->pending;
    q->pending = old;
    q->at = 0;
    os_woken(q->fd); /* all events have been taken */
    pthread_mutex_unlock(&q->lock);
    return q->taken.len > 0;
}

bool events_next(struct events *q, struct engine_event *ev, int timeout_ms)
{
    if (q->at == q->taken.len && !take(q, timeout_ms))
        return false;
    struct record r;
    memcpy(&r, q->taken.p + q->at, sizeof r);
    const char *payload = q->taken.p + q->at + sizeof r;
    *ev = r.ev;
    ev->top = (const void *)payload;
    ev->text = payload + (size_t)ev->n_top * sizeof *ev->top;
    ev->error = r.n_error ? ev->text + ev->n_text : NULL;
    q->at += r.size;
    return true;
}
