/*
 * A network as data: an embedding, layers, and a head. A layer is a mixer, which combines positions, and an mlp,
 * which works on each position alone. model/families builds networks from files, the ops of backend.h run them, and
 * ref.c specifies every field. An absent part is NULL or 0, so new parts leave old networks unchanged.
 *
 * Symbols: E is the width of the residual stream. H heads and K kv heads have dims Dk (keys) and Dv (values). F is
 * the number of hidden units of an mlp. A weight (rows, columns) computes y = x W^T + bias.
 * Gains, biases and other vectors are in backend memory (alloc), RoPE tables in host memory.
 * Loading undoes the quirks of files, such as interleaved rotary pairs or gains stored as 1 + w.
 */
#ifndef STEEL_BACKEND_LAYER_H
#define STEEL_BACKEND_LAYER_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A matrix, or n_expert matrices of one shape. The sizes are set before upload(), the rest by it. */
struct weight {
    int n_in, n_out, n_expert; /* n_expert: 1 for a plain matrix */
    bool bias;                 /* there is a bias (n_expert, n_out) */
    size_t bytes;              /* compressed size of all experts */
    void *impl;                /* the backend's own form; NULL = not uploaded */
    bool owns;                 /* upload copied everything; the file is not read again */
    void **lora; /* (LORA_MAX_ADAPTERS) change per adapter, from adapt(); NULL = no adapters */
};

/* The use of a weight, from which a backend chooses its packed form. */
enum weight_role {
    WEIGHT_LINEAR,
    WEIGHT_EXPERTS,
    WEIGHT_EXPERTS_SHARED, /* experts beside a shared expert of the same shape */
    WEIGHT_ROUTER,
    WEIGHT_EMBED, /* rows are looked up */
    WEIGHT_HEADS, /* one matrix per attention head (n_expert of them), all used by every row */
    WEIGHT_HEAD,  /* the output head; with tied embeddings, rows are also looked up */
};

enum norm_kind {
    NORM_NONE,   /* y = x */
    NORM_RMS,    /* y = x / sqrt(mean(x^2) + eps) * gain */
    NORM_LAYER,  /* y = (x - mean(x)) / sqrt(var(x) + eps) * gain + bias */
    NORM_AFFINE, /* y = (x + bias) * gain: a tower's layer scale, Gemma 4's standardised features */
};

struct norm {
    enum norm_kind kind;
    const float *gain; /* (width); NULL = ones */
    const float *bias; /* (width), NORM_LAYER and NORM_AFFINE; NULL = zeros */
    float eps;
};

/*
 * A short convolution over the rows of a sequence, beside its input: channel c of row t becomes
 *   y[t][c] + sum_i taps[c][i] * y[t - W + 1 + i][c]
 * A sequence keeps the last W-1 rows of y before it.
 */
struct row_conv {
    int len;           /* W; 0 = none */
    const float *taps; /* (channels, W) */
};

/* How a block changes the stream x:
 *   n = in(x); y = out(conv(block(n))); x = sum(x + scale * y), or with keep: x = sum(keep * n + scale * y)
 * Most models have only `in`, Gemma has `in` and `out`, BERT has `sum`, MiniMax-01 has `keep`, Inkling has `conv`. */
struct block {
    struct norm in, out, sum; /* (E) */
    struct row_conv conv;     /* (E) channels; beside attention only */
    float scale;              /* 0 = 1 */
    float keep;               /* of n; 0 = x itself is kept */
    /* Of an mlp: n = in(x) of the x that the mixer read, so that both run in parallel. Of a mixer: of the x that the mixer
     * of the layer before read, which has no mlp. */
    bool parallel;
    /* Of the mixer of an EAGLE-3 block: n is the row of 2*E values that join made (struct mtp), and has no other norm. */
    bool joined;
};

/* Rotation of the first n_rot dims of a head. The pair (i, i + n_rot/2) is rotated by the angle pos * freq[i] and
 * multiplied by mscale (YaRN). freq includes scaling and long or short factors. A pair with freq 0 is not rotated.
 * M-RoPE: pair i is rotated by rope_pos[plane[i]] * freq[i] (batch.rope_pos). Qwen2.5-VL and GLM-4.5V have
 * contiguous sections, such as plane = 0 0 1 1 1 2 2 2; Qwen3-VL and Qwen3.5 interleave them, 0 1 2 0 1 2
 * 0 0. The three positions of a text row are equal. Not for latent attention. */
struct rope {
    int n_rot;         /* even */
    const float *freq; /* (n_rot/2) host */
    float mscale;
    const uint8_t *plane; /* (n_rot/2) host: 0 time, 1 height, 2 width; NULL = rotate by pos */
};

/* Bounds of a product's inputs and outputs: x' = clamp(x, in_min, in_max); y = clamp(x' W^T + bias, out_min, out_max).
 * Gemma 4's smaller image towers have them. */
struct clip {
    float in_min, in_max, out_min, out_max;
};

/* What batch.spans means to attention. */
enum attention_span {
    SPAN_NONE,
    SPAN_ONLY, /* a row sees the keys of its span and no others: windows of image towers */
    SPAN_ALSO, /* a row also sees the keys of its span: attention both ways inside an image */
};

/*
 * Compression of the rows of a sequence: entry w stands for the rows of window w, at positions w*rate..w*rate + rate - 1.
 * It exists once they all do. [c z] = n W^T; z += bias[pos % rate]; e = sum_i p_i c_i over the window's rows i, value by
 * value, with p = softmax_i(z_i). overlap: c and z have two halves, and e is over the first half of the rows of window w-1
 * and the second half of those of window w. An entry is norm(e).
 * A sequence keeps the open sums of e: the largest z_i, the sum of exp(z_i - it), and that of exp(z_i - it) c_i.
 */
struct compressor {
    int rate, dim; /* rate 0: none; D */
    bool overlap;
    const struct weight *w; /* (2*S*D, E): c, then z, with S = 2 if overlap, else 1 */
    const float *bias;      /* (rate, S*D) */
    struct norm norm;       /* (D) */
};

/* S: entries that a row goes into. */
static inline int compressor_series(const struct compressor *c)
{
    return c->overlap ? 2 : 1;
}

/* Entries that a row at `pos` sees. */
static inline int compressor_entries(const struct compressor *c, int pos)
{
    return c->rate ? (pos + 1) / c->rate : 0;
}

/*
 * Sparse attention: a row sees only those of its keys that an indexer chose.
 *   k = k_norm(n Wk^T), rotated, goes to the cache beside the attention's keys; q_h = q_norm(u Wq^T), rotated, with u = n,
 *   or a latent's queries after q_norm; w = n Ww^T
 *   block 0: score_j = sum_h w_h * max(0, q_h.k_j); the n_chosen keys with the largest scores, for all heads
 *   else: block i has keys i*block..; kv head h sees the n_chosen blocks with the largest max_j q_h.k_j, and always the row's
 *   own block, as one of them; n_heads is the number of kv heads
 * With a compressor (of block 0), keys are its entries, rotated by w*rate, and there is no wk.
 * Ties: the later key loses. A row that has no more keys than can be chosen sees them all.
 */
struct indexer {
    int n_heads, dim, n_chosen, block; /* n_chosen 0: no indexer */
    const struct weight *wq, *wk,
        *ww; /* NULL: with `reuse`; (n_heads*dim, width of u), (dim, E), (n_heads, E) or NULL */
    struct norm q_norm, k_norm; /* (dim) */
    const struct rope *rope;
    bool interleaved; /* as in latent attention */
    bool
        rope_last; /* the last dims of a head are rotated, in adjacent pairs (2i, 2i + 1), in place */
    struct compressor compressor;
    bool reuse; /* the choice of the layer before, which has an indexer of the same sizes */
};

/*
 * Attention of H heads over K shared keys and values; head h reads kv head h*K/H.
 *   [q k v] = n Wqkv^T + bias; k = k_conv(k); v = v_conv(v)
 *   q, k = norm(.), then rope; v = v_norm(v); k and v go to the cache at the row's slot
 *   warm = 1 + temp_beta * ln(1 + floor((pos + temp_offset) / temp_len)); temp_smooth: the logarithm is
 *   ln(max(1, (pos + 1) / temp_len)); q *= warm
 *   s_j = scale * q.k_j; softcap: s_j = softcap * tanh(s_j / softcap); j over the keys the row sees
 *   wrel: r = warm * (n Wrel^T)_h; s_j += r.rel[.][pos - j] if pos - j < rel_len
 *   p_j = exp(s_j) / (sum_j exp(s_j) + exp(sink_h)); a_h = sum_j p_j v_j; gated: a_h *= sigmoid(g_h)
 *   wgate: a_h *= sigmoid(g_h), or ln(1 + exp(g_h)) with softplus, of g = n Wgate^T + bias; a = out_norm(a)
 *   y = a Wo^T + bias
 */
struct attention {
    int n_heads, n_kv_heads; /* H, K; K divides H */
    int k_dim, v_dim;        /* Dk, Dv */
    /* Columns: E. Rows: H heads of q, then K*Dk of k, then K*Dv of v. If gated, the Dv rows of its gate follow each
     * head of q. With shares_kv there is no k and v, with k_is_v no v. */
    const struct weight *wqkv;
    const struct weight *wo; /* (E, H*Dv) */
    /* Per head: (Dk), (Dk), (Dv). With norm_whole over all heads at once: (H*Dk), (K*Dk), (K*Dv). */
    struct norm q_norm, k_norm, v_norm;
    bool norm_whole;
    bool norm_late;             /* q and k are normed after rope */
    struct norm out_norm;       /* (H*Dv) */
    const struct weight *wgate; /* (H*Dv, E), or (H, E): one value per head; NULL = none */
    bool softplus;
    const struct rope *rope; /* of q and k, an element of network.ropes; NULL = no rotation */
    float scale;
    int window;   /* the row at p sees keys p-window+1..p; 0 = all up to p */
    bool chunked; /* ... or keys p - p % window..p */
    /* also keys after p, up to p+window-1. The whole sequence is in one step. */
    bool bidirectional;
    enum attention_span span;
    const struct clip *clips; /* host (4): of q, k, v and wo; NULL = none */
    float softcap;            /* 0 = none */
    const float *sinks;       /* (H) or NULL */
    bool gated;
    bool k_is_v;    /* v = k, before k's norm and rope */
    bool shares_kv; /* reads the cache of layer kv_layer and stores nothing; same K, Dk, Dv */
    int kv_layer;
    float temp_beta;           /* 0 = none */
    int temp_len, temp_offset; /* the offset is added to pos */
    bool temp_smooth;
    struct row_conv k_conv, v_conv; /* (K*Dk), (K*Dv) channels; both of one length, or none */
    /* Relative positions: (H*R, E) or NULL; (R, rel_len). Not beside a softcap or a choice of keys. */
    const struct weight *wrel;
    const float *rel;
    int rel_dim, rel_len; /* R */
    struct indexer index;
};

/*
 * Latent attention (MLA): keys and values of all heads are computed from one latent c of C values. The cache holds c
 * and the Dr rotated values r.
 *   q = n Wqa^T -> q_norm -> Wqb^T; q *= 1 + temp_beta * ln(1 + floor(pos / temp_len)); q_h = [q_h^nope (Dn), q_h^rope (Dr)]; without wqa: q = n Wqb^T
 *   [c, r] = n Wkva^T; c = kv_norm(c); q_h^rope and r are rotated; [c, r] goes to the cache
 *   absorbed: s_j = scale * ((q_h^nope Wkb_h^T).c_j + q_h^rope.r_j); a_h = (sum_j p_j c_j) Wvb_h^T
 *   expanded, equivalent: k_h = c Wkb_h, v_h = c Wvb_h^T
 *   y = a Wo^T
 */
struct latent {
    int n_heads;                    /* H */
    int nope_dim, rope_dim, v_dim;  /* Dn, Dr, Dv */
    int q_rank, kv_rank;            /* q_rank 0: no wqa; kv_rank: C */
    const struct weight *wqa, *wqb; /* (q_rank, E) or NULL; (H*(Dn+Dr), q_rank or E) */
    const struct weight *wkva;      /* (C + Dr, E) */
    const struct weight *wkb, *wvb; /* H x (C, Dn); H x (Dv, C) */
    const struct weight *wo;        /* (E, H*Dv) */
    struct norm q_norm, kv_norm;    /* (q_rank), (C) */
    const struct rope *rope;        /* n_rot = Dr */
    /* pairs of the rotated part lie side by side: (2i, 2i + 1) turn into (i, Dr/2 + i) */
    bool interleaved;
    float scale;     /* YaRN's mscale^2 is in it */
    float temp_beta; /* as in attention; 0 = none */
    int temp_len;
    struct indexer index;
};

/*
 * Compressed attention: H heads over one kv head, whose rows of D values are keys and values.
 *   u = q_norm(n Wqa^T); q_h = head_norm((u Wqb^T)_h); k = kv_norm(n Wkv^T), which goes to the cache
 *   A row sees the keys of its window, and entries of a compressor: all of them, or those that an indexer chose, with
 *   its queries from u. Entries go to the cache, too.
 *   The last n_rot values of q_h and k are rotated, in adjacent pairs (2i, 2i + 1), those of entry w by w*rate.
 *   p as in attention, with sinks; a_h = sum_j p_j k_j, whose last values are rotated back, by -pos
 *   o_g = [a_h of the H/G heads of group g] Woa_g^T; y = [o_0 .. o_G-1] Wob^T
 */
struct compressed {
    int n_heads, dim, n_groups; /* H, D, G */
    int window, q_rank;
    const struct weight *wqa, *wqb;         /* (q_rank, E), (H*D, q_rank) */
    const struct weight *wkv;               /* (D, E) */
    const struct weight *woa, *wob;         /* G x (R, H/G*D); (E, G*R) */
    struct norm q_norm, head_norm, kv_norm; /* (q_rank), (D), (D) */
    const struct rope *rope;
    float scale;
    const float *sinks; /* (H) or NULL */
    struct compressor compressor;
    struct indexer index; /* n_chosen 0: all entries are seen */
};

/*
 * Gated delta net: Hk heads of keys, Hv heads of values. v head h uses k head h*Hk/Hv, or h % Hk if tiled. Each v head
 * has a state S (Dk, Dv), which every token decays, corrects and reads.
 *   u = n Wqkv^T; u = silu(conv(u)): channel c at t is sum_i conv[c][i] * u[t - W + 1 + i][c]
 *   [q k v] = u; q = q/|q| / sqrt(Dk); k = k/|k|; [z b a] = n Wz^T, n Wba^T
 *   beta = beta_scale * sigmoid(b); g = -decay * ln(1 + exp(a + dt_bias))
 *   S *= exp(g); S += k (beta * (v - S^T k))^T; o = S^T q
 *   y = (norm(o) * silu(z)) Wo^T
 * A sequence keeps S and the last W-1 rows of u before the convolution.
 */
struct delta_net {
    int n_k_heads, n_v_heads, k_dim, v_dim; /* Hk, Hv, Dk, Dv */
    int conv_len;                           /* W */
    const struct weight *wqkv;              /* (2*Hk*Dk + Hv*Dv, E) */
    const struct weight *wz;                /* (Hv*Dv, E) */
    const struct weight *wba;               /* (2*Hv, E): all heads' b, then all heads' a */
    const struct weight *wo;                /* (E, Hv*Dv) */
    const float *conv;                      /* (2*Hk*Dk + Hv*Dv, W) */
    const float *decay, *dt_bias;           /* (Hv); decay = exp(A_log) */
    struct norm norm;                       /* (Dv) per head */
    bool tiled;
    float beta_scale; /* on beta; 0 = 1 */
};

/* The k head that v head h uses. */
static inline int delta_net_k_head(const struct delta_net *d, int h)
{
    return d->tiled ? h % d->n_k_heads : h * d->n_k_heads / d->n_v_heads;
}

/*
 * State-space model of Mamba-2: H heads of P values; head h uses the keys b and c of group h*G/H, which have N values.
 * Each head has a state S (N, P), which every token decays, adds to and reads.
 *   [z u dt] = n Win^T + bias, with widths H*P, H*P + 2*G*N and H; in_scale: z, dt and the parts x, b and c of u are
 *   each multiplied by a factor; with w_z, z = n Wz^T and Win has no rows of it
 *   [x b c] = silu(conv(u) + conv_bias), the convolution as in delta nets; without conv: silu(u)
 *   dt = clamp(ln(1 + exp(dt + dt_bias)), dt_min, dt_max); without dt_bias: 1, and Win has no rows of it
 *   S = exp(-decay * dt) S + b (dt * x)^T; o = S^T c + skip * x
 *   o = norm(o * silu(z)), or norm(o) * silu(z) with norm_first; NORM_NONE: o * silu(z); with sigmoid_gate, sigmoid(z)
 *   y = o Wout^T + bias
 * The norm is over each of n_norms equal parts of o. A sequence keeps S and the last W-1 rows of u. Lightning attention is
 * the case of a fixed decay, with queries c, keys b and values x.
 */
enum { SSM_PARTS = 5 };

struct ssm {
    int n_heads, n_groups, head_dim, state_dim; /* H, G, P, N; G divides H */
    int conv_len;                               /* W; 1 without conv */
    const struct weight *w_in;                  /* (2*H*P + 2*G*N + H, E) */
    const struct weight *w_z;                   /* (H*P, E) or NULL */
    const struct weight *w_out;                 /* (E, H*P) */
    const float *conv, *conv_bias;              /* (H*P + 2*G*N, W); (H*P + 2*G*N) or NULL */
    const float *decay, *dt_bias, *skip;        /* (H); decay = exp(A_log); the others or NULL */
    float dt_min, dt_max;                       /* dt_max 0 = no limit */
    struct norm norm;                           /* gain (H*P) */
    int n_norms;
    bool norm_first, sigmoid_gate;
    float in_scale[SSM_PARTS]; /* of z, x, b, c, dt; all 0 = 1 */
};

/* The values of part i of a row of its projection. */
static inline int ssm_part(const struct ssm *m, int i)
{
    return i < 2 ? m->n_heads * m->head_dim : i < 4 ? m->n_groups * m->state_dim : m->n_heads;
}

/* Channels of its convolution. */
static inline int ssm_channels(const struct ssm *m)
{
    return m->n_heads * m->head_dim + 2 * m->n_groups * m->state_dim;
}

/*
 * Selective scan of Mamba: I channels, each with a state of N values.
 *   [u z] = n Win^T; x = silu(conv(u) + conv_bias), the convolution as in delta nets
 *   [t b c] = x Wx^T, with widths R, N and N, each normed; dt = ln(1 + exp(t Wdt^T + bias))
 *   S_i = exp(-decay_i * dt_i) S_i + b * dt_i x_i, with decay_i of N values; o_i = S_i.c + skip_i * x_i
 *   y = (o * silu(z)) Wout^T
 * A sequence keeps S and the last W-1 rows of u.
 */
struct scan {
    int n_channels, state_dim, dt_rank, conv_len; /* I, N, R, W */
    const struct weight *w_in, *w_x;              /* (2*I, E), (R + 2*N, I) */
    const struct weight *w_dt, *w_out;            /* (I, R), (E, I) */
    const float *conv, *conv_bias;                /* (I, W); (I) or NULL */
    const float *decay, *skip;                    /* (I, N), (I) */
    struct norm dt_norm, b_norm, c_norm;          /* (R), (N), (N) */
};

/*
 * Short convolution: [b c x] = n Win^T; u = b * x; v = conv(u) as in delta nets; y = (c * v) Wout^T.
 * A sequence keeps the last W-1 rows of u.
 */
struct short_conv {
    int conv_len;                      /* W */
    const struct weight *w_in, *w_out; /* (3*E, E), (E, E) */
    const float *conv, *bias;          /* (E, W); (E) or NULL */
};

/* MIXER_NONE: the layer is an mlp alone. */
enum mixer_kind {
    MIXER_ATTENTION,
    MIXER_LATENT,
    MIXER_DELTA_NET,
    MIXER_SHORT_CONV,
    MIXER_SSM,
    MIXER_SCAN,
    MIXER_COMPRESSED,
    MIXER_NONE
};

/* partial: this process has some of the heads, of the hidden units or of the experts. The outputs of all members of the
 * backend's comm are added up before any norm. */
/* A low-rank residual (LAuReL) of the mixer's input n. After the mixer's result has been added:
 *   x = (x + n + norm((n Wl^T) Wr^T)) / sqrt(2) */
struct laurel {
    const struct weight *left, *right; /* (rank, E) or NULL, (E, rank) */
    struct norm norm;                  /* (E) */
};

struct mixer {
    enum mixer_kind kind;
    struct block block;
    bool partial;
    union {
        struct attention attention;
        struct latent latent;
        struct delta_net delta_net;
        struct short_conv short_conv;
        struct ssm ssm;
        struct scan scan;
        struct compressed compressed;
    };
    struct laurel laurel;
};

/* h = act(g, u) with [g u] = x Wgu^T + bias; kinds without a gate have no u. */
enum activation {
    ACT_SILU,             /* g / (1 + exp(-g)) * u */
    ACT_GELU_TANH,        /* 0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))) * u */
    ACT_GELU,             /* 0.5 g (1 + erf(g / sqrt(2))) * u */
    ACT_SWIGLU_CLAMP,     /* g' = min(g, limit); u' = clamp(u, -limit, limit);
                         g' / (1 + exp(-alpha g')) * (u' + 1) */
    ACT_SILU_CLAMP,       /* g' = min(g, limit); g' / (1 + exp(-g')) * clamp(u, -limit, limit) */
    ACT_SILU_LIMIT,       /* min(g / (1 + exp(-g)), limit) * clamp(u, -limit, limit) */
    ACT_RELU2,            /* max(g, 0)^2 * u */
    ACT_PLAIN_RELU2,      /* max(g, 0)^2 */
    ACT_PLAIN_XIELU,      /* g > 0: alpha g^2 + beta g; else limit (exp(g) - 1 - g) + beta g */
    ACT_PLAIN_GELU,       /* as ACT_GELU without u */
    ACT_PLAIN_GELU_TANH,  /* as ACT_GELU_TANH without u */
    ACT_PLAIN_QUICK_GELU, /* g / (1 + exp(-1.702 g)) */
    ACT_NONE,             /* g */
};

/* Whether h has a factor u. */
static inline bool activation_is_gated(enum activation act)
{
    return act < ACT_PLAIN_RELU2;
}

/* y = mid(act(x Wgu^T + bias)) Wd^T + bias, of one matrix or of each expert's. */
struct ffn {
    const struct weight *gate_up; /* (2F, E): gate rows, then up rows; (F, E) without gate */
    const struct weight *down;    /* (E, F) */
    enum activation act;
    float alpha, limit, beta; /* of some activations */
    /* Gaussian top-k: before act, g = max(g - mean(g) - sparsity * std(g), 0) over the F values of a row */
    bool sparse;
    float sparsity;
    struct norm mid;          /* (F) of act's result */
    const struct clip *clips; /* host (3): of gate, up and down; NULL = none */
};

/*
 * Router: the experts of a row and their weights. l = norm(x or n) Wr^T + bias.
 *   SOFTMAX       p = softmax(l)
 *   SIGMOID       p = 1 / (1 + exp(-l))
 *   SOFTPLUS      p = sqrt(ln(1 + exp(l)))
 *   SOFTMAX_TOP   experts are chosen by l; p = softmax over the chosen ones
 *   SPARSE_MIXER  experts are chosen by l, one after another. When e is chosen, p_e = 1 / sum_i exp(l_i - l_e) over
 *                 the experts i not chosen before with l_e - l_i <= 2 * jitter * max(|l_i|, l_e)
 * Chosen are the n_used experts with the largest p + choice_bias (ties: lower index).
 * With groups, experts form n_groups runs of equal length. A group's score is the sum of its two largest keys. Only
 * experts of the best n_groups_used groups can be chosen.
 * With by_token the token decides instead: the experts by_token[token]. A row of batch.embeds counts as token 0.
 *   weight = p * scale * expert_scale[e]; renorm: p is divided by its sum over the chosen experts
 */
enum router_kind {
    ROUTER_SOFTMAX,
    ROUTER_SIGMOID,
    ROUTER_SOFTMAX_TOP,
    ROUTER_SPARSE_MIXER,
    ROUTER_SOFTPLUS
};

struct router {
    enum router_kind kind;
    const struct weight *w; /* (n_expert + n_same, E) */
    struct norm norm;       /* (E) of the stream; NORM_NONE: the router reads the experts' input */
    int n_used;
    int n_same;               /* the last of its experts have no weights: they return their input */
    const float *choice_bias; /* (n_expert) or NULL */
    const float *by_token;    /* (n_vocab, n_used) experts, no two equal in a row; or NULL */
    int n_groups, n_groups_used; /* 0 = no groups */
    bool renorm;
    bool weighs_input;         /* expert(weight * m) in place of weight * expert(m) */
    float jitter;              /* of SPARSE_MIXER */
    float scale;               /* 0 = 1 */
    const float *expert_scale; /* (n_expert) or NULL */
};

/* After the block: x += norm((act(x Wg^T) * e) Wp^T), where e are this layer's P values of the row (embed_layers). */
struct layer_embed {
    const struct weight *gate;    /* (P, E); NULL = none */
    const struct weight *project; /* (E, P) */
    struct norm norm;             /* (E) */
    enum activation act;          /* ACT_GELU_TANH of one input */
};

/*
 * dense, experts or both:
 *   n = in(x); d = sigmoid(n.dense_gate) * dense(n)
 *   m = experts_in(x), or n without experts_in; e = sum over the chosen experts of weight * expert(m)
 *   with latent experts: m = m Wto^T; e = e Wfrom^T; the router reads the m before
 *   y = dense_out(d) + experts_out(e); experts_late: y = dense_out(d), and experts_out(e) is added to x after the mlp of the
 *   next layer
 * Then the block's out and sum, the layer embedding, and x *= stream_scale.
 * neither: the layer is a mixer alone.
 */
struct mlp {
    struct block block;
    struct ffn dense;                    /* gate_up NULL = none */
    const struct weight *dense_gate;     /* (1, E) or NULL: a shared expert's gate */
    struct norm dense_out;               /* (E) */
    struct router router;                /* w NULL = no experts */
    struct ffn experts;                  /* n_expert matrices */
    struct norm experts_in, experts_out; /* (E) */
    /* Latent experts have inputs and outputs of L values: (L, E), (E, L); NULL = they have E. */
    const struct weight *to_experts, *from_experts;
    struct layer_embed embed;
    float stream_scale; /* 0 = 1 */
    /* After all of this, a row of batch.embeds adds its values from deepstack * E on (0 = none): features of an
     * image tower's inner layers. */
    int deepstack;
    bool dense_partial, experts_partial;
    bool experts_late; /* beside a dense mlp; not in the last layer, nor after such a layer */
    int expert_first;  /* the first of the experts held here; the router covers all of them */
};

/* The last matrix of a mixer; NULL: MIXER_NONE. */
const struct weight *mixer_out(const struct mixer *m);

/*
 * AltUp (Gemma 3n): the stream has N parts x_0 .. x_N-1 (struct streams). Blocks read and change x_0.
 *   r(v) = tanh(norm(v) Wr^T / E)
 *   before the mixer: P = r(x_0) Wp^T; p_j = x_j + sum_k P[j*N + k] x_k; x_0 = p_0
 *   after the mlp: C = 1 + r(x_0) Wc^T; x_j = p_j + C_j (x_0 - p_0)
 * The layer embedding then reads scale * x_0 and is added to the other parts only.
 */
struct altup {
    struct norm norm;               /* (E) */
    const float *router;            /* (N, E); NULL = no AltUp */
    const float *predict, *correct; /* (N*N, N), (N, N) */
    const float *scale;             /* (E) or NULL = ones */
};

/*
 * Hyper-connections (DeepSeek V4): the stream has N parts s_0 .. s_N-1 (struct streams), all of them the result of embed
 * at first.
 *   m = s W^T / sqrt(mean(s^2) + eps) over the N*E values s of all parts: three runs, of N, N and N*N outputs
 *   m' = scale[run] * m + base
 *   pre = sigmoid(m'_1) + offset: the block reads x = sum_j pre_j s_j; y is its result
 *   post = 2 sigmoid(m'_2); M = m'_3, of N rows: the softmax of each row, + offset; then its columns are divided by their
 *   sums + offset; then rounds - 1 times its rows are, and its columns
 *   s_k = post_k y + sum_j M[j][k] s_j
 * Before the head, which has the first run only: x = sum_j pre_j s_j.
 */
struct hyper {
    const struct weight *w;    /* (2*N + N*N, N*E), of the head's (N, N*E); NULL = none */
    const float *scale, *base; /* (3), of the head's (1); one per output */
    float eps, offset;
    int rounds;
};

struct layer {
    struct mixer mixer;
    struct mlp mlp;
    struct altup altup;
    struct hyper hyper[2]; /* of the mixer and of the mlp; all layers have them, or none */
};

/* Experts with weights, of this process and of others. */
static inline int router_experts(const struct router *r)
{
    return r->w->n_out - r->n_same;
}

static inline bool mlp_is_none(const struct mlp *m)
{
    return !m->dense.gate_up && !m->router.w && !m->embed.gate && !m->deepstack &&
           (m->stream_scale == 0 || m->stream_scale == 1);
}

/* Per-layer embeddings: P values for each row and layer.
 *   e = (norm(project_scale * (x Wp^T)) + table_scale * T[token]) * scale, with x the result of embed
 * A row of batch.embeds, and a token that the table lacks, uses pad, Gemma's padding token. */
struct embed_layers {
    int width;                    /* P; 0 = none */
    const struct weight *table;   /* (n_vocab or less, n_layers*P) */
    const struct weight *project; /* (n_layers*P, E) */
    struct norm norm;             /* (P) */
    float table_scale, project_scale, scale;
    int pad;
};

/* How pixels become a patch's values: the byte at (row, column, channel) becomes values[channel][byte]. Their order is
 * (row, column, channel), or (channel, frame, row, column) with equal frames. */
struct pixel_form {
    int side, frames;
    bool channels_last;
    float values[3][256];
};

/* x = norm(scale * T[token] + positions[pos + pos_offset] + types[type])
 * A row of batch.embeds replaces scale * T[token] and is not scaled.
 * With patches, every row is one of batch.embeds and has D + E values: p, of an image's patch, and q, such as
 * its position's: x = norm(patch_norm(p Wpatches^T + bias) + q) */
struct embed {
    const struct weight *tokens;            /* (n_vocab, E); NULL with patches */
    const struct weight *patches;           /* (E, D) or NULL */
    const struct pixel_form *pixels;        /* of patches that are pixels; NULL = none */
    struct norm patch_norm;                 /* (E) */
    float scale;                            /* 0 = 1 */
    const struct weight *positions, *types; /* (n, E) or NULL */
    int pos_offset;
    struct norm norm; /* (E) */
    struct embed_layers layers;
    /* partial: `tokens` has some of the table's rows, from `first` on; rows of other tokens are zeros, and all members of
     * the backend's comm are added up. Only without positions, types and norm. */
    bool partial;
    int first;
};

/* l = norm(x) W^T * scale; softcap: l = softcap * tanh(l / softcap). Without w the rows of norm(x)
 * themselves are the result: embeddings. A block's head (struct mtp) may have fewer outputs than n_vocab: the logits after
 * them are -inf. */
struct head {
    struct norm norm;       /* (E) */
    const struct weight *w; /* (n_vocab, E); may be embed.tokens; or NULL */
    float scale, softcap;   /* 0 = 1, 0 = none */
    /* w has rows of the vocabulary from `first` on, other members of the backend's comm have the others: all logits are
     * gathered on member 0. */
    bool partial;
    int first;
};

/*
 * Multi-token prediction: a block that drafts the token after the next one. Its layer is the last of the network. It
 * has a cache like any other layer and runs in steps of its own (batch.from). With h, the row that keep (backend.h)
 * stored for position p, and t, the token at p + 1:
 *   x = [embed_norm(T[t]), hidden_norm(h)] Wfc^T; the layer, at position p; the head
 * The h of the next draft is the norm of x by the block's head.
 *
 * EAGLE-3, the case of n_taps: the block reads the stream of n_taps main layers instead. With s_k, the row of p before
 * layer taps[k], as tap (backend.h) stored it:
 *   g = taps_norm([s_0 .. s_n-1]) Wfc^T; n = [embed_norm(T[t]), hidden_norm(g)] (2*E), what the mixer reads (block.joined)
 *   x = g, or hidden_norm(g) with norm_residual; the layer, at position p; the head
 * The g of the next draft is x itself. The head may have a vocabulary of its own: output i is the token ids[i].
 */
enum { MTP_MAX_TAPS = 8 };

struct mtp {
    const struct weight *fc;             /* (E, 2*E), or (E, n_taps*E); NULL = no such block */
    struct norm embed_norm, hidden_norm; /* (E) */
    struct head head;                    /* w: the network's own, or (n_ids, E) */
    int n_taps, taps[MTP_MAX_TAPS];      /* each below the number of main layers */
    struct norm taps_norm;               /* (n_taps*E) */
    bool norm_residual;
    const struct weight *tokens; /* T, (n_vocab, E); NULL: the network's. Neither is scaled. */
    const int32_t *ids;          /* (n_ids) host; NULL: output i is token i */
    int n_ids;
};

/* The token of output i of the block's head. An i that it lacks, as logits that are not numbers may yield, is output 0. */
static inline int32_t mtp_token(const struct mtp *m, int32_t i)
{
    return !m->ids ? i : m->ids[i >= 0 && i < m->n_ids ? i : 0];
}

/*
 * The end of an image tower: a chain of steps from rows to features. A step joins n adjacent rows of its input, from
 * the first row of each sequence on. The rows of a sequence after the last whole feature, such as a class token, are
 * dropped.
 *   y = [norm(x_0) .. norm(x_n-1)]; interleaved: y[e * n + i] = norm(x_i)[e]; mean: y = mean(norm(x_0) .. norm(x_n-1))
 *   z = act(joined(y)) W^T + bias; a gated activation has joined(y) = [g u]; without w: z = act(joined(y))
 */
struct merge_step {
    int rows; /* n; 0 = 1 */
    bool mean, interleaved;
    struct norm norm, joined; /* (width of a row), (width of y) */
    enum activation act;
    const struct weight *w; /* (width of z, width of act's result) or NULL */
};

enum { MERGER_MAX_STEPS = 6 };

struct merger {
    int after; /* the layer whose output it reads */
    int at;    /* where its values begin in a feature: a feature has those of all mergers */
    int n_steps;
    struct merge_step steps[MERGER_MAX_STEPS];
};

/* Rows of the stream that become one feature. */
int merger_rows(const struct merger *m);
/* The width of a step's y and z for rows of `width` values. */
void merge_step_widths(const struct merge_step *s, int width, int *y, int *z);
/* The width of a feature, for a stream of n_embd values. */
int merger_width(const struct merger *m, int n_embd);
/* Floats that the largest intermediate result takes for `tokens` rows of the stream. */
size_t merger_room(const struct merger *m, int n_embd, int tokens);

/* The parts of a stream (altup). |v| = sqrt(max(mean(v^2), 1e-5)); matrix j - 1 belongs to part j.
 *   after embed: x_j = y * |x_0| / |y| with y = x_0 Wproject^T
 *   before the head: x = (x_0 + sum_j z * |x_0| / |z|) / N with z = x_j Wunproject^T */
enum { STREAMS_MAX = 8 };
struct streams {
    int n;                                    /* N; 0 = the stream has one part */
    const struct weight *project, *unproject; /* N - 1 matrices (E, E); NULL: hyper-connections */
    struct hyper head;
};

struct network {
    int n_layers, n_embd, n_vocab; /* n_layers includes the MTP block's; n_embd: E */
    struct embed embed;
    struct streams streams;
    struct layer *layers; /* (n_layers) */
    struct head head;
    struct mtp mtp;
    const struct rope *ropes; /* (n_ropes) */
    int n_ropes;
    /* (n_mergers) ascending by `after`. An image tower: it has patches, no tokens and no head, and all rows of its
     * steps reach the last layer. */
    struct merger *mergers;
    int n_mergers;
    struct clip *clips; /* what the layers' clips point into; NULL = none */
    /* A stage of a pipeline: other processes have the layers before, or the layers after and the head. The
     * stream comes by stream_put, goes by stream_get, and keeps all its rows. */
    bool has_prev_stage, has_next_stage;
};

/* The main layers: all but that of the MTP block. */
static inline int network_depth(const struct network *net)
{
    return net->n_layers - (net->mtp.fc != NULL);
}

/* Maxima over the layers, for sizing scratch. */
struct network_max {
    int qkv;                                  /* outputs of a mixer's first product */
    int heads;                                /* width of q, or of the mixer's result before wo */
    int latent;                               /* q_rank, C + Dr, or outputs of a scan's w_x */
    int gates;                                /* outputs of attention's wgate; 0 = none */
    int rel, rel_len, conv_len;               /* outputs of its wrel; of its table; 0 = none */
    int state_heads;                          /* heads with recurrent state */
    int index, index_heads;                   /* width of an indexer's q, its heads; 0 = none */
    int index_chosen, index_groups;           /* keys or blocks chosen, choices per row */
    int n_heads, n_kv_heads, head_dim, group; /* group: H/K */
    int n_rot;
    int n_ff;                              /* dense hidden units */
    int n_expert, n_expert_used, n_ff_exp; /* 0 = no experts */
    int n_latent_exp;                      /* inputs of latent experts; 0 = none */
    int merged;                            /* widest row inside a merger; 0 = none */
    int compressed;                        /* outputs of a compressor's product; 0 = none */
};

void network_measure(const struct network *net, struct network_max *out);

/* Values of a row of batch.embeds. */
int network_embed_width(const struct network *net);
/* Values of an image tower's feature, of all mergers. */
int network_feature_width(const struct network *net);

/* Values of k and v that the cache holds per token in this layer; 0, 0 if it stores none. */
void mixer_cache_dims(const struct mixer *m, int *k, int *v);
/* Rows of a page of page_len tokens in which the layer keeps keys, and index keys. Entries of a compressor follow the
 * tokens' rows: that of the window which ends at pos is row page_len + pos % page_len / rate. Among index keys it is row
 * pos % page_len / rate. */
int compressor_page_rows(const struct compressor *c, int page_len); /* of entries */
int mixer_page_rows(const struct mixer *m, int page_len);
int mixer_index_rows(const struct mixer *m, int page_len);
/* The indexer of a mixer; NULL: it has none. */
const struct indexer *mixer_index(const struct mixer *m);
/* Values of an index key that the cache holds per token in this layer; 0: none. */
int mixer_index_dim(const struct mixer *m);
/* Floats of a sequence's state: of a mixer without the convolution of its block, and of a layer, which has that of the
 * mixer, then those of the mixer's block and of the mlp's. 0 = no state. */
size_t mixer_state_len(const struct mixer *m);
size_t layer_state_len(const struct layer *l);
/* Where the state of a block's convolution begins in the layer's. */
size_t layer_conv_at(const struct layer *l, const struct block *b);

/* Sets "layer 3: <what> not supported on <backend>" and returns false. `what` ends in "is" or "are". layer < 0: the
 * message names no layer. */
bool network_refuse(struct error *err, int layer, const char *what, const char *backend);

/*
 * The parts of networks beyond a plain decoder. A backend passes the set of parts that it supports, and network_check
 * refuses a network that needs others. A plain decoder has RMS norms before blocks; causal attention with one head
 * dim, RoPE, window, QK-norm per head and biases; silu; and softmax routing over all experts.
 */
#define PART_NORM_LAYER  (1ull << 0) /* LayerNorm */
#define PART_NORM_OUT    (1ull << 1) /* norms after a block or of its sum, norms without a gain */
#define PART_SCALES      (1ull << 2) /* residual, stream, embedding and logit scales, final softcap */
#define PART_EMBED       (1ull << 3) /* position and type embeddings, a norm after them, no head */
#define PART_LAYER_EMBED (1ull << 4) /* per-layer embeddings */
#define PART_SINKS       (1ull << 5)
#define PART_SOFTCAP     (1ull << 6) /* of attention scores */
#define PART_GATE        (1ull << 7)
#define PART_NORM_WHOLE                                                                            \
    (1ull << 8) /* QK-norm over the projection, v norm, norms of heads without a gain */
#define PART_TEMPERATURE   (1ull << 9)
#define PART_SHARED_KV     (1ull << 10) /* shares_kv and k_is_v */
#define PART_BIDIRECTIONAL (1ull << 11)
#define PART_HEAD_DIMS     (1ull << 12) /* k and v of different dims */
#define PART_LAYER_HEADS   (1ull << 13) /* heads, dims or RoPE tables that differ between layers */
#define PART_LATENT        (1ull << 14)
#define PART_DELTA_NET     (1ull << 15)
#define PART_SHORT_CONV    (1ull << 16)
#define PART_ACTIVATIONS   (1ull << 17) /* other than silu */
#define PART_ROUTERS       (1ull << 18) /* sigmoid, softmax after the choice, groups, biases, own norm */
#define PART_BOTH          (1ull << 19) /* dense beside experts, shared experts */
#define PART_EXPERT_BIAS   (1ull << 20)
#define PART_MTP           (1ull << 21) /* multi-token prediction */
#define PART_TOWER                                                                                 \
    (1ull << 22) /* image towers: patches, mergers, clips, affine norms, their activations */
#define PART_DEEPSTACK          (1ull << 23) /* features added after layers */
#define PART_SSM                (1ull << 24)
#define PART_ALONE              (1ull << 25) /* layers of a mixer or an mlp alone */
#define PART_SPANS              (1ull << 26) /* attention by batch.spans */
#define PART_ACTIVATIONS_2      (1ull << 27) /* squared ReLU, xIELU, limits of SiLU */
#define PART_NORM_MID           (1ull << 34) /* a norm of hidden units */
#define PART_ROUTER_INPUT       (1ull << 35) /* weights on the inputs of experts */
#define PART_LATENT_EXPERTS     (1ull << 28) /* experts on projections of their input */
#define PART_PARALLEL           (1ull << 29) /* an mlp in parallel with its mixer */
#define PART_OWN_GATE           (1ull << 31) /* wgate of attention */
#define PART_CHUNKED            (1ull << 32) /* attention in chunks */
#define PART_NORM_LATE          (1ull << 33) /* QK-norm after RoPE, a norm of attention's result */
#define PART_SPARSE             (1ull << 41) /* sparse attention */
#define PART_SCAN               (1ull << 42) /* selective scans */
#define PART_DELTA_BETA         (1ull << 43) /* a delta net whose beta goes up to 2 */
#define PART_SSM_SCALES         (1ull << 40) /* factors on a state-space model's projection */
#define PART_ALTUP              (1ull << 49) /* streams of several parts, low-rank residuals */
#define PART_SPARSE_ACT         (1ull << 50) /* Gaussian top-k of hidden units */
#define PART_SPARSE_MIXER       (1ull << 48) /* SparseMixer's routing */
#define PART_LATE_EXPERTS       (1ull << 51) /* experts added one layer later, experts without weights */
#define PART_KEEP               (1ull << 52) /* blocks that keep their normed input */
#define PART_LIGHTNING          (1ull << 53) /* state-space models with a fixed decay or a gate apart */
#define PART_HYPER              (1ull << 54) /* hyper-connections */
#define PART_COMPRESSED         (1ull << 55) /* compressed attention */
#define PART_ROUTERS_2          (1ull << 56) /* routing by square roots of softplus, and by tokens */
#define PART_SILU_CLAMP         (1ull << 57) /* a clamp before SiLU */
#define PART_RELATIVE           (1ull << 58) /* relative positions in scores, a smooth temperature */
#define PART_ROW_CONV           (1ull << 59) /* convolutions of keys, values and results of blocks */
#define PART_LATENT_TEMPERATURE (1ull << 30) /* a temperature of latent attention */

bool network_check(const struct network *net, uint64_t parts, const char *backend,
                   struct error *err);

#endif
