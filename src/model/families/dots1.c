/* dots.llm1 and Hunyuan 3: QK-norm, dense first layers, then DeepSeek's routing without groups and shared experts. */
#include "model/families/family.h"

#define ROUTED_NAMES DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP, DECODER_EXPERTS

static const struct decoder_names dots_names = {
    ROUTED_NAMES, DECODER_SHARED,
    .choice_bias = {"=blk.%d.exp_probs_b.bias",
                    "=model.layers.%d.mlp.gate.e_score_correction_bias"}};

static const struct decoder_names hunyuan_names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    DECODER_MLP,
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.mlp.router.gate"},
    .gate_exp = {"blk.%d.ffn_gate_exps", "model.layers.%d.mlp.experts.%d.gate_proj"},
    .up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.mlp.experts.%d.up_proj"},
    .down_exp = {"blk.%d.ffn_down_exps", "model.layers.%d.mlp.experts.%d.down_proj"},
    .gate_shared = {"blk.%d.ffn_gate_shexp", "model.layers.%d.mlp.shared_mlp.gate_proj"},
    .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.mlp.shared_mlp.up_proj"},
    .down_shared = {"blk.%d.ffn_down_shexp", "model.layers.%d.mlp.shared_mlp.down_proj"},
    .choice_bias = {"=blk.%d.exp_probs_b", "=model.layers.%d.mlp.expert_bias"}};

static const struct decoder dots = {
    .names = &dots_names, .qk_norm = true, .router = ROUTER_SIGMOID};
static const struct decoder hunyuan = {
    .names = &hunyuan_names, .qk_norm = true, .router = ROUTER_SIGMOID};

static bool read(const struct meta_reader *in, const struct decoder *d)
{
    int extra = 0;
    if (!decoder_read(in, d))
        return false;
    if (!in->f->is_gguf)
        return decoder_read_routed(in);
    if (!reader_gguf_int(in, "nextn_predict_layers", 0, in->c->n_layers - 1, false, &extra))
        return false;
    in->c->n_layers -= extra; /* blocks that draft tokens are not used */
    if (!in->c->n_ff_shared)
        in->c->n_ff_shared = in->c->n_ff_exp;
    return true;
}

static bool read_dots(const struct meta_reader *in)
{
    return read(in, &dots);
}

static bool read_hunyuan(const struct meta_reader *in)
{
    return read(in, &hunyuan);
}

static void build_dots(struct net_builder *b)
{
    decoder_build(b, &dots);
}

static void build_hunyuan(struct net_builder *b)
{
    decoder_build(b, &hunyuan);
}

static void write_hunyuan(const struct config *c, struct gguf_writer *w)
{
    gguf_set_u32(w, "hy_v3.expert_shared_feed_forward_length", (uint32_t)c->n_ff_shared);
}

const struct model_family family_dots1 = {
    .name = "dots1",
    .hf = "dots1",
    .hf_class = "Dots1ForCausalLM",
    .read = read_dots,
    .build = build_dots,
    .write = decoder_write_dense,
};

const struct model_family family_hy_v3 = {
    .name = "hy_v3",
    .hf = "hy_v3",
    .hf_class = "HYV3ForCausalLM",
    .read = read_hunyuan,
    .build = build_hunyuan,
    .write = write_hunyuan,
};
