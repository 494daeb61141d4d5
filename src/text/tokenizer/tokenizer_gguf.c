/*
 * Loads the vocabulary of a GGUF file ("tokenizer.ggml.*") into the pipeline. Owns the key names;
 * every error names the key at fault.
 */
#include "base/mem.h"
#include "text/tokenizer/tokenizer_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define KEY(NAME) "tokenizer.ggml." NAME
#define SPACE     "\xe2\x96\x81" /* SentencePiece's symbol for a space, U+2581 */

struct gguf_loader {
    const struct tensorfile *f;
    struct tokenizer *t;
    struct error *err;
    struct raw_token *raw; /* (n) */
    size_t n;
    struct buf text; /* spellings that differ from the file */
};

/* Returns the array at key, of strings or of numbers. NULL with *ok true if it is absent. */
static const struct meta_array *get_array(struct gguf_loader *l, const char *key, bool strings,
                                          bool *ok)
{
    const struct meta *m = tensorfile_meta(l->f, key);
    *ok = true;
    if (!m)
        return NULL;
    if (m->type != META_ARRAY || (m->v.a.type == META_STRING) != strings) {
        *ok = error_set(l->err, "%s: not an array of %s", key, strings ? "strings" : "numbers");
        return NULL;
    }
    return &m->v.a;
}

/* Reads a token id; *id is unchanged if the key is absent. */
static bool get_id(struct gguf_loader *l, const char *key, int32_t *id)
{
    int64_t v;
    if (!tensorfile_meta(l->f, key))
        return true;
    if (!meta_get_int(l->f, key, &v))
        return error_set(l->err, "%s: not an integer", key);
    if (v < 0 || v >= (int64_t)l->n) {
        /* some converters write -1 or 2^32-1 for "none" */
        if (v != -1 && v != UINT32_MAX)
            return error_set(l->err, "%s: %lld is out of range (%zu tokens)", key, (long long)v,
                             l->n);
        *id = -1;
        return true;
    }
    *id = (int32_t)v;
    return true;
}

static bool load_tokens(struct gguf_loader *l)
{
    bool ok;
    const struct meta_array *tokens = get_array(l, KEY("tokens"), true, &ok);
    if (!tokens)
        return ok ? error_set(l->err, "%s: missing", KEY("tokens")) : false;
    const struct meta_array *types = get_array(l, KEY("token_type"), false, &ok);
    if (!ok)
        return false;
    const struct meta_array *scores = get_array(l, KEY("scores"), false, &ok);
    if (!ok)
        return false;
    l->n = tokens->n;
    if (types && types->n < l->n)
        return error_set(l->err, "%s: %zu types for %zu tokens", KEY("token_type"), types->n, l->n);
    if (scores && scores->n < l->n)
        return error_set(l->err, "%s: %zu scores for %zu tokens", KEY("scores"), scores->n, l->n);
    l->raw = mem_zalloc(l->n, sizeof *l->raw);
    size_t cursor = 0;
    for (size_t i = 0; i < l->n; i++) {
        struct raw_token *r = &l->raw[i];
        const char *p;
        size_t len;
        double v;
        if (!meta_array_string(tokens, &cursor, &p, &len) || len > INT32_MAX)
            return error_set(l->err, "%s[%zu]: cannot be read", KEY("tokens"), i);
        r->text = p;
        r->len = (uint32_t)len;
        if (types && meta_array_number(types, i, &v)) {
            /* 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte */
            static const uint8_t kinds[] = {TOKEN_NORMAL,  TOKEN_NORMAL, TOKEN_UNKNOWN,
                                            TOKEN_CONTROL, TOKEN_USER,   TOKEN_UNUSED,
                                            TOKEN_BYTE};
            if (!(v >= 0 && v <= 6))
                return error_set(l->err, "%s[%zu]: type %g", KEY("token_type"), i, v);
            r->kind = kinds[(int)v];
        }
        if (scores && meta_array_number(scores, i, &v)) {
            if (!isfinite((float)v))
                return error_set(l->err, "%s[%zu]: %g", KEY("scores"), i, v);
            r->score = (float)v;
        }
    }
    return true;
}

/* --------------------------------------------------------------------------------------- models */

static bool load_merges(struct gguf_loader *l)
{
    struct tokenizer *t = l->t;
    bool ok;
    const struct meta_array *merges = get_array(l, KEY("merges"), true, &ok);
    if (!ok)
        return false;
    if (!merges) { /* like tiktoken: the vocabulary is in merge order */
        uint32_t *rank = mem_alloc(l->n * sizeof *rank);
        for (size_t i = 0; i < l->n; i++)
            rank[i] = (uint32_t)i;
        ok = bpe_derive_merges(&t->bpe, rank, l->err) || error_prefix(l->err, KEY("tokens"));
        mem_free(rank);
        return ok;
    }
    struct buf left = {0}, right = {0};
    size_t cursor = 0;
    for (size_t i = 0; ok && i < merges->n; i++) {
        const char *p;
        size_t n;
        ok = meta_array_string(merges, &cursor, &p, &n);
        const char *space = ok && n > 1 ? memchr(p + 1, ' ', n - 1) : NULL;
        buf_reset(&left);
        buf_reset(&right);
        if (!space) {
            ok = error_set(l->err, "not two tokens separated by a space");
        } else if (!t->bpe.byte_level) {
            buf_add(&left, p, (size_t)(space - p));
            buf_add(&right, space + 1, n - (size_t)(space - p) - 1);
            ok = bpe_add_merge(&t->bpe, left.p, left.len, right.p ? right.p : "", right.len,
                               (uint32_t)i, l->err);
        } else if (!bytelevel_decode(p, (size_t)(space - p), &left) ||
                   !bytelevel_decode(space + 1, n - (size_t)(space - p) - 1, &right))
            ok = error_set(l->err, "characters outside the byte alphabet");
        else
            ok = bpe_add_merge(&t->bpe, left.p, left.len, right.p, right.len, (uint32_t)i, l->err);
        if (!ok)
            error_prefix(l->err, "%s[%zu]", KEY("merges"), i);
    }
    buf_clear(&left);
    buf_clear(&right);
    return ok;
}

static bool load_bpe(struct gguf_loader *l)
{
    struct tokenizer *t = l->t;
    char *pre = meta_get_string(l->f, KEY("pre"));
    bool ok = pretokenizer_named(t, pre ? pre : "default", l->err);
    mem_free(pre);
    if (!ok)
        return false;
    t->model = MODEL_BPE;
    t->bpe.byte_level = true;
    tokenizer_add_decode(t, DECODE_BYTELEVEL);
    if (!tokenizer_set_vocab(t, l->raw, l->n, KEY("tokens"), l->err))
        return false;
    bpe_init(&t->bpe, &t->vocab);
    if (!load_merges(l))
        return false;
    bpe_finish(&t->bpe);
    return true;
}

/* Spaces become U+2581 and one is prepended; decoding undoes both. */
static void add_spaces(struct gguf_loader *l, bool prefix)
{
    struct tokenizer *t = l->t;
    if (prefix)
        buf_adds(&normalizer_add(&t->normalizer, NORM_PREPEND)->text, " ");
    struct norm_step *s = normalizer_add(&t->normalizer, NORM_REPLACE);
    buf_adds(&s->text, " ");
    buf_adds(&s->with, SPACE);
    struct decode_step *d = tokenizer_add_decode(t, DECODE_REPLACE);
    buf_adds(&d->text, SPACE);
    buf_adds(&d->with, " ");
    tokenizer_add_decode(t, DECODE_BYTES);
    t->strip_start = prefix;
}

struct scored_token {
    float score;
    int32_t id;
};

static int compare_scores(const void *a, const void *b)
{
    const struct scored_token *x = a, *y = b;
    return x->score > y->score ? -1 : x->score < y->score;
}

static bool load_spm(struct gguf_loader *l)
{
    struct tokenizer *t = l->t;
    bool prefix = true;
    meta_get_bool(l->f, KEY("add_space_prefix"), &prefix);
    add_spaces(l, prefix);
    t->model = MODEL_BPE;
    if (!tokenizer_set_vocab(t, l->raw, l->n, KEY("tokens"), l->err))
        return false;
    t->bpe.byte_fallback = true;
    t->bpe.unk = t->unk;
    bpe_init(&t->bpe, &t->vocab);
    /* A higher score merges earlier. Tokens of equal score share a rank, and the leftmost wins. */
    struct scored_token *order = mem_alloc(l->n * sizeof *order);
    uint32_t *rank = mem_alloc(l->n * sizeof *rank), r = 0;
    for (size_t i = 0; i < l->n; i++)
        order[i] = (struct scored_token){l->raw[i].score, (int32_t)i};
    qsort(order, l->n, sizeof *order, compare_scores);
    for (size_t i = 0; i < l->n; i++) {
        r += i && order[i].score != order[i - 1].score;
        rank[order[i].id] = r;
    }
    bool ok = bpe_derive_merges(&t->bpe, rank, l->err) || error_prefix(l->err, KEY("tokens"));
    mem_free(order);
    mem_free(rank);
    if (ok)
        bpe_finish(&t->bpe);
    return ok;
}

/* Gemma 4: merges over whole texts with U+2581 for spaces, and byte fallback. */
static bool load_gemma(struct gguf_loader *l)
{
    struct tokenizer *t = l->t;
    bool prefix = false;
    meta_get_bool(l->f, KEY("add_space_prefix"), &prefix);
    add_spaces(l, prefix);
    t->model = MODEL_BPE;
    if (!tensorfile_meta(l->f, KEY("merges")))
        return error_set(l->err, "%s: missing", KEY("merges"));
    if (!tokenizer_set_vocab(t, l->raw, l->n, KEY("tokens"), l->err))
        return false;
    t->bpe.byte_fallback = true;
    t->bpe.unk = t->unk;
    bpe_init(&t->bpe, &t->vocab);
    if (!load_merges(l))
        return false;
    bpe_finish(&t->bpe);
    return true;
}

static bool load_unigram(struct gguf_loader *l)
{
    struct tokenizer *t = l->t;
    bool prefix = true, squeeze = true, ok;
    if (!tensorfile_meta(l->f, KEY("scores")))
        return error_set(l->err, "%s: missing", KEY("scores"));
    const struct meta_array *map = get_array(l, KEY("precompiled_charsmap"), false, &ok);
    if (!ok)
        return false;
    if (map && map->type != META_U8 && map->type != META_I8)
        return error_set(l->err, "%s: not an array of bytes", KEY("precompiled_charsmap"));
    if (map && map->n &&
        !charsmap_load(normalizer_add(&t->normalizer, NORM_CHARSMAP), map->data, map->n, l->err))
        return error_prefix(l->err, "tokenizer.ggml");
    meta_get_bool(l->f, KEY("add_space_prefix"), &prefix);
    meta_get_bool(l->f, KEY("remove_extra_whitespaces"), &squeeze);
    if (squeeze)
        normalizer_add(&t->normalizer, NORM_SQUEEZE);
    add_spaces(l, prefix);
    t->model = MODEL_UNIGRAM;
    if (!tokenizer_set_vocab(t, l->raw, l->n, KEY("tokens"), l->err))
        return false;
    t->unigram.unk = t->unk;
    unigram_init(&t->unigram, &t->vocab);
    return true;
}

/* GGUF marks tokens that start a word with U+2581. BERT marks the continuations with "##"
 * instead. */
static void respell_wordpiece(struct gguf_loader *l)
{
    size_t bytes = 0;
    for (size_t i = 0; i < l->n; i++)
        bytes += l->raw[i].len + 2;
    buf_reserve(&l->text, bytes);
    for (size_t i = 0; i < l->n; i++) {
        struct raw_token *r = &l->raw[i];
        if (r->kind != TOKEN_NORMAL && r->kind != TOKEN_UNUSED)
            continue;
        if (r->len > 3 && !memcmp(r->text, SPACE, 3)) {
            r->text += 3;
            r->len -= 3;
            continue;
        }
        size_t at = l->text.len;
        buf_adds(&l->text, "##");
        buf_add(&l->text, r->text, r->len);
        r->text = l->text.p + at;
        r->len += 2;
    }
}

static bool load_wordpiece(struct gguf_loader *l)
{
    struct tokenizer *t = l->t;
    bool lower = true;
    meta_get_bool(l->f, KEY("normalizer.lowercase"), &lower);
    struct norm_step *s = normalizer_add(&t->normalizer, NORM_BERT);
    s->clean = s->chinese = true;
    s->lower = s->accents = lower;
    meta_get_bool(l->f, KEY("normalizer.strip_accents"), &s->accents);
    struct pre_step *p = pretokenizer_add(&t->pretokenizer, PRE_CHARS);
    p->set = UC_SPACE;
    p->behavior = CUT_REMOVED;
    p = pretokenizer_add(&t->pretokenizer, PRE_CHARS);
    p->set = UC_PUNCT;
    p->ascii_punct = true;
    struct decode_step *d = tokenizer_add_decode(t, DECODE_WORDPIECE);
    buf_adds(&d->text, "##");
    d->cleanup = true;
    t->strip_start = 1;
    respell_wordpiece(l);
    t->model = MODEL_WORDPIECE;
    if (!tokenizer_set_vocab(t, l->raw, l->n, KEY("tokens"), l->err))
        return false;
    buf_adds(&t->wordpiece.prefix, "##");
    t->wordpiece.max_chars = 100;
    t->wordpiece.vocab = &t->vocab;
    t->wordpiece.unk = t->unk;
    return true;
}

/* ------------------------------------------------------------------------------- special tokens */

static bool load_ids(struct gguf_loader *l, int32_t *sep, int32_t *cls)
{
    struct tokenizer *t = l->t;
    return get_id(l, KEY("bos_token_id"), &t->bos) && get_id(l, KEY("eos_token_id"), &t->eos) &&
           get_id(l, KEY("unknown_token_id"), &t->unk) &&
           get_id(l, KEY("seperator_token_id"), sep) && get_id(l, KEY("separator_token_id"), sep) &&
           get_id(l, KEY("cls_token_id"), cls);
}

static bool load_fim(struct gguf_loader *l)
{
    struct fim_tokens *f = &l->t->fim;
    const struct {
        const char *key, *older;
        int32_t *id;
    } ids[] = {
        {KEY("fim_pre_token_id"), KEY("prefix_token_id"), &f->prefix},
        {KEY("fim_suf_token_id"), KEY("suffix_token_id"), &f->suffix},
        {KEY("fim_mid_token_id"), KEY("middle_token_id"), &f->middle},
        {KEY("fim_pad_token_id"), KEY("fim_pad_token_id"), &f->pad},
        {KEY("fim_rep_token_id"), KEY("fim_rep_token_id"), &f->repo},
        {KEY("fim_sep_token_id"), KEY("fim_sep_token_id"), &f->file},
    };
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        if (!get_id(l, ids[i].older, ids[i].id) || !get_id(l, ids[i].key, ids[i].id))
            return false;
    return true;
}

static bool load_ends(struct gguf_loader *l)
{
    static const char *const keys[] = {KEY("eot_token_id"), KEY("eom_token_id")};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        int32_t id = -1;
        if (!get_id(l, keys[i], &id))
            return false;
        tokenizer_mark_end(l->t, id);
    }
    static const char *const lists[] = {KEY("eos_token_ids"), KEY("eog_token_ids")};
    for (size_t i = 0; i < sizeof lists / sizeof *lists; i++) {
        bool ok;
        const struct meta_array *a = get_array(l, lists[i], false, &ok);
        double v;
        if (!ok)
            return false;
        for (size_t k = 0; a && k < a->n; k++)
            if (meta_array_number(a, k, &v) && v >= 0 && v < (double)l->n)
                tokenizer_mark_end(l->t, (int64_t)v);
    }
    return true;
}

static bool load_added(struct gguf_loader *l)
{
    for (size_t i = 0; i < l->n; i++) {
        const struct raw_token *r = &l->raw[i];
        if (r->kind != TOKEN_CONTROL && r->kind != TOKEN_USER && r->kind != TOKEN_UNKNOWN)
            continue;
        struct added_token a = {.id = (int32_t)i, .special = r->kind != TOKEN_USER};
        if (!tokenizer_add_token(l->t, a, r->text, r->len, l->err))
            return error_prefix(l->err, "%s[%zu]", KEY("tokens"), i);
    }
    return true;
}

static void set_template(struct gguf_loader *l, int32_t sep)
{
    struct tokenizer *t = l->t;
    meta_get_bool(l->f, KEY("add_bos_token"), &t->add_bos);
    meta_get_bool(l->f, KEY("add_eos_token"), &t->add_eos);
    meta_get_bool(l->f, KEY("add_sep_token"), &t->add_sep);
    if (t->add_bos && t->bos >= 0)
        token_list_add(&t->before, t->bos);
    if (t->add_sep && sep >= 0)
        token_list_add(&t->after, sep);
    else if ((t->add_eos || t->add_sep) && t->eos >= 0)
        token_list_add(&t->after, t->eos);
}

/* Well-known default ids, which some files omit. */
static int32_t default_id(const struct gguf_loader *l, int32_t id)
{
    return (size_t)id < l->n ? id : -1;
}

static bool load_all(struct gguf_loader *l, const char *model)
{
    struct tokenizer *t = l->t;
    int32_t sep = -1, cls = -1;
    bool (*load)(struct gguf_loader *);
    if (!load_tokens(l))
        return false;
    if (!strcmp(model, "gpt2")) {
        load = load_bpe;
    } else if (!strcmp(model, "llama")) {
        load = load_spm;
        t->bos = default_id(l, 1);
        t->eos = default_id(l, 2);
        t->unk = default_id(l, 0);
        t->add_bos = true;
    } else if (!strcmp(model, "gemma4")) {
        load = load_gemma;
        t->add_bos = true;
    } else if (!strcmp(model, "t5")) {
        load = load_unigram;
        t->eos = default_id(l, 1);
        t->unk = default_id(l, 2);
        t->add_eos = true;
    } else if (!strcmp(model, "bert")) {
        load = load_wordpiece;
        t->unk = default_id(l, 100);
        cls = default_id(l, 101);
        sep = default_id(l, 102);
        t->add_bos = t->add_sep = true;
    } else {
        return error_set(l->err, "%s: \"%.60s\" is not supported", KEY("model"), model);
    }
    if (!load_ids(l, &sep, &cls))
        return false;
    if (t->bos < 0)
        t->bos = cls;
    if (!load(l))
        return false;
    set_template(l, sep);
    return load_added(l) && load_ends(l) && load_fim(l) && tokenizer_finish(t, l->err);
}

struct tokenizer *tokenizer_from_gguf(const struct tensorfile *f, struct error *err)
{
    struct gguf_loader l = {.f = f, .t = tokenizer_new(), .err = err};
    char *model = meta_get_string(f, KEY("model"));
    bool ok;
    if (!model)
        ok = error_set(err, "%s: missing: the file has no vocabulary", KEY("model"));
    else if (!strcmp(model, "no_vocab") || !strcmp(model, "none"))
        ok = error_set(err, "%s: \"%s\": the file has no vocabulary", KEY("model"), model);
    else
        ok = load_all(&l, model);
    mem_free(model);
    mem_free(l.raw);
    buf_clear(&l.text);
    if (ok)
        return l.t;
    error_prefix(err, "%s", f->path);
    tokenizer_free(l.t);
    return NULL;
}
