/*
 * Muse Glimmer: QK-norm without gains and with a scale, a gate of attention's output, norms around blocks whose folders
 * store the gain minus 1, RoPE only in layers with a window, embeddings that are normed, a scale and a softcap of logits.
 * A GGUF has the scale of scores in a gain of queries.
 */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    DECODER_FFN,
    .attn_gate = {"blk.%d.attn_gate", "model.layers.%d.self_attn.gate_proj"},
    .attn_post = {"blk.%d.post_attention_norm", "model.layers.%d.post_attention_layernorm"},
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.pre_feedforward_layernorm"},
    .ffn_post = {"blk.%d.post_ffw_norm", "model.layers.%d.post_feedforward_layernorm"}};

static const struct decoder decoder = {.names = &names,
                                       .norm_add = 1,
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true,
                                       .window_period = 4};

static const struct decoder ends = {.names = &names}; /* the last norm is stored as it is */

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    double logits = 1, cap = 0, qk = 1;
    if (!decoder_read(in, &decoder))
        return false;
    if (in->f->is_gguf
            ? !reader_gguf_float(in, "logit_scale", 1e-6, 1e6, false, &logits) ||
                  !reader_gguf_float(in, "final_logit_softcapping", 0, 1e6, false, &cap)
            : !reader_number(in, in->hf, "output_multiplier", 1e-6, 1e6, false, &logits) ||
                  !reader_number(in, in->hf, "final_logit_softcapping", 0, 1e6, false, &cap) ||
                  !reader_number(in, in->hf, "qk_scale_factor", 1e-6, 1e6, false, &qk))
        return false;
    c->head_scale = (float)logits;
    c->head_softcap = (float)cap;
    c->qk_scale = (float)qk;
    for (int i = 0; i < c->n_layers; i++)
        c->no_rope[i] = !c->window[i];
    return true;
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const float post_eps = 1e-8f; /* in all files */
    const struct rope *rope = build_rope(b);
    decoder_ends(b, &ends);
    b->net->embed.norm = (struct norm){.kind = NORM_RMS, .eps = c->norm_eps};
    for (int i = 0; i < c->n_layers; i++) {
        struct layer *l = &b->net->layers[i];
        decoder_mixer(b, &decoder, i, c->no_rope[i] ? NULL : rope, &l->mixer);
        decoder_mlp(b, &decoder, i, &l->mlp);
        struct attention *a = &l->mixer.attention;
        l->mixer.block.out.eps = l->mlp.block.out.eps = post_eps;
        a->q_norm =
            build_rms_adjusted(b, i, &names.q_norm, a->k_dim, (struct adjust){.fill = c->qk_scale});
        a->k_norm = build_rms_adjusted(b, i, &names.k_norm, a->k_dim, (struct adjust){.fill = 1});
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    gguf_set_f32(w, "muse-glimmer.logit_scale", c->head_scale);
    if (c->head_softcap != 0)
        gguf_set_f32(w, "muse-glimmer.final_logit_softcapping", c->head_softcap);
    decoder_write_windows(c, w);
}

const struct model_family family_muse_glimmer = {
    .name = "muse-glimmer",
    .hf = "muse_glimmer_text",
    .hf_class = "MuseGlimmerForConditionalGeneration",
    .interleaved_qk = true,
    .own_windows = true,
    .read = read,
    .build = build,
    .write = write,
};
