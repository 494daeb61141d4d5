/*
 * MiMo-V2-Flash: keys and values of different widths, a factor on values, windows with sinks, more KV heads and a RoPE of
 * their own, sigmoid routing with a bias. Blocks that draft tokens are not used.
 */
#include "model/families/family.h"

#include <string.h>

#define MIMO_NAMES                                                                                 \
    DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP, DECODER_EXPERTS,                                 \
        .choice_bias = {"=blk.%d.exp_probs_b.bias",                                                \
                        "=model.layers.%d.mlp.gate.e_score_correction_bias"}
#define SINKS                                                                                      \
    {                                                                                              \
        "blk.%d.attn_sinks", "=model.layers.%d.self_attn.attention_sink_bias"                      \
    }

static const struct decoder_names names = {MIMO_NAMES};
static const struct decoder_names with_sinks = {MIMO_NAMES, .sinks = SINKS};
static const struct tensor_name sinks = SINKS;

#define MIMO                                                                                       \
    .router = ROUTER_SIGMOID, .windows = true, .windows_unasked = true, .windows_all = true,       \
    .own_values = true, .window_rope = true

static const struct decoder decoder = {.names = &names, MIMO};
static const struct decoder sunk = {.names = &with_sinks, MIMO};

/* Layers with a window, with experts: as lists of 0 and 1 in published folders. */
static bool read_pattern(const struct meta_reader *in, const char *key, int i, bool *is)
{
    const json_t *list = reader_get(in->hf, key, NULL);
    const json_t *one = json_array_get(list, (size_t)i);
    if (list && !json_is_integer(one))
        return error_set(in->err, "%s: config.json: %s: entry %d: expected 0 or 1", in->f->path,
                         key, i);
    *is = list ? json_integer_value(one) != 0 : *is;
    return true;
}

static bool read_layers(const struct meta_reader *in)
{
    struct config *c = in->c;
    int window = 0, heads = 2 * c->n_kv_heads;
    bool in_windows = true, in_others = false;
    if (!reader_int(in, "sliding_window", NULL, 1, 1 << 30, true, &window) ||
        !reader_int(in, "swa_num_key_value_heads", NULL, 1, 1 << 14, false, &heads) ||
        !reader_bool(in, "add_swa_attention_sink_bias", &in_windows) ||
        !reader_bool(in, "add_full_attention_sink_bias", &in_others))
        return false;
    for (int i = 0; i < c->n_layers; i++) {
        bool slides = c->window[i] != 0;
        if (!read_pattern(in, "hybrid_layer_pattern", i, &slides) ||
            !read_pattern(in, "moe_layer_freq", i, &c->is_moe[i]))
            return false;
        c->window[i] = slides ? window : 0;
        c->layer_kv_heads[i] = slides ? heads : c->n_kv_heads;
        if ((slides ? in_windows : in_others) != build_present(in->f, c, &sinks, i))
            return error_set(in->err, "%s: config.json: %s: layer %d has %s", in->f->path,
                             slides ? "add_swa_attention_sink_bias"
                                    : "add_full_attention_sink_bias",
                             i, (slides ? in_windows : in_others) ? "no sinks" : "sinks");
    }
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    double eps = (double)c->norm_eps, scale = 1, theta = c->rope_window.theta;
    int heads = c->n_heads, dim = c->head_dim, v_dim;
    if (!reader_int(in, "v_head_dim", NULL, 1, 1 << 14, true, &c->v_dim))
        return false;
    v_dim = c->v_dim;
    if (!reader_number(in, in->hf, "layernorm_epsilon", 0, 1, false, &eps) ||
        !reader_number(in, in->hf, "attention_value_scale", 1e-6, 1e6, false, &scale) ||
        !reader_number(in, in->hf, "swa_rope_theta", 1, 1e12, false, &theta) ||
        !reader_int(in, "swa_num_attention_heads", NULL, 1, 1 << 14, false, &heads) ||
        !reader_int(in, "swa_head_dim", NULL, 1, 1 << 14, false, &dim) ||
        !reader_int(in, "swa_v_head_dim", NULL, 1, 1 << 14, false, &v_dim))
        return false;
    if (heads != c->n_heads || dim != c->head_dim || v_dim != c->v_dim)
        return error_set(in->err,
                         "%s: config.json: %s: queries or heads of windows unlike the others are "
                         "not supported",
                         in->f->path,
                         heads != c->n_heads  ? "swa_num_attention_heads"
                         : dim != c->head_dim ? "swa_head_dim"
                                              : "swa_v_head_dim");
    c->norm_eps = (float)eps;
    c->residual_scale = (float)scale;
    c->rope_window.theta = theta;
    return decoder_read_routed(in) && read_layers(in);
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    int extra = 0;
    double scale = 1;
    if (!decoder_read(in, &decoder))
        return false;
    if (!in->f->is_gguf)
        return read_hf(in) && decoder_read_window_rope(in);
    if (!reader_gguf_int(in, "nextn_predict_layers", 0, c->n_layers - 1, false, &extra) ||
        !reader_gguf_float(in, "attention.value_scale", 1e-6, 1e6, false, &scale))
        return false;
    c->n_layers -= extra;
    c->residual_scale = (float)scale;
    c->router = ROUTER_SIGMOID;
    return decoder_read_window_rope(in);
}

/* Attention's result is proportional to the values, so their factor is one of the block. */
static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope_config *const configs[] = {&c->rope, &c->rope_window};
    const struct rope *ropes = build_ropes(b, 2, configs, (const int[]){c->n_rot, c->n_rot_window});
    decoder_ends(b, &decoder);
    for (int i = 0; i < c->n_layers; i++) {
        struct layer *l = &b->net->layers[i];
        const struct decoder *d = build_has(b, &sinks, i) ? &sunk : &decoder;
        decoder_mixer(b, d, i, &ropes[c->window[i] != 0], &l->mixer);
        decoder_mlp(b, d, i, &l->mlp);
        l->mlp.block.scale = 0;
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    decoder_write_window_list(c, w);
    gguf_set_f32(w, "mimo2.rope.freq_base_swa", (float)c->rope_window.theta);
    if (c->residual_scale != 1)
        gguf_set_f32(w, "mimo2.attention.value_scale", c->residual_scale);
}

static bool spare(const struct config *c, const char *tensor)
{
    (void)c;
    return !strncmp(tensor, "model.mtp.", 10);
}

const struct model_family family_mimo2 = {
    .name = "mimo2",
    .hf = "mimo_v2_flash",
    .hf_class = "MiMoV2FlashForCausalLM",
    .own_windows = true,
    .read = read,
    .build = build,
    .write = write,
    .spare = spare,
};
