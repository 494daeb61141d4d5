/*
 * Llama 4: attention in chunks with RoPE over adjacent pairs and QK-norm without gains, every fourth layer full, without
 * RoPE and with a temperature. Experts of Scout in every layer, of Maverick in every second; their weight multiplies
 * their input. Readers of GGUF assume Scout's and Maverick's chunks and temperature; other values have keys of ours.
 */
#include "model/families/family.h"

#include <string.h>

#define EXPERTS "model.layers.%d.feed_forward.experts"
#define SHARED  "model.layers.%d.feed_forward.shared_expert."

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_ATTENTION,
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.post_attention_layernorm"},
    .gate = {"blk.%d.ffn_gate", "model.layers.%d.feed_forward.gate_proj"},
    .up = {"blk.%d.ffn_up", "model.layers.%d.feed_forward.up_proj"},
    .down = {"blk.%d.ffn_down", "model.layers.%d.feed_forward.down_proj"},
    .router = {"blk.%d.ffn_gate_inp", "model.layers.%d.feed_forward.router"},
    .gate_shared = {"blk.%d.ffn_gate_shexp", SHARED "gate_proj"},
    .up_shared = {"blk.%d.ffn_up_shexp", SHARED "up_proj"},
    .down_shared = {"blk.%d.ffn_down_shexp", SHARED "down_proj"}};

static const struct tensor_name gate = {"=blk.%d.ffn_gate_exps.weight",
                                        "=" EXPERTS ".gate_up_proj"},
                                up = {"=blk.%d.ffn_up_exps.weight", "=" EXPERTS ".gate_up_proj"},
                                down = {"=blk.%d.ffn_down_exps.weight", "=" EXPERTS ".down_proj"};

static const struct decoder decoder = {.names = &names, .router = ROUTER_SIGMOID};

enum { CHUNK = 8192, NO_ROPE_STEP = 4 };

static void choose_layers(struct config *c, int chunk)
{
    for (int i = 0; i < c->n_layers; i++) {
        c->no_rope[i] = chunk && (i + 1) % NO_ROPE_STEP == 0;
        c->window[i] = c->no_rope[i] ? 0 : chunk;
    }
}

static bool read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int chunk = CHUNK, length = CHUNK;
    double beta = 0.1;
    c->qk_norm = c->n_expert != 128; /* Maverick has none */
    if (!reader_gguf_int(in, "attention.sliding_window", 0, 1 << 30, false, &chunk) ||
        !reader_gguf_int(in, "attention.temperature_length", 1, 1 << 30, false, &length) ||
        !reader_gguf_float(in, "attention.temperature_scale", 0, 1e3, false, &beta) ||
        !reader_gguf_bool(in, "attention.qk_norm", &c->qk_norm))
        return false;
    c->temp_beta = chunk ? (float)beta : 0;
    c->temp_len = length;
    c->n_ff_shared = c->n_ff_exp;
    choose_layers(c, chunk);
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    int chunk = CHUNK, length = CHUNK, step = 1;
    double beta = 0.1;
    bool warm = true, norm = true;
    if (!reader_int(in, "attention_chunk_size", NULL, 0, 1 << 30, false, &chunk) ||
        !reader_int(in, "floor_scale", NULL, 1, 1 << 30, false, &length) ||
        !reader_int(in, "interleave_moe_layer_step", NULL, 1, CONFIG_MAX_LAYERS, false, &step) ||
        !reader_int(in, "intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff_exp) ||
        !reader_int(in, "intermediate_size_mlp", NULL, 1, 1 << 24, true, &c->n_ff) ||
        !reader_int(in, "num_local_experts", NULL, 1, 4096, true, &c->n_expert) ||
        !reader_int(in, "num_experts_per_tok", NULL, 1, CONFIG_MAX_EXPERTS_USED, true,
                    &c->n_expert_used) ||
        !reader_number(in, in->hf, "attn_scale", 0, 1e3, false, &beta) ||
        !reader_bool(in, "attn_temperature_tuning", &warm) ||
        !reader_bool(in, "use_qk_norm", &norm))
        return false;
    c->qk_norm = norm;
    c->n_ff_shared = c->n_ff_exp;
    c->temp_beta = warm ? (float)beta : 0;
    c->temp_len = length;
    choose_layers(c, chunk);
    const json_t *ropes = reader_get(in->hf, "no_rope_layers", NULL);
    for (int i = 0; i < c->n_layers; i++) {
        const json_t *rope = json_array_get(ropes, (size_t)i);
        if (rope && (json_integer_value(rope) == 0) != c->no_rope[i])
            return error_set(in->err,
                             "%s: config.json: no_rope_layers: entry %d: only every fourth layer "
                             "without RoPE is supported",
                             in->f->path, i);
        c->is_moe[i] = (i + 1) % step == 0;
    }
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &decoder) || !(in->f->is_gguf ? read_gguf(in) : read_hf(in)))
        return false;
    c->router = ROUTER_SIGMOID;
    c->norm_topk = false;
    c->temp_offset = 1;
    return true;
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    int F = c->n_ff_exp, E = c->n_embd;
    decoder_build(b, &decoder);
    for (int i = 0; i < c->n_layers && !b->failed; i++) {
        struct layer *l = &b->net->layers[i];
        struct attention *a = &l->mixer.attention;
        a->chunked = a->window > 0;
        if (!c->no_rope[i])
            a->temp_beta = 0;
        if (!c->no_rope[i] && c->qk_norm) /* before RoPE, which keeps the length, or after */
            a->q_norm = a->k_norm = (struct norm){.kind = NORM_RMS, .eps = c->norm_eps};
        if (!c->is_moe[i])
            continue;
        const struct weight_rows two[] = {
            {.name = &gate, .n = F, .tensor_rows = 2 * F, .transposed = true},
            {.name = &up, .n = F, .first = F, .tensor_rows = 2 * F, .transposed = true}};
        const struct weight_rows one = {
            .name = &down, .n = E, .tensor_rows = E, .transposed = true};
        l->mlp.router.weighs_input = true;
        l->mlp.experts.gate_up = build_weight(b, WEIGHT_EXPERTS, i, E, c->n_expert, 2, two);
        l->mlp.experts.down = build_weight(b, WEIGHT_EXPERTS, i, F, c->n_expert, 1, &one);
        l->mlp.dense.gate_up =
            build_weight(b, WEIGHT_LINEAR, i, E, 1, 2,
                         (const struct weight_rows[]){{.name = &names.gate_shared, .n = F},
                                                      {.name = &names.up_shared, .n = F}});
        l->mlp.dense.down = build_matrix(b, WEIGHT_LINEAR, i, &names.down_shared, F, E);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    int step = 1;
    while (step < c->n_layers && !c->is_moe[step - 1])
        step++;
    gguf_set_u32(w, "llama4.interleave_moe_layer_step", (uint32_t)step);
    if (c->qk_norm != (c->n_expert != 128))
        gguf_set_bool(w, "llama4.attention.qk_norm", c->qk_norm);
    if (c->temp_len != CHUNK)
        gguf_set_u32(w, "llama4.attention.temperature_length", (uint32_t)c->temp_len);
    if (c->temp_beta != 0.1f)
        gguf_set_f32(w, "llama4.attention.temperature_scale", c->temp_beta);
    if (!c->window[0])
        gguf_set_u32(w, "llama4.attention.sliding_window", 0);
}

const struct model_family family_llama4 = {
    .name = "llama4",
    .hf = "llama4_text",
    .hf_class = "Llama4ForConditionalGeneration",
    .interleaved_qk = true,
    .interleaved_folder = true,
    .own_windows = true,
    .read = read,
    .build = build,
    .write = write,
};
