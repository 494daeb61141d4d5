/* LoRA changes in host memory, and their specification. See lora.h. */
#include "backend/lora.h"
#include "base/mem.h"

#include <string.h>

struct lora *lora_new(int n_in, int n_out, int n_expert)
{
    struct lora *l = mem_zalloc(1, sizeof *l);
    *l = (struct lora){.n_in = n_in, .n_out = n_out, .n_expert = n_expert};
    l->of = mem_zalloc((size_t)n_expert, sizeof *l->of);
    return l;
}

static float *copy_floats(const float *from, size_t n)
{
    float *to = mem_alloc(n * sizeof *to);
    memcpy(to, from, n * sizeof *to);
    return to;
}

struct lora *lora_copy(const struct lora *l)
{
    struct lora *c = lora_new(l->n_in, l->n_out, l->n_expert);
    for (int e = 0; e < l->n_expert; e++) {
        struct lora_matrix *m = &c->of[e];
        *m = l->of[e];
        if (m->rank)
            m->a = copy_floats(m->a, (size_t)m->rank * (size_t)l->n_in);
        for (int i = 0; i < m->n_parts; i++)
            m->parts[i].b =
                copy_floats(m->parts[i].b, (size_t)m->parts[i].n * (size_t)m->parts[i].rank);
    }
    return c;
}

void lora_free(struct lora *l)
{
    if (!l)
        return;
    for (int e = 0; e < l->n_expert; e++) {
        mem_free(l->of[e].a);
        for (int i = 0; i < l->of[e].n_parts; i++)
            mem_free(l->of[e].parts[i].b);
    }
    mem_free(l->of);
    mem_free(l);
}

int lora_rank(const struct lora *l)
{
    int most = 0;
    for (int e = 0; e < l->n_expert; e++)
        most = l->of[e].rank > most ? l->of[e].rank : most;
    return most;
}

void lora_add(const struct lora *l, int e, float scale, const float *x, float *y)
{
    const struct lora_matrix *m = &l->of[e];
    for (int i = 0; i < m->n_parts; i++) {
        const struct lora_part *p = &m->parts[i];
        for (int k = 0; k < p->rank; k++) {
            const float *a = m->a + (size_t)(p->at + k) * (size_t)l->n_in;
            double low = 0;
            for (int j = 0; j < l->n_in; j++)
                low += (double)a[j] * x[j];
            for (int j = 0; j < p->n; j++)
                y[p->first + j] +=
                    scale * (float)low * p->b[(size_t)j * (size_t)p->rank + (size_t)k];
        }
    }
}

void lora_add_row(const struct lora *l, int e, int row, float scale, float *w)
{
    const struct lora_matrix *m = &l->of[e];
    for (int i = 0; i < m->n_parts; i++) {
        const struct lora_part *p = &m->parts[i];
        if (row < p->first || row >= p->first + p->n)
            continue;
        const float *b = p->b + (size_t)(row - p->first) * (size_t)p->rank;
        for (int k = 0; k < p->rank; k++) {
            const float *a = m->a + (size_t)(p->at + k) * (size_t)l->n_in;
            for (int j = 0; j < l->n_in; j++)
                w[j] += scale * b[k] * a[j];
        }
    }
}
