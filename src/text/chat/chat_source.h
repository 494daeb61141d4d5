/*
 * Finds a model's chat template and the texts of its BOS and EOS tokens, in GGUF metadata or in the
 * files of a Hugging Face folder (which needs no weights). Knows nothing of Jinja.
 */
#ifndef STEEL_TEXT_CHAT_SOURCE_H
#define STEEL_TEXT_CHAT_SOURCE_H

#include "file/tensorfile.h"

struct chat_source {
    char *template;      /* heap, NUL-terminated */
    size_t template_len; /* bytes */
    char *bos, *eos;     /* heap; "" if the model declares none */
};

/* Loads from an open model. False, with a message, if it has no chat template. */
bool chat_source_load(const struct tensorfile *f, struct chat_source *s, struct error *err);
/* Loads from a path: a .gguf file, a Hugging Face folder, or a template file. */
bool chat_source_open(const char *path, struct chat_source *s, struct error *err);
/* Replaces the template, also of an empty source. */
void chat_source_set(struct chat_source *s, const char *template);
void chat_source_clear(struct chat_source *s);

#endif
