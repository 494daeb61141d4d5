/* See step_rows.h. */
#include "vision/step_rows.h"
#include "base/mem.h"
#include "vision/spare.h"

#include <pthread.h>
#include <string.h>

enum { KEPT = 8, KEPT_BYTES = 96 << 20 };

struct grids {
    const struct tower_config *tower;
    const struct positions *positions;
    int n_embd;
    pthread_mutex_t lock;
    struct view_grid *kept[KEPT]; /* the latest first; NULL = none */
};

struct grids *grids_new(const struct tower_config *t, const struct positions *p, int n_embd)
{
    struct grids *g = mem_zalloc(1, sizeof *g);
    *g = (struct grids){.tower = t, .positions = p, .n_embd = n_embd};
    pthread_mutex_init(&g->lock, NULL);
    return g;
}

static void order_window(const struct tower_config *t, const struct view *v, int top, int left,
                         int high, int wide, struct row_order *o)
{
    int m = t->merge, first = o->n;
    for (int y = top; y < top + high && y < v->rows; y += m)
        for (int x = left; x < left + wide && x < v->cols; x += m) {
            o->feature[o->n_features++] = y / m * (v->cols / m) + x / m;
            for (int i = 0; i < m * m; i++, o->n++) {
                int four = i / 4, inner = i % 4;
                bool twice = t->middle >= 0;
                o->row[o->n] = y + (twice ? four / (m / 2) * 2 + inner / 2 : i / m);
                o->col[o->n] = x + (twice ? four % (m / 2) * 2 + inner % 2 : i % m);
            }
        }
    for (int i = first; o->windows && i < o->n; i++) {
        o->windows[2 * i] = t->window ? first : i / 4 * 4;
        o->windows[2 * i + 1] = t->window ? o->n : i / 4 * 4 + 4;
    }
}

static bool order_init(struct row_order *o, const struct tower_config *t, const struct view *v)
{
    size_t n = (size_t)v->rows * (size_t)v->cols;
    int high = t->window ? t->window : v->rows, wide = t->window ? t->window : v->cols;
    bool windows = t->window || t->middle >= 0;
    *o = (struct row_order){.row = mem_ask(n * sizeof *o->row),
                            .col = mem_ask(n * sizeof *o->col),
                            .feature = mem_ask(n * sizeof *o->feature),
                            .windows = windows ? mem_ask(2 * n * sizeof *o->windows) : NULL};
    if (!o->row || !o->col || !o->feature || (windows && !o->windows))
        return false;
    for (int y = 0; y < v->rows; y += high)
        for (int x = 0; x < v->cols; x += wide)
            order_window(t, v, y, x, high, wide, o);
    return true;
}

static void order_clear(struct row_order *o)
{
    mem_free(o->row);
    mem_free(o->col);
    mem_free(o->feature);
    mem_free(o->windows);
}

static void grid_release(struct view_grid *v)
{
    if (!v || atomic_fetch_sub(&v->refs, 1) > 1)
        return;
    order_clear(&v->order);
    mem_free(v->rope_pos);
    spare_give(v->positions, v->bytes);
    mem_free(v);
}

void grids_free(struct grids *g)
{
    if (!g)
        return;
    for (int i = 0; i < KEPT; i++)
        grid_release(g->kept[i]);
    pthread_mutex_destroy(&g->lock);
    mem_free(g);
}

/* A grid's own tables, for a view of its shape. */
static void fill_grid(const struct grids *g, struct view_grid *v, const struct view *view)
{
    size_t E = (size_t)g->n_embd;
    struct position_axes axes;
    positions_begin(g->tower, view, &axes);
    for (int i = 0; i < v->n; i++) {
        int32_t *pos = v->rope_pos + (ptrdiff_t)3 * i;
        float *to = v->positions + (size_t)i * E;
        memset(pos, 0, 3 * sizeof *pos);
        if (i == v->order.n) {
            memcpy(to, g->positions->class_row, E * sizeof *to);
            continue;
        }
        pos[1] = v->order.row[i];
        pos[2] = v->order.col[i];
        positions_at(g->tower, g->positions, &axes, pos[1], pos[2], to);
    }
    positions_end(&axes);
}

static struct view_grid *grid_make(const struct grids *g, const struct view *view)
{
    struct view_grid *v = mem_zalloc(1, sizeof *v);
    v->rows = view->rows;
    v->cols = view->cols;
    v->n = view->rows * view->cols + g->tower->class_token;
    v->refs = 1;
    v->bytes = (size_t)v->n * (size_t)g->n_embd * sizeof *v->positions;
    v->rope_pos = mem_ask(3 * (size_t)v->n * sizeof *v->rope_pos);
    v->positions = spare_take(v->bytes);
    if (order_init(&v->order, g->tower, view) && v->rope_pos && v->positions) {
        fill_grid(g, v, view);
        return v;
    }
    grid_release(v);
    return NULL;
}

/* The grid of this shape becomes the first. Under the lock. NULL: none is kept. */
static struct view_grid *find(struct grids *g, const struct view *view)
{
    for (int i = 0; i < KEPT; i++) {
        struct view_grid *v = g->kept[i];
        if (!v || v->rows != view->rows || v->cols != view->cols)
            continue;
        memmove(g->kept + 1, g->kept, (size_t)i * sizeof(struct view_grid *));
        return g->kept[0] = v;
    }
    return NULL;
}

/* Keeps v as the first. Under the lock. */
static void keep(struct grids *g, struct view_grid *v)
{
    size_t bytes = 0;
    grid_release(g->kept[KEPT - 1]);
    memmove(g->kept + 1, g->kept, (KEPT - 1) * sizeof(struct view_grid *));
    g->kept[0] = v;
    atomic_fetch_add(&v->refs, 1);
    for (int i = 0; i < KEPT && g->kept[i]; i++) {
        bytes += g->kept[i]->bytes;
        if (bytes <= KEPT_BYTES)
            continue;
        grid_release(g->kept[i]);
        g->kept[i] = NULL;
    }
}

/* A reference to the grid of a view's shape. NULL if out of memory. */
static struct view_grid *grid_of(struct grids *g, const struct view *view)
{
    pthread_mutex_lock(&g->lock);
    struct view_grid *v = find(g, view);
    if (v)
        atomic_fetch_add(&v->refs, 1);
    pthread_mutex_unlock(&g->lock);
    if (v || !(v = grid_make(g, view)))
        return v;
    pthread_mutex_lock(&g->lock);
    if (!find(g, view)) /* another thread may have made one, too */
        keep(g, v);
    pthread_mutex_unlock(&g->lock);
    return v;
}

/* Each patch with its position, then the class token. */
static void fill_values(struct step_rows *r, const struct grids *g, const struct patches *p,
                        int view)
{
    size_t D = (size_t)tower_patch_values(g->tower), E = (size_t)g->n_embd;
    for (int i = 0; i < r->grid->n; i++) {
        float *to = r->values + (size_t)i * (D + E);
        const int32_t *pos = r->grid->rope_pos + (ptrdiff_t)3 * i;
        r->rows[i] = to;
        memcpy(to + D, r->grid->positions + (size_t)i * E, E * sizeof *to);
        if (i < r->grid->order.n)
            patches_row(p, view, pos[1], pos[2], to);
        else
            memset(to, 0, D * sizeof *to);
    }
}

static void fill_pixels(struct step_rows *r, const struct grids *g, const struct patches *p,
                        int view)
{
    size_t each = patch_bytes(g->tower), E = (size_t)g->n_embd;
    for (int i = 0; i < r->grid->n; i++) {
        const int32_t *pos = r->grid->rope_pos + (ptrdiff_t)3 * i;
        bool patch = i < r->grid->order.n;
        r->rows[i] = r->grid->positions + (size_t)i * E;
        r->bytes_of[i] = patch ? r->pixels + (size_t)i * each : NULL;
        if (patch)
            patches_row_bytes(p, view, pos[1], pos[2], r->pixels + (size_t)i * each);
    }
}

bool rows_init(struct step_rows *r, struct grids *g, const struct patches *p, int view, bool pixels,
               struct error *err)
{
    const struct tower_config *t = g->tower;
    *r = (struct step_rows){.grid = grid_of(g, &p->plan.views[view])};
    if (!r->grid)
        return error_set(err, "out of memory for an image's positions");
    size_t n = (size_t)r->grid->n;
    pixels = pixels && !p->values;
    r->bytes = n * (pixels ? patch_bytes(t)
                           : ((size_t)tower_patch_values(t) + (size_t)g->n_embd) * sizeof(float));
    void *memory = spare_take(r->bytes);
    r->pixels = pixels ? memory : NULL;
    r->values = pixels ? NULL : memory;
    r->rows = mem_ask(n * sizeof *r->rows);
    r->bytes_of = pixels ? mem_ask(n * sizeof *r->bytes_of) : NULL;
    if (!memory || !r->rows || (pixels && !r->bytes_of))
        return error_set(err, "out of memory: %zu bytes for an image's patches", r->bytes);
    if (pixels)
        fill_pixels(r, g, p, view);
    else
        fill_values(r, g, p, view);
    return true;
}

void rows_clear(struct step_rows *r)
{
    spare_give(r->pixels ? (void *)r->pixels : r->values, r->bytes);
    mem_free((void *)(uintptr_t)r->rows);
    mem_free((void *)(uintptr_t)r->bytes_of);
    grid_release(r->grid);
    *r = (struct step_rows){0};
}
