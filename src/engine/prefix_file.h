/*
 * Files of saved prefixes: the content ids of a prompt, the pages of its keys and values, and for a model with states
 * the state after the prompt and a few earlier ones. Knows bytes and checksums; prefix_disk.h moves pages between a file and
 * the cache.
 *
 *     head      magic, version, shape, numbers of tokens and states, size of the file, checksums
 *     ids       (n_tokens) 64 bits each
 *     places    (n_states) 64 bits each: the number of tokens before a state, ascending; the last is n_tokens
 *     records   (n_pages) a page each, then (n_states) a state each; every record is followed by its checksum
 *
 * Numbers are little-endian. A record's checksum also covers its index and the head.
 *
 * Invariants:
 *  1. A file appears under its name complete and synced, or not at all. Its mode is 0600.
 *  2. No byte of a file is used before its checksum matches. A file of another version, shape or length is refused.
 *  3. A reader never follows a link and reads regular files only.
 */
#ifndef STEEL_ENGINE_PREFIX_FILE_H
#define STEEL_ENGINE_PREFIX_FILE_H

#include "base/error.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { PREFIX_FILE_VERSION = 1, PREFIX_NAME_MOST = 128, PREFIX_STATES_MOST = 4 };

/* What a file must share with the process that reads it. */
struct prefix_shape {
    uint64_t model[2]; /* hash of the model's files, its layers and the cache's types */
    uint64_t owner[2]; /* hash of the salt */
    uint64_t page_bytes;
    uint64_t state_bytes; /* 0 = the model has no states */
    uint32_t page_len;
};

/* Whether it is made of letters, digits, '.', '_' and '-' and does not begin with a dot. */
bool prefix_name_is_valid(const char *name);
/* A checksum of memory, not a cryptographic one. */
uint64_t prefix_checksum(uint64_t seed, const void *p, size_t n);

/* A prompt and where its states are. */
struct prefix_ids {
    const uint64_t *content; /* (n_tokens) */
    int n_tokens;
    uint64_t places[PREFIX_STATES_MOST]; /* (n_states) */
    int n_states;
};

struct prefix_writer;
/* Records follow in order by prefix_writer_add. */
struct prefix_writer *prefix_writer_open(const char *dir, const char *name,
                                         const struct prefix_shape *shape,
                                         const struct prefix_ids *ids, struct error *err);
bool prefix_writer_add(struct prefix_writer *w, const void *record, struct error *err);
/* Call it after the last record: syncs the file and gives it its name. *bytes: its size. */
bool prefix_writer_finish(struct prefix_writer *w, uint64_t *bytes, struct error *err);
/* The same without a sync: after a power failure the file may be damaged, which its checksums show. */
bool prefix_writer_name(struct prefix_writer *w, uint64_t *bytes, struct error *err);
void prefix_writer_free(
    struct prefix_writer *w); /* without prefix_writer_finish the file is removed */

struct prefix_reader;
/* Checks the whole file. NULL with the reason. */
struct prefix_reader *prefix_reader_open(const char *dir, const char *name,
                                         const struct prefix_shape *want, int max_tokens,
                                         struct error *err);
/* The same, but records are checked only when they are read. */
struct prefix_reader *prefix_reader_open_lazily(const char *dir, const char *name,
                                                const struct prefix_shape *want, int max_tokens,
                                                struct error *err);
/* As prefix_reader_open, for an open file, which it closes. */
struct prefix_reader *prefix_reader_open_fd(int fd, const struct prefix_shape *want, int max_tokens,
                                            struct error *err);
const struct prefix_ids *prefix_reader_ids(const struct prefix_reader *r);
uint64_t prefix_reader_bytes(const struct prefix_reader *r);
/* Reads and checks record i: a page, or after the last one a state. */
bool prefix_reader_record(struct prefix_reader *r, int i, void *out, struct error *err);
void prefix_reader_free(struct prefix_reader *r);

#endif
