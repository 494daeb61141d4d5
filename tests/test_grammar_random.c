/*
 * A model that wants nonsense: at each step any allowed token, at random, within a budget of tokens.
 * Under every schema the result is whole and valid by a validator of its own (schema_check.h). And hostile sources: each ends in an error that names its limit.
 */
#include "base/mem.h"
#include "text/grammar/grammar_int.h"
#include "schema_check.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include <setjmp.h>
#include <cmocka.h>

#define MASKBENCH "../shared/golden/schemas/maskbench.jsonl.xz"

static struct tokenizer *tok;
static struct grammar_vocab *vocab;
static uint32_t seed = 12345;

static uint32_t random_next(void)
{
    seed = seed * 1664525 + 1013904223;
    return seed >> 8;
}

/* Any of the allowed tokens; -1: none is. */
static int32_t pick(const uint32_t *bits, int n_vocab)
{
    int32_t best = -1;
    uint32_t ties = 0;
    for (int32_t id = 0; id < n_vocab; id++)
        if (bits[id / 32] >> id % 32 & 1 && random_next() % ++ties == 0)
            best = id;
    return best;
}

/* Tokens for an answer, beyond one for each byte of the shortest there is. */
enum { BUDGET = 400 };

/* Generates one answer of at most `budget` tokens; false if it did not end. */
static bool generate(struct grammar *g, int budget, struct buf *out, const char *name)
{
    int n_vocab = tokenizer_n_vocab(tok);
    uint32_t *bits = mem_zalloc(grammar_mask_words(n_vocab), 4);
    size_t words = grammar_mask_words(n_vocab);
    uint32_t *again = mem_zalloc(words, 4);
    struct grammar_matcher *m = grammar_matcher_new(g, vocab);
    struct grammar_matcher *fresh = grammar_matcher_new(g, vocab);
    struct error err = {0};
    bool done = false;
    fresh->no_cache = true;
    grammar_set_budget(m, budget);
    grammar_set_budget(fresh, budget);
    for (int i = 0; i < budget && !done; i++) {
        if (!grammar_mask(m, bits, &err))
            fail_msg("%s: %s", name, err.msg);
        /* a mask that was kept is the one that is made */
        if (!grammar_mask(fresh, again, &err) || memcmp(bits, again, words * 4) != 0)
            fail_msg("%s: a mask of another place after %.300s", name, out->p ? out->p : "");
        int32_t id = pick(bits, n_vocab);
        if (id < 0)
            fail_msg("%s: no token is allowed after %.300s", name, out->p ? out->p : "");
        if (!grammar_accept(m, id, &err))
            fail_msg("%s: a token of the mask is not taken after %.300s", name, out->p);
        assert_true(grammar_accept(fresh, id, &err));
        done = tokenizer_is_end(tok, id);
        size_t n;
        const char *p = tokenizer_piece(tok, id, &n);
        if (!done)
            buf_add(out, p, n);
    }
    grammar_matcher_free(m);
    grammar_matcher_free(fresh);
    mem_free(bits);
    mem_free(again);
    return done;
}

/* Generates under a schema and validates. 1 valid, 0 not compiled, -1 the validator does not know,
 * -2 it did not end. */
static int try_schema(const char *name, const char *text, int flags, int budget)
{
    struct error err = {0};
    struct grammar_source src = {GRAMMAR_SCHEMA, flags, text, strlen(text)};
    struct grammar *g = grammar_compile(&src, &err);
    if (!g)
        return 0;
    struct buf out = {0};
    json_error_t je;
    json_t *schema = json_loads(text, JSON_DECODE_ANY | JSON_ALLOW_NUL, &je);
    buf_adds(&out, "");
    budget += (int)g->node_cost[0];
    if (!generate(g, budget, &out, name)) {
        print_message("%s: no end in %d tokens: ...%s\n", name, budget,
                      out.len > 200 ? out.p + out.len - 200 : out.p);
        json_decref(schema);
        buf_clear(&out);
        grammar_free(g);
        return -2;
    }
    json_t *v =
        json_loadb(out.p, out.len, JSON_DECODE_ANY | JSON_ALLOW_NUL | JSON_DECODE_INT_AS_REAL, &je);
    int valid = -1;
    if (!v && !strstr(je.text, "overflow"))
        fail_msg("%s: not JSON (%s): %.500s", name, je.text, out.p);
    if (v && schema)
        valid = check_value(schema, schema, v, 0);
    if (valid == 0)
        fail_msg("%s: not valid: %.1500s", name, out.p);
    json_decref(schema);
    json_decref(v);
    buf_clear(&out);
    grammar_free(g);
    return valid;
}

static const char *const schemas[] = {
    "{}",
    "{\"type\":\"object\"}",
    "{\"type\":\"array\",\"items\":{\"type\":\"integer\",\"minimum\":-3,\"maximum\":17},"
    "\"minItems\":2}",
    "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\",\"minLength\":3},\"b\":{"
    "\"enum\":[1,null,\"x\"]}},"
    "\"required\":[\"a\",\"b\"],\"additionalProperties\":false}",
    "{\"$defs\":{\"t\":{\"type\":\"object\",\"properties\":{\"l\":{\"anyOf\":[{\"$ref\":\"#/$defs/"
    "t\"},{\"type\":\"null\"}]},"
    "\"v\":{\"type\":\"number\",\"multipleOf\":0.5}},\"required\":[\"l\",\"v\"],"
    "\"additionalProperties\":false}},"
    "\"$ref\":\"#/$defs/t\"}",
    "{\"type\":\"object\",\"minProperties\":2,\"maxProperties\":3,\"properties\":{\"p\":{},\"q\":{}"
    "},"
    "\"required\":[\"p\"],\"additionalProperties\":{\"type\":\"boolean\"}}",
    "{\"oneOf\":[{\"type\":\"integer\",\"multipleOf\":2},{\"type\":\"integer\",\"multipleOf\":3}]}",
    "{\"type\":\"object\",\"properties\":{\"a\":{},\"b\":{},\"c\":{}},\"dependentRequired\":{\"a\":"
    "[\"b\",\"c\"]},"
    "\"maxProperties\":3}",
    "{\"type\":\"array\",\"contains\":{\"const\":7},\"items\":{\"type\":\"integer\"},\"maxItems\":"
    "4}",
    "{\"type\":\"string\",\"pattern\":\"^(a|b){2,5}-[0-9]+$\",\"maxLength\":9}",
    "{\"type\":\"object\",\"patternProperties\":{\"^x\":{\"type\":\"null\"}},"
    "\"additionalProperties\":false}",
    "{\"not\":{\"type\":[\"object\",\"array\",\"string\"]}}",
    "{\"type\":\"object\",\"propertyNames\":{\"maxLength\":3,\"minLength\":1},\"minProperties\":1}",
};

static void test_own_schemas(void **state)
{
    (void)state;
    int valid = 0;
    for (int flags = 0; flags < 4; flags++)
        for (size_t i = 0; i < sizeof schemas / sizeof *schemas; i++)
            for (int round = 0; round < 6; round++)
                valid += try_schema(schemas[i], schemas[i], flags, 10 + 30 * round) == 1;
    print_message("%d valid answers\n", valid); /* the rest: numbers too large for the validator */
    assert_true(valid >= 280);
}

/* 300 real schemas, spread over MaskBench. */
static void test_maskbench(void **state)
{
    (void)state;
    if (access(MASKBENCH, R_OK)) {
        print_message("skipped: " MASKBENCH " is absent\n");
        skip();
    }
    FILE *f = popen("xz -dc " MASKBENCH, "r");
    assert_non_null(f);
    char *text_line = NULL;
    size_t cap = 0;
    ssize_t len;
    int line = 0, tried = 0, valid = 0, unknown = 0, endless = 0;
    for (; tried < 300 && (len = getline(&text_line, &cap, f)) > 0; line++) {
        json_t *v = line % 3 == 1 ? json_loadb(text_line, (size_t)len, JSON_ALLOW_NUL, NULL) : NULL;
        if (!v)
            continue;
        char *text = json_dumps(json_object_get(v, "schema"), JSON_ENCODE_ANY);
        int r = try_schema(json_string_value(json_object_get(v, "name")), text, tried % 2, BUDGET);
        tried += r != 0;
        valid += r == 1;
        unknown += r == -1;
        endless += r == -2;
        free(text);
        json_decref(v);
    }
    print_message(
        "%d schemas: %d valid answers, %d that the validator does not know, %d without an "
        "end\n",
        tried, valid, unknown, endless);
    assert_true(tried == 300 && valid + unknown == 300 && valid >= 280);
    free(text_line);
    pclose(f);
}

/* text repeated n times between head and tail. */
static char *repeat(const char *head, const char *text, size_t n, const char *tail)
{
    struct buf b = {0};
    buf_adds(&b, head);
    for (size_t i = 0; i < n; i++)
        buf_adds(&b, text);
    buf_adds(&b, tail);
    return buf_take(&b);
}

static void refuse(enum grammar_kind kind, char *text, const char *why)
{
    struct error err = {0};
    struct grammar_source src = {kind, 0, text, strlen(text)};
    struct grammar *g = grammar_compile(&src, &err);
    if (g || !strstr(err.msg, why))
        fail_msg("%.60s...: %s (wanted: %s)", text, g ? "compiled" : err.msg, why);
    grammar_free(g);
    mem_free(text);
}

static void test_hostile(void **state)
{
    (void)state;
    refuse(GRAMMAR_SCHEMA, repeat("{\"enum\":[", "\"abcdefgh\",", 1000000, "1]}"), "the limit is");
    refuse(GRAMMAR_SCHEMA, repeat("", "[", 100000, ""), "nested over");
    refuse(GRAMMAR_SCHEMA, repeat("", "{\"not\":", 1000, "1"), "nested over");
    refuse(GRAMMAR_SCHEMA, repeat("[", "1,", 500000, "1]"), "over 400000 values");
    refuse(GRAMMAR_SCHEMA, mem_strdup("{\"pattern\":\"(a|b)*a(a|b){30}\"}"), "over");
    refuse(GRAMMAR_SCHEMA, mem_strdup("{\"pattern\":\"(x{1000}){1000}\"}"), "over");
    refuse(GRAMMAR_SCHEMA, mem_strdup("{\"pattern\":\"^(.*a.*b.*c.*d.*e.*f.*g.*h.*i.*j.*k){9}$\"}"),
           "over");
    refuse(GRAMMAR_SCHEMA, mem_strdup("{\"minItems\":1000000}"), "60000");
    refuse(
        GRAMMAR_SCHEMA,
        repeat("{\"allOf\":[",
               "{\"anyOf\":[{\"required\":[\"a\"]},{\"required\":[\"b\"]},{\"minProperties\":3}]},",
               40, "{}]}"),
        "over");
    refuse(GRAMMAR_REGEX, mem_strdup("(a|b)*a(a|b){40}"), "over");
    refuse(GRAMMAR_REGEX, mem_strdup("a{1000000}"), "over");
    refuse(GRAMMAR_REGEX, mem_strdup("((a{1,300}){1,300}){1,300}"), "over");
    refuse(GRAMMAR_REGEX, repeat("", "(", 100000, ""), "nested over");
    refuse(GRAMMAR_REGEX, repeat("", "a?", 5000, "b"), "over");
    refuse(GRAMMAR_GBNF, repeat("root ::= ", "(", 100000, ""), "nested over");
    refuse(GRAMMAR_GBNF, mem_strdup("root ::= (root | \"a\"){10001}"), "over");
    refuse(GRAMMAR_GBNF, repeat("root ::= ", "r ", 300000, "\nr ::= root \"a\" | \"b\""), "over");
    refuse(GRAMMAR_LARK, repeat("start: ", "(", 100000, ""), "nested over");
    refuse(GRAMMAR_LARK, repeat("start: ", "/\\p{L}/ ", 100000, ""), "over 700000 steps");
    refuse(GRAMMAR_LARK, repeat("start: ", "/[\\w]/i ", 100000, ""), "over 700000 steps");
    refuse(GRAMMAR_LARK, repeat("start: ", "x ", 300000, "\nx: \"a\" | x \"b\""),
           "over 100000 states");
    refuse(GRAMMAR_LARK, repeat("start: ", "\"a\" ", 200000, ""), "over 400000 parts");
    refuse(GRAMMAR_LARK, mem_strdup("start: (((\"a\" start)~10000)~10000)~10000 | \"b\""), "over");
    refuse(GRAMMAR_LARK, mem_strdup("start: /(a|b)*a(a|b){30}/"), "over 40000 states");
    /* Not refused, and cheap to mask: deep recursion and ambiguity. */
    static const char *const fine[] = {
        "root ::= root root | \"a\"",
        "root ::= (\"a\"* \"a\"*)* \"b\"",
        "root ::= a\na ::= b a | b\nb ::= [a-z]* \" \"",
    };
    for (size_t i = 0; i < sizeof fine / sizeof *fine; i++) {
        struct error err = {0};
        struct grammar_source src = {GRAMMAR_GBNF, 0, fine[i], strlen(fine[i])};
        struct grammar *g = grammar_compile(&src, &err);
        if (!g)
            fail_msg("%s: %s", fine[i], err.msg);
        struct grammar_matcher *m = grammar_matcher_new(g, vocab);
        uint32_t *bits = mem_zalloc(grammar_mask_words(tokenizer_n_vocab(tok)), 4);
        /* It goes on, or ends in an error of this sequence: within the work of a mask either way. */
        bool ok = true;
        for (int k = 0; k < 200 && ok; k++) {
            ok = grammar_mask(m, bits, &err);
            assert_true(grammar_mask_work(m) < GRAMMAR_MASK_WORK + 1000000);
            int32_t id = ok ? pick(bits, tokenizer_n_vocab(tok)) : -1;
            ok = ok && grammar_accept(m, id, &err) && !tokenizer_is_end(tok, id);
            assert_true(grammar_matcher_bytes(m) < 64 << 20);
        }
        mem_free(bits);
        grammar_matcher_free(m);
        grammar_free(g);
    }
}

int main(void)
{
    struct error err = {0};
    tok = tokenizer_open(NULL, &err); /* the built-in model's */
    if (!tok) {
        printf("skipped: %s\n", err.msg);
        return 77;
    }
    vocab = grammar_vocab_new(tok);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_own_schemas),
        cmocka_unit_test(test_maskbench),
        cmocka_unit_test(test_hostile),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    grammar_vocab_free(vocab);
    tokenizer_free(tok);
    return failed;
}
