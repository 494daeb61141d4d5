/* The table of endpoints: rows that make sense together, and the lookup. With --list it prints the rows as
 * JSON, for test_endpoints.py. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "server/api/endpoints.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct http_head head_of(const char *method, const char *path)
{
    return (struct http_head){.method = (char *)method, .path = (char *)path};
}

/* The path with a name in place of the star. */
static const char *example(const char *path, char out[128])
{
    const char *star = strchr(path, '*');
    if (star)
        snprintf(out, 128, "%.*sname%s", (int)(star - path), path, star + 1);
    else
        snprintf(out, 128, "%s", path);
    return out;
}

static void test_rows(void **state)
{
    (void)state;
    assert_true(n_endpoints > 20);
    for (int i = 0; i < n_endpoints; i++) {
        const struct endpoint *e = &endpoints[i];
        bool served = e->respond || e->prepare, generates = e->effect == ENDPOINT_GENERATES;
        print_message("%s %s\n", e->method, e->paths[0]);
        assert_non_null(e->paths[0]);
        assert_non_null(e->name);
        assert_false(e->respond && e->prepare);
        assert_int_equal(e->reply && e->prompt_field, served && generates);
        assert_int_equal(!strcmp(e->method, "GET"), e->effect == ENDPOINT_READS);
        assert_true(!e->prepare || strcmp(e->method, "GET") != 0); /* it has a body */
        assert_true(!e->open || (e->effect == ENDPOINT_READS && e->respond));
        assert_true(!e->creates_kept || generates || !strcmp(e->method, "POST"));
        assert_true(e->gateway == GATEWAY_FORWARDS || e->effect == ENDPOINT_READS);
        assert_int_equal(e->list && e->list_id, e->gateway == GATEWAY_MERGES_LISTS);
    }
}

static void test_each_is_found(void **state)
{
    (void)state;
    for (int i = 0; i < n_endpoints; i++) {
        const struct endpoint *e = &endpoints[i];
        bool served = e->respond || e->prepare;
        for (int k = 0; k < ENDPOINT_MAX_PATHS && e->paths[k]; k++) {
            char path[128], nested[160], allow[ENDPOINT_ALLOW_SIZE];
            struct http_head h = head_of(e->method, example(e->paths[k], path));
            print_message("%s %s\n", h.method, h.path);
            assert_ptr_equal(endpoint_find(&h, NULL), served ? e : NULL);
            assert_ptr_equal(endpoint_find_forwarded(&h), e);
            snprintf(nested, sizeof nested, "/a/b%s", path);
            h.path = nested;
            assert_null(endpoint_find(&h, allow));
            assert_string_equal(allow, "");
            if (strcmp(path, "/"))
                assert_ptr_equal(endpoint_find_forwarded(&h), e);
            h = head_of("PATCH", path);
            assert_null(endpoint_find(&h, allow));
            assert_int_equal(strstr(allow, e->method) != NULL, served);
            assert_true(endpoint_dialect(&h) == e->dialect);
            h.method = (char *)"HEAD";
            if (!strcmp(e->method, "GET"))
                assert_ptr_equal(endpoint_find(&h, NULL), e);
        }
    }
}

static void test_lookup(void **state)
{
    (void)state;
    char allow[ENDPOINT_ALLOW_SIZE];
    struct http_head h = head_of("PUT", "/v1/responses/resp_1");
    assert_null(endpoint_find(&h, allow));
    assert_string_equal(allow, "GET, HEAD, DELETE");
    h = head_of("GET", "/v1/responses/resp_1/input_items"); /* the more specific of two */
    assert_string_equal(endpoint_find(&h, allow)->name, "response items");
    h = head_of("GET", "/v1/models/"); /* a star is not empty */
    assert_null(endpoint_find(&h, allow));
    assert_string_equal(allow, "");
    h = head_of("GET", "/v1/models/a/b");
    assert_string_equal(endpoint_find(&h, allow)->name, "model");
    h = head_of("POST", "/v1/chat/completionsx");
    assert_null(endpoint_find_forwarded(&h));
    h = head_of("POST", "/xcompletions");
    assert_null(endpoint_find_forwarded(&h));
    h = (struct http_head){0};
    assert_true(endpoint_dialect(&h) == DIALECT_OPENAI);
    h = head_of("POST", "/api/nothing");
    assert_true(endpoint_dialect(&h) == DIALECT_OLLAMA);
}

static void list(void)
{
    for (int i = 0; i < n_endpoints; i++) {
        const struct endpoint *e = &endpoints[i];
        json_t *paths = json_array();
        for (int k = 0; k < ENDPOINT_MAX_PATHS && e->paths[k]; k++)
            json_array_append_new(paths, json_string(e->paths[k]));
        json_t *row = json_pack(
            "{s:s,s:o,s:s,s:s,s:b,s:b,s:b,s:s,s:s}", "method", e->method, "paths", paths, "name",
            e->name, "dialect", (const char *[]){"openai", "anthropic", "ollama"}[e->dialect],
            "open", e->open, "served", e->respond || e->prepare, "prepared", e->prepare != NULL,
            "effect", (const char *[]){"changes", "reads", "computes", "generates"}[e->effect],
            "gateway", (const char *[]){"forwards", "responds", "lists", "metrics"}[e->gateway]);
        char *text = json_dumps(row, JSON_COMPACT);
        puts(text);
        free(text);
        json_decref(row);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "--list")) {
        list();
        return 0;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_each_is_found),
        cmocka_unit_test(test_lookup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
