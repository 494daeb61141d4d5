/* OLMo 2 and 3, and OLMoE: QK-norm over the whole projections. OLMo 2 and 3 have norms after their blocks and none
 * before. OLMo 3 has windows in three of four layers, which keep the plain RoPE where the others have YaRN. */
#include "model/families/family.h"

static const struct decoder_names after = {DECODER_ENDS, DECODER_QKV, DECODER_FFN,
                                           DECODER_NORMS_AFTER};

static const struct decoder decoder = {.names = &after,
                                       .qk_norm = true,
                                       .norm_whole = true,
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true,
                                       .window_period = 4,
                                       .window_rope = true};

static bool read(const struct meta_reader *in)
{
    return decoder_read(in, &decoder) && decoder_read_window_rope(in);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

const struct model_family family_olmo2 = {
    .name = "olmo2",
    .hf = "olmo2",
    .hf_class = "Olmo2ForCausalLM",
    .read = read,
    .build = build,
};

/* GGUF calls it olmo2. */
const struct model_family family_olmo3 = {
    .name = "olmo3",
    .hf = "olmo3",
    .hf_class = "Olmo3ForCausalLM",
    .gguf_as = "olmo2",
    .own_windows = true,
    .read = read,
    .build = build,
    .write = decoder_write_windows,
};

static const struct decoder routed = {
    .qk_norm = true, .norm_whole = true, .experts = true, .experts_wide = true};

static bool read_moe(const struct meta_reader *in)
{
    double clip = 0;
    if (!decoder_read(in, &routed))
        return false;
    in->c->norm_topk = false; /* unless the file says so */
    if (in->f->is_gguf)
        return reader_gguf_float(in, "attention.clamp_kqv", 0, 0, false, &clip) &&
               reader_gguf_bool(in, "expert_weights_norm", &in->c->norm_topk);
    return reader_number(in, in->hf, "clip_qkv", 0, 0, false, &clip) &&
           reader_bool(in, "norm_topk_prob", &in->c->norm_topk);
}

static void build_moe(struct net_builder *b)
{
    decoder_build(b, &routed);
}

const struct model_family family_olmoe = {
    .name = "olmoe",
    .hf = "olmoe",
    .hf_class = "OlmoeForCausalLM",
    .read = read_moe,
    .build = build_moe,
};

/* FlexOlmo: OLMo 2's norms, OLMoE's experts. */
static const struct decoder_names flex_names = {DECODER_ENDS, DECODER_QKV, DECODER_EXPERTS,
                                                DECODER_NORMS_AFTER};
static const struct decoder flex = {.names = &flex_names,
                                    .qk_norm = true,
                                    .norm_whole = true,
                                    .experts = true,
                                    .experts_wide = true};

static bool read_flex(const struct meta_reader *in)
{
    if (!decoder_read(in, &flex))
        return false;
    in->c->norm_topk = false; /* unless the file says so */
    return in->f->is_gguf ? reader_gguf_bool(in, "expert_weights_norm", &in->c->norm_topk)
                          : reader_bool(in, "norm_topk_prob", &in->c->norm_topk);
}

static void build_flex(struct net_builder *b)
{
    decoder_build(b, &flex);
}

const struct model_family family_flex_olmo = {
    .name = "flex_olmo",
    .hf = "flex_olmo",
    .hf_class = "FlexOlmoForCausalLM",
    .read = read_flex,
    .build = build_flex,
};
