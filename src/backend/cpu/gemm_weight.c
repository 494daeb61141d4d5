/*
 * Weights in the CPU backend's form: which segments are packed (panel.h), the packing, and reading one row
 * back for the embedding. Owns the packed memory; kernels only read it.
 *
 * Packing is split into pieces of a few panels, which threads take in the order of the file. A thread reads
 * its piece into a buffer that stays in the second-level cache, and packs it to its place while the file's
 * next pieces are read. Reading is cheaper than faulting the file's pages in, and leaves no mapping.
 */
#include "backend/backend.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/panel_pack.h"
#include "backend/cpu/panel.h"
#include "base/mem.h"

#include <stdatomic.h>
#include <string.h>

/* Source bytes of a piece: half of a small second-level cache, so that they are still there to be
 * packed. */
enum { PIECE_BYTES = 256 << 10 };

struct pack_job {
    const struct raw_weight *src;
    const struct gemm_weight *w;
    enum isa isa;
    int step[3];      /* panels per piece, by segment */
    int n_pieces[3];  /* pieces per expert, by segment */
    int total;        /* pieces of the whole weight */
    uint8_t *buffers; /* (n_threads, buffer_bytes); NULL: the source is in memory */
    size_t buffer_bytes;
    _Atomic bool failed; /* the file could not be read */
};

/* Counts the pieces, and the bytes of the largest. */
static void plan(struct pack_job *j)
{
    for (int i = 0; i < j->w->n_seg; i++) {
        const struct gemm_seg *s = &j->w->seg[i];
        if (!s->packed)
            continue;
        size_t panel = raw_seg_row_bytes(&j->src->seg[i], j->src->n_in) * GEMM_PANEL;
        size_t step = panel < PIECE_BYTES ? PIECE_BYTES / panel : 1;
        j->step[i] = step < (size_t)s->n_panels ? (int)step : s->n_panels;
        j->n_pieces[i] = (s->n_panels + j->step[i] - 1) / j->step[i];
        j->total += j->n_pieces[i] * j->w->n_expert;
        size_t bytes = panel * (size_t)j->step[i];
        j->buffer_bytes = bytes > j->buffer_bytes ? bytes : j->buffer_bytes;
    }
    j->buffer_bytes = (j->buffer_bytes + 63) & ~(size_t)63;
}

static bool pack_piece(const struct pack_job *j, int piece, uint8_t *buffer)
{
    int i = 0;
    while (piece >= j->n_pieces[i] * j->w->n_expert)
        piece -= j->n_pieces[i++] * j->w->n_expert;
    const struct gemm_seg *s = &j->w->seg[i];
    int e = piece / j->n_pieces[i], first = piece % j->n_pieces[i] * j->step[i];
    int end = first + j->step[i] < s->n_panels ? first + j->step[i] : s->n_panels;
    int last_row = end * GEMM_PANEL < s->rows ? end * GEMM_PANEL : s->rows;
    size_t row = raw_seg_row_bytes(&j->src->seg[i], j->src->n_in);
    const uint8_t *rows = j->src->seg[i].data[e] + (size_t)first * GEMM_PANEL * row;
    if (buffer)
        rows = j->src->read(j->src->read_arg, rows, (size_t)(last_row - first * GEMM_PANEL) * row,
                            buffer);
    if (!rows)
        return false;
    uint8_t *dst = (uint8_t *)s->data + ((size_t)e * (size_t)s->n_panels) * s->panel_bytes;
    for (int p = first; p < end; p++)
        panel_pack(j->src, i, e, p, rows + (size_t)(p - first) * GEMM_PANEL * row, j->isa,
                   dst + (size_t)p * s->panel_bytes);
    return true;
}

static void pack_pieces(void *arg, int ith, int first, int last)
{
    struct pack_job *j = arg;
    uint8_t *buffer = j->buffers ? j->buffers + (size_t)ith * j->buffer_bytes : NULL;
    for (int piece = first; piece < last; piece++)
        if (!atomic_load_explicit(&j->failed, memory_order_relaxed) &&
            !pack_piece(j, piece, buffer))
            atomic_store_explicit(&j->failed, true, memory_order_relaxed);
}

static bool pack_all(const struct raw_weight *src, const struct gemm_weight *w, struct pool *pool,
                     struct error *err)
{
    struct pack_job job = {.src = src, .w = w, .isa = isa_best()};
    plan(&job);
    if (!job.total)
        return true;
    size_t bytes = job.buffer_bytes * (size_t)pool_size(pool);
    if (src->read && !(job.buffers = mem_aligned(bytes)))
        return error_set(err, "out of memory for reading a weight");
    pool_each(pool, job.total, POOL_SINGLE, pack_pieces, &job);
    mem_aligned_free(job.buffers, bytes);
    return !job.failed || error_set(err, "cannot read the file: it changed, or its disk fails");
}

/* Offsets of segments and their permutations in a weight's memory. */
struct weight_places {
    size_t at[3], perm_at[3];
};

/* Sizes of src in the backend's form: everything but memory. */
static void lay_out(const struct raw_weight *src, bool repack, struct gemm_weight *w,
                    struct weight_places *places)
{
    int row = 0;
    *w = (struct gemm_weight){
        .n_in = src->n_in, .n_out = src->n_out, .n_expert = src->n_expert, .n_seg = src->n_seg};
    for (int i = 0; i < src->n_seg; i++) {
        const struct raw_seg *s = &src->seg[i];
        struct gemm_seg *d = &w->seg[i];
        *d = (struct gemm_seg){.type = s->type, .first_row = row, .rows = s->rows};
        row += s->rows;
        d->panel_bytes = repack ? panel_bytes(s, src->n_in) : 0;
        d->packed = d->panel_bytes > 0;
        bool floats = !d->packed || panel_reads_floats(s->type) || s->perm;
        w->wants_x |= floats;
        w->wants_q |= !floats;
        w->wants_fine |= !floats && panel_reads_fine(s->type);
        if (!d->packed)
            continue;
        d->group_len = s->group_len;
        d->n_panels = (s->rows + GEMM_PANEL - 1) / GEMM_PANEL;
        int panels = d->n_panels * src->n_expert;
        places->at[i] = w->mem_bytes;
        w->mem_bytes += (size_t)panels * d->panel_bytes;
        places->perm_at[i] = w->mem_bytes;
        if (s->perm)
            w->mem_bytes += (size_t)src->n_expert * (size_t)src->n_in * sizeof(int32_t);
        w->mem_bytes = (w->mem_bytes + 63) & ~(size_t)63;
    }
}

static size_t seg_bytes(const struct raw_weight *w, int i)
{
    return (size_t)w->n_expert * (size_t)w->seg[i].rows * raw_seg_row_bytes(&w->seg[i], w->n_in);
}

size_t gemm_weight_bytes(const struct raw_weight *src, bool heads, bool repack, size_t *mapped)
{
    struct gemm_weight w;
    struct weight_places places;
    struct raw_weight as = *src;
    lay_out(src, repack || heads, &w, &places);
    for (int i = 0; heads && i < w.n_seg; i++)
        if (!w.seg[i].packed) {
            as.seg[0] = (struct raw_seg){.type = DT_F16, .rows = src->n_out};
            as.n_seg = 1;
            lay_out(&as, true, &w, &places);
        }
    *mapped = 0;
    for (int i = 0; i < w.n_seg; i++)
        *mapped += w.seg[i].packed ? 0 : seg_bytes(src, i);
    return w.mem_bytes + (src->bias ? (size_t)src->n_expert * (size_t)src->n_out * 4 : 0);
}

static void copy_bias(const struct raw_weight *src, struct gemm_weight *w)
{
    size_t n = (size_t)src->n_expert * (size_t)src->n_out;
    if (!src->bias)
        return;
    w->bias = mem_zalloc(n, sizeof(float));
    memcpy(w->bias, src->bias, n * sizeof(float));
}

struct gemm_weight *gemm_weight_new(const struct raw_weight *src, bool repack, struct pool *pool,
                                    struct error *err)
{
    struct gemm_weight *w = mem_zalloc(1, sizeof *w);
    struct weight_places places = {0};
    bool any_raw = false;
    lay_out(src, repack, w, &places);
    for (int i = 0; i < w->n_seg; i++)
        any_raw |= !w->seg[i].packed;
    if (any_raw)
        w->raw = src->transient ? raw_weight_copy(src) : raw_weight_view(src);
    w->mem = w->mem_bytes ? mem_aligned(w->mem_bytes) : NULL;
    if ((any_raw && !w->raw) || (w->mem_bytes && !w->mem)) {
        error_set(err, "out of memory for a weight of %zu bytes", raw_weight_bytes(src));
        gemm_weight_free(w);
        return NULL;
    }
    for (int i = 0; i < src->n_seg; i++) {
        if (!w->seg[i].packed)
            continue;
        w->seg[i].data = w->mem + places.at[i];
        if (!src->seg[i].perm || !w->mem)
            continue;
        int32_t *perm = (int32_t *)(w->mem + places.perm_at[i]);
        w->seg[i].perm = perm;
        for (int e = 0; e < src->n_expert; e++, perm += src->n_in)
            memcpy(perm, src->seg[i].perm[e], (size_t)src->n_in * sizeof *perm);
    }
    if (!pack_all(src, w, pool, err)) {
        gemm_weight_free(w);
        return NULL;
    }
    copy_bias(src, w);
    return w;
}

struct gemm_weight *gemm_weight_shape(const struct raw_weight *src)
{
    struct gemm_weight *w = mem_zalloc(1, sizeof *w);
    struct weight_places places;
    lay_out(src, true, w, &places);
    w->mem_bytes = 0;
    copy_bias(src, w);
    return w;
}

struct gemm_weight *gemm_weight_heads(const struct raw_weight *src, struct pool *pool,
                                      struct error *err)
{
    bool packed = true;
    for (int i = 0; i < src->n_seg; i++)
        packed &= panel_bytes(&src->seg[i], src->n_in) > 0;
    if (packed)
        return gemm_weight_new(src, true, pool, err);
    size_t n_in = (size_t)src->n_in, each = (size_t)src->n_out * n_in;
    size_t bytes = each * (size_t)src->n_expert * sizeof(uint16_t);
    uint16_t *fp16 = mem_aligned(bytes);
    if (!fp16) {
        error_set(err, "out of memory: %zu bytes for per-head matrices", bytes);
        return NULL;
    }
    const uint8_t **data = mem_zalloc((size_t)src->n_expert, sizeof *data);
    float *row = mem_zalloc(n_in, sizeof *row);
    for (int e = 0; e < src->n_expert; e++) {
        uint16_t *to = fp16 + (size_t)e * each;
        data[e] = (const uint8_t *)to;
        for (int r = 0; r < src->n_out; r++) {
            raw_weight_row(src, e, r, row);
            for (size_t i = 0; i < n_in; i++)
                *to++ = f32_to_f16(row[i]);
        }
    }
    struct raw_weight as = {.n_in = src->n_in,
                            .n_out = src->n_out,
                            .n_expert = src->n_expert,
                            .n_seg = 1,
                            .bias = src->bias,
                            .transient = true};
    as.seg[0] = (struct raw_seg){.type = DT_F16, .rows = src->n_out, .data = data};
    struct gemm_weight *own = gemm_weight_new(&as, true, pool, err);
    mem_free(row);
    mem_free(data);
    mem_aligned_free(fp16, bytes);
    return own;
}

void gemm_weight_free(struct gemm_weight *w)
{
    if (!w)
        return;
    raw_weight_free(w->raw);
    mem_free(w->bias);
    mem_aligned_free(w->mem, w->mem_bytes);
    mem_free(w);
}

bool gemm_weight_panels(const struct gemm_weight *w, int seg, struct expert_panels *out)
{
    const struct gemm_seg *s = &w->seg[seg];
    if (!s->packed || s->perm || w->tier)
        return false;
    *out = (struct expert_panels){.type = s->type,
                                  .data = s->data,
                                  .n_panels = s->n_panels,
                                  .panel_bytes = s->panel_bytes,
                                  .flip = PANEL_Q8_SIGNS ? 0 : 0x80,
                                  .memory = w->mem,
                                  .memory_bytes = w->mem_bytes};
    return panel_unit(s->type, &out->columns, &out->scales, &out->block);
}

void gemm_weight_row(const struct gemm_weight *w, int row, float *dst)
{
    const struct gemm_seg *s = w->seg;
    while (row >= s->first_row + s->rows)
        s++;
    if (s->packed)
        panel_row(s, w->n_in, 0, row - s->first_row, dst);
    else
        raw_weight_row(w->raw, 0, row, dst);
}
