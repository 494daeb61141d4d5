/*
 * Adapters: sequences of different adapters and of none share steps and get what they would get alone, on
 * the reference ops and on every kernel set; pages of the cache are not shared between adapters; what is
 * in use is not unloaded. Adapters are made here, for the small models of tests/golden; test_lora.py has
 * the files of others, and those that are broken.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include "golden.h"
#include "base/buf.h"
#include "base/cpu.h"
#include "isas.h"

#include <steel.h>
#include <unistd.h>

enum { N_ADAPTERS = 8, N_SEQS = N_ADAPTERS + 1, N_TOKENS = 40, RANK = 16 };

/* One module of a model: its name behind "model.layers.%d.", inputs and outputs. */
struct module {
    const char *name;
    int n_in, n_out;
};

static const struct module qwen3_modules[] = {
    {"self_attn.q_proj", 64, 128}, {"self_attn.k_proj", 64, 64}, {"self_attn.v_proj", 64, 64},
    {"self_attn.o_proj", 128, 64}, {"mlp.gate_proj", 64, 96},    {"mlp.up_proj", 64, 96},
    {"mlp.down_proj", 96, 64}};
/* a module that is one of each expert: its name has another %d */
static const struct module moe_modules[] = {{"self_attn.q_proj", 64, 128},
                                            {"self_attn.o_proj", 128, 64},
                                            {"mlp.gate", 64, 6},
                                            {"mlp.experts.%d.gate_proj", 64, 32},
                                            {"mlp.experts.%d.down_proj", 32, 64}};

static const struct base {
    const char *path;
    const struct module *modules;
    int n_modules, n_experts;
} bases[] = {{MICRO "qwen3", qwen3_modules, 7, 0}, {MICRO "qwen3moe", moe_modules, 5, 6}};

static float draw(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) * 0x1p-23f - 1;
}

/* An adapter of rank `rank` for every module, or, every_other, of every second one. */
static void write_adapter(const char *dir, const struct base *base, uint32_t seed, int rank,
                          bool every_other)
{
    struct buf head = {0}, data = {0};
    char path[300];
    int count = 0;
    mkdir(dir, 0700);
    buf_adds(&head, "{");
    for (int layer = 0; layer < 2; layer++)
        for (int m = 0; m < base->n_modules; m++) {
            const struct module *mod = &base->modules[m];
            bool each = strstr(mod->name, "%d");
            for (int e = 0; e < (each ? base->n_experts : 1); e++) {
                char name[128];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
                snprintf(name, sizeof name, mod->name, e);
#pragma GCC diagnostic pop
                if (every_other && count++ % 2)
                    continue;
                for (int b = 0; b < 2; b++) {
                    int rows = b ? mod->n_out : rank, columns = b ? rank : mod->n_in;
                    size_t at = data.len;
                    for (int i = 0; i < rows * columns; i++) {
                        float v = draw(&seed) * 0.2f;
                        buf_add(&data, &v, sizeof v);
                    }
                    buf_addf(&head,
                             "%s\"base_model.model.model.layers.%d.%s.lora_%c.weight\":{\"dtype\":"
                             "\"F32\",\"shape\":[%d,%d],\"data_offsets\":[%zu,%zu]}",
                             head.len > 1 ? "," : "", layer, name, b ? 'B' : 'A', rows, columns, at,
                             data.len);
                }
            }
        }
    buf_adds(&head, "}");
    while (head.len % 8)
        buf_addc(&head, ' ');
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
    FILE *f = fopen(path, "wb");
    uint64_t n = head.len;
    assert_non_null(f);
    assert_true(fwrite(&n, 8, 1, f) == 1 && fwrite(head.p, 1, head.len, f) == head.len &&
                fwrite(data.p, 1, data.len, f) == data.len && fclose(f) == 0);
    snprintf(path, sizeof path, "%s/adapter_config.json", dir);
    f = fopen(path, "w");
    assert_non_null(f);
    fprintf(f, "{\"peft_type\":\"LORA\",\"r\":%d,\"lora_alpha\":%d}", rank, rank);
    fclose(f);
    buf_clear(&head);
    buf_clear(&data);
}

static void remove_adapter(const char *dir)
{
    char path[300];
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/adapter_config.json", dir);
    unlink(path);
    rmdir(dir);
}

struct folder {
    char dir[64];
    char adapter[N_ADAPTERS][96];
    struct adapter_ref refs[N_ADAPTERS];
};

static void folder_make(struct folder *f, const struct base *base)
{
    char dir[] = "/tmp/steel-lora-XXXXXX";
    assert_non_null(mkdtemp(dir));
    snprintf(f->dir, sizeof f->dir, "%s", dir);
    for (int i = 0; i < N_ADAPTERS; i++) {
        snprintf(f->adapter[i], sizeof f->adapter[i], "%s/%d", dir, i);
        write_adapter(f->adapter[i], base, (uint32_t)i + 1, i % 3 == 2 ? 5 : RANK, i % 4 == 3);
        f->refs[i] = (struct adapter_ref){.path = f->adapter[i], .scale = 1};
        snprintf(f->refs[i].name, sizeof f->refs[i].name, "a%d", i);
    }
}

static void folder_remove(struct folder *f)
{
    for (int i = 0; i < N_ADAPTERS; i++)
        remove_adapter(f->adapter[i]);
    rmdir(f->dir);
}

/* Which adapters sequence s uses: one each, the last none; with `several`, also the next one at half
 * strength. */
static int picks_of(int s, bool several, struct lora_pick *picks)
{
    if (s == N_ADAPTERS)
        return 0;
    picks[0] = (struct lora_pick){s, 1, (uint64_t)s + 1, 0};
    picks[1] =
        (struct lora_pick){(s + 1) % N_ADAPTERS, 0.5f, (uint64_t)((s + 1) % N_ADAPTERS) + 1, 0};
    return several ? 2 : 1;
}

static void ids_of(int s, int32_t *ids)
{
    uint32_t seed = (uint32_t)s + 99;
    for (int i = 0; i < N_TOKENS; i++)
        ids[i] = (int32_t)((draw(&seed) + 1) * 70);
}

/* Sequences [first, last) side by side: a prompt of N_TOKENS - 8 in pieces of `chunk`, then one token at a
 * time. rows: (N_SEQS, N_TOKENS, n_vocab). */
static void compute(struct runtime *rt, int first, int last, int chunk, bool several, float *rows)
{
    int V = rt->model->config.n_vocab;
    struct kv_seq seqs[N_SEQS] = {0};
    struct step_item items[N_SEQS];
    struct lora_pick picks[N_SEQS][LORA_MAX_USES];
    int32_t ids[N_SEQS][N_TOKENS];
    struct error err = {0};
    for (int at = 0, n; at < N_TOKENS; at += n) {
        int left = N_TOKENS - 8 - at;
        n = left <= 0 ? 1 : left < chunk ? left : chunk;
        for (int s = first; s < last; s++) {
            ids_of(s, ids[s]);
            items[s - first] = (struct step_item){.seq = &seqs[s],
                                                  .tokens = ids[s] + at,
                                                  .n_tokens = n,
                                                  .want = LOGITS_ALL,
                                                  .loras = picks[s],
                                                  .n_loras = picks_of(s, several, picks[s])};
        }
        if (!step_run(rt->step, items, last - first, &err))
            fail_msg("%s", err.msg);
        for (int s = first; s < last; s++)
            for (int i = 0; i < n; i++)
                step_logits(rt->step, items[s - first].first_row + i,
                            rows + ((size_t)s * N_TOKENS + (size_t)(at + i)) * (size_t)V);
    }
    for (int s = first; s < last; s++)
        kvcache_release(rt->kv, &seqs[s]);
}

static struct runtime *open_base(const struct base *base, const struct folder *f)
{
    struct runtime_options opt = {.context = N_TOKENS,
                                  .max_seqs = N_SEQS,
                                  .max_tokens = N_SEQS * N_TOKENS,
                                  .max_out = N_SEQS * N_TOKENS,
                                  .k_type = DT_F32,
                                  .v_type = DT_F32,
                                  .loras = f->refs,
                                  .n_loras = N_ADAPTERS};
    opt.backend.threads = 2;
    opt.backend.deterministic = true;
    struct error err = {0};
    struct runtime *rt = runtime_open(base->path, &opt, &err);
    if (!rt)
        fail_msg("%s", err.msg);
    return rt;
}

static void check_mixed(const struct base *base, const char *isa, bool several)
{
    struct folder f;
    folder_make(&f, base);
    if (isa)
        setenv("STEEL_ISA", isa, 1);
    struct runtime *rt = open_base(base, &f);
    size_t V = (size_t)rt->model->config.n_vocab, all = (size_t)N_SEQS * N_TOKENS * V;
    float *mixed = mem_zalloc(all, sizeof *mixed), *alone = mem_zalloc(all, sizeof *alone);
    for (int chunk = 5; chunk < N_TOKENS; chunk += 13) {
        compute(rt, 0, N_SEQS, chunk, several, mixed);
        for (int s = 0; s < N_SEQS; s++)
            compute(rt, s, s + 1, N_TOKENS, several, alone);
        assert_memory_equal(mixed, alone, all * sizeof *mixed);
    }
    runtime_close(rt);
    unsetenv("STEEL_ISA");
    mem_free(mixed);
    mem_free(alone);
    folder_remove(&f);
}

static void mixed_batches(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bases / sizeof *bases; i++)
        for (int several = 0; several < 2; several++) {
            check_mixed(&bases[i], "ref", several);
            check_mixed(&bases[i], FIRST_NAME, several);
            check_mixed(&bases[i], NULL, several);
        }
}

/* All kernels mean what the reference ops mean, on every module of both models. */
static void kernels_agree(void **state)
{
    (void)state;
    static const char *const isas[] = {FIRST_NAME, SECOND_NAME, NULL};
    for (size_t i = 0; i < sizeof bases / sizeof *bases; i++) {
        struct folder f;
        struct logits ref = {.n_tokens = N_SEQS * N_TOKENS}, got = {.n_tokens = N_SEQS * N_TOKENS};
        folder_make(&f, &bases[i]);
        for (int k = -1; k < 3; k++) {
            const char *isa = k < 0 ? "ref" : isas[k];
            if (k >= 0 && isa && !strcmp(isa, SECOND_NAME) && !isa_has(isa_best(), SECOND_ISA))
                continue;
            if (isa)
                setenv("STEEL_ISA", isa, 1);
            struct runtime *rt = open_base(&bases[i], &f);
            struct logits *to = k < 0 ? &ref : &got;
            to->n_vocab = rt->model->config.n_vocab;
            to->rows = mem_zalloc((size_t)to->n_tokens * (size_t)to->n_vocab, sizeof *to->rows);
            compute(rt, 0, N_SEQS, N_TOKENS, true, to->rows);
            runtime_close(rt);
            unsetenv("STEEL_ISA");
            if (k < 0)
                continue;
            double kl = logits_kl(&ref, &got);
            print_message("%-24s %-8s mean KL %.3g\n", bases[i].path, isa ? isa : "default", kl);
            assert_true(kl <= 2e-4);
            mem_free(got.rows);
        }
        mem_free(ref.rows);
        folder_remove(&f);
    }
}

/* The library: requests by name, the cache apart, loading and unloading. */

static int ask(struct steel_engine *e, const char *lora, int32_t *tokens, int n)
{
    int32_t prompt[64];
    struct steel_request_options o = steel_request_options();
    struct steel_event ev;
    struct steel_error err = {0};
    for (int i = 0; i < 64; i++)
        prompt[i] = i * 3 % 140;
    o.tokens = prompt;
    o.n_tokens = 64;
    o.temperature = 0;
    o.max_tokens = n;
    o.ignore_eos = true;
    o.lora = lora;
    struct steel_request *r = steel_request_submit(e, &o, &err);
    if (!r)
        return -1;
    int got = 0, cached = -1;
    while (steel_request_next(r, &ev, -1)) {
        if (ev.kind == STEEL_TOKEN && got < n)
            tokens[got++] = ev.token;
        if (ev.kind == STEEL_DONE)
            cached = ev.n_cached;
    }
    steel_request_free(r);
    assert_int_equal(got, n);
    return cached;
}

static void library(void **state)
{
    (void)state;
    enum { N = 12 };
    struct folder f;
    folder_make(&f, &bases[0]);
    struct steel_error err = {0};
    char text[128];
    const char *loras[] = {text};
    snprintf(text, sizeof text, "first=%s:0.5", f.adapter[0]);
    struct steel_engine_options opt = {.device = "cpu",
                                       .threads = 1,
                                       .context = 128,
                                       .loras = loras,
                                       .n_loras = 1,
                                       .max_lora_rank = 16};
    struct steel_engine *e = steel_engine_open(bases[0].path, &opt, &err);
    if (!e)
        fail_msg("%s", err.message);
    int32_t plain[N], half[N], full[N], second[N], again[N];
    assert_int_equal(ask(e, NULL, plain, N), 0);
    assert_true(ask(e, NULL, again, N) > 0);
    /* an adapter sees neither the model's pages nor those of another strength */
    assert_int_equal(ask(e, "first", half, N), 0);
    assert_int_equal(ask(e, "first:1", full, N), 0);
    assert_true(ask(e, "first", again, N) > 0);
    assert_memory_equal(half, again, sizeof half);
    assert_true(memcmp(plain, half, sizeof half) != 0 && memcmp(full, half, sizeof half) != 0);
    assert_int_equal(ask(e, "second", second, N), -1);
    assert_true(steel_engine_load_lora(e, "second", f.adapter[1], 1, &err));
    assert_false(steel_engine_load_lora(e, "second", f.adapter[1], 1, &err));
    assert_false(steel_engine_load_lora(e, "a,b", f.adapter[1], 1, &err));
    assert_false(steel_engine_load_lora(e, "third", "/nowhere", 1, &err));
    assert_int_equal(ask(e, "second", second, N), 0);
    assert_true(memcmp(plain, second, sizeof second) != 0);
    assert_int_equal(ask(e, "first,second:0", again, N), 0);
    assert_memory_equal(half, again, sizeof half);
    assert_int_equal(ask(e, "first,first", again, N), -1);
    /* in use: refused; then another one under its name, which finds none of its pages */
    struct steel_request_options o = steel_request_options();
    int32_t one = 5;
    o.tokens = &one;
    o.n_tokens = 1;
    o.ignore_eos = true;
    o.lora = "second";
    struct steel_request *r = steel_request_submit(e, &o, &err);
    assert_non_null(r);
    assert_false(steel_engine_unload_lora(e, "second", &err));
    assert_int_equal(err.kind, STEEL_FULL);
    steel_request_free(r);
    assert_true(steel_engine_unload_lora(e, "second", &err));
    assert_false(steel_engine_unload_lora(e, "second", &err));
    assert_true(steel_engine_load_lora(e, "second", f.adapter[4], 1, &err));
    assert_int_equal(ask(e, "second", again, N), 0);
    assert_true(memcmp(again, second, sizeof second) != 0);
    steel_engine_close(e);
    /* not asked for: none can come */
    opt.n_loras = opt.max_lora_rank = 0;
    e = steel_engine_open(bases[0].path, &opt, &err);
    assert_non_null(e);
    assert_false(steel_engine_load_lora(e, "first", f.adapter[0], 1, &err));
    assert_int_equal(ask(e, NULL, again, N), 0);
    assert_memory_equal(plain, again, sizeof plain);
    steel_engine_close(e);
    /* a rank that was not allowed for */
    opt.max_lora_rank = 4;
    e = steel_engine_open(bases[0].path, &opt, &err);
    assert_non_null(e);
    assert_false(steel_engine_load_lora(e, "first", f.adapter[0], 1, &err));
    assert_non_null(strstr(err.message, "max-lora-rank"));
    steel_engine_close(e);
    folder_remove(&f);
}

static void names(void **state)
{
    (void)state;
    static const struct {
        const char *text, *name, *path;
        float scale;
    } good[] = {{"dir", "dir", "dir", 1},
                {"a/b/c.gguf", "c", "a/b/c.gguf", 1},
                {"x=a/b", "x", "a/b", 1},
                {"x=a/b:0.5", "x", "a/b", 0.5f},
                {"a/b/:-2", "b", "a/b/", -2}};
    struct adapter_ref r;
    struct error err = {0};
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        if (!adapter_ref_parse(good[i].text, &r, &err))
            fail_msg("%s: %s", good[i].text, err.msg);
        assert_string_equal(r.name, good[i].name);
        assert_string_equal(r.path, good[i].path);
        assert_true(r.scale == good[i].scale);
        mem_free(r.path);
    }
    static const char *const bad[] = {"", "=x", "x=", "a:b", "a b=c", "x=:2", "a:b=c/d"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_false(adapter_ref_parse(bad[i], &r, &err));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names),
        cmocka_unit_test(kernels_agree),
        cmocka_unit_test(mixed_batches),
        cmocka_unit_test(library),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
