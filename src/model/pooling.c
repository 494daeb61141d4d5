/* Pooling. See pooling.h. */
#include "model/pooling.h"
#include "base/mem.h"
#include "base/buf.h"
#include "model/families/family.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { JSON_MAX = 1 << 20, WIDTH_MAX = 1 << 20 };

static const char *const names[] = {"none", "cls", "mean", "last", "rank"};

int pooling_kind_of(const char *name)
{
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (!strcmp(name, names[i]))
            return i;
    return -1;
}

const char *pooling_name(enum pooling_kind kind)
{
    return names[kind];
}

void pooling_clear(struct pooling *p)
{
    for (int i = 0; i < p->n_dense; i++) {
        mem_free(p->dense[i].w);
        mem_free(p->dense[i].bias);
        mem_free(p->dense[i].gain);
    }
    *p = (struct pooling){0};
}

/* A tensor's floats, shape checked. NULL: see err. */
static float *floats(const struct tensorfile *f, const struct tensor *t, int64_t d0, int64_t d1,
                     struct error *err)
{
    if (t->dims[0] != d0 || t->dims[1] != d1 || t->dims[2] != 1 || t->dims[3] != 1) {
        error_set(err, "%s: tensor %s: shape [%lld, %lld], expected [%lld, %lld]", f->path, t->name,
                  (long long)t->dims[0], (long long)t->dims[1], (long long)d0, (long long)d1);
        return NULL;
    }
    if (!dtype_is_weight(t->type) || d0 % dtype_table[t->type].block_len) {
        error_set(err, "%s: tensor %s: type %s is not supported", f->path, t->name, t->type_name);
        return NULL;
    }
    float *v = mem_zalloc((size_t)(d0 * d1), sizeof *v);
    quant_dequantize(t->type, t->data, v, (size_t)(d0 * d1));
    return v;
}

/* Adds a dense layer by its tensors' names. n_out 0: taken from the tensor. */
static bool add_dense(struct pooling *p, const struct tensorfile *f, const char *weight,
                      const char *bias, int n_out, enum dense_act act, struct error *err)
{
    const struct tensor *w = tensorfile_find(f, weight), *b = tensorfile_find(f, bias);
    if (!w)
        return error_set(err, "%s: tensor %s: missing", f->path, weight);
    if (p->n_dense == POOLING_MAX_DENSE)
        return error_set(err, "%s: more than %d dense layers", f->path, POOLING_MAX_DENSE);
    if (!n_out && (w->dims[1] < 1 || w->dims[1] > WIDTH_MAX))
        return error_set(err, "%s: tensor %s: %lld rows", f->path, weight, (long long)w->dims[1]);
    struct dense *d = &p->dense[p->n_dense++];
    *d = (struct dense){.n_in = p->width, .n_out = n_out ? n_out : (int)w->dims[1], .act = act};
    d->w = floats(f, w, d->n_in, d->n_out, err);
    d->bias = d->w && b ? floats(f, b, d->n_out, 1, err) : NULL;
    p->width = d->n_out;
    return d->w && (!b || d->bias);
}

/* A sentence-transformers subfolder, opened as a model of its own. */
static bool add_dense_folder(struct pooling *p, const char *dir, const json_t *config,
                             struct error *err)
{
    static const struct {
        const char *end;
        enum dense_act act;
    } acts[] = {
        {"Identity", DENSE_NONE}, {"Tanh", DENSE_TANH}, {"GELU", DENSE_GELU}, {"ReLU", DENSE_RELU}};
    const char *name = json_string_value(json_object_get(config, "activation_function"));
    int act = name ? -1 : DENSE_TANH;
    for (int i = 0; name && i < 4; i++) {
        size_t n = strlen(name), m = strlen(acts[i].end);
        if (n >= m && !strcmp(name + n - m, acts[i].end))
            act = (int)acts[i].act;
    }
    if (act < 0)
        return error_set(err, "%s/config.json: activation_function \"%.60s\" is not supported", dir,
                         name);
    struct tensorfile *f = tensorfile_open(dir, err);
    bool ok = f && add_dense(p, f, "linear.weight", "linear.bias", 0, (enum dense_act)act, err);
    tensorfile_close(f);
    return ok;
}

/* 1_Pooling/config.json: a mode name, or one of several switches. */
static bool read_mode(struct pooling *p, const char *dir, const json_t *o, struct error *err)
{
    static const struct {
        const char *key, *name;
        int kind;
    } modes[] = {{"pooling_mode_cls_token", "cls", POOLING_CLS},
                 {"pooling_mode_mean_tokens", "mean", POOLING_MEAN},
                 {"pooling_mode_lasttoken", "lasttoken", POOLING_LAST},
                 {"pooling_mode_max_tokens", "max", -1},
                 {"pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens", -1},
                 {"pooling_mode_weightedmean_tokens", "weightedmean", -1}};
    const char *mode = json_string_value(json_object_get(o, "pooling_mode"));
    int n = 0;
    for (int i = 0; i < (int)(sizeof modes / sizeof *modes); i++) {
        bool is =
            mode ? !strcmp(mode, modes[i].name) : json_is_true(json_object_get(o, modes[i].key));
        if (!is)
            continue;
        if (modes[i].kind < 0)
            return error_set(err, "%s/config.json: %s is not supported", dir, modes[i].key);
        p->kind = (enum pooling_kind)modes[i].kind;
        n++;
    }
    return n == 1 || error_set(err, "%s/config.json: %s", dir,
                               n ? "several ways of pooling at once are not supported"
                                 : "no way of pooling that is known");
}

/* One entry of modules.json. */
static bool read_module(struct pooling *p, const char *root, const json_t *m, struct error *err)
{
    const char *type = json_string_value(json_object_get(m, "type"));
    const char *path = json_string_value(json_object_get(m, "path"));
    const char *dot = type ? strrchr(type, '.') : NULL, *kind = dot ? dot + 1 : type;
    if (!kind || !path || strstr(path, "..") || *path == '/')
        return error_set(err, "%s/modules.json: an entry without type and path", root);
    if (!strcmp(kind, "Transformer"))
        return true;
    if (!strcmp(kind, "Normalize")) {
        p->normalize = true;
        return true;
    }
    if (strcmp(kind, "Pooling") && strcmp(kind, "Dense"))
        return error_set(err, "%s/modules.json: module \"%.60s\" is not supported", root, type);
    struct buf dir = {0}, file = {0};
    buf_addf(&dir, "%s/%s", root, path);
    buf_addf(&file, "%s/config.json", dir.p);
    json_t *config = json_load_path(file.p, JSON_MAX, err);
    bool ok = config && (!strcmp(kind, "Pooling") ? read_mode(p, dir.p, config, err)
                                                  : add_dense_folder(p, dir.p, config, err));
    json_decref(config);
    buf_clear(&dir);
    buf_clear(&file);
    return ok;
}

/* Reads modules.json, if the folder has one (*found). */
static bool read_modules(struct pooling *p, const struct tensorfile *f, bool *found,
                         struct error *err)
{
    struct buf path = {0};
    buf_addf(&path, "%s/modules.json", f->path);
    *found = access(path.p, F_OK) == 0;
    json_t *list = *found ? json_load_path(path.p, JSON_MAX, err) : NULL;
    bool ok =
        !*found ||
        (list && (json_is_array(list) || error_set(err, "%s: not a list of modules", path.p)));
    for (size_t i = 0; ok && i < json_array_size(list); i++)
        ok = read_module(p, f->path, json_array_get(list, i), err);
    json_decref(list);
    buf_clear(&path);
    return ok;
}

/* A folder's classification head, under its family's tensor names. */
static bool read_head(struct pooling *p, const struct tensorfile *f, const struct config *c,
                      struct error *err)
{
    const char *pool = json_string_value(json_object_get(f->config, "classifier_pooling"));
    p->row = POOLING_CLS;
    if (tensorfile_find(f, "score.weight")) { /* decoders */
        p->row = POOLING_LAST;
        return add_dense(p, f, "score.weight", "score.bias", 0, DENSE_NONE, err);
    }
    if (tensorfile_find(f, "classifier.out_proj.weight")) /* RoBERTa */
        return add_dense(p, f, "classifier.dense.weight", "classifier.dense.bias", 0, DENSE_TANH,
                         err) &&
               add_dense(p, f, "classifier.out_proj.weight", "classifier.out_proj.bias", 0,
                         DENSE_NONE, err);
    if (tensorfile_find(f, "head.dense.weight")) { /* ModernBERT */
        if (pool && !strcmp(pool, "mean"))
            p->row = POOLING_MEAN;
        if (!add_dense(p, f, "head.dense.weight", "head.dense.bias", 0, DENSE_GELU, err))
            return false;
        struct dense *d = &p->dense[p->n_dense - 1];
        const struct tensor *gain = tensorfile_find(f, "head.norm.weight");
        d->eps = c->norm_eps;
        if (gain && !(d->gain = floats(f, gain, d->n_out, 1, err)))
            return false;
    } else if (tensorfile_find(f, "bert.pooler.dense.weight") &&
               !add_dense(p, f, "bert.pooler.dense.weight", "bert.pooler.dense.bias", 0, DENSE_TANH,
                          err)) {
        return false;
    }
    return add_dense(p, f, "classifier.weight", "classifier.bias", 0, DENSE_NONE, err);
}

static bool read_folder(struct pooling *p, const struct tensorfile *f, const struct config *c,
                        int kind, struct error *err)
{
    const char *class =
        json_string_value(json_array_get(json_object_get(f->config, "architectures"), 0));
    bool found = false, reranks = class && strstr(class, "ForSequenceClassification");
    if (kind == POOLING_RANK || (kind < 0 && reranks)) {
        p->kind = POOLING_RANK;
        return read_head(p, f, c, err);
    }
    if (kind != POOLING_NONE && !read_modules(p, f, &found, err))
        return false;
    if (!found) { /* sentence-transformers' default */
        p->kind = c->family->encoder ? POOLING_MEAN : POOLING_LAST;
        p->normalize = true;
    }
    return true;
}

static bool read_gguf(struct pooling *p, const struct tensorfile *f, const struct config *c,
                      int kind, struct error *err)
{
    static const int kinds[] = {POOLING_NONE, POOLING_MEAN, POOLING_CLS, POOLING_LAST,
                                POOLING_RANK};
    char key[96];
    int64_t type = 0;
    snprintf(key, sizeof key, "%s.pooling_type", c->arch_name);
    bool said = meta_get_int(f, key, &type);
    if (said && (type < 0 || type > 4))
        return error_set(err, "%s: %s: %lld is not known", f->path, key, (long long)type);
    p->normalize = true;
    p->kind = said && type         ? (enum pooling_kind)kinds[type]
              : c->family->encoder ? POOLING_MEAN
                                   : POOLING_LAST;
    if (kind >= 0)
        p->kind = (enum pooling_kind)kind;
    if (p->kind != POOLING_RANK)
        return true;
    p->normalize = false;
    bool modern =
        c->family == &family_modern_bert; /* the head of a GGUF depends on the architecture */
    p->row = modern ? POOLING_MEAN : c->family->encoder ? POOLING_CLS : POOLING_LAST;
    if (tensorfile_find(f, "cls.weight")) {
        if (!add_dense(p, f, "cls.weight", "cls.bias", 0, modern ? DENSE_GELU : DENSE_TANH, err))
            return false;
        struct dense *d = &p->dense[p->n_dense - 1];
        const struct tensor *gain = tensorfile_find(f, "cls.norm.weight");
        d->eps = c->norm_eps;
        if (gain && !(d->gain = floats(f, gain, d->n_out, 1, err)))
            return false;
    }
    return !tensorfile_find(f, "cls.output.weight") ||
           add_dense(p, f, "cls.output.weight", "cls.output.bias", 0, DENSE_NONE, err);
}

bool pooling_load(const struct tensorfile *f, const struct config *c, int kind, struct pooling *p,
                  struct error *err)
{
    *p = (struct pooling){.n_embd = c->n_embd, .width = c->n_embd};
    bool ok = f->is_gguf ? read_gguf(p, f, c, kind, err) : read_folder(p, f, c, kind, err);
    if (ok && kind >= 0)
        p->kind = (enum pooling_kind)kind;
    if (ok && p->kind == POOLING_RANK && !p->n_dense)
        ok = error_set(err, "%s: no classification head to rank by", f->path);
    if (!ok)
        pooling_clear(p);
    return ok;
}

int pooling_declared(const struct tensorfile *f, const struct config *c)
{
    struct buf text = {0};
    int64_t type = 0;
    bool found, encoder = c->family->encoder;
    if (pooling_has_head(f))
        return POOLING_RANK;
    if (f->is_gguf) {
        buf_addf(&text, "%s.pooling_type", c->arch_name);
        found = meta_get_int(f, text.p, &type) && type > 0;
    } else {
        buf_addf(&text, "%s/modules.json", f->path);
        found = access(text.p, F_OK) == 0;
    }
    buf_clear(&text);
    if (f->is_gguf && type == 4)
        return POOLING_RANK;
    return found || encoder ? POOLING_MEAN : -1;
}

bool pooling_has_head(const struct tensorfile *f)
{
    static const char *const heads[] = {"score.weight", "classifier.weight",
                                        "classifier.out_proj.weight", "cls.weight",
                                        "cls.output.weight"};
    bool any = false;
    for (int i = 0; i < 5; i++)
        any |= tensorfile_find(f, heads[i]) != NULL;
    return any;
}

bool pooling_yes_no(const struct tensorfile *f, const struct config *c, int32_t yes, int32_t no,
                    struct pooling *p, struct error *err)
{
    static const char *const heads[] = {"output.weight", "lm_head.weight", "token_embd.weight",
                                        "model.embed_tokens.weight", "embed_tokens.weight"};
    const struct tensor *t = NULL;
    for (int i = 0; i < 5 && !t; i++)
        t = tensorfile_find(f, heads[i]);
    if (!t || t->dims[0] != c->n_embd || t->dims[1] != c->n_vocab || yes < 0 || no < 0 ||
        yes >= c->n_vocab || no >= c->n_vocab || !dtype_is_weight(t->type) ||
        c->n_embd % dtype_table[t->type].block_len)
        return error_set(err, "%s: no output head whose rows of yes and no could be read", f->path);
    *p = (struct pooling){
        .kind = POOLING_RANK, .row = POOLING_LAST, .n_embd = c->n_embd, .width = 1, .n_dense = 1};
    size_t n = (size_t)c->n_embd, row = t->bytes / (size_t)c->n_vocab;
    float *w = mem_zalloc(n, sizeof *w), *other = mem_zalloc(n, sizeof *other);
    quant_dequantize(t->type, t->data + row * (size_t)yes, w, n);
    quant_dequantize(t->type, t->data + row * (size_t)no, other, n);
    for (size_t i = 0; i < n; i++)
        w[i] -= other[i];
    mem_free(other);
    p->dense[0] = (struct dense){.n_in = c->n_embd, .n_out = 1, .w = w};
    return true;
}

void pooling_rows(const struct pooling *p, int n, int *first, int *count)
{
    enum pooling_kind row = p->kind == POOLING_RANK ? p->row : p->kind;
    *first = row == POOLING_LAST ? n - 1 : 0;
    *count = row == POOLING_LAST || row == POOLING_CLS ? 1 : n;
}

static float activate(enum dense_act act, float x)
{
    switch (act) {
    case DENSE_TANH:
        return tanhf(x);
    case DENSE_GELU:
        return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
    case DENSE_RELU:
        return x > 0 ? x : 0;
    default:
        return x;
    }
}

/* Sums sixteen lanes of sixteen products in float, for speed, and those sums in double. */
static double dot(const float *a, const float *b, int n)
{
    double sum = 0;
    int i = 0;
    for (; i + 256 <= n; i += 256) {
        float part[16] = {0};
        for (int j = i; j < i + 256; j += 16)
            for (int k = 0; k < 16; k++)
                part[k] += a[j + k] * b[j + k];
        for (int k = 0; k < 16; k++)
            sum += (double)part[k];
    }
    for (; i < n; i++)
        sum += (double)a[i] * b[i];
    return sum;
}

static void run_dense(const struct dense *d, const float *x, float *y)
{
    for (int o = 0; o < d->n_out; o++) {
        double sum = dot(d->w + (size_t)o * (size_t)d->n_in, x, d->n_in);
        y[o] = activate(d->act, (float)(sum + (d->bias ? (double)d->bias[o] : 0)));
    }
    if (!d->gain)
        return;
    double mean = 0, squares = 0;
    for (int i = 0; i < d->n_out; i++)
        mean += (double)y[i] / d->n_out;
    for (int i = 0; i < d->n_out; i++)
        squares += (y[i] - mean) * (y[i] - mean);
    double scale = 1 / sqrt(squares / d->n_out + (double)d->eps);
    for (int i = 0; i < d->n_out; i++)
        y[i] = (float)((y[i] - mean) * scale) * d->gain[i];
}

static size_t widest(const struct pooling *p)
{
    int most = p->n_embd;
    for (int i = 0; i < p->n_dense; i++)
        most = p->dense[i].n_out > most ? p->dense[i].n_out : most;
    return (size_t)most;
}

size_t pooling_scratch(const struct pooling *p)
{
    return (size_t)p->n_embd * sizeof(double) + 2 * widest(p) * sizeof(float);
}

void pooling_apply(const struct pooling *p, const float *rows, int count, int dims, void *tmp,
                   float *out)
{
    size_t E = (size_t)p->n_embd;
    double *sum = tmp;
    float *x = (float *)(sum + E), *y = x + widest(p);
    for (size_t i = 0; i < E; i++)
        sum[i] = 0;
    int r = 0;
    for (; r + 4 <= count; r += 4, rows += 4 * E)
        for (size_t i = 0; i < E; i++)
            sum[i] += (double)((rows[i] + rows[E + i]) + (rows[2 * E + i] + rows[3 * E + i]));
    for (; r < count; r++, rows += E)
        for (size_t i = 0; i < E; i++)
            sum[i] += (double)rows[i];
    for (size_t i = 0; i < E; i++)
        x[i] = (float)(sum[i] / (count > 0 ? count : 1));
    for (int i = 0; i < p->n_dense; i++) {
        run_dense(&p->dense[i], x, y);
        float *t = x;
        x = y;
        y = t;
    }
    int n = dims > 0 && dims < p->width ? dims : p->width;
    double squares = 0;
    for (int i = 0; i < n; i++)
        squares += (double)x[i] * x[i];
    double scale = p->normalize && squares > 0 ? 1 / sqrt(squares) : 1;
    for (int i = 0; i < n; i++)
        out[i] = (float)(x[i] * scale);
}
