/*
 * With backend.deterministic the bytes of a row depend on that row and what came before it in its sequence: not on the
 * number of rows beside it, on how its prompt was cut, on its place in a step, on its pages or slots. Bytes of one
 * step that has a whole sequence are compared with those of other cuts and other company: products and mlps of every
 * format, and through invariant_cuts the layers of other groups (heads.c, mixers.c, parts.c, steps.c). The reference
 * has no part in it.
 */
#include "duo.h"

#include "base/error.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

bool bytes_only;

/* A simulator takes seconds for a step of many sequences. */
enum { MOST_SEQS = SIM ? 6 : 34, B_LEN = 70, OTHER_LEN = 14 };

/* A sequence of tokens, or of rows of the stream. */
struct cut_seq {
    int len, fed, first_page;
    int32_t *tokens; /* (len) */
    float *x;        /* (len, n_embd) */
};

struct cuts {
    struct duo *d;
    const char *what;
    bool tokens; /* from tokens to logits, else from rows to rows */
    int n_seqs, width;
    bool mirrored; /* pages and slots from the other end */
    bool last;     /* only the last row of a piece has results */
    bool keep;     /* rows are kept for an MTP block */
    bool spans, embeds;
    struct cut_seq seq[MOST_SEQS]; /* 0: the one compared; 1: long; others: short */
    float *want, *got;             /* (len of 0, width) */
    bool has[160];                 /* rows of got that a step has written */
};

/* A step: n rows of a sequence; the first entry with n 0 ends it. */
struct cut_piece {
    int seq, n;
};

static void cut_spans(const struct cuts *c, const struct plan *p, int first, int n, int seq,
                      int32_t *spans)
{
    for (int i = 0; i < n && seq == 1 && p->pos[first] == 0 && n > 30; i++)
        if (i >= 5 && i < 30) {
            spans[2 * (first + i)] = 5;
            spans[2 * (first + i) + 1] = 30;
        }
    (void)c;
}

static void cut_plan(struct cuts *c, struct plan *p, const struct cut_piece *list, int n,
                     int32_t *states, int32_t *spans, int *first_of, int *out_of)
{
    const struct dims *s = &c->d->s;
    struct batch *b = &p->b;
    memset(p, 0, sizeof *p);
    p->pages = mem_zalloc((size_t)(n * s->b.max_pages), sizeof(int32_t));
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < n; i++) {
            if ((list[i].n == 1) != (pass == 0))
                continue;
            struct cut_seq *q = &c->seq[list[i].seq];
            int at = b->n_seqs++, end = q->fed + list[i].n;
            int32_t *table = p->pages + (size_t)at * (size_t)s->b.max_pages;
            CHECK(q->tokens && end <= q->len, "a cut beyond its sequence");
            for (int j = 0; j * s->b.page_len < end; j++) {
                int page = q->first_page + j;
                fail_if(page >= s->b.n_pages || j >= s->b.max_pages, "cuts need more pages");
                table[j] = c->mirrored ? s->b.n_pages - 1 - page : page;
            }
            first_of[i] = b->n_tokens;
            out_of[i] = b->n_out;
            for (int j = q->fed; j < end; j++) {
                int t = b->n_tokens++;
                bool given = c->embeds && list[i].seq == 1 && j % 3 == 0 && b->n_embeds < 20;
                p->tokens[t] = given ? s->n_vocab + b->n_embeds : q->tokens[j];
                if (given)
                    p->embeds[b->n_embeds++] = q->x + (size_t)j * (size_t)s->n_embd;
                p->pos[t] = j;
                p->slot[t] = table[j / s->b.page_len] * s->b.page_len + j % s->b.page_len;
                if (!c->last || j == end - 1)
                    p->out_rows[b->n_out++] = t;
            }
            cut_spans(c, p, first_of[i], list[i].n, list[i].seq, spans);
            p->kv_len[at] = end;
            p->q_start[at + 1] = b->n_tokens;
            b->n_decode += pass == 0;
            int slot = c->mirrored ? s->b.n_states - 1 - list[i].seq : list[i].seq;
            states[at] = q->fed ? slot : -1;
            states[MOST_SEQS + at] = slot;
            states[2 * MOST_SEQS + at] = 0;
            states[3 * MOST_SEQS + at] = -1;
        }
    b->max_pages = s->b.max_pages;
    b->tokens = p->tokens;
    b->pos = p->pos;
    b->slot = p->slot;
    b->q_start = p->q_start;
    b->kv_len = p->kv_len;
    b->pages = p->pages;
    b->out_rows = p->out_rows;
    b->embeds = p->embeds;
    b->spans = c->spans ? spans : NULL;
    b->kv = c->d->kv[DEV];
    b->keep = c->keep;
    if (s->b.n_states) {
        b->state_in = states;
        b->state_out = states + MOST_SEQS;
        b->save_rows = states + 2 * MOST_SEQS;
        b->save_state = states + 3 * MOST_SEQS;
    }
}

/* One step, with the results of sequence 0 to `to`. key: recorded and replayed under it; 0: neither. */
static void cut_step(struct cuts *c, const struct cut_piece *list, int n, uint64_t key, float *to)
{
    struct duo *d = c->d;
    struct backend *be = d->be[DEV];
    const struct backend_ops *ops = be->ops;
    struct plan p;
    struct error err = {0};
    int32_t states[4 * MOST_SEQS], spans[2 * 512] = {0};
    int first_of[MOST_SEQS] = {0}, out_of[MOST_SEQS] = {0}, mine = -1;
    cut_plan(c, &p, list, n, states, spans, first_of, out_of);
    float *x = mem_alloc((size_t)(p.b.n_tokens * d->s.n_embd) * sizeof *x);
    for (int i = 0; i < n; i++) {
        struct cut_seq *q = &c->seq[list[i].seq];
        memcpy(x + (size_t)(first_of[i] * d->s.n_embd), q->x + (size_t)q->fed * (size_t)d->s.n_embd,
               (size_t)(list[i].n * d->s.n_embd) * sizeof *x);
        mine = list[i].seq == 0 ? i : mine;
    }
    ops->begin(be, &p.b);
    if (!key || !ops->replay(be, key)) {
        if (c->tokens)
            ops->embed(be, &d->net[DEV].embed);
        else
            ops->stream->put(be, x, p.b.n_tokens);
        for (int i = 0; i < network_depth(&d->net[DEV]); i++) {
            ops->mixer(be, &d->layers[DEV][i].mixer, i);
            ops->mlp(be, &d->layers[DEV][i].mlp, i);
        }
        if (c->keep)
            ops->draft->keep(be, &d->net[DEV].head.norm);
        if (c->tokens)
            ops->head(be, &d->net[DEV].head);
    }
    if (key)
        ops->launch(be);
    float *all = mem_alloc((size_t)(p.b.n_tokens * c->width) * sizeof *all);
    if (!c->tokens)
        ops->stream->get(be, all, p.b.n_out);
    fail_if(!ops->end(be, NULL, &err), err.msg);
    for (int i = 0; c->tokens && i < p.b.n_out; i++) /* of an encoder, hidden states */
        ops->logits(be, i, all + (size_t)(i * c->width));
    if (mine >= 0) {
        int rows = c->last ? 1 : list[mine].n, at = c->seq[0].fed + list[mine].n - rows;
        memcpy(to + (size_t)(at * c->width), all + (size_t)(out_of[mine] * c->width),
               (size_t)(rows * c->width) * sizeof *all);
        for (int t = at; t < at + rows; t++)
            c->has[t] = true;
    }
    for (int i = 0; i < n; i++)
        c->seq[list[i].seq].fed += list[i].n;
    mem_free(all);
    mem_free(x);
    mem_free(p.pages);
}

static void cut_start(struct cuts *c, bool mirrored)
{
    c->mirrored = mirrored;
    c->last = c->keep = false;
    memset(c->has, 0, sizeof c->has);
    for (int i = 0; i < c->n_seqs; i++)
        c->seq[i].fed = 0;
    memset(c->got, 0xff, (size_t)(c->seq[0].len * c->width) * sizeof *c->got);
}

/* The rows of sequence 0 so far. */
static void cut_compare(const struct cuts *c, const char *how)
{
    size_t row = (size_t)c->width * sizeof *c->want;
    n_checks++;
    for (int t = 0; t < c->seq[0].fed; t++) {
        const float *a = c->got + (size_t)(t * c->width), *b = c->want + (size_t)(t * c->width);
        if (!c->has[t] || !memcmp(a, b, row))
            continue;
        int k = 0;
        while (!memcmp((const char *)(a + k), (const char *)(b + k), sizeof *a))
            k++;
        n_failed++;
        printf("FAIL  %s, %s: row %d of %d, column %d is %.9g, not %.9g\n", c->what, how, t,
               c->seq[0].len, k, (double)a[k], (double)b[k]);
        return;
    }
}

static int left(const struct cuts *c)
{
    return c->seq[0].len - c->seq[0].fed;
}

/* Sequence 0 alone, in pieces of these sizes, then of the last one. */
static void cut_alone(struct cuts *c, const int *sizes, int n, bool mirrored, const char *how)
{
    cut_start(c, mirrored);
    for (int i = 0; left(c); i++) {
        int size = sizes[i < n ? i : n - 1];
        struct cut_piece piece = {0, size < left(c) ? size : left(c)};
        cut_step(c, &piece, 1, 0, c->got);
    }
    cut_compare(c, how);
}

/* n rows of sequence 0, m of the long one, one of each of `others` short ones. They come last in a step, or first. */
static void cut_beside(struct cuts *c, int n, int m, int others, bool last, uint64_t key)
{
    struct cut_piece list[MOST_SEQS];
    int k = 0;
    if (n && !last)
        list[k++] = (struct cut_piece){0, n};
    for (int i = 2; i < c->n_seqs && i < 2 + others; i++)
        if (c->seq[i].fed < c->seq[i].len)
            list[k++] = (struct cut_piece){i, 1};
    if (m)
        list[k++] = (struct cut_piece){1, m};
    if (n && last)
        list[k++] = (struct cut_piece){0, n};
    cut_step(c, list, k, key, c->got);
}

static void cut_mixed(struct cuts *c)
{
    cut_start(c, true);
    c->keep = c->d->net[DEV].mtp.fc != NULL;
    cut_beside(c, 9, 40, 3, true, 0);
    for (int i = 0; i < (SIM ? 2 : 4); i++)
        cut_beside(c, 1, i % 2, MOST_SEQS, i % 2, 0);
    c->last = true;
    cut_beside(c, 20, 20, 2, false, 0);
    c->last = c->keep = false;
    cut_beside(c, 0, 1, MOST_SEQS, false, 0);
    cut_beside(c, 1, 0, 1, true, 0);
    cut_beside(c, left(c) - 1, 2, MOST_SEQS, false, 0);
    c->last = true;
    cut_beside(c, 1, 2, 1, true, 0);
    cut_compare(c, "mixed with others");
}

static void cut_decodes(struct cuts *c, int decodes)
{
    cut_start(c, false);
    cut_beside(c, left(c) - decodes, 0, 0, false, 0);
    for (int i = 0; left(c); i++) /* recorded, and replayed */
        cut_beside(c, 1, 0, MOST_SEQS, i % 2, c->tokens ? 1 : 0);
    cut_compare(c, "decoded beside others");
}

/* A sequence whose rows see each other is whole in every step. */
static void cut_whole(struct cuts *c)
{
    struct cut_piece list[MOST_SEQS];
    int n = 0;
    cut_start(c, true);
    for (int i = c->n_seqs - 1; i >= 0; i--)
        if (n < 5 || i < 2)
            list[n++] = (struct cut_piece){i, i ? c->seq[i].len - i % 3 : c->seq[0].len};
    cut_step(c, list, n, 0, c->got);
    cut_compare(c, "beside others");
}

void invariant_cuts(struct duo *d, const char *what, bool tokens)
{
    const struct dims *s = &d->s;
    struct cuts c = {.d = d, .what = what, .tokens = tokens};
    int page = 0, len = light ? 90 : 150;
    struct backend *be = d->be[DEV];
    bool asked = be->deterministic;
    c.width = tokens && d->net[DEV].head.w ? s->n_vocab : s->n_embd;
    for (int i = 0; i < d->net[DEV].n_layers; i++)
        c.spans |= d->layers[DEV][i].mixer.attention.span != 0;
    c.embeds = tokens && s->b.max_embeds && !s->n_levels;
    int most = s->b.n_states ? s->b.n_states : light ? 12 : (int)MOST_SEQS;
    for (; c.n_seqs < most && c.n_seqs < MOST_SEQS; c.n_seqs++) {
        struct cut_seq *q = &c.seq[c.n_seqs];
        q->len = c.n_seqs == 0 ? len : c.n_seqs == 1 ? (int)B_LEN : (int)OTHER_LEN;
        int pages = (q->len + s->b.page_len - 1) / s->b.page_len;
        if (page + pages > s->b.n_pages)
            break;
        q->first_page = page;
        page += pages;
        q->x = random_floats((size_t)(q->len * s->n_embd), 1.0f);
        q->tokens = mem_alloc((size_t)q->len * sizeof *q->tokens);
        for (int t = 0; t < q->len; t++)
            q->tokens[t] = (int32_t)(random_u64(&rng) % (uint64_t)s->n_vocab);
    }
    fail_if(c.n_seqs < 4, "cuts need room for four sequences");
    c.want = mem_alloc((size_t)(len * c.width) * sizeof *c.want);
    c.got = mem_alloc((size_t)(len * c.width) * sizeof *c.got);
    be->deterministic = true;
    cut_start(&c, false);
    cut_step(&c, &(struct cut_piece){0, len}, 1, 0, c.want);
    if (d->layers[DEV][0].mixer.attention.bidirectional) {
        cut_whole(&c);
    } else {
        cut_alone(&c, (const int[]){SIM ? 23 : 7}, 1, true, "in equal pieces");
        cut_alone(&c, (const int[]){1, 63, 2, 1, 15, 100}, 6, false,
                  "in pieces of 1, 63, 2, 1, 15");
        cut_mixed(&c);
        cut_decodes(&c, SIM ? 4 : light ? 9 : (int)OTHER_LEN);
    }
    be->deterministic = asked;
    for (int i = 0; i < c.n_seqs; i++) {
        mem_free(c.seq[i].x);
        mem_free(c.seq[i].tokens);
    }
    mem_free(c.want);
    mem_free(c.got);
}

static const int counts[] = {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65};
enum { N_COUNTS = sizeof counts / sizeof *counts };

/* Rows of x through the given ops, on the backend under test. Pages are other ones each time. */
static void rows_through(struct duo *d, const struct head *head, const struct mlp *mlp,
                         const float *x, int rows, float *out)
{
    struct backend *be = d->be[DEV];
    struct plan p;
    struct error err = {0};
    plan_rows(&p, &d->s, rows);
    p.b.kv = d->kv[DEV];
    be->ops->begin(be, &p.b);
    be->ops->stream->put(be, x, rows);
    if (mlp)
        be->ops->mlp(be, mlp, 0);
    be->ops->head(be, head);
    fail_if(!be->ops->end(be, NULL, &err), err.msg);
    logits_get(d, DEV, rows, out);
    mem_free(p.pages);
}

/* `rows` rows at once, then fewer of them, from somewhere in the middle on. */
static void check_rows(struct duo *d, const struct head *head, const struct mlp *mlp, int rows,
                       const char *what)
{
    int E = d->s.n_embd, V = d->s.n_vocab;
    float *x = random_floats((size_t)(E * rows), 1.0f);
    for (int t = 0; t < rows; t++) /* the scales of rows differ, too */
        for (int k = 0; k < E; k++)
            x[t * E + k] *= (float)(1 + t % 7);
    float *want = mem_alloc((size_t)(rows * V) * sizeof *want),
          *got = mem_alloc((size_t)(rows * V) * sizeof *got);
    struct backend *be = d->be[DEV];
    bool asked = be->deterministic;
    be->deterministic = true;
    rows_through(d, head, mlp, x, rows, want);
    for (int i = 0; i < N_COUNTS && counts[i] < rows; i++) {
        int n = counts[i], from = (rows - n) * (i % 3) / 2;
        if (SIM && n > 1 && n != 9 && n != 33)
            continue;
        rows_through(d, head, mlp, x + (size_t)(from * E), n, got);
        n_checks++;
        if (memcmp(got, want + (size_t)(from * V), (size_t)(n * V) * sizeof *got)) {
            n_failed++;
            printf("FAIL  %s: %d of %d rows give other bytes\n", what, n, rows);
        }
    }
    be->deterministic = asked;
    mem_free(x);
    mem_free(want);
    mem_free(got);
}

static void products(void)
{
    /* The first has long rows and few outputs: k is cut into parts, and the rows into several launches. */
    static const int shapes[][3] = {
        {4096, 240, 140}, {512, 560, 70}, {2304, 528, 40}, {1024, 4400, 20}, {512, 560, 300}};
    for (int j = 0; j < 5; j++) {
        int n_in = shapes[j][0], n_out = shapes[j][1], rows = shapes[j][2];
        struct duo d;
        head_open(&d, n_in, n_out);
        struct array gain = array_random(&d, (size_t)n_in, 1.0f);
        for (enum dtype t = DT_F32; t <= DT_GPTQ4; t++) {
            if (t == DT_Q1_0 || t == DT_Q2_0) /* as in test_linear */
                continue;
            bool usual = t == DT_Q4_K || t == DT_Q8_0 || t == DT_F16;
            bool some = usual || t == DT_Q6_K || t == DT_F32;
            if ((j != 1 && !some) || (light && (j > 2 || !j) && !usual) ||
                (SIM && (j > 2 || (!usual && (int)t % 3 != j))))
                continue;
            struct random_spec spec = {.n_in = n_in,
                                       .n_expert = 1,
                                       .n_seg = 2,
                                       .rows = {n_out - 48, 48},
                                       .type = {t, j == 2 && t == DT_Q4_K ? DT_Q6_K : t},
                                       .bias = t % 2,
                                       .group_len = 64};
            struct duo_weight w;
            char what[80];
            weight_new(&d, &w, WEIGHT_HEAD, &spec);
            struct head head = {.w = &w.on[DEV]};
            if (t % 3 == 0)
                head.norm = (struct norm){NORM_RMS, gain.on[DEV], NULL, 1e-6f};
            snprintf(what, sizeof what, "product %s %d x %d", dtype_name(t), n_in, n_out);
            check_rows(&d, &head, NULL, rows, what);
            weight_free(&d, &w);
        }
        array_free(&d, &gain);
        duo_close(&d);
    }
}

static void mlps(void)
{
    static const enum dtype types[][2] = {
        {DT_Q4_K, DT_Q6_K},   {DT_Q8_0, DT_Q8_0}, {DT_BF16, DT_F16},    {DT_F32, DT_Q5_1},
        {DT_MXFP4, DT_MXFP4}, {DT_Q4_K, DT_Q4_K}, {DT_GPTQ4, DT_GPTQ4}, {DT_F8_E4M3, DT_F8_E4M3}};
    for (int i = 0; i < 8; i++)
        for (int experts = 0; experts < 2; experts++) {
            struct dims s = base_dims();
            struct mlp_net n;
            int rows = SIM ? 40 : i == 0 || (i == 1 && !light) ? 300 : 70;
            s.other = (i + experts) % 3 == 2;
            s.fused = i % 2;
            s.n_ff = s.n_ff_exp = i == 4 ? 224 : 256;
            mlp_open(&n, &s, experts ? s.n_expert : 1, s.n_ff, types[i][0], types[i][1], DT_F32,
                     rows);
            check_rows(&n.d, &n.d.net[DEV].head, &n.d.layers[DEV][1].mlp, rows, n.what);
            mlp_close(&n);
        }
}

/* Attention of every kernel: heads, caches and options that differ. */
static void heads(void)
{
    static const struct {
        int H, K, D, page, window;
        enum dtype k, v;
        unsigned heads;
    } cases[] = {
        {8, 2, 128, 16, 0, DT_F16, DT_F16, 0},
        {4, 2, 128, 16, 24, DT_BF16, DT_BF16, 0},
        {8, 2, 64, 32, 24, DT_F16, DT_F16, 0},
        {8, 2, 64, 16, 20, DT_F16, DT_F16, HEADS_SINKS},
        {4, 2, 128, 16, 24, DT_F16, DT_F16, HEADS_SOFTCAP | HEADS_GATE | HEADS_TEMP},
        {8, 2, 128, 16, 24, DT_Q8_0, DT_Q8_0, 0},
        {4, 2, 64, 16, 20, DT_F8_E4M3, DT_Q4_0, HEADS_SINKS},
        {4, 1, 256, 16, 40, DT_F16, DT_F16, HEADS_K_IS_V},
        {4, 2, 32, 16, 24, DT_F32, DT_F32, HEADS_SINKS | HEADS_GATE},
        {4, 2, 64, 5, 0, DT_Q8_0, DT_Q8_0, HEADS_WHOLE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct dims s = base_dims();
        char what[120];
        s.n_heads = cases[i].H;
        s.n_kv_heads = cases[i].K;
        s.head_dim = s.n_rot = cases[i].D;
        s.b.page_len = cases[i].page;
        s.b.n_pages = 1024 / s.b.page_len;
        s.b.k_type = cases[i].k;
        s.b.v_type = cases[i].v;
        s.heads = cases[i].heads;
        snprintf(what, sizeof what, "H %d K %d D %d, page %d, %s/%s, window %d, parts %u",
                 s.n_heads, s.n_kv_heads, s.head_dim, s.b.page_len, dtype_name(s.b.k_type),
                 dtype_name(s.b.v_type), cases[i].window, s.heads);
        attention_case(&s, i % 3 != 0 || s.heads & HEADS_WHOLE, cases[i].window,
                       (const int[][2]){{0, 1}}, 1, false, what);
    }
}

static bool offered(void)
{
    struct duo d;
    head_open(&d, 256, 64);
    bool is = d.be[DEV]->invariance != INVARIANCE_NONE;
    duo_close(&d);
    return is;
}

void test_invariant(int part, int parts)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } list[] = {{"products", products}, {"mlps", mlps},
                {"heads", heads},       {"delta", cut_delta},
                {"mixers", cut_mixers}, {"latent", cut_latent},
                {"parts", cut_parts},   {"encoders", cut_encoders},
                {"model", cut_model}};
    for (int i = part; i < (int)(sizeof list / sizeof *list); i += parts) {
        char name[60];
        int before = n_checks;
        snprintf(name, sizeof name, "invariant: %s", list[i].name);
        if (!wanted(name))
            continue;
        if (!offered()) {
            printf("skipped: %s: %s has no --deterministic\n", name, backend_name);
            n_checks++;
            continue;
        }
        bytes_only = true;
        list[i].run();
        bytes_only = false;
        report(name, before);
    }
}
