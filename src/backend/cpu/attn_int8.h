/*
 * Scores of Q8_0 and Q4_0 keys by integer dot products. Part of attn_kernel.h for attn_vnni.c,
 * attn_dotprod.c, attn_madd_avx512.c and attn_madd_avx2.c.
 *
 *   score = sum over blocks of 32 components of q_scale * k_scale * sum(q_code * k_code)
 *
 * A query is rounded to 16 bits per block of 32 components, with a scale each, which is a small error
 * next to the keys' own rounding. A vector is VW keys; each lane holds four components of a key.
 * VNNI: the query is two bytes, 256 * high + low, and key bytes count as unsigned. The excess, 128 (Q4_0:
 * 8) times the sum of the query's codes, is subtracted at the start. SDOT: the same with signed keys.
 * Others: key codes are widened to 16 bits. Everything up to the scales is exact, so both ways give the same bytes.
 *
 * Reached with VNNI on a Xeon, one thread, one sequence at 8,192: Q8_0 1,043 us, F16 1,312 us
 * (docs/formats.md).
 */
#ifndef STEEL_BACKEND_CPU_ATTN_INT8_H
#define STEEL_BACKEND_CPU_ATTN_INT8_H

/* Contents of a tile's q: codes (D/4, ROWS) of four components each; per block and row a scale and
 * the sum of the codes. VNNI: high and low bytes of the four codes. Otherwise: codes 0 and 2 as 16
 * bits in `high`, codes 1 and 3 in `low`. */
struct int8_queries {
    int32_t *high, *low;
    float *scale; /* (D/32, ROWS) */
    int32_t *sum;
};

INLINE struct int8_queries int8_queries(const float *q, int dim)
{
    int32_t *p = (int32_t *)q;
    size_t codes = (size_t)dim / 4 * ROWS, blocks = (size_t)dim / KV_BLOCK * ROWS;
    return (struct int8_queries){.high = p,
                                 .low = p + codes,
                                 .scale = (float *)(p + 2 * codes),
                                 .sum = p + 2 * codes + blocks};
}

enum { INT8_MOST = 127 * 256 + 127 }; /* largest code of a query */

#ifdef __AVX512VNNI__
static void load_int8(const float *const *from, int rows, int dim, float factor, float *q)
{
    struct int8_queries to = int8_queries(q, dim);
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < dim / KV_BLOCK; b++) {
            const float *x = from[r] + b * KV_BLOCK;
            __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
            float max = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1)));
            float inverse = max > 0 ? (float)INT8_MOST / max : 0.0f;
            __m512i c0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, _mm512_set1_ps(inverse)));
            __m512i c1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, _mm512_set1_ps(inverse)));
            const __m512i most = _mm512_set1_epi32(INT8_MOST), round = _mm512_set1_epi32(128);
            c0 = _mm512_min_epi32(c0, most); /* two roundings may exceed it */
            c1 = _mm512_min_epi32(c1, most);
            int32_t high[8], low[8];
            _mm_storeu_si128((__m128i *)low, _mm512_cvtepi32_epi8(c0)); /* the low byte, signed */
            _mm_storeu_si128((__m128i *)low + 1, _mm512_cvtepi32_epi8(c1));
            _mm_storeu_si128((__m128i *)high, _mm512_cvtepi32_epi8(_mm512_srai_epi32(
                                                  _mm512_add_epi32(c0, round), 8)));
            _mm_storeu_si128((__m128i *)high + 1, _mm512_cvtepi32_epi8(_mm512_srai_epi32(
                                                      _mm512_add_epi32(c1, round), 8)));
            for (int g = 0; g < 8; g++) {
                to.high[(b * 8 + g) * ROWS + r] = high[g];
                to.low[(b * 8 + g) * ROWS + r] = low[g];
            }
            to.scale[b * ROWS + r] = inverse > 0 ? factor / inverse : 0.0f;
            to.sum[b * ROWS + r] = _mm512_reduce_add_epi32(_mm512_add_epi32(c0, c1));
        }
}

/* Four components of 16 keys, as unsigned bytes. */
INLINE __m512i int8_keys(enum dtype type, const struct attn_block *b, int i, int block, int g)
{
    const char *k = b->k[i];
    if (type == DT_Q8_0)
        return _mm512_xor_si512(_mm512_loadu_si512(k + (size_t)(block * 8 + g) * b->k_stride * 4),
                                _mm512_set1_epi8((char)0x80));
    __m512i x = _mm512_loadu_si512(k + (size_t)(block * 4 + g % 4) * b->k_stride * 4);
    return _mm512_and_si512(g >= 4 ? _mm512_srli_epi16(x, 4) : x, _mm512_set1_epi8(15));
}

/* s[r, i*VW ..] = q[r] . K for vector i of keys */
INLINE void scores_int8(enum dtype type, int rows, const struct attn_tile *t,
                        const struct attn_block *b, int i, int dim)
{
    struct int8_queries q = int8_queries(t->q, dim);
    const int zero = type == DT_Q8_0 ? 128 : 8;
    VEC acc[ROWS];
    UNROLL
    for (int r = 0; r < rows; r++)
        acc[r] = vec_set(0.0f);
    for (int block = 0; block < dim / KV_BLOCK; block++) {
        __m512i high[ROWS], low[ROWS];
        UNROLL
        for (int r = 0; r < rows; r++) {
            high[r] = _mm512_setzero_si512();
            low[r] = _mm512_set1_epi32(-zero * q.sum[block * ROWS + r]);
        }
        UNROLL
        for (int g = 0; g < 8; g++) {
            __m512i k = int8_keys(type, b, i, block, g);
            const int32_t *h = q.high + (block * 8 + g) * ROWS, *l = q.low + (block * 8 + g) * ROWS;
            UNROLL
            for (int r = 0; r < rows; r++) {
                high[r] = _mm512_dpbusd_epi32(high[r], k, _mm512_set1_epi32(h[r]));
                low[r] = _mm512_dpbusd_epi32(low[r], k, _mm512_set1_epi32(l[r]));
            }
        }
        for (size_t at = 0; at < KV_BLOCK * b->v_step; at += 64)
            __builtin_prefetch(
                (const char *)b->next->v_tile[i] + (size_t)block * KV_BLOCK * b->v_step + at, 0, 2);
        VEC scale = key_scale(type, b, i, block);
        UNROLL
        for (int r = 0; r < rows; r++) {
            __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r], 8), low[r]);
            VEC x = vec_mul(_mm512_cvtepi32_ps(sum), vec_set(q.scale[block * ROWS + r]));
            acc[r] = vec_fma(x, scale, acc[r]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        vec_store(t->s + r * ATTN_BLOCK + i * VW, acc[r]);
}
#elif defined STEEL_NEON
static void load_int8(const float *const *from, int rows, int dim, float factor, float *q)
{
    struct int8_queries to = int8_queries(q, dim);
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < dim / KV_BLOCK; b++) {
            const float *x = from[r] + b * KV_BLOCK;
            VEC most = vec_set(0.0f);
            for (int i = 0; i < KV_BLOCK; i += VW)
                most = vec_max(most, vabsq_f32(vec_load(x + i)));
            float max = vec_hmax(most);
            float inverse = max > 0 ? (float)INT8_MOST / max : 0.0f;
            int32x4_t sum = vdupq_n_s32(0);
            for (int g = 0; g < 8; g++) {
                int32x4_t c = vcvtnq_s32_f32(vec_mul(vec_load(x + 4 * g), vec_set(inverse)));
                c = vminq_s32(c, vdupq_n_s32(INT8_MOST)); /* two roundings may exceed it */
                sum = vaddq_s32(sum, c);
                int16x4_t low = vmovn_s32(c), high = vshr_n_s16(vadd_s16(low, vdup_n_s16(128)), 8);
                int at = (b * 8 + g) * ROWS + r;
                vst1_lane_s32(to.low + at, vreinterpret_s32_s8(vmovn_s16(vcombine_s16(low, low))),
                              0);
                vst1_lane_s32(to.high + at,
                              vreinterpret_s32_s8(vmovn_s16(vcombine_s16(high, high))), 0);
            }
            to.scale[b * ROWS + r] = inverse > 0 ? factor / inverse : 0.0f;
            to.sum[b * ROWS + r] = vaddvq_s32(sum);
        }
}

/* Four components of 4 keys, as signed bytes. */
INLINE int8x16_t int8_keys(enum dtype type, const struct attn_block *b, int i, int block, int g)
{
    const int8_t *k = b->k[i];
    if (type == DT_Q8_0)
        return vld1q_s8(k + (size_t)(block * 8 + g) * b->k_stride * 4);
    uint8x16_t x = vreinterpretq_u8_s8(vld1q_s8(k + (size_t)(block * 4 + g % 4) * b->k_stride * 4));
    return vreinterpretq_s8_u8(g >= 4 ? vshrq_n_u8(x, 4) : vandq_u8(x, vdupq_n_u8(15)));
}

/* The g-th four codes of ROWS queries: row r in lane r. */
INLINE int8x16_t int8_codes(const int32_t *codes, int block, int g)
{
    return vreinterpretq_s8_s32(vld1q_s32(codes + (block * 8 + g) * ROWS));
}

INLINE int32x4_t int8_dot(int32x4_t acc, int8x16_t k, int8x16_t q, const int r)
{
    return r == 0   ? vdotq_laneq_s32(acc, k, q, 0)
           : r == 1 ? vdotq_laneq_s32(acc, k, q, 1)
           : r == 2 ? vdotq_laneq_s32(acc, k, q, 2)
                    : vdotq_laneq_s32(acc, k, q, 3);
}

/* s[r, i*VW ..] = q[r] . K for vector i of keys */
INLINE void scores_int8(enum dtype type, int rows, const struct attn_tile *t,
                        const struct attn_block *b, int i, int dim)
{
    struct int8_queries q = int8_queries(t->q, dim);
    VEC acc[ROWS];
    UNROLL
    for (int r = 0; r < rows; r++)
        acc[r] = vec_set(0.0f);
    for (int block = 0; block < dim / KV_BLOCK; block++) {
        int32x4_t high[ROWS], low[ROWS];
        UNROLL
        for (int r = 0; r < rows; r++) {
            high[r] = vdupq_n_s32(0);
            low[r] = vdupq_n_s32(type == DT_Q4_0 ? -8 * q.sum[block * ROWS + r] : 0);
        }
        UNROLL
        for (int g = 0; g < 8; g++) {
            int8x16_t k = int8_keys(type, b, i, block, g);
            int8x16_t h = int8_codes(q.high, block, g), l = int8_codes(q.low, block, g);
            UNROLL
            for (int r = 0; r < rows; r++) {
                high[r] = int8_dot(high[r], k, h, r);
                low[r] = int8_dot(low[r], k, l, r);
            }
        }
        VEC scale = key_scale(type, b, i, block);
        UNROLL
        for (int r = 0; r < rows; r++) {
            int32x4_t sum = vaddq_s32(vshlq_n_s32(high[r], 8), low[r]);
            VEC x = vec_mul(vcvtq_f32_s32(sum), vec_set(q.scale[block * ROWS + r]));
            acc[r] = vec_fma(x, scale, acc[r]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        vec_store(t->s + r * ATTN_BLOCK + i * VW, acc[r]);
}
#else

#ifdef __AVX512F__
#define INTS            __m512i
#define ints_load(p)    _mm512_loadu_si512(p)
#define ints_set(x)     _mm512_set1_epi32(x)
#define ints_and(a, b)  _mm512_and_si512(a, b)
#define ints_up(x, n)   _mm512_slli_epi16(x, n)
#define ints_down(x, n) _mm512_srli_epi16(x, n)
#define ints_sign(x)    _mm512_srai_epi16(x, 8)
#define ints_dot(a, b)  _mm512_madd_epi16(a, b)
#define ints_add(a, b)  _mm512_add_epi32(a, b)
#define ints_float(x)   _mm512_cvtepi32_ps(x)
#define ints_round(x)   _mm512_cvtps_epi32(x)
#else
#define INTS            __m256i
#define ints_load(p)    _mm256_loadu_si256((const __m256i *)(p))
#define ints_set(x)     _mm256_set1_epi32(x)
#define ints_and(a, b)  _mm256_and_si256(a, b)
#define ints_up(x, n)   _mm256_slli_epi16(x, n)
#define ints_down(x, n) _mm256_srli_epi16(x, n)
#define ints_sign(x)    _mm256_srai_epi16(x, 8)
#define ints_dot(a, b)  _mm256_madd_epi16(a, b)
#define ints_add(a, b)  _mm256_add_epi32(a, b)
#define ints_float(x)   _mm256_cvtepi32_ps(x)
#define ints_round(x)   _mm256_cvtps_epi32(x)
#endif

static void load_int8(const float *const *from, int rows, int dim, float factor, float *q)
{
    struct int8_queries to = int8_queries(q, dim);
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < dim / KV_BLOCK; b++) {
            const float *x = from[r] + b * KV_BLOCK;
            VEC most = vec_set(0.0f);
            for (int i = 0; i < KV_BLOCK; i += VW)
                most = vec_max(most,
                               vec_max(vec_load(x + i), vec_sub(vec_set(0.0f), vec_load(x + i))));
            float max = vec_hmax(most);
            float inverse = max > 0 ? (float)INT8_MOST / max : 0.0f;
            int32_t codes[KV_BLOCK], sum = 0;
            for (int i = 0; i < KV_BLOCK; i += VW) {
                INTS c = ints_round(vec_mul(vec_load(x + i), vec_set(inverse)));
                memcpy(codes + i, &c, sizeof c);
            }
            for (int i = 0; i < KV_BLOCK; i++) {
                codes[i] =
                    codes[i] < INT8_MOST ? codes[i] : INT8_MOST; /* two roundings may exceed it */
                sum += codes[i];
            }
            for (int g = 0; g < 8; g++) {
                const int32_t *c = codes + 4 * g;
                int at = (b * 8 + g) * ROWS + r;
                to.high[at] = (int32_t)((uint32_t)(uint16_t)c[0] | (uint32_t)c[2] << 16);
                to.low[at] = (int32_t)((uint32_t)(uint16_t)c[1] | (uint32_t)c[3] << 16);
            }
            to.scale[b * ROWS + r] = inverse > 0 ? factor / inverse : 0.0f;
            to.sum[b * ROWS + r] = sum;
        }
}

/* s[r, i*VW ..] = q[r] . K for vector i of keys */
INLINE void scores_int8(enum dtype type, int rows, const struct attn_tile *t,
                        const struct attn_block *b, int i, int dim)
{
    struct int8_queries q = int8_queries(t->q, dim);
    const INTS nibble = ints_set(0x000f000f);
    VEC acc[ROWS];
    UNROLL
    for (int r = 0; r < rows; r++)
        acc[r] = vec_set(0.0f);
    for (int block = 0; block < dim / KV_BLOCK; block++) {
        INTS sum[ROWS];
        UNROLL
        for (int r = 0; r < rows; r++)
            sum[r] = ints_set(type == DT_Q4_0 ? -8 * q.sum[block * ROWS + r] : 0);
        UNROLL
        for (int g = 0; g < 8; g++) {
            const int32_t *even = q.high + (block * 8 + g) * ROWS;
            const int32_t *odd = q.low + (block * 8 + g) * ROWS;
            INTS x, k0, k1; /* components 0 and 2 of four; 1 and 3 */
            if (type == DT_Q8_0) {
                x = ints_load((const char *)b->k[i] + (size_t)(block * 8 + g) * b->k_stride * 4);
                k0 = ints_sign(ints_up(x, 8));
                k1 = ints_sign(x);
            } else {
                x = ints_load((const char *)b->k[i] +
                              (size_t)(block * 4 + g % 4) * b->k_stride * 4);
                k0 = ints_and(g < 4 ? x : ints_down(x, 4), nibble);
                k1 = g < 4 ? ints_and(ints_down(x, 8), nibble) : ints_down(x, 12);
            }
            UNROLL
            for (int r = 0; r < rows; r++) {
                sum[r] = ints_add(sum[r], ints_dot(k0, ints_set(even[r])));
                sum[r] = ints_add(sum[r], ints_dot(k1, ints_set(odd[r])));
            }
        }
        for (size_t at = 0; at < KV_BLOCK * b->v_step; at += 64)
            __builtin_prefetch(
                (const char *)b->next->v_tile[i] + (size_t)block * KV_BLOCK * b->v_step + at, 0, 2);
        VEC scale = key_scale(type, b, i, block);
        UNROLL
        for (int r = 0; r < rows; r++) {
            VEC x = vec_mul(ints_float(sum[r]), vec_set(q.scale[block * ROWS + r]));
            acc[r] = vec_fma(x, scale, acc[r]);
        }
    }
    UNROLL
    for (int r = 0; r < rows; r++)
        vec_store(t->s + r * ATTN_BLOCK + i * VW, acc[r]);
}
#endif

#endif
