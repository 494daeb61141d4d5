/*
 * Embeddings and reranking: a model loaded without its head, a thread that runs it, and pooling. Texts of many jobs
 * share a step without padding. Bidirectional models need each text whole in one step. Clients take turns, text by
 * text. Jobs have tokens; embed_encode and embed_encode_pair make them from text.
 *
 * Invariants:
 * 1. Only the embedder's thread uses the model.
 * 2. `done` is called exactly once for a job that was accepted. Its texts must stay until then.
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
    int pooling;                    /* enum pooling_kind; -1 = the model's */
    int normalize;                  /* 1, 0; -1 = the model's */
    bool rank;                      /* rerank: scores of pairs instead of embeddings */
    int max_queue;                  /* most waiting texts; 0 = 16384 */
};

struct embed_text {
    int32_t *ids, *types; /* (n); types may be NULL */
    int n;
    float *out; /* (embedder_width), or (n, n_embd) without pooling */
};

struct embed_job {
    struct embed_text *texts; /* (n) */
    int n;
    int dims;                            /* length to which vectors are cut; 0 = all */
    uint64_t client;                     /* clients take turns */
    void (*done)(struct embed_job *job); /* called once, last, by the embedder's thread */
    void *user;
    atomic_bool cancel; /* set by any thread: texts not started yet are skipped */
    /* results */
    bool ok;
    struct error err;
    /* used by the embedder */
    int next, left; /* the next text to start; number of texts not done */
    struct embed_job *link;
};

struct embedder;
/* Loads the model and starts the thread. path NULL: the built-in model. */
struct embedder *embedder_open(const char *path, const struct embed_options *opt,
                               struct error *err);
/* Waits for the step in flight. Waiting jobs end with an error. */
void embedder_close(struct embedder *e);

struct engine_info embedder_info(const struct embedder *e);
const struct runtime *embedder_runtime(const struct embedder *e); /* for benchmarks and tests */
const struct pooling *embedder_pooling(const struct embedder *e);
int embedder_width(const struct embedder *e);   /* length of a vector; 1 for scores of one label */
int embedder_context(const struct embedder *e); /* most tokens of a text */

/* Queues a job. False: the queue is full, and the job was not accepted. Texts must fit the context and the vocabulary
 * (embed_encode ensures that). */
bool embedder_submit(struct embedder *e, struct embed_job *job, struct error *err);
/* The same, and waits until the job is done. */
bool embedder_run(struct embedder *e, struct embed_job *job, struct error *err);

/* True after a failed step, with its error: the embedder takes no more jobs. */
bool embedder_failed(struct embedder *e, struct error *err);

struct embed_stats {
    uint64_t n_texts, n_tokens, n_steps, n_rejected;
    int n_waiting; /* texts */
};
void embedder_stats(struct embedder *e, struct embed_stats *out);

/* Encodes a text with the special tokens that its tokenizer adds. A text longer than the context is cut if `truncate`,
 * else it is an error that names both lengths. Free `out` with embed_text_clear. budget: limits the work, or NULL. */
bool embed_encode(const struct embedder *e, const char *text, size_t len, bool truncate,
                  struct budget *budget, struct embed_text *out, struct error *err);
/* Encodes a query and a document for a reranker. The document is cut to fit. instruct: for models that take an
 * instruction; NULL = the model's default. */
bool embed_encode_pair(const struct embedder *e, const char *query, size_t n_query, const char *doc,
                       size_t n_doc, const char *instruct, bool truncate, struct budget *budget,
                       struct embed_text *out, struct error *err);
void embed_text_clear(struct embed_text *t); /* frees ids and types */

#endif
