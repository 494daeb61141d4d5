/*
 * Tokenizers from files: what GGUF metadata makes of them, and hostile tokenizer.json and GGUF files,
 * which must end in an error that names the field.
 */
#include "tokenizer_parts.h"

/* --------------------------------------------------------------------------------- hostile: JSON */

static const struct {
    const char *json, *want;
} bad_json[] = {
    {"[]", "not a JSON object"},
    {"{}", "model: not an object"},
    {"{'model':{}}", "model.vocab: not an object"},
    {"{'model':{'type':'Magic'}}", "model.type: \"Magic\" is not supported"},
    {"{'model':{'type':'BPE','vocab':[],'merges':[]}}", "model.vocab: not an object"},
    {"{'model':{'type':'BPE','vocab':{},'merges':[]}}", "model.vocab: no tokens"},
    {"{'model':{'type':'BPE','vocab':{'a':0}}}", "model.merges: not a list"},
    {"{'model':{'type':'BPE','vocab':{'a':'0'},'merges':[]}}",
     "model.vocab[\"a\"]: not an integer"},
    {"{'model':{'type':'BPE','vocab':{'a':-1},'merges':[]}}", "model.vocab[\"a\"]: id -1"},
    {"{'model':{'type':'BPE','vocab':{'a':2000000000},'merges':[]}}",
     "model.vocab: id 2000000000 is out of range"},
    {"{'model':{'type':'BPE','vocab':{'a':1,'b':1},'merges':[]}}", "both have id 1"},
    {"{'model':{'type':'BPE','vocab':{'a':1,'a':2},'merges':[]}}", "duplicate"},
    {"{'model':{'type':'BPE','vocab':{'a':0},'merges':['a b']}}",
     "model.merges[0]: \"b\" is not in the vocabulary"},
    {"{'model':{'type':'BPE','vocab':{'a':0,'b':1},'merges':['a b']}}",
     "model.merges[0]: the merged token \"ab\" is not in the vocabulary"},
    {"{'model':{'type':'BPE','vocab':{'a':0},'merges':['a']}}", "model.merges[0]: not a pair"},
    {"{'model':{'type':'BPE','vocab':{'a':0},'merges':[['a']]}}", "model.merges[0]: not a pair"},
    {"{'model':{'type':'BPE','vocab':{'a':0},'merges':[5]}}", "model.merges[0]: not a pair"},
    {"{'model':{'type':'BPE','vocab':{'a':0},'merges':[],'unk_token':'u'}}", "model.unk_token"},
    {"{'model':{'type':'BPE','vocab':{'a':0},'merges':[],'dropout':0.1}}", "model.dropout"},
    {"{'model':{'type':'Unigram','vocab':{'a':0}}}", "model.vocab: not a list"},
    {"{'model':{'type':'Unigram','vocab':[['a']]}}", "model.vocab[0]: not [string, number]"},
    {"{'model':{'type':'Unigram','vocab':[['a',1e300]]}}", "model.vocab[0]: score"},
    {"{'model':{'type':'Unigram','vocab':[['a',0],['a',0]]}}", "tokens 0 and 1 are both \"a\""},
    {"{'model':{'type':'Unigram','unk_id':7,'vocab':[['a',0]]}}",
     "model.unk_id: 7 is out of range"},
#define WITH(FIELD, VALUE)                                                                         \
    "{'model':{'type':'BPE','vocab':{'a':0},'merges':[]},'" FIELD "':" VALUE "}"
    {WITH("normalizer", "{'type':'Odd'}"), "normalizer: normalizer \"Odd\" is not supported"},
    {WITH("normalizer", "{}"), "normalizer: no \"type\""},
    {WITH("normalizer", "{'type':'Sequence'}"), "normalizer.normalizers: not a list"},
    {WITH("normalizer", "{'type':'Sequence','normalizers':[{'type':'NFC'},{'type':'x'}]}"),
     "normalizer.normalizers[1]"},
    {WITH("normalizer", "{'type':'Replace','pattern':{'Regex':'('},'content':''}"),
     "normalizer: pattern \"(\""},
    {WITH("normalizer", "{'type':'Precompiled','precompiled_charsmap':'AAAA'}"),
     "precompiled_charsmap"},
    {WITH("normalizer", "{'type':'Precompiled','precompiled_charsmap':'!'}"), "not base64"},
    {WITH("normalizer", "{'type':'Prepend'}"), "normalizer.prepend: not a string"},
    {WITH("pre_tokenizer", "{'type':'Odd'}"), "pre_tokenizer: pre_tokenizer \"Odd\""},
    {WITH("pre_tokenizer", "{'type':'Split'}"), "pre_tokenizer.pattern"},
    {WITH("pre_tokenizer", "{'type':'Split','pattern':{'Regex':'['}}"),
     "pre_tokenizer: pattern \"[\": unclosed ["},
    {WITH("pre_tokenizer", "{'type':'Split','pattern':{'Regex':'a{2,1}'}}"), "pattern \"a{2,1}\""},
    {WITH("pre_tokenizer", "{'type':'Split','pattern':{'Regex':'x\\\\'}}"), "trailing backslash"},
    {WITH("pre_tokenizer", "{'type':'Split','pattern':{'String':'a'},'behavior':'Odd'}"),
     "pre_tokenizer.behavior: \"Odd\""},
    {WITH("pre_tokenizer", "{'type':'Metaspace','replacement':'ab'}"), "replacement"},
    {WITH("decoder", "{'type':'Odd'}"), "decoder: decoder \"Odd\""},
    {WITH("decoder", "{'type':'Sequence','decoders':[{'type':'Fuse'},{'type':'ByteLevel'}]}"),
     "after Fuse"},
    {WITH("post_processor", "{'type':'Odd'}"), "post_processor: post_processor \"Odd\""},
    {WITH("post_processor", "{'type':'TemplateProcessing'}"), "post_processor.single"},
    {WITH("post_processor", "{'type':'TemplateProcessing','single':[{'SpecialToken':{'id':'x'}}]}"),
     "post_processor.special_tokens[\"x\"].ids"},
    {WITH("post_processor", "{'type':'BertProcessing','cls':['x',99],'sep':['x',0]}"),
     "post_processor.cls"},
    {WITH("added_tokens", "{}"), "added_tokens: not a list"},
    {WITH("added_tokens", "[{'content':'x'}]"), "added_tokens[0].id"},
    {WITH("added_tokens", "[{'id':1}]"), "added_tokens[0].content"},
    {WITH("added_tokens", "[{'id':99999999,'content':'x'}]"), "added_tokens[0]: id 99999999"},
    {WITH("added_tokens", "[{'id':0,'content':'x'}]"), "added_tokens[0]: id 0 is \"a\""},
};

static void test_bad_json(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_json / sizeof *bad_json; i++) {
        char *copy = mem_strdup(bad_json[i].json);
        for (char *p = copy; *p; p++)
            if (*p == '\'')
                *p = '"';
        struct error err = {0};
        struct tokenizer *t = tokenizer_load_json(copy, strlen(copy), "x.json", NULL, &err);
        if (t)
            fail_msg("%s was accepted", bad_json[i].json);
        if (!strstr(err.msg, bad_json[i].want) || strncmp(err.msg, "x.json: ", 8))
            fail_msg("%s:\n  want %s\n  got  %s", bad_json[i].json, bad_json[i].want, err.msg);
        mem_free(copy);
    }
    /* nesting without end: too much for the loader, too much for any JSON */
    for (int levels = 40; levels <= 200; levels += 160) {
        struct buf deep = {0};
        buf_adds(&deep, "{\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]},"
                        "\"pre_tokenizer\":");
        for (int i = 0; i < levels; i++)
            buf_adds(&deep, "{\"type\":\"Sequence\",\"pretokenizers\":[");
        buf_adds(&deep, "{\"type\":\"Digits\"}");
        for (int i = 0; i < levels; i++)
            buf_adds(&deep, "]}");
        buf_adds(&deep, "}");
        struct error err = {0};
        assert_null(tokenizer_load_json(deep.p, deep.len, "x", NULL, &err));
        assert_non_null(strstr(err.msg, "nested too deeply"));
        buf_clear(&deep);
    }
}

static void test_costly_regex(void **state)
{
    (void)state;
    json_t *root = json_pack("{s:o, s:o}", "model", byte_bpe(NULL, 0), "pre_tokenizer",
                             parse(RE("(?:a|aa)+$|(a+)+x")));
    struct tokenizer *t = must_load(root, NULL);
    json_decref(root);
    struct buf text = {0};
    for (int i = 0; i < 5000; i++)
        buf_addc(&text, 'a');
    buf_addc(&text, 'b');
    struct token_list l = {0};
    struct error err = {0};
    token_list_add(&l, 42);
    assert_false(tokenizer_encode(t, text.p, text.len, 0, &l, &err));
    assert_non_null(strstr(err.msg, "pre_tokenizer: pattern"));
    assert_non_null(strstr(err.msg, "too costly"));
    assert_int_equal(l.n, 1); /* nothing half done is left behind */
    token_list_clear(&l);
    buf_clear(&text);
    tokenizer_free(t);
}

/* A tokenizer.json with a bit of everything, for mutations. */
static char *rich_json(void)
{
    json_t *root = parse("{'version':'1.0','truncation':null,'added_tokens':[" ADDED(
        300, "<s>",
        "'special':true,'normalized':false") "," ADDED(301, "<|im_end|>",
                                                       "'special':true,'lstrip':true,'rstrip':"
                                                       "true") "," ADDED(302, "tool",
                                                                         "'special':false,"
                                                                         "'single_word':"
                                                                         "true,'"
                                                                         "normalized':"
                                                                         "true") "],"
                                                                                 "'normali"
                                                                                 "zer':{'"
                                                                                 "type':'"
                                                                                 "Sequence"
                                                                                 "','"
                                                                                 "normaliz"
                                                                                 "ers':[{'"
                                                                                 "type':'"
                                                                                 "NFC'},{'"
                                                                                 "type':'"
                                                                                 "Replace'"
                                                                                 ",'"
                                                                                 "pattern'"
                                                                                 ":"
                                                                                 "{'Regex'"
                                                                                 ":'\\\\s{"
                                                                                 "2,}'},'"
                                                                                 "content'"
                                                                                 ":' "
                                                                                 "'},{'"
                                                                                 "type':'"
                                                                                 "Lowercas"
                                                                                 "e'},{'"
                                                                                 "type':'"
                                                                                 "Strip'}]"
                                                                                 "},"
                                                                                 "'pre_"
                                                                                 "tokenize"
                                                                                 "r':{'"
                                                                                 "type':'"
                                                                                 "Sequence"
                                                                                 "','"
                                                                                 "pretoken"
                                                                                 "izers':["
                                                                                 "{'type':"
                                                                                 "'Split',"
                                                                                 "'pattern"
                                                                                 "':{'"
                                                                                 "Regex':"
                                                                                 "'[^"
                                                                                 "\\\\r\\"
                                                                                 "\\n\\\\p"
                                                                                 "{L}"
                                                                                 "\\\\p{N}"
                                                                                 "]?\\\\p{"
                                                                                 "L}+|[a-"
                                                                                 "z&&[^"
                                                                                 "aeiou]]|"
                                                                                 "\\\\s+(?"
                                                                                 "!\\\\S)'"
                                                                                 "},'"
                                                                                 "behavior"
                                                                                 "':"
                                                                                 "'Isolate"
                                                                                 "d','"
                                                                                 "invert':"
                                                                                 "false},{"
                                                                                 "'type':'"
                                                                                 "ByteLeve"
                                                                                 "l','add_"
                                                                                 "prefix_"
                                                                                 "space':"
                                                                                 "true},{'"
                                                                                 "type':'"
                                                                                 "Digits',"
                                                                                 "'individ"
                                                                                 "ual_"
                                                                                 "digits':"
                                                                                 "true},{'"
                                                                                 "type':'"
                                                                                 "Punctuat"
                                                                                 "ion','"
                                                                                 "behavior"
                                                                                 "':'"
                                                                                 "Contiguo"
                                                                                 "us'}]},"
                                                                                 "'post_"
                                                                                 "processo"
                                                                                 "r':{'"
                                                                                 "type':'"
                                                                                 "Template"
                                                                                 "Processi"
                                                                                 "ng','"
                                                                                 "single':"
                                                                                 "[{'"
                                                                                 "SpecialT"
                                                                                 "oken':{'"
                                                                                 "id':'<s>"
                                                                                 "'}},"
                                                                                 "{'"
                                                                                 "Sequence"
                                                                                 "':{'id':"
                                                                                 "'A'}}],'"
                                                                                 "special_"
                                                                                 "tokens':"
                                                                                 "{'<s>':{"
                                                                                 "'id':'<"
                                                                                 "s>','"
                                                                                 "ids':["
                                                                                 "300]}}},"
                                                                                 "'decoder"
                                                                                 "':{'"
                                                                                 "type':'"
                                                                                 "Sequence"
                                                                                 "','"
                                                                                 "decoders"
                                                                                 "':[{'"
                                                                                 "type':'"
                                                                                 "ByteLeve"
                                                                                 "l'},{'"
                                                                                 "type':'"
                                                                                 "Fuse'},"
                                                                                 "{'type':"
                                                                                 "'Strip',"
                                                                                 "'content"
                                                                                 "':' "
                                                                                 "','"
                                                                                 "start':"
                                                                                 "1,'stop'"
                                                                                 ":0}]}}");
    static const char *const merges[] = {"a b", "ab c", "Ġ a", "Ġa b", "Ã ©"};
    json_object_set_new(root, "model", byte_bpe(merges, 5));
    char *text = json_dumps(root, 0);
    json_decref(root);
    return text;
}

static void use(const struct tokenizer *t)
{
    static const char text[] =
        "<s>The Café abc 123,, tool \xff\xfe <|im_end|> ok\n\n中文 🦙 abcabc";
    for (int flags = 0; flags < 4; flags++) {
        struct token_list l = {0};
        struct error err = {0};
        struct buf out = {0};
        if (tokenizer_encode(t, text, sizeof text - 1, flags, &l, &err)) {
            tokenizer_decode(t, l.ids, l.n, flags & 1, &out);
            struct detok d = {0};
            for (size_t i = 0; i < l.n; i++)
                detok_push(&d, t, l.ids[i], flags & 1, &out);
            detok_flush(&d, &out);
        } else {
            assert_true(err.msg[0]);
        }
        buf_clear(&out);
        token_list_clear(&l);
    }
}

/* Replaces, inserts or removes a few bytes or whole JSON-looking pieces. */
static void mutate(struct rng *rng, struct buf *b)
{
    static const char *const pieces[] = {"null", "0",    "-1",   "{}",         "[]",
                                         "\"\"", "1e9",  "true", "4294967296", "[",
                                         "}",    "\\\\", "(",    "+",          "\"type\""};
    for (uint32_t times = 1 + rng_below(rng, 3); times; times--) {
        size_t at = rng_below(rng, (uint32_t)b->len);
        switch (rng_below(rng, 4)) {
        case 0:
            b->p[at] = (char)rng_next(rng);
            break;
        case 1:
            b->p[at] = "0123456789{}[]\",:.()+*?\\"[rng_below(rng, 24)];
            break;
        case 2: {
            size_t n = 1 + rng_below(rng, 20);
            if (n > b->len - at)
                n = b->len - at;
            memmove(b->p + at, b->p + at + n, b->len - at - n);
            b->len -= n;
            break;
        }
        default: {
            const char *s = pieces[rng_below(rng, sizeof pieces / sizeof *pieces)];
            size_t n = strlen(s);
            buf_reserve(b, n);
            memmove(b->p + at + n, b->p + at, b->len - at);
            memcpy(b->p + at, s, n);
            b->len += n;
        }
        }
        if (b->len < 2)
            buf_adds(b, "{}");
    }
}

static void test_mutated_json(void **state)
{
    (void)state;
    char *text = rich_json();
    size_t n = strlen(text);
    struct rng rng = {13};
    struct buf b = {0};
    int good = 0;
    struct error err = {0};
    struct tokenizer *t = tokenizer_load_json(text, n, "m", NULL, &err);
    if (!t)
        fail_msg("%s", err.msg);
    use(t);
    tokenizer_free(t);
    for (int i = 0; i < 6000; i++) {
        buf_reset(&b);
        buf_add(&b, text, n);
        mutate(&rng, &b);
        memset(&err, 0, sizeof err);
        t = tokenizer_load_json(b.p, b.len, "m", NULL, &err);
        if (t) {
            good++;
            use(t);
            tokenizer_free(t);
        } else {
            assert_true(!strncmp(err.msg, "m: ", 3));
        }
    }
    printf("%d of 6000 mutated files were still good\n", good);
    buf_clear(&b);
    free(text);
}

/* --------------------------------------------------------------------------------- hostile: GGUF */

static void put32(struct buf *b, uint32_t v)
{
    buf_add(b, &v, 4);
}

static void put64(struct buf *b, uint64_t v)
{
    buf_add(b, &v, 8);
}

static void put_str(struct buf *b, const char *s)
{
    put64(b, strlen(s));
    buf_adds(b, s);
}

struct gguf {
    struct buf b;
    uint64_t n;
};

static void meta_string(struct gguf *g, const char *key, const char *value)
{
    put_str(&g->b, key);
    put32(&g->b, META_STRING);
    put_str(&g->b, value);
    g->n++;
}

static void meta_u32(struct gguf *g, const char *key, uint32_t value)
{
    put_str(&g->b, key);
    put32(&g->b, META_U32);
    put32(&g->b, value);
    g->n++;
}

/* A list of strings separated by spaces. */
static void meta_strings(struct gguf *g, const char *key, const char *list, char separator)
{
    put_str(&g->b, key);
    put32(&g->b, META_ARRAY);
    put32(&g->b, META_STRING);
    size_t at = g->b.len;
    uint64_t n = 0;
    put64(&g->b, 0);
    while (*list) {
        const char *end = strchrnul(list, separator);
        put64(&g->b, (uint64_t)(end - list));
        buf_add(&g->b, list, (size_t)(end - list));
        n++;
        list = *end ? end + 1 : end;
    }
    memcpy(g->b.p + at, &n, 8);
    g->n++;
}

static void meta_i32s(struct gguf *g, const char *key, int n, const int *v)
{
    put_str(&g->b, key);
    put32(&g->b, META_ARRAY);
    put32(&g->b, META_I32);
    put64(&g->b, (uint64_t)n);
    for (int i = 0; i < n; i++)
        put32(&g->b, (uint32_t)v[i]);
    g->n++;
}

static void meta_f32s(struct gguf *g, const char *key, int n, const float *v)
{
    put_str(&g->b, key);
    put32(&g->b, META_ARRAY);
    put32(&g->b, META_F32);
    put64(&g->b, (uint64_t)n);
    buf_add(&g->b, v, (size_t)n * 4);
    g->n++;
}

static void gguf_finish(struct gguf *g, struct buf *out)
{
    buf_add(out, "GGUF", 4);
    put32(out, 3);
    put64(out, 0);
    put64(out, g->n);
    buf_add(out, g->b.p, g->b.len);
    while (out->len % 32)
        buf_addc(out, 0);
    buf_clear(&g->b);
}

static struct tokenizer *load_gguf(const struct buf *b, struct error *err)
{
    struct tensorfile *f = tensorfile_open_memory(b->p, b->len, "m.gguf", err);
    struct tokenizer *t = f ? tokenizer_load(f, err) : NULL;
    tensorfile_close(f);
    return t;
}

#define K(NAME) "tokenizer.ggml." NAME

static void spm_gguf(struct buf *out)
{
    struct gguf g = {0};
    meta_string(&g, "general.architecture", "llama");
    meta_string(&g, K("model"), "llama");
    meta_strings(&g, K("tokens"),
                 "<unk> <s> </s> <0x41> <0xC3> <0xA9> ▁ a b ab ▁ab c bc [tool] <|im_end|> cd", ' ');
    meta_i32s(&g, K("token_type"), 16, (int[]){2, 3, 3, 6, 6, 6, 1, 1, 1, 1, 1, 1, 1, 4, 3, 1});
    meta_f32s(&g, K("scores"), 16,
              (float[]){0, 0, 0, 0, 0, 0, -9, -8, -7, -2, -3, -6, -1, 0, 0, -1.5f});
    meta_u32(&g, K("bos_token_id"), 1);
    meta_u32(&g, K("eos_token_id"), 2);
    gguf_finish(&g, out);
}

static void bpe_gguf(struct buf *out, const char *pre, const char *merges)
{
    struct gguf g = {0};
    meta_string(&g, "general.architecture", "qwen2");
    meta_string(&g, K("model"), "gpt2");
    meta_string(&g, K("pre"), pre);
    meta_strings(&g, K("tokens"), "a b c Ġ ab abc Ġa <|endoftext|> <tool> [PAD1]", ' ');
    meta_i32s(&g, K("token_type"), 10, (int[]){1, 1, 1, 1, 1, 1, 1, 3, 4, 5});
    if (merges)
        meta_strings(&g, K("merges"), merges, ',');
    meta_u32(&g, K("eos_token_id"), 7);
    gguf_finish(&g, out);
}

static void test_gguf(void **state)
{
    (void)state;
    struct error err = {0};
    struct buf b = {0};
    spm_gguf(&b);
    struct tokenizer *t = load_gguf(&b, &err);
    if (!t)
        fail_msg("%s", err.msg);
    check_tokens(t, "ab", 0, "▁ab");
    check_tokens(t, "abc", 0, "▁|a|bc"); /* bc before ab before ▁ab: by score */
    check_tokens(t, "abcd", 0, "▁|a|bc|<unk>");
    check_tokens(t, "Aé<s>", 0, "▁|<0x41>|<0xC3>|<0xA9>|<unk>|<unk>|<unk>");
    check_tokens(t, "a<s>a", TOKENIZE_SPECIAL, "▁|a|<s>|▁|a");
    check_tokens(t, "a[tool]", 0, "▁|a|[tool]");
    check_ids(t, "ab", TOKENIZE_BOS, "1 10");
    check_ids(t, "<s>ab", TOKENIZE_BOS | TOKENIZE_SPECIAL, "1 10");
    assert_true(tokenizer_is_end(t, 14));
    check_decode(t, (int32_t[]){1, 10, 6, 12}, 4, false, "ab bc");
    tokenizer_free(t);
    /* "cd" is a token though "d" is none: c and d still merge */
    t = load_gguf(&b, &err);
    check_tokens(t, "cd", 0, "▁|cd");
    tokenizer_free(t);

    buf_reset(&b);
    bpe_gguf(&b, "qwen2", "a b,ab c,Ġ a");
    t = load_gguf(&b, &err);
    if (!t)
        fail_msg("%s", err.msg);
    check_tokens(t, "abc aab", 0, "abc| a|ab");
    check_tokens(t, "a<tool>b<|endoftext|>", TOKENIZE_SPECIAL, "a|<tool>|b|<|endoftext|>");
    check_decode(t, (int32_t[]){5, 6, 9, 7}, 4, false, "abc a");
    tokenizer_free(t);
    /* Gemma 4: merges, spaces as U+2581, no words, bytes to fall back on */
    struct gguf g = {0};
    meta_string(&g, "general.architecture", "gemma4");
    meta_string(&g, K("model"), "gemma4");
    meta_strings(&g, K("tokens"), "<pad> <eos> <bos> <0x41> a b ab ▁ ▁ab c ▁ab▁c <turn|> abc", ' ');
    meta_i32s(&g, K("token_type"), 13, (int[]){3, 3, 3, 6, 1, 1, 1, 1, 1, 1, 1, 3, 1});
    meta_strings(&g, K("merges"), "a b,▁ ab,▁ c,▁ab ▁c", ',');
    meta_u32(&g, K("bos_token_id"), 2);
    meta_u32(&g, K("eos_token_id"), 1);
    buf_reset(&b);
    gguf_finish(&g, &b);
    t = load_gguf(&b, &err);
    assert_null(t); /* ▁c is no token */
    assert_non_null(strstr(err.msg, "merges[2]"));
    g = (struct gguf){0};
    meta_string(&g, "general.architecture", "gemma4");
    meta_string(&g, K("model"), "gemma4");
    meta_strings(&g, K("tokens"), "<pad> <eos> <bos> <0x41> a b ab ▁ ▁ab c ▁c <turn|> ▁ab▁c", ' ');
    meta_i32s(&g, K("token_type"), 13, (int[]){3, 3, 3, 6, 1, 1, 1, 1, 1, 1, 1, 3, 1});
    meta_strings(&g, K("merges"), "a b,▁ ab,▁ c,▁ab ▁c", ',');
    meta_u32(&g, K("bos_token_id"), 2);
    meta_u32(&g, K("eos_token_id"), 1);
    buf_reset(&b);
    gguf_finish(&g, &b);
    t = load_gguf(&b, &err);
    if (!t)
        fail_msg("%s", err.msg);
    check_tokens(t, "ab ab c", 0, "ab|▁ab▁c"); /* merges go over spaces */
    check_tokens(t, "aA", 0, "a|<0x41>");
    check_ids(t, "ab", TOKENIZE_BOS, "2 6");
    check_decode(t, (int32_t[]){2, 6, 12, 3}, 4, false, "ab ab cA");
    tokenizer_free(t);
    /* without merges: tiktoken's rule, the lowest id first */
    buf_reset(&b);
    bpe_gguf(&b, "kimi-k2", NULL);
    t = load_gguf(&b, &err);
    if (!t)
        fail_msg("%s", err.msg);
    check_tokens(t, "abc ab", 0, "abc| |ab");
    tokenizer_free(t);
    buf_clear(&b);
}

static void expect_gguf_error(struct gguf *g, const char *want)
{
    struct buf b = {0};
    struct error err = {0};
    gguf_finish(g, &b);
    struct tokenizer *t = load_gguf(&b, &err);
    if (t)
        fail_msg("accepted, wanted: %s", want);
    if (!strstr(err.msg, want) || strncmp(err.msg, "m.gguf: ", 8))
        fail_msg("want %s\n  got %s", want, err.msg);
    buf_clear(&b);
}

static void test_bad_gguf(void **state)
{
    (void)state;
    struct gguf g = {0};
    meta_string(&g, "general.architecture", "x");
    expect_gguf_error(&g, K("model") ": missing");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "no_vocab");
    expect_gguf_error(&g, "no vocabulary");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "rwkv");
    meta_strings(&g, K("tokens"), "a", ' ');
    expect_gguf_error(&g, K("model") ": \"rwkv\" is not supported");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "llama");
    expect_gguf_error(&g, K("tokens") ": missing");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "llama");
    meta_u32(&g, K("tokens"), 3);
    expect_gguf_error(&g, K("tokens") ": not an array of strings");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "gpt2");
    meta_string(&g, K("pre"), "unheard-of");
    meta_strings(&g, K("tokens"), "a", ' ');
    expect_gguf_error(&g, K("pre") ": pre-tokenizer \"unheard-of\" is not supported");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "gpt2");
    meta_strings(&g, K("tokens"), "a b a", ' ');
    expect_gguf_error(&g, K("tokens") ": tokens 0 and 2 are both \"a\"");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "gpt2");
    meta_strings(&g, K("tokens"), "a b", ' ');
    meta_strings(&g, K("merges"), "a b", ',');
    expect_gguf_error(&g, K("merges") "[0]: the merged token \"ab\" is not in the vocabulary");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "gpt2");
    meta_strings(&g, K("tokens"), "a b", ' ');
    meta_strings(&g, K("merges"), "ab", ',');
    expect_gguf_error(&g, K("merges") "[0]: not two tokens");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "gpt2");
    meta_strings(&g, K("tokens"), "a b", ' ');
    meta_i32s(&g, K("token_type"), 1, (int[]){1});
    expect_gguf_error(&g, K("token_type") ": 1 types for 2 tokens");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "gpt2");
    meta_strings(&g, K("tokens"), "a b", ' ');
    meta_i32s(&g, K("token_type"), 2, (int[]){1, 77});
    expect_gguf_error(&g, K("token_type") "[1]: type 77");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "llama");
    meta_strings(&g, K("tokens"), "a b", ' ');
    meta_f32s(&g, K("scores"), 2, (float[]){0, __builtin_nanf("")});
    expect_gguf_error(&g, K("scores") "[1]: ");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "gpt2");
    meta_strings(&g, K("tokens"), "a b", ' ');
    meta_u32(&g, K("eos_token_id"), 2);
    expect_gguf_error(&g, K("eos_token_id") ": 2 is out of range (2 tokens)");
    g = (struct gguf){0};
    meta_string(&g, K("model"), "t5");
    meta_strings(&g, K("tokens"), "a b", ' ');
    expect_gguf_error(&g, K("scores") ": missing");
}

static void test_mutated_gguf(void **state)
{
    (void)state;
    struct rng rng = {14};
    struct buf files[2] = {{0}}, b = {0};
    spm_gguf(&files[0]);
    bpe_gguf(&files[1], "llama-bpe", "a b,ab c,Ġ a");
    int good = 0;
    for (int i = 0; i < 20000; i++) {
        const struct buf *f = &files[i % 2];
        buf_reset(&b);
        buf_add(&b, f->p, i < 2000 ? rng_below(&rng, (uint32_t)f->len) : f->len);
        for (uint32_t k = i < 2000 ? 0 : 1 + rng_below(&rng, 3); k; k--)
            b.p[rng_below(&rng, (uint32_t)b.len)] =
                (char)(rng_below(&rng, 2) ? rng_next(&rng) : rng_below(&rng, 16));
        struct error err = {0};
        struct tokenizer *t = load_gguf(&b, &err);
        if (t) {
            good++;
            use(t);
            tokenizer_free(t);
        } else {
            assert_true(!strncmp(err.msg, "m.gguf: ", 8));
        }
    }
    printf("%d of 20000 mutated files were still good\n", good);
    buf_clear(&files[0]);
    buf_clear(&files[1]);
    buf_clear(&b);
}
int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_json),     cmocka_unit_test(test_costly_regex),
        cmocka_unit_test(test_mutated_json), cmocka_unit_test(test_gguf),
        cmocka_unit_test(test_bad_gguf),     cmocka_unit_test(test_mutated_gguf),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
