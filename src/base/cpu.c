/*
 * CPU detection. x86: CPUID lists the instructions, XGETBV the registers that the system saves. For AMX a process must
 * request permission from the kernel. ARM: the auxiliary vector lists the instructions.
 * CPU quota: a container limited to two of 64 CPUs still sees 64 in its affinity mask. The limit is in the files of
 * its cgroup and of the parents. Inside a container the mount's root is often the process's own cgroup, so paths are
 * relative to the mount's root.
 */
#include "base/cpu.h"

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>
#ifdef __x86_64__
#include <cpuid.h>
#elif defined __aarch64__
#include <sys/auxv.h>
#endif

static const struct {
    const char *name;
    enum isa isa;
} named[] = {{"ref", ISA_REF}, {"avx2", ISA_AVX2}, {"avx512", ISA_AVX512},   {"vnni", ISA_VNNI},
             {"amx", ISA_AMX}, {"neon", ISA_NEON}, {"dotprod", ISA_DOTPROD}, {"i8mm", ISA_I8MM}};
#ifdef __aarch64__
#define SETS "neon, dotprod or i8mm"
#else
#define SETS "avx2, avx512, vnni or amx"
#endif
enum { N_NAMED = (int)(sizeof named / sizeof *named) };

const char *isa_name(enum isa isa)
{
    for (int i = 0; i < N_NAMED; i++)
        if (named[i].isa == isa)
            return named[i].name;
    return "several";
}

bool isa_at(int i, enum isa *isa)
{
    for (int k = 0; k < N_NAMED; k++)
        if (isa_has(isa_best(), named[k].isa) && i-- == 0) {
            *isa = named[k].isa;
            return true;
        }
    return false;
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
#elif defined __aarch64__
enum isa isa_best(void)
{
    enum { DOT_PRODUCTS = 1 << 20, MATRIX_PRODUCTS = 1 << 13 }; /* bits of the kernel's interface */
    if (!(getauxval(AT_HWCAP) & DOT_PRODUCTS))
        return ISA_NEON;
    return getauxval(AT_HWCAP2) & MATRIX_PRODUCTS ? ISA_I8MM : ISA_DOTPROD;
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
    for (int i = 0; i < N_NAMED; i++) {
        if (strcasecmp(want, named[i].name))
            continue;
        if (!isa_has(*isa, named[i].isa))
            return error_set(err, "STEEL_ISA=%s: this machine has no more than %s", want,
                             isa_name(*isa));
        *isa = named[i].isa;
        return true;
    }
    return error_set(err, "STEEL_ISA=%s: unknown; use ref, " SETS, want);
}

bool cpu_is_amd(void)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
#else
    return false;
#endif
}

/* Quota */

/* Whether the comma-separated `list` contains `word`. */
static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);
    for (const char *p = list; (p = strstr(p, word)); p += n)
        if ((p == list || p[-1] == ',') && (p[n] == '\0' || p[n] == ','))
            return true;
    return false;
}

/* The process's cgroup in the hierarchy that limits CPU time: number 0 in v2, the one with "cpu" in v1. */
static bool find_group(const char *root, bool v2, char *group, size_t cap)
{
    char path[PATH_MAX], line[PATH_MAX + 256];
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *f = fopen(path, "r");
    if (!f)
        return false;
    bool found = false;
    while (!found && fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = '\0';
        char *list = strchr(line, ':'), *name = list ? strchr(list + 1, ':') : NULL;
        if (!name)
            continue;
        *list++ = *name++ = '\0';
        found = v2 ? !strcmp(line, "0") && !*list : has_word(list, "cpu");
        if (found)
            snprintf(group, cap, "%s", name);
    }
    fclose(f);
    return found;
}

/* The quota of one cgroup in CPUs, rounded up; 0 = no limit, or no such files. */
static int read_quota(const char *folder, bool v2)
{
    char path[2 * PATH_MAX + 32], text[64] = "";
    long long quota = 0, period = 0;
    snprintf(path, sizeof path, "%s/%s", folder, v2 ? "cpu.max" : "cpu.cfs_quota_us");
    FILE *f = fopen(path, "r");
    if (!f)
        return 0;
    bool some = fgets(text, sizeof text, f) != NULL;
    fclose(f);
    if (!some || sscanf(text, "%lld %lld", &quota, &period) < 1) /* v2: "max 100000" has none */
        return 0;
    if (!v2) {
        snprintf(path, sizeof path, "%s/cpu.cfs_period_us", folder);
        if (!(f = fopen(path, "r")))
            return 0;
        some = fscanf(f, "%lld", &period) == 1;
        fclose(f);
    }
    if (!some || quota <= 0 || period <= 0)
        return 0;
    long long cpus = quota / period + (quota % period != 0);
    return cpus < INT_MAX ? (int)cpus : INT_MAX;
}

/* The smallest quota from the process's cgroup up to the root of the mounted hierarchy. */
static int mount_quota(const char *root, const char *top, const char *point, bool v2)
{
    char group[PATH_MAX], folder[2 * PATH_MAX];
    if (!find_group(root, v2, group, sizeof group))
        return 0;
    size_t n = strcmp(top, "/") ? strlen(top) : 0;
    bool inside = !strncmp(group, top, n) && (group[n] == '/' || group[n] == '\0');
    snprintf(folder, sizeof folder, "%s%s%s", root, point, inside ? group + n : "");
    size_t least = strlen(root) + strlen(point);
    int best = 0;
    for (;;) {
        size_t len = strlen(folder);
        while (len > least && folder[len - 1] == '/')
            folder[--len] = '\0';
        int cpus = read_quota(folder, v2);
        if (cpus && (!best || cpus < best))
            best = cpus;
        if (len <= least)
            return best;
        *strrchr(folder, '/') = '\0';
    }
}

int cpu_quota(const char *root)
{
    char path[PATH_MAX], line[3 * PATH_MAX], top[PATH_MAX], point[PATH_MAX];
    snprintf(path, sizeof path, "%s/proc/self/mountinfo", root);
    FILE *f = fopen(path, "r");
    if (!f)
        return 0;
    int best = 0;
    /* "36 35 0:30 ROOT POINT options... - TYPE SOURCE options" */
    while (fgets(line, sizeof line, f)) {
        char type[64], options[1024];
        const char *rest = strstr(line, " - ");
        if (!rest || sscanf(line, "%*s %*s %*s %4095s %4095s", top, point) != 2 ||
            sscanf(rest, " - %63s %*s %1023s", type, options) != 2)
            continue;
        bool v2 = !strcmp(type, "cgroup2");
        if (!v2 && (strcmp(type, "cgroup") || !has_word(options, "cpu")))
            continue;
        int cpus = mount_quota(root, top, point, v2);
        if (cpus && (!best || cpus < best))
            best = cpus;
    }
    fclose(f);
    return best;
}
