/* steel serve: flags for the server. Keeps the names llama-server's and vLLM's users know. */
#include "cli/cli.h"
#include "cli/hub.h"
#include "base/mem.h"
#include "base/sysmem.h"
#include "sample/sample_advice.h"
#include "server/log.h"
#include "server/server.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct serve_flags {
    struct model_flags model;
    struct server_options srv;
    const char *model_path, *key_file, *log_format, *log_level, *metrics, *kv_memory, *state_memory;
    const char *max_body, *max_buffered, *max_unsent;
    struct opt_list keys, origins, hosts, page_origins;
    float step_ms;
    int body_mb, kv_tokens, store_mb;
    bool no_prefix_cache;
    bool ignored;
    const char *ignored_text;
};

/* "8G", "512M", "1.5g", or bytes. */
static bool parse_bytes(const char *s, size_t *out)
{
    char *end;
    double v = strtod(s, &end);
    static const char units[] = "KMGT";
    if (end == s || !(v >= 0))
        return false;
    const char *u = *end ? strchr(units, *end & ~32) : NULL;
    if (*end && (!u || (end[1] && strcmp(end + 1, "B") && strcmp(end + 1, "iB"))))
        return false;
    for (long i = u ? u - units + 1 : 0; i > 0; i--)
        v *= 1024;
    *out = (size_t)v;
    return v < 0x1p60;
}

/* One key a line; empty lines and lines that begin with # are not keys. */
static bool read_keys(const char *path, struct buf *text, struct opt_list *keys, struct error *err)
{
    if (!cli_read_file(path, 1 << 20, text, err))
        return false;
    for (char *line = text->p, *next; line && *line; line = next) {
        next = strchr(line, '\n');
        if (next)
            *next++ = 0;
        line[strcspn(line, "\r \t")] = 0;
        if (*line && *line != '#')
            args_list_add(keys, line);
    }
    return keys->n > 0 || error_set(err, "%s: no key in it", path);
}

/* A quarter of the memory that is free now. */
static size_t default_kv_bytes(void)
{
    size_t bytes = sysmem_available("") / 4;
    return bytes > (size_t)256 << 20 ? bytes : (size_t)256 << 20;
}

/* Limits on what clients may make the server hold. */
static bool finish_limits(const struct usage *u, struct serve_flags *f)
{
    struct http_options *h = &f->srv.http;
    h->max_body = f->body_mb ? (size_t)f->body_mb << 20 : (size_t)32 << 20;
    if (f->max_body && (!parse_bytes(f->max_body, &h->max_body) || !h->max_body ||
                        h->max_body > (size_t)1 << 30)) {
        args_usage_error(u, "--max-body %s: use a size up to 1G, such as 32M", f->max_body);
        return false;
    }
    h->max_buffered = 8 * h->max_body;
    if (f->max_buffered && !parse_bytes(f->max_buffered, &h->max_buffered)) {
        args_usage_error(u, "--max-buffered %s: use a size such as 256M", f->max_buffered);
        return false;
    }
    f->srv.store_bytes = (size_t)f->store_mb << 20;
    f->srv.max_unsent = (size_t)64 << 20;
    if (f->max_unsent && (!parse_bytes(f->max_unsent, &f->srv.max_unsent) || !f->srv.max_unsent)) {
        args_usage_error(u, "--max-unsent %s: use a size such as 64M", f->max_unsent);
        return false;
    }
    return true;
}

static bool finish_options(const struct usage *u, struct serve_flags *f)
{
    struct engine_options *e = &f->srv.engine;
    int max_seqs = e->runtime.max_seqs;
    if (!cli_runtime_options(u, &f->model, &e->runtime))
        return false;
    e->runtime.max_seqs = max_seqs;
    e->runtime.kv_tokens = f->kv_tokens;
    e->step_ms = (double)f->step_ms;
    e->no_prefix_cache = f->no_prefix_cache;
    e->runtime.kv_bytes = default_kv_bytes();
    e->runtime.kv_bytes_host = !f->kv_memory;
    if (f->kv_memory && !parse_bytes(f->kv_memory, &e->runtime.kv_bytes)) {
        args_usage_error(u, "--kv-memory %s: use a size such as 8G or 512M", f->kv_memory);
        return false;
    }
    if (f->state_memory &&
        (!parse_bytes(f->state_memory, &e->runtime.state_bytes) || !e->runtime.state_bytes)) {
        args_usage_error(u, "--state-memory %s: use a size such as 2G or 512M", f->state_memory);
        return false;
    }
    if (!finish_limits(u, f))
        return false;
    static const char *const styles[] = {"steel", "vllm", "llamacpp"};
    static const char *const levels[] = {"debug", "info", "warn", "error"};
    int style = -1, level = -1;
    for (int i = 0; i < 3; i++)
        style = !strcmp(f->metrics, styles[i]) ? i : style;
    for (int i = 0; i < 4; i++)
        level = !strcmp(f->log_level, levels[i]) ? i : level;
    bool json = !strcmp(f->log_format, "json");
    for (int i = 0; i < f->page_origins.n; i++)
        if (!web_origin_valid(f->page_origins.items[i])) {
            args_usage_error(u,
                             "--page-connect %s: use scheme://host:port, as http://localhost:3000",
                             f->page_origins.items[i]);
            return false;
        }
    if (style < 0)
        args_usage_error(u, "--metrics-compat %s: use steel, vllm or llamacpp", f->metrics);
    else if (level < 0)
        args_usage_error(u, "--log-level %s: use debug, info, warn or error", f->log_level);
    else if (!json && strcmp(f->log_format, "text"))
        args_usage_error(u, "--log-format %s: use text or json", f->log_format);
    else {
        f->srv.metrics = (enum metrics_style)style;
        log_setup((enum log_level)level, json);
        return true;
    }
    return false;
}

int cmd_serve(int argc, char **argv)
{
    struct serve_flags f = {
        .log_format = "text",
        .log_level = "info",
        .metrics = "steel",
        .store_mb = 64,
        .srv = {.sample = sample_params_unset(),
                .ping_s = 15,
                .grace_s = 30,
                .http = {.host = "127.0.0.1",
                         .port = 8080,
                         .max_conns = 1024,
                         .idle_s = 75,
                         .read_s = 30,
                         .write_s = 30}},
    };
    struct http_options *h = &f.srv.http;
    struct engine_options *e = &f.srv.engine;
    struct sample_params *s = &f.srv.sample;
    const struct opt opts[] = {
        MODEL_ROW(f.model_path),
        {OPT_STRING, 'a', "alias", "served-model-name", &f.srv.alias, 0, 0, "NAME",
         "the model's name in replies (default: from the file)"},
        {OPT_STRING, 0, "embedding", 0, &f.srv.embedding, 0, 0, "MODEL",
         "a model for /v1/embeddings beside the one that answers"},
        {OPT_STRING, 0, "rerank", 0, &f.srv.rerank, 0, 0, "MODEL", "one for /v1/rerank"},
        {OPT_STRING, 0, "host", 0, &h->host, 0, 0, "ADDR", "address (default 127.0.0.1)"},
        {OPT_INT, 0, "port", 0, &h->port, 0, 65535, "N", "port (default 8080; 0 = any free one)"},
        {OPT_LIST, 0, "api-key", 0, &f.keys, 0, 0, "KEY", "allow only with this key (repeatable)"},
        {OPT_STRING, 0, "api-key-file", 0, &f.key_file, 0, 0, "FILE", "keys, one a line"},
        {OPT_STRING, 0, "ssl-cert-file", "ssl-certfile", &h->cert_file, 0, 0, "FILE",
         "TLS certificate chain, PEM"},
        {OPT_STRING, 0, "ssl-key-file", "ssl-keyfile", &h->key_file, 0, 0, "FILE",
         "TLS private key, PEM"},
        {OPT_LIST, 0, "cors-origin", "allowed-origins", &f.origins, 0, 0, "ORIGIN",
         "let pages of this origin call (default: localhost's); * = any (repeatable)"},
        {OPT_LIST, 0, "allowed-hosts", "allowed-host", &f.hosts, 0, 0, "NAME",
         "another name of this server in Host headers; * = any (repeatable)"},
        {OPT_LIST, 0, "page-connect", 0, &f.page_origins, 0, 0, "ORIGIN",
         "let tools of the web page call this origin, as http://localhost:3000 (repeatable)"},
        {OPT_STRING, 0, "max-body", 0, &f.max_body, 0, 0, "SIZE",
         "largest request (default 32M); larger ones get 413"},
        {OPT_INT, 0, "max-body-mb", 0, &f.body_mb, 1, 1024, "N", NULL},
        {OPT_STRING, 0, "max-buffered", 0, &f.max_buffered, 0, 0, "SIZE",
         "requests held at once (default 8 of the largest); beyond that 503"},
        {OPT_STRING, 0, "max-unsent", 0, &f.max_unsent, 0, 0, "SIZE",
         "answers kept for a client that does not read them (default 64M)"},
        {OPT_INT, 0, "store-mb", 0, &f.store_mb, 0, 65536, "N",
         "MB of responses kept for previous_response_id (default 64; 0 = none)"},
        {OPT_INT, 0, "max-connections", 0, &h->max_conns, 1, 65536, "N", "at once (default 1024)"},
        {OPT_INT, 0, "max-connections-per-address", 0, &h->max_conns_each, 1, 65536, "N",
         "of one address (default 7/8 of all; a proxy is one address)"},
        {OPT_INT, 0, "timeout", 0, &h->write_s, 1, 86400, "S",
         "drop a client that takes no data for so long (default 30)"},
        {OPT_INT, 0, "read-timeout", 0, &h->read_s, 1, 86400, "S",
         "for a request to arrive whole; large bodies get 1 s more for 32 kB (default 30)"},
        {OPT_INT, 0, "keep-alive", 0, &h->idle_s, 1, 86400, "S",
         "keep an idle connection for so long (default 75)"},
        {OPT_INT, 0, "sse-ping", 0, &f.srv.ping_s, 1, 3600, "S",
         "comment on a silent stream after so long (default 15)"},
        {OPT_INT, 0, "grace", 0, &f.srv.grace_s, 0, 86400, "S",
         "after SIGTERM let answers finish for so long (default 30)"},
        {OPT_STRING, 0, "log-format", 0, &f.log_format, 0, 0, "FMT", "text or json (default text)"},
        {OPT_STRING, 0, "log-level", 0, &f.log_level, 0, 0, "LEVEL",
         "debug, info, warn or error (default info)"},
        {OPT_STRING, 0, "metrics-compat", 0, &f.metrics, 0, 0, "STYLE",
         "names in /metrics: steel, vllm or llamacpp"},
        {OPT_HEADING, 0, "batching", 0, 0, 0, 0, 0, 0},
        {OPT_INT, 0, "max-num-seqs", "-np", &e->runtime.max_seqs, 1, 4096, "N",
         "answers generated at once (default 16; on a GPU as many as its cache holds, up to 256)"},
        {OPT_INT, 0, "parallel", 0, &e->runtime.max_seqs, 1, 4096, "N", NULL},
        {OPT_INT, 0, "max-queue", 0, &e->max_queue, 1, 1 << 20, "N",
         "requests that may wait before 429 (default 512)"},
        {OPT_INT, 0, "max-parallel-per-client", 0, &e->max_per_client, 1, 4096, "N",
         "answers of one API key, or address, at once (default: its fair share)"},
        {OPT_FLOAT, 0, "step-ms", 0, &f.step_ms, 0, 60000, "MS",
         "time a step may take while answers run (default: 3 decodes', at least 250)"},
        {OPT_INT, 'b', "batch-size", "max-num-batched-tokens", &e->runtime.max_tokens, 1, 1 << 20,
         "N", "most tokens in a step (default 512, on a GPU 2048)"},
        {OPT_STRING, 0, "kv-memory", 0, &f.kv_memory, 0, 0, "SIZE",
         "most memory for the KV cache (default: a quarter of what is free)"},
        {OPT_STRING, 0, "state-memory", 0, &f.state_memory, 0, 0, "SIZE",
         "memory for checkpoints of recurrent states (default: 2 a request, at most a quarter)"},
        {OPT_INT, 0, "kv-tokens", 0, &f.kv_tokens, 1, 1 << 30, "N",
         "size of the KV cache in tokens (default: as memory allows)"},
        {OPT_FLAG, 0, "no-prefix-cache", "no-enable-prefix-caching", &f.no_prefix_cache, 0, 0, 0,
         "forget prompts when their answers end"},
        {OPT_FLAG, 0, "enable-prefix-caching", 0, &f.ignored, 0, 0, 0, NULL},
        {OPT_FLAG, 0, "share-prefix-cache", 0, &f.srv.share_prefix_cache, 0, 0, 0,
         "share cached prompts among all API keys (default: within one key)"},
        {OPT_FLAG, 0, "cache-salt-by-key", 0, &f.ignored, 0, 0, 0, NULL},
        {OPT_HEADING, 0, "chat", 0, 0, 0, 0, 0, 0},
        {OPT_STRING, 0, "chat-template", "chat-template-file", &f.srv.chat_template, 0, 0, "FILE",
         "use this Jinja file instead of the model's template"},
        {OPT_STRING, 0, "chat-format", "tool-call-parser", &f.srv.chat_format, 0, 0, "NAME",
         "how tool calls and thinking are written (default: by the template)"},
        /* What others need to be told and is always so here. */
        {OPT_FLAG, 0, "jinja", 0, &f.ignored, 0, 0, 0, NULL},
        {OPT_FLAG, 0, "cont-batching", "-cb", &f.ignored, 0, 0, 0, NULL},
        {OPT_STRING, 0, "flash-attn", "-fa", &f.ignored_text, 0, 0, "X", NULL},
        {OPT_STRING, 0, "reasoning-parser", "reasoning-format", &f.ignored_text, 0, 0, "X", NULL},
        {OPT_INT, 0, "ubatch-size", "-ub", &e->runtime.max_tokens, 1, 1 << 20, "N", NULL},
        {OPT_FLAG, 0, "enable-auto-tool-choice", 0, &f.ignored, 0, 0, 0, NULL},
        {OPT_FLAG, 0, "metrics", 0, &f.ignored, 0, 0, 0, NULL},
        {OPT_HEADING, 0, "sampling, where a request does not say", 0, 0, 0, 0, 0, 0},
        {OPT_FLOAT, 0, "temp", "temperature", &s->temp, 0, 100, "T",
         "default: the model's, or 0.8"},
        {OPT_INT, 0, "top-k", 0, &s->top_k, 0, 1 << 28, "K",
         "0 = off; default: the model's, or 40"},
        {OPT_FLOAT, 0, "top-p", 0, &s->top_p, 0, 1, "P", "default: the model's, or 0.95"},
        {OPT_FLOAT, 0, "min-p", 0, &s->min_p, 0, 1, "P", "default: the model's, or 0.05"},
        {OPT_FLOAT, 0, "repeat-penalty", 0, &s->repeat_penalty, 0.01, 100, "X",
         "1 = off; default: the model's, or 1"},
        MODEL_FLAG_ROWS(f.model),
    };
    const struct usage u = {
        .command = "serve",
        .synopsis = "[MODEL] [options]",
        .about =
            "Serves a model over HTTP: OpenAI's chat, completions and Responses APIs, Anthropic's\n"
            "messages API, Ollama's API, /tokenize, /metrics, /health, and a chat page at /.",
        .examples = "  steel serve model.gguf\n"
                    "  steel serve model.gguf --host 0.0.0.0 --port 8000 --api-key secret -np 32\n"
                    "  curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\":\n"
                    "       [{\"role\":\"user\",\"content\":\"Hello\"}],\"stream\":true}'\n",
        .opts = opts,
        .n_opts = sizeof opts / sizeof *opts,
        .min_args = 0,
        .max_args = 1,
    };
    const char *pos[1];
    int n = args_parse(&u, argc, argv, pos);
    if (n < 0)
        return cli_args_exit(n);
    if (!cli_take_model(&u, &f.model_path, pos, &n, 0) || !finish_options(&u, &f))
        return EXIT_USAGE;
    struct error err = {0};
    struct buf keys = {0};
    int rc = EXIT_FAIL;
    f.srv.model = f.model_path;
    const char *asked = f.srv.model;
    if ((!f.key_file || read_keys(f.key_file, &keys, &f.keys, &err)) &&
        hub_resolve(&f.srv.model, &err) &&
        (!f.srv.embedding || hub_resolve(&f.srv.embedding, &err)) &&
        (!f.srv.rerank || hub_resolve(&f.srv.rerank, &err))) {
        if (f.srv.model != asked && !f.srv.alias)
            f.srv.alias = asked; /* the name that was asked for, not the file's */
        f.srv.keys = f.keys.items;
        f.srv.n_keys = f.keys.n;
        f.srv.origins = f.origins.items;
        f.srv.n_origins = f.origins.n;
        f.srv.hosts = f.hosts.items;
        f.srv.n_hosts = f.hosts.n;
        f.srv.page_origins = f.page_origins.items;
        f.srv.n_page_origins = f.page_origins.n;
        rc = server_run(&f.srv, &err);
    }
    if (rc == EXIT_FAIL)
        cli_fail(&err);
    buf_clear(&keys);
    return rc;
}
