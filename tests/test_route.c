/* The gateway's parts without a network: hashes of prompts, the choice, health, answers, URLs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/error.h"
#include "base/mem.h"
#include "route/http_response.h"
#include "route/balancer.h"
#include "route/upstream.h"

static void hashes_of(const char *body, uint64_t seed, struct prefix_hashes *m)
{
    struct body_fields f;
    body_fields_find(body, strlen(body), &f);
    prefix_hashes_make(&f, seed, m);
}

/* Marks that two have in common from the start. */
static int common(const struct prefix_hashes *a, const struct prefix_hashes *b)
{
    int n = 0;
    while (n < a->n && n < b->n && a->hash[n] == b->hash[n])
        n++;
    return n;
}

static void test_fields(void **state)
{
    (void)state;
    struct body_fields f;
    char text[32];
    const char *body = " {\"a\":[{\"model\":1}],\"model\" : \"m-1\",\"x\":\"\\\\\\\"}\",\n"
                       "\"messages\":[{\"content\":\"]}\"}],\"previous_response_id\":\"resp_9\"}";
    body_fields_find(body, strlen(body), &f);
    assert_true(body_span_text(&f.model, text, sizeof text));
    assert_string_equal(text, "m-1");
    assert_int_equal(f.messages.n, strlen("[{\"content\":\"]}\"}]"));
    assert_true(body_span_text(&f.previous, text, sizeof text));
    assert_string_equal(text, "resp_9");
    assert_false(body_span_text(&f.previous, text, 6)); /* no room */
    assert_null(f.prompt.p);
    static const char *const broken[] = {
        "",    "[1]",           "{\"model\"",      "{\"model\":",
        "{\"", "{\"model\":\"", "{\"prompt\":[[]", "{\"a\":1 \"model\":2}"};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        body_fields_find(broken[i], strlen(broken[i]), &f);
        assert_null(f.model.p);
        assert_null(f.prompt.p);
    }
}

/* The fields of /infill and /v1/responses that choose a replica. */
static void test_choosing_fields(void **state)
{
    (void)state;
    static struct prefix_hashes a, b;
    hashes_of(
        "{\"input_prefix\":\"a file of some length, which the model has read\",\"prompt\":\"x\"}",
        1, &a);
    hashes_of("{\"prompt\":\"y\",\"input_suffix\":\"z\",\"input_prefix\":\"a file of some length, "
              "which the model has read\"}",
              1, &b);
    assert_true(a.length > 40 && a.length == b.length && common(&a, &b) == a.n);
    hashes_of("{\"input_extra\":[{\"text\":\"other\"}],\"input_prefix\":\"a file of some length, "
              "which the model has read\"}",
              1, &b);
    assert_int_equal(common(&a, &b), 0);
    static const struct {
        const char *body, *id;
    } cases[] = {
        {"{\"conversation\":\"conv_1\"}", "conv_1"},
        {"{\"conversation\": {\"x\":{\"id\":\"no\"}, \"id\" : \"conv_2\"}}", "conv_2"},
        {"{\"conversation\":null}", NULL},
        {"{\"conversation\":{}}", NULL},
        {"{\"conversation\":{\"id\":5}}", NULL},
        {"{\"conversation\":{\"id\":\"a", NULL},
        {"{\"input\":\"x\"}", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct body_fields f;
        char id[16];
        body_fields_find(cases[i].body, strlen(cases[i].body), &f);
        bool found = body_conversation_id(&f, id, sizeof id);
        assert_true(found == (cases[i].id != NULL) && (!found || !strcmp(id, cases[i].id)));
    }
}

static void test_hashes(void **state)
{
    (void)state;
    static struct prefix_hashes a, b;
    /* A turn later: all hashes of the turn before are there again; blanks do not count. */
    hashes_of("{\"messages\":[{\"role\":\"user\",\"content\":\"How tall is the tower of Pisa?\"}]}",
              1, &a);
    hashes_of(
        "{\"stream\":true,\"messages\":[ {\"role\": \"user\", \"content\":\"How tall is the tower "
        "of "
        "Pisa?\"},\n {\"role\":\"assistant\",\"content\":\"56 m\"},{\"role\":\"user\",\"content\":"
        "\"And why does it lean?\"}]}",
        1, &b);
    assert_true(a.n >= 1);
    assert_int_equal(common(&a, &b), a.n);
    assert_int_equal(a.at[a.n - 1], a.length);
    /* Another key, model, tools or system text: nothing in common. */
    hashes_of("{\"messages\":[{\"role\":\"user\",\"content\":\"How tall is the tower of Pisa?\"}]}",
              2, &b);
    assert_int_equal(common(&a, &b), 0);
    static const char *const before[] = {"\"model\":\"x\"", "\"tools\":[{}]", "\"system\":\"s\"",
                                         "\"instructions\":\"s\""};
    for (size_t i = 0; i < sizeof before / sizeof *before; i++) {
        char text[256];
        snprintf(text, sizeof text,
                 "{\"messages\":[{\"role\":\"user\",\"content\":\"How tall is the tower of "
                 "Pisa?\"}],%s}",
                 before[i]);
        hashes_of(text, 1, &b);
        assert_true(b.n > 0);
        assert_int_equal(common(&a, &b), 0);
    }
    /* A long prompt has few hashes, and they reach its end. */
    size_t n = 900000;
    char *long_one = malloc(n + 32);
    assert_non_null(long_one);
    size_t at = (size_t)sprintf(long_one, "{\"prompt\":\"");
    memset(long_one + at, 'x', n);
    strcpy(long_one + at + n, "\"}");
    hashes_of(long_one, 1, &a);
    assert_true(a.n > 100 && a.n < 400);
    assert_true(a.at[a.n - 1] > n * 15 / 16);
    /* Different in the middle: half the hashes at most are the same, and nearly half the text. */
    long_one[at + n / 2] = 'y';
    hashes_of(long_one, 1, &b);
    int same = common(&a, &b);
    assert_true(same > 0 && a.at[same - 1] < n / 2 + 2 && a.at[same - 1] > n * 7 / 16);
    /* 64k messages: bounded. */
    at = (size_t)sprintf(long_one, "{\"messages\":[");
    for (int i = 0; i < 30000; i++)
        at += (size_t)sprintf(long_one + at, "%s{\"role\":\"user\"}", i ? "," : "");
    strcpy(long_one + at, "]}");
    hashes_of(long_one, 1, &a);
    assert_int_equal(a.n, HASHES_MAX);
    free(long_one);
    /* What says nothing has none. */
    hashes_of("{\"documents\":[\"hello hello hello hello hello hello hello hello hello\"]}", 1, &a);
    assert_int_equal(a.n, 0);
}

static const int64_t S = 1000000000;

static struct balancer *route_of(int n, int max_load, size_t prefixes)
{
    const struct balancer_options o = {.n = n,
                                       .fails = 2,
                                       .rises = 2,
                                       .slow_start_ns = 10 * S,
                                       .max_load = max_load,
                                       .n_prefixes = prefixes,
                                       .n_pins = 16};
    struct balancer *r = balancer_new(&o);
    for (int i = 0; i < n; i++)
        assert_true(balancer_probe_good(r, i, S));
    assert_int_equal(balancer_n_in(r), n);
    return r;
}

static struct prefix_hashes *made_marks(uint64_t start, int n, struct prefix_hashes *m)
{
    m->n = n;
    m->length = (uint32_t)n * 64;
    for (int i = 0; i < n; i++) {
        m->hash[i] = (start + (uint64_t)i) * 0x9e3779b97f4a7c15u;
        m->at[i] = (uint32_t)(i + 1) * 64;
    }
    return m;
}

static void test_choice(void **state)
{
    (void)state;
    static struct prefix_hashes m, other;
    enum balancer_reason why;
    struct balancer *r = route_of(3, 4, 1024);
    /* By load: all get their turn. */
    int seen = 0;
    for (int i = 0; i < 3; i++) {
        int to = balancer_choose(r, NULL, 7, S, &why);
        assert_int_equal(why, BALANCER_BY_LOAD);
        balancer_begin(r, to, NULL);
        seen |= 1 << to;
    }
    assert_int_equal(seen, 7);
    /* Where the beginning is, even with more to do there. */
    made_marks(1, 10, &m);
    balancer_begin(r, 1, &m);
    assert_int_equal(balancer_choose(r, &m, 7, S, &why), 1);
    assert_int_equal(why, BALANCER_BY_PREFIX);
    /* A longer prompt with the same beginning follows it. */
    made_marks(1, 14, &other);
    assert_int_equal(balancer_choose(r, &other, 7, S, &why), 1);
    /* But not into one that is full, out, or not among those asked for. */
    balancer_begin(r, 1, NULL);
    balancer_begin(r, 1, NULL);
    assert_int_not_equal(balancer_choose(r, &m, 7, S, &why), 1);
    assert_int_equal(balancer_choose(r, &m, 4, S, &why), 2);
    assert_int_equal(balancer_choose(r, &m, 0, S, &why), -1);
    assert_int_equal(why, BALANCER_NONE_IN);
    assert_int_equal(balancer_choose(r, &m, 2, S, &why), -1);
    assert_int_equal(why, BALANCER_ALL_FULL);
    balancer_end(r, 1);
    assert_int_equal(balancer_choose(r, &m, 7, S, &why), 1);
    balancer_forget(r, 1);
    assert_int_not_equal(balancer_choose(r, &m, 7, S, &why), 1);
    balancer_free(r);
}

/* A beginning that all prompts share must not pile them up on one replica. */
static void test_shared_beginning(void **state)
{
    (void)state;
    static struct prefix_hashes m;
    struct balancer *r = route_of(4, 1000, 1 << 16);
    enum balancer_reason why;
    for (int i = 0; i < 200; i++) {
        made_marks(1, 20, &m); /* 18 of the same, 2 of its own */
        m.hash[18] += (uint64_t)i * 1000003 + 1;
        m.hash[19] += (uint64_t)i * 1000003 + 1;
        int to = balancer_choose(r, &m, 15, S, &why);
        balancer_begin(r, to, &m);
    }
    for (int i = 0; i < 4; i++) {
        assert_true(balancer_replica(r, i)->load >= 30);
        assert_true(balancer_replica(r, i)->load <= 80);
    }
    balancer_free(r);
}

static void test_table_is_bounded(void **state)
{
    (void)state;
    static struct prefix_hashes m, first;
    enum balancer_reason why;
    struct balancer *r = route_of(2, 100000, 1024);
    made_marks(1, 100, &first);
    balancer_begin(r, 0, &first);
    for (uint64_t i = 1; i <= 100; i++) {
        if (i % 4 == 0) { /* what is used stays */
            balancer_begin(r, 0, &first);
            balancer_end(r, 0);
        }
        balancer_begin(r, 1, made_marks(i * 1000000, 100, &m));
        balancer_end(r, 1);
    }
    balancer_end(r, 0);
    assert_int_equal(balancer_choose(r, &first, 3, S, &why), 0);
    assert_int_equal(why, BALANCER_BY_PREFIX);
    assert_int_equal(balancer_choose(r, made_marks(1000000, 100, &m), 3, S, &why) >= 0, 1);
    assert_int_equal(why, BALANCER_BY_LOAD); /* forgotten */
    for (uint64_t i = 0; i < 1000; i++)
        balancer_pin(r, i * 77 + 1, (int)(i % 2));
    assert_int_equal(balancer_pinned(r, 999 * 77 + 1), 1);
    assert_int_equal(balancer_pinned(r, 1), -1);
    balancer_free(r);
}

static void test_health(void **state)
{
    (void)state;
    enum balancer_reason why;
    struct balancer *r = route_of(2, 100, 64);
    assert_false(balancer_probe_bad(r, 0, false));
    assert_false(balancer_probe_good(r, 0, S)); /* forgiven */
    assert_false(balancer_probe_bad(r, 0, false));
    assert_true(balancer_probe_bad(r, 0, false));
    assert_false(balancer_probe_bad(r, 0, false)); /* it is out already */
    for (int i = 0; i < 5; i++)
        assert_int_equal(balancer_choose(r, NULL, 3, S, &why), 1);
    assert_true(balancer_probe_bad(r, 1, true));
    assert_int_equal(balancer_choose(r, NULL, 3, S, &why), -1);
    assert_int_equal(why, BALANCER_NONE_IN);
    assert_false(balancer_probe_good(r, 0, 5 * S));
    assert_true(balancer_probe_good(r, 0, 5 * S));
    assert_false(balancer_probe_good(r, 1, 100 * S));
    assert_true(balancer_probe_good(r, 1, 100 * S));
    /* Its share grows: of the first hundred few, later half. */
    int share[2] = {0};
    for (int round = 0; round < 2; round++)
        for (int i = 0; i < 50; i++) {
            int to = balancer_choose(r, NULL, 3, (round ? 111 : 101) * S, &why);
            balancer_begin(r, to, NULL);
            share[round] += to == 1;
        }
    assert_true(share[0] >= 2 && share[0] <= 8);
    assert_true(share[1] >= 40); /* it catches up */
    balancer_free(r);
}

/* Garbage with a good health: out, for a time that doubles, whatever the probes say. */
static void test_bad_answers(void **state)
{
    (void)state;
    struct balancer *r = route_of(2, 100, 64);
    int64_t now = 10 * S, wait = S;
    assert_false(balancer_answer_bad(r, 0, now));
    assert_false(balancer_probe_good(r, 0, now));
    balancer_answer_good(r, 0);
    assert_false(balancer_answer_bad(r, 0, now));
    for (int i = 0; i < 8; i++) {
        while (!balancer_answer_bad(r, 0, now))
            ;
        for (int j = 0; j < 4; j++)
            assert_false(balancer_probe_good(r, 0, now + wait - 1));
        now += wait;
        assert_true(balancer_probe_good(r, 0, now));
        wait = wait * 2 > 60 * S ? 60 * S : wait * 2;
    }
    balancer_answer_good(r, 0);
    while (!balancer_answer_bad(r, 0, now))
        ;
    now += S; /* forgiven: the time is short again */
    balancer_probe_good(r, 0, now);
    assert_true(balancer_probe_good(r, 0, now) || balancer_replica(r, 0)->in);
    balancer_free(r);
}

/* What comes of an answer: its body, or "bad". */
static const char *answer_of(const char *text, bool head_request, struct buf *body)
{
    struct http_response a = {.head_request = head_request};
    size_t n = strlen(text), used;
    const char *why = NULL;
    enum http_response_result res;
    buf_reset(body);
    buf_adds(body, "");
    do { /* byte by byte */
        res = http_response_feed(&a, text, n ? 1 : 0, body, &used, &why);
        text += used;
        n -= used;
    } while ((res == RESPONSE_MORE && n) || res == RESPONSE_HEAD || res == RESPONSE_DATA);
    if (res == RESPONSE_MORE)
        res = http_response_close(&a, &why);
    http_response_clear(&a);
    return res == RESPONSE_END ? body->p : "bad";
}

static void test_answers(void **state)
{
    (void)state;
    struct buf b = {0};
#define H "HTTP/1.1 200 OK\r\n"
    assert_string_equal(answer_of(H "Content-Length: 5\r\n\r\nhello", false, &b), "hello");
    assert_string_equal(answer_of(H "Content-Length: 5\r\n\r\n", true, &b), "");
    assert_string_equal(answer_of(H "Content-Length: 0\r\n\r\n", false, &b), "");
    assert_string_equal(answer_of("HTTP/1.1 204 No Content\r\n\r\n", false, &b), "");
    assert_string_equal(answer_of(H "\r\nto the end", false, &b), "to the end");
    assert_string_equal(answer_of(H
                                  "Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x\r\nllo\r\n0\r\n"
                                  "T: x\r\n\r\n",
                                  false, &b),
                        "hello");
    assert_string_equal(
        answer_of("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nA: b\r\n\r\n" H
                  "Content-Length: 2\r\n\r\nok",
                  false, &b),
        "ok");
    static const char *const bad[] = {
        "",
        "HTTP",
        "HTTP/2 200 OK\r\n\r\n",
        "HTTP/1.1 2000 OK\r\n\r\n",
        "HTTP/1.1 99 OK\r\n\r\n",
        "HTTP/1.1 600 OK\r\n\r\n",
        "hello\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\n\r\n",
        H "Content-Length: 5\r\n\r\nhell",
        H "Content-Length: -1\r\n\r\n",
        H "Content-Length: 1e3\r\n\r\n",
        H "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        H "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        H "Transfer-Encoding: gzip\r\n\r\n",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        H "Transfer-Encoding: chunked\r\n\r\nxx\r\n",
        H "Transfer-Encoding: chunked\r\n\r\n5\r\nhello!\r\n0\r\n\r\n",
        H "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        H "Transfer-Encoding: chunked\r\n\r\nfffffffffffff\r\n",
        H "A b: c\r\n\r\n",
        H " folded: c\r\n\r\n",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_string_equal(answer_of(bad[i], false, &b), "bad");
    /* Without an end: bounded. */
    struct buf endless = {0};
    buf_adds(&endless, H "A: ");
    for (int i = 0; i < 70000; i++)
        buf_addc(&endless, 'x');
    assert_string_equal(answer_of(endless.p, false, &b), "bad");
    buf_reset(&endless);
    for (int i = 0; i < 100; i++)
        buf_adds(&endless, "HTTP/1.1 100 Continue\r\n\r\n");
    assert_string_equal(answer_of(endless.p, false, &b), "bad");
    buf_clear(&endless);
    buf_clear(&b);
}

static void test_urls(void **state)
{
    (void)state;
    struct upstream_url u;
    struct error err;
    assert_true(upstream_url_parse("http://gpu-1:8081/", &u, &err));
    assert_string_equal(u.host, "gpu-1");
    assert_string_equal(u.name, "gpu-1:8081");
    assert_string_equal(u.path, "");
    assert_true(upstream_url_parse("HTTPS://[::1]/llm/v1//", &u, &err));
    assert_true(u.tls);
    assert_int_equal(u.port, 443);
    assert_string_equal(u.host, "::1");
    assert_string_equal(u.name, "[::1]:443");
    assert_string_equal(u.path, "/llm/v1");
    static const char *const bad[] = {
        "",           "gpu:80",         "ftp://x",       "http://",    "http://:80",
        "http://x:0", "http://x:65536", "http://x:http", "http://u@x", "http://x/?a",
        "http://x y", "http://[::1",    "http://[::1]80"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(upstream_url_parse(bad[i], &u, &err));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fields),           cmocka_unit_test(test_choosing_fields),
        cmocka_unit_test(test_hashes),           cmocka_unit_test(test_choice),
        cmocka_unit_test(test_shared_beginning), cmocka_unit_test(test_health),
        cmocka_unit_test(test_table_is_bounded), cmocka_unit_test(test_answers),
        cmocka_unit_test(test_bad_answers),      cmocka_unit_test(test_urls),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
