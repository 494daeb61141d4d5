/*
 * The op table: the one interface between the model and what computes it. Few coarse ops, all
 * mandatory; a fallback lives inside an op. ref.c is the specification of every op; backends are
 * tested against it. Compute ops return void and only enqueue; the backend keeps the first error
 * and end() reports it. No op allocates: prepare() did.
 *
 * Activations are float, row-major, in backend memory (alloc). H heads, K kv heads, D head_dim.
 */
#ifndef STEEL_BACKEND_BACKEND_H
#define STEEL_BACKEND_BACKEND_H

#include "backend/rawweight.h"
#include "base/error.h"

#include <stdint.h>

struct sampler; /* sample/sampler.h */
struct profile; /* backend/profile.h */

/* One step's input. Prefill, decode, and any mix of them differ only in data. Host memory. */
struct batch {
    int n_tokens, n_seqs, n_decode, n_out, max_pages;
    const int32_t *
        tokens; /* (n_tokens) rows of one sequence are adjacent; q_len==1 sequences first. -1-r: the
                    token chosen for out row r of the step before (see backend.ahead) */
    const int32_t *pos;  /* (n_tokens) position in the sequence */
    const int32_t *slot; /* (n_tokens) page * page_len + offset in the KV pool; -1 = padding row */
    const int32_t *q_start;  /* (n_seqs+1) first row of each sequence; the last entry is n_tokens */
    const int32_t *kv_len;   /* (n_seqs) keys visible to the last row, itself included */
    const int32_t *pages;    /* (n_seqs, max_pages) page numbers in order */
    const int32_t *out_rows; /* (n_out) rows that need logits, ascending */
    struct sampler *const *samplers; /* (n_out) or NULL; an entry NULL = no token wanted */
};

struct weight {
    int n_in, n_out, n_expert;
    size_t bytes; /* compressed size, all experts: what one full pass reads */
    void *impl;   /* the backend's own form */
    bool owns;    /* upload copied everything: the file's bytes are not read again */
};

/* Fixed facts of model and engine, given once; ops size their scratch from it. */
struct shape {
    int n_layers, n_embd, n_heads, n_kv_heads, head_dim, n_vocab;
    int n_ff;                              /* dense layers; 0 if none */
    int n_expert, n_expert_used, n_ff_exp; /* 0 if no MoE layers */
    bool norm_topk;                        /* renormalise the chosen experts' weights to sum 1 */
    float expert_scale;                    /* multiplies the expert weights (1 for most) */
    float norm_eps, attn_scale;
    int n_rot;              /* rotated dims per head (even) */
    const float *rope_freq; /* (n_rot/2) host: angle = pos * rope_freq[i] */
    float rope_mscale;      /* multiplies cos and sin (YaRN) */
    int page_len, n_pages;
    enum dtype kv_type; /* F32 F16 BF16 */
    int max_tokens, max_seqs, max_out, max_pages;
};

/* One layer's part of the KV pool: (n_pages, K, page_len, D) each, of shape.kv_type. The order
 * inside a (page, kv head) tile of page_len * D values is the backend's own; others move whole
 * pages. */
struct kv_layer {
    void *k, *v;
};

struct attn_layer {
    const struct weight *wqkv;    /* (H*D + K*D + K*D, n_embd), with bias where the model has one */
    const float *q_norm, *k_norm; /* (D) or NULL */
    struct kv_layer kv;
    int window; /* a row at p sees keys p-window+1..p; 0 = all */
};

struct moe_layer {
    const struct weight *router;  /* (n_expert, n_embd) */
    const struct weight *gate_up; /* n_expert x (2*n_ff_exp, n_embd): gate rows, then up rows */
    const struct weight *down;    /* n_expert x (n_embd, n_ff_exp) */
};

/* Whether a sequence's bytes can depend on what else is in the batch or how its prompt was cut. */
enum invariance {
    INVARIANCE_NONE,   /* they can: --deterministic is not offered */
    INVARIANCE_CHOSEN, /* unless `deterministic` is set, which may cost speed */
    INVARIANCE_ALWAYS, /* they never do */
};

struct backend {
    const struct backend_ops *ops;
    struct profile *profile; /* NULL = off */
    enum invariance invariance;
    bool deterministic; /* may change between steps */
    /* A step runs beside the host from launch() on, and the next one may be begun meanwhile, with
     * tokens the host does not know yet; two at most are under way. */
    bool ahead;
};

/* Logit biases of all rows together that a step begun while another runs may have at most. */
enum { AHEAD_MAX_BIAS = 1024 };

struct backend_ops {
    const char *name;
    void (*close)(struct backend *be);

    /* Memory. alloc: zeroed, 64-byte aligned backend memory, NULL with err if there is none. */
    void *(*alloc)(struct backend *be, size_t bytes, const char *what, struct error *err);
    void (*free)(struct backend *be, void *p, size_t bytes);
    /* Part of an alloc whose content nobody wants: its memory may go until it is written again.
     * NULL: this backend's memory is taken whole. */
    void (*forget)(struct backend *be, void *p, size_t bytes);
    void (*copy_in)(struct backend *be, void *dst, const void *host, size_t bytes);
    void (*copy_out)(struct backend *be, void *host, const void *src, size_t bytes);
    /* Takes a weight over (may repack). release undoes it. */
    bool (*upload)(struct backend *be, const struct raw_weight *src, struct weight *w,
                   struct error *err);
    void (*release)(struct backend *be, struct weight *w);
    /* Allocates everything ops need for steps of this shape. Called once, after the uploads. */
    bool (*prepare)(struct backend *be, const struct shape *shape, struct error *err);

    /* The step. replay(key) runs a step recorded under key and returns true, or returns false and
     * the caller issues the ops, after record(key) where key != 0. Backends without recording
     * return false. launch(): all ops are issued. end() waits for the oldest step under way; writes
     * the sampled token of each of its out rows (-1 without sampler). */
    void (*begin)(struct backend *be, const struct batch *b);
    bool (*replay)(struct backend *be, uint64_t key);
    void (*record)(struct backend *be, uint64_t key);
    void (*launch)(struct backend *be);
    bool (*end)(struct backend *be, int32_t *tokens, struct error *err);

    /* What an op leaves in n, q or a is for one op to read, or for copy_out before that: a
     * backend may keep it in a form of its own until then, and need not keep it longer. */

    /* x[t,:] = E[tokens[t],:] */
    void (*embed)(struct backend *be, const struct weight *emb, float *x);
    /* x += d (d may be NULL); n = x / sqrt(mean(x^2) + eps) * gain; rows of n_embd */
    void (*add_norm)(struct backend *be, float *x, const float *d, const float *gain, float *n,
                     int rows);
    /* [q k v] = n W^T + bias; per head q,k = rmsnorm(.) * gain where gains exist; rotate pairs
     * (i, i + n_rot/2) by pos * freq[i]; store k, v at slot; q: (n_tokens, H*D) */
    void (*attn_in)(struct backend *be, const struct attn_layer *l, const float *n, float *q);
    /* a[t,h,:] = softmax(attn_scale * q[t,h] . K[0..pos], windowed) V; head h reads kv head h*K/H
     */
    void (*attention)(struct backend *be, const struct attn_layer *l, const float *q, float *a);
    /* y = x W^T + bias, rows of x (n_in) to rows of y (n_out) */
    void (*linear)(struct backend *be, const struct weight *w, const float *x, float *y, int rows);
    /* [g u] = x Wgu^T; y = (silu(g) * u) Wd^T */
    void (*ffn)(struct backend *be, const struct weight *gate_up, const struct weight *down,
                const float *x, float *y, int rows);
    /* p = softmax(x Wr^T); top n_expert_used by p (ties: lower index); weights p (renormalised if
     * norm_topk) * expert_scale; y = sum_e w_e * ffn_e(x) */
    void (*moe)(struct backend *be, const struct moe_layer *l, const float *x, float *y, int rows);
    /* dst[i,:] = src[out_rows[i],:], rows of `width` */
    void (*gather)(struct backend *be, const float *src, float *dst, int width);
    /* One token per out row by its sampler, from logits (n_out, n_vocab); see end(). */
    void (*sample)(struct backend *be, float *logits);
};

struct backend_options {
    const char *device; /* "cpu", "cuda", "cuda:N"; NULL = "cpu". runtime.h knows "auto" too */
    int threads;        /* 0 = all cores */
    bool deterministic; /* same bytes whatever else is in the batch and however it was cut */
    bool no_repack;     /* compute from the mapped file */
};

/* STEEL_ISA=ref|avx2|avx512|vnni|amx forces the CPU's kernels; refused where the CPU lacks it. */
struct backend *backend_open(const struct backend_options *opt, struct error *err);
struct backend *backend_open_ref(void); /* the scalar specification, ref.c */
struct backend *backend_open_cpu(const struct backend_options *opt, struct error *err);
/* Bytes a CUDA device still has to give when `fraction` of its memory may be in use; 0 where
 * there is no such device, or the build knows none. */
bool backend_has_cuda(void); /* whether there is such a device; opens none */
size_t backend_cuda_room(const struct backend_options *opt, double fraction);
/* For a benchmark's record; false where the backend is no GPU. Measures, so it takes a moment. */
struct gpu_facts {
    char name[256], driver[32]; /* driver: "" = not known */
    int sm, n_sm;               /* compute capability x 10, multiprocessors */
    int max_sm_mhz;             /* 0 = not known, as the next two */
    int sm_mhz, memory_mhz;     /* now */
    size_t memory_bytes;
    double read_bytes_s; /* measured; 0 = not */
};
bool backend_gpu_facts(struct backend *be, struct gpu_facts *out);
/* Only in builds with nvcc (STEEL_CUDA). device: "cuda", "cuda:N" or NULL = the first. */
struct backend *backend_open_cuda(const struct backend_options *opt, struct error *err);

#endif
