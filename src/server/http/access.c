/* See access.h. */
#include "server/http/access.h"
#include "base/buf.h"

#include <arpa/inet.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

const char *access_bearer(struct http_exchange *x)
{
    const char *v = http_header(http_request(x), "Authorization");
    if (v && !strncasecmp(v, "Bearer ", 7))
        return v + 7 + strspn(v + 7, " ");
    v = http_header(http_request(x), "X-Api-Key");          /* Anthropic's clients */
    return v ? v : http_header(http_request(x), "Api-Key"); /* Azure's */
}

/* Constant-time comparison. */
bool access_key(const struct access_rules *a, struct http_exchange *x)
{
    const char *key = access_bearer(x);
    bool found = a->n_keys == 0;
    for (int i = 0; key && i < a->n_keys; i++) {
        size_t n = strlen(a->keys[i]);
        if (strlen(key) == n && !CRYPTO_memcmp(key, a->keys[i], n))
            found = true;
    }
    return found;
}

/* The /64 of an IPv6 address, which a client owns whole. False: it is another address. */
static bool network_of(const char *address, unsigned char out[8])
{
    struct in6_addr v6;
    if (inet_pton(AF_INET6, address, &v6) != 1)
        return false;
    memcpy(out, &v6, 8);
    return true;
}

char *access_owner(const struct access_rules *a, struct http_exchange *x)
{
    const char *key = access_bearer(x);
    unsigned char net[8];
    struct buf b = {0};
    if (a->n_keys == 0 && network_of(http_client(x), net))
        for (int i = 0; i < 8; i++)
            buf_addf(&b, "%02x", net[i]);
    else if (a->n_keys == 0)
        buf_adds(&b, http_client(x));
    buf_addf(&b, "\n%s", key ? key : "");
    return buf_take(&b);
}

uint64_t access_client(const struct access_rules *a, uint64_t secret, struct http_exchange *x)
{
    const char *key = a->n_keys ? access_bearer(x)
                                : NULL; /* without keys configured, a client could invent many */
    const char *address = http_client(x), *name = key ? key : address;
    size_t n = strlen(name);
    unsigned char net[8];
    if (!key && network_of(address, net)) {
        name = (const char *)net;
        n = sizeof net;
    }
    uint64_t h = secret ^ 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ (unsigned char)name[i]) * 0x100000001b3u;
    return h;
}

/* Copies the name of "name:port" or "[address]:port", without a final dot. False: malformed. */
static bool host_name(const char *v, char *out, size_t size)
{
    const char *end;
    if (*v == '[') {
        end = strchr(++v, ']');
        if (!end || (end[1] && end[1] != ':'))
            return false;
    } else {
        end = v + strcspn(v, ":");
    }
    size_t n = (size_t)(end - v);
    if (n && v[n - 1] == '.')
        n--;
    if (!n || n >= size)
        return false;
    memcpy(out, v, n);
    out[n] = 0;
    return true;
}

static bool is_localhost(const char *name)
{
    size_t n = strlen(name);
    return !strcasecmp(name, "localhost") || (n > 10 && !strcasecmp(name + n - 10, ".localhost"));
}

bool access_is_loopback(const char *host)
{
    char name[256];
    unsigned char four[4];
    struct in6_addr six;
    if (!host_name(host, name, sizeof name))
        snprintf(name, sizeof name, "%s", host);
    if (inet_pton(AF_INET, name, four) == 1)
        return four[0] == 127;
    if (inet_pton(AF_INET6, name, &six) == 1 || inet_pton(AF_INET6, host, &six) == 1)
        return IN6_IS_ADDR_LOOPBACK(&six);
    return is_localhost(name);
}

static bool ends_with(const char *name, const char *end)
{
    size_t n = strlen(name), m = strlen(end);
    return n > m && !strcasecmp(name + n - m, end);
}

/* A name that nobody can register: of this machine or of its own network. */
static bool is_private_name(const char *name)
{
    return is_localhost(name) || !strchr(name, '.') || ends_with(name, ".local") ||
           ends_with(name, ".internal");
}

/* DNS rebinding needs a public name: whoever owns it can point it here. An address is safe. A page does not know the
 * key, so that behind a key a server on the network takes any name. */
bool access_host(const struct access_rules *a, struct http_exchange *x)
{
    const char *v = http_header(http_request(x), "Host");
    char name[256], own[256] = "";
    unsigned char address[16];
    for (int i = 0; i < a->n_hosts; i++)
        if (!strcmp(a->hosts[i], "*"))
            return true;
    if (!v) /* HTTP/1.0: not a browser */
        return true;
    if (!host_name(v, name, sizeof name))
        return false;
    if (inet_pton(AF_INET, name, address) == 1 || inet_pton(AF_INET6, name, address) == 1)
        return true;
    for (int i = 0; i < a->n_hosts; i++)
        if (!strcasecmp(a->hosts[i], name))
            return true;
    if (gethostname(own, sizeof own - 1))
        own[0] = 0;
    return is_private_name(name) || !strcasecmp(name, a->host) || !strcasecmp(name, own) ||
           (a->n_keys && !access_is_loopback(a->host));
}

/* An origin on this machine: http or https, a loopback name, any port. */
static bool is_local_origin(const char *origin)
{
    char name[256];
    const char *at = !strncasecmp(origin, "http://", 7)    ? origin + 7
                     : !strncasecmp(origin, "https://", 8) ? origin + 8
                                                           : NULL;
    return at && host_name(at, name, sizeof name) &&
           (is_localhost(name) || !strcmp(name, "127.0.0.1") || !strcmp(name, "::1"));
}

/* Whether the origin is in --cors-origin, or on this machine if there is none. *any: allowed by "*". */
static bool origin_listed(const struct access_rules *a, const char *origin, bool *any)
{
    *any = false;
    if (!a->n_origins)
        return is_local_origin(origin);
    for (int i = 0; i < a->n_origins; i++) {
        *any = !strcmp(a->origins[i], "*");
        if (*any || !strcmp(a->origins[i], origin))
            return true;
    }
    return false;
}

/* Browsers send Origin or Sec-Fetch-Site with a POST, and pages cannot forge them. */
bool access_origin(const struct access_rules *a, struct http_exchange *x)
{
    const struct http_head *h = http_request(x);
    const char *origin = http_header(h, "Origin"), *host = http_header(h, "Host");
    const char *site = http_header(h, "Sec-Fetch-Site");
    bool any;
    if (site && (!strcmp(site, "same-origin") || !strcmp(site, "none")))
        return true;
    if (!origin)
        return !site || strcmp(site, "cross-site") != 0;
    const char *name = strstr(origin, "://");
    return origin_listed(a, origin, &any) || (name && host && !strcasecmp(name + 3, host));
}

/* Compressed bodies are refused: their decompressed size is unknown before the work is done. */
bool access_encoding(struct http_exchange *x)
{
    const char *v = http_header(http_request(x), "Content-Encoding");
    return !v || !*v || !strcasecmp(v, "identity");
}

/* A form with files is never JSON. Any other type is taken: fetch() sends text/plain unless told otherwise, and
 * access_origin refuses the posts of other sites, whatever their type. */
bool access_type(struct http_exchange *x)
{
    const char *v = http_header(http_request(x), "Content-Type");
    size_t n = v ? strcspn(v, "; \t") : 0;
    return !(n == 19 && !strncasecmp(v, "multipart/form-data", n));
}

void access_add_cors(const struct access_rules *a, struct http_exchange *x)
{
    const char *origin = http_header(http_request(x), "Origin");
    bool any;
    if (!origin || !origin_listed(a, origin, &any))
        return;
    http_add_header(x, "Access-Control-Allow-Origin", any ? "*" : origin);
    http_add_header(x, "Access-Control-Expose-Headers", "X-Request-Id, Request-Id, Retry-After");
    if (!any)
        http_add_header(x, "Vary", "Origin");
}

void access_preflight(struct http_exchange *x)
{
    const char *want = http_header(http_request(x), "Access-Control-Request-Headers");
    http_add_header(x, "Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS");
    http_add_header(x, "Access-Control-Allow-Headers",
                    want ? want : "Authorization, Content-Type, X-Api-Key");
    http_add_header(x, "Access-Control-Max-Age", "86400");
    http_reply(x, 204, NULL, "", 0);
}
