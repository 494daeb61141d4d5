/*
 * Packed matrices of Hugging Face folders. Tools differ in tensor names and packing; each matrix is read
 * into one of these formats of rawweight.h:
 *   GPTQ4    GPTQ; AWQ (gemm and gemv); compressed-tensors Int4, by group or channel, symmetric or not
 *   Q8_0     8-bit integers without zero points: GPTQ, compressed-tensors (packed or not), bitsandbytes,
 *            torchao
 *   F8_E4M3  FP8 with a scale per tensor, channel or block: DeepSeek's names (also V4's, whose scales are exponents),
 *            compressed-tensors, ModelOpt, torchao
 *   NVFP4    compressed-tensors, ModelOpt and MLX
 *   MXFP4    blocks and scales of gpt-oss; compressed-tensors; DeepSeek V4
 *   Q4_1     MLX with 2 to 4 bits: a scale and a least value per group; HQQ with 1 to 4 bits, groups along rows; AWQ
 *            gemv_fast; torchao's plain Int4
 *   Q5_1     MLX with 5 bits
 *   TQ2_0    BitNet's ternary weights; Q4_0 where rows are no multiple of 256
 *   BF16     MXFP8, whose values it holds exactly
 *   NF4, FP4 bitsandbytes' 4 bits, where rows are whole blocks
 *   F16      the others of bitsandbytes, MLX with 6 and 8 bits, HQQ with 8 bits or groups across rows, which no other
 *            format can hold
 * A matrix's layout is recognised by its tensors, so modules that a tool did not quantise are simply plain.
 * Everything is checked here once; an error names the tensor. Loading and `convert` read through it.
 */
#ifndef STEEL_MODEL_LAYOUT_H
#define STEEL_MODEL_LAYOUT_H

#include "file/tensorfile.h"
struct meta_reader; /* model/reader.h */

enum layout_kind {
    LAYOUT_PLAIN, /* one tensor of plain values, not handled here */
    LAYOUT_GPTQ,
    LAYOUT_AWQ,
    LAYOUT_INT4,
    LAYOUT_INT8,
    LAYOUT_FP8,
    LAYOUT_NVFP4,
    LAYOUT_MXFP4,
    LAYOUT_BNB4,
    LAYOUT_MLX,
    LAYOUT_TERNARY,
    LAYOUT_MXFP8,
    LAYOUT_GEMV_FAST,
    LAYOUT_HQQ,
    LAYOUT_AO4, /* torchao's Int4Tensor */
};

/* Parameters of quantization_config that the tensors do not show. */
struct layout_config {
    bool awq;       /* qweight is AWQ's, else GPTQ's */
    int group_len;  /* of GPTQ and AWQ; -1 = whole row */
    bool mixed;     /* GPTQ: group length differs by matrix; derived from the number of scales */
    bool zero_plus; /* GPTQ v1: zeros are stored minus one */
    int bits;       /* bits of integers packed in words; 0 = not given */
    bool gemv;      /* AWQ: words along a row, in order */
    bool gemv_fast; /* AWQ: words of four rows, zeros times scales */
    bool ternary;   /* U8 weights are BitNet's */
    bool divides;   /* ... whose scale divides */
    int mlx_bits;   /* of most matrices; 0 = the folder is not MLX's */
    int block[2];   /* FP8: rows and columns of a scale's block; 0 = from the tensors */
};

bool layout_read_config(const struct meta_reader *in, struct layout_config *out);

/* The matrix to find: n_stack matrices of n_out x n_in under one name. */
struct layout_ask {
    const char *path; /* of the folder, for errors */
    /* Finds the matrix's tensor with a suffix ("weight", "qweight", ...), or NULL. */
    const struct tensor *(*find)(void *arg, const char *suffix);
    void *arg;
    const struct layout_config *config;
    int n_in, n_out;
    int n_stack;     /* tensors are 3-D with n_stack matrices; 0 = 2-D */
    bool transposed; /* plain tensors of this name are transposed; packed ones may be */
};

struct packed_layout {
    enum layout_kind kind;
    enum dtype type; /* format that layout_read writes */
    int n_in, n_out, n_stack;
    int group_len, n_groups; /* GPTQ4, Int8, MLX */
    int bits;                /* MLX, HQQ */
    bool across;  /* HQQ: the matrix is n_groups columns of group_len values, with a scale each */
    bool shifts;  /* Int8: a zero point beside every scale */
    int stride;   /* AWQ gemv: scales per row, of which n_groups are used; 0 = n_groups */
    int block[2]; /* FP8: rows and columns that share a scale */
    bool zero_plus;
    bool words;      /* Int8: codes have a bias of 128; GPTQ: a word holds four columns of a row */
    float times;     /* Int8: factor on every scale */
    bool reciprocal; /* NVFP4: divide by the global scale; BitNet: by the scale */
    bool transposed; /* FP8 and NVFP4: transposed, (n_in, n_out) */
    /* the last three or NULL; zero: MLX's least values */
    const struct tensor *data, *scale, *zero, *order, *global;
    /* bitsandbytes: the 16 levels. If scales are quantised: their levels, one scale per 256 of
     * them, and an offset added to all. */
    const struct tensor *levels, *scale_levels, *scale_scales;
    float scale_add;
};

/* Finds and checks the tensors. Returns true with kind LAYOUT_PLAIN if nothing is packed. */
bool layout_find(const struct layout_ask *ask, struct packed_layout *out, struct error *err);

/* Row i is row first + step * (i / run_length) + i % run_length of matrix `index` of the stack.
 * run_length 0 means 1. */
struct layout_rows {
    int index, first, step, n, run_length;
};

/* Output of layout_read, as in struct raw_seg. Sizes are given by layout_bytes. */
struct layout_planes {
    uint8_t *data; /* (n, row bytes) or NULL */
    void *scale;
    uint8_t *zero;
    int32_t *order; /* (n_in) GPTQ4 with g_idx: input column stored at j */
};

struct layout_bytes {
    size_t data, scale, zero, order;
};

struct layout_bytes layout_bytes(const struct packed_layout *l, int n);
/* Reads rows. Fails, naming the tensor, if a scale is not finite or an index is out of range.
 * *permuted: order is not the identity. */
bool layout_read(const struct packed_layout *l, const char *path, const struct layout_rows *rows,
                 const struct layout_planes *to, bool *permuted, struct error *err);
/* Direct pointer to the codes of consecutive rows, if the file stores them in the output format
 * (FP8). Else NULL. */
const uint8_t *layout_direct(const struct packed_layout *l, const struct layout_rows *rows);

/* Whether the tensor is a scale of activations or caches, which are not used here. */
bool layout_is_spare(const char *name);

/* Model parameters held by a tensor: several per packed code, none for scales. */
int64_t layout_params(const struct tensor *t, const struct layout_config *config);

#endif
