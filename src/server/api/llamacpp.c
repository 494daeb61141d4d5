/*
 * llama.cpp's own API: /completion and /infill are translated to bodies of /v1/completions; /props and
 * counts of tokens. reply_llamacpp.c writes the output.
 */
#include "server/api/fim.h"
#include "server/api/prepare_int.h"
#include "base/mem.h"
#include "base/version.h"

#include <string.h>

enum { MAX_FIELDS = 64, MAX_TIME_MS = 1 << 30 };

/* Renames and checks the fields whose names or meanings differ from /v1/completions'. */
static bool translate(struct api_request *req, json_t *body)
{
    static const char *const others[] = {"logprobs", "top_logprobs",  "echo", "best_of",
                                         "suffix",   "stream_options"}; /* off, or of no use here */
    struct completion_options *o = &req->completion;
    struct api_error *err = &req->err;
    int n_predict = -1, n_probs = 0, n_choices = 0;
    bool after = false;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        json_object_del(body, others[i]);
    o->id_slot = -1;
    if (!api_int(body, "n_predict", -2, INT32_MAX, &n_predict, err) ||
        !api_int(body, "n_cmpl", 1, ENGINE_MAX_CHOICES, &n_choices, err) ||
        !api_int(body, "n_probs", 0, ENGINE_MAX_LOGPROBS, &n_probs, err) ||
        !api_int(body, "id_slot", -1, engine_info(req->loaded->engine).max_seqs - 1, &o->id_slot,
                 err) ||
        !api_int(body, "n_indent", 0, 4096, &o->n_indent, err) ||
        !api_int(body, "t_max_predict_ms", -1, MAX_TIME_MS, &o->max_predict_ms, err) ||
        !api_int(body, "t_max_prompt_ms", -1, MAX_TIME_MS, &o->max_prompt_ms, err) ||
        !api_bool(body, "return_tokens", &o->return_tokens, err) ||
        !api_bool(body, "timings_per_token", &o->timings_per_token, err) ||
        !api_bool(body, "post_sampling_probs", &after, err))
        return false;
    if (after && n_probs)
        return api_invalid(err, "post_sampling_probs", "post_sampling_probs is not supported");
    bool limited = api_member(body, "max_tokens") || api_member(body, "max_completion_tokens");
    if (api_member(body, "n_predict") || !limited)
        json_object_set_new(body, "max_tokens", json_integer(n_predict < 0 ? -1 : n_predict));
    if (n_choices)
        json_object_set_new(body, "n", json_integer(n_choices));
    if (n_probs)
        json_object_set_new(body, "logprobs", json_integer(n_probs));
    return true;
}

/* response_fields: names of members, or paths with slashes. */
static bool read_fields(struct api_request *req, const json_t *body)
{
    static const char name[] = "response_fields";
    const json_t *list = api_member(body, name), *item;
    size_t i;
    if (!list)
        return true;
    bool ok = json_is_array(list) && json_array_size(list) <= MAX_FIELDS;
    json_array_foreach((json_t *)list, i, item) ok = ok && json_is_string(item);
    if (!ok)
        return api_invalid(&req->err, name, "response_fields must be an array of up to %d strings",
                           MAX_FIELDS);
    req->completion.fields = json_deep_copy(list);
    return true;
}

/* Parameters and everything else but the prompt. */
static bool read_options(struct api_request *req, json_t *body)
{
    if (!translate(req, body) || !read_fields(req, body) ||
        !api_request_params(req, body, PARAMS_COMPLETIONS))
        return false;
    req->completion.keep_tokens = req->p.stream || req->completion.return_tokens;
    return true;
}

bool prepare_completion(struct api_request *req, const json_t *body)
{
    json_t *copy = json_copy((json_t *)body);
    bool ok =
        read_options(req, copy) && prepare_prompts(req, copy) && api_request_constrain(req, copy);
    json_decref(copy);
    return ok;
}

/* "infill" in the list of samplers is llama.cpp's rule for uncertain ends, which is left out here. */
static void drop_infill_sampler(json_t *body)
{
    json_t *list = json_copy(json_object_get(body, "samplers"));
    for (size_t i = json_array_size(list); i-- > 0;) {
        const char *name = json_string_value(json_array_get(list, i));
        if (name && !strcmp(name, "infill"))
            json_array_remove(list, i);
    }
    if (json_array_size(list))
        json_object_set(body, "samplers", list);
    else if (json_is_array(list)) /* as editors send it to fill the cache */
        json_object_del(body, "samplers");
    json_decref(list);
}

bool prepare_infill(struct api_request *req, const json_t *body)
{
    struct fim_source src = {.prefix = api_member(body, "input_prefix"),
                             .suffix = api_member(body, "input_suffix"),
                             .prompt = api_member(body, "prompt"),
                             .extra = api_member(body, "input_extra")};
    const struct {
        const char *name;
        const json_t *v;
        bool optional;
    } texts[] = {{"input_prefix", src.prefix, false},
                 {"input_suffix", src.suffix, false},
                 {"prompt", src.prompt, true}};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].v ? !json_is_string(texts[i].v) : !texts[i].optional)
            return api_invalid(&req->err, texts[i].name, "%s must be a string", texts[i].name);
    json_t *copy = json_copy((json_t *)body);
    drop_infill_sampler(copy);
    bool ok = read_options(req, copy);
    int context = engine_context(req->loaded->engine);
    int answer = req->p.max_tokens ? req->p.max_tokens : req->p.no_answer ? 1 : context / 4;
    src.room = context - answer > context / 4 ? context - answer : context / 4;
    ok = ok && fim_add_prompt(req, &src, 501, "input_prefix") && api_request_constrain(req, copy);
    req->completion.truncated = src.cut;
    json_decref(copy);
    return ok;
}

void get_props(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    struct completion_options none = {0};
    const struct loaded *l = models_shown_or_reply(s, x);
    if (!l)
        return;
    struct gen_params p = {.sample = l->sample};
    struct engine_info m = engine_info(l->engine);
    buf_addf(&b, "{\"default_generation_settings\":{\"n_ctx\":%d,\"params\":",
             engine_context(l->engine));
    llamacpp_add_settings(&p, &none, &b);
    buf_addf(&b, "},\"total_slots\":%d,\"model_alias\":", m.max_seqs);
    jsonout_text(&b, l->entry->name);
    buf_adds(&b, ",\"model_path\":");
    jsonout_text(&b, m.path);
    buf_addf(&b, ",\"modalities\":{\"vision\":%s,\"audio\":false},\"chat_template\":",
             engine_encoder(l->engine) ? "true" : "false");
    jsonout_text(&b, l->chat_source.template ? l->chat_source.template : "");
    buf_adds(&b, ",\"bos_token\":");
    jsonout_text(&b, l->chat_source.bos ? l->chat_source.bos : "");
    buf_adds(&b, ",\"eos_token\":");
    jsonout_text(&b, l->chat_source.eos ? l->chat_source.eos : "");
    buf_addf(&b, ",\"build_info\":\"steel-%s\"}", version_number());
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}

static bool add_count(struct api_request *req, bool ok, const char *object)
{
    if (ok)
        buf_addf(&req->reply, "{\"object\":\"%s\",\"input_tokens\":%zu}", object,
                 req->prompts[0].n);
    return ok;
}

bool prepare_chat_count(struct api_request *req, const json_t *body)
{
    return add_count(req, prepare_chat(req, body), "chat.completion.input_tokens");
}

bool prepare_responses_count(struct api_request *req, const json_t *body)
{
    return add_count(req, prepare_responses(req, body), "response.input_tokens");
}
