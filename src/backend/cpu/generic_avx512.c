/* The generic kernel with AVX-512. See generic_kernel.h. */
#include <immintrin.h>

#define V_T            __m512
#define V_LEN          16
#define V_ZERO()       _mm512_setzero_ps()
#define V_LOAD(p)      _mm512_loadu_ps(p)
#define V_FMA(a, b, c) _mm512_fmadd_ps(a, b, c)
#define V_SUM(v)       _mm512_reduce_add_ps(v)

#include "backend/cpu/generic_kernel.h"

void mm_generic_avx512(const struct mm_call *c)
{
    generic(c);
}
