/* The workers and their queue. See the invariants in jobs.h. */
#include "server/http/jobs.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"

#include <pthread.h>

enum { SPARE = 2, MAX_THREADS = 16 }; /* SPARE: extra threads, for short jobs that turn long */

struct jobs {
    pthread_mutex_t lock;
    pthread_cond_t wake;
    pthread_t threads[MAX_THREADS];
    struct job *running[MAX_THREADS]; /* by thread */
    int n_threads;
    int n_long, n_each, n_short;
    void (*run)(struct job *);
    int fd;
    struct job *waiting, *finished;
    bool stop, trim;
};

struct jobs_count jobs_count(struct jobs *q)
{
    struct jobs_count n = {0};
    pthread_mutex_lock(&q->lock);
    for (const struct job *j = q->waiting; j; j = j->next)
        n.waiting++;
    for (int i = 0; i < q->n_threads; i++)
        if (q->running[i])
            ++*(q->running[i]->is_long ? &n.running_long : &n.running_short);
    pthread_mutex_unlock(&q->lock);
    return n;
}

/* Removes and returns the first job by turn that may start now, or NULL. Call it under lock. */
static struct job *take(struct jobs *q)
{
    int n_long = 0, n_short = 0;
    for (int i = 0; i < q->n_threads; i++)
        if (q->running[i])
            ++*(q->running[i]->is_long ? &n_long : &n_short);
    for (struct job **at = &q->waiting; *at; at = &(*at)->next) {
        struct job *j = *at;
        int own = 0;
        for (int i = 0; j->is_long && i < q->n_threads; i++)
            own += q->running[i] && q->running[i]->is_long && q->running[i]->client == j->client;
        if (j->is_long ? n_long < q->n_long && own < q->n_each : n_short < q->n_short) {
            *at = j->next;
            return j;
        }
    }
    return NULL;
}

/* Under lock. */
static void finish(struct jobs *q, struct job *j)
{
    j->next = q->finished;
    q->finished = j;
    os_wake(q->fd);
}

static void *worker_main(void *arg)
{
    struct jobs *q = arg;
    os_name_thread("steel-worker");
    pthread_mutex_lock(&q->lock);
    int me = 0;
    while (!pthread_equal(q->threads[me], pthread_self()))
        me++;
    while (!q->stop) {
        struct job *j = take(q);
        if (j) {
            q->running[me] = j;
            j->started_ns = clock_ns();
            pthread_mutex_unlock(&q->lock);
            q->run(j);
            pthread_mutex_lock(&q->lock);
            q->running[me] = NULL;
            finish(q, j);
            pthread_cond_signal(&q->wake); /* another job may start now */
        } else if (q->trim) {
            q->trim = false;
            pthread_mutex_unlock(&q->lock);
            os_trim_heap();
            pthread_mutex_lock(&q->lock);
        } else {
            pthread_cond_wait(&q->wake, &q->lock);
        }
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

struct jobs *jobs_new(int n_long, int n_each, int n_short, void (*run)(struct job *), int fd)
{
    struct jobs *q = mem_zalloc(1, sizeof *q);
    q->n_long = n_long;
    q->n_each = n_each;
    q->n_short = n_short;
    q->run = run;
    q->fd = fd;
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->wake, NULL);
    int want = n_long + n_short + (n_short ? SPARE : 0);
    want = want < MAX_THREADS ? want : MAX_THREADS;
    pthread_mutex_lock(&q->lock); /* new threads look up their own entry */
    while (q->n_threads < want && !pthread_create(&q->threads[q->n_threads], NULL, worker_main, q))
        q->n_threads++;
    pthread_mutex_unlock(&q->lock);
    if (q->n_threads == want)
        return q;
    jobs_stop(q);
    jobs_free(q);
    return NULL;
}

void jobs_add(struct jobs *q, struct job *job, int64_t now_ns)
{
    job->is_long = job->bytes > JOB_SHORT_BYTES;
    job->started_ns = 0;
    job->turn = now_ns;
    pthread_mutex_lock(&q->lock);
    for (int i = 0; i < q->n_threads; i++) {
        const struct job *j = q->running[i];
        if (j && j->client == job->client && j->turn > job->turn)
            job->turn = j->turn;
    }
    for (const struct job *j = q->waiting; j; j = j->next)
        if (j->client == job->client && j->turn > job->turn)
            job->turn = j->turn;
    job->turn += (int64_t)job->bytes * JOB_NS_A_BYTE;
    struct job **at = &q->waiting;
    while (*at && (*at)->turn <= job->turn)
        at = &(*at)->next;
    job->next = *at;
    *at = job;
    pthread_cond_signal(&q->wake);
    pthread_mutex_unlock(&q->lock);
}

bool jobs_remove(struct jobs *q, struct job *job)
{
    pthread_mutex_lock(&q->lock);
    struct job **at = &q->waiting;
    while (*at && *at != job)
        at = &(*at)->next;
    bool found = *at != NULL;
    if (found)
        *at = job->next;
    pthread_mutex_unlock(&q->lock);
    return found;
}

struct job *jobs_finished(struct jobs *q)
{
    pthread_mutex_lock(&q->lock);
    struct job *list = q->finished;
    q->finished = NULL;
    pthread_mutex_unlock(&q->lock);
    return list;
}

bool jobs_check(struct jobs *q, int64_t now_ns)
{
    bool any = false;
    pthread_mutex_lock(&q->lock);
    for (int i = 0; i < q->n_threads; i++) {
        struct job *j = q->running[i];
        any |= j != NULL;
        if (j && !j->is_long && now_ns - j->started_ns > JOB_SHORT_MS * 1000000LL) {
            j->is_long = true;
            pthread_cond_signal(&q->wake);
        }
    }
    any |= q->waiting != NULL;
    pthread_mutex_unlock(&q->lock);
    return any;
}

void jobs_trim(struct jobs *q)
{
    pthread_mutex_lock(&q->lock);
    q->trim = true;
    pthread_cond_signal(&q->wake);
    pthread_mutex_unlock(&q->lock);
}

void jobs_stop(struct jobs *q)
{
    if (!q)
        return;
    pthread_mutex_lock(&q->lock);
    q->stop = true;
    pthread_cond_broadcast(&q->wake);
    pthread_mutex_unlock(&q->lock);
    for (int i = 0; i < q->n_threads; i++)
        pthread_join(q->threads[i], NULL);
    q->n_threads = 0;
    while (q->waiting) {
        struct job *j = q->waiting;
        q->waiting = j->next;
        finish(q, j);
    }
}

void jobs_free(struct jobs *q)
{
    if (!q)
        return;
    pthread_mutex_destroy(&q->lock);
    pthread_cond_destroy(&q->wake);
    mem_free(q);
}
