/* See image_fetch.h. */
#include "server/api/image_fetch.h"
#include "base/clock.h"
#include "base/curl.h"
#include "base/mem.h"
#include "base/os.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>

enum { CONNECT_S = 5, TOTAL_S = 20, MAX_REDIRECTS = 3, MAX_ORIGIN = 300, MAX_BYTES = 32 << 20 };

/* A fetch. */
struct fetch {
    struct image_fetches *all;
    const atomic_bool *stop;
    struct buf *out;
    bool any_address; /* the origin is an address of the list */
    bool refused, too_large;
};

bool image_fetch_prepare(struct error *err)
{
    return curl_load("--allow-image-origins needs", err);
}

/* Addresses */

static bool in_net(uint32_t ip, uint32_t net, int bits)
{
    return ip >> (32 - bits) == net >> (32 - bits);
}

static bool ipv4_private(uint32_t ip)
{
    static const struct {
        uint32_t net;
        int bits;
    } nets[] = {
        {0x00000000, 8},                    /* this network */
        {0x0a000000, 8},                    /* private */
        {0x64400000, 10},                   /* carriers' */
        {0x7f000000, 8},                    /* loopback */
        {0xa9fe0000, 16},                   /* link-local, with the metadata of clouds */
        {0xac100000, 12},                   /* private */
        {0xc0000000, 24},                   /* protocols */
        {0xc0000200, 24},                   /* documentation */
        {0xc0586300, 24},                   /* 6to4 relays */
        {0xc0a80000, 16},                   /* private */
        {0xc6120000, 15},                   /* benchmarks */
        {0xc6336400, 24}, {0xcb007100, 24}, /* documentation */
        {0xe0000000, 4},                    /* multicast */
        {0xf0000000, 4},                    /* reserved, broadcast */
    };
    for (size_t i = 0; i < sizeof nets / sizeof *nets; i++)
        if (in_net(ip, nets[i].net, nets[i].bits))
            return true;
    return false;
}

static uint32_t word_of(const uint8_t *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static bool ipv6_private(const uint8_t *a)
{
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    static const uint8_t nat64[12] = {0x00, 0x64, 0xff, 0x9b};
    if (!memcmp(a, mapped, sizeof mapped))
        return ipv4_private(word_of(a + 12));
    if (a[0] == 0x20 && a[1] == 0x02) /* 6to4 */
        return ipv4_private(word_of(a + 2));
    if (!memcmp(a, nat64, sizeof nat64))
        return ipv4_private(word_of(a + 12));
    if (word_of(a) == 0x20010000 || word_of(a) == 0x20010db8) /* Teredo, documentation */
        return true;
    return (a[0] & 0xe0) != 0x20; /* only 2000::/3 is public */
}

/* Whether no public server can have the address. */
static bool is_private(const struct sockaddr *a)
{
    if (a->sa_family == AF_INET) {
        struct sockaddr_in in;
        memcpy(&in, a, sizeof in);
        return ipv4_private(ntohl(in.sin_addr.s_addr));
    }
    if (a->sa_family == AF_INET6) {
        struct sockaddr_in6 in6;
        memcpy(&in6, a, sizeof in6);
        return ipv6_private(in6.sin6_addr.s6_addr);
    }
    return true;
}

/* Origins */

/* The URL's scheme://host[:port] in lower case, without a default port. False: it has none, or anything in it that
 * parsers read differently. */
static bool origin_of(const char *url, char *out, size_t size)
{
    const char *slashes = strstr(url, "://");
    size_t scheme = slashes ? (size_t)(slashes - url) : 0, n = 0;
    if (!slashes || ((scheme != 4 || strncasecmp(url, "http", 4) != 0) &&
                     (scheme != 5 || strncasecmp(url, "https", 5) != 0)))
        return false;
    for (const unsigned char *p = (const unsigned char *)url; *p; p++)
        if (*p <= ' ' || *p >= 0x7f || *p == '\\')
            return false;
    size_t len = scheme + 3 + strcspn(slashes + 3, "/?#");
    if (len >= size || len == scheme + 3)
        return false;
    for (; n < len; n++) {
        char c = (char)tolower((unsigned char)url[n]);
        if (n >= scheme + 3 && !isalnum((unsigned char)c) && !strchr(".-:[]", c))
            return false; /* also credentials */
        out[n] = c;
    }
    out[n] = 0;
    const char *port = scheme == 4 ? ":80" : ":443";
    size_t tail = strlen(port);
    if (n > tail && !strcmp(out + n - tail, port))
        out[n - tail] = 0;
    return true;
}

/* Whether the host of an origin is an address, or localhost. */
static bool is_address(const char *origin)
{
    char host[MAX_ORIGIN];
    struct in_addr in;
    snprintf(host, sizeof host, "%s", strstr(origin, "://") + 3);
    if (*host == '[')
        return true;
    host[strcspn(host, ":")] = 0;
    return inet_pton(AF_INET, host, &in) == 1 || !strcmp(host, "localhost");
}

static bool is_allowed(const struct image_origins *o, const char *origin)
{
    char listed[MAX_ORIGIN];
    for (int i = 0; i < o->n; i++)
        if (origin_of(o->list[i], listed, sizeof listed) && !strcmp(listed, origin))
            return true;
    return false;
}

/* Transfers */

static size_t on_body(char *p, size_t size, size_t n, void *arg)
{
    struct fetch *f = arg;
    size_t len = size * n;
    f->too_large = len > (size_t)MAX_BYTES - f->all->n_bytes - f->out->len;
    if (f->too_large || !buf_try_reserve(f->out, len + 1))
        return 0;
    buf_add(f->out, p, len);
    return len;
}

static int on_progress(void *arg, curl_off_t total, curl_off_t now, curl_off_t sent, curl_off_t all)
{
    (void)total, (void)now, (void)sent, (void)all;
    const struct fetch *f = arg;
    return f->stop && atomic_load(f->stop);
}

static curl_socket_t on_socket(void *arg, curlsocktype purpose, struct curl_sockaddr *a)
{
    struct fetch *f = arg;
    if (purpose != CURLSOCKTYPE_IPCXN || (!f->any_address && is_private(&a->addr))) {
        f->refused = true;
        return CURL_SOCKET_BAD;
    }
    return os_socket(a->family, a->socktype, a->protocol, true);
}

static bool set_up(CURL *h, struct fetch *f, const char *url)
{
    int64_t left_ms = (f->all->until_ns - clock_ns()) / 1000000;
    return curl.easy_setopt(h, CURLOPT_URL, url) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_FOLLOWLOCATION, 0L) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_PROXY, "") == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_NETRC, (long)CURL_NETRC_IGNORED) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_S) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_TIMEOUT_MS, (long)(left_ms > 0 ? left_ms : 1)) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_MAXFILESIZE_LARGE,
                            (curl_off_t)((size_t)MAX_BYTES - f->all->n_bytes)) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_USERAGENT, "steel") == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_OPENSOCKETFUNCTION, on_socket) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_OPENSOCKETDATA, f) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_WRITEFUNCTION, on_body) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_WRITEDATA, f) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_NOPROGRESS, 0L) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_XFERINFOFUNCTION, on_progress) == CURLE_OK &&
           curl.easy_setopt(h, CURLOPT_XFERINFODATA, f) == CURLE_OK;
}

static bool fail(const struct fetch *f, const char *origin, CURLcode code, struct error *err)
{
    if (f->stop && atomic_load(f->stop))
        return error_set(err, "cancelled");
    if (f->refused)
        return error_set(err, "%s has a private address: images are not fetched from there",
                         origin);
    if (f->too_large || code == CURLE_FILESIZE_EXCEEDED)
        return error_set(err,
                         f->all->n_bytes
                             ? "the image at %s and those before it have more than %d bytes"
                             : "the image at %s has more than %d bytes",
                         origin, MAX_BYTES);
    if (code == CURLE_OPERATION_TIMEDOUT && clock_ns() >= f->all->until_ns)
        return error_set(err, "fetching the images of this request takes more than %d s: %s",
                         TOTAL_S, origin);
    return error_set(err, "the image cannot be fetched from %s: %s", origin,
                     curl.easy_strerror(code));
}

/* One request. next: set to where the answer redirects to; mem_free. */
static bool fetch_one(struct fetch *f, const char *url, const char *origin, char **next,
                      struct error *err)
{
    CURL *h = curl.easy_init();
    char *to = NULL;
    long status = 0;
    buf_reset(f->out);
    if (!h || !set_up(h, f, url)) {
        if (h)
            curl.easy_cleanup(h);
        return error_set(err, "the installed libcurl cannot fetch images safely");
    }
    CURLcode code = curl.easy_perform(h);
    if (code == CURLE_OK) {
        curl.easy_getinfo(h, CURLINFO_RESPONSE_CODE, &status);
        curl.easy_getinfo(h, CURLINFO_REDIRECT_URL, &to);
    }
    bool ok = code == CURLE_OK || fail(f, origin, code, err);
    if (ok && to)
        *next = mem_strdup(to);
    else if (ok && status != 200)
        ok = error_set(err, "the image cannot be fetched from %s: it answers %ld", origin, status);
    curl.easy_cleanup(h);
    return ok;
}

static bool fetch_all(struct fetch *f, const char *url, struct error *err)
{
    char origin[MAX_ORIGIN], *at = mem_strdup(url);
    for (int hop = 0; hop <= MAX_REDIRECTS; hop++) {
        char *next = NULL;
        bool ok = origin_of(at, origin, sizeof origin) ||
                  error_set(err, "the image's URL is not http://host/... or https://host/...");
        ok = ok && (is_allowed(f->all->origins, origin) ||
                    error_set(err, "%s%.200s is not one of --allow-image-origins",
                              hop ? "the image was redirected: " : "", origin));
        if (ok)
            f->any_address = is_address(origin);
        ok = ok && fetch_one(f, at, origin, &next, err);
        mem_free(at);
        if (!ok || !next)
            return ok;
        at = next;
    }
    mem_free(at);
    return error_set(err, "the image was redirected more than %d times", MAX_REDIRECTS);
}

bool image_fetch(void *arg, const char *url, const atomic_bool *stop, struct buf *out,
                 struct error *err)
{
    struct fetch f = {.all = arg, .stop = stop, .out = out};
    if (!f.all->until_ns)
        f.all->until_ns = clock_ns() + (int64_t)TOTAL_S * 1000000000;
    struct mem_job *job = mem_job_suspend(); /* libcurl's callbacks cannot be abandoned */
    bool ok = fetch_all(&f, url, err);
    mem_job_resume(job);
    f.all->n_bytes += out->len;
    if (!ok)
        buf_clear(out);
    return ok;
}
