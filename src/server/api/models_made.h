/*
 * Models that are made of others by a Modelfile (modelfile.h): NAME.modelfile in a folder of models. Any thread, without the
 * lock of struct models.
 */
#ifndef STEEL_SERVER_MODELS_MADE_H
#define STEEL_SERVER_MODELS_MADE_H

#include "server/api/models.h"

/* Fills e from the Modelfile that e->src names: path, template, adapter, system text and parameters. */
bool models_make_entry(struct models *m, struct model_entry *e, struct error *err);
/* Adds the model's parameters that the request does not set. */
void models_add_params(const struct model_entry *e, struct gen_params *p);

/* Worker: Ollama's /api/create, /api/copy and /api/delete. */
bool prepare_create(struct api_request *req, const json_t *body);
bool prepare_copy(struct api_request *req, const json_t *body);
bool prepare_delete(struct api_request *req, const json_t *body);

/* Whether --allow-pull is given; else the error. */
bool models_may_change(struct server *s, struct api_error *err);

#endif
