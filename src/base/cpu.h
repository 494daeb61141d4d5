/* What this CPU can do and may use, and how much of the machine is ours. AMX counts only when the
 * kernel granted the tile state. */
#ifndef STEEL_BASE_CPU_H
#define STEEL_BASE_CPU_H

#include "base/error.h"

/* Ordered: each includes the ones before it. */
enum isa { ISA_REF, ISA_AVX2, ISA_AVX512, ISA_VNNI, ISA_AMX };

const char *isa_name(enum isa isa);
enum isa isa_best(void); /* of this machine */
/* The best, or what STEEL_ISA forces; an unknown or unavailable one is an error that says so. */
bool isa_choose(enum isa *isa, struct error *err);

/* CPUs that the cgroups (v1 and v2) of this process pay for, rounded up; 0: no limit. `root` stands
 * before the paths of /proc and of the mounts: "" but for tests. */
int cpu_quota(const char *root);

#endif
