/*
 * Kernels for packed float weights (F32 F16 BF16 F8_E4M3) and codes of float levels (NF4 FP4) with float inputs. Included once per instruction
 * set, after the vectors of gemm_int8_kernel.h are defined.
 *
 * A vector is V_LANES weight rows; each column multiplies one load of weights by T broadcasts of inputs.
 * Each (weight row, input row) pair has two chains of fused multiply-adds, over even and odd columns, for
 * any number of input rows T. They are added at the end; for F8 at every 128 columns and for NF4 and FP4 at
 * every 64, where the scale changes. Few rows are limited by memory bandwidth, many by FMA throughput.
 */
#include "backend/cpu/gemm_kernels.h"

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum { V_BYTES = V_LANES * 4, V_PARTS = GEMM_PANEL / V_LANES, PREFETCH_BYTES = 12288 };

INLINE bool has_levels(const enum dtype type)
{
    return type == DT_NF4 || type == DT_FP4;
}

/* Columns k and k + 1 of a panel, for the lanes from byte `at` of a vector of floats on. NF4, FP4: k is
 * even. */
INLINE void load_two(const uint8_t *panel, size_t at, size_t k, const enum dtype type, VF *w0,
                     VF *w1)
{
    if (type == DT_F32) {
        *w0 = vf_load((const float *)(panel + 64 * k + at));
        *w1 = vf_load((const float *)(panel + 64 * k + 64 + at));
    } else if (type == DT_F16) {
        *w0 = vf_load_f16(panel + 32 * k + at / 2);
        *w1 = vf_load_f16(panel + 32 * k + 32 + at / 2);
    } else if (type == DT_BF16) {
        VI v = vi_load(panel + 32 * k + at);
        *w0 = vf_from_bits(vi_sll32(v, 16));
        *w1 = vf_from_bits(vi_and(v, vi_set1_32((int)0xffff0000)));
    } else if (has_levels(type)) {
        vf_load_levels(panel + 8 * k + at / 4, quant_levels(type), w0, w1);
    } else {
        *w0 = vf_load_f8(panel + 16 * k + at / 4);
        *w1 = vf_load_f8(panel + 16 * k + 16 + at / 4);
    }
}

/* acc[t] += columns [k, end) */
INLINE void add_columns(const uint8_t *panel, size_t at, int k, int end, const float *const *x,
                        VF *acc, VF scale, const enum dtype type, const int T)
{
    VF even[MAX_T], odd[MAX_T], w0, w1;
    UNROLL
    for (int t = 0; t < T; t++)
        even[t] = odd[t] = vf_zero();
    const int pair = type == DT_F32       ? 128 /* bytes of two columns */
                     : type == DT_F8_E4M3 ? 32
                     : has_levels(type)   ? 16
                                          : 64;
    const char *later = (const char *)panel + PREFETCH_BYTES;
    for (; k + 1 < end; k += 2) {
        if (gemm_prefetch_few) {
            v_prefetch(later + (size_t)(k / 2) * pair);
            if (type == DT_F32)
                v_prefetch(later + (size_t)(k / 2) * pair + 64);
        }
        load_two(panel, at, (size_t)k, type, &w0, &w1);
        UNROLL
        for (int t = 0; t < T; t++) {
            even[t] = vf_fma(w0, vf_set1(x[t][k]), even[t]);
            odd[t] = vf_fma(w1, vf_set1(x[t][k + 1]), odd[t]);
        }
    }
    if (k < end) { /* panels are padded to an even number of columns, inputs are not */
        load_two(panel, at, (size_t)k, type, &w0, &w1);
        UNROLL
        for (int t = 0; t < T; t++)
            even[t] = vf_fma(w0, vf_set1(x[t][k]), even[t]);
    }
    UNROLL
    for (int t = 0; t < T; t++)
        acc[t] = vf_fma(vf_add(even[t], odd[t]), scale, acc[t]);
}

INLINE void store(const struct gemm_call *c, VF *acc, int col, int i0, const int T)
{
    int n = c->n_rows - col;
    UNROLL
    for (int t = 0; t < T; t++) {
        float *y = c->y + (size_t)(i0 + t) * c->stride + col;
        if (n >= V_LANES) {
            vf_store(y, c->bias ? vf_add(acc[t], vf_load(c->bias + col)) : acc[t]);
            continue;
        }
        float tmp[V_LANES];
        vf_store(tmp, acc[t]);
        for (int j = 0; j < n; j++)
            y[j] = tmp[j] + (c->bias ? c->bias[col + j] : 0.0f);
    }
}

INLINE void run_pass(const enum dtype type, const struct gemm_call *c, const uint8_t *panel,
                     int col, int i0, const int T)
{
    int n_in = c->w->n_in;
    const float *x[MAX_T];
    UNROLL
    for (int t = 0; t < T; t++)
        x[t] = c->x->x + (size_t)(c->rows ? c->rows[i0 + t] : i0 + t) * (size_t)n_in;
    /* F8 panels begin with a scale per row and 128 columns. vf_load_f8 returns 1/256 of a value. */
    const float *scales = (const float *)panel;
    if (type == DT_F8_E4M3)
        panel += panel_f8_head(n_in);
    for (int part = 0; part < V_PARTS && col + part * V_LANES < c->n_rows; part++) {
        size_t at = (size_t)part * V_BYTES;
        VF acc[MAX_T];
        UNROLL
        for (int t = 0; t < T; t++)
            acc[t] = vf_zero();
        if (type == DT_F8_E4M3)
            for (int k = 0; k < n_in; k += 128)
                add_columns(panel, at, k, k + 128 < n_in ? k + 128 : n_in, x, acc,
                            vf_mul(vf_load(scales + k / 128 * GEMM_PANEL + part * V_LANES),
                                   vf_set1(256.0f)),
                            type, T);
        else if (has_levels(type)) /* a unit's codes follow its 16 scales */
            for (int k = 0; k < n_in; k += QK_NF4) {
                const uint8_t *unit = panel + (size_t)(k / QK_NF4) * PANEL_NF4_UNIT;
                add_columns(unit + UNIT_SCALES - 8 * (size_t)k, at, k, k + QK_NF4, x, acc,
                            vf_load((const float *)(unit + at)), type, T);
            }
        else
            add_columns(panel, at, 0, n_in, x, acc, vf_set1(1.0f), type, T);
        store(c, acc, col + part * V_LANES, i0, T);
    }
}

#define CASE(type, T)                                                                              \
    case T:                                                                                        \
        run_pass(type, c, panel, col, i0, T);                                                      \
        break;
#define CASES4(type) CASE(type, 1) CASE(type, 2) CASE(type, 3) CASE(type, 4)
#if MAX_T == 8
#define CASES(type) CASES4(type) CASE(type, 5) CASE(type, 6) CASE(type, 7) CASE(type, 8)
#else
#define CASES(type) CASES4(type)
#endif
#define KERNEL(name, type)                                                                         \
    static void name(const struct gemm_call *c)                                                    \
    {                                                                                              \
        const struct gemm_seg *s = c->seg;                                                         \
        size_t first = (size_t)c->expert * (size_t)s->n_panels + (size_t)(c->row / GEMM_PANEL);    \
        const uint8_t *panel = s->data + first * s->panel_bytes;                                   \
        int passes = (c->n + MAX_T - 1) / MAX_T;                                                   \
        for (int col = 0; col < c->n_rows; col += GEMM_PANEL, panel += s->panel_bytes) {           \
            int i0 = 0;                                                                            \
            for (int k = 0; k < passes; k++) {                                                     \
                int n = (c->n - i0 + passes - k - 1) / (passes - k);                               \
                switch (n) {                                                                       \
                    CASES(type)                                                                    \
                }                                                                                  \
                i0 += n;                                                                           \
            }                                                                                      \
        }                                                                                          \
    }

KERNEL(f32, DT_F32)
KERNEL(f16, DT_F16)
KERNEL(bf16, DT_BF16)
KERNEL(f8, DT_F8_E4M3)
KERNEL(nf4, DT_NF4)
KERNEL(fp4, DT_FP4)

void NAME(gemm_float)(const struct gemm_call *c)
{
    static void (*const by_type[DT_COUNT])(const struct gemm_call *c) = {
        [DT_F32] = f32,    [DT_F16] = f16, [DT_BF16] = bf16,
        [DT_F8_E4M3] = f8, [DT_NF4] = nf4, [DT_FP4] = fp4};
    by_type[c->seg->type](c);
}
