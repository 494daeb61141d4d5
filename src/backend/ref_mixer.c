/* The specification of mixers: attention, latent attention, delta nets. See ref.c. */
#include "backend/ref.h"
#include "base/mem.h"
#include "quant/kvblock.h"

#include <string.h>

/* Writes n values of a head at element `at`. */
static void kv_store(void *base, enum dtype type, size_t at, const float *from, int n)
{
    kv_row_put(type, from, n, (char *)base + dtype_bytes(type, at));
}

/* Reads n values of a head at element `at` into r->row. */
static const float *kv_load(struct ref *r, const void *base, enum dtype type, size_t at, int n)
{
    kv_row_get(type, (const char *)base + dtype_bytes(type, at), n, r->row);
    return r->row;
}

/* Index of element 0 of (slot, kv head) in a pool of (n_pages, K, page_len, dim). */
size_t ref_kv_at(const struct bounds *s, int slot, int n_heads, int head, int dim)
{
    size_t page = (size_t)(slot / s->page_len), off = (size_t)(slot % s->page_len);
    return ((page * (size_t)n_heads + (size_t)head) * (size_t)s->page_len + off) * (size_t)dim;
}

/* The position by which pair i of row t turns. */
static int pair_pos(const struct rope *rope, const struct batch *b, int t, int i)
{
    return rope->plane && b->rope_pos ? b->rope_pos[3 * t + rope->plane[i]] : b->pos[t];
}

void ref_rotate(const struct rope *rope, const struct batch *b, int t, float *head)
{
    int half = rope->n_rot / 2;
    for (int i = 0; i < half; i++) {
        /* The angle is a float product, as in the models' own code; then exact trigonometry. */
        float angle = (float)pair_pos(rope, b, t, i) * rope->freq[i];
        float c = (float)cos(angle) * rope->mscale;
        float s = (float)sin(angle) * rope->mscale;
        float x = head[i], y = head[i + half];
        head[i] = x * c - y * s;
        head[i + half] = y * c + x * s;
    }
}

/* Norm and rotation of row t's n heads, which are contiguous. */
static void finish_heads(const struct attention *a, const struct norm *norm, bool whole,
                         const struct rope *rope, const struct batch *b, int t, float *heads, int n,
                         int dim)
{
    bool late = a->norm_late && rope;
    if (whole)
        ref_norm_row(norm, heads, heads, n * dim);
    for (int h = 0; h < n; h++) {
        if (!whole && !late)
            ref_norm_row(norm, heads + h * dim, heads + h * dim, dim);
        if (rope)
            ref_rotate(rope, b, t, heads + h * dim);
        if (late)
            ref_norm_row(norm, heads + h * dim, heads + h * dim, dim);
    }
}

static void turn_heads(enum dtype type, float *heads, int n, int dim)
{
    for (int h = 0; h < n && kv_turned(type); h++)
        kv_turn(heads + h * dim, dim);
}

static void store_heads(struct ref *r, void *pool, enum dtype type, int slot, const float *heads,
                        int n, int dim)
{
    for (int h = 0; h < n; h++)
        kv_store(pool, type, ref_kv_at(&r->bounds, slot, n, h, dim), heads + h * dim, dim);
}

/* r->qkv = the projection of r->n */
static void project(struct ref *r, const struct attention *a)
{
    const int n[] = {a->n_heads * a->k_dim, a->n_kv_heads * a->k_dim, a->n_kv_heads * a->v_dim};
    if (!a->clips)
        ref_matvec(r, a->wqkv, 0, r->n, r->qkv);
    for (int k = 0, at = 0; a->clips && k < 3; at += n[k++])
        ref_matvec_rows(r, a->wqkv, at, n[k], &a->clips[k], r->n, r->qkv + at);
}

/* The factor of a latent's temperature on queries at pos. */
static float temperature(float beta, int len, int pos)
{
    return beta == 0 ? 1 : 1 + beta * (float)log(1.0 + floor((double)pos / len));
}

/* The factor of attention's temperature on scores of a query at pos. */
static float warmth(const struct attention *a, int pos)
{
    double n = (double)(pos + 1) / a->temp_len;
    if (a->temp_smooth)
        return 1 + a->temp_beta * (float)log(n > 1 ? n : 1);
    return temperature(a->temp_beta, a->temp_len, pos + a->temp_offset);
}

void ref_conv_row(struct ref *r, int layer, const struct row_conv *c, size_t at, int t, int width,
                  float *y)
{
    const struct batch *b = &r->batch;
    size_t len = layer_state_len(&r->net->layers[layer]), n = (size_t)width, W = (size_t)c->len;
    size_t bytes = (W - 1) * n * sizeof(float);
    int seq = 0;
    while (b->q_start[seq + 1] <= t)
        seq++;
    float *states = b->kv[layer].state + at, *past = states + (size_t)b->state_out[seq] * len;
    if (b->state_out[seq] < 0) /* padding */
        return;
    if (t == b->q_start[seq] && b->state_in[seq] < 0)
        memset(past, 0, bytes);
    else if (t == b->q_start[seq] && b->state_in[seq] != b->state_out[seq])
        memcpy(past, states + (size_t)b->state_in[seq] * len, bytes);
    for (size_t i = 0; i < n; i++) {
        double sum = y[i] + (double)c->taps[i * W + W - 1] * y[i];
        for (size_t k = 0; k + 1 < W; k++)
            sum += (double)c->taps[i * W + k] * past[k * n + i];
        for (size_t k = 0; k + 2 < W; k++)
            past[k * n + i] = past[(k + 1) * n + i];
        if (W > 1)
            past[(W - 2) * n + i] = y[i];
        y[i] = (float)sum;
    }
    if (b->save_rows[seq] == t - b->q_start[seq] + 1)
        memcpy(states + (size_t)b->save_state[seq] * len, past, bytes);
}

/* Computes q and gate of row t, and stores its k and v in the cache. */
static void project_row(struct ref *r, const struct attention *a, const struct kv_layer *kv,
                        int layer, int t)
{
    int H = a->n_heads, K = a->n_kv_heads, Dk = a->k_dim, Dv = a->v_dim;
    int each = Dk + (a->gated ? Dv : 0);
    float *q = r->q + (size_t)t * (size_t)(H * Dk), *gate = r->gate + (size_t)t * (size_t)(H * Dv);
    float *k = r->qkv + H * each, *v = k + K * Dk;
    project(r, a);
    if (a->wgate)
        ref_matvec(r, a->wgate, 0, r->n, gate);
    for (int h = 0; h < H; h++) {
        memcpy(q + h * Dk, r->qkv + h * each, (size_t)Dk * sizeof(float));
        if (a->gated && !a->wgate)
            memcpy(gate + h * Dv, r->qkv + h * each + Dk, (size_t)Dv * sizeof(float));
    }
    finish_heads(a, &a->q_norm, a->norm_whole, a->rope, &r->batch, t, q, H, Dk);
    float warm = a->temp_beta == 0 ? 1 : warmth(a, r->batch.pos[t]);
    for (int i = 0; i < H * Dk; i++)
        q[i] *= warm;
    float *rel = r->rel + (size_t)t * (size_t)(H * a->rel_dim);
    if (a->wrel)
        ref_matvec(r, a->wrel, 0, r->n, rel);
    for (int i = 0; a->wrel && i < H * a->rel_dim; i++)
        rel[i] *= warm;
    if (a->k_conv.len) {
        ref_conv_row(r, layer, &a->k_conv, 0, t, K * Dk, k);
        ref_conv_row(r, layer, &a->v_conv, (size_t)(a->k_conv.len - 1) * (size_t)(K * Dk), t,
                     K * Dv, v);
    }
    turn_heads(r->bounds.k_type, q, H, Dk);
    if (a->shares_kv || r->batch.slot[t] < 0)
        return;
    if (a->k_is_v)
        memcpy(v, k, (size_t)(K * Dv) * sizeof(float));
    finish_heads(a, &a->k_norm, a->norm_whole, a->rope, &r->batch, t, k, K, Dk);
    finish_heads(a, &a->v_norm, a->norm_whole, NULL, &r->batch, t, v, K, Dv);
    turn_heads(r->bounds.k_type, k, K, Dk);
    turn_heads(r->bounds.v_type, v, K, Dv);
    store_heads(r, kv->k, r->bounds.k_type, r->batch.slot[t], k, K, Dk);
    store_heads(r, kv->v, r->bounds.v_type, r->batch.slot[t], v, K, Dv);
}

/* out (Dv) = the attention of head h of row t */
static void attend(struct ref *r, const struct attention *a, const struct kv_layer *kv, int seq,
                   int t, int h, const float *q, float *out)
{
    const struct bounds *s = &r->bounds;
    const int32_t *pages = r->batch.pages + (size_t)seq * (size_t)r->batch.max_pages;
    int K = a->n_kv_heads, kv_head = h * K / a->n_heads, first, last;
    batch_keys(&r->batch, a, seq, t, &first, &last);
    float max = a->sinks ? a->sinks[h] : -INFINITY;
    ref_index_seen(r, &a->index, t, kv_head, last);
    for (int p = first; p <= last; p++) {
        r->scores[p] = -INFINITY;
        if (a->index.n_chosen && !r->seen[p])
            continue;
        int slot = pages[p / s->page_len] * s->page_len + p % s->page_len;
        size_t at = ref_kv_at(s, slot, K, kv_head, a->k_dim);
        float score = ref_dot(q, kv_load(r, kv->k, s->k_type, at, a->k_dim), a->k_dim) * a->scale;
        if (a->softcap != 0)
            score = a->softcap * tanhf(score / a->softcap);
        int back = r->batch.pos[t] - p;
        const float *rel = r->rel + (size_t)(t * a->n_heads + h) * (size_t)a->rel_dim;
        for (int i = 0; a->wrel && back < a->rel_len && i < a->rel_dim; i++)
            score += rel[i] * a->rel[i * a->rel_len + back];
        r->scores[p] = score;
        max = score > max ? score : max;
    }
    double total = a->sinks ? (double)expf(a->sinks[h] - max) : 0;
    for (int p = first; p <= last; p++) {
        r->scores[p] = expf(r->scores[p] - max);
        total += r->scores[p];
    }
    memset(r->mean, 0, (size_t)a->v_dim * sizeof *r->mean);
    for (int p = first; p <= last; p++) {
        int slot = pages[p / s->page_len] * s->page_len + p % s->page_len;
        size_t at = ref_kv_at(s, slot, K, kv_head, a->v_dim);
        const float *v = kv_load(r, kv->v, s->v_type, at, a->v_dim);
        for (int i = 0; i < a->v_dim; i++)
            r->mean[i] += (double)r->scores[p] * v[i];
    }
    for (int i = 0; i < a->v_dim; i++)
        out[i] = (float)(r->mean[i] / total);
    turn_heads(s->v_type, out, 1, a->v_dim);
}

/* ln(1 + exp(x)) */
static float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

static void attend_rows(struct ref *r, const struct attention *a, const struct kv_layer *kv)
{
    int H = a->n_heads;
    for (int seq = 0; seq < r->batch.n_seqs; seq++)
        for (int t = r->batch.q_start[seq]; t < r->batch.q_start[seq + 1]; t++)
            for (int h = 0; h < H; h++) {
                size_t at = (size_t)(t * H + h) * (size_t)a->v_dim;
                float *out = r->a + at;
                memset(out, 0, (size_t)a->v_dim * sizeof(float));
                if (r->batch.slot[t] >= 0) /* else padding */
                    attend(r, a, kv, seq, t, h, r->q + (size_t)(t * H + h) * (size_t)a->k_dim, out);
                for (int i = 0; a->gated && i < a->v_dim; i++)
                    out[i] *= ref_sigmoid(r->gate[at + (size_t)i]);
            }
    for (int t = 0; t < r->batch.n_tokens; t++) {
        float *out = r->a + (size_t)t * (size_t)(H * a->v_dim);
        const float *gate = r->gate + (size_t)t * (size_t)(H * a->v_dim);
        int each = a->wgate ? H * a->v_dim / a->wgate->n_out : 1;
        for (int i = 0; a->wgate && i < H * a->v_dim; i++)
            out[i] *= a->softplus ? softplus(gate[i / each]) : ref_sigmoid(gate[i / each]);
        ref_norm_row(&a->out_norm, out, out, H * a->v_dim);
    }
}

/* r->n = the mixer's input of row t */
void ref_read_stream(struct ref *r, const struct mixer *m, int t)
{
    const float *x = ref_stream_row(r, t);
    size_t joined = 2 * (size_t)r->net->n_embd;
    if (m->block.joined)
        memcpy(r->n, r->joined + (size_t)t * joined, joined * sizeof *r->n);
    else
        ref_norm_row(&m->block.in, m->block.parallel ? r->before + (x - r->x) : x, r->n,
                     r->net->n_embd);
}

static void mix_attention(struct ref *r, const struct mixer *m, int layer)
{
    const struct attention *a = &m->attention;
    const struct kv_layer *kv = &r->batch.kv[a->shares_kv ? a->kv_layer : layer];
    ref_stage_begin(r);
    for (int t = 0; t < r->rows; t++) {
        r->at = t;
        ref_read_stream(r, m, t);
        project_row(r, a, kv, layer, t);
        if (a->index.n_chosen)
            ref_index_row(r, &a->index, kv, t, r->n, r->n);
    }
    if (a->index.n_chosen)
        ref_index_choose(r, &a->index, kv, a->n_kv_heads);
    ref_stage_end(r, STAGE_QKV);
    ref_stage_begin(r);
    attend_rows(r, a, kv);
    ref_stage_end(r, STAGE_ATTENTION);
}

/* Interleaved pairs (2i, 2i + 1) become (i, i + n/2). */
void ref_deinterleave(struct ref *r, float *x, int n)
{
    for (int i = 0; i < n; i++)
        r->hidden[i] = x[i % (n / 2) * 2 + i / (n / 2)];
    memcpy(x, r->hidden, (size_t)n * sizeof(float));
}

/* Computes q of row t, and stores its latent and rotated part in the cache. */
static void latent_row(struct ref *r, const struct latent *l, const struct kv_layer *kv, int t)
{
    int Dn = l->nope_dim, Dr = l->rope_dim, C = l->kv_rank;
    float *q = r->q + (size_t)t * (size_t)(l->n_heads * (Dn + Dr)), *low = r->latent;
    if (l->wqa) {
        ref_matvec(r, l->wqa, 0, r->n, low);
        ref_norm_row(&l->q_norm, low, low, l->q_rank);
    }
    ref_matvec(r, l->wqb, 0, l->wqa ? low : r->n, q);
    if (l->index.n_chosen)
        ref_index_row(r, &l->index, kv, t, r->n, l->wqa ? low : r->n);
    float warm = temperature(l->temp_beta, l->temp_len, r->batch.pos[t]);
    for (int i = 0; i < l->n_heads * (Dn + Dr); i++)
        q[i] *= warm;
    for (int h = 0; h < l->n_heads; h++) {
        if (l->interleaved)
            ref_deinterleave(r, q + h * (Dn + Dr) + Dn, Dr);
        ref_rotate(l->rope, &r->batch, t, q + h * (Dn + Dr) + Dn);
    }
    if (r->batch.slot[t] < 0)
        return;
    ref_matvec(r, l->wkva, 0, r->n, low);
    ref_norm_row(&l->kv_norm, low, low, C);
    if (l->interleaved)
        ref_deinterleave(r, low + C, Dr);
    ref_rotate(l->rope, &r->batch, t, low + C);
    store_heads(r, kv->k, r->bounds.k_type, r->batch.slot[t], low, 1, C + Dr);
}

/* out (Dv) = the attention of head h of row t, with query q, over latents */
static void attend_latent(struct ref *r, const struct latent *l, const struct kv_layer *kv, int seq,
                          int t, int h, const float *q, float *out)
{
    const struct bounds *s = &r->bounds;
    const int32_t *pages = r->batch.pages + (size_t)seq * (size_t)r->batch.max_pages;
    int C = l->kv_rank, Dr = l->rope_dim, width = C + Dr, last = r->batch.pos[t];
    float *query = r->latent, *sum = query + width, max = -INFINITY;
    double total = 0;
    ref_matvec(r, l->wkb, h, q, query);
    memcpy(query + C, q + l->nope_dim, (size_t)Dr * sizeof(float));
    ref_index_seen(r, &l->index, t, 0, last);
    for (int p = 0; p <= last; p++) {
        r->scores[p] = -INFINITY;
        if (l->index.n_chosen && !r->seen[p])
            continue;
        int slot = pages[p / s->page_len] * s->page_len + p % s->page_len;
        const float *row = kv_load(r, kv->k, s->k_type, ref_kv_at(s, slot, 1, 0, width), width);
        r->scores[p] = ref_dot(query, row, width) * l->scale;
        max = r->scores[p] > max ? r->scores[p] : max;
    }
    for (int p = 0; p <= last; p++)
        total += r->scores[p] = expf(r->scores[p] - max);
    memset(r->mean, 0, (size_t)C * sizeof *r->mean);
    for (int p = 0; p <= last; p++) {
        int slot = pages[p / s->page_len] * s->page_len + p % s->page_len;
        const float *row = kv_load(r, kv->k, s->k_type, ref_kv_at(s, slot, 1, 0, width), width);
        for (int i = 0; i < C; i++)
            r->mean[i] += (double)r->scores[p] * row[i];
    }
    for (int i = 0; i < C; i++)
        sum[i] = (float)(r->mean[i] / total);
    ref_matvec(r, l->wvb, h, sum, out);
}

static void mix_latent(struct ref *r, const struct mixer *m, int layer)
{
    const struct latent *l = &m->latent;
    const struct kv_layer *kv = &r->batch.kv[layer];
    int H = l->n_heads, D = l->nope_dim + l->rope_dim;
    ref_stage_begin(r);
    for (int t = 0; t < r->rows; t++) {
        r->at = t;
        ref_read_stream(r, m, t);
        latent_row(r, l, kv, t);
    }
    if (l->index.n_chosen)
        ref_index_choose(r, &l->index, kv, 1);
    ref_stage_end(r, STAGE_QKV);
    ref_stage_begin(r);
    for (int seq = 0; seq < r->batch.n_seqs; seq++)
        for (int t = r->batch.q_start[seq]; t < r->batch.q_start[seq + 1]; t++)
            for (int h = 0; h < H; h++) {
                float *out = r->a + (size_t)(t * H + h) * (size_t)l->v_dim;
                memset(out, 0, (size_t)l->v_dim * sizeof(float));
                if (r->batch.slot[t] >= 0) /* else padding */
                    attend_latent(r, l, kv, seq, t, h, r->q + (size_t)(t * H + h) * (size_t)D, out);
            }
    ref_stage_end(r, STAGE_ATTENTION);
}

/* One token of a v head: S (Dk, Dv) is decayed, corrected by its error at k, and read at q. */
static void delta_head(float *S, const float *q, const float *k, const float *v, float decay,
                       float beta, int Dk, int Dv, float *out)
{
    for (int j = 0; j < Dv; j++) {
        double seen = 0, sum = 0;
        for (int i = 0; i < Dk; i++) {
            S[i * Dv + j] *= decay;
            seen += (double)S[i * Dv + j] * k[i];
        }
        float wrong = beta * (v[j] - (float)seen);
        for (int i = 0; i < Dk; i++) {
            S[i * Dv + j] += k[i] * wrong;
            sum += (double)S[i * Dv + j] * q[i];
        }
        out[j] = (float)sum;
    }
}

/* u = conv(u) + bias of one row. past: the W-1 rows before it, oldest first, which it joins. */
static void convolve(const float *conv, const float *bias, int W, int width, float *past, float *u)
{
    for (int c = 0; c < width; c++, past++) {
        float now = u[c];
        double sum = (double)conv[c * W + W - 1] * now + (bias ? bias[c] : 0);
        for (int i = 0; i < W - 1; i++)
            sum += (double)conv[c * W + i] * past[i * width];
        for (int i = 0; i + 1 < W - 1; i++)
            past[i * width] = past[(i + 1) * width];
        if (W > 1)
            past[(W - 2) * width] = now;
        u[c] = (float)sum;
    }
}

/* x = x / |x| * scale */
static void l2_norm(float *x, int n, float scale)
{
    scale /= sqrtf(ref_dot(x, x, n) + 1e-6f);
    for (int i = 0; i < n; i++)
        x[i] *= scale;
}

/* out (Hv*Dv) = the net's result for one row, whose normed input is in r->n. state: the last W-1 rows before the
 * convolution, oldest first, then S of each head. */
static void delta_row(struct ref *r, const struct delta_net *d, float *state, float *out)
{
    int Hk = d->n_k_heads, Hv = d->n_v_heads, Dk = d->k_dim, Dv = d->v_dim, W = d->conv_len;
    int width = 2 * Hk * Dk + Hv * Dv;
    float *u = r->qkv, *ba = r->hidden, *k = u + Hk * Dk, *v = k + Hk * Dk;
    float *S = state + (size_t)(W - 1) * (size_t)width;
    ref_matvec(r, d->wqkv, 0, r->n, u);
    ref_matvec(r, d->wba, 0, r->n, ba);
    convolve(d->conv, NULL, W, width, state, u);
    for (int c = 0; c < width; c++)
        u[c] *= ref_sigmoid(u[c]);
    for (int h = 0; h < Hk; h++) {
        l2_norm(u + h * Dk, Dk, 1.0f / sqrtf((float)Dk));
        l2_norm(k + h * Dk, Dk, 1.0f);
    }
    for (int h = 0; h < Hv; h++) {
        float a = ba[Hv + h] + d->dt_bias[h];
        int of = delta_net_k_head(d, h);
        delta_head(S + (size_t)h * (size_t)(Dk * Dv), u + of * Dk, k + of * Dk, v + h * Dv,
                   expf(-d->decay[h] * softplus(a)), ref_or_one(d->beta_scale) * ref_sigmoid(ba[h]),
                   Dk, Dv, out + h * Dv);
        ref_norm_row(&d->norm, out + h * Dv, out + h * Dv, Dv);
    }
    ref_matvec(r, d->wz, 0, r->n, r->gate);
    for (int i = 0; i < Hv * Dv; i++)
        out[i] *= r->gate[i] * ref_sigmoid(r->gate[i]);
}

/* out (H*P) = the result for one row, whose normed input is in r->n. state: the last W-1 rows of u, oldest first, then S
 * of each head. */
static void ssm_row(struct ref *r, const struct ssm *m, float *state, float *out)
{
    int H = m->n_heads, P = m->head_dim, N = m->state_dim, width = ssm_channels(m), values = H * P;
    float *z = r->qkv, *x = z + values, *dt = x + width;
    float *S = state + (size_t)(m->conv_len - 1) * (size_t)width;
    ref_matvec(r, m->w_in, 0, r->n, m->w_z ? x : z);
    if (m->w_z)
        ref_matvec(r, m->w_z, 0, r->n, z);
    float *part = z;
    for (int k = 0; m->in_scale[0] != 0 && k < SSM_PARTS; part += ssm_part(m, k++))
        for (int i = 0; i < ssm_part(m, k); i++)
            part[i] *= m->in_scale[k];
    if (m->conv)
        convolve(m->conv, m->conv_bias, m->conv_len, width, state, x);
    for (int c = 0; c < width; c++)
        x[c] *= ref_sigmoid(x[c]);
    for (int h = 0; h < H; h++, S += (size_t)N * (size_t)P) {
        const float *b = x + values + h * m->n_groups / H * N, *c = b + m->n_groups * N;
        float t = m->dt_bias ? softplus(dt[h] + m->dt_bias[h]) : 1;
        t = t < m->dt_min ? m->dt_min : t;
        t = m->dt_max != 0 && t > m->dt_max ? m->dt_max : t;
        float decay = expf(-m->decay[h] * t);
        for (int p = 0; p < P; p++) {
            float v = x[h * P + p];
            double sum = 0;
            for (int n = 0; n < N; n++) {
                float *s = &S[(size_t)n * (size_t)P + (size_t)p];
                *s = *s * decay + b[n] * (t * v);
                sum += (double)*s * c[n];
            }
            out[h * P + p] = (float)sum + (m->skip ? m->skip[h] * v : 0);
        }
    }
    int each = values / (m->n_norms ? m->n_norms : 1);
    for (int i = 0; i < values; i++)
        z[i] = ref_sigmoid(z[i]) * (m->sigmoid_gate ? 1 : z[i]);
    for (int i = 0; i < values && !m->norm_first; i++)
        out[i] *= z[i];
    for (int i = 0; i < values && m->norm.kind != NORM_NONE; i += each) {
        struct norm norm = m->norm;
        norm.gain = norm.gain ? norm.gain + i : NULL;
        ref_norm_row(&norm, out + i, out + i, each);
    }
    for (int i = 0; i < values && m->norm_first; i++)
        out[i] *= z[i];
}

/* out (I) = the result for one row, whose normed input is in r->n. state: the last W-1 rows of u, oldest first, then S. */
static void scan_row(struct ref *r, const struct scan *m, float *state, float *out)
{
    int I = m->n_channels, N = m->state_dim, R = m->dt_rank;
    float *x = r->qkv, *z = x + I, *low = r->latent, *b = low + R, *c = b + N;
    float *S = state + (size_t)(m->conv_len - 1) * (size_t)I;
    ref_matvec(r, m->w_in, 0, r->n, x);
    convolve(m->conv, m->conv_bias, m->conv_len, I, state, x);
    for (int i = 0; i < I; i++)
        x[i] *= ref_sigmoid(x[i]);
    ref_matvec(r, m->w_x, 0, x, low);
    ref_norm_row(&m->dt_norm, low, low, R);
    ref_norm_row(&m->b_norm, b, b, N);
    ref_norm_row(&m->c_norm, c, c, N);
    ref_matvec(r, m->w_dt, 0, low, r->gate);
    for (int i = 0; i < I; i++) {
        float dt = softplus(r->gate[i]);
        double sum = 0;
        for (int n = 0; n < N; n++) {
            float *s = &S[(size_t)i * (size_t)N + (size_t)n];
            *s = *s * expf(-m->decay[i * N + n] * dt) + b[n] * (dt * x[i]);
            sum += (double)*s * c[n];
        }
        out[i] = ((float)sum + m->skip[i] * x[i]) * z[i] * ref_sigmoid(z[i]);
    }
}

/* out (E) = the result for one row, whose normed input is in r->n. state: the last W-1 rows of u, oldest first. */
static void short_conv_row(struct ref *r, const struct short_conv *m, float *state, float *out)
{
    int E = m->w_out->n_in;
    float *b = r->qkv, *c = b + E, *x = c + E;
    ref_matvec(r, m->w_in, 0, r->n, b);
    for (int i = 0; i < E; i++)
        out[i] = b[i] * x[i];
    convolve(m->conv, m->bias, m->conv_len, E, state, out);
    for (int i = 0; i < E; i++)
        out[i] *= c[i];
}

static void state_row(struct ref *r, const struct mixer *m, float *state, float *out)
{
    if (m->kind == MIXER_DELTA_NET)
        delta_row(r, &m->delta_net, state, out);
    else if (m->kind == MIXER_SSM)
        ssm_row(r, &m->ssm, state, out);
    else if (m->kind == MIXER_SCAN)
        scan_row(r, &m->scan, state, out);
    else
        short_conv_row(r, &m->short_conv, state, out);
}

/* Mixers with a recurrent state: rows in order. values: width of a row's result. */
static void mix_state(struct ref *r, const struct mixer *m, int layer, size_t values)
{
    const struct batch *b = &r->batch;
    size_t len = mixer_state_len(m);
    float *states = b->kv[layer].state;
    ref_stage_begin(r);
    for (int seq = 0; seq < b->n_seqs; seq++) {
        int first = b->q_start[seq];
        float *state = states + (size_t)b->state_out[seq] * len;
        if (b->state_out[seq] < 0) { /* padding */
            memset(r->a + (size_t)first * values, 0,
                   (size_t)(b->q_start[seq + 1] - first) * values * sizeof(float));
            continue;
        }
        if (b->state_in[seq] < 0)
            memset(state, 0, len * sizeof(float));
        else if (b->state_in[seq] != b->state_out[seq])
            memcpy(state, states + (size_t)b->state_in[seq] * len, len * sizeof(float));
        for (int t = first; t < b->q_start[seq + 1]; t++) {
            r->at = t;
            ref_read_stream(r, m, t);
            state_row(r, m, state, r->a + (size_t)t * values);
            if (b->save_rows[seq] == t - first + 1)
                memcpy(states + (size_t)b->save_state[seq] * len, state, len * sizeof(float));
        }
    }
    ref_stage_end(r, STAGE_ATTENTION);
}

/* part = n + norm((n Wl^T) Wr^T) of the mixer's input x */
static void laurel_row(struct ref *r, const struct mixer *m, const float *x)
{
    int E = r->net->n_embd;
    ref_norm_row(&m->block.in, x, r->n, E);
    ref_matvec(r, m->laurel.left, 0, r->n, r->hidden);
    ref_matvec(r, m->laurel.right, 0, r->hidden, r->part);
    ref_norm_row(&m->laurel.norm, r->part, r->part, E);
    for (int e = 0; e < E; e++)
        r->part[e] += r->n[e];
}

void ref_mixer(struct backend *be, const struct mixer *m, int layer)
{
    struct ref *r = ref_self(be);
    const struct weight *wo = mixer_out(m);
    const struct altup *altup = &r->net->layers[layer].altup;
    for (int i = 0; altup->router && i < r->rows; i++)
        ref_streams_predict(r, altup, i);
    for (int i = 0; r->net->streams.head.w && i < r->rows; i++)
        ref_hyper_read(r, &r->net->layers[layer].hyper[0], i);
    if (m->kind == MIXER_ATTENTION)
        mix_attention(r, m, layer);
    else if (m->kind == MIXER_LATENT)
        mix_latent(r, m, layer);
    else if (m->kind == MIXER_COMPRESSED)
        ref_mix_compressed(r, m, layer);
    else if (wo)
        mix_state(r, m, layer, (size_t)wo->n_in);
    ref_stage_begin(r);
    if (batch_narrows(&r->batch, r->net, layer))
        ref_narrow(r);
    for (int i = 0; wo && i < r->rows; i++) {
        r->at = r->row_of[i];
        const float *a = r->a + (size_t)r->row_of[i] * (size_t)wo->n_in;
        if (m->kind == MIXER_ATTENTION && m->attention.clips)
            ref_matvec_rows(r, wo, 0, wo->n_out, &m->attention.clips[3], a, r->y);
        else
            ref_matvec(r, wo, 0, a, r->y);
        if (m->partial)
            be->comm->sum(be->comm, r->y, (size_t)r->net->n_embd);
        if (m->block.conv.len)
            ref_conv_row(r, layer, &m->block.conv, layer_conv_at(&r->net->layers[layer], &m->block),
                         r->at, r->net->n_embd, r->y);
        float *x = ref_stream_row(r, i);
        if (!m->block.parallel)
            memcpy(r->before + (x - r->x), x, (size_t)r->net->n_embd * sizeof *x);
        if (m->laurel.left)
            laurel_row(r, m, x);
        ref_block_add(r, &m->block, r->y, x);
        for (int e = 0; m->laurel.left && e < r->net->n_embd; e++)
            x[e] = (x[e] + r->part[e]) / sqrtf(2);
    }
    ref_stage_end(r, STAGE_OUTPUT);
}
