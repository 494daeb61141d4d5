/*
 * An HTTP/1.1 answer as it comes from a server that may be broken or hostile: interim answers are
 * skipped, the head is parsed, the body is taken out of its framing (length, chunks, end of the
 * connection). No I/O; holds no more than a head.
 *
 * Invariants:
 *  1. what comes out does not depend on how the bytes were cut
 *  2. after RESPONSE_BAD nothing else comes; after RESPONSE_END no byte is taken any more
 *  3. a body that ends before its framing says so is never RESPONSE_END
 */
#ifndef STEEL_ROUTE_HTTP_RESPONSE_H
#define STEEL_ROUTE_HTTP_RESPONSE_H

#include "server/http/http_parse.h"

enum http_response_state {
    RESPONSE_IN_HEAD,
    RESPONSE_SIZED,
    RESPONSE_CHUNKED,
    RESPONSE_TO_CLOSE,
    RESPONSE_OVER,
    RESPONSE_BROKEN
};

struct http_response {
    bool to_head;          /* the request was a HEAD: no body follows. Set before the first feed */
    struct http_head head; /* from RESPONSE_HEAD on */
    enum http_response_state state;
    struct buf text; /* of a head that is not complete */
    struct http_chunks chunks;
    int64_t left; /* bytes, of a body with a length */
    int n_interim;
    const char *why; /* it is broken */
};

enum http_response_result {
    RESPONSE_MORE,
    RESPONSE_HEAD,
    RESPONSE_DATA,
    RESPONSE_END,
    RESPONSE_BAD
};

/* Takes bytes from p and says what they brought; *used says how many. RESPONSE_DATA: they are appended
 * to out. To be called again with the rest (none of it, too) until it says RESPONSE_MORE. */
enum http_response_result http_response_feed(struct http_response *a, const char *p, size_t n,
                                             struct buf *out, size_t *used, const char **why);
/* The connection has ended: whether the answer had. */
enum http_response_result http_response_close(struct http_response *a, const char **why);
/* Whether the connection can take another request: after RESPONSE_END. */
bool http_response_can_go_on(const struct http_response *a);
void http_response_clear(struct http_response *a); /* ready for another one */

#endif
