/*
 * Compressed matrices of Hugging Face folders. Whatever a tool calls its tensors and however it packs
 * them, a matrix comes out in one of six forms of rawweight.h:
 *   GPTQ4    GPTQ; AWQ (gemm); compressed-tensors Int4, by group or channel, symmetric or not
 *   Q8_0     8-bit integers without zero points: GPTQ, compressed-tensors (packed or not), bitsandbytes
 *   F8_E4M3  FP8 with a scale per tensor, channel or block: DeepSeek's names, compressed-tensors, ModelOpt
 *   NVFP4    compressed-tensors and ModelOpt
 *   MXFP4    blocks and scales of gpt-oss; compressed-tensors
 *   F16      bitsandbytes' NF4 and FP4, which no other form holds
 * What a matrix is, its tensors say: so modules that a tool left alone are plain ones beside it.
 * Everything is checked here, once; an error names the tensor. Loading and `convert` read through it.
 */
#ifndef STEEL_MODEL_LAYOUT_H
#define STEEL_MODEL_LAYOUT_H

#include "file/tensorfile.h"
struct meta_reader; /* model/reader.h */

enum layout_kind {
    LAYOUT_PLAIN, /* one tensor of values: not our business */
    LAYOUT_GPTQ,
    LAYOUT_AWQ,
    LAYOUT_INT4,
    LAYOUT_INT8,
    LAYOUT_FP8,
    LAYOUT_NVFP4,
    LAYOUT_MXFP4,
    LAYOUT_BNB4,
};

/* What quantization_config says that tensors do not. */
struct layout_config {
    bool awq;       /* qweight is AWQ's, else GPTQ's */
    int group_len;  /* of both; -1 = whole row */
    bool mixed;     /* GPTQ: some matrices have other groups, as many as they have scales */
    bool zero_plus; /* GPTQ v1: zeros are stored less one */
    int bits;       /* of integers in words, where it says; else 0 */
    int block[2];   /* FP8: rows and columns of a scale's block; 0: as the tensors say */
};

bool layout_read_config(const struct meta_reader *in, struct layout_config *out);

/* Which matrix: n_stack of n_out x n_in, in tensors of one name. */
struct layout_ask {
    const char *path; /* of the folder, for errors */
    /* The tensor of this matrix with such a suffix ("weight", "qweight", ...), or NULL. */
    const struct tensor *(*find)(void *arg, const char *suffix);
    void *arg;
    const struct layout_config *config;
    int n_in, n_out;
    int n_stack;     /* 3-D tensors of so many; 0: 2-D */
    bool transposed; /* plain tensors of this name are transposed: packed ones may be */
};

struct packed_layout {
    enum layout_kind kind;
    enum dtype type; /* of the form that comes out */
    int n_in, n_out, n_stack;
    int group_len, n_groups; /* GPTQ4, Int8 */
    int block[2];            /* FP8: rows and columns that share a scale */
    bool zero_plus;
    bool words;      /* Int8: codes are more by 128; GPTQ's: four columns of a row in each word */
    float times;     /* Int8: of every scale */
    bool reciprocal; /* NVFP4: divide by the global scale */
    bool transposed; /* FP8 and NVFP4: transposed, (n_in, n_out) */
    const struct tensor *data, *scale, *zero, *order, *global; /* the last three or NULL */
    /* bitsandbytes: the 16 levels; of scales that are codes themselves, their levels, the scales of
     * every 256 of them, and what is added to all */
    const struct tensor *levels, *scale_levels, *scale_scales;
    float scale_add;
};

/* Finds and checks the tensors. kind LAYOUT_PLAIN, and true, where nothing is compressed. */
bool layout_find(const struct layout_ask *ask, struct packed_layout *out, struct error *err);

/* Rows first, first + step, ... of matrix `index` of the stack. run: so many at each step; 0 = 1. */
struct layout_rows {
    int index, first, step, n, run_length;
};

/* Where they go, in the form of struct raw_seg; sizes as layout_bytes gives them. */
struct layout_planes {
    uint8_t *data; /* (n, row bytes); NULL: not wanted */
    void *scale;
    uint8_t *zero;
    int32_t *order; /* (n_in) GPTQ4 with g_idx: input column stored at j */
};

struct layout_bytes {
    size_t data, scale, zero, order;
};

struct layout_bytes layout_bytes(const struct packed_layout *l, int n);
/* False, with an error that names the tensor, where a scale is no number or an index is out of range.
 * *permuted: the order is not the identity. */
bool layout_read(const struct packed_layout *l, const char *path, const struct layout_rows *rows,
                 const struct layout_planes *to, bool *permuted, struct error *err);
/* The codes of consecutive rows where the file has them as they are read: FP8. Else NULL. */
const uint8_t *layout_direct(const struct packed_layout *l, const struct layout_rows *rows);

/* Whether a tensor of this name is about activations or caches, which stay as they are here. */
bool layout_is_spare(const char *name);

/* Values of a tensor of this name that count as parameters of the model: packed codes hold several,
 * scales and their like none. */
int64_t layout_params(const struct tensor *t, const struct layout_config *config);

#endif
