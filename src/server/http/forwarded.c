/* See forwarded.h. */
#include "server/http/forwarded.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* Parses an IPv4 or IPv6 address; IPv4 is mapped into IPv6. */
static bool parse_address(const char *text, struct in6_addr *out)
{
    struct in_addr four;
    if (inet_pton(AF_INET, text, &four) == 1) {
        *out = (struct in6_addr){0};
        out->s6_addr[10] = out->s6_addr[11] = 0xff;
        memcpy(out->s6_addr + 12, &four, sizeof four);
        return true;
    }
    return inet_pton(AF_INET6, text, out) == 1;
}

static void print_address(const struct in6_addr *a, char *out)
{
    bool four = IN6_IS_ADDR_V4MAPPED(a);
    if (!inet_ntop(four ? AF_INET : AF_INET6, a->s6_addr + (four ? 12 : 0), out, INET6_ADDRSTRLEN))
        snprintf(out, INET6_ADDRSTRLEN, "?");
}

static bool same_bits(const struct in6_addr *a, const struct in6_addr *b, int len)
{
    int bytes = len / 8, rest = len % 8;
    unsigned mask = 0xff00u >> rest & 0xff;
    return memcmp(a, b, (size_t)bytes) == 0 &&
           (!rest || ((a->s6_addr[bytes] ^ b->s6_addr[bytes]) & mask) == 0);
}

bool forwarded_net_parse(const char *text, struct forwarded_net *out, struct error *err)
{
    char address[INET6_ADDRSTRLEN];
    size_t n = strcspn(text, "/");
    snprintf(address, sizeof address, "%.*s", n < sizeof address ? (int)n : 0, text);
    if (!parse_address(address, &out->first))
        return error_set(err, "%.60s: use an address or a network such as 10.0.0.7 or 10.0.0.0/8",
                         text);
    bool four = !strchr(address, ':');
    int most = four ? 32 : 128, len = 0, digits = 0;
    const char *p = text + n;
    if (!*p)
        len = most;
    else
        for (p++; *p >= '0' && *p <= '9' && digits < 3; p++, digits++)
            len = 10 * len + (*p - '0');
    if (*p || (text[n] && !digits) || len > most)
        return error_set(err, "%.60s: the prefix length must be 0 to %d", text, most);
    out->len = len + (four ? 96 : 0);
    return true;
}

static bool trusts(const struct forwarded_net *nets, int n, const struct in6_addr *a)
{
    for (int i = 0; i < n; i++)
        if (same_bits(&nets[i].first, a, nets[i].len))
            return true;
    return false;
}

bool forwarded_trusts(const struct forwarded_net *nets, int n, const char *address)
{
    struct in6_addr a;
    return n && parse_address(address, &a) && trusts(nets, n, &a);
}

/* Parses one list element, [p, p + n): an address with or without a port. */
static bool parse_hop(const char *p, size_t n, struct in6_addr *out)
{
    char text[INET6_ADDRSTRLEN + 8];
    if (n >= sizeof text)
        return false;
    memcpy(text, p, n);
    text[n] = 0;
    if (memchr(p, 0, n))
        return false;
    char *colon = strchr(text, ':'), *address = text;
    if (*text == '[') { /* [address] or [address]:port */
        char *end = strchr(++address, ']');
        if (!end || (end[1] && (end[1] != ':' || strspn(end + 2, "0123456789") != strlen(end + 2))))
            return false;
        *end = 0;
    } else if (colon && !strchr(colon + 1, ':')) { /* address:port */
        if (strspn(colon + 1, "0123456789") != strlen(colon + 1))
            return false;
        *colon = 0;
    }
    return parse_address(address, out);
}

void forwarded_client(const struct forwarded_net *nets, int n, const char *peer,
                      const struct http_head *h, char *out)
{
    struct in6_addr who;
    int hops = 0;
    snprintf(out, INET6_ADDRSTRLEN, "%.*s", INET6_ADDRSTRLEN - 1, peer);
    if (!n || !parse_address(peer, &who))
        return;
    for (int i = h->n_headers - 1; i >= 0; i--) {
        const char *value = h->headers[i].value;
        size_t end = strlen(value);
        if (strcasecmp(h->headers[i].name, "X-Forwarded-For"))
            continue;
        for (bool more = true; more;) {
            struct in6_addr hop;
            size_t first = end;
            if (!trusts(nets, n, &who) || hops++ >= FORWARDED_HOPS)
                return;
            while (first > 0 && value[first - 1] != ',')
                first--;
            size_t from = first + strspn(value + first, " \t"), to = end;
            while (to > from && (value[to - 1] == ' ' || value[to - 1] == '\t'))
                to--;
            if (from > to || !parse_hop(value + from, to - from, &hop))
                return;
            who = hop;
            print_address(&who, out);
            more = first > 0;
            end = first ? first - 1 : 0;
        }
    }
}
