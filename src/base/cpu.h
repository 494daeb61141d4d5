/* What this CPU can do and may use. AMX counts only when the kernel granted the tile state. */
#ifndef STEEL_BASE_CPU_H
#define STEEL_BASE_CPU_H

#include "base/error.h"

/* Ordered: each includes the ones before it. */
enum isa { ISA_REF, ISA_AVX2, ISA_AVX512, ISA_VNNI, ISA_AMX };

const char *isa_name(enum isa isa);
enum isa isa_best(void); /* of this machine */
/* The best, or what STEEL_ISA forces; an unknown or unavailable one is an error that says so. */
bool isa_choose(enum isa *isa, struct error *err);

#endif
