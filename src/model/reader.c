/* Checked numbers from metadata. See reader.h. */
#include "model/reader.h"
#include "model/config.h"

#include <stdio.h>

bool reader_range(const struct meta_reader *r, const char *key, double v, double lo, double hi)
{
    if (v >= lo && v <= hi)
        return true;
    return error_set(r->err, "%s: %s: %.15g is outside %.15g..%.15g", r->f->path, key, v, lo, hi);
}

bool reader_gguf_int(const struct meta_reader *r, const char *suffix, int lo, int hi, bool need,
                     int *out)
{
    char key[128];
    snprintf(key, sizeof key, "%s.%s", r->c->arch_name, suffix);
    const struct meta *m = tensorfile_meta(r->f, key);
    if (!m)
        return need ? error_set(r->err, "%s: %s: missing", r->f->path, key) : true;
    int64_t v;
    if (!meta_get_int(r->f, key, &v))
        return error_set(r->err, "%s: %s: not an integer", r->f->path, key);
    if (!reader_range(r, key, (double)v, lo, hi))
        return false;
    *out = (int)v;
    return true;
}

bool reader_gguf_float(const struct meta_reader *r, const char *suffix, double lo, double hi,
                       bool need, double *out)
{
    char key[128];
    snprintf(key, sizeof key, "%s.%s", r->c->arch_name, suffix);
    if (!tensorfile_meta(r->f, key))
        return need ? error_set(r->err, "%s: %s: missing", r->f->path, key) : true;
    double v;
    if (!meta_get_float(r->f, key, &v))
        return error_set(r->err, "%s: %s: not a number", r->f->path, key);
    if (!reader_range(r, key, v, lo, hi))
        return false;
    *out = v;
    return true;
}

bool reader_gguf_bool(const struct meta_reader *r, const char *suffix, bool *out)
{
    char key[128];
    snprintf(key, sizeof key, "%s.%s", r->c->arch_name, suffix);
    if (!tensorfile_meta(r->f, key) || meta_get_bool(r->f, key, out))
        return true;
    return error_set(r->err, "%s: %s: not true or false", r->f->path, key);
}

bool reader_gguf_layers(const struct meta_reader *r, const char *suffix, int lo, int hi, bool need,
                        int *out)
{
    char key[128];
    int n = r->c->n_layers, one = 0;
    snprintf(key, sizeof key, "%s.%s", r->c->arch_name, suffix);
    const struct meta *m = tensorfile_meta(r->f, key);
    if (!m || m->type != META_ARRAY) {
        if (!reader_gguf_int(r, suffix, lo, hi, need, &one))
            return false;
        for (int i = 0; m && i < n; i++)
            out[i] = one;
        return true;
    }
    if (m->v.a.n < (size_t)n)
        return error_set(r->err, "%s: %s: %zu entries for %d layers", r->f->path, key, m->v.a.n, n);
    for (int i = 0; i < n; i++) {
        double v;
        if (!meta_array_number(&m->v.a, (size_t)i, &v))
            return error_set(r->err, "%s: %s: not numbers", r->f->path, key);
        if (!reader_range(r, key, v, lo, hi))
            return false;
        out[i] = (int)v;
    }
    return true;
}

bool reader_gguf_layer_floats(const struct meta_reader *r, const char *suffix, double lo, double hi,
                              float *out)
{
    char key[128];
    size_t n = (size_t)r->c->n_layers;
    double one = 0;
    snprintf(key, sizeof key, "%s.%s", r->c->arch_name, suffix);
    const struct meta *m = tensorfile_meta(r->f, key);
    if (!m) { /* xIELU's keys have no prefix */
        snprintf(key, sizeof key, "%s", suffix);
        m = tensorfile_meta(r->f, key);
    }
    bool list = m && m->type == META_ARRAY;
    if (m && !list && !meta_get_float(r->f, key, &one))
        return error_set(r->err, "%s: %s: not a number", r->f->path, key);
    if (list && m->v.a.n < n)
        return error_set(r->err, "%s: %s: %zu entries for %zu layers", r->f->path, key, m->v.a.n,
                         n);
    for (size_t i = 0; m && i < n; i++) {
        if (list && !meta_array_number(&m->v.a, i, &one))
            return error_set(r->err, "%s: %s: not numbers", r->f->path, key);
        if (!reader_range(r, key, one, lo, hi))
            return false;
        out[i] = (float)one;
    }
    return true;
}

const json_t *reader_get(const json_t *o, const char *a, const char *b)
{
    const json_t *v = json_object_get(o, a);
    if ((!v || json_is_null(v)) && b)
        v = json_object_get(o, b);
    return v && !json_is_null(v) ? v : NULL;
}

bool reader_int(const struct meta_reader *r, const char *a, const char *b, int lo, int hi,
                bool need, int *out)
{
    const json_t *v = reader_get(r->hf, a, b);
    if (!v)
        return need ? error_set(r->err, "%s: config.json: %s: missing", r->f->path, a) : true;
    if (!json_is_integer(v))
        return error_set(r->err, "%s: config.json: %s: not an integer", r->f->path, a);
    if (!reader_range(r, a, (double)json_integer_value(v), lo, hi))
        return false;
    *out = (int)json_integer_value(v);
    return true;
}

bool reader_number(const struct meta_reader *r, const json_t *o, const char *key, double lo,
                   double hi, bool need, double *out)
{
    const json_t *v = reader_get(o, key, NULL);
    if (!v)
        return need ? error_set(r->err, "%s: config.json: %s: missing", r->f->path, key) : true;
    if (!json_is_number(v))
        return error_set(r->err, "%s: config.json: %s: not a number", r->f->path, key);
    if (!reader_range(r, key, json_number_value(v), lo, hi))
        return false;
    *out = json_number_value(v);
    return true;
}

bool reader_bool(const struct meta_reader *r, const char *key, bool *out)
{
    const json_t *v = reader_get(r->hf, key, NULL);
    if (!v)
        return true;
    if (!json_is_boolean(v))
        return error_set(r->err, "%s: config.json: %s: not true or false", r->f->path, key);
    *out = json_is_true(v);
    return true;
}
