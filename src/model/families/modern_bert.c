/*
 * ModernBERT: an encoder with pre-norm blocks (the first layer has no norm: the embedding is
 * normed), RoPE, GeGLU, and two of three layers with a symmetric window.
 */
#include "model/families/family.h"

#include <math.h>
#include <string.h>

static const struct tensor_name emb = {"token_embd", "model.embeddings.tok_embeddings"};
static const struct tensor_name emb_norm = {"token_embd_norm", "model.embeddings.norm"};
static const struct tensor_name emb_bias = {"=token_embd_norm.bias", "=model.embeddings.norm.bias"};
static const struct tensor_name end_norm = {"output_norm", "model.final_norm"};
static const struct tensor_name end_bias = {"=output_norm.bias", "=model.final_norm.bias"};
static const struct tensor_name attn_norm = {"blk.%d.attn_norm", "model.layers.%d.attn_norm"};
static const struct tensor_name attn_bias = {"=blk.%d.attn_norm.bias",
                                             "=model.layers.%d.attn_norm.bias"};
static const struct tensor_name qkv = {"blk.%d.attn_qkv", "model.layers.%d.attn.Wqkv"};
static const struct tensor_name wo = {"blk.%d.attn_output", "model.layers.%d.attn.Wo"};
static const struct tensor_name ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.mlp_norm"};
static const struct tensor_name ffn_bias = {"=blk.%d.ffn_norm.bias",
                                            "=model.layers.%d.mlp_norm.bias"};
static const struct tensor_name gate_up = {"blk.%d.ffn_up", "model.layers.%d.mlp.Wi"};
static const struct tensor_name down = {"blk.%d.ffn_down", "model.layers.%d.mlp.Wo"};

/* Sets a window of `across` positions, half of them on each side. */
static void set_window(struct config *c, int layer, int across)
{
    c->window[layer] = across ? across / 2 + 1 : 0;
}

static bool read_layers(const struct meta_reader *in, int across)
{
    struct config *c = in->c;
    int period = 3;
    const json_t *types = reader_get(in->hf, "layer_types", NULL);
    if (!reader_int(in, "global_attn_every_n_layers", NULL, 1, 1 << 20, false, &period))
        return false;
    if (types && json_array_size(types) != (size_t)c->n_layers)
        return error_set(in->err, "%s: config.json: layer_types: %zu entries for %d layers",
                         in->f->path, json_array_size(types), c->n_layers);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = types ? json_string_value(json_array_get(types, (size_t)i)) : NULL;
        bool slides = type ? !strcmp(type, "sliding_attention") : i % period != 0;
        set_window(c, i, slides ? across : 0);
    }
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    const char *act = json_string_value(reader_get(in->hf, "hidden_activation", NULL));
    double eps = 1e-5;
    int across = 128;
    if (act && strcmp(act, "gelu"))
        return error_set(in->err,
                         "%s: config.json: hidden_activation \"%.40s\" is not supported (gelu is)",
                         in->f->path, act);
    if (!reader_int(in, "num_hidden_layers", NULL, 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !reader_int(in, "hidden_size", NULL, 1, 1 << 20, true, &c->n_embd) ||
        !reader_int(in, "num_attention_heads", NULL, 1, 1 << 14, true, &c->n_heads) ||
        !reader_int(in, "intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff) ||
        !reader_int(in, "vocab_size", NULL, 1, 1 << 24, true, &c->n_vocab) ||
        !reader_int(in, "max_position_embeddings", NULL, 1, 1 << 24, true, &c->context) ||
        !reader_int(in, "local_attention", NULL, 2, 1 << 24, false, &across) ||
        !reader_number(in, in->hf, "norm_eps", 0, 1, false, &eps) || !encoder_finish(in) ||
        !read_layers(in, across) || !rope_read_hf(in))
        return false;
    c->norm_eps = (float)eps;
    if (!reader_get(in->hf, "rope_parameters", NULL)) {
        c->rope.theta = 160000;
        c->rope_window.theta = 10000;
    }
    return reader_number(in, in->hf, "global_rope_theta", 1, 1e12, false, &c->rope.theta) &&
           reader_number(in, in->hf, "local_rope_theta", 1, 1e12, false, &c->rope_window.theta);
}

static bool read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int across = 128, period = 3;
    if (!encoder_read_gguf(in) || !encoder_finish(in) ||
        !reader_gguf_int(in, "attention.sliding_window", 2, 1 << 24, false, &across) ||
        !reader_gguf_int(in, "attention.sliding_window_pattern", 1, 1 << 20, false, &period))
        return false;
    for (int i = 0; i < c->n_layers; i++)
        set_window(c, i, i % period ? across : 0);
    c->n_rot = c->head_dim;
    if (!rope_read_gguf(in))
        return false;
    c->rope_window = c->rope;
    c->rope_window.theta = 10000;
    return reader_gguf_float(in, "rope.freq_base_swa", 1, 1e12, false, &c->rope_window.theta);
}

static bool read(const struct meta_reader *in)
{
    return in->f->is_gguf ? read_gguf(in) : read_hf(in);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope_config *const configs[] = {&c->rope, &c->rope_window};
    const struct rope *ropes = build_ropes(b, 2, configs, (const int[]){c->n_rot, c->n_rot});
    int E = c->n_embd, F = c->n_ff;
    b->net->embed.tokens = build_matrix(b, WEIGHT_EMBED, 0, &emb, E, c->n_vocab);
    b->net->embed.norm = build_layer_norm(b, 0, &emb_norm, &emb_bias, E);
    b->net->head.norm = build_layer_norm(b, 0, &end_norm, &end_bias, E);
    for (int i = 0; i < c->n_layers; i++) {
        struct layer *l = &b->net->layers[i];
        l->mixer = (struct mixer){.kind = MIXER_ATTENTION};
        if (i > 0)
            l->mixer.block.in = build_layer_norm(b, i, &attn_norm, &attn_bias, E);
        l->mixer.attention =
            (struct attention){.n_heads = c->n_heads,
                               .n_kv_heads = c->n_heads,
                               .k_dim = c->head_dim,
                               .v_dim = c->head_dim,
                               .rope = &ropes[c->window[i] != 0],
                               .scale = 1.0f / sqrtf((float)c->head_dim),
                               .window = c->window[i],
                               .bidirectional = true,
                               .wqkv = build_matrix(b, WEIGHT_LINEAR, i, &qkv, E, 3 * E),
                               .wo = build_matrix(b, WEIGHT_LINEAR, i, &wo, E, E)};
        l->mlp = (struct mlp){.block.in = build_layer_norm(b, i, &ffn_norm, &ffn_bias, E)};
        l->mlp.dense =
            (struct ffn){.act = ACT_GELU,
                         .gate_up = build_matrix(b, WEIGHT_LINEAR, i, &gate_up, E, 2 * F),
                         .down = build_matrix(b, WEIGHT_LINEAR, i, &down, F, E)};
    }
}

const struct model_family family_modern_bert = {
    .name = "modern-bert",
    .hf = "modernbert",
    .hf_class = "ModernBertModel",
    .hf_embed = "embeddings.tok_embeddings",
    .encoder = true,
    .read = read,
    .build = build,
    .own_windows = true,
    .spare = encoder_spare,
};
