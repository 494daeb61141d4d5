/* See models_made.h. */
#include "server/api/models_made.h"
#include "base/mem.h"
#include "base/os.h"
#include "model/adapter.h"
#include "model/config.h"
#include "server/api/models_int.h"
#include "server/api/ollama.h"
#include "server/api/prepare_int.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MADE_MOST = 4096 }; /* entries: those of deleted models stay until the server ends */

/* Modelfiles */

/* Whether it is a supported PARAMETER: those that Ollama documents. */
static bool is_parameter(const char *name)
{
    static const char *const names[] = {"temperature",
                                        "top_k",
                                        "top_p",
                                        "min_p",
                                        "typical_p",
                                        "repeat_penalty",
                                        "repeat_last_n",
                                        "presence_penalty",
                                        "frequency_penalty",
                                        "mirostat",
                                        "mirostat_tau",
                                        "mirostat_eta",
                                        "seed",
                                        "stop",
                                        "num_ctx",
                                        "num_predict"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i]))
            return true;
    return false;
}

/* Whether a Modelfile can have the value of a parameter. */
static bool can_be_printed(const json_t *v)
{
    return json_is_string(v) ? modelfile_holds(json_string_value(v), json_string_length(v))
                             : json_is_number(v) || json_is_boolean(v);
}

/* Checks the parameters and reads them. *context: num_ctx, 0 = not said. */
static bool read_parameters(const json_t *options, const struct sample_params *sample,
                            struct gen_params *out, int *context, struct error *err)
{
    struct api_error why = {0};
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)options, name, v)
    {
        if (!is_parameter(name) && !fields_unused_option(name))
            return error_set(err, "PARAMETER %.60s is not supported", name);
        if (!can_be_printed(v) && strcmp(name, "stop") != 0)
            return error_set(err, "PARAMETER %.60s must be one value", name);
        size_t i;
        const json_t *item;
        json_array_foreach(v, i, item)
        {
            if (!can_be_printed(item))
                return error_set(err, "PARAMETER %.60s cannot have such a text", name);
        }
    }
    json_t *asked = json_pack("{s:O*}", "options", options), *fields = json_object();
    bool ok = ollama_add_options(asked, fields, &why) &&
              gen_params_read(fields, PARAMS_CHAT, sample, 1, out, &why) &&
              api_int(fields, "num_ctx", 1, INT32_MAX, context, &why);
    json_decref(asked);
    json_decref(fields);
    return ok || error_set(err, "PARAMETER %s", why.msg);
}

/* A template in Go's language, as Ollama has it. */
static bool is_go_template(const char *text)
{
    for (const char *p = text; (p = strstr(p, "{{")); p += 2) {
        const char *w = p + 2 + (p[2] == '-');
        while (isspace((unsigned char)*w))
            w++;
        if (*w == '.' || *w == '$' || !strncmp(w, "if ", 3) || !strncmp(w, "range ", 6) ||
            !strncmp(w, "end", 3))
            return true;
    }
    return false;
}

static bool check_template(const char *text, struct error *err)
{
    struct chat_source source = {0};
    struct error why = {0};
    if (is_go_template(text))
        return error_set(err, "TEMPLATE is in Go's language: write it in Jinja, or leave it out "
                              "(the model's own is used)");
    chat_source_set(&source, text);
    struct chat *chat = chat_new(&source, &why);
    chat_free(chat);
    chat_source_clear(&source);
    return chat || error_set(err, "TEMPLATE: %s", why.msg);
}

/* Checks everything in a Modelfile but FROM. */
static bool check_made(const struct modelfile *f, struct error *err)
{
    const struct sample_params none = {0};
    struct gen_params p = {0};
    int context = 0;
    bool ok = read_parameters(f->options, &none, &p, &context, err) &&
              (!f->template || !*f->template || check_template(f->template, err)) &&
              (!f->adapter || access(f->adapter, R_OK) == 0 ||
               error_set(err, "ADAPTER %.200s: %s", f->adapter, strerror(errno)));
    gen_params_clear(&p);
    return ok;
}

/* FROM becomes the path of a file: as it is, below the Modelfile's folder, or that of a model that is served. What that model
 * was made with is inherited. */
static bool resolve(struct models *m, const char *folder, struct modelfile *f, struct error *err)
{
    struct buf path = {0};
    CHECK(f->from, "a Modelfile without FROM");
    if (f->from[0] != '/')
        buf_addf(&path, "%s/", folder ? folder : ".");
    buf_adds(&path, f->from);
    bool found = (f->from[0] == '/' || folder) && access(path.p, R_OK) == 0;
    if (!found) {
        pthread_mutex_lock(&m->lock);
        const struct model_entry *base = models_find(m, f->from);
        found = base && model_has_name(base, f->from) && base->src.path;
        pthread_mutex_unlock(&m->lock);
        buf_reset(&path);
        if (found) { /* path and `made` are constant, and entries stay */
            buf_adds(&path, base->src.path);
            modelfile_inherit(f, &base->made);
        }
    }
    if (found) {
        mem_free(f->from);
        f->from = buf_take(&path);
    } else {
        error_set(err, "FROM: there is no such model here");
    }
    buf_clear(&path);
    return found;
}

bool models_make_entry(struct models *m, struct model_entry *e, struct error *err)
{
    struct modelfile f;
    const char *slash = strrchr(e->src.modelfile, '/');
    char *folder =
        slash ? mem_strndup(e->src.modelfile, (size_t)(slash - e->src.modelfile)) : mem_strdup(".");
    int context = 0;
    bool ok = modelfile_read(e->src.modelfile, &f, err) && resolve(m, folder, &f, err) &&
              check_made(&f, err) &&
              read_parameters(f.options, &e->src.sample, &e->own, &context, err);
    mem_free(folder);
    e->made = f;
    if (!ok)
        return false;
    e->src.sample = e->own.sample;
    e->src.path = mem_strdup(f.from);
    if (context)
        e->src.engine.runtime.context = context;
    if (f.template && *f.template) {
        e->src.chat_template = NULL;
        e->src.template_text = e->made.template;
    }
    if (f.adapter) {
        e->adapter = (struct adapter_ref){.name = "adapter", .path = e->made.adapter, .scale = 1};
        e->src.engine.runtime.loras = &e->adapter;
        e->src.engine.runtime.n_loras = 1;
    }
    return true;
}

void models_add_params(const struct model_entry *e, struct gen_params *p)
{
    const struct gen_params *own = &e->own;
    if (!e->src.modelfile)
        return;
    if (!p->has_seed && own->has_seed) {
        p->has_seed = true;
        p->sample.seed = own->sample.seed;
    }
    if (!p->max_tokens && !p->no_answer)
        p->max_tokens = own->max_tokens;
    if (p->n_stop || !own->n_stop)
        return;
    p->stop = mem_zalloc((size_t)own->n_stop, sizeof *p->stop);
    for (int i = 0; i < own->n_stop; i++)
        p->stop[p->n_stop++] = mem_strdup(own->stop[i]);
}

/* Changing */

bool models_may_change(struct server *s, struct api_error *err)
{
    return s->opt.allow_pull ||
           api_fail(err, 403, "permission_error",
                    "clients may not change the models of this server; to allow it, start it with "
                    "--allow-pull");
}

/* A model's name without ":latest". That of a new one has letters, digits and -._:/ only, so that a file can have it. */
static bool read_name(struct api_request *req, const json_t *body, const char *const *fields,
                      bool is_new, char name[MODEL_NAME_MOST])
{
    const char *text = NULL;
    for (int i = 0; fields[i] && !text; i++)
        if (!api_string(body, fields[i], &text, &req->err))
            return false;
    size_t n = text ? strlen(text) : 0;
    if (n > 7 && !strcmp(text + n - 7, ":latest"))
        n -= 7;
    if (!n)
        return api_invalid(&req->err, fields[0], "%s is missing", fields[0]);
    bool ok = n < 128 && (!is_new || isalnum((unsigned char)text[0]));
    for (size_t i = 0; ok && is_new && i < n; i++)
        ok = isalnum((unsigned char)text[i]) || strchr("-._:/", text[i]);
    if (!ok)
        return api_invalid(&req->err, fields[0],
                           "%s must have up to 127 letters, digits and -._:/, and begin with a "
                           "letter or a digit",
                           fields[0]);
    snprintf(name, MODEL_NAME_MOST, "%.*s", (int)n, text);
    return true;
}

/* The file of a made model. A slash of the name is a percent sign there. */
static void made_path(const struct server *s, const char *name, struct buf *out)
{
    buf_addf(out, "%s/", s->opt.made_dir);
    for (const char *p = name; *p; p++)
        buf_addc(out, *p == '/' ? '%' : *p);
    buf_adds(out, MODELFILE_SUFFIX);
}

/* Writes a file that appears whole or not at all. */
static bool write_file(const char *path, const struct buf *text, struct error *err)
{
    struct buf fresh = {0};
    unsigned long long mark;
    bool ok = os_random(&mark, sizeof mark);
    buf_addf(&fresh, "%s.%016llx.part", path, ok ? mark : 0);
    int fd = open(fresh.p, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    size_t at = 0;
    for (ssize_t n = 0; fd >= 0 && at < text->len && n >= 0; at += n > 0 ? (size_t)n : 0)
        n = write(fd, text->p + at, text->len - at);
    ok = fd >= 0 && at == text->len && fsync(fd) == 0;
    if (fd >= 0)
        ok = close(fd) == 0 && ok;
    if (ok)
        ok = rename(fresh.p, path) == 0;
    if (!ok)
        error_set(err, "%s: %s", path, strerror(errno));
    if (fd >= 0 && !ok)
        unlink(fresh.p);
    buf_clear(&fresh);
    return ok;
}

/* The entry with exactly this name, or an alias of it. Under the lock. */
static struct model_entry *entry_named(struct models *m, const char *name)
{
    struct model_entry *e = models_find(m, name);
    return e && model_has_name(e, name) ? e : NULL;
}

/* Whether the name is free, or that of the Modelfile at `path`: another model's file would have to go. */
static bool is_free(struct api_request *req, const char *name, const char *path)
{
    struct models *m = req->server->models;
    pthread_mutex_lock(&m->lock);
    const struct model_entry *e = entry_named(m, name);
    bool ok = !e || (e->src.modelfile && !strcmp(e->src.modelfile, path));
    bool many = m->n >= MADE_MOST;
    pthread_mutex_unlock(&m->lock);
    if (many)
        return api_fail(&req->err, 503, "unavailable_error",
                        "too many models were made; restart the server");
    return ok ||
           api_fail(&req->err, 409, "conflict_error",
                    "the name '%.100s' is that of a model that is not made by a Modelfile", name);
}

/* Whether the file can be read as a model. Why it cannot is for the log only: a client must not learn which paths exist. */
static bool check_from(struct api_request *req, const struct modelfile *f)
{
    const struct model_source src = {.path = f->from, .task = MODEL_BY_FILE};
    struct model_facts facts;
    model_probe(&src, &facts);
    if (facts.known)
        return true;
    log_line(LOG_WARN, "model not made", LOG_TEXT("from", f->from),
             LOG_TEXT("why", facts.error.msg));
    return api_invalid(&req->err, "from", "FROM: there is no such model here");
}

/* Whether the adapter can be read as one of the model. As above, a client does not learn why not. */
static bool check_adapter(struct api_request *req, const struct modelfile *f)
{
    struct error why = {0};
    struct outline o = {0};
    struct adapter *a = NULL;
    if (!f->adapter)
        return true;
    struct config *c = mem_zalloc(1, sizeof *c);
    struct tensorfile *base = tensorfile_open(f->from, &why);
    if (base && config_load(base, c, &why) && outline_load(base, c, &o, &why))
        a = adapter_open(f->adapter, c, base->is_gguf, o.specs, o.n_specs, &why);
    bool ok = a != NULL;
    adapter_free(a);
    outline_free(&o);
    tensorfile_close(base);
    mem_free(c);
    if (ok)
        return true;
    log_line(LOG_WARN, "model not made", LOG_TEXT("adapter", f->adapter), LOG_TEXT("why", why.msg));
    return api_invalid(&req->err, "adapter", "ADAPTER: there is no adapter of this model here");
}

/* Under change_lock: writes the Modelfile and offers the model; an older one of the name ends with its last request. */
static bool replace(struct api_request *req, const char *name, const char *path,
                    const struct buf *text)
{
    struct models *m = req->server->models;
    struct error err = {0};
    if (!is_free(req, name, path))
        return false;
    if (!write_file(path, text, &err)) {
        log_line(LOG_WARN, "model not made", LOG_TEXT("model", name), LOG_TEXT("why", err.msg));
        return api_fail(&req->err, 500, "server_error",
                        "the model could not be written; the server's log says why");
    }
    pthread_mutex_lock(&m->lock);
    struct model_entry *old = entry_named(m, name);
    if (old)
        old->stale = true; /* the scan replaces it */
    pthread_mutex_unlock(&m->lock);
    models_scan(m);
    return true;
}

static bool offer(struct api_request *req, const char *name, const struct modelfile *f)
{
    struct models *m = req->server->models;
    struct buf path = {0}, text = {0};
    made_path(req->server, name, &path);
    modelfile_print(f, &text);
    struct mem_job *job =
        mem_job_suspend(); /* entries outlive this request; the lock is released */
    pthread_mutex_lock(&m->change_lock);
    bool ok = replace(req, name, path.p, &text);
    pthread_mutex_unlock(&m->change_lock);
    mem_job_resume(job);
    if (ok)
        log_line(LOG_INFO, "model made", LOG_TEXT("model", name), LOG_TEXT("from", f->from));
    models_poke(m);
    buf_clear(&path);
    buf_clear(&text);
    return ok;
}

static bool take_text(struct api_request *req, const json_t *body, const char *field, char **out)
{
    const char *text = NULL;
    if (!api_string(body, field, &text, &req->err))
        return false;
    if (text && !modelfile_holds(text, strlen(text)))
        return api_invalid(&req->err, field, "%s must not have three quotes", field);
    if (text) {
        mem_free(*out);
        *out = mem_strdup(text);
    }
    return true;
}

/* Refuses members that would change the model in an unsupported way. */
static bool refuse_rest(struct api_request *req, const json_t *body)
{
    static const struct {
        const char *name, *why;
    } refused[] = {{"files", "name the model or the path of its file in from"},
                   {"adapters", "name the adapter's path in a Modelfile's ADAPTER"},
                   {"quantize", "steel quantize does it"},
                   {"messages", "send the messages"},
                   {"renderer", "the template says it"},
                   {"parser", "the template says it"}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        const json_t *v = api_member(body, refused[i].name);
        bool empty = !v || (json_is_string(v) && !json_string_length(v)) ||
                     ((json_is_array(v) || json_is_object(v)) && !json_array_size(v) &&
                      !json_object_size(v));
        if (!empty)
            return api_invalid(&req->err, refused[i].name, "%s is not supported: %s",
                               refused[i].name, refused[i].why);
    }
    return true;
}

/* From a Modelfile's text, which the older API sends, and from the members of the newer one. */
static bool read_made(struct api_request *req, const json_t *body, struct modelfile *f)
{
    const char *text = NULL;
    struct error why = {0};
    const json_t *options = api_member(body, "parameters");
    if (!api_string(body, "modelfile", &text, &req->err) || !refuse_rest(req, body))
        return false;
    if (text && !modelfile_parse(text, strlen(text), f, &why))
        return api_invalid(&req->err, "modelfile", "modelfile: %s", why.msg);
    if (!take_text(req, body, "from", &f->from) || !take_text(req, body, "system", &f->system) ||
        !take_text(req, body, "template", &f->template) ||
        !take_text(req, body, "adapter", &f->adapter))
        return false;
    if (options && !json_is_object(options))
        return api_invalid(&req->err, "parameters", "parameters must be an object");
    if (options && f->options)
        json_object_update(f->options, (json_t *)options);
    else if (options)
        f->options = json_deep_copy(options);
    return (f->from && *f->from) || api_invalid(&req->err, "from", "from is missing");
}

static void reply_success(struct api_request *req)
{
    buf_adds(&req->reply, "{\"status\":\"success\"}\n");
}

bool prepare_create(struct api_request *req, const json_t *body)
{
    static const char *const fields[] = {"model", "name", NULL};
    char name[MODEL_NAME_MOST] = "";
    struct modelfile f = {0};
    struct error why = {0};
    if (!models_may_change(req->server, &req->err) || !read_name(req, body, fields, true, name))
        return false;
    bool ok = read_made(req, body, &f);
    if (ok && !resolve(req->server->models, NULL, &f, &why))
        ok = api_invalid(&req->err, "from", "%s", why.msg);
    ok = ok && check_from(req, &f) && check_adapter(req, &f);
    if (ok && !check_made(&f, &why))
        ok = api_invalid(&req->err, "from", "%s", why.msg);
    ok = ok && offer(req, name, &f);
    if (ok)
        reply_success(req);
    modelfile_clear(&f);
    return ok;
}

bool prepare_copy(struct api_request *req, const json_t *body)
{
    static const char *const to[] = {"destination", NULL};
    const char *source = NULL;
    char name[MODEL_NAME_MOST] = "";
    struct modelfile f = {0};
    struct error why = {0};
    if (!models_may_change(req->server, &req->err) ||
        !api_string(body, "source", &source, &req->err) || !read_name(req, body, to, true, name))
        return false;
    if (!source || !*source)
        return api_invalid(&req->err, "source", "source is missing");
    f.from = mem_strdup(source);
    bool ok = source[0] != '/' && resolve(req->server->models, NULL, &f, &why);
    if (!ok)
        api_fail(&req->err, 404, "not_found_error", "the model '%.100s' does not exist", source);
    ok = ok && offer(req, name, &f);
    if (ok)
        reply_success(req);
    modelfile_clear(&f);
    return ok;
}

/* Whether another model is made of the file at `path`. Under the lock. */
static const struct model_entry *user_of(const struct models *m, const struct model_entry *e)
{
    for (int i = 0; i < m->n; i++) {
        const struct model_entry *o = m->entries[i];
        if (o != e && !o->hidden && o->src.modelfile && o->src.path && e->src.path &&
            !strcmp(o->src.path, e->src.path))
            return o;
    }
    return NULL;
}

/* Removes the file, or all parts of a split one. */
static bool remove_files(const char *path, struct error *err)
{
    const char *slash = strrchr(path, '/'), *part = strstr(slash ? slash : path, "-00001-of-");
    struct stat st;
    if (stat(path, &st) || S_ISDIR(st.st_mode))
        return error_set(err, "%s: a folder is not removed here", path);
    int n = part ? atoi(part + strlen("-00001-of-")) : 1;
    bool ok = true;
    for (int i = 1; ok && i <= n; i++) {
        struct buf b = {0};
        if (part)
            buf_addf(&b, "%.*s-%05d%s", (int)(part - path), path, i, part + 6);
        else
            buf_adds(&b, path);
        ok = unlink(b.p) == 0 || errno == ENOENT || error_set(err, "%s: %s", b.p, strerror(errno));
        buf_clear(&b);
    }
    return ok;
}

/* Under change_lock. */
static bool delete_named(struct api_request *req, const char *name)
{
    struct server *s = req->server;
    struct models *m = s->models;
    struct error err = {0};
    pthread_mutex_lock(&m->lock);
    struct model_entry *e = entry_named(m, name);
    const struct model_entry *user = e && !e->src.modelfile ? user_of(m, e) : NULL;
    pthread_mutex_unlock(&m->lock);
    if (!e)
        return api_fail(&req->err, 404, "not_found_error", "the model '%.100s' does not exist",
                        name);
    if (!e->src.found || e->src.pinned)
        return api_fail(&req->err, 409, "conflict_error", "the model '%.100s' is %s", name,
                        e->src.pinned ? "pinned" : "one of the server's options");
    if (user)
        return api_fail(&req->err, 409, "conflict_error", "the model '%.100s' is used by '%.100s'",
                        name, user->name);
    bool ok = e->src.modelfile ? remove_files(e->src.modelfile, &err)
              : e->src.on_hub  ? s->opt.store_remove(e->name, &err)
                               : remove_files(e->src.path, &err);
    if (!ok) {
        log_line(LOG_WARN, "model not removed", LOG_TEXT("model", name), LOG_TEXT("why", err.msg));
        return api_fail(&req->err, 500, "server_error",
                        "the model could not be removed; the server's log says why");
    }
    pthread_mutex_lock(&m->lock);
    e->hidden = true;
    pthread_mutex_unlock(&m->lock);
    return true;
}

bool prepare_delete(struct api_request *req, const json_t *body)
{
    static const char *const fields[] = {"model", "name", NULL};
    struct models *m = req->server->models;
    char name[MODEL_NAME_MOST] = "";
    if (!models_may_change(req->server, &req->err) || !read_name(req, body, fields, false, name))
        return false;
    struct mem_job *job = mem_job_suspend(); /* the lock is released */
    pthread_mutex_lock(&m->change_lock);
    bool ok = delete_named(req, name);
    pthread_mutex_unlock(&m->change_lock);
    mem_job_resume(job);
    if (!ok)
        return false;
    log_line(LOG_INFO, "model removed", LOG_TEXT("model", name));
    models_poke(m);
    reply_success(req);
    return true;
}
