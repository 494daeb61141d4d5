/*
 * llama.cpp's slots. Sequences are not tied to slots here: a slot's id names the sequence that was served there
 * last, so that clients of that API can save and restore its prompt by number. A sequence gets the slot it asks
 * for, else a free one that had a beginning of its prompt, else the one unused for longest.
 *
 * Invariants:
 *  1. A slot has at most one running choice, and a choice at most one slot (api_choice.slot).
 *  2. Only the client that used a slot last can save it.
 *  3. Tokens are kept with --slot-save-path only.
 */
#ifndef STEEL_SERVER_SLOTS_H
#define STEEL_SERVER_SLOTS_H

#include "server/api/server_int.h"

struct slots;
struct slots *slots_new(int n, bool keep_tokens);
void slots_free(struct slots *s);

/* Loop: a choice has started, has a token, has ended. */
void slots_start(struct slots *s, struct api_request *req, struct api_choice *o);
void slots_token(struct slots *s, const struct api_choice *o, int32_t token);
void slots_end(struct slots *s, struct api_choice *o);

/* Salts the pages of a request; NULL = none. The caller frees it. */
char *api_request_salt(const struct api_request *req, const char *cache_salt);

#endif
