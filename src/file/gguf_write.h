/*
 * Writes a GGUF v3 file. Metadata and the tensor directory are declared first. Then tensor data may
 * be written in any order, from any thread. The file is written as PATH.tmp-PID and renamed when it
 * is complete and on disk. A failure, a signal or a full disk leaves no file.
 */
#ifndef STEEL_FILE_GGUF_WRITE_H
#define STEEL_FILE_GGUF_WRITE_H

#include "base/buf.h"
#include "file/tensorfile.h"

struct gguf_writer;

struct gguf_writer *gguf_writer_new(const char *path, struct error *err);
/* Removes the unfinished file unless gguf_writer_finish succeeded. */
void gguf_writer_free(struct gguf_writer *w);

/* Metadata. Each key may be set once. */
void gguf_set_u32(struct gguf_writer *w, const char *key, uint32_t v);
void gguf_set_f32(struct gguf_writer *w, const char *key, float v);
void gguf_set_bool(struct gguf_writer *w, const char *key, bool v);
void gguf_set_string(struct gguf_writer *w, const char *key, const char *s, size_t len);
/* n fixed-size elements, little-endian, packed. */
void gguf_set_array(struct gguf_writer *w, const char *key, enum meta_type type, const void *data,
                    size_t n);
/* n strings in `packed`, each appended by gguf_pack_string. */
void gguf_set_strings(struct gguf_writer *w, const char *key, const struct buf *packed, size_t n);
void gguf_pack_string(struct buf *packed, const char *s, size_t len);
/* Copies an entry of another file under the same key. */
void gguf_set_meta(struct gguf_writer *w, const struct meta *m);

/* Declares a tensor and returns its index. dims[0] is contiguous and a whole number of blocks. */
int gguf_add_tensor(struct gguf_writer *w, const char *name, enum dtype type, int n_dims,
                    const int64_t *dims);

/* Writes header and directory and reserves the disk space. Nothing can be declared after this. */
bool gguf_writer_begin(struct gguf_writer *w, struct error *err);
/* Writes part of a tensor's data from any thread. False after the first failure, which
 * gguf_writer_finish reports, so that the caller can stop. */
bool gguf_writer_put(struct gguf_writer *w, int tensor, size_t offset, const void *data,
                     size_t bytes);
/* Whether a write has failed; sets *err. */
bool gguf_writer_failed(struct gguf_writer *w, struct error *err);
/* Flushes to disk and renames. */
bool gguf_writer_finish(struct gguf_writer *w, struct error *err);
size_t gguf_writer_bytes(const struct gguf_writer *w); /* of the whole file, after begin */

#endif
