/* Opens a model: chooses the device, then makes the parts in order. */
#include "engine/runtime.h"
#include "backend/backend.h"
#include "backend/devices.h"
#include "backend/kv_type.h"
#include "base/clock.h"
#include "base/error.h"
#include "base/mem.h"
#include "base/pool.h"
#include "base/sysmem.h"
#include "dist/join.h"
#include "engine/device.h"
#include "engine/draft_cost.h"
#include "engine/draft_open.h"
#include "engine/runtime_int.h"
#include "engine/uses.h"
#include "engine/workers.h"
#include "file/builtin.h"
#include "model/eagle.h"
#include "text/grammar/grammar.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <glob.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

enum { TIER_CONTEXT = 8192 };      /* tokens for which room is left before experts get it */
enum { GPU_LEAST_CONTEXT = 4096 }; /* a GPU with room for fewer tokens is not chosen by default */

/* The fraction of a GPU's memory that may be used. */
static double gpu_share(const struct runtime_options *opt)
{
    return opt->gpu_memory > 0 ? (double)opt->gpu_memory : 0.9;
}

/* Bytes of the GPU's memory that this process may still take. gpu_limit is of what this process takes, whatever others do. If
 * that is not counted, it is what is gone since the start (gpu_before). */
static size_t gpu_room(const struct runtime *rt, const struct runtime_options *opt,
                       const char *device)
{
    size_t room = device_room(device, gpu_share(opt));
    bool counted;
    size_t used = device_held(device, &counted);
    if (!counted)
        used = rt->gpu_before > room ? rt->gpu_before - room : 0;
    size_t left = opt->gpu_limit > used ? opt->gpu_limit - used : 0;
    return opt->gpu_limit && left < room ? left : room;
}

static bool check_cache(const struct runtime_options *opt, const struct network *net,
                        struct error *err)
{
    return kv_types_check(net, sizing_kv_type(opt->k_type), sizing_kv_type(opt->v_type), err);
}

/* The experts of each layer, (net.n_layers), with the bytes of their forms on the device and the CPU; mem_free. */
static struct expert_layer *expert_layers(struct runtime *rt, const struct config *c,
                                          const struct outline *outline, const char *device,
                                          struct error *err)
{
    struct backend_options cpu = {
        .device = device_default(DEVICE_CPU), .threads = 1, .host_experts = true};
    struct expert_layer *layers = mem_zalloc((size_t)outline->net.n_layers + 1, sizeof *layers);
    struct backend *host = backend_open(&cpu, err);
    bool ok = host && fit_experts(rt->file, c, outline, device, host, layers, err);
    if (host)
        host->ops->close(host);
    if (ok)
        return layers;
    mem_free(layers);
    return NULL;
}

/* Tokens of the cache for which room is left before experts get the rest, all sequences together: each one's context as long as
 * that is few, else a quarter of that of the least number of sequences. */
static size_t tokens_before_experts(const struct runtime_options *opt, int trained, int max_seqs)
{
    size_t tokens = opt->context > 0 ? (size_t)opt->context : TIER_CONTEXT;
    size_t seqs = (size_t)(max_seqs < DEVICE_LEAST_SEQS ? max_seqs : DEVICE_LEAST_SEQS);
    tokens = tokens < (size_t)trained ? tokens : (size_t)trained;
    size_t all = tokens * (size_t)max_seqs, some = tokens * seqs / 4;
    all = all < TIER_CONTEXT ? all : TIER_CONTEXT;
    some = all > some ? all : some;
    return some > tokens ? some : tokens;
}

/* If the host's memory has no room for its experts, it reads those used least from the file. */
static void offload_to_file(struct runtime *rt, struct opening *o)
{
    size_t usable = sizing_host_room(o->opt, 0, 0).usable, *bytes = &o->device.expert_memory;
    struct error note = {0};
    if (*bytes || !usable || o->offload.host <= usable)
        return;
    *bytes = usable;
    error_set(&note,
              "of them %.1f GB are in memory, the others are read from the file "
              "(--expert-memory)",
              (double)usable * 1e-9);
    sizing_add_notice(&rt->notice, &note);
}

/* Leaves experts in host memory, if the user says so or the GPU has no room for all. f: of the whole model; its weights
 * become those on the GPU. more: bytes of them that are not the model's own. */
static bool choose_offload(struct runtime *rt, const struct config *c,
                           const struct outline *outline, size_t more, struct opening *o,
                           struct device_facts *f, struct error *err)
{
    const struct runtime_options *opt = o->opt;
    const char *device = o->device.device;
    bool wished = offload_is_wished(&opt->offload);
    struct network_max max;
    network_measure(&outline->net, &max);
    bool may = max.n_expert && join_outlook(device, 0).processes == 1 && device_offloads(device) &&
               !opt->backend.deterministic;
    if (f->room <= 1 || (!may && !wished))
        return true;
    if (!may)
        return error_set(err, "--n-cpu-moe, --cpu-moe, -ot: %s",
                         !max.n_expert              ? "the model has no experts"
                         : !device_offloads(device) ? "this device does not share experts with the "
                                                      "CPU, --device cuda does"
                         : opt->backend.deterministic ? "not with --deterministic"
                                                      : "for one process, without ranks");
    struct fit_weights w;
    if (!fit_weights(rt->file, c, outline, device, NULL, &w, err))
        return false;
    f->weights = fit_memory(&w) + more;
    if (!wished && f->weights + f->kv + f->scratch <= f->room)
        return true;
    struct expert_layer *layers = expert_layers(rt, c, outline, device, err);
    if (!layers)
        return false;
    int seqs = sizing_limits(opt, true, 1).max_seqs;
    size_t kv =
        tokens_before_experts(opt, c->context, seqs) * sizing_token_bytes(opt, &outline->net);
    size_t experts = 0, largest = 0, layer = 0;
    for (int i = 0; i < outline->net.n_layers; i++) {
        size_t each = layers[i].n_expert ? layers[i].bytes / (size_t)layers[i].n_expert : 0;
        experts += layers[i].bytes;
        largest = each > largest ? each : largest;
        layer = layers[i].bytes > layer ? layers[i].bytes : layer;
    }
    o->copy_bytes = device_copy_bytes(device, largest, layer);
    size_t rest = f->weights - experts,
           margin = f->room / 64 + o->copy_bytes; /* what rounding takes, too */
    size_t beside = rest + (kv > f->kv ? kv : f->kv) + f->scratch + margin;
    /* Those in the file as well are not exchanged: the host has no place of its own for each. */
    size_t host_room = opt->backend.expert_memory ? 0 : sizing_host_room(opt, 0, 0).usable;
    bool ok = offload_choose(layers, outline->net.n_layers, &opt->offload,
                             f->room > beside ? f->room - beside : 0, host_room, &o->offload, err);
    mem_free(layers);
    if (ok && o->offload.n_host)
        f->weights = rest + o->offload.device;
    return ok;
}

static void tell_offload(struct runtime *rt, struct opening *o)
{
    struct error note = {0};
    o->device.host_experts = true;
    o->device.host_all = o->offload.all;
    if (o->offload.all)
        error_set(&note,
                  "the experts used most are on the GPU (%.1f of %.1f GB); the CPU computes the "
                  "others (--gpu-memory, --n-cpu-moe)",
                  (double)o->offload.device * 1e-9, (double)o->offload.host * 1e-9);
    else
        error_set(&note,
                  "experts of %d of %d layers (%.1f of %.1f GB) are in host memory and computed "
                  "on the CPU (--n-cpu-moe)",
                  o->offload.layers, o->offload.of, (double)o->offload.host * 1e-9,
                  (double)(o->offload.host + o->offload.device) * 1e-9);
    sizing_add_notice(&rt->notice, &note);
    offload_to_file(rt, o);
}

/* "auto" becomes the GPU if there is one and the model fits, else the CPU. If a named GPU cannot hold the model, that
 * is an error before anything is loaded. */
static bool choose_device(struct runtime *rt, const struct config *c, const struct outline *outline,
                          const struct model_size *size, size_t more, struct opening *o,
                          struct error *err)
{
    const struct runtime_options *opt = o->opt;
    const struct network *net = &outline->net;
    struct backend_options *out = &o->device;
    *out = opt->backend;
    enum device_kind asked = device_kind(out->device);
    bool is_auto = asked == DEVICE_AUTO;
    if (!is_auto && asked != DEVICE_GPU)
        return true;
    if (is_auto && out->expert_memory && !offload_is_wished(&opt->offload)) {
        out->device = device_default(DEVICE_CPU);
        if (device_count("auto") > 0)
            error_set(&rt->notice, "--expert-memory: running on the CPU, not on the GPU");
        return true;
    }
    struct device_facts f = {.asked = asked,
                             .name = out->device,
                             .deterministic = out->deterministic,
                             .no_repack = out->no_repack,
                             .isa_forced = getenv("STEEL_ISA") != NULL};
    int least = c->context < GPU_LEAST_CONTEXT ? c->context : GPU_LEAST_CONTEXT;
    struct runtime_options fewest = *opt; /* with the least number of sequences */
    if (fewest.max_seqs_gpu > DEVICE_LEAST_SEQS)
        fewest.max_seqs_gpu = DEVICE_LEAST_SEQS;
    struct step_limits lim = sizing_limits(&fewest, true, 1);
    struct join_outlook look = join_outlook(out->device, device_count(out->device));
    f.n_params = size->n_params / look.processes;
    f.weights = size->bytes / (size_t)look.processes;
    f.kv = (size_t)(opt->context > 0 ? opt->context : least) * sizing_token_bytes(opt, net) +
           (size_t)lim.max_seqs * kvcache_state_bytes(net);
    f.scratch = sizing_gpu_step_bytes(opt, net, &lim);
    if (is_auto)
        out->device = device_default(DEVICE_GPU);
    out->device = join_gpu(out->device, device_count(out->device), rt->gpu, sizeof rt->gpu);
    if (is_auto && (f.isa_forced || size->bytes < DEVICE_SMALL_MODEL || !device_count("auto")))
        f.room = 0;
    else if ((f.deterministic && is_auto) || f.no_repack)
        f.room = 1; /* a GPU that will not be used is not initialised */
    else if (rt->gpu_before = device_room(out->device, gpu_share(opt)), rt->gpu_before)
        f.room = gpu_room(rt, opt, out->device) / (size_t)look.on_gpu;
    if (!choose_offload(rt, c, outline, more, o, &f, err))
        return false;
    enum device_kind chosen = device_choose(&f, &rt->notice);
    if (chosen != DEVICE_GPU && is_auto)
        out->device = device_default(chosen);
    if (chosen != DEVICE_GPU)
        offload_free(&o->offload);
    if (o->offload.n_host)
        tell_offload(rt, o);
    return is_auto || device_fits(&f, err);
}

static bool check_adapters(const struct runtime_options *opt, const struct backend *be,
                           struct error *err)
{
    return !sizing_has_adapters(opt) || be->ops->adapters ||
           error_set(err, "LoRA adapters are not supported on %s", be->ops->name);
}

/* Loads the adapters of the options. rank: for bounds.lora_rank. */
static bool load_adapters(struct runtime *rt, const struct runtime_options *opt, int *rank,
                          struct error *err)
{
    if (!sizing_has_adapters(opt))
        return true;
    rt->adapters = adapters_new(rt->model, rt->file);
    for (int i = 0; i < opt->n_loras; i++)
        if (adapters_load(rt->adapters, opt->loras[i].name, opt->loras[i].path, opt->loras[i].scale,
                          err) != ADAPTER_OK)
            return false;
    *rank = adapters_settle(rt->adapters, LORA_MAX_PARTS * opt->lora_rank);
    return true;
}

/* Opens the GPU. If it was chosen by default and lacks a part of this network, the CPU runs it, with a notice. */
static bool open_gpu(struct runtime *rt, const struct runtime_options *opt,
                     const struct network *net, struct backend_options *device, struct error *err)
{
    struct error why = {0};
    rt->be = backend_open(device, err);
    if (!rt->be)
        return false;
    if (device_kind(opt->backend.device) != DEVICE_AUTO)
        return check_adapters(opt, rt->be, err) && check_cache(opt, net, err);
    if (rt->be->ops->supports(rt->be, net, &why) && check_adapters(opt, rt->be, &why) &&
        check_cache(opt, net, &why))
        return true;
    rt->be->ops->close(rt->be);
    rt->be = NULL;
    device->device = device_default(DEVICE_CPU);
    error_set(&rt->notice, "running on the CPU: %s", why.msg);
    return true;
}

static enum model_parts parts_of(const struct runtime_options *opt, const struct runtime *rt)
{
    return (opt->embed  ? MODEL_HEADLESS
            : rt->draft ? MODEL_DRAFTING
                        : MODEL_PLAIN) |
           (opt->embeds || rt->sees ? MODEL_SEEING : MODEL_PLAIN);
}

/* Chooses the sources of drafts from the file and the options. */
static bool choose_draft(struct runtime *rt, const struct runtime_options *opt,
                         const struct config *c, struct error *err)
{
    enum { HEAD_AUTO = 3, EAGLE_AUTO = 6 };
    const unsigned text = 1u << DRAFT_TEXT, head = 1u << DRAFT_HEAD, small = 1u << DRAFT_MODEL;
    bool fixed = opt->draft > 0, is_small = opt->draft_model && !rt->eagle;
    bool has_head = c->n_mtp || rt->eagle;
    unsigned from = opt->draft_from     ? opt->draft_from
                    : fixed && is_small ? small
                    : fixed             ? head
                                        : text | head | small | 1u << DRAFT_GRAMMAR;
    if (opt->draft > (from & head ? DRAFT_MOST : DRAFT_DEPTH))
        return error_set(err, "%d draft tokens; at most %d", opt->draft,
                         from & head ? DRAFT_MOST : DRAFT_DEPTH);
    if (from & head && !(from & text) && !has_head && opt->draft && (fixed || opt->draft_from))
        return error_set(err, "%s: the model has no block that drafts tokens ahead (--draft)",
                         rt->file->path);
    if (from == small && opt->draft && !is_small)
        return error_set(err, "--draft model: %s",
                         rt->eagle ? "--draft-model is an EAGLE-3 head (--draft head)"
                                   : "no draft model is given (--draft-model)");
    if (opt->draft_model && opt->embed)
        return error_set(err, "--draft-model: embeddings need no drafts");
    if (opt->draft_model && (!opt->draft || !(from & (is_small ? small : head))))
        return error_set(err, "--draft-model: --draft excludes it");
    rt->draft_from = !opt->draft || opt->embed ? 0 : from;
    rt->draft_from &= has_head ? ~0u : ~head;
    rt->draft_from &= is_small ? ~0u : ~small;
    rt->draft_fixed = fixed ? opt->draft : 0;
    rt->draft = !(rt->draft_from & head) ? 0
                : fixed                  ? opt->draft
                : rt->eagle              ? EAGLE_AUTO
                                         : HEAD_AUTO;
    return true;
}

/* Whether the tower fits the text model: its features have the width of the stream, for each level of deepstack. */
static bool tower_fits(const struct tensorfile *f, const struct config *text, struct config *c,
                       struct tower_config *t, struct error *err)
{
    if (!tower_load(f, c, t, err))
        return false;
    if (t->n_out == text->n_embd && t->n_levels == text->n_deepstack &&
        (!tower_has_grid_positions(t) || text->rope.sections[0] > 0))
        return true;
    return error_set(err, "%s: this image tower is not that of a %s model with a width of %d",
                     f->path, text->arch_name, text->n_embd);
}

/* Opens the file of a GGUF's tower: the one that is named, else the built-in model's own, or beside MODEL.gguf
 * mmproj-MODEL.gguf, as `steel convert` names it, or the first mmproj*.gguf. False: there is none. */
static bool open_mmproj(struct runtime *rt, const char *named, struct error *err)
{
    struct buf path = {0};
    const char *slash = strrchr(rt->file->path, '/');
    glob_t found = {0};
    if (!named && builtin_named(rt->file->path)) {
        named = builtin_tower(rt->file->path);
    } else if (!named) {
        size_t folder = slash ? (size_t)(slash - rt->file->path) + 1 : 0;
        buf_addf(&path, "%.*smmproj-%s", (int)folder, rt->file->path, rt->file->path + folder);
        if (!access(path.p, R_OK)) {
            named = path.p;
        } else {
            path.len = folder;
            buf_adds(&path, "mmproj*.gguf");
            if (!strpbrk(path.p, "?[") && !glob(path.p, 0, NULL, &found) && found.gl_pathc)
                named = found.gl_pathv[0];
        }
    }
    rt->mmproj = named ? tensorfile_open(named, err) : NULL;
    globfree(&found);
    buf_clear(&path);
    return rt->mmproj != NULL;
}

/* Whether an image tower will be loaded, from the model's file or its mmproj, on the model's device. text: the config
 * with deepstack. */
static bool choose_images(struct runtime *rt, const struct runtime_options *opt,
                          struct model_size *size, struct error *err)
{
    struct error why = {0};
    struct tower_config tower;
    struct model_size more;
    struct config *c = mem_zalloc(1, sizeof *c), *text = mem_zalloc(1, sizeof *text);
    bool named = opt->images && opt->mmproj, ranks = workers_wait();
    rt->sees = false;
    if (opt->images && config_load(rt->file, text, &why)) {
        if (!rt->mmproj && (named || rt->file->is_gguf))
            open_mmproj(rt, opt->mmproj, &why);
        const struct tensorfile *f = rt->mmproj ? rt->mmproj : rt->file;
        if (ranks && tower_present(f))
            error_set(&why, "on several ranks the model reads text only, no images");
        else if (tower_present(f) || (named && !why.msg[0]))
            rt->sees = tower_fits(f, text, c, &tower, &why);
        if (rt->sees) {
            model_measure(f, c, &more);
            size->bytes += more.bytes;
        }
    }
    mem_free(text);
    mem_free(c);
    if (named && !rt->sees)
        return error_set(err, "%s", why.msg[0] ? why.msg : "no image tower");
    if (!rt->mmproj || ranks) /* a file beside the model may belong to another one */
        sizing_add_notice(&rt->notice, &why);
    return true;
}

/* A tower that cannot be opened leaves a model that reads text. On a GPU its memory is taken before the cache's. */
static void open_images(struct runtime *rt, const struct runtime_options *opt, const char *device)
{
    struct error why = {0};
    struct encoder_options o = {.backend.device = device,
                                .backend.threads = opt->backend.threads,
                                .backend.deterministic = opt->backend.deterministic,
                                .backend.background = true,
                                .kv_type = opt->k_type == DT_F32 ? DT_F32 : DT_NONE,
                                .max_features = opt->image_features};
    if (!rt->sees)
        return;
    rt->encoder = encoder_open(rt->mmproj ? rt->mmproj : rt->file, &o, &why);
    if (!rt->encoder) {
        rt->sees = false;
        error_prefix(&why, "no images");
        sizing_add_notice(&rt->notice, &why);
    }
}

/* Measures the weights and the working memory on the open CPU backend. size: of the file, with adapters and tower. */
static void measure_host(struct runtime *rt, const struct config *c, const struct outline *outline,
                         const struct model_size *size, struct opening *o)
{
    const struct runtime_options *opt = o->opt;
    const struct plan_ops *plan = rt->be->ops->plan;
    struct error why; /* loading reports it */
    size_t weights = size->bytes, token = sizing_token_bytes(opt, &outline->net);
    o->measured = fit_weights(rt->file, c, outline, NULL, rt->be, &o->weights, &why);
    if (o->measured)
        weights =
            fit_memory(&o->weights) + fit_mapped(&o->weights) + o->more_bytes + o->small_bytes;
    size_t most = token ? sysmem_available("") / token : 0;
    struct cache_size longest = {.context = opt->context > 0 ? opt->context : c->context};
    if (most && (size_t)longest.context > most)
        longest.context = (int)most;
    struct bounds bounds = sizing_bounds(opt, &o->limits, &longest);
    o->step = plan ? plan->step_bytes(rt->be, &outline->net, &bounds)
                   : sizing_step_bytes(&outline->net, &o->limits);
    o->room = sizing_host_room(opt, weights, o->step);
}

/* Bytes of the experts that `bytes` of memory hold: as many of each layer as of any other (backend/cpu/tier.c). */
static size_t tier_memory(size_t bytes, size_t all, int n_expert)
{
    double share = all ? (double)bytes / (double)all : 1, n = floor(share * n_expert + 1e-9);
    return n >= n_expert ? all : (size_t)((double)all / n_expert * n);
}

/* If the weights do not fit the host's memory but all except experts do, experts stay in the file and what memory is left
 * holds those used most; or as many as the user said. */
static bool choose_tier(struct runtime *rt, const struct network *net, struct opening *o,
                        struct error *err)
{
    const struct runtime_options *opt = o->opt;
    struct cache_room *r = &o->room;
    struct fit_weights *w = &o->weights;
    size_t *bytes = &o->device.expert_memory, all = w->memory[FIT_EXPERTS];
    size_t token = sizing_token_bytes(opt, net),
           least = (size_t)(o->trained < 512 ? o->trained : 512);
    size_t rest = r->taken > all ? r->taken - all : 0;
    struct network_max max;
    network_measure(net, &max);
    bool one = join_outlook(o->device.device, 0).processes == 1;
    if (*bytes && (!rt->be->ops->tier || !one || opt->backend.no_repack))
        return error_set(err, "--expert-memory: experts are read from the file %s",
                         !one                     ? "in one process only, without ranks"
                         : opt->backend.no_repack ? "or used there (--no-repack), not both"
                                                  : "on the CPU only");
    if (!*bytes && one && o->measured && rt->be->ops->tier && r->free && all && max.n_expert &&
        !opt->backend.no_repack && w->fixed_experts <= all / 64 &&
        r->taken + least * token > r->free) {
        size_t tokens = opt->context > 0 ? (size_t)opt->context : TIER_CONTEXT;
        tokens = tokens < (size_t)o->trained ? tokens : (size_t)o->trained;
        size_t kv = tokens * token * (size_t)o->limits.max_seqs / 4;
        kv = kv > least * token ? kv : least * token;
        size_t few = all / (size_t)max.n_expert * (size_t)(max.n_expert_used + 1);
        size_t left = r->usable > rest + kv ? r->usable - rest - kv : 0;
        if (left < few)
            return true; /* sizing_cache says what is missing */
        *bytes = left;
        struct error note = {0};
        error_set(&note,
                  "%.1f GB of %.1f GB of experts are in memory, the others are read from "
                  "the file (--expert-memory)",
                  (double)left * 1e-9, (double)all * 1e-9);
        sizing_add_notice(&rt->notice, &note);
        rt->be->ops->close(rt->be);
        rt->be = backend_open(&o->device, err);
    }
    if (*bytes && o->measured && all &&
        tier_memory(*bytes, all, max.n_expert) < 2 * all / (size_t)max.n_expert)
        return error_set(err,
                         "%s: --expert-memory: %zu bytes hold fewer than two experts of a layer",
                         rt->file->path, *bytes);
    if (rt->be && *bytes && o->measured) {
        w->mapped[FIT_EXPERTS] = all;
        w->memory[FIT_EXPERTS] = tier_memory(*bytes, all, max.n_expert);
        r->taken = rest + w->memory[FIT_EXPERTS];
    }
    return rt->be != NULL;
}

/* The draft model's memory, if it may run on the model's device. */
static bool measure_small(const struct runtime *rt, const struct runtime_options *opt,
                          struct opening *o, struct error *err)
{
    o->small_bytes = 0;
    if (!(rt->draft_from & 1u << DRAFT_MODEL) || !draft_open_shares(opt, opt->backend.device))
        return true;
    bool gpu = device_kind(opt->backend.device) == DEVICE_GPU;
    return draft_open_measure(opt, gpu, &o->small_bytes, err);
}

/* Leaves in a config what this runtime loads. */
static void choose_parts(const struct runtime *rt, const struct runtime_options *opt,
                         struct config *c)
{
    c->eagle = rt->eagle;
    model_choose(c, parts_of(opt, rt));
}

/* Decides everything that can be decided before loading, and opens the device. */
static bool prepare_with(struct runtime *rt, const struct runtime_options *opt, struct opening *o,
                         struct error *err)
{
    struct config c;
    struct outline outline = {0};
    struct model_size size;
    if (!config_load(rt->file, &c, err))
        return false;
    if (c.headless && !opt->embed)
        return error_set(err,
                         "%s: a %s model makes embeddings, not text: `steel embed`, or "
                         "`steel serve --embedding`",
                         rt->file->path, c.arch_name);
    if (!choose_draft(rt, opt, &c, err) ||
        (rt->eagle && !eagle_fits(rt->eagle, &c, rt->file->path, err)))
        return false;
    choose_parts(rt, opt, &c);
    if (!outline_load(rt->file, &c, &outline, err))
        return false;
    model_measure(rt->file, &c, &size);
    size_t own = size.bytes;
    size.bytes += adapters_bytes(opt->loras, opt->n_loras);
    const struct network *net = &outline.net;
    struct backend_options *device = &o->device;
    o->opt = opt;
    o->trained = c.context;
    offload_free(&o->offload);
    if (opt->gpu_layers > 0 && opt->gpu_layers < c.n_layers) {
        outline_free(&outline);
        return error_set(
            err,
            "-ngl %d: a layer is not divided between GPU and CPU as a whole (the model "
            "has %d layers; -ngl 0 is --device cpu); --n-cpu-moe leaves the experts of "
            "layers to the CPU",
            opt->gpu_layers, c.n_layers);
    }
    bool ok = measure_small(rt, opt, o, err);
    size.bytes += o->small_bytes;
    ok = ok && choose_device(rt, &c, &outline, &size, size.bytes - own, o, err);
    if (ok && o->small_bytes && !draft_open_shares(opt, device->device)) {
        size.bytes -= o->small_bytes;
        o->small_bytes = 0;
    }
    if (ok && device_kind(device->device) == DEVICE_GPU)
        ok = open_gpu(rt, opt, net, device, err);
    if (ok && device_kind(device->device) != DEVICE_GPU) { /* nothing is beside a GPU */
        offload_free(&o->offload);
        device->host_experts = device->host_all = false;
        device->expert_memory = opt->backend.expert_memory;
    }
    if (ok && device_kind(device->device) == DEVICE_GPU)
        ok = choose_images(rt, opt, &size, err);
    if (ok && device_kind(device->device) != DEVICE_GPU) {
        o->limits = sizing_limits(opt, false, join_outlook(device->device, 0).stages);
        ok = choose_images(rt, opt, &size, err);
        o->limits.max_embeds = rt->sees ? o->limits.max_tokens : o->limits.max_embeds;
        o->more_bytes = size.bytes - own - o->small_bytes;
        rt->be = ok ? backend_open(device, err) : NULL;
        ok = rt->be && check_cache(opt, net, err);
        if (ok)
            measure_host(rt, &c, &outline, &size, o);
        ok = ok && choose_tier(rt, net, o, err) &&
             sizing_cache(opt, &c, net, &o->limits, o->room, &o->cache, &rt->notice, err);
    }
    outline_free(&outline);
    return ok;
}

/* The same, but leaves out the MTP block, which is on by default, if the model does not fit with it. without: storage
 * for the options in that case, which must stay as long as o. */
static bool prepare(struct runtime *rt, const struct runtime_options *opt,
                    struct runtime_options *without, struct opening *o, struct error *err)
{
    if (prepare_with(rt, opt, o, err))
        return true;
    if (!rt->draft || opt->draft != DRAFT_AUTO || opt->draft_from || rt->eagle)
        return false;
    if (rt->be)
        rt->be->ops->close(rt->be);
    rt->be = NULL;
    rt->notice = *err = (struct error){0};
    *without = *opt;
    without->draft_from = 1u << DRAFT_TEXT | 1u << DRAFT_GRAMMAR;
    if (opt->draft_model)
        without->draft_from |= 1u << DRAFT_MODEL;
    return prepare_with(rt, without, o, err);
}

static bool agree(struct comm *c, bool ok, struct error *err)
{
    return c ? c->agree(c, ok, err) : ok;
}

/* values (n) = the minimum over all processes. */
static bool take_minimum(struct comm *c, int64_t *values, int n, struct error *err)
{
    enum { MOST = 4 };
    int64_t mine[MOST] = {0}, all[COMM_MOST][MOST];
    CHECK(n <= MOST, "%d values", n);
    memcpy(mine, values, (size_t)n * sizeof *values);
    if (c && !c->share(c, mine, all, sizeof mine, err))
        return false;
    for (int i = 0; c && i < c->n_all; i++)
        for (int k = 0; k < n; k++)
            values[k] = all[i][k] < values[k] ? all[i][k] : values[k];
    return true;
}

/* The default number of sequences on a GPU with `free` bytes left. */
static int64_t gpu_sequences(const struct runtime_options *opt, const struct config *c,
                             const struct network *net, size_t free)
{
    return sizing_sequences(opt, net, c->context, free);
}

/* Sizes the steps and the cache on a GPU with `free` bytes left; fit: with the number of sequences. */
static bool gpu_cache(struct runtime_options *fit, const struct config *c,
                      const struct network *net, size_t free, struct step_limits *lim,
                      struct cache_size *cache, struct error *notice, struct error *err)
{
    *lim = sizing_limits(fit, true, 1);
    struct cache_room room = sizing_gpu_room(fit, net, c->context, free);
    return (fit->embed && sizing_texts(fit, c, net, lim, room, cache, notice)) ||
           sizing_cache(fit, c, net, lim, room, cache, notice, err);
}

static size_t room_beside(size_t room, size_t taken)
{
    return room > taken ? room - taken : 0;
}

/* On a GPU, decides the number of sequences and the cache from the memory that is left. Processes measure after all have
 * loaded, and agree on the minimum before any allocates. */
static bool fit_gpu(struct runtime *rt, const struct opening *o, struct step_limits *lim,
                    struct cache_size *cache, struct error *err)
{
    const struct config *c = &rt->model->config;
    const struct network *net = &rt->model->net;
    struct comm *comm = rt->be->comm;
    struct runtime_options fit = *o->opt;
    size_t share = comm && comm->n_on_device > 1 ? (size_t)comm->n_on_device : 1;
    size_t copies = o->offload.n_host ? o->copy_bytes : 0;
    size_t free = room_beside(gpu_room(rt, o->opt, o->device.device), copies) / share;
    int64_t seqs = gpu_sequences(&fit, c, net, free);
    if (!take_minimum(comm, &seqs, 1, err))
        return false;
    fit.max_seqs_gpu = (int)seqs;
    free = room_beside(gpu_room(rt, o->opt, o->device.device), copies) / share;
    bool ok = gpu_cache(&fit, c, net, free, lim, cache, &rt->notice, err);
    int64_t least[] = {cache->tokens, cache->n_states, cache->context};
    if (!agree(comm, ok, err) || !take_minimum(comm, least, 3, err))
        return false;
    *cache = (struct cache_size){least[0], (int)least[1], (int)least[2]};
    return true;
}

/* Loads the model and its adapters, before memory is allocated for steps. */
static bool load(struct runtime *rt, const struct opening *o, int *lora_rank, struct error *err)
{
    const struct runtime_options *opt = o->opt;
    struct model_shard shard = rt->shard;
    struct config *own = mem_zalloc(1, sizeof *own);
    shard.n_host = o->offload.n_host;
    if (config_load(rt->file, own, err)) {
        choose_parts(rt, opt, own);
        rt->model = model_load_config(
            rt->file, rt->be, own, shard.cut || shard.n_host ? &shard : NULL, opt->progress, err);
    }
    mem_free(own);
    if (!rt->model)
        return false;
    const struct config *c = &rt->model->config;
    if (rt->tokenizer && tokenizer_n_vocab(rt->tokenizer) > c->n_vocab)
        return error_set(err, "%s: the tokenizer has %d tokens, the embedding %d rows",
                         rt->file->path, tokenizer_n_vocab(rt->tokenizer), c->n_vocab);
    if (rt->be->ops->tier && (o->device.expert_memory || rt->be->own_memory) &&
        !rt->be->ops->tier->settle(rt->be, err))
        return error_prefix(err, "%s", rt->file->path);
    return load_adapters(rt, opt, lora_rank, err);
}

static bool add_canary(struct runtime *rt, struct error *err)
{
    if (rt->be->comm)
        return error_set(err, "--kv-canary is for one process; ranks are not supported");
    rt->kv->canary = canary_new(rt->be, rt->kv->n_pages, err);
    return rt->kv->canary != NULL;
}

/* In the process that lays out steps. */
static bool open_small(struct runtime *rt, const struct opening *o, struct error *err)
{
    return !o->opt->draft_model || rt->eagle || draft_open(rt, o->opt, o->device.device, err);
}

bool runtime_build(struct runtime *rt, const struct opening *o, struct error *err)
{
    CHECK(o->opt && rt->be, "a runtime is built after it was prepared");
    bool gpu = device_kind(o->device.device) == DEVICE_GPU;
    struct comm *meet = gpu ? rt->be->comm : NULL; /* GPU processes decide sizes together */
    struct step_limits lim = o->limits;
    struct cache_size cache = o->cache;
    int lora_rank = 0;
    if (!agree(meet, load(rt, o, &lora_rank, err), err))
        return false;
    open_images(rt, o->opt, o->device.device);
    if (!agree(meet, open_small(rt, o, err), err))
        return false;
    if (gpu && !fit_gpu(rt, o, &lim, &cache, err))
        return false;
    lim.max_embeds = rt->sees ? lim.max_tokens : lim.max_embeds;
    const struct network *net = &rt->model->net;
    int page_len = o->opt->page_len > 0 ? o->opt->page_len : KVCACHE_PAGE;
    int64_t pages = sizing_pages(o->opt, &lim, cache.tokens);
    if (pages > INT32_MAX / page_len)
        return error_set(err, "a KV cache of %lld tokens is too large", (long long)cache.tokens);
    rt->context = cache.context;
    const struct embed *e = &net->embed;
    if (e->positions && rt->context > e->positions->n_out - e->pos_offset)
        return agree(meet,
                     error_set(err,
                               "a context of %d tokens: the model has embeddings of %d positions",
                               rt->context, e->positions->n_out - e->pos_offset),
                     err);
    rt->kv = kvcache_new(rt->be, net, sizing_kv_type(o->opt->k_type),
                         sizing_kv_type(o->opt->v_type), page_len, (int)pages, cache.n_states, err);
    if (!agree(meet, rt->kv != NULL, err) || !rt->kv || (o->opt->canary && !add_canary(rt, err)))
        return false;
    model_set_context(rt->model, rt->context);
    lim.lora_rank = lora_rank;
    lim.keep = rt->draft > 0;
    lim.drafts = rt->draft_from != 0;
    rt->step = stepper_new(rt->model, rt->kv, rt->context, &lim, err);
    if (rt->step)
        uses_load(rt->be, rt->file->path);
    return rt->step != NULL;
}

/* Before anything large is loaded. */
static bool match_small(struct runtime *rt, const struct runtime_options *opt, struct error *err)
{
    struct config *c = mem_zalloc(1, sizeof *c);
    bool ok =
        config_load(rt->file, c, err) && draft_open_match(rt, opt->draft_model, c->n_vocab, err);
    mem_free(c);
    return ok;
}

/* Opens the head that drafts, if opt->draft_model is one and no small model. */
static bool open_eagle(struct runtime *rt, const struct runtime_options *opt, struct error *err)
{
    struct tensorfile *f = opt->draft_model ? tensorfile_open(opt->draft_model, err) : NULL;
    bool is = f && eagle_is(f);
    if (opt->draft_model && !f)
        return error_prefix(err, "--draft-model");
    if (!is) {
        tensorfile_close(f);
        return true;
    }
    if (workers_wait() || opt->draft_device) {
        error_set(err, "%s: an EAGLE-3 head drafts %s", f->path,
                  opt->draft_device ? "on the model's device (--draft-device)"
                                    : "in one process only, without ranks");
        tensorfile_close(f);
    } else {
        rt->eagle = eagle_open(f, err);
    }
    return rt->eagle || error_prefix(err, "--draft-model");
}

/* Bytes of host memory that weights take. */
static size_t host_weights(const struct runtime *rt, const struct opening *o)
{
    size_t most = o->device.expert_memory;
    if (rt->be->own_memory)
        return most && most < o->offload.host ? most : o->offload.host;
    return o->measured && most ? fit_memory(&o->weights) + o->more_bytes : rt->model->bytes;
}

static bool start(struct runtime *rt, const char *path, const struct runtime_options *opt,
                  struct error *err)
{
    struct opening o = {0};
    struct runtime_options without;
    rt->file = tensorfile_open(path, err);
    if (!rt->file)
        return false;
    rt->tokenizer = tokenizer_load(rt->file, &rt->tokenizer_error);
    if (!open_eagle(rt, opt, err) || (opt->draft_model && !rt->eagle && !match_small(rt, opt, err)))
        return false;
    if (!prepare(rt, opt, &without, &o, err)) {
        offload_free(&o.offload);
        return false;
    }
    bool ok = workers_wait() ? workers_open(rt, path, &o, err) : runtime_build(rt, &o, err);
    if (ok)
        rt->weight_memory = host_weights(rt, &o);
    offload_free(&o.offload);
    return ok;
}

struct runtime *runtime_open(const char *path, const struct runtime_options *opt, struct error *err)
{
    struct runtime *rt = mem_zalloc(1, sizeof *rt);
    int64_t t0 = clock_ns();
    if (!start(rt, path, opt, err) || !tensorfile_is_whole(rt->file, TENSORFILE_ALL, err)) {
        runtime_close(rt);
        return NULL;
    }
    rt->load_ns = clock_ns() - t0;
    if (rt->be->comm)
        sizing_add_notice(&rt->notice, &rt->be->comm->notice);
    if (opt->profile)
        rt->be->profile = &rt->profile;
    return rt;
}

/* Fills in what fit_gpu would decide once the weights are there. */
static bool plan_gpu(struct runtime *rt, const struct config *c, const struct outline *outline,
                     struct opening *o, struct error *err)
{
    struct runtime_options fit = *o->opt;
    size_t free = gpu_room(rt, o->opt, o->device.device), weights;
    if (!fit_weights(rt->file, c, outline, o->device.device, rt->be, &o->weights, err))
        return false;
    o->measured = true;
    if (o->offload.n_host) {
        size_t most = o->device.expert_memory;
        o->weights.memory[FIT_EXPERTS] = o->offload.device;
        o->weights.host = most && most < o->offload.host ? most : o->offload.host;
        o->weights.mapped[FIT_EXPERTS] = o->offload.host - o->weights.host;
    }
    weights = fit_memory(&o->weights) + o->more_bytes + o->small_bytes;
    size_t copies = o->offload.n_host ? o->copy_bytes : 0;
    size_t left = room_beside(free, weights + copies);
    fit.max_seqs_gpu = (int)gpu_sequences(&fit, c, &outline->net, left);
    struct step_limits lim = sizing_limits(&fit, true, 1);
    o->room = sizing_gpu_room(&fit, &outline->net, c->context, left);
    o->step = o->room.taken + copies;
    o->room.free = free;
    o->room.usable = free;
    o->room.taken += weights + copies;
    o->limits = lim;
    return gpu_cache(&fit, c, &outline->net, left, &o->limits, &o->cache, &rt->notice, err);
}

/* The numbers of a decision, with the sizes of the cache that kvcache.c will make. */
static void describe_plan(const struct runtime *rt, const struct outline *outline,
                          const struct opening *o, struct runtime_plan *out)
{
    const struct network *net = &outline->net;
    const struct runtime_options *opt = o->opt;
    struct bounds b = sizing_bounds(opt, &o->limits, &o->cache);
    const struct plan_ops *plan = rt->be->ops->plan;
    snprintf(out->device, sizeof out->device, "%s", rt->be->ops->name);
    out->gpu = rt->be->own_memory;
    out->notice = rt->notice;
    out->weights = o->weights;
    out->more_weights = o->more_bytes;
    out->small = o->small_bytes;
    out->token_bytes = sizing_token_bytes(opt, net);
    out->state_bytes = kvcache_state_bytes(net);
    out->step = !out->gpu && out->fits && plan ? plan->step_bytes(rt->be, net, &b) : o->step;
    out->other = out->gpu ? 0 : sizing_host_other();
    out->kv = out->fits ? (size_t)b.n_pages * (size_t)b.page_len * out->token_bytes : 0;
    out->states = out->fits ? (size_t)o->cache.n_states * out->state_bytes : 0;
    out->free = o->room.free;
    out->usable = o->room.usable;
    out->tokens = o->cache.tokens;
    size_t beside = o->room.taken + out->states;
    out->room_tokens = -1;
    if (out->free && out->token_bytes)
        out->room_tokens =
            out->usable > beside ? (int64_t)((out->usable - beside) / out->token_bytes) : 0;
    out->context = o->cache.context;
    out->trained = o->trained;
    out->max_seqs = o->limits.max_seqs;
    out->max_tokens = o->limits.max_tokens;
    out->n_states = o->cache.n_states;
    out->threads = opt->backend.threads > 0 ? opt->backend.threads : pool_cpu_count();
}

bool runtime_plan(struct tensorfile *f, const struct runtime_options *opt, struct runtime_plan *out,
                  struct error *err)
{
    struct runtime *rt = mem_zalloc(1, sizeof *rt);
    struct opening *o = mem_zalloc(1, sizeof *o);
    struct config *c = mem_zalloc(1, sizeof *c);
    struct outline outline = {0};
    struct runtime_options without;
    *out = (struct runtime_plan){0};
    rt->file = f;
    out->fits = open_eagle(rt, opt, &out->why) && prepare(rt, opt, &without, o, &out->why);
    bool ok = rt->be && config_load(f, c, err);
    if (ok) {
        choose_parts(rt, o->opt, c);
        ok = outline_load(f, c, &outline, err);
    }
    if (ok && rt->be->own_memory && out->fits)
        out->fits = plan_gpu(rt, c, &outline, o, &out->why);
    if (ok && o->measured)
        describe_plan(rt, &outline, o, out);
    else if (!rt->be || !o->measured)
        ok = error_set(err, "%s", out->why.msg);
    outline_free(&outline);
    if (rt->be)
        rt->be->ops->close(rt->be);
    tensorfile_close(rt->mmproj);
    eagle_close(rt->eagle);
    mem_free(c);
    offload_free(&o->offload);
    mem_free(o);
    mem_free(rt);
    return ok;
}

const struct grammar_vocab *runtime_grammar_vocab(struct runtime *rt)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    if (!rt->grammar_vocab)
        rt->grammar_vocab = grammar_vocab_new(rt->tokenizer);
    pthread_mutex_unlock(&lock);
    return rt->grammar_vocab;
}

void runtime_close(struct runtime *rt)
{
    if (!rt)
        return;
    workers_close(rt);
    runtime_close(rt->small);
    draft_vocab_clear(&rt->small_vocab);
    if (rt->step)
        uses_save(rt->be, rt->file->path);
    stepper_free(rt->step);
    kvcache_free(rt->kv);
    adapters_free(rt->adapters);
    encoder_close(rt->encoder);
    model_free(rt->model);
    if (rt->be)
        rt->be->ops->close(rt->be);
    grammar_vocab_free(rt->grammar_vocab);
    tokenizer_free(rt->tokenizer);
    tensorfile_close(rt->mmproj);
    eagle_close(rt->eagle);
    tensorfile_close(rt->file);
    mem_free(rt);
}
