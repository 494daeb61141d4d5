/*
 * Writes a GGUF v3 file. Metadata and the tensor directory are declared first, then the data of any
 * tensor may be put in any order, from any thread. The file grows under PATH.tmp-PID and takes its
 * final name only when complete and on disk: a failure, a signal or a full disk leaves nothing behind.
 */
#ifndef STEEL_FILE_GGUF_WRITE_H
#define STEEL_FILE_GGUF_WRITE_H

#include "base/buf.h"
#include "file/tensorfile.h"

struct gguf_writer;

struct gguf_writer *gguf_writer_new(const char *path, struct error *err);
/* Removes the unfinished file unless gguf_writer_finish succeeded. */
void gguf_writer_free(struct gguf_writer *w);

/* Metadata; a key may be set once. */
void gguf_set_u32(struct gguf_writer *w, const char *key, uint32_t v);
void gguf_set_f32(struct gguf_writer *w, const char *key, float v);
void gguf_set_bool(struct gguf_writer *w, const char *key, bool v);
void gguf_set_string(struct gguf_writer *w, const char *key, const char *s, size_t len);
/* n fixed-size elements, little-endian, packed. */
void gguf_set_array(struct gguf_writer *w, const char *key, enum meta_type type, const void *data,
                    size_t n);
/* n strings in `packed`, each as gguf_pack_string appends it. */
void gguf_set_strings(struct gguf_writer *w, const char *key, const struct buf *packed, size_t n);
void gguf_pack_string(struct buf *packed, const char *s, size_t len);
/* A copy of an entry of another file, under its own key. */
void gguf_set_meta(struct gguf_writer *w, const struct meta *m);

/* Declares a tensor, dims[0] contiguous and a whole number of blocks; returns its index. */
int gguf_add_tensor(struct gguf_writer *w, const char *name, enum dtype type, int n_dims,
                    const int64_t *dims);

/* Writes header and directory and reserves the disk space. Nothing can be declared after this. */
bool gguf_writer_begin(struct gguf_writer *w, struct error *err);
/* Writes part of a tensor's data. Any thread; the first failure is kept for gguf_writer_finish and
 * returned as false, so that work can stop. */
bool gguf_writer_put(struct gguf_writer *w, int tensor, size_t offset, const void *data,
                     size_t bytes);
/* True, with its message in *err, if a write has failed. */
bool gguf_writer_failed(struct gguf_writer *w, struct error *err);
/* Flushes to disk and renames. */
bool gguf_writer_finish(struct gguf_writer *w, struct error *err);
size_t gguf_writer_bytes(const struct gguf_writer *w); /* of the whole file, after begin */

#endif
