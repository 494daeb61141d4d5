/*
 * What the decode kernels share: which heads of which sequence a block has, how a warp makes
 * queries and this step's key and value from raw projections, the softmax of 16 keys, and how warps
 * combine their partial results. A block has up to 8 heads of one kv head ("a unit").
 *
 * Queries and probabilities enter the MMA as a value rounded to the cache's type plus the rounding
 * residue, so they keep about 22 bits. attn_decode.cu and attn_decode_batch.cu put the heads in
 * rows of the A fragment: rows g hold the rounded values, rows g + 8 the residues.
 * attn_decode_split.cu puts the heads in columns.
 */
#ifndef STEEL_BACKEND_CUDA_ATTN_DECODE_CUH
#define STEEL_BACKEND_CUDA_ATTN_DECODE_CUH

#include "backend/cuda/attn/attn.cuh"

#include <math.h>

/* The work of a block: up to 8 heads of one kv head of one sequence. */
struct decode_unit {
    int t;                  /* the token row; a decode has one per sequence */
    int kv_head, h0, heads; /* heads h0 .. h0 + heads - 1 of kv_head */
    int slot, last, from;   /* slot -1: a padding row; the heads see keys from .. last */
    const int32_t *pages;
};

/* Unit `at` of row t. Units are ordered by kv head, then by group of 8 heads. */
DEVICE struct decode_unit decode_unit_of(const struct attn_args &p, int at, int t)
{
    int G = p.n_heads / p.kv.n_kv;
    struct decode_unit u;
    u.t = t;
    u.kv_head = at, u.h0 = at * G, u.heads = G;
    if (G > 8) {
        int groups = (G + 7) >> 3, group = at % groups;
        u.kv_head = at / groups;
        u.h0 = u.kv_head * G + group * 8;
        u.heads = min(8, G - group * 8);
    }
    u.slot = p.step.slot[t], u.last = p.step.pos[t];
    u.pages = p.step.pages + (size_t)t * (size_t)p.step.head[STEP_PAGE_STRIDE];
    u.from = p.window && u.last - p.window + 1 > 0 ? u.last - p.window + 1 : 0;
    return u;
}

/* The unit's place in the result. */
template <int D> DEVICE float *decode_result(const struct attn_args &p, const struct decode_unit &u)
{
    return p.a + ((size_t)u.t * (size_t)p.n_heads + (size_t)u.h0) * D;
}

/*
 * The heads a warp prepares from raw projections: heads w, w + WARPS, .. of the unit. The first two
 * warps also have a last job, JOBS - 1: this step's key and value. The first `jobs` jobs exist.
 */
template <int D, int WARPS> struct decode_heads {
    enum { PER = D / 32, JOBS = 8 / WARPS + 1 };
    const float *gain[2]; /* of queries, of the key; NULL: no norm */
    int half, jobs;       /* pairs rotated by RoPE */
    float gains[2][PER], x[JOBS][PER];
    float2 cos_sin[D / 64];
};

/* Loads what does not depend on the projections. */
template <int D, int WARPS>
DEVICE void decode_heads_begin(const struct attn_args &p, int t, bool raw,
                               struct decode_heads<D, WARPS> &h)
{
    h.gain[0] = raw ? p.q_norm : NULL;
    h.gain[1] = raw ? p.k_norm : NULL;
    h.half = raw ? p.n_rot >> 1 : 0;
    head_load<D>(p, t, h.gain, h.half, h.gains, h.cos_sin);
}

template <int D, int WARPS>
DEVICE void decode_heads_load(const struct attn_args &p, const struct decode_unit &u, bool raw,
                              bool owns_fresh, struct decode_heads<D, WARPS> &h)
{
    enum { PER = D / 32, JOBS = decode_heads<D, WARPS>::JOBS };
    int H = p.n_heads, K = p.kv.n_kv, w = warp_id();
    const float *row = p.q + (size_t)u.t * (size_t)(raw ? H + 2 * K : H) * D;
    h.jobs = owns_fresh && w < 2 ? JOBS : JOBS - 1;
#pragma unroll
    for (int j = 0; j < JOBS; j++) {
        int from_head =
            j < JOBS - 1 ? u.h0 + min(w + j * WARPS, u.heads - 1) : H + w * K + u.kv_head;
#pragma unroll
        for (int i = 0; i < PER; i++)
            h.x[j][i] = j < h.jobs ? row[from_head * D + lane_id() + 32 * i] : 0.0f;
    }
}

/* Runs the warp's jobs. place(j): shared memory for job j. query(j, head): stores a query.
 * fresh(which, head): stores this step's key (0) or value (1). */
template <int D, int WARPS, class PLACE, class QUERY, class FRESH>
DEVICE void decode_heads_each(const struct attn_args &p, const struct decode_heads<D, WARPS> &h,
                              PLACE place, QUERY query, FRESH fresh)
{
    enum { JOBS = decode_heads<D, WARPS>::JOBS };
    int w = warp_id();
#pragma unroll
    for (int j = 0; j < JOBS; j++) {
        bool fresh_one = j == JOBS - 1, is_value = fresh_one && w == 1;
        if (j >= h.jobs)
            break;
        float *mine = place(j);
        head_norm_rope<D>(h.x[j], h.gain[fresh_one] && !is_value, p.eps, h.gains[fresh_one],
                          !is_value, h.cos_sin, h.half, mine);
        if (!fresh_one)
            query(j, mine);
        else
            fresh(w, mine);
    }
}

/* The same for an fp16 or bf16 cache: stores this step's key and value in the cache and in
 * fresh, (2, D). */
template <int D, bool BF16, int WARPS, class PLACE, class QUERY>
DEVICE void decode_heads_prepare(const struct attn_args &p, const struct decode_unit &u,
                                 const struct decode_heads<D, WARPS> &h, uint16_t *fresh,
                                 PLACE place, QUERY query)
{
    decode_heads_each(p, h, place, query, [&](int which, const float *head) {
        fresh_put<D, BF16>(p, u.slot, p.kv.n_kv, u.kv_head, which, head, fresh, u.h0,
                           p.n_heads / p.kv.n_kv);
    });
}

/* A query in units of log2, as values rounded to the cache's type and their residues. */
template <int D, bool BF16>
DEVICE void decode_query_put(const float *head, float scale, uint16_t *hi, uint16_t *lo)
{
    const float to_log2 = 1.4426950408889634f * scale;
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
        int at = 2 * lane_id() + 64 * i;
        float2 e = *(const float2 *)(head + at);
        split_pair<BF16>(e.x * to_log2, e.y * to_log2, (uint32_t *)(hi + at),
                         (uint32_t *)(lo + at));
    }
}

/*
 * Softmax of 16 keys with heads as rows. s, s2: two independent accumulator chains of q K^T; rows g
 * are from the rounded queries, rows g + 8 from their residues. Entry i of a lane belongs to
 * key_of(i). pf becomes the probabilities as an A fragment. `out` is rescaled if a larger score was
 * found.
 */
template <bool BF16, int TILES, class KEY>
DEVICE void decode_softmax(const float (&s)[2][4], const float (&s2)[2][4],
                           const struct decode_unit &u, KEY key_of, float &top, float &total,
                           float (&out)[TILES][4], uint32_t (&pf)[4])
{
    float m = top, sc[4]; /* in powers of two */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int key = key_of(i), e = i & 1;
        sc[i] = (s[i >> 1][e] + s[i >> 1][2 + e]) + (s2[i >> 1][e] + s2[i >> 1][2 + e]);
        if (key < u.from || key > u.last)
            sc[i] = -INFINITY;
        m = fmaxf(m, sc[i]);
    }
    m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 1));
    m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, 2));
    float anchor = m == -INFINITY ? 0.0f : m; /* nothing visible yet */
    float shrink = fast_exp2(top - anchor);
    top = m;
    total *= shrink;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sc[i] = fast_exp2(sc[i] - anchor);
        total += sc[i];
    }
    split_pair<BF16>(sc[0], sc[1], &pf[0], &pf[1]);
    split_pair<BF16>(sc[2], sc[3], &pf[2], &pf[3]);
    if (__any_sync(FULL_WARP, shrink != 1.0f))
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[j][i] *= shrink;
}

/* out += P V of eight n tiles. v0 .. v3 hold 16 bytes each of four keys, in the order of pf. */
template <bool BF16>
DEVICE void decode_values(float (*out)[4], const uint32_t (&pf)[4], const uint4 &v0,
                          const uint4 &v1, const uint4 &v2, const uint4 &v3)
{
#pragma unroll
    for (int j = 0; j < 8; j++) {
        uint32_t sel = j & 1 ? 0x7632 : 0x5410;
        uint32_t b0 = byte_perm(word_of(v0, j >> 1), word_of(v1, j >> 1), sel);
        uint32_t b1 = byte_perm(word_of(v2, j >> 1), word_of(v3, j >> 1), sel);
        mma_kv<BF16>(out[j], pf, b0, b1);
    }
}

/* The softmax sum of head h, by which its result is divided: l, whose largest score is m, plus
 * the head's sink. */
template <bool SINK> DEVICE float decode_sum(const struct attn_args &p, int h, float m, float l)
{
    return SINK ? l + attn_sink(p, h, m) : l;
}

/* A warp stores its partial result, (8, D + 8), in the order of the n tiles (entry 8j + n is
 * element n * TILES + j), and each head's maximum and sum. */
template <int D>
DEVICE void decode_part_put(const float (&out)[D / 8][4], float top, float total, float *part,
                            float *ml)
{
    int w = warp_id(), g = lane_id() >> 2, c = lane_id() & 3;
    float *mine = part + (w * 8 + g) * (D + 8) + 2 * c;
#pragma unroll
    for (int j = 0; j < D / 8; j++)
        *(float2 *)(mine + 8 * j) = make_float2(out[j][0] + out[j][2], out[j][1] + out[j][3]);
    if (c == 0) {
        ml[(w * 8 + g) * 2] = top;
        ml[(w * 8 + g) * 2 + 1] = total;
    }
}

/* One warp combines the warps' partial results of head h: entries entry(i), not yet divided by
 * the sum l. */
template <int D, int WARPS, class ENTRY>
DEVICE void decode_parts_combine(const float *part, const float *ml, int h, ENTRY entry, float *m,
                                 float *l, float (&v)[D / 32])
{
    *m = -INFINITY, *l = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 32; i++)
        v[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < WARPS; j++)
        *m = fmaxf(*m, ml[(j * 8 + h) * 2]);
#pragma unroll
    for (int j = 0; j < WARPS; j++) {
        float f = fast_exp2(ml[(j * 8 + h) * 2] - *m);
        *l += f * ml[(j * 8 + h) * 2 + 1];
#pragma unroll
        for (int i = 0; i < D / 32; i++)
            v[i] += f * part[(j * 8 + h) * (D + 8) + entry(i)];
    }
}

#endif
