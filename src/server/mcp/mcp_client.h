/*
 * The client's side of the protocol with one server: connecting, agreeing on a version, listing tools,
 * calls, and starting again after a failure. Runs in the thread of mcp.c.
 *
 * Invariants:
 *  1. A request waits for its reply until `deadline`. A reply with another id is ignored.
 *  2. While the link is down no call waits: all of them failed with it.
 */
#ifndef STEEL_SERVER_MCP_CLIENT_H
#define STEEL_SERVER_MCP_CLIENT_H

#include "server/mcp/mcp.h"
#include "server/mcp/mcp_link.h"

struct mcp_client;
struct mcp_client_options {
    const struct mcp_server_config *config;
    CURLM *multi; /* NULL: no server needs it */
    int call_s;
    void (*done)(void *arg, struct mcp_call *c);
    void *arg;
};

struct mcp_client *mcp_client_new(const struct mcp_client_options *opt);
void mcp_client_free(struct mcp_client *c);
void mcp_client_call(struct mcp_client *c, struct mcp_call *call);
int mcp_client_fds(struct mcp_client *c, struct pollfd fds[MCP_LINK_FDS]);
/* Does what is due. Returns how many ms it may take until the next turn. */
int mcp_client_turn(struct mcp_client *c, int64_t now_ns);
void mcp_client_stop(struct mcp_client *c, int64_t now_ns); /* fails all calls, ends the link */
bool mcp_client_stopped(struct mcp_client *c, int64_t now_ns);
/* Whether what `describe` says has changed since it was asked. */
bool mcp_client_changed(const struct mcp_client *c);
void mcp_client_describe(struct mcp_client *c, struct mcp_server *out);

#endif
