/* The mixes: see mix.h. Tables and a few rules, without state, so the order of tensors does not
 * matter. */
#include "convert/mix.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum mix_id {
    MIX_F32,
    MIX_F16,
    MIX_BF16,
    MIX_Q8_0,
    MIX_Q4_0,
    MIX_Q4_1,
    MIX_Q5_0,
    MIX_Q5_1,
    MIX_Q2_K,
    MIX_Q3_K_S,
    MIX_Q3_K_M,
    MIX_Q3_K_L,
    MIX_Q4_K_S,
    MIX_Q4_K_M,
    MIX_Q5_K_S,
    MIX_Q5_K_M,
    MIX_Q6_K,
    MIX_IQ4_NL,
    MIX_IQ4_XS,
    MIX_IQ3_S,
    MIX_MXFP4,
    N_MIXES
};

static const struct mix mixes[N_MIXES] = {
    [MIX_F32] = {"F32", DT_F32, 0},           [MIX_F16] = {"F16", DT_F16, 1},
    [MIX_BF16] = {"BF16", DT_BF16, 32},       [MIX_Q8_0] = {"Q8_0", DT_Q8_0, 7},
    [MIX_Q4_0] = {"Q4_0", DT_Q4_0, 2},        [MIX_Q4_1] = {"Q4_1", DT_Q4_1, 3},
    [MIX_Q5_0] = {"Q5_0", DT_Q5_0, 8},        [MIX_Q5_1] = {"Q5_1", DT_Q5_1, 9},
    [MIX_Q2_K] = {"Q2_K", DT_Q2_K, 10},       [MIX_Q3_K_S] = {"Q3_K_S", DT_Q3_K, 11},
    [MIX_Q3_K_M] = {"Q3_K_M", DT_Q3_K, 12},   [MIX_Q3_K_L] = {"Q3_K_L", DT_Q3_K, 13},
    [MIX_Q4_K_S] = {"Q4_K_S", DT_Q4_K, 14},   [MIX_Q4_K_M] = {"Q4_K_M", DT_Q4_K, 15},
    [MIX_Q5_K_S] = {"Q5_K_S", DT_Q5_K, 16},   [MIX_Q5_K_M] = {"Q5_K_M", DT_Q5_K, 17},
    [MIX_Q6_K] = {"Q6_K", DT_Q6_K, 18},       [MIX_IQ4_NL] = {"IQ4_NL", DT_IQ4_NL, 25},
    [MIX_IQ4_XS] = {"IQ4_XS", DT_IQ4_XS, 30}, [MIX_IQ3_S] = {"IQ3_S", DT_IQ3_S, 26},
    [MIX_MXFP4] = {"MXFP4", DT_MXFP4, 38},
};

/* Aliases. */
static const struct {
    const char *name;
    enum mix_id mix;
} aliases[] = {
    {"Q3_K", MIX_Q3_K_M},
    {"Q4_K", MIX_Q4_K_M},
    {"Q5_K", MIX_Q5_K_M},
    {"MXFP4_MOE", MIX_MXFP4},
};

const struct mix *mix_find(const char *name)
{
    for (int i = 0; i < N_MIXES; i++)
        if (!strcasecmp(name, mixes[i].name))
            return &mixes[i];
    for (size_t i = 0; i < sizeof aliases / sizeof *aliases; i++)
        if (!strcasecmp(name, aliases[i].name))
            return &mixes[aliases[i].mix];
    return NULL;
}

const char *mix_names(void)
{
    return "F32, F16, BF16, Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q5_1, Q5_0, Q4_K_M, Q4_K_S, Q4_1, Q4_0, "
           "IQ4_NL, IQ4_XS, MXFP4, Q3_K_L, Q3_K_M, IQ3_S, Q3_K_S, Q2_K";
}

/* The first and the last eighth of the layers, and every third between. */
static bool more_bits(int layer, int n_layers)
{
    int eighth = n_layers / 8;
    return layer < eighth || layer >= 7 * n_layers / 8 || (layer - eighth) % 3 == 2;
}

bool mix_is_matrix(const char *name, int n_dims, const int64_t *dims)
{
    size_t len = strlen(name);
    while (n_dims > 1 && dims[n_dims - 1] == 1)
        n_dims--;
    return n_dims >= 2 && len > 7 && !strcmp(name + len - 7, ".weight") &&
           !strstr(name, "_norm.weight") && !strstr(name, "ffn_gate_inp.weight") &&
           !strstr(name, "conv1d") && !strstr(name, "shortconv.conv.") && !strstr(name, "altup_") &&
           !strstr(name, "_ape.") && !strstr(name, "_tid2eid.") && !strstr(name, "hc_") &&
           strncmp(name, "position_embd.", 14) && strncmp(name, "token_types.", 12) &&
           strcmp(name, "v.patch_embd.weight") && strcmp(name, "v.position_embd.weight") &&
           strcmp(name, "mm.patch_merger.weight") && strcmp(name, "mm.input_projection.weight") &&
           strncmp(name, "cls.", 4); /* other readers require floats here */
}

/* Attention values are few and sensitive, more so when many heads share them. */
static enum dtype attn_v(enum mix_id mix, const struct mix_model *m, int layer, enum dtype type)
{
    bool shared = m->n_heads / m->n_kv_heads >= 4, few = m->n_heads > m->n_kv_heads;
    switch (mix) {
    case MIX_Q2_K:
        type = shared ? DT_Q4_K : DT_Q3_K;
        break;
    case MIX_Q3_K_M:
        type = few ? DT_Q6_K : layer < 2 ? DT_Q5_K : DT_Q4_K;
        break;
    case MIX_IQ3_S:
        type = shared ? DT_Q4_K : type;
        break;
    case MIX_Q3_K_L:
        type = DT_Q5_K;
        break;
    case MIX_Q4_K_S:
        type = layer < 4 ? DT_Q5_K : type;
        break;
    case MIX_Q4_K_M:
    case MIX_Q5_K_M:
        type = more_bits(layer, m->n_layers) ? DT_Q6_K : type;
        break;
    case MIX_IQ4_NL:
    case MIX_IQ4_XS:
        type = shared ? DT_Q5_K : type;
        break;
    default:
        break;
    }
    /* Llama 70B has eight query heads per value head */
    if (m->is_llama && m->n_layers == 80 && m->n_heads != m->n_kv_heads &&
        (type == DT_Q3_K || type == DT_Q4_K))
        type = DT_Q5_K;
    return m->n_expert == 8 ? DT_Q8_0 : type;
}

static enum dtype ffn_down(enum mix_id mix, const struct mix_model *m, int layer, enum dtype type)
{
    bool early = layer < m->n_layers / 8;
    switch (mix) {
    case MIX_Q2_K:
        return DT_Q3_K;
    case MIX_Q3_K_M:
        return layer < m->n_layers / 16 ? DT_Q5_K : DT_Q4_K;
    case MIX_Q3_K_L:
        return DT_Q5_K;
    case MIX_Q4_K_S:
        return early ? DT_Q5_K : type;
    case MIX_Q4_K_M:
    case MIX_Q5_K_M:
        return more_bits(layer, m->n_layers) ? DT_Q6_K : type;
    case MIX_IQ4_NL:
    case MIX_IQ4_XS:
        return early && !m->importance ? DT_Q5_K : type;
    case MIX_Q4_0:
        return early && m->importance ? DT_Q4_1 : type;
    case MIX_Q5_0:
        return early && m->importance ? DT_Q5_1 : type;
    default:
        return type;
    }
}

static enum dtype attn_output(enum mix_id mix, const struct mix_model *m, enum dtype type)
{
    if (m->n_expert == 8)
        return mix == MIX_Q2_K || mix == MIX_Q3_K_S || mix == MIX_Q3_K_M || mix == MIX_Q4_K_S ||
                       mix == MIX_Q4_K_M || mix == MIX_IQ4_NL || mix == MIX_IQ4_XS ||
                       mix == MIX_IQ3_S
                   ? DT_Q5_K
                   : type;
    return mix == MIX_Q2_K     ? DT_Q3_K
           : mix == MIX_Q3_K_M ? DT_Q4_K
           : mix == MIX_Q3_K_L ? DT_Q5_K
                               : type;
}

enum dtype mix_fitting(enum dtype type, int64_t n)
{
    if (n % dtype_table[type].block_len == 0)
        return type;
    switch (type) {
    case DT_Q2_K:
    case DT_Q3_K:
        type = DT_Q4_0;
        break;
    case DT_Q4_K:
        type = DT_Q5_0;
        break;
    case DT_Q5_K:
        type = DT_Q5_1;
        break;
    case DT_Q6_K:
        type = DT_Q8_0;
        break;
    case DT_IQ4_XS:
    case DT_IQ3_S:
        type = DT_IQ4_NL;
        break;
    default:
        break;
    }
    return n % dtype_table[type].block_len ? DT_F16 : type;
}

enum dtype mix_choose(const struct mix *mix, const struct mix_model *m, const char *name,
                      const int64_t *dims)
{
    enum mix_id id = (enum mix_id)(mix - mixes);
    enum dtype type = mix->base;
    if (id <= MIX_BF16)
        return type;
    const char *at = strncmp(name, "v.", 2) ? name : name + 2; /* an image tower's */
    int layer = strncmp(at, "blk.", 4) ? 0 : atoi(at + 4);
    bool embedding = !strcmp(name, "token_embd.weight");
    if (!strcmp(name, "output.weight") || (m->tied && embedding)) {
        if (id == MIX_MXFP4 || dims[0] % dtype_table[type].block_len)
            type = DT_Q8_0;
        else if (type != DT_Q8_0)
            type = DT_Q6_K;
    } else if (id == MIX_MXFP4) {
        type = dims[2] > 1 ? DT_MXFP4 : DT_Q8_0; /* experts only */
    } else if (strstr(name, "attn_v.weight")) {
        type = attn_v(id, m, layer, type);
    } else if (strstr(name, "attn_k.weight")) {
        if (id == MIX_Q3_K_M && m->n_heads > m->n_kv_heads)
            type = DT_Q4_K; /* shared experts are few, and gain from a few more bits */
        type = m->n_expert == 8 ? DT_Q8_0 : type;
    } else if (strstr(name, "ffn_down")) {
        type = ffn_down(id, m, layer, type);
    } else if (strstr(name, "attn_output.weight")) {
        type = attn_output(id, m, type);
    }
    return type;
}
