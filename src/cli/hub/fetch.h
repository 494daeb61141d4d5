/*
 * Downloads files over HTTP with libcurl: several at once, resumed after interruptions, verified
 * while they arrive. libcurl is loaded on first use, so everything else works without it. Knows
 * URLs, files and digests, not models.
 */
#ifndef STEEL_CLI_FETCH_H
#define STEEL_CLI_FETCH_H

#include "base/buf.h"
#include "base/error.h"
#include "server/api/server.h"

#include <stdint.h>

/* How a file is verified: not at all, by SHA-256, or by git's blob id (SHA-1). */
enum fetch_digest { FETCH_UNCHECKED, FETCH_SHA256, FETCH_GIT_BLOB };

struct fetch_file {
    const char *url;
    const char *path; /* destination; PATH.incomplete while it is downloaded. Without a digest,
                         PATH.incomplete.from says which file of which URL that is. */
    const char *name; /* for messages */
    int64_t size;     /* -1 = unknown */
    enum fetch_digest digest;
    const char *hex; /* expected digest; NULL with FETCH_UNCHECKED */
};

struct fetch_options {
    const char *token; /* bearer token, sent to the URL's host only; NULL = none */
    int at_once;       /* concurrent transfers */
    bool quiet;        /* print no progress */
    bool once;         /* somebody waits for it: no second try, and no long wait for a connection */
    struct pull_watch
        *watch; /* another thread that sees the progress and may end it; NULL = none */
};

/* Whether the user, or the thread that watches, has ended it. */
bool fetch_stopped(const struct fetch_options *opt);

/* Loads libcurl. Before there are other threads. */
bool fetch_prepare(struct error *err);
/* Downloads a small document into out, at most `max` bytes. *status: the HTTP status, 0 if there
 * was no response. */
bool fetch_text(const char *url, const struct fetch_options *opt, size_t max, struct buf *out,
                long *status, struct error *err);
/* Downloads the first `bytes` of a file, or all of a shorter one, into out. */
bool fetch_head(const char *url, const struct fetch_options *opt, size_t bytes, struct buf *out,
                long *status, struct error *err);
/* Downloads all files. On failure returns false; complete files stay, others can be resumed. */
bool fetch_files(const struct fetch_file *files, int n, const struct fetch_options *opt,
                 struct error *err);
/* Explains an HTTP status to the user; "" for 200 and 206. */
const char *fetch_explain(long status);

#endif
