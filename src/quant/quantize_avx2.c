/* quantize_lanes.h compiled for AVX2. */
#define QUANTIZE_ISA quantize_avx2
#include "quant/quantize_lanes.h"
