/*
 * The speed of embeddings: texts of 20 to 200 random tokens, all submitted at once, like one
 * request of a client that indexes documents. Prints tokens and texts per second, mean and
 * deviation over repetitions, and a hash of the vectors.
 */
#include "backend/backend.h"
#include "cli/bench/bench_embed.h"
#include "base/clock.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "engine/embed.h"
#include "model/families/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { SHORTEST = 20, LONGEST = 200 };

bool bench_embed_only(const char *path)
{
    struct error err;
    struct config c;
    struct tensorfile *f = path ? tensorfile_open(path, &err) : NULL;
    bool is = f && config_load(f, &c, &err) && c.family->encoder;
    tensorfile_close(f);
    return is;
}

/* The same lengths and ids for every run. */
static uint32_t next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static int64_t make_texts(const struct embedder *e, struct embed_text *texts, int n, float *vectors)
{
    int V = embedder_runtime(e)->model->config.n_vocab, most = embedder_context(e);
    int64_t tokens = 0;
    uint32_t rnd = 7;
    for (int i = 0; i < n; i++) {
        int len = SHORTEST + (int)(next(&rnd) % (LONGEST - SHORTEST + 1));
        texts[i].n = len < most ? len : most;
        texts[i].ids = mem_zalloc((size_t)texts[i].n, sizeof *texts[i].ids);
        texts[i].out = vectors + (size_t)i * (size_t)embedder_width(e);
        for (int k = 0; k < texts[i].n; k++)
            texts[i].ids[k] = (int32_t)(next(&rnd) % (uint32_t)V);
        tokens += texts[i].n;
    }
    return tokens;
}

static uint64_t hash_of(const float *v, size_t n)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &v[i], 4);
        h = (h ^ bits) * 0x100000001b3u;
    }
    return h;
}

/* Mean and deviation of the seconds per repetition, after one warm-up. */
static bool measure(struct embedder *e, struct embed_text *texts, int n, int reps, double *mean,
                    double *dev, struct error *err)
{
    double sum = 0, squares = 0;
    bool ok = true;
    for (int r = -1; ok && r < reps; r++) {
        struct embed_job job = {.texts = texts, .n = n};
        int64_t t0 = clock_ns();
        ok = embedder_run(e, &job, err) && (!cli_interrupted() || error_set(err, "interrupted"));
        double s = (double)(clock_ns() - t0) * 1e-9;
        sum += r >= 0 ? s : 0;
        squares += r >= 0 ? s * s : 0;
    }
    *mean = sum / reps;
    double var = squares / reps - *mean * *mean;
    *dev = var > 0 ? sqrt(var) : 0;
    return ok;
}

static void print(const struct embedder *e, int n, int64_t tokens, double mean, double dev,
                  uint64_t hash, bool json)
{
    const struct runtime *rt = embedder_runtime(e);
    double rate = (double)tokens / mean;
    char size[16], name[32];
    snprintf(name, sizeof name, "embed x%d", n);
    if (json) {
        printf("{\"test\": \"%s\", \"tok_s\": %.3f, \"stddev\": %.3f, \"texts_s\": %.3f, "
               "\"tokens\": %lld, \"backend\": \"%s\", \"weights_bytes\": %zu, \"params\": %lld, "
               "\"load_s\": %.3f, \"vectors_hash\": \"%016llx\"}\n",
               name, rate, rate * dev / mean, n / mean, (long long)tokens, rt->be->ops->name,
               rt->model->bytes, (long long)rt->model->n_params, (double)rt->load_ns * 1e-9,
               (unsigned long long)hash);
        return;
    }
    printf("%s: %.2f B parameters, %s, backend %s, loaded in %.2f s\n\n", rt->file->path,
           (double)rt->model->n_params * 1e-9, cli_bytes((double)rt->model->bytes, size),
           rt->be->ops->name, (double)rt->load_ns * 1e-9);
    printf("| test                 |                tok/s |  texts/s | vectors          |\n");
    printf("|----------------------|---------------------:|---------:|------------------|\n");
    printf("| %-20s | %10.2f ± %-8.2f | %8.2f | %016llx |\n", name, rate, rate * dev / mean,
           n / mean, (unsigned long long)hash);
}

bool bench_embed(const char *path, const struct runtime_options *opt, int n_texts, int reps,
                 bool json, struct error *err)
{
    struct embed_options o = {.runtime = *opt, .pooling = -1, .normalize = -1};
    struct embedder *e = embedder_open(path, &o, err);
    if (!e)
        return false;
    bool rows = embedder_pooling(e)->kind == POOLING_NONE, ok = true;
    if (rows)
        ok = error_set(err, "%s: the model does not pool, so it has no vector per text", path);
    double mean, dev;
    size_t n = (size_t)n_texts, width = (size_t)embedder_width(e);
    struct embed_text *texts = mem_zalloc(n, sizeof *texts);
    float *vectors = mem_zalloc(n * width, sizeof *vectors);
    if (ok) {
        int64_t tokens = make_texts(e, texts, n_texts, vectors);
        ok = measure(e, texts, n_texts, reps, &mean, &dev, err);
        if (ok)
            print(e, n_texts, tokens, mean, dev, hash_of(vectors, n * width), json);
    }
    if (ok && opt->profile)
        profile_print(&embedder_runtime(e)->profile, json ? stderr : stdout);
    for (size_t i = 0; i < n; i++)
        embed_text_clear(&texts[i]);
    mem_free(texts);
    mem_free(vectors);
    embedder_close(e);
    return ok;
}
