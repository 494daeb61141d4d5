/* quantize_lanes.h compiled for AVX512. */
#define QUANTIZE_ISA quantize_avx512
#include "quant/quantize_lanes.h"
