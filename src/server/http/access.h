/*
 * Access checks on request heads: API keys, the Host header (against DNS rebinding), origins of posts
 * without a CORS preflight, and the identity of a client. Knows neither bodies nor models. The server
 * and the gateway share it.
 */
#ifndef STEEL_SERVER_ACCESS_H
#define STEEL_SERVER_ACCESS_H

#include "server/http/http.h"

struct access_rules {
    const char *const *keys; /* (n_keys) API keys; none = no key needed */
    int n_keys;
    const char *const
        *origins; /* (n_origins) allowed by CORS; "*" = all; none = origins on this machine */
    int n_origins;
    const char *const *hosts; /* (n_hosts) further names accepted in Host headers; "*" = all */
    int n_hosts;
    const char *host; /* the name or address of the listener */
};

const char *access_bearer(struct http_exchange *x); /* its API key; NULL = none */
bool access_key(const struct access_rules *a, struct http_exchange *x);
uint64_t access_client(const struct access_rules *a, uint64_t secret, struct http_exchange *x);
/* Who owns what a request keeps on the server: its key, or without configured keys its address (and
 * the key that it sent anyway). Equal for equal clients. The caller frees it. */
char *access_owner(const struct access_rules *a, struct http_exchange *x);
bool access_host(const struct access_rules *a,
                 struct http_exchange *x); /* the Host header names this server */
bool access_origin(const struct access_rules *a,
                   struct http_exchange *x);   /* not posted by a page of another site */
bool access_is_loopback(const char *host);     /* reachable from this machine only */
bool access_type(struct http_exchange *x);     /* the body may be JSON */
bool access_encoding(struct http_exchange *x); /* the body is not compressed */

/* Adds the CORS headers of a reply; replies to a preflight. */
void access_add_cors(const struct access_rules *a, struct http_exchange *x);
void access_preflight(struct http_exchange *x);

#endif
