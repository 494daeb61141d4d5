/* The public API of include/steel.h, used as a program outside the tree would use it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

#include "toy_model.h"
#include <steel.h>

static char path[64];
static int shown_percent = -1;

static bool on_progress(void *arg, int percent)
{
    assert_string_equal(arg, "arg");
    shown_percent = percent;
    return true;
}

static struct steel_engine *open_toy(void)
{
    struct steel_error err = {0};
    struct steel_engine_options o = {.threads = 1,
                                     .context = 512,
                                     .max_requests = 4,
                                     .max_queue = 4,
                                     .deterministic = true,
                                     .progress = on_progress,
                                     .progress_arg = "arg"};
    struct steel_engine *e = steel_engine_open(path, &o, &err);
    if (!e)
        fail_msg("%s", err.message);
    return e;
}

/* Reads one request to its end. */
static struct steel_event finish(struct steel_request *r, char *text, size_t cap)
{
    struct steel_event ev, last = {0};
    size_t n = 0;
    while (steel_request_next(r, &ev, -1)) {
        assert_true(n + ev.n_text < cap);
        memcpy(text + n, ev.text, ev.n_text);
        n += ev.n_text;
        last = ev;
    }
    text[n] = 0;
    assert_true(steel_request_done(r));
    assert_int_equal(last.kind, STEEL_DONE);
    return last;
}

static void test_one(void **state)
{
    (void)state;
    struct steel_engine *e = open_toy();
    struct steel_error err = {0};
    char a[1000], b[1000];
    assert_int_equal(steel_engine_context(e), 512);
    assert_int_equal(steel_engine_n_vocab(e), TOY_VOCAB);
    struct steel_request_options o = steel_request_options();
    o.text = "Once upon a time there was";
    o.max_tokens = 30;
    o.ignore_eos = true;
    o.seed = 3;
    struct steel_request *r = steel_request_submit(e, &o, &err);
    struct steel_event end = finish(r, a, sizeof a);
    assert_int_equal(end.finish, STEEL_LENGTH);
    assert_int_equal(end.n_prompt, 26);
    assert_int_equal(end.n_generated, 30);
    assert_true(end.total_s >= end.first_token_s && end.first_token_s > 0);
    steel_request_free(r);
    /* token ids are the same as text; the same seed the same answer; the prompt is cached */
    int32_t ids[32];
    int n = steel_engine_tokenize(e, o.text, strlen(o.text), 0, ids, 32, &err);
    assert_int_equal(n, 26);
    o.text = NULL;
    o.tokens = ids;
    o.n_tokens = n;
    r = steel_request_submit(e, &o, &err);
    end = finish(r, b, sizeof b);
    assert_string_equal(a, b);
    assert_true(end.n_cached > 0);
    steel_request_free(r);
    assert_int_equal(steel_engine_detokenize(e, ids, 26, b, sizeof b, &err), 26);
    assert_string_equal(b, "Once upon a time there was");
    assert_int_equal(steel_engine_detokenize(e, ids, 26, b, 4, &err), 26); /* cut, not overrun */
    ids[0] = -5;
    assert_int_equal(steel_engine_detokenize(e, ids, 26, b, sizeof b, &err), -1);
    assert_int_equal(steel_engine_tokenize(e, "<|im_end|>", 10, STEEL_PARSE_SPECIAL, ids, 0, &err),
                     1);
    struct steel_stats st;
    steel_engine_stats(e, &st);
    assert_int_equal(st.generated_tokens, 60);
    assert_int_equal(st.running + st.waiting + st.kv_pages_held, 0);
    steel_engine_close(e);
}

static void test_many(void **state)
{
    (void)state;
    struct steel_engine *e = open_toy();
    struct steel_error err = {0};
    struct steel_queue *q = steel_queue_new();
    struct steel_request *r[4];
    int done[4] = {0}, tokens[4] = {0}, left = 4;
    for (int i = 0; i < 4; i++) {
        struct steel_request_options o = steel_request_options();
        o.text = "abc";
        o.max_tokens = 20 + i;
        o.ignore_eos = true;
        o.top_logprobs = i;
        o.queue = q;
        o.user = &done[i];
        r[i] = steel_request_submit(e, &o, &err);
        assert_non_null(r[i]);
    }
    struct pollfd p = {.fd = steel_queue_fd(q), .events = POLLIN};
    while (left) {
        assert_int_equal(poll(&p, 1, -1), 1);
        struct steel_event ev;
        while (steel_queue_next(q, &ev, 0)) {
            long i = (int *)ev.user - done;
            assert_true(i >= 0 && i < 4 && !done[i]);
            if (ev.kind == STEEL_TOKEN) {
                tokens[i]++;
                assert_int_equal(ev.n_top, i);
                for (int k = 1; k < ev.n_top; k++)
                    assert_true(ev.top[k].logprob <= ev.top[k - 1].logprob);
            }
            if (ev.kind == STEEL_DONE) {
                done[i] = 1;
                left--;
            }
        }
    }
    for (int i = 0; i < 4; i++) {
        assert_int_equal(tokens[i], 20 + i);
        steel_request_free(r[i]);
    }
    steel_queue_free(q);
    steel_engine_close(e);
}

static void test_errors(void **state)
{
    (void)state;
    struct steel_error err = {0};
    assert_null(steel_engine_open("/nonexistent", NULL, &err));
    assert_int_equal(err.kind, STEEL_INVALID);
    assert_non_null(strstr(err.message, "/nonexistent"));
    struct steel_engine *e = open_toy();
    struct steel_request_options o = steel_request_options();
    assert_null(steel_request_submit(e, &o, &err)); /* no prompt */
    assert_int_equal(err.kind, STEEL_INVALID);
    char long_text[600];
    memset(long_text, 'x', sizeof long_text);
    long_text[599] = 0;
    o.text = long_text;
    assert_null(steel_request_submit(e, &o, &err));
    assert_int_equal(err.kind, STEEL_TOO_LONG);
    /* freed in mid-answer: cancelled, its pages back */
    o.text = "abc";
    o.ignore_eos = true;
    o.choices = 3;
    struct steel_stats st = {0};
    uint64_t before;
    int tries = 0;
    do { /* again where this thread slept until they had ended by themselves */
        assert_true(tries++ < 100);
        before = st.cancellations;
        struct steel_request *r = steel_request_submit(e, &o, &err);
        struct steel_event ev;
        assert_true(steel_request_next(r, &ev, -1));
        assert_false(steel_request_done(r));
        steel_request_free(r);
        steel_engine_stats(e, &st);
        assert_int_equal(st.running + st.waiting + st.kv_pages_held, 0);
    } while (st.cancellations < before + 3);
    assert_int_equal(st.cancellations, before + 3);
    /* five places at most: four wait */
    o.choices = 4;
    struct steel_request *many[64];
    int n = 0;
    err.kind = STEEL_OK;
    while (n < 64 && (many[n] = steel_request_submit(e, &o, &err)))
        n++;
    assert_int_equal(err.kind, STEEL_FULL);
    assert_true(n >= 1);
    steel_request_cancel(many[0]);
    char text[8192];
    assert_int_equal(finish(many[0], text, sizeof text).finish, STEEL_CANCELLED);
    for (int i = 0; i < n; i++)
        steel_request_free(many[i]);
    steel_engine_close(e);
}

/* Chats */

static struct steel_chat *new_chat(struct steel_engine *e)
{
    struct steel_error err = {0};
    struct steel_chat *c = steel_chat_new(e, NULL, &err);
    if (!c)
        fail_msg("%s", err.message);
    return c;
}

static void say(struct steel_chat *c, const char *role, const char *content)
{
    struct steel_error err = {0};
    struct steel_message m = {.role = role, .content = content};
    if (!steel_chat_add(c, &m, &err))
        fail_msg("%s", err.message);
}

static void assert_renders(struct steel_chat *c, const char *want)
{
    char text[2000];
    struct steel_error err = {0};
    int n = steel_chat_render(c, text, sizeof text, &err);
    if (n < 0)
        fail_msg("%s", err.message);
    assert_string_equal(text, want);
    assert_int_equal(n, strlen(want));
    assert_int_equal(steel_chat_render(c, text, 5, &err), n); /* cut, not overrun */
    assert_int_equal(strlen(text), 4);
}

/* What came of an answer, by kind. */
struct heard {
    char text[4096], thinking[4096], name[64], arguments[1024], id[64];
    int n_calls, n_ends, n_broken, n_started;
    struct steel_event end;
};

static void put(char *to, size_t cap, const struct steel_chat_event *e)
{
    size_t n = strlen(to);
    assert_true(n + e->n_text < cap);
    memcpy(to + n, e->text, e->n_text);
    to[n + e->n_text] = 0;
}

static void hear(struct steel_answer *a, struct heard *h)
{
    struct steel_chat_event e = {0};
    *h = (struct heard){0};
    while (steel_answer_next(a, &e, -1)) {
        assert_int_equal(h->end.kind, 0); /* nothing after DONE */
        if (e.kind == STEEL_CHAT_TEXT)
            put(h->text, sizeof h->text, &e);
        else if (e.kind == STEEL_CHAT_THINKING)
            put(h->thinking, sizeof h->thinking, &e);
        else if (e.kind == STEEL_CHAT_CALL) {
            put(h->name, sizeof h->name, &e);
            snprintf(h->id, sizeof h->id, "%s", e.call_id);
            assert_int_equal(e.call, h->n_calls++);
        } else if (e.kind == STEEL_CHAT_ARGUMENTS)
            put(h->arguments, sizeof h->arguments, &e);
        h->n_started += e.kind == STEEL_CHAT_STARTED;
        h->n_ends += e.kind == STEEL_CHAT_CALL_END;
        if (e.kind == STEEL_CHAT_CALL_BROKEN) {
            assert_int_equal(e.call, --h->n_calls);
            h->n_broken++;
        }
        if (e.kind == STEEL_CHAT_DONE)
            h->end = e.end;
    }
    assert_int_equal(h->end.kind, STEEL_DONE);
    assert_int_equal(h->n_started, 1);
    steel_answer_free(a);
}

static void test_conversation(void **state)
{
    (void)state;
    struct steel_engine *e = open_toy();
    struct steel_chat *c = new_chat(e);
    struct steel_error err = {0};
    char text[2000];
    assert_int_equal(steel_chat_render(c, text, sizeof text, &err), -1);
    assert_non_null(strstr(err.message, "empty"));
    assert_true(steel_chat_set_system(c, "Be short.", &err));
    say(c, "user", "Hi");
    assert_renders(c, "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
                      "<|im_start|>assistant\n");
    steel_chat_set_thinking(c, STEEL_THINK_OFF);
    assert_true(steel_chat_set_system(c, NULL, &err));
    assert_renders(c, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
                      "<think>\n\n</think>\n\n");
    steel_chat_set_thinking(c, STEEL_THINK_AUTO);
    assert_true(steel_chat_set_variables(c, "{\"enable_thinking\": false}", &err));
    assert_renders(c, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
                      "<think>\n\n</think>\n\n");
    assert_true(steel_chat_set_variables(c, NULL, &err));
    /* a call and its result, as structs and as JSON */
    struct steel_message call = {.role = "assistant",
                                 .tool_calls = "[{\"id\": \"c1\", \"type\": \"function\","
                                               "\"function\": {\"name\": \"f\","
                                               "\"arguments\": \"{\\\"x\\\": 1}\"}}]"};
    struct steel_message result = {.role = "tool", .content = "one", .call_id = "c1"};
    assert_true(steel_chat_add(c, &call, &err));
    assert_true(steel_chat_add(c, &result, &err));
    int n = steel_chat_render(c, text, sizeof text, &err);
    assert_non_null(strstr(text, "{\"name\": \"f\", \"arguments\": {\"x\": 1}}"));
    assert_non_null(strstr(text, "<tool_response>\none\n</tool_response>"));
    char json[2000], again[2000];
    assert_true(steel_chat_json(c, 0, json, sizeof json) > 0);
    assert_int_equal(steel_chat_n_messages(c), 3);
    assert_string_equal(steel_chat_role(c, 2), "tool");
    assert_string_equal(steel_chat_role(c, 3), "");
    steel_chat_cut(c, 0);
    assert_true(steel_chat_add_json(c, json, &err));
    assert_int_equal(steel_chat_render(c, again, sizeof again, &err), n);
    assert_string_equal(again, text);
    steel_chat_cut(c, 1);
    assert_true(steel_chat_add_json(c, "{\"role\": \"user\", \"content\": \"!\"}", &err));
    assert_true(steel_chat_json(c, 1, json, sizeof json) > 0);
    assert_string_equal(json, "[{\"role\":\"user\",\"content\":\"!\"}]");
    assert_true(steel_chat_set_tools(
        c, "[{\"type\": \"function\", \"function\": {\"name\": \"f\"}}]", &err));
    assert_true(steel_chat_render(c, text, sizeof text, &err) > 0);
    assert_non_null(strstr(text, "# Tools\n<tools>\n{\"type\": \"function\""));
    steel_chat_free(c);
    steel_engine_close(e);
}

static void test_chat_refuses(void **state)
{
    (void)state;
    struct steel_engine *e = open_toy();
    struct steel_chat *c = new_chat(e);
    struct steel_error err = {0};
    static const struct {
        const char *json, *says;
    } bad[] = {
        {"[{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"king\", \"content\": \"b\"}]",
         "messages[1].role"},
        {"{\"role\": \"user\"}", "messages[0].content is missing"},
        {"{\"role\": \"user\", \"content\": 7}", "messages[0].content must be"},
        {"{\"role\": \"assistant\", \"tool_calls\": [{}]}",
         "messages[0].tool_calls[0].function.name"},
        {"3", "messages must be"},
        {"[{\"role\":", "not JSON"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_false(steel_chat_add_json(c, bad[i].json, &err));
        assert_int_equal(err.kind, STEEL_INVALID);
        if (!strstr(err.message, bad[i].says))
            fail_msg("%s: %s", bad[i].json, err.message);
        assert_int_equal(steel_chat_n_messages(c), 0); /* all or none */
    }
    struct steel_message odd = {.role = "user", .content = "\xff"};
    assert_false(steel_chat_add(c, &odd, &err));
    assert_non_null(strstr(err.message, "UTF-8"));
    assert_false(steel_chat_add(c, &(struct steel_message){0}, &err));
    assert_false(steel_chat_set_system(c, "\xc0", &err));
    assert_false(steel_chat_set_tools(c, "{}", &err));
    assert_false(steel_chat_set_tools(c, "[{\"type\": \"function\"}]", &err));
    assert_non_null(strstr(err.message, "tools[0].function.name"));
    assert_false(steel_chat_set_variables(c, "[1]", &err));
    assert_false(steel_chat_set_format(c, "klingon", &err));
    assert_non_null(strstr(err.message, "klingon"));
    assert_true(steel_chat_set_format(c, "hermes", &err) && steel_chat_set_format(c, NULL, &err));
    assert_null(steel_chat_answer(c, NULL, &err)); /* nothing to answer */
    char long_text[600];
    memset(long_text, 'x', sizeof long_text);
    long_text[599] = 0;
    say(c, "user", long_text);
    assert_null(steel_chat_answer(c, NULL, &err));
    assert_int_equal(err.kind, STEEL_TOO_LONG);
    assert_null(steel_chat_new(e, "/nonexistent.jinja", &err));
    assert_non_null(strstr(err.message, "/nonexistent.jinja"));
    steel_chat_free(c);
    steel_engine_close(e);
    struct steel_engine_options o = {.kv_type = "q3"};
    assert_null(steel_engine_open(path, &o, &err));
    assert_non_null(strstr(err.message, "kv_type"));
    o = (struct steel_engine_options){.kv_type = "q8_0", .v_type = "q3"};
    assert_null(steel_engine_open(path, &o, &err));
    assert_non_null(strstr(err.message, "v_type must be f16, bf16, f32, q8_0, fp8 or q4_0"));
    o.v_type = "f16"; /* keys of 16 values */
    assert_null(steel_engine_open(path, &o, &err));
    assert_non_null(strstr(err.message, "no multiple of 32: a cache of q8_0"));
}

static void test_answers(void **state)
{
    (void)state;
    struct steel_engine *e = open_toy();
    struct steel_chat *c = new_chat(e);
    struct steel_error err = {0};
    struct steel_request_options o = steel_engine_request_options(e);
    struct heard h;
    o.max_tokens = 40;
    o.ignore_eos = true;
    o.seed = 5;
    steel_chat_set_thinking(c, STEEL_THINK_OFF);
    say(c, "user", "Tell me a story.");
    struct steel_answer *a = steel_chat_answer(c, &o, &err);
    assert_non_null(a);
    assert_null(steel_chat_answer(c, &o, &err)); /* one at a time */
    assert_non_null(strstr(err.message, "under way"));
    struct pollfd p = {.fd = steel_answer_fd(a), .events = POLLIN};
    assert_int_equal(poll(&p, 1, 60000), 1);
    hear(a, &h);
    assert_int_equal(h.end.finish, STEEL_LENGTH);
    assert_int_equal(h.end.n_generated, 40);
    assert_int_equal(steel_chat_n_messages(c), 2);
    char json[8192], first[4096];
    steel_chat_json(c, 1, json, sizeof json);
    assert_non_null(strstr(json, "\"role\":\"assistant\""));
    strcpy(first, h.text);
    assert_true(strlen(first) > 10);
    /* the same again, and stopped at a text it contains */
    steel_chat_cut(c, 1);
    char stop[4] = "";
    memcpy(stop, first + strlen(first) / 2, 3);
    const char *stops[] = {stop};
    o.stop = stops;
    o.n_stop = 1;
    hear(steel_chat_answer(c, &o, &err), &h);
    assert_int_equal(h.end.finish, STEEL_STOP);
    const char *at = strstr(first, stop);
    assert_int_equal(strlen(h.text), at - first);
    assert_memory_equal(h.text, first, strlen(h.text));
    o.n_stop = 0;
    /* settled: the next turn reads only what is new in it */
    steel_chat_cut(c, 1);
    say(c, "assistant", "There was a fox.");
    struct steel_stats st;
    steel_engine_stats(e, &st);
    uint64_t before = st.prompt_tokens;
    steel_chat_settle(c);
    do
        steel_engine_stats(e, &st);
    while (st.prompt_tokens == before || st.running + st.waiting);
    say(c, "user", "And then?");
    int n_all = steel_chat_render(c, json, sizeof json, &err);
    assert_true(n_all > 100);
    hear(steel_chat_answer(c, &o, &err), &h);
    /* "And then?", its end, the header of the answer and the empty thoughts, byte by byte */
    assert_int_equal(h.end.n_prompt - h.end.n_cached, 9 + 2 + 11 + 6);
    /* cancelled: it ends, and what was said stays in the conversation. Where this thread sleeps for
     * long the answer may have come to its own end before: then once more. */
    say(c, "user", "More!");
    o.max_tokens = 0;
    int n = steel_chat_n_messages(c), tries = 0;
    struct steel_chat_event ev;
    do {
        assert_true(tries++ < 100);
        steel_chat_cut(c, n);
        a = steel_chat_answer(c, &o, &err);
        ev = (struct steel_chat_event){0};
        while (ev.kind != STEEL_CHAT_TEXT)
            assert_true(steel_answer_next(a, &ev, 60000));
        steel_answer_cancel(a);
        while (steel_answer_next(a, &ev, 60000))
            ;
        assert_int_equal(ev.kind, STEEL_CHAT_DONE);
        steel_answer_free(a);
        assert_int_equal(steel_chat_n_messages(c), n + 1);
    } while (ev.end.finish == STEEL_LENGTH);
    assert_int_equal(ev.end.finish, STEEL_CANCELLED);
    /* freed in the middle: it is as if it had not been asked for */
    steel_chat_cut(c, 1);
    a = steel_chat_answer(c, &o, &err);
    assert_true(steel_answer_next(a, &ev, 60000));
    steel_answer_free(a);
    assert_int_equal(steel_chat_n_messages(c), 1);
    steel_engine_stats(e, &st);
    assert_int_equal(st.running + st.waiting + st.kv_pages_held, 0);
    steel_chat_settle(c); /* what still settles does not hold up the end */
    steel_chat_free(c);
    steel_engine_close(e);
}

/* Where answers come one at a time, one asked for at once still finds all of the past read. */
static void test_settle_in_turn(void **state)
{
    (void)state;
    struct steel_error err = {0};
    struct steel_engine_options one = {
        .threads = 1, .context = 512, .max_requests = 1, .deterministic = true};
    struct steel_engine *e = steel_engine_open(path, &one, &err);
    struct steel_chat *c = new_chat(e);
    struct steel_request_options o = steel_engine_request_options(e);
    struct heard h;
    o.max_tokens = 3;
    steel_chat_set_thinking(c, STEEL_THINK_OFF);
    for (int i = 0; i < 20; i++) {
        say(c, "user", "Tell me a story.");
        say(c, "assistant", i % 2 ? "There was a fox." : "There was a frog, and it was green.");
        steel_chat_settle(c);
        say(c, "user", "And then?");
        hear(steel_chat_answer(c, &o, &err), &h);
        assert_in_range(h.end.n_prompt - h.end.n_cached, 1, 9 + 2 + 11 + 6);
        steel_chat_cut(c, 0);
    }
    /* a past that is no longer the chat's does not hold it up */
    say(c, "user", "One, two, three, four.");
    steel_chat_settle(c);
    steel_chat_cut(c, 0);
    say(c, "user", "Five.");
    hear(steel_chat_answer(c, &o, &err), &h);
    assert_true(h.end.n_generated > 0);
    steel_chat_free(c);
    steel_engine_close(e);
}

/* The model in the box knows tools and thinks: what it says is told apart. */
static void test_tools(void **state)
{
    (void)state;
    struct steel_error err = {0};
    struct steel_engine *e = steel_engine_open("demo/steel-demo.gguf", NULL, &err);
    if (!e)
        fail_msg("%s", err.message);
    struct steel_info info;
    steel_engine_info(e, &info);
    assert_string_equal(info.path, "demo/steel-demo.gguf");
    assert_true(info.n_params > 100000 && info.n_active <= info.n_params && info.bytes > 0);
    struct steel_chat *c = new_chat(e);
    static const char tools[] =
        "[{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", \"description\":"
        "\"Get the current weather in a city.\", \"parameters\": {\"type\": \"object\","
        "\"properties\": {\"city\": {\"type\": \"string\"}}, \"required\": [\"city\"]}}}]";
    assert_true(steel_chat_set_tools(c, tools, &err));
    say(c, "user", "What is the weather in Paris?");
    struct steel_request_options o = steel_engine_request_options(e);
    assert_true(o.temperature == 0.5f && o.top_k == 20); /* as its author advises */
    o.temperature = 0;
    struct heard h;
    hear(steel_chat_answer(c, &o, &err), &h);
    assert_int_equal(h.end.finish, STEEL_STOP);
    assert_int_equal(h.n_calls, 1);
    assert_int_equal(h.n_ends, 1);
    assert_string_equal(h.name, "get_weather");
    assert_string_equal(h.arguments, "{\"city\": \"Paris\"}");
    assert_non_null(strstr(h.thinking, "get_weather"));
    assert_null(strstr(h.text, "<tool_call>"));
    int whole = h.end.n_generated;
    struct steel_message r = {.role = "tool",
                              .content = "{\"temperature\": 21, \"condition\": \"sunny\"}",
                              .call_id = h.id};
    assert_true(steel_chat_add(c, &r, &err));
    hear(steel_chat_answer(c, &o, &err), &h);
    assert_non_null(strstr(h.text, "21"));
    assert_int_equal(h.n_calls, 0);
    assert_true(h.end.n_cached > 100); /* the first prompt and its answer */
    assert_int_equal(steel_chat_n_messages(c), 4);
    /* cut inside the call: it is taken back, and its text is the answer's */
    o.max_tokens = whole;
    do {
        assert_true(whole - --o.max_tokens < 20);
        steel_chat_cut(c, 1);
        hear(steel_chat_answer(c, &o, &err), &h);
    } while (!h.n_broken);
    assert_int_equal(h.end.finish, STEEL_LENGTH);
    assert_int_equal(h.n_calls + h.n_ends, 0);
    assert_non_null(strstr(h.text, "<tool_call>"));
    assert_non_null(strstr(h.text, h.arguments));
    char json[8192];
    assert_true(steel_chat_json(c, 1, json, sizeof json) > 0);
    assert_true(strstr(json, "<tool_call>") && !strstr(json, "tool_calls"));
    o.max_tokens = 0;
    /* without tools the same text would be content; without thinking there is none */
    assert_true(steel_chat_set_tools(c, NULL, &err));
    steel_chat_set_thinking(c, STEEL_THINK_OFF);
    steel_chat_cut(c, 0);
    say(c, "user", "What is 2 + 2?");
    hear(steel_chat_answer(c, &o, &err), &h);
    assert_string_equal(h.thinking, "");
    assert_non_null(strstr(h.text, "4"));
    steel_chat_free(c);
    steel_engine_close(e);
}

/* Answers that fit, from a model that wants nonsense; and what cannot be is refused by name. */
static void test_constraints(void **state)
{
    (void)state;
    struct steel_engine *e = open_toy();
    struct steel_error err = {0};
    struct steel_request_options plain = steel_request_options(), o;
    char text[4096];
    plain.text = "x";
    plain.temperature = 3;
    plain.max_tokens = 100;
    for (uint64_t seed = 0; seed < 8; seed++) {
        o = plain;
        o.seed = seed;
        o.json_schema = "{\"type\":\"object\",\"properties\":{\"n\":{\"type\":\"integer\"}},"
                        "\"required\":[\"n\"],\"additionalProperties\":false}";
        struct steel_request *r = steel_request_submit(e, &o, &err);
        assert_int_equal(finish(r, text, sizeof text).finish, STEEL_STOP);
        json_t *v = json_loads(text, JSON_DECODE_INT_AS_REAL, NULL);
        if (json_object_size(v) != 1 || !json_is_number(json_object_get(v, "n")))
            fail_msg("%s", text);
        json_decref(v);
        steel_request_free(r);
        o = plain;
        o.seed = seed;
        o.json = true;
        r = steel_request_submit(e, &o, &err);
        assert_int_equal(finish(r, text, sizeof text).finish, STEEL_STOP);
        v = json_loads(text, JSON_DECODE_INT_AS_REAL | JSON_ALLOW_NUL, NULL);
        if (!json_is_object(v) && !strstr(text, "e")) /* numbers may be too large for the reader */
            fail_msg("%s", text);
        json_decref(v);
        steel_request_free(r);
    }
    o = plain;
    o.regex = "a+b";
    struct steel_request *r = steel_request_submit(e, &o, &err);
    assert_int_equal(finish(r, text, sizeof text).finish, STEEL_STOP);
    assert_true(text[0] == 'a' && text[strlen(text) - 1] == 'b');
    steel_request_free(r);
    o = plain;
    o.grammar = "root ::= \"x\" [0-9]";
    r = steel_request_submit(e, &o, &err);
    finish(r, text, sizeof text);
    assert_true(strlen(text) == 2 && text[0] == 'x' && text[1] >= '0' && text[1] <= '9');
    steel_request_free(r);
    o = plain;
    o.one_of = "[\"left\", \"right\"]";
    r = steel_request_submit(e, &o, &err);
    finish(r, text, sizeof text);
    assert_true(!strcmp(text, "left") || !strcmp(text, "right"));
    steel_request_free(r);
    o.regex = "a";
    assert_null(steel_request_submit(e, &o, &err));
    assert_string_equal(err.message, "regex and one_of: an answer has one constraint");
    o = plain;
    o.json_schema = "{\"type\":\"array\",\"uniqueItems\":true}";
    assert_null(steel_request_submit(e, &o, &err));
    assert_non_null(strstr(err.message, "#/uniqueItems"));
    /* cut where the client's own limit is too small */
    o.json_schema = "{\"enum\":[\"a long text that three tokens do not hold\"]}";
    o.max_tokens = 3;
    r = steel_request_submit(e, &o, &err);
    assert_int_equal(finish(r, text, sizeof text).finish, STEEL_LENGTH);
    steel_request_free(r);
    steel_engine_close(e);
}

/* Chats: a call that is asked for comes, and a text that fits, thinking aside. */
static void test_tool_choice(void **state)
{
    (void)state;
    struct steel_error err = {0};
    struct steel_engine *e = steel_engine_open("demo/steel-demo.gguf", NULL, &err);
    assert_non_null(e);
    struct steel_chat *c = new_chat(e);
    assert_true(steel_chat_set_tools(
        c,
        "[{\"type\":\"function\",\"function\":{\"name\":\"send\",\"parameters\":{\"type\":"
        "\"object\",\"properties\":{\"to\":{\"enum\":[\"Jana\",\"Emil\"]}},\"required\":[\"to\"],"
        "\"additionalProperties\":false}}},{\"type\":\"function\",\"function\":{\"name\":\"ping\"}}"
        "]",
        &err));
    struct steel_request_options o = steel_engine_request_options(e);
    struct heard h;
    o.max_tokens = 120;
    o.one_call = true;
    for (uint64_t seed = 0; seed < 4; seed++) {
        steel_chat_cut(c, 0);
        say(c, "user", "Hello!");
        o.seed = seed;
        o.tool_choice = "send";
        o.temperature = 2;
        hear(steel_chat_answer(c, &o, &err), &h);
        assert_int_equal(h.end.finish, STEEL_STOP);
        assert_int_equal(h.n_calls, 1);
        assert_string_equal(h.name, "send");
        assert_true(strstr(h.arguments, "\"Jana\"") || strstr(h.arguments, "\"Emil\""));
    }
    steel_chat_cut(c, 0);
    say(c, "user", "Hello!");
    o.tool_choice = "required";
    hear(steel_chat_answer(c, &o, &err), &h);
    assert_int_equal(h.n_calls, 1);
    steel_chat_cut(c, 0);
    say(c, "user", "Hello!");
    o.tool_choice = "none";
    o.regex = "[0-9]{2}";
    hear(steel_chat_answer(c, &o, &err), &h);
    assert_int_equal(h.n_calls, 0);
    assert_int_equal(strlen(h.text), 2);
    steel_chat_cut(c, 0);
    say(c, "user", "Hello!");
    o.tool_choice = "sing";
    assert_null(steel_chat_answer(c, &o, &err));
    assert_string_equal(err.message, "tool_choice: 'sing' is not among the chat's tools");
    steel_chat_free(c);
    steel_engine_close(e);
}

static void test_read_only(void **state)
{
    (void)state;
    struct steel_engine *e = open_toy();
    struct steel_error err = {0};
    struct steel_request_options o = steel_request_options();
    struct steel_event end;
    char text[1000];
    o.text = "Once upon a time there was";
    o.read_only = true;
    struct steel_request *r = steel_request_submit(e, &o, &err);
    end = finish(r, text, sizeof text);
    assert_int_equal(end.n_generated, 0);
    assert_string_equal(text, "");
    steel_request_free(r);
    o.read_only = false;
    o.max_tokens = 2;
    r = steel_request_submit(e, &o, &err);
    assert_int_equal(steel_request_fd(r) >= 0, 1);
    end = finish(r, text, sizeof text);
    assert_int_equal(end.n_cached, 16); /* the page that was full; the last token is read anew */
    steel_request_free(r);
    o.n_text = 4; /* "Once" */
    r = steel_request_submit(e, &o, &err);
    assert_int_equal(finish(r, text, sizeof text).n_prompt, 4);
    steel_request_free(r);
    steel_engine_close(e);
}

int main(void)
{
    struct error err = {0};
    snprintf(path, sizeof path, "/tmp/steel-api-%d.gguf", (int)getpid());
    if (!toy_write(path, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one),          cmocka_unit_test(test_many),
        cmocka_unit_test(test_errors),       cmocka_unit_test(test_read_only),
        cmocka_unit_test(test_constraints),  cmocka_unit_test(test_tool_choice),
        cmocka_unit_test(test_conversation), cmocka_unit_test(test_chat_refuses),
        cmocka_unit_test(test_answers),      cmocka_unit_test(test_settle_in_turn),
        cmocka_unit_test(test_tools),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return rc;
}
