/*
 * Packed weights: panels of 16 interleaved rows. One 64-byte vector holds four adjacent columns of each row
 * (a "column group"), the order of the dot-product instructions. Codes stay as small as in the file. One
 * layout serves one input row and many. A panel is 16 rows x n_in; rows past the end are zeros.
 *
 * Codes of a block of 32 columns, which is 8 column groups g. Byte 4*r + j of a group is row r, column
 * 4*g + j.
 *   C8  512 bytes  8 vectors, one per group
 *   C4  256 bytes  4 vectors i: low nibbles are group 2i, high nibbles group 2i + 1
 *   C2  128 bytes  2 vectors of 16 columns each: bits 2g and 2g + 1 are group g of the vector
 *   C1   64 bytes  1 vector: bit g is one more bit of group g
 *
 * A panel is stored in the order it is read, as one stream of units. A unit has scales, then blocks. In the
 * table, "lanes" are 64 bytes, a 32-bit lane per row; d, dmin and m are fp16, 32 bytes per block of the
 * file; numbers are bytes.
 *   format   blocks  bytes  scales                                                 a block
 *   Q4_K     8       2304   lanes of scales (1), lanes of mins (1), lanes of       C4
 *                           high bits (2), d, dmin
 *   Q5_K     8       2816   as Q4_K                                                C1 (bit 4), C4
 *   Q6_K     8       3392   16 scales (3), d, unused 32                            2 x 16 columns (4)
 *   IQ4_XS   8       2176   lanes: nibble b is block b's low scale bits; 32: two   C4
 *                           high bits per block; d
 *   Q8_0     2       1088   d of both                                              C8 (7)
 *   Q4_0     2       576    d of both                                              C4
 *   IQ4_NL   2       576    d of both                                              C4
 *   MXFP4    4       1088   exponent bytes, 16 per block                           C4
 *   Q4_1     2       640    d of both, m of both                                   C4
 *   Q5_0     2       704    d of both                                              C1 (bit 4), C4
 *   Q5_1     2       768    d of both, m of both                                   C1 (bit 4), C4
 *   Q2_K     8       1344   16 scales (3): low nibble scale, high nibble min;      C2
 *                           d, dmin
 *   Q3_K     8       1856   16 scales (3), d, unused 32                            C1 (bit 2), C2
 *   IQ3_*    8       2176   lanes: nibble b is n, block b's scale is 2n + 1;       C4 (5)
 *                           d, unused 32
 *   IQ2_*    8       1728   2 x lanes: nibble j of vector i is n, the scale of     C1 (bit 2), C2 (5)
 *                           sub-block 8i + j (16 columns) is 2n + 1; d, unused 32
 *   IQ1_*    8       1280   as IQ2; lanes: bit i shifts columns 8i to 8i + 7 down  C2 (5)
 *   TQ*      8       1088   d, unused 32                                           C2 of value + 1
 *   NVFP4    2       576    16 E4M3 bytes per 16 columns (6)                       C4
 *   NF4 FP4  1       576    16 floats                                              byte 16 p + r: columns 2p (low
 *                                                                                  nibble) and 2p + 1 of row r
 *   GPTQ4    group   -      32 scales (fp16), 16 zero points (bytes), unused 16    C4
 * (1) byte j of a lane: low nibble is the low bits of block j, high nibble those of block 4 + j.
 * (2) byte j of a lane: bits 0-1 scale j, 2-3 scale 4 + j, 4-5 min j, 6-7 min 4 + j.
 * (3) 256 bytes: byte j of a lane of vector s is the scale of 16 columns, number 4s + j.
 * (4) 128 bytes as C4, then 64 bytes: bits 2g and 2g + 1 are bits 4-5 of group g.
 * (5) codes index the levels of gemm_tables.h.
 * (6) the panel begins with the tensor's scale, 16 floats.
 * (7) of code + 128; on ARM, whose dot products are of signed bytes, of the codes.
 *
 * Float weights, and the levels of NF4 and FP4, are multiplied as floats: columns of 16 values. BF16 is stored in pairs of columns (a row's
 * two values adjacent). F8_E4M3 begins with its scales, 16 floats per 128 columns.
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
    UNIT_SCALES = 64, /* scales of a unit of the other formats */
};

/* Four codes of Q8_0 xor this are stored. */
#ifdef __aarch64__
#define PANEL_Q8_SIGNS 0u
#else
#define PANEL_Q8_SIGNS 0x80808080u
#endif

/* Bytes of 64 columns of NF4 or FP4. */
enum { PANEL_NF4_UNIT = UNIT_SCALES + GEMM_PANEL * QK_NF4 / 2 };

/* Bytes of an NVFP4 panel before its first unit. */
enum { NVFP4_HEAD = GEMM_PANEL * 4 };

/* Bytes of an F8_E4M3 panel's scales. */
static inline size_t panel_f8_head(int n_in)
{
    return (size_t)((n_in + 127) / 128) * GEMM_PANEL * sizeof(float);
}

/* Bytes of one panel, a multiple of 64; 0 if this segment has no packed layout. */
size_t panel_bytes(const struct raw_seg *s, int n_in);
/* A format's unit: its columns, the bytes of its scales, and of a block of 32 columns; all 0 for columns of floats. False: its
 * panels have other parts. */
bool panel_unit(enum dtype t, int *columns, int *scales, int *block);
bool panel_reads_floats(
    enum dtype t); /* whether its kernels read float inputs; otherwise quantised */
bool panel_reads_fine(enum dtype t); /* whether they also read the fine part */
bool panel_reads_split(
    enum dtype t); /* whether bf16 inputs are followed by their rounding errors */
/* dst[n_in] = row `row` of expert e of a packed segment, without loss. */
void panel_row(const struct gemm_seg *s, int n_in, int e, int row, float *dst);

/*
 * Quantised input rows, one record each: 8-bit codes with a scale per 32 columns, and sums.
 *   codes   int8 (n_in)
 *   scale   float (n_in/32): value = code * scale
 *   sum     float (n_in/32): scale * sum of the block's codes, which multiplies the mins of weights
 *   init32  int32 (n_in/32): -128 * sum of codes: the initial value of a dot product with weights that
 *           are stored as code + 128
 *   init16  int32 (n_in/16): -32 * sum of 16 codes, likewise for Q6_K's code + 32
 *   fine    int8 (n_in): rounding error of the codes, in 1/254 of a code:
 *           value = (code + fine/254) * scale. Only Q8_0, GPTQ4, MXFP4 and NVFP4 read it: their users
 *           expect next to no loss, and decode has time for it, being limited by memory
 *   fine_init    int32 (n_in/32): -128 * sum of fine
 *   fine_init16  int32 (n_in/16): -32 * sum of 16 of them
 *   fine_sum     float (n_in/32): sum of the block's values, fine part included
 */
struct input_layout { /* offsets in a record, and its bytes */
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

/* A code in units of its fine part, and the inverse. Blocks of 32 such sums fit in 32-bit integers. */
enum { FINE_PER_CODE = 254 };
#define FINE_UNIT (1.0f / FINE_PER_CODE)

/* Stride in bytes of bf16 rows. It is one cache line longer than the row, so that the 16 rows of a
 * tile do not map to the same cache set. */
static inline size_t bf16_stride(int n_in)
{
    return (size_t)n_in * 2 + 64;
}

static inline size_t gemm_bf16_stride(const struct gemm_x *x)
{
    return bf16_stride(x->split ? 2 * x->n_in : x->n_in);
}

/* Quantises columns [first, first + len) of a row of n_in, both multiples of 32; x: (len). fine:
 * also the fine part. */
void input_quantize_avx2(const float *x, int n_in, int first, int len, bool fine, uint8_t *record);
void input_quantize_avx512(const float *x, int n_in, int first, int len, bool fine,
                           uint8_t *record);
void input_quantize_neon(const float *x, int n_in, int first, int len, bool fine, uint8_t *record);
/* g = act(g, u) of f (layer.h); g, u: (n) */
struct ffn;
void input_glu_avx2(const struct ffn *f, float *g, const float *u, int n);
void input_glu_avx512(const struct ffn *f, float *g, const float *u, int n);
void input_glu_neon(const struct ffn *f, float *g, const float *u, int n);
/* Converts x (n) to bf16; split: also its rounding errors. */
void input_bf16_amx(const float *x, int n, uint16_t *out);
void input_split_amx(const float *x, int n, uint16_t *out, uint16_t *rest);

#endif
