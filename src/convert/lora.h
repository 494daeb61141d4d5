/*
 * Adapters as files: merged into a model that is being written, or written as GGUF adapters. See
 * model/adapter.h for reading them.
 */
#ifndef STEEL_CONVERT_LORA_H
#define STEEL_CONVERT_LORA_H

#include "convert/convert.h"
#include "model/adapter.h"

/* Adapters that are open against one model. */
struct merge {
    struct adapter **adapters; /* (n) */
    const struct adapter_ref *refs;
    int n;
};

/* Opens opt->merge against the model `f` and lets the tensors of t, named as a GGUF has them, be changed
 * by them. The merge must outlive transcode_run. */
bool merge_open(struct merge *m, struct transcode *t, const struct tensorfile *f,
                const struct config *c, const struct convert_options *opt, struct error *err);
void merge_close(struct merge *m);

/* A GGUF with adapters merged into it: every tensor keeps its type. */
bool merge_file(const char *in, const char *out, const struct convert_options *opt,
                struct convert_result *result, struct error *err);
/* An adapter (PEFT folder, or GGUF) of the model `base` as a GGUF adapter. */
bool convert_adapter(const char *in, const char *base, const char *out,
                     const struct convert_options *opt, struct convert_result *result,
                     struct error *err);
/* Whether the path is that of an adapter's folder, or of a file in it. */
bool convert_is_adapter(const char *path);

#endif
