/*
 * The block that drafts tokens ahead, of every family that has one: what steps of it compute is what its
 * equation says (layer.h), whole, in chunks and token by token, from a folder and from its GGUF, on the
 * reference and on the CPU's kernels. Its input is computed here from the file's own tensors; the layer behind it is
 * like the others, which the golden tests hold.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#include <cmocka.h>

#include "golden.h"
#include "backend/backend.h"
#include "mtp_toy.h"

enum { LEN = 45 };

static char dir[] = "/tmp/steel-mtp-XXXXXX";

static struct runtime *open_model(const char *path, bool embed, bool reference)
{
    struct runtime_options opt = {.context = 64,
                                  .k_type = DT_F32,
                                  .v_type = DT_F32,
                                  .max_seqs = 4,
                                  .max_tokens = 128,
                                  .max_out = 64,
                                  .embed = embed,
                                  .draft = embed ? 0 : 2};
    opt.backend.threads = 2;
    opt.backend.deterministic = true;
    struct error err = {0};
    if (reference)
        setenv("STEEL_ISA", "ref", 1);
    struct runtime *rt = runtime_open(path, &opt, &err);
    if (reference)
        unsetenv("STEEL_ISA");
    CHECK(rt, "%s", err.msg);
    return rt;
}

static const struct tensor *tensor_of(struct runtime *rt, const char *qwen, const char *other)
{
    char name[128];
    const struct config *c = &rt->model->config;
    if (c->hf_mtp)
        snprintf(name, sizeof name, "%s", qwen);
    else
        snprintf(name, sizeof name, "model.layers.%d.%s", c->n_layers, other);
    const struct tensor *t = tensorfile_find(rt->file, name);
    CHECK(t, "%s", name);
    return t;
}

static float value(const struct tensor *t, size_t i)
{
    float v;
    quant_dequantize(t->type, t->data + i * dtype_bytes(t->type, 1), &v, 1);
    return v;
}

/* out = x / rms(x) * gain, as the folder stores gains */
static void rms(struct runtime *rt, const struct tensor *gain, const float *x, float *out)
{
    int E = rt->model->config.n_embd;
    double sum = 0, add = rt->model->config.hf_mtp ? 1 : 0;
    for (int i = 0; i < E; i++)
        sum += (double)x[i] * (double)x[i];
    sum = 1 / sqrt(sum / E + (double)rt->model->config.norm_eps);
    for (int i = 0; i < E; i++)
        out[i] = (float)((double)x[i] * sum * ((double)value(gain, (size_t)i) + add));
}

/* What goes into the layer, for rows 0..n-1: (n, E). hidden: (n, E) */
static void inputs(struct runtime *rt, const int32_t *ids, const float *hidden, int n, float *out)
{
    int E = rt->model->config.n_embd;
    char name[128];
    snprintf(name, sizeof name, "%sembed_tokens.weight", rt->model->config.hf_model);
    const struct tensor *embed = tensorfile_find(rt->file, name);
    const struct tensor *fc = tensor_of(rt, "mtp.fc.weight", "eh_proj.weight");
    float *both = mem_zalloc(2 * (size_t)E, sizeof *both);
    for (int t = 0; t < n; t++) {
        for (int i = 0; i < E; i++)
            out[i] = value(embed, (size_t)ids[t + 1] * (size_t)E + (size_t)i);
        rms(rt, tensor_of(rt, "mtp.pre_fc_norm_embedding.weight", "enorm.weight"), out, both);
        rms(rt, tensor_of(rt, "mtp.pre_fc_norm_hidden.weight", "hnorm.weight"),
            hidden + (size_t)t * (size_t)E, both + E);
        for (int o = 0; o < E; o++, out++) {
            double sum = 0;
            for (int i = 0; i < 2 * E; i++)
                sum += (double)value(fc, (size_t)o * 2 * (size_t)E + (size_t)i) * (double)both[i];
            *out = (float)sum;
        }
    }
    mem_free(both);
}

/* Rows behind the last layer and the final norm: the hidden rows, (LEN, E). */
static float *hidden_rows(const char *path, const int32_t *ids)
{
    struct runtime *rt = open_model(path, true, true);
    struct kv_seq seq = {0};
    struct error err = {0};
    size_t E = (size_t)rt->model->config.n_embd;
    struct step_item it = {.seq = &seq, .tokens = ids, .n_tokens = LEN, .want = LOGITS_ALL};
    CHECK(step_run(rt->step, &it, 1, &err), "%s", err.msg);
    float *rows = mem_zalloc(LEN * E, sizeof *rows);
    for (int t = 0; t < LEN; t++)
        step_logits(rt->step, it.first_row + t, rows + (size_t)t * E);
    kvcache_release(rt->kv, &seq);
    runtime_close(rt);
    return rows;
}

/* The logits of all drafts, (LEN - 1, V): the layer and the head over the inputs computed here. */
static float *expected(const char *path, const int32_t *ids)
{
    float *hidden = hidden_rows(path, ids);
    struct runtime *rt = open_model(path, false, true);
    struct backend *be = rt->be;
    const struct network *net = &rt->model->net;
    enum { N = LEN - 1 };
    int last = net->n_layers - 1, E = net->n_embd, V = net->n_vocab;
    int32_t pos[N], slot[N], q_start[2] = {0, N}, kv_len[1] = {N}, pages[8], none[1] = {-1},
                             save[1];
    float *x = mem_zalloc((size_t)N * (size_t)E, sizeof *x);
    float *logits = mem_zalloc((size_t)N * (size_t)V, sizeof *logits);
    inputs(rt, ids, hidden, N, x);
    save[0] = 0;
    for (int i = 0; i < N; i++)
        pos[i] = slot[i] = i;
    for (int i = 0; i < 8; i++)
        pages[i] = i;
    struct batch b = {.n_tokens = N,
                      .n_seqs = 1,
                      .n_out = N,
                      .max_pages = 4,
                      .tokens = ids + 1,
                      .pos = pos,
                      .slot = slot,
                      .q_start = q_start,
                      .kv_len = kv_len,
                      .pages = pages,
                      .out_rows = pos,
                      .state_in = none,
                      .state_out = none,
                      .save_rows = save,
                      .save_state = none,
                      .kv = rt->kv->layers,
                      .from = pos};
    struct error err = {0};
    be->ops->begin(be, &b);
    be->ops->stream->put(be, x, N);
    be->ops->mixer(be, &net->layers[last].mixer, last);
    be->ops->mlp(be, &net->layers[last].mlp, last);
    be->ops->head(be, &net->mtp.head);
    be->ops->launch(be);
    CHECK(be->ops->end(be, NULL, &err), "%s", err.msg);
    for (int i = 0; i < N; i++)
        be->ops->logits(be, i, logits + (size_t)i * (size_t)V);
    mem_free(x);
    mem_free(hidden);
    runtime_close(rt);
    return logits;
}

/* Largest difference relative to the row's largest logit. */
static double difference(const float *a, const float *b, int n)
{
    double diff = 0, scale = 1e-30;
    for (int i = 0; i < n; i++) {
        diff = fmax(diff, fabs((double)a[i] - (double)b[i]));
        scale = fmax(scale, fabs((double)a[i]));
    }
    return diff / scale;
}

/* Reads the ids in chunks, the block behind each; returns the largest difference of the drafts at the ends
 * of chunks. beside: another sequence in the same steps. */
static double guesses_differ(struct runtime *rt, const int32_t *ids, const float *want, int chunk,
                             bool beside)
{
    int V = rt->model->config.n_vocab;
    struct kv_seq seqs[2] = {{0}};
    struct error err = {0};
    float *row = mem_zalloc((size_t)V, sizeof *row);
    double most = 0;
    for (int at = 0, n; at < LEN - 1; at += n) {
        n = LEN - 1 - at < chunk ? LEN - 1 - at : chunk;
        struct step_item items[2];
        struct draft_item g[2];
        for (int i = 0; i <= beside; i++)
            items[i] = (struct step_item){
                .seq = &seqs[i], .tokens = ids + at, .n_tokens = n, .want = LOGITS_LAST};
        CHECK(step_run(rt->step, items, 1 + beside, &err), "%s", err.msg);
        for (int i = 0; i <= beside; i++)
            g[i] = (struct draft_item){.seq = &seqs[i],
                                       .tokens = ids + at + 1,
                                       .first = at,
                                       .n = n,
                                       .from = items[i].row,
                                       .want = true};
        CHECK(step_draft(rt->step, g, 1 + beside, &err), "%s", err.msg);
        for (int i = 0; i <= beside; i++) {
            step_logits(rt->step, g[i].row, row);
            const float *right = want + (size_t)(at + n - 1) * (size_t)V;
            most = fmax(most, difference(right, row, V));
            int best = 0;
            for (int k = 1; k < V; k++)
                best = row[k] > row[best] ? k : best;
            assert_int_equal(g[i].token, best);
        }
    }
    for (int i = 0; i < 2; i++)
        kvcache_release(rt->kv, &seqs[i]);
    mem_free(row);
    return most;
}

static void the_block_is_its_equation(void **state)
{
    (void)state;
    for (int m = 0; m < MTP_MODELS; m++) {
        char folder[128], gguf[160], command[512], golden[128];
        mtp_toy_make(dir, mtp_models[m], folder, sizeof folder);
        snprintf(gguf, sizeof gguf, "%s.gguf", folder);
        snprintf(command, sizeof command, "${STEEL:-build/steel} convert %s %s >/dev/null 2>&1",
                 folder, gguf);
        CHECK(system(command) == 0, "%s", command); /* NOLINT(cert-env33-c): our own words */
        snprintf(golden, sizeof golden, MICRO "%s/golden.bin", mtp_models[m]);
        struct logits g = logits_read(golden);
        assert_true(g.n_tokens >= LEN);
        float *want = expected(folder, g.ids);
        for (int k = 0; k < 3; k++) { /* the reference, the CPU's kernels, those from the GGUF */
            struct runtime *rt = open_model(k == 2 ? gguf : folder, false, k == 0);
            double whole = guesses_differ(rt, g.ids, want, LEN, false);
            double parts = guesses_differ(rt, g.ids, want, 7, true);
            double single = guesses_differ(rt, g.ids, want, 1, true);
            print_message("%s %s: %.2g whole, %.2g in chunks, %.2g by token\n", mtp_models[m],
                          k == 0   ? "reference"
                          : k == 1 ? "kernels"
                                   : "GGUF",
                          whole, parts, single);
            double most = k == 0 ? 1e-5 : 1e-4;
            assert_true(whole < most && parts < most && single < most);
            runtime_close(rt);
        }
        mem_free(want);
        logits_free(&g);
    }
}

int main(void)
{
    CHECK(mkdtemp(dir), "a folder");
    const struct CMUnitTest tests[] = {cmocka_unit_test(the_block_is_its_equation)};
    int rc = cmocka_run_group_tests(tests, NULL, NULL);
    mtp_toy_remove(dir);
    return rc;
}
