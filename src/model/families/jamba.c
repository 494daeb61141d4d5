/*
 * Jamba: selective scans of Mamba in most layers, attention without RoPE in the others, experts in every second one.
 */
#include "model/families/family.h"

#include <stdio.h>

static const struct decoder_names names = {
    .emb = {"token_embd", "model.embed_tokens"},
    .norm = {"output_norm", "model.final_layernorm"},
    .head = {"output", "lm_head"},
    DECODER_ATTENTION,
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.pre_ff_layernorm"},
    .gate = {"blk.%d.ffn_gate", "model.layers.%d.feed_forward.gate_proj"},
    .up = {"blk.%d.ffn_up", "model.layers.%d.feed_forward.up_proj"},
    .down = {"blk.%d.ffn_down", "model.layers.%d.feed_forward.down_proj"},
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.feed_forward.router"},
    .gate_exp = {"blk.%d.ffn_gate_exps", "model.layers.%d.feed_forward.experts.%d.gate_proj"},
    .up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.feed_forward.experts.%d.up_proj"},
    .down_exp = {"blk.%d.ffn_down_exps", "model.layers.%d.feed_forward.experts.%d.down_proj"}};
static const struct decoder decoder = {.names = &names};

static const struct tensor_name in_proj = {"blk.%d.ssm_in", "model.layers.%d.mamba.in_proj"},
                                conv = {"blk.%d.ssm_conv1d", "model.layers.%d.mamba.conv1d"},
                                conv_bias = {"=blk.%d.ssm_conv1d.bias",
                                             "=model.layers.%d.mamba.conv1d.bias"},
                                x_proj = {"blk.%d.ssm_x", "model.layers.%d.mamba.x_proj"},
                                dt_proj = {"blk.%d.ssm_dt", "model.layers.%d.mamba.dt_proj"},
                                dt_norm = {"blk.%d.ssm_dt_norm",
                                           "model.layers.%d.mamba.dt_layernorm"},
                                b_norm = {"blk.%d.ssm_b_norm", "model.layers.%d.mamba.b_layernorm"},
                                c_norm = {"blk.%d.ssm_c_norm", "model.layers.%d.mamba.c_layernorm"},
                                decay = {"=blk.%d.ssm_a", "=model.layers.%d.mamba.A_log"},
                                skip = {"=blk.%d.ssm_d", "=model.layers.%d.mamba.D"},
                                out_proj = {"blk.%d.ssm_out", "model.layers.%d.mamba.out_proj"};

/* Whether layer i is one of every `period` layers. */
static bool is_turn(int i, int offset, int period)
{
    return i >= offset && (i - offset) % period == 0;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int attn = 8, attn_at = 4, moe = 2, moe_at = 1, expand = 2;
    c->linear_k_dim = 16;
    c->linear_k_heads = (c->n_embd + 15) / 16;
    c->conv_len = 4;
    c->n_expert = 16;
    c->n_expert_used = 2;
    const json_t *rank = reader_get(in->hf, "mamba_dt_rank", NULL);
    if (!reader_int(in, "attn_layer_period", NULL, 1, 1 << 20, false, &attn) ||
        !reader_int(in, "attn_layer_offset", NULL, 0, 1 << 20, false, &attn_at) ||
        !reader_int(in, "expert_layer_period", NULL, 1, 1 << 20, false, &moe) ||
        !reader_int(in, "expert_layer_offset", NULL, 0, 1 << 20, false, &moe_at) ||
        !reader_int(in, "num_experts", NULL, 1, 4096, false, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, false,
                    &c->n_expert_used) ||
        !reader_int(in, "mamba_expand", NULL, 1, 64, false, &expand) ||
        !reader_int(in, "mamba_d_state", NULL, 1, 1 << 12, false, &c->linear_k_dim) ||
        !reader_int(in, "mamba_d_conv", NULL, 2, 64, false, &c->conv_len) ||
        (json_is_integer(rank) && /* or "auto" */
         !reader_int(in, "mamba_dt_rank", NULL, 1, 1 << 20, false, &c->linear_k_heads)))
        return false;
    c->linear_v_dim = expand * c->n_embd;
    c->n_ff_exp = c->n_ff;
    if (c->n_expert == 1)
        c->n_expert = c->n_expert_used = c->n_ff_exp = 0;
    for (int i = 0; i < c->n_layers; i++) {
        c->is_linear[i] = !is_turn(i, attn_at, attn);
        c->is_moe[i] = c->n_expert && is_turn(i, moe_at, moe);
    }
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &decoder))
        return false;
    c->norm_topk = false;
    for (int i = 0; i < c->n_layers; i++)
        c->no_rope[i] = true;
    if (!in->f->is_gguf)
        return read_hf(in);
    return reader_gguf_bool(in, "expert_weights_norm", &c->norm_topk) &&
           reader_gguf_int(in, "ssm.conv_kernel", 2, 64, true, &c->conv_len) &&
           reader_gguf_int(in, "ssm.inner_size", 1, 1 << 20, true, &c->linear_v_dim) &&
           reader_gguf_int(in, "ssm.state_size", 1, 1 << 12, true, &c->linear_k_dim) &&
           reader_gguf_int(in, "ssm.time_step_rank", 1, 1 << 20, true, &c->linear_k_heads);
}

static void build_scan(struct net_builder *b, int i, struct mixer *m)
{
    const struct config *c = b->c;
    int I = c->linear_v_dim, N = c->linear_k_dim, R = c->linear_k_heads;
    *m = (struct mixer){.kind = MIXER_SCAN};
    m->block.in = build_rms(b, i, &names.attn_norm, c->n_embd);
    m->scan = (struct scan){.n_channels = I, .state_dim = N, .dt_rank = R, .conv_len = c->conv_len};
    struct scan *s = &m->scan;
    s->w_in = build_matrix(b, WEIGHT_LINEAR, i, &in_proj, c->n_embd, 2 * I);
    s->conv = build_table(b, i, &conv, I, c->conv_len);
    if (build_find(b->f, c, &conv_bias, i, 0, "weight"))
        s->conv_bias = build_vector(b, i, &conv_bias, I, (struct adjust){0});
    s->w_x = build_matrix(b, WEIGHT_LINEAR, i, &x_proj, I, R + 2 * N);
    s->dt_norm = build_rms(b, i, &dt_norm, R);
    s->b_norm = build_rms(b, i, &b_norm, N);
    s->c_norm = build_rms(b, i, &c_norm, N);
    s->w_dt = build_matrix(b, WEIGHT_LINEAR, i, &dt_proj, R, I);
    s->decay = build_table(b, i, &decay, I, N);
    if (s->decay)
        b->specs[b->n_specs - 1].adjust.decay = true;
    s->skip = build_vector(b, i, &skip, I, (struct adjust){0});
    s->w_out = build_matrix(b, WEIGHT_LINEAR, i, &out_proj, I, c->n_embd);
}

static void build(struct net_builder *b)
{
    decoder_ends(b, &decoder);
    for (int i = 0; i < b->c->n_layers && !b->failed; i++) {
        struct layer *l = &b->net->layers[i];
        if (b->c->is_linear[i])
            build_scan(b, i, &l->mixer);
        else
            decoder_mixer(b, &decoder, i, NULL, &l->mixer);
        decoder_mlp(b, &decoder, i, &l->mlp);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    gguf_set_u32(w, "jamba.ssm.conv_kernel", (uint32_t)c->conv_len);
    gguf_set_u32(w, "jamba.ssm.inner_size", (uint32_t)c->linear_v_dim);
    gguf_set_u32(w, "jamba.ssm.state_size", (uint32_t)c->linear_k_dim);
    gguf_set_u32(w, "jamba.ssm.time_step_rank", (uint32_t)c->linear_k_heads);
}

const struct model_family family_jamba = {
    .name = "jamba",
    .hf = "jamba",
    .hf_class = "JambaForCausalLM",
    .zero_heads = true,
    .read = read,
    .build = build,
    .write = write,
};
