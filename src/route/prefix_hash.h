/*
 * Hashes of prompt prefixes, and the fields of a request that choose a replica (model,
 * previous_response_id, conversation). Scans the JSON text once without building a tree. A body that is not JSON has
 * no fields. Knows neither replicas nor connections.
 *
 * A prefix hash covers the API key, model, tools and system text, then the prompt or the messages up to
 * an offset, without blanks between JSON tokens. Offsets are HASH_STEP bytes apart, up to a sixteenth
 * of the offset in long prompts, and at the end of each message. Prompts with a common prefix have the
 * same hashes up to its end, as the replicas' caches have the same pages.
 */
#ifndef STEEL_ROUTE_PREFIX_HASH_H
#define STEEL_ROUTE_PREFIX_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    HASH_STEP = 64,          /* about a page of 16 tokens */
    HASHES_MAX = 640,        /* per request */
    HASH_BYTES_MAX = 1 << 20 /* bytes of a prompt that are hashed */
};

/* A field's JSON text within the body. A string includes its quotes. */
struct body_span {
    const char *p; /* NULL = absent */
    size_t n;
};

struct body_fields {
    struct body_span model, tools, functions, system, instructions, prompt, messages, input,
        input_prefix, input_extra, previous, conversation, background;
};
/* Finds the top-level fields of a JSON object; none if it is not an object. Of repeated names the last
 * one counts. */
void body_fields_find(const char *body, size_t n, struct body_fields *out);
/* The id of a conversation: a text, or an object with one. False if there is none, or as body_span_text. */
bool body_conversation_id(const struct body_fields *f, char *out, size_t size);
/* Copies a string without its quotes. False if it is not a string, has escapes or does not fit. */
bool body_span_text(const struct body_span *s, char *out, size_t size);

struct prefix_hashes {
    uint64_t hash[HASHES_MAX];
    uint32_t at[HASHES_MAX]; /* prompt bytes that hash[i] covers; ascending */
    int n;
    uint32_t length; /* of the whole prompt */
};
void prefix_hashes_make(const struct body_fields *f, uint64_t seed, struct prefix_hashes *out);
uint64_t prefix_hash(uint64_t seed, const void *p, size_t n);

#endif
