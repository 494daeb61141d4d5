/*
 * What an MCP server sends: JSON-RPC 2.0 messages, lists of tools and results of calls, and the event
 * streams that carry messages over HTTP. Servers may be broken or hostile, so everything is checked and
 * bounded here. No I/O and no state but the stream parser's.
 */
#ifndef STEEL_SERVER_MCP_MESSAGE_H
#define STEEL_SERVER_MCP_MESSAGE_H

#include "base/buf.h"
#include "base/error.h"

#include <jansson.h>
#include <stdint.h>

enum {
    MCP_MAX_MESSAGE = 16 << 20, /* bytes of one message */
    MCP_MAX_RESULT = 1 << 20,   /* bytes of a result's text; the rest is cut */
    MCP_MAX_TOOLS = 256,        /* of one server; further tools are dropped */
    MCP_MAX_TOOL_NAME = 128,
    MCP_MAX_DESCRIPTION = 16 << 10, /* bytes; the rest is cut */
    MCP_MAX_SCHEMA = 64 << 10,      /* bytes of a tool's parameters; a tool with more is dropped */
    MCP_MAX_LIST = 1 << 20,         /* bytes of all tools of a server; further tools are dropped */
    MCP_MAX_CURSOR = 4 << 10,
    MCP_MAX_ERROR = 500, /* bytes of an error's message that are kept */
};

enum mcp_kind {
    MCP_INVALID,
    MCP_REQUEST,      /* method, request_id */
    MCP_NOTIFICATION, /* method */
    MCP_RESULT,       /* id, result */
    MCP_ERROR,        /* id, error */
};

struct mcp_message {
    enum mcp_kind kind;
    int64_t id;               /* of a reply; -1 = none that Steel has sent */
    const json_t *request_id; /* a string or an integer */
    const char *method;
    const json_t *result; /* an object */
    char error[MCP_MAX_ERROR + 32];
};

/* Parses the text of a message, or of an array of messages. NULL with an error. */
json_t *mcp_parse(const char *text, size_t n, struct error *err);
/* Reads one message. The views point into v. */
void mcp_message_read(const json_t *v, struct mcp_message *out);

struct mcp_tool {
    char *name, *description, *parameters; /* owned; parameters: a JSON object */
    bool read_only;                        /* the server says so */
};
struct mcp_tools {
    struct mcp_tool *v; /* (n) */
    int n;
    size_t bytes;
    int n_dropped; /* tools that break a bound */
};
void mcp_tools_clear(struct mcp_tools *t);
/* Adds a page of tools/list. *cursor: where the next page begins, owned; NULL = it was the last one. */
bool mcp_tools_read(const json_t *result, struct mcp_tools *t, char **cursor, struct error *err);

/* Appends the result of tools/call as text: images and other parts become a short description. */
void mcp_result_read(const json_t *result, struct buf *text, bool *is_error);

/* An event stream (text/event-stream), piece by piece. Zero-initialise. */
struct mcp_sse {
    struct buf line, data;
    bool after_cr, has_data;
};
/* Calls `event` with the data of each complete event. False: an event exceeds MCP_MAX_MESSAGE. */
bool mcp_sse_feed(struct mcp_sse *s, const char *p, size_t n,
                  void (*event)(void *arg, const char *data, size_t n), void *arg);
void mcp_sse_clear(struct mcp_sse *s);

#endif
