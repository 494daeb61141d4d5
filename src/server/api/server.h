/* `steel serve`: an OpenAI-compatible HTTP server over the engines of one or more models. */
#ifndef STEEL_SERVER_SERVER_H
#define STEEL_SERVER_SERVER_H

#include "engine/engine.h"
#include "server/api/image_fetch.h"
#include "server/http/access.h"
#include "server/mcp/mcp_config.h"

#include <stdatomic.h>

enum metrics_style { METRICS_OWN, METRICS_VLLM, METRICS_LLAMACPP };

/* A model's task. MODEL_BY_FILE: read it from the file. */
enum model_task { MODEL_TEXT, MODEL_EMBED, MODEL_RERANK, MODEL_BY_FILE };

/* A model that clients can ask for by name. The server copies the texts and keeps no pointer to the source, but for what
 * engine, sample and chat_template point to. */
struct model_source {
    const char *name;           /* NULL = from the path */
    const char *const *aliases; /* (n_aliases) other names */
    int n_aliases;
    const char *path;      /* NULL = the built-in model, or modelfile says it */
    const char *modelfile; /* the model is made of another one by this file; NULL = it is not */
    enum model_task task;
    struct engine_options engine;
    struct sample_params sample; /* defaults of requests */
    const char *chat_template;   /* file; NULL = the model's own */
    const char *template_text;   /* a template in place of a file; NULL = none */
    bool at_start; /* loaded before the server is ready; the server ends if that fails */
    bool found;    /* by a scan: if it is no model, it is skipped with a line in the log */
    bool on_hub;   /* found in the cache of downloaded models */
    bool pinned;   /* never unloaded */
    int keep_s;    /* unloaded when unused for this many seconds; -1 = when memory is needed */
};

/* A download that another thread watches. */
struct pull_watch {
    _Atomic int64_t have, total; /* bytes; 0 = not known yet */
    atomic_bool stop;
};

struct server_options {
    const struct model_source *models; /* (n_models) the first one is for requests that name none */
    int n_models;
    /* Finds models beside these, at the start and when an unknown one is asked for; NULL = there are no others. Called by
     * one thread at a time. */
    void (*scan)(void *arg, void (*found)(void *to, const struct model_source *src), void *to);
    void *scan_arg;
    /* What clients may do to the models on disk. The functions are called by one thread at a time each. */
    bool allow_pull;      /* they may */
    const char *made_dir; /* for Modelfiles of /api/create */
    /* Downloads a model by name until done or w->stop. store_prepare: before there are threads. */
    bool (*store_prepare)(struct error *err);
    bool (*store_pull)(const char *name, struct pull_watch *w, struct error *err);
    bool (*store_remove)(const char *name, struct error *err); /* of one that was downloaded */
    const char *const *pins; /* (n_pins) names of models that are never unloaded */
    int n_pins;
    int max_loaded;                  /* models in memory at once; 0 = no limit */
    size_t max_bytes;                /* of the host's memory for them; 0 = what is free */
    int load_wait_s;                 /* a request waits for its model for this long */
    int max_waiting;                 /* requests that wait for models */
    const char *const *dry_breakers; /* (n_dry_breakers) texts; NULL = dry_default_breakers */
    int n_dry_breakers;
    struct http_options http;   /* handler and arg are the server's own */
    struct access_rules access; /* host is the server's own */
    bool share_prefix_cache;    /* one prefix cache for all API keys */
    const char *const
        *page_origins; /* (n_page_origins) origins that tools of the web page may call */
    int n_page_origins;
    size_t store_bytes;                 /* for responses kept for previous_response_id */
    int64_t max_image_pixels;           /* 0 = IMAGE_DEFAULT_PIXELS (image.h) */
    struct image_origins image_origins; /* where images are fetched from */
    size_t max_unsent;                  /* bytes of output buffered for a slow client */
    const char *slot_save_path;         /* folder of saved slots; NULL = they are not saved */
    bool allow_lora_loading;            /* clients may load and unload adapters */
    const struct mcp_config *mcp;       /* MCP servers; NULL = none */
    int mcp_call_s;                     /* time of one call of a tool */
    int mcp_rounds;                     /* most rounds of calls in one response */
    bool allow_special;                 /* control tokens in messages count */
    const char *chat_format;            /* how output is parsed; NULL = by the template */
    enum metrics_style metrics;
    int ping_s;  /* interval of comments on silent streams */
    int grace_s; /* for running requests after SIGTERM */
};

/* A model's name from its path. */
void server_name_of(const char *path, char *name, size_t size);
/* Whether it is a valid entry of page_origins: scheme://host[:port]. */
bool web_origin_valid(const char *origin);
/* Runs until SIGTERM, SIGINT or failure to start. Returns the program's exit code. */
int server_run(const struct server_options *opt, struct error *err);

#endif
