/*
 * Drafts from text. The index: what it finds is what a plain search finds, within its bounds; clients are kept apart; its
 * memory is bounded. The costs: depths that pay. Answers: byte for byte those without drafts, whatever is drafted at
 * whatever depth, for attention, sliding windows, convolutions, recurrent states and experts, for quantised caches, under
 * penalties, stop strings, constraints, adapters, n > 1, preemption, and from the cache. Recent answers save steps.
 */
#include "draft_crowd.h"

static const double free_of_cost[DRAFT_MAKERS]; /* drafts from text */

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
        int exact = 0, found = 0, drafted = 0, bridged = 0, wrong = 0;
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
            if (m.bridge) { /* the old text goes on in its place */
                bridged++;
                wrong += m.at != n - 500;
                assert_true(!m.len && k == DRAFT_DEPTH && drafts[0] == text[m.at]);
                assert_true(!m.near || text[m.at - 1] == text[n - 1]);
            }
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
        print_message("kind %d: %d matches of %d tokens, %d of them the longest; %d bridges, %d "
                      "elsewhere\n",
                      kind, found, N, exact, bridged, wrong);
        assert_true(kind != 3 || (bridged > 50 && wrong < bridged / 10));
        assert_true(kind || !bridged);
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
        int n = draft_cost_choose(&c, 1, o, 1, free_of_cost, false, NULL);
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
    draft_cost_choose(&c, 2, o, 2, free_of_cost, false, NULL);
    assert_true(o[1].depth == 5 && o[0].depth > 0 && o[0].depth < 5);
    /* a cost that was high once is measured again later */
    double before = draft_cost_ratio(&c, 2, 3);
    for (int k = 0; k < 20000; k++)
        draft_cost_learn(&c, 2, 0, false, 1000);
    assert_true(draft_cost_ratio(&c, 2, 3) < 1 + 0.3 * (before - 1));
}

/* The time of a step of n sequences with x draft rows: a fixed part, a part for each row, and one for drafts at all. */
struct machine {
    const char *name;
    double fixed, row, drafts;
};

static double time_of(const struct machine *m, int n, int x)
{
    return (m->fixed + m->row * (n + x) + (x ? m->drafts : 0)) / (m->fixed + m->row * n);
}

/* Tokens per time of n sequences, each with drafts of probability p in every step, in those without drafts. */
static double gain_of(const struct machine *m, int n, double p, double made, double prior)
{
    enum { STEPS = 2000 };
    static struct draft_cost c;
    static struct draft_rate own[DRAFT_CROWD][DRAFT_CLASSES];
    struct draft_offer o[DRAFT_CROWD];
    const double makes[DRAFT_MAKERS] = {[1] = made};
    double tokens = 0, time = 0;
    uint32_t s = 3;
    c = (struct draft_cost){0};
    memset(own, 0, sizeof own);
    for (int step = 0; step < STEPS; step++) {
        int x = 0, deepest = 0;
        for (int i = 0; i < n; i++) {
            double q = draft_rate_of(&c, own[i], 0, prior);
            o[i] = (struct draft_offer){.most = 8, .p = {q, q}, .maker = made > 0};
        }
        if (draft_cost_known(&c, n))
            draft_cost_choose(&c, n, o, n, makes, false, NULL);
        for (int i = 0; i < n; i++) {
            o[i].depth += !o[i].depth && draft_cost_known(&c, n) && draft_rate_try(&c, 0, n, made);
            x += o[i].depth;
            deepest = o[i].depth > deepest ? o[i].depth : deepest;
        }
        double ratio = time_of(m, n, x) * (0.9 + 0.2 * draw(&s, 1000) / 1000);
        draft_cost_learn(&c, n, x, false, (int64_t)(1e6 * ratio));
        time += ratio + deepest * made;
        for (int i = 0; i < n; i++) {
            int right = 0;
            while (right < o[i].depth && draw(&s, 1000) < 1000 * p)
                right++;
            tokens += 1 + right;
            draft_rate_rest(own[i]);
            if (o[i].depth)
                draft_rate_learn(&c, own[i], 0, right, right < o[i].depth);
        }
    }
    return tokens / time / n;
}

/* Whatever rows cost and however often drafts are accepted, with any number of sequences: drafts lose 3 % at most, and gain
 * where there is much to gain. Times vary by 10 %. */
static void never_much_slower(void **state)
{
    (void)state;
    static const struct machine machines[] = {{"weights read once", 1, 0.05, 0},
                                              {"experts", 0.3, 0.7, 0},
                                              {"arithmetic", 0, 1, 0},
                                              {"drafts cost more", 1, 0.03, 0.9},
                                              {"and rows, too", 0.5, 0.5, 1}};
    static const double accepted[] = {0, 0.1, 0.3, 0.5, 0.7, 0.95}, priors[] = {0.35, 0.65, 0.85};
    double least = 9, most = 0;
    for (size_t m = 0; m < sizeof machines / sizeof *machines; m++)
        for (size_t p = 0; p < sizeof accepted / sizeof *accepted; p++)
            for (size_t k = 0; k < sizeof priors / sizeof *priors; k++)
                for (int n = 1; n <= DRAFT_CROWD; n *= 2)
                    for (int made = 0; made < 2; made++) {
                        double gain = gain_of(&machines[m], n, accepted[p], made * 0.15, priors[k]);
                        least = gain < least ? gain : least;
                        most = gain > most ? gain : most;
                        bool pays = m == 0 && n == 1 && accepted[p] > 0.9;
                        if (gain < 0.97 || (pays && gain < 2.5))
                            fail_msg("%s, %d sequences, %.2f accepted of %.2f: %.3f",
                                     machines[m].name, n, accepted[p], priors[k], gain);
                    }
    print_message("gains from %.3f to %.3f\n", least, most);
}

static const struct setting settings[] = {
    {.model = "qwen3", .lora = "tests/golden/qwen3-lora"},
    {.model = "gemma3", .k_type = DT_Q8_0, .v_type = DT_Q8_0}, /* sliding windows */
    {.model = "gpt_oss"},                                      /* sinks, experts */
    {.model = "deepseek_v3"},
    {.model = "qwen3_5"}, /* delta net */
    {.model = "lfm2"},    /* convolutions */
    {.model = "nemotron_h"},
    {.model = "llama4"},
    {.model = "gemma3", .k_type = DT_F8_E4M3, .v_type = DT_Q4_0},
    {.model = "qwen3", .kv_tokens = 256},   /* few pages: sequences are preempted */
    {.model = "qwen3_5", .kv_tokens = 256}, /* and states */
};

static void answers_are_the_same(void **state)
{
    (void)state;
    static struct answer want[ANSWERS];
    struct request_spec specs[CROWD];
    int32_t prompts[CROWD][64];
    make_grammars();
    for (size_t m = 0; m < sizeof settings / sizeof *settings; m++) {
        if (is_left_out(&settings[m]))
            continue;
        crowd(specs, prompts, settings[m].lora != NULL);
        uint64_t steps = answer_plainly(&settings[m], specs, want);
        static const struct drafting ways[] = {
            {.fixed = 3}, {.fixed = 16}, {.random = true, .state = 9}};
        for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
            how = ways[w];
            if (device && !how.random)
                continue;
            struct engine_stats st = answer_with_drafts(&settings[m], specs, want);
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
    struct setting plain = {.model = "qwen3"};
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
        cmocka_unit_test(finds_what_was_before),  cmocka_unit_test(long_prompts_in_pieces),
        cmocka_unit_test(clients_are_kept_apart), cmocka_unit_test(history_is_bounded),
        cmocka_unit_test(depths_that_pay),        cmocka_unit_test(never_much_slower),
        cmocka_unit_test(answers_are_the_same),   cmocka_unit_test(recent_answers_save_steps)};
    if (device_is_missing())
        return 0;
    const struct CMUnitTest on_device[] = {cmocka_unit_test(answers_are_the_same)};
    CHECK(mkdtemp(dir), "a folder");
    int failed = device ? cmocka_run_group_tests(on_device, NULL, NULL)
                        : cmocka_run_group_tests(tests, NULL, NULL);
    mtp_toy_remove(dir);
    return failed;
}
