/* Apertus: QK-norm, and xIELU with constants of its own in each layer in place of a gate. */
#include "model/families/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct decoder_names names = {
    DECODER_ENDS,
    DECODER_QKV,
    .attn_norm = {"blk.%d.attn_norm", "model.layers.%d.attention_layernorm"},
    .ffn_norm = {"blk.%d.ffn_norm", "model.layers.%d.feedforward_layernorm"},
    .up = {"blk.%d.ffn_up", "model.layers.%d.mlp.up_proj"},
    .down = {"blk.%d.ffn_down", "model.layers.%d.mlp.down_proj"}};

static const struct decoder decoder = {
    .names = &names, .qk_norm = true, .act = ACT_PLAIN_XIELU, .act_name = "xielu"};

static const char *const constants[XIELU_CONSTANTS] = {"alpha_p", "alpha_n", "beta", "eps"};

/* A folder stores them as tensors of one value. */
static bool read_tensors(const struct meta_reader *in, int k)
{
    char hf[96];
    snprintf(hf, sizeof hf, "=model.layers.%%d.mlp.act_fn.%s", constants[k]);
    const struct tensor_name name = {"", hf};
    for (int i = 0; i < in->c->n_layers; i++) {
        const struct tensor *t = build_find(in->f, in->c, &name, i, 0, "weight");
        float *out = &in->c->xielu[k][i];
        *out = k == 2 ? 0.5f : -1e-6f; /* beta and eps may be absent */
        if (!t && k >= 2)
            continue;
        if (!t)
            return error_set(in->err, "%s: tensor model.layers.%d.mlp.act_fn.%s: missing",
                             in->f->path, i, constants[k]);
        if (t->dims[0] != 1 || t->dims[1] != 1 || t->dims[2] != 1 || t->dims[3] != 1 ||
            (t->type != DT_F32 && t->type != DT_F16 && t->type != DT_BF16))
            return error_set(in->err, "%s: tensor %s: not one number", in->f->path, t->name);
        quant_dequantize(t->type, t->data, out, 1);
    }
    return true;
}

static bool read(const struct meta_reader *in)
{
    if (!decoder_read(in, &decoder))
        return false;
    for (int k = 0; k < XIELU_CONSTANTS; k++) {
        char key[32];
        snprintf(key, sizeof key, "xielu.%s", constants[k]);
        if (in->f->is_gguf ? !reader_gguf_layer_floats(in, key, -1e6, 1e6, in->c->xielu[k])
                           : !read_tensors(in, k))
            return false;
    }
    return true;
}

/* The stored constants keep alpha positive through ln(1 + exp(alpha)). */
static float softplus(float x)
{
    return x > 20 ? x : log1pf(expf(x));
}

static void build(struct net_builder *b)
{
    const struct config *c = b->c;
    decoder_build(b, &decoder);
    for (int i = 0; i < c->n_layers; i++) {
        struct ffn *f = &b->net->layers[i].mlp.dense;
        f->beta = c->xielu[2][i];
        f->alpha = softplus(c->xielu[0][i]);
        f->limit = f->beta + softplus(c->xielu[1][i]);
    }
}

static void write(const struct config *c, struct gguf_writer *w)
{
    for (int k = 0; k < XIELU_CONSTANTS; k++) {
        char key[48];
        snprintf(key, sizeof key, "xielu.%s", constants[k]);
        gguf_set_array(w, key, META_F32, c->xielu[k], (size_t)c->n_layers);
    }
}

static bool spare(const struct config *c, const char *tensor)
{
    (void)c;
    return strstr(tensor, ".mlp.act_fn.") != NULL; /* they are metadata in a GGUF */
}

const struct model_family family_apertus = {
    .name = "apertus",
    .hf = "apertus",
    .hf_class = "ApertusForCausalLM",
    .read = read,
    .build = build,
    .write = write,
    .spare = spare,
};
