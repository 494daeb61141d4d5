/* Reads sysfs: see topology.h. */
#include "base/topology.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CPUS "/sys/devices/system/cpu"

/* Cores whose capacity is below this part of the largest are slower ones. */
static const double SLOW = 0.85;

bool cpu_list_parse(const char *text, struct cpu_list *out)
{
    *out = (struct cpu_list){0};
    const char *p = text;
    while (*p && *p != '\n') {
        char *end;
        if (*p < '0' || *p > '9')
            return false;
        long first = strtol(p, &end, 10), last = first;
        if (*end == '-' && end[1] >= '0' && end[1] <= '9')
            last = strtol(end + 1, &end, 10);
        if (first > last || last >= TOPOLOGY_CPUS)
            return false;
        for (long i = first; i <= last; i++)
            out->bits[i / 64] |= (uint64_t)1 << i % 64;
        p = end;
        if (*p == ',' && p[1] && p[1] != '\n')
            p++;
        else if (*p && *p != '\n')
            return false;
    }
    return true;
}

static bool read_text(char *text, size_t size, const char *root, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
static bool read_text(char *text, size_t size, const char *root, const char *fmt, ...)
{
    char path[PATH_MAX];
    int n = snprintf(path, sizeof path, "%s", root);
    va_list ap;
    if (n < 0 || (size_t)n >= sizeof path)
        return false;
    va_start(ap, fmt);
    vsnprintf(path + n, sizeof path - (size_t)n, fmt, ap);
    va_end(ap);
    FILE *f = fopen(path, "re");
    bool ok = f && fgets(text, (int)size, f);
    if (f)
        fclose(f);
    return ok;
}

/* A number of a CPU's folder, or `fallback`. */
static int cpu_number(const char *root, int cpu, const char *file, int fallback)
{
    char text[64], *end;
    if (!read_text(text, sizeof text, root, CPUS "/cpu%d/%s", cpu, file))
        return fallback;
    long v = strtol(text, &end, 10);
    return end == text || v < 0 || v > INT_MAX ? fallback : (int)v;
}

static int first_of(const struct cpu_list *l, int fallback)
{
    for (int i = 0; i < TOPOLOGY_CPUS; i++)
        if (cpu_list_has(l, i))
            return i;
    return fallback;
}

/* The first CPU of a CPU's core. */
static int core_of(const char *root, int cpu)
{
    static const char *const files[] = {"core_cpus_list", "thread_siblings_list"};
    char text[512];
    struct cpu_list l;
    for (int i = 0; i < 2; i++)
        if (read_text(text, sizeof text, root, CPUS "/cpu%d/topology/%s", cpu, files[i]) &&
            cpu_list_parse(text, &l))
            return first_of(&l, cpu);
    return cpu;
}

static int count_nodes(const char *root, const struct cpu_list *used)
{
    char text[8192];
    struct cpu_list of;
    int n = 0;
    for (int i = 0; i < TOPOLOGY_NODES; i++) {
        if (!read_text(text, sizeof text, root, "/sys/devices/system/node/node%d/cpulist", i) ||
            !cpu_list_parse(text, &of))
            continue;
        bool any = false;
        for (size_t k = 0; k < sizeof of.bits / sizeof *of.bits; k++)
            any |= (of.bits[k] & used->bits[k]) != 0;
        n += any;
    }
    return n > 0 ? n : 1;
}

/* Speeds of cores: x86 lists its efficiency cores, ARM gives each CPU a capacity. */
static int count_slow(const char *root, const struct cpu_list *cores)
{
    char text[8192];
    struct cpu_list atoms;
    int n = 0, most = 0;
    bool listed = read_text(text, sizeof text, root, "/sys/devices/cpu_atom/cpus") &&
                  cpu_list_parse(text, &atoms);
    for (int i = 0; i < TOPOLOGY_CPUS && !listed; i++) {
        int capacity = cpu_list_has(cores, i) ? cpu_number(root, i, "cpu_capacity", 0) : 0;
        most = capacity > most ? capacity : most;
    }
    int all = 0;
    for (int i = 0; i < TOPOLOGY_CPUS; i++) {
        if (!cpu_list_has(cores, i))
            continue;
        all++;
        n += listed ? cpu_list_has(&atoms, i)
                    : most && cpu_number(root, i, "cpu_capacity", most) < SLOW * most;
    }
    return n < all ? n : 0;
}

static bool is_in(const int *list, int n, int v)
{
    for (int i = 0; i < n; i++)
        if (list[i] == v)
            return true;
    return false;
}

bool topology_read(const char *root, const struct cpu_list *allowed, struct topology *out)
{
    enum { SOCKETS = 64 };
    char text[8192];
    struct cpu_list online, cores = {0};
    int sockets[SOCKETS] = {0};
    *out = (struct topology){0};
    if (!read_text(text, sizeof text, root, CPUS "/online") || !cpu_list_parse(text, &online))
        return false;
    for (size_t k = 0; allowed && k < sizeof online.bits / sizeof *online.bits; k++)
        online.bits[k] &= allowed->bits[k];
    for (int i = 0; i < TOPOLOGY_CPUS; i++) {
        if (!cpu_list_has(&online, i))
            continue;
        int core = core_of(root, i),
            socket = cpu_number(root, i, "topology/physical_package_id", 0);
        out->n_cpus++;
        cores.bits[core / 64] |= (uint64_t)1 << core % 64;
        if (out->n_sockets < SOCKETS && !is_in(sockets, out->n_sockets, socket))
            sockets[out->n_sockets++] = socket;
    }
    for (int i = 0; i < TOPOLOGY_CPUS; i++)
        out->n_cores += cpu_list_has(&cores, i);
    out->n_nodes = count_nodes(root, &online);
    out->n_slow = count_slow(root, &cores);
    return out->n_cpus > 0;
}

void topology_describe(const struct topology *t, char *out, size_t size)
{
    char threads[48] = "", speeds[80] = "", sockets[32] = "", nodes[32] = "";
    if (t->n_cpus > t->n_cores)
        snprintf(threads, sizeof threads, ", %d threads each",
                 (t->n_cpus + t->n_cores - 1) / t->n_cores);
    if (t->n_slow)
        snprintf(speeds, sizeof speeds, ", %d for performance and %d for efficiency",
                 t->n_cores - t->n_slow, t->n_slow);
    if (t->n_sockets > 1)
        snprintf(sockets, sizeof sockets, ", %d sockets", t->n_sockets);
    if (t->n_nodes > 1)
        snprintf(nodes, sizeof nodes, ", %d NUMA nodes", t->n_nodes);
    snprintf(out, size, "%d core%s%s%s%s%s", t->n_cores, t->n_cores == 1 ? "" : "s",
             t->n_slow ? "" : threads, speeds, sockets, nodes);
}
