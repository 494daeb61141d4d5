/*
 * The CPU backend's struct, shared by the files that implement its ops: cpu.c (opening, memory, op table), gemm.c and
 * moe.c (products, on the kernels of gemm.h). Each op splits its work over the pool by output, so results do not
 * depend on the number of threads. Only prepare() allocates scratch.
 */
#ifndef STEEL_BACKEND_CPU_CPU_H
#define STEEL_BACKEND_CPU_CPU_H

#include "backend/backend.h"
#include "backend/cpu/lora.h"
#include "backend/cpu/pick.h"
#include "backend/profile.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/pool.h"

struct relative; /* ops.h */

/* The residual stream x + d, rows of n_embd. A block leaves its result in d, and the next norm adds it to x in the same
 * pass. */
struct cpu_stream {
    float *x, *d;     /* (rows, E); x is all or out */
    float *all, *out; /* (max_tokens, E), (max_out, E) */
    int rows;
    bool pending; /* d is still to be added */
    bool narrow;  /* only output rows are left */
};

struct cpu_backend {
    struct backend base;
    struct pool *pool;
    enum isa isa;
    struct pick pick;
    bool no_repack;
    const struct network *net; /* after prepare() */
    struct network_max max;
    struct bounds bounds;
    struct batch batch; /* this step: between begin() and end() */
    struct cpu_stream stream;
    struct cpu_block {
        void *p;
        size_t bytes;
    } blocks[96]; /* (n_blocks) scratch that prepare made */
    int n_blocks;
    size_t *measured; /* prepare only adds up the bytes of its scratch here; NULL = it allocates */
    int n_ropes;
    float **rope;                     /* (n_ropes) -> (max_tokens, n_rot): this step's angles */
    float *n;                         /* (max_tokens, E) normed rows */
    float *late;                      /* (max_tokens, E) results of late experts, by batch rows */
    float *products;                  /* (max_tokens, 2*F) of mlps whose hidden units are normed */
    float *gates;                     /* (max_tokens, rows of wgate) */
    float *to_experts, *from_experts; /* (max_tokens, L) of latent experts */
    float *n2, *n3; /* (max_tokens, E) inputs of experts and routers that have norms of their own */
    float *dense;   /* (max_tokens, E) of a dense mlp beside experts */
    float *gate;    /* (max_tokens) its gate */
    float *
        streams; /* (N, max_tokens, E) by batch rows: parts of the stream (streams.c); NULL = it has one */
    float *laurel, *laurel_low; /* (max_tokens, E), (max_tokens, rank) */
    float *layer_embeds;        /* (max_tokens, n_layers, P), and one layer's: */
    float *layer_gate;          /* (max_tokens, P) */
    float *qkv;                 /* (max_tokens, widest wqkv) projections before norm and RoPE */
    float *q, *a;               /* (max_tokens, widest H*D) queries, attention outputs */
    float *a_out;               /* (max_out, widest H*D) out rows of a */
    float *logits;              /* (max_out, n_vocab) */
    float *kept;                /* (max_tokens, E) rows stored by keep; NULL = no MTP block */
    float *joined;              /* (max_tokens, 2*E) embeddings and kept rows */
    float *tapped, *to_fc; /* (max_tokens, n_taps*E) rows stored by tap; those that join reads */
    float *patches;        /* (max_tokens, D) a tower's inputs; NULL = no tower */
    float *merged[2];      /* rows inside its mergers */
    /* a bounded product's inputs and outputs, an ffn's [g u] and act(g, u); NULL = no clips */
    float *clip_in, *clip_out, *clip_hidden, *clip_act;
    float **features;   /* (n_mergers) -> (max_tokens / rows, n_out) */
    void *attn_scratch; /* cpu_attention_scratch bytes */
    float *z, *ba;      /* (max_tokens, Hv*Dv), (max_tokens, 2*Hv) of a delta net */
    float *low, *wide;  /* (max_tokens, widest latent), (max_tokens, H, C+Dr) of latent attention */
    float *delta_old;   /* (threads, delta_len) its scratch */
    size_t delta_len;
    float **taps; /* (n_layers) -> (W, C) transposed convolutions; NULL = none */
    float *
        *decays; /* (n_layers) -> decays of selective scans, in their panels' order; NULL = none */
    struct index_state *index;           /* of sparse attention; NULL = none */
    struct hyper_state *hyper;           /* of hyper-connections; NULL = none */
    struct compressed_state *compressed; /* of compressed attention; NULL = none */
    struct row_convs *convs; /* (n_taps) what convolutions of blocks and relative positions read */
    float *rel;              /* (max_tokens, widest wrel) */
    int n_taps;
    int32_t *sampled;            /* (max_out) */
    struct sample_probs *probs;  /* (max_out) */
    struct gemm *gemm;           /* scratch and settings of linear, ffn and moe */
    struct cpu_lora_state *lora; /* NULL: no adapters */
    struct cpu_tier *tier;       /* experts in the file; NULL = all are in memory */
    struct error failed;         /* what base.failure points to */
    int64_t stage_start;         /* profile clock */
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

/* This step's angles. */
float *cpu_rope_of(const struct cpu_backend *cb, const struct rope *rope);

/* Adds the pending result of the last block, where no norm does it in passing. */
void cpu_settle(struct cpu_backend *cb);
/* Adds up the stream's rows over the members of comm. from: bit mask per row of the members that contribute; NULL = all. */
void cpu_sum_members(struct cpu_backend *cb, float *rows, const uint64_t *from);
/* The input rows of a block, (rows, E). The stream becomes what the block keeps. */
const float *cpu_block_input(struct cpu_backend *cb, const struct block *b);
/* Convolves, norms and scales the block's result in d, and marks it pending. */
void cpu_finish_block(struct cpu_backend *cb, const struct block *b, int layer);
/* to = norm(from), rows of the stream; to may be from. NORM_NONE does nothing. */
void cpu_norm_rows(struct cpu_backend *cb, const struct norm *norm, float *from, float *to);
/* gemm_linear as a stage of the profile. */
void cpu_linear(struct cpu_backend *cb, const struct weight *w, const float *x, float *y, int rows,
                enum stage stage);
/* row_conv.c: convolutions of keys and values, of blocks' results, and tables of relative positions. */
bool cpu_convs_prepare(struct cpu_backend *cb, const struct network *net, int T, struct error *err);
void cpu_convs_clear(struct cpu_backend *cb);
bool cpu_convs_supported(const struct network *net, int layer);
void cpu_conv_kv(struct cpu_backend *cb, const struct attention *l, int layer);
/* The block's result in d, through its convolution if it has one. */
void cpu_conv_block(struct cpu_backend *cb, const struct block *b, int layer);
/* What attention reads of a layer with relative positions, whose rows are in cb->rel. */
struct relative cpu_relative(const struct cpu_backend *cb, const struct attention *l, int layer);
/* embed.c, mlp.c: ops of backend.h */
void cpu_embed(struct backend *be, const struct embed *e);
void cpu_mlp(struct backend *be, const struct mlp *m, int layer);
void cpu_tap(struct backend *be, int k);
void cpu_join(struct backend *be, const struct mtp *m);

/* Scratch until the next prepare(). */
void *cpu_scratch(struct cpu_backend *cb, size_t bytes, const char *what, struct error *err);
float *cpu_rows(struct cpu_backend *cb, int rows, int width, const char *what, struct error *err);

/* tower.c */
void cpu_deepstack(struct cpu_backend *cb, int level); /* after an mlp, see struct mlp */
/* The projection of n to cb->qkv, a's product with wo to y, and an ffn, where inputs and outputs are bounded. */
void cpu_clip_qkv(struct cpu_backend *cb, const struct attention *l, const float *n);
void cpu_clip_linear(struct cpu_backend *cb, const struct weight *w, const struct clip *c,
                     const float *x, float *y, int rows);
void cpu_clip_ffn(struct cpu_backend *cb, const struct ffn *f, const float *x, float *y, int rows);
bool cpu_tower_prepare(struct cpu_backend *cb, const struct network *net, int T, struct error *err);
void cpu_merge(struct backend *be, const struct merger *m, int i);
void cpu_features(struct backend *be, int rows, float *host);

#endif
