/* libFuzzer entry: a client's address behind proxies. The first line of an input has the trusted networks, the second the
 * peer, each other line a header (after #: of another name). Compared with a plain parser of the whole list. */
#include "server/http/forwarded.h"
#include "base/buf.h"

#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NETS = 4 };

/* The next piece of *p without its delimiter, in a block of its own, so that reads past its end are detected. */
static char *piece(const char **p, const char *end, char at)
{
    const char *stop = *p < end ? memchr(*p, at, (size_t)(end - *p)) : NULL;
    size_t n = (size_t)((stop ? stop : end) - *p);
    char *out = malloc(n + 1);
    CHECK(out, "no memory");
    memcpy(out, *p, n);
    out[n] = 0;
    *p = stop ? stop + 1 : end;
    return out;
}

/* Networks have their own address, and no bit of it can be missing. */
static int read_nets(const char *p, struct forwarded_net *nets)
{
    int n = 0;
    for (const char *end = p + strlen(p); p < end && n < NETS;) {
        struct error err = {0};
        char *text = piece(&p, end, ' ');
        bool ok = forwarded_net_parse(text, &nets[n], &err);
        CHECK(ok == !err.msg[0], "refused without a reason, or taken with one");
        text[strcspn(text, "/")] = 0;
        if (ok) {
            CHECK(nets[n].len >= 0 && nets[n].len <= 128, "%d bits", nets[n].len);
            CHECK(forwarded_trusts(&nets[n], 1, text), "%s is not in its own network", text);
            n++;
        }
        free(text);
    }
    return n;
}

/* An address in the form that the program prints; false: it is none. */
static bool plain(char *text, char *out)
{
    unsigned char a[16], mapped[12] = {[10] = 0xff, [11] = 0xff};
    if (inet_pton(AF_INET, text, a) == 1)
        return inet_ntop(AF_INET, a, out, INET6_ADDRSTRLEN);
    if (inet_pton(AF_INET6, text, a) != 1)
        return false;
    bool four = !memcmp(a, mapped, sizeof mapped);
    return inet_ntop(four ? AF_INET : AF_INET6, a + (four ? 12 : 0), out, INET6_ADDRSTRLEN);
}

/* The same for an element of the list: [a]:1, [a], a:1, a. */
static bool plain_hop(char *text, char *out)
{
    char *close = strchr(text, ']'), *colon = strrchr(text, ':'), *port = NULL;
    if (strlen(text) >= INET6_ADDRSTRLEN + 8) /* too long for an address and a port */
        return false;
    if (text[0] == '[') {
        if (!close || (close[1] && close[1] != ':'))
            return false;
        port = close[1] ? close + 2 : NULL;
        *close = 0;
        text++;
    } else if (colon && colon == strchr(text, ':')) {
        port = colon + 1;
        *colon = 0;
    }
    for (; port && *port; port++)
        if (*port < '0' || *port > '9')
            return false;
    return plain(text, out);
}

/* From the right, as long as the address that added the entry is trusted. */
static void walk(const struct forwarded_net *nets, int n, char *list, bool any, char *who)
{
    for (int hops = 0; any && hops < FORWARDED_HOPS && forwarded_trusts(nets, n, who); hops++) {
        char next[INET6_ADDRSTRLEN], *comma = strrchr(list, ',');
        char *hop = comma ? comma + 1 : list;
        hop += strspn(hop, " \t");
        for (size_t len = strlen(hop); len && strchr(" \t", hop[len - 1]);)
            hop[--len] = 0;
        if (!plain_hop(hop, next))
            return;
        memcpy(who, next, sizeof next);
        any = comma != NULL;
        if (comma)
            *comma = 0;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct http_head h;
    const char *p = (const char *)data, *end = p + size;
    struct forwarded_net nets[NETS];
    struct buf list = {0};
    char *first = piece(&p, end, '\n'), *peer = piece(&p, end, '\n'), *values[HTTP_MAX_HEADERS];
    int n = read_nets(first, nets), said = 0;
    h.n_headers = 0;
    while (p < end && h.n_headers < HTTP_MAX_HEADERS) {
        char *value = values[h.n_headers] = piece(&p, end, '\n');
        bool other = value[0] == '#';
        h.headers[h.n_headers++] =
            (struct http_header){other ? "X-Forwarded" : "x-forwarded-for", value};
        if (!other)
            buf_addf(&list, "%s%s", said++ ? "," : "", value);
    }
    char got[INET6_ADDRSTRLEN], want[INET6_ADDRSTRLEN];
    memset(got, 'x', sizeof got);
    snprintf(want, sizeof want, "%.*s", INET6_ADDRSTRLEN - 1, peer);
    forwarded_client(nets, n, peer, &h, got);
    CHECK(memchr(got, 0, sizeof got), "no end");
    if (forwarded_trusts(nets, n, peer)) /* unchanged: a truncated entry is no address */
        walk(nets, n, list.len ? list.p : (char[1]){0}, said > 0, want);
    CHECK(!strcmp(got, want), "%s, not %s", got, want);
    for (int i = 0; i < h.n_headers; i++)
        free(values[i]);
    buf_clear(&list);
    free(peer);
    free(first);
    return 0;
}
