/* See encoder.h. */
#include "vision/encoder.h"
#include "backend/backend.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "vision/spare.h"
#include "vision/step_rows.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

enum {
    PAGE_LEN = 16,
    MAX_FEATURES = 4096,
    LOW_FEATURES = 256,
    BATCH_VIEWS = 32,     /* views per step at most */
    BATCH_PATCHES = 4096, /* patches per step at most, unless a single view has more */
    POLL_NS = 20000000,   /* between checks for cancelled callers; the longest wait for a step */
    PIECE_NS = 4000000,   /* of a tower's step while no other steps run */
};

/* The features of a step's views, until the last caller has taken its own. */
struct step_result {
    atomic_int refs;
    int n;         /* features */
    size_t bytes;  /* of values */
    float *values; /* (n, width) in the step's order */
};

/* A view to encode. */
struct encode_job {
    struct encode_job *next;
    struct step_rows *rows;
    const atomic_bool *stop; /* or NULL */
    float *values; /* memory for the features, used if the view is alone in its step; or NULL */
    bool taken, done, ok;
    struct error err;
    struct step_result *result; /* if ok; the caller's reference */
    int first;                  /* feature of the result */
};

/* One of the tower's networks (tower_part). */
struct part {
    struct config config;
    struct tower_config tower;
    struct backend *be;
    struct model *model;
    struct bounds bounds;
    struct kv_layer kv, *layers; /* (n_layers) all equal to kv */
    size_t kv_bytes;             /* of keys, and of values */
    int joined, width;           /* rows that become one feature, its values */
};

struct encoder {
    struct config config;
    struct tower_config tower, low; /* low: with few features */
    struct positions positions;
    struct grids *grids;
    bool pixels; /* the backend takes patches as pixels */
    struct part parts[2];
    int n_parts;
    struct bounds bounds; /* of the first part */
    int width;            /* of a feature */
    /* of a step of a part */
    int32_t *index, *pos, *slot, *rope_pos,
        *spans; /* (max_tokens); rope_pos (max_tokens, 3), spans (max_tokens, 2) */
    int32_t q_start[BATCH_VIEWS + 1], kv_len[BATCH_VIEWS], *pages;
    const float **rows;        /* (max_tokens) */
    const uint8_t **pixels_of; /* (max_tokens) */
    bool batches;              /* several views share a step */
    bool pieces;               /* steps run in pieces (encoder_beside_step) */
    /* of the piece that runs */
    struct part *now;
    int n_layers, most_layers; /* enqueued, until the piece ends */
    int64_t piece_start;

    _Atomic uint32_t n_beside; /* steps of the other thread */
    _Atomic int64_t decode_ns; /* encoder_beside_step */
    atomic_bool waits_for_step;

    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    struct encode_job *queue; /* the oldest first */
    struct encoder_times times;
    bool closing;
};

const struct tower_config *encoder_config(const struct encoder *e)
{
    return &e->tower;
}

const struct tower_config *encoder_low_config(const struct encoder *e)
{
    return &e->low;
}

const struct model *encoder_model(const struct encoder *e)
{
    return e->parts[0].model;
}

int encoder_max_patches(const struct encoder *e)
{
    return e->bounds.max_tokens;
}

/* Sizes of steps: the largest view's patches. */
static struct bounds bounds_of(const struct encoder *e, enum dtype kv_type)
{
    int rows = plan_most_patches(&e->tower) + e->tower.class_token;
    int views = e->batches ? BATCH_VIEWS : 1;
    if (e->batches && rows < BATCH_PATCHES)
        rows = BATCH_PATCHES;
    int pages = (rows + PAGE_LEN - 1) / PAGE_LEN;
    return (struct bounds){.page_len = PAGE_LEN,
                           .n_pages = pages + views,
                           .k_type = kv_type ? kv_type : DT_F16,
                           .v_type = kv_type ? kv_type : DT_F16,
                           .max_tokens = rows,
                           .max_seqs = views,
                           .max_out = 1,
                           .max_pages = pages,
                           .max_embeds = rows};
}

static bool alloc_kv(struct part *p, struct error *err)
{
    const struct bounds *b = &p->bounds;
    size_t wide = (size_t)p->config.n_heads * (size_t)p->config.head_dim;
    size_t values = wide * (size_t)b->n_pages * PAGE_LEN;
    p->kv_bytes = dtype_bytes(b->k_type, values);
    p->kv.k = p->be->ops->alloc(p->be, p->kv_bytes, "an image's keys", err);
    p->kv.v = p->kv.k ? p->be->ops->alloc(p->be, p->kv_bytes, "an image's values", err) : NULL;
    p->layers = mem_zalloc((size_t)p->config.n_layers, sizeof *p->layers);
    for (int i = 0; i < p->config.n_layers; i++)
        p->layers[i] = p->kv;
    return p->kv.v != NULL;
}

/* before: the part whose features are this one's rows; NULL = none. */
static bool open_part(struct encoder *e, struct part *p, const struct part *before,
                      const struct tensorfile *f, const struct encoder_options *opt,
                      struct error *err)
{
    tower_part(&e->config, &e->tower, before ? 1 : 0, &p->config, &p->tower);
    p->be = backend_open(&opt->backend, err);
    if (!p->be)
        return false;
    if (!p->be->ops->tower)
        return error_set(err, "%s: image towers are not supported on %s", f->path,
                         p->be->ops->name);
    p->model = model_load_config(f, p->be, &p->config, NULL, opt->progress, err);
    if (!p->model)
        return false;
    if (!before) {
        /* On a CPU a step of one image is as fast per patch, and equal images have equal features. */
        e->batches = p->be->own_memory && !opt->backend.deterministic;
        e->pieces = p->be->own_memory;
        e->bounds = bounds_of(e, opt->kv_type);
    }
    p->bounds = e->bounds;
    if (before)
        p->bounds.max_tokens = p->bounds.max_embeds = e->bounds.max_tokens / before->joined;
    p->joined = merger_rows(&p->model->net.mergers[0]);
    p->width = network_feature_width(&p->model->net);
    return alloc_kv(p, err) && p->be->ops->prepare(p->be, &p->model->net, &p->bounds, err);
}

static void close_part(struct part *p)
{
    if (p->be && p->kv.k)
        p->be->ops->free(p->be, p->kv.k, p->kv_bytes);
    if (p->be && p->kv.v)
        p->be->ops->free(p->be, p->kv.v, p->kv_bytes);
    model_free(p->model);
    if (p->be)
        p->be->ops->close(p->be);
    mem_free(p->layers);
}

static bool open_all(struct encoder *e, const struct tensorfile *f,
                     const struct encoder_options *opt, struct error *err)
{
    if (!tower_load(f, &e->config, &e->tower, err))
        return false;
    if (!plan_limit(&e->tower, opt->max_features ? opt->max_features : MAX_FEATURES, err) ||
        !positions_load(f, &e->config, &e->positions, err))
        return false;
    e->low = e->tower;
    if (!plan_limit(&e->low, LOW_FEATURES, NULL))
        e->low = e->tower;
    e->n_parts = tower_n_parts(&e->tower);
    for (int i = 0; i < e->n_parts; i++)
        if (!open_part(e, &e->parts[i], i ? &e->parts[i - 1] : NULL, f, opt, err))
            return false;
    e->width = e->parts[e->n_parts - 1].width;
    size_t n = (size_t)e->bounds.max_tokens;
    e->index = mem_zalloc(n, sizeof *e->index);
    e->pos = mem_zalloc(n, sizeof *e->pos);
    e->slot = mem_zalloc(n, sizeof *e->slot);
    e->rope_pos = mem_zalloc(n, 3 * sizeof *e->rope_pos);
    e->spans = mem_zalloc(n, 2 * sizeof *e->spans);
    e->rows = mem_zalloc(n, sizeof *e->rows);
    e->pixels_of = mem_zalloc(n, sizeof *e->pixels_of);
    e->grids = grids_new(&e->tower, &e->positions, e->config.n_embd);
    e->pixels = e->parts[0].be->ops->tower->pixels;
    e->pages =
        mem_zalloc((size_t)e->bounds.max_pages * (size_t)e->bounds.max_seqs, sizeof *e->pages);
    for (int i = 0; i < e->bounds.max_tokens; i++)
        e->index[i] = i;
    return true;
}

/* The encoder's thread */

/* Adds n rows to the step as a sequence of its own, whose pages follow those of the sequences before. */
static void add_sequence(struct encoder *e, struct batch *b, int n, int *page)
{
    int first = b->n_tokens, n_pages = (n + PAGE_LEN - 1) / PAGE_LEN;
    int32_t *pages = e->pages + (ptrdiff_t)b->n_seqs * e->bounds.max_pages;
    for (int i = 0; i < n_pages; i++)
        pages[i] = *page + i;
    for (int i = 0; i < n; i++) {
        e->pos[first + i] = i;
        e->slot[first + i] = *page * PAGE_LEN + i;
    }
    e->kv_len[b->n_seqs] = n;
    b->n_tokens += n;
    e->q_start[++b->n_seqs] = b->n_tokens;
    *page += n_pages;
}

/* The rows of a view. */
static void add_view(struct encoder *e, struct batch *b, const struct step_rows *r, int *page)
{
    const struct view_grid *g = r->grid;
    int first = b->n_tokens;
    for (int i = 0; i < g->n; i++)
        e->rows[first + i] = r->rows[i];
    for (int i = 0; r->bytes_of && i < g->n; i++)
        e->pixels_of[first + i] = r->bytes_of[i];
    memcpy(e->rope_pos + (ptrdiff_t)3 * first, g->rope_pos, (size_t)g->n * 3 * sizeof(int32_t));
    if (g->order.windows)
        memcpy(e->spans + (ptrdiff_t)2 * first, g->order.windows,
               (size_t)g->order.n * 2 * sizeof(int32_t));
    for (int i = g->order.n; i < g->n; i++) /* a class token has no window */
        e->spans[2 * (first + i)] = e->spans[2 * (first + i) + 1] = 0;
    add_sequence(e, b, g->n, page);
}

/* values: memory for it, which becomes its own; NULL = new memory */
static struct step_result *result_new(int n, int width, int refs, float *values, struct error *err)
{
    struct step_result *r = mem_zalloc(1, sizeof *r);
    *r = (struct step_result){.refs = refs, .n = n};
    r->bytes = (size_t)n * (size_t)width * sizeof(float);
    r->values = values ? values : spare_take(r->bytes);
    if (r->values)
        return r;
    error_set(err, "out of memory: %zu bytes for images' features", r->bytes);
    mem_free(r);
    return NULL;
}

static void result_release(struct step_result *r)
{
    if (!r || atomic_fetch_sub(&r->refs, 1) > 1)
        return;
    spare_give(r->values, r->bytes);
    mem_free(r);
}

static double seconds_since(int64_t start)
{
    return (double)(clock_ns() - start) * 1e-9;
}

static struct timespec poll_time(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    t.tv_nsec += POLL_NS;
    t.tv_sec += t.tv_nsec / 1000000000;
    t.tv_nsec %= 1000000000;
    return t;
}

/* Pieces of a step: kernels of a lower priority still delay others by the blocks that run. */

/* Waits until a step has ended beside the encoder, if some are running. */
static void await_step(struct encoder *e)
{
    uint32_t seen = atomic_load(&e->n_beside);
    struct timespec until;
    pthread_mutex_lock(&e->lock);
    atomic_store(&e->waits_for_step, true);
    until = poll_time();
    while (!e->closing && atomic_load(&e->decode_ns) && atomic_load(&e->n_beside) == seen &&
           pthread_cond_timedwait(&e->changed, &e->lock, &until) == 0)
        ;
    atomic_store(&e->waits_for_step, false);
    pthread_mutex_unlock(&e->lock);
}

static void begin_piece(struct encoder *e, int most_layers)
{
    e->n_layers = 0;
    e->most_layers = most_layers;
    e->piece_start = clock_ns();
}

/* Ends the piece after enough layers. How many are enough follows from the time that the last piece took. */
static void after_layer(void *arg)
{
    struct encoder *e = arg;
    const struct backend *be = e->now->be;
    char end[4];
    if (++e->n_layers < e->most_layers)
        return;
    be->ops->copy_out(e->now->be, end, e->now->kv.k, sizeof end); /* the layers are computed */
    int64_t layer = (clock_ns() - e->piece_start) / e->n_layers + 1;
    int64_t decode = atomic_load(&e->decode_ns), piece = decode ? decode / 2 : PIECE_NS;
    if (decode)
        await_step(e);
    begin_piece(e, piece > layer ? (int)(piece / layer) : 1);
}

void encoder_beside_step(struct encoder *e, int64_t decode_ns)
{
    atomic_store(&e->decode_ns, decode_ns);
    atomic_fetch_add(&e->n_beside, 1);
    if (!atomic_load(&e->waits_for_step))
        return;
    pthread_mutex_lock(&e->lock);
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
}

/* Runs one network over the rows of the batch. Returns its features (features, p->width) with `refs` references, in `values` if
 * that is not NULL; NULL with err. *fetch += seconds in which the features were copied from the device. */
static struct step_result *run_network(struct encoder *e, struct part *p, struct batch *b,
                                       int features, int refs, float *values,
                                       const atomic_bool *stop, double *fetch, struct error *err)
{
    struct step_result *all = result_new(features, p->width, refs, values, err);
    if (!all)
        return NULL;
    b->n_embeds = b->n_tokens;
    b->kv = p->layers;
    p->model->stop = stop;
    p->model->after_layer = e->pieces ? after_layer : NULL;
    p->model->after_layer_arg = e;
    e->now = p;
    begin_piece(e, 1);
    forward(p->model, b, 0);
    p->model->stop = NULL;
    if (p->be->ops->end(p->be, NULL, err)) {
        int64_t start = clock_ns();
        p->be->ops->tower->features(p->be, features, all->values);
        *fetch += seconds_since(start);
        return all;
    }
    atomic_store(&all->refs, 1);
    result_release(all);
    return NULL;
}

/* Runs one step for n jobs. If it fails, all of them fail. */
static struct step_result *run_step(struct encoder *e, struct encode_job *const *jobs, int n,
                                    double *fetch, struct error *err)
{
    struct batch b = {.max_pages = e->bounds.max_pages,
                      .tokens = e->index, /* no vocabulary: embeds[i] */
                      .pos = e->pos,
                      .rope_pos = e->rope_pos,
                      .embeds = e->rows,
                      .pixels = jobs[0]->rows->pixels ? e->pixels_of : NULL,
                      .spans = jobs[0]->rows->grid->order.windows ? e->spans : NULL,
                      .slot = e->slot,
                      .q_start = e->q_start,
                      .kv_len = e->kv_len,
                      .pages = e->pages,
                      .out_rows = e->index};
    const atomic_bool *stop = n > 1 ? NULL : jobs[0]->stop;
    int page = 0, features = 0;
    for (int i = 0; i < n; i++) {
        add_view(e, &b, jobs[i]->rows, &page);
        jobs[i]->first = features;
        features += jobs[i]->rows->grid->order.n_features;
    }
    float *own = n == 1 ? jobs[0]->values : NULL;
    if (e->n_parts == 1) {
        jobs[0]->values = own ? NULL : jobs[0]->values; /* it is the result's from here on */
        return run_network(e, &e->parts[0], &b, features, n, own, stop, fetch, err);
    }
    int rows = b.n_tokens / e->parts[0].joined;
    struct step_result *joined = run_network(e, &e->parts[0], &b, rows, 1, NULL, stop, fetch, err);
    if (!joined)
        return NULL;
    b.n_tokens = b.n_seqs = page = 0;
    b.spans = NULL;
    b.pixels = NULL;
    for (int i = 0; i < n; i++)
        add_sequence(e, &b, jobs[i]->rows->grid->n / e->parts[0].joined, &page);
    for (int i = 0; i < rows; i++)
        e->rows[i] = joined->values + (size_t)i * (size_t)e->parts[0].width;
    jobs[0]->values = own ? NULL : jobs[0]->values;
    struct step_result *all = run_network(e, &e->parts[1], &b, features, n, own, stop, fetch, err);
    result_release(joined);
    return all;
}

static bool is_stopped(const struct encode_job *j)
{
    return j->stop && atomic_load(j->stop);
}

/* Removes the oldest job and those that may share its step from the queue. Call with the lock held. */
static int take_jobs(struct encoder *e, struct encode_job **jobs)
{
    int n = 0, patches = 0;
    while (e->queue && (!n || (e->batches && n < BATCH_VIEWS &&
                               patches + e->queue->rows->grid->n <= BATCH_PATCHES &&
                               !e->queue->rows->pixels == !jobs[0]->rows->pixels))) {
        jobs[n] = e->queue;
        e->queue = jobs[n]->next;
        patches += jobs[n]->rows->grid->n;
        jobs[n++]->taken = true;
    }
    return n;
}

static void serve(struct encoder *e)
{
    struct encode_job *jobs[BATCH_VIEWS];
    pthread_mutex_lock(&e->lock);
    while (!e->closing) {
        struct error err = {0};
        int n = take_jobs(e, jobs);
        if (!n) {
            pthread_cond_wait(&e->changed, &e->lock);
            continue;
        }
        pthread_mutex_unlock(&e->lock);
        int64_t start = clock_ns();
        double fetch = 0;
        struct step_result *all = run_step(e, jobs, n, &fetch, &err);
        pthread_mutex_lock(&e->lock);
        e->times.n_steps++;
        e->times.n_views += (uint64_t)n;
        e->times.steps += seconds_since(start) - fetch;
        e->times.fetch += fetch;
        for (int i = 0; i < n; i++) {
            jobs[i]->ok = all != NULL;
            jobs[i]->result = all;
            jobs[i]->err = err;
            jobs[i]->done = true; /* its caller may free it */
        }
        pthread_cond_broadcast(&e->changed);
    }
    pthread_mutex_unlock(&e->lock);
}

static void add_job(struct encoder *e, struct encode_job *j)
{
    struct encode_job **at = &e->queue;
    while (*at)
        at = &(*at)->next;
    *at = j;
    pthread_cond_broadcast(&e->changed);
}

static void drop_job(struct encoder *e, const struct encode_job *j)
{
    struct encode_job **at = &e->queue;
    while (*at && *at != j)
        at = &(*at)->next;
    if (*at)
        *at = j->next;
}

/* Runs n jobs; returns when none of them is used any more. */
static bool run_jobs(struct encoder *e, struct encode_job *jobs, int n, struct error *err)
{
    pthread_mutex_lock(&e->lock);
    for (int i = 0; i < n; i++)
        add_job(e, &jobs[i]);
    for (int i = 0; i < n; i++)
        while (!jobs[i].done) {
            if (is_stopped(&jobs[i]) && !jobs[i].taken) {
                drop_job(e, &jobs[i]);
                break;
            }
            struct timespec until = poll_time();
            pthread_cond_timedwait(&e->changed, &e->lock, &until);
        }
    pthread_mutex_unlock(&e->lock);
    if (is_stopped(&jobs[0]))
        return error_set(err, "cancelled");
    for (int i = 0; i < n; i++)
        if (!jobs[i].ok) {
            *err = jobs[i].err;
            return false;
        }
    return true;
}

/* Opening runs on the encoder's thread: the backend's threads inherit its background priority. */
struct encoder_opening {
    struct encoder *e;
    const struct tensorfile *f;
    const struct encoder_options *opt;
    bool done, ok;
    struct error err;
};

static void *encoder_main(void *arg)
{
    struct encoder_opening *o = arg;
    struct encoder *e = o->e;
    os_name_thread("images");
    os_background();
    bool ok = open_all(e, o->f, o->opt, &o->err);
    if (e->pieces)
        spare_keep(e->parts[0].be);
    pthread_mutex_lock(&e->lock);
    o->ok = ok;
    o->done = true; /* o is gone when the lock is free */
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    if (ok)
        serve(e);
    return NULL;
}

struct encoder *encoder_open(const struct tensorfile *f, const struct encoder_options *opt,
                             struct error *err)
{
    struct encoder *e = mem_zalloc(1, sizeof *e);
    struct encoder_opening o = {.e = e, .f = f, .opt = opt};
    pthread_mutex_init(&e->lock, NULL);
    pthread_cond_init(&e->changed, NULL);
    e->started = !pthread_create(&e->thread, NULL, encoder_main, &o);
    pthread_mutex_lock(&e->lock);
    while (e->started && !o.done)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
    if (o.ok)
        return e;
    if (err)
        *err = o.err;
    if (!e->started)
        error_set(err, "no thread is left for images");
    encoder_close(e);
    return NULL;
}

void encoder_close(struct encoder *e)
{
    if (!e)
        return;
    pthread_mutex_lock(&e->lock);
    e->closing = true;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    if (e->started)
        pthread_join(e->thread, NULL);
    if (e->pieces)
        spare_drop(e->parts[0].be);
    for (int i = 0; i < 2; i++)
        close_part(&e->parts[i]);
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->lock);
    positions_free(&e->positions);
    int32_t *owned[] = {e->index, e->pos, e->slot, e->rope_pos, e->spans, e->pages};
    for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
        mem_free(owned[i]);
    mem_free((void *)(uintptr_t)e->rows);
    mem_free((void *)(uintptr_t)e->pixels_of);
    grids_free(e->grids);
    mem_free(e);
}

/* Makes the rows of every view, in the caller's thread. */
static bool make_jobs(struct encoder *e, const struct patches *p, const atomic_bool *stop,
                      struct encode_job *jobs, struct step_rows *rows, struct error *err)
{
    for (int i = 0; i < p->plan.n_views; i++) {
        int n = p->plan.views[i].rows * p->plan.views[i].cols;
        if (n + e->tower.class_token > e->bounds.max_tokens)
            return error_set(err, "an image of %d patches; at most %d", n, e->bounds.max_tokens);
        if (!rows_init(&rows[i], e->grids, p, i, e->pixels, err))
            return false;
        jobs[i] = (struct encode_job){.rows = &rows[i], .stop = stop};
    }
    return true;
}

/* Copies a view's features into the order of the view. */
static void take_features(const struct encode_job *j, size_t width, float *to)
{
    const struct row_order *o = &j->rows->grid->order;
    const float *from = j->result->values + (size_t)j->first * width;
    for (int k = 0, run; k < o->n_features; k += run) {
        for (run = 1; k + run < o->n_features && o->feature[k + run] == o->feature[k] + run; run++)
            ;
        memcpy(to + (size_t)o->feature[k] * width, from + (size_t)k * width,
               (size_t)run * width * sizeof *to);
    }
}

/* Takes the memory of the result itself, if it has this view alone in its order. */
static bool take_result(const struct encode_job *j, struct features *out)
{
    const struct row_order *o = &j->rows->grid->order;
    bool ordered = j->result->n == out->n && atomic_load(&j->result->refs) == 1;
    for (int k = 0; ordered && k < o->n_features; k++)
        ordered = o->feature[k] == k;
    if (!ordered)
        return false;
    out->values = j->result->values;
    j->result->values = NULL;
    return true;
}

static bool take_all(struct encode_job *jobs, int n, struct features *out, struct error *err)
{
    size_t width = (size_t)out->width, bytes = (size_t)out->n * width * sizeof(float);
    if (n == 1 && take_result(&jobs[0], out))
        return true;
    float *to = out->values = jobs[0].values ? jobs[0].values : spare_take(bytes);
    jobs[0].values = NULL;
    if (!to)
        return error_set(err, "out of memory: %zu bytes for an image's features", bytes);
    for (int i = 0; i < n; i++, to += (size_t)jobs[i - 1].rows->grid->order.n_features * width)
        take_features(&jobs[i], width, to);
    return true;
}

static void add_times(struct encoder *e, int64_t start, int64_t made, int64_t ran)
{
    pthread_mutex_lock(&e->lock);
    e->times.rows += (double)(made - start) * 1e-9;
    e->times.waiting += (double)(ran - made) * 1e-9;
    e->times.copy += seconds_since(ran);
    pthread_mutex_unlock(&e->lock);
}

void encoder_times(struct encoder *e, struct encoder_times *out)
{
    pthread_mutex_lock(&e->lock);
    *out = e->times;
    pthread_mutex_unlock(&e->lock);
}

bool encoder_run(struct encoder *e, const struct patches *p, const atomic_bool *stop,
                 struct features *out, struct error *err)
{
    int n = p->plan.n_views;
    *out = (struct features){
        .plan = p->plan, .n = plan_features(&e->tower, &p->plan), .width = e->width};
    CHECK(p->width == tower_patch_values(&e->tower), "patches of %d values", p->width);
    struct encode_job *jobs = mem_zalloc((size_t)n, sizeof *jobs);
    struct step_rows *rows = mem_zalloc((size_t)n, sizeof *rows);
    int64_t start = clock_ns();
    bool ok = make_jobs(e, p, stop, jobs, rows, err);
    size_t bytes = (size_t)out->n * (size_t)out->width * sizeof(float);
    if (ok && n == 1) /* here, beside the steps of others */
        jobs[0].values = spare_take(bytes);
    int64_t made = clock_ns();
    ok = ok && run_jobs(e, jobs, n, err);
    int64_t ran = clock_ns();
    ok = ok && take_all(jobs, n, out, err);
    if (ok)
        add_times(e, start, made, ran);
    for (int i = 0; i < n; i++) {
        result_release(jobs[i].result);
        rows_clear(&rows[i]);
    }
    spare_give(jobs[0].values, bytes);
    mem_free(jobs);
    mem_free(rows);
    if (!ok)
        features_free(out);
    return ok;
}

void features_free(struct features *f)
{
    spare_give(f->values, (size_t)f->n * (size_t)f->width * sizeof *f->values);
    *f = (struct features){0};
}

void image_positions(const struct image_span *images, int n_images, int n_tokens, int32_t *pos)
{
    int32_t next = 0;
    for (int i = 0, k = 0; i < n_tokens; i++, pos += 3) {
        const struct image_span *m = k < n_images ? &images[k] : NULL;
        bool in_image = m && i >= m->at;
        int at = in_image ? i - m->at : 0;
        pos[0] = next;
        pos[1] = next + (in_image ? at / m->cols : 0);
        pos[2] = next + (in_image ? at % m->cols : 0);
        if (!in_image) {
            next++;
        } else if (at == m->rows * m->cols - 1) {
            next += m->rows > m->cols ? m->rows : m->cols;
            k++;
        }
    }
}
