/*
 * Writes adapters: merged into a model, or as GGUF adapters. model/adapter.h reads them.
 */
#ifndef STEEL_CONVERT_LORA_H
#define STEEL_CONVERT_LORA_H

#include "convert/convert.h"
#include "model/adapter.h"

/* Open adapters of one model. */
struct merge {
    struct adapter **adapters; /* (n) */
    const struct adapter_ref *refs;
    int n;
};

/* Opens opt->merge for the model `f` and attaches their changes to the tensors of t, which have
 * GGUF names. The merge must outlive transcode_run. */
bool merge_open(struct merge *m, struct transcode *t, const struct tensorfile *f,
                const struct config *c, const struct convert_options *opt, struct error *err);
void merge_close(struct merge *m);

/* Writes a GGUF with adapters merged in. Every tensor keeps its type. */
bool merge_file(const char *in, const char *out, const struct convert_options *opt,
                struct convert_result *result, struct error *err);
/* Writes an adapter (PEFT folder or GGUF) of the model `base` as a GGUF adapter. */
bool convert_adapter(const char *in, const char *base, const char *out,
                     const struct convert_options *opt, struct convert_result *result,
                     struct error *err);
/* Whether the path is an adapter folder or a file in one. */
bool convert_is_adapter(const char *path);

#endif
