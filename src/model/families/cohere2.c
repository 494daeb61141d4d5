/*
 * Command R7B, Command A and their mixtures of experts: the mlp runs in parallel with attention, on the same LayerNorm.
 * Layers with a window have RoPE over adjacent pairs, full ones none. The mixtures begin with dense layers, which all
 * have RoPE; their shared expert and the routed ones are averaged.
 */
#include "model/families/family.h"

#include <stdio.h>
#include <string.h>

static const struct decoder_names names = {DECODER_ENDS, DECODER_ATTENTION, DECODER_FFN};
static const struct decoder_names routed = {DECODER_ENDS, DECODER_ATTENTION, DECODER_FFN,
                                            DECODER_EXPERTS, DECODER_SHARED};

#define COHERE                                                                                     \
    .eps_key = "layer_norm_eps", .parallel = true, .windows = true, .windows_unasked = true,       \
    .windows_all = true, .window_period = 4

static const struct decoder decoder = {.names = &names, COHERE};
static const struct decoder mixture = {.names = &routed, .router = ROUTER_SIGMOID, COHERE};

static bool read_scale(const struct meta_reader *in)
{
    double scale = 1;
    if (in->f->is_gguf ? !reader_gguf_float(in, "logit_scale", 1e-6, 1e6, false, &scale)
                       : !reader_number(in, in->hf, "logit_scale", 1e-6, 1e6, false, &scale))
        return false;
    in->c->head_scale = (float)scale;
    return true;
}

static bool read_dense(const struct meta_reader *in)
{
    if (!decoder_read(in, &decoder) || !read_scale(in))
        return false;
    for (int i = 0; i < in->c->n_layers; i++)
        in->c->no_rope[i] = !in->c->window[i];
    return true;
}

/* Scores and weights of experts in config.json. */
static bool read_experts(const struct meta_reader *in)
{
    struct config *c = in->c;
    const char *select = json_string_value(reader_get(in->hf, "expert_selection_fn", NULL));
    const char *combine =
        json_string_value(reader_get(in->hf, "shared_expert_combination_strategy", NULL));
    c->n_ff_exp = c->n_ff;
    c->norm_topk = false;
    int shared = 0, dense = 0;
    if (!reader_int(in, "num_experts", NULL, 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, true,
                    &c->n_expert_used) ||
        !reader_int(in, "num_shared_experts", NULL, 0, 64, false, &shared) ||
        !reader_int(in, "first_k_dense_replace", NULL, 0, 1 << 20, false, &dense) ||
        !reader_int(in, "prefix_dense_intermediate_size", NULL, 1, 1 << 24, false, &c->n_ff) ||
        !reader_bool(in, "norm_topk_prob", &c->norm_topk))
        return false;
    if (select && strcmp(select, "sigmoid") != 0 && strcmp(select, "softmax") != 0)
        return error_set(in->err,
                         "%s: config.json: expert_selection_fn \"%.40s\" is not supported (sigmoid "
                         "and softmax are)",
                         in->f->path, select);
    if (combine && strcmp(combine, "average") != 0 && strcmp(combine, "sum") != 0)
        return error_set(in->err,
                         "%s: config.json: shared_expert_combination_strategy \"%.40s\" is not "
                         "supported (average and sum are)",
                         in->f->path, combine);
    c->router = select && !strcmp(select, "softmax") ? ROUTER_SOFTMAX : ROUTER_SIGMOID;
    c->n_ff_shared = shared * c->n_ff_exp;
    c->mlp_scale = shared && (!combine || !strcmp(combine, "average")) ? 0.5f : 1;
    const json_t *types = reader_get(in->hf, "mlp_layer_types", NULL);
    for (int i = 0; i < c->n_layers; i++) {
        const char *type = json_string_value(json_array_get(types, (size_t)i));
        c->is_moe[i] = type ? !strcmp(type, "sparse") : i >= dense;
    }
    return true;
}

static bool read_sparse(const struct meta_reader *in)
{
    struct config *c = in->c;
    int extra = 0;
    if (!decoder_read(in, &mixture) || !read_scale(in))
        return false;
    if (in->f->is_gguf) {
        if (!reader_gguf_int(in, "nextn_predict_layers", 0, c->n_layers - 1, false, &extra))
            return false;
        c->n_layers -= extra; /* blocks that draft tokens are not used */
        double scale = c->n_ff_shared ? 0.5 : 1;
        if (!reader_gguf_float(in, "expert_sum_scale", 1e-6, 1e6, false, &scale))
            return false;
        c->mlp_scale = (float)scale;
    } else if (!read_experts(in)) {
        return false;
    }
    for (int i = 0; i < c->n_layers; i++)
        c->no_rope[i] = !c->window[i] && c->is_moe[i];
    return true;
}

static void build_dense(struct net_builder *b)
{
    decoder_build(b, &decoder);
}

static void build_sparse(struct net_builder *b)
{
    decoder_build(b, &mixture);
    for (int i = 0; i < b->c->n_layers && !b->failed; i++)
        if (b->c->is_moe[i])
            b->net->layers[i].mlp.block.scale = b->c->mlp_scale;
}

static void write_dense(const struct config *c, struct gguf_writer *w)
{
    char key[96];
    snprintf(key, sizeof key, "%s.logit_scale", c->family->name);
    gguf_set_f32(w, key, c->head_scale);
    decoder_write_windows(c, w);
}

/* Readers average the shared expert and the others; a sum is ours to say. */
static void write_sparse(const struct config *c, struct gguf_writer *w)
{
    write_dense(c, w);
    decoder_write_dense(c, w);
    if (c->n_ff_shared)
        gguf_set_u32(w, "cohere2moe.expert_shared_feed_forward_length", (uint32_t)c->n_ff_shared);
    if (c->n_ff_shared && c->mlp_scale != 0.5f)
        gguf_set_f32(w, "cohere2moe.expert_sum_scale", c->mlp_scale);
}

const struct model_family family_cohere2 = {
    .name = "cohere2",
    .hf = "cohere2",
    .hf_class = "Cohere2ForCausalLM",
    .interleaved_qk = true,
    .interleaved_folder = true,
    .layer_norm = true,
    .own_windows = true,
    .read = read_dense,
    .build = build_dense,
    .write = write_dense,
};

const struct model_family family_cohere2_moe = {
    .name = "cohere2moe",
    .hf = "cohere2_moe",
    .hf_class = "Cohere2MoeForCausalLM",
    .interleaved_qk = true,
    .interleaved_folder = true,
    .layer_norm = true,
    .own_windows = true,
    .read = read_sparse,
    .build = build_sparse,
    .write = write_sparse,
};
