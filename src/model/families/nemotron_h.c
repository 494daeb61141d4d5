/*
 * Nemotron-H, Nemotron Nano 2 and Nemotron 3: every layer is one block: a state-space model of Mamba-2, attention
 * without RoPE, an mlp or experts, all with squared ReLU in place of a gate. Experts may work on projections of their
 * input (Nemotron 3 Super).
 */
#include "model/families/family.h"

#include <stdio.h>
#include <string.h>

static const struct decoder_names names = {
    .emb = {"token_embd", "model.embeddings"},
    .norm = {"output_norm", "model.norm_f"},
    .head = {"output", "lm_head"},
    .attn_norm = {"blk.%d.attn_norm", "model.layers.%d.norm"},
    .q = {"blk.%d.attn_q", "model.layers.%d.mixer.q_proj"},
    .k = {"blk.%d.attn_k", "model.layers.%d.mixer.k_proj"},
    .v = {"blk.%d.attn_v", "model.layers.%d.mixer.v_proj"},
    .o = {"blk.%d.attn_output", "model.layers.%d.mixer.o_proj"},
    .ffn_norm = {"blk.%d.attn_norm", "model.layers.%d.norm"},
    .up = {"blk.%d.ffn_up", "model.layers.%d.mixer.up_proj"},
    .down = {"blk.%d.ffn_down", "model.layers.%d.mixer.down_proj"},
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.mixer.gate"},
    .choice_bias = {"=blk.%d.exp_probs_b.bias",
                    "=model.layers.%d.mixer.gate.e_score_correction_bias"},
    .up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.mixer.experts.%d.up_proj"},
    .down_exp = {"blk.%d.ffn_down_exps", "model.layers.%d.mixer.experts.%d.down_proj"},
    .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.mixer.shared_experts.up_proj"},
    .down_shared = {"blk.%d.ffn_down_shexp", "model.layers.%d.mixer.shared_experts.down_proj"}};

static const struct tensor_name to_experts = {"blk.%d.ffn_latent_down",
                                              "model.layers.%d.mixer.fc1_latent_proj"},
                                from_experts = {"blk.%d.ffn_latent_up",
                                                "model.layers.%d.mixer.fc2_latent_proj"};
static const struct ssm_names mamba = {SSM_NAMES("model.layers.%d.mixer")};

static const struct decoder decoder = {.names = &names,
                                       .router = ROUTER_SIGMOID,
                                       .act = ACT_PLAIN_RELU2,
                                       .act_key = "mlp_hidden_act",
                                       .act_name = "relu2"};

/* The block of layer i: 'M' state-space model, '*' attention, '-' mlp, 'E' experts; 0: neither key of config.json says
 * so. */
static char block_of(const json_t *config, int i)
{
    static const struct {
        const char *name;
        char block;
    } types[] = {{"mamba", 'M'},     {"linear_attention", 'M'},
                 {"attention", '*'}, {"full_attention", '*'},
                 {"mlp", '-'},       {"moe", 'E'}};
    const json_t *list = reader_get(config, "layers_block_type", NULL);
    const char *pattern = json_string_value(reader_get(config, "hybrid_override_pattern", NULL));
    const char *type = json_string_value(json_array_get(list, (size_t)i));
    for (size_t k = 0; type && k < sizeof types / sizeof *types; k++)
        if (!strcmp(type, types[k].name))
            return types[k].block;
    return !list && pattern && (size_t)i < strlen(pattern) ? pattern[i] : 0;
}

static bool has_experts(const json_t *config)
{
    for (int i = 0; i < CONFIG_MAX_LAYERS; i++)
        if (block_of(config, i) == 'E')
            return true;
    return false;
}

static bool read_experts(const struct meta_reader *in)
{
    struct config *c = in->c;
    double scale = 1;
    c->norm_topk = true;
    if (!reader_int(in, "n_routed_experts", NULL, 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, true,
                    &c->n_expert_used) ||
        !reader_int(in, "moe_intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff_exp) ||
        !reader_int(in, "moe_shared_expert_intermediate_size", NULL, 0, 1 << 24, false,
                    &c->n_ff_shared) ||
        !reader_int(in, "moe_latent_size", NULL, 0, 1 << 20, false, &c->n_latent_exp) ||
        !reader_int(in, "n_group", NULL, 0, 256, false, &c->n_groups) ||
        !reader_int(in, "topk_group", NULL, 0, 256, false, &c->n_groups_used) ||
        !reader_number(in, in->hf, "routed_scaling_factor", 1e-3, 1e3, false, &scale) ||
        !reader_bool(in, "norm_topk_prob", &c->norm_topk))
        return false;
    c->router = ROUTER_SIGMOID;
    c->expert_scale = (float)scale;
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    double eps = 1e-5;
    if (!reader_number(in, in->hf, "layer_norm_epsilon", 0, 1, false, &eps) ||
        (has_experts(in->hf) && !read_experts(in)))
        return false;
    c->norm_eps = (float)eps;
    for (int i = 0; i < c->n_layers; i++) {
        char block = block_of(in->hf, i);
        if (!block || !strchr("M*-E", block))
            return error_set(in->err,
                             "%s: config.json: hybrid_override_pattern: layer %d is none of M, *, "
                             "- and E",
                             in->f->path, i);
        c->is_linear[i] = block == 'M';
        c->is_moe[i] = block == 'E';
        c->is_mlp[i] = block == '-' || block == 'E';
    }
    return true;
}

/* A GGUF says it by the KV heads and hidden units of each layer. */
static bool read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int extra = 0;
    if (!reader_gguf_int(in, "moe_latent_size", 0, 1 << 20, false, &c->n_latent_exp) ||
        !reader_gguf_int(in, "nextn_predict_layers", 0, c->n_layers - 1, false, &extra))
        return false;
    c->n_layers -= extra; /* blocks that draft tokens are not used */
    for (int i = 0; i < c->n_layers; i++) {
        c->is_mlp[i] = c->layer_ff[i] > 0;
        c->is_linear[i] = !c->is_mlp[i] && !c->layer_kv_heads[i];
        c->n_ff = c->n_ff > c->layer_ff[i] ? c->n_ff : c->layer_ff[i];
    }
    return true;
}

static bool read(const struct meta_reader *in)
{
    static const struct ssm_keys keys = {"mamba_num_heads", "mamba_head_dim", "ssm_state_size",
                                         "n_groups", "conv_kernel"};
    struct config *c = in->c;
    bool recurrent = false;
    if (!decoder_read(in, &decoder) || !(in->f->is_gguf ? read_gguf(in) : read_hf(in)))
        return false;
    for (int i = 0; i < c->n_layers; i++) {
        c->no_rope[i] = true;
        recurrent |= c->is_linear[i];
    }
    c->n_ff = c->n_ff ? c->n_ff : 1;
    return !recurrent || ssm_read(in, &keys);
}

static struct ffn mlp_of(struct net_builder *b, int i, enum weight_role role, int n_in, int width,
                         int n_expert, const struct tensor_name *up, const struct tensor_name *down)
{
    const struct weight_rows rows[] = {{.name = up, .n = width}, {.name = down, .n = n_in}};
    return (struct ffn){.gate_up = build_weight(b, role, i, n_in, n_expert, 1, &rows[0]),
                        .down = build_weight(b, role, i, width, n_expert, 1, &rows[1]),
                        .act = ACT_PLAIN_RELU2};
}

static void build_mlp(struct net_builder *b, int i, struct mlp *m)
{
    const struct config *c = b->c;
    int E = c->n_embd, L = c->n_latent_exp ? c->n_latent_exp : E;
    *m = (struct mlp){.block.in = build_rms(b, i, &names.ffn_norm, E)};
    if (!c->is_moe[i]) {
        m->dense = mlp_of(b, i, WEIGHT_LINEAR, E, c->layer_ff[i] ? c->layer_ff[i] : c->n_ff, 1,
                          &names.up, &names.down);
        return;
    }
    decoder_router(b, &decoder, i, m);
    m->experts =
        mlp_of(b, i, WEIGHT_EXPERTS, L, c->n_ff_exp, c->n_expert, &names.up_exp, &names.down_exp);
    if (c->n_ff_shared)
        m->dense =
            mlp_of(b, i, WEIGHT_LINEAR, E, c->n_ff_shared, 1, &names.up_shared, &names.down_shared);
    if (!c->n_latent_exp)
        return;
    m->to_experts = build_matrix(b, WEIGHT_LINEAR, i, &to_experts, E, L);
    m->from_experts = build_matrix(b, WEIGHT_LINEAR, i, &from_experts, L, E);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    decoder_ends(b, &decoder);
    for (int i = 0; i < c->n_layers; i++) {
        struct layer *l = &b->net->layers[i];
        l->mixer = (struct mixer){.kind = MIXER_NONE};
        if (c->is_mlp[i]) {
            build_mlp(b, i, &l->mlp);
        } else if (c->is_linear[i]) {
            l->mixer.block.in = build_rms(b, i, &names.attn_norm, c->n_embd);
            ssm_build(b, &mamba, i, &l->mixer);
            l->mixer.ssm.n_norms = c->linear_k_heads;
        } else {
            decoder_mixer(b, &decoder, i, NULL, &l->mixer);
        }
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    char key[96];
    snprintf(key, sizeof key, "%s.expert_shared_feed_forward_length", c->family->name);
    if (c->n_ff_shared)
        gguf_set_u32(w, key, (uint32_t)c->n_ff_shared);
    snprintf(key, sizeof key, "%s.moe_latent_size", c->family->name);
    if (c->n_latent_exp)
        gguf_set_u32(w, key, (uint32_t)c->n_latent_exp);
    snprintf(key, sizeof key, "%s.attention.layer_norm_epsilon", c->family->name);
    gguf_set_f32(w, key, c->norm_eps); /* other readers need it */
    ssm_write(c, w);
}

static bool is_dense(const json_t *config)
{
    return !has_experts(config);
}

static bool spare(const struct config *c, const char *tensor)
{
    (void)c;
    return !strncmp(tensor, "mtp.", 4); /* blocks that draft tokens */
}

#define NEMOTRON_H                                                                                 \
    .hf = "nemotron_h", .hf_class = "NemotronHForCausalLM", .hf_embed = "embeddings",              \
    .zero_heads = true, .one_block = true, .read = read, .build = build, .write = write,           \
    .spare = spare

const struct model_family family_nemotron_h = {
    .name = "nemotron_h", .is_kind = is_dense, NEMOTRON_H};

const struct model_family family_nemotron_h_moe = {.name = "nemotron_h_moe", NEMOTRON_H};
