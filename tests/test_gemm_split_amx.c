/*
 * Float weights and GPTQ4 on AMX's bf16 tiles, emulated in C, against sums in doubles of the same inputs and
 * weights: 16 bits of each number count, in every format, with ragged numbers of rows, columns and
 * inputs. Runs where AVX-512 is.
 */
#define AMX_EMULATE
#include "backend/cpu/gemm_split_amx.c"

#include "amx_weight.h"

#include <math.h>

static const enum dtype types[] = {DT_F32, DT_F16, DT_BF16, DT_F8_E4M3, DT_GPTQ4, DT_NF4, DT_FP4};

static void check(enum dtype type, int n_in, int n_rows, int n, bool bias)
{
    struct amx_weight weight = amx_weight_new(type, n_in, n_rows);
    struct gemm_weight *w = weight.w;
    struct gemm_x in = {.n_in = n_in, .split = true};
    size_t stride = gemm_bf16_stride(&in), h_bytes = (size_t)(n + GEMM_PAD) * stride;
    uint8_t *h = mem_aligned(h_bytes);
    float *x = mem_zalloc((size_t)n * (size_t)n_in, sizeof *x);
    memset(h, 0x7f, h_bytes); /* what lies behind the last row must not matter */
    for (int t = 0; t < n; t++) {
        float *row = x + (size_t)t * (size_t)n_in;
        uint16_t *out = (uint16_t *)(h + (size_t)t * stride);
        for (int k = 0; k < n_in; k++)
            row[k] = random_input() * (1 + (float)rnd() * 0x1p-33f);
        input_split_amx(row, n_in, out, out + n_in);
    }
    in.h = h;
    float b[256], *got = mem_zalloc((size_t)n * 256, sizeof(float)),
                  *row = mem_alloc((size_t)n_in * 4);
    for (int k = 0; k < 256; k++)
        b[k] = (float)k;
    size_t scratch_bytes = gemm_split_scratch(n_in);
    void *scratch = mem_aligned(scratch_bytes);
    struct gemm_call c = {.w = w,
                          .seg = &w->seg[0],
                          .row = n_rows > 40 ? 16 : 0,
                          .x = &in,
                          .n = n,
                          .y = got,
                          .stride = 256,
                          .bias = bias ? b : NULL,
                          .scratch = scratch};
    c.n_rows = n_rows - c.row;
    gemm_split_amx(&c);
    for (int j = 0; j < c.n_rows; j++) {
        gemm_weight_row(w, c.row + j, row);
        for (int t = 0; t < n; t++) {
            double sum = bias ? (double)b[j] : 0, size = bias ? (double)b[j] : 1e-30;
            for (int k = 0; k < n_in; k++) {
                double p = (double)x[(size_t)t * (size_t)n_in + (size_t)k] * (double)row[k];
                sum += p;
                size += fabs(p);
            }
            if (!(fabs((double)got[t * 256 + j] - sum) <= size * 0x1p-15))
                fail_msg("%s, %d x %d: input %d of %d, row %d: %g, not %g", dtype_name(type),
                         n_rows, n_in, t, n, j, (double)got[t * 256 + j], sum);
        }
    }
    for (int j = c.n_rows; j < 256; j++) /* and nothing is written behind a row */
        assert_true(got[j] == 0.0f);
    mem_aligned_free(scratch, scratch_bytes);
    mem_aligned_free(h, h_bytes);
    mem_free(x);
    mem_free(row);
    mem_free(got);
    amx_weight_free(&weight);
}

static void products_are_right(void **state)
{
    (void)state;
    static const int inputs[] = {1, 15, 16, 17, 33, 70};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        for (size_t k = 0; k < sizeof inputs / sizeof *inputs; k++) {
            check(types[i], 768, 100, inputs[k], k % 2);
            int short_row = dtype_table[types[i]].block_len == QK_NF4 ? QK_NF4 : 32;
            check(types[i], short_row, 16, inputs[k], true);
            check(types[i], 3 * short_row, 9, inputs[k], false);
            check(types[i], 1280, 33, inputs[k], false);
        }
}

/* Widths that are no whole vectors are split the same way. */
static void inputs_are_split(void **state)
{
    (void)state;
    float x[37];
    uint16_t near[37], left[37];
    for (int i = 0; i < 37; i++)
        x[i] = random_input() * (1 + (float)rnd() * 0x1p-33f);
    input_split_amx(x, 37, near, left);
    for (int i = 0; i < 37; i++) {
        float back = bf16_to_f32(near[i]) + bf16_to_f32(left[i]);
        assert_true(fabsf(back - x[i]) <= fabsf(x[i]) * 0x1p-16f);
    }
}

int main(void)
{
    if (!isa_has(isa_best(), ISA_AVX512)) {
        puts("skipped: this machine has no AVX-512");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(products_are_right),
                                       cmocka_unit_test(inputs_are_split)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
