/*
 * Ollama's /api/pull: downloads a model while its client watches. One at a time, on a thread of its own; a timer of the loop
 * writes its progress. It ends when the client leaves, and the next pull continues it.
 */
#ifndef STEEL_SERVER_PULLS_H
#define STEEL_SERVER_PULLS_H

struct http_exchange;
struct server;

void post_pull(struct server *s, struct http_exchange *x);
/* After the loop: ends the download. */
void pulls_stop(struct server *s);

#endif
