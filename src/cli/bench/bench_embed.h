/* steel bench of a model that makes vectors. */
#ifndef STEEL_CLI_BENCH_EMBED_H
#define STEEL_CLI_BENCH_EMBED_H

#include "engine/runtime.h"

/* Whether the file holds an encoder, of which there is nothing else to measure. */
bool bench_embed_only(const char *path);
/* Texts and tokens a second over n_texts texts of 20 to 200 tokens. */
bool bench_embed(const char *path, const struct runtime_options *opt, int n_texts, int reps,
                 bool json, struct error *err);

#endif
