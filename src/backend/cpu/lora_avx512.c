/* Low-rank products of adapters for AVX512. */
#define KERNEL avx512
#include "backend/cpu/lora_kernel.h"
