/*
 * Packed panels with AVX2: a vector holds half a panel (8 rows). maddubs adds pairs of byte products in 16
 * bits, which cannot overflow for codes up to 63. For full 8-bit codes the sign is first moved to the
 * other factor.
 */
#include "backend/cpu/gemm_vec_avx2.h"

#define X_QUANTIZE     input_quantize_avx2
#define NAME(x)        x##_avx2
#define vi_start(init) ((void)(init), vi_zero())
#define vi_load8(p)    _mm256_xor_si256(vi_load(p), _mm256_set1_epi8((char)0x80))
#define vi_table(t)                                                                                \
    _mm256_xor_si256(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(t))),           \
                     _mm256_set1_epi8((char)0x80))

static inline __m256i vi_dot(__m256i acc, __m256i u, __m256i s)
{
    __m256i pairs = _mm256_maddubs_epi16(u, s);
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

/* u is signed here: vi_load8 and vi_table have subtracted the 128. */
static inline __m256i vi_dot8(__m256i acc, __m256i u, __m256i s)
{
    return vi_dot(acc, _mm256_abs_epi8(u), _mm256_sign_epi8(s, u));
}

#include "backend/cpu/gemm_int8_kernel.h"
