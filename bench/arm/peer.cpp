/*
 * bench/product.c with llama.cpp's ggml, for count.py: peer FILE linear|wide|experts ROWS RUNS, on one thread. Weights go to the
 * first of the CPU's buffer types that runs them, as llama.cpp chooses: repacked ones before plain ones.
 */
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "gguf.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

enum { IN = 2048, OUT = 512, EXPERTS = 8, USED = 4 };

static std::vector<float> noises(size_t n)
{
    uint32_t seed = 1;
    std::vector<float> x(n);
    for (float &v : x) {
        seed = seed * 1664525u + 1013904223u;
        v = (float)(int32_t)seed * 0x1p-31f;
    }
    return x;
}

/* Whether the device runs w's product with w in a buffer of this type. */
static bool runs(ggml_backend_dev_t dev, ggml_backend_buffer_type_t type, const ggml_tensor *w)
{
    ggml_context *ctx = ggml_init({ggml_tensor_overhead() * 8, nullptr, true});
    ggml_tensor *copy = ggml_dup_tensor(ctx, w), *op;
    ggml_tensor *x = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, w->ne[0], w->ne[2] > 1 ? USED : 512, w->ne[2] > 1 ? 512 : 1);
    if (w->ne[2] > 1)
        op = ggml_mul_mat_id(ctx, copy, x, ggml_new_tensor_2d(ctx, GGML_TYPE_I32, USED, 512));
    else
        op = ggml_mul_mat(ctx, copy, x);
    copy->buffer = ggml_backend_buft_alloc_buffer(type, 0);
    bool ok = ggml_backend_dev_supports_op(dev, op);
    ggml_backend_buffer_free(copy->buffer);
    ggml_free(ctx);
    return ok;
}

int main(int argc, char **argv)
{
    bool moe = argc == 5 && !strcmp(argv[2], "experts");
    if (argc != 5 || (!moe && strcmp(argv[2], "linear") != 0 && strcmp(argv[2], "wide") != 0)) {
        fprintf(stderr, "peer FILE linear|wide|experts ROWS RUNS\n");
        return 2;
    }
    int rows = atoi(argv[3]), n_runs = atoi(argv[4]);
    ggml_backend_t cpu = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(cpu, 1);
    ggml_backend_dev_t dev = ggml_backend_get_device(cpu);

    std::vector<ggml_backend_buffer_type_t> types;
    auto *more = (ggml_backend_dev_get_extra_bufts_t)ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t *t = more ? more(dev) : nullptr; t && *t; t++)
        types.push_back(*t);
    types.push_back(ggml_backend_cpu_buffer_type());

    ggml_context *file = nullptr;
    gguf_context *gguf = gguf_init_from_file(argv[1], {false, &file});
    if (!gguf)
        return 1;
    ggml_context *ctx = ggml_init({ggml_tensor_overhead() * 256 + ggml_graph_overhead(), nullptr, true});
    auto weight = [&](const char *name) {
        ggml_tensor *from = ggml_get_tensor(file, name), *w = ggml_dup_tensor(ctx, from);
        for (ggml_backend_buffer_type_t t : types) {
            if (!runs(dev, t, from))
                continue;
            ggml_backend_buffer_t b = ggml_backend_buft_alloc_buffer(t, ggml_backend_buft_get_alloc_size(t, w));
            ggml_backend_buffer_set_usage(b, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
            ggml_backend_tensor_alloc(b, w, ggml_backend_buffer_get_base(b));
            ggml_backend_tensor_set(w, from->data, 0, ggml_nbytes(from));
            fprintf(stderr, "%s: %s in %s\n", name, ggml_type_name(w->type), ggml_backend_buft_name(t));
            return w;
        }
        abort();
    };
    ggml_tensor *x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, IN, rows), *y;
    if (!moe) {
        y = ggml_mul_mat(ctx, weight(argv[2]), x);
    } else {
        ggml_tensor *p = ggml_soft_max(ctx, ggml_mul_mat(ctx, weight("router"), x));
        ggml_tensor *ids = ggml_argsort_top_k(ctx, p, USED);
        ggml_tensor *w = ggml_get_rows(ctx, ggml_reshape_3d(ctx, p, 1, EXPERTS, rows), ids);
        w = ggml_reshape_2d(ctx, w, USED, rows);
        w = ggml_reshape_3d(ctx, ggml_div(ctx, w, ggml_sum_rows(ctx, w)), 1, USED, rows);
        ggml_tensor *in = ggml_reshape_3d(ctx, x, IN, 1, rows);
        ggml_tensor *up = ggml_mul_mat_id(ctx, weight("up"), in, ids);
        ggml_tensor *gate = ggml_mul_mat_id(ctx, weight("gate"), in, ids);
        ggml_tensor *out = ggml_mul_mat_id(ctx, weight("down"), ggml_swiglu_split(ctx, gate, up), ids);
        out = ggml_mul(ctx, out, w);
        y = nullptr;
        for (int i = 0; i < USED; i++) {
            ggml_tensor *v = ggml_view_2d(ctx, out, IN, rows, out->nb[2], (size_t)i * out->nb[1]);
            y = y ? ggml_add(ctx, y, v) : v;
        }
    }
    ggml_cgraph *graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, y);
    ggml_backend_buffer_t input = ggml_backend_alloc_buffer(cpu, ggml_nbytes(x) + 64);
    ggml_backend_tensor_alloc(input, x, ggml_backend_buffer_get_base(input));
    ggml_gallocr_t alloc = ggml_gallocr_new(ggml_backend_get_default_buffer_type(cpu));
    if (!ggml_gallocr_alloc_graph(alloc, graph))
        return 1;
    std::vector<float> values = noises((size_t)rows * IN);
    ggml_backend_tensor_set(x, values.data(), 0, ggml_nbytes(x));
    for (int i = 0; i < n_runs; i++)
        ggml_backend_graph_compute(cpu, graph);
    float first[4];
    ggml_backend_tensor_get(y, first, 0, sizeof first);
    printf("%g %g %g %g\n", (double)first[0], (double)first[1], (double)first[2], (double)first[3]);
    return 0;
}
