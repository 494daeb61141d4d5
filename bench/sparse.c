/*
 * Sparse attention beside full attention: the time of one row through a layer of GLM-5's and of MiniMax-M3's shape, by
 * depth, with its indexer and without. Random weights (F16) and caches: neither changes the work. A layer's projections
 * are in both times; `at depth 0` shows them. Medians of interleaved runs.
 *
 *   sparse [-t THREADS] [--runs N] [--depths N,..]
 */
#include "backend/backend.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { E = 6144, PAGE = 16, MAX_RUNS = 101, MAX_WEIGHTS = 16 };

static uint32_t rnd = 12345;

static uint32_t random_u32(void)
{
    return rnd = rnd * 1664525u + 1013904223u;
}

struct bench {
    struct backend *be;
    struct network net;
    struct layer layer;
    struct rope rope;
    float freq[32];
    struct weight w[MAX_WEIGHTS];
    int n_w;
    struct kv_layer kv;
    size_t kv_bytes[3];
    int32_t *pages;
};

static void need(bool ok, const struct error *err)
{
    if (ok)
        return;
    fprintf(stderr, "sparse: %s\n", err->msg);
    exit(1);
}

/* n_expert matrices of small random fp16 values. */
static const struct weight *matrix(struct bench *b, enum weight_role role, int n_in, int n_out,
                                   int n_expert)
{
    size_t each = (size_t)n_in * (size_t)n_out, n = each * (size_t)n_expert;
    uint16_t *v = mem_alloc(n * sizeof *v);
    for (size_t i = 0; i < n; i++)
        v[i] = (uint16_t)(0x2000u + (random_u32() >> 22) + (random_u32() >> 31 << 15));
    const uint8_t **at = mem_zalloc((size_t)n_expert, sizeof *at);
    for (int e = 0; e < n_expert; e++)
        at[e] = (const uint8_t *)(v + (size_t)e * each);
    struct raw_weight raw = {.n_in = n_in, .n_out = n_out, .n_expert = n_expert, .n_seg = 1};
    raw.seg[0] = (struct raw_seg){.type = DT_F16, .rows = n_out, .data = at};
    struct error err = {0};
    struct weight *w = &b->w[b->n_w];
    raw.transient = true;
    need(b->be->ops->upload(b->be, &raw, role, w, &err), &err);
    mem_free(at);
    mem_free(v);
    b->n_w++;
    return w;
}

static void give_indexer(struct bench *b, struct indexer *x, int heads, int chosen, int block,
                         int width)
{
    *x = (struct indexer){
        .n_heads = heads, .dim = 128, .n_chosen = chosen, .block = block, .rope = &b->rope};
    x->wq = matrix(b, WEIGHT_LINEAR, width, heads * 128, 1);
    x->wk = matrix(b, WEIGHT_LINEAR, E, 128, 1);
    x->ww = block ? NULL : matrix(b, WEIGHT_LINEAR, E, heads, 1);
    x->k_norm = (struct norm){block ? NORM_RMS : NORM_LAYER, NULL, NULL, 1e-6f};
    x->q_norm.kind = block ? NORM_RMS : NORM_NONE;
    x->q_norm.eps = 1e-6f;
}

static void make_glm(struct bench *b, bool sparse)
{
    enum { H = 64, Dn = 192, Dr = 64, Dv = 256, C = 512, Q = 2048 };
    struct mixer *m = &b->layer.mixer;
    m->kind = MIXER_LATENT;
    m->latent = (struct latent){.n_heads = H,
                                .nope_dim = Dn,
                                .rope_dim = Dr,
                                .v_dim = Dv,
                                .q_rank = Q,
                                .kv_rank = C,
                                .q_norm = {NORM_RMS, NULL, NULL, 1e-6f},
                                .kv_norm = {NORM_RMS, NULL, NULL, 1e-6f},
                                .rope = &b->rope,
                                .scale = 0.0625f};
    struct latent *l = &m->latent;
    l->wqa = matrix(b, WEIGHT_LINEAR, E, Q, 1);
    l->wqb = matrix(b, WEIGHT_LINEAR, Q, H * (Dn + Dr), 1);
    l->wkva = matrix(b, WEIGHT_LINEAR, E, C + Dr, 1);
    l->wkb = matrix(b, WEIGHT_HEADS, Dn, C, H);
    l->wvb = matrix(b, WEIGHT_HEADS, C, Dv, H);
    l->wo = matrix(b, WEIGHT_LINEAR, H * Dv, E, 1);
    if (sparse)
        give_indexer(b, &l->index, 32, 2048, 0, Q);
}

static void make_minimax(struct bench *b, bool sparse)
{
    enum { H = 64, K = 4, D = 128 };
    struct mixer *m = &b->layer.mixer;
    m->kind = MIXER_ATTENTION;
    m->attention = (struct attention){.n_heads = H,
                                      .n_kv_heads = K,
                                      .k_dim = D,
                                      .v_dim = D,
                                      .q_norm = {NORM_RMS, NULL, NULL, 1e-6f},
                                      .k_norm = {NORM_RMS, NULL, NULL, 1e-6f},
                                      .rope = &b->rope,
                                      .scale = 0.088f};
    m->attention.wqkv = matrix(b, WEIGHT_LINEAR, E, (H + 2 * K) * D, 1);
    m->attention.wo = matrix(b, WEIGHT_LINEAR, H * D, E, 1);
    if (sparse)
        give_indexer(b, &m->attention.index, K, 16, 128, E);
}

/* A cache of random fp16 values. */
static void *cache(struct bench *b, int plane, int width, int tokens)
{
    struct error err = {0};
    size_t n = (size_t)width * (size_t)tokens;
    if (!n)
        return NULL;
    b->kv_bytes[plane] = n * sizeof(uint16_t);
    uint16_t *v = b->be->ops->alloc(b->be, b->kv_bytes[plane], "a cache", &err);
    need(v, &err);
    for (size_t i = 0; i < n; i++)
        v[i] = (uint16_t)(0x3000u + (random_u32() >> 21) + (random_u32() >> 31 << 15));
    return v;
}

static struct bench *bench_new(void (*make)(struct bench *, bool), bool sparse, int threads,
                               int longest)
{
    struct bench *b = mem_zalloc(1, sizeof *b);
    struct backend_options opt = {.threads = threads};
    struct error err = {0};
    int k, v;
    b->be = backend_open_cpu(&opt, &err);
    need(b->be, &err);
    for (int i = 0; i < 32; i++)
        b->freq[i] = (float)pow(1e6, -i / 32.0);
    b->rope = (struct rope){.n_rot = 64, .freq = b->freq, .mscale = 1};
    make(b, sparse);
    b->layer.mixer.block.in = (struct norm){NORM_RMS, NULL, NULL, 1e-6f};
    if (b->layer.mixer.kind == MIXER_LATENT) {
        b->layer.mixer.latent.rope = &b->rope;
        b->layer.mixer.latent.index.rope = &b->rope;
    }
    b->net = (struct network){.n_layers = 1,
                              .n_embd = E,
                              .n_vocab = 1,
                              .layers = &b->layer,
                              .head.norm = {NORM_RMS, NULL, NULL, 1e-6f},
                              .ropes = &b->rope,
                              .n_ropes = 1};
    need(b->be->ops->supports(b->be, &b->net, &err), &err);
    struct bounds bounds = {.page_len = PAGE,
                            .n_pages = longest / PAGE + 1,
                            .k_type = DT_F16,
                            .v_type = DT_F16,
                            .max_tokens = 1,
                            .max_seqs = 1,
                            .max_out = 1,
                            .max_pages = longest / PAGE + 1};
    need(b->be->ops->prepare(b->be, &b->net, &bounds, &err), &err);
    mixer_cache_dims(&b->layer.mixer, &k, &v);
    int tokens = bounds.n_pages * PAGE;
    b->kv.k = cache(b, 0, k, tokens);
    b->kv.v = cache(b, 1, v, tokens);
    b->kv.index = cache(b, 2, mixer_index_dim(&b->layer.mixer), tokens);
    b->pages = mem_zalloc((size_t)bounds.n_pages, sizeof *b->pages);
    for (int i = 0; i < bounds.n_pages; i++) /* not in order, as in a server */
        b->pages[i] = (int32_t)((int64_t)i * 7919 % bounds.n_pages);
    return b;
}

/* Seconds of one row after `depth` others. */
static double run(struct bench *b, int depth)
{
    static float x[E];
    int32_t token = 0, pos = depth, q_start[] = {0, 1}, kv_len = depth + 1, out = 0;
    int32_t slot = b->pages[depth / PAGE] * PAGE + depth % PAGE;
    struct batch batch = {.n_tokens = 1,
                          .n_seqs = 1,
                          .n_decode = 1,
                          .n_out = 1,
                          .max_pages = depth / PAGE + 1,
                          .tokens = &token,
                          .pos = &pos,
                          .slot = &slot,
                          .q_start = q_start,
                          .kv_len = &kv_len,
                          .pages = b->pages,
                          .out_rows = &out,
                          .kv = &b->kv};
    struct error err = {0};
    for (int i = 0; i < E; i++)
        x[i] = (float)(random_u32() >> 8) / (float)(1 << 24) - 0.5f;
    b->be->ops->begin(b->be, &batch);
    b->be->ops->stream->put(b->be, x, 1);
    int64_t start = clock_ns();
    b->be->ops->mixer(b->be, &b->layer.mixer, 0);
    double took = (double)(clock_ns() - start) / 1e9;
    b->be->ops->launch(b->be);
    need(b->be->ops->end(b->be, &token, &err), &err);
    return took;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void compare(const char *name, void (*make)(struct bench *, bool), int threads, int runs,
                    const int *depths, int n_depths)
{
    struct bench *b[2];
    for (int i = 0; i < 2; i++)
        b[i] = bench_new(make, i == 1, threads, depths[n_depths - 1] + 1);
    for (int d = 0; d < n_depths; d++) {
        double t[2][MAX_RUNS];
        for (int r = -1; r < runs; r++)
            for (int i = 0; i < 2; i++)
                t[i][r < 0 ? 0 : r] = run(b[i], depths[d]);
        for (int i = 0; i < 2; i++)
            qsort(t[i], (size_t)runs, sizeof **t, by_value);
        double full = t[0][runs / 2] * 1e3, sparse = t[1][runs / 2] * 1e3;
        printf("%-11s depth %7d: full %9.3f ms, sparse %9.3f ms, %6.2fx\n", name, depths[d], full,
               sparse, full / sparse);
        fflush(stdout);
    }
    for (int i = 0; i < 2; i++) {
        struct backend *be = b[i]->be;
        void *planes[] = {b[i]->kv.k, b[i]->kv.v, b[i]->kv.index};
        for (int p = 0; p < 3; p++)
            if (planes[p])
                be->ops->free(be, planes[p], b[i]->kv_bytes[p]);
        for (int w = 0; w < b[i]->n_w; w++)
            be->ops->release(be, &b[i]->w[w]);
        be->ops->close(be);
        mem_free(b[i]->pages);
        mem_free(b[i]);
    }
}

int main(int argc, char **argv)
{
    int threads = 0, runs = 5, depths[16] = {0, 2048, 8192, 32768, 131072}, n = 5;
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "-t"))
            threads = atoi(value);
        else if (!strcmp(argv[i], "--runs") && atoi(value) > 0 && atoi(value) <= MAX_RUNS)
            runs = atoi(value);
        else if (!strcmp(argv[i], "--depths"))
            for (n = 0; *value && n < 16; value += *value == ',') {
                char *end;
                depths[n++] = (int)strtol(value, &end, 10);
                value = end > value ? end : value + strlen(value);
            }
        else {
            fprintf(stderr, "usage: sparse [-t THREADS] [--runs N] [--depths N,..] (ascending)\n");
            return 2;
        }
    }
    compare("GLM-5", make_glm, threads, runs, depths, n);
    compare("MiniMax-M3", make_minimax, threads, runs, depths, n);
    return 0;
}
