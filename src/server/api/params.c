/* Reads and checks generation parameters. Pure: no engine, no I/O. Fuzzed. */
#include "server/api/params.h"
#include "base/buf.h"
#include "base/json_guard.h"
#include "base/json_long.h"
#include "base/mem.h"
#include "text/chat/chat.h"

#include <ctype.h>
#include <limits.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Fields that may contain a NUL. Elsewhere it would truncate a name. */
static bool may_hold_nul(const char *key)
{
    static const char *const names[] = {
        "content",           "text",  "prompt", "thinking",    "reasoning", "arguments", "system",
        "reasoning_content", "input", "output", "instructions"};
    for (size_t i = 0; key && i < sizeof names / sizeof *names; i++)
        if (!strcmp(key, names[i]))
            return true;
    return false;
}

/* Refuses a NUL outside those fields. key: the member that v is in; path: of v, restored on return. */
static bool check_nul(const json_t *v, const char *key, struct buf *path, struct api_error *err)
{
    size_t mark = path->len, i;
    const char *name;
    json_t *item;
    bool ok = true;
    if (json_is_string(v) && !may_hold_nul(key) &&
        memchr(json_string_value(v), 0, json_string_length(v)))
        return api_invalid(err, path->p, "%s: the character NUL (\\u0000) is not allowed here",
                           path->p);
    json_array_foreach((json_t *)v, i, item)
    {
        buf_addf(path, "[%zu]", i);
        ok = ok && check_nul(item, key, path, err);
        path->len = mark;
    }
    json_object_foreach((json_t *)v, name, item)
    {
        buf_addf(path, mark ? ".%.60s" : "%.60s", name);
        ok = ok && check_nul(item, name, path, err);
        path->len = mark;
    }
    return ok;
}

/* Four hexadecimal digits after "\\u", or -1. */
static int escape_at(const char *body, size_t n, size_t at)
{
    int v = 0;
    if (at + 6 > n || body[at] != '\\' || body[at + 1] != 'u')
        return -1;
    for (size_t i = at + 2; i < at + 6; i++) {
        if (!isxdigit((unsigned char)body[i]))
            return -1;
        v = v * 16 +
            (isdigit((unsigned char)body[i]) ? body[i] - '0' : (body[i] | 0x20) - 'a' + 10);
    }
    return v;
}

/* Half of a surrogate pair, as a client writes that cuts texts inside an emoji, becomes U+FFFD. Returns a copy
 * (mem_free), or NULL if there is none. */
static char *without_lone_surrogates(const char *body, size_t n)
{
    char *copy = NULL;
    for (size_t i = 0; i + 1 < n;) {
        const char *next = memchr(body + i, '\\', n - i);
        if (!next)
            break;
        i = (size_t)(next - body);
        int v = escape_at(body, n, i);
        if (v < 0xd800 || v > 0xdfff) {
            i += v < 0 ? 2 : 6;
            continue;
        }
        int low = v < 0xdc00 ? escape_at(body, n, i + 6) : -1;
        if (low >= 0xdc00 && low <= 0xdfff) {
            i += 12;
            continue;
        }
        if (!copy) {
            copy = mem_alloc(n);
            memcpy(copy, body, n);
        }
        memcpy(copy + i, "\\ufffd", 6);
        i += 6;
    }
    return copy;
}

json_t *api_parse(const char *body, size_t n, struct api_error *err)
{
    json_error_t e;
    struct error why = {0};
    if (n >= 3 && !memcmp(body, "\xef\xbb\xbf", 3)) { /* a BOM, as Windows editors write it */
        body += 3;
        n -= 3;
    }
    if (!n) {
        api_invalid(err, NULL, "the body is empty: it must be a JSON object");
        return NULL;
    }
    if (!json_guard(body, n, &json_limits_request, NULL, &why)) {
        api_fail(err, 413, "invalid_request_error", "the body has %s", why.msg);
        return NULL;
    }
    char *mended = without_lone_surrogates(body, n);
    json_t *v = json_load_long(mended ? mended : body, n, JSON_ALLOW_NUL, &e);
    mem_free(mended);
    if (!v) {
        if (json_error_code(&e) == json_error_null_byte_in_key)
            snprintf(e.text, sizeof e.text, "a name holds the character NUL (\\u0000)");
        bool large = json_error_code(&e) == json_error_numeric_overflow;
        api_invalid(err, NULL, "the body %s: line %d, column %d: %s",
                    large ? "has a number that is too large" : "is not valid JSON", e.line,
                    e.column, e.text);
        return NULL;
    }
    struct buf path = {0};
    buf_adds(&path, "");
    bool ok = json_is_object(v) || api_invalid(err, NULL, "the body must be a JSON object");
    if (ok && n && memmem(body, n, "\\u0000", 6))
        ok = check_nul(v, NULL, &path, err);
    buf_clear(&path);
    if (!ok) {
        json_decref(v);
        return NULL;
    }
    return v;
}

const json_t *api_member(const json_t *o, const char *name)
{
    const json_t *v = json_object_get(o, name);
    return json_is_null(v) ? NULL : v;
}

static const char *kind(const json_t *v)
{
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number";
    case JSON_NULL:
        return "null";
    default:
        return "a boolean";
    }
}

bool api_bool(const json_t *o, const char *name, bool *out, struct api_error *err)
{
    const json_t *v = api_member(o, name);
    if (v && !json_is_boolean(v))
        return api_invalid(err, name, "%s must be a boolean, not %s", name, kind(v));
    if (v)
        *out = json_is_true(v);
    return true;
}

bool api_int(const json_t *o, const char *name, int lo, int hi, int *out, struct api_error *err)
{
    const json_t *v = api_member(o, name);
    if (!v)
        return true;
    double d = json_number_value(v);
    if (!json_is_number(v) || d != floor(d)) /* 5.0 is an integer to JavaScript */
        return api_invalid(err, name, "%s must be an integer, not %s", name, kind(v));
    if (!(d >= lo && d <= hi))
        return hi == INT_MAX && d < lo
                   ? api_invalid(err, name, "%s must be at least %d", name, lo)
                   : api_invalid(err, name, "%s must be from %d to %d", name, lo, hi);
    *out = (int)d;
    return true;
}

bool api_float(const json_t *o, const char *name, double lo, double hi, float *out,
               struct api_error *err)
{
    const json_t *v = api_member(o, name);
    if (!v)
        return true;
    if (!json_is_number(v))
        return api_invalid(err, name, "%s must be a number, not %s", name, kind(v));
    double d = json_number_value(v);
    if (!(d >= lo && d <= hi))
        return api_invalid(err, name, "%s must be from %.15g to %.15g", name, lo, hi);
    *out = (float)d;
    return true;
}

bool api_string(const json_t *o, const char *name, const char **out, struct api_error *err)
{
    const json_t *v = api_member(o, name);
    if (v && !json_is_string(v))
        return api_invalid(err, name, "%s must be a string, not %s", name, kind(v));
    if (v)
        *out = json_string_value(v);
    return true;
}

bool api_effort(const json_t *o, const char *name, const char *where, const char **out,
                struct api_error *err)
{
    const json_t *v = api_member(o, name);
    const char *word = json_string_value(v);
    if (v && (!word || !chat_effort_known(word)))
        return api_invalid(err, where, "%s must be %s", where, chat_efforts);
    if (v)
        *out = word;
    return true;
}

bool api_tokens(const json_t *list, const char *param, int n_vocab, struct token_list *out,
                struct api_error *err)
{
    size_t i;
    const json_t *v;
    json_array_foreach((json_t *)list, i, v)
    {
        json_int_t id = json_integer_value(v);
        if (!json_is_integer(v))
            return api_invalid(err, param, "%s[%zu] must be a token id, not %s", param, i, kind(v));
        if (id < 0 || id >= n_vocab)
            return api_invalid(err, param, "%s[%zu] is %lld; token ids go from 0 to %d", param, i,
                               (long long)id, n_vocab - 1);
        token_list_add(out, (int32_t)id);
    }
    return true;
}

static void text_list_clear(struct text_list *l)
{
    for (int i = 0; i < l->n; i++)
        mem_free(l->v[i]);
    mem_free(l->v);
}

void gen_params_clear(struct gen_params *p)
{
    for (int i = 0; i < p->n_stop; i++)
        mem_free(p->stop[i]);
    mem_free(p->stop);
    mem_free((void *)p->sample.bias);
    mem_free(p->salt);
    text_list_clear(&p->bad_words);
    text_list_clear(&p->breakers);
    token_list_clear(&p->stop_tokens);
    token_list_clear(&p->allowed);
    mem_free((void *)p->sample.dry_breakers);
    *p = (struct gen_params){0};
}

static bool add_stop(struct gen_params *p, const json_t *v, const char *name, struct api_error *err)
{
    if (!json_is_string(v))
        return api_invalid(err, name, "%s must be a string or an array of strings", name);
    size_t n = json_string_length(v);
    if (n == 0)
        return api_invalid(err, name, "%s: a stop string must not be empty", name);
    if (n > 1024 || memchr(json_string_value(v), 0, n))
        return api_invalid(err, name, "%s: at most 1024 bytes, and no NUL", name);
    p->stop = mem_realloc(p->stop, (size_t)p->n_stop + 1, sizeof *p->stop);
    p->stop[p->n_stop++] = mem_strndup(json_string_value(v), n);
    return true;
}

static bool read_stop(const json_t *body, const char *name, struct gen_params *p,
                      struct api_error *err)
{
    const json_t *v = api_member(body, name), *item;
    size_t i;
    if (!v)
        return true;
    if (!json_is_array(v))
        return add_stop(p, v, name, err);
    if (json_array_size(v) > 16)
        return api_invalid(err, name, "%s: at most 16 strings", name);
    json_array_foreach((json_t *)v, i, item)
    {
        if (!add_stop(p, item, name, err))
            return false;
    }
    return true;
}

static bool bans_all(const struct logit_bias *list, size_t n, int n_vocab)
{
    bool *banned = mem_zalloc((size_t)n_vocab, sizeof *banned);
    int n_banned = 0;
    for (size_t i = 0; i < n; i++)
        if (list[i].bias == -INFINITY && !banned[list[i].token]) {
            banned[list[i].token] = true;
            n_banned++;
        }
    mem_free(banned);
    return n_banned == n_vocab;
}

/* {"id": bias, ...} in OpenAI's format, or [[id, bias or false], ...] in llama.cpp's. */
static bool read_bias(const json_t *body, int n_vocab, struct gen_params *p, struct api_error *err)
{
    static const char name[] = "logit_bias";
    const json_t *v = api_member(body, name);
    if (!v)
        return true;
    bool object = json_is_object(v);
    if (!object && !json_is_array(v))
        return api_invalid(err, name, "%s must be an object, not %s", name, kind(v));
    size_t n = object ? json_object_size(v) : json_array_size(v);
    if (n > 4096)
        return api_invalid(err, name, "%s: at most 4096 entries", name);
    struct logit_bias *list = mem_zalloc(n, sizeof *list);
    p->sample.bias = list;
    void *it = object ? json_object_iter((json_t *)v) : NULL;
    for (size_t i = 0; i < n; i++) {
        long long id = -1;
        const json_t *b;
        if (object) {
            char *end;
            const char *key = json_object_iter_key(it);
            id = *key >= '0' && *key <= '9' ? strtoll(key, &end, 10) : -1;
            if (id >= 0 && *end)
                id = -1;
            b = json_object_iter_value(it);
            it = json_object_iter_next((json_t *)v, it);
        } else {
            const json_t *pair = json_array_get(v, i);
            const json_t *first = json_array_get(pair, 0);
            id = json_is_integer(first) ? json_integer_value(first) : -1;
            b = json_array_get(pair, 1);
        }
        if (id < 0 || id >= n_vocab)
            return api_invalid(err, name, "%s: entry %zu is not a token id (0 to %d)", name, i,
                               n_vocab - 1);
        double value = json_number_value(b);
        if (json_is_false(b))
            value = -INFINITY;
        else if (!json_is_number(b) || !(value >= -100 && value <= 100))
            return api_invalid(err, name, "%s: the bias of token %lld must be from -100 to 100",
                               name, id);
        else if (value == -100) /* OpenAI: "should result in a ban" */
            value = -INFINITY;
        list[p->sample.n_bias++] = (struct logit_bias){(int32_t)id, (float)value};
    }
    if (n >= (size_t)n_vocab && bans_all(list, n, n_vocab))
        return api_invalid(err, name, "%s bans every token", name);
    return true;
}

static bool read_seed(const json_t *body, struct gen_params *p, struct api_error *err)
{
    const json_t *v = api_member(body, "seed");
    if (!v)
        return true;
    double d = json_number_value(v);
    if (!json_is_number(v) || d != floor(d) || fabs(d) > 0x1p63)
        return api_invalid(err, "seed", "seed must be an integer, not %s", kind(v));
    if (json_is_integer(v))
        p->sample.seed = (uint64_t)json_integer_value(v);
    else
        p->sample.seed = d < 0 ? (uint64_t)(int64_t)d : (uint64_t)d;
    p->has_seed = !(json_is_integer(v) && json_integer_value(v) == -1); /* llama.cpp: random */
    return true;
}

/* A list of texts, none of them empty. */
static bool read_texts(const json_t *body, const char *name, int most, struct text_list *out,
                       bool *found, struct api_error *err)
{
    enum { TEXT_MOST = 256 };
    const json_t *v = api_member(body, name), *item;
    size_t i;
    if (!v)
        return true;
    if (!json_is_array(v))
        return api_invalid(err, name, "%s must be an array of strings, not %s", name, kind(v));
    if (json_array_size(v) > (size_t)most)
        return api_invalid(err, name, "%s: at most %d strings", name, most);
    out->v = mem_zalloc(json_array_size(v), sizeof *out->v);
    json_array_foreach((json_t *)v, i, item)
    {
        size_t n = json_string_length(item);
        if (!json_is_string(item) || !n || n > TEXT_MOST || memchr(json_string_value(item), 0, n))
            return api_invalid(err, name, "%s[%zu] must be a string of 1 to %d bytes", name, i,
                               TEXT_MOST);
        out->v[out->n++] = mem_strndup(json_string_value(item), n);
    }
    *found = true;
    return true;
}

/* A list of token ids. */
static bool read_ids(const json_t *body, const char *name, int most, int n_vocab,
                     struct token_list *out, bool *found, struct api_error *err)
{
    const json_t *v = api_member(body, name);
    if (!v)
        return true;
    if (!json_is_array(v))
        return api_invalid(err, name, "%s must be an array of token ids, not %s", name, kind(v));
    if (most && json_array_size(v) > (size_t)most)
        return api_invalid(err, name, "%s: at most %d token ids", name, most);
    *found = true;
    return api_tokens(v, name, n_vocab, out, err);
}

/* Stages of sampling: a list of names, or a text as sample_order_parse reads it. */
static bool read_order(const json_t *body, uint64_t *order, struct api_error *err)
{
    static const char name[] = "samplers";
    const json_t *v = api_member(body, name), *item;
    struct error why = {0};
    size_t i;
    if (!v)
        return true;
    if (json_is_string(v))
        return sample_order_parse(json_string_value(v), order, &why) ||
               api_invalid(err, name, "%s", why.msg);
    if (!json_is_array(v))
        return api_invalid(err, name, "%s must be an array of names, not %s", name, kind(v));
    if (!json_array_size(v)) /* as editors send it to fill the cache */
        return true;
    *order = 0;
    json_array_foreach((json_t *)v, i, item)
    {
        int stage = json_is_string(item) ? sample_stage_named(json_string_value(item)) : 0;
        if (!stage || !sample_order_add(order, (int)i, stage))
            return api_invalid(err, name, "%s[%zu] is %s", name, i,
                               stage ? "there twice" : "not the name of a stage");
    }
    return true;
}

/* The stages of sample/sample_chain.h. */
static bool read_stages(const json_t *body, struct gen_params *p, struct api_error *err)
{
    enum { BREAKERS_MOST = 64 };
    struct sample_params *s = &p->sample;
    return api_float(body, "typical_p", 0, 1, &s->typical_p, err) &&
           api_float(body, "top_n_sigma", -1, 100, &s->top_n_sigma, err) &&
           api_float(body, "xtc_probability", 0, 1, &s->xtc_probability, err) &&
           api_float(body, "xtc_threshold", 0, 1, &s->xtc_threshold, err) &&
           api_float(body, "dynatemp_range", 0, 100, &s->dynatemp_range, err) &&
           api_float(body, "dynatemp_exponent", 0, 100, &s->dynatemp_exponent, err) &&
           api_int(body, "mirostat", 0, 2, &s->mirostat, err) &&
           api_float(body, "mirostat_tau", 0, 100, &s->mirostat_tau, err) &&
           api_float(body, "mirostat_eta", 0, 1, &s->mirostat_eta, err) &&
           api_float(body, "dry_multiplier", 0, 100, &s->dry_multiplier, err) &&
           api_float(body, "dry_base", 1, 100, &s->dry_base, err) &&
           api_int(body, "dry_allowed_length", 1, 1 << 20, &s->dry_allowed_length, err) &&
           api_int(body, "dry_penalty_last_n", -1, 1 << 20, &s->dry_last_n, err) &&
           read_texts(body, "dry_sequence_breakers", BREAKERS_MOST, &p->breakers, &p->has_breakers,
                      err) &&
           read_order(body, &s->order, err);
}

/* Fields about tokens: what may not, must or may end a text. */
static bool read_token_fields(const json_t *body, int n_vocab, struct gen_params *p,
                              struct api_error *err)
{
    enum { WORDS_MOST = 256, STOPS_MOST = 64 };
    bool found = false;
    if (!read_texts(body, "bad_words", WORDS_MOST, &p->bad_words, &found, err) ||
        !read_ids(body, "stop_token_ids", STOPS_MOST, n_vocab, &p->stop_tokens, &found, err) ||
        !read_ids(body, "allowed_token_ids", 0, n_vocab, &p->allowed, &p->has_allowed, err) ||
        !api_bool(body, "include_stop_str_in_output", &p->include_stop, err) ||
        !api_int(body, "truncate_prompt_tokens", -1, INT_MAX, &p->truncate_prompt, err))
        return false;
    if (p->has_allowed && !p->allowed.n)
        return api_invalid(err, "allowed_token_ids", "allowed_token_ids is empty");
    if (api_member(body, "truncate_prompt_tokens") && !p->truncate_prompt)
        return api_invalid(err, "truncate_prompt_tokens",
                           "truncate_prompt_tokens must be at least 1, or -1 for the context");
    return true;
}

static bool read_sampling(const json_t *body, struct gen_params *p, struct api_error *err)
{
    struct sample_params *s = &p->sample;
    bool ok = api_float(body, "temperature", 0, 100, &s->temp, err) &&
              api_float(body, "top_p", 0, 1, &s->top_p, err) &&
              api_int(body, "top_k", -1, INT_MAX, &s->top_k, err) &&
              api_float(body, "min_p", 0, 1, &s->min_p, err) &&
              api_float(body, "presence_penalty", -100, 100, &s->presence_penalty, err) &&
              api_float(body, "frequency_penalty", -100, 100, &s->frequency_penalty, err) &&
              api_float(body, "repeat_penalty", 0.01, 100, &s->repeat_penalty, err) &&
              api_float(body, "repetition_penalty", 0.01, 100, &s->repeat_penalty, err) &&
              api_int(body, "repeat_last_n", -1, 1 << 20, &s->repeat_last_n, err);
    s->top_k = s->top_k < 0 ? 0 : s->top_k;
    return ok && read_stages(body, p, err);
}

static bool read_logprobs(const json_t *body, enum params_api api, struct gen_params *p,
                          struct api_error *err)
{
    const json_t *v = api_member(body, "logprobs");
    if (api == PARAMS_COMPLETIONS && !json_is_boolean(v)) {
        p->n_top = -1;
        if (!api_int(body, "logprobs", 0, ENGINE_MAX_LOGPROBS, &p->n_top, err))
            return false;
        p->logprobs = p->n_top >= 0;
        p->n_top = p->n_top < 0 ? 0 : p->n_top;
        return true;
    }
    if (!api_bool(body, "logprobs", &p->logprobs, err) ||
        !api_int(body, "top_logprobs", 0, ENGINE_MAX_LOGPROBS, &p->n_top, err))
        return false;
    if (p->n_top && !p->logprobs)
        return api_invalid(err, "top_logprobs", "top_logprobs needs logprobs to be true");
    return true;
}

static bool read_stream(const json_t *body, struct gen_params *p, struct api_error *err)
{
    if (!api_bool(body, "stream", &p->stream, err))
        return false;
    const json_t *o = api_member(body, "stream_options");
    if (!o)
        return true;
    if (!json_is_object(o))
        return api_invalid(err, "stream_options", "stream_options must be an object, not %s",
                           kind(o));
    return api_bool(o, "include_usage", &p->include_usage, err);
}

/* -1 is no limit in llama.cpp. */
static bool read_max(const json_t *body, const char *name, int least, struct gen_params *p,
                     struct api_error *err)
{
    const json_t *v = api_member(body, name);
    if (!v || (json_is_integer(v) && json_integer_value(v) == -1))
        return true;
    p->no_answer = false;
    if (!api_int(body, name, least, INT_MAX, &p->max_tokens, err))
        return false;
    p->no_answer = p->max_tokens == 0;
    return true;
}

/* llama.cpp's name for the limit, also in chats. Editors send 0 to fill the cache: one token. */
static bool read_n_predict(const json_t *body, struct gen_params *p, struct api_error *err)
{
    int n = -1;
    if (!api_int(body, "n_predict", -1, INT_MAX, &n, err))
        return false;
    if (n >= 0 && !p->max_tokens)
        p->max_tokens = n ? n : 1;
    return true;
}

bool gen_params_read(const json_t *body, enum params_api api, const struct sample_params *defaults,
                     int n_vocab, struct gen_params *p, struct api_error *err)
{
    *p = (struct gen_params){.n = 1, .sample = *defaults};
    p->sample.bias = NULL;
    p->sample.n_bias = 0;
    int least = api == PARAMS_COMPLETIONS ? 0 : 1;
    if (!read_sampling(body, p, err) || !read_stream(body, p, err) ||
        !read_max(body, "max_tokens", least, p, err) ||
        !api_bool(body, "ignore_eos", &p->ignore_eos, err))
        return false;
    const char *salt = NULL, *stop = api == PARAMS_MESSAGES ? "stop_sequences" : "stop";
    bool cache = true;
    if (!read_seed(body, p, err) || !read_max(body, "max_completion_tokens", least, p, err) ||
        !api_int(body, "min_tokens", 0, INT_MAX, &p->min_tokens, err) ||
        !api_int(body, "n", 1, api == PARAMS_MESSAGES ? 1 : ENGINE_MAX_CHOICES, &p->n, err) ||
        !api_bool(body, "cache_prompt", &cache, err) ||
        !api_string(body, "cache_salt", &salt, err) || !read_stop(body, stop, p, err) ||
        !read_bias(body, n_vocab, p, err) || !read_token_fields(body, n_vocab, p, err))
        return false;
    if (api != PARAMS_MESSAGES && !read_logprobs(body, api, p, err))
        return false;
    if (api == PARAMS_CHAT && !read_n_predict(body, p, err))
        return false;
    p->no_cache = !cache;
    p->salt = salt ? mem_strdup(salt) : NULL;
    if (api == PARAMS_COMPLETIONS) {
        int best_of = p->n;
        const char *suffix = "";
        if (!api_bool(body, "echo", &p->echo, err) ||
            !api_int(body, "best_of", 1, ENGINE_MAX_CHOICES, &best_of, err) ||
            !api_string(body, "suffix", &suffix, err))
            return false;
        if (best_of != p->n)
            return api_invalid(err, "best_of", "best_of other than n is not supported");
    }
    return true;
}
