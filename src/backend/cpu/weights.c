/*
 * Weights in the CPU backend's form: which segments are packed (panel.h), the packing itself (all
 * threads, straight from the file's map to its place, never a second copy) and reading one row back
 * for the embedding. Owns the packed memory; kernels only read it.
 */
#include "backend/cpu/matmul.h"
#include "backend/cpu/panel.h"
#include "base/mem.h"

#include <string.h>

struct pack_job {
    const struct raw_weight *src;
    const struct mm_weight *w;
    struct mm_counter counter;
    int n_units; /* panels of all segments and experts: of the slice in work */
};

/* Panels packed between two releases of source pages. */
enum { PACK_SLICE = 1024 };

static void pack_main(void *arg, int ith, int nth)
{
    (void)ith, (void)nth;
    struct pack_job *j = arg;
    enum { STEP = 4 };
    for (;;) {
        int u = atomic_fetch_add_explicit(&j->counter.next, STEP, memory_order_relaxed);
        if (u >= j->n_units)
            return;
        int end = u + STEP < j->n_units ? u + STEP : j->n_units;
        for (; u < end; u++) {
            int at = u, i = 0;
            for (;; i++) {
                int n = j->w->seg[i].packed ? j->w->seg[i].n_panels * j->w->n_expert : 0;
                if (at < n)
                    break;
                at -= n;
            }
            const struct mm_seg *s = &j->w->seg[i];
            panel_pack(j->src, i, at / s->n_panels, at % s->n_panels,
                       (uint8_t *)s->data + (size_t)at * s->panel_bytes);
        }
    }
}

/* Tells the loader which source bytes panels [first, end) came from, run by run. */
static void release_source(const struct pack_job *j, int first, int end)
{
    int unit = 0;
    for (int i = 0; i < j->w->n_seg; i++) {
        const struct mm_seg *s = &j->w->seg[i];
        size_t row = raw_seg_row_bytes(&j->src->seg[i], j->src->n_in);
        for (int e = 0; s->packed && e < j->w->n_expert; e++, unit += s->n_panels) {
            int a = first > unit ? first - unit : 0, b = end - unit;
            b = b < s->n_panels ? b : s->n_panels;
            if (a >= b)
                continue;
            int last_row = b * MM_PANEL < s->rows ? b * MM_PANEL : s->rows;
            j->src->done(j->src->done_arg, j->src->seg[i].data[e] + (size_t)(a * MM_PANEL) * row,
                         (size_t)(last_row - a * MM_PANEL) * row);
        }
    }
}

struct mm_weight *mm_weight_new(const struct raw_weight *src, bool repack, struct pool *pool,
                                struct error *err)
{
    struct mm_weight *w = mem_zalloc(1, sizeof *w);
    w->n_in = src->n_in;
    w->n_out = src->n_out;
    w->n_expert = src->n_expert;
    w->n_seg = src->n_seg;
    struct pack_job job = {.src = src, .w = w};
    size_t at[3] = {0}, perm_at[3] = {0};
    bool any_raw = false;
    int row = 0;
    for (int i = 0; i < src->n_seg; i++) {
        const struct raw_seg *s = &src->seg[i];
        struct mm_seg *d = &w->seg[i];
        *d = (struct mm_seg){.type = s->type, .first_row = row, .rows = s->rows};
        row += s->rows;
        d->panel_bytes = repack ? panel_bytes(s, src->n_in) : 0;
        d->packed = d->panel_bytes > 0;
        bool floats = !d->packed || panel_reads_floats(s->type) || s->perm;
        w->wants_x |= floats;
        w->wants_q |= !floats;
        w->wants_fine |= !floats && panel_reads_fine(s->type);
        any_raw |= !d->packed;
        if (!d->packed)
            continue;
        d->group_len = s->group_len;
        d->n_panels = (s->rows + MM_PANEL - 1) / MM_PANEL;
        int panels = d->n_panels * src->n_expert;
        at[i] = w->mem_bytes;
        w->mem_bytes += (size_t)panels * d->panel_bytes;
        job.n_units += panels;
        perm_at[i] = w->mem_bytes;
        if (s->perm)
            w->mem_bytes += (size_t)src->n_expert * (size_t)src->n_in * sizeof(int32_t);
        w->mem_bytes = (w->mem_bytes + 63) & ~(size_t)63;
    }
    if (any_raw)
        w->raw = src->transient ? raw_weight_copy(src) : raw_weight_view(src);
    w->mem = w->mem_bytes ? mem_aligned(w->mem_bytes) : NULL;
    if ((any_raw && !w->raw) || (w->mem_bytes && !w->mem)) {
        error_set(err, "out of memory for a weight of %zu bytes", raw_weight_bytes(src));
        mm_weight_free(w);
        return NULL;
    }
    for (int i = 0; i < src->n_seg; i++) {
        if (!w->seg[i].packed)
            continue;
        w->seg[i].data = w->mem + at[i];
        if (!src->seg[i].perm || !w->mem)
            continue;
        int32_t *perm = (int32_t *)(w->mem + perm_at[i]);
        w->seg[i].perm = perm;
        for (int e = 0; e < src->n_expert; e++, perm += src->n_in)
            memcpy(perm, src->seg[i].perm[e], (size_t)src->n_in * sizeof *perm);
    }
    for (int total = job.n_units, first = 0; first < total; first = job.n_units) {
        atomic_store_explicit(&job.counter.next, first, memory_order_relaxed);
        job.n_units = first + PACK_SLICE < total ? first + PACK_SLICE : total;
        pool_run(pool, pack_main, &job);
        if (src->done && !src->transient)
            release_source(&job, first, job.n_units);
    }
    if (src->bias) {
        w->bias = mem_zalloc((size_t)src->n_out, sizeof(float));
        memcpy(w->bias, src->bias, (size_t)src->n_out * sizeof(float));
    }
    return w;
}

void mm_weight_free(struct mm_weight *w)
{
    if (!w)
        return;
    raw_weight_free(w->raw);
    mem_free(w->bias);
    mem_aligned_free(w->mem, w->mem_bytes);
    mem_free(w);
}

void mm_weight_row(const struct mm_weight *w, int row, float *dst)
{
    const struct mm_seg *s = w->seg;
    while (row >= s->first_row + s->rows)
        s++;
    if (s->packed)
        panel_row(s, w->n_in, row - s->first_row, dst);
    else
        raw_weight_row(w->raw, 0, row, dst);
}
