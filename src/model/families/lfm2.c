/*
 * LFM2 and its mixtures of experts: short convolutions in most layers, attention with QK-norm in the others. The
 * mixtures have dense first layers, then sigmoid routing with a bias.
 */
#include "model/families/family.h"

#include <stdio.h>
#include <string.h>

#define LFM2_NAMES                                                                                 \
    .emb = {"token_embd", "model.embed_tokens"},                                                   \
    .norm = {"token_embd_norm", "model.embedding_norm"}, .head = {"output", "lm_head"},            \
    .attn_norm = {"blk.%d.attn_norm", "model.layers.%d.operator_norm"},                            \
    .q = {"blk.%d.attn_q", "model.layers.%d.self_attn.q_proj"},                                    \
    .k = {"blk.%d.attn_k", "model.layers.%d.self_attn.k_proj"},                                    \
    .v = {"blk.%d.attn_v", "model.layers.%d.self_attn.v_proj"},                                    \
    .o = {"blk.%d.attn_output", "model.layers.%d.self_attn.out_proj"},                             \
    .q_norm = {"blk.%d.attn_q_norm", "model.layers.%d.self_attn.q_layernorm"},                     \
    .k_norm = {"blk.%d.attn_k_norm", "model.layers.%d.self_attn.k_layernorm"},                     \
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.ffn_norm"},                                   \
    .gate = {"blk.%d.ffn_gate", "model.layers.%d.feed_forward.w1"},                                \
    .up = {"blk.%d.ffn_up", "model.layers.%d.feed_forward.w3"},                                    \
    .down = {"blk.%d.ffn_down", "model.layers.%d.feed_forward.w2"},                                \
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.feed_forward.gate"},                        \
    .gate_exp = {"blk.%d.ffn_gate_exps", "model.layers.%d.feed_forward.experts.%d.w1"},            \
    .up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.feed_forward.experts.%d.w3"},                \
    .down_exp = {"blk.%d.ffn_down_exps", "model.layers.%d.feed_forward.experts.%d.w2"}

static const struct decoder_names names = {LFM2_NAMES};
static const struct decoder_names biased = {
    LFM2_NAMES,
    .choice_bias = {"=blk.%d.exp_probs_b.bias", "=model.layers.%d.feed_forward.expert_bias"}};

static const struct tensor_name conv_in = {"blk.%d.shortconv.in_proj",
                                           "model.layers.%d.conv.in_proj"},
                                conv = {"blk.%d.shortconv.conv", "model.layers.%d.conv.conv"},
                                conv_bias = {"=blk.%d.shortconv.conv.bias",
                                             "=model.layers.%d.conv.conv.bias"},
                                conv_out = {"blk.%d.shortconv.out_proj",
                                            "model.layers.%d.conv.out_proj"};

static const struct decoder decoder = {.names = &names, .qk_norm = true, .router = ROUTER_SIGMOID};
static const struct decoder routed = {.names = &biased, .qk_norm = true, .router = ROUTER_SIGMOID};

/* The width of the mlp, which config.json gives before a rule is applied. */
static bool read_width(const struct meta_reader *in)
{
    struct config *c = in->c;
    bool adjusts = true;
    double factor = 1;
    int multiple = 256;
    if (!reader_int(in, "block_ff_dim", NULL, 1, 1 << 24, false, &c->n_ff) ||
        !reader_bool(in, "block_auto_adjust_ff_dim", &adjusts) ||
        !reader_number(in, in->hf, "block_ffn_dim_multiplier", 1e-3, 1e3, false, &factor) ||
        !reader_int(in, "block_multiple_of", NULL, 1, 1 << 20, false, &multiple))
        return false;
    if (adjusts) {
        int64_t n = (int64_t)(factor * (double)((int64_t)c->n_ff * 2 / 3));
        n = (n + multiple - 1) / multiple * multiple;
        if (!reader_range(in, "config.json: intermediate_size", (double)n, 1, 1 << 24))
            return false;
        c->n_ff = (int)n;
    }
    return true;
}

static bool read_hf(const struct meta_reader *in, bool moe)
{
    struct config *c = in->c;
    int dense = 0;
    double eps = 1e-5, scale = 1;
    bool tied = true;
    const json_t *types = reader_get(in->hf, "layer_types", NULL);
    const json_t *full = reader_get(in->hf, "full_attn_idxs", NULL);
    if (!reader_number(in, in->hf, "norm_eps", 0, 1, false, &eps) ||
        !reader_int(in, "conv_L_cache", NULL, 2, 64, true, &c->conv_len) ||
        !reader_bool(in, "tie_embedding", &tied) || !reader_bool(in, "tie_word_embeddings", &tied))
        return false;
    c->norm_eps = (float)eps;
    c->tied |= tied;
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        bool attends = type && !strcmp(type, "full_attention");
        for (size_t j = 0; !type && j < json_array_size(full); j++)
            attends |= json_integer_value(json_array_get(full, j)) == i;
        if (type && !attends && strcmp(type, "conv") != 0)
            return error_set(in->err,
                             "%s: config.json: layer_types[%d]: \"%.40s\" is not supported (conv "
                             "and full_attention are)",
                             in->f->path, i, type);
        c->is_linear[i] = !attends;
    }
    if (!moe)
        return read_width(in);
    c->norm_topk = true;
    if (!reader_int(in, "num_experts", NULL, 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, true,
                    &c->n_expert_used) ||
        !reader_int(in, "moe_intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff_exp) ||
        !reader_int(in, "num_dense_layers", NULL, 0, 1 << 20, false, &dense) ||
        !reader_number(in, in->hf, "routed_scaling_factor", 1e-3, 1e3, false, &scale) ||
        !reader_bool(in, "norm_topk_prob", &c->norm_topk))
        return false;
    c->router = ROUTER_SIGMOID;
    c->expert_scale = (float)scale;
    for (int i = 0; i < c->n_layers; i++)
        c->is_moe[i] = i >= dense;
    return true;
}

static bool read_any(const struct meta_reader *in, bool moe)
{
    if (!decoder_read(in, &decoder))
        return false;
    return in->f->is_gguf ? reader_gguf_int(in, "shortconv.l_cache", 2, 64, true, &in->c->conv_len)
                          : read_hf(in, moe);
}

static bool read_dense(const struct meta_reader *in)
{
    return read_any(in, false);
}

static bool read_moe(const struct meta_reader *in)
{
    return read_any(in, true);
}

static void build_conv(struct net_builder *b, int i, struct mixer *m)
{
    const struct config *c = b->c;
    int E = c->n_embd;
    *m = (struct mixer){.kind = MIXER_SHORT_CONV};
    m->block.in = build_rms(b, i, &names.attn_norm, E);
    m->short_conv.conv_len = c->conv_len;
    m->short_conv.w_in = build_matrix(b, WEIGHT_LINEAR, i, &conv_in, E, 3 * E);
    m->short_conv.conv = build_table(b, i, &conv, E, c->conv_len);
    if (build_find(b->f, c, &conv_bias, i, 0, "weight"))
        m->short_conv.bias = build_vector(b, i, &conv_bias, E, (struct adjust){0});
    m->short_conv.w_out = build_matrix(b, WEIGHT_LINEAR, i, &conv_out, E, E);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope *rope = build_rope(b);
    bool bias = c->n_expert && build_has(b, &biased.choice_bias, c->n_layers - 1);
    decoder_ends(b, &decoder);
    for (int i = 0; i < c->n_layers; i++) {
        struct layer *l = &b->net->layers[i];
        if (c->is_linear[i])
            build_conv(b, i, &l->mixer);
        else
            decoder_mixer(b, &decoder, i, rope, &l->mixer);
        decoder_mlp(b, bias ? &routed : &decoder, i, &l->mlp);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    char key[96];
    snprintf(key, sizeof key, "%s.shortconv.l_cache", c->family->name);
    gguf_set_u32(w, key, (uint32_t)c->conv_len);
    if (c->n_expert)
        decoder_write_dense(c, w);
}

const struct model_family family_lfm2 = {
    .name = "lfm2",
    .hf = "lfm2",
    .hf_class = "Lfm2ForCausalLM",
    .zero_heads = true,
    .read = read_dense,
    .build = build,
    .write = write,
};

const struct model_family family_lfm2_moe = {
    .name = "lfm2moe",
    .hf = "lfm2_moe",
    .hf_class = "Lfm2MoeForCausalLM",
    .zero_heads = true,
    .read = read_moe,
    .build = build,
    .write = write,
};
