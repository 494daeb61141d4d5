/*
 * Speculation: answers are the same with drafts and without, token by token, log-probabilities included, however
 * right or wrong the drafts are, for attention, latents and recurrent states; under stop strings, constraints,
 * penalties, max_tokens, preemption and from the cache. Drafts that are right save steps, and nothing is left held.
 *
 * STEEL_TEST_DEVICE=cuda: the same on a GPU, which rounds a row otherwise beside others. So answers part there, and what
 * is compared is one path: the tokens that came with drafts are read as a prompt by an engine that drafts nothing,
 * whose log-probabilities must be those the answer was told. Where answers part, the same random number must have met
 * two tokens that are about as likely. With cpu a CPU is judged like that, too.
 */
#include <math.h>
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
#include "backend/devices.h"
#include "engine/engine.h"
#include "mtp_toy.h"
#include "text/grammar/grammar.h"

static const double free_of_cost[DRAFT_MAKERS]; /* drafts from text */

enum { ANSWER = 60, MAX_ANSWERS = 16, MOST = 400 };

/*
 * Bounds of a device, of log-probabilities. Its products of one row, of few and of many round otherwise. Of 600 random
 * tokens through qwen3_5 (steel logits --chunk 4 against 16) that moves any token's by 0.002 on average, a chosen one's
 * by 0.010 at worst. A mixture of experts is not continuous: where the last expert that is chosen and the first that is
 * not are about equal, rounding swaps them. Of deepseek_v3's chosen tokens 1 of 27 moves by more than FAR so, up to 0.6,
 * with 0.012 on average; on a CPU, halves for floats in the cache do it to 1 of 157, up to 1.5. A state that does not go
 * back after wrong drafts moves every second token by more than FAR, and all by 1.0 on average.
 */
#define FAR         0.05f
#define MEAN        0.01
#define MEAN_ROUTED 0.1 /* of a mixture of experts; there 1 of FAR_ONE_OF may be far, else none */
/* Draws go through candidates sorted by logit: once logits move, a number meets another token, mostly a neighbour (with
 * 0.002 on average 1 of 16 does). 91 to 95 of 100 such pairs are no further apart than this; of two draws 18 would be. */
#define APART 0.25f
enum { FAR_ONE_OF = 5, APART_ONE_OF = 3 };

static char dir[] = "/tmp/steel-speculate-XXXXXX";
/* The one without a block drafts from text. */
static const char *const models[] = {"qwen3_5", "deepseek_v3", "plain-qwen3", "glm4_moe",
                                     "qwen3_next"};
enum { MODELS = sizeof models / sizeof *models };
static int n_models =
    MODELS;       /* on a device 3: states, latents, no block; opening one takes its time */
static int depth; /* of the engine opened last */

struct answer {
    int32_t tokens[MOST];
    float logprobs[MOST], prompt_logprobs[MOST];
    int n, n_told, n_done; /* n_told: of the prompt */
    char text[4096];
    size_t n_text;
    enum finish finish;
    int stop;
    struct usage_count usage;
};

/* What was answered to whom without drafts: prompt and answer. */
static struct known {
    int32_t tokens[MOST];
    int n;
} known[MAX_ANSWERS];
static int n_known;
static int n_offered;      /* known drafts that all before them let count */
static const char *device; /* STEEL_TEST_DEVICE, or NULL */
static int judge_from;     /* tokens of an answer that were judged with another one */

/* On a device: what reads the answers again, and what it found. */
static struct engine *judge;
static const char *judge_model;
static struct verdict {
    int n, n_far; /* tokens, and those whose log-probabilities differ by more than FAR */
    double sum;   /* of differences */
    double worst;
} verdict;
static struct partings {
    int n_compared, n_left; /* answers, and those that left the path */
    int n_judged, n_apart; /* of those chosen by the logits told of: all, and those too far apart */
} partings;

enum drafting { OWN, RIGHT, WRONG, MIXED };

/* Of all sources. */
static uint64_t sum(const uint64_t *by_source)
{
    uint64_t all = 0;
    for (int i = 0; i < N_DRAFT_SOURCES; i++)
        all += by_source[i];
    return all;
}

static bool is_cpu(void)
{
    return !device || strcmp(device, "cpu") == 0;
}

static bool text_only; /* the engine opened last has no block */

/* The true tokens, where somebody known began like this; wrong ones in their place as `arg` says. */
static int write_drafts(void *arg, const int32_t *tokens, int n_tokens, int32_t *drafts, int n,
                        int most)
{
    enum drafting how = *(enum drafting *)arg;
    int n_right = 0;
    if (text_only)
        n = depth < most ? depth : most;
    for (int k = 0; k < n; k++)
        drafts[k] = 0;
    for (int i = 0; i < n_known; i++) {
        const struct known *a = &known[i];
        if (a->n < n_tokens || memcmp(a->tokens, tokens, (size_t)n_tokens * sizeof *tokens) != 0)
            continue;
        for (int k = 0; k < n && n_tokens + k < a->n; k++)
            drafts[n_right++] = a->tokens[n_tokens + k];
        break;
    }
    for (int k = 0; k < n; k++) {
        bool wrong = how == WRONG || (how == MIXED && (n_tokens + k) % 3 == 0);
        drafts[k] = wrong ? (drafts[k] + 1) % 90 : drafts[k];
        n_right = wrong && k < n_right ? k : n_right;
    }
    n_offered += n_right;
    return n;
}

static struct engine *open_plainly(const char *model, int draft, int kv_tokens)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", dir, model);
    struct engine_options opt = {.runtime = {.context = 256,
                                             .kv_tokens = kv_tokens,
                                             .max_seqs = 8,
                                             .max_tokens = 128,
                                             .draft = draft}};
    depth = draft;
    text_only = strncmp(model, "plain-", 6) == 0;
    opt.runtime.draft_from = text_only ? 1u << DRAFT_TEXT : 0;
    opt.runtime.backend.threads = 2;
    opt.runtime.backend.deterministic = !device;
    opt.runtime.backend.device = device;
    opt.runtime.gpu_memory = device ? 0.4f : 0; /* two engines */
    struct engine *e = engine_open(path, &opt);
    struct error err = {0};
    if (!engine_wait(e, &err))
        fail_msg("%s", err.msg);
    return e;
}

static struct engine *open_engine(const char *model, int draft, int kv_tokens, enum drafting *how)
{
    if (device && judge_model != model) {
        if (judge)
            engine_close(judge);
        judge = open_plainly(model, 0, 0);
        judge_model = model;
    }
    struct engine *e = open_plainly(model, draft, kv_tokens);
    if (*how != OWN)
        engine_on_draft(e, true, write_drafts, how);
    return e;
}

static struct request_spec spec_of(const int32_t *prompt, int n, int max_tokens, uint64_t seed)
{
    struct request_spec s = {.prompt = prompt, .n_prompt = n, .max_tokens = max_tokens};
    s.sample = sample_params_default();
    s.sample.seed = seed;
    s.ignore_eos = true;
    s.logprobs = device != NULL;
    return s;
}

static void prompt_of(int which, int32_t *out, int n)
{
    uint32_t s = 77u * (uint32_t)which + 5;
    for (int i = 0; i < n; i++) {
        s = s * 1664525u + 1013904223u;
        out[i] = (int32_t)((s >> 8) % 90);
    }
}

static bool take(const struct engine_event *ev)
{
    struct answer *a = (struct answer *)ev->user + ev->index;
    assert_int_equal(a->n_done, 0);
    memcpy(a->text + a->n_text, ev->text, ev->n_text);
    a->n_text += ev->n_text;
    if (ev->kind == EVENT_TOKEN) {
        a->logprobs[a->n] = ev->logprob;
        a->tokens[a->n++] = ev->token;
    }
    if (ev->kind == EVENT_PROMPT)
        a->prompt_logprobs[a->n_told++] = ev->logprob;
    if (ev->kind == EVENT_DONE) {
        a->n_done++;
        a->finish = ev->finish;
        a->stop = ev->stop;
        a->usage = ev->usage;
    }
    return ev->kind == EVENT_DONE;
}

/* Runs them all at once. */
static void run(struct engine *e, struct request_spec *specs, struct answer *answers, int n)
{
    struct events *q = events_new();
    struct engine_event ev;
    struct error err = {0};
    int at[MAX_ANSWERS], left = 0;
    for (int i = 0; i < n; i++) {
        at[i] = left;
        left += specs[i].n ? specs[i].n : 1;
    }
    memset(answers, 0, sizeof *answers * (size_t)left);
    for (int i = 0; i < n; i++) {
        specs[i].queue = q;
        specs[i].user = answers + at[i];
        if (engine_submit(e, &specs[i], NULL, &err) != SUBMIT_OK)
            fail_msg("%s", err.msg);
    }
    while (left > 0) {
        assert_true(events_next(q, &ev, -1));
        left -= take(&ev);
    }
    events_free(q);
}

/* The answer's tokens once more, as a prompt's. */
static void read_again(const struct request_spec *s, const struct answer *a)
{
    static struct answer again;
    int32_t tokens[MOST];
    int n = s->n_prompt + a->n;
    assert_true(n <= MOST);
    memcpy(tokens, s->prompt, (size_t)s->n_prompt * sizeof *tokens);
    memcpy(tokens + s->n_prompt, a->tokens, (size_t)a->n * sizeof *tokens);
    struct request_spec whole = spec_of(tokens, n, 1, 0);
    whole.prompt_logprobs = true;
    run(judge, &whole, &again, 1);
    assert_int_equal(again.n_told, n);
    for (int i = judge_from; i < a->n; i++) {
        double d = fabs((double)a->logprobs[i] - (double)again.prompt_logprobs[s->n_prompt + i]);
        assert_true(isfinite(d));
        verdict.n++;
        verdict.n_far += d > FAR;
        verdict.sum += d;
        verdict.worst = d > verdict.worst ? d : verdict.worst;
    }
}

/* Its feed-forwards are mixtures of experts. */
static bool routes(const char *model)
{
    return strcmp(model, "qwen3_5") != 0 && strcmp(model, "plain-qwen3") != 0;
}

/* What was read again since the last time: few tokens are far, and all together hardly. */
static void assert_judged(const char *what)
{
    struct verdict v = verdict;
    verdict = (struct verdict){0};
    if (!device)
        return;
    print_message("%s: of %d tokens %d far, %.4f on average, %.4f at worst\n", what, v.n, v.n_far,
                  v.sum / v.n, v.worst);
    assert_true(v.n > 0);
    assert_true(v.n_far <= (routes(judge_model) ? v.n / FAR_ONE_OF + 1 : 0));
    assert_true(v.sum / v.n < (routes(judge_model) ? MEAN_ROUTED : MEAN));
}

/* Tokens are chosen by the logits that are told of. */
static bool chosen_plainly(const struct request_spec *s)
{
    return s->sample.repeat_penalty == 1 && s->sample.frequency_penalty == 0 && !s->grammar &&
           !s->min_tokens;
}

static void assert_near(const struct request_spec *s, const struct answer *a,
                        const struct answer *b)
{
    int n = a->n < b->n ? a->n : b->n, at = 0;
    while (at < n && a->tokens[at] == b->tokens[at])
        at++;
    read_again(s, b);
    partings.n_compared++;
    if (at == a->n && at == b->n) {
        assert_int_equal(a->n_text, b->n_text);
        assert_memory_equal(a->text, b->text, a->n_text);
        assert_int_equal(a->finish, b->finish);
        return;
    }
    partings.n_left++;
    assert_true(at < n ||
                !s->ignore_eos); /* only an end token, which is not told, ends one earlier */
    if (at < n && chosen_plainly(s)) {
        float apart = s->sample.temp > 0 ? APART : 2 * FAR;
        partings.n_judged++;
        partings.n_apart += fabsf(a->logprobs[at] - b->logprobs[at]) > apart;
    }
}

static void assert_same(const struct request_spec *s, const struct answer *a,
                        const struct answer *b)
{
    if (device) {
        assert_near(s, a, b);
        return;
    }
    assert_int_equal(a->n, b->n);
    assert_memory_equal(a->tokens, b->tokens, (size_t)a->n * sizeof *a->tokens);
    assert_memory_equal(a->logprobs, b->logprobs, (size_t)a->n * sizeof *a->logprobs);
    assert_int_equal(a->n_text, b->n_text);
    assert_memory_equal(a->text, b->text, a->n_text);
    assert_int_equal(a->finish, b->finish);
    assert_int_equal(a->stop, b->stop);
    assert_int_equal(a->usage.n_generated, b->usage.n_generated);
}

static void remember(const struct request_spec *s, const struct answer *a)
{
    struct known *k = &known[n_known++];
    assert_true(n_known <= MAX_ANSWERS && s->n_prompt + a->n <= MOST);
    memcpy(k->tokens, s->prompt, (size_t)s->n_prompt * sizeof *k->tokens);
    memcpy(k->tokens + s->n_prompt, a->tokens, (size_t)a->n * sizeof *k->tokens);
    k->n = s->n_prompt + a->n;
}

/* Closes an engine that runs nothing: all pages must be back. */
static struct engine_stats close_engine(struct engine *e)
{
    struct engine_stats st;
    engine_stats(e, &st);
    assert_int_equal(st.pages_held, 0);
    kvcache_verify(engine_runtime(e)->kv);
    engine_close(e);
    return st;
}

enum { CROWD = 8 };

static struct grammar *grammar;

/* Requests of every kind. */
static void crowd(struct request_spec *specs, int32_t prompts[][64])
{
    static const char *const stops[] = {"q", "zz"};
    for (int i = 0; i < CROWD; i++) {
        int n = 20 + 5 * i;
        prompt_of(i, prompts[i], n);
        specs[i] = spec_of(prompts[i], n, ANSWER, (uint64_t)i);
        specs[i].sample.temp = i % 2 ? 1.0f : 0;
    }
    specs[2].sample.repeat_penalty = 1.3f;
    specs[3].sample.frequency_penalty = 0.4f;
    specs[3].logprobs = true;
    specs[3].n_top = 3;
    specs[4].stop = specs[1].stop = stops;
    specs[4].n_stop = specs[1].n_stop = 2;
    specs[5].n = 2;
    specs[6].grammar = grammar;
    specs[6].ignore_eos = false;
    specs[7].min_tokens = 7;
    specs[7].ignore_eos = false;
}

/* The crowd at once, or one after the other, whatever is drafted: always the same. */
static void answers_are_the_same(void **state)
{
    (void)state;
    enum { N = CROWD + 1 };
    static struct answer want[N], got[N];
    struct request_spec specs[CROWD];
    int32_t prompts[CROWD][64];
    struct error err = {0};
    const char *regex = "([a-f]{3}[0-9]+ ){2,9}END";
    grammar = grammar_compile(
        &(struct grammar_source){.kind = GRAMMAR_REGEX, .text = regex, .len = strlen(regex)}, &err);
    CHECK(grammar, "%s", err.msg);
    for (int m = 0; m < n_models; m++) {
        enum drafting own = OWN;
        crowd(specs, prompts);
        struct engine *e = open_engine(models[m], 0, 0, &own);
        run(e, specs, want, CROWD);
        struct engine_stats plain = close_engine(e);
        assert_int_equal(sum(plain.n_drafted), 0);
        n_known = 0;
        for (int i = 0; i < CROWD; i++)
            remember(&specs[i], &want[i < 6 ? i : i + 1]);
        for (int draft = 1; draft <= 3; draft += 2)
            for (enum drafting how = OWN; how <= MIXED; how++) {
                n_offered = 0;
                e = open_engine(models[m], draft, 0, &how);
                for (int i = 0, at = 0; i < CROWD; at += specs[i++].n == 2 ? 2 : 1) {
                    run(e, &specs[i], got, 1);
                    for (int k = 0; k < (specs[i].n ? specs[i].n : 1); k++)
                        assert_same(&specs[i], &want[at + k], &got[k]);
                }
                run(e, specs, got, CROWD);
                for (int i = 0; i < N; i++)
                    assert_same(&specs[i < 6 ? i : i - 1], &want[i], &got[i]);
                struct engine_stats st = close_engine(e);
                print_message("%s: %d a step, kind %d: %d of %d right, %d offered, %d steps\n",
                              models[m], draft, (int)how, (int)sum(st.n_accepted),
                              (int)sum(st.n_drafted), n_offered, (int)st.n_steps);
                assert_judged(models[m]);
                assert_true(sum(st.n_drafted) > 0);
                /* Nobody knows what comes behind an answer that has left the path. One that leaves it, or has another's
                 * beginning (n = 2), wastes the right drafts of one step. */
                if (how == RIGHT || how == MIXED) {
                    assert_true(n_offered > 2 * CROWD);
                    assert_true((int)sum(st.n_accepted) >= n_offered / 2);
                }
                if (!device && (how == RIGHT || how == MIXED))
                    assert_true(sum(st.n_accepted) > sum(st.n_drafted) / 4);
                if (how == WRONG)
                    assert_true(sum(st.n_accepted) <
                                sum(st.n_drafted) / 4); /* n = 2 has an unknown answer */
            }
    }
    grammar_free(grammar);
}

/* One sequence: right drafts save steps, wrong ones save none and cost none. */
static void right_guesses_save_steps(void **state)
{
    (void)state;
    static struct answer want, got;
    int32_t prompt[40];
    prompt_of(3, prompt, 40);
    for (int m = 0; m < n_models; m++) {
        enum drafting own = OWN;
        struct request_spec s = spec_of(prompt, 40, ANSWER, 9);
        struct engine *e = open_engine(models[m], 0, 0, &own);
        run(e, &s, &want, 1);
        uint64_t steps = close_engine(e).n_steps;
        n_known = 0;
        remember(&s, &want);
        for (int draft = 1; draft <= 4; draft++)
            for (enum drafting how = RIGHT; how <= WRONG; how++) {
                e = open_engine(models[m], draft, 0, &how);
                run(e, &s, &got, 1);
                struct engine_stats st = close_engine(e);
                int left = partings.n_left;
                assert_same(&s, &want, &got);
                if (device) { /* which may begin steps ahead for nothing, without drafts */
                    assert_true(how == WRONG
                                    ? sum(st.n_accepted) < sum(st.n_drafted) / 4
                                    : 4 * st.n_steps < 3 * steps || partings.n_left > left);
                } else if (how == WRONG) {
                    assert_int_equal(st.n_steps, steps);
                    assert_int_equal(sum(st.n_accepted), 0);
                } else {
                    assert_int_equal(sum(st.n_accepted), sum(st.n_drafted));
                    assert_int_equal(sum(st.n_accepted) + st.n_steps, steps);
                    /* pages end here and there: a draft less */
                    assert_true(st.n_steps <= 4 + (uint64_t)(ANSWER / (1 + draft)) + ANSWER / 16);
                }
            }
        assert_judged(models[m]);
    }
}

/* An answer ends where it must in the middle of right drafts, and goes on from the cache as if nothing
 * had been drafted. */
static void ends_and_next_turns(void **state)
{
    (void)state;
    static struct answer want, got, again;
    int32_t prompt[MOST];
    prompt_of(5, prompt, 40);
    for (int m = 0; m < n_models; m++) {
        enum drafting own = OWN, how = RIGHT;
        struct request_spec s = spec_of(prompt, 40, ANSWER, 2);
        struct engine *plain = open_engine(models[m], 0, 0, &own);
        run(plain, &s, &want, 1);
        n_known = 0;
        remember(&s, &want);
        struct engine *e = open_engine(models[m], 3, 0, &how);
        for (int n = 1; n <= 20; n++) {
            s = spec_of(prompt, 40, n, 2);
            run(e, &s, &got, 1);
            assert_int_equal(got.n, n);
            assert_int_equal(got.finish, FINISH_LENGTH);
            if (!device)
                assert_memory_equal(got.tokens, want.tokens, (size_t)n * sizeof *got.tokens);
        }
        for (int n = 1; n < 20; n++) { /* the n-th token's text ends it */
            char stop[2] = {want.text[n], 0};
            const char *stops[] = {stop};
            s = spec_of(prompt, 40, ANSWER, 2);
            s.stop = stops;
            s.n_stop = 1;
            run(plain, &s, &again, 1);
            run(e, &s, &got, 1);
            assert_same(&s, &again, &got);
            judge_from = got.n > judge_from ? got.n : judge_from; /* they all begin alike */
        }
        judge_from = 0;
        assert_judged(models[m]);
        /* the next turn: what was said, and some more */
        s = spec_of(prompt, 40, 33, 2);
        run(e, &s, &got, 1);
        int n = 40;
        for (int i = 0; i < got.n; i++)
            prompt[n++] = got.tokens[i];
        prompt_of(6, prompt + n, 10);
        s = spec_of(prompt, n + 10, ANSWER, 4);
        struct request_spec fresh = s;
        fresh.no_cache = true;
        run(plain, &fresh, &want, 1);
        run(e, &s, &got, 1);
        assert_same(&s, &want, &got);
        print_message("%s: %d of %d from the cache\n", models[m], got.usage.n_cached, n + 10);
        assert_true(got.usage.n_cached >= n - 4);
        assert_judged(models[m]);
        close_engine(plain);
        close_engine(e);
    }
}

/* Too few pages for all: some start again, and the answers are the same. */
static void preempted(void **state)
{
    (void)state;
    enum { N = 4 };
    static struct answer want[N], got[N];
    struct request_spec specs[N];
    int32_t prompts[N][64];
    for (int m = 0; m < n_models; m++) {
        enum drafting own = OWN;
        for (int i = 0; i < N; i++) {
            prompt_of(20 + i, prompts[i], 30);
            specs[i] = spec_of(prompts[i], 30, 120, (uint64_t)i);
        }
        struct engine *e = open_engine(models[m], 0, 0, &own);
        run(e, specs, want, N);
        close_engine(e);
        n_known = 0;
        for (int i = 0; i < N; i++)
            remember(&specs[i], &want[i]);
        for (enum drafting how = OWN; how <= MIXED; how++) {
            e = open_engine(models[m], 3, 256, &how);
            run(e, specs, got, N);
            for (int i = 0; i < N; i++)
                assert_same(&specs[i], &want[i], &got[i]);
            assert_true(close_engine(e).n_preempted > 0);
            assert_judged(models[m]);
        }
    }
}

enum { MANY = 8 };

struct cancels {
    struct engine *e;
    struct request *r[MANY];
    int step, n, crowded;   /* crowded: steps of more than drafts are for */
    uint64_t before, after; /* drafts read until the third of those, and until the last */
};

/* The n-th is cancelled before step 20 + 10 n. */
static void cancel_some(void *arg, int n_items)
{
    struct cancels *c = arg;
    struct engine_stats st;
    engine_stats(c->e, &st);
    if (n_items > DRAFT_SEQS) {
        c->before = c->crowded++ < 3 ? sum(st.n_drafted) : c->before;
        c->after = sum(st.n_drafted);
    }
    if (c->step++ == 20 + 10 * c->n && c->n < MANY - 1)
        request_cancel(c->r[c->n++]);
}

/* Requests that are cancelled in the middle leave nothing behind; while many run, nothing is drafted. */
static void cancelled_and_many(void **state)
{
    (void)state;
    static struct answer got[MANY];
    int32_t prompts[MANY][64];
    for (int m = 0; m < n_models; m++) {
        if (strncmp(models[m], "plain-", 6) == 0) /* text is drafted for many */
            continue;
        enum drafting how = OWN;
        struct cancels c = {.e = open_engine(models[m], 2, 0, &how)};
        struct events *q = events_new();
        struct engine_event ev;
        struct error err = {0};
        memset(got, 0, sizeof got);
        struct request_spec first = spec_of(prompts[0], 20, 1, 0);
        prompt_of(60, prompts[0], 20);
        run(c.e, &first, got, 1); /* so that the hook is there before the others */
        for (int i = 0; i < MANY; i++)
            prompt_of(40 + i, prompts[i], 20);
        struct request_spec all = spec_of(prompts[0], 20, 200, 1);
        all.queue = q;
        memset(got, 0, sizeof got);
        for (int i = 0; i < MANY; i++) {
            all.prompt = prompts[i];
            all.user = &got[i];
            if (i == MANY - 1) /* the steps that cancel begin once all handles are known */
                engine_on_step(c.e, cancel_some, &c);
            assert_int_equal(engine_submit(c.e, &all, &c.r[i], &err), SUBMIT_OK);
        }
        for (int done = 0; done < MANY;) {
            assert_true(events_next(q, &ev, -1));
            done += take(&ev);
        }
        struct engine_stats st = close_engine(c.e);
        print_message("%s: %d cancelled, %d drafts\n", models[m], (int)st.finished[FINISH_CANCEL],
                      (int)sum(st.n_drafted));
        assert_true(st.finished[FINISH_CANCEL] > 0 && c.crowded > 3);
        assert_int_equal(c.before, c.after);
        if (!device) /* there those of the crowd draft no more */
            assert_true(sum(st.n_drafted) > c.after);
        for (int i = 0; i < MANY; i++)
            request_free(c.r[i]);
        events_free(q);
    }
}

/* A crowd runs ahead of the host, without the block; those who come later draft again. */
static void crowds_run_ahead(void **state)
{
    (void)state;
    enum { N = 2 * DRAFT_SEQS };
    static struct answer want[N], got[N];
    struct request_spec specs[N];
    int32_t prompts[N][64];
    if (is_cpu()) {
        printf("skipped: steps are begun ahead on a GPU alone (STEEL_TEST_DEVICE=cuda)\n");
        skip();
    }
    for (int m = 0; m < n_models; m++) {
        if (strncmp(models[m], "plain-", 6) == 0)
            continue;
        enum drafting own = OWN;
        for (int i = 0; i < N; i++) {
            prompt_of(80 + i, prompts[i], 20);
            specs[i] = spec_of(prompts[i], 20, ANSWER, (uint64_t)i);
            specs[i].sample.temp = 0;
        }
        struct engine *plain = open_engine(models[m], 0, 0, &own);
        run(plain, specs, want, N);
        close_engine(plain);
        struct engine *e = open_engine(models[m], 2, 0, &own);
        struct engine_stats st, after;
        run(e, specs, got, N);
        engine_stats(e, &st);
        for (int i = 0; i < N; i++)
            assert_same(&specs[i], &want[i], &got[i]);
        assert_true(st.n_ahead > ANSWER / 2);
        run(e, specs, got, DRAFT_SEQS);
        for (int i = 0; i < DRAFT_SEQS; i++)
            assert_same(&specs[i], &want[i], &got[i]);
        after = close_engine(e);
        print_message("%s: %d steps begun ahead, then %d drafts\n", models[m], (int)st.n_ahead,
                      (int)(sum(after.n_drafted) - sum(st.n_drafted)));
        assert_true(sum(after.n_drafted) > sum(st.n_drafted) + ANSWER);
        assert_judged(models[m]);
    }
}

/* On a device: where answers left the path, the same random number met neighbours. */
static void partings_are_near(void **state)
{
    (void)state;
    struct partings p = partings;
    if (!device) {
        printf("skipped: where rows round alike nothing parts (STEEL_TEST_DEVICE)\n");
        skip();
    }
    print_message("%d of %d answers left the path, %d of %d at tokens not about as likely\n",
                  p.n_left, p.n_compared, p.n_apart, p.n_judged);
    assert_true(p.n_compared > 100);
    assert_true(p.n_apart <= p.n_judged / APART_ONE_OF + 1);
}

/* Steps of made-up times, with a block of one draft: drafts are made while they pay, and tried again from time to time. */
static void guesses_that_pay(void **state)
{
    (void)state;
    static const struct {
        double draft_ns, right;
        bool pays;
    } cases[] = {{150, 0.8, true}, {150, 0.3, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        static struct draft_cost cost;
        struct draft_rate own[DRAFT_CLASSES] = {{0}};
        int made = 0, n = 4000;
        double right = 0;
        cost = (struct draft_cost){0};
        for (int step = 0; step < n; step++) {
            struct draft_offer o = {.most = 1};
            o.p[0] = draft_rate_of(&cost, own, 0, 0.6);
            int x = draft_cost_known(&cost, 1)
                        ? draft_cost_choose(&cost, 1, &o, 1, free_of_cost, false, NULL)
                        : 0;
            assert_int_equal(x, o.depth);
            x = x ? x : draft_cost_known(&cost, 1) && draft_rate_try(&cost, 0, 1, 0);
            made += x;
            draft_cost_learn(&cost, 1, x, false, (int64_t)(x ? cases[i].draft_ns : 100));
            draft_rate_rest(own);
            if (!x)
                continue;
            right += cases[i].right;
            draft_rate_learn(&cost, own, 0, right >= 1, right < 1);
            right -= right >= 1;
        }
        print_message("%d of %d steps with drafts\n", made, n);
        assert_true(cases[i].pays ? made > n * 9 / 10 : made > n / DRAFT_TRY / 2 && made < n / 20);
    }
}

/* Where steps run ahead: the block follows them while drafts are tried, or pay; else it is left out, for good of the
 * sequences there are, until a new one comes a period later. Nothing is left out of a step with drafts. */
static void blocks_left_out(void **state)
{
    (void)state;
    for (int pays = 0; pays < 2; pays++) {
        struct scheduler sched = {.running.n = 1};
        static struct drafter sp;
        sp = (struct drafter){.sched = &sched,
                              .opt = {.from = 1u << DRAFT_HEAD, .most_head = 1, .async = true}};
        struct draft_seq own = {.source = DRAFT_HEAD, .n_own = 1};
        struct seq first = {.draft = &own}, second = {.draft = &own}, *seqs[] = {&first};
        struct step_item item = {.n_tokens = 1};
        int followed = 0;
        for (int step = 0; step < 3 * HEAD_PERIOD; step++) {
            item.n_draft = 0;
            bool follows = draft_follows(&sp, &item, seqs, 1);
            followed += follows;
            assert_int_equal(first.unfollowed, !follows);
            bool tries = follows && sp.head_turn++ % HEAD_PERIOD < HEAD_TRY;
            struct draft_offer o = {.most = follows, .p = {0}};
            draft_rates(&sp, own.rates, CLASS_HEAD, o.p);
            item.n_draft = draft_cost_known(&sp.cost, 1)
                               ? draft_cost_choose(&sp.cost, 1, &o, 1, free_of_cost, true, NULL)
                               : 0;
            item.n_draft |= tries;
            draft_learn(&sp, &item, 1, follows, item.n_draft ? 150 : 100);
            draft_verified(&sp, &first, item.n_draft, pays ? item.n_draft : 0);
        }
        if (pays)
            assert_true(followed > 3 * HEAD_PERIOD * 9 / 10);
        else
            assert_true(followed < 40);
        seqs[0] = &second; /* it has not been left out, but nothing pays */
        item.n_draft = 1;
        assert_true(draft_follows(&sp, &item, seqs, 1) && !second.unfollowed);
        item.n_draft = 0;
        sched.running.n = DRAFT_SEQS + 1;
        assert_true(!draft_follows(&sp, &item, seqs, 1) && second.unfollowed);
        sched.running.n = 1;
        assert_false(draft_follows(&sp, &item, seqs, 1));
    }
}

/* What cannot be is said. */
static void refused(void **state)
{
    (void)state;
    struct engine_options opt = {.runtime = {.draft = 1}};
    struct error err = {0};
    struct engine *e = engine_open("tests/golden/qwen3", &opt);
    assert_false(engine_wait(e, &err));
    assert_non_null(strstr(err.msg, "--draft"));
    engine_close(e);
    opt.runtime.draft = DRAFT_AUTO; /* nobody asked: none are drafted */
    e = engine_open("tests/golden/qwen3", &opt);
    assert_true(engine_wait(e, &err));
    assert_int_equal(engine_runtime(e)->draft, 0);
    assert_int_equal(engine_runtime(e)->draft_from, 1u << DRAFT_TEXT | 1u << DRAFT_GRAMMAR);
    engine_close(e);
    opt.runtime.draft = DRAFT_MOST + 1;
    e = engine_open("tests/golden/qwen3_5", &opt);
    assert_false(engine_wait(e, &err));
    engine_close(e);
}

int main(void)
{
    device = getenv("STEEL_TEST_DEVICE");
    if (!is_cpu() && !device_count(device)) {
        printf("skipped: speculation on %s: there is no GPU\n", device);
        return 77;
    }
    n_models = device ? 3 : MODELS;
    CHECK(mkdtemp(dir), "a folder");
    for (int m = 0; m < n_models; m++) {
        char folder[128];
        if (strncmp(models[m], "plain-", 6) == 0)
            mtp_toy_plain(dir, models[m] + 6, folder, sizeof folder);
        else
            mtp_toy_make(dir, models[m], folder, sizeof folder);
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(answers_are_the_same), cmocka_unit_test(right_guesses_save_steps),
        cmocka_unit_test(ends_and_next_turns),  cmocka_unit_test(preempted),
        cmocka_unit_test(cancelled_and_many),   cmocka_unit_test(crowds_run_ahead),
        cmocka_unit_test(partings_are_near),    cmocka_unit_test(guesses_that_pay),
        cmocka_unit_test(blocks_left_out),      cmocka_unit_test(refused)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    if (judge)
        engine_close(judge);
    mtp_toy_remove(dir);
    return rc;
}
