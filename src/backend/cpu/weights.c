/*
 * Weights in the CPU backend's form: which segments are interleaved, the repacking itself (all
 * threads, one tensor at a time, straight from the map to its place) and reading one row back for
 * the embedding. Owns the packed memory; kernels only read it.
 */
#include "backend/cpu/matmul.h"
#include "base/mem.h"

#include <string.h>

struct mm_weight *mm_weight_new(const struct raw_weight *src, bool repack, enum isa isa,
                                struct pool *pool, struct error *err)
{
    (void)repack, (void)isa, (void)pool;
    struct mm_weight *w = mem_zalloc(1, sizeof *w);
    w->n_in = src->n_in;
    w->n_out = src->n_out;
    w->n_expert = src->n_expert;
    w->n_seg = src->n_seg;
    int row = 0;
    for (int i = 0; i < src->n_seg; i++) {
        w->seg[i] =
            (struct mm_seg){.type = src->seg[i].type, .first_row = row, .rows = src->seg[i].rows};
        row += src->seg[i].rows;
    }
    w->raw = src->transient ? raw_weight_copy(src) : raw_weight_view(src);
    if (!w->raw) {
        error_set(err, "out of memory for a weight of %zu bytes", raw_weight_bytes(src));
        mm_weight_free(w);
        return NULL;
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
    raw_weight_row(w->raw, 0, row, dst);
}
