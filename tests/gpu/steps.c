/*
 * Whole steps of a small model for test_ops.c, as the forward pass runs them, so that what is fused gets
 * fused: against the reference, recorded against op by op, and begun while the step before runs. And the
 * product in front of experts, which brings their router along.
 */
#include "base/mem.h"
#include "duo.h"
#include "sample/sampler.h"

#include <stdio.h>
#include <string.h>

/* A two-layer model run as the forward pass runs it, so that what is fused gets fused. */
struct mini {
    struct duo d;
    struct duo_weight emb, head, wqkv[2], wo[2], router, gate_up, down, ff_up, ff_down;
    struct array an[2], fn[2], qn, kn, norm;
    struct kv_layer kr[2], kg[2];
    struct array x, n, dd, q, a, xo, ao, logits;
};

/* Gate, up and down: of experts, or n_expert 1. */
static void gated_new(struct duo *d, int n_expert, int n_ff, enum dtype up_type,
                      enum dtype down_type, struct duo_weight *gate_up, struct duo_weight *down)
{
    int E = d->s.n_embd;
    struct random_spec up = {.n_in = E,
                             .n_expert = n_expert,
                             .n_seg = 2,
                             .rows = {n_ff, n_ff},
                             .type = {up_type, up_type}};
    struct random_spec back = {
        .n_in = n_ff, .n_expert = n_expert, .n_seg = 1, .rows = {E}, .type = {down_type}};
    weight_new(d, gate_up, &up);
    weight_new(d, down, &back);
}

static void experts_new(struct duo *d, enum dtype up_type, enum dtype down_type,
                        struct duo_weight *router, struct duo_weight *gate_up,
                        struct duo_weight *down)
{
    const struct shape *s = &d->s;
    struct random_spec spec = {
        .n_in = s->n_embd, .n_expert = 1, .n_seg = 1, .rows = {s->n_expert}, .type = {DT_F32}};
    weight_new(d, router, &spec);
    gated_new(d, s->n_expert, s->n_ff_exp, up_type, down_type, gate_up, down);
}

static void mini_open(struct mini *m, const struct shape *s)
{
    struct duo *d = &m->d;
    duo_open(d, s);
    int E = s->n_embd, H = s->n_heads * s->head_dim, K = s->n_kv_heads * s->head_dim;
    struct random_spec emb = {
        .n_in = E, .n_expert = 1, .n_seg = 1, .rows = {s->n_vocab}, .type = {DT_Q4_K}};
    weight_new(d, &m->emb, &emb);
    emb.type[0] = DT_Q6_K;
    weight_new(d, &m->head, &emb);
    for (int i = 0; i < 2; i++) {
        struct random_spec qkv = {.n_in = E,
                                  .n_expert = 1,
                                  .n_seg = 3,
                                  .rows = {H, K, K},
                                  .type = {DT_Q4_K, DT_Q4_K, i ? DT_Q6_K : DT_Q4_K}};
        struct random_spec wo = {
            .n_in = H, .n_expert = 1, .n_seg = 1, .rows = {E}, .type = {DT_Q4_K}};
        weight_new(d, &m->wqkv[i], &qkv);
        weight_new(d, &m->wo[i], &wo);
        m->an[i] = array_random(d, (size_t)E, 1.0f);
        m->fn[i] = array_random(d, (size_t)E, 1.0f);
        kv_new(d, &m->kr[i], &m->kg[i]);
    }
    experts_new(d, DT_Q4_K, DT_Q6_K, &m->router, &m->gate_up, &m->down);
    gated_new(d, 1, s->n_ff, DT_Q4_K, DT_Q6_K, &m->ff_up, &m->ff_down);
    m->norm = array_random(d, (size_t)E, 1.0f);
    m->qn = array_random(d, (size_t)s->head_dim, 1.0f);
    m->kn = array_random(d, (size_t)s->head_dim, 1.0f);
    size_t rows = (size_t)s->max_tokens;
    m->x = array_new(d, rows * (size_t)E);
    m->n = array_new(d, rows * (size_t)E);
    m->dd = array_new(d, rows * (size_t)E);
    m->q = array_new(d, rows * (size_t)H);
    m->a = array_new(d, rows * (size_t)H);
    m->xo = array_new(d, rows * (size_t)E);
    m->ao = array_new(d, rows * (size_t)H);
    m->logits = array_new(d, rows * (size_t)s->n_vocab);
}

static void mini_close(struct mini *m)
{
    struct duo *d = &m->d;
    struct duo_weight *ws[] = {&m->emb,   &m->head,  &m->wqkv[0], &m->wqkv[1],
                               &m->wo[0], &m->wo[1], &m->router,  &m->gate_up,
                               &m->down,  &m->ff_up, &m->ff_down};
    struct array *as[] = {&m->an[0], &m->an[1], &m->fn[0], &m->fn[1], &m->norm,
                          &m->qn,    &m->kn,    &m->x,     &m->n,     &m->dd,
                          &m->q,     &m->a,     &m->xo,    &m->ao,    &m->logits};
    for (size_t i = 0; i < sizeof ws / sizeof *ws; i++)
        weight_free(d, ws[i]);
    for (size_t i = 0; i < sizeof as / sizeof *as; i++)
        array_free(d, as[i]);
    for (int i = 0; i < 2; i++)
        kv_free(d, &m->kr[i], &m->kg[i]);
    duo_close(d);
}

/* The forward pass on one of the two backends; layer 0 is dense, layer 1 has experts. */
static void mini_ops(struct mini *m, bool gpu, const struct batch *b)
{
    struct backend *be = gpu ? m->d.gpu : m->d.ref;
    const struct backend_ops *op = be->ops;
    const struct shape *s = &m->d.s;
#define ON(arr)   (gpu ? (arr).gpu : (arr).ref)
#define WEIGHT(w) (gpu ? &(w).gpu : &(w).ref)
    float *x = ON(m->x), *n = ON(m->n), *a = ON(m->a), *dd = ON(m->dd), *d = NULL;
    int rows = b->n_tokens;
    op->embed(be, WEIGHT(m->emb), x);
    for (int i = 0; i < 2; i++) {
        struct attn_layer l = {WEIGHT(m->wqkv[i]), ON(m->qn), ON(m->kn), gpu ? m->kg[i] : m->kr[i],
                               0};
        op->add_norm(be, x, d, ON(m->an[i]), n, rows);
        op->attn_in(be, &l, n, ON(m->q));
        op->attention(be, &l, ON(m->q), a);
        if (i == 1) {
            op->gather(be, x, ON(m->xo), s->n_embd);
            op->gather(be, a, ON(m->ao), s->n_heads * s->head_dim);
            x = ON(m->xo);
            a = ON(m->ao);
            rows = b->n_out;
        }
        d = dd;
        op->linear(be, WEIGHT(m->wo[i]), a, d, rows);
        op->add_norm(be, x, d, ON(m->fn[i]), n, rows);
        if (i == 0)
            op->ffn(be, WEIGHT(m->ff_up), WEIGHT(m->ff_down), n, d, rows);
        else {
            struct moe_layer moe = {WEIGHT(m->router), WEIGHT(m->gate_up), WEIGHT(m->down)};
            op->moe(be, &moe, n, d, rows);
        }
    }
    op->add_norm(be, x, d, ON(m->norm), n, rows);
    op->linear(be, WEIGHT(m->head), n, ON(m->logits), rows);
    op->sample(be, ON(m->logits));
}

/* The step recorded under its number of sequences, launched and not waited for. */
static void launch_step(struct mini *m, const struct batch *b)
{
    struct backend *gpu = m->d.gpu;
    gpu->ops->begin(gpu, b);
    if (!gpu->ops->replay(gpu, (uint64_t)b->n_seqs)) {
        gpu->ops->record(gpu, (uint64_t)b->n_seqs);
        mini_ops(m, true, b);
    }
    gpu->ops->launch(gpu);
}

/* A step begun while the one before it runs, with the tokens that one will choose, computes what it
 * does when it is given those tokens. */
static void check_ahead(struct mini *m, struct plan *p, const char *name, float *fed, float *told)
{
    struct backend *gpu = m->d.gpu;
    struct error err = {0};
    int32_t first[512], second[512], again[512], pos[512], slot[512], kv_len[130], next[512];
    struct batch b = p->b;
    size_t n = (size_t)(b.n_out * m->d.s.n_vocab);
    struct sampler *samplers[512];
    for (int i = 0; i < b.n_tokens; i++) {
        bool grows = (p->pos[i] + 1) % m->d.s.page_len != 0; /* else it would need a page */
        pos[i] = p->pos[i] + grows;
        slot[i] = p->slot[i] + grows;
        kv_len[i] = p->kv_len[i] + grows;
        next[i] = -1 - i;
        samplers[i] = p->b.samplers[0];
    }
    p->b.samplers = b.samplers = samplers;
    b.tokens = next;
    b.pos = pos;
    b.slot = slot;
    b.kv_len = kv_len;
    poison(&m->d, &m->logits);
    launch_step(m, &p->b);
    launch_step(m, &b);
    fail_if(!gpu->ops->end(gpu, first, &err), err.msg);
    fail_if(!gpu->ops->end(gpu, second, &err), err.msg);
    gpu->ops->copy_out(gpu, fed, m->logits.gpu, n * sizeof(float));
    b.tokens = first;
    poison(&m->d, &m->logits);
    launch_step(m, &b);
    fail_if(!gpu->ops->end(gpu, again, &err), err.msg);
    gpu->ops->copy_out(gpu, told, m->logits.gpu, n * sizeof(float));
    n_checks++;
    if (memcmp(fed, told, n * sizeof(float)) ||
        memcmp(second, again, (size_t)b.n_out * sizeof *again)) {
        n_failed++;
        printf("FAIL  %s: a step begun ahead differs\n", name);
    }
}

void test_forward(void)
{
    int before = n_checks;
    if (!wanted("forward, replay"))
        return;
    struct shape s = base_shape();
    s.n_embd = 512;
    s.head_dim = 128;
    s.n_heads = 8;
    s.n_kv_heads = 1;
    s.n_rot = 128;
    s.attn_scale = 0.088388f;
    s.n_pages = 120;
    struct mini *m = mem_zalloc(1, sizeof *m);
    mini_open(m, &s);
    struct duo *d = &m->d;
    struct sample_params greedy = {.temp = 0, .top_p = 1, .repeat_penalty = 1};
    struct sample_params warm = {
        .temp = 0.9f, .top_k = 5, .top_p = 1, .repeat_penalty = 1, .seed = 7};
    struct sampler *sg = sampler_new(&greedy, s.n_vocab), *sw = sampler_new(&warm, s.n_vocab);
    static const int three[][2] = {{60, 1}, {130, 1}, {0, 1}};
    static const int one[][2] = {{77, 1}}, five[][2] = {{1, 1}, {30, 1}, {0, 1}, {200, 1}, {64, 1}};
    static const int mixed[][2] = {{12, 1}, {0, 6}, {4, 1}},
                     large[][2] = {{3, 1}, {0, 41}, {20, 3}},
                     wide[][2] = {{3, 1}, {0, 200}, {20, 60}};
    static const int twelve[][2] = {{1, 1}, {2, 1}, {3, 1},  {40, 1}, {50, 1}, {60, 1},
                                    {7, 1}, {8, 1}, {90, 1}, {10, 1}, {11, 1}, {12, 1}};
    const struct {
        const char *name;
        const int (*seqs)[2];
        int n;
    } runs[] = {{"1 decode", one, 1},        {"5 decodes", five, 5},
                {"mixed, 8 rows", mixed, 3}, {"mixed, 45 rows", large, 3},
                {"12 decodes", twelve, 12},  {"3 decodes", three, 3},
                {"mixed, 261 rows", wide, 3}};
    float *eager = mem_alloc(m->logits.n * sizeof(float));
    float *again = mem_alloc(m->logits.n * sizeof(float));
    for (int r = 0; r < 7; r++) {
        struct plan p;
        plan_make(&p, &s, runs[r].seqs, runs[r].n, false);
        struct sampler *samplers[512] = {0};
        for (int i = 0; i < p.b.n_out; i++)
            samplers[i] = i == 2 ? sw : i == 3 ? NULL : sg;
        p.b.samplers = samplers;
        int32_t rt[512], gt[512];
        size_t n = (size_t)(p.b.n_out * s.n_vocab);
        char what[120];
        poison(d, &m->logits);
        struct batch plain = p.b; /* the reference's own tokens are not looked at */
        plain.samplers = NULL;
        d->ref->ops->begin(d->ref, &plain);
        d->gpu->ops->begin(d->gpu, &p.b);
        mini_ops(m, false, &p.b);
        mini_ops(m, true, &p.b);
        end(d, rt, gt);
        d->gpu->ops->copy_out(d->gpu, eager, m->logits.gpu, n * sizeof(float));
        /* Two experts of nearly the same weight can change places in a row: rounding decides. */
        int excused = p.b.n_out / 6;
        for (int i = 0; i < p.b.n_out; i++) {
            const float *row = eager + (size_t)i * (size_t)s.n_vocab;
            const float *want = m->logits.ref + (size_t)i * (size_t)s.n_vocab;
            snprintf(what, sizeof what, "logits %d of %s", i, runs[r].name);
            if (excused && distance(row, want, (size_t)s.n_vocab) > 4e-3 &&
                distance(row, want, (size_t)s.n_vocab) < 0.8)
                excused--;
            else
                check_close(what, row, want, (size_t)s.n_vocab, 4e-3);
        }
        for (int i = 0; i < p.b.n_out; i++) {
            /* what was picked follows from the GPU's own logits */
            int best = 0;
            const float *row = eager + (size_t)i * (size_t)s.n_vocab;
            for (int j = 1; j < s.n_vocab; j++)
                best = row[j] > row[best] ? j : best;
            n_checks++;
            bool ok = samplers[i] == NULL ? gt[i] == -1
                      : samplers[i] == sg ? gt[i] == best
                                          : gt[i] >= 0;
            if (!ok) {
                n_failed++;
                printf("FAIL  token %d of %s is %d, not %d\n", i, runs[r].name, gt[i], best);
            }
        }
        if (p.b.n_decode != p.b.n_seqs) {
            mem_free(p.pages);
            continue;
        }
        /* The same step recorded, replayed, and replayed with longer sequences. */
        for (int round = 0; round < 3; round++) {
            if (round == 2) {
                for (int i = 0; i < p.b.n_tokens; i++) {
                    if ((p.pos[i] + 1) % s.page_len == 0)
                        continue; /* would need a page */
                    p.pos[i]++;
                    p.slot[i]++;
                    p.kv_len[i]++;
                    p.tokens[i] = (p.tokens[i] + 1) % s.n_vocab;
                }
                d->gpu->ops->begin(d->gpu, &p.b);
                mini_ops(m, true, &p.b);
                struct error err = {0};
                fail_if(!d->gpu->ops->end(d->gpu, gt, &err), err.msg);
                d->gpu->ops->copy_out(d->gpu, eager, m->logits.gpu, n * sizeof(float));
            }
            poison(d, &m->logits);
            struct error err = {0};
            d->gpu->ops->begin(d->gpu, &p.b);
            bool replayed = d->gpu->ops->replay(d->gpu, (uint64_t)p.b.n_seqs);
            if (!replayed) {
                d->gpu->ops->record(d->gpu, (uint64_t)p.b.n_seqs);
                mini_ops(m, true, &p.b);
            }
            fail_if(!d->gpu->ops->end(d->gpu, rt, &err), err.msg);
            d->gpu->ops->copy_out(d->gpu, again, m->logits.gpu, n * sizeof(float));
            n_checks += 3;
            if (replayed != (round > 0)) {
                n_failed++;
                printf("FAIL  %s round %d: replayed is %d\n", runs[r].name, round, replayed);
            }
            if (memcmp(eager, again, n * sizeof(float))) {
                n_failed++;
                snprintf(what, sizeof what, "replay of %s, round %d", runs[r].name, round);
                check_close(what, again, eager, n, 0);
            }
            for (int i = 0; i < p.b.n_out; i++)
                if (samplers[i] == sg && rt[i] != gt[i]) {
                    n_failed++;
                    printf("FAIL  %s round %d: token %d is %d, not %d\n", runs[r].name, round, i,
                           rt[i], gt[i]);
                }
        }
        check_ahead(m, &p, runs[r].name, eager, again);
        for (int i = 0; i < 2; i++) { /* rounds the reference did not take part in */
            d->gpu->ops->copy_out(d->gpu, m->kr[i].k, m->kg[i].k, kv_bytes(&s));
            d->gpu->ops->copy_out(d->gpu, m->kr[i].v, m->kg[i].v, kv_bytes(&s));
        }
        mem_free(p.pages);
    }
    mem_free(eager);
    mem_free(again);
    sampler_free(sg);
    sampler_free(sw);
    mini_close(m);
    mem_free(m);
    report("forward, replay", before);
}

/* One row: output projection, norm and experts, layer after layer of one step, of a residual of about
 * `size`. What is fused must not show: `look` reads the product before the norm, `apart` has the
 * experts write elsewhere. */
static void routed_case(const struct shape *s, const enum dtype *types, float size, int layers,
                        bool look, bool apart)
{
    struct duo d;
    duo_open(&d, s);
    int E = s->n_embd, H = s->n_heads * s->head_dim;
    struct random_spec out = {
        .n_in = H, .n_expert = 1, .n_seg = 1, .rows = {E}, .type = {types[0]}, .group_len = 128};
    struct duo_weight wo, wr, wu, wd;
    weight_new(&d, &wo, &out);
    experts_new(&d, types[1], types[2], &wr, &wu, &wd);
    struct array x = array_random(&d, (size_t)E, size), a = array_random(&d, (size_t)H, size);
    struct array gain = array_random(&d, (size_t)E, 1.0f), n = array_new(&d, (size_t)E);
    struct array y = array_new(&d, (size_t)E), other = array_new(&d, (size_t)E);
    const struct backend_ops *rop = d.ref->ops, *gop = d.gpu->ops;
    struct plan p;
    char what[160];
    snprintf(what, sizeof what, "%d layers of %s/%s/%s, %d of %d experts, size %g%s%s", layers,
             dtype_name(types[0]), dtype_name(types[1]), dtype_name(types[2]), s->n_expert_used,
             s->n_expert, (double)size, look ? ", looked at" : "", apart ? ", apart" : "");
    plan_make(&p, s, (const int[][2]){{0, 1}}, 1, false);
    float *from = mem_alloc(x.n * sizeof *from), *first = mem_alloc(x.n * sizeof *first);
    float *again = mem_alloc(x.n * sizeof *again);
    memcpy(from, x.ref, x.n * sizeof *from);
    /* Op by op; as it is recorded; replayed twice, which finds what others left behind. */
    for (int step = 0; step < 4; step++) {
        struct moe_layer lr = {&wr.ref, &wu.ref, &wd.ref}, lg = {&wr.gpu, &wu.gpu, &wd.gpu};
        struct array *to = apart ? &other : &y;
        struct error err = {0};
        d.ref->ops->begin(d.ref, &p.b);
        d.gpu->ops->begin(d.gpu, &p.b);
        array_set(&d, &x, from);
        for (int i = 0; i < layers; i++) {
            rop->linear(d.ref, &wo.ref, a.ref, y.ref, 1);
            rop->add_norm(d.ref, x.ref, y.ref, gain.ref, n.ref, 1);
            rop->moe(d.ref, &lr, n.ref, to->ref, 1);
            rop->add_norm(d.ref, x.ref, to->ref, gain.ref, n.ref, 1);
        }
        bool replayed = step && gop->replay(d.gpu, 7);
        if (step && !replayed)
            gop->record(d.gpu, 7);
        for (int i = 0; i < layers && !replayed; i++) {
            gop->linear(d.gpu, &wo.gpu, a.gpu, y.gpu, 1);
            if (look && !step) {
                rop->linear(d.ref, &wo.ref, a.ref, y.ref, 1);
                array_check(&d, what, &y, y.n, TOL * 1.5);
            }
            gop->add_norm(d.gpu, x.gpu, y.gpu, gain.gpu, n.gpu, 1);
            gop->moe(d.gpu, &lg, n.gpu, to->gpu, 1);
            gop->add_norm(d.gpu, x.gpu, to->gpu, gain.gpu, n.gpu, 1);
        }
        fail_if(!gop->end(d.gpu, NULL, &err), err.msg);
        rop->end(d.ref, NULL, &err);
        if (apart)
            array_check(&d, what, &y, y.n, TOL * 1.5);
        array_check(&d, what, &x, x.n, TOL * 2);
        array_check(&d, what, &n, n.n, TOL * 2);
        gop->copy_out(d.gpu, step ? again : first, x.gpu, x.n * sizeof *again);
        n_checks++;
        if (step && (replayed != (step > 1) || memcmp(first, again, x.n * sizeof *again))) {
            n_failed++;
            printf("FAIL  %s: step %d %s\n", what, step,
                   replayed != (step > 1) ? "is not what was recorded" : "differs from the first");
        }
    }
    mem_free(from);
    mem_free(first);
    mem_free(again);
    struct array *arrays[] = {&x, &a, &gain, &n, &y, &other};
    struct duo_weight *weights[] = {&wo, &wr, &wu, &wd};
    for (int i = 0; i < 6; i++)
        array_free(&d, arrays[i]);
    for (int i = 0; i < 4; i++)
        weight_free(&d, weights[i]);
    mem_free(p.pages);
    duo_close(&d);
}

void test_routed(void)
{
    int before = n_checks;
    if (!wanted("output, experts"))
        return;
    const enum dtype types[][3] = {{DT_Q4_K, DT_Q4_K, DT_Q6_K},
                                   {DT_Q6_K, DT_Q4_K, DT_Q4_K},
                                   {DT_Q8_0, DT_Q8_0, DT_Q8_0},
                                   {DT_Q5_K, DT_Q4_K, DT_Q4_K}};
    /* The last two do not go by way of sums. */
    const int experts[] = {16, SIM ? 64 : 128, 40, 18, SIM ? 132 : 256};
    const float size[] = {1.0f, 3e-3f, 3e3f};
    for (int i = 0; i < 10; i++) {
        struct shape s = base_shape();
        if (SIM && (i == 4 || i == 8))
            continue;
        s.n_embd = i % 3 == 2 ? 768 : 512;
        s.n_heads = i == 3 ? 4 : 16;
        s.n_expert = experts[i % 5];
        s.n_expert_used = i % 4 == 3 ? 10 : 8;
        s.n_ff_exp = 256;
        s.norm_topk = i != 2;
        routed_case(&s, types[i % 4], size[i % 3], 1 + i % 3, i == 6, i == 7);
    }
    report("output, experts", before);
}
