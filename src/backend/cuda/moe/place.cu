/* Experts placed by use: see place.h. Owns the counts, the landing of exchanged experts, and the host's view of the tables. */
#include "backend/cuda/moe/place.h"
#include "backend/cuda/moe/offload.h"
#include "backend/cuda/moe/stream.h"

extern "C" {
#include "base/clock.h"
#include "base/mem.h"
}

#include <math.h>
#include <string.h>

enum {
    COUNT_STEPS = 16,   /* steps between two copies of the counts */
    HALF_ROWS = 4096,   /* rows of a layer after which a use counts half */
    BANDWIDTH_PART = 16 /* of the measured bandwidth, one part is for exchanges */
};

/* A layer's tables, as the stream's order will have them. */
struct place_layer {
    struct offload_layer *of;
    int at, n_expert; /* index among the worker's layers */
    int *held;        /* (n_device) expert of a slot */
    float *use;       /* (n_expert) */
};

struct place_move {
    int layer, in, out; /* layer: of the list; -1 = none */
    cudaEvent_t landed, left;
};

struct expert_places {
    struct expert_stream *stream;
    struct place_layer *layers;
    int n_layers, n_counts;
    uint32_t *counts;             /* device (n_counts), of all layers */
    uint32_t *read, *read_mapped; /* pinned (n_counts) */
    uint32_t *folded;             /* (n_counts) as of the last fold */
    float *use;                   /* (n_counts) */
    int *held;
    cudaEvent_t counted;
    bool counting,
        fresh; /* a copy of counts is under way; there are counts that plan() has not seen */
    int steps;
    uint8_t *landing; /* device (PLACE_MOVES, expert_bytes) */
    size_t expert_bytes;
    struct place_move move[PLACE_MOVES];
    double allowance, bytes_s; /* bytes that may be copied now, and what is added in a second */
    int64_t then;
};

struct exchange_args {
    int32_t *slot_of;
    int in, out;
};

/* in takes the slot of out, which takes the rank of in among the host's. */
static __global__ void place_exchange_kernel(const __grid_constant__ struct exchange_args p)
{
    if (threadIdx.x)
        return;
    int32_t rank = p.slot_of[p.in];
    p.slot_of[p.in] = p.slot_of[p.out];
    p.slot_of[p.out] = rank;
}

float place_gain(float in, float out)
{
    float gain = in - out;
    return gain > 1.0f + 4.0f * sqrtf(in + out) ? gain : 0.0f;
}

/* Counts */

static void fold(struct expert_places *p)
{
    for (int i = 0; i < p->n_layers; i++) {
        struct place_layer *l = &p->layers[i];
        size_t first = (size_t)(l->use - p->use);
        uint32_t uses = 0;
        for (int e = 0; e < l->n_expert; e++)
            uses += p->read[first + (size_t)e] - p->folded[first + (size_t)e];
        float rows = (float)uses / (float)stream_used(p->stream, l->at);
        float keep = exp2f(-rows / HALF_ROWS);
        for (int e = 0; e < l->n_expert; e++)
            l->use[e] = l->use[e] * keep +
                        (float)(p->read[first + (size_t)e] - p->folded[first + (size_t)e]);
    }
    memcpy(p->folded, p->read, (size_t)p->n_counts * sizeof *p->read);
    p->fresh = true;
}

/* False: not yet. */
static bool has_passed(struct cuda_backend *cu, cudaEvent_t event)
{
    cudaError_t e = cudaEventQuery(event);
    if (e == cudaErrorNotReady)
        cudaGetLastError();
    else
        CUDA_TRY(cu, e);
    return e == cudaSuccess;
}

static void read_counts(struct cuda_backend *cu, struct expert_places *p)
{
    if (p->counting && has_passed(cu, p->counted)) {
        p->counting = false;
        fold(p);
    }
    if (p->counting || ++p->steps % COUNT_STEPS)
        return;
    CUDA_TRY(cu, cudaMemcpyAsync(p->read, p->counts, (size_t)p->n_counts * sizeof *p->read,
                                 cudaMemcpyDeviceToHost, cu->stream));
    CUDA_TRY(cu, cudaEventRecord(p->counted, cu->stream));
    p->counting = true;
}

/* Exchanges */

/* The best exchange of a layer. */
static float best_of(const struct expert_places *p, const struct place_layer *l, int *in, int *out)
{
    int n;
    const int32_t *host = stream_places(p->stream, l->at, &n);
    *in = host[0];
    *out = l->held[0];
    for (int i = 1; i < n; i++)
        *in = l->use[host[i]] > l->use[*in] ? host[i] : *in;
    for (int i = 1; i < l->of->n_device; i++)
        *out = l->use[l->held[i]] < l->use[*out] ? l->held[i] : *out;
    return place_gain(l->use[*in], l->use[*out]);
}

/* Chooses exchanges of the layers that gain most, one of each; their places in `move`. Only while none is under way. */
static int plan(struct expert_places *p)
{
    float gains[PLACE_MOVES];
    int n = 0;
    for (int i = 0; i < p->n_layers; i++) {
        int in, out, at;
        float gain = best_of(p, &p->layers[i], &in, &out);
        if (gain <= 0)
            continue;
        for (at = 0; at < n && gains[at] >= gain; at++)
            ;
        if (at == PLACE_MOVES)
            continue;
        n += n < PLACE_MOVES;
        for (int j = n - 1; j > at; j--) {
            gains[j] = gains[j - 1];
            p->move[j].layer = p->move[j - 1].layer;
            p->move[j].in = p->move[j - 1].in;
            p->move[j].out = p->move[j - 1].out;
        }
        gains[at] = gain;
        p->move[at].layer = i;
        p->move[at].in = in;
        p->move[at].out = out;
    }
    return n;
}

static uint8_t *landing_of(const struct expert_places *p, const struct place_move *m)
{
    return p->landing + (size_t)(m - p->move) * p->expert_bytes;
}

static void start_move(struct cuda_backend *cu, struct expert_places *p, struct place_move *m)
{
    stream_fetch(cu, p->stream, p->layers[m->layer].at, m->in, landing_of(p, m), m->left,
                 m->landed);
}

static void finish_move(struct cuda_backend *cu, struct expert_places *p, struct place_move *m)
{
    struct place_layer *l = &p->layers[m->layer];
    int slot = 0;
    while (l->held[slot] != m->out)
        slot++;
    stream_fill(cu, p->stream, l->at, m->in, slot, landing_of(p, m));
    CUDA_TRY(cu, cudaEventRecord(m->left, cu->stream));
    cuda_launch(cu, place_exchange_kernel, dim3(1), 32, 0, LAUNCH_PLAIN,
                exchange_args{l->of->slot_of, m->in, m->out});
    stream_exchange(p->stream, l->at, m->in, m->out);
    l->held[slot] = m->in;
    m->layer = -1;
}

/* Number of exchanges under way, after those whose copies have landed were made. */
static int finish_moves(struct cuda_backend *cu, struct expert_places *p)
{
    int n = 0;
    for (int i = 0; i < PLACE_MOVES; i++) {
        struct place_move *m = &p->move[i];
        if (m->layer < 0)
            continue;
        if (has_passed(cu, m->landed))
            finish_move(cu, p, m);
        else
            n++;
    }
    return n;
}

void places_begin(struct cuda_backend *cu, struct expert_places *p)
{
    if (!p || cu->failed)
        return;
    int64_t now = clock_ns();
    p->allowance += p->then ? (double)(now - p->then) * 1e-9 * p->bytes_s : 0;
    p->allowance = fmin(p->allowance, PLACE_MOVES * (double)p->expert_bytes);
    p->then = now;
    int busy = finish_moves(cu, p);
    read_counts(cu, p);
    if (busy || !p->fresh || p->allowance < PLACE_MOVES * (double)p->expert_bytes || cu->failed)
        return;
    int n = plan(p);
    for (int i = 0; i < n; i++)
        start_move(cu, p, &p->move[i]);
    for (int i = n; i < PLACE_MOVES; i++)
        p->move[i].layer = -1;
    p->fresh = n > 0; /* more may follow */
    p->allowance -= n * (double)p->expert_bytes;
}

size_t places_uses(const struct expert_places *p, float *out)
{
    if (!p)
        return 0;
    if (out)
        memcpy(out, p->use, (size_t)p->n_counts * sizeof *out);
    return (size_t)p->n_counts;
}

void places_set(struct cuda_backend *cu, struct expert_places *p, const float *uses)
{
    if (!p)
        return;
    memcpy(p->use, uses, (size_t)p->n_counts * sizeof *uses);
    for (int n; !cu->failed && (n = plan(p)) > 0;) {
        for (int i = 0; i < n; i++)
            start_move(cu, p, &p->move[i]);
        for (int i = 0; i < n; i++) {
            CUDA_TRY(cu, cudaEventSynchronize(p->move[i].landed));
            finish_move(cu, p, &p->move[i]);
        }
    }
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
}

/* Making */

static bool make(struct cuda_backend *cu, struct expert_places *p, struct error *err)
{
    size_t counts = (size_t)p->n_counts * sizeof *p->counts;
    struct device_buffer list[] = {{(void **)&p->counts, counts},
                                   {(void **)&p->landing, PLACE_MOVES * p->expert_bytes}};
    if (!cuda_own(cu, list, 2, err) ||
        !cuda_pin((void **)&p->read, (void **)&p->read_mapped, counts, err))
        return false;
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream)); /* which cleared them */
    CUDA_TRY(cu, cudaEventCreateWithFlags(&p->counted, cudaEventDisableTiming));
    for (int i = 0; i < PLACE_MOVES && !cu->failed; i++) {
        CUDA_TRY(cu, cudaEventCreateWithFlags(&p->move[i].landed, cudaEventDisableTiming));
        CUDA_TRY(cu, cudaEventCreateWithFlags(&p->move[i].left, cudaEventDisableTiming));
    }
    if (cu->failed)
        *err = cu->error;
    return !cu->failed;
}

struct expert_places *places_new(struct cuda_backend *cu, struct expert_stream *s,
                                 struct offload_layer *const *layers, const int *n_expert, int n,
                                 struct error *err)
{
    struct expert_places *p = (struct expert_places *)mem_zalloc(1, sizeof *p);
    int n_held = 0, n_host;
    p->stream = s;
    p->layers = (struct place_layer *)mem_zalloc((size_t)n, sizeof *p->layers);
    for (int i = 0; i < n; i++) {
        if (!layers[i]->n_device || !stream_places(s, i, &n_host) || !n_host)
            continue;
        p->layers[p->n_layers].of = layers[i];
        p->layers[p->n_layers].at = i;
        p->layers[p->n_layers++].n_expert = n_expert[i];
        p->n_counts += n_expert[i];
        n_held += layers[i]->n_device;
        size_t bytes = stream_expert_bytes(s, i);
        p->expert_bytes = bytes > p->expert_bytes ? bytes : p->expert_bytes;
    }
    p->use = (float *)mem_zalloc((size_t)p->n_counts + 1, sizeof *p->use);
    p->folded = (uint32_t *)mem_zalloc((size_t)p->n_counts + 1, sizeof *p->folded);
    p->held = (int *)mem_zalloc((size_t)n_held + 1, sizeof *p->held);
    for (int i = 0; i < PLACE_MOVES; i++)
        p->move[i].layer = -1;
    if (!p->n_layers || !make(cu, p, err)) {
        places_free(p);
        return NULL;
    }
    int at = 0, held = 0;
    for (int i = 0; i < p->n_layers; i++) {
        struct place_layer *l = &p->layers[i];
        l->of->counts = p->counts + at;
        l->use = p->use + at;
        l->held = p->held + held;
        for (int k = 0; k < l->of->n_device; k++)
            l->held[k] = k;
        at += l->n_expert;
        held += l->of->n_device;
    }
    p->bytes_s = 1.0 / (BANDWIDTH_PART * stream_seconds(s));
    return p;
}

void places_free(struct expert_places *p)
{
    if (!p)
        return;
    if (p->read)
        cudaFreeHost(p->read);
    if (p->counted)
        cudaEventDestroy(p->counted);
    for (int i = 0; i < PLACE_MOVES; i++) {
        if (p->move[i].landed)
            cudaEventDestroy(p->move[i].landed);
        if (p->move[i].left)
            cudaEventDestroy(p->move[i].left);
    }
    mem_free(p->held);
    mem_free(p->folded);
    mem_free(p->use);
    mem_free(p->layers);
    mem_free(p);
}
