/* Granite 3 and its mixtures of experts: a plain decoder with factors on embeddings, scores, blocks and logits. Folders
 * hold an expert's gate and up in one tensor. */
#include "model/families/family.h"

#include <stdio.h>

static const struct decoder_names names = {
    DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP,
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.block_sparse_moe.router.layer"}};

static const struct tensor_name gate = {"blk.%d.ffn_gate_exps",
                                        "model.layers.%d.block_sparse_moe.input_linear"},
                                up = {"blk.%d.ffn_up_exps",
                                      "model.layers.%d.block_sparse_moe.input_linear"},
                                down = {"blk.%d.ffn_down_exps",
                                        "model.layers.%d.block_sparse_moe.output_linear"};

static const struct decoder dense = {.names = &names};
static const struct decoder sparse = {.names = &names, .experts = true, .experts_wide = true};

static bool read_factors(const struct meta_reader *in)
{
    double embed = 1, residual = 1, attn = 0, logits = 1;
    if (in->f->is_gguf) {
        if (!reader_gguf_float(in, "embedding_scale", 1e-6, 1e6, false, &embed) ||
            !reader_gguf_float(in, "residual_scale", 1e-6, 1e6, false, &residual) ||
            !reader_gguf_float(in, "attention.scale", 0, 1e6, false, &attn) ||
            !reader_gguf_float(in, "logit_scale", 1e-6, 1e6, true, &logits))
            return false;
    } else if (!reader_number(in, in->hf, "embedding_multiplier", 1e-6, 1e6, false, &embed) ||
               !reader_number(in, in->hf, "residual_multiplier", 1e-6, 1e6, false, &residual) ||
               !reader_number(in, in->hf, "attention_multiplier", 1e-6, 1e6, false, &attn) ||
               !reader_number(in, in->hf, "logits_scaling", 1e-6, 1e6, false, &logits)) {
        return false;
    }
    in->c->embed_scale = (float)embed;
    in->c->residual_scale = (float)residual;
    in->c->attn_scale = (float)attn;
    in->c->head_scale = (float)(1 / logits);
    return true;
}

static bool read_dense(const struct meta_reader *in)
{
    return decoder_read(in, &dense) && read_factors(in);
}

static bool read_sparse(const struct meta_reader *in)
{
    if (!decoder_read(in, &sparse) || !read_factors(in))
        return false;
    in->c->norm_topk = true; /* softmax over the chosen experts */
    return true;
}

static void build_dense(struct net_builder *b)
{
    decoder_build(b, &dense);
}

static void build_sparse(struct net_builder *b)
{
    const struct config *c = b->c;
    int E = c->n_embd, F = c->n_ff_exp;
    decoder_build(b, &sparse);
    for (int i = 0; i < c->n_layers && !b->failed; i++) {
        struct mlp *m = &b->net->layers[i].mlp;
        const struct weight_rows two[] = {{.name = &gate, .n = F, .tensor_rows = 2 * F},
                                          {.name = &up, .n = F, .first = F, .tensor_rows = 2 * F}};
        m->experts.gate_up = build_weight(b, WEIGHT_EXPERTS, i, E, c->n_expert, 2, two);
        m->experts.down = build_weight(b, WEIGHT_EXPERTS, i, F, c->n_expert, 1,
                                       (const struct weight_rows[]){{.name = &down, .n = E}});
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    const struct {
        const char *key;
        float v;
    } factors[] = {{"embedding_scale", c->embed_scale},
                   {"residual_scale", c->residual_scale},
                   {"attention.scale", c->attn_scale},
                   {"logit_scale", 1 / c->head_scale}};
    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++) {
        char key[96];
        snprintf(key, sizeof key, "%s.%s", c->family->name, factors[i].key);
        if (factors[i].v != 0)
            gguf_set_f32(w, key, factors[i].v);
    }
}

const struct model_family family_granite = {
    .name = "granite",
    .hf = "granite",
    .hf_class = "GraniteForCausalLM",
    .interleaved_qk = true,
    .read = read_dense,
    .build = build_dense,
    .write = write,
};

const struct model_family family_granitemoe = {
    .name = "granitemoe",
    .hf = "granitemoe",
    .hf_class = "GraniteMoeForCausalLM",
    .interleaved_qk = true,
    .read = read_sparse,
    .build = build_sparse,
    .write = write,
};
