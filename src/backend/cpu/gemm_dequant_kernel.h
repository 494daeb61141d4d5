/*
 * The kernel that takes any weight: y = x . dequantise(w). Included once per instruction set, with V_*
 * defined as its float vectors. A vector is adjacent columns; 4 weight rows x 4 input rows are computed
 * together.
 *
 * Each (weight row, input row) pair is one chain of fused multiply-adds per lane over the columns, then a
 * horizontal sum, for any number of input rows. So results do not depend on the batch. Weights are
 * dequantised once per call, DEQUANT_ROWS rows at a time.
 */
#include "backend/cpu/gemm_kernels.h"

#include <string.h>

enum { X_ROWS = 4 };

static void dot_block(const float *w, size_t w_stride, const float *const *x, int n_in,
                      float out[X_ROWS][DEQUANT_ROWS])
{
    V_T acc[X_ROWS][DEQUANT_ROWS];
    for (int t = 0; t < X_ROWS; t++)
        for (int r = 0; r < DEQUANT_ROWS; r++)
            acc[t][r] = V_ZERO();
    int k = 0;
    for (; k + V_LEN <= n_in; k += V_LEN) {
        V_T wv[DEQUANT_ROWS];
        for (int r = 0; r < DEQUANT_ROWS; r++)
            wv[r] = V_LOAD(w + (size_t)r * w_stride + k);
        for (int t = 0; t < X_ROWS; t++) {
            V_T xv = V_LOAD(x[t] + k);
            for (int r = 0; r < DEQUANT_ROWS; r++)
                acc[t][r] = V_FMA(xv, wv[r], acc[t][r]);
        }
    }
    if (k < n_in) { /* rows of w are padded with zeros, rows of x are not */
        for (int t = 0; t < X_ROWS; t++) {
            float tail[V_LEN] = {0};
            memcpy(tail, x[t] + k, (size_t)(n_in - k) * sizeof(float));
            V_T xv = V_LOAD(tail);
            for (int r = 0; r < DEQUANT_ROWS; r++)
                acc[t][r] = V_FMA(xv, V_LOAD(w + (size_t)r * w_stride + k), acc[t][r]);
        }
    }
    for (int t = 0; t < X_ROWS; t++)
        for (int r = 0; r < DEQUANT_ROWS; r++)
            out[t][r] = V_SUM(acc[t][r]);
}

void NAME(gemm_dequant)(const struct gemm_call *c)
{
    int n_in = c->w->n_in;
    size_t w_stride = gemm_dequant_stride(n_in);
    float *w = c->scratch;
    for (int j = 0; j < c->n_rows; j += DEQUANT_ROWS) {
        int n_rows = c->n_rows - j < DEQUANT_ROWS ? c->n_rows - j : DEQUANT_ROWS;
        for (int r = 0; r < DEQUANT_ROWS; r++) {
            float *row = w + (size_t)r * w_stride;
            if (r < n_rows && c->seg->packed)
                panel_row(c->seg, n_in, c->expert, c->row + j + r, row);
            else if (r < n_rows)
                raw_weight_row(c->w->raw, c->expert, c->seg->first_row + c->row + j + r, row);
            else
                memset(row, 0, (size_t)n_in * sizeof(float));
            memset(row + n_in, 0, (w_stride - (size_t)n_in) * sizeof(float));
        }
        for (int i = 0; i < c->n; i += X_ROWS) {
            const float *x[X_ROWS];
            for (int t = 0; t < X_ROWS; t++) {
                int at = i + t < c->n ? i + t : i;
                x[t] = c->x->x + (size_t)(c->rows ? c->rows[at] : at) * (size_t)n_in;
            }
            float out[X_ROWS][DEQUANT_ROWS];
            dot_block(w, w_stride, x, n_in, out);
            for (int t = 0; t < X_ROWS && i + t < c->n; t++)
                for (int r = 0; r < n_rows; r++)
                    c->y[(size_t)(i + t) * c->stride + (size_t)(j + r)] =
                        out[t][r] + (c->bias ? c->bias[j + r] : 0.0f);
        }
    }
}
