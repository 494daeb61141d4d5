/*
 * The parts of a tokenizer one by one, on small tokenizers built here: every pre-tokenizer,
 * normalizer, model, decoder and post-processor that files may name, the pre-tokenizers that GGUF
 * files name, added tokens, BOS and EOS. Hostile files: test_tokenizer_files.c.
 */
#include "tokenizer_parts.h"

/* ------------------------------------------------------------------------------------ pre-tokenizers */

static const struct {
    const char *json, *text, *want;
} pre_cases[] = {
#define DASH "'pattern':{'String':'-'},'invert':false}"
    {"{'type':'Split','behavior':'Removed'," DASH, "the-final--countdown", "the|final|countdown"},
    {"{'type':'Split','behavior':'Isolated'," DASH, "the-final--countdown",
     "the|-|final|-|-|countdown"},
    {"{'type':'Split','behavior':'MergedWithPrevious'," DASH, "the-final--countdown",
     "the-|final-|-|countdown"},
    {"{'type':'Split','behavior':'MergedWithNext'," DASH, "the-final--countdown",
     "the|-final|-|-countdown"},
    {"{'type':'Split','behavior':'Contiguous'," DASH, "the-final--countdown",
     "the|-|final|--|countdown"},
    {"{'type':'Split','behavior':'MergedWithPrevious'," DASH, "-a-", "-|a-"},
    {"{'type':'Split','behavior':'MergedWithNext'," DASH, "-a-", "-a|-"},
#define RE_KEEP(X) "{'type':'Split','behavior':'Removed','invert':true,'pattern':{'Regex':'" X "'}}"
    {RE_KEEP("\\\\w+"), "Hey, you é_1!", "Hey|you|é_1"},
    {RE("(?=(\\\\d{3})+(?!\\\\d))"), "1234567", "1|234|567"},
    {RE("\\\\p{N}{1,3}"), "a12345", "a|123|45"},
    {RE("\\\\p{N}{1,3}+"), "a12345b", "a|12345|b"}, /* not possessive there: a repeat of a repeat */
    {RE("[\\\\p{L}&&[^\\\\p{Han}]]+"), "ab中c", "ab|中|c"},
    {RE("[^\\\\s[0-9]]+"), "ab12 c", "ab|12 |c"},
    {RE("[^(\\\\s|[.,!?…。，、।۔،])]+"), "foo. bar", "foo|. |bar"},
    {RE("[a-z&&[^aeiou]]+"), "hello", "h|e|ll|o"},
    {RE("[^a&&b]"), "ab", "a|b"},
    {RE("\\\\u4e2d"), "a中b", "a|中|b"},
    {RE("\\\\h+"), "xyz1fq", "xyz|1f|q"},
    {RE("a.b"), "a\nbacb", "a\nb|acb"},
    {RE("(?m:a.b)"), "xa\nby", "x|a\nb|y"},
    {RE("x$"), "x\nx", "x|\n|x"},
    {RE("^x"), "x\nxx", "x|\n|x|x"},
    {RE("\\\\s+"),
     "a\xe1\xa0\x8e"
     "b\xc2\x85"
     "c",
     "a\xe1\xa0\x8e"
     "b|\xc2\x85|c"}, /* not U+180E */
    {RE("[\\\\W]"), "aé,b", "aé|,|b"},
    {RE("x{,2}y"), "xxxy", "x|xxy"},
    {"{'type':'Digits','individual_digits':true}", "Call 123 please", "Call |1|2|3| please"},
    {"{'type':'Digits','individual_digits':false}", "Call 123 please", "Call |123| please"},
    {"{'type':'Punctuation'}", "Hi?! $5", "Hi|?|!| |$|5"},
    {"{'type':'Punctuation','behavior':'Contiguous'}", "Hi?! x", "Hi|?!| x"},
    {"{'type':'Whitespace'}", "Hello there!", "Hello|there|!"},
    {"{'type':'WhitespaceSplit'}", "Hello \n there!", "Hello|there!"},
    {"{'type':'CharDelimiterSplit','delimiter':'x'}", "axbxx", "a|b"},
    {"{'type':'BertPreTokenizer'}", "Hey, friend!", "Hey|,|friend|!"},
    {"{'type':'Metaspace','replacement':'▁','prepend_scheme':'always'}", "Hello my  friend",
     "▁Hello|▁my|▁|▁friend"},
    {"{'type':'Metaspace','replacement':'▁','prepend_scheme':'first','split':false}", "Hi you",
     "▁Hi▁you"},
    {"{'type':'Metaspace','replacement':'▁','prepend_scheme':'never'}", "Hi you", "Hi|▁you"},
    {"{'type':'Metaspace','replacement':'▁','add_prefix_space':true}", " Hi", "▁Hi"},
    {"{'type':'ByteLevel','add_prefix_space':true}", "It's 42 times", " It|'s| 42| times"},
    {"{'type':'ByteLevel','add_prefix_space':false}", "a  b\n\n c", "a| | b|\n\n| c"},
    {"{'type':'ByteLevel','add_prefix_space':false,'use_regex':false}", "a b", "a b"},
    {"{'type':'Sequence','pretokenizers':[{'type':'WhitespaceSplit'},{'type':'Punctuation'},"
     "{'type':'Metaspace','replacement':'_','prepend_scheme':'first'}]}",
     "a, b", "_a|,|b"},
    /* after ByteLevel, steps see the bytes in its alphabet: 0xb9 is spelled ¹, a number */
    {"{'type':'Sequence','pretokenizers':[{'type':'ByteLevel','add_prefix_space':false},"
     "{'type':'Digits'}]}",
     "a\xe1\xb9\xaf"
     "b",
     "a\xe1|\xb9|\xaf"
     "b"},
};

static void test_pretokenizers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof pre_cases / sizeof *pre_cases; i++) {
        json_t *root = json_pack("{s:o, s:o}", "model", byte_bpe(NULL, 0), "pre_tokenizer",
                                 parse(pre_cases[i].json));
        struct tokenizer *t = must_load(root, NULL);
        check_words(t, pre_cases[i].json, pre_cases[i].text, pre_cases[i].want);
        tokenizer_free(t);
        json_decref(root);
    }
}

static const struct {
    const char *name, *text, *want;
} named_cases[] = {
    {"gpt-2", "I've 1234 €s", "I|'ve| 1234| €|s"},
    {"default", "a12345, b", "a|123|45|,| b"},
    {"llama-bpe", "I'VE 12345 x\n\n y", "I|'VE| |123|45| x|\n\n| y"},
    {"qwen2", "a123\t\tb", "a|1|2|3|\t|\tb"},
    {"qwen35", "कि 12", "कि| |1|2"},
    {"deepseek-llm", "Hi\n你好 12a", "Hi|\n|你好| |12|a"},
    {"deepseek-coder", "x = 42", "x| = |4|2"},
    {"deepseek-v3", "12345你好, ok!!\n", "123|45|你好|,| ok|!!\n"},
    {"falcon", "a12345 b!!", "a|123|45| b|!!"},
    {"starcoder", "x 42", "x| |4|2"},
    {"command-r", "x 42", "x| |4|2"},
    {"smollm", "don't 7", "don|'t| |7"},
    {"tekken", "HelloWorld 12a/\n", "Hello|World| |1|2|a|/\n"},
    {"gpt-4o", "HelloWORLD's 1234", "Hello|WORLD's| |123|4"},
    {"kimi-k2", "abc中文Def 1234", "abc|中文|Def| |123|4"},
    {"stablelm2", "a 12", "a| |1|2"},
    {"dbrx", "a 1234", "a| |123|4"},
    {"olmo", "a 1234", "a| 1234"},
    {"mpt", "a  b", "a| | b"},
    {"refact", "a12", "a|1|2"},
    {"poro-chat", "hi, you (x)", "hi|,| you| (|x|)"},
    {"viking", "hi 12", "hi| |1|2"},
    {"afmoe", "1234567 12 123456", "1|234|567| |12| |123|456"},
    {"superbpe", "a1234567b", "a|1|234|567|b"},
    {"tiny_aya", "1234567", "1|234|567"},
    {"jais-2", "a      b", "a|    | | b"},
    {"bailingmoe", "I'll 12", "I|'ll| |1|2"},
    {"seed-coder", "a!\n1", "a|!|\n|1"},
    {"minicpm5", "a12345", "a|123|45"},
    {"laguna", "a\n\nb 1", "a|\n\n|b| |1"},
    {"exaone-moe", "a b 1", "a b| |1"},
    {"youtu", "한국어abc你", "한국어|abc|你"},
    {"chameleon", "a12!", "a|1|2|!"},
};

static void test_named(void **state)
{
    (void)state;
    struct error err = {0};
    for (size_t i = 0; i < sizeof named_cases / sizeof *named_cases; i++) {
        struct tokenizer *t = tokenizer_new();
        if (!pretokenizer_named(t, named_cases[i].name, &err))
            fail_msg("%s", err.msg);
        pretokenizer_finish(&t->pretokenizer);
        check_words(t, named_cases[i].name, named_cases[i].text, named_cases[i].want);
        tokenizer_free(t);
    }
    /* each name of each row compiles, and cuts without losing or changing a byte */
    struct rng rng = {11};
    int names = 0;
    for (size_t row = 0; pretokenizer_name_at(row); row++) {
        char *list = mem_strdup(pretokenizer_name_at(row)), *save = NULL;
        for (char *name = strtok_r(list, " ", &save); name; name = strtok_r(NULL, " ", &save)) {
            struct tokenizer *t = tokenizer_new();
            if (!pretokenizer_named(t, name, &err))
                fail_msg("%s", err.msg);
            struct pre_words w = {0};
            struct regex_scratch re = {0};
            struct buf text = {0};
            for (int k = 0; k < 200; k++) {
                buf_reset(&text);
                random_text(&rng, 40, &text);
                assert_true(pretokenizer_run(&t->pretokenizer, &w, &re, text.p, text.len, true,
                                             false, &err));
                size_t at = 0;
                for (size_t i = 0; i < w.n; i++) {
                    assert_int_equal(w.list[i].at, at);
                    at += w.list[i].len;
                }
                assert_int_equal(at, text.len);
            }
            buf_clear(&text);
            pre_words_clear(&w);
            regex_scratch_clear(&re);
            tokenizer_free(t);
            names++;
        }
        mem_free(list);
    }
    assert_true(names > 70);
    struct tokenizer *t = tokenizer_new();
    assert_false(pretokenizer_named(t, "no-such", &err));
    assert_non_null(strstr(err.msg, "\"no-such\" is not supported"));
    assert_false(pretokenizer_named(t, "gpt", &err)); /* not by a part of a name */
    assert_false(pretokenizer_named(t, "", &err));
    tokenizer_free(t);
}

/* -------------------------------------------------------------------------------------- normalizers */

static const struct {
    const char *json, *text, *want;
} norm_cases[] = {
    {"{'type':'NFC'}", "e\xcc\x81\xe1\x84\x80\xe1\x85\xa1", "é가"},
    {"{'type':'NFD'}", "é", "e\xcc\x81"},
    {"{'type':'NFKC'}", "ﬁ①", "fi1"},
    {"{'type':'NFKD'}", "ｶﾞ", "カ\xe3\x82\x99"},
    {"{'type':'NFC'}", "5\xe1\xab\x8c\xcc\x9e", "5\xe1\xab\x8c\xcc\x9e"}, /* U+1ACC is too young */
    {"{'type':'Lowercase'}", "ÀBC İ ΑΣ", "àbc i\xcc\x87 ασ"}, /* no final sigma: by character */
    {"{'type':'Sequence','normalizers':[{'type':'NFD'},{'type':'StripAccents'}]}", "éàü", "eau"},
    {"{'type':'Replace','pattern':{'String':' '},'content':'▁'}", "a b ", "a▁b▁"},
    {"{'type':'Replace','pattern':{'Regex':'\\\\d+'},'content':'#'}", "a12b3", "a#b#"},
    {"{'type':'Replace','pattern':{'Regex':'x*'},'content':'-'}", "ab", "-a-b-"},
    {"{'type':'Prepend','prepend':'▁'}", "a", "▁a"},
    {"{'type':'Prepend','prepend':'▁'}", "", ""},
    {"{'type':'Strip','strip_left':true,'strip_right':false}", " \n a ", "a "},
    {"{'type':'Strip','strip_left':true,'strip_right':true}", " \xe3\x80\x80 ", ""},
    {"{'type':'BertNormalizer'}", "Héllo\x01 \t中x\xef\xbf\xbd", "hello   中 x"},
    {"{'type':'BertNormalizer','lowercase':false,'strip_accents':null}", "Héllo", "Héllo"},
    {"{'type':'BertNormalizer','lowercase':false,'strip_accents':true}", "Héllo", "Hello"},
    {"{'type':'ByteLevel'}", "a é", "aĠÃ©"},
    {"{'type':'Nmt'}", "a\tb\x01\xe2\x80\x8b", "a b "},
};

static void test_normalizers(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof norm_cases / sizeof *norm_cases; i++) {
        json_t *root = json_pack("{s:o, s:o}", "model", byte_bpe(NULL, 0), "normalizer",
                                 parse(norm_cases[i].json));
        struct tokenizer *t = must_load(root, NULL);
        struct norm_scratch s = {0};
        struct regex_scratch re = {0};
        struct error err = {0};
        const char *out;
        size_t n;
        assert_true(normalizer_run(&t->normalizer, &s, &re, norm_cases[i].text,
                                   strlen(norm_cases[i].text), false, &out, &n, &err));
        const char *want = norm_cases[i].want;
        if (n != strlen(want) || memcmp(out, want, n))
            fail_msg("%s on \"%s\":\n  want %s\n  got  %.*s", norm_cases[i].json,
                     norm_cases[i].text, want, (int)n, out);
        norm_scratch_clear(&s);
        regex_scratch_clear(&re);
        tokenizer_free(t);
        json_decref(root);
    }
}

/* A charsmap with one rule, "A" -> "b": a double array of three units in use. */
static void test_charsmap(void **state)
{
    (void)state;
    uint32_t units[512] = {0};
    units[0] = 256u << 10;                                 /* root: children at 256 ^ c */
    units[256 ^ 'A'] = (uint32_t)'A' | 1u << 8 | 3u << 10; /* label A, has a leaf at ^3 */
    units[(256 ^ 'A') ^ 3] = 1u << 31 | 2;                 /* leaf: replacement at offset 2 */
    struct buf data = {0};
    uint32_t bytes = sizeof units;
    buf_add(&data, &bytes, 4);
    buf_add(&data, units, sizeof units);
    buf_add(&data, "x\0b", 4);
    struct norm_step s = {.kind = NORM_CHARSMAP};
    struct error err = {0};
    assert_true(charsmap_load(&s, (uint8_t *)data.p, data.len, &err));
    struct normalizer nz = {&s, 1};
    struct norm_scratch ns = {0};
    struct regex_scratch re = {0};
    const char *out;
    size_t n;
    assert_true(normalizer_run(&nz, &ns, &re, "xAyé", 5, false, &out, &n, &err));
    assert_int_equal(n, 5);
    assert_memory_equal(out, "xbyé", 5);
    mem_free(s.units);
    buf_clear(&s.text);
    /* any length but the right one is refused, and no contents make it read outside */
    for (size_t cut = 0; cut < data.len; cut++) {
        struct norm_step b = {.kind = NORM_CHARSMAP};
        bool ok = charsmap_load(&b, (uint8_t *)data.p, cut, &err);
        assert_true(!ok || cut == 4 + sizeof units || cut == 4 + sizeof units + 2);
        mem_free(b.units);
        buf_clear(&b.text);
    }
    struct rng rng = {12};
    for (int i = 0; i < 2000; i++) {
        for (size_t k = 4; k < 4 + sizeof units; k++)
            if (!rng_below(&rng, 3))
                data.p[k] = (char)rng_next(&rng);
        struct norm_step b = {.kind = NORM_CHARSMAP};
        assert_true(charsmap_load(&b, (uint8_t *)data.p, data.len, &err));
        struct normalizer one = {&b, 1};
        struct buf text = {0};
        random_text(&rng, 40, &text);
        assert_true(normalizer_run(&one, &ns, &re, text.p, text.len, false, &out, &n, &err));
        assert_int_equal(utf8_valid(out, n), n);
        buf_clear(&text);
        mem_free(b.units);
        buf_clear(&b.text);
    }
    norm_scratch_clear(&ns);
    regex_scratch_clear(&re);
    buf_clear(&data);
}

/* ------------------------------------------------------------------------------------------ models */

static struct tokenizer *from_text(const char *json)
{
    json_t *root = parse(json);
    struct tokenizer *t = must_load(root, NULL);
    json_decref(root);
    return t;
}

static void test_models(void **state)
{
    (void)state;
    struct tokenizer *t;
    /* merges as strings and as pairs; a character that is no token becomes <unk>, fused or not */
    t = from_text(
        "{'model':{'type':'BPE','unk_token':'?','vocab':{'?':0,'a':1,'b':2,'ab':3,'abab':4},"
        "'merges':[['a','b'],'ab ab']}}");
    check_tokens(t, "ababab", 0, "abab|ab");
    check_tokens(t, "axyb", 0, "a|?|?|b");
    tokenizer_free(t);
    t = from_text("{'model':{'type':'BPE','unk_token':'?','fuse_unk':true,"
                  "'vocab':{'?':0,'a':1,'b':2},'merges':[]}}");
    check_tokens(t, "axyb", 0, "a|?|b");
    tokenizer_free(t);
    /* no <unk>: what cannot be said is dropped */
    t = from_text("{'model':{'type':'BPE','vocab':{'a':0},'merges':[]}}");
    check_tokens(t, "axa", 0, "a|a");
    tokenizer_free(t);
    /* byte fallback, whole characters only */
    t = from_text(
        "{'model':{'type':'BPE','byte_fallback':true,'unk_token':'?','vocab':{'?':0,'a':1,"
        "'<0xC3>':2,'<0xA9>':3},'merges':[]},'decoder':{'type':'Sequence','decoders':["
        "{'type':'ByteFallback'},{'type':'Fuse'}]}}");
    check_tokens(t, "aéè", 0, "a|<0xC3>|<0xA9>|?");
    check_decode(t, (int32_t[]){1, 2, 3, 1}, 4, false, "aéa");
    check_tokens(t, "<0xC3>", 0, "?|?|?|?|?|?"); /* the name of a byte is not that byte */
    tokenizer_free(t);
    /* ignore_merges: a word that is a token is that token, though no merge makes it */
    t = from_text("{'model':{'type':'BPE','ignore_merges':true,'vocab':{'a':0,'b':1,'ab':2},"
                  "'merges':[]}}");
    check_tokens(t, "ab", 0, "ab");
    check_tokens(t, "aba", 0, "a|b|a");
    tokenizer_free(t);
    /* CLIP's suffix */
    t = from_text(
        "{'model':{'type':'BPE','end_of_word_suffix':'</w>','vocab':{'a':0,'b':1,'b</w>':2,"
        "'a</w>':3,'ab</w>':4},'merges':['a b</w>']},'pre_tokenizer':"
        "{'type':'WhitespaceSplit'}}");
    check_tokens(t, "ab a aab", 0, "ab</w>|a</w>|a|ab</w>");
    tokenizer_free(t);
    /* unigram: the best sum of scores; unknown characters fused; user tokens first */
    t = from_text("{'model':{'type':'Unigram','unk_id':0,'vocab':[['<unk>',0],['a',-1],['b',-1.5],"
                  "['ab',-2],['abc',-10],['c',-1],['▁',-3],['▁a',-0.5]]},'pre_tokenizer':"
                  "{'type':'Metaspace','replacement':'▁','prepend_scheme':'always'}}");
    check_tokens(t, "abc", 0, "▁a|b|c");
    check_tokens(t, "b ab", 0, "▁|b|▁a|b");
    check_tokens(t, "cxyc", 0, "▁|c|<unk>|c");
    tokenizer_free(t);
    /* WordPiece: longest first, then continuations; what does not fit is one <unk> */
    t = from_text(
        "{'model':{'type':'WordPiece','unk_token':'[UNK]','continuing_subword_prefix':'##',"
        "'max_input_chars_per_word':8,'vocab':{'[UNK]':0,'un':1,'##aff':2,'##able':3,'a':4,"
        "'##é':5,',':6}},'pre_tokenizer':{'type':'BertPreTokenizer'},'decoder':"
        "{'type':'WordPiece','prefix':'##','cleanup':true}}");
    check_tokens(t, "unaff unaffx aé, unaffable", 0, "un|##aff|[UNK]|a|##é|,|[UNK]");
    check_decode(t, (int32_t[]){1, 2, 4, 5, 6, 4}, 6, false, "unaff aé, a");
    tokenizer_free(t);
}

/* ----------------------------------------------------------------------- added tokens, BOS and EOS */

static void test_added(void **state)
{
    (void)state;
    struct tokenizer *t = from_text(
        "{'model':{'type':'BPE','vocab':{'a':0,'b':1,' "
        "':2,'<':3,'>':4,'s':5,'x':6,'|':7,'é':8},"
        "'merges':[]},'normalizer':{'type':'Lowercase'},'added_tokens':"
        "[" ADDED(9, "<s>", "'special':true,'normalized':false") "," ADDED(10, "<s>x", "'special':true,'normalized':false") "," ADDED(11, "ab", "'special':false,'normalized':false") "," ADDED(
            12, "|l|",
            "'special':true,'lstrip':true,'"
            "normalized':false") "," ADDED(13, "|r|",
                                           "'specia"
                                           "l':"
                                           "true,'"
                                           "rstrip'"
                                           ":true,'"
                                           "normali"
                                           "zed':"
                                           "false") "," ADDED(14, "word",
                                                              "'special':"
                                                              "false,'single_"
                                                              "word':true,'"
                                                              "normalized':"
                                                              "false") "," ADDED(15, "NORM",
                                                                                 "'special':false,'"
                                                                                 "normalized':true") "]}");
    check_tokens(t, "a<s>b", TOKENIZE_SPECIAL, "a|<s>|b");
    check_tokens(t, "a<s>b", 0, "a|<|s|>|b");             /* plain text on request */
    check_tokens(t, "<s>xa", TOKENIZE_SPECIAL, "<s>x|a"); /* the longest */
    check_tokens(t, "aab", 0, "a|ab");                    /* not special: always */
    check_tokens(t, "a  |l| b", TOKENIZE_SPECIAL, "a||l|| |b");
    check_tokens(t, "a |r| \n b", TOKENIZE_SPECIAL, "a| ||r||b");
    check_tokens(t, "word words", 0, "word| |s");
    check_tokens(t, "éword", 0, "é");
    check_tokens(t, "normNorm", 0, "NORM|NORM"); /* found after normalisation, spelled as listed */
    assert_int_equal(tokenizer_find(t, "<s>", 3), 9);
    assert_int_equal(tokenizer_find(t, "nope", 4), -1);
    check_decode(t, (int32_t[]){0, 9, 11, 99, -5}, 5, false, "aab");
    check_decode(t, (int32_t[]){0, 9, 11, 99, -5}, 5, true, "a<s>ab");
    tokenizer_free(t);
}

static const char bos_model[] =
    "{'model':{'type':'BPE','vocab':{'a':0,'b':1},'merges':[]},'added_tokens':[" ADDED(
        2, "<s>", "'special':true") "," ADDED(3, "</s>",
                                              "'special':true") "," ADDED(4, "<|im_end|>",
                                                                          "'special':true") "]%s}";

static struct tokenizer *bos_tokenizer(const char *post, const char *config)
{
    char json[2000];
    snprintf(json, sizeof json, bos_model, post);
    json_t *root = parse(json), *c = config ? parse(config) : NULL;
    struct tokenizer *t = must_load(root, c);
    json_decref(root);
    json_decref(c);
    return t;
}

static void test_bos(void **state)
{
    (void)state;
    enum { BOTH = TOKENIZE_SPECIAL | TOKENIZE_BOS };
    static const char template[] =
        ",'post_processor':{'type':'Sequence','processors':[{'type':'ByteLevel'},"
        "{'type':'TemplateProcessing','single':[{'SpecialToken':{'id':'<s>','type_id':0}},"
        "{'Sequence':{'id':'A','type_id':0}},{'SpecialToken':{'id':'</s>','type_id':0}}],"
        "'special_tokens':{'<s>':{'id':'<s>','ids':[2],'tokens':['<s>']},"
        "'</s>':{'id':'</s>','ids':[3],'tokens':['</s>']}}}]}";
    struct tokenizer *t = bos_tokenizer(template, NULL);
    check_ids(t, "ab", BOTH, "2 0 1 3");
    check_ids(t, "ab", TOKENIZE_SPECIAL, "0 1");
    check_ids(t, "<s>ab", BOTH, "2 0 1 3"); /* never doubled */
    check_ids(t, "<s>ab</s>", BOTH, "2 0 1 3");
    check_ids(t, "<s><s>a", BOTH, "2 2 0 3"); /* the text's own repetition is the text's own */
    check_ids(t, "", BOTH, "2 3");
    assert_int_equal(tokenizer_bos(t), 2);
    assert_int_equal(tokenizer_eos(t), 3);
    assert_true(tokenizer_is_end(t, 3));
    assert_true(tokenizer_is_end(t, 4)); /* by name */
    assert_false(tokenizer_is_end(t, 2));
    /* encode appends */
    struct token_list l = {0};
    struct error err = {0};
    token_list_add(&l, 7);
    assert_true(tokenizer_encode(t, "<s>a", 4, BOTH, &l, &err));
    assert_int_equal(l.n, 4);
    assert_int_equal(l.ids[0], 7);
    assert_int_equal(l.ids[1], 2);
    token_list_clear(&l);
    tokenizer_free(t);
    /* add_bos_token and add_eos_token overrule the template */
    t = bos_tokenizer(template, "{'bos_token':'<s>','eos_token':{'content':'</s>'},"
                                "'add_bos_token':false,'add_eos_token':false}");
    check_ids(t, "a", BOTH, "0");
    tokenizer_free(t);
    t = bos_tokenizer("", "{'bos_token':'<s>','eos_token':'<|im_end|>','add_bos_token':true}");
    check_ids(t, "a", BOTH, "2 0");
    assert_int_equal(tokenizer_eos(t), 4);
    tokenizer_free(t);
    t = bos_tokenizer("", "{'bos_token':null,'eos_token':'</s>','added_tokens_decoder':"
                          "{'5':{'content':'<|eot_id|>','special':true}}}");
    check_ids(t, "a<|eot_id|>", BOTH, "0 5");
    assert_int_equal(tokenizer_bos(t), -1);
    assert_true(tokenizer_is_end(t, 5));
    tokenizer_free(t);
    t = bos_tokenizer(",'post_processor':{'type':'RobertaProcessing','sep':['</s>',3],"
                      "'cls':['<s>',2]}",
                      NULL);
    check_ids(t, "a", BOTH, "2 0 3");
    tokenizer_free(t);
}

static void test_decoders(void **state)
{
    (void)state;
    /* Llama's: the space in front of the first token goes, no other */
    struct tokenizer *t = from_text(
        "{'model':{'type':'BPE','byte_fallback':true,'vocab':{'▁a':0,'b':1,'▁':2,"
        "'<0xF0>':3,'<0x9F>':4},'merges':[]},'normalizer':{'type':'Sequence','normalizers':["
        "{'type':'Prepend','prepend':'▁'},{'type':'Replace','pattern':{'String':' '},"
        "'content':'▁'}]},'decoder':{'type':'Sequence','decoders':[{'type':'Replace',"
        "'pattern':{'String':'▁'},'content':' '},{'type':'ByteFallback'},{'type':'Fuse'},"
        "{'type':'Strip','content':' ','start':1,'stop':0}]},'added_tokens':[" ADDED(
            5, "<s>", "'special':true") "]}");
    check_decode(t, (int32_t[]){0, 1, 0}, 3, false, "ab a");
    check_decode(t, (int32_t[]){5, 0, 1}, 3, false, "ab");
    check_decode(t, (int32_t[]){5, 0, 1}, 3, true, "<s> ab");
    check_decode(t, (int32_t[]){2, 2, 1}, 3, false, " b");
    struct buf out = {0};
    struct detok d = {.started = true}; /* going on after a prompt keeps the space */
    detok_push(&d, t, 0, false, &out);
    assert_string_equal(out.p, " a");
    buf_reset(&out);
    detok_push(&d, t, 3, false, &out);
    detok_push(&d, t, 4, false, &out);
    assert_int_equal(out.len, 0);
    detok_flush(&d, &out);
    assert_string_equal(out.p, "\xef\xbf\xbd");
    buf_clear(&out);
    tokenizer_free(t);
    t = from_text(
        "{'model':{'type':'BPE','vocab':{'Ġa':0,'Ã':1,'©':2},'merges':[]},'pre_tokenizer':"
        "{'type':'ByteLevel'},'decoder':{'type':'ByteLevel'}}");
    check_decode(t, (int32_t[]){0, 1, 2}, 3, false, " aé");
    assert_int_equal(tokenizer_find(t, " a", 2), 0);
    tokenizer_free(t);
}
int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pretokenizers), cmocka_unit_test(test_named),
        cmocka_unit_test(test_normalizers),   cmocka_unit_test(test_charsmap),
        cmocka_unit_test(test_models),        cmocka_unit_test(test_added),
        cmocka_unit_test(test_bos),           cmocka_unit_test(test_decoders),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
