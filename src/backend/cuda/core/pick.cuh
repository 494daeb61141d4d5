/* What pick.cu and pick_mixers.cu share: sets of formats, a piece of the table, arguments of products. */
#ifndef STEEL_BACKEND_CUDA_PICK_CUH
#define STEEL_BACKEND_CUDA_PICK_CUH

#include "backend/cuda/gemm/gemm.cuh"

/* struct pick, formats */
enum {
    K = 1 << SET_K,
    CODES = K | 1 << SET_CODES,
    FAST = CODES | 1 << SET_FAST,
    ANY = FAST | 1 << SET_ALL
};

/* Rows of some ops; an op's stand in one piece. */
struct pick_table {
    const struct pick *rows;
    int n;
};
extern const struct pick_table pick_mixers;

/* Everything but where results go. */
struct gemm_args pick_args(const struct cuda_backend *cu, const struct matrix *w, int rows);

#endif
