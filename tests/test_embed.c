/*
 * Embeddings: hidden states, pooled vectors and scores against what other software computed; texts
 * together and alone; clients that take turns; what sentence-transformers' files say, and broken ones.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "engine/embed.h"
#include "backend/backend.h"
#include "backend/devices.h"
#include "golden.h"
#include "steel.h"

#include <pthread.h>
#include <unistd.h>

static const struct {
    const char *name, *large;
    enum pooling_kind kind;
} models[] = {
    {"bert", "models/bert", POOLING_MEAN},
    {"xlm_roberta", "families/xlm_roberta", POOLING_CLS},
    {"modernbert", "families/modernbert", POOLING_MEAN},
    {"qwen3_embedding", "families/qwen3_embedding", POOLING_LAST},
    {"bert_rerank", "families/bert_rerank", POOLING_RANK},
    {"xlm_roberta_rerank", "families/xlm_roberta_rerank", POOLING_RANK},
};
enum { N_MODELS = sizeof models / sizeof *models };

/* STEEL_TEST_DEVICE=cuda: the same tests on a GPU. STEEL_ISA asks for kernels of the CPU. */
static const char *device(void)
{
    return getenv("STEEL_ISA") ? NULL : getenv("STEEL_TEST_DEVICE");
}

static bool on_cpu(void)
{
    return device_kind(device()) == DEVICE_CPU;
}

static struct embedder *open_with(const char *path, int kind, enum dtype kv, bool deterministic)
{
    struct error err = {0};
    struct embed_options opt = {.pooling = kind, .normalize = kind != POOLING_RANK};
    opt.runtime.k_type = opt.runtime.v_type = kv;
    opt.runtime.backend.threads = 2;
    opt.runtime.backend.deterministic = deterministic && on_cpu();
    opt.runtime.backend.device = device();
    struct embedder *e = embedder_open(path, &opt, &err);
    if (!e)
        fail_msg("%s: %s", path, err.msg);
    const char *name = embedder_runtime(e)->be->ops->name;
    assert_int_equal(strcmp(name, "cuda") != 0 && strcmp(name, "vulkan") != 0, on_cpu());
    return e;
}

/* One text through the model; out as its pooling says. */
static void embed(struct embedder *e, const int32_t *ids, int n, float *out)
{
    struct error err = {0};
    struct embed_text t = {.ids = (int32_t *)(uintptr_t)ids, .n = n, .out = out};
    struct embed_job job = {.texts = &t, .n = 1};
    if (!embedder_run(e, &job, &err))
        fail_msg("%s", err.msg);
}

static double cosine(const float *a, const float *b, int n)
{
    double ab = 0, aa = 0, bb = 0;
    for (int i = 0; i < n; i++) {
        ab += (double)a[i] * b[i];
        aa += (double)a[i] * a[i];
        bb += (double)b[i] * b[i];
    }
    return ab / sqrt(aa * bb);
}

/* Largest difference, of the largest value. */
static double relative(const float *a, const float *b, size_t n)
{
    double diff = 0, most = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        diff = d <= diff ? diff : d;
        most = fmax(most, fabs((double)a[i]));
    }
    return diff / most;
}

static void check_hidden(const char *path, const struct logits *g, bool reference)
{
    struct embedder *e = open_with(path, POOLING_NONE, reference ? DT_F32 : DT_NONE, false);
    size_t n = (size_t)g->n_tokens * (size_t)g->n_vocab;
    float *rows = mem_zalloc(n, sizeof *rows);
    embed(e, g->ids, g->n_tokens, rows);
    struct logits mine = {g->n_tokens, g->n_vocab, g->ids, rows};
    double diff = logits_max_diff(g, &mine), least = 1;
    for (int t = 0; t < g->n_tokens; t++) {
        const float *a = g->rows + (size_t)t * (size_t)g->n_vocab;
        least = fmin(least, cosine(a, rows + (size_t)t * (size_t)g->n_vocab, g->n_vocab));
    }
    print_message("%-40s %s: largest difference %.2g, least cosine %.8f\n", path,
                  reference ? "reference" : "default", diff, least);
    assert_true(reference ? diff <= 2e-3 : least >= 0.9999);
    mem_free(rows);
    embedder_close(e);
}

static void check_pooled(const char *path, const struct logits *g, enum pooling_kind kind,
                         bool reference)
{
    char file[300];
    snprintf(file, sizeof file, "%s/pooled.bin", path);
    if (!golden_here(file))
        return;
    FILE *f = fopen(file, "rb");
    int32_t head[2];
    assert_true(f && fread(head, 4, 2, f) == 2 && head[0] == 1);
    struct embedder *e = open_with(path, (int)kind, reference ? DT_F32 : DT_NONE, false);
    int n = embedder_width(e);
    assert_int_equal(n, head[1]);
    float *want = mem_zalloc((size_t)n, sizeof *want), *mine = mem_zalloc((size_t)n, sizeof *mine);
    assert_true(fread(want, 4, (size_t)n, f) == (size_t)n);
    fclose(f);
    embed(e, g->ids, g->n_tokens, mine);
    double diff = relative(want, mine, (size_t)n);
    print_message("%-40s %s: %s off by %.2g\n", path, reference ? "reference" : "default",
                  pooling_name(kind), diff);
    if (reference)
        assert_true(diff <= 1e-4);
    else if (kind != POOLING_RANK)
        assert_true(cosine(want, mine, n) >= 0.9999);
    else
        assert_true(diff <= 1e-2);
    mem_free(want);
    mem_free(mine);
    embedder_close(e);
}

static void check_model(const char *path, enum pooling_kind kind)
{
    char file[300];
    snprintf(file, sizeof file, "%s/golden.bin", path);
    struct logits g = logits_read(file);
    for (int reference = 0; reference < 2; reference++) {
        if (reference)
            setenv("STEEL_ISA", "ref", 1);
        check_hidden(path, &g, reference);
        check_pooled(path, &g, kind, reference);
        unsetenv("STEEL_ISA");
    }
    logits_free(&g);
}

static void small_models(void **state)
{
    (void)state;
    for (int i = 0; i < N_MODELS; i++) {
        char path[256];
        snprintf(path, sizeof path, MICRO "%s", models[i].name);
        check_model(path, models[i].kind);
    }
}

static void larger_models(void **state)
{
    (void)state;
    GOLDEN_NEEDED(GOLDEN "families/");
    for (int i = 0; i < N_MODELS; i++) {
        char path[256];
        snprintf(path, sizeof path, GOLDEN "%s", models[i].large);
        check_model(path, models[i].kind);
    }
}

enum { N_TEXTS = 200 };

/* Texts of many lengths. ids: (sum of lengths) */
static int make_texts(struct embed_text *texts, int n, int longest, int n_vocab, int32_t **ids)
{
    int total = 0;
    for (int i = 0; i < n; i++)
        total += texts[i].n = 1 + i * 37 % longest;
    *ids = mem_zalloc((size_t)total, sizeof **ids);
    for (int i = 0, at = 0; i < n; at += texts[i++].n) {
        texts[i].ids = *ids + at;
        for (int t = 0; t < texts[i].n; t++)
            texts[i].ids[t] = (int32_t)((unsigned)(i * 131 + t * 7919) % (unsigned)n_vocab);
    }
    return total;
}

/* The same text by itself. Returns how far apart the two are: on a GPU other numbers of rows have other
 * kernels. */
static double check_alone(struct embedder *e, const struct embed_text *t)
{
    int width = embedder_width(e);
    float *alone = mem_zalloc((size_t)width, sizeof *alone);
    embed(e, t->ids, t->n, alone);
    if (on_cpu())
        assert_memory_equal(alone, t->out, (size_t)width * sizeof *alone);
    double off = on_cpu()    ? 0
                 : width > 1 ? 1 - cosine(alone, t->out, width)
                             : fabs((double)*alone - (double)*t->out);
    assert_true(off <= (width > 1 ? 1e-4 : 5e-3));
    mem_free(alone);
    return off;
}

/* A text's vector does not depend on what else is in the step. */
static void together_is_alone(void **state)
{
    (void)state;
    for (int m = 0; m < N_MODELS; m++) {
        char path[256];
        snprintf(path, sizeof path, MICRO "%s", models[m].name);
        struct embedder *e = open_with(path, (int)models[m].kind, DT_NONE, true);
        struct embed_text texts[N_TEXTS] = {0};
        int32_t *ids;
        int width = embedder_width(e), n_vocab = embedder_runtime(e)->model->config.n_vocab;
        int longest = embedder_context(e) < 100 ? embedder_context(e) : 100;
        int total = make_texts(texts, N_TEXTS, longest, n_vocab, &ids);
        float *out = mem_zalloc(N_TEXTS * (size_t)width, sizeof *out);
        for (int i = 0; i < N_TEXTS; i++)
            texts[i].out = out + (size_t)i * (size_t)width;
        struct error err = {0};
        struct embed_job job = {.texts = texts, .n = N_TEXTS};
        if (!embedder_run(e, &job, &err))
            fail_msg("%s", err.msg);
        struct embed_stats s;
        embedder_stats(e, &s);
        assert_true(s.n_texts == N_TEXTS && s.n_tokens == (uint64_t)total);
        assert_true(s.n_steps <= (uint64_t)(total / 1024 + 1)); /* they shared steps */
        double worst = 0;
        for (int i = 0; i < N_TEXTS; i++)
            worst = fmax(worst, check_alone(e, &texts[i]));
        print_message("%-40s together and alone: %.2g apart at most\n", path, worst);
        mem_free(out);
        mem_free(ids);
        embedder_close(e);
    }
}

/* Steps follow each other, of a few texts each; on a GPU one computes while the one before is ended. */
static void steps_follow(void **state)
{
    (void)state;
    enum { N = 24, CONTEXT = 32 };
    static const int of[] = {0, 1, 3, 4}; /* the mean, the first, the last row, and scores */
    for (int m = 0; m < 4; m++) {
        struct error err = {0};
        char path[256];
        snprintf(path, sizeof path, MICRO "%s", models[of[m]].name);
        struct embed_options opt = {.pooling = (int)models[of[m]].kind, .normalize = -1};
        opt.runtime.context = opt.runtime.max_tokens = CONTEXT;
        opt.runtime.max_seqs = 16;
        opt.runtime.backend.device = device();
        opt.runtime.backend.deterministic = on_cpu();
        struct embedder *e = embedder_open(path, &opt, &err);
        if (!e)
            fail_msg("%s: %s", path, err.msg);
        struct embed_text texts[N] = {0};
        int32_t *ids;
        int width = embedder_width(e), n_vocab = embedder_runtime(e)->model->config.n_vocab;
        int total = make_texts(texts, N, CONTEXT, n_vocab, &ids);
        float *out = mem_zalloc(N * (size_t)width, sizeof *out);
        for (int i = 0; i < N; i++)
            texts[i].out = out + (size_t)i * (size_t)width;
        struct embed_job job = {.texts = texts, .n = N};
        if (!embedder_run(e, &job, &err))
            fail_msg("%s: %s", path, err.msg);
        struct embed_stats s;
        embedder_stats(e, &s);
        assert_true(s.n_texts == N && s.n_tokens == (uint64_t)total);
        assert_true(s.n_steps >= (uint64_t)(total / CONTEXT));
        for (int i = 0; i < N; i++)
            check_alone(e, &texts[i]);
        mem_free(out);
        mem_free(ids);
        embedder_close(e);
    }
}

/* The reference ops, too, have two steps in flight. */
static void steps_follow_in_ref(void **state)
{
    if (!on_cpu())
        skip();
    setenv("STEEL_ISA", "ref", 1);
    steps_follow(state);
    unsetenv("STEEL_ISA");
}

/* A decoder reads a text that is longer than a step piece by piece. */
static void long_texts(void **state)
{
    (void)state;
    static const enum pooling_kind kinds[] = {POOLING_LAST, POOLING_MEAN, POOLING_CLS};
    for (int k = 0; k < 3; k++) {
        float out[2][256];
        int width = 0;
        for (int small = 0; small < 2; small++) {
            struct error err = {0};
            struct embed_options opt = {.pooling = (int)kinds[k], .normalize = 1};
            opt.runtime.k_type = opt.runtime.v_type = DT_F32;
            opt.runtime.backend.deterministic = on_cpu();
            opt.runtime.backend.device = device();
            opt.runtime.max_tokens = small ? 64 : 0;
            opt.runtime.max_seqs = 16;
            struct embedder *e = embedder_open(MICRO "qwen3_embedding", &opt, &err);
            assert_non_null(e);
            int32_t ids[300];
            for (int i = 0; i < 300; i++)
                ids[i] = i * 31 % embedder_runtime(e)->model->config.n_vocab;
            width = embedder_width(e);
            assert_true(width <= 256);
            embed(e, ids, 300, out[small]);
            embedder_close(e);
        }
        if (on_cpu())
            assert_memory_equal(out[0], out[1], (size_t)width * sizeof(float));
        assert_true(cosine(out[0], out[1], width) >= 0.9999);
    }
}

struct order {
    pthread_mutex_t lock;
    pthread_cond_t done;
    int n, first; /* jobs that are done; which was */
};

static void note(struct embed_job *job)
{
    struct order *o = job->user;
    pthread_mutex_lock(&o->lock);
    if (o->n++ == 0)
        o->first = (int)job->client;
    pthread_cond_signal(&o->done);
    pthread_mutex_unlock(&o->lock);
}

static void wait_for(struct order *o, int n)
{
    pthread_mutex_lock(&o->lock);
    while (o->n < n)
        pthread_cond_wait(&o->done, &o->lock);
    pthread_mutex_unlock(&o->lock);
}

/* Thousands of texts of one client do not keep another's one waiting; a cancelled job ends at once. */
static void clients_take_turns(void **state)
{
    (void)state;
    enum { MANY = 6000 };
    struct embedder *e = open_with(MICRO "bert", POOLING_MEAN, DT_NONE, false);
    struct embed_text *texts = mem_zalloc(MANY, sizeof *texts), one = {.n = 3};
    int32_t *ids, three[] = {5, 6, 7};
    int width = embedder_width(e);
    make_texts(texts, MANY, 60, embedder_runtime(e)->model->config.n_vocab, &ids);
    float *out = mem_zalloc((MANY + 1) * (size_t)width, sizeof *out);
    for (int i = 0; i < MANY; i++)
        texts[i].out = out + (size_t)i * (size_t)width;
    one.ids = three;
    one.out = out + MANY * (size_t)width;
    struct order o = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0};
    struct embed_job many = {.texts = texts, .n = MANY, .client = 1, .done = note, .user = &o};
    struct embed_job few = {.texts = &one, .n = 1, .client = 2, .done = note, .user = &o};
    struct error err = {0};
    assert_true(embedder_submit(e, &many, &err));
    assert_true(embedder_submit(e, &few, &err));
    wait_for(&o, 2);
    assert_int_equal(o.first, 2);
    assert_true(many.ok && few.ok);

    struct embed_stats before, after;
    embedder_stats(e, &before);
    o.n = 0;
    atomic_store(&many.cancel, true);
    assert_true(embedder_submit(e, &many, &err));
    wait_for(&o, 1);
    embedder_stats(e, &after);
    assert_false(many.ok);
    assert_string_equal(many.err.msg, "cancelled");
    assert_true(after.n_texts == before.n_texts && after.n_waiting == 0);

    /* More than may wait: refused, and nothing of it was taken. */
    o.n = 0;
    atomic_store(&many.cancel, false);
    assert_true(embedder_submit(e, &many, &err));
    struct embed_job more[8];
    int taken = 0;
    for (int i = 0; i < 8; i++) {
        more[i] =
            (struct embed_job){.texts = texts, .n = MANY, .client = 3, .done = note, .user = &o};
        if (embedder_submit(e, &more[i], &err))
            taken++;
    }
    assert_true(taken < 8);
    assert_non_null(strstr(err.msg, "try again later"));
    for (int i = 0; i < 8; i++)
        atomic_store(&more[i].cancel, true);
    embedder_close(e); /* ends what waits */
    assert_int_equal(o.n, 1 + taken);
    mem_free(texts);
    mem_free(out);
    mem_free(ids);
}

/* What a folder of sentence-transformers says. */

static char dir[64];

static void write_file(const char *name, const char *text)
{
    char path[200];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void make_folder(const char *model)
{
    static const char *const files[] = {"config.json", "model.safetensors"};
    char from[512], to[200], cwd[256];
    assert_non_null(getcwd(cwd, sizeof cwd));
    snprintf(dir, sizeof dir, "/tmp/steel-embed-XXXXXX");
    assert_non_null(mkdtemp(dir));
    for (int i = 0; i < 2; i++) {
        snprintf(from, sizeof from, "%s/" MICRO "%s/%s", cwd, model, files[i]);
        snprintf(to, sizeof to, "%s/%s", dir, files[i]);
        assert_int_equal(symlink(from, to), 0);
    }
    snprintf(to, sizeof to, "%s/1_Pooling", dir);
    assert_int_equal(mkdir(to, 0700), 0);
}

static void remove_folder(void)
{
    static const char *const files[] = {"config.json",  "model.safetensors",
                                        "modules.json", "1_Pooling/config.json",
                                        "1_Pooling",    ""};
    for (int i = 0; i < 6; i++) {
        char path[200];
        snprintf(path, sizeof path, "%s/%s", dir, files[i]);
        remove(path);
    }
}

#define MODULES(extra)                                                                             \
    "[{\"idx\":0,\"path\":\"\",\"type\":\"sentence_transformers.models.Transformer\"},"            \
    "{\"idx\":1,\"path\":\"1_Pooling\",\"type\":\"sentence_transformers.models.Pooling\"}" extra   \
    "]"
#define NORMALIZE                                                                                  \
    ",{\"idx\":2,\"path\":\"2_Normalize\",\"type\":\"sentence_transformers.models.Normalize\"}"

static void modules_are_obeyed(void **state)
{
    (void)state;
    static const struct {
        const char *modules, *pooling;
        int kind, normalize;
        const char *error; /* NULL: it is read */
    } cases[] = {
        {MODULES(NORMALIZE), "{\"pooling_mode_cls_token\":true}", POOLING_CLS, 1, NULL},
        {MODULES(""), "{\"pooling_mode_mean_tokens\":true,\"pooling_mode_cls_token\":false}",
         POOLING_MEAN, 0, NULL},
        {MODULES(""), "{\"pooling_mode\":\"lasttoken\"}", POOLING_LAST, 0, NULL},
        {MODULES(""), "{\"pooling_mode_max_tokens\":true}", 0, 0, "pooling_mode_max_tokens"},
        {MODULES(""), "{\"pooling_mode_cls_token\":true,\"pooling_mode_mean_tokens\":true}", 0, 0,
         "several ways"},
        {MODULES(""), "{}", 0, 0, "no way of pooling"},
        {MODULES(""), "[", 0, 0, "1_Pooling/config.json"},
        {"{\"a\": 1}", "{}", 0, 0, "not a list"},
        {"[{\"type\": \"x.WordWeights\", \"path\": \"w\"}]", "{}", 0, 0, "x.WordWeights"},
        {"[{\"type\": \"x.Dense\", \"path\": \"../../etc\"}]", "{}", 0, 0, "type and path"},
        {"[{\"type\": \"x.Dense\", \"path\": \"/etc\"}]", "{}", 0, 0, "type and path"},
        {"[{\"type\": \"x.Dense\", \"path\": \"3_Dense\"}]", "{}", 0, 0, "3_Dense"},
    };
    make_folder("bert");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct embed_options opt = {.pooling = -1, .normalize = -1};
        struct error err = {0};
        write_file("modules.json", cases[i].modules);
        write_file("1_Pooling/config.json", cases[i].pooling);
        struct embedder *e = embedder_open(dir, &opt, &err);
        if (cases[i].error) {
            assert_null(e);
            if (!strstr(err.msg, cases[i].error))
                fail_msg("\"%s\" says nothing of %s", err.msg, cases[i].error);
            continue;
        }
        if (!e)
            fail_msg("%s", err.msg);
        assert_int_equal(embedder_pooling(e)->kind, cases[i].kind);
        assert_int_equal(embedder_pooling(e)->normalize, cases[i].normalize);
        embedder_close(e);
    }
    remove_folder();
}

static void what_cannot_be_is_said(void **state)
{
    (void)state;
    struct error err = {0};
    struct embed_options opt = {.pooling = POOLING_RANK, .normalize = -1};
    assert_null(embedder_open(MICRO "bert", &opt, &err));
    assert_non_null(strstr(err.msg, "classifier"));
    opt.pooling = -1;
    opt.runtime.context = 100000;
    assert_null(embedder_open(MICRO "bert", &opt, &err));
    assert_non_null(strstr(err.msg, "the model has"));
    struct runtime_options ro = {0};
    assert_null(runtime_open(MICRO "bert", &ro, &err));
    assert_non_null(strstr(err.msg, "steel embed"));
}

/* The same through the library. */
static void the_library(void **state)
{
    (void)state;
    struct steel_error err = {0};
    struct logits g = logits_read(MICRO "xlm_roberta/golden.bin");
    struct steel_embedder_options o = {.pooling = "none", .device = "cpu", .threads = 2};
    struct steel_embedder *e = steel_embedder_open(MICRO "xlm_roberta", &o, &err);
    assert_non_null(e);
    int width = steel_embedder_width(e);
    assert_true(width == g.n_vocab && steel_embedder_context(e) == 128);
    float *rows = mem_zalloc((size_t)g.n_tokens * (size_t)width, sizeof *rows);
    assert_true(steel_embed_tokens(e, g.ids, g.n_tokens, rows, &err));
    assert_true(relative(g.rows, rows, (size_t)g.n_tokens * (size_t)width) < 1e-2);
    assert_false(steel_embed_tokens(e, g.ids, 0, rows, &err));
    assert_int_equal(err.kind, STEEL_TOO_LONG);
    assert_false(steel_embed_tokens(e, (const int32_t[]){1 << 20}, 1, rows, &err));
    assert_non_null(strstr(err.message, "vocabulary"));
    assert_false(steel_embed(e, (const char *const[]){"a"}, 1, 0, rows, &err));
    assert_false(steel_rerank(e, "a", (const char *const[]){"a"}, 1, 0, rows, &err));
    steel_embedder_close(e);

    o = (struct steel_embedder_options){.rank = true, .device = "cpu"};
    e = steel_embedder_open(MICRO "xlm_roberta_rerank", &o, &err);
    assert_non_null(e);
    assert_int_equal(steel_embedder_width(e), 1);
    /* The golden model has no tokenizer: said, and nothing else happens. */
    assert_false(steel_rerank(e, "a", (const char *const[]){"b", "c"}, 2, 0, rows, &err));
    assert_non_null(strstr(err.message, "no tokenizer"));
    steel_embedder_close(e);
    o.pooling = "max";
    assert_null(steel_embedder_open(MICRO "xlm_roberta", &o, &err));
    assert_non_null(strstr(err.message, "pooling"));
    mem_free(rows);
    logits_free(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_models),           cmocka_unit_test(larger_models),
        cmocka_unit_test(steps_follow_in_ref),    cmocka_unit_test(steps_follow),
        cmocka_unit_test(together_is_alone),      cmocka_unit_test(long_texts),
        cmocka_unit_test(clients_take_turns),     cmocka_unit_test(modules_are_obeyed),
        cmocka_unit_test(what_cannot_be_is_said), cmocka_unit_test(the_library),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
