/* See fp8_check.h. */
#include "model/fp8_check.h"
#include "base/pool.h"

/* Branch-free, so that the compiler vectorises it. */
static bool has_nan(const uint8_t *p, size_t n)
{
    uint8_t any = 0;
    for (size_t i = 0; i < n; i++)
        any |= (uint8_t)((p[i] & 0x7f) == 0x7f);
    return any;
}

size_t fp8_check_find(const uint8_t *codes, size_t n)
{
    size_t i = 0;
    while (i < n && (codes[i] & 0x7f) != 0x7f)
        i++;
    return i;
}

static bool is_fp8(const struct raw_seg *s)
{
    return s->type == DT_F8_E4M3;
}

static size_t matrix_bytes(const struct raw_weight *w, const struct raw_seg *s)
{
    return (size_t)s->rows * (size_t)w->n_in;
}

static bool holds_codes(const struct raw_weight *w, const uint8_t *p)
{
    for (int i = 0; i < w->n_seg; i++)
        for (int e = 0; is_fp8(&w->seg[i]) && e < w->n_expert; e++) {
            const uint8_t *first = w->seg[i].data[e];
            if (p >= first && p < first + matrix_bytes(w, &w->seg[i]))
                return true;
        }
    return false;
}

static const uint8_t *read_plain(void *arg, const uint8_t *data, size_t bytes, uint8_t *buf)
{
    struct fp8_check *c = arg;
    return tensorfile_read(c->f, data, bytes, buf);
}

static const uint8_t *read_looking(void *arg, const uint8_t *data, size_t bytes, uint8_t *buf)
{
    struct fp8_check *c = arg;
    const uint8_t *p = tensorfile_read(c->f, data, bytes, buf);
    if (p && holds_codes(c->w, data)) {
        if (has_nan(p, bytes))
            atomic_store(&c->bad, true);
        atomic_fetch_add(&c->seen, bytes);
    }
    return p;
}

void fp8_check_begin(struct fp8_check *c, const struct tensorfile *f, struct raw_weight *w)
{
    *c = (struct fp8_check){.f = f, .w = w};
    for (int i = 0; i < w->n_seg; i++)
        if (is_fp8(&w->seg[i]))
            c->total += (size_t)w->n_expert * matrix_bytes(w, &w->seg[i]);
    w->read = c->total ? read_looking : read_plain;
    w->read_arg = c;
}

/* Each matrix is checked in PIECES pieces; below LONE_BYTES in total no thread is started. */
enum { PIECES = 64, MAX_THREADS = 8, LONE_BYTES = 1 << 20 };

static void look(void *arg, int ith, int first, int last)
{
    struct fp8_check *c = arg;
    const struct raw_weight *w = c->w;
    (void)ith;
    for (int i = first; i < last; i++) {
        const struct raw_seg *s = &w->seg[i / PIECES / w->n_expert];
        if (!is_fp8(s))
            continue;
        size_t n = matrix_bytes(w, s), k = (size_t)(i % PIECES);
        size_t a = n * k / PIECES, b = n * (k + 1) / PIECES;
        if (has_nan(s->data[i / PIECES % w->n_expert] + a, b - a))
            atomic_store(&c->bad, true);
    }
}

bool fp8_check_end(struct fp8_check *c)
{
    int pieces = c->w->n_seg * c->w->n_expert * PIECES;
    if (atomic_load(&c->seen) >= c->total)
        return !atomic_load(&c->bad);
    if (c->total < LONE_BYTES) {
        look(c, 0, 0, pieces);
    } else {
        int cpus = pool_cpu_count();
        struct pool *pool = pool_new(cpus < MAX_THREADS ? cpus : MAX_THREADS);
        pool_each(pool, pieces, POOL_EVEN, look, c);
        pool_free(pool);
    }
    return !atomic_load(&c->bad);
}
