/*
 * Reads adapters. See adapter.h. Both file formats hold pairs of tensors (A, B) named after the
 * module they change. A name maps to rows of the model's weights (struct lora_target). B's rows are
 * reordered to match the weight in memory. Owns nothing but the result.
 */
#include "model/adapter.h"
#include "backend/backend.h"
#include "base/buf.h"
#include "base/map.h"
#include "base/mem.h"
#include "base/siphash.h"
#include "base/sysmem.h"
#include "model/build.h"
#include "model/families/family.h"
#include "model/cut.h"
#include "text/tokenizer/regex.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PATTERNS = 2048 };

/* A module name an adapter may use, and the rows it refers to. */
struct lora_target {
    char *name; /* owned */
    int spec, rows;
    int expert; /* -1: all of them */
    int next;   /* next target of the same name; -1 = none */
    bool fused; /* PEFT's name for all experts' weights; shapes tell gate_up from down */
};

struct lora_pair {
    const struct tensor *a, *b;
    char *module; /* owned */
};

struct reading {
    const struct tensorfile *f;
    const struct config *c;
    bool model_is_gguf;
    const struct tensor_spec *specs;
    int n_specs;
    struct error *err;
    struct lora_target *targets; /* (n_targets) */
    int n_targets, cap_targets;
    struct map by_name;      /* -> the first target of the name */
    struct lora_pair *pairs; /* (n_pairs) */
    int n_pairs, cap_pairs;
    double alpha; /* GGUF: 0 = none */
    struct patterns {
        struct pattern {
            struct regex *re;
            double value;
        } * each; /* (n) */
        int n;
    } rank_of, alphas;
    struct regex_scratch scratch;
    bool turned; /* in and out are swapped for square parameters */
    struct adapter *out;
};

static bool fail(struct reading *r, const struct tensor *t, const char *what)
{
    return error_set(r->err, "%s: tensor %.200s: %s", r->f->path, t->name, what);
}

/* Names of the model's weights */

/* Rows of the whole weight, before it is cut for several processes. */
static int spec_rows(const struct tensor_spec *spec)
{
    int n = 0;
    for (int k = 0; k < spec->n_rows; k++)
        n += spec->rows[k].n;
    return n;
}

static void add_target(struct reading *r, struct lora_target t, const char *name)
{
    int64_t known = -1;
    if (r->n_targets == r->cap_targets) {
        r->cap_targets = r->cap_targets ? 2 * r->cap_targets : 256;
        r->targets = mem_realloc(r->targets, (size_t)r->cap_targets, sizeof *r->targets);
    }
    t.name = mem_strdup(name);
    t.next = -1;
    if (map_get(&r->by_name, name, strlen(name), &known)) {
        t.next = r->targets[known].next;
        r->targets[known].next = r->n_targets;
    } else {
        map_add(&r->by_name, t.name, strlen(name), r->n_targets);
    }
    r->targets[r->n_targets++] = t;
}

/* The name in either kind of file, without suffix. A folder's names start with "model." or
 * "lm_head". */
static void write_name(const char *format, int layer, int expert, char out[192])
{
    static const char suffix[] = ".weight"; /* of whole names */
    format += format[0] == '=';
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    snprintf(out, 192, format, layer, expert);
#pragma GCC diagnostic pop
    size_t n = strlen(out), end = sizeof suffix - 1;
    if (n > end && !strcmp(out + n - end, suffix))
        out[n - end] = 0;
}

/* To PEFT, all experts of a layer are one module if the model stores them as one tensor. */
static void add_fused(struct reading *r, struct lora_target t, const char *name)
{
    static const char *const ends[] = {"", ".base_layer", ".gate_up_proj", ".down_proj"};
    const char *at = strstr(name, ".experts.");
    for (size_t i = 0; at && i < sizeof ends / sizeof *ends; i++) {
        char fused[224];
        snprintf(fused, sizeof fused, "%.*s.experts%s", (int)(at - name), name, ends[i]);
        t.fused = true;
        t.expert = -1;
        add_target(r, t, fused);
    }
}

static void list_rows(struct reading *r, int i, int k)
{
    const struct tensor_spec *spec = &r->specs[i];
    const struct tensor_name *n = spec->rows[k].name;
    struct lora_target t = {.spec = i, .rows = k, .expert = -1};
    char name[192] = "";
    bool experts = spec->role == WEIGHT_EXPERTS || spec->role == WEIGHT_EXPERTS_SHARED;
    if (r->f->is_gguf) {
        if (n->gguf && n->gguf[0] != '=') {
            write_name(n->gguf, spec->layer, 0, name);
            add_target(r, t, name);
        }
    } else if (n->hf) {
        const char *one = strstr(n->hf, "%d");
        bool each = experts && one && strstr(one + 1, "%d");
        int step = r->c->family->folder_step;
        for (int e = 0; e < (each ? spec->n_expert : 1); e++) {
            write_name(n->hf, step ? spec->layer / step : spec->layer, e, name);
            t.expert = each ? e : -1;
            if (!experts || each)
                add_target(r, t, name);
            if (experts && e == 0)
                add_fused(r, t, name);
        }
    }
    if (spec->role == WEIGHT_HEAD && !strstr(name, r->f->is_gguf ? "output" : "lm_head"))
        add_target(r, t,
                   r->f->is_gguf ? "output" : "lm_head"); /* tied embeddings: the head alone */
}

static void list_targets(struct reading *r)
{
    map_init(&r->by_name, 1024);
    for (int i = 0; i < r->n_specs; i++)
        for (int k = 0; r->specs[i].w && !r->specs[i].eagle && k < r->specs[i].n_rows; k++)
            list_rows(r, i, k);
}

/* Pairs of tensors */

/* Whether name has this ending; *len is the length before it. */
static bool ends_with(const char *name, const char *end, size_t *len)
{
    size_t n = strlen(name), m = strlen(end);
    if (n <= m || strcmp(name + n - m, end) != 0)
        return false;
    *len = n - m;
    return true;
}

static bool add_pair(struct reading *r, const struct tensor *a, size_t len, const char *b_end)
{
    struct buf other = {0};
    buf_addf(&other, "%.*s%s", (int)len, a->name, b_end);
    const struct tensor *b = tensorfile_find(r->f, other.p);
    bool ok = b || error_set(r->err, "%s: tensor %.200s: missing beside %.200s", r->f->path,
                             other.p, a->name);
    buf_clear(&other);
    if (!ok)
        return false;
    if (r->n_pairs == r->cap_pairs) {
        r->cap_pairs = r->cap_pairs ? 2 * r->cap_pairs : 256;
        r->pairs = mem_realloc(r->pairs, (size_t)r->cap_pairs, sizeof *r->pairs);
    }
    r->pairs[r->n_pairs++] = (struct lora_pair){a, b, mem_strndup(a->name, len)};
    return true;
}

/* PEFT's name in the families' spelling: without the wrapper, with the text model under
 * "model.". */
static void plain_module(struct lora_pair *p)
{
    static const char wrapper[] = "base_model.model.";
    const char *m = p->module;
    if (!strncmp(m, wrapper, sizeof wrapper - 1))
        m += sizeof wrapper - 1;
    struct buf out = {0};
    if (config_is_head(m))
        buf_adds(&out, "lm_head");
    else if (config_root_len(m))
        buf_addf(&out, "model.%s", m + config_root_len(m));
    else if (!strncmp(m, "layers.", 7) || !strncmp(m, "h.", 2))
        buf_addf(&out, "model.%s", m); /* adapter of a model without a head */
    else
        buf_adds(&out, m);
    mem_free(p->module);
    p->module = mem_strdup(out.p);
    buf_clear(&out);
}

static bool list_peft(struct reading *r)
{
    static const char *const ends[][2] = {{".lora_A.weight", ".lora_B.weight"},
                                          {".lora_A.default.weight", ".lora_B.default.weight"}};
    for (size_t i = 0; i < r->f->n_tensors; i++) {
        const struct tensor *t = &r->f->tensors[i];
        size_t len;
        bool known = false;
        for (int k = 0; k < 2 && !known; k++) {
            known = ends_with(t->name, ends[k][0], &len);
            if (known) {
                if (!add_pair(r, t, len, ends[k][1]))
                    return false;
                plain_module(&r->pairs[r->n_pairs - 1]);
            } else if (ends_with(t->name, ends[k][1], &len)) {
                struct buf a = {0};
                buf_addf(&a, "%.*s%s", (int)len, t->name, ends[k][0]);
                known = tensorfile_find(r->f, a.p);
                if (!known)
                    error_set(r->err, "%s: tensor %.200s: missing beside %.200s", r->f->path, a.p,
                              t->name);
                buf_clear(&a);
                if (!known)
                    return false;
            }
        }
        if (known)
            continue;
        if (strstr(t->name, "lora_magnitude_vector"))
            return fail(r, t, "DoRA adapters are not supported");
        if (strstr(t->name, "lora_embedding_"))
            return fail(r, t, "adapters of embeddings are not supported");
        return fail(r, t, "not the A or B of a LoRA adapter");
    }
    return true;
}

static bool list_gguf(struct reading *r)
{
    for (size_t i = 0; i < r->f->n_tensors; i++) {
        const struct tensor *t = &r->f->tensors[i];
        size_t len;
        if (ends_with(t->name, ".weight.lora_a", &len)) {
            if (!add_pair(r, t, len, ".weight.lora_b"))
                return false;
        } else if (ends_with(t->name, ".weight.lora_b", &len)) {
            struct buf a = {0};
            buf_addf(&a, "%.*s.weight.lora_a", (int)len, t->name);
            bool there = tensorfile_find(r->f, a.p);
            buf_clear(&a);
            if (!there)
                return fail(r, t, "its lora_a is missing");
        } else {
            return fail(r, t, "neither NAME.weight.lora_a nor NAME.weight.lora_b");
        }
    }
    return true;
}

/* Metadata */

static bool refuse(struct reading *r, const char *field, const char *what)
{
    return error_set(r->err, "%s: adapter_config.json: %s: %s", r->f->path, field, what);
}

static bool check_gguf(struct reading *r)
{
    const char *keys[] = {"general.type", "adapter.type", "general.architecture"};
    const char *arch = r->c->family->gguf_as ? r->c->family->gguf_as : r->c->family->name;
    const char *wanted[] = {"adapter", "lora", arch};
    for (int i = 0; i < 3; i++) {
        char *v = meta_get_string(r->f, keys[i]);
        bool ok = v && (!strcmp(v, wanted[i]) || (i == 2 && !strcmp(v, r->c->arch_name)));
        if (!ok && i == 2 && v)
            error_set(r->err, "%s: general.architecture: an adapter for %.40s; the model is %s",
                      r->f->path, v, arch);
        else if (!ok)
            error_set(r->err, "%s: %s: \"%.40s\", where an adapter has \"%s\"", r->f->path, keys[i],
                      v ? v : "", wanted[i]);
        mem_free(v);
        if (!ok)
            return false;
    }
    if (tensorfile_meta(r->f, "adapter.alora.invocation_tokens"))
        return error_set(r->err,
                         "%s: adapter.alora.invocation_tokens: activated LoRA is not supported",
                         r->f->path);
    if (tensorfile_meta(r->f, "adapter.lora.alpha") &&
        (!meta_get_float(r->f, "adapter.lora.alpha", &r->alpha) || !isfinite(r->alpha) ||
         fabs(r->alpha) > 1e6))
        return error_set(r->err, "%s: adapter.lora.alpha: not a number up to 1e6", r->f->path);
    return true;
}

static bool is_on(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    return v && !json_is_null(v) && !json_is_false(v) &&
           !((json_is_array(v) && !json_array_size(v)) ||
             (json_is_object(v) && !json_object_size(v)) ||
             (json_is_number(v) && json_number_value(v) == 0));
}

/* Keys are regular expressions matched against the end of a module's name. */
static bool read_patterns(struct reading *r, const char *field, double hi, struct patterns *out)
{
    const json_t *o = json_object_get(r->f->config, field), *v;
    const char *key;
    if (!o || json_is_null(o))
        return true;
    if (!json_is_object(o))
        return refuse(r, field, "not an object");
    if (json_object_size(o) > MAX_PATTERNS)
        return refuse(r, field, "more than 2048 patterns");
    out->each = mem_zalloc(json_object_size(o), sizeof *out->each);
    json_object_foreach((json_t *)o, key, v)
    {
        char name[128];
        struct error why = {0};
        struct buf text = {0};
        snprintf(name, sizeof name, "%s[\"%.60s\"]", field, key);
        if (!json_is_number(v) || !(json_number_value(v) > 0 && json_number_value(v) <= hi))
            return refuse(r, name, "not a positive number of a sensible size");
        buf_addf(&text, "\\A(?:.*\\.)?(?:%s)\\z", key);
        struct regex *re = regex_new(text.p, text.len, false, &why);
        buf_clear(&text);
        if (!re)
            return refuse(r, name, why.msg);
        out->each[out->n++] = (struct pattern){re, json_number_value(v)};
    }
    return true;
}

static bool check_peft(struct reading *r)
{
    static const struct {
        const char *field, *why;
    } refused[] = {
        {"use_dora", "DoRA adapters are not supported"},
        {"fan_in_fan_out", "transposed weights are not supported"},
        {"lora_bias", "biases of B are not supported"},
        {"modules_to_save", "whole modules saved with the adapter are not supported"},
        {"layer_replication", "replicated layers are not supported"},
        {"alora_invocation_tokens", "activated LoRA is not supported"},
        {"use_qalora", "QALoRA is not supported"},
        {"use_bdlora", "block-diagonal LoRA is not supported"},
        {"arrow_config", "Arrow routing is not supported"},
    };
    const json_t *o = r->f->config;
    const char *type = json_string_value(json_object_get(o, "peft_type"));
    const char *bias = json_string_value(json_object_get(o, "bias"));
    const char *init = json_string_value(json_object_get(o, "init_lora_weights"));
    if (!type || strcmp(type, "LORA") != 0)
        return error_set(r->err,
                         "%s: adapter_config.json: peft_type: \"%.40s\" is not supported "
                         "(\"LORA\" is)",
                         r->f->path, type ? type : "");
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (is_on(o, refused[i].field))
            return refuse(r, refused[i].field, refused[i].why);
    if (bias && strcmp(bias, "none") != 0)
        return refuse(r, "bias", "trained biases are not supported");
    if (init && (!strncmp(init, "pissa", 5) || !strncmp(init, "olora", 5) ||
                 !strncmp(init, "corda", 5) || !strncmp(init, "lora_ga", 7)))
        return refuse(r, "init_lora_weights",
                      "this start changes the base weights too: save the adapter as plain LoRA");
    const json_t *rank = json_object_get(o, "r"), *alpha = json_object_get(o, "lora_alpha");
    if (!json_is_integer(rank) || json_integer_value(rank) < 1 ||
        json_integer_value(rank) > LORA_MAX_RANK)
        return refuse(r, "r", "not a rank from 1 to 1024");
    if (!json_is_number(alpha) || !(fabs(json_number_value(alpha)) <= 1e6))
        return refuse(r, "lora_alpha", "not a number up to 1e6");
    return read_patterns(r, "rank_pattern", LORA_MAX_RANK, &r->rank_of) &&
           read_patterns(r, "alpha_pattern", 1e6, &r->alphas);
}

/* The value of the first matching pattern. *out is unchanged if none matches. */
static bool pattern_value(struct reading *r, const char *field, const struct patterns *p,
                          const char *module, double *out)
{
    size_t start, end;
    for (int i = 0; i < p->n; i++) {
        struct error why = {0};
        enum regex_result res =
            regex_find(p->each[i].re, &r->scratch, module, strlen(module), 0, &start, &end, &why);
        if (res == REGEX_ERROR)
            return refuse(r, field, why.msg);
        if (res == REGEX_FOUND) {
            *out = p->each[i].value;
            return true;
        }
    }
    return true;
}

static void patterns_free(struct patterns *p)
{
    for (int i = 0; i < p->n; i++)
        regex_free(p->each[i].re);
    mem_free(p->each);
}

/* The scale of B A, and the rank that the file states (0: none). */
static bool scale_of(struct reading *r, const struct lora_pair *p, int rank, double *scale,
                     int *said)
{
    const json_t *o = r->f->config;
    *said = 0;
    if (r->f->is_gguf) {
        *scale = r->alpha != 0 ? r->alpha / rank : 1;
        return true;
    }
    double alpha = json_number_value(json_object_get(o, "lora_alpha"));
    double told = json_number_value(json_object_get(o, "r"));
    if (!pattern_value(r, "rank_pattern", &r->rank_of, p->module, &told) ||
        !pattern_value(r, "alpha_pattern", &r->alphas, p->module, &alpha))
        return false;
    *said = (int)told;
    *scale = alpha / (json_is_true(json_object_get(o, "use_rslora")) ? sqrt(told) : told);
    return true;
}

/* Values */

static bool read_values(struct reading *r, const struct tensor *t, float **out)
{
    size_t n = 1;
    for (int i = 0; i < TENSOR_MAX_DIMS; i++)
        n *= (size_t)t->dims[i]; /* bounds were checked at open */
    if (!dtype_is_weight(t->type) || t->dims[0] % dtype_table[t->type].block_len)
        return error_set(r->err, "%s: tensor %.200s: type %s is not supported", r->f->path, t->name,
                         t->type_name);
    float *v = *out = mem_alloc(n * sizeof *v);
    quant_dequantize(t->type, t->data, v, n);
    for (size_t i = 0; i < n; i++)
        if (!isfinite(v[i]))
            return error_set(r->err, "%s: tensor %.200s: value %zu is not finite", r->f->path,
                             t->name, i);
    return true;
}

/* One matrix's part of a pair: A (rank, n_in) and B (rows, rank), with strides in floats. */
struct factors {
    const float *a, *b;
    size_t a_row, a_col, b_row, b_col;
    int rank;
    double scale;
};

/* The row of B that is row i of the weight's rows. */
static int b_row(const struct reading *r, const struct weight_rows *rows, int i)
{
    bool part = rows->tensor_rows && (!r->f->is_gguf || rows->also_gguf);
    int step = rows->step ? rows->step : 1, run = rows->run_length ? rows->run_length : 1;
    if (part)
        return rows->first + step * (i / run) + i % run;
    enum rotary_rows order = rows_order(rows, r->f->is_gguf);
    return order ? rows_to_tensor(rows, order, i) : i;
}

/* Whether the matrix's last rows of A are already these: gate and up of one module share A. */
static bool has_rows(const struct lora_matrix *m, const struct factors *x, size_t n_in)
{
    if (m->rank < x->rank)
        return false;
    const float *last = m->a + (size_t)(m->rank - x->rank) * n_in;
    for (size_t k = 0; k < (size_t)x->rank; k++)
        for (size_t j = 0; j < n_in; j++)
            if (last[k * n_in + j] != x->a[k * x->a_row + j * x->a_col])
                return false;
    return true;
}

/* Adds the factors to one expert's matrix. Row i uses row b_row() + offset of B. */
static bool add_factors(struct reading *r, const struct lora_pair *p, const struct lora_target *t,
                        int e, const struct factors *x, int offset)
{
    const struct tensor_spec *spec = &r->specs[t->spec];
    const struct weight_rows *rows = &spec->rows[t->rows];
    struct lora **change = &r->out->changes[t->spec];
    if (!*change) {
        *change = lora_new(spec->n_in, spec_rows(spec), spec->n_expert);
        r->out->n_changed++;
    }
    struct lora_matrix *m = &(*change)->of[e];
    int first = 0;
    for (int k = 0; k < t->rows; k++)
        first += spec->rows[k].n;
    for (int i = 0; i < m->n_parts; i++)
        if (m->parts[i].first == first)
            return fail(r, p->a, "another tensor changes the same weight");
    CHECK(m->n_parts < LORA_MAX_PARTS, "%d parts", m->n_parts);
    struct lora_part *part = &m->parts[m->n_parts++];
    *part = (struct lora_part){.first = first, .n = rows->n, .at = m->rank, .rank = x->rank};
    if (has_rows(m, x, (size_t)spec->n_in)) {
        part->at = m->rank - x->rank;
    } else {
        size_t n_in = (size_t)spec->n_in, at = (size_t)m->rank * n_in;
        m->rank += x->rank;
        m->a = mem_realloc(m->a, (size_t)m->rank * n_in, sizeof *m->a);
        for (size_t k = 0; k < (size_t)x->rank; k++)
            for (size_t j = 0; j < n_in; j++)
                m->a[at + k * n_in + j] = x->a[k * x->a_row + j * x->a_col];
    }
    part->b = mem_alloc((size_t)rows->n * (size_t)x->rank * sizeof *part->b);
    for (int i = 0; i < rows->n; i++)
        for (int k = 0; k < x->rank; k++) {
            size_t row = (size_t)(b_row(r, rows, i) + offset);
            part->b[(size_t)i * (size_t)x->rank + (size_t)k] =
                (float)(x->scale * (double)x->b[row * x->b_row + (size_t)k * x->b_col]);
        }
    r->out->rank = m->rank > r->out->rank ? m->rank : r->out->rank;
    return true;
}

/* Matching */

static bool refuse_target(struct reading *r, const struct lora_pair *p, const struct lora_target *t)
{
    const struct tensor_spec *spec = &r->specs[t->spec];
    const struct weight_rows *rows = &spec->rows[t->rows];
    if (spec->role == WEIGHT_EMBED)
        return fail(r, p->a, "adapters of embeddings are not supported");
    if (spec->role == WEIGHT_HEAD && strcmp(t->name, r->f->is_gguf ? "output" : "lm_head") != 0)
        return fail(r, p->a, "adapters of embeddings are not supported");
    if (spec->role == WEIGHT_HEADS || rows->stride)
        return fail(r, p->a, "adapters of latent attention's kv_b_proj are not supported");
    if (rows->tiles.groups && r->f->is_gguf != r->model_is_gguf)
        return fail(r, p->a,
                    "its heads lie in another order in the model's kind of file: use a model "
                    "and an adapter of one kind");
    return true;
}

static int rows_of(const struct reading *r, const struct weight_rows *rows)
{
    return rows->tensor_rows && (!r->f->is_gguf || rows->also_gguf) ? rows->tensor_rows : rows->n;
}

static bool bad_shape(struct reading *r, const struct tensor *t, int64_t rows, int64_t columns)
{
    return error_set(r->err,
                     "%s: tensor %.200s: shape [%" PRId64 ", %" PRId64 ", %" PRId64
                     "], expected [%" PRId64 ", %" PRId64 "]",
                     r->f->path, t->name, t->dims[2], t->dims[1], t->dims[0], rows, columns);
}

static bool check_rank(struct reading *r, const struct tensor *t, int64_t rank, int said)
{
    if (rank < 1 || rank > LORA_MAX_RANK)
        return error_set(r->err, "%s: tensor %.200s: rank %" PRId64 "; 1 to %d are supported",
                         r->f->path, t->name, rank, LORA_MAX_RANK);
    if (said && rank != said)
        return error_set(r->err,
                         "%s: tensor %.200s: rank %" PRId64 ", where adapter_config.json says %d",
                         r->f->path, t->name, rank, said);
    return true;
}

/* Matches a plain matrix, one expert's matrix, or in a GGUF all experts'. */
static bool match_plain(struct reading *r, const struct lora_pair *p, int target)
{
    const struct lora_target *t = &r->targets[target];
    const struct tensor_spec *spec = &r->specs[t->spec];
    int of = rows_of(r, &spec->rows[t->rows]), n = t->expert < 0 ? spec->n_expert : 1, said;
    struct factors x = {0};
    int64_t rank = p->a->dims[1];
    for (int next = target; next >= 0; next = r->targets[next].next)
        if (!refuse_target(r, p, &r->targets[next]))
            return false;
    if (!check_rank(r, p->a, rank, 0) || !scale_of(r, p, (int)rank, &x.scale, &said) ||
        !check_rank(r, p->a, rank, said))
        return false;
    if (p->a->dims[0] != spec->n_in || p->a->dims[2] != n || p->a->dims[3] != 1)
        return bad_shape(r, p->a, rank, spec->n_in);
    if (p->b->dims[0] != rank || p->b->dims[1] != of || p->b->dims[2] != n || p->b->dims[3] != 1)
        return bad_shape(r, p->b, of, rank);
    float *a = NULL, *b = NULL;
    bool ok = read_values(r, p->a, &a) && read_values(r, p->b, &b);
    x.rank = (int)rank;
    x.a_row = (size_t)spec->n_in;
    x.a_col = x.b_col = 1;
    x.b_row = (size_t)rank;
    for (int next = target; ok && next >= 0; next = r->targets[next].next) {
        t = &r->targets[next];
        if ((r->specs[t->spec].n_in != spec->n_in ||
             rows_of(r, &r->specs[t->spec].rows[t->rows]) != of))
            ok = fail(r, p->a, "the model has two weights of this name");
        for (int e = 0; ok && e < n; e++) {
            x.a = a + (size_t)e * (size_t)rank * (size_t)spec->n_in;
            x.b = b + (size_t)e * (size_t)rank * (size_t)of;
            ok = add_factors(r, p, t, t->expert < 0 ? e : t->expert, &x, 0);
        }
    }
    mem_free(a);
    mem_free(b);
    return ok;
}

/* Rows of the parameter that contains a fused target, and the target's first row in it. */
static int fused_rows(const struct reading *r, const struct lora_target *t, int *first)
{
    const struct tensor_spec *spec = &r->specs[t->spec];
    const struct weight_rows *rows = &spec->rows[t->rows];
    *first = 0;
    if (rows->tensor_rows && rows->tensor_rows != rows->n)
        return rows->tensor_rows;
    for (int k = 0; k < t->rows; k++) /* separate tensors follow each other */
        *first += spec->rows[k].n;
    return spec_rows(spec);
}

/* Whether fused adapters have in and out swapped. Non-square parameters decide it for all. */
static bool find_turned(const struct reading *r)
{
    for (int i = 0; i < r->n_pairs; i++) {
        const struct lora_pair *p = &r->pairs[i];
        int64_t at, in = p->a->dims[0], out = p->b->dims[1];
        if (in == out || !map_get(&r->by_name, p->module, strlen(p->module), &at) ||
            !r->targets[at].fused)
            continue;
        for (int next = (int)at; next >= 0; next = r->targets[next].next) {
            int first, n_in = r->specs[r->targets[next].spec].n_in;
            if (out == n_in && in == fused_rows(r, &r->targets[next], &first))
                return true;
        }
    }
    return false;
}

/* PEFT adapters of a 3-D parameter: A (n_expert * rank, in), B (out, rank * n_expert). Expert e has
 * rows e * rank.. of A and columns e, e + n_expert, ... of B. Whether in and out are swapped
 * depends on the model's storage order and the PEFT version; the shapes decide. They also tell
 * gate_up from down. */
static bool match_fused(struct reading *r, const struct lora_pair *p, int target)
{
    int said, n_expert = r->specs[r->targets[target].spec].n_expert;
    int64_t in = p->a->dims[0], out = p->b->dims[1], rank = p->a->dims[1] / n_expert;
    struct factors x = {0};
    if (p->a->dims[1] % n_expert || p->a->dims[2] != 1 || p->a->dims[3] != 1)
        return error_set(r->err, "%s: tensor %.200s: %" PRId64 " rows for %d experts", r->f->path,
                         p->a->name, p->a->dims[1], n_expert);
    if (!check_rank(r, p->a, rank, 0) || !scale_of(r, p, (int)rank, &x.scale, &said) ||
        !check_rank(r, p->a, rank, said))
        return false;
    if (p->b->dims[0] != rank * n_expert || p->b->dims[2] != 1 || p->b->dims[3] != 1)
        return bad_shape(r, p->b, out, rank * n_expert);
    float *a = NULL, *b = NULL;
    bool ok = read_values(r, p->a, &a) && read_values(r, p->b, &b), any = false;
    for (int next = target; ok && next >= 0; next = r->targets[next].next) {
        const struct lora_target *t = &r->targets[next];
        int first, of = fused_rows(r, t, &first), n_in = r->specs[t->spec].n_in;
        bool straight = in == n_in && out == of, turned = out == n_in && in == of;
        if (!straight && !turned)
            continue;
        if (straight && turned)
            straight = !r->turned;
        size_t R = (size_t)rank, E = (size_t)n_expert;
        x.rank = (int)rank;
        for (int e = 0; ok && e < n_expert; e++) {
            const float *ae = a + (size_t)e * R * (size_t)in, *be = b + (size_t)e;
            x.a = straight ? ae : be;
            x.a_row = straight ? (size_t)in : E;
            x.a_col = straight ? 1 : R * E;
            x.b = straight ? be : ae;
            x.b_row = straight ? R * E : 1;
            x.b_col = straight ? E : (size_t)in;
            ok = add_factors(r, p, t, e, &x, first);
        }
        any = true;
    }
    mem_free(a);
    mem_free(b);
    if (ok && !any)
        return error_set(r->err,
                         "%s: tensor %.200s: from %" PRId64 " to %" PRId64
                         " values: no weight of these experts is so",
                         r->f->path, p->a->name, in, out);
    return ok;
}

static bool match(struct reading *r, const struct lora_pair *p)
{
    int64_t at;
    if (!map_get(&r->by_name, p->module, strlen(p->module), &at))
        return fail(r, p->a, "the model has no such weight (is it of another base model?)");
    r->out->bytes += p->a->bytes + p->b->bytes;
    return r->targets[at].fused ? match_fused(r, p, (int)at) : match_plain(r, p, (int)at);
}

struct adapter *adapter_read(const struct tensorfile *f, const struct config *c, bool model_is_gguf,
                             const struct tensor_spec *specs, int n_specs, struct error *err)
{
    if (c->family->encoder) {
        error_set(err, "%s: adapters of encoders are not supported, and the model is one (%s)",
                  f->path, c->family->name);
        return NULL;
    }
    struct adapter *a = mem_zalloc(1, sizeof *a);
    struct reading r = {.f = f,
                        .c = c,
                        .model_is_gguf = model_is_gguf,
                        .specs = specs,
                        .n_specs = n_specs,
                        .err = err,
                        .out = a};
    a->n_specs = n_specs;
    a->changes = mem_zalloc((size_t)n_specs, sizeof *a->changes);
    /* The floats and the backend's copy exist at the same time. */
    size_t need = 4 * tensorfile_bytes(f), room = sysmem_available("");
    if (room && need > room) {
        error_set(err, "%s: needs %.2f GB while it is read; %.2f are free", f->path,
                  (double)need * 1e-9, (double)room * 1e-9);
        adapter_free(a);
        return NULL;
    }
    bool ok = f->is_gguf ? check_gguf(&r) && list_gguf(&r) : check_peft(&r) && list_peft(&r);
    if (ok && !r.n_pairs)
        ok = error_set(err, "%s: no tensors: nothing to adapt", f->path);
    list_targets(&r);
    r.turned = ok && find_turned(&r);
    for (int i = 0; ok && i < r.n_pairs; i++)
        ok = match(&r, &r.pairs[i]);
    ok = ok && tensorfile_is_whole(f, TENSORFILE_ALL, err);
    for (int i = 0; i < n_specs; i++)
        if (a->changes[i] && specs[i].cut)
            a->changes[i] = cut_lora(a->changes[i], specs[i].cut);
    for (int i = 0; i < r.n_pairs; i++)
        mem_free(r.pairs[i].module);
    mem_free(r.pairs);
    for (int i = 0; i < r.n_targets; i++)
        mem_free(r.targets[i].name);
    mem_free(r.targets);
    map_clear(&r.by_name);
    patterns_free(&r.rank_of);
    patterns_free(&r.alphas);
    regex_scratch_clear(&r.scratch);
    if (ok)
        return a;
    adapter_free(a);
    return NULL;
}

struct adapter *adapter_open(const char *path, const struct config *c, bool model_is_gguf,
                             const struct tensor_spec *specs, int n_specs, struct error *err)
{
    struct tensorfile *f = tensorfile_open_adapter(path, err);
    if (!f)
        return NULL;
    struct adapter *a = adapter_read(f, c, model_is_gguf, specs, n_specs, err);
    tensorfile_close(f);
    return a;
}

void adapter_free(struct adapter *a)
{
    if (!a)
        return;
    for (int i = 0; i < a->n_specs; i++)
        lora_free(a->changes[i]);
    mem_free(a->changes);
    mem_free(a);
}

static uint64_t hash(uint64_t h, const void *p, size_t n)
{
    const uint64_t key[2] = {h, n};
    return siphash(key, p, n);
}

static uint64_t hash_matrix(uint64_t h, const struct lora *l, const struct lora_matrix *m)
{
    h = hash(h, m->a, (size_t)m->rank * (size_t)l->n_in * sizeof *m->a);
    for (int i = 0; m->rank && i < m->n_parts; i++) {
        const struct lora_part *p = &m->parts[i];
        const int32_t place[] = {p->first, p->n, p->at, p->rank};
        h = hash(h, place, sizeof place);
        h = hash(h, p->b, (size_t)p->n * (size_t)p->rank * sizeof *p->b);
    }
    return h;
}

uint64_t adapter_mark(const struct adapter *a)
{
    uint64_t h = 0;
    for (int i = 0; i < a->n_specs; i++) {
        const struct lora *l = a->changes[i];
        h = hash(h, &i, sizeof i);
        for (int e = 0; l && e < l->n_expert; e++)
            h = hash_matrix(h, l, &l->of[e]);
    }
    return h;
}

/* Adapters of a loaded model */

void model_take_adapters(struct model *m)
{
    for (int i = 0; i < m->n_specs; i++)
        if (m->specs[i].w && !m->specs[i].w->lora)
            m->specs[i].w->lora = mem_zalloc(LORA_MAX_ADAPTERS, sizeof(void *));
}

bool model_adapt(struct model *m, const struct adapter *a, int number, struct error *err)
{
    const struct backend_ops *op = m->be->ops;
    if (!op->adapters)
        return error_set(err, "LoRA adapters are not supported on %s: use --device cpu", op->name);
    for (int i = 0; i < a->n_specs; i++) {
        struct weight *w = m->specs[i].w;
        if (!a->changes[i])
            continue;
        w->lora[number] = op->adapters->adapt(m->be, w, a->changes[i], err);
        if (!w->lora[number]) {
            model_unadapt(m, number);
            return false;
        }
    }
    return true;
}

void model_unadapt(struct model *m, int number)
{
    for (int i = 0; i < m->n_specs; i++) {
        struct weight *w = m->specs[i].w;
        if (w && w->lora && w->lora[number])
            m->be->ops->adapters->unadapt(m->be, w->lora[number]);
        if (w && w->lora)
            w->lora[number] = NULL;
    }
}

/* Names */

bool adapter_name_check(const char *name, struct error *err)
{
    size_t n = strlen(name);
    if (!n || n >= ADAPTER_NAME_MAX)
        return error_set(err, "an adapter's name has 1 to %d characters", ADAPTER_NAME_MAX - 1);
    for (const char *p = name; *p; p++)
        if ((unsigned char)*p <= 32 || *p == 127 || *p == ':' || *p == ',')
            return error_set(
                err,
                "the adapter's name \"%.60s\" has a blank, a colon, a comma or a control character",
                name);
    return true;
}

bool adapter_ref_parse(const char *text, struct adapter_ref *out, struct error *err)
{
    const char *eq = strchr(text, '='), *slash = strchr(text, '/');
    const char *path = eq && (!slash || eq < slash) ? eq + 1 : text;
    const char *colon = strrchr(path, ':'), *end = path + strlen(path);
    *out = (struct adapter_ref){.scale = 1};
    if (colon && colon[1]) {
        char *stop;
        double v = strtod(colon + 1, &stop);
        if (!*stop && isfinite(v) && fabs(v) <= 1e6) {
            out->scale = (float)v;
            end = colon;
        }
    }
    if (end == path)
        return error_set(err, "\"%.100s\" names no adapter: [NAME=]PATH[:SCALE]", text);
    out->path = mem_strndup(path, (size_t)(end - path));
    const char *name = path > text ? text : out->path;
    size_t n = path > text ? (size_t)(path - text) - 1 : strlen(name);
    if (path == text) {
        while (n > 1 && name[n - 1] == '/')
            n--;
        for (const char *p; (p = memchr(name, '/', n)) && n > 1; name = p + 1)
            n -= (size_t)(p + 1 - name);
        if (n > 5 && !memcmp(name + n - 5, ".gguf", 5))
            n -= 5;
    }
    snprintf(out->name, sizeof out->name, "%.*s", (int)(n < sizeof out->name ? n : 0), name);
    if (adapter_name_check(out->name, err))
        return true;
    mem_free(out->path);
    out->path = NULL;
    return false;
}
