/*
 * Low-rank products of a few rows, compiled per instruction set.
 *   low   out[i][j] = sum over k of A[k][j] * x[i][k], for a panel of 16 outputs
 *   up    y[i][j] += scale * sum over k of B[k][j] * t[i][k], for panels of 16 outputs
 * A vector is VW outputs; each k multiplies one load by n broadcasts of x. Adapters are read once per
 * step, so memory bandwidth is the limit. Runs are too short for the hardware prefetcher, so each load
 * prefetches the line PREFETCH_DISTANCE further on. An output's number of partial sums does not depend on
 * the number of rows, so neither do a row's bytes.
 */
#include "backend/cpu/lora.h"
#include "backend/cpu/vec.h"

#define NAME_(a, b) a##b
#define NAME(a, b)  NAME_(a, b)

enum {
    LOW_SUMS = 4, /* partial sums of an output of A x: every fourth k */
    UP_SUMS = 2,  /* partial sums of an output of B t, where k is small */
    ROWS_AT_ONCE = VW == 16 || VW == 4 ? LORA_ROWS
                   : VW == 8           ? 2
                                       : 1,
    LINE = 32, /* fp16 values in a cache line */
    PREFETCH_DISTANCE = 32 * LINE
};

/* VW outputs of n rows; n and n_sums are constants where this is inlined. */
INLINE void rows_of_panel(const uint16_t *m, int k, const float *const *x, const int n,
                          const int n_sums, VEC *out)
{
    VEC sum[ROWS_AT_ONCE][LOW_SUMS];
    int at = 0;
    UNROLL
    for (int i = 0; i < n; i++) {
        UNROLL
        for (int s = 0; s < n_sums; s++)
            sum[i][s] = vec_set(0);
    }
    for (; at + n_sums <= k; at += n_sums) {
        UNROLL
        for (int s = 0; s < n_sums; s++) {
            const uint16_t *from = m + (size_t)(at + s) * LORA_PANEL;
            VEC v = vec_load_f16(from);
            if (s * LORA_PANEL % LINE == 0)
                __builtin_prefetch(from + PREFETCH_DISTANCE);
            UNROLL
            for (int i = 0; i < n; i++)
                sum[i][s] = vec_fma(v, vec_set(x[i][at + s]), sum[i][s]);
        }
    }
    for (; at < k; at++) {
        VEC v = vec_load_f16(m + (size_t)at * LORA_PANEL);
        UNROLL
        for (int i = 0; i < n; i++)
            sum[i][0] = vec_fma(v, vec_set(x[i][at]), sum[i][0]);
    }
    UNROLL
    for (int i = 0; i < n; i++) {
        out[i] = vec_add(sum[i][0], sum[i][1]);
        if (n_sums == 4)
            out[i] = vec_add(out[i], vec_add(sum[i][2], sum[i][3]));
    }
}

INLINE void low_rows(const uint16_t *m, int k, const float *const *x, const int n,
                     float (*out)[LORA_PANEL])
{
    for (int j = 0; j < LORA_PANEL; j += VW) {
        VEC sum[ROWS_AT_ONCE];
        rows_of_panel(m + j, k, x, n, LOW_SUMS, sum);
        UNROLL
        for (int i = 0; i < n; i++)
            vec_store(&out[i][j], sum[i]);
    }
}

INLINE void up_rows(const uint16_t *m, int k, int n_panels, const float *const *t, const int n,
                    float scale, float *const *y)
{
    for (int j = 0; j < n_panels * LORA_PANEL; j += VW) {
        VEC sum[ROWS_AT_ONCE];
        const uint16_t *panel = m + (size_t)(j / LORA_PANEL) * (size_t)k * LORA_PANEL;
        rows_of_panel(panel + j % LORA_PANEL, k, t, n, UP_SUMS, sum);
        UNROLL
        for (int i = 0; i < n; i++)
            vec_store(y[i] + j, vec_fma(sum[i], vec_set(scale), vec_load(y[i] + j)));
    }
}

void NAME(lora_low_, KERNEL)(const uint16_t *m, int k, const float *const *x, int n,
                             float (*out)[LORA_PANEL])
{
    int i = 0;
    for (; i + ROWS_AT_ONCE <= n; i += ROWS_AT_ONCE)
        low_rows(m, k, x + i, ROWS_AT_ONCE, out + i);
    if (ROWS_AT_ONCE > 2 && n - i == 3)
        low_rows(m, k, x + i, ROWS_AT_ONCE > 2 ? 3 : 1, out + i);
    else if (ROWS_AT_ONCE > 2 && n - i == 2)
        low_rows(m, k, x + i, ROWS_AT_ONCE > 2 ? 2 : 1, out + i);
    else if (i < n)
        low_rows(m, k, x + i, 1, out + i);
}

void NAME(lora_up_, KERNEL)(const uint16_t *m, int k, int n_panels, const float *const *t, int n,
                            float scale, float *const *y)
{
    int i = 0;
    for (; i + ROWS_AT_ONCE <= n; i += ROWS_AT_ONCE)
        up_rows(m, k, n_panels, t + i, ROWS_AT_ONCE, scale, y + i);
    if (ROWS_AT_ONCE > 2 && n - i == 3)
        up_rows(m, k, n_panels, t + i, ROWS_AT_ONCE > 2 ? 3 : 1, scale, y + i);
    else if (ROWS_AT_ONCE > 2 && n - i == 2)
        up_rows(m, k, n_panels, t + i, ROWS_AT_ONCE > 2 ? 2 : 1, scale, y + i);
    else if (i < n)
        up_rows(m, k, n_panels, t + i, 1, scale, y + i);
}
