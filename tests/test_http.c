/* Bytes and JSON from clients, without a network: heads, chunked bodies, generation parameters. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "base/mem.h"
#include "server/http/forwarded.h"
#include "server/http/http_parse.h"
#include "server/http/jsonout.h"
#include "server/api/params.h"

static int parse(const char *text, struct http_head *h)
{
    const char *why = NULL;
    size_t n = http_head_end(text, strlen(text));
    assert_true(n > 0);
    int status = http_head_parse(text, n, h, &why);
    assert_int_equal(status != 0, why != NULL);
    return status;
}

static int status_of(const char *text)
{
    struct http_head h;
    int status = parse(text, &h);
    http_head_clear(&h);
    return status;
}

static void test_head(void **state)
{
    (void)state;
    struct http_head h;
    assert_int_equal(parse("POST /v1/chat%2Fx?a=1&b HTTP/1.1\r\nHost: x\r\nContent-Length: 12\r\n"
                           "X-Api-Key:  k e y \t\r\nconnection: Keep-Alive, x\r\n\r\nrest",
                           &h),
                     0);
    assert_string_equal(h.method, "POST");
    assert_string_equal(h.path, "/v1/chat/x");
    assert_string_equal(h.query, "a=1&b");
    assert_int_equal(h.length, 12);
    assert_true(h.keep_alive && !h.chunked);
    assert_string_equal(http_header(&h, "x-api-KEY"), "k e y");
    assert_null(http_header(&h, "absent"));
    http_head_clear(&h);
    assert_int_equal(parse("GET http://host:80/health HTTP/1.0\nHost: x\n\n", &h), 0);
    assert_string_equal(h.path, "/health");
    assert_false(h.keep_alive);
    http_head_clear(&h);
    assert_int_equal(parse("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
                           "Expect: 100-continue\r\nConnection: close\r\n\r\n",
                           &h),
                     0);
    assert_true(h.chunked && h.expect_continue && !h.keep_alive);
    http_head_clear(&h);

    static const struct {
        int status;
        const char *text;
    } bad[] = {
        {400, "GET / HTTP/1.1\r\n\r\n"}, /* no host */
        {400, "GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"},
        {400, "GET  / HTTP/1.1\r\nHost: a\r\n\r\n"},
        {400, "GET /\r\nHost: a\r\n\r\n"},
        {400, "GET / HTTP/2.0\r\nHost: a\r\n\r\n"},
        {400, "GE(T / HTTP/1.1\r\nHost: a\r\n\r\n"},
        {400, "GET x HTTP/1.1\r\nHost: a\r\n\r\n"},
        {400, "GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n"},
        {400, "GET /%00 HTTP/1.1\r\nHost: a\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\nHost : a\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\nHost: a\r\nX: a\x01\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\nHost: a\r\nX: a\rb\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1x\r\n\r\n"},
        {400, "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999999999999\r\n\r\n"},
        {400, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked"
              "\r\n\r\n"},
        {501, "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"},
        {400, "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"},
        {400, "POST / HTTP/1.0\r\nTransfer-Encoding: gzip\r\n\r\n"},
        {417, "POST / HTTP/1.1\r\nHost: a\r\nExpect: magic\r\n\r\n"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (status_of(bad[i].text) != bad[i].status)
            fail_msg("head %zu: %d", i, status_of(bad[i].text));
    struct buf many = {0};
    buf_adds(&many, "GET / HTTP/1.1\r\nHost: a\r\n");
    for (int i = 0; i < 200; i++)
        buf_addf(&many, "X%d: y\r\n", i);
    buf_adds(&many, "\r\n");
    assert_int_equal(status_of(many.p), 431);
    buf_clear(&many);
    assert_int_equal(http_head_end("GET / HTTP/1.1\r\nHost: a\r\n", 25), 0);
}

/* Any split of a chunked body gives the same data. */
static void test_chunks(void **state)
{
    (void)state;
    static const char body[] =
        "5\r\nhello\r\n00006;x=\"y\"\r\n world\r\n0\r\nTrailer: x\r\n\r\nNEXT";
    size_t n = sizeof body - 1;
    for (size_t cut = 0; cut <= n; cut++) {
        struct http_chunks c = {0};
        struct buf out = {0};
        size_t used = 0, more = 0;
        enum http_chunks_result res = http_chunks_feed(&c, body, cut, 100, &out, &used);
        if (res == CHUNKS_MORE)
            res = http_chunks_feed(&c, body + cut, n - cut, 100, &out, &more);
        assert_int_equal(res, CHUNKS_DONE);
        assert_int_equal(used + more, n - 4);
        assert_string_equal(out.p, "hello world");
        buf_clear(&out);
    }
    static const struct {
        enum http_chunks_result res;
        const char *text;
    } bad[] = {
        {CHUNKS_BAD, "x\r\n"},
        {CHUNKS_BAD, "\r\n"},
        {CHUNKS_BAD, "5\nhello"},
        {CHUNKS_BAD, "5 junk\r\nhello"},
        {CHUNKS_BAD, "5 \tx;y\r\nhello"},
        {CHUNKS_BAD, "5;a\x01\r\nhello"},
        {CHUNKS_MORE, "5 \t; y=z\r\nhello"},
        {CHUNKS_BAD, "5\r\nhelloX\r\n"},
        {CHUNKS_BAD, "1234567890abc\r\n"},
        {CHUNKS_TOO_LARGE, "65\r\n"},
        {CHUNKS_TOO_LARGE, "fffffffffff\r\n"},
        {CHUNKS_MORE, "5\r\nhel"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct http_chunks c = {0};
        struct buf out = {0};
        size_t used = 0;
        assert_int_equal(http_chunks_feed(&c, bad[i].text, strlen(bad[i].text), 100, &out, &used),
                         bad[i].res);
        buf_clear(&out);
    }
}

static bool read_params(const char *text, enum params_api api, struct gen_params *p,
                        struct api_error *err)
{
    struct sample_params defaults = sample_params_default();
    memset(err, 0, sizeof *err);
    json_t *body = api_parse(text, strlen(text), err);
    assert_non_null(body);
    bool ok = gen_params_read(body, api, &defaults, 1000, p, err);
    json_decref(body);
    assert_int_equal(ok, err->status == 0);
    return ok;
}

static void test_params(void **state)
{
    (void)state;
    struct gen_params p;
    struct api_error err;
    assert_true(read_params("{\"temperature\":0.5,\"top_p\":null,\"max_tokens\":5,\"n\":2.0,"
                            "\"max_completion_tokens\":7,\"seed\":-3,\"stop\":[\"a\",\"bc\"],"
                            "\"logit_bias\":{\"5\":-100,\"6\":1.5},\"logprobs\":true,"
                            "\"top_logprobs\":4,\"stream\":true,\"stream_options\":"
                            "{\"include_usage\":true},\"response_format\":{\"type\":\"text\"},"
                            "\"presence_penalty\":1,\"unknown\":{\"x\":[1]},\"top_k\":-1,"
                            "\"cache_salt\":\"s\"}",
                            PARAMS_CHAT, &p, &err));
    assert_true(p.sample.temp == 0.5f && p.sample.top_p == 0.95f && p.sample.top_k == 0);
    assert_int_equal(p.max_tokens, 7);
    assert_int_equal(p.n, 2);
    assert_true(p.has_seed && p.sample.seed == (uint64_t)-3);
    assert_int_equal(p.n_stop, 2);
    assert_string_equal(p.stop[1], "bc");
    assert_int_equal(p.sample.n_bias, 2);
    for (int i = 0; i < 2; i++)
        assert_true(p.sample.bias[i].token == 5 ? p.sample.bias[i].bias == -INFINITY
                                                : p.sample.bias[i].bias == 1.5f);
    assert_true(p.logprobs && p.n_top == 4 && p.stream && p.include_usage);
    assert_string_equal(p.salt, "s");
    gen_params_clear(&p);
    assert_true(read_params("{\"logprobs\":3,\"stop\":\"x\",\"logit_bias\":[[3,false],[4,2]]}",
                            PARAMS_COMPLETIONS, &p, &err));
    assert_true(p.logprobs && p.n_top == 3 && p.n_stop == 1 && p.sample.n_bias == 2);
    gen_params_clear(&p);

    static const struct {
        const char *body, *param;
    } bad[] = {
        {"{\"temperature\":\"hot\"}", "temperature"},
        {"{\"temperature\":-1}", "temperature"},
        {"{\"temperature\":true}", "temperature"},
        {"{\"top_p\":1.1}", "top_p"},
        {"{\"max_tokens\":0}", "max_tokens"},
        {"{\"max_tokens\":1.5}", "max_tokens"},
        {"{\"max_tokens\":1e99}", "max_tokens"},
        {"{\"n\":0}", "n"},
        {"{\"n\":1000}", "n"},
        {"{\"stop\":5}", "stop"},
        {"{\"stop\":[1]}", "stop"},
        {"{\"stop\":\"\"}", "stop"},
        {"{\"seed\":\"1\"}", "seed"},
        {"{\"seed\":1e300}", "seed"},
        {"{\"stream\":1}", "stream"},
        {"{\"stream_options\":true}", "stream_options"},
        {"{\"logit_bias\":{\"x\":1}}", "logit_bias"},
        {"{\"logit_bias\":{\"1000\":1}}", "logit_bias"},
        {"{\"logit_bias\":{\"1\":101}}", "logit_bias"},
        {"{\"logit_bias\":[1]}", "logit_bias"},
        {"{\"logit_bias\":[[1]]}", "logit_bias"},
        {"{\"logit_bias\":3}", "logit_bias"},
        {"{\"logprobs\":5}", "logprobs"},
        {"{\"top_logprobs\":2}", "top_logprobs"},
        {"{\"top_logprobs\":21,\"logprobs\":true}", "top_logprobs"},
        {"{\"cache_salt\":1}", "cache_salt"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (read_params(bad[i].body, PARAMS_CHAT, &p, &err) || err.status != 400 ||
            strcmp(err.param, bad[i].param))
            fail_msg("%s: %d %s: %s", bad[i].body, err.status, err.param, err.msg);
        gen_params_clear(&p);
    }
    assert_null(api_parse("{\"a\":", 5, &err));
    assert_int_equal(err.status, 400);
    assert_null(api_parse("[1]", 3, &err));
    assert_null(api_parse("", 0, &err));
}

/* NUL is a character like others in text, and refused by name elsewhere; too many values are refused
 * before they are built. */
/* Networks of proxies, and what else may stand in the place of one. */
static void test_proxies(void **state)
{
    (void)state;
    static const struct {
        const char *net, *address;
        bool inside;
    } cases[] = {
        {"10.1.2.3", "10.1.2.3", true},
        {"10.1.2.3", "10.1.2.4", false},
        {"10.0.0.0/8", "10.255.0.1", true},
        {"10.0.0.0/8", "11.0.0.1", false},
        {"10.1.2.3/8", "10.9.9.9", true},
        {"192.168.4.0/22", "192.168.7.255", true},
        {"192.168.4.0/22", "192.168.8.0", false},
        {"0.0.0.0/0", "8.8.8.8", true},
        {"0.0.0.0/0", "2001:db8::1", false},
        {"fd00::/8", "fdab::1", true},
        {"fd00::/8", "fe80::1", false},
        {"::/0", "8.8.8.8", true},
        {"::1", "::1", true},
        {"10.1.2.3", "::ffff:10.1.2.3", true},
        {"2001:db8::/33", "2001:db8:7fff::", true},
        {"2001:db8::/33", "2001:db8:8000::", false},
        {"10.1.2.3", "?", false},
        {"10.1.2.3", "", false},
    };
    struct forwarded_net net;
    struct error err = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_true(forwarded_net_parse(cases[i].net, &net, &err));
        assert_int_equal(forwarded_trusts(&net, 1, cases[i].address), cases[i].inside);
        assert_false(forwarded_trusts(&net, 0, cases[i].address));
    }
    static const char *const bad[] = {"",
                                      "*",
                                      "localhost",
                                      "10.0.0",
                                      "10.0.0.0/33",
                                      "10.0.0.0/",
                                      "10.0.0.0/-1",
                                      "10.0.0.0/8x",
                                      "10.0.0.0/08888",
                                      "/8",
                                      "::1/129",
                                      "10.0.0.1 ",
                                      "fe80::1%eth0",
                                      "10.0.0.0/8/8",
                                      "999.1.1.1",
                                      "0000:0000:0000:0000:0000:0000:0000:0000:0000:0000:0000"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (forwarded_net_parse(bad[i], &net, &err))
            fail_msg("%s is a network", bad[i]);
        assert_null(strchr(err.msg, '\n'));
    }
}

/* Who asks, from `peer` with these headers, where 10.0.0.0/8 and ::1 are trusted. */
static const char *client_of(const char *peer, const char *headers)
{
    static char out[INET6_ADDRSTRLEN];
    struct forwarded_net nets[2];
    struct error err = {0};
    struct http_head h;
    struct buf text = {0};
    buf_addf(&text, "GET / HTTP/1.1\r\nHost: x\r\n%s\r\n", headers);
    assert_int_equal(parse(text.p, &h), 0);
    assert_true(forwarded_net_parse("10.0.0.0/8", &nets[0], &err) &&
                forwarded_net_parse("::1", &nets[1], &err));
    forwarded_client(nets, 2, peer, &h, out);
    http_head_clear(&h);
    buf_clear(&text);
    return out;
}

#define FROM "X-Forwarded-For: "
static void test_forwarded(void **state)
{
    (void)state;
    /* strangers say what they like */
    assert_string_equal(client_of("8.8.8.8", FROM "1.1.1.1\r\n"), "8.8.8.8");
    assert_string_equal(client_of("?", FROM "1.1.1.1\r\n"), "?");
    assert_string_equal(client_of("10.0.0.1", ""), "10.0.0.1");
    assert_string_equal(client_of("10.0.0.1", FROM "1.1.1.1\r\n"), "1.1.1.1");
    assert_string_equal(client_of("::1", FROM "1.1.1.1\r\n"), "1.1.1.1");
    /* what a client sent itself stands in front of what a proxy saw */
    assert_string_equal(client_of("10.0.0.1", FROM "6.6.6.6, 1.1.1.1\r\n"), "1.1.1.1");
    assert_string_equal(client_of("10.0.0.1", FROM "6.6.6.6\r\n" FROM "1.1.1.1\r\n"), "1.1.1.1");
    assert_string_equal(client_of("10.0.0.1", FROM "6.6.6.6, 10.0.0.9\r\n"), "6.6.6.6");
    assert_string_equal(client_of("10.0.0.1", FROM "6.6.6.6, 1.1.1.1 ,10.3.3.3,\t10.0.0.9 \r\n"),
                        "1.1.1.1");
    assert_string_equal(client_of("10.0.0.1", FROM "10.0.0.7, 10.0.0.8\r\n"), "10.0.0.7");
    assert_string_equal(client_of("10.0.0.1", "x-forwarded-for: 1.1.1.1\r\n"), "1.1.1.1");
    /* forms of addresses */
    assert_string_equal(client_of("10.0.0.1", FROM "1.1.1.1:443\r\n"), "1.1.1.1");
    assert_string_equal(client_of("10.0.0.1", FROM "[2001:db8::0:1]:443\r\n"), "2001:db8::1");
    assert_string_equal(client_of("10.0.0.1", FROM "2001:DB8::1\r\n"), "2001:db8::1");
    assert_string_equal(client_of("10.0.0.1", FROM "::ffff:1.1.1.1\r\n"), "1.1.1.1");
    assert_string_equal(client_of("::ffff:10.0.0.1", FROM "1.1.1.1\r\n"), "1.1.1.1");
    /* what is no address is not believed, nor anything in front of it */
    static const char *const bad[] = {
        "unknown",
        "_hidden",
        "1.1.1.1, unknown",
        "6.6.6.6, ",
        ",",
        ", ,",
        "1.1.1",
        "1.1.1.1:x",
        "[::1",
        "[::1]x",
        "[::1]:9x",
        "1.1.1.1 6.6.6.6",
        "fe80::1%eth0",
        "0x7f.1",
        "01.1.1.1.1",
        "999.1.1.1",
        "6.6.6.6, <script>",
        "\"1.1.1.1\"",
        "for=1.1.1.1",
        "1111111111111111111111111111111111111111111111111111111111111111111111111111111",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char line[256];
        snprintf(line, sizeof line, FROM "%s\r\n", bad[i]);
        assert_string_equal(client_of("10.0.0.1", line), "10.0.0.1");
        snprintf(line, sizeof line, FROM "6.6.6.6, %s, 10.0.0.2\r\n", bad[i]);
        assert_string_equal(client_of("10.0.0.1", line), "10.0.0.2");
    }
    assert_string_equal(client_of("10.0.0.1", FROM "\r\n"), "10.0.0.1");
    /* a list of any length costs a little, and is read from its end */
    struct buf many = {0};
    buf_adds(&many, FROM);
    for (int i = 0; i < 5000; i++)
        buf_addf(&many, "10.0.%d.%d,", i / 250, i % 250);
    buf_adds(&many, "10.0.0.3\r\n");
    assert_string_equal(client_of("10.0.0.1", many.p), "10.0.19.219");
    buf_clear(&many);
}

static void test_bodies(void **state)
{
    (void)state;
    static const struct {
        const char *body, *param; /* param NULL: accepted */
    } cases[] = {
        {"{\"prompt\":\"a\\u0000b\"}", NULL},
        {"{\"prompt\":[\"x\",\"a\\u0000b\"]}", NULL},
        {"{\"messages\":[{\"content\":\"\\u0000\"}]}", NULL},
        {"{\"messages\":[{\"content\":[{\"type\":\"text\",\"text\":\"\\u0000\"}]}]}", NULL},
        {"{\"prompt\":\"\\\\u0000\",\"stop\":\"\\\\u0000\"}", NULL}, /* a backslash, not NUL */
        {"{\"messages\":[{\"role\":\"user\\u0000\"}]}", "messages[0].role"},
        {"{\"stop\":[\"a\",\"b\\u0000\"]}", "stop[1]"},
        {"{\"tools\":[{\"function\":{\"name\":\"f\\u0000g\"}}]}", "tools[0].function.name"},
        {"{\"cache_salt\":\"a\\u0000\"}", "cache_salt"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct api_error err = {0};
        json_t *v = api_parse(cases[i].body, strlen(cases[i].body), &err);
        if ((v != NULL) != !cases[i].param ||
            (!v &&
             (err.status != 400 || strcmp(err.param, cases[i].param) || !strstr(err.msg, "NUL"))))
            fail_msg("%s: %d %s: %s", cases[i].body, err.status, err.param, err.msg);
        json_decref(v);
    }
    struct api_error err = {0};
    static const char key[] = "{\"a\\u0000\":1}";
    assert_null(api_parse(key, sizeof key - 1, &err));
    assert_true(err.status == 400 && strstr(err.msg, "NUL"));
    struct buf b = {0};
    buf_adds(&b, "{\"a\":[");
    for (int i = 0; i < 300000; i++)
        buf_adds(&b, "{},");
    buf_adds(&b, "1]}");
    assert_null(api_parse(b.p, b.len, &err));
    assert_true(err.status == 413 && strstr(err.msg, "250000"));
    buf_reset(&b);
    buf_adds(&b, "{\"a\":");
    for (int i = 0; i < 1000; i++)
        buf_addc(&b, '[');
    assert_null(api_parse(b.p, b.len, &err));
    assert_true(err.status == 413 && strstr(err.msg, "100 levels"));
    /* token ids as long as any context */
    buf_reset(&b);
    buf_adds(&b, "{\"prompt\":[0");
    for (int i = 0; i < 900000; i++)
        buf_adds(&b, ",7");
    buf_adds(&b, "]}");
    json_t *v = api_parse(b.p, b.len, &err);
    assert_int_equal(json_array_size(api_member(v, "prompt")), 900001);
    json_decref(v);
    buf_clear(&b);
}

static void test_json_text(void **state)
{
    (void)state;
    struct buf b = {0};
    jsonout_string(&b, "a\"\\\n\x01\x7f\xc3\xa9\xff\xed\xa0\x80", 12);
    assert_string_equal(b.p, "\"a\\\"\\\\\\n\\u0001\x7f\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
                             "\xef\xbf\xbd\"");
    buf_clear(&b);
    /* whatever the bytes, the result parses and, where they were UTF-8, comes back equal */
    srand(5);
    for (int i = 0; i < 2000; i++) {
        char s[40];
        size_t n = (size_t)(rand() % 40);
        for (size_t k = 0; k < n; k++)
            s[k] = (char)(rand() % 4 ? 1 + rand() % 127 : rand() % 255 + 1);
        jsonout_string(&b, s, n);
        json_t *v = json_loadb(b.p, b.len, JSON_DECODE_ANY, NULL);
        assert_non_null(v);
        json_t *direct = json_stringn(s, n);
        if (direct)
            assert_true(json_equal(v, direct));
        json_decref(direct);
        json_decref(v);
        buf_clear(&b);
    }
    static const double numbers[] = {0, -1.5, 1e-9, 0.1, 123456789, -3.4e38};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        jsonout_number(&b, numbers[i]);
        assert_true(strtod(b.p, NULL) == numbers[i]);
        buf_clear(&b);
    }
    jsonout_number(&b, -INFINITY);
    assert_string_equal(b.p, "null");
    buf_clear(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_head),      cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_params),    cmocka_unit_test(test_proxies),
        cmocka_unit_test(test_forwarded), cmocka_unit_test(test_bodies),
        cmocka_unit_test(test_json_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
