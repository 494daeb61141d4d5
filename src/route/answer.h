/*
 * An HTTP/1.1 answer as it comes from a server that may be broken or hostile: interim answers are
 * skipped, the head is parsed, the body is taken out of its framing (length, chunks, end of the
 * connection). No I/O; holds no more than a head.
 *
 * Invariants:
 *  1. what comes out does not depend on how the bytes were cut
 *  2. after ANSWER_BAD nothing else comes; after ANSWER_END no byte is taken any more
 *  3. a body that ends before its framing says so is never ANSWER_END
 */
#ifndef STEEL_SERVER_ANSWER_H
#define STEEL_SERVER_ANSWER_H

#include "server/http/http_parse.h"

enum answer_state {
    ANSWER_IN_HEAD,
    ANSWER_SIZED,
    ANSWER_CHUNKED,
    ANSWER_TO_CLOSE,
    ANSWER_OVER,
    ANSWER_BROKEN
};

struct answer {
    bool to_head;          /* the request was a HEAD: no body follows. Set before the first feed */
    struct http_head head; /* from ANSWER_HEAD on */
    enum answer_state state;
    struct buf text; /* of a head that is not complete */
    struct http_chunks chunks;
    int64_t left; /* bytes, of a body with a length */
    int n_interim;
    const char *why; /* it is broken */
};

enum answer_result { ANSWER_MORE, ANSWER_HEAD, ANSWER_DATA, ANSWER_END, ANSWER_BAD };

/* Takes bytes from p and says what they brought; *used says how many. ANSWER_DATA: they are appended
 * to out. To be called again with the rest (none of it, too) until it says ANSWER_MORE. */
enum answer_result answer_feed(struct answer *a, const char *p, size_t n, struct buf *out,
                               size_t *used, const char **why);
/* The connection has ended: whether the answer had. */
enum answer_result answer_close(struct answer *a, const char **why);
/* Whether the connection can take another request: after ANSWER_END. */
bool answer_can_go_on(const struct answer *a);
void answer_clear(struct answer *a); /* ready for another one */

#endif
