/* `steel serve`: an OpenAI-compatible HTTP server over one engine. */
#ifndef STEEL_SERVER_SERVER_H
#define STEEL_SERVER_SERVER_H

#include "engine/engine.h"
#include "server/http/access.h"

enum metrics_style { METRICS_OWN, METRICS_VLLM, METRICS_LLAMACPP };

struct server_options {
    const char *model;              /* path */
    const char *embedding, *rerank; /* paths of models for vectors and for scores, or NULL */
    const char *embedding_name, *rerank_name; /* NULL: from their paths */
    const char *alias;                        /* name in replies; NULL = from the path */
    struct engine_options engine;
    struct sample_params sample;     /* where a request does not say */
    struct http_options http;        /* handler and arg are the server's own */
    struct access_rules access;      /* host is the server's own */
    bool share_prefix_cache;         /* cached prompts are shared by all, not by those of one key */
    const char *const *page_origins; /* (n_page_origins) that the web page's tools may call */
    int n_page_origins;
    size_t store_bytes;        /* of responses kept for previous_response_id */
    size_t max_unsent;         /* bytes of answers kept for one client that does not take them */
    bool allow_lora_loading;   /* adapters may be loaded and unloaded by clients */
    const char *chat_template; /* file; NULL = the model's own */
    const char *chat_format;   /* how answers are parsed; NULL = by the template */
    enum metrics_style metrics;
    int ping_s;  /* comment on a stream that was silent for so long */
    int grace_s; /* for running answers after SIGTERM */
};

/* Whether this may be one of page_origins: scheme://host[:port]. */
bool web_origin_valid(const char *origin);
/* Runs until SIGTERM, SIGINT or failure to start. Returns the program's exit code. */
int server_run(const struct server_options *opt, struct error *err);

#endif
