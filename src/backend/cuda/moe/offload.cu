/* Experts in host memory: see offload.h. Owns the network that the host sees, the pinned memory of requests, and the
 * thread that answers them. */
#include "backend/cuda/moe/offload.h"
#include "backend/cuda/moe/place.h"
#include "backend/cuda/moe/stream.h"

extern "C" {
#include "base/clock.h"
#include "base/mem.h"
void os_name_thread(const char *name); /* base/os.h has C's atomics */
}

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>

enum { SEND_THREADS = 256, SEND_BLOCKS = 64, SPINS = 256 };

/* Pinned. The device writes the first line, the host the second. */
struct offload_mail {
    alignas(128) uint32_t request; /* number of the request whose rows are complete */
    int32_t layer, rows;
    alignas(128) uint32_t answer; /* number of the request whose answer is complete */
    uint32_t closed;              /* nothing will be answered any more */
};

/* A layer as the host sees it. */
struct host_layer {
    struct offload_layer layer;
    struct weight router; /* sizes only */
    const struct mlp *mlp;
    int used;
};

struct offload_worker {
    struct backend *host;
    struct network net;
    struct layer *net_layers;  /* (n) mlps alone, of the host's experts */
    struct host_layer *layers; /* (n) */
    int n, used, width;        /* experts of a row, and the width of a row, at most */
    struct offload_mail *mail, *mail_mapped;
    float *x, *x_mapped, *y, *y_mapped; /* (max_tokens, width) */
    int32_t *chosen, *chosen_mapped;    /* (max_tokens, used) */
    float *weights, *weights_mapped;    /* (max_tokens, used) */
    struct offload_sync *sync;          /* device */
    struct expert_stream *stream;       /* NULL: no experts are copied in prompts */
    struct expert_places *places;       /* NULL: none are exchanged */

    pthread_t thread;
    bool started;
    pthread_mutex_t lock; /* of the next two */
    pthread_cond_t work;
    int steps; /* begun and not ended; the thread reads it without the lock, too */
    bool quit;
    uint64_t on_host; /* counted by the thread, read by others */
    int64_t busy_ns;
};

static struct cuda_offload *offload_of(const struct cuda_backend *cu)
{
    return &((struct cuda_whole *)cu->be)->offload;
}

/* The device's side */

struct offload_args {
    struct offload_sync *sync;
    struct offload_mail *mail;
    const float *from;
    float *to;
    int layer, rows, width;
    bool adds;
};

/* Copies rows to pinned memory; its last block sends the request. */
static __global__ void __launch_bounds__(SEND_THREADS)
    offload_send_kernel(const __grid_constant__ struct offload_args p)
{
    dependency_wait();
    dependency_trigger();
    size_t n = (size_t)p.rows * (size_t)p.width / 4, step = (size_t)gridDim.x * SEND_THREADS;
    const float4 *from = (const float4 *)p.from;
    float4 *to = (float4 *)p.to;
    bool missed = p.sync->missed != 0;
    for (size_t i = (size_t)blockIdx.x * SEND_THREADS + threadIdx.x; missed && i < n; i += step)
        to[i] = from[i];
    fence_for_host();
    __syncthreads();
    if (threadIdx.x || atomicAdd(&p.sync->arrived, 1u) != gridDim.x - 1)
        return;
    p.sync->arrived = 0;
    p.sync->missed = 0;
    p.sync->active = missed;
    if (!missed)
        return;
    p.mail->layer = p.layer;
    p.mail->rows = p.rows;
    p.sync->number++;
    store_for_host(&p.mail->request, p.sync->number);
}

/* One thread waits, so that the others do not read across the bus. */
static __global__ void __launch_bounds__(32)
    offload_wait_kernel(const struct offload_sync *sync, const struct offload_mail *mail)
{
    if (threadIdx.x || !sync->active)
        return;
    while (load_from_host(&mail->answer) != sync->number && !load_from_host(&mail->closed))
        pause_for_host();
}

/* One thread per 4 columns. */
static __global__ void __launch_bounds__(SEND_THREADS)
    offload_join_kernel(const __grid_constant__ struct offload_args p)
{
    dependency_wait();
    dependency_trigger();
    size_t i = (size_t)blockIdx.x * SEND_THREADS + threadIdx.x;
    if (i >= (size_t)p.rows * (size_t)p.width / 4)
        return;
    float4 *to = (float4 *)p.to + i;
    float4 y = p.adds ? *to : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (p.sync->active) {
        float4 a = ((const float4 *)p.from)[i];
        y = make_float4(y.x + a.x, y.y + a.y, y.z + a.z, y.w + a.w);
    }
    *to = y;
}

void offload_send(struct cuda_backend *cu, const struct experts *e, int rows)
{
    struct offload_worker *w = offload_of(cu)->worker;
    if (!e->offload)
        return;
    struct offload_args p = {};
    p.sync = w->sync;
    p.mail = w->mail_mapped;
    p.from = e->offload_x;
    p.to = w->x_mapped;
    p.layer = e->offload->index;
    p.rows = rows;
    p.width = e->gate_up->n_in;
    int blocks = ceil_div(rows * (p.width / 4), SEND_THREADS);
    cuda_launch(cu, offload_send_kernel,
                dim3((unsigned)(blocks < SEND_BLOCKS ? blocks : SEND_BLOCKS)), SEND_THREADS, 0,
                LAUNCH_EARLY, p);
}

void offload_join(struct cuda_backend *cu, const struct experts *e, float *y, int rows, bool adds)
{
    struct offload_worker *w = offload_of(cu)->worker;
    if (!e->offload)
        return;
    cuda_launch(cu, offload_wait_kernel, dim3(1), 32, 0, LAUNCH_PLAIN,
                (const struct offload_sync *)w->sync, (const struct offload_mail *)w->mail_mapped);
    struct offload_args p = {};
    p.sync = w->sync;
    p.from = w->y_mapped;
    p.to = y;
    p.rows = rows;
    p.width = e->down->n_out;
    p.adds = adds;
    cuda_launch(cu, offload_join_kernel,
                dim3((unsigned)ceil_div(rows * (p.width / 4), SEND_THREADS)), SEND_THREADS, 0,
                LAUNCH_EARLY, p);
}

struct expert_stream *offload_stream(const struct cuda_backend *cu)
{
    const struct offload_worker *w = offload_of(cu)->worker;
    return w ? w->stream : NULL;
}

void offload_stream_begin(struct cuda_backend *cu)
{
    const struct offload_worker *w = offload_of(cu)->worker;
    if (!w || !w->stream)
        return;
    places_begin(cu, w->places);
    stream_begin(cu, w->stream);
}

bool offload_copied(struct cuda_backend *cu, const struct pick_case *c, const struct experts *e,
                    bool adds)
{
    struct expert_stream *s = offload_stream(cu);
    if (!stream_count(s, e->offload->index))
        return false;
    stream_run(cu, s, e->offload->index, c, e, adds);
    return true;
}

/* The host's side */

static void answer(struct offload_worker *w)
{
    int rows = w->mail->rows;
    const struct host_layer *l = &w->layers[w->mail->layer];
    int64_t start = clock_ns();
    w->host->ops->experts->run(w->host, l->mlp, w->chosen, w->weights, l->used, w->x, w->y, rows);
    uint64_t n = 0;
    for (int i = 0; i < rows * l->used; i++)
        n += w->chosen[i] >= 0;
    __atomic_add_fetch(&w->on_host, n, __ATOMIC_RELAXED);
    __atomic_add_fetch(&w->busy_ns, clock_ns() - start, __ATOMIC_RELAXED);
}

/* Waits until a step is in flight. False: the thread ends. */
static bool wait_for_step(struct offload_worker *w)
{
    pthread_mutex_lock(&w->lock);
    while (!w->steps && !w->quit)
        pthread_cond_wait(&w->work, &w->lock);
    bool on = !w->quit;
    pthread_mutex_unlock(&w->lock);
    return on;
}

static void *run_worker(void *arg)
{
    struct offload_worker *w = (struct offload_worker *)arg;
    uint32_t done = 0;
    os_name_thread("steel-offload");
    while (wait_for_step(w)) {
        for (int i = 0; __atomic_load_n(&w->steps, __ATOMIC_RELAXED);) {
            if (__atomic_load_n(&w->mail->request, __ATOMIC_ACQUIRE) == done) {
                if (++i % SPINS == 0)
                    sched_yield();
                continue;
            }
            answer(w);
            __atomic_store_n(&w->mail->answer, ++done, __ATOMIC_RELEASE);
            i = 0;
        }
    }
    return NULL;
}

static void count_step(struct offload_worker *w, int n)
{
    pthread_mutex_lock(&w->lock);
    __atomic_add_fetch(&w->steps, n, __ATOMIC_RELAXED);
    pthread_cond_signal(&w->work);
    pthread_mutex_unlock(&w->lock);
}

void offload_begin(struct cuda_backend *cu)
{
    struct offload_worker *w = offload_of(cu)->worker;
    if (w)
        count_step(w, 1);
}

void offload_end(struct cuda_backend *cu)
{
    struct offload_worker *w = offload_of(cu)->worker;
    if (!w)
        return;
    count_step(w, -1);
    if (w->host->failure && !cu->failed) {
        cu->error = *w->host->failure;
        cu->failed = true;
        cu->be->failure = &cu->error;
    }
}

/* Making */

void offload_open(struct cuda_backend *cu, struct backend *host, bool reads, bool all)
{
    offload_of(cu)->host = host;
    offload_of(cu)->reads = reads;
    offload_of(cu)->all = all;
}

bool offload_supported(const struct cuda_backend *cu, const struct network *net, struct error *err)
{
    const struct cuda_offload *o = offload_of(cu);
    if (!o->host)
        return true;
    if (!o->host->ops->experts)
        return error_set(err, "%s does not compute experts for cuda", o->host->ops->name);
    for (int i = 0; i < net->n_layers; i++) {
        const struct mlp *m = &net->layers[i].mlp;
        if (m->router.w && (m->to_experts || m->router.weighs_input || m->router.n_same))
            return network_refuse(err, i,
                                  "experts on projections, weights on inputs or experts "
                                  "without weights, in part in host memory, are",
                                  "cuda");
    }
    return true;
}

bool offload_upload(struct cuda_backend *cu, const struct raw_weight *src, struct cuda_weight *cw,
                    bool *owns, struct error *err)
{
    struct backend *host = offload_of(cu)->host;
    CHECK(host, "experts for the host, which is not open");
    int first = offload_of(cu)->all ? 0 : src->n_expert - src->n_host;
    const struct raw_weight part = raw_weight_experts(src, first, src->n_expert - first);
    cw->host = (struct weight *)mem_zalloc(1, sizeof *cw->host);
    if (!host->ops->upload(host, &part, WEIGHT_EXPERTS, cw->host, err)) {
        mem_free(cw->host);
        cw->host = NULL;
        return false;
    }
    *owns = cw->host->owns;
    size_t values = (size_t)part.n_expert * (size_t)part.n_out;
    if (!part.bias)
        return true;
    cw->host_bias = (float *)cuda_alloc(cu->be, values * sizeof(float), "biases of experts", err);
    if (cw->host_bias)
        cuda_copy_in(cu->be, cw->host_bias, part.bias, values * sizeof(float));
    return cw->host_bias != NULL;
}

void offload_release(struct cuda_backend *cu, struct cuda_weight *cw)
{
    struct backend *host = offload_of(cu)->host;
    if (!cw->host)
        return;
    stream_wait(offload_stream(cu));
    if (cw->host_bias)
        cuda_free(cu->be, cw->host_bias,
                  (size_t)cw->host->n_expert * (size_t)cw->host->n_out * sizeof(float));
    if (cw->host_pinned && cudaHostUnregister((void *)cw->host_pinned) != cudaSuccess)
        cudaGetLastError();
    host->ops->release(host, cw->host);
    mem_free(cw->host);
    cw->host = NULL;
}

static struct cuda_weight *weight_of(const struct weight *w)
{
    return (struct cuda_weight *)w->impl;
}

static bool is_offloaded(const struct mlp *m)
{
    return m->router.w && weight_of(m->experts.gate_up)->host;
}

/* Layer `at` of the worker: m, with the host's experts. */
static void add_layer(struct offload_worker *w, int at, const struct mlp *m, bool all)
{
    struct host_layer *l = &w->layers[at];
    struct mlp *to = &w->net_layers[at].mlp;
    struct cuda_weight *up = weight_of(m->experts.gate_up), *down = weight_of(m->experts.down);
    l->router.n_in = m->experts.gate_up->n_in;
    l->router.n_out = up->host->n_expert;
    l->router.n_expert = 1;
    l->used = m->router.n_used;
    l->layer.index = at;
    l->layer.n_device = up->m.n_expert;
    l->layer.first_host = all ? 0 : up->m.n_expert;
    w->net_layers[at].mixer.kind = MIXER_NONE;
    to->experts = m->experts;
    to->experts.gate_up = up->host;
    to->experts.down = down->host;
    to->router.w = &l->router;
    to->router.n_used = l->used;
    l->mlp = to;
    up->offload = &l->layer;
    w->used = l->used > w->used ? l->used : w->used;
    int wide = m->experts.gate_up->n_in;
    wide = m->experts.down->n_out > wide ? m->experts.down->n_out : wide;
    w->width = wide > w->width ? wide : w->width;
}

static int experts_of(const struct host_layer *l)
{
    return l->layer.first_host + l->router.n_out;
}

/* Tables of all layers in one block. The first n_device experts are in their slots, the others have ranks. */
static bool make_slots(struct cuda_backend *cu, struct offload_worker *w, struct error *err)
{
    size_t all = 0;
    int32_t *table = NULL;
    for (int i = 0; i < w->n; i++)
        all += (size_t)experts_of(&w->layers[i]);
    struct device_buffer map = {(void **)&table, all * sizeof(int32_t)};
    if (!cuda_own(cu, &map, 1, err))
        return false;
    int32_t *slots = (int32_t *)mem_zalloc(all, sizeof *slots), *at = slots;
    for (int i = 0; i < w->n; i++) {
        struct offload_layer *l = &w->layers[i].layer;
        l->slot_of = table + (at - slots);
        for (int e = 0; e < experts_of(&w->layers[i]); e++)
            *at++ = e < l->n_device ? e : -1 - (e - l->n_device);
    }
    cuda_copy_in(cu->be, table, slots, all * sizeof *slots);
    mem_free(slots);
    return true;
}

static bool make_buffers(struct cuda_backend *cu, struct offload_worker *w, size_t rows,
                         struct error *err)
{
    size_t row = (size_t)w->width * sizeof(float), uses = rows * (size_t)w->used;
    struct device_buffer sync = {(void **)&w->sync, sizeof *w->sync};
    if (!cuda_own(cu, &sync, 1, err) ||
        !cuda_pin((void **)&w->mail, (void **)&w->mail_mapped, sizeof *w->mail, err) ||
        !cuda_pin((void **)&w->x, (void **)&w->x_mapped, rows * row, err) ||
        !cuda_pin((void **)&w->y, (void **)&w->y_mapped, rows * row, err) ||
        !cuda_pin((void **)&w->chosen, (void **)&w->chosen_mapped, uses * sizeof(int32_t), err) ||
        !cuda_pin((void **)&w->weights, (void **)&w->weights_mapped, uses * sizeof(float), err))
        return false;
    *w->mail = offload_mail{};
    for (int i = 0; i < w->n; i++) {
        struct offload_layer *l = &w->layers[i].layer;
        l->chosen = w->chosen_mapped;
        l->weights = w->weights_mapped;
        l->sync = w->sync;
    }
    return true;
}

static bool start_host(struct offload_worker *w, const struct network *net, int max_tokens,
                       struct error *err)
{
    struct bounds b = {};
    b.page_len = 16;
    b.n_pages = b.max_pages = b.max_seqs = b.max_out = 1;
    b.k_type = b.v_type = DT_F16;
    b.max_tokens = max_tokens;
    w->net.n_layers = w->n;
    w->net.n_embd = net->n_embd;
    w->net.n_vocab = 1;
    w->net.layers = w->net_layers;
    if (!w->host->ops->supports(w->host, &w->net, err) ||
        !w->host->ops->prepare(w->host, &w->net, &b, err))
        return false;
    w->started = pthread_create(&w->thread, NULL, run_worker, w) == 0;
    return w->started || error_set(err, "cannot start a thread for experts in host memory");
}

static bool make_places(struct cuda_backend *cu, struct offload_worker *w, struct error *err)
{
    struct error why = {};
    if (!w->stream || !offload_of(cu)->all)
        return true;
    struct offload_layer **layers =
        (struct offload_layer **)mem_zalloc((size_t)w->n, sizeof *layers);
    int *n_expert = (int *)mem_zalloc((size_t)w->n, sizeof *n_expert);
    for (int i = 0; i < w->n; i++) {
        layers[i] = &w->layers[i].layer;
        n_expert[i] = experts_of(&w->layers[i]);
    }
    w->places = places_new(cu, w->stream, layers, n_expert, w->n, &why);
    mem_free(n_expert);
    mem_free(layers);
    if (why.msg[0] && err)
        *err = why;
    return !why.msg[0];
}

static bool make_stream(struct cuda_backend *cu, struct offload_worker *w,
                        const struct network *net, struct error *err)
{
    struct stream_layer *layers = (struct stream_layer *)mem_zalloc((size_t)w->n, sizeof *layers);
    struct error why = {};
    for (int i = 0, at = 0; i < net->n_layers; i++)
        if (is_offloaded(&net->layers[i].mlp)) {
            const struct offload_layer *l = &w->layers[at].layer;
            int n = experts_of(&w->layers[at]) - l->n_device;
            layers[at++] = stream_layer{&net->layers[i].mlp, i, n, l->n_device - l->first_host};
        }
    w->stream = stream_new(cu, w->host, layers, w->n, &why);
    mem_free(layers);
    if (why.msg[0] && err)
        *err = why;
    return !why.msg[0];
}

/* Seconds in which the host computes its experts of a layer for `rows` rows: the better of two runs. */
static double time_host(struct offload_worker *w, const struct host_layer *l, int rows)
{
    int n = l->router.n_out, used = l->used < n ? l->used : n;
    double best = INFINITY;
    for (int i = 0; i < rows * l->used; i++) {
        int k = i % l->used;
        w->chosen[i] = k < used ? (i / l->used * used + k) % n : -1;
        w->weights[i] = 1.0f;
    }
    memset(w->x, 0, (size_t)rows * (size_t)w->width * sizeof(float));
    for (int i = 0; i < 3; i++) {
        int64_t start = clock_ns();
        w->host->ops->experts->run(w->host, l->mlp, w->chosen, w->weights, l->used, w->x, w->y,
                                   rows);
        double t = (double)(clock_ns() - start) * 1e-9;
        best = i && t < best ? t : best; /* the first reads pages for the first time */
    }
    return best;
}

/* Two numbers of rows: all experts have few, or many. */
struct stream_cost offload_measure(struct cuda_backend *cu, int layer)
{
    enum { FEW = 8, MANY = 256 };
    struct offload_worker *w = offload_of(cu)->worker;
    const struct host_layer *l = &w->layers[layer];
    int most = cu->shape.max_tokens, n = l->router.n_out, used = l->used < n ? l->used : n;
    int few = ceil_div(n, used), many = MANY;
    few = few < FEW ? (int)FEW : few;
    few = few < most ? few : most;
    many = many < most ? many : most;
    double a = time_host(w, l, few), per = 0;
    if (many > few) {
        per = (time_host(w, l, many) - a) / ((many - few) * used);
        per = per > 0 ? per : 0;
    }
    int experts = few * used < n ? few * used : n;
    double rest = a - per * few * used;
    return stream_cost{rest > 0 ? rest / experts : 0, per};
}

bool offload_prepare(struct cuda_backend *cu, const struct network *net, int max_tokens,
                     struct error *err)
{
    struct cuda_offload *o = offload_of(cu);
    int n = 0;
    for (int i = 0; i < net->n_layers; i++)
        n += is_offloaded(&net->layers[i].mlp);
    if (!n)
        return true;
    struct offload_worker *w = o->worker = (struct offload_worker *)mem_zalloc(1, sizeof *w);
    w->host = o->host;
    w->n = n;
    w->net_layers = (struct layer *)mem_zalloc((size_t)n, sizeof *w->net_layers);
    w->layers = (struct host_layer *)mem_zalloc((size_t)n, sizeof *w->layers);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->work, NULL);
    for (int i = 0, at = 0; i < net->n_layers; i++)
        if (is_offloaded(&net->layers[i].mlp))
            add_layer(w, at++, &net->layers[i].mlp, o->all);
    return make_slots(cu, w, err) && make_buffers(cu, w, (size_t)max_tokens, err) &&
           start_host(w, net, max_tokens, err) && make_stream(cu, w, net, err) &&
           make_places(cu, w, err);
}

bool offload_settle(struct cuda_backend *cu, struct error *err)
{
    const struct cuda_offload *o = offload_of(cu);
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream)); /* uploads read the ring */
    cuda_ring_free(cu);
    return !o->reads || o->host->ops->tier->settle(o->host, err);
}

void offload_stats(struct cuda_backend *cu, struct tier_stats *out)
{
    const struct cuda_offload *o = offload_of(cu);
    struct offload_worker *w = o->worker;
    struct offload_sync sync = {};
    *out = tier_stats{};
    if (o->host && o->host->ops->tier)
        o->host->ops->tier->stats(o->host, out);
    if (!w)
        return;
    cuda_copy_out(cu->be, &sync, w->sync, sizeof sync);
    out->on_device = sync.on_device;
    out->on_host = __atomic_load_n(&w->on_host, __ATOMIC_RELAXED);
    out->host_seconds = (double)__atomic_load_n(&w->busy_ns, __ATOMIC_RELAXED) * 1e-9;
}

size_t offload_uses(struct cuda_backend *cu, float *out)
{
    const struct offload_worker *w = offload_of(cu)->worker;
    return w ? places_uses(w->places, out) : 0;
}

void offload_place(struct cuda_backend *cu, const float *uses)
{
    const struct offload_worker *w = offload_of(cu)->worker;
    cuda_enter(cu);
    if (w)
        places_set(cu, w->places, uses);
}

static void stop_worker(struct cuda_backend *cu, struct offload_worker *w)
{
    /* A failed device may have a kernel that waits for an answer to a request that the thread never sees. */
    if (w->mail)
        __atomic_store_n(&w->mail->closed, 1u, __ATOMIC_RELEASE);
    if (w->started) {
        pthread_mutex_lock(&w->lock);
        w->quit = true;
        __atomic_store_n(&w->steps, 0, __ATOMIC_RELAXED);
        pthread_cond_signal(&w->work);
        pthread_mutex_unlock(&w->lock);
        pthread_join(w->thread, NULL);
    }
    if (cu->stream)
        cudaStreamSynchronize(cu->stream); /* before its pinned memory goes */
    places_free(w->places);
    stream_free(w->stream);
    pthread_cond_destroy(&w->work);
    pthread_mutex_destroy(&w->lock);
    void *pinned[] = {w->mail, w->x, w->y, w->chosen, w->weights};
    for (size_t i = 0; i < sizeof pinned / sizeof *pinned; i++)
        if (pinned[i])
            cudaFreeHost(pinned[i]);
    mem_free(w->layers);
    mem_free(w->net_layers);
    mem_free(w);
}

void offload_close(struct cuda_backend *cu)
{
    struct cuda_offload *o = offload_of(cu);
    if (o->worker)
        stop_worker(cu, o->worker);
    if (o->host)
        o->host->ops->close(o->host);
    o->worker = NULL;
    o->host = NULL;
}
