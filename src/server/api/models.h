/*
 * The models of a server: which can be asked for, which are in memory, and who uses them.
 *
 * Ownership. `struct models` has an entry for each model that has a name. Entries are not freed before the server
 * ends. `struct loaded` is a model in memory: its engine or embedder, its template, its slots. References to it are
 * counted: the entry has one while the model is offered, and each API request has one from the choice of its model
 * until it is freed. One loader thread opens models and closes those without references, so that a request, a
 * stream or an embedding keeps the model it began with, and the memory of one model is back before the next is sized.
 *
 * Invariants:
 *  1. `lock` guards states, references and names. Workers choose models; the loop decides what is loaded and
 *     unloaded (models_advance), and is the only one that releases references.
 *  2. A request that names a model that is not in memory leaves its worker and waits in a list, at most `wait_s`
 *     seconds. It is prepared again when the model is loaded.
 *  3. The models in memory, with those that are loading or have lost their entry's reference, stay within max_loaded
 *     and max_bytes. A model is never unloaded while a request uses it or while it is pinned.
 *  4. A model that is wanted is loaded in the order of the first requests for it. Where every model in memory is
 *     busy, the least recently used one gets no new requests until its last one has ended (`retiring`).
 */
#ifndef STEEL_SERVER_MODELS_H
#define STEEL_SERVER_MODELS_H

#include "engine/embed.h"
#include "engine/engine.h"
#include "server/api/modelfile.h"
#include "server/api/models_probe.h"
#include "server/api/params.h"
#include "server/api/server.h"
#include "text/chat/chat.h"

#include <pthread.h>

struct api_request;
struct slots;

enum { MODEL_NAME_MOST = 256 };

/* A model in memory. Constant while it has references, but for refs. */
struct loaded {
    struct model_entry *entry;
    int refs;
    struct engine *engine;     /* MODEL_TEXT; else NULL */
    struct embedder *embedder; /* MODEL_EMBED, MODEL_RERANK; else NULL */
    struct chat *chat;         /* NULL: the model has no usable template; chat_error says why */
    struct error chat_error;
    struct chat_source chat_source; /* of chat */
    struct slots *slots;            /* of engine */
    struct sample_params sample;    /* defaults of requests */
    size_t host_bytes;              /* weights and cache in the host's memory */
    bool on_gpu;
    bool failed;             /* a step has failed; it was logged */
    struct loaded *next;     /* in models->closing */
    struct loaded *next_all; /* in models->all */
};

enum model_state { MODEL_IDLE, MODEL_WANTED, MODEL_LOADING, MODEL_LOADED };

struct model_entry {
    struct model_source
        src; /* name NULL; path, modelfile and aliases are owned. task is not MODEL_BY_FILE */
    struct model_facts facts;
    char name[MODEL_NAME_MOST];
    enum model_state state;
    struct loaded *loaded; /* MODEL_LOADED; else NULL */
    bool hidden;           /* deleted, or its file is gone: its name finds nothing */
    bool stale;            /* its Modelfile was written again: the next scan replaces it */
    bool retiring;
    int n_waiting; /* requests */
    int64_t added; /* Unix time */
    int64_t wanted_ns, used_ns;
    int64_t keep_ns;    /* unloaded when unused for this long; -1 = kept. A request may change it */
    size_t known_bytes; /* in the host's memory when it was loaded last; 0 = it was not */
    int64_t failed_ns;  /* time of the last failure to load it; 0 = none, or loaded since */
    struct error error; /* why */
    /* With src.modelfile (models_made.h). Constant. */
    struct modelfile made;
    struct gen_params own; /* its parameters: values that a request does not have itself */
    struct adapter_ref adapter;
};

struct models {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct server *server;
    struct model_entry **entries; /* (n) */
    int n;
    struct model_entry
        *first; /* for requests that name none, and for the server's state; NULL = none */
    struct api_request *waiting, **waiting_end;
    int n_waiting;
    pthread_mutex_t change_lock; /* held while clients change models; before scan_lock */
    pthread_mutex_t scan_lock;   /* held by the one that scans; before `lock` */
    int64_t scanned_ns;          /* of the last scan */
    bool scanning;               /* for an unknown name */
    struct loaded *all;          /* the models in memory */
    size_t bytes;                /* of these and of the one that is loading */
    int n_loaded;                /* likewise */
    /* the loader */
    pthread_t thread;
    bool has_thread, quit;
    struct model_entry *job; /* to be loaded */
    size_t job_bytes;        /* that it may take; 0 = no limit */
    size_t job_taken;        /* that it counts in `bytes` */
    struct engine *opening;  /* of job */
    struct loaded *opened;   /* the result; NULL with job_error */
    struct error job_error;
    bool job_done;
    struct loaded *closing; /* to be closed */
    int n_closing;
};

/* Loop. Makes the entries of the options; NULL with an error. models_start loads the ones required at the start, in
 * order. */
struct models *models_new(struct server *s, struct error *err);
bool models_start(struct models *m, struct error *err);
/* Any thread, without the lock. */
struct model_entry *models_add(struct models *m, const struct model_source *src, struct error *err);
void models_scan(struct models *m); /* any thread: finds models, whenever the last scan was */
/* Takes what the loader has done, decides what is loaded and unloaded next, and ends waits. */
void models_advance(struct models *m);
void models_poke(struct models *m);  /* models_advance runs in the next iteration of the loop */
void models_check(struct models *m); /* logs models that have failed */
/* After the loop: waits until prefixes are on disk, at most ms. */
void models_flush(struct models *m, int ms);
/* The end, in this order: stops the loader and the embedders; ends the engines' requests; frees all. */
void models_stop(struct models *m);
void models_end(struct models *m);
void models_free(struct models *m);

/* Worker. Chooses the model of a request and takes a reference. False: req->err, or the request has to wait
 * (req->entry). */
bool models_choose(struct api_request *req, const json_t *body);

/* Loop. The request's worker has returned with req->entry: it waits. False: too many wait. */
bool models_wait(struct models *m, struct api_request *req);
void models_leave(struct models *m, struct api_request *req); /* ends its wait, if it waits */
/* Gives the request's reference back. */
void models_release(struct models *m, struct api_request *req);

/* Loop. The model of a request without a body: the query's ("model"), else the first, or the only text model in
 * memory. NULL: it is not in memory. Valid until models_advance. */
struct loaded *models_shown(struct server *s, const struct http_exchange *x);
struct model_entry *models_find(struct models *m,
                                const char *name); /* or an alias; under the lock */
/* Whether the only text model has failed. models_helper_failed: an embedding or rerank model has; NULL = none. */
bool models_failed(struct models *m, struct error *why);
const char *models_helper_failed(struct models *m);
int models_progress(struct models *m);                         /* of the first model, in per cent */
void models_stats(struct models *m, struct engine_stats *out); /* tokens and time of all engines */
struct engine_info loaded_info(const struct loaded *l);
/* The percentage that is loaded of a model in state MODEL_LOADING; under the lock. */
int models_percent(const struct models *m, const struct model_entry *e);

#endif
