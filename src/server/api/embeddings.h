/* Embeddings and rerank scores over HTTP. */
#ifndef STEEL_SERVER_EMBEDDINGS_H
#define STEEL_SERVER_EMBEDDINGS_H

#include "server/api/server_int.h"

struct embed_request;

/* Loads the models of the options; false: one cannot be loaded. */
bool embeddings_open(struct server *s, struct error *err);
/* Ends all requests, which embed_next_done then returns. */
/* Says which of the two models has failed, and why. NULL: none. */
const char *embeddings_failed(struct server *s, struct error *why);
void embeddings_close(struct server *s);

/* Whether it is the name of the embedding or rerank model, and the endpoint of that model. */
bool embed_names_helper(const struct server *s, const char *model, const char **endpoint);

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
