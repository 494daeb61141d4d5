/* Sizes of steps and caches: see sizing.h. */
#include "engine/sizing.h"
#include "base/sysmem.h"
#include "engine/device.h"
#include "engine/draft.h"
#include "quant/kvblock.h"

#include <stdio.h>
#include <string.h>

enum {
    GPU_SCRATCH = 512 << 20, /* on a GPU, for the backend's own tables */
    HOST_SCRATCH = 64 << 20,
    LEAST_CONTEXT = 512, /* a model with room for less is refused */
    TOKEN_EXTRA = 8,     /* bytes of bookkeeping for a token of the KV cache */
    CHECKPOINTS = 2,     /* checkpoints of recurrent states per running sequence */
    LEAST_CHECKPOINTS = 8,
    HOST_CHECKPOINTS = 64, /* at least, where slots take memory only once they are used */
    MOST_CHECKPOINTS = 1 << 16,
};

/* The fraction of the host's free memory that weights and cache may use. */
static const double HOST_SHARE = 0.8;

static int or_default(int value, int fallback)
{
    return value > 0 ? value : fallback;
}

enum dtype sizing_kv_type(enum dtype t)
{
    return t == DT_NONE ? DT_F16 : t;
}

size_t sizing_token_bytes(const struct runtime_options *opt, const struct network *net)
{
    return kvcache_token_bytes(net, sizing_kv_type(opt->k_type), sizing_kv_type(opt->v_type));
}

struct step_limits sizing_limits(const struct runtime_options *opt, bool gpu, int stages)
{
    struct step_limits lim = {.max_seqs = or_default(opt->max_seqs, 1)};
    if (gpu && opt->max_seqs_gpu > 0)
        lim.max_seqs = opt->max_seqs_gpu;
    lim.max_tokens = or_default(opt->max_tokens, gpu ? 2048 : 512);
    /* A pipeline cuts a step into parts (dist/pipeline.h), each as large as a whole step of a single process. */
    if (!gpu && opt->max_tokens <= 0)
        lim.max_tokens *= stages;
    if (gpu && lim.max_tokens < opt->max_tokens_gpu)
        lim.max_tokens = opt->max_tokens_gpu;
    if (lim.max_tokens < lim.max_seqs + opt->read_rows)
        lim.max_tokens = lim.max_seqs + opt->read_rows;
    lim.read_chunk = gpu ? 256 : 16;
    lim.max_out = or_default(opt->max_out, lim.max_seqs);
    lim.max_out = lim.max_out > opt->min_out ? lim.max_out : opt->min_out;
    if (!opt->embed)
        lim.max_out += opt->draft == DRAFT_AUTO ? DRAFT_ROWS : DRAFT_SEQS * opt->draft;
    lim.max_embeds = opt->embeds ? lim.max_tokens : 0;
    if (opt->embed && lim.max_out < lim.max_tokens)
        lim.max_out = lim.max_tokens;
    return lim;
}

size_t sizing_step_bytes(const struct network *net, const struct step_limits *lim)
{
    struct network_max max;
    network_measure(net, &max);
    size_t embd = (size_t)net->n_embd, heads = (size_t)max.heads, ff = (size_t)max.n_ff;
    int width = net->head.w ? net->n_vocab : net->n_embd;
    size_t used = (size_t)max.n_expert_used, ff_exp = (size_t)max.n_ff_exp;
    size_t wide = used * (embd + ff_exp) + ff + 5 * embd + 6 * heads + (size_t)max.qkv;
    return ((size_t)lim->max_tokens * wide + (size_t)lim->max_out * (size_t)width) * sizeof(float);
}

bool sizing_has_adapters(const struct runtime_options *opt)
{
    return opt->n_loras > 0 || opt->lora_rank > 0;
}

size_t sizing_gpu_step_bytes(const struct runtime_options *opt, const struct network *net,
                             const struct step_limits *lim)
{
    struct network_max max;
    network_measure(net, &max);
    size_t ff = (size_t)max.n_ff, pairs = (size_t)max.n_expert_used * (size_t)max.n_ff_exp;
    size_t wide = sizing_has_adapters(opt) ? 2 * (ff > pairs ? ff : pairs) + 2 * ff : 0;
    return GPU_SCRATCH + sizing_step_bytes(net, lim) +
           (size_t)lim->max_tokens * wide * sizeof(float);
}

static double gb(double bytes)
{
    return bytes * 1e-9;
}

static int page_len(const struct runtime_options *opt)
{
    return or_default(opt->page_len, KVCACHE_PAGE);
}

int64_t sizing_pages(const struct runtime_options *opt, const struct step_limits *lim,
                     int64_t tokens)
{
    return (tokens + page_len(opt) - 1) / page_len(opt) + lim->max_seqs;
}

struct bounds sizing_bounds(const struct runtime_options *opt, const struct step_limits *lim,
                            const struct cache_size *cache)
{
    return (struct bounds){
        .page_len = page_len(opt),
        .n_pages = (int)sizing_pages(opt, lim, cache->tokens),
        .k_type = sizing_kv_type(opt->k_type),
        .v_type = sizing_kv_type(opt->v_type),
        .max_tokens = lim->max_tokens,
        .max_seqs = lim->max_seqs,
        .max_out = lim->max_out,
        .max_pages = (cache->context + page_len(opt) - 1) / page_len(opt),
        .n_states = cache->n_states,
        .max_embeds = lim->max_embeds,
        .lora_rank = lim->lora_rank,
    };
}

size_t sizing_host_other(void)
{
    return HOST_SCRATCH;
}

struct cache_room sizing_host_room(const struct runtime_options *opt, size_t weights, size_t step)
{
    struct cache_room r = {.free = sysmem_available(""), .taken = weights + HOST_SCRATCH + step};
    r.usable = (size_t)((double)r.free * HOST_SHARE);
    if (opt->backend.no_repack && r.taken > r.usable)
        r.taken -= weights;
    return r;
}

/* Bytes per token on a GPU with a quantised cache: prompts expand one layer's keys and values to fp16, for the longest
 * sequence. */
static size_t expanded_bytes(const struct runtime_options *opt, const struct network *net)
{
    int most = 0;
    for (int i = 0; i < net->n_layers; i++) {
        int k, v;
        mixer_cache_dims(&net->layers[i].mixer, &k, &v);
        k += mixer_index_dim(&net->layers[i].mixer);
        most = k + v > most ? k + v : most;
    }
    bool quantised =
        kv_quantised(sizing_kv_type(opt->k_type)) || kv_quantised(sizing_kv_type(opt->v_type));
    return quantised ? 2 * (size_t)most : 0;
}

struct cache_room sizing_gpu_room(const struct runtime_options *opt, const struct network *net,
                                  int context, size_t room)
{
    struct step_limits lim = sizing_limits(opt, true, 1);
    size_t expanded = expanded_bytes(opt, net);
    struct cache_room r = {room, room, sizing_gpu_step_bytes(opt, net, &lim), true};
    size_t left = room > r.taken ? room - r.taken : 0;
    size_t longest = (size_t)or_default(opt->context, context);
    size_t fit = left / (sizing_token_bytes(opt, net) + expanded + TOKEN_EXTRA);
    r.taken += expanded * (longest < fit ? longest : fit);
    return r;
}

/* Whether the working memory of n sequences leaves a cache for n. */
static bool holds(const struct runtime_options *opt, const struct network *net, int context,
                  size_t room, int n)
{
    struct runtime_options many = *opt;
    many.max_seqs_gpu = n;
    struct cache_room r = sizing_gpu_room(&many, net, context, room);
    size_t token = sizing_token_bytes(opt, net) + TOKEN_EXTRA;
    size_t left = r.usable > r.taken ? r.usable - r.taken : 0;
    if (opt->kv_tokens > 0)
        left = (size_t)opt->kv_tokens * token;
    else if (opt->kv_bytes && !opt->kv_bytes_host && opt->kv_bytes < left)
        left = opt->kv_bytes;
    return device_sequences(left, token, (1 + CHECKPOINTS) * kvcache_state_bytes(net),
                            or_default(opt->context, context), n) >= n;
}

int sizing_sequences(const struct runtime_options *opt, const struct network *net, int context,
                     size_t room)
{
    int low = opt->max_seqs_gpu < DEVICE_LEAST_SEQS ? opt->max_seqs_gpu : DEVICE_LEAST_SEQS;
    int high = opt->max_seqs_gpu;
    if (high <= 0)
        return 0;
    while (low < high) {
        int n = low + (high - low + 1) / 2;
        if (holds(opt, net, context, room, n))
            low = n;
        else
            high = n - 1;
    }
    return low;
}

int sizing_checkpoints(size_t slot, int max_seqs, bool gpu, size_t room)
{
    size_t n = CHECKPOINTS * (size_t)max_seqs, most = room / 4 / slot;
    size_t least = gpu ? LEAST_CHECKPOINTS : HOST_CHECKPOINTS;
    n = n < least ? least : n;
    n = n < most ? n : most;
    return (int)(n < MOST_CHECKPOINTS ? n : MOST_CHECKPOINTS);
}

/* Number of slots for recurrent states: one per running sequence, a second one if it may draft, and checkpoints as memory
 * allows. Slots reduce the memory for keys and values. */
static int size_states(const struct runtime_options *opt, const struct network *net,
                       const struct step_limits *lim, struct cache_room *r)
{
    size_t slot = kvcache_state_bytes(net);
    if (!slot)
        return 0;
    int draft = lim->max_seqs < DRAFT_SEQS ? lim->max_seqs : DRAFT_SEQS;
    int own = lim->max_seqs + (opt->draft && !opt->embed ? draft : 0);
    r->taken += slot * (size_t)own;
    size_t room = !r->free ? SIZE_MAX : r->usable > r->taken ? r->usable - r->taken : 0;
    size_t n = (size_t)sizing_checkpoints(slot, lim->max_seqs, r->on_gpu, room);
    if (opt->state_bytes)
        n = opt->state_bytes / slot;
    n = n < MOST_CHECKPOINTS ? n : MOST_CHECKPOINTS;
    r->taken += n * slot;
    return own + (int)n;
}

static bool refuse_cache(struct error *err, const char *what, int64_t tokens, double each,
                         const struct cache_room *r, int64_t fit)
{
    return error_set(
        err,
        "%s of %lld tokens needs %.2f GB beside %.2f GB of weights and working memory: "
        "%.2f GB are free, %.2f may be used; %lld tokens would fit",
        what, (long long)tokens, gb(each * (double)tokens), gb((double)r->taken),
        gb((double)r->free), gb((double)r->usable), (long long)fit);
}

void sizing_add_notice(struct error *notice, const struct error *what)
{
    size_t n = strlen(notice->msg);
    if (!what->msg[0])
        return;
    snprintf(notice->msg + n, sizeof notice->msg - n, "%s%s", n ? "; " : "", what->msg);
}

bool sizing_cache(const struct runtime_options *opt, const struct config *c,
                  const struct network *net, const struct step_limits *lim, struct cache_room room,
                  struct cache_size *out, struct error *notice, struct error *err)
{
    struct cache_room *r = &room;
    int64_t *tokens = &out->tokens;
    out->n_states = size_states(opt, net, lim, r);
    double each = (double)(sizing_token_bytes(opt, net) + TOKEN_EXTRA);
    int least = c->context < LEAST_CONTEXT ? c->context : LEAST_CONTEXT;
    /* The default bound limits the host's memory only. */
    bool soft = !opt->kv_bytes || opt->kv_bytes_host;
    size_t bound = r->on_gpu && soft ? 0 : opt->kv_bytes;
    double left = r->usable > r->taken ? (double)(r->usable - r->taken) : 0;
    int64_t fit = r->free ? (int64_t)(left / each) : INT64_MAX;
    if (opt->context > 0 && opt->kv_tokens <= 0 && opt->context > fit)
        return refuse_cache(err, "a context", opt->context, each, r, fit);
    if (opt->kv_tokens > fit)
        return refuse_cache(err, "a KV cache", opt->kv_tokens, each, r, fit);
    if (fit < least && !opt->context && !opt->kv_tokens) {
        /* If memory is tight, the fraction left for other programs is used first. */
        if ((double)r->taken + each * least > (double)r->free && !opt->backend.no_repack)
            return error_set(err,
                             "the model needs %.2f GB for weights and working memory and %.2f GB "
                             "for a context of %d tokens; %.2f GB are free",
                             gb((double)r->taken), gb(each * least), least, gb((double)r->free));
        fit = least;
    }
    int64_t cap = fit;
    if (bound && (double)bound / each < (double)cap)
        cap = (int64_t)((double)bound / each);
    if (cap < least)
        cap = least;
    out->context = or_default(opt->context, c->context);
    if (soft && opt->context > cap)
        cap = opt->context;
    *tokens = opt->kv_tokens > 0 ? opt->kv_tokens : (int64_t)lim->max_seqs * out->context;
    if (opt->kv_tokens <= 0 && *tokens > cap)
        *tokens = cap;
    if (opt->context > 0 || *tokens >= out->context)
        return true;
    out->context = (int)*tokens;
    struct error note = {0};
    error_set(&note,
              "context of %d tokens, where the model could have %d: the cache has %.2f GB (-c, "
              "--kv-type and --kv-memory change it)",
              out->context, c->context, gb(each * (double)*tokens));
    sizing_add_notice(notice, &note);
    return true;
}

bool sizing_texts(struct runtime_options *fit, const struct config *c, const struct network *net,
                  const struct step_limits *lim, struct cache_room room, struct cache_size *out,
                  struct error *notice)
{
    struct error why;
    struct runtime_options two = *fit;
    fit->kv_tokens = fit->kv_tokens > lim->max_tokens ? fit->kv_tokens : lim->max_tokens;
    two.kv_tokens = fit->kv_tokens + lim->max_tokens;
    return sizing_cache(&two, c, net, lim, room, out, notice, &why);
}
