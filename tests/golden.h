/*
 * Reads logits files (i32 T, i32 V, i32 ids[T], f32 logits[T][V]) and runs ids through a model.
 * MICRO: a small model of every family, in the repository. GOLDEN: more and larger data beside the
 * project, where it is present.
 */
#ifndef STEEL_TESTS_GOLDEN_H
#define STEEL_TESTS_GOLDEN_H

#include "base/mem.h"
#include "engine/runtime.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MICRO  "tests/golden/"
#define GOLDEN "../shared/golden/"

static inline bool golden_here(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0;
}

/* For cmocka tests: skipped, saying why, where the path is absent. */
#define GOLDEN_NEEDED(path)                                                                        \
    do {                                                                                           \
        if (!golden_here(path)) {                                                                  \
            print_message("skipped: %s is not here\n", path);                                      \
            skip();                                                                                \
        }                                                                                          \
    } while (0)

struct logits {
    int32_t n_tokens, n_vocab;
    int32_t *ids; /* (n_tokens) */
    float *rows;  /* (n_tokens, n_vocab) */
};

static inline struct logits logits_read(const char *path)
{
    struct logits g = {0};
    FILE *f = fopen(path, "rb");
    CHECK(f, "cannot open %s", path);
    int32_t head[2];
    CHECK(fread(head, 4, 2, f) == 2, "%s: short", path);
    g.n_tokens = head[0];
    g.n_vocab = head[1];
    size_t n = (size_t)g.n_tokens * (size_t)g.n_vocab;
    g.ids = mem_zalloc((size_t)g.n_tokens, 4);
    g.rows = mem_zalloc(n, 4);
    CHECK(fread(g.ids, 4, (size_t)g.n_tokens, f) == (size_t)g.n_tokens, "%s: short", path);
    CHECK(fread(g.rows, 4, n, f) == n, "%s: short", path);
    fclose(f);
    return g;
}

static inline void logits_free(struct logits *g)
{
    mem_free(g->ids);
    mem_free(g->rows);
}

static inline double logits_max_diff(const struct logits *a, const struct logits *b)
{
    double most = 0;
    for (size_t i = 0; i < (size_t)a->n_tokens * (size_t)a->n_vocab; i++) {
        double d = fabs((double)a->rows[i] - (double)b->rows[i]);
        if (!(d <= most)) /* NaN counts as the largest */
            most = isnan(d) ? INFINITY : d;
    }
    return most;
}

/* Mean over positions of KL(p || q), natural logarithm. *worst: the KL of the position where it is largest. */
static inline double logits_kl_worst(const struct logits *p, const struct logits *q, double *worst)
{
    double sum = 0;
    *worst = 0;
    for (int t = 0; t < p->n_tokens; t++) {
        const float *a = p->rows + (size_t)t * (size_t)p->n_vocab;
        const float *b = q->rows + (size_t)t * (size_t)p->n_vocab;
        double za = 0, zb = 0, ma = -INFINITY, mb = -INFINITY, kl = 0;
        for (int i = 0; i < p->n_vocab; i++) {
            ma = fmax(ma, (double)a[i]);
            mb = fmax(mb, (double)b[i]);
        }
        for (int i = 0; i < p->n_vocab; i++) {
            za += exp((double)a[i] - ma);
            zb += exp((double)b[i] - mb);
        }
        for (int i = 0; i < p->n_vocab; i++) {
            double la = (double)a[i] - ma - log(za), lb = (double)b[i] - mb - log(zb);
            kl += exp(la) * (la - lb);
        }
        sum += kl;
        *worst = fmax(*worst, kl);
    }
    return sum / p->n_tokens;
}

static inline double logits_kl(const struct logits *p, const struct logits *q)
{
    double worst;
    return logits_kl_worst(p, q, &worst);
}

/* A GPU lacks some parts of networks, or adapters (docs/families.md, docs/vulkan.md). Whether it refuses the model, and
 * says which part. adapter: NULL = none. */
static inline bool device_refuses(const char *model, const char *adapter)
{
    const char *device = getenv("STEEL_TEST_DEVICE");
    struct adapter_ref ref = {.name = "it", .path = (char *)adapter, .scale = 1};
    struct runtime_options opt = {.context = 64, .backend = {.threads = 1, .device = device}};
    opt.loras = &ref;
    opt.n_loras = adapter != NULL;
    struct error err = {0};
    struct runtime *rt = device ? runtime_open(model, &opt, &err) : NULL;
    bool refused = device && !rt && strstr(err.msg, " not supported on ");
    if (refused)
        print_message("skipped: %s\n", err.msg);
    if (rt)
        runtime_close(rt);
    return refused;
}

/* All positions' logits of `ids`, fed `chunk` tokens at a time (0 = all at once), with an adapter where
 * one is named. */
static inline struct logits logits_adapted(const char *model, const char *adapter,
                                           const struct logits *ids, int chunk, enum dtype kv_type)
{
    struct adapter_ref ref = {.name = "it", .path = (char *)adapter, .scale = 1};
    struct lora_pick pick = {.adapter = 0, .scale = 1, .serial = 1};
    if (chunk <= 0)
        chunk = ids->n_tokens;
    struct runtime_options opt = {.context = ids->n_tokens,
                                  .k_type = kv_type,
                                  .v_type = kv_type,
                                  .max_tokens = chunk,
                                  .max_out = chunk};
    opt.backend.threads = 2;
    opt.loras = &ref;
    opt.n_loras = adapter != NULL;
    /* STEEL_TEST_DEVICE=cuda: the same test on a GPU. STEEL_ISA asks for kernels of the CPU. */
    opt.backend.device = getenv("STEEL_ISA") ? NULL : getenv("STEEL_TEST_DEVICE");
    struct error err = {0};
    struct runtime *rt = runtime_open(model, &opt, &err);
    CHECK(rt, "%s", err.msg);
    CHECK(rt->model->config.n_vocab == ids->n_vocab, "%s: vocabulary", model);
    struct logits out = {.n_tokens = ids->n_tokens, .n_vocab = ids->n_vocab};
    out.ids = mem_zalloc((size_t)out.n_tokens, 4);
    memcpy(out.ids, ids->ids, (size_t)out.n_tokens * 4);
    out.rows = mem_zalloc((size_t)out.n_tokens * (size_t)out.n_vocab, 4);
    struct kv_seq seq = {0};
    for (int at = 0; at < ids->n_tokens; at += chunk) {
        int n = ids->n_tokens - at < chunk ? ids->n_tokens - at : chunk;
        struct step_item item = {.seq = &seq,
                                 .tokens = ids->ids + at,
                                 .n_tokens = n,
                                 .loras = &pick,
                                 .n_loras = adapter != NULL,
                                 .want = LOGITS_ALL};
        CHECK(step_run(rt->step, &item, 1, &err), "%s", err.msg);
        for (int t = 0; t < n; t++)
            step_logits(rt->step, item.first_row + t,
                        out.rows + (size_t)(at + t) * (size_t)out.n_vocab);
    }
    kvcache_release(rt->kv, &seq);
    runtime_close(rt);
    return out;
}

static inline struct logits logits_compute(const char *model, const struct logits *ids, int chunk,
                                           enum dtype kv_type)
{
    return logits_adapted(model, NULL, ids, chunk, kv_type);
}

#endif
