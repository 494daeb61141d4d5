/*
 * GET and DELETE endpoints: kept responses, and the model in the format of Ollama's API. Runs on the
 * loop (prepare_ollama_show: on a worker) and never waits.
 */
#include "server/api/prepare_int.h"
#include "server/api/background.h"
#include "server/api/models_int.h"
#include "server/api/query.h"
#include "server/api/responses.h"
#include "server/api/store.h"
#include "base/clock.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <time.h>

/* Kept responses */

static const char RESPONSES[] = "/v1/responses/";

/* The id in a path: up to the next slash or the end. */
void response_path_id(struct http_exchange *x, char id[RESPONSE_ID_SIZE])
{
    const char *from = endpoint_path(http_request(x)) + strlen(RESPONSES);
    snprintf(id, RESPONSE_ID_SIZE, "%.*s", (int)strcspn(from, "/"), from);
}

void response_missing(struct server *s, struct http_exchange *x, const char *id)
{
    struct api_error err;
    api_fail(&err, 404, "invalid_request_error", "Response with id '%s' not found.", id);
    snprintf(err.param, sizeof err.param, "response_id");
    reply_error(x, s, &err, DIALECT_OPENAI);
}

bool response_look_up(struct server *s, struct http_exchange *x, const char *id,
                      enum store_part part, struct buf *out)
{
    char *owner = access_owner(&s->opt.access, x);
    bool found = !strncmp(id, "resp_", 5) && store_get(s->store, id, owner, part, out);
    mem_free(owner);
    return found;
}

void get_response(struct server *s, struct http_exchange *x)
{
    char id[RESPONSE_ID_SIZE];
    struct buf b = {0};
    struct api_error err;
    bool stream = false;
    response_path_id(x, id);
    if (!query_bool(http_request(x)->query, "stream", &stream, &err)) {
        reply_error(x, s, &err, DIALECT_OPENAI);
        return;
    }
    if (stream) {
        background_stream(s, x, id);
        return;
    }
    struct api_request *running = background_find(s, x, id);
    if (running)
        responses_add_now(running, &b);
    if (running || response_look_up(s, x, id, STORE_REPLY, &b))
        reply_json(x, s, 200, &b);
    else
        response_missing(s, x, id);
    buf_clear(&b);
}

void get_response_items(struct server *s, struct http_exchange *x)
{
    char id[RESPONSE_ID_SIZE];
    struct page_query page;
    struct api_error err;
    struct buf b = {0};
    response_path_id(x, id);
    if (!query_page(http_request(x)->query, &page, &err)) {
        reply_error(x, s, &err, DIALECT_OPENAI);
        return;
    }
    const struct api_request *running = background_find(s, x, id);
    char *owner = access_owner(&s->opt.access, x);
    enum store_result r =
        running ? kept_items_page(&running->responses->input, &page, &b) ? STORE_OK : STORE_NO_ITEM
        : strncmp(id, "resp_", 5) ? STORE_NO_ENTRY
                                  : store_page(s->store, id, owner, &page, &b);
    mem_free(owner);
    if (r == STORE_OK) {
        reply_json(x, s, 200, &b);
    } else if (r == STORE_NO_ITEM) {
        api_fail(&err, 404, "invalid_request_error", "Item with id '%s' not found.", page.after);
        snprintf(err.param, sizeof err.param, "after");
        reply_error(x, s, &err, DIALECT_OPENAI);
    } else {
        response_missing(s, x, id);
    }
    buf_clear(&b);
}

void delete_response(struct server *s, struct http_exchange *x)
{
    char *owner = access_owner(&s->opt.access, x);
    char id[RESPONSE_ID_SIZE];
    struct buf b = {0};
    response_path_id(x, id);
    struct api_request *running = background_find(s, x, id);
    if (running)
        background_cancel(running, false);
    if (running || (!strncmp(id, "resp_", 5) && store_delete(s->store, id, owner))) {
        buf_adds(&b, "{\"id\":");
        jsonout_text(&b, id);
        buf_adds(&b, ",\"object\":\"response\",\"deleted\":true}");
        reply_json(x, s, 200, &b);
    } else {
        response_missing(s, x, id);
    }
    mem_free(owner);
    buf_clear(&b);
}

/* Ollama */

/* The version whose API is implemented. Clients refuse older ones. */
static const char OLLAMA_VERSION[] = "0.13.4";

static void add_date(struct buf *b, const char *name, int64_t when)
{
    struct tm tm;
    char date[32];
    time_t t = (time_t)when;
    gmtime_r(&t, &tm);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &tm);
    buf_addf(b, ",\"%s\":\"%s\"", name, date);
}

/* "6.7M", "30.5B" */
static void add_count(struct buf *b, double n)
{
    static const char units[] = "KMBT";
    int u = -1;
    for (; n >= 1000 && u < 3; u++)
        n /= 1000;
    if (u < 0)
        buf_addf(b, "\"%.0f\"", n);
    else
        buf_addf(b, "\"%.1f%c\"", n, units[u]);
}

static void add_details(const struct loaded *l, struct buf *b)
{
    struct engine_info m = loaded_info(l);
    buf_addf(b, "\"details\":{\"parent_model\":\"\",\"format\":\"%s\",\"family\":",
             m.is_gguf ? "gguf" : "safetensors");
    jsonout_text(b, m.architecture);
    buf_adds(b, ",\"families\":[");
    jsonout_text(b, m.architecture);
    buf_adds(b, "],\"parameter_size\":");
    add_count(b, (double)m.n_params);
    /* Bits per weight, since files mix types. */
    buf_addf(b, ",\"quantization_level\":\"%.2f bpw\"}",
             8.0 * (double)m.weight_bytes / (double)m.n_params);
}

/* Under the lock. */
static void add_model(const struct server *s, const struct model_entry *e, struct buf *b)
{
    const char *dot = strrchr(e->src.path ? e->src.path : "", '.');
    size_t bytes = e->loaded ? loaded_info(e->loaded).weight_bytes : e->facts.file_bytes;
    buf_adds(b, "{\"name\":");
    jsonout_text(b, e->name);
    buf_adds(b, ",\"model\":");
    jsonout_text(b, e->name);
    add_date(b, "modified_at", e->added);
    buf_addf(b, ",\"size\":%zu,\"digest\":\"%016llx\",", bytes, (unsigned long long)s->id_secret);
    if (e->loaded)
        add_details(e->loaded, b);
    else
        buf_addf(b, "\"details\":{\"parent_model\":\"\",\"format\":\"%s\"}",
                 dot && !strcasecmp(dot, ".gguf") ? "gguf" : "safetensors");
}

static bool reply_if_loading(struct server *s, struct http_exchange *x)
{
    struct api_error err;
    if (s->ready)
        return false;
    api_fail(&err, 503, "unavailable_error", "the model is loading");
    reply_error(x, s, &err, DIALECT_OLLAMA);
    return true;
}

void get_ollama_tags(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    if (reply_if_loading(s, x))
        return;
    buf_adds(&b, "{\"models\":[");
    pthread_mutex_lock(&s->models->lock);
    for (int i = 0, n = 0; i < s->models->n; i++) {
        const struct model_entry *e = s->models->entries[i];
        if (e->hidden)
            continue;
        if (n++)
            buf_addc(&b, ',');
        add_model(s, e, &b);
        buf_addc(&b, '}');
    }
    pthread_mutex_unlock(&s->models->lock);
    buf_adds(&b, "]}");
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}

void get_ollama_ps(struct server *s, struct http_exchange *x)
{
    static const int64_t never = 4102444800; /* 2100 */
    struct buf b = {0};
    if (reply_if_loading(s, x))
        return;
    buf_adds(&b, "{\"models\":[");
    pthread_mutex_lock(&s->models->lock);
    for (int i = 0, n = 0; i < s->models->n; i++) {
        const struct model_entry *e = s->models->entries[i];
        const struct loaded *l = e->loaded;
        if (!l)
            continue;
        if (n++)
            buf_addc(&b, ',');
        add_model(s, e, &b);
        int64_t left_ns = e->keep_ns - (clock_ns() - e->used_ns);
        add_date(&b, "expires_at",
                 e->keep_ns < 0 || e->src.pinned ? never : time(NULL) + left_ns / 1000000000);
        buf_addf(&b, ",\"size_vram\":%zu,\"context_length\":%d}", loaded_info(l).device_bytes,
                 l->engine ? engine_context(l->engine) : embedder_context(l->embedder));
    }
    pthread_mutex_unlock(&s->models->lock);
    buf_adds(&b, "]}");
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}

void get_ollama_version(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    buf_addf(&b, "{\"version\":\"%s\"}", OLLAMA_VERSION);
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}

void add_capabilities(const struct loaded *l, struct buf *b)
{
    buf_addf(b, "[\"%s\"", model_task_word(l->entry->src.task));
    if (l->chat && chat_caps(l->chat)->tools)
        buf_adds(b, ",\"tools\"");
    if (l->chat && chat_caps(l->chat)->reasoning_key)
        buf_adds(b, ",\"thinking\"");
    if (l->engine && engine_encoder(l->engine))
        buf_adds(b, ",\"vision\"");
    buf_adds(b, "]");
}

void add_file_capabilities(const struct model_entry *e, struct buf *b)
{
    buf_addf(b, "[\"%s\"%s%s%s]", model_task_word(e->src.task), e->facts.tools ? ",\"tools\"" : "",
             e->facts.thinking ? ",\"thinking\"" : "", e->facts.vision ? ",\"vision\"" : "");
}

/* The Modelfile of a model that has one, and its parts. */
static void add_made(const struct modelfile *f, struct buf *b)
{
    struct buf whole = {0}, parameters = {0};
    struct modelfile options = {.options = f->options};
    modelfile_print(f, &whole);
    modelfile_print(&options, &parameters);
    buf_adds(b, "{\"modelfile\":");
    jsonout_text(b, whole.p ? whole.p : "");
    buf_adds(b, ",\"parameters\":");
    jsonout_text(b, parameters.p ? parameters.p : "");
    buf_adds(b, ",\"system\":");
    jsonout_text(b, f->system ? f->system : "");
    buf_addc(b, ',');
    buf_clear(&whole);
    buf_clear(&parameters);
}

bool prepare_ollama_show(struct api_request *req, const json_t *body)
{
    (void)body;
    const struct loaded *l = req->loaded;
    struct engine_info m = loaded_info(l);
    struct buf *b = &req->reply;
    add_made(&l->entry->made, b);
    buf_adds(b, "\"license\":\"\",\"template\":");
    jsonout_text(b, l->chat_source.template ? l->chat_source.template : "");
    buf_addc(b, ',');
    add_details(l, b);
    buf_adds(b, ",\"model_info\":{\"general.architecture\":");
    jsonout_text(b, m.architecture);
    buf_addf(b, ",\"general.parameter_count\":%lld", (long long)m.n_params);
    const struct {
        const char *name;
        int value;
    } facts[] = {{"context_length", m.context_trained},
                 {"embedding_length", m.n_embd},
                 {"block_count", m.n_layers},
                 {"vocab_size", m.n_vocab}};
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++)
        buf_addf(b, ",\"%s.%s\":%d", m.architecture, facts[i].name, facts[i].value);
    buf_adds(b, "},\"capabilities\":");
    add_capabilities(l, b);
    add_date(b, "modified_at", l->entry->added);
    buf_addc(b, '}');
    return true;
}
