/*
 * The CPU backend's own struct, shared by the files that implement its ops: cpu.c (life, memory, the
 * op table), matmul.c and moe.c (linear, ffn, moe, embed, on the kernels of matmul.h). Each op splits
 * its work over the pool by output, so results do not depend on the number of threads. Scratch is
 * allocated in prepare() alone.
 */
#ifndef STEEL_BACKEND_CPU_CPU_H
#define STEEL_BACKEND_CPU_CPU_H

#include "backend/backend.h"
#include "backend/profile.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/pool.h"

struct cpu_backend {
    struct backend base;
    struct pool *pool;
    enum isa isa;
    bool no_repack;
    struct shape shape;  /* after prepare(); rope_freq is the backend's own copy */
    struct batch batch;  /* this step: between begin() and end() */
    float *rope_freq;    /* (n_rot/2) */
    float *rope;         /* cpu_rope_table_len: this step's angles */
    float *qkv;          /* (max_tokens, (H + 2K) * D) projections before norm and RoPE */
    void *attn_scratch;  /* cpu_attention_scratch bytes */
    int32_t *sampled;    /* (max_out) */
    struct matmul *mm;   /* scratch and settings of linear, ffn and moe */
    int64_t stage_start; /* profile clock */
};

static inline struct cpu_backend *cpu_self(struct backend *be)
{
    return (struct cpu_backend *)be;
}

static inline void cpu_stage_begin(struct cpu_backend *cb)
{
    if (cb->base.profile)
        cb->stage_start = clock_ns();
}

static inline void cpu_stage_end(struct cpu_backend *cb, enum stage stage)
{
    struct profile *p = cb->base.profile;
    if (p)
        p->ns[p->phase][stage] += (double)(clock_ns() - cb->stage_start);
}

#endif
