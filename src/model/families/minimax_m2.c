/* MiniMax-M2: sigmoid routing with a bias, QK-norm over the whole projections, RoPE over half of a
 * head. */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP, DECODER_EXPERTS_W,
    .choice_bias = {"=blk.%d.exp_probs_b.bias",
                    "=model.layers.%d.block_sparse_moe.e_score_correction_bias"}};

static const struct decoder decoder = {.names = &names,
                                       .qk_norm = true,
                                       .norm_whole = true,
                                       .experts = true,
                                       .experts_wide = true,
                                       .router = ROUTER_SIGMOID};

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    return decoder_read(in, &decoder) &&
           (in->f->is_gguf || reader_int(in, "rotary_dim", NULL, 2, c->head_dim, false, &c->n_rot));
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_minimax_m2 = {
    .name = "minimax-m2",
    .hf = "minimax_m2",
    .hf_class = "MiniMaxM2ForCausalLM",
    .read = read,
    .build = build,
};
