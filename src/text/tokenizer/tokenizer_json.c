/*
 * Loads a Hugging Face tokenizer.json into the pipeline, together with the BOS and EOS settings of
 * tokenizer_config.json, generation_config.json and config.json. Owns the field names; every error
 * names the field at fault. Unknown components are refused, never guessed.
 */
#include "base/base64.h"
#include "base/json_guard.h"
#include "base/mem.h"
#include "text/tokenizer/tokenizer_impl.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>

enum { MAX_DEPTH = 16, MAX_STEPS = 256 };

struct json_loader {
    struct tokenizer *t;
    struct error *err;
    bool fused;            /* a Fuse was read: later decoder steps see the whole text */
    bool spell;            /* the model gets words spelled in GPT-2's alphabet, not bytes */
    struct raw_token *raw; /* (n_raw) */
    size_t n_raw;
};

/* ------------------------------------------------------------------------------- reading fields */

static const char *get_string(const json_t *o, const char *key)
{
    return json_string_value(json_object_get(o, key));
}

static bool get_bool(const json_t *o, const char *key, bool absent)
{
    const json_t *v = json_object_get(o, key);
    return json_is_boolean(v) ? json_is_true(v) : absent;
}

/* The "type" of a component, or NULL with an error. */
static const char *type_of(struct json_loader *l, const json_t *o, const char *where)
{
    const char *type = get_string(o, "type");
    if (!type)
        error_set(l->err, "%s: no \"type\"", where);
    return type;
}

/* Reads a pattern {"String": s} or {"Regex": s} at o[key]. */
static const char *get_pattern(const json_t *o, const char *key, size_t *len, bool *literal)
{
    const json_t *p = json_object_get(o, key);
    const json_t *s = json_object_get(p, "String"), *r = json_object_get(p, "Regex");
    const json_t *v = json_is_string(r) ? r : s;
    *literal = v != r;
    *len = json_string_length(v);
    return json_string_value(v);
}

/* Calls f on each element of the list o[key]. */
static bool for_each(struct json_loader *l, const json_t *o, const char *key, const char *where,
                     int depth, bool (*f)(struct json_loader *, const json_t *, const char *, int))
{
    const json_t *list = json_object_get(o, key);
    if (!json_is_array(list))
        return error_set(l->err, "%s.%s: not a list", where, key);
    if (depth >= MAX_DEPTH)
        return error_set(l->err, "%s: nested too deeply", where);
    for (size_t i = 0; i < json_array_size(list); i++) {
        char name[200];
        snprintf(name, sizeof name, "%.150s.%s[%zu]", where, key, i);
        if (!f(l, json_array_get(list, i), name, depth + 1))
            return false;
    }
    return true;
}

/* ----------------------------------------------------------------------------------- normalizer */

static bool add_replace(struct json_loader *l, const char *pattern, size_t n, bool literal,
                        const char *with, size_t n_with, const char *where)
{
    struct norm_step *s = normalizer_add(&l->t->normalizer, NORM_REPLACE);
    buf_add(&s->text, pattern, n);
    buf_add(&s->with, with, n_with);
    if (!literal && !(s->re = regex_new(pattern, n, false, l->err)))
        return error_prefix(l->err, "%s", where);
    return true;
}

static bool load_charsmap(struct json_loader *l, const json_t *o, const char *where)
{
    const json_t *v = json_object_get(o, "precompiled_charsmap");
    if (!json_is_string(v))
        return error_set(l->err, "%s.precompiled_charsmap: not a string", where);
    struct buf data = {0};
    bool ok = base64_decode(json_string_value(v), json_string_length(v), &data);
    if (!ok)
        error_set(l->err, "precompiled_charsmap: not base64");
    else if (data.len) /* an empty charsmap changes nothing */
        ok = charsmap_load(normalizer_add(&l->t->normalizer, NORM_CHARSMAP), (uint8_t *)data.p,
                           data.len, l->err);
    buf_clear(&data);
    return ok || error_prefix(l->err, "%s", where);
}

static bool load_normalizer(struct json_loader *l, const json_t *o, const char *where, int depth)
{
    struct normalizer *nz = &l->t->normalizer;
    const char *type = type_of(l, o, where);
    if (!type)
        return false;
    if (nz->n >= MAX_STEPS)
        return error_set(l->err, "%s: more than %d steps", where, MAX_STEPS);
    static const struct {
        const char *name;
        enum normal_form form;
    } forms[] = {
        {"NFC", NORMAL_NFC}, {"NFD", NORMAL_NFD}, {"NFKC", NORMAL_NFKC}, {"NFKD", NORMAL_NFKD}};
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (!strcmp(type, forms[i].name)) {
            normalizer_add(nz, NORM_FORM)->form = forms[i].form;
            return true;
        }
    if (!strcmp(type, "Sequence"))
        return for_each(l, o, "normalizers", where, depth, load_normalizer);
    if (!strcmp(type, "Lowercase")) {
        normalizer_add(nz, NORM_LOWER);
    } else if (!strcmp(type, "StripAccents")) {
        normalizer_add(nz, NORM_STRIP_ACCENTS);
    } else if (!strcmp(type, "ByteLevel")) {
        normalizer_add(nz, NORM_BYTELEVEL);
    } else if (!strcmp(type, "Strip")) {
        struct norm_step *s = normalizer_add(nz, NORM_STRIP);
        s->left = get_bool(o, "strip_left", true);
        s->right = get_bool(o, "strip_right", true);
    } else if (!strcmp(type, "Prepend")) {
        const json_t *v = json_object_get(o, "prepend");
        if (!json_is_string(v))
            return error_set(l->err, "%s.prepend: not a string", where);
        struct norm_step *s = normalizer_add(nz, NORM_PREPEND);
        buf_add(&s->text, json_string_value(v), json_string_length(v));
    } else if (!strcmp(type, "Replace")) {
        size_t n;
        bool literal;
        const char *pattern = get_pattern(o, "pattern", &n, &literal);
        const json_t *with = json_object_get(o, "content");
        if (!pattern || !json_is_string(with))
            return error_set(l->err, "%s: a Replace without pattern or content", where);
        return add_replace(l, pattern, n, literal, json_string_value(with),
                           json_string_length(with), where);
    } else if (!strcmp(type, "Nmt")) {
        static const char drop[] = "[\\x{1}-\\x{8}\\x{b}\\x{e}-\\x{1f}\\x{7f}\\x{8f}\\x{9f}]";
        static const char space[] = "[\\t\\n\\f\\r\\x{1680}\\x{200b}-\\x{200f}\\x{2028}\\x{2029}"
                                    "\\x{2581}\\x{feff}\\x{fffd}]";
        return add_replace(l, drop, strlen(drop), false, "", 0, where) &&
               add_replace(l, space, strlen(space), false, " ", 1, where);
    } else if (!strcmp(type, "BertNormalizer")) {
        struct norm_step *s = normalizer_add(nz, NORM_BERT);
        s->clean = get_bool(o, "clean_text", true);
        s->chinese = get_bool(o, "handle_chinese_chars", true);
        s->lower = get_bool(o, "lowercase", true);
        s->accents = get_bool(o, "strip_accents", s->lower); /* null: same as lowercase */
    } else if (!strcmp(type, "Precompiled")) {
        return load_charsmap(l, o, where);
    } else {
        return error_set(l->err, "%s: normalizer \"%.60s\" is not supported", where, type);
    }
    return true;
}

/* -------------------------------------------------------------------------------- pre-tokenizer */

static bool get_behavior(const json_t *o, enum cut_behavior absent, enum cut_behavior *out)
{
    static const char *const names[] = {
        [CUT_REMOVED] = "Removed",
        [CUT_ISOLATED] = "Isolated",
        [CUT_MERGED_WITH_PREVIOUS] = "MergedWithPrevious",
        [CUT_MERGED_WITH_NEXT] = "MergedWithNext",
        [CUT_CONTIGUOUS] = "Contiguous",
    };
    const char *s = get_string(o, "behavior");
    *out = absent;
    for (int i = 0; s && i < 5; i++)
        if (!strcmp(s, names[i])) {
            *out = (enum cut_behavior)i;
            return true;
        }
    return !s;
}

static struct pre_step *add_chars(struct json_loader *l, uint32_t set, enum cut_behavior behavior)
{
    struct pre_step *s = pretokenizer_add(&l->t->pretokenizer, PRE_CHARS);
    s->set = set;
    s->behavior = behavior;
    return s;
}

static struct pre_step *add_regex(struct json_loader *l, const char *pattern, size_t n,
                                  bool literal, const char *where)
{
    struct pre_step *s = pretokenizer_add(&l->t->pretokenizer, PRE_REGEX);
    if (!literal)
        s->split = split_find(pattern, n);
    if (!s->split && !(s->re = regex_new(pattern, n, literal, l->err))) {
        error_prefix(l->err, "%s", where);
        return NULL;
    }
    return s;
}

static bool load_metaspace(struct json_loader *l, const json_t *o, const char *where)
{
    const char *with = get_string(o, "replacement"), *scheme = get_string(o, "prepend_scheme");
    struct pre_step *s = pretokenizer_add(&l->t->pretokenizer, PRE_METASPACE);
    buf_adds(&s->text, with ? with : "\xe2\x96\x81");
    uint32_t cp;
    if ((size_t)utf8_decode(s->text.p, s->text.len, &cp) != s->text.len || !s->text.len)
        return error_set(l->err, "%s.replacement: not one character", where);
    if (!scheme)
        s->scheme = get_bool(o, "add_prefix_space", true) ? METASPACE_ALWAYS : METASPACE_NEVER;
    else if (!strcmp(scheme, "always"))
        s->scheme = METASPACE_ALWAYS;
    else if (!strcmp(scheme, "first"))
        s->scheme = METASPACE_FIRST;
    else if (!strcmp(scheme, "never"))
        s->scheme = METASPACE_NEVER;
    else
        return error_set(l->err, "%s.prepend_scheme: \"%.60s\" is not known", where, scheme);
    if (get_bool(o, "split", true))
        add_chars(l, 0, CUT_MERGED_WITH_NEXT)->cp = cp;
    return true;
}

static bool load_pretokenizer(struct json_loader *l, const json_t *o, const char *where, int depth)
{
    struct pretokenizer *pt = &l->t->pretokenizer;
    const char *type = type_of(l, o, where);
    enum cut_behavior behavior;
    if (!type)
        return false;
    if (pt->n >= MAX_STEPS)
        return error_set(l->err, "%s: more than %d steps", where, MAX_STEPS);
    if (!get_behavior(o, CUT_ISOLATED, &behavior))
        return error_set(l->err, "%s.behavior: \"%.60s\" is not known", where,
                         get_string(o, "behavior"));
    if (!strcmp(type, "Sequence"))
        return for_each(l, o, "pretokenizers", where, depth, load_pretokenizer);
    if (!strcmp(type, "ByteLevel")) {
        if (get_bool(o, "add_prefix_space", true))
            pretokenizer_add(pt, PRE_PREFIX);
        if (get_bool(o, "use_regex", true))
            pretokenizer_add(pt, PRE_REGEX)->split = SPLIT_GPT2;
        pretokenizer_add(pt, l->spell ? PRE_SPELL : PRE_BYTES);
    } else if (!strcmp(type, "Split")) {
        size_t n;
        bool literal;
        const char *pattern = get_pattern(o, "pattern", &n, &literal);
        if (!pattern)
            return error_set(l->err, "%s.pattern: neither a String nor a Regex", where);
        struct pre_step *s = add_regex(l, pattern, n, literal, where);
        if (!s)
            return false;
        s->behavior = behavior;
        s->invert = get_bool(o, "invert", false);
    } else if (!strcmp(type, "Digits")) {
        add_chars(l, UC_NUMBER,
                  get_bool(o, "individual_digits", false) ? CUT_ISOLATED : CUT_CONTIGUOUS);
    } else if (!strcmp(type, "Punctuation")) {
        add_chars(l, UC_PUNCT, behavior)->ascii_punct = true;
    } else if (!strcmp(type, "WhitespaceSplit")) {
        add_chars(l, UC_SPACE, CUT_REMOVED);
    } else if (!strcmp(type, "Whitespace")) {
        static const char pattern[] = "\\w+|[^\\w\\s]+";
        struct pre_step *s = add_regex(l, pattern, strlen(pattern), false, where);
        if (!s)
            return false;
        s->behavior = CUT_REMOVED;
        s->invert = true;
    } else if (!strcmp(type, "BertPreTokenizer")) {
        add_chars(l, UC_SPACE, CUT_REMOVED);
        add_chars(l, UC_PUNCT, CUT_ISOLATED)->ascii_punct = true;
    } else if (!strcmp(type, "CharDelimiterSplit")) {
        const char *d = get_string(o, "delimiter");
        uint32_t cp;
        if (!d || !*d || (size_t)utf8_decode(d, strlen(d), &cp) != strlen(d))
            return error_set(l->err, "%s.delimiter: not one character", where);
        add_chars(l, 0, CUT_REMOVED)->cp = cp;
    } else if (!strcmp(type, "Metaspace")) {
        return load_metaspace(l, o, where);
    } else {
        return error_set(l->err, "%s: pre_tokenizer \"%.60s\" is not supported", where, type);
    }
    return true;
}

/* Whether o contains a component of this type at any depth. */
static bool find_type(const json_t *o, const char *list, const char *type, int depth)
{
    const char *is = get_string(o, "type");
    if (is && !strcmp(is, type))
        return true;
    const json_t *l = json_object_get(o, list);
    for (size_t i = 0; depth < MAX_DEPTH && i < json_array_size(l); i++)
        if (find_type(json_array_get(l, i), list, type, depth + 1))
            return true;
    return false;
}

/* -------------------------------------------------------------------------------------- decoder */

static bool load_decoder(struct json_loader *l, const json_t *o, const char *where, int depth)
{
    struct tokenizer *t = l->t;
    const char *type = type_of(l, o, where);
    if (!type)
        return false;
    if (t->n_decode >= MAX_STEPS)
        return error_set(l->err, "%s: more than %d steps", where, MAX_STEPS);
    if (!strcmp(type, "Sequence"))
        return for_each(l, o, "decoders", where, depth, load_decoder);
    if (!strcmp(type, "Fuse")) {
        l->fused = true;
        return true;
    }
    if (!strcmp(type, "Strip")) {
        const json_t *content = json_object_get(o, "content");
        json_int_t start = json_integer_value(json_object_get(o, "start"));
        json_int_t stop = json_integer_value(json_object_get(o, "stop"));
        if (!json_is_string(content) || !json_string_length(content) || start < 0 || stop < 0 ||
            start > 1000 || stop > 1000)
            return error_set(l->err, "%s: a Strip without content, start or stop", where);
        if (l->fused) {
            if (strcmp(json_string_value(content), " ") || stop)
                return error_set(l->err, "%s: after Fuse only spaces at the start may be stripped",
                                 where);
            t->strip_start = (int)start;
            return true;
        }
        struct decode_step *s = tokenizer_add_decode(t, DECODE_STRIP);
        buf_add(&s->text, json_string_value(content), json_string_length(content));
        s->n = (int)start;
        s->m = (int)stop;
        return true;
    }
    if (l->fused)
        return error_set(l->err, "%s: decoder \"%.60s\" after Fuse is not supported", where, type);
    if (!strcmp(type, "ByteLevel")) {
        tokenizer_add_decode(t, DECODE_BYTELEVEL);
    } else if (!strcmp(type, "ByteFallback")) {
        tokenizer_add_decode(t, DECODE_BYTES);
    } else if (!strcmp(type, "Replace")) {
        size_t n;
        bool literal;
        const char *pattern = get_pattern(o, "pattern", &n, &literal);
        const json_t *with = json_object_get(o, "content");
        if (!pattern || !literal || !json_is_string(with))
            return error_set(l->err, "%s: only a Replace of a String is supported", where);
        struct decode_step *s = tokenizer_add_decode(t, DECODE_REPLACE);
        buf_add(&s->text, pattern, n);
        buf_add(&s->with, json_string_value(with), json_string_length(with));
    } else if (!strcmp(type, "Metaspace")) {
        const char *with = get_string(o, "replacement"), *scheme = get_string(o, "prepend_scheme");
        struct decode_step *s = tokenizer_add_decode(t, DECODE_REPLACE);
        buf_adds(&s->text, with ? with : "\xe2\x96\x81");
        buf_adds(&s->with, " ");
        t->strip_start =
            scheme ? strcmp(scheme, "never") != 0 : get_bool(o, "add_prefix_space", true);
    } else if (!strcmp(type, "WordPiece")) {
        const char *prefix = get_string(o, "prefix");
        struct decode_step *s = tokenizer_add_decode(t, DECODE_WORDPIECE);
        buf_adds(&s->text, prefix ? prefix : "##");
        s->cleanup = get_bool(o, "cleanup", true);
        t->strip_start = 1;
    } else {
        return error_set(l->err, "%s: decoder \"%.60s\" is not supported", where, type);
    }
    return true;
}

/* The decoder of a file without one: the inverse of encoding. */
static void default_decoder(struct json_loader *l)
{
    struct tokenizer *t = l->t;
    const struct pretokenizer *pt = &t->pretokenizer;
    for (int i = 0; i < pt->n; i++) {
        if (pt->steps[i].kind == PRE_BYTES || pt->steps[i].kind == PRE_SPELL) {
            tokenizer_add_decode(t, DECODE_BYTELEVEL);
            return;
        }
        if (pt->steps[i].kind == PRE_METASPACE) {
            struct decode_step *s = tokenizer_add_decode(t, DECODE_REPLACE);
            buf_add(&s->text, pt->steps[i].text.p, pt->steps[i].text.len);
            buf_adds(&s->with, " ");
            t->strip_start = pt->steps[i].scheme != METASPACE_NEVER;
            return;
        }
    }
    if (t->model == MODEL_WORDPIECE) {
        struct decode_step *s = tokenizer_add_decode(t, DECODE_WORDPIECE);
        buf_add(&s->text, t->wordpiece.prefix.p, t->wordpiece.prefix.len);
        t->strip_start = 1;
    }
}

/* ----------------------------------------------------------------------------------- vocabulary */

/* Grows raw so that it has an entry for id. */
static bool raw_reserve(struct json_loader *l, json_int_t id, size_t limit, const char *where)
{
    if (id < 0 || (size_t)id >= limit)
        return error_set(l->err, "%s: id %lld is out of range for this file", where, (long long)id);
    if ((size_t)id < l->n_raw)
        return true;
    l->raw = mem_realloc(l->raw, (size_t)id + 1, sizeof *l->raw);
    for (size_t i = l->n_raw; i <= (size_t)id; i++)
        l->raw[i] = (struct raw_token){.kind = TOKEN_UNUSED};
    l->n_raw = (size_t)id + 1;
    return true;
}

static bool load_vocab_object(struct json_loader *l, const json_t *vocab, size_t limit)
{
    const char *key;
    json_t *value;
    json_int_t last = -1;
    json_object_foreach((json_t *)vocab, key, value)
    {
        if (!json_is_integer(value))
            return error_set(l->err, "model.vocab[\"%.60s\"]: not an integer", key);
        if (json_integer_value(value) > last)
            last = json_integer_value(value);
    }
    if (last >= 0 && !raw_reserve(l, last, limit, "model.vocab"))
        return false;
    json_object_foreach((json_t *)vocab, key, value)
    {
        json_int_t id = json_integer_value(value);
        if (id < 0 || !l->raw)
            return error_set(l->err, "model.vocab[\"%.60s\"]: id %lld", key, (long long)id);
        if (l->raw[id].text)
            return error_set(l->err, "model.vocab: \"%.60s\" and \"%.60s\" both have id %lld",
                             l->raw[id].text, key, (long long)id);
        l->raw[id] =
            (struct raw_token){.text = key, .len = (uint32_t)strlen(key), .kind = TOKEN_NORMAL};
    }
    return true;
}

static bool load_vocab_list(struct json_loader *l, const json_t *vocab, size_t limit)
{
    size_t n = json_array_size(vocab);
    if (n && !raw_reserve(l, (json_int_t)n - 1, limit, "model.vocab"))
        return false;
    for (size_t i = 0; l->raw && i < n; i++) {
        const json_t *e = json_array_get(vocab, i), *s = json_array_get(e, 0);
        const json_t *score = json_array_get(e, 1);
        if (!json_is_string(s) || !json_is_number(score))
            return error_set(l->err, "model.vocab[%zu]: not [string, number]", i);
        double v = json_number_value(score);
        if (!isfinite((float)v))
            return error_set(l->err, "model.vocab[%zu]: score %g", i, v);
        l->raw[i] = (struct raw_token){.text = json_string_value(s),
                                       .len = (uint32_t)json_string_length(s),
                                       .kind = TOKEN_NORMAL,
                                       .score = (float)v};
    }
    return true;
}

/* Places one entry of added_tokens in raw. Its flags are set later, once all ids are checked. */
static bool place_added(struct json_loader *l, json_int_t id, const json_t *e, size_t limit,
                        const char *where)
{
    const json_t *content = json_object_get(e, "content");
    if (!json_is_string(content))
        return error_set(l->err, "%s.content: not a string", where);
    if (!raw_reserve(l, id, limit, where))
        return false;
    struct raw_token *r = &l->raw[id];
    size_t n = json_string_length(content);
    bool special = get_bool(e, "special", false);
    if (r->text && !(r->flag & VOCAB_ADDED) &&
        (r->len != n || memcmp(r->text, json_string_value(content), n)))
        return error_set(l->err, "%s: id %lld is \"%.60s\" in model.vocab", where, (long long)id,
                         r->text);
    if (!r->text)
        *r = (struct raw_token){
            .text = json_string_value(content), .len = (uint32_t)n, .flag = VOCAB_ADDED};
    r->kind = special ? TOKEN_CONTROL : TOKEN_USER;
    return true;
}

static bool added_flags(struct json_loader *l, json_int_t id, const json_t *e)
{
    const json_t *content = json_object_get(e, "content");
    struct added_token a = {
        .id = (int32_t)id,
        .special = get_bool(e, "special", false),
        .lstrip = get_bool(e, "lstrip", false),
        .rstrip = get_bool(e, "rstrip", false),
        .single_word = get_bool(e, "single_word", false),
        .normalized = get_bool(e, "normalized", !get_bool(e, "special", false)),
    };
    return tokenizer_add_token(l->t, a, json_string_value(content), json_string_length(content),
                               l->err);
}

/* Visits added_tokens of tokenizer.json, then the entries that only tokenizer_config.json has. */
static bool walk_added(struct json_loader *l, const json_t *root, const json_t *config,
                       size_t limit, bool place)
{
    const json_t *list = json_object_get(root, "added_tokens");
    if (list && !json_is_array(list) && !json_is_null(list))
        return error_set(l->err, "added_tokens: not a list");
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *e = json_array_get(list, i), *id = json_object_get(e, "id");
        char where[40];
        snprintf(where, sizeof where, "added_tokens[%zu]", i);
        if (!json_is_integer(id))
            return error_set(l->err, "%s.id: not an integer", where);
        if (place ? !place_added(l, json_integer_value(id), e, limit, where)
                  : !added_flags(l, json_integer_value(id), e))
            return false;
    }
    const char *key;
    json_t *e;
    json_object_foreach(json_object_get(config, "added_tokens_decoder"), key, e)
    {
        char *end, where[80];
        long long id = strtoll(key, &end, 10);
        snprintf(where, sizeof where, "tokenizer_config.json: added_tokens_decoder[\"%.20s\"]",
                 key);
        if (end == key || *end)
            return error_set(l->err, "%s: not an id", where);
        const json_t *content = json_object_get(e, "content");
        bool known = id >= 0 && (size_t)id < l->n_raw && l->raw[id].text;
        bool same = known && json_is_string(content) &&
                    json_string_length(content) == l->raw[id].len &&
                    !memcmp(json_string_value(content), l->raw[id].text, l->raw[id].len);
        /* tokenizer.json wins for an id; for a spelling, the first entry wins */
        if (place && (!known || (same && l->raw[id].kind == TOKEN_NORMAL)) &&
            !place_added(l, id, e, limit, where))
            return false;
        if (!place && same && !added_flags(l, id, e))
            return false;
    }
    return true;
}

/* ---------------------------------------------------------------------------------------- models */

static int32_t find_token(struct json_loader *l, const json_t *name)
{
    if (json_is_object(name)) /* an AddedToken */
        name = json_object_get(name, "content");
    return json_is_string(name)
               ? tokenizer_find(l->t, json_string_value(name), json_string_length(name))
               : -1;
}

/* The vocabulary key of one side of a merge. */
static bool merge_key(struct json_loader *l, const char *p, size_t n, struct buf *b,
                      const char **key, size_t *len)
{
    *key = p;
    *len = n;
    if (!l->t->bpe.byte_level)
        return true;
    buf_reset(b);
    if (!bytelevel_decode(p, n, b))
        return error_set(l->err, "\"%.60s\" has characters outside the byte alphabet", p);
    *key = b->p;
    *len = b->len;
    return true;
}

static bool load_merges(struct json_loader *l, const json_t *model)
{
    const json_t *merges = json_object_get(model, "merges");
    if (!json_is_array(merges))
        return error_set(l->err, "model.merges: not a list");
    struct buf bufs[2] = {{0}};
    bool ok = true;
    for (size_t i = 0; ok && i < json_array_size(merges); i++) {
        const json_t *m = json_array_get(merges, i), *a = json_array_get(m, 0);
        const json_t *b = json_array_get(m, 1);
        const char *left = NULL, *right = NULL;
        size_t n_left = 0, n_right = 0;
        if (json_is_string(m)) {
            left = json_string_value(m);
            const char *space = json_string_length(m) ? strchr(left + 1, ' ') : NULL;
            if (space) {
                n_left = (size_t)(space - left);
                right = space + 1;
                n_right = json_string_length(m) - n_left - 1;
            }
        } else if (json_is_string(a) && json_is_string(b) && json_array_size(m) == 2) {
            left = json_string_value(a);
            n_left = json_string_length(a);
            right = json_string_value(b);
            n_right = json_string_length(b);
        }
        if (!left || !right) {
            ok = error_set(l->err, "not a pair of tokens");
        } else {
            ok = merge_key(l, left, n_left, &bufs[0], &left, &n_left) &&
                 merge_key(l, right, n_right, &bufs[1], &right, &n_right) &&
                 bpe_add_merge(&l->t->bpe, left, n_left, right, n_right, (uint32_t)i, l->err);
        }
        if (!ok)
            error_prefix(l->err, "model.merges[%zu]", i);
    }
    buf_clear(&bufs[0]);
    buf_clear(&bufs[1]);
    return ok;
}

static enum model_kind guess_model(const json_t *model)
{
    if (json_object_get(model, "merges"))
        return MODEL_BPE;
    return json_is_array(json_object_get(model, "vocab")) ? MODEL_UNIGRAM : MODEL_WORDPIECE;
}

static bool model_type(struct json_loader *l, const json_t *model)
{
    const char *type = get_string(model, "type");
    struct tokenizer *t = l->t;
    if (!type)
        t->model = guess_model(model);
    else if (!strcmp(type, "BPE"))
        t->model = MODEL_BPE;
    else if (!strcmp(type, "Unigram"))
        t->model = MODEL_UNIGRAM;
    else if (!strcmp(type, "WordPiece"))
        t->model = MODEL_WORDPIECE;
    else
        return error_set(l->err, "model.type: \"%.60s\" is not supported", type);
    if (t->model == MODEL_WORDPIECE) {
        const char *prefix = get_string(model, "continuing_subword_prefix");
        buf_adds(&t->wordpiece.prefix, prefix ? prefix : "##");
        const json_t *max = json_object_get(model, "max_input_chars_per_word");
        t->wordpiece.max_chars = json_is_integer(max) && json_integer_value(max) >= 0
                                     ? (size_t)json_integer_value(max)
                                     : 100;
    }
    if (t->model == MODEL_BPE) {
        const char *prefix = get_string(model, "continuing_subword_prefix");
        const char *suffix = get_string(model, "end_of_word_suffix");
        const json_t *dropout = json_object_get(model, "dropout");
        if (json_is_number(dropout) && json_number_value(dropout) != 0)
            return error_set(l->err, "model.dropout: %g, only 0 is supported",
                             json_number_value(dropout));
        buf_adds(&t->bpe.prefix, prefix ? prefix : "");
        buf_adds(&t->bpe.suffix, suffix ? suffix : "");
        t->bpe.ignore_merges = get_bool(model, "ignore_merges", false);
        t->bpe.byte_fallback = get_bool(model, "byte_fallback", false);
        t->bpe.fuse_unk = get_bool(model, "fuse_unk", false);
    }
    return true;
}

/* Builds the algorithm's tables. The vocabulary must be complete. */
static bool load_model(struct json_loader *l, const json_t *model)
{
    struct tokenizer *t = l->t;
    const json_t *unk = json_object_get(model, "unk_token");
    t->unk = find_token(l, unk);
    if (t->unk < 0 && json_is_string(unk))
        return error_set(l->err, "model.unk_token: \"%.60s\" is not in the vocabulary",
                         json_string_value(unk));
    switch (t->model) {
    case MODEL_BPE:
        t->bpe.unk = t->unk;
        bpe_init(&t->bpe, &t->vocab);
        if (!load_merges(l, model))
            return false;
        bpe_finish(&t->bpe);
        break;
    case MODEL_UNIGRAM: {
        const json_t *id = json_object_get(model, "unk_id");
        if (json_is_integer(id)) {
            if (json_integer_value(id) < 0 || json_integer_value(id) >= t->vocab.n)
                return error_set(l->err, "model.unk_id: %lld is out of range",
                                 (long long)json_integer_value(id));
            t->unk = (int32_t)json_integer_value(id);
        }
        t->unigram.unk = t->unk;
        t->unigram.byte_fallback = get_bool(model, "byte_fallback", false);
        if (t->unk >= 0)
            t->vocab.kind[t->unk] = TOKEN_UNKNOWN;
        unigram_init(&t->unigram, &t->vocab);
        break;
    }
    case MODEL_WORDPIECE:
        t->wordpiece.vocab = &t->vocab;
        t->wordpiece.unk = t->unk;
        break;
    }
    if (t->unk >= 0)
        t->vocab.kind[t->unk] = TOKEN_UNKNOWN;
    return true;
}

/* ------------------------------------------------------------------------------ post-processor */

static bool post_id(struct json_loader *l, const json_t *id, const char *where,
                    struct token_list *to)
{
    if (!json_is_integer(id) || json_integer_value(id) < 0 ||
        json_integer_value(id) >= l->t->vocab.n)
        return error_set(l->err, "%s: not the id of a token", where);
    token_list_add(to, (int32_t)json_integer_value(id));
    return true;
}

static bool load_template(struct json_loader *l, const json_t *o, const char *where)
{
    const json_t *single = json_object_get(o, "single");
    const json_t *specials = json_object_get(o, "special_tokens");
    if (!json_is_array(single))
        return error_set(l->err, "%s.single: not a list", where);
    bool after_text = false;
    for (size_t i = 0; i < json_array_size(single); i++) {
        const json_t *e = json_array_get(single, i);
        const json_t *special = json_object_get(e, "SpecialToken");
        if (!special) {
            after_text |= json_object_get(e, "Sequence") != NULL;
            continue;
        }
        const char *name = get_string(special, "id");
        const json_t *ids = json_object_get(json_object_get(specials, name ? name : ""), "ids");
        char at[200];
        snprintf(at, sizeof at, "%.120s.special_tokens[\"%.40s\"].ids", where, name ? name : "");
        if (!json_is_array(ids))
            return error_set(l->err, "%s: not a list", at);
        for (size_t k = 0; k < json_array_size(ids); k++)
            if (!post_id(l, json_array_get(ids, k), at, after_text ? &l->t->after : &l->t->before))
                return false;
    }
    return true;
}

static bool load_post(struct json_loader *l, const json_t *o, const char *where, int depth)
{
    const char *type = type_of(l, o, where);
    if (!type)
        return false;
    if (l->t->before.n + l->t->after.n > MAX_STEPS)
        return error_set(l->err, "%s: more than %d tokens", where, MAX_STEPS);
    if (!strcmp(type, "Sequence"))
        return for_each(l, o, "processors", where, depth, load_post);
    if (!strcmp(type, "ByteLevel")) /* affects offsets only */
        return true;
    if (!strcmp(type, "TemplateProcessing"))
        return load_template(l, o, where);
    if (!strcmp(type, "BertProcessing") || !strcmp(type, "RobertaProcessing")) {
        char at[200];
        snprintf(at, sizeof at, "%.150s.cls", where);
        if (!post_id(l, json_array_get(json_object_get(o, "cls"), 1), at, &l->t->before))
            return false;
        snprintf(at, sizeof at, "%.150s.sep", where);
        return post_id(l, json_array_get(json_object_get(o, "sep"), 1), at, &l->t->after);
    }
    return error_set(l->err, "%s: post_processor \"%.60s\" is not supported", where, type);
}

/* ------------------------------------------------------------------ BOS, EOS and where to stop */

static bool list_has(const struct token_list *l, int32_t id)
{
    for (size_t i = 0; i < l->n; i++)
        if (l->ids[i] == id)
            return true;
    return false;
}

/* Explicit add_bos_token and add_eos_token override the post-processor. */
static void apply_add(const json_t *config, const char *key, int32_t id, struct token_list *l)
{
    const json_t *add = json_object_get(config, key);
    if (!json_is_boolean(add) || id < 0)
        return;
    if (json_is_true(add) && !list_has(l, id))
        token_list_add(l, id);
    else if (json_is_false(add) && l->n == 1 && l->ids[0] == id)
        l->n = 0;
}

/* eos_token_id of a config: a number or a list of numbers. */
static void mark_ends(struct tokenizer *t, const json_t *config)
{
    const json_t *v = json_object_get(config, "eos_token_id");
    if (json_is_integer(v))
        tokenizer_mark_end(t, json_integer_value(v));
    for (size_t i = 0; i < json_array_size(v); i++)
        if (json_is_integer(json_array_get(v, i)))
            tokenizer_mark_end(t, json_integer_value(json_array_get(v, i)));
}

static int32_t config_id(const struct tokenizer *t, const json_t *config, const char *key)
{
    const json_t *v = json_object_get(config, key);
    if (json_is_array(v))
        v = json_array_get(v, 0);
    json_int_t id = json_is_integer(v) ? json_integer_value(v) : -1;
    return id >= 0 && id < t->vocab.n ? (int32_t)id : -1;
}

static void load_ends(struct json_loader *l, const json_t *config, const json_t *generation,
                      const json_t *model)
{
    struct tokenizer *t = l->t;
    t->bos = find_token(l, json_object_get(config, "bos_token"));
    t->eos = find_token(l, json_object_get(config, "eos_token"));
    if (t->bos < 0 && !json_object_get(config, "bos_token")) {
        if (t->before.n)
            t->bos = t->before.ids[0];
        else if (!config)
            t->bos = config_id(t, model, "bos_token_id");
    }
    if (t->eos < 0)
        t->eos = config_id(t, generation, "eos_token_id");
    if (t->eos < 0)
        t->eos = config_id(t, model, "eos_token_id");
    if (t->eos < 0 && t->after.n)
        t->eos = t->after.ids[t->after.n - 1];
    apply_add(config, "add_bos_token", t->bos, &t->before);
    apply_add(config, "add_eos_token", t->eos, &t->after);
    mark_ends(t, generation);
    mark_ends(t, model);
}

/* ------------------------------------------------------------------------------------ the whole */

static bool load_all(struct json_loader *l, const json_t *root, const json_t *config)
{
    struct tokenizer *t = l->t;
    const json_t *model = json_object_get(root, "model"), *o;
    if (!json_is_object(model))
        return error_set(l->err, "model: not an object");
    if (!model_type(l, model))
        return false;

    o = json_object_get(root, "pre_tokenizer");
    bool bytes = find_type(o, "pretokenizers", "ByteLevel", 0);
    l->spell = t->model != MODEL_BPE || t->bpe.prefix.len || t->bpe.suffix.len ||
               find_type(o, "pretokenizers", "Metaspace", 0);
    t->bpe.byte_level = bytes && !l->spell;
    if (json_is_object(o) && !load_pretokenizer(l, o, "pre_tokenizer", 0))
        return false;
    o = json_object_get(root, "normalizer");
    if (json_is_object(o) && !load_normalizer(l, o, "normalizer", 0))
        return false;
    o = json_object_get(root, "decoder");
    if (!json_is_object(o))
        default_decoder(l);
    else if (!load_decoder(l, o, "decoder", 0))
        return false;

    const json_t *vocab = json_object_get(model, "vocab");
    /* Ids may have gaps, but a small file must not cause a large allocation. */
    size_t limit = (json_object_size(vocab) + json_array_size(vocab) +
                    json_array_size(json_object_get(root, "added_tokens")) +
                    json_object_size(json_object_get(config, "added_tokens_decoder"))) *
                       8 +
                   65536;
    if (t->model == MODEL_UNIGRAM ? !json_is_array(vocab) : !json_is_object(vocab))
        return error_set(l->err, "model.vocab: not %s",
                         t->model == MODEL_UNIGRAM ? "a list" : "an object");
    if (t->model == MODEL_UNIGRAM ? !load_vocab_list(l, vocab, limit)
                                  : !load_vocab_object(l, vocab, limit))
        return false;
    if (!walk_added(l, root, config, limit, true))
        return false;
    if (t->bpe.byte_fallback || get_bool(model, "byte_fallback", false))
        for (size_t i = 0; i < l->n_raw; i++)
            if (l->raw[i].len == 6 && l->raw[i].kind == TOKEN_NORMAL &&
                !memcmp(l->raw[i].text, "<0x", 3))
                l->raw[i].kind = TOKEN_BYTE;
    if (!tokenizer_set_vocab(t, l->raw, l->n_raw, "model.vocab", l->err) ||
        !walk_added(l, root, config, limit, false) || !load_model(l, model))
        return false;
    o = json_object_get(root, "post_processor");
    return !json_is_object(o) || load_post(l, o, "post_processor", 0);
}

struct tokenizer *tokenizer_from_json(const json_t *root, const char *name, const json_t *config,
                                      const json_t *generation, const json_t *model,
                                      struct error *err)
{
    struct json_loader l = {.t = tokenizer_new(), .err = err};
    bool ok = json_is_object(root) || error_set(err, "not a JSON object");
    ok = ok && load_all(&l, root, config);
    if (ok)
        load_ends(&l, config, generation, model);
    ok = ok && tokenizer_finish(l.t, err);
    mem_free(l.raw);
    if (ok)
        return l.t;
    error_prefix(err, "%s", name);
    tokenizer_free(l.t);
    return NULL;
}

struct tokenizer *tokenizer_load_json(const char *text, size_t bytes, const char *name,
                                      const json_t *tokenizer_config, struct error *err)
{
    json_error_t e;
    if (!json_guard(text, bytes, &json_limits_file, NULL, err)) {
        error_prefix(err, "%s", name);
        return NULL;
    }
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &e);
    if (!root) {
        error_set(err, "%s: line %d: %s", name, e.line, e.text);
        return NULL;
    }
    struct tokenizer *t = tokenizer_from_json(root, name, tokenizer_config, NULL, NULL, err);
    json_decref(root);
    return t;
}
