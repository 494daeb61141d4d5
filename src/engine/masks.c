/* Masks of constrained rows, in the step and in the background: see masks.h. */
#include "engine/masks.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"

#include <pthread.h>
#include <time.h>

enum { MASK_THREADS = 4 };

struct mask_maker {
    struct pool *pool;      /* of masks_try; NULL until it is needed */
    struct mask_job **jobs; /* of masks_try */
    int64_t until_ns;
    void (*done)(void *arg);
    void *done_arg;
    pthread_t threads[MASK_THREADS];
    int n_threads; /* started at the first job */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* jobs, grants */
    pthread_cond_t left;    /* a thread has let go of a dropped job */
    /* under lock */
    struct mask_job *queue;
    int64_t granted_ns;
    bool quit;
};

static int64_t thread_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000 + t.tv_nsec;
}

static int thread_count(void)
{
    int n = pool_cpu_count();
    return n < MASK_THREADS ? n : MASK_THREADS;
}

struct mask_maker *masks_new(void (*done)(void *arg), void *arg)
{
    struct mask_maker *k = mem_zalloc(1, sizeof *k);
    k->done = done;
    k->done_arg = arg;
    pthread_mutex_init(&k->lock, NULL);
    pthread_cond_init(&k->changed, NULL);
    pthread_cond_init(&k->left, NULL);
    return k;
}

void masks_free(struct mask_maker *k)
{
    if (!k)
        return;
    pthread_mutex_lock(&k->lock);
    CHECK(!k->queue, "a mask is still wanted");
    k->quit = true;
    pthread_cond_broadcast(&k->changed);
    pthread_mutex_unlock(&k->lock);
    for (int i = 0; i < k->n_threads; i++)
        pthread_join(k->threads[i], NULL);
    pool_free(k->pool);
    pthread_mutex_destroy(&k->lock);
    pthread_cond_destroy(&k->changed);
    pthread_cond_destroy(&k->left);
    mem_free(k);
}

/* ---- in the step ---- */

struct mask_try {
    struct mask_maker *k;
    struct mask_job *job;
};

static bool try_goes_on(void *arg)
{
    struct mask_try *t = arg;
    return ++t->job->pieces < t->job->most && clock_ns() < t->k->until_ns;
}

static void try_masks(void *arg, int ith, int first, int last)
{
    (void)ith;
    struct mask_maker *k = arg;
    for (int i = first; i < last; i++) {
        struct mask_job *job = k->jobs[i];
        struct mask_try t = {k, job};
        job->pieces = 0;
        job->cpu_ns = 0;
        if (clock_ns() >= k->until_ns)
            continue;
        int64_t start = thread_ns();
        sampler_prepare_paced(job->sampler, try_goes_on, &t);
        job->cpu_ns = thread_ns() - start;
    }
}

void masks_try(struct mask_maker *k, struct mask_job **jobs, int n, int64_t until_ns)
{
    for (int i = 1; i < n; i++)
        for (int j = i; j > 0 && jobs[j]->used_ns < jobs[j - 1]->used_ns; j--) {
            struct mask_job *swap = jobs[j];
            jobs[j] = jobs[j - 1];
            jobs[j - 1] = swap;
        }
    if (n > 1 && !k->pool)
        k->pool = pool_new(thread_count());
    k->jobs = jobs;
    k->until_ns = until_ns;
    if (n > 1)
        pool_each(k->pool, n, POOL_SINGLE, try_masks, k);
    else
        try_masks(k, 0, 0, n);
}

/* ---- in the background ---- */

struct mask_run {
    struct mask_maker *k;
    struct mask_job *job;
    int64_t last_ns;
};

/* Charges the time since the last call, and waits while the budget is used up. */
static bool run_goes_on(void *arg)
{
    struct mask_run *r = arg;
    struct mask_maker *k = r->k;
    int64_t now = thread_ns(), spent = now - r->last_ns;
    r->job->cpu_ns += spent;
    r->job->pieces++;
    pthread_mutex_lock(&k->lock);
    k->granted_ns -= spent;
    while (k->granted_ns <= 0 && !r->job->dropped && !k->quit)
        pthread_cond_wait(&k->changed, &k->lock);
    bool on = !r->job->dropped && !k->quit;
    pthread_mutex_unlock(&k->lock);
    r->last_ns = thread_ns();
    return on;
}

/* Takes the job whose client has used least. Under the lock. */
static struct mask_job *next_job(struct mask_maker *k)
{
    struct mask_job **best = &k->queue;
    for (struct mask_job **p = &k->queue; *p; p = &(*p)->next)
        best = (*p)->used_ns < (*best)->used_ns ? p : best;
    struct mask_job *job = *best;
    if (job)
        *best = job->next;
    return job;
}

static void *mask_main(void *arg)
{
    struct mask_maker *k = arg;
    pthread_mutex_lock(&k->lock);
    while (!k->quit) {
        struct mask_job *job = k->granted_ns > 0 ? next_job(k) : NULL;
        if (!job) {
            pthread_cond_wait(&k->changed, &k->lock);
            continue;
        }
        job->state = MASK_RUNNING;
        pthread_mutex_unlock(&k->lock);
        struct mask_run run = {k, job, thread_ns()};
        sampler_prepare_paced(job->sampler, run_goes_on, &run);
        int64_t rest = thread_ns() - run.last_ns;
        job->cpu_ns += rest;
        pthread_mutex_lock(&k->lock);
        k->granted_ns -= rest;
        bool dropped = job->dropped;
        job->state = MASK_DONE;
        if (dropped)
            pthread_cond_broadcast(&k->left);
        pthread_mutex_unlock(&k->lock);
        if (!dropped)
            k->done(k->done_arg);
        pthread_mutex_lock(&k->lock);
    }
    pthread_mutex_unlock(&k->lock);
    return NULL;
}

void masks_start(struct mask_maker *k, struct mask_job *job)
{
    int want = thread_count();
    while (k->n_threads < want &&
           pthread_create(&k->threads[k->n_threads], NULL, mask_main, k) == 0)
        k->n_threads++;
    if (!k->n_threads) { /* the system has no thread for it */
        sampler_prepare(job->sampler);
        job->state = MASK_DONE;
        k->done(k->done_arg);
        return;
    }
    pthread_mutex_lock(&k->lock);
    job->state = MASK_QUEUED;
    job->dropped = false;
    job->cpu_ns = 0;
    job->pieces = 0;
    job->next = NULL;
    struct mask_job **end = &k->queue;
    while (*end)
        end = &(*end)->next;
    *end = job;
    pthread_cond_broadcast(&k->changed);
    pthread_mutex_unlock(&k->lock);
}

bool masks_take(struct mask_maker *k, struct mask_job *job)
{
    pthread_mutex_lock(&k->lock);
    bool done = job->state == MASK_DONE;
    if (done)
        job->state = MASK_NONE;
    pthread_mutex_unlock(&k->lock);
    return done;
}

void masks_drop(struct mask_maker *k, struct mask_job *job)
{
    pthread_mutex_lock(&k->lock);
    if (job->state == MASK_QUEUED) {
        struct mask_job **p = &k->queue;
        while (*p != job)
            p = &(*p)->next;
        *p = job->next;
    }
    if (job->state == MASK_RUNNING) {
        job->dropped = true;
        pthread_cond_broadcast(&k->changed);
        while (job->state == MASK_RUNNING)
            pthread_cond_wait(&k->left, &k->lock);
    }
    job->state = MASK_NONE;
    pthread_mutex_unlock(&k->lock);
}

void masks_grant(struct mask_maker *k, int64_t ns)
{
    pthread_mutex_lock(&k->lock);
    k->granted_ns = ns + (k->granted_ns < 0 ? k->granted_ns : 0);
    pthread_cond_broadcast(&k->changed);
    pthread_mutex_unlock(&k->lock);
}
