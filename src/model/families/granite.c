/*
 * Granite 3 and 4: a plain decoder with factors on embeddings, scores, blocks and logits, and mixtures of experts.
 * Granite 4 has state-space models of Mamba-2 in most layers, and an mlp beside the experts or alone. Folders hold gate
 * and up in one tensor.
 */
#include "model/families/family.h"

#include <stdio.h>
#include <string.h>

static const struct decoder_names names = {
    DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP,
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.block_sparse_moe.router.layer"}};

static const struct tensor_name gate = {"blk.%d.ffn_gate_exps",
                                        "model.layers.%d.block_sparse_moe.input_linear"},
                                up = {"blk.%d.ffn_up_exps",
                                      "model.layers.%d.block_sparse_moe.input_linear"},
                                down = {"blk.%d.ffn_down_exps",
                                        "model.layers.%d.block_sparse_moe.output_linear"};

static const struct decoder dense = {.names = &names};
static const struct decoder sparse = {.names = &names, .experts = true, .experts_wide = true};

/* Granite 4: the mlp beside experts, and without experts. */
#define SHARED_MLP(name)                                                                           \
    {                                                                                              \
        "blk.%d." name, "model.layers.%d.shared_mlp.input_linear"                                  \
    }
static const struct tensor_name shared_gate = SHARED_MLP("ffn_gate_shexp"),
                                shared_up = SHARED_MLP("ffn_up_shexp"),
                                shared_down = {"blk.%d.ffn_down_shexp",
                                               "model.layers.%d.shared_mlp.output_linear"},
                                alone_gate = SHARED_MLP("ffn_gate"),
                                alone_up = SHARED_MLP("ffn_up"),
                                alone_down = {"blk.%d.ffn_down",
                                              "model.layers.%d.shared_mlp.output_linear"};

static const struct ssm_names mamba = {SSM_NAMES("model.layers.%d.mamba")};
static const struct decoder hybrid = {.names = &names};

static bool read_factors(const struct meta_reader *in)
{
    double embed = 1, residual = 1, attn = 0, logits = 1;
    if (in->f->is_gguf) {
        if (!reader_gguf_float(in, "embedding_scale", 1e-6, 1e6, false, &embed) ||
            !reader_gguf_float(in, "residual_scale", 1e-6, 1e6, false, &residual) ||
            !reader_gguf_float(in, "attention.scale", 0, 1e6, false, &attn) ||
            !reader_gguf_float(in, "logit_scale", 1e-6, 1e6, false, &logits))
            return false;
    } else if (!reader_number(in, in->hf, "embedding_multiplier", 1e-6, 1e6, false, &embed) ||
               !reader_number(in, in->hf, "residual_multiplier", 1e-6, 1e6, false, &residual) ||
               !reader_number(in, in->hf, "attention_multiplier", 1e-6, 1e6, false, &attn) ||
               !reader_number(in, in->hf, "logits_scaling", 1e-6, 1e6, false, &logits)) {
        return false;
    }
    in->c->embed_scale = (float)embed;
    in->c->residual_scale = (float)residual;
    in->c->attn_scale = (float)attn;
    in->c->head_scale = (float)(1 / logits);
    return true;
}

static bool read_dense(const struct meta_reader *in)
{
    return decoder_read(in, &dense) && read_factors(in);
}

static bool read_sparse(const struct meta_reader *in)
{
    if (!decoder_read(in, &sparse) || !read_factors(in))
        return false;
    in->c->norm_topk = true; /* softmax over the chosen experts */
    return true;
}

/* Granite 4 without state-space models has RoPE, with them it has none. */
static bool read_hybrid_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    const json_t *types = reader_get(in->hf, "layer_types", "layers_block_type");
    c->n_expert = 0;
    if (!reader_int(in, "num_local_experts", NULL, 0, 4096, false, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 0, CONFIG_MAX_EXPERTS_USED, c->n_expert > 0,
                    &c->n_expert_used) ||
        !reader_int(in, "shared_intermediate_size", NULL, 0, 1 << 24, false, &c->n_ff_shared))
        return false;
    c->n_ff_exp = c->n_ff;
    c->norm_topk = true;
    if (!c->n_expert)
        c->n_ff = c->n_ff_shared;
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        c->is_moe[i] = c->n_expert > 0;
        c->is_linear[i] = type && !strcmp(type, "mamba");
        if (type && !c->is_linear[i] && strcmp(type, "attention") != 0)
            return error_set(in->err,
                             "%s: config.json: layer_types[%d]: \"%.40s\" is not supported "
                             "(mamba and attention are)",
                             in->f->path, i, type);
    }
    const char *kind = json_string_value(reader_get(in->hf, "position_embedding_type", NULL));
    for (int i = 0; i < c->n_layers; i++)
        c->no_rope[i] = kind && strcmp(kind, "rope") != 0;
    return true;
}

static bool read_hybrid(const struct meta_reader *in)
{
    static const struct ssm_keys keys = {"mamba_n_heads", "mamba_d_head", "mamba_d_state",
                                         "mamba_n_groups", "mamba_d_conv"};
    struct config *c = in->c;
    bool rope = true, recurrent = false;
    if (!decoder_read(in, &hybrid) || !read_factors(in))
        return false;
    if (in->f->is_gguf) {
        if (!reader_gguf_bool(in, "rope.scaling.finetuned", &rope))
            return false;
        for (int i = 0; i < c->n_layers; i++)
            c->no_rope[i] = !rope;
    } else if (!read_hybrid_hf(in)) {
        return false;
    }
    for (int i = 0; i < c->n_layers; i++)
        recurrent |= c->is_linear[i];
    return !recurrent || ssm_read(in, &keys);
}

static void build_dense(struct net_builder *b)
{
    decoder_build(b, &dense);
}

static const struct weight *gate_up(struct net_builder *b, enum weight_role role, int i, int n,
                                    const struct tensor_name *gates, const struct tensor_name *ups,
                                    int F)
{
    const struct weight_rows two[] = {{.name = gates, .n = F, .tensor_rows = 2 * F},
                                      {.name = ups, .n = F, .first = F, .tensor_rows = 2 * F}};
    return build_weight(b, role, i, b->c->n_embd, n, 2, two);
}

static void build_experts(struct net_builder *b, enum weight_role role, int i, struct mlp *m)
{
    const struct config *c = b->c;
    m->experts.gate_up = gate_up(b, role, i, c->n_expert, &gate, &up, c->n_ff_exp);
    m->experts.down = build_weight(b, role, i, c->n_ff_exp, c->n_expert, 1,
                                   (const struct weight_rows[]){{.name = &down, .n = c->n_embd}});
}

static void build_sparse(struct net_builder *b)
{
    decoder_build(b, &sparse);
    for (int i = 0; i < b->c->n_layers && !b->failed; i++)
        build_experts(b, WEIGHT_EXPERTS, i, &b->net->layers[i].mlp);
}

static void build_hybrid_mlp(struct net_builder *b, int i, struct mlp *m)
{
    const struct config *c = b->c;
    int shared = c->n_ff_shared;
    if (!c->is_moe[i]) {
        *m = (struct mlp){.block.scale = c->residual_scale};
        m->block.in = build_rms(b, i, &names.ffn_norm, c->n_embd);
        m->dense.gate_up = gate_up(b, WEIGHT_LINEAR, i, 1, &alone_gate, &alone_up, c->n_ff);
        m->dense.down = build_matrix(b, WEIGHT_LINEAR, i, &alone_down, c->n_ff, c->n_embd);
        return;
    }
    decoder_mlp(b, &hybrid, i, m);
    build_experts(b, shared == c->n_ff_exp ? WEIGHT_EXPERTS_SHARED : WEIGHT_EXPERTS, i, m);
    if (!shared)
        return;
    m->dense.gate_up = gate_up(b, WEIGHT_LINEAR, i, 1, &shared_gate, &shared_up, shared);
    m->dense.down = build_matrix(b, WEIGHT_LINEAR, i, &shared_down, shared, c->n_embd);
}

static void build_hybrid(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope *rope = build_rope(b);
    decoder_ends(b, &hybrid);
    for (int i = 0; i < c->n_layers; i++) {
        struct mixer *m = &b->net->layers[i].mixer;
        if (c->is_linear[i]) {
            *m = (struct mixer){.block.scale = c->residual_scale};
            m->block.in = build_rms(b, i, &names.attn_norm, c->n_embd);
            ssm_build(b, &mamba, i, m);
        } else {
            decoder_mixer(b, &hybrid, i, c->no_rope[i] ? NULL : rope, m);
        }
        build_hybrid_mlp(b, i, &b->net->layers[i].mlp);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    const struct {
        const char *key;
        float v;
    } factors[] = {{"embedding_scale", c->embed_scale},
                   {"residual_scale", c->residual_scale},
                   {"attention.scale", c->attn_scale},
                   {"logit_scale", 1 / c->head_scale}};
    for (size_t i = 0; i < sizeof factors / sizeof *factors; i++) {
        char key[96];
        snprintf(key, sizeof key, "%s.%s", c->family->name, factors[i].key);
        if (factors[i].v != 0)
            gguf_set_f32(w, key, factors[i].v);
    }
}

static void write_hybrid(const struct config *c, struct gguf_writer *w)
{
    bool recurrent = false;
    for (int i = 0; i < c->n_layers; i++)
        recurrent |= c->is_linear[i];
    write(c, w);
    gguf_set_bool(w, "granitehybrid.rope.scaling.finetuned", !c->no_rope[0]);
    if (c->n_expert && c->n_ff_shared)
        gguf_set_u32(w, "granitehybrid.expert_shared_feed_forward_length",
                     (uint32_t)c->n_ff_shared);
    if (recurrent)
        ssm_write(c, w);
}

const struct model_family family_granite = {
    .name = "granite",
    .hf = "granite",
    .hf_class = "GraniteForCausalLM",
    .interleaved_qk = true,
    .read = read_dense,
    .build = build_dense,
    .write = write,
};

const struct model_family family_granitemoe = {
    .name = "granitemoe",
    .hf = "granitemoe",
    .hf_class = "GraniteMoeForCausalLM",
    .interleaved_qk = true,
    .read = read_sparse,
    .build = build_sparse,
    .write = write,
};

const struct model_family family_granite_hybrid = {
    .name = "granitehybrid",
    .hf = "granitemoehybrid",
    .hf_class = "GraniteMoeHybridForCausalLM",
    .interleaved_qk = true,
    .zero_heads = true,
    .read = read_hybrid,
    .build = build_hybrid,
    .write = write_hybrid,
};
