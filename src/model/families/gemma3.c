/*
 * Gemma 3: norms before and after blocks, GeGLU, five layers with a window and their own RoPE to
 * one with full attention, embeddings scaled by sqrt(n_embd).
 */
#include "model/families/family.h"

#include <math.h>

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    .attn_post = {"blk.%d.post_attention_norm", "model.layers.%d.post_attention_layernorm"},
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.pre_feedforward_layernorm"},
    .ffn_post = {"blk.%d.post_ffw_norm", "model.layers.%d.post_feedforward_layernorm"},
    DECODER_FFN};

static const struct decoder decoder = {.names = &names,
                                       .qk_norm = true,
                                       .norm_add = 1,
                                       .act = ACT_GELU_TANH,
                                       .act_name = "gelu_pytorch_tanh",
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true,
                                       .window_period = 6};

/* The attention scale that GGUF readers assume. The 27B's is derived from n_embd. */
static float usual_scale(const struct config *c)
{
    return 1.0f / sqrtf((float)(c->n_layers == 62 ? c->n_embd / c->n_heads : c->head_dim));
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    double scalar = 0, attn = 0, final = 0;
    if (!decoder_read(in, &decoder))
        return false;
    c->embed_scale = sqrtf((float)c->n_embd);
    c->sees_both_ways = true;
    c->attn_scale = usual_scale(c);
    if (in->f->is_gguf) {
        c->rope_window = (struct rope_config){.theta = 10000, .factor = 1};
        if (!reader_gguf_float(in, "rope.freq_base_swa", 1, 1e12, false, &c->rope_window.theta) ||
            !reader_gguf_float(in, "final_logit_softcapping", 0, 1e6, false, &final))
            return false;
    } else {
        if (!reader_number(in, in->hf, "query_pre_attn_scalar", 1e-3, 1e6, false, &scalar) ||
            !reader_number(in, in->hf, "attn_logit_softcapping", 0, 1e6, false, &attn) ||
            !reader_number(in, in->hf, "final_logit_softcapping", 0, 1e6, false, &final))
            return false;
        c->tied = true;
        if (c->rope_window.theta == 0)
            c->rope_window.theta = 10000;
    }
    if (scalar > 0) {
        c->attn_scale = (float)(1 / sqrt(scalar));
        c->attn_fold = c->attn_scale / usual_scale(c);
    }
    c->attn_softcap = (float)attn;
    c->head_softcap = (float) final;
    c->n_rot_window = c->n_rot;
    return true;
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope_config *const configs[] = {&c->rope, &c->rope_window};
    const struct rope *ropes = build_ropes(b, 2, configs, (const int[]){c->n_rot, c->n_rot_window});
    decoder_ends(b, &decoder);
    for (int i = 0; i < c->n_layers; i++) {
        decoder_mixer(b, &decoder, i, &ropes[c->window[i] != 0], &b->net->layers[i].mixer);
        decoder_mlp(b, &decoder, i, &b->net->layers[i].mlp);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    bool usual = true;
    for (int i = 0; i < c->n_layers; i++)
        usual &= (c->window[i] != 0) == (i % 6 < 5);
    if (!usual)
        decoder_write_windows(c, w);
    gguf_set_f32(w, "gemma3.rope.freq_base_swa", (float)c->rope_window.theta);
    if (c->head_softcap != 0)
        gguf_set_f32(w, "gemma3.final_logit_softcapping", c->head_softcap);
}

const struct model_family family_gemma3 = {
    .name = "gemma3",
    .hf = "gemma3_text",
    .hf_class = "Gemma3ForCausalLM",
    .own_windows = true,
    .read = read,
    .build = build,
    .write = write,
};
