/* Building a network. See build.h. */
#include "model/build.h"
#include "base/mem.h"

#include <stdio.h>

void build_name(const struct tensorfile *f, const struct name *n, int layer, int expert,
                const char *suffix, char *out, size_t size)
{
    char base[128];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    snprintf(base, sizeof base, f->is_gguf ? n->gguf : n->hf, layer, expert);
#pragma GCC diagnostic pop
    snprintf(out, size, "%s.%s", base, suffix);
}

const struct tensor *build_find(const struct tensorfile *f, const struct name *n, int layer,
                                int expert, const char *suffix)
{
    char name[192];
    build_name(f, n, layer, expert, suffix, name, sizeof name);
    return tensorfile_find(f, name);
}

static struct want *add_want(struct builder *b)
{
    if (b->n_wants == b->cap) {
        b->cap = b->cap ? 2 * b->cap : 64;
        b->wants = mem_realloc(b->wants, (size_t)b->cap, sizeof *b->wants);
    }
    b->wants[b->n_wants] = (struct want){0};
    return &b->wants[b->n_wants++];
}

const struct weight *build_weight(struct builder *b, enum weight_role role, int layer, int n_in,
                                  int n_expert, int n_rows, const struct rows *rows)
{
    struct want *want = add_want(b);
    struct weight *w = mem_zalloc(1, sizeof *w);
    CHECK(n_rows <= (int)(sizeof want->rows / sizeof *want->rows), "%d runs of rows", n_rows);
    *want = (struct want){
        .w = w, .role = role, .layer = layer, .n_in = n_in, .n_expert = n_expert, .n_rows = n_rows};
    w->n_in = n_in;
    w->n_expert = n_expert;
    for (int i = 0; i < n_rows; i++) {
        want->rows[i] = rows[i];
        w->n_out += rows[i].n;
        w->bias |= build_find(b->f, rows[i].name, layer, 0, "bias") != NULL;
    }
    return w;
}

const struct weight *build_matrix(struct builder *b, enum weight_role role, int layer,
                                  const struct name *name, int n_in, int n_out)
{
    return build_weight(b, role, layer, n_in, 1, 1, &(struct rows){name, n_out, 0});
}

struct norm build_rms(struct builder *b, int layer, const struct name *name, int width)
{
    struct norm norm = {.kind = NORM_RMS, .eps = b->c->norm_eps};
    static float nowhere;
    if (b->failed)
        return norm;
    float *gain =
        b->be ? b->be->ops->alloc(b->be, (size_t)width * sizeof *gain, "a norm", b->err) : &nowhere;
    b->failed = !gain;
    if (!gain)
        return norm;
    struct want *want = add_want(b);
    *want = (struct want){
        .vector = gain, .layer = layer, .n_in = width, .n_rows = 1, .rows = {{name, width, 0}}};
    norm.gain = gain;
    return norm;
}

/* factors (half) of the rope_freqs tensor, where there is one. */
static bool read_factors(struct builder *b, int half, float *factors, bool *there)
{
    const struct tensor *t = b->f->is_gguf ? tensorfile_find(b->f, "rope_freqs.weight") : NULL;
    *there = t != NULL;
    if (!t)
        return true;
    if (t->dims[0] != half || t->dims[1] != 1 || t->dims[2] != 1 || t->dims[3] != 1)
        return error_set(b->err, "%s: tensor %s: %lld entries, expected %d", b->f->path, t->name,
                         (long long)t->dims[0], half);
    if (t->type != DT_F32 && t->type != DT_F16 && t->type != DT_BF16)
        return error_set(b->err, "%s: tensor %s: type %s where F32, F16 or BF16 is expected",
                         b->f->path, t->name, t->type_name);
    quant_dequantize(t->type, t->data, factors, (size_t)half);
    for (int i = 0; i < half; i++)
        if (!(factors[i] > 0))
            return error_set(b->err, "%s: tensor %s: entry %d is not positive", b->f->path, t->name,
                             i);
    return true;
}

const struct rope *build_rope(struct builder *b)
{
    int half = b->c->n_rot / 2;
    bool there = false;
    if (!half)
        return NULL;
    float *factors = mem_zalloc((size_t)half, sizeof *factors);
    float *freq = mem_zalloc((size_t)half, sizeof *freq);
    struct rope *rope = mem_zalloc(1, sizeof *rope);
    *rope = (struct rope){.n_rot = b->c->n_rot, .freq = freq};
    if (read_factors(b, half, factors, &there))
        rope_frequencies(b->c, there ? factors : NULL, freq, &rope->mscale);
    else
        b->failed = true;
    mem_free(factors);
    b->net->ropes = rope;
    b->net->n_ropes = 1;
    return rope;
}

void build_free(struct backend *be, struct network *net, struct want *wants, int n_wants)
{
    for (int i = 0; i < n_wants; i++) {
        struct want *w = &wants[i];
        if (w->w && w->w->impl)
            be->ops->release(be, w->w);
        mem_free(w->w);
        if (w->vector && be)
            be->ops->free(be, w->vector, (size_t)w->n_in * sizeof(float));
    }
    for (int i = 0; i < net->n_ropes; i++)
        mem_free((void *)(uintptr_t)net->ropes[i].freq);
    mem_free((void *)(uintptr_t)net->ropes);
    mem_free(net->layers);
    mem_free(wants);
    *net = (struct network){0};
}
