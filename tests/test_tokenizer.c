/*
 * Tokenizers against answers of others and against slow oracles: published vocabularies with the ids
 * that the reference implementations give (skipped, saying so, where the golden data is absent), the
 * hand-written splitters against their regexes, merges against a plain search, normal forms against
 * utf8proc, decoding as the inverse of encoding, streaming against whole, threads against one.
 */
#include "tokens.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <utf8proc.h>
#include <cmocka.h>

#define GOLDEN "../shared/golden/tokenizers/"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static bool present(const char *path)
{
    struct stat st;
    if (stat(path, &st) == 0)
        return true;
    printf("skipped: %s is not here\n", path);
    return false;
}

static void slurp(const char *path, struct buf *out)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    char chunk[65536];
    size_t n;
    while ((n = fread(chunk, 1, sizeof chunk, f)))
        buf_add(out, chunk, n);
    buf_add(out, "", 0);
    fclose(f);
}

static struct tokenizer *must_open(const char *path)
{
    struct error err = {0};
    struct tokenizer *t = tokenizer_open(path, &err);
    if (!t)
        fail_msg("%s", err.msg);
    return t;
}

static struct token_list encode(const struct tokenizer *t, const char *p, size_t n, int flags)
{
    struct error err = {0};
    struct token_list l = {0};
    if (!tokenizer_encode(t, p, n, flags, &l, &err))
        fail_msg("%s", err.msg);
    return l;
}

static bool same(const struct token_list *a, const struct token_list *b)
{
    return a->n == b->n && (!a->n || !memcmp(a->ids, b->ids, a->n * sizeof *a->ids));
}

static void print_list(const char *what, const struct token_list *l)
{
    printf("  %s:", what);
    for (size_t i = 0; i < l->n && i < 60; i++)
        printf(" %d", l->ids[i]);
    printf("\n");
}

/* ----------------------------------------------------------------------------------- golden data */

static void golden_vocab(const char *name)
{
    char path[256];
    snprintf(path, sizeof path, GOLDEN "ggml-vocab-%s.gguf", name);
    if (!present(path))
        skip();
    struct tokenizer *t = must_open(path);
    struct buf inp = {0}, out = {0};
    snprintf(path, sizeof path, GOLDEN "ggml-vocab-%s.gguf.inp", name);
    slurp(path, &inp);
    snprintf(path, sizeof path, GOLDEN "ggml-vocab-%s.gguf.out", name);
    slurp(path, &out);
    int cases = 0, bad = 0;
    char *line = out.p;
    static const char separator[] = "\n__ggml_vocab_test__\n";
    for (char *text = inp.p; text && *line;) {
        char *end = strstr(text, separator), *eol = strchr(line, '\n');
        size_t n = end ? (size_t)(end - text) : strlen(text);
        *eol = 0;
        struct token_list want = {0}, got = encode(t, text, n, 0);
        char *q = line, *stop;
        for (;; q = stop) {
            long id = strtol(q, &stop, 10);
            if (stop == q)
                break;
            token_list_add(&want, (int32_t)id);
        }
        if (!same(&want, &got)) {
            printf("%s: \"%.*s\"\n", name, (int)n, text);
            print_list("want", &want);
            print_list("got ", &got);
            bad++;
        }
        cases++;
        token_list_clear(&want);
        token_list_clear(&got);
        text = end ? end + strlen(separator) : NULL;
        line = eol + 1;
    }
    printf("%s: %d texts\n", name, cases);
    assert_true(cases > 40);
    assert_int_equal(bad, 0);
    buf_clear(&inp);
    buf_clear(&out);
    tokenizer_free(t);
}

static void test_golden_gpt2(void **state)
{
    (void)state;
    golden_vocab("gpt-2");
}

static void test_golden_qwen2(void **state)
{
    (void)state;
    golden_vocab("qwen2");
}

static void test_golden_spm(void **state)
{
    (void)state;
    golden_vocab("llama-spm");
}

static void test_golden_bert(void **state)
{
    (void)state;
    golden_vocab("bert-bge");
}

static void check_cases(const struct tokenizer *t, const char *what)
{
    struct buf file = {0};
    slurp(GOLDEN "qwen2-hf/cases.jsonl", &file);
    int cases = 0, bad = 0;
    for (char *line = file.p, *eol; *line; line = eol + 1) {
        eol = strchr(line, '\n');
        assert_non_null(eol);
        json_t *v = json_loadb(line, (size_t)(eol - line), JSON_ALLOW_NUL, NULL);
        const json_t *text = json_object_get(v, "text"), *ids = json_object_get(v, "ids");
        struct token_list want = {0};
        for (size_t i = 0; i < json_array_size(ids); i++)
            token_list_add(&want, (int32_t)json_integer_value(json_array_get(ids, i)));
        struct token_list got = encode(t, json_string_value(text), json_string_length(text),
                                       TOKENIZE_SPECIAL | TOKENIZE_BOS);
        if (!same(&want, &got)) {
            printf("%s: %.*s\n", what, (int)(eol - line), line);
            print_list("got", &got);
            bad++;
        }
        cases++;
        token_list_clear(&want);
        token_list_clear(&got);
        json_decref(v);
    }
    buf_clear(&file);
    printf("%s: %d cases\n", what, cases);
    assert_true(cases > 3900);
    assert_int_equal(bad, 0);
}

static void test_cases_gguf(void **state)
{
    (void)state;
    if (!present(GOLDEN "qwen2-hf/cases.jsonl"))
        skip();
    struct tokenizer *t = must_open(GOLDEN "ggml-vocab-qwen2.gguf");
    check_cases(t, "from GGUF");
    assert_int_equal(tokenizer_find(t, "<|im_end|>", 10), 151645);
    assert_true(tokenizer_is_end(t, 151645)); /* <|im_end|>, declared */
    assert_true(tokenizer_is_end(t, 151643)); /* <|endoftext|>, by name */
    assert_false(tokenizer_is_end(t, 151644));
    assert_false(tokenizer_is_end(t, -1));
    assert_int_equal(tokenizer_kind(t, 151657), TOKEN_USER); /* <tool_call> */
    assert_int_equal(tokenizer_bos(t), -1);
    tokenizer_free(t);
}

static void test_cases_json(void **state)
{
    (void)state;
    if (!present(GOLDEN "qwen2-hf/tokenizer.json.xz"))
        skip();
    char path[] = "/tmp/steel-tokenizer-XXXXXX.json", command[200];
    int fd = mkstemps(path, 5);
    assert_true(fd >= 0);
    close(fd);
    snprintf(command, sizeof command, "xz -dc " GOLDEN "qwen2-hf/tokenizer.json.xz > %s", path);
    if (system(command) != 0) {
        unlink(path);
        printf("skipped: no xz program here\n");
        skip();
    }
    double start = now();
    struct tokenizer *t = must_open(path);
    printf("tokenizer.json loaded in %.0f ms\n", (now() - start) * 1e3);
    unlink(path);
    check_cases(t, "from tokenizer.json");
    assert_int_equal(tokenizer_find(t, "<|im_end|>", 10), 151645);
    assert_true(tokenizer_is_end(t, 151645));
    tokenizer_free(t);
}

/* ----------------------------------------------------------------------------------- the splitters */

static void split_with_regex(const struct regex *re, struct regex_scratch *s, const char *p,
                             size_t n, struct buf *out)
{
    struct error err = {0};
    for (size_t at = 0; at < n;) {
        size_t start, end;
        enum regex_result r = regex_find(re, s, p, n, at, &start, &end, &err);
        assert_int_equal(r, REGEX_FOUND);
        assert_int_equal(start, at); /* these regexes match everything */
        buf_addf(out, "%zu ", end - at);
        at = end;
    }
}

static void test_splitters(void **state)
{
    (void)state;
    struct rng rng = {1};
    for (int k = SPLIT_NONE + 1; k < SPLIT_COUNT; k++) {
        const char *pattern = split_regex((enum split_kind)k);
        assert_int_equal(split_find(pattern, strlen(pattern)), k);
        struct error err = {0};
        struct regex *re = regex_new(pattern, strlen(pattern), false, &err);
        assert_non_null(re);
        struct regex_scratch s = {0};
        struct buf text = {0}, want = {0}, got = {0};
        for (int i = 0; i < 30000; i++) {
            buf_reset(&text);
            buf_reset(&want);
            buf_reset(&got);
            random_text(&rng, i % 100 ? 24 : 400, &text);
            split_with_regex(re, &s, text.p, text.len, &want);
            for (size_t at = 0; at < text.len;) {
                size_t n = split_next((enum split_kind)k, text.p + at, text.len - at);
                buf_addf(&got, "%zu ", n);
                at += n;
            }
            if (want.len && strcmp(want.p, got.p)) {
                printf("kind %d:", k);
                for (size_t at = 0; at < text.len; at++)
                    printf(" %02x", (unsigned char)text.p[at]);
                fail_msg("\n  regex %s\n  hand  %s", want.p, got.p);
            }
        }
        regex_scratch_clear(&s);
        regex_free(re);
        buf_clear(&text);
        buf_clear(&want);
        buf_clear(&got);
    }
}

/* ------------------------------------------------------------------------------------ normal forms */

static void test_normal_forms(void **state)
{
    (void)state;
    static const int flags[] = {
        [NORMAL_NFC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE,
        [NORMAL_NFD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE,
        [NORMAL_NFKC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
        [NORMAL_NFKD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT,
    };
    static const uint32_t chars[] = {
        'a',    'e',    'o',    0x300,  0x301,  0x302,  0x323,  0x327,  0x345,
        0x5b0,  0x93c,  0x915,  0x9c7,  0x9be,  0x9d7,  0xac00, 0xac01, 0x1100,
        0x1161, 0x11a8, 0xe9,   0x1ec7, 0xfb01, 0x212b, 0x2126, 0xf900, 0x1d15e,
        0x1025, 0x102e, 0x304b, 0x3099, 0xff76, 0xff9e, 0x3a3,  ' ',    0x1f600};
    struct rng rng = {2};
    struct buf text = {0}, got = {0};
    for (int i = 0; i < 40000; i++) {
        buf_reset(&text);
        for (uint32_t n = rng_below(&rng, 20); n; n--) {
            uint32_t cp = chars[rng_below(&rng, sizeof chars / sizeof *chars)];
            if (!rng_below(&rng, 6))
                cp = rng_below(&rng, 0xd000);
            /* the two differ on purpose about what is younger than Unicode 12.1 */
            if ((cp >= 0x898 && cp < 0x8e0) || cp == 0xc3c || cp == 0x1715 || cp == 0x1dfa ||
                (cp >= 0x1abf && cp < 0x1ad0) || cp == 0xa82c)
                cp = 'x';
            char s[4];
            buf_add(&text, s, (size_t)utf8_encode(cp, s));
        }
        buf_add(&text, "", 0);
        for (int form = 0; form < 4; form++) {
            utf8proc_uint8_t *want;
            ptrdiff_t n = utf8proc_map((utf8proc_uint8_t *)text.p, (ptrdiff_t)text.len, &want,
                                       (utf8proc_option_t)flags[form]);
            assert_true(n >= 0);
            buf_reset(&got);
            unicode_normalize((enum normal_form)form, text.p, text.len, &got);
            assert_int_equal(got.len, (size_t)n);
            assert_memory_equal(got.p, want, (size_t)n);
            bool changed = (size_t)n != text.len || memcmp(text.p, want, text.len) != 0;
            if (changed)
                assert_false(unicode_is_normal((enum normal_form)form, text.p, text.len));
            free(want);
        }
    }
    /* a long run of marks in the worst order must not be quadratic: this would take minutes */
    buf_reset(&text);
    buf_addc(&text, 'a');
    for (int i = 0; i < 300000; i++)
        buf_adds(&text, "\xcc\x81\xcc\xa3"); /* U+0301 (230), U+0323 (220) */
    buf_reset(&got);
    unicode_normalize(NORMAL_NFD, text.p, text.len, &got);
    assert_int_equal(got.len, text.len);
    assert_memory_equal(got.p + 1, "\xcc\xa3\xcc\xa3", 4);
    buf_clear(&text);
    buf_clear(&got);
}

static void test_categories(void **state)
{
    (void)state;
    static const struct {
        uint32_t cp;
        int category;
    } known[] = {{'a', UC_LL},          {'A', UC_LU},          {'0', UC_ND},     {' ', UC_ZS},
                 {'\n', UC_SPACE_CTRL}, {0x85, UC_SPACE_CTRL}, {0, UC_CC},       {0xe9, UC_LL},
                 {0x1c5, UC_LT},        {0x2b0, UC_LM},        {0x4e2d, UC_LO},  {0x301, UC_MN},
                 {0x93e, UC_MC},        {0x20dd, UC_ME},       {0x2167, UC_NL},  {0xbd, UC_NO},
                 {'_', UC_PC},          {'-', UC_PD},          {'(', UC_PS},     {')', UC_PE},
                 {0xab, UC_PI},         {0xbb, UC_PF},         {'!', UC_PO},     {'+', UC_SM},
                 {'$', UC_SC},          {'^', UC_SK},          {0x1f600, UC_SO}, {0x2028, UC_ZL},
                 {0x2029, UC_ZP},       {0x200d, UC_CF},       {0xd800, UC_CS},  {0xe000, UC_CO},
                 {0x378, UC_CN},        {0x10ffff, UC_CN},     {0x180e, UC_CF},  {0x110000, UC_CN}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if ((int)unicode_category(known[i].cp) != known[i].category)
            fail_msg("U+%04X: category %u, not %d", known[i].cp, unicode_category(known[i].cp),
                     known[i].category);
    /* the two Unicode libraries agree on all but characters that one of them does not have */
    int differ = 0;
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        unsigned c = unicode_category(cp);
        int u = utf8proc_category((int32_t)cp);
        bool letter = u >= UTF8PROC_CATEGORY_LU && u <= UTF8PROC_CATEGORY_LO;
        bool number = u >= UTF8PROC_CATEGORY_ND && u <= UTF8PROC_CATEGORY_NO;
        if (c == UC_CN || u == UTF8PROC_CATEGORY_CN)
            continue;
        differ += letter != (UC_LETTER >> c & 1) || number != (UC_NUMBER >> c & 1);
    }
    assert_true(differ < 10);
}

/* --------------------------------------------------------------------- merges against a plain search */

static struct tokenizer *from_model(json_t *model, const char *pre, const char *normalizer)
{
    json_t *root = json_pack("{s:o}", "model", model);
    if (pre)
        json_object_set_new(root, "pre_tokenizer", json_loads(pre, 0, NULL));
    if (normalizer)
        json_object_set_new(root, "normalizer", json_loads(normalizer, 0, NULL));
    char *text = json_dumps(root, 0);
    struct error err = {0};
    struct tokenizer *t = tokenizer_load_json(text, strlen(text), "test", NULL, &err);
    if (!t)
        fail_msg("%s", err.msg);
    free(text);
    json_decref(root);
    return t;
}

/*
 * BPE as the textbook has it: while any neighbours have a merge, do the one of lowest rank, leftmost
 * first. Symbols are strings; rank(left, right) < 0 means none.
 */
struct symbol {
    const char *p;
    size_t n;
};

static void plain_bpe(const char *word, size_t n, bool bytes,
                      long (*rank)(const void *, struct symbol, struct symbol), const void *arg,
                      struct symbol *out, size_t *n_out)
{
    size_t m = 0;
    for (size_t i = 0; i < n; m++) {
        size_t len = bytes ? 1 : (size_t)utf8_len(word[i]);
        out[m] = (struct symbol){word + i, len};
        i += len;
    }
    for (;;) {
        long best = -1;
        size_t at = 0;
        for (size_t i = 0; i + 1 < m; i++) {
            long r = rank(arg, out[i], out[i + 1]);
            if (r >= 0 && (best < 0 || r < best)) {
                best = r;
                at = i;
            }
        }
        if (best < 0)
            break;
        out[at].n += out[at + 1].n;
        memmove(out + at + 1, out + at + 2, (m - at - 2) * sizeof *out);
        m--;
    }
    *n_out = m;
}

static const char *const test_merges[] = {
    "a a",   "b a",       "aa a", "a b",  "aa aa", "ab ab", "c d", "b c",  "aaa a",
    "aab c", "aa b",      "x y",  "xy x", "xyx y", "y z",   "Ġ a", "Ġa b", "cd cd",
    "d c",   "aaaa aaaa", "z z",  "zz z", "zz zz", "zzz z", "Ã ©", "é a"};
enum { N_MERGES = sizeof test_merges / sizeof *test_merges };

static long merge_rank(const void *arg, struct symbol a, struct symbol b)
{
    (void)arg;
    for (long i = 0; i < N_MERGES; i++) {
        struct buf l = {0}, r = {0};
        const char *space = strchr(test_merges[i], ' ');
        bytelevel_decode(test_merges[i], (size_t)(space - test_merges[i]), &l);
        bytelevel_decode(space + 1, strlen(space + 1), &r);
        bool hit = l.len == a.n && r.len == b.n && !memcmp(l.p, a.p, a.n) && !memcmp(r.p, b.p, b.n);
        buf_clear(&l);
        buf_clear(&r);
        if (hit)
            return i;
    }
    return -1;
}

static void test_bpe_oracle(void **state)
{
    (void)state;
    json_t *model = byte_bpe(test_merges, N_MERGES);
    const json_t *vocab = json_object_get(model, "vocab");
    json_incref((json_t *)vocab);
    struct tokenizer *t = from_model(
        model, "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}", NULL);
    struct rng rng = {3};
    struct symbol out[400];
    for (int i = 0; i < 3000; i++) {
        char word[400];
        size_t n = 1 + rng_below(&rng, i % 10 ? 20 : 160), m;
        for (size_t k = 0; k < n; k++)
            word[k] = i % 3 ? "aaabcxyz d"[rng_below(&rng, 10)] : "az\xc3\xa9"[rng_below(&rng, 4)];
        plain_bpe(word, n, true, merge_rank, NULL, out, &m);
        struct token_list got = encode(t, word, n, 0);
        bool ok = got.n == m;
        for (size_t k = 0; ok && k < m; k++) {
            size_t len;
            const char *p = tokenizer_piece(t, got.ids[k], &len);
            ok = len == out[k].n && !memcmp(p, out[k].p, len);
        }
        if (!ok)
            fail_msg("\"%.*s\": %zu tokens, not %zu", (int)n, word, got.n, m);
        token_list_clear(&got);
    }
    json_decref((json_t *)vocab);
    tokenizer_free(t);
}

/* SentencePiece on strings: the join of two neighbours that is a token of the highest score. */
static long score_rank(const void *arg, struct symbol a, struct symbol b)
{
    const struct tokenizer *t = arg;
    int32_t id = vocab_find(&t->vocab, a.p, a.n + b.n);
    if (id < 0 || t->vocab.kind[id] != TOKEN_NORMAL)
        return -1;
    return (long)(1000000.0f - t->vocab.score[id]);
}

static void test_spm_oracle(void **state)
{
    (void)state;
    if (!present(GOLDEN "ggml-vocab-llama-spm.gguf"))
        skip();
    struct tokenizer *t = must_open(GOLDEN "ggml-vocab-llama-spm.gguf");
    struct rng rng = {4};
    struct buf text = {0}, spaced = {0};
    struct symbol *out = mem_alloc(4000 * sizeof *out);
    static const char *const words[] = {"the",   "quick", " ",      "  ",     "\n",   "ing",
                                        "Hello", "'s",    "日本",   "привет", "é",    "123",
                                        "<s>",   "</s",   ">",      "....",   "____", "xyz",
                                        "🦙",  "▁",     "<0x41>", "ation",  "un",   "able"};
    for (int i = 0; i < 1500; i++) {
        buf_reset(&text);
        buf_reset(&spaced);
        for (uint32_t n = 1 + rng_below(&rng, 12); n; n--)
            buf_adds(&text, words[rng_below(&rng, sizeof words / sizeof *words)]);
        if (i % 4 == 0)
            random_text(&rng, 30, &text);
        buf_adds(&spaced, "▁");
        for (size_t k = 0; k < text.len; k++) {
            if (text.p[k] == ' ')
                buf_adds(&spaced, "▁");
            else
                buf_addc(&spaced, text.p[k]);
        }
        size_t m;
        plain_bpe(spaced.p, spaced.len, false, score_rank, t, out, &m);
        struct token_list want = {0}, got = encode(t, text.p, text.len, 0);
        for (size_t k = 0; k < m; k++) {
            int32_t id = vocab_find(&t->vocab, out[k].p, out[k].n);
            if (id >= 0 && t->vocab.kind[id] == TOKEN_NORMAL)
                token_list_add(&want, id);
            else
                for (size_t b = 0; b < out[k].n; b++)
                    token_list_add(&want, 3 + (unsigned char)out[k].p[b]);
        }
        if (!same(&want, &got)) {
            print_list("want", &want);
            print_list("got ", &got);
            fail_msg("\"%s\"", text.p);
        }
        token_list_clear(&want);
        token_list_clear(&got);
    }
    mem_free(out);
    buf_clear(&text);
    buf_clear(&spaced);
    tokenizer_free(t);
}

/* ------------------------------------------------------------------------------ there and back again */

static void check_round_trip(const struct tokenizer *t, const char *p, size_t n)
{
    struct token_list l = encode(t, p, n, 0);
    struct buf back = {0};
    tokenizer_decode(t, l.ids, l.n, true, &back);
    if (back.len != n || (n && memcmp(back.p, p, n))) {
        for (size_t i = 0; i < n; i++)
            printf(" %02x", (unsigned char)p[i]);
        fail_msg("\n%zu bytes came back as %zu", n, back.len);
    }
    buf_clear(&back);
    token_list_clear(&l);
}

static void round_trips(const struct tokenizer *t, int rounds, bool normalises)
{
    struct rng rng = {5};
    struct buf text = {0}, normal = {0};
    for (int i = 0; i < rounds; i++) {
        buf_reset(&text);
        random_text(&rng, 60, &text);
        if (strstr(text.p, "▁")) /* to SentencePiece this is a space */
            continue;
        buf_reset(&normal);
        unicode_normalize(NORMAL_NFC, text.p, text.len, &normal);
        if (normalises)
            check_round_trip(t, normal.p, normal.len);
        else
            check_round_trip(t, text.p, text.len);
        buf_reset(&text);
        random_bytes(&rng, 60, &text);
        if (!normalises)
            check_round_trip(t, text.p, text.len);
    }
    buf_clear(&text);
    buf_clear(&normal);
}

static void test_round_trip(void **state)
{
    (void)state;
    static const char *const pres[] = {
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}",
        "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Punctuation\"},"
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false},{\"type\":\"Digits\"},"
        "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[0-9][0-9][0-9]\"},\"behavior\":\"Isolated\","
        "\"invert\":false}]}"};
    for (size_t i = 0; i < sizeof pres / sizeof *pres; i++) {
        struct tokenizer *t = from_model(byte_bpe(test_merges, N_MERGES), pres[i], NULL);
        round_trips(t, 5000, false);
        tokenizer_free(t);
    }
}

static void test_round_trip_golden(void **state)
{
    (void)state;
    if (!present(GOLDEN "ggml-vocab-gpt-2.gguf"))
        skip();
    struct tokenizer *t = must_open(GOLDEN "ggml-vocab-gpt-2.gguf");
    round_trips(t, 5000, false);
    tokenizer_free(t);
    t = must_open(GOLDEN "ggml-vocab-qwen2.gguf");
    round_trips(t, 5000, true);
    tokenizer_free(t);
    t = must_open(GOLDEN "ggml-vocab-llama-spm.gguf");
    round_trips(t, 1000, false);
    tokenizer_free(t);
}

/* -------------------------------------------------------------------------------------- streaming */

/* The text with every maximal invalid part replaced, one character or part at a time. */
static void lossy(const char *p, size_t n, struct buf *out)
{
    size_t i = 0;
    while (i < n) {
        uint32_t cp;
        int len = utf8_decode(p + i, n - i, &cp);
        if (len) {
            buf_add(out, p + i, (size_t)len);
            i += (size_t)len;
            continue;
        }
        /* the longest prefix that some valid character starts with, found by trying to finish it */
        size_t part = 1;
        for (size_t k = 2; k <= 3 && i + k <= n; k++) {
            char try[4];
            memcpy(try, p + i, k);
            bool can = false;
            for (int a = 0x80; a < 0xc0 && !can; a++) {
                try[k] = (char)a;
                if (k == 3) {
                    can = utf8_decode(try, 4, &cp) == 4;
                } else {
                    can = utf8_decode(try, 3, &cp) == 3;
                    for (int b = 0x80; b < 0xc0 && !can; b++) {
                        try[3] = (char)b;
                        can = utf8_decode(try, 4, &cp) == 4;
                    }
                }
            }
            if (!can)
                break;
            part = k;
        }
        buf_adds(out, "\xef\xbf\xbd");
        i += part;
    }
    buf_add(out, "", 0);
}

static void test_streaming(void **state)
{
    (void)state;
    struct tokenizer *t = from_model(byte_bpe(test_merges, N_MERGES),
                                     "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}", NULL);
    struct rng rng = {6};
    struct buf text = {0}, want = {0}, got = {0}, step = {0};
    for (int i = 0; i < 20000; i++) {
        buf_reset(&text);
        buf_reset(&want);
        buf_reset(&got);
        if (i % 2)
            random_text(&rng, 12, &text);
        else
            random_bytes(&rng, 24, &text);
        /* tokens of all lengths: single bytes, or whatever the merges give */
        struct token_list l = {0};
        if (i % 3)
            for (size_t k = 0; k < text.len; k++)
                token_list_add(&l, (unsigned char)text.p[k]);
        else
            l = encode(t, text.p, text.len, 0);
        lossy(text.p, text.len, &want);
        struct detok d = {0};
        for (size_t k = 0; k < l.n; k++) {
            buf_reset(&step);
            detok_push(&d, t, l.ids[k], true, &step);
            assert_int_equal(utf8_valid(step.p, step.len), step.len); /* never half a character */
            buf_add(&got, step.p, step.len);
        }
        detok_flush(&d, &got);
        detok_flush(&d, &got); /* a second flush adds nothing */
        if (got.len != want.len || (got.len && memcmp(got.p, want.p, got.len))) {
            for (size_t k = 0; k < text.len; k++)
                printf(" %02x", (unsigned char)text.p[k]);
            fail_msg("\n  streamed \"%s\"\n  whole    \"%s\"", got.p, want.p);
        }
        token_list_clear(&l);
    }
    /* as early as certain: a finished character comes at once, a hopeless byte too */
    struct detok d = {0};
    buf_reset(&got);
    const unsigned char emoji[] = {0xf0, 0x9f, 0xa6, 0x99};
    for (int i = 0; i < 3; i++) {
        detok_push(&d, t, emoji[i], true, &got);
        assert_int_equal(got.len, 0);
    }
    detok_push(&d, t, emoji[3], true, &got);
    assert_string_equal(got.p, "\xf0\x9f\xa6\x99");
    buf_reset(&got);
    detok_push(&d, t, 0xff, true, &got);
    assert_string_equal(got.p, "\xef\xbf\xbd");
    buf_reset(&got);
    detok_push(&d, t, 0xe4, true, &got);
    detok_push(&d, t, 'a', true, &got);
    assert_string_equal(got.p, "\xef\xbf\xbd"
                               "a");
    buf_clear(&text);
    buf_clear(&want);
    buf_clear(&got);
    buf_clear(&step);
    tokenizer_free(t);
}

/* ------------------------------------------------------------------------------- threads and speed */

static void make_text(struct buf *out, size_t bytes)
{
    static const char *const words[] = {
        "the",     " quick",    " brown",  " fox",  " jumps", " over",
        " lazy",   " dogs",     ".",       " It's", " 2024",  ",",
        "\n\n",    " function", " return", "();",   " être",  " naïve",
        " привет", " мир",      "日本語",  "中文",  " 🦙",  "\tint x = 42;\n",
        " tokens", " encoding", " a",      " of",   " and",   " to",
        " in",     " which"};
    struct rng rng = {7};
    while (out->len < bytes)
        buf_adds(out, words[rng_below(&rng, sizeof words / sizeof *words)]);
}

struct job {
    const struct tokenizer *t;
    const struct buf *text;
    const struct token_list *want;
    bool ok;
};

static void *job_run(void *arg)
{
    struct job *j = arg;
    j->ok = true;
    for (int i = 0; i < 20; i++) {
        struct token_list l = {0};
        struct error err = {0};
        j->ok &= tokenizer_encode(j->t, j->text->p, j->text->len, 0, &l, &err) && same(&l, j->want);
        token_list_clear(&l);
    }
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    struct buf text = {0};
    make_text(&text, 20000);
    struct tokenizer *t = from_model(
        byte_bpe(test_merges, N_MERGES),
        "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"
        "\"\\\\p{L}+|\\\\s+\"},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\","
        "\"add_prefix_space\":false}]}",
        "{\"type\":\"NFC\"}");
    struct tokenizer *again = from_model(
        byte_bpe(test_merges, N_MERGES),
        "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":"
        "\"\\\\p{L}+|\\\\s+\"},\"behavior\":\"Isolated\",\"invert\":false},{\"type\":\"ByteLevel\","
        "\"add_prefix_space\":false}]}",
        "{\"type\":\"NFC\"}");
    struct token_list want = encode(again, text.p, text.len, 0);
    pthread_t threads[4];
    struct job jobs[4];
    for (int i = 0; i < 4; i++) {
        jobs[i] = (struct job){t, &text, &want, false};
        assert_int_equal(pthread_create(&threads[i], NULL, job_run, &jobs[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        assert_true(jobs[i].ok);
    }
    token_list_clear(&want);
    tokenizer_free(t);
    tokenizer_free(again);
    buf_clear(&text);
}

static void time_text(const struct tokenizer *t, const char *what, const struct buf *text)
{
    double start = now();
    struct token_list l = encode(t, text->p, text->len, 0);
    double took = now() - start;
    printf("  %-28s %8.1f ms  %7.1f MB/s  %zu tokens\n", what, took * 1e3,
           (double)text->len / took * 1e-6, l.n);
    assert_true(l.n > 0);
    token_list_clear(&l);
}

/* Nothing here has a time limit, but anything quadratic would not end within the suite's. */
static void test_speed(void **state)
{
    (void)state;
    static const char *const names[] = {"gpt-2", "qwen2", "llama-spm", "bert-bge"};
    if (!present(GOLDEN))
        skip();
    struct buf text = {0}, spaces = {0}, letters = {0}, pairs = {0};
    make_text(&text, 1 << 20);
    for (int i = 0; i < 1 << 20; i++) {
        buf_addc(&spaces, ' ');
        buf_addc(&letters, 'a');
        buf_addc(&pairs, i % 2 ? 'a' : 'b');
    }
    buf_addc(&spaces, 'x');
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[256];
        snprintf(path, sizeof path, GOLDEN "ggml-vocab-%s.gguf", names[i]);
        double start = now();
        struct tokenizer *t = must_open(path);
        printf("%s: loaded in %.0f ms; 1 MB of\n", names[i], (now() - start) * 1e3);
        time_text(t, "mixed text", &text);
        time_text(t, "the same again", &text);
        time_text(t, "one letter", &letters);
        time_text(t, "two letters in turn", &pairs);
        time_text(t, "spaces, then a letter", &spaces);
        tokenizer_free(t);
    }
    buf_clear(&text);
    buf_clear(&spaces);
    buf_clear(&letters);
    buf_clear(&pairs);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_categories),        cmocka_unit_test(test_normal_forms),
        cmocka_unit_test(test_splitters),         cmocka_unit_test(test_golden_gpt2),
        cmocka_unit_test(test_golden_qwen2),      cmocka_unit_test(test_golden_spm),
        cmocka_unit_test(test_golden_bert),       cmocka_unit_test(test_cases_gguf),
        cmocka_unit_test(test_cases_json),        cmocka_unit_test(test_bpe_oracle),
        cmocka_unit_test(test_spm_oracle),        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_round_trip_golden), cmocka_unit_test(test_streaming),
        cmocka_unit_test(test_threads),           cmocka_unit_test(test_speed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
