/*
 * BERT, RoBERTa, XLM-RoBERTa, and Nomic BERT (RoPE and a gated mlp). Encoders with post-norm blocks
 * (LayerNorm of the sum) and bidirectional attention. They have no head: the result is one vector
 * per token.
 */
#include "model/families/family.h"

#include <math.h>
#include <string.h>

/* A LayerNorm: its bias has its own tensor name. */
struct norm_names {
    struct tensor_name gain, bias;
};

struct encoder_names {
    struct tensor_name emb, positions, types;
    struct norm_names emb_norm;
    struct tensor_name q, k, v, o;
    struct tensor_name qkv; /* instead of q, k and v */
    struct norm_names attn_norm;
    struct tensor_name gate, up, down; /* gate NULL: a plain mlp */
    struct norm_names ffn_norm;
};

#define PAIR(gguf, hf)                                                                             \
    {                                                                                              \
        {gguf, hf},                                                                                \
        {                                                                                          \
            "=" gguf ".bias", "=" hf ".bias"                                                       \
        }                                                                                          \
    }
#define LAYER "model.encoder.layer.%d."

static const struct encoder_names bert_names = {
    .emb = {"token_embd", "model.embeddings.word_embeddings"},
    .positions = {"position_embd", "model.embeddings.position_embeddings"},
    .types = {"token_types", "model.embeddings.token_type_embeddings"},
    .emb_norm = PAIR("token_embd_norm", "model.embeddings.LayerNorm"),
    .q = {"blk.%d.attn_q", LAYER "attention.self.query"},
    .k = {"blk.%d.attn_k", LAYER "attention.self.key"},
    .v = {"blk.%d.attn_v", LAYER "attention.self.value"},
    .o = {"blk.%d.attn_output", LAYER "attention.output.dense"},
    .attn_norm = PAIR("blk.%d.attn_output_norm", LAYER "attention.output.LayerNorm"),
    .up = {"blk.%d.ffn_up", LAYER "intermediate.dense"},
    .down = {"blk.%d.ffn_down", LAYER "output.dense"},
    .ffn_norm = PAIR("blk.%d.layer_output_norm", LAYER "output.LayerNorm"),
};

static const struct encoder_names nomic_names = {
    .emb = {"token_embd", "model.embeddings.word_embeddings"},
    .types = {"token_types", "model.embeddings.token_type_embeddings"},
    .emb_norm = PAIR("token_embd_norm", "model.emb_ln"),
    .qkv = {"blk.%d.attn_qkv", "model.encoder.layers.%d.attn.Wqkv"},
    .o = {"blk.%d.attn_output", "model.encoder.layers.%d.attn.out_proj"},
    .attn_norm = PAIR("blk.%d.attn_output_norm", "model.encoder.layers.%d.norm1"),
    .gate = {"blk.%d.ffn_gate", "model.encoder.layers.%d.mlp.fc12"},
    .up = {"blk.%d.ffn_up", "model.encoder.layers.%d.mlp.fc11"},
    .down = {"blk.%d.ffn_down", "model.encoder.layers.%d.mlp.fc2"},
    .ffn_norm = PAIR("blk.%d.layer_output_norm", "model.encoder.layers.%d.norm2"),
};

/* A key of config.json that must have this value if it is present. */
static bool check_is(const struct meta_reader *in, const char *key, const char *spec)
{
    const char *is = json_string_value(reader_get(in->hf, key, NULL));
    return !is || !strcmp(is, spec) ||
           error_set(in->err, "%s: config.json: %s \"%.40s\" is not supported (%s is)", in->f->path,
                     key, is, spec);
}

static bool read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    double eps = 1e-12;
    if (!check_is(in, "hidden_act", "gelu") ||
        !check_is(in, "position_embedding_type", "absolute") ||
        !reader_int(in, "num_hidden_layers", NULL, 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !reader_int(in, "hidden_size", NULL, 1, 1 << 20, true, &c->n_embd) ||
        !reader_int(in, "num_attention_heads", NULL, 1, 1 << 14, true, &c->n_heads) ||
        !reader_int(in, "intermediate_size", NULL, 1, 1 << 24, true, &c->n_ff) ||
        !reader_int(in, "vocab_size", NULL, 1, 1 << 24, true, &c->n_vocab) ||
        !reader_int(in, "max_position_embeddings", NULL, 1, 1 << 24, true, &c->context) ||
        !reader_number(in, in->hf, "layer_norm_eps", 0, 1, false, &eps))
        return false;
    c->norm_eps = (float)eps;
    return true;
}

bool encoder_read_gguf(const struct meta_reader *in)
{
    struct config *c = in->c;
    double eps = 1e-12;
    bool causal = false;
    const struct tensor *emb = tensorfile_find(in->f, "token_embd.weight");
    if (!reader_gguf_int(in, "block_count", 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !reader_gguf_int(in, "embedding_length", 1, 1 << 20, true, &c->n_embd) ||
        !reader_gguf_int(in, "attention.head_count", 1, 1 << 14, true, &c->n_heads) ||
        !reader_gguf_int(in, "feed_forward_length", 1, 1 << 24, true, &c->n_ff) ||
        !reader_gguf_int(in, "context_length", 1, 1 << 24, true, &c->context) ||
        !reader_gguf_float(in, "attention.layer_norm_epsilon", 0, 1, true, &eps) ||
        !reader_gguf_bool(in, "attention.causal", &causal))
        return false;
    if (!emb)
        return error_set(in->err, "%s: tensor token_embd.weight: missing", in->f->path);
    if (causal)
        return error_set(in->err, "%s: a causal %s is not supported", in->f->path, c->arch_name);
    if (!reader_range(in, "vocabulary (token_embd.weight rows)", (double)emb->dims[1], 1, 1 << 24))
        return false;
    c->n_vocab = (int)emb->dims[1];
    c->norm_eps = (float)eps;
    return true;
}

/* Defaults that all encoders share. */
bool encoder_finish(const struct meta_reader *in)
{
    struct config *c = in->c;
    c->n_kv_heads = c->n_heads;
    c->head_dim = c->n_embd / c->n_heads;
    c->headless = true;
    return c->n_embd % c->n_heads == 0 ||
           error_set(in->err, "%s: a width of %d does not divide by %d heads", in->f->path,
                     c->n_embd, c->n_heads);
}

static bool read_bert(const struct meta_reader *in)
{
    return (in->f->is_gguf ? encoder_read_gguf(in) : read_hf(in)) && encoder_finish(in);
}

/* RoBERTa's positions start after the padding token's id. Its GGUF omits the rows before that. */
static bool read_roberta(const struct meta_reader *in)
{
    struct config *c = in->c;
    int pad = 1;
    if (!read_bert(in) || in->f->is_gguf)
        return in->f->is_gguf;
    if (!reader_int(in, "pad_token_id", NULL, 0, 1 << 20, false, &pad))
        return false;
    c->pos_offset = pad + 1;
    c->context -= c->pos_offset;
    return c->context > 0 ||
           error_set(in->err, "%s: config.json: max_position_embeddings: %d with pad_token_id %d",
                     in->f->path, c->context + c->pos_offset, pad);
}

static bool read_nomic(const struct meta_reader *in)
{
    struct config *c = in->c;
    double eps = 1e-12;
    if (in->f->is_gguf) {
        if (!encoder_read_gguf(in) || !encoder_finish(in))
            return false;
        c->n_rot = c->head_dim;
        return rope_read_gguf(in);
    }
    if (!check_is(in, "activation_function", "swiglu") ||
        !reader_int(in, "n_layer", "num_hidden_layers", 1, CONFIG_MAX_LAYERS, true, &c->n_layers) ||
        !reader_int(in, "n_embd", "hidden_size", 1, 1 << 20, true, &c->n_embd) ||
        !reader_int(in, "n_head", "num_attention_heads", 1, 1 << 14, true, &c->n_heads) ||
        !reader_int(in, "n_inner", "intermediate_size", 1, 1 << 24, true, &c->n_ff) ||
        !reader_int(in, "vocab_size", NULL, 1, 1 << 24, true, &c->n_vocab) ||
        !reader_int(in, "n_positions", "max_position_embeddings", 1, 1 << 24, true, &c->context) ||
        !reader_number(in, in->hf, "layer_norm_epsilon", 0, 1, false, &eps) || !encoder_finish(in))
        return false;
    c->rope.theta = 10000;
    c->rope.factor = c->rope.partial = 1;
    c->rope.original_context = c->context;
    c->norm_eps = (float)eps;
    if (!reader_number(in, in->hf, "rotary_emb_fraction", 0, 1, false, &c->rope.partial) ||
        !reader_number(in, in->hf, "rotary_emb_base", 1, 1e12, false, &c->rope.theta))
        return false;
    c->n_rot = (int)(c->head_dim * c->rope.partial);
    return true;
}

/* Rows of a table of any length; 0 = not in the file. */
static int table_rows(struct net_builder *b, const struct tensor_name *name)
{
    const struct tensor *t = name->gguf ? build_find(b->f, b->c, name, 0, 0, "weight") : NULL;
    return !t ? 0 : t->dims[1] > 1 << 24 ? 1 << 24 : (int)t->dims[1];
}

static const struct weight *table(struct net_builder *b, const struct tensor_name *name, int rows)
{
    return rows ? build_matrix(b, WEIGHT_EMBED, 0, name, b->c->n_embd, rows) : NULL;
}

static struct norm layer_norm(struct net_builder *b, int layer, const struct norm_names *p)
{
    return build_layer_norm(b, layer, &p->gain, &p->bias, b->c->n_embd);
}

static void build_layer(struct net_builder *b, const struct encoder_names *n, int i,
                        const struct rope *rope, struct layer *l)
{
    const struct config *c = b->c;
    int E = c->n_embd, F = c->n_ff;
    const struct weight_rows apart[] = {
        {.name = &n->q, .n = E}, {.name = &n->k, .n = E}, {.name = &n->v, .n = E}};
    const struct weight_rows fused = {.name = &n->qkv, .n = 3 * E};
    const struct weight_rows gate_up[] = {{.name = &n->gate, .n = F}, {.name = &n->up, .n = F}};
    bool is_fused = n->qkv.gguf != NULL, gated = n->gate.gguf != NULL;
    l->mixer = (struct mixer){.kind = MIXER_ATTENTION};
    l->mixer.attention =
        (struct attention){.n_heads = c->n_heads,
                           .n_kv_heads = c->n_heads,
                           .k_dim = c->head_dim,
                           .v_dim = c->head_dim,
                           .rope = rope,
                           .scale = 1.0f / sqrtf((float)c->head_dim),
                           .bidirectional = true,
                           .wqkv = build_weight(b, WEIGHT_LINEAR, i, E, 1, is_fused ? 1 : 3,
                                                is_fused ? &fused : apart),
                           .wo = build_matrix(b, WEIGHT_LINEAR, i, &n->o, E, E)};
    l->mixer.block.sum = layer_norm(b, i, &n->attn_norm);
    l->mlp = (struct mlp){0};
    l->mlp.dense.act = gated ? ACT_SILU : ACT_PLAIN_GELU;
    l->mlp.dense.gate_up =
        build_weight(b, WEIGHT_LINEAR, i, E, 1, gated ? 2 : 1, gated ? gate_up : &gate_up[1]);
    l->mlp.dense.down = build_matrix(b, WEIGHT_LINEAR, i, &n->down, F, E);
    l->mlp.block.sum = layer_norm(b, i, &n->ffn_norm);
}

static void build_encoder(struct net_builder *b, const struct encoder_names *n)
{
    const struct config *c = b->c;
    struct embed *e = &b->net->embed;
    const struct rope *rope = build_rope(b);
    int n_pos = table_rows(b, &n->positions);
    if (n->positions.gguf && n_pos < c->context + c->pos_offset)
        b->failed = !error_set(b->err, "%s: embeddings of %d positions for a context of %d",
                               b->f->path, n_pos - c->pos_offset, c->context);
    e->tokens = build_matrix(b, WEIGHT_EMBED, 0, &n->emb, c->n_embd, c->n_vocab);
    e->positions = table(b, &n->positions, n_pos);
    e->pos_offset = c->pos_offset;
    e->types = table(b, &n->types, table_rows(b, &n->types));
    e->norm = layer_norm(b, 0, &n->emb_norm);
    for (int i = 0; i < c->n_layers; i++)
        build_layer(b, n, i, rope, &b->net->layers[i]);
}

/* Training heads, heads that pooling.c reads, and position ids. */
bool encoder_spare(const struct config *c, const char *tensor)
{
    static const char *const others[] = {"lm_head.", "cls.", "classifier.", "head.", "decoder."};
    size_t root = strlen(c->hf_model);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strncmp(tensor, others[i], strlen(others[i])))
            return true;
    return !strncmp(tensor, c->hf_model, root) &&
           (!strncmp(tensor + root, "pooler.", 7) ||
            !strcmp(tensor + root, "embeddings.position_ids"));
}

static void build_bert(struct net_builder *b)
{
    build_encoder(b, &bert_names);
}

static void build_nomic(struct net_builder *b)
{
    build_encoder(b, &nomic_names);
}

const struct model_family family_bert = {
    .name = "bert",
    .hf = "bert",
    .hf_class = "BertModel",
    .hf_embed = "embeddings.word_embeddings",
    .encoder = true,
    .read = read_bert,
    .build = build_bert,
    .spare = encoder_spare,
};

/* A GGUF calls these two "bert". */
const struct model_family family_roberta = {
    .name = "roberta",
    .hf = "roberta",
    .hf_class = "RobertaModel",
    .hf_embed = "embeddings.word_embeddings",
    .gguf_as = "bert",
    .encoder = true,
    .read = read_roberta,
    .build = build_bert,
    .spare = encoder_spare,
};

const struct model_family family_xlm_roberta = {
    .name = "xlm-roberta",
    .hf = "xlm-roberta",
    .hf_class = "XLMRobertaModel",
    .hf_embed = "embeddings.word_embeddings",
    .gguf_as = "bert",
    .encoder = true,
    .read = read_roberta,
    .build = build_bert,
    .spare = encoder_spare,
};

const struct model_family family_nomic_bert = {
    .name = "nomic-bert",
    .hf = "nomic_bert",
    .hf_class = "NomicBertModel",
    .hf_embed = "embeddings.word_embeddings",
    .encoder = true,
    .read = read_nomic,
    .build = build_nomic,
    .spare = encoder_spare,
};
