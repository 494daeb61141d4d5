/*
 * How much memory this process may still allocate: the system's available memory, limited by its
 * control groups (v1 and v2, every level) and its address-space limit. Reads /proc and /sys; makes
 * no decisions.
 */
#ifndef STEEL_BASE_SYSMEM_H
#define STEEL_BASE_SYSMEM_H

#include <stddef.h>

/* Bytes; 0 = unknown. `root` is prepended to /proc and /sys: "" except in tests. */
size_t sysmem_available(const char *root);

#endif
