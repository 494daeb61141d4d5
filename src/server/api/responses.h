/*
 * What POST /v1/responses adds to a call: the request's own fields, which the reply repeats, and the
 * input items, which are kept for previous_response_id. Made by a worker, read by the replies.
 */
#ifndef STEEL_SERVER_RESPONSES_H
#define STEEL_SERVER_RESPONSES_H

#include "base/buf.h"
#include "server/api/params.h"

struct store;

struct responses_request {
    struct buf echo;        /* ,"instructions":...,"tools":... : fields of the request, as JSON */
    struct buf input;       /* items of this request, separated by commas */
    struct buf first, last; /* ids of the first and the last of them */
    char *previous;         /* owned; NULL = none */
    bool keep;              /* store */
    bool summary;           /* thinking goes out as a summary, since one was asked for */
    bool truncate;          /* the oldest turns are left out where the context is full */
    size_t n_history;       /* bytes of the items before this request's */
    int sequence;           /* of the next stream event */
    int n_probs;            /* log-probabilities that were sent */
};
void responses_request_free(struct responses_request *r);

/* A body of /v1/responses as one of /v1/chat/completions; NULL with an error. A new reference.
 * hex: what ids of items are made of. */
json_t *responses_translate(const json_t *body, struct store *store, const char *owner,
                            const char *hex, struct responses_request *r, struct api_error *err);

/* How many messages may go for the rest to be a conversation still: the start of the k-th turn
 * after the leading system messages; 0 where there is none. */
json_t *responses_drop_turns(const json_t *messages, int k);
/* "truncation": "auto", or "disabled" as where nothing is said. */
bool responses_truncation(const json_t *body, bool *on, struct api_error *err);
int responses_n_turns(const json_t *messages);

#endif
