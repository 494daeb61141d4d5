/* Low-rank products of adapters for AVX2. */
#define KERNEL avx2
#include "backend/cpu/lora_kernel.h"
