/*
 * Mixers beside plain attention, against the reference: the gated delta net over several steps, with
 * prompts cut anywhere, decodes beside them, states that are saved on the way and gone on from; latent
 * attention over decodes, prompts and mixes of them. Also what picks.c runs with rows of their tables
 * forced.
 * Skipped, by name, on a backend that does not run them.
 */
#include "duo.h"
#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { SLOTS = 8, STEPS = 5 };

/* Two products, each of rounded rows, with a norm in between: twice what one is allowed. */
static double mixer_tol(void)
{
    return product_tol > 2e-3 ? product_tol : 2e-3;
}

/* As heads.c has it: a value near the border of two steps may get the other. */
static double cache_tol(enum dtype type)
{
    double tol = type == DT_Q4_0 ? 5e-2 : type == DT_F8_E4M3 ? 2e-2 : type == DT_Q8_0 ? 6e-3 : 0;
    return tol > mixer_tol() ? tol : mixer_tol();
}

static struct duo_weight plain_weight(struct duo *d, int n_in, int rows)
{
    struct duo_weight w;
    struct random_spec spec = {
        .n_in = n_in, .n_expert = 1, .n_seg = 1, .rows = {rows}, .type = {DT_F16}};
    weight_new(d, &w, WEIGHT_LINEAR, &spec);
    return w;
}

/* One step of the recurrent test: per sequence rows, slots read and written, and a save. */
struct turn {
    int n;
    struct {
        int rows, in, out, save_rows, save;
    } seq[4];
};

static const struct turn turns[STEPS] = {
    /* a prompt alone, saved in the middle; one from zeros beside it */
    {2, {{1, -1, 1, 0, -1}, {70, -1, 0, 33, 5}}},
    /* decodes in place */
    {2, {{1, 0, 0, 0, -1}, {1, 1, 1, 0, -1}}},
    /* a decode that forks, and prompts that go on, one from what was saved, one saved at its end */
    {4, {{1, 0, 2, 0, -1}, {1, 1, 1, 1, 6}, {19, 5, 3, 0, -1}, {2, -1, 4, 2, 7}}},
    /* rows fewer than the convolution is long */
    {3, {{1, 6, 0, 0, -1}, {2, 3, 3, 0, -1}, {3, 4, 4, 1, 5}}},
    {4, {{1, 7, 1, 0, -1}, {1, 5, 0, 0, -1}, {1, 2, 2, 0, -1}, {65, 3, 3, 64, 6}}},
};

static int depth; /* keys before the rows of each sequence, where a mixer has keys */

static void turn_plan(struct plan *p, const struct dims *s, const struct turn *t, int32_t *states)
{
    int seqs[4][2];
    for (int i = 0; i < t->n; i++) {
        seqs[i][0] = depth ? depth + 11 * i : 0;
        seqs[i][1] = t->seq[i].rows;
        states[i] = t->seq[i].in;
        states[4 + i] = t->seq[i].out;
        states[8 + i] = t->seq[i].save_rows;
        states[12 + i] = t->seq[i].save;
    }
    plan_make(p, s, (const int(*)[2])seqs, t->n, false);
    p->b.state_in = states;
    p->b.state_out = states + 4;
    p->b.save_rows = states + 8;
    p->b.save_state = states + 12;
}

/* Runs the turns through layer 0, which is the last. */
static void run_turns(struct duo *d, const struct dims *s, const char *group, const char *name,
                      const struct turn *list, int n_turns)
{
    if (!duo_runs(d, group))
        return;
    int E = s->n_embd;
    size_t bytes = layer_state_len(&d->layers[0][0]) * SLOTS * sizeof(float);
    struct error err = {0};
    EACH(side)
    {
        d->kv[side][0].state = d->be[side]->ops->alloc(d->be[side], bytes, "states", &err);
        fail_if(!d->kv[side][0].state, err.msg);
    }
    duo_prepare(d);
    if (bytes_only)
        invariant_cuts(d, name, false);
    for (int i = 0; i < n_turns && !bytes_only; i++) {
        struct plan p;
        int32_t states[16];
        char what[100];
        turn_plan(&p, s, &list[i], states);
        p.b.n_out = p.b.n_tokens;
        for (int r = 0; r < p.b.n_tokens; r++)
            p.out_rows[r] = r;
        float *x = random_floats((size_t)(p.b.n_tokens * E), 1.0f);
        snprintf(what, sizeof what, "%s, step %d", name, i);
        begin(d, &p);
        stream_put(d, x, p.b.n_tokens);
        EACH(side)
        {
            d->be[side]->ops->mixer(d->be[side], &d->layers[side][0].mixer, 0);
            d->be[side]->ops->mlp(d->be[side], &d->layers[side][0].mlp, 0);
        }
        stream_check(d, what, x, p.b.n_tokens, cache_tol(s->b.k_type));
        end(d, NULL, NULL);
        mem_free(x);
        mem_free(p.pages);
    }
    EACH(side)
    d->be[side]->ops->free(d->be[side], d->kv[side][0].state, bytes);
}

static float beta_scale; /* of delta_case; 0 = 1 */

static void delta_case(int Hk, int Hv, int Dk, int Dv, int W, bool tiled, const struct turn *list,
                       int n_turns)
{
    struct dims s = base_dims();
    s.b.n_states = SLOTS;
    struct duo d;
    duo_open(&d, &s, 1);
    int C = 2 * Hk * Dk + Hv * Dv, E = s.n_embd;
    struct duo_weight wqkv = plain_weight(&d, E, C), wz = plain_weight(&d, E, Hv * Dv);
    struct duo_weight wba = plain_weight(&d, E, 2 * Hv), wo = plain_weight(&d, Hv * Dv, E);
    struct array conv = array_random(&d, (size_t)(C * W), 0.5f),
                 dt = array_random(&d, (size_t)Hv, 1.0f), norm = array_random(&d, (size_t)Dv, 1.0f),
                 gain = array_random(&d, (size_t)E, 1.0f);
    float decay[64];
    struct array slow = array_random(&d, (size_t)Hv, 1.0f);
    for (int h = 0; h < Hv; h++)
        decay[h] = 0.02f * (float)(1 + h);
    EACH(side)
    {
        struct backend *be = d.be[side];
        be->ops->copy_in(be, slow.on[side], decay, (size_t)Hv * sizeof *decay);
        struct mixer *m = &d.layers[side][0].mixer;
        *m = (struct mixer){.kind = MIXER_DELTA_NET,
                            .block.in = {NORM_RMS, gain.on[side], NULL, 1e-6f}};
        m->delta_net = (struct delta_net){.n_k_heads = Hk,
                                          .n_v_heads = Hv,
                                          .k_dim = Dk,
                                          .v_dim = Dv,
                                          .conv_len = W,
                                          .wqkv = &wqkv.on[side],
                                          .wz = &wz.on[side],
                                          .wba = &wba.on[side],
                                          .wo = &wo.on[side],
                                          .conv = conv.on[side],
                                          .decay = slow.on[side],
                                          .dt_bias = dt.on[side],
                                          .norm = {NORM_RMS, norm.on[side], NULL, 1e-6f},
                                          .tiled = tiled,
                                          .beta_scale = beta_scale};
    }
    char what[80];
    snprintf(what, sizeof what, "heads %d/%d of %dx%d, conv %d", Hk, Hv, Dk, Dv, W);
    run_turns(&d, &s, "delta net", what, list, n_turns);
    struct array *arrays[] = {&conv, &dt, &norm, &gain, &slow};
    struct duo_weight *weights[] = {&wqkv, &wz, &wba, &wo};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        array_free(&d, arrays[i]);
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        weight_free(&d, weights[i]);
    duo_close(&d);
}

/* Two prompts that go on from step to step, of every length up to `most` and beyond whole chunks of
 * rows, one saved on its way. */
static void delta_lengths(int most, int stride)
{
    for (int n = 1; n <= most; n += stride) {
        struct turn list[2] = {0};
        for (int i = 0; i < 2; i++) {
            int a = 1 + (n + 31 * i) % most, b = most + 1 - a, in = i - 1;
            list[i] = (struct turn){2, {{a, in, 0, 0, -1}, {b, in < 0 ? in : 1, 1, 0, -1}}};
            if (a > b)
                list[i].seq[0].rows = b, list[i].seq[1].rows = a;
            list[i].seq[1].save_rows = 1 + n * 5 % list[i].seq[1].rows;
            list[i].seq[1].save = 4;
        }
        /* a third step goes on from what was saved */
        struct turn all[3] = {list[0], list[1], {1, {{40, 4, 4, 0, -1}}}};
        delta_case(1, 2, 128, 128, 4, n & 1, all, 3);
    }
}

/* norms: parts of the norm; 0 = no norm. limits: of dt. */
/* lightning: attention as a state-space model, with the gate's matrix apart. */
struct ssm_test {
    int H, G, P, N, W, norms;
    bool norm_first, limits, bias, scales, lightning;
};

static void ssm_case(struct ssm_test t)
{
    int H = t.H, G = t.G, P = t.P, N = t.N, W = t.W;
    struct dims s = base_dims();
    s.b.n_states = SLOTS;
    struct duo d;
    duo_open(&d, &s, 1);
    int C = H * P + 2 * G * N, E = s.n_embd;
    struct duo_weight w_in = plain_weight(&d, E, t.lightning ? C : H * P + C + H),
                      w_z = plain_weight(&d, E, H * P), w_out = plain_weight(&d, H * P, E);
    struct array conv = array_random(&d, (size_t)(C * W), 0.5f),
                 conv_bias = array_random(&d, (size_t)C, 0.5f),
                 dt = array_random(&d, (size_t)H, 1.0f), skip = array_random(&d, (size_t)H, 1.0f),
                 norm = array_random(&d, (size_t)(H * P), 1.0f),
                 gain = array_random(&d, (size_t)E, 1.0f), slow = array_random(&d, (size_t)H, 1.0f);
    float decay[64];
    for (int h = 0; h < H; h++)
        decay[h] = 0.02f * (float)(1 + h);
    EACH(side)
    {
        struct backend *be = d.be[side];
        be->ops->copy_in(be, slow.on[side], decay, (size_t)H * sizeof *decay);
        struct mixer *m = &d.layers[side][0].mixer;
        *m = (struct mixer){.kind = MIXER_SSM, .block.in = {NORM_RMS, gain.on[side], NULL, 1e-6f}};
        m->ssm = (struct ssm){.n_heads = H,
                              .n_groups = G,
                              .head_dim = P,
                              .state_dim = N,
                              .conv_len = W,
                              .w_in = &w_in.on[side],
                              .w_out = &w_out.on[side],
                              .conv = conv.on[side],
                              .conv_bias = t.bias ? conv_bias.on[side] : NULL,
                              .decay = slow.on[side],
                              .dt_bias = dt.on[side],
                              .skip = skip.on[side],
                              .dt_min = t.limits ? 0.3f : 0,
                              .dt_max = t.limits ? 0.9f : 0,
                              .n_norms = t.norms,
                              .norm_first = t.norm_first};
        if (t.lightning) {
            m->ssm.w_z = &w_z.on[side];
            m->ssm.conv = m->ssm.dt_bias = m->ssm.skip = NULL;
            m->ssm.sigmoid_gate = true;
        }
        if (t.norms)
            m->ssm.norm = (struct norm){NORM_RMS, norm.on[side], NULL, 1e-6f};
        for (int i = 0; t.scales && i < SSM_PARTS; i++)
            m->ssm.in_scale[i] = 0.7f + 0.2f * (float)i;
    }
    char what[80];
    snprintf(what, sizeof what, "heads %d/%d of %dx%d, conv %d, %d norms%s", H, G, N, P, W, t.norms,
             t.lightning ? ", lightning"
             : t.scales  ? ", factors"
                         : "");
    run_turns(&d, &s, "ssm", what, turns, small ? 1 : STEPS);
    struct array *arrays[] = {&conv, &conv_bias, &dt, &skip, &norm, &gain, &slow};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        array_free(&d, arrays[i]);
    weight_free(&d, &w_in);
    weight_free(&d, &w_z);
    weight_free(&d, &w_out);
    duo_close(&d);
}

void test_ssm(void)
{
    int before = n_checks;
    if (!wanted("ssm"))
        return;
    if (!small)
        ssm_case((struct ssm_test){8, 2, 64, 128, 4, 1, .bias = true}); /* Mamba-2, Nemotron */
    ssm_case((struct ssm_test){4, 1, 64, 32, 4, 4, .limits = true, .bias = true});
    /* no whole vectors, no whole panels */
    ssm_case((struct ssm_test){6, 3, 20, 24, 3, 1, .norm_first = true});
    ssm_case((struct ssm_test){3, 1, 7, 16, 2, 0, .bias = true});
    ssm_case((struct ssm_test){3, 3, 20, 16, 4, 0, .limits = true, .bias = true, .scales = true});
    ssm_case((struct ssm_test){4, 4, 64, 64, 1, 1, .norm_first = true, .lightning = true});
    ssm_case((struct ssm_test){3, 3, 20, 20, 1, 1, .lightning = true});
    report("ssm", before);
}

static void short_conv_case(int W, bool bias)
{
    struct dims s = base_dims();
    s.b.n_states = SLOTS;
    struct duo d;
    duo_open(&d, &s, 1);
    int E = s.n_embd;
    struct duo_weight w_in = plain_weight(&d, E, 3 * E), w_out = plain_weight(&d, E, E);
    struct array conv = array_random(&d, (size_t)(E * W), 0.5f),
                 add = array_random(&d, (size_t)E, 0.5f), gain = array_random(&d, (size_t)E, 1.0f);
    EACH(side)
    {
        struct mixer *m = &d.layers[side][0].mixer;
        *m = (struct mixer){.kind = MIXER_SHORT_CONV,
                            .block.in = {NORM_RMS, gain.on[side], NULL, 1e-6f}};
        m->short_conv = (struct short_conv){.conv_len = W,
                                            .w_in = &w_in.on[side],
                                            .w_out = &w_out.on[side],
                                            .conv = conv.on[side],
                                            .bias = bias ? add.on[side] : NULL};
    }
    char what[80];
    snprintf(what, sizeof what, "conv %d, bias %d", W, bias);
    run_turns(&d, &s, "short convolution", what, turns, small ? 2 : STEPS);
    array_free(&d, &conv);
    array_free(&d, &add);
    array_free(&d, &gain);
    weight_free(&d, &w_in);
    weight_free(&d, &w_out);
    duo_close(&d);
}

/* Attention and an mlp whose keys, values and results are convolved, with relative positions of up to `reach` rows. */
static void row_conv_case(int W, int reach, int window, enum dtype kv)
{
    enum { R = 5 };
    struct dims s = base_dims();
    s.b.n_states = SLOTS;
    s.b.k_type = s.b.v_type = kv;
    struct duo d;
    duo_open(&d, &s, 1);
    int E = s.n_embd, H = s.n_heads, K = s.n_kv_heads, D = s.head_dim, F = 96;
    struct duo_weight wqkv = plain_weight(&d, E, (H + 2 * K) * D), wo = plain_weight(&d, H * D, E),
                      wrel = plain_weight(&d, E, H * R), up = plain_weight(&d, E, 2 * F),
                      down = plain_weight(&d, F, E);
    struct array rel = array_random(&d, (size_t)(R * reach), 3.0f),
                 k_taps = array_random(&d, (size_t)(K * D * W), 0.5f),
                 v_taps = array_random(&d, (size_t)(K * D * W), 0.5f),
                 after = array_random(&d, (size_t)(E * W), 0.5f),
                 last = array_random(&d, (size_t)(E * W), 0.5f),
                 gain = array_random(&d, (size_t)E, 1.0f),
                 heads = array_random(&d, (size_t)D, 1.0f);
    EACH(side)
    {
        struct norm in = {NORM_RMS, gain.on[side], NULL, 1e-6f},
                    head = {NORM_RMS, heads.on[side], NULL, 1e-6f};
        struct layer *l = &d.layers[side][0];
        l->mixer = (struct mixer){.kind = MIXER_ATTENTION,
                                  .block = {.in = in, .conv = {W, after.on[side]}}};
        l->mixer.attention = (struct attention){.n_heads = H,
                                                .n_kv_heads = K,
                                                .k_dim = D,
                                                .v_dim = D,
                                                .wqkv = &wqkv.on[side],
                                                .wo = &wo.on[side],
                                                .q_norm = head,
                                                .k_norm = head,
                                                .scale = 1.0f / (float)D,
                                                .window = window,
                                                .temp_beta = 0.3f,
                                                .temp_len = 7,
                                                .temp_smooth = true,
                                                .k_conv = {W, k_taps.on[side]},
                                                .v_conv = {W, v_taps.on[side]},
                                                .wrel = &wrel.on[side],
                                                .rel = rel.on[side],
                                                .rel_dim = R,
                                                .rel_len = reach};
        l->mlp = (struct mlp){.block = {.in = in, .scale = 0.7f, .conv = {W, last.on[side]}}};
        l->mlp.dense = (struct ffn){.gate_up = &up.on[side], .down = &down.on[side]};
    }
    char what[80];
    snprintf(what, sizeof what, "conv %d, reach %d, window %d, %s", W, reach, window,
             dtype_name(kv));
    kv_new(&d, 0);
    depth = 37;
    run_turns(&d, &s, "row convolutions", what, turns, small ? 2 : STEPS);
    depth = 0;
    kv_free(&d, 0);
    struct array *arrays[] = {&rel, &k_taps, &v_taps, &after, &last, &gain, &heads};
    struct duo_weight *weights[] = {&wqkv, &wo, &wrel, &up, &down};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        array_free(&d, arrays[i]);
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        weight_free(&d, weights[i]);
    duo_close(&d);
}

void test_row_conv(void)
{
    int before = n_checks;
    if (!wanted("row convolutions"))
        return;
    row_conv_case(4, 48, 0, DT_F16);
    row_conv_case(4, 20, 20, DT_F16);
    row_conv_case(2, 1, 0, DT_F32);
    row_conv_case(3, 7, 0, DT_Q8_0);
    row_conv_case(5, 200, 33, DT_F8_E4M3);
    report("row convolutions", before);
}

void test_short_conv(void)
{
    int before = n_checks;
    if (!wanted("short convolution"))
        return;
    short_conv_case(3, false);
    short_conv_case(4, true);
    report("short convolution", before);
}

void test_delta_net(void)
{
    int before = n_checks;
    if (!wanted("delta net"))
        return;
    int steps = small ? 1 : STEPS;
    if (!small)
        delta_case(2, 4, 128, 128, 4, false, turns, STEPS);
    delta_case(2, 6, 32, 48, 4, true, turns, steps);
    delta_case(1, 3, 20, 24, 3, false, turns, steps); /* no whole vectors, no whole panels */
    delta_case(3, 3, 16, 7, 1, true, turns, steps);   /* no convolution to speak of */
    beta_scale = 2;                                   /* a part of its own */
    delta_case(2, 2, 24, 16, 4, false, turns, steps);
    beta_scale = 0;
    if (!small)
        delta_lengths(200, light ? 37 : 13);
    report("delta net", before);
}

/* Small: a prompt of more rows than a chunk has, saved and gone on from, beside decodes. */
void force_delta_net(void)
{
    delta_case(small ? 1 : 2, small ? 2 : 4, 128, 128, 4, false, turns, small ? 3 : STEPS);
    if (!small)
        delta_lengths(200, 51);
}

static struct duo_weight heads_weight(struct duo *d, int heads, int n_in, int rows, enum dtype type)
{
    struct duo_weight w;
    struct random_spec spec = {
        .n_in = n_in, .n_expert = heads, .n_seg = 1, .rows = {rows}, .type = {type}};
    spec.group_len = 64;
    weight_new(d, &w, WEIGHT_HEADS, &spec);
    return w;
}

/* A cache of random rows, of latents or of index keys, the same in both memories. */
static void rows_new(struct duo *d, int layer, int width, bool index)
{
    struct error err = {0};
    enum dtype type = d->s.b.k_type;
    size_t n = (size_t)d->s.b.n_pages * (size_t)d->s.b.page_len * (size_t)width;
    size_t bytes = dtype_bytes(type, n);
    float *host = random_floats(n, 1.0f);
    uint8_t *tiles = NULL;
    uint16_t *halves = (uint16_t *)host; /* each is written behind where it is read */
    if (kv_quantised(type)) {            /* rows of whole blocks, on the CPU too */
        float *values = host;
        host = mem_alloc(bytes);
        kv_row_put(type, values, (int)n, host);
        if (tiled_rows(d)) {
            tiles = mem_alloc(bytes);
            tiled_rows_put(d, values, width, tiles);
        }
        mem_free(values);
    }
    for (size_t i = 0; i < n && type != DT_F32 && !kv_quantised(type); i++)
        halves[i] = type == DT_F16 ? f32_to_f16(host[i]) : f32_to_bf16(host[i]);
    EACH(side)
    {
        struct backend *be = d->be[side];
        struct kv_layer *kv = &d->kv[side][layer];
        void **at = index ? &kv->index : &kv->k;
        *at = be->ops->alloc(be, bytes, "rows", &err);
        fail_if(!*at, err.msg);
        be->ops->copy_in(be, *at, side == DEV && tiles ? (void *)tiles : host, bytes);
    }
    mem_free(tiles);
    mem_free(host);
}

/* many: also more than 256 rows, which may be left as halves */
static void latent_steps(int H, int Dn, int Dr, int Dv, int C, int q_rank, enum dtype type,
                         enum dtype kv_type, bool many)
{
    static const int decode[][2] = {{0, 1}, {15, 1}, {16, 1}, {300, 1}, {63, 1}};
    static const int mixed[][2] = {{20, 1}, {0, 70}, {33, 17}, {5, 1}, {100, 2}};
    static const int one[][2] = {{170, 1}}; /* alone, its norms are made on the way */
    static const int wide[][2] = {{7, 1}, {0, 200}, {40, 90}};
    const struct {
        const int (*seqs)[2];
        int n;
    } plans[] = {{decode, 5}, {mixed, 5}, {one, 1}, {wide, 3}};
    struct dims s = base_dims();
    struct duo d;
    s.n_rot = Dr;
    s.b.k_type = s.b.v_type = kv_type;
    duo_open(&d, &s, 1);
    int E = s.n_embd, in = q_rank ? q_rank : E;
    struct duo_weight wqa = plain_weight(&d, E, q_rank ? q_rank : 16);
    struct duo_weight wqb = plain_weight(&d, in, H * (Dn + Dr)), wkva = plain_weight(&d, E, C + Dr),
                      wo = plain_weight(&d, H * Dv, E);
    struct duo_weight wkb = heads_weight(&d, H, Dn, C, type),
                      wvb = heads_weight(&d, H, C, Dv, type);
    struct array qn = array_random(&d, (size_t)in, 1.0f), kn = array_random(&d, (size_t)C, 1.0f);
    EACH(side)
    {
        struct mixer *m = &d.layers[side][0].mixer;
        *m = (struct mixer){.kind = MIXER_LATENT};
        m->latent = (struct latent){.n_heads = H,
                                    .temp_beta = C == 36 ? 0.3f : 0,
                                    .temp_len = 4,
                                    .nope_dim = Dn,
                                    .rope_dim = Dr,
                                    .v_dim = Dv,
                                    .q_rank = q_rank,
                                    .kv_rank = C,
                                    .wqa = q_rank ? &wqa.on[side] : NULL,
                                    .wqb = &wqb.on[side],
                                    .wkva = &wkva.on[side],
                                    .wkb = &wkb.on[side],
                                    .wvb = &wvb.on[side],
                                    .wo = &wo.on[side],
                                    .q_norm = {NORM_RMS, qn.on[side], NULL, 1e-6f},
                                    .kv_norm = {NORM_RMS, kn.on[side], NULL, 1e-6f},
                                    .rope = &d.ropes[0],
                                    .interleaved = q_rank != 0,
                                    .scale = 0.1f};
    }
    if (duo_runs(&d, "latent attention")) {
        size_t bytes =
            dtype_bytes(kv_type, (size_t)s.b.n_pages * (size_t)s.b.page_len * (size_t)(C + Dr));
        rows_new(&d, 0, C + Dr, false);
        char what[100];
        duo_prepare(&d);
        snprintf(what, sizeof what, "%d heads of %d+%d/%d over %d, %s, cache %s", H, Dn, Dr, Dv, C,
                 dtype_name(type), dtype_name(kv_type));
        if (bytes_only)
            invariant_cuts(&d, what, false);
        for (int i = 0; i < 3 + many && !bytes_only; i++) {
            struct plan p;
            plan_make(&p, &s, plans[i].seqs, plans[i].n, i % 2 == 0);
            p.b.n_out = p.b.n_tokens; /* the layer is the last */
            for (int r = 0; r < p.b.n_tokens; r++)
                p.out_rows[r] = r;
            float *x = random_floats((size_t)(p.b.n_tokens * E), 1.0f);
            snprintf(what, sizeof what, "%d heads of %d+%d/%d over %d, %s, cache %s, step %d", H,
                     Dn, Dr, Dv, C, dtype_name(type), dtype_name(kv_type), i);
            begin(&d, &p);
            stream_put(&d, x, p.b.n_tokens);
            EACH(side)
            d.be[side]->ops->mixer(d.be[side], &d.layers[side][0].mixer, 0);
            stream_check(&d, what, x, p.b.n_tokens, cache_tol(kv_type));
            end(&d, NULL, NULL);
            mem_free(x);
            mem_free(p.pages);
        }
        EACH(side)
        d.be[side]->ops->free(d.be[side], d.kv[side][0].k, bytes);
    }
    struct array *arrays[] = {&qn, &kn};
    struct duo_weight *weights[] = {&wqa, &wqb, &wkva, &wkb, &wvb, &wo};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        array_free(&d, arrays[i]);
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        weight_free(&d, weights[i]);
    duo_close(&d);
}

static void latent_case(int H, int Dn, int Dr, int Dv, int C, int q_rank, enum dtype type,
                        enum dtype kv_type)
{
    latent_steps(small && H > 2 ? 2 : H, Dn, Dr, Dv, C, q_rank, type, kv_type, false);
}

void test_latent(void)
{
    int before = n_checks;
    if (!wanted("latent attention"))
        return;
    latent_case(5, 128, 64, 128, 512, 192, DT_BF16, DT_F16);
    latent_case(8, 32, 16, 32, 96, 0, DT_Q8_0, DT_F32);
    latent_case(3, 20, 10, 12, 36, 24, DT_F16, DT_F16); /* no whole vectors */
    latent_case(4, 32, 32, 32, 96, 0, DT_F16, DT_Q4_0);
    if (!small) {
        latent_case(20, 192, 64, 256, 512, 0, DT_Q8_0, DT_BF16);
        latent_case(5, 128, 64, 128, 512, 192, DT_F16, DT_Q8_0);
        latent_case(5, 128, 64, 128, 512, 0, DT_F16, DT_F8_E4M3);
    }
    if (!light)
        latent_case(70, 128, 64, 128, 512, 192, DT_F16, DT_F16); /* heads for two blocks */
    report("latent attention", before);
}

/* By formats of the matrices that heads have; none: one will do. */
void force_latent(bool (*takes)(const char *formats, enum dtype t), const char *formats)
{
    latent_case(5, 128, 64, 128, 512, 0, DT_F16, DT_F16);
    latent_steps(2, 192, 64, 256, 512, 48, DT_Q8_0, DT_BF16, true);
    for (enum dtype t = DT_F32; *formats && t <= DT_GPTQ4; t++)
        if (takes(formats, t) && (!light || t % 5 == 0))
            latent_case(3, 256, 16, 32, 256, 0, t, DT_F16);
}

static void rows_free(struct duo *d, int layer, int width, bool index)
{
    size_t n = (size_t)d->s.b.n_pages * (size_t)d->s.b.page_len * (size_t)width;
    EACH(side)
    {
        struct kv_layer *kv = &d->kv[side][layer];
        d->be[side]->ops->free(d->be[side], index ? kv->index : kv->k,
                               dtype_bytes(d->s.b.k_type, n));
    }
}

/* The weights of an indexer. */
struct index_parts {
    struct duo_weight wq, wk, ww;
    struct array q_norm, k_norm, k_bias;
};

/* Gives layer 0 an indexer, and layer 1 its choice. width: of what its queries are computed from. */
static void index_parts_new(struct duo *d, struct index_parts *p, int heads, int dim, int chosen,
                            int block, int width, bool interleaved)
{
    int E = d->s.n_embd;
    *p = (struct index_parts){.wq = plain_weight(d, width, heads * dim),
                              .wk = plain_weight(d, E, dim),
                              .ww = plain_weight(d, E, heads),
                              .q_norm = array_random(d, (size_t)dim, 1.0f),
                              .k_norm = array_random(d, (size_t)dim, 1.0f),
                              .k_bias = array_random(d, (size_t)dim, 0.2f)};
    EACH(side)
    for (int i = 0; i < 2; i++) {
        struct mixer *m = &d->layers[side][i].mixer;
        struct indexer *x = m->kind == MIXER_LATENT ? &m->latent.index : &m->attention.index;
        *x = (struct indexer){.n_heads = heads,
                              .dim = dim,
                              .n_chosen = chosen,
                              .block = block,
                              .rope = &d->ropes[0],
                              .interleaved = interleaved,
                              .reuse = i == 1};
        if (i == 1)
            continue;
        x->wq = &p->wq.on[side];
        x->wk = &p->wk.on[side];
        x->ww = block ? NULL : &p->ww.on[side];
        if (block)
            x->q_norm = (struct norm){NORM_RMS, p->q_norm.on[side], NULL, 1e-6f};
        x->k_norm = block
                        ? (struct norm){NORM_RMS, p->k_norm.on[side], NULL, 1e-6f}
                        : (struct norm){NORM_LAYER, p->k_norm.on[side], p->k_bias.on[side], 1e-6f};
    }
}

static void index_parts_free(struct duo *d, struct index_parts *p)
{
    struct array *arrays[] = {&p->q_norm, &p->k_norm, &p->k_bias};
    struct duo_weight *weights[] = {&p->wq, &p->wk, &p->ww};
    for (size_t i = 0; i < 3; i++) {
        array_free(d, arrays[i]);
        weight_free(d, weights[i]);
    }
}

/* Steps through both layers: rows with fewer keys than can be chosen, with more, and both at once. */
static void sparse_steps(struct duo *d, const struct dims *s, const char *what)
{
    static const int decode[][2] = {{0, 1}, {15, 1}, {16, 1}, {300, 1}, {63, 1}};
    static const int mixed[][2] = {{20, 1}, {0, 70}, {33, 17}, {5, 1}, {100, 2}};
    static const int few[][2] = {{7, 1}, {0, 9}};
    const struct {
        const int (*seqs)[2];
        int n;
    } plans[] = {{decode, 5}, {mixed, 5}, {few, 2}};
    if (bytes_only)
        invariant_cuts(d, what, false);
    for (int i = 0; i < 3 && !bytes_only; i++) {
        struct plan p;
        char text[120];
        plan_make(&p, s, plans[i].seqs, plans[i].n, i == 0);
        p.b.n_out = p.b.n_tokens;
        for (int r = 0; r < p.b.n_tokens; r++)
            p.out_rows[r] = r;
        float *x = random_floats((size_t)(p.b.n_tokens * s->n_embd), 1.0f);
        snprintf(text, sizeof text, "%s, step %d", what, i);
        begin(d, &p);
        stream_put(d, x, p.b.n_tokens);
        for (int layer = 0; layer < 2; layer++)
            EACH(side)
        d->be[side]->ops->mixer(d->be[side], &d->layers[side][layer].mixer, layer);
        stream_check(d, text, x, p.b.n_tokens, mixer_tol());
        end(d, NULL, NULL);
        mem_free(x);
        mem_free(p.pages);
    }
}

static void sparse_latent_case(int H, int heads, int dim, int chosen, bool interleaved)
{
    enum { Dn = 32, Dr = 16, Dv = 24, C = 64, Q = 48 };
    struct dims s = base_dims();
    struct duo d;
    s.n_rot = Dr;
    s.b.k_type = s.b.v_type = DT_F32; /* rounded keys may be chosen otherwise */
    duo_open(&d, &s, 2);
    int E = s.n_embd;
    struct duo_weight wqa = plain_weight(&d, E, Q), wqb = plain_weight(&d, Q, H * (Dn + Dr)),
                      wkva = plain_weight(&d, E, C + Dr), wo = plain_weight(&d, H * Dv, E),
                      wkb = heads_weight(&d, H, Dn, C, DT_F16),
                      wvb = heads_weight(&d, H, C, Dv, DT_F16);
    struct array qn = array_random(&d, Q, 1.0f), kn = array_random(&d, C, 1.0f),
                 gain = array_random(&d, (size_t)E, 1.0f);
    EACH(side)
    for (int i = 0; i < 2; i++) {
        struct mixer *m = &d.layers[side][i].mixer;
        *m = (struct mixer){.kind = MIXER_LATENT,
                            .block.in = {NORM_RMS, gain.on[side], NULL, 1e-6f}};
        m->latent = (struct latent){.n_heads = H,
                                    .nope_dim = Dn,
                                    .rope_dim = Dr,
                                    .v_dim = Dv,
                                    .q_rank = Q,
                                    .kv_rank = C,
                                    .wqa = &wqa.on[side],
                                    .wqb = &wqb.on[side],
                                    .wkva = &wkva.on[side],
                                    .wkb = &wkb.on[side],
                                    .wvb = &wvb.on[side],
                                    .wo = &wo.on[side],
                                    .q_norm = {NORM_RMS, qn.on[side], NULL, 1e-6f},
                                    .kv_norm = {NORM_RMS, kn.on[side], NULL, 1e-6f},
                                    .rope = &d.ropes[0],
                                    .scale = 0.1f};
    }
    struct index_parts x;
    index_parts_new(&d, &x, heads, dim, chosen, 0, Q, interleaved);
    if (duo_runs(&d, "sparse attention")) {
        char what[80];
        for (int i = 0; i < 2; i++)
            rows_new(&d, i, C + Dr, false);
        rows_new(&d, 0, dim, true);
        duo_prepare(&d);
        snprintf(what, sizeof what, "latents, %d of %d keys, %d index heads of %d", chosen, 300,
                 heads, dim);
        sparse_steps(&d, &s, what);
        for (int i = 0; i < 2; i++)
            rows_free(&d, i, C + Dr, false);
        rows_free(&d, 0, dim, true);
    }
    index_parts_free(&d, &x);
    struct array *arrays[] = {&qn, &kn, &gain};
    struct duo_weight *weights[] = {&wqa, &wqb, &wkva, &wkb, &wvb, &wo};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        array_free(&d, arrays[i]);
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        weight_free(&d, weights[i]);
    duo_close(&d);
}

static void sparse_blocks_case(int H, int K, int D, int block, int chosen)
{
    struct dims s = base_dims();
    struct duo d;
    s.n_heads = H;
    s.n_kv_heads = K;
    s.head_dim = D;
    s.n_rot = 16;
    s.b.k_type = s.b.v_type = DT_F32;
    duo_open(&d, &s, 2);
    int E = s.n_embd;
    struct duo_weight wqkv = plain_weight(&d, E, (H + 2 * K) * D), wo = plain_weight(&d, H * D, E);
    struct array gain = array_random(&d, (size_t)E, 1.0f);
    EACH(side)
    for (int i = 0; i < 2; i++) {
        struct mixer *m = &d.layers[side][i].mixer;
        *m = (struct mixer){.kind = MIXER_ATTENTION,
                            .block.in = {NORM_RMS, gain.on[side], NULL, 1e-6f}};
        m->attention = (struct attention){.n_heads = H,
                                          .n_kv_heads = K,
                                          .k_dim = D,
                                          .v_dim = D,
                                          .wqkv = &wqkv.on[side],
                                          .wo = &wo.on[side],
                                          .rope = &d.ropes[0],
                                          .scale = 0.1f};
    }
    struct index_parts x;
    index_parts_new(&d, &x, K, 24, chosen, block, E, false);
    if (duo_runs(&d, "sparse attention")) {
        char what[80];
        for (int i = 0; i < 2; i++)
            kv_new(&d, i);
        rows_new(&d, 0, 24, true);
        duo_prepare(&d);
        snprintf(what, sizeof what, "%d blocks of %d keys, heads %d/%d of %d", chosen, block, H, K,
                 D);
        sparse_steps(&d, &s, what);
        for (int i = 0; i < 2; i++)
            kv_free(&d, i);
        rows_free(&d, 0, 24, true);
    }
    index_parts_free(&d, &x);
    array_free(&d, &gain);
    weight_free(&d, &wqkv);
    weight_free(&d, &wo);
    duo_close(&d);
}

void test_sparse(void)
{
    int before = n_checks;
    if (!wanted("sparse attention"))
        return;
    sparse_latent_case(4, 12, 32, 20, false);
    sparse_latent_case(3, 5, 24, 40, true); /* no whole vectors of heads */
    sparse_blocks_case(8, 2, 64, 16, 3);
    sparse_blocks_case(6, 3, 32, 8, 4); /* blocks shorter than a page */
    report("sparse attention", before);
}

static void scan_case(int I, int N, int R, int W, bool bias)
{
    struct dims s = base_dims();
    s.b.n_states = SLOTS;
    struct duo d;
    duo_open(&d, &s, 1);
    int E = s.n_embd;
    struct duo_weight w_in = plain_weight(&d, E, 2 * I), w_x = plain_weight(&d, I, R + 2 * N),
                      w_dt = plain_weight(&d, R, I), w_out = plain_weight(&d, I, E);
    struct array conv = array_random(&d, (size_t)(I * W), 0.5f),
                 conv_bias = array_random(&d, (size_t)I, 0.5f),
                 skip = array_random(&d, (size_t)I, 1.0f),
                 decay = array_random(&d, (size_t)(I * N), 1.0f),
                 dt = array_random(&d, (size_t)R, 1.0f), b = array_random(&d, (size_t)N, 1.0f),
                 c = array_random(&d, (size_t)N, 1.0f), gain = array_random(&d, (size_t)E, 1.0f);
    float *slow = random_floats((size_t)(I * N), 1.0f);
    for (int i = 0; i < I * N; i++)
        slow[i] = 0.02f + 0.5f * fabsf(slow[i]);
    EACH(side)
    {
        struct backend *be = d.be[side];
        be->ops->copy_in(be, decay.on[side], slow, (size_t)(I * N) * sizeof *slow);
        struct mixer *m = &d.layers[side][0].mixer;
        *m = (struct mixer){.kind = MIXER_SCAN, .block.in = {NORM_RMS, gain.on[side], NULL, 1e-6f}};
        m->scan = (struct scan){.n_channels = I,
                                .state_dim = N,
                                .dt_rank = R,
                                .conv_len = W,
                                .w_in = &w_in.on[side],
                                .w_x = &w_x.on[side],
                                .w_dt = &w_dt.on[side],
                                .w_out = &w_out.on[side],
                                .conv = conv.on[side],
                                .conv_bias = bias ? conv_bias.on[side] : NULL,
                                .decay = decay.on[side],
                                .skip = skip.on[side],
                                .dt_norm = {NORM_RMS, dt.on[side], NULL, 1e-6f},
                                .b_norm = {NORM_RMS, b.on[side], NULL, 1e-6f},
                                .c_norm = {NORM_RMS, c.on[side], NULL, 1e-6f}};
    }
    char what[80];
    snprintf(what, sizeof what, "%d channels of %d, rank %d, conv %d", I, N, R, W);
    run_turns(&d, &s, "scan", what, turns, small ? 1 : STEPS);
    mem_free(slow);
    struct array *arrays[] = {&conv, &conv_bias, &skip, &decay, &dt, &b, &c, &gain};
    struct duo_weight *weights[] = {&w_in, &w_x, &w_dt, &w_out};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        array_free(&d, arrays[i]);
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++)
        weight_free(&d, weights[i]);
    duo_close(&d);
}

void test_scan(void)
{
    int before = n_checks;
    if (!wanted("scan"))
        return;
    scan_case(256, 16, 8, 4, true);
    scan_case(40, 5, 3, 3, false); /* no whole panels */
    report("scan", before);
}

void cut_delta(void)
{
    delta_case(2, 4, 128, 128, 4, false, turns, 0);
    delta_case(2, 6, 32, 48, 4, true, turns, 0);
    delta_case(1, 3, 20, 24, 3, false, turns, 0);
    beta_scale = 2;
    delta_case(2, 2, 128, 128, 4, false, turns, 0);
    beta_scale = 0;
}

void cut_mixers(void)
{
    ssm_case((struct ssm_test){8, 2, 64, 128, 4, 1, .bias = true});
    ssm_case((struct ssm_test){3, 3, 20, 16, 4, 0, .limits = true, .bias = true, .scales = true});
    ssm_case((struct ssm_test){4, 4, 64, 64, 1, 1, .norm_first = true, .lightning = true});
    scan_case(256, 16, 8, 4, true);
    scan_case(40, 5, 3, 3, false);
    short_conv_case(3, false);
    short_conv_case(4, true);
}

void cut_latent(void)
{
    latent_case(5, 128, 64, 128, 512, 192, DT_BF16, DT_F16);
    latent_case(8, 32, 16, 32, 96, 0, DT_Q8_0, DT_F32);
    latent_case(3, 20, 10, 12, 36, 24, DT_F16, DT_F16);
    latent_case(4, 32, 32, 32, 96, 0, DT_F32, DT_Q4_0);
    latent_case(5, 128, 64, 128, 512, 0, DT_F16, DT_F8_E4M3);
    sparse_latent_case(4, 12, 32, 20, false);
    sparse_blocks_case(8, 2, 64, 16, 3);
}
