/* A folder's tokenizer in GGUF's keys. */
#ifndef STEEL_CONVERT_VOCAB_H
#define STEEL_CONVERT_VOCAB_H

#include "convert/convert.h"

struct config;

/* Writes tokenizer.ggml.* and the chat template. A folder without a tokenizer gets "no_vocab" and a
 * note. An unknown pre-tokenizer is an error, unless opt->pre names it. */
bool vocab_write(struct gguf_writer *w, const struct tensorfile *f, const struct config *c,
                 const struct convert_options *opt, struct error *err);

/* The folder of f, as an absolute path if possible (mem_free). */
char *convert_dir(const struct tensorfile *f);

#endif
