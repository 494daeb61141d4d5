/* The layers of a tower: what its names and settings say. The merger is the family's. */
#include "base/mem.h"
#include "vision/family.h"
#include "vision/patches.h"

#include <float.h>
#include <math.h>
#include <string.h>

struct norm tower_norm(struct net_builder *b, int layer, const struct norm_name *n, int width)
{
    if (!n->gain.gguf || !build_has(b, &n->gain, layer))
        return (struct norm){0};
    return b->c->tower->family->norm == NORM_LAYER && !b->c->tower->rms
               ? build_layer_norm(b, layer, &n->gain, &n->bias, width)
               : build_rms(b, layer, &n->gain, width);
}

struct merge_step *tower_step(struct net_builder *b)
{
    struct network *net = b->net;
    if (!net->mergers) {
        net->mergers = mem_zalloc(TOWER_MAX_LEVELS + 1, sizeof *net->mergers);
        net->n_mergers = 1;
        net->mergers->after = b->c->n_layers - 1;
    }
    CHECK(net->mergers->n_steps < MERGER_MAX_STEPS, "a merger of %d steps", MERGER_MAX_STEPS);
    struct merge_step *s = &net->mergers->steps[net->mergers->n_steps++];
    s->act = ACT_NONE;
    return s;
}

/* RoPE whose pairs rotate by a patch's row or column (tower_axes). */
static const struct rope *build_axes(struct net_builder *b)
{
    const struct tower_config *t = b->c->tower;
    int quarter = b->c->n_rot / 4;
    if (t->axes == AXES_NONE)
        return NULL;
    struct rope *rope = mem_zalloc(1, sizeof *rope);
    float *freq = mem_zalloc((size_t)quarter * 2, sizeof *freq);
    uint8_t *plane = mem_zalloc((size_t)quarter * 2, sizeof *plane);
    for (int i = 0; i < 2 * quarter; i++) {
        bool second = i >= quarter, columns = second == (t->axes != AXES_COLUMNS_FIRST);
        double at = (double)(i % quarter) + (t->axes == AXES_INTERLEAVED && second ? 0.5 : 0);
        freq[i] = (float)(1 / pow(b->c->rope.theta, at / quarter));
        plane[i] = columns ? 2 : 1;
    }
    *rope = (struct rope){.n_rot = 4 * quarter, .freq = freq, .mscale = 1, .plane = plane};
    b->net->ropes = rope;
    b->net->n_ropes = 1;
    return rope;
}

/* i: the layer in the file, also below. */
static const struct weight *build_qkv(struct net_builder *b, int i, const struct tower_names *n)
{
    const struct config *c = b->c;
    const struct tower_family *f = c->tower->family;
    int wide = c->n_heads * c->head_dim;
    bool apart = b->f->is_gguf ? n->q.gguf != NULL : n->q.hf != NULL; /* in files of this family */
    bool fused = n->qkv.gguf && (!apart || build_has(b, &n->qkv, i));
    bool split = !b->f->is_gguf && f->split_qkv;
    struct weight_rows rows[3] = {
        {.name = &n->q, .n = wide}, {.name = &n->k, .n = wide}, {.name = &n->v, .n = wide}};
    if (fused && !split && !f->pairs.gguf && !f->pairs.folder)
        return build_matrix(b, WEIGHT_LINEAR, i, &n->qkv, c->n_embd, 3 * wide);
    for (int k = 0; k < 3; k++) {
        if (fused)
            rows[k] = (struct weight_rows){.name = split ? rows[k].name : &n->qkv,
                                           .n = wide,
                                           .first = k * wide,
                                           .step = 1,
                                           .tensor_rows = 3 * wide,
                                           .also_gguf = true};
        if (k < 2 && (f->pairs.gguf || f->pairs.folder)) {
            rows[k].interleaved = c->head_dim;
            rows[k].tower_gguf = f->pairs.gguf;
            rows[k].tower_folder = f->pairs.folder;
        }
    }
    return build_weight(b, WEIGHT_LINEAR, i, c->n_embd, 1, 3, rows);
}

/* A norm of each head; or of the whole projection, if the gain is as wide as all heads. */
static struct norm head_norm(struct net_builder *b, int i, const struct tensor_name *name,
                             bool *whole)
{
    const struct config *c = b->c;
    const struct tower_family *f = c->tower->family;
    if (!name->gguf || !build_has(b, name, i))
        return (struct norm){0};
    const struct tensor *t = build_find(b->f, c, name, i, 0, "weight");
    *whole = t && t->dims[0] == (int64_t)c->n_heads * c->head_dim && c->n_heads > 1;
    struct norm norm = build_rms(b, i, name, *whole ? c->n_heads * c->head_dim : c->head_dim);
    if (norm.gain && (f->pairs.gguf || f->pairs.folder)) {
        struct weight_rows *rows = &b->specs[b->n_specs - 1].rows[0];
        rows->interleaved = c->head_dim;
        rows->tower_gguf = f->pairs.gguf;
        rows->tower_folder = f->pairs.folder;
    }
    return norm;
}

void tower_bound_name(const struct tensorfile *f, const struct config *c,
                      const struct tensor_name *name, int layer, const char *suffix, char *out,
                      size_t size)
{
    build_name(f, c, name, layer, 0, suffix, out, size);
    char *inner = strstr(out, ".linear.");
    if (inner)
        memmove(inner, inner + strlen(".linear"), strlen(inner + strlen(".linear")) + 1);
}

/* One bound of a product. */
static float bound(struct net_builder *b, const struct tensor_name *name, int layer,
                   const char *suffix, float none)
{
    char full[192];
    tower_bound_name(b->f, b->c, name, layer, suffix, full, sizeof full);
    const struct tensor *t = tensorfile_find(b->f, full);
    float v = none;
    if (t && (t->bytes != dtype_bytes(t->type, 1) ||
              (t->type != DT_F32 && t->type != DT_F16 && t->type != DT_BF16)))
        b->failed = !error_set(b->err, "%s: tensor %s: not one number", b->f->path, t->name);
    else if (t)
        quant_dequantize(t->type, t->data, &v, 1);
    return v;
}

/* Seven products of a layer: q, k, v and out, gate, up and down. */
static void build_clips(struct net_builder *b, int i, struct layer *l)
{
    enum { PRODUCTS = 7 };
    const struct tower_names *n = &b->c->tower->family->names;
    const struct tensor_name *const names[PRODUCTS] = {&n->q,    &n->k,  &n->v,   &n->o,
                                                       &n->gate, &n->up, &n->down};
    if (!b->net->clips)
        b->net->clips = mem_zalloc((size_t)b->net->n_layers * PRODUCTS, sizeof *b->net->clips);
    struct clip *clips = b->net->clips + (ptrdiff_t)i * PRODUCTS;
    for (int k = 0; k < PRODUCTS; k++)
        clips[k] = (struct clip){bound(b, names[k], i, "input_min", -FLT_MAX),
                                 bound(b, names[k], i, "input_max", FLT_MAX),
                                 bound(b, names[k], i, "output_min", -FLT_MAX),
                                 bound(b, names[k], i, "output_max", FLT_MAX)};
    l->mixer.attention.clips = clips;
    l->mlp.dense.clips = clips + 4;
}

/* The norm after a block, or its layer scale. */
static struct norm after(struct net_builder *b, int i, const struct norm_name *norm,
                         const struct tensor_name *scale)
{
    if (!scale->gguf || !build_find(b->f, b->c, scale, i, 0, "weight"))
        return tower_norm(b, i, norm, b->c->n_embd);
    return (struct norm){.kind = NORM_AFFINE,
                         .gain = build_vector(b, i, scale, b->c->n_embd, (struct adjust){0})};
}

static void build_mixer(struct net_builder *b, int i, const struct tower_names *n,
                        const struct rope *rope, bool windowed, struct mixer *m)
{
    const struct config *c = b->c;
    const struct tower_config *t = c->tower;
    struct attention *a = &m->attention;
    int wide = c->n_heads * c->head_dim;
    *m = (struct mixer){.kind = MIXER_ATTENTION};
    m->block.in = tower_norm(b, i, &n->attn_norm, c->n_embd);
    m->block.out = after(b, i, &n->attn_post, &n->attn_scale);
    *a = (struct attention){.n_heads = c->n_heads,
                            .n_kv_heads = c->n_heads,
                            .k_dim = c->head_dim,
                            .v_dim = c->head_dim,
                            .rope = rope,
                            .scale = c->attn_scale != 0 ? c->attn_scale
                                                        : 1.0f / sqrtf((float)c->head_dim),
                            .bidirectional = true,
                            .span = windowed ? SPAN_ONLY : SPAN_NONE};
    a->wqkv = build_qkv(b, i, n);
    a->wo = build_matrix(b, WEIGHT_LINEAR, i, &n->o, wide, c->n_embd);
    a->q_norm = head_norm(b, i, &n->q_norm, &a->norm_whole);
    a->k_norm = head_norm(b, i, &n->k_norm, &a->norm_whole);
    if (t->value_norm)
        a->v_norm = (struct norm){.kind = NORM_RMS, .eps = c->norm_eps};
}

/* GGUFs of older programs have up and down swapped. */
static bool is_swapped(const struct net_builder *b, int i)
{
    const struct tensor *t = build_find(b->f, b->c, &b->c->tower->family->names.up, i, 0, "weight");
    return b->f->is_gguf && t && b->c->n_ff != b->c->n_embd && t->dims[0] == b->c->n_ff;
}

static void build_mlp(struct net_builder *b, int i, struct mlp *m)
{
    const struct config *c = b->c;
    const struct tower_config *t = c->tower;
    const struct tower_names *n = &t->family->names;
    bool swapped = is_swapped(b, i);
    struct weight_rows rows[2] = {{.name = &n->gate, .n = c->n_ff}, {.name = &n->up, .n = c->n_ff}};
    bool gated = activation_is_gated(t->act);
    *m = (struct mlp){.block.in = tower_norm(b, i, &n->ffn_norm, c->n_embd),
                      .block.out = after(b, i, &n->ffn_post, &n->ffn_scale),
                      .dense.act = t->act};
    if (!gated)
        rows[0].name = swapped ? &n->down : &n->up;
    m->dense.gate_up = build_weight(b, WEIGHT_LINEAR, i, c->n_embd, 1, gated ? 2 : 1, rows);
    m->dense.down =
        build_matrix(b, WEIGHT_LINEAR, i, swapped ? &n->up : &n->down, c->n_ff, c->n_embd);
}

/*
 * What joins the rows of four patches x_0 .. x_3 of the first network: attention inside the four, and a feature
 * [gelu(norm([x_0 .. x_3]) Wup^T), mean(x)] for which the second network starts with a row
 * gelu(..) Wdown^T + mean(x), like a patch and its position.
 */
static void build_join(struct net_builder *b, const struct rope *rope)
{
    enum { ROWS = 4 };
    const struct config *c = b->c;
    const struct tower_config *t = c->tower;
    const struct tower_join *j = t->family->join;
    int last = c->n_layers - 1, E = c->n_embd;
    build_mixer(b, 0, &j->attn, rope, true, &b->net->layers[last].mixer);
    b->net->n_mergers = 2;
    b->net->mergers = mem_zalloc(2, sizeof *b->net->mergers);
    struct merger *up = &b->net->mergers[0], *mean = &b->net->mergers[1];
    *up = (struct merger){.after = last, .n_steps = 2};
    up->steps[0] =
        (struct merge_step){.rows = ROWS,
                            .joined = tower_norm(b, 0, &j->norm, ROWS * E),
                            .act = ACT_NONE,
                            .w = build_matrix(b, WEIGHT_LINEAR, 0, &j->up, ROWS * E, t->n_middle)};
    up->steps[1] = (struct merge_step){.act = ACT_PLAIN_GELU_TANH};
    *mean = (struct merger){.after = last, .at = t->n_middle, .n_steps = 1};
    mean->steps[0] = (struct merge_step){.rows = ROWS, .mean = true, .act = ACT_NONE};
}

void tower_build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct tower_config *t = c->tower;
    const struct tower_family *f = t->family;
    const struct tower_names *n = &f->names;
    const struct rope *rope = build_axes(b);
    const struct weight_rows rows = {
        .name = t->part ? &f->join->down : &n->patches, .n = c->n_embd, .flat = !t->part};
    bool joins = t->middle >= 0 && !t->part;
    b->net->embed.patches = build_weight(b, WEIGHT_LINEAR, 0, tower_patch_values(t), 1, 1, &rows);
    if (!t->part) {
        struct pixel_form *form = mem_alloc(sizeof *form);
        patches_form(t, form);
        b->net->embed.pixels = form;
        b->net->embed.patch_norm = tower_norm(b, 0, &n->patch_norm, c->n_embd);
        b->net->embed.norm = tower_norm(b, 0, &n->pre_norm, c->n_embd);
    }
    for (int i = 0; i < c->n_layers - joins; i++) {
        struct layer *l = &b->net->layers[i];
        build_mixer(b, t->first + i, n, rope, t->window && !t->full[i], &l->mixer);
        build_mlp(b, t->first + i, &l->mlp);
        if (t->clips)
            build_clips(b, i, l);
    }
    if (joins)
        build_join(b, rope);
    else
        f->merge(b);
}
