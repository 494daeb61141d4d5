/*
 * The connection to one MCP server: a child process with pipes (mcp_stdio.c), or requests over HTTP
 * (mcp_http.c). Carries messages as text and knows nothing about their meaning. Everything runs in the
 * thread of mcp.c and never waits.
 *
 * Invariants:
 *  1. Handlers run only inside `service`.
 *  2. `closed` is called at most once, and no handler after it. The owner then calls `stop`, waits for
 *     `stopped`, and frees the link.
 *  3. At most MCP_MAX_MESSAGE bytes of an incomplete message and MCP_MAX_UNSENT of output are held.
 */
#ifndef STEEL_SERVER_MCP_LINK_H
#define STEEL_SERVER_MCP_LINK_H

#include "server/mcp/mcp_config.h"

#include <curl/curl.h>
#include <poll.h>
#include <stdint.h>

enum { MCP_MAX_UNSENT = 4 << 20, MCP_LINK_FDS = 3 };

struct mcp_link_handler {
    void (*message)(void *user, const char *text, size_t n);
    /* The request `id` will get no reply. */
    void (*failed)(void *user, int64_t id, const char *why);
    void (*closed)(void *user, const char *why);
    void *user;
};

struct mcp_link;
struct mcp_link_functions {
    /* id: of a request, or -1. False: too much is unsent. */
    bool (*send)(struct mcp_link *l, const char *text, size_t n, int64_t id);
    void (*drop)(struct mcp_link *l, int64_t id); /* nobody waits for this reply any more */
    void (*ready)(struct mcp_link *l, const char *version); /* the protocol version is agreed */
    int (*fds)(struct mcp_link *l, struct pollfd fds[MCP_LINK_FDS]); /* what to wait for */
    void (*service)(struct mcp_link *l, int64_t now_ns); /* reads and writes what it can */
    void (*stop)(struct mcp_link *l, int64_t now_ns);
    bool (*stopped)(struct mcp_link *l, int64_t now_ns); /* call it often after `stop` */
    void (*free)(struct mcp_link *l);                    /* ends at once what has not stopped */
};
struct mcp_link {
    const struct mcp_link_functions *f;
    const struct mcp_server_config *config;
    struct mcp_link_handler h;
    bool soon; /* something will end without an event: call `service` again soon */
};

/* Starts the program. NULL with an error. */
struct mcp_link *mcp_stdio_open(const struct mcp_server_config *c, const struct mcp_link_handler *h,
                                struct error *err);
struct mcp_link *mcp_http_open(const struct mcp_server_config *c, CURLM *multi,
                               const struct mcp_link_handler *h);
/* Passes on the end of a transfer. */
void mcp_http_done(CURL *easy, CURLcode result);

#endif
