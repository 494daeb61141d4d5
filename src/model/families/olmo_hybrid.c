/*
 * OLMo Hybrid: gated delta nets whose beta goes up to 2, with a convolution each for q, k and v, in three of four layers;
 * attention with QK-norm over the projections in the others. Layers with a delta net have norms before their blocks,
 * layers with attention after them. Most models have no RoPE.
 */
#include "model/families/family.h"

#include <stdio.h>
#include <string.h>

static const struct decoder_names after = {DECODER_ENDS, DECODER_QKV, DECODER_FFN,
                                           DECODER_NORMS_AFTER};
static const struct decoder_names before = {
    DECODER_ENDS, DECODER_FFN,
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.feedforward_layer_norm"}};
static const struct decoder decoder = {.names = &after, .qk_norm = true, .norm_whole = true};
static const struct decoder linear = {.names = &before};

#define NET(name) "model.layers.%d.linear_attn." name
static const struct tensor_name norm = {"blk.%d.attn_norm", "model.layers.%d.attention_layer_norm"},
                                q = {"blk.%d.attn_q", NET("q_proj")},
                                k = {"blk.%d.attn_k", NET("k_proj")},
                                v = {"blk.%d.attn_v", NET("v_proj")},
                                gate = {"blk.%d.attn_gate", NET("g_proj")},
                                beta = {"blk.%d.ssm_beta", NET("b_proj")},
                                alpha = {"blk.%d.ssm_alpha", NET("a_proj")},
                                decay = {"=blk.%d.ssm_a", "=" NET("A_log")},
                                dt = {"=blk.%d.ssm_dt.bias", "=" NET("dt_bias")},
                                o_norm = {"blk.%d.ssm_norm", NET("o_norm")},
                                out = {"blk.%d.ssm_out", NET("o_proj")};
static const struct tensor_name convs[] = {{"blk.%d.ssm_conv1d_q", NET("q_conv1d")},
                                           {"blk.%d.ssm_conv1d_k", NET("k_conv1d")},
                                           {"blk.%d.ssm_conv1d_v", NET("v_conv1d")}};

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    bool twice = true;
    const json_t *types = reader_get(in->hf, "layer_types", NULL);
    const json_t *rope = reader_get(in->hf, "rope_parameters", NULL);
    c->linear_k_heads = c->linear_v_heads = c->n_heads;
    if (!reader_int(in, "linear_num_key_heads", NULL, 1, 1 << 12, false, &c->linear_k_heads) ||
        !reader_int(in, "linear_num_value_heads", NULL, 1, 1 << 12, false, &c->linear_v_heads))
        return false;
    c->linear_k_dim = (int)(0.75 * c->n_embd / c->linear_k_heads);
    c->conv_len = 4;
    if (!reader_int(in, "linear_key_head_dim", NULL, 1, 1 << 12, false, &c->linear_k_dim))
        return false;
    c->linear_v_dim = 2 * c->linear_k_dim;
    if (!reader_int(in, "linear_value_head_dim", NULL, 1, 1 << 12, false, &c->linear_v_dim) ||
        !reader_int(in, "linear_conv_kernel_dim", NULL, 1, 64, false, &c->conv_len) ||
        !reader_bool(in, "linear_allow_neg_eigval", &twice))
        return false;
    c->beta_scale = twice ? 2 : 1;
    bool no_rope = !reader_get(rope, "rope_theta", NULL) && !reader_get(in->hf, "rope_theta", NULL);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        c->is_linear[i] = type ? !strcmp(type, "linear_attention") : i % 4 != 3;
        c->no_rope[i] = no_rope;
    }
    if (no_rope)
        c->n_rot = 0;
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    double scale = 2;
    int inner = 0;
    if (!decoder_read(in, &decoder))
        return false;
    if (!in->f->is_gguf)
        return read_hf(in);
    if (!reader_gguf_int(in, "ssm.conv_kernel", 1, 64, true, &c->conv_len) ||
        !reader_gguf_int(in, "ssm.state_size", 1, 1 << 12, true, &c->linear_k_dim) ||
        !reader_gguf_int(in, "ssm.group_count", 1, 1 << 12, true, &c->linear_k_heads) ||
        !reader_gguf_int(in, "ssm.time_step_rank", 1, 1 << 12, true, &c->linear_v_heads) ||
        !reader_gguf_int(in, "ssm.inner_size", 1, 1 << 24, true, &inner) ||
        !reader_gguf_float(in, "ssm.beta_scale", 1e-3, 1e3, false, &scale))
        return false;
    if (inner % c->linear_v_heads)
        return error_set(in->err, "%s: %s.ssm.inner_size: %d does not divide by %d heads",
                         in->f->path, c->arch_name, inner, c->linear_v_heads);
    c->linear_v_dim = inner / c->linear_v_heads;
    c->beta_scale = (float)scale;
    for (int i = 0; i < c->n_layers; i++)
        c->no_rope[i] = c->n_rot == 0;
    return true;
}

static void build_net(struct net_builder *b, int i, struct mixer *m)
{
    const struct config *c = b->c;
    int Hk = c->linear_k_heads, Hv = c->linear_v_heads, E = c->n_embd;
    int keys = Hk * c->linear_k_dim, values = Hv * c->linear_v_dim;
    *m = (struct mixer){.kind = MIXER_DELTA_NET};
    m->block.in = build_rms(b, i, &norm, E);
    m->delta_net = (struct delta_net){.n_k_heads = Hk,
                                      .n_v_heads = Hv,
                                      .k_dim = c->linear_k_dim,
                                      .v_dim = c->linear_v_dim,
                                      .conv_len = c->conv_len,
                                      .beta_scale = c->beta_scale};
    struct delta_net *d = &m->delta_net;
    if (Hv % Hk) {
        b->failed = !error_set(b->err, "%s: %d value heads do not divide by %d key heads",
                               b->f->path, Hv, Hk);
        return;
    }
    d->wqkv = build_weight(b, WEIGHT_LINEAR, i, E, 1, 3,
                           (const struct weight_rows[]){{.name = &q, .n = keys},
                                                        {.name = &k, .n = keys},
                                                        {.name = &v, .n = values}});
    d->conv = build_tables(b, i, convs, (const int[]){keys, keys, values}, c->conv_len);
    d->wz = build_matrix(b, WEIGHT_LINEAR, i, &gate, E, values);
    d->wba = build_weight(
        b, WEIGHT_LINEAR, i, E, 1, 2,
        (const struct weight_rows[]){{.name = &beta, .n = Hv}, {.name = &alpha, .n = Hv}});
    d->decay = build_vector(b, i, &decay, Hv, (struct adjust){.decay = true});
    d->dt_bias = build_vector(b, i, &dt, Hv, (struct adjust){0});
    d->norm = build_rms(b, i, &o_norm, c->linear_v_dim);
    d->norm.eps = 1e-5f; /* independent of norm_eps */
    d->wo = build_matrix(b, WEIGHT_LINEAR, i, &out, values, E);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope *rope = c->no_rope[0] ? NULL : build_rope(b);
    decoder_ends(b, &decoder);
    for (int i = 0; i < c->n_layers && !b->failed; i++) {
        struct layer *l = &b->net->layers[i];
        if (c->is_linear[i])
            build_net(b, i, &l->mixer);
        else
            decoder_mixer(b, &decoder, i, rope, &l->mixer);
        decoder_mlp(b, c->is_linear[i] ? &linear : &decoder, i, &l->mlp);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    const struct {
        const char *key;
        int v;
    } numbers[] = {{"olmo-hybrid.ssm.conv_kernel", c->conv_len},
                   {"olmo-hybrid.ssm.state_size", c->linear_k_dim},
                   {"olmo-hybrid.ssm.group_count", c->linear_k_heads},
                   {"olmo-hybrid.ssm.time_step_rank", c->linear_v_heads},
                   {"olmo-hybrid.ssm.inner_size", c->linear_v_heads * c->linear_v_dim}};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        gguf_set_u32(w, numbers[i].key, (uint32_t)numbers[i].v);
    gguf_set_f32(w, "olmo-hybrid.ssm.beta_scale", c->beta_scale);
}

/* llama.cpp does not know it: the names are those of its other delta nets. */
const struct model_family family_olmo_hybrid = {
    .name = "olmo-hybrid",
    .hf = "olmo_hybrid",
    .hf_class = "OlmoHybridForCausalLM",
    .zero_heads = true,
    .read = read,
    .build = build,
    .write = write,
};
