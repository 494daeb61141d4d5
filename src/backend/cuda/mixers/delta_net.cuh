/*
 * What the kernels of the gated delta net share: their arguments, and the layout of a state: the
 * last W-1 rows before the convolution, oldest first, (W-1, C); then S of each v head, (Dk, Dv).
 */
#ifndef STEEL_BACKEND_CUDA_DELTA_NET_CUH
#define STEEL_BACKEND_CUDA_DELTA_NET_CUH

#include "backend/cuda/core/cuda.h"

enum { DELTA_DIM = 128, DELTA_MAX_DIM = 256, DELTA_MAX_TAPS = 8 };

struct delta_args {
    struct step step;
    const float *u, *z; /* (n_tokens, C) before the convolution; (n_tokens, Hv*Dv) */
    float *ba;          /* (n_tokens, 2, Hv) raw; delta_conv turns it into beta and decay */
    const float *conv;  /* (C, W) */
    const float *decay, *dt_bias; /* (Hv) */
    const float *gain;            /* (Dv) or NULL */
    float eps;
    float *states; /* (n_states, len) */
    size_t len;
    float *uc;       /* (n_tokens, C) after the convolution; q and k normed */
    float *kq;       /* (n_tokens, Hk) dot product of normed k and q */
    float *o;        /* (n_tokens, Hv*Dv) */
    int32_t *count;  /* (max_seqs, Hk) arrivals, zero between launches */
    uint8_t *chunks; /* scratch of delta_chunked.cu, or NULL */
    size_t chunks_bytes;
    int n_k, n_v, k_dim, v_dim, taps, channels;
    bool tiled;
    int first_row, first_seq; /* the launch starts there */
    float beta_scale;         /* not by delta_step; 0 = 1 */
};

DEVICE int delta_k_head(const struct delta_args &p, int h)
{
    return p.tiled ? h % p.n_k : h * p.n_k / p.n_v;
}
/* True if v head h is the first that uses its k head. */
DEVICE bool delta_first_of(const struct delta_args &p, int h)
{
    return p.tiled ? h < p.n_k : h % (p.n_v / p.n_k) == 0;
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
/* State slot `slot`: its convolution rows, or S of head h. */
DEVICE float *delta_conv_state_of(const struct delta_args &p, int slot)
{
    return p.states + (size_t)slot * p.len;
}
DEVICE float *delta_state_of(const struct delta_args &p, int slot, int h)
{
    return delta_conv_state_of(p, slot) + (size_t)(p.taps - 1) * (size_t)p.channels +
           (size_t)h * (size_t)(p.k_dim * p.v_dim);
}

/* Stores the convolution state after n rows of the sequence, i.e. the last W-1 rows before the
 * convolution: the channels of v head h, and those of its k head if h is the first to use it.
 * The slot read and the slot written may be the same. */
DEVICE void delta_conv_state_put(const struct delta_args &p, int seq, int h, int rows, int slot)
{
    int in = p.step.states[seq], past = p.taps - 1;
    int kh = delta_k_head(p, h), values = 2 * p.n_k * p.k_dim, first = p.step.q_start[seq];
    bool keys = delta_first_of(p, h);
    float *out = delta_conv_state_of(p, slot);
    const float *old = in < 0 ? NULL : delta_conv_state_of(p, in);
    for (int i = (int)threadIdx.x; i < p.v_dim + (keys ? 2 * p.k_dim : 0); i += (int)blockDim.x) {
        int j = i - p.v_dim;
        int c = j < 0 ? values + h * p.v_dim + i
                      : (j < p.k_dim ? 0 : p.n_k * p.k_dim) + kh * p.k_dim + j % p.k_dim;
        float v[DELTA_MAX_TAPS];
#pragma unroll
        for (int k = 0; k < DELTA_MAX_TAPS - 1; k++) {
            int at = rows - past + k;
            if (k < past)
                v[k] = at >= 0 ? p.u[(size_t)(first + at) * (size_t)p.channels + (size_t)c]
                       : old   ? old[(size_t)(at + past) * (size_t)p.channels + (size_t)c]
                               : 0.0f;
        }
#pragma unroll
        for (int k = 0; k < DELTA_MAX_TAPS - 1; k++)
            if (k < past)
                out[(size_t)k * (size_t)p.channels + (size_t)c] = v[k];
    }
}

/* Stores the convolution state in both slots of a sequence: the saved copy and the final state.
 * The copy goes first, because the final slot may be the one read. */
DEVICE void delta_conv_state_put_all(const struct delta_args &p, int seq, int h)
{
    int n = p.step.n_seqs, save = p.step.states[2 * n + seq];
    if (save)
        delta_conv_state_put(p, seq, h, save, p.step.states[3 * n + seq]);
    delta_conv_state_put(p, seq, h, p.step.q_start[seq + 1] - p.step.q_start[seq],
                         p.step.states[n + seq]);
}

/* delta_net.cu: sequences [first_seq, first_seq + seqs), rows [first_row, first_row + rows) */
void delta_step(struct cuda_backend *cu, const struct delta_args &p, int seqs);
void delta_step_rows(struct cuda_backend *cu, const struct delta_args &p,
                     int seqs); /* a few rows */
bool delta_step_fits(const struct delta_args &p);
void delta_scan(struct cuda_backend *cu, const struct delta_args &p, int rows, int seqs);
void delta_any(struct cuda_backend *cu, const struct delta_args &p, int rows, int seqs);
/* The steps before and after the recurrence. */
void delta_conv(struct cuda_backend *cu, const struct delta_args &p, int rows);
void delta_gate(struct cuda_backend *cu, const struct delta_args &p, int rows);

/* pick_mixers.cu: true if a step's rows go through fp16 projections as a high and a low fp16
 * part each, at most DELTA_SPLIT_ROWS at a time. */
enum { DELTA_SPLIT_ROWS = 256 };
bool pick_delta_split(int rows, int decodes);

/* delta_chunked.cu. CHUNKED_SEQS: prompts per step that the scratch has slots for, however short
 * they are. */
enum { CHUNKED_SEQS = 32 };
size_t delta_chunked_bytes(int n_k, int n_v, int tokens, int seqs);
bool delta_chunked_fits(const struct cuda_backend *cu, const struct delta_args &p, int rows,
                        int seqs);
void delta_chunked(struct cuda_backend *cu, const struct delta_args &p, int rows, int seqs);

#endif
