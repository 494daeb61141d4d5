/* Descriptions of models: /v1/models, and Ollama's lists (lookup.c). */
#include "server/api/lora_endpoints.h"
#include "server/api/models_int.h"
#include "server/api/server_int.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

struct engine_info loaded_info(const struct loaded *l)
{
    return l->engine ? engine_info(l->engine) : embedder_info(l->embedder);
}

/* Defaults of requests. */
static void add_defaults(const struct sample_params *p, struct buf *b)
{
    const struct {
        const char *name;
        double value;
    } defaults[] = {
        {"temperature", (double)p->temp},
        {"top_p", (double)p->top_p},
        {"top_k", p->top_k},
        {"min_p", (double)p->min_p},
        {"repetition_penalty", (double)p->repeat_penalty},
        {"repeat_last_n", p->repeat_last_n},
        {"presence_penalty", (double)p->presence_penalty},
        {"frequency_penalty", (double)p->frequency_penalty},
        {"typical_p", (double)p->typical_p},
        {"top_n_sigma", (double)p->top_n_sigma},
        {"xtc_probability", (double)p->xtc_probability},
        {"xtc_threshold", (double)p->xtc_threshold},
        {"dynatemp_range", (double)p->dynatemp_range},
        {"dynatemp_exponent", (double)p->dynatemp_exponent},
        {"mirostat", p->mirostat},
        {"mirostat_tau", (double)p->mirostat_tau},
        {"mirostat_eta", (double)p->mirostat_eta},
        {"dry_multiplier", (double)p->dry_multiplier},
        {"dry_base", (double)p->dry_base},
        {"dry_allowed_length", p->dry_allowed_length},
        {"dry_penalty_last_n", p->dry_last_n},
    };
    for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++)
        buf_addf(b, "%s\"%s\":%.6g", i ? "," : "", defaults[i].name, defaults[i].value);
}

/* The words of reasoning_effort that the template knows. Without any, other words only turn thinking on. */
static void add_efforts(const struct loaded *l, struct buf *b)
{
    const char *words[8];
    int n = l->chat ? chat_own_efforts(l->chat, words, 8) : 0;
    buf_adds(b, ",\"reasoning_efforts\":[");
    for (int i = 0; i < n; i++)
        buf_addf(b, "%s\"%s\"", i ? "," : "", words[i]);
    buf_addc(b, ']');
}

static void add_state(const struct models *m, const struct model_entry *e, struct buf *b)
{
    static const char *const words[] = {"unloaded", "loading", "loading", "loaded"};
    bool failed = e->state == MODEL_IDLE && e->failed_ns;
    buf_addf(b, ",\"status\":{\"value\":\"%s\"", failed ? "failed" : words[e->state]);
    if (e->state == MODEL_WANTED || e->state == MODEL_LOADING)
        buf_addf(b, ",\"progress\":%.2f", models_percent(m, e) / 100.0);
    buf_addf(b, ",\"pinned\":%s", e->src.pinned ? "true" : "false");
    if (e->loaded) {
        buf_adds(b, ",\"device\":");
        jsonout_text(b, loaded_info(e->loaded).device);
    }
    buf_addc(b, '}');
}

static void add_text_model(const struct loaded *l, struct buf *b)
{
    struct engine_info m = engine_info(l->engine);
    int context = engine_context(l->engine);
    buf_addf(b,
             ",\"parent\":null,\"max_model_len\":%d,\"meta\":{\"n_vocab\":%d,\"n_ctx\":%d,"
             "\"n_ctx_train\":%d,\"n_embd\":%d,\"n_params\":%lld,\"size\":%zu}",
             context, m.n_vocab, context, m.context_trained, m.n_embd, (long long)m.n_params,
             m.weight_bytes);
    buf_adds(b, ",\"default_sampling\":{");
    add_defaults(&l->sample, b);
    buf_addc(b, '}');
    add_efforts(l, b);
    buf_adds(b, ",\"capabilities\":");
    add_capabilities(l, b);
}

static void add_helper(const struct loaded *l, struct buf *b)
{
    struct engine_info m = embedder_info(l->embedder);
    buf_addf(b,
             ",\"parent\":null,\"max_model_len\":%d,\"meta\":{\"n_vocab\":%d,\"n_embd\":%d,"
             "\"n_params\":%lld,\"size\":%zu},\"capabilities\":[\"%s\"]",
             embedder_context(l->embedder), m.n_vocab, m.n_embd, (long long)m.n_params,
             m.weight_bytes, model_task_word(l->entry->src.task));
}

const char *model_task_word(enum model_task task)
{
    return task == MODEL_TEXT ? "completion" : task == MODEL_EMBED ? "embedding" : "rerank";
}

/* A model that is not in memory. */
static void add_file(const struct model_entry *e, struct buf *b)
{
    const struct model_facts *f = &e->facts;
    buf_addf(b,
             ",\"parent\":null,\"meta\":{\"n_vocab\":%d,\"n_ctx_train\":%d,\"n_embd\":%d,"
             "\"size\":%zu},\"capabilities\":",
             f->n_vocab, f->context, f->n_embd, f->file_bytes);
    add_file_capabilities(e, b);
}

/* Under the lock. */
static void add_entry(const struct models *m, const struct model_entry *e, struct buf *b)
{
    const struct loaded *l = e->loaded;
    char date[32];
    struct tm tm;
    time_t t = (time_t)e->added;
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&t, &tm));
    buf_adds(b, "{\"id\":");
    jsonout_text(b, e->name);
    /* Read by Anthropic's clients. */
    buf_adds(b, ",\"type\":\"model\",\"display_name\":");
    jsonout_text(b, e->name);
    buf_addf(b, ",\"created_at\":\"%s\"", date);
    buf_addf(b, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"steel\",\"root\":",
             (long long)e->added);
    jsonout_text(b, e->src.path);
    for (int i = 0; i < e->src.n_aliases; i++) {
        buf_adds(b, i ? "," : ",\"aliases\":[");
        jsonout_text(b, e->src.aliases[i]);
    }
    if (e->src.n_aliases)
        buf_addc(b, ']');
    add_state(m, e, b);
    if (l && l->engine)
        add_text_model(l, b);
    else if (l)
        add_helper(l, b);
    else
        add_file(e, b);
    buf_addc(b, '}');
}

struct loaded *models_shown_or_reply(struct server *s, struct http_exchange *x)
{
    struct loaded *l = models_shown(s, x);
    struct api_error err;
    if (l && s->ready)
        return l;
    if (!s->ready)
        api_fail(&err, 503, "unavailable_error", "the model is loading");
    else
        api_fail(&err, 503, "unavailable_error",
                 "no model is loaded; name one that is with ?model=NAME");
    reply_error(x, s, &err, endpoint_dialect(http_request(x)));
    return NULL;
}

void get_models(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    struct models *m = s->models;
    const struct model_entry *first = NULL, *last = NULL;
    if (reply_if_not_ready(s, x))
        return;
    buf_adds(&b, "{\"object\":\"list\",\"data\":[");
    pthread_mutex_lock(&m->lock);
    for (int i = 0; i < m->n; i++) {
        const struct model_entry *e = m->entries[i];
        if (e->hidden)
            continue;
        if (first)
            buf_addc(&b, ',');
        first = first ? first : e;
        last = e;
        add_entry(m, e, &b);
        if (e->loaded)
            lora_add_models(e->loaded, &b);
    }
    buf_adds(&b, "],\"has_more\":false,\"first_id\":");
    jsonout_text(&b, first ? first->name : NULL);
    buf_adds(&b, ",\"last_id\":");
    jsonout_text(&b, last ? last->name : NULL);
    buf_addc(&b, '}');
    pthread_mutex_unlock(&m->lock);
    reply_json(x, s, 200, &b);
    buf_clear(&b);
}

void get_model(struct server *s, struct http_exchange *x)
{
    const char *id = strrchr(http_request(x)->path, '/') + 1;
    const char *full = endpoint_path(http_request(x)) + strlen("/v1/models/");
    const char *const names[] = {full, id};
    struct models *m = s->models;
    struct buf b = {0};
    if (reply_if_not_ready(s, x))
        return;
    pthread_mutex_lock(&m->lock);
    for (int i = 0; i < 2 && !b.len; i++) {
        const struct model_entry *e = models_find(m, names[i]);
        if (e && e->loaded && lora_add_model(e->loaded, names[i], &b))
            ;
        else if (e && model_has_name(e, names[i]))
            add_entry(m, e, &b);
    }
    pthread_mutex_unlock(&m->lock);
    if (b.len) {
        reply_json(x, s, 200, &b);
    } else {
        struct api_error err;
        api_fail(&err, 404, "not_found_error", "the model '%.100s' does not exist", full);
        err.code = "model_not_found";
        snprintf(err.param, sizeof err.param, "model");
        reply_error(x, s, &err, endpoint_dialect(http_request(x)));
    }
    buf_clear(&b);
}
