/*
 * Drafts from text. The index: what it finds is what a plain search finds, within its bounds; clients are kept apart; its
 * memory is bounded. The costs: depths that pay. Answers: byte for byte those without drafts, whatever is drafted at
 * whatever depth, for attention, sliding windows, convolutions, recurrent states and experts, for quantised caches, under
 * penalties, stop strings, constraints, adapters, n > 1, preemption, and from the cache. Recent answers save steps.
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
#include "engine/engine.h"
#include "mtp_toy.h"
#include "text/grammar/grammar.h"

enum { CROWD = 9, MOST = 256, ANSWERS = CROWD + 1 };

static uint32_t draw(uint32_t *s, uint32_t n)
{
    *s = *s * 1664525u + 1013904223u;
    return (*s >> 8) % n;
}

/* The longest earlier past that a plain search finds, among all positions. */
static int longest(const int32_t *text, int n)
{
    int best = 0;
    for (int p = 1; p < n; p++) {
        int k = 0;
        while (k < p && k < DRAFT_PAST && text[p - 1 - k] == text[n - 1 - k])
            k++;
        best = k > best ? k : best;
    }
    return best < DRAFT_KEY ? 0 : best;
}

static void finds_what_was_before(void **state)
{
    (void)state;
    enum { N = 3000 };
    static int32_t text[N];
    for (int kind = 0; kind < 4; kind++) {
        uint32_t s = 7;
        struct draft_match m = {0};
        int exact = 0, found = 0, drafted = 0;
        for (int i = 0; i < N; i++) {
            /* random; of a small vocabulary; a period; copies with changes */
            text[i] = kind == 0                      ? (int32_t)draw(&s, 1u << 30)
                      : kind == 1                    ? (int32_t)draw(&s, 4)
                      : kind == 2                    ? i % 7
                      : i < 500 || draw(&s, 50) == 0 ? (int32_t)draw(&s, 1000)
                                                     : text[i - 500];
            int n = i + 1;
            int32_t drafts[DRAFT_DEPTH];
            assert_true(draft_match_follow(&m, text, n, NULL, 100));
            int k = draft_match_write(&m, text, n, drafts, DRAFT_DEPTH);
            drafted += k;
            if (!m.len)
                continue;
            assert_true(m.len >= DRAFT_KEY && m.at < n && k == DRAFT_DEPTH);
            for (int j = 0; j < m.len && j < DRAFT_PAST; j++)
                assert_int_equal(text[m.at - 1 - j], text[n - 1 - j]);
            for (int j = 0; j < k; j++)
                assert_int_equal(drafts[j], m.at + j < n ? text[m.at + j] : drafts[m.at + j - n]);
            int best = longest(text, n), len = m.len < DRAFT_PAST ? m.len : DRAFT_PAST;
            found++;
            exact += len >= best || len >= 16;
        }
        print_message("kind %d: %d matches of %d tokens, %d of them the longest\n", kind, found, N,
                      exact);
        assert_true(kind == 0 ? drafted == 0 : found > N / 2);
        assert_true(kind == 1 ? exact > found / 4 : exact == found); /* many match shortly */
        draft_match_clear(&m);
    }
}

/* A prompt is indexed in pieces, and drafts begin once all of it is. */
static void long_prompts_in_pieces(void **state)
{
    (void)state;
    enum { N = 5 * DRAFT_FEED / 2 };
    int32_t *text = mem_alloc(N * sizeof *text), drafts[4];
    struct draft_match m = {0};
    for (int i = 0; i < N; i++)
        text[i] = i % 1000;
    assert_false(draft_match_follow(&m, text, N, NULL, N));
    assert_int_equal(draft_match_write(&m, text, N, drafts, 4), 0);
    assert_false(draft_match_follow(&m, text, N, NULL, N));
    assert_true(draft_match_follow(&m, text, N, NULL, N));
    assert_int_equal(draft_match_write(&m, text, N, drafts, 4), 4);
    assert_int_equal(drafts[3], (N + 3) % 1000);
    draft_match_clear(&m);
    mem_free(text);
}

static void clients_are_kept_apart(void **state)
{
    (void)state;
    static struct draft_history h;
    int32_t answer[64], past[8], drafts[4];
    for (int i = 0; i < 64; i++)
        answer[i] = 100 + i;
    memcpy(past, answer + 10, sizeof past);
    draft_history_add(&h, 1, 5, answer, 64);
    struct {
        uint64_t client, root;
        int n;
    } cases[] = {{1, 5, 4}, {2, 5, 0}, {1, 6, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct draft_match m = {0};
        const struct draft_recent *r = draft_history_of(&h, cases[i].client, cases[i].root);
        assert_true(draft_match_follow(&m, past, 8, r, 100));
        assert_int_equal(draft_match_write(&m, past, 8, drafts, 4), cases[i].n);
        if (cases[i].n)
            assert_int_equal(drafts[0], answer[18]);
        draft_match_clear(&m);
    }
    /* an answer's end is not the beginning of the next one */
    struct draft_match m = {0};
    draft_history_add(&h, 1, 5, answer, 64);
    assert_true(draft_match_follow(&m, answer + 56, 6, draft_history_of(&h, 1, 5), 100));
    assert_int_equal(draft_match_write(&m, answer + 56, 6, drafts, 4), 2);
    /* the match is lost when its text moves */
    draft_history_add(&h, 1, 5, past, 8);
    assert_true(draft_match_follow(&m, answer + 56, 7, NULL, 100));
    assert_int_equal(draft_match_write(&m, answer + 56, 7, drafts, 4), 0);
    draft_match_clear(&m);
    draft_history_clear(&h);
}

static void history_is_bounded(void **state)
{
    (void)state;
    static struct draft_history h;
    enum { LONG = DRAFT_RECENT };
    int32_t *answer = mem_alloc(LONG * sizeof *answer);
    uint32_t s = 3;
    for (int i = 0; i < 600; i++) {
        int n = i % 40 == 39 ? LONG : 1 + (int)draw(&s, 2000);
        for (int k = 0; k < n; k++)
            answer[k] = (int32_t)draw(&s, 50000);
        uint64_t client = i < 300 ? 1 : (uint64_t)i;
        draft_history_add(&h, client, 0, answer, n);
        const struct draft_recent *r = draft_history_of(&h, client, 0);
        if (n <= DRAFT_KEY)
            continue;
        assert_true(r && r->n <= DRAFT_RECENT && r->cap <= DRAFT_RECENT && r->index.n == r->n);
        int m = n < DRAFT_RECENT / 2 - 1 ? n : DRAFT_RECENT / 2 - 1; /* the end of it is there */
        assert_memory_equal(r->tokens + r->n - 1 - m, answer + n - m, (size_t)m * sizeof *answer);
    }
    assert_null(draft_history_of(&h, 1, 0)); /* more than DRAFT_CLIENTS have answered since */
    draft_history_clear(&h);
    mem_free(answer);
}

/* Depths for steps of made-up costs. */
static void depths_that_pay(void **state)
{
    (void)state;
    static struct draft_cost c;
    struct draft_offer o[2];
    static const struct {
        double row, p;
        int least, most;
    } cases[] = {{0.05, 0.95, 12, 16}, {0.05, 0.5, 2, 4}, {0.3, 0.9, 4, 12}, {0.9, 0.6, 0, 0},
                 {0.9, 0.97, 1, 16},   {1.1, 0.99, 0, 0}, {0.5, 0.4, 0, 0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        c = (struct draft_cost){0};
        o[0] = (struct draft_offer){.most = 16, .p = {cases[i].p, cases[i].p}};
        assert_false(draft_cost_known(&c, 1));
        for (int k = 0; k < 4; k++)
            draft_cost_learn(&c, 1, 0, false, 1000);
        /* the first step of each level takes 30 times as long: a GPU records it */
        for (int k = 0; k < 2; k++)
            for (int level = 1; level < DRAFT_LEVELS; level++)
                draft_cost_learn(
                    &c, 1, draft_levels[level], false,
                    (int64_t)(1000 * (k ? 1 + cases[i].row * draft_levels[level] : 30)));
        int n = draft_cost_choose(&c, 1, o, 1, 0, false);
        assert_int_equal(n, o[0].depth);
        if (n < cases[i].least || n > cases[i].most)
            fail_msg("a row %.2f, p %.2f: %d drafts", cases[i].row, cases[i].p, n);
    }
    /* the better offer gets more; a sequence's drafts end where there are no more */
    o[0] = (struct draft_offer){.most = 16, .p = {0.5, 0.5}};
    o[1] = (struct draft_offer){.most = 5, .p = {0.95, 0.95}};
    for (int k = 0; k < 4; k++)
        draft_cost_learn(&c, 2, 0, false, 1000);
    for (int k = 0; k < 2; k++)
        for (int level = 1; level < DRAFT_LEVELS; level++)
            draft_cost_learn(&c, 2, draft_levels[level], false, 1000 + 60 * draft_levels[level]);
    draft_cost_choose(&c, 2, o, 2, 0, false);
    assert_true(o[1].depth == 5 && o[0].depth > 0 && o[0].depth < 5);
    /* a cost that was high once is measured again later */
    double before = draft_cost_ratio(&c, 2, 3);
    for (int k = 0; k < 20000; k++)
        draft_cost_learn(&c, 2, 0, false, 1000);
    assert_true(draft_cost_ratio(&c, 2, 3) < 1 + 0.3 * (before - 1));
}

static char dir[] = "/tmp/steel-draft-text-XXXXXX";

struct answer {
    int32_t tokens[MOST];
    float logprobs[MOST];
    char text[2048];
    size_t n_text;
    int n, stop;
    enum finish finish;
    struct usage_count usage;
};

/* What is drafted: earlier text, `fixed` tokens; or random depths, of the true tokens with some wrong ones between. */
static struct drafting {
    int fixed;
    bool random;
    uint32_t state;
} how;

/* The answers that random drafts are taken from: prompt and answer. */
static struct known {
    int32_t tokens[MOST];
    int n;
} known[ANSWERS];
static int n_known;

static int write_drafts(void *arg, const int32_t *tokens, int n_tokens, int32_t *drafts, int n,
                        int most)
{
    (void)arg;
    int depth = (int)draw(&how.state, (uint32_t)most + 1);
    if (!how.random)
        return n;
    for (int k = 0; k < depth; k++)
        drafts[k] = (int32_t)draw(&how.state, 100);
    for (int i = 0; i < n_known; i++) {
        const struct known *a = &known[i];
        if (a->n < n_tokens || memcmp(a->tokens, tokens, (size_t)n_tokens * sizeof *tokens) != 0)
            continue;
        for (int k = 0; k < depth && n_tokens + k < a->n; k++)
            if (draw(&how.state, 6))
                drafts[k] = a->tokens[n_tokens + k];
        break;
    }
    return depth;
}

struct setting {
    const char *model, *lora;
    enum dtype k_type, v_type;
    int kv_tokens;
};

static struct engine *open_engine(const struct setting *s, bool drafts)
{
    char path[128];
    struct adapter_ref lora;
    struct error err = {0};
    mtp_toy_plain(dir, s->model, path, sizeof path);
    struct engine_options opt = {.runtime = {.context = MOST,
                                             .kv_tokens = s->kv_tokens,
                                             .k_type = s->k_type,
                                             .v_type = s->v_type,
                                             .max_seqs = 8,
                                             .max_tokens = 128}};
    if (drafts) {
        opt.runtime.draft = how.random ? 1 : how.fixed;
        opt.runtime.draft_from = 1u << DRAFT_TEXT | 1u << DRAFT_GRAMMAR;
    }
    opt.runtime.backend.threads = 2;
    opt.runtime.backend.deterministic = true;
    if (s->lora) {
        CHECK(adapter_ref_parse(s->lora, &lora, &err), "%s", err.msg);
        opt.runtime.loras = &lora;
        opt.runtime.n_loras = 1;
    }
    struct engine *e = engine_open(path, &opt);
    if (!engine_wait(e, &err))
        fail_msg("%s", err.msg);
    if (s->lora)
        mem_free(lora.path);
    if (drafts)
        engine_on_draft(e, write_drafts, NULL);
    return e;
}

static void run(struct engine *e, struct request_spec *specs, struct answer *answers, int n)
{
    struct events *q = events_new();
    struct engine_event ev;
    struct error err = {0};
    int left = 0;
    for (int i = 0; i < n; i++) {
        int choices = specs[i].n ? specs[i].n : 1;
        specs[i].queue = q;
        specs[i].user = answers + left;
        memset(answers + left, 0, sizeof *answers * (size_t)choices);
        left += choices;
    }
    for (int i = 0; i < n; i++)
        if (engine_submit(e, &specs[i], NULL, &err) != SUBMIT_OK)
            fail_msg("%s", err.msg);
    while (left > 0) {
        assert_true(events_next(q, &ev, -1));
        struct answer *a = (struct answer *)ev.user + ev.index;
        memcpy(a->text + a->n_text, ev.text, ev.n_text);
        a->n_text += ev.n_text;
        if (ev.kind == EVENT_TOKEN) {
            a->logprobs[a->n] = ev.logprob;
            a->tokens[a->n++] = ev.token;
        }
        if (ev.kind == EVENT_DONE) {
            left--;
            a->finish = ev.finish;
            a->stop = ev.stop;
            a->usage = ev.usage;
        }
    }
    events_free(q);
}

static struct grammar *grammar, *form;

/* Requests of every kind, whose prompts repeat themselves. */
static void crowd(struct request_spec *specs, int32_t prompts[][64], bool lora)
{
    static const char *const stops[] = {"q", "zz"};
    for (int i = 0; i < CROWD; i++) {
        uint32_t s = 77u * (uint32_t)i + 5;
        int n = 24 + 5 * i;
        for (int k = 0; k < n; k++)
            prompts[i][k] = k < 12 ? (int32_t)draw(&s, 90) : prompts[i][k - 12];
        specs[i] = (struct request_spec){
            .prompt = prompts[i], .n_prompt = n, .max_tokens = 60, .ignore_eos = true};
        specs[i].sample = sample_params_default();
        specs[i].sample.seed = (uint64_t)i;
        specs[i].sample.temp = i % 2 ? 1.0f : 0;
        specs[i].client = (uint64_t)i % 3;
        specs[i].n_loras = lora && i % 2;
        specs[i].loras[0] = (struct lora_pick){.adapter = 0, .scale = 1, .serial = 1};
    }
    specs[2].sample.repeat_penalty = 1.3f;
    specs[3].sample.frequency_penalty = 0.4f;
    specs[3].logprobs = specs[0].logprobs = true;
    specs[3].n_top = 3;
    specs[4].stop = specs[1].stop = stops;
    specs[4].n_stop = specs[1].n_stop = 2;
    specs[5].n = 2;
    specs[6].grammar = grammar;
    specs[8].grammar = form; /* mostly determined, but its logits are wanted */
    specs[6].ignore_eos = specs[8].ignore_eos = false;
    specs[8].logprobs = true;
    specs[7].min_tokens = 7;
    specs[7].ignore_eos = false;
}

static void assert_same(const struct answer *a, const struct answer *b)
{
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->tokens, b->tokens, (size_t)a->n * sizeof *a->tokens);
    assert_memory_equal(a->logprobs, b->logprobs, (size_t)a->n * sizeof *a->logprobs);
    assert_int_equal(a->n_text, b->n_text);
    assert_memory_equal(a->text, b->text, a->n_text);
    assert_int_equal(a->finish, b->finish);
    assert_int_equal(a->stop, b->stop);
    assert_int_equal(a->usage.n_generated, b->usage.n_generated);
}

static struct engine_stats close_engine(struct engine *e)
{
    struct engine_stats st;
    engine_stats(e, &st);
    assert_int_equal(st.pages_held, 0);
    kvcache_verify(engine_runtime(e)->kv);
    engine_close(e);
    return st;
}

static const struct setting settings[] = {
    {"qwen3", "tests/golden/qwen3-lora", DT_NONE, DT_NONE, 0},
    {"gemma3", NULL, DT_Q8_0, DT_Q8_0, 0},  /* sliding windows */
    {"gpt_oss", NULL, DT_NONE, DT_NONE, 0}, /* sinks, experts */
    {"deepseek_v3", NULL, DT_NONE, DT_NONE, 0},
    {"qwen3_5", NULL, DT_NONE, DT_NONE, 0}, /* delta net */
    {"lfm2", NULL, DT_NONE, DT_NONE, 0},    /* convolutions */
    {"nemotron_h", NULL, DT_NONE, DT_NONE, 0},
    {"llama4", NULL, DT_NONE, DT_NONE, 0},
    {"gemma3", NULL, DT_F8_E4M3, DT_Q4_0, 0},
    {"qwen3", NULL, DT_NONE, DT_NONE, 256},   /* few pages: sequences are preempted */
    {"qwen3_5", NULL, DT_NONE, DT_NONE, 256}, /* and states */
};

static void answers_are_the_same(void **state)
{
    (void)state;
    static struct answer want[ANSWERS], got[ANSWERS];
    struct request_spec specs[CROWD];
    int32_t prompts[CROWD][64];
    struct error err = {0};
    const char *regex = "([a-f]{3}[0-9]+ ){2,9}END";
    grammar = grammar_compile(
        &(struct grammar_source){.kind = GRAMMAR_REGEX, .text = regex, .len = strlen(regex)}, &err);
    CHECK(grammar, "%s", err.msg);
    regex = "(\\{\"name\": \"[a-e]{2,4}\", \"value\": [0-9]{1,2}\\} ){1,3}";
    form = grammar_compile(
        &(struct grammar_source){.kind = GRAMMAR_REGEX, .text = regex, .len = strlen(regex)}, &err);
    CHECK(form, "%s", err.msg);
    for (size_t m = 0; m < sizeof settings / sizeof *settings; m++) {
        crowd(specs, prompts, settings[m].lora != NULL);
        struct engine *e = open_engine(&settings[m], false);
        run(e, specs, want, CROWD);
        uint64_t steps = close_engine(e).n_steps;
        n_known = 0;
        for (int i = 0; i < CROWD; i++) {
            struct known *k = &known[n_known++];
            const struct answer *a = &want[i < 6 ? i : i + 1];
            k->n = specs[i].n_prompt + a->n;
            memcpy(k->tokens, specs[i].prompt, (size_t)specs[i].n_prompt * sizeof *k->tokens);
            memcpy(k->tokens + specs[i].n_prompt, a->tokens, (size_t)a->n * sizeof *k->tokens);
        }
        static const struct drafting ways[] = {{3, false, 0}, {16, false, 0}, {0, true, 9}};
        for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
            how = ways[w];
            e = open_engine(&settings[m], true);
            for (int again = 0; again < 2; again++) { /* the second time from recent answers */
                run(e, specs, got, CROWD);
                for (int i = 0; i < ANSWERS; i++)
                    assert_same(&want[i], &got[i]);
            }
            for (int i = 0, at = 0; i < CROWD; at += specs[i++].n == 2 ? 2 : 1) {
                run(e, &specs[i], got, 1);
                for (int k = 0; k < (specs[i].n ? specs[i].n : 1); k++)
                    assert_same(&want[at + k], &got[k]);
            }
            struct engine_stats st = close_engine(e);
            uint64_t drafted = st.n_drafted[DRAFT_TEXT], accepted = st.n_accepted[DRAFT_TEXT];
            uint64_t forced = st.n_accepted[DRAFT_GRAMMAR];
            print_message("%s, %s %d: %d of %d accepted, %d of %d forced, %d steps (%d without)\n",
                          settings[m].model, how.random ? "random" : "text", how.fixed,
                          (int)accepted, (int)drafted, (int)forced,
                          (int)st.n_drafted[DRAFT_GRAMMAR], (int)st.n_steps, (int)steps);
            assert_true(how.random || forced > 10);
            assert_int_equal(st.n_drafted[DRAFT_HEAD], 0);
            assert_true(accepted > 100 && drafted >= accepted);
            assert_true(!settings[m].kv_tokens || st.n_preempted > 0);
        }
    }
    grammar_free(grammar);
    grammar_free(form);
}

/* Asked the same again, a client gets its answer in a few steps, and usage says why. */
static void recent_answers_save_steps(void **state)
{
    (void)state;
    static struct answer want, got;
    int32_t prompt[40];
    uint32_t s = 5;
    how = (struct drafting){.fixed = 15};
    struct setting plain = {"qwen3", NULL, DT_NONE, DT_NONE, 0};
    struct engine *e = open_engine(&plain, true);
    for (int i = 0; i < 40; i++)
        prompt[i] = (int32_t)draw(&s, 90);
    struct request_spec spec = {
        .prompt = prompt, .n_prompt = 40, .max_tokens = 160, .ignore_eos = true, .client = 1};
    spec.sample = sample_params_default();
    run(e, &spec, &want, 1);
    struct engine_stats before, after;
    engine_stats(e, &before);
    run(e, &spec, &got, 1);
    engine_stats(e, &after);
    assert_same(&want, &got);
    int steps = (int)(after.n_steps - before.n_steps);
    print_message("%d tokens in %d steps\n", got.n, steps);
    assert_true(steps <= 1 + DRAFT_KEY + 160 / 16 + 4);
    assert_true(got.usage.drafts[DRAFT_TEXT].accepted >= 160 - steps);
    assert_true(got.usage.drafts[DRAFT_TEXT].drafted >= got.usage.drafts[DRAFT_TEXT].accepted);
    spec.client = 2; /* another client does not */
    run(e, &spec, &got, 1);
    assert_same(&want, &got);
    engine_stats(e, &before);
    assert_true((int)(before.n_steps - after.n_steps) > 2 * steps);
    close_engine(e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(finds_what_was_before),    cmocka_unit_test(long_prompts_in_pieces),
        cmocka_unit_test(clients_are_kept_apart),   cmocka_unit_test(history_is_bounded),
        cmocka_unit_test(depths_that_pay),          cmocka_unit_test(answers_are_the_same),
        cmocka_unit_test(recent_answers_save_steps)};
    CHECK(mkdtemp(dir), "a folder");
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    mtp_toy_remove(dir);
    return failed;
}
