/*
 * Chooses the device of a model by default: the GPU if there is one and the model fits. Pure arithmetic over given
 * facts, so that machines without a GPU can test it.
 */
#ifndef STEEL_ENGINE_DEVICE_H
#define STEEL_ENGINE_DEVICE_H

#include "backend/devices.h"
#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct device_facts {
    enum device_kind asked;
    const char *name;              /* as the user gave it */
    bool deterministic, no_repack; /* "auto" runs these on the CPU; no_repack is for it alone */
    bool isa_forced;               /* STEEL_ISA names the CPU's kernels */
    size_t room;                   /* free bytes of the GPU; 0 = no GPU */
    int64_t n_params;
    size_t weights, kv, scratch; /* least bytes that the model needs there */
};

/* Below this size, in bytes, a model runs on a CPU before a GPU is initialised. */
enum { DEVICE_SMALL_MODEL = 64 << 20 };

/* The device to open. `notice` says why an existing GPU is not used, or stays empty. */
enum device_kind device_choose(const struct device_facts *f, struct error *notice);
/* The default number of sequences: how many of DEVICE_SEQ_TOKENS tokens the cache holds, within bounds. room: bytes for
 * keys, values and states; token: bytes per token; state: bytes per sequence regardless of its length. */
enum { DEVICE_SEQ_TOKENS = 1024, DEVICE_LEAST_SEQS = 16 };
int device_sequences(size_t room, size_t token, size_t state, int context, int most);
/* Checks that the model fits the named GPU. The error says what would fit. True if there is no such GPU, which opening
 * reports. */
bool device_fits(const struct device_facts *f, struct error *err);

#endif
