/*
 * EXAONE 4 and its mixtures of experts: QK-norm per head. With windows, the layers without one have no RoPE. EXAONE 4
 * has norms after its blocks and none before. The mixtures have DeepSeek's routing.
 */
#include "model/families/family.h"

static const struct decoder_names after = {DECODER_ENDS, DECODER_QKV, DECODER_FFN,
                                           DECODER_NORMS_AFTER};
static const struct decoder_names routed = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    DECODER_MLP,
    DECODER_EXPERTS,
    DECODER_SHARED,
    .choice_bias = {"=blk.%d.exp_probs_b.bias", "=model.layers.%d.mlp.e_score_correction_bias"}};

static const struct decoder dense = {.names = &after,
                                     .qk_norm = true,
                                     .windows = true,
                                     .windows_unasked = true,
                                     .windows_all = true,
                                     .window_period = 4};
static const struct decoder sparse = {.names = &routed,
                                      .qk_norm = true,
                                      .router = ROUTER_SIGMOID,
                                      .windows = true,
                                      .windows_unasked = true,
                                      .windows_all = true,
                                      .window_period = 4};

/* RoPE only in layers with a window, if any layer has one. */
static void choose_ropes(struct config *c)
{
    bool windows = false;
    for (int i = 0; i < c->n_layers; i++)
        windows |= c->window[i] != 0;
    for (int i = 0; i < c->n_layers; i++)
        c->no_rope[i] = windows && !c->window[i];
}

static bool read_dense(const struct meta_reader *in)
{
    if (!decoder_read(in, &dense))
        return false;
    choose_ropes(in->c);
    return true;
}

static bool read_sparse(const struct meta_reader *in)
{
    int extra = 0;
    if (!decoder_read(in, &sparse) || (!in->f->is_gguf && !decoder_read_routed(in)) ||
        (in->f->is_gguf &&
         !reader_gguf_int(in, "nextn_predict_layers", 0, in->c->n_layers - 1, false, &extra)))
        return false;
    in->c->n_layers -= extra; /* blocks that draft tokens are not used */
    choose_ropes(in->c);
    return true;
}

static void build_dense(struct net_builder *b)
{
    decoder_build(b, &dense);
}

static void build_sparse(struct net_builder *b)
{
    decoder_build(b, &sparse);
}

static void write_sparse(const struct config *c, struct gguf_writer *w)
{
    decoder_write_windows(c, w);
    decoder_write_dense(c, w);
    gguf_set_u32(w, "exaone-moe.expert_shared_feed_forward_length", (uint32_t)c->n_ff_shared);
}

const struct model_family family_exaone4 = {
    .name = "exaone4",
    .hf = "exaone4",
    .hf_class = "Exaone4ForCausalLM",
    .own_windows = true,
    .read = read_dense,
    .build = build_dense,
    .write = decoder_write_windows,
};

const struct model_family family_exaone_moe = {
    .name = "exaone-moe",
    .hf = "exaone_moe",
    .hf_class = "ExaoneMoeForCausalLM",
    .own_windows = true,
    .read = read_sparse,
    .build = build_sparse,
    .write = write_sparse,
};
