/*
 * Image towers: the ends of the network, in which patches become rows and rows become features; products
 * of bounded inputs; spans of attention; and the features that a decoder adds after its first layers.
 * A merger is a chain of steps over two buffers. Joining adjacent rows is no work: they are adjacent in
 * memory. Kernels: tower_kernels.cu; all products go through the tables of pick.cu.
 */
#include "backend/cuda/vision/tower.h"
#include "backend/cuda/heads/encoder.h"
#include "backend/cuda/vision/tower.cuh"

/* Before the first step */

static bool has_spans(const struct network *net)
{
    for (int i = 0; i < net->n_layers; i++)
        if (net->layers[i].mixer.kind == MIXER_ATTENTION && net->layers[i].mixer.attention.span)
            return true;
    return false;
}

bool tower_supported(const struct network *net, struct error *err)
{
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *m = &net->layers[i].mixer;
        const struct mlp *p = &net->layers[i].mlp;
        const struct attention *a = &m->attention;
        if (m->block.in.kind == NORM_AFFINE || m->block.sum.kind == NORM_AFFINE ||
            p->block.in.kind == NORM_AFFINE || p->block.sum.kind == NORM_AFFINE ||
            p->dense_out.kind == NORM_AFFINE || (p->router.w && p->block.out.kind == NORM_AFFINE))
            return network_refuse(err, i, "a scale of features in front of a block is", "cuda");
        if (m->kind == MIXER_ATTENTION && a->clips && (!a->bidirectional || a->gated))
            return network_refuse(err, i, "a bound of causal or gated attention's inputs is",
                                  "cuda");
        if (p->dense.gate_up && p->dense.act == ACT_NONE)
            return network_refuse(err, i, "an mlp without an activation is", "cuda");
        if (p->dense.gate_up && p->dense.clips && p->router.w)
            return network_refuse(err, i, "a bounded product beside experts is", "cuda");
    }
    return true;
}

size_t tower_widest(const struct network *net)
{
    size_t most = net->embed.patches ? align_up((size_t)net->embed.patches->n_in, TILE_K) : 0;
    for (int i = 0; i < net->n_mergers; i++) {
        const struct merger *m = &net->mergers[i];
        int y, width = net->n_embd, rows = 1;
        for (int k = 0; k < m->n_steps; k++) {
            merge_step_widths(&m->steps[k], width, &y, &width);
            rows *= m->steps[k].rows ? m->steps[k].rows : 1;
            size_t each = align_up((size_t)y, TILE_K) / (size_t)rows + 1;
            most = each > most ? each : most;
        }
    }
    return most;
}

/* Bytes of a patch's pixels. */
static size_t pixel_bytes(const struct network *net)
{
    size_t side = (size_t)net->embed.pixels->side;
    return 3 * side * side;
}

/* Buffers of bounded inputs and outputs. */
static bool prepare_clips(struct cuda_backend *cu, struct cuda_tower *t, size_t tokens,
                          struct error *err)
{
    struct network_max max;
    network_measure(cu->net, &max);
    size_t embd = (size_t)cu->net->n_embd, heads = (size_t)max.heads, ff = (size_t)max.n_ff;
    size_t in = heads > embd ? heads : embd,
           out = (size_t)max.qkv > 2 * ff ? (size_t)max.qkv : 2 * ff;
    struct device_buffer list[] = {
        {(void **)&t->clip_in, tokens * (ff > in ? ff : in) * 4},
        {(void **)&t->clip_out, tokens * (out > embd ? out : embd) * 4},
        {(void **)&t->clip_hidden, tokens * 2 * ff * 4},
        {(void **)&t->clip_act, tokens * ff * 4},
    };
    return !cu->net->clips || cuda_own(cu, list, 4, err);
}

bool tower_prepare(struct cuda_backend *cu, const struct bounds *b, struct error *err)
{
    const struct network *net = cu->net;
    struct cuda_tower *t = tower_of(cu);
    size_t tokens = (size_t)b->max_tokens, room = 0;
    t->spans = -1;
    if (!prepare_clips(cu, t, tokens, err))
        return false;
    if (!net->embed.patches && !net->n_mergers)
        return true;
    size_t features = 0;
    for (int i = 0; i < net->n_mergers; i++) {
        const struct merger *m = &net->mergers[i];
        size_t n = merger_room(m, net->n_embd, b->max_tokens);
        size_t rows = tokens / (size_t)merger_rows(m);
        room = n > room ? n : room;
        features = rows > features ? rows : features;
    }
    size_t patch = net->embed.patches ? (size_t)net->embed.patches->n_in : 0;
    const struct pixel_form *pixels = net->embed.pixels;
    struct device_buffer list[] = {
        {(void **)&t->byte_values, pixels ? sizeof pixels->values : 0},
        {(void **)&t->patches, tokens * patch * 4},
        {(void **)&t->merged[0], room * 4},
        {(void **)&t->merged[1], room * 4},
        {(void **)&t->features, features * (size_t)network_feature_width(net) * 4}};
    if (!cuda_own(cu, list, (int)(sizeof list / sizeof *list), err))
        return false;
    if (!pixels)
        return true;
    cuda_copy_in(cu->be, t->byte_values, pixels->values, sizeof pixels->values);
    return cuda_pin((void **)&t->pixels, (void **)&t->pixels_mapped, tokens * pixel_bytes(net),
                    err);
}

void tower_close(struct cuda_backend *cu)
{
    if (tower_of(cu)->pixels)
        cudaFreeHost(tower_of(cu)->pixels);
}

/* The step */

size_t tower_step_ints(const struct network *net, int max_tokens)
{
    return has_spans(net) ? 2 * (size_t)max_tokens + 4 : 0;
}

int tower_put(struct cuda_backend *cu, const struct batch *b, int used)
{
    struct cuda_tower *t = tower_of(cu);
    t->spans = -1;
    t->pixels_at = 0;
    if (!b->spans || !tower_step_ints(cu->net, 1))
        return used;
    t->spans = used;
    for (int i = 0; i < 2 * b->n_tokens; i++)
        cu->step.host[used + i] = b->spans[i];
    return (used + 2 * b->n_tokens + 3) & ~3;
}

int tower_put_pixels(struct cuda_backend *cu, const struct batch *b, int used)
{
    struct cuda_tower *t = tower_of(cu);
    t->pixels_at = used;
    return step_put_rows(cu, (const void *const *)b->pixels, b->n_embeds, pixel_bytes(cu->net),
                         t->pixels, t->pixels_mapped, used);
}

const int32_t *tower_spans(const struct cuda_backend *cu, const struct attention *a)
{
    int at = tower_of(cu)->spans;
    return a->span && at >= 0 ? cu->step.dev + at : NULL;
}

void tower_norm(struct cuda_backend *cu, const struct norm *n, float *x, int rows, int width)
{
    if (!rows || n->kind == NORM_NONE)
        return;
    if (n->kind == NORM_AFFINE) {
        tower_affine(cu, x, n->gain, n->bias, rows, width);
        return;
    }
    struct encoder_norm p = {};
    p.x = x;
    p.y = x;
    p.gain = cuda_gain(cu, n);
    p.gain.gain = n->gain; /* cuda_gain's ones are as long as a row of the stream; NULL = ones */
    p.n = rows;
    p.width = width;
    encoder_norm(cu, p);
}

void tower_embed(struct cuda_backend *cu, const struct embed *e)
{
    struct cuda_tower *t = tower_of(cu);
    struct step s = cuda_step(cu);
    struct resid *r = &cu->resid;
    struct tower_rows_args p = {};
    int D = e->patches->n_in, E = cu->shape.n_embd;
    if (!s.n_tokens)
        return;
    p.from = cuda_embeds(cu);
    p.tokens = s.tokens;
    p.patches = t->patches;
    p.x = r->x;
    p.first = cu->net->n_vocab;
    p.n = s.n_tokens;
    p.width = D;
    p.n_embd = E;
    if (t->pixels_at) {
        p.pixels = (const uint8_t *const *)(cu->step.dev + t->pixels_at);
        p.values = t->byte_values;
        p.side = e->pixels->side;
        p.frames = e->pixels->frames;
        p.channels_last = e->pixels->channels_last;
    }
    tower_rows(cu, p);
    struct rows x = rows_of(t->patches, s.n_tokens, D);
    struct pick_case c = {};
    c.rows = s.n_tokens;
    c.w = cuda_matrix(e->patches);
    c.x = &x;
    c.y = cu->act.block;
    pick_run(cu, PICK_LINEAR, &c, N_STAGES);
    tower_norm(cu, &e->patch_norm, c.y, s.n_tokens, E);
    r->add = ADD_ROWS;
    r->d = c.y;
    if (e->norm.kind)
        tower_norm(cu, &e->norm, resid_plain(cu, r).floats, s.n_tokens, E);
}

void tower_deepstack(struct cuda_backend *cu, int level)
{
    struct step s = cuda_step(cu);
    struct resid *r = &cu->resid;
    if (!r->rows || !cu->step.layout.n_embeds)
        return;
    struct tower_add_args p = {};
    p.x = resid_plain(cu, r).floats;
    p.from = cuda_embeds(cu);
    p.tokens = s.tokens;
    p.row_of = r->narrow && !cu->step.layout.out_is_all ? s.out_rows : NULL;
    p.first = cu->net->n_vocab;
    p.n = r->rows;
    p.n_embd = cu->shape.n_embd;
    p.at = level * p.n_embd;
    tower_add(cu, p);
}

/* Products of bounded inputs */

static bool same_inputs(const struct clip *a, const struct clip *b)
{
    return a->in_min == b->in_min && a->in_max == b->in_max;
}

/* y (rows, n_out) = x w^T, whose columns are n parts of widths[k], with clips[k]. Parts of equal bounds of
 * inputs share a product. */
static void clip_parts(struct cuda_backend *cu, const struct matrix *w, const struct clip *clips,
                       const int *widths, int n, const float *x, float *y, int rows)
{
    struct cuda_tower *t = tower_of(cu);
    for (int k = 0, at = 0; k < n; at += widths[k++]) {
        if (!k || !same_inputs(&clips[k], &clips[k - 1])) {
            struct tower_clip_args in = {x,    t->clip_in, clips[k].in_min, clips[k].in_max,
                                         rows, w->n_in,    w->n_in,         w->n_in};
            struct rows bounded = rows_of(t->clip_in, rows, w->n_in);
            struct pick_case c = {};
            tower_clip(cu, in);
            c.rows = rows;
            c.w = w;
            c.x = &bounded;
            c.y = t->clip_out;
            pick_run(cu, PICK_LINEAR, &c, N_STAGES);
        }
        struct tower_clip_args out = {t->clip_out + at, y + at,  clips[k].out_min,
                                      clips[k].out_max, rows,    widths[k],
                                      w->n_out,         w->n_out};
        tower_clip(cu, out);
    }
}

/* norm(stream), or the stream, as floats */
static struct rows normed_rows(struct cuda_backend *cu, const struct norm *norm)
{
    struct gain g = cuda_gain(cu, norm);
    struct rows n = g.gain ? resid_norm(cu, &cu->resid, g, true) : resid_plain(cu, &cu->resid);
    rows_to_floats(cu, &n);
    return n;
}

void tower_clip_qkv(struct cuda_backend *cu, const struct norm *norm, const struct attention *a)
{
    const int widths[] = {a->n_heads * a->k_dim, a->n_kv_heads * a->k_dim,
                          a->n_kv_heads * a->v_dim};
    struct rows n = normed_rows(cu, norm);
    step_mark(cu);
    clip_parts(cu, cuda_matrix(a->wqkv), a->clips, widths, 3, n.floats, cu->act.qkv, n.n);
    step_mark_end(cu, STAGE_QKV);
}

void tower_clip_linear(struct cuda_backend *cu, const struct weight *w, const struct clip *c,
                       struct rows *x, float *y)
{
    rows_to_floats(cu, x);
    clip_parts(cu, cuda_matrix(w), c, &w->n_out, 1, x->floats, y, x->n);
}

void tower_clip_ffn(struct cuda_backend *cu, const struct norm *norm, const struct ffn *f, float *y)
{
    struct cuda_tower *t = tower_of(cu);
    struct gating act = cuda_gating(f);
    struct rows n = normed_rows(cu, norm);
    int F = f->down->n_in;
    const int widths[] = {F, F};
    step_mark(cu);
    clip_parts(cu, cuda_matrix(f->gate_up), f->clips, widths, act.ungated ? 1 : 2, n.floats,
               t->clip_hidden, n.n);
    tower_act(cu, act, t->clip_hidden, t->clip_act, n.n, F);
    clip_parts(cu, cuda_matrix(f->down), f->clips + 2, &f->down->n_out, 1, t->clip_act, y, n.n);
    step_mark_end(cu, STAGE_FFN);
}

/* Mergers */

/* The rows of the stream that become features, in buffer 0: all but the rest of each sequence. They are
 * copied, since later layers read the stream. Returns their number. */
static int take_rows(struct cuda_backend *cu, const float *x, int each)
{
    struct cuda_tower *t = tower_of(cu);
    const int32_t *start = cu->step.host + cu->step.layout.q_start;
    size_t width = (size_t)cu->shape.n_embd;
    int n = 0, from = 0, rows = 0; /* a run of rows without a rest */
    for (int s = 0; s < cu->step.layout.n_seqs; s++) {
        int len = start[s + 1] - start[s], whole = len / each * each;
        rows += whole;
        if (whole == len && s + 1 < cu->step.layout.n_seqs)
            continue;
        if (rows)
            CUDA_TRY(cu, cudaMemcpyAsync(t->merged[0] + (size_t)n * width, x + (size_t)from * width,
                                         (size_t)rows * width * sizeof(float),
                                         cudaMemcpyDeviceToDevice, cu->stream));
        n += rows;
        from = start[s + 1];
        rows = 0;
    }
    return n;
}

/* A chain's state: `rows` rows of `width` values in buffer `at`. */
struct chain {
    int at, rows, width;
};

static void merge_step(struct cuda_backend *cu, const struct merge_step *s, struct chain *c)
{
    struct cuda_tower *t = tower_of(cu);
    int y, z, each = s->rows > 1 ? s->rows : 1;
    merge_step_widths(s, c->width, &y, &z);
    tower_norm(cu, &s->norm, t->merged[c->at], c->rows, c->width);
    c->rows /= each;
    if (each > 1 && (s->mean || s->interleaved)) {
        tower_join(cu, t->merged[c->at], t->merged[1 - c->at], c->rows, each, c->width, s->mean);
        c->at = 1 - c->at;
    }
    tower_norm(cu, &s->joined, t->merged[c->at], c->rows, y);
    if (s->act != ACT_NONE) {
        struct ffn f = {};
        f.act = s->act;
        bool gate = activation_is_gated(s->act);
        tower_act(cu, cuda_gating(&f), t->merged[c->at], t->merged[gate ? 1 - c->at : c->at],
                  c->rows, gate ? y / 2 : y);
        c->at = gate ? 1 - c->at : c->at;
    }
    if (s->w) {
        struct rows x = rows_of(t->merged[c->at], c->rows, s->w->n_in);
        struct pick_case p = {};
        p.rows = c->rows;
        p.w = cuda_matrix(s->w);
        p.x = &x;
        p.y = t->merged[1 - c->at];
        pick_run(cu, PICK_LINEAR, &p, N_STAGES);
        c->at = 1 - c->at;
    }
    c->width = z;
}

void tower_merge(struct backend *be, const struct merger *m, int i)
{
    (void)i;
    struct cuda_backend *cu = cuda_self(be);
    struct cuda_tower *t = tower_of(cu);
    struct chain c = {};
    if (!cu->resid.rows)
        return;
    struct rows x = resid_plain(cu, &cu->resid);
    step_mark(cu);
    c.rows = take_rows(cu, x.floats, merger_rows(m));
    c.width = cu->shape.n_embd;
    for (int k = 0; c.rows && k < m->n_steps; k++)
        merge_step(cu, &m->steps[k], &c);
    if (c.rows)
        tower_place(cu, t->merged[c.at], t->features + m->at, c.rows, c.width,
                    network_feature_width(cu->net));
    step_mark_end(cu, STAGE_HEAD);
}

void tower_features(struct backend *be, int rows, float *host)
{
    struct cuda_backend *cu = cuda_self(be);
    cuda_copy_out(be, host, tower_of(cu)->features,
                  (size_t)rows * (size_t)network_feature_width(cu->net) * sizeof(float));
}
