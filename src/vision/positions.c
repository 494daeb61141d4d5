/* See positions.h. All ways of sampling are weights of rows times weights of columns. */
#include "vision/positions.h"
#include "base/mem.h"
#include "vision/family.h"

#include <math.h>
#include <string.h>

/* All values of a tensor, n of them. */
static float *read_floats(const struct tensorfile *f, const struct tensor *t, size_t n,
                          const char *what, struct error *err)
{
    if (!t) {
        error_set(err, "%s: %s: missing", f->path, what);
        return NULL;
    }
    if (t->type != DT_F32 && t->type != DT_F16 && t->type != DT_BF16) {
        error_set(err, "%s: tensor %s: type %s where F32, F16 or BF16 is expected", f->path,
                  t->name, t->type_name);
        return NULL;
    }
    if (t->bytes != dtype_bytes(t->type, n)) {
        error_set(err, "%s: tensor %s: %zu bytes, expected %zu values", f->path, t->name, t->bytes,
                  n);
        return NULL;
    }
    float *v = mem_zalloc(n, sizeof *v);
    quant_dequantize(t->type, t->data, v, n);
    return v;
}

/* The class token's row: token + position - bias. The bias is added to every row later. */
static bool load_class(const struct tensorfile *f, const struct config *c, struct positions *out,
                       float *table, struct error *err)
{
    const struct tower_names *n = &c->tower->family->names;
    size_t E = (size_t)out->width;
    const struct tensor *bias = build_find(f, c, &n->patches, 0, 0, "bias");
    float *b = NULL;
    out->class_row = read_floats(f, build_find(f, c, &n->class_token, 0, 0, "weight"), E,
                                 "the image tower's class token", err);
    if (!out->class_row || (bias && !(b = read_floats(f, bias, E, bias->name, err))))
        return false;
    for (size_t i = 0; i < E; i++)
        out->class_row[i] += table[i] - (b ? b[i] : 0);
    mem_free(b);
    return true;
}

bool positions_load(const struct tensorfile *f, const struct config *c, struct positions *out,
                    struct error *err)
{
    const struct tower_config *t = c->tower;
    size_t E = (size_t)c->n_embd, G = (size_t)t->grid;
    size_t entries = t->table == TABLE_TWO_LISTS ? 2 * G : G * G + t->class_token;
    *out = (struct positions){.width = c->n_embd};
    if (t->table == TABLE_NONE)
        return true;
    out->table = read_floats(f, build_find(f, c, &t->family->names.positions, 0, 0, "weight"),
                             entries * E, "the image tower's table of positions", err);
    if (!out->table || (t->class_token && !load_class(f, c, out, out->table, err)))
        return false;
    if (t->class_token)
        memmove(out->table, out->table + E, G * G * E * sizeof *out->table);
    return true;
}

void positions_free(struct positions *p)
{
    mem_free(p->table);
    mem_free(p->class_row);
    *p = (struct positions){0};
}

static void add_tap(float *weights, int grid, int cell, double weight)
{
    weights[cell < 0 ? 0 : cell >= grid ? grid - 1 : cell] += (float)weight;
}

/* Weights of place i of n, with the corners of both grids aligned. */
static void corners(int i, int n, int grid, float *weights)
{
    float step = n > 1 ? (float)(grid - 1) / (float)(n - 1) : 0;
    float at =
        i < n / 2 || n == 1 ? step * (float)i : (float)(grid - 1) - step * (float)(n - 1 - i);
    int first = (int)at;
    add_tap(weights, grid, first, 1 - (double)(at - (float)first));
    add_tap(weights, grid, first + 1, (double)(at - (float)first));
}

static double cubic(double x)
{
    const double a = -0.75;
    x = fabs(x);
    return x <= 1  ? ((a + 2) * x - (a + 3)) * x * x + 1
           : x < 2 ? ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
                   : 0;
}

static void bicubic(int i, int n, int grid, float *weights)
{
    double at = (i + 0.5) * grid / n - 0.5, first = floor(at);
    for (int k = -1; k <= 2; k++)
        add_tap(weights, grid, (int)first + k, cubic(at - first - k));
}

/* Bilinear with antialiasing: the triangle's width is the reduction factor. */
static void smooth(int i, int n, int grid, float *weights)
{
    double scale = (double)grid / n, wide = scale > 1 ? scale : 1, middle = scale * (i + 0.5);
    int first = (int)(middle - wide + 0.5), end = (int)(middle + wide + 0.5);
    double sum = 0;
    first = first < 0 ? 0 : first;
    end = end > grid ? grid : end;
    for (int k = first; k < end; k++) {
        double x = fabs((k - middle + 0.5) / wide), w = x < 1 ? 1 - x : 0;
        weights[k] = (float)w;
        sum += w;
    }
    for (int k = first; k < end; k++)
        weights[k] /= (float)sum;
}

/* Cell borders are rounded exactly as in the models' own code. */
static void nearest(int i, int n, int grid, float *weights)
{
    float at = (float)i / (float)n;
    int cell = 0;
    while (cell + 1 < grid && (float)(1.0 / grid + cell * (1.0 / grid)) <= at)
        cell++;
    weights[cell] = 1;
}

static float *axis(const struct tower_config *t, int n)
{
    float *all = mem_zalloc((size_t)n * (size_t)t->grid, sizeof *all);
    for (int i = 0; i < n; i++) {
        float *weights = all + (size_t)i * (size_t)t->grid;
        if (t->table == TABLE_CORNERS)
            corners(i, n, t->grid, weights);
        else if (t->table == TABLE_CUBIC)
            bicubic(i, n, t->grid, weights);
        else if (t->table == TABLE_SMOOTH)
            smooth(i, n, t->grid, weights);
        else if (t->table == TABLE_NEAREST)
            nearest(i, n, t->grid, weights);
    }
    return all;
}

void positions_begin(const struct tower_config *t, const struct view *v, struct position_axes *out)
{
    bool none = t->table == TABLE_NONE || t->table == TABLE_TWO_LISTS;
    *out = (struct position_axes){none ? NULL : axis(t, v->rows), none ? NULL : axis(t, v->cols)};
}

void positions_end(struct position_axes *a)
{
    mem_free(a->y);
    mem_free(a->x);
}

static void add_entry(const struct positions *p, int entry, float weight, float *q)
{
    const float *from = p->table + (size_t)entry * (size_t)p->width;
    for (int i = 0; i < p->width; i++)
        q[i] += weight * from[i];
}

void positions_at(const struct tower_config *t, const struct positions *p,
                  const struct position_axes *a, int row, int col, float *q)
{
    int G = t->grid;
    memset(q, 0, (size_t)p->width * sizeof *q);
    if (t->table == TABLE_TWO_LISTS) {
        add_entry(p, col < G ? col : G - 1, 1, q);
        add_entry(p, G + (row < G ? row : G - 1), 1, q);
    }
    const float *y = a->y + (size_t)row * (size_t)G, *x = a->x + (size_t)col * (size_t)G;
    for (int i = 0; a->y && i < G; i++)
        for (int k = 0; y[i] != 0 && k < G; k++)
            if (x[k] != 0)
                add_entry(p, i * G + k, y[i] * x[k], q);
}
