/*
 * Keeps prefixes of an engine on disk: pages of keys and values, and states, that a restart, another model's turn or a
 * second process would have to compute again. A prefix is cut into segments of a fixed number of tokens. A segment's
 * file (prefix_file.h) is named by a keyed hash of everything before its end, so that prompts share the segments of
 * what they have in common. An image's rows are part of it by their content ids (prefix.h).
 *
 * Threads. The writer's copies pages on the engine's thread between steps, a bounded piece at a time, and writes them
 * at a bounded rate. The reader's takes a choice before it is scheduled, reads its segments with a few more threads,
 * and copies them into the cache in the same way. The choice is scheduled when that is done, or has failed.
 *
 * Invariants:
 *  1. A segment is believed only if its file is whole, of this model, cache and client, follows this very prefix, and
 *     holds these very tokens. Else it is removed, and its tokens are computed.
 *  2. The folder has a secret key (0600), so that no client can construct two prefixes of one name.
 *  3. A prefix is read only if that is faster than computing it, by the rates measured so far.
 *  4. The folder's files stay within its limit: the least recently used ones are removed first. Several processes may
 *     share it.
 */
#ifndef STEEL_ENGINE_KEEPER_H
#define STEEL_ENGINE_KEEPER_H

#include "engine/engine.h"

struct choice;
struct keeper;

/* On the engine's thread, after it is ready. NULL with the reason: nothing is kept. */
struct keeper *keeper_new(struct engine *e, const struct keep_options *opt, struct error *err);
/* On the engine's thread, at its end: engine_call returns false by now. keeper_done returns what is left afterwards. */
void keeper_stop(struct keeper *k);
void keeper_free(struct keeper *k);

/* On the engine's thread. Whether c waits for segments from disk; keeper_done returns it later. */
bool keeper_take(struct keeper *k, struct choice *c);
struct choice *keeper_done(struct keeper *k); /* NULL = none */
/* Queues the first n tokens of c, which are in the cache, for writing. */
void keeper_save(struct keeper *k, const struct choice *c, int n);

/* Any other thread: waits until the queue is written, at most ms. */
void keeper_flush(struct keeper *k, int ms);
void keeper_stats(struct keeper *k, struct engine_stats *out);

#endif
