/* Ministral 3 and Devstral 2: Mistral with YaRN and an attention temperature that grows with
 * position. */
#include "model/families/family.h"

static const struct decoder decoder = {
    .windows = true, .windows_unasked = true, .windows_all = true};

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    double beta = 0;
    if (!decoder_read(in, &decoder))
        return false;
    if (in->f->is_gguf) {
        if (!reader_gguf_float(in, "attention.temperature_scale", 0, 1e3, false, &beta))
            return false;
    } else {
        const json_t *rope = reader_get(in->hf, "rope_parameters", "rope_scaling");
        if (rope && !reader_number(in, rope, "llama_4_scaling_beta", 0, 1e3, false, &beta))
            return false;
    }
    c->temp_beta = (float)beta;
    c->temp_len = c->rope.original_context;
    return true;
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    if (c->temp_beta != 0)
        gguf_set_f32(w, "mistral3.attention.temperature_scale", c->temp_beta);
}

const struct model_family family_ministral3 = {
    .name = "mistral3",
    .hf = "ministral3",
    .hf_class = "Ministral3ForCausalLM",
    .interleaved_qk = true,
    .read = read,
    .build = build,
    .write = write,
};
