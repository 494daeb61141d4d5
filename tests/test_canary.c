/*
 * Marks of pages (--kv-canary). Nothing changes where all pages are right: in a crowd, with shared prefixes, preemption, drafts'
 * states and quantised caches. A wrong page in a block table, or a page that two sequences have, ends these sequences with an
 * error; all others get what they get alone, and so does the next request.
 * STEEL_TEST_DEVICE=cuda: the same on a GPU, where texts in company are not compared.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <semaphore.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

#include "engine/engine_int.h"
#include "backend/backend.h"
#include "toy_model.h"

enum { CROWD = 6, PROMPT = 40, ANSWER = 60 };

static char toy[64], hybrid[64];
static const char *device; /* STEEL_TEST_DEVICE */
/* Fewer on a simulated GPU, which takes seconds for them. */
static int n_crowd = CROWD, n_answer = ANSWER;

struct answer {
    int32_t tokens[ANSWER];
    int n;
    enum finish finish;
    char error[128];
};

static struct engine *open_engine(const char *path, bool canary, enum dtype type, int kv_tokens)
{
    struct engine_options opt = {
        .runtime = {.backend = {.device = device, .threads = 1, .deterministic = !device},
                    .context = 256,
                    .kv_tokens = kv_tokens,
                    .max_seqs = CROWD,
                    .k_type = type,
                    .v_type = type,
                    .canary = canary}};
    struct engine *e = engine_open(path, &opt);
    struct error err = {0};
    if (!engine_wait(e, &err))
        fail_msg("%s", err.msg);
    return e;
}

/* Requests 2i and 2i + 1 share the beginning of their prompts. */
static void submit(struct engine *e, int which, struct events *q, struct answer *a)
{
    int32_t prompt[PROMPT];
    uint64_t state = (uint64_t)(which / 2) * 77 + 1;
    for (int i = 0; i < PROMPT; i++) {
        state = i == PROMPT - 8 ? state + (uint64_t)which : state;
        prompt[i] = 32 + (int32_t)((toy_random(&state) + 1) * 45);
    }
    struct request_spec s = {.prompt = prompt,
                             .n_prompt = PROMPT - which % 3,
                             .max_tokens = n_answer,
                             .ignore_eos = true,
                             .sample = sample_params_default(),
                             .queue = q,
                             .user = a};
    s.sample.seed = (uint64_t)which;
    s.sample.temp = which % 2 ? 1 : 0;
    struct error err = {0};
    *a = (struct answer){0};
    if (engine_submit(e, &s, NULL, &err) != SUBMIT_OK)
        fail_msg("%s", err.msg);
}

static void take(struct events *q, int n)
{
    struct engine_event ev;
    while (n > 0) {
        assert_true(events_next(q, &ev, -1));
        struct answer *a = ev.user;
        if (ev.kind == EVENT_TOKEN)
            a->tokens[a->n++] = ev.token;
        if (ev.kind == EVENT_DONE) {
            a->finish = ev.finish;
            snprintf(a->error, sizeof a->error, "%s", ev.error ? ev.error : "");
            n--;
        }
    }
}

static void run(struct engine *e, int first, int n, struct answer *out)
{
    struct events *q = events_new();
    for (int i = 0; i < n; i++)
        submit(e, first + i, q, &out[i]);
    take(q, n);
    events_free(q);
}

static void assert_same(const struct answer *a, const struct answer *b)
{
    assert_int_equal(a->finish, FINISH_LENGTH);
    assert_int_equal(a->n, b->n);
    if (!device)
        assert_memory_equal(a->tokens, b->tokens, (size_t)a->n * sizeof *a->tokens);
}

static void right_pages(const char *path, enum dtype type)
{
    static struct answer alone[CROWD], crowd[CROWD];
    struct engine *plain = open_engine(path, false, type, 0);
    for (int i = 0; i < n_crowd; i++)
        if (device)
            alone[i].n = n_answer;
        else
            run(plain, i, 1, &alone[i]);
    engine_close(plain);
    struct engine *e = open_engine(path, true, type, device ? 64 : 160);
    struct engine_stats st;
    for (int turn = 0; turn < 2; turn++) {
        run(e, 0, n_crowd, crowd);
        for (int i = 0; i < n_crowd; i++)
            assert_same(&crowd[i], &alone[i]);
    }
    engine_stats(e, &st);
    assert_int_equal(st.n_wrong_pages, 0);
    assert_true(device || (st.n_preempted > 0 && st.n_evicted > 0 && st.cache_hits > 0));
    kvcache_verify(e->rt->kv);
    engine_close(e);
}

static void test_right_pages(void **state)
{
    (void)state;
    right_pages(toy, DT_F16);
    right_pages("tests/golden/qwen3", DT_Q8_0);
    if (!device)
        right_pages("tests/golden/mistral-window", DT_F16);
    right_pages(hybrid, DT_F16);
}

struct fault {
    struct engine *e;
    void (*put)(struct engine *e);
    int at, n_steps;
    sem_t submitted; /* all requests are */
    bool begun;
};

/* Before step `at` in which four sequences run. */
static void on_step(void *arg, int n_items)
{
    struct fault *f = arg;
    if (!f->begun)
        sem_wait(&f->submitted);
    f->begun = true;
    if (n_items == 4 && ++f->n_steps == f->at)
        f->put(f->e);
}

static struct kv_seq *running(struct engine *e, int i)
{
    struct seq *q = e->sched.running.first;
    while (i--)
        q = q->next;
    return &q->kv;
}

static void swap_first_pages(struct engine *e)
{
    struct kv_seq *a = running(e, 0), *b = running(e, 2);
    int32_t page = a->pages[0];
    a->pages[0] = b->pages[0];
    b->pages[0] = page;
}

static void read_anothers_last(struct engine *e)
{
    struct kv_seq *a = running(e, 1), *b = running(e, 3);
    a->pages[a->n_pages - 2] = b->pages[b->n_pages - 1];
}

/* The next sequence to grow gets a page that sequence 0 still has. */
static void free_twice(struct engine *e)
{
    struct kvcache *kv = e->rt->kv;
    struct kv_seq *a = running(e, 0);
    kv->free[kv->n_free++ - kv->n_fresh] = a->pages[a->n_pages - 1];
}

static void test_wrong_pages(void **state)
{
    (void)state;
    void (*const faults[])(struct engine *) = {swap_first_pages, read_anothers_last, free_twice};
    static const int which[] = {0, 2, 4, 6};
    struct answer alone[4], crowd[4], after[1];
    struct engine *plain = open_engine(toy, false, DT_F16, 0);
    for (int i = 0; i < 4; i++)
        run(plain, which[i], 1, &alone[i]);
    engine_close(plain);
    for (size_t k = 0; k < sizeof faults / sizeof *faults; k++) {
        struct engine *e = open_engine(toy, true, DT_F16, 0);
        struct events *q = events_new();
        struct fault f = {.e = e, .put = faults[k], .at = 3};
        sem_init(&f.submitted, 0, 0);
        engine_on_step(e, on_step, &f);
        for (int i = 0; i < 4; i++)
            submit(e, which[i], q, &crowd[i]);
        sem_post(&f.submitted);
        take(q, 4);
        assert_true(f.n_steps >= f.at);
        engine_on_step(e, NULL, NULL);
        int n_wrong = 0;
        for (int i = 0; i < 4; i++) {
            n_wrong += crowd[i].finish == FINISH_ERROR;
            if (crowd[i].finish == FINISH_ERROR)
                assert_non_null(strstr(crowd[i].error, "KV cache"));
            else
                assert_same(&crowd[i], &alone[i]);
        }
        print_message("fault %zu: %d of 4 sequences ended\n", k, n_wrong);
        assert_true(n_wrong >= 1 && n_wrong < 4);
        struct engine_stats st;
        engine_stats(e, &st);
        assert_int_equal(st.n_wrong_pages, n_wrong);
        run(e, 1, 1, after);
        assert_int_equal(after->finish, FINISH_LENGTH);
        run(e, which[0], 1, after);
        assert_same(after, &alone[0]);
        engine_close(e);
        events_free(q);
    }
}

int main(void)
{
    struct error err = {0};
    device = getenv("STEEL_TEST_DEVICE");
    n_answer = device ? 14 : ANSWER;
    n_crowd = device ? 3 : CROWD;
    snprintf(toy, sizeof toy, "/tmp/steel-canary-%d.gguf", (int)getpid());
    snprintf(hybrid, sizeof hybrid, "/tmp/steel-canary-hybrid-%d.gguf", (int)getpid());
    if (!toy_write(toy, &err) || !toy_write_hybrid(hybrid, &err)) {
        fprintf(stderr, "%s\n", err.msg);
        return 1;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_pages),
        cmocka_unit_test(test_wrong_pages),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(toy);
    unlink(hybrid);
    return failed;
}
