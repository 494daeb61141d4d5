/*
 * Packed panels with AVX2: half a panel (8 rows) a vector. Byte products are added in pairs to 16
 * bits, which holds for codes up to 63; full 8-bit codes take their sign to the other factor first.
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

/* u is signed here: vi_load8 and vi_table took the 128 off. */
static inline __m256i vi_dot8(__m256i acc, __m256i u, __m256i s)
{
    return vi_dot(acc, _mm256_abs_epi8(u), _mm256_sign_epi8(s, u));
}

#include "backend/cpu/gemm_int8_kernel.h"
