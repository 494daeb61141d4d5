/* Embeddings and rerank scores over HTTP. */
#ifndef STEEL_SERVER_EMBEDDINGS_H
#define STEEL_SERVER_EMBEDDINGS_H

#include "server/api/server_int.h"

struct embed_request;

/* On a worker: reads the texts into req->embed; later, writes the reply. */
bool prepare_embeddings(struct api_request *req, const json_t *body);
bool prepare_ollama_embed(struct api_request *req, const json_t *body);
bool prepare_ollama_embeddings(struct api_request *req, const json_t *body);
bool prepare_llamacpp_embedding(struct api_request *req, const json_t *body);
bool prepare_rerank(struct api_request *req, const json_t *body);
void embed_write(struct api_request *req);

/* On the loop. embed_submit: false with an error. embed_next_done: the next request that is computed or
 * failed, or NULL. */
bool embed_submit(struct api_request *req);
struct api_request *embed_next_done(struct server *s);
bool embed_request_done(const struct embed_request *x);
void embed_cancel(struct embed_request *x);
void embed_request_free(struct embed_request *x);

#endif
