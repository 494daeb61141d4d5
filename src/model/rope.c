/* RoPE: reads the scaling parameters of both file formats and computes frequencies. See
 * config.h. */
#include "base/mem.h"
#include "model/config.h"
#include "model/reader.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Reads the factors (half) from a tensor. *there: whether the file has it. */
static bool read_tensor(const struct meta_reader *in, const char *name, int half, float *out,
                        bool *there)
{
    const struct tensor *t = tensorfile_find(in->f, name);
    *there = t != NULL;
    if (!t)
        return true;
    if (t->dims[0] != half || t->dims[1] != 1 || t->dims[2] != 1 || t->dims[3] != 1)
        return error_set(in->err, "%s: tensor %s: %lld entries, expected %d", in->f->path, name,
                         (long long)t->dims[0], half);
    if (t->type != DT_F32 && t->type != DT_F16 && t->type != DT_BF16)
        return error_set(in->err, "%s: tensor %s: type %s where F32, F16 or BF16 is expected",
                         in->f->path, name, t->type_name);
    quant_dequantize(t->type, t->data, out, (size_t)half);
    for (int i = 0; i < half; i++)
        if (!(out[i] > 0))
            return error_set(in->err, "%s: tensor %s: entry %d is not positive", in->f->path, name,
                             i);
    return true;
}

/* RoPE factors of a GGUF: one tensor, or one for short and one for long contexts. */
static bool read_gguf_factors(const struct meta_reader *in)
{
    struct rope_config *r = &in->c->rope;
    int half = in->c->n_rot / 2;
    bool one = false, lasting = false, brief = false;
    if (half > ROPE_MAX_FACTORS || !half)
        return !tensorfile_find(in->f, "rope_freqs.weight") ||
               error_set(in->err, "%s: rope_freqs.weight: %d entries are too many", in->f->path,
                         half);
    if (!read_tensor(in, "rope_freqs.weight", half, in->c->rope_short, &one) ||
        (!one && !read_tensor(in, "rope_factors_short.weight", half, in->c->rope_short, &brief)) ||
        !read_tensor(in, "rope_factors_long.weight", half, in->c->rope_long, &lasting))
        return false;
    if (brief != lasting)
        return error_set(in->err, "%s: rope_factors_%s.weight: missing", in->f->path,
                         brief ? "long" : "short");
    r->factors = one || brief;
    if (lasting)
        r->kind = ROPE_LONG;
    return true;
}

bool rope_read_gguf(const struct meta_reader *in)
{
    struct rope_config *r = &in->c->rope;
    r->theta = 10000;
    if (!reader_gguf_float(in, "rope.freq_base", 1, 1e12, false, &r->theta))
        return false;
    char key[128];
    snprintf(key, sizeof key, "%s.rope.scaling.type", in->c->arch_name);
    char *kind = meta_get_string(in->f, key);
    bool linear = kind && !strcmp(kind, "linear"), yarn = kind && !strcmp(kind, "yarn");
    bool known = !kind || linear || yarn || !strcmp(kind, "none") || !strcmp(kind, "longrope");
    if (!known)
        error_set(in->err, "%s: %s: \"%s\" is not supported (none, linear, yarn and longrope are)",
                  in->f->path, key, kind);
    mem_free(kind);
    if (!known)
        return false;
    r->kind = linear ? ROPE_LINEAR : yarn ? ROPE_YARN : ROPE_PLAIN;
    r->factor = 1;
    r->original_context = in->c->context;
    r->beta_fast = 32;
    r->beta_slow = 1;
    double attn = 1, log_mul = 0;
    if (!reader_gguf_float(in, "rope.scaling.factor", 1e-3, 1e6, r->kind != ROPE_PLAIN,
                           &r->factor) ||
        !reader_gguf_int(in, "rope.scaling.original_context_length", 1, 1 << 30, false,
                         &r->original_context) ||
        !reader_gguf_float(in, "rope.scaling.yarn_beta_fast", 1e-3, 1e6, false, &r->beta_fast) ||
        !reader_gguf_float(in, "rope.scaling.yarn_beta_slow", 1e-3, 1e6, false, &r->beta_slow) ||
        !reader_gguf_float(in, "rope.scaling.yarn_log_multiplier", 0, 1e3, false, &log_mul) ||
        !reader_gguf_float(in, "rope.scaling.attn_factor", 1e-3, 1e3, false, &attn))
        return false;
    r->attn_factor = attn;
    if (r->kind == ROPE_YARN) {
        double l = 0.1 * log(r->factor > 1 ? r->factor : 1);
        r->log_mul = log_mul;
        r->attn_factor = attn * (l + 1) / (log_mul * l + 1);
    }
    return read_gguf_factors(in);
}

static bool read_list(const struct meta_reader *in, const json_t *o, const char *key, int half,
                      float *out)
{
    const json_t *list = reader_get(o, key, NULL);
    if (json_array_size(list) != (size_t)half)
        return error_set(in->err, "%s: config.json: %s: %zu entries, expected %d", in->f->path, key,
                         json_array_size(list), half);
    for (int i = 0; i < half; i++) {
        double v = json_number_value(json_array_get(list, (size_t)i));
        if (!(v > 1e-6 && v < 1e9))
            return error_set(in->err, "%s: config.json: %s: entry %d is not a positive number",
                             in->f->path, key, i);
        out[i] = (float)v;
    }
    return true;
}

/* Long RoPE: two lists of factors. The context in use decides which one applies. */
static bool read_long(const struct meta_reader *in, const json_t *o, struct rope_config *r)
{
    struct config *c = in->c;
    int half = c->n_rot / 2;
    if (half > ROPE_MAX_FACTORS)
        return error_set(in->err, "%s: config.json: long RoPE of %d dimensions is not supported",
                         in->f->path, c->n_rot);
    int original = r->original_context;
    if (!reader_int(in, "original_max_position_embeddings", NULL, 1, 1 << 30, false, &original) ||
        !read_list(in, o, "short_factor", half, c->rope_short) ||
        !read_list(in, o, "long_factor", half, c->rope_long))
        return false;
    r->original_context = original;
    r->factors = true;
    double factor = r->factor != 1 ? r->factor : (double)c->context / original;
    double brief = r->attn_factor, lasting;
    if (!reader_number(in, o, "short_mscale", 1e-3, 1e3, false, &brief))
        return false;
    lasting = brief;
    if (!reader_number(in, o, "long_mscale", 1e-3, 1e3, false, &lasting))
        return false;
    if (brief != lasting)
        return error_set(in->err,
                         "%s: config.json: long_mscale: %g differs from short_mscale, %g: this is "
                         "not supported",
                         in->f->path, lasting, brief);
    r->attn_factor = brief;
    if (r->attn_factor == 0 && factor > 1 && original > 1)
        r->attn_factor = sqrt(1 + log(factor) / log(original));
    return true;
}

/* M-RoPE of one object. */
static bool read_sections(const struct meta_reader *in, const json_t *o, struct rope_config *r)
{
    const json_t *list = reader_get(o, "mrope_section", NULL);
    const json_t *interleaved = reader_get(o, "mrope_interleaved", NULL);
    for (int i = 0; list && i < 3; i++) {
        const json_t *n = json_array_get(list, (size_t)i);
        json_int_t v = json_is_integer(n) ? json_integer_value(n) : -1;
        if (json_array_size(list) != 3 || v < 0 || v > 4096)
            return error_set(in->err,
                             "%s: config.json: mrope_section: expected three numbers of 0 to 4096",
                             in->f->path);
        r->sections[i] = (int)v;
    }
    r->interleaved = interleaved && json_is_true(interleaved);
    return true;
}

/* Hunyuan's "dynamic" RoPE: a constant factor alpha on theta. Others depend on the length of the text. */
static bool read_alpha(const struct meta_reader *in, const json_t *o, struct rope_config *r)
{
    double alpha = 0, n = in->c->head_dim;
    if (!reader_number(in, o, "alpha", 1, 1e9, false, &alpha))
        return false;
    if (alpha == 0 || n < 4)
        return error_set(in->err,
                         "%s: config.json: rope_type \"dynamic\" is supported with alpha only",
                         in->f->path);
    r->theta *= pow(alpha, n / (n - 2));
    return true;
}

static bool read_hf_object(const struct meta_reader *in, const json_t *o, struct rope_config *r)
{
    if (!json_is_object(o))
        return error_set(in->err, "%s: config.json: rope_scaling: not an object", in->f->path);
    const json_t *kind = reader_get(o, "rope_type", "type");
    if (kind && !json_is_string(kind))
        return error_set(in->err, "%s: config.json: rope_type: not a string", in->f->path);
    const char *name = kind ? json_string_value(kind) : "default";
    static const char *const names[] = {"default",      "linear", "llama3", "yarn",   "longrope",
                                        "proportional", "su",     "mrope",  "dynamic"};
    static const enum rope_kind kinds[] = {ROPE_PLAIN, ROPE_LINEAR, ROPE_LLAMA3,
                                           ROPE_YARN,  ROPE_LONG,   ROPE_PROPORTIONAL,
                                           ROPE_LONG,  ROPE_PLAIN,  ROPE_PLAIN};
    int found = -1;
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (!strcmp(name, names[i]))
            found = i;
    if (found < 0)
        return error_set(in->err,
                         "%s: config.json: rope_type \"%.40s\" is not supported (default, linear, "
                         "llama3, yarn, longrope and proportional are)",
                         in->f->path, name);
    r->kind = kinds[found];
    r->beta_fast = 32;
    r->beta_slow = 1;
    double original = r->original_context, mscale = 0, mscale_all = 0;
    const json_t *truncate = reader_get(o, "truncate", NULL);
    r->no_truncate = truncate && json_is_false(truncate);
    if (!read_sections(in, o, r))
        return false;
    bool llama3 = r->kind == ROPE_LLAMA3;
    bool scaled = r->kind == ROPE_LINEAR || r->kind == ROPE_YARN || llama3;
    if (!reader_number(in, o, "rope_theta", 1, 1e12, false, &r->theta) ||
        !reader_number(in, o, "factor", 1e-3, 1e6, scaled, &r->factor) ||
        !reader_number(in, o, "original_max_position_embeddings", 1, 1 << 30, llama3, &original) ||
        !reader_number(in, o, "low_freq_factor", 1e-6, 1e6, llama3, &r->low_freq_factor) ||
        !reader_number(in, o, "high_freq_factor", 1e-6, 1e6, llama3, &r->high_freq_factor) ||
        !reader_number(in, o, "beta_fast", 1e-3, 1e6, false, &r->beta_fast) ||
        !reader_number(in, o, "beta_slow", 1e-3, 1e6, false, &r->beta_slow) ||
        !reader_number(in, o, "attention_factor", 1e-3, 1e3, false, &r->attn_factor) ||
        !reader_number(in, o, "partial_rotary_factor", 0, 1, false, &r->partial) ||
        !reader_number(in, o, "mscale", 0, 1e3, false, &mscale) ||
        !reader_number(in, o, "mscale_all_dim", 0, 1e3, false, &mscale_all))
        return false;
    r->original_context = (int)original;
    if (!strcmp(name, "dynamic") && !read_alpha(in, o, r))
        return false;
    if (r->kind == ROPE_YARN && r->attn_factor == 0 && mscale > 0 && mscale_all > 0) {
        double l = log(r->factor > 1 ? r->factor : 1);
        r->attn_factor = (0.1 * mscale * l + 1) / (0.1 * mscale_all * l + 1);
    }
    if (r->kind != ROPE_YARN && r->kind != ROPE_LONG)
        r->attn_factor = 0;
    return true;
}

bool rope_read_hf(const struct meta_reader *in)
{
    struct config *c = in->c;
    struct rope_config *r = &c->rope;
    const json_t *params = reader_get(in->hf, "rope_parameters", NULL); /* transformers 5 */
    const json_t *scaling = params ? params : reader_get(in->hf, "rope_scaling", NULL);
    /* one object per layer type */
    const json_t *full = reader_get(params, "full_attention", "compress");
    const json_t *sliding = reader_get(params, "sliding_attention", NULL);
    if (full)
        scaling = full;
    r->theta = 10000;
    r->factor = r->partial = 1;
    r->original_context = c->context;
    bool by_layer = json_is_array(reader_get(in->hf, "rope_theta", NULL)); /* the family's */
    if ((!by_layer && !reader_number(in, in->hf, "rope_theta", 1, 1e12, false, &r->theta)) ||
        !reader_number(in, in->hf, "partial_rotary_factor", 0, 1, false, &r->partial) ||
        (scaling && !read_hf_object(in, scaling, r)))
        return false;
    struct rope_config *local = &c->rope_window;
    local->factor = local->partial = 1;
    local->original_context = c->context;
    if (!reader_number(in, in->hf, "rope_local_base_freq", 1, 1e12, false, &local->theta))
        return false;
    if (sliding) {
        local->theta = 10000;
        if (!read_hf_object(in, sliding, local))
            return false;
        if (local->kind == ROPE_LONG)
            return error_set(in->err,
                             "%s: config.json: sliding_attention: long RoPE is not "
                             "supported there",
                             in->f->path);
    }
    if (r->kind != ROPE_PROPORTIONAL)
        c->n_rot = (int)(c->head_dim * r->partial);
    else
        c->n_rot = c->head_dim;
    return r->kind != ROPE_LONG || read_long(in, scaling, r);
}

bool rope_read_gguf_sections(const struct meta_reader *in, bool interleaved)
{
    char key[64];
    snprintf(key, sizeof key, "%s.rope.dimension_sections", in->c->arch_name);
    const struct meta *m = tensorfile_meta(in->f, key);
    for (size_t i = 0; m && i < 3; i++) {
        double n = -1;
        if (m->type != META_ARRAY || !meta_array_number(&m->v.a, i, &n) || !(n >= 0 && n <= 4096))
            return error_set(in->err, "%s: %s: expected numbers of 0 to 4096", in->f->path, key);
        in->c->rope.sections[i] = (int)n;
    }
    in->c->rope.interleaved = interleaved;
    return true;
}

/* Dimension whose wave makes `rotations` turns over the original context (YaRN). */
static double yarn_dim(const struct rope_config *r, int n_rot, double rotations)
{
    const double two_pi = 6.283185307179586;
    return n_rot * log(r->original_context / (rotations * two_pi)) / (2 * log(r->theta));
}

void rope_frequencies(const struct rope_config *r, int n_rot, const float *factors, float *freq,
                      float *mscale)
{
    const double two_pi = 6.283185307179586;
    double low = 0, high = 1;
    *mscale = r->attn_factor > 0 ? (float)r->attn_factor : 1;
    if (r->kind == ROPE_YARN) {
        low = yarn_dim(r, n_rot, r->beta_fast);
        high = yarn_dim(r, n_rot, r->beta_slow);
        if (!r->no_truncate) {
            low = floor(low);
            high = ceil(high);
        }
        low = low < 0 ? 0 : low;
        high = high > n_rot - 1 ? n_rot - 1 : high;
        if (high == low)
            high += 0.001;
        double lf = log(r->factor > 1 ? r->factor : 1);
        *mscale = (float)(r->attn_factor > 0 ? r->attn_factor : 0.1 * lf + 1);
    }
    for (int i = 0; i < n_rot / 2; i++) {
        double f = (double)(float)pow(r->theta, -2.0 * i / n_rot);
        if (r->kind == ROPE_LINEAR) {
            f /= r->factor;
        } else if (r->kind == ROPE_YARN) {
            double ramp = (i - low) / (high - low);
            ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
            f = f / r->factor * ramp + f * (1 - ramp);
        } else if (r->kind == ROPE_LLAMA3) {
            double wavelen = two_pi / f, context = r->original_context;
            double smooth = (context / wavelen - r->low_freq_factor) /
                            (r->high_freq_factor - r->low_freq_factor);
            if (wavelen > context / r->low_freq_factor)
                f /= r->factor;
            else if (wavelen >= context / r->high_freq_factor)
                f = (1 - smooth) * f / r->factor + smooth * f;
        } else if (r->kind == ROPE_PROPORTIONAL && i >= (int)(n_rot * r->partial / 2)) {
            f = 0;
        }
        freq[i] = (float)(factors ? f / (double)factors[i] : f);
    }
}

bool rope_planes(const struct rope_config *r, int n_pairs, uint8_t *plane)
{
    const int *n = r->sections;
    for (int i = 0; i < n_pairs; i++) {
        int at = i % 3;
        if (r->interleaved)
            plane[i] = (uint8_t)(at && i < 3 * n[at] ? at : 0);
        else
            plane[i] = (uint8_t)((i >= n[0]) + (i >= n[0] + n[1]));
    }
    return r->interleaved || n[0] + n[1] + n[2] == n_pairs;
}
