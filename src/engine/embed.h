/*
 * Vectors of texts: a model loaded without its head, a thread that runs it, and pooling. Texts of
 * many jobs share a step without padding, whole where positions see each other both ways; clients take
 * turns, text by text. Knows tokens; texts and pairs are encoded by embed_encode and embed_encode_pair.
 *
 * Invariants: only the thread touches the model. A job that was accepted is done exactly once; until
 * then its texts stay where they are.
 */
#ifndef STEEL_ENGINE_EMBED_H
#define STEEL_ENGINE_EMBED_H

#include "base/budget.h"
#include "engine/info.h"
#include "engine/runtime.h"
#include "model/pooling.h"

#include <stdatomic.h>

struct embed_options {
    struct runtime_options runtime; /* max_seqs 0 = 256; context 0 = the model's, 8192 at most */
    int pooling;                    /* enum pooling_kind; -1 = as the model says */
    int normalize;                  /* 1, 0; -1 = as the model says */
    bool rank;                      /* scores of pairs are wanted */
    int max_queue;                  /* texts that may wait; 0 = 16384 */
};

struct embed_text {
    int32_t *ids, *types; /* (n); types may be NULL */
    int n;
    float *out; /* (embedder_width), or (n, n_embd) where every row is wanted */
};

struct embed_job {
    struct embed_text *texts; /* (n) */
    int n;
    int dims;                            /* the first so many of a vector; 0 = all */
    uint64_t client;                     /* whose it is */
    void (*done)(struct embed_job *job); /* called by the embedder's thread; last */
    void *user;
    atomic_bool cancel; /* set by anybody: what has not begun is left out */
    /* results */
    bool ok;
    struct error err;
    /* the embedder's own */
    int next, left; /* text to begin with next; texts not done */
    struct embed_job *link;
};

struct embedder;
/* Loads the model and starts the thread. path NULL: the built-in one. */
struct embedder *embedder_open(const char *path, const struct embed_options *opt,
                               struct error *err);
/* Waits for the step under way; jobs that wait end with an error. */
void embedder_close(struct embedder *e);

struct engine_info embedder_info(const struct embedder *e);
const struct runtime *embedder_runtime(const struct embedder *e); /* for benchmarks and tests */
const struct pooling *embedder_pooling(const struct embedder *e);
int embedder_width(const struct embedder *e);   /* of a vector; 1 for scores of one label */
int embedder_context(const struct embedder *e); /* tokens a text may have */

/* False: too much waits; nothing was taken. Texts must fit the context and the vocabulary (embed_encode
 * sees to that). */
bool embedder_submit(struct embedder *e, struct embed_job *job, struct error *err);
/* The same, and waits. */
bool embedder_run(struct embedder *e, struct embed_job *job, struct error *err);

struct embed_stats {
    uint64_t n_texts, n_tokens, n_steps, n_rejected;
    int n_waiting; /* texts */
};
void embedder_stats(struct embedder *e, struct embed_stats *out);

/* A text as the model wants it, with what its tokenizer adds. Longer than the context: cut where
 * `truncate`, else an error with both numbers. out->ids is the caller's to free.
 * budget: of work, or NULL. */
bool embed_encode(const struct embedder *e, const char *text, size_t len, bool truncate,
                  struct budget *budget, struct embed_text *out, struct error *err);
/* A query and a document, as a reranker reads them. The document is cut. instruct: of models that take
 * one; NULL = the usual. */
bool embed_encode_pair(const struct embedder *e, const char *query, size_t n_query, const char *doc,
                       size_t n_doc, const char *instruct, bool truncate, struct budget *budget,
                       struct embed_text *out, struct error *err);
void embed_text_clear(struct embed_text *t); /* ids and types */

#endif
