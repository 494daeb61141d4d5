/*
 * What the files of MLA share: arguments of the kernels that attend over latents, and the products
 * with per-head matrices.
 */
#ifndef STEEL_BACKEND_CUDA_LATENT_CUH
#define STEEL_BACKEND_CUDA_LATENT_CUH

#include "backend/cuda/gemm/gemm.cuh"

/* Sizes the tensor-core kernels are compiled for. */
enum { LATENT_MAX_ROPE = 256, LATENT_MAX_SPLIT = 64, LATENT_KEYS = 64 /* of a tile */ };
enum { LATENT_RANK = 512, LATENT_ROPE = 64, LATENT_WIDTH = LATENT_RANK + LATENT_ROPE };

/* The splits that a decode leaves for the following product to combine, if there are more than
 * one. */
struct index_choice;
struct latent_splits {
    int n_split, rows; /* rows per unit: see latent_args.part */
};

struct latent_args {
    struct step step;
    const uint8_t *cache; /* (n_pages, page_len, C + Dr) of `type` */
    int page_len, type;
    const float *q;  /* (n_tokens, H, C) queries absorbed into the latent space */
    const float *qr; /* (n_tokens, H, Dn + Dr); only the last Dr, with RoPE, are read */
    /* (H, n_tokens, ldx) the weighted sums of latents, fp16 in the order of fragment_slot */
    uint16_t *sums;
    int ldx;
    int n_heads, nope_dim, rope_dim, rank;
    float scale;
    int n_split;                        /* splits of the keys, each with its own sums */
    const struct latent_expand *expand; /* host only: for prompts that may be expanded, or NULL */
    /* host only: decodes may leave splits uncombined and report them here; or NULL */
    struct latent_splits *splits;
    const struct index_choice *choice; /* host only: the keys that rows see; NULL: all */
    float *part;                       /* (units, n_split, rows per unit, C) */
    float *ml; /* (units, n_split, rows per unit, 2) largest score, softmax sum */
};

/* RoPE of a head's last values. Output pairs are (i, n/2 + i). interleaved: input pairs are (2i,
 * 2i + 1). */
struct latent_rope {
    const float *freq; /* (n / 2) */
    float mscale;
    int n;
    bool interleaved;
};

/* Preparation of new rows (latent_row.cuh). */
struct latent_row_args {
    struct step step;
    const float *from_q; /* (n_tokens, ld_q), the first q_rank columns are read */
    float *low_q;        /* (n_tokens, q_rank) normed; NULL: not computed here */
    float *low;          /* (n_tokens, ld_low), the first C + Dr columns are read */
    const float *q_gain, *kv_gain;
    float q_eps, kv_eps;
    int ld_q, ld_low, q_rank, rank;
    struct latent_rope rope;
    uint8_t *cache;
    int type;
};

/* Keys per split if the last key is `last`: whole tiles. */
DEVICE int latent_part_keys(int last, int n_split)
{
    return (last / LATENT_KEYS + n_split) / n_split * LATENT_KEYS;
}

/* Where element i of the attention result of row t, head h is stored. */
DEVICE uint16_t *latent_sum_at(const struct latent_args &p, int t, int h, int i)
{
    return p.sums + ((size_t)h * (size_t)p.step.n_tokens + (size_t)t) * (size_t)p.ldx +
           (size_t)fragment_slot(i);
}

/* One of the two per-head products. GEMM: input x (H, rows, ldx) fp16 with the weight's ldx, and
 * a work list for tiles of `width` rows (0: not built yet). heads_gemv: either queries as
 * floats, with the pending RoPE and cache row, or the attention result. */
struct latent_heads {
    const uint16_t *x;
    int n_heads, width;
    struct route_tables list;
    bool queries, quant;
    bool store; /* also stores the row in the cache */
    float *q;   /* (rows, H, Dn + Dr) */
    struct latent_row_args row;
    const struct latent_args *attn;
    struct latent_splits splits;
};
void latent_heads_list(struct cuda_backend *cu, struct latent_heads *h, int rows, int width);

/* latent_prefill.cu: prompts with the keys and values of all heads expanded from the latents. */
struct bounds;
struct latent_expand {
    const struct matrix *wkb, *wvb;
    int v_dim, max_keys;      /* max_keys: over all prompts of a step */
    float *a;                 /* (n_tokens, H, Dv) */
    bool fp16_out;            /* the result goes to cu->forms.fp16 instead of a */
    uint16_t *x, *kr, *k, *v; /* (max_keys): C, Dr, H * Dn, H * Dv */
    uint8_t *wkb_transposed;  /* wkb transposed, fp16 tiles */
    struct latent_heads *list;
};
bool latent_expand_prepare(struct cuda_backend *cu, struct latent_expand *e, const struct bounds *b,
                           struct error *err);
bool latent_expanded_fits(const struct cuda_backend *cu, const struct latent_args &p);
void latent_expanded(struct cuda_backend *cu, const struct latent_args &p, const int2 *tiles,
                     int n_tiles);

/* latent_heads.cu: a few decodes */
bool latent_heads_gemv_fits(const struct cuda_backend *cu, const struct matrix *w,
                            const struct latent_heads *h, const struct step *s);
void latent_heads_gemv(struct cuda_backend *cu, const struct matrix *w,
                       const struct latent_heads *h, float *y, int rows);

/* latent_attn.cu: latents of 512 + 64 values, fp16 or bf16. Decodes, and prompts in tiles of 64
 * rows. */
bool latent_attn_fits(const struct cuda_backend *cu, const struct latent_args &p);
size_t latent_attn_units(const struct cuda_backend *cu, int max_seqs,
                         int n_heads); /* rows of latent_args.part */
void latent_attn_decode(struct cuda_backend *cu, struct latent_args p, int rows);
void latent_attn_prompt(struct cuda_backend *cu, struct latent_args p, const int2 *tiles,
                        int n_tiles);
/* latent.cu: any sizes and types, `rows` rows from `first` on */
void latent_attn_any(struct cuda_backend *cu, const struct latent_args &p, int first, int rows);

#endif
