/*
 * Adapters: two layers, one dense and one of experts, from the tokens to the logits, with adapters on some
 * or all weights, rows of different adapters, several and none in a step, against the reference. Where a
 * backend records steps, one that was recorded is replayed with other adapters on other rows. Steps
 * without adapters are those of a network that has none, byte for byte.
 */
#include "duo.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

enum { N_ADAPTERS = 4, LAYERS = 2, N_WEIGHTS = 13, RANK = 48 };

struct net {
    struct duo d;
    struct duo_weight emb, head, wqkv[LAYERS], wo[LAYERS];
    struct array norm, qn, kn, an[LAYERS], fn[LAYERS];
    struct duo_mlp mlp[LAYERS];
    struct duo_weight *adapted[N_WEIGHTS]; /* those that adapters may change */
    int n_adapted;
};

static struct norm rms(const struct array *gain, int side)
{
    return (struct norm){NORM_RMS, gain->on[side], NULL, 1e-6f};
}

static void take(struct net *n, struct duo_weight *w)
{
    EACH(side)
    w->on[side].lora = mem_zalloc(LORA_MAX_ADAPTERS, sizeof(void *));
    n->adapted[n->n_adapted++] = w;
}

static void take_mlp(struct net *n, struct duo_mlp *m)
{
    take(n, &m->gate_up);
    take(n, &m->down);
    if (m->experts)
        take(n, &m->router);
    if (m->experts && m->other) {
        take(n, &m->shared_up);
        take(n, &m->shared_down);
        take(n, &m->gate);
    }
}

static void net_open(struct net *n, const struct dims *s, enum dtype type)
{
    struct duo *d = &n->d;
    int E = s->n_embd, H = s->n_heads * s->head_dim, K = s->n_kv_heads * s->head_dim;
    struct random_spec emb = {
        .n_in = E, .n_expert = 1, .n_seg = 1, .rows = {s->n_vocab}, .type = {type}};
    duo_open(d, s, LAYERS);
    weight_new(d, &n->emb, WEIGHT_EMBED, &emb);
    weight_new(d, &n->head, WEIGHT_HEAD, &emb);
    n->norm = array_random(d, (size_t)E, 1.0f);
    n->qn = array_random(d, (size_t)s->head_dim, 1.0f);
    n->kn = array_random(d, (size_t)s->head_dim, 1.0f);
    for (int i = 0; i < LAYERS; i++) {
        struct random_spec qkv = {
            .n_in = E, .n_expert = 1, .n_seg = 3, .rows = {H, K, K}, .type = {type, type, type}};
        struct random_spec wo = {.n_in = H, .n_expert = 1, .n_seg = 1, .rows = {E}, .type = {type}};
        weight_new(d, &n->wqkv[i], WEIGHT_LINEAR, &qkv);
        weight_new(d, &n->wo[i], WEIGHT_LINEAR, &wo);
        n->an[i] = array_random(d, (size_t)E, 1.0f);
        n->fn[i] = array_random(d, (size_t)E, 1.0f);
        mlp_new(d, i, &n->mlp[i], i ? s->n_expert : 1, i ? s->n_ff_exp : s->n_ff, type, type,
                DT_F32);
        kv_new(d, i);
    }
    for (int i = 0; i < LAYERS && s->b.lora_rank; i++) {
        take(n, &n->wqkv[i]);
        take(n, &n->wo[i]);
        take_mlp(n, &n->mlp[i]);
    }
    if (s->b.lora_rank)
        take(n, &n->head);
    EACH(side)
    {
        d->net[side].embed.tokens = &n->emb.on[side];
        d->net[side].head = (struct head){.norm = rms(&n->norm, side), .w = &n->head.on[side]};
        for (int i = 0; i < LAYERS; i++) {
            struct layer *l = &d->layers[side][i];
            l->mixer.block.in = rms(&n->an[i], side);
            l->mlp.block.in = rms(&n->fn[i], side);
            l->mixer.attention.wqkv = &n->wqkv[i].on[side];
            l->mixer.attention.wo = &n->wo[i].on[side];
            l->mixer.attention.q_norm = rms(&n->qn, side); /* scores stay small */
            l->mixer.attention.k_norm = rms(&n->kn, side);
        }
    }
    duo_prepare(d);
}

static void net_close(struct net *n)
{
    struct duo *d = &n->d;
    for (int i = 0; i < n->n_adapted; i++)
        EACH(side)
        {
            void **lora = n->adapted[i]->on[side].lora;
            for (int a = 0; a < N_ADAPTERS; a++)
                if (lora[a])
                    d->be[side]->ops->adapters->unadapt(d->be[side], lora[a]);
            mem_free(lora);
            n->adapted[i]->on[side].lora = NULL;
        }
    weight_free(d, &n->emb);
    weight_free(d, &n->head);
    array_free(d, &n->norm);
    array_free(d, &n->qn);
    array_free(d, &n->kn);
    for (int i = 0; i < LAYERS; i++) {
        weight_free(d, &n->wqkv[i]);
        weight_free(d, &n->wo[i]);
        mlp_free(d, &n->mlp[i]);
        array_free(d, &n->an[i]);
        array_free(d, &n->fn[i]);
        kv_free(d, i);
    }
    duo_close(d);
}

/* A change of w of rank `rank` in each of its parts: the whole, or three runs of rows of which the last has
 * no rank of its own but that of the one before. Every fifth expert has none. */
static struct lora *change_random(const struct weight *w, int rank, bool parts)
{
    struct lora *l = lora_new(w->n_in, w->n_out, w->n_expert);
    int third = w->n_out / 3;
    for (int e = 0; e < w->n_expert; e++) {
        struct lora_matrix *m = &l->of[e];
        if (e % 5 == 4)
            continue;
        m->n_parts = parts && third ? 3 : 1;
        m->rank = m->n_parts == 3 ? 2 * rank : rank;
        m->a = random_floats((size_t)m->rank * (size_t)w->n_in, 0.05f);
        for (int i = 0; i < m->n_parts; i++) {
            struct lora_part *p = &m->parts[i];
            *p = (struct lora_part){.first = i * third,
                                    .n = i == m->n_parts - 1 ? w->n_out - i * third : third,
                                    .at = i ? m->rank - rank : 0,
                                    .rank = rank};
            p->b = random_floats((size_t)p->n * (size_t)rank, 0.1f);
        }
    }
    return l;
}

/* Adapter a of every weight; or, of some alone, every third. */
static void adapt(struct net *n, int a, int rank, bool some)
{
    struct error err = {0};
    for (int i = 0; i < n->n_adapted; i++) {
        if (some && (i + a) % 3)
            continue;
        struct lora *l = change_random(&n->adapted[i]->on[REF], rank, i % 2 == 0);
        EACH(side)
        {
            struct weight *w = &n->adapted[i]->on[side];
            w->lora[a] = n->d.be[side]->ops->adapters->adapt(n->d.be[side], w, l, &err);
            fail_if(!w->lora[a], err.msg);
        }
        lora_free(l);
    }
}

static void ops(struct net *n, int side)
{
    struct backend *be = n->d.be[side];
    be->ops->embed(be, &n->d.net[side].embed);
    for (int i = 0; i < LAYERS; i++) {
        be->ops->mixer(be, &n->d.layers[side][i].mixer, i);
        be->ops->mlp(be, &n->d.layers[side][i].mlp, i);
    }
    be->ops->head(be, &n->d.net[side].head);
}

/* Which adapters sequence i uses in a round: one of them, a second one too, or none. same: the first is the same for all. */
static void use_adapters(struct plan *p, struct lora_use *uses, int round, bool same)
{
    p->b.loras = uses;
    p->b.n_loras = 0;
    for (int a = 0; a < N_ADAPTERS; a++)
        for (int i = 0; i < p->b.n_seqs; i++) {
            int mine = same ? 0 : (i + round) % (N_ADAPTERS + 1),
                also = i % 3 == 1 ? (mine + 2) % 4 : -1;
            if (mine != a && (also != a || mine == N_ADAPTERS))
                continue;
            uses[p->b.n_loras++] = (struct lora_use){
                a, p->q_start[i], p->q_start[i + 1] - p->q_start[i], a % 2 ? 0.7f : 1.0f};
        }
}

/* Other tokens where rounding would choose the experts: as in steps.c. */
static void decide(struct net *n, struct plan *p)
{
    struct backend *ref = n->d.be[REF];
    for (int tries = 0, close = 1; close; tries++) {
        struct error err = {0};
        fail_if(tries == 100, "every token is close to a tie between experts");
        p->b.kv = n->d.kv[REF];
        ref->ops->begin(ref, &p->b);
        ops(n, REF);
        fail_if(!ref->ops->end(ref, NULL, &err), err.msg);
        close = 0;
        for (int i = 0; i < p->b.n_out; i++) {
            int row = p->out_rows[i];
            if (backend_ref_gap(ref, row) > 6 * product_tol)
                continue;
            close++;
            p->tokens[row] = (int32_t)(random_u64(&rng) % (uint64_t)n->d.s.n_vocab);
        }
    }
}

/* The step on both sides; recorded and replayed where the backend does that, and it only decodes. */
static void check_step(struct net *n, struct plan *p, const char *name, bool may_record, int round)
{
    struct duo *d = &n->d;
    char what[160];
    for (int turn = 0; turn < (may_record ? 2 : 1); turn++) {
        snprintf(what, sizeof what, "%s, round %d%s", name, round, turn ? ", recorded" : "");
        logits_poison(d, p->b.n_out);
        EACH(side)
        {
            struct backend *be = d->be[side];
            p->b.kv = d->kv[side];
            be->ops->begin(be, &p->b);
            bool replayed = side == DEV && turn && be->ops->replay(be, (uint64_t)p->b.n_seqs);
            if (!replayed)
                ops(n, side);
            n_checks++;
            if (side == DEV && turn && replayed != (round > 0)) {
                n_failed++;
                printf("FAIL  %s: replayed is %d\n", what, replayed);
            }
        }
        end(d, NULL, NULL);
        logits_check(d, what, p->b.n_out, 6 * product_tol);
    }
}

/* Every sequence of a step of decodes alone, with the adapters it had in company. */
static void check_alone(struct net *n, struct plan *p, const char *name)
{
    struct backend *be = n->d.be[DEV];
    struct error err = {0};
    size_t V = (size_t)n->d.s.n_vocab;
    float *together = mem_alloc((size_t)p->b.n_out * V * sizeof *together);
    float *alone = mem_alloc(V * sizeof *alone);
    char what[160];
    logits_get(&n->d, DEV, p->b.n_out, together);
    for (int i = 0; i < p->b.n_seqs; i++) {
        static const int32_t start[] = {0, 1}, row[] = {0};
        struct lora_use uses[N_ADAPTERS];
        struct batch b = {.n_tokens = 1,
                          .n_seqs = 1,
                          .n_decode = 1,
                          .n_out = 1,
                          .max_pages = p->b.max_pages,
                          .tokens = p->tokens + i,
                          .pos = p->pos + i,
                          .slot = p->slot + i,
                          .q_start = start,
                          .kv_len = p->kv_len + i,
                          .pages = p->pages + (size_t)i * (size_t)p->b.max_pages,
                          .out_rows = row,
                          .kv = n->d.kv[DEV],
                          .loras = uses};
        for (int k = 0; k < p->b.n_loras; k++)
            if (p->b.loras[k].first == i) {
                uses[b.n_loras] = p->b.loras[k];
                uses[b.n_loras++].first = 0;
            }
        be->ops->begin(be, &b);
        ops(n, DEV);
        fail_if(!be->ops->end(be, NULL, &err), err.msg);
        logits_get(&n->d, DEV, 1, alone);
        snprintf(what, sizeof what, "%s, sequence %d alone", name, i);
        check_close(what, alone, together + (size_t)i * V, V, 4 * product_tol);
    }
    mem_free(together);
    mem_free(alone);
}

/* Logits of the step without adapters, as bytes. */
static float *plain_logits(struct net *n, struct plan *p, const struct kv_layer *kv)
{
    struct backend *be = n->d.be[DEV];
    struct error err = {0};
    float *rows = mem_alloc((size_t)(p->b.n_out * n->d.s.n_vocab) * sizeof *rows);
    struct batch b = p->b;
    b.n_loras = 0;
    b.kv = kv;
    be->ops->begin(be, &b);
    ops(n, DEV);
    fail_if(!be->ops->end(be, NULL, &err), err.msg);
    logits_get(&n->d, DEV, b.n_out, rows);
    return rows;
}

static void check_plain(struct net *with, struct net *without, struct plan *p, const char *name)
{
    const struct kv_layer *kv = with->d.kv[DEV]; /* both on one device */
    float *a = plain_logits(with, p, kv), *b = plain_logits(without, p, kv);
    n_checks++;
    if (memcmp(a, b, (size_t)(p->b.n_out * with->d.s.n_vocab) * sizeof *a)) {
        n_failed++;
        printf("FAIL  %s: not the bytes of a network that knows no adapters\n", name);
    }
    mem_free(a);
    mem_free(b);
}

static void lora_case(const struct dims *s, enum dtype type, const char *of)
{
    static const int one[][2] = {{77, 1}}, five[][2] = {{1, 1}, {30, 1}, {0, 1}, {200, 1}, {64, 1}};
    static const int twelve[][2] = {{1, 1}, {2, 1}, {3, 1},  {40, 1}, {50, 1}, {60, 1},
                                    {7, 1}, {8, 1}, {90, 1}, {10, 1}, {11, 1}, {12, 1}};
    static const int mixed[][2] = {{12, 1}, {0, 6}, {4, 1}},
                     large[][2] = {{3, 1}, {0, 41}, {20, 9}},
                     wide[][2] = {{3, 1}, {0, 200}, {20, 60}};
    static const struct {
        const char *name;
        const int (*seqs)[2];
        int n;
        bool rows_are_drafts; /* few per sequence: where drafts are verified, such a step repeats */
    } runs[] = {{"1 decode", one, 1, false},         {"5 decodes", five, 5, false},
                {"12 decodes", twelve, 12, false},   {"mixed, 8 rows", mixed, 3, true},
                {"mixed, 51 rows", large, 3, false}, {"mixed, 261 rows", wide, 3, false}};
    struct net *n = mem_zalloc(1, sizeof *n), *bare = mem_zalloc(1, sizeof *bare);
    struct dims none = *s;
    uint64_t seed = rng;
    none.b.lora_rank = 0;
    net_open(n, s, type);
    rng = seed; /* the same weights */
    net_open(bare, &none, type);
    adapt(n, 0, 16, false);
    adapt(n, 1, 5, true);
    const int n_runs = light > 2 ? 4 - (type != DT_Q4_K) : light || small ? 5 : 6;
    for (int r = 0; r < n_runs; r++) {
        struct plan p;
        struct lora_use uses[64];
        char name[100];
        plan_make(&p, s, runs[r].seqs, runs[r].n, false);
        snprintf(name, sizeof name, "%s, %s", of, runs[r].name);
        bool decodes = p.b.n_decode == p.b.n_seqs;
        if (r == 1) { /* adapters that come when steps have been recorded */
            adapt(n, 2, 16, true);
            adapt(n, 3, 24, false);
        }
        for (int round = 0; round < (r < 5 ? 2 : 1); round++) {
            bool drafts = runs[r].rows_are_drafts && s->b.drafts;
            /* drafts: replayed with the rows in more groups than when recorded */
            use_adapters(&p, uses, r ? round : 1 - round, drafts && !round);
            decide(n, &p);
            /* with one row it is an adapter of more weights than the first: recorded anew */
            check_step(n, &p, name, (decodes || drafts) && n->d.be[DEV]->records, r ? round : 0);
        }
        if (decodes)
            check_alone(n, &p, name);
        check_plain(n, bare, &p, name);
        for (int i = 0; i < LAYERS; i++) /* the reference took no part in that */
            kv_copy_back(&n->d, i);
        mem_free(p.pages);
    }
    net_close(n);
    net_close(bare);
    mem_free(n);
    mem_free(bare);
}

void test_lora(int part, int parts)
{
    int before = n_checks;
    if (!wanted("adapters"))
        return;
    struct dims s = base_dims();
    struct duo d;
    duo_open(&d, &s, 1);
    bool lacks = !d.be[DEV]->ops->adapters;
    duo_close(&d);
    if (lacks) {
        printf("skipped: adapters: %s has none\n", backend_name);
        return;
    }
    s.n_embd = light || small ? 256 : 512;
    s.head_dim = 64;
    s.n_heads = 8;
    s.n_kv_heads = 2;
    s.n_rot = 64;
    s.b.n_pages = 120;
    s.b.lora_rank = RANK;
    s.b.drafts = true;
    if (part == 0)
        lora_case(&s, DT_Q4_K, "Q4_K");
    s.b.drafts = false;
    s.other = true;
    if (part == 1 % parts)
        lora_case(&s, DT_Q8_0, "Q8_0, biases, a shared expert");
    report("adapters", before);
}
