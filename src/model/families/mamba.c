/*
 * State-space models of Mamba-2: the mixer that hybrid families share, and the family that has nothing else. A GGUF has
 * no key for limits of time steps: ours are ssm.time_step_min and ssm.time_step_max, written where there are any.
 *
 * The published Mamba-2 models were trained with a norm for each group. transformers norms the whole width, whatever the number of
 * groups; a folder or GGUF that needs that says so with a key of ours, norm_count or ssm.norm_count.
 */
#include "model/families/family.h"

#include <stdio.h>

static bool read_limits(const struct meta_reader *in)
{
    struct config *c = in->c;
    double low = 0, high = 0;
    if (in->f->is_gguf) {
        if (!reader_gguf_float(in, "ssm.time_step_min", 0, 1e6, false, &low) ||
            !reader_gguf_float(in, "ssm.time_step_max", 0, 1e6, false, &high))
            return false;
    } else {
        const json_t *limit = reader_get(in->hf, "time_step_limit", NULL);
        if (limit && (json_array_size(limit) != 2 || !json_is_number(json_array_get(limit, 0)) ||
                      !json_is_number(json_array_get(limit, 1))))
            return error_set(in->err, "%s: config.json: time_step_limit: expected two numbers",
                             in->f->path);
        low = json_number_value(json_array_get(limit, 0));
        high = json_number_value(json_array_get(limit, 1));
        if (!reader_range(in, "config.json: time_step_limit", low, 0, 1e6))
            return false;
    }
    c->dt_min = (float)low;
    c->dt_max = high > 0 && high < 1e30 ? (float)high : 0;
    return true;
}

bool ssm_read(const struct meta_reader *in, const struct ssm_keys *k)
{
    struct config *c = in->c;
    int inner = 0;
    c->linear_k_heads = 1;
    c->conv_len = 4;
    if (in->f->is_gguf) {
        if (!reader_gguf_int(in, "ssm.conv_kernel", 2, 64, true, &c->conv_len) ||
            !reader_gguf_int(in, "ssm.state_size", 1, 1 << 12, true, &c->linear_k_dim) ||
            !reader_gguf_int(in, "ssm.group_count", 1, 1 << 12, false, &c->linear_k_heads) ||
            !reader_gguf_int(in, "ssm.time_step_rank", 1, 1 << 12, true, &c->linear_v_heads) ||
            !reader_gguf_int(in, "ssm.inner_size", 1, 1 << 24, true, &inner))
            return false;
        if (inner % c->linear_v_heads)
            return error_set(in->err, "%s: %s.ssm.inner_size: %d does not divide by %d heads",
                             in->f->path, c->arch_name, inner, c->linear_v_heads);
        c->linear_v_dim = inner / c->linear_v_heads;
    } else if (!reader_int(in, k->heads, NULL, 1, 1 << 12, true, &c->linear_v_heads) ||
               !reader_int(in, k->head_dim, NULL, 1, 1 << 12, true, &c->linear_v_dim) ||
               !reader_int(in, k->state, NULL, 1, 1 << 12, true, &c->linear_k_dim) ||
               !reader_int(in, k->groups, NULL, 1, 1 << 12, false, &c->linear_k_heads) ||
               !reader_int(in, k->conv, NULL, 2, 64, false, &c->conv_len)) {
        return false;
    }
    if (c->linear_v_heads % c->linear_k_heads)
        return error_set(in->err, "%s: %d state-space heads do not divide by %d groups",
                         in->f->path, c->linear_v_heads, c->linear_k_heads);
    return read_limits(in);
}

void ssm_build(struct net_builder *b, const struct ssm_names *n, int i, struct mixer *m)
{
    const struct config *c = b->c;
    int H = c->linear_v_heads, P = c->linear_v_dim, G = c->linear_k_heads, N = c->linear_k_dim;
    int values = H * P;
    m->kind = MIXER_SSM;
    m->ssm = (struct ssm){.n_heads = H,
                          .n_groups = G,
                          .head_dim = P,
                          .state_dim = N,
                          .conv_len = c->conv_len,
                          .dt_min = c->dt_min,
                          .dt_max = c->dt_max,
                          .n_norms = 1};
    struct ssm *s = &m->ssm;
    int channels = ssm_channels(s);
    s->w_in = build_matrix(b, WEIGHT_LINEAR, i, &n->in, c->n_embd, values + channels + H);
    s->conv = build_table(b, i, &n->conv, channels, c->conv_len);
    if (build_find(b->f, c, &n->conv_bias, i, 0, "weight"))
        s->conv_bias = build_vector(b, i, &n->conv_bias, channels, (struct adjust){0});
    s->dt_bias = build_vector(b, i, &n->dt, H, (struct adjust){0});
    s->decay = build_vector(b, i, &n->decay, H, (struct adjust){.decay = true, .wrap = 1});
    s->skip = build_vector(b, i, &n->skip, H, (struct adjust){.wrap = 1});
    if (build_find(b->f, c, &n->norm, i, 0, "weight"))
        s->norm = build_rms_adjusted(b, i, &n->norm, values, (struct adjust){.wrap = values / G});
    s->w_out = build_matrix(b, WEIGHT_LINEAR, i, &n->out, values, c->n_embd);
}

void ssm_write(const struct config *c, struct gguf_writer *w)
{
    const char *arch = c->family->gguf_as ? c->family->gguf_as : c->family->name;
    const struct {
        const char *key;
        int v;
    } numbers[] = {{"ssm.conv_kernel", c->conv_len},
                   {"ssm.state_size", c->linear_k_dim},
                   {"ssm.group_count", c->linear_k_heads},
                   {"ssm.time_step_rank", c->linear_v_heads},
                   {"ssm.inner_size", c->linear_v_heads * c->linear_v_dim}};
    char key[96];
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        snprintf(key, sizeof key, "%s.%s", arch, numbers[i].key);
        gguf_set_u32(w, key, (uint32_t)numbers[i].v);
    }
    snprintf(key, sizeof key, "%s.ssm.time_step_min", arch);
    if (c->dt_min != 0)
        gguf_set_f32(w, key, c->dt_min);
    snprintf(key, sizeof key, "%s.ssm.time_step_max", arch);
    if (c->dt_max != 0)
        gguf_set_f32(w, key, c->dt_max);
}

static const struct ssm_names names = {SSM_NAMES("model.layers.%d.mixer")};
static const struct tensor_name norm = {"blk.%d.attn_norm", "model.layers.%d.norm"},
                                emb = {"token_embd", "model.embeddings"},
                                head = {"output", "lm_head"},
                                out_norm = {"output_norm", "model.norm_f"};

static bool read(const struct meta_reader *in)
{
    static const struct ssm_keys keys = {"num_heads", "head_dim", "state_size", "n_groups",
                                         "conv_kernel"};
    struct config *c = in->c;
    double eps = 1e-5;
    c->n_heads = c->n_kv_heads = c->head_dim = 1; /* no attention */
    c->context = 1 << 20;
    if (in->f->is_gguf) {
        const struct tensor *t = tensorfile_find(in->f, "token_embd.weight");
        if (!t)
            return error_set(in->err, "%s: tensor token_embd.weight: missing", in->f->path);
        if (!reader_gguf_int(in, "block_count", 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
            !reader_gguf_int(in, "embedding_length", 1, 1 << 20, true, &c->n_embd) ||
            !reader_gguf_int(in, "context_length", 1, 1 << 30, false, &c->context) ||
            !reader_gguf_float(in, "attention.layer_norm_rms_epsilon", 0, 1, true, &eps) ||
            !reader_range(in, "vocabulary (token_embd.weight rows)", (double)t->dims[1], 1,
                          1 << 24))
            return false;
        c->n_vocab = (int)t->dims[1];
        c->tied = !tensorfile_find(in->f, "output.weight");
    } else if (!reader_int(in, "num_hidden_layers", NULL, 1, CONFIG_MAX_LAYERS, true,
                           &c->n_layers) ||
               !reader_int(in, "hidden_size", NULL, 1, 1 << 20, true, &c->n_embd) ||
               !reader_int(in, "vocab_size", NULL, 1, 1 << 24, true, &c->n_vocab) ||
               !reader_number(in, in->hf, "layer_norm_epsilon", 0, 1, false, &eps) ||
               !reader_bool(in, "tie_word_embeddings", &c->tied)) {
        return false;
    }
    c->tied |= !build_present(in->f, c, &head, 0);
    c->norm_eps = (float)eps;
    c->expert_scale = 1;
    c->n_ff = 1;
    for (int i = 0; i < c->n_layers; i++)
        c->is_linear[i] = true;
    if (!ssm_read(in, &keys))
        return false;
    c->ssm_norms = c->linear_k_heads;
    if (!(in->f->is_gguf ? reader_gguf_int(in, "ssm.norm_count", 1, 1 << 12, false, &c->ssm_norms)
                         : reader_int(in, "norm_count", NULL, 1, 1 << 12, false, &c->ssm_norms)))
        return false;
    int values = c->linear_v_heads * c->linear_v_dim;
    return values % c->ssm_norms == 0 ||
           error_set(in->err, "%s: %d values do not divide by %d norms", in->f->path, values,
                     c->ssm_norms);
}

static void write(const struct config *c, struct gguf_writer *w)
{
    ssm_write(c, w);
    if (c->ssm_norms != c->linear_k_heads)
        gguf_set_u32(w, "mamba2.ssm.norm_count", (uint32_t)c->ssm_norms);
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    struct network *net = b->net;
    net->embed.tokens = build_matrix(b, c->tied && !c->headless ? WEIGHT_HEAD : WEIGHT_EMBED, 0,
                                     &emb, c->n_embd, c->n_vocab);
    net->head.norm = build_rms(b, 0, &out_norm, c->n_embd);
    for (int i = 0; i < c->n_layers; i++) {
        struct mixer *m = &net->layers[i].mixer;
        m->block.in = build_rms(b, i, &norm, c->n_embd);
        ssm_build(b, &names, i, m);
        m->ssm.n_norms = c->ssm_norms;
    }
    if (!c->headless)
        net->head.w = c->tied ? net->embed.tokens
                              : build_matrix(b, WEIGHT_HEAD, 0, &head, c->n_embd, c->n_vocab);
}

const struct model_family family_mamba2 = {
    .name = "mamba2",
    .hf = "mamba2",
    .hf_class = "Mamba2ForCausalLM",
    .hf_embed = "embeddings",
    .read = read,
    .build = build,
    .write = write,
};
