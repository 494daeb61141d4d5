/*
 * Gemma 2: norms before and after blocks, GeGLU, a window in every other layer, soft caps of scores and of logits,
 * embeddings scaled by sqrt(n_embd).
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
                                       .norm_add = 1,
                                       .act = ACT_GELU_TANH,
                                       .act_name = "gelu_pytorch_tanh",
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true,
                                       .window_period = 2};

/* The scale of scores that GGUF readers assume. The 27B's is derived from n_embd. */
static float usual_scale(const struct config *c)
{
    return 1.0f / sqrtf((float)(c->n_layers == 46 ? c->n_embd / c->n_heads : c->head_dim));
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    double scalar = 0, attn = 50, final = 30;
    if (!decoder_read(in, &decoder))
        return false;
    c->embed_scale = sqrtf((float)c->n_embd);
    c->attn_scale = usual_scale(c);
    if (in->f->is_gguf) {
        double scale = 0;
        if (!reader_gguf_float(in, "attn_logit_softcapping", 0, 1e6, false, &attn) ||
            !reader_gguf_float(in, "final_logit_softcapping", 0, 1e6, false, &final) ||
            !reader_gguf_float(in, "attention.scale", 0, 1e6, false, &scale))
            return false;
        if (scale > 0)
            c->attn_scale = (float)scale;
    } else {
        c->tied = true;
        if (!reader_number(in, in->hf, "query_pre_attn_scalar", 1e-3, 1e6, false, &scalar) ||
            !reader_number(in, in->hf, "attn_logit_softcapping", 0, 1e6, false, &attn) ||
            !reader_number(in, in->hf, "final_logit_softcapping", 0, 1e6, false, &final))
            return false;
        if (scalar > 0)
            c->attn_scale = (float)(1 / sqrt(scalar));
    }
    c->attn_softcap = (float)attn;
    c->head_softcap = (float) final;
    return true;
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    gguf_set_f32(w, "gemma2.attn_logit_softcapping", c->attn_softcap);
    gguf_set_f32(w, "gemma2.final_logit_softcapping", c->head_softcap);
    if (c->attn_scale != usual_scale(c))
        gguf_set_f32(w, "gemma2.attention.scale", c->attn_scale);
}

const struct model_family family_gemma2 = {
    .name = "gemma2",
    .hf = "gemma2",
    .hf_class = "Gemma2ForCausalLM",
    .own_windows = true,
    .read = read,
    .build = build,
    .write = write,
};
