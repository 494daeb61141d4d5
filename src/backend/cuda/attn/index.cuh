/* Arguments of the indexer's kernels (index_kernels.cu). */
#ifndef STEEL_BACKEND_CUDA_INDEX_CUH
#define STEEL_BACKEND_CUDA_INDEX_CUH

#include "backend/cuda/core/cuda.h"

/* INDEX_KEYS: keys that a block scores. Blocks of keys divide it. */
enum { INDEX_KEYS = 128, INDEX_MAX_DIM = 256 };

struct index_args {
    struct step step;
    const float2 *rope; /* (n_tokens, half) or NULL */
    int half;
    bool interleaved, last; /* last: adjacent pairs of the last values, in place */
    float *q, *w;           /* (n_tokens, n_heads, dim), (n_tokens, n_heads) or NULL: by blocks */
    float *k;               /* (n_tokens, dim) or NULL: keys are entries of a compressor */
    int rate, page_rows;    /* tokens of a key; rows of a page */
    struct gain q_norm, k_norm;
    uint8_t *cache;                                    /* (n_pages, page_len, dim) */
    int type, page_len, n_heads, dim, n_chosen, block; /* block 0: keys */
    float *scores; /* (rows, groups, units), of rows first .. first + rows - 1 */
    size_t units;
    int32_t *list, *n; /* struct index_choice */
    int first;
};
/* q and k of all rows: norms, rotation, and k's store. */
void index_rows(struct cuda_backend *cu, const struct index_args &p, int rows);
/* Scores, then the choice, of `rows` rows from p.first on, whose contexts have at most `keys` keys. */
void index_pick(struct cuda_backend *cu, const struct index_args &p, int rows, int keys);
/* x (rows, width) as values rounded to fp16's mantissa and, from row `rows` of y on, the residues. */
void index_split(struct cuda_backend *cu, const float *x, float *y, int rows, int width);
/* y (rows, width) = x + its rows from `rows` on */
void index_join(struct cuda_backend *cu, const float *x, float *y, int rows, int width);
size_t index_shared(int n_heads, int dim);

#endif
