/*
 * The text of answers on a toy model: stop strings, log-probabilities, penalties and min_tokens do what they say, and
 * constraints cost the others nothing.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine_run.h"

static void test_text(void **state)
{
    (void)state;
    struct engine_options opt = {.runtime = {.max_seqs = 4, .context = 1024}};
    struct engine *e = open_engine(&opt);
    int32_t prompt[20];
    static struct answer a, b;
    prompt_of(3, prompt, 20);
    struct request_spec s = spec_of(prompt, 20, 80, 5);
    s.sample.top_k = 0;
    run(e, &s, &a);
    assert_true(a.n_text > 60);
    /* every substring of some length as stop string: the text ends right before its first place */
    for (size_t at = 10; at < 50; at += 3) {
        char stop[8] = {0};
        memcpy(stop, a.text + at, 5);
        const char *list[] = {"never said, this", stop};
        s.stop = list;
        s.n_stop = 2;
        run(e, &s, &b);
        size_t first = (size_t)((char *)memmem(a.text, a.n_text, stop, 5) - a.text);
        assert_int_equal(b.n_text, first);
        assert_memory_equal(a.text, b.text, first);
        assert_int_equal(b.finish, FINISH_STOP);
        assert_int_equal(b.stop, 1);
        assert_true(b.n < a.n);
    }
    s.n_stop = 1; /* held back text is not lost when the stop string does not come */
    s.stop = (const char *[]){"\x01\x02"};
    char begin[3] = {a.text[a.n_text - 1], '\x01', 0};
    s.stop = (const char *[]){begin};
    run(e, &s, &b);
    assert_same(&a, &b);
    engine_close(e);
}

/* Stop strings count in the answer, wherever the pieces are cut: not in thinking, whether the prompt
 * or the answer opens it. */
static void test_stop_outside_thinking(void **state)
{
    (void)state;
    struct engine_options opt = {.runtime = {.max_seqs = 1, .context = 64}};
    struct engine *e = open_engine(&opt);
    const struct tokenizer *t = engine_runtime(e)->tokenizer;
    static const struct {
        const char *text, *shown;
        enum output_zone zone;
        int stop;
    } cases[] = {
        {"a STOP b</think>c STOP d", "a STOP b</think>c ", OUTPUT_THINKING, 0},
        {" \n<think>a STOP b</think>c STOP d", " \n<think>a STOP b</think>c ", OUTPUT_START, 0},
        {"c STOP <think>", "c ", OUTPUT_START, 0},
        {"STOP", "", OUTPUT_START, 0},
        {" STOP", " ", OUTPUT_START, 0},
        {"c <think>a STOP b</think>", "c <think>a ", OUTPUT_START, 0},
        {"a STOP b</think>c STO", "a STOP b</think>c STO", OUTPUT_THINKING, -1},
        {"a STOP b</thin", "a STOP b</thin", OUTPUT_THINKING, -1},
        {" <thi", " <thi", OUTPUT_START, -1},
        {"  ", "  ", OUTPUT_START, -1},
        {"<thi STOP", "<thi ", OUTPUT_START, 0},
        {"a STOP", "a ", OUTPUT_ANSWER, 0},
        {"", "", OUTPUT_START, -1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *const stops[] = {"STOP"};
        struct output o = {.stop = stops,
                           .n_stop = 1,
                           .think_open = "<think>",
                           .think_close = "</think>",
                           .zone = cases[i].zone};
        struct buf out = {0};
        int stop = -1;
        for (const char *c = cases[i].text; *c && stop < 0; c++) /* a token is a byte */
            stop = output_push(&o, t, (unsigned char)*c, &out);
        if (stop < 0)
            stop = output_finish(&o, &out);
        assert_int_equal(stop, cases[i].stop);
        assert_string_equal(out.p ? out.p : "", cases[i].shown);
        buf_clear(&out);
        output_clear(&o);
    }
    engine_close(e);
}

/* Log-probabilities of a prompt: told once for every token, in order, whatever the company. */
static void test_prompt_logprobs(void **state)
{
    (void)state;
    struct engine_options opt = {
        .runtime = {.max_seqs = 3, .context = 512, .backend.deterministic = true}};
    struct engine *e = open_engine(&opt);
    int32_t prompt[200];
    prompt_of(9, prompt, 200);
    float want[200];
    for (int company = 0; company < 3; company++) {
        struct events *q = events_new();
        static struct answer a[3];
        struct request_spec s = spec_of(prompt, 200, 5, 1), other = spec_of(prompt, 150, 40, 2);
        s.logprobs = s.prompt_logprobs = true;
        s.n_top = 2;
        submit(e, &s, q, &a[0], NULL);
        for (int i = 0; i < company; i++)
            submit(e, &other, q, &a[1 + i], NULL);
        struct engine_event ev;
        int n = 0;
        for (int open = 1 + company; open;) {
            assert_true(events_next(q, &ev, -1));
            open -= take(&ev);
            if (ev.kind != EVENT_PROMPT)
                continue;
            assert_ptr_equal(ev.user, &a[0]);
            assert_int_equal(a[0].n, 0); /* before the answer */
            assert_int_equal(ev.token, prompt[n]);
            assert_int_equal(ev.n_top, n ? 2 : 0);
            assert_true(n ? ev.logprob <= ev.top[0].logprob : isnan(ev.logprob));
            if (company && n)
                assert_true(want[n] == ev.logprob);
            want[n++] = ev.logprob;
        }
        assert_int_equal(n, 200);
        assert_int_equal(a[0].n, 5);
        assert_int_equal(a[0].usage.n_cached, 0);
        events_free(q);
    }
    /* what is generated scores as it was generated */
    static struct answer made, scored;
    struct request_spec s = spec_of(prompt, 50, 30, 4);
    s.logprobs = true;
    run(e, &s, &made);
    int32_t all[80];
    memcpy(all, prompt, 50 * sizeof *all);
    memcpy(all + 50, made.tokens, 30 * sizeof *all);
    struct events *q = events_new();
    s = spec_of(all, 80, 0, 4);
    s.logprobs = s.prompt_logprobs = s.read_only = true;
    submit(e, &s, q, &scored, NULL);
    struct engine_event ev;
    for (int n = 0, done = 0; !done;) {
        assert_true(events_next(q, &ev, -1));
        done = take(&ev);
        if (ev.kind == EVENT_PROMPT && ++n > 50)
            assert_true(ev.logprob == made.logprobs[n - 51]);
    }
    assert_int_equal(scored.n, 0);
    assert_int_equal(scored.finish, FINISH_LENGTH);
    events_free(q);
    engine_close(e);
}

static void test_parameters(void **state)
{
    (void)state;
    struct engine_options opt = {.runtime = {.max_seqs = 4, .context = 1024}};
    struct engine *e = open_engine(&opt);
    int32_t prompt[20];
    static struct answer a, b;
    prompt_of(3, prompt, 20);
    /* the end token: forced, it ends the answer; min_tokens bans it for a while; ignored, it does not */
    struct logit_bias bias[2] = {{TOY_IM_END, 100}, {'x', 50}};
    struct request_spec s = spec_of(prompt, 20, 40, 5);
    s.ignore_eos = false;
    s.sample.bias = bias;
    s.sample.n_bias = 2;
    run(e, &s, &a);
    assert_int_equal(a.finish, FINISH_STOP);
    assert_int_equal(a.usage.n_generated, 1);
    assert_int_equal(a.n_text, 0);
    s.min_tokens = 7;
    run(e, &s, &a);
    assert_int_equal(a.finish, FINISH_STOP);
    assert_int_equal(a.usage.n_generated, 8);
    assert_int_equal(a.n_text, 7);
    assert_memory_equal(a.text, "xxxxxxx", 7);
    s.min_tokens = 0;
    s.ignore_eos = true;
    run(e, &s, &a);
    assert_int_equal(a.usage.n_generated, 40);
    assert_int_equal(a.finish, FINISH_LENGTH);
    assert_int_equal(a.n_text, 0);
    s.special = true;
    run(e, &s, &a);
    assert_memory_equal(a.text, "<|im_end|><|im_end|>", 20);
    /* log-probabilities: sum to at most one, the greedy token is the best; raw, whatever the bias */
    s = spec_of(prompt, 20, 10, 5);
    s.sample.temp = 0;
    s.logprobs = true;
    s.n_top = 5;
    run(e, &s, &a);
    double sum = 0;
    for (int i = 0; i < 5; i++) {
        sum += exp((double)a.top[i].logprob);
        assert_true(i == 0 || a.top[i].logprob <= a.top[i - 1].logprob);
    }
    assert_int_equal(a.n_top, 5);
    assert_true(sum > 0 && sum <= 1.00001);
    assert_int_equal(a.top[0].token, a.tokens[0]);
    assert_true(a.top[0].logprob == a.logprobs[0]);
    s.sample.bias = &bias[1];
    s.sample.n_bias = 1;
    run(e, &s, &b);
    assert_memory_equal(a.top, b.top, sizeof a.top);
    assert_int_equal(b.tokens[0], 'x');
    assert_true(b.logprobs[0] < a.logprobs[0]);
    engine_close(e);
}

/* What a constraint leaves no choice about is fed without being chosen, several tokens in a step: the
 * answer is the one that choosing gives (which log-probabilities ask for), in fewer steps. Ends of the
 * answer are found in the middle of it too. */
static void test_forced(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        int max_tokens;
        const char *stop;
        enum finish finish;
    } cases[] = {
        {"(the quick brown fox|jumps over the lazy dog)[0-9]{3} and so on", 200, NULL, FINISH_STOP},
        {"(the quick brown fox|jumps over the lazy dog)[0-9]{3} and so on", 9, NULL, FINISH_LENGTH},
        {"(the quick brown fox|jumps over the lazy dog)[0-9]{3} and so on", 200, " and",
         FINISH_STOP},
        {"always the same answer", 200, NULL, FINISH_STOP},
    };
    for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
        struct engine_options opt = {.runtime = {.max_seqs = 4, .context = 512}};
        struct engine *e = open_engine(&opt);
        struct grammar *g = grammar_of(GRAMMAR_REGEX, cases[k].text);
        static struct answer a[2];
        static int32_t prompt[20];
        uint64_t steps[2], forced[2];
        prompt_of(3, prompt, 20);
        for (int chosen = 0; chosen < 2; chosen++) {
            struct engine_stats before, after;
            struct request_spec s = spec_of(prompt, 20, cases[k].max_tokens, 11);
            s.ignore_eos = false;
            s.grammar = g;
            s.logprobs = chosen;
            s.stop = &cases[k].stop;
            s.n_stop = cases[k].stop != NULL;
            engine_stats(e, &before);
            run(e, &s, &a[chosen]);
            engine_stats(e, &after);
            steps[chosen] = after.n_steps - before.n_steps;
            forced[chosen] = after.n_forced - before.n_forced;
        }
        assert_same(&a[0], &a[1]);
        assert_int_equal(a[0].finish, cases[k].finish);
        assert_int_equal(a[0].usage.n_generated, a[1].usage.n_generated);
        assert_true(forced[0] > 4 && forced[1] == 0);
        assert_true(steps[0] + 4 <= steps[1]);
        engine_close(e);
        grammar_free(g);
    }
}

/* A grammar whose masks take some 200,000 steps from the fifth token on. */
static struct grammar *costly_grammar(void)
{
    struct buf text = {0};
    buf_adds(&text, "root ::= [a-z] [a-z] [a-z] [a-z] h\nh ::= ");
    for (int i = 0; i < 600; i++)
        buf_addf(&text, "[ -~] h \"%d\" | ", i);
    buf_adds(&text, "\"\"\n");
    struct grammar *g = grammar_of(GRAMMAR_GBNF, text.p);
    buf_clear(&text);
    return g;
}

/* Sequences whose masks are costly sit steps out: others get their tokens meanwhile. Their answers are the same
 * as alone; a cancel and the engine's end need not wait for a mask. */
static void test_costly(void **state)
{
    (void)state;
    enum { COSTLY = 5, TOKENS = 26 };
    static struct answer alone[COSTLY + 1], beside[COSTLY + 1], gone[2];
    static int32_t prompts[COSTLY + 1][20];
    struct request_spec s[COSTLY + 1];
    struct engine_options opt = {.runtime = {.max_seqs = 8, .context = 512, .page_len = 16}};
    struct engine *e = open_engine(&opt);
    struct grammar *g = costly_grammar();
    struct engine_stats st;
    struct engine_event ev;
    for (int i = 0; i <= COSTLY; i++) {
        prompt_of(i, prompts[i], 20);
        s[i] = spec_of(prompts[i], 20, TOKENS, (uint64_t)i);
        s[i].client = 1 + (i == COSTLY);
        s[i].grammar = i < COSTLY ? g : NULL;
        s[i].ignore_eos = i == COSTLY;
        run(e, &s[i], &alone[i]);
    }
    engine_stats(e, &st);
    assert_true(st.n_held > 4 && st.mask_s > 0);
    assert_int_equal(st.pages_held, 0);
    engine_close(e);

    e = open_engine(&opt);
    struct events *q = events_new();
    for (int i = 0; i < COSTLY; i++)
        submit(e, &s[i], q, &beside[i], NULL);
    for (int n = 0; n < COSTLY;) {
        assert_true(events_next(q, &ev, -1));
        struct answer *a = ev.user;
        take(&ev);
        n += ev.kind == EVENT_TOKEN && a->n == 1;
    }
    submit(e, &s[COSTLY], q, &beside[COSTLY], NULL);
    int left = COSTLY;
    while (!beside[COSTLY].n_done) {
        assert_true(events_next(q, &ev, -1));
        left -= take(&ev) && ev.user != &beside[COSTLY];
    }
    assert_true(left > 0);
    struct request *r[2];
    for (int i = 0; i < 2; i++)
        submit(e, &s[i], q, &gone[i], &r[i]);
    bool cancelled = false;
    for (left = COSTLY + 2; left > 1 || !gone[0].n_done;) {
        assert_true(events_next(q, &ev, -1));
        take(&ev);
        if (gone[0].n == 6 && !cancelled) { /* it is held now, or will be next */
            request_cancel(r[0]);
            cancelled = true;
        }
        left = 1;
        for (int i = 0; i < COSTLY; i++)
            left += !beside[i].n_done;
    }
    assert_int_equal(gone[0].finish, FINISH_CANCEL);
    for (int i = 0; i <= COSTLY; i++)
        assert_same(&alone[i], &beside[i]);
    engine_close(e); /* gone[1] may still run */
    request_free(r[0]);
    request_free(r[1]);
    events_free(q);
    grammar_free(g);
}

int main(void)
{
    struct error err = {0};
    snprintf(path, sizeof path, "/tmp/steel-engine-text-%d.gguf", (int)getpid());
    if (!toy_write(path, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_parameters),
        cmocka_unit_test(test_stop_outside_thinking),
        cmocka_unit_test(test_prompt_logprobs),
        cmocka_unit_test(test_forced),
        cmocka_unit_test(test_costly),
    };
    /* Some again where steps overlap; the reference is too slow for all. */
    const struct CMUnitTest overlapping[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_forced),
        cmocka_unit_test(test_costly),
    };
    /* With recurrent states. */
    const struct CMUnitTest hybrid[] = {
        cmocka_unit_test(test_prompt_logprobs),
        cmocka_unit_test(test_costly),
    };
    const struct CMUnitTest hybrid_overlapping[] = {cmocka_unit_test(test_costly)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    setenv("STEEL_ISA", "ref", 1);
    rc |= cmocka_run_group_tests(overlapping, NULL, NULL);
    unsetenv("STEEL_ISA");
    if (!toy_write_hybrid(path, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    rc |= cmocka_run_group_tests_name("hybrid", hybrid, NULL, NULL);
    setenv("STEEL_ISA", "ref", 1);
    rc |= cmocka_run_group_tests_name("hybrid", hybrid_overlapping, NULL, NULL);
    unsetenv("STEEL_ISA");
    unlink(path);
    return rc;
}
