/*
 * A model on disk: a checked directory of named tensors over read-only maps, plus its metadata.
 * One interface for GGUF (v2, v3, split) and Hugging Face folders (safetensors, sharded or not).
 * Everything is validated at open: every tensor's bytes lie inside its file, sizes do not
 * overflow, names are unique. Nothing here knows what a tensor means.
 */
#ifndef STEEL_FILE_TENSORFILE_H
#define STEEL_FILE_TENSORFILE_H

#include "quant/quant.h"
#include "base/error.h"
#include "base/map.h"

#include <jansson.h>
#include <stdint.h>

enum { TENSOR_MAX_DIMS = 4 };

struct tensor {
    const char *name;      /* NUL-terminated, owned by the file */
    enum dtype type;       /* DT_NONE: a type that Steel cannot compute with, `show` lists it */
    const char *type_name; /* as the file spells it, for messages */
    int n_dims;
    int64_t dims[TENSOR_MAX_DIMS]; /* dims[0] is the contiguous one (GGUF order), unused = 1 */
    const uint8_t *data;           /* (bytes) inside a map; aligned only as in the file */
    size_t bytes;
    int shard; /* index into shards */
};

/* GGUF metadata value kinds, numbered as in the file. */
enum meta_type {
    META_U8,
    META_I8,
    META_U16,
    META_I16,
    META_U32,
    META_I32,
    META_F32,
    META_BOOL,
    META_STRING,
    META_ARRAY,
    META_U64,
    META_I64,
    META_F64
};

struct meta_array {
    enum meta_type type; /* element type; arrays of arrays are refused at open */
    size_t n;
    const uint8_t *data; /* raw little-endian elements; strings: u64 length + bytes each */
    size_t bytes;
};

struct meta {
    const char *key; /* NUL-terminated */
    enum meta_type type;
    union {
        uint64_t u; /* U8 U16 U32 U64 BOOL */
        int64_t i;  /* I8 I16 I32 I64 */
        double f;   /* F32 F64 */
        struct {
            const char *p;
            size_t len;
        } s; /* not NUL-terminated */
        struct meta_array a;
    } v;
};

struct shard {
    char *path;
    const uint8_t *map; /* (bytes) read-only */
    size_t bytes;
    int fd;    /* -1 for memory */
    int watch; /* filemap.h */
};

struct tensorfile {
    char *path;             /* as given */
    bool is_gguf;           /* else a Hugging Face folder */
    struct tensor *tensors; /* (n_tensors) in file order */
    size_t n_tensors, cap_tensors;
    struct map by_name; /* name -> index into tensors */
    struct meta *meta;  /* (n_meta) GGUF only */
    size_t n_meta;
    struct map by_key;
    json_t *config;              /* HF only: config.json (always an object) */
    json_t *tokenizer_config;    /* HF only, or NULL */
    json_t *generation_config;   /* HF only, or NULL */
    json_t *preprocessor_config; /* HF only, or NULL: of images */
    struct shard *shards;        /* (n_shards) */
    int n_shards;
    struct name_chunk *names; /* storage of tensor names and keys */
};

/*
 * Opens `path`: a .gguf file (a split one by naming any of its parts), a folder with config.json, or
 * that folder's config.json; NULL or "builtin": the model linked into the binary (builtin.h has others). Only headers are
 * read; the data is mapped.
 */
struct tensorfile *tensorfile_open(const char *path, struct error *err);
/* A GGUF already in memory (the built-in model, fuzzers). `data` must outlive the file. */
struct tensorfile *tensorfile_open_memory(const void *data, size_t bytes, const char *name,
                                          struct error *err);
/* One safetensors file already in memory, without a config (fuzzers). `data` must outlive it. */
struct tensorfile *tensorfile_open_safetensors_memory(const void *data, size_t bytes,
                                                      const char *name, struct error *err);
/* An adapter: a .gguf file, a folder with adapter_config.json (`config` is then that file) and
 * adapter_model.safetensors, or the path of one of these two. */
struct tensorfile *tensorfile_open_adapter(const char *path, struct error *err);
void tensorfile_close(struct tensorfile *f);

const struct tensor *tensorfile_find(const struct tensorfile *f, const char *name);
size_t tensorfile_bytes(const struct tensorfile *f); /* sum of tensor bytes */
/* Whether all mapped bytes were present so far. A file that shrinks reads as zeros from then on, so
 * callers check after reading. TENSORFILE_ALL checks every file. Other values are cheap enough for
 * every step: they check the damage marks, and the length of file number `turn` (mod n_shards). */
#define TENSORFILE_ALL (~0u)
bool tensorfile_is_whole(const struct tensorfile *f, unsigned turn, struct error *err);
/* Tells the kernel that a tensor's file pages are not needed soon, e.g. after repacking. */
void tensorfile_forget(const struct tensorfile *f, const struct tensor *t);
/* Like tensorfile_forget, for the whole file. Needed because the kernel maps neighbouring pages
 * too, and forgetting one tensor leaves those resident. */
void tensorfile_forget_all(const struct tensorfile *f);

/* Reads tensor data with pread instead of through the map, into buf (bytes), and returns buf.
 * Returns `data` if the file is in memory, NULL if it cannot be read. Thread-safe. */
const uint8_t *tensorfile_read(const struct tensorfile *f, const uint8_t *data, size_t bytes,
                               uint8_t *buf);

/* GGUF metadata by key; NULL if absent. The getters return false if absent or of another kind. */
const struct meta *tensorfile_meta(const struct tensorfile *f, const char *key);
bool meta_get_int(const struct tensorfile *f, const char *key,
                  int64_t *out); /* any integer, bool */
bool meta_get_float(const struct tensorfile *f, const char *key, double *out); /* any number */
bool meta_get_bool(const struct tensorfile *f, const char *key, bool *out);
/* The string as a NUL-terminated heap copy (mem_free), or NULL if absent. */
char *meta_get_string(const struct tensorfile *f, const char *key);
/* Element i of an array as a number (arrays of strings: false). */
bool meta_array_number(const struct meta_array *a, size_t i, double *out);
/* Iterates an array of strings. *cursor starts at 0; false at the end. Bounds were checked at
 * open. */
bool meta_array_string(const struct meta_array *a, size_t *cursor, const char **p, size_t *len);

/* Reads a JSON file of at most max_bytes. The error names path and position. */
json_t *json_load_path(const char *path, size_t max_bytes, struct error *err);

#endif
