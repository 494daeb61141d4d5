/*
 * Qwen3-Next and Qwen3.5 (3.6, 3.8), dense and MoE: a gated delta net in most layers, gated
 * attention with partial RoPE in the others, and a block that drafts tokens. Text models only:
 * vision towers are ignored. Qwen3-Next groups the rows of the delta net's projections by key head.
 * Qwen3.5's GGUF files order the value heads differently from its folders (tiled).
 */
#include "model/families/family.h"

#include <stdio.h>
#include <string.h>

#define HYBRID_NAMES                                                                               \
    .ffn_norm = {"blk.%d.post_attention_norm", "model.layers.%d.post_attention_layernorm"},        \
    .gate = {"blk.%d.ffn_gate", "model.layers.%d.mlp.gate_proj"},                                  \
    .up = {"blk.%d.ffn_up", "model.layers.%d.mlp.up_proj"},                                        \
    .down = {"blk.%d.ffn_down", "model.layers.%d.mlp.down_proj"},                                  \
    .gate_shared = {"blk.%d.ffn_gate_shexp", "model.layers.%d.mlp.shared_expert.gate_proj"},       \
    .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.mlp.shared_expert.up_proj"},             \
    .down_shared = {"blk.%d.ffn_down_shexp", "model.layers.%d.mlp.shared_expert.down_proj"},       \
    .shared_gate = {"blk.%d.ffn_gate_inp_shexp", "model.layers.%d.mlp.shared_expert_gate"}

static const struct decoder_names names = {DECODER_ENDS, DECODER_ATTENTION, DECODER_EXPERTS,
                                           HYBRID_NAMES};

static const struct tensor_name qkvz = {"blk.%d.ssm_in",
                                        "model.layers.%d.linear_attn.in_proj_qkvz"},
                                ba = {"blk.%d.ssm_ba", "model.layers.%d.linear_attn.in_proj_ba"},
                                qkv = {"blk.%d.attn_qkv",
                                       "model.layers.%d.linear_attn.in_proj_qkv"},
                                z = {"blk.%d.attn_gate", "model.layers.%d.linear_attn.in_proj_z"},
                                beta = {"blk.%d.ssm_beta", "model.layers.%d.linear_attn.in_proj_b"},
                                alpha = {"blk.%d.ssm_alpha",
                                         "model.layers.%d.linear_attn.in_proj_a"},
                                conv = {"blk.%d.ssm_conv1d", "model.layers.%d.linear_attn.conv1d"},
                                decay = {"=blk.%d.ssm_a", "=model.layers.%d.linear_attn.A_log"},
                                dt = {"=blk.%d.ssm_dt.bias",
                                      "=model.layers.%d.linear_attn.dt_bias"},
                                o_norm = {"blk.%d.ssm_norm", "model.layers.%d.linear_attn.norm"},
                                out = {"blk.%d.ssm_out", "model.layers.%d.linear_attn.out_proj"};

static const struct mtp_names draft = {
    .fc = {"blk.%d.nextn.eh_proj", "mtp.fc"},
    .embed_norm = {"blk.%d.nextn.enorm", "mtp.pre_fc_norm_embedding"},
    .hidden_norm = {"blk.%d.nextn.hnorm", "mtp.pre_fc_norm_hidden"},
    .norm = {"blk.%d.nextn.shared_head_norm", "mtp.norm"}};

static const struct decoder dense = {.names = &names, .qk_norm = true, .norm_add = 1};
static const struct decoder sparse = {
    .names = &names, .qk_norm = true, .norm_add = 1, .experts = true};

static bool read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int inner = 0, extra = 0, interval = 4;
    if (!reader_gguf_int(in, "nextn_predict_layers", 0, c->n_layers - 1, false, &extra) ||
        !reader_gguf_int(in, "ssm.conv_kernel", 1, 64, true, &c->conv_len) ||
        !reader_gguf_int(in, "ssm.state_size", 1, 1 << 12, true, &c->linear_k_dim) ||
        !reader_gguf_int(in, "ssm.group_count", 1, 1 << 12, true, &c->linear_k_heads) ||
        !reader_gguf_int(in, "ssm.time_step_rank", 1, 1 << 12, true, &c->linear_v_heads) ||
        !reader_gguf_int(in, "ssm.inner_size", 1, 1 << 24, true, &inner) ||
        !reader_gguf_int(in, "full_attention_interval", 1, 1 << 20, false, &interval) ||
        !rope_read_gguf_sections(in, true))
        return false;
    if (inner % c->linear_v_heads)
        return error_set(in->err, "%s: %s.ssm.inner_size: %d does not divide by %d heads",
                         in->f->path, c->arch_name, inner, c->linear_v_heads);
    c->linear_v_dim = inner / c->linear_v_heads;
    c->n_layers -= extra;
    for (int i = 0; i < c->n_layers; i++)
        c->is_linear[i] = (i + 1) % interval != 0;
    mtp_read(in, &draft, extra);
    if (!c->n_ff_shared)
        c->n_ff_shared = c->n_ff;
    return true;
}

static bool read_layer_types(const struct meta_reader *in)
{
    struct config *c = in->c;
    int interval = 4;
    if (!reader_int(in, "full_attention_interval", NULL, 1, 1 << 20, false, &interval))
        return false;
    const json_t *types = reader_get(in->hf, "layer_types", NULL); /* length checked: n_layers */
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        c->is_linear[i] = type ? !strcmp(type, "linear_attention") : (i + 1) % interval != 0;
        if (type && !c->is_linear[i] && strcmp(type, "full_attention") != 0)
            return error_set(in->err,
                             "%s: config.json: layer_types[%d]: \"%.40s\" is not supported "
                             "(linear_attention and full_attention are)",
                             in->f->path, i, type);
    }
    return true;
}

static bool read_hf(const struct meta_reader *in, const struct decoder *d)
{
    struct config *c = in->c;
    bool gated = true;
    c->hf_mtp = "mtp.";
    return reader_int(in, "linear_conv_kernel_dim", NULL, 1, 64, true, &c->conv_len) &&
           reader_int(in, "linear_key_head_dim", NULL, 1, 1 << 12, true, &c->linear_k_dim) &&
           reader_int(in, "linear_value_head_dim", NULL, 1, 1 << 12, true, &c->linear_v_dim) &&
           reader_int(in, "linear_num_key_heads", NULL, 1, 1 << 12, true, &c->linear_k_heads) &&
           reader_int(in, "linear_num_value_heads", NULL, 1, 1 << 12, true, &c->linear_v_heads) &&
           reader_int(in, "shared_expert_intermediate_size", NULL, 0, 1 << 24, d->experts,
                      &c->n_ff_shared) &&
           reader_bool(in, "attn_output_gate", &gated) &&
           (gated || error_set(in->err, "%s: config.json: attn_output_gate: false is not supported",
                               in->f->path)) &&
           read_layer_types(in);
}

static bool read(const struct meta_reader *in, const struct decoder *d)
{
    struct config *c = in->c;
    if (!decoder_read(in, d) || !(in->f->is_gguf ? read_gguf(in) : read_hf(in, d)))
        return false;
    if (!in->f->is_gguf) /* not always in config.json */
        mtp_read(in, &draft, 1);
    if (c->linear_v_heads % c->linear_k_heads)
        return error_set(in->err, "%s: %d value heads do not divide by %d key heads", in->f->path,
                         c->linear_v_heads, c->linear_k_heads);
    if ((int64_t)c->linear_v_heads * c->linear_v_dim * c->linear_k_dim > 1 << 26)
        return error_set(in->err, "%s: a state of %d heads of %d x %d is too large", in->f->path,
                         c->linear_v_heads, c->linear_k_dim, c->linear_v_dim);
    return true;
}

/* Qwen3-Next's projections are grouped by key head: q, k, v and z of its value heads; and b, then
 * a. GGUF files split the first one, except older ones. */
static void by_head(struct net_builder *b, int i, struct delta_net *d)
{
    int E = b->c->n_embd, Hk = d->n_k_heads, Dk = d->k_dim, each = d->n_v_heads / Hk;
    int values = each * d->v_dim, step = 2 * Dk + 2 * values;
    struct weight_rows part = {
        .name = &qkvz, .step = step, .tensor_rows = Hk * step, .also_gguf = true};
    struct weight_rows r[3] = {part, part, part}, two[2];
    int runs[3] = {Dk, Dk, values}, at = 0;
    for (int k = 0; k < 3; at += runs[k++]) {
        r[k].first = at;
        r[k].run_length = runs[k];
        r[k].n = Hk * runs[k];
    }
    if (b->f->is_gguf && !build_has(b, &qkvz, i)) {
        d->wqkv = build_matrix(b, WEIGHT_LINEAR, i, &qkv, E, Hk * (2 * Dk + values));
        d->wz = build_matrix(b, WEIGHT_LINEAR, i, &z, E, Hk * values);
    } else {
        d->wqkv = build_weight(b, WEIGHT_LINEAR, i, E, 1, 3, r);
        b->specs[b->n_specs - 1].as = &qkv;
        part.first = at;
        part.run_length = values;
        part.n = Hk * values;
        d->wz = build_weight(b, WEIGHT_LINEAR, i, E, 1, 1, &part);
        b->specs[b->n_specs - 1].as = &z;
    }
    for (int k = 0; k < 2; k++)
        two[k] = (struct weight_rows){.name = &ba,
                                      .n = d->n_v_heads,
                                      .first = k * each,
                                      .step = 2 * each,
                                      .run_length = each,
                                      .tensor_rows = 2 * d->n_v_heads,
                                      .also_gguf = true};
    d->wba = build_weight(b, WEIGHT_LINEAR, i, E, 1, 2, two);
    b->specs[b->n_specs - 1].as = &ba;
    b->specs[b->n_specs - 1].as_is = true;
}

/* Marks the last spec's rows, columns or entries after the first `plain` as tiled by value heads of
 * `len` in a GGUF of Qwen3.5. */
static void tile(struct net_builder *b, bool next, int plain, int len, bool columns)
{
    const struct config *c = b->c;
    struct tensor_spec *spec = &b->specs[b->n_specs - 1];
    for (int k = 0; !next && !b->failed && k < spec->n_rows; k++)
        spec->rows[k].tiles = (struct head_tiles){.plain = plain,
                                                  .groups = c->linear_k_heads,
                                                  .each = c->linear_v_heads / c->linear_k_heads,
                                                  .len = len,
                                                  .columns = columns};
}

static void build_net(struct net_builder *b, bool next, int i, struct mixer *m)
{
    const struct config *c = b->c;
    int E = c->n_embd, Hv = c->linear_v_heads, Dv = c->linear_v_dim, values = Hv * Dv;
    int width = 2 * c->linear_k_heads * c->linear_k_dim + values;
    *m = (struct mixer){.kind = MIXER_DELTA_NET};
    m->block.in = build_rms_adjusted(b, i, &names.attn_norm, E, (struct adjust){.add = 1});
    m->delta_net = (struct delta_net){.n_k_heads = c->linear_k_heads,
                                      .n_v_heads = Hv,
                                      .k_dim = c->linear_k_dim,
                                      .v_dim = c->linear_v_dim,
                                      .conv_len = c->conv_len,
                                      .tiled = !next && b->f->is_gguf};
    struct delta_net *d = &m->delta_net;
    if (next) {
        by_head(b, i, d);
    } else {
        d->wqkv = build_matrix(b, WEIGHT_LINEAR, i, &qkv, E, width);
        tile(b, next, width - values, Dv, false);
        d->wz = build_matrix(b, WEIGHT_LINEAR, i, &z, E, values);
        tile(b, next, 0, Dv, false);
        d->wba = build_weight(
            b, WEIGHT_LINEAR, i, E, 1, 2,
            (const struct weight_rows[]){{.name = &beta, .n = Hv}, {.name = &alpha, .n = Hv}});
        tile(b, next, 0, 1, false);
    }
    d->conv = build_table(b, i, &conv, width, c->conv_len);
    tile(b, next, width - values, Dv, false);
    d->decay = build_vector(b, i, &decay, Hv, (struct adjust){.decay = true});
    tile(b, next, 0, 1, false);
    d->dt_bias = build_vector(b, i, &dt, Hv, (struct adjust){0});
    tile(b, next, 0, 1, false);
    d->norm = build_rms(b, i, &o_norm, Dv);
    d->wo = build_matrix(b, WEIGHT_LINEAR, i, &out, values, E);
    tile(b, next, 0, Dv, true);
}

static struct tensor_spec *want_of(struct net_builder *b, const struct weight *w)
{
    int i = b->n_specs - 1;
    while (b->specs[i].w != w)
        i--;
    return &b->specs[i];
}

/* Attention whose q projection includes the gates. */
static void build_gated(struct net_builder *b, const struct decoder *d, int i,
                        const struct rope *rope, struct mixer *m)
{
    const struct config *c = b->c;
    int n_q = c->n_heads * c->head_dim;
    decoder_mixer(b, d, i, rope, m);
    m->attention.gated = true;
    struct tensor_spec *spec = want_of(b, m->attention.wqkv);
    spec->rows[0].n += n_q;
    spec->w->n_out += n_q;
}

static void build(struct net_builder *b, const struct decoder *d, bool next)
{
    const struct config *c = b->c;
    const struct rope *rope = build_rope(b);
    decoder_ends(b, d);
    for (int i = 0; i < c->n_layers + c->n_mtp; i++) {
        struct layer *l = &b->net->layers[i];
        if (c->is_linear[i])
            build_net(b, next, i, &l->mixer);
        else
            build_gated(b, d, i, rope, &l->mixer);
        decoder_mlp(b, d, i, &l->mlp);
    }
    if (c->n_mtp)
        mtp_build(b, &draft, 1);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    const char *arch = c->family->name;
    char key[96];
    int interval = 1, half = c->n_rot / 2;
    while (interval < c->n_layers && c->is_linear[interval - 1])
        interval++;
    const struct {
        const char *key;
        int v;
    } numbers[] = {
        {"ssm.conv_kernel", c->conv_len},
        {"ssm.state_size", c->linear_k_dim},
        {"ssm.group_count", c->linear_k_heads},
        {"ssm.time_step_rank", c->linear_v_heads},
        {"ssm.inner_size", c->linear_v_heads * c->linear_v_dim},
        {"full_attention_interval", interval},
        {"expert_shared_feed_forward_length", c->n_ff_shared},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, numbers[i].key);
        if (numbers[i].v)
            gguf_set_u32(w, key, (uint32_t)numbers[i].v);
    }
    if (c->family == &family_qwen3next)
        return;
    /* M-RoPE sections (time, height, width); readers require the key */
    const int *own = c->rope.sections;
    int32_t sections[4] = {(half + 2) / 3, (half + 1) / 3, half / 3, 0};
    for (int i = 0; own[0] && i < 3; i++)
        sections[i] = own[i];
    snprintf(key, sizeof key, "%s.rope.dimension_sections", arch);
    gguf_set_array(w, key, META_I32, sections, 4);
}

static bool read_next(const struct meta_reader *in)
{
    return read(in, &sparse);
}

static void build_next(struct net_builder *b)
{
    build(b, &sparse, true);
}

const struct model_family family_qwen3next = {
    .name = "qwen3next",
    .hf = "qwen3_next",
    .hf_class = "Qwen3NextForCausalLM",
    .read = read_next,
    .build = build_next,
    .write = write,
};

static bool read_dense(const struct meta_reader *in)
{
    return read(in, &dense);
}

static void build_dense(struct net_builder *b)
{
    build(b, &dense, false);
}

const struct model_family family_qwen35 = {
    .name = "qwen35",
    .hf = "qwen3_5",
    .hf_class = "Qwen3_5ForConditionalGeneration",
    .read = read_dense,
    .build = build_dense,
    .write = write,
};

static bool read_sparse(const struct meta_reader *in)
{
    if (!read(in, &sparse))
        return false;
    in->c->norm_topk = true; /* always */
    return true;
}

static void build_sparse(struct net_builder *b)
{
    build(b, &sparse, false);
}

const struct model_family family_qwen35moe = {
    .name = "qwen35moe",
    .hf = "qwen3_5_moe",
    .hf_class = "Qwen3_5MoeForConditionalGeneration",
    .read = read_sparse,
    .build = build_sparse,
    .write = write,
};
