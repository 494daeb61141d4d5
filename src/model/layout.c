/* Compressed layouts of folders: which tensors, what shapes, and the way to our forms. See layout.h. */
#include "model/layout.h"
#include "base/mem.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

/* Stacks are called NAME, not NAME.weight, and what is beside them NAME_weight_scale or NAME_scale. */
static const struct tensor *find(const struct layout_ask *a, const char *suffix)
{
    const struct tensor *t = a->find(a->arg, suffix);
    bool more = !t && a->n_stack && !strncmp(suffix, "weight_", 7);
    return more ? a->find(a->arg, suffix + 7) : t;
}

static bool is_type(const struct tensor *t, const char *name)
{
    return t && !strcmp(t->type_name, name);
}

static bool is_float(const struct tensor *t)
{
    return t->type == DT_F32 || t->type == DT_F16 || t->type == DT_BF16;
}

/* d0 is the contiguous dimension; d2 counts the stack. */
static bool check_shape(const struct layout_ask *a, const struct tensor *t, int64_t d0, int64_t d1,
                        struct error *err)
{
    int64_t d2 = a->n_stack ? a->n_stack : 1;
    if (t->dims[0] == d0 && t->dims[1] == d1 && t->dims[2] == d2 && t->dims[3] == 1)
        return true;
    return error_set(err,
                     "%s: tensor %s: shape [%" PRId64 ", %" PRId64 ", %" PRId64
                     "], expected [%" PRId64 ", %" PRId64 ", %" PRId64 "]",
                     a->path, t->name, t->dims[0], t->dims[1], t->dims[2], d0, d1, d2);
}

static bool bad_type(const struct layout_ask *a, const struct tensor *t, const char *want,
                     struct error *err)
{
    return error_set(err, "%s: tensor %s: type %s where %s is expected", a->path, t->name,
                     t->type_name, want);
}

/* `t` beside the codes: there, and of this type ("float": F32, F16 or BF16). */
static bool check_beside(const struct layout_ask *a, const struct tensor *codes, const char *what,
                         const struct tensor *t, const char *type, struct error *err)
{
    if (!t)
        return error_set(err, "%s: tensor %s: its %s is missing", a->path, codes->name, what);
    bool floats = !strcmp(type, "float");
    return (floats ? is_float(t) : is_type(t, type)) ||
           bad_type(a, t, floats ? "F32, F16 or BF16" : type, err);
}

/* One number for a whole matrix, or for a whole stack. */
static bool check_one(const struct layout_ask *a, const struct tensor *t, struct error *err)
{
    size_t n = t->bytes / dtype_bytes(t->type, 1);
    if (n == 1 || (a->n_stack && n == (size_t)a->n_stack))
        return true;
    return error_set(err, "%s: tensor %s: %zu bytes where one number%s is expected", a->path,
                     t->name, t->bytes, a->n_stack ? " a matrix" : "");
}

/* Whether codes of `wide` entries a row are transposed, as plain tensors of their name are. */
static bool is_across(const struct layout_ask *a, const struct tensor *t, int64_t wide)
{
    return a->across && t->dims[0] == a->n_out && t->dims[1] == wide;
}

/* check_shape of what has `wide` entries a row, in the layout's direction. */
static bool check_wide(const struct layout_ask *a, const struct layout *l, const struct tensor *t,
                       int64_t wide, struct error *err)
{
    return check_shape(a, t, l->across ? a->n_out : wide, l->across ? wide : a->n_out, err);
}

static bool no_stack(const struct layout_ask *a, const struct tensor *t, struct error *err)
{
    return !a->n_stack ||
           error_set(err, "%s: tensor %s: this packing of stacked experts is not supported",
                     a->path, t->name);
}

/* What changes inputs before a product: not known to any layout here. */
static bool no_transform(const struct layout_ask *a, struct error *err)
{
    static const char *const names[] = {"pre_quant_scale", "svdquant_lora_a"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct tensor *t = find(a, names[i]);
        if (t)
            return error_set(err, "%s: tensor %s: scaled or split inputs are not supported",
                             a->path, t->name);
    }
    return true;
}

/* 8-bit integers (out, in) with a scale for groups of columns: rows of Q8_0. `wide` codes a row. */
static bool check_int8(const struct layout_ask *a, struct layout *l, struct error *err)
{
    l->kind = LAYOUT_INT8;
    l->type = DT_Q8_0;
    l->times = l->times == 0 ? 1 : l->times;
    if (l->order && !no_stack(a, l->order, err))
        return false;
    if (a->n_in % QK_32 || l->group_len % QK_32)
        return error_set(err,
                         "%s: tensor %s: groups of %d of %d 8-bit values: not a multiple of %d",
                         a->path, l->data->name, l->group_len, a->n_in, QK_32);
    return true;
}

/* GPTQ's of 8 bits: qweight (in/4, out) I32, qzeros (groups, out/4), the rest as in find_gptq. */
static bool find_gptq8(const struct layout_ask *a, struct layout *l, struct error *err)
{
    l->words = true;
    return check_int8(a, l, err) && check_shape(a, l->data, a->n_out, a->n_in / 4, err) &&
           check_shape(a, l->zero, a->n_out / 4, l->n_groups, err) &&
           check_shape(a, l->scale, a->n_out, l->n_groups, err) &&
           (!l->order || check_shape(a, l->order, a->n_in, 1, err));
}

/* GPTQ: qweight (in/8, out) I32, qzeros (groups, out/8), scales (groups, out), g_idx (in).
 * AWQ: qweight (in, out/8), the rest alike, nibbles in an order of their own. */
static bool find_gptq(const struct layout_ask *a, struct layout *l, struct error *err)
{
    bool awq = a->config->awq;
    l->kind = awq ? LAYOUT_AWQ : LAYOUT_GPTQ;
    l->type = DT_GPTQ4;
    l->zero = find(a, "qzeros");
    l->scale = find(a, "scales");
    l->order = awq ? NULL : find(a, "g_idx");
    l->zero_plus = !awq && a->config->zero_plus;
    int len = a->config->group_len;
    if (!no_stack(a, l->data, err))
        return false;
    if (len == 0)
        return error_set(err, "%s: tensor %s: config.json has no group_size for it", a->path,
                         l->data->name);
    int64_t scales = l->scale ? l->scale->dims[1] : 0;
    if (a->config->mixed && scales > 0 && scales <= a->n_in && a->n_in % scales == 0)
        len = a->n_in / (int)scales;
    l->group_len = len < 0 || len > a->n_in ? a->n_in : len;
    l->n_groups = (a->n_in + l->group_len - 1) / l->group_len;
    if (a->n_in % 8 || a->n_out % 8)
        return error_set(err, "%s: tensor %s: packing needs multiples of 8, not %d x %d", a->path,
                         l->data->name, a->n_in, a->n_out);
    if (!check_beside(a, l->data, "qzeros", l->zero, "I32", err) ||
        !check_beside(a, l->data, "scales", l->scale, "float", err))
        return false;
    if (l->data->type != DT_I32)
        return bad_type(a, l->data, "I32", err);
    if (l->order && l->order->type != DT_I32)
        return bad_type(a, l->order, "I32", err);
    if (!awq && l->data->dims[0] == a->n_out && l->data->dims[1] == a->n_in / 4)
        return find_gptq8(a, l, err);
    return check_shape(a, l->data, awq ? a->n_out / 8 : a->n_out, awq ? a->n_in : a->n_in / 8,
                       err) &&
           check_shape(a, l->zero, a->n_out / 8, l->n_groups, err) &&
           check_shape(a, l->scale, a->n_out, l->n_groups, err) &&
           (!l->order || check_shape(a, l->order, a->n_in, 1, err));
}

/* Groups by the number of scales a row has. */
static bool count_groups(const struct layout_ask *a, struct layout *l, struct error *err)
{
    int64_t groups = l->scale->dims[0];
    if (groups < 1 || groups > a->n_in || a->n_in % groups)
        return error_set(err, "%s: tensor %s: %" PRId64 " scales for rows of %d", a->path,
                         l->scale->name, groups, a->n_in);
    l->n_groups = (int)groups;
    l->group_len = a->n_in / (int)groups;
    return true;
}

/* compressed-tensors Int4: weight_packed (out, in/8) I32, weight_scale (out, groups),
 * weight_zero_point (out/8, groups) I32 or (out, groups) I8, weight_g_idx (in). */
static bool find_int4(const struct layout_ask *a, struct layout *l, struct error *err)
{
    l->kind = LAYOUT_INT4;
    l->type = DT_GPTQ4;
    l->scale = find(a, "weight_scale");
    l->zero = find(a, "weight_zero_point");
    l->order = find(a, "weight_g_idx");
    find(a, "weight_shape");
    if (l->data->type != DT_I32)
        return bad_type(a, l->data, "I32 or U8", err);
    if (!check_beside(a, l->data, "weight_scale", l->scale, "float", err) ||
        (l->order && !no_stack(a, l->order, err)))
        return false;
    if (a->n_in % 8)
        return error_set(err, "%s: tensor %s: packing needs rows of a multiple of 8, not %d",
                         a->path, l->data->name, a->n_in);
    bool bytes = l->data->dims[0] == a->n_in / 4; /* 8 bits */
    if (!check_shape(a, l->data, a->n_in / (bytes ? 4 : 8), a->n_out, err) ||
        !count_groups(a, l, err) || !check_shape(a, l->scale, l->n_groups, a->n_out, err))
        return false;
    if (bytes && l->zero)
        return error_set(err, "%s: tensor %s: 8 bits with zero points are not supported", a->path,
                         l->zero->name);
    if (bytes) {
        l->words = true;
        return check_int8(a, l, err);
    }
    if (l->zero && !is_type(l->zero, "I32") && !is_type(l->zero, "I8"))
        return bad_type(a, l->zero, "I32 or I8", err);
    if (l->zero && !check_shape(a, l->zero, l->n_groups,
                                l->zero->type == DT_I8 ? a->n_out : (a->n_out + 7) / 8, err))
        return false;
    if (l->order && l->order->type != DT_I32)
        return bad_type(a, l->order, "I32", err);
    return !l->order || check_shape(a, l->order, a->n_in, 1, err);
}

/* Bytes: weight (out, in) I8; weight_scale of one number, (out), (out, 1) or (out, groups), or
 * bitsandbytes' SCB (out), the largest value of a row. */
static bool find_bytes(const struct layout_ask *a, struct layout *l, struct error *err)
{
    l->scale = find(a, "weight_scale");
    l->zero = find(a, "weight_zero_point");
    find(a, "input_scale");
    find(a, "input_zero_point");
    find(a, "weight_format");
    if (!l->scale && (l->scale = find(a, "SCB")))
        l->times = 1.0f / 127;
    if (!check_beside(a, l->data, "weight_scale", l->scale, "float", err) ||
        !check_shape(a, l->data, a->n_in, a->n_out, err))
        return false;
    int64_t n = (int64_t)l->scale->bytes / dtype_table[l->scale->type].block_bytes;
    int64_t stack = a->n_stack ? a->n_stack : 1;
    bool row = n == stack * a->n_out && (l->scale->dims[0] == 1 || l->scale->dims[0] == a->n_out);
    l->group_len = a->n_in;
    l->n_groups = 1;
    l->block[0] = n == 1 || n == stack ? a->n_out : 1;
    if (l->block[0] == 1 && !row &&
        (!count_groups(a, l, err) || !check_shape(a, l->scale, l->n_groups, a->n_out, err)))
        return false;
    if (l->zero && !is_type(l->zero, "I8"))
        return bad_type(a, l->zero, "I8", err);
    return check_int8(a, l, err);
}

/* FP8: weight (out, in); weight_scale or weight_scale_inv of one number, (out) or (out, 1), or of
 * blocks. Stacks may be transposed. */
static bool find_fp8(const struct layout_ask *a, struct layout *l, const struct tensor *scale,
                     struct error *err)
{
    l->kind = LAYOUT_FP8;
    l->type = DT_F8_E4M3;
    l->scale = scale;
    find(a, "input_scale"); /* of activations: ours stay as they are */
    find(a, "activation_scale");
    l->across = is_across(a, l->data, a->n_in);
    if (!check_wide(a, l, l->data, a->n_in, err) ||
        !check_beside(a, l->data, "weight_scale", scale, "float", err))
        return false;
    int64_t per = dtype_table[scale->type].block_bytes, n = (int64_t)scale->bytes / per;
    int64_t stack = a->n_stack ? a->n_stack : 1;
    l->block[0] = a->n_out;
    l->block[1] = a->n_in;
    if (n == stack || n == 1)
        return true;
    l->block[0] = 1;
    if (n == stack * a->n_out && (scale->dims[0] == 1 || scale->dims[0] == a->n_out))
        return true;
    l->block[0] = a->n_out / 2; /* gate and up that are one tensor */
    if (a->n_stack && a->n_out % 2 == 0 && scale->dims[0] == 1 && scale->dims[1] == 2 &&
        scale->dims[2] == stack && scale->dims[3] == 1)
        return true;
    if (l->across)
        return error_set(err,
                         "%s: tensor %s: scales of blocks of transposed weights are not supported",
                         a->path, scale->name);
    int rows = a->config->block[0] ? a->config->block[0] : 128;
    int cols = a->config->block[1] ? a->config->block[1] : 128;
    if (cols % 128 && cols < a->n_in)
        return error_set(err, "%s: tensor %s: blocks of %d columns are not supported", a->path,
                         scale->name, cols);
    l->block[0] = rows;
    l->block[1] = cols;
    int64_t wide = (a->n_in + cols - 1) / cols, high = (a->n_out + rows - 1) / rows;
    const int64_t *d = scale->dims; /* ModelOpt has a dimension of 1 behind each */
    bool apart = !a->n_stack && d[0] == 1 && d[1] == wide && d[2] == 1 && d[3] == high;
    return apart || check_shape(a, scale, wide, high, err);
}

/* NVFP4: codes (out, in/2) U8, scales (out, in/16) FP8, and one for the whole tensor. Stacks may be
 * transposed, codes and scales: (in/2, out), (in/16, out). */
static bool find_nvfp4(const struct layout_ask *a, struct layout *l, struct error *err)
{
    l->kind = LAYOUT_NVFP4;
    l->type = DT_NVFP4;
    l->scale = find(a, "weight_scale");
    l->global = find(a, "weight_global_scale");
    l->reciprocal = l->global != NULL;
    if (!l->global)
        l->global = find(a, "weight_scale_2");
    find(a, "input_scale");
    find(a, "input_global_scale");
    if (!check_beside(a, l->data, "weight_scale", l->scale, "F8_E4M3", err) ||
        !check_beside(a, l->data, "global scale", l->global, "float", err))
        return false;
    if (a->n_in % QK_NVFP4)
        return error_set(err, "%s: tensor %s: row of %d is no multiple of NVFP4's %d", a->path,
                         l->data->name, a->n_in, QK_NVFP4);
    l->across = is_across(a, l->data, a->n_in / 2);
    return check_wide(a, l, l->data, a->n_in / 2, err) &&
           check_wide(a, l, l->scale, a->n_in / 16, err) && check_one(a, l->global, err);
}

/* MXFP4: codes (out, in/2) U8, or (out, in/32, 16); exponents (out, in/32) U8. */
static bool find_mxfp4(const struct layout_ask *a, struct layout *l, const char *scale,
                       struct error *err)
{
    l->kind = LAYOUT_MXFP4;
    l->type = DT_MXFP4;
    l->scale = find(a, scale);
    if (!check_beside(a, l->data, scale, l->scale, "U8", err))
        return false;
    if (!is_type(l->data, "U8"))
        return bad_type(a, l->data, "U8", err);
    if (a->n_in % QK_32)
        return error_set(err, "%s: tensor %s: row of %d is no multiple of MXFP4's %d", a->path,
                         l->data->name, a->n_in, QK_32);
    int64_t stack = a->n_stack ? a->n_stack : 1;
    const int64_t *d = l->data->dims;
    bool flat = d[0] == a->n_in / 2 && d[1] == a->n_out && d[2] == stack && d[3] == 1;
    bool cut = d[0] == 16 && d[1] == a->n_in / 32 && d[2] == a->n_out && d[3] == stack;
    if (!flat && !cut)
        return error_set(err,
                         "%s: tensor %s: shape [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64
                         "], expected [16, %d, %d, %" PRId64 "]",
                         a->path, l->data->name, d[0], d[1], d[2], d[3], a->n_in / 32, a->n_out,
                         stack);
    return check_shape(a, l->scale, a->n_in / 32, a->n_out, err);
}

static const struct tensor *quant_state(const struct layout_ask *a)
{
    const struct tensor *t = find(a, "weight.quant_state.bitsandbytes__nf4");
    return t ? t : find(a, "weight.quant_state.bitsandbytes__fp4");
}

/* bitsandbytes' 4 bits: weight (out * in / 2, 1) U8, blocks of values across rows; weight.absmax for each,
 * of floats, or of bytes that name levels of nested_quant_map times nested_absmax for 256 of
 * them; weight.quant_map (16); the rest is JSON in a tensor. */
static bool find_bnb4(const struct layout_ask *a, struct layout *l, const struct tensor *state,
                      struct error *err)
{
    l->kind = LAYOUT_BNB4;
    l->type = DT_F16;
    l->scale = find(a, "weight.absmax");
    l->levels = find(a, "weight.quant_map");
    bool nested = is_type(l->scale, "U8");
    if (!is_type(state, "U8"))
        return bad_type(a, state, "U8", err);
    if (!no_stack(a, l->data, err) ||
        !check_beside(a, l->data, "absmax", l->scale, nested ? "U8" : "F32", err) ||
        !check_beside(a, l->data, "quant_map", l->levels, "F32", err))
        return false;
    if (state->bytes > 1 << 12)
        return error_set(err, "%s: tensor %s: too large", a->path, state->name);
    json_t *o = json_loadb((const char *)state->data, state->bytes, 0, NULL);
    json_int_t len = json_integer_value(json_object_get(o, "blocksize"));
    json_int_t outer = json_integer_value(json_object_get(o, "nested_blocksize"));
    l->scale_add = (float)json_number_value(json_object_get(o, "nested_offset"));
    json_decref(o);
    if (len < 2 || len > 1 << 16 || len % 2 || (nested && outer != 256) || !isfinite(l->scale_add))
        return error_set(err, "%s: tensor %s: no blocksize, or not one that is supported", a->path,
                         state->name);
    int64_t n = (int64_t)a->n_in * a->n_out, blocks = (n + len - 1) / len;
    l->group_len = (int)len;
    if (!check_shape(a, l->scale, blocks, 1, err) || !check_shape(a, l->levels, 16, 1, err) ||
        !check_shape(a, l->data, 1, n / 2, err))
        return false;
    if (a->n_in % 2)
        return error_set(err, "%s: tensor %s: rows of %d", a->path, l->data->name, a->n_in);
    if (!nested)
        return true;
    l->scale_levels = find(a, "weight.nested_quant_map");
    l->scale_scales = find(a, "weight.nested_absmax");
    return check_beside(a, l->data, "nested_quant_map", l->scale_levels, "F32", err) &&
           check_beside(a, l->data, "nested_absmax", l->scale_scales, "F32", err) &&
           check_shape(a, l->scale_levels, 256, 1, err) &&
           check_shape(a, l->scale_scales, (blocks + 255) / 256, 1, err);
}

static bool find_kind(const struct layout_ask *a, struct layout *l, struct error *err)
{
    *l = (struct layout){.n_in = a->n_in, .n_out = a->n_out, .n_stack = a->n_stack};
    const struct tensor *t;
    if ((l->data = find(a, "qweight")))
        return find_gptq(a, l, err);
    if ((l->data = find(a, "blocks")))
        return find_mxfp4(a, l, "scales", err);
    if ((l->data = find(a, "weight_packed"))) {
        if (!is_type(l->data, "U8"))
            return find_int4(a, l, err);
        bool mx = is_type(find(a, "weight_scale"), "U8");
        return mx ? find_mxfp4(a, l, "weight_scale", err) : find_nvfp4(a, l, err);
    }
    if (!(t = find(a, "weight")))
        return true; /* whoever needs it says that it is missing */
    l->data = t;
    const struct tensor *state = is_type(t, "U8") ? quant_state(a) : NULL;
    if (state)
        return find_bnb4(a, l, state, err);
    if (is_type(t, "U8")) {
        bool mx = is_type(find(a, "weight_scale"), "U8");
        return mx ? find_mxfp4(a, l, "weight_scale", err) : find_nvfp4(a, l, err);
    }
    if (t->type == DT_I8)
        return find_bytes(a, l, err);
    const struct tensor *scale = find(a, "weight_scale_inv");
    scale = scale ? scale : find(a, "weight_scale");
    if (t->type == DT_F8_E4M3 && scale)
        return find_fp8(a, l, scale, err);
    l->data = NULL;
    return true;
}

bool layout_find(const struct layout_ask *a, struct layout *l, struct error *err)
{
    return find_kind(a, l, err) && (l->kind == LAYOUT_PLAIN || no_transform(a, err));
}

/* Reading */

static uint32_t load_u32(const uint8_t *p, size_t i)
{
    uint32_t v;
    memcpy(&v, p + 4 * i, 4);
    return v;
}

static float load_float(const struct tensor *t, size_t i)
{
    float v;
    quant_dequantize(t->type, t->data + i * dtype_bytes(t->type, 1), &v, 1);
    return v;
}

/* The row of the matrix that is the i-th of r. */
static size_t row_at(const struct layout_rows *r, int i)
{
    int run = r->run ? r->run : 1;
    return (size_t)(r->first + r->step * (i / run) + i % run);
}

/* Row i of r out of codes of `wide` bytes a row: where it lies, or, of transposed ones, out of a copy
 * of it and the rows behind it. */
struct row_reader {
    const struct layout *l;
    const struct layout_rows *r;
    const uint8_t *data;
    size_t wide;
    uint8_t *copy; /* (ROWS_AT_ONCE, wide) */
    int first;     /* of the copy; -1 = none */
};

enum { ROWS_AT_ONCE = 64 };

static struct row_reader rows_of(const struct layout *l, const struct layout_rows *r,
                                 const struct tensor *t, size_t wide)
{
    return (struct row_reader){.l = l,
                               .r = r,
                               .data = t->data,
                               .wide = wide,
                               .copy = l->across ? mem_alloc(ROWS_AT_ONCE * wide) : NULL,
                               .first = -1};
}

static const uint8_t *row_get(struct row_reader *x, int i)
{
    if (!x->l->across)
        return x->data + row_at(x->r, i) * x->wide;
    int first = i / ROWS_AT_ONCE * ROWS_AT_ONCE;
    if (x->first != first) {
        size_t at[ROWS_AT_ONCE];
        int n = x->r->n - first < ROWS_AT_ONCE ? x->r->n - first : ROWS_AT_ONCE;
        for (int k = 0; k < n; k++)
            at[k] = row_at(x->r, first + k);
        for (size_t j = 0; j < x->wide; j++)
            for (int k = 0; k < n; k++)
                x->copy[(size_t)k * x->wide + j] = x->data[j * (size_t)x->l->n_out + at[k]];
        x->first = first;
    }
    return x->copy + (size_t)(i - first) * x->wide;
}

static bool bad_scale(const char *path, const struct tensor *t, size_t i, float v,
                      struct error *err)
{
    return error_set(err, "%s: tensor %s: entry %zu: %g is no scale", path, t->name, i, (double)v);
}

struct layout_bytes layout_bytes(const struct layout *l, int n)
{
    size_t rows = (size_t)n, n_in = (size_t)l->n_in;
    struct layout_bytes b = {.data = rows * dtype_bytes(l->type, n_in)};
    if (l->type == DT_GPTQ4) {
        b.scale = rows * (size_t)l->n_groups * sizeof(uint16_t);
        b.zero = rows * (size_t)l->n_groups;
        b.order = n_in * sizeof(int32_t);
    } else if (l->type == DT_F8_E4M3) {
        b.scale = rows * ((n_in + 127) / 128) * sizeof(float);
    } else if (l->type == DT_NVFP4) {
        b.scale = sizeof(float);
    }
    return b;
}

/* order[j] = input column stored at j: columns sorted by group, stable. Groups must come out full, or
 * they would straddle. */
static bool read_order(const struct layout *l, const char *path, int32_t *order, bool *permuted,
                       struct error *err)
{
    *permuted = false;
    for (int j = 0; j < l->n_in; j++)
        order[j] = j;
    bool unset = true; /* compressed-tensors: -1 throughout where columns are in order */
    for (int j = 0; l->order && unset && j < l->n_in; j++)
        unset = load_u32(l->order->data, (size_t)j) == ~0u;
    if (!l->order || unset)
        return true;
    int *at = mem_zalloc((size_t)l->n_groups, sizeof *at);
    bool ok = true;
    for (int j = 0; ok && j < l->n_in; j++) {
        uint32_t group = load_u32(l->order->data, (size_t)j);
        int stored = 0;
        ok = group < (uint32_t)l->n_groups && at[group] < l->group_len;
        if (ok) {
            stored = (int)group * l->group_len + at[group]++;
            ok = stored < l->n_in;
        }
        if (!ok) {
            error_set(err, "%s: tensor %s: entry %d: group %u is out of range or over-full", path,
                      l->order->name, j, group);
            break;
        }
        order[stored] = j;
        *permuted |= stored != j;
    }
    mem_free(at);
    return ok;
}

/* Rows of codes from (n_in/8, n_out) words of 8 columns each: a word is 4 bytes of a row as it is,
 * where its columns stay together. In blocks that stay in the first cache both ways. */
static void codes_gptq(const struct layout *l, const struct layout_rows *r, const int32_t *order,
                       uint8_t *out)
{
    enum { ROWS = 64, WORDS = 16 };
    const uint8_t *words = l->data->data;
    uint32_t block[WORDS][ROWS];
    size_t place[ROWS];
    int n_words = l->n_in / 8;
    for (int o = 0; o < r->n; o += ROWS) {
        int rows = r->n - o < ROWS ? r->n - o : ROWS;
        for (int row = 0; row < rows; row++)
            place[row] = row_at(r, o + row);
        for (int j = 0; j < n_words; j += WORDS) {
            int n = n_words - j < WORDS ? n_words - j : WORDS;
            for (int i = 0; i < n; i++) {
                const int32_t *from = order + 8 * (j + i);
                bool together = from[0] % 8 == 0;
                for (int k = 1; k < 8; k++)
                    together &= from[k] == from[0] + k;
                if (!together)
                    memset(block[i], 0, sizeof block[i]);
                for (int k = 0; k < (together ? 1 : 8); k++) {
                    size_t at = (size_t)(from[k] / 8) * (size_t)l->n_out;
                    int right = from[k] % 8 * 4, left = 4 * k;
                    for (int row = 0; row < rows; row++) {
                        uint32_t in = load_u32(words, at + place[row]);
                        if (together)
                            block[i][row] = in;
                        else
                            block[i][row] |= (in >> right & 15) << left;
                    }
                }
            }
            for (int row = 0; row < rows; row++) {
                uint32_t line[WORDS];
                for (int i = 0; i < n; i++)
                    line[i] = block[i][row];
                memcpy(out + (size_t)(o + row) * (size_t)(l->n_in / 2) + 4 * (size_t)j, line,
                       (size_t)n * sizeof *line);
            }
        }
    }
}

/* Where output o of eight lies in a word of AWQ's. */
static int awq_shift(int o)
{
    return 4 * (o % 8 / 2 + o % 2 * 4);
}

/* Rows of codes from (n_in, n_out/8) words of 8 rows each: of some columns at a time, whose lines stay
 * in the first cache while all rows are taken out of them. */
static void codes_awq(const struct layout *l, const struct layout_rows *r, uint8_t *out)
{
    enum { PAIRS = 64 };
    size_t width = (size_t)(l->n_out / 8), half = (size_t)(l->n_in / 2);
    uint32_t a[PAIRS] = {0}, b[PAIRS] = {0}; /* even and odd columns */
    for (size_t j = 0; j < half; j += PAIRS) {
        size_t n = half - j < PAIRS ? half - j : PAIRS;
        for (int o = 0, word = -1; o < r->n; o++) {
            int row = (int)row_at(r, o);
            if (row / 8 != word) {
                word = row / 8;
                for (size_t k = 0; k < n; k++) {
                    a[k] = load_u32(l->data->data, 2 * (j + k) * width + (size_t)word);
                    b[k] = load_u32(l->data->data, (2 * (j + k) + 1) * width + (size_t)word);
                }
            }
            int shift = awq_shift(row);
            uint8_t *to = out + (size_t)o * half + j;
            for (size_t k = 0; k < n; k++)
                to[k] = (uint8_t)((a[k] >> shift & 15) | (b[k] >> shift & 15) << 4);
        }
    }
}

/* Rows of codes that lie as ours do, in another order of columns where there is one. */
static void codes_int4(const struct layout *l, const struct layout_rows *r, const int32_t *order,
                       bool permuted, uint8_t *out)
{
    size_t half = (size_t)(l->n_in / 2);
    for (int i = 0; i < r->n; i++, out += half) {
        const uint8_t *row = l->data->data + row_at(r, i) * half;
        if (!permuted) {
            memcpy(out, row, half);
            continue;
        }
        for (size_t j = 0; j < half; j++) {
            int a = order[2 * j], b = order[2 * j + 1];
            out[j] =
                (uint8_t)((row[a / 2] >> a % 2 * 4 & 15) | (row[b / 2] >> b % 2 * 4 & 15) << 4);
        }
    }
}

/* The zero of (group g, row o) in the scale of codes. */
static int zero_at(const struct layout *l, size_t g, size_t o)
{
    size_t groups = (size_t)l->n_groups;
    switch (l->kind) {
    case LAYOUT_GPTQ: {
        uint32_t word = load_u32(l->zero->data, g * (size_t)(l->n_out / 8) + o / 8);
        return (int)(word >> 4 * (o % 8) & 15) + l->zero_plus;
    }
    case LAYOUT_AWQ: {
        uint32_t word = load_u32(l->zero->data, g * (size_t)(l->n_out / 8) + o / 8);
        return (int)(word >> awq_shift((int)(o % 8)) & 15);
    }
    default:
        if (!l->zero)
            return 8;
        if (l->zero->type == DT_I8)
            return (int8_t)l->zero->data[o * groups + g] + 8;
        return (int)(load_u32(l->zero->data, o / 8 * groups + g) >> 4 * (o % 8) & 15);
    }
}

static bool read_int4(const struct layout *l, const char *path, const struct layout_rows *r,
                      const struct layout_planes *to, bool *permuted, struct error *err)
{
    if (!read_order(l, path, to->order, permuted, err))
        return false;
    if (l->kind == LAYOUT_GPTQ)
        codes_gptq(l, r, to->order, to->data);
    else if (l->kind == LAYOUT_AWQ)
        codes_awq(l, r, to->data);
    else
        codes_int4(l, r, to->order, *permuted, to->data);
    size_t groups = (size_t)l->n_groups, across = (size_t)l->n_out;
    uint16_t *scale = to->scale;
    for (size_t i = 0; i < (size_t)r->n; i++) {
        size_t o = row_at(r, (int)i);
        for (size_t g = 0; g < groups; g++) {
            size_t at = l->kind == LAYOUT_INT4 ? o * groups + g : g * across + o;
            float v = load_float(l->scale, at);
            uint16_t half = f32_to_f16(v);
            if (!isfinite(f16_to_f32(half)))
                return bad_scale(path, l->scale, at, v, err);
            scale[i * groups + g] = half;
            int zero = zero_at(l, g, o);
            if (zero < 0 || zero > 16)
                return error_set(err, "%s: tensor %s: row %zu, group %zu: zero point %d", path,
                                 l->zero->name, o, g, zero - 8);
            to->zero[i * groups + g] = (uint8_t)zero;
        }
    }
    return true;
}

/* Zeros of 8-bit codes have no place in Q8_0: all are the middle. */
static bool check_zeros(const struct layout *l, const char *path, struct error *err)
{
    for (size_t i = 0; l->zero && i < l->zero->bytes; i++) {
        int zero = l->words ? l->zero->data[i] + l->zero_plus - 128 : (int8_t)l->zero->data[i];
        if (zero)
            return error_set(err,
                             "%s: tensor %s: entry %zu: 8 bits with zero points are not supported",
                             path, l->zero->name, i);
    }
    return true;
}

static bool read_int8(const struct layout *l, const char *path, const struct layout_rows *r,
                      const struct layout_planes *to, struct error *err)
{
    struct block_q8_0 *out = (struct block_q8_0 *)to->data;
    size_t n_in = (size_t)l->n_in, groups = (size_t)l->n_groups, len = (size_t)l->group_len;
    bool gptq = l->words && l->zero; /* which has zeros, and words of four columns */
    uint8_t flip = l->words ? 0x80 : 0;
    if (!check_zeros(l, path, err))
        return false;
    for (size_t j = 0; l->order && j < n_in; j++)
        if (load_u32(l->order->data, j) != j / len && load_u32(l->order->data, j) != ~0u)
            return error_set(
                err, "%s: tensor %s: 8 bits with columns in another order are not supported", path,
                l->order->name);
    for (int i = 0; i < r->n; i++) {
        size_t o = row_at(r, i);
        for (size_t b = 0; b < n_in / QK_32; b++, out++) {
            size_t g = b * QK_32 / len;
            size_t at = gptq ? g * (size_t)l->n_out + o
                             : o / (l->block[0] ? (size_t)l->block[0] : 1) * groups + g;
            float v = load_float(l->scale, at) * l->times;
            out->d = f32_to_f16(v);
            if (!isfinite(f16_to_f32(out->d)))
                return bad_scale(path, l->scale, at, v, err);
            for (size_t k = 0; k < QK_32; k++) {
                size_t j = b * QK_32 + k;
                size_t from = gptq ? (j / 4 * (size_t)l->n_out + o) * 4 + j % 4 : o * n_in + j;
                out->qs[k] = (int8_t)(l->data->data[from] ^ flip);
            }
        }
    }
    return true;
}

static bool read_fp8(const struct layout *l, const char *path, const struct layout_rows *r,
                     const struct layout_planes *to, struct error *err)
{
    size_t n_in = (size_t)l->n_in, cols = (n_in + 127) / 128;
    size_t across = (n_in + (size_t)l->block[1] - 1) / (size_t)l->block[1];
    float *scale = to->scale;
    struct row_reader codes = rows_of(l, r, l->data, n_in);
    bool ok = true;
    for (size_t i = 0; ok && i < (size_t)r->n; i++) {
        size_t first = row_at(r, (int)i) / (size_t)l->block[0] * across;
        if (to->data)
            memcpy(to->data + i * n_in, row_get(&codes, (int)i), n_in);
        for (size_t j = 0; ok && j < cols; j++) {
            size_t at = first + j * 128 / (size_t)l->block[1];
            float v = load_float(l->scale, at);
            ok = isfinite(v) || bad_scale(path, l->scale, at, v, err);
            scale[i * cols + j] = v;
        }
    }
    mem_free(codes.copy);
    return ok;
}

static bool row_nvfp4(const struct layout *l, const char *path, size_t row, const uint8_t *codes,
                      const uint8_t *scales, struct block_nvfp4 *out, struct error *err)
{
    size_t blocks = (size_t)l->n_in / QK_NVFP4;
    for (size_t b = 0; b < blocks; b++, out++)
        for (size_t g = 0; g < 4; g++) {
            uint8_t s = scales[4 * b + g];
            if (s >= 0x7f)
                return bad_scale(path, l->scale, row * blocks * 4 + 4 * b + g, f8e4m3_to_f32(s),
                                 err);
            out->d[g] = s;
            /* 16 values of a group: the first of each byte is the low nibble, ours has halves */
            const uint8_t *in = codes + 32 * b + 8 * g;
            for (int k = 0; k < 8; k++) {
                int lo = in[k / 2] >> k % 2 * 4 & 15, hi = in[4 + k / 2] >> k % 2 * 4 & 15;
                out->qs[8 * g + (size_t)k] = (uint8_t)(lo | hi << 4);
            }
        }
    return true;
}

static bool read_nvfp4(const struct layout *l, const char *path, const struct layout_rows *r,
                       const struct layout_planes *to, struct error *err)
{
    float global = load_float(l->global, 0);
    if (!isfinite(global) || global <= 0)
        return bad_scale(path, l->global, 0, global, err);
    *(float *)to->scale = l->reciprocal ? 1 / global : global;
    size_t blocks = (size_t)l->n_in / QK_NVFP4;
    struct row_reader codes = rows_of(l, r, l->data, blocks * 32);
    struct row_reader scales = rows_of(l, r, l->scale, blocks * 4);
    bool ok = true;
    for (int i = 0; ok && i < r->n; i++)
        ok = row_nvfp4(l, path, row_at(r, i), row_get(&codes, i), row_get(&scales, i),
                       (struct block_nvfp4 *)to->data + (size_t)i * blocks, err);
    mem_free(codes.copy);
    mem_free(scales.copy);
    return ok;
}

static bool read_mxfp4(const struct layout *l, const char *path, const struct layout_rows *r,
                       const struct layout_planes *to, struct error *err)
{
    struct block_mxfp4 *out = (struct block_mxfp4 *)to->data;
    size_t blocks = (size_t)l->n_in / QK_32;
    for (int i = 0; i < r->n; i++) {
        size_t o = row_at(r, i);
        for (size_t b = 0; b < blocks; b++, out++) {
            const uint8_t *in = l->data->data + (o * blocks + b) * 16;
            out->e = l->scale->data[o * blocks + b];
            if (out->e == 255)
                return bad_scale(path, l->scale, o * blocks + b, NAN, err);
            for (int k = 0; k < 16; k++) {
                int lo = in[k / 2] >> k % 2 * 4 & 15, hi = in[8 + k / 2] >> k % 2 * 4 & 15;
                out->qs[k] = (uint8_t)(lo | hi << 4);
            }
        }
    }
    return true;
}

static bool read_bnb4(const struct layout *l, const char *path, const struct layout_rows *r,
                      const struct layout_planes *to, struct error *err)
{
    size_t n_in = (size_t)l->n_in, len = (size_t)l->group_len, last = SIZE_MAX;
    float levels[16], scale = 0;
    for (size_t k = 0; k < 16; k++) {
        levels[k] = load_float(l->levels, k);
        if (!isfinite(levels[k]))
            return bad_scale(path, l->levels, k, levels[k], err);
    }
    for (int i = 0; i < r->n; i++)
        for (size_t j = 0, at = row_at(r, i) * n_in; j < n_in; j++, at++) {
            if (at / len != last) {
                size_t b = last = at / len;
                scale = l->scale_levels ? load_float(l->scale_levels, l->scale->data[b]) *
                                                  load_float(l->scale_scales, b / 256) +
                                              l->scale_add
                                        : load_float(l->scale, b);
                if (!isfinite(scale))
                    return bad_scale(path, l->scale, b, scale, err);
            }
            uint8_t byte = l->data->data[at / 2];
            uint16_t half = f32_to_f16(levels[at % 2 ? byte & 15 : byte >> 4] * scale);
            if (!isfinite(f16_to_f32(half)))
                return bad_scale(path, l->scale, last, scale, err);
            memcpy(to->data + ((size_t)i * n_in + j) * 2, &half, 2);
        }
    return true;
}

/* Matrix `index` of a stack: its part of t, or all of t where that is one number. */
static const struct tensor *part_of(const struct tensor *t, int n_stack, int index,
                                    struct tensor *part)
{
    bool one = t && t->dims[0] == 1 && t->dims[1] == 1 && t->dims[2] == 1 && t->dims[3] == 1;
    if (!t || one)
        return t;
    *part = *t;
    part->bytes /= (size_t)n_stack;
    part->data += (size_t)index * part->bytes;
    return part;
}

static bool read_one(const struct layout *l, const char *path, const struct layout_rows *rows,
                     const struct layout_planes *to, bool *permuted, struct error *err)
{
    *permuted = false;
    switch (l->kind) {
    case LAYOUT_GPTQ:
    case LAYOUT_AWQ:
    case LAYOUT_INT4:
        return read_int4(l, path, rows, to, permuted, err);
    case LAYOUT_INT8:
        return read_int8(l, path, rows, to, err);
    case LAYOUT_FP8:
        return read_fp8(l, path, rows, to, err);
    case LAYOUT_NVFP4:
        return read_nvfp4(l, path, rows, to, err);
    case LAYOUT_MXFP4:
        return read_mxfp4(l, path, rows, to, err);
    case LAYOUT_BNB4:
        return read_bnb4(l, path, rows, to, err);
    case LAYOUT_PLAIN:
        break;
    }
    CHECK(false, "%s: nothing to undo", path);
}

bool layout_read(const struct layout *l, const char *path, const struct layout_rows *rows,
                 const struct layout_planes *to, bool *permuted, struct error *err)
{
    if (!l->n_stack)
        return read_one(l, path, rows, to, permuted, err);
    struct layout one = *l;
    struct tensor parts[4];
    one.data = part_of(l->data, l->n_stack, rows->index, &parts[0]);
    one.scale = part_of(l->scale, l->n_stack, rows->index, &parts[1]);
    one.zero = part_of(l->zero, l->n_stack, rows->index, &parts[2]);
    one.global = part_of(l->global, l->n_stack, rows->index, &parts[3]);
    return read_one(&one, path, rows, to, permuted, err);
}

const uint8_t *layout_direct(const struct layout *l, const struct layout_rows *rows)
{
    if (l->kind != LAYOUT_FP8 || l->across || rows->step != 1 || rows->run > 1)
        return NULL;
    size_t row = (size_t)rows->index * (size_t)l->n_out + (size_t)rows->first;
    return l->data->data + row * (size_t)l->n_in;
}

static const char *suffix_of(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

/* One of a list that ends with NULL, whole or behind a '_'. */
static bool ends_as(const char *suffix, const char *const *list)
{
    size_t len = strlen(suffix);
    for (; *list; list++) {
        size_t n = strlen(*list);
        if (len >= n && !strcmp(suffix + len - n, *list) &&
            (len == n || suffix[len - n - 1] == '_'))
            return true;
    }
    return false;
}

bool layout_is_spare(const char *name)
{
    static const char *const spare[] = {"input_scale",
                                        "input_scale_ub",
                                        "input_global_scale",
                                        "input_zero_point",
                                        "activation_scale",
                                        "output_scale",
                                        "k_scale",
                                        "v_scale",
                                        "q_scale",
                                        "prob_scale",
                                        "k_zero_point",
                                        "v_zero_point",
                                        NULL};
    return ends_as(suffix_of(name), spare);
}

int64_t layout_params(const struct tensor *t, const struct layout_config *config)
{
    static const char *const beside[] = {"qzeros",
                                         "scales",
                                         "g_idx",
                                         "weight_scale_inv",
                                         "weight_scale",
                                         "weight_shape",
                                         "weight_g_idx",
                                         "weight_scale_2",
                                         "scale_inv",
                                         "weight_global_scale",
                                         "weight_zero_point",
                                         "SCB",
                                         "proj_scale",
                                         "proj_scale_2",
                                         "weight_format",
                                         "absmax",
                                         "quant_map",
                                         "bitsandbytes__nf4",
                                         "bitsandbytes__fp4",
                                         NULL};
    int64_t n = t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
    const char *suffix = suffix_of(t->name);
    if (layout_is_spare(t->name) || ends_as(suffix, beside))
        return 0;
    size_t len = strlen(suffix);
    if (!strcmp(suffix, "qweight") || (!strcmp(suffix, "weight_packed") && t->type == DT_I32))
        return n * (config->bits == 8 ? 4 : 8);
    bool blocks = len > 7 && !strcmp(suffix + len - 7, "_blocks");
    bool stack = strstr(suffix, "_proj") != NULL; /* experts in one tensor */
    return is_type(t, "U8") && (blocks || stack || !strncmp(suffix, "weight", 6)) ? n * 2 : n;
}
