/*
 * Products of one file's weights, on one thread: product FILE linear|wide|experts ROWS RUNS. For counting instructions
 * (bench/arm/count.py): the difference between two numbers of runs leaves start and packing out.
 * product write FILE TYPE makes such a file: tensors "linear", "wide", "router", "gate", "up" and "down" of random values.
 */
#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "base/mem.h"
#include "file/gguf_write.h"
#include "quant/quantize.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    IN = 2048,
    OUT = 512,
    FF = 512,
    EXPERTS = 8,
    USED = 4
}; /* bench/arm/peer.cpp has the same */

static void fail(const struct error *err)
{
    fprintf(stderr, "product: %s\n", err->msg);
    exit(1);
}

static float *noises(size_t n, uint32_t *seed)
{
    float *x = mem_zalloc(n, sizeof *x);
    for (size_t i = 0; i < n; i++) {
        *seed = *seed * 1664525u + 1013904223u;
        x[i] = (float)(int32_t)*seed * 0x1p-31f;
    }
    return x;
}

static void write_file(const char *path, enum dtype type)
{
    const struct {
        const char *name;
        enum dtype type;
        int64_t dims[3];
    } t[] = {{"linear", type, {IN, OUT, 1}},       {"wide", type, {IN, IN, 1}},
             {"router", DT_F32, {IN, EXPERTS, 1}}, {"gate", type, {IN, FF, EXPERTS}},
             {"up", type, {IN, FF, EXPERTS}},      {"down", type, {FF, IN, EXPERTS}}};
    enum { N = sizeof t / sizeof *t };
    struct error err;
    struct gguf_writer *w = gguf_writer_new(path, &err);
    uint32_t seed = 1;
    if (!w)
        fail(&err);
    for (int i = 0; i < N; i++)
        gguf_add_tensor(w, t[i].name, t[i].type, t[i].dims[2] > 1 ? 3 : 2, t[i].dims);
    bool ok = gguf_writer_begin(w, &err);
    for (int i = 0; ok && i < N; i++) {
        size_t in = (size_t)t[i].dims[0], rows = (size_t)t[i].dims[1];
        size_t n = dtype_bytes(t[i].type, in * rows);
        for (size_t e = 0; e < (size_t)t[i].dims[2]; e++) {
            float *x = noises(in * rows, &seed);
            uint8_t *data = mem_alloc(n);
            quantize_rows(t[i].type, x, data, rows, in, NULL);
            gguf_writer_put(w, i, e * n, data, n);
            mem_free(data);
            mem_free(x);
        }
    }
    if (!ok || !gguf_writer_finish(w, &err))
        fail(&err);
    gguf_writer_free(w);
}

/* The tensors `names` as one weight, one after the other within each expert. */
static struct weight upload(struct backend *be, const struct tensorfile *f,
                            const char *const *names, int n)
{
    struct raw_weight raw = {.n_seg = n};
    const uint8_t *experts[2][EXPERTS];
    struct weight w = {0};
    struct error err;
    for (int i = 0; i < n; i++) {
        const struct tensor *t = tensorfile_find(f, names[i]);
        if (!t || t->dims[2] > EXPERTS) {
            error_set(&err, "no such tensor: %s", names[i]);
            fail(&err);
        }
        raw.n_in = (int)t->dims[0];
        raw.n_out += (int)t->dims[1];
        raw.n_expert = (int)t->dims[2];
        for (int e = 0; e < raw.n_expert; e++)
            experts[i][e] = t->data + (size_t)e * (t->bytes / (size_t)raw.n_expert);
        raw.seg[i] = (struct raw_seg){.type = t->type, .rows = (int)t->dims[1], .data = experts[i]};
    }
    if (!be->ops->upload(be, &raw, raw.n_expert > 1 ? WEIGHT_EXPERTS : WEIGHT_LINEAR, &w, &err))
        fail(&err);
    return w;
}

int main(int argc, char **argv)
{
    enum dtype type = argc == 4 ? dtype_from_name(argv[3]) : DT_NONE;
    if (type != DT_NONE && quantize_supported(type) && !strcmp(argv[1], "write")) {
        write_file(argv[2], type);
        return 0;
    }
    bool moe = argc == 5 && !strcmp(argv[2], "experts");
    bool wide = argc == 5 && !strcmp(argv[2], "wide");
    if (argc != 5 || (!moe && !wide && strcmp(argv[2], "linear") != 0)) {
        fprintf(stderr, "product FILE linear|wide|experts ROWS RUNS, or product write FILE TYPE\n");
        return 2;
    }
    int rows = atoi(argv[3]), runs = atoi(argv[4]);
    uint32_t seed = 1;
    struct backend_options opt = {.device = "cpu", .threads = 1};
    struct error err;
    struct tensorfile *f = tensorfile_open(argv[1], &err);
    struct backend *be = f ? backend_open_cpu(&opt, &err) : NULL;
    if (!be)
        fail(&err);
    struct weight linear = upload(be, f, (const char *const[]){wide ? "wide" : "linear"}, 1);
    struct weight router = upload(be, f, (const char *const[]){"router"}, 1);
    struct weight gate_up = upload(be, f, (const char *const[]){"gate", "up"}, 2);
    struct weight down = upload(be, f, (const char *const[]){"down"}, 1);
    struct layer layer = {
        .mixer.attention = {.n_heads = 1, .n_kv_heads = 1, .k_dim = 64, .v_dim = 64},
        .mlp = {.router = {.w = &router, .n_used = USED, .renorm = true},
                .experts = {.gate_up = &gate_up, .down = &down}}};
    struct network net = {.n_layers = 1,
                          .n_embd = IN,
                          .n_vocab = wide ? IN : OUT,
                          .layers = &layer,
                          .head.w = &linear};
    struct bounds bounds = {.page_len = 16,
                            .n_pages = 1,
                            .k_type = DT_F16,
                            .v_type = DT_F16,
                            .max_tokens = rows,
                            .max_seqs = 1,
                            .max_out = 1,
                            .max_pages = 1};
    if (!be->ops->prepare(be, &net, &bounds, &err))
        fail(&err);
    float *x = noises((size_t)rows * IN, &seed), *y = mem_zalloc((size_t)rows * IN, sizeof *y);
    for (int i = 0; i < runs; i++)
        if (moe)
            moe_run(cpu_self(be), &layer.mlp, x, x, y, rows);
        else
            gemm_linear(cpu_self(be), &linear, x, y, rows);
    for (int i = 0; i < 4; i++)
        printf("%g%c", (double)y[i], i < 3 ? ' ' : '\n');
    struct weight *all[] = {&linear, &router, &gate_up, &down};
    for (int i = 0; i < 4; i++)
        be->ops->release(be, all[i]);
    be->ops->close(be);
    tensorfile_close(f);
    mem_free(x);
    mem_free(y);
    return 0;
}
