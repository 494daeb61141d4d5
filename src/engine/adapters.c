/* LoRA adapters: see adapters.h. One lock protects a table of slots. A slot that is being loaded or unloaded belongs to
 * the thread that does it. */
#include "engine/adapters.h"
#include "backend/backend.h"
#include "base/buf.h"
#include "base/mem.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum slot_state { SLOT_FREE, SLOT_READY, SLOT_CHANGING };

struct adapter_slot {
    enum slot_state state;
    struct adapter_info info;
};

struct adapters {
    struct model *m;
    bool model_is_gguf;
    int rank;      /* largest allowed rank; 0 = no bound yet */
    int most_rank; /* largest rank loaded so far */
    uint64_t next_serial;
    pthread_mutex_t lock;
    struct adapter_slot slots[LORA_MAX_ADAPTERS]; /* under lock */
};

struct adapters *adapters_new(struct model *m, const struct tensorfile *f)
{
    struct adapters *a = mem_zalloc(1, sizeof *a);
    a->m = m;
    a->model_is_gguf = f->is_gguf;
    a->next_serial = 1;
    pthread_mutex_init(&a->lock, NULL);
    model_take_adapters(m);
    return a;
}

/* Bytes of a file, or of the weights in a folder; 0: missing, which loading reports. */
static size_t file_bytes(const char *path)
{
    static const char config[] = "/adapter_config.json", weights[] = "/adapter_model.safetensors";
    struct stat st = {0};
    struct buf file = {0};
    size_t n = strlen(path), tail = sizeof config - 1;
    bool named = n > tail && !strcmp(path + n - tail, config);
    bool folder = named || (stat(path, &st) == 0 && S_ISDIR(st.st_mode));
    buf_add(&file, path, named ? n - tail : n);
    buf_adds(&file, folder ? weights : "");
    size_t bytes = stat(file.p, &st) == 0 && S_ISREG(st.st_mode) ? (size_t)st.st_size : 0;
    buf_clear(&file);
    return bytes;
}

size_t adapters_bytes(const struct adapter_ref *refs, int n)
{
    size_t all = 0;
    for (int i = 0; i < n; i++)
        all += file_bytes(refs[i].path);
    return all;
}

void adapters_free(struct adapters *a)
{
    if (!a)
        return;
    pthread_mutex_destroy(&a->lock);
    mem_free(a);
}

int adapters_settle(struct adapters *a, int rank)
{
    return a->rank = a->most_rank > rank ? a->most_rank : rank;
}

/* Call under the lock. */
static struct adapter_slot *find(struct adapters *a, const char *name)
{
    for (int i = 0; i < LORA_MAX_ADAPTERS; i++)
        if (a->slots[i].state != SLOT_FREE && !strcmp(a->slots[i].info.name, name))
            return &a->slots[i];
    return NULL;
}

static bool read_adapter(struct adapters *a, struct adapter_slot *s, const char *path,
                         struct error *err)
{
    struct adapter *ad =
        adapter_open(path, &a->m->config, a->model_is_gguf, a->m->specs, a->m->n_specs, err);
    if (!ad)
        return false;
    bool ok = true;
    if (a->rank && ad->rank > a->rank)
        ok = error_set(err, "%s: adds rank %d to a weight; %d at most: see --max-lora-rank", path,
                       ad->rank, a->rank);
    ok = ok && model_adapt(a->m, ad, s->info.number, err);
    s->info.rank = ad->rank;
    s->info.mark = adapter_mark(ad);
    adapter_free(ad);
    return ok;
}

enum adapter_result adapters_load(struct adapters *a, const char *name, const char *path,
                                  float scale, struct error *err)
{
    if (!adapter_name_check(name, err))
        return ADAPTER_INVALID;
    enum adapter_result res = ADAPTER_OK;
    struct adapter_slot *s = NULL;
    if (a->rank && a->m->be->comm) {
        error_set(err, "over several processes adapters are loaded at the start: --lora %s=%s",
                  name, path);
        return ADAPTER_INVALID;
    }
    pthread_mutex_lock(&a->lock);
    if (find(a, name)) {
        error_set(err, "the adapter \"%s\" is loaded already", name);
        res = ADAPTER_KNOWN;
    }
    for (int i = 0; res == ADAPTER_OK && !s && i < LORA_MAX_ADAPTERS; i++)
        if (a->slots[i].state == SLOT_FREE) {
            s = &a->slots[i];
            *s = (struct adapter_slot){SLOT_CHANGING, {.number = i, .scale = scale}};
            snprintf(s->info.name, sizeof s->info.name, "%s", name);
            snprintf(s->info.path, sizeof s->info.path, "%s", path);
            s->info.serial = a->next_serial++;
        }
    pthread_mutex_unlock(&a->lock);
    if (res == ADAPTER_OK && !s) {
        error_set(err, "%d adapters are loaded: no room for more", LORA_MAX_ADAPTERS);
        return ADAPTER_BUSY;
    }
    if (res != ADAPTER_OK)
        return res;
    bool ok = read_adapter(a, s, path, err);
    pthread_mutex_lock(&a->lock);
    s->state = ok ? SLOT_READY : SLOT_FREE;
    if (ok && s->info.rank > a->most_rank)
        a->most_rank = s->info.rank;
    pthread_mutex_unlock(&a->lock);
    return ok ? ADAPTER_OK : ADAPTER_INVALID;
}

enum adapter_result adapters_unload(struct adapters *a, const char *name, struct error *err)
{
    enum adapter_result res = ADAPTER_OK;
    pthread_mutex_lock(&a->lock);
    struct adapter_slot *s = find(a, name);
    if (!s) {
        error_set(err, "no adapter \"%.100s\" is loaded", name);
        res = ADAPTER_UNKNOWN;
    } else if (s->state != SLOT_READY) {
        error_set(err, "the adapter \"%s\" is being loaded or unloaded", name);
        res = ADAPTER_BUSY;
    } else if (s->info.users) {
        error_set(err,
                  "the adapter \"%s\" is in use by %d requests; try again when they have ended",
                  name, s->info.users);
        res = ADAPTER_BUSY;
    } else {
        s->state = SLOT_CHANGING;
    }
    pthread_mutex_unlock(&a->lock);
    if (res != ADAPTER_OK)
        return res;
    model_unadapt(a->m, s->info.number);
    pthread_mutex_lock(&a->lock);
    s->state = SLOT_FREE;
    pthread_mutex_unlock(&a->lock);
    return ADAPTER_OK;
}

bool adapters_find(struct adapters *a, const char *name, struct adapter_info *out)
{
    pthread_mutex_lock(&a->lock);
    const struct adapter_slot *s = find(a, name);
    bool there = s && s->state == SLOT_READY;
    if (there)
        *out = s->info;
    pthread_mutex_unlock(&a->lock);
    return there;
}

bool adapters_at(struct adapters *a, int number, struct adapter_info *out)
{
    if (number < 0 || number >= LORA_MAX_ADAPTERS)
        return false;
    pthread_mutex_lock(&a->lock);
    bool there = a->slots[number].state == SLOT_READY;
    if (there)
        *out = a->slots[number].info;
    pthread_mutex_unlock(&a->lock);
    return there;
}

int adapters_list(struct adapters *a, struct adapter_info *out, int max)
{
    int n = 0;
    pthread_mutex_lock(&a->lock);
    for (int i = 0; i < LORA_MAX_ADAPTERS && n < max; i++)
        if (a->slots[i].state == SLOT_READY)
            out[n++] = a->slots[i].info;
    pthread_mutex_unlock(&a->lock);
    return n;
}

bool adapters_pick(const struct adapter_info *info, float scale, struct lora_pick *picks, int *n,
                   struct error *err)
{
    for (int i = 0; i < *n; i++)
        if (picks[i].adapter == info->number)
            return error_set(err, "the adapter \"%s\" is asked for twice", info->name);
    if (*n == LORA_MAX_USES)
        return error_set(err, "more than %d adapters for one request", LORA_MAX_USES);
    picks[(*n)++] = (struct lora_pick){info->number, scale, info->serial, info->mark};
    return true;
}

bool adapters_parse(struct adapters *a, const char *text, struct lora_pick *picks, int *n,
                    struct error *err)
{
    *n = 0;
    for (const char *at = text, *next; *at; at = next) {
        size_t len = strcspn(at, ","), stem = strcspn(at, ":,");
        char name[ADAPTER_NAME_MAX] = "";
        struct adapter_info info;
        next = at[len] ? at + len + 1 : at + len;
        if (stem < sizeof name)
            snprintf(name, sizeof name, "%.*s", (int)stem, at);
        if (!a || !adapters_find(a, name, &info))
            return error_set(err, "no adapter \"%.*s\" is loaded", stem < 100 ? (int)stem : 100,
                             at);
        float scale = info.scale;
        if (stem < len) {
            char *end;
            scale = strtof(at + stem + 1, &end);
            if (end != at + len || end == at + stem + 1 || !(fabsf(scale) <= 1e6f))
                return error_set(err, "the scale of adapter \"%s\" is not a number", name);
        }
        if (!adapters_pick(&info, scale, picks, n, err))
            return false;
    }
    return true;
}

bool adapters_take(struct adapters *a, const struct lora_pick *picks, int n, struct error *err)
{
    bool ok = true;
    pthread_mutex_lock(&a->lock);
    for (int i = 0; ok && i < n; i++) {
        const struct adapter_slot *s = &a->slots[picks[i].adapter];
        if (s->state != SLOT_READY || s->info.serial != picks[i].serial)
            ok = error_set(err, "the adapter was unloaded meanwhile");
    }
    for (int i = 0; ok && i < n; i++)
        a->slots[picks[i].adapter].info.users++;
    pthread_mutex_unlock(&a->lock);
    return ok;
}

void adapters_give_back(struct adapters *a, const struct lora_pick *picks, int n)
{
    pthread_mutex_lock(&a->lock);
    for (int i = 0; i < n; i++)
        a->slots[picks[i].adapter].info.users--;
    pthread_mutex_unlock(&a->lock);
}
