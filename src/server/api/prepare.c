/*
 * Preparing a request on a worker: JSON to checked parameters, messages to text by the template, text to
 * tokens. Reads only data that is constant while the server runs (runtime, chat template).
 */
#include "server/api/prepare_int.h"
#include "server/api/fim.h"
#include "server/api/lora_endpoints.h"
#include "server/api/embeddings.h"
#include "server/api/models_made.h"
#include "base/mem.h"

#include <string.h>
#include <strings.h>

static const struct tokenizer *need_tokenizer(struct api_request *req)
{
    struct error why;
    const struct tokenizer *t = engine_tokenizer(req->loaded->engine, &why);
    if (!t)
        api_fail(&req->err, 501, "not_supported_error", "this model has no vocabulary: %s",
                 why.msg);
    return t;
}

int api_request_n_vocab(const struct api_request *req)
{
    return engine_info(req->loaded->engine).n_vocab;
}

bool api_request_params(struct api_request *req, const json_t *body, enum params_api api)
{
    const struct loaded *l = req->loaded;
    bool ok = gen_params_read(body, api, &l->sample, api_request_n_vocab(req), &req->p, &req->err);
    if (ok)
        models_add_params(l->entry, &req->p);
    return ok;
}

struct token_list *api_request_add_prompt(struct api_request *req)
{
    req->prompts = mem_realloc(req->prompts, (size_t)req->n_prompts + 1, sizeof *req->prompts);
    req->prompts[req->n_prompts] = (struct token_list){0};
    return &req->prompts[req->n_prompts++];
}

bool api_request_refuse(struct api_request *req, const char *param, const struct error *why)
{
    if (req->budget.given_up)
        return api_fail(&req->err, 503, "unavailable_error", "%s", why->msg);
    api_invalid(&req->err, param, "%s", why->msg);
    if (req->budget.over) {
        req->err.status = 413;
        req->err.code = "too_much_work";
    }
    return false;
}

bool api_request_encode_prompt(struct api_request *req, struct buf *prompt, struct token_list *out)
{
    struct error e = {0};
    const struct tokenizer *t = need_tokenizer(req);
    if (!t)
        return false;
    if (!prompt_images_show(req->images, prompt, &e))
        return api_request_refuse(req, req->endpoint->prompt_field, &e);
    if (!tokenizer_encode_prompt(t, prompt->p, prompt->len, chat_template_text(req->loaded->chat),
                                 &req->budget, out, &e))
        return api_request_refuse(req, NULL, &e);
    return prompt_images_expand(req->images, out, &e) ||
           api_request_refuse(req, req->endpoint->prompt_field, &e);
}

bool api_request_encode(struct api_request *req, const char *text, size_t n, int flags,
                        struct token_list *out)
{
    struct error e = {0};
    const struct tokenizer *t = need_tokenizer(req);
    if (!t)
        return false;
    if (!tokenizer_encode_within(t, text, n, flags, &req->budget, out, &e))
        return api_request_refuse(req, NULL, &e);
    return true;
}

static bool add_text_prompt(struct api_request *req, const json_t *v)
{
    struct token_list *out = api_request_add_prompt(req);
    if (!api_request_encode(req, json_string_value(v), json_string_length(v),
                            TOKENIZE_SPECIAL | TOKENIZE_BOS, out))
        return false;
    int32_t bos = tokenizer_bos(engine_tokenizer(req->loaded->engine, NULL));
    if (out->n == 0 && bos >= 0)
        token_list_add(out, bos);
    return true;
}

/* llama.cpp's prompt with images: {"prompt_string": text with a mark for each of "multimodal_data": list of base64}. */
static bool add_media_prompt(struct api_request *req, const json_t *v)
{
    static const char mark[] = "<__media__>";
    const json_t *text = json_object_get(v, "prompt_string"),
                 *data = json_object_get(v, "multimodal_data");
    const char *at = json_string_value(text), *end, *next;
    size_t shown = 0, n = json_array_size(data);
    struct buf prompt = {0};
    struct error e = {0};
    bool ok = true;
    if (!at || !json_is_array(data))
        return api_invalid(&req->err, "prompt",
                           "prompt: expected a string prompt_string and a list multimodal_data");
    if (n && !req->images)
        return api_invalid(&req->err, "prompt.multimodal_data", "this model reads text only");
    if (n && prompt_images_has_mark(req->images, at, json_string_length(text)))
        return api_invalid(&req->err, "prompt.prompt_string",
                           "prompt_string: the model's own marks of images; write %s", mark);
    for (end = at + json_string_length(text);
         ok && (next = memmem(at, (size_t)(end - at), mark, sizeof mark - 1));
         at = next + sizeof mark - 1) {
        char where[48];
        snprintf(where, sizeof where, "prompt.multimodal_data[%zu]", shown);
        buf_add(&prompt, at, (size_t)(next - at));
        if (shown++ < n)
            ok = prompt_images_add_base64(req->images, json_array_get(data, shown - 1), where,
                                          &prompt, &e);
    }
    buf_add(&prompt, at, (size_t)(end - at));
    if (!ok)
        api_request_refuse(req, "prompt", &e);
    else if (shown != n)
        ok = api_invalid(&req->err, "prompt.multimodal_data", "%zu images for %zu marks %s", n,
                         shown, mark);
    struct token_list *out = ok ? api_request_add_prompt(req) : NULL;
    if (ok && !prompt_images_show(req->images, &prompt, &e))
        ok = api_request_refuse(req, "prompt", &e);
    ok = ok && api_request_encode(req, prompt.p ? prompt.p : "", prompt.len,
                                  TOKENIZE_SPECIAL | TOKENIZE_BOS, out);
    if (ok && !prompt_images_expand(req->images, out, &e))
        ok = api_request_refuse(req, "prompt", &e);
    buf_clear(&prompt);
    return ok;
}

/* A string, a list of strings, a list of token ids, a list of such lists, or a prompt with images. */
static bool read_prompts(struct api_request *req, const json_t *body)
{
    static const char name
        [] = "prompt",
    shape[] =
        "prompt must be a string, an array of strings, an array of token ids, or an array of those";
    const json_t *v = api_member(body, name), *item;
    const json_t *first = json_array_get(v, 0);
    size_t i;
    if (!v)
        return api_invalid(&req->err, name, "prompt is missing");
    if (json_is_string(v))
        return add_text_prompt(req, v);
    if (json_is_object(v))
        return add_media_prompt(req, v);
    if (!json_is_array(v) || !first)
        return api_invalid(&req->err, name, shape);
    if (json_is_integer(first))
        return api_tokens(v, name, api_request_n_vocab(req), api_request_add_prompt(req),
                          &req->err);
    if (json_array_size(v) > MAX_PROMPTS)
        return api_invalid(&req->err, name, "at most %d prompts", MAX_PROMPTS);
    json_array_foreach((json_t *)v, i, item)
    {
        if (json_typeof(item) != json_typeof(first) ||
            !(json_is_string(item) || json_is_array(item)))
            return api_invalid(&req->err, name, shape);
        if (json_is_string(item) ? !add_text_prompt(req, item)
                                 : !api_tokens(item, name, api_request_n_vocab(req),
                                               api_request_add_prompt(req), &req->err))
            return false;
    }
    return true;
}

bool prepare_prompts(struct api_request *req, const json_t *body)
{
    if (!read_prompts(req, body))
        return false;
    for (int i = 0; i < req->n_prompts; i++)
        if (req->prompts[i].n == 0)
            return api_invalid(&req->err, "prompt", "prompt %d is empty", i);
    return true;
}

bool prepare_completions(struct api_request *req, const json_t *body)
{
    struct fim_source fim = {.prefix = api_member(body, "prompt"),
                             .suffix = api_member(body, "suffix")};
    if (!api_request_params(req, body, PARAMS_COMPLETIONS))
        return false;
    if (!api_member(body, "max_tokens") && !api_member(body, "max_completion_tokens"))
        req->p.max_tokens = 16; /* OpenAI's default for this endpoint */
    if (!json_string_length(fim.suffix)) {
        if (!prepare_prompts(req, body))
            return false;
    } else if (!json_is_string(fim.prefix)) {
        return api_invalid(&req->err, "prompt", "with suffix, prompt must be a string");
    } else if (!fim_add_prompt(req, &fim, 400, "suffix")) {
        return false;
    }
    const struct tokenizer *t = engine_tokenizer(req->loaded->engine, NULL);
    if (req->p.echo && t) {
        req->echo = mem_zalloc((size_t)req->n_prompts, sizeof *req->echo);
        for (int i = 0; i < req->n_prompts; i++) /* longer prompts are refused later */
            if (req->prompts[i].n <= (size_t)engine_context(req->loaded->engine))
                tokenizer_decode(t, req->prompts[i].ids, req->prompts[i].n, false, &req->echo[i]);
    }
    return api_request_constrain(req, body);
}

/* A reply made of tokens may be many times larger than its request, so it is bounded. */
enum { MAX_REPLY = 64 << 20 };
static bool reply_fits(struct api_request *req, size_t bytes)
{
    if (bytes <= MAX_REPLY)
        return true;
    return api_fail(&req->err, 413, "invalid_request_error",
                    "the reply would have more than %d MB; split the request", MAX_REPLY >> 20);
}

static void add_ids(struct buf *b, const struct token_list *l)
{
    buf_addc(b, '[');
    for (size_t i = 0; i < l->n; i++)
        buf_addf(b, i ? ",%d" : "%d", l->ids[i]);
    buf_addc(b, ']');
}

/* Accepts the fields of llama.cpp and of vLLM. */
bool prepare_tokenize(struct api_request *req, const json_t *body)
{
    const struct tokenizer *t = need_tokenizer(req);
    const json_t *text = api_member(body, "content");
    const char *unused = NULL;
    bool special = false, parse = true, pieces = false;
    text = text ? text : api_member(body, "prompt");
    if (!t || !api_string(body, "content", &unused, &req->err) ||
        !api_string(body, "prompt", &unused, &req->err) ||
        !api_bool(body, "add_special", &special, &req->err) ||
        !api_bool(body, "add_special_tokens", &special, &req->err) ||
        !api_bool(body, "parse_special", &parse, &req->err) ||
        !api_bool(body, "with_pieces", &pieces, &req->err))
        return false;
    if (!text)
        return api_invalid(&req->err, "content", "content is missing");
    struct token_list *ids = api_request_add_prompt(req);
    if (!api_request_encode(req, json_string_value(text), json_string_length(text),
                            (parse ? TOKENIZE_SPECIAL : 0) | (special ? TOKENIZE_BOS : 0), ids))
        return false;
    buf_adds(&req->reply, "{\"tokens\":");
    if (!reply_fits(req, ids->n * 8))
        return false;
    if (!pieces) {
        add_ids(&req->reply, ids);
    } else {
        for (size_t i = 0; i < ids->n; i++) {
            size_t n;
            const char *piece = tokenizer_piece(t, ids->ids[i], &n);
            if (!reply_fits(req, req->reply.len + n))
                return false;
            buf_addf(&req->reply, "%s{\"id\":%d,\"piece\":", i ? "," : "[", ids->ids[i]);
            jsonout_string(&req->reply, piece, n);
            buf_addc(&req->reply, '}');
        }
        buf_adds(&req->reply, ids->n ? "]" : "[]");
    }
    buf_addf(&req->reply, ",\"count\":%zu,\"max_model_len\":%d}", ids->n,
             engine_context(req->loaded->engine));
    return true;
}

bool prepare_template(struct api_request *req, const json_t *body)
{
    struct buf prompt = {0};
    struct token_list *ids = api_request_add_prompt(req);
    bool legacy;
    json_t *chat = functions_translate(body, &legacy, &req->err);
    bool ok = chat && prepare_conversation(req, chat, &prompt) &&
              api_request_encode_prompt(req, &prompt, ids) &&
              reply_fits(req, prompt.len * 2 + ids->n * 8);
    if (ok) {
        buf_adds(&req->reply, "{\"prompt\":");
        jsonout_string(&req->reply, prompt.p, prompt.len);
        buf_adds(&req->reply, ",\"tokens\":");
        add_ids(&req->reply, ids);
        buf_addf(&req->reply, ",\"count\":%zu,\"format\":\"%s\",\"thinking\":%s}", ids->n,
                 chat_format_name(req->chat->format), req->chat->in_reasoning ? "true" : "false");
    }
    buf_clear(&prompt);
    json_decref(chat);
    return ok;
}

bool prepare_count(struct api_request *req, const json_t *body)
{
    if (!prepare_anthropic_prompt(req, body, false))
        return false;
    buf_addf(&req->reply, "{\"input_tokens\":%zu}", req->prompts[0].n);
    return true;
}

bool prepare_detokenize(struct api_request *req, const json_t *body)
{
    const struct tokenizer *t = need_tokenizer(req);
    const json_t *list = api_member(body, "tokens");
    if (!t)
        return false;
    if (!json_is_array(list))
        return api_invalid(&req->err, "tokens", "tokens must be an array of token ids");
    struct token_list *ids = api_request_add_prompt(req);
    if (!api_tokens(list, "tokens", tokenizer_n_vocab(t), ids, &req->err))
        return false;
    struct buf text = {0};
    size_t bytes = 0, len;
    for (size_t i = 0; i < ids->n; i++) {
        tokenizer_piece(t, ids->ids[i], &len);
        bytes += len;
    }
    if (!reply_fits(req, bytes * 4))
        return false;
    tokenizer_decode(t, ids->ids, ids->n, true, &text);
    buf_adds(&req->reply, "{\"content\":");
    jsonout_string(&req->reply, text.p ? text.p : "", text.len);
    buf_adds(&req->reply, ",\"prompt\":");
    jsonout_string(&req->reply, text.p ? text.p : "", text.len);
    buf_addc(&req->reply, '}');
    buf_clear(&text);
    return true;
}

/* Ready to take images out of the body, if there can be any. */
static void expect_images(struct api_request *req)
{
    const struct image_rules rules = {.max_pixels = req->server->opt.max_image_pixels,
                                      .stop = &req->cancelled,
                                      .budget = &req->budget,
                                      .salt = req->key,
                                      .fetch =
                                          req->server->opt.image_origins.n ? image_fetch : NULL,
                                      .fetch_arg = &req->fetches};
    bool kept = req->endpoint->prepare == prepare_responses; /* earlier items may have images */
    if (!req->loaded || !req->loaded->engine)
        return;
    req->fetches = (struct image_fetches){.origins = &req->server->opt.image_origins};
    if (kept || (req->n_body && (memmem(req->body, req->n_body, "image", 5) ||
                                 memmem(req->body, req->n_body, "multimodal_data", 15))))
        req->images = prompt_images_new(req->loaded->engine, &rules);
}

/* Whether there may be an image in v that is fetched. */
static bool may_fetch(const json_t *v)
{
    static const char *const names[] = {"url", "image_url", "image"};
    const char *key, *text;
    json_t *inner;
    size_t i;
    json_array_foreach((json_t *)v, i, inner)
    {
        if (may_fetch(inner))
            return true;
    }
    for (i = 0; i < sizeof names / sizeof *names; i++)
        if ((text = json_string_value(json_object_get(v, names[i]))) &&
            !strncasecmp(text, "http", 4))
            return true;
    json_object_foreach((json_t *)v, key, inner)
    {
        if (may_fetch(inner))
            return true;
    }
    return false;
}

/* Whether the request is for a worker that may wait. Kept items may have images that are fetched, too. */
static bool may_wait(const struct api_request *req, const json_t *body)
{
    static const char *const kept[] = {"previous_response_id", "conversation"};
    const json_t *input = api_member(body, "input"), *item;
    size_t i;
    if (req->endpoint->slow || !req->images || !req->server->opt.image_origins.n)
        return req->endpoint->slow;
    for (i = 0; i < sizeof kept / sizeof *kept; i++)
        if (req->endpoint->prepare == prepare_responses && api_member(body, kept[i]))
            return true;
    json_array_foreach((json_t *)input, i, item)
    {
        const char *type = json_string_value(json_object_get(item, "type"));
        if (type && !strcmp(type, "item_reference"))
            return true;
    }
    return may_fetch(body);
}

/* Features are computed by a worker that may wait. */
static bool encode_images(struct api_request *req)
{
    if (!req->is_slow && prompt_images_count(req->images)) {
        req->slow_work = WORK_ENCODE;
        return true;
    }
    struct error e = {0};
    return prompt_images_encode(req->images, &e) ||
           api_request_refuse(req, req->endpoint->prompt_field, &e);
}

void api_request_prepare(struct api_request *req)
{
    if (req->embed) { /* second pass: the embeddings are computed */
        embed_write(req);
        return;
    }
    if (req->slow_work == WORK_ENCODE) {
        encode_images(req);
        return;
    }
    if (req->choices) { /* of an earlier round */
        if (prepare_responses_again(req) && api_request_resolve(req))
            encode_images(req);
        return;
    }
    req->budget = budget_for(req->n_body, &req->cancelled);
    bool none = !req->n_body && req->endpoint->body_optional;
    json_t *body = none ? json_object() : api_parse(req->body, req->n_body, &req->err);
    const struct endpoint *e = req->endpoint;
    bool ok = body && fields_check(e, body, &req->err);
    if (ok && !models_choose(req, body) && req->entry) {
        json_decref(body); /* it is read again when the model is there */
        return;
    }
    expect_images(req);
    if (ok && !req->err.status && !req->is_slow && may_wait(req, body)) {
        req->slow_work = WORK_PREPARE;
        prompt_images_free(req->images);
        req->images = NULL;
        json_decref(body);
        return;
    }
    mem_free(req->body);
    req->body = NULL;
    if (ok && req->reply.len) { /* the choice of the model was all */
        json_decref(body);
        return;
    }
    ok = ok && !req->err.status && (e->effect != ENDPOINT_GENERATES || lora_choose(req, body)) &&
         e->prepare(req, body);
    ok = ok && (e->effect != ENDPOINT_GENERATES || req->reply.len ||
                (api_request_resolve(req) && encode_images(req)));
    CHECK(ok == (req->err.status == 0), "%s failed without a reason", e->name);
    json_decref(body);
}
