/*
 * Large blocks of memory that are used again. Images take tens of megabytes for moments; the kernel needs as long to clear
 * new pages as the work in them takes. Only while somebody wants them kept (a GPU's tower), and 512 MB at most.
 * Thread-safe.
 */
#ifndef STEEL_VISION_SPARE_H
#define STEEL_VISION_SPARE_H

#include <stddef.h>

/* Blocks that are given back are kept between the first call of spare_keep and the last one of spare_drop of the same backend. If
 * it can, the first such backend pins large blocks (host_ops), so that devices read and write them directly. */
struct backend;
void spare_keep(struct backend *be);
void spare_drop(struct backend *be);

void *spare_take(size_t bytes); /* contents undefined; NULL if out of memory */
void spare_give(void *p, size_t bytes);

#endif
