/*
 * Tools of MCP servers in /v1/responses ({"type": "mcp"}), which Steel runs itself: the model's calls run,
 * and the response continues with their results, round by round.
 *
 * Invariants:
 *  1. A round is one engine request. Its output follows that of earlier rounds as further segments of the
 *     response's only choice, which is not `done` before the last round is.
 *  2. Between two rounds a worker prepares the prompt again, from `chat` and `items`. The loop touches
 *     neither meanwhile.
 *  3. n_open counts calls that run, besides engine requests. A request whose client has left is freed when
 *     they have come back.
 *  4. There are at most opt.mcp_rounds rounds of calls.
 */
#ifndef STEEL_SERVER_MCP_LOOP_H
#define STEEL_SERVER_MCP_LOOP_H

#include "server/api/responses.h"
#include "server/mcp/mcp.h"

struct api_choice;
struct api_request;

struct responses_mcp {
    json_t *labels;   /* server_label -> true: servers in tools; owned */
    json_t *lists;    /* items of type mcp_list_tools that the client has not seen; owned */
    json_t *approved; /* id -> item of type mcp_approval_request: calls to run first; owned */
    struct buf chat;  /* the translated body */
    struct buf items; /* output items, separated by commas */
    int max_calls;    /* max_tool_calls; -1 = no limit */
    int max_tokens;   /* of all rounds; 0 = no limit */
    int n_calls, n_rounds;
    int first;     /* segment that begins the round */
    bool begun;    /* the first round has ended: tool_choice no longer applies */
    bool is_last;  /* the client has to continue after this round's calls */
    bool stopped;  /* there were too many rounds */
    bool is_again; /* a worker prepares the next round */
};
void responses_mcp_free(struct responses_mcp *m);

/* On a worker (mcp_tools.c) */

/* A tool of type mcp: appends its functions to `list`. seen: names that are taken. */
bool mcp_tools_add(struct responses_request *r, const json_t *tool, const json_t *allowed,
                   json_t *list, json_t *seen, const char *where, struct api_error *err);
/* The name a tool has for the model. A new reference. */
json_t *mcp_flat_name(const char *server, const char *tool);
/* Translates tool_choice {"type": "mcp"}. */
bool mcp_tool_choice(json_t *out, const json_t *choice, struct api_error *err);
/* Reads max_tool_calls, and checks that approved calls name tools of this request. */
bool mcp_tools_finish(struct responses_request *r, const json_t *body, struct api_error *err);

/* On the loop (mcp_loop.c) */

/* The choice is new: appends the lists and the calls that the client has approved. */
void mcp_loop_begin(struct api_request *req);
/* Starts approved calls. False: there are none. */
bool mcp_loop_run_approved(struct api_request *req);
/* A round's text has ended. True: the response continues, with the calls that were started. */
bool mcp_loop_continue(struct api_request *req);
/* A call has come back. */
void mcp_loop_called(struct api_request *req, struct mcp_call *call);
/* Whether all calls of the round have come back and a worker has to prepare the next one. If so, it is ready for that. */
bool mcp_loop_is_due(struct api_request *req);
void mcp_loop_cancel(struct api_request *req);

#endif
