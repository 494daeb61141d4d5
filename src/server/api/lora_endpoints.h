/* LoRA adapters over HTTP: which one a request asks for, lists of them, loading and unloading. */
#ifndef STEEL_SERVER_LORA_ENDPOINTS_H
#define STEEL_SERVER_LORA_ENDPOINTS_H

#include "server/api/server_int.h"

/* A worker's: fills req->loras and req->model from the body's "model" and "lora". */
bool lora_choose(struct api_request *req, const json_t *body);
/* Whether the name means an adapter of the model that answers. */
bool lora_find(const struct server *s, const char *model, struct adapter_info *out);
/* 404, as OpenAI says it. Returns false. */
bool lora_unknown_model(struct api_request *req, const char *name);
/* A worker's: POST /v1/load_lora_adapter and /v1/unload_lora_adapter; fill req->reply. */
bool prepare_load_lora(struct api_request *req, const json_t *body);
bool prepare_unload_lora(struct api_request *req, const json_t *body);
/* The loop's: entries of /v1/models, each behind a comma; one of them; llama.cpp's list. */
void lora_add_models(const struct server *s, struct buf *b);
bool lora_add_model(const struct server *s, const char *name, struct buf *b);
void get_lora_adapters(struct server *s, struct http_exchange *x);

#endif
