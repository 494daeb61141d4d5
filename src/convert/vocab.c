/*
 * Converts tokenizer.json, tokenizer.model and tokenizer_config.json to tokenizer.ggml.*: the token
 * list with kinds, merges or scores, special ids, the chat template. Vocabularies: byte-level BPE
 * ("gpt2" in GGUF), SentencePiece BPE with byte fallback ("llama"), and for encoders WordPiece
 * ("bert") and Unigram ("t5"). Owns nothing after the call.
 */
#include "convert/vocab.h"
#include "convert/sentencepiece.h"
#include "base/base64.h"
#include "base/mem.h"
#include "model/config.h"
#include "model/families/family.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TOKENIZER_MAX = 512 << 20, TEMPLATE_MAX = 16 << 20 };

/* GGUF's token kinds. */
enum { KIND_NORMAL = 1, KIND_UNKNOWN, KIND_CONTROL, KIND_USER, KIND_UNUSED, KIND_BYTE };

struct token {
    const char *text; /* (len) borrowed from JSON or the SentencePiece file, or heap (own) */
    size_t len;
    char *own;
    float score;
    int32_t kind; /* 0 = no token yet */
};

struct vocab_writer {
    struct gguf_writer *w;
    const struct tensorfile *f;
    const struct convert_options *opt;
    char *dir;
    json_t *root;              /* tokenizer.json or NULL */
    struct sentencepiece *spm; /* tokenizer.model or NULL */
    struct token *tokens;      /* (n) */
    int n;
    struct map ids; /* text -> id */
    bool encoder;
    struct error *err;
};

/* Pre-tokenizers with a GGUF name, by their pattern in tokenizer.json. */
#define ENGLISH "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define SPACES  "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define TAIL    "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#define CASED   "\\p{Lm}\\p{Lo}\\p{M}]"
static const struct {
    const char *pattern, *name;
} pre_tokenizers[] = {
    {ENGLISH "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" SPACES, "qwen2"},
    {ENGLISH "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|" SPACES, "llama-bpe"},
    {"[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}" CASED "*[\\p{Ll}" CASED "+|"
     "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}" CASED "+[\\p{Ll}" CASED "*|"
     "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" SPACES,
     "tekken"},
    {"[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}" CASED "*[\\p{Ll}" CASED "+" TAIL "|"
     "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}" CASED "+[\\p{Ll}" CASED "*" TAIL "|"
     "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|" SPACES,
     "gpt-4o"},
    {"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}|"
     " ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|" SPACES,
     "qwen35"},
};

static bool fail(struct vocab_writer *v, const char *file, const char *what)
{
    return error_set(v->err, "%s/%s: %s", v->dir, file, what);
}

static const char *type_of(const json_t *o)
{
    const char *t = json_string_value(json_object_get(o, "type"));
    return t ? t : "";
}

/* Tokens. */

static bool set_token(struct vocab_writer *v, json_int_t id, const char *text, size_t len, int kind,
                      float score, bool replace)
{
    if (id < 0 || id >= v->n)
        return error_set(v->err,
                         "%s/tokenizer.json: token '%.*s': id %lld is outside the vocabulary of %d",
                         v->dir, (int)(len < 60 ? len : 60), text, (long long)id, v->n);
    struct token *t = &v->tokens[id];
    if (t->kind && !replace)
        return error_set(v->err, "%s/tokenizer.json: id %lld is there twice", v->dir,
                         (long long)id);
    mem_free(t->own);
    *t = (struct token){.text = text, .len = len, .kind = kind, .score = score};
    return true;
}

static bool looks_special(const char *s, size_t n)
{
    static const struct {
        const char *head, *tail;
    } shapes[] = {{"<|", "|>"}, {"<\uff5c", "\uff5c>"}, {"<unused", ">"}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        size_t a = strlen(shapes[i].head), b = strlen(shapes[i].tail);
        if (n >= a + b && !memcmp(s, shapes[i].head, a) && !memcmp(s + n - b, shapes[i].tail, b))
            return true;
    }
    return (n == 5 && !memcmp(s, "<pad>", 5)) || (n == 6 && !memcmp(s, "<mask>", 6));
}

/* "<0x41>": a byte token. */
static bool is_byte_token(const char *s, size_t n)
{
    return n == 6 && !memcmp(s, "<0x", 3) && s[5] == '>' &&
           strspn(s + 3, "0123456789ABCDEFabcdef") == 2;
}

/* An added token replaces the base vocabulary's token of the same id. */
static bool add_added(struct vocab_writer *v, json_int_t id, const json_t *entry)
{
    const json_t *content = json_object_get(entry, "content");
    if (!json_is_string(content))
        return fail(v, "tokenizer.json", "added_tokens: content is missing");
    const char *s = json_string_value(content);
    size_t n = json_string_length(content);
    bool special = json_is_true(json_object_get(entry, "special")) || looks_special(s, n);
    bool unknown = id >= 0 && id < v->n && v->tokens[id].kind == KIND_UNKNOWN;
    int kind = unknown ? KIND_UNKNOWN : special ? KIND_CONTROL : KIND_USER;
    return set_token(v, id, s, n, kind, -1000, true);
}

static bool add_all_added(struct vocab_writer *v)
{
    size_t i;
    json_t *entry;
    json_array_foreach(json_object_get(v->root, "added_tokens"), i, entry)
    {
        const json_t *id = json_object_get(entry, "id");
        if (!json_is_integer(id))
            return fail(v, "tokenizer.json", "added_tokens: id is missing");
        if (!add_added(v, json_integer_value(id), entry))
            return false;
    }
    const char *key;
    if (!v->root) /* a folder without tokenizer.json lists them here */
        json_object_foreach(json_object_get(v->f->tokenizer_config, "added_tokens_decoder"), key,
                            entry)
        {
            char *end;
            long id = strtol(key, &end, 10);
            if (*end || !add_added(v, id, entry))
                return *end ? fail(v, "tokenizer_config.json", "added_tokens_decoder: bad id")
                            : false;
        }
    return true;
}

static bool add_base(struct vocab_writer *v)
{
    json_t *vocab = json_object_get(json_object_get(v->root, "model"), "vocab"), *id;
    const char *text;
    if (!json_object_size(vocab))
        return fail(v, "tokenizer.json", "model.vocab is missing or empty");
    json_object_foreach(vocab, text, id)
    {
        size_t len = strlen(text);
        int kind = is_byte_token(text, len) ? KIND_BYTE : KIND_NORMAL;
        if (!json_is_integer(id))
            return fail(v, "tokenizer.json", "model.vocab: an id is not an integer");
        if (!set_token(v, json_integer_value(id), text, len, kind, 0, false))
            return false;
    }
    return true;
}

static bool add_pieces(struct vocab_writer *v)
{
    for (int i = 0; i < v->spm->n; i++) {
        const struct piece *p = &v->spm->pieces[i];
        if (i >= v->n)
            return fail(v, "tokenizer.model", "more pieces than vocab_size says");
        if (!set_token(v, i, p->text, p->len, p->kind, p->score, false))
            return false;
    }
    return true;
}

/* Embedding rows without a token. */
static void fill_unused(struct vocab_writer *v)
{
    for (int i = 0; i < v->n; i++) {
        struct token *t = &v->tokens[i];
        if (!t->kind) {
            struct buf b = {0};
            buf_addf(&b, "[PAD%d]", i);
            t->len = b.len;
            t->text = t->own = buf_take(&b);
            t->kind = KIND_UNUSED;
            t->score = -1000;
        }
        map_add(&v->ids, t->text, t->len, i);
    }
}

static void write_tokens(struct vocab_writer *v, const char *model, const char *pre, bool scores)
{
    struct buf text = {0};
    int32_t *kinds = mem_zalloc((size_t)v->n, sizeof *kinds);
    float *score = mem_zalloc((size_t)v->n, sizeof *score);
    for (int i = 0; i < v->n; i++) {
        const struct token *t = &v->tokens[i];
        gguf_pack_string(&text, t->text, t->len);
        kinds[i] = t->kind;
        score[i] = t->score;
    }
    gguf_set_string(v->w, "tokenizer.ggml.model", model, strlen(model));
    gguf_set_string(v->w, "tokenizer.ggml.pre", pre, strlen(pre));
    gguf_set_strings(v->w, "tokenizer.ggml.tokens", &text, (size_t)v->n);
    if (scores)
        gguf_set_array(v->w, "tokenizer.ggml.scores", META_F32, score, (size_t)v->n);
    gguf_set_array(v->w, "tokenizer.ggml.token_type", META_I32, kinds, (size_t)v->n);
    mem_free(kinds);
    mem_free(score);
    buf_clear(&text);
}

/* Merges: "a b" or ["a", "b"]. */

static bool merge_parts(const json_t *m, const char **a, size_t *na, const char **b, size_t *nb)
{
    if (json_is_string(m)) {
        const char *s = json_string_value(m), *space = strchr(s, ' ');
        if (!space || !space[1])
            return false;
        *a = s;
        *na = (size_t)(space - s);
        *b = space + 1;
        *nb = strlen(space + 1);
        return true;
    }
    const json_t *x = json_array_get(m, 0), *y = json_array_get(m, 1);
    if (json_array_size(m) != 2 || !json_is_string(x) || !json_is_string(y))
        return false;
    *a = json_string_value(x);
    *na = json_string_length(x);
    *b = json_string_value(y);
    *nb = json_string_length(y);
    return true;
}

/* GGUF separates the parts by a space. A space inside a part is written in byte-level BPE's
 * spelling. */
static void add_part(struct buf *b, const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (s[i] == ' ')
            buf_adds(b, "\u0120");
        else
            buf_addc(b, s[i]);
    }
}

static bool write_merges(struct vocab_writer *v)
{
    json_t *merges = json_object_get(json_object_get(v->root, "model"), "merges"), *m;
    struct buf packed = {0}, one = {0};
    size_t i;
    bool ok = true;
    json_array_foreach(merges, i, m)
    {
        const char *a, *b;
        size_t na, nb;
        if (!merge_parts(m, &a, &na, &b, &nb)) {
            ok = error_set(v->err, "%s/tokenizer.json: model.merges[%zu] is not a pair", v->dir, i);
            break;
        }
        buf_reset(&one);
        add_part(&one, a, na);
        buf_addc(&one, ' ');
        add_part(&one, b, nb);
        gguf_pack_string(&packed, one.p, one.len);
    }
    if (ok)
        gguf_set_strings(v->w, "tokenizer.ggml.merges", &packed, json_array_size(merges));
    buf_clear(&packed);
    buf_clear(&one);
    return ok;
}

/* Without tokenizer.model the merge order replaces the scores: earlier merges score higher. */
static bool scores_from_merges(struct vocab_writer *v)
{
    json_t *merges = json_object_get(json_object_get(v->root, "model"), "merges"), *m;
    size_t i;
    struct buf joined = {0};
    for (int k = 0; k < v->n; k++) {
        struct token *t = &v->tokens[k];
        if (t->kind == KIND_NORMAL)
            t->score = -(float)json_array_size(merges) - 1;
    }
    json_array_foreach(merges, i, m)
    {
        const char *a, *b;
        size_t na, nb;
        int64_t id;
        if (!merge_parts(m, &a, &na, &b, &nb)) {
            buf_clear(&joined);
            return error_set(v->err, "%s/tokenizer.json: model.merges[%zu] is not a pair", v->dir,
                             i);
        }
        buf_reset(&joined);
        buf_add(&joined, a, na);
        buf_add(&joined, b, nb);
        float score = -(float)i;
        if (map_get(&v->ids, joined.p, joined.len, &id) && v->tokens[id].kind == KIND_NORMAL &&
            v->tokens[id].score < score)
            v->tokens[id].score = score;
    }
    buf_clear(&joined);
    return true;
}

/* The name of the folder's pre-tokenizer, or NULL with an error. */
static const char *find_pre(struct vocab_writer *v)
{
    if (v->opt->pre)
        return v->opt->pre;
    const json_t *pre = json_object_get(v->root, "pre_tokenizer");
    const json_t *steps = json_object_get(pre, "pretokenizers");
    size_t n = json_is_array(steps) ? json_array_size(steps) : pre ? 1 : 0;
    const char *pattern = NULL;
    bool digits = false, gpt2 = false, other = n == 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_is_array(steps) ? json_array_get(steps, i) : pre;
        const json_t *regex = json_object_get(json_object_get(s, "pattern"), "Regex");
        if (!strcmp(type_of(s), "ByteLevel")) {
            const json_t *use = json_object_get(s, "use_regex");
            gpt2 |= !use || json_is_true(use);
        } else if (!strcmp(type_of(s), "Split") && json_is_string(regex) && !pattern) {
            pattern = json_string_value(regex);
        } else if (!strcmp(type_of(s), "Digits") &&
                   json_is_true(json_object_get(s, "individual_digits")) && !digits) {
            digits = true;
        } else {
            other = true;
        }
    }
    if (!other && !pattern && gpt2)
        return digits ? "smollm" : "gpt-2";
    for (size_t i = 0; !other && !digits && !gpt2 && pattern &&
                       i < sizeof pre_tokenizers / sizeof *pre_tokenizers;
         i++)
        if (!strcmp(pattern, pre_tokenizers[i].pattern)) {
            /* same splitting rules, but the name tells readers more about the vocabulary */
            const char *type = json_string_value(json_object_get(v->f->config, "model_type"));
            bool glm =
                type && !strncmp(type, "glm4", 4) && !strcmp(pre_tokenizers[i].name, "llama-bpe");
            return glm ? "glm4" : pre_tokenizers[i].name;
        }
    error_set(v->err,
              "%s/tokenizer.json: pre_tokenizer: GGUF has no name for this one (pattern %.200s); "
              "--pre NAME chooses one",
              v->dir, pattern ? pattern : "none");
    return NULL;
}

/* Special ids and flags. */

/* Id of tokenizer_config.json's token `key`, or -1. */
static int64_t config_token(const struct vocab_writer *v, const char *key)
{
    const json_t *t = json_object_get(v->f->tokenizer_config, key);
    if (json_is_object(t))
        t = json_object_get(t, "content");
    int64_t id = -1;
    if (json_is_string(t) && !map_get(&v->ids, json_string_value(t), json_string_length(t), &id))
        id = -1;
    return id;
}

/* From tokenizer_config.json, else the number in config.json (the first of a list). */
static int64_t special_id(const struct vocab_writer *v, const char *which)
{
    char key[32];
    snprintf(key, sizeof key, "%s_token", which);
    int64_t id = config_token(v, key);
    if (id >= 0)
        return id;
    snprintf(key, sizeof key, "%s_token_id", which);
    const json_t *n = json_object_get(v->f->config, key);
    if (json_is_array(n))
        n = json_array_get(n, 0);
    return json_is_integer(n) && json_integer_value(n) < v->n ? json_integer_value(n) : -1;
}

/* The token text that the post-processor's template adds at the start (or end), or NULL. */
static const char *template_token(const struct vocab_writer *v, bool last, bool *known)
{
    const json_t *pp = json_object_get(v->root, "post_processor");
    const json_t *list = json_object_get(pp, "processors");
    size_t n = json_is_array(list) ? json_array_size(list) : json_is_object(pp) ? 1 : 0;
    *known = n > 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *p = json_is_array(list) ? json_array_get(list, i) : pp;
        const json_t *single = json_object_get(p, "single");
        size_t len = json_array_size(single);
        if (strcmp(type_of(p), "TemplateProcessing") != 0 || len < 2)
            continue;
        const json_t *item = json_array_get(single, last ? len - 1 : 0);
        return json_string_value(json_object_get(json_object_get(item, "SpecialToken"), "id"));
    }
    return NULL;
}

static void write_add_flag(struct vocab_writer *v, const char *which, bool last, int64_t id,
                           bool *fallback)
{
    char key[48];
    snprintf(key, sizeof key, "add_%s_token", which);
    const json_t *flag = json_object_get(v->f->tokenizer_config, key);
    bool known = false, add;
    const char *text = template_token(v, last, &known);
    if (json_is_boolean(flag)) {
        add = json_is_true(flag);
    } else if (known) {
        int64_t first = -1;
        add = text && map_get(&v->ids, text, strlen(text), &first) && first == id;
    } else if (fallback) {
        add = *fallback;
    } else {
        return;
    }
    char full[64];
    snprintf(full, sizeof full, "tokenizer.ggml.%s", key);
    gguf_set_bool(v->w, full, add && id >= 0);
}

/* The special tokens that encoders add around a text, and the number of token types. */
static void write_encoder(struct vocab_writer *v, int64_t id[4])
{
    int64_t cls = special_id(v, "cls"), sep = special_id(v, "sep"), mask = special_id(v, "mask");
    const json_t *types = json_object_get(v->f->config, "type_vocab_size");
    id[0] = cls >= 0 ? cls : id[0];
    id[1] = sep >= 0 ? sep : id[1];
    if (cls >= 0)
        gguf_set_u32(v->w, "tokenizer.ggml.cls_token_id", (uint32_t)cls);
    if (sep >= 0) /* GGUF's spelling */
        gguf_set_u32(v->w, "tokenizer.ggml.seperator_token_id", (uint32_t)sep);
    if (mask >= 0)
        gguf_set_u32(v->w, "tokenizer.ggml.mask_token_id", (uint32_t)mask);
    json_int_t n = json_is_integer(types) ? json_integer_value(types) : 1;
    gguf_set_u32(v->w, "tokenizer.ggml.token_type_count", n > 0 && n < 1 << 20 ? (uint32_t)n : 1);
}

static void write_specials(struct vocab_writer *v, bool spm)
{
    static const struct {
        const char *which, *key;
    } specials[] = {{"bos", "tokenizer.ggml.bos_token_id"},
                    {"eos", "tokenizer.ggml.eos_token_id"},
                    {"unk", "tokenizer.ggml.unknown_token_id"},
                    {"pad", "tokenizer.ggml.padding_token_id"}};
    int64_t id[4];
    for (int i = 0; i < 4; i++)
        id[i] = special_id(v, specials[i].which);
    if (v->encoder)
        write_encoder(v, id);
    for (int i = 0; i < 4; i++)
        if (id[i] >= 0)
            gguf_set_u32(v->w, specials[i].key, (uint32_t)id[i]);
    /* End-of-turn tokens that differ from the end-of-text token. */
    static const char *const turns[] = {"<|im_end|>", "<|eot_id|>"};
    for (int i = 0; i < 2; i++) {
        int64_t eot;
        if (map_get(&v->ids, turns[i], strlen(turns[i]), &eot) && eot != id[1]) {
            gguf_set_u32(v->w, "tokenizer.ggml.eot_token_id", (uint32_t)eot);
            break;
        }
    }
    bool bos = spm, eos = false;
    write_add_flag(v, "bos", false, id[0], &bos);
    write_add_flag(v, "eos", true, id[1], &eos);
}

/* SentencePiece prepends a space unless told otherwise. */
static void write_space_prefix(struct vocab_writer *v)
{
    const json_t *flag = json_object_get(v->f->tokenizer_config, "add_prefix_space");
    bool add = v->spm ? v->spm->add_space : true;
    const json_t *norm = json_object_get(v->root, "normalizer");
    const json_t *pre = json_object_get(v->root, "pre_tokenizer");
    if (json_is_boolean(flag)) {
        add = json_is_true(flag);
    } else if (v->root) {
        const json_t *list = json_object_get(norm, "normalizers"), *s;
        const char *scheme = json_string_value(json_object_get(pre, "prepend_scheme"));
        size_t i;
        add = (!strcmp(type_of(pre), "Metaspace") && !(scheme && !strcmp(scheme, "never"))) ||
              !strcmp(type_of(norm), "Prepend");
        json_array_foreach(list, i, s) add |= !strcmp(type_of(s), "Prepend");
    }
    gguf_set_bool(v->w, "tokenizer.ggml.add_space_prefix", add);
}

/* The chat template. */

static bool read_text(const char *path, struct buf *out, struct error *err)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return error_set(err, "%s: %s", path, strerror(errno));
    char part[8192];
    size_t n;
    while ((n = fread(part, 1, sizeof part, f)) > 0 && out->len < TEMPLATE_MAX)
        buf_add(out, part, n);
    bool ok = !ferror(f) && n == 0;
    fclose(f);
    return ok ? true : error_set(err, "%s: cannot read (or larger than 16 MB)", path);
}

static bool write_template(struct vocab_writer *v)
{
    const json_t *t = json_object_get(v->f->tokenizer_config, "chat_template");
    if (json_is_string(t)) {
        gguf_set_string(v->w, "tokenizer.chat_template", json_string_value(t),
                        json_string_length(t));
        return true;
    }
    if (json_is_array(t)) { /* several named templates; "default" is the main one */
        struct buf names = {0};
        size_t i, n = 0;
        json_t *e;
        json_array_foreach(t, i, e)
        {
            const char *name = json_string_value(json_object_get(e, "name"));
            const json_t *text = json_object_get(e, "template");
            char key[128] = "tokenizer.chat_template";
            if (!name || !json_is_string(text) ||
                strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_-") != strlen(name) ||
                strlen(name) > 64)
                continue;
            if (strcmp(name, "default") != 0) {
                snprintf(key, sizeof key, "tokenizer.chat_template.%s", name);
                gguf_pack_string(&names, name, strlen(name));
                n++;
            }
            gguf_set_string(v->w, key, json_string_value(text), json_string_length(text));
        }
        if (n)
            gguf_set_strings(v->w, "tokenizer.chat_templates", &names, n);
        buf_clear(&names);
        return true;
    }
    struct buf path = {0}, text = {0};
    bool ok = true;
    buf_addf(&path, "%s/chat_template.jinja", v->dir);
    if (access(path.p, F_OK) == 0) {
        ok = read_text(path.p, &text, v->err);
        if (ok)
            gguf_set_string(v->w, "tokenizer.chat_template", text.p ? text.p : "", text.len);
    }
    buf_clear(&path);
    buf_clear(&text);
    return ok;
}

static bool write_bpe(struct vocab_writer *v)
{
    const char *pre = find_pre(v);
    if (!pre || !add_base(v) || !add_all_added(v))
        return false;
    fill_unused(v);
    write_tokens(v, "gpt2", pre, false);
    if (!write_merges(v))
        return false;
    write_specials(v, false);
    return write_template(v);
}

static bool write_spm(struct vocab_writer *v)
{
    if (!(v->spm ? add_pieces(v) : add_base(v)) || !add_all_added(v))
        return false;
    fill_unused(v);
    if (!v->spm) {
        if (!scores_from_merges(v))
            return false;
        const char *unk =
            json_string_value(json_object_get(json_object_get(v->root, "model"), "unk_token"));
        int64_t id;
        if (unk && map_get(&v->ids, unk, strlen(unk), &id))
            v->tokens[id].kind = KIND_UNKNOWN;
    }
    write_tokens(v, "llama", "default", true);
    write_specials(v, true);
    write_space_prefix(v);
    return write_template(v);
}

/* WordPiece: GGUF marks tokens that begin a word with U+2581; tokenizer.json marks the others with
 * "##". */
static bool write_wordpiece(struct vocab_writer *v)
{
    const json_t *norm = json_object_get(v->root, "normalizer");
    const json_t *lower = json_object_get(norm, "lowercase");
    const json_t *accents = json_object_get(norm, "strip_accents");
    const char *prefix = json_string_value(
        json_object_get(json_object_get(v->root, "model"), "continuing_subword_prefix"));
    if (strcmp(type_of(norm), "BertNormalizer") != 0 || (prefix && strcmp(prefix, "##") != 0))
        return fail(v, "tokenizer.json", "a WordPiece that is not BERT's has no place in a GGUF");
    if (!add_base(v) || !add_all_added(v))
        return false;
    fill_unused(v);
    for (int i = 0; i < v->n; i++) {
        struct token *t = &v->tokens[i];
        struct buf b = {0};
        if (t->kind != KIND_NORMAL)
            continue;
        if (t->len > 2 && !memcmp(t->text, "##", 2)) {
            t->text += 2;
            t->len -= 2;
            continue;
        }
        buf_adds(&b, "\u2581");
        buf_add(&b, t->text, t->len);
        t->len = b.len;
        t->text = t->own = buf_take(&b);
    }
    write_tokens(v, "bert", "default", false);
    write_specials(v, false);
    bool lowers = !json_is_false(lower);
    gguf_set_bool(v->w, "tokenizer.ggml.normalizer.lowercase", lowers);
    gguf_set_bool(v->w, "tokenizer.ggml.normalizer.strip_accents",
                  json_is_boolean(accents) ? json_is_true(accents) : lowers);
    return true;
}

/* The base64 character map of a normalizer or one of its steps; NULL: none. */
static const char *charsmap_of(const json_t *norm)
{
    const json_t *steps = json_object_get(norm, "normalizers"), *s;
    const char *map = json_string_value(json_object_get(norm, "precompiled_charsmap"));
    size_t i;
    json_array_foreach(steps, i, s) if (!map) map =
        json_string_value(json_object_get(s, "precompiled_charsmap"));
    return map;
}

static bool add_unigram(struct vocab_writer *v)
{
    const json_t *model = json_object_get(v->root, "model"), *pieces, *p;
    const json_t *unk = json_object_get(model, "unk_id");
    size_t i;
    pieces = json_object_get(model, "vocab");
    if (!json_array_size(pieces))
        return fail(v, "tokenizer.json", "model.vocab is missing or empty");
    json_array_foreach(pieces, i, p)
    {
        const json_t *text = json_array_get(p, 0), *score = json_array_get(p, 1);
        if (!json_is_string(text) || !json_is_number(score))
            return error_set(v->err, "%s/tokenizer.json: model.vocab[%zu] is not a pair", v->dir,
                             i);
        int kind = json_is_integer(unk) && json_integer_value(unk) == (json_int_t)i ? KIND_UNKNOWN
                                                                                    : KIND_NORMAL;
        if (!set_token(v, (json_int_t)i, json_string_value(text), json_string_length(text), kind,
                       (float)json_number_value(score), false))
            return false;
    }
    return true;
}

static bool write_unigram(struct vocab_writer *v)
{
    const char *map = charsmap_of(json_object_get(v->root, "normalizer"));
    struct buf bytes = {0};
    if (!add_unigram(v) || !add_all_added(v))
        return false;
    fill_unused(v);
    write_tokens(v, "t5", "default", true);
    write_specials(v, true);
    write_space_prefix(v);
    gguf_set_bool(v->w, "tokenizer.ggml.remove_extra_whitespaces", true);
    bool ok = !map || base64_decode(map, strlen(map), &bytes) ||
              fail(v, "tokenizer.json", "precompiled_charsmap: not base64");
    if (ok && bytes.len)
        gguf_set_array(v->w, "tokenizer.ggml.precompiled_charsmap", META_U8, bytes.p, bytes.len);
    buf_clear(&bytes);
    return ok;
}

static bool open_sources(struct vocab_writer *v)
{
    struct buf path = {0};
    bool ok = true;
    buf_addf(&path, "%s/tokenizer.json", v->dir);
    if (access(path.p, F_OK) == 0) {
        v->root = json_load_path(path.p, TOKENIZER_MAX, v->err);
        ok = v->root != NULL;
    }
    buf_reset(&path);
    buf_addf(&path, "%s/tokenizer.model", v->dir);
    const json_t *model = json_object_get(v->root, "model");
    bool wanted = !v->root || json_is_true(json_object_get(model, "byte_fallback"));
    if (ok && wanted && access(path.p, F_OK) == 0) {
        v->spm = sentencepiece_open(path.p, v->err);
        ok = v->spm != NULL;
    }
    buf_clear(&path);
    return ok;
}

static bool write_any(struct vocab_writer *v)
{
    if (!open_sources(v))
        return false;
    const json_t *model = json_object_get(v->root, "model");
    if (!v->root && !v->spm) {
        if (v->opt->note)
            v->opt->note(v->opt->arg, "no tokenizer.json or tokenizer.model in the folder: the "
                                      "GGUF gets no vocabulary");
        gguf_set_string(v->w, "tokenizer.ggml.model", "no_vocab", 8);
        if (v->encoder)
            write_encoder(v, (int64_t[4]){-1, -1, -1, -1});
        return true;
    }
    if (v->spm)
        return write_spm(v);
    if (v->encoder && !strcmp(type_of(model), "WordPiece"))
        return write_wordpiece(v);
    if (v->encoder && !strcmp(type_of(model), "Unigram"))
        return write_unigram(v);
    if (strcmp(type_of(model), "BPE") != 0)
        return error_set(v->err, "%s/tokenizer.json: model.type '%.40s' is not supported (BPE is)",
                         v->dir, type_of(model));
    return json_is_true(json_object_get(model, "byte_fallback")) ? write_spm(v) : write_bpe(v);
}

bool vocab_write(struct gguf_writer *w, const struct tensorfile *f, const struct config *c,
                 const struct convert_options *opt, struct error *err)
{
    struct vocab_writer v = {.w = w,
                             .f = f,
                             .opt = opt,
                             .dir = convert_dir(f),
                             .tokens = mem_zalloc((size_t)c->n_vocab, sizeof *v.tokens),
                             .n = c->n_vocab,
                             .encoder = c->family->encoder,
                             .err = err};
    map_init(&v.ids, (size_t)c->n_vocab);
    bool ok = write_any(&v);
    for (int i = 0; i < v.n; i++)
        mem_free(v.tokens[i].own);
    mem_free(v.tokens);
    map_clear(&v.ids);
    json_decref(v.root);
    sentencepiece_close(v.spm);
    mem_free(v.dir);
    return ok;
}
