/*
 * The end of a pipeline (dist/pipeline.h): who frees it right after its last part waits until the other stage has
 * taken what was sent, as MPI reads the buffers until then. Not for ever, and not where the job is lost. The link of this program
 * takes what is sent late, from the sender's own buffer: a sanitizer sees it if that is gone.
 */
#include "base/clock.h"
#include "backend/backend.h"
#include "base/mem.h"
#include "dist/ranks_link.h"
#include "engine/kvcache.h"
#include "engine/step.h"
#include "dist/pipeline.h"
#include "dist/split.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

enum { PAGE = 16, ROWS = 40, MOST = 64, NEVER = 1 << 30 };

static struct sent {
    const unsigned char *buf;
    size_t bytes;
    int looks;
    bool open;
} sends[MOST];
static int n_sends, n_looks;
static int late; /* looks until something sent is taken */
static unsigned sum;
static char done;

static void *link_bcast(void *buf, size_t bytes, int root, int group)
{
    (void)buf, (void)bytes, (void)root, (void)group;
    return &done;
}

static void *link_send(const void *buf, size_t bytes, int to, int tag)
{
    (void)to, (void)tag;
    assert_true(n_sends < MOST);
    sends[n_sends] = (struct sent){buf, bytes, 0, true};
    return &sends[n_sends++];
}

static void *link_recv(void *buf, size_t bytes, int from, int tag)
{
    (void)from, (void)tag;
    memset(buf, 0, bytes);
    return &done;
}

static void take(struct sent *s)
{
    for (size_t i = 0; i < s->bytes; i++)
        sum += s->buf[i];
    s->open = false;
}

static int link_test(void *request)
{
    struct sent *s = request;
    if (request == &done)
        return 1;
    n_looks++;
    if (++s->looks < late)
        return 0;
    take(s);
    return 1;
}

static void link_poke(void)
{
}

static const struct ranks_link slow = {.version = RANKS_LINK_VERSION,
                                       .bcast = link_bcast,
                                       .send = link_send,
                                       .recv = link_recv,
                                       .test = link_test,
                                       .poke = link_poke};

/* A prompt, as the rank of two stages runs it; its last row wants logits. */
static void run_prompt(struct stepper *st, struct kvcache *kv)
{
    int32_t tokens[ROWS] = {0}, pos[ROWS], slot[ROWS], pages[] = {0, 1, 2};
    int32_t q_start[] = {0, ROWS}, kv_len[] = {ROWS}, out[] = {ROWS - 1};
    struct error err = {0};
    for (int i = 0; i < ROWS; i++)
        pos[i] = slot[i] = i;
    struct batch b = {.n_tokens = ROWS,
                      .n_seqs = 1,
                      .n_out = 1,
                      .max_pages = 3,
                      .tokens = tokens,
                      .pos = pos,
                      .slot = slot,
                      .q_start = q_start,
                      .kv_len = kv_len,
                      .pages = pages,
                      .out_rows = out,
                      .kv = kv->layers};
    if (!step_follow(st, &b, 0, &err))
        fail_msg("%s", err.msg);
}

/* A device that is gone when a step ends. */
static bool broken_end(struct backend *be, int32_t *tokens, struct error *err)
{
    (void)be, (void)tokens;
    return error_set(err, "the device is gone");
}

enum fate { WELL, LOST, BROKEN };

/* A rank from its beginning to its end. LOST: the job is, before the end; BROKEN: its ops fail. */
static void run_rank(struct ranks *r, int rank, enum fate fate)
{
    struct backend_ops broken;
    struct error err = {0};
    *r = (struct ranks){
        .link = &slow, .rank = rank, .size = 2, .tp = 1, .pp = 2, .stage = rank, .alarm = -1};
    atomic_store(&r->timeout_s, 1);
    n_sends = n_looks = 0;
    struct tensorfile *f = tensorfile_open("tests/golden/qwen3moe", &err);
    struct backend *be = backend_open_cpu(&(struct backend_options){.threads = 1}, &err);
    if (!f || !be)
        fail_msg("%s", err.msg);
    be->comm = ranks_comm(r);
    broken = *be->ops;
    broken.end = broken_end;
    if (fate == BROKEN)
        be->ops = &broken;
    struct model *m = model_load(f, be, MODEL_PLAIN,
                                 &(struct model_shard){.cut = split_for, .arg = r}, NULL, &err);
    struct kvcache *kv = m ? kvcache_new(be, &m->net, DT_F16, DT_F16, PAGE, 8, 0, &err) : NULL;
    struct step_limits lim = {.max_tokens = ROWS, .max_seqs = 1, .max_out = 1, .read_chunk = 16};
    struct stepper *st = kv ? stepper_new(m, kv, 1024, &lim, &err) : NULL;
    if (!st)
        fail_msg("%s", err.msg);
    run_prompt(st, kv);
    assert_true(n_sends > 0 || fate == BROKEN);
    if (fate == BROKEN)
        n_looks = 0;
    if (fate == LOST) {
        ranks_lose(r, "rank %d has ended", !rank);
        r->failure = r->lost;
        n_looks = 0;
    }
    stepper_free(st);
    kvcache_free(kv);
    model_free(m);
    be->ops->close(be);
    tensorfile_close(f);
    mem_free(r->scratch);
}

/* How many sends nobody has taken. */
static int count_open(void)
{
    int n = 0;
    for (int i = 0; i < n_sends; i++)
        n += sends[i].open;
    return n;
}

static void test_what_is_sent_is_taken(void **state)
{
    (void)state;
    for (int rank = 0; rank < 2; rank++) {
        struct ranks r;
        late = 20;
        run_rank(&r, rank, WELL);
        int left = count_open();
        for (int i = 0; i < n_sends; i++)
            if (sends[i].open)
                take(&sends[i]);
        assert_int_equal(left, 0);
        assert_true(ranks_ok(&r, NULL));
    }
}

static void test_nobody_takes_it(void **state)
{
    (void)state;
    struct ranks r;
    late = NEVER;
    int64_t began = clock_ns();
    run_rank(&r, 0, WELL);
    assert_true(clock_ns() - began > 1000000000LL); /* the timeout */
    assert_non_null(strstr(r.failure.msg, "rows for another rank: no answer"));
    assert_true(atomic_load(&r.stop));
}

static void test_job_is_lost(void **state)
{
    (void)state;
    struct ranks r;
    late = NEVER;
    for (int rank = 0; rank < 2; rank++) {
        run_rank(&r, rank, LOST);
        assert_int_equal(n_looks, 0); /* for nothing is waited */
    }
}

/* An op that fails ends the job, and says whose it was: nobody waits for that stage, and it waits for nobody. */
static void test_an_op_fails(void **state)
{
    (void)state;
    struct ranks r;
    late = NEVER;
    for (int rank = 0; rank < 2; rank++) {
        run_rank(&r, rank, BROKEN);
        char line[64];
        snprintf(line, sizeof line, "rank %d: the device is gone", rank);
        assert_true(atomic_load(&r.stop));
        assert_string_equal(r.lost.msg, line);
        assert_string_equal(r.failure.msg, line);
        assert_int_equal(n_looks, 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_is_sent_is_taken),
        cmocka_unit_test(test_nobody_takes_it),
        cmocka_unit_test(test_job_is_lost),
        cmocka_unit_test(test_an_op_fails),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
