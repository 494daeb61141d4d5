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
    struct steel_request *r = steel_request_submit(e, &o, &err);
    struct steel_event ev;
    assert_true(steel_request_next(r, &ev, -1));
    assert_false(steel_request_done(r));
    steel_request_free(r);
    struct steel_stats st;
    steel_engine_stats(e, &st);
    assert_int_equal(st.running + st.waiting + st.kv_pages_held, 0);
    assert_int_equal(st.cancellations, 3);
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

int main(void)
{
    struct error err = {0};
    snprintf(path, sizeof path, "/tmp/steel-api-%d.gguf", (int)getpid());
    if (!toy_write(path, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_errors),
    };
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return rc;
}
