/* A folder's tokenizer under GGUF's names. */
#ifndef STEEL_CONVERT_VOCAB_H
#define STEEL_CONVERT_VOCAB_H

#include "convert/convert.h"

struct config;

/* Writes tokenizer.ggml.* and the chat template. A folder without a tokenizer gets "no_vocab" and a
 * note; one whose pre-tokenizer GGUF has no name for is an error (opt->pre names one by hand). */
bool vocab_write(struct gguf_writer *w, const struct tensorfile *f, const struct config *c,
                 const struct convert_options *opt, struct error *err);

/* The folder of f, as an absolute path where that can be told (mem_free). */
char *convert_dir(const struct tensorfile *f);

#endif
