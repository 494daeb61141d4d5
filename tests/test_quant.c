/*
 * Number formats: every TYPE of tests/data/quants must dequantise to the given floats within one ulp;
 * conversions are checked over all 65,536 fp16 and bf16 values and all FP8 codes.
 */
#include "quant/quant.h"
#include "base/mem.h"

#include <dirent.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

static uint8_t *read_all(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    fseek(f, 0, SEEK_END);
    *n = (size_t)ftell(f);
    rewind(f);
    uint8_t *p = mem_alloc(*n);
    assert_int_equal(fread(p, 1, *n, f), *n);
    fclose(f);
    return p;
}

/* Distance in representable floats; both zeros are one number. */
static int64_t ulps(float a, float b)
{
    int32_t x, y;
    memcpy(&x, &a, 4);
    memcpy(&y, &b, 4);
    int64_t u = x < 0 ? -(int64_t)(x & 0x7fffffff) : x;
    int64_t v = y < 0 ? -(int64_t)(y & 0x7fffffff) : y;
    return u > v ? u - v : v - u;
}

/* NF4 and FP4, which gguf-py does not know: a value is a level times the block's scale, the first of a
 * byte in its low nibble. */
static void test_levels(void **state)
{
    (void)state;
    struct block_nf4 b[2] = {{.d = 0.5f}, {.d = -3.0f}};
    float y[2 * QK_NF4];
    for (int i = 0; i < QK_NF4 / 2; i++) {
        b[0].qs[i] = (uint8_t)(i % 16 | (15 - i % 16) << 4);
        b[1].qs[i] = 0x7c;
    }
    quant_dequantize(DT_NF4, b, y, 2 * QK_NF4);
    assert_true(y[0] == -0.5f && y[1] == 0.5f && y[14] == 0.0f &&
                y[15] == 0.5f * 0.07958029955625534f);
    assert_true(y[64] == -3.0f * 0.44070982933044434f && y[127] == 0.0f);
    quant_dequantize(DT_FP4, b, y, 2 * QK_NF4);
    assert_true(y[0] == 0.0f && y[1] == -0.125f && y[6] == 0.5f && y[7] == 0.5f * -4.0f / 12.0f);
    assert_true(y[64] == 1.0f && y[65] == -0.75f);
    for (int i = 0; i < 16; i++) { /* rising, and each with its negative */
        assert_true(i == 0 || quant_nf4_levels[i] > quant_nf4_levels[i - 1]);
        assert_true(quant_fp4_levels[i] == -quant_fp4_levels[i ^ 8]);
    }
}

/* Every TYPE.blocks against its TYPE.f32, which gguf-py computed. */
static void test_golden(void **state)
{
    (void)state;
    const char *folder = "tests/data/quants";
    DIR *d = opendir(folder);
    assert_non_null(d);
    int n_types = 0;
    for (struct dirent *e; (e = readdir(d));) {
        char *dot = strstr(e->d_name, ".blocks");
        if (!dot)
            continue;
        char name[32], path[600];
        snprintf(name, sizeof name, "%.*s", (int)(dot - e->d_name), e->d_name);
        enum dtype t = dtype_from_name(name);
        if (t == DT_NONE)
            fail_msg("%s is no known type", name);
        size_t nb, nf;
        snprintf(path, sizeof path, "%s/%s.blocks", folder, name);
        uint8_t *blocks = read_all(path, &nb);
        snprintf(path, sizeof path, "%s/%s.f32", folder, name);
        uint8_t *want = read_all(path, &nf);
        size_t n = nf / 4;
        assert_int_equal(dtype_bytes(t, n), nb);
        float *got = mem_alloc(nf);
        quant_dequantize(t, blocks, got, n);
        size_t exact = 0;
        for (size_t i = 0; i < n; i++) {
            float w;
            memcpy(&w, want + 4 * i, 4);
            if (ulps(w, got[i]) > 1)
                fail_msg("%s value %zu: want %.9g, got %.9g", name, i, (double)w, (double)got[i]);
            exact += !memcmp(&w, &got[i], 4);
        }
        print_message("%-8s %6zu values, %zu bit for bit\n", name, n, exact);

        /* The same bytes from an odd address: files promise no alignment. */
        uint8_t *odd = mem_alloc(nb + 1);
        memcpy(odd + 1, blocks, nb);
        float *again = mem_alloc(nf);
        quant_dequantize(t, odd + 1, again, n);
        assert_memory_equal(got, again, nf);
        mem_free(odd);
        mem_free(again);
        mem_free(blocks);
        mem_free(want);
        mem_free(got);
        n_types++;
    }
    closedir(d);
    assert_int_equal(n_types, 23);
}

/* Grids are sets in ascending order, and every format that has codes has all of them in range. */
static void test_codes(void **state)
{
    (void)state;
    static const struct {
        enum dtype type;
        int points, digits, bits, base;
    } grids[] = {{DT_IQ3_S, 512, 4, 3, 8},  {DT_IQ3_XXS, 256, 4, 3, 8}, {DT_IQ2_XXS, 256, 8, 2, 3},
                 {DT_IQ2_XS, 512, 8, 2, 3}, {DT_IQ2_S, 1024, 8, 2, 3},  {DT_IQ1_S, 2048, 8, 2, 3}};
    for (size_t i = 0; i < sizeof grids / sizeof *grids; i++) {
        const uint16_t *g = quant_grid(grids[i].type);
        for (int k = 0; k < grids[i].points; k++) {
            assert_true(k == 0 || g[k] > g[k - 1]);
            for (int j = 0; j < grids[i].digits; j++)
                assert_true((g[k] >> grids[i].bits * j & ((1 << grids[i].bits) - 1)) <
                            grids[i].base);
        }
    }
    assert_ptr_equal(quant_grid(DT_IQ1_M), quant_grid(DT_IQ1_S));
    assert_null(quant_grid(DT_Q4_K));
    struct quant_codes c;
    uint8_t block[128] = {0};
    assert_false(quant_read_codes(DT_NVFP4, block, &c));
    assert_false(quant_read_codes(DT_Q3_K, block, &c));
}

/* Blocks written by hand from the description of the types. */
static void test_few_bits(void **state)
{
    (void)state;
    struct block_q1_0 one = {.d = f32_to_f16(0.25f)};
    struct block_q2_0 two = {.d = f32_to_f16(0.5f)};
    float y[QK1_0];
    one.qs[0] = 0x05; /* values 0 and 2 */
    one.qs[15] = 0x80;
    quant_dequantize(DT_Q1_0, &one, y, QK1_0);
    for (int i = 0; i < QK1_0; i++)
        assert_true(y[i] == (i == 0 || i == 2 || i == 127 ? 0.25f : -0.25f));
    two.qs[0] = 0xe4; /* codes 0, 1, 2, 3 */
    two.qs[15] = 0x40;
    quant_dequantize(DT_Q2_0, &two, y, QK2_0);
    for (int i = 0; i < QK2_0; i++) {
        float want = i < 4 ? 0.5f * (float)(i - 1) : i == 63 ? 0 : -0.5f;
        assert_true(y[i] == want);
    }
    assert_int_equal(dtype_from_ggml(41), DT_Q1_0);
    assert_int_equal(dtype_from_ggml(42), DT_Q2_0);
}

static void test_f16(void **state)
{
    (void)state;
    for (unsigned h = 0; h < 65536; h++) {
        float f = f16_to_f32((uint16_t)h);
        int exp = h >> 10 & 31, man = h & 1023;
        double want = exp == 31 ? (man ? NAN : INFINITY)
                      : exp     ? ldexp(1024 + man, exp - 25)
                                : ldexp(man, -24);
        if (h & 0x8000)
            want = -want;
        if (isnan(want)) {
            assert_true(isnan(f));
            assert_true(isnan(f16_to_f32(f32_to_f16(f))));
            continue;
        }
        assert_true((double)f == want);
        assert_int_equal(f32_to_f16(f), h);
        /* Half way to the next one rounds to even, a hair to either side to the nearer. */
        if (exp < 31 && (h & 0x7fff) < 0x7bff) {
            float next = f16_to_f32((uint16_t)(h + 1)), mid = (f + next) / 2;
            assert_int_equal(f32_to_f16(mid), h & 1 ? h + 1 : h);
            assert_int_equal(f32_to_f16(nextafterf(mid, next)), h + 1);
            assert_int_equal(f32_to_f16(nextafterf(mid, f)), h);
        }
    }
    assert_int_equal(f32_to_f16(65519.99f), 0x7bff);
    assert_int_equal(f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(f32_to_f16(-1e30f), 0xfc00);
    assert_int_equal(f32_to_f16(1e-30f), 0);
}

static void test_bf16_fp8(void **state)
{
    (void)state;
    for (unsigned b = 0; b < 65536; b++) {
        float f = bf16_to_f32((uint16_t)b);
        if (isnan(f)) {
            assert_true(isnan(bf16_to_f32(f32_to_bf16(f))));
            continue;
        }
        assert_int_equal(f32_to_bf16(f), b);
        if ((b & 0x7fff) < 0x7f7f) {
            float next = bf16_to_f32((uint16_t)(b + 1)), mid = f + (next - f) / 2;
            assert_int_equal(f32_to_bf16(mid), b & 1 ? b + 1 : b);
            assert_int_equal(f32_to_bf16(nextafterf(mid, next)), b + 1);
        }
    }
    for (unsigned b = 0; b < 256; b++) {
        int exp = b >> 3 & 15, man = b & 7;
        double want = exp ? ldexp(8 + man, exp - 10) : ldexp(man, -9);
        float f = f8e4m3_to_f32((uint8_t)b);
        if ((b & 127) == 127)
            assert_true(isnan(f));
        else
            assert_true((double)f == (b & 128 ? -want : want));
    }
    assert_true(f8e4m3_to_f32(0x7e) == 448.0f);
}

static void test_table(void **state)
{
    (void)state;
    for (int t = DT_NONE + 1; t < DT_COUNT; t++) {
        const struct dtype_info *i = &dtype_table[t];
        assert_non_null(i->name);
        assert_int_equal(dtype_from_name(i->name), t);
        assert_int_equal(dtype_bytes((enum dtype)t, (size_t)i->block_len), i->block_bytes);
        int id = dtype_to_ggml((enum dtype)t);
        if (id >= 0)
            assert_int_equal(dtype_from_ggml((uint32_t)id), t);
    }
    assert_int_equal(dtype_from_name("q4_k"), DT_Q4_K);
    assert_int_equal(dtype_from_name("Q9_Z"), DT_NONE);
    assert_int_equal(dtype_from_ggml(4), DT_NONE);
    assert_int_equal(dtype_from_ggml(0x80000000u), DT_NONE);
    assert_int_equal(dtype_to_ggml(DT_GPTQ4), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),    cmocka_unit_test(test_f16),
        cmocka_unit_test(test_bf16_fp8), cmocka_unit_test(test_golden),
        cmocka_unit_test(test_levels),   cmocka_unit_test(test_codes),
        cmocka_unit_test(test_few_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
