/*
 * The fields of requests: which API has which, and what becomes of it. The same table is in
 * docs/server.md, and tests/test_fields.py compares the two and tries every row.
 */
#include "server/api/prepare_int.h"
#include "base/mem.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum use {
    READ,
    UNUSED,  /* known, and without an effect on answers here */
    REFUSED, /* changes answers, and is not to be had */
};

/* APIs: C chat, P completions, R Responses, M Messages, O Ollama, o Ollama's options. */
static const struct field {
    const char *name, *apis;
    enum use use;
    const char *why; /* of a refusal */
} fields[] = {
    /* clang-format off */
    {"model", "CPRMO", READ, NULL},
    {"lora", "CPRMO", READ, NULL},
    {"stream", "CPRMO", READ, NULL},
    {"messages", "CMO", READ, NULL},
    {"prompt", "PO", READ, NULL},
    {"max_tokens", "CPRM", READ, NULL},
    {"max_completion_tokens", "CPRM", READ, NULL},
    {"temperature", "CPRMo", READ, NULL},
    {"top_k", "CPRMo", READ, NULL},
    {"top_p", "CPRMo", READ, NULL},
    {"min_p", "CPRMo", READ, NULL},
    {"repeat_penalty", "CPRMo", READ, NULL},
    {"repeat_last_n", "CPRMo", READ, NULL},
    {"presence_penalty", "CPRMo", READ, NULL},
    {"frequency_penalty", "CPRMo", READ, NULL},
    {"seed", "CPRMo", READ, NULL},
    {"repetition_penalty", "CPRMo", READ, NULL},
    {"typical_p", "CPRMo", READ, NULL},
    {"top_n_sigma", "CPRMo", READ, NULL},
    {"xtc_probability", "CPRMo", READ, NULL},
    {"xtc_threshold", "CPRMo", READ, NULL},
    {"dynatemp_range", "CPRMo", READ, NULL},
    {"dynatemp_exponent", "CPRMo", READ, NULL},
    {"mirostat", "CPRMo", READ, NULL},
    {"mirostat_tau", "CPRMo", READ, NULL},
    {"mirostat_eta", "CPRMo", READ, NULL},
    {"dry_multiplier", "CPRMo", READ, NULL},
    {"dry_base", "CPRMo", READ, NULL},
    {"dry_allowed_length", "CPRMo", READ, NULL},
    {"dry_penalty_last_n", "CPRMo", READ, NULL},
    {"dry_sequence_breakers", "CPRMo", READ, NULL},
    {"samplers", "CPRMo", READ, NULL},
    {"logit_bias", "CPRMo", READ, NULL},
    {"min_tokens", "CPRMo", READ, NULL},
    {"ignore_eos", "CPRMo", READ, NULL},
    {"stop", "CPRo", READ, NULL},
    {"stop_sequences", "M", READ, NULL},
    {"stop_token_ids", "CPRMo", READ, NULL},
    {"include_stop_str_in_output", "CPRMo", READ, NULL},
    {"bad_words", "CPRMo", READ, NULL},
    {"allowed_token_ids", "CPRMo", READ, NULL},
    {"truncate_prompt_tokens", "CPRMo", READ, NULL},
    {"cache_prompt", "CPRMo", READ, NULL},
    {"cache_salt", "CPRMo", READ, NULL},
    {"n", "CPM", READ, NULL},
    {"n", "R", REFUSED, "one answer; above 1"},
    {"best_of", "P", READ, NULL},
    {"echo", "P", READ, NULL},
    {"logprobs", "CPRO", READ, NULL},
    {"top_logprobs", "CRO", READ, NULL},
    {"prompt_logprobs", "CPRMOo", REFUSED, "completions have echo with logprobs"},
    {"stream_options", "CPR", READ, NULL},
    {"enable_thinking", "CRMO", READ, NULL},
    {"thinking", "CRMO", READ, NULL},
    {"reasoning", "CRMO", READ, NULL},
    {"chat_template_kwargs", "CRMO", READ, NULL},
    {"reasoning_effort", "CRMO", READ, NULL},
    {"reasoning_budget", "CRMO", READ, NULL},
    {"thinking_budget", "CRMO", READ, NULL},
    {"thinking_budget_tokens", "CRMO", READ, NULL},
    {"thinking_token_budget", "CRMO", READ, NULL},
    {"tools", "CRM", READ, NULL},
    {"tool_choice", "CRM", READ, NULL},
    {"tools", "O", READ, NULL},
    {"parallel_tool_calls", "CR", READ, NULL},
    {"add_generation_prompt", "CR", READ, NULL},
    {"continue_final_message", "CR", READ, NULL},
    {"functions", "C", READ, NULL},
    {"function_call", "C", READ, NULL},
    {"response_format", "CPR", READ, NULL},
    {"guided_json", "CPR", READ, NULL},
    {"guided_regex", "CPR", READ, NULL},
    {"guided_choice", "CPR", READ, NULL},
    {"guided_grammar", "CPR", READ, NULL},
    {"grammar", "CPR", READ, NULL},
    {"json_schema", "CPR", READ, NULL},
    {"structured_outputs", "CPR", READ, NULL},
    {"modalities", "C", READ, NULL},
    {"audio", "C", READ, NULL},
    {"truncation", "CR", READ, NULL},
    {"suffix", "PO", READ, NULL},
    {"input", "R", READ, NULL},
    {"instructions", "R", READ, NULL},
    {"include", "R", READ, NULL},
    {"max_output_tokens", "R", READ, NULL},
    {"previous_response_id", "R", READ, NULL},
    {"store", "R", READ, NULL},
    {"text", "R", READ, NULL},
    {"background", "R", READ, NULL},
    {"conversation", "R", READ, NULL},
    {"max_tool_calls", "R", UNUSED, NULL},
    {"system", "M", READ, NULL},
    {"output_config", "M", READ, NULL},
    {"output_format", "M", READ, NULL},
    {"system", "O", READ, NULL},
    {"think", "O", READ, NULL},
    {"format", "O", READ, NULL},
    {"options", "O", READ, NULL},
    {"raw", "O", READ, NULL},
    {"images", "O", READ, NULL},
    {"template", "O", READ, NULL},
    {"keep_alive", "O", UNUSED, NULL},
    {"context", "O", REFUSED, "send messages to /api/chat"},
    {"num_predict", "o", READ, NULL},
    {"num_ctx", "o", READ, NULL},
    {"num_keep", "o", UNUSED, NULL},
    {"num_batch", "o", UNUSED, NULL},
    {"num_gpu", "o", UNUSED, NULL},
    {"main_gpu", "o", UNUSED, NULL},
    {"num_thread", "o", UNUSED, NULL},
    {"use_mmap", "o", UNUSED, NULL},
    {"use_mlock", "o", UNUSED, NULL},
    {"numa", "o", UNUSED, NULL},
    {"low_vram", "o", UNUSED, NULL},
    {"f16_kv", "o", UNUSED, NULL},
    {"vocab_only", "o", UNUSED, NULL},
    {"penalize_newline", "o", UNUSED, NULL},
    {"tfs_z", "o", REFUSED, "tail-free sampling"},
    {"mcp_servers", "CPRM", REFUSED, "the client runs tools"},
    {"container", "M", UNUSED, NULL},
    {"context_management", "M", UNUSED, NULL},
    {"use_beam_search", "CPR", REFUSED, "beam search"},
    {"logits_processors", "CPR", REFUSED, "code of another server"},
    {"vllm_xargs", "CPR", REFUSED, "code of another server"},
    {"length_penalty", "CPR", UNUSED, NULL},
    {"early_stopping", "CPR", UNUSED, NULL},
    {"skip_special_tokens", "CPR", UNUSED, NULL},
    {"spaces_between_special_tokens", "CPR", UNUSED, NULL},
    {"priority", "CPR", UNUSED, NULL},
    {"request_id", "CPR", UNUSED, NULL},
    {"web_search_options", "C", REFUSED, "the client runs tools"},
    {"user", "CPRM", UNUSED, NULL},
    {"metadata", "CPRM", UNUSED, NULL},
    {"service_tier", "CPRM", UNUSED, NULL},
    {"safety_identifier", "CPRM", UNUSED, NULL},
    {"prompt_cache_key", "CPRM", UNUSED, NULL},
    {"prompt_cache_retention", "CPRM", UNUSED, NULL},
    {"store", "C", UNUSED, NULL},
    {"prediction", "C", UNUSED, NULL},
    {"verbosity", "C", UNUSED, NULL},
    /* clang-format on */
};

static const struct field *find(const char *name, char api)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (strchr(fields[i].apis, api) && !strcmp(fields[i].name, name))
            return &fields[i];
    return NULL;
}

static bool is_empty(const json_t *v)
{
    return json_is_null(v) || json_is_false(v) || (json_is_string(v) && !json_string_length(v)) ||
           ((json_is_array(v) || json_is_object(v)) && !json_array_size(v) && !json_object_size(v));
}

/* A value that says what happens anyway. */
static bool is_default(const struct field *f, const json_t *v)
{
    return is_empty(v) || ((!strcmp(f->name, "n") || !strcmp(f->name, "tfs_z")) &&
                           json_is_number(v) && json_number_value(v) == 1);
}

enum { TOLD_MOST = 256 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct told { /* under lock */
    char name[64];
    char api;
} told[TOLD_MOST];
static int n_told;

/* Once for each name, and for so many names at most. */
static void tell_unknown(const char *name, char api, const char *endpoint)
{
    bool known = false;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < n_told; i++)
        known |= told[i].api == api && !strncmp(told[i].name, name, sizeof told[i].name - 1);
    known |= n_told == TOLD_MOST;
    if (!known) {
        snprintf(told[n_told].name, sizeof told[n_told].name, "%s", name);
        told[n_told++].api = api;
    }
    pthread_mutex_unlock(&lock);
    if (!known)
        log_line(LOG_WARN, "unknown field", LOG_TEXT("endpoint", endpoint),
                 LOG_TEXT("field", name));
}

static bool check(const json_t *o, char api, const char *endpoint, struct api_error *err)
{
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)o, name, v)
    {
        const struct field *f = find(name, api);
        if (!f)
            tell_unknown(name, api, endpoint);
        else if (f->use == REFUSED && !is_default(f, v))
            return api_invalid(err, name, "%s is not supported: %s", name, f->why);
    }
    return true;
}

bool fields_check(const struct endpoint *e, const json_t *body, struct api_error *err)
{
    char api = e->prepare == prepare_chat                                                   ? 'C'
               : e->prepare == prepare_completions                                          ? 'P'
               : e->prepare == prepare_responses                                            ? 'R'
               : e->prepare == prepare_anthropic                                            ? 'M'
               : e->prepare == prepare_ollama_chat || e->prepare == prepare_ollama_generate ? 'O'
                                                                                            : 0;
    return !api || (check(body, api, e->name, err) &&
                    (api != 'O' || check(api_member(body, "options"), 'o', e->name, err)));
}
