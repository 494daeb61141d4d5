/* Vectors and scores over HTTP: what api_request.c, prepare.c and server.c call of embeddings.c. */
#ifndef STEEL_SERVER_EMBEDDINGS_H
#define STEEL_SERVER_EMBEDDINGS_H

#include "server/api/server_int.h"

struct embed_request;

/* Loads the models that the options name; false: one cannot be. */
bool embeddings_open(struct server *s, struct error *err);
/* Ends what waits: its calls come out of embed_next_done. */
void embeddings_close(struct server *s);

/* Whether the name is that of a model for vectors or scores, and which endpoint that is for. */
bool embed_names_helper(const struct server *s, const char *model, const char **endpoint);

/* On a worker: the texts of a call, into req->embed; later, its reply. */
bool prepare_embeddings(struct api_request *req, const json_t *body);
bool prepare_ollama_embed(struct api_request *req, const json_t *body);
bool prepare_ollama_embeddings(struct api_request *req, const json_t *body);
bool prepare_rerank(struct api_request *req, const json_t *body);
void embed_write(struct api_request *req);

/* On the loop. embed_submit: false with an error. embed_next_done: a call whose vectors are there, or
 * whose error is set; NULL: there is none. */
bool embed_submit(struct api_request *req);
struct api_request *embed_next_done(struct server *s);
bool embed_request_done(const struct embed_request *x);
void embed_cancel(struct embed_request *x);
void embed_request_free(struct embed_request *x);

#endif
