/*
 * The CPU backend's own struct, shared by the files that implement its ops: cpu.c (life, memory, the
 * op table), matmul*.c (linear, ffn, moe, embed and every weight layout) and attention*.c (norms,
 * RoPE, KV append, attention). Each op splits its work over the pool by output, so results do not
 * depend on the number of threads. Scratch is allocated in prepare() alone.
 */
#ifndef STEEL_BACKEND_CPU_CPU_H
#define STEEL_BACKEND_CPU_CPU_H

#include "backend/backend.h"
#include "base/cpu.h"
#include "base/pool.h"

struct cpu_backend {
    struct backend base;
    struct pool *pool;
    enum isa isa;
    bool deterministic, no_repack;
    struct shape shape; /* after prepare(); rope_freq is the backend's own copy */
    struct batch batch; /* this step: between begin() and end() */
    float *qkv;         /* (max_tokens, (H + 2K) * D) attn_in: projections before norm and RoPE */
    void *matmul;       /* struct matmul: scratch of linear, ffn and moe */
    void *attn;         /* struct attn_state: scratch of attention */
};

/* attention*.c. attn_init: called by prepare(), after shape is set; tables and scratch. */
bool attn_init(struct cpu_backend *cb, struct error *err);
void attn_clear(struct cpu_backend *cb);
void attn_add_norm(struct backend *be, float *x, const float *d, const float *gain, float *n,
                   int rows);
/* The rest of attn_in after the projection: qk-norm, RoPE, KV append of cb->qkv (bias already
 * added); q: (n_tokens, H*D). */
void attn_rope_store(struct cpu_backend *cb, const struct attn_layer *l, const float *qkv,
                     float *q);
void attn_attention(struct backend *be, const struct attn_layer *l, const float *q, float *a);
void attn_gather(struct backend *be, const float *src, float *dst, int width);

#endif
