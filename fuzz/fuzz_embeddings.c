/* libFuzzer entry: bodies of /v1/embeddings, /api/embed, /api/embeddings and /v1/rerank, processed up to the point where
 * the model would run. The result is texts within the context and the vocabulary, or a status and a message. */
#include "base/mem.h"
#include "server/api/embeddings.h"
#include "server/api/prepare_int.h"

#include <string.h>

static struct server *server(void)
{
    static struct server *s;
    if (!s) {
        struct error err = {0};
        struct embed_options opt = {.pooling = -1, .normalize = -1};
        opt.runtime.backend.threads = 1;
        s = mem_zalloc(1, sizeof *s);
        s->opt.max_unsent = 16 << 20;
        s->embedder = s->reranker = embedder_open(NULL, &opt, &err); /* the built-in model */
        CHECK(s->embedder, "%s", err.msg);
        memcpy(s->name, "c", 2);
        memcpy(s->embed_name, "e", 2);
        memcpy(s->rerank_name, "r", 2);
    }
    return s;
}

typedef bool prepare_function(struct api_request *req, const json_t *body);

static void prepare(const json_t *body, size_t size, prepare_function *function)
{
    struct api_request *req = mem_zalloc(1, sizeof *req);
    req->server = server();
    req->budget = budget_for(size, NULL);
    bool ok = function(req, body);
    CHECK(ok == (req->err.status == 0) && (ok || req->err.msg[0]), "ok %d, status %d", ok,
          req->err.status);
    embed_request_free(req->embed);
    mem_free(req);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static prepare_function *const functions[] = {prepare_embeddings, prepare_ollama_embed,
                                                  prepare_ollama_embeddings, prepare_rerank};
    struct api_error err = {0};
    json_t *body = api_parse((const char *)data, size, &err);
    for (size_t i = 0; body && i < sizeof functions / sizeof *functions; i++)
        prepare(body, size, functions[i]);
    json_decref(body);
    return 0;
}
