/*
 * Gemma 4: Gemma 3's norms with plain gains. Heads, KV heads and RoPE differ between window and
 * full layers. Values are normed; in some layers they are the keys before the key norm. The last
 * layers read the cache of earlier ones. There are per-layer embeddings, and MoE models have
 * experts beside a dense mlp. Text only: the image and audio towers are ignored.
 */
#include "model/families/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    .attn_post = {"blk.%d.post_attention_norm", "model.layers.%d.post_attention_layernorm"},
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.pre_feedforward_layernorm"},
    .ffn_post = {"blk.%d.post_ffw_norm", "model.layers.%d.post_feedforward_layernorm"},
    DECODER_FFN};
static const struct tensor_name
    router = {"blk.%d.ffn_gate_inp", "model.layers.%d.router.proj"},
    router_scale = {"=blk.%d.ffn_gate_inp.scale", "=model.layers.%d.router.scale"},
    expert_scale = {"=blk.%d.ffn_down_exps.scale", "=model.layers.%d.router.per_expert_scale"},
    gate_up_exp = {"blk.%d.ffn_gate_up_exps", "=model.layers.%d.experts.gate_up_proj"},
    down_exp = {"blk.%d.ffn_down_exps", "=model.layers.%d.experts.down_proj"},
    gate_each = {"blk.%d.ffn_gate_exps", "model.layers.%d.experts.%d.gate_proj"},
    up_each = {"blk.%d.ffn_up_exps", "model.layers.%d.experts.%d.up_proj"},
    down_each = {"blk.%d.ffn_down_exps", "model.layers.%d.experts.%d.down_proj"},
    dense_out = {"blk.%d.post_ffw_norm_1", "model.layers.%d.post_feedforward_layernorm_1"},
    experts_in = {"blk.%d.pre_ffw_norm_2", "model.layers.%d.pre_feedforward_layernorm_2"},
    experts_out = {"blk.%d.post_ffw_norm_2", "model.layers.%d.post_feedforward_layernorm_2"},
    layer_scale = {"blk.%d.layer_output_scale", "=model.layers.%d.layer_scalar"},
    embed_gate = {"blk.%d.inp_gate", "model.layers.%d.per_layer_input_gate"},
    embed_project = {"blk.%d.proj", "model.layers.%d.per_layer_projection"},
    embed_norm = {"blk.%d.post_norm", "model.layers.%d.post_per_layer_input_norm"},
    layer_table = {"per_layer_token_embd", "model.embed_tokens_per_layer"},
    layer_project = {"per_layer_model_proj", "model.per_layer_model_projection"},
    layer_norm = {"per_layer_proj_norm", "model.per_layer_projection_norm"};

const struct decoder gemma4_decoder = {.names = &names,
                                       .qk_norm = true,
                                       .act = ACT_GELU_TANH,
                                       .act_name = "gelu_pytorch_tanh",
                                       .windows = true,
                                       .windows_unasked = true,
                                       .windows_all = true,
                                       .window_period = 6};

/* Head counts of one layer, from the lists in newer folders. */
static bool read_layer(const struct meta_reader *in, int i)
{
    struct config *c = in->c;
    const json_t *layers = reader_get(in->hf, "per_layer_config", NULL);
    char key[16];
    snprintf(key, sizeof key, "%d", i);
    const json_t *o = reader_get(layers, key, NULL);
    double dim = c->layer_head_dim[i], heads = c->layer_kv_heads[i];
    if (o && (!reader_number(in, o, "head_dim", 1, 1 << 14, false, &dim) ||
              !reader_number(in, o, "num_key_value_heads", 1, 1 << 14, false, &heads)))
        return false;
    c->layer_head_dim[i] = (int)dim;
    c->layer_kv_heads[i] = (int)heads;
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int dim = 0, heads = c->n_kv_heads, local = c->head_dim, local_heads = c->n_kv_heads;
    bool experts = false, wide = false;
    double final = 0;
    c->tied = true;
    if (!reader_int(in, "global_head_dim", NULL, 1, 1 << 14, false, &dim) ||
        !reader_int(in, "num_global_key_value_heads", NULL, 1, 1 << 14, false, &heads) ||
        !reader_int(in, "num_kv_shared_layers", NULL, 0, c->n_layers - 1, false, &c->n_shared_kv) ||
        !reader_int(in, "hidden_size_per_layer_input", NULL, 0, 1 << 16, false, &c->n_embd_layer) ||
        !reader_number(in, in->hf, "final_logit_softcapping", 0, 1e6, false, &final) ||
        !reader_bool(in, "attention_k_eq_v", &c->k_is_v) ||
        !reader_bool(in, "enable_moe_block", &experts) ||
        !reader_bool(in, "use_double_wide_mlp", &wide))
        return false;
    c->head_softcap = (float) final;
    for (int i = 0; i < c->n_layers; i++) {
        c->layer_head_dim[i] = c->window[i] || !dim ? local : dim;
        c->layer_kv_heads[i] = c->window[i] ? local_heads : heads;
        c->layer_ff[i] = wide && i >= c->n_layers - c->n_shared_kv ? 2 * c->n_ff : c->n_ff;
        c->is_moe[i] = experts;
        if (!read_layer(in, i))
            return false;
    }
    for (int i = 0; i < c->n_layers; i++)
        c->head_dim = c->window[i] ? c->head_dim : c->layer_head_dim[i];
    c->n_rot =
        c->rope.kind == ROPE_PROPORTIONAL ? c->head_dim : (int)(c->head_dim * c->rope.partial);
    c->n_rot_window = (int)(local * c->rope_window.partial);
    if (c->rope_window.theta == 0)
        c->rope_window.theta = 10000;
    if (!experts)
        return true;
    c->norm_topk = true;
    return reader_int(in, "num_experts", NULL, 1, 4096, true, &c->n_expert) &&
           reader_int(in, "top_k_experts", "num_experts_per_tok", 1, CONFIG_MAX_EXPERTS_USED, true,
                      &c->n_expert_used) &&
           reader_int(in, "moe_intermediate_size", "expert_intermediate_size", 1, 1 << 24, true,
                      &c->n_ff_exp);
}

static bool read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int local = c->head_dim;
    double final = 0;
    c->rope_window = (struct rope_config){.theta = 10000, .factor = 1};
    if (!reader_gguf_int(in, "attention.key_length_swa", 1, 1 << 14, false, &local) ||
        !reader_gguf_int(in, "attention.shared_kv_layers", 0, c->n_layers - 1, false,
                         &c->n_shared_kv) ||
        !reader_gguf_int(in, "embedding_length_per_layer_input", 0, 1 << 16, false,
                         &c->n_embd_layer) ||
        !reader_gguf_float(in, "rope.freq_base_swa", 1, 1e12, false, &c->rope_window.theta) ||
        !reader_gguf_float(in, "final_logit_softcapping", 0, 1e6, false, &final))
        return false;
    c->n_rot_window = local;
    if (!reader_gguf_int(in, "rope.dimension_count_swa", 0, local, false, &c->n_rot_window))
        return false;
    c->head_softcap = (float) final;
    for (int i = 0; i < c->n_layers; i++) {
        char key[64];
        c->layer_head_dim[i] = c->window[i] ? local : c->head_dim;
        c->layer_kv_heads[i] = c->layer_kv_heads[i] ? c->layer_kv_heads[i] : c->n_kv_heads;
        snprintf(key, sizeof key, "blk.%d.attn_v.weight", i);
        c->k_is_v |=
            !c->window[i] && i < c->n_layers - c->n_shared_kv && !tensorfile_find(in->f, key);
    }
    return true;
}

/* The layer whose cache layer i reads: the last of its type that has its own cache. -1: none. */
static int source_of(const struct config *c, int i)
{
    int from = c->n_layers - c->n_shared_kv - 1;
    while (from >= 0 && (c->window[from] != 0) != (c->window[i] != 0))
        from--;
    return from;
}

/* Layers of one type must have equal head counts: they share RoPE and may share a cache. */
bool gemma4_check_layers(const struct meta_reader *in)
{
    const struct config *c = in->c;
    for (int i = 0; i < c->n_layers; i++) {
        int n_rot = c->window[i] ? c->n_rot_window : c->n_rot, from = source_of(c, i);
        if (n_rot > c->layer_head_dim[i])
            return error_set(in->err, "%s: layer %d: %d rotary dimensions of a head of %d",
                             in->f->path, i, n_rot, c->layer_head_dim[i]);
        if (i >= c->n_layers - c->n_shared_kv &&
            (from < 0 || c->layer_head_dim[from] != c->layer_head_dim[i] ||
             c->layer_kv_heads[from] != c->layer_kv_heads[i]))
            return error_set(in->err,
                             "%s: layer %d shares keys and values, and no earlier layer has heads "
                             "like its own",
                             in->f->path, i);
    }
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &gemma4_decoder) || !(in->f->is_gguf ? read_gguf(in) : read_hf(in)))
        return false;
    c->embed_scale = sqrtf((float)c->n_embd);
    c->attn_scale = 1;
    /* no key of GGUF says so: the models with per-layer embeddings do not */
    const char *ways = json_string_value(reader_get(in->hf, "use_bidirectional_attention", NULL));
    c->sees_both_ways = in->f->is_gguf ? !c->n_embd_layer : ways && !strcmp(ways, "vision");
    return gemma4_check_layers(in);
}

static void build_mixer(struct net_builder *b, int i, const struct rope *ropes, struct mixer *m)
{
    const struct config *c = b->c;
    int D = c->layer_head_dim[i], K = c->layer_kv_heads[i], E = c->n_embd;
    bool shares = i >= c->n_layers - c->n_shared_kv, same = c->k_is_v && !c->window[i];
    const struct weight_rows qkv[] = {{.name = &names.q, .n = c->n_heads * D},
                                      {.name = &names.k, .n = K * D},
                                      {.name = &names.v, .n = K * D}};
    *m = (struct mixer){.kind = MIXER_ATTENTION};
    m->block.in = build_rms(b, i, &names.attn_norm, E);
    m->attention = (struct attention){
        .n_heads = c->n_heads,
        .n_kv_heads = K,
        .k_dim = D,
        .v_dim = D,
        .rope = &ropes[c->window[i] != 0],
        .scale = c->attn_scale,
        .window = c->window[i],
        .span = c->sees_both_ways && c->window[i] ? SPAN_ALSO : SPAN_NONE,
        .k_is_v = same && !shares,
        .shares_kv = shares,
        .kv_layer = shares ? source_of(c, i) : 0,
        .wqkv = build_weight(b, WEIGHT_LINEAR, i, E, 1,
                             shares ? 1
                             : same ? 2
                                    : 3,
                             qkv),
        .wo = build_matrix(b, WEIGHT_LINEAR, i, &names.o, c->n_heads * D, E),
    };
    m->attention.q_norm = build_rms(b, i, &names.q_norm, D);
    if (!shares) {
        m->attention.k_norm = build_rms(b, i, &names.k_norm, D);
        m->attention.v_norm = (struct norm){.kind = NORM_RMS, .eps = c->norm_eps};
    }
    m->block.out = build_rms(b, i, &names.attn_post, E);
}

static void build_experts(struct net_builder *b, int i, struct mlp *m)
{
    const struct config *c = b->c;
    int E = c->n_embd, F = c->n_ff_exp, n = c->n_expert;
    m->router = (struct router){.kind = ROUTER_SOFTMAX,
                                .w = build_matrix(b, WEIGHT_ROUTER, i, &router, E, n),
                                .n_used = c->n_expert_used,
                                .renorm = true};
    m->router.norm = build_rms_adjusted(b, i, &router_scale, E,
                                        (struct adjust){.times = 1.0f / sqrtf((float)E)});
    m->router.expert_scale = build_vector(b, i, &expert_scale, n, (struct adjust){0});
    /* A GGUF has gate and up fused or separate. A folder has all experts fused or, if packed, one
     * matrix per expert. */
    bool apart = !build_has(b, &gate_up_exp, i) && (b->f->is_gguf || build_has(b, &gate_each, i));
    const struct weight_rows two[] = {{.name = &gate_each, .n = F}, {.name = &up_each, .n = F}};
    const struct tensor_name *down = apart ? &down_each : &down_exp;
    const struct weight_rows one = {.name = &gate_up_exp, .n = 2 * F};
    m->experts.gate_up =
        build_weight(b, WEIGHT_EXPERTS, i, E, n, apart ? 2 : 1, apart ? two : &one);
    m->experts.down =
        build_weight(b, WEIGHT_EXPERTS, i, F, n, 1, &(struct weight_rows){.name = down, .n = E});
    m->experts.act = ACT_GELU_TANH;
    m->dense_out = build_rms(b, i, &dense_out, E);
    m->experts_in = build_rms(b, i, &experts_in, E);
    m->experts_out = build_rms(b, i, &experts_out, E);
}

static void build_mlp(struct net_builder *b, int i, struct mlp *m)
{
    const struct config *c = b->c;
    int E = c->n_embd, F = c->layer_ff[i] ? c->layer_ff[i] : c->n_ff, P = c->n_embd_layer;
    *m = (struct mlp){.block.in = build_rms(b, i, &names.ffn_norm, E)};
    m->dense.act = ACT_GELU_TANH;
    m->dense.gate_up = build_weight(
        b, WEIGHT_LINEAR, i, E, 1, 2,
        (const struct weight_rows[]){{.name = &names.gate, .n = F}, {.name = &names.up, .n = F}});
    m->dense.down = build_matrix(b, WEIGHT_LINEAR, i, &names.down, F, E);
    if (c->is_moe[i])
        build_experts(b, i, m);
    m->block.out = build_rms(b, i, &names.ffn_post, E);
    m->stream_scale = build_scalar(b, i, &layer_scale);
    if (!P)
        return;
    m->embed.gate = build_matrix(b, WEIGHT_LINEAR, i, &embed_gate, E, P);
    m->embed.project = build_matrix(b, WEIGHT_LINEAR, i, &embed_project, P, E);
    m->embed.norm = build_rms(b, i, &embed_norm, E);
    m->embed.act = ACT_GELU_TANH;
}

static void build_layer_embeds(struct net_builder *b)
{
    const struct config *c = b->c;
    struct embed_layers *e = &b->net->embed.layers;
    int P = c->n_embd_layer;
    if (!P)
        return;
    /* Gemma 3n's has fewer rows than the vocabulary */
    const struct tensor *t = build_find(b->f, c, &layer_table, 0, 0, "weight");
    int rows = t && t->dims[1] < c->n_vocab ? (int)t->dims[1] : c->n_vocab;
    *e = (struct embed_layers){
        .width = P,
        .table = build_matrix(b, WEIGHT_EMBED, 0, &layer_table, P * c->n_layers, rows),
        .project = build_matrix(b, WEIGHT_LINEAR, 0, &layer_project, c->n_embd, P * c->n_layers),
        .table_scale = sqrtf((float)P),
        .project_scale = 1.0f / sqrtf((float)c->n_embd),
        .scale = sqrtf(0.5f)};
    e->norm = build_rms(b, 0, &layer_norm, P);
}

void gemma4_build(struct net_builder *b)
{
    const struct config *c = b->c;
    const struct rope_config *const configs[] = {&c->rope, &c->rope_window};
    const struct rope *ropes = build_ropes(b, 2, configs, (const int[]){c->n_rot, c->n_rot_window});
    decoder_ends(b, &gemma4_decoder);
    build_layer_embeds(b);
    for (int i = 0; i < c->n_layers; i++) {
        build_mixer(b, i, ropes, &b->net->layers[i].mixer);
        build_mlp(b, i, &b->net->layers[i].mlp);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    int local = c->head_dim;
    uint8_t slides[CONFIG_MAX_LAYERS];
    for (int i = 0; i < c->n_layers; i++) {
        slides[i] = c->window[i] != 0;
        local = slides[i] ? c->layer_head_dim[i] : local;
    }
    gguf_set_array(w, "gemma4.attention.sliding_window_pattern", META_BOOL, slides,
                   (size_t)c->n_layers);
    gguf_set_u32(w, "gemma4.attention.key_length_swa", (uint32_t)local);
    gguf_set_u32(w, "gemma4.attention.value_length_swa", (uint32_t)local);
    gguf_set_u32(w, "gemma4.attention.shared_kv_layers", (uint32_t)c->n_shared_kv);
    gguf_set_u32(w, "gemma4.embedding_length_per_layer_input", (uint32_t)c->n_embd_layer);
    gguf_set_u32(w, "gemma4.rope.dimension_count_swa", (uint32_t)c->n_rot_window);
    gguf_set_f32(w, "gemma4.rope.freq_base_swa", (float)c->rope_window.theta);
    if (c->head_softcap != 0)
        gguf_set_f32(w, "gemma4.final_logit_softcapping", c->head_softcap);
}

/* Layers that read another layer's cache may still have key and value weights. They are unused. */
bool gemma4_spare(const struct config *c, const char *tensor)
{
    int i = -1;
    char part[64];
    const char *at = strstr(tensor, "layers.");
    if (!at || sscanf(at, "layers.%d.self_attn.%63[a-z_]", &i, part) != 2)
        return false;
    bool kv = !strcmp(part, "k_proj") || !strcmp(part, "v_proj") || !strcmp(part, "k_norm");
    return kv && i >= c->n_layers - c->n_shared_kv;
}

const struct model_family family_gemma4 = {
    .name = "gemma4",
    .hf = "gemma4_text",
    .hf_class = "Gemma4ForConditionalGeneration",
    .scales_experts = true,
    .own_windows = true,
    .read = read,
    .build = gemma4_build,
    .write = write,
    .spare = gemma4_spare,
};
