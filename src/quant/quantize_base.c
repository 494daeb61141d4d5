/* quantize_lanes.h compiled for any machine. */
#define QUANTIZE_ISA quantize_base
#include "quant/quantize_lanes.h"
