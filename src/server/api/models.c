/* Which model a request gets, and which models are in memory. See the invariants in models.h. */
#include "server/api/models.h"
#include "base/clock.h"
#include "base/duration.h"
#include "base/mem.h"
#include "base/sysmem.h"
#include "backend/devices.h"
#include "dist/job.h"
#include "engine/device.h"
#include "server/api/embeddings.h"
#include "server/api/lora_endpoints.h"
#include "server/api/models_int.h"
#include "server/api/models_made.h"
#include "server/api/ollama.h"
#include "server/api/prepare_int.h"
#include "server/api/query.h"
#include "server/api/server_int.h"

#include <event2/event.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { SCAN_AFTER_S = 2 }; /* an unknown name starts a scan if the last one is at least this old */
static const int64_t SECOND = 1000000000;

/* Entries */

/* Whether it is NAME, or NAME:latest as Ollama's clients say. */
static bool is_name(const char *asked, const char *name)
{
    size_t n = strlen(name);
    return n && !strncmp(asked, name, n) && (!asked[n] || !strcmp(asked + n, ":latest"));
}

bool model_has_name(const struct model_entry *e, const char *asked)
{
    if (e->hidden)
        return false;
    if (is_name(asked, e->name))
        return true;
    for (int i = 0; i < e->src.n_aliases; i++)
        if (is_name(asked, e->src.aliases[i]))
            return true;
    return false;
}

/* Whether the name is BASE:ADAPTER with this base, or the name of one of the model's adapters. */
static bool has_adapter(const struct model_entry *e, const char *asked)
{
    const struct runtime_options *o = &e->src.engine.runtime;
    size_t n = strlen(e->name);
    struct adapter_info info;
    if (e->hidden || e->src.task != MODEL_TEXT)
        return false;
    if (!strncmp(asked, e->name, n) && asked[n] == ':')
        return true;
    for (int i = 0; i < o->n_loras; i++)
        if (o->loras[i].name[0] && !strcmp(asked, o->loras[i].name))
            return true;
    return e->loaded && engine_adapters(e->loaded->engine) &&
           adapters_find(engine_adapters(e->loaded->engine), asked, &info);
}

struct model_entry *models_find(struct models *m, const char *name)
{
    for (int i = 0; i < m->n; i++)
        if (model_has_name(m->entries[i], name))
            return m->entries[i];
    for (int i = 0; i < m->n; i++)
        if (has_adapter(m->entries[i], name))
            return m->entries[i];
    return NULL;
}

/* The only model for a task; NULL if there are several, or none. n: their number. */
static struct model_entry *only_one(const struct models *m, enum model_task task, int *n)
{
    struct model_entry *found = NULL;
    *n = 0;
    for (int i = 0; i < m->n; i++)
        if (!m->entries[i]->hidden && m->entries[i]->src.task == task) {
            found = found ? found : m->entries[i];
            ++*n;
        }
    return *n == 1 ? found : NULL;
}

static bool is_named(const struct models *m, enum model_task task, const char *name)
{
    for (int i = 0; i < m->n; i++)
        if (!m->entries[i]->hidden && m->entries[i]->src.task == task &&
            !strcmp(m->entries[i]->name, name))
            return true;
    return false;
}

void model_entry_free(struct model_entry *e)
{
    for (int k = 0; k < e->src.n_aliases; k++)
        mem_free((char *)(uintptr_t)e->src.aliases[k]);
    mem_free((void *)(uintptr_t)e->src.aliases);
    mem_free((char *)(uintptr_t)e->src.path);
    mem_free((char *)(uintptr_t)e->src.modelfile);
    modelfile_clear(&e->made);
    gen_params_clear(&e->own);
    mem_free(e);
}

/* Reads the file's headers, unless the model is loaded at once anyway. */
static struct model_entry *entry_new(struct models *m, const struct model_source *src)
{
    struct model_entry *e = mem_zalloc(1, sizeof *e);
    if (src->name)
        snprintf(e->name, sizeof e->name, "%s", src->name);
    else
        server_name_of(src->path ? src->path : "steel-demo", e->name, sizeof e->name);
    e->src = *src;
    e->src.path = src->path ? mem_strdup(src->path) : NULL;
    e->src.modelfile = src->modelfile ? mem_strdup(src->modelfile) : NULL;
    if (src->modelfile && !models_make_entry(m, e, &e->facts.error))
        e->facts.file_bytes = model_file_bytes(src->modelfile);
    else if (src->at_start && src->task != MODEL_BY_FILE)
        e->facts = (struct model_facts){
            .known = true, .task = src->task, .file_bytes = model_file_bytes(src->path)};
    else
        model_probe(&e->src, &e->facts);
    e->src.task = e->facts.task;
    e->src.name = NULL;
    char **aliases = mem_zalloc((size_t)src->n_aliases + 1, sizeof *aliases);
    for (int i = 0; i < src->n_aliases; i++)
        aliases[i] = mem_strdup(src->aliases[i]);
    e->src.aliases = (const char *const *)aliases;
    e->keep_ns = src->keep_s < 0 ? -1 : src->keep_s * SECOND;
    e->added = time(NULL);
    return e;
}

static void insert(struct models *m, struct model_entry *e)
{
    for (int i = 0; i < m->server->opt.n_pins; i++)
        e->src.pinned |= model_has_name(e, m->server->opt.pins[i]);
    m->entries = mem_realloc(m->entries, (size_t)m->n + 1, sizeof(struct model_entry *));
    m->entries[m->n++] = e;
}

struct model_entry *models_add(struct models *m, const struct model_source *src, struct error *err)
{
    struct model_entry *e = entry_new(m, src);
    pthread_mutex_lock(&m->lock);
    bool ok = e->facts.known;
    if (!ok)
        *err = e->facts.error;
    else if (is_named(m, e->src.task, e->name))
        ok = error_set(err, "two models have the name %.100s; name one of them", e->name);
    if (ok)
        insert(m, e);
    pthread_mutex_unlock(&m->lock);
    if (ok)
        return e;
    model_entry_free(e);
    return NULL;
}

/* The file by which a scan finds a model. */
static const char *file_of(const struct model_source *src)
{
    return src->modelfile ? src->modelfile : src->path;
}

static bool is_same(const struct model_source *a, const struct model_source *b)
{
    const char *x = file_of(a), *y = file_of(b);
    return x && y && !strcmp(x, y);
}

/* Takes a file that a scan has found: a new model, a known one, or a file known to be no model. */
static void on_found(void *to, const struct model_source *src)
{
    struct models *m = to;
    size_t bytes = model_file_bytes(file_of(src));
    bool known = false;
    pthread_mutex_lock(&m->lock);
    for (int i = 0; i < m->n && !known; i++) {
        const struct model_entry *e = m->entries[i];
        bool same = is_same(&e->src, src);
        if (!e->stale)
            known = e->facts.known ? !e->hidden && (same || model_has_name(e, src->name))
                                   : same && e->facts.file_bytes == bytes;
    }
    pthread_mutex_unlock(&m->lock);
    if (known)
        return;
    struct model_entry *e = entry_new(m, src);
    e->hidden = !e->facts.known;
    pthread_mutex_lock(&m->lock);
    for (int i = 0; i < m->n; i++)
        m->entries[i]->hidden |= m->entries[i]->stale && is_same(&m->entries[i]->src, src);
    insert(m, e);
    pthread_mutex_unlock(&m->lock);
    if (e->hidden)
        log_line(LOG_WARN, "not served", LOG_TEXT("model", src->name),
                 LOG_TEXT("why", e->facts.error.msg));
}

/* Models whose files are gone are hidden, and new ones are added. */
void models_scan(struct models *m)
{
    if (!m->server->opt.scan)
        return;
    pthread_mutex_lock(&m->scan_lock);
    pthread_mutex_lock(&m->lock);
    for (int i = 0; i < m->n; i++) {
        struct model_entry *e = m->entries[i];
        e->hidden |= e->src.found && !e->loaded &&
                     (access(file_of(&e->src), F_OK) != 0 ||
                      (e->src.path && access(e->src.path, F_OK) != 0));
    }
    pthread_mutex_unlock(&m->lock);
    m->server->opt.scan(m->server->opt.scan_arg, on_found, m);
    pthread_mutex_lock(&m->lock);
    m->scanned_ns = clock_ns();
    m->scanning = false;
    pthread_mutex_unlock(&m->lock);
    pthread_mutex_unlock(&m->scan_lock);
}

/* Scans again unless the last scan is recent. False: it is. */
static bool scan_again(struct models *m)
{
    pthread_mutex_lock(&m->lock);
    bool due =
        m->server->opt.scan && !m->scanning && clock_ns() - m->scanned_ns > SCAN_AFTER_S * SECOND;
    m->scanning |= due;
    pthread_mutex_unlock(&m->lock);
    if (!due)
        return false;
    struct mem_job *job = mem_job_suspend(); /* entries outlive this request */
    models_scan(m);
    mem_job_resume(job);
    return true;
}

struct models *models_new(struct server *s, struct error *err)
{
    struct models *m = mem_zalloc(1, sizeof *m);
    m->server = s;
    m->waiting_end = &m->waiting;
    pthread_mutex_init(&m->lock, NULL);
    pthread_mutex_init(&m->scan_lock, NULL);
    pthread_mutex_init(&m->change_lock, NULL);
    pthread_cond_init(&m->changed, NULL);
    for (int i = 0; i < s->opt.n_models; i++)
        if (!models_add(m, &s->opt.models[i], err)) {
            models_free(m);
            return NULL;
        }
    if (m->n && m->entries[0]->src.task == MODEL_TEXT)
        m->first = m->entries[0];
    models_scan(m);
    return m;
}

/* Choosing */

static bool unknown(struct api_request *req, const char *name)
{
    return lora_unknown_model(req, name);
}

static const char *endpoint_for(enum model_task task)
{
    return task == MODEL_TEXT    ? "/v1/chat/completions"
           : task == MODEL_EMBED ? "/v1/embeddings"
                                 : "/v1/rerank";
}

/* Refuses a model of another task. */
static bool refuse_task(struct api_request *req, const char *name, const struct model_entry *e,
                        enum model_task wanted, const struct model_entry *other)
{
    if (wanted == MODEL_TEXT)
        return api_invalid(&req->err, "model",
                           "the model '%.100s' does not generate text: it is for %s", name,
                           endpoint_for(e->src.task));
    if (e->src.task != MODEL_TEXT)
        return api_invalid(&req->err, "model", "the model '%.100s' is for %s", name,
                           endpoint_for(e->src.task));
    return api_invalid(&req->err, "model",
                       "the model '%.100s' generates text; for this endpoint use '%s'", name,
                       other ? other->name : "another");
}

static bool refuse_none(struct api_request *req, enum model_task task, int n)
{
    if (n)
        return api_invalid(&req->err, "model", "model is missing, and this server has %d of them",
                           n);
    return api_fail(&req->err, 501, "not_supported_error",
                    "this server has no model for that: start it with %s MODEL",
                    task == MODEL_EMBED    ? "--embedding"
                    : task == MODEL_RERANK ? "--rerank"
                                           : "a");
}

/* The entry that a request is for; NULL with an error. Under the lock. */
static struct model_entry *entry_for(struct models *m, struct api_request *req,
                                     enum model_task task, const char *name)
{
    int n;
    struct model_entry *only = only_one(m, task, &n), *e = NULL;
    for (int i = 0; name && !e && i < m->n; i++)
        if (m->entries[i]->src.task == task && model_has_name(m->entries[i], name))
            e = m->entries[i];
    if (name && !e)
        e = models_find(m, name);
    if (!name) {
        e = only ? only : task == MODEL_TEXT ? m->first : NULL;
        if (!e)
            refuse_none(req, task, n);
        return e;
    }
    if (!n) {
        refuse_none(req, task, n);
        return NULL;
    }
    if (e && e->src.task == task)
        return e;
    if (e) {
        refuse_task(req, name, e, task, only);
        return NULL;
    }
    if (task == MODEL_TEXT && only) /* a server of one model answers to any name */
        return only;
    unknown(req, name);
    return NULL;
}

/* The entry with this name, of any task; NULL with an error. Under the lock. */
static struct model_entry *entry_any(struct models *m, struct api_request *req, const char *name)
{
    struct model_entry *e = name ? models_find(m, name) : NULL;
    if (!name)
        api_invalid(&req->err, "model", "model is missing");
    else if (!e)
        unknown(req, name);
    return e;
}

/* Ollama's keep_alive: a number of seconds, or a text. */
static bool read_keep(struct api_request *req, const json_t *body)
{
    const json_t *v =
        req->endpoint->dialect == DIALECT_OLLAMA ? api_member(body, "keep_alive") : NULL;
    const char *text = json_string_value(v);
    if (!v)
        return true;
    req->has_keep =
        text ? duration_parse(text, &req->keep_ns, NULL)
             : json_is_number(v) && duration_of_seconds(json_number_value(v), &req->keep_ns);
    return req->has_keep || (text && !*text) ||
           api_invalid(&req->err, "keep_alive",
                       "keep_alive must be a number of seconds, or a text such as \"5m\"");
}

bool models_choose(struct api_request *req, const json_t *body)
{
    struct models *m = req->server->models;
    if (req->loaded || req->endpoint->model == ENDPOINT_NO_MODEL)
        return true;
    enum model_task task = (enum model_task)(req->endpoint->model - ENDPOINT_TEXT);
    bool any = req->endpoint->model == ENDPOINT_ANY || ollama_only_loads(req->endpoint, body);
    const char *name = NULL;
    int64_t now = clock_ns();
    if (!api_string(body, "model", &name, &req->err) || !read_keep(req, body))
        return false;
    pthread_mutex_lock(&m->lock);
    bool missing = name && !models_find(m, name);
    pthread_mutex_unlock(&m->lock);
    if (missing)
        scan_again(m);
    pthread_mutex_lock(&m->lock);
    struct model_entry *e = any && name ? models_find(m, name) : NULL;
    if (!e)
        e = req->endpoint->model == ENDPOINT_ANY ? entry_any(m, req, name)
                                                 : entry_for(m, req, task, name);
    bool unloads = e && req->has_keep && !req->keep_ns && ollama_only_loads(req->endpoint, body);
    char unloaded[MODEL_NAME_MOST];
    if (unloads) { /* when its last request has ended */
        if (!e->src.pinned)
            e->keep_ns = 0;
        memcpy(unloaded, e->name, sizeof unloaded);
    } else if (e && e->state == MODEL_LOADED && !e->retiring) {
        req->loaded = e->loaded;
        e->loaded->refs++;
        e->used_ns = now;
    } else if (e && e->failed_ns && e->state == MODEL_IDLE &&
               now - e->failed_ns < FAILED_AGAIN_S * SECOND) {
        model_refuse_failed(&req->err, e);
    } else {
        req->entry = e;
    }
    pthread_mutex_unlock(&m->lock);
    if (unloads) { /* not under the lock: it allocates */
        req->model = mem_strdup(unloaded);
        ollama_unloaded(req);
        models_poke(m);
    }
    return req->loaded || unloads;
}

bool prepare_model_load(struct api_request *req, const json_t *body)
{
    (void)body;
    buf_adds(&req->reply, "{\"success\":true}");
    return true;
}

bool prepare_model_unload(struct api_request *req, const json_t *body)
{
    struct models *m = req->server->models;
    const char *name = NULL;
    if (!api_string(body, "model", &name, &req->err))
        return false;
    pthread_mutex_lock(&m->lock);
    struct model_entry *e = entry_any(m, req, name);
    if (e && e->src.pinned)
        api_fail(&req->err, 409, "conflict_error", "the model '%.100s' is pinned", e->name);
    else if (e && !e->loaded)
        api_invalid(&req->err, "model", "the model '%.100s' is not loaded", e->name);
    else if (e)
        e->keep_ns = 0; /* when its last request has ended */
    pthread_mutex_unlock(&m->lock);
    if (req->err.status)
        return false;
    models_poke(m);
    buf_adds(&req->reply, "{\"success\":true}");
    return true;
}

/* Waiting */

/* Whether one more request may wait. For a client without waiting requests the limit is twice as high, so that others
 * cannot lock it out. */
static bool has_place(const struct models *m, const struct api_request *req)
{
    int most = m->server->opt.max_waiting;
    if (m->n_waiting < most)
        return true;
    for (const struct api_request *r = m->waiting; r; r = r->next_waiting)
        if (r->job.client == req->job.client)
            return false;
    return m->n_waiting < 2 * most;
}

bool models_wait(struct models *m, struct api_request *req)
{
    struct model_entry *e = req->entry;
    int64_t now = clock_ns();
    if (!has_place(m, req)) {
        api_fail(&req->err, 503, "unavailable_error",
                 "%d requests wait for models to load; try again later", m->n_waiting);
        return false;
    }
    pthread_mutex_lock(&m->lock);
    if (e->state == MODEL_IDLE) {
        e->state = MODEL_WANTED;
        e->wanted_ns = now;
    }
    if (!e->n_waiting++ && e->state == MODEL_LOADED)
        e->wanted_ns = now; /* it is retiring */
    pthread_mutex_unlock(&m->lock);
    req->wait_until_ns = req->start_ns + m->server->opt.load_wait_s * SECOND;
    req->next_waiting = NULL;
    *m->waiting_end = req;
    m->waiting_end = &req->next_waiting;
    m->n_waiting++;
    models_poke(m);
    return true;
}

void models_leave(struct models *m, struct api_request *req)
{
    struct api_request **at = &m->waiting;
    if (!req->wait_until_ns)
        return;
    while (*at != req)
        at = &(*at)->next_waiting;
    *at = req->next_waiting;
    if (!*at)
        m->waiting_end = at;
    m->n_waiting--;
    pthread_mutex_lock(&m->lock);
    req->entry->n_waiting--;
    if (!req->entry->n_waiting && req->entry->state == MODEL_WANTED &&
        (m->server->ready || !req->entry->src.at_start))
        req->entry->state = MODEL_IDLE; /* nobody wants it any more */
    pthread_mutex_unlock(&m->lock);
    req->wait_until_ns = 0;
    req->entry = NULL;
}

/* Ends the waits for models that are loaded or have failed, and waits that have lasted too long. */
static void end_waits(struct models *m)
{
    int64_t now = clock_ns();
    for (struct api_request *req = m->waiting, *next; req; req = next) {
        next = req->next_waiting;
        struct model_entry *e = req->entry;
        struct api_error err = {0};
        pthread_mutex_lock(&m->lock);
        bool there = e->state == MODEL_LOADED && !e->retiring;
        if (there) { /* before another model can take its place */
            req->loaded = e->loaded;
            e->loaded->refs++;
        }
        bool failed = e->state == MODEL_IDLE && e->failed_ns;
        if (failed)
            model_refuse_failed(&err, e);
        else if (!there && now >= req->wait_until_ns)
            api_fail(&err, 503, "unavailable_error",
                     "the model '%.100s' is not there yet: %s; try again later", e->name,
                     e->state == MODEL_LOADING ? "it is loading"
                                               : "the models in memory are in use");
        pthread_mutex_unlock(&m->lock);
        if (!there && !err.status)
            continue;
        models_leave(m, req);
        if (there)
            api_request_resume(req);
        else
            api_request_fail(req, &err);
    }
}

/* Drops a reference. A model without references is closed. Under the lock. */
static void model_unref(struct models *m, struct loaded *l)
{
    if (--l->refs)
        return;
    l->next = m->closing;
    m->closing = l;
    m->n_closing++;
    pthread_cond_broadcast(&m->changed);
}

void models_release(struct models *m, struct api_request *req)
{
    struct loaded *l = req->loaded;
    if (!l)
        return;
    pthread_mutex_lock(&m->lock);
    l->entry->used_ns = clock_ns();
    if (req->has_keep && !l->entry->src.pinned)
        l->entry->keep_ns = req->keep_ns;
    model_unref(m, l);
    bool wanted = l->entry->keep_ns == 0 || l->entry->retiring;
    for (int i = 0; !wanted && i < m->n; i++)
        wanted = m->entries[i]->state == MODEL_WANTED;
    pthread_mutex_unlock(&m->lock);
    req->loaded = NULL;
    if (wanted)
        models_poke(m);
}

/* Deciding; all under the lock */

/* Releases the entry's reference. Under the lock. */
static void model_unload(struct models *m, struct model_entry *e, const char *why)
{
    struct loaded *l = e->loaded;
    log_line(LOG_INFO, "unloaded", LOG_TEXT("model", e->name), LOG_TEXT("why", why),
             LOG_NUM("requests", l->refs - 1));
    e->loaded = NULL;
    e->retiring = false;
    e->keep_ns = e->src.keep_s < 0 ? -1 : e->src.keep_s * SECOND;
    e->state = e->n_waiting ? MODEL_WANTED : MODEL_IDLE;
    model_unref(m, l);
}

/* The least recently used model that may be unloaded: an idle one, or a busy one that is not retiring yet. */
static struct model_entry *least_used(const struct models *m, bool idle, bool gpu)
{
    struct model_entry *best = NULL;
    for (int i = 0; i < m->n; i++) {
        struct model_entry *e = m->entries[i];
        if (e->state != MODEL_LOADED || e->src.pinned || e->retiring ||
            idle != (e->loaded->refs == 1) || (gpu && !e->loaded->on_gpu))
            continue;
        if (!best || e->used_ns < best->used_ns)
            best = e;
    }
    return best;
}

static struct model_entry *next_wanted(const struct models *m)
{
    struct model_entry *best = NULL;
    for (int i = 0; i < m->n; i++) {
        struct model_entry *e = m->entries[i];
        if (e->state == MODEL_WANTED && (!best || e->wanted_ns < best->wanted_ns))
            best = e;
    }
    return best;
}

static bool any_retiring(const struct models *m)
{
    for (int i = 0; i < m->n; i++)
        if (m->entries[i]->retiring)
            return true;
    return false;
}

/* Host memory that a model may take now. */
static size_t host_room(const struct models *m)
{
    size_t most = m->server->opt.max_bytes;
    if (!most)
        return sysmem_available("");
    return most > m->bytes ? most - m->bytes : 0;
}

/* Whether e fits beside the models in memory. *gpu: what is short is a GPU's memory. */
static bool has_room(const struct models *m, const struct model_entry *e, bool *gpu)
{
    size_t file = e->facts.file_bytes;
    size_t want = e->known_bytes ? e->known_bytes : file + file / 4;
    const struct runtime_options *o = &e->src.engine.runtime;
    enum device_kind kind = device_kind(o->backend.device);
    *gpu = false;
    if (m->server->opt.max_loaded && m->n_loaded >= m->server->opt.max_loaded)
        return false;
    if (kind != DEVICE_CPU && file >= DEVICE_SMALL_MODEL) {
        size_t all = device_room(o->backend.device, 1);
        double share = o->gpu_memory > 0 ? (double)o->gpu_memory : 0.9;
        *gpu = all > 0;
        if (all && device_room(o->backend.device, share) >= file)
            return true;
        if (all)
            return false;
    }
    size_t room = host_room(m);
    return room == 0 ? m->server->opt.max_bytes == 0 : want <= room;
}

/* Makes room for e. True: it can be loaded now. */
static bool make_room(struct models *m, struct model_entry *e)
{
    bool gpu;
    if (has_room(m, e, &gpu))
        return true;
    bool count = m->server->opt.max_loaded && m->n_loaded >= m->server->opt.max_loaded;
    bool only_gpu = gpu && !count;
    struct model_entry *victim = least_used(m, true, only_gpu);
    if (victim) {
        model_unload(m, victim, "its memory is needed");
        return false;
    }
    victim = least_used(m, false, only_gpu);
    if (!victim &&
        !any_retiring(
            m)) /* nothing can be unloaded: the engine's error will name the memory it lacks */
        return !count;
    if (victim && !any_retiring(m) && clock_ns() - e->wanted_ns > RETIRE_AFTER_S * SECOND)
        victim->retiring = true;
    return false;
}

static void start_job(struct models *m, struct model_entry *e)
{
    size_t file = e->facts.file_bytes;
    e->state = MODEL_LOADING;
    e->failed_ns = 0;
    m->job = e;
    m->job_done = false;
    m->job_bytes = m->server->opt.max_bytes ? host_room(m) : 0;
    m->job_taken = e->known_bytes ? e->known_bytes : file;
    m->bytes += m->job_taken;
    m->n_loaded++;
    pthread_cond_broadcast(&m->changed);
    log_line(LOG_DEBUG, "loading", LOG_TEXT("model", e->name));
}

/* The loader is done with its job. Returns the entry, or NULL. */
static struct model_entry *take_result(struct models *m)
{
    struct model_entry *e = m->job;
    if (!e || !m->job_done)
        return NULL;
    m->job = NULL;
    m->job_done = false;
    m->bytes -= m->job_taken;
    e->loaded = m->opened;
    m->opened = NULL;
    e->used_ns = clock_ns();
    if (!e->loaded) {
        m->n_loaded--;
        e->state = MODEL_IDLE;
        e->failed_ns = e->used_ns;
        e->error = m->job_error;
        log_line(LOG_ERROR, "the model cannot be loaded", LOG_TEXT("model", e->name),
                 LOG_TEXT("why", e->error.msg));
        return e;
    }
    e->state = MODEL_LOADED;
    e->loaded->next_all = m->all;
    m->all = e->loaded;
    e->known_bytes = e->loaded->host_bytes;
    m->bytes += e->loaded->host_bytes;
    return e;
}

static void unload_unused(struct models *m)
{
    int64_t now = clock_ns();
    for (int i = 0; i < m->n; i++) {
        struct model_entry *e = m->entries[i];
        if (e->state != MODEL_LOADED || e->loaded->refs > 1)
            continue;
        if (e->loaded->failed && !e->src.at_start)
            model_unload(m, e, "it has failed");
        else if (e->hidden)
            model_unload(m, e, "it was deleted");
        else if (e->retiring)
            model_unload(m, e, "its memory is needed");
        else if (!e->src.pinned && e->keep_ns >= 0 && now - e->used_ns >= e->keep_ns &&
                 !e->n_waiting)
            model_unload(m, e, "unused");
    }
}

/* Notes that a model required at the start has failed, or that all of them are loaded. */
static void note_start(struct models *m, const struct model_entry *e)
{
    struct server *s = m->server;
    if (s->ready || !e->src.at_start)
        return;
    if (!e->loaded) {
        s->failed = true;
        s->exit_code = 1;
        event_base_loopbreak(s->base);
        return;
    }
    for (int i = 0; i < m->n; i++)
        if (m->entries[i]->src.at_start && m->entries[i]->state != MODEL_LOADED)
            return;
    s->ready = true;
}

void models_advance(struct models *m)
{
    pthread_mutex_lock(&m->lock);
    const struct model_entry *done = take_result(m);
    if (done) {
        note_start(m, done);
        if (done->loaded)
            loaded_log(done->loaded);
    }
    pthread_mutex_unlock(&m->lock);
    end_waits(m); /* before the model that has just been loaded may be unloaded again */
    pthread_mutex_lock(&m->lock);
    unload_unused(m);
    struct model_entry *e = m->job || m->n_closing ? NULL : next_wanted(m);
    if (e && make_room(m, e))
        start_job(m, e);
    pthread_mutex_unlock(&m->lock);
}

/* Facts */

int models_percent(const struct models *m, const struct model_entry *e)
{
    int percent = 0;
    if (m->job == e && m->opening)
        engine_state(m->opening, &percent, NULL);
    return percent;
}

/* For the log and /health. */
static const char *loaded_failure(const struct loaded *l)
{
    return l->engine                            ? "the engine failed"
           : l->entry->src.task == MODEL_RERANK ? "the rerank model has failed"
                                                : "the embedding model has failed";
}

void models_check(struct models *m)
{
    struct error why = {0};
    pthread_mutex_lock(&m->lock);
    for (struct loaded *l = m->all; l; l = l->next_all) {
        bool failed = l->engine ? engine_state(l->engine, NULL, &why) == ENGINE_FAILED
                                : embedder_failed(l->embedder, &why);
        if (!failed || l->failed)
            continue;
        l->failed = true;
        if (!l->engine || !job_fail(why.msg)) /* a job ends, and on_job_lost logs it */
            log_line(LOG_ERROR, loaded_failure(l), LOG_TEXT("why", why.msg));
    }
    pthread_mutex_unlock(&m->lock);
}

bool models_failed(struct models *m, struct error *why)
{
    int n;
    pthread_mutex_lock(&m->lock);
    const struct model_entry *only = only_one(m, MODEL_TEXT, &n);
    bool failed =
        (only && only->loaded && engine_state(only->loaded->engine, NULL, why) == ENGINE_FAILED) ||
        (!m->server->ready && m->opening && engine_state(m->opening, NULL, why) == ENGINE_FAILED);
    pthread_mutex_unlock(&m->lock);
    return failed;
}

const char *models_helper_failed(struct models *m)
{
    const char *failed = NULL;
    struct error why;
    pthread_mutex_lock(&m->lock);
    for (const struct loaded *l = m->all; l; l = l->next_all)
        if (l->embedder && embedder_failed(l->embedder, &why))
            failed = loaded_failure(l);
    pthread_mutex_unlock(&m->lock);
    return failed;
}

int models_progress(struct models *m)
{
    pthread_mutex_lock(&m->lock);
    int percent = m->first ? models_percent(m, m->first) : 0;
    pthread_mutex_unlock(&m->lock);
    return percent;
}

void models_stats(struct models *m, struct engine_stats *out)
{
    *out = (struct engine_stats){0};
    pthread_mutex_lock(&m->lock);
    for (const struct loaded *l = m->all; l; l = l->next_all) {
        struct engine_stats e;
        if (!l->engine)
            continue;
        engine_stats(l->engine, &e);
        out->generated_tokens += e.generated_tokens;
        out->busy_s += e.busy_s;
    }
    pthread_mutex_unlock(&m->lock);
}

struct loaded *models_shown(struct server *s, const struct http_exchange *x)
{
    struct models *m = s->models;
    char name[QUERY_TEXT_MAX];
    struct api_error err = {0};
    struct loaded *only = NULL;
    int n = 0;
    if (!query_text(http_request(x)->query, "model", name, &err))
        return NULL;
    pthread_mutex_lock(&m->lock);
    const struct model_entry *e = name[0] ? models_find(m, name) : m->first;
    for (int i = 0; !e && !name[0] && i < m->n; i++)
        if (m->entries[i]->loaded && m->entries[i]->src.task == MODEL_TEXT) {
            only = m->entries[i]->loaded;
            n++;
        }
    struct loaded *l = e ? e->loaded : n == 1 ? only : NULL;
    pthread_mutex_unlock(&m->lock);
    return l && l->engine ? l : NULL;
}
