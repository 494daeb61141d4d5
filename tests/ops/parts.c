/*
 * Parts of layers beyond the plain decoder, one by one and together: a network of two layers, from the
 * tokens to the logits, over a mix of prompts and decodes. A backend that refuses a part is right to,
 * as long as it says so: that is counted as a check of its own.
 */
#include "duo.h"

#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum {
    SINKS = 1 << 0,
    SOFTCAP = 1 << 1,
    WHOLE = 1 << 2,    /* QK-norm over the projections */
    TEMP = 1 << 3,     /* attention temperature */
    V_NORM = 1 << 4,   /* of values, without a gain */
    K_IS_V = 1 << 5,   /* one projection for both */
    SHARED = 1 << 6,   /* the second layer reads the first one's cache */
    NORM_OUT = 1 << 7, /* after blocks */
    SCALES = 1 << 8,   /* of residuals, layers, embeddings and logits, and a softcap of those */
    GELU_TANH = 1 << 9,
    GELU = 1 << 10,
    CLAMP = 1 << 11, /* clamped SwiGLU */
    EXPERTS = 1 << 12,
    BIAS = 1 << 13, /* of projections, experts and routers */
    SIGMOID = 1 << 14,
    TOP = 1 << 15, /* softmax after the choice */
    GROUPS = 1 << 16,
    CHOICE = 1 << 17,    /* a bias of the choice, a scale per expert */
    DENSE = 1 << 18,     /* beside experts, with a gate */
    OWN_NORMS = 1 << 19, /* of experts, their router, and what they and the dense part give */
    LAYER_EMBED = 1 << 20,
    WINDOW = 1 << 21, /* in the first layer alone */
    APART = 1 << 22,  /* the dense part is not of the experts' shape as far as a backend is told */
    GATE = 1 << 23,   /* of attention's output */
    LAYERS = 1 << 24, /* the second layer has other heads, scale and RoPE than the first */
    RELU2 = 1 << 25,  /* squared ReLU in place of a gate */
    LATENT = 1 << 26, /* experts on projections of their input */
    PARALLEL = 1 << 27,  /* the mlp reads what the mixer read */
    DEEPSTACK = 1 << 28, /* features of an image tower's inner layers, after both layers */
    SPANS = 1 << 29,     /* attention both ways inside an image, in the second layer */
    SUB_NORMS = 1 << 30, /* of attention's result and of hidden units */
};
#define CHUNKED    (1ull << 37) /* the first layer's window is a chunk */
#define LATE       (1ull << 38) /* QK-norm after RoPE */
#define OWN_GATE   (1ull << 31) /* of attention, one per value */
#define HEAD_GATE  (1ull << 32) /* ... one per head, through softplus */
#define RELU2_GATE (1ull << 33)
#define XIELU      (1ull << 34)
#define SILU_LIMIT (1ull << 35)
#define BESIDE                                                                                     \
    (1ull                                                                                          \
     << 39) /* the second mixer reads what the first one read, and there is no mlp between them */
#define ON_INPUT  (1ull << 36) /* weights of experts on their input */
#define VALUES    (1ull << 44) /* values of half the keys' width */
#define MIXED     (1ull << 45) /* SparseMixer's routing */
#define ALTUP     (1ull << 46) /* a stream of three parts, low-rank residuals */
#define TOP_UNITS (1ull << 47) /* Gaussian top-k of hidden units */
#define LATER                                                                                      \
    (1ull << 48) /* experts of the first layer are added after the second, which has none */
#define SAME       (1ull << 49) /* two more experts return their input */
#define KEEP       (1ull << 50) /* blocks keep their normed input */
#define HYPER      (1ull << 51) /* hyper-connections */
#define SOFTPLUS   (1ull << 52) /* routing */
#define BY_TOKEN   (1ull << 53) /* ... in the first layer */
#define SILU_CLAMP (1ull << 54)

static const struct {
    const char *name;
    uint64_t parts;
    int head_dim;
} cases[] = {
    {"plain", 0, 64},
    {"sinks", SINKS, 64},
    {"sinks and windows", SINKS | WINDOW, 64},
    {"softcap", SOFTCAP, 64},
    {"QK-norm of projections", WHOLE, 64},
    {"temperature", TEMP, 64},
    {"norm of values", V_NORM, 64},
    {"k is v", K_IS_V | V_NORM, 64},
    {"shared keys", SHARED, 64},
    {"gate", GATE, 64},
    {"heads by layer", LAYERS, 128},
    {"heads by layer, all of them wide", LAYERS | V_NORM | SINKS | SOFTCAP, 512},
    {"heads of 256, gated", GATE | WINDOW, 256},
    {"heads of 256", SINKS | WINDOW, 256},
    {"heads of 512", V_NORM | K_IS_V, 512},
    {"norms after", NORM_OUT, 64},
    {"scales", SCALES, 64},
    {"gelu by tanh", GELU_TANH, 64},
    {"gelu", GELU, 64},
    {"clamped swiglu", CLAMP, 64},
    {"biases", BIAS, 64},
    {"experts", EXPERTS, 64},
    {"experts with biases", EXPERTS | BIAS, 64},
    {"sigmoid routing", EXPERTS | SIGMOID, 64},
    {"sigmoid, choice, groups", EXPERTS | SIGMOID | CHOICE | GROUPS, 64},
    {"softmax with a choice bias", EXPERTS | CHOICE, 64},
    {"softmax after the choice", EXPERTS | TOP | BIAS, 64},
    {"dense beside experts", EXPERTS | DENSE | APART, 64},
    {"a shared expert", EXPERTS | DENSE | SIGMOID | CHOICE | BIAS, 64},
    {"a shared expert and groups", EXPERTS | DENSE | SIGMOID | GROUPS, 64},
    {"a shared expert and softmax", EXPERTS | DENSE | CLAMP, 64},
    {"norms of experts", EXPERTS | DENSE | OWN_NORMS, 64},
    {"layer embeddings", LAYER_EMBED, 64},
    {"squared relu", RELU2 | BIAS, 64},
    {"experts with a squared relu", RELU2 | EXPERTS | SIGMOID, 64},
    {"latent experts", EXPERTS | LATENT, 64},
    {"chunks", CHUNKED | WINDOW | SINKS, 64},
    {"QK-norm after rope", LATE | V_NORM, 64},
    {"norms inside blocks", SUB_NORMS, 64},
    {"a gate's own matrix", OWN_GATE, 64},
    {"gates per head", HEAD_GATE | LAYERS, 128},
    {"a gate of squared relu", RELU2_GATE | SUB_NORMS, 64},
    {"xielu", XIELU | BIAS, 64},
    {"limits of silu", SILU_LIMIT | EXPERTS | DENSE | APART, 64},
    {"weights on inputs", EXPERTS | SIGMOID | ON_INPUT, 64},
    {"narrow values", VALUES, 64},
    {"narrow values, windows, heads by layer", VALUES | WINDOW | SINKS | LAYERS | V_NORM, 128},
    {"sparse mixer", EXPERTS | MIXED, 64},
    {"experts without weights", EXPERTS | SAME, 64},
    {"experts without weights, beside a dense mlp", EXPERTS | SAME | DENSE | SIGMOID | CHOICE, 64},
    {"experts of a later layer", EXPERTS | LATER | DENSE | APART, 64},
    {"as longcat", EXPERTS | LATER | SAME | DENSE | APART | CHOICE | NORM_OUT, 64},
    {"normed inputs kept", KEEP | SCALES, 64},
    {"as minimax", KEEP | EXPERTS | SCALES, 64},
    {"hyper-connections", HYPER, 64},
    {"hyper-connections and norms after", HYPER | NORM_OUT | SOFTCAP, 64},
    {"a clamp before silu", SILU_CLAMP, 64},
    {"routing by softplus", EXPERTS | SOFTPLUS | CHOICE, 64},
    {"routing by token", EXPERTS | SOFTPLUS | BY_TOKEN, 64},
    {"as deepseek v4",
     HYPER | EXPERTS | DENSE | APART | SOFTPLUS | BY_TOKEN | CHOICE | SILU_CLAMP | SINKS, 64},
    {"streams", ALTUP, 64},
    {"a top-k of hidden units", TOP_UNITS | GELU_TANH, 64},
    {"as gemma 3n", ALTUP | TOP_UNITS | GELU_TANH | LAYER_EMBED | V_NORM | NORM_OUT | WINDOW, 256},
    {"parallel", PARALLEL, 64},
    {"parallel mixers", BESIDE | SCALES, 64},
    {"parallel experts", PARALLEL | EXPERTS | DENSE | APART | SCALES | NORM_OUT, 64},
    {"as nemotron", RELU2 | EXPERTS | LATENT | DENSE | APART | SIGMOID, 64},
    {"deepstack", DEEPSTACK, 64},
    {"deepstack and scales", DEEPSTACK | SCALES | NORM_OUT, 64},
    {"both ways in images", SPANS, 64},
    {"both ways in images and windows", SPANS | WINDOW | SINKS, 256},
    {"as gpt-oss", SINKS | WINDOW | BIAS | EXPERTS | TOP | CLAMP, 64},
    {"as gemma",
     WINDOW | V_NORM | K_IS_V | NORM_OUT | SCALES | GELU_TANH | EXPERTS | DENSE | OWN_NORMS |
         LAYER_EMBED | CHOICE,
     256},
};
enum { N_CASES = sizeof cases / sizeof *cases, MAX_OWNED = 96, P = 32 };

/* What a case allocated in both memories. */
struct stock {
    struct duo *d;
    struct duo_weight w[MAX_OWNED];
    struct array a[MAX_OWNED];
    int n_w, n_a;
};

static struct duo_weight *matrix(struct stock *k, enum weight_role role, int n_in, int n_out,
                                 int n_expert, enum dtype type, bool bias)
{
    fail_if(k->n_w == MAX_OWNED, "too many weights");
    struct random_spec spec = {.n_in = n_in,
                               .n_expert = n_expert,
                               .n_seg = 1,
                               .rows = {n_out},
                               .type = {type},
                               .bias = bias};
    weight_new(k->d, &k->w[k->n_w], role, &spec);
    return &k->w[k->n_w++];
}

static struct array *vector(struct stock *k, int n, float scale)
{
    fail_if(k->n_a == MAX_OWNED, "too many arrays");
    k->a[k->n_a] = array_random(k->d, (size_t)n, scale);
    return &k->a[k->n_a++];
}

static void set_norm(struct stock *k, struct norm *const on[SIDES], int width, bool gain)
{
    struct array *g = gain ? vector(k, width, 1.0f) : NULL;
    EACH(side)
    *on[side] = (struct norm){NORM_RMS, g ? g->on[side] : NULL, NULL, 1e-6f};
}

/* The same norm of layer i on both sides. */
#define NORM(field, width, gain)                                                                   \
    set_norm(k, (struct norm *const[]){&k->d->layers[REF][i].field, &k->d->layers[DEV][i].field},  \
             width, gain)

static void make_mixer(struct stock *k, uint64_t parts, int i, enum dtype type)
{
    struct duo *d = k->d;
    const struct dims *s = &d->s;
    int H = s->n_heads, K = s->n_kv_heads, D = s->head_dim, E = s->n_embd;
    bool shares = (parts & SHARED) && i == 1, other = (parts & LAYERS) && i == 1;
    if (other)
        H *= 4, K *= 2, D /= 2; /* of the same cache */
    int Dv = parts & VALUES ? D / 2 : D;
    int rows = (parts & GATE ? 2 : 1) * H * D + (shares           ? 0
                                                 : parts & K_IS_V ? K * D
                                                                  : K * (D + Dv));
    const struct duo_weight *wqkv = matrix(k, WEIGHT_LINEAR, E, rows, 1, type, (parts & BIAS) != 0);
    const struct duo_weight *gate = NULL;
    if (parts & (OWN_GATE | HEAD_GATE))
        gate = matrix(k, WEIGHT_LINEAR, E, parts & HEAD_GATE ? H : H * D, 1, type, false);
    const struct duo_weight *wo = matrix(k, WEIGHT_LINEAR, H * Dv, E, 1, type, (parts & BIAS) != 0);
    struct array *sinks = parts & SINKS ? vector(k, H, 2.0f) : NULL;
    EACH(side)
    {
        struct mixer *m = &d->layers[side][i].mixer;
        struct attention *a = &m->attention;
        a->wqkv = &wqkv->on[side];
        a->wo = &wo->on[side];
        a->n_heads = H;
        a->n_kv_heads = K;
        a->k_dim = D;
        a->v_dim = Dv;
        if (other) {
            a->rope = &d->ropes[1];
            a->scale = 0.3f;
        }
        a->gated = parts & GATE;
        a->wgate = gate ? &gate->on[side] : NULL;
        a->softplus = (parts & HEAD_GATE) != 0;
        a->chunked = (parts & CHUNKED) != 0 && i == 0;
        a->norm_late = (parts & LATE) != 0;
        a->sinks = sinks ? sinks->on[side] : NULL;
        a->softcap = parts & SOFTCAP ? 0.5f : 0;
        a->norm_whole = parts & WHOLE;
        a->k_is_v = parts & K_IS_V;
        a->shares_kv = shares;
        a->window = parts & WINDOW && i == 0 ? 9 : 0;
        a->temp_beta = parts & TEMP ? 0.3f : 0;
        a->temp_len = 4;
        a->span = parts & SPANS && (i == 1 || parts & WINDOW) ? SPAN_ALSO : SPAN_NONE;
        m->block.scale = parts & SCALES ? 0.7f : 0;
        m->block.keep = parts & KEEP ? 1.4f : 0;
        m->block.parallel = (parts & BESIDE) != 0 && i == 1;
    }
    NORM(mixer.block.in, E, true);
    if (parts & (WHOLE | V_NORM)) {
        NORM(mixer.attention.q_norm, parts & WHOLE ? H * D : D, true);
        NORM(mixer.attention.k_norm, parts & WHOLE ? K * D : D, true);
    }
    if (parts & SUB_NORMS)
        NORM(mixer.attention.out_norm, H * Dv, true);
    if (parts & V_NORM)
        NORM(mixer.attention.v_norm, Dv, false);
    if (parts & NORM_OUT)
        NORM(mixer.block.out, E, true);
}

/* A table of experts, no two equal in a row. */
static const struct array *numbers(struct stock *k, int rows, int width, int n)
{
    struct array *a = vector(k, rows * width, 1.0f);
    float *host = mem_zalloc((size_t)(rows * width), sizeof *host);
    for (int i = 0; i < rows; i++)
        for (int j = 0, first = (int)(random_u64(&rng) % (uint64_t)n); j < width; j++)
            host[i * width + j] = (float)((first + (n - 1) * j) % n);
    EACH(side)
    k->d->be[side]->ops->copy_in(k->d->be[side], a->on[side], host,
                                 (size_t)(rows * width) * sizeof *host);
    mem_free(host);
    return a;
}

static void make_experts(struct stock *k, uint64_t parts, int i, enum dtype type)
{
    struct duo *d = k->d;
    const struct dims *s = &d->s;
    int E = s->n_embd, n = s->n_expert, F = s->n_ff_exp;
    bool bias = parts & BIAS;
    int same = parts & SAME ? 2 : 0;
    const struct duo_weight *router = matrix(k, WEIGHT_ROUTER, E, n + same, 1, DT_F32, bias);
    enum weight_role role =
        parts & DENSE && !(parts & APART) ? WEIGHT_EXPERTS_SHARED : WEIGHT_EXPERTS;
    const struct duo_weight *to = NULL, *from = NULL;
    int L = parts & LATENT ? E / 2 : E;
    const struct duo_weight *up = matrix(k, role, L, parts & RELU2 ? F : 2 * F, n, type, bias);
    const struct duo_weight *down = matrix(k, role, F, L, n, type, bias);
    if (parts & LATENT) {
        to = matrix(k, WEIGHT_LINEAR, E, L, 1, type, false);
        from = matrix(k, WEIGHT_LINEAR, L, E, 1, type, false);
    }
    const struct array *choice = parts & CHOICE ? vector(k, n + same, 0.2f) : NULL;
    const struct array *scale = parts & CHOICE ? vector(k, n + same, 1.0f) : NULL;
    const struct array *table =
        parts & BY_TOKEN && i == 0 ? numbers(k, s->n_vocab, s->n_expert_used, n) : NULL;
    EACH(side)
    {
        struct mlp *m = &d->layers[side][i].mlp;
        m->router = (struct router){.kind = parts & SIGMOID    ? ROUTER_SIGMOID
                                            : parts & TOP      ? ROUTER_SOFTMAX_TOP
                                            : parts & MIXED    ? ROUTER_SPARSE_MIXER
                                            : parts & SOFTPLUS ? ROUTER_SOFTPLUS
                                                               : ROUTER_SOFTMAX,
                                    .w = &router->on[side],
                                    .n_used = s->n_expert_used,
                                    .n_same = same,
                                    .n_groups = parts & GROUPS ? 4 : 0,
                                    .n_groups_used = parts & GROUPS ? 2 : 0,
                                    .renorm = i == 0 && !(parts & MIXED),
                                    .jitter = 0.2f,
                                    .weighs_input = (parts & ON_INPUT) != 0,
                                    .scale = parts & SIGMOID ? 2.5f : 0,
                                    .choice_bias = choice ? choice->on[side] : NULL,
                                    .expert_scale = scale ? scale->on[side] : NULL};
        m->experts = (struct ffn){.gate_up = &up->on[side], .down = &down->on[side]};
        m->to_experts = to ? &to->on[side] : NULL;
        m->from_experts = from ? &from->on[side] : NULL;
        m->experts_late = (parts & LATER) != 0;
        m->router.by_token = table ? table->on[side] : NULL;
    }
    if (!(parts & OWN_NORMS))
        return;
    NORM(mlp.router.norm, E, true);
    NORM(mlp.experts_in, E, true);
    NORM(mlp.experts_out, E, true);
    NORM(mlp.dense_out, E, true);
}

static void make_mlp(struct stock *k, uint64_t parts, int i, enum dtype type)
{
    struct duo *d = k->d;
    int E = d->s.n_embd, F = d->s.n_ff;
    const struct duo_weight *up = NULL, *down = NULL, *gate = NULL, *in = NULL, *back = NULL;
    if (!(parts & EXPERTS) || parts & DENSE) {
        up = matrix(k, WEIGHT_LINEAR, E, parts & (RELU2 | XIELU) ? F : 2 * F, 1, type,
                    (parts & BIAS) != 0);
        down = matrix(k, WEIGHT_LINEAR, F, E, 1, type, (parts & BIAS) != 0);
    }
    if (parts & DENSE && !(parts & LATER))
        gate = matrix(k, WEIGHT_LINEAR, E, 1, 1, DT_F32, false);
    if (parts & EXPERTS && !(parts & LATER && i))
        make_experts(k, parts, i, type);
    if (parts & LAYER_EMBED) {
        in = matrix(k, WEIGHT_LINEAR, E, P, 1, type, false);
        back = matrix(k, WEIGHT_LINEAR, P, E, 1, DT_F16, false);
        NORM(mlp.embed.norm, E, true);
    }
    enum activation act = parts & GELU_TANH    ? ACT_GELU_TANH
                          : parts & GELU       ? ACT_GELU
                          : parts & CLAMP      ? ACT_SWIGLU_CLAMP
                          : parts & RELU2      ? ACT_PLAIN_RELU2
                          : parts & RELU2_GATE ? ACT_RELU2
                          : parts & XIELU      ? ACT_PLAIN_XIELU
                          : parts & SILU_LIMIT ? ACT_SILU_LIMIT
                          : parts & SILU_CLAMP ? ACT_SILU_CLAMP
                                               : ACT_SILU;
    EACH(side)
    {
        struct mlp *m = &d->layers[side][i].mlp;
        if (up)
            m->dense = (struct ffn){.gate_up = &up->on[side], .down = &down->on[side]};
        m->dense.act = m->experts.act = act;
        m->dense.alpha = m->experts.alpha = 1.702f;
        m->dense.limit = m->experts.limit = 0.4f;
        m->dense.beta = 0.3f;
        m->dense.sparse = (parts & TOP_UNITS) != 0;
        m->dense.sparsity = 0.5f;
        m->dense_gate = gate ? &gate->on[side] : NULL;
        if (in) {
            m->embed.gate = &in->on[side];
            m->embed.project = &back->on[side];
            m->embed.act = ACT_GELU_TANH;
        }
        m->block.scale = parts & SCALES ? 1.3f : 0;
        m->block.keep = parts & KEEP ? 0.6f : 0;
        m->block.parallel = parts & PARALLEL;
        m->stream_scale = parts & SCALES ? 0.8f : 0;
        m->deepstack = parts & DEEPSTACK ? 2 - i : 0;
    }
    NORM(mlp.block.in, E, true);
    if (parts & SUB_NORMS)
        NORM(mlp.dense.mid, F, true);
    if (parts & NORM_OUT)
        NORM(mlp.block.out, E, true);
}

/* The stream's parts, and what layers need for them. */
static void make_streams(struct stock *k, enum dtype type)
{
    enum { N = 3, RANK = 32 };
    struct duo *d = k->d;
    int E = d->s.n_embd;
    const struct duo_weight *to = matrix(k, WEIGHT_HEADS, E, E, N - 1, type, false);
    const struct duo_weight *from = matrix(k, WEIGHT_HEADS, E, E, N - 1, type, false);
    EACH(side)
    d->net[side].streams =
        (struct streams){.n = N, .project = &to->on[side], .unproject = &from->on[side]};
    for (int i = 0; i < 2; i++) {
        const struct duo_weight *left = matrix(k, WEIGHT_LINEAR, E, RANK, 1, type, false);
        const struct duo_weight *right = matrix(k, WEIGHT_LINEAR, RANK, E, 1, type, false);
        const struct array *router = vector(k, N * E, 1.0f), *predict = vector(k, N * N * N, 1.0f),
                           *correct = vector(k, N * N, 1.0f), *scale = vector(k, E, 1.0f);
        EACH(side)
        {
            struct layer *l = &d->layers[side][i];
            l->mixer.laurel = (struct laurel){.left = &left->on[side], .right = &right->on[side]};
            l->altup = (struct altup){.router = router->on[side],
                                      .predict = predict->on[side],
                                      .correct = correct->on[side],
                                      .scale = i ? scale->on[side] : NULL};
        }
        NORM(mixer.laurel.norm, E, true);
        NORM(altup.norm, E, true);
    }
}

static void make_hyper(struct stock *k)
{
    enum { N = 4 };
    struct duo *d = k->d;
    int E = d->s.n_embd;
    for (int i = 0; i < 5; i++) { /* of two layers with two blocks each, and of the head */
        int n = i < 4 ? N * (N + 2) : N;
        const struct duo_weight *w = matrix(k, WEIGHT_ROUTER, N * E, n, 1, DT_F32, false);
        const struct array *scale = vector(k, 3, 1.0f), *base = vector(k, n, 1.0f);
        EACH(side)
        {
            struct streams *s = &d->net[side].streams;
            struct hyper *h = i < 4 ? &d->layers[side][i / 2].hyper[i % 2] : &s->head;
            s->n = N;
            *h = (struct hyper){.w = &w->on[side],
                                .scale = scale->on[side],
                                .base = base->on[side],
                                .eps = 1e-6f,
                                .offset = 1e-6f,
                                .rounds = 5};
        }
    }
}

static void make_ends(struct stock *k, uint64_t parts, enum dtype type)
{
    struct duo *d = k->d;
    int E = d->s.n_embd, V = d->s.n_vocab;
    const struct duo_weight *tokens = matrix(k, WEIGHT_EMBED, E, V, 1, DT_F16, false);
    const struct duo_weight *head = matrix(k, WEIGHT_HEAD, E, V, 1, type, false);
    const struct duo_weight *table = NULL, *project = NULL;
    if (parts & LAYER_EMBED) {
        table = matrix(k, WEIGHT_EMBED, 2 * P, V, 1, DT_F16, false);
        project = matrix(k, WEIGHT_LINEAR, E, 2 * P, 1, type, false);
        set_norm(
            k,
            (struct norm *const[]){&d->net[REF].embed.layers.norm, &d->net[DEV].embed.layers.norm},
            P, true);
    }
    set_norm(k, (struct norm *const[]){&d->net[REF].head.norm, &d->net[DEV].head.norm}, E, true);
    EACH(side)
    {
        struct network *net = &d->net[side];
        net->embed.tokens = &tokens->on[side];
        net->head.w = &head->on[side];
        if (parts & SCALES) {
            net->embed.scale = 16;
            net->head.scale = 0.5f;
            net->head.softcap = 0.7f;
        }
        if (!table)
            continue;
        struct embed_layers *e = &net->embed.layers;
        e->width = P;
        e->table = &table->on[side];
        e->project = &project->on[side];
        e->table_scale = 4;
        e->project_scale = 0.2f;
        e->scale = 0.7f;
        e->pad = 7;
    }
}

/* Images in the prompts: keys 8 to 29 of the long one, keys 5 and 6 of the short one. */
static void plan_spans(struct plan *p, int32_t *spans)
{
    p->b.spans = spans;
    for (int s = p->b.n_decode; s < p->b.n_seqs; s++)
        for (int t = p->q_start[s]; t < p->q_start[s + 1]; t++) {
            int from = p->kv_len[s] > 20 ? 8 : 5, end = p->kv_len[s] > 20 ? 30 : 7;
            if (p->pos[t] < from || p->pos[t] >= end)
                continue;
            spans[2 * t] = from;
            spans[2 * t + 1] = end;
        }
}

/* Rows whose experts the backends may not agree on count for nothing: they are drawn again. */
static bool is_sure(struct duo *d, const struct plan *p, double tol)
{
    for (int i = 0; i < p->b.n_tokens; i++)
        if (backend_ref_gap(d->be[REF], i) < (float)tol)
            return false;
    return true;
}

static void part_case(int c, enum dtype type, enum dtype kv, double tol)
{
    uint64_t parts = cases[c].parts;
    /* few rows where all must be sure of their experts */
    int seqs[][2] = {{0, parts & EXPERTS ? 9 : 70}, {21, 1}, {40, 1}, {3, 4}};
    struct dims s = base_dims();
    struct duo d;
    s.n_heads = cases[c].head_dim > 64 ? 4 : 8;
    s.n_kv_heads = 2;
    s.head_dim = s.n_rot = cases[c].head_dim;
    s.n_vocab = 300;
    s.n_ff = 256;
    s.b.k_type = s.b.v_type = kv;
    s.b.max_embeds = 26;
    s.n_levels = parts & DEEPSTACK ? 2 : 0;
    duo_open(&d, &s, 2);
    struct stock k = {.d = &d};
    for (int i = 0; i < 2; i++) {
        make_mixer(&k, parts, i, type);
        if (!(parts & BESIDE) || i == 1)
            make_mlp(&k, parts, i, type);
        kv_new(&d, i);
    }
    make_ends(&k, parts, type);
    if (parts & ALTUP)
        make_streams(&k, type);
    if (parts & HYPER)
        make_hyper(&k);
    struct error err = {0};
    if (!d.be[DEV]->ops->supports(d.be[DEV], &d.net[DEV], &err)) {
        n_checks++;
        bool refused = strstr(err.msg, "supported on") != NULL;
        n_failed += !refused;
        printf("%s  %s: \"%s\"\n", refused ? "skipped:" : "FAIL", cases[c].name, err.msg);
    } else {
        duo_prepare(&d);
        struct plan p;
        char what[120];
        snprintf(what, sizeof what, "%s, %s", cases[c].name, dtype_name(type));
        if (bytes_only)
            invariant_cuts(&d, what, true);
        plan_make(&p, &s, (const int(*)[2])seqs, 4, false);
        int32_t spans[2 * 512] = {0};
        if (parts & SPANS)
            plan_spans(&p, spans);
        for (int draw = 0; draw < 300 && !bytes_only; draw++) {
            for (int i = 0; i < p.b.n_tokens; i++)
                p.tokens[i] = (int32_t)(random_u64(&rng) % (uint64_t)s.n_vocab);
            mem_free(p.embed_rows);
            if (type == DT_F16)
                plan_embeds(&p, &s, 3);
            begin(&d, &p);
            EACH(side)
            {
                const struct backend_ops *ops = d.be[side]->ops;
                ops->embed(d.be[side], &d.net[side].embed);
                for (int i = 0; i < 2; i++) {
                    ops->mixer(d.be[side], &d.layers[side][i].mixer, i);
                    ops->mlp(d.be[side], &d.layers[side][i].mlp, i);
                }
                ops->head(d.be[side], &d.net[side].head);
            }
            end(&d, NULL, NULL);
            for (int i = 0; i < 2; i++)
                kv_copy_back(&d, i);
            if (!(parts & EXPERTS) || is_sure(&d, &p, tol / 10))
                break;
            fail_if(draw == 299, "no rows that are sure of their experts");
        }
        if (!bytes_only)
            logits_check(&d, what, p.b.n_out, tol);
        mem_free(p.embed_rows);
        mem_free(p.pages);
    }
    for (int i = 0; i < 2; i++)
        kv_free(&d, i);
    for (int i = 0; i < k.n_w; i++)
        weight_free(&d, &k.w[i]);
    for (int i = 0; i < k.n_a; i++)
        array_free(&d, &k.a[i]);
    duo_close(&d);
}

void test_parts(void)
{
    int before = n_checks;
    bool all = wanted("parts");
    for (int c = 0; c < N_CASES; c++) {
        char name[80];
        snprintf(name, sizeof name, "parts: %s", cases[c].name);
        if (!all && !wanted(name)) /* one of them */
            continue;
        part_case(c, DT_F16, DT_F32, 2e-3);
        if (!light || c % 3 == 0 || (light <= 2 && cases[c].parts & EXPERTS))
            part_case(c, DT_Q8_0, DT_F16, product_tol > 2e-3 ? product_tol : 2e-3);
    }
    if (n_checks > before)
        report("parts", before);
}

void cut_parts(void)
{
    for (int c = 0; c<N_CASES; c += light> 1 ? 5 : 1)
        part_case(c, c % 2 ? DT_F16 : DT_Q8_0, c % 3 ? DT_F16 : DT_F32, 0);
}
