/*
 * Request and response headers as they are forwarded: without hop-by-hop headers, with headers that
 * identify the client. Text only, no decisions.
 */
#include "route/gateway_int.h"

#include <string.h>
#include <strings.h>

static bool listed(const char *name, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcasecmp(name, list[i]))
            return true;
    return false;
}

/* Hop-by-hop: the headers of the standard, and those named by Connection. */
static bool is_hop_by_hop(const struct http_head *h, const char *name)
{
    static const char *const always[] = {"Connection",
                                         "Keep-Alive",
                                         "Proxy-Connection",
                                         "Proxy-Authenticate",
                                         "Proxy-Authorization",
                                         "TE",
                                         "Trailer",
                                         "Transfer-Encoding",
                                         "Upgrade",
                                         "Content-Length",
                                         "HTTP2-Settings"};
    if (listed(name, always, sizeof always / sizeof *always))
        return true;
    size_t n = strlen(name);
    for (int i = 0; i < h->n_headers; i++) {
        if (strcasecmp(h->headers[i].name, "Connection"))
            continue;
        for (const char *v = h->headers[i].value; *v; v += strcspn(v, ",")) {
            v += strspn(v, ", \t");
            if (!strncasecmp(v, name, n) && (!v[n] || strchr(", \t", v[n])))
                return true;
        }
    }
    return false;
}

static void add_key(const struct gateway *gw, struct http_exchange *x, struct buf *out)
{
    static const char *const carriers[] = {"Authorization", "X-Api-Key", "Api-Key"};
    if (gw->opt.upstream_key) {
        buf_addf(out, "Authorization: Bearer %s\r\n", gw->opt.upstream_key);
        return;
    }
    for (size_t i = 0; x && i < sizeof carriers / sizeof *carriers; i++) {
        const char *v = http_header(http_request(x), carriers[i]);
        if (v)
            buf_addf(out, "%s: %s\r\n", carriers[i], v);
    }
}

void gateway_request_head(const struct gateway *gw, const struct replica *to,
                          struct http_exchange *x, size_t n_body, struct buf *out)
{
    /* Written by the gateway itself, or already checked by it (Origin, Sec-Fetch-Site). */
    static const char *const ours[] = {
        "Host",    "Expect", "X-Request-Id",    "Authorization",     "X-Api-Key",
        "Api-Key", "Origin", "X-Forwarded-For", "X-Forwarded-Proto", "Sec-Fetch-Site"};
    const struct http_head *h = http_request(x);
    buf_addf(out, "%s %s%s HTTP/1.1\r\nHost: %s\r\n", h->method, to->url.path, h->target,
             to->url.name);
    for (int i = 0; i < h->n_headers; i++) {
        const char *name = h->headers[i].name;
        if (!listed(name, ours, sizeof ours / sizeof *ours) && !is_hop_by_hop(h, name))
            buf_addf(out, "%s: %s\r\n", name, h->headers[i].value);
    }
    add_key(gw, x, out);
    buf_addf(out, "X-Request-Id: %s\r\nX-Forwarded-For: ", http_id(x));
    for (int i = 0; i < h->n_headers; i++)
        if (!strcasecmp(h->headers[i].name, "X-Forwarded-For"))
            buf_addf(out, "%s, ", h->headers[i].value);
    buf_addf(out, "%s\r\nX-Forwarded-Proto: %s\r\n", http_address(x),
             gw->opt.http.cert_file ? "https" : "http");
    if (n_body || (strcmp(h->method, "GET") && strcmp(h->method, "HEAD")))
        buf_addf(out, "Content-Length: %zu\r\n", n_body);
    buf_adds(out, "\r\n");
}

void gateway_own_head(const struct gateway *gw, const struct replica *to, const char *path,
                      struct http_exchange *x, struct buf *out)
{
    buf_addf(out, "GET %s%s HTTP/1.1\r\nHost: %s\r\nAccept: */*\r\n", to->url.path, path,
             to->url.name);
    add_key(gw, x, out);
    if (x)
        buf_addf(out, "X-Request-Id: %s\r\n", http_id(x));
    buf_adds(out, "\r\n");
}

bool gateway_forwards_header(const struct http_head *h, const char *name)
{
    /* http.c adds these to every reply. */
    static const char *const ours[] = {"Date", "Server", "Content-Type", "X-Request-Id",
                                       "Request-Id"};
    return !listed(name, ours, sizeof ours / sizeof *ours) && !is_hop_by_hop(h, name);
}
