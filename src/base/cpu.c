/* CPU detection: CPUID for the instructions, XGETBV for what the system saves, and for AMX the
 * permission a process must ask the kernel for. */
#include "base/cpu.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef __x86_64__
#include <cpuid.h>
#endif

static const char *const names[] = {"ref", "avx2", "avx512", "vnni", "amx"};

const char *isa_name(enum isa isa)
{
    return names[isa];
}

#ifdef __x86_64__
static uint64_t xcr0(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

static bool amx_permitted(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

enum isa isa_best(void)
{
    uint32_t a, b, c, d, b7, c7, d7, a71 = 0, unused;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return ISA_REF;
    bool osxsave = c >> 27 & 1, fma = c >> 12 & 1, f16c = c >> 29 & 1;
    if (!osxsave || !fma || !f16c || !__get_cpuid_count(7, 0, &a, &b7, &c7, &d7))
        return ISA_REF;
    __get_cpuid_count(7, 1, &a71, &unused, &unused, &unused);
    uint64_t saved = xcr0();
    bool avx2 = (b7 >> 5 & 1) && (b7 >> 8 & 1) && (saved & 6) == 6;
    bool avx512 = (b7 >> 16 & 1) && (b7 >> 17 & 1) && (b7 >> 30 & 1) && (b7 >> 31 & 1) &&
                  (saved & 0xe6) == 0xe6;
    bool vnni = (c7 >> 11 & 1) && (c7 >> 1 & 1);
    bool bf16 = a71 >> 5 & 1;
    bool amx = (d7 >> 24 & 1) && (d7 >> 25 & 1) && (d7 >> 22 & 1) && (saved >> 17 & 3) == 3;
    if (!avx2)
        return ISA_REF;
    if (!avx512)
        return ISA_AVX2;
    if (!vnni)
        return ISA_AVX512;
#ifdef AMX_EMULATE /* tiles in plain C (backend/cpu/amx.h), for tests */
    return bf16 ? ISA_AMX : ISA_VNNI;
#endif
    return amx && bf16 && amx_permitted() ? ISA_AMX : ISA_VNNI;
}
#else
enum isa isa_best(void)
{
    return ISA_REF;
}
#endif

bool isa_choose(enum isa *isa, struct error *err)
{
    *isa = isa_best();
    const char *want = getenv("STEEL_ISA");
    if (!want || !*want)
        return true;
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++) {
        if (strcasecmp(want, names[i]))
            continue;
        if ((enum isa)i > *isa)
            return error_set(err, "STEEL_ISA=%s: this machine has no more than %s", want,
                             names[*isa]);
        *isa = (enum isa)i;
        return true;
    }
    return error_set(err, "STEEL_ISA=%s: unknown; use ref, avx2, avx512, vnni or amx", want);
}
