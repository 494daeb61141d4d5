/*
 * Serves the web page. tools/web.sh embeds its files, compressed by gzip, which every browser accepts.
 * Browsers revalidate each time by ETag.
 *
 * The page shows untrusted model output. Its Content-Security-Policy allows only its own scripts, markup
 * only from DOMPurify, and connections only to this server and the origins of --page-connect.
 */
#include "base/embed.h"
#include "server/api/server_int.h"

#include <stdio.h>
#include <string.h>

struct asset {
    const char *name, *type;
    bool packed;     /* gzip */
    const char *tag; /* ETag */
    const uint8_t *p, *end;
};

#define ASSET(label, name, type, packed, tag, file) EMBED_FILE(web_##label, file);
#include WEB_ASSETS
#undef ASSET

static const struct asset assets[] = {
#define ASSET(label, name, type, packed, tag, file)                                                \
    {name, type, packed, tag, web_##label##_begin, web_##label##_end},
#include WEB_ASSETS
#undef ASSET
};

static const struct asset *find(const char *name)
{
    for (size_t i = 0; i < sizeof assets / sizeof *assets; i++)
        if (!strcmp(assets[i].name, name))
            return &assets[i];
    return NULL;
}

/* scheme://host[:port], without characters that could end the policy. */
bool web_origin_valid(const char *origin)
{
    size_t n = !strncmp(origin, "http://", 7) ? 7 : !strncmp(origin, "https://", 8) ? 8 : 0;
    size_t rest =
        strspn(origin + n, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                           ".-:*[]");
    return n && rest && !origin[n + rest];
}

static void add_policy(const struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    buf_adds(&b, "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
                 "img-src 'self' data:; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
                 "frame-ancestors 'none'; require-trusted-types-for 'script'; "
                 "trusted-types dompurify; connect-src 'self'");
    for (int i = 0; i < s->opt.n_page_origins; i++)
        buf_addf(&b, " %s", s->opt.page_origins[i]);
    buf_addc(&b, 0);
    http_add_header(x, "Content-Security-Policy", b.p);
    buf_clear(&b);
}

static void reply_asset(struct server *s, struct http_exchange *x, const struct asset *a)
{
    const char *known = http_header(http_request(x), "If-None-Match");
    add_policy(s, x);
    http_add_header(x, "X-Content-Type-Options", "nosniff");
    http_add_header(x, "Referrer-Policy", "no-referrer");
    http_add_header(x, "Cache-Control", "no-cache");
    http_add_header(x, "ETag", a->tag);
    if (known && strstr(known, a->tag)) {
        s->n_http[3]++;
        http_reply(x, 304, NULL, "", 0);
        return;
    }
    if (!reply_has_room(x, s, (size_t)(a->end - a->p)))
        return;
    if (a->packed) {
        http_add_header(x, "Content-Encoding", "gzip");
        http_add_header(x, "Vary", "Accept-Encoding");
    }
    s->n_http[2]++;
    http_reply(x, 200, a->type, a->p, (size_t)(a->end - a->p));
}

void get_page(struct server *s, struct http_exchange *x)
{
    reply_asset(s, x, find("index.html"));
}

void get_page_file(struct server *s, struct http_exchange *x)
{
    const char *name = http_request(x)->path + strlen("/web/");
    const struct asset *a = find(name);
    if (a) {
        reply_asset(s, x, a);
        return;
    }
    struct api_error err;
    api_fail(&err, 404, "not_found_error", "the page has no file %.100s", name);
    reply_error(x, s, &err, DIALECT_OPENAI);
}
