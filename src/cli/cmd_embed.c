/*
 * steel embed and steel rerank: embedding vectors of texts, and scores of documents for a query.
 * Texts come from arguments, lines of a file, or JSON lines. Vectors are written as JSON lines or
 * as one .npy file. With --ids, input and output use the binary format of `steel logits`.
 */
#include "cli/cli.h"
#include "base/mem.h"
#include "engine/embed.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { AT_ONCE = 512, LINE_MAX_BYTES = 16 << 20 };

/* The options of both commands. */
struct embed_flags {
    struct model_flags model;
    const char *file, *out, *pooling, *ids, *query, *instruct;
    bool jsonl, normalize, raw, no_truncate, scores_raw;
    int dims, top;
};

static struct embedder *open_model(const struct usage *u, const struct embed_flags *f,
                                   const char *path, bool rank, int *exit_code)
{
    struct embed_options opt = {.pooling = -1, .normalize = -1, .rank = rank};
    *exit_code = EXIT_USAGE;
    if (!cli_runtime_options(u, &f->model, &opt.runtime))
        return NULL;
    if (f->pooling && (opt.pooling = pooling_kind_of(f->pooling)) < 0) {
        args_usage_error(u, "--pooling is none, cls, mean, last or rank");
        return NULL;
    }
    if (f->normalize || f->raw)
        opt.normalize = f->normalize;
    else if (f->ids)
        opt.normalize = 0;
    struct error err = {0};
    struct embedder *e = embedder_open(path, &opt, &err);
    *exit_code = e ? EXIT_OK : cli_fail(&err);
    return e;
}

/* A window of texts that are computed together. */
struct window {
    struct embedder *e;
    struct embed_text texts[AT_ONCE];
    int n;
    int64_t first; /* index of the window's first text, from 0 */
    float *vectors;
    const struct embed_flags *f;
    FILE *npy;
    int width;
};

static bool put_vector(const struct window *w, int i, struct error *err)
{
    const float *v = w->vectors + (size_t)i * (size_t)w->width;
    if (w->npy)
        return fwrite(v, sizeof *v, (size_t)w->width, w->npy) == (size_t)w->width ||
               error_set(err, "%s: %s", w->f->out, strerror(errno));
    printf("{\"index\": %lld, \"tokens\": %d, \"embedding\": [", (long long)(w->first + i),
           w->texts[i].n);
    for (int d = 0; d < w->width; d++)
        printf("%s%.9g", d ? ", " : "", (double)v[d]);
    puts("]}");
    return true;
}

static bool flush(struct window *w, struct error *err)
{
    struct embed_job job = {.texts = w->texts, .n = w->n, .dims = w->f->dims};
    bool ok = !w->n || embedder_run(w->e, &job, err);
    for (int i = 0; i < w->n; i++) {
        ok = ok && put_vector(w, i, err);
        embed_text_clear(&w->texts[i]);
    }
    w->first += w->n;
    w->n = 0;
    return ok && (!cli_interrupted() || error_set(err, "interrupted"));
}

static bool add_text(struct window *w, const char *text, size_t len, struct error *err)
{
    struct error why = {0};
    struct embed_text *t = &w->texts[w->n];
    if (!embed_encode(w->e, text, len, !w->f->no_truncate, NULL, t, &why))
        return error_set(err, "text %lld: %s", (long long)(w->first + w->n), why.msg);
    t->out = w->vectors + (size_t)w->n * (size_t)w->width;
    return ++w->n < AT_ONCE || flush(w, err);
}

/* Adds the text of a JSON line: a string, or its member "text", "input" or "content". */
static bool add_json(struct window *w, const char *line, size_t len, struct error *err)
{
    static const char *const keys[] = {"text", "input", "content"};
    json_error_t je;
    json_t *v = json_loadb(line, len, JSON_DECODE_ANY | JSON_ALLOW_NUL, &je);
    const json_t *s = v;
    for (int i = 0; i < 3 && json_is_object(v) && !json_is_string(s); i++)
        s = json_object_get(v, keys[i]);
    bool ok = json_is_string(s)
                  ? add_text(w, json_string_value(s), json_string_length(s), err)
                  : error_set(err, "line %lld: %s", (long long)(w->first + w->n + 1),
                              v ? "neither a string nor an object with \"text\"" : je.text);
    json_decref(v);
    return ok;
}

static bool add_lines(struct window *w, struct error *err)
{
    const char *path = w->f->file ? w->f->file : "-";
    FILE *in = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    bool ok = in || error_set(err, "%s: %s", path, strerror(errno));
    while (ok && (n = getline(&line, &cap, in)) > 0) {
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r'))
            n--;
        if (n > LINE_MAX_BYTES)
            ok = error_set(err, "%s: a line of %zd bytes", path, n);
        else if (n)
            ok =
                w->f->jsonl ? add_json(w, line, (size_t)n, err) : add_text(w, line, (size_t)n, err);
    }
    free(line); /* allocated by getline */
    if (in && in != stdin)
        fclose(in);
    return ok;
}

/* Writes the 128-byte header of a .npy file with n rows. It is written again when n is known. */
static bool npy_head(FILE *f, int64_t n, int width)
{
    char head[128];
    memset(head, ' ', sizeof head);
    memcpy(head, "\x93NUMPY\x01\x00\x76\x00", 10);
    int len = snprintf(head + 10, sizeof head - 10,
                       "{'descr': '<f4', 'fortran_order': False, 'shape': (%lld, %d), }",
                       (long long)n, width);
    head[10 + len] = ' ';
    head[127] = '\n';
    return fseek(f, 0, SEEK_SET) == 0 && fwrite(head, 1, sizeof head, f) == sizeof head;
}

static bool embed_texts(struct embedder *e, const struct embed_flags *f, const char *const *args,
                        int n_args, struct error *err)
{
    struct window *w = mem_zalloc(1, sizeof *w);
    w->e = e;
    w->f = f;
    w->width = embedder_width(e);
    if (f->dims > 0 && f->dims < w->width)
        w->width = f->dims;
    w->vectors = mem_zalloc((size_t)AT_ONCE * (size_t)w->width, sizeof *w->vectors);
    w->npy = f->out ? fopen(f->out, "wb") : NULL;
    bool ok = !f->out || (w->npy && npy_head(w->npy, 0, w->width)) ||
              error_set(err, "%s: %s", f->out, strerror(errno));
    for (int i = 0; ok && i < n_args; i++)
        ok = add_text(w, args[i], strlen(args[i]), err);
    ok = ok && (n_args || add_lines(w, err)) && flush(w, err);
    for (int i = 0; i < w->n; i++)
        embed_text_clear(&w->texts[i]);
    if (w->npy && ok && !npy_head(w->npy, w->first, w->width))
        ok = error_set(err, "%s: %s", f->out, strerror(errno));
    if (w->npy && fclose(w->npy) != 0 && ok)
        ok = error_set(err, "%s: %s", f->out, strerror(errno));
    if (w->npy && !ok)
        remove(f->out);
    mem_free(w->vectors);
    mem_free(w);
    return ok;
}

/* Input: i32 T, i32 V, i32 ids[T]. Output: i32 T, i32 H, i32 ids[T], f32 rows[T][H]; pooled: i32
 * 1, i32 D, f32 vector[D]. */
static bool embed_ids(struct embedder *e, const struct embed_flags *f, struct error *err)
{
    int32_t head[2] = {0};
    struct embed_text t = {0};
    const struct pooling *p = embedder_pooling(e);
    FILE *in = fopen(f->ids, "rb"), *out = NULL;
    bool ok = in || error_set(err, "%s: %s", f->ids, strerror(errno));
    if (ok && (fread(head, 4, 2, in) != 2 || head[0] < 1 || head[0] > embedder_context(e)))
        ok = error_set(err, "%s: the header must give 1 to %d tokens (the model's limit)", f->ids,
                       embedder_context(e));
    if (ok) {
        t.n = head[0];
        t.ids = mem_zalloc((size_t)t.n, sizeof *t.ids);
        if (fread(t.ids, 4, (size_t)t.n, in) != (size_t)t.n)
            ok = error_set(err, "%s: fewer than %d ids", f->ids, t.n);
    }
    int n_vocab = embedder_info(e).n_vocab;
    for (int i = 0; ok && i < t.n; i++)
        if (t.ids[i] < 0 || t.ids[i] >= n_vocab)
            ok = error_set(err, "%s: id %d at position %d is outside the vocabulary of %d", f->ids,
                           t.ids[i], i, n_vocab);
    bool rows = p->kind == POOLING_NONE;
    size_t n = rows ? (size_t)t.n * (size_t)p->n_embd : (size_t)p->width;
    t.out = mem_zalloc(n, sizeof *t.out);
    struct embed_job job = {.texts = &t, .n = 1};
    ok = ok && embedder_run(e, &job, err);
    if (ok) {
        int32_t to[2] = {rows ? t.n : 1, rows ? p->n_embd : p->width};
        out = fopen(f->out, "wb");
        ok = out && fwrite(to, 4, 2, out) == 2 &&
             (!rows || fwrite(t.ids, 4, (size_t)t.n, out) == (size_t)t.n) &&
             fwrite(t.out, sizeof *t.out, n, out) == n;
        if (out && fclose(out) != 0)
            ok = false;
        if (!ok)
            error_set(err, "%s: %s", f->out, strerror(errno));
    }
    if (in)
        fclose(in);
    mem_free(t.out);
    embed_text_clear(&t);
    return ok;
}

int cmd_embed(int argc, char **argv)
{
    struct embed_flags f = {0};
    const struct opt opts[] = {
        {OPT_STRING, 'f', "file", 0, &f.file, 0, 0, "FILE", "texts, one per line (-: stdin)"},
        {OPT_FLAG, 0, "jsonl", 0, &f.jsonl, 0, 0, 0,
         "lines are JSON: a string, or an object with \"text\""},
        {OPT_STRING, 'o', "out", 0, &f.out, 0, 0, "FILE.npy", "write the vectors as a NumPy array"},
        {OPT_STRING, 0, "pooling", 0, &f.pooling, 0, 0, "KIND",
         "none, cls, mean, last or rank (default: the model's)"},
        {OPT_FLAG, 0, "normalize", 0, &f.normalize, 0, 0, 0, "scale vectors to length 1"},
        {OPT_FLAG, 0, "no-normalize", 0, &f.raw, 0, 0, 0, "do not scale vectors"},
        {OPT_INT, 0, "dims", "dimensions", &f.dims, 1, 1 << 20, "N",
         "only the first N numbers of each vector"},
        {OPT_FLAG, 0, "no-truncate", 0, &f.no_truncate, 0, 0, 0,
         "refuse texts longer than the model's limit, instead of cutting them"},
        {OPT_STRING, 0, "ids", 0, &f.ids, 0, 0, "IN.bin",
         "token ids in the format of `steel logits`"},
        MODEL_FLAG_ROWS(f.model),
    };
    const struct usage u = {
        .command = "embed",
        .synopsis = "MODEL [TEXT...] [-f FILE] [options]",
        .about = "Computes embedding vectors of texts: with BERT, XLM-RoBERTa, ModernBERT or with\n"
                 "any decoder. Writes a line of JSON per text, or one .npy file.",
        .examples = "  steel embed bge-base.gguf 'a text' 'another one'\n"
                    "  steel embed bge-m3/ -f texts.txt --out vectors.npy\n"
                    "  steel embed Qwen3-Embedding-0.6B/ --jsonl < docs.jsonl\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 1,
        .max_args = argc,
    };
    const char **pos = mem_zalloc((size_t)argc + 1, sizeof *pos);
    int n = args_parse(&u, argc, argv, pos), rc = EXIT_USAGE;
    if (n < 0) {
        mem_free(pos);
        return cli_args_exit(n);
    }
    if (f.ids && !f.out)
        args_usage_error(&u, "--ids needs --out");
    else if (!f.ids && f.pooling && !strcmp(f.pooling, "none"))
        args_usage_error(&u, "--pooling none needs --ids: it gives one row per token");
    else {
        cli_catch_interrupt();
        struct embedder *e = open_model(&u, &f, pos[0], false, &rc);
        struct error err = {0};
        if (e && !(f.ids ? embed_ids(e, &f, &err) : embed_texts(e, &f, pos + 1, n - 1, &err)))
            rc = cli_interrupted() ? EXIT_INTERRUPTED : cli_fail(&err);
        embedder_close(e);
    }
    mem_free(pos);
    return rc;
}

/* Reranking */

struct scored_document {
    int index;
    float score;
    char *text;
};

static int by_score(const void *a, const void *b)
{
    const struct scored_document *x = a, *y = b;
    return x->score != y->score ? (x->score < y->score) - (x->score > y->score)
                                : x->index - y->index;
}

static bool read_documents(const char *path, struct scored_document **out, int *n,
                           struct error *err)
{
    FILE *in = strcmp(path, "-") ? fopen(path, "rb") : stdin;
    char *line = NULL;
    size_t cap = 0;
    int room = 0;
    ssize_t len;
    bool ok = in || error_set(err, "%s: %s", path, strerror(errno));
    while (ok && (len = getline(&line, &cap, in)) > 0) {
        while (len > 0 && (line[len - 1] == '\n' || line[len - 1] == '\r'))
            line[--len] = 0;
        if (!len)
            continue;
        if (*n == room)
            *out = mem_realloc(*out, (size_t)(room = room ? 2 * room : 64), sizeof **out);
        (*out)[*n] = (struct scored_document){.index = *n, .text = mem_strdup(line)};
        ++*n;
    }
    free(line); /* allocated by getline */
    if (in && in != stdin)
        fclose(in);
    return ok;
}

static bool rerank(struct embedder *e, const struct embed_flags *f, struct error *err)
{
    struct scored_document *docs = NULL;
    int n = 0, width = embedder_width(e);
    bool ok = read_documents(f->file ? f->file : "-", &docs, &n, err);
    struct embed_text *texts = mem_zalloc((size_t)n + 1, sizeof *texts);
    float *scores = mem_zalloc((size_t)(n + 1) * (size_t)width, sizeof *scores);
    for (int i = 0; ok && i < n; i++) {
        texts[i].out = scores + (size_t)i * (size_t)width;
        ok = embed_encode_pair(e, f->query, strlen(f->query), docs[i].text, strlen(docs[i].text),
                               f->instruct, !f->no_truncate, NULL, &texts[i], err);
    }
    struct embed_job job = {.texts = texts, .n = n};
    ok = ok && embedder_run(e, &job, err);
    for (int i = 0; i < n; i++) {
        float s = scores[(size_t)i * (size_t)width];
        docs[i].score = f->scores_raw ? s : 1.0f / (1.0f + expf(-s));
        embed_text_clear(&texts[i]);
    }
    if (ok && n)
        qsort(docs, (size_t)n, sizeof *docs, by_score);
    for (int i = 0; ok && i < n && (!f->top || i < f->top); i++)
        printf("%.6f\t%d\t%s\n", (double)docs[i].score, docs[i].index, docs[i].text);
    for (int i = 0; i < n; i++)
        mem_free(docs[i].text);
    mem_free(docs);
    mem_free(texts);
    mem_free(scores);
    return ok;
}

int cmd_rerank(int argc, char **argv)
{
    struct embed_flags f = {0};
    const struct opt opts[] = {
        {OPT_STRING, 'q', "query", 0, &f.query, 0, 0, "TEXT", "the query"},
        {OPT_STRING, 'f', "file", 0, &f.file, 0, 0, "FILE", "documents, one per line (-: stdin)"},
        {OPT_INT, 'n', "top", "top-n", &f.top, 1, 1 << 28, "N", "print only the best N"},
        {OPT_FLAG, 0, "raw", 0, &f.scores_raw, 0, 0, 0, "raw scores, not mapped to 0..1"},
        {OPT_STRING, 0, "instruct", 0, &f.instruct, 0, 0, "TEXT",
         "the task, for models that take an instruction"},
        {OPT_FLAG, 0, "no-truncate", 0, &f.no_truncate, 0, 0, 0,
         "refuse documents longer than the model's limit, instead of cutting them"},
        MODEL_FLAG_ROWS(f.model),
    };
    const struct usage u = {
        .command = "rerank",
        .synopsis = "MODEL -q QUERY [-f DOCS] [options]",
        .about =
            "Sorts documents by how well they answer a query, and prints score, number and text,\n"
            "best first. MODEL is a reranker (BERT, XLM-RoBERTa or ModernBERT with a\n"
            "classification head, or Qwen3-Reranker).",
        .examples = "  steel rerank bge-reranker-v2-m3/ -q 'what is a panda' -f docs.txt\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 1,
        .max_args = 1,
    };
    const char *pos[1];
    int n = args_parse(&u, argc, argv, pos), rc = EXIT_USAGE;
    if (n < 0)
        return cli_args_exit(n);
    if (!f.query)
        return cli_args_exit(args_usage_error(&u, "--query is needed"));
    cli_catch_interrupt();
    struct embedder *e = open_model(&u, &f, pos[0], true, &rc);
    struct error err = {0};
    if (e && !rerank(e, &f, &err))
        rc = cli_interrupted() ? EXIT_INTERRUPTED : cli_fail(&err);
    embedder_close(e);
    return rc;
}
