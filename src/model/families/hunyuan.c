/* Hunyuan, dense and A13B: QK-norm after RoPE, whose theta has a factor of its own; A13B has softmax routing and a shared
 * expert. */
#include "model/families/family.h"

#include <stdio.h>

#define HUNYUAN_ATTENTION                                                                          \
    .attn_norm = {"blk.%d.attn_norm", "model.layers.%d.input_layernorm"},                          \
    .q = {"blk.%d.attn_q", "model.layers.%d.self_attn.q_proj"},                                    \
    .k = {"blk.%d.attn_k", "model.layers.%d.self_attn.k_proj"},                                    \
    .v = {"blk.%d.attn_v", "model.layers.%d.self_attn.v_proj"},                                    \
    .o = {"blk.%d.attn_output", "model.layers.%d.self_attn.o_proj"},                               \
    .q_norm = {"blk.%d.attn_q_norm", "model.layers.%d.self_attn.query_layernorm"},                 \
    .k_norm = {"blk.%d.attn_k_norm", "model.layers.%d.self_attn.key_layernorm"}

static const struct decoder_names dense_names = {DECODER_ENDS, HUNYUAN_ATTENTION, DECODER_MLP};
static const struct decoder_names moe_names = {
    DECODER_ENDS,
    HUNYUAN_ATTENTION,
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.post_attention_layernorm"},
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.mlp.gate.wg"},
    .gate_exp = {"blk.%d.ffn_gate_exps", "model.layers.%d.mlp.experts.%d.gate_proj"},
    .up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.mlp.experts.%d.up_proj"},
    .down_exp = {"blk.%d.ffn_down_exps", "model.layers.%d.mlp.experts.%d.down_proj"},
    .gate_shared = {"blk.%d.ffn_gate_shexp", "model.layers.%d.mlp.shared_mlp.gate_proj"},
    .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.mlp.shared_mlp.up_proj"},
    .down_shared = {"blk.%d.ffn_down_shexp", "model.layers.%d.mlp.shared_mlp.down_proj"}};

static const struct decoder dense = {.names = &dense_names, .qk_norm = true, .norm_late = true};
static const struct decoder sparse = {.names = &moe_names, .qk_norm = true, .norm_late = true};

/* A number, or one per layer. */
static bool read_each(const struct meta_reader *in, const char *key, int i, int hi, bool need,
                      int *out)
{
    const json_t *v = reader_get(in->hf, key, NULL);
    if (json_is_array(v)) {
        const json_t *n = json_array_get(v, (size_t)i);
        if (!json_is_integer(n))
            return error_set(in->err, "%s: config.json: %s: entry %d is not an integer",
                             in->f->path, key, i);
        if (!reader_range(in, key, (double)json_integer_value(n), 0, hi))
            return false;
        *out = (int)json_integer_value(n);
        return true;
    }
    return reader_int(in, key, NULL, 0, hi, need, out);
}

static bool read_experts(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!read_each(in, "num_experts", 0, 4096, true, &c->n_expert))
        return false;
    c->norm_topk = true;
    for (int i = 0; i < c->n_layers; i++) {
        int width = c->n_ff, shared = 1;
        if (!read_each(in, "moe_topk", i, CONFIG_MAX_EXPERTS_USED, true,
                       &c->layer_experts_used[i]) ||
            !read_each(in, "moe_intermediate_size", i, 1 << 24, false, &width) ||
            !read_each(in, "num_shared_expert", i, 64, false, &shared))
            return false;
        if (i && (width != c->n_ff_exp || shared * width != c->n_ff_shared))
            return error_set(in->err,
                             "%s: config.json: moe_intermediate_size, num_shared_expert: layers "
                             "that differ are not supported",
                             in->f->path);
        c->n_ff_exp = width;
        c->n_ff_shared = shared * width;
        c->is_moe[i] = true;
        if (c->layer_experts_used[i] > c->n_expert_used)
            c->n_expert_used = c->layer_experts_used[i];
    }
    return true;
}

static bool read_dense(const struct meta_reader *in)
{
    return decoder_read(in, &dense);
}

static bool read_sparse(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &sparse))
        return false;
    if (!in->f->is_gguf)
        return read_experts(in);
    c->n_ff_shared = c->n_ff_shared ? c->n_ff_shared : c->n_ff;
    return true;
}

static void build_dense(struct net_builder *b)
{
    decoder_build(b, &dense);
}

static void build_sparse(struct net_builder *b)
{
    decoder_build(b, &sparse);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    gguf_set_u32(w, "hunyuan-moe.expert_shared_feed_forward_length", (uint32_t)c->n_ff_shared);
}

const struct model_family family_hunyuan = {
    .name = "hunyuan-dense",
    .hf = "hunyuan_v1_dense",
    .hf_class = "HunYuanDenseV1ForCausalLM",
    .read = read_dense,
    .build = build_dense,
};

const struct model_family family_hunyuan_moe = {
    .name = "hunyuan-moe",
    .hf = "hunyuan_v1_moe",
    .hf_class = "HunYuanMoEV1ForCausalLM",
    .read = read_sparse,
    .build = build_sparse,
    .write = write,
};
