/*
 * One product, several times, on one thread: product TYPE INPUTS OUTPUTS ROWS RUNS. For counting instructions
 * (bench/arm/count.py): the difference between two numbers of runs leaves start and packing out.
 */
#include "backend/cpu/cpu.h"
#include "backend/cpu/gemm.h"
#include "base/mem.h"
#include "quant/quantize.h"

#include <stdio.h>
#include <stdlib.h>

static float noise(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return (float)(int32_t)*seed * 0x1p-31f;
}

static float *noises(size_t n, uint32_t *seed)
{
    float *x = mem_zalloc(n, sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = noise(seed);
    return x;
}

int main(int argc, char **argv)
{
    enum dtype type = argc == 6 ? dtype_from_name(argv[1]) : DT_NONE;
    if (type == DT_NONE || !quantize_supported(type)) {
        fprintf(stderr, "product TYPE INPUTS OUTPUTS ROWS RUNS\n");
        return 2;
    }
    int n_in = atoi(argv[2]), n_out = atoi(argv[3]), rows = atoi(argv[4]), runs = atoi(argv[5]);
    uint32_t seed = 1;
    struct backend_options opt = {.device = "cpu", .threads = 1};
    struct error err;
    struct backend *be = backend_open_cpu(&opt, &err);
    float *values = noises((size_t)n_in * (size_t)n_out, &seed);
    uint8_t *data = mem_alloc(dtype_bytes(type, (size_t)n_in * (size_t)n_out));
    quantize_rows(type, values, data, (size_t)n_out, (size_t)n_in, NULL);
    const uint8_t *of_expert = data;
    struct raw_weight raw = {.n_in = n_in,
                             .n_out = n_out,
                             .n_expert = 1,
                             .n_seg = 1,
                             .seg = {{.type = type, .rows = n_out, .data = &of_expert}}};
    struct weight w;
    struct network net = {.n_layers = 0, .n_embd = n_in, .n_vocab = n_out, .head.w = &w};
    struct bounds bounds = {.page_len = 16,
                            .n_pages = 1,
                            .k_type = DT_F16,
                            .v_type = DT_F16,
                            .max_tokens = rows,
                            .max_seqs = 1,
                            .max_out = 1,
                            .max_pages = 1};
    if (!be || !be->ops->upload(be, &raw, WEIGHT_HEAD, &w, &err) ||
        !be->ops->prepare(be, &net, &bounds, &err)) {
        fprintf(stderr, "product: %s\n", err.msg);
        return 1;
    }
    float *x = noises((size_t)rows * (size_t)n_in, &seed);
    float *y = mem_zalloc((size_t)rows * (size_t)n_out, sizeof *y);
    for (int i = 0; i < runs; i++)
        gemm_linear(cpu_self(be), &w, x, y, rows);
    be->ops->release(be, &w);
    be->ops->close(be);
    mem_free(x);
    mem_free(y);
    mem_free(values);
    mem_free(data);
    return 0;
}
