/* Requests of commands to a server on this machine or another: one connection each, small replies. */
#ifndef STEEL_CLI_CLIENT_H
#define STEEL_CLI_CLIENT_H

#include "base/buf.h"

struct client_target {
    const char *host;
    int port;
    const char *key; /* NULL = none */
};

/* body: JSON, NULL = none. wait_s: for each part of the reply, -1 = without limit. Returns the status, 0 if nothing listens, -1
 * if the reply is not HTTP. */
int client_request(const struct client_target *t, const char *method, const char *path,
                   const char *body, int wait_s, struct buf *out);

#endif
