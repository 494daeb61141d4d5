/*
 * TEST_SMALL, for machines on which every instruction is slow (tests/arm.sh under qemu-user; docs/arm.md says what
 * it leaves out):
 *   1        fewer shapes, rows, thread counts and cuts of prompts. Every kernel, format and cache type still runs.
 *   kernels  moreover only what depends on this CPU's kernels: nothing that plain C computes alone.
 */
#ifndef STEEL_TESTS_SIZE_H
#define STEEL_TESTS_SIZE_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static inline bool test_small(void)
{
    const char *small = getenv("TEST_SMALL");
    return small && *small;
}

static inline bool test_kernels_alone(void)
{
    return test_small() && !strcmp(getenv("TEST_SMALL"), "kernels");
}

#endif
