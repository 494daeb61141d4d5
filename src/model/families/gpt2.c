/* GPT-2: LayerNorms, biases, tanh GELU without a gate, embeddings of positions in place of RoPE. Folders store matrices
 * (in, out). */
#include "model/families/family.h"

#include <string.h>

#define LAYER "model.h.%d."

static const struct decoder_names names = {.emb = {"token_embd", "model.wte"},
                                           .norm = {"output_norm", "model.ln_f"},
                                           .head = {"output", "lm_head"},
                                           .attn_norm = {"blk.%d.attn_norm", LAYER "ln_1"},
                                           .qkv = {"blk.%d.attn_qkv", LAYER "attn.c_attn"},
                                           .o = {"blk.%d.attn_output", LAYER "attn.c_proj"},
                                           .ffn_norm = {"blk.%d.ffn_norm", LAYER "ln_2"},
                                           .up = {"blk.%d.ffn_up", LAYER "mlp.c_fc"},
                                           .down = {"blk.%d.ffn_down", LAYER "mlp.c_proj"}};
static const struct tensor_name positions = {"position_embd", "model.wpe"};

static const struct decoder decoder = {.names = &names,
                                       .eps_key = "layer_norm_epsilon",
                                       .act = ACT_PLAIN_GELU_TANH,
                                       .act_name = "gelu_new",
                                       .act_key = "activation_function",
                                       .transposed = true};

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    bool by_layer = false, scaled = true;
    if (!decoder_read(in, &decoder))
        return false;
    c->n_rot = 0;
    if (in->f->is_gguf)
        return true;
    if (!c->n_ff)
        c->n_ff = 4 * c->n_embd;
    c->tied = !build_present(in->f, c, &names.head, 0);
    if (!reader_bool(in, "scale_attn_by_inverse_layer_idx", &by_layer) ||
        !reader_bool(in, "scale_attn_weights", &scaled))
        return false;
    if (by_layer || !scaled)
        return error_set(in->err, "%s: config.json: %s is not supported", in->f->path,
                         by_layer ? "scale_attn_by_inverse_layer_idx"
                                  : "scale_attn_weights: false");
    return true;
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct tensor *t = build_find(b->f, c, &positions, 0, 0, "weight");
    int rows = !t ? 0 : t->dims[1] > 1 << 24 ? 1 << 24 : (int)t->dims[1];
    if (rows < c->context) {
        b->failed = !error_set(b->err, "%s: embeddings of %d positions for a context of %d",
                               b->f->path, rows, c->context);
        return;
    }
    decoder_build(b, &decoder);
    b->net->embed.positions = build_matrix(b, WEIGHT_EMBED, 0, &positions, c->n_embd, rows);
}

/* Attention masks and their filler, which published folders have. */
static bool spare(const struct config *c, const char *tensor)
{
    (void)c;
    return strstr(tensor, ".attn.bias") || strstr(tensor, ".attn.masked_bias");
}

const struct model_family family_gpt2 = {
    .name = "gpt2",
    .hf = "gpt2",
    .hf_class = "GPT2LMHeadModel",
    .hf_embed = "wte",
    .layer_norm = true,
    .read = read,
    .build = build,
    .spare = spare,
};
