/*
 * The adapters (LoRA) of a model that is running: names to numbers, loading and unloading while others
 * answer, who uses which. Any thread may call; reading a file and packing it is the caller's time, not
 * the engine's.
 *
 * Invariants:
 *  1. a number that a request holds (adapters_take) is not unloaded before it is given back
 *  2. a serial is never used twice: what was cached with an adapter is not found again with another one
 *     of its name or number
 */
#ifndef STEEL_ENGINE_ADAPTERS_H
#define STEEL_ENGINE_ADAPTERS_H

#include "engine/step.h"
#include "model/adapter.h"

struct adapters;

/* What others may know of one. */
struct adapter_info {
    char name[ADAPTER_NAME_MAX];
    char path[512]; /* cut where it is longer */
    int number;
    float scale; /* where a request names none */
    int rank;
    int users; /* requests */
    uint64_t serial;
};

enum adapter_result {
    ADAPTER_OK,
    ADAPTER_INVALID, /* the file, or its name */
    ADAPTER_KNOWN,   /* the name is taken */
    ADAPTER_UNKNOWN,
    ADAPTER_BUSY, /* requests use it */
};

struct adapters *adapters_new(struct model *m, const struct tensorfile *f);
/* What adapters take in memory, at most: as much as their files. */
size_t adapters_bytes(const struct adapter_ref *refs, int n);
void adapters_free(struct adapters *a); /* the model frees what its weights hold */
/* From here on none may add more to a weight (struct adapter.rank) than those that are there, or than
 * `rank`. Returns the bound. */
int adapters_settle(struct adapters *a, int rank);

enum adapter_result adapters_load(struct adapters *a, const char *name, const char *path,
                                  float scale, struct error *err);
enum adapter_result adapters_unload(struct adapters *a, const char *name, struct error *err);
bool adapters_find(struct adapters *a, const char *name, struct adapter_info *out);
bool adapters_at(struct adapters *a, int number, struct adapter_info *out);
/* "NAME[:SCALE]", several with commas, as picks (LORA_MAX_USES). */
bool adapters_parse(struct adapters *a, const char *text, struct lora_pick *picks, int *n,
                    struct error *err);
/* Adds one; none may come twice. */
bool adapters_pick(const struct adapter_info *info, float scale, struct lora_pick *picks, int *n,
                   struct error *err);
int adapters_list(struct adapters *a, struct adapter_info *out, int max); /* by number; how many */

/* A request holds its adapters until it ends: false, with an error, where one has gone meanwhile. */
bool adapters_take(struct adapters *a, const struct lora_pick *picks, int n, struct error *err);
void adapters_give_back(struct adapters *a, const struct lora_pick *picks, int n);

#endif
