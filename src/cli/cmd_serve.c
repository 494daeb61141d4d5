/* steel serve: its flags, with the names of llama-server and vLLM as aliases. */
#include "cli/cli.h"
#include "cli/hub/hub.h"
#include "cli/listen.h"
#include "cli/plan_fit.h"
#include "cli/sampling.h"
#include "cli/serve_models.h"
#include "base/duration.h"
#include "base/mem.h"
#include "base/sysmem.h"
#include "engine/keep_folder.h"
#include "sample/sample_advice.h"
#include "server/api/server.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct serve_flags {
    struct model_flags model;
    struct server_options srv;
    struct model_source main; /* the first model; its options are those of the others, too */
    struct serve_models all;
    struct opt_list dirs, pins;
    const char *keep_alive, *model_memory, *cache_dir, *cache_disk;
    struct buf cache_place;
    const char *embedding, *rerank;
    struct listen_flags listen;
    const char *model_path, *metrics, *kv_memory, *state_memory, *image_memory, *max_unsent,
        *mcp_file, *samplers;
    struct mcp_config mcp;
    struct opt_list page_origins, image_origins, breakers;
    float itl_ms, ttft_ms;
    int body_mb, kv_tokens, store_mb, lora_rank;
    const char *mmproj;
    int image_pixels, image_tokens;
    bool no_prefix_cache, no_images;
    bool ignored;
    const char *ignored_text;
};

/* A quarter of the free memory. */
static size_t default_kv_bytes(void)
{
    size_t bytes = sysmem_available("") / 4;
    return bytes > (size_t)256 << 20 ? bytes : (size_t)256 << 20;
}

/* Limits on what clients may make the server hold. */
static bool finish_limits(const struct usage *u, struct serve_flags *f)
{
    if (f->body_mb)
        f->listen.http.max_body = (size_t)f->body_mb << 20;
    if (!listen_flags_finish(u, &f->listen))
        return false;
    struct stat st;
    const char *dir = f->srv.slot_save_path;
    if (dir && (stat(dir, &st) || !S_ISDIR(st.st_mode) || access(dir, W_OK | X_OK))) {
        args_usage_error(u, "--slot-save-path %s: not a folder that can be written to", dir);
        return false;
    }
    f->srv.store_bytes = (size_t)f->store_mb << 20;
    f->srv.max_unsent = (size_t)64 << 20;
    if (f->max_unsent &&
        (!cli_parse_bytes(f->max_unsent, &f->srv.max_unsent) || !f->srv.max_unsent)) {
        args_usage_error(u, "--max-unsent %s: use a size such as 64M", f->max_unsent);
        return false;
    }
    return true;
}

/* Where prefixes are kept, and how much of them. */
static bool finish_cache(const struct usage *u, struct serve_flags *f)
{
    struct keep_options *k = &f->main.engine.keep;
    size_t most = 0;
    *k = (struct keep_options){.dir = f->cache_dir};
    if (f->cache_disk && !cli_parse_bytes(f->cache_disk, &most)) {
        args_usage_error(u, "--cache-disk %s: use a size such as 50G, or 0", f->cache_disk);
        return false;
    }
    if (f->no_prefix_cache || (f->cache_disk && !most)) {
        k->dir = NULL;
        return true;
    }
    if (!k->dir) {
        k->least_weights = (size_t)1 << 30;
        buf_reset(&f->cache_place);
        k->dir = keep_folder_place(&f->cache_place) ? f->cache_place.p : NULL;
    }
    k->most_bytes = most ? most : k->dir ? keep_folder_default(k->dir) : 0;
    return true;
}

static bool finish_options(const struct usage *u, struct serve_flags *f)
{
    struct engine_options *e = &f->main.engine;
    int max_seqs = e->runtime.max_seqs;
    if (!cli_runtime_options(u, &f->model, &e->runtime))
        return false;
    e->runtime.max_seqs = max_seqs;
    e->runtime.kv_tokens = f->kv_tokens;
    e->runtime.images = !f->no_images;
    e->runtime.mmproj = f->mmproj;
    e->runtime.image_features = f->image_tokens;
    f->srv.max_image_pixels = f->image_pixels;
    if (f->srv.allow_lora_loading)
        e->runtime.lora_rank = f->lora_rank;
    if (!sampling_check(u, f->samplers, &f->main.sample.order, &f->breakers))
        return false;
    if (f->breakers.n)
        f->srv.dry_breakers = f->breakers.items;
    f->srv.n_dry_breakers = sampling_n_breakers(&f->breakers);
    e->itl_ms = (double)f->itl_ms;
    e->ttft_ms = (double)f->ttft_ms;
    e->no_prefix_cache = f->no_prefix_cache;
    e->runtime.kv_bytes = default_kv_bytes();
    e->runtime.kv_bytes_host = !f->kv_memory;
    if (f->kv_memory && !cli_parse_bytes(f->kv_memory, &e->runtime.kv_bytes)) {
        args_usage_error(u, "--kv-memory %s: use a size such as 8G or 512M", f->kv_memory);
        return false;
    }
    if (f->state_memory &&
        (!cli_parse_bytes(f->state_memory, &e->runtime.state_bytes) || !e->runtime.state_bytes)) {
        args_usage_error(u, "--state-memory %s: use a size such as 2G or 512M", f->state_memory);
        return false;
    }
    if (!finish_cache(u, f))
        return false;
    int64_t keep_ns = -1;
    bool unit = true;
    if (f->keep_alive &&
        (!duration_parse(f->keep_alive, &keep_ns, &unit) || (!unit && keep_ns > 0))) {
        args_usage_error(u,
                         "--keep-alive %s: use a time with a unit, such as 10m, 0 or -1; the "
                         "timeout of idle connections is --idle-timeout",
                         f->keep_alive);
        return false;
    }
    f->main.keep_s = keep_ns < 0 ? -1 : (int)(keep_ns / 1000000000);
    if (f->model_memory &&
        (!cli_parse_bytes(f->model_memory, &f->srv.max_bytes) || !f->srv.max_bytes)) {
        args_usage_error(u, "--model-memory %s: use a size such as 24G", f->model_memory);
        return false;
    }
    if (f->srv.max_bytes && !f->kv_memory && e->runtime.kv_bytes > f->srv.max_bytes / 4)
        e->runtime.kv_bytes = f->srv.max_bytes / 4;
    for (int i = 0; i < f->dirs.n; i++) {
        struct stat st;
        if (stat(f->dirs.items[i], &st) || !S_ISDIR(st.st_mode)) {
            args_usage_error(u, "--models %s: not a folder", f->dirs.items[i]);
            return false;
        }
    }
    if (f->image_memory &&
        (!cli_parse_bytes(f->image_memory, &e->embed_bytes) || !e->embed_bytes)) {
        args_usage_error(u, "--image-memory %s: use a size such as 2G or 512M", f->image_memory);
        return false;
    }
    if (!finish_limits(u, f))
        return false;
    static const char *const styles[] = {"steel", "vllm", "llamacpp"};
    int style = -1;
    for (int i = 0; i < 3; i++)
        style = !strcmp(f->metrics, styles[i]) ? i : style;
    for (int i = 0; i < f->page_origins.n; i++)
        if (!web_origin_valid(f->page_origins.items[i])) {
            args_usage_error(
                u, "--page-connect %s: use scheme://host:port, such as http://localhost:3000",
                f->page_origins.items[i]);
            return false;
        }
    for (int i = 0; i < f->image_origins.n; i++)
        if (!web_origin_valid(f->image_origins.items[i]) ||
            strchr(f->image_origins.items[i], '*')) {
            args_usage_error(
                u,
                "--allow-image-origins %s: use scheme://host[:port], such as https://example.org",
                f->image_origins.items[i]);
            return false;
        }
    f->srv.image_origins =
        (struct image_origins){(const char *const *)f->image_origins.items, f->image_origins.n};
    if (style < 0) {
        args_usage_error(u, "--metrics-compat %s: use steel, vllm or llamacpp", f->metrics);
        return false;
    }
    f->srv.metrics = (enum metrics_style)style;
    f->srv.http = f->listen.http;
    f->srv.grace_s = f->listen.grace_s;
    return true;
}

/* Fills the models of the options: those of the command line, in order, then an embedding and a rerank model. The
 * first is loaded at once. One model alone stays. */
static bool list_models(struct serve_flags *f, const char *const *pos, int n, struct error *err)
{
    const struct {
        const char **path;
        enum model_task task;
    } helpers[] = {{&f->embedding, MODEL_EMBED}, {&f->rerank, MODEL_RERANK}};
    struct serve_models *all = &f->all;
    struct model_source first = f->main;
    bool none = !f->model_path && !f->dirs.n, pull = f->srv.allow_pull;
    bool alone = n == 0 && f->model_path && !f->dirs.n && !pull;
    all->defaults = f->main;
    all->defaults.name = NULL;
    all->defaults.chat_template = NULL;
    all->defaults.at_start = false;
    all->defaults.task = MODEL_BY_FILE;
    /* adapters and the draft model belong to the first model */
    all->defaults.engine.runtime.n_loras = 0;
    all->defaults.engine.runtime.draft_model = NULL;
    all->dirs = &f->dirs;
    all->hub = none || pull;
    if (!alone && !serve_made_dir(all, pull, err))
        return false;
    f->srv.made_dir = all->made_dir;
    first.pinned = (alone || none) && !f->keep_alive;
    if (!alone && !none)
        first.task = MODEL_BY_FILE;
    if (f->model_path || none) {
        if (f->model_path && !serve_add(all, f->model_path, first, err))
            return false;
        if (none) /* the built-in model */
            serve_add_builtin(all, first);
    }
    for (int i = 0; i < n; i++)
        if (!serve_add(all, pos[i], all->defaults, err))
            return false;
    if (!alone && !serve_add_sections(all, err))
        return false;
    for (int i = 0; i < 2; i++) {
        struct model_source helper = {.task = helpers[i].task,
                                      .at_start = true,
                                      .pinned = true,
                                      .keep_s = -1,
                                      .engine.runtime.backend = f->main.engine.runtime.backend};
        if (*helpers[i].path && !serve_add(all, *helpers[i].path, helper, err))
            return false;
    }
    if (!alone && !none && (f->main.engine.runtime.n_loras || f->main.engine.runtime.draft_model))
        return error_set(err,
                         "%s with several models: put it into a section [model NAME] of the config "
                         "file",
                         f->main.engine.runtime.n_loras ? "--lora" : "--draft-model");
    f->srv.models = all->list;
    f->srv.n_models = all->n;
    if (!alone) {
        f->srv.scan = serve_scan;
        f->srv.scan_arg = all;
    }
    return true;
}

/* Whether every name of --pin is that of a model is only known when all have been found: it is logged. */
static void pin(struct serve_flags *f)
{
    f->srv.pins = f->pins.items;
    f->srv.n_pins = f->pins.n;
}

/* Whoever can change the models of a server can fill its disk, so strangers must not. */
static bool check_pull(struct serve_flags *f, struct error *err)
{
    f->srv.store_prepare = hub_prepare;
    f->srv.store_pull = hub_pull_watched;
    f->srv.store_remove = hub_remove;
    if (f->srv.allow_pull && !f->srv.access.n_keys && !access_is_loopback(f->srv.http.host))
        return error_set(err,
                         "--allow-pull: whoever reaches --host %.100s could change its models; use "
                         "--api-key, too",
                         f->srv.http.host);
    return true;
}

/* Reads --mcp-config. Its servers run commands, so strangers must not reach them. */
static bool read_mcp(struct serve_flags *f, struct error *err)
{
    if (!f->mcp_file)
        return true;
    f->srv.mcp = &f->mcp;
    if (!f->srv.access.n_keys && !access_is_loopback(f->srv.http.host))
        return error_set(err,
                         "--mcp-config: whoever reaches --host %.100s could run its tools; use "
                         "--api-key, too",
                         f->srv.http.host);
    return mcp_config_load(f->mcp_file, &f->mcp, err) || error_prefix(err, "--mcp-config");
}

/* Keys of a section that are no options of the command line. False: l is none. *ok: its value is good. */
static bool own_line(const struct usage *u, const struct config_line *l, struct model_section *x,
                     bool *ok)
{
    static const char *const tasks[] = {"text", "embed", "rerank"};
    const char *v = l->value;
    *ok = true;
    if (!strcmp(l->name, "model")) {
        x->model = v;
    } else if (!strcmp(l->name, "alias")) {
        *ok = x->n_aliases < SERVE_ALIASES;
        if (*ok)
            x->aliases[x->n_aliases++] = v;
        else
            args_usage_error(u, "[model %s]: more than %d aliases", x->name, SERVE_ALIASES);
    } else if (!strcmp(l->name, "task")) {
        for (int i = 0; i < 3; i++)
            x->task = !strcmp(v, tasks[i]) ? (enum model_task)i : x->task;
        *ok = x->task != MODEL_BY_FILE;
        if (!*ok)
            args_usage_error(u, "[model %s]: task %s: use text, embed or rerank", x->name, v);
    } else if (!strcmp(l->name, "pin")) {
        x->options.pinned = !*v || !strcmp(v, "true") || !strcmp(v, "yes") || !strcmp(v, "1");
    } else {
        return false;
    }
    return true;
}

/* Options that a model of a server with several may have for itself. The others are of the server. */
static bool is_of_model(const char *name)
{
    static const char *const names[] = {
        "lora",
        "mmproj",
        "no-images",
        "max-image-tokens",
        "max-num-seqs",
        "max-queue",
        "max-parallel-per-client",
        "itl-ms",
        "step-ms",
        "ttft-ms",
        "batch-size",
        "kv-memory",
        "state-memory",
        "kv-tokens",
        "no-prefix-cache",
        "chat-template",
        "temp",
        "top-k",
        "top-p",
        "min-p",
        "repeat-penalty",
        "repeat-last-n",
        "presence-penalty",
        "frequency-penalty",
        "samplers",
        "typical",
        "top-nsigma",
        "xtc-probability",
        "xtc-threshold",
        "dynatemp-range",
        "dynatemp-exp",
        "mirostat",
        "mirostat-ent",
        "mirostat-lr",
        "dry-multiplier",
        "dry-base",
        "dry-allowed-length",
        "dry-penalty-last-n",
        "draft",
        "draft-model",
        "draft-device",
        "threads",
        "ctx-size",
        "device",
        "gpu-memory-utilization",
        "kv-type",
        "cache-type-k",
        "cache-type-v",
        "deterministic",
        "keep-alive",
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i]))
            return true;
    return false;
}

static bool read_lines(const struct usage *u, struct model_section *x)
{
    const struct config_file *c = config_file_get();
    for (int i = 0; i < c->n; i++) {
        const struct config_line *l = &c->lines[i];
        bool ok;
        if (!l->section || strncmp(l->section, "model ", 6) || strcmp(l->section + 6, x->name))
            continue;
        if (own_line(u, l, x, &ok)) {
            if (!ok)
                return false;
        } else if (!is_of_model(l->name)) {
            args_usage_error(u, "%s:%d: '%s' is no option of one model", c->path, l->line, l->name);
            return false;
        } else if (!args_set(u, l)) {
            return false;
        }
    }
    return true;
}

/* Reads the command line, or a section of the config file. Returns the number of positionals left, or what args_parse
 * returns. */
static int read_flags(struct serve_flags *f, int argc, char **argv, const char **pos,
                      struct model_section *x)
{
    struct engine_options *e = &f->main.engine;
    struct sample_params *s = &f->main.sample;
    const struct opt opts[] = {
        MODEL_ROW(f->model_path),
        {OPT_STRING, 'a', "alias", "served-model-name", &f->main.name, 0, 0, "NAME",
         "the model's name in replies (default: from the file)"},
        {OPT_STRING, 0, "embedding", 0, &f->embedding, 0, 0, "[NAME=]MODEL",
         "also load an embedding model for /v1/embeddings"},
        {OPT_STRING, 0, "rerank", 0, &f->rerank, 0, 0, "[NAME=]MODEL",
         "also load a model for /v1/rerank"},
        LORA_ROW(f->model),
        {OPT_LIST, 0, "lora-modules", 0, &f->model.loras, 0, 0, "NAME=PATH", NULL},
        {OPT_FLAG, 0, "enable-lora", 0, &f->ignored, 0, 0, 0, NULL},
        {OPT_FLAG, 0, "allow-lora-loading", 0, &f->srv.allow_lora_loading, 0, 0, 0,
         "clients may load and unload adapters from local files"},
        {OPT_INT, 0, "max-lora-rank", 0, &f->lora_rank, 1, LORA_MAX_RANK, "N",
         "maximum rank of adapters that clients load (default 64)"},
        LISTEN_ROWS(f->listen),
        {OPT_LIST, 0, "page-connect", 0, &f->page_origins, 0, 0, "ORIGIN",
         "origin that tools of the web page may call, such as http://localhost:3000 (repeatable)"},
        {OPT_INT, 0, "max-body-mb", 0, &f->body_mb, 1, 1024, "N", NULL},
        {OPT_STRING, 0, "max-unsent", 0, &f->max_unsent, 0, 0, "SIZE",
         "output buffered for a client that reads slowly (default 64M)"},
        {OPT_STRING, 0, "mmproj", "-mm", &f->mmproj, 0, 0, "FILE",
         "the image tower of a GGUF (default: mmproj*.gguf beside it)"},
        {OPT_FLAG, 0, "no-images", "no-mmproj", &f->no_images, 0, 0, 0,
         "do not load the model's image tower: it reads text only"},
        {OPT_INT, 0, "max-image-pixels", 0, &f->image_pixels, 1, 1 << 30, "N",
         "largest image that is decoded, width x height (default 33554432)"},
        {OPT_INT, 0, "max-image-tokens", 0, &f->image_tokens, 4, 16384, "N",
         "most tokens of an image; larger images are resized (default 4096)"},
        {OPT_LIST, 0, "allow-image-origins", 0, &f->image_origins, 0, 0, "ORIGIN",
         "origin from which images of http and https URLs are fetched, such as "
         "https://example.org (repeatable)"},
        {OPT_STRING, 0, "image-memory", 0, &f->image_memory, 0, 0, "SIZE",
         "memory for images of waiting and running requests (default 1G); beyond "
         "that 429"},
        {OPT_INT, 0, "store-mb", 0, &f->store_mb, 0, 65536, "N",
         "MB of responses kept for previous_response_id (default 64; 0 = none)"},
        {OPT_STRING, 0, "slot-save-path", 0, &f->srv.slot_save_path, 0, 0, "DIR",
         "clients may save and restore slots, with the cached pages of their prompts, in this "
         "folder"},
        {OPT_INT, 0, "sse-ping", 0, &f->srv.ping_s, 1, 3600, "S",
         "interval of keep-alive comments on silent streams (default 15)"},
        {OPT_STRING, 0, "mcp-config", 0, &f->mcp_file, 0, 0, "FILE",
         "MCP servers whose tools clients may use (a file such as mcp.json)"},
        {OPT_INT, 0, "mcp-timeout", 0, &f->srv.mcp_call_s, 1, 86400, "S",
         "time of one call of a tool (default 60)"},
        {OPT_INT, 0, "mcp-max-rounds", 0, &f->srv.mcp_rounds, 1, 1000, "N",
         "most rounds of tool calls in one response (default 16)"},
        {OPT_STRING, 0, "metrics-compat", 0, &f->metrics, 0, 0, "STYLE",
         "metric names: steel, vllm or llamacpp (default steel)"},
        {OPT_HEADING, 0, "several models", 0, 0, 0, 0, 0, 0},
        {OPT_LIST, 0, "models", "models-dir", &f->dirs, 0, 0, "DIR",
         "serve the GGUF files and Hugging Face folders in DIR by name (repeatable)"},
        {OPT_STRING, 0, "keep-alive", 0, &f->keep_alive, 0, 0, "TIME",
         "unload a model after this time without use, such as 5m (default: when memory is "
         "needed)"},
        {OPT_LIST, 0, "pin", 0, &f->pins, 0, 0, "NAME", "never unload this model (repeatable)"},
        {OPT_INT, 0, "max-models", "models-max", &f->srv.max_loaded, 1, 1024, "N",
         "most models in memory at once (default: as many as fit)"},
        {OPT_STRING, 0, "model-memory", 0, &f->model_memory, 0, 0, "SIZE",
         "host memory for weights and caches of all models (default: what is free)"},
        {OPT_FLAG, 0, "allow-pull", 0, &f->srv.allow_pull, 0, 0, 0,
         "clients may download, make, copy and remove models (Ollama's /api/pull, create, copy, "
         "delete)"},
        {OPT_INT, 0, "load-timeout", 0, &f->srv.load_wait_s, 1, 86400, "S",
         "a request waits for its model for this long, then gets a 503 (default 120)"},
        {OPT_INT, 0, "max-waiting", 0, &f->srv.max_waiting, 1, 1 << 20, "N",
         "requests that wait for models before a 503 (default 512)"},
        {OPT_HEADING, 0, "batching", 0, 0, 0, 0, 0, 0},
        {OPT_INT, 0, "max-num-seqs", "-np", &e->runtime.max_seqs, 1, 4096, "N",
         "maximum batch size (default 16; on a GPU what its KV cache holds, up to 1024)"},
        {OPT_INT, 0, "parallel", 0, &e->runtime.max_seqs, 1, 4096, "N", NULL},
        {OPT_INT, 0, "max-queue", 0, &e->max_queue, 1, 1 << 20, "N",
         "queued requests before 429 (default: two batches, at least 512)"},
        {OPT_INT, 0, "max-parallel-per-client", 0, &e->max_per_client, 1, 4096, "N",
         "sequences in the batch per API key or address (default: a fair share)"},
        {OPT_FLOAT, 0, "itl-ms", "step-ms", &f->itl_ms, 0, 60000, "MS",
         "target between two tokens of an answer, which bounds prompts and admission (default: "
         "steps of 3 decode steps, at least 250)"},
        {OPT_FLOAT, 0, "ttft-ms", 0, &f->ttft_ms, 0, 3600000, "MS",
         "target of the first token: prompts are read one after another (default: all at once)"},
        {OPT_INT, 'b', "batch-size", "max-num-batched-tokens", &e->runtime.max_tokens, 1, 1 << 20,
         "N", "maximum tokens per step (default 512, on a GPU 2048)"},
        {OPT_STRING, 0, "kv-memory", 0, &f->kv_memory, 0, 0, "SIZE",
         "memory for the KV cache (default: a quarter of the free memory)"},
        {OPT_STRING, 0, "state-memory", 0, &f->state_memory, 0, 0, "SIZE",
         "memory for recurrent-state checkpoints (default: 2 per sequence, 64 or more on a CPU; at "
         "most a quarter)"},
        {OPT_INT, 0, "kv-tokens", 0, &f->kv_tokens, 1, 1 << 30, "N",
         "size of the KV cache in tokens (default: by --kv-memory)"},
        {OPT_FLAG, 0, "no-prefix-cache", "no-enable-prefix-caching", &f->no_prefix_cache, 0, 0, 0,
         "disable the prefix cache"},
        {OPT_STRING, 0, "cache-dir", 0, &f->cache_dir, 0, 0, "DIR",
         "keep prefixes in this folder, for restarts and other models (default: in ~/.cache/steel, "
         "for models of 1 GB and more)"},
        {OPT_STRING, 0, "cache-disk", 0, &f->cache_disk, 0, 0, "SIZE",
         "most bytes of that folder, such as 50G (default: 10 % of the free disk; 0 = no folder)"},
        {OPT_FLAG, 0, "enable-prefix-caching", 0, &f->ignored, 0, 0, 0, NULL},
        {OPT_FLAG, 0, "share-prefix-cache", 0, &f->srv.share_prefix_cache, 0, 0, 0,
         "share the prefix cache among all API keys (default: one per key)"},
        {OPT_FLAG, 0, "cache-salt-by-key", 0, &f->ignored, 0, 0, 0, NULL},
        {OPT_HEADING, 0, "chat", 0, 0, 0, 0, 0, 0},
        {OPT_STRING, 0, "chat-template", "chat-template-file", &f->main.chat_template, 0, 0,
         "FILE|MODEL", "a Jinja file, or a model whose template is used instead"},
        {OPT_STRING, 0, "chat-format", "tool-call-parser", &f->srv.chat_format, 0, 0, "NAME",
         "format of tool calls and thinking (default: by the template)"},
        {OPT_FLAG, 0, "allow-special-in-text", 0, &f->srv.allow_special, 0, 0, 0,
         "control tokens spelled in messages count, as if the template had written them"},
        /* Flags of other servers for what is always on here. */
        {OPT_FLAG, 0, "jinja", 0, &f->ignored, 0, 0, 0, NULL},
        {OPT_FLAG, 0, "cont-batching", "-cb", &f->ignored, 0, 0, 0, NULL},
        {OPT_SWITCH, 0, "flash-attn", "-fa", &f->ignored_text, 0, 0, "X", NULL},
        {OPT_STRING, 0, "reasoning-parser", "reasoning-format", &f->ignored_text, 0, 0, "X", NULL},
        {OPT_INT, 0, "ubatch-size", "-ub", &e->runtime.max_tokens, 1, 1 << 20, "N", NULL},
        {OPT_FLAG, 0, "enable-auto-tool-choice", 0, &f->ignored, 0, 0, 0, NULL},
        {OPT_FLAG, 0, "metrics", 0, &f->ignored, 0, 0, 0, NULL},
        {OPT_HEADING, 0, "sampling defaults", 0, 0, 0, 0, 0, 0},
        {OPT_FLOAT, 0, "temp", "temperature", &s->temp, 0, 100, "T",
         "default: the model's, or 0.8"},
        {OPT_INT, 0, "top-k", 0, &s->top_k, 0, 1 << 28, "K",
         "0 = off; default: the model's, or 40"},
        {OPT_FLOAT, 0, "top-p", 0, &s->top_p, 0, 1, "P", "default: the model's, or 0.95"},
        {OPT_FLOAT, 0, "min-p", 0, &s->min_p, 0, 1, "P", "default: the model's, or 0.05"},
        {OPT_FLOAT, 0, "repeat-penalty", 0, &s->repeat_penalty, 0.01, 100, "X",
         "1 = off; default: the model's, or 1"},
        SAMPLING_ROWS(*s, f->samplers, f->breakers),
        DRAFT_ROW(f->model),
        DRAFT_MODEL_ROWS(f->model),
        MODEL_FLAG_ROWS(f->model),
    };
    const struct usage u = {
        .command = "serve",
        .synopsis = "[MODEL...] [options]",
        .about =
            "Serves models over HTTP: OpenAI's chat, completions and Responses APIs, Anthropic's\n"
            "messages API, Ollama's API, /tokenize, /metrics, /health, and a chat page at /.\n"
            "A single MODEL is loaded at the start and stays. With several ([NAME=]MODEL names\n"
            "one), the first is loaded at the start and the others at their first request. Models\n"
            "of --models, or of 'steel list' if no MODEL is given, are loaded at their first\n"
            "request, too. Models are unloaded when others need the memory. Sections\n"
            "[model NAME] of the config file set the options of each.",
        .examples = "  steel serve model.gguf\n"
                    "  steel serve model.gguf --host 0.0.0.0 --port 8000 --api-key secret -np 32\n"
                    "  steel serve --models ~/models --keep-alive 10m\n"
                    "  curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\":\n"
                    "       [{\"role\":\"user\",\"content\":\"Hello\"}],\"stream\":true}'\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 0,
        .max_args = SERVE_MODELS_MOST,
    };
    if (x)
        return read_lines(&u, x) && finish_options(&u, f) ? 0 : ARGS_BAD;
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return n;
    if (args_given(&f->model_path) && n)
        return args_usage_error(&u, "unexpected argument '%s': -m names the model", pos[0]);
    return cli_take_model(&u, &f->model_path, pos, &n, 0) && finish_options(&u, f) ? n : ARGS_BAD;
}

/* Reads the section of the config file that line i begins, if it is that of a model. */
static bool read_section(struct serve_flags *f, const char *name)
{
    struct serve_models *all = &f->all;
    if (serve_section(all, name))
        return true;
    all->sections = mem_realloc(all->sections, (size_t)all->n_sections + 1, sizeof *all->sections);
    struct model_section *x = &all->sections[all->n_sections++];
    *x = (struct model_section){.name = name, .task = MODEL_BY_FILE};
    struct serve_flags *own = mem_alloc(sizeof *own);
    *own = *f;
    x->owner = own;
    own->cache_place = (struct buf){0};
    own->model.loras = own->breakers = (struct opt_list){0}; /* lists are those of the section */
    own->main.engine.runtime.loras = NULL;
    own->main.engine.runtime.n_loras = 0;
    if (read_flags(own, 0, NULL, NULL, x) < 0)
        return false;
    bool pinned = x->options.pinned;
    x->options = own->main;
    x->options.pinned = pinned;
    return true;
}

static bool read_sections(struct serve_flags *f)
{
    const struct config_file *c = config_file_get();
    for (int i = 0; i < c->n; i++)
        if (c->lines[i].section && !strncmp(c->lines[i].section, "model ", 6) &&
            !read_section(f, c->lines[i].section + 6))
            return false;
    return true;
}

static void clear_sections(struct serve_models *all)
{
    for (int i = 0; i < all->n_sections; i++) {
        struct serve_flags *own = all->sections[i].owner;
        cli_runtime_options_clear(&own->main.engine.runtime);
        buf_clear(&own->cache_place);
        mem_free(own);
    }
    mem_free(all->sections);
}

int cmd_serve(int argc, char **argv)
{
    struct serve_flags f = {
        .listen = listen_flags_default(),
        .metrics = "steel",
        .store_mb = 64,
        .lora_rank = 64,
        .main = {.sample = sample_params_unset(), .at_start = true, .keep_s = -1},
        .srv = {.load_wait_s = 120,
                .max_waiting = 512,
                .ping_s = 15,
                .mcp_call_s = 60,
                .mcp_rounds = 16},
    };
    f.model.draft = DRAFT_AUTO;
    const char *pos[SERVE_MODELS_MOST];
    int n = read_flags(&f, argc, argv, pos, NULL);
    struct error err = {0};
    int rc = n < 0 ? cli_args_exit(n) : EXIT_FAIL;
    if (n >= 0 && !read_sections(&f)) {
        rc = EXIT_USAGE;
    } else if (n >= 0 && listen_access(&f.listen, &f.srv.access, &err) && read_mcp(&f, &err) &&
               check_pull(&f, &err) && cli_chat_template(&f.main.chat_template, &err) &&
               list_models(&f, pos, n, &err)) {
        pin(&f);
        f.srv.page_origins = f.page_origins.items;
        f.srv.n_page_origins = f.page_origins.n;
        rc = server_run(&f.srv, &err);
    }
    if (rc == EXIT_FAIL && err.msg[0]) /* else it was logged */
        cli_fail(&err);
    if (rc == EXIT_FAIL && f.all.n && f.all.list[0].at_start && f.all.list[0].path)
        plan_fit_advise(f.all.list[0].path, &f.all.list[0].engine.runtime);
    clear_sections(&f.all);
    serve_models_clear(&f.all);
    buf_clear(&f.cache_place);
    mcp_config_clear(&f.mcp);
    listen_flags_clear(&f.listen);
    cli_runtime_options_clear(&f.main.engine.runtime);
    return rc;
}
