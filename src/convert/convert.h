/*
 * `convert` and `quantize` as functions: a Hugging Face folder to GGUF, and a GGUF to a smaller
 * one. The commands add flags and a progress bar.
 */
#ifndef STEEL_CONVERT_CONVERT_H
#define STEEL_CONVERT_CONVERT_H

#include "convert/mix.h"
#include "convert/transcode.h"

#include <regex.h>

struct adapter_ref; /* model/adapter.h */

/* Tensors whose name matches the pattern (POSIX, extended) get this type. */
struct convert_override {
    const char *text; /* as given, for messages */
    regex_t pattern;
    enum dtype type;
};

struct convert_options {
    const struct mix *mix;                    /* NULL (convert only): the type of the source */
    int threads;                              /* 0 = all */
    bool keep;                                /* keep each type that GGUF can hold, bit for bit */
    bool pure;                                /* every matrix in the mix's base type */
    bool requantize;                          /* allow quantised sources */
    bool dry_run;                             /* write nothing */
    enum dtype head_type, embedding_type;     /* DT_NONE = as the mix says */
    const struct convert_override *overrides; /* (n_overrides) the last match applies */
    int n_overrides;
    const char *imatrix; /* path or NULL */
    /* (n_merge) adapters to merge into the weights: convert alone */
    const struct adapter_ref *merge;
    int n_merge;
    const char *pre; /* convert: pre-tokenizer name, if the folder's is unknown */
    void (*progress)(void *arg, size_t done, size_t total);
    void (*note)(void *arg, const char *message); /* a line for the user; may be NULL */
    void (*planned)(void *arg,
                    const struct transcode *t); /* called when types are chosen; may be NULL */
    void *arg;
};

struct convert_result {
    size_t bytes_in, bytes_out; /* of tensors; of the file */
    int64_t n_params;
    size_t n_by_type[DT_COUNT]; /* tensors */
};

bool quantize_file(const char *in, const char *out, const struct convert_options *opt,
                   struct convert_result *result, struct error *err);
/* The image tower of a folder, as llama.cpp's mmproj file. False without an error message: the folder has none that Steel
 * runs. */
bool convert_tower(const char *in, const char *out, const struct convert_options *opt,
                   struct convert_result *result, struct error *err);
bool convert_folder(const char *in, const char *out, const struct convert_options *opt,
                    struct convert_result *result, struct error *err);

/* Shared by both. */
struct config;
void convert_mix_model(const struct config *c, bool importance, struct mix_model *m);
/* Chooses each tensor's type (choose.c). */
bool convert_choose(struct transcode *t, const struct convert_options *opt,
                    const struct mix_model *model, struct error *err);
/* GGUF's general.file_type for the chosen types. */
int convert_file_type(const struct transcode *t, const struct mix *mix);
void convert_count(const struct transcode *t, struct convert_result *result);
/* Adds all tensors of a GGUF under their own names. */
bool convert_add_tensors(struct transcode *t, struct error *err);

#endif
