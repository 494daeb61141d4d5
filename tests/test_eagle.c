/*
 * EAGLE-3 heads (model/eagle.h). What one drafts is what its equation says, computed by tests/eagle_toy.py in plain
 * Python: folders of every kind and llama.cpp's GGUF, on the reference and on the CPU's kernels, in chunks of every size,
 * and drafts after drafts. Answers are byte for byte those without drafts, for models with attention, windows, states,
 * latents and adapters. A head that knows what comes next is always right. Heads for other models, and broken ones, are
 * refused by the field's name.
 */
#include "draft_crowd.h"

#include "backend/backend.h"
#include "engine/runtime.h"
#include "model/eagle.h"

#include <math.h>

static void toy(const char *what, const char *a, const char *b)
{
    char command[512];
    snprintf(command, sizeof command, "python3 tests/eagle_toy.py %s %s %s", what, a, b);
    CHECK(system(command) == 0, "%s", command); /* NOLINT(cert-env33-c): our own words */
}

/* The equation */

static const char *const kinds[] = {"midlayer", "numbered", "speculator", "normed", "usual"};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* What a head drafts after a text: (n - 1) rows of first drafts, then those of drafts after the last one. */
struct expected {
    int n, n_out, depth;
    int32_t *tokens, *chain, *ids; /* (n), (depth), (n_out) */
    float *rows;                   /* (n - 1 + depth - 1, n_out) */
};

static struct expected read_expected(const char *path)
{
    struct expected e;
    int32_t head[3];
    FILE *f = fopen(path, "rb");
    CHECK(f && fread(head, sizeof head, 1, f) == 1, "%s", path);
    e.n = head[0], e.n_out = head[1], e.depth = head[2];
    size_t n = (size_t)e.n, n_out = (size_t)e.n_out, depth = (size_t)e.depth;
    e.tokens = mem_zalloc(n + depth + n_out, sizeof *e.tokens);
    e.chain = e.tokens + n;
    e.ids = e.chain + depth;
    e.rows = mem_zalloc((n + depth - 2) * n_out, sizeof *e.rows);
    CHECK(fread(e.tokens, sizeof *e.tokens, n + depth + n_out, f) == n + depth + n_out &&
              fread(e.rows, n_out * sizeof *e.rows, n + depth - 2, f) == n + depth - 2,
          "%s", path);
    fclose(f);
    return e;
}

static struct runtime *try_open(const char *model, const char *head, bool reference,
                                struct error *err)
{
    struct runtime_options opt = {.context = 64,
                                  .k_type = DT_F32,
                                  .v_type = DT_F32,
                                  .max_seqs = 4,
                                  .max_tokens = 128,
                                  .max_out = 64,
                                  .draft = 2,
                                  .draft_from = 1u << DRAFT_HEAD,
                                  .draft_model = head};
    opt.backend.threads = 2;
    opt.backend.deterministic = true;
    if (reference)
        setenv("STEEL_ISA", "ref", 1);
    struct runtime *rt = runtime_open(model, &opt, err);
    if (reference)
        unsetenv("STEEL_ISA");
    return rt;
}

/* The largest difference of a row of logits, relative to its largest. Tokens that the head lacks are impossible. */
static double difference(struct runtime *rt, int row, const float *want, int n_out)
{
    float got[256];
    double diff = 0, scale = 1e-30;
    int n_vocab = rt->model->config.n_vocab;
    assert_true(n_vocab <= 256);
    step_logits(rt->step, row, got);
    for (int i = 0; i < n_out; i++) {
        diff = fmax(diff, fabs((double)got[i] - (double)want[i]));
        scale = fmax(scale, fabs((double)want[i]));
    }
    for (int i = n_out; i < n_vocab; i++)
        assert_true(isinf(got[i]) && got[i] < 0);
    return diff / scale;
}

static int32_t best_of(const float *row, const struct expected *e)
{
    int best = 0;
    for (int i = 1; i < e->n_out; i++)
        best = row[i] > row[best] ? i : best;
    return e->ids[best];
}

/* Reads the text in chunks, the head after each. Returns the largest difference. beside: another sequence in the same
 * steps. */
static double read_text(struct runtime *rt, const struct expected *e, int chunk, bool beside)
{
    struct kv_seq seqs[2] = {{0}};
    struct error err = {0};
    double most = 0;
    struct draft_item g[2];
    for (int at = 0, n; at < e->n - 1; at += n) {
        struct step_item items[2];
        n = e->n - 1 - at < chunk ? e->n - 1 - at : chunk;
        for (int i = 0; i <= beside; i++)
            items[i] = (struct step_item){
                .seq = &seqs[i], .tokens = e->tokens + at, .n_tokens = n, .want = LOGITS_LAST};
        CHECK(step_run(rt->step, items, 1 + beside, &err), "%s", err.msg);
        for (int i = 0; i <= beside; i++)
            g[i] = (struct draft_item){.seq = &seqs[i],
                                       .tokens = e->tokens + at + 1,
                                       .first = at,
                                       .n = n,
                                       .from = items[i].row,
                                       .want = true};
        CHECK(step_draft(rt->step, g, 1 + beside, &err), "%s", err.msg);
        const float *want = e->rows + (size_t)(at + n - 1) * (size_t)e->n_out;
        for (int i = 0; i <= beside; i++) {
            most = fmax(most, difference(rt, g[i].row, want, e->n_out));
            assert_int_equal(g[i].token, best_of(want, e));
        }
    }
    for (int d = 1; d < e->depth; d++) { /* drafts after the last one */
        const float *want = e->rows + (size_t)(e->n - 2 + d) * (size_t)e->n_out;
        for (int i = 0; i <= beside; i++) {
            assert_int_equal(g[i].token, e->chain[d - 1]);
            g[i].tokens = &e->chain[d - 1];
            g[i].first += g[i].n;
            g[i].n = 1;
            g[i].from = g[i].row;
        }
        CHECK(step_draft(rt->step, g, 1 + beside, &err), "%s", err.msg);
        for (int i = 0; i <= beside; i++) {
            most = fmax(most, difference(rt, g[i].row, want, e->n_out));
            assert_int_equal(g[i].token, e->chain[d]);
        }
    }
    for (int i = 0; i < 2; i++)
        kvcache_release(rt->kv, &seqs[i]);
    return most;
}

static void the_head_is_its_equation(void **state)
{
    (void)state;
    char model[64], head[128], bin[128];
    toy("equation", dir, "");
    snprintf(model, sizeof model, "%s/model", dir);
    for (int k = 0; k < KINDS; k++) {
        snprintf(bin, sizeof bin, "%s/%s.bin", dir, kinds[k]);
        struct expected e = read_expected(bin);
        for (int way = 0; way < 4; way++) { /* the reference, the CPU's kernels; folder, GGUF */
            struct error err = {0};
            snprintf(head, sizeof head, "%s/%s%s", dir, kinds[k], way / 2 ? ".gguf" : "");
            struct runtime *rt = try_open(model, head, way % 2 == 0, &err);
            CHECK(rt, "%s", err.msg);
            static const int chunks[] = {1, 3, 7, 17};
            double most = 0;
            for (int c = 0; c < 4; c++)
                most = fmax(most, read_text(rt, &e, chunks[c], c % 2));
            print_message("%s%s, %s: %.1e\n", kinds[k], way / 2 ? " (GGUF)" : "", rt->be->ops->name,
                          most);
            assert_true(most < (way % 2 == 0 ? 1e-5 : 2e-5));
            runtime_close(rt);
        }
        mem_free(e.tokens);
        mem_free(e.rows);
    }
}

/* Answers */

static const unsigned head_only = 1u << DRAFT_HEAD;

static const struct setting settings[] = {
    {.model = "qwen3", .lora = "tests/golden/qwen3-lora", .from = 1u << DRAFT_HEAD},
    {.model = "gemma3", .k_type = DT_Q8_0, .v_type = DT_Q8_0, .from = ~0u},
    {.model = "deepseek_v3", .from = 1u << DRAFT_HEAD}, /* latents */
    {.model = "qwen3_5", .from = ~0u},
    {.model = "gpt_oss", .from = 1u << DRAFT_HEAD},
    {.model = "qwen3", .kv_tokens = 256, .from = 1u << DRAFT_HEAD}, /* preempted */
    {.model = "right", .from = 1u << DRAFT_HEAD},
    {.model = "right", .kv_tokens = 320, .from = ~0u},
};

/* The setting with its head, and the model's own folder. */
static struct setting with_head(const struct setting *s, char path[128], char head[128])
{
    struct setting own = *s;
    if (strcmp(s->model, "right")) {
        mtp_toy_plain(dir, s->model, path, 128);
        snprintf(head, 128, "%s/head-%s", dir, s->model);
        toy("random", path, head);
    } else {
        snprintf(path, 128, "%s/right/model", dir);
        snprintf(head, 128, "%s/right/head", dir);
        snprintf(path, 128, "%s/right", dir);
        toy("right", path, "");
        snprintf(path, 128, "%s/right/model", dir);
        own.path = path;
    }
    own.head = head;
    return own;
}

static void answers_are_the_same(void **state)
{
    (void)state;
    static struct answer want[ANSWERS];
    struct request_spec specs[CROWD];
    int32_t prompts[CROWD][64];
    make_grammars();
    for (size_t m = 0; m < sizeof settings / sizeof *settings; m++) {
        char path[128], head[128];
        const struct setting s = with_head(&settings[m], path, head);
        if (is_left_out(&s))
            continue;
        crowd(specs, prompts, s.lora != NULL);
        answer_plainly(&s, specs, want);
        static const struct drafting ways[] = {{.fixed = 3},
                                               {.fixed = 8},
                                               {.fixed = 6, .cut = true, .state = 3},
                                               {.random = true, .state = 9},
                                               {.fixed = DRAFT_AUTO}};
        for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
            how = ways[w];
            if (device && !how.cut)
                continue;
            struct engine_stats st = answer_with_drafts(&s, specs, want);
            int drafted = (int)st.n_drafted[DRAFT_HEAD], right = (int)st.n_accepted[DRAFT_HEAD];
            print_message("%s, %d%s%s: %d of %d accepted\n", s.model, how.fixed,
                          how.cut ? " cut" : "", how.random ? " random" : "", right, drafted);
            assert_true(how.fixed == DRAFT_AUTO || s.from != head_only || drafted > 100);
            assert_true(!st.n_drafted[DRAFT_MODEL]);
            assert_true(!s.kv_tokens || st.n_preempted > 0);
        }
    }
    grammar_free(grammar);
    grammar_free(form);
}

static void the_right_head_is_always_right(void **state)
{
    (void)state;
    static struct answer got;
    char path[128], head[128];
    const struct setting own = {.model = "right", .from = 1u << DRAFT_HEAD},
                         s = with_head(&own, path, head);
    int32_t prompt[MOST];
    uint32_t seed = 5;
    int n = 60;
    how = (struct drafting){.fixed = 7};
    struct engine *e = open_engine(&s, true);
    for (int i = 0; i < n; i++)
        prompt[i] = (int32_t)draw(&seed, 90);
    for (int turn = 0; turn < 2; turn++) { /* the second one finds pages of the first */
        struct request_spec spec = {
            .prompt = prompt, .n_prompt = n, .max_tokens = 80, .ignore_eos = true};
        struct engine_stats before, after;
        spec.sample = sample_params_default();
        spec.sample.temp = 0;
        spec.sample.repeat_penalty = 1;
        engine_stats(e, &before);
        run(e, &spec, &got, 1);
        engine_stats(e, &after);
        const struct draft_count *c = &got.usage.drafts[DRAFT_HEAD];
        int steps = (int)(after.n_steps - before.n_steps);
        print_message("%d of %d accepted, %d tokens in %d steps\n", c->accepted, c->drafted, got.n,
                      steps);
        assert_int_equal(c->accepted, c->drafted);
        assert_true(c->drafted > 60 && steps <= 16);
        memcpy(prompt + n, got.tokens, (size_t)got.n * sizeof *prompt);
        n += got.n;
    }
    assert_true(engine_runtime(e)->small == NULL);
    close_engine(e);
}

/* Refusals */

/* Runs a few lines of Python over the head's config `c` and its tensors `t`, name -> [type, shape, bytes]. */
static void change(const char *from, const char *to, const char *lines)
{
    char path[128];
    snprintf(path, sizeof path, "%s/change.py", dir);
    FILE *f = fopen(path, "w");
    CHECK(f, "%s", path);
    fprintf(f,
            "import json, os, struct, sys\nsys.path.insert(0, 'tests')\nfrom gguf_tools import *\n"
            "c = json.load(open('%s/config.json'))\nt = {k: list(v) for k, v in "
            "read_safetensors('%s/model.safetensors').items()}\n%s\nos.makedirs('%s', "
            "exist_ok=True)\njson.dump(c, open('%s/config.json', 'w'))\n"
            "write_safetensors('%s/model.safetensors', t)\n",
            from, from, lines, to, to, to);
    fclose(f);
    char command[160];
    snprintf(command, sizeof command, "python3 %s", path);
    CHECK(system(command) == 0, "%s", lines); /* NOLINT(cert-env33-c): our own words */
}

static void others_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *lines, *says;
    } cases[] = {
        {"c['hidden_size'] = 64", "hidden_size: 64"},
        {"c['target_hidden_size'] = 64", "target_hidden_size: 64"},
        {"c['vocab_size'] = 97", "vocab_size: 97"},
        {"c['draft_vocab_size'] = 97", "draft_vocab_size: 97"},
        {"c['draft_vocab_size'] = 39", "tensor d2t"},
        {"c['num_hidden_layers'] = 2", "num_hidden_layers"},
        {"c['num_key_value_heads'] = 4", "6 heads do not divide by 4"},
        {"c['head_dim'] = 32", "q_proj.weight: shape"},
        {"c['hidden_act'] = 'gelu'", "hidden_act"},
        {"c['eagle_aux_hidden_state_layer_ids'] = [2, 3, 8]", "layer_ids: layer 8"},
        {"c['eagle_aux_hidden_state_layer_ids'] = [2, 3, -1]", "layer_ids"},
        {"c['eagle_aux_hidden_state_layer_ids'] = [2, 3, 'x']", "layer_ids"},
        {"c['eagle_aux_hidden_state_layer_ids'] = [2, 3]", "tensor fc.weight: shape"},
        {"c['eagle_aux_hidden_state_layer_ids'] = [2] * 9", "layer_ids: 9 layers"},
        {"c['eagle_aux_hidden_state_layer_ids'] = 3", "layer_ids: 0 layers"},
        {"c['norm_before_fc'] = True", "input_norm.weight: missing"},
        {"c['norm_before_residual'] = 3", "norm_before_residual"},
        {"c['eagle_config'] = {'use_aux_hidden_state': False}", "use_aux_hidden_state"},
        {"c['rope_scaling'] = {'rope_type': 'new'}", "rope_type"},
        {"del t['fc.weight']", "tensor fc.weight: missing"},
        {"del t['d2t']", "tensor d2t: missing"},
        {"del t['lm_head.weight']", "lm_head.weight: missing"},
        {"del t['midlayer.hidden_norm.weight']", "hidden_norm.weight: missing"},
        {"t['midlayer.self_attn.q_norm.weight'] = ['F32', [16], bytes(64)]", "q_norm.weight: no"},
        {"t['d2t'][2] = struct.pack('<q', 96) + t['d2t'][2][8:]", "tensor d2t: entry 0: 96"},
        {"t['d2t'][2] = t['d2t'][2][:-8] + struct.pack('<q', -40)", "tensor d2t: entry 39: -40"},
        {"t['d2t'][2] = t['d2t'][2][:-8] + struct.pack('<q', 1 << 62)", "tensor d2t: entry 39"},
        {"t['d2t'] = ['F32', [40], bytes(160)]", "tensor d2t: F32"},
        {"t['d2t'] = ['I64', [2, 20], t['d2t'][2]]", "tensor d2t"},
        {"t['norm.weight'] = ['F32', [31], bytes(124)]", "norm.weight: shape"},
    };
    char model[64], good[128], bad[128];
    struct error err = {0};
    toy("equation", dir, "");
    snprintf(model, sizeof model, "%s/model", dir);
    snprintf(good, sizeof good, "%s/midlayer", dir);
    snprintf(bad, sizeof bad, "%s/bad", dir);
    change(good, bad, "");
    struct runtime *rt = try_open(model, bad, false, &err); /* nothing else is wrong */
    CHECK(rt, "%s", err.msg);
    runtime_close(rt);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        change(good, bad, cases[i].lines);
        err = (struct error){0};
        rt = try_open(model, bad, false, &err);
        if (rt || !strstr(err.msg, cases[i].says) || !strstr(err.msg, "bad"))
            fail_msg("%s: %s", cases[i].lines, rt ? "not refused" : err.msg);
    }
    assert_null(try_open(good, NULL, false, &err)); /* a head is no model */
    assert_non_null(strstr(err.msg, "EAGLE-3 head"));
}

/* The same of a GGUF, with its metadata `m` and its tensors `t`, name -> [dims, type, bytes]. */
static void change_gguf(const char *from, const char *to, const char *lines)
{
    char path[128], command[160];
    snprintf(path, sizeof path, "%s/change.py", dir);
    FILE *f = fopen(path, "w");
    CHECK(f, "%s", path);
    fprintf(f,
            "import struct, sys\nsys.path.insert(0, 'tests')\nfrom gguf_tools import *\ng = "
            "Gguf('%s')\n"
            "m, t = g.meta, {k: list(v) for k, v in g.tensors.items()}\n%s\n"
            "write_gguf('%s', m, [(k, *v) for k, v in t.items()])\n",
            from, lines, to);
    fclose(f);
    snprintf(command, sizeof command, "python3 %s", path);
    CHECK(system(command) == 0, "%s", lines); /* NOLINT(cert-env33-c): our own words */
}

static void other_ggufs_are_refused(void **state)
{
    (void)state;
    static const struct {
        const char *lines, *says;
    } cases[] = {
        {"m['eagle3.embedding_length'] = 64; m['eagle3.target_hidden_size'] = 64",
         "embedding_length: 64"},
        {"m['eagle3.target_hidden_size'] = 64", "target_hidden_size: 64"},
        {"m['eagle3.vocab_size'] = 97", "vocab_size: 97"},
        {"m['eagle3.block_count'] = 2", "block_count"},
        {"m['eagle3.attention.value_length'] = 8", "value_length: 8"},
        {"m['eagle3.rope.dimension_count'] = 18", "18 rotary dimensions"},
        {"del m['eagle3.target_layers']", "target_layers: missing"},
        {"m['eagle3.target_layers'] = 3", "target_layers: not a list"},
        {"m['eagle3.target_layers'] = [2] * 9", "target_layers: 9 layers"},
        {"m['eagle3.target_layers'] = [2, 3, 8]", "target_layers: layer 8"},
        {"m['eagle3.target_layers'] = [2, 3, -2]", "target_layers"},
        {"m['eagle3.norm_before_fc'] = True", "enc.output_norm.weight: missing"},
        {"t['d2t'][2] = t['d2t'][2][:-8] + struct.pack('<q', 96)", "tensor d2t: entry 39: 96"},
        {"t['d2t'][2] = struct.pack('<q', -1) + t['d2t'][2][8:]", "tensor d2t: entry 0: -1"},
        {"t['d2t'] = [[41], 27, bytes(328)]", "output.weight: shape"},
        {"t['blk.1.attn_q.weight'] = t['blk.0.attn_q.weight']", "blk.1.attn_q.weight: no part"},
    };
    char model[64], good[128], bad[128];
    struct error err = {0};
    toy("equation", dir, "");
    snprintf(model, sizeof model, "%s/model", dir);
    snprintf(good, sizeof good, "%s/midlayer.gguf", dir);
    snprintf(bad, sizeof bad, "%s/bad.gguf", dir);
    change_gguf(good, bad, "");
    struct runtime *rt = try_open(model, bad, false, &err); /* nothing else is wrong */
    CHECK(rt, "%s", err.msg);
    runtime_close(rt);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        change_gguf(good, bad, cases[i].lines);
        err = (struct error){0};
        rt = try_open(model, bad, false, &err);
        if (rt || !strstr(err.msg, cases[i].says) || !strstr(err.msg, "bad.gguf"))
            fail_msg("%s: %s", cases[i].lines, rt ? "not refused" : err.msg);
    }
}

/* `steel show` says what a head is for. */
static void it_is_shown(void **state)
{
    (void)state;
    static const char *const heads[] = {"speculator", "numbered.gguf"};
    toy("equation", dir, "");
    for (int i = 0; i < 2; i++) {
        char command[256], text[2048] = "";
        snprintf(command, sizeof command, "${STEEL:-build/steel} show %s/%s", dir, heads[i]);
        FILE *f = popen(command, "r"); /* NOLINT(cert-env33-c): our own words */
        CHECK(f, "%s", command);
        size_t n = fread(text, 1, sizeof text - 1, f);
        text[n] = 0;
        while (fgetc(f) != EOF)
            continue;
        assert_int_equal(pclose(f), 0);
        assert_non_null(strstr(text, "EAGLE-3 head    drafts for models with an embedding of 32"));
        assert_non_null(strstr(text, "before layers 2, 3, 5"));
    }
}

/* `steel plan` counts the head's weights and its cache. */
static void the_plan_counts_it(void **state)
{
    (void)state;
    char path[128], head[128];
    const struct setting own = {.model = "right"}, s = with_head(&own, path, head);
    struct runtime_options opt = {.context = 64, .max_seqs = 2, .draft = DRAFT_AUTO};
    struct runtime_plan plan[2];
    struct error err = {0};
    for (int i = 0; i < 2; i++) {
        opt.draft_model = i ? s.head : NULL;
        struct tensorfile *f = tensorfile_open(s.path, &err);
        CHECK(f && runtime_plan(f, &opt, &plan[i], &err), "%s", err.msg);
        tensorfile_close(f);
    }
    assert_true(plan[0].weights.memory[FIT_DRAFT] == 0);
    assert_true(plan[1].weights.memory[FIT_DRAFT] > 10000);
    assert_int_equal(plan[1].token_bytes - plan[0].token_bytes, 2 * 2 * 16 * 2);
    assert_true(plan[1].step > plan[0].step);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_head_is_its_equation),
                                       cmocka_unit_test(the_right_head_is_always_right),
                                       cmocka_unit_test(answers_are_the_same),
                                       cmocka_unit_test(others_are_refused),
                                       cmocka_unit_test(other_ggufs_are_refused),
                                       cmocka_unit_test(it_is_shown),
                                       cmocka_unit_test(the_plan_counts_it)};
    const struct CMUnitTest on_device[] = {cmocka_unit_test(answers_are_the_same)};
    if (device_is_missing())
        return 0;
    CHECK(mkdtemp(dir), "a folder");
    int failed = device ? cmocka_run_group_tests(on_device, NULL, NULL)
                        : cmocka_run_group_tests(tests, NULL, NULL);
    mtp_toy_remove(dir);
    return failed;
}
