/* The specification of compressed attention and of compressors (layer.h). See ref.c. */
#include "backend/ref.h"
#include "quant/kvblock.h"

#include <string.h>

/* Turns pairs of the last dims by pos, or back. */
static void turn(const struct rope *rope, int pos, float *head, int dim, float back)
{
    float *x = head + dim - rope->n_rot;
    for (int i = 0; i < rope->n_rot / 2; i++) {
        double angle = (double)pos * (double)rope->freq[i];
        float c = (float)cos(angle) * rope->mscale, s = back * (float)sin(angle) * rope->mscale;
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * c - b * s;
        x[2 * i + 1] = b * c + a * s;
    }
}

void ref_turn_last(const struct rope *rope, int pos, float *head, int dim)
{
    turn(rope, pos, head, dim, 1);
}

/* Adds a value c with the exponent z to a sum: its maximum, weights and weighted values, D apart. */
static void add_value(float *sum, size_t D, float z, float c)
{
    float max = sum[D] == 0 || z > sum[0] ? z : sum[0];
    float old = sum[D] == 0 ? 0 : expf(sum[0] - max), new = expf(z - max);
    sum[0] = max;
    sum[D] = sum[D] * old + new;
    sum[2 * D] = sum[2 * D] * old + new *c;
}

bool ref_compress(struct ref *r, const struct compressor *c, int t, const float *n, float *sums,
                  float *entry)
{
    int S = compressor_series(c), pos = r->batch.pos[t];
    CHECK(sums && entry, "a compressor without its sums");
    size_t D = (size_t)c->dim;
    float *cz = r->compressed;
    const float *bias = c->bias + (size_t)(pos % c->rate * S) * D;
    ref_matvec(r, c->w, 0, n, cz);
    for (int s = 0; s < S;
         s++) /* the last half belongs to this window, the first one to the next */
        for (size_t d = 0; d < D; d++) {
            size_t at = (size_t)(S - 1 - s) * D + d;
            add_value(sums + (size_t)(3 * s) * D + d, D, cz[(size_t)S * D + at] + bias[at], cz[at]);
        }
    if (pos % c->rate != c->rate - 1)
        return false;
    for (size_t d = 0; d < D; d++)
        entry[d] = sums[2 * D + d] / sums[D + d];
    ref_norm_row(&c->norm, entry, entry, c->dim);
    if (S > 1)
        memcpy(sums, sums + 3 * D, 3 * D * sizeof *sums);
    memset(sums + (size_t)(3 * (S - 1)) * D, 0, 3 * D * sizeof *sums);
    return true;
}

int ref_entry_slot(const struct ref *r, const struct compressor *c, int seq, int w, int rows,
                   int first)
{
    int end = (w + 1) * c->rate - 1, len = r->bounds.page_len;
    return r->batch.pages[seq * r->batch.max_pages + end / len] * rows + first +
           end % len / c->rate;
}

static void store(struct ref *r, void *plane, int slot, const float *row, int dim)
{
    kv_row_put(r->bounds.k_type, row, dim,
               (char *)plane + dtype_bytes(r->bounds.k_type, (size_t)slot * (size_t)dim));
}

/* Computes q of row t, and stores its key, and entries that it completes. */
static void compressed_row(struct ref *r, const struct mixer *m, const struct kv_layer *kv, int seq,
                           int t, float *state)
{
    const struct compressed *l = &m->compressed;
    int D = l->dim, len = r->bounds.page_len, rows = mixer_page_rows(m, len), pos = r->batch.pos[t];
    float *q = r->q + (size_t)t * (size_t)(l->n_heads * D), *low = r->latent;
    ref_matvec(r, l->wqa, 0, r->n, low);
    ref_norm_row(&l->q_norm, low, low, l->q_rank);
    ref_matvec(r, l->wqb, 0, low, q);
    for (int h = 0; h < l->n_heads; h++) {
        ref_norm_row(&l->head_norm, q + h * D, q + h * D, D);
        ref_turn_last(l->rope, pos, q + h * D, D);
    }
    if (l->index.n_chosen)
        ref_index_row(r, &l->index, kv, t, r->n, low);
    int slot = r->batch.slot[t];
    if (slot < 0)
        return;
    ref_matvec(r, l->wkv, 0, r->n, low);
    ref_norm_row(&l->kv_norm, low, low, D);
    ref_turn_last(l->rope, pos, low, D);
    store(r, kv->k, slot / len * rows + slot % len, low, D);
    const struct compressor *c = &l->compressor, *x = &l->index.compressor;
    if (c->rate && ref_compress(r, c, t, r->n, state, low)) {
        ref_turn_last(l->rope, pos - c->rate + 1, low, D);
        store(r, kv->k, ref_entry_slot(r, c, seq, pos / c->rate, rows, len), low, D);
    }
    if (!l->index.n_chosen)
        return;
    state += 3 * compressor_series(c) * D;
    if (ref_compress(r, x, t, r->n, state, low)) {
        ref_turn_last(l->index.rope, pos - x->rate + 1, low, x->dim);
        store(r, kv->index,
              ref_entry_slot(r, x, seq, pos / x->rate, compressor_page_rows(x, len), 0), low,
              x->dim);
    }
}

/* r->visible: the slots of what row t sees, keys, then entries. Returns their number. */
static int list_visible(struct ref *r, const struct mixer *m, int seq, int t)
{
    const struct compressed *l = &m->compressed;
    int len = r->bounds.page_len, rows = mixer_page_rows(m, len), pos = r->batch.pos[t], n = 0;
    const int32_t *pages = r->batch.pages + seq * r->batch.max_pages;
    const int32_t *chosen = r->chosen + (size_t)t * (size_t)l->index.n_chosen;
    for (int p = pos - l->window + 1 > 0 ? pos - l->window + 1 : 0; p <= pos; p++)
        r->visible[n++] = pages[p / len] * rows + p % len;
    int entries = compressor_entries(&l->compressor, pos);
    bool some = l->index.n_chosen && r->n_chosen[t] >= 0;
    for (int i = 0; i < (some ? r->n_chosen[t] : entries); i++)
        r->visible[n++] = ref_entry_slot(r, &l->compressor, seq, some ? chosen[i] : i, rows, len);
    return n;
}

/* out (D) = the attention of head h of row t over n visible rows */
static void attend(struct ref *r, const struct compressed *l, const void *plane, int t, int h,
                   int n, float *out)
{
    int D = l->dim;
    const float *q = r->q + (size_t)(t * l->n_heads + h) * (size_t)D;
    float max = l->sinks ? l->sinks[h] : -INFINITY;
    double total = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < n; i++) {
            kv_row_get(r->bounds.k_type,
                       (const char *)plane +
                           dtype_bytes(r->bounds.k_type, (size_t)r->visible[i] * (size_t)D),
                       D, r->row);
            if (pass == 0) {
                r->scores[i] = ref_dot(q, r->row, D) * l->scale;
                max = r->scores[i] > max ? r->scores[i] : max;
            } else {
                for (int d = 0; d < D; d++)
                    r->mean[d] += (double)expf(r->scores[i] - max) * r->row[d];
                total += expf(r->scores[i] - max);
            }
        }
        if (pass == 0)
            memset(r->mean, 0, (size_t)D * sizeof *r->mean);
    }
    if (l->sinks)
        total += expf(l->sinks[h] - max);
    for (int d = 0; d < D; d++)
        out[d] = (float)(r->mean[d] / total);
    turn(l->rope, r->batch.pos[t], out, D, -1);
}

/* The step's rows, in the order of their sequences. */
static void store_rows(struct ref *r, const struct mixer *m, const struct kv_layer *kv)
{
    const struct batch *b = &r->batch;
    size_t len = mixer_state_len(m);
    for (int seq = 0; seq < b->n_seqs; seq++) {
        float *state = len ? kv->state + (size_t)b->state_out[seq] * len : NULL;
        bool padding = len && b->state_out[seq] < 0;
        if (len && !padding && b->state_in[seq] < 0)
            memset(state, 0, len * sizeof *state);
        else if (len && !padding && b->state_in[seq] != b->state_out[seq])
            memcpy(state, kv->state + (size_t)b->state_in[seq] * len, len * sizeof *state);
        for (int t = b->q_start[seq]; t < b->q_start[seq + 1] && !padding; t++) {
            r->at = t;
            ref_read_stream(r, m, t);
            compressed_row(r, m, kv, seq, t, state);
            if (len && b->save_rows[seq] == t - b->q_start[seq] + 1)
                memcpy(kv->state + (size_t)b->save_state[seq] * len, state, len * sizeof *state);
        }
    }
}

void ref_mix_compressed(struct ref *r, const struct mixer *m, int layer)
{
    const struct compressed *l = &m->compressed;
    const struct kv_layer *kv = &r->batch.kv[layer];
    const struct batch *b = &r->batch;
    int H = l->n_heads, D = l->dim, G = l->n_groups, each = H / G * D, R = l->woa->n_out;
    ref_stage_begin(r);
    store_rows(r, m, kv);
    if (l->index.n_chosen)
        ref_index_choose(r, &l->index, kv, 1);
    for (int seq = 0; seq < b->n_seqs; seq++)
        for (int t = b->q_start[seq]; t < b->q_start[seq + 1]; t++) {
            float *heads = r->gate + (size_t)t * (size_t)(H * D);
            float *out = r->a + (size_t)t * (size_t)(G * R);
            int n = b->slot[t] < 0 ? 0 : list_visible(r, m, seq, t);
            memset(heads, 0, (size_t)(H * D) * sizeof *heads);
            for (int h = 0; h < H && n; h++)
                attend(r, l, kv->k, t, h, n, heads + h * D);
            r->at = t;
            for (int g = 0; g < G; g++)
                ref_matvec(r, l->woa, g, heads + g * each, out + g * R);
        }
    ref_stage_end(r, STAGE_ATTENTION);
}
