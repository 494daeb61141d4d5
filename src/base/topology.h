/*
 * What the CPUs that this process may use are: cores and threads of cores (SMT), sockets, NUMA nodes, and cores of two
 * speeds (performance and efficiency). Read from sysfs, whose files are checked like any input. It describes; the number of
 * threads is chosen elsewhere (pool.h).
 */
#ifndef STEEL_BASE_TOPOLOGY_H
#define STEEL_BASE_TOPOLOGY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TOPOLOGY_CPUS = 4096, TOPOLOGY_NODES = 256 };

/* A set of CPUs. */
struct cpu_list {
    uint64_t bits[TOPOLOGY_CPUS / 64];
};

struct topology {
    int n_cpus, n_cores, n_sockets, n_nodes;
    int n_slow; /* cores that are slower than the fastest; 0 = all are equal */
};

/* A list such as "0-3,8,10-11". False: it is malformed, or names a CPU beyond the set. */
bool cpu_list_parse(const char *text, struct cpu_list *out);
static inline bool cpu_list_has(const struct cpu_list *l, int cpu)
{
    return l->bits[cpu / 64] >> cpu % 64 & 1;
}

/* Of the CPUs that are online and in `allowed` (NULL = all). False: there are no such files. `root` is prepended to paths: ""
 * except in tests. */
bool topology_read(const char *root, const struct cpu_list *allowed, struct topology *out);
/* "8 cores, 2 threads each, 2 sockets, 2 NUMA nodes". Where cores differ in speed they differ in threads, too, which are left
 * out. */
void topology_describe(const struct topology *t, char *out, size_t size);

#endif
