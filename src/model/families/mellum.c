/* Mellum 2: Qwen3-MoE with windows in most layers, which have a RoPE of their own. */
#include "model/families/family.h"

static const struct decoder decoder = {.qk_norm = true,
                                       .experts = true,
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true,
                                       .window_period = 4,
                                       .window_rope = true};

static bool read(const struct meta_reader *in)
{
    in->c->norm_topk = true;
    return decoder_read(in, &decoder) && decoder_read_window_rope(in);
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    decoder_write_windows(c, w);
    gguf_set_f32(w, "mellum.rope.freq_base_swa", (float)c->rope_window.theta);
}

const struct model_family family_mellum = {
    .name = "mellum",
    .hf = "mellum",
    .hf_class = "MellumForCausalLM",
    .own_windows = true,
    .read = read,
    .build = build,
    .write = write,
};
