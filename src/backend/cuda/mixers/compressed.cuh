/*
 * Compressed attention (struct compressed of layer.h), as its files see it: compressed.cu has projections and compressors,
 * list_attn.cu the attention.
 */
#ifndef STEEL_BACKEND_CUDA_COMPRESSED_CUH
#define STEEL_BACKEND_CUDA_COMPRESSED_CUH

#include "backend/cuda/attn/index.h"
#include "backend/cuda/mixers/latent.cuh"

/* Entry w is the row after a page's tokens, first + (its last position in the page) / rate, of `rows` rows. */
struct entry_layout {
    int rate, rows, first, page_len;
};

DEVICE size_t entry_row(const struct entry_layout &l, const int32_t *pages, int w)
{
    int end = (w + 1) * l.rate - 1, page = end / l.page_len;
    return (size_t)pages[page] * (size_t)l.rows +
           (size_t)(l.first + (end - page * l.page_len) / l.rate);
}

struct compressed_args {
    struct step step;
    const uint8_t *cache; /* rows of D values of `type` */
    int type, window;
    struct entry_layout entries; /* rate 0: there are none */
    struct index_choice choice;  /* n NULL: all entries */
    const float *q;              /* (n_tokens, H, D), normed and rotated */
    const float2 *rope;          /* (n_tokens, half) */
    int half;
    const float *sinks; /* (H) or NULL */
    float scale;
    int n_heads, dim, group; /* group: heads of a product */
    /* (H / group, n_tokens, ldx) results, turned back: fp16 in the order of fragment_slot */
    uint16_t *sums;
    int ldx;
    int most_keys; /* that a row sees */
    int n_split;   /* of the keys */
    float *part;   /* (units, n_split, heads of a unit, D) */
    float *ml;     /* (units, n_split, heads of a unit, 2) largest score, softmax sum */
};

/* What row t sees: keys from `first` on, then entries. */
struct compressed_view {
    const int32_t *pages, *list; /* list NULL: entries 0, 1, .. */
    int first, n_keys, n;        /* n: with entries; 0: padding */
};

DEVICE struct compressed_view compressed_view_of(const struct compressed_args &p, int t)
{
    struct compressed_view v;
    int pos = p.step.pos[t];
    v.pages = p.step.pages + (size_t)p.step.seq_of[t] * (size_t)p.step.head[STEP_PAGE_STRIDE];
    v.list = NULL;
    v.first = max(pos - p.window + 1, 0);
    v.n_keys = pos - v.first + 1;
    int entries = p.entries.rate ? (pos + 1) / p.entries.rate : 0;
    if (p.choice.n && p.choice.n[t] >= 0) {
        entries = p.choice.n[t];
        v.list = p.choice.list + (size_t)t * (size_t)p.choice.n_chosen;
    }
    v.n = p.step.slot[t] < 0 ? 0 : v.n_keys + entries;
    return v;
}

/* The row of the cache of what row t sees as number i. */
DEVICE size_t compressed_row(const struct compressed_args &p, const struct compressed_view &v,
                             int i)
{
    if (i < v.n_keys) {
        int key = v.first + i, page = key / p.entries.page_len;
        return (size_t)v.pages[page] * (size_t)p.entries.rows +
               (size_t)(key - page * p.entries.page_len);
    }
    i -= v.n_keys;
    return entry_row(p.entries, v.pages, v.list ? v.list[i] : i);
}

/* Where element i of the result of row t, head h is stored. */
DEVICE uint16_t *compressed_sum_at(const struct compressed_args &p, int t, int h, int i)
{
    int g = h / p.group;
    return p.sums + ((size_t)g * (size_t)p.step.n_tokens + (size_t)t) * (size_t)p.ldx +
           (size_t)fragment_slot((h - g * p.group) * p.dim + i);
}

/* A pair of values of row t, from the even column i on, turned back. */
DEVICE void compressed_turn_back(const struct compressed_args &p, int t, int i, float *x, float *y)
{
    int pair = (i - (p.dim - 2 * p.half)) / 2;
    if (i < p.dim - 2 * p.half)
        return;
    float2 cs = p.rope[(size_t)t * (size_t)p.half + (size_t)pair];
    float a = *x, b = *y;
    *x = a * cs.x + b * cs.y;
    *y = b * cs.x - a * cs.y;
}

/* index_attend.cu: any sizes and types. list_attn.cu: heads of 512, fp16 or bf16. */
void compressed_attn_any(struct cuda_backend *cu, const struct compressed_args &p);
size_t list_attn_rows(const struct cuda_backend *cu); /* rows of part and ml */
bool compressed_attn_fits(const struct cuda_backend *cu, const struct compressed_args &p);
void compressed_attn(struct cuda_backend *cu, struct compressed_args p);
/* The same for latents, of a choice (latent_args.choice). */
bool latent_list_fits(const struct cuda_backend *cu, const struct latent_args &p);
void latent_list_attn(struct cuda_backend *cu, struct latent_args p);

#endif
