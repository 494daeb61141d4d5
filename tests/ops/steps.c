/*
 * Whole steps of small models for test_ops.c, as the forward pass runs them, so that what is fused gets
 * fused: against the reference, recorded against op by op, and begun while the step before runs. Steps that
 * keep their rows, and those of a block that drafts from them. Steps in halves. And layers of one row, where a backend
 * may join the output projection to the experts behind it.
 */
#include "base/mem.h"
#include "duo.h"
#include "sample/sampler.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A model of up to MAX_LAYERS layers; layer 0 may be dense, the others have experts. */
struct mini {
    struct duo d;
    int n_layers;
    struct duo_weight emb, head, wqkv[MAX_LAYERS], wo[MAX_LAYERS];
    struct duo_mlp mlp[MAX_LAYERS];
    struct array an[MAX_LAYERS], fn[MAX_LAYERS], qn, kn, norm;
    bool drafts; /* set before mini_open: the last layer is an MTP block's */
    int n_taps;  /* ... or of an EAGLE-3 head: the number of layers it reads */
    bool norms_taps, norms_residual, own_tokens;
    struct duo_weight own_emb, own_head; /* the head's, of fewer outputs */
    struct array tn;                     /* (n_taps, E) */
    struct duo_weight fc;
    struct array en, hn, gn; /* its norms */
};

static struct norm rms(const struct array *gain, int side)
{
    return (struct norm){NORM_RMS, gain->on[side], NULL, 1e-6f};
}

static int few_outputs(int n_vocab)
{
    return n_vocab / 3 + 5;
}

/* types: of the output projection, of gate and up, of down */
static void mini_open(struct mini *m, const struct dims *s, int n_layers, bool dense_first,
                      const enum dtype *types)
{
    struct duo *d = &m->d;
    duo_open(d, s, n_layers);
    m->n_layers = n_layers;
    int E = s->n_embd, H = s->n_heads * s->head_dim, K = s->n_kv_heads * s->head_dim;
    struct random_spec emb = {
        .n_in = E, .n_expert = 1, .n_seg = 1, .rows = {s->n_vocab}, .type = {DT_Q4_K}};
    weight_new(d, &m->emb, WEIGHT_EMBED, &emb);
    emb.type[0] = DT_Q6_K;
    weight_new(d, &m->head, WEIGHT_HEAD, &emb);
    m->norm = array_random(d, (size_t)E, 1.0f);
    m->qn = array_random(d, (size_t)s->head_dim, 1.0f);
    m->kn = array_random(d, (size_t)s->head_dim, 1.0f);
    for (int i = 0; i < n_layers; i++) {
        bool eagle = m->n_taps && i == n_layers - 1;
        struct random_spec qkv = {.n_in = eagle ? 2 * E : E,
                                  .n_expert = 1,
                                  .n_seg = 3,
                                  .rows = {H, K, K},
                                  .type = {DT_Q4_K, DT_Q4_K, i ? DT_Q6_K : DT_Q4_K}};
        struct random_spec wo = {
            .n_in = H, .n_expert = 1, .n_seg = 1, .rows = {E}, .type = {types[0]}};
        weight_new(d, &m->wqkv[i], WEIGHT_LINEAR, &qkv);
        weight_new(d, &m->wo[i], WEIGHT_LINEAR, &wo);
        m->an[i] = array_random(d, (size_t)E, 1.0f);
        m->fn[i] = array_random(d, (size_t)E, 1.0f);
        bool dense = (dense_first && i == 0) || eagle;
        mlp_new(d, i, &m->mlp[i], dense ? 1 : s->n_expert, dense ? s->n_ff : s->n_ff_exp, types[1],
                types[2], DT_F32);
        kv_new(d, i);
    }
    if (m->drafts) {
        struct random_spec fc = {.n_in = (m->n_taps ? m->n_taps : 2) * E,
                                 .n_expert = 1,
                                 .n_seg = 1,
                                 .rows = {E},
                                 .type = {types[0]}};
        weight_new(d, &m->fc, WEIGHT_LINEAR, &fc);
        m->en = array_random(d, (size_t)E, 1.0f);
        m->hn = array_random(d, (size_t)E, 1.0f);
        m->gn = array_random(d, (size_t)E, 1.0f);
    }
    if (m->norms_taps)
        m->tn = array_random(d, (size_t)(m->n_taps * E), 1.0f);
    if (m->own_tokens) {
        weight_new(d, &m->own_emb, WEIGHT_EMBED, &emb);
        emb.rows[0] = few_outputs(s->n_vocab);
        weight_new(d, &m->own_head, WEIGHT_HEAD, &emb);
    }
    EACH(side)
    {
        if (m->drafts)
            d->net[side].mtp =
                (struct mtp){.fc = &m->fc.on[side],
                             .embed_norm = rms(&m->en, side),
                             .hidden_norm = rms(&m->hn, side),
                             .head = {.norm = rms(&m->gn, side), .w = &m->head.on[side]}};
        struct mtp *mtp = &d->net[side].mtp;
        mtp->n_taps = m->n_taps;
        for (int k = 0; k < m->n_taps; k++)
            mtp->taps[k] = (k + 1) % (n_layers - 1);
        if (m->norms_taps)
            mtp->taps_norm = rms(&m->tn, side);
        mtp->norm_residual = m->norms_residual;
        if (m->own_tokens) {
            mtp->tokens = &m->own_emb.on[side];
            mtp->head.w = &m->own_head.on[side];
        }
        d->net[side].embed.tokens = &m->emb.on[side];
        d->net[side].head = (struct head){.norm = rms(&m->norm, side), .w = &m->head.on[side]};
        for (int i = 0; i < n_layers; i++) {
            struct layer *l = &d->layers[side][i];
            l->mixer.block.joined = m->n_taps && i == n_layers - 1;
            if (!l->mixer.block.joined)
                l->mixer.block.in = rms(&m->an[i], side);
            l->mlp.block.in = rms(&m->fn[i], side);
            l->mixer.attention.wqkv = &m->wqkv[i].on[side];
            l->mixer.attention.wo = &m->wo[i].on[side];
            l->mixer.attention.q_norm = rms(&m->qn, side);
            l->mixer.attention.k_norm = rms(&m->kn, side);
        }
    }
    duo_prepare(d);
}

static void mini_close(struct mini *m)
{
    struct duo *d = &m->d;
    weight_free(d, &m->emb);
    weight_free(d, &m->head);
    if (m->drafts) {
        weight_free(d, &m->fc);
        array_free(d, &m->en);
        array_free(d, &m->hn);
        array_free(d, &m->gn);
    }
    if (m->norms_taps)
        array_free(d, &m->tn);
    if (m->own_tokens) {
        weight_free(d, &m->own_emb);
        weight_free(d, &m->own_head);
    }
    array_free(d, &m->norm);
    array_free(d, &m->qn);
    array_free(d, &m->kn);
    for (int i = 0; i < m->n_layers; i++) {
        weight_free(d, &m->wqkv[i]);
        weight_free(d, &m->wo[i]);
        mlp_free(d, &m->mlp[i]);
        array_free(d, &m->an[i]);
        array_free(d, &m->fn[i]);
        kv_free(d, i);
    }
    duo_close(d);
}

/* Layers [0, n) on one of the two backends. */
static void mini_layers(struct mini *m, int side, int n)
{
    struct backend *be = m->d.be[side];
    for (int i = 0; i < n; i++) {
        be->ops->mixer(be, &m->d.layers[side][i].mixer, i);
        be->ops->mlp(be, &m->d.layers[side][i].mlp, i);
    }
}

/* The forward pass on one of them. */
static void mini_ops(struct mini *m, int side)
{
    struct backend *be = m->d.be[side];
    be->ops->embed(be, &m->d.net[side].embed);
    mini_layers(m, side, m->n_layers);
    be->ops->head(be, &m->d.net[side].head);
}

/* ... and the choice of tokens, which is never recorded. */
static void mini_step(struct mini *m, int side, struct sampler *const *samplers)
{
    struct backend *be = m->d.be[side];
    mini_ops(m, side);
    if (samplers)
        be->ops->sample(be, samplers);
}

/* The step recorded under its number of sequences, launched and not waited for. samplers NULL: tokens
 * are chosen later. */
static void launch_step(struct mini *m, struct batch *b, struct sampler *const *samplers)
{
    struct backend *be = m->d.be[DEV];
    b->kv = m->d.kv[DEV];
    be->ops->begin(be, b);
    if (!be->ops->replay(be, (uint64_t)b->n_seqs))
        mini_ops(m, DEV);
    be->ops->launch(be);
    if (samplers)
        be->ops->sample(be, samplers);
}

/* A step begun while the one before it runs, with the tokens that one will choose, computes what it
 * does when it is given those tokens. late: its own are chosen when the one before it has ended. */
static void check_ahead(struct mini *m, struct plan *p, const char *name, struct sampler *greedy,
                        bool late, float *fed, float *told)
{
    struct backend *be = m->d.be[DEV];
    struct error err = {0};
    int32_t first[512], second[512], again[512], pos[512], slot[512], kv_len[130], next[512];
    struct batch b = p->b;
    size_t n = (size_t)(b.n_out * m->d.s.n_vocab);
    struct sampler *samplers[512];
    for (int i = 0; i < b.n_tokens; i++) {
        bool grows = (p->pos[i] + 1) % m->d.s.b.page_len != 0; /* else it would need a page */
        pos[i] = p->pos[i] + grows;
        slot[i] = p->slot[i] + grows;
        kv_len[i] = p->kv_len[i] + grows;
        next[i] = -1 - i;
        samplers[i] = greedy;
    }
    b.tokens = next;
    b.pos = pos;
    b.slot = slot;
    b.kv_len = kv_len;
    logits_poison(&m->d, b.n_out);
    launch_step(m, &p->b, samplers);
    launch_step(m, &b, late ? NULL : samplers);
    fail_if(!be->ops->end(be, first, &err), err.msg);
    if (late)
        be->ops->sample(be, samplers);
    fail_if(!be->ops->end(be, second, &err), err.msg);
    logits_get(&m->d, DEV, b.n_out, fed);
    b.tokens = first;
    logits_poison(&m->d, b.n_out);
    launch_step(m, &b, samplers);
    fail_if(!be->ops->end(be, again, &err), err.msg);
    logits_get(&m->d, DEV, b.n_out, told);
    n_checks++;
    if (memcmp(fed, told, n * sizeof(float)) ||
        memcmp(second, again, (size_t)b.n_out * sizeof *again)) {
        n_failed++;
        printf("FAIL  %s: a step begun ahead differs\n", name);
    }
}

/* The logits against the reference's, and the tokens against the backend's own logits. */
static void check_step(struct mini *m, const struct plan *p, const char *name,
                       struct sampler *const *samplers, const struct sampler *greedy,
                       const int32_t *tokens, const float *got)
{
    int V = m->d.s.n_vocab;
    float *want = mem_alloc((size_t)(p->b.n_out * V) * sizeof *want);
    logits_get(&m->d, REF, p->b.n_out, want);
    double tol = 4 * product_tol;
    for (int i = 0; i < p->b.n_out; i++) {
        const float *row = got + (size_t)i * (size_t)V, *right = want + (size_t)i * (size_t)V;
        char what[120];
        snprintf(what, sizeof what, "logits %d of %s", i, name);
        check_close(what, row, right, (size_t)V, tol);
        int best = 0;
        for (int j = 1; j < V; j++)
            best = row[j] > row[best] ? j : best;
        n_checks++;
        bool ok = samplers[i] == NULL     ? tokens[i] == -1
                  : samplers[i] == greedy ? tokens[i] == best
                                          : tokens[i] >= 0;
        if (!ok) {
            n_failed++;
            printf("FAIL  token %d of %s is %d, not %d\n", i, name, tokens[i], best);
        }
    }
    mem_free(want);
}

/* The same step recorded, replayed, and replayed with longer sequences, against op by op: bytes. */
static void check_replays(struct mini *m, struct plan *p, const char *name,
                          struct sampler *const *samplers, const struct sampler *greedy,
                          float *eager, float *again)
{
    struct backend *be = m->d.be[DEV];
    const struct dims *s = &m->d.s;
    size_t n = (size_t)(p->b.n_out * s->n_vocab);
    int32_t now[512], before[512];
    struct error err = {0};
    p->b.kv = m->d.kv[DEV];
    for (int round = 0; round < 3; round++) {
        for (int i = 0; round == 2 && i < p->b.n_tokens; i++) {
            if ((p->pos[i] + 1) % s->b.page_len == 0)
                continue; /* would need a page */
            p->pos[i]++;
            p->slot[i]++;
            p->kv_len[i]++;
            p->tokens[i] = (p->tokens[i] + 1) % s->n_vocab;
        }
        if (round != 1) {
            be->ops->begin(be, &p->b);
            mini_step(m, DEV, samplers);
            fail_if(!be->ops->end(be, before, &err), err.msg);
            logits_get(&m->d, DEV, p->b.n_out, eager);
        }
        logits_poison(&m->d, p->b.n_out);
        be->ops->begin(be, &p->b);
        bool replayed = be->ops->replay(be, (uint64_t)p->b.n_seqs);
        if (!replayed)
            mini_ops(m, DEV);
        be->ops->sample(be, samplers);
        fail_if(!be->ops->end(be, now, &err), err.msg);
        logits_get(&m->d, DEV, p->b.n_out, again);
        n_checks += 3;
        if (replayed != (round > 0)) {
            n_failed++;
            printf("FAIL  %s round %d: replayed is %d\n", name, round, replayed);
        }
        if (memcmp(eager, again, n * sizeof(float))) {
            char what[120];
            n_failed++;
            snprintf(what, sizeof what, "replay of %s, round %d", name, round);
            check_close(what, again, eager, n, 0);
        }
        for (int i = 0; i < p->b.n_out; i++)
            if (samplers[i] == greedy && now[i] != before[i]) {
                n_failed++;
                printf("FAIL  %s round %d: token %d is %d, not %d\n", name, round, i, now[i],
                       before[i]);
            }
    }
}

/* Other tokens for the out rows whose experts are so close that rounding chooses between them: the
 * reference says which. (Activations as halves move a router's logits by about 1e-3.) */
static void decide(struct mini *m, struct plan *p)
{
    struct backend *ref = m->d.be[REF];
    for (int tries = 0, close = 1; close; tries++) {
        struct error err = {0};
        fail_if(tries == 100, "every token is close to a tie between experts");
        p->b.kv = m->d.kv[REF];
        ref->ops->begin(ref, &p->b);
        mini_ops(m, REF);
        fail_if(!ref->ops->end(ref, NULL, &err), err.msg);
        close = 0;
        for (int i = 0; i < p->b.n_out; i++) {
            int row = p->out_rows[i];
            if (backend_ref_gap(ref, row) > 4 * product_tol)
                continue;
            close++;
            p->tokens[row] = (int32_t)(random_u64(&rng) % (uint64_t)m->d.s.n_vocab);
        }
    }
}

/* n_host: experts of each layer that the host computes; 0 = the first layer is dense, too. */
static void check_forward(int n_host)
{
    struct dims s = base_dims();
    s.n_host = n_host;
    s.n_embd = 512;
    s.head_dim = 128;
    s.n_heads = 8;
    s.n_kv_heads = 1;
    s.n_rot = 128;
    s.b.n_pages = 120;
    struct mini *m = mem_zalloc(1, sizeof *m);
    mini_open(m, &s, 2, !n_host, (const enum dtype[]){DT_Q4_K, DT_Q4_K, DT_Q6_K});
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
    size_t most = (size_t)(s.b.max_out * s.n_vocab);
    float *eager = mem_alloc(most * sizeof(float)), *again = mem_alloc(most * sizeof(float));
    int n_runs = n_host ? 3 : 7; /* two layers of experts are less exact for many rows */
    for (int r = 0; r < n_runs; r++) {
        struct plan p;
        plan_make(&p, &s, runs[r].seqs, runs[r].n, false);
        struct sampler *samplers[512] = {0};
        for (int i = 0; i < p.b.n_out; i++)
            samplers[i] = i == 2 ? sw : i == 3 ? NULL : sg;
        int32_t tokens[512];
        decide(m, &p);
        logits_poison(d, p.b.n_out);
        EACH(side)
        {
            p.b.kv = d->kv[side];
            d->be[side]->ops->begin(d->be[side], &p.b);
            mini_step(m, side, side == DEV ? samplers : NULL); /* the reference's: not looked at */
        }
        end(d, NULL, tokens);
        logits_get(d, DEV, p.b.n_out, eager);
        check_step(m, &p, runs[r].name, samplers, sg, tokens, eager);
        /* Not every backend records, or begins a step while another runs. */
        if (p.b.n_decode == p.b.n_seqs && d->be[DEV]->records) {
            check_replays(m, &p, runs[r].name, samplers, sg, eager, again);
            if (d->be[DEV]->async) {
                check_ahead(m, &p, runs[r].name, sg, false, eager, again);
                check_ahead(m, &p, runs[r].name, sg, true, eager, again);
            }
            for (int i = 0; i < 2; i++) /* rounds the reference did not take part in */
                kv_copy_back(d, i);
        }
        mem_free(p.pages);
    }
    mem_free(eager);
    mem_free(again);
    sampler_free(sg);
    sampler_free(sw);
    mini_close(m);
    mem_free(m);
}

void test_forward(void)
{
    int before = n_checks;
    if (!wanted("forward, replay"))
        return;
    check_forward(0);
    report("forward, replay", before);
}

/* Recorded steps that wait for the host, and two steps in flight that do. */
void test_host_forward(void)
{
    int before = n_checks;
    if (!wanted("forward, host experts") || !has_host_experts("forward, host experts"))
        return;
    double tol = product_tol;
    host_is_exact = true;
#ifndef STEEL_CUDA_SIM
    product_tol = tol > 1e-2 ? tol : 1e-2; /* the CPU rounds inputs to eight bits */
#endif
    check_forward(7);
    product_tol = tol;
    host_is_exact = false;
    report("forward, host experts", before);
}

/* A step that keeps its rows, or one of the block, on one of them. key != 0: replayed, or recorded. Returns
 * whether it was replayed. */
static bool draft_step(struct mini *m, struct batch *b, int side, uint64_t key)
{
    struct backend *be = m->d.be[side];
    const struct network *net = &m->d.net[side];
    int last = m->n_layers - 1;
    b->kv = m->d.kv[side];
    be->ops->begin(be, b);
    if (key && be->ops->replay(be, key))
        return true;
    if (b->from) {
        be->ops->draft->join(be, &net->mtp);
        be->ops->mixer(be, &m->d.layers[side][last].mixer, last);
        be->ops->mlp(be, &m->d.layers[side][last].mlp, last);
    } else {
        be->ops->embed(be, &net->embed);
        for (int i = 0; i < last; i++) {
            for (int k = 0; k < net->mtp.n_taps && b->keep; k++)
                if (net->mtp.taps[k] == i)
                    be->ops->draft->tap(be, k);
            be->ops->mixer(be, &m->d.layers[side][i].mixer, i);
            be->ops->mlp(be, &m->d.layers[side][i].mlp, i);
        }
    }
    static const struct norm as_is = {NORM_NONE};
    if (b->keep && m->n_taps && b->from)
        be->ops->draft->keep(be, &as_is);
    if (b->keep && !m->n_taps)
        be->ops->draft->keep(be, b->from ? &net->mtp.head.norm : &net->head.norm);
    be->ops->head(be, b->from ? &net->mtp.head : &net->head);
    be->ops->launch(be);
    return false;
}

static void draft_end(struct mini *m, int side)
{
    struct error err = {0};
    fail_if(!m->d.be[side]->ops->end(m->d.be[side], NULL, &err), err.msg);
}

/* Tokens for a step of the block whose experts rounding does not choose: see decide. */
static void decide_draft(struct mini *m, struct batch *b, int32_t *tokens)
{
    struct batch look = *b;
    look.keep = false; /* it is run again */
    for (int tries = 0, close = 1; close; tries++) {
        fail_if(tries == 100, "every draft is close to a tie between experts");
        draft_step(m, &look, REF, 0);
        draft_end(m, REF);
        close = 0;
        for (int i = 0; i < b->n_out; i++) {
            if (backend_ref_gap(m->d.be[REF], b->out_rows[i]) > 4 * product_tol)
                continue;
            close++;
            tokens[b->out_rows[i]] = (int32_t)(random_u64(&rng) % (uint64_t)m->d.s.n_vocab);
        }
    }
}

/* Logits of a head with fewer outputs than n_vocab, whose other tokens are impossible. */
static void check_few(struct mini *m, const char *name, int rows)
{
    int V = m->d.s.n_vocab, few = few_outputs(V);
    size_t n = (size_t)(rows * V);
    float *got = mem_alloc(n * sizeof *got), *want = mem_alloc(n * sizeof *want);
    logits_get(&m->d, DEV, rows, got);
    logits_get(&m->d, REF, rows, want);
    for (int i = 0; i < rows; i++) {
        const float *row = got + (size_t)i * (size_t)V, *right = want + (size_t)i * (size_t)V;
        check_close(name, row, right, (size_t)few, 4 * product_tol);
        bool none = true;
        for (int k = few; k < V; k++)
            none &= isinf(row[k]) && row[k] < 0 && isinf(right[k]) && right[k] < 0;
        n_checks++;
        if (!none) {
            n_failed++;
            printf("FAIL  %s: row %d has logits of tokens that the head lacks\n", name, i);
        }
    }
    mem_free(got);
    mem_free(want);
}

/* Steps on both, then on the one under test again, recorded and replayed: the same bytes. All of them each
 * time, since each reads what the one before kept. */
static void check_drafts(struct mini *m, struct batch *steps, int32_t *const *tokens, int n,
                         const char *name, uint64_t key)
{
    size_t most = (size_t)(m->d.s.b.max_out * m->d.s.n_vocab);
    float *first = mem_alloc((size_t)n * most * sizeof *first),
          *again = mem_alloc(most * sizeof *again);
    int rounds = m->d.be[DEV]->records ? 3 : 1;
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < n; i++) {
            struct batch *b = &steps[i];
            char what[160];
            snprintf(what, sizeof what, "%s, step %d", name, i);
            float *got = round ? again : first + (size_t)i * most;
            if (!round && b->from)
                decide_draft(m, b, tokens[i]);
            logits_poison(&m->d, b->n_out);
            if (!round) {
                draft_step(m, b, REF, 0);
                draft_end(m, REF);
            }
            bool replayed = draft_step(m, b, DEV, round ? key + (uint64_t)i : 0);
            draft_end(m, DEV);
            logits_get(&m->d, DEV, b->n_out, got);
            if (!round) {
                if (b->from && m->own_tokens)
                    check_few(m, what, b->n_out);
                else
                    logits_check(&m->d, what, b->n_out, 4 * product_tol);
                continue;
            }
            n_checks += 2;
            size_t bytes = (size_t)b->n_out * (size_t)m->d.s.n_vocab * sizeof *got;
            bool few = true; /* steps with more rows of a sequence need not be recorded */
            for (int k = 0; k < b->n_seqs; k++)
                few = few && b->q_start[k + 1] - b->q_start[k] <= 16;
            bool right = few ? replayed == (round == 2) : !replayed || round == 2;
            if (!right || memcmp(got, first + (size_t)i * most, bytes)) {
                n_failed++;
                printf("FAIL  %s, round %d: replayed is %d, or its logits differ\n", what, round,
                       replayed);
            }
        }
    mem_free(first);
    mem_free(again);
}

/* One row more for each sequence of p, in its last page. */
static void plan_next(struct plan *next, const struct plan *p, const struct dims *s)
{
    int len = s->b.page_len;
    *next = *p;
    for (int i = 0; i < p->b.n_seqs; i++) {
        int at = p->kv_len[i];
        fail_if(at % len == 0, "there is no room for one more row");
        next->pos[i] = at;
        next->slot[i] = p->pages[i * s->b.max_pages + at / len] * len + at % len;
        next->kv_len[i] = at + 1;
        next->q_start[i + 1] = i + 1;
        next->out_rows[i] = i;
    }
    next->b.n_tokens = next->b.n_out = next->b.n_decode = p->b.n_seqs;
    next->b.tokens = next->tokens;
    next->b.pos = next->pos;
    next->b.slot = next->slot;
    next->b.q_start = next->q_start;
    next->b.kv_len = next->kv_len;
    next->b.out_rows = next->out_rows;
}

/* What join begins the stream with. */
static void check_join(struct mini *m, struct batch *b, const char *name)
{
    EACH(side)
    {
        struct backend *be = m->d.be[side];
        b->kv = m->d.kv[side];
        be->ops->begin(be, b);
        be->ops->draft->join(be, &m->d.net[side].mtp);
    }
    /* what was kept has the errors of a layer's products already */
    stream_check(&m->d, name, NULL, b->n_tokens, 2 * product_tol);
    end(&m->d, NULL, NULL);
}

void test_drafts(void)
{
    int before = n_checks;
    if (!wanted("drafts"))
        return;
    struct dims s = base_dims();
    struct duo none;
    duo_open(&none, &s, 1);
    bool lacks = !none.be[DEV]->ops->draft;
    duo_close(&none);
    if (lacks) {
        printf("skipped: drafts: %s has none\n", backend_name);
        return;
    }
    s.n_embd = 512;
    s.head_dim = 128;
    s.n_heads = 4;
    s.n_kv_heads = 1;
    s.n_rot = 128;
    s.b.n_pages = 120;
    static const int one[][2] = {{77, 1}}, two[][2] = {{77, 2}}, four[][2] = {{9, 4}},
                     some[][2] = {{60, 2}, {130, 1}, {0, 2}, {20, 3}, {300, 2}},
                     mixed[][2] = {{12, 1}, {0, 41}, {20, 3}},
                     wide[][2] = {{3, 1}, {0, 200}, {20, 61}};
    const struct {
        const char *name;
        const int (*seqs)[2];
        int n;
        bool all; /* all rows need logits, as where drafts are read */
    } runs[] = {{"1 row", one, 1, true},        {"2 rows", two, 1, true},
                {"4 rows", four, 1, true},      {"2, 1, 2, 3 and 2 rows", some, 5, true},
                {"mixed, 45", mixed, 3, false}, {"mixed, 262", wide, 3, false}};
    static const enum dtype types[][3] = {{DT_Q4_K, DT_Q4_K, DT_Q6_K}, {DT_F16, DT_Q8_0, DT_Q8_0}};
    static const int n_taps[] = {0, 0, 3, 2};
    for (int t = 0; t < 4; t++) {
        struct mini *m = mem_zalloc(1, sizeof *m);
        m->drafts = true;
        m->n_taps = n_taps[t];
        m->norms_taps = m->norms_residual = t == 3;
        m->own_tokens = t == 2;
        /* an MTP block has experts, the layer before it has none; an EAGLE-3 head is dense, after one layer of each kind */
        mini_open(m, &s, m->n_taps ? 3 : 2, true, types[t % 2]);
        for (int r = 0; r < (light ? 5 : 6); r++) {
            struct plan p, q, next;
            int32_t from[2][512];
            char name[80];
            snprintf(name, sizeof name, "drafts from %s, %s%s", runs[r].name,
                     dtype_name(types[t % 2][0]), m->n_taps ? ", EAGLE-3" : "");
            plan_make(&p, &s, runs[r].seqs, runs[r].n, false);
            q = p;
            int n = p.b.n_tokens;
            plan_next(&next, &p, &s);
            if (runs[r].all) {
                p.b.n_out = n;
                for (int i = 0; i < n; i++)
                    p.out_rows[i] = i;
            }
            p.b.keep = q.b.keep = true;
            p.b.tokens = p.tokens;
            p.b.out_rows = p.out_rows;
            q.b.tokens = q.tokens;
            q.b.out_rows = q.out_rows;
            for (int i = 0; i < n; i++) { /* any rows, in any order */
                from[0][i] = (7 * i + 3) % n;
                q.tokens[i] = (p.tokens[i] + 1) % s.n_vocab;
            }
            for (int i = 0; i < next.b.n_tokens; i++)
                from[1][i] = next.b.n_tokens - 1 - i;
            q.b.from = from[0];
            next.b.from = from[1];
            next.b.continues = m->n_taps > 0;
            struct batch steps[] = {p.b, q.b, next.b};
            int32_t *tokens[] = {p.tokens, q.tokens, next.tokens};
            check_drafts(m, steps, tokens, 3, name, 10 + 3 * (uint64_t)r);
            check_join(m, &q.b, name);
            for (int i = 0; i < m->n_layers; i++) /* rounds the reference did not take part in */
                kv_copy_back(&m->d, i);
            mem_free(p.pages);
        }
        mini_close(m);
        mem_free(m);
    }
    report("drafts", before);
}

/* Whether rounding does not choose the experts of row x in the first layers: see decide. Of experts
 * that are alike on purpose the order of sums must not, either. */
static bool is_decided(struct mini *m, struct plan *p, const float *x, int layers)
{
    const struct dims *s = &m->d.s;
    struct backend *ref = m->d.be[REF];
    struct error err = {0};
    p->b.kv = m->d.kv[REF];
    ref->ops->begin(ref, &p->b);
    ref->ops->stream->put(ref, x, 1);
    mini_layers(m, REF, layers);
    fail_if(!ref->ops->end(ref, NULL, &err), err.msg);
    float gap = backend_ref_gap(ref, 0);
    return s->alike ? (gap == 0 && s->nudge == 0) || gap > 1.2e-6f : gap > 4 * product_tol;
}

/* One row through all layers but the last, of a residual of about `size`. What is fused must not show:
 * `look` reads the stream between mixer and mlp. */
void routed_case(const struct dims *s, const enum dtype *types, float size, int layers, bool look)
{
    struct mini *m = mem_zalloc(1, sizeof *m);
    struct duo *d = &m->d;
    mini_open(m, s, layers + 1, false, types);
    struct backend *dev = d->be[DEV];
    size_t n = (size_t)s->n_embd;
    struct plan p;
    char what[160];
    snprintf(what, sizeof what, "%d layers of %s/%s/%s, %d of %d experts, size %g%s", layers,
             dtype_name(types[0]), dtype_name(types[1]), dtype_name(types[2]), s->n_expert_used,
             s->n_expert, (double)size, look ? ", looked at" : "");
    plan_make(&p, s, (const int[][2]){{0, 1}}, 1, false);
    float *x = random_floats(n, size), *first = mem_alloc(n * sizeof *first);
    float *again = mem_alloc(n * sizeof *again);
    for (int tries = 0; !is_decided(m, &p, x, layers); tries++) {
        fail_if(tries == 100, "every row is close to a tie between experts");
        mem_free(x);
        x = random_floats(n, size);
    }
    /* Op by op; as it is recorded; replayed twice, which finds what others left behind. */
    for (int step = 0; step < 4; step++) {
        begin(d, &p);
        stream_put(d, x, 1);
        bool records = step && dev->records, replayed = records && dev->ops->replay(dev, 7);
        for (int i = 0; i < layers; i++) {
            for (int side = 0; side < (replayed ? DEV : SIDES); side++)
                d->be[side]->ops->mixer(d->be[side], &d->layers[side][i].mixer, i);
            if (look && !step)
                stream_check(d, what, NULL, 1, product_tol * 2);
            for (int side = 0; side < (replayed ? DEV : SIDES); side++)
                d->be[side]->ops->mlp(d->be[side], &d->layers[side][i].mlp, i);
        }
        end(d, NULL, NULL);
        stream_check(d, what, NULL, 1, product_tol * 2);
        /* A step that was looked into need not have the bytes of the others. */
        bool is_first = step == look;
        dev->ops->stream->get(dev, is_first ? first : again, 1);
        n_checks++;
        bool as_recorded = replayed == (records && step > 1);
        if (!as_recorded || (step > look && memcmp(first, again, n * sizeof *x))) {
            n_failed++;
            printf("FAIL  %s: step %d %s\n", what, step,
                   as_recorded ? "differs from the first" : "is not what was recorded");
        }
    }
    mem_free(x);
    mem_free(first);
    mem_free(again);
    mem_free(p.pages);
    mini_close(m);
    mem_free(m);
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
    const int experts[] = {16, light ? 64 : 128, 40, 18, light ? 132 : 256};
    const float size[] = {1.0f, 3e-3f, 3e3f};
    for (int i = 0; i < 10; i++) {
        struct dims s = base_dims();
        if (light && (i == 4 || i == 8))
            continue;
        s.n_embd = i % 3 == 2 ? 768 : 512;
        s.n_heads = i == 3 ? 4 : 16;
        s.n_expert = experts[i % 5];
        s.n_expert_used = i % 4 == 3 ? 10 : 8;
        s.n_ff_exp = 256;
        s.norm_topk = i != 2;
        routed_case(&s, types[i % 4], size[i % 3], 1 + i % 3, i == 6);
    }
    report("output, experts", before);
}

/* Experts and dense mlps together, from tokens to logits. */
void cut_model(void)
{
    static const enum dtype types[][3] = {
        {DT_Q4_K, DT_Q4_K, DT_Q6_K}, {DT_Q8_0, DT_MXFP4, DT_MXFP4}, {DT_F16, DT_F16, DT_F16}};
    for (int i = SIM; i < (SIM ? 2 : 3); i++) {
        struct dims s = base_dims();
        struct mini *m = mem_zalloc(1, sizeof *m);
        char what[60];
        s.n_embd = 512;
        s.head_dim = s.n_rot = i == 1 ? 64 : 128;
        s.n_heads = 8;
        s.b.k_type = s.b.v_type = i == 2 ? DT_Q8_0 : DT_F16;
        m->drafts = i == 1;
        mini_open(m, &s, 2 + m->drafts, i % 2 == 0, types[i]);
        if (m->drafts) /* more than a sum behind the last layer */
            m->d.layers[DEV][1].mlp.stream_scale = 0.8f;
        snprintf(what, sizeof what, "a model of %s", dtype_name(types[i][1]));
        invariant_cuts(&m->d, what, true);
        mini_close(m);
        mem_free(m);
    }
}
