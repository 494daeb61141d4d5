/*
 * Reads of a model's files at any time while they are open, past the page cache where the file system can: for weights that
 * are not kept in memory. Thread-safe.
 */
#ifndef STEEL_FILE_DIRECT_H
#define STEEL_FILE_DIRECT_H

#include "file/tensorfile.h"

enum { DIRECT_ALIGN = 4096 };

struct direct;

/* f must outlive it. */
struct direct *direct_open(const struct tensorfile *f);
void direct_close(struct direct *d); /* NULL is allowed */
/* Whether these bytes are in one of the files. */
bool direct_has(const struct direct *d, const uint8_t *data);
/* Reads bytes that are mapped at `data` into buf, which is aligned to DIRECT_ALIGN and has bytes + 2 * DIRECT_ALIGN, and
 * returns where in buf they begin. NULL: the file was truncated, or could not be read. */
const uint8_t *direct_read(struct direct *d, const uint8_t *data, size_t bytes, uint8_t *buf);

#endif
