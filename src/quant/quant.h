/*
 * Number formats: the dtype enum, the block layout of every compressed format (one copy, shared by
 * C and CUDA) and their exact scalar definition. A row of n values is n / block_len blocks, in
 * order. Planar formats (GPTQ, block-scaled FP8) store scales apart from the codes: see struct
 * weight_seg.
 */
#ifndef STEEL_QUANT_QUANT_H
#define STEEL_QUANT_QUANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum dtype {
    DT_NONE, /* unknown or unsupported */
    DT_F32,
    DT_F16,
    DT_BF16,
    DT_Q4_0,
    DT_Q4_1,
    DT_Q5_0,
    DT_Q5_1,
    DT_Q8_0,
    DT_Q2_K,
    DT_Q3_K,
    DT_Q4_K,
    DT_Q5_K,
    DT_Q6_K,
    DT_IQ4_NL,
    DT_IQ4_XS,
    DT_MXFP4,
    DT_IQ3_S,
    DT_IQ1_S,
    DT_IQ1_M,
    DT_IQ2_XXS,
    DT_IQ2_XS,
    DT_IQ2_S,
    DT_IQ3_XXS,
    DT_TQ1_0,
    DT_TQ2_0,
    DT_NVFP4, /* blocks, and an optional scale per tensor in a plane */
    DT_Q1_0,
    DT_Q2_0,
    DT_F8_E4M3, /* one byte per value; scales[row][col/128] in a plane */
    DT_GPTQ4,   /* 4-bit codes; scale and zero per (group, row) in planes */
    DT_NF4,     /* bitsandbytes' 4 bits, in blocks that only memory has */
    DT_FP4,
    DT_I8, /* plain integers: in files only, never weights */
    DT_I16,
    DT_I32,
    DT_I64,
    DT_F64,
    DT_COUNT
};

enum { QK_K = 256, QK_32 = 32, QK_NVFP4 = 64, QK1_0 = 128, QK2_0 = 64, QK_NF4 = 64 };

/* All fields are little-endian; d, m: fp16. q: codes, low nibble = first half of the block. */
struct block_q4_0 {
    uint16_t d;
    uint8_t qs[16];
};
struct block_q4_1 {
    uint16_t d, m;
    uint8_t qs[16];
};
struct block_q5_0 {
    uint16_t d;
    uint8_t qh[4];
    uint8_t qs[16];
};
struct block_q5_1 {
    uint16_t d, m;
    uint8_t qh[4];
    uint8_t qs[16];
};
struct block_q8_0 {
    uint16_t d;
    int8_t qs[32];
};
struct block_q2_k {
    uint8_t scales[16];
    uint8_t qs[64];
    uint16_t d, dmin;
};
struct block_q3_k {
    uint8_t hmask[32];
    uint8_t qs[64];
    uint8_t scales[12];
    uint16_t d;
};
struct block_q4_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qs[128];
};
struct block_q5_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t qs[128];
};
struct block_q6_k {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint16_t d;
};
struct block_iq4_nl {
    uint16_t d;
    uint8_t qs[16];
};
struct block_iq4_xs {
    uint16_t d, scales_h;
    uint8_t scales_l[4];
    uint8_t qs[128];
};
struct block_mxfp4 {
    uint8_t e;
    uint8_t qs[16];
}; /* e: power-of-two scale, E8M0 */
struct block_iq3_s {
    uint16_t d;
    uint8_t qs[64];    /* low 8 bits of the grid index of each 4 values */
    uint8_t qh[8];     /* ninth bit of the index, one byte per 32 values */
    uint8_t signs[32]; /* one bit per value, set = negative */
    uint8_t scales[4]; /* one nibble per 32 values */
};
/* The other grid formats (grids.c). "Even signs": 7 bits, the eighth makes their number even. */
struct block_iq2_xxs {
    uint16_t d;
    uint8_t qs[64]; /* per 32 values: 4 grid indices; 4 x 7 even signs, and the scale on top */
};
struct block_iq2_xs {
    uint16_t d;
    uint8_t qs[64];    /* per 8 values, 16 bits: grid index 9, even signs 7 */
    uint8_t scales[8]; /* one nibble per 16 values */
};
struct block_iq2_s {
    uint16_t d;
    uint8_t qs[32];    /* low 8 bits of the grid index of each 8 values */
    uint8_t signs[32]; /* one bit per value */
    uint8_t qh[8];     /* two more bits of each index */
    uint8_t scales[8]; /* one nibble per 16 values */
};
struct block_iq3_xxs {
    uint16_t d;
    uint8_t qs[64];    /* the grid index of each 4 values */
    uint8_t signs[32]; /* per 32 values: 4 x 7 even signs, and the scale on top */
};
struct block_iq1_s {
    uint16_t d;
    uint8_t qs[32]; /* low 8 bits of the grid index of each 8 values */
    uint8_t qh[16]; /* per 32 values, 16 bits: 4 x 3 bits of indices, scale 3, shift down 1 */
};
struct block_iq1_m {
    uint8_t qs[32];
    uint8_t qh[16];    /* per 8 values a nibble: 3 bits of the index, shift down 1 */
    uint8_t scales[8]; /* per 64 values, 16 bits: 4 x 3 bits of scales, and a nibble of d on top */
};
/* Ternary: d times -1, 0 or 1. */
struct block_tq1_0 {
    uint8_t qs[48]; /* five base-3 digits each, as a fraction of 256 */
    uint8_t qh[4];  /* four digits */
    uint16_t d;
};
struct block_tq2_0 {
    uint8_t qs[64];
    uint16_t d;
};
struct block_q1_0 { /* bit i: value i is d or -d */
    uint16_t d;
    uint8_t qs[QK1_0 / 8];
};
struct block_q2_0 { /* bits 2i: value i is (code - 1) * d */
    uint16_t d;
    uint8_t qs[QK2_0 / 4];
};
struct block_nvfp4 {
    uint8_t d[4];   /* scale of 16 values each, FP8 E4M3 without sign */
    uint8_t qs[32]; /* 8 bytes per 16 values, low nibble = first half of them */
};
struct block_nf4 { /* NF4 and FP4: d times one of quant_levels */
    float d;
    uint8_t qs[QK_NF4 / 2]; /* byte i: value 2i in the low nibble, 2i + 1 in the high one */
};

enum { QUANT_GRID_POINTS = 512 + 256 + 256 + 512 + 1024 + 2048 }; /* total over all grids */

struct dtype_info {
    const char *name; /* as GGUF tools print it: "Q4_K" */
    int block_len;    /* values per block */
    int block_bytes;
};

#ifndef __CUDACC__
extern const struct dtype_info dtype_table[DT_COUNT];
static inline const char *dtype_name(enum dtype t)
{
    return dtype_table[t].name;
}
/* Bytes of n values (n a multiple of block_len, the caller checked). */
static inline size_t dtype_bytes(enum dtype t, size_t n)
{
    return n / (size_t)dtype_table[t].block_len * (size_t)dtype_table[t].block_bytes;
}
enum dtype dtype_from_name(const char *name); /* case-insensitive; DT_NONE if unknown */
enum dtype dtype_from_ggml(uint32_t id);      /* GGUF tensor type number; DT_NONE if unsupported */
int dtype_to_ggml(enum dtype t);              /* -1 where GGUF has no such type */

/* Whether weights may have this type: not integers, doubles or planar formats. */
bool dtype_is_weight(enum dtype t);

/* dst[0..n) = values of n/block_len blocks; exact in float. Not for planar formats. */
void quant_dequantize(enum dtype t, const void *src, float *dst, size_t n);

/* The 16 levels of NF4 or FP4, from -1 to 1; NULL for other types. */
extern const float quant_nf4_levels[16], quant_fp4_levels[16];
static inline const float *quant_levels(enum dtype t)
{
    return t == DT_NF4 ? quant_nf4_levels : t == DT_FP4 ? quant_fp4_levels : NULL;
}

/* The grid of an IQ1, IQ2 or IQ3 format: points of 8 digits of 2 bits, or (IQ3) 4 digits of 3
 * bits, the first value in the low bits. NULL for other types. quant_grids has all of them
 * concatenated. */
const uint16_t *quant_grid(enum dtype t);
const uint16_t *quant_grids(void);
/* The same points as bytes, first value lowest. IQ2: 8, 25, 43; IQ3: its 8 levels; IQ1: -8, 0,
 * 8. */
const uint64_t *quant_grid_values(enum dtype t);

/* A block of 256 values of a grid or ternary format as integers: value i = d * scale[i / 16] *
 * code[i]. d is exact, and so are the products. */
struct quant_codes {
    float d;
    int8_t scale[16]; /* odd, 1 to 31 */
    int8_t code[256];
};
static inline bool quant_has_codes(enum dtype t)
{
    return t >= DT_IQ3_S && t <= DT_TQ2_0;
}
bool quant_read_codes(enum dtype t, const void *block, struct quant_codes *c); /* false: has none */

/* Scale and minimum of sub-block j (0..7) in the 12 packed bytes of Q4_K and Q5_K, 6 bits each. */
static inline void quant_k4_scale_min(const uint8_t *s, int j, int *scale, int *min)
{
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *min = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}
/* Scale of sub-block j (0..15) in the 12 packed bytes of Q3_K: 6 bits, minus 32. */
static inline int quant_q3k_scale(const uint8_t *s, int j)
{
    int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
    return (low | (s[8 + j % 4] >> 2 * (j / 4) & 3) << 4) - 32;
}
float quant_mxfp4_scale(uint8_t e); /* half of 2^(e-127), because the levels are doubled */
float quant_ue4m3_half(
    uint8_t
        b); /* half of an FP8 scale of NVFP4, likewise; the sign is not looked at, 0x7f counts as 0 */

float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f); /* round to nearest even */
float bf16_to_f32(uint16_t b);
uint16_t f32_to_bf16(float f); /* round to nearest even */
float f8e4m3_to_f32(uint8_t b);
#endif

#endif
