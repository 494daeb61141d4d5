/* Packed panels with AVX-512 VNNI: one instruction per 16 rows x 4 columns. For Zen 4, Ice Lake and later. */
#include "backend/cpu/gemm_vec_avx512.h"

#define X_QUANTIZE         input_quantize_avx512
#define NAME(x)            x##_vnni
#define vi_dot(acc, u, s)  vnni_dot(acc, u, s)
#define vi_dot8(acc, u, s) vnni_dot(acc, u, s)
#define vi_start(init)     vi_bcast(init) /* subtracts the 128 of the stored codes */
#define vi_load8(p)        vi_load(p)
#define vi_table(t)        _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(t)))

#include "backend/cpu/gemm_int8_kernel.h"
