/*
 * Models by name: owner/name[@revision][:quant], hf://..., URLs of the Hub, and short names of well-known
 * models. Where they are in the cache that other tools share (models--owner--name/{blobs,refs,
 * snapshots}), and what of a repository a model needs. Reads names, folders and the Hub's list of a
 * repository; downloads are cmd_pull.c's.
 */
#ifndef STEEL_CLI_HUB_H
#define STEEL_CLI_HUB_H

#include "base/buf.h"
#include "base/error.h"

#include <jansson.h>
#include <stdint.h>

enum { HUB_NAME_MAX = 200 };

struct hub_name {
    char repo[HUB_NAME_MAX];     /* owner/name */
    char revision[HUB_NAME_MAX]; /* "main" where none is given */
    char quant[64];              /* "" = the best that there is; or the name of a file */
};

/* Whether a text is meant as a name: not where it is a path that exists. */
bool hub_is_name(const char *text);
bool hub_parse(const char *text, struct hub_name *out, struct error *err);
/* owner/name:quant */
void hub_print(const struct hub_name *n, struct buf *out);
/* The i-th short name and what it stands for; NULL after the last. */
const char *hub_short(int i, const char **name);

/* Places. Paths are appended to out. */
const char *hub_endpoint(void); /* HF_ENDPOINT, or the Hub; no slash at the end */
bool hub_cache(struct buf *out, struct error *err);
bool hub_repo_folder(const char *repo, struct buf *out, struct error *err);
/* HF_TOKEN, or the file that `hf auth login` leaves; false = none. */
bool hub_token(struct buf *out);

/* A file of a repository. */
struct hub_file {
    char *path; /* owned; relative, checked: no way out of the folder */
    int64_t size;
    char id[72]; /* of its blob: SHA-256 of large files, else git's */
    bool large;  /* kept by LFS: id is a SHA-256 */
};
struct hub_repo {
    char sha[72];           /* the commit */
    struct hub_file *files; /* (n) */
    int n;
};
void hub_repo_clear(struct hub_repo *r);
/* From the Hub's reply to /api/models/REPO/revision/REV?blobs=true, which is not trusted. */
bool hub_repo_read(const char *text, size_t n, struct hub_repo *out, struct error *err);

/* Marks the files that the model needs: one quantisation of a GGUF repository, all its parts; or
 * weights, configuration and tokenizer of a safetensors folder. *first: the file to open, or -1: the
 * folder. An error lists what there is. quant gets the name of what was chosen. */
bool hub_choose(const struct hub_file *files, int n, char quant[64], bool *wanted, int *first,
                struct error *err);

/* Whether it is a GGUF file that may be a model; quant: its kind, or its name where it says none. */
bool hub_quant(const char *path, char quant[64]);

/* The model in the cache: what to open, appended to out. False with an empty error: not there. */
bool hub_find(const struct hub_name *name, struct buf *out, struct error *err);

/* What commands take as MODEL: a path, or a name. A name that is in the cache becomes its path; one
 * that is not is pulled, if the user at the terminal says yes. out is untouched for a path: use text. */
bool hub_open(const char *text, struct buf *out, struct error *err);
/* The same for a command's argument: a name becomes a path that stays. NULL is the built-in model. */
bool hub_resolve(const char **model, struct error *err);

/* cmd_pull.c */
bool hub_pull(const struct hub_name *name, bool quiet, struct buf *out, struct error *err);

/* Snapshots in the cache, for list and rm: calls fn for each model (a quantisation, or a folder). */
struct hub_found {
    const char *repo;
    const char *quant;        /* "" = a folder of safetensors */
    const char *snapshot;     /* path of its folder */
    const char *const *files; /* (n) within it */
    int n;
    int64_t bytes;
    int64_t changed; /* unix time */
    bool whole;
};
bool hub_each(void (*fn)(void *arg, const struct hub_found *f), void *arg, struct error *err);

#endif
