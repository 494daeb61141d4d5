/*
 * How fast this machine's memory is read, by all threads of a benchmark: what a generation of one
 * sequence on a CPU is set against. Measured by turns with the tests, since on a machine that is
 * shared it changes from second to second. Owns a gigabyte, more than any cache holds, while it is open.
 */
#ifndef STEEL_CLI_BENCH_MEMORY_H
#define STEEL_CLI_BENCH_MEMORY_H

#include "base/error.h"

#include <stdbool.h>

struct bench_memory;

struct bench_memory *bench_memory_new(int threads, struct error *err); /* 0: as many as the CPUs */
void bench_memory_free(struct bench_memory *m);                        /* NULL is allowed */
double bench_memory_read(struct bench_memory *m); /* once over all of it: bytes per second */

#endif
