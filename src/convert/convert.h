/*
 * The two tools as functions: a GGUF into a smaller one, a Hugging Face folder into a GGUF. What the
 * commands add is flags and a progress bar.
 */
#ifndef STEEL_CONVERT_CONVERT_H
#define STEEL_CONVERT_CONVERT_H

#include "convert/mix.h"
#include "convert/transcode.h"

#include <regex.h>

struct adapter_ref; /* model/adapter.h */

/* Tensors whose name has the pattern (POSIX, extended) become this type. */
struct convert_override {
    const char *text; /* as it was given, for messages */
    regex_t pattern;
    enum dtype type;
};

struct convert_options {
    const struct mix *mix;                    /* NULL (convert only): the type of the source */
    int threads;                              /* 0 = all */
    bool keep;                                /* what GGUF can hold keeps its type, bit for bit */
    bool pure;                                /* every matrix in the mix's base type */
    bool requantize;                          /* allow sources that are quantised already */
    bool dry_run;                             /* plan only: nothing is written */
    enum dtype head_type, embedding_type;     /* DT_NONE = as the mix says */
    const struct convert_override *overrides; /* (n_overrides) the last that fits counts */
    int n_overrides;
    const char *imatrix; /* path or NULL */
    const struct adapter_ref
        *merge; /* (n_merge) adapters to merge into the weights: convert alone */
    int n_merge;
    const char *pre; /* convert: pre-tokenizer name, where the folder's cannot be told */
    void (*progress)(void *arg, size_t done, size_t total);
    void (*note)(void *arg, const char *message);          /* a line worth telling; may be NULL */
    void (*planned)(void *arg, const struct transcode *t); /* types are chosen; may be NULL */
    void *arg;
};

struct convert_result {
    size_t bytes_in, bytes_out; /* of tensors; of the file */
    int64_t n_params;
    size_t n_by_type[DT_COUNT]; /* tensors */
};

bool quantize_file(const char *in, const char *out, const struct convert_options *opt,
                   struct convert_result *result, struct error *err);
bool convert_folder(const char *in, const char *out, const struct convert_options *opt,
                    struct convert_result *result, struct error *err);

/* Parts that the two share. */
struct config;
void convert_mix_model(const struct config *c, bool importance, struct mix_model *m);
/* Chooses each tensor's type (choose.c). */
bool convert_choose(struct transcode *t, const struct convert_options *opt,
                    const struct mix_model *model, struct error *err);
/* GGUF's general.file_type of what was chosen. */
int convert_file_type(const struct transcode *t, const struct mix *mix);
void convert_count(const struct transcode *t, struct convert_result *result);
/* All tensors of a GGUF, to be written under their names. */
bool convert_add_tensors(struct transcode *t, struct error *err);

#endif
