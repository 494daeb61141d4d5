/*
 * Draft tokens from text: where the last tokens of a sequence have occurred before, the tokens after them are drafts.
 * The search is LZ77's: positions with the same last DRAFT_KEY tokens form a chain, newest first, and of the first few
 * the one with the longest common past is taken. A token costs two stores; a search costs at most DRAFT_WALK comparisons
 * of DRAFT_PAST tokens. Nothing is searched while a long match continues.
 *
 * Where a match ends, the text often goes on after a few other tokens: a value, a changed name. So until DRAFT_BRIDGE of its
 * tokens were not met, or a new match is found, the old one is kept as a bridge: it moves along with the sequence, and to where
 * the last token stands close by.
 *
 * A sequence has its own index over prompt and answer. A client's recent answers share another one, found by client, salt
 * and adapters, so no draft reveals another client's text by its timing.
 *
 * Memory: 12 bytes a token at most for a sequence; DRAFT_CLIENTS clients with DRAFT_RECENT tokens each. Without memory
 * there are no drafts, and nothing else changes.
 */
#ifndef STEEL_ENGINE_DRAFT_TEXT_H
#define STEEL_ENGINE_DRAFT_TEXT_H

#include <stdbool.h>
#include <stdint.h>

enum {
    DRAFT_KEY = 3,     /* the shortest match */
    DRAFT_PAST = 32,   /* tokens before a position that are compared */
    DRAFT_WALK = 8,    /* positions of a chain that are compared */
    DRAFT_BRIDGE = 8,  /* tokens that may differ after a match */
    DRAFT_SHIFT = 4,   /* tokens that may be missing, or more, there */
    DRAFT_FEED = 4096, /* tokens of a prompt that are indexed in one step */
    DRAFT_CLIENTS = 64,
    DRAFT_RECENT = 1 << 15,
};

/* Positions of a text by the tokens before them. The text is the caller's, and only grows. */
struct draft_index {
    int32_t *head; /* (1 << bits) the newest position of each chain; 0 = none */
    int32_t *prev; /* (cap) the position before it in its chain */
    int bits, n, cap;
};

void draft_index_clear(struct draft_index *ix);
/* Indexes text (n), of which the first ix->n tokens are indexed already. expected: tokens it may grow to. False: there is
 * no memory. */
bool draft_index_add(struct draft_index *ix, const int32_t *text, int n, int expected);
/* The position in text whose past has most tokens in common with the end of `past` (n), or 0. *len: tokens in common, DRAFT_PAST at
 * most. */
int draft_index_find(const struct draft_index *ix, const int32_t *text, const int32_t *past, int n,
                     int *len);

/* Recent answers of clients. Zero at first. */
struct draft_recent {
    uint64_t client, root; /* root: prefix_root, of salt and adapters */
    uint64_t used;         /* changes with the text; 0: free */
    int32_t *tokens;       /* (n of cap) answers, each with -1 after it */
    int n, cap;
    struct draft_index index;
};
struct draft_history {
    struct draft_recent clients[DRAFT_CLIENTS];
    uint64_t turn;
};
void draft_history_clear(struct draft_history *h);
void draft_history_add(struct draft_history *h, uint64_t client, uint64_t root,
                       const int32_t *answer, int n);
/* NULL: it has no recent answers. */
const struct draft_recent *draft_history_of(const struct draft_history *h, uint64_t client,
                                            uint64_t root);

/* Where the sequence is in earlier text. Zero at first. */
struct draft_match {
    struct draft_index index; /* over the sequence's own tokens */
    int seen;                 /* tokens of the sequence that the match has followed */
    int at, len;              /* position after the match, tokens in common; len 0 = none */
    int bridge;  /* tokens that may differ yet, after the match has ended; 0 = no bridge */
    bool near;   /* the token before `at` is the sequence's last one */
    bool recent; /* the position is in `recent`, not in the sequence */
    const struct draft_recent *in;
    uint64_t turn; /* of `in`: its text moves */
};
void draft_match_clear(struct draft_match *m);
/* Follows the sequence's tokens (n, none negative). recent may be NULL. False: the prompt is not indexed yet. */
bool draft_match_follow(struct draft_match *m, const int32_t *tokens, int n,
                        const struct draft_recent *recent, int expected);
/* Writes up to `most` drafts after tokens (n). Returns their number. */
int draft_match_write(const struct draft_match *m, const int32_t *tokens, int n, int32_t *drafts,
                      int most);

#endif
