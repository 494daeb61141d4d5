/* Names of this architecture's smallest set of kernels and of the next one, for tests of what all sets share. */
#ifndef STEEL_TESTS_ISAS_H
#define STEEL_TESTS_ISAS_H

#include "base/cpu.h"

#ifdef __aarch64__
#define FIRST_ISA   ISA_NEON
#define FIRST_NAME  "neon"
#define SECOND_NAME "dotprod"
#define SECOND_ISA  ISA_DOTPROD
#define NO_KERNELS  "skipped: no kernels for this machine"
#else
#define FIRST_ISA   ISA_AVX2
#define FIRST_NAME  "avx2"
#define SECOND_NAME "avx512"
#define SECOND_ISA  ISA_AVX512
#define NO_KERNELS  "skipped: this machine has no AVX2"
#endif

#endif
