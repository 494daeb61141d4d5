/*
 * LoRA adapters over HTTP. A request selects adapters by "model" ("NAME" or "BASE:NAME") or by "lora" (a
 * name, or llama.cpp's list of {"id", "scale"}). The selection is valid until the request ends
 * (engine/adapters.h). Every client may select. Loading reads local files, so it needs
 * --allow-lora-loading.
 */
#include "server/api/lora_endpoints.h"
#include "base/mem.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static struct adapters *adapters_of(const struct loaded *l)
{
    return l && l->engine ? engine_adapters(l->engine) : NULL;
}

bool lora_unknown_model(struct api_request *req, const char *name)
{
    api_fail(&req->err, 404, "not_found_error", "the model '%.100s' does not exist", name);
    req->err.code = "model_not_found";
    snprintf(req->err.param, sizeof req->err.param, "model");
    return false;
}

/* Finds the adapter that a model name selects; false if it selects none. */
static bool find_model(const struct loaded *l, const char *model, struct adapter_info *out)
{
    size_t n = strlen(l->entry->name);
    if (!strcmp(model, l->entry->name))
        return false;
    if (adapters_find(adapters_of(l), model, out))
        return true;
    return !strncmp(model, l->entry->name, n) && model[n] == ':' &&
           adapters_find(adapters_of(l), model + n + 1, out);
}

/* Whether the name is BASE:NAME with an unknown adapter. */
static bool names_missing(const struct loaded *l, const char *model)
{
    size_t n = strlen(l->entry->name);
    return !strncmp(model, l->entry->name, n) && model[n] == ':' &&
           strcmp(model + n + 1, "latest") != 0;
}

static bool add_pick(struct api_request *req, const struct adapter_info *info, double scale)
{
    struct error e = {0};
    if (scale == 0)
        return true;
    return adapters_pick(info, (float)scale, req->loras, &req->n_loras, &e) ||
           api_invalid(&req->err, "lora", "lora: %s", e.msg);
}

/* {"id": 0 or "name": "x", "scale": 1} */
static bool choose_entry(struct api_request *req, const json_t *v, size_t i)
{
    const json_t *id = api_member(v, "id"), *scale = api_member(v, "scale");
    const char *name = json_string_value(api_member(v, "name"));
    struct adapter_info info;
    if (!json_is_object(v) || (!json_is_integer(id) && !name))
        return api_invalid(&req->err, "lora",
                           "lora[%zu] must be an object with an \"id\" or a \"name\"", i);
    json_int_t number = json_integer_value(id);
    bool known = name ? adapters_find(adapters_of(req->loaded), name, &info)
                      : number >= 0 && number < LORA_MAX_ADAPTERS &&
                            adapters_at(adapters_of(req->loaded), (int)number, &info);
    if (!known && name)
        return api_invalid(&req->err, "lora", "lora[%zu]: no adapter \"%.100s\" is loaded", i,
                           name);
    if (!known)
        return api_invalid(&req->err, "lora", "lora[%zu]: no adapter has the id %lld", i,
                           (long long)number);
    double s = scale ? json_number_value(scale) : (double)info.scale;
    if ((scale && !json_is_number(scale)) || !(fabs(s) <= 1e6))
        return api_invalid(&req->err, "lora", "lora[%zu].scale must be a number", i);
    return add_pick(req, &info, s);
}

static bool choose_lora(struct api_request *req, const json_t *v)
{
    struct adapters *a = adapters_of(req->loaded);
    struct adapter_info info;
    size_t i;
    json_t *item;
    if (!json_is_string(v) && !json_is_array(v))
        return api_invalid(
            &req->err, "lora",
            "lora must be the name of an adapter, or an array of {\"id\", \"scale\"}");
    if (!a && (json_is_string(v) || json_array_size(v)))
        return api_invalid(&req->err, "lora", "this server has no adapters");
    if (json_is_string(v))
        return adapters_find(a, json_string_value(v), &info)
                   ? add_pick(req, &info, (double)info.scale)
                   : api_invalid(&req->err, "lora", "no adapter \"%.100s\" is loaded",
                                 json_string_value(v));
    json_array_foreach((json_t *)v, i, item)
    {
        if (!choose_entry(req, item, i))
            return false;
    }
    return true;
}

bool lora_find(const struct loaded *l, const char *model, struct adapter_info *out)
{
    return adapters_of(l) && find_model(l, model, out);
}

bool lora_choose(struct api_request *req, const json_t *body)
{
    const char *model = json_string_value(api_member(body, "model"));
    const json_t *lora = api_member(body, "lora");
    struct adapter_info info;
    if (lora && !choose_lora(req, lora))
        return false;
    if (!adapters_of(req->loaded))
        return true;
    const struct model_entry *e = req->loaded->entry;
    if (!lora && e->made.adapter &&
        adapters_find(adapters_of(req->loaded), e->adapter.name, &info) &&
        !add_pick(req, &info, (double)info.scale))
        return false;
    if (!model)
        return true;
    bool found = find_model(req->loaded, model, &info);
    if (!found && names_missing(req->loaded, model))
        return lora_unknown_model(req, model);
    if (!found)
        return true;
    req->model = mem_strdup(model);
    return lora || add_pick(req, &info, (double)info.scale);
}

/* Loading */

static bool may_change(struct api_request *req)
{
    return req->server->opt.allow_lora_loading ||
           api_fail(&req->err, 403, "permission_error",
                    "loading adapters over the network is disabled; to allow it, start the server "
                    "with --allow-lora-loading");
}

static bool need_text(struct api_request *req, const json_t *body, const char *field,
                      const char **out)
{
    if (!api_string(body, field, out, &req->err))
        return false;
    return (*out && **out) || api_invalid(&req->err, field, "%s is missing", field);
}

static bool refuse(struct api_request *req, enum adapter_result res, const char *param,
                   const struct error *e)
{
    if (res == ADAPTER_UNKNOWN)
        api_fail(&req->err, 404, "not_found_error", "%s", e->msg);
    else if (res == ADAPTER_BUSY)
        api_fail(&req->err, 409, "conflict_error", "%s", e->msg);
    else
        api_invalid(&req->err, param, "%s", e->msg);
    snprintf(req->err.param, sizeof req->err.param, "%s", param);
    return false;
}

static void reply_done(struct api_request *req, const char *name, const char *what)
{
    char text[ADAPTER_NAME_MAX + 80];
    snprintf(text, sizeof text, "Success: LoRA adapter '%s' %s successfully.", name, what);
    buf_adds(&req->reply, "{\"status\":\"ok\",\"message\":");
    jsonout_text(&req->reply, text);
    buf_addc(&req->reply, '}');
}

/* Why a file is no adapter is for the log: a client must not learn which paths exist. */
static bool refuse_loading(struct api_request *req, enum adapter_result res, const char *name,
                           const char *path, const struct error *e)
{
    static const struct error hidden = {
        "no adapter for this model could be loaded from there; the server's log says why"};
    struct error ignored = {0};
    bool file = res == ADAPTER_INVALID && adapter_name_check(name, &ignored);
    if (file)
        log_line(LOG_WARN, "adapter not loaded", LOG_TEXT("name", name), LOG_TEXT("path", path),
                 LOG_TEXT("why", e->msg));
    return refuse(req, res, res == ADAPTER_KNOWN ? "lora_name" : "lora_path", file ? &hidden : e);
}

bool prepare_load_lora(struct api_request *req, const json_t *body)
{
    const char *name = NULL, *path = NULL;
    float scale = 1;
    struct error e = {0};
    if (!may_change(req) || !need_text(req, body, "lora_name", &name) ||
        !need_text(req, body, "lora_path", &path) ||
        !api_float(body, "scale", -1e6, 1e6, &scale, &req->err))
        return false;
    if (!strcmp(name, req->loaded->entry->name))
        return api_invalid(&req->err, "lora_name", "lora_name is the base model's own name");
    struct mem_job *job = mem_job_suspend(); /* the adapter outlives this request */
    enum adapter_result res = adapters_load(adapters_of(req->loaded), name, path, scale, &e);
    mem_job_resume(job);
    if (res != ADAPTER_OK)
        return refuse_loading(req, res, name, path, &e);
    log_line(LOG_INFO, "adapter loaded", LOG_TEXT("name", name), LOG_TEXT("path", path));
    reply_done(req, name, "added");
    return true;
}

bool prepare_unload_lora(struct api_request *req, const json_t *body)
{
    const char *name = NULL;
    struct error e = {0};
    if (!may_change(req) || !need_text(req, body, "lora_name", &name))
        return false;
    struct mem_job *job = mem_job_suspend();
    enum adapter_result res = adapters_unload(adapters_of(req->loaded), name, &e);
    mem_job_resume(job);
    if (res != ADAPTER_OK)
        return refuse(req, res, "lora_name", &e);
    log_line(LOG_INFO, "adapter unloaded", LOG_TEXT("name", name));
    reply_done(req, name, "removed");
    return true;
}

/* Lists */

static int list_all(const struct loaded *l, struct adapter_info **out)
{
    *out = NULL;
    if (!adapters_of(l))
        return 0;
    *out = mem_zalloc(LORA_MAX_ADAPTERS, sizeof **out);
    return adapters_list(adapters_of(l), *out, LORA_MAX_ADAPTERS);
}

static void add_model(const struct loaded *l, const struct adapter_info *info, struct buf *b)
{
    buf_adds(b, "{\"id\":");
    jsonout_text(b, info->name);
    buf_adds(b, ",\"type\":\"model\",\"display_name\":");
    jsonout_text(b, info->name);
    buf_addf(b, ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"steel\",\"root\":",
             (long long)l->entry->added);
    jsonout_text(b, info->path);
    buf_adds(b, ",\"parent\":");
    jsonout_text(b, l->entry->name);
    buf_addf(b, ",\"max_model_len\":%d,\"lora\":{\"id\":%d,\"scale\":%.6g},\"capabilities\":",
             engine_context(l->engine), info->number, (double)info->scale);
    add_capabilities(l, b);
    buf_addc(b, '}');
}

void lora_add_models(const struct loaded *l, struct buf *b)
{
    struct adapter_info *all;
    int n = list_all(l, &all);
    for (int i = 0; i < n; i++) {
        buf_addc(b, ',');
        add_model(l, &all[i], b);
    }
    mem_free(all);
}

bool lora_add_model(const struct loaded *l, const char *name, struct buf *b)
{
    struct adapter_info info;
    if (!lora_find(l, name, &info))
        return false;
    add_model(l, &info, b);
    return true;
}

void get_lora_adapters(struct server *s, struct http_exchange *x)
{
    struct buf b = {0};
    struct adapter_info *all = NULL;
    int n = list_all(models_shown(s, x), &all);
    buf_addc(&b, '[');
    for (int i = 0; i < n; i++) {
        buf_addf(&b, "%s{\"id\":%d,\"name\":", i ? "," : "", all[i].number);
        jsonout_text(&b, all[i].name);
        buf_adds(&b, ",\"path\":");
        jsonout_text(&b, all[i].path);
        buf_addf(&b, ",\"scale\":%.6g,\"requests\":%d}", (double)all[i].scale, all[i].users);
    }
    buf_addc(&b, ']');
    reply_json(x, s, 200, &b);
    mem_free(all);
    buf_clear(&b);
}
