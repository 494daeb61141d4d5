/*
 * DeepSeek V4: a stream of several parts joined by hyper-connections, compressed attention with a window and sinks, experts with
 * routing by softplus. Layers have no compressor, one with an indexer whose windows overlap, or one of long windows. The first
 * layers route by token. A folder has the names of the first release.
 */
#include "model/families/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define NAMES                                                                                      \
    .emb = {"token_embd", "model.embed"}, .norm = {"output_norm", "model.norm"},                   \
    .head = {"output", "=head.weight"},                                                            \
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.ffn_norm"},                                   \
    .router = {"blk.%d.ffn_gate_inp", "=model.layers.%d.ffn.gate.weight"},                         \
    .gate_exp = {"blk.%d.ffn_gate_exps", "model.layers.%d.ffn.experts.%d.w1"},                     \
    .up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.ffn.experts.%d.w3"},                         \
    .down_exp = {"blk.%d.ffn_down_exps", "model.layers.%d.ffn.experts.%d.w2"},                     \
    .gate_shared = {"blk.%d.ffn_gate_shexp", "model.layers.%d.ffn.shared_experts.w1"},             \
    .up_shared = {"blk.%d.ffn_up_shexp", "model.layers.%d.ffn.shared_experts.w3"},                 \
    .down_shared = {"blk.%d.ffn_down_shexp", "model.layers.%d.ffn.shared_experts.w2"}

/* Layers that route by token have no bias of the choice. A folder calls that bias the router's. */
static const struct decoder_names hash_names = {NAMES};
static const struct decoder_names names = {
    NAMES, .choice_bias = {"=blk.%d.exp_probs_b.bias", "=model.layers.%d.ffn.gate.bias"}};

#define ATTN "model.layers.%d.attn."
static const struct tensor_name attn_norm = {"blk.%d.attn_norm", "model.layers.%d.attn_norm"},
                                q_a = {"blk.%d.attn_q_a", ATTN "wq_a"},
                                q_b = {"blk.%d.attn_q_b", ATTN "wq_b"},
                                q_norm = {"blk.%d.attn_q_a_norm", ATTN "q_norm"},
                                kv = {"blk.%d.attn_kv", ATTN "wkv"},
                                kv_norm = {"blk.%d.attn_kv_a_norm", ATTN "kv_norm"},
                                o_a = {"blk.%d.attn_output_a", ATTN "wo_a"},
                                o_b = {"blk.%d.attn_output_b", ATTN "wo_b"},
                                sinks = {"blk.%d.attn_sinks", "=" ATTN "attn_sink"},
                                index_q = {"blk.%d.indexer.attn_q_b", ATTN "indexer.wq_b"},
                                index_w = {"blk.%d.indexer.proj", ATTN "indexer.weights_proj"},
                                by_token = {"blk.%d.ffn_gate_tid2eid",
                                            "=model.layers.%d.ffn.gate.tid2eid"};

struct compressor_names {
    struct tensor_name kv, gate, bias, norm;
};
#define COMPRESSOR(gguf, hf)                                                                       \
    {                                                                                              \
        .kv = {"blk.%d." gguf "_kv", ATTN hf ".wkv"},                                              \
        .gate = {"blk.%d." gguf "_gate", ATTN hf ".wgate"},                                        \
        .bias = {"blk.%d." gguf "_ape", "=" ATTN hf ".ape"},                                       \
        .norm = {"blk.%d." gguf "_norm", ATTN hf ".norm"},                                         \
    }
static const struct compressor_names of_keys = COMPRESSOR("attn_compressor", "compressor"),
                                     of_index =
                                         COMPRESSOR("indexer_compressor", "indexer.compressor");

struct hyper_names {
    struct tensor_name w, base, scale;
};
static const struct hyper_names hypers[] = {
    {{"blk.%d.hc_attn_fn", "=model.layers.%d.hc_attn_fn"},
     {"blk.%d.hc_attn_base", "=model.layers.%d.hc_attn_base"},
     {"blk.%d.hc_attn_scale", "=model.layers.%d.hc_attn_scale"}},
    {{"blk.%d.hc_ffn_fn", "=model.layers.%d.hc_ffn_fn"},
     {"blk.%d.hc_ffn_base", "=model.layers.%d.hc_ffn_base"},
     {"blk.%d.hc_ffn_scale", "=model.layers.%d.hc_ffn_scale"}}};
static const struct hyper_names of_head = {{"output_hc_fn", "=hc_head_fn"},
                                           {"output_hc_base", "=hc_head_base"},
                                           {"output_hc_scale", "=hc_head_scale"}};

static const struct decoder decoder = {.names = &names, .latent = true},
                            hash_decoder = {.names = &hash_names, .latent = true};

/* The rate of each layer: a list, or the kinds of layers and a rate for each kind. */
static bool read_rates(const struct meta_reader *in)
{
    struct config *c = in->c;
    const json_t *list = reader_get(in->hf, "compress_ratios", NULL);
    const json_t *types = reader_get(in->hf, "layer_types", NULL);
    const json_t *rates = reader_get(in->hf, "compress_rates", NULL);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        const json_t *v = list   ? json_array_get(list, (size_t)i)
                          : type ? json_object_get(rates, type)
                                 : NULL;
        bool none = !list && type && !strcmp(type, "sliding_attention");
        double rate = none ? 0 : json_is_integer(v) ? (double)json_integer_value(v) : -1;
        if (!reader_range(in, "config.json: compress_ratios", rate, 0, 1 << 16))
            return false;
        c->compress_rate[i] = (int)rate;
    }
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int window = 0, rounds = 0;
    double limit = 0, theta = 10000;
    c->compress_theta = 160000;
    const char *score = json_string_value(reader_get(in->hf, "scoring_func", NULL));
    if (score && strcmp(score, "sqrtsoftplus") != 0)
        return error_set(
            in->err, "%s: config.json: scoring_func \"%.40s\" is not supported (sqrtsoftplus is)",
            in->f->path, score);
    double scale = 1;
    int shared = 0;
    c->norm_topk = true;
    if (!reader_int(in, "n_routed_experts", NULL, 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, true,
                    &c->n_expert_used) ||
        !reader_int(in, "moe_intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff_exp) ||
        !reader_int(in, "n_shared_experts", NULL, 0, 64, false, &shared) ||
        !reader_number(in, in->hf, "routed_scaling_factor", 1e-3, 1e3, false, &scale) ||
        !reader_bool(in, "norm_topk_prob", &c->norm_topk) ||
        !reader_int(in, "q_lora_rank", NULL, 1, 1 << 14, true, &c->q_rank) ||
        !reader_int(in, "qk_rope_head_dim", NULL, 2, 1 << 12, true, &c->n_rot) ||
        !reader_int(in, "o_groups", NULL, 1, 1 << 12, true, &c->o_groups) ||
        !reader_int(in, "o_lora_rank", NULL, 1, 1 << 14, true, &c->o_rank) ||
        !reader_int(in, "sliding_window", NULL, 1, 1 << 20, true, &window) ||
        !reader_int(in, "hc_mult", NULL, 2, STREAMS_MAX, true, &c->n_streams) ||
        !reader_int(in, "hc_sinkhorn_iters", NULL, 1, 1000, true, &rounds) ||
        !reader_number(in, in->hf, "hc_eps", 0, 1, true, &c->hyper_offset) ||
        !reader_number(in, in->hf, "swiglu_limit", 1e-6, 1e6, true, &limit) ||
        !reader_number(in, in->hf, "rope_theta", 1, 1e12, false, &theta) ||
        !reader_number(in, in->hf, "compress_rope_theta", 1, 1e12, false, &c->compress_theta) ||
        !reader_int(in, "index_n_heads", NULL, 1, 1024, true, &c->index.heads) ||
        !reader_int(in, "index_head_dim", NULL, 1, 1024, true, &c->index.dim) ||
        !reader_int(in, "index_topk", NULL, 1, 1 << 20, true, &c->index.chosen) || !read_rates(in))
        return false;
    c->tied = !build_present(in->f, c, &names.head, 0);
    c->rope.theta = theta;
    c->expert_scale = (float)scale;
    c->n_ff_shared = shared * c->n_ff_exp;
    c->hyper_rounds = rounds;
    for (int i = 0; i < c->n_layers; i++) {
        c->expert_limit[i] = (float)limit;
        c->window[i] = window;
        c->is_moe[i] = true;
    }
    return true;
}

static bool read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    const struct meta *m;
    char key[96];
    snprintf(key, sizeof key, "%s.attention.compress_ratios", c->arch_name);
    m = tensorfile_meta(in->f, key);
    for (int i = 0; i < c->n_layers; i++) {
        double rate = -1; /* the list may be longer */
        if (!m || m->type != META_ARRAY || !meta_array_number(&m->v.a, (size_t)i, &rate) ||
            !reader_range(in, key, rate, 0, 1 << 16))
            return in->err->msg[0] ? false
                                   : error_set(in->err, "%s: %s: expected a number for each layer",
                                               in->f->path, key);
        c->compress_rate[i] = (int)rate;
        if (!c->is_moe[i])
            return error_set(in->err, "%s: layer %d: no experts", in->f->path, i);
    }
    return reader_gguf_int(in, "attention.q_lora_rank", 1, 1 << 14, true, &c->q_rank) &&
           reader_gguf_int(in, "attention.output_group_count", 1, 1 << 12, true, &c->o_groups) &&
           reader_gguf_int(in, "attention.output_lora_rank", 1, 1 << 14, true, &c->o_rank) &&
           reader_gguf_int(in, "hyper_connection.count", 2, STREAMS_MAX, true, &c->n_streams) &&
           reader_gguf_int(in, "hyper_connection.sinkhorn_iterations", 1, 1000, true,
                           &c->hyper_rounds) &&
           reader_gguf_float(in, "hyper_connection.epsilon", 0, 1, true, &c->hyper_offset) &&
           reader_gguf_float(in, "attention.compress_rope_freq_base", 1, 1e12, true,
                             &c->compress_theta) &&
           reader_gguf_layer_floats(in, "swiglu_clamp_exp", 1e-6, 1e6, c->expert_limit) &&
           reader_gguf_layer_floats(in, "swiglu_clamp_shexp", 0, 1e6, c->shared_limit) &&
           reader_gguf_int(in, "attention.indexer.head_count", 1, 1024, true, &c->index.heads) &&
           reader_gguf_int(in, "attention.indexer.key_length", 1, 1024, true, &c->index.dim) &&
           reader_gguf_int(in, "attention.indexer.top_k", 1, 1 << 20, true, &c->index.chosen);
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &decoder) || !(in->f->is_gguf ? read_gguf(in) : read_hf(in)))
        return false;
    while (c->n_hash < c->n_layers && build_find(in->f, c, &by_token, c->n_hash, 0, "weight"))
        c->n_hash++;
    c->router = ROUTER_SOFTPLUS;
    c->n_kv_heads = 1;
    if (c->rope.kind != ROPE_PLAIN && c->rope.kind != ROPE_YARN)
        return error_set(in->err, "%s: RoPE of %s is plain or YaRN", in->f->path, c->arch_name);
    c->rope.attn_factor = 1;
    if (c->n_heads % c->o_groups)
        return error_set(in->err, "%s: %d heads do not divide by %d groups of outputs", in->f->path,
                         c->n_heads, c->o_groups);
    if (c->n_rot > c->head_dim || c->n_rot > c->index.dim)
        return error_set(in->err, "%s: heads of %d and %d have no room for %d rotary dimensions",
                         in->f->path, c->head_dim, c->index.dim, c->n_rot);
    if ((int64_t)c->n_streams * c->n_embd > 1 << 20 || (int64_t)c->o_groups * c->o_rank > 1 << 20)
        return error_set(in->err, "%s: %d parts of %d, %d groups of %d are too wide", in->f->path,
                         c->n_streams, c->n_embd, c->o_groups, c->o_rank);
    return true;
}

static struct compressor build_compressor(struct net_builder *b, const struct compressor_names *n,
                                          int i, int dim, bool overlap)
{
    const struct config *c = b->c;
    int rate = c->compress_rate[i], width = (overlap ? 2 : 1) * dim;
    return (struct compressor){
        .rate = rate,
        .dim = dim,
        .overlap = overlap,
        .w = build_weight(b, WEIGHT_LINEAR, i, c->n_embd, 1, 2,
                          (const struct weight_rows[]){{.name = &n->kv, .n = width},
                                                       {.name = &n->gate, .n = width}}),
        .bias = build_table(b, i, &n->bias, rate, width),
        .norm = build_rms(b, i, &n->norm, dim)};
}

static void build_mixer(struct net_builder *b, int i, const struct rope *ropes, struct mixer *m)
{
    const struct config *c = b->c;
    int H = c->n_heads, D = c->head_dim, G = c->o_groups, R = c->o_rank;
    const struct weight_rows group = {.name = &o_a, .n = R, .stride = R};
    *m = (struct mixer){.kind = MIXER_COMPRESSED};
    m->block.in = build_rms(b, i, &attn_norm, c->n_embd);
    m->compressed = (struct compressed){.n_heads = H,
                                        .dim = D,
                                        .n_groups = G,
                                        .window = c->window[i],
                                        .q_rank = c->q_rank,
                                        .head_norm = {.kind = NORM_RMS, .eps = c->norm_eps},
                                        .rope = ropes ? &ropes[c->compress_rate[i] > 0] : NULL,
                                        .scale = 1.0f / sqrtf((float)D)};
    struct compressed *l = &m->compressed;
    l->wqa = build_matrix(b, WEIGHT_LINEAR, i, &q_a, c->n_embd, c->q_rank);
    l->q_norm = build_rms(b, i, &q_norm, c->q_rank);
    l->wqb = build_matrix(b, WEIGHT_LINEAR, i, &q_b, c->q_rank, H * D);
    l->wkv = build_matrix(b, WEIGHT_LINEAR, i, &kv, c->n_embd, D);
    l->kv_norm = build_rms(b, i, &kv_norm, D);
    l->woa = build_weight(b, WEIGHT_HEADS, i, H / G * D, G, 1, &group);
    b->specs[b->n_specs - 1].as_is = true;
    l->wob = build_matrix(b, WEIGHT_LINEAR, i, &o_b, G * R, c->n_embd);
    l->sinks = build_vector(b, i, &sinks, H, (struct adjust){0});
    if (!c->compress_rate[i])
        return;
    bool chooses = build_has(b, &index_q, i);
    l->compressor = build_compressor(b, &of_keys, i, D, chooses);
    if (!chooses)
        return;
    l->index = (struct indexer){
        .n_heads = c->index.heads,
        .dim = c->index.dim,
        .n_chosen = c->index.chosen,
        .wq = build_matrix(b, WEIGHT_LINEAR, i, &index_q, c->q_rank, c->index.heads * c->index.dim),
        .ww = build_matrix(b, WEIGHT_LINEAR, i, &index_w, c->n_embd, c->index.heads),
        .rope = l->rope,
        .rope_last = true,
        .compressor = build_compressor(b, &of_index, i, c->index.dim, true)};
}

static void build_mlp(struct net_builder *b, int i, struct mlp *m)
{
    const struct config *c = b->c;
    bool by_hash = i < c->n_hash;
    decoder_mlp(b, by_hash ? &hash_decoder : &decoder, i, m);
    m->experts.act = m->dense.act = ACT_SILU_CLAMP;
    m->experts.limit = c->expert_limit[i];
    m->dense.limit = c->shared_limit[i] != 0 ? c->shared_limit[i] : c->expert_limit[i];
    if (by_hash)
        m->router.by_token =
            build_numbers(b, i, &by_token, c->n_vocab, c->n_expert_used, c->n_expert);
}

static struct hyper build_hyper(struct net_builder *b, const struct hyper_names *n, int i,
                                bool head)
{
    const struct config *c = b->c;
    int N = c->n_streams, outputs = head ? N : N * (N + 2);
    return (struct hyper){.w = build_matrix(b, WEIGHT_ROUTER, i, &n->w, N * c->n_embd, outputs),
                          .base = build_vector(b, i, &n->base, outputs, (struct adjust){0}),
                          .scale = build_vector(b, i, &n->scale, head ? 1 : 3, (struct adjust){0}),
                          .eps = c->norm_eps,
                          .offset = (float)c->hyper_offset,
                          .rounds = c->hyper_rounds};
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    struct rope_config plain = {.theta = c->rope.theta, .factor = 1, .partial = 1},
                       long_range = c->rope;
    long_range.theta = c->compress_theta;
    const struct rope_config *const configs[] = {&plain, &long_range};
    const struct rope *ropes = build_ropes(b, 2, configs, (const int[]){c->n_rot, c->n_rot});
    decoder_ends(b, &decoder);
    b->net->streams =
        (struct streams){.n = c->n_streams, .head = build_hyper(b, &of_head, 0, true)};
    for (int i = 0; i < c->n_layers && !b->failed; i++) {
        struct layer *l = &b->net->layers[i];
        build_mixer(b, i, ropes, &l->mixer);
        build_mlp(b, i, &l->mlp);
        for (int k = 0; k < 2; k++)
            l->hyper[k] = build_hyper(b, &hypers[k], i, false);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    const struct {
        const char *key;
        int v;
    } numbers[] = {{"attention.q_lora_rank", c->q_rank},
                   {"attention.output_group_count", c->o_groups},
                   {"attention.output_lora_rank", c->o_rank},
                   {"attention.indexer.head_count", c->index.heads},
                   {"attention.indexer.key_length", c->index.dim},
                   {"attention.indexer.top_k", c->index.chosen},
                   {"hash_layer_count", c->n_hash},
                   {"hyper_connection.count", c->n_streams},
                   {"hyper_connection.sinkhorn_iterations", c->hyper_rounds}};
    char key[96];
    uint32_t rates[CONFIG_MAX_LAYERS];
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(key, sizeof key, "deepseek4.%s", numbers[i].key);
        gguf_set_u32(w, key, (uint32_t)numbers[i].v);
    }
    for (int i = 0; i < c->n_layers; i++)
        rates[i] = (uint32_t)c->compress_rate[i];
    gguf_set_array(w, "deepseek4.attention.compress_ratios", META_U32, rates, (size_t)c->n_layers);
    gguf_set_f32(w, "deepseek4.attention.compress_rope_freq_base", (float)c->compress_theta);
    gguf_set_f32(w, "deepseek4.hyper_connection.epsilon", (float)c->hyper_offset);
    gguf_set_array(w, "deepseek4.swiglu_clamp_exp", META_F32, c->expert_limit, (size_t)c->n_layers);
}

/* Blocks that draft tokens. */
static bool spare(const struct config *c, const char *tensor)
{
    (void)c;
    return !strncmp(tensor, "mtp.", 4);
}

const struct model_family family_deepseek4 = {
    .name = "deepseek4",
    .hf = "deepseek_v4",
    .hf_class = "DeepseekV4ForCausalLM",
    .hf_embed = "embed",
    .read = read,
    .build = build,
    .write = write,
    .spare = spare,
};
