/*
 * Drafts of a small model. Answers: byte for byte those without drafts, whatever it drafts at whatever depth, for draft
 * models and models with attention, windows, latents and recurrent states, when its cache is too small for all, with
 * other sources beside it. A draft model that is the model itself is always right, and saves steps. Its pages are
 * released and found again. Vocabularies: tokens are matched by their spelling, and strangers are refused.
 */
#include "draft_crowd.h"

#include <dirent.h>

static const unsigned model_only = 1u << DRAFT_MODEL;
/* Attention, states, latents. */
static const char *const models[] = {"qwen3", "qwen3_5", "deepseek_v3"};

/* The draft model's cache has room for MOST tokens, so a crowd's sequences are preempted there. */
static const struct setting settings[] = {
    {.model = "qwen3",
     .lora = "tests/golden/qwen3-lora",
     .small = "qwen3",
     .from = 1u << DRAFT_MODEL},
    {.model = "gemma3", .k_type = DT_Q8_0, .v_type = DT_Q8_0, .small = "gemma3", .from = ~0u},
    {.model = "deepseek_v3", .small = "qwen3_5", .from = 1u << DRAFT_MODEL},
    {.model = "qwen3_5", .small = "qwen3_5", .from = 1u << DRAFT_MODEL}, /* states in both */
    {.model = "gpt_oss", .small = "lfm2", .from = ~0u},
    {.model = "lfm2", .small = "lfm2", .from = ~0u},
    {.model = "qwen3",
     .kv_tokens = 256,
     .small = "qwen3",
     .from = 1u << DRAFT_MODEL}, /* preempted here */
    {.model = "qwen3_5", .kv_tokens = 256, .small = "qwen3_5", .from = ~0u},
};

static void answers_are_the_same(void **state)
{
    (void)state;
    static struct answer want[ANSWERS];
    struct request_spec specs[CROWD];
    int32_t prompts[CROWD][64];
    make_grammars();
    for (size_t m = 0; m < sizeof settings / sizeof *settings; m++) {
        const struct setting *s = &settings[m];
        if (is_left_out(s))
            continue;
        crowd(specs, prompts, s->lora != NULL);
        uint64_t steps = answer_plainly(s, specs, want);
        static const struct drafting ways[] = {{.fixed = 3},
                                               {.fixed = 8},
                                               {.fixed = 6, .cut = true, .state = 3},
                                               {.fixed = DRAFT_AUTO}};
        for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
            how = ways[w];
            if (device && !how.cut)
                continue;
            struct engine_stats st = answer_with_drafts(s, specs, want);
            int drafted = (int)st.n_drafted[DRAFT_MODEL], right = (int)st.n_accepted[DRAFT_MODEL];
            print_message("%s by %s, %d%s: %d of %d accepted, %d steps (%d without)\n", s->model,
                          s->small, how.fixed, how.cut ? " cut" : "", right, drafted,
                          (int)st.n_steps, (int)steps);
            bool always = how.fixed != DRAFT_AUTO && s->from == model_only;
            assert_true(!always || drafted > 100);
            assert_true(!always || right > 50 || strcmp(s->model, s->small) != 0);
            assert_true(how.fixed == DRAFT_AUTO || drafted > 0);
            assert_true(s->from != model_only || !st.n_drafted[DRAFT_TEXT]);
            assert_true(!s->kv_tokens || st.n_preempted > 0);
        }
    }
    grammar_free(grammar);
    grammar_free(form);
}

static bool generates(const char *family)
{
    char path[512];
    static const char *const others[] = {"-lora", "bert", "embedding", "roberta"};
    snprintf(path, sizeof path, "tests/golden/%s/model.safetensors", family);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strstr(family, others[i]))
            return false;
    return family[0] != '.' && access(path, R_OK) == 0;
}

/* Every family, with all sources: random numbers of their drafts, some of them wrong. */
static void every_family(void **state)
{
    (void)state;
    static struct answer want[ANSWERS];
    struct request_spec specs[CROWD];
    int32_t prompts[CROWD][64];
    struct dirent **names;
    int n_families = 0, n = scandir("tests/golden", &names, NULL, alphasort);
    make_grammars();
    for (int i = 0; i < n; i++) {
        const struct setting s = {
            .model = names[i]->d_name, .small = names[i]->d_name, .from = ~0u};
        if (!generates(s.model) || is_left_out(&s))
            continue;
        crowd(specs, prompts, false);
        answer_plainly(&s, specs, want);
        how = (struct drafting){.fixed = 6, .cut = true, .state = (uint32_t)i};
        struct engine_stats st = answer_with_drafts(&s, specs, want);
        print_message("%s: %d of %d of the model accepted, %d of %d of text\n", s.model,
                      (int)st.n_accepted[DRAFT_MODEL], (int)st.n_drafted[DRAFT_MODEL],
                      (int)st.n_accepted[DRAFT_TEXT], (int)st.n_drafted[DRAFT_TEXT]);
        assert_true(st.n_drafted[DRAFT_MODEL] + st.n_drafted[DRAFT_TEXT] > 100);
        n_families++;
    }
    for (int i = 0; i < n; i++)
        free(names[i]);
    free(names);
    assert_true(n_families > 50);
    grammar_free(grammar);
    grammar_free(form);
}

/* All drafts of the model itself are accepted. A second turn finds the first one's pages in its cache. */
static void itself_is_always_right(void **state)
{
    (void)state;
    static struct answer got;
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        struct setting s = {.model = models[m], .small = models[m], .from = model_only};
        int32_t prompt[MOST];
        uint32_t seed = 5;
        int n = 60;
        how = (struct drafting){.fixed = 7};
        struct engine *e = open_engine(&s, true);
        for (int i = 0; i < n; i++)
            prompt[i] = (int32_t)draw(&seed, 90);
        for (int turn = 0; turn < 2; turn++) {
            struct request_spec spec = {
                .prompt = prompt, .n_prompt = n, .max_tokens = 80, .ignore_eos = true};
            struct engine_stats before, after;
            spec.sample = sample_params_default();
            spec.sample.temp = 0;
            spec.sample.repeat_penalty = 1;
            engine_stats(e, &before);
            run(e, &spec, &got, 1);
            engine_stats(e, &after);
            const struct draft_count *c = &got.usage.drafts[DRAFT_MODEL];
            int steps = (int)(after.n_steps - before.n_steps);
            print_message("%s: %d of %d accepted, %d tokens in %d steps\n", s.model, c->accepted,
                          c->drafted, got.n, steps);
            assert_true(c->accepted >= c->drafted * 9 / 10); /* it may round otherwise */
            assert_true(steps <= 30);
            memcpy(prompt + n, got.tokens, (size_t)got.n * sizeof *prompt);
            n += got.n;
        }
        assert_true(prefix_n_idle(engine_runtime(e)->small->kv->prefix) > 0);
        close_engine(e);
    }
}

/* The first draft after each number of tokens; -1 = none. */
static int32_t first_drafts[MOST];

static int record(void *arg, const int32_t *tokens, int n_tokens, int32_t *drafts, int n, int most)
{
    (void)arg;
    (void)tokens;
    (void)most;
    first_drafts[n_tokens] = n ? drafts[0] : -1;
    return n;
}

/* Whatever was rejected, the model drafts for itself what is most likely: its keys, values and states are those of the
 * tokens that were chosen. */
static void drafts_after_rejections(void **state)
{
    (void)state;
    for (size_t m = 0; m < sizeof models / sizeof *models; m++) {
        struct setting s = {.model = models[m], .small = models[m], .from = model_only};
        int32_t prompt[40];
        uint32_t seed = 8;
        int at = 40, n_drafts = 0, n_right = 0;
        struct engine_event ev = {0};
        struct error err = {0};
        struct events *q = events_new();
        how = (struct drafting){.fixed = 5};
        struct engine *e = open_engine(&s, true);
        engine_on_draft(e, true, record, NULL);
        for (int i = 0; i < MOST; i++)
            first_drafts[i] = -1;
        for (int i = 0; i < 40; i++)
            prompt[i] = (int32_t)draw(&seed, 90);
        struct request_spec spec = {.prompt = prompt,
                                    .n_prompt = 40,
                                    .max_tokens = 150,
                                    .ignore_eos = true,
                                    .logprobs = true,
                                    .n_top = 1,
                                    .queue = q};
        spec.sample = sample_params_default();
        spec.sample.temp = 0.6f;
        assert_int_equal(engine_submit(e, &spec, NULL, &err), SUBMIT_OK);
        while (ev.kind != EVENT_DONE) {
            assert_true(events_next(q, &ev, -1));
            if (ev.kind != EVENT_TOKEN)
                continue;
            n_drafts += first_drafts[at] >= 0;
            n_right += first_drafts[at] >= 0 && first_drafts[at] == ev.top[0].token;
            at++;
        }
        const struct draft_count *c = &ev.usage.drafts[DRAFT_MODEL];
        print_message("%s: %d of %d drafts are the likeliest, %d of %d accepted\n", s.model,
                      n_right, n_drafts, c->accepted, c->drafted);
        assert_true(n_drafts > 30 && c->accepted < c->drafted * 3 / 4 && c->accepted > 10);
        assert_true(n_right >= n_drafts * 9 / 10); /* it may round otherwise */
        events_free(q);
        close_engine(e);
    }
}

/* Requests that are cancelled while they are drafted for leave nothing behind. */
static void cancelled(void **state)
{
    (void)state;
    enum { N = 6 };
    static struct answer got[N];
    struct setting s = {.model = "qwen3_5", .small = "qwen3", .from = model_only};
    int32_t prompt[40];
    uint32_t seed = 6;
    how = (struct drafting){.fixed = 5};
    struct engine *e = open_engine(&s, true);
    struct request *r[N];
    struct events *q = events_new();
    struct error err = {0};
    int seen[N] = {0}, left = N, ended = 0;
    for (int i = 0; i < 40; i++)
        prompt[i] = (int32_t)draw(&seed, 90);
    for (int i = 0; i < N; i++) {
        struct request_spec spec = {.prompt = prompt,
                                    .n_prompt = 40 - i,
                                    .max_tokens = 150,
                                    .ignore_eos = true,
                                    .queue = q,
                                    .user = &seen[i]};
        spec.sample = sample_params_default();
        assert_int_equal(engine_submit(e, &spec, &r[i], &err), SUBMIT_OK);
    }
    while (left > 0) {
        struct engine_event ev;
        assert_true(events_next(q, &ev, -1));
        int i = (int)((int *)ev.user - seen);
        if (ev.kind == EVENT_TOKEN && ++seen[i] == 10 * (i + 1) && i % 2)
            request_cancel(r[i]);
        left -= ev.kind == EVENT_DONE;
        ended += ev.kind == EVENT_DONE && ev.finish == FINISH_CANCEL;
    }
    assert_int_equal(ended, N / 2);
    for (int i = 0; i < N; i++)
        request_free(r[i]);
    events_free(q);
    struct request_spec spec = {
        .prompt = prompt, .n_prompt = 40, .max_tokens = 30, .ignore_eos = true};
    spec.sample = sample_params_default();
    run(e, &spec, got, 1);
    assert_int_equal(got[0].n, 30);
    close_engine(e);
}

static struct tokenizer *tokenizer_of(const char *letters)
{
    char json[2048];
    struct error err = {0};
    size_t at = (size_t)snprintf(json, sizeof json,
                                 "{\"model\":{\"type\":\"BPE\",\"merges\":[],\"vocab\":{");
    for (size_t i = 0; letters[i]; i++)
        at += (size_t)snprintf(json + at, sizeof json - at, "%s\"%c\":%zu", i ? "," : "",
                               letters[i], i);
    at += (size_t)snprintf(
        json + at, sizeof json - at,
        "}},\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":"
        "true},\"decoder\":{\"type\":\"ByteLevel\"},\"added_tokens\":[]}");
    struct tokenizer *t = tokenizer_load_json(json, at, "a tokenizer", NULL, &err);
    CHECK(t, "%s", err.msg);
    return t;
}

static void vocabularies_are_matched(void **state)
{
    (void)state;
    static const struct {
        const char *target, *draft;
        int n_target, n_draft; /* rows of their embeddings */
        bool matches, equal;
    } cases[] = {
        {"abcdefghijklmnopqrst", "abcdefghijklmnopqrst", 24, 32, true, true},
        {"abcdefghijklmnopqrst", "tsrqponmlkjihgfedcba", 20, 20, true, false},
        {"abcdefghijklmnopqrst", "abcdefghijklmnopqrsuvw", 20, 22, true, false}, /* 19 of 20 */
        {"abcdefghijklmnopqrst", "abcdefghijklmnopq", 20, 17, false, false},
        {"abcdefghijklmnopqrst", "ABCDEFGHIJKLMNOPQRST", 20, 20, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct draft_vocab v;
        struct error err = {0};
        struct draft_words target = {"large", tokenizer_of(cases[i].target), cases[i].n_target},
                           small = {"small", tokenizer_of(cases[i].draft), cases[i].n_draft};
        assert_int_equal(draft_vocab_init(&v, &target, &small, &err), cases[i].matches);
        assert_int_equal(v.to_draft == NULL && v.to_target == NULL,
                         cases[i].equal || !cases[i].matches);
        for (int t = 0; cases[i].matches && t < tokenizer_n_vocab(target.tokenizer); t++) {
            const char *at = strchr(cases[i].draft, cases[i].target[t]);
            int32_t d = draft_vocab_to_draft(&v, t);
            assert_int_equal(d, at ? at - cases[i].draft : 0);
            if (at)
                assert_int_equal(draft_vocab_to_target(&v, d), t);
        }
        for (int d = 0; cases[i].matches && d <= cases[i].n_draft; d++) {
            bool shared =
                d < (int)strlen(cases[i].draft) && strchr(cases[i].target, cases[i].draft[d]);
            if (!shared)
                assert_int_equal(draft_vocab_to_target(&v, d), -1);
        }
        if (!cases[i].matches)
            assert_non_null(strstr(err.msg, "small: it has "));
        tokenizer_free((struct tokenizer *)(uintptr_t)target.tokenizer);
        draft_vocab_clear(&v);
        target.tokenizer = NULL;
        assert_false(draft_vocab_init(&v, &target, &small, &err)); /* one has none */
        tokenizer_free((struct tokenizer *)(uintptr_t)small.tokenizer);
        small.tokenizer = NULL;
        assert_int_equal(draft_vocab_init(&v, &target, &small, &err), target.n == small.n);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(vocabularies_are_matched),
                                       cmocka_unit_test(itself_is_always_right),
                                       cmocka_unit_test(drafts_after_rejections),
                                       cmocka_unit_test(answers_are_the_same),
                                       cmocka_unit_test(every_family),
                                       cmocka_unit_test(cancelled)};
    const struct CMUnitTest on_device[] = {cmocka_unit_test(answers_are_the_same)};
    if (device_is_missing())
        return 0;
    CHECK(mkdtemp(dir), "a folder");
    int failed = device ? cmocka_run_group_tests(on_device, NULL, NULL)
                        : cmocka_run_group_tests(tests, NULL, NULL);
    mtp_toy_remove(dir);
    return failed;
}
