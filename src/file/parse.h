/*
 * Shared by the two parsers and tensorfile.c only: adding a checked tensor, copying a name,
 * printing a shape. A parser reads one mapped shard and appends to the file.
 */
#ifndef STEEL_FILE_PARSE_H
#define STEEL_FILE_PARSE_H

#include "file/tensorfile.h"

/* Appends the tensors (and, for GGUF, the metadata) of f->shards[shard]. */
bool gguf_parse(struct tensorfile *f, int shard, struct error *err);
bool safetensors_parse(struct tensorfile *f, int shard, struct error *err);

/* True if the name is safe in a one-line message and as a C string: no control characters. */
bool name_ok(const char *p, size_t len);
/* A NUL-terminated copy that lives as long as the file. */
const char *tensorfile_name(struct tensorfile *f, const char *p, size_t len);
/* Appends one tensor. The caller has checked everything except that the name is unique. */
void tensorfile_add(struct tensorfile *f, const struct tensor *t);

/* The tensors from index `first` on, sorted by address (mem_free); n of them. */
const struct tensor **tensorfile_by_address(const struct tensorfile *f, size_t first, size_t *n);

#endif
