/*
 * Generation parameters from a JSON body, for the chat, completions and messages endpoints. Unknown
 * fields are ignored and null means absent. A wrong type or a value out of range is an error that names
 * the field.
 */
#ifndef STEEL_SERVER_PARAMS_H
#define STEEL_SERVER_PARAMS_H

#include "engine/engine.h"
#include "server/http/api_error.h"

#include <jansson.h>

struct text_list {
    char **v; /* (n) owned */
    int n;
};

struct gen_params {
    struct sample_params sample; /* bias is owned */
    bool has_seed;
    int n, max_tokens, min_tokens; /* max_tokens 0 = no limit but the context */
    bool stream, include_usage, logprobs, ignore_eos, no_cache, echo;
    bool no_answer; /* completions with max_tokens 0: only the prompt's log-probabilities */
    int n_top;
    char **stop; /* (n_stop) owned */
    int n_stop;
    char *salt; /* owned; NULL = none */
    /* Texts that the preparation turns into tokens (token_params.c). */
    struct text_list bad_words, breakers;
    bool has_breakers;
    struct token_list stop_tokens, allowed;
    bool has_allowed, include_stop;
    int context;         /* bounds prompt and answer together; 0 = the server's context */
    int truncate_prompt; /* keep the last tokens of the prompt: at most this many; 0 = all */
};
void gen_params_clear(struct gen_params *p);

/* Stands for an image in a tool's result. */
#define API_NO_IMAGE "[image: this model reads text only]"

enum params_api { PARAMS_CHAT, PARAMS_COMPLETIONS, PARAMS_MESSAGES };
/* Absent fields get their value from `defaults`. n_vocab bounds logit_bias. */
bool gen_params_read(const json_t *body, enum params_api api, const struct sample_params *defaults,
                     int n_vocab, struct gen_params *p, struct api_error *err);

/* Parses a body, which must be a JSON object. Errors name the line. */
json_t *api_parse(const char *body, size_t n, struct api_error *err);

/* Typed members. False with err on a wrong type; *out is unchanged if absent or null. */
bool api_bool(const json_t *o, const char *name, bool *out, struct api_error *err);
bool api_int(const json_t *o, const char *name, int lo, int hi, int *out, struct api_error *err);
bool api_float(const json_t *o, const char *name, double lo, double hi, float *out,
               struct api_error *err);
bool api_string(const json_t *o, const char *name, const char **out, struct api_error *err);
/* The effort of thinking. `where` is the member's path in errors. */
bool api_effort(const json_t *o, const char *name, const char *where, const char **out,
                struct api_error *err);
const json_t *api_member(const json_t *o, const char *name); /* NULL when absent or null */

/* Reads a list of token ids below n_vocab. */
bool api_tokens(const json_t *list, const char *param, int n_vocab, struct token_list *out,
                struct api_error *err);

#endif
