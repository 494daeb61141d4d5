/*
 * The AMX products with tiles emulated in C, byte for byte against the VNNI kernels, on any machine
 * with AVX-512 VNNI: every format, ragged numbers of rows, columns and inputs, gathered inputs, biases.
 */
#define AMX_EMULATE
#include "backend/cpu/gemm_amx.c"

#include "amx_weight.h"

static const struct {
    enum dtype type;
    void (*tiles)(const struct mm_call *c), (*want)(const struct mm_call *c);
} kernels[] = {
    {DT_Q4_K, mm_gemm_q4k_amx, mm_q4k_vnni},       {DT_Q5_K, mm_gemm_q5k_amx, mm_q5k_vnni},
    {DT_Q6_K, mm_gemm_q6k_amx, mm_q6k_vnni},       {DT_IQ4_XS, mm_gemm_iq4xs_amx, mm_iq4xs_vnni},
    {DT_Q8_0, mm_gemm_q8_0_amx, mm_q8_0_vnni},     {DT_Q4_0, mm_gemm_q4_0_amx, mm_q4_0_vnni},
    {DT_IQ4_NL, mm_gemm_iq4nl_amx, mm_iq4nl_vnni}, {DT_MXFP4, mm_gemm_mxfp4_amx, mm_mxfp4_vnni},
};

static void check(int i, int n_in, int n_rows, int n, bool gather, bool bias)
{
    enum dtype type = kernels[i].type;
    enum { MAX_N = MM_CHUNK };
    struct amx_weight weight = amx_weight_new(type, n_in, n_rows);
    struct mm_weight *w = weight.w;
    struct x_layout l = x_layout(n_in);
    uint8_t *records = mem_aligned(l.bytes * MAX_N);
    float *x = mem_alloc((size_t)n_in * sizeof *x);
    for (int t = 0; t < MAX_N; t++) {
        for (int k = 0; k < n_in; k++)
            x[k] = random_input();
        x_quantize_avx512(x, n_in, 0, n_in, true, records + (size_t)t * l.bytes);
    }
    int32_t rows[MAX_N];
    for (int t = 0; t < n; t++)
        rows[t] = (int32_t)(rnd() % MAX_N);
    float b[256], *want = mem_zalloc((size_t)n * 256, sizeof(float));
    float *got = mem_zalloc((size_t)n * 256, sizeof(float));
    for (int k = 0; k < 256; k++)
        b[k] = (float)k;
    size_t scratch_bytes = mm_gemm_scratch_amx(n_in);
    void *scratch = mem_aligned(scratch_bytes);
    struct mm_x in = {.n_in = n_in, .q = records};
    struct mm_call c = {.w = w,
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
    kernels[i].want(&c);
    c.y = got;
    kernels[i].tiles(&c);
    /* Again with the inputs kept from the call before, which must be seen to be the same ones. */
    in.stamp = 1;
    kernels[i].tiles(&c);
    memset(got, 0, (size_t)n * 256 * sizeof(float));
    kernels[i].tiles(&c);
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
    static const int inputs[] = {1, 6, 15, 16, 17, 40, MM_CHUNK};
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        int unit = dtype_table[kernels[i].type].block_len;
        for (size_t k = 0; k < sizeof inputs / sizeof *inputs; k++) {
            check((int)i, 512, 64, inputs[k], false, k % 2);
            check((int)i, 768, 37, inputs[k], true, false);
            check((int)i, unit, 16, inputs[k], false, true);
            check((int)i, 3 * unit, 9, inputs[k], true, true);
            check((int)i, 1280, 33, inputs[k], false, false);
        }
    }
}

int main(void)
{
    if (isa_best() < ISA_VNNI) {
        puts("skipped: this machine has no AVX-512 VNNI");
        return 77;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(tiles_give_the_same_bytes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
