/*
 * Background responses: generated although no client is connected. The engine treats the request like any other. This
 * file has its stream events, the clients that read them, and its endpoints.
 *
 * Invariants:
 *  1. A background response is in server->backgrounds while it runs or while somebody reads its events.
 *     Afterwards the store has it, events included.
 *  2. Only its owner can see, cancel or delete it.
 *  3. At most BACKGROUND_EACH of one owner run or wait. About BACKGROUND_EVENTS_MOST bytes of events are kept for
 *     each, more while a reader lacks them. They count as unsent output of its request.
 *  4. During a shutdown only background responses that somebody reads continue.
 */
#ifndef STEEL_SERVER_BACKGROUND_H
#define STEEL_SERVER_BACKGROUND_H

#include "server/api/server_int.h"

enum { BACKGROUND_EACH = 32, BACKGROUND_EVENTS_MOST = 4 << 20 };

/* Whether the request may run in the background; false with req->err. */
bool background_admit(struct api_request *req);
/* The request is in the engine: replies to its client, or makes it a reader of the events. */
void background_begin(struct api_request *req);
/* Appends stream events and sends them to the readers. */
void background_write(struct background *bg, const struct buf *events);
const struct buf *background_events(const struct background *bg);
/* The response is stored: nothing more will come. */
void background_end(struct api_request *req);

void background_tick(struct server *s, int64_t now_ns); /* comments on silent streams */
void background_drain(struct server *s);                /* shutdown: see invariant 4 */

/* Handles GET with stream=true. */
void background_stream(struct server *s, struct http_exchange *x, const char *id);
/* The running request with this id, if the client owns it. NULL = none. */
struct api_request *background_find(struct server *s, struct http_exchange *x, const char *id);
/* Ends a running one; it is stored as cancelled if `keep`. */
void background_cancel(struct api_request *req, bool keep);

#endif
