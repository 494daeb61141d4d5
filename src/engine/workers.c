/* A runtime over several processes: see workers.h. Owns the message that tells workers what to open. */
#include "engine/workers.h"
#include "backend/backend.h"
#include "backend/devices.h"
#include "base/mem.h"
#include "dist/follow.h"
#include "dist/join.h"
#include "dist/split.h"
#include "engine/runtime_int.h"

#include <stdio.h>
#include <string.h>

struct worker_adapter {
    char name[ADAPTER_NAME_MAX], path[4096];
    float scale;
};

/* What workers open, as decided by rank 0. */
struct worker_opening {
    char path[4096], device[64];
    char expert_stats[4096];    /* a file; "" = none */
    struct runtime_options opt; /* its pointers are invalid */
    struct join_shape shape;
    int timeout_s; /* --rank-timeout; lines send it, too, but there may be none */
    struct cache_size cache;
    struct step_limits limits;
    int draft; /* runtime.draft */
    unsigned draft_from;
    int n_adapters;
    struct worker_adapter adapters[];
};

static struct ranks *ranks_of(const struct runtime *rt)
{
    return rt->be ? ranks_from(rt->be->comm) : NULL;
}

/* In every process, once the device is open. */
static bool join(struct runtime *rt, struct ranks *r, struct join_shape shape, struct error *err)
{
    rt->shard = (struct model_shard){.cut = split_for, .arg = r};
    return join_ranks(r, shape, rt->be, rt->file, err);
}

bool workers_wait(void)
{
    return ranks_world() && !ranks_world()->taken;
}

static struct worker_opening *describe(const struct runtime *rt, const struct ranks *r,
                                       const char *path, const struct opening *o, size_t *bytes)
{
    const struct runtime_options *opt = o->opt;
    const char *asked = opt->backend.device;
    struct worker_opening *w;
    *bytes = sizeof *w + (size_t)opt->n_loras * sizeof *w->adapters;
    w = mem_zalloc(1, *bytes);
    w->opt = *opt;
    w->opt.progress = NULL;
    w->opt.loras = NULL;
    w->opt.draft_model = NULL; /* rank 0 has it */
    w->draft = rt->draft;
    w->draft_from = rt->draft_from;
    w->shape = (struct join_shape){r->tp_asked, r->pp_asked, r->ep_asked};
    w->timeout_s = atomic_load(&r->timeout_s);
    w->cache = o->cache;
    w->limits = o->limits;
    w->n_adapters = opt->n_loras;
    for (int i = 0; i < opt->n_loras; i++) {
        struct worker_adapter *a = &w->adapters[i];
        a->scale = opt->loras[i].scale;
        snprintf(a->name, sizeof a->name, "%s", opt->loras[i].name);
        snprintf(a->path, sizeof a->path, "%s", opt->loras[i].path);
    }
    snprintf(w->path, sizeof w->path, "%s", path);
    snprintf(w->expert_stats, sizeof w->expert_stats, "%s", r->expert_stats ? r->expert_stats : "");
    /* A GPU without a number: each process of a machine takes another one. */
    if (!asked || !strchr(asked, ':'))
        asked = device_default(device_kind(o->device.device));
    snprintf(w->device, sizeof w->device, "%s", asked);
    return w;
}

bool workers_open(struct runtime *rt, const char *path, const struct opening *o, struct error *err)
{
    struct ranks *r = ranks_world();
    size_t bytes;
    if (!path || strlen(path) >= sizeof((struct worker_opening *)0)->path)
        return error_set(err, "several processes need a model file");
    struct worker_opening *w = describe(rt, r, path, o, &bytes);
    r->taken = true; /* from here on a failure ends the workers as well */
    bool ok = follow_send_open(r, w, bytes) || ranks_ok(r, err);
    ok = ok && ranks_agree(r, true, err) && join(rt, r, w->shape, err);
    mem_free(w);
    r->following = ok && ranks_agree(r, runtime_build(rt, o, err), err);
    return r->following;
}

/* On a worker. False: rank 0 has received the error. */
static bool open_runtime(struct runtime *rt, struct ranks *r, const struct worker_opening *w,
                         const struct runtime_options *opt)
{
    struct error err = {0};
    struct opening o = {.opt = opt, .device = opt->backend, .limits = w->limits, .cache = w->cache};
    o.device.device = w->device;
    if (device_kind(w->device) == DEVICE_GPU)
        o.device.device = join_gpu(w->device, device_count(w->device), rt->gpu, sizeof rt->gpu);
    rt->draft = w->draft;
    rt->draft_from = w->draft_from;
    rt->file = tensorfile_open(w->path, &err);
    rt->be = rt->file ? join_open(&o.device, &err) : NULL;
    return ranks_agree(r, rt->be != NULL, &err) && rt->be && join(rt, r, w->shape, &err) &&
           ranks_agree(r, runtime_build(rt, &o, &err), &err);
}

static void *worker_open(struct ranks *r, const void *what, size_t bytes)
{
    const struct worker_opening *w = what;
    size_t n = (size_t)w->n_adapters;
    CHECK(bytes == sizeof *w + n * sizeof *w->adapters, "%zu bytes to open", bytes);
    struct runtime *rt = mem_zalloc(1, sizeof *rt);
    struct runtime_options opt = w->opt;
    struct adapter_ref *refs = mem_zalloc(n + 1, sizeof *refs);
    for (size_t i = 0; i < n; i++) {
        refs[i].scale = w->adapters[i].scale;
        refs[i].path = (char *)(uintptr_t)w->adapters[i].path;
        snprintf(refs[i].name, sizeof refs[i].name, "%s", w->adapters[i].name);
    }
    opt.loras = refs;
    atomic_store(&r->timeout_s, w->timeout_s);
    r->expert_stats = w->expert_stats[0] ? w->expert_stats : NULL;
    bool ok = open_runtime(rt, r, w, &opt);
    r->expert_stats = NULL; /* it pointed into w, and has been read */
    mem_free(refs);
    if (ok)
        return rt;
    runtime_close(rt);
    return NULL;
}

static bool worker_step(void *opened, struct batch *b, struct follow_step how, struct error *err)
{
    struct runtime *rt = opened;
    b->kv = rt->kv->layers;
    rt->be->deterministic = how.deterministic;
    return step_follow(rt->step, b, how.key, err);
}

static void worker_close(void *opened)
{
    runtime_close(opened);
}

int workers_run(void)
{
    static const struct follow_ops ops = {worker_open, worker_step, worker_close};
    return follow(ranks_world(), &ops);
}

void workers_close(struct runtime *rt)
{
    struct ranks *r = ranks_of(rt);
    if (r && r->following)
        follow_send_end(r);
}

int64_t workers_patience_ns(const struct runtime *rt)
{
    struct ranks *r = ranks_of(rt);
    if (!r || r->lined || !ranks_ok(r, NULL))
        return 0;
    return (int64_t)atomic_load(&r->timeout_s) * 1000000000;
}

void workers_keep_alive(struct runtime *rt)
{
    follow_send_alive(ranks_of(rt));
}
