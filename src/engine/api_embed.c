/* Implements embeddings and reranking of include/steel.h over embed.h. */
#include "engine/api_int.h"
#include "base/mem.h"
#include "engine/embed.h"

#include <string.h>

struct steel_embedder {
    struct embedder *e;
};

struct steel_embedder *steel_embedder_open(const char *path,
                                           const struct steel_embedder_options *options,
                                           struct steel_error *error)
{
    struct steel_embedder_options o = {0};
    if (options)
        o = *options;
    struct embed_options opt = {
        .runtime = {.backend = {.device = o.device ? o.device : "auto",
                                .threads = o.threads,
                                .deterministic = o.deterministic},
                    .context = o.context,
                    .gpu_memory = o.gpu_memory},
        .pooling = o.pooling ? pooling_kind_of(o.pooling) : -1,
        .normalize = o.unnormalized ? 0 : -1,
        .rank = o.rank,
    };
    if (o.pooling && opt.pooling < 0) {
        lib_fail(error, STEEL_INVALID, "pooling must be none, cls, mean, last or rank");
        return NULL;
    }
    struct error err = {0};
    struct embedder *e = embedder_open(path, &opt, &err);
    if (!e) {
        lib_fail(error, STEEL_INVALID, err.msg);
        return NULL;
    }
    struct steel_embedder *embedder = mem_zalloc(1, sizeof *embedder);
    embedder->e = e;
    return embedder;
}

void steel_embedder_close(struct steel_embedder *embedder)
{
    if (!embedder)
        return;
    embedder_close(embedder->e);
    mem_free(embedder);
}

int steel_embedder_width(const struct steel_embedder *embedder)
{
    return embedder_width(embedder->e);
}

int steel_embedder_context(const struct steel_embedder *embedder)
{
    return embedder_context(embedder->e);
}

/* Runs encoded texts, and frees them. ok: whether all were encoded. */
static bool run(struct steel_embedder *embedder, struct embed_text *texts, int n, bool ok,
                struct error *err, struct steel_error *error)
{
    struct embed_job job = {.texts = texts, .n = n};
    ok = ok && embedder_run(embedder->e, &job, err);
    for (int i = 0; i < n; i++)
        embed_text_clear(&texts[i]);
    mem_free(texts);
    return ok || lib_fail(error, STEEL_INVALID, err->msg);
}

static bool has_rows(const struct steel_embedder *embedder)
{
    return embedder_pooling(embedder->e)->kind == POOLING_NONE;
}

bool steel_embed(struct steel_embedder *embedder, const char *const *texts, int n, int flags,
                 float *vectors, struct steel_error *error)
{
    struct error err = {0};
    size_t width = (size_t)embedder_width(embedder->e);
    if (has_rows(embedder))
        return lib_fail(error, STEEL_INVALID, "every token has a row: use steel_embed_tokens");
    struct embed_text *all = mem_zalloc((size_t)(n > 0 ? n : 0) + 1, sizeof *all);
    bool ok = true;
    int i = 0;
    for (; ok && i < n; i++) {
        ok = embed_encode(embedder->e, texts[i], strlen(texts[i]), flags & STEEL_TRUNCATE, NULL,
                          &all[i], &err);
        all[i].out = vectors + (size_t)i * width;
    }
    return run(embedder, all, i, ok, &err, error);
}

bool steel_embed_tokens(struct steel_embedder *embedder, const int32_t *tokens, int n, float *out,
                        struct steel_error *error)
{
    struct error err = {0};
    int n_vocab = embedder_info(embedder->e).n_vocab;
    if (n < 1 || n > embedder_context(embedder->e))
        return lib_fail(error, STEEL_TOO_LONG, "no tokens, or more than the model takes");
    for (int i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= n_vocab)
            return lib_fail(error, STEEL_INVALID, "a token id outside the vocabulary");
    struct embed_text *t = mem_zalloc(1, sizeof *t);
    t->ids = mem_zalloc((size_t)n, sizeof *t->ids);
    memcpy(t->ids, tokens, (size_t)n * sizeof *tokens);
    t->n = n;
    t->out = out;
    return run(embedder, t, 1, true, &err, error);
}

bool steel_rerank(struct steel_embedder *embedder, const char *query, const char *const *documents,
                  int n, int flags, float *scores, struct steel_error *error)
{
    struct error err = {0};
    size_t width = (size_t)embedder_width(embedder->e);
    if (embedder_pooling(embedder->e)->kind != POOLING_RANK)
        return lib_fail(error, STEEL_INVALID, "the model was not opened to rank");
    struct embed_text *all = mem_zalloc((size_t)(n > 0 ? n : 0) + 1, sizeof *all);
    float *out = mem_zalloc((size_t)(n > 0 ? n : 0) * width + 1, sizeof *out);
    bool ok = true;
    int i = 0;
    for (; ok && i < n; i++) {
        ok =
            embed_encode_pair(embedder->e, query, strlen(query), documents[i], strlen(documents[i]),
                              NULL, flags & STEEL_TRUNCATE, NULL, &all[i], &err);
        all[i].out = out + (size_t)i * width;
    }
    ok = run(embedder, all, i, ok, &err, error);
    for (i = 0; ok && i < n; i++)
        scores[i] = out[(size_t)i * width];
    mem_free(out);
    return ok;
}
