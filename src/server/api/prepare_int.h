/* The functions that prepare requests on a worker thread. */
#ifndef STEEL_SERVER_PREPARE_INT_H
#define STEEL_SERVER_PREPARE_INT_H

#include "server/api/server_int.h"

/* prepare.c */
bool prepare_completions(struct api_request *req, const json_t *body);
/* Reads "prompt" into prompts, none of which is empty. */
bool prepare_prompts(struct api_request *req, const json_t *body);
bool prepare_tokenize(struct api_request *req, const json_t *body);
bool prepare_detokenize(struct api_request *req, const json_t *body);
bool prepare_template(struct api_request *req, const json_t *body);
bool prepare_count(struct api_request *req, const json_t *body);
int api_request_n_vocab(const struct api_request *req);
/* gen_params_read into req->p, with the defaults of the request's model. */
bool api_request_params(struct api_request *req, const json_t *body, enum params_api api);
struct token_list *api_request_add_prompt(struct api_request *req);
/* Refuses the request for `why`, with 413 if it is over its budget. Returns false. */
bool api_request_refuse(struct api_request *req, const char *param, const struct error *why);
bool api_request_encode(struct api_request *req, const char *text, size_t n, int flags,
                        struct token_list *out);
/* Encodes a rendered conversation, whose literal bytes (text/literal.h) become plain. */
bool api_request_encode_prompt(struct api_request *req, struct buf *prompt, struct token_list *out);

/* thinking.c: reads switches, efforts and budgets of thinking from a chat body. *kwargs: the variables of
 * the template, a new reference. *budget: most tokens of thinking, -1 = no limit. */
bool thinking_read(const struct chat *chat, const json_t *body, json_t **kwargs, int *budget,
                   struct api_error *err);
/* Copies those fields to a translated body. */
void thinking_copy(const json_t *from, json_t *to);

/* fields.c: refuses unsupported fields and logs unknown ones. */
bool fields_check(const struct endpoint *e, const json_t *body, struct api_error *err);
/* Whether it is one of Ollama's options that have no effect on answers here. */
bool fields_unused_option(const char *name);

/* token_params.c: turns words and marks into tokens, and sets req->rules. */
bool api_request_resolve(struct api_request *req);

/* constraint.c: compiles the constraint on the output to req->grammar. Call it after the conversation
 * is prepared. */
bool api_request_constrain(struct api_request *req, const json_t *body);

/* prepare_chat.c: renders messages, tools and the rest of a chat body to the text of a prompt; sets
 * req->chat. */
bool prepare_conversation(struct api_request *req, const json_t *body, struct buf *prompt);
bool prepare_chat(struct api_request *req, const json_t *body);
bool prepare_responses(struct api_request *req, const json_t *body);
bool prepare_responses_again(struct api_request *req); /* a later round: see mcp_loop.h */
bool prepare_anthropic(struct api_request *req, const json_t *body);
bool prepare_anthropic_prompt(struct api_request *req, const json_t *body, bool generate);
bool prepare_ollama_chat(struct api_request *req, const json_t *body);
bool prepare_ollama_generate(struct api_request *req, const json_t *body);
bool prepare_ollama_show(struct api_request *req, const json_t *body); /* lookup.c */
bool check_messages(const json_t *messages, struct api_error *err);
bool check_tools(const json_t *tools, struct api_error *err);

/* mcp_endpoints.c */
bool prepare_mcp_call(struct api_request *req, const json_t *body);

/* llamacpp.c */
bool prepare_completion(struct api_request *req, const json_t *body);
bool prepare_infill(struct api_request *req, const json_t *body);
bool prepare_chat_count(struct api_request *req, const json_t *body);
bool prepare_responses_count(struct api_request *req, const json_t *body);

/* models.c: llama.cpp's */
bool prepare_model_load(struct api_request *req, const json_t *body);
bool prepare_model_unload(struct api_request *req, const json_t *body);

/* slots.c */
bool prepare_slot_action(struct api_request *req, const json_t *body);

/* conversations.c */
bool prepare_conversation_new(struct api_request *req, const json_t *body);
bool prepare_conversation_update(struct api_request *req, const json_t *body);
bool prepare_conversation_items(struct api_request *req, const json_t *body);

/* anthropic.c: translates a body of /v1/messages to one of /v1/chat/completions. Returns a new reference,
 * or NULL with an error. max_tokens is required if `answer`. */
json_t *anthropic_translate(const json_t *body, bool answer, struct api_error *err);

/* functions.c: translates `functions` and allowed_tools of a chat body to tools and tool_choice. Returns
 * a new reference, or NULL with an error. *legacy: the reply uses function_call. */
json_t *functions_translate(const json_t *body, bool *legacy, struct api_error *err);

#endif
