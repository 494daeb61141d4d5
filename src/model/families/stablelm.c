/* StableLM 2 and StableLM 3B: LayerNorms, RoPE of a quarter of a head. StableLM 2 12B has its mlp in parallel with
 * attention, and LayerNorms of queries and keys. */
#include "model/families/family.h"

static const struct decoder_names names = {DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP};
static const struct decoder_names beside = {DECODER_ENDS, DECODER_ATTENTION, DECODER_FFN};

static const struct decoder decoder = {.names = &names, .eps_key = "layer_norm_eps"};
static const struct decoder parallel = {
    .names = &beside, .eps_key = "layer_norm_eps", .parallel = true};

static bool read(const struct meta_reader *in)
{
    bool norms = false;
    if (!decoder_read(in, &decoder))
        return false;
    if (in->f->is_gguf)
        norms = build_present(in->f, in->c, &names.q_norm, 0);
    else if (!reader_bool(in, "qk_layernorm", &norms))
        return false;
    return !norms || error_set(in->err,
                               "%s: LayerNorms of queries and keys (StableLM 2 12B) are "
                               "not supported",
                               in->f->path);
}

static void build(struct net_builder *b)
{
    /* a parallel mlp has no norm of its own */
    decoder_build(b, build_has(b, &names.ffn_norm, 0) ? &decoder : &parallel);
}

const struct model_family family_stablelm = {
    .name = "stablelm",
    .hf = "stablelm",
    .hf_class = "StableLmForCausalLM",
    .layer_norm = true,
    .read = read,
    .build = build,
};
