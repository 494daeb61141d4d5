/*
 * How much memory this process may still take: what the system has to give, and no more than the
 * limits of its control groups (v1 and v2, every level of them) and of its address space leave.
 * Reads /proc and /sys; decides nothing.
 */
#ifndef STEEL_BASE_SYSMEM_H
#define STEEL_BASE_SYSMEM_H

#include <stddef.h>

/* Bytes; 0 = not known. `root` stands before /proc and /sys: "" but for tests. */
size_t sysmem_available(const char *root);

#endif
