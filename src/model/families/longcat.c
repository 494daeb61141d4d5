/*
 * LongCat-Flash: latent attention, whose latents have a factor after their norms, and a dense mlp in each of two layers
 * that a folder counts as one. The first has experts, too; their result is added at the end of the second. Some experts
 * have no weights: they return their input. A GGUF counts all layers.
 */
#include "model/families/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { STEP = 2 }; /* layers with the same number in a folder */

#define NAMES(half)                                                                                \
    DECODER_ENDS,                                                                                  \
        .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.post_attention_layernorm." half},         \
        .gate = {"blk.%d.ffn_gate", "model.layers.%d.mlps." half ".gate_proj"},                    \
        .up = {"blk.%d.ffn_up", "model.layers.%d.mlps." half ".up_proj"},                          \
        .down = {"blk.%d.ffn_down", "model.layers.%d.mlps." half ".down_proj"}, EXPERTS

#define EXPERTS                                                                                    \
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.mlp.router.classifier"},                    \
    .choice_bias = {"=blk.%d.exp_probs_b.bias",                                                    \
                    "=model.layers.%d.mlp.router.e_score_correction_bias"},                        \
    .gate_exp = {"blk.%d.ffn_gate_exps", "model.layers.%d.mlp.experts.%d.gate_proj"},              \
    .up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.mlp.experts.%d.up_proj"},                    \
    .down_exp = {"blk.%d.ffn_down_exps", "model.layers.%d.mlp.experts.%d.down_proj"}

#define LATENT(half)                                                                               \
    .norm = {"blk.%d.attn_norm", "model.layers.%d.input_layernorm." half},                         \
    LATENT_MIXER("model.layers.%d.self_attn." half)

static const struct decoder_names names[STEP] = {{NAMES("0")}, {NAMES("1")}};
static const struct latent_names latents[STEP] = {{LATENT("0")}, {LATENT("1")}};
static const struct decoder decoders[STEP] = {
    {.names = &names[0], .latent = true, .layers_key = "num_layers"},
    {.names = &names[1], .latent = true}};

static bool read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int others = 0;
    if (!latent_read_gguf(in) ||
        !reader_gguf_int(in, "expert_zero_count", 0, 4096, false, &c->n_same) ||
        !reader_gguf_int(in, "ngram_neighbor_count", 0, 1 << 20, false, &others))
        return false;
    if (others)
        return error_set(in->err,
                         "%s: %s.ngram_neighbor_count: embeddings of n-grams are not supported",
                         in->f->path, c->arch_name);
    for (int i = 0; i < c->n_layers; i++)
        if (c->is_moe[i] != (i % STEP == 0) || c->n_layers % STEP)
            return error_set(in->err, "%s: layer %d: experts are in every second layer of %s",
                             in->f->path, i, c->arch_name);
    return true;
}

/* Settings that published models do not change. */
static bool check_settings(const struct meta_reader *in)
{
    static const struct {
        const char *key;
        bool known;
    } flags[] = {{"mla_scale_q_lora", true}, {"mla_scale_kv_lora", true}, {"router_bias", false}};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        bool set = flags[i].known;
        if (!reader_bool(in, flags[i].key, &set))
            return false;
        if (set != flags[i].known)
            return error_set(in->err, "%s: config.json: %s: %s is not supported", in->f->path,
                             flags[i].key, set ? "true" : "false");
    }
    const char *type = json_string_value(reader_get(in->hf, "zero_expert_type", NULL));
    if (type && strcmp(type, "identity") != 0)
        return error_set(
            in->err, "%s: config.json: zero_expert_type \"%.40s\" is not supported (identity is)",
            in->f->path, type);
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    double scale = 1;
    if (c->n_layers > CONFIG_MAX_LAYERS / STEP)
        return error_set(in->err, "%s: %d layers of two halves are too many", in->f->path,
                         c->n_layers);
    c->n_layers *= STEP;
    for (int i = 0; i < c->n_layers; i += STEP)
        c->is_moe[i] = true;
    if (!reader_int(in, "q_lora_rank", NULL, 1, 1 << 14, true, &c->q_rank) ||
        !reader_int(in, "kv_lora_rank", NULL, 1, 1 << 14, true, &c->kv_rank) ||
        !reader_int(in, "qk_nope_head_dim", NULL, 1, 1 << 12, true, &c->nope_dim) ||
        !reader_int(in, "qk_rope_head_dim", NULL, 2, 1 << 12, true, &c->rope_dim) ||
        !reader_int(in, "v_head_dim", NULL, 1, 1 << 12, true, &c->v_dim) ||
        !reader_int(in, "ffn_hidden_size", NULL, 1, 1 << 24, true, &c->n_ff) ||
        !reader_int(in, "expert_ffn_hidden_size", NULL, 1, 1 << 24, true, &c->n_ff_exp) ||
        !reader_int(in, "n_routed_experts", NULL, 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "zero_expert_num", NULL, 0, 4096, false, &c->n_same) ||
        !reader_int(in, "moe_topk", NULL, 1, CONFIG_MAX_EXPERTS_USED, true, &c->n_expert_used) ||
        !reader_number(in, in->hf, "routed_scaling_factor", 0, 1e6, false, &scale))
        return false;
    c->expert_scale = (float)scale;
    return check_settings(in);
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    c->attn_mscale = 1;
    if (!decoder_read(in, &decoders[0]) || !(in->f->is_gguf ? read_gguf(in) : read_hf(in)))
        return false;
    if (c->rope.kind != ROPE_PLAIN)
        return error_set(in->err, "%s: scaling of RoPE is not supported in %s", in->f->path,
                         c->arch_name);
    if (!c->q_rank)
        return error_set(in->err, "%s: %s.attention.q_lora_rank: missing", in->f->path,
                         c->arch_name);
    c->q_latent_scale = sqrtf((float)c->n_embd / (float)c->q_rank);
    c->kv_latent_scale = sqrtf((float)c->n_embd / (float)c->kv_rank);
    return latent_check(in);
}

static void build_mlp(struct net_builder *b, int i, struct mlp *m)
{
    const struct config *c = b->c;
    const struct decoder_names *n = &names[i % STEP];
    decoder_mlp(b, &decoders[i % STEP], i, m);
    if (!c->is_moe[i])
        return;
    m->experts_late = true;
    m->dense.gate_up = build_weight(b, WEIGHT_LINEAR, i, c->n_embd, 1, 2,
                                    (const struct weight_rows[]){{.name = &n->gate, .n = c->n_ff},
                                                                 {.name = &n->up, .n = c->n_ff}});
    m->dense.down = build_matrix(b, WEIGHT_LINEAR, i, &n->down, c->n_ff, c->n_embd);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope *rope = build_rope(b);
    decoder_ends(b, &decoders[0]);
    for (int i = 0; i < c->n_layers; i++) {
        latent_build(b, &latents[i % STEP], i, rope, &b->net->layers[i].mixer);
        build_mlp(b, i, &b->net->layers[i].mlp);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    latent_write(c, w);
    if (c->n_same)
        gguf_set_u32(w, "longcat-flash.expert_zero_count", (uint32_t)c->n_same);
}

/* The block that drafts tokens, which transformers does not know either. */
static bool spare(const struct config *c, const char *tensor)
{
    (void)c;
    return !strncmp(tensor, "model.mtp.", 10);
}

const struct model_family family_longcat_flash = {
    .name = "longcat-flash",
    .hf = "longcat_flash",
    .hf_class = "LongcatFlashForCausalLM",
    .folder_step = STEP,
    .read = read,
    .build = build,
    .write = write,
    .spare = spare,
};
