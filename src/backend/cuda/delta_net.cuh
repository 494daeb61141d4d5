/*
 * What the kernels of the gated delta net share: their arguments, and the layout of a state: W-1 rows
 * before the convolution, the oldest first, (W-1, C); then S of each v head, (Dk, Dv).
 */
#ifndef STEEL_BACKEND_CUDA_DELTA_NET_CUH
#define STEEL_BACKEND_CUDA_DELTA_NET_CUH

#include "backend/cuda/cuda.h"

enum { DELTA_DIM = 128, DELTA_MAX_DIM = 256, DELTA_MAX_TAPS = 8 };

struct delta_args {
    struct step step;
    const float *u, *z;           /* (n_tokens, C) before the convolution; (n_tokens, Hv*Dv) */
    float *ba;                    /* (n_tokens, 2, Hv); delta_conv makes it beta and decay */
    const float *conv;            /* (C, W) */
    const float *decay, *dt_bias; /* (Hv) */
    const float *gain;            /* (Dv) or NULL */
    float eps;
    float *states; /* (n_states, len) */
    size_t len;
    float *uc;      /* (n_tokens, C) after it; q and k are normed */
    float *kq;      /* (n_tokens, Hk) k.q of the normed */
    float *o;       /* (n_tokens, Hv*Dv) */
    int32_t *count; /* (max_seqs, Hk) arrivals, zero between launches */
    int n_k, n_v, k_dim, v_dim, taps, channels;
    bool tiled;
    int first_row, first_seq; /* of those to be done */
};

DEVICE int delta_k_head(const struct delta_args &p, int h)
{
    return p.tiled ? h % p.n_k : h * p.n_k / p.n_v;
}
DEVICE float delta_sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}
DEVICE float delta_decay(const struct delta_args &p, int h, float a)
{
    a += p.dt_bias[h];
    return expf(-p.decay[h] * (a > 20.0f ? a : log1pf(expf(a))));
}
/* The state of slot `slot`: the rows of the convolution, or S of head h. */
DEVICE float *delta_rows_of(const struct delta_args &p, int slot)
{
    return p.states + (size_t)slot * p.len;
}
DEVICE float *delta_state_of(const struct delta_args &p, int slot, int h)
{
    return delta_rows_of(p, slot) + (size_t)(p.taps - 1) * (size_t)p.channels +
           (size_t)h * (size_t)(p.k_dim * p.v_dim);
}

/* delta_net.cu: sequences [first_seq, first_seq + seqs), rows [first_row, first_row + rows) */
void delta_step(struct cuda_backend *cu, const struct delta_args &p, int seqs);
bool delta_step_fits(const struct delta_args &p);
void delta_scan(struct cuda_backend *cu, const struct delta_args &p, int rows, int seqs);
void delta_any(struct cuda_backend *cu, const struct delta_args &p, int rows, int seqs);

#endif
