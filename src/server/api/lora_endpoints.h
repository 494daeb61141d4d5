/* LoRA adapters over HTTP: selection by requests, lists, loading and unloading. */
#ifndef STEEL_SERVER_LORA_ENDPOINTS_H
#define STEEL_SERVER_LORA_ENDPOINTS_H

#include "server/api/server_int.h"

/* On a worker: fills req->loras and req->model from the body's "model" and "lora". */
bool lora_choose(struct api_request *req, const json_t *body);
/* Whether the name selects an adapter. */
bool lora_find(const struct loaded *l, const char *model, struct adapter_info *out);
/* Sets OpenAI's 404 error. Returns false. */
bool lora_unknown_model(struct api_request *req, const char *name);
/* On a worker: POST /v1/load_lora_adapter and /v1/unload_lora_adapter. */
bool prepare_load_lora(struct api_request *req, const json_t *body);
bool prepare_unload_lora(struct api_request *req, const json_t *body);
/* On the loop: all entries of /v1/models, each after a comma; one entry; llama.cpp's list. */
void lora_add_models(const struct loaded *l, struct buf *b);
bool lora_add_model(const struct loaded *l, const char *name, struct buf *b);
void get_lora_adapters(struct server *s, struct http_exchange *x);

#endif
