/* Opening a model: the order in which its parts come to life, and the defaults they get. */
#include "engine/runtime.h"
#include "backend/kv_type.h"
#include "backend/backend.h"
#include "base/clock.h"
#include "base/cpu.h"
#include "base/mem.h"
#include "base/sysmem.h"
#include "engine/device.h"
#include "dist/split.h"
#include "engine/follow.h"
#include "quant/kvblock.h"
#include "text/grammar/grammar.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    GPU_SCRATCH = 1 << 30,    /* left for a step's working memory */
    GPU_LEAST_CONTEXT = 4096, /* tokens a GPU must have room for to be chosen unasked */
    HOST_SCRATCH = 64 << 20,
    LEAST_CONTEXT = 512, /* a model that has room for less than this is refused */
    TOKEN_EXTRA = 8,     /* bytes of bookkeeping for a token of the KV cache */
    CHECKPOINTS = 2,     /* of states, for each sequence that may run */
    LEAST_CHECKPOINTS = 8,
    MOST_CHECKPOINTS = 1 << 16,
};

/* Of the host's free memory, what weights and cache together may take. */
static const double HOST_SHARE = 0.8;

static int or_default(int value, int fallback)
{
    return value > 0 ? value : fallback;
}

static double gpu_share(const struct runtime_options *opt)
{
    return opt->gpu_memory > 0 ? (double)opt->gpu_memory : 0.9;
}

static enum dtype or_f16(enum dtype t)
{
    return t == DT_NONE ? DT_F16 : t;
}

static size_t token_bytes(const struct runtime_options *opt, const struct network *net)
{
    return kvcache_token_bytes(net, or_f16(opt->k_type), or_f16(opt->v_type));
}

/* Whether the cache that was asked for can hold what the network stores. */
static bool check_cache(const struct runtime_options *opt, const struct network *net,
                        struct error *err)
{
    return kv_types_check(net, or_f16(opt->k_type), or_f16(opt->v_type), err);
}

static struct step_limits limits_of(const struct runtime_options *opt, bool gpu)
{
    struct step_limits lim = {.max_seqs = or_default(opt->max_seqs, 1)};
    if (gpu && opt->max_seqs_gpu > 0)
        lim.max_seqs = opt->max_seqs_gpu;
    lim.max_tokens = or_default(opt->max_tokens, gpu ? 2048 : 512);
    /* Over stages a step is cut into as many parts (dist/pipeline.h): each as large as a step alone. */
    const struct ranks *r = ranks_world();
    if (!gpu && r && !r->taken && r->pp_asked > 1 && opt->max_tokens <= 0)
        lim.max_tokens *= r->pp_asked;
    if (gpu && lim.max_tokens < opt->max_tokens_gpu)
        lim.max_tokens = opt->max_tokens_gpu;
    if (lim.max_tokens < lim.max_seqs + opt->read_rows)
        lim.max_tokens = lim.max_seqs + opt->read_rows;
    lim.read_chunk = gpu ? 256 : 16;
    lim.max_out = or_default(opt->max_out, lim.max_seqs);
    lim.max_out = lim.max_out > opt->min_out ? lim.max_out : opt->min_out;
    lim.max_out += DRAFT_SEQS * (opt->draft == DRAFT_AUTO ? 1 : opt->draft);
    if (opt->embed && lim.max_out < lim.max_tokens)
        lim.max_out = lim.max_tokens;
    return lim;
}

size_t runtime_step_bytes(const struct network *net, const struct step_limits *lim)
{
    struct network_max max;
    network_measure(net, &max);
    size_t embd = (size_t)net->n_embd, heads = (size_t)max.heads, ff = (size_t)max.n_ff;
    int width = net->head.w ? net->n_vocab : net->n_embd;
    size_t used = (size_t)max.n_expert_used, ff_exp = (size_t)max.n_ff_exp;
    size_t wide = used * (embd + ff_exp) + ff + 5 * embd + 6 * heads + (size_t)max.qkv;
    return ((size_t)lim->max_tokens * wide + (size_t)lim->max_out * (size_t)width) * sizeof(float);
}

static bool wants_adapters(const struct runtime_options *opt)
{
    return opt->n_loras > 0 || opt->lora_rank > 0;
}

/* The same on a GPU: where adapters change mlps, gate, up and hidden units are floats of their own. */
static size_t gpu_step_bytes(const struct runtime_options *opt, const struct network *net,
                             const struct step_limits *lim)
{
    struct network_max max;
    network_measure(net, &max);
    size_t ff = (size_t)max.n_ff, pairs = (size_t)max.n_expert_used * (size_t)max.n_ff_exp;
    size_t wide = wants_adapters(opt) ? 2 * (ff > pairs ? ff : pairs) + 2 * ff : 0;
    return runtime_step_bytes(net, lim) + (size_t)lim->max_tokens * wide * sizeof(float);
}

/* How many ranks of this machine will have the same GPU, before they have met. */
static int likely_sharers(const struct backend_options *device, const struct ranks *r)
{
    int count = device_count(device->device);
    bool named = device->device && strchr(device->device, ':');
    if (!r || r->taken || count < 1)
        return 1;
    return named ? r->n_local : (r->n_local + count - 1) / count;
}

/* A GPU without a number: the ranks of a machine take its GPUs in turn. */
static void take_gpu(struct runtime *rt, struct backend_options *device)
{
    const struct ranks *r = ranks_world();
    int count = r ? device_count(device->device) : 0;
    if (count < 1 || device_kind(device->device) != DEVICE_GPU || strchr(device->device, ':'))
        return;
    snprintf(rt->gpu, sizeof rt->gpu, "%s:%d", device->device, r->local % count);
    device->device = rt->gpu;
}

/* "auto" becomes a device: the GPU where there is one and the model fits. A GPU that was named and
 * cannot hold the model is an error before anything is loaded. */
static bool choose_device(struct runtime *rt, const struct runtime_options *opt,
                          const struct config *c, const struct network *net,
                          const struct model_size *size, struct backend_options *out,
                          struct error *err)
{
    *out = opt->backend;
    enum device_kind asked = device_kind(out->device);
    bool is_auto = asked == DEVICE_AUTO;
    if (!is_auto && asked != DEVICE_GPU)
        return true;
    struct device_facts f = {.asked = asked,
                             .name = out->device,
                             .deterministic = out->deterministic,
                             .no_repack = out->no_repack,
                             .isa_forced = getenv("STEEL_ISA") != NULL};
    int least = c->context < GPU_LEAST_CONTEXT ? c->context : GPU_LEAST_CONTEXT;
    struct runtime_options fewest = *opt; /* sequences that must fit; more where there is room */
    if (fewest.max_seqs_gpu > DEVICE_LEAST_SEQS)
        fewest.max_seqs_gpu = DEVICE_LEAST_SEQS;
    struct step_limits lim = limits_of(&fewest, true);
    struct ranks *r = ranks_world();
    size_t parts = r && !r->taken ? (size_t)r->size : 1;
    f.n_params = size->n_params / (int64_t)parts;
    f.weights = size->bytes / parts;
    f.kv = (size_t)or_default(opt->context, least) * token_bytes(opt, net) +
           (size_t)lim.max_seqs * kvcache_state_bytes(net);
    f.scratch = GPU_SCRATCH / 2 + gpu_step_bytes(opt, net, &lim);
    int sharers = likely_sharers(out, r);
    if (is_auto)
        out->device = device_default(DEVICE_GPU);
    take_gpu(rt, out);
    if (is_auto && (f.isa_forced || size->bytes < DEVICE_SMALL_MODEL || !device_count("auto")))
        f.room = 0;
    else if (f.deterministic || f.no_repack)
        f.room = 1; /* there is one, and it will not be used: no need to wake it */
    else
        f.room = device_room(out->device, gpu_share(opt)) / (size_t)sharers;
    enum device_kind chosen = device_choose(&f, &rt->notice);
    if (chosen != DEVICE_GPU && is_auto)
        out->device = device_default(chosen);
    return is_auto || device_fits(&f, err);
}

/* Memory for the KV cache, as its size is decided. */
struct cache_room {
    size_t free;   /* what there is; 0 = not known */
    size_t usable; /* the share of it that may be in use */
    size_t beside; /* taken by weights and working memory */
    bool on_gpu;
};

/* What it comes to. */
struct cache_size {
    int64_t tokens;
    int n_states;
};

static double gb(double bytes)
{
    return bytes * 1e-9;
}

/* On the CPU: before anything is loaded. Weights computed from the file's own pages come and go. */
static struct cache_room host_room(const struct runtime_options *opt, const struct network *net,
                                   const struct model_size *size)
{
    struct step_limits lim = limits_of(opt, false);
    struct cache_room r = {.free = sysmem_available(""),
                           .beside = size->bytes + HOST_SCRATCH + runtime_step_bytes(net, &lim)};
    r.usable = (size_t)((double)r.free * HOST_SHARE);
    if (opt->backend.no_repack && r.beside > r.usable)
        r.beside -= size->bytes;
    return r;
}

/* On a GPU, for a token of a cache of codes: its keys and values of a layer as halves, which prompts
 * have for the longest sequence. */
static size_t halves_bytes(const struct runtime_options *opt, const struct network *net)
{
    int most = 0;
    for (int i = 0; i < net->n_layers; i++) {
        int k, v;
        mixer_cache_dims(&net->layers[i].mixer, &k, &v);
        most = k + v > most ? k + v : most;
    }
    bool coded = kv_quantised(or_f16(opt->k_type)) || kv_quantised(or_f16(opt->v_type));
    return coded ? 2 * (size_t)most : 0;
}

/* On a GPU: once the weights are there, and the adapters. sharers: ranks that have the same one, whose
 * weights are there too. */
static struct cache_room gpu_room(const struct runtime_options *opt, const struct network *net,
                                  int context, const struct backend_options *device, int sharers)
{
    struct step_limits lim = limits_of(opt, true);
    size_t room = device_room(device->device, gpu_share(opt)) / (size_t)sharers;
    size_t halves = halves_bytes(opt, net);
    struct cache_room r = {room, room, GPU_SCRATCH / 2 + gpu_step_bytes(opt, net, &lim), true};
    size_t left = room > r.beside ? room - r.beside : 0;
    size_t longest = (size_t)or_default(opt->context, context);
    size_t fit = left / (token_bytes(opt, net) + halves + TOKEN_EXTRA);
    r.beside += halves * (longest < fit ? longest : fit);
    return r;
}

/* On a GPU whose user named no number of sequences: as many as its cache holds. */
static int fit_sequences(const struct runtime_options *opt, const struct network *net, int context,
                         const struct cache_room *r)
{
    if (opt->max_seqs_gpu <= 0)
        return 0;
    size_t token = token_bytes(opt, net) + TOKEN_EXTRA;
    size_t left = r->usable > r->beside ? r->usable - r->beside : 0;
    if (opt->kv_tokens > 0)
        left = (size_t)opt->kv_tokens * token;
    else if (opt->kv_bytes && !opt->kv_bytes_host && opt->kv_bytes < left)
        left = opt->kv_bytes;
    return device_sequences(left, token, (1 + CHECKPOINTS) * kvcache_state_bytes(net),
                            or_default(opt->context, context), opt->max_seqs_gpu);
}

/* Slots for recurrent states: one for each sequence that may run, another where it may draft, and checkpoints as
 * memory allows.
 * They come out of the room that the keys and values would have. */
static int size_states(const struct runtime_options *opt, const struct network *net,
                       const struct step_limits *lim, struct cache_room *r)
{
    size_t slot = kvcache_state_bytes(net);
    if (!slot)
        return 0;
    int draft = lim->max_seqs < DRAFT_SEQS ? lim->max_seqs : DRAFT_SEQS;
    int own = lim->max_seqs + (net->mtp.fc ? draft : 0);
    r->beside += slot * (size_t)own;
    size_t n = CHECKPOINTS * (size_t)lim->max_seqs, most = SIZE_MAX;
    n = n < LEAST_CHECKPOINTS ? LEAST_CHECKPOINTS : n;
    if (opt->state_bytes)
        n = opt->state_bytes / slot;
    else if (r->free)
        most = r->usable > r->beside ? (r->usable - r->beside) / 4 / slot : 0;
    n = n < most ? n : most;
    n = n < MOST_CHECKPOINTS ? n : MOST_CHECKPOINTS;
    r->beside += n * slot;
    return own + (int)n;
}

static bool refuse_cache(struct error *err, const char *what, int64_t tokens, double each,
                         const struct cache_room *r, int64_t fit)
{
    return error_set(
        err,
        "%s of %lld tokens needs %.2f GB beside %.2f GB of weights and working memory: "
        "%.2f GB are free, %.2f may be used; %lld tokens would fit",
        what, (long long)tokens, gb(each * (double)tokens), gb((double)r->beside),
        gb((double)r->free), gb((double)r->usable), (long long)fit);
}

/* One line of what the user should know. */
static void add_notice(struct runtime *rt, const struct error *what)
{
    size_t n = strlen(rt->notice.msg);
    snprintf(rt->notice.msg + n, sizeof rt->notice.msg - n, "%s%s", n ? "; " : "", what->msg);
}

/* The context and the size of the KV cache in tokens: as asked, or as many as could be of use and
 * fit. What was asked for and cannot fit is refused; less than the model's own context is said. */
static bool size_cache(struct runtime *rt, const struct runtime_options *opt,
                       const struct config *c, const struct network *net,
                       const struct step_limits *lim, struct cache_room room,
                       struct cache_size *out, struct error *err)
{
    struct cache_room *r = &room;
    int64_t *tokens = &out->tokens;
    out->n_states = size_states(opt, net, lim, r);
    double each = (double)(token_bytes(opt, net) + TOKEN_EXTRA);
    int least = c->context < LEAST_CONTEXT ? c->context : LEAST_CONTEXT;
    /* A bound nobody asked for is one of the host. */
    bool soft = !opt->kv_bytes || opt->kv_bytes_host;
    size_t bound = r->on_gpu && soft ? 0 : opt->kv_bytes;
    double left = r->usable > r->beside ? (double)(r->usable - r->beside) : 0;
    int64_t fit = r->free ? (int64_t)(left / each) : INT64_MAX;
    if (opt->context > 0 && opt->kv_tokens <= 0 && opt->context > fit)
        return refuse_cache(err, "a context", opt->context, each, r, fit);
    if (opt->kv_tokens > fit)
        return refuse_cache(err, "a KV cache", opt->kv_tokens, each, r, fit);
    if (fit < least && !opt->context && !opt->kv_tokens) {
        /* Tight: the share that is left to others goes first. */
        if ((double)r->beside + each * least > (double)r->free && !opt->backend.no_repack)
            return error_set(err,
                             "the model needs %.2f GB for weights and working memory and %.2f GB "
                             "for a context of %d tokens; %.2f GB are free",
                             gb((double)r->beside), gb(each * least), least, gb((double)r->free));
        fit = least;
    }
    int64_t cap = fit;
    if (bound && (double)bound / each < (double)cap)
        cap = (int64_t)((double)bound / each);
    if (cap < least)
        cap = least;
    rt->context = or_default(opt->context, c->context);
    if (soft && opt->context > cap)
        cap = opt->context;
    *tokens = opt->kv_tokens > 0 ? opt->kv_tokens : (int64_t)lim->max_seqs * rt->context;
    if (opt->kv_tokens <= 0 && *tokens > cap)
        *tokens = cap;
    if (opt->context > 0 || *tokens >= rt->context)
        return true;
    rt->context = (int)*tokens;
    struct error note = {0};
    error_set(&note,
              "context of %d tokens, where the model could have %d: the cache has %.2f GB (-c, "
              "--kv-type and --kv-memory change it)",
              rt->context, c->context, gb(each * (double)*tokens));
    add_notice(rt, &note);
    return true;
}

/* Of texts on a GPU: two steps are under way. False: only one of them fits, which `fit` asks for then. */
static bool size_texts(struct runtime *rt, struct runtime_options *fit, const struct config *c,
                       const struct network *net, const struct step_limits *lim,
                       struct cache_room room, struct cache_size *out)
{
    struct error why;
    struct runtime_options two = *fit;
    fit->kv_tokens = fit->kv_tokens > lim->max_tokens ? fit->kv_tokens : lim->max_tokens;
    two.kv_tokens = fit->kv_tokens + lim->max_tokens;
    return size_cache(rt, &two, c, net, lim, room, out, &why);
}

static bool check_adapters(const struct runtime_options *opt, const struct backend *be,
                           struct error *err)
{
    return !wants_adapters(opt) || be->ops->adapters ||
           error_set(err, "LoRA adapters are not supported on %s", be->ops->name);
}

/* Those to begin with; all of them, or an error. rank: the bound of steps. */
static bool load_adapters(struct runtime *rt, const struct runtime_options *opt, int *rank,
                          struct error *err)
{
    if (!wants_adapters(opt))
        return true;
    rt->adapters = adapters_new(rt->model, rt->file);
    for (int i = 0; i < opt->n_loras; i++)
        if (adapters_load(rt->adapters, opt->loras[i].name, opt->loras[i].path, opt->loras[i].scale,
                          err) != ADAPTER_OK)
            return false;
    *rank = adapters_settle(rt->adapters, LORA_MAX_PARTS * opt->lora_rank);
    return true;
}

/* Opens the GPU. If nobody asked for it and it lacks a part of this network, the CPU runs it, and that
 * is said. */
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
    return opt->embed ? MODEL_HEADLESS : rt->draft ? MODEL_DRAFTING : MODEL_PLAIN;
}

/* How many tokens are drafted, of what the file has and what is asked for. */
static bool choose_draft(struct runtime *rt, const struct runtime_options *opt,
                         const struct config *c, struct error *err)
{
    if (opt->draft > DRAFT_MOST)
        return error_set(err, "drafting %d tokens ahead; at most %d", opt->draft, DRAFT_MOST);
    if (opt->draft > 0 && !c->n_mtp)
        return error_set(err, "%s: the model has no block that drafts tokens ahead (--draft)",
                         rt->file->path);
    rt->draft = !c->n_mtp ? 0 : opt->draft == DRAFT_AUTO ? 1 : opt->draft;
    return true;
}

/* Before anything is loaded: the device, opened, and on the CPU the size of the cache. */
static bool plan_as(struct runtime *rt, const struct runtime_options *opt,
                    struct backend_options *device, struct cache_size *cache, struct error *err)
{
    struct config c;
    struct outline o = {0};
    struct model_size size;
    if (!config_load(rt->file, &c, err))
        return false;
    if (c.headless && !opt->embed)
        return error_set(err,
                         "%s: a %s model makes embeddings, not text: `steel embed`, or "
                         "`steel serve --embedding`",
                         rt->file->path, c.arch_name);
    if (!choose_draft(rt, opt, &c, err))
        return false;
    model_choose(&c, parts_of(opt, rt));
    if (!outline_load(rt->file, &c, &o, err))
        return false;
    model_measure(rt->file, &c, &size);
    size.bytes += adapters_bytes(opt->loras, opt->n_loras);
    bool ok = choose_device(rt, opt, &c, &o.net, &size, device, err);
    if (ok && device_kind(device->device) == DEVICE_GPU)
        ok = open_gpu(rt, opt, &o.net, device, err);
    if (ok && device_kind(device->device) != DEVICE_GPU) {
        struct step_limits lim = limits_of(opt, false);
        rt->be = backend_open(device, err);
        ok = rt->be && check_cache(opt, &o.net, err) &&
             size_cache(rt, opt, &c, &o.net, &lim, host_room(opt, &o.net, &size), cache, err);
    }
    outline_free(&o);
    return ok;
}

/* The same. A block that nobody asked for is left out where it takes the memory that the rest needs. */
static bool plan(struct runtime *rt, const struct runtime_options *opt,
                 struct backend_options *device, struct cache_size *cache, struct error *err)
{
    struct runtime_options without = *opt;
    if (plan_as(rt, opt, device, cache, err))
        return true;
    if (!rt->draft || opt->draft != DRAFT_AUTO)
        return false;
    if (rt->be)
        rt->be->ops->close(rt->be);
    rt->be = NULL;
    rt->notice = *err = (struct error){0};
    without.draft = 0;
    return plan_as(rt, &without, device, cache, err);
}

/* The least that any rank has of each. */
static bool take_least(struct ranks *r, int64_t *values, int n, struct error *err)
{
    enum { MOST = 4 };
    int64_t mine[MOST] = {0}, all[RANKS_MOST][MOST];
    CHECK(n <= MOST, "%d values", n);
    memcpy(mine, values, (size_t)n * sizeof *values);
    if (!ranks_share(r, mine, all, sizeof mine))
        return ranks_ok(r, err) && false;
    for (int i = 0; i < r->size; i++)
        for (int k = 0; k < n; k++)
            values[k] = all[i][k] < values[k] ? all[i][k] : values[k];
    return true;
}

/* On a GPU, by what the weights have left: how many sequences, and their cache. Ranks measure when all
 * have loaded, and take the least before any takes memory. */
static bool fit_gpu(struct runtime *rt, const struct runtime_options *opt,
                    const struct backend_options *device, struct cache_size *cache,
                    struct step_limits *lim, struct error *err)
{
    const struct config *c = &rt->model->config;
    const struct network *net = &rt->model->net;
    struct ranks *r = ranks_from(rt->be->comm);
    struct runtime_options fit = *opt;
    int sharers = r && r->comm.n_on_device > 1 ? r->comm.n_on_device : 1;
    struct cache_room room = gpu_room(opt, net, c->context, device, sharers);
    fit.max_seqs_gpu = fit_sequences(opt, net, c->context, &room);
    int64_t seqs = fit.max_seqs_gpu;
    if (r && !take_least(r, &seqs, 1, err))
        return false;
    fit.max_seqs_gpu = (int)seqs;
    *lim = limits_of(&fit, true);
    room = gpu_room(&fit, net, c->context, device, sharers);
    bool ok = (opt->embed && size_texts(rt, &fit, c, net, lim, room, cache)) ||
              size_cache(rt, &fit, c, net, lim, room, cache, err);
    if (!r)
        return ok;
    int64_t least[] = {cache->tokens, cache->n_states, rt->context};
    if (!ranks_agree(r, ok, err) || !take_least(r, least, 3, err))
        return false;
    *cache = (struct cache_size){least[0], (int)least[1]};
    rt->context = (int)least[2];
    return true;
}

/* The model, and what else has to be right before memory is taken for steps. */
static bool load(struct runtime *rt, const struct runtime_options *opt, int *lora_rank,
                 struct error *err)
{
    struct model_shard shard = {split_for, ranks_from(rt->be->comm)};
    rt->model = model_load(rt->file, rt->be, parts_of(opt, rt), shard.arg ? &shard : NULL,
                           opt->progress, err);
    if (!rt->model)
        return false;
    const struct config *c = &rt->model->config;
    if (rt->tokenizer && tokenizer_n_vocab(rt->tokenizer) > c->n_vocab)
        return error_set(err, "%s: the tokenizer has %d tokens, the embedding %d rows",
                         rt->file->path, tokenizer_n_vocab(rt->tokenizer), c->n_vocab);
    return load_adapters(rt, opt, lora_rank, err);
}

/* Model, cache and stepper, once the device is open. */
static bool build(struct runtime *rt, const struct runtime_options *opt,
                  const struct backend_options *device, struct cache_size *cache,
                  struct step_limits lim, struct error *err)
{
    bool gpu = device_kind(device->device) == DEVICE_GPU;
    struct ranks *r = gpu ? ranks_from(rt->be->comm) : NULL; /* who meet on the way */
    int lora_rank = 0;
    if (!ranks_agree(r, load(rt, opt, &lora_rank, err), err))
        return false;
    if (gpu && !fit_gpu(rt, opt, device, cache, &lim, err))
        return false;
    const struct network *net = &rt->model->net;
    int page_len = or_default(opt->page_len, 16);
    int64_t pages = (cache->tokens + page_len - 1) / page_len + lim.max_seqs;
    if (pages > INT32_MAX / page_len)
        return error_set(err, "a KV cache of %lld tokens is too large", (long long)cache->tokens);
    rt->kv = kvcache_new(rt->be, net, or_f16(opt->k_type), or_f16(opt->v_type), page_len,
                         (int)pages, cache->n_states, err);
    if (!ranks_agree(r, rt->kv != NULL, err))
        return false;
    model_set_context(rt->model, rt->context);
    lim.lora_rank = lora_rank;
    lim.keep = rt->draft > 0;
    rt->step = stepper_new(rt->model, rt->kv, rt->context, &lim, err);
    return rt->step != NULL;
}

/* Something that a file of the same name elsewhere would not have: sizes, and a little of each tensor. */
static uint64_t fingerprint(const struct tensorfile *f)
{
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < f->n_tensors; i++) {
        const struct tensor *t = &f->tensors[i];
        size_t n = t->bytes < 64 ? t->bytes : 64;
        for (const char *c = t->name; *c; c++)
            h = (h ^ (uint8_t)*c) * 1099511628211u;
        for (size_t k = 0; k < n; k++)
            h = (h ^ t->data[k]) * 1099511628211u;
        h = (h ^ t->bytes) * 1099511628211u;
        tensorfile_forget(f, t); /* another rank's, maybe */
    }
    tensorfile_forget_all(f);
    return h;
}

/* On all ranks: who has the same GPU. */
static bool find_sharers(struct backend *be, struct ranks *r, struct error *err)
{
    unsigned char mine[16] = {0}, all[RANKS_MOST][16];
    bool gpu = device_id(be, mine);
    if (!ranks_share(r, mine, all, sizeof mine))
        return ranks_ok(r, err) && false;
    struct comm *c = &r->comm;
    c->n_on_device = 0;
    c->own_devices = gpu;
    for (int i = 0; gpu && i < r->size; i++) {
        c->n_on_device += !memcmp(all[i], mine, sizeof mine);
        for (int k = 0; k < i; k++)
            c->own_devices = c->own_devices && memcmp(all[i], all[k], sizeof mine) != 0;
    }
    return true;
}

/* Experts change places by what the file says: everywhere alike. */
static bool same_stats(struct ranks *r, struct error *err)
{
    char said[64] = "none";
    struct error why = {0};
    struct tensorfile *f = r->expert_stats ? tensorfile_open(r->expert_stats, &why) : NULL;
    if (r->expert_stats)
        snprintf(said, sizeof said, "%016llx", f ? (unsigned long long)fingerprint(f) : 0);
    tensorfile_close(f);
    return ranks_same(r, "the expert statistics", said, err);
}

/* All choose experts for themselves, and must choose alike: by the same arithmetic. What a rank has of
 * a network depends on the kind of device, too (stages.h, split.h). */
static bool same_kernels(struct backend *be, struct ranks *r, struct error *err)
{
    unsigned char id[16];
    enum isa isa = ISA_REF;
    struct error ignored; /* opening the backend has said it */
    isa_choose(&isa, &ignored);
    bool gpu = device_id(be, id);
    return ranks_same(r, "the devices", gpu ? "a GPU (--device)" : "a CPU (--device)", err) &&
           ranks_same(r, "the kernels (STEEL_ISA)", gpu ? "those of a GPU" : isa_name(isa), err);
}

/* On the others: the device that rank 0 has. Where a machine has none, the job is not run by both kinds. */
static struct backend *open_same(const struct backend_options *opt, struct error *err)
{
    struct error why = {0};
    struct backend *be = backend_open(opt, &why);
    bool gpu = device_kind(opt->device) == DEVICE_GPU;
    if (!be && gpu)
        error_set(err, "the devices differ: rank 0 has a GPU, this one none that it can use: %s",
                  why.msg);
    else if (!be)
        *err = why;
    return be;
}

/* On all ranks: they are arranged, and agree on program, arguments and file. */
static bool join(struct runtime *rt, struct ranks *r, int tp, int pp, bool ep, struct error *err)
{
    char file[64];
    snprintf(file, sizeof file, "%zu tensors, %.3f GB, %016llx", rt->file->n_tensors,
             gb((double)tensorfile_bytes(rt->file)), (unsigned long long)fingerprint(rt->file));
    CHECK(rt->be, "ranks without a backend");
    if (!ranks_same(r, "the programs", r->program, err) ||
        !ranks_same(r, "the arguments", r->arguments, err) ||
        !ranks_same(r, "the model files", file, err) || !same_stats(r, err) ||
        !same_kernels(rt->be, r, err) || !ranks_arrange(r, tp, pp, ep, err))
        return false;
    rt->be->comm = ranks_comm(r);
    /* Tokens are rank 0's, also on its device; over stages it chooses as logits come (step.c). */
    rt->be->async = pp > 1;
    return find_sharers(rt->be, r, err);
}

/* On rank 0: the others are told, and open the same. */
static bool lead(struct runtime *rt, const char *path, const struct runtime_options *opt,
                 const struct backend_options *device, struct cache_size *cache,
                 struct step_limits lim, struct error *err)
{
    struct ranks *r = ranks_world();
    if (!path || strlen(path) >= sizeof((struct follow_plan *)0)->path)
        return error_set(err, "several ranks need a model file");
    struct follow_lora *loras = mem_zalloc((size_t)opt->n_loras + 1, sizeof *loras);
    for (int i = 0; i < opt->n_loras; i++) {
        const struct adapter_ref *l = &opt->loras[i];
        loras[i].scale = l->scale;
        snprintf(loras[i].name, sizeof loras[i].name, "%s", l->name);
        snprintf(loras[i].path, sizeof loras[i].path, "%s", l->path);
    }
    struct follow_plan *plan = mem_zalloc(1, sizeof *plan);
    plan->opt = *opt;
    plan->opt.progress = NULL;
    plan->opt.loras = NULL;
    plan->n_loras = opt->n_loras;
    plan->draft = rt->draft;
    plan->tp = r->tp_asked;
    plan->pp = r->pp_asked;
    plan->ep = r->ep_asked;
    plan->timeout_s = atomic_load(&r->timeout_s);
    plan->kv_tokens = cache->tokens;
    plan->n_states = cache->n_states;
    plan->context = rt->context;
    plan->limits = lim;
    snprintf(plan->path, sizeof plan->path, "%s", path);
    snprintf(plan->expert_stats, sizeof plan->expert_stats, "%s",
             r->expert_stats ? r->expert_stats : "");
    const char *asked = opt->backend.device, *name = asked && strchr(asked, ':') ? asked : NULL;
    snprintf(plan->device, sizeof plan->device, "%s",
             name ? name : device_default(device_kind(device->device)));
    r->taken = true; /* from here on the others end by themselves where this fails */
    bool ok = follow_tell_plan(r, plan, loras) || ranks_ok(r, err);
    ok = ok && ranks_agree(r, true, err) && join(rt, r, plan->tp, plan->pp, plan->ep, err);
    mem_free(plan);
    mem_free(loras);
    r->following = ok && ranks_agree(r, build(rt, opt, device, cache, lim, err), err);
    return r->following;
}

struct runtime *runtime_follow(const struct follow_plan *plan, const struct follow_lora *loras,
                               struct ranks *r, struct error *err)
{
    struct runtime *rt = mem_zalloc(1, sizeof *rt);
    struct runtime_options opt = plan->opt;
    struct cache_size cache = {plan->kv_tokens, plan->n_states};
    struct adapter_ref *refs = mem_zalloc((size_t)plan->n_loras + 1, sizeof *refs);
    for (int i = 0; i < plan->n_loras; i++) {
        refs[i].scale = loras[i].scale;
        refs[i].path = (char *)(uintptr_t)loras[i].path;
        snprintf(refs[i].name, sizeof refs[i].name, "%s", loras[i].name);
    }
    opt.loras = refs;
    atomic_store(&r->timeout_s, plan->timeout_s);
    r->expert_stats = plan->expert_stats[0] ? plan->expert_stats : NULL;
    rt->context = plan->context;
    rt->draft = plan->draft;
    opt.backend.device = plan->device;
    rt->file = tensorfile_open(plan->path, err);
    take_gpu(rt, &opt.backend);
    rt->be = rt->file ? open_same(&opt.backend, err) : NULL;
    bool ok = ranks_agree(r, rt->be != NULL, err) && rt->be &&
              join(rt, r, plan->tp, plan->pp, plan->ep, err) &&
              ranks_agree(r, build(rt, &opt, &opt.backend, &cache, plan->limits, err), err);
    mem_free(refs);
    r->expert_stats = NULL; /* was the plan's, and has been read */
    if (ok)
        return rt;
    runtime_close(rt);
    return NULL;
}

static bool start(struct runtime *rt, const char *path, const struct runtime_options *opt,
                  struct error *err)
{
    struct backend_options device = {0};
    struct cache_size cache = {0};
    rt->file = tensorfile_open(path, err);
    if (!rt->file)
        return false;
    rt->tokenizer = tokenizer_load(rt->file, &rt->tokenizer_error);
    if (!plan(rt, opt, &device, &cache, err))
        return false;
    struct step_limits lim = limits_of(opt, device_kind(device.device) == DEVICE_GPU);
    if (ranks_world() && !ranks_world()->taken)
        return lead(rt, path, opt, &device, &cache, lim, err);
    return build(rt, opt, &device, &cache, lim, err);
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
    if (rt->be->comm && rt->be->comm->notice.msg[0])
        add_notice(rt, &rt->be->comm->notice);
    if (opt->profile)
        rt->be->profile = &rt->profile;
    return rt;
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
    struct ranks *r = rt->be ? ranks_from(rt->be->comm) : NULL;
    if (r && r->following)
        follow_tell_end(r);
    stepper_free(rt->step);
    kvcache_free(rt->kv);
    adapters_free(rt->adapters);
    model_free(rt->model);
    if (rt->be)
        rt->be->ops->close(rt->be);
    grammar_vocab_free(rt->grammar_vocab);
    tokenizer_free(rt->tokenizer);
    tensorfile_close(rt->file);
    mem_free(rt);
}
