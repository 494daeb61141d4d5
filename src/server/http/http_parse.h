/*
 * Parsing of HTTP/1.1: heads of requests and responses, and chunked bodies. Strict where leniency has
 * been exploited: two lengths, a length beside chunks, folded headers, spaces before a
 * colon and bare control characters are refused. No I/O, no allocation beyond the head's own block.
 */
#ifndef STEEL_SERVER_HTTP_PARSE_H
#define STEEL_SERVER_HTTP_PARSE_H

#include "base/buf.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { HTTP_MAX_HEAD = 64 << 10, HTTP_MAX_HEADERS = 100 };

struct http_header {
    const char *name, *value; /* into block */
};

struct http_head {
    char *block;        /* owned; the views below point into it */
    const char *method; /* as sent */
    const char *path;   /* percent-decoded, without the query */
    const char *query;  /* "" = none; not decoded */
    const char *target; /* path and query as sent, for forwarding */
    int status;         /* of a response; then method, path, query and target are NULL */
    int minor;          /* HTTP/1.minor */
    struct http_header headers[HTTP_MAX_HEADERS];
    int n_headers;
    bool keep_alive, chunked, expect_continue;
    int64_t length; /* Content-Length; without one 0, in a response -1 */
};

/* Length of the head at the start of p with its empty line, or 0 if it is incomplete. */
size_t http_head_end(const char *p, size_t n);
/* Parses a complete head. Returns 0, or the status to reply with and the reason in *why. */
int http_head_parse(const char *p, size_t n, struct http_head *h, const char **why);
/* Parses the head of a response; false with *why. */
bool http_response_parse(const char *p, size_t n, struct http_head *h, const char **why);
void http_head_clear(struct http_head *h);
/* Value of a header (any case), or NULL. */
const char *http_header(const struct http_head *h, const char *name);

/* Decodes a chunked body piece by piece. Zero-initialise. */
struct http_chunks {
    int state;
    int64_t left; /* bytes left of the chunk */
    int n_digits, n_line;
};
enum http_chunks_result { CHUNKS_MORE, CHUNKS_DONE, CHUNKS_BAD, CHUNKS_TOO_LARGE };
/* Consumes *used bytes of p and appends the data to out, which is limited to max bytes. */
enum http_chunks_result http_chunks_feed(struct http_chunks *c, const char *p, size_t n, size_t max,
                                         struct buf *out, size_t *used);

const char *http_status_text(int status);

#endif
