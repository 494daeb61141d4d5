/*
 * A panel of 16 outputs times a few rows, compiled per instruction set. Four sums a row, of every fourth
 * k, whatever the number of rows: a row's result does not depend on who is computed beside it.
 */
#include "backend/cpu/lora.h"
#include "backend/cpu/vec.h"

enum { SUMS = 4, TOGETHER = VW == 16 ? LORA_ROWS : VW == 8 ? 2 : 1 };

/* VW outputs of n rows; n is constant where this is inlined. */
INLINE void rows_of_panel(const uint16_t *m, int k, const float *const *x, const int n, float *out)
{
    VEC sum[TOGETHER][SUMS];
    int at = 0;
    UNROLL
    for (int i = 0; i < n; i++) {
        UNROLL
        for (int s = 0; s < SUMS; s++)
            sum[i][s] = vec_set(0);
    }
    for (; at + SUMS <= k; at += SUMS) {
        UNROLL
        for (int s = 0; s < SUMS; s++) {
            VEC v = vec_load_f16(m + (size_t)(at + s) * LORA_PANEL);
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
        VEC low = vec_add(sum[i][0], sum[i][1]), high = vec_add(sum[i][2], sum[i][3]);
        vec_store(out + i * LORA_PANEL, vec_add(low, high));
    }
}

void KERNEL(const uint16_t *m, int k, const float *const *x, int n, float (*out)[LORA_PANEL])
{
    for (int j = 0; j < LORA_PANEL; j += VW) {
        int i = 0;
        for (; i + TOGETHER <= n; i += TOGETHER)
            rows_of_panel(m + j, k, x + i, TOGETHER, &out[i][j]);
        for (; i < n; i++)
            rows_of_panel(m + j, k, x + i, 1, &out[i][j]);
    }
}
