/*
 * POST /v1/responses: the request fields that the reply repeats, and the input items, which are kept for
 * previous_response_id. Written by a worker, read by reply_responses.c.
 */
#ifndef STEEL_SERVER_RESPONSES_H
#define STEEL_SERVER_RESPONSES_H

#include "base/buf.h"
#include "server/api/kept_items.h"
#include "server/api/params.h"

struct api_request;
struct mcp_list;
struct responses_mcp;
struct store;
struct prompt_images;

struct responses_request {
    struct buf echo;                /* request fields as JSON: ,"instructions":...,"tools":... */
    struct kept_items input;        /* of this request */
    char *previous;                 /* owned; NULL = none */
    char *conversation;             /* its id; owned; NULL = none */
    struct prompt_images *images;   /* of the request; NULL = the model reads text only */
    json_t *tool_names;             /* owned; see responses_tool_of */
    bool keep;                      /* store */
    bool summary;                   /* send thinking as a summary */
    bool truncate;                  /* drop the oldest turns if the context is full */
    size_t n_history;               /* bytes of earlier items */
    int sequence;                   /* number of the next stream event */
    int n_probs;                    /* log-probabilities sent */
    const struct mcp_list *servers; /* MCP servers whose tools may be used; NULL = none */
    struct responses_mcp *mcp;      /* the use of their tools (mcp_loop.h); NULL = none */
    json_t *listed;   /* server_label -> true: its tools are listed in the history; owned */
    json_t *approved; /* of responses_mcp; owned */
    bool background;  /* it runs although nobody waits */
    bool queued;      /* background: no response.in_progress event yet */
};
void responses_request_free(struct responses_request *r);

/* reply_responses.c, of a background response. responses_add_now writes it as it is while it runs;
 * responses_add_cancelled the last event of a stream that was cancelled. */
void responses_add_now(const struct api_request *req, struct buf *b);
void responses_add_cancelled(struct api_request *req, struct buf *b);
/* Writes the output items so far, as they are stored. */
void responses_add_items(const struct api_request *req, struct buf *b);
/* Stores it, finished or with the status failed or cancelled. */
void responses_keep_finished(struct api_request *req);
void responses_keep_failed(struct api_request *req, const char *status,
                           const struct api_error *err);

/* Translates a body of /v1/responses to one of /v1/chat/completions. Returns a new reference, or NULL
 * with an error. hex: part of the ids of items. */
json_t *responses_translate(const json_t *body, struct store *store, const char *owner,
                            const char *hex, struct responses_request *r, struct api_error *err);

/* The same for a later round: the chat body with the messages of output items. */
json_t *responses_continue(const struct buf *chat, const struct buf *items, struct api_error *err);

/* responses_tools.c. The functions of `tools` and of `more` (an input item's; either may be NULL) become
 * out["tools"]. r->tool_names receives what responses_tool_of looks up. `allowed`: the only ones wanted, or NULL. */
bool responses_add_tools(json_t *out, struct responses_request *r, const json_t *tools,
                         const json_t *more, const json_t *allowed, struct api_error *err);
/* has_mcp: tools of MCP servers can be chosen. */
bool responses_tool_choice(json_t *out, const json_t *v, bool has_mcp, const json_t **allowed,
                           struct api_error *err);
/* The name a tool of a namespace (a string, or NULL) has for the model. A new reference. */
json_t *responses_flat_name(const json_t *space, const json_t *name);
struct responses_tool {
    const char *name, *space; /* the client's name; its namespace or NULL */
    const char *server;       /* an MCP server's tool, or NULL */
    bool custom;
    bool approve; /* the client has to approve each call */
};
/* The tool that the model calls `flat`. */
struct responses_tool responses_tool_of(const json_t *names, const char *flat);

/* Adds input items, each with an id, a type and a status, as they are listed. hex: part of new ids. */
void responses_keep_items(struct kept_items *l, const json_t *input, const char *hex);
/* Whether these can be items of a conversation. False with an error about `name`. */
bool responses_check_items(const json_t *items, const char *name, struct api_error *err);

/* Returns the messages without the first k turns; leading system messages stay. */
json_t *responses_drop_turns(const json_t *messages, int k);
/* Reads "truncation": "auto", or "disabled", the default. */
bool responses_truncation(const json_t *body, bool *on, struct api_error *err);
int responses_n_turns(const json_t *messages);

#endif
