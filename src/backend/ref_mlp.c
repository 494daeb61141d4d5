/* The specification of mlps: dense, routers and experts. See ref.c. */
#include "backend/ref.h"
#include "base/mem.h"

#include <string.h>

static float gelu_tanh(float x)
{
    return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

static float gelu(float x)
{
    return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
}

/* h[i] = act(h[i], h[width + i]) */
static void activate(const struct ffn *f, float *h, int width)
{
    for (int i = 0; i < width; i++) {
        float g = h[i], u = h[width + i];
        switch (f->act) {
        case ACT_SILU:
            h[i] = g / (1.0f + expf(-g)) * u;
            break;
        case ACT_GELU_TANH:
            h[i] = gelu_tanh(g) * u;
            break;
        case ACT_GELU:
            h[i] = gelu(g) * u;
            break;
        case ACT_SWIGLU_CLAMP:
            g = g < f->limit ? g : f->limit;
            u = u < f->limit ? u : f->limit;
            u = u > -f->limit ? u : -f->limit;
            h[i] = g / (1.0f + expf(-f->alpha * g)) * (u + 1.0f);
            break;
        case ACT_SILU_CLAMP:
            g = g < f->limit ? g : f->limit;
            u = u < f->limit ? u : f->limit;
            h[i] = g / (1.0f + expf(-g)) * (u > -f->limit ? u : -f->limit);
            break;
        case ACT_SILU_LIMIT:
            g = g / (1.0f + expf(-g));
            g = g < f->limit ? g : f->limit;
            u = u < f->limit ? u : f->limit;
            h[i] = g * (u > -f->limit ? u : -f->limit);
            break;
        case ACT_RELU2:
            h[i] = g > 0 ? g * g * u : 0;
            break;
        case ACT_PLAIN_XIELU:
            h[i] = f->beta * g + (g > 0 ? f->alpha * g * g : f->limit * (expm1f(g) - g));
            break;
        case ACT_PLAIN_RELU2:
            h[i] = g > 0 ? g * g : 0;
            break;
        case ACT_PLAIN_GELU:
            h[i] = gelu(g);
            break;
        case ACT_PLAIN_GELU_TANH:
            h[i] = gelu_tanh(g);
            break;
        case ACT_PLAIN_QUICK_GELU:
            h[i] = g / (1.0f + expf(-1.702f * g));
            break;
        case ACT_NONE:
            break;
        }
    }
}

/* g = max(g - cut, 0) with cut = mean(g) + sparsity * std(g) */
static void keep_top(float sparsity, float *g, int n)
{
    double mean = 0, var = 0;
    for (int i = 0; i < n; i++)
        mean += g[i];
    mean /= n;
    for (int i = 0; i < n; i++)
        var += (g[i] - mean) * (g[i] - mean);
    float cut = (float)(mean + sparsity * sqrt(var / n));
    for (int i = 0; i < n; i++)
        g[i] = g[i] > cut ? g[i] - cut : 0;
}

static void ffn_row(struct ref *r, const struct ffn *f, int e, const float *x, float *y)
{
    int F = f->down->n_in;
    if (!f->clips)
        ref_matvec(r, f->gate_up, e, x, r->hidden);
    for (int k = 0; f->clips && k * F < f->gate_up->n_out; k++)
        ref_matvec_rows(r, f->gate_up, k * F, F, &f->clips[k], x, r->hidden + k * F);
    if (f->sparse)
        keep_top(f->sparsity, r->hidden, F);
    activate(f, r->hidden, F);
    ref_norm_row(&f->mid, r->hidden, r->hidden, F);
    if (f->clips)
        ref_matvec_rows(r, f->down, 0, f->down->n_out, &f->clips[2], r->hidden, y);
    else
        ref_matvec(r, f->down, e, r->hidden, y);
}

/* Index of the largest key not chosen yet; the first of equal ones. */
static int best_key(const float *keys, int n, const int *chosen, int n_chosen)
{
    int best = -1;
    for (int e = 0; e < n; e++) {
        bool taken = false;
        for (int j = 0; j < n_chosen; j++)
            taken |= chosen[j] == e;
        if (!taken && (best < 0 || keys[e] > keys[best]))
            best = e;
    }
    return best;
}

/* Masks experts outside the best groups with -inf. Returns the relative margin between the last group kept and the first
 * one dropped. */
static float keep_groups(const struct router *t, float *keys, int n)
{
    int each = n / t->n_groups, best[REF_MAX_USED] = {0};
    float score[REF_MAX_USED] = {0};
    CHECK(each > 0, "%d experts in %d groups", n, t->n_groups);
    for (int g = 0; g < t->n_groups; g++) {
        int two[2] = {0};
        two[0] = best_key(keys + g * each, each, two, 0);
        score[g] = keys[g * each + two[0]];
        if (each > 1)
            score[g] += keys[g * each + best_key(keys + g * each, each, two, 1)];
    }
    for (int k = 0; k < t->n_groups_used; k++)
        best[k] = best_key(score, t->n_groups, best, k);
    float last = score[best[t->n_groups_used - 1]], gap = INFINITY;
    if (t->n_groups_used < t->n_groups)
        gap = (last - score[best_key(score, t->n_groups, best, t->n_groups_used)]) / fabsf(last);
    for (int e = 0; e < n; e++) {
        bool kept = false;
        for (int k = 0; k < t->n_groups_used; k++)
            kept |= e / each == best[k];
        keys[e] = kept ? keys[e] : -INFINITY;
    }
    return gap;
}

static void softmax(float *p, int n)
{
    float max = -INFINITY;
    double total = 0;
    for (int i = 0; i < n; i++)
        max = p[i] > max ? p[i] : max;
    for (int i = 0; i < n; i++)
        total += p[i] = expf(p[i] - max);
    for (int i = 0; i < n; i++)
        p[i] = (float)(p[i] / total);
}

/* The weight of expert e, chosen by SparseMixer after the first n of `chosen`. */
static float sparse_weight(const struct router *t, const float *l, int n_expert, const int *chosen,
                           int n, int e)
{
    double total = 0;
    for (int i = 0; i < n_expert; i++) {
        bool before = false;
        for (int k = 0; k < n; k++)
            before |= chosen[k] == i;
        float size = fabsf(l[i]) > l[e] ? fabsf(l[i]) : l[e];
        if (!before && l[e] - l[i] <= 2 * t->jitter * size)
            total += expf(l[i] - l[e]);
    }
    return (float)(1 / total);
}

/* Chooses the experts of one row and their weights (n_used) from the router's input x. Returns the relative margin
 * between the last expert (or group) chosen and the first one not chosen. */
static float route(struct ref *r, const struct router *t, const float *x, int *chosen,
                   float *weight)
{
    int n = t->w->n_out;
    float *p = r->probs, *keys = r->keys;
    ref_matvec(r, t->w, 0, x, p);
    if (t->kind == ROUTER_SOFTMAX)
        softmax(p, n);
    for (int e = 0; e < n; e++) {
        if (t->kind == ROUTER_SIGMOID)
            p[e] = ref_sigmoid(p[e]);
        if (t->kind == ROUTER_SOFTPLUS)
            p[e] = sqrtf(p[e] > 20 ? p[e] : log1pf(expf(p[e])));
        keys[e] = p[e] + (t->choice_bias ? t->choice_bias[e] : 0.0f);
    }
    int token = r->batch.tokens[r->at] < r->net->n_vocab ? r->batch.tokens[r->at] : 0;
    float groups = t->n_groups > 1 ? keep_groups(t, keys, n) : INFINITY;
    double kept = 0;
    float last = 0, gap = INFINITY;
    for (int k = 0; k < t->n_used; k++) {
        chosen[k] =
            t->by_token ? (int)t->by_token[token * t->n_used + k] : best_key(keys, n, chosen, k);
        weight[k] = t->kind == ROUTER_SPARSE_MIXER ? sparse_weight(t, p, n, chosen, k, chosen[k])
                                                   : p[chosen[k]];
        last = keys[chosen[k]];
        kept += weight[k];
    }
    if (t->n_used < n && !t->by_token)
        gap = (last - keys[best_key(keys, n, chosen, t->n_used)]) / fabsf(last);
    gap = groups < gap ? groups : gap;
    if (t->kind == ROUTER_SOFTMAX_TOP)
        softmax(weight, t->n_used);
    for (int k = 0; k < t->n_used; k++) {
        if (t->renorm && t->kind != ROUTER_SOFTMAX_TOP)
            weight[k] = (float)(weight[k] / kept);
        weight[k] *= ref_or_one(t->scale);
        if (t->expert_scale)
            weight[k] *= t->expert_scale[chosen[k]];
    }
    return gap;
}

/* y += experts_out(sum over the chosen experts); late experts: y of another row, after the next layer. n: the dense part's
 * input; overwritten if experts have their own norm. */
static void experts_row(struct ref *r, const struct mlp *m, const float *x, float *n, float *y,
                        float *gap)
{
    int chosen[REF_MAX_USED], E = r->net->n_embd, L = m->to_experts ? m->to_experts->n_out : E;
    float weight[REF_MAX_USED];
    ref_stage_begin(r);
    if (m->experts_in.kind)
        ref_norm_row(&m->experts_in, x, n, E);
    if (m->router.norm.kind)
        ref_norm_row(&m->router.norm, x, r->part, E);
    float g = route(r, &m->router, m->router.norm.kind ? r->part : n, chosen, weight);
    *gap = g < *gap ? g : *gap;
    ref_stage_end(r, STAGE_ROUTER);
    ref_stage_begin(r);
    float *sum = r->sum, same = 0;
    memset(sum, 0, (size_t)L * sizeof(float));
    if (m->to_experts)
        ref_matvec(r, m->to_experts, 0, n, r->to_experts);
    for (int k = 0; k < m->router.n_used; k++) {
        int e = chosen[k] - m->expert_first;
        same += chosen[k] >= router_experts(&m->router) ? weight[k] : 0;
        if (e < 0 || e >= m->experts.gate_up->n_expert)
            continue; /* another process has it */
        const float *in = m->to_experts ? r->to_experts : n;
        for (int i = 0; m->router.weighs_input && i < L; i++)
            r->weighed[i] = weight[k] * in[i];
        ffn_row(r, &m->experts, e, m->router.weighs_input ? r->weighed : in, r->part);
        for (int i = 0; i < L; i++)
            sum[i] += (m->router.weighs_input ? 1 : weight[k]) * r->part[i];
    }
    if (m->experts_partial)
        r->be.comm->sum(r->be.comm, sum, (size_t)L);
    for (int i = 0; same != 0 && i < L; i++)
        sum[i] += same * (m->to_experts ? r->to_experts : n)[i];
    if (m->to_experts) {
        ref_matvec(r, m->from_experts, 0, sum, r->part);
        memcpy(sum, r->part, (size_t)E * sizeof(float));
    }
    ref_norm_row(&m->experts_out, sum, sum, E);
    for (int i = 0; i < E; i++)
        y[i] += sum[i];
    ref_stage_end(r, STAGE_EXPERTS);
}

void ref_experts(struct backend *be, const struct mlp *m, const int32_t *chosen,
                 const float *weights, int used, const float *x, float *y, int rows)
{
    struct ref *r = ref_self(be);
    int in = m->experts.gate_up->n_in, out = m->experts.down->n_out;
    r->at = 0;
    for (int t = 0; t < rows; t++, x += in, y += out) {
        memset(y, 0, (size_t)out * sizeof *y);
        for (int k = t * used; k < (t + 1) * used; k++) {
            if (chosen[k] < 0)
                continue;
            ffn_row(r, &m->experts, chosen[k], x, r->part);
            for (int i = 0; i < out; i++)
                y[i] += weights[k] * r->part[i];
        }
    }
}

/* part = norm((act(x Wg^T) * e) Wp^T) */
static void layer_embed_row(struct ref *r, const struct layer_embed *l, const float *e,
                            const float *x)
{
    int P = l->gate->n_out, E = r->net->n_embd;
    ref_matvec(r, l->gate, 0, x, r->hidden);
    memcpy(r->hidden + P, e, (size_t)P * sizeof(float));
    activate(&(struct ffn){.act = l->act}, r->hidden, P);
    ref_matvec(r, l->project, 0, r->hidden, r->part);
    ref_norm_row(&l->norm, r->part, r->part, E);
}

void ref_mlp(struct backend *be, const struct mlp *m, int layer)
{
    struct ref *r = ref_self(be);
    int E = r->net->n_embd, P = r->net->embed.layers.width;
    for (int i = 0; !mlp_is_none(m) && i < r->rows; i++) {
        float *x = ref_stream_row(r, i), *y = r->y;
        r->at = r->row_of[i];
        if (r->net->streams.head.w)
            ref_hyper_read(r, &r->net->layers[layer].hyper[1], i);
        ref_stage_begin(r);
        ref_norm_row(&m->block.in, m->block.parallel ? r->before + (x - r->x) : x, r->n, E);
        memset(y, 0, (size_t)E * sizeof(float));
        ref_stage_end(r, STAGE_NORM);
        if (m->dense.gate_up) {
            float gate = 0;
            ref_stage_begin(r);
            ffn_row(r, &m->dense, 0, r->n, y);
            if (m->dense_gate)
                ref_matvec(r, m->dense_gate, 0, r->n, &gate);
            for (int j = 0; m->dense_gate && j < E; j++)
                y[j] *= ref_sigmoid(gate);
            if (m->dense_partial)
                be->comm->sum(be->comm, y, (size_t)E);
            ref_norm_row(&m->dense_out, y, y, E);
            ref_stage_end(r, STAGE_FFN);
        }
        float *late = r->late + (size_t)r->row_of[i] * (size_t)E;
        if (m->experts_late)
            memset(late, 0, (size_t)E * sizeof(float));
        if (m->router.w)
            experts_row(r, m, x, r->n, m->experts_late ? late : y, &r->gap[r->row_of[i]]);
        ref_stage_begin(r);
        if (m->block.conv.len)
            ref_conv_row(r, layer, &m->block.conv, layer_conv_at(&r->net->layers[layer], &m->block),
                         r->at, E, y);
        ref_block_add(r, &m->block, y, x);
        for (int j = 0; layer && r->net->layers[layer - 1].mlp.experts_late && j < E; j++)
            x[j] += late[j];
        const struct altup *altup = &r->net->layers[layer].altup;
        if (altup->router)
            ref_streams_correct(r, altup, i);
        for (int j = 0; j < E; j++)
            r->n[j] = x[j] * (altup->scale ? altup->scale[j] : 1);
        if (m->embed.gate)
            layer_embed_row(
                r, &m->embed,
                r->layer_embeds + (size_t)((r->row_of[i] * r->net->n_layers + layer) * P), r->n);
        if (m->embed.gate && altup->router)
            ref_streams_add(r, r->part, i);
        for (int j = 0; m->embed.gate && !altup->router && j < E; j++)
            x[j] += r->part[j];
        for (int j = 0; j < E; j++)
            x[j] *= ref_or_one(m->stream_scale);
        int given = r->batch.tokens[r->row_of[i]] - r->net->n_vocab;
        for (int j = 0; m->deepstack && given >= 0 && j < E; j++)
            x[j] += r->batch.embeds[given][m->deepstack * E + j];
        ref_stage_end(r, STAGE_NORM);
    }
}

static int merge_row(struct ref *r, const struct merger *m, int k, int base, int at, float *out);

/* y = [norm(x_0) .. norm(x_n-1)] of step k, or their mean, from row `at` of its result on; returns y's width. */
static int join_rows(struct ref *r, const struct merger *m, int k, int base, int at, float *y)
{
    const struct merge_step *s = &m->steps[k];
    int n = s->rows ? s->rows : 1, width = 0;
    float *x = y + r->max.merged;
    for (int i = 0; i < n; i++) {
        width = merge_row(r, m, k - 1, base, at * n + i, x);
        ref_norm_row(&s->norm, x, x, width);
        for (int e = 0; e < width; e++) {
            float *to = s->mean ? &y[e] : &y[s->interleaved ? e * n + i : i * width + e];
            *to = s->mean ? (i ? *to : 0) + x[e] / (float)n : x[e];
        }
    }
    return s->mean ? width : n * width;
}

/* out = row `at` of the result of steps 0 to k, of the sequence whose first row is `base`; returns its width. */
static int merge_row(struct ref *r, const struct merger *m, int k, int base, int at, float *out)
{
    int E = r->net->n_embd;
    if (k < 0) {
        memcpy(out, ref_stream_row(r, base + at), (size_t)E * sizeof(float));
        return E;
    }
    const struct merge_step *s = &m->steps[k];
    float *y = r->merged + (size_t)(3 * k) * (size_t)r->max.merged;
    int width = join_rows(r, m, k, base, at, y);
    ref_norm_row(&s->joined, y, y, width);
    width = activation_is_gated(s->act) ? width / 2 : width;
    activate(&(struct ffn){.act = s->act}, y, width);
    if (!s->w)
        memcpy(out, y, (size_t)width * sizeof(float));
    else
        ref_matvec(r, s->w, 0, y, out);
    return s->w ? s->w->n_out : width;
}

void ref_merge(struct backend *be, const struct merger *m, int index)
{
    struct ref *r = ref_self(be);
    const struct batch *b = &r->batch;
    int rows = merger_rows(m);
    float *out = r->features[index];
    ref_stage_begin(r);
    for (int seq = 0; seq < b->n_seqs; seq++)
        for (int i = 0; i < (b->q_start[seq + 1] - b->q_start[seq]) / rows; i++)
            out += merge_row(r, m, m->n_steps - 1, b->q_start[seq], i, out);
    ref_stage_end(r, STAGE_HEAD);
}
