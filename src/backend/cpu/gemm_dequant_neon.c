/* Any weight, dequantised to floats, with NEON. See gemm_dequant_kernel.h. */
#include <arm_neon.h>

#define NAME(x)        x##_neon
#define V_T            float32x4_t
#define V_LEN          4
#define V_ZERO()       vdupq_n_f32(0.0f)
#define V_LOAD(p)      vld1q_f32(p)
#define V_FMA(a, b, c) vfmaq_f32(c, a, b)
#define V_SUM(v)       vaddvq_f32(v)

#include "backend/cpu/gemm_dequant_kernel.h"
