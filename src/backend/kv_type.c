/* Types of the KV cache. See kv_type.h. */
#include "backend/kv_type.h"
#include "backend/layer.h"
#include "quant/kvblock.h"

#include <strings.h>

/* The cache's types by their names on the command line. */
static const struct {
    const char *name;
    enum dtype type;
} kv_names[] = {{"f16", DT_F16},   {"bf16", DT_BF16},   {"f32", DT_F32},         {"q8_0", DT_Q8_0},
                {"q4_0", DT_Q4_0}, {"fp8", DT_F8_E4M3}, {"fp8_e4m3", DT_F8_E4M3}};

enum dtype kv_type_from_name(const char *name)
{
    for (size_t i = 0; i < sizeof kv_names / sizeof *kv_names; i++)
        if (!strcasecmp(name, kv_names[i].name))
            return kv_names[i].type;
    return DT_NONE;
}

const char *kv_type_name(enum dtype t)
{
    for (size_t i = 0; i < sizeof kv_names / sizeof *kv_names; i++)
        if (kv_names[i].type == t)
            return kv_names[i].name;
    return dtype_name(t);
}

/* Quantised values come in blocks along a head. */
static bool dim_fits(int layer, const char *what, int dim, enum dtype t, struct error *err)
{
    if (!kv_quantised(t) || dim % KV_BLOCK == 0)
        return true;
    return error_set(err,
                     "layer %d: %s of %d values, no multiple of %d: a cache of %s cannot hold "
                     "them, one of f16 or bf16 can",
                     layer, what, dim, KV_BLOCK, kv_type_name(t));
}

bool kv_types_check(const struct network *net, enum dtype k_type, enum dtype v_type,
                    struct error *err)
{
    for (int i = 0; i < net->n_layers; i++) {
        const struct mixer *m = &net->layers[i].mixer;
        if (mixer_index_dim(m) && !dim_fits(i, "index keys", mixer_index_dim(m), k_type, err))
            return false;
        if (m->kind == MIXER_ATTENTION && (!dim_fits(i, "keys", m->attention.k_dim, k_type, err) ||
                                           !dim_fits(i, "values", m->attention.v_dim, v_type, err)))
            return false;
        if (m->kind == MIXER_COMPRESSED && !dim_fits(i, "keys", m->compressed.dim, k_type, err))
            return false;
        if (m->kind == MIXER_LATENT &&
            !dim_fits(i, "latents", m->latent.kv_rank + m->latent.rope_dim, k_type, err))
            return false;
    }
    return true;
}
