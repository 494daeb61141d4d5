/*
 * What a stranger's input may cost: JSON, conversations, templates, tokenizers, samplers. Work is
 * counted in units of budgets, steps and bytes, never in time; what used to take hours is caught by
 * an alarm.
 */
#include "base/base64.h"
#include "base/budget.h"
#include "base/json_guard.h"
#include "base/json_long.h"
#include "sample/sampler.h"
#include "text/chat/chat.h"
#include "tokenizer_parts.h"

#include <malloc.h>
#include <math.h>

/* ------------------------------------------------------------------ JSON */

static bool guard(const char *text, struct json_limits l, struct error *err)
{
    *err = (struct error){0};
    return json_guard(text, strlen(text), &l, NULL, err);
}

/* ------------------------------------------------------------------ long strings */

/* json_load_long gives what json_loadb gives. */
static void check_long(const char *text, size_t n)
{
    json_error_t a = {0}, b = {0};
    json_t *want = json_loadb(text, n, JSON_ALLOW_NUL, &a),
           *got = json_load_long(text, n, JSON_ALLOW_NUL, &b);
    if (!want) {
        assert_null(got);
        assert_string_equal(a.text, b.text);
        assert_int_equal(a.line, b.line);
        assert_int_equal(a.column, b.column);
        return;
    }
    assert_true(json_equal(want, got));
    json_decref(want);
    json_decref(got);
}

/* `n` characters x, with `odd` in the middle. */
static void add_long(struct buf *b, size_t n, const char *odd)
{
    buf_addc(b, '"');
    for (size_t i = 0; i < n; i++)
        i == n / 2 ? buf_adds(b, odd) : buf_addc(b, 'x');
    buf_addc(b, '"');
}

static void test_long_strings(void **state)
{
    (void)state;
    static const char *const odd[] = {"x",   "\\n",  "\\\"", "\\\\",    "\xc3\xa9",
                                      "\n",  "\x7f", "\xff", "\\u00e9", "\\u0000",
                                      "\\x", "\"",   ",",    "\\\\\\"};
    static const size_t sizes[] = {10, 4095, 4096, 4097, 100000};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
            struct buf b = {0};
            buf_adds(&b, "{\"a\": [");
            add_long(&b, sizes[k], odd[i]);
            buf_adds(&b, ", {\"b\":\n");
            add_long(&b, sizes[k] + 1, "y");
            buf_adds(&b, ", ");
            add_long(&b, sizes[k], odd[i]); /* a name */
            buf_adds(&b, " \t: 1}], \"c\":");
            add_long(&b, sizes[k], "z");
            buf_adds(&b, "}");
            check_long(b.p, b.len);
            check_long(b.p, b.len - 1);
            check_long(b.p, b.len / 2);
            check_long(b.p, 9 + sizes[k]);
            b.p[b.len - 1] = ']'; /* broken after all strings */
            check_long(b.p, b.len);
            buf_clear(&b);
        }
}

/* Every length, with padding and without; a wrong character at every place. */
static void test_base64(void **state)
{
    (void)state;
    uint8_t bytes[40];
    for (size_t n = 0; n <= sizeof bytes; n++) {
        struct buf text = {0}, back = {0};
        for (size_t i = 0; i < n; i++)
            bytes[i] = (uint8_t)(i * 151 + n);
        base64_encode(bytes, n, &text);
        size_t bare = n ? (n * 8 + 5) / 6 : 0;
        buf_adds(&back, "before");
        assert_true(base64_decode(n ? text.p : "", text.len, &back));
        assert_int_equal(back.len, 6 + n);
        assert_true(base64_decode(n ? text.p : "", bare, &back));
        assert_int_equal(back.len, 6 + 2 * n);
        assert_memory_equal(back.p, "before", 6);
        assert_memory_equal(back.p + 6, bytes, n);
        assert_memory_equal(back.p + 6 + n, bytes, n);
        for (size_t i = 0; i < bare; i++) {
            char was = text.p[i];
            text.p[i] = i % 2 ? '-' : (char)0xc3;
            assert_false(base64_decode(text.p, bare, &back));
            text.p[i] = was;
        }
        buf_clear(&text);
        buf_clear(&back);
    }
}

static void test_guard(void **state)
{
    (void)state;
    struct error err;
    static const char text[] = "{\"a\": [1, 2.5e3, \"x\\\"]},[\", {}, []], \"b\\\\\": null}";
    /* 4 containers; a 1 2.5e3 "x..." b null: 10 values, four deep */
    assert_true(guard(text, (struct json_limits){10, 4, 3}, &err));
    assert_false(guard(text, (struct json_limits){9, 4, 3}, &err));
    assert_non_null(strstr(err.msg, "more than 9 JSON values"));
    assert_false(guard(text, (struct json_limits){10, 3, 3}, &err));
    assert_non_null(strstr(err.msg, "more than 3 JSON arrays and objects"));
    assert_false(guard(text, (struct json_limits){10, 4, 2}, &err));
    assert_non_null(strstr(err.msg, "more than 2 levels"));
    /* broken text is never counted low and never read past its end */
    for (size_t n = 0; n < sizeof text - 1; n++) {
        char *copy = mem_strndup(text, n), *exact = mem_alloc(n ? n : 1);
        memcpy(exact, copy, n);
        assert_true(json_guard(exact, n, &(struct json_limits){10, 4, 3}, NULL, &err));
        mem_free(exact);
        mem_free(copy);
    }
    assert_false(guard("]]]][[[[", (struct json_limits){10, 10, 3}, &err));
    /* several texts, one limit */
    struct json_counts c = {0};
    struct json_limits l = {5, 5, 5};
    assert_true(json_guard("[1,2]", 5, &l, &c, &err));
    assert_false(json_guard("[1,2]", 5, &l, &c, &err));
}

/* What jansson builds of the worst text that passes stays within what the header says. */
static void test_guard_memory(void **state)
{
    (void)state;
    static const struct {
        const char *open, *item, *close;
        size_t each; /* values */
        size_t each_container;
    } shapes[] = {
        {"[", "{}", "]", 1, 1},   {"[", "[]", "]", 1, 1}, {"[", "{\"\":1}", "]", 3, 1},
        {"[", "\"\"", "]", 1, 0}, {"[", "12", "]", 1, 0},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const struct json_limits *l = &json_limits_request;
        size_t n = (l->values - 1) / shapes[i].each;
        if (shapes[i].each_container && n > l->containers - 1)
            n = l->containers - 1;
        struct buf b = {0};
        struct error err = {0};
        buf_adds(&b, shapes[i].open);
        for (size_t k = 0; k < n; k++)
            buf_addf(&b, k ? ",%s" : "%s", shapes[i].item);
        buf_adds(&b, shapes[i].close);
        assert_true(json_guard(b.p, b.len, l, NULL, &err));
        size_t before = mallinfo2().uordblks;
        json_t *v = json_loadb(b.p, b.len, 0, NULL);
        size_t built = mallinfo2().uordblks - before;
        assert_non_null(v);
        printf("    %zu x %s: %zu kB of text, %zu kB built\n", n, shapes[i].item, b.len >> 10,
               built >> 10);
        /* mallinfo says nothing under a sanitizer's allocator */
        assert_true(built <= ((size_t)140 << 20) + 3 * b.len);
        json_decref(v);
        buf_clear(&b);
    }
}

/* ------------------------------------------------------------------ conversations */

static struct chat *chat_of(const char *template)
{
    struct error err = {0};
    struct chat_source s = {.template = (char *)template,
                            .template_len = strlen(template),
                            .bos = (char *)"<s>",
                            .eos = (char *)"</s>"};
    struct chat *c = chat_new(&s, &err);
    if (!c)
        fail_msg("%s", err.msg);
    return c;
}

/* The prompt of n messages of one role, and what it cost. */
static size_t many(const struct chat *c, const char *role, int n, struct budget *w)
{
    json_t *list = json_array();
    for (int i = 0; i < n; i++)
        json_array_append_new(list, json_pack("{s:s,s:s}", "role", role, "content", "You are x."));
    json_array_append_new(list, json_pack("{s:s,s:s}", "role", "user", "content", "Hi"));
    struct chat_request r = {.messages = list, .budget = w};
    struct buf out = {0};
    struct error err = {0};
    if (!chat_render(c, &r, &out, &err))
        fail_msg("%s", err.msg);
    size_t len = out.len;
    buf_clear(&out);
    json_decref(list);
    return len;
}

static const char strict_template[] =
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}";
static const char system_template[] =
    "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('only the first') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}";

/* Joining messages copies each text a bounded number of times: at 150,000 messages the quadratic way
 * would move some hundred gigabytes. */
static void test_merging(void **state)
{
    (void)state;
    static const char *const templates[] = {strict_template, system_template};
    static const char *const roles[] = {"user", "system", "assistant"};
    alarm(300);
    for (size_t t = 0; t < 2; t++) {
        struct chat *c = chat_of(templates[t]);
        for (size_t k = 0; k < 3; k++) {
            bool joins = t == 0 || k == 1;
            struct budget w = {.left = UINT64_MAX}, w2 = {.left = UINT64_MAX};
            size_t small = many(c, roles[k], joins ? 1500 : 400, &w);
            size_t large = many(c, roles[k], joins ? 150000 : 40000, &w2);
            assert_true(large > 80 * small && large < 120 * small);
            assert_true(w2.spent < 120 * w.spent);
        }
        chat_free(c);
    }
    alarm(0);
}

/* A template of one call a message: the results of one message's calls are put behind each. */
static const char one_call_template[] =
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
    "C{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% elif m.role == 'tool' %}R{{ m.content }};{% else %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}";

static json_t *calls_message(int n, const char *format)
{
    json_t *calls = json_array();
    for (int i = 0; i < n; i++) {
        char id[32], name[32];
        snprintf(id, sizeof id, format, i);
        snprintf(name, sizeof name, "f%d", i);
        json_array_append_new(calls,
                              json_pack("{s:s,s:s,s:{s:s,s:s}}", "id", id, "type", "function",
                                        "function", "name", name, "arguments", "{\"a\":1}"));
    }
    return json_pack("{s:s,s:n,s:o}", "role", "assistant", "content", "tool_calls", calls);
}

static json_t *result_message(const char *id, const char *text)
{
    return json_pack("{s:s,s:s,s:s}", "role", "tool", "tool_call_id", id, "content", text);
}

static char *render(const struct chat *c, json_t *messages, struct budget *w)
{
    struct chat_request r = {.messages = messages, .budget = w};
    struct buf out = {0};
    struct error err = {0};
    if (!chat_render(c, &r, &out, &err))
        fail_msg("%s", err.msg);
    json_decref(messages);
    return buf_take(&out);
}

static void test_results(void **state)
{
    (void)state;
    struct chat *c = chat_of(one_call_template);
    assert_true(chat_caps(c)->calls && !chat_caps(c)->two_calls);
    /* out of order, one missing, one id twice in each of two rounds */
    json_t *list = json_pack("[{s:s,s:s}]", "role", "user", "content", "go");
    json_array_append_new(list, calls_message(3, "c%d"));
    json_array_append_new(list, result_message("c2", "two"));
    json_array_append_new(list, result_message("c0", "zero"));
    json_array_append_new(list, calls_message(3, "c%d"));
    json_array_append_new(list, result_message("c1", "later one"));
    json_array_append_new(list, result_message("c0", "later zero"));
    json_array_append_new(list, result_message("x", "nobody's"));
    char *text = render(c, list, NULL);
    assert_string_equal(text, "[user]goCf0{\"a\": 1}Rzero;Cf1{\"a\": 1}Rlater one;"
                              "Cf2{\"a\": 1}Rtwo;Cf0{\"a\": 1}Rlater zero;Cf1{\"a\": 1}"
                              "Cf2{\"a\": 1}Rnobody's;");
    mem_free(text);
    /* and 150,000 of them, in reverse: pairwise comparison would be 10^10 */
    alarm(300);
    int n = 150000;
    list = json_pack("[{s:s,s:s}]", "role", "user", "content", "go");
    json_array_append_new(list, calls_message(n, "call_%d"));
    for (int i = n - 1; i >= 0; i--) {
        char id[32], said[32];
        snprintf(id, sizeof id, "call_%d", i);
        snprintf(said, sizeof said, "r%d", i);
        json_array_append_new(list, result_message(id, said));
    }
    struct budget w = {.left = UINT64_MAX};
    text = render(c, list, &w);
    alarm(0);
    assert_non_null(strstr(text, "Cf149998{\"a\": 1}Rr149998;Cf149999{\"a\": 1}Rr149999;"));
    assert_true(w.spent / (uint64_t)n < 400); /* units a call */
    mem_free(text);
    chat_free(c);
}

/* A budget that is spent ends a render with an error that says so; so does a flag. */
static void test_budget(void **state)
{
    (void)state;
    /* a quadratic template: each message looks at all messages */
    struct chat *c = chat_of("{% for m in messages %}{% for k in messages %}"
                             "{% if k.content == m.content and m.x %}x{% endif %}{% endfor %}"
                             "{{ m.content }}{% endfor %}");
    json_t *list = json_array();
    size_t bytes = 0;
    for (int i = 0; i < 20000; i++) {
        json_array_append_new(list, json_pack("{s:s,s:s}", "role", "user", "content", "abc"));
        bytes += strlen("{\"role\":\"user\",\"content\":\"abc\"},");
    }
    struct budget w = budget_for(bytes, NULL);
    uint64_t had = w.left;
    struct chat_request r = {.messages = list, .budget = &w};
    struct buf out = {0};
    struct error err = {0};
    assert_false(chat_render(c, &r, &out, &err));
    assert_non_null(strstr(err.msg, "too much work"));
    assert_true(w.over && !w.given_up && w.spent <= had && out.len == 0);
    atomic_bool flag = true;
    struct budget w2 = budget_for(bytes, &flag);
    r.budget = &w2;
    assert_false(chat_render(c, &r, &out, &err));
    assert_true(w2.given_up && w2.spent < 100000);
    json_decref(list);
    chat_free(c);
    buf_clear(&out);
    /* budgets grow with the input and end */
    assert_true(budget_for(1 << 20, NULL).left > budget_for(1 << 10, NULL).left);
    assert_true(budget_for(SIZE_MAX, NULL).left == budget_for((size_t)1 << 40, NULL).left);
}

/* The steps that a context brings along have an end, too. */
static void test_template_ends(void **state)
{
    (void)state;
    struct error err = {0};
    static const char text[] = "{% for a in x %}{{ s * 60 }}{% endfor %}";
    struct jinja *t = jinja_compile(text, sizeof text - 1, &err);
    struct buf big = {0}, out = {0};
    for (int i = 0; i < 1 << 21; i++)
        buf_adds(&big, "0123456789abcdef");
    json_t *ctx = json_pack("{s:[i,i,i,i,i,i,i,i],s:o}", "x", 1, 2, 3, 4, 5, 6, 7, 8, "s",
                            json_stringn(big.p, big.len));
    buf_clear(&big);
    assert_false(jinja_render(t, ctx, NULL, &out, &err)); /* 32 MB x 60 x 8 */
    assert_true(out.cap <= (size_t)512 << 20);
    printf("    %s\n", err.msg);
    json_decref(ctx);
    buf_clear(&out);
    jinja_free(t);
}

/* ------------------------------------------------------------------ tokenizers */

#define BPE_AB "'model':{'type':'BPE','vocab':{'a':0,'b':1,'1':2,' ':3},'merges':[]}"

static struct tokenizer *tokenizer_of(const char *rest)
{
    struct buf b = {0};
    buf_addf(&b, "{" BPE_AB "%s%s}", *rest ? "," : "", rest);
    json_t *root = parse(b.p);
    struct tokenizer *t = must_load(root, NULL);
    json_decref(root);
    buf_clear(&b);
    return t;
}

static void fill(struct buf *b, char c, size_t n)
{
    for (size_t i = 0; i < n; i++)
        buf_addc(b, c);
}

/* Normalizers and pre-tokenizers that multiply a text are stopped before they have. */
static void test_multiplying(void **state)
{
    (void)state;
    struct buf rest = {0}, text = {0};
    fill(&text, 'a', 10000);
    for (int kind = 0; kind < 4; kind++) {
        buf_reset(&rest);
        if (kind == 0) { /* a -> a x 1000, three times: 10^13 bytes */
            buf_adds(&rest, "'normalizer':{'type':'Sequence','normalizers':[");
            for (int i = 0; i < 3; i++) {
                buf_addf(&rest, "%s{'type':'Replace','pattern':{'String':'a'},'content':'",
                         i ? "," : "");
                fill(&rest, 'a', 1000);
                buf_adds(&rest, "'}");
            }
            buf_adds(&rest, "]}");
        } else if (kind == 1) { /* the same by regex, doubling 60 times */
            buf_adds(&rest, "'normalizer':{'type':'Sequence','normalizers':[");
            for (int i = 0; i < 60; i++)
                buf_addf(&rest, "%s{'type':'Replace','pattern':{'Regex':'a'},'content':'aa'}",
                         i ? "," : "");
            buf_adds(&rest, "]}");
        } else if (kind == 2) { /* spelled in bytes again and again: doubles 60 times */
            buf_adds(&rest, "'pre_tokenizer':{'type':'Sequence','pretokenizers':[");
            for (int i = 0; i < 60; i++)
                buf_addf(&rest,
                         "%s{'type':'Metaspace','replacement':'\xe2\x96\x81',"
                         "'prepend_scheme':'always','split':false},"
                         "{'type':'Split','pattern':{'String':'\xe2\x96\x81'},"
                         "'behavior':'Isolated'}",
                         i ? "," : "");
            buf_adds(&rest, "]}");
        } else { /* one very long prefix for each of many words */
            buf_adds(&rest, "'normalizer':{'type':'Prepend','prepend':'");
            fill(&rest, 'a', 3000000);
            buf_adds(&rest, "'}");
        }
        struct buf all = {0};
        buf_addf(&all, "{" BPE_AB ",%s}", rest.p);
        for (char *p = all.p; *p; p++)
            if (*p == '\'')
                *p = '"';
        struct error err = {0};
        struct tokenizer *t = tokenizer_load_json(all.p, all.len, "test", NULL, &err);
        if (!t)
            fail_msg("%d: %s", kind, err.msg);
        struct token_list l = {0};
        struct budget w = budget_for(text.len, NULL);
        alarm(300);
        bool ok = tokenizer_encode_within(t, text.p, text.len, 0, &w, &l, &err);
        alarm(0);
        printf("    %d: %s, %llu units\n", kind, ok ? "ok" : err.msg, (unsigned long long)w.spent);
        if (kind != 2)
            assert_false(ok);
        assert_true(l.n <= norm_limit(text.len));
        token_list_clear(&l);
        tokenizer_free(t);
        buf_clear(&all);
    }
    buf_clear(&rest);
    buf_clear(&text);
}

/* Patterns that look at the rest of the text from every place: the budget ends them. These are the
 * published ones of deepseek-llm and of cohere2moe. */
static void test_costly_text(void **state)
{
    (void)state;
    static const char *const patterns[] = {"\\\\s+$", "\\\\d{1,3}(?=(?:\\\\d{3})*\\\\b)"};
    static const char fills[] = {' ', '1'};
    static const char lasts[] = {'1', 'a'};
    alarm(300);
    for (size_t i = 0; i < 2; i++) {
        struct buf rest = {0}, text = {0};
        buf_addf(&rest,
                 "'pre_tokenizer':{'type':'Split','pattern':{'Regex':'%s'},'behavior':'Isolated'}",
                 patterns[i]);
        struct tokenizer *t = tokenizer_of(rest.p);
        fill(&text, fills[i], 1 << 20);
        buf_addc(&text, lasts[i]);
        struct token_list l = {0};
        struct error err = {0};
        struct budget w = {.left = 30000000}; /* about a second */
        bool ok = tokenizer_encode_within(t, text.p, text.len, 0, &w, &l, &err);
        printf("    %s: %s, %llu units\n", patterns[i], ok ? "ok" : err.msg,
               (unsigned long long)w.spent);
        assert_true(!ok && w.over);
        /* given up at once, where nobody waits */
        atomic_bool flag = true;
        w = (struct budget){.left = UINT64_MAX, .cancelled = &flag};
        assert_false(tokenizer_encode_within(t, text.p, text.len, 0, &w, &l, &err));
        assert_true(w.given_up && l.n == 0);
        /* ordinary text is not the dearer for it, and matches far apart are found */
        buf_reset(&text);
        fill(&text, 'a', 200000);
        buf_addc(&text, fills[i]);
        w = budget_for(text.len, NULL);
        assert_true(tokenizer_encode_within(t, text.p, text.len, 0, &w, &l, &err));
        assert_int_equal(l.n, 200001);
        token_list_clear(&l);
        tokenizer_free(t);
        buf_clear(&rest);
        buf_clear(&text);
    }
    alarm(0);
}

/* A search in pieces finds what a search of the whole would. */
static void test_regex_pieces(void **state)
{
    (void)state;
    struct error err = {0};
    struct regex *re =
        regex_new("(?<=b)\xc3\xa9+(?=c)", strlen("(?<=b)\xc3\xa9+(?=c)"), false, &err);
    assert_non_null(re);
    struct buf text = {0};
    size_t want[3];
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 40000 + 7 * i; k++)
            buf_adds(&text, "\xc3\xa9");
        buf_addc(&text, 'b');
        want[i] = text.len;
        buf_adds(&text, "\xc3\xa9\xc3\xa9"
                        "c");
    }
    struct regex_scratch s = {0};
    struct regex_iter it = regex_iter_start();
    size_t start, end;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(regex_next(re, &s, &it, text.p, text.len, &start, &end, &err),
                         REGEX_FOUND);
        assert_int_equal(start, want[i]);
        assert_int_equal(end, want[i] + 4);
    }
    assert_int_equal(regex_next(re, &s, &it, text.p, text.len, &start, &end, &err), REGEX_NONE);
    regex_scratch_clear(&s);
    regex_free(re);
    buf_clear(&text);
}

/* Vocabularies made to be walked: long common beginnings at every place of the text. */
static void test_long_walks(void **state)
{
    (void)state;
    struct buf text = {0}, json = {0};
    struct error err = {0};
    fill(&text, 'a', 10000);
    for (int kind = 0; kind < 2; kind++) {
        buf_reset(&json);
        if (kind == 0) { /* an added token of 4,000 times a, and a b that never comes */
            buf_adds(&json, "{" BPE_AB ",'added_tokens':[{'id':4,'content':'");
            fill(&json, 'a', 4000);
            buf_adds(&json, "b','special':false,'normalized':false}]}");
        } else {
            buf_adds(&json, "{'model':{'type':'Unigram','unk_id':0,'vocab':[['u',0],['a',-1],['");
            fill(&json, 'a', 20000);
            buf_adds(&json, "b',-2]]}}");
        }
        for (char *p = json.p; *p; p++)
            if (*p == '\'')
                *p = '"';
        struct tokenizer *t = tokenizer_load_json(json.p, json.len, "test", NULL, &err);
        if (!t)
            fail_msg("%s", err.msg);
        struct token_list l = {0};
        struct budget w = {.left = UINT64_MAX};
        assert_true(tokenizer_encode_within(t, text.p, text.len, 0, &w, &l, &err));
        assert_int_equal(l.n, 10000);
        assert_true(w.spent > 2000000); /* it is seen ... */
        l.n = 0;
        w = (struct budget){.left = 1000000};
        assert_false(tokenizer_encode_within(t, text.p, text.len, 0, &w, &l, &err));
        assert_true(w.over && l.n == 0); /* ... and ended */
        token_list_clear(&l);
        tokenizer_free(t);
    }
    buf_clear(&text);
    buf_clear(&json);
}

/* A decoder that multiplies the vocabulary is refused at loading. */
static void test_decoder(void **state)
{
    (void)state;
    struct buf json = {0};
    struct error err = {0};
    buf_adds(&json, "{" BPE_AB ",'decoder':{'type':'Sequence','decoders':[");
    for (int i = 0; i < 100; i++)
        buf_addf(&json, "%s{'type':'Replace','pattern':{'String':'a'},'content':'aa'}",
                 i ? "," : "");
    buf_adds(&json, "]}}");
    for (char *p = json.p; *p; p++)
        if (*p == '\'')
            *p = '"';
    assert_null(tokenizer_load_json(json.p, json.len, "test", NULL, &err));
    assert_non_null(strstr(err.msg, "decoder"));
    buf_clear(&json);
}

/* ------------------------------------------------------------------ samplers */

/* A million biases, each token twice: comparing pairs would be 10^12. */
static void test_biases(void **state)
{
    (void)state;
    enum { VOCAB = 500000, N = 2 * VOCAB };
    struct logit_bias *bias = mem_zalloc(N, sizeof *bias);
    struct logit_edit *e = mem_zalloc(N, sizeof *e);
    for (int i = 0; i < N; i++)
        bias[i] = (struct logit_bias){(int32_t)((int64_t)i * 7919 % VOCAB), i < VOCAB ? 1 : 0.5f};
    struct sample_params p = {
        .top_p = 1, .repeat_penalty = 2, .repeat_last_n = -1, .bias = bias, .n_bias = N};
    alarm(60);
    struct sampler *s = sampler_new(&p, VOCAB);
    for (int32_t i = 0; i < VOCAB; i += 2)
        sampler_accept(s, i, false);
    assert_int_equal(sampler_edits(s, e, N), VOCAB);
    for (int i = 0; i < VOCAB; i++)
        assert_true(e[i].bias == 1.5f && e[i].repeat == (e[i].token % 2 ? 1.0f : 2.0f));
    /* the later half is dropped, as the bans of min_tokens are */
    sampler_keep_bias(s, VOCAB);
    assert_int_equal(sampler_edits(s, e, N), VOCAB);
    for (int i = 0; i < VOCAB; i++)
        assert_true(e[i].bias == 1.0f);
    alarm(0);
    sampler_free(s);
    mem_free(bias);
    mem_free(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_guard),        cmocka_unit_test(test_long_strings),
        cmocka_unit_test(test_base64),       cmocka_unit_test(test_guard_memory),
        cmocka_unit_test(test_merging),      cmocka_unit_test(test_results),
        cmocka_unit_test(test_budget),       cmocka_unit_test(test_template_ends),
        cmocka_unit_test(test_multiplying),  cmocka_unit_test(test_costly_text),
        cmocka_unit_test(test_regex_pieces), cmocka_unit_test(test_long_walks),
        cmocka_unit_test(test_decoder),      cmocka_unit_test(test_biases),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
