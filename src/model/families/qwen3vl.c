/*
 * The text models of Qwen3-VL, dense and MoE: Qwen3 with interleaved M-RoPE, whose first layers add features of the image
 * tower's inner layers (deepstack). The tower is in vision/.
 */
#include "model/families/family.h"

#include <stdio.h>

static const struct decoder dense = {.qk_norm = true, .windows = true};
static const struct decoder_names sparse_names = {
    DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP,
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.mlp.gate"}};
static const struct decoder sparse = {
    .names = &sparse_names, .qk_norm = true, .experts = true, .windows = true};

/* A folder has gate and up of all experts in one tensor, (experts, in, out). */
static const struct tensor_name gate = {"blk.%d.ffn_gate_exps",
                                        "=model.layers.%d.mlp.experts.gate_up_proj"},
                                up = {"blk.%d.ffn_up_exps",
                                      "=model.layers.%d.mlp.experts.gate_up_proj"},
                                down = {"blk.%d.ffn_down_exps",
                                        "=model.layers.%d.mlp.experts.down_proj"};

static bool read(const struct meta_reader *in, const struct decoder *d)
{
    struct config *c = in->c;
    if (!decoder_read(in, d))
        return false;
    if (in->f->is_gguf)
        return rope_read_gguf_sections(in, true) &&
               reader_gguf_int(in, "n_deepstack_layers", 0, c->n_layers, false, &c->n_deepstack);
    const json_t *tower = json_object_get(in->f->config, "vision_config");
    size_t levels = json_array_size(json_object_get(tower, "deepstack_visual_indexes"));
    if (levels > (size_t)c->n_layers)
        return error_set(in->err,
                         "%s: config.json: deepstack_visual_indexes: %zu levels for %d layers",
                         in->f->path, levels, c->n_layers);
    c->n_deepstack = (int)levels;
    return true;
}

static void build_deepstack(struct net_builder *b)
{
    for (int i = 0; i < b->c->n_deepstack; i++)
        b->net->layers[i].mlp.deepstack = i + 1;
}

static void write(const struct config *c, struct gguf_writer *w)
{
    char key[96];
    rope_write_sections(c, w, c->family->name);
    snprintf(key, sizeof key, "%s.n_deepstack_layers", c->family->name);
    gguf_set_u32(w, key, (uint32_t)c->n_deepstack);
}

static bool read_dense(const struct meta_reader *in)
{
    return read(in, &dense);
}

static void build_dense(struct net_builder *b)
{
    decoder_build(b, &dense);
    build_deepstack(b);
}

static bool read_sparse(const struct meta_reader *in)
{
    if (!read(in, &sparse))
        return false;
    in->c->norm_topk = true; /* always */
    return true;
}

static void build_sparse(struct net_builder *b)
{
    const struct config *c = b->c;
    int E = c->n_embd, F = c->n_ff_exp;
    decoder_build(b, &sparse);
    build_deepstack(b);
    for (int i = 0; i < c->n_layers; i++) {
        struct mlp *m = &b->net->layers[i].mlp;
        const struct weight_rows both[] = {
            {.name = &gate, .n = F, .tensor_rows = 2 * F, .transposed = true},
            {.name = &up, .n = F, .first = F, .tensor_rows = 2 * F, .transposed = true}};
        const struct weight_rows out = {
            .name = &down, .n = E, .tensor_rows = E, .transposed = true};
        if (!c->is_moe[i])
            continue;
        m->experts.gate_up = build_weight(b, WEIGHT_EXPERTS, i, E, c->n_expert, 2, both);
        m->experts.down = build_weight(b, WEIGHT_EXPERTS, i, F, c->n_expert, 1, &out);
    }
}

const struct model_family family_qwen3vl = {
    .name = "qwen3vl",
    .hf = "qwen3_vl_text",
    .hf_class = "Qwen3VLForConditionalGeneration",
    .read = read_dense,
    .build = build_dense,
    .write = write,
};

const struct model_family family_qwen3vlmoe = {
    .name = "qwen3vlmoe",
    .hf = "qwen3_vl_moe_text",
    .hf_class = "Qwen3VLMoeForConditionalGeneration",
    .read = read_sparse,
    .build = build_sparse,
    .write = write,
};
