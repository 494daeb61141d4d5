/* The specification of sparse attention: which keys a row sees. See ref.c. */
#include "backend/ref.h"
#include "quant/kvblock.h"

#include <string.h>

int ref_index_keys(const struct indexer *x, int pos)
{
    return x->compressor.rate ? compressor_entries(&x->compressor, pos) : pos + 1;
}

static void turn_head(struct ref *r, const struct indexer *x, int t, float *head)
{
    if (!x->rope)
        return;
    if (x->rope_last) {
        ref_turn_last(x->rope, r->batch.pos[t], head, x->dim);
        return;
    }
    if (x->interleaved)
        ref_deinterleave(r, head, x->rope->n_rot);
    ref_rotate(x->rope, &r->batch, t, head);
}

void ref_index_row(struct ref *r, const struct indexer *x, const struct kv_layer *kv, int t,
                   const float *n, const float *u)
{
    if (x->reuse)
        return;
    int D = x->dim, slot = r->batch.slot[t];
    float *q = r->index_q + (size_t)t * (size_t)(x->n_heads * D), *k = r->index_k;
    ref_matvec(r, x->wq, 0, u, q);
    for (int h = 0; h < x->n_heads; h++) {
        ref_norm_row(&x->q_norm, q + h * D, q + h * D, D);
        turn_head(r, x, t, q + h * D);
    }
    if (x->ww)
        ref_matvec(r, x->ww, 0, n, r->index_w + (size_t)t * (size_t)x->n_heads);
    if (slot < 0 || x->compressor.rate)
        return;
    ref_matvec(r, x->wk, 0, n, k);
    ref_norm_row(&x->k_norm, k, k, D);
    turn_head(r, x, t, k);
    kv_row_put(r->bounds.k_type, k, D,
               (char *)kv->index +
                   dtype_bytes(r->bounds.k_type, ref_kv_at(&r->bounds, slot, 1, 0, D)));
}

/* r->scores: of keys, or of blocks for a group of heads. */
static void score(struct ref *r, const struct indexer *x, const struct kv_layer *kv, int seq, int t,
                  int group)
{
    const struct bounds *s = &r->bounds;
    const int32_t *pages = r->batch.pages + (size_t)seq * (size_t)r->batch.max_pages;
    const float *q = r->index_q + (size_t)t * (size_t)(x->n_heads * x->dim);
    const float *w = r->index_w + (size_t)t * (size_t)x->n_heads;
    const struct compressor *c = &x->compressor;
    for (int p = 0; p < ref_index_keys(x, r->batch.pos[t]); p++) {
        int slot = c->rate ? ref_entry_slot(r, c, seq, p, compressor_page_rows(c, s->page_len), 0)
                           : pages[p / s->page_len] * s->page_len + p % s->page_len;
        kv_row_get(s->k_type,
                   (const char *)kv->index +
                       dtype_bytes(s->k_type, ref_kv_at(s, slot, 1, 0, x->dim)),
                   x->dim, r->index_k);
        if (x->block) {
            float dot = ref_dot(q + group * x->dim, r->index_k, x->dim);
            float *best = &r->scores[p / x->block];
            *best = p % x->block && *best > dot ? *best : dot;
            continue;
        }
        double sum = 0;
        for (int h = 0; h < x->n_heads; h++) {
            float dot = ref_dot(q + h * x->dim, r->index_k, x->dim);
            sum += (double)w[h] * (dot > 0 ? dot : 0);
        }
        r->scores[p] = (float)sum;
    }
    if (x->block)
        r->scores[r->batch.pos[t] / x->block] = INFINITY;
}

void ref_index_choose(struct ref *r, const struct indexer *x, const struct kv_layer *kv,
                      int n_groups)
{
    const struct batch *b = &r->batch;
    int groups = x->block ? n_groups : 1, unit = x->block ? x->block : 1;
    for (int seq = 0; seq < b->n_seqs && !x->reuse; seq++)
        for (int t = b->q_start[seq]; t < b->q_start[seq + 1]; t++)
            for (int g = 0; g < groups; g++) {
                int at = t * groups + g, n = (ref_index_keys(x, b->pos[t]) + unit - 1) / unit;
                int32_t *list = r->chosen + (size_t)at * (size_t)x->n_chosen;
                r->n_chosen[at] = n <= x->n_chosen || b->slot[t] < 0 ? -1 : x->n_chosen;
                if (r->n_chosen[at] < 0)
                    continue;
                score(r, x, kv, seq, t, g);
                memset(r->seen, 0, (size_t)n * sizeof *r->seen);
                for (int k = 0; k < x->n_chosen; k++) {
                    int best = -1;
                    for (int p = 0; p < n; p++)
                        if (!r->seen[p] && (best < 0 || r->scores[p] > r->scores[best]))
                            best = p;
                    list[k] = best;
                    r->seen[best] = true;
                }
            }
}

void ref_index_seen(struct ref *r, const struct indexer *x, int t, int group, int last)
{
    if (!x->n_chosen)
        return;
    int unit = x->block ? x->block : 1;
    int at = x->block ? t * x->n_heads + group : t;
    const int32_t *list = r->chosen + (size_t)at * (size_t)x->n_chosen;
    memset(r->seen, r->n_chosen[at] < 0, (size_t)(last + 1) * sizeof *r->seen);
    for (int i = 0; i < r->n_chosen[at]; i++)
        for (int k = 0; k < unit && list[i] * unit + k <= last; k++)
            r->seen[list[i] * unit + k] = true;
}
