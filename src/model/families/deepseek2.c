/*
 * DeepSeek V3, V3.1, R1, Kimi K2 and GLM-4.7-Flash: latent attention, sigmoid routing with a bias
 * over the best groups, shared experts, dense first layers. GGUF calls all of them deepseek2.
 * DeepSeek V3.2 and GLM-5 have indexers that choose the keys of a row; a layer of GLM-5.2 may reuse the choice before it.
 * Youtu-LLM has the same attention and dense layers alone. Mistral Small 4 has softmax routing and an attention temperature,
 * A.X-K1 a norm after its experts. Its
 * files have kv_b split by heads and transposed, or, if older, in the folders' layout. The layer
 * after the last one drafts tokens.
 */
#include "model/families/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define LATENT_NAMES                                                                               \
    DECODER_ENDS, DECODER_MLP, DECODER_EXPERTS,                                                    \
        .attn_norm = {"blk.%d.attn_norm", "model.layers.%d.input_layernorm"},                      \
        .gate_shared = {"blk.%d.ffn_gate_shexp", "model.layers.%d.mlp.shared_experts.gate_proj"},  \
        .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.mlp.shared_experts.up_proj"},        \
        .down_shared = {"blk.%d.ffn_down_shexp", "model.layers.%d.mlp.shared_experts.down_proj"}

static const struct decoder_names plain = {LATENT_NAMES};
static const struct decoder_names biased = {
    LATENT_NAMES, .choice_bias = {"=blk.%d.exp_probs_b.bias",
                                  "=model.layers.%d.mlp.gate.e_score_correction_bias"}};

static const struct latent_names latent = {
    .norm = {"blk.%d.attn_norm", "model.layers.%d.input_layernorm"},
    LATENT_MIXER("model.layers.%d.self_attn")};

static const struct tensor_name post = {"blk.%d.post_ffw_norm",
                                        "model.layers.%d.post_mlp_layernorm"};

static const struct tensor_name index_q = {"blk.%d.indexer.attn_q_b",
                                           "model.layers.%d.self_attn.indexer.wq_b"},
                                index_k = {"blk.%d.indexer.attn_k",
                                           "model.layers.%d.self_attn.indexer.wk"},
                                index_w = {"blk.%d.indexer.proj",
                                           "model.layers.%d.self_attn.indexer.weights_proj"},
                                index_norm = {"blk.%d.indexer.k_norm",
                                              "model.layers.%d.self_attn.indexer.k_norm"};

static const struct decoder decoder = {.names = &plain, .latent = true};
static const struct decoder routed = {.names = &biased, .latent = true};

static bool read_index(const struct meta_reader *in)
{
    struct config *c = in->c;
    struct index_config *x = &c->index;
    bool glm = c->family == &family_glm_dsa;
    if (c->family != &family_deepseek32 && !glm)
        return true;
    x->interleaved = glm;
    if (in->f->is_gguf)
        return reader_gguf_int(in, "attention.indexer.head_count", 1, 1024, true, &x->heads) &&
               reader_gguf_int(in, "attention.indexer.key_length", 1, 1024, true, &x->dim) &&
               reader_gguf_int(in, "attention.indexer.top_k", 1, 1 << 20, true, &x->chosen);
    return reader_int(in, "index_n_heads", NULL, 1, 1024, true, &x->heads) &&
           reader_int(in, "index_head_dim", NULL, 1, 1024, true, &x->dim) &&
           reader_int(in, "index_topk", NULL, 1, 1 << 20, true, &x->chosen) &&
           reader_bool(in, "indexer_rope_interleave", &x->interleaved);
}

bool latent_read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int D = c->head_dim;
    c->v_dim = D;
    if (!reader_gguf_int(in, "attention.kv_lora_rank", 1, 1 << 14, true, &c->kv_rank) ||
        !reader_gguf_int(in, "attention.q_lora_rank", 0, 1 << 14, false, &c->q_rank) ||
        !reader_gguf_int(in, "rope.dimension_count", 2, 1 << 14, true, &c->rope_dim) ||
        !reader_gguf_int(in, "attention.value_length", 1, 1 << 14, false, &c->v_dim) ||
        !reader_gguf_int(in, "attention.key_length_mla", 1, 1 << 14, false, &D) ||
        !reader_gguf_int(in, "attention.value_length_mla", 1, 1 << 14, false, &c->v_dim))
        return false;
    if (D <= c->rope_dim)
        return error_set(in->err, "%s: %s: heads of %d have no room beside %d rotary dimensions",
                         in->f->path, c->arch_name, D, c->rope_dim);
    c->nope_dim = D - c->rope_dim;
    return true;
}

static bool read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int extra = 0;
    if (!reader_gguf_int(in, "nextn_predict_layers", 0, c->n_layers - 1, false, &extra) ||
        !latent_read_gguf(in))
        return false;
    c->n_layers -= extra;
    mtp_read(in, &mtp_names, extra);
    c->norm_topk = false;
    int kind = 0;
    if (!reader_gguf_bool(in, "expert_weights_norm", &c->norm_topk) ||
        !reader_gguf_int(in, "expert_gating_func", 0, 3, false, &kind))
        return false;
    if (!kind && c->n_expert) /* older files lack the key: a bias implies sigmoid */
        c->router = build_find(in->f, c, &biased.choice_bias, c->n_layers - 1, 0, "weight")
                        ? ROUTER_SIGMOID
                        : ROUTER_SOFTMAX;
    double l = log(c->rope.factor > 1 ? c->rope.factor : 1), beta = 0;
    c->temp_len = c->rope.original_context;
    if (!reader_gguf_float(in, "attention.temperature_scale", 0, 1e3, false, &beta) ||
        !reader_gguf_int(in, "attention.temperature_length", 1, 1 << 30, false, &c->temp_len))
        return false;
    c->temp_beta = (float)beta;
    if (c->rope.kind == ROPE_YARN && c->rope.log_mul > 0) {
        c->attn_mscale = (float)(1 + c->rope.log_mul * l); /* log_mul is mscale_all_dim / 10 */
        c->rope.attn_factor = 1;
    }
    return true;
}

static bool read_layers(const struct meta_reader *in)
{
    struct config *c = in->c;
    int dense = 0, extra = 0;
    if (!reader_int(in, "first_k_dense_replace", NULL, 0, 1 << 20, false, &dense) ||
        !reader_int(in, "num_nextn_predict_layers", NULL, 0, CONFIG_MAX_LAYERS, false, &extra))
        return false;
    const json_t *types = reader_get(in->hf, "mlp_layer_types", NULL);
    if (types && json_array_size(types) != (size_t)c->n_layers)
        return error_set(in->err, "%s: config.json: mlp_layer_types: %zu entries for %d layers",
                         in->f->path, json_array_size(types), c->n_layers);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        c->is_moe[i] = c->n_expert && (type ? !strcmp(type, "sparse") : i >= dense);
    }
    mtp_read(in, &mtp_names, extra);
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int shared = 0;
    double scale = 1, mscale = 0, beta = 0;
    bool soft = c->family == &family_mistral4, experts = c->family != &family_youtu;
    const json_t *params = reader_get(in->hf, "rope_parameters", "rope_scaling");
    c->norm_topk = true;
    c->router = soft ? ROUTER_SOFTMAX : ROUTER_SIGMOID;
    if (!reader_int(in, "q_lora_rank", NULL, 1, 1 << 14, false, &c->q_rank) ||
        !reader_int(in, "kv_lora_rank", NULL, 1, 1 << 14, true, &c->kv_rank) ||
        !reader_int(in, "qk_nope_head_dim", NULL, 1, 1 << 12, true, &c->nope_dim) ||
        !reader_int(in, "qk_rope_head_dim", NULL, 2, 1 << 12, true, &c->rope_dim) ||
        !reader_int(in, "v_head_dim", NULL, 1, 1 << 12, true, &c->v_dim) ||
        !reader_int(in, "n_routed_experts", NULL, 1, 4096, experts, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, experts,
                    &c->n_expert_used) ||
        !reader_int(in, "moe_intermediate_size", NULL, 1, 1 << 24, experts, &c->n_ff_exp) ||
        !reader_int(in, "n_shared_experts", NULL, 0, 64, false, &shared) ||
        !reader_int(in, "n_group", NULL, 1, 256, false, &c->n_groups) ||
        !reader_int(in, "topk_group", NULL, 1, 256, false, &c->n_groups_used) ||
        !reader_number(in, in->hf, "routed_scaling_factor", 0, 1e6, false, &scale) ||
        !reader_bool(in, "norm_topk_prob", &c->norm_topk) ||
        !reader_number(in, params, "mscale_all_dim", 0, 1e3, false, &mscale) ||
        !reader_number(in, params, "llama_4_scaling_beta", 0, 1e3, false, &beta))
        return false;
    c->temp_beta = (float)beta;
    c->temp_len = c->rope.original_context;
    const char *score = json_string_value(reader_get(in->hf, "scoring_func", NULL));
    const char *known = soft ? "softmax" : "sigmoid";
    if (score && strcmp(score, known) != 0)
        return error_set(in->err,
                         "%s: config.json: scoring_func \"%.40s\" is not supported (%s is)",
                         in->f->path, score, known);
    c->expert_scale = (float)scale;
    c->n_ff_shared = shared * c->n_ff_exp;
    if (c->rope.kind == ROPE_YARN && mscale > 0) {
        double l = log(c->rope.factor > 1 ? c->rope.factor : 1);
        c->rope.log_mul = 0.1 * mscale;
        c->attn_mscale = (float)(1 + 0.1 * mscale * l);
    }
    return read_layers(in);
}

bool latent_check(const struct meta_reader *in)
{
    struct config *c = in->c;
    c->head_dim = c->nope_dim + c->rope_dim;
    c->n_kv_heads = c->n_heads;
    c->n_rot = c->rope_dim;
    if ((int64_t)c->n_heads * (c->kv_rank + c->rope_dim) > 1 << 24)
        return error_set(in->err, "%s: %d heads over a latent of %d are too many", in->f->path,
                         c->n_heads, c->kv_rank);
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    c->attn_mscale = 1;
    if (!decoder_read(in, &decoder) || !(in->f->is_gguf ? read_gguf(in) : read_hf(in)) ||
        !read_index(in))
        return false;
    if (c->index.heads && c->index.dim < c->rope_dim)
        return error_set(in->err, "%s: index keys of %d have no room for %d rotary dimensions",
                         in->f->path, c->index.dim, c->rope_dim);
    if (c->n_groups > 1 && (c->n_expert % c->n_groups || c->n_groups_used > c->n_groups))
        return error_set(in->err, "%s: %d experts in %d groups, of which %d are used", in->f->path,
                         c->n_expert, c->n_groups, c->n_groups_used);
    if (c->n_groups > 1 && c->n_expert_used > c->n_expert / c->n_groups * c->n_groups_used)
        return error_set(in->err, "%s: %d experts used of %d groups of %d", in->f->path,
                         c->n_expert_used, c->n_groups_used, c->n_expert / c->n_groups);
    return latent_check(in);
}

/* A layer without an indexer of its own reuses the choice of the layer before, which has one. */
static void build_index(struct net_builder *b, int i, struct latent *l)
{
    const struct config *c = b->c;
    const struct index_config *x = &c->index;
    bool own = build_has(b, &index_k, i);
    if (!x->heads || (!own && (i == 0 || i >= c->n_layers)))
        return;
    l->index = (struct indexer){.n_heads = x->heads,
                                .dim = x->dim,
                                .n_chosen = x->chosen,
                                .rope = l->rope,
                                .interleaved = x->interleaved,
                                .reuse = !own};
    if (!own)
        return;
    l->index.wq = build_matrix(b, WEIGHT_LINEAR, i, &index_q, c->q_rank ? c->q_rank : c->n_embd,
                               x->heads * x->dim);
    l->index.wk = build_matrix(b, WEIGHT_LINEAR, i, &index_k, c->n_embd, x->dim);
    l->index.ww = build_matrix(b, WEIGHT_LINEAR, i, &index_w, c->n_embd, x->heads);
    l->index.k_norm = build_layer_norm_of(b, i, &index_norm, x->dim, (struct adjust){0});
    l->index.k_norm.eps = 1e-6f;
}

void latent_build(struct net_builder *b, const struct latent_names *n, int i,
                  const struct rope *rope, struct mixer *m)
{
    const struct config *c = b->c;
    int H = c->n_heads, C = c->kv_rank, Dn = c->nope_dim, Dr = c->rope_dim, Dv = c->v_dim;
    *m = (struct mixer){.kind = MIXER_LATENT};
    m->block.in = build_rms(b, i, &n->norm, c->n_embd);
    m->latent = (struct latent){.n_heads = H,
                                .nope_dim = Dn,
                                .rope_dim = Dr,
                                .v_dim = Dv,
                                .q_rank = c->q_rank,
                                .kv_rank = C,
                                .rope = rope,
                                .interleaved = true,
                                .temp_beta = c->temp_beta,
                                .temp_len = c->temp_len,
                                .scale = c->attn_mscale * c->attn_mscale / sqrtf((float)(Dn + Dr))};
    struct latent *l = &m->latent;
    const float eps = 1e-6f; /* of the latents' norms, independent of norm_eps */
    if (c->q_rank) {
        l->wqa = build_matrix(b, WEIGHT_LINEAR, i, &n->q_a, c->n_embd, c->q_rank);
        l->q_norm = build_rms_adjusted(b, i, &n->q_norm, c->q_rank,
                                       (struct adjust){.times = c->q_latent_scale});
        l->q_norm.eps = eps;
        l->wqb = build_matrix(b, WEIGHT_LINEAR, i, &n->q_b, c->q_rank, H * (Dn + Dr));
    } else {
        l->wqb = build_matrix(b, WEIGHT_LINEAR, i, &n->q, c->n_embd, H * (Dn + Dr));
    }
    l->wkva = build_matrix(b, WEIGHT_LINEAR, i, &n->kv_a, c->n_embd, C + Dr);
    l->kv_norm =
        build_rms_adjusted(b, i, &n->kv_norm, C, (struct adjust){.times = c->kv_latent_scale});
    l->kv_norm.eps = eps;
    struct weight_rows k = {.name = &n->k_b, .n = C}, v = {.name = &n->v_b, .n = Dv};
    if (!b->f->is_gguf || !build_has(b, &n->k_b, i)) {
        k = (struct weight_rows){.name = &n->kv_b, .n = C, .stride = Dn + Dv, .transposed = true};
        v = (struct weight_rows){.name = &n->kv_b, .n = Dv, .stride = Dn + Dv, .offset = Dn};
    }
    l->wkb = build_weight(b, WEIGHT_HEADS, i, Dn, H, 1, &k);
    b->specs[b->n_specs - 1].as = &n->k_b;
    l->wvb = build_weight(b, WEIGHT_HEADS, i, C, H, 1, &v);
    b->specs[b->n_specs - 1].as = &n->v_b;
    l->wo = build_matrix(b, WEIGHT_LINEAR, i, &n->o, H * Dv, c->n_embd);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope *rope = build_rope(b);
    bool bias = c->n_expert && build_has(b, &biased.choice_bias, c->n_layers - 1);
    decoder_ends(b, &decoder);
    for (int i = 0; i < c->n_layers + c->n_mtp; i++) {
        latent_build(b, &latent, i, rope, &b->net->layers[i].mixer);
        build_index(b, i, &b->net->layers[i].mixer.latent);
        decoder_mlp(b, bias ? &routed : &decoder, i, &b->net->layers[i].mlp);
        if (build_has(b, &post, i))
            b->net->layers[i].mlp.block.out = build_rms(b, i, &post, c->n_embd);
    }
    if (c->n_mtp)
        mtp_build(b, &mtp_names, 0);
}

void latent_write(const struct config *c, struct gguf_writer *w)
{
    int dense = 0;
    while (dense < c->n_layers && !c->is_moe[dense])
        dense++;
    const struct {
        const char *key;
        int v;
    } numbers[] = {
        {"attention.key_length_mla", c->nope_dim + c->rope_dim},
        {"attention.value_length_mla", c->v_dim},
        {"attention.kv_lora_rank", c->kv_rank},
        {"attention.q_lora_rank", c->q_rank},
        {"leading_dense_block_count", dense},
        {"attention.temperature_length", c->temp_beta != 0 ? c->temp_len : 0},
        {"attention.indexer.head_count", c->index.heads},
        {"attention.indexer.key_length", c->index.dim},
        {"attention.indexer.top_k", c->index.chosen},
    };
    const char *arch = c->family->gguf_as ? c->family->gguf_as : c->family->name;
    char key[96];
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, numbers[i].key);
        if (numbers[i].v) /* rank 0: the product does not exist */
            gguf_set_u32(w, key, (uint32_t)numbers[i].v);
    }
    snprintf(key, sizeof key, "%s.rope.scaling.yarn_log_multiplier", arch);
    if (c->rope.log_mul > 0)
        gguf_set_f32(w, key, (float)c->rope.log_mul);
    snprintf(key, sizeof key, "%s.attention.temperature_scale", arch);
    if (c->temp_beta != 0)
        gguf_set_f32(w, key, c->temp_beta);
}

const struct model_family family_deepseek2 = {
    .name = "deepseek2",
    .hf = "deepseek_v3",
    .hf_class = "DeepseekV3ForCausalLM",
    .read = read,
    .build = build,
    .write = latent_write,
};

/* Kimi K2 is the same architecture under another name. */
const struct model_family family_kimi_k2 = {
    .name = "kimi_k2",
    .hf = "kimi_k2",
    .hf_class = "DeepseekV3ForCausalLM",
    .gguf_as = "deepseek2",
    .read = read,
    .build = build,
    .write = latent_write,
};

const struct model_family family_glm4_moe_lite = {
    .name = "glm4_moe_lite",
    .hf = "glm4_moe_lite",
    .hf_class = "Glm4MoeLiteForCausalLM",
    .gguf_as = "deepseek2",
    .read = read,
    .build = build,
    .write = latent_write,
};

const struct model_family family_deepseek32 = {
    .name = "deepseek32",
    .hf = "deepseek_v32",
    .hf_class = "DeepseekV32ForCausalLM",
    .read = read,
    .build = build,
    .write = latent_write,
};

const struct model_family family_glm_dsa = {
    .name = "glm-dsa",
    .hf = "glm_moe_dsa",
    .hf_class = "GlmMoeDsaForCausalLM",
    .read = read,
    .build = build,
    .write = latent_write,
};

const struct model_family family_mistral4 = {
    .name = "mistral4",
    .hf = "mistral4",
    .hf_class = "Mistral4ForCausalLM",
    .read = read,
    .build = build,
    .write = latent_write,
};

const struct model_family family_axk1 = {
    .name = "axk1",
    .hf = "axk1",
    .hf_class = "AXK1ForCausalLM",
    .read = read,
    .build = build,
    .write = latent_write,
};

const struct model_family family_youtu = {
    .name = "youtu",
    .hf = "youtu",
    .hf_class = "YoutuForCausalLM",
    .gguf_as = "deepseek2",
    .read = read,
    .build = build,
    .write = latent_write,
};
