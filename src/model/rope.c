/* RoPE: how files say it is scaled, and the frequencies that come of it. See config.h. */
#include "base/mem.h"
#include "model/config.h"
#include "model/reader.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

bool rope_read_gguf(const struct reader *in)
{
    struct rope_config *r = &in->c->rope;
    r->theta = 10000;
    if (!reader_gguf_float(in, "rope.freq_base", 1, 1e12, false, &r->theta))
        return false;
    char key[128];
    snprintf(key, sizeof key, "%s.rope.scaling.type", in->c->arch_name);
    char *kind = meta_get_string(in->f, key);
    bool linear = kind && !strcmp(kind, "linear"), yarn = kind && !strcmp(kind, "yarn");
    bool known = !kind || linear || yarn || !strcmp(kind, "none");
    if (!known)
        error_set(in->err, "%s: %s: \"%s\" is not supported (none, linear, yarn are)", in->f->path,
                  key, kind);
    mem_free(kind);
    if (!known)
        return false;
    r->kind = linear ? ROPE_LINEAR : yarn ? ROPE_YARN : ROPE_PLAIN;
    r->factor = 1;
    r->original_context = in->c->context;
    r->beta_fast = 32;
    r->beta_slow = 1;
    double attn = 1;
    if (!reader_gguf_float(in, "rope.scaling.factor", 1e-3, 1e6, r->kind != ROPE_PLAIN,
                           &r->factor) ||
        !reader_gguf_int(in, "rope.scaling.original_context_length", 1, 1 << 30, false,
                         &r->original_context) ||
        !reader_gguf_float(in, "rope.scaling.yarn_beta_fast", 1e-3, 1e6, false, &r->beta_fast) ||
        !reader_gguf_float(in, "rope.scaling.yarn_beta_slow", 1e-3, 1e6, false, &r->beta_slow) ||
        !reader_gguf_float(in, "rope.scaling.attn_factor", 1e-3, 1e3, false, &attn))
        return false;
    if (r->kind == ROPE_YARN)
        r->attn_factor = attn * (0.1 * log(r->factor > 1 ? r->factor : 1) + 1);
    return true;
}

bool rope_read_hf(const struct reader *in)
{
    struct rope_config *r = &in->c->rope;
    const json_t *config = in->f->config;
    const json_t *params = reader_get(config, "rope_parameters", NULL); /* transformers 5 */
    const json_t *scaling = params ? params : reader_get(config, "rope_scaling", NULL);
    r->theta = 10000;
    r->factor = 1;
    r->original_context = in->c->context;
    if (!reader_number(in, config, "rope_theta", 1, 1e12, false, &r->theta))
        return false;
    if (!scaling)
        return true;
    if (!json_is_object(scaling))
        return error_set(in->err, "%s: config.json: rope_scaling: not an object", in->f->path);
    const json_t *kind = reader_get(scaling, "rope_type", "type");
    if (kind && !json_is_string(kind))
        return error_set(in->err, "%s: config.json: rope_type: not a string", in->f->path);
    const char *name = kind ? json_string_value(kind) : "default";
    static const char *const names[] = {"default", "linear", "llama3", "yarn"};
    int found = -1;
    for (int i = 0; i < 4; i++)
        if (!strcmp(name, names[i]))
            found = i;
    if (found < 0)
        return error_set(in->err,
                         "%s: config.json: rope_type \"%.40s\" is not supported (default, linear, "
                         "llama3, yarn are)",
                         in->f->path, name);
    r->kind = (enum rope_kind)found;
    r->beta_fast = 32;
    r->beta_slow = 1;
    double original = r->original_context, mscale = 0, mscale_all = 0;
    const json_t *truncate = reader_get(scaling, "truncate", NULL);
    r->no_truncate = truncate && json_is_false(truncate);
    bool llama3 = r->kind == ROPE_LLAMA3;
    if (!reader_number(in, scaling, "rope_theta", 1, 1e12, false, &r->theta) ||
        !reader_number(in, scaling, "factor", 1e-3, 1e6, r->kind != ROPE_PLAIN, &r->factor) ||
        !reader_number(in, scaling, "original_max_position_embeddings", 1, 1 << 30, llama3,
                       &original) ||
        !reader_number(in, scaling, "low_freq_factor", 1e-6, 1e6, llama3, &r->low_freq_factor) ||
        !reader_number(in, scaling, "high_freq_factor", 1e-6, 1e6, llama3, &r->high_freq_factor) ||
        !reader_number(in, scaling, "beta_fast", 1e-3, 1e6, false, &r->beta_fast) ||
        !reader_number(in, scaling, "beta_slow", 1e-3, 1e6, false, &r->beta_slow) ||
        !reader_number(in, scaling, "attention_factor", 1e-3, 1e3, false, &r->attn_factor) ||
        !reader_number(in, scaling, "mscale", 0, 1e3, false, &mscale) ||
        !reader_number(in, scaling, "mscale_all_dim", 0, 1e3, false, &mscale_all))
        return false;
    r->original_context = (int)original;
    if (r->kind == ROPE_YARN && r->attn_factor == 0 && mscale > 0 && mscale_all > 0) {
        double l = log(r->factor > 1 ? r->factor : 1);
        r->attn_factor = (0.1 * mscale * l + 1) / (0.1 * mscale_all * l + 1);
    }
    return true;
}

/* Dimension at which a wave turns `rotations` times over the original context (YaRN). */
static double yarn_dim(const struct config *c, double rotations)
{
    const double two_pi = 6.283185307179586;
    return c->n_rot * log(c->rope.original_context / (rotations * two_pi)) /
           (2 * log(c->rope.theta));
}

void rope_frequencies(const struct config *c, const float *factors, float *freq, float *mscale)
{
    const struct rope_config *r = &c->rope;
    const double two_pi = 6.283185307179586;
    double low = 0, high = 1;
    *mscale = 1;
    if (r->kind == ROPE_YARN) {
        low = yarn_dim(c, r->beta_fast);
        high = yarn_dim(c, r->beta_slow);
        if (!r->no_truncate) {
            low = floor(low);
            high = ceil(high);
        }
        low = low < 0 ? 0 : low;
        high = high > c->n_rot - 1 ? c->n_rot - 1 : high;
        if (high == low)
            high += 0.001;
        double lf = log(r->factor > 1 ? r->factor : 1);
        *mscale = (float)(r->attn_factor > 0 ? r->attn_factor : 0.1 * lf + 1);
    }
    for (int i = 0; i < c->n_rot / 2; i++) {
        double f = (double)(float)pow(r->theta, -2.0 * i / c->n_rot);
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
        }
        freq[i] = (float)(factors ? f / (double)factors[i] : f);
    }
}
