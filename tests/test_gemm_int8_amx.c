/*
 * The AMX products with tiles emulated in C, byte for byte against the VNNI kernels, on any machine
 * with AVX-512 VNNI: every format, ragged numbers of rows, columns and inputs, gathered inputs, biases.
 */
#define AMX_EMULATE
#include "backend/cpu/gemm_int8_amx.c"

#include "amx_weight.h"

static const enum dtype types[] = {DT_Q4_K, DT_Q5_K,   DT_Q6_K,  DT_IQ4_XS, DT_Q8_0,
                                   DT_Q4_0, DT_IQ4_NL, DT_MXFP4, DT_GPTQ4};

static void check(enum dtype type, int n_in, int n_rows, int n, bool gather, bool bias)
{
    enum { MAX_N = GEMM_CHUNK };
    struct amx_weight weight = amx_weight_new(type, n_in, n_rows);
    struct gemm_weight *w = weight.w;
    struct input_layout l = input_layout(n_in);
    uint8_t *records = mem_aligned(l.bytes * MAX_N);
    float *x = mem_alloc((size_t)n_in * sizeof *x);
    for (int t = 0; t < MAX_N; t++) {
        for (int k = 0; k < n_in; k++)
            x[k] = random_input();
        input_quantize_avx512(x, n_in, 0, n_in, true, records + (size_t)t * l.bytes);
    }
    int32_t rows[MAX_N];
    for (int t = 0; t < n; t++)
        rows[t] = (int32_t)(rnd() % MAX_N);
    float b[256], *want = mem_zalloc((size_t)n * 256, sizeof(float));
    float *got = mem_zalloc((size_t)n * 256, sizeof(float));
    for (int k = 0; k < 256; k++)
        b[k] = (float)k;
    size_t scratch_bytes = gemm_int8_scratch_amx(n_in);
    void *scratch = mem_aligned(scratch_bytes);
    struct gemm_x in = {.n_in = n_in, .q = records};
    struct gemm_call c = {.w = w,
                          .seg = &w->seg[0],
                          .row = n_rows > 40 ? 16 : 0,
                          .x = &in,
                          .rows = gather ? rows : NULL,
                          .n = n,
                          .stride = 256,
                          .bias = bias ? b : NULL,
                          .scratch = scratch};
    c.n_rows = n_rows - c.row;
    c.y = want;
    gemm_int8_vnni(&c);
    c.y = got;
    gemm_int8_amx(&c);
    /* Again with the inputs kept from the call before, which must be seen to be the same ones. */
    in.stamp = 1;
    gemm_int8_amx(&c);
    memset(got, 0, (size_t)n * 256 * sizeof(float));
    gemm_int8_amx(&c);
    if (memcmp(want, got, (size_t)n * 256 * sizeof(float)))
        fail_msg("%s, %d x %d, %d inputs: tiles give other bytes", dtype_name(type), n_rows, n_in,
                 n);
    mem_aligned_free(scratch, scratch_bytes);
    mem_aligned_free(records, l.bytes * MAX_N);
    mem_free(x);
    mem_free(want);
    mem_free(got);
    amx_weight_free(&weight);
}

static void tiles_give_the_same_bytes(void **state)
{
    (void)state;
    static const int inputs[] = {1, 6, 15, 16, 17, 40, GEMM_CHUNK};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        int unit = types[i] == DT_GPTQ4 ? 32 : dtype_table[types[i]].block_len;
        for (size_t k = 0; k < sizeof inputs / sizeof *inputs; k++) {
            check(types[i], 512, 64, inputs[k], false, k % 2);
            check(types[i], 768, 37, inputs[k], true, false);
            check(types[i], unit, 16, inputs[k], false, true);
            check(types[i], 3 * unit, 9, inputs[k], true, true);
            check(types[i], 1280, 33, inputs[k], false, false);
        }
    }
}

int main(void)
{
    if (!isa_has(isa_best(), ISA_VNNI)) {
        puts("skipped: this machine has no AVX-512 VNNI");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(tiles_give_the_same_bytes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
