/*
 * An incremental parser of HTTP/1.1 responses from servers that may be broken or hostile. It skips
 * interim responses, parses the head, and removes the framing of the body (length, chunks, end of the
 * connection). No I/O. It buffers at most one head.
 *
 * Invariants:
 *  1. The result does not depend on how the bytes are split.
 *  2. After RESPONSE_BAD nothing else is returned; after RESPONSE_END no byte is consumed.
 *  3. A body that ends before its framing does is never RESPONSE_END.
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
    bool head_request;     /* the request was a HEAD: there is no body. Set before the first feed */
    struct http_head head; /* valid from RESPONSE_HEAD on */
    enum http_response_state state;
    struct buf text; /* of an incomplete head */
    struct http_chunks chunks;
    int64_t left; /* bytes left of a body with a length */
    int n_interim;
    const char *why; /* why it is RESPONSE_BROKEN */
};

enum http_response_result {
    RESPONSE_MORE,
    RESPONSE_HEAD,
    RESPONSE_DATA,
    RESPONSE_END,
    RESPONSE_BAD
};

/* Consumes *used bytes of p. RESPONSE_DATA: body bytes were appended to out. Call it again with the
 * rest, even if that is empty, until it returns RESPONSE_MORE. */
enum http_response_result http_response_feed(struct http_response *r, const char *p, size_t n,
                                             struct buf *out, size_t *used, const char **why);
/* The connection was closed: RESPONSE_END if the response was complete, else RESPONSE_BAD. */
enum http_response_result http_response_close(struct http_response *r, const char **why);
/* Whether the connection can be reused. Call it after RESPONSE_END. */
bool http_response_keeps_alive(const struct http_response *r);
void http_response_clear(struct http_response *r); /* ready for the next response */

#endif
