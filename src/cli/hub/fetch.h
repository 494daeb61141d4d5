/*
 * Files over HTTP, by libcurl: several at once, resumed where they were cut, checked as they come in.
 * libcurl is loaded when it is first needed, so that everything else runs where it is not installed.
 * Knows URLs, files and digests; nothing of models.
 */
#ifndef STEEL_CLI_FETCH_H
#define STEEL_CLI_FETCH_H

#include "base/buf.h"
#include "base/error.h"

#include <stdint.h>

/* How a file's bytes are checked: not at all, by SHA-256, or as git names its blobs (SHA-1). */
enum fetch_digest { FETCH_UNCHECKED, FETCH_SHA256, FETCH_GIT_BLOB };

struct fetch_file {
    const char *url;
    const char *path; /* where the whole file goes; PATH.incomplete while it grows */
    const char *name; /* for messages */
    int64_t size;     /* -1 = not known */
    enum fetch_digest digest;
    const char *hex; /* what it must be; NULL with FETCH_UNCHECKED */
};

struct fetch_options {
    const char *token; /* bearer token for the host of the URL, and no other; NULL = none */
    int at_once;       /* transfers */
    bool quiet;        /* no progress */
};

/* A small document into out, at most `max` bytes. *status: the HTTP status, 0 if none came. */
bool fetch_text(const char *url, const struct fetch_options *opt, size_t max, struct buf *out,
                long *status, struct error *err);
/* All files, or false: those that are whole are there then, the others may be resumed. */
bool fetch_files(const struct fetch_file *files, int n, const struct fetch_options *opt,
                 struct error *err);
/* What a status means to a user, for a URL; "" for 200 and 206. */
const char *fetch_explain(long status);

#endif
