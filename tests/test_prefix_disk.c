/* Saving and restoring cached prefixes of an engine: the cache's invariants hold, answers stay what they were. */
#include "engine/prefix_disk.h"
#include "engine/engine_int.h"
#include "engine/prefix_file.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cmocka.h>

#include "toy_model.h"

enum { N = 300, MADE = 40 };

static char dir[64], attention[96], hybrid[96];

struct result {
    int32_t tokens[MADE];
    int n, n_cached;
    enum finish finish;
};

static struct engine *open_engine(const char *path, int kv_tokens)
{
    struct engine_options opt = {
        .runtime = {.context = 512, .kv_tokens = kv_tokens, .max_seqs = 4}};
    opt.runtime.backend.threads = 1;
    opt.runtime.backend.deterministic = true;
    struct engine *e = engine_open(path, &opt);
    struct error err = {0};
    if (!engine_wait(e, &err))
        fail_msg("%s", err.msg);
    return e;
}

static void prompt_of(int which, int32_t *out)
{
    uint64_t state = (uint64_t)which * 77 + 1;
    for (int i = 0; i < N; i++)
        out[i] = 32 + (int32_t)((toy_random(&state) + 1) * 40);
}

static void start(struct engine *e, const int32_t *prompt, struct events *q)
{
    struct error err = {0};
    struct request_spec s = {
        .prompt = prompt, .n_prompt = N, .max_tokens = MADE, .ignore_eos = true, .queue = q};
    s.sample = sample_params_default();
    s.sample.seed = 1;
    if (engine_submit(e, &s, NULL, &err) != SUBMIT_OK)
        fail_msg("%s", err.msg);
}

static struct result finish(struct events *q)
{
    struct engine_event ev;
    struct result r = {0};
    do {
        assert_true(events_next(q, &ev, -1));
        if (ev.kind == EVENT_TOKEN)
            r.tokens[r.n++] = ev.token;
        else if (ev.kind == EVENT_DONE)
            r.n_cached = ev.usage.n_cached, r.finish = ev.finish;
    } while (ev.kind != EVENT_DONE);
    return r;
}

static struct result answer(struct engine *e, const int32_t *prompt)
{
    struct events *q = events_new();
    start(e, prompt, q);
    struct result r = finish(q);
    events_free(q);
    return r;
}

static unsigned long disk_blocks, disk_left; /* MB; 0 = the real disk */

int __real_statvfs(const char *path, struct statvfs *st);
int __wrap_statvfs(const char *path, struct statvfs *st);
int __wrap_statvfs(const char *path, struct statvfs *st)
{
    int rc = __real_statvfs(path, st);
    if (disk_blocks)
        *st = (struct statvfs){.f_blocks = disk_blocks, .f_bavail = disk_left, .f_frsize = 1 << 20};
    return rc;
}

static void verify(void *arg)
{
    kvcache_verify(((struct engine *)arg)->rt->kv);
}

static void check(struct engine *e)
{
    assert_true(engine_call(e, verify, e));
}

static void must_save(struct engine *e, const int32_t *tokens, int n, const char *salt, int want)
{
    struct prefix_disk d = {.dir = dir, .name = "a", .salt = salt};
    struct error err = {0};
    int saved = 0;
    uint64_t bytes = 0;
    if (!prefix_disk_save(e, &d, tokens, n, &saved, &bytes, &err))
        fail_msg("%s", err.msg);
    assert_int_equal(saved, want);
    check(e);
}

static bool restore(struct engine *e, const char *salt, struct error *err)
{
    struct prefix_disk d = {.dir = dir, .name = "a", .salt = salt};
    int32_t *tokens = NULL;
    int n = 0;
    uint64_t bytes = 0;
    bool ok = prefix_disk_restore(e, &d, &tokens, &n, &bytes, err);
    assert_true(ok == (tokens != NULL));
    mem_free(tokens);
    check(e);
    return ok;
}

/* The whole way, on a model of each kind. */
static void round_trip(const char *path)
{
    int32_t prompt[N], all[N + MADE];
    struct error err = {0};
    prompt_of(1, prompt);
    struct engine *e = open_engine(path, 2048);
    struct result want = answer(e, prompt), warm = answer(e, prompt);
    assert_true(want.n == MADE && warm.n_cached >= 288);
    memcpy(all, prompt, sizeof prompt);
    memcpy(all + N, want.tokens, sizeof want.tokens);
    must_save(e, all, N + MADE, NULL, N + MADE - 1); /* the last token was never computed */
    must_save(e, all, N, NULL, 288);
    must_save(e, all, N + MADE, NULL, N + MADE - 1);
    assert_true(restore(e, NULL, &err)); /* over itself */
    engine_close(e);
    for (int kv = 512; kv <= 2048; kv *= 4) {
        e = open_engine(path, kv);
        if (!restore(e, NULL, &err))
            fail_msg("%s", err.msg);
        struct result got = answer(e, prompt);
        assert_true(got.n_cached >= 288 && !memcmp(got.tokens, want.tokens, sizeof got.tokens));
        assert_true(restore(e, NULL, &err));
        check(e);
        got = answer(e, prompt);
        assert_true(got.n_cached >= 288 && !memcmp(got.tokens, want.tokens, sizeof got.tokens));
        engine_close(e);
    }
    /* another salt: its owner alone finds the pages */
    e = open_engine(path, 2048);
    assert_false(restore(e, "x", &err));
    assert_non_null(strstr(err.msg, "another client"));
    assert_int_equal(answer(e, prompt).n_cached, 0);
    struct prefix_disk d = {.dir = dir, .name = "b"};
    int n;
    uint64_t bytes;
    assert_false(prefix_disk_save(e, &d, prompt + 1, N - 1, &n, &bytes, &err));
    assert_non_null(strstr(err.msg, "nothing of its prompt"));
    engine_close(e);
}

static void test_attention(void **state)
{
    (void)state;
    round_trip(attention);
}

static void test_hybrid(void **state)
{
    (void)state;
    round_trip(hybrid);
}

/* Restoring beside sequences that need the pages: it may fail for lack of room, and they never do. */
static void beside(const char *path)
{
    enum { SEQS = 4 };
    int32_t prompt[SEQS + 1][N];
    struct result want[SEQS];
    struct error err = {0};
    struct engine *e = open_engine(path, 2048);
    for (int i = 0; i <= SEQS; i++)
        prompt_of(i + 1, prompt[i]);
    for (int i = 0; i < SEQS; i++)
        want[i] = answer(e, prompt[i]);
    answer(e, prompt[SEQS]);
    must_save(e, prompt[SEQS], N, NULL, 288);
    engine_close(e);
    e = open_engine(path, 800); /* two of the five fit */
    for (int round = 0; round < 10; round++) {
        struct events *q[SEQS];
        for (int i = 0; i < SEQS; i++)
            start(e, prompt[i], q[i] = events_new());
        for (int i = 0; i < 20; i++) {
            err = (struct error){0};
            if (!restore(e, NULL, &err))
                assert_non_null(strstr(err.msg, "no room"));
        }
        for (int i = 0; i < SEQS; i++) {
            struct result got = finish(q[i]);
            assert_true(got.n == MADE && !memcmp(got.tokens, want[i].tokens, sizeof got.tokens));
            events_free(q[i]);
        }
        check(e);
    }
    if (!restore(e, NULL, &err))
        fail_msg("%s", err.msg);
    assert_true(answer(e, prompt[SEQS]).n_cached >= 288);
    engine_close(e);
}

static void test_beside(void **state)
{
    (void)state;
    beside(attention);
    beside(hybrid);
}

/* Calls of threads while the engine closes: each returns. */
static void *call_on(void *arg)
{
    struct engine *e = arg;
    while (engine_call(e, verify, e))
        ;
    return NULL;
}

/* A save that would leave less than 1 GB of the disk, or a tenth of a small one, is refused, and writes nothing. */
static void test_full_disk(void **state)
{
    (void)state;
    int32_t prompt[N];
    struct engine *e = open_engine(attention, 512);
    prompt_of(1, prompt);
    answer(e, prompt);
    struct prefix_disk d = {.dir = dir, .name = "full"};
    char path[96];
    snprintf(path, sizeof path, "%s/full", dir);
    static const struct {
        unsigned long blocks, left; /* MB */
        bool fits;
    } disks[] = {{100000, 1000, false}, {100000, 1100, true}, {100, 9, false}, {100, 20, true}};
    for (size_t i = 0; i < sizeof disks / sizeof *disks; i++) {
        struct error err = {0};
        int n;
        uint64_t bytes;
        disk_blocks = disks[i].blocks;
        disk_left = disks[i].left;
        unlink(path);
        bool ok = prefix_disk_save(e, &d, prompt, N, &n, &bytes, &err);
        assert_int_equal(ok, disks[i].fits);
        assert_int_equal(access(path, F_OK) == 0, disks[i].fits);
        assert_true(ok || strstr(err.msg, "stay free"));
    }
    disk_blocks = 0;
    engine_close(e);
}

static void test_closing(void **state)
{
    (void)state;
    for (int round = 0; round < 5; round++) {
        struct engine *e = open_engine(attention, 512);
        pthread_t threads[3];
        for (int i = 0; i < 3; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, call_on, e), 0);
        int32_t prompt[N];
        prompt_of(1, prompt);
        answer(e, prompt);
        pthread_mutex_lock(
            &e->lock); /* what engine_close does first; it frees the engine, which the threads use */
        e->quit = true;
        pthread_cond_broadcast(&e->changed);
        pthread_mutex_unlock(&e->lock);
        for (int i = 0; i < 3; i++)
            pthread_join(threads[i], NULL);
        engine_close(e);
    }
}

static int setup(void **state)
{
    (void)state;
    snprintf(dir, sizeof dir, "/tmp/steel-prefix-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(attention, sizeof attention, "%s/attention.gguf", dir);
    snprintf(hybrid, sizeof hybrid, "%s/hybrid.gguf", dir);
    struct error err = {0};
    return toy_write(attention, &err) && toy_write_hybrid(hybrid, &err) ? 0 : -1;
}

static int teardown(void **state)
{
    (void)state;
    char cmd[128];
    snprintf(cmd, sizeof cmd, "rm -rf %s", dir);
    return system(cmd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention), cmocka_unit_test(test_hybrid),
        cmocka_unit_test(test_beside),    cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_closing),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
