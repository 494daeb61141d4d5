/*
 * Attention, norms and row gathers for cpu.c, with plain arguments: no backend struct, no allocation. Every function runs
 * on the whole team, or on the caller alone if the work is small, and returns when it is done. `isa` or `pick` selects
 * the kernels; any set that isa_best() includes is legal.
 *
 * Results are the same bytes for any thread count and, without AMX, for any batch and any split of a prompt into steps.
 * With AMX, attention runs many rows on tiles and few rows on AVX-512. The results differ in the last bits, unless
 * pick is deterministic.
 *
 * The KV pool of one layer has, per (page, kv head), one tile of page_len * D values of bounds.k_type or v_type. V tiles
 * are (page_len, D). K tiles are (D, page_len), so a vector load holds the same component of adjacent keys and scores
 * need no transpose and no horizontal sum. kvtile.h has the layout of quantised tiles. Only these functions read or
 * write tiles; other code moves whole pages.
 */
#ifndef STEEL_BACKEND_CPU_OPS_H
#define STEEL_BACKEND_CPU_OPS_H

#include "backend/batch.h"
#include "base/cpu.h"
#include "base/pool.h"

struct pick;
struct cpu_backend;

/* Once per step, in begin: table (n_tokens, n_rot) of the angles pos * freq[i], where pos is b->pos[t] or,
 * with planes, the row's position in the pair's plane. Per token n_rot/2 cosines, then n_rot/2 sines, both
 * times mscale. */
void cpu_rope_table(const struct rope *rope, const struct batch *b, float *table,
                    struct pool *pool);

/* After the projection: qkv (n_tokens, H*D + K*D + K*Dv; without v, or k and v, where l says so), bias
 * already added -> q (n_tokens, H*D) normed, rotated and warmed, rel (n_tokens, H*R) warmed, k and v appended to kv at b->slot
 * (-1: not stored). q must not overlap qkv, which is changed. Weights of l are not read. */
void cpu_attn_post(const struct bounds *s, const struct batch *b, const struct attention *l,
                   const struct kv_layer *kv, const float *rope, float *qkv, float *q, float *rel,
                   struct pool *pool, enum isa isa);

/* Relative positions: the layer's table as the kernels read it, and the rows of n Wrel^T. NULL table = none. */
struct relative {
    const float *table; /* (R, stride): its last entry of a row is that of distance 0 */
    size_t stride;      /* rel_len rounded up to whole vectors */
    const float *r;     /* (n_tokens, H*R), warm */
};
size_t cpu_relative_stride(const struct attention *l);

/* What indexers chose for each row of the step, of keys or of blocks of keys. */
struct key_choice {
    const int32_t *list; /* (n_tokens, groups, most) ascending */
    const int32_t *n;    /* (n_tokens, groups); -1 = the row sees all its keys */
    int groups, most;    /* groups of heads: 1 or the kv heads */
    int block;           /* keys of a block; 1 */
};

/* Bytes of 64-byte aligned scratch for cpu_attention with a team of n_threads. */
size_t cpu_attention_scratch(const struct bounds *s, const struct attention *l, int n_threads);
/* Scores, softmax and weighted values. choice: of the layer's indexer; NULL = all keys. q (n_tokens, H*D), a (n_tokens,
 * H*Dv). Rows without keys give zeros. Where the
 * cache's type turns heads (kvblock.h), q comes turned, and values are turned back here. */
void cpu_attention(const struct bounds *s, const struct batch *b, const struct attention *l,
                   const struct kv_layer *kv, const struct key_choice *choice,
                   const struct relative *rel, const float *q, float *a, void *scratch,
                   struct pool *pool, struct pick *pick);

/* The same over a cache of rows, (n_pages, page_len, D) of bounds.k_type: keys of the one kv head, whose
 * first Dv = l->v_dim values are their values. q (n_tokens, H, D): the first Dv of each become what the
 * query gathered. */
size_t cpu_attention_rows_scratch(const struct bounds *s, const struct attention *l, int n_threads);
void cpu_attention_rows(const struct bounds *s, const struct batch *b, const struct attention *l,
                        const void *rows, const struct key_choice *choice, float *q, void *scratch,
                        struct pool *pool, struct pick *pick);

/* a (n_tokens, H*D) *= sigmoid(gate). Gates follow each head's q in qkv (n_tokens, width). */
void cpu_attn_gate(const struct batch *b, const struct attention *l, const float *qkv, int width,
                   float *a, struct pool *pool, enum isa isa);
/* a (n_tokens, H*Dv) *= gates of g (n_tokens, rows of wgate) */
void cpu_attn_own_gate(const struct batch *b, const struct attention *l, const float *g, float *a,
                       struct pool *pool, enum isa isa);

/*
 * The gated delta net m after its projections: u (n_tokens, C = 2*Hk*Dk + Hv*Dv), z (n_tokens, Hv*Dv),
 * ba (n_tokens, 2*Hv) -> o (n_tokens, Hv*Dv), what wo multiplies; states (n_states, mixer_state_len)
 * as the batch says. u and ba are changed. taps (W, C): m's convolution, by cpu_conv_taps. scratch:
 * scratch_len floats for each thread, at least cpu_delta_scratch.
 */
void cpu_delta_net(const struct batch *b, const struct mixer *m, float *states, const float *taps,
                   float *u, const float *z, float *ba, float *o, float *scratch,
                   size_t scratch_len, struct pool *pool, enum isa isa);
enum { CPU_MAX_TAPS = 64 }; /* W at most */
size_t cpu_delta_scratch(const struct delta_net *d);

/*
 * A state-space model (short convolution) m after its projection in (n_tokens, w_in->n_out), which is changed
 * -> o (n_tokens, H*P or E), what w_out multiplies; states by the batch. z (n_tokens, H*P): of w_z. taps (W, C): the
 * convolution, by cpu_conv_taps. scratch: scratch_len floats for each thread, at least cpu_ssm_scratch.
 */
void cpu_ssm(const struct batch *b, const struct mixer *m, float *states, const float *taps,
             float *in, const float *z, float *o, float *scratch, size_t scratch_len,
             struct pool *pool, enum isa isa);
void cpu_short_conv(const struct batch *b, const struct mixer *m, float *states, const float *taps,
                    float *in, float *o, float *scratch, size_t scratch_len, struct pool *pool,
                    enum isa isa);
/* A selective scan m after its projection in (n_tokens, 2*I), which is changed -> o (n_tokens, I), what w_out multiplies. x
 * (n_tokens, I), low (n_tokens, R + 2*N): scratch. */
void cpu_scan(struct cpu_backend *cb, const struct mixer *m, float *states, const float *taps,
              const float *decay, float *in, float *x, float *low, float *o);
float *
cpu_scan_decay(const struct scan *m); /* decays in panels of channels, as cpu_scan reads them */
/* rows (n_tokens, width): their first `channels` values become conv(.), in place. taps (W, channels); states: slots of
 * state_len floats, of which the first (W-1, channels) are the rows before. */
void cpu_conv_rows(struct cpu_backend *cb, float *rows, size_t width, int channels,
                   const float *taps, int conv_len, float *states, size_t state_len);
size_t cpu_ssm_scratch(int conv_len);
void cpu_conv_taps(const float *conv, int channels, int conv_len, float *taps);

/*
 * Latent attention l after its projections: q (n_tokens, H*(Dn+Dr)), low (n_tokens, C+Dr) before its
 * norm -> a (n_tokens, H*Dv), what wo multiplies; rows of low, normed and rotated, go to kv->k,
 * (n_pages, page_len, C+Dr). q and low are changed. wide: (n_tokens, H, C+Dr) scratch. rope: by
 * cpu_rope_table.
 */
enum { CPU_MAX_LATENT = 1024 }; /* C + Dr at most */
/* The absorbed form of l as attention over its cache, for cpu_attention_rows_scratch. */
void cpu_latent_attention(const struct latent *l, struct attention *a);
void cpu_latent(struct cpu_backend *cb, const struct latent *l, const struct kv_layer *kv,
                const struct key_choice *choice, const float *rope, float *q, float *low,
                float *wide, float *a);

/* index.c: sparse attention. Runs the indexer x of a layer on n (n_tokens, E) and u: stores the step's keys, and chooses for
 * n_groups groups of heads. Returns the choice, or NULL where all rows see all their keys. */
const struct key_choice *cpu_index(struct cpu_backend *cb, const struct indexer *x,
                                   const struct kv_layer *kv, const float *n, const float *u,
                                   int n_groups);
/* Turns pairs (2i, 2i + 1) of a head's last values by a row of cpu_rope_table, or back. */
void cpu_turn_last(const float *rope, int n_rot, float *head, int dim, bool back);
bool cpu_index_supported(const struct network *net, int layer);
bool cpu_index_prepare(struct cpu_backend *cb, const struct network *net, struct error *err);

/* x += d (d may be NULL); n = norm(x), which is not NORM_NONE. x, d, n: (rows, width); n may be x. */
void cpu_add_norm(float *x, const float *d, const struct norm *norm, float *n, int rows, int width,
                  struct pool *pool, enum isa isa);
/* x = norm(x), rows of `width` floats each, on the calling thread. */
void cpu_norm_alone(const struct norm *norm, float *x, int rows, int width, enum isa isa);
/* x = (x + d) * scale; d may be NULL. x, d: (rows, width). */
void cpu_add_scale(float *x, const float *d, float scale, int rows, int width, struct pool *pool);
/* dst[i,:] = src[index[i],:] for i < n, rows of `width` floats. */
void cpu_gather(const float *src, const int32_t *index, int n, int width, float *dst,
                struct pool *pool);

#endif
