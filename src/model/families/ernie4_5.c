/*
 * ERNIE 4.5 and its mixtures of experts: RoPE over adjacent pairs. The mixtures have dense first layers, then softmax
 * routing with a bias of the choice, and shared experts.
 */
#include "model/families/family.h"

#include <stdio.h>

static const struct decoder_names routed = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    DECODER_MLP,
    DECODER_EXPERTS,
    DECODER_SHARED,
    .choice_bias = {"=blk.%d.exp_probs_b.bias",
                    "=model.layers.%d.mlp.moe_statics.e_score_correction_bias"}};

static const struct decoder dense = {.names = NULL};
static const struct decoder sparse = {.names = &routed};

static bool read_dense(const struct meta_reader *in)
{
    return decoder_read(in, &dense);
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int shared = 0, first = 0, last = c->n_layers - 1, step = 1;
    if (!reader_int(in, "moe_num_experts", NULL, 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "moe_k", NULL, 1, CONFIG_MAX_EXPERTS_USED, true, &c->n_expert_used) ||
        !reader_int(in, "moe_intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff_exp) ||
        !reader_int(in, "moe_num_shared_experts", NULL, 0, 64, false, &shared) ||
        !reader_int(in, "moe_layer_start_index", NULL, 0, 1 << 20, false, &first) ||
        !reader_int(in, "moe_layer_end_index", NULL, -1, 1 << 20, false, &last) ||
        !reader_int(in, "moe_layer_interval", NULL, 1, 1 << 20, false, &step))
        return false;
    if (last < 0)
        last = c->n_layers - 1;
    for (int i = 0; i < c->n_layers; i++)
        c->is_moe[i] = (i + 1) % step == 0 && i >= first && i <= last;
    c->n_ff_shared = shared * c->n_ff_exp;
    c->norm_topk = true;
    return true;
}

static bool read_sparse(const struct meta_reader *in)
{
    return decoder_read(in, &sparse) && (in->f->is_gguf || read_hf(in));
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
    decoder_write_dense(c, w);
    gguf_set_u32(w, "ernie4_5-moe.interleave_moe_layer_step", 1);
    if (c->n_ff_shared)
        gguf_set_u32(w, "ernie4_5-moe.expert_shared_feed_forward_length", (uint32_t)c->n_ff_shared);
}

const struct model_family family_ernie4_5 = {
    .name = "ernie4_5",
    .hf = "ernie4_5",
    .hf_class = "Ernie4_5ForCausalLM",
    .interleaved_folder = true,
    .read = read_dense,
    .build = build_dense,
};

const struct model_family family_ernie4_5_moe = {
    .name = "ernie4_5-moe",
    .hf = "ernie4_5_moe",
    .hf_class = "Ernie4_5_MoeForCausalLM",
    .interleaved_folder = true,
    .read = read_sparse,
    .build = build_sparse,
    .write = write_sparse,
};
