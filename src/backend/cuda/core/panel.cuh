/*
 * Experts as the CPU backend packs them: panels of 16 interleaved rows (backend/cpu/panel.h has the layouts). What pack.cuh
 * reads of a file's block, read from a panel, for experts that are copied from host memory to the device.
 */
#ifndef STEEL_BACKEND_CUDA_PANEL_CUH
#define STEEL_BACKEND_CUDA_PANEL_CUH

#include "backend/cuda/core/format.cuh"

/* Where a format's parts are in a panel; panel_bytes 0: the source is the file's blocks. */
struct panel_form {
    size_t panel_bytes;
    int log_columns; /* of a unit: 2^log_columns columns, */
    int scales;      /* bytes of its scales, */
    int block;       /* bytes of 32 columns (backend.h: struct expert_panels) */
    int unit_bytes;
    uint32_t flip;
};

static inline bool panel_known(int dtype)
{
    switch (dtype) {
    case DT_Q4_0:
    case DT_Q4_1:
    case DT_Q5_0:
    case DT_Q5_1:
    case DT_Q8_0:
    case DT_Q2_K:
    case DT_Q3_K:
    case DT_Q4_K:
    case DT_Q5_K:
    case DT_Q6_K:
    case DT_IQ4_NL:
    case DT_IQ4_XS:
    case DT_MXFP4:
    case DT_F16:
    case DT_BF16:
    case DT_F32:
        return true;
    default:
        return false;
    }
}

/* The unit of (row, column). Rows past the end are zeros in the panel. */
DEVICE const uint8_t *panel_unit(const struct panel_form &f, const uint8_t *data, int row, int col)
{
    return data + (size_t)(row >> 4) * f.panel_bytes +
           (size_t)(col >> f.log_columns) * (size_t)f.unit_bytes;
}

/* A column within its unit. */
DEVICE int panel_column(const struct panel_form &f, int col)
{
    return col & ((1 << f.log_columns) - 1);
}

/* code_of */
DEVICE uint32_t panel_code(int dtype, const struct panel_form &f, const uint8_t *unit, int row,
                           int col)
{
    int in = panel_column(f, col), j = in & 31, g = j >> 2; /* g: group of four columns */
    const uint8_t *b = unit + f.scales + (in >> 5) * f.block + 4 * (row & 15) + (j & 3);
    switch (dtype) {
    case DT_Q8_0:
        return b[64 * g] ^ f.flip;
    case DT_Q2_K:
        return b[64 * (g >> 2)] >> 2 * (g & 3) & 3;
    case DT_Q3_K:
        return (b[64 + 64 * (g >> 2)] >> 2 * (g & 3) & 3) | (b[0] >> g & 1) << 2;
    case DT_Q5_0:
    case DT_Q5_1:
    case DT_Q5_K:
        return (b[64 + 64 * (g >> 1)] >> 4 * (g & 1) & 15) | (b[0] >> g & 1) << 4;
    case DT_Q6_K: {
        const uint8_t *q = b + 192 * (j >> 4);
        return (q[64 * (g >> 1 & 1)] >> 4 * (g & 1) & 15) | (q[128] >> 2 * (g & 3) & 3) << 4;
    }
    default: /* nibbles */
        return b[64 * (g >> 1)] >> 4 * (g & 1) & 15;
    }
}

/* row_half: fp16 factor of a row's scales (which = 0) or minima (1). */
DEVICE const uint8_t *panel_row_half(int dtype, const uint8_t *unit, int row, int which)
{
    int at = dtype == DT_IQ4_XS ? 96 : dtype == DT_Q4_K || dtype == DT_Q5_K ? 192 : 256;
    return unit + at + 32 * which + 2 * (row & 15);
}

/* group_byte: of column k of 256, a group's scale or minimum. */
DEVICE uint32_t panel_group_byte(int dtype, const uint8_t *unit, int row, int k, int which)
{
    const uint8_t *lane = unit + 4 * (row & 15);
    int blk = k >> 5, s = k >> 4;
    switch (dtype) {
    case DT_Q4_K:
    case DT_Q5_K:
        return (lane[64 * which + (blk & 3)] >> 4 * (blk >> 2) & 15) |
               (lane[128 + (blk & 3)] >> (2 * (blk >> 2) + 4 * which) & 3) << 4;
    case DT_IQ4_XS: {
        const uint8_t *high = unit + 64 + 2 * (row & 15);
        return ((lane[blk >> 1] >> 4 * (blk & 1) & 15) |
                ((uint32_t)(high[0] | high[1] << 8) >> 2 * blk & 3) << 4) +
               96;
    }
    case DT_Q2_K:
        return lane[64 * (s >> 2) + (s & 3)];
    default: /* Q3_K, Q6_K: signed */
        return lane[64 * (s >> 2) + (s & 3)] ^ 0x80u;
    }
}

/* fp16 scale of the 32 columns of (row, column), or its addend. */
DEVICE const uint8_t *panel_group_half(const struct panel_form &f, const uint8_t *unit, int row,
                                       int col, int which)
{
    return unit + 32 * (panel_column(f, col) >> 5) + 64 * which + 2 * (row & 15);
}

/* MXFP4: the exponent of the 32 columns of (row, column). */
DEVICE int panel_exponent(const struct panel_form &f, const uint8_t *unit, int row, int col)
{
    return unit[16 * (panel_column(f, col) >> 5) + (row & 15)];
}

/* Columns of floats. */
DEVICE float panel_float(int dtype, const struct panel_form &f, const uint8_t *data, int row,
                         int col)
{
    const uint8_t *p = data + (size_t)(row >> 4) * f.panel_bytes;
    int r = row & 15;
    if (dtype == DT_F32) {
        p += (size_t)(col * 16 + r) * 4;
        return float_of(p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
    }
    if (dtype == DT_F16)
        return raw_half(p + (size_t)(col * 16 + r) * 2);
    p += (size_t)(col / 2 * 32 + 2 * r + (col & 1)) * 2; /* BF16 */
    return float_of((uint32_t)p[0] << 16 | (uint32_t)p[1] << 24);
}

#endif
