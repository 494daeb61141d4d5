/*
 * Image towers, from patches to features: a norm of patches, positions beside them, attention both ways over an image or
 * within windows of it, heads of 72 and 80, 2-D RoPE, norms of heads, layer scales, every GELU, bounded products, and
 * mergers as chains of steps that read inner layers and the last one. Images of several sizes share a step; some leave
 * rows that no feature takes, as a class token does.
 */
#include "duo.h"

#include "base/mem.h"

#include <math.h>
#include <stdio.h>

enum {
    RMS = 1 << 0,        /* in place of LayerNorm */
    GATED = 1 << 1,      /* mlps with a gate */
    QUICK = 1 << 2,      /* quick GELU, else by tanh, or SiLU where gated */
    SPANS = 1 << 3,      /* windows in the first layer */
    HEAD_NORMS = 1 << 4, /* of queries, keys and values */
    WHOLE = 1 << 5,      /* over all heads */
    CLIPS = 1 << 6,
    SCALES = 1 << 7, /* of what a layer adds */
    PATCH_NORM = 1 << 8,
    LEVELS = 1 << 9, /* features of the first layer, too */
    MEAN = 1 << 10,  /* features are means of rows, scaled and shifted */
    WOVEN = 1 << 11, /* rows are interleaved; then a gated step */
    REST = 1 << 12,  /* images with a row that no feature takes */
    NO_ROPE = 1 << 13,
    PIXELS = 1 << 15, /* patches are bytes where the backend takes them */
    JOIN = 1 << 14, /* the last layer has no mlp; a feature is [act(joined rows W^T), their mean] */
};

static const struct tower_case {
    const char *name;
    unsigned parts;
    int n_heads, head_dim, n_ff, patch;
    enum dtype type, kv;
} cases[] = {
    {"qwen3-vl", LEVELS, 2, 72, 272, 96, DT_F16, DT_F16},
    {"qwen3-vl of Q8_0", LEVELS, 4, 64, 512, 96, DT_Q8_0, DT_F16},
    {"qwen2.5-vl", RMS | GATED | SPANS, 2, 80, 352, 108, DT_F16, DT_F16},
    {"pixtral", RMS | GATED | PATCH_NORM, 2, 64, 160, 48, DT_BF16, DT_F16},
    {"siglip", MEAN | NO_ROPE, 2, 72, 272, 100, DT_F16, DT_F16},
    {"clip", QUICK | REST | NO_ROPE | PATCH_NORM, 4, 16, 96, 60, DT_F16, DT_F16},
    {"internvl", SCALES | WOVEN | REST, 2, 64, 192, 48, DT_F16, DT_F16},
    {"internvl with norms of heads", SCALES | WHOLE | RMS | WOVEN, 4, 32, 96, 48, DT_F16, DT_F32},
    {"gemma4", RMS | GATED | HEAD_NORMS | MEAN, 2, 72, 176, 48, DT_F16, DT_F16},
    {"gemma4 with bounds", RMS | GATED | HEAD_NORMS | MEAN | CLIPS, 4, 64, 96, 48, DT_F32, DT_F16},
    {"bounds of an mlp without a gate", CLIPS | QUICK | REST, 2, 24, 96, 33, DT_F32, DT_F32},
    {"odd heads in windows", SPANS | LEVELS, 3, 28, 100, 50, DT_F32, DT_F32},
    {"minicpm, its first network", JOIN | SPANS | NO_ROPE, 2, 72, 272, 108, DT_F16, DT_F16},
    {"glm", RMS | GATED | WOVEN, 2, 128, 256, 96, DT_Q4_0, DT_F16},
    {"pixels of two frames", LEVELS | PIXELS, 2, 72, 272, 96, DT_F16, DT_F16},
    {"pixels and a class token", QUICK | REST | PIXELS, 2, 64, 96, 27, DT_F16, DT_F16},
};
enum { N_CASES = sizeof cases / sizeof *cases, MAX_OWNED = 64, LAYERS = 2, EACH_FEATURE = 4 };

static const int small_images[][2] = {{0, 16}, {0, 4}, {0, 36}};
static const int large_images[][2] = {{0, 144}, {0, 64}, {0, 100}};
static const int with_rests[][2] = {{0, 17}, {0, 145}, {0, 37}, {0, 16}};

struct stock {
    struct duo *d;
    struct duo_weight w[MAX_OWNED];
    struct array a[MAX_OWNED];
    int n_w, n_a;
    struct merger mergers[SIDES][2];
    struct rope rope;
    uint8_t plane[64];
    float freq[64];
};

static struct duo_weight *matrix(struct stock *k, int n_in, int n_out, enum dtype type)
{
    struct random_spec spec = {.n_in = n_in,
                               .n_expert = 1,
                               .n_seg = 1,
                               .rows = {n_out},
                               .type = {n_in % dtype_table[type].block_len ? DT_F16 : type},
                               .bias = true};
    fail_if(k->n_w == MAX_OWNED, "too many weights");
    weight_new(k->d, &k->w[k->n_w], WEIGHT_LINEAR, &spec);
    return &k->w[k->n_w++];
}

static struct array *vector(struct stock *k, int n)
{
    fail_if(k->n_a == MAX_OWNED, "too many arrays");
    k->a[k->n_a] = array_random(k->d, (size_t)n, 1.0f);
    return &k->a[k->n_a++];
}

static void set_norm(struct stock *k, struct norm *ref, struct norm *dev, enum norm_kind kind,
                     int width)
{
    struct norm *const on[SIDES] = {ref, dev};
    struct array *g = vector(k, width), *b = kind == NORM_RMS ? NULL : vector(k, width);
    EACH(side)
    *on[side] = (struct norm){kind, g->on[side], b ? b->on[side] : NULL, 1e-5f};
}

static const struct clip clips[] = {{-0.8f, 0.9f, -0.5f, 0.5f}, {-0.8f, 0.9f, -0.3f, 0.4f},
                                    {-0.5f, 0.7f, -0.6f, 0.6f}, {-0.2f, 0.2f, -0.4f, 0.3f},
                                    {-0.9f, 0.9f, -0.7f, 0.5f}, {-0.9f, 0.9f, -0.6f, 0.8f},
                                    {-0.3f, 0.3f, -0.5f, 0.5f}};

static void make_mixer(struct stock *k, const struct tower_case *c, int i)
{
    struct duo *d = k->d;
    int E = d->s.n_embd, D = c->head_dim, H = c->n_heads;
    struct layer *l[SIDES] = {&d->layers[REF][i], &d->layers[DEV][i]};
    const struct duo_weight *wqkv = matrix(k, E, 3 * H * D, c->type);
    const struct duo_weight *wo = matrix(k, H * D, E, c->type);
    bool whole = c->parts & WHOLE;
    EACH(side)
    {
        struct attention *a = &l[side]->mixer.attention;
        a->wqkv = &wqkv->on[side];
        a->wo = &wo->on[side];
        a->bidirectional = true;
        a->norm_whole = whole;
        a->rope = c->parts & NO_ROPE ? NULL : &k->rope;
        a->span = c->parts & SPANS && i == 0 ? SPAN_ONLY : SPAN_NONE;
        a->clips = c->parts & CLIPS ? clips : NULL;
    }
    set_norm(k, &l[REF]->mixer.block.in, &l[DEV]->mixer.block.in,
             c->parts & RMS ? NORM_RMS : NORM_LAYER, E);
    if (c->parts & SCALES)
        set_norm(k, &l[REF]->mixer.block.out, &l[DEV]->mixer.block.out, NORM_AFFINE, E);
    if (c->parts & (HEAD_NORMS | WHOLE)) {
        set_norm(k, &l[REF]->mixer.attention.q_norm, &l[DEV]->mixer.attention.q_norm, NORM_RMS,
                 whole ? H * D : D);
        set_norm(k, &l[REF]->mixer.attention.k_norm, &l[DEV]->mixer.attention.k_norm, NORM_RMS,
                 whole ? H * D : D);
    }
    EACH(side)
    if (c->parts & HEAD_NORMS) /* without a gain */
        l[side]->mixer.attention.v_norm = (struct norm){.kind = NORM_RMS, .eps = 1e-6f};
}

static void make_mlp(struct stock *k, const struct tower_case *c, int i)
{
    struct duo *d = k->d;
    int E = d->s.n_embd;
    bool gated = c->parts & GATED;
    struct layer *l[SIDES] = {&d->layers[REF][i], &d->layers[DEV][i]};
    const struct duo_weight *up = matrix(k, E, gated ? 2 * c->n_ff : c->n_ff, c->type);
    const struct duo_weight *down = matrix(k, c->n_ff, E, c->type);
    EACH(side)
    l[side]->mlp.dense = (struct ffn){.gate_up = &up->on[side],
                                      .down = &down->on[side],
                                      .clips = c->parts & CLIPS ? clips + 4 : NULL,
                                      .act = gated              ? ACT_SILU
                                             : c->parts & QUICK ? ACT_PLAIN_QUICK_GELU
                                                                : ACT_PLAIN_GELU_TANH};
    set_norm(k, &l[REF]->mlp.block.in, &l[DEV]->mlp.block.in,
             c->parts & RMS ? NORM_RMS : NORM_LAYER, E);
    if (c->parts & SCALES)
        set_norm(k, &l[REF]->mlp.block.out, &l[DEV]->mlp.block.out, NORM_AFFINE, E);
}

/* Merger i of the network, which reads layer `after` and whose features have `width` values. */
static void make_merger(struct stock *k, const struct tower_case *c, int i, int after, int width)
{
    int E = k->d->s.n_embd, rows = EACH_FEATURE, n = 0;
    struct merge_step *s[SIDES] = {k->mergers[REF][i].steps, k->mergers[DEV][i].steps};
    enum norm_kind kind = c->parts & RMS ? NORM_RMS : NORM_LAYER;
    if (c->parts & MEAN) {
        EACH(side)
        s[side][n] = (struct merge_step){.rows = rows, .mean = true, .act = ACT_NONE};
        set_norm(k, &s[REF][n].joined, &s[DEV][n].joined, NORM_AFFINE, E);
        n++;
        rows = 1;
    } else if (c->parts & WOVEN) { /* two pairs */
        EACH(side)
        s[side][n] = (struct merge_step){.rows = 2, .interleaved = true, .act = ACT_NONE};
        set_norm(k, &s[REF][n].norm, &s[DEV][n].norm, kind, E);
        n++;
        const struct duo_weight *w = matrix(k, E, E, c->type); /* half of 2 E */
        EACH(side)
        s[side][n] = (struct merge_step){.rows = 1, .act = ACT_SILU, .w = &w->on[side]};
        set_norm(k, &s[REF][n].joined, &s[DEV][n].joined, kind, 2 * E);
        n++;
        rows = 2;
    }
    const struct duo_weight *up = matrix(k, rows * E, 2 * E, c->type);
    const struct duo_weight *down = matrix(k, 2 * E, width, c->type);
    EACH(side)
    {
        s[side][n] = (struct merge_step){.rows = rows, .act = ACT_NONE, .w = &up->on[side]};
        s[side][n + 1] = (struct merge_step){.act = ACT_PLAIN_GELU, .w = &down->on[side]};
    }
    if (i) /* a norm of each row, or of all that are joined */
        set_norm(k, &s[REF][n].joined, &s[DEV][n].joined, kind, rows * E);
    else
        set_norm(k, &s[REF][n].norm, &s[DEV][n].norm, kind, E);
    EACH(side)
    {
        k->mergers[side][i].after = after;
        k->mergers[side][i].at = i * width;
        k->mergers[side][i].n_steps = n + 2;
    }
}

/* What the rows of a second network are made of (struct tower_join). */
static void make_join(struct stock *k, const struct tower_case *c)
{
    int E = k->d->s.n_embd, width = EACH_FEATURE * E;
    struct merge_step *s[SIDES] = {k->mergers[REF][0].steps, k->mergers[DEV][0].steps};
    const struct duo_weight *up = matrix(k, width, width, c->type);
    EACH(side)
    {
        s[side][0] = (struct merge_step){.rows = EACH_FEATURE, .act = ACT_NONE, .w = &up->on[side]};
        s[side][1] = (struct merge_step){.act = ACT_PLAIN_GELU_TANH};
        k->mergers[side][0].after = k->mergers[side][1].after = LAYERS - 1;
        k->mergers[side][0].n_steps = 2;
        k->mergers[side][1].steps[0] =
            (struct merge_step){.rows = EACH_FEATURE, .mean = true, .act = ACT_NONE};
        k->mergers[side][1].n_steps = 1;
        k->mergers[side][1].at = width;
    }
    set_norm(k, &s[REF][0].joined, &s[DEV][0].joined, NORM_LAYER, width);
}

static void make_ends(struct stock *k, const struct tower_case *c)
{
    struct duo *d = k->d;
    int E = d->s.n_embd, n = 1 + !!(c->parts & (LEVELS | JOIN)), half = c->head_dim / 4 * 2;
    for (int i = 0; i < half; i++) {
        k->freq[i] = powf(10000.0f, -(float)(i % (half / 2)) / (float)(half / 2));
        k->plane[i] = i < half / 2 ? 1 : 2;
    }
    k->rope = (struct rope){2 * half, k->freq, 1.0f, k->plane};
    const struct duo_weight *patches = matrix(k, c->patch, E, DT_F16);
    for (int i = 0; i < n && !(c->parts & JOIN); i++)
        make_merger(k, c, i, i == n - 1 ? LAYERS - 1 : 0, 40);
    if (c->parts & JOIN)
        make_join(k, c);
    EACH(side)
    {
        struct network *net = &d->net[side];
        net->n_vocab = 0;
        net->embed.patches = &patches->on[side];
        net->head.w = NULL;
        net->ropes = &k->rope;
        net->n_ropes = 1;
        net->mergers = k->mergers[side];
        net->n_mergers = n;
        net->clips = c->parts & CLIPS ? (struct clip *)(uintptr_t)clips : NULL;
    }
    if (c->parts & PATCH_NORM)
        set_norm(k, &d->net[REF].embed.patch_norm, &d->net[DEV].embed.patch_norm,
                 c->parts & RMS ? NORM_RMS : NORM_LAYER, E);
}

/* Patches of `patch` values as pixels: of two frames, or channels last. The reference gets the values, and the device, if it takes
 * them, bytes and positions. Rows that no feature takes have no pixels. */
struct pixels {
    struct pixel_form form;
    uint8_t bytes[512][64];
    const uint8_t *rows[512];
    const float *positions[512];
};

static void make_form(struct pixel_form *f, struct duo *d, const struct tower_case *c)
{
    int frames = c->patch % 6 ? 1 : 2, side = (int)lround(sqrt(c->patch / 3.0 / frames));
    fail_if(3 * frames * side * side != c->patch, "patches that are no squares");
    *f = (struct pixel_form){.side = side, .frames = frames, .channels_last = frames == 1};
    for (int i = 0; i < 3 * 256; i++)
        f->values[i / 256][i % 256] = (float)(i % 256 - 99 + i / 256) / 70;
    d->net[DEV].embed.pixels = f;
}

static void fill_pixels(struct pixels *m, struct plan *p, const struct duo *d,
                        const struct tower_case *c)
{
    int area = m->form.side * m->form.side, width = network_embed_width(&d->net[REF]);
    for (int t = 0; t < p->b.n_tokens; t++) {
        float *row = p->embed_rows + (size_t)t * (size_t)width;
        bool none = c->parts & REST && t % 17 == 16;
        for (int i = 0; i < 3 * area; i++)
            m->bytes[t][i] = (uint8_t)(t * 37 + i * i + i);
        for (int k = 0; k < c->patch; k++) {
            int channel = m->form.channels_last ? k % 3 : k / (m->form.frames * area);
            int at = m->form.channels_last ? k : k % area * 3 + channel;
            row[k] = none ? 0 : m->form.values[channel][m->bytes[t][at]];
        }
        m->rows[t] = none ? NULL : m->bytes[t];
        m->positions[t] = row + c->patch;
    }
}

/* Patches, their places in a grid of six columns, and windows of ten. */
static void make_batch(struct plan *p, const struct duo *d, const struct tower_case *c,
                       int32_t *spans)
{
    int width = network_embed_width(&d->net[REF]);
    p->embed_rows = random_floats((size_t)p->b.n_tokens * (size_t)width, 1.0f);
    p->b.embeds = p->embeds;
    p->b.n_embeds = p->b.n_tokens;
    p->b.n_out = 0;
    p->b.rope_pos = p->rope_pos;
    p->b.spans = c->parts & SPANS ? spans : NULL;
    for (int s = 0; s < p->b.n_seqs; s++)
        for (int t = p->q_start[s]; t < p->q_start[s + 1]; t++) {
            int end = p->pos[t] / 10 * 10 + 10;
            p->embeds[t] = p->embed_rows + (size_t)(t * width);
            p->tokens[t] = t;
            p->rope_pos[3 * t] = 0;
            p->rope_pos[3 * t + 1] = p->pos[t] / 6;
            p->rope_pos[3 * t + 2] = p->pos[t] % 6;
            spans[2 * t] = end - 10;
            spans[2 * t + 1] = end < p->kv_len[s] ? end : p->kv_len[s];
        }
}

static void begin_pixels(struct duo *d, struct plan *p, const struct pixels *pixels)
{
    struct batch b = p->b;
    if (!pixels || !d->be[DEV]->ops->tower->pixels) {
        begin(d, p);
        return;
    }
    p->b.kv = d->kv[REF];
    d->be[REF]->ops->begin(d->be[REF], &p->b);
    b.kv = d->kv[DEV];
    b.embeds = pixels->positions;
    b.pixels = pixels->rows;
    d->be[DEV]->ops->begin(d->be[DEV], &b);
}

/* pixels: what the device takes in the place of values, or NULL. */
static void run_case(struct duo *d, struct plan *p, const struct pixels *pixels, const char *what)
{
    int features = 0, width = network_feature_width(&d->net[REF]);
    for (int s = 0; s < p->b.n_seqs; s++)
        features += (p->q_start[s + 1] - p->q_start[s]) / EACH_FEATURE;
    size_t n = (size_t)features * (size_t)width;
    float *out[SIDES] = {mem_alloc(n * sizeof(float)), mem_alloc(n * sizeof(float))};
    begin_pixels(d, p, pixels);
    EACH(side)
    {
        struct backend *be = d->be[side];
        const struct network *net = &d->net[side];
        be->ops->embed(be, &net->embed);
        for (int i = 0; i < LAYERS; i++) {
            be->ops->mixer(be, &d->layers[side][i].mixer, i);
            be->ops->mlp(be, &d->layers[side][i].mlp, i);
            for (int m = 0; m < net->n_mergers; m++)
                if (net->mergers[m].after == i)
                    be->ops->tower->merge(be, &net->mergers[m], m);
        }
    }
    end(d, NULL, NULL);
    for (size_t i = 0; i < n; i++)
        out[DEV][i] = NAN;
    EACH(side)
    d->be[side]->ops->tower->features(d->be[side], features, out[side]);
    check_close(what, out[DEV], out[REF], n, product_tol * 3);
    EACH(side)
    mem_free(out[side]);
}

static void tower_case(const struct tower_case *c, const char *named)
{
    static struct pixels pixels;
    struct dims s = base_dims();
    int32_t spans[2 * 512];
    s.n_heads = s.n_kv_heads = c->n_heads;
    s.head_dim = c->head_dim;
    s.n_embd = c->n_heads * c->head_dim;
    s.n_rot = 2;
    s.b.k_type = s.b.v_type = c->kv;
    s.b.max_embeds = s.b.max_tokens;
    struct duo d;
    duo_open(&d, &s, LAYERS);
    struct stock k = {.d = &d};
    for (int i = 0; i < LAYERS; i++) {
        make_mixer(&k, c, i);
        if (!(c->parts & JOIN) || i + 1 < LAYERS)
            make_mlp(&k, c, i);
        kv_new(&d, i);
    }
    make_ends(&k, c);
    if (c->parts & PIXELS)
        make_form(&pixels.form, &d, c);
    bool runs = duo_runs(&d, named);
    fail_if(runs && !d.be[DEV]->ops->tower, "the backend has no towers");
    if (runs)
        duo_prepare(&d);
    for (int large = small || light > 1; runs && large < 2; large++) {
        struct plan p;
        char what[120];
        if (c->parts & REST)
            plan_make(&p, &s, with_rests, 4 - large, false);
        else
            plan_make(&p, &s, large ? large_images : small_images, 3, false);
        make_batch(&p, &d, c, spans);
        if (c->parts & PIXELS)
            fill_pixels(&pixels, &p, &d, c);
        snprintf(what, sizeof what, "%s, %d patches", named, p.b.n_tokens);
        const struct host_ops *host = c->parts & PIXELS ? d.be[DEV]->ops->host : NULL;
        size_t bytes =
            (size_t)p.b.n_tokens * (size_t)network_embed_width(&d.net[REF]) * sizeof(float);
        if (host && large) /* the device reads rows in pinned memory where they are */
            host->pin(d.be[DEV], p.embed_rows, bytes);
        run_case(&d, &p, c->parts & PIXELS ? &pixels : NULL, what);
        if (host && large)
            host->unpin(NULL, p.embed_rows);
        mem_free(p.embed_rows);
        mem_free(p.pages);
    }
    for (int i = 0; i < LAYERS; i++)
        kv_free(&d, i);
    while (k.n_w)
        weight_free(&d, &k.w[--k.n_w]);
    while (k.n_a)
        array_free(&d, &k.a[--k.n_a]);
    duo_close(&d);
}

void force_towers(void)
{
    for (int i = 0; i < N_CASES; i++)
        if (!(cases[i].parts & (PIXELS | JOIN)) &&
            (cases[i].head_dim == 80 || (cases[i].head_dim == 72 && cases[i].parts & LEVELS)))
            tower_case(&cases[i], forced);
}

void test_towers(void)
{
    int before = n_checks;
    if (!wanted("towers"))
        return;
    for (int i = 0; i < N_CASES; i++)
        tower_case(&cases[i], cases[i].name);
    report("towers", before);
}
