/* Facts about a loaded model: see info.h. */
#include "engine/info.h"
#include "backend/backend.h"
#include "engine/runtime.h"
#include "file/tensorfile.h"

static size_t small_bytes(const struct runtime *rt, bool own_memory)
{
    const struct runtime *s = rt->small;
    return s && s->be->own_memory == own_memory ? s->model->bytes : 0;
}

struct engine_info runtime_info(const struct runtime *rt)
{
    const struct config *c = &rt->model->config;
    return (struct engine_info){
        .path = rt->file->path,
        .architecture = c->arch_name,
        .is_gguf = rt->file->is_gguf,
        .n_vocab = c->n_vocab,
        .n_embd = c->n_embd,
        .n_layers = c->n_layers,
        .context_trained = c->context,
        .n_params = rt->model->n_params,
        .n_active = rt->model->n_active,
        .weight_bytes = rt->model->bytes,
        .device = rt->be->ops->name,
        .notice = rt->notice.msg,
        .device_bytes = (rt->be->own_memory ? rt->model->bytes : 0) + small_bytes(rt, true),
        .host_bytes = rt->weight_memory + small_bytes(rt, false),
        .max_seqs = stepper_limits(rt->step)->max_seqs,
        .n_pages = rt->kv->n_pages,
        .kv_bytes = rt->kv->pool_bytes,
        .load_s = (double)rt->load_ns * 1e-9,
    };
}
