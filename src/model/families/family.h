/*
 * A family of models: what its files are called, how its metadata becomes a config, and how that
 * becomes a network, by the names of its tensors. One file each, data and names only; what several
 * share is in decoder.c. A family made of known parts (layer.h) is a new file here and a line in
 * families.c.
 */
#ifndef STEEL_MODEL_FAMILIES_FAMILY_H
#define STEEL_MODEL_FAMILIES_FAMILY_H

#include "model/build.h"
#include "model/config.h"
#include "model/reader.h"

struct family {
    const char *name;          /* general.architecture of its GGUF files */
    const char *hf, *hf_class; /* model_type and architectures[0] of its config.json */
    const char *gguf_as;       /* the architecture `convert` writes, if not name */
    bool weaves_qk;            /* its GGUF files hold rotary pairs of q and k side by side */
    bool (*read)(const struct reader *in); /* metadata to in->c */
    void (*build)(struct builder *b);      /* b->c to b->net */
};

extern const struct family *const families[]; /* ends with NULL */
extern const struct family family_llama, family_mistral, family_qwen2, family_qwen3,
    family_qwen3moe;

/* What is said of a plain decoder beside its numbers. */
struct decoder {
    bool qk_norm; /* RMS norms of q and k, per head */
    bool experts; /* config.json describes experts */
    bool windows; /* sliding_window of config.json counts, where use_sliding_window is set */
    bool windows_unasked; /* ... or is not said to be false */
    bool windows_all;     /* max_window_layers does not count */
};

bool decoder_read(const struct reader *in, const struct decoder *d);
void decoder_build(struct builder *b, const struct decoder *d);

#endif
