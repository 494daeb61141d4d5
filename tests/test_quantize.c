/*
 * The quantisers: error over Gaussian values below a bound for each type, the same bits from every
 * instruction set, weights that matter, and the odd cases (zeros, constants, outliers, extreme sizes).
 */
#include "quant/quantize.h"
#include "quant/quantize_isa.h"
#include "base/cpu.h"
#include "base/mem.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

/* Mean squared error over N(0, 1): what plain min-max rounding (or the usual search) reaches. */
static const struct {
    enum dtype type;
    double bound;
} types[] = {
    {DT_F32, 0},        {DT_F16, 5e-8},      {DT_BF16, 3e-6},     {DT_Q8_0, 2.87e-5},
    {DT_Q4_0, 7.38e-3}, {DT_Q4_1, 6.12e-3},  {DT_Q5_0, 1.83e-3},  {DT_Q5_1, 1.44e-3},
    {DT_Q2_K, 8.79e-2}, {DT_Q3_K, 2.28e-2},  {DT_Q4_K, 5.09e-3},  {DT_Q5_K, 1.31e-3},
    {DT_Q6_K, 3.15e-4}, {DT_IQ4_NL, 5.8e-3}, {DT_IQ4_XS, 5.9e-3}, {DT_MXFP4, 1.33e-2},
    {DT_IQ3_S, 1.9e-2},
};
enum { N_TYPES = sizeof types / sizeof *types, ROWS = 64, COLS = 2048, N = ROWS * COLS };

static uint64_t seed;

static double uniform(void)
{
    uint64_t z = (seed += 0x9e3779b97f4a7c15u);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return ((double)(z >> 11) + 0.5) * 0x1p-53;
}

static void gaussian(float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(sqrt(-2 * log(uniform())) * cos(6.283185307179586 * uniform()));
}

/* Weighted mean squared error after a round trip; w (cols) or NULL. */
static double round_trip(enum dtype t, const float *x, size_t rows, size_t cols, const float *w,
                         const float *measure)
{
    size_t bytes = dtype_bytes(t, rows * cols);
    uint8_t *blocks = mem_alloc(bytes + 8);
    memset(blocks + bytes, 0xa5, 8);
    float *y = mem_alloc(rows * cols * sizeof *y);
    quantize_rows(t, x, blocks, rows, cols, w);
    for (int i = 0; i < 8; i++)
        assert_int_equal(blocks[bytes + (size_t)i], 0xa5);
    quant_dequantize(t, blocks, y, rows * cols);
    double sum = 0, weights = 0;
    for (size_t i = 0; i < rows * cols; i++) {
        double e = (double)x[i] - (double)y[i], m = measure ? (double)measure[i % cols] : 1;
        sum += m * e * e;
        weights += m;
    }
    mem_free(blocks);
    mem_free(y);
    return sum / weights;
}

static void test_error(void **state)
{
    (void)state;
    float *x = mem_alloc(N * sizeof *x);
    seed = 7;
    gaussian(x, N);
    for (int i = 0; i < N_TYPES; i++) {
        enum dtype t = types[i].type;
        double mse = round_trip(t, x, ROWS, COLS, NULL, NULL);
        print_message("%-7s %.4e (bound %.4e)\n", dtype_name(t), mse, types[i].bound);
        /* 128 k samples: allow 2 % for chance */
        if (!(mse <= 1.02 * types[i].bound))
            fail_msg("%s: %g", dtype_name(t), mse);
        /* The scale of the values must not matter, but to a half's range */
        for (size_t k = 0; k < N; k++)
            x[k] *= 0.0625f;
        double small = round_trip(t, x, ROWS, COLS, NULL, NULL) * 256;
        for (size_t k = 0; k < N; k++)
            x[k] *= 16;
        if (!(fabs(small - mse) <= 0.01 * mse))
            fail_msg("%s: %g at 1, %g at 1/16", dtype_name(t), mse, small);
    }
    mem_free(x);
}

static void test_importance(void **state)
{
    (void)state;
    float *x = mem_alloc(N * sizeof *x), *w = mem_alloc(COLS * sizeof *w);
    seed = 8;
    gaussian(x, N);
    for (size_t k = 0; k < COLS; k++)
        w[k] = (float)exp(3 * (uniform() - 0.5));
    for (int i = 0; i < N_TYPES; i++) {
        enum dtype t = types[i].type;
        double plain = round_trip(t, x, ROWS, COLS, NULL, w);
        double weighted = round_trip(t, x, ROWS, COLS, w, w);
        print_message("%-7s %.4e -> %.4e\n", dtype_name(t), plain, weighted);
        bool searched = t != DT_F32 && t != DT_F16 && t != DT_BF16 && t != DT_Q8_0;
        if (searched ? !(weighted < plain * (t == DT_MXFP4 ? 1 : 0.99)) : weighted != plain)
            fail_msg("%s: weights do not help: %g, %g", dtype_name(t), plain, weighted);
        /* Their size does not matter. */
        for (size_t k = 0; k < COLS; k++)
            w[k] *= 1024;
        double scaled = round_trip(t, x, ROWS, COLS, w, w);
        for (size_t k = 0; k < COLS; k++)
            w[k] /= 1024;
        if (!(fabs(scaled - weighted) <= 1e-3 * weighted))
            fail_msg("%s: %g with weights, %g with scaled ones", dtype_name(t), weighted, scaled);
    }
    mem_free(x);
    mem_free(w);
}

static void test_same_bits(void **state)
{
    (void)state;
    static const struct {
        enum isa isa;
        const struct quantize_isa *table;
    } forms[] = {
        {ISA_REF, &quantize_base},
#ifdef __x86_64__
        {ISA_AVX2, &quantize_avx2},
        {ISA_AVX512, &quantize_avx512},
#elif defined __aarch64__
        {ISA_NEON, &quantize_neon},
#endif
    };
    /* 6,400 values: 25 super-blocks, so that the last step has idle lanes */
    enum { SHORT_N = 6400 };
    float *x = mem_alloc(SHORT_N * sizeof *x), *w = mem_alloc(SHORT_N * sizeof *w);
    uint8_t *a = mem_alloc(SHORT_N * 4), *b = mem_alloc(SHORT_N * 4);
    seed = 9;
    gaussian(x, SHORT_N);
    for (size_t i = 0; i < SHORT_N; i++) {
        w[i] = (float)(0.1 + uniform());
        x[i] *= (float)pow(10, 2 * uniform() - 3);
    }
    for (size_t f = 0; f < sizeof forms / sizeof *forms; f++) {
        if (!isa_has(isa_best(), forms[f].isa)) {
            print_message("no %s here\n", isa_name(forms[f].isa));
            continue;
        }
        for (int i = 0; i < N_TYPES; i++)
            for (int weighted = 0; weighted < 2; weighted++) {
                enum dtype t = types[i].type;
                quantize_base.rows[t](x, a, 1, SHORT_N, weighted ? w : NULL);
                forms[f].table->rows[t](x, b, 1, SHORT_N, weighted ? w : NULL);
                if (memcmp(a, b, dtype_bytes(t, SHORT_N)) != 0)
                    fail_msg("%s: %s differs from plain C", dtype_name(t), isa_name(forms[f].isa));
            }
        /* and loading */
        float u[64], v[64];
        uint8_t h[128];
        for (int i = 0; i < 128; i++)
            h[i] = (uint8_t)(i % 2 ? i * 37 & 0xbb : i * 37); /* no NaN: payloads differ */
        quantize_base.load_f16(h, u, 64);
        forms[f].table->load_f16(h, v, 64);
        assert_memory_equal(u, v, sizeof u);
        quantize_base.load_bf16(h, u, 64);
        forms[f].table->load_bf16(h, v, 64);
        assert_memory_equal(u, v, sizeof u);
    }
    mem_free(x);
    mem_free(w);
    mem_free(a);
    mem_free(b);
}

static void test_odd_values(void **state)
{
    (void)state;
    float x[256], y[256];
    uint8_t blocks[1024];
    for (int i = 0; i < N_TYPES; i++) {
        enum dtype t = types[i].type;
        /* zeros stay zeros */
        memset(x, 0, sizeof x);
        quantize_rows(t, x, blocks, 1, 256, NULL);
        quant_dequantize(t, blocks, y, 256);
        for (int k = 0; k < 256; k++)
            assert_true(y[k] == 0);
        /* a constant survives, of either sign; also 1000 with a little noise where a minimum exists */
        for (int sign = -1; sign <= 1; sign += 2) {
            for (int k = 0; k < 256; k++)
                x[k] = 0.75f * (float)sign;
            quantize_rows(t, x, blocks, 1, 256, NULL);
            quant_dequantize(t, blocks, y, 256);
            for (int k = 0; k < 256; k++)
                if (!(fabsf(y[k] - x[k]) <= 0.02f))
                    fail_msg("%s: constant %g became %g", dtype_name(t), (double)x[k],
                             (double)y[k]);
        }
        if (t == DT_Q4_1 || t == DT_Q5_1) {
            for (int k = 0; k < 256; k++)
                x[k] = 1000 + (float)(k % 16) * 0.5f;
            quantize_rows(t, x, blocks, 1, 256, NULL);
            quant_dequantize(t, blocks, y, 256);
            for (int k = 0; k < 256; k++)
                if (!(fabsf(y[k] - x[k]) <= 0.3f))
                    fail_msg("%s: %g became %g", dtype_name(t), (double)x[k], (double)y[k]);
        }
        /* one outlier, and values at the ends of the half range, stay finite and in place */
        static const float sizes[] = {1e-30f, 1e-7f, 1, 60000};
        for (int s = 0; s < 4; s++)
            for (int at = 0; at < 256; at += 85) {
                memset(x, 0, sizeof x);
                x[at] = -sizes[s];
                quantize_rows(t, x, blocks, 1, 256, NULL);
                quant_dequantize(t, blocks, y, 256);
                for (int k = 0; k < 256; k++)
                    if (!(fabsf(y[k] - x[k]) <= 0.15f * sizes[s] + 1e-6f))
                        fail_msg("%s: %g at %d: value %d became %g", dtype_name(t),
                                 (double)sizes[s], at, k, (double)y[k]);
            }
    }
    assert_false(quantize_supported(DT_IQ2_S));
    assert_false(quantize_supported(DT_GPTQ4));
    assert_false(quantize_supported(DT_I32));
}

static void test_load_and_amax(void **state)
{
    (void)state;
    uint16_t h[50];
    float y[50];
    for (int i = 0; i < 50; i++)
        h[i] = f32_to_f16((float)i - 20.5f);
    quantize_load(DT_F16, h, y, 50);
    for (int i = 0; i < 50; i++)
        assert_true(y[i] == (float)i - 20.5f);
    assert_true(quantize_amax(y, 50) == 28.5f);
    assert_true(quantize_amax(y, 0) == 0);
    for (int at = 0; at < 50; at += 7) {
        float keep = y[at];
        y[at] = NAN;
        assert_false(isfinite(quantize_amax(y, 50)));
        y[at] = -INFINITY;
        assert_false(isfinite(quantize_amax(y, 50)));
        y[at] = keep;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_error),         cmocka_unit_test(test_importance),
        cmocka_unit_test(test_same_bits),     cmocka_unit_test(test_odd_values),
        cmocka_unit_test(test_load_and_amax),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
