/* See listen.h. */
#include "cli/listen.h"
#include "server/http/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct listen_flags listen_flags_default(void)
{
    return (struct listen_flags){.log_format = "text",
                                 .log_level = "info",
                                 .grace_s = 30,
                                 .http = {.host = "127.0.0.1",
                                          .port = 8080,
                                          .max_body = (size_t)32 << 20,
                                          .max_conns = 4096,
                                          .idle_s = 75,
                                          .read_s = 30,
                                          .write_s = 30}};
}

bool cli_parse_bytes(const char *s, size_t *out)
{
    char *end;
    double v = strtod(s, &end);
    static const char units[] = "KMGT";
    if (end == s || !(v >= 0))
        return false;
    const char *u = *end ? strchr(units, *end & ~32) : NULL;
    if (*end && (!u || (end[1] && strcmp(end + 1, "B") && strcmp(end + 1, "iB"))))
        return false;
    for (long i = u ? u - units + 1 : 0; i > 0; i--)
        v *= 1024;
    *out = (size_t)v;
    return v < 0x1p60;
}

bool listen_flags_finish(const struct usage *u, struct listen_flags *f)
{
    static const char *const levels[] = {"debug", "info", "warn", "error"};
    struct http_options *h = &f->http;
    if (f->max_body && (!cli_parse_bytes(f->max_body, &h->max_body) || !h->max_body ||
                        h->max_body > (size_t)1 << 30)) {
        args_usage_error(u, "--max-body %s: use a size up to 1G, such as 32M", f->max_body);
        return false;
    }
    for (int i = 0; i < f->keys.n; i++)
        if (!*f->keys.items[i]) {
            args_usage_error(u, "--api-key: the key is empty");
            return false;
        }
    h->max_buffered = 8 * h->max_body;
    if (f->max_buffered && !cli_parse_bytes(f->max_buffered, &h->max_buffered)) {
        args_usage_error(u, "--max-buffered %s: use a size such as 256M", f->max_buffered);
        return false;
    }
    if (f->proxies.n > LISTEN_PROXIES) {
        args_usage_error(u, "%d times --trusted-proxy: at most %d", f->proxies.n, LISTEN_PROXIES);
        return false;
    }
    for (int i = 0; i < f->proxies.n; i++) {
        struct error err = {0};
        if (!forwarded_net_parse(f->proxies.items[i], &f->nets[i], &err)) {
            args_usage_error(u, "--trusted-proxy %s", err.msg);
            return false;
        }
    }
    h->proxies = f->nets; /* the flags live longer than the server */
    h->n_proxies = f->proxies.n;
    int level = -1;
    for (int i = 0; i < 4; i++)
        level = !strcmp(f->log_level, levels[i]) ? i : level;
    bool json = !strcmp(f->log_format, "json");
    if (level < 0)
        args_usage_error(u, "--log-level %s: use debug, info, warn or error", f->log_level);
    else if (!json && strcmp(f->log_format, "text"))
        args_usage_error(u, "--log-format %s: use text or json", f->log_format);
    else {
        log_setup((enum log_level)level, json);
        return true;
    }
    return false;
}

/* One key per line. Skips empty lines and lines that begin with #. */
static bool read_keys(const char *path, struct buf *text, struct opt_list *keys, struct error *err)
{
    if (!cli_read_file(path, 1 << 20, text, err))
        return false;
    for (char *line = text->p, *next; line && *line; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = 0;
        line[strcspn(line, "\r \t")] = 0;
        if (*line && *line != '#')
            args_list_add(keys, line);
    }
    return keys->n > 0 || error_set(err, "%s: the file has no key", path);
}

bool listen_access(struct listen_flags *f, struct access_rules *out, struct error *err)
{
    if (f->key_file && !read_keys(f->key_file, &f->key_text, &f->keys, err))
        return false;
    *out = (struct access_rules){.keys = f->keys.items,
                                 .n_keys = f->keys.n,
                                 .origins = f->origins.items,
                                 .n_origins = f->origins.n,
                                 .hosts = f->hosts.items,
                                 .n_hosts = f->hosts.n};
    return true;
}

void listen_flags_clear(struct listen_flags *f)
{
    buf_clear(&f->key_text);
}
