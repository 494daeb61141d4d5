/* steel bench of embedding models. */
#ifndef STEEL_CLI_BENCH_EMBED_H
#define STEEL_CLI_BENCH_EMBED_H

#include "engine/runtime.h"

/* True if the file is an encoder, which can only embed. */
bool bench_embed_only(const char *path);
/* Measures texts and tokens per second over n_texts texts of 20 to 200 tokens. */
bool bench_embed(const char *path, const struct runtime_options *opt, int n_texts, int reps,
                 bool json, struct error *err);

#endif
