/*
 * Networks of encoders, from tokens to hidden states: embeddings of positions and types with their norm,
 * attention both ways, over all of a text or a window to both sides, LayerNorm in front of blocks or of
 * their sums, mlps without a gate, no head. Texts of one to many tokens share a step; the rows that are
 * wanted are all of them, or one of each.
 */
#include "duo.h"

#include "base/mem.h"

#include <math.h>
#include <stdio.h>

enum {
    SUMS = 1 << 0, /* norms of sums, in place of norms in front */
    LONE = 1 << 1, /* mlps without a gate */
    BIAS = 1 << 2, /* of projections */
    NO_ROPE = 1 << 3,
    TABLES = 1 << 4, /* positions and types */
    WINDOW = 1 << 5, /* in the first layer */
    APART = 1 << 6,  /* q, k and v are three tensors */
    RMS = 1 << 7,    /* in place of LayerNorm */
    ALL = 1 << 8,    /* every row is wanted */
    Q_NORM = 1 << 9,
    GROUPS = 1 << 10, /* two heads share keys and values */
};
#define BERT (SUMS | LONE | BIAS | NO_ROPE | TABLES | APART)

static const struct encoder_case {
    const char *name;
    unsigned parts;
    int n_embd, n_heads, head_dim, n_ff;
    enum dtype type, kv;
    int texts;
} cases[] = {
    {"bert", BERT, 256, 4, 64, 512, DT_F16, DT_F16, 0},
    {"bert, all rows", BERT | ALL, 256, 4, 64, 512, DT_Q8_0, DT_F16, 2},
    {"bert, many rows", BERT, 320, 2, 64, 352, DT_F16, DT_F16, 1},
    {"bert of Q4_K", BERT, 256, 4, 64, 256, DT_Q4_K, DT_F16, 1},
    {"bert of floats", BERT | ALL, 72, 3, 24, 100, DT_F32, DT_F32, 0},
    {"bert of odd widths", BERT, 81, 3, 27, 99, DT_F32, DT_F16, 1},
    {"heads of 16", BERT | ALL, 64, 4, 16, 96, DT_BF16, DT_F16, 2},
    {"heads of 32", BERT, 96, 3, 32, 96, DT_F16, DT_BF16, 0},
    {"heads of 96", BERT & ~NO_ROPE, 192, 2, 96, 96, DT_F16, DT_F16, 1},
    {"modern bert", WINDOW, 256, 4, 64, 512, DT_F16, DT_F16, 1},
    {"modern bert, all rows", WINDOW | ALL, 128, 2, 64, 160, DT_Q8_0, DT_F16, 0},
    {"modern bert of floats", WINDOW, 64, 4, 16, 96, DT_F32, DT_F32, 2},
    {"nomic", SUMS | TABLES, 256, 2, 128, 256, DT_Q4_K, DT_F16, 1},
    {"a window and norms of heads", WINDOW | Q_NORM | GROUPS, 128, 4, 32, 160, DT_F16, DT_F16, 0},
    {"both ways in groups", BERT | WINDOW | GROUPS, 256, 4, 64, 256, DT_F16, DT_F16, 1},
    {"RMS of sums", SUMS | RMS, 256, 4, 64, 256, DT_F16, DT_F16, 1},
    {"RMS and no head", RMS, 256, 4, 64, 256, DT_F16, DT_F16, 0},
};
enum { N_CASES = sizeof cases / sizeof *cases, MAX_OWNED = 32, N_TYPES = 3 };

static const int some[][2] = {{0, 1}, {0, 5}, {0, 1}, {0, 17}, {0, 70}};
static const int many[][2] = {{0, 130}, {0, 64}, {0, 1}, {0, 63}, {0, 33}};
static const int ones[][2] = {{0, 1}, {0, 1}, {0, 1}};
static const struct {
    const int (*texts)[2];
    int n;
} lengths[] = {{some, 5}, {many, 5}, {ones, 3}};

struct stock {
    struct duo *d;
    struct duo_weight w[MAX_OWNED];
    struct array a[MAX_OWNED];
    int n_w, n_a;
};

static struct duo_weight *matrix(struct stock *k, enum weight_role role, int n_in, int n_seg,
                                 const int *rows, enum dtype type, bool bias)
{
    struct random_spec spec = {.n_in = n_in, .n_expert = 1, .n_seg = n_seg, .bias = bias};
    fail_if(k->n_w == MAX_OWNED, "too many weights");
    for (int i = 0; i < n_seg; i++) {
        spec.rows[i] = rows[i];
        spec.type[i] = type;
    }
    weight_new(k->d, &k->w[k->n_w], role, &spec);
    return &k->w[k->n_w++];
}

static struct array *vector(struct stock *k, int n)
{
    fail_if(k->n_a == MAX_OWNED, "too many arrays");
    k->a[k->n_a] = array_random(k->d, (size_t)n, 1.0f);
    return &k->a[k->n_a++];
}

/* The same norm on both sides. bias: or without one. */
static void set_norm(struct stock *k, struct norm *ref, struct norm *dev, int width, bool rms,
                     bool bias)
{
    struct norm *const on[SIDES] = {ref, dev};
    struct array *g = vector(k, width), *b = bias && !rms ? vector(k, width) : NULL;
    EACH(side)
    *on[side] =
        (struct norm){rms ? NORM_RMS : NORM_LAYER, g->on[side], b ? b->on[side] : NULL, 1e-5f};
}

static void make_layer(struct stock *k, const struct encoder_case *c, int i)
{
    struct duo *d = k->d;
    int E = c->n_embd, D = c->head_dim, H = c->n_heads, K = d->s.n_kv_heads;
    const int apart[] = {H * D, K * D, K * D}, fused = (H + 2 * K) * D, two[] = {c->n_ff, c->n_ff};
    bool bias = c->parts & BIAS, lone = c->parts & LONE, rms = c->parts & RMS;
    struct duo_weight *wqkv = c->parts & APART
                                  ? matrix(k, WEIGHT_LINEAR, E, 3, apart, c->type, bias)
                                  : matrix(k, WEIGHT_LINEAR, E, 1, &fused, c->type, bias);
    struct duo_weight *wo = matrix(k, WEIGHT_LINEAR, H * D, 1, &E, c->type, bias);
    struct duo_weight *up = matrix(k, WEIGHT_LINEAR, E, lone ? 1 : 2, two, c->type, bias);
    struct duo_weight *down = matrix(k, WEIGHT_LINEAR, c->n_ff, 1, &E, c->type, bias);
    struct layer *l[SIDES] = {&d->layers[REF][i], &d->layers[DEV][i]};
    EACH(side)
    {
        struct attention *a = &l[side]->mixer.attention;
        a->wqkv = &wqkv->on[side];
        a->wo = &wo->on[side];
        a->bidirectional = true;
        a->rope = c->parts & NO_ROPE ? NULL : a->rope;
        a->window = c->parts & WINDOW && i == 0 ? 9 : 0;
        l[side]->mlp.dense = (struct ffn){.gate_up = &up->on[side],
                                          .down = &down->on[side],
                                          .act = lone              ? ACT_PLAIN_GELU
                                                 : c->parts & SUMS ? ACT_SILU
                                                                   : ACT_GELU};
    }
    if (c->parts & SUMS) {
        set_norm(k, &l[REF]->mixer.block.sum, &l[DEV]->mixer.block.sum, E, rms, true);
        set_norm(k, &l[REF]->mlp.block.sum, &l[DEV]->mlp.block.sum, E, rms, true);
    } else {
        set_norm(k, &l[REF]->mixer.block.in, &l[DEV]->mixer.block.in, E, rms, false);
        set_norm(k, &l[REF]->mlp.block.in, &l[DEV]->mlp.block.in, E, rms, true);
    }
    if (c->parts & Q_NORM) {
        set_norm(k, &l[REF]->mixer.attention.q_norm, &l[DEV]->mixer.attention.q_norm, D, true,
                 false);
        set_norm(k, &l[REF]->mixer.attention.k_norm, &l[DEV]->mixer.attention.k_norm, D, true,
                 false);
    }
}

static void make_ends(struct stock *k, const struct encoder_case *c)
{
    struct duo *d = k->d;
    enum dtype type = dtype_table[c->type].block_len > 32 ? DT_F16 : c->type;
    int positions = 160, n_types = N_TYPES;
    struct duo_weight *tokens = matrix(k, WEIGHT_EMBED, c->n_embd, 1, &d->s.n_vocab, type, false);
    struct duo_weight *pos = NULL, *types = NULL;
    if (c->parts & TABLES) {
        pos = matrix(k, WEIGHT_EMBED, c->n_embd, 1, &positions, type, false);
        types = matrix(k, WEIGHT_EMBED, c->n_embd, 1, &n_types, DT_F32, false);
    }
    EACH(side)
    {
        struct embed *e = &d->net[side].embed;
        e->tokens = &tokens->on[side];
        e->positions = pos ? &pos->on[side] : NULL;
        e->types = types ? &types->on[side] : NULL;
        e->pos_offset = pos ? 2 : 0;
        d->net[side].head.w = NULL;
    }
    set_norm(k, &d->net[REF].embed.norm, &d->net[DEV].embed.norm, c->n_embd, false, true);
    if (!(c->parts & SUMS))
        set_norm(k, &d->net[REF].head.norm, &d->net[DEV].head.norm, c->n_embd,
                 (c->parts & RMS) != 0, true);
}

static void run_case(struct duo *d, const struct encoder_case *c, struct plan *p, const char *what)
{
    size_t E = (size_t)c->n_embd, n = (size_t)p->b.n_out * E;
    float *out[SIDES] = {mem_alloc(n * sizeof(float)), mem_alloc(n * sizeof(float))};
    for (size_t i = 0; i < n; i++)
        out[0][i] = NAN;
    EACH(side)
    d->be[side]->ops->stream->put_logits(d->be[side], out[0], p->b.n_out);
    begin(d, p);
    EACH(side)
    {
        struct backend *be = d->be[side];
        be->ops->embed(be, &d->net[side].embed);
        for (int i = 0; i < 2; i++) {
            be->ops->mixer(be, &d->layers[side][i].mixer, i);
            be->ops->mlp(be, &d->layers[side][i].mlp, i);
        }
        be->ops->head(be, &d->net[side].head);
    }
    end(d, NULL, NULL);
    EACH(side)
    for (int r = 0; r < p->b.n_out; r++)
        d->be[side]->ops->logits(d->be[side], r, out[side] + (size_t)r * E);
    check_close(what, out[DEV], out[REF], n, product_tol * 3);
    EACH(side)
    mem_free(out[side]);
}

static void encoder_case(const struct encoder_case *c, const char *named)
{
    struct dims s = base_dims();
    s.n_embd = c->n_embd;
    s.n_heads = c->n_heads;
    s.n_kv_heads = c->parts & GROUPS ? c->n_heads / 2 : c->n_heads;
    s.head_dim = c->head_dim;
    s.n_rot = c->head_dim / 2 * 2;
    s.n_vocab = 60;
    s.b.k_type = s.b.v_type = c->kv;
    struct duo d;
    duo_open(&d, &s, 2);
    struct stock k = {.d = &d};
    for (int i = 0; i < 2; i++) {
        make_layer(&k, c, i);
        kv_new(&d, i);
    }
    make_ends(&k, c);
    bool runs = duo_runs(&d, named);
    if (runs)
        duo_prepare(&d);
    if (runs && bytes_only)
        invariant_cuts(&d, named, true);
    for (int mixed = small; runs && !bytes_only && mixed < 2;
         mixed++) { /* with types, and without: all of them are 0 */
        struct plan p;
        int32_t types[512];
        char what[120];
        plan_make(&p, &s, lengths[c->texts].texts, lengths[c->texts].n, false);
        for (int t = 0; t < p.b.n_tokens; t++)
            types[t] = t % N_TYPES;
        p.b.types = mixed ? types : NULL;
        if (c->parts & ALL)
            for (p.b.n_out = 0; p.b.n_out < p.b.n_tokens; p.b.n_out++)
                p.out_rows[p.b.n_out] = p.b.n_out;
        snprintf(what, sizeof what, "%s, %d rows", named, p.b.n_tokens);
        run_case(&d, c, &p, what);
        mem_free(p.pages);
    }
    for (int i = 0; i < 2; i++)
        kv_free(&d, i);
    while (k.n_w)
        weight_free(&d, &k.w[--k.n_w]);
    while (k.n_a)
        array_free(&d, &k.a[--k.n_a]);
    duo_close(&d);
}

void test_encoders(void)
{
    int before = n_checks;
    if (!wanted("encoders"))
        return;
    for (int i = 0; i < N_CASES; i++)
        encoder_case(&cases[i], cases[i].name);
    report("encoders", before);
}

/* A row that is forced: cases of its formats, whatever their numbers of rows. Small: many rows, of halves,
 * whose rings go round, and the narrowest. */
void force_encoders(bool (*takes)(const char *formats, enum dtype t), const char *formats)
{
    enum { MANY_ROWS = 2, NARROW = 6 };
    for (int i = 0; i < N_CASES; i++)
        if (takes(formats, cases[i].type) &&
            (small ? i == MANY_ROWS || i == NARROW : !light || i % 2 == 0))
            encoder_case(&cases[i], forced);
}

void cut_encoders(void)
{
    for (int i = 0; i < N_CASES; i++)
        encoder_case(&cases[i], cases[i].name);
}
