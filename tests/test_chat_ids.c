/*
 * Conversations to token ids, the whole way (normalise, render, tokenise), against what transformers'
 * apply_chat_template gives: tests/data/chat_ids.jsonl, made with Qwen's tokenizer under Qwen3's chat
 * template and under the built-in model's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <cmocka.h>

#include "base/mem.h"
#include "text/chat/chat.h"
#include "text/tokenizer/tokenizer.h"

#define GOLDEN "../shared/golden/"

static struct tokenizer *open_tokenizer(void)
{
    struct buf json = {0};
    FILE *p = popen("xz -dc " GOLDEN "tokenizers/qwen2-hf/tokenizer.json.xz", "r");
    assert_non_null(p);
    char chunk[65536];
    size_t n;
    while ((n = fread(chunk, 1, sizeof chunk, p)) > 0)
        buf_add(&json, chunk, n);
    assert_int_equal(pclose(p), 0);
    struct error err = {0};
    struct tokenizer *t = tokenizer_load_json(json.p, json.len, "tokenizer.json", NULL, &err);
    if (!t)
        fail_msg("%s", err.msg);
    buf_clear(&json);
    return t;
}

static struct chat *open_chat(const char *path)
{
    struct chat_source s;
    struct error err = {0};
    if (!chat_source_open(path, &s, &err))
        fail_msg("%s", err.msg);
    struct chat *c = chat_new(&s, &err);
    if (!c)
        fail_msg("%s", err.msg);
    chat_source_clear(&s);
    return c;
}

static void check_case(const json_t *o, const struct chat *c, const struct tokenizer *t, int line)
{
    struct chat_request req = {.messages = json_object_get(o, "messages"),
                               .tools = json_object_get(o, "tools"),
                               .kwargs = json_object_get(o, "kwargs"),
                               .no_generation_prompt =
                                   json_is_false(json_object_get(o, "add_generation_prompt"))};
    struct buf prompt = {0};
    struct token_list ids = {0};
    struct error err = {0};
    if (!chat_render(c, &req, &prompt, &err))
        fail_msg("line %d: %s", line, err.msg);
    assert_true(tokenizer_encode(t, prompt.p, prompt.len, TOKENIZE_SPECIAL, &ids, &err));
    const json_t *want = json_object_get(o, "ids");
    bool same = ids.n == json_array_size(want);
    for (size_t i = 0; same && i < ids.n; i++)
        same = ids.ids[i] == json_integer_value(json_array_get(want, i));
    if (!same)
        fail_msg("line %d: %zu ids, %zu wanted, of:\n%s", line, ids.n, json_array_size(want),
                 prompt.p);
    /* With literal bytes the ids are the same, unless a message spells a control token, which stays text. */
    char *said = json_dumps(req.messages, 0);
    bool special = strstr(said, "<|im_") != NULL;
    free(said);
    req.literal = true;
    prompt.len = ids.n = 0;
    assert_true(chat_render(c, &req, &prompt, &err));
    assert_true(
        tokenizer_encode_prompt(t, prompt.p, prompt.len, chat_template_text(c), NULL, &ids, &err));
    same = ids.n == json_array_size(want);
    for (size_t i = 0; same && i < ids.n; i++)
        same = ids.ids[i] == json_integer_value(json_array_get(want, i));
    if (same == special)
        fail_msg("line %d with literal bytes: %zu ids, %zu wanted, of:\n%s", line, ids.n,
                 json_array_size(want), prompt.p);
    buf_clear(&prompt);
    token_list_clear(&ids);
}

static void same_ids_as_transformers(void **state)
{
    (void)state;
    if (access(GOLDEN "templates", F_OK) != 0) {
        print_message("skipped: no " GOLDEN "templates here\n");
        skip();
    }
    struct tokenizer *t = open_tokenizer();
    struct chat *qwen = open_chat(GOLDEN "templates/Qwen-Qwen3-0.6B.jinja");
    struct chat *demo = open_chat("demo/chat_template.jinja");
    FILE *f = fopen("tests/data/chat_ids.jsonl", "r");
    assert_non_null(f);
    char *line = NULL;
    size_t cap = 0;
    int n = 0;
    while (getline(&line, &cap, f) > 0) {
        json_t *o = json_loads(line, 0, NULL);
        assert_non_null(o);
        bool is_demo = !strcmp(json_string_value(json_object_get(o, "template")), "demo");
        check_case(o, is_demo ? demo : qwen, t, ++n);
        json_decref(o);
    }
    print_message("%d conversations, the same ids\n", n);
    assert_true(n > 100);
    free(line);
    fclose(f);
    chat_free(qwen);
    chat_free(demo);
    tokenizer_free(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_ids_as_transformers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
