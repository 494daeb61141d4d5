/* SmolLM3: a plain decoder in which every fourth layer has no RoPE. A GGUF of a model with other such layers lists them
 * in attention.rope_pattern. */
#include "model/families/family.h"

#include <stdio.h>

enum { STEP = 4 };

static const struct decoder decoder = {.windows = false};

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    int step = STEP, has[CONFIG_MAX_LAYERS];
    if (!decoder_read(in, &decoder) ||
        (!in->f->is_gguf &&
         !reader_int(in, "no_rope_layer_interval", NULL, 1, 1 << 20, false, &step)))
        return false;
    for (int i = 0; i < c->n_layers; i++)
        has[i] = (i + 1) % step != 0;
    const json_t *list = in->f->is_gguf ? NULL : reader_get(in->hf, "no_rope_layers", NULL);
    if (list && json_array_size(list) != (size_t)c->n_layers)
        return error_set(in->err, "%s: config.json: no_rope_layers: %zu entries for %d layers",
                         in->f->path, json_array_size(list), c->n_layers);
    for (int i = 0; list && i < c->n_layers; i++) /* despite its name: 1 where there is a RoPE */
        has[i] = json_integer_value(json_array_get(list, (size_t)i)) != 0;
    if (in->f->is_gguf && !reader_gguf_layers(in, "attention.rope_pattern", 0, 1, false, has))
        return false;
    for (int i = 0; i < c->n_layers; i++)
        c->no_rope[i] = !has[i];
    return true;
}

static void build(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    uint8_t has[CONFIG_MAX_LAYERS];
    bool usual = true;
    for (int i = 0; i < c->n_layers; i++) {
        has[i] = !c->no_rope[i];
        usual &= has[i] == ((i + 1) % STEP != 0);
    }
    if (!usual)
        gguf_set_array(w, "smollm3.attention.rope_pattern", META_BOOL, has, (size_t)c->n_layers);
}

const struct model_family family_smollm3 = {
    .name = "smollm3",
    .hf = "smollm3",
    .hf_class = "SmolLM3ForCausalLM",
    .interleaved_qk = true,
    .read = read,
    .build = build,
    .write = write,
};
