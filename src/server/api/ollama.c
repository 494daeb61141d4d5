/*
 * Translates bodies of Ollama's /api/chat and /api/generate to OpenAI's format: options to sampling
 * fields, format to response_format, think to the template's switches, tool calls with ids. Pure
 * JSON to JSON. Unsupported fields (images, template) are refused by name.
 */
#include "server/api/ollama.h"
#include "base/mem.h"
#include "server/api/prepare_int.h"
#include "base/buf.h"
#include "text/chat/chat.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool refuse(const json_t *body, const char *name, struct api_error *err)
{
    const json_t *v = api_member(body, name);
    bool empty = !v || (json_is_string(v) && !json_string_length(v)) ||
                 (json_is_array(v) && !json_array_size(v));
    return empty || api_invalid(err, name, "%s is not supported", name);
}

bool ollama_add_options(const json_t *body, json_t *out, struct api_error *err)
{
    static const char *const same[] = {"temperature",
                                       "top_k",
                                       "top_p",
                                       "min_p",
                                       "repeat_penalty",
                                       "repeat_last_n",
                                       "presence_penalty",
                                       "frequency_penalty",
                                       "seed",
                                       "repetition_penalty",
                                       "typical_p",
                                       "top_n_sigma",
                                       "xtc_probability",
                                       "xtc_threshold",
                                       "dynatemp_range",
                                       "dynatemp_exponent",
                                       "mirostat",
                                       "mirostat_tau",
                                       "mirostat_eta",
                                       "dry_multiplier",
                                       "dry_base",
                                       "dry_allowed_length",
                                       "dry_penalty_last_n",
                                       "dry_sequence_breakers",
                                       "samplers",
                                       "logit_bias",
                                       "min_tokens",
                                       "ignore_eos",
                                       "stop",
                                       "stop_token_ids",
                                       "include_stop_str_in_output",
                                       "bad_words",
                                       "allowed_token_ids",
                                       "truncate_prompt_tokens",
                                       "cache_prompt",
                                       "cache_salt"};
    const json_t *o = api_member(body, "options");
    int most = 0;
    if (!o)
        return true;
    if (!json_is_object(o))
        return api_invalid(err, "options", "options must be an object");
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (api_member(o, same[i]))
            json_object_set(out, same[i], (json_t *)api_member(o, same[i]));
    int context = 0;
    if (!api_int(o, "num_ctx", 0, INT32_MAX, &context, err))
        return false;
    if (context > 0)
        json_object_set_new(out, "num_ctx", json_integer(context));
    /* -1: no limit; -2: until the context is full. */
    if (!api_int(o, "num_predict", -2, INT32_MAX, &most, err))
        return false;
    if (most > 0)
        json_object_set_new(out, "max_completion_tokens", json_integer(most));
    return true;
}

/* "json", or a schema. */
static bool add_format(const json_t *body, json_t *out, struct api_error *err)
{
    json_t *f = (json_t *)api_member(body, "format");
    const char *word = json_string_value(f);
    if (!f || (word && !*word))
        return true;
    if (word && !strcmp(word, "json"))
        json_object_set_new(out, "response_format", json_pack("{s:s}", "type", "json_object"));
    else if (json_is_object(f))
        json_object_set_new(out, "response_format",
                            json_pack("{s:s,s:{s:s,s:O}}", "type", "json_schema", "json_schema",
                                      "name", "format", "schema", f));
    else
        return api_invalid(err, "format", "format must be \"json\" or a JSON schema");
    return true;
}

static bool add_think(const json_t *body, json_t *out, struct api_error *err)
{
    json_t *v = (json_t *)api_member(body, "think");
    const char *word = json_string_value(v);
    if (json_is_boolean(v))
        json_object_set(out, "enable_thinking", v);
    else if (word && chat_effort_known(word))
        json_object_set(out, "reasoning_effort", v);
    else if (v)
        return api_invalid(err, "think", "think must be a boolean, %s", chat_efforts);
    return true;
}

/* Ollama's tool calls have no ids: they are numbered, and results are matched in order. */
struct numbering {
    int called, answered;
};

static bool add_calls(json_t *msg, const json_t *calls, struct numbering *n, const char *where,
                      struct api_error *err)
{
    size_t i;
    const json_t *call;
    if (!json_is_array(calls))
        return api_invalid(err, where, "%s must be an array", where);
    json_t *list = json_array();
    json_object_set_new(msg, "tool_calls", list);
    json_array_foreach((json_t *)calls, i, call)
    {
        json_t *f = json_object_get(call, "function");
        json_t *name = json_object_get(f, "name"), *args = json_object_get(f, "arguments");
        char id[32];
        if (!json_is_string(name) || (args && !json_is_object(args)))
            return api_invalid(err, where,
                               "%s[%zu].function needs a name and arguments (an object)", where, i);
        snprintf(id, sizeof id, "call_%d", n->called++);
        char *text = args ? json_dumps(args, JSON_COMPACT) : NULL;
        json_array_append_new(list,
                              json_pack("{s:s,s:s,s:{s:O,s:s}}", "id", id, "type", "function",
                                        "function", "name", name, "arguments", text ? text : "{}"));
        mem_free(text);
    }
    n->answered = n->called - (int)json_array_size(list);
    return true;
}

static bool add_message(json_t *messages, const json_t *m, size_t index, struct numbering *n,
                        struct api_error *err)
{
    char where[64];
    const json_t *calls = api_member(m, "tool_calls"), *thinking = api_member(m, "thinking");
    const char *role = json_string_value(json_object_get(m, "role"));
    const json_t *content = api_member(m, "content");
    snprintf(where, sizeof where, "messages[%zu].images", index);
    if (json_array_size(json_object_get(m, "images")))
        return api_invalid(err, where, "%s is not supported: this model reads text", where);
    snprintf(where, sizeof where, "messages[%zu].content", index);
    if (content && !json_is_string(content))
        return api_invalid(err, where, "%s must be a string", where);
    json_t *msg = json_pack("{s:O*,s:O*}", "role", json_object_get(m, "role"), "content", content);
    if (!content)
        json_object_set_new(msg, "content", json_string(""));
    json_array_append_new(messages, msg);
    if (json_is_string(thinking))
        json_object_set(msg, "reasoning_content", (json_t *)thinking);
    if (role && !strcmp(role, "tool")) {
        char id[32];
        snprintf(id, sizeof id, "call_%d", n->answered++);
        json_object_set_new(msg, "tool_call_id", json_string(id));
        if (json_is_string(json_object_get(m, "tool_name")))
            json_object_set(msg, "name", json_object_get(m, "tool_name"));
    }
    snprintf(where, sizeof where, "messages[%zu].tool_calls", index);
    return !calls || add_calls(msg, calls, n, where, err);
}

static bool add_messages(const json_t *body, json_t *messages, struct api_error *err)
{
    const json_t *list = api_member(body, "messages"), *m;
    struct numbering n = {0};
    size_t i;
    if (!json_is_array(list))
        return api_invalid(err, "messages", "messages must be an array");
    json_array_foreach((json_t *)list, i, m)
    {
        if (!add_message(messages, m, i, &n, err))
            return false;
    }
    return true;
}

static bool add_prompt(const json_t *body, json_t *out, json_t *messages, bool *raw,
                       struct api_error *err)
{
    json_t *prompt = (json_t *)api_member(body, "prompt"),
           *system = (json_t *)api_member(body, "system");
    if (!api_bool(body, "raw", raw, err) || !refuse(body, "images", err) ||
        !refuse(body, "template", err))
        return false;
    if (!json_is_string(prompt) || (system && !json_is_string(system)))
        return api_invalid(err, json_is_string(prompt) ? "system" : "prompt",
                           "prompt and system must be strings");
    const json_t *suffix = api_member(body, "suffix");
    if (suffix && !json_is_string(suffix))
        return api_invalid(err, "suffix", "suffix must be a string");
    if (json_string_length(suffix)) {
        if (json_string_length(system))
            return api_invalid(err, "system", "system is not supported together with suffix");
        json_object_set(out, "suffix", (json_t *)suffix);
        *raw = true; /* no template */
    }
    if (*raw) {
        json_object_set(out, "prompt", prompt);
        if (!api_member(out, "max_completion_tokens"))
            json_object_set_new(out, "max_completion_tokens", json_integer(-1));
        return true;
    }
    if (json_string_length(system))
        json_array_append_new(messages,
                              json_pack("{s:s,s:O}", "role", "system", "content", system));
    json_array_append_new(messages, json_pack("{s:s,s:O}", "role", "user", "content", prompt));
    return true;
}

bool ollama_only_loads(const struct endpoint *e, const json_t *body)
{
    bool generate = e->prepare == prepare_ollama_generate;
    const json_t *prompt = api_member(body, "prompt"), *messages = api_member(body, "messages");
    if ((!generate && e->prepare != prepare_ollama_chat) ||
        !json_is_string(api_member(body, "model")))
        return false;
    if (generate && json_string_length(api_member(body, "suffix")))
        return false;
    return generate ? !prompt || (json_is_string(prompt) && !json_string_length(prompt))
                    : !messages || (json_is_array(messages) && !json_array_size(messages));
}

json_t *ollama_translate(const json_t *body, bool generate, bool *raw, struct api_error *err)
{
    json_t *out = json_object(), *messages = json_array();
    thinking_copy(body, out);
    bool stream = true;
    *raw = false;
    json_object_set_new(out, "messages", messages);
    bool ok =
        api_bool(body, "stream", &stream, err) && ollama_add_options(body, out, err) &&
        add_format(body, out, err) && add_think(body, out, err) &&
        (generate ? add_prompt(body, out, messages, raw, err) : add_messages(body, messages, err));
    static const char *const probs[] = {"logprobs", "top_logprobs"};
    for (int i = 0; i < 2; i++)
        if (api_member(body, probs[i]))
            json_object_set(out, probs[i], (json_t *)api_member(body, probs[i]));
    json_object_set_new(out, "stream", json_boolean(stream));
    if (api_member(body, "tools"))
        json_object_set(out, "tools", (json_t *)api_member(body, "tools"));
    if (ok)
        return out;
    json_decref(out);
    return NULL;
}
