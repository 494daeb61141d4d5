/*
 * The read bandwidth of this machine's memory, using all threads of a benchmark: the limit of
 * single-sequence generation on a CPU. It is measured between the test's repetitions, because on a
 * shared machine it changes from second to second. Owns one gigabyte, more than any cache, while
 * open.
 */
#ifndef STEEL_CLI_BENCH_MEMORY_H
#define STEEL_CLI_BENCH_MEMORY_H

#include "base/error.h"

#include <stdbool.h>

struct bench_memory;

struct bench_memory *bench_memory_new(int threads, struct error *err); /* threads 0: one per CPU */
void bench_memory_free(struct bench_memory *m);                        /* NULL is allowed */
double
bench_memory_read(struct bench_memory *m); /* reads all of it once; returns bytes per second */

#endif
