/* The CPU's instruction sets, and how many CPUs this process may use. AMX counts only if the kernel grants the tile
 * state. */
#ifndef STEEL_BASE_CPU_H
#define STEEL_BASE_CPU_H

#include "base/error.h"

/* A set of instruction-set features: ISA_REF is the empty set, plain C. The constants are the sets that kernels are
 * written for and that STEEL_ISA names. Each set includes the ones of its architecture before it. */
enum isa {
    ISA_REF = 0,
    ISA_AVX2 = 1, /* with FMA and F16C */
    ISA_AVX512 = ISA_AVX2 | 2,
    ISA_VNNI = ISA_AVX512 | 4, /* with VBMI */
    ISA_AMX = ISA_VNNI | 8,
    ISA_NEON = 16, /* of Armv8.0 */
    ISA_DOTPROD = ISA_NEON | 32,
    ISA_I8MM = ISA_DOTPROD | 64,
};

/* Whether `have` includes all features of `needs`. */
static inline bool isa_has(enum isa have, enum isa needs)
{
    return (have & needs) == needs;
}

const char *isa_name(enum isa isa);
enum isa isa_best(void); /* everything this machine has */
/* The i-th named set that this machine has, smallest first (0 is ISA_REF); false past the last. */
bool isa_at(int i, enum isa *isa);
/* Everything this machine has, or the set that STEEL_ISA names. An unknown or unavailable name is an error. */
bool isa_choose(enum isa *isa, struct error *err);

/* static TYPE NAME PARAMS runs NAME_loop ARGS, which must be inlined, compiled for this CPU's wider vectors if it has
 * them. For plain loops that are worth no kernels of their own. */
#ifdef __x86_64__
#define CPU_WIDE(type, name, params, args)                                                         \
    __attribute__((target("avx2"))) static type name##_avx2 params                                 \
    {                                                                                              \
        return name##_loop args;                                                                   \
    }                                                                                              \
    static type name params                                                                        \
    {                                                                                              \
        return __builtin_cpu_supports("avx2") ? name##_avx2 args : name##_loop args;               \
    }
#else
#define CPU_WIDE(type, name, params, args)                                                         \
    static type name params                                                                        \
    {                                                                                              \
        return name##_loop args;                                                                   \
    }
#endif

bool cpu_is_amd(void);

/* The CPU quota of this process's cgroups (v1 and v2), rounded up; 0 = no limit. `root` is prepended to the paths of
 * /proc and of the mounts: "" except in tests. */
int cpu_quota(const char *root);

#endif
