/*
 * The client's address behind trusted proxies (--trusted-proxy), from X-Forwarded-For. The header is
 * ignored in requests of other peers. Pure text; knows no sockets.
 *
 * Each proxy appends the address of its peer to the header, so only the end of the list is trustworthy.
 * It is read from the right, past trusted proxies, up to the first other address. A malformed element
 * ends the search, and the last address before it, a trusted proxy, is the result.
 */
#ifndef STEEL_SERVER_FORWARDED_H
#define STEEL_SERVER_FORWARDED_H

#include "base/error.h"
#include "server/http/http_parse.h"

#include <netinet/in.h>

/* A network: its first `len` bits. IPv4 is ::ffff:0:0/96. */
struct forwarded_net {
    struct in6_addr first;
    int len;
};

/* "10.0.0.7", "10.0.0.0/8", "fd00::/8". */
bool forwarded_net_parse(const char *text, struct forwarded_net *out, struct error *err);
bool forwarded_trusts(const struct forwarded_net *nets, int n, const char *address);
/* The address of the client whose request came from `peer`. out (INET6_ADDRSTRLEN) */
enum { FORWARDED_HOPS = 32 }; /* at most this many elements are read */
void forwarded_client(const struct forwarded_net *nets, int n, const char *peer,
                      const struct http_head *h, char *out);

#endif
