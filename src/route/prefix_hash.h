/*
 * What a request says, as far as its place is chosen by it: hashes of beginnings of its prompt, and
 * the few fields that name things (model, previous_response_id). One pass over the JSON text without
 * building it; text that is no JSON simply says nothing. Knows neither replicas nor connections.
 *
 * A mark is the hash of everything up to a place: API key, model, tools, system text, then the prompt
 * or the messages, blanks between JSON's tokens left out. Places are HASH_STEP bytes apart, deep in a
 * long prompt up to a sixteenth of what is before them, and at the ends of messages. Two prompts with
 * the same beginning have the same hashes there, which is where a replica's pages are the same.
 */
#ifndef STEEL_ROUTE_PREFIX_HASH_H
#define STEEL_ROUTE_PREFIX_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    HASH_STEP = 64,          /* about a page of 16 tokens */
    HASHES_MAX = 640,        /* of a request */
    HASH_BYTES_MAX = 1 << 20 /* bytes of a prompt that are looked at */
};

/* A field's text within the body, quotes included where it is a string. */
struct body_span {
    const char *p; /* NULL = absent */
    size_t n;
};

struct body_fields {
    struct body_span model, tools, functions, system, instructions, prompt, messages, input,
        previous, background;
};
/* The top-level fields of a JSON object; none where it is not one. The last of its name counts. */
void body_fields_find(const char *body, size_t n, struct body_fields *out);
/* A string's text without quotes, if it is one without escapes and fits. */
bool body_span_text(const struct body_span *s, char *out, size_t size);

struct prefix_hashes {
    uint64_t hash[HASHES_MAX];
    uint32_t at[HASHES_MAX]; /* bytes of the prompt before it; ascending */
    int n;
    uint32_t length; /* of the whole prompt */
};
void prefix_hashes_make(const struct body_fields *f, uint64_t seed, struct prefix_hashes *out);
uint64_t prefix_hash(uint64_t seed, const void *p, size_t n);

#endif
