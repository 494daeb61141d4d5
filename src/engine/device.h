/*
 * Where a model runs when nobody said: on the GPU if there is one and the model fits it. Pure
 * arithmetic over facts that others gathered, so that machines without a GPU test it.
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
    bool deterministic, no_repack; /* flags only the CPU has */
    bool isa_forced;               /* STEEL_ISA names the CPU's kernels */
    size_t room;                   /* bytes a GPU has to give; 0 = no GPU */
    int64_t n_params;
    size_t weights, kv, scratch; /* bytes the model needs there, at least */
};

/* Models under this run faster on a CPU than a GPU wakes up. */
enum { DEVICE_SMALL_MODEL = 64 << 20 };

/* The device to open. `notice` is left empty, or says why a GPU that is there is not used. */
enum device_kind device_choose(const struct device_facts *f, struct error *notice);
/* Sequences that a cache is made for where nobody said how many: as many as it holds of the length
 * most requests have, within bounds. room: bytes for keys, values and states; token: bytes of one;
 * state: bytes that a sequence has whatever its length. */
enum { DEVICE_SEQ_TOKENS = 1024, DEVICE_LEAST_SEQS = 16 };
int device_sequences(size_t room, size_t token, size_t state, int context, int most);
/* For a GPU that was named: an error that says what would fit, where the model does not. True where
 * there is no such GPU: opening it will say so. */
bool device_fits(const struct device_facts *f, struct error *err);

#endif
