/*
 * The LoRA adapters of a running model: names and numbers, loading and unloading while others generate, and who
 * uses which. Any thread may call. Reading and packing a file takes the caller's time, not the engine's.
 *
 * Invariants:
 *  1. An adapter that a request has taken (adapters_take) is not unloaded before it is given back.
 *  2. A serial number is never reused: pages cached with an adapter are not found with another one of the same
 *     name or number.
 */
#ifndef STEEL_ENGINE_ADAPTERS_H
#define STEEL_ENGINE_ADAPTERS_H

#include "engine/step.h"
#include "model/adapter.h"

struct adapters;

/* A public description. */
struct adapter_info {
    char name[ADAPTER_NAME_MAX];
    char path[512]; /* truncated if longer */
    int number;
    float scale; /* the default of requests */
    int rank;
    int users; /* requests */
    uint64_t serial;
    uint64_t mark; /* struct lora_pick */
};

enum adapter_result {
    ADAPTER_OK,
    ADAPTER_INVALID, /* the file or the name is bad */
    ADAPTER_KNOWN,   /* the name is taken */
    ADAPTER_UNKNOWN,
    ADAPTER_BUSY, /* requests use it */
};

struct adapters *adapters_new(struct model *m, const struct tensorfile *f);
/* An upper bound of their memory: the sizes of their files. */
size_t adapters_bytes(const struct adapter_ref *refs, int n);
void adapters_free(struct adapters *a); /* the model frees the changes of its weights */
/* Fixes the largest LoRA rank of a weight (struct adapter.rank): that of the loaded adapters, or `rank` if larger. Returns
 * it. */
int adapters_settle(struct adapters *a, int rank);

enum adapter_result adapters_load(struct adapters *a, const char *name, const char *path,
                                  float scale, struct error *err);
enum adapter_result adapters_unload(struct adapters *a, const char *name, struct error *err);
bool adapters_find(struct adapters *a, const char *name, struct adapter_info *out);
bool adapters_at(struct adapters *a, int number, struct adapter_info *out);
/* "NAME[:SCALE]", several with commas, as picks (LORA_MAX_USES). */
bool adapters_parse(struct adapters *a, const char *text, struct lora_pick *picks, int *n,
                    struct error *err);
/* Adds a pick; duplicates are errors. */
bool adapters_pick(const struct adapter_info *info, float scale, struct lora_pick *picks, int *n,
                   struct error *err);
int adapters_list(struct adapters *a, struct adapter_info *out,
                  int max); /* ordered by number; returns the count */

/* Takes the adapters of a request until it ends. False: one has been unloaded in the meantime. */
bool adapters_take(struct adapters *a, const struct lora_pick *picks, int n, struct error *err);
void adapters_give_back(struct adapters *a, const struct lora_pick *picks, int n);

#endif
