/* The 256-bit vectors of gemm_int8_kernel.h and gemm_float_kernel.h. */
#include <immintrin.h>
#include <stdint.h>

#define V_LANES               8
#define MAX_T                 4
#define VI                    __m256i
#define VF                    __m256
#define v_prefetch(p)         _mm_prefetch((const char *)(p), _MM_HINT_T1)
#define vi_zero()             _mm256_setzero_si256()
#define vi_load(p)            _mm256_loadu_si256((const __m256i *)(p))
#define vi_set1_8(x)          _mm256_set1_epi8(x)
#define vi_set1_32(x)         _mm256_set1_epi32(x)
#define vi_and(a, b)          _mm256_and_si256(a, b)
#define vi_or_and(a, b, mask) _mm256_or_si256(a, _mm256_and_si256(b, mask))
#define vi_sll16(a, n)        _mm256_slli_epi16(a, n)
#define vi_srl16(a, n)        _mm256_srli_epi16(a, n)
#define vi_high4(a, nib)      vi_and(vi_srl16(a, 4), nib)
#define vi_sll32(a, n)        _mm256_slli_epi32(a, n)
#define vi_srl32(a, n)        _mm256_srli_epi32(a, n)
#define vi_sra32(a, n)        _mm256_srai_epi32(a, n)
#define vi_sub32(a, b)        _mm256_sub_epi32(a, b)
#define vi_to_f(a)            _mm256_cvtepi32_ps(a)
#define vi_load_u16(p)        _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define vi_load_u8(p)         _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define vi_lookup(table, i)   _mm256_shuffle_epi8(table, i)
#define vi_levels(t)          _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(t)))
#define vf_from_bits(v)       _mm256_castsi256_ps(v)
#define vf_zero()             _mm256_setzero_ps()
#define vf_set1(x)            _mm256_set1_ps(x)
#define vf_load(p)            _mm256_loadu_ps(p)
#define vf_store(p, v)        _mm256_storeu_ps(p, v)
#define vf_add(a, b)          _mm256_add_ps(a, b)
#define vf_mul(a, b)          _mm256_mul_ps(a, b)
#define vf_fma(a, b, c)       _mm256_fmadd_ps(a, b, c)
#define vf_fnma(a, b, c)      _mm256_fnmadd_ps(a, b, c)
#define vf_load_f16(p)        _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))

/* The levels of 8 bytes' low nibbles (w0) and high nibbles (w1); levels: (16). A look-up reads three
 * bits; the fourth, as a sign bit, chooses between two. */
static inline __attribute__((always_inline)) void
vf_load_levels(const uint8_t *p, const float *levels, __m256 *w0, __m256 *w1)
{
    __m256i v = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)),
            u = _mm256_srli_epi32(v, 4);
    __m256 low = _mm256_loadu_ps(levels), high = _mm256_loadu_ps(levels + 8);
    *w0 = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, v), _mm256_permutevar8x32_ps(high, v),
                           _mm256_castsi256_ps(_mm256_slli_epi32(v, 28)));
    *w1 = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, u), _mm256_permutevar8x32_ps(high, u),
                           _mm256_castsi256_ps(_mm256_slli_epi32(u, 28)));
}

/* Half of 2^(e - 127), exact for subnormal results too. */
static inline __m256 vf_load_e8m0_half(const uint8_t *p)
{
    __m256i e = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
    __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, _mm256_set1_epi32(1)), 23);
    __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
    __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, small));
}
