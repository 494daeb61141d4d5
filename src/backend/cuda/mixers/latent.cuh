/*
 * What the files of latent attention share: arguments of the kernels that attend over latents, and
 * the products that have a matrix for each head.
 */
#ifndef STEEL_BACKEND_CUDA_LATENT_CUH
#define STEEL_BACKEND_CUDA_LATENT_CUH

#include "backend/cuda/gemm/gemm.cuh"

/* Sizes the tensor-core kernels are made for. */
enum { LATENT_MAX_ROPE = 256, LATENT_MAX_SPLIT = 64, LATENT_KEYS = 64 /* of a tile */ };
enum { LATENT_RANK = 512, LATENT_ROPE = 64, LATENT_WIDTH = LATENT_RANK + LATENT_ROPE };

/* What decodes leave for the product behind them: parts of the sums, if there are more than one. */
struct latent_left {
    int n_split, rows; /* rows of a unit: see latent_args.part */
};

struct latent_args {
    struct step step;
    const uint8_t *cache; /* (n_pages, page_len, C + Dr) of `type` */
    int page_len, type;
    const float *q;  /* (n_tokens, H, C) queries in the latent's space */
    const float *qr; /* (n_tokens, H, Dn + Dr) of which the last Dr, rotated */
    uint16_t
        *sums; /* (H, n_tokens, ldx) what they gather, as halves in the order of fragment_slot */
    int ldx;
    int n_heads, nope_dim, rope_dim, rank;
    float scale;
    int n_split;                        /* parts of the keys; each leaves its own sums */
    const struct latent_expand *expand; /* host's: of prompts that may be expanded, or NULL */
    struct latent_left *left; /* host's: decodes may leave parts, and say so here; or NULL */
    float *part;              /* (units, n_split, rows of a unit, C) */
    float *ml; /* (units, n_split, rows of a unit, 2) largest score, sum of weights */
};

/* RoPE of a head's last values. Output pairs are (i, n/2 + i); interleaved: input pairs are (2i, 2i + 1). */
struct latent_rope {
    const float *freq; /* (n / 2) */
    float mscale;
    int n;
    bool interleaved;
};

/* What becomes of new rows (latent_row.cuh). */
struct latent_row_args {
    struct step step;
    const float *from_q; /* (n_tokens, ld_q) of which the first q_rank */
    float *low_q;        /* (n_tokens, q_rank) their norm; NULL: not here */
    float *low;          /* (n_tokens, ld_low) of which the first C + Dr */
    const float *q_gain, *kv_gain;
    float q_eps, kv_eps;
    int ld_q, ld_low, q_rank, rank;
    struct latent_rope rope;
    uint8_t *cache;
    int type;
};

/* Keys of a part, where the last of them is `last`: whole tiles. */
DEVICE int latent_part_keys(int last, int n_split)
{
    return (last / LATENT_KEYS + n_split) / n_split * LATENT_KEYS;
}

/* Where element i of what row t, head h gathered goes. */
DEVICE uint16_t *latent_sum_at(const struct latent_args &p, int t, int h, int i)
{
    return p.sums + ((size_t)h * (size_t)p.step.n_tokens + (size_t)t) * (size_t)p.ldx +
           (size_t)fragment_slot(i);
}

/* One of the two products: x (H, rows, ldx) halves, ldx of the weight; the work list of its kernel,
 * for tiles of `width` rows, 0: not made. Or, heads_gemv: queries as floats, with what is to be done
 * to them and to the row of the cache; or what attention left. */
struct latent_heads {
    const uint16_t *x;
    int n_heads, width;
    struct route_tables list;
    bool queries, coded;
    bool store; /* the row of the cache too */
    float *q;   /* (rows, H, Dn + Dr) */
    struct latent_row_args row;
    const struct latent_args *attn;
    struct latent_left left;
};
void latent_heads_list(struct cuda_backend *cu, struct latent_heads *h, int rows, int width);

/* latent_prefill.cu: prompts with keys and values of all heads made from the latents. */
struct bounds;
struct latent_expand {
    const struct matrix *wkb, *wvb;
    int v_dim, max_keys;      /* max_keys: of all prompts of a step */
    float *a;                 /* (n_tokens, H, Dv) */
    bool halves;              /* to cu->fp16_in in place of a */
    uint16_t *x, *kr, *k, *v; /* (max_keys): C, Dr, H * Dn, H * Dv */
    uint8_t *turned;          /* wkb the other way around */
    struct latent_heads *list;
};
bool latent_expand_prepare(struct cuda_backend *cu, struct latent_expand *e, const struct bounds *b,
                           struct error *err);
bool latent_expanded_fits(const struct cuda_backend *cu, const struct latent_args &p);
void latent_expanded(struct cuda_backend *cu, const struct latent_args &p, const int2 *tiles,
                     int n_tiles);

/* latent_heads.cu: few decodes */
bool latent_heads_gemv_fits(const struct cuda_backend *cu, const struct matrix *w,
                            const struct latent_heads *h, const struct step *s);
void latent_heads_gemv(struct cuda_backend *cu, const struct matrix *w,
                       const struct latent_heads *h, float *y, int rows);

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
