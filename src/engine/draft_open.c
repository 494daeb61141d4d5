/* Opens a draft model: see draft_open.h. */
#include "engine/draft_open.h"
#include "backend/backend.h"
#include "backend/devices.h"
#include "base/mem.h"
#include "engine/draft_cost.h"
#include "engine/draft_model.h"
#include "engine/sizing.h"

/* A model that is read to be measured. */
struct looked_at {
    struct tensorfile *file;
    struct config config;
    struct outline outline;
    struct model_size size;
};

static bool look(struct looked_at *l, const char *path, struct error *err)
{
    l->file = tensorfile_open(path, err);
    if (!l->file || !config_load(l->file, &l->config, err))
        return false;
    if (l->config.headless)
        return error_set(err, "%s: a %s model makes embeddings, not text", path,
                         l->config.arch_name);
    model_choose(&l->config, MODEL_PLAIN);
    return true;
}

static void look_away(struct looked_at *l)
{
    outline_free(&l->outline);
    tensorfile_close(l->file);
    mem_free(l);
}

bool draft_open_match(struct runtime *rt, const char *path, int n_vocab, struct error *err)
{
    struct looked_at *l = mem_zalloc(1, sizeof *l);
    struct error none;
    bool ok = look(l, path, err);
    struct draft_words target = {rt->file->path, rt->tokenizer, n_vocab}, draft = {.path = path};
    struct tokenizer *t = ok ? tokenizer_load(l->file, &none) : NULL;
    draft.tokenizer = t;
    draft.n = l->config.n_vocab;
    ok = ok && draft_vocab_init(&rt->small_vocab, &target, &draft, err);
    tokenizer_free(t);
    look_away(l);
    return ok || error_prefix(err, "--draft-model");
}

/* Its own options. Its steps verify no drafts, but few rows of a sequence are read in the same form. */
static struct runtime_options options_of(const struct runtime_options *opt, const char *device)
{
    return (struct runtime_options){
        .backend = {.device = opt->draft_device ? opt->draft_device : device,
                    .threads = opt->backend.threads},
        .kv_tokens = opt->context > 0 ? opt->context : DRAFT_MODEL_TOKENS,
        .gpu_memory = opt->gpu_memory,
        .k_type = opt->k_type,
        .v_type = opt->v_type,
        .page_len = opt->page_len,
        .max_seqs = DRAFT_MODEL_SEQS,
        .draft = DRAFT_AUTO,
        .draft_from = 1u << DRAFT_TEXT,
    };
}

bool draft_open_measure(const struct runtime_options *opt, bool gpu, size_t *bytes,
                        struct error *err)
{
    struct looked_at *l = mem_zalloc(1, sizeof *l);
    struct runtime_options own = options_of(opt, NULL);
    struct cache_size cache = {0};
    struct error notice = {0};
    bool ok = look(l, opt->draft_model, err) && outline_load(l->file, &l->config, &l->outline, err);
    if (ok) {
        const struct network *net = &l->outline.net;
        struct step_limits lim = sizing_limits(&own, gpu, 1);
        model_measure(l->file, &l->config, &l->size);
        ok = sizing_cache(&own, &l->config, net, &lim, (struct cache_room){.on_gpu = gpu}, &cache,
                          &notice, err);
        *bytes = l->size.bytes +
                 (gpu ? sizing_gpu_step_bytes(&own, net, &lim) : sizing_step_bytes(net, &lim)) +
                 (size_t)cache.tokens * sizing_token_bytes(&own, net) +
                 (size_t)cache.n_states * kvcache_state_bytes(net);
    }
    look_away(l);
    return ok || error_prefix(err, "--draft-model");
}

bool draft_open_shares(const struct runtime_options *opt, const char *device)
{
    return !opt->draft_device || device_kind(opt->draft_device) == device_kind(device);
}

bool draft_open(struct runtime *rt, const struct runtime_options *opt, const char *device,
                struct error *err)
{
    struct runtime_options own = options_of(opt, device);
    rt->small = runtime_open(opt->draft_model, &own, err);
    return rt->small || error_prefix(err, "--draft-model");
}
