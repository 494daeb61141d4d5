/* Flags of whatever listens (`steel serve`, `steel route`): address, keys, limits, log. */
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
    struct buf key_text; /* of the key file */
};

/* Rows for a table of options; f is a struct listen_flags. */
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
         "port (default 8080; 0 = any free one)"},                                                 \
        {OPT_LIST, 0,         "api-key",                                                           \
         0,        &(f).keys, 0,                                                                   \
         0,        "KEY",     "allow only with this key (repeatable)"},                            \
        {OPT_STRING, 0, "api-key-file", 0, &(f).key_file, 0, 0, "FILE", "keys, one a line"},       \
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
         "let pages of this origin call (default: localhost's); * = any (repeatable)"},            \
        {OPT_LIST,                                                                                 \
         0,                                                                                        \
         "allowed-hosts",                                                                          \
         "allowed-host",                                                                           \
         &(f).hosts,                                                                               \
         0,                                                                                        \
         0,                                                                                        \
         "NAME",                                                                                   \
         "another name of this server in Host headers; * = any (repeatable)"},                     \
        {OPT_LIST,                                                                                 \
         0,                                                                                        \
         "trusted-proxy",                                                                          \
         "forwarded-allow-ips",                                                                    \
         &(f).proxies,                                                                             \
         0,                                                                                        \
         0,                                                                                        \
         "ADDR[/BITS]",                                                                            \
         "believe this proxy's X-Forwarded-For: clients are told apart by it (repeatable)"},       \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "max-body",                                                                               \
         0,                                                                                        \
         &(f).max_body,                                                                            \
         0,                                                                                        \
         0,                                                                                        \
         "SIZE",                                                                                   \
         "largest request (default 32M); larger ones get 413"},                                    \
        {OPT_STRING,                                                                               \
         0,                                                                                        \
         "max-buffered",                                                                           \
         0,                                                                                        \
         &(f).max_buffered,                                                                        \
         0,                                                                                        \
         0,                                                                                        \
         "SIZE",                                                                                   \
         "requests held at once (default 8 of the largest); beyond that 503"},                     \
        {OPT_INT, 0,   "max-connections",       0, &(f).http.max_conns, 1,                         \
         65536,   "N", "at once (default 1024)"},                                                  \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "max-connections-per-address",                                                            \
         0,                                                                                        \
         &(f).http.max_conns_each,                                                                 \
         1,                                                                                        \
         65536,                                                                                    \
         "N",                                                                                      \
         "of one address (default 7/8 of all; a proxy is one address)"},                           \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "timeout",                                                                                \
         0,                                                                                        \
         &(f).http.write_s,                                                                        \
         1,                                                                                        \
         86400,                                                                                    \
         "S",                                                                                      \
         "drop a client that takes no data for so long (default 30)"},                             \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "read-timeout",                                                                           \
         0,                                                                                        \
         &(f).http.read_s,                                                                         \
         1,                                                                                        \
         86400,                                                                                    \
         "S",                                                                                      \
         "for a request to arrive whole; large bodies get 1 s more for 32 kB (default 30)"},       \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "keep-alive",                                                                             \
         0,                                                                                        \
         &(f).http.idle_s,                                                                         \
         1,                                                                                        \
         86400,                                                                                    \
         "S",                                                                                      \
         "keep an idle connection for so long (default 75)"},                                      \
        {OPT_INT,                                                                                  \
         0,                                                                                        \
         "grace",                                                                                  \
         0,                                                                                        \
         &(f).grace_s,                                                                             \
         0,                                                                                        \
         86400,                                                                                    \
         "S",                                                                                      \
         "after SIGTERM let answers finish for so long (default 30)"},                             \
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
/* Checks the flags and sets up the log; false after a usage message. */
bool listen_flags_finish(const struct usage *u, struct listen_flags *f);
/* The rules, with the key file's keys; they point into the flags. */
bool listen_access(struct listen_flags *f, struct access_rules *out, struct error *err);
void listen_flags_clear(struct listen_flags *f);

/* "8G", "512M", "1.5g", or bytes. */
bool cli_parse_bytes(const char *s, size_t *out);

#endif
