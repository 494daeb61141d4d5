/*
 * Prompts with rows of embeddings and M-RoPE positions: Qwen3.5's text model on the features of two images
 * gives the logits of transformers, whole, in chunks and row by row; rows that equal a token's embedding
 * give what the token gives; the engine never mixes up two images whose prompts have the same tokens.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <semaphore.h>
#include <stdint.h>
#include <cmocka.h>

#include "engine/engine.h"
#include "backend/backend.h"
#include "golden.h"

#define MODEL "tests/golden_images/qwen3_5"

enum { MAX_ROWS = 64, IMAGES = 2 };

/* The golden's prompt: its placeholders, and per image the features that replace them. */
struct prompt {
    struct logits want; /* of transformers */
    int32_t pos[MAX_ROWS * 3];
    struct prompt_embeds embeds[IMAGES];
    float *features[IMAGES];
    const float *rows[MAX_ROWS];
    int n_embd;
};

static void prompt_read(struct prompt *p)
{
    struct error err = {0};
    *p = (struct prompt){.want = logits_read(MODEL "/golden.bin")};
    json_t *o = json_load_path(MODEL "/input.json", 1 << 20, &err);
    json_int_t image = json_integer_value(json_object_get(o, "image_token_id"));
    json_t *planes = json_object_get(o, "position_ids");
    FILE *f = fopen(MODEL "/features.bin", "rb");
    assert_non_null(f);
    assert_true(p->want.n_tokens <= MAX_ROWS && json_array_size(planes) == 3);
    int n = 0;
    for (int i = 0; i < p->want.n_tokens; i++) {
        for (size_t k = 0; k < 3; k++)
            p->pos[3 * i + (int)k] =
                (int32_t)json_integer_value(json_array_get(json_array_get(planes, k), (size_t)i));
        if (p->want.ids[i] != image || (i && p->want.ids[i - 1] == image))
            continue;
        int32_t head[3];
        assert_true(n < IMAGES);
        assert_int_equal(fread(head, 4, 3, f), 3);
        assert_int_equal(head[0], 2);
        size_t values = (size_t)head[1] * (size_t)head[2];
        p->n_embd = head[2];
        p->features[n] = mem_zalloc(values, sizeof(float));
        assert_int_equal(fread(p->features[n], 4, values, f), values);
        p->embeds[n] = (struct prompt_embeds){.at = i, .n = head[1], .rows = p->features[n]};
        p->embeds[n].id[0] = (uint8_t)n;
        for (int k = 0; k < head[1]; k++)
            p->rows[i + k] = p->features[n] + (size_t)k * (size_t)head[2];
        n++;
    }
    assert_int_equal(n, IMAGES);
    fclose(f);
    json_decref(o);
}

static void prompt_clear(struct prompt *p)
{
    for (int i = 0; i < IMAGES; i++)
        mem_free(p->features[i]);
    logits_free(&p->want);
}

static struct runtime_options options(void)
{
    struct runtime_options opt = {.context = 128,
                                  .k_type = DT_F32,
                                  .v_type = DT_F32,
                                  .max_tokens = MAX_ROWS,
                                  .max_out = MAX_ROWS,
                                  .embeds = true};
    opt.backend.threads = 2;
    opt.backend.device = getenv("STEEL_ISA") ? NULL : getenv("STEEL_TEST_DEVICE");
    return opt;
}

/* All logits of the prompt, `chunk` tokens at a time. rows NULL: of its tokens alone. */
static struct logits run_rows(const char *model, const struct logits *prompt,
                              const struct prompt_rows *rows, int chunk)
{
    struct runtime_options opt = options();
    struct error err = {0};
    struct runtime *rt = runtime_open(model, &opt, &err);
    struct kv_seq seq = {0};
    struct logits out = {.n_tokens = prompt->n_tokens, .n_vocab = prompt->n_vocab};
    CHECK(rt, "%s", err.msg);
    out.rows = mem_zalloc((size_t)out.n_tokens * (size_t)out.n_vocab, 4);
    for (int at = 0; at < prompt->n_tokens; at += chunk) {
        int left = prompt->n_tokens - at;
        struct step_item item = {.seq = &seq,
                                 .tokens = prompt->ids + at,
                                 .n_tokens = left < chunk ? left : chunk,
                                 .rows = rows,
                                 .want = LOGITS_ALL};
        CHECK(step_run(rt->step, &item, 1, &err), "%s", err.msg);
        for (int t = 0; t < item.n_tokens; t++)
            step_logits(rt->step, item.first_row + t,
                        out.rows + (size_t)(at + t) * (size_t)out.n_vocab);
    }
    kvcache_release(rt->kv, &seq);
    runtime_close(rt);
    return out;
}

static void test_golden(void **state)
{
    (void)state;
    struct prompt p;
    prompt_read(&p);
    struct prompt_rows rows = {.n = p.want.n_tokens, .embeds = p.rows, .rope_pos = p.pos};
    static const int chunks[] = {MAX_ROWS, 9, 1};
    for (int i = 0; i < 3; i++) {
        struct logits got = run_rows(MODEL, &p.want, &rows, chunks[i]);
        double kl = logits_kl(&p.want, &got);
        print_message("chunks of %d: KL %.2e\n", chunks[i], kl);
        assert_true(kl < 5e-4);
        logits_free(&got);
    }
    /* without the positions, or without the images, it is something else */
    struct prompt_rows straight = {.n = rows.n, .embeds = p.rows};
    struct logits got = run_rows(MODEL, &p.want, &straight, MAX_ROWS);
    assert_true(logits_kl(&p.want, &got) > 1e-4);
    logits_free(&got);
    got = run_rows(MODEL, &p.want, NULL, MAX_ROWS);
    assert_true(logits_kl(&p.want, &got) > 1e-4);
    logits_free(&got);
    prompt_clear(&p);
}

/* A row that is its token's embedding changes nothing, bit for bit; nor do the positions of a text. */
static void test_token_rows(void **state)
{
    (void)state;
    struct error err = {0};
    struct logits p = {.n_tokens = 40, .n_vocab = 144};
    int32_t ids[40], pos[3 * 40];
    const float *rows[40] = {0};
    struct tensorfile *f = tensorfile_open(MODEL, &err);
    assert_non_null(f);
    const struct tensor *t = tensorfile_find(f, "model.language_model.embed_tokens.weight");
    assert_non_null(t);
    size_t E = (size_t)t->dims[0], row = t->bytes / (size_t)t->dims[1];
    float *table = mem_zalloc(40 * E, sizeof *table);
    for (int i = 0; i < 40; i++) {
        ids[i] = i * 29 % 140;
        pos[3 * i] = pos[3 * i + 1] = pos[3 * i + 2] = i;
        rows[i] = i % 3 ? table + (size_t)i * E : NULL;
        quant_dequantize(t->type, t->data + row * (size_t)ids[i], table + (size_t)i * E, E);
    }
    tensorfile_close(f);
    p.ids = ids;
    struct prompt_rows given = {.n = 40, .embeds = rows, .rope_pos = pos};
    struct logits want = run_rows(MODEL, &p, NULL, 16), got = run_rows(MODEL, &p, &given, 16);
    assert_memory_equal(want.rows, got.rows, 40 * 144 * sizeof(float));
    logits_free(&want);
    logits_free(&got);
    mem_free(table);
}

enum { ANSWER = 24 };
struct answer {
    int32_t tokens[ANSWER];
    int n, cached;
};

static struct answer ask(struct engine *e, const struct prompt *p,
                         const struct prompt_embeds *embeds, bool no_cache)
{
    struct answer a = {0};
    struct error err = {0};
    struct events *q = events_new();
    struct request_spec s = {.prompt = p->want.ids,
                             .n_prompt = p->want.n_tokens,
                             .embeds = embeds,
                             .n_embeds = embeds ? IMAGES : 0,
                             .rope_pos = embeds ? p->pos : NULL,
                             .max_tokens = ANSWER,
                             .ignore_eos = true,
                             .no_cache = no_cache,
                             .queue = q};
    s.sample = sample_params_default();
    s.sample.temp = 0;
    s.sample.repeat_penalty = 1;
    if (engine_submit(e, &s, NULL, &err) != SUBMIT_OK)
        fail_msg("%s", err.msg);
    for (struct engine_event ev;;) {
        assert_true(events_next(q, &ev, -1));
        if (ev.kind == EVENT_TOKEN)
            a.tokens[a.n++] = ev.token;
        a.cached = ev.usage.n_cached > a.cached ? ev.usage.n_cached : a.cached;
        if (ev.kind == EVENT_DONE)
            break;
    }
    events_free(q);
    assert_int_equal(a.n, ANSWER);
    return a;
}

static void expect(const struct answer *a, const struct answer *b)
{
    assert_memory_equal(a->tokens, b->tokens, sizeof a->tokens);
}

/* Prompts with equal tokens and other images: each answer is the one that it has without the cache. */
static void test_engine(void **state)
{
    (void)state;
    struct engine_options opt = {.runtime = options()};
    struct error err = {0};
    struct prompt p;
    prompt_read(&p);
    opt.runtime.max_seqs = 4;
    opt.runtime.page_len = 4;
    opt.runtime.backend.deterministic = true;
    struct engine *e = engine_open(MODEL, &opt);
    if (!engine_wait(e, &err))
        fail_msg("%s", err.msg);
    struct prompt_embeds swapped[IMAGES] = {p.embeds[0], p.embeds[1]};
    swapped[0].rows = p.embeds[1].rows;
    swapped[1].rows = p.embeds[0].rows;
    swapped[0].id[0] = 1;
    swapped[1].id[0] = 0;
    struct answer first = ask(e, &p, p.embeds, true), second = ask(e, &p, swapped, true);
    struct answer none = ask(e, &p, NULL, true), got;
    assert_memory_not_equal(first.tokens, second.tokens, sizeof first.tokens);
    assert_memory_not_equal(first.tokens, none.tokens, sizeof first.tokens);
    for (int i = 0; i < 2; i++) { /* those runs have left their pages */
        got = ask(e, &p, p.embeds, false);
        expect(&got, &first);
        assert_true(got.cached > 40);
        got = ask(e, &p, swapped, false);
        expect(&got, &second);
        assert_true(got.cached > 40);
        got = ask(e, &p, NULL, false);
        expect(&got, &none);
        assert_true(got.cached > 40);
    }
    struct prompt_embeds third[IMAGES] = {p.embeds[0], p.embeds[1]};
    third[1].id[31] = 9; /* another second image: what comes before it is shared */
    got = ask(e, &p, third, false);
    assert_true(got.cached <= third[1].at);
    engine_close(e);
    prompt_clear(&p);
}

static void wait_before_step(void *arg, int n_items)
{
    (void)n_items;
    sem_wait(arg);
    sem_post(arg);
}

/* What prompts with images hold is bounded. A client that holds nothing gets as much again, and ends give it back. */
static void test_bound(void **state)
{
    (void)state;
    struct engine_options opt = {.runtime = options()};
    struct error err = {0};
    struct prompt p;
    prompt_read(&p);
    opt.runtime.max_seqs = 1;
    struct engine *e = engine_open(MODEL, &opt);
    if (!engine_wait(e, &err))
        fail_msg("%s", err.msg);
    size_t bytes = 0;
    for (int i = 0; i < IMAGES; i++)
        bytes += (size_t)p.embeds[i].n *
                 (size_t)network_embed_width(&engine_runtime(e)->model->net) * sizeof(float);
    engine_close(e);
    opt.embed_bytes = 2 * bytes;
    e = engine_open(MODEL, &opt);
    if (!engine_wait(e, &err))
        fail_msg("%s", err.msg);
    struct events *q = events_new();
    struct request_spec s = {.prompt = p.want.ids,
                             .n_prompt = p.want.n_tokens,
                             .embeds = p.embeds,
                             .n_embeds = IMAGES,
                             .rope_pos = p.pos,
                             .max_tokens = 8,
                             .ignore_eos = true,
                             .sample = sample_params_default(),
                             .client = 1,
                             .queue = q};
    struct request *held[4];
    sem_t go; /* no step runs before */
    sem_init(&go, 0, 0);
    engine_on_step(e, wait_before_step, &go);
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < 4; i++) {
            s.client = i < 2 ? 1 : (uint64_t)i;
            assert_int_equal(engine_submit(e, &s, &held[i], &err), SUBMIT_OK);
            if (i < 1)
                continue;
            s.client = 1;
            assert_int_equal(engine_submit(e, &s, NULL, &err), SUBMIT_FULL);
            assert_non_null(strstr(err.msg, "images"));
        }
        s.client = 9; /* the limit, twice */
        assert_int_equal(engine_submit(e, &s, NULL, &err), SUBMIT_FULL);
        sem_post(&go);
        for (int i = 0; i < 2; i++)
            request_cancel(held[i]);
        struct engine_event ev;
        for (int ended = 0; ended < 4;) {
            assert_true(events_next(q, &ev, -1));
            ended += ev.kind == EVENT_DONE;
        }
        for (int i = 0; i < 4; i++)
            request_free(held[i]);
        sem_wait(&go);
    }
    events_free(q);
    engine_close(e);
    prompt_clear(&p);
}

static void refuse(struct engine *e, struct request_spec s, const char *why)
{
    struct error err = {0};
    assert_int_equal(engine_submit(e, &s, NULL, &err), SUBMIT_INVALID);
    assert_string_equal(err.msg, why);
}

static void test_refused(void **state)
{
    (void)state;
    struct error err = {0};
    float rows[64] = {0};
    static const int32_t prompt[4] = {1, 2, 3, 4};
    for (int on = 0; on < 2; on++) {
        struct engine_options opt = {.runtime = options()};
        opt.runtime.embeds = on;
        struct engine *e = engine_open(MODEL, &opt);
        if (!engine_wait(e, &err))
            fail_msg("%s", err.msg);
        struct prompt_embeds one = {.at = 1, .n = 1, .rows = rows};
        struct prompt_embeds late = {.at = 3, .n = 2, .rows = rows};
        struct prompt_embeds twice[] = {one, one};
        int32_t pos[12] = {0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3};
        struct request_spec s = {.prompt = prompt, .n_prompt = 4, .embeds = &one, .n_embeds = 1};
        if (!on) {
            refuse(e, s, "embeddings in a prompt are not supported here");
            engine_close(e);
            continue;
        }
        s.embeds = &late;
        refuse(e, s, "embeds[0]: rows 3 to 4 of a prompt of 4");
        s.embeds = twice;
        s.n_embeds = 2;
        refuse(e, s, "embeds[1]: rows 1 to 1 of a prompt of 4");
        s.n_embeds = 1;
        s.rope_pos = pos;
        pos[5] = 0; /* an image's row may turn by other positions, a text's may not */
        pos[8] = 7;
        refuse(e, s, "rope_pos[2] is 2, 2, 7");
        pos[8] = 2;
        pos[4] = -1;
        refuse(e, s, "rope_pos[1] is 1, -1, 0");
        engine_close(e);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),  cmocka_unit_test(test_token_rows),
        cmocka_unit_test(test_engine),  cmocka_unit_test(test_bound),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
