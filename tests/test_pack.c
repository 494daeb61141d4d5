/*
 * The vector packers, byte for byte against the plain C one, for every packed format: whole panels and
 * ragged ones, odd widths, several experts, rows read from elsewhere. And what a packed weight gives
 * back, row by row, is exactly what its file says.
 */
#include "backend/cpu/gemm.h"
#include "backend/cpu/panel_pack.h"
#include "backend/cpu/panel.h"
#include "base/mem.h"
#include "isas.h"

#include <setjmp.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static uint64_t rng_state = 11;

static uint32_t rnd(void)
{
    rng_state = rng_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(rng_state >> 33);
}

static void fill(void *p, size_t bytes)
{
    uint8_t *b = p;
    for (size_t i = 0; i < bytes; i++)
        b[i] = (uint8_t)rnd();
}

enum { EXPERTS = 2 };

/* A weight of random bytes; every block of memory is freed by the caller. */
struct fixture {
    struct raw_weight raw;
    uint8_t *data[EXPERTS];
    void *scale[EXPERTS];
    uint8_t *zero[EXPERTS];
};

static void setup(struct fixture *f, enum dtype t, int n_in, int rows, int group_len)
{
    f->raw = (struct raw_weight){.n_in = n_in, .n_out = rows, .n_expert = EXPERTS, .n_seg = 1};
    struct raw_seg *s = &f->raw.seg[0];
    *s = (struct raw_seg){.type = t, .rows = rows, .group_len = group_len};
    size_t groups = t == DT_GPTQ4 ? (size_t)((n_in + group_len - 1) / group_len) * (size_t)rows : 1;
    size_t blocks = (size_t)((n_in + 127) / 128) * (size_t)rows;
    for (int e = 0; e < EXPERTS; e++) {
        size_t bytes = raw_seg_row_bytes(s, n_in) * (size_t)rows;
        f->data[e] = mem_alloc(bytes); /* exactly: reading past the end shows under ASan */
        fill(f->data[e], bytes);
        f->scale[e] = mem_alloc(t == DT_GPTQ4 ? groups * 2 : blocks * sizeof(float));
        fill(f->scale[e], t == DT_GPTQ4 ? groups * 2 : blocks * sizeof(float));
        f->zero[e] = mem_alloc(groups);
        fill(f->zero[e], groups);
    }
    s->data = (const uint8_t *const *)f->data;
    if (t == DT_GPTQ4 || t == DT_F8_E4M3 || t == DT_NVFP4)
        s->scale = (const void *const *)f->scale;
    if (t == DT_GPTQ4)
        s->zero = (const uint8_t *const *)f->zero;
}

static void teardown(struct fixture *f)
{
    for (int e = 0; e < EXPERTS; e++) {
        mem_free(f->data[e]);
        mem_free(f->scale[e]);
        mem_free(f->zero[e]);
    }
}

/* One format and shape: all panels by every packer this machine can run. */
static void compare(enum dtype t, int n_in, int rows, int group_len)
{
    struct fixture f;
    setup(&f, t, n_in, rows, group_len);
    size_t bytes = panel_bytes(&f.raw.seg[0], n_in);
    assert_true(bytes > 0 && bytes % 64 == 0);
    size_t row_bytes = raw_seg_row_bytes(&f.raw.seg[0], n_in);
    uint8_t *want = mem_aligned(bytes), *got = mem_aligned(bytes);
    for (int e = 0; e < EXPERTS; e++)
        for (int p = 0; p * GEMM_PANEL < rows; p++) {
            memset(want, 0, bytes);
            panel_pack(&f.raw, 0, e, p, NULL, ISA_REF, want);
            enum isa isa;
            for (int set = 1; set < 3 && isa_at(set, &isa); set++) { /* larger sets use the same */
                memset(got, 0, bytes);
                int n = rows - p * GEMM_PANEL < GEMM_PANEL ? rows - p * GEMM_PANEL : GEMM_PANEL;
                uint8_t *copy = mem_alloc((size_t)n * row_bytes + 1);
                memcpy(copy + 1, f.data[e] + (size_t)p * GEMM_PANEL * row_bytes,
                       (size_t)n * row_bytes);
                panel_pack(&f.raw, 0, e, p, p & 1 ? copy + 1 : NULL, isa, got);
                for (size_t i = 0; i < bytes; i++)
                    if (got[i] != want[i])
                        fail_msg("%s %d x %d, %s, panel %d: byte %zu is %02x, not %02x",
                                 dtype_name(t), rows, n_in, isa_name(isa), p, i, got[i], want[i]);
                mem_free(copy);
            }
        }
    mem_aligned_free(want, bytes);
    mem_aligned_free(got, bytes);
    teardown(&f);
}

static void test_bytes(void **state)
{
    (void)state;
    static const enum dtype of_256[] = {DT_Q4_K,    DT_Q5_K,  DT_Q6_K,  DT_IQ4_XS,  DT_Q2_K,
                                        DT_Q3_K,    DT_IQ1_S, DT_IQ1_M, DT_IQ2_S,   DT_IQ2_XS,
                                        DT_IQ2_XXS, DT_IQ3_S, DT_TQ1_0, DT_IQ3_XXS, DT_TQ2_0};
    static const enum dtype of_32[] = {DT_Q8_0, DT_Q4_0, DT_IQ4_NL, DT_MXFP4,
                                       DT_Q4_1, DT_Q5_0, DT_Q5_1};
    static const enum dtype floats[] = {DT_F32, DT_F16, DT_BF16, DT_F8_E4M3};
    for (size_t i = 0; i < sizeof of_256 / sizeof *of_256; i++) {
        compare(of_256[i], 256, 16, 0);
        compare(of_256[i], 768, 37, 0);
        compare(of_256[i], 2048, 48, 0);
    }
    static const enum dtype of_64[] = {DT_NVFP4, DT_NF4, DT_FP4};
    for (int i = 0; i < 3; i++) {
        for (int n = 64; n <= 256; n += 64)
            compare(of_64[i], n, 35, 0);
        compare(of_64[i], 768, 48, 0);
    }
    for (size_t i = 0; i < sizeof of_32 / sizeof *of_32; i++) {
        for (int n = 32; n <= 256; n += 32) /* units cut short */
            compare(of_32[i], n, 35, 0);
        compare(of_32[i], 768, 48, 0);
    }
    for (int i = 0; i < 4; i++) {
        for (int n = 1; n < 70; n += 3) /* columns past the last whole vector */
            compare(floats[i], n, 18, 0);
        compare(floats[i], 768, 150, 0);
    }
    compare(DT_GPTQ4, 128, 19, 128);
    compare(DT_GPTQ4, 768, 48, 128);
    compare(DT_GPTQ4, 160, 32, 96); /* a last group cut short */
    compare(DT_GPTQ4, 256, 32, 32);
}

/* What comes back from a packed weight. */
static void round_trip(enum dtype t, int n_in, int rows, int group_len)
{
    struct fixture f;
    setup(&f, t, n_in, rows, group_len);
    struct pool *pool = pool_new(3);
    struct error err = {{0}};
    struct gemm_weight *w = gemm_weight_new(&f.raw, true, pool, &err);
    assert_non_null(w);
    assert_true(w->seg[0].packed);
    float *want = mem_zalloc((size_t)n_in, sizeof *want);
    float *got = mem_zalloc((size_t)n_in, sizeof *got);
    for (int r = 0; r < rows; r++) {
        raw_weight_row(&f.raw, 0, r, want);
        gemm_weight_row(w, r, got);
        assert_memory_equal(want, got, (size_t)n_in * sizeof *want);
    }
    mem_free(want);
    mem_free(got);
    gemm_weight_free(w);
    pool_free(pool);
    teardown(&f);
}

static void test_round_trip(void **state)
{
    (void)state;
    static const enum dtype low[] = {DT_Q4_1, DT_Q5_0, DT_Q5_1, DT_Q2_K, DT_Q3_K};
    static const enum dtype all[] = {DT_Q4_K,   DT_Q5_K,  DT_Q6_K, DT_IQ4_XS, DT_Q8_0, DT_Q4_0,
                                     DT_IQ4_NL, DT_MXFP4, DT_F32,  DT_F16,    DT_BF16, DT_F8_E4M3};
    for (int i = 0; i < (int)(sizeof all / sizeof *all); i++)
        round_trip(all[i], 512, 83, 0);
    round_trip(DT_GPTQ4, 512, 83, 128);
    for (int i = 0; i < (int)(sizeof low / sizeof *low); i++)
        round_trip(low[i], 512, 83, 0);
    for (int i = 0; i < 3; i++) /* units cut short */
        round_trip(low[i], 96, 35, 0);
    for (enum dtype t = DT_NONE; t < DT_COUNT; t++)
        if (quant_has_codes(t) || t == DT_NVFP4)
            round_trip(t, 512, 83, 0);
    round_trip(DT_NVFP4, 192, 35, 0);
    round_trip(DT_NF4, 192, 35, 0);
    round_trip(DT_FP4, 512, 83, 0);
}

/* A source that cannot be read ends in an error, not in a weight. */
static const uint8_t *read_some(void *arg, const uint8_t *data, size_t bytes, uint8_t *buf)
{
    _Atomic int *left = arg;
    if (atomic_fetch_sub(left, 1) <= 0)
        return NULL;
    return memcpy(buf, data, bytes);
}

static void test_read(void **state)
{
    (void)state;
    struct fixture f;
    setup(&f, DT_Q4_K, 2048, 1008, 0); /* five pieces an expert */
    struct pool *pool = pool_new(2);
    struct error err = {{0}};
    struct gemm_weight *plain = gemm_weight_new(&f.raw, true, pool, &err);
    assert_non_null(plain);
    _Atomic int left = 1000;
    f.raw.read = read_some;
    f.raw.read_arg = &left;
    struct gemm_weight *read = gemm_weight_new(&f.raw, true, pool, &err);
    assert_non_null(read);
    assert_int_equal(left, 1000 - 5 * EXPERTS);
    assert_memory_equal(plain->mem, read->mem, plain->mem_bytes);
    left = 3;
    assert_null(gemm_weight_new(&f.raw, true, pool, &err));
    assert_non_null(strstr(err.msg, "cannot read the file"));
    gemm_weight_free(plain);
    gemm_weight_free(read);
    pool_free(pool);
    teardown(&f);
}

int main(void)
{
    if (!isa_has(isa_best(), FIRST_ISA)) {
        puts(NO_KERNELS);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
