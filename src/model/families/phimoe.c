/* Phi-3.5-MoE: LayerNorms, biases also of the head, long RoPE, SparseMixer's routing among Mixtral's experts. */
#include "model/families/family.h"

static const struct decoder_names names = {
    DECODER_ENDS, DECODER_ATTENTION,
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.post_attention_layernorm"}, DECODER_EXPERTS_W};

static const struct decoder decoder = {.names = &names,
                                       .experts = true,
                                       .experts_wide = true,
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true};

static const double jitter = 0.01; /* of the published model */

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    double own = jitter;
    if (!decoder_read(in, &decoder) ||
        !(in->f->is_gguf ? reader_gguf_float(in, "router_jitter", 0, 1, false, &own)
                         : reader_number(in, in->hf, "router_jitter_noise", 0, 1, false, &own)))
        return false;
    c->router_jitter = (float)own;
    return true;
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    decoder_build(b, &decoder);
    for (int i = 0; i < c->n_layers && !b->failed; i++) {
        struct router *r = &b->net->layers[i].mlp.router;
        r->kind = ROUTER_SPARSE_MIXER;
        r->jitter = c->router_jitter;
        r->renorm = false;
    }
}

/* Readers know the published jitter at best; another has a key of ours. */
static void write(const struct config *c, struct gguf_writer *w)
{
    if (c->router_jitter != (float)jitter)
        gguf_set_f32(w, "phimoe.router_jitter", c->router_jitter);
}

const struct model_family family_phimoe = {
    .name = "phimoe",
    .hf = "phimoe",
    .hf_class = "PhimoeForCausalLM",
    .layer_norm = true,
    .rms_eps = true,
    .read = read,
    .build = build,
    .write = write,
};
