/*
 * The table of endpoints. Each row describes one endpoint completely. The server dispatches by it and
 * takes log names, error formats and id prefixes from it; the gateway decides by it what it may retry,
 * merge or show without a key. The order of rows has no meaning.
 *
 * A row is a request answered on the loop (`respond`: nothing in it may wait, and a body is ignored), a request prepared by a
 * worker (`prepare`), or an endpoint that only other servers have (neither): the gateway forwards it,
 * this server does not know it.
 *
 * The gateway uses this header for its data only and calls none of the functions.
 */
#ifndef STEEL_SERVER_ENDPOINTS_H
#define STEEL_SERVER_ENDPOINTS_H

#include "server/http/api_error.h"

#include <jansson.h>

struct api_request;
struct http_exchange;
struct reply_style;
struct server;

enum { ENDPOINT_MAX_PATHS = 5, ENDPOINT_ALLOW_SIZE = 64 };

/* What a request does on the server, and so whether the gateway may send it twice. */
enum endpoint_effect {
    ENDPOINT_CHANGES,   /* changes the server's state: sent at most once */
    ENDPOINT_READS,     /* looks something up */
    ENDPOINT_COMPUTES,  /* the response depends on the body alone */
    ENDPOINT_GENERATES, /* like COMPUTES, from a prompt: the gateway hashes its prefix, the body may
                           name a LoRA adapter */
};

/* What the gateway does with a request, where that is not forwarding it to one replica. */
enum endpoint_gateway {
    GATEWAY_FORWARDS,
    GATEWAY_RESPONDS,       /* its own health */
    GATEWAY_MERGES_LISTS,   /* asks all replicas and merges the member `list` by `list_id` */
    GATEWAY_MERGES_METRICS, /* asks all replicas and labels their samples */
};

/* What a request needs a model for. */
enum endpoint_model {
    ENDPOINT_NO_MODEL,
    ENDPOINT_TEXT,
    ENDPOINT_EMBED,
    ENDPOINT_RERANK,
    ENDPOINT_ANY /* the one that is named */
};

struct endpoint {
    const char *method;                    /* GET includes HEAD */
    const char *paths[ENDPOINT_MAX_PATHS]; /* the canonical one first; a * is any non-empty part */
    const char *name;                      /* in the log */
    enum dialect dialect;                  /* of its errors */
    bool open;                             /* needs no API key */
    enum endpoint_effect effect;
    enum endpoint_model model; /* what the body's "model" names */
    enum endpoint_gateway gateway;
    const char *list, *list_id; /* GATEWAY_MERGES_LISTS: member of the reply; key of its elements */
    bool creates_kept;  /* its reply has the id of a response or conversation that may be kept */
    bool names_kept;    /* its path has such an id */
    bool body_optional; /* no body is an empty object */
    bool slow;          /* its worker may wait for files */

    void (*respond)(struct server *s, struct http_exchange *x);
    /* Fills req->reply, or what to generate or embed; false with req->err. */
    bool (*prepare)(struct api_request *req, const json_t *body);
    const struct reply_style *reply; /* writes what is generated; NULL: nothing is */
    const char *id_prefix;           /* of request ids; NULL = none */
    const char *prompt_field;        /* of the body; errors about the prompt name it */
};

extern const struct endpoint endpoints[]; /* (n_endpoints) */
extern const int n_endpoints;

/* The path as the table spells it: /openai/v1/..., which Azure's clients use, is /v1/... */
const char *endpoint_path(const struct http_head *h);

/* The served endpoint with this method and path; the most specific path wins. Without one, `allow`
 * lists the methods of this path for an Allow header, "" = the path is unknown. allow may be NULL. */
const struct endpoint *endpoint_find(const struct http_head *h, char allow[ENDPOINT_ALLOW_SIZE]);

/* The same for a request that is forwarded: also finds endpoints of other servers, and known paths
 * after a prefix (/proxy/v1/chat/completions). NULL = unknown. */
const struct endpoint *endpoint_find_forwarded(const struct http_head *h);

/* The format of errors about this request, whatever its method; the head may be empty. */
enum dialect endpoint_dialect(const struct http_head *h);

#endif
