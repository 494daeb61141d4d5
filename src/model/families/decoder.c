/*
 * Plain decoders: RMS norm, attention with RoPE, RMS norm, a gated mlp or softmax-routed experts.
 * Reads their metadata from both file formats, names their tensors and builds their layers. struct
 * decoder has what differs between families.
 */
#include "base/mem.h"
#include "model/families/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* The router kind, if the file has it. */
static bool read_gguf_experts(const struct meta_reader *in, const struct decoder *d)
{
    static const enum router_kind kinds[] = {ROUTER_SOFTMAX, ROUTER_SIGMOID, ROUTER_SOFTMAX_TOP,
                                             ROUTER_SOFTPLUS};
    struct config *c = in->c;
    int kind = 0, shared = 0, wide = 0;
    c->router = d->router;
    if (!reader_gguf_int(in, "expert_gating_func", 0, 4, false, &kind) ||
        !reader_gguf_int(in, "expert_shared_count", 0, 64, false, &shared) ||
        !reader_gguf_int(in, "expert_shared_feed_forward_length", 0, 1 << 24, false, &wide) ||
        !reader_gguf_int(in, "expert_group_count", 0, 256, false, &c->n_groups) ||
        !reader_gguf_int(in, "expert_group_used_count", 0, 256, false, &c->n_groups_used))
        return false;
    if (kind)
        c->router = kinds[kind - 1];
    c->n_ff_shared = wide ? wide : shared * c->n_ff_exp;
    return true;
}

/* Layers with a window: all but one per period, or a list. */
static bool read_gguf_windows(const struct meta_reader *in, const struct decoder *d, int window)
{
    struct config *c = in->c;
    char key[128];
    int period = d->window_period, slides[CONFIG_MAX_LAYERS];
    snprintf(key, sizeof key, "%s.attention.sliding_window_pattern", c->arch_name);
    const struct meta *m = tensorfile_meta(in->f, key);
    bool list = m && m->type == META_ARRAY;
    if (list && !reader_gguf_layers(in, "attention.sliding_window_pattern", 0, 1, true, slides))
        return false;
    if (!list &&
        !reader_gguf_int(in, "attention.sliding_window_pattern", 0, 1 << 20, false, &period))
        return false;
    for (int i = 0; i < c->n_layers; i++) {
        bool slide = list ? slides[i] != 0 : !period || i % period < period - 1;
        c->window[i] = slide ? window : 0;
    }
    return true;
}

static bool read_gguf(const struct meta_reader *in, const struct decoder *d)
{
    struct config *c = in->c;
    double eps = 1e-6, scale = 1;
    int window = 0;
    if (!reader_gguf_int(in, "block_count", 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !reader_gguf_int(in, "embedding_length", 1, 1 << 20, true, &c->n_embd) ||
        !reader_gguf_layers(in, "attention.head_count", 1, 1 << 14, true, c->layer_heads))
        return false;
    c->n_heads = c->layer_heads[0];
    c->n_kv_heads = c->n_heads;
    c->head_dim = c->n_embd / c->n_heads;
    c->context = 2048;
    if (!reader_gguf_layers(in, "attention.head_count_kv", c->family->zero_heads ? 0 : 1, 1 << 14,
                            false, c->layer_kv_heads))
        return false;
    c->n_kv_heads = 0;
    for (int i = 0; i < c->n_layers && !c->n_kv_heads; i++)
        c->n_kv_heads = c->layer_kv_heads[i];
    for (int i = 0; i < c->n_layers && c->n_kv_heads; i++)
        c->is_linear[i] = !c->layer_kv_heads[i];
    char heads_key[96];
    snprintf(heads_key, sizeof heads_key, "%s.attention.head_count_kv", c->arch_name);
    if (!c->n_kv_heads && c->family->zero_heads && tensorfile_meta(in->f, heads_key))
        for (int i = 0; i < c->n_layers; i++)
            c->is_linear[i] = true; /* no layer has attention */
    if (!c->n_kv_heads)
        c->n_kv_heads = c->n_heads;
    if (!reader_gguf_int(in, "attention.key_length", 1, 1 << 14, false, &c->head_dim) ||
        !reader_gguf_layers(in, "feed_forward_length", 0, 1 << 24, false, c->layer_ff) ||
        !reader_gguf_int(in, "context_length", 1, 1 << 30, false, &c->context) ||
        !reader_gguf_float(in,
                           c->family->layer_norm && !c->family->rms_eps
                               ? "attention.layer_norm_epsilon"
                               : "attention.layer_norm_rms_epsilon",
                           0, 1, true, &eps) ||
        !reader_gguf_int(in, "expert_count", 0, 4096, false, &c->n_expert) ||
        !reader_gguf_layers(in, "expert_used_count", 0, CONFIG_MAX_EXPERTS_USED, c->n_expert > 0,
                            c->layer_experts_used) ||
        !reader_gguf_int(in, "attention.sliding_window", 0, 1 << 30, false, &window))
        return false;
    for (int i = 0; i < c->n_layers; i++)
        if (c->layer_experts_used[i] > c->n_expert_used)
            c->n_expert_used = c->layer_experts_used[i];
    int v_dim = c->head_dim;
    if (!reader_gguf_int(in, "attention.value_length", 1, 1 << 14, false, &v_dim))
        return false;
    c->v_dim = d->own_values ? v_dim : 0;
    if (v_dim != c->head_dim && !d->latent && !d->own_values)
        return error_set(in->err, "%s: %s.attention.value_length: %d differs from key_length %d",
                         in->f->path, c->arch_name, v_dim, c->head_dim);
    c->n_ff = c->layer_ff[0];
    c->n_ff_exp = c->n_ff;
    c->n_rot = c->head_dim;
    if (!reader_gguf_int(in, "expert_feed_forward_length", 1, 1 << 24, false, &c->n_ff_exp) ||
        !reader_gguf_int(in, "rope.dimension_count", 0, 1 << 14, false, &c->n_rot) ||
        !reader_gguf_float(in, "expert_weights_scale", 0, 1e6, false, &scale))
        return false;
    char key[128];
    snprintf(key, sizeof key, "%s.expert_weights_norm", c->arch_name);
    c->norm_topk = true;
    meta_get_bool(in->f, key, &c->norm_topk);
    c->norm_eps = (float)eps;
    c->expert_scale = scale == 0 ? 1.0f : (float)scale;
    const struct tensor *emb = tensorfile_find(in->f, "token_embd.weight");
    if (!emb)
        return error_set(in->err, "%s: tensor token_embd.weight: missing", in->f->path);
    if (!reader_range(in, "vocabulary (token_embd.weight rows)", (double)emb->dims[1], 1, 1 << 24))
        return false;
    c->n_vocab = (int)emb->dims[1];
    c->tied = !tensorfile_find(in->f, "output.weight");
    for (int i = 0; i < c->n_layers; i++) {
        snprintf(key, sizeof key, "blk.%d.ffn_gate_inp.weight", i);
        c->is_moe[i] = c->n_expert > 0 && tensorfile_find(in->f, key);
    }
    return read_gguf_windows(in, d, window) && read_gguf_experts(in, d) && rope_read_gguf(in);
}

static bool read_layers(const struct meta_reader *in, const struct decoder *d)
{
    struct config *c = in->c;
    int step = 1, window = 0, full_layers = 0, period = d->window_period;
    bool use_window = d->windows_unasked;
    if (!reader_int(in, "decoder_sparse_step", NULL, 1, 1 << 20, false, &step) ||
        !reader_int(in, "sliding_window", NULL, 0, 1 << 30, false, &window) ||
        !reader_int(in, "max_window_layers", NULL, 0, 1 << 20, false, &full_layers) ||
        !reader_int(in, "sliding_window_pattern", "_sliding_window_pattern", 0, 1 << 20, false,
                    &period) ||
        !reader_bool(in, "use_sliding_window", &use_window))
        return false;
    use_window &= d->windows;
    if (d->windows_all)
        full_layers = 0;
    const json_t *types = reader_get(in->hf, "layer_types", NULL);
    if (types && json_array_size(types) != (size_t)c->n_layers)
        return error_set(in->err, "%s: config.json: layer_types: %zu entries for %d layers",
                         in->f->path, json_array_size(types), c->n_layers);
    const json_t *dense = reader_get(in->hf, "mlp_only_layers", NULL);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = types ? json_string_value(json_array_get(types, (size_t)i)) : NULL;
        bool slides = i >= full_layers && (!period || i % period < period - 1);
        if (type)
            slides = !strcmp(type, "sliding_attention");
        c->window[i] = use_window && slides ? window : 0;
        c->is_moe[i] = c->n_expert > 0 && (i + 1) % step == 0;
        for (size_t j = 0; j < json_array_size(dense); j++)
            if (json_integer_value(json_array_get(dense, j)) == i)
                c->is_moe[i] = false;
    }
    return true;
}

bool decoder_read_window_rope(const struct meta_reader *in)
{
    struct config *c = in->c;
    c->n_rot_window = c->n_rot;
    if (!in->f->is_gguf) {
        if (c->rope_window.theta == 0)
            c->rope_window.theta = c->rope.theta;
        return true;
    }
    c->rope_window = (struct rope_config){.theta = c->rope.theta, .factor = 1, .partial = 1};
    return reader_gguf_float(in, "rope.freq_base_swa", 1, 1e12, false, &c->rope_window.theta);
}

bool decoder_read_routed(const struct meta_reader *in)
{
    struct config *c = in->c;
    int shared = 0, dense = 0;
    double scale = 1;
    c->norm_topk = true;
    if (!reader_int(in, "n_routed_experts", "num_experts", 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, true,
                    &c->n_expert_used) ||
        !reader_int(in, "moe_intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff_exp) ||
        !reader_int(in, "n_shared_experts", "num_shared_experts", 0, 64, false, &shared) ||
        !reader_int(in, "first_k_dense_replace", NULL, 0, 1 << 20, false, &dense) ||
        !reader_int(in, "n_group", NULL, 0, 256, false, &c->n_groups) ||
        !reader_int(in, "topk_group", NULL, 0, 256, false, &c->n_groups_used) ||
        !reader_number(in, in->hf, "routed_scaling_factor", 1e-3, 1e3, false, &scale) ||
        !reader_number(in, in->hf, "router_scaling_factor", 1e-3, 1e3, false, &scale) ||
        !reader_bool(in, "norm_topk_prob", &c->norm_topk))
        return false;
    const char *score = json_string_value(reader_get(in->hf, "scoring_func", NULL));
    if (score && strcmp(score, "sigmoid") != 0)
        return error_set(in->err,
                         "%s: config.json: scoring_func \"%.40s\" is not supported (sigmoid is)",
                         in->f->path, score);
    const json_t *types = reader_get(in->hf, "mlp_layer_types", NULL);
    if (types && json_array_size(types) != (size_t)c->n_layers)
        return error_set(in->err, "%s: config.json: mlp_layer_types: %zu entries for %d layers",
                         in->f->path, json_array_size(types), c->n_layers);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        c->is_moe[i] = type ? !strcmp(type, "sparse") : i >= dense;
    }
    c->expert_scale = (float)scale;
    c->n_ff_shared = shared * c->n_ff_exp;
    return true;
}

/* One width of hidden units, or one per layer. */
static bool read_hidden(const struct meta_reader *in)
{
    struct config *c = in->c;
    const json_t *list = reader_get(in->hf, "intermediate_size", NULL);
    if (!json_is_array(list))
        return reader_int(in, "intermediate_size", "n_inner", 0, 1 << 24, false, &c->n_ff);
    if (json_array_size(list) != (size_t)c->n_layers)
        return error_set(in->err, "%s: config.json: intermediate_size: %zu entries for %d layers",
                         in->f->path, json_array_size(list), c->n_layers);
    for (int i = 0; i < c->n_layers; i++) {
        const json_t *n = json_array_get(list, (size_t)i);
        if (!reader_range(in, "config.json: intermediate_size",
                          json_is_integer(n) ? (double)json_integer_value(n) : -1, 1, 1 << 24))
            return false;
        c->layer_ff[i] = (int)json_integer_value(n);
    }
    c->n_ff = c->layer_ff[0];
    return true;
}

static bool read_hf(const struct meta_reader *in, const struct decoder *d)
{
    struct config *c = in->c;
    const char *key = d->act_key ? d->act_key : "hidden_act";
    const char *act =
        json_string_value(reader_get(in->hf, key, d->act_key ? NULL : "hidden_activation"));
    const char *known = d->act_name ? d->act_name : "silu";
    if (act && strcmp(act, known))
        return error_set(in->err, "%s: config.json: %s \"%.40s\" is not supported (%s is)",
                         in->f->path, key, act, known);

    if (!reader_int(in, d->layers_key ? d->layers_key : "num_hidden_layers", "n_layer", 1,
                    CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !reader_int(in, "hidden_size", "n_embd", 1, 1 << 20, true, &c->n_embd) ||
        !reader_int(in, "num_attention_heads", "n_head", 1, 1 << 14, true, &c->n_heads) ||
        !reader_int(in, "vocab_size", NULL, 1, 1 << 24, true, &c->n_vocab))
        return false;
    c->n_kv_heads = c->n_heads;
    c->head_dim = c->n_embd / c->n_heads;
    c->context = 2048;
    double eps = 1e-6;
    c->tied = false;
    c->norm_topk = d->experts_wide;
    c->router = d->router;
    if (!reader_int(in, "num_key_value_heads", NULL, 1, 1 << 14, false, &c->n_kv_heads) ||
        !reader_int(in, "head_dim", NULL, 1, 1 << 14, false, &c->head_dim) || !read_hidden(in) ||
        !reader_int(in, "max_position_embeddings", "n_positions", 1, 1 << 30, false, &c->context) ||
        !reader_number(in, in->hf, d->eps_key ? d->eps_key : "rms_norm_eps", 0, 1, false, &eps) ||
        !reader_bool(in, "tie_word_embeddings", &c->tied) ||
        !reader_int(in, "num_experts", "num_local_experts", 1, 4096, d->experts, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, d->experts,
                    &c->n_expert_used) ||
        !reader_int(in, d->experts_wide ? "intermediate_size" : "moe_intermediate_size", NULL, 1,
                    1 << 24, d->experts, &c->n_ff_exp) ||
        !reader_bool(in, "norm_topk_prob", &c->norm_topk))
        return false;
    if (!d->experts)
        c->n_expert = c->n_expert_used = c->n_ff_exp = 0;
    c->norm_eps = (float)eps;
    c->expert_scale = 1;
    if (!build_present(in->f, c, &decoder_names.head, 0))
        c->tied = true;
    return read_layers(in, d) && rope_read_hf(in);
}

bool decoder_read(const struct meta_reader *in, const struct decoder *d)
{
    return in->f->is_gguf ? read_gguf(in, d) : read_hf(in, d);
}

const struct decoder_names decoder_names = {DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP,
                                            DECODER_EXPERTS};

/* Experts in two tensors: gate and up of all experts, down of all experts. */
static const struct tensor_name decoder_fused_up = {"blk.%d.ffn_gate_up_exps",
                                                    "=model.layers.%d.mlp.experts.gate_up_proj"},
                                decoder_fused_down = {"blk.%d.ffn_down_exps",
                                                      "=model.layers.%d.mlp.experts.down_proj"};

/* Experts as MLX stacks them. */
static const struct tensor_name switch_gate = {"blk.%d.ffn_gate_exps",
                                               "model.layers.%d.mlp.switch_mlp.gate_proj"},
                                switch_up = {"blk.%d.ffn_up_exps",
                                             "model.layers.%d.mlp.switch_mlp.up_proj"},
                                switch_down = {"blk.%d.ffn_down_exps",
                                               "model.layers.%d.mlp.switch_mlp.down_proj"};

static const struct decoder_names *names_of(const struct decoder *d)
{
    return d->names ? d->names : &decoder_names;
}

static struct norm norm_of(struct net_builder *b, const struct decoder *d, int layer,
                           const struct tensor_name *name, int width)
{
    return (b->c->family->layer_norm ? build_layer_norm_of : build_rms_adjusted)(
        b, layer, name, width, (struct adjust){.add = d->norm_add});
}

/* All n rows of a tensor, which a folder may store transposed. */
static struct weight_rows rows_of(const struct decoder *d, const struct tensor_name *name, int n)
{
    return (struct weight_rows){
        .name = name, .n = n, .tensor_rows = d->transposed ? n : 0, .transposed = d->transposed};
}

static const struct weight *matrix_of(struct net_builder *b, const struct decoder *d, int layer,
                                      const struct tensor_name *name, int n_in, int n_out)
{
    const struct weight_rows rows = rows_of(d, name, n_out);
    return build_weight(b, WEIGHT_LINEAR, layer, n_in, 1, 1, &rows);
}

/* Queries, keys and values of D values from one tensor. */
static const struct weight *fused_qkv(struct net_builder *b, const struct decoder *d, int layer,
                                      const struct tensor_name *name, int D, int n_q, int n_kv)
{
    int E = b->c->n_embd;
    if (!d->qkv_by_head || b->f->is_gguf)
        return matrix_of(b, d, layer, name, E, n_q + 2 * n_kv);
    struct weight_rows rows[3];
    for (int k = 0; k < 3; k++)
        rows[k] = (struct weight_rows){.name = name,
                                       .n = n_q,
                                       .first = k * D,
                                       .step = 3 * D,
                                       .run_length = D,
                                       .tensor_rows = 3 * n_q};
    const struct weight *w = build_weight(b, WEIGHT_LINEAR, layer, E, 1, 3, rows);
    b->specs[b->n_specs - 1].as = name;
    return w;
}

/* Gates of attention's output: one per value, or one per head. */
static int gates_of(const struct net_builder *b, const struct decoder_names *n, int i, int heads,
                    int values)
{
    const struct tensor *t = build_find(b->f, b->c, &n->attn_gate, i, 0, "weight");
    return t && t->dims[1] == heads ? heads : values;
}

void decoder_mixer(struct net_builder *b, const struct decoder *d, int i, const struct rope *rope,
                   struct mixer *m)
{
    const struct config *c = b->c;
    const struct decoder_names *n = names_of(d);
    int D = c->layer_head_dim[i] ? c->layer_head_dim[i] : c->head_dim;
    int K = c->layer_kv_heads[i] ? c->layer_kv_heads[i] : c->n_kv_heads;
    int H = c->layer_heads[i] ? c->layer_heads[i] : c->n_heads;
    bool only = c->family->interleaved_only_folder, folder = c->family->interleaved_folder || only;
    int interleaved = (folder || c->family->interleaved_qk) && D % 2 == 0 ? D : 0;
    int n_q = H * D, n_kv = K * D, Dv = d->own_values ? c->v_dim : D;
    struct weight_rows apart[] = {{.name = &n->q, .n = n_q, .interleaved = interleaved},
                                  {.name = &n->k, .n = n_kv, .interleaved = interleaved},
                                  {.name = &n->v, .n = K * Dv}};
    for (int k = 0; k < 2 && folder; k++) {
        apart[k].n_rot = c->n_rot;
        apart[k].interleaved_folder = true;
        apart[k].tower_folder = only ? ROTARY_ADJACENT : ROTARY_PLAIN;
    }
    bool is_fused = n->qkv.gguf != NULL;
    *m = (struct mixer){.kind = MIXER_ATTENTION, .block.scale = c->residual_scale};
    if (n->attn_norm.gguf)
        m->block.in = norm_of(b, d, i, &n->attn_norm, c->n_embd);
    m->attention = (struct attention){
        .n_heads = H,
        .n_kv_heads = K,
        .k_dim = D,
        .v_dim = Dv,
        .rope = rope,
        .scale = c->attn_scale != 0 ? c->attn_scale : 1.0f / sqrtf((float)D),
        .softcap = c->attn_softcap,
        .window = c->window[i],
        .span = c->sees_both_ways ? SPAN_ALSO : SPAN_NONE,
        .temp_beta = c->temp_beta,
        .temp_len = c->temp_len,
        .temp_offset = c->temp_offset,
        .norm_whole = d->norm_whole,
        .norm_late = d->norm_late,
        .wqkv = is_fused ? fused_qkv(b, d, i, &n->qkv, D, n_q, n_kv)
                         : build_weight(b, WEIGHT_LINEAR, i, c->n_embd, 1, 3, apart),
    };
    if (d->qk_norm) {
        m->attention.q_norm =
            build_rms_adjusted(b, i, &n->q_norm, d->norm_whole ? n_q : D,
                               (struct adjust){.add = d->norm_add, .fold = c->attn_fold});
        m->attention.k_norm = build_rms_adjusted(b, i, &n->k_norm, d->norm_whole ? n_kv : D,
                                                 (struct adjust){.add = d->norm_add});
    }
    if (n->sinks.gguf)
        m->attention.sinks = build_vector(b, i, &n->sinks, H, (struct adjust){0});
    if (n->attn_gate.gguf) {
        m->attention.wgate =
            build_matrix(b, WEIGHT_LINEAR, i, &n->attn_gate, c->n_embd, gates_of(b, n, i, H, n_q));
        m->attention.softplus = d->softplus;
    }
    m->attention.wo = matrix_of(b, d, i, &n->o, H * Dv, c->n_embd);
    if (n->attn_sub_norm.gguf)
        m->attention.out_norm = norm_of(b, d, i, &n->attn_sub_norm, n_q);
    if (n->attn_post.gguf)
        m->block.out = norm_of(b, d, i, &n->attn_post, c->n_embd);
}

/* gate and up of width F from two tensors. */
static const struct weight *gate_up(struct net_builder *b, int i, const struct tensor_name *gate,
                                    const struct tensor_name *up, int F)
{
    return build_weight(b, WEIGHT_LINEAR, i, b->c->n_embd, 1, 2,
                        (const struct weight_rows[]){{.name = gate, .n = F}, {.name = up, .n = F}});
}

void decoder_router(struct net_builder *b, const struct decoder *d, int i, struct mlp *m)
{
    const struct config *c = b->c;
    const struct decoder_names *n = names_of(d);
    m->router = (struct router){
        .kind = c->router,
        .w = build_matrix(b, WEIGHT_ROUTER, i, &n->router, c->n_embd, c->n_expert + c->n_same),
        .n_same = c->n_same,
        .n_used = c->layer_experts_used[i] ? c->layer_experts_used[i] : c->n_expert_used,
        .n_groups = c->n_groups,
        .n_groups_used = c->n_groups_used,
        .renorm = c->norm_topk,
        .scale = c->expert_scale};
    if (n->choice_bias.gguf)
        m->router.choice_bias =
            build_vector(b, i, &n->choice_bias, c->n_expert + c->n_same, (struct adjust){0});
}

static void build_experts(struct net_builder *b, const struct decoder *d, int i, struct mlp *m)
{
    const struct config *c = b->c;
    const struct decoder_names *n = names_of(d);
    int F = c->n_ff_exp;
    decoder_router(b, d, i, m);
    if (!n->gate_exp.gguf)
        return; /* the family builds it */
    bool alike = n->gate_shared.gguf && c->n_ff_shared == F;
    enum weight_role role = alike ? WEIGHT_EXPERTS_SHARED : WEIGHT_EXPERTS;
    bool mlx = !b->f->is_gguf && build_has(b, &switch_gate, i);
    const struct weight_rows two[] = {{.name = mlx ? &switch_gate : &n->gate_exp, .n = F},
                                      {.name = mlx ? &switch_up : &n->up_exp, .n = F}};
    const struct weight_rows one = {.name = &decoder_fused_up, .n = 2 * F};
    bool fused = build_has(b, &decoder_fused_up, i);
    const struct tensor_name *down = fused ? &decoder_fused_down
                                     : mlx ? &switch_down
                                           : &n->down_exp;
    m->experts.gate_up =
        build_weight(b, role, i, c->n_embd, c->n_expert, fused ? 1 : 2, fused ? &one : two);
    m->experts.down = build_weight(b, role, i, F, c->n_expert, 1,
                                   (const struct weight_rows[]){{.name = down, .n = c->n_embd}});
    if (!c->n_ff_shared || !n->gate_shared.gguf)
        return;
    m->dense.gate_up = gate_up(b, i, &n->gate_shared, &n->up_shared, c->n_ff_shared);
    m->dense.down = build_matrix(b, WEIGHT_LINEAR, i, &n->down_shared, c->n_ff_shared, c->n_embd);
    if (n->shared_gate.gguf)
        m->dense_gate = build_matrix(b, WEIGHT_LINEAR, i, &n->shared_gate, c->n_embd, 1);
}

void decoder_mlp(struct net_builder *b, const struct decoder *d, int i, struct mlp *m)
{
    const struct config *c = b->c;
    const struct decoder_names *n = names_of(d);
    int F = c->layer_ff[i] ? c->layer_ff[i] : c->n_ff;
    *m = (struct mlp){.block.scale = c->residual_scale};
    m->block.parallel = d->parallel;
    if (n->ffn_norm.gguf)
        m->block.in = norm_of(b, d, i, &n->ffn_norm, c->n_embd);
    else if (d->parallel)
        m->block.in = b->net->layers[i].mixer.block.in;
    m->dense.act = m->experts.act = d->act;
    if (n->ffn_post.gguf)
        m->block.out = norm_of(b, d, i, &n->ffn_post, c->n_embd);
    /* a file may place experts in layers where the family has none */
    bool known = c->is_moe[i] ? n->router.gguf != NULL : n->gate_up.gguf || n->up.gguf;
    if (!known && b->failed)
        return;
    if (!known) {
        b->failed = !error_set(b->err, "%s: layer %d: a %s layer has %s experts", b->f->path, i,
                               c->family->name, c->is_moe[i] ? "no" : "a router and");
        return;
    }
    if (c->is_moe[i]) {
        build_experts(b, d, i, m);
        return;
    }
    if (n->gate_up.gguf || !activation_is_gated(d->act))
        m->dense.gate_up = n->gate_up.gguf ? matrix_of(b, d, i, &n->gate_up, c->n_embd, 2 * F)
                                           : matrix_of(b, d, i, &n->up, c->n_embd, F);
    else
        m->dense.gate_up = gate_up(b, i, &n->gate, &n->up, F);
    m->dense.down = matrix_of(b, d, i, &n->down, F, c->n_embd);
    if (n->ffn_sub_norm.gguf)
        m->dense.mid = norm_of(b, d, i, &n->ffn_sub_norm, F);
}

void decoder_ends(struct net_builder *b, const struct decoder *d)
{
    const struct config *c = b->c;
    const struct decoder_names *n = names_of(d);
    struct network *net = b->net;
    net->embed.tokens = build_matrix(b, c->tied && !c->headless ? WEIGHT_HEAD : WEIGHT_EMBED, 0,
                                     &n->emb, c->n_embd, c->n_vocab);
    net->embed.scale = c->embed_scale;
    net->head.norm = norm_of(b, d, 0, &n->norm, c->n_embd);
    if (c->headless)
        return;
    net->head.softcap = c->head_softcap;
    net->head.scale = c->head_scale;
    net->head.w = c->tied ? net->embed.tokens
                          : build_matrix(b, WEIGHT_HEAD, 0, &n->head, c->n_embd, c->n_vocab);
}

void rope_write_sections(const struct config *c, struct gguf_writer *w, const char *arch)
{
    char key[96];
    const int32_t sections[4] = {c->rope.sections[0], c->rope.sections[1], c->rope.sections[2], 0};
    snprintf(key, sizeof key, "%s.rope.dimension_sections", arch);
    if (sections[0])
        gguf_set_array(w, key, META_I32, sections, 4);
}

void decoder_write_windows(const struct config *c, struct gguf_writer *w)
{
    uint8_t slides[CONFIG_MAX_LAYERS];
    int n = c->n_layers, period = 1;
    while (period <= n && c->window[period - 1])
        period++;
    bool regular = true;
    for (int i = 0; i < n; i++) {
        slides[i] = c->window[i] != 0;
        regular &= slides[i] == (i % period < period - 1);
    }
    if (period == 1 && regular)
        return; /* no windows */
    char key[96];
    snprintf(key, sizeof key, "%s.attention.sliding_window_pattern",
             c->family->gguf_as ? c->family->gguf_as : c->family->name);
    if (regular)
        gguf_set_u32(w, key, (uint32_t)period);
    else
        gguf_set_array(w, key, META_BOOL, slides, (size_t)n);
}

void decoder_write_window_list(const struct config *c, struct gguf_writer *w)
{
    uint8_t slides[CONFIG_MAX_LAYERS];
    char key[96];
    for (int i = 0; i < c->n_layers; i++)
        slides[i] = c->window[i] != 0;
    snprintf(key, sizeof key, "%s.attention.sliding_window_pattern",
             c->family->gguf_as ? c->family->gguf_as : c->family->name);
    gguf_set_array(w, key, META_BOOL, slides, (size_t)c->n_layers);
}

void decoder_write_dense(const struct config *c, struct gguf_writer *w)
{
    char key[96];
    uint32_t dense = 0;
    while (dense < (uint32_t)c->n_layers && !c->is_moe[dense])
        dense++;
    snprintf(key, sizeof key, "%s.leading_dense_block_count",
             c->family->gguf_as ? c->family->gguf_as : c->family->name);
    gguf_set_u32(w, key, dense);
}

const struct mtp_names mtp_names = {
    .fc = {"blk.%d.nextn.eh_proj", "model.layers.%d.eh_proj"},
    .embed_norm = {"blk.%d.nextn.enorm", "model.layers.%d.enorm"},
    .hidden_norm = {"blk.%d.nextn.hnorm", "model.layers.%d.hnorm"},
    .norm = {"blk.%d.nextn.shared_head_norm", "model.layers.%d.shared_head.norm"}};

void mtp_read(const struct meta_reader *in, const struct mtp_names *n, int extra)
{
    struct config *c = in->c;
    int at = c->n_layers, like = at - 1;
    c->n_mtp = extra > 0 && at < CONFIG_MAX_LAYERS &&
               build_find(in->f, c, &n->fc, at, 0, "weight") != NULL;
    if (!c->n_mtp)
        return;
    if (!in->f->is_gguf) /* a GGUF has read it for all layers */
        c->is_moe[at] = c->is_moe[like];
    c->is_linear[at] = false;
}

/* Embedding and head are shared with the model. Copies in the file are ignored. */
void mtp_build(struct net_builder *b, const struct mtp_names *n, float add)
{
    struct network *net = b->net;
    struct adjust adjust = {.add = add};
    int at = b->c->n_layers, E = b->c->n_embd;
    net->mtp.fc = build_matrix(b, WEIGHT_LINEAR, at, &n->fc, 2 * E, E);
    net->mtp.embed_norm = build_rms_adjusted(b, at, &n->embed_norm, E, adjust);
    net->mtp.hidden_norm = build_rms_adjusted(b, at, &n->hidden_norm, E, adjust);
    net->mtp.head = net->head;
    if (build_has(b, &n->norm, at))
        net->mtp.head.norm = build_rms_adjusted(b, at, &n->norm, E, adjust);
}

void decoder_build(struct net_builder *b, const struct decoder *d)
{
    const struct config *c = b->c;
    const struct rope_config *const configs[] = {&c->rope, &c->rope_window};
    const struct rope *ropes =
        d->window_rope ? build_ropes(b, 2, configs, (const int[]){c->n_rot, c->n_rot_window})
                       : build_rope(b);
    decoder_ends(b, d);
    for (int i = 0; i < c->n_layers; i++) {
        const struct rope *rope = d->window_rope && c->window[i] && ropes ? &ropes[1] : ropes;
        decoder_mixer(b, d, i, c->no_rope[i] ? NULL : rope, &b->net->layers[i].mixer);
        decoder_mlp(b, d, i, &b->net->layers[i].mlp);
    }
}
