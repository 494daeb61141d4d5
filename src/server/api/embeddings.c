/*
 * Embeddings and rerank scores: /v1/embeddings, /v1/rerank and Ollama's /api/embed. A worker reads the
 * texts, the embedder's thread computes, and a worker writes the reply. The loop passes the request from
 * one to the next.
 */
#include "server/api/prepare_int.h"
#include "server/api/embeddings.h"
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What clients are told: the reason may name a path of the server. */
static const char FAILED[] = "the model has failed; the server's log says why";

enum { MAX_TEXTS = 4096, VALUE_BYTES = 16 };

/* Writes the JSON reply. */
typedef void embed_writer(const struct api_request *req, struct buf *b);

struct embed_request {
    struct embed_job job;
    embed_writer *write;
    struct embedder *e;
    float *out; /* (n, width) */
    int width;  /* length of a vector in the reply */
    int64_t n_tokens;
    const char *key; /* the field with the texts */
    bool base64;
    bool done;
    /* reranking */
    int top_n;
    bool with_documents, raw;
    char **documents;           /* (n) if the reply returns them; else NULL */
    struct embed_request *next; /* in server->embedded */
    struct api_request *req;
};

void embed_request_free(struct embed_request *x)
{
    if (!x)
        return;
    for (int i = 0; i < x->job.n; i++) {
        embed_text_clear(&x->job.texts[i]);
        if (x->documents)
            mem_free(x->documents[i]);
    }
    mem_free(x->documents);
    mem_free(x->job.texts);
    mem_free(x->out);
    mem_free(x);
}

bool embed_request_done(const struct embed_request *x)
{
    return x->done;
}

/* Writing */

static void add_base64(struct buf *b, const float *v, int n)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const uint8_t *p = (const uint8_t *)v;
    size_t len = (size_t)n * sizeof *v;
    buf_reserve(b, len / 3 * 4 + 8);
    buf_addc(b, '"');
    for (size_t i = 0; i < len; i += 3) {
        size_t left = len - i;
        unsigned bits = (unsigned)p[i] << 16 | (left > 1 ? (unsigned)p[i + 1] << 8 : 0) |
                        (left > 2 ? p[i + 2] : 0u);
        char four[4] = {digits[bits >> 18], digits[bits >> 12 & 63],
                        left > 1 ? digits[bits >> 6 & 63] : '=',
                        left > 2 ? digits[bits & 63] : '='};
        buf_add(b, four, 4);
    }
    buf_addc(b, '"');
}

static void add_floats(struct buf *b, const float *v, int n)
{
    for (int i = 0; i < n; i++)
        buf_addf(b, "%c%.9g", i ? ',' : '[', (double)v[i]);
    buf_addc(b, ']');
}

static void write_openai(const struct api_request *req, struct buf *b)
{
    const struct embed_request *x = req->embed;
    buf_adds(b, "{\"object\":\"list\",\"data\":[");
    for (int i = 0; i < x->job.n; i++) {
        buf_addf(b, "%s{\"object\":\"embedding\",\"index\":%d,\"embedding\":", i ? "," : "", i);
        (x->base64 ? add_base64 : add_floats)(b, x->job.texts[i].out, x->width);
        buf_addc(b, '}');
    }
    buf_adds(b, "],\"model\":");
    jsonout_text(b, req->loaded->entry->name);
    buf_addf(b, ",\"usage\":{\"prompt_tokens\":%lld,\"total_tokens\":%lld}}",
             (long long)x->n_tokens, (long long)x->n_tokens);
}

/* The older form: one text, one vector. */
static void write_ollama_single(const struct api_request *req, struct buf *b)
{
    buf_adds(b, "{\"embedding\":");
    add_floats(b, req->embed->job.texts[0].out, req->embed->width);
    buf_addc(b, '}');
}

static void write_llamacpp(const struct api_request *req, struct buf *b)
{
    const struct embed_request *x = req->embed;
    for (int i = 0; i < x->job.n; i++) {
        buf_addf(b, "%c{\"index\":%d,\"embedding\":[", i ? ',' : '[', i);
        add_floats(b, x->job.texts[i].out, x->width);
        buf_adds(b, "]}");
    }
    buf_addc(b, ']');
}

static void write_ollama(const struct api_request *req, struct buf *b)
{
    const struct embed_request *x = req->embed;
    buf_adds(b, "{\"model\":");
    jsonout_text(b, req->loaded->entry->name);
    buf_adds(b, ",\"embeddings\":[");
    for (int i = 0; i < x->job.n; i++) {
        if (i)
            buf_addc(b, ',');
        add_floats(b, x->job.texts[i].out, x->width);
    }
    buf_addf(b, "],\"total_duration\":%lld,\"load_duration\":0,\"prompt_eval_count\":%lld}",
             (long long)(clock_ns() - req->start_ns), (long long)x->n_tokens);
}

struct ranked {
    int index;
    float score;
};

static int by_score(const void *a, const void *b)
{
    const struct ranked *x = a, *y = b;
    return x->score != y->score ? (x->score < y->score) - (x->score > y->score)
                                : x->index - y->index;
}

static void write_ranked(const struct api_request *req, struct buf *b)
{
    const struct embed_request *x = req->embed;
    struct ranked *all = mem_zalloc((size_t)x->job.n, sizeof *all);
    for (int i = 0; i < x->job.n; i++) {
        float s = x->job.texts[i].out[0];
        all[i] = (struct ranked){i, x->raw ? s : 1.0f / (1.0f + expf(-s))};
    }
    qsort(all, (size_t)x->job.n, sizeof *all, by_score);
    buf_adds(b, "{\"id\":");
    jsonout_text(b, req->id);
    buf_adds(b, ",\"model\":");
    jsonout_text(b, req->loaded->entry->name);
    buf_addf(b,
             ",\"object\":\"list\",\"usage\":{\"prompt_tokens\":%lld,\"total_tokens\":%lld},"
             "\"results\":[",
             (long long)x->n_tokens, (long long)x->n_tokens);
    for (int i = 0; i < x->job.n && i < x->top_n; i++) {
        buf_addf(b, "%s{\"index\":%d,\"relevance_score\":%.9g", i ? "," : "", all[i].index,
                 (double)all[i].score);
        if (x->with_documents) {
            buf_adds(b, ",\"document\":{\"text\":");
            jsonout_text(b, x->documents[all[i].index]);
            buf_addc(b, '}');
        }
        buf_addc(b, '}');
    }
    buf_adds(b, "]}");
    mem_free(all);
}

/* Reading */

/* Adds an empty text. */
static struct embed_text *add_text(struct embed_request *x)
{
    if ((x->job.n & (x->job.n - 1)) == 0)
        x->job.texts =
            mem_realloc(x->job.texts, x->job.n ? 2 * (size_t)x->job.n : 1, sizeof *x->job.texts);
    struct embed_text *t = &x->job.texts[x->job.n++];
    *t = (struct embed_text){0};
    return t;
}

/* Reads one element of `input`: a text or token ids. */
static bool read_input(struct api_request *req, struct embed_request *x, const json_t *v, int i,
                       bool truncate)
{
    char param[32];
    struct error why = {0};
    struct embed_text *t = add_text(x);
    snprintf(param, sizeof param, "%s[%d]", x->key, i);
    if (json_is_array(v)) {
        struct token_list ids = {0};
        int most = embedder_context(x->e);
        bool ok = api_tokens(v, param, embedder_info(x->e).n_vocab, &ids, &req->err);
        t->ids = ids.ids;
        if (ok && ids.n == 0)
            ok = api_invalid(&req->err, param, "no tokens");
        if (ok && ids.n > (size_t)most && !truncate)
            ok = api_invalid(&req->err, param, "%zu tokens, and the model's limit is %d", ids.n,
                             most);
        t->n = ok ? (int)(ids.n > (size_t)most ? (size_t)most : ids.n) : 0;
        return ok;
    }
    if (!json_is_string(v))
        return api_invalid(&req->err, param, "neither a text nor an array of token ids");
    return embed_encode(x->e, json_string_value(v), json_string_length(v), truncate, &req->budget,
                        t, &why) ||
           api_request_refuse(req, param, &why);
}

static bool read_inputs(struct api_request *req, struct embed_request *x, const json_t *input,
                        bool truncate)
{
    bool many = json_is_array(input) && json_array_size(input) &&
                !json_is_integer(json_array_get(input, 0));
    size_t n = many ? json_array_size(input) : 1;
    if (!json_is_string(input) && !json_is_array(input))
        return api_invalid(&req->err, x->key, "%s must be a text, an array of texts, or token ids",
                           x->key);
    if (json_is_array(input) && !json_array_size(input))
        return api_invalid(&req->err, x->key, "%s is empty", x->key);
    if (n > MAX_TEXTS)
        return api_invalid(&req->err, x->key, "%zu texts, and %d is the limit", n, MAX_TEXTS);
    for (size_t i = 0; i < n; i++)
        if (!read_input(req, x, many ? json_array_get(input, i) : input, (int)i, truncate))
            return false;
    return true;
}

/* Allocates the results, once all texts are read. */
static bool make_room(struct api_request *req, struct embed_request *x, size_t width)
{
    size_t reply = (size_t)x->job.n * width * (x->base64 ? 6 : VALUE_BYTES);
    if (reply > req->server->opt.max_unsent)
        return api_invalid(&req->err, "input",
                           "a reply of about %zu bytes, and %zu is the limit (--max-unsent): send "
                           "fewer texts at once",
                           reply, req->server->opt.max_unsent);
    x->out = mem_zalloc((size_t)x->job.n * width, sizeof *x->out);
    x->width = (int)width;
    for (int i = 0; i < x->job.n; i++) {
        x->job.texts[i].out = x->out + (size_t)i * width;
        x->n_tokens += x->job.texts[i].n;
    }
    return true;
}

static bool read_bool(struct api_request *req, const json_t *body, const char *key, bool *out)
{
    const json_t *v = api_member(body, key);
    if (v && !json_is_boolean(v))
        return api_invalid(&req->err, key, "%s must be true or false", key);
    if (v)
        *out = json_is_true(v);
    return true;
}

static bool read_count(struct api_request *req, const json_t *body, const char *key, int most,
                       int *out)
{
    const json_t *v = api_member(body, key);
    if (!v)
        return true;
    if (!json_is_integer(v) || json_integer_value(v) < 1 || json_integer_value(v) > most)
        return api_invalid(&req->err, key, "%s must be a number from 1 to %d", key, most);
    *out = (int)json_integer_value(v);
    return true;
}

static void begin(struct api_request *req)
{
    req->embed = mem_zalloc(1, sizeof *req->embed);
    req->embed->e = req->loaded->embedder;
    req->embed->req = req;
}

/* key: the field with the texts. */
static bool read_embeddings(struct api_request *req, const json_t *body, const char *key,
                            bool truncate, embed_writer *write)
{
    const char *format = json_string_value(api_member(body, "encoding_format"));
    begin(req);
    struct embed_request *x = req->embed;
    x->write = write;
    x->key = key;
    if (!read_bool(req, body, "truncate", &truncate) ||
        !read_count(req, body, "dimensions", embedder_width(x->e), &x->job.dims))
        return false;
    if (api_member(body, "encoding_format") &&
        (!format || (strcmp(format, "float") && strcmp(format, "base64"))))
        return api_invalid(&req->err, "encoding_format", "encoding_format is float or base64");
    x->base64 = format && !strcmp(format, "base64");
    const json_t *input = api_member(body, key);
    if (!input)
        return api_invalid(&req->err, key, "%s is missing", key);
    return read_inputs(req, x, input, truncate) &&
           make_room(req, x, (size_t)(x->job.dims ? x->job.dims : embedder_width(x->e)));
}

bool prepare_embeddings(struct api_request *req, const json_t *body)
{
    return read_embeddings(req, body, "input", false, write_openai);
}

bool prepare_ollama_embed(struct api_request *req, const json_t *body)
{
    return read_embeddings(req, body, "input", true, write_ollama);
}

bool prepare_llamacpp_embedding(struct api_request *req, const json_t *body)
{
    int normalize = 2;
    if (!api_int(body, "embd_normalize", -1, 1 << 10, &normalize, &req->err))
        return false;
    if (normalize != 2)
        return api_invalid(&req->err, "embd_normalize",
                           "embd_normalize other than 2 is not "
                           "supported");
    const char *key = api_member(body, "input") ? "input" : "content";
    return read_embeddings(req, body, key, false, write_llamacpp);
}

bool prepare_ollama_embeddings(struct api_request *req, const json_t *body)
{
    return read_embeddings(req, body, "prompt", true, write_ollama_single);
}

bool prepare_rerank(struct api_request *req, const json_t *body)
{
    const json_t *query = api_member(body, "query"), *docs = api_member(body, "documents");
    const json_t *task = api_member(body, "instruction");
    const char *instruct = json_string_value(task);
    bool truncate = true;
    begin(req);
    struct embed_request *x = req->embed;
    x->write = write_ranked;
    if (!json_is_string(query))
        return api_invalid(&req->err, "query", "query must be a text");
    if (task && !instruct)
        return api_invalid(&req->err, "instruction", "instruction must be a text");
    if (!json_is_array(docs) || !json_array_size(docs))
        return api_invalid(&req->err, "documents", "documents must be an array of texts");
    size_t n = json_array_size(docs);
    if (n > MAX_TEXTS)
        return api_invalid(&req->err, "documents", "%zu documents, and %d is the limit", n,
                           MAX_TEXTS);
    x->top_n = (int)n;
    if (!read_bool(req, body, "return_documents", &x->with_documents) ||
        !read_bool(req, body, "raw_scores", &x->raw) ||
        !read_bool(req, body, "truncate", &truncate) ||
        !read_count(req, body, "top_n", 1 << 20, &x->top_n))
        return false;
    x->documents = mem_zalloc(n, sizeof *x->documents);
    for (size_t i = 0; i < n; i++) {
        const json_t *d = json_array_get(docs, i);
        const json_t *text = json_is_object(d) ? json_object_get(d, "text") : d;
        struct embed_text *t = add_text(x);
        struct error why = {0};
        char param[32];
        snprintf(param, sizeof param, "documents[%zu]", i);
        if (!json_is_string(text))
            return api_invalid(&req->err, param, "neither a text nor an object with \"text\"");
        if (!embed_encode_pair(x->e, json_string_value(query), json_string_length(query),
                               json_string_value(text), json_string_length(text), instruct,
                               truncate, &req->budget, t, &why))
            return api_request_refuse(req, param, &why);
        if (x->with_documents)
            x->documents[i] = mem_strndup(json_string_value(text), json_string_length(text));
    }
    return make_room(req, x, (size_t)embedder_width(x->e));
}

void embed_write(struct api_request *req)
{
    req->embed->write(req, &req->reply);
}

/* Between the threads */

/* On the embedder's thread. */
static void on_done(struct embed_job *job)
{
    struct embed_request *x = (struct embed_request *)job;
    struct server *s = x->req->server;
    pthread_mutex_lock(&s->embed_lock);
    x->next = s->embedded;
    s->embedded = x;
    pthread_mutex_unlock(&s->embed_lock);
    os_wake(s->jobs_fd);
}

bool embed_submit(struct api_request *req)
{
    struct embed_request *x = req->embed;
    struct error why = {0};
    x->job.client = req->job.client;
    x->job.done = on_done;
    req->n_open = 1;
    if (embedder_submit(x->e, &x->job, &why))
        return true;
    req->n_open = 0;
    if (embedder_failed(x->e, &why)) {
        api_fail(&req->err, 503, "unavailable_error", "%s", FAILED);
        return false;
    }
    api_fail(&req->err, 429, "rate_limit_error", "%s", why.msg);
    req->err.code = "queue_full";
    return false;
}

void embed_cancel(struct embed_request *x)
{
    atomic_store(&x->job.cancel, true);
}

struct api_request *embed_next_done(struct server *s)
{
    pthread_mutex_lock(&s->embed_lock);
    struct embed_request *x = s->embedded;
    if (x)
        s->embedded = x->next;
    pthread_mutex_unlock(&s->embed_lock);
    if (!x)
        return NULL;
    struct api_request *req = x->req;
    req->n_open = 0;
    x->done = true;
    struct error ignored;
    if (!x->job.ok)
        api_fail(&req->err, 500, "server_error", "%s",
                 embedder_failed(x->e, &ignored) ? FAILED : x->job.err.msg);
    return req;
}
