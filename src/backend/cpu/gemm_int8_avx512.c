/*
 * Packed panels with AVX-512 without VNNI. maddubs adds pairs of byte products in 16 bits, which cannot
 * overflow for codes up to 63. For full 8-bit codes the sign is first moved to the other factor.
 */
#include "backend/cpu/gemm_vec_avx512.h"

#define X_QUANTIZE     input_quantize_avx512
#define NAME(x)        x##_avx512
#define vi_start(init) ((void)(init), vi_zero())
#define vi_load8(p)    _mm512_xor_si512(vi_load(p), _mm512_set1_epi8((char)0x80))
#define vi_table(t)                                                                                \
    _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(t))),                \
                     _mm512_set1_epi8((char)0x80))

static inline __m512i vi_dot(__m512i acc, __m512i u, __m512i s)
{
    __m512i pairs = _mm512_maddubs_epi16(u, s);
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}

/* u is signed here: vi_load8 and vi_table have subtracted the 128. */
static inline __m512i vi_dot8(__m512i acc, __m512i u, __m512i s)
{
    __mmask64 negative = _mm512_movepi8_mask(u);
    return vi_dot(acc, _mm512_abs_epi8(u),
                  _mm512_mask_sub_epi8(s, negative, _mm512_setzero_si512(), s));
}

#define FEW_PASSES
#include "backend/cpu/gemm_int8_kernel.h"
