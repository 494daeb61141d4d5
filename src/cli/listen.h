/* The flags that `steel serve` and `steel route` share: address, keys, limits, log. */
#ifndef STEEL_CLI_LISTEN_H
#define STEEL_CLI_LISTEN_H

#include "cli/cli.h"
#include "server/http/access.h"
#include "server/http/forwarded.h"

enum { LISTEN_PROXIES = 64 };

struct listen_flags {
    struct http_options http;
    const char *key_file, *log_format, *log_level, *max_body, *max_buffered;
    struct opt_list keys, origins, hosts, proxies;
    struct forwarded_net nets[LISTEN_PROXIES];
    int grace_s;
    struct buf key_text; /* the text of the key file */
};

/* Rows of a table of options; f is a struct listen_flags. */
#define LISTEN_ROWS(f)                                                                             \
    {OPT_STRING, 0, "host", 0, &(f).http.host, 0, 0, "ADDR", "address (default 127.0.0.1)"},       \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "port",                                                                                   \
         0,                                                                                        \
         &(f).http.port,                                                                           \
         0,                                                                                        \
         65535,                                                                                    \
         "N",                                                                                      \
         "port (default 8080; 0 = any free port)"},                                                \
        {OPT_LIST, 0, "api-key", 0, &(f).keys, 0, 0, "KEY", "require this key (repeatable)"},      \
        {OPT_STRING, 0, "api-key-file", 0, &(f).key_file, 0, 0, "FILE", "keys, one per line"},     \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "ssl-cert-file",                                                                          \
         "ssl-certfile",                                                                           \
         &(f).http.cert_file,                                                                      \
         0,                                                                                        \
         0,                                                                                        \
         "FILE",                                                                                   \
         "TLS certificate chain, PEM"},                                                            \
        {OPT_STRING, 0, "ssl-key-file", "ssl-keyfile",         &(f).http.key_file,                 \
         0,          0, "FILE",         "TLS private key, PEM"},                                   \
        {OPT_LIST,                                                                                 \
         0,                                                                                        \
         "cors-origin",                                                                            \
         "allowed-origins",                                                                        \
         &(f).origins,                                                                             \
         0,                                                                                        \
         0,                                                                                        \
         "ORIGIN",                                                                                 \
         "origin whose pages may call (default: localhost); * = any (repeatable)"},                \
        {OPT_LIST,                                                                                 \
         0,                                                                                        \
         "allowed-hosts",                                                                          \
         "allowed-host",                                                                           \
         &(f).hosts,                                                                               \
         0,                                                                                        \
         0,                                                                                        \
         "NAME",                                                                                   \
         "further name accepted in Host headers; * = any (repeatable)"},                           \
        {OPT_LIST,                                                                                 \
         0,                                                                                        \
         "trusted-proxy",                                                                          \
         "forwarded-allow-ips",                                                                    \
         &(f).proxies,                                                                             \
         0,                                                                                        \
         0,                                                                                        \
         "ADDR[/BITS]",                                                                            \
         "trust X-Forwarded-For from this proxy (repeatable)"},                                    \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "max-body",                                                                               \
         0,                                                                                        \
         &(f).max_body,                                                                            \
         0,                                                                                        \
         0,                                                                                        \
         "SIZE",                                                                                   \
         "maximum request body (default 32M); larger ones get 413"},                               \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "max-buffered",                                                                           \
         0,                                                                                        \
         &(f).max_buffered,                                                                        \
         0,                                                                                        \
         0,                                                                                        \
         "SIZE",                                                                                   \
         "request bodies in memory (default 8 times --max-body); beyond that 503"},                \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "max-connections",                                                                        \
         0,                                                                                        \
         &(f).http.max_conns,                                                                      \
         1,                                                                                        \
         65536,                                                                                    \
         "N",                                                                                      \
         "open connections (default 4096)"},                                                       \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "max-connections-per-address",                                                            \
         0,                                                                                        \
         &(f).http.max_conns_each,                                                                 \
         1,                                                                                        \
         65536,                                                                                    \
         "N",                                                                                      \
         "open connections per address (default 7/8 of all; a proxy is one address)"},             \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "timeout",                                                                                \
         0,                                                                                        \
         &(f).http.write_s,                                                                        \
         1,                                                                                        \
         86400,                                                                                    \
         "S",                                                                                      \
         "disconnect a client that reads no data for this long (default 30)"},                     \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "read-timeout",                                                                           \
         0,                                                                                        \
         &(f).http.read_s,                                                                         \
         1,                                                                                        \
         86400,                                                                                    \
         "S",                                                                                      \
         "timeout of a whole request, plus 1 s per 32 kB of body (default 30)"},                   \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "idle-timeout",                                                                           \
         0,                                                                                        \
         &(f).http.idle_s,                                                                         \
         1,                                                                                        \
         86400,                                                                                    \
         "S",                                                                                      \
         "timeout of idle connections (default 75)"},                                              \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "grace",                                                                                  \
         0,                                                                                        \
         &(f).grace_s,                                                                             \
         0,                                                                                        \
         86400,                                                                                    \
         "S",                                                                                      \
         "time to finish requests after SIGTERM (default 30)"},                                    \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "log-format",                                                                             \
         0,                                                                                        \
         &(f).log_format,                                                                          \
         0,                                                                                        \
         0,                                                                                        \
         "FMT",                                                                                    \
         "text or json (default text)"},                                                           \
    {                                                                                              \
        OPT_STRING, 0, "log-level", 0, &(f).log_level, 0, 0, "LEVEL",                              \
            "debug, info, warn or error (default info)"                                            \
    }

struct listen_flags listen_flags_default(void);
/* Checks the flags and configures the log; false after a usage message. */
bool listen_flags_finish(const struct usage *u, struct listen_flags *f);
/* Fills in the access rules, with the keys of the key file. They point into the flags. */
bool listen_access(struct listen_flags *f, struct access_rules *out, struct error *err);
void listen_flags_clear(struct listen_flags *f);

/* "8G", "512M", "1.5g", or bytes. */
bool cli_parse_bytes(const char *s, size_t *out);

#endif
