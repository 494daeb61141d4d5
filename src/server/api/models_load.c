/*
 * The loader: one thread that opens models and closes those without references. It closes before it opens, so that
 * the memory of one is back before the next is sized. Models of the options' `at_start` come first, in order.
 */
#include "base/clock.h"
#include "base/mem.h"
#include "base/os.h"
#include "base/sysmem.h"
#include "sample/sample_advice.h"
#include "server/api/models_int.h"
#include "server/api/server_int.h"
#include "server/api/slots.h"

#include <string.h>
#include <unistd.h>

enum { SCORED_ROWS = 64 }; /* rows per step for log-probabilities of prompts */
enum { LEAST_CACHE = 1 << 20 };
enum { FLUSH_MS = 10000 }; /* for prefixes that are not on disk yet when their model is unloaded */

void models_poke(struct models *m)
{
    os_wake(m->server->jobs_fd);
}

void model_refuse_failed(struct api_error *err, const struct model_entry *e)
{
    api_fail(err, 503, "unavailable_error",
             "the model '%.100s' cannot be loaded; the server's log says why", e->name);
}

/* The options of an engine that may take `most` bytes of the host's memory. */
static struct engine_options fit_options(const struct models *m, const struct model_entry *e,
                                         size_t most)
{
    struct engine_options o = e->src.engine;
    size_t file = e->facts.file_bytes, least = LEAST_CACHE;
    o.runtime.min_out = SCORED_ROWS;
    if (o.runtime.kv_bytes_host && m->n_loaded > 1) { /* what is free now, not at the start */
        size_t quarter = sysmem_available("") / 4;
        o.runtime.kv_bytes = quarter && quarter < o.runtime.kv_bytes ? quarter : o.runtime.kv_bytes;
    }
    if (most) {
        size_t left = most > file + least ? most - file : least;
        o.runtime.kv_bytes = left < o.runtime.kv_bytes ? left : o.runtime.kv_bytes;
    }
    return o;
}

static bool open_text(struct models *m, struct loaded *l, size_t most, struct error *err)
{
    const struct model_source *src = &l->entry->src;
    struct engine_options o = fit_options(m, l->entry, most);
    o.keep.name = l->entry->name;
    struct engine *e = engine_open(src->path, &o);
    pthread_mutex_lock(&m->lock);
    m->opening = e;
    pthread_mutex_unlock(&m->lock);
    enum engine_state state;
    bool quit = false;
    while ((state = engine_state(e, NULL, err)) == ENGINE_LOADING && !quit) {
        engine_wait_ms(e, 100);
        pthread_mutex_lock(&m->lock);
        quit = m->quit;
        pthread_mutex_unlock(&m->lock);
    }
    pthread_mutex_lock(&m->lock);
    m->opening = NULL;
    pthread_mutex_unlock(&m->lock);
    if (state != ENGINE_READY) {
        engine_close(e);
        return state == ENGINE_FAILED ? false : error_set(err, "the server is shutting down");
    }
    l->engine = e;
    if (model_template(src, engine_file(e), &l->chat_source, &l->chat_error))
        l->chat = chat_new(&l->chat_source, &l->chat_error);
    struct engine_info i = engine_info(e);
    l->slots = slots_new(i.max_seqs, m->server->opt.slot_save_path != NULL);
    sample_params_advise(&l->sample, engine_file(e));
    l->on_gpu = i.device_bytes > 0;
    l->host_bytes = l->on_gpu ? 0 : i.host_bytes + i.kv_bytes;
    return true;
}

static bool open_embedder(struct loaded *l, struct error *err)
{
    const struct model_source *src = &l->entry->src;
    struct embed_options o = {.pooling = -1, .normalize = -1, .rank = src->task == MODEL_RERANK};
    o.runtime.backend = src->engine.runtime.backend;
    l->embedder = embedder_open(src->path, &o, err);
    if (!l->embedder)
        return false;
    struct engine_info i = embedder_info(l->embedder);
    l->on_gpu = i.device_bytes > 0;
    l->host_bytes = l->on_gpu ? 0 : i.host_bytes + i.kv_bytes;
    return true;
}

void loaded_log(const struct loaded *l)
{
    const char *name = l->entry->name;
    if (l->embedder) {
        log_line(LOG_INFO, l->entry->src.task == MODEL_RERANK ? "rerank model" : "embedding model",
                 LOG_TEXT("model", name), LOG_TEXT("device", embedder_info(l->embedder).device),
                 LOG_NUM("width", embedder_width(l->embedder)),
                 LOG_NUM("context", embedder_context(l->embedder)));
        return;
    }
    struct engine_info m = engine_info(l->engine);
    log_line(LOG_INFO, l->entry->src.at_start ? "ready" : "loaded", LOG_TEXT("model", name),
             LOG_TEXT("device", m.device), LOG_NUM("load_s", m.load_s),
             LOG_NUM("context", engine_context(l->engine)), LOG_NUM("sequences", m.max_seqs),
             LOG_NUM("kv_pages", m.n_pages), LOG_NUM("kv_mb", (double)m.kv_bytes / 1e6),
             LOG_NUM("weights_mb", (double)m.weight_bytes / 1e6));
    if (m.notice[0])
        log_line(LOG_WARN, "device", LOG_TEXT("why", m.notice));
    if (!l->chat)
        log_line(LOG_WARN, "no chat template", LOG_TEXT("why", l->chat_error.msg));
}

static void free_loaded(struct loaded *l)
{
    engine_close(l->engine);
    embedder_close(l->embedder);
    chat_free(l->chat);
    chat_source_clear(&l->chat_source);
    slots_free(l->slots);
    mem_free(l);
}

static struct loaded *open_model(struct models *m, struct model_entry *e, size_t most,
                                 struct error *err)
{
    struct loaded *l = mem_zalloc(1, sizeof *l);
    l->entry = e;
    l->refs = 1;
    l->sample = e->src.sample;
    if (e->src.task == MODEL_TEXT ? open_text(m, l, most, err) : open_embedder(l, err))
        return l;
    free_loaded(l);
    return NULL;
}

/* Takes l from the list of all; under the lock. */
static void forget(struct models *m, struct loaded *l)
{
    struct loaded **at = &m->all;
    while (*at != l)
        at = &(*at)->next_all;
    *at = l->next_all;
}

/* Closes one model that has no references. Called with the lock held; releases it while it works. */
static void close_one(struct models *m)
{
    struct loaded *l = m->closing;
    m->closing = l->next;
    forget(m, l);
    size_t bytes = l->host_bytes;
    pthread_mutex_unlock(&m->lock);
    engine_flush(l->engine, FLUSH_MS);
    free_loaded(l);
    pthread_mutex_lock(&m->lock);
    m->bytes -= bytes;
    m->n_loaded--;
    m->n_closing--;
}

static void open_one(struct models *m)
{
    struct model_entry *e = m->job;
    struct error err = {0};
    size_t most = m->job_bytes;
    pthread_mutex_unlock(&m->lock);
    struct loaded *l = open_model(m, e, most, &err);
    pthread_mutex_lock(&m->lock);
    m->opened = l;
    m->job_error = err;
    m->job_done = true;
}

static void *loader_main(void *arg)
{
    struct models *m = arg;
    os_name_thread("steel-loader");
    pthread_mutex_lock(&m->lock);
    while (!m->quit) {
        if (m->closing)
            close_one(m);
        else if (m->job && !m->job_done)
            open_one(m);
        else {
            pthread_cond_wait(&m->changed, &m->lock);
            continue;
        }
        models_poke(m);
    }
    pthread_mutex_unlock(&m->lock);
    return NULL;
}

bool models_start(struct models *m, struct error *err)
{
    bool any = false;
    for (int i = 0; i < m->n; i++) {
        /* Helpers first: what they take is known when the cache of the text model is sized. */
        struct model_entry *e = m->entries[i];
        if (!e->src.at_start)
            continue;
        e->state = MODEL_WANTED;
        e->wanted_ns = e->src.task == MODEL_TEXT ? 2 : 1;
        any = true;
    }
    int rc = pthread_create(&m->thread, NULL, loader_main, m);
    if (rc)
        return error_set(err, "cannot start the loader's thread: %s", strerror(rc));
    m->has_thread = true;
    if (!any) {
        m->server->ready = true;
        log_line(LOG_INFO, "ready", LOG_NUM("models", m->n));
    }
    models_poke(m);
    return true;
}

void models_flush(struct models *m, int ms)
{
    int64_t until = clock_ns() + (int64_t)ms * 1000000;
    for (struct loaded *l = m->all; l; l = l->next_all) {
        int64_t left = (until - clock_ns()) / 1000000;
        engine_flush(l->engine, left > 0 ? (int)left : 0);
    }
}

void models_stop(struct models *m)
{
    pthread_mutex_lock(&m->lock);
    m->quit = true;
    pthread_cond_broadcast(&m->changed);
    pthread_mutex_unlock(&m->lock);
    if (m->has_thread)
        pthread_join(m->thread, NULL);
    m->has_thread = false;
    if (m->job_done && m->opened) { /* nobody has taken it */
        m->opened->next_all = m->all;
        m->all = m->opened;
    }
    m->opened = NULL;
    for (struct loaded *l = m->all; l; l = l->next_all) {
        embedder_close(l->embedder);
        l->embedder = NULL;
    }
}

void models_end(struct models *m)
{
    for (struct loaded *l = m->all; l; l = l->next_all) {
        engine_close(l->engine);
        l->engine = NULL;
    }
}

void models_free(struct models *m)
{
    if (!m)
        return;
    for (struct loaded *l = m->all, *next; l; l = next) {
        next = l->next_all;
        free_loaded(l);
    }
    for (int i = 0; i < m->n; i++)
        model_entry_free(m->entries[i]);
    mem_free(m->entries);
    pthread_mutex_destroy(&m->lock);
    pthread_mutex_destroy(&m->scan_lock);
    pthread_mutex_destroy(&m->change_lock);
    pthread_cond_destroy(&m->changed);
    mem_free(m);
}
