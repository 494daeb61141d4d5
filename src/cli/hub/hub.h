/*
 * Models by name: owner/name[@revision][:quant], hf://..., URLs of the Hugging Face Hub, and short
 * names of well-known models. Finds them in the cache shared with other tools
 * (models--owner--name/{blobs,refs,snapshots}), and selects the files of a repository that a model
 * needs. Handles names, folders and the Hub's file lists; cmd_pull.c downloads.
 */
#ifndef STEEL_CLI_HUB_H
#define STEEL_CLI_HUB_H

#include "base/buf.h"
#include "base/error.h"
#include "server/api/server.h"

#include <jansson.h>
#include <stdint.h>

enum { HUB_NAME_MAX = 200 };

struct hub_name {
    char repo[HUB_NAME_MAX];     /* owner/name */
    char revision[HUB_NAME_MAX]; /* "main" by default */
    char quant[64];              /* "" = the best available; or a file name */
    bool has_revision;           /* the text gave a revision */
};

/* True if the text is a model name and not an existing path. */
bool hub_is_name(const char *text);
bool hub_parse(const char *text, struct hub_name *out, struct error *err);
/* Appends owner/name[@revision][:quant]. */
void hub_print(const struct hub_name *n, struct buf *out);
/* The i-th short name (*name) and the full name it stands for; NULL after the last. */
const char *hub_short(int i, const char **name);
/* The full name that a short name stands for. Any other text is returned as it is. */
const char *hub_full(const char *text);

/* Locations. Paths are appended to out. */
const char *hub_endpoint(void); /* HF_ENDPOINT, or the Hub; without a trailing slash */
bool hub_cache(struct buf *out, struct error *err);
bool hub_repo_folder(const char *repo, struct buf *out, struct error *err);
/* HF_TOKEN, or the token stored by `hf auth login`. False if there is none. */
bool hub_token(struct buf *out);

/* A file of a repository. */
struct hub_file {
    char *path; /* owned; relative; checked not to leave the folder */
    int64_t size;
    char id[72]; /* blob id: SHA-256 for LFS files, else git's SHA-1 */
    bool large;  /* stored by LFS: id is a SHA-256 */
};
struct hub_repo {
    char sha[72];           /* the commit */
    struct hub_file *files; /* (n) */
    int n;
};
void hub_repo_clear(struct hub_repo *r);
/* Parses the Hub's response to /api/models/REPO/revision/REV?blobs=true. The input is untrusted. */
bool hub_repo_read(const char *text, size_t n, struct hub_repo *out, struct error *err);

/* Marks the files that the model needs: one quantisation of a GGUF repository with all its
 * parts; or weights, configuration and tokenizer of a safetensors folder. *first: the file to
 * open, -1: the folder. quant: set to the chosen quantisation. The error lists what is
 * available. */
bool hub_choose(const struct hub_file *files, int n, char quant[64], bool *wanted, int *first,
                struct error *err);

/* True if path is a GGUF file that may be a model. quant: its quantisation, or the file's path
 * if the name does not tell. */
bool hub_quant(const char *path, char quant[64]);

/* The commit of a name's revision according to the cache; "" if unknown. folder: of the repository. */
void hub_snapshot(const struct hub_name *name, const char *folder, char sha[72]);

/* Resolves a MODEL argument. A name in the cache becomes its path (appended to out). A name that
 * is not cached is pulled if the user at the terminal agrees. For a path, out stays untouched:
 * use text. */
bool hub_open(const char *text, struct buf *out, struct error *err);
/* The same for a command's argument; the path stays valid. NULL is the built-in model. */
bool hub_resolve(const char **model, struct error *err);

/* Finds a model in the cache and appends the path to open. False with an empty error: not cached. */
bool hub_find(const struct hub_name *name, struct buf *out, struct error *err);

/* hub_heads.c: a model that is not on this machine, as files of its size in a temporary folder that have their heads
 * only, which is all that `steel plan` reads. Appends the path to open to out and the folder to `folder`;
 * hub_heads_remove deletes it. */
bool hub_heads(const struct hub_name *name, struct buf *folder, struct buf *out, struct error *err);
void hub_heads_remove(struct buf *folder);

/* cmd_pull.c */
struct fetch_options; /* fetch.h */
/* Reads a repository's file list from the Hub. */
bool hub_read_list(const struct hub_name *name, const struct fetch_options *opt,
                   struct hub_repo *out, struct error *err);
/* Appends the URL of a file of a repository. */
void hub_file_url(const struct hub_name *name, const struct hub_repo *r, const struct hub_file *f,
                  struct buf *out);
/* Asks the Hub what a pull would download, and appends "FILE, SIZE" or "N files, SIZE". */
bool hub_describe(const struct hub_name *name, struct buf *out, struct error *err);
/* watch: of another thread (fetch.h); then nothing is printed. */
bool hub_pull(const struct hub_name *name, bool quiet, struct pull_watch *watch, struct buf *out,
              struct error *err);
/* For a server's clients: struct server_options.store_prepare, store_pull and store_remove. */
bool hub_prepare(struct error *err);
bool hub_pull_watched(const char *text, struct pull_watch *w, struct error *err);
bool hub_remove(const char *text, struct error *err); /* cmd_list.c */

/* Iterates over the cache, for list and rm: calls fn for each model (a quantisation, or a
 * folder). */
struct hub_found {
    const char *repo;
    const char *quant;        /* "" = a folder of safetensors */
    const char *snapshot;     /* path of the snapshot */
    const char *const *files; /* (n) paths within it */
    int n;
    int64_t bytes;
    int64_t changed; /* modification time, Unix seconds */
    bool whole;      /* all files are present */
};
bool hub_each(void (*fn)(void *arg, const struct hub_found *f), void *arg, struct error *err);

#endif
