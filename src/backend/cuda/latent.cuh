/*
 * What the files of latent attention share: arguments of the kernels that attend over latents, and
 * the products that have a matrix for each head.
 */
#ifndef STEEL_BACKEND_CUDA_LATENT_CUH
#define STEEL_BACKEND_CUDA_LATENT_CUH

#include "backend/cuda/gemm.cuh"

/* Sizes the tensor-core kernels are made for. */
enum { LATENT_RANK = 512, LATENT_ROPE = 64, LATENT_WIDTH = LATENT_RANK + LATENT_ROPE };

struct latent_args {
    struct step step;
    const uint8_t *cache; /* (n_pages, page_len, C + Dr) of `type` */
    int page_len, type;
    const float *q;  /* (n_tokens, H, C) queries in the latent's space */
    const float *qr; /* (n_tokens, H, Dn + Dr) of which the last Dr, rotated */
    uint16_t *sums;  /* (H, n_tokens, ldx) what they gather, as halves in the order of half_slot */
    int ldx;
    int n_heads, nope_dim, rope_dim, rank;
    float scale;
    int n_split; /* parts of the keys; each leaves its own sums */
    float *part; /* (units, n_split, rows of a unit, C) */
    float *ml;   /* (units, n_split, rows of a unit, 2) largest score, sum of weights */
};

/* Where element i of what row t, head h gathered goes. */
DEVICE uint16_t *latent_sum_at(const struct latent_args &p, int t, int h, int i)
{
    return p.sums + ((size_t)h * (size_t)p.step.n_tokens + (size_t)t) * (size_t)p.ldx +
           (size_t)half_slot(i);
}

/* One of the two products: x (H, rows, ldx) halves, ldx of the weight; the work list of its kernel,
 * for tiles of `width` rows, 0: not made. */
struct latent_heads {
    const uint16_t *x;
    int n_heads, width;
    struct route_tables list;
};
void latent_heads_list(struct cuda_backend *cu, struct latent_heads *h, int rows, int width);

/* latent_attn.cu: 512 + 64 values of halves or bf16. Decodes, and tiles of 64 rows of prompts. */
bool latent_attn_fits(const struct cuda_backend *cu, const struct latent_args &p);
size_t latent_attn_units(const struct cuda_backend *cu, int max_seqs,
                         int n_heads); /* rows of part */
void latent_attn_decode(struct cuda_backend *cu, struct latent_args p, int rows);
void latent_attn_prompt(struct cuda_backend *cu, struct latent_args p, const int2 *tiles,
                        int n_tiles);
/* latent.cu: any sizes and types, rows from `first` on */
void latent_attn_any(struct cuda_backend *cu, const struct latent_args &p, int first, int rows);

#endif
