/*
 * Who may ask: API keys, the Host header (a page of somebody else whose name suddenly means this
 * machine), pages of other sites that post without asking first, and who a client is. Looks at heads
 * only; knows neither bodies nor models. The server and the gateway share it.
 */
#ifndef STEEL_SERVER_ACCESS_H
#define STEEL_SERVER_ACCESS_H

#include "server/http/http.h"

struct access_rules {
    const char *const *keys; /* (n_keys) API keys; none = open to all */
    int n_keys;
    const char *const *origins; /* (n_origins) allowed by CORS; "*" = all; none = this machine's */
    int n_origins;
    const char *const *hosts; /* (n_hosts) names in Host headers beside our own; "*" = all */
    int n_hosts;
    const char *host; /* the name or address that is listened on */
};

const char *access_bearer(struct http_exchange *x); /* the API key it carries; NULL = none */
bool access_key(const struct access_rules *a, struct http_exchange *x);
uint64_t access_client(const struct access_rules *a, uint64_t secret, struct http_exchange *x);
bool access_host(const struct access_rules *a, struct http_exchange *x); /* the Host is ours */
bool access_origin(const struct access_rules *a,
                   struct http_exchange *x);   /* no other site's page */
bool access_is_loopback(const char *host);     /* only this machine reaches it */
bool access_type(struct http_exchange *x);     /* not a type that pages may post unasked */
bool access_encoding(struct http_exchange *x); /* the body is not packed */

/* What a browser wants to read before it gives a page the reply, and the reply to its question. */
void access_add_cors(const struct access_rules *a, struct http_exchange *x);
void access_preflight(struct http_exchange *x);

#endif
