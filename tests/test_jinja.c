/*
 * The Jinja engine: every golden chat-template case byte for byte, the project's own table of
 * language cases (tests/data/jinja_cases.jsonl, answers by jinja2 as transformers sets it up), errors
 * with their lines, hostile templates, threads rendering one template, and the speed of a long chat.
 */
#include "base/buf.h"
#include "base/mem.h"
#include "text/jinja/jinja.h"

#include <jansson.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <setjmp.h>
#include <cmocka.h>

#define GOLDEN "../shared/golden/templates/"

/* 2026-07-26 12:30:00, a Sunday: the clock of all cases. */
static const struct tm now = {.tm_year = 126,
                              .tm_mon = 6,
                              .tm_mday = 26,
                              .tm_hour = 12,
                              .tm_min = 30,
                              .tm_wday = 0,
                              .tm_yday = 206,
                              .tm_isdst = 0};
static const struct jinja_options opts = {.now = &now};

static char *read_file(const char *path, size_t *len)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return NULL;
    struct buf b = {0};
    char chunk[65536];
    size_t n;
    while ((n = fread(chunk, 1, sizeof(chunk), f)) > 0)
        buf_add(&b, chunk, n);
    fclose(f);
    *len = b.len;
    return buf_take(&b);
}

/* Renders; the result is in out, or the message in err. */
static bool render(const char *src, size_t len, const json_t *ctx, struct buf *out,
                   struct error *err)
{
    struct jinja *t = jinja_compile(src, len, err);
    bool ok = t && jinja_render(t, ctx, &opts, out, err);
    jinja_free(t);
    return ok;
}

/* One line {template | source, context, output | error}; true if the answer is the expected one. */
static bool check_case(const json_t *c, const char *src, size_t len)
{
    struct buf out = {0};
    struct error err = {0};
    bool ok = render(src, len, json_object_get(c, "context"), &out, &err), same;
    const json_t *want = json_object_get(c, "output");
    if (want)
        same = ok && out.len == json_string_length(want) &&
               !memcmp(out.p, json_string_value(want), out.len);
    else
        same = !ok && err.msg[0];
    if (!same) {
        printf("case %s / %s\n", json_string_value(json_object_get(c, "template")),
               json_string_value(json_object_get(c, "case")));
        if (json_object_get(c, "source"))
            printf("  source: %s\n", src);
        printf("  want: %s\n   got: %s%s\n",
               want ? json_string_value(want) : json_string_value(json_object_get(c, "error")),
               ok ? "" : "error: ", ok ? out.p : err.msg);
    }
    buf_clear(&out);
    return same;
}

/* Runs the lines of a .jsonl file; each names a template file in dir or holds its source. */
static void run_cases(const char *path, const char *dir)
{
    FILE *f = fopen(path, "r");
    if (!f) {
        printf("skipped: %s is not here\n", path);
        skip();
    }
    char *line = NULL;
    size_t cap = 0;
    int n = 0, failed = 0, n_errors = 0;
    while (getline(&line, &cap, f) > 0) {
        json_error_t je;
        json_t *c = json_loads(line, 0, &je);
        assert_non_null(c);
        const json_t *source = json_object_get(c, "source");
        char *src;
        size_t len;
        if (source) {
            len = json_string_length(source);
            src = mem_strndup(json_string_value(source), len);
        } else {
            char name[512];
            const char *t = json_string_value(json_object_get(c, "template"));
            snprintf(name, sizeof(name), "%s%s%s", dir, t, strstr(t, ".jinja") ? "" : ".jinja");
            src = read_file(name, &len);
        }
        assert_non_null(src);
        failed += !check_case(c, src, len);
        n_errors += json_object_get(c, "error") != NULL;
        n++;
        mem_free(src);
        json_decref(c);
    }
    free(line);
    fclose(f);
    printf("%s: %d cases (%d of them errors), %d differ\n", path, n, n_errors, failed);
    assert_true(n > 0);
    assert_int_equal(failed, 0);
}

static void test_golden(void **state)
{
    (void)state;
    run_cases(GOLDEN "cases.jsonl", GOLDEN);
}

static void test_language(void **state)
{
    (void)state;
    run_cases("tests/data/jinja_cases.jsonl", "");
}

/* ------------------------------------------------------------------ errors */

static void expect_error(const char *src, const char *part)
{
    struct buf out = {0};
    struct error err = {0};
    buf_adds(&out, "kept");
    bool ok = render(src, strlen(src), NULL, &out, &err);
    if (ok || !strstr(err.msg, part))
        printf("%s\n  want an error with: %s\n  got: %s\n", src, part, ok ? out.p : err.msg);
    assert_false(ok);
    assert_non_null(strstr(err.msg, part));
    assert_string_equal(out.p, "kept");
    buf_clear(&out);
}

static void test_errors(void **state)
{
    (void)state;
    expect_error("a\nb\n{{ x.y }}", "line 3: 'x' is undefined");
    expect_error("{% if x %}", "'if' of line 1 is not closed");
    expect_error("\n{% for a in b %}\n{% if a %}{% endfor %}", "unknown tag 'endfor'");
    expect_error("{% if a %}{% elif %}{% endif %}", "line 1: Expected an expression");
    expect_error("{{ 1 +\n\n }}", "line 3: unexpected 'end of print statement'");
    expect_error("{{ 'abc }}", "line 1: unexpected char '''");
    expect_error("{# never", "Missing end of comment tag");
    expect_error("{% raw %} never", "Missing end of raw directive");
    expect_error("{{ (1 }}", "unexpected '}', expected ')'");
    expect_error("{{ a b }}", "expected 'end of print statement', got 'b'");
    expect_error("{% include 'x' %}", "'include' is not available");
    expect_error("{% import 'x' as y %}", "'import' is not available");
    expect_error("{% break %}", "'break' outside of a loop");
    expect_error("{% nonsense %}", "unknown tag 'nonsense'");
    expect_error("{{ 1|nonsense }}", "No filter named 'nonsense'.");
    expect_error("{{ 1 is nonsense }}", "No test named 'nonsense'.");
    expect_error("\n\n{{ raise_exception('my words') }}", "line 3: my words");
    expect_error("{{ {}['a'].b }}", "'dict object' has no attribute 'a'");
    expect_error("{{ none[0] + 1 }}", "None has no element 0");
    expect_error("{{ 'a' + 1 }}", "can only concatenate str (not \"int\") to str");
    expect_error("{{ [].append(1) }}", "access to attribute 'append' of 'list' object is unsafe.");
    expect_error("{{ {}.update({}) }}", "access to attribute 'update' of 'dict' object is unsafe.");
    expect_error("{{ 9223372036854775807 + 1 }}", "does not fit in 64 bits");
    expect_error("{{ 9223372036854775808 }}", "does not fit in 64 bits");
    expect_error("{{ 1 // 0 }}", "by zero");
    expect_error("{{ x|tojson }}", "Object of type Undefined is not JSON serializable");
    expect_error("{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "takes not more than 1");
    expect_error("{% macro m(a) %}{% endmacro %}{{ m(b=2) }}", "takes no keyword argument 'b'");
    expect_error("{% for a, b in [[1]] %}{% endfor %}", "not enough values to unpack");
    expect_error("{% for a in none %}{% endfor %}", "'NoneType' object is not iterable");
    expect_error("{% set a.b = 1 %}", "'a' is undefined");
    expect_error("{% set 1 = 2 %}", "can't assign to a constant");
    expect_error("\xff", "not valid UTF-8");
    expect_error("{{ 'a' % 1 }}", "not all arguments converted");
    expect_error("{{ '%d' % 'x' }}", "a real number is required, not str");
    expect_error("{{ loop.index }}", "'loop' is undefined");
    expect_error("{% for x in [1] %}{{ loop([1]) }}{% endfor %}", "'recursive' marker");
    expect_error("{{ f(**[1]) }}", "must be a mapping");
}

/* ------------------------------------------------------------------ hostile templates */

static char *repeat(const char *head, const char *body, int n, const char *tail)
{
    struct buf b = {0};
    buf_adds(&b, head);
    for (int i = 0; i < n; i++)
        buf_adds(&b, body);
    buf_adds(&b, tail);
    return buf_take(&b);
}

static void hostile(const char *src, const json_t *ctx)
{
    struct buf out = {0};
    struct error err = {0};
    bool ok = render(src, strlen(src), ctx, &out, &err);
    printf("%.60s  ->  %.100s\n", src, ok ? "rendered!" : err.msg);
    assert_false(ok);
    assert_true(err.msg[0]);
    buf_clear(&out);
}

static void hostile_repeat(const char *head, const char *body, int n, const char *tail)
{
    char *src = repeat(head, body, n, tail);
    hostile(src, NULL);
    mem_free(src);
}

static void test_hostile(void **state)
{
    (void)state;
    static const char *const sources[] = {
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i*j }}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 'ab' * 10**18 }}",
        "{{ [1] * 10**9 }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(200) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(200) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s='') %}{% for i in range(99999) %}{% set ns.s = 'x'*1000 + ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s=[]) %}{% for i in range(99999) %}{% set ns.s = ns.s + [i] %}"
        "{% endfor %}",
        "{% set ns = namespace(s=[]) %}{% for i in range(99999) %}{% set ns.s = [ns.s] %}"
        "{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[]) %}{% for i in range(99999) %}{% set ns.s = [ns.s] %}"
        "{% endfor %}{{ ns.s|tojson }}",
        "{% set ns = namespace(s=()) %}{% for i in range(99999) %}{% set ns.s = (ns.s,) %}"
        "{% endfor %}{{ {ns.s: 1} }}",
        "{% set ns = namespace(s=[],t=[]) %}{% for i in range(9999) %}{% set ns.s = [ns.s] %}"
        "{% set ns.t = [ns.t] %}{% endfor %}{{ ns.s == ns.t }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
        "{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}"
        "{% endfor %}{{ ns.s|pprint }}",
        "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] "
        "%}"
        "{% set ns.t = [ns.t, ns.t] %}{% endfor %}{{ ns.s == ns.t }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.a = [ns] %}{{ ns.a|tojson }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(x) %}{{ m(x ~ 'aaaaaaaaaaaaaaaa') }}{% endmacro %}{{ m('') }}",
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{% macro m() %}{{ caller() }}{% endmacro %}{% macro r() %}{% call m() %}{{ r() }}"
        "{% endcall %}{% endmacro %}{{ r() }}",
        "{% macro m(n) %}{{ m(n+1) }}{{ m(n+1) }}{% endmacro %}{{ m(0) }}",
        "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{% endfor %}",
        "{{ '%99999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:>999999999}'.format('x') }}",
        "{{ '%.999999999f' % 1.5 }}",
        "{{ 'x'.center(10**9) }}",
        "{{ 'x'.ljust(10**12) }}",
        "{{ 'x'|indent(10**9) }}",
        "{{ '\\n'.join(['x'] * 1000) | indent(10**6) }}",
        "{{ [1]|batch(10**9, 0)|list }}",
        "{{ [1]|slice(10**9)|list }}",
        "{{ [[1]]|tojson(indent=10**9) }}",
        "{% set s = 'a' * 10**6 %}{% for i in range(99999) %}{{ s.count('b') }}{% endfor %}",
        "{% set s = 'a' * 10**6 %}{% for i in range(99999) %}{{ s == s[:-1] + 'b' }}{% endfor %}",
        "{% set s = 'a' * 10**6 %}{% for i in range(99999) %}{{ s|length }}{% endfor %}",
        "{% set s = 'a' * 10**6 %}{% for i in range(99999) %}{{ s.rfind('a' * 1000 + 'b') }}"
        "{% endfor %}",
        "{% set s = 'a' * 10**5 %}{{ s.replace('', s) }}",
        "{% set s = 'a ' * 10**6 %}{% for i in range(99999) %}{{ s.split()|length }}{% endfor %}",
        "{% set s = ' ' * 10**6 %}{% for i in range(99999) %}{{ s.strip(s) }}{% endfor %}",
        "{% set s = 'x' * 10**6 %}{% for i in range(999) %}{{ s.strip(s[:-1] ~ 'y') }}{% endfor %}",
        "{% set s = 'a' * 10**5 %}{% for i in range(99999) %}{{ s|upper }}{% endfor %}",
        "{% set s = 'a' * 10**6 %}{% for c in s %}{% for d in s %}{% endfor %}{% endfor %}",
        "{{ (range(99999)|list + range(99999)|list)|sort|map('string')|sort|join|list|sort"
        "|unique|list|groupby(0)|string * 99999 }}",
        "{{ 'a' * 10**7 ~ raise_exception('x' * 10**7) }}",
        "{{ 2 ** 2 ** 2 ** 2 ** 2 ** 2 ** 2 ** 2 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ (-9223372036854775807 - 1) // -1 }}",
        "{{ (-9223372036854775807 - 1)|abs }}",
        "{{ range(9223372036854775806, -9223372036854775807, -1) }}",
        "{{ f(*range(99999), *range(99999)) }}",
        "{{ strftime_now('%c' * 9999) }}",
        "{% set ns = namespace(x=1) %}{% for i in range(99999) %}{% set ns.x = ns.x + 1 %}"
        "{% for j in range(1000) if ns.x < 0 %}{% endfor %}{% endfor %}",
        "{% filter replace('a', 'aaaaaaaaaaaaaaaaaaaa')|replace('a', 'aaaaaaaaaaaaaaaaaaaa')"
        "|replace('a', 'aaaaaaaaaaaaaaaaaaaa')|replace('a', 'aaaaaaaaaaaaaaaaaaaa')"
        "|replace('a', 'aaaaaaaaaaaaaaaaaaaa')|replace('a', 'aaaaaaaaaaaaaaaaaaaa') %}a"
        "{% endfilter %}",
    };
    for (size_t i = 0; i < sizeof(sources) / sizeof(sources[0]); i++)
        hostile(sources[i], NULL);
    hostile_repeat("{{ ", "(", 100000, " }}");
    hostile_repeat("{{ ", "[", 5000, " }}");
    hostile_repeat("{{ ", "-", 100000, "1 }}");
    hostile_repeat("{{ ", "not ", 50000, "1 }}");
    hostile_repeat("{{ 1", " + 1", 50000, " }}");
    hostile_repeat("{{ x", ".a", 50000, " }}");
    hostile_repeat("{{ x", "|upper", 50000, " }}");
    hostile_repeat("{{ 1", " if 1 else 1", 20000, " }}");
    hostile_repeat("{{ m", "(1)", 50000, " }}");
    hostile_repeat("", "{% if x %}", 40000, "");
    hostile_repeat("", "{% for x in y %}", 30000, "");
    hostile_repeat("", "{{ x.y }}", 50000, "");
    hostile_repeat("", "{%", 200000, "");
    hostile_repeat("{{ '", "\\", 100001, "' }}");
    hostile_repeat("x", "y", 1000000, "");
    hostile_repeat("{% if 0 %}", "{% elif 0 %}", 30000, "{% endif %}{{ x.y }}");

    /* A context deeper than anything may be walked. */
    json_t *deep = json_object();
    for (int i = 0; i < 5000; i++) {
        json_t *up = json_object();
        json_object_set_new(up, "a", deep);
        deep = up;
    }
    hostile("{{ a|tojson }}", deep);
    json_decref(deep);
}

/* ------------------------------------------------------------------ long chats, threads */

static json_t *long_chat(int n_messages, int n_tools)
{
    json_t *ctx = json_object(), *messages = json_array(), *tools = json_array();
    for (int i = 0; i < n_messages; i++) {
        char text[256];
        snprintf(text, sizeof(text),
                 "%sMessage number %d of a long chat, with a few words so that it has about the "
                 "length that people write to each other, and a line break.\nAnd the rest.",
                 i % 2 ? "<think>\nSome thoughts.\n</think>\n\n" : "", i);
        json_array_append_new(messages, json_pack("{s:s,s:s}", "role", i % 2 ? "assistant" : "user",
                                                  "content", text));
    }
    for (int i = 0; i < n_tools; i++) {
        json_array_append_new(
            tools, json_pack("{s:s,s:{s:s,s:s,s:{s:s,s:{s:{s:s,s:s},s:{s:s,s:[s,s]}},s:[s]}}}",
                             "type", "function", "function", "name", "get_weather", "description",
                             "The weather now, in a place, in the unit asked for", "parameters",
                             "type", "object", "properties", "place", "type", "string",
                             "description", "a city", "unit", "type", "string", "enum", "celsius",
                             "fahrenheit", "required", "place"));
    }
    json_object_set_new(ctx, "messages", messages);
    json_object_set_new(ctx, "tools", tools);
    json_object_set_new(ctx, "add_generation_prompt", json_true());
    return ctx;
}

static struct jinja *load_gpt_oss(void)
{
    size_t len;
    struct error err = {0};
    char *src = read_file("tests/data/gpt_oss.jinja", &len);
    assert_non_null(src);
    struct jinja *t = jinja_compile(src, len, &err);
    assert_non_null(t);
    mem_free(src);
    return t;
}

/* A conversation of any length renders: the bounds grow with it. */
static void test_long(void **state)
{
    (void)state;
    struct jinja *t = load_gpt_oss();
    json_t *ctx = long_chat(20000, 5);
    struct buf out = {0};
    struct error err = {0};
    if (!jinja_render(t, ctx, &opts, &out, &err))
        fail_msg("20,000 messages: %s", err.msg);
    buf_clear(&out);
    json_decref(ctx);
    jinja_free(t);
}

struct job {
    const struct jinja *t;
    const json_t *ctx;
    const struct buf *want;
    bool same;
};

static void *render_many(void *arg)
{
    struct job *j = arg;
    struct buf out = {0};
    struct error err;
    j->same = true;
    for (int i = 0; i < 50; i++) {
        buf_reset(&out);
        j->same &= jinja_render(j->t, j->ctx, &opts, &out, &err) && out.len == j->want->len &&
                   !memcmp(out.p, j->want->p, out.len);
    }
    buf_clear(&out);
    return NULL;
}

static void test_threads(void **state)
{
    (void)state;
    struct jinja *t = load_gpt_oss();
    json_t *ctx = long_chat(20, 2);
    struct buf want = {0};
    struct error err;
    assert_true(jinja_render(t, ctx, &opts, &want, &err));
    pthread_t id[4];
    struct job jobs[4];
    for (int i = 0; i < 4; i++) {
        jobs[i] = (struct job){t, ctx, &want, false};
        assert_int_equal(pthread_create(&id[i], NULL, render_many, &jobs[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(id[i], NULL);
        assert_true(jobs[i].same);
    }
    buf_clear(&want);
    json_decref(ctx);
    jinja_free(t);
}

static void test_clock(void **state)
{
    (void)state;
    struct buf out = {0};
    struct error err = {0};
    const char *src = "{{ strftime_now('%Y-%m-%d %H:%M:%S %A %d %b %j %f %% %-d x') }}";
    assert_true(render(src, strlen(src), NULL, &out, &err));
    assert_string_equal(out.p, "2026-07-26 12:30:00 Sunday 26 Jul 207 000000 % 26 x");
    struct jinja *t = jinja_compile("{{ strftime_now('%Y')|int > 2024 }}", 35, &err);
    buf_reset(&out);
    assert_true(jinja_render(t, NULL, NULL, &out, &err)); /* the real clock */
    assert_string_equal(out.p, "True");
    assert_true(jinja_uses(t, "strftime_now"));
    assert_false(jinja_uses(t, "tools"));
    jinja_free(t);
    buf_clear(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden), cmocka_unit_test(test_language),
        cmocka_unit_test(test_errors), cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_long),   cmocka_unit_test(test_threads),
        cmocka_unit_test(test_clock),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
