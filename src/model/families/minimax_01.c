/*
 * MiniMax-Text-01 and MiniMax-M1: lightning attention in most layers, attention with RoPE over half of a head in the others,
 * Mixtral's experts; blocks keep their normed input instead of the stream. Lightning attention is a state-space model
 * (layer.h) without a convolution, whose decay is fixed by head and layer. A GGUF has one factor, of what blocks keep; others have keys
 * of ours.
 */
#include "base/mem.h"
#include "model/families/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct decoder_names names = {DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP,
                                           DECODER_EXPERTS_W};
static const struct decoder decoder = {.names = &names, .experts = true, .experts_wide = true};

static const struct tensor_name qkv = {"blk.%d.attn_qkv", "model.layers.%d.self_attn.qkv_proj"},
                                gate = {"blk.%d.attn_gate",
                                        "model.layers.%d.self_attn.output_gate"},
                                norm = {"blk.%d.attn_norm_2", "model.layers.%d.self_attn.norm"},
                                out = {"blk.%d.attn_output", "model.layers.%d.self_attn.out_proj"};

enum { KINDS = 3 }; /* lightning attention, attention, mlps */
static const char *const factor_keys[KINDS][2][3] = {
    /* transformers', the original's, GGUF's; of the normed input, then of the block's result */
    {{"linear_attn_alpha_factor", "layernorm_linear_attention_alpha", "residual_scale"},
     {"linear_attn_beta_factor", "layernorm_linear_attention_beta", "linear_attention_scale"}},
    {{"full_attn_alpha_factor", "layernorm_full_attention_alpha", "full_attention_residual_scale"},
     {"full_attn_beta_factor", "layernorm_full_attention_beta", "full_attention_scale"}},
    {{"mlp_alpha_factor", "layernorm_mlp_alpha", "feed_forward_residual_scale"},
     {"mlp_beta_factor", "layernorm_mlp_beta", "feed_forward_scale"}}};

static bool read_factors(const struct meta_reader *in)
{
    for (int k = 0; k < KINDS; k++)
        for (int i = 0; i < 2; i++) {
            const char *const *key = factor_keys[k][i];
            double v = i || !k ? 1 : (double)in->c->keep[0][0];
            if (in->f->is_gguf ? !reader_gguf_float(in, key[2], 1e-3, 1e3, false, &v)
                               : !reader_number(in, in->hf, key[0], 1e-3, 1e3, false, &v) ||
                                     !reader_number(in, in->hf, key[1], 1e-3, 1e3, false, &v))
                return false;
            in->c->keep[k][i] = (float)v;
        }
    return true;
}

/* Which layers have lightning attention. */
static bool read_gguf_kinds(const struct meta_reader *in)
{
    struct config *c = in->c;
    int kinds[CONFIG_MAX_LAYERS], interval = 8;
    if (!reader_gguf_int(in, "full_attention_interval", 1, CONFIG_MAX_LAYERS, false, &interval))
        return false;
    for (int i = 0; i < c->n_layers; i++)
        kinds[i] = (i + 1) % interval != 0;
    if (!reader_gguf_layers(in, "attention.recurrent_layers", 0, 1, false, kinds))
        return false;
    for (int i = 0; i < c->n_layers; i++)
        c->is_linear[i] = kinds[i];
    return true;
}

static bool read_hf_kinds(const struct meta_reader *in)
{
    struct config *c = in->c;
    const json_t *types = reader_get(in->hf, "layer_types", "attn_type_list");
    const json_t *rope = reader_get(in->hf, "rope_parameters", "rope_scaling");
    bool post = true;
    if (!reader_get(rope ? rope : in->hf, "partial_rotary_factor", NULL))
        c->n_rot = c->head_dim / 2;
    if (!reader_int(in, "rotary_dim", NULL, 2, c->head_dim, false, &c->n_rot) ||
        !reader_bool(in, "postnorm", &post))
        return false;
    if (!post)
        return error_set(in->err, "%s: config.json: postnorm: false is not supported", in->f->path);
    if (types && json_array_size(types) != (size_t)c->n_layers)
        return error_set(in->err, "%s: config.json: attn_type_list: %zu entries for %d layers",
                         in->f->path, json_array_size(types), c->n_layers);
    for (int i = 0; i < c->n_layers; i++) {
        const json_t *t = json_array_get(types, (size_t)i);
        c->is_linear[i] = json_is_string(t)    ? !strcmp(json_string_value(t), "linear_attention")
                          : json_is_integer(t) ? !json_integer_value(t)
                                               : i % 2 == 0;
    }
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &decoder) || !read_factors(in) ||
        !(in->f->is_gguf ? read_gguf_kinds(in) : read_hf_kinds(in)))
        return false;
    c->norm_topk = true;
    for (int i = 0; i < c->n_layers; i++)
        if (!c->is_moe[i])
            return error_set(in->err, "%s: layer %d: no experts", in->f->path, i);
    return true;
}

/* Values, keys and queries of each head lie the other way round in the file. */
static void build_lightning(struct net_builder *b, int i, struct mixer *m)
{
    const struct config *c = b->c;
    int H = c->n_heads, D = c->head_dim, values = H * D;
    struct weight_rows rows[3];
    float *decay = mem_zalloc((size_t)H, sizeof *decay);
    for (int h = 0; h < H; h++)
        decay[h] = (float)(exp2(-8.0 * (h + 1) / H) * (1 - i / (c->n_layers - 1 + 1e-5) + 1e-5));
    for (int k = 0; k < 3; k++)
        rows[k] = (struct weight_rows){.name = &qkv,
                                       .n = values,
                                       .first = (2 - k) * D,
                                       .step = 3 * D,
                                       .run_length = D,
                                       .tensor_rows = 3 * values,
                                       .also_gguf = true};
    *m = (struct mixer){.kind = MIXER_SSM};
    m->block.in = build_rms(b, i, &names.attn_norm, c->n_embd);
    m->ssm = (struct ssm){.n_heads = H,
                          .n_groups = H,
                          .head_dim = D,
                          .state_dim = D,
                          .conv_len = 1,
                          .n_norms = 1,
                          .norm_first = true,
                          .sigmoid_gate = true};
    struct ssm *s = &m->ssm;
    s->w_in = build_weight(b, WEIGHT_LINEAR, i, c->n_embd, 1, 3, rows);
    b->specs[b->n_specs - 1].as = &qkv;
    b->specs[b->n_specs - 1].as_is = true;
    s->w_z = build_matrix(b, WEIGHT_LINEAR, i, &gate, c->n_embd, values);
    s->decay = build_values(b, i, decay, H);
    s->norm = build_rms(b, i, &norm, values);
    s->norm.eps = 1e-6f; /* independent of norm_eps */
    s->w_out = build_matrix(b, WEIGHT_LINEAR, i, &out, values, c->n_embd);
    mem_free(decay);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope *rope = build_rope(b);
    decoder_ends(b, &decoder);
    for (int i = 0; i < c->n_layers && !b->failed; i++) {
        struct layer *l = &b->net->layers[i];
        if (c->is_linear[i])
            build_lightning(b, i, &l->mixer);
        else
            decoder_mixer(b, &decoder, i, rope, &l->mixer);
        decoder_mlp(b, &decoder, i, &l->mlp);
        const float *of_mixer = c->keep[c->is_linear[i] ? 0 : 1], *of_mlp = c->keep[2];
        l->mixer.block.keep = of_mixer[0];
        l->mixer.block.scale = of_mixer[1];
        l->mlp.block.keep = of_mlp[0];
        l->mlp.block.scale = of_mlp[1];
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    char key[96];
    uint32_t recurrent[CONFIG_MAX_LAYERS];
    for (int i = 0; i < c->n_layers; i++)
        recurrent[i] = c->is_linear[i];
    gguf_set_array(w, "minimax-01.attention.recurrent_layers", META_U32, recurrent,
                   (size_t)c->n_layers);
    for (int k = 0; k < KINDS; k++)
        for (int i = 0; i < 2; i++) {
            snprintf(key, sizeof key, "minimax-01.%s", factor_keys[k][i][2]);
            if ((!k && !i) || c->keep[k][i] != (i ? 1 : c->keep[0][0]))
                gguf_set_f32(w, key, c->keep[k][i]);
        }
}

const struct model_family family_minimax_01 = {
    .name = "minimax-01",
    .hf = "minimax",
    .hf_class = "MiniMaxForCausalLM",
    .read = read,
    .build = build,
    .write = write,
};

/* The same under the names of its first release, and of MiniMax-M1. */
const struct model_family family_minimax_text_01 = {
    .name = "minimax_text_01",
    .hf = "minimax_text_01",
    .hf_class = "MiniMaxText01ForCausalLM",
    .gguf_as = "minimax-01",
    .read = read,
    .build = build,
    .write = write,
};

const struct model_family family_minimax_m1 = {
    .name = "minimax_m1",
    .hf = "minimax_m1",
    .hf_class = "MiniMaxM1ForCausalLM",
    .gguf_as = "minimax-01",
    .read = read,
    .build = build,
    .write = write,
};
