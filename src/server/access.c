/*
 * Who may ask: API keys, the Host header (a page of somebody else whose name suddenly means this
 * machine), pages of other sites that post without asking first, and who a client is. Looks at heads
 * only; knows neither bodies nor models.
 */
#include "server/server_int.h"
#include "base/mem.h"

#include <arpa/inet.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static const char *bearer(struct http_exchange *x)
{
    const char *v = http_header(http_request(x), "Authorization");
    if (v && !strncasecmp(v, "Bearer ", 7))
        return v + 7 + strspn(v + 7, " ");
    v = http_header(http_request(x), "X-Api-Key");          /* Anthropic's clients */
    return v ? v : http_header(http_request(x), "Api-Key"); /* Azure's */
}

char *server_key_of(struct http_exchange *x)
{
    const char *key = bearer(x);
    return key ? mem_strdup(key) : NULL;
}

/* Takes the same time whatever the key's content. */
bool access_key(const struct server *s, struct http_exchange *x)
{
    const char *key = bearer(x);
    bool found = s->opt.n_keys == 0;
    for (int i = 0; key && i < s->opt.n_keys; i++) {
        size_t n = strlen(s->opt.keys[i]);
        if (strlen(key) == n && !CRYPTO_memcmp(key, s->opt.keys[i], n))
            found = true;
    }
    return found;
}

uint64_t access_client(const struct server *s, struct http_exchange *x)
{
    const char *key =
        s->opt.n_keys ? bearer(x) : NULL; /* without keys, anybody could make up many */
    const char *address = http_address(x), *name = key ? key : address;
    size_t n = strlen(name);
    struct in6_addr v6;
    if (!key && inet_pton(AF_INET6, address, &v6) == 1) {
        name = (const char *)&v6;
        n = 8; /* who has one address of a network has them all */
    }
    uint64_t h = s->id_secret ^ 0xcbf29ce484222325u;
    for (size_t i = 0; i < n; i++)
        h = (h ^ (unsigned char)name[i]) * 0x100000001b3u;
    return h;
}

/* The name in "name:port" or "[address]:port", without a final dot; false if it is no such thing. */
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

/* An address cannot be made to mean another machine; a name can, by whoever owns it. */
bool access_host(const struct server *s, struct http_exchange *x)
{
    const char *v = http_header(http_request(x), "Host");
    char name[256], own[256] = "";
    unsigned char address[16];
    for (int i = 0; i < s->opt.n_hosts; i++)
        if (!strcmp(s->opt.hosts[i], "*"))
            return true;
    if (!v) /* HTTP/1.0: no browser */
        return true;
    if (!host_name(v, name, sizeof name))
        return false;
    if (inet_pton(AF_INET, name, address) == 1 || inet_pton(AF_INET6, name, address) == 1)
        return true;
    for (int i = 0; i < s->opt.n_hosts; i++)
        if (!strcasecmp(s->opt.hosts[i], name))
            return true;
    if (gethostname(own, sizeof own - 1))
        own[0] = 0;
    return is_localhost(name) || !strcasecmp(name, s->opt.http.host) || !strcasecmp(name, own);
}

/* A page that this machine serves: http or https, one of the names it has for itself, any port. */
static bool is_local_origin(const char *origin)
{
    char name[256];
    const char *at = !strncasecmp(origin, "http://", 7)    ? origin + 7
                     : !strncasecmp(origin, "https://", 8) ? origin + 8
                                                           : NULL;
    return at && host_name(at, name, sizeof name) &&
           (is_localhost(name) || !strcmp(name, "127.0.0.1") || !strcmp(name, "::1"));
}

bool access_origin_listed(const struct server *s, const char *origin, bool *any)
{
    *any = false;
    if (!s->opt.n_origins)
        return is_local_origin(origin);
    for (int i = 0; i < s->opt.n_origins; i++) {
        *any = !strcmp(s->opt.origins[i], "*");
        if (*any || !strcmp(s->opt.origins[i], origin))
            return true;
    }
    return false;
}

/* Browsers say on whose behalf they post, and a page cannot make them say otherwise. */
bool access_origin(const struct server *s, struct http_exchange *x)
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
    return access_origin_listed(s, origin, &any) || (name && host && !strcasecmp(name + 3, host));
}

/* Bodies come as they are: what they would be once unpacked is not known before it is paid for. */
bool access_encoding(struct http_exchange *x)
{
    const char *v = http_header(http_request(x), "Content-Encoding");
    return !v || !*v || !strcasecmp(v, "identity");
}

/* What a form or a page may send anywhere without the browser asking first. Forms' own type is not
 * here: curl says it by default, and from browsers it comes with an Origin. */
bool access_type(struct http_exchange *x)
{
    const char *v = http_header(http_request(x), "Content-Type");
    size_t n = v ? strcspn(v, "; \t") : 0;
    return !(n == 10 && !strncasecmp(v, "text/plain", n)) &&
           !(n == 19 && !strncasecmp(v, "multipart/form-data", n));
}
