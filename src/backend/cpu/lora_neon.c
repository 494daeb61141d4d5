/* Low-rank products of adapters for NEON. */
#define KERNEL neon
#include "backend/cpu/lora_kernel.h"
