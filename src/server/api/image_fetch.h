/*
 * Fetches images from web servers that the operator has allowed (--allow-image-origins).
 *
 *  1. Only origins of the list are asked: scheme, host and port must match. That also holds for redirects.
 *  2. Private, loopback and link-local addresses are refused when the connection is made, whatever the name resolved
 *     to before. The exception is an origin whose host in the list is an address itself.
 *  3. Bytes and time of a request's images, and redirects, are bounded. Nothing but the URL is sent: no cookies, credentials or proxies.
 */
#ifndef STEEL_SERVER_IMAGE_FETCH_H
#define STEEL_SERVER_IMAGE_FETCH_H

#include "base/buf.h"
#include "base/error.h"

#include <stdatomic.h>
#include <sys/socket.h>

struct image_origins {
    const char *const *list; /* (n) scheme://host[:port] */
    int n;
};

/* The fetches of one request, which share bounds of time and bytes. */
struct image_fetches {
    const struct image_origins *origins;
    int64_t until_ns; /* 0 = none has begun */
    size_t n_bytes;
};

/* Loads what fetching needs. Call it before other threads do. */
bool image_fetch_prepare(struct error *err);
/* A struct image_rules' fetch; arg is a struct image_fetches. out gets the bytes, in memory that belongs to no job. */
bool image_fetch(void *arg, const char *url, const atomic_bool *stop, struct buf *out,
                 struct error *err);

#endif
