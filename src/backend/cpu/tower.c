/* Image towers (layer.h): their mergers, products of bounded inputs, and what the decoder takes from inner layers. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "backend/cpu/ops.h"
#include "base/mem.h"

#include <string.h>

/* x += the features of a level, of rows that have them */
void cpu_deepstack(struct cpu_backend *cb, int level)
{
    struct cpu_stream *x = &cb->stream;
    const struct batch *b = &cb->batch;
    size_t E = (size_t)cb->net->n_embd;
    if (!b->n_embeds)
        return;
    cpu_settle(cb);
    for (int i = 0; i < x->rows; i++) {
        int given = b->tokens[x->narrow ? b->out_rows[i] : i] - cb->net->n_vocab;
        const float *from = given >= 0 ? b->embeds[given] + (size_t)level * E : NULL;
        for (size_t k = 0; from && k < E; k++)
            x->x[(size_t)i * E + k] += from[k];
    }
}

static float clamp(float x, float min, float max)
{
    return x < min ? min : x > max ? max : x;
}

struct clip_job {
    const struct clip *clip;
    const float *from; /* (rows, from_width) */
    float *to;         /* (rows, to_width) */
    int from_width, to_width, width;
    bool outputs; /* by out_min and out_max, not in_min and in_max */
};

static void clip_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct clip_job *j = arg;
    float min = j->outputs ? j->clip->out_min : j->clip->in_min;
    float max = j->outputs ? j->clip->out_max : j->clip->in_max;
    for (int r = first; r < last; r++) {
        const float *from = j->from + (size_t)r * (size_t)j->from_width;
        float *to = j->to + (size_t)r * (size_t)j->to_width;
        for (int i = 0; i < j->width; i++)
            to[i] = clamp(from[i], min, max);
    }
}

static bool same_inputs(const struct clip *a, const struct clip *b)
{
    return a->in_min == b->in_min && a->in_max == b->in_max;
}

/* y (rows, n_out) = x w^T, whose columns are n parts of widths[k], with clips[k]. Parts of equal bounds of inputs share a
 * product. */
static void clip_parts(struct cpu_backend *cb, const struct weight *w, const struct clip *clips,
                       const int *widths, int n, const float *x, float *y, int rows)
{
    for (int k = 0, at = 0; k < n; at += widths[k++]) {
        struct clip_job in = {&clips[k], x, cb->clip_in, w->n_in, w->n_in, w->n_in, false};
        struct clip_job out = {&clips[k], cb->clip_out + at, y + at, w->n_out,
                               w->n_out,  widths[k],         true};
        if (!k || !same_inputs(&clips[k], &clips[k - 1])) {
            pool_each(cb->pool, rows, POOL_EVEN, clip_rows, &in);
            gemm_linear(cb, w, cb->clip_in, cb->clip_out, rows);
        }
        pool_each(cb->pool, rows, POOL_EVEN, clip_rows, &out);
    }
}

void cpu_clip_qkv(struct cpu_backend *cb, const struct attention *l, const float *n)
{
    const int widths[] = {l->n_heads * l->k_dim, l->n_kv_heads * l->k_dim,
                          l->n_kv_heads * l->v_dim};
    clip_parts(cb, l->wqkv, l->clips, widths, 3, n, cb->qkv, cb->batch.n_tokens);
}

void cpu_clip_linear(struct cpu_backend *cb, const struct weight *w, const struct clip *c,
                     const float *x, float *y, int rows)
{
    clip_parts(cb, w, c, &w->n_out, 1, x, y, rows);
}

struct act_job {
    struct cpu_backend *cb;
    struct ffn f; /* the activation */
    float *from;  /* (rows, from_width) [g u], or g */
    float *to;    /* (rows, width) */
    int from_width, width;
};

static void act_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct act_job *j = arg;
    for (int r = first; r < last; r++) {
        float *g = j->from + (size_t)r * (size_t)j->from_width;
        gemm_activate(j->cb, &j->f, g, j->from_width > j->width ? g + j->width : g, j->width);
        memmove(j->to + (size_t)r * (size_t)j->width, g, (size_t)j->width * sizeof *g);
    }
}

void cpu_clip_ffn(struct cpu_backend *cb, const struct ffn *f, const float *x, float *y, int rows)
{
    int F = f->down->n_in, parts = f->gate_up->n_out > F ? 2 : 1;
    clip_parts(cb, f->gate_up, f->clips, (int[]){F, F}, parts, x, cb->clip_hidden, rows);
    struct act_job j = {cb, *f, cb->clip_hidden, cb->clip_act, f->gate_up->n_out, F};
    pool_each(cb->pool, rows, POOL_EVEN, act_rows, &j);
    clip_parts(cb, f->down, f->clips + 2, &f->down->n_out, 1, cb->clip_act, y, rows);
}

/* Joins rows of a step, from each sequence's first one on. */
struct tower_input {
    struct cpu_backend *cb;
    const struct merge_step *s;
    const float *from; /* (rows, width) */
    float *to;         /* (n / rows, rows * width), or their mean */
    int width;
};

static void join_rows(void *arg, int ith, int first, int last)
{
    (void)ith;
    const struct tower_input *j = arg;
    int n = j->s->rows, width = j->width;
    for (int r = first; r < last; r++) {
        float *to = j->to + (size_t)r * (size_t)(j->s->mean ? width : n * width);
        for (int i = 0; i < n; i++) {
            const float *x = j->from + (size_t)(r * n + i) * (size_t)width;
            for (int e = 0; j->s->mean && e < width; e++)
                to[e] = (i ? to[e] : 0) + x[e] / (float)n;
            for (int e = 0; j->s->interleaved && e < width; e++)
                to[e * n + i] = x[e];
            if (!j->s->mean && !j->s->interleaved)
                memcpy(to + i * width, x, (size_t)width * sizeof *to);
        }
    }
}

/* Runs a step over `rows` rows, which are in buffer *at, and adds its result there or in the other one. Returns the number
 * of rows. */
static int merge_step(struct cpu_backend *cb, const struct merge_step *s, int *at, int rows,
                      int *width)
{
    float *x = cb->merged[*at], *other = cb->merged[1 - *at];
    int y, z;
    merge_step_widths(s, *width, &y, &z);
    if (s->norm.kind)
        cpu_add_norm(x, NULL, &s->norm, x, rows, *width, cb->pool, cb->isa);
    if (s->rows > 1) {
        struct tower_input j = {cb, s, x, other, *width};
        pool_each(cb->pool, rows /= s->rows, POOL_EVEN, join_rows, &j);
        float *swap = x;
        x = other;
        other = swap;
        *at = 1 - *at;
    }
    if (s->joined.kind)
        cpu_add_norm(x, NULL, &s->joined, x, rows, y, cb->pool, cb->isa);
    if (s->act != ACT_NONE) {
        int n = activation_is_gated(s->act) ? y / 2 : y;
        struct act_job j = {cb, {.act = s->act}, x, n < y ? other : x, y, n};
        pool_each(cb->pool, rows, POOL_EVEN, act_rows, &j);
        if (n < y) {
            float *swap = x;
            x = other;
            other = swap;
            *at = 1 - *at;
        }
    }
    if (s->w) {
        gemm_linear(cb, s->w, x, other, rows);
        *at = 1 - *at;
    }
    *width = z;
    return rows;
}

/* The rows of the stream that become features, in buffer 0: all but the rest of each sequence. */
static int take_rows(struct cpu_backend *cb, int each)
{
    const struct batch *b = &cb->batch;
    size_t E = (size_t)cb->net->n_embd;
    int n = 0;
    for (int s = 0; s < b->n_seqs; s++) {
        int first = b->q_start[s], rows = (b->q_start[s + 1] - first) / each * each;
        memcpy(cb->merged[0] + (size_t)n * E, cb->stream.x + (size_t)first * E,
               (size_t)rows * E * sizeof(float));
        n += rows;
    }
    return n;
}

void cpu_merge(struct backend *be, const struct merger *m, int i)
{
    struct cpu_backend *cb = cpu_self(be);
    int at = 0, width = cb->net->n_embd;
    cpu_settle(cb);
    cpu_stage_begin(cb);
    int rows = take_rows(cb, merger_rows(m));
    for (int k = 0; k < m->n_steps; k++)
        rows = merge_step(cb, &m->steps[k], &at, rows, &width);
    memcpy(cb->features[i], cb->merged[at], (size_t)rows * (size_t)width * sizeof(float));
    cpu_stage_end(cb, STAGE_HEAD);
}

void cpu_features(struct backend *be, int rows, float *host)
{
    const struct cpu_backend *cb = cpu_self(be);
    size_t width = (size_t)network_feature_width(cb->net);
    for (int i = 0; i < cb->net->n_mergers; i++) {
        const struct merger *m = &cb->net->mergers[i];
        size_t n = (size_t)merger_width(m, cb->net->n_embd);
        for (size_t row = 0; row < (size_t)rows; row++)
            memcpy(host + row * width + (size_t)m->at, cb->features[i] + row * n, n * sizeof *host);
    }
}

static bool prepare_clips(struct cpu_backend *cb, const struct network *net, int T,
                          struct error *err)
{
    int in = cb->max.heads > net->n_embd ? cb->max.heads : net->n_embd, F = cb->max.n_ff;
    int out = cb->max.qkv > 2 * F ? cb->max.qkv : 2 * F;
    cb->clip_in = cb->clip_out = cb->clip_hidden = cb->clip_act = NULL;
    return !net->clips ||
           ((cb->clip_in = cpu_rows(cb, T, in > F ? in : F, "bounded inputs", err)) &&
            (cb->clip_out = cpu_rows(cb, T, out, "bounded outputs", err)) &&
            (cb->clip_hidden = cpu_rows(cb, T, 2 * F, "bounded outputs", err)) &&
            (cb->clip_act = cpu_rows(cb, T, F, "bounded inputs", err)));
}

bool cpu_tower_prepare(struct cpu_backend *cb, const struct network *net, int T, struct error *err)
{
    const struct weight *patches = net->embed.patches;
    size_t room = 0;
    cb->patches = cb->merged[0] = cb->merged[1] = NULL;
    cb->features = mem_zalloc((size_t)net->n_mergers + 1, sizeof *cb->features);
    if (patches && !(cb->patches = cpu_rows(cb, T, patches->n_in, "patches", err)))
        return false;
    for (int i = 0; i < net->n_mergers; i++) {
        const struct merger *m = &net->mergers[i];
        size_t n = merger_room(m, net->n_embd, T);
        room = n > room ? n : room;
        cb->features[i] = cpu_rows(cb, T / merger_rows(m), merger_width(m, net->n_embd),
                                   "an image's features", err);
        if (!cb->features[i])
            return false;
    }
    for (int i = 0; room && i < 2; i++)
        if (!(cb->merged[i] =
                  cpu_scratch(cb, (room + 1) * sizeof(float), "inputs of mergers", err)))
            return false;
    return prepare_clips(cb, net, T, err);
}
