/*
 * Who asks through a proxy. A proxy that is trusted (--trusted-proxy) says in X-Forwarded-For whom it speaks
 * for; from anybody else the header means nothing. Addresses and one header; knows no sockets.
 *
 * The header is a list that every proxy adds its own peer to, so only its end can be believed: it is read
 * from the right, past proxies that are trusted, up to the first address that is not. What is no address ends
 * the search: then the last one that was understood is taken, which is a proxy of ours.
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
/* The address of whoever asks: `peer` sent the head. out (INET6_ADDRSTRLEN) */
enum { FORWARDED_HOPS = 32 }; /* further ones are not looked at */
void forwarded_client(const struct forwarded_net *nets, int n, const char *peer,
                      const struct http_head *h, char *out);

#endif
