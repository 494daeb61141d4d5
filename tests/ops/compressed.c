/*
 * Compressed attention against the reference: layers with a window alone, with long windows of a compressor, and with an indexer that chooses
 * entries; over decodes, prompts and mixes of them. States come from the step before, saved ones too. Skipped, by name, on a
 * backend that does not run it.
 */
#include "duo.h"
#include "base/mem.h"
#include "quant/quant.h"

#include <stdio.h>
#include <string.h>

enum { G = 3, R = 32, Q = 64, HEADS = 5, DIM = 24, LAYERS = 3, STATES = 12 };

/* Heads of any size, and those that tensor cores read. */
struct heads {
    const char *name;
    int n, dim, n_rot;
    enum dtype cache; /* keys that are rounded otherwise may be chosen otherwise */
};
static const struct heads heads[] = {{"compressed attention", 6, 48, 16, DT_F32},
                                     {"compressed attention, 512", 36, 512, 16, DT_F16}};

struct shape {
    int window, rate, chosen; /* rate 0: a window alone; chosen 0: all entries */
};
static const struct shape shapes[LAYERS] = {{9, 0, 0}, {9, 4, 7}, {12, 32, 0}};

struct parts {
    struct duo_weight wqa, wqb, wkv, woa, wob, wc, wq, ww, wx;
    struct array gain, q_norm, kv_norm, sinks, bias, c_norm, x_bias, x_norm;
};

static struct duo_weight matrix(struct duo *d, enum weight_role role, int n, int n_in, int n_out)
{
    struct duo_weight w;
    struct random_spec spec = {
        .n_in = n_in, .n_expert = n, .n_seg = 1, .rows = {n_out}, .type = {DT_F16}};
    weight_new(d, &w, role, &spec);
    return w;
}

static struct norm rms(const struct array *gain, int side)
{
    return (struct norm){NORM_RMS, gain->on[side], NULL, 1e-6f};
}

static void parts_new(struct duo *d, struct parts *p, int layer, const struct shape *k,
                      const struct heads *h)
{
    int H = h->n, D = h->dim, E = d->s.n_embd, S = k->chosen ? 2 : 1, rate = k->rate ? k->rate : 1;
    enum weight_role linear = WEIGHT_LINEAR;
    *p = (struct parts){.wqa = matrix(d, linear, 1, E, Q),
                        .wqb = matrix(d, linear, 1, Q, H * D),
                        .wkv = matrix(d, linear, 1, E, D),
                        .woa = matrix(d, WEIGHT_HEADS, G, H / G * D, R),
                        .wob = matrix(d, linear, 1, G * R, E),
                        .wc = matrix(d, linear, 1, E, 2 * S * D),
                        .wq = matrix(d, linear, 1, Q, HEADS * DIM),
                        .ww = matrix(d, linear, 1, E, HEADS),
                        .wx = matrix(d, linear, 1, E, 4 * DIM),
                        .gain = array_random(d, (size_t)E, 1.0f),
                        .q_norm = array_random(d, Q, 1.0f),
                        .kv_norm = array_random(d, D, 1.0f),
                        .sinks = array_random(d, H, 2.0f),
                        .bias = array_random(d, (size_t)(rate * S * D), 1.0f),
                        .c_norm = array_random(d, D, 1.0f),
                        .x_bias = array_random(d, (size_t)(rate * 2 * DIM), 1.0f),
                        .x_norm = array_random(d, DIM, 1.0f)};
    EACH(side)
    {
        struct mixer *m = &d->layers[side][layer].mixer;
        *m = (struct mixer){.kind = MIXER_COMPRESSED, .block.in = rms(&p->gain, side)};
        m->compressed = (struct compressed){.n_heads = H,
                                            .dim = D,
                                            .n_groups = G,
                                            .window = k->window,
                                            .q_rank = Q,
                                            .wqa = &p->wqa.on[side],
                                            .wqb = &p->wqb.on[side],
                                            .wkv = &p->wkv.on[side],
                                            .woa = &p->woa.on[side],
                                            .wob = &p->wob.on[side],
                                            .q_norm = rms(&p->q_norm, side),
                                            .head_norm = {NORM_RMS, NULL, NULL, 1e-6f},
                                            .kv_norm = rms(&p->kv_norm, side),
                                            .rope = &d->ropes[0],
                                            .scale = 0.1f,
                                            .sinks = layer ? p->sinks.on[side] : NULL};
        struct compressed *l = &m->compressed;
        if (k->rate)
            l->compressor = (struct compressor){.rate = k->rate,
                                                .dim = D,
                                                .overlap = k->chosen > 0,
                                                .w = &p->wc.on[side],
                                                .bias = p->bias.on[side],
                                                .norm = rms(&p->c_norm, side)};
        if (k->chosen)
            l->index = (struct indexer){.n_heads = HEADS,
                                        .dim = DIM,
                                        .n_chosen = k->chosen,
                                        .wq = &p->wq.on[side],
                                        .ww = &p->ww.on[side],
                                        .rope = l->rope,
                                        .rope_last = true,
                                        .compressor = {.rate = k->rate,
                                                       .dim = DIM,
                                                       .overlap = true,
                                                       .w = &p->wx.on[side],
                                                       .bias = p->x_bias.on[side],
                                                       .norm = rms(&p->x_norm, side)}};
    }
}

static void parts_free(struct duo *d, struct parts *p)
{
    struct duo_weight *weights[] = {&p->wqa, &p->wqb, &p->wkv, &p->woa, &p->wob,
                                    &p->wc,  &p->wq,  &p->ww,  &p->wx};
    struct array *arrays[] = {&p->gain, &p->q_norm, &p->kv_norm, &p->sinks,
                              &p->bias, &p->c_norm, &p->x_bias,  &p->x_norm};
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        weight_free(d, weights[i]);
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        array_free(d, arrays[i]);
}

/* Random keys, entries and index keys, and states, the same in both memories: floats. NULL sizes are 0. */
static void planes_new(struct duo *d, int layer, size_t bytes[3])
{
    const struct mixer *m = &d->layers[0][layer].mixer;
    struct error err = {0};
    int k, v, len = d->s.b.page_len;
    mixer_cache_dims(m, &k, &v);
    size_t pages = (size_t)d->s.b.n_pages;
    const size_t values[] = {pages * (size_t)(mixer_page_rows(m, len) * k),
                             pages * (size_t)(mixer_index_rows(m, len) * mixer_index_dim(m)),
                             STATES * mixer_state_len(m)};
    for (int i = 0; i < 3; i++) {
        float *host = random_floats(values[i] + 1, 1.0f);
        bytes[i] = values[i] * sizeof(float);
        if (i < 2 && d->s.b.k_type == DT_F16) {
            bytes[i] = values[i] * sizeof(uint16_t);
            for (size_t at = 0; at < values[i];
                 at++) /* in place: no value is read after it is overwritten */
                ((uint16_t *)host)[at] = f32_to_f16(host[at]);
        }
        EACH(side)
        {
            struct backend *be = d->be[side];
            struct kv_layer *kv = &d->kv[side][layer];
            void *p = be->ops->alloc(be, bytes[i] + 64, "planes", &err);
            fail_if(!p, err.msg);
            if (i < 2)
                be->ops->copy_in(be, p, host, bytes[i]);
            *(i == 0 ? &kv->k : i == 1 ? &kv->index : (void **)&kv->state) = p;
        }
        mem_free(host);
    }
}

static void planes_free(struct duo *d, int layer, const size_t bytes[3])
{
    EACH(side)
    {
        struct kv_layer *kv = &d->kv[side][layer];
        void *planes[] = {kv->k, kv->index, kv->state};
        for (int i = 0; i < 3; i++)
            d->be[side]->ops->free(d->be[side], planes[i], bytes[i] + 64);
    }
}

/* The steps' sequences: tokens before, rows; the state that each reads, and where it is saved. Sequence i writes state i, so no other
 * one may read it in that step. */
struct step {
    int n, seqs[5][2], in[5], save_rows[5], save[5];
};
static const struct step steps[] = {
    {2, {{0, 70}, {3, 40}}, {-1, -1}, {33, 40}, {8, 9}},
    {5, {{70, 1}, {43, 1}, {15, 1}, {300, 1}, {63, 1}}, {0, 1, -1, -1, 8}, {0}, {0}},
    {4, {{71, 1}, {44, 39}, {0, 5}, {331, 2}}, {0, 1, -1, 3}, {0, 0, 3, 0}, {0, 0, 10, 0}},
    {2, {{3, 1}, {34, 33}}, {10, 8}, {0}, {0}},
};

static void run_step(struct duo *d, const struct step *t, int layer, int number)
{
    struct plan p;
    char what[60];
    int32_t out[5] = {0, 1, 2, 3, 4}, in[5], save_rows[5], save[5];
    for (int i = 0; i < t->n; i++)
        in[i] = t->in[i], save_rows[i] = t->save_rows[i], save[i] = t->save[i];
    plan_make(&p, &d->s, t->seqs, t->n, false);
    p.b.state_in = in;
    p.b.state_out = out;
    p.b.save_rows = save_rows;
    p.b.save_state = save;
    p.b.n_out = p.b.n_tokens;
    for (int r = 0; r < p.b.n_tokens; r++)
        p.out_rows[r] = r;
    float *x = random_floats((size_t)(p.b.n_tokens * d->s.n_embd), 1.0f);
    snprintf(what, sizeof what, "layer %d, step %d", layer, number);
    begin(d, &p);
    stream_put(d, x, p.b.n_tokens);
    EACH(side)
    d->be[side]->ops->mixer(d->be[side], &d->layers[side][layer].mixer, layer);
    stream_check(d, what, x, p.b.n_tokens, product_tol > 4e-3 ? product_tol : 4e-3);
    end(d, NULL, NULL);
    mem_free(x);
    mem_free(p.pages);
}

static void run_heads(const struct heads *h)
{
    struct dims s = base_dims();
    struct duo d;
    struct parts parts[LAYERS];
    struct error err = {0};
    s.n_rot = h->n_rot;
    s.b.n_states = STATES;
    s.b.k_type = s.b.v_type = h->cache;
    duo_open(&d, &s, LAYERS);
    for (int i = 0; i < LAYERS; i++)
        parts_new(&d, &parts[i], i, &shapes[i], h);
    if (!d.be[DEV]->ops->supports(d.be[DEV], &d.net[DEV], &err)) {
        printf("skipped: %s: %s\n", h->name, err.msg);
    } else {
        size_t bytes[LAYERS][3];
        for (int i = 0; i < LAYERS; i++)
            planes_new(&d, i, bytes[i]);
        duo_prepare(&d);
        for (int i = 0; i < LAYERS; i++)
            for (size_t k = 0; k < sizeof steps / sizeof *steps; k++)
                run_step(&d, &steps[k], i, (int)k);
        for (int i = 0; i < LAYERS; i++)
            planes_free(&d, i, bytes[i]);
    }
    for (int i = 0; i < LAYERS; i++)
        parts_free(&d, &parts[i]);
    duo_close(&d);
}

void test_compressed(void)
{
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        if (wanted(heads[i].name)) {
            int before = n_checks;
            run_heads(&heads[i]);
            report(heads[i].name, before);
        }
}

void force_compressed(void)
{
    run_heads(&heads[1]);
}
