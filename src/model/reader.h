/*
 * Reads numbers from a model's metadata, GGUF keys or config.json. Each is checked for type and
 * range, so that later code need not: products of any three fit in 64 bits. Errors name file and
 * key. Knows how metadata is stored, not its meaning.
 */
#ifndef STEEL_MODEL_READER_H
#define STEEL_MODEL_READER_H

#include "file/tensorfile.h"

struct config; /* model/config.h */

struct meta_reader {
    const struct tensorfile *f;
    struct config *c;
    struct error *err;
    const json_t *hf; /* of a folder: config.json, or its object for the text model */
};

/* A missing key leaves *out unchanged, unless `need` is set. GGUF keys are given without the
 * architecture prefix. */
bool reader_range(const struct meta_reader *r, const char *key, double v, double lo, double hi);
bool reader_gguf_int(const struct meta_reader *r, const char *suffix, int lo, int hi, bool need,
                     int *out);
bool reader_gguf_float(const struct meta_reader *r, const char *suffix, double lo, double hi,
                       bool need, double *out);
bool reader_gguf_bool(const struct meta_reader *r, const char *suffix, bool *out);
/* One number for all layers or one per layer: out (c->n_layers). */
bool reader_gguf_layers(const struct meta_reader *r, const char *suffix, int lo, int hi, bool need,
                        int *out);
/* The same of floats. A missing key leaves out unchanged. */
bool reader_gguf_layer_floats(const struct meta_reader *r, const char *suffix, double lo, double hi,
                              float *out);
/* Member a of o, or else b (may be NULL). NULL if absent or null. */
const json_t *reader_get(const json_t *o, const char *a, const char *b);
bool reader_int(const struct meta_reader *r, const char *a, const char *b, int lo, int hi,
                bool need, int *out);
bool reader_number(const struct meta_reader *r, const json_t *o, const char *key, double lo,
                   double hi, bool need, double *out);
bool reader_bool(const struct meta_reader *r, const char *key, bool *out);

#endif
