/* EAGLE-3 heads. See model/eagle.h. */
#include "model/eagle.h"
#include "base/mem.h"
#include "model/families/family.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

enum { USUAL_TAPS = 3 };

/* The layer is called layers.0 in some folders, midlayer in others. */
#define ENDS .fc = {"fc", "model.fc"}, .taps_norm = {"enc.output_norm", "model.input_norm"}
struct eagle_names {
    struct decoder_names layer; /* attn_norm: of the embedding */
    struct tensor_name fc, taps_norm, hidden_norm;
};
static const struct eagle_names numbered = {
    {DECODER_ENDS, DECODER_ATTENTION, DECODER_MLP},
    ENDS,
    .hidden_norm = {"blk.%d.attn_norm_2", "model.layers.%d.hidden_norm"}};
static const struct eagle_names middle = {
    {DECODER_ENDS, .q = {"blk.%d.attn_q", "model.midlayer.self_attn.q_proj"},
     .k = {"blk.%d.attn_k", "model.midlayer.self_attn.k_proj"},
     .v = {"blk.%d.attn_v", "model.midlayer.self_attn.v_proj"},
     .o = {"blk.%d.attn_output", "model.midlayer.self_attn.o_proj"},
     .attn_norm = {"blk.%d.attn_norm", "model.midlayer.input_layernorm"},
     .ffn_norm = {"blk.%d.ffn_norm", "model.midlayer.post_attention_layernorm"},
     .gate = {"blk.%d.ffn_gate", "model.midlayer.mlp.gate_proj"},
     .up = {"blk.%d.ffn_up", "model.midlayer.mlp.up_proj"},
     .down = {"blk.%d.ffn_down", "model.midlayer.mlp.down_proj"}},
    ENDS,
    .hidden_norm = {"blk.%d.attn_norm_2", "model.midlayer.hidden_norm"}};

/* Not one of families[]: a head is no model. */
static const struct decoder decoder = {.windows = false};
static const struct model_family family = {
    .name = "eagle3", .hf = "eagle3", .hf_class = "LlamaForCausalLMEagle3", .interleaved_qk = true};

static const struct eagle_names *names_of(const struct eagle *e)
{
    return build_present(e->file, &e->config, &middle.layer.o, 0) ? &middle : &numbered;
}

bool eagle_is(const struct tensorfile *f)
{
    if (f->is_gguf) {
        char *arch = meta_get_string(f, "general.architecture");
        bool is = arch && !strcmp(arch, family.name);
        mem_free(arch);
        return is;
    }
    const char *class =
        json_string_value(json_array_get(json_object_get(f->config, "architectures"), 0));
    for (; class && *class; class ++)
        if (!strncasecmp(class, "eagle3", 6))
            return true;
    return reader_get(f->config, "draft_vocab_size", NULL) != NULL;
}

static bool is_tap_count(const struct meta_reader *in, const char *key, size_t n)
{
    return (n > 0 && n <= MTP_MAX_TAPS) ||
           error_set(in->err, "%s: %s: %zu layers, expected 1 to %d", in->f->path, key, n,
                     MTP_MAX_TAPS);
}

/* Files number the stream in two ways: as the input of layer i, or as the output of layer i. The second way's first layer
 * is 1, which the first way's never is: EAGLE-3 takes the output of the second layer, or a later one. */
static void number_taps(struct eagle *e)
{
    bool outputs = e->n_taps && e->taps[0] == 1;
    for (int k = 0; k < e->n_taps; k++)
        e->taps[k] += outputs;
}

static bool read_gguf_taps(const struct meta_reader *in, struct eagle *e)
{
    const char *key = "eagle3.target_layers";
    const struct meta *m = tensorfile_meta(in->f, key);
    double n = -1;
    if (!m || m->type != META_ARRAY)
        return error_set(in->err, "%s: %s: %s", in->f->path, key, m ? "not a list" : "missing");
    size_t count = 0;
    while (count <= MTP_MAX_TAPS && meta_array_number(&m->v.a, count, &n))
        count++;
    if (!is_tap_count(in, key, count))
        return false;
    for (e->n_taps = 0; e->n_taps < (int)count; e->n_taps++) {
        meta_array_number(&m->v.a, (size_t)e->n_taps, &n);
        if (!reader_range(in, key, n, 0, CONFIG_MAX_LAYERS))
            return false;
        e->taps[e->n_taps] = (int)n;
    }
    return true;
}

static bool read_gguf(const struct meta_reader *in, struct eagle *e)
{
    struct config *c = in->c;
    double eps = 1e-6;
    int width = 0;
    snprintf(c->arch_name, sizeof c->arch_name, "%s", family.name);
    const struct tensor *emb = tensorfile_find(in->f, "token_embd.weight"),
                        *ids = tensorfile_find(in->f, "d2t"),
                        *head = tensorfile_find(in->f, "output.weight");
    if (!reader_gguf_int(in, "block_count", 1, 1, true, &c->n_layers) ||
        !reader_gguf_int(in, "embedding_length", 1, 1 << 20, true, &c->n_embd) ||
        !reader_gguf_int(in, "attention.head_count", 1, 1 << 14, true, &c->n_heads))
        return false;
    c->n_kv_heads = c->n_heads;
    c->head_dim = c->n_embd / c->n_heads;
    c->context = 2048;
    width = c->n_embd;
    if (!reader_gguf_int(in, "attention.head_count_kv", 1, 1 << 14, false, &c->n_kv_heads) ||
        !reader_gguf_int(in, "attention.key_length", 1, 1 << 14, false, &c->head_dim) ||
        !reader_gguf_int(in, "feed_forward_length", 1, 1 << 24, true, &c->n_ff) ||
        !reader_gguf_int(in, "context_length", 1, 1 << 30, false, &c->context) ||
        !reader_gguf_float(in, "attention.layer_norm_rms_epsilon", 0, 1, true, &eps) ||
        !reader_gguf_int(in, "target_hidden_size", 1, 1 << 20, false, &width) ||
        !reader_gguf_bool(in, "norm_before_residual", &e->norm_residual) ||
        !reader_gguf_bool(in, "norm_before_fc", &e->norm_taps) ||
        !reader_gguf_int(in, "vocab_size", 1, 1 << 24, !emb, &c->n_vocab))
        return false;
    int v_dim = c->head_dim;
    c->n_rot = c->head_dim;
    if (!reader_gguf_int(in, "attention.value_length", 1, 1 << 14, false, &v_dim) ||
        !reader_gguf_int(in, "rope.dimension_count", 0, 1 << 14, false, &c->n_rot))
        return false;
    if (v_dim != c->head_dim)
        return error_set(in->err, "%s: eagle3.attention.value_length: %d differs from key_length",
                         in->f->path, v_dim);
    if (width != c->n_embd)
        return error_set(in->err, "%s: eagle3.target_hidden_size: %d differs from the head's %d",
                         in->f->path, width, c->n_embd);
    c->norm_eps = (float)eps;
    if (!c->n_vocab && emb) {
        if (!reader_range(in, "vocabulary (token_embd.weight rows)", (double)emb->dims[1], 1,
                          1 << 24))
            return false;
        c->n_vocab = (int)emb->dims[1];
    }
    int64_t n_out = ids ? ids->dims[0] : head ? head->dims[1] : c->n_vocab;
    if (!reader_range(in, ids ? "tensor d2t" : "tensor output.weight", (double)n_out, 1,
                      c->n_vocab))
        return false;
    e->n_out = (int)n_out;
    return read_gguf_taps(in, e) && rope_read_gguf(in);
}

/* A flag that must have this value, if it is there. */
static bool must_be(const struct meta_reader *in, const json_t *o, const char *key, bool value)
{
    const json_t *flag = reader_get(o, key, NULL);
    return !flag || json_is_true(flag) == value ||
           error_set(in->err, "%s: config.json: %s: a head with %s is not supported", in->f->path,
                     key, value ? "false" : "true");
}

static bool read_hf_taps(const struct meta_reader *in, const json_t *root, struct eagle *e)
{
    const char *key = "eagle_aux_hidden_state_layer_ids";
    const json_t *own = reader_get(root, "eagle_config", NULL), *list = reader_get(root, key, NULL);
    if (!list)
        list = reader_get(own, key, NULL);
    if (!list || (json_is_array(list) && !json_array_size(list)))
        return true;
    if (!is_tap_count(in, "config.json: eagle_aux_hidden_state_layer_ids", json_array_size(list)))
        return false;
    for (size_t i = 0; i < json_array_size(list); i++, e->n_taps++) {
        const json_t *n = json_array_get(list, i);
        if (!reader_range(in, "config.json: eagle_aux_hidden_state_layer_ids",
                          json_is_integer(n) ? (double)json_integer_value(n) : -1, 0,
                          CONFIG_MAX_LAYERS))
            return false;
        e->taps[i] = (int)json_integer_value(n);
    }
    return true;
}

/* Speculators keep the layer's values in an object of their own. */
static bool read_hf(struct meta_reader *in, struct eagle *e)
{
    struct config *c = in->c;
    const json_t *root = in->f->config, *own = reader_get(root, "eagle_config", NULL),
                 *layer = reader_get(root, "transformer_layer_config", NULL);
    struct meta_reader outer = *in;
    outer.hf = root;
    in->hf = json_is_object(layer) ? layer : root;
    snprintf(c->arch_name, sizeof c->arch_name, "%s", family.name);
    c->hf_model = tensorfile_find(in->f, "model.norm.weight") ? "model." : "";
    c->hf_head = "lm_head";
    if (!decoder_read(in, &decoder))
        return false;
    int width = c->n_embd;
    e->n_out = c->n_vocab;
    if (!reader_int(&outer, "target_hidden_size", NULL, 1, 1 << 20, false, &width) ||
        !reader_int(&outer, "draft_vocab_size", NULL, 1, 1 << 24, false, &e->n_out) ||
        !reader_bool(&outer, "norm_before_residual", &e->norm_residual) ||
        !reader_bool(&outer, "norm_before_fc", &e->norm_taps) || !read_hf_taps(in, root, e) ||
        !must_be(in, own, "use_aux_hidden_state", true) ||
        !must_be(in, own, "use_input_layernorm_in_first_layer", true) ||
        !must_be(in, own, "use_last_layernorm", true) ||
        !must_be(in, own, "use_mtp_layernorm", false) ||
        !must_be(in, root, "parallel_drafting", false))
        return false;
    if (width != c->n_embd)
        return error_set(in->err,
                         "%s: config.json: target_hidden_size: %d differs from hidden_size %d",
                         in->f->path, width, c->n_embd);
    if (c->n_layers != 1)
        return error_set(in->err,
                         "%s: config.json: num_hidden_layers: heads of %d layers are not supported "
                         "(1 is)",
                         in->f->path, c->n_layers);
    if (e->n_out > c->n_vocab)
        return error_set(in->err, "%s: config.json: draft_vocab_size: %d, vocab_size is %d",
                         in->f->path, e->n_out, c->n_vocab);
    return layout_read_config(in, &c->layout);
}

/* Whether a tensor belongs to one of the head's, in any form in which folders pack matrices. */
static bool is_known(const struct eagle *e, const char *tensor)
{
    const struct eagle_names *n = names_of(e);
    const struct decoder_names *l = &n->layer;
    const struct tensor_name *all[] = {
        &l->emb,  &l->norm, &l->head,      &l->attn_norm,   &l->q,
        &l->k,    &l->v,    &l->o,         &l->gate,        &l->up,
        &l->down, &n->fc,   &n->taps_norm, &n->hidden_norm, &l->ffn_norm,
    };
    static const char *const others[] = {"d2t", "t2d", "model.d2t", "model.t2d",
                                         "rope_freqs.weight"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (!strcmp(tensor, others[i]))
            return true;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        char name[192];
        build_name(e->file, &e->config, all[i], 0, 0, "", name, sizeof name);
        size_t len = strlen(name); /* with the dot */
        if (all[i] == &n->taps_norm && !e->norm_taps)
            continue;
        if (!strncmp(tensor, name, len) && !strchr(tensor + len, '.'))
            return true;
    }
    return strstr(tensor, "rotary_emb.inv_freq") != NULL;
}

struct eagle *eagle_open(struct tensorfile *f, struct error *err)
{
    struct eagle *e = mem_zalloc(1, sizeof *e);
    struct meta_reader in = {f, &e->config, err, f->config};
    e->file = f;
    e->config.family = &family;
    bool ok = (f->is_gguf ? read_gguf(&in, e) : read_hf(&in, e)) && config_check(&in);
    for (size_t i = 0; ok && i < f->n_tensors; i++)
        ok = is_known(e, f->tensors[i].name) ||
             error_set(err, "%s: tensor %s: no part of an EAGLE-3 head that Steel knows", f->path,
                       f->tensors[i].name);
    if (!ok) {
        eagle_close(e);
        return NULL;
    }
    number_taps(e);
    return e;
}

void eagle_close(struct eagle *e)
{
    if (!e)
        return;
    tensorfile_close(e->file);
    mem_free(e);
}

/* The layers that it reads, of a model of n. */
static int taps_of(const struct eagle *e, int n, int taps[MTP_MAX_TAPS])
{
    const int usual[USUAL_TAPS] = {2, n / 2, n - 3};
    if (e->n_taps)
        memcpy(taps, e->taps, sizeof e->taps);
    else
        memcpy(taps, usual, sizeof usual);
    return e->n_taps ? e->n_taps : USUAL_TAPS;
}

bool eagle_fits(const struct eagle *e, const struct config *c, const char *model, struct error *err)
{
    const char *path = e->file->path;
    bool gguf = e->file->is_gguf;
    int taps[MTP_MAX_TAPS], n_taps = taps_of(e, c->n_layers, taps);
    if (c->headless)
        return error_set(err, "%s: the model makes embeddings, which need no drafts", model);
    if (e->config.n_embd != c->n_embd)
        return error_set(err, "%s: %s: %d, but %s has a width of %d", path,
                         gguf ? "eagle3.embedding_length" : "config.json: hidden_size",
                         e->config.n_embd, model, c->n_embd);
    if (e->config.n_vocab != c->n_vocab)
        return error_set(err, "%s: %s: %d, but %s has %d tokens", path,
                         gguf ? "eagle3.vocab_size" : "config.json: vocab_size", e->config.n_vocab,
                         model, c->n_vocab);
    for (int k = 0; k < n_taps; k++)
        if (taps[k] < 0 || taps[k] >= c->n_layers)
            return error_set(err, "%s: %s: layer %d, but %s has %d layers", path,
                             gguf ? "eagle3.target_layers"
                                  : "config.json: eagle_aux_hidden_state_layer_ids",
                             taps[k], model, c->n_layers);
    return true;
}

/* The tokens of its outputs. A folder stores what is added to an output's number, a GGUF the token itself. NULL with ok
 * false: the tensor is wrong; else the output is the token. */
static const int32_t *read_ids(const struct eagle *e, bool *ok, struct error *err)
{
    const struct tensorfile *f = e->file;
    const struct tensor *t = tensorfile_find(f, "d2t");
    int n_vocab = e->config.n_vocab;
    if (!t)
        t = tensorfile_find(f, "model.d2t");
    *ok = t || e->n_out == n_vocab ||
          error_set(err, "%s: tensor d2t: missing, for %d outputs of %d tokens", f->path, e->n_out,
                    n_vocab);
    if (!t)
        return NULL;
    *ok = false;
    if ((t->type != DT_I64 && t->type != DT_I32) || t->dims[0] != e->n_out || t->dims[1] != 1 ||
        t->dims[2] != 1 || t->dims[3] != 1) {
        error_set(err, "%s: tensor d2t: %s [%" PRId64 ", %" PRId64 "], expected %d of I64 or I32",
                  f->path, t->type_name, t->dims[0], t->dims[1], e->n_out);
        return NULL;
    }
    int32_t *ids = mem_zalloc((size_t)e->n_out, sizeof *ids);
    for (int i = 0; i < e->n_out; i++) {
        int32_t narrow;
        int64_t v;
        if (t->type == DT_I32) {
            memcpy(&narrow, t->data + (size_t)i * sizeof narrow, sizeof narrow);
            v = narrow;
        } else {
            memcpy(&v, t->data + (size_t)i * sizeof v, sizeof v);
        }
        int64_t least = f->is_gguf ? 0 : -(int64_t)i;
        if (v < least || v - least >= n_vocab) {
            error_set(err, "%s: tensor d2t: entry %d: %" PRId64 " is not from %" PRId64 " to %d",
                      f->path, i, v, least, (int)least + n_vocab - 1);
            mem_free(ids);
            return NULL;
        }
        ids[i] = (int32_t)(v - least);
    }
    *ok = true;
    return ids;
}

/* The head's RoPE, after the model's: build_ropes left room for it. */
static const struct rope *add_rope(struct net_builder *b)
{
    const struct config *c = b->c;
    struct network *net = b->net;
    if (c->n_rot < 2)
        return NULL;
    if (!net->ropes)
        net->ropes = mem_zalloc(1, sizeof *net->ropes);
    struct rope *r = (struct rope *)(uintptr_t)net->ropes + net->n_ropes++;
    float *freq = mem_zalloc((size_t)c->n_rot / 2 + 1, sizeof *freq);
    *r = (struct rope){.n_rot = c->n_rot, .freq = freq};
    rope_frequencies(&c->rope, r->n_rot, c->rope.factors ? c->rope_short : NULL, freq, &r->mscale);
    return r;
}

static void build_mixer(struct net_builder *b, const struct decoder_names *n, struct mixer *m)
{
    const struct config *c = b->c;
    int D = c->head_dim, H = c->n_heads, K = c->n_kv_heads;
    const struct weight_rows rows[] = {{.name = &n->q, .n = H * D, .interleaved = D},
                                       {.name = &n->k, .n = K * D, .interleaved = D},
                                       {.name = &n->v, .n = K * D}};
    *m = (struct mixer){.kind = MIXER_ATTENTION, .block.joined = true};
    m->attention = (struct attention){
        .n_heads = H,
        .n_kv_heads = K,
        .k_dim = D,
        .v_dim = D,
        .rope = add_rope(b),
        .scale = 1.0f / sqrtf((float)D),
        .wqkv = build_weight(b, WEIGHT_LINEAR, 0, 2 * c->n_embd, 1, 3, rows),
        .wo = build_matrix(b, WEIGHT_LINEAR, 0, &n->o, H * D, c->n_embd),
    };
}

static void build_head(struct net_builder *b, const struct eagle *e, const struct eagle_names *n)
{
    struct network *net = b->net;
    struct mtp *m = &net->mtp;
    int E = b->c->n_embd, wide = m->n_taps * E;
    m->fc = build_matrix(b, WEIGHT_LINEAR, 0, &n->fc, wide, E);
    m->embed_norm = build_rms(b, 0, &n->layer.attn_norm, E);
    m->hidden_norm = build_rms(b, 0, &n->hidden_norm, E);
    if (e->norm_taps)
        m->taps_norm = build_rms(b, 0, &n->taps_norm, wide);
    m->norm_residual = e->norm_residual;
    m->head.norm = build_rms(b, 0, &n->layer.norm, E);
    bool embeds = build_has(b, &n->layer.emb, 0), own = build_has(b, &n->layer.head, 0);
    if (embeds)
        m->tokens = build_matrix(b, b->c->tied && !own ? WEIGHT_HEAD : WEIGHT_EMBED, 0,
                                 &n->layer.emb, E, b->c->n_vocab);
    m->head.w = own ? build_matrix(b, WEIGHT_HEAD, 0, &n->layer.head, E, e->n_out)
                : embeds && b->c->tied ? m->tokens
                                       : net->head.w;
    if (!own && e->n_out != b->c->n_vocab)
        b->failed = !error_set(b->err, "%s: tensor %s: missing, for %d outputs", e->file->path,
                               e->file->is_gguf ? "output.weight" : "lm_head.weight", e->n_out);
}

void eagle_build(struct net_builder *b)
{
    const struct tensorfile *f = b->f;
    const struct config *c = b->c;
    const struct eagle *e = c->eagle;
    const struct eagle_names *n = names_of(e);
    struct decoder d = decoder;
    struct network *net = b->net;
    struct mtp *m = &net->mtp;
    int first = b->n_specs, parts = c->family->parts ? c->family->parts : 1, at = net->n_layers - 1;
    if (b->failed)
        return;
    if (net->streams.n || net->embed.positions || net->embed.types) {
        b->failed = !error_set(b->err, "%s: EAGLE-3 heads for %s models are not supported",
                               e->file->path, c->arch_name);
        return;
    }
    m->n_taps = taps_of(e, c->n_layers, m->taps);
    for (int k = 0; k < m->n_taps; k++)
        m->taps[k] *= parts;
    bool ok;
    m->ids = read_ids(e, &ok, b->err);
    m->n_ids = m->ids ? e->n_out : 0;
    b->failed = !ok;
    if (b->failed)
        return;
    b->f = e->file;
    b->c = &e->config;
    d.names = &n->layer;
    build_head(b, e, n);
    build_mixer(b, &n->layer, &net->layers[at].mixer);
    decoder_mlp(b, &d, 0, &net->layers[at].mlp);
    b->f = f;
    b->c = c;
    for (int i = first; i < b->n_specs; i++) {
        b->specs[i].eagle = true;
        b->specs[i].net_layer = at;
    }
}
