/*
 * Packed weights: 16 rows interleaved so that one 64-byte vector holds four adjacent columns of each
 * (a "column group", the order of the dot-product instructions), codes as compressed as in the file.
 * One layout serves one input row and many. A panel is 16 rows x n_in; rows past the end are zeros.
 *
 * Codes of a block of 32 columns (8 column groups g), byte 4*r + j = row r, column 4*g + j:
 *   4 bits    4 vectors i: low nibble group 2i, high nibble group 2i + 1
 *   8 bits    8 vectors (Q8_0: code + 128)
 * Data is stored in the order it is read, so a panel is one stream. A format's unit has its scales, then
 * its blocks; "dwords" are one 32-bit lane per row:
 *   Q4_K    8 blocks, 2304 bytes: scales 64 and mins 64 (dwords of 4 bytes j: low nibble = low bits of
 *           block j, high nibble = of block 4 + j), high bits 64 (byte j: bits 0-1 scale j, 2-3 scale
 *           4 + j, 4-5 min j, 6-7 min 4 + j), d 32, dmin 32 (fp16); blocks of 256
 *   Q5_K    8 blocks, 2816: as Q4_K; blocks of 64 (bit g: bit 4 of group g) + 256
 *   Q6_K    8 blocks, 3392: scales 256 (vector s, byte j: sub-block 4s + j), d 32, unused 32; 16 times
 *           16 columns: 128 (as 4 bits), 64 (bits 2g: bits 4-5 of group g)
 *   IQ4_XS  8 blocks, 2176: scales_l 64 (dwords: nibble b), scales_h 32 (16 bits: 2 bits of b), d 32;
 *           blocks of 256
 *   Q8_0    2 blocks, 1088: d of both 64; blocks of 512
 *   Q4_0    2 blocks, 576: d of both 64; blocks of 256. IQ4_NL the same
 *   MXFP4   4 blocks, 1088: exponent bytes of each 16; blocks of 256
 *   Q4_1    2 blocks, 640: d of both 64, m of both 64; blocks of 256
 *   Q5_0    2 blocks, 704: d of both 64; blocks of 64 (bit g: bit 4 of group g) + 256. Q5_1: 768, m
 *           of both behind d
 *   Q2_K    8 blocks, 1344: scales 256 (as Q6_K; low nibble scale, high one min), d 32, dmin 32; 16
 *           times 16 columns of 64 (bits 2g: group g)
 *   Q3_K    8 blocks, 1856: scales 256 (as Q6_K), d 32, unused 32; blocks of 64 (bit g: bit 2 of
 *           group g) and twice 64 as Q2_K
 *   IQ3_S   8 blocks, 2176: scales 64 (dwords: nibble b is half of block b's scale less 1), d 32,
 *           unused 32; blocks of 256. Codes name the levels of gemm_tables.h. IQ3_XXS the same
 *   IQ2_*   8 blocks, 1728: scales 128 (dwords: nibble j of vector i, sub-block 8i + j of 16), d 32,
 *           unused 32; blocks as Q3_K
 *   IQ1_*   8 blocks, 1280: scales and d as IQ2; 64 (dwords: bit i shifts columns 8i to 8i + 7 down);
 *           blocks as Q2_K
 *   TQ*     8 blocks, 1088: d 32, unused 32; blocks as Q2_K: value + 1
 *   NVFP4   before the first unit the tensor's scale, 16 floats; 2 blocks, 576: scales of 16 columns
 *           each (bytes, E4M3) 64; blocks of 256
 *   GPTQ4   a group: scales 32 (fp16), zeros 16 (bytes), unused 16; blocks of 256
 * Float weights are multiplied as floats: columns of 16 values, BF16 in pairs of columns (one row's
 * two values adjacent), F8_E4M3 after its scales, 16 floats per 128 columns.
 */
#ifndef STEEL_BACKEND_CPU_PANEL_H
#define STEEL_BACKEND_CPU_PANEL_H

#include "backend/cpu/gemm.h"

enum {
    K45_SCALES = 256, /* bytes of Q4_K's and Q5_K's scales */
    Q4K_BLOCK = 256,
    Q5K_BLOCK = 320,
    Q6K_SCALES = 320,
    Q6K_BLOCK = 384,
    IQ4XS_SCALES = 128,
    LOW_SCALES = 320, /* Q2_K and Q3_K */
    Q2K_BLOCK = 128,
    Q3K_BLOCK = 192,
    IQ3_SCALES = 128,
    IQ2_SCALES = 192,
    IQ1_SCALES = 256,
    UNIT_SCALES = 64, /* bytes of the others' */
};

/* Bytes before an NVFP4 panel's first unit. */
enum { NVFP4_HEAD = GEMM_PANEL * 4 };

/* Bytes of an F8_E4M3 panel's scales. */
static inline size_t panel_f8_head(int n_in)
{
    return (size_t)((n_in + 127) / 128) * GEMM_PANEL * sizeof(float);
}

/* Bytes of one panel, a multiple of 64; 0 if this segment has no packed layout. */
size_t panel_bytes(const struct raw_seg *s, int n_in);
bool panel_reads_floats(enum dtype t); /* the input form its kernels take; else quantised */
bool panel_reads_fine(enum dtype t);   /* with the fine part */
bool panel_reads_split(enum dtype t);  /* bf16 input is followed by its rounding errors */
/* dst[n_in] = row `row` of expert e of a packed segment, exact. */
void panel_row(const struct gemm_seg *s, int n_in, int e, int row, float *dst);

/*
 * Quantised input rows, one record each: 8-bit codes with a scale per 32 columns, and sums:
 *   codes   int8 (n_in)
 *   scale   float (n_in/32): value = code * scale
 *   sum     float (n_in/32): scale * sum of the block's codes, which multiplies the mins of weights
 *   init32  int32 (n_in/32): -128 * sum of codes, what a dot product starts from so that weights
 *           stored as code + 128 come out right
 *   init16  int32 (n_in/16): -32 * sum of 16 codes, likewise for Q6_K's code + 32
 *   fine    int8 (n_in): what rounding to codes lost, in 1/254 of a code: value = (code + fine/254) *
 *           scale. Q8_0, GPTQ4, MXFP4 and NVFP4 read it: their users expect next to no loss, and
 *           decoding has the time
 *   fine_init int32 (n_in/32): -128 * sum of fine
 *   fine_init16 int32 (n_in/16): -32 * sum of 16 of them
 *   fine_sum float (n_in/32): sum of the block's values, fine part included
 */
struct input_layout { /* offsets; bytes of a record */
    size_t scale, sum, init32, init16, fine, fine_init, fine_init16, fine_sum, bytes;
};

static inline struct input_layout input_layout(int n_in)
{
    size_t n = (size_t)n_in, per_block = n / 32 * 4;
    struct input_layout l;
    l.scale = (n + 63) & ~(size_t)63;
    l.sum = l.scale + per_block;
    l.init32 = l.sum + per_block;
    l.init16 = l.init32 + per_block;
    l.fine = (l.init16 + 2 * per_block + 63) & ~(size_t)63;
    l.fine_init = l.fine + n;
    l.fine_init16 = l.fine_init + per_block;
    l.fine_sum = l.fine_init16 + 2 * per_block;
    l.bytes = (l.fine_sum + per_block + 63) & ~(size_t)63;
    return l;
}

/* Stride in bytes of bf16 rows: a cache line more than the row, so that the 16 rows of a tile do not map to one cache
 * set. */
static inline size_t bf16_stride(int n_in)
{
    return (size_t)n_in * 2 + 64;
}

static inline size_t gemm_bf16_stride(const struct gemm_x *x)
{
    return bf16_stride(x->split ? 2 * x->n_in : x->n_in);
}

/* Columns [first, first + len) of a row of n_in, both multiples of 32; x: (len). The fine part only
 * where somebody reads it. */
void input_quantize_avx2(const float *x, int n_in, int first, int len, bool fine, uint8_t *record);
void input_quantize_avx512(const float *x, int n_in, int first, int len, bool fine,
                           uint8_t *record);
/* g = act(g, u) of f (layer.h); g, u: (n) */
struct ffn;
void input_glu_avx2(const struct ffn *f, float *g, const float *u, int n);
void input_glu_avx512(const struct ffn *f, float *g, const float *u, int n);
/* x (n) to bf16; split: also the rounding errors as bf16 */
void input_bf16_amx(const float *x, int n, uint16_t *out);
void input_split_amx(const float *x, int n, uint16_t *out, uint16_t *rest);

#endif
