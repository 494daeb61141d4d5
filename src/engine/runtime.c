/* Opening a model: the order in which its parts come to life, and the defaults they get. */
#include "engine/runtime.h"
#include "base/clock.h"
#include "base/mem.h"
#include "engine/device.h"

#include <stdlib.h>
#include <string.h>

enum {
    GPU_SCRATCH = 1 << 30,    /* left for a step's working memory */
    GPU_LEAST_CONTEXT = 4096, /* tokens a GPU must have room for to be chosen unasked */
};

static int or_default(int value, int fallback)
{
    return value > 0 ? value : fallback;
}

static double gpu_share(const struct runtime_options *opt)
{
    return opt->gpu_memory > 0 ? (double)opt->gpu_memory : 0.9;
}

static enum dtype kv_type_of(const struct runtime_options *opt)
{
    return opt->kv_type == DT_NONE ? DT_F16 : opt->kv_type;
}

static struct step_limits limits_of(const struct runtime_options *opt, bool gpu)
{
    struct step_limits lim = {.max_seqs = or_default(opt->max_seqs, 1)};
    if (gpu && opt->max_seqs_gpu > 0)
        lim.max_seqs = opt->max_seqs_gpu;
    lim.max_tokens = or_default(opt->max_tokens, gpu ? 2048 : 512);
    if (lim.max_tokens < lim.max_seqs + opt->read_rows)
        lim.max_tokens = lim.max_seqs + opt->read_rows;
    lim.read_chunk = gpu ? 256 : 16;
    lim.max_out = or_default(opt->max_out, lim.max_seqs);
    return lim;
}

/* Working memory of a step on a GPU, on the safe side: rows of activations, experts' outputs apart,
 * and logits. */
static size_t gpu_scratch(const struct config *c, const struct step_limits *lim)
{
    size_t embd = (size_t)c->n_embd, heads = (size_t)c->n_heads * (size_t)c->head_dim;
    size_t used = (size_t)c->n_expert_used, ff = (size_t)c->n_ff;
    size_t wide = used * (embd * 4 + (size_t)c->n_ff_exp * 4) + ff * 4 + embd * 20 + heads * 24;
    return GPU_SCRATCH / 2 + (size_t)lim->max_tokens * wide +
           (size_t)lim->max_out * (size_t)c->n_vocab * sizeof(float);
}

/* "auto" becomes a device: the GPU where there is one and the model fits. A GPU that was named and
 * cannot hold the model is an error before anything is loaded. */
static bool choose_device(struct runtime *rt, const struct runtime_options *opt,
                          struct backend_options *out, struct error *err)
{
    *out = opt->backend;
    const char *asked = out->device ? out->device : "cpu";
    bool is_auto = !strcmp(asked, "auto"), is_cuda = !strncmp(asked, "cuda", 4);
    if (!is_auto && !is_cuda)
        return true;
    struct device_facts f = {.asked = asked,
                             .deterministic = out->deterministic,
                             .no_repack = out->no_repack,
                             .isa_forced = getenv("STEEL_ISA") != NULL};
    struct config c;
    struct model_size size;
    if (!config_load(rt->file, &c, err))
        return false;
    model_measure(rt->file, &c, &size);
    int context = or_default(opt->context, c.context);
    context = context < GPU_LEAST_CONTEXT ? context : GPU_LEAST_CONTEXT;
    struct step_limits lim = limits_of(opt, true);
    f.n_params = size.n_params;
    f.weights = size.bytes;
    f.kv = (size_t)context * kvcache_token_bytes(&c, kv_type_of(opt));
    f.scratch = gpu_scratch(&c, &lim);
    if (is_auto)
        out->device = NULL;
    if (is_auto && (f.isa_forced || f.weights < DEVICE_SMALL_MODEL || !backend_has_cuda()))
        f.room = 0;
    else if (f.deterministic || f.no_repack)
        f.room = 1; /* there is one, and it will not be used: no need to wake it */
    else
        f.room = backend_cuda_room(out, gpu_share(opt));
    out->device = device_choose(&f, &rt->notice);
    return is_auto || device_fits(&f, err);
}

/* Tokens of the KV cache: as asked, or as many as could be of use and fit. is_room: `most` is all a
 * GPU has, not a wish. */
static bool size_cache(const struct runtime_options *opt, const struct config *c,
                       const struct step_limits *lim, int context, size_t most, bool is_room,
                       int64_t *tokens, struct error *err)
{
    size_t each = kvcache_token_bytes(c, kv_type_of(opt));
    *tokens = opt->kv_tokens > 0 ? opt->kv_tokens : (int64_t)lim->max_seqs * context;
    int64_t fit = most ? (int64_t)(most / each) : *tokens;
    if (fit >= *tokens)
        return true;
    if (opt->kv_tokens > 0 && is_room)
        return error_set(err,
                         "a KV cache of %d tokens needs %.1f GB, %.1f are left beside the weights: "
                         "%lld tokens would fit",
                         opt->kv_tokens, (double)each * opt->kv_tokens * 1e-9, (double)most * 1e-9,
                         (long long)fit);
    if (opt->kv_tokens <= 0)
        *tokens = fit > 256 ? fit : 256;
    return true;
}

static bool start(struct runtime *rt, const char *path, const struct runtime_options *opt,
                  struct error *err)
{
    rt->file = tensorfile_open(path, err);
    if (!rt->file)
        return false;
    rt->tokenizer = tokenizer_load(rt->file, &rt->tokenizer_error);
    struct backend_options device;
    if (!choose_device(rt, opt, &device, err))
        return false;
    rt->be = backend_open(&device, err);
    if (!rt->be)
        return false;
    bool gpu = !strcmp(rt->be->ops->name, "cuda");
    rt->model = model_load(rt->file, rt->be, opt->progress, err);
    if (!rt->model)
        return false;
    const struct config *c = &rt->model->config;
    if (rt->tokenizer && tokenizer_n_vocab(rt->tokenizer) > c->n_vocab)
        return error_set(err, "%s: the tokenizer has %d tokens, the embedding %d rows",
                         rt->file->path, tokenizer_n_vocab(rt->tokenizer), c->n_vocab);
    struct step_limits lim = limits_of(opt, gpu);
    rt->context = or_default(opt->context, c->context);
    int page_len = or_default(opt->page_len, 16);
    enum dtype type = kv_type_of(opt);
    size_t most = opt->kv_bytes;
    bool is_room = gpu && (!most || opt->kv_bytes_host);
    if (is_room) {
        size_t room = backend_cuda_room(&device, gpu_share(opt)), scratch = gpu_scratch(c, &lim);
        most = room > scratch ? room - scratch + 1 : 1;
    }
    int64_t tokens;
    if (!size_cache(opt, c, &lim, rt->context, most, is_room, &tokens, err))
        return false;
    int64_t pages = (tokens + page_len - 1) / page_len + lim.max_seqs;
    if (pages > INT32_MAX / page_len)
        return error_set(err, "a KV cache of %lld tokens is too large", (long long)tokens);
    rt->kv = kvcache_new(rt->be, c, type, page_len, (int)pages, err);
    if (!rt->kv)
        return false;
    rt->step = stepper_new(rt->model, rt->kv, rt->context, &lim, err);
    return rt->step != NULL;
}

struct runtime *runtime_open(const char *path, const struct runtime_options *opt, struct error *err)
{
    struct runtime *rt = mem_zalloc(1, sizeof *rt);
    int64_t t0 = clock_ns();
    if (!start(rt, path, opt, err)) {
        runtime_close(rt);
        return NULL;
    }
    rt->load_ns = clock_ns() - t0;
    if (opt->profile)
        rt->be->profile = &rt->profile;
    return rt;
}

void runtime_close(struct runtime *rt)
{
    if (!rt)
        return;
    stepper_free(rt->step);
    kvcache_free(rt->kv);
    model_free(rt->model);
    if (rt->be)
        rt->be->ops->close(rt->be);
    tokenizer_free(rt->tokenizer);
    tensorfile_close(rt->file);
    mem_free(rt);
}

bool runtime_prefill(struct runtime *rt, struct kv_seq *seq, const int32_t *tokens, int n,
                     struct step_item *last, bool (*stop)(void), struct error *err)
{
    int max = stepper_limits(rt->step)->max_tokens;
    if (seq->n_tokens + n > rt->context)
        return error_set(err, "the prompt needs %d tokens, the context holds %d (see -c)",
                         seq->n_tokens + n, rt->context);
    for (int at = 0; at < n;) {
        int take = n - at < max ? n - at : max;
        struct step_item item = {.seq = seq, .tokens = tokens + at, .n_tokens = take};
        if (at + take == n) {
            item.want = last->want;
            item.sampler = last->sampler;
        }
        if (!step_run(rt->step, &item, 1, err))
            return false;
        if (stop && stop())
            return error_set(err, "interrupted");
        at += take;
        if (at == n)
            *last = item;
    }
    return true;
}
