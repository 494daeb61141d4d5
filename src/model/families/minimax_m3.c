/*
 * MiniMax-M3, the text model: sparse attention that chooses blocks of keys for each group of heads, QK-norm per head, RoPE
 * of half a head, clamped SwiGLU, sigmoid routing with a bias, a shared expert, dense first layers.
 */
#include "model/families/family.h"

#include <stdio.h>
#include <string.h>

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    DECODER_MLP,
    DECODER_EXPERTS_W,
    .choice_bias = {"=blk.%d.exp_probs_b.bias",
                    "=model.layers.%d.block_sparse_moe.e_score_correction_bias"},
    .gate_shared = {"blk.%d.ffn_gate_shexp",
                    "model.layers.%d.block_sparse_moe.shared_experts.gate_proj"},
    .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.block_sparse_moe.shared_experts.up_proj"},
    .down_shared = {"blk.%d.ffn_down_shexp",
                    "model.layers.%d.block_sparse_moe.shared_experts.down_proj"}};

static const struct tensor_name index_q = {"blk.%d.indexer.q_proj",
                                           "model.layers.%d.self_attn.index_q_proj"},
                                index_k = {"blk.%d.indexer.k_proj",
                                           "model.layers.%d.self_attn.index_k_proj"},
                                index_q_norm = {"blk.%d.indexer.q_norm",
                                                "model.layers.%d.self_attn.index_q_norm"},
                                index_k_norm = {"blk.%d.indexer.k_norm",
                                                "model.layers.%d.self_attn.index_k_norm"};

static const struct decoder decoder = {.names = &names,
                                       .qk_norm = true,
                                       .norm_add = 1,
                                       .router = ROUTER_SIGMOID,
                                       .act = ACT_SWIGLU_CLAMP};

/* An object of config.json as a reader of its own. */
static bool read_index(const struct meta_reader *in, const char *inside)
{
    struct meta_reader part = *in;
    struct index_config *x = &in->c->index;
    int first = 0, local = 1;
    part.hf = reader_get(in->hf, inside, NULL);
    if (!part.hf)
        return true; /* full attention */
    const char *score = json_string_value(reader_get(part.hf, "sparse_score_type", NULL));
    if (score && strcmp(score, "max") != 0)
        return error_set(in->err,
                         "%s: config.json: sparse_score_type \"%.40s\" is not supported (max is)",
                         in->f->path, score);
    if (!reader_int(&part, "sparse_num_index_heads", NULL, 1, 1024, true, &x->heads) ||
        !reader_int(&part, "sparse_index_dim", NULL, 1, 1024, true, &x->dim) ||
        !reader_int(&part, "sparse_block_size", NULL, 1, 1024, true, &x->block) ||
        !reader_int(&part, "sparse_topk_blocks", NULL, 1, 1 << 20, true, &x->chosen) ||
        !reader_int(&part, "sparse_init_block", NULL, 0, 0, false, &first) ||
        !reader_int(&part, "sparse_local_block", NULL, 1, 1, false, &local))
        return false;
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int dense = 0, shared = 1, width = 0;
    double scale = 1, limit = 7, alpha = 1.702;
    const json_t *types = reader_get(in->hf, "mlp_layer_types", NULL);
    const json_t *freq = reader_get(in->hf, "moe_layer_freq", NULL);
    c->n_ff_exp = width = c->n_ff;
    if (!reader_int(in, "num_local_experts", NULL, 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, true,
                    &c->n_expert_used) ||
        !reader_int(in, "dense_intermediate_size", NULL, 1, 1 << 24, false, &dense) ||
        !reader_int(in, "shared_intermediate_size", NULL, 0, 1 << 24, false, &width) ||
        !reader_int(in, "n_shared_experts", NULL, 0, 64, false, &shared) ||
        !reader_int(in, "rotary_dim", NULL, 2, c->head_dim, false, &c->n_rot) ||
        !reader_number(in, in->hf, "routed_scaling_factor", 1e-3, 1e3, false, &scale) ||
        !reader_number(in, in->hf, "swiglu_limit", 1e-3, 1e6, false, &limit) ||
        !reader_number(in, in->hf, "swiglu_alpha", 1.702, 1.702, false, &alpha) ||
        !read_index(in, "sparse_attention_config"))
        return false;
    c->n_ff = dense ? dense : c->n_ff;
    c->n_ff_shared = shared * width;
    c->expert_scale = (float)scale;
    c->act_limit = (float)limit;
    c->norm_topk = true;
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        const json_t *one = json_array_get(freq, (size_t)i);
        c->is_moe[i] = type ? !strcmp(type, "sparse") : one ? json_integer_value(one) != 0 : true;
    }
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct index_config *x = &in->c->index;
    double limit = 7;
    int local = 1;
    if (!decoder_read(in, &decoder))
        return false;
    if (!in->f->is_gguf)
        return read_hf(in);
    if (!reader_gguf_int(in, "attention.indexer.head_count", 1, 1024, false, &x->heads) ||
        !reader_gguf_int(in, "attention.indexer.key_length", 1, 1024, x->heads > 0, &x->dim) ||
        !reader_gguf_int(in, "attention.indexer.top_k", 1, 1 << 20, x->heads > 0, &x->chosen) ||
        !reader_gguf_int(in, "attention.indexer.block_size", 1, 1024, x->heads > 0, &x->block) ||
        !reader_gguf_int(in, "attention.indexer.local_blocks", 1, 1, false, &local) ||
        !reader_gguf_float(in, "swiglu_limit", 1e-3, 1e6, false, &limit))
        return false;
    in->c->act_limit = (float)limit;
    return true;
}

static struct norm index_norm(struct net_builder *b, int i, const struct tensor_name *name)
{
    return build_rms_adjusted(b, i, name, b->c->index.dim, (struct adjust){.add = 1});
}

static void build_index(struct net_builder *b, int i, const struct rope *rope, struct attention *a)
{
    const struct config *c = b->c;
    const struct index_config *x = &c->index;
    if (!x->heads || !build_has(b, &index_k, i))
        return;
    if (x->heads != a->n_kv_heads) {
        b->failed = !error_set(b->err, "%s: %d index heads for %d KV heads are not supported",
                               b->f->path, x->heads, a->n_kv_heads);
        return;
    }
    a->index = (struct indexer){
        .n_heads = x->heads, .dim = x->dim, .n_chosen = x->chosen, .block = x->block, .rope = rope};
    a->index.wq = build_matrix(b, WEIGHT_LINEAR, i, &index_q, c->n_embd, x->heads * x->dim);
    a->index.wk = build_matrix(b, WEIGHT_LINEAR, i, &index_k, c->n_embd, x->dim);
    a->index.q_norm = index_norm(b, i, &index_q_norm);
    a->index.k_norm = index_norm(b, i, &index_k_norm);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope *rope = build_rope(b);
    decoder_ends(b, &decoder);
    for (int i = 0; i < c->n_layers && !b->failed; i++) {
        struct layer *l = &b->net->layers[i];
        decoder_mixer(b, &decoder, i, rope, &l->mixer);
        build_index(b, i, rope, &l->mixer.attention);
        decoder_mlp(b, &decoder, i, &l->mlp);
        l->mlp.dense.alpha = l->mlp.experts.alpha = 1.702f;
        l->mlp.dense.limit = l->mlp.experts.limit = c->act_limit;
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    const struct index_config *x = &c->index;
    decoder_write_dense(c, w);
    if (c->n_ff_shared != c->n_ff_exp)
        gguf_set_u32(w, "minimax-m3.expert_shared_feed_forward_length", (uint32_t)c->n_ff_shared);
    if (c->act_limit != 7)
        gguf_set_f32(w, "minimax-m3.swiglu_limit", c->act_limit);
    if (!x->heads)
        return;
    gguf_set_u32(w, "minimax-m3.attention.indexer.head_count", (uint32_t)x->heads);
    gguf_set_u32(w, "minimax-m3.attention.indexer.key_length", (uint32_t)x->dim);
    gguf_set_u32(w, "minimax-m3.attention.indexer.top_k", (uint32_t)x->chosen);
    gguf_set_u32(w, "minimax-m3.attention.indexer.block_size", (uint32_t)x->block);
    gguf_set_u32(w, "minimax-m3.attention.indexer.local_blocks", 1);
}

const struct model_family family_minimax_m3 = {
    .name = "minimax-m3",
    .hf = "minimax_m3_vl",
    .hf_class = "MiniMaxM3SparseForConditionalGeneration",
    .read = read,
    .build = build,
    .write = write,
};
