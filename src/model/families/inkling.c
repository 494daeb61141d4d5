/*
 * Inkling: attention without RoPE. Scores have a bias by distance that each row computes, keys, values and the results of
 * blocks go through short convolutions, and full layers scale scores with the logarithm of the position. Windows have heads
 * of their own. Shared experts are scored by the router, too: every row uses them, and all weights are normed together.
 * A folder has the names of the release or those of transformers. The text model only, without the blocks that draft tokens.
 */
#include "model/families/family.h"

#include <stdio.h>
#include <string.h>

struct inkling_names {
    struct decoder_names decoder;
    struct tensor_name embed_norm, r, rel, k_conv, v_conv, attn_conv, ffn_conv;
    struct tensor_name ffn_scale, router_scale;
    bool fused; /* a folder's gate and up alternate in one tensor, also those of shared experts */
};

#define L "model.layers.%d."
#define GGUF_EXPERTS(gate_up_, down_, shared_gate_, shared_up_, shared_down_)                      \
    .gate_exp = {"blk.%d.ffn_gate_exps", gate_up_}, .up_exp = {"blk.%d.ffn_up_exps", gate_up_},    \
    .down_exp = {"blk.%d.ffn_down_exps", down_},                                                   \
    .gate_shared = {"blk.%d.ffn_gate_shexp", shared_gate_},                                        \
    .up_shared = {"blk.%d.ffn_up_shexp", shared_up_},                                              \
    .down_shared = {"blk.%d.ffn_down_shexp", shared_down_}

static const struct inkling_names
    released = {.decoder = {.emb = {"token_embd", "model.embed"},
                            .norm = {"output_norm", "model.norm"},
                            .head = {"output", "lm_head"},
                            .attn_norm = {"blk.%d.attn_norm", L "attn_norm"},
                            .q = {"blk.%d.attn_q", L "attn.wq_du"},
                            .k = {"blk.%d.attn_k", L "attn.wk_dv"},
                            .v = {"blk.%d.attn_v", L "attn.wv_dv"},
                            .o = {"blk.%d.attn_output", L "attn.wo_ud"},
                            .q_norm = {"blk.%d.attn_q_norm", L "attn.q_norm"},
                            .k_norm = {"blk.%d.attn_k_norm", L "attn.k_norm"},
                            .ffn_norm = {"blk.%d.ffn_norm", L "mlp_norm"},
                            .gate = {"blk.%d.ffn_gate", L "mlp.w13_dn"},
                            .up = {"blk.%d.ffn_up", L "mlp.w13_dn"},
                            .down = {"blk.%d.ffn_down", L "mlp.w2_md"},
                            .router = {"blk.%d.ffn_gate_inp", "=" L "mlp.gate.weight"},
                            .choice_bias = {"=blk.%d.exp_probs_b.bias", "=" L "mlp.gate.bias"},
                            GGUF_EXPERTS("=" L "mlp.experts.w13_weight",
                                         "=" L "mlp.experts.w2_weight",
                                         "=" L "mlp.shared_experts.shared_w13_weight",
                                         "=" L "mlp.shared_experts.shared_w13_weight",
                                         "=" L "mlp.shared_experts.shared_w2_weight")},
                .embed_norm = {"token_embd_norm", "model.embed_norm"},
                .r = {"blk.%d.attn_rel", L "attn.wr_du"},
                .rel = {"blk.%d.attn_rel_table", "=" L "attn.rel_logits_proj.proj"},
                .k_conv = {"blk.%d.attn_k_conv1d", L "attn.k_sconv"},
                .v_conv = {"blk.%d.attn_v_conv1d", L "attn.v_sconv"},
                .attn_conv = {"blk.%d.attn_out_conv1d", L "attn_sconv"},
                .ffn_conv = {"blk.%d.ffn_out_conv1d", L "mlp_sconv"},
                .ffn_scale = {"blk.%d.ffn_scale", "=" L "mlp.global_scale"},
                .router_scale = {"blk.%d.ffn_gate_inp_scale", "=" L "mlp.gate.global_scale"},
                .fused = true},
    transformers = {
        .decoder = {DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP,
                    .router = {"blk.%d.ffn_gate_inp", L "mlp.gate"},
                    .choice_bias = {"=blk.%d.exp_probs_b.bias",
                                    "=" L "mlp.gate.e_score_correction_bias"},
                    GGUF_EXPERTS("=" L "mlp.experts.gate_up_proj", "=" L "mlp.experts.down_proj",
                                 "=" L "mlp.shared_experts.gate_proj",
                                 "=" L "mlp.shared_experts.up_proj",
                                 "=" L "mlp.shared_experts.down_proj")},
        .embed_norm = {"token_embd_norm", "model.embed_norm"},
        .r = {"blk.%d.attn_rel", L "self_attn.r_proj"},
        .rel = {"blk.%d.attn_rel_table", "=" L "self_attn.rel_logits_proj.proj"},
        .k_conv = {"blk.%d.attn_k_conv1d", L "self_attn.k_sconv.conv1d"},
        .v_conv = {"blk.%d.attn_v_conv1d", L "self_attn.v_sconv.conv1d"},
        .attn_conv = {"blk.%d.attn_out_conv1d", L "attn_sconv.conv1d"},
        .ffn_conv = {"blk.%d.ffn_out_conv1d", L "mlp_sconv.conv1d"},
        .ffn_scale = {"blk.%d.ffn_scale", "=" L "mlp.global_scale"},
        .router_scale = {"blk.%d.ffn_gate_inp_scale", "=" L "mlp.gate.global_scale"}};

static const struct decoder released_decoder = {.names = &released.decoder, .qk_norm = true},
                            transformers_decoder = {.names = &transformers.decoder,
                                                    .qk_norm = true};

/* What the release can turn off, and its code then does in another way. */
static bool check_settings(const struct meta_reader *in)
{
    static const struct {
        const char *key;
        bool known;
    } flags[] = {{"shared_expert_sink", true},
                 {"use_embed_norm", true},
                 {"use_sconv", true},
                 {"use_gate_bias", true},
                 {"norm_after_topk", true},
                 {"use_global_scale", true},
                 {"q_bias", false},
                 {"o_bias", false},
                 {"tie_word_embeddings", false}};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        bool set = flags[i].known;
        if (!reader_bool(in, flags[i].key, &set))
            return false;
        if (set != flags[i].known)
            return error_set(in->err, "%s: config.json: %s: %s is not supported", in->f->path,
                             flags[i].key, set ? "true" : "false");
    }
    const char *gate = json_string_value(reader_get(in->hf, "gate_activation", NULL));
    return !gate || !strcmp(gate, "sigmoid") ||
           error_set(in->err,
                     "%s: config.json: gate_activation \"%.40s\" is not supported (sigmoid is)",
                     in->f->path, gate);
}

/* Layers with a window: a list of kinds, or of layers, or all but every sixth. */
static bool read_windows(const struct meta_reader *in, int window)
{
    struct config *c = in->c;
    const json_t *types = reader_get(in->hf, "layer_types", NULL);
    const json_t *local = reader_get(in->hf, "local_layer_ids", NULL);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        bool slides = !local && (i + 1) % 6 != 0;
        for (size_t k = 0; k < json_array_size(local); k++)
            slides |= json_integer_value(json_array_get(local, k)) == i;
        if (types && !type)
            return error_set(in->err, "%s: config.json: layer_types: no entry for layer %d",
                             in->f->path, i);
        if (type && strcmp(type, "hybrid") != 0 && strcmp(type, "hybrid_sliding") != 0)
            return error_set(in->err,
                             "%s: config.json: layer_types[%d]: \"%.40s\" is not supported (hybrid "
                             "and hybrid_sliding are)",
                             in->f->path, i, type);
        if (type)
            slides = strcmp(type, "hybrid_sliding") == 0;
        c->window[i] = slides ? window : 0;
    }
    return true;
}

static bool read_moe_layers(const struct meta_reader *in)
{
    struct config *c = in->c;
    int dense = 0;
    const json_t *types = reader_get(in->hf, "mlp_layer_types", NULL);
    if (!reader_int(in, "dense_mlp_idx", NULL, 0, 1 << 20, false, &dense))
        return false;
    if (types && json_array_size(types) != (size_t)c->n_layers)
        return error_set(in->err, "%s: config.json: mlp_layer_types: %zu entries for %d layers",
                         in->f->path, json_array_size(types), c->n_layers);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        c->is_moe[i] = types ? type && !strcmp(type, "sparse") : i >= dense;
    }
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int window = 512, heads = c->n_heads, kv_heads = c->n_kv_heads, dim = c->head_dim, floor = 0;
    int shared = 0, vocab = c->n_vocab;
    double scale = 1, alpha = 0.1, width = 24;
    c->conv_len = 4;
    if (!check_settings(in) ||
        !reader_int(in, "sliding_window_size", NULL, 1, 1 << 20, false, &window) ||
        !reader_int(in, "swa_num_attention_heads", NULL, 1, 1 << 14, false, &heads) ||
        !reader_int(in, "swa_num_key_value_heads", NULL, 1, 1 << 14, false, &kv_heads) ||
        !reader_int(in, "swa_head_dim", NULL, 1, 1 << 14, false, &dim) ||
        !reader_int(in, "d_rel", NULL, 1, 1 << 12, true, &c->rel_dim) ||
        !reader_int(in, "rel_extent", NULL, 1, 1 << 16, true, &c->rel_len) ||
        !reader_int(in, "conv_kernel_size", "sconv_kernel_size", 2, 64, false, &c->conv_len) ||
        !reader_int(in, "log_scaling_n_floor", NULL, 0, 1 << 30, false, &floor) ||
        !reader_number(in, in->hf, "log_scaling_alpha", 0, 1e3, false, &alpha) ||
        !reader_number(in, in->hf, "logits_mup_width_multiplier", 1e-6, 1e6, false, &width) ||
        !reader_int(in, "dense_intermediate_size", NULL, 1, 1 << 24, false, &c->n_ff) ||
        !reader_int(in, "moe_intermediate_size", "intermediate_size", 1, 1 << 24, true,
                    &c->n_ff_exp) ||
        !reader_int(in, "n_routed_experts", NULL, 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED - 64, true,
                    &c->n_expert_used) ||
        !reader_int(in, "n_shared_experts", NULL, 0, 64, false, &shared) ||
        !reader_number(in, in->hf, "route_scale", 1e-6, 1e6, false, &scale) ||
        !reader_int(in, "unpadded_vocab_size", NULL, 1, c->n_vocab, false, &vocab) ||
        !reader_int(in, "max_position_embeddings", "model_max_length", 1, 1 << 30, false,
                    &c->context) ||
        !read_windows(in, window) || !read_moe_layers(in))
        return false;
    for (int i = 0; i < c->n_layers; i++) {
        c->layer_heads[i] = c->window[i] ? heads : c->n_heads;
        c->layer_kv_heads[i] = c->window[i] ? kv_heads : c->n_kv_heads;
        c->layer_head_dim[i] = c->window[i] ? dim : c->head_dim;
    }
    c->tied = false;
    c->n_vocab = vocab;
    c->expert_scale = (float)scale;
    c->n_ff_shared = shared * c->n_ff_exp;
    c->head_scale = (float)(1 / width);
    c->temp_beta = floor ? (float)alpha : 0;
    c->temp_len = floor;
    return true;
}

static bool read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int dim = c->head_dim;
    double beta = 0, scale = 1;
    if (!reader_gguf_int(in, "attention.key_length_swa", 1, 1 << 14, false, &dim) ||
        !reader_gguf_int(in, "attention.relative_dimension", 1, 1 << 12, true, &c->rel_dim) ||
        !reader_gguf_int(in, "attention.relative_length", 1, 1 << 16, true, &c->rel_len) ||
        !reader_gguf_int(in, "shortconv.l_cache", 2, 64, true, &c->conv_len) ||
        !reader_gguf_float(in, "logit_scale", 1e-6, 1e6, true, &scale) ||
        !reader_gguf_float(in, "attention.temperature_scale", 0, 1e3, false, &beta) ||
        !reader_gguf_int(in, "attention.temperature_length", 1, 1 << 30, beta != 0, &c->temp_len))
        return false;
    for (int i = 0; i < c->n_layers; i++)
        c->layer_head_dim[i] = c->window[i] ? dim : c->head_dim;
    c->temp_beta = (float)beta;
    c->head_scale = (float)scale;
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &transformers_decoder) || !(in->f->is_gguf ? read_gguf(in) : read_hf(in)))
        return false;
    c->router = ROUTER_SIGMOID;
    c->norm_topk = true;
    c->n_rot = 0;
    return true;
}

/* The rows of the vocabulary that tokens have, of a tensor that a folder may have padded. */
static const struct weight *vocabulary(struct net_builder *b, enum weight_role role,
                                       const struct tensor_name *name)
{
    const struct config *c = b->c;
    const struct tensor *t = build_find(b->f, c, name, 0, 0, "weight");
    bool padded = t && !b->f->is_gguf && t->dims[1] > c->n_vocab && t->dims[1] <= 1 << 24;
    const struct weight_rows rows = {
        .name = name, .n = c->n_vocab, .tensor_rows = padded ? (int)t->dims[1] : 0};
    return build_weight(b, role, 0, c->n_embd, 1, 1, &rows);
}

static struct row_conv conv(struct net_builder *b, int i, const struct tensor_name *name,
                            int channels)
{
    return (struct row_conv){.len = b->c->conv_len,
                             .taps = build_table(b, i, name, channels, b->c->conv_len)};
}

/* Gate or up rows of a folder whose tensors have both: alternating, or gates first. */
static struct weight_rows half(const struct inkling_names *n, const struct tensor_name *name, int F,
                               int which)
{
    if (n->fused)
        return (struct weight_rows){
            .name = name, .n = F, .first = which, .step = 2, .tensor_rows = 2 * F};
    return (struct weight_rows){
        .name = name, .n = F, .first = which * F, .step = 1, .tensor_rows = 2 * F};
}

static void build_mixer(struct net_builder *b, const struct inkling_names *n,
                        const struct decoder *d, int i, struct mixer *m)
{
    const struct config *c = b->c;
    struct attention *a = &m->attention;
    decoder_mixer(b, d, i, NULL, m);
    a->scale = 1.0f / (float)a->k_dim; /* heads are normed */
    a->temp_smooth = c->temp_beta != 0 && !c->window[i];
    a->temp_beta = a->temp_smooth ? c->temp_beta : 0;
    a->k_conv = conv(b, i, &n->k_conv, a->n_kv_heads * a->k_dim);
    a->v_conv = conv(b, i, &n->v_conv, a->n_kv_heads * a->v_dim);
    a->rel_dim = c->rel_dim;
    a->rel_len = c->window[i] ? c->window[i] : c->rel_len;
    a->wrel = build_matrix(b, WEIGHT_LINEAR, i, &n->r, c->n_embd, a->n_heads * c->rel_dim);
    a->rel = build_table(b, i, &n->rel, c->rel_dim, a->rel_len);
    m->block.conv = conv(b, i, &n->attn_conv, c->n_embd);
}

/* The weights on experts are normed over the chosen ones and the shared ones, which a bias that no score reaches makes the
 * router choose. */
static void build_moe(struct net_builder *b, const struct inkling_names *n, int i, struct mlp *m)
{
    const struct config *c = b->c;
    const struct decoder_names *d = &n->decoder;
    int F = c->n_ff_exp, shared = c->n_ff_shared / F, all = c->n_expert + shared;
    struct weight_rows rows[] = {half(n, &d->gate_exp, F, 0),
                                 half(n, &d->up_exp, F, 1),
                                 {.name = &d->down_exp, .n = c->n_embd}};
    const struct tensor_name *more[] = {&d->gate_shared, &d->up_shared, &d->down_shared};
    for (int k = 0; k < 3; k++) {
        rows[k].more = shared ? more[k] : NULL;
        rows[k].n_more = shared;
        rows[k].more_whole = !n->fused;
    }
    m->router = (struct router){.kind = c->router,
                                .w = build_matrix(b, WEIGHT_ROUTER, i, &d->router, c->n_embd, all),
                                .n_used = c->n_expert_used + shared,
                                .renorm = true,
                                .scale = c->expert_scale * build_scalar(b, i, &n->router_scale),
                                .choice_bias =
                                    build_vector(b, i, &d->choice_bias, all,
                                                 (struct adjust){.n_tail = shared, .tail = 1e9f})};
    m->experts.gate_up = build_weight(b, WEIGHT_EXPERTS, i, c->n_embd, all, 2, rows);
    m->experts.down = build_weight(b, WEIGHT_EXPERTS, i, F, all, 1, &rows[2]);
}

static void build_mlp(struct net_builder *b, const struct inkling_names *n, int i, struct mlp *m)
{
    const struct config *c = b->c;
    const struct decoder_names *d = &n->decoder;
    int F = c->layer_ff[i] ? c->layer_ff[i] : c->n_ff;
    *m = (struct mlp){.block.in = build_rms(b, i, &d->ffn_norm, c->n_embd)};
    if (c->is_moe[i]) {
        build_moe(b, n, i, m);
    } else {
        const struct weight_rows alternating[] = {half(n, &d->gate, F, 0), half(n, &d->up, F, 1)},
                                 apart[] = {{.name = &d->gate, .n = F}, {.name = &d->up, .n = F}};
        m->dense.gate_up =
            build_weight(b, WEIGHT_LINEAR, i, c->n_embd, 1, 2, n->fused ? alternating : apart);
        m->dense.down = build_matrix(b, WEIGHT_LINEAR, i, &d->down, F, c->n_embd);
        m->block.scale = build_scalar(b, i, &n->ffn_scale);
    }
    m->block.conv = conv(b, i, &n->ffn_conv, c->n_embd);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    bool hf = b->f->is_gguf || build_has(b, &transformers.decoder.q, 0);
    const struct inkling_names *n = hf ? &transformers : &released;
    const struct decoder *d = hf ? &transformers_decoder : &released_decoder;
    struct network *net = b->net;
    net->embed.tokens = vocabulary(b, WEIGHT_EMBED, &n->decoder.emb);
    net->embed.norm = build_rms(b, 0, &n->embed_norm, c->n_embd);
    net->head.norm = build_rms(b, 0, &n->decoder.norm, c->n_embd);
    net->head.scale = c->head_scale;
    if (!c->headless)
        net->head.w = vocabulary(b, WEIGHT_HEAD, &n->decoder.head);
    for (int i = 0; i < c->n_layers && !b->failed; i++) {
        build_mixer(b, n, d, i, &net->layers[i].mixer);
        build_mlp(b, n, i, &net->layers[i].mlp);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    int local = c->head_dim;
    for (int i = 0; i < c->n_layers; i++)
        local = c->window[i] ? c->layer_head_dim[i] : local;
    gguf_set_u32(w, "inkling.attention.key_length_swa", (uint32_t)local);
    gguf_set_u32(w, "inkling.attention.relative_dimension", (uint32_t)c->rel_dim);
    gguf_set_u32(w, "inkling.attention.relative_length", (uint32_t)c->rel_len);
    gguf_set_u32(w, "inkling.shortconv.l_cache", (uint32_t)c->conv_len);
    gguf_set_f32(w, "inkling.logit_scale", c->head_scale);
    decoder_write_window_list(c, w);
    decoder_write_dense(c, w);
    if (c->temp_beta != 0) {
        gguf_set_f32(w, "inkling.attention.temperature_scale", c->temp_beta);
        gguf_set_u32(w, "inkling.attention.temperature_length", (uint32_t)c->temp_len);
    }
}

/* Blocks that draft tokens. */
static bool spare(const struct config *c, const char *tensor)
{
    (void)c;
    return !strncmp(tensor, "model.mtp.", 10);
}

const struct model_family family_inkling = {
    .name = "inkling",
    .hf = "inkling_text",
    .hf_class = "InklingForCausalLM",
    .own_windows = true,
    .read = read,
    .build = build,
    .write = write,
    .spare = spare,
};

/* The same where the folder is named as a model of images and sound. */
const struct model_family family_inkling_mm = {
    .name = "inkling-mm",
    .hf = "inkling_mm_model",
    .hf_class = "InklingForConditionalGeneration",
    .gguf_as = "inkling",
    .own_windows = true,
    .read = read,
    .build = build,
    .write = write,
    .spare = spare,
};
