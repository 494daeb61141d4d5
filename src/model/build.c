/* Building a network. See build.h. */
#include "model/build.h"
#include "backend/backend.h"
#include "base/mem.h"
#include "model/eagle.h"
#include "model/families/family.h"

#include <stdio.h>
#include <string.h>

void build_name(const struct tensorfile *f, const struct config *c, const struct tensor_name *n,
                int layer, int expert, const char *suffix, char *out, size_t size)
{
    char base[160];
    const char *name = f->is_gguf ? n->gguf : n->hf, *head = "";
    bool whole = name[0] == '=';
    name += whole;
    if (!f->is_gguf && c->hf_mtp && layer >= c->n_layers && !strncmp(name, "model.layers.", 13)) {
        head = c->hf_mtp;
        name += 6;
        layer -= c->n_layers;
    } else if (!f->is_gguf && !strncmp(name, "model.", 6)) {
        head = c->hf_model;
        name += 6;
        if (c->family && c->family->folder_step) /* towers have no family */
            layer /= c->family->folder_step;
    } else if (!f->is_gguf && !strncmp(name, "lm_head", 7)) {
        head = c->hf_head;
        name += 7;
    }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    snprintf(base, sizeof base, name, layer, expert);
#pragma GCC diagnostic pop
    if (whole && !strcmp(suffix, "weight"))
        snprintf(out, size, "%s%s", head, base);
    else
        snprintf(out, size, "%s%s%c%s", head, base, whole ? '_' : '.', suffix);
}

void build_source(const struct tensor_spec *spec, const struct tensorfile **f,
                  const struct config **c)
{
    if (!spec->eagle)
        return;
    *f = (*c)->eagle->file;
    *c = &(*c)->eagle->config;
}

const struct tensor *build_find(const struct tensorfile *f, const struct config *c,
                                const struct tensor_name *n, int layer, int expert,
                                const char *suffix)
{
    char name[192];
    build_name(f, c, n, layer, expert, suffix, name, sizeof name);
    return tensorfile_find(f, name);
}

const struct tensor *build_scale(const struct tensorfile *f, const struct config *c,
                                 const struct tensor_name *n, int layer)
{
    bool own = c->family->scales_experts && strstr(n->gguf, FAMILY_SCALED);
    return own ? NULL : build_find(f, c, n, layer, 0, "scale");
}

bool build_stacked(const struct tensorfile *f, const struct tensor_name *n)
{
    if (f->is_gguf)
        return true;
    const char *layer = strchr(n->hf, '%');
    return !layer || !strchr(layer + 1, '%');
}

bool build_present(const struct tensorfile *f, const struct config *c, const struct tensor_name *n,
                   int layer)
{
    static const char *const codes[] = {"weight",  "weight_packed", "packed",       "blocks",
                                        "qweight", "W_q",           "_weight_qdata"};
    size_t kinds = f->is_gguf ? 1 : sizeof codes / sizeof *codes;
    for (size_t i = 0; i < kinds; i++)
        if (build_find(f, c, n, layer, 0, codes[i]))
            return true;
    return false;
}

bool build_has(const struct net_builder *b, const struct tensor_name *n, int layer)
{
    return build_present(b->f, b->c, n, layer);
}

static struct tensor_spec *add_spec(struct net_builder *b)
{
    if (b->n_specs == b->cap) {
        b->cap = b->cap ? 2 * b->cap : 64;
        b->specs = mem_realloc(b->specs, (size_t)b->cap, sizeof *b->specs);
    }
    b->specs[b->n_specs] = (struct tensor_spec){0};
    return &b->specs[b->n_specs++];
}

static int net_layer(const struct net_builder *b, int layer)
{
    return layer * (b->c->family->parts ? b->c->family->parts : 1) + b->part;
}

const struct weight *build_weight(struct net_builder *b, enum weight_role role, int layer, int n_in,
                                  int n_expert, int n_rows, const struct weight_rows *rows)
{
    struct tensor_spec *spec = add_spec(b);
    struct weight *w = mem_zalloc(1, sizeof *w);
    CHECK(n_rows <= (int)(sizeof spec->rows / sizeof *spec->rows), "%d runs of rows", n_rows);
    *spec = (struct tensor_spec){.w = w,
                                 .role = role,
                                 .layer = layer,
                                 .net_layer = net_layer(b, layer),
                                 .n_in = n_in,
                                 .n_expert = n_expert,
                                 .n_rows = n_rows};
    w->n_in = n_in;
    w->n_expert = n_expert;
    for (int i = 0; i < n_rows; i++) {
        spec->rows[i] = rows[i];
        w->n_out += rows[i].n;
        w->bias |= build_find(b->f, b->c, rows[i].name, layer, 0, "bias") != NULL;
    }
    return w;
}

const struct weight *build_matrix(struct net_builder *b, enum weight_role role, int layer,
                                  const struct tensor_name *name, int n_in, int n_out)
{
    return build_weight(b, role, layer, n_in, 1, 1,
                        &(struct weight_rows){.name = name, .n = n_out});
}

const float *build_vector(struct net_builder *b, int layer, const struct tensor_name *name,
                          int width, struct adjust adjust)
{
    if (b->failed)
        return NULL;
    float *v = b->be ? b->be->ops->alloc(b->be, (size_t)width * sizeof *v, "a vector", b->err)
                     : mem_zalloc(1, sizeof *v);
    b->failed = !v;
    if (!v)
        return NULL;
    struct tensor_spec *spec = add_spec(b);
    *spec = (struct tensor_spec){.vector = v,
                                 .layer = layer,
                                 .net_layer = net_layer(b, layer),
                                 .n_in = width,
                                 .n_rows = 1,
                                 .rows = {{.name = name, .n = width}},
                                 .adjust = adjust};
    return v;
}

const float *build_values(struct net_builder *b, int layer, const float *values, int width)
{
    const float *v = build_vector(b, layer, NULL, width, (struct adjust){0});
    if (v) {
        struct tensor_spec *spec = &b->specs[b->n_specs - 1];
        spec->n_rows = 0;
        spec->values = mem_zalloc((size_t)width, sizeof *values);
        memcpy(spec->values, values, (size_t)width * sizeof *values);
    }
    return v;
}

const float *build_table(struct net_builder *b, int layer, const struct tensor_name *name, int rows,
                         int width)
{
    const float *v = build_vector(b, layer, name, rows * width, (struct adjust){0});
    if (v)
        b->specs[b->n_specs - 1].width = width;
    return v;
}

const float *build_numbers(struct net_builder *b, int layer, const struct tensor_name *name,
                           int rows, int width, int below)
{
    const float *v = build_table(b, layer, name, rows, width);
    if (v)
        b->specs[b->n_specs - 1].adjust.below = below;
    return v;
}

const float *build_tables(struct net_builder *b, int layer, const struct tensor_name *names,
                          const int *rows, int width)
{
    const float *v = build_vector(b, layer, &names[0], (rows[0] + rows[1] + rows[2]) * width,
                                  (struct adjust){0});
    if (!v)
        return NULL;
    struct tensor_spec *spec = &b->specs[b->n_specs - 1];
    spec->width = width;
    spec->n_rows = 3;
    for (int i = 0; i < 3; i++)
        spec->rows[i] = (struct weight_rows){.name = &names[i], .n = rows[i]};
    return v;
}

struct norm build_rms_adjusted(struct net_builder *b, int layer, const struct tensor_name *name,
                               int width, struct adjust adjust)
{
    return (struct norm){.kind = NORM_RMS,
                         .eps = b->c->norm_eps,
                         .gain = build_vector(b, layer, name, width, adjust)};
}

struct norm build_rms(struct net_builder *b, int layer, const struct tensor_name *name, int width)
{
    return build_rms_adjusted(b, layer, name, width, (struct adjust){0});
}

struct norm build_layer_norm_of(struct net_builder *b, int layer, const struct tensor_name *name,
                                int width, struct adjust adjust)
{
    struct norm n = {.kind = NORM_LAYER,
                     .eps = b->c->norm_eps,
                     .gain = build_vector(b, layer, name, width, adjust)};
    if (!build_find(b->f, b->c, name, layer, 0, "bias"))
        return n;
    n.bias = build_vector(b, layer, name, width, (struct adjust){0});
    if (n.bias)
        b->specs[b->n_specs - 1].is_bias = true;
    return n;
}

struct norm build_layer_norm(struct net_builder *b, int layer, const struct tensor_name *gain,
                             const struct tensor_name *bias, int width)
{
    struct norm n = {.kind = NORM_LAYER, .eps = b->c->norm_eps};
    n.gain = build_vector(b, layer, gain, width, (struct adjust){0});
    if (build_has(b, bias, layer))
        n.bias = build_vector(b, layer, bias, width, (struct adjust){0});
    return n;
}

float build_scalar(struct net_builder *b, int layer, const struct tensor_name *name)
{
    const struct tensor *t = build_find(b->f, b->c, name, layer, 0, "weight");
    float v = 1;
    if (b->failed || !t)
        return v;
    if (t->dims[0] != 1 || t->dims[1] != 1 || t->dims[2] != 1 || t->dims[3] != 1 ||
        (t->type != DT_F32 && t->type != DT_F16 && t->type != DT_BF16))
        b->failed = !error_set(b->err, "%s: tensor %s: not one number", b->f->path, t->name);
    else
        quant_dequantize(t->type, t->data, &v, 1);
    if (!b->be) /* `convert` wants to know of it */
        build_vector(b, layer, name, 1, (struct adjust){0});
    return v;
}

const struct rope *build_ropes(struct net_builder *b, int n,
                               const struct rope_config *const *configs, const int *n_rot)
{
    struct rope *ropes = mem_zalloc((size_t)(n + b->spare_ropes), sizeof *ropes);
    for (int i = 0; i < n; i++) {
        float *freq = mem_zalloc((size_t)n_rot[i] / 2 + 1, sizeof *freq);
        ropes[i] = (struct rope){.n_rot = n_rot[i] / 2 * 2, .freq = freq};
        rope_frequencies(configs[i], ropes[i].n_rot,
                         i == 0 && configs[i]->factors ? b->c->rope_short : NULL, freq,
                         &ropes[i].mscale);
        const int *part = configs[i]->sections;
        if (!part[0] && !part[1] && !part[2])
            continue;
        uint8_t *plane = mem_zalloc((size_t)n_rot[i] / 2 + 1, sizeof *plane);
        ropes[i].plane = plane;
        if (!rope_planes(configs[i], n_rot[i] / 2, plane))
            b->failed = !error_set(b->err, "%s: mrope_section: %d + %d + %d pairs, expected %d",
                                   b->f->path, part[0], part[1], part[2], n_rot[i] / 2);
    }
    b->net->ropes = ropes;
    b->net->n_ropes = n;
    return ropes;
}

const struct rope *build_rope(struct net_builder *b)
{
    const struct rope_config *config = &b->c->rope;
    return b->c->n_rot / 2 ? build_ropes(b, 1, &config, &b->c->n_rot) : NULL;
}

void build_free(struct backend *be, struct network *net, struct tensor_spec *specs, int n_specs)
{
    for (int i = 0; i < n_specs; i++) {
        struct tensor_spec *w = &specs[i];
        for (int k = 0; be && w->w && w->w->lora && k < LORA_MAX_ADAPTERS; k++)
            if (w->w->lora[k])
                be->ops->adapters->unadapt(be, w->w->lora[k]);
        if (w->w)
            mem_free(w->w->lora);
        if (be && w->w && w->w->impl)
            be->ops->release(be, w->w);
        mem_free(w->w);
        mem_free(w->cut);
        mem_free(w->values);
        if (w->vector && be)
            be->ops->free(be, w->vector, (size_t)w->n_in * sizeof(float));
        else
            mem_free(w->vector);
    }
    for (int i = 0; i < net->n_ropes; i++) {
        mem_free((void *)(uintptr_t)net->ropes[i].freq);
        mem_free((void *)(uintptr_t)net->ropes[i].plane);
    }
    mem_free((void *)(uintptr_t)net->ropes);
    mem_free((void *)(uintptr_t)net->mtp.ids);
    mem_free(net->layers);
    mem_free(net->mergers);
    mem_free((void *)(uintptr_t)net->embed.pixels);
    mem_free(net->clips);
    mem_free(specs);
    *net = (struct network){0};
}
