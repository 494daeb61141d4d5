/* GPT-NeoX and Pythia: LayerNorms, biases, GELU without a gate, RoPE of a quarter of a head. The mlp runs in parallel with
 * attention, on a norm of its own, except in a few models. */
#include "model/families/family.h"

#include <string.h>

#define LAYER "model.layers.%d."

static const struct decoder_names names = {
    .emb = {"token_embd", "model.embed_in"},
    .norm = {"output_norm", "model.final_layer_norm"},
    .head = {"output", "lm_head"},
    .attn_norm = {"blk.%d.attn_norm", LAYER "input_layernorm"},
    .qkv = {"blk.%d.attn_qkv", LAYER "attention.query_key_value"},
    .o = {"blk.%d.attn_output", LAYER "attention.dense"},
    .ffn_norm = {"blk.%d.ffn_norm", LAYER "post_attention_layernorm"},
    .up = {"blk.%d.ffn_up", LAYER "mlp.dense_h_to_4h"},
    .down = {"blk.%d.ffn_down", LAYER "mlp.dense_4h_to_h"}};

#define NEOX                                                                                       \
    .names = &names, .eps_key = "layer_norm_eps", .qkv_by_head = true, .act = ACT_PLAIN_GELU

static const struct decoder decoder = {NEOX, .act_name = "gelu"};
static const struct decoder approximate = {NEOX, .act_name = "gelu_fast"};

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    double partial = 0.25;
    c->parallel = true;
    if (!reader_bool(in, "use_parallel_residual", &c->parallel) ||
        !reader_number(in, in->hf, "rotary_emb_base", 1, 1e12, false, &c->rope.theta) ||
        !reader_number(in, in->hf, "rotary_pct", 0, 1, false, &partial))
        return false;
    if (c->rope.partial == 1 && !reader_get(in->hf, "rope_parameters", NULL))
        c->n_rot = (int)(c->head_dim * partial);
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    const char *act = json_string_value(reader_get(in->hf, "hidden_act", NULL));
    c->gelu_tanh = act && !strcmp(act, "gelu_fast");
    if (!decoder_read(in, c->gelu_tanh ? &approximate : &decoder))
        return false;
    if (!in->f->is_gguf)
        return read_hf(in);
    c->parallel = true;
    return reader_gguf_bool(in, "use_parallel_residual", &c->parallel) &&
           reader_gguf_bool(in, "gelu_tanh", &c->gelu_tanh);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    decoder_build(b, &decoder);
    for (int i = 0; i < c->n_layers; i++) {
        struct mlp *m = &b->net->layers[i].mlp;
        m->block.parallel = c->parallel;
        m->dense.act = c->gelu_tanh ? ACT_PLAIN_GELU_TANH : ACT_PLAIN_GELU;
    }
}

/* Attention masks and their filler, which old folders have. */
static bool spare(const struct config *c, const char *tensor)
{
    (void)c;
    return strstr(tensor, ".attention.bias") || strstr(tensor, ".attention.masked_bias");
}

/* GGUF has no key for the approximation; ours says it. */
static void write(const struct config *c, struct gguf_writer *w)
{
    gguf_set_bool(w, "gptneox.use_parallel_residual", c->parallel);
    if (c->gelu_tanh)
        gguf_set_bool(w, "gptneox.gelu_tanh", true);
}

const struct model_family family_gpt_neox = {
    .name = "gptneox",
    .hf = "gpt_neox",
    .hf_class = "GPTNeoXForCausalLM",
    .hf_embed = "embed_in",
    .layer_norm = true,
    .read = read,
    .build = build,
    .write = write,
    .spare = spare,
};
