/*
 * Plain decoders: RMS norm, attention with RoPE, RMS norm, a gated mlp or experts chosen by softmax.
 * Their metadata in both kinds of file, their tensors' names, and their layers. Families say what is
 * particular in struct decoder.
 */
#include "base/mem.h"
#include "model/families/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static bool read_gguf(const struct reader *in)
{
    struct config *c = in->c;
    double eps = 1e-6, scale = 1;
    int window = 0;
    if (!reader_gguf_int(in, "block_count", 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !reader_gguf_int(in, "embedding_length", 1, 1 << 20, true, &c->n_embd) ||
        !reader_gguf_int(in, "attention.head_count", 1, 1 << 14, true, &c->n_heads))
        return false;
    c->n_kv_heads = c->n_heads;
    c->head_dim = c->n_embd / c->n_heads;
    c->context = 2048;
    if (!reader_gguf_int(in, "attention.head_count_kv", 1, 1 << 14, false, &c->n_kv_heads) ||
        !reader_gguf_int(in, "attention.key_length", 1, 1 << 14, false, &c->head_dim) ||
        !reader_gguf_int(in, "feed_forward_length", 0, 1 << 24, false, &c->n_ff) ||
        !reader_gguf_int(in, "context_length", 1, 1 << 30, false, &c->context) ||
        !reader_gguf_float(in, "attention.layer_norm_rms_epsilon", 0, 1, true, &eps) ||
        !reader_gguf_int(in, "expert_count", 0, 4096, false, &c->n_expert) ||
        !reader_gguf_int(in, "expert_used_count", 0, CONFIG_MAX_EXPERTS_USED, c->n_expert > 0,
                         &c->n_expert_used) ||
        !reader_gguf_int(in, "attention.sliding_window", 0, 1 << 30, false, &window))
        return false;
    int v_dim = c->head_dim;
    if (!reader_gguf_int(in, "attention.value_length", 1, 1 << 14, false, &v_dim))
        return false;
    if (v_dim != c->head_dim)
        return error_set(in->err, "%s: %s.attention.value_length: %d differs from key_length %d",
                         in->f->path, c->arch_name, v_dim, c->head_dim);
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
        c->window[i] = window;
    }
    return rope_read_gguf(in);
}

static bool read_layers(const struct reader *in, const struct decoder *d)
{
    struct config *c = in->c;
    int step = 1, window = 0, full_layers = 0;
    bool use_window = d->windows_unasked;
    if (!reader_int(in, "decoder_sparse_step", NULL, 1, 1 << 20, false, &step) ||
        !reader_int(in, "sliding_window", NULL, 0, 1 << 30, false, &window) ||
        !reader_int(in, "max_window_layers", NULL, 0, 1 << 20, false, &full_layers) ||
        !reader_bool(in, "use_sliding_window", &use_window))
        return false;
    use_window &= d->windows;
    if (d->windows_all)
        full_layers = 0;
    const json_t *types = reader_get(in->f->config, "layer_types", NULL);
    if (types && json_array_size(types) != (size_t)c->n_layers)
        return error_set(in->err, "%s: config.json: layer_types: %zu entries for %d layers",
                         in->f->path, json_array_size(types), c->n_layers);
    const json_t *dense = reader_get(in->f->config, "mlp_only_layers", NULL);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = types ? json_string_value(json_array_get(types, (size_t)i)) : NULL;
        bool slides = type ? !strcmp(type, "sliding_attention") : i >= full_layers;
        c->window[i] = use_window && slides ? window : 0;
        c->is_moe[i] = c->n_expert > 0 && (i + 1) % step == 0;
        for (size_t j = 0; j < json_array_size(dense); j++)
            if (json_integer_value(json_array_get(dense, j)) == i)
                c->is_moe[i] = false;
    }
    return true;
}

static bool read_hf(const struct reader *in, const struct decoder *d)
{
    struct config *c = in->c;
    const char *act = json_string_value(json_object_get(in->f->config, "hidden_act"));
    if (act && strcmp(act, "silu"))
        return error_set(in->err,
                         "%s: config.json: hidden_act \"%.40s\" is not supported (silu is)",
                         in->f->path, act);

    if (!reader_int(in, "num_hidden_layers", NULL, 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !reader_int(in, "hidden_size", NULL, 1, 1 << 20, true, &c->n_embd) ||
        !reader_int(in, "num_attention_heads", NULL, 1, 1 << 14, true, &c->n_heads) ||
        !reader_int(in, "vocab_size", NULL, 1, 1 << 24, true, &c->n_vocab))
        return false;
    c->n_kv_heads = c->n_heads;
    c->head_dim = c->n_embd / c->n_heads;
    c->context = 2048;
    double eps = 1e-6;
    c->tied = false;
    if (!reader_int(in, "num_key_value_heads", NULL, 1, 1 << 14, false, &c->n_kv_heads) ||
        !reader_int(in, "head_dim", NULL, 1, 1 << 14, false, &c->head_dim) ||
        !reader_int(in, "intermediate_size", NULL, 0, 1 << 24, false, &c->n_ff) ||
        !reader_int(in, "max_position_embeddings", NULL, 1, 1 << 30, false, &c->context) ||
        !reader_number(in, in->f->config, "rms_norm_eps", 0, 1, false, &eps) ||
        !reader_bool(in, "tie_word_embeddings", &c->tied) ||
        !reader_int(in, "num_experts", "num_local_experts", 1, 4096, d->experts, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, d->experts,
                    &c->n_expert_used) ||
        !reader_int(in, "moe_intermediate_size", NULL, 1, 1 << 24, d->experts, &c->n_ff_exp) ||
        !reader_bool(in, "norm_topk_prob", &c->norm_topk))
        return false;
    if (!d->experts)
        c->n_expert = c->n_expert_used = c->n_ff_exp = 0;
    c->norm_eps = (float)eps;
    c->expert_scale = 1;
    c->n_rot = c->head_dim;
    if (!tensorfile_find(in->f, "lm_head.weight"))
        c->tied = true;
    return read_layers(in, d) && rope_read_hf(in);
}

bool decoder_read(const struct reader *in, const struct decoder *d)
{
    return in->f->is_gguf ? read_gguf(in) : read_hf(in, d);
}

static const struct name emb = {"token_embd", "model.embed_tokens"}, head = {"output", "lm_head"},
                         norm = {"output_norm", "model.norm"};
static const struct name attn_norm = {"blk.%d.attn_norm", "model.layers.%d.input_layernorm"},
                         q = {"blk.%d.attn_q", "model.layers.%d.self_attn.q_proj"},
                         k = {"blk.%d.attn_k", "model.layers.%d.self_attn.k_proj"},
                         v = {"blk.%d.attn_v", "model.layers.%d.self_attn.v_proj"},
                         o = {"blk.%d.attn_output", "model.layers.%d.self_attn.o_proj"},
                         q_norm = {"blk.%d.attn_q_norm", "model.layers.%d.self_attn.q_norm"},
                         k_norm = {"blk.%d.attn_k_norm", "model.layers.%d.self_attn.k_norm"};
static const struct name ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.post_attention_layernorm"},
                         gate = {"blk.%d.ffn_gate", "model.layers.%d.mlp.gate_proj"},
                         up = {"blk.%d.ffn_up", "model.layers.%d.mlp.up_proj"},
                         down = {"blk.%d.ffn_down", "model.layers.%d.mlp.down_proj"};
static const struct name router = {"blk.%d.ffn_gate_inp", "model.layers.%d.mlp.gate"},
                         gate_exp = {"blk.%d.ffn_gate_exps",
                                     "model.layers.%d.mlp.experts.%d.gate_proj"},
                         up_exp = {"blk.%d.ffn_up_exps", "model.layers.%d.mlp.experts.%d.up_proj"},
                         down_exp = {"blk.%d.ffn_down_exps",
                                     "model.layers.%d.mlp.experts.%d.down_proj"};

static void build_mixer(struct builder *b, const struct decoder *d, int i, const struct rope *rope,
                        struct mixer *m)
{
    const struct config *c = b->c;
    int D = c->head_dim, woven = b->f->is_gguf && c->family->weaves_qk && D % 2 == 0 ? D : 0;
    int n_q = c->n_heads * D, n_kv = c->n_kv_heads * D;
    const struct rows qkv[] = {{&q, n_q, woven}, {&k, n_kv, woven}, {&v, n_kv, 0}};
    *m = (struct mixer){.kind = MIXER_ATTENTION};
    m->block.in = build_rms(b, i, &attn_norm, c->n_embd);
    m->attention = (struct attention){
        .n_heads = c->n_heads,
        .n_kv_heads = c->n_kv_heads,
        .k_dim = D,
        .v_dim = D,
        .rope = rope,
        .scale = 1.0f / sqrtf((float)D),
        .window = c->window[i],
        .wqkv = build_weight(b, WEIGHT_LINEAR, i, c->n_embd, 1, 3, qkv),
        .wo = build_matrix(b, WEIGHT_LINEAR, i, &o, n_q, c->n_embd),
    };
    if (d->qk_norm) {
        m->attention.q_norm = build_rms(b, i, &q_norm, D);
        m->attention.k_norm = build_rms(b, i, &k_norm, D);
    }
}

static void build_mlp(struct builder *b, int i, struct mlp *m)
{
    const struct config *c = b->c;
    int F = c->n_ff, Fe = c->n_ff_exp;
    *m = (struct mlp){.block.in = build_rms(b, i, &ffn_norm, c->n_embd)};
    if (!c->is_moe[i]) {
        m->dense.gate_up = build_weight(b, WEIGHT_LINEAR, i, c->n_embd, 1, 2,
                                        (const struct rows[]){{&gate, F, 0}, {&up, F, 0}});
        m->dense.down = build_matrix(b, WEIGHT_LINEAR, i, &down, F, c->n_embd);
        return;
    }
    m->router =
        (struct router){.kind = ROUTER_SOFTMAX,
                        .w = build_matrix(b, WEIGHT_ROUTER, i, &router, c->n_embd, c->n_expert),
                        .n_used = c->n_expert_used,
                        .renorm = c->norm_topk,
                        .scale = c->expert_scale};
    m->experts.gate_up = build_weight(b, WEIGHT_EXPERTS, i, c->n_embd, c->n_expert, 2,
                                      (const struct rows[]){{&gate_exp, Fe, 0}, {&up_exp, Fe, 0}});
    m->experts.down = build_weight(b, WEIGHT_EXPERTS, i, Fe, c->n_expert, 1,
                                   (const struct rows[]){{&down_exp, c->n_embd, 0}});
}

void decoder_build(struct builder *b, const struct decoder *d)
{
    const struct config *c = b->c;
    struct network *net = b->net;
    const struct rope *rope = build_rope(b);
    net->embed.tokens =
        build_matrix(b, c->tied ? WEIGHT_HEAD : WEIGHT_EMBED, 0, &emb, c->n_embd, c->n_vocab);
    for (int i = 0; i < c->n_layers; i++) {
        build_mixer(b, d, i, rope, &net->layers[i].mixer);
        build_mlp(b, i, &net->layers[i].mlp);
    }
    net->head.norm = build_rms(b, 0, &norm, c->n_embd);
    net->head.w =
        c->tied ? net->embed.tokens : build_matrix(b, WEIGHT_HEAD, 0, &head, c->n_embd, c->n_vocab);
}
