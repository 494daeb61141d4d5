/*
 * Opens the draft model of a runtime (runtime_options.draft_model): a runtime of its own in this process, after the
 * large model's weights are loaded and before its cache gets the memory that is left.
 */
#ifndef STEEL_ENGINE_DRAFT_OPEN_H
#define STEEL_ENGINE_DRAFT_OPEN_H

#include "engine/runtime.h"

/* Whether the draft model's vocabulary matches that of the model rt, whose tokenizer is loaded, if it has one. n_vocab:
 * rt's ids. Sets rt->small_vocab. */
bool draft_open_match(struct runtime *rt, const char *path, int n_vocab, struct error *err);
/* The memory that it will take. opt: the large model's. gpu: on a GPU. */
bool draft_open_measure(const struct runtime_options *opt, bool gpu, size_t *bytes,
                        struct error *err);
/* Whether it is to run on a device of the same kind as the large model's. */
bool draft_open_shares(const struct runtime_options *opt, const char *device);
/* Sets rt->small. device: the large model's. */
bool draft_open(struct runtime *rt, const struct runtime_options *opt, const char *device,
                struct error *err);

#endif
