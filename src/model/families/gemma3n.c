/*
 * Gemma 3n: Gemma 4's blocks and per-layer embeddings, with a stream of several parts (AltUp), low-rank residuals of
 * attention (LAuReL), and in the first layers a Gaussian top-k of hidden units. Text only: the image and audio towers
 * are ignored.
 */
#include "model/families/family.h"

#include <math.h>

#define LAYER "model.layers.%d."

static const struct tensor_name
    project = {"altup_proj", "model.altup_projections%.0d.%d"},
    unproject = {"altup_unembd_proj", "model.altup_unembed_projections%.0d.%d"},
    router = {"blk.%d.altup_router", LAYER "altup.modality_router"},
    router_norm = {"blk.%d.altup_router_norm", LAYER "altup.router_norm"},
    predict = {"blk.%d.altup_predict_coef", LAYER "altup.prediction_coefs"},
    correct = {"blk.%d.altup_correct_coef", LAYER "altup.correction_coefs"},
    correct_scale = {"blk.%d.altup_correct_scale", "=" LAYER "altup.correct_output_scale"},
    laurel_left = {"blk.%d.laurel_l", LAYER "laurel.linear_left"},
    laurel_right = {"blk.%d.laurel_r", LAYER "laurel.linear_right"},
    laurel_norm = {"blk.%d.laurel_post_norm", LAYER "laurel.post_laurel_norm"};

/* x with a standard normal distribution's share p below it. */
static double quantile(double p)
{
    double low = -10, high = 10;
    for (int i = 0; i < 100; i++) {
        double mid = (low + high) / 2;
        *(erfc(-mid / sqrt(2)) / 2 < p ? &low : &high) = mid;
    }
    return (low + high) / 2;
}

/* The share of hidden units that become 0: one for all layers, or one per layer. */
static bool read_sparsity(const struct meta_reader *in)
{
    struct config *c = in->c;
    const json_t *v = reader_get(in->hf, "activation_sparsity_pattern", NULL);
    if (json_is_array(v) && json_array_size(v) != (size_t)c->n_layers)
        return error_set(in->err,
                         "%s: config.json: activation_sparsity_pattern: %zu entries for %d layers",
                         in->f->path, json_array_size(v), c->n_layers);
    for (int i = 0; i < c->n_layers; i++) {
        const json_t *one = json_is_array(v) ? json_array_get(v, (size_t)i) : v;
        double share = one ? json_is_number(one) ? json_number_value(one) : -1 : 0;
        if (!(share >= 0 && share < 1))
            return error_set(in->err,
                             "%s: config.json: activation_sparsity_pattern: entry %d: expected a "
                             "number from 0 to below 1",
                             in->f->path, i);
        c->sparsity[i] = share > 0 ? (float)quantile(share) : -INFINITY;
    }
    return true;
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    double final = 0;
    c->tied = true;
    c->n_streams = 4;
    c->laurel_rank = 64;
    int active = 0;
    if (!reader_int(in, "num_kv_shared_layers", NULL, 0, c->n_layers - 1, false, &c->n_shared_kv) ||
        !reader_int(in, "hidden_size_per_layer_input", NULL, 1, 1 << 16, true, &c->n_embd_layer) ||
        !reader_int(in, "altup_num_inputs", NULL, 2, STREAMS_MAX, false, &c->n_streams) ||
        !reader_int(in, "altup_active_idx", NULL, 0, STREAMS_MAX, false, &active) ||
        !reader_int(in, "laurel_rank", NULL, 1, c->n_embd, false, &c->laurel_rank) ||
        !reader_number(in, in->hf, "final_logit_softcapping", 0, 1e6, false, &final))
        return false;
    if (active)
        return error_set(in->err, "%s: config.json: altup_active_idx: %d is not supported (0 is)",
                         in->f->path, active);
    c->head_softcap = (float) final;
    if (c->rope_window.theta == 0)
        c->rope_window.theta = 10000;
    return read_sparsity(in);
}

static bool read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    double final = 30;
    int active = 0, shared = c->n_layers > 20 ? c->n_layers - 20 : 0;
    c->n_streams = 4;
    c->rope_window = (struct rope_config){.theta = 10000, .factor = 1};
    for (int i = 0; i < c->n_layers; i++)
        c->sparsity[i] = -INFINITY;
    if (!reader_gguf_int(in, "attention.shared_kv_layers", 0, c->n_layers - 1, false, &shared) ||
        !reader_gguf_int(in, "embedding_length_per_layer_input", 1, 1 << 16, true,
                         &c->n_embd_layer) ||
        !reader_gguf_int(in, "altup.num_inputs", 2, STREAMS_MAX, false, &c->n_streams) ||
        !reader_gguf_int(in, "altup.active_idx", 0, STREAMS_MAX, false, &active) ||
        !reader_gguf_float(in, "rope.freq_base_swa", 1, 1e12, false, &c->rope_window.theta) ||
        !reader_gguf_float(in, "final_logit_softcapping", 0, 1e6, false, &final) ||
        !reader_gguf_layer_floats(in, "activation_sparsity_scale", -INFINITY, 10, c->sparsity))
        return false;
    if (active)
        return error_set(in->err, "%s: gemma3n.altup.active_idx: %d is not supported (0 is)",
                         in->f->path, active);
    const struct tensor *left = build_find(in->f, c, &laurel_left, 0, 0, "weight");
    if (!left || left->dims[1] < 1 || left->dims[1] > c->n_embd)
        return error_set(in->err, "%s: tensor blk.0.laurel_l.weight: %s", in->f->path,
                         left ? "more rows than the model has values" : "missing");
    c->laurel_rank = (int)left->dims[1];
    c->n_shared_kv = shared;
    c->head_softcap = (float) final;
    return true;
}

static bool read(const struct meta_reader *in)
{
    struct config *c = in->c;
    if (!decoder_read(in, &gemma4_decoder) || !(in->f->is_gguf ? read_gguf(in) : read_hf(in)))
        return false;
    c->embed_scale = sqrtf((float)c->n_embd);
    c->attn_scale = 1;
    c->n_rot_window = c->n_rot;
    for (int i = 0; i < c->n_layers; i++) {
        c->layer_head_dim[i] = c->head_dim;
        c->layer_kv_heads[i] = c->n_kv_heads;
    }
    return gemma4_check_layers(in);
}

static const struct weight *matrices(struct net_builder *b, const struct tensor_name *name)
{
    const struct weight_rows rows = {.name = name, .n = b->c->n_embd};
    return build_weight(b, WEIGHT_HEADS, 0, b->c->n_embd, b->c->n_streams - 1, 1, &rows);
}

static void build_altup(struct net_builder *b, int i, struct altup *a)
{
    int E = b->c->n_embd, N = b->c->n_streams;
    *a = (struct altup){.norm = build_rms(b, i, &router_norm, E),
                        .router = build_table(b, i, &router, N, E),
                        .predict = build_table(b, i, &predict, N * N, N),
                        .correct = build_table(b, i, &correct, N, N)};
    if (build_find(b->f, b->c, &correct_scale, i, 0, "weight"))
        a->scale = build_vector(b, i, &correct_scale, E, (struct adjust){0});
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    int E = c->n_embd;
    gemma4_build(b);
    b->net->streams = (struct streams){
        .n = c->n_streams, .project = matrices(b, &project), .unproject = matrices(b, &unproject)};
    for (int i = 0; i < c->n_layers && !b->failed; i++) {
        struct layer *l = &b->net->layers[i];
        build_altup(b, i, &l->altup);
        l->mixer.laurel = (struct laurel){
            .left = build_matrix(b, WEIGHT_LINEAR, i, &laurel_left, E, c->laurel_rank),
            .right = build_matrix(b, WEIGHT_LINEAR, i, &laurel_right, c->laurel_rank, E),
            .norm = build_rms(b, i, &laurel_norm, E)};
        l->mlp.dense.sparse = c->sparsity[i] > -INFINITY;
        l->mlp.dense.sparsity = l->mlp.dense.sparse ? c->sparsity[i] : 0;
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    decoder_write_window_list(c, w);
    gguf_set_u32(w, "gemma3n.altup.active_idx", 0);
    gguf_set_u32(w, "gemma3n.altup.num_inputs", (uint32_t)c->n_streams);
    gguf_set_u32(w, "gemma3n.attention.shared_kv_layers", (uint32_t)c->n_shared_kv);
    gguf_set_u32(w, "gemma3n.embedding_length_per_layer_input", (uint32_t)c->n_embd_layer);
    gguf_set_array(w, "gemma3n.activation_sparsity_scale", META_F32, c->sparsity,
                   (size_t)c->n_layers);
    gguf_set_f32(w, "gemma3n.rope.freq_base_swa", (float)c->rope_window.theta);
    gguf_set_f32(w, "gemma3n.final_logit_softcapping", c->head_softcap);
}

const struct model_family family_gemma3n = {
    .name = "gemma3n",
    .hf = "gemma3n_text",
    .hf_class = "Gemma3nForConditionalGeneration",
    .own_windows = true,
    .read = read,
    .build = build,
    .write = write,
    .spare = gemma4_spare,
};
