/*
 * What `steel plan` says, held against what ranks do: golden models are loaded as each rank of an
 * arrangement loads them, over a link that only counts, and steps are run. Bytes of weights, sizes of
 * parts, messages and bytes sent must be the plan's. Then the formulas of the prediction, by hand.
 */
#include "base/mem.h"
#include "backend/backend.h"
#include "dist/ranks_link.h"
#include "engine/kvcache.h"
#include "engine/placement.h"
#include "engine/step.h"
#include "dist/parts.h"
#include "dist/pipeline.h"
#include "dist/split.h"
#include "dist/stages.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

/* A link whose operations are done at once; nothing comes, and what is sent is counted. */
static struct {
    int tp, tp_rank, messages;
    double bytes;
} wire;
static char done;

static void *begin(double bytes)
{
    wire.messages++;
    wire.bytes += bytes;
    return &done;
}

static void *link_bcast(void *buf, size_t bytes, int root, int group)
{
    (void)buf, (void)bytes, (void)root, (void)group;
    return &done;
}

static void *link_allgather(const void *mine, void *all, size_t each, int group)
{
    (void)mine;
    assert_in_range(group, 1, RANKS_GROUPS - 1);
    memset(all, 0, each * (size_t)wire.tp);
    return begin((double)each * (wire.tp - 1));
}

static void *link_exchange(const float *mine, const int *n, const int *at, float *all,
                           const int *got, const int *got_at, int group)
{
    (void)mine, (void)at, (void)got_at, (void)group;
    double sent = 0;
    for (int t = 0; t < wire.tp; t++) {
        sent += n[t] * 4.0;
        memset(all + got_at[t], 0, (size_t)got[t] * sizeof *all);
    }
    return begin(sent);
}

static void *link_complete(float *all, const int *n, const int *at, int group)
{
    (void)all, (void)at;
    assert_int_equal(group, 1);
    return begin(n[wire.tp_rank] * 4.0 * (wire.tp - 1));
}

static void *link_send(const void *buf, size_t bytes, int to, int tag)
{
    (void)buf, (void)to, (void)tag;
    return begin((double)bytes);
}

static void *link_recv(void *buf, size_t bytes, int from, int tag)
{
    (void)from, (void)tag;
    memset(buf, 0, bytes);
    return begin(0);
}

static int link_test(void *request)
{
    assert_ptr_equal(request, &done);
    return 1;
}

static void link_poke(void)
{
}

static int link_split(int color, int key)
{
    (void)color, (void)key;
    return 0;
}

static void link_finalize(void)
{
}

static const struct ranks_link counting = {
    .version = RANKS_LINK_VERSION,
    .size = 4,
    .n_local = 4,
    .bcast = link_bcast,
    .allgather = link_allgather,
    .exchange = link_exchange,
    .complete = link_complete,
    .send = link_send,
    .recv = link_recv,
    .test = link_test,
    .poke = link_poke,
    .split = link_split,
    .finalize = link_finalize,
};

enum { PAGE = 16, MAX_ROWS = 128, MAX_SEQS = 4 };

static size_t loaded_bytes(const struct model *m)
{
    size_t n = 0;
    for (int i = 0; i < m->n_specs; i++) {
        const struct tensor_spec *want = &m->specs[i];
        const struct cut *cut = want->cut;
        if (cut && cut->none)
            continue;
        if (want->w) {
            n += want->w->bytes;
            if (want->w->bias)
                n += (size_t)want->w->n_expert * (size_t)want->w->n_out * sizeof(float);
            continue;
        }
        size_t kept = cut && cut->n_rows ? 0 : (size_t)want->n_in;
        for (int k = 0; cut && k < cut->n_rows; k++)
            kept += (size_t)cut->rows[k].n;
        n += kept * sizeof(float);
    }
    return n;
}

/* A step of n_seqs sequences of `each` rows; the last row of each wants logits. */
static void run_step(struct stepper *st, struct kvcache *kv, int n_seqs, int each)
{
    int32_t tokens[MAX_ROWS] = {0}, pos[MAX_ROWS], slot[MAX_ROWS], q_start[MAX_SEQS + 1] = {0};
    int32_t kv_len[MAX_SEQS], out[MAX_SEQS], pages[MAX_SEQS * (MAX_ROWS / PAGE)];
    int32_t state[MAX_SEQS], never[MAX_SEQS] = {0}, none[MAX_SEQS], fresh[MAX_SEQS];
    int max_pages = (each + PAGE - 1) / PAGE, rows = n_seqs * each;
    struct error err = {0};
    for (int s = 0; s < n_seqs; s++) {
        q_start[s + 1] = (s + 1) * each;
        kv_len[s] = each;
        out[s] = (s + 1) * each - 1;
        state[s] = s;
        none[s] = fresh[s] = -1;
        for (int i = 0; i < max_pages; i++)
            pages[s * max_pages + i] = s * max_pages + i;
        for (int i = 0; i < each; i++) {
            pos[s * each + i] = i;
            slot[s * each + i] = (s * max_pages + i / PAGE) * PAGE + i % PAGE;
        }
    }
    struct batch b = {.n_tokens = rows,
                      .n_seqs = n_seqs,
                      .n_decode = each == 1 ? n_seqs : 0,
                      .n_out = n_seqs,
                      .max_pages = max_pages,
                      .tokens = tokens,
                      .pos = pos,
                      .slot = slot,
                      .q_start = q_start,
                      .kv_len = kv_len,
                      .pages = pages,
                      .out_rows = out,
                      .kv = kv->layers};
    if (kv->n_states) {
        b.state_in = fresh;
        b.state_out = state;
        b.save_rows = never;
        b.save_state = none;
    }
    wire.messages = 0;
    wire.bytes = 0;
    if (!step_follow(st, &b, 0, &err))
        fail_msg("%s", err.msg);
}

static void check_span(struct placement_span s, int n)
{
    assert_true(n >= s.least && n <= s.most);
}

/* The parts of the loaded network are those of the plan. */
static void check_network(const struct network *net, const struct placement_rank *r)
{
    assert_int_equal(net->n_layers, r->layers.n);
    for (int i = 0; i < net->n_layers; i++) {
        const struct layer *l = &net->layers[i];
        if (l->mixer.kind == MIXER_ATTENTION) {
            check_span(r->heads, l->mixer.attention.n_heads);
            check_span(r->kv_heads, l->mixer.attention.n_kv_heads);
        }
        if (l->mlp.dense.gate_up)
            check_span(r->ff, l->mlp.dense.down->n_in);
        if (l->mlp.router.w) {
            check_span(r->ff_exp, l->mlp.experts.down->n_in);
            assert_int_equal(l->mlp.experts.down->n_expert, r->experts.n);
            assert_int_equal(l->mlp.expert_first, r->experts.first);
        }
    }
}

static void check_steps(struct stepper *st, struct kvcache *kv, const struct placement_rank *r)
{
    static const int steps[][2] = {{1, 1}, {4, 1}, {2, 24}, {1, 20}, {1, 96}};
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        int seqs = steps[i][0], each = steps[i][1];
        if (r->comm.pp > 1 && seqs > 1 && seqs * each % 4)
            continue;
        struct predict_load load = {seqs * each, seqs, seqs, each};
        struct predict_traffic t = predict_traffic(&r->comm, r->stage, r->tp_rank, &load);
        run_step(st, kv, seqs, each);
        /* a long prompt has its logits in the second part alone */
        bool halves = r->comm.pp > 1 && seqs == 1 && each >= 32;
        if (wire.messages != (int)t.messages && !halves)
            fail_msg("rank %d, %d x %d: %d messages, planned %g", r->rank, seqs, each,
                     wire.messages, t.messages);
        double logits = (double)load.outs * r->comm.vocab * 4;
        double slack = r->comm.collects ? logits : 0; /* parts of the vocabulary are uneven */
        slack += halves ? logits + (double)r->comm.sums_last * load.outs * r->comm.embd * 4 : 0;
        if (fabs(wire.bytes - t.bytes) > slack + 0.01 * t.bytes)
            fail_msg("rank %d, %d x %d: %g bytes, planned %g", r->rank, seqs, each, wire.bytes,
                     t.bytes);
    }
}

static void check_rank(const struct tensorfile *f, const struct placement *p,
                       const struct placement_rank *r)
{
    struct error err = {0};
    struct ranks ranks = {.link = &counting,
                          .rank = r->rank,
                          .size = p->n_ranks,
                          .tp = p->tp,
                          .pp = p->pp,
                          .ep = p->ep,
                          .tp_rank = r->tp_rank,
                          .stage = r->stage};
    struct backend *be = backend_open_cpu(&(struct backend_options){.threads = 1}, &err);
    assert_non_null(be);
    wire.tp = p->tp;
    wire.tp_rank = r->tp_rank;
    be->comm = ranks_comm(&ranks);
    be->async = false;
    struct model *m = model_load(
        f, be, MODEL_PLAIN, &(struct model_shard){.cut = split_for, .arg = &ranks}, NULL, &err);
    if (!m)
        fail_msg("%s", err.msg);
    check_network(&m->net, r);
    if (loaded_bytes(m) != r->weights)
        fail_msg("%s, rank %d of %d x %d: %zu bytes loaded, %zu planned", f->path, r->rank, p->tp,
                 p->pp, loaded_bytes(m), r->weights);
    assert_int_equal(kvcache_token_bytes(&m->net, DT_F16, DT_F16), r->token_bytes);
    struct kvcache *kv = kvcache_new(be, &m->net, DT_F16, DT_F16, PAGE, 64, MAX_SEQS, &err);
    assert_non_null(kv);
    struct step_limits lim = {
        .max_tokens = MAX_ROWS, .max_seqs = MAX_SEQS, .max_out = MAX_SEQS, .read_chunk = 16};
    struct stepper *st = stepper_new(m, kv, 1024, &lim, &err);
    assert_non_null(st);
    check_steps(st, kv, r);
    stepper_free(st);
    kvcache_free(kv);
    model_free(m);
    be->ops->close(be);
    ranks_release(&ranks);
}

static void check_model(const char *path, int tp, int pp, bool ep)
{
    struct error err = {0};
    struct config c = {0};
    struct placement p;
    struct tensorfile *f = tensorfile_open(path, &err);
    if (!f || !config_load(f, &c, &err))
        fail_msg("%s", err.msg);
    model_choose(&c, MODEL_PLAIN);
    struct placement_options o = {.tp = tp,
                                  .pp = pp,
                                  .ep = ep,
                                  .k_type = DT_F16,
                                  .v_type = DT_F16,
                                  .max_tokens = MAX_ROWS,
                                  .max_seqs = MAX_SEQS};
    if (!placement_make(f, &c, &o, &p, &err))
        fail_msg("%s", err.msg);
    for (int i = 0; i < p.n_ranks; i++)
        check_rank(f, &p, &p.ranks[i]);
    placement_clear(&p);
    tensorfile_close(f);
}

static void test_plan_is_what_ranks_do(void **state)
{
    (void)state;
    static const char *const models[] = {
        "qwen3moe", "qwen3",      "deepseek_v3", "gpt_oss_mxfp4", "gemma3", "gemma4_moe",
        "glm4_moe", "minimax_m2", "qwen3_5_moe", "qwen3_next",    "qwen2",  "mixtral"};
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        char path[128];
        snprintf(path, sizeof path, "tests/golden/%s", models[i]);
        check_model(path, 1, 1, false);
        check_model(path, 2, 1, false);
        check_model(path, 3, 1, i % 2);
        check_model(path, 4, 1, true);
        check_model(path, 1, 2, false);
        check_model(path, 2, 2, true);
    }
}

/* The prediction */

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-9 * fabs(b);
}

static const struct predict_link slow = {"slow", 10e-6, 1e9, ""};

static void test_sums(void **state)
{
    (void)state;
    assert_true(predict_sum(&slow, 1, 1e6) == 0);
    assert_true(near(predict_sum(&slow, 2, 1000), 10e-6 + 1e-6));      /* both send theirs */
    assert_true(near(predict_sum(&slow, 8, 1000), 30e-6 + 7e-6));      /* three rounds */
    assert_true(near(predict_sum(&slow, 4, 4e6), 2 * (20e-6 + 3e-3))); /* pieces, then sums */
    assert_true(near(predict_sum(&slow, 2, RANKS_GATHER_BYTES), 10e-6 + 32768e-9));
}

static void test_experts(void **state)
{
    (void)state;
    assert_true(predict_experts(0, 0, 5) == 0);
    assert_true(near(predict_experts(128, 8, 1), 8));
    assert_true(near(predict_experts(128, 8, 2), 15.5));
    assert_true(predict_experts(128, 8, 4096) > 127.99);
    assert_true(near(predict_busiest(0, 4), 0.25));
    assert_true(predict_busiest(1, 4) == 1);
    /* against draws: 8 and 512 things on 8 ranks */
    uint64_t seed = 1;
    static const int totals[] = {8, 64, 512};
    for (int k = 0; k < 3; k++) {
        double sum = 0;
        for (int round = 0; round < 2000; round++) {
            int n[8] = {0}, most = 0;
            for (int i = 0; i < totals[k]; i++) {
                seed = seed * 6364136223846793005u + 1442695040888963407u;
                int tp_rank = (int)(seed >> 61);
                most = ++n[tp_rank] > most ? n[tp_rank] : most;
            }
            sum += (double)most / totals[k];
        }
        double drawn = sum / 2000, said = predict_busiest(totals[k], 8);
        assert_true(said > 0.95 * drawn && said < 1.3 * drawn);
    }
}

static void check_cut(const double *cost, const bool *joined, int n, double front, double back,
                      int pp, const int *want)
{
    int first[8];
    assert_true(stages_cut(cost, joined, n, front, back, pp, first));
    for (int i = 0; i < pp; i++)
        if (first[i] != want[i])
            fail_msg("%d stages: stage %d begins with layer %d, not %d", pp, i, first[i], want[i]);
}

static void test_stages(void **state)
{
    (void)state;
    double even[10] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, dear[6] = {1, 1, 1, 1, 5, 3};
    bool joined[10] = {false};
    int first[8];
    /* alike: the first ones have more */
    check_cut(even, joined, 10, 0, 0, 3, (int[]){0, 4, 7});
    check_cut(even, joined, 10, 0, 0, 4, (int[]){0, 3, 6, 8});
    /* a head as dear as four layers, at the end or halved */
    check_cut(even, joined, 10, 0, 4, 2, (int[]){0, 7});
    check_cut(even, joined, 10, 2, 2, 2, (int[]){0, 5});
    check_cut(even, joined, 10, 3, 3, 3, (int[]){0, 3, 8});
    check_cut(dear, joined, 6, 0, 0, 3, (int[]){0, 4, 5});
    check_cut(dear, joined, 6, 0, 0, 6, (int[]){0, 1, 2, 3, 4, 5});
    /* layers 3 to 9 stay with layer 2 */
    for (int i = 3; i < 10; i++)
        joined[i] = true;
    check_cut(even, joined, 10, 0, 0, 2, (int[]){0, 2});
    check_cut(even, joined, 10, 0, 0, 3, (int[]){0, 1, 2});
    assert_false(stages_cut(even, joined, 10, 0, 0, 4, first));
    double none[3] = {0, 0, 0};
    check_cut(none, (bool[3]){false}, 3, 0, 0, 3, (int[]){0, 1, 2});
}

static void test_parts(void **state)
{
    (void)state;
    /* sequences take turns, one part for each stage; a single one has nothing to take turns with */
    assert_int_equal(pipeline_parts(2, 8, 16, 16, 16), 2);
    assert_int_equal(pipeline_parts(4, 8, 3, 3, 3), 3);
    assert_int_equal(pipeline_parts(4, 8, 1, 1, 1), 1);
    /* a prompt: as many as are done soonest; the dearer a part, the fewer */
    assert_int_equal(pipeline_parts(2, 0, 512, 1, 1), 2);
    static const int rows[] = {1, 64, 128, 256, 512, 1024}, parts[] = {1, 1, 1, 2, 3, 4};
    for (int i = 0; i < 6; i++)
        assert_int_equal(pipeline_parts(2, 64, rows[i], 1, 1), parts[i]);
    for (int n = 1; n <= 4096; n = n * 3 / 2 + 1)
        for (int pp = 2; pp <= 16; pp *= 2) {
            int few = pipeline_parts(pp, 200, n, 1, 1), many = pipeline_parts(pp, 10, n, 1, 1);
            assert_true(few >= 1 && few <= many && many <= (pp > 8 ? pp : 8));
            assert_true(many == 1 || n >= many * PARTS_ROWS);
        }
    /* what follows keeps the stages busy: one part for each */
    assert_int_equal(pipeline_parts(2, 64, 1024, 1, 0), 2);
    /* logits of all rows: so do they */
    assert_int_equal(pipeline_parts(2, 64, 32, 1, 32), 2);
}

static void test_steps(void **state)
{
    (void)state;
    struct predict_device d = {"d", 0, 1e9, 1e12, 1e-3, ""};
    struct predict_work w = {.layers = 2, .bytes = 1e9, .params = 1e9, .kv_bytes = 1000};
    struct predict_comm t = {.tp = 1, .pp = 1, .embd = 100, .vocab = 1000};
    struct predict_load one = {1, 1, 1, 0};
    struct predict_step s = predict_step(&w, &t, &d, &slow, &slow, &one);
    assert_true(near(s.seconds, 1 + 2e-3) && s.bound == BOUND_MEMORY);
    struct predict_load deep = {1, 1, 1, 1e6}; /* a cache as large as the weights */
    assert_true(near(predict_step(&w, &t, &d, &slow, &slow, &deep).memory, 2));
    struct predict_load prompt = {1000, 1, 1, 0};
    s = predict_step(&w, &t, &d, &slow, &slow, &prompt);
    assert_true(near(s.compute, 2) && s.bound == BOUND_COMPUTE && near(s.seconds, 2 + 2e-3));
    /* two ranks: four sums of 400 bytes, and what rank 0 says */
    t.tp = 2;
    t.sums = 4;
    s = predict_step(&w, &t, &d, &slow, &slow, &one);
    assert_true(near(s.latency, 4 * 10e-6 + 10e-6));
    assert_true(near(s.transfer, 4 * 400e-9 + 4096e-9));
    /* stages: a single sequence goes through all of them, which need not be alike; several in parts,
     * one for each stage */
    struct predict_work stages[4] = {w, w, w, w};
    struct predict_comm talks[4];
    for (int i = 0; i < 4; i++)
        talks[i] = (struct predict_comm){.tp = 1, .pp = 4, .embd = 100, .vocab = 1000};
    s = predict_step(stages, talks, &d, &slow, &slow, &one);
    assert_true(near(s.memory, 4));
    assert_true(near(s.latency, 3 * 10e-6 + 10e-6 + 2 * 10e-6));
    assert_true(near(s.transfer, 3 * 400e-9 + 4000e-9 + 4096e-9));
    struct predict_load many = {8, 8, 8, 0};
    assert_int_equal(predict_parts(talks, &many), 4);
    s = predict_step(stages, talks, &d, &slow, &slow, &many);
    assert_true(s.memory > 4 && s.memory < 4.01); /* while one part goes round, the others do */
    struct predict_load read = {64, 1, 1, 0};
    s = predict_step(stages, talks, &d, &slow, &slow, &read);
    assert_true(near(s.memory, 7)); /* four stages and three parts behind */
    stages[3].bytes = 3e9;
    assert_true(near(predict_step(stages, talks, &d, &slow, &slow, &one).memory, 6));
    s = predict_step(stages, talks, &d, &slow, &slow, &many);
    assert_true(s.seconds > 12 && s.seconds < 12.1); /* the slowest stage is never idle */
    /* first and last stage share the head, whose halves are computed at once: a row of 100 floats goes to the
     * first, 500 logits come */
    struct predict_work ends[2] = {w, w};
    for (int i = 0; i < 2; i++) {
        ends[i].bytes = 2e9;
        ends[i].head_bytes = 1e9;
        talks[i] =
            (struct predict_comm){.tp = 1, .pp = 2, .embd = 100, .vocab = 1000, .head_rows = 500};
    }
    s = predict_step(ends, talks, &d, &slow, &slow, &one);
    assert_true(near(s.memory, 3) && near(s.seconds, s.memory + s.layers + s.latency + s.transfer));
    assert_true(near(s.latency, 3 * 10e-6 + 10e-6));
    assert_true(near(s.transfer, 400e-9 + 400e-9 + 2000e-9 + 4096e-9));
    struct predict_traffic said = predict_traffic(talks, 1, 0, &one);
    assert_true(near(said.messages, 3) && near(said.bytes, 400 + 2000));
    /* experts: half of them met by one row; whole ones on two ranks, the busiest */
    w = (struct predict_work){.layers = 1, .expert_bytes = 1e9, .n_expert = 2, .n_used = 1};
    t = (struct predict_comm){.tp = 1, .pp = 1, .embd = 100, .vocab = 1000};
    assert_true(near(predict_step(&w, &t, &d, &slow, &slow, &one).memory, 0.5));
    t.tp = 2;
    t.ep = true;
    assert_true(near(predict_step(&w, &t, &d, &slow, &slow, &one).memory, 1));
    /* many rows: a rank has half of what they chose, and what chance adds */
    w = (struct predict_work){
        .layers = 1, .expert_bytes = 1e9, .expert_params = 1e9, .n_expert = 4, .n_used = 2};
    struct predict_load rows = {1000, 1, 1, 0};
    s = predict_step(&w, &t, &d, &slow, &slow, &rows);
    assert_true(near(s.memory, 1) && s.compute > 1 && s.compute < 1.1);
}

static void test_words(void **state)
{
    (void)state;
    struct predict_link l;
    struct predict_device d;
    struct error err = {0};
    assert_true(predict_link_parse("nvlink", &l, &err) && near(l.rate, 360e9));
    assert_true(predict_link_parse("12us:3GB/s", &l, &err));
    assert_true(near(l.latency, 12e-6) && near(l.rate, 3e9));
    assert_true(predict_device_parse("20GB/s:500GFLOPS:5us", &d, &err));
    assert_true(near(d.read, 20e9) && near(d.flops, 5e11) && near(d.layer, 5e-6));
    static const char *const bad[] = {
        "",           "nvlink2",       "12us",          "12us:",       "us:GB/s",
        "-1us:3GB/s", "1us:0GB/s",     "nanus:3GB/s",   "1us:3",       "infus:3GB/s",
        "1us:3GB/sx", "1e400us:1GB/s", "1us:1e400GB/s", "1us:3GB/s:4", "0x1p2000us:1GB/s"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_false(predict_link_parse(bad[i], &l, &err));
        assert_false(predict_device_parse(bad[i], &d, &err));
        assert_null(strchr(err.msg, '\n'));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plan_is_what_ranks_do),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_experts),
        cmocka_unit_test(test_stages),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_steps),
        cmocka_unit_test(test_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
