/*
 * MCP servers whose tools Steel offers and runs: one thread keeps the connections of all servers, so
 * that no server can make the event loop wait. A server that does not start or dies is tried again,
 * with a growing delay.
 *
 * Invariants:
 *  1. Every call that is started comes back from mcp_next_done exactly once: with its result, failed,
 *     late, cancelled, or at mcp_close.
 *  2. A list is immutable. Whoever holds one sees the servers and tools of one moment.
 */
#ifndef STEEL_SERVER_MCP_H
#define STEEL_SERVER_MCP_H

#include "base/buf.h"
#include "server/mcp/mcp_config.h"
#include "server/mcp/mcp_message.h"

#include <stdatomic.h>

enum mcp_state { MCP_STARTING, MCP_RUNNING, MCP_FAILED };

struct mcp_server {
    char *name;
    enum mcp_state state;
    char *error; /* why it failed; NULL unless it did */
    struct mcp_tools tools;
};
struct mcp_list {
    atomic_int refs;
    struct mcp_server *servers; /* (n) as in the file */
    int n;
};

struct mcp_call {
    char *server, *tool, *arguments; /* owned; arguments: a JSON object */
    uint64_t client;                 /* whose */
    void *user;
    /* its result */
    struct buf text; /* what the tool said, or why it was not run */
    bool is_error;   /* the tool failed */
    bool failed;     /* there is no result: text says why */
    /* private */
    struct mcp_call *next;
    atomic_bool cancelled;
};

struct mcp_options {
    const struct mcp_config *config; /* valid until mcp_close */
    int call_s;                      /* time of a call */
    int done_fd;                     /* os_wake_fd: woken when a call has come back */
};

struct mcp;
struct mcp *mcp_open(const struct mcp_options *opt, struct error *err);
void mcp_stop(struct mcp *m);  /* begins to end the servers and all calls; does not wait */
void mcp_close(struct mcp *m); /* waits for the end. Collect the calls, then mcp_free */
void mcp_free(struct mcp *m);

struct mcp_list *mcp_list_get(struct mcp *m);
void mcp_list_release(struct mcp_list *l); /* any thread; NULL does nothing */
const struct mcp_server *mcp_find_server(const struct mcp_list *l, const char *name);
const struct mcp_tool *mcp_find_tool(const struct mcp_server *s, const char *name);
const char *mcp_state_name(enum mcp_state state);

struct mcp_call *mcp_call_new(const char *server, const char *tool, const char *arguments);
void mcp_call_free(struct mcp_call *c);
void mcp_call_start(struct mcp *m, struct mcp_call *c);
void mcp_call_cancel(struct mcp *m, struct mcp_call *c); /* it still comes back */
struct mcp_call *mcp_next_done(struct mcp *m);           /* NULL = none now */

#endif
