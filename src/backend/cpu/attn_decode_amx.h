/* Attention kernels (attn.h) for few query rows on AMX: see attn_decode_amx.c. */
#ifndef STEEL_BACKEND_CPU_ATTN_DECODE_AMX_H
#define STEEL_BACKEND_CPU_ATTN_DECODE_AMX_H

#include "backend/cpu/attn.h"

/* for Q4_0 keys and values; for FP8 */
extern const struct attn_kernels attn_kernels_amx_q4, attn_kernels_amx_fp8;

#endif
