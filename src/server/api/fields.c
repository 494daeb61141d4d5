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

/* APIs: C chat, P completions, R Responses, M Messages, O Ollama, o Ollama's options, L and I llama.cpp's /completion and
 * /infill. */
static const struct request_field {
    const char *name, *apis;
    enum use use;
    const char *why; /* of a refusal */
} fields[] = {
    /* clang-format off */
    {"model", "CPRMOLI", READ, NULL},
    {"lora", "CPRMOLI", READ, NULL},
    {"stream", "CPRMOLI", READ, NULL},
    {"messages", "CMO", READ, NULL},
    {"prompt", "POLI", READ, NULL},
    {"max_tokens", "CPRMLI", READ, NULL},
    {"max_completion_tokens", "CPRMLI", READ, NULL},
    {"temperature", "CPRMoLI", READ, NULL},
    {"top_k", "CPRMoLI", READ, NULL},
    {"top_p", "CPRMoLI", READ, NULL},
    {"min_p", "CPRMoLI", READ, NULL},
    {"repeat_penalty", "CPRMoLI", READ, NULL},
    {"repeat_last_n", "CPRMoLI", READ, NULL},
    {"presence_penalty", "CPRMoLI", READ, NULL},
    {"frequency_penalty", "CPRMoLI", READ, NULL},
    {"seed", "CPRMoLI", READ, NULL},
    {"repetition_penalty", "CPRMoLI", READ, NULL},
    {"typical_p", "CPRMoLI", READ, NULL},
    {"top_n_sigma", "CPRMoLI", READ, NULL},
    {"xtc_probability", "CPRMoLI", READ, NULL},
    {"xtc_threshold", "CPRMoLI", READ, NULL},
    {"dynatemp_range", "CPRMoLI", READ, NULL},
    {"dynatemp_exponent", "CPRMoLI", READ, NULL},
    {"mirostat", "CPRMoLI", READ, NULL},
    {"mirostat_tau", "CPRMoLI", READ, NULL},
    {"mirostat_eta", "CPRMoLI", READ, NULL},
    {"dry_multiplier", "CPRMoLI", READ, NULL},
    {"dry_base", "CPRMoLI", READ, NULL},
    {"dry_allowed_length", "CPRMoLI", READ, NULL},
    {"dry_penalty_last_n", "CPRMoLI", READ, NULL},
    {"dry_sequence_breakers", "CPRMoLI", READ, NULL},
    {"samplers", "CPRMoLI", READ, NULL},
    {"logit_bias", "CPRMoLI", READ, NULL},
    {"min_tokens", "CPRMoLI", READ, NULL},
    {"ignore_eos", "CPRMoLI", READ, NULL},
    {"stop", "CPRoLI", READ, NULL},
    {"stop_sequences", "M", READ, NULL},
    {"stop_token_ids", "CPRMoLI", READ, NULL},
    {"include_stop_str_in_output", "CPRMoLI", READ, NULL},
    {"bad_words", "CPRMoLI", READ, NULL},
    {"allowed_token_ids", "CPRMoLI", READ, NULL},
    {"truncate_prompt_tokens", "CPRMoLI", READ, NULL},
    {"cache_prompt", "CPRMoLI", READ, NULL},
    {"cache_salt", "CPRMoLI", READ, NULL},
    {"n", "CPMLI", READ, NULL},
    {"n", "R", REFUSED, "one answer; above 1"},
    {"best_of", "P", READ, NULL},
    {"echo", "P", READ, NULL},
    {"logprobs", "CPRO", READ, NULL},
    {"top_logprobs", "CRO", READ, NULL},
    {"prompt_logprobs", "CPRMOoLI", REFUSED, "completions have echo with logprobs"},
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
    {"response_format", "CPRLI", READ, NULL},
    {"guided_json", "CPRLI", READ, NULL},
    {"guided_regex", "CPRLI", READ, NULL},
    {"guided_choice", "CPRLI", READ, NULL},
    {"guided_grammar", "CPRLI", READ, NULL},
    {"grammar", "CPRLI", READ, NULL},
    {"json_schema", "CPRLI", READ, NULL},
    {"structured_outputs", "CPRLI", READ, NULL},
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
    {"max_tool_calls", "R", READ, NULL},
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
    {"keep_alive", "O", READ, NULL},
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
    {"tfs_z", "oLI", REFUSED, "tail-free sampling"},
    {"mcp_servers", "CPRM", REFUSED, "the client runs tools"},
    {"container", "M", UNUSED, NULL},
    {"context_management", "M", UNUSED, NULL},
    {"use_beam_search", "CPRLI", REFUSED, "beam search"},
    {"logits_processors", "CPRLI", REFUSED, "code of another server"},
    {"vllm_xargs", "CPRLI", REFUSED, "code of another server"},
    {"length_penalty", "CPRLI", UNUSED, NULL},
    {"early_stopping", "CPRLI", UNUSED, NULL},
    {"skip_special_tokens", "CPRLI", UNUSED, NULL},
    {"spaces_between_special_tokens", "CPRLI", UNUSED, NULL},
    {"priority", "CPRLI", UNUSED, NULL},
    {"request_id", "CPRLI", UNUSED, NULL},
    {"web_search_options", "C", REFUSED, "the client runs tools"},
    {"search_parameters", "C", REFUSED, "the client runs tools; a mode other than off and auto"},
    {"user", "CPRMLI", UNUSED, NULL},
    {"metadata", "CPRMLI", UNUSED, NULL},
    {"service_tier", "CPRM", UNUSED, NULL},
    {"safety_identifier", "CPRM", UNUSED, NULL},
    {"prompt_cache_key", "CPRM", UNUSED, NULL},
    {"prompt_cache_retention", "CPRM", UNUSED, NULL},
    {"store", "C", UNUSED, NULL},
    {"prediction", "C", UNUSED, NULL},
    {"verbosity", "C", UNUSED, NULL},
    {"n_predict", "CLI", READ, NULL},
    {"n_cmpl", "LI", READ, NULL},
    {"n_probs", "LI", READ, NULL},
    {"post_sampling_probs", "LI", READ, NULL},
    {"id_slot", "LI", READ, NULL},
    {"n_indent", "LI", READ, NULL},
    {"t_max_prompt_ms", "LI", READ, NULL},
    {"t_max_predict_ms", "LI", READ, NULL},
    {"return_tokens", "LI", READ, NULL},
    {"timings_per_token", "LI", READ, NULL},
    {"response_fields", "LI", READ, NULL},
    {"input_prefix", "I", READ, NULL},
    {"input_suffix", "I", READ, NULL},
    {"input_extra", "I", READ, NULL},
    {"image_data", "LI", REFUSED, "send prompt.multimodal_data"},
    {"min_keep", "LI", REFUSED, "stages of sampling may keep one token; above 1"},
    {"adaptive_target", "LI", REFUSED, "adaptive sampling; above 0"},
    {"grammar_lazy", "LI", REFUSED, "tools of chats have lazy grammars"},
    {"grammar_triggers", "LI", REFUSED, "tools of chats have lazy grammars"},
    {"logprobs", "LI", REFUSED, "n_probs"},
    {"top_logprobs", "LI", REFUSED, "n_probs"},
    {"echo", "LI", REFUSED, "/v1/completions has it"},
    {"best_of", "LI", REFUSED, "/v1/completions has it"},
    {"suffix", "LI", REFUSED, "send it to /infill as input_suffix"},
    {"adaptive_decay", "LI", UNUSED, NULL},
    {"n_keep", "LI", UNUSED, NULL},
    {"n_discard", "LI", UNUSED, NULL},
    {"n_cache_reuse", "LI", UNUSED, NULL},
    {"return_progress", "LI", UNUSED, NULL},
    {"penalize_nl", "LI", UNUSED, NULL},
    {"preserved_tokens", "LI", UNUSED, NULL},
    {"backend_sampling", "LI", UNUSED, NULL},
    {"speculative.n_max", "LI", UNUSED, NULL},
    {"speculative.n_min", "LI", UNUSED, NULL},
    {"speculative.p_min", "LI", UNUSED, NULL},
    {"stream_options", "LI", UNUSED, NULL},
    /* clang-format on */
};

static const struct request_field *find(const char *name, char api)
{
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (strchr(fields[i].apis, api) && !strcmp(fields[i].name, name))
            return &fields[i];
    return NULL;
}

bool fields_unused_option(const char *name)
{
    const struct request_field *f = find(name, 'o');
    return f && f->use == UNUSED;
}

static bool is_empty(const json_t *v)
{
    return json_is_null(v) || json_is_false(v) || (json_is_string(v) && !json_string_length(v)) ||
           ((json_is_array(v) || json_is_object(v)) && !json_array_size(v) && !json_object_size(v));
}

static const char *search_mode(const json_t *v)
{
    const json_t *mode = json_object_get(v, "mode");
    return !mode ? "auto" : json_is_string(mode) ? json_string_value(mode) : "";
}

/* xAI's search: off, auto (as without a mode; the model may do without) or on. */
static bool search_is_optional(const json_t *v)
{
    const char *mode = search_mode(v);
    return json_is_object(v) && (!strcmp(mode, "off") || !strcmp(mode, "auto"));
}

/* Whether the value is the default behaviour. */
static bool is_default(const struct request_field *f, const json_t *v)
{
    static const struct {
        const char *name;
        double most;
    } off[] = {{"n", 1},        {"min_keep", 1},     {"best_of", 1},
               {"logprobs", 0}, {"top_logprobs", 0}, {"adaptive_target", 0}};
    if (is_empty(v))
        return true;
    if (!strcmp(f->name, "search_parameters"))
        return search_is_optional(v);
    if (!strcmp(f->name, "tfs_z"))
        return json_is_number(v) && json_number_value(v) == 1;
    for (size_t i = 0; i < sizeof off / sizeof *off; i++)
        if (!strcmp(f->name, off[i].name))
            return json_is_number(v) && json_number_value(v) <= off[i].most;
    return false;
}

enum { TOLD_MOST = 256 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct told { /* under lock */
    char name[64];
    char api;
} told[TOLD_MOST];
static int n_told;

/* Logs each name once, and TOLD_MOST names at most. */
static void tell(const char *what, const char *name, char api, const char *endpoint)
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
        log_line(LOG_WARN, what, LOG_TEXT("endpoint", endpoint), LOG_TEXT("field", name));
}

static bool check(const json_t *o, char api, const char *endpoint, struct api_error *err)
{
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)o, name, v)
    {
        const struct request_field *f = find(name, api);
        if (!f)
            tell("unknown field", name, api, endpoint);
        else if (f->use == REFUSED && !is_default(f, v))
            return api_invalid(err, name, "%s is not supported: %s", name, f->why);
        else if (!strcmp(name, "search_parameters") && !is_empty(v) &&
                 strcmp(search_mode(v), "off") != 0)
            tell("a search that the server would have to run is left out", name, api, endpoint);
    }
    return true;
}

bool fields_check(const struct endpoint *e, const json_t *body, struct api_error *err)
{
    static const struct {
        bool (*prepare)(struct api_request *, const json_t *);
        char api;
    } apis[] = {{prepare_chat, 'C'},        {prepare_completions, 'P'},
                {prepare_responses, 'R'},   {prepare_anthropic, 'M'},
                {prepare_ollama_chat, 'O'}, {prepare_ollama_generate, 'O'},
                {prepare_completion, 'L'},  {prepare_infill, 'I'}};
    char api = 0;
    for (size_t i = 0; i < sizeof apis / sizeof *apis; i++)
        api = e->prepare == apis[i].prepare ? apis[i].api : api;
    return !api || (check(body, api, e->name, err) &&
                    (api != 'O' || check(api_member(body, "options"), 'o', e->name, err)));
}
