/*
 * A Hugging Face folder to GGUF: which tensor goes where, in which order of rows, and the numbers of
 * config.json under GGUF's names. Packed sources (GPTQ, FP8) are unpacked on the way. Every tensor of
 * the folder must find its place: one that does not is an error, never silently dropped. The
 * vocabulary is vocab.c's part.
 */
#include "base/mem.h"
#include "convert/convert.h"
#include "convert/vocab.h"
#include "model/config.h"
#include "model/families/family.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct plan {
    const struct tensorfile *f;
    const struct config *c;
    struct transcode *t;
    bool *used; /* (f->n_tensors) */
    struct error *err;
};

static const struct tensor *find(struct plan *p, const char *base, const char *suffix)
{
    char name[256];
    snprintf(name, sizeof name, "%s.%s", base, suffix);
    const struct tensor *t = tensorfile_find(p->f, name);
    if (t)
        p->used[t - p->f->tensors] = true;
    return t;
}

static bool missing(struct plan *p, const char *base, const char *suffix)
{
    return error_set(p->err, "%s: tensor %s.%s: missing", p->f->path, base, suffix);
}

static bool check_shape(struct plan *p, const struct tensor *t, int64_t n, int64_t rows)
{
    if (t->dims[0] == n && t->dims[1] == rows && t->dims[2] == 1 && t->dims[3] == 1)
        return true;
    return error_set(p->err,
                     "%s: tensor %s: shape [%" PRId64 ", %" PRId64 "], expected [%" PRId64
                     ", %" PRId64 "]",
                     p->f->path, t->name, t->dims[1], t->dims[0], rows, n);
}

static bool check_type(struct plan *p, const struct tensor *t, bool integer)
{
    bool is_float = t->type == DT_F32 || t->type == DT_F16 || t->type == DT_BF16;
    if (integer ? t->type == DT_I32 : is_float)
        return true;
    return error_set(p->err, "%s: tensor %s: type %s where %s is expected", p->f->path, t->name,
                     t->type_name, integer ? "I32" : "F32, F16 or BF16");
}

/* qweight, qzeros, scales, g_idx of one matrix. */
static bool gptq_source(struct plan *p, const char *base, int64_t n, int64_t rows, struct source *s)
{
    s->data = find(p, base, "qweight");
    s->zeros = find(p, base, "qzeros");
    s->scale = find(p, base, "scales");
    s->order = find(p, base, "g_idx");
    if (!s->data || !s->zeros || !s->scale)
        return missing(p, base, !s->data ? "weight" : !s->zeros ? "qzeros" : "scales");
    int64_t len = p->c->gptq_group < 0 || p->c->gptq_group > n ? n : p->c->gptq_group;
    int64_t groups = (n + len - 1) / len;
    if (n % 8 || rows % 8)
        return error_set(p->err, "%s: tensor %s: GPTQ wants multiples of 8", p->f->path,
                         s->data->name);
    if (!check_shape(p, s->data, rows, n / 8) || !check_shape(p, s->zeros, rows / 8, groups) ||
        !check_shape(p, s->scale, rows, groups) || !check_type(p, s->data, true) ||
        !check_type(p, s->zeros, true) || !check_type(p, s->scale, false))
        return false;
    if (s->order) {
        if (!check_shape(p, s->order, n, 1) || !check_type(p, s->order, true))
            return false;
        for (int64_t j = 0; j < n; j++) {
            uint32_t g;
            memcpy(&g, s->order->data + 4 * j, 4);
            if (g >= (uint64_t)groups)
                return error_set(p->err, "%s: tensor %s: entry %" PRId64 ": group %u of %" PRId64,
                                 p->f->path, s->order->name, j, g, groups);
        }
    }
    s->group_len = (int)len;
    s->zero_plus = p->c->gptq_zero_plus;
    return true;
}

/* The weight of `base`, plain or packed, rows x n. */
static bool matrix_source(struct plan *p, const char *base, int64_t n, int64_t rows,
                          struct source *s)
{
    s->data = find(p, base, "weight");
    if (!s->data)
        return p->c->packing == PACK_GPTQ ? gptq_source(p, base, n, rows, s)
                                          : missing(p, base, "weight");
    if (!check_shape(p, s->data, n, rows))
        return false;
    if (s->data->type != DT_F8_E4M3)
        return check_type(p, s->data, false);
    s->scale = find(p, base, "weight_scale_inv");
    if (!s->scale)
        return missing(p, base, "weight_scale_inv");
    return check_shape(p, s->scale, (n + 127) / 128, (rows + 127) / 128) &&
           check_type(p, s->scale, false);
}

/* GGUF `to`.weight from `from`.weight; heads > 0 weaves the rows. */
static bool add_matrix(struct plan *p, const char *to, const char *from, int64_t n, int64_t rows,
                       int heads)
{
    char name[128];
    snprintf(name, sizeof name, "%s.weight", to);
    struct out_tensor *o = transcode_add(p->t, name, 2, (int64_t[]){n, rows});
    o->rows = rows;
    o->heads = heads;
    o->mats = mem_zalloc(1, sizeof *o->mats);
    return matrix_source(p, from, n, rows, &o->mats[0]);
}

/* A vector of n values as F32: norms and biases. A bias is woven like its weight's rows. */
static bool add_vector(struct plan *p, const char *to, const char *from, const char *suffix,
                       int64_t n, int heads, bool optional)
{
    const struct tensor *t = find(p, from, suffix);
    if (!t)
        return optional ? true : missing(p, from, suffix);
    if (!check_shape(p, t, n, 1) || !check_type(p, t, false))
        return false;
    char name[128];
    snprintf(name, sizeof name, "%s.%s", to, suffix);
    struct out_tensor *o = transcode_add(p->t, name, 1, &n);
    o->values = mem_zalloc((size_t)n, sizeof *o->values);
    float *v = mem_zalloc((size_t)n, sizeof *v);
    quant_dequantize(t->type, t->data, v, (size_t)n);
    int64_t head_dim = heads ? n / heads : n;
    for (int64_t i = 0; i < n; i++) {
        int64_t h = i / head_dim, j = i % head_dim;
        o->values[i] = v[heads ? h * head_dim + j % 2 * (head_dim / 2) + j / 2 : i];
    }
    mem_free(v);
    return true;
}

/* All experts of one projection, stacked. */
static bool add_experts(struct plan *p, int layer, const char *to, const char *from, int64_t n,
                        int64_t rows)
{
    char name[128], base[128];
    int count = p->c->n_expert;
    snprintf(name, sizeof name, "blk.%d.%s.weight", layer, to);
    struct out_tensor *o = transcode_add(p->t, name, 3, (int64_t[]){n, rows, count});
    o->rows = rows;
    o->n_mats = count;
    o->mats = mem_zalloc((size_t)count, sizeof *o->mats);
    for (int e = 0; e < count; e++) {
        snprintf(base, sizeof base, "model.layers.%d.mlp.experts.%d.%s", layer, e, from);
        if (!matrix_source(p, base, n, rows, &o->mats[e]))
            return false;
    }
    return true;
}

static bool add_layer(struct plan *p, int i)
{
    const struct config *c = p->c;
    int64_t embd = c->n_embd, q = (int64_t)c->n_heads * c->head_dim,
            kv = (int64_t)c->n_kv_heads * c->head_dim;
    bool weave = c->family->weaves_qk;
    char to[64], from[96];
#define TO(s)   (snprintf(to, sizeof to, "blk.%d.%s", i, s), to)
#define FROM(s) (snprintf(from, sizeof from, "model.layers.%d.%s", i, s), from)
    static const struct {
        const char *to, *from;
    } projections[] = {{"attn_q", "self_attn.q_proj"},
                       {"attn_k", "self_attn.k_proj"},
                       {"attn_v", "self_attn.v_proj"}};
    if (!add_vector(p, TO("attn_norm"), FROM("input_layernorm"), "weight", embd, 0, false))
        return false;
    for (int k = 0; k < 3; k++) {
        int64_t rows = k == 0 ? q : kv;
        int heads = weave && k < 2 ? (k == 0 ? c->n_heads : c->n_kv_heads) : 0;
        if (!add_matrix(p, TO(projections[k].to), FROM(projections[k].from), embd, rows, heads) ||
            !add_vector(p, TO(projections[k].to), FROM(projections[k].from), "bias", rows, heads,
                        true))
            return false;
    }
    if (!add_vector(p, TO("attn_q_norm"), FROM("self_attn.q_norm"), "weight", c->head_dim, 0,
                    true) ||
        !add_vector(p, TO("attn_k_norm"), FROM("self_attn.k_norm"), "weight", c->head_dim, 0,
                    true) ||
        !add_matrix(p, TO("attn_output"), FROM("self_attn.o_proj"), q, embd, 0) ||
        !add_vector(p, TO("ffn_norm"), FROM("post_attention_layernorm"), "weight", embd, 0, false))
        return false;
    if (c->is_moe[i])
        return add_matrix(p, TO("ffn_gate_inp"), FROM("mlp.gate"), embd, c->n_expert, 0) &&
               add_experts(p, i, "ffn_gate_exps", "gate_proj", embd, c->n_ff_exp) &&
               add_experts(p, i, "ffn_up_exps", "up_proj", embd, c->n_ff_exp) &&
               add_experts(p, i, "ffn_down_exps", "down_proj", c->n_ff_exp, embd);
    return add_matrix(p, TO("ffn_gate"), FROM("mlp.gate_proj"), embd, c->n_ff, 0) &&
           add_matrix(p, TO("ffn_up"), FROM("mlp.up_proj"), embd, c->n_ff, 0) &&
           add_matrix(p, TO("ffn_down"), FROM("mlp.down_proj"), c->n_ff, embd, 0);
#undef TO
#undef FROM
}

/* Llama 3's stretched frequencies, as GGUF has them: factors that divide the plain ones. */
static void add_rope_factors(struct plan *p)
{
    int64_t half = p->c->n_rot / 2;
    struct config plain = *p->c;
    plain.rope.kind = ROPE_PLAIN;
    float *a = mem_zalloc((size_t)half, sizeof *a), *b = mem_zalloc((size_t)half, sizeof *b), scale;
    rope_frequencies(&plain.rope, plain.n_rot, NULL, a, &scale);
    rope_frequencies(&p->c->rope, p->c->n_rot, NULL, b, &scale);
    struct out_tensor *o = transcode_add(p->t, "rope_freqs.weight", 1, &half);
    o->values = a;
    for (int64_t i = 0; i < half; i++)
        a[i] = (float)((double)a[i] / (double)b[i]);
    mem_free(b);
}

static bool plan_tensors(struct plan *p)
{
    const struct config *c = p->c;
    if (!add_matrix(p, "token_embd", "model.embed_tokens", c->n_embd, c->n_vocab, 0))
        return false;
    if (c->rope.kind == ROPE_LLAMA3)
        add_rope_factors(p);
    for (int i = 0; i < c->n_layers; i++)
        if (!add_layer(p, i))
            return false;
    if (!add_vector(p, "output_norm", "model.norm", "weight", c->n_embd, 0, false))
        return false;
    if (c->tied)
        find(p, "lm_head", "weight"); /* some folders hold it all the same */
    else if (!add_matrix(p, "output", "lm_head", c->n_embd, c->n_vocab, 0))
        return false;
    for (size_t i = 0; i < p->f->n_tensors; i++) {
        const char *name = p->f->tensors[i].name;
        if (!p->used[i] && !strstr(name, "rotary_emb.inv_freq"))
            return error_set(p->err, "%s: tensor %s: no place for it in a %s GGUF", p->f->path,
                             name, c->family->name);
    }
    return true;
}

/* Metadata. */

static void set_u32(struct gguf_writer *w, const char *arch, const char *key, int v)
{
    char full[96];
    snprintf(full, sizeof full, "%s.%s", arch, key);
    gguf_set_u32(w, full, (uint32_t)v);
}

static void set_f32(struct gguf_writer *w, const char *arch, const char *key, double v)
{
    char full[96];
    snprintf(full, sizeof full, "%s.%s", arch, key);
    gguf_set_f32(w, full, (float)v);
}

static void set_rope(struct gguf_writer *w, const char *arch, const struct config *c)
{
    const struct rope_config *r = &c->rope;
    set_f32(w, arch, "rope.freq_base", r->theta);
    set_u32(w, arch, "rope.dimension_count", c->n_rot);
    if (r->kind != ROPE_LINEAR && r->kind != ROPE_YARN)
        return;
    char key[96];
    snprintf(key, sizeof key, "%s.rope.scaling.type", arch);
    const char *kind = r->kind == ROPE_LINEAR ? "linear" : "yarn";
    gguf_set_string(w, key, kind, strlen(kind));
    set_f32(w, arch, "rope.scaling.factor", r->factor);
    if (r->kind == ROPE_LINEAR)
        return;
    set_u32(w, arch, "rope.scaling.original_context_length", r->original_context);
    set_f32(w, arch, "rope.scaling.yarn_beta_fast", r->beta_fast);
    set_f32(w, arch, "rope.scaling.yarn_beta_slow", r->beta_slow);
    /* readers multiply it by 0.1 ln(factor) + 1, which is the usual value by itself */
    if (r->attn_factor > 0)
        set_f32(w, arch, "rope.scaling.attn_factor",
                r->attn_factor / (0.1 * log(r->factor > 1 ? r->factor : 1) + 1));
}

/* What the author advises for sampling, under the names readers of GGUF look for. */
static void set_sampling(struct gguf_writer *w, const json_t *generation)
{
    static const char *const keys[][2] = {
        {"temperature", "general.sampling.temp"},
        {"top_p", "general.sampling.top_p"},
        {"min_p", "general.sampling.min_p"},
        {"repetition_penalty", "general.sampling.penalty_repeat"}};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const json_t *v = json_object_get(generation, keys[i][0]);
        if (json_is_number(v))
            gguf_set_f32(w, keys[i][1], (float)json_number_value(v));
    }
    const json_t *k = json_object_get(generation, "top_k");
    if (json_is_integer(k) && json_integer_value(k) >= 0 && json_integer_value(k) <= INT32_MAX)
        gguf_set_u32(w, "general.sampling.top_k", (uint32_t)json_integer_value(k));
}

static bool set_metadata(struct gguf_writer *w, const struct plan *p, const struct mix *mix)
{
    const struct config *c = p->c;
    const char *arch = c->family->gguf_as ? c->family->gguf_as : c->family->name;
    int window = c->window[0];
    for (int i = 1; i < c->n_layers; i++)
        if (c->window[i] != window)
            return error_set(p->err,
                             "%s: config.json: sliding_window in some layers only has no place in "
                             "GGUF",
                             p->f->path);
    char *dir = convert_dir(p->f);
    char *slash = strrchr(dir, '/');
    const char *name = slash && slash[1] ? slash + 1 : dir;
    gguf_set_string(w, "general.architecture", arch, strlen(arch));
    gguf_set_string(w, "general.type", "model", 5);
    gguf_set_string(w, "general.name", name, strlen(name));
    mem_free(dir);
    set_sampling(w, p->f->generation_config);
    gguf_set_u32(w, "general.file_type", (uint32_t)mix->file_type);
    gguf_set_u32(w, "general.quantization_version", 2);
    set_u32(w, arch, "block_count", c->n_layers);
    set_u32(w, arch, "context_length", c->context);
    set_u32(w, arch, "embedding_length", c->n_embd);
    set_u32(w, arch, "feed_forward_length", c->n_ff ? c->n_ff : c->n_ff_exp);
    set_u32(w, arch, "attention.head_count", c->n_heads);
    set_u32(w, arch, "attention.head_count_kv", c->n_kv_heads);
    set_u32(w, arch, "attention.key_length", c->head_dim);
    set_u32(w, arch, "attention.value_length", c->head_dim);
    set_f32(w, arch, "attention.layer_norm_rms_epsilon", (double)c->norm_eps);
    set_u32(w, arch, "vocab_size", c->n_vocab);
    if (window)
        set_u32(w, arch, "attention.sliding_window", window);
    set_rope(w, arch, c);
    if (c->n_expert) {
        set_u32(w, arch, "expert_count", c->n_expert);
        set_u32(w, arch, "expert_used_count", c->n_expert_used);
        set_u32(w, arch, "expert_feed_forward_length", c->n_ff_exp);
        char key[96];
        snprintf(key, sizeof key, "%s.expert_weights_norm", arch);
        gguf_set_bool(w, key, c->norm_topk);
    }
    return true;
}

char *convert_dir(const struct tensorfile *f)
{
    /* every shard lies in the folder */
    const char *path = f->shards[0].path, *slash = strrchr(path, '/');
    char *dir = slash ? mem_strndup(path, (size_t)(slash - path)) : mem_strdup(".");
    char *full = realpath(dir, NULL);
    if (full) {
        mem_free(dir);
        dir = mem_strdup(full);
        free(full);
    }
    return dir;
}

/* The folder's own type, told by the embedding. Packed weights are finer than BF16 can hold. */
static const struct mix *source_mix(const struct tensorfile *f, const struct config *c)
{
    const struct tensor *t = tensorfile_find(f, "model.embed_tokens.weight");
    enum dtype type = t ? t->type : DT_BF16;
    if (c->packing != PACK_NONE && type == DT_BF16)
        type = DT_F16;
    return mix_find(type == DT_F32 ? "F32" : type == DT_F16 ? "F16" : "BF16");
}

static bool write_folder(struct plan *p, const char *out, const struct convert_options *opt,
                         struct convert_result *result)
{
    struct mix_model model;
    convert_mix_model(p->c, p->t->importance != NULL, &model);
    if (!plan_tensors(p) || !convert_choose(p->t, opt, &model, p->err))
        return false;
    convert_count(p->t, result);
    if (opt->planned)
        opt->planned(opt->arg, p->t);
    if (opt->dry_run)
        return true;
    struct gguf_writer *w = gguf_writer_new(out, p->err);
    if (!w)
        return false;
    bool ok = set_metadata(w, p, opt->mix) && vocab_write(w, p->f, p->c, opt, p->err);
    if (ok) {
        ok = transcode_run(p->t, w, p->err);
        if (!ok && !gguf_writer_failed(w, NULL) && strncmp(p->err->msg, "tensor", 6) == 0)
            error_prefix(p->err, "%s", p->f->path);
    }
    ok = ok && gguf_writer_finish(w, p->err);
    result->bytes_out = ok ? gguf_writer_bytes(w) : 0;
    gguf_writer_free(w);
    return ok;
}

bool convert_folder(const char *in, const char *out, const struct convert_options *options,
                    struct convert_result *result, struct error *err)
{
    struct tensorfile *f = tensorfile_open(in, err);
    if (!f)
        return false;
    struct convert_options opt = *options;
    struct config *c = mem_zalloc(1, sizeof *c);
    struct imatrix *im = NULL;
    bool ok = !f->is_gguf;
    if (!ok)
        error_set(err, "%s: a GGUF already: `steel quantize` changes its type", in);
    ok = ok && config_load(f, c, err);
    if (ok && opt.imatrix) {
        im = imatrix_open(opt.imatrix, err);
        ok = im != NULL;
    }
    if (ok) {
        if (!opt.mix)
            opt.mix = source_mix(f, c);
        struct transcode t = {.in = f,
                              .importance = im,
                              .threads = opt.threads,
                              .progress = opt.progress,
                              .progress_arg = opt.arg};
        struct plan p = {f, c, &t, mem_zalloc(f->n_tensors, sizeof(bool)), err};
        ok = write_folder(&p, out, &opt, result);
        mem_free(p.used);
        transcode_clear(&t);
    }
    imatrix_close(im);
    mem_free(c);
    tensorfile_close(f);
    return ok;
}
