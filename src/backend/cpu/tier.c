/* Experts in the model's file: see tier.h. Owns the reading threads, the places and who is where. */
#include "backend/cpu/tier.h"
#include "backend/cpu/panel.h"
#include "backend/cpu/panel_pack.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

enum {
    PIECE_BYTES = 512 << 10, /* of one read */
    LEAST_THREADS = 4,
    MOST_THREADS = 16,
    FEW_GUESSES = 256, /* after which they are judged */
    HALF_LIFE = 64,    /* uses of a weight after which an expert's count is worth half */
};

enum where { ON_DISK, READING, AHEAD, IN_MEMORY }; /* AHEAD: being read, and no step waits for it */

/* The experts of one weight. */
struct tier_weight {
    struct gemm_weight *w;
    struct raw_weight *src; /* a view: its data are in the mapped file, which is never touched */
    size_t at[3];           /* of a segment's places */
    int n_places;
    int32_t *owner; /* (n_places) the expert of a place; -1 = none */
    struct tier_expert {
        enum where where;
        int pins, pieces; /* pieces still to be read */
        bool guessed;     /* read ahead, and not needed yet */
        float count;      /* of uses, decayed to the time `last` */
        uint64_t last;
    } * experts;    /* (n_expert) */
    uint64_t clock; /* requests */
    struct tier_weight *next;
};

struct tier_piece {
    struct tier_weight *of;
    int expert, seg, panel, n_panels;
};

struct cpu_tier {
    size_t bytes;
    struct tier_weight *weights;
    int n_threads;
    pthread_t threads[MOST_THREADS];
    int n_started;
    size_t buffer_bytes;
    enum isa isa;

    pthread_mutex_t lock; /* of all below, and of the weights' members */
    pthread_cond_t work, done;
    struct tier_piece *queue; /* (cap) a ring */
    size_t head, n, cap;
    int waiting;        /* experts that a step waits for */
    int guesses, right; /* experts read ahead, and then needed; of late */
    bool failed, quit;
    struct tier_stats stats;
};

/* Reading */

/* Source bytes of a panel's rows. */
static size_t panel_source(const struct tier_weight *w, int seg)
{
    return raw_seg_row_bytes(&w->src->seg[seg], w->src->n_in) * GEMM_PANEL;
}

static int panels_of_piece(const struct tier_weight *w, int seg)
{
    size_t panel = panel_source(w, seg);
    return panel < PIECE_BYTES ? (int)(PIECE_BYTES / panel) : 1;
}

static bool read_piece(const struct cpu_tier *t, const struct tier_piece *p, int place,
                       uint8_t *buffer)
{
    const struct tier_weight *w = p->of;
    const struct gemm_seg *s = &w->w->seg[p->seg];
    size_t row = raw_seg_row_bytes(&w->src->seg[p->seg], w->src->n_in);
    int first = p->panel * GEMM_PANEL, end = (p->panel + p->n_panels) * GEMM_PANEL;
    end = end < s->rows ? end : s->rows;
    const uint8_t *rows =
        w->src->fetch(w->src->fetch_arg, w->src->seg[p->seg].data[p->expert] + (size_t)first * row,
                      (size_t)(end - first) * row, buffer);
    if (!rows)
        return false;
    uint8_t *dst = (uint8_t *)(uintptr_t)s->data +
                   ((size_t)place * (size_t)s->n_panels + (size_t)p->panel) * s->panel_bytes;
    for (int i = 0; i < p->n_panels; i++)
        panel_pack(w->src, p->seg, p->expert, p->panel + i, rows + (size_t)i * GEMM_PANEL * row,
                   t->isa, dst + (size_t)i * s->panel_bytes);
    return true;
}

static void finish_piece(struct cpu_tier *t, const struct tier_piece *p, bool ok)
{
    struct tier_expert *e = &p->of->experts[p->expert];
    t->failed |= !ok;
    if (--e->pieces > 0)
        return;
    t->waiting -= e->where == READING;
    e->where = IN_MEMORY;
    pthread_cond_broadcast(&t->done);
}

static void *reader(void *arg)
{
    struct cpu_tier *t = arg;
    uint8_t *memory = mem_aligned(t->buffer_bytes + RAW_FETCH_ALIGN);
    uintptr_t at = (uintptr_t)memory;
    uint8_t *buffer = memory + (RAW_FETCH_ALIGN - at % RAW_FETCH_ALIGN) % RAW_FETCH_ALIGN;
    os_name_thread("steel-experts");
    pthread_mutex_lock(&t->lock);
    for (;;) {
        while (!t->n && !t->quit)
            pthread_cond_wait(&t->work, &t->lock);
        if (t->quit)
            break;
        struct tier_piece p = t->queue[t->head];
        t->head = (t->head + 1) % t->cap;
        t->n--;
        int place = p.of->w->place[p.expert];
        size_t bytes = (size_t)p.n_panels * panel_source(p.of, p.seg);
        pthread_mutex_unlock(&t->lock);
        bool ok = memory && read_piece(t, &p, place, buffer);
        pthread_mutex_lock(&t->lock);
        t->stats.bytes += bytes;
        finish_piece(t, &p, ok);
    }
    pthread_mutex_unlock(&t->lock);
    mem_aligned_free(memory, t->buffer_bytes + RAW_FETCH_ALIGN);
    return NULL;
}

/* Making */

struct cpu_tier *tier_new(size_t bytes, int n_threads)
{
    struct cpu_tier *t = mem_zalloc(1, sizeof *t);
    t->bytes = bytes;
    t->isa = isa_best();
    t->n_threads = 2 * n_threads;
    t->n_threads = t->n_threads < LEAST_THREADS  ? LEAST_THREADS
                   : t->n_threads > MOST_THREADS ? MOST_THREADS
                                                 : t->n_threads;
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->work, NULL);
    pthread_cond_init(&t->done, NULL);
    return t;
}

static void stop_reading(struct cpu_tier *t)
{
    pthread_mutex_lock(&t->lock);
    t->quit = true;
    pthread_cond_broadcast(&t->work);
    pthread_mutex_unlock(&t->lock);
    for (; t->n_started; t->n_started--)
        pthread_join(t->threads[t->n_started - 1], NULL);
}

void tier_free(struct cpu_tier *t)
{
    if (!t)
        return;
    stop_reading(t);
    CHECK(!t->weights, "a weight outlives its tier");
    pthread_cond_destroy(&t->work);
    pthread_cond_destroy(&t->done);
    pthread_mutex_destroy(&t->lock);
    mem_free(t->queue);
    mem_free(t);
}

bool tier_takes(const struct raw_weight *src, enum weight_role role)
{
    bool ok = (role == WEIGHT_EXPERTS || role == WEIGHT_EXPERTS_SHARED) && src->n_expert > 1 &&
              src->fetch && !src->transient;
    for (int i = 0; ok && i < src->n_seg; i++)
        ok = panel_bytes(&src->seg[i], src->n_in) > 0 && !src->seg[i].perm && !src->seg[i].scale &&
             !src->seg[i].zero &&
             src->seg[i].type != DT_F8_E4M3; /* its codes are checked as they are loaded */
    return ok;
}

struct gemm_weight *tier_weight_new(struct cpu_tier *t, const struct raw_weight *src)
{
    struct gemm_weight *w = gemm_weight_shape(src);
    struct tier_weight *tw = mem_zalloc(1, sizeof *tw);
    size_t n = (size_t)src->n_expert;
    tw->w = w;
    tw->src = raw_weight_view(src);
    tw->experts = mem_zalloc(n, sizeof *tw->experts);
    w->place = mem_zalloc(n, sizeof *w->place);
    for (size_t e = 0; e < n; e++)
        w->place[e] = -1;
    w->tier = tw;
    tw->next = t->weights;
    t->weights = tw;
    return w;
}

void tier_weight_free(struct cpu_tier *t, struct gemm_weight *w)
{
    struct tier_weight *tw = w->tier, **at = &t->weights;
    stop_reading(t); /* its file may be closed next */
    while (*at != tw)
        at = &(*at)->next;
    *at = tw->next;
    raw_weight_free(tw->src);
    mem_free(tw->experts);
    mem_free(tw->owner);
    mem_free(tw);
    mem_free(w->place);
    w->tier = NULL;
    w->place = NULL;
    gemm_weight_free(w);
}

/* Bytes of one packed expert. */
static size_t expert_bytes(const struct gemm_weight *w)
{
    size_t bytes = 0;
    for (int i = 0; i < w->n_seg; i++)
        bytes += (size_t)w->seg[i].n_panels * w->seg[i].panel_bytes;
    return bytes;
}

static bool give_places(struct cpu_tier *t, struct tier_weight *tw, double share, struct error *err)
{
    struct gemm_weight *w = tw->w;
    double n = floor(share * w->n_expert + 1e-9);
    int least = w->n_expert < 2 ? w->n_expert : 2; /* one is computed while another is read */
    tw->n_places = n > w->n_expert ? w->n_expert : n < least ? least : (int)n;
    if (n < 1 && w->n_expert > least)
        return error_set(err, "--expert-memory: %zu bytes hold fewer than two experts of a layer",
                         t->bytes);
    size_t places = (size_t)tw->n_places, pieces = 0;
    w->mem_bytes = places * expert_bytes(w);
    w->mem = mem_aligned(w->mem_bytes);
    if (!w->mem)
        return error_set(err, "out of memory: %zu bytes for experts", w->mem_bytes);
    size_t at = 0;
    for (int i = 0; i < w->n_seg; i++) {
        struct gemm_seg *s = &w->seg[i];
        s->data = w->mem + at;
        at += places * (size_t)s->n_panels * s->panel_bytes;
        int step = panels_of_piece(tw, i);
        pieces += (size_t)((s->n_panels + step - 1) / step);
        size_t buffer = (size_t)step * panel_source(tw, i) + 2 * RAW_FETCH_ALIGN;
        t->buffer_bytes = buffer > t->buffer_bytes ? buffer : t->buffer_bytes;
    }
    tw->owner = mem_zalloc(places, sizeof *tw->owner);
    for (size_t i = 0; i < places; i++)
        tw->owner[i] = -1;
    /* Two weights of a layer, and the next layer's read ahead. */
    t->cap = 4 * pieces * places + 1 > t->cap ? 4 * pieces * places + 1 : t->cap;
    t->stats.memory += w->mem_bytes;
    return true;
}

bool tier_settle(struct cpu_tier *t, struct error *err)
{
    double all = 0;
    for (const struct tier_weight *w = t->weights; w; w = w->next)
        all += (double)expert_bytes(w->w) * w->w->n_expert;
    if (all <= 0)
        return error_set(err, "--expert-memory: the model has no experts that can be read from its "
                              "file as they are");
    for (struct tier_weight *w = t->weights; w; w = w->next)
        if (!give_places(t, w, (double)t->bytes / all, err))
            return false;
    t->queue = mem_zalloc(t->cap, sizeof *t->queue);
    for (; t->n_started < t->n_threads; t->n_started++)
        if (pthread_create(&t->threads[t->n_started], NULL, reader, t))
            break;
    return t->n_started > 0 || error_set(err, "cannot start a thread that reads experts");
}

void tier_stats(struct cpu_tier *t, struct tier_stats *out)
{
    pthread_mutex_lock(&t->lock);
    *out = t->stats;
    pthread_mutex_unlock(&t->lock);
}

/* Steps */

int tier_round(const struct gemm_weight *w)
{
    return w->tier->n_places > 1 ? w->tier->n_places / 2 : 1;
}

static float count_now(const struct tier_weight *w, const struct tier_expert *e)
{
    return e->count * exp2f(-(float)(w->clock - e->last) / HALF_LIFE);
}

/* A place for one more expert: a free one, or that of the expert used least. -1: all are kept. below: take only the
 * place of an expert whose count is less. */
static int find_place(const struct tier_weight *w, float below)
{
    int best = -1;
    for (int i = 0; i < w->n_places; i++) {
        if (w->owner[i] < 0)
            return i;
        const struct tier_expert *e = &w->experts[w->owner[i]];
        float count = count_now(w, e);
        if (!e->pins && e->where == IN_MEMORY && count < below) {
            best = i;
            below = count;
        }
    }
    return best;
}

static void start_reading(struct cpu_tier *t, struct tier_weight *w, int expert, int place,
                          enum where where)
{
    struct tier_expert *e = &w->experts[expert];
    if (w->owner[place] >= 0) {
        w->experts[w->owner[place]].where = ON_DISK;
        w->experts[w->owner[place]].guessed = false;
        w->w->place[w->owner[place]] = -1;
    }
    w->owner[place] = expert;
    w->w->place[expert] = place;
    e->where = where;
    for (int i = 0; i < w->w->n_seg; i++) {
        int n = w->w->seg[i].n_panels, step = panels_of_piece(w, i);
        for (int p = 0; p < n; p += step, e->pieces++) {
            CHECK(t->n < t->cap, "more than %zu reads of experts", t->cap);
            t->queue[(t->head + t->n++) % t->cap] =
                (struct tier_piece){w, expert, i, p, p + step < n ? step : n - p};
        }
    }
    pthread_cond_broadcast(&t->work);
}

void tier_request(struct cpu_tier *t, const struct gemm_weight *w, const int32_t *experts, int n)
{
    struct tier_weight *tw = w->tier;
    pthread_mutex_lock(&t->lock);
    tw->clock++;
    for (int i = 0; i < n; i++) { /* first: none of these may go for another */
        struct tier_expert *e = &tw->experts[experts[i]];
        e->count = count_now(tw, e) + 1;
        e->last = tw->clock;
        e->pins++;
        bool here = e->where != ON_DISK;
        t->stats.hits += here;
        t->stats.misses += !here;
        t->stats.ahead += e->guessed;
        t->right += e->guessed;
        e->guessed = false;
        t->waiting += e->where == AHEAD;
        e->where = e->where == AHEAD ? READING : e->where;
    }
    for (int i = 0; i < n; i++) {
        if (tw->experts[experts[i]].where != ON_DISK)
            continue;
        int place = find_place(tw, INFINITY);
        while (place < 0) { /* reads ahead hold places until they are done */
            pthread_cond_wait(&t->done, &t->lock);
            place = find_place(tw, INFINITY);
        }
        t->waiting++;
        start_reading(t, tw, experts[i], place, READING);
    }
    pthread_mutex_unlock(&t->lock);
}

static bool is_here(const struct tier_weight *w, const int32_t *experts, int n)
{
    for (int i = 0; i < n; i++)
        if (w->experts[experts[i]].where != IN_MEMORY)
            return false;
    return true;
}

bool tier_wait(struct cpu_tier *t, const struct gemm_weight *w, const int32_t *experts, int n)
{
    pthread_mutex_lock(&t->lock);
    int64_t start = clock_ns();
    bool waits = !is_here(w->tier, experts, n);
    while (!is_here(w->tier, experts, n))
        pthread_cond_wait(&t->done, &t->lock);
    if (waits)
        t->stats.wait += (double)(clock_ns() - start) * 1e-9;
    bool ok = !t->failed;
    pthread_mutex_unlock(&t->lock);
    return ok;
}

void tier_release(struct cpu_tier *t, const struct gemm_weight *w, const int32_t *experts, int n)
{
    pthread_mutex_lock(&t->lock);
    for (int i = 0; i < n; i++)
        w->tier->experts[experts[i]].pins--;
    pthread_mutex_unlock(&t->lock);
}

/* Whether guesses are worth their reads. */
static bool guesses_well(struct cpu_tier *t)
{
    if (t->guesses > 2 * FEW_GUESSES) { /* what was long ago counts less */
        t->guesses /= 2;
        t->right /= 2;
    }
    return t->guesses < FEW_GUESSES || 2 * t->right >= t->guesses;
}

void tier_ahead(struct cpu_tier *t, const struct gemm_weight *w, const int32_t *experts, int n)
{
    struct tier_weight *tw = w->tier;
    pthread_mutex_lock(&t->lock);
    for (int i = 0; i < n && !t->waiting && guesses_well(t); i++) {
        struct tier_expert *e = &tw->experts[experts[i]];
        int place = e->where == ON_DISK ? find_place(tw, INFINITY) : -1;
        if (place < 0)
            continue;
        t->guesses++;
        e->guessed = true;
        start_reading(t, tw, experts[i], place, AHEAD);
    }
    pthread_mutex_unlock(&t->lock);
}
