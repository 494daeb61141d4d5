/*
 * What each coding agent needs to use a server: environment variables, arguments and, for some, a
 * file. Knows agents and their settings; starts nothing and writes nothing.
 */
#ifndef STEEL_CLI_AGENTS_H
#define STEEL_CLI_AGENTS_H

#include "base/buf.h"

#include <stdbool.h>

enum { AGENT_MAX_VARS = 16, AGENT_MAX_ARGS = 12 };

/* The server, as an agent sees it. */
struct agent_server {
    const char *url;   /* http://127.0.0.1:8080 */
    const char *model; /* the name to send */
    const char *key;   /* never empty: agents insist on a key */
    int context;       /* in tokens; 0 = unknown */
    bool thinks;       /* the model has a thinking mode */
};

struct agent_setup {
    struct {
        const char *name;
        char *value; /* owned; NULL = the variable is removed */
    } vars[AGENT_MAX_VARS];
    char *args[AGENT_MAX_ARGS]; /* owned; they come before the user's */
    int n_vars, n_args;
    struct buf file;
};

struct agent {
    const char *name;      /* also the program's */
    const char *package;   /* for `npm install -g` */
    const char *file_name; /* of the file in a temporary folder; NULL = none */
    /* `path`: where the file will be. */
    void (*set)(struct agent_setup *s, const struct agent_server *to, const char *path);
};

/* "claude|codex|..." */
#define AGENT_NAMES "claude|codex|opencode|qwen|pi"
extern const struct agent agents[]; /* terminated by a NULL name */
const struct agent *agent_find(const char *name);
void agent_setup_clear(struct agent_setup *s);

#endif
