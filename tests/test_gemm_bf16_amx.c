/*
 * The bf16 AMX products with tiles emulated in C, against sums in doubles of the same bf16 inputs and
 * exact weights: every format, ragged numbers of rows, columns and inputs. Runs where AVX-512 is.
 */
#define AMX_EMULATE
#include "backend/cpu/gemm_bf16_amx.c"

#include "amx_weight.h"

#include <math.h>

static const enum dtype types[] = {DT_Q4_K,   DT_Q5_K,  DT_Q6_K,    DT_IQ4_XS,  DT_Q8_0,   DT_Q4_0,
                                   DT_IQ4_NL, DT_MXFP4, DT_Q2_K,    DT_Q3_K,    DT_Q4_1,   DT_Q5_0,
                                   DT_Q5_1,   DT_IQ3_S, DT_IQ3_XXS, DT_IQ2_XXS, DT_IQ2_XS, DT_IQ2_S,
                                   DT_IQ1_S,  DT_IQ1_M, DT_TQ1_0,   DT_TQ2_0,   DT_NVFP4};

static void check(enum dtype type, int n_in, int n_rows, int n, bool bias)
{
    size_t stride = bf16_stride(n_in);
    struct amx_weight weight = amx_weight_new(type, n_in, n_rows);
    struct gemm_weight *w = weight.w;
    size_t h_bytes = (size_t)(n + GEMM_PAD) * stride;
    uint8_t *h = mem_aligned(h_bytes);
    memset(h, 0x7f, h_bytes); /* what lies behind the last row must not matter */
    for (int t = 0; t < n; t++)
        for (int k = 0; k < n_in; k++) {
            float v = random_input();
            uint32_t u;
            memcpy(&u, &v, 4);
            ((uint16_t *)(h + (size_t)t * stride))[k] = (uint16_t)(u >> 16);
        }
    float b[256], *got = mem_zalloc((size_t)n * 256, sizeof(float)),
                  *row = mem_alloc((size_t)n_in * 4);
    for (int k = 0; k < 256; k++)
        b[k] = (float)k;
    size_t scratch_bytes = gemm_bf16_scratch(n_in);
    void *scratch = mem_aligned(scratch_bytes);
    struct gemm_x in = {.n_in = n_in, .h = h};
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
    gemm_bf16_amx(&c);
    for (int j = 0; j < c.n_rows; j++) {
        gemm_weight_row(w, c.row + j, row);
        for (int t = 0; t < n; t++) {
            double sum = bias ? (double)b[j] : 0, size = 1e-30;
            for (int k = 0; k < n_in; k++) {
                uint32_t u = (uint32_t)((uint16_t *)(h + (size_t)t * stride))[k] << 16;
                float v;
                memcpy(&v, &u, 4);
                sum += (double)v * (double)row[k];
                size += fabs((double)v * (double)row[k]);
            }
            /* each weight is rounded to 8 bits of mantissa, and the sum with the bias to 24 */
            if (!(fabs((double)got[t * 256 + j] - sum) <= size / 256 + fabs(sum) / (1 << 23)))
                fail_msg("%s, %d x %d: input %d of %d, row %d: %g, not %g", dtype_name(type),
                         n_rows, n_in, t, n, j, (double)got[t * 256 + j], sum);
        }
    }
    for (int j = c.n_rows; j < 256; j++) /* and nothing is written behind a row */
        assert_true(got[j] == 0.0f);
    mem_aligned_free(scratch, scratch_bytes);
    mem_aligned_free(h, h_bytes);
    mem_free(row);
    mem_free(got);
    amx_weight_free(&weight);
}

static void products_are_right(void **state)
{
    (void)state;
    static const int inputs[] = {1, 15, 16, 17, 33, 70};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        int unit = dtype_table[types[i]].block_len;
        for (size_t k = 0; k < sizeof inputs / sizeof *inputs; k++) {
            check(types[i], 768, 100, inputs[k], k % 2);
            check(types[i], unit, 16, inputs[k], true);
            check(types[i], 3 * unit, 9, inputs[k], false);
            check(types[i], 1280, 33, inputs[k], false);
        }
    }
}

int main(void)
{
    if (!isa_has(isa_best(), ISA_AVX512)) {
        puts("skipped: this machine has no AVX-512");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(products_are_right)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
