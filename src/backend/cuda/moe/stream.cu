/* Experts of the host copied to the device in prompts: see stream.h. Owns the stream of copies, the landing buffers, the tiles of
 * one group, and what decides how many are copied. */
#include "backend/cuda/moe/stream.h"
#include "backend/cuda/core/pack.cuh"
#include "backend/cuda/moe/offload.h"
#include "backend/cuda/moe/place.h"

extern "C" {
#include "base/clock.h"
#include "base/mem.h"
}

#include <math.h>
#include <string.h>
#include <unistd.h>

enum { LANDINGS = 2, PARTS = 2 * MAX_SEGS, GROUP_BYTES = 32 << 20, CHOOSE_THREADS = 128 };

/* A segment of gate and up, or of down, on the host and where its group goes. */
struct stream_part {
    struct expert_panels from;
    size_t expert_bytes;         /* of panels */
    size_t landing_at, tiles_at; /* offsets of a group's experts */
    const struct seg *to;        /* the device's form */
    int n_in, n_kt;
};

struct stream_source {
    const struct matrix *gate_up,
        *down; /* the device's own experts of this layer: formats and shapes */
    const float *up_bias, *down_bias; /* device (host's experts, n_out) or NULL */
    struct stream_part part[PARTS];
    int n_parts;     /* 0: this layer's experts are not copied */
    int n, n_expert; /* experts that the device has not, and of the layer */
    int32_t *place;  /* (n) their places on the host, by rank */
    int used, group; /* experts of a row, of a group */
    size_t bytes;    /* of an expert's panels */
    bool last;       /* the network's last layer: rows without logits are not computed */
    int count;       /* places that this step copies */
};

struct expert_stream {
    struct stream_source *layers;
    int n_layers;
    cudaStream_t copies;
    cudaEvent_t landed[LANDINGS], left[LANDINGS];
    uint8_t *landing[LANDINGS], *tiles;
    float *biases; /* of a group: gate and up, then down */
    size_t landing_bytes, tiles_bytes, n_biases;
    int32_t *places; /* of all layers */
    struct stream_uses uses;
    struct stream_cost cost; /* per byte of an expert's panels */
    double copy;             /* seconds per byte */
    int n_copied, n_read;    /* groups, since the beginning */
    int next, next_rank;     /* the next group to copy: its layer and first rank */
};

static struct expert_stream *stream_of(const struct cuda_backend *cu)
{
    return offload_stream(cu);
}

/* How many to copy */

int stream_share(int n, int group, double host_s, double copy_s)
{
    double k = host_s / (copy_s + host_s / n);
    int share = (int)(k / group) * group;
    return n - k < 0.5 * group ? n : share;
}

/* Seconds that the CPU needs for the experts of a layer when `rows` rows choose among all experts alike. */
static double host_seconds(const struct expert_stream *s, const struct stream_source *l, int rows)
{
    double uses = (double)rows * l->used * l->n / l->n_expert;
    double experts = uses < l->n ? uses : l->n;
    return (double)l->bytes * (s->cost.expert * experts + s->cost.use * uses);
}

static int count_for(const struct expert_stream *s, const struct stream_source *l, int rows)
{
    if (!l->n_parts)
        return 0;
    return stream_share(l->n, l->group, host_seconds(s, l, rows), s->copy * (double)l->bytes);
}

bool stream_can(const struct cuda_backend *cu)
{
    return stream_of(cu) && !step_repeats(cu);
}

bool stream_pays(const struct cuda_backend *cu, int rows)
{
    const struct expert_stream *s = stream_of(cu);
    for (int i = 0; i < s->n_layers; i++)
        if (count_for(s, &s->layers[i], rows) > 0)
            return true;
    return false;
}

/* Copies */

/* Finds the next group of this step. False: all are copied. */
static bool next_group(struct expert_stream *s)
{
    while (s->next < s->n_layers && s->next_rank >= s->layers[s->next].count) {
        s->next++;
        s->next_rank = 0;
    }
    return s->next < s->n_layers;
}

static int group_size(const struct stream_source *l, int first)
{
    return l->count - first < l->group ? l->count - first : l->group;
}

/* Number of ranks from `first` on, of n, whose places follow each other. */
static int run_of(const struct stream_source *l, int first, int n)
{
    int run = 1;
    while (run < n && l->place[first + run] == l->place[first] + run)
        run++;
    return run;
}

static void copy_group(struct cuda_backend *cu, struct expert_stream *s,
                       const struct stream_source *l, int first, int n, uint8_t *landing)
{
    for (int at = 0, run; at < n; at += run) {
        run = run_of(l, first + at, n - at);
        for (int i = 0; i < l->n_parts; i++) {
            const struct stream_part *p = &l->part[i];
            CUDA_TRY(cu, cudaMemcpyAsync(
                             landing + p->landing_at + (size_t)at * p->expert_bytes,
                             p->from.data + (size_t)l->place[first + at] * p->expert_bytes,
                             (size_t)run * p->expert_bytes, cudaMemcpyHostToDevice, s->copies));
        }
    }
}

/* The biases (n, width) of a group, from those of the host's experts. */
static const float *group_bias(struct cuda_backend *cu, const struct stream_source *l, int first,
                               int n, const float *from, int width, float *to)
{
    for (int at = 0, run; from && at < n; at += run) {
        run = run_of(l, first + at, n - at);
        CUDA_TRY(cu, cudaMemcpyAsync(to + (size_t)at * (size_t)width,
                                     from + (size_t)l->place[first + at] * (size_t)width,
                                     (size_t)run * (size_t)width * sizeof(float),
                                     cudaMemcpyDeviceToDevice, cu->stream));
    }
    return from ? to : NULL;
}

static void copy_next(struct cuda_backend *cu, struct expert_stream *s)
{
    if (cu->failed || !next_group(s))
        return;
    const struct stream_source *l = &s->layers[s->next];
    int slot = s->n_copied % LANDINGS, n = group_size(l, s->next_rank);
    CUDA_TRY(cu, cudaStreamWaitEvent(s->copies, s->left[slot], 0));
    copy_group(cu, s, l, s->next_rank, n, s->landing[slot]);
    CUDA_TRY(cu, cudaEventRecord(s->landed[slot], s->copies));
    s->next_rank += n;
    s->n_copied++;
}

void stream_choose(struct cuda_backend *cu, bool all)
{
    struct expert_stream *s = stream_of(cu);
    const struct step_layout *step = &cu->step.layout;
    for (int i = 0; i < s->n_layers; i++) {
        struct stream_source *l = &s->layers[i];
        l->count = !all         ? count_for(s, l, l->last ? step->n_out : step->n_tokens)
                   : l->n_parts ? l->n
                                : 0;
    }
}

void stream_begin(struct cuda_backend *cu, struct expert_stream *s)
{
    struct pick_case c = {};
    c.rows = cu->step.layout.n_tokens;
    for (int i = 0; i < s->n_layers; i++)
        s->layers[i].count = 0;
    pick_run(cu, PICK_AWAY, &c, N_STAGES);
    s->next = s->next_rank = 0;
    s->n_read = s->n_copied; /* a step without logits does not read its last layer's */
    for (int i = 0; i < LANDINGS; i++)
        copy_next(cu, s);
}

size_t stream_bytes(size_t expert, size_t layer)
{
    size_t group = layer < GROUP_BYTES ? layer : (size_t)GROUP_BYTES;
    group = expert > group ? expert : group;
    size_t moved = PLACE_MOVES * (expert + (4 << 10));
    size_t all = (LANDINGS + 1) * group + moved;
    return all + all / 16 + (256 << 10); /* both forms, and what rounding takes */
}

int stream_group(const struct expert_stream *s)
{
    int most = 0;
    for (int i = 0; s && i < s->n_layers; i++)
        most = s->layers[i].group > most ? s->layers[i].group : most;
    return most;
}

int stream_count(const struct expert_stream *s, int at)
{
    return s ? s->layers[at].count : 0;
}

struct stream_uses stream_uses(const struct expert_stream *s)
{
    struct stream_uses none = {};
    return s ? s->uses : none;
}

/* Groups */

struct choose_args {
    struct stream_uses uses;
    float *own; /* (rows, n) */
    int used, first, n;
};

/* The weights of the experts of a group, as router_select gives them for those on the device. One block per row. */
static __global__ void __launch_bounds__(CHOOSE_THREADS)
    stream_choose_kernel(const __grid_constant__ struct choose_args p)
{
    dependency_wait();
    dependency_trigger();
    float *row = p.own + (size_t)blockIdx.x * (size_t)p.n;
    for (int i = (int)threadIdx.x; i < p.n; i += CHOOSE_THREADS)
        row[i] = -INFINITY;
    __syncthreads();
    if ((int)threadIdx.x >= p.used)
        return;
    size_t at = (size_t)blockIdx.x * (size_t)p.used + threadIdx.x;
    int i = p.uses.rank[at] - p.first;
    if (i >= 0 && i < p.n)
        row[i] = p.uses.weight[at];
}

/* n experts of a segment. */
static void unpack(struct cuda_backend *cu, const struct stream_part *part, int n,
                   const uint8_t *panels, uint8_t *tiles)
{
    const struct expert_panels *f = &part->from;
    struct repack p = {};
    p.kind = part->to->kind;
    p.dtype = part->to->dtype;
    p.n_in = part->n_in;
    p.n_kt = part->n_kt;
    p.tile_bytes = part->to->tile_bytes;
    p.rows = n * part->to->n_tiles * TILE_ROWS;
    p.data = panels;
    p.out = tiles;
    p.panel.panel_bytes = f->panel_bytes;
    p.panel.scales = f->scales;
    p.panel.block = f->block;
    p.panel.unit_bytes = f->scales + f->columns / 32 * f->block;
    p.panel.flip = f->flip;
    while (1 << p.panel.log_columns < f->columns)
        p.panel.log_columns++;
    cuda_repack(cu, p, n * part->to->n_tiles);
}

static struct matrix group_matrix(const struct matrix *of, const struct stream_part *part, int n,
                                  const uint8_t *tiles, const float *bias)
{
    struct matrix m = *of;
    m.n_expert = n;
    for (int i = 0; i < m.n_seg; i++)
        m.seg[i].base = tiles + part[i].tiles_at;
    m.bias = bias;
    return m;
}

static void run_group(struct cuda_backend *cu, struct expert_stream *s,
                      const struct stream_source *l, int first, int n, const struct pick_case *c,
                      const struct experts *e, bool adds)
{
    struct experts g = *e;
    struct pick_case d = *c;
    const struct matrix *gate_up = l->gate_up;
    float *beside = s->biases + (size_t)l->group * (size_t)gate_up->n_out;
    struct matrix up =
        group_matrix(gate_up, l->part, n, s->tiles,
                     group_bias(cu, l, first, n, l->up_bias, gate_up->n_out, s->biases));
    struct matrix down =
        group_matrix(l->down, l->part + gate_up->n_seg, n, s->tiles,
                     group_bias(cu, l, first, n, l->down_bias, l->down->n_out, beside));
    g.gate_up = d.w = &up;
    g.down = d.mlp.down = &down;
    g.rule.n_expert = n;
    g.rule.used = l->used < n ? l->used : n;
    g.offload = NULL;
    g.routed = true;
    g.adds = adds;
    d.moe.experts = &g;
    struct choose_args p = {s->uses, cu->routing.own, l->used, first, n};
    cuda_launch(cu, stream_choose_kernel, dim3((unsigned)c->rows), CHOOSE_THREADS, 0, LAUNCH_EARLY,
                p);
    const struct cuda_pick *pick = pick_find(cu, PICK_MOE, &d);
    pick_input(cu, pick, &d);
    pick_go(cu, pick, &d);
}

void stream_run(struct cuda_backend *cu, struct expert_stream *s, int at, const struct pick_case *c,
                const struct experts *e, bool adds)
{
    const struct stream_source *l = &s->layers[at];
    for (int first = 0; first < l->count; first += l->group) {
        int slot = s->n_read++ % LANDINGS, n = group_size(l, first);
        CUDA_TRY(cu, cudaStreamWaitEvent(cu->stream, s->landed[slot], 0));
        for (int i = 0; i < l->n_parts; i++)
            unpack(cu, &l->part[i], n, s->landing[slot] + l->part[i].landing_at,
                   s->tiles + l->part[i].tiles_at);
        CUDA_TRY(cu, cudaEventRecord(s->left[slot], cu->stream));
        copy_next(cu, s);
        run_group(cu, s, l, first, n, c, e, adds || first > 0);
    }
}

/* Single experts, for place.cu */

int stream_used(const struct expert_stream *s, int at)
{
    return s->layers[at].used;
}

double stream_seconds(const struct expert_stream *s)
{
    return s->copy;
}

const int32_t *stream_places(const struct expert_stream *s, int at, int *n)
{
    *n = s->layers[at].n;
    return s->layers[at].n_parts ? s->layers[at].place : NULL;
}

size_t stream_expert_bytes(const struct expert_stream *s, int at)
{
    const struct stream_source *l = &s->layers[at];
    size_t bytes = 0;
    for (int i = 0; i < l->n_parts; i++)
        bytes += align_up(l->part[i].expert_bytes, 256);
    return bytes;
}

void stream_fetch(struct cuda_backend *cu, struct expert_stream *s, int at, int place,
                  uint8_t *landing, cudaEvent_t left, cudaEvent_t landed)
{
    const struct stream_source *l = &s->layers[at];
    CUDA_TRY(cu, cudaStreamWaitEvent(s->copies, left, 0));
    for (int i = 0; i < l->n_parts; i++) {
        const struct stream_part *p = &l->part[i];
        CUDA_TRY(cu, cudaMemcpyAsync(landing, p->from.data + (size_t)place * p->expert_bytes,
                                     p->expert_bytes, cudaMemcpyHostToDevice, s->copies));
        landing += align_up(p->expert_bytes, 256);
    }
    CUDA_TRY(cu, cudaEventRecord(landed, s->copies));
}

static void fill_bias(struct cuda_backend *cu, const struct matrix *m, const float *from, int place,
                      int slot)
{
    size_t width = (size_t)m->n_out;
    if (from)
        CUDA_TRY(cu, cudaMemcpyAsync((float *)m->bias + (size_t)slot * width,
                                     from + (size_t)place * width, width * sizeof(float),
                                     cudaMemcpyDeviceToDevice, cu->stream));
}

void stream_fill(struct cuda_backend *cu, struct expert_stream *s, int at, int place, int slot,
                 const uint8_t *landing)
{
    const struct stream_source *l = &s->layers[at];
    for (int i = 0; i < l->n_parts; i++) {
        const struct stream_part *p = &l->part[i];
        unpack(cu, p, 1, landing, (uint8_t *)p->to->base + (size_t)slot * p->to->expert_bytes);
        landing += align_up(p->expert_bytes, 256);
    }
    fill_bias(cu, l->gate_up, l->up_bias, place, slot);
    fill_bias(cu, l->down, l->down_bias, place, slot);
}

void stream_wait(struct expert_stream *s)
{
    if (s && s->copies)
        cudaStreamSynchronize(s->copies);
}

void stream_exchange(struct expert_stream *s, int at, int in, int out)
{
    int32_t *place = s->layers[at].place;
    while (*place != in)
        place++;
    *place = out;
}

/* Making */

/* Adds the segments of a matrix. False: their form is not one that the device reads. */
static bool add_parts(struct stream_source *l, struct backend *host, const struct weight *w)
{
    const struct cuda_weight *cw = (const struct cuda_weight *)w->impl;
    for (int i = 0; i < cw->m.n_seg; i++) {
        struct stream_part *p = &l->part[l->n_parts];
        if (!host->ops->experts->panels(host, cw->host, i, &p->from) || !panel_known(p->from.type))
            return false;
        CHECK(p->from.n_panels == cw->m.seg[i].n_tiles, "panels of %d rows", TILE_ROWS);
        p->expert_bytes = (size_t)p->from.n_panels * p->from.panel_bytes;
        p->to = &cw->m.seg[i];
        p->n_in = cw->m.n_in;
        p->n_kt = cw->m.n_kt;
        l->bytes += p->expert_bytes;
        l->n_parts++;
    }
    return true;
}

static void add_layer(struct expert_stream *s, struct backend *host, int at,
                      const struct stream_layer *of, int n_layers)
{
    const struct mlp *m = of->mlp;
    const struct cuda_weight *up = (const struct cuda_weight *)m->experts.gate_up->impl;
    const struct cuda_weight *down = (const struct cuda_weight *)m->experts.down->impl;
    struct stream_source *l = &s->layers[at];
    l->gate_up = &up->m;
    l->down = &down->m;
    l->up_bias = up->host_bias;
    l->down_bias = down->host_bias;
    l->n_expert = up->m.n_expert + l->n;
    l->used = m->router.n_used;
    l->last = of->layer == n_layers - 1;
    if (apart_experts(m) || !add_parts(l, host, m->experts.gate_up) ||
        !add_parts(l, host, m->experts.down)) {
        l->n_parts = 0;
        return;
    }
    l->group = (int)(GROUP_BYTES / l->bytes);
    l->group = l->group < 1 ? 1 : l->group < l->n ? l->group : l->n;
    size_t landing = 0, tiles = 0;
    size_t biases = (size_t)l->group * (size_t)(l->gate_up->n_out + l->down->n_out);
    if (l->up_bias || l->down_bias)
        s->n_biases = biases > s->n_biases ? biases : s->n_biases;
    for (int i = 0; i < l->n_parts; i++) {
        struct stream_part *p = &l->part[i];
        p->landing_at = landing;
        p->tiles_at = tiles;
        landing += align_up((size_t)l->group * p->expert_bytes, 256);
        tiles += align_up((size_t)l->group * p->to->expert_bytes, 256);
    }
    s->landing_bytes = landing > s->landing_bytes ? landing : s->landing_bytes;
    s->tiles_bytes = tiles > s->tiles_bytes ? tiles : s->tiles_bytes;
}

/* Copies from memory that is not pinned are slower, which measure() sees. Small blocks share pages with others, and a
 * page is pinned once. */
static void pin(const struct stream_part *part, const struct weight *w)
{
    struct cuda_weight *cw = (struct cuda_weight *)w->impl;
    const struct expert_panels *f = &part->from;
    if ((uintptr_t)f->memory % (uintptr_t)sysconf(_SC_PAGESIZE))
        return;
    if (cudaHostRegister((void *)f->memory, f->memory_bytes, cudaHostRegisterDefault) ==
        cudaSuccess)
        cw->host_pinned = f->memory;
    else
        cudaGetLastError();
}

/* Seconds to copy a byte: of a group, the better of two. */
static void measure(struct cuda_backend *cu, struct expert_stream *s, const struct stream_source *l)
{
    s->copy = INFINITY;
    for (int i = 0; i < 3 && !cu->failed; i++) {
        int64_t start = clock_ns();
        copy_group(cu, s, l, 0, l->group, s->landing[0]);
        CUDA_TRY(cu, cudaStreamSynchronize(s->copies));
        double t = (double)(clock_ns() - start) * 1e-9 / (double)l->bytes / l->group;
        s->copy = i && t < s->copy ? t : s->copy;
    }
}

static bool make(struct cuda_backend *cu, struct expert_stream *s, int max_used, struct error *err)
{
    size_t uses = (size_t)cu->shape.max_tokens * (size_t)max_used;
    struct device_buffer list[] = {
        {(void **)&s->landing[0], s->landing_bytes},
        {(void **)&s->landing[1], s->landing_bytes},
        {(void **)&s->tiles, s->tiles_bytes},
        {(void **)&s->biases, s->n_biases * sizeof(float)},
        {(void **)&s->uses.rank, uses * sizeof(int32_t)},
        {(void **)&s->uses.weight, uses * sizeof(float)},
    };
    if (!cuda_own(cu, list, (int)(sizeof list / sizeof *list), err))
        return false;
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream)); /* which cleared them */
    CUDA_TRY(cu, cudaStreamCreateWithFlags(&s->copies, cudaStreamNonBlocking));
    for (int i = 0; i < LANDINGS && !cu->failed; i++) {
        CUDA_TRY(cu, cudaEventCreateWithFlags(&s->landed[i], cudaEventDisableTiming));
        CUDA_TRY(cu, cudaEventCreateWithFlags(&s->left[i], cudaEventDisableTiming));
    }
    if (cu->failed)
        *err = cu->error;
    return !cu->failed;
}

/* At first the device has the first experts. If the host has all, those before them are there, too. */
static void add_places(struct expert_stream *s, const struct stream_layer *layers)
{
    size_t all = 0;
    for (int i = 0; i < s->n_layers; i++) {
        s->layers[i].n = layers[i].n;
        all += (size_t)layers[i].n;
    }
    int32_t *place = s->places = (int32_t *)mem_zalloc(all + 1, sizeof *place);
    for (int i = 0; i < s->n_layers; i++) {
        s->layers[i].place = place;
        for (int k = 0; k < layers[i].n; k++)
            *place++ = layers[i].first + k;
    }
}

struct expert_stream *stream_new(struct cuda_backend *cu, struct backend *host,
                                 const struct stream_layer *layers, int n_layers, struct error *err)
{
    if (!host->ops->experts->panels)
        return NULL;
    struct expert_stream *s = (struct expert_stream *)mem_zalloc(1, sizeof *s);
    const struct stream_source *some = NULL;
    int used = 0;
    s->layers = (struct stream_source *)mem_zalloc((size_t)n_layers, sizeof *s->layers);
    s->n_layers = n_layers;
    add_places(s, layers);
    for (int i = 0; i < n_layers; i++) {
        struct stream_source *l = &s->layers[i];
        add_layer(s, host, i, &layers[i], cu->net->n_layers);
        some = !some && l->n_parts ? l : some;
        used = l->used > used ? l->used : used;
    }
    if (!some || !make(cu, s, used, err)) {
        stream_free(s);
        return NULL;
    }
    for (int i = 0; i < n_layers; i++)
        if (s->layers[i].n_parts) {
            pin(&s->layers[i].part[0], layers[i].mlp->experts.gate_up);
            pin(&s->layers[i].part[s->layers[i].gate_up->n_seg], layers[i].mlp->experts.down);
        }
    measure(cu, s, some);
    s->cost = offload_measure(cu, (int)(some - s->layers));
    s->cost.expert /= (double)some->bytes;
    s->cost.use /= (double)some->bytes;
    if (cu->failed) {
        *err = cu->error;
        stream_free(s);
        return NULL;
    }
    return s;
}

void stream_free(struct expert_stream *s)
{
    if (!s)
        return;
    stream_wait(s);
    for (int i = 0; i < LANDINGS; i++) {
        if (s->landed[i])
            cudaEventDestroy(s->landed[i]);
        if (s->left[i])
            cudaEventDestroy(s->left[i]);
    }
    if (s->copies)
        cudaStreamDestroy(s->copies);
    mem_free(s->places);
    mem_free(s->layers);
    mem_free(s);
}
