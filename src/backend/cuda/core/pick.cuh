/* Shared by pick.cu, pick_experts.cu and pick_mixers.cu: sets of formats, parts of the kernel table, arguments of
 * products. */
#ifndef STEEL_BACKEND_CUDA_PICK_CUH
#define STEEL_BACKEND_CUDA_PICK_CUH

#include "backend/cuda/gemm/gemm.cuh"

/* sets of formats, for pick_row.formats */
enum {
    K = 1 << SET_K,
    CODES = K | 1 << SET_CODES,
    FAST = CODES | 1 << SET_FAST,
    ANY = FAST | 1 << SET_ALL
};

/* The rows of some ops. All rows of an op are in one part. */
struct pick_table {
    const struct cuda_pick *rows;
    int n;
};
extern const struct pick_table pick_experts, pick_mixers;

/* All fields except the outputs. */
struct gemm_args pick_args(const struct cuda_backend *cu, const struct matrix *w, int rows);

/* Of a feed-forward or of experts: gate and up (i = 0), then down. */
struct gemm_args pick_ffn_args(const struct cuda_backend *cu, const struct pick_case *c, int i);
bool pick_ffn_wgmma_fits(const struct cuda_backend *cu, const struct pick_case *c);
bool pick_pair_mma_fits(const struct cuda_backend *cu, const struct pick_case *c);
/* Rows of an mma.sync block's tile, for `rows` rows. */
int pick_tile_width(const struct matrix *w, int rows, bool mma);
/* Rows of a tile of CLASS_SPLITK. */
enum { SPLITK_WIDTH = 16 };

/* A product outside `linear` on wgmma: gemm_fp16 where its rows of the table would run, else
 * gemm_wgmma. */
void pick_wgmma(struct cuda_backend *cu, const struct gemm_args &p);

#endif
