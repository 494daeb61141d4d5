/* Counts what a model's weights take: see fit.h. */
#include "engine/fit.h"
#include "backend/backend.h"
#include "backend/devices.h"
#include "engine/offload.h"
#include "engine/placement.h"
#include "model/build.h"

const char *const fit_parts[] = {"embedding",      "attention",   "mlps",
                                 "shared experts", "experts",     "routers",
                                 "head",           "draft block", "norms"};

/* The part of a weight of this layer's mlp. */
static enum fit_part mlp_part(const struct mlp *m, const struct weight *w)
{
    if (w == m->experts.gate_up || w == m->experts.down || w == m->to_experts ||
        w == m->from_experts)
        return FIT_EXPERTS;
    if (w == m->router.w)
        return FIT_ROUTERS;
    if (w == m->dense.gate_up || w == m->dense.down || w == m->dense_gate)
        return m->router.w ? FIT_SHARED : FIT_MLPS;
    return w == m->embed.gate || w == m->embed.project ? FIT_MLPS : FIT_MIXERS;
}

static enum fit_part part_of(const struct network *net, const struct tensor_spec *spec)
{
    const struct weight *w = spec->w;
    if (spec->net_layer >= network_depth(net))
        return FIT_DRAFT;
    if (!w)
        return FIT_REST;
    if (w == net->head.w)
        return FIT_HEAD;
    if (spec->role == WEIGHT_EMBED || w == net->embed.tokens || w == net->embed.positions ||
        w == net->embed.types || w == net->embed.layers.project)
        return FIT_EMBED;
    return spec->layer >= 0 ? mlp_part(&net->layers[spec->net_layer].mlp, w) : FIT_REST;
}

static void count_values(const struct raw_weight *shape, enum fit_part part, struct fit_weights *to)
{
    bool looked_up = part == FIT_EMBED || part == FIT_DRAFT;
    for (int i = 0; !looked_up && i < shape->n_seg; i++) {
        struct fit_format *f = &to->formats[shape->seg[i].type];
        double n = (double)shape->n_expert * shape->seg[i].rows * shape->n_in;
        *(part == FIT_EXPERTS && shape->n_expert > 1 ? &f->experts
          : part == FIT_HEAD                         ? &f->head
                                                     : &f->dense) += n;
    }
    to->n_products += !looked_up;
}

/* Where a backend cannot tell the size of its form, the file's size is used. */
static size_t weight_bytes(const char *device, struct backend *be, const struct raw_weight *shape,
                           enum weight_role role, size_t *mapped)
{
    *mapped = 0;
    if (be && be->ops->plan)
        return be->ops->plan->weight_bytes(be, shape, role, mapped);
    size_t known = device ? device_weight_bytes(device, shape, role) : 0;
    if (known)
        return known;
    size_t bytes = shape->bias ? (size_t)shape->n_expert * (size_t)shape->n_out * sizeof(float) : 0;
    for (int i = 0; i < shape->n_seg; i++)
        bytes += (size_t)shape->n_expert * (size_t)shape->seg[i].rows *
                 raw_seg_row_bytes(&shape->seg[i], shape->n_in);
    return bytes;
}

static double attention_flops(const struct mixer *m)
{
    const struct attention *a = &m->attention;
    const struct latent *l = &m->latent;
    if (m->kind == MIXER_ATTENTION)
        return 2.0 * a->n_heads * (a->k_dim + a->v_dim);
    const struct compressed *c = &m->compressed;
    if (m->kind == MIXER_COMPRESSED)
        return c->compressor.rate ? 4.0 * c->n_heads * c->dim / c->compressor.rate : 0;
    return m->kind == MIXER_LATENT ? 2.0 * l->n_heads * (2 * l->kv_rank + l->rope_dim) : 0;
}

bool fit_weights(const struct tensorfile *f, const struct config *c, const struct outline *o,
                 const char *device, struct backend *be, struct fit_weights *out, struct error *err)
{
    const struct network *net = &o->net;
    *out = (struct fit_weights){0};
    for (int i = 0; i < o->n_specs; i++) {
        const struct tensor_spec *spec = &o->specs[i];
        enum fit_part part = part_of(net, spec);
        struct raw_weight shape;
        size_t mapped;
        if (!spec->w) {
            out->memory[part] += (size_t)spec->n_in * sizeof(float);
            continue;
        }
        const struct tensorfile *file = f;
        const struct config *config = c;
        build_source(spec, &file, &config);
        if (!placement_shape(file, config, spec, &shape, err))
            return false;
        size_t bytes = weight_bytes(device, be, &shape, spec->role, &mapped);
        out->memory[part] += bytes;
        out->fixed_experts += part == FIT_EXPERTS && shape.transient ? bytes : 0;
        out->mapped[part] += mapped;
        count_values(&shape, part, out);
    }
    for (int i = 0; i < network_depth(net); i++) {
        const struct mlp *m = &net->layers[i].mlp;
        out->attn_flops += attention_flops(&net->layers[i].mixer);
        if (m->router.w) {
            out->n_expert = m->router.w->n_out;
            out->n_used = m->router.n_used;
        }
    }
    return true;
}

bool fit_experts(const struct tensorfile *f, const struct config *c, const struct outline *o,
                 const char *device, struct backend *host, struct expert_layer *layers,
                 struct error *err)
{
    for (int i = 0; i < o->n_specs; i++) {
        const struct tensor_spec *spec = &o->specs[i];
        struct raw_weight shape;
        size_t mapped;
        if (!spec->w || spec->w->n_expert < 2 ||
            (spec->role != WEIGHT_EXPERTS && spec->role != WEIGHT_EXPERTS_SHARED))
            continue;
        if (!placement_shape(f, c, spec, &shape, err))
            return false;
        struct expert_layer *l = &layers[spec->net_layer];
        l->layer = spec->layer;
        l->n_expert = spec->w->n_expert;
        l->bytes += weight_bytes(device, NULL, &shape, WEIGHT_EXPERTS, &mapped);
        l->host_bytes += weight_bytes(NULL, host, &shape, WEIGHT_EXPERTS, &mapped);
    }
    return true;
}

static size_t sum(const size_t parts[FIT_PARTS])
{
    size_t n = 0;
    for (int i = 0; i < FIT_PARTS; i++)
        n += parts[i];
    return n;
}

size_t fit_memory(const struct fit_weights *w)
{
    return sum(w->memory);
}

size_t fit_mapped(const struct fit_weights *w)
{
    return sum(w->mapped);
}
