/* quantize_lanes.h compiled for NEON. */
#define QUANTIZE_ISA quantize_neon
#include "quant/quantize_lanes.h"
