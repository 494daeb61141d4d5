/*
 * Falcon-H1: attention and a state-space model of Mamba-2 side by side in every layer, on one norm: two layers of the
 * network, the second in parallel with the first. A folder has factors (muP) on many products; most are part of norms,
 * scores and blocks here. A GGUF has them in its weights.
 */
#include "model/families/family.h"

#include <stdio.h>

enum { PARTS = 2 }; /* attention; the state-space model and the mlp */

static const struct decoder_names names = {
    .emb = {"token_embd", "model.embed_tokens"},
    .norm = {"output_norm", "model.final_layernorm"},
    .head = {"output", "lm_head"},
    DECODER_QKV,
    .gate = {"blk.%d.ffn_gate", "model.layers.%d.feed_forward.gate_proj"},
    .up = {"blk.%d.ffn_up", "model.layers.%d.feed_forward.up_proj"},
    .down = {"blk.%d.ffn_down", "model.layers.%d.feed_forward.down_proj"}};
static const struct tensor_name attn_norm = {"blk.%d.attn_norm", "model.layers.%d.input_layernorm"},
                                ffn_norm = {"=blk.%d.ffn_norm",
                                            "=model.layers.%d.pre_ff_layernorm.weight"};
static const struct ssm_names mamba = {SSM_NAMES("model.layers.%d.mamba")};
static const struct decoder decoder = {.names = &names};

static bool read_factors(const struct meta_reader *in)
{
    struct mup_factors *f = &in->c->mup;
    double embed = 1, head = 1;
    const struct {
        const char *key;
        float *to;
    } one[] = {{"attention_in_multiplier", &f->attn_in},
               {"attention_out_multiplier", &f->attn_out},
               {"key_multiplier", &f->key},
               {"ssm_in_multiplier", &f->ssm_in},
               {"ssm_out_multiplier", &f->ssm_out}};
    for (size_t i = 0; i < sizeof one / sizeof *one; i++) {
        double v = 1;
        if (!reader_number(in, in->hf, one[i].key, 1e-9, 1e9, false, &v))
            return false;
        *one[i].to = (float)v;
    }
    if (!reader_number(in, in->hf, "embedding_multiplier", 1e-9, 1e9, false, &embed) ||
        !reader_number(in, in->hf, "lm_head_multiplier", 1e-9, 1e9, false, &head))
        return false;
    in->c->embed_scale = (float)embed;
    in->c->head_scale = (float)head;
    const struct {
        const char *key;
        float *to;
        size_t n;
    } list[] = {{"mlp_multipliers", f->mlp, 2}, {"ssm_multipliers", f->ssm, SSM_PARTS}};
    for (size_t i = 0; i < 2; i++) {
        const json_t *all = reader_get(in->hf, list[i].key, NULL);
        if (all && json_array_size(all) != list[i].n)
            return error_set(in->err, "%s: config.json: %s: expected %zu numbers", in->f->path,
                             list[i].key, list[i].n);
        for (size_t k = 0; k < list[i].n; k++) {
            const json_t *v = all ? json_array_get(all, k) : NULL;
            double x = v ? json_number_value(v) : 1; /* 0 if it is no number */
            if (!reader_range(in, list[i].key, x, 1e-9, 1e9))
                return false;
            list[i].to[k] = (float)x;
        }
    }
    return true;
}

/* Published models have no biases; with factors they would have to be scaled, too. */
static bool check_biases(const struct meta_reader *in)
{
    static const char *const keys[] = {"attention_bias", "mlp_bias", "projectors_bias",
                                       "mamba_proj_bias"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        bool set = false;
        if (!reader_bool(in, keys[i], &set))
            return false;
        if (set)
            return error_set(in->err, "%s: config.json: %s: not supported in falcon_h1",
                             in->f->path, keys[i]);
    }
    return true;
}

/* A tied embedding cannot have both factors, so our GGUF names them. */
static bool read_ends(const struct meta_reader *in)
{
    double embed = 1, head = 1;
    if (!reader_gguf_float(in, "embedding_scale", 1e-9, 1e9, false, &embed) ||
        !reader_gguf_float(in, "logit_scale", 1e-9, 1e9, false, &head))
        return false;
    in->c->embed_scale = (float)embed;
    in->c->head_scale = (float)head;
    return true;
}

static bool read(const struct meta_reader *in)
{
    static const struct ssm_keys keys = {"mamba_n_heads", "mamba_d_head", "mamba_d_state",
                                         "mamba_n_groups", "mamba_d_conv"};
    struct config *c = in->c;
    c->mup = (struct mup_factors){.attn_in = 1, .attn_out = 1, .key = 1, .ssm_in = 1, .ssm_out = 1};
    c->mup.mlp[0] = c->mup.mlp[1] = 1;
    for (int i = 0; i < SSM_PARTS; i++)
        c->mup.ssm[i] = 1;
    if (!decoder_read(in, &decoder) || !ssm_read(in, &keys))
        return false;
    if (c->n_layers > CONFIG_MAX_LAYERS / PARTS)
        return error_set(in->err, "%s: %d layers of two parts are too many", in->f->path,
                         c->n_layers);
    if (in->f->is_gguf)
        return read_ends(in) && reader_gguf_bool(in, "ssm.norm_before_gate", &c->ssm_norm_first);
    return reader_bool(in, "mamba_norm_before_gate", &c->ssm_norm_first) && read_factors(in) &&
           check_biases(in);
}

/* For `convert`: all rows of one part of a weight are multiplied by the factor. */
static void fold(struct net_builder *b, const struct weight *w, int part, float times)
{
    for (int i = b->n_specs - 1; i >= 0; i--)
        if (b->specs[i].w == w && times != 1) {
            struct weight_rows *rows = &b->specs[i].rows[part];
            rows->fold[0] = (struct row_fold){rows->n, times};
        }
}

static void build_attention(struct net_builder *b, int i, const struct rope *rope, struct mixer *m)
{
    const struct mup_factors *f = &b->c->mup;
    decoder_mixer(b, &decoder, i, rope, m);
    m->block.in =
        build_rms_adjusted(b, i, &attn_norm, b->c->n_embd, (struct adjust){.times = f->attn_in});
    m->attention.scale *= f->key;
    m->block.scale = f->attn_out;
    fold(b, m->attention.wqkv, 0, f->attn_in);
    fold(b, m->attention.wqkv, 1, f->attn_in * f->key);
    fold(b, m->attention.wqkv, 2, f->attn_in);
    fold(b, m->attention.wo, 0, f->attn_out);
}

static void build_ssm(struct net_builder *b, int i, struct mixer *m)
{
    const struct mup_factors *f = &b->c->mup;
    *m = (struct mixer){.block = {.parallel = true, .scale = f->ssm_out}};
    m->block.in =
        build_rms_adjusted(b, i, &attn_norm, b->c->n_embd, (struct adjust){.times = f->ssm_in});
    b->specs[b->n_specs - 1].copy = true;
    ssm_build(b, &mamba, i, m);
    struct ssm *s = &m->ssm;
    s->n_norms = s->n_groups;
    s->norm_first = b->c->ssm_norm_first;
    bool scaled = false;
    for (int k = 0; k < SSM_PARTS; k++)
        scaled |= f->ssm[k] != 1;
    for (int k = 0; scaled && k < SSM_PARTS; k++)
        s->in_scale[k] = f->ssm[k];
    fold(b, s->w_out, 0, f->ssm_out);
    for (int k = b->n_specs - 1; k >= 0; k--)
        for (int p = 0; b->specs[k].w == s->w_in && (scaled || f->ssm_in != 1) && p < SSM_PARTS;
             p++)
            b->specs[k].rows[0].fold[p] = (struct row_fold){ssm_part(s, p), f->ssm_in * f->ssm[p]};
}

/* A factor on the gate's product alone would need an activation of its own: the norm's gain has it, which scales gate
 * and up; the block takes it from the result. */
static void build_mlp(struct net_builder *b, int i, struct mlp *m)
{
    const struct mup_factors *f = &b->c->mup;
    decoder_mlp(b, &decoder, i, m);
    m->block.in =
        build_rms_adjusted(b, i, &ffn_norm, b->c->n_embd, (struct adjust){.times = f->mlp[0]});
    m->block.scale = f->mlp[1] / f->mlp[0];
    m->block.scale = m->block.scale == 1 ? 0 : m->block.scale;
    fold(b, m->dense.gate_up, 0, f->mlp[0]);
    fold(b, m->dense.down, 0, f->mlp[1]);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope *rope = build_rope(b);
    decoder_ends(b, &decoder);
    if (b->net->head.w && !c->tied) {
        fold(b, b->net->embed.tokens, 0, c->embed_scale);
        fold(b, b->net->head.w, 0, c->head_scale);
    }
    for (int i = 0; i < c->n_layers && !b->failed; i++) {
        struct layer *l = &b->net->layers[PARTS * i];
        b->part = 0;
        build_attention(b, i, rope, &l[0].mixer);
        b->part = 1;
        build_ssm(b, i, &l[1].mixer);
        build_mlp(b, i, &l[1].mlp);
    }
    b->part = 0;
}

static void write(const struct config *c, struct gguf_writer *w)
{
    ssm_write(c, w);
    if (c->tied) {
        gguf_set_f32(w, "falcon-h1.embedding_scale", c->embed_scale);
        gguf_set_f32(w, "falcon-h1.logit_scale", c->head_scale);
    }
    if (c->ssm_norm_first)
        gguf_set_bool(w, "falcon-h1.ssm.norm_before_gate", true);
}

const struct model_family family_falcon_h1 = {
    .name = "falcon-h1",
    .hf = "falcon_h1",
    .hf_class = "FalconH1ForCausalLM",
    .parts = PARTS,
    .read = read,
    .build = build,
    .write = write,
};
