/* Values of 4-bit codes, as value + 128: the form of 8-bit codes in dot products. */
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

/* Levels of formats with levels of at most +-62, as level + 64: unsigned, and small enough that two
 * products with 8-bit inputs add up in 16 bits. Codes past the last level are unused. */
enum { LEVEL_ZERO = 64 };
static const uint8_t levels_iq3s[16] = {65, 67, 69, 71, 73, 75, 77, 79,
                                        63, 61, 59, 57, 55, 53, 51, 49};
static const uint8_t levels_iq3xxs[16] = {68, 76, 84, 92, 100, 108, 116, 126,
                                          60, 52, 44, 36, 28,  20,  12,  2};
static const uint8_t levels_iq2[16] = {72, 89, 107, 64, 56, 39, 21, 64};
/* The third bit subtracts 1 from -8, 0 and 8 instead of adding it. */
static const uint8_t levels_iq1[16] = {57, 65, 73, 64, 55, 63, 71, 64};
/* Twice the E2M1 values; the scale is halved. */
static const uint8_t levels_fp4[16] = {64, 65, 66, 67, 68, 70, 72, 76,
                                       64, 63, 62, 61, 60, 58, 56, 52};

#endif
