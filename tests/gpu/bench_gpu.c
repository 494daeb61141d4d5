/*
 * Speed of the CUDA backend on models of real shapes with random weights: decode at several batch
 * sizes and depths, prompts, and the time of each op alone. An op is timed over all layers in one
 * recorded step, so launch overhead does not count and weights come from memory, not from the L2.
 *   bench_gpu [--model 30b|8b] [--layers N] [--what tg,pp,ops] [--reps N] [--rows 1,8,...]
 *             [--part mixer,mlp,head] [--eager] [--alike N] [--heads H,K,D,ROT,WINDOW[,PARTS]]
 * --heads   other attention heads; PARTS: letters s (sinks), g (gate), n (normed values). With
 *           --what heads: the mixer alone at several depths, and the stages of its prompts.
 * --rows    batch sizes of tg and ops
 * --part    only these ops
 * --eager   ops unrecorded, for profilers
 * --alike   router rows repeat after N experts, so that fewer experts are chosen
 */
#include "backend/backend.h"
#include "backend/profile.h"
#include "base/clock.h"
#include "base/mem.h"
#include "sample/sampler.h"
#include "random_weight.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_LAYERS = 64, MAX_ROWS = 2048, MAX_SEQS = 256, PAGE = 16 };

/* Attention of every layer. */
struct bench_heads {
    int n_heads, n_kv, dim, n_rot, window;
    bool sinks, gate, v_norm;
};

struct bench_layer {
    struct weight wqkv, wo, router, gate_up, down;
};

enum bench_part { P_ALL, P_MIXER, P_MLP, P_HEAD, N_PARTS };
static const char *part_names[] = {"all", "mixer", "mlp", "head+sample"};

struct bench {
    struct backend *be;
    struct network net;
    struct bounds bounds;
    bool moe;
    struct bench_heads heads;
    struct weight emb, head;
    struct bench_layer weights[MAX_LAYERS];
    struct layer layers[MAX_LAYERS];
    struct kv_layer kv[MAX_LAYERS];
    struct rope rope;
    float freq[256];
    int32_t *tokens, *pos, *slot, *q_start, *kv_len, *pages, *out_rows;
    struct batch b;
    struct sampler *sampler, *samplers[MAX_ROWS];
    size_t bytes[N_PARTS]; /* weight bytes read per token by each part, summed over layers */
};

static uint64_t rng = 1;

static void die(const struct error *e)
{
    fprintf(stderr, "bench_gpu: %s\n", e->msg);
    exit(1);
}

static void *device(struct bench *m, size_t bytes)
{
    struct error err = {0};
    void *p = m->be->ops->alloc(m->be, bytes, "the benchmark", &err);
    if (!p)
        die(&err);
    return p;
}

static float *device_random(struct bench *m, size_t n, float base, float scale)
{
    float *h = mem_alloc(n * sizeof(float)), *p = device(m, n * sizeof(float));
    for (size_t i = 0; i < n; i++)
        h[i] = base + scale * random_float(&rng);
    m->be->ops->copy_in(m->be, p, h, n * sizeof(float));
    mem_free(h);
    return p;
}

static void upload(struct bench *m, struct weight *w, enum weight_role role,
                   const struct random_spec *spec)
{
    struct error err = {0};
    struct random_weight r;
    random_weight_make(&r, spec, &rng);
    if (!m->be->ops->upload(m->be, &r.raw, role, w, &err))
        die(&err);
    random_weight_free(&r);
}

static struct norm random_norm(struct bench *m, int width)
{
    return (struct norm){NORM_RMS, device_random(m, (size_t)width, 1, 0.1f), NULL, 1e-6f};
}

/* Layer i, with Q4_K and Q6_K mixed as in Q4_K_M. */
static void build_layer(struct bench *m, int i, int alike)
{
    const struct bench_heads *a = &m->heads;
    int E = m->net.n_embd, D = a->dim, H = a->n_heads * D, K = a->n_kv * D;
    int F = m->moe ? 768 : 14336;
    int n_layers = m->net.n_layers, n_expert = m->moe ? 128 : 1, eighth = n_layers / 8;
    bool more = i < eighth || i >= 7 * eighth || (i - eighth) % 3 == 2;
    enum dtype up = more ? DT_Q6_K : DT_Q4_K;
    enum weight_role role = m->moe ? WEIGHT_EXPERTS : WEIGHT_LINEAR;
    struct bench_layer *w = &m->weights[i];
    struct random_spec qkv = {.n_in = E,
                              .n_expert = 1,
                              .n_seg = 3,
                              .rows = {a->gate ? 2 * H : H, K, K},
                              .type = {DT_Q4_K, DT_Q4_K, up}};
    struct random_spec wo = {.n_in = H, .n_expert = 1, .n_seg = 1, .rows = {E}, .type = {DT_Q4_K}};
    struct random_spec router = {
        .n_in = E, .n_expert = 1, .n_seg = 1, .rows = {128}, .type = {DT_F32}, .alike = alike};
    struct random_spec gu = {.n_in = E,
                             .n_expert = n_expert,
                             .n_seg = 2,
                             .rows = {F, F},
                             .type = {DT_Q4_K, DT_Q4_K},
                             .same_experts = 1};
    struct random_spec down = {
        .n_in = F, .n_expert = n_expert, .n_seg = 1, .rows = {E}, .type = {up}, .same_experts = 1};
    upload(m, &w->wqkv, WEIGHT_LINEAR, &qkv);
    upload(m, &w->wo, WEIGHT_LINEAR, &wo);
    if (m->moe)
        upload(m, &w->router, WEIGHT_ROUTER, &router);
    upload(m, &w->gate_up, role, &gu);
    upload(m, &w->down, role, &down);
    m->bytes[P_MIXER] += w->wqkv.bytes + w->wo.bytes;
    m->bytes[P_MLP] +=
        w->router.bytes + (w->gate_up.bytes + w->down.bytes) * (m->moe ? 8 : 128) / 128;
    struct layer *l = &m->layers[i];
    l->mixer.block.in = random_norm(m, E);
    l->mixer.attention = (struct attention){.n_heads = a->n_heads,
                                            .n_kv_heads = a->n_kv,
                                            .k_dim = D,
                                            .v_dim = D,
                                            .wqkv = &w->wqkv,
                                            .wo = &w->wo,
                                            .q_norm = random_norm(m, D),
                                            .k_norm = random_norm(m, D),
                                            .rope = &m->rope,
                                            .scale = 1.0f / sqrtf((float)D),
                                            .window = a->window,
                                            .gated = a->gate};
    if (a->sinks)
        l->mixer.attention.sinks = device_random(m, (size_t)a->n_heads, 0, 1);
    if (a->v_norm)
        l->mixer.attention.v_norm = (struct norm){NORM_RMS, NULL, NULL, 1e-6f};
    l->mlp.block.in = random_norm(m, E);
    struct ffn ffn = {.gate_up = &w->gate_up, .down = &w->down};
    if (m->moe) {
        l->mlp.router = (struct router){.w = &w->router, .n_used = 8, .renorm = true};
        l->mlp.experts = ffn;
    } else {
        l->mlp.dense = ffn;
    }
    size_t kv = (size_t)m->bounds.n_pages * PAGE * (size_t)K * 2;
    m->kv[i] = (struct kv_layer){.k = device(m, kv), .v = device(m, kv)};
}

static void build(struct bench *m, bool moe, int n_layers, int alike)
{
    m->moe = moe;
    m->net = (struct network){.n_layers = n_layers,
                              .n_embd = moe ? 2048 : 4096,
                              .n_vocab = moe ? 151936 : 128256,
                              .layers = m->layers,
                              .ropes = &m->rope,
                              .n_ropes = 1};
    m->bounds = (struct bounds){.page_len = PAGE,
                                .n_pages = 8192,
                                .k_type = DT_F16,
                                .v_type = DT_F16,
                                .max_tokens = MAX_ROWS,
                                .max_seqs = MAX_SEQS,
                                .max_out = MAX_SEQS,
                                .max_pages = 4096};
    for (int i = 0; i < m->heads.n_rot / 2; i++)
        m->freq[i] = powf(1e6f, -2 * (float)i / (float)m->heads.n_rot);
    m->rope = (struct rope){m->heads.n_rot, m->freq, 1, NULL};
    int64_t t0 = clock_ns();
    struct random_spec emb = {.n_in = m->net.n_embd,
                              .n_expert = 1,
                              .n_seg = 1,
                              .rows = {m->net.n_vocab},
                              .type = {DT_Q4_K}};
    upload(m, &m->emb, WEIGHT_EMBED, &emb);
    emb.type[0] = DT_Q6_K;
    upload(m, &m->head, WEIGHT_HEAD, &emb);
    m->bytes[P_HEAD] = m->head.bytes;
    m->net.embed.tokens = &m->emb;
    m->net.head = (struct head){.norm = random_norm(m, m->net.n_embd), .w = &m->head};
    for (int i = 0; i < n_layers; i++)
        build_layer(m, i, alike);
    struct error err = {0};
    if (!m->be->ops->supports(m->be, &m->net, &err) ||
        !m->be->ops->prepare(m->be, &m->net, &m->bounds, &err))
        die(&err);
    m->tokens = mem_zalloc(MAX_ROWS, 4);
    m->pos = mem_zalloc(MAX_ROWS, 4);
    m->slot = mem_zalloc(MAX_ROWS, 4);
    m->q_start = mem_zalloc(MAX_SEQS + 1, 4);
    m->kv_len = mem_zalloc(MAX_SEQS, 4);
    m->out_rows = mem_zalloc(MAX_SEQS, 4);
    m->pages = mem_zalloc((size_t)MAX_SEQS * (size_t)m->bounds.max_pages, 4);
    struct sample_params greedy = {.temp = 0, .top_p = 1, .repeat_penalty = 1};
    m->sampler = sampler_new(&greedy, m->net.n_vocab);
    for (int i = 0; i < MAX_ROWS; i++)
        m->samplers[i] = m->sampler;
    printf("built in %.2f s; weights read per token: %.3f GB\n", (double)(clock_ns() - t0) * 1e-9,
           (double)(m->bytes[P_MIXER] + m->bytes[P_MLP] + m->bytes[P_HEAD]) * 1e-9);
}

/* A batch of n sequences with `depth` tokens each in the KV cache and `fresh` new ones. */
static void lay_out(struct bench *m, int n, int depth, int fresh)
{
    const struct bounds *s = &m->bounds;
    struct batch *b = &m->b;
    *b = (struct batch){.n_seqs = n, .n_tokens = n * fresh, .n_out = n, .max_pages = s->max_pages};
    b->n_decode = fresh == 1 ? n : 0;
    int per = (depth + fresh + PAGE - 1) / PAGE, page = 0;
    for (int i = 0; i < n; i++) {
        for (int j = 0; j < per; j++)
            m->pages[(size_t)i * (size_t)s->max_pages + (size_t)j] = page++ % s->n_pages;
        for (int j = 0; j < fresh; j++) {
            int t = i * fresh + j, p = depth + j;
            m->tokens[t] = (int32_t)(random_u64(&rng) % (uint64_t)m->net.n_vocab);
            m->pos[t] = p;
            m->slot[t] =
                m->pages[(size_t)i * (size_t)s->max_pages + (size_t)(p / PAGE)] * PAGE + p % PAGE;
        }
        m->q_start[i + 1] = (i + 1) * fresh;
        m->kv_len[i] = depth + fresh;
        m->out_rows[i] = (i + 1) * fresh - 1;
    }
    b->tokens = m->tokens;
    b->pos = m->pos;
    b->slot = m->slot;
    b->q_start = m->q_start;
    b->kv_len = m->kv_len;
    b->pages = m->pages;
    b->out_rows = m->out_rows;
    b->kv = m->kv;
}

/* Runs a whole step, or one kind of op for every layer. */
static void run_ops(struct bench *m, enum bench_part part)
{
    struct backend *be = m->be;
    const struct backend_ops *op = be->ops;
    bool all = part == P_ALL;
    op->embed(be, &m->net.embed);
    for (int i = 0; i < m->net.n_layers; i++) {
        if (all || part == P_MIXER)
            op->mixer(be, &m->layers[i].mixer, i);
        if (all || part == P_MLP)
            op->mlp(be, &m->layers[i].mlp, i);
    }
    if (all || part == P_HEAD)
        op->head(be, &m->net.head);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static uint64_t next_key = 1;

/* Median milliseconds of a step. */
static double time_step(struct bench *m, enum bench_part part, bool recorded, int reps)
{
    double ms[512];
    struct error err = {0};
    uint64_t key = recorded ? next_key++ : 0;
    int32_t out[MAX_SEQS];
    if (reps > 500)
        reps = 500;
    for (int i = -3; i < reps; i++) {
        int64_t t0 = clock_ns();
        m->be->ops->begin(m->be, &m->b);
        if (!key || !m->be->ops->replay(m->be, key))
            run_ops(m, part);
        if (part == P_ALL || part == P_HEAD)
            m->be->ops->sample(m->be, m->samplers);
        if (!m->be->ops->end(m->be, out, &err))
            die(&err);
        if (i >= 0)
            ms[i] = (double)(clock_ns() - t0) * 1e-6;
        for (int j = 0; part == P_ALL && m->b.n_decode && j < m->b.n_tokens; j++)
            m->tokens[j] =
                (out[j] + 977 * j + i + 3) % m->net.n_vocab; /* keep the rows different */
    }
    qsort(ms, (size_t)reps, sizeof *ms, by_value);
    return ms[reps / 2];
}

#ifdef STEEL_CUDA_TRACE
void cuda_trace_dump(struct backend *be, FILE *out);

/* Writes when the kernels of one recorded step waited, in nanoseconds: see traced_wait in
 * gpu.cuh. */
static void trace_step(struct bench *m, int n, int depth)
{
    char name[64];
    lay_out(m, n, depth, 1);
    time_step(m, P_ALL, false, 1);
    time_step(m, P_ALL, true, 5);
    cuda_trace_dump(m->be, NULL);
    next_key--; /* replays the same recording: four steps, of which the last is kept */
    time_step(m, P_ALL, true, 1);
    snprintf(name, sizeof name, "trace_%d_%d.txt", n, depth);
    FILE *f = fopen(name, "w");
    cuda_trace_dump(m->be, f);
    fclose(f);
}
#endif

static bool selected(const char *what, const char *name)
{
    return !what || strstr(what, name);
}

/* Parses comma-separated numbers from 1 to MAX_SEQS; returns how many. */
static int read_rows(const char *s, int *rows, int most)
{
    int n = 0;
    while (*s && n < most) {
        char *end;
        long v = strtol(s, &end, 10);
        if (end == s || v < 1 || v > MAX_SEQS)
            break;
        rows[n++] = (int)v;
        s = *end == ',' ? end + 1 : end;
    }
    return n;
}

static bool read_heads(const char *s, struct bench_heads *h)
{
    char parts[8] = "";
    *h = (struct bench_heads){0};
    int n = sscanf(s, "%d,%d,%d,%d,%d,%7s", &h->n_heads, &h->n_kv, &h->dim, &h->n_rot, &h->window,
                   parts);
    h->sinks = strchr(parts, 's') != NULL;
    h->gate = strchr(parts, 'g') != NULL;
    h->v_norm = strchr(parts, 'n') != NULL;
    return n >= 5 && h->n_kv > 0 && h->n_rot <= 512 && h->n_rot <= h->dim;
}

/* Mixers alone: recorded decodes, and the stages of prompts. */
static void bench_mixers(struct bench *m)
{
    static const int cases[][2] = {{1, 256},   {1, 2048}, {1, 8192},
                                   {1, 32768}, {32, 256}, {32, 2048}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        lay_out(m, cases[i][0], cases[i][1], 1);
        double ms = time_step(m, P_MIXER, true, 20);
        printf("mixer, %2d sequences at %5d: %8.2f us per layer\n", cases[i][0], cases[i][1],
               ms * 1e3 / m->net.n_layers);
        fflush(stdout);
    }
    struct profile prof = {0};
    lay_out(m, 1, 0, 2048);
    time_step(m, P_MIXER, false, 2);
    m->be->profile = &prof;
    time_step(m, P_MIXER, false, 5);
    m->be->profile = NULL;
    double calls = (double)prof.steps[0] * m->net.n_layers * 1e3;
    printf("prompt of 2048: qkv %.1f, attention %.1f, output %.1f us per layer\n",
           prof.ns[0][STAGE_QKV] / calls, prof.ns[0][STAGE_ATTENTION] / calls,
           prof.ns[0][STAGE_OUTPUT] / calls);
}

int main(int argc, char **argv)
{
    bool moe = true;
    int layers = 0, reps = 100, rows[16] = {1, 2, 4, 8, 16, 32, 64, 128}, n_rows = 8;
    bool recorded = true;
    int alike = 0;
    const char *what = NULL, *parts = NULL, *heads = NULL;
    for (int i = 1; i < argc; i++) {
        const char *v = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--model"))
            moe = strcmp(v, "8b") != 0, i++;
        else if (!strcmp(argv[i], "--layers"))
            layers = atoi(v), i++;
        else if (!strcmp(argv[i], "--reps"))
            reps = atoi(v), i++;
        else if (!strcmp(argv[i], "--rows"))
            n_rows = read_rows(v, rows, 16), i++;
        else if (!strcmp(argv[i], "--part"))
            parts = v, i++;
        else if (!strcmp(argv[i], "--eager"))
            recorded = false;
        else if (!strcmp(argv[i], "--alike"))
            alike = atoi(v), i++;
        else if (!strcmp(argv[i], "--heads"))
            heads = v, i++;
        else if (!strcmp(argv[i], "--what"))
            what = v, i++;
        else {
            fprintf(stderr, "bench_gpu: unknown option %s\n", argv[i]);
            return 2;
        }
    }
    struct bench *m = mem_zalloc(1, sizeof *m);
    struct error err = {0};
    struct backend_options opt = {.device = "cuda"};
    m->heads = (struct bench_heads){.n_heads = 32, .n_kv = moe ? 4 : 8, .dim = 128, .n_rot = 128};
    if (heads && !read_heads(heads, &m->heads)) {
        fprintf(stderr, "bench_gpu: --heads %s\n", heads);
        return 2;
    }
    m->be = backend_open_cuda(&opt, &err);
    if (!m->be)
        die(&err);
    build(m, moe, layers ? layers : moe ? 48 : 32, alike > 0 && alike < 128 ? alike : 0);
#ifdef STEEL_CUDA_TRACE
    for (int i = 0; i < n_rows; i++)
        trace_step(m, rows[i], 256);
    if (moe && rows[0] == 1)
        trace_step(m, 1, 8192);
    return 0;
#endif
    if (what && selected(what, "heads"))
        bench_mixers(m);
    if (selected(what, "ops"))
        for (int i = 0; i < n_rows; i++)
            for (int part = 1; part < N_PARTS; part++) {
                int n = rows[i];
                if (!selected(parts, part_names[part]))
                    continue;
                lay_out(m, n, 256, 1);
                double ms = time_step(m, (enum bench_part)part, recorded, recorded ? 20 : 1);
                int calls = part == P_HEAD ? 1 : m->net.n_layers;
                printf("op %-12s batch %3d: %8.3f us per call", part_names[part], n,
                       ms * 1e3 / calls);
                if (n == 1 && m->bytes[part])
                    printf(", %6.1f GB/s", (double)m->bytes[part] / ms * 1e-6);
                printf("  (step %.3f ms)\n", ms);
                fflush(stdout);
            }
    if (selected(what, "tg")) {
        for (int i = 0; i < n_rows; i++) {
            lay_out(m, rows[i], 256, 1);
            double ms = time_step(m, P_ALL, true, reps);
            printf("tg, %3d sequences at 256: %8.3f ms per step, %8.1f tok/s\n", rows[i], ms,
                   rows[i] * 1e3 / ms);
            fflush(stdout);
        }
        const int depths[] = {2048, 8192, 32768};
        for (int i = 0; i < 3 && selected(what, "deep"); i++) {
            lay_out(m, 1, depths[i], 1);
            double ms = time_step(m, P_ALL, true, reps);
            printf("tg,   1 sequence at %5d: %8.3f ms per step, %8.1f tok/s\n", depths[i], ms,
                   1e3 / ms);
            fflush(stdout);
        }
        lay_out(m, 1, 256, 1);
        double ms = time_step(m, P_ALL, false, 20);
        printf("tg, 1 sequence, op by op:  %8.3f ms per step\n", ms);
    }
    if (selected(what, "pp")) {
        const int lengths[] = {512, 1024, 2048};
        for (int i = 0; i < 3; i++) {
            lay_out(m, 1, 0, lengths[i]);
            double ms = time_step(m, P_ALL, false, 10);
            printf("pp%-5d %8.3f ms, %8.1f tok/s\n", lengths[i], ms, lengths[i] * 1e3 / ms);
            fflush(stdout);
        }
        struct profile prof = {0};
        m->be->profile = &prof;
        time_step(m, P_ALL, false, 5);
        for (int i = 0; i < N_STAGES; i++)
            if (prof.ns[0][i] > 0)
                printf("  %-10s %8.3f ms per step\n", stage_name((enum stage)i),
                       prof.ns[0][i] * 1e-6 / 8);
    }
    return 0;
}
