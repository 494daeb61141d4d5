/* What 4-bit codes stand for, as value + 128: the form that dot products take 8-bit codes in. */
#ifndef STEEL_BACKEND_CPU_GEMM_TABLES_H
#define STEEL_BACKEND_CPU_GEMM_TABLES_H

#include <stdint.h>

static const uint8_t table_q4_0[16] = {120, 121, 122, 123, 124, 125, 126, 127,
                                       128, 129, 130, 131, 132, 133, 134, 135};
static const uint8_t table_iq4[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                      129, 141, 153, 166, 181, 197, 217, 241};
/* Twice the E2M1 values; the scale is halved. */
static const uint8_t table_mxfp4[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                        128, 127, 126, 125, 124, 122, 120, 116};

#endif
