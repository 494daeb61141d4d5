/*
 * Shared by gemm_bf16_amx.c and gemm_split_amx.c. All tiles have 16 rows of 64 bytes. tmm0-3 are the sums
 * of two tiles of inputs and two panels; they are stored to out (32 inputs, GEMM_UNIT rows).
 */
#ifndef STEEL_BACKEND_CPU_GEMM_TILES_AMX_H
#define STEEL_BACKEND_CPU_GEMM_TILES_AMX_H

#include "backend/cpu/amx.h"
#include "backend/cpu/gemm_kernels.h"
#include "backend/cpu/panel_unpack.h"

#define INLINE static inline __attribute__((always_inline))

enum { TILE = 1024 }; /* bytes of 32 columns of a panel in bf16 */

INLINE void tiles_configure(void)
{
    struct amx_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = 16;
        config.row_bytes[i] = 64;
    }
    amx_configure(&config);
}

INLINE void tiles_zero(void)
{
    amx_zero(0);
    amx_zero(1);
    amx_zero(2);
    amx_zero(3);
}

/* two: also stores the second tile of inputs. */
INLINE void tiles_store(float (*out)[GEMM_UNIT], const int two)
{
    amx_store(0, out[0], sizeof *out);
    amx_store(1, out[0] + GEMM_PANEL, sizeof *out);
    if (two) {
        amx_store(2, out[16], sizeof *out);
        amx_store(3, out[16] + GEMM_PANEL, sizeof *out);
    }
}

/* Stores the sums of input rows [i0, i0 + n) and weight rows from col on to y, plus the bias. */
INLINE void put_sums(const float (*out)[GEMM_UNIT], const struct gemm_call *c, int i0, int n,
                     int col)
{
    int width = c->n_rows - col < GEMM_UNIT ? c->n_rows - col : GEMM_UNIT;
    VF low = vf_zero(), high = vf_zero();
    if (c->bias && width == GEMM_UNIT) {
        low = vf_load(c->bias + col);
        high = vf_load(c->bias + col + GEMM_PANEL);
    }
    for (int i = 0; i < n; i++) {
        float *y = c->y + (size_t)(i0 + i) * c->stride + col;
        if (width == GEMM_UNIT) {
            vf_store(y, vf_add(vf_load(out[i]), low));
            vf_store(y + GEMM_PANEL, vf_add(vf_load(out[i] + GEMM_PANEL), high));
            continue;
        }
        for (int j = 0; j < width; j++)
            y[j] = out[i][j] + (c->bias ? c->bias[col + j] : 0.0f);
    }
}

#endif
