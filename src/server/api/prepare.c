/*
 * A worker's part of a call: JSON to checked parameters, messages through the template, text to
 * tokens. Reads only what is constant while the server runs (runtime, chat template).
 */
#include "server/api/prepare_int.h"
#include "server/api/adapters.h"
#include "server/api/embeddings.h"
#include "base/mem.h"

#include <string.h>

static const struct tokenizer *need_tokenizer(struct call *c)
{
    const struct runtime *rt = server_runtime(c->server);
    if (!rt->tokenizer)
        api_fail(&c->err, 501, "not_supported_error", "this model has no vocabulary: %s",
                 rt->tokenizer_error.msg);
    return rt->tokenizer;
}

int call_n_vocab(const struct call *c)
{
    return server_runtime(c->server)->model->config.n_vocab;
}

struct token_list *call_add_prompt(struct call *c)
{
    c->prompts = mem_realloc(c->prompts, (size_t)c->n_prompts + 1, sizeof *c->prompts);
    c->prompts[c->n_prompts] = (struct token_list){0};
    return &c->prompts[c->n_prompts++];
}

bool call_refuse(struct call *c, const char *param, const struct error *why)
{
    if (c->budget.given_up)
        return api_fail(&c->err, 503, "unavailable_error", "%s", why->msg);
    api_invalid(&c->err, param, "%s", why->msg);
    if (c->budget.over) {
        c->err.status = 413;
        c->err.code = "too_much_work";
    }
    return false;
}

bool call_encode(struct call *c, const char *text, size_t n, int flags, struct token_list *out)
{
    struct error e = {0};
    const struct tokenizer *t = need_tokenizer(c);
    if (!t)
        return false;
    if (!tokenizer_encode_within(t, text, n, flags, &c->budget, out, &e))
        return call_refuse(c, NULL, &e);
    return true;
}

static bool add_text_prompt(struct call *c, const json_t *v)
{
    struct token_list *out = call_add_prompt(c);
    if (!call_encode(c, json_string_value(v), json_string_length(v),
                     TOKENIZE_SPECIAL | TOKENIZE_BOS, out))
        return false;
    int32_t bos = tokenizer_bos(server_runtime(c->server)->tokenizer);
    if (out->n == 0 && bos >= 0)
        token_list_add(out, bos);
    return true;
}

/* A string, a list of strings, a list of token ids, or a list of such lists. */
static bool read_prompts(struct call *c, const json_t *body)
{
    static const char name
        [] = "prompt",
    shape[] =
        "prompt must be a string, an array of strings, an array of token ids, or an array of those";
    const json_t *v = api_member(body, name), *item;
    const json_t *first = json_array_get(v, 0);
    size_t i;
    if (!v)
        return api_invalid(&c->err, name, "prompt is missing");
    if (json_is_string(v))
        return add_text_prompt(c, v);
    if (!json_is_array(v) || !first)
        return api_invalid(&c->err, name, shape);
    if (json_is_integer(first))
        return api_tokens(v, name, call_n_vocab(c), call_add_prompt(c), &c->err);
    if (json_array_size(v) > MAX_PROMPTS)
        return api_invalid(&c->err, name, "at most %d prompts", MAX_PROMPTS);
    json_array_foreach((json_t *)v, i, item)
    {
        if (json_typeof(item) != json_typeof(first) ||
            !(json_is_string(item) || json_is_array(item)))
            return api_invalid(&c->err, name, shape);
        if (json_is_string(item)
                ? !add_text_prompt(c, item)
                : !api_tokens(item, name, call_n_vocab(c), call_add_prompt(c), &c->err))
            return false;
    }
    return true;
}

bool prepare_completions(struct call *c, const json_t *body)
{
    if (!gen_params_read(body, PARAMS_COMPLETIONS, &c->server->opt.sample, call_n_vocab(c), &c->p,
                         &c->err))
        return false;
    if (!c->p.max_tokens && !c->p.no_answer)
        c->p.max_tokens = 16; /* OpenAI's default for this endpoint */
    if (!read_prompts(c, body))
        return false;
    for (int i = 0; i < c->n_prompts; i++)
        if (c->prompts[i].n == 0)
            return api_invalid(&c->err, "prompt", "prompt %d is empty", i);
    const struct tokenizer *t = server_runtime(c->server)->tokenizer;
    if (c->p.echo && t) {
        c->echo = mem_zalloc((size_t)c->n_prompts, sizeof *c->echo);
        for (int i = 0; i < c->n_prompts; i++) /* what is too long is refused anyway */
            if (c->prompts[i].n <= (size_t)engine_context(c->server->engine))
                tokenizer_decode(t, c->prompts[i].ids, c->prompts[i].n, false, &c->echo[i]);
    }
    return call_constrain(c, body);
}

/* A reply made of tokens may be many times its request: it has a bound of its own. */
enum { MAX_REPLY = 64 << 20 };
static bool reply_fits(struct call *c, size_t bytes)
{
    if (bytes <= MAX_REPLY)
        return true;
    return api_fail(&c->err, 413, "invalid_request_error",
                    "the reply would have more than %d MB; ask in parts", MAX_REPLY >> 20);
}

static void add_ids(struct buf *b, const struct token_list *l)
{
    buf_addc(b, '[');
    for (size_t i = 0; i < l->n; i++)
        buf_addf(b, i ? ",%d" : "%d", l->ids[i]);
    buf_addc(b, ']');
}

/* llama.cpp's fields and vLLM's. */
static bool prepare_tokenize(struct call *c, const json_t *body)
{
    const struct tokenizer *t = need_tokenizer(c);
    const json_t *text = api_member(body, "content");
    const char *unused = NULL;
    bool special = false, parse = true, pieces = false;
    text = text ? text : api_member(body, "prompt");
    if (!t || !api_string(body, "content", &unused, &c->err) ||
        !api_string(body, "prompt", &unused, &c->err) ||
        !api_bool(body, "add_special", &special, &c->err) ||
        !api_bool(body, "add_special_tokens", &special, &c->err) ||
        !api_bool(body, "parse_special", &parse, &c->err) ||
        !api_bool(body, "with_pieces", &pieces, &c->err))
        return false;
    if (!text)
        return api_invalid(&c->err, "content", "content is missing");
    struct token_list *ids = call_add_prompt(c);
    if (!call_encode(c, json_string_value(text), json_string_length(text),
                     (parse ? TOKENIZE_SPECIAL : 0) | (special ? TOKENIZE_BOS : 0), ids))
        return false;
    buf_adds(&c->reply, "{\"tokens\":");
    if (!reply_fits(c, ids->n * 8))
        return false;
    if (!pieces) {
        add_ids(&c->reply, ids);
    } else {
        for (size_t i = 0; i < ids->n; i++) {
            size_t n;
            const char *piece = tokenizer_piece(t, ids->ids[i], &n);
            if (!reply_fits(c, c->reply.len + n))
                return false;
            buf_addf(&c->reply, "%s{\"id\":%d,\"piece\":", i ? "," : "[", ids->ids[i]);
            jsonout_string(&c->reply, piece, n);
            buf_addc(&c->reply, '}');
        }
        buf_adds(&c->reply, ids->n ? "]" : "[]");
    }
    buf_addf(&c->reply, ",\"count\":%zu,\"max_model_len\":%d}", ids->n,
             engine_context(c->server->engine));
    return true;
}

static bool prepare_template(struct call *c, const json_t *body)
{
    struct buf prompt = {0};
    struct token_list *ids = call_add_prompt(c);
    bool legacy;
    json_t *chat = functions_translate(body, &legacy, &c->err);
    bool ok = chat && prepare_conversation(c, chat, &prompt) &&
              call_encode(c, prompt.p, prompt.len, TOKENIZE_SPECIAL, ids) &&
              reply_fits(c, prompt.len * 2 + ids->n * 8);
    if (ok) {
        buf_adds(&c->reply, "{\"prompt\":");
        jsonout_string(&c->reply, prompt.p, prompt.len);
        buf_adds(&c->reply, ",\"tokens\":");
        add_ids(&c->reply, ids);
        buf_addf(&c->reply, ",\"count\":%zu,\"format\":\"%s\",\"thinking\":%s}", ids->n,
                 chat_format_name(c->chat->format), c->chat->in_reasoning ? "true" : "false");
    }
    buf_clear(&prompt);
    json_decref(chat);
    return ok;
}

static bool prepare_count(struct call *c, const json_t *body)
{
    if (!prepare_chat(c, body))
        return false;
    buf_addf(&c->reply, "{\"input_tokens\":%zu}", c->prompts[0].n);
    return true;
}

static bool prepare_detokenize(struct call *c, const json_t *body)
{
    const struct tokenizer *t = need_tokenizer(c);
    const json_t *list = api_member(body, "tokens");
    if (!t)
        return false;
    if (!json_is_array(list))
        return api_invalid(&c->err, "tokens", "tokens must be an array of token ids");
    struct token_list *ids = call_add_prompt(c);
    if (!api_tokens(list, "tokens", tokenizer_n_vocab(t), ids, &c->err))
        return false;
    struct buf text = {0};
    size_t bytes = 0, len;
    for (size_t i = 0; i < ids->n; i++) {
        tokenizer_piece(t, ids->ids[i], &len);
        bytes += len;
    }
    if (!reply_fits(c, bytes * 4))
        return false;
    tokenizer_decode(t, ids->ids, ids->n, true, &text);
    buf_adds(&c->reply, "{\"content\":");
    jsonout_string(&c->reply, text.p ? text.p : "", text.len);
    buf_adds(&c->reply, ",\"prompt\":");
    jsonout_string(&c->reply, text.p ? text.p : "", text.len);
    buf_addc(&c->reply, '}');
    buf_clear(&text);
    return true;
}

void call_prepare(struct call *c)
{
    if (c->embed) { /* it comes back with its vectors */
        embed_write(c);
        return;
    }
    c->budget = budget_for(c->n_body, &c->cancelled);
    json_t *body = api_parse(c->body, c->n_body, &c->err);
    mem_free(c->body);
    c->body = NULL;
    if (!body)
        return;
    bool ok = false;
    if (c->kind <= CALL_OLLAMA_GENERATE && !adapters_choose(c, body)) {
        json_decref(body);
        return;
    }
    switch (c->kind) {
    case CALL_COMPLETIONS:
        ok = prepare_completions(c, body);
        break;
    case CALL_TOKENIZE:
        ok = prepare_tokenize(c, body);
        break;
    case CALL_DETOKENIZE:
        ok = prepare_detokenize(c, body);
        break;
    case CALL_TEMPLATE:
        ok = prepare_template(c, body);
        break;
    case CALL_COUNT_TOKENS:
        ok = prepare_count(c, body);
        break;
    case CALL_CHAT:
    case CALL_MESSAGES:
        ok = prepare_chat(c, body);
        break;
    case CALL_RESPONSES:
        ok = prepare_responses(c, body);
        break;
    case CALL_OLLAMA_CHAT:
    case CALL_OLLAMA_GENERATE:
        ok = prepare_ollama(c, body);
        break;
    case CALL_EMBEDDINGS:
    case CALL_OLLAMA_EMBED:
    case CALL_OLLAMA_EMBEDDINGS:
        ok = prepare_embeddings(c, body);
        break;
    case CALL_RERANK:
        ok = prepare_rerank(c, body);
        break;
    case CALL_LOAD_LORA:
        ok = prepare_load_lora(c, body);
        break;
    case CALL_UNLOAD_LORA:
        ok = prepare_unload_lora(c, body);
        break;
    case CALL_OLLAMA_SHOW:
        ollama_show(c);
        ok = true;
        break;
    }
    CHECK(ok == (c->err.status == 0), "a call failed without a reason");
    json_decref(body);
}
