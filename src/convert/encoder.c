/*
 * Encoder metadata in GGUF, in llama.cpp's names: pooling_type, the classification head as cls and
 * cls.output, windows as a period. Modules of sentence-transformers that GGUF cannot express are an
 * error. Owns nothing after the call.
 */
#include "convert/encoder.h"
#include "base/mem.h"
#include "base/buf.h"
#include "model/families/family.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

bool encoder_pools(const struct tensorfile *f, const struct config *c)
{
    struct buf path = {0};
    buf_addf(&path, "%s/modules.json", f->path);
    bool has = c->family->encoder || access(path.p, F_OK) == 0;
    buf_clear(&path);
    return has;
}

static void add_values(struct transcode *t, const char *name, int64_t n, int64_t rows,
                       const float *from)
{
    if (!from)
        return;
    struct out_tensor *o = transcode_add(t, name, rows ? 2 : 1, (const int64_t[]){n, rows});
    size_t count = (size_t)(rows ? n * rows : n);
    o->rows = rows ? rows : 1;
    o->values = mem_zalloc(count, sizeof *o->values);
    memcpy(o->values, from, count * sizeof *from);
}

bool encoder_head(struct transcode *t, const struct tensorfile *f, const struct config *c,
                  struct pooling *p, struct error *err)
{
    if (!pooling_load(f, c, -1, p, err))
        return false;
    if (!p->n_dense)
        return true;
    bool modern = c->family == &family_modern_bert;
    const char *none = NULL;
    if (p->kind != POOLING_RANK)
        none = "modules.json: a Dense layer";
    else if (!c->family->encoder)
        none = "a classification head of a decoder";
    else if (p->n_dense > 2)
        none = "a head of more than two layers";
    else if (modern != (p->row == POOLING_MEAN))
        none = modern ? "config.json: classifier_pooling cls" : "a head on the mean";
    if (none)
        return error_set(err, "%s: %s has no place in a GGUF", f->path, none);
    const struct dense *first = &p->dense[0], *last = &p->dense[p->n_dense - 1];
    if (first != last) {
        add_values(t, "cls.weight", first->n_in, first->n_out, first->w);
        add_values(t, "cls.bias", first->n_out, 0, first->bias);
        add_values(t, "cls.norm.weight", first->n_out, 0, first->gain);
    }
    add_values(t, "cls.output.weight", last->n_in, last->n_out, last->w);
    add_values(t, "cls.output.bias", last->n_out, 0, last->bias);
    return true;
}

/* The labels of a classification head. Readers derive the number of scores from them. */
static void set_labels(struct gguf_writer *w, const char *arch, const struct tensorfile *f, int n)
{
    const json_t *names = json_object_get(f->config, "id2label");
    struct buf packed = {0};
    char key[96];
    for (int i = 0; i < n; i++) {
        char id[16], usual[24];
        snprintf(id, sizeof id, "%d", i);
        snprintf(usual, sizeof usual, "LABEL_%d", i);
        const char *name = json_string_value(json_object_get(names, id));
        name = name ? name : usual;
        gguf_pack_string(&packed, name, strlen(name));
    }
    snprintf(key, sizeof key, "%s.classifier.output_labels", arch);
    gguf_set_strings(w, key, &packed, (size_t)n);
    buf_clear(&packed);
}

/* The period of layers with full attention, starting at layer 0; 0 = there is no such period. */
static int window_period(const struct config *c)
{
    for (int period = 1; period <= c->n_layers; period++) {
        bool fits = true;
        for (int i = 0; i < c->n_layers; i++)
            fits &= (c->window[i] != 0) == (i % period != 0);
        if (fits)
            return period;
    }
    return 0;
}

bool encoder_metadata(struct gguf_writer *w, const char *arch, const struct tensorfile *f,
                      const struct config *c, const struct pooling *p, struct error *err)
{
    static const uint32_t types[] = {[POOLING_NONE] = 0,
                                     [POOLING_MEAN] = 1,
                                     [POOLING_CLS] = 2,
                                     [POOLING_LAST] = 3,
                                     [POOLING_RANK] = 4};
    char key[96];
    snprintf(key, sizeof key, "%s.pooling_type", arch);
    gguf_set_u32(w, key, types[p->kind]);
    if (p->kind == POOLING_RANK)
        set_labels(w, arch, f, p->width);
    if (!c->family->encoder)
        return true;
    snprintf(key, sizeof key, "%s.attention.causal", arch);
    gguf_set_bool(w, key, false);
    snprintf(key, sizeof key, "%s.attention.layer_norm_epsilon", arch);
    gguf_set_f32(w, key, c->norm_eps);
    int window = 0, period = window_period(c);
    for (int i = 0; i < c->n_layers; i++)
        window = c->window[i] ? c->window[i] : window;
    if (!window)
        return true;
    if (!period)
        return error_set(err,
                         "%s: config.json: layer_types: a GGUF says how many layers slide between "
                         "two that do not, and here it is not always the same number",
                         f->path);
    snprintf(key, sizeof key, "%s.attention.sliding_window", arch);
    gguf_set_u32(w, key, (uint32_t)(2 * (window - 1)));
    snprintf(key, sizeof key, "%s.attention.sliding_window_pattern", arch);
    gguf_set_u32(w, key, (uint32_t)period);
    snprintf(key, sizeof key, "%s.rope.freq_base_swa", arch);
    gguf_set_f32(w, key, (float)c->rope_window.theta);
    return true;
}
