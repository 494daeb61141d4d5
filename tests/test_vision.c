/*
 * Image towers against transformers, for every folder of tests/golden_images (and of ../shared/golden/vision, where it is
 * present): an image's pixels after preprocessing, the tower's features from the golden's pixels, M-RoPE positions, and
 * the decoder's logits from the features computed here, whole and in chunks. On the reference and on the CPU's kernels.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <pthread.h>

#include "golden.h"
#include "backend/backend.h"
#include "base/buf.h"
#include "vision/encoder.h"

#include <ctype.h>

enum { IMAGES = 2, MAX_TOKENS = 256, CAP = 1 << 20 };
static const float NEAR_TIE =
    2e-3f; /* relative margin of two experts; products in fp16 are off by as much */

static const char *const models[] = {"qwen3_vl",  "qwen3_vl_moe", "qwen3_5",  "qwen3_5_moe",
                                     "gemma3",    "gemma4",       "mistral3", "glm46v",
                                     "glm4v_moe", "qwen2_5_vl",   "internvl", "smolvlm",
                                     "lfm2_vl",   "kimi_k25",     "llava",    "minicpmv4_6"};

/* A golden: its folder and what input.json says. */
struct golden {
    char path[256];
    struct logits want;
    struct image_span spans[MAX_TOKENS]; /* (n_spans) runs of placeholders */
    int n_spans;
    int32_t pos[MAX_TOKENS * 3], see[MAX_TOKENS * 2]; /* prompt_rows */
    bool has_pos;
    int rope_delta;
    struct patches pixels[IMAGES]; /* of pixel_values.bin */
};

static FILE *open_in(const struct golden *g, const char *name)
{
    char path[320];
    snprintf(path, sizeof path, "%s/%s", g->path, name);
    FILE *f = fopen(path, "rb");
    if (!f)
        fail_msg("cannot open %s", path);
    return f;
}

/* A record: i32 n, i32 dims[n], floats; here two dims. */
static float *read_record(FILE *f, int *rows, int *cols)
{
    int32_t head[3];
    assert_int_equal(fread(head, 4, 3, f), 3);
    assert_int_equal(head[0], 2);
    size_t n = (size_t)head[1] * (size_t)head[2];
    float *v = mem_zalloc(n, sizeof *v);
    assert_int_equal(fread(v, sizeof *v, n, f), n);
    *rows = head[1];
    *cols = head[2];
    return v;
}

static int number(const json_t *list, size_t i)
{
    return (int)json_integer_value(json_array_get(list, i));
}

/* The runs of features in the prompt. Their number must be the plans'. */
static void read_spans(struct golden *g, const json_t *o, const struct tower_config *t)
{
    const json_t *counts = json_object_get(o, "features_per_image");
    int image = (int)json_integer_value(json_object_get(o, "image_token_id")), at = 0;
    for (int i = 0; i < IMAGES; i++) {
        const struct image_plan *p = &g->pixels[i].plan;
        assert_int_equal(plan_features(t, p), number(counts, (size_t)i));
        for (int k = 0; k < plan_n_runs(t, p); k++) {
            int n = plan_run_length(t, p, k);
            bool grid = tower_has_grid_positions(t);
            while (at < g->want.n_tokens && g->want.ids[at] != image)
                at++;
            g->spans[g->n_spans++] = (struct image_span){at, grid ? p->views[0].rows / t->merge : 1,
                                                         grid ? p->views[0].cols / t->merge : n};
            for (int j = at; j < at + n; j++) {
                assert_true(j < g->want.n_tokens && g->want.ids[j] == image);
                g->see[2 * j] = at;
                g->see[2 * j + 1] = at + n;
            }
            at += n;
        }
    }
    for (; at < g->want.n_tokens; at++)
        assert_int_not_equal(g->want.ids[at], image);
}

static void read_pixels(struct golden *g, const json_t *o, const struct tower_config *t)
{
    static uint8_t bytes[16 * CAP];
    const json_t *sizes = json_object_get(o, "image_sizes_wh");
    struct pixel_record r = {0};
    struct error err = {0};
    FILE *f = open_in(g, "pixel_values.bin");
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    memcpy(&r.n_dims, bytes, 4);
    assert_in_range(r.n_dims, 2, 5);
    memcpy(r.dims, bytes + 4, 4 * (size_t)r.n_dims);
    r.values = (const float *)(const void *)(bytes + 4 + 4 * (size_t)r.n_dims);
    size_t values = 1;
    for (int i = 0; i < r.n_dims; i++)
        values *= (size_t)r.dims[i];
    assert_int_equal(n, 4 + 4 * (size_t)r.n_dims + 4 * values);
    for (int i = 0; i < IMAGES; i++) {
        const json_t *size = json_array_get(sizes, (size_t)i);
        struct image_plan plan;
        if (!plan_image(t, number(size, 0), number(size, 1), &plan, &err))
            fail_msg("%s", err.msg);
        if (!patches_take(t, &plan, &r, &g->pixels[i]))
            fail_msg("%s: pixel_values.bin: not the pixels of image %d", g->path, i);
    }
}

static void golden_read(struct golden *g, const char *path, const struct tower_config *t)
{
    struct error err = {0};
    char file[320];
    *g = (struct golden){0};
    snprintf(g->path, sizeof g->path, "%s", path);
    snprintf(file, sizeof file, "%s/golden.bin", path);
    g->want = logits_read(file);
    assert_true(g->want.n_tokens <= MAX_TOKENS);
    snprintf(file, sizeof file, "%s/input.json", path);
    json_t *o = json_load_path(file, CAP, &err);
    const json_t *planes = json_object_get(o, "position_ids");
    g->has_pos = json_array_size(planes) == 3;
    assert_int_equal(g->has_pos, tower_has_grid_positions(t));
    for (int i = 0; g->has_pos && i < g->want.n_tokens; i++)
        for (size_t k = 0; k < 3; k++)
            g->pos[3 * i + (int)k] = number(json_array_get(planes, k), (size_t)i);
    g->rope_delta = (int)json_integer_value(json_object_get(o, "rope_delta"));
    read_pixels(g, o, t);
    read_spans(g, o, t);
    json_decref(o);
}

static void golden_clear(struct golden *g)
{
    for (int i = 0; i < IMAGES; i++)
        patches_free(&g->pixels[i]);
    logits_free(&g->want);
}

/* STEEL_TEST_DEVICE: a GPU in place of the CPU. The reference needs none. */
static const char *device(void)
{
    return getenv("STEEL_ISA") ? "cpu" : getenv("STEEL_TEST_DEVICE");
}

static struct tensorfile *opened; /* of open_encoder: its mapped weights are read in each step */

static struct encoder *open_encoder(const char *path, enum dtype kv_type)
{
    struct error err = {0};
    struct encoder_options opt = {.backend = {.device = device(), .threads = 2},
                                  .kv_type = kv_type};
    opened = tensorfile_open(path, &err);
    assert_non_null(opened);
    struct encoder *e = encoder_open(opened, &opt, &err);
    if (!e)
        fail_msg("%s", err.msg);
    return e;
}

static void close_encoder(struct encoder *e)
{
    encoder_close(e);
    tensorfile_close(opened);
}

static double most_difference(const float *a, const float *b, size_t n)
{
    double most = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)a[i] - (double)b[i]);
        most = d <= most ? most : d;
    }
    return most;
}

/* The difference of the features of both images from the goldens', over all levels. */
static double compare_features(const struct golden *g, const struct encoder *e,
                               const struct features *got)
{
    const struct tower_config *t = encoder_config(e);
    double most = 0;
    FILE *f = open_in(g, "features.bin"), *deep = t->n_levels ? open_in(g, "deepstack.bin") : NULL;
    for (int level = 0; level <= t->n_levels; level++) {
        float *both = NULL;
        int rows, cols, at = 0;
        if (level)
            both = read_record(deep, &rows, &cols);
        for (int i = 0; i < IMAGES; i++) {
            float *one = level ? both + at * t->n_out : read_record(f, &rows, &cols);
            assert_int_equal(cols, t->n_out);
            assert_true(level || rows == got[i].n);
            for (int r = 0; r < got[i].n; r++) {
                double d = most_difference(
                    one + r * cols, got[i].values + r * got[i].width + level * cols, (size_t)cols);
                most = d <= most ? most : d;
            }
            at += got[i].n;
            if (!level)
                mem_free(one);
        }
        mem_free(both);
    }
    fclose(f);
    if (deep)
        fclose(deep);
    return most;
}

static void encode(const struct golden *g, struct encoder *e, struct features *out)
{
    struct error err = {0};
    for (int i = 0; i < IMAGES; i++)
        if (!encoder_run(e, &g->pixels[i], NULL, &out[i], &err))
            fail_msg("%s", err.msg);
}

static void check_pixels(const struct golden *g, const struct encoder *e)
{
    static const char *const names[IMAGES] = {"a.png", "b.png"};
    static uint8_t bytes[CAP];
    const struct tower_config *t = encoder_config(e);
    struct image_limits limits = {0};
    struct error err = {0};
    for (int i = 0; i < IMAGES; i++) {
        struct image m;
        struct patches p;
        FILE *f = open_in(g, names[i]);
        size_t n = fread(bytes, 1, sizeof bytes, f);
        fclose(f);
        assert_true(image_decode(bytes, n, &limits, &m, &err));
        assert_true(patches_make(t, &m, NULL, &p, &err));
        assert_memory_equal(&p.plan, &g->pixels[i].plan, sizeof p.plan);
        assert_true(patches_cut(&p, &err));
        size_t values = (size_t)(p.n * p.width);
        float std = fmaxf(t->std[0], fmaxf(t->std[1], t->std[2]));
        double most = most_difference(p.values, g->pixels[i].values, values) * (double)std;
        print_message("  %s: %d views, %d patches, %.2f/255 from the golden's\n", names[i],
                      p.plan.n_views, p.n, most * 255);
        assert_true(most <= 2.0 / 255 + 1e-6);
        patches_free(&p);
        image_free(&m);
    }
}

/* The length of the mark or word at the beginning of a text. */
static size_t word_length(const char *at)
{
    const char *end = *at == '<' ? strchr(at, '>') : *at == '[' ? strchr(at, ']') : NULL;
    if (end)
        return (size_t)(end - at) + 1;
    if (*at == '\n')
        return strspn(at, "\n");
    if (isdigit((unsigned char)*at))
        return 1;
    return strcspn(at, "<[\n");
}

/* The marks of the images are those of the golden's prompt: equal words are equal ids there, different words different
 * ids. */
static void check_marks(const struct golden *g, const struct tower_config *t)
{
    enum { MOST = 64 };
    struct {
        char word[40];
        int32_t id;
    } known[MOST] = {0};
    int n_known = 0, run = 0;
    for (int i = 0; i < IMAGES; i++) {
        struct buf text = {0};
        plan_text(t, &g->pixels[i].plan, i, &text);
        int before = 0, first = run, at;
        const char *mark = plan_mark(t), *w = text.p, *end = text.p + text.len;
        for (const char *k = w; k < end && strncmp(k, mark, strlen(mark)) != 0; k += word_length(k))
            before++;
        at = g->spans[first].at - before;
        for (; w < end; w += word_length(w)) {
            char word[40] = {0};
            int k = 0;
            memcpy(word, w, word_length(w) < sizeof word ? word_length(w) : sizeof word - 1);
            assert_in_range(at, 0, g->want.n_tokens - 1);
            if (!strcmp(word, mark)) {
                assert_int_equal(at, g->spans[run].at);
                at += g->spans[run].rows * g->spans[run].cols;
                run++;
                continue;
            }
            if (!strcmp(word, "\n\n") && g->want.ids[at] == g->want.ids[at + 1])
                at++; /* one token of this golden is one newline */
            while (k < n_known && strcmp(known[k].word, word) != 0)
                k++;
            if (k == n_known) {
                /* the goldens have one id for every number of newlines */
                for (int j = 0; j < n_known; j++)
                    if (word[0] != '\n' || known[j].word[0] != '\n')
                        assert_int_not_equal(known[j].id, g->want.ids[at]);
                assert_true(n_known < MOST);
                memcpy(known[k].word, word, sizeof word);
                known[n_known++].id = g->want.ids[at];
            }
            if (known[k].id != g->want.ids[at])
                fail_msg("%s: '%s' is token %d, in the golden %d", g->path, word, known[k].id,
                         g->want.ids[at]);
            at++;
        }
        buf_clear(&text);
    }
    assert_int_equal(run, g->n_spans);
}

static void check_positions(const struct golden *g)
{
    int32_t pos[MAX_TOKENS * 3], largest = 0;
    int n = g->want.n_tokens;
    image_positions(g->spans, g->n_spans, n, pos);
    assert_memory_equal(pos, g->pos, (size_t)(3 * n) * sizeof *pos);
    for (int i = 0; i < 3 * n; i++)
        largest = pos[i] > largest ? pos[i] : largest;
    assert_int_equal(largest + 1 - n, g->rope_delta);
}

/* Logits from the features, `chunk` tokens at a time. */
/* Computes the logits of a golden's prompt with these features. gap (n_tokens): the smallest margin of each row's experts, of the
 * reference alone; or NULL. Returns whether fp16 may choose other experts. */
static bool run_prompt(const struct golden *g, const struct features *features, int chunk,
                       struct logits *out, float *gap)
{
    struct runtime_options opt = {.context = MAX_TOKENS,
                                  .k_type = DT_F32,
                                  .v_type = DT_F32,
                                  .max_tokens = chunk + MAX_TOKENS,
                                  .max_out = chunk + MAX_TOKENS,
                                  .embeds = true};
    struct error err = {0};
    const float *embeds[MAX_TOKENS] = {0};
    for (int i = 0, run = 0; i < IMAGES; i++)
        for (int k = 0; k < features[i].n; run++)
            for (int j = 0; j < g->spans[run].rows * g->spans[run].cols; j++)
                embeds[g->spans[run].at + j] = features[i].values + k++ * features[i].width;
    opt.backend.threads = 2;
    opt.backend.device = device();
    if (device() && strcmp(device(), "cpu") != 0) /* what tensor cores read */
        opt.k_type = opt.v_type = DT_F16;
    struct runtime *rt = runtime_open(g->path, &opt, &err);
    if (!rt)
        fail_msg("%s", err.msg);
    assert_int_equal(network_embed_width(&rt->model->net), features[0].width);
    struct prompt_rows rows = {.n = g->want.n_tokens,
                               .embeds = embeds,
                               .rope_pos = g->has_pos ? g->pos : NULL,
                               .spans = rt->model->config.sees_both_ways ? g->see : NULL};
    struct kv_seq seq = {0};
    for (int at = 0, n; at < out->n_tokens; at += n) {
        int left = out->n_tokens - at;
        n = rows_whole(&rows, at, left < chunk ? left : chunk);
        struct step_item item = {.seq = &seq,
                                 .tokens = g->want.ids + at,
                                 .n_tokens = n,
                                 .rows = &rows,
                                 .want = LOGITS_ALL};
        if (!step_run(rt->step, &item, 1, &err))
            fail_msg("%s", err.msg);
        for (int t = 0; t < item.n_tokens; t++) {
            step_logits(rt->step, item.first_row + t,
                        out->rows + (size_t)(at + t) * (size_t)out->n_vocab);
            if (gap)
                gap[at + t] = backend_ref_gap(rt->be, t);
        }
    }
    kvcache_release(rt->kv, &seq);
    bool experts = false;
    for (int i = 0; i < rt->model->config.n_layers; i++)
        experts |= rt->model->config.is_moe[i];
    runtime_close(rt);
    return experts && opt.k_type == DT_F16;
}

/* Puts the golden's logits in the place of rows in which two experts are nearly equal: fp16 may choose the other one
 * (bench/notes/correctness.md). The reference says which rows these are. */
static void leave_out_ties(const struct golden *g, const struct features *features,
                           struct logits *out)
{
    float gap[MAX_TOKENS];
    struct logits exact = *out;
    size_t each = (size_t)out->n_vocab;
    int n = 0;
    exact.rows = mem_zalloc((size_t)out->n_tokens * each, sizeof(float));
    setenv("STEEL_ISA", "ref", 1);
    run_prompt(g, features, MAX_TOKENS, &exact, gap);
    unsetenv("STEEL_ISA");
    for (int t = 0; t < out->n_tokens; t++)
        if (gap[t] < NEAR_TIE) {
            memcpy(out->rows + (size_t)t * each, g->want.rows + (size_t)t * each,
                   each * sizeof(float));
            n++;
        }
    print_message("  %d of %d rows are near ties of experts\n", n, out->n_tokens);
    assert_true(10 * n <= out->n_tokens);
    mem_free(exact.rows);
}

static double logits_off(const struct golden *g, const struct features *features, int chunk)
{
    struct logits out = {.n_tokens = g->want.n_tokens, .n_vocab = g->want.n_vocab};
    out.rows = mem_zalloc((size_t)out.n_tokens * (size_t)out.n_vocab, sizeof(float));
    bool ties = run_prompt(g, features, chunk, &out, NULL);
    double worst, kl = logits_kl_worst(&g->want, &out, &worst);
    if (ties && kl > 5e-4) {
        print_message("  KL %.1e, in the row where it is largest %.1e\n", kl, worst);
        leave_out_ties(g, features, &out);
        kl = logits_kl_worst(&g->want, &out, &worst);
    }
    mem_free(out.rows);
    return kl;
}

/* isa: what STEEL_ISA says; NULL = the best kernels. */
static void check_model(const char *path, const char *isa, double most)
{
    struct golden g;
    struct features got[IMAGES];
    if (isa)
        setenv("STEEL_ISA", isa, 1);
    struct encoder *e = open_encoder(path, isa ? DT_F32 : DT_NONE);
    golden_read(&g, path, encoder_config(e));
    encode(&g, e, got);
    double off = compare_features(&g, e, got);
    print_message("%s on %s: features %.1e from the golden's\n", path,
                  isa        ? isa
                  : device() ? device()
                             : "the CPU",
                  off);
    assert_true(off < most);
    if (isa) {
        check_pixels(&g, e);
        check_marks(&g, encoder_config(e));
        if (g.has_pos)
            check_positions(&g);
    }
    const int chunks[] = {MAX_TOKENS, 7, 1};
    for (int i = 0; i < 3; i++) {
        double kl = logits_off(&g, got, chunks[i]);
        print_message("  logits in chunks of %d: KL %.1e\n", chunks[i], kl);
        assert_true(kl < 5e-4);
    }
    /* without a level of deepstack, or where images are read like text, they are others */
    bool two_way = false;
    for (int i = 0; i < MAX_TOKENS * 2; i++) {
        two_way |= g.see[i] != 0;
        g.see[i] = 0;
    }
    if (two_way && strstr(path, "gemma3"))
        assert_true(logits_off(&g, got, MAX_TOKENS) > 1e-5);
    int n_out = encoder_config(e)->n_out, width = got[0].width;
    for (int i = 0; i < IMAGES && width > n_out; i++)
        for (int k = 0; k < got[i].n; k++)
            memset(got[i].values + k * width + width - n_out, 0, (size_t)n_out * sizeof(float));
    if (width > n_out)
        assert_true(logits_off(&g, got, MAX_TOKENS) > 5e-4);
    for (int i = 0; i < IMAGES; i++)
        features_free(&got[i]);
    close_encoder(e);
    golden_clear(&g);
    unsetenv("STEEL_ISA");
}

static void test_reference(void **state)
{
    (void)state;
    char path[256];
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        snprintf(path, sizeof path, "tests/golden_images/%s", models[i]);
        check_model(path, "ref", 2e-4);
    }
}

static void test_kernels(void **state)
{
    (void)state;
    char path[256];
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        snprintf(path, sizeof path, "tests/golden_images/%s", models[i]);
        check_model(path, NULL, 2e-2);
    }
}

static void test_larger(void **state)
{
    (void)state;
    char path[256];
    GOLDEN_NEEDED(GOLDEN "vision");
    for (size_t i = 0; i < sizeof models / sizeof *models; i++) {
        snprintf(path, sizeof path, GOLDEN "vision/vl-%s", models[i]);
        check_model(path, "ref", 2e-4);
        check_model(path, NULL, 2e-2);
    }
}

/* libjpeg's pixels are Pillow's. */
static void test_jpeg(void **state)
{
    (void)state;
    static const char *const names[] = {"b.jpg", "b_from_jpg.png"};
    struct image m[2];
    struct error err = {0};
    struct image_limits limits = {0};
    static uint8_t bytes[CAP];
    struct golden g = {.path = "tests/golden_images"};
    for (int i = 0; i < 2; i++) {
        FILE *f = open_in(&g, names[i]);
        size_t n = fread(bytes, 1, sizeof bytes, f);
        fclose(f);
        assert_true(image_decode(bytes, n, &limits, &m[i], &err));
    }
    assert_int_equal(m[0].width, m[1].width);
    assert_int_equal(m[0].height, m[1].height);
    assert_memory_equal(m[0].rgb, m[1].rgb, (size_t)(m[0].width * m[0].height * 3));
    image_free(&m[0]);
    image_free(&m[1]);
}

/* Sizes by the rule of Qwen's processor. */
static void test_sizes(void **state)
{
    (void)state;
    struct tower_config t = {.patch = 16, .merge = 2, .min_pixels = 65536, .max_pixels = 16777216};
    struct image_plan p;
    static const int cases[][4] = {{1024, 1024, 1024, 1024}, {1000, 500, 992, 512},
                                   {10, 10, 256, 256},       {1, 199, 32, 3616},
                                   {8000, 6000, 4704, 3520}, {48, 2000, 64, 1984}};
    struct error err = {0};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        p.n_sizes = p.n_views = 0;
        assert_true(plan_keep_ratio(&t, cases[i][0], cases[i][1], &p, &err));
        int w = p.sizes[0].width, h = p.sizes[0].height;
        if (w != cases[i][2] || h != cases[i][3])
            fail_msg("%d x %d becomes %d x %d", cases[i][0], cases[i][1], w, h);
    }
    t = (struct tower_config){.patch = 16, .merge = 2, .min_pixels = 4096, .max_pixels = 16384};
    p.n_sizes = p.n_views = 0;
    assert_true(plan_keep_ratio(&t, 20000, 100, &p, &err)); /* 16 features at most */
    assert_int_equal(p.sizes[0].width, 512);
    assert_int_equal(p.sizes[0].height, 32);
    assert_false(plan_keep_ratio(&t, 201, 1, &p, &err));
    assert_string_equal(err.msg, "an image of 201 x 1: one side is more than 200 times the other");
}

/* With few features an image, every size fits: no image of an accepted ratio is refused. */
static void test_bounds(void **state)
{
    (void)state;
    struct error err = {0};
    struct tensorfile *f = tensorfile_open("tests/golden_images/qwen3_vl", &err);
    assert_non_null(f);
    for (int most = 4; most <= 4096; most *= 4) {
        struct encoder_options opt = {.backend.threads = 1, .max_features = most};
        struct encoder *e = encoder_open(f, &opt, &err);
        assert_non_null(e);
        const struct tower_config *t = encoder_config(e);
        for (int w = 1; w <= 4000; w += w < 300 ? 1 : 97)
            for (int h = w; h <= 200 * w && h < 5000; h += 1 + h / 9) {
                struct image_plan p;
                assert_true(plan_image(t, w, h, &p, &err));
                assert_true(p.views[0].rows * p.views[0].cols <= encoder_max_patches(e));
            }
        encoder_close(e);
    }
    tensorfile_close(f);
}

/* Other work before does not change an image's features; a stopped encoding says so. */
static void test_encoder(void **state)
{
    (void)state;
    struct golden g;
    struct features first[IMAGES], again[IMAGES], none;
    struct error err = {0};
    atomic_bool stop = true;
    struct encoder *e = open_encoder("tests/golden_images/qwen3_vl", DT_NONE);
    golden_read(&g, "tests/golden_images/qwen3_vl", encoder_config(e));
    encode(&g, e, first);
    assert_false(encoder_run(e, &g.pixels[0], &stop, &none, &err));
    assert_string_equal(err.msg, "cancelled");
    assert_null(none.values);
    encode(&g, e, again);
    for (int i = 0; i < IMAGES; i++) {
        assert_memory_equal(first[i].values, again[i].values,
                            (size_t)(first[i].n * first[i].width) * sizeof(float));
        features_free(&first[i]);
        features_free(&again[i]);
    }
    struct patches large = g.pixels[0];
    large.plan.views[0].rows = 2000;
    assert_false(encoder_run(e, &large, NULL, &none, &err));
    assert_non_null(strstr(err.msg, "an image of 20000 patches; at most "));
    close_encoder(e);
    golden_clear(&g);
}

/* Callers that encode side by side, some of whom are cancelled: the others get what they get alone. */
enum { CALLERS = 9, ROUNDS = 3 };

struct caller {
    struct encoder *e;
    const struct patches *p;
    atomic_bool stop;
    bool ok;
    struct features got;
    struct error err;
};

static void *call_encoder(void *arg)
{
    struct caller *c = arg;
    c->ok = encoder_run(c->e, c->p, &c->stop, &c->got, &c->err);
    return NULL;
}

static void test_callers(void **state)
{
    (void)state;
    struct golden g;
    struct features alone[IMAGES];
    struct encoder *e = open_encoder("tests/golden_images/qwen3_vl", DT_NONE);
    golden_read(&g, "tests/golden_images/qwen3_vl", encoder_config(e));
    encode(&g, e, alone);
    for (int round = 0; round < ROUNDS; round++) {
        struct caller callers[CALLERS];
        pthread_t threads[CALLERS];
        for (int i = 0; i < CALLERS; i++) {
            callers[i] = (struct caller){.e = e, .p = &g.pixels[i % IMAGES], .stop = i % 4 == 3};
            assert_int_equal(pthread_create(&threads[i], NULL, call_encoder, &callers[i]), 0);
        }
        for (int i = 0; i < CALLERS; i++) {
            const struct features *want = &alone[i % IMAGES];
            assert_int_equal(pthread_join(threads[i], NULL), 0);
            assert_int_equal(callers[i].ok, i % 4 != 3);
            if (!callers[i].ok) {
                assert_string_equal(callers[i].err.msg, "cancelled");
                assert_null(callers[i].got.values);
                continue;
            }
            size_t n = (size_t)want->n * (size_t)want->width;
            assert_int_equal(callers[i].got.n, want->n);
            double off = most_difference(callers[i].got.values, want->values, n);
            assert_true(device() ? off < 1e-3 : off == 0); /* on a GPU they share steps */
            features_free(&callers[i].got);
        }
    }
    for (int i = 0; i < IMAGES; i++)
        features_free(&alone[i]);
    close_encoder(e);
    golden_clear(&g);
}

/* A thread that runs steps beside the encoder. */
struct beside {
    struct encoder *e;
    atomic_bool stop;
};

static void *run_beside(void *arg)
{
    struct beside *b = arg;
    while (!atomic_load(&b->stop))
        encoder_beside_step(b->e, 1);
    return NULL;
}

/* On a GPU a view is encoded in pieces beside another thread's steps, with the same result; also if that thread stops. */
static void test_pieces(void **state)
{
    (void)state;
    struct golden g;
    struct features alone[IMAGES], again[IMAGES];
    struct encoder *e = open_encoder("tests/golden_images/qwen3_vl", DT_NONE);
    struct beside b = {.e = e};
    pthread_t thread;
    golden_read(&g, "tests/golden_images/qwen3_vl", encoder_config(e));
    encode(&g, e, alone);
    for (int round = 0; round < 2; round++) {
        if (!round)
            assert_int_equal(pthread_create(&thread, NULL, run_beside, &b), 0);
        encode(&g, e, again); /* in round 1 a step was announced that never ends */
        atomic_store(&b.stop, true);
        if (!round)
            pthread_join(thread, NULL);
        for (int i = 0; i < IMAGES; i++) {
            assert_memory_equal(again[i].values, alone[i].values,
                                (size_t)(alone[i].n * alone[i].width) * sizeof(float));
            features_free(&again[i]);
        }
    }
    for (int i = 0; i < IMAGES; i++)
        features_free(&alone[i]);
    close_encoder(e);
    golden_clear(&g);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reference), cmocka_unit_test(test_kernels),
        cmocka_unit_test(test_larger),    cmocka_unit_test(test_jpeg),
        cmocka_unit_test(test_sizes),     cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_encoder),   cmocka_unit_test(test_callers),
        cmocka_unit_test(test_pieces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
