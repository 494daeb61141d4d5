/* Compressed layouts of folders: which tensors, and what shapes. See layout.h; layout_read.c reads them. */
#include "model/layout.h"
#include "base/mem.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* A stack is called NAME, not NAME.weight; its scales are NAME_weight_scale or NAME_scale. */
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

/* Exponents of powers of two, 127 added. */
static bool is_exponent(const struct tensor *t)
{
    return is_type(t, "U8") || is_type(t, "F8_E8M0");
}

static bool is_float(const struct tensor *t)
{
    return t->type == DT_F32 || t->type == DT_F16 || t->type == DT_BF16;
}

/* d0 is the contiguous dimension, d2 the stack. */
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

/* Requires that t exists and has this type ("float": F32, F16 or BF16). */
static bool check_beside(const struct layout_ask *a, const struct tensor *codes, const char *what,
                         const struct tensor *t, const char *type, struct error *err)
{
    if (!t)
        return error_set(err, "%s: tensor %s: its %s is missing", a->path, codes->name, what);
    bool floats = !strcmp(type, "float");
    return (floats ? is_float(t) : is_type(t, type)) ||
           bad_type(a, t, floats ? "F32, F16 or BF16" : type, err);
}

/* Requires one number per matrix or one for the whole stack. */
static bool check_one(const struct layout_ask *a, const struct tensor *t, struct error *err)
{
    size_t n = t->bytes / dtype_bytes(t->type, 1);
    if (n == 1 || (a->n_stack && n == (size_t)a->n_stack))
        return true;
    return error_set(err, "%s: tensor %s: %zu bytes where one number%s is expected", a->path,
                     t->name, t->bytes, a->n_stack ? " a matrix" : "");
}

/* Whether codes with `wide` entries per row are transposed, as plain tensors of this name are. */
static bool is_transposed(const struct layout_ask *a, const struct tensor *t, int64_t wide)
{
    return a->transposed && t->dims[0] == a->n_out && t->dims[1] == wide;
}

/* check_shape for `wide` entries per row, in the layout's orientation. */
static bool check_wide(const struct layout_ask *a, const struct packed_layout *l,
                       const struct tensor *t, int64_t wide, struct error *err)
{
    return check_shape(a, t, l->transposed ? a->n_out : wide, l->transposed ? wide : a->n_out, err);
}

static bool no_stack(const struct layout_ask *a, const struct tensor *t, struct error *err)
{
    return !a->n_stack ||
           error_set(err, "%s: tensor %s: this packing of stacked experts is not supported",
                     a->path, t->name);
}

/* Refuses transforms of the inputs (rotations, per-channel smoothing). No layout supports them. */
static bool no_transform(const struct layout_ask *a, struct error *err)
{
    static const char *const names[] = {"pre_quant_scale", "svdquant_lora_a",
                                        "_weight_act_pre_scale"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const struct tensor *t = find(a, names[i]);
        if (t)
            return error_set(err, "%s: tensor %s: scaled or split inputs are not supported",
                             a->path, t->name);
    }
    return true;
}

/* 8-bit integers (out, in), one scale per group of columns, read as Q8_0 rows. `wide` codes per
 * row. */
static bool check_int8(const struct layout_ask *a, struct packed_layout *l, struct error *err)
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

/* GPTQ with 8 bits: qweight (in/4, out) I32, qzeros (groups, out/4), the rest as in find_gptq. */
static bool find_gptq8(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    l->words = true;
    return check_int8(a, l, err) && check_shape(a, l->data, a->n_out, a->n_in / 4, err) &&
           check_shape(a, l->zero, a->n_out / 4, l->n_groups, err) &&
           check_shape(a, l->scale, a->n_out, l->n_groups, err) &&
           (!l->order || check_shape(a, l->order, a->n_in, 1, err));
}

/* AWQ for single rows: qweight (out, in/8) I32 in order, scales (out, stride), qzeros (out, stride/8). */
static bool find_gemv(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    l->kind = LAYOUT_INT4;
    l->stride = (int)l->zero->dims[0] * 8;
    if (l->zero->dims[0] < 1 || l->zero->dims[0] > a->n_in || l->stride < l->n_groups)
        return error_set(err, "%s: tensor %s: %" PRId64 " words for %d groups", a->path,
                         l->zero->name, l->zero->dims[0], l->n_groups);
    return check_shape(a, l->data, a->n_in / 8, a->n_out, err) &&
           check_shape(a, l->zero, l->stride / 8, a->n_out, err) &&
           check_shape(a, l->scale, l->stride, a->n_out, err);
}

/* Requires rows of whole groups, and groups of whole blocks of 32. */
static bool check_groups(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    if (l->group_len < QK_32 || l->group_len % QK_32 || a->n_in % l->group_len)
        return error_set(err, "%s: tensor %s: groups of %d in rows of %d are not supported",
                         a->path, l->data->name, l->group_len, a->n_in);
    l->n_groups = a->n_in / l->group_len;
    return true;
}

/* AWQ gemv_fast: qweight (out/4, in) I16, each word four values of a run of 64 columns of 4 rows; scales and scaled_zeros,
 * which are minus zeros times scales, (stride, out). */
static bool find_gemv_fast(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    int len = a->config->group_len;
    l->kind = LAYOUT_GEMV_FAST;
    l->type = DT_Q4_1;
    l->scale = find(a, "scales");
    l->zero = find(a, "scaled_zeros");
    l->group_len = len < 0 || len > a->n_in ? a->n_in : len;
    if (!no_stack(a, l->data, err) || !check_groups(a, l, err))
        return false;
    if (!is_type(l->data, "I16"))
        return bad_type(a, l->data, "I16", err);
    if (a->n_in % 64 || a->n_out % 4)
        return error_set(err, "%s: tensor %s: packing needs multiples of 4 and 64, not %d x %d",
                         a->path, l->data->name, a->n_out, a->n_in);
    if (!check_beside(a, l->data, "scales", l->scale, "float", err) ||
        !check_beside(a, l->data, "scaled_zeros", l->zero, "float", err))
        return false;
    int64_t stride = l->scale->dims[1];
    if (stride < l->n_groups || stride > a->n_in)
        return error_set(err, "%s: tensor %s: %" PRId64 " scales for %d groups", a->path,
                         l->scale->name, stride, l->n_groups);
    if (l->zero->dims[1] != stride)
        return error_set(err, "%s: tensor %s: %" PRId64 " rows beside %" PRId64 " of %s", a->path,
                         l->zero->name, l->zero->dims[1], stride, l->scale->name);
    return check_shape(a, l->data, a->n_in, a->n_out / 4, err) &&
           check_shape(a, l->scale, a->n_out, stride, err) &&
           check_shape(a, l->zero, a->n_out, stride, err);
}

/* The number in a tensor of HQQ, or `missing`. */
static bool number_in(const struct layout_ask *a, const char *suffix, int64_t missing, int64_t *out,
                      struct error *err)
{
    const struct tensor *t = find(a, suffix);
    int32_t narrow = 0;
    *out = missing;
    if (!t)
        return true;
    bool byte = is_type(t, "U8") || is_type(t, "BOOL");
    size_t size = byte ? 1 : t->type == DT_I32 ? 4 : t->type == DT_I64 ? 8 : 0;
    if (!size || t->bytes != size)
        return error_set(err, "%s: tensor %s: one whole number is expected", a->path, t->name);
    if (size == 8) {
        memcpy(out, t->data, size);
    } else {
        if (size == 4)
            memcpy(&narrow, t->data, size);
        *out = size == 1 ? t->data[0] : narrow;
    }
    return true;
}

/* Entries of a tensor of floats. */
static int64_t entries(const struct tensor *t)
{
    return (int64_t)(t->bytes / dtype_bytes(t->type, 1));
}

/* HQQ: W_q, slices of the groups side by side in bytes, the first slice highest (3 bits: ten slices in words); scale and
 * zero, one of each per group: value = (code - zero) * scale. axis 1: groups are runs of a row. axis 0: the matrix is
 * group_size rows of numbers, whose columns are the groups. */
static bool find_hqq(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    static const char *const beside[] = {"shape",        "compute_dtype",      "offload_meta",
                                         "channel_wise", "unpack_view_dtype",  "optimize",
                                         "round_zero",   "stores_quant_config"};
    static const char *const nested[] = {"quant_scale", "quant_zero"};
    int64_t bits, group, axis, on, viewed;
    char packing[16] = "", want[16];
    const struct tensor *t = find(a, "packing");
    l->kind = LAYOUT_HQQ;
    l->scale = find(a, "scale");
    l->zero = find(a, "zero");
    for (size_t i = 0; i < sizeof beside / sizeof *beside; i++)
        find(a, beside[i]); /* known */
    if (!no_stack(a, l->data, err) || !check_beside(a, l->data, "scale", l->scale, "float", err) ||
        !check_beside(a, l->data, "zero", l->zero, "float", err) ||
        !number_in(a, "nbits", 0, &bits, err) ||
        !number_in(a, "group_size", a->n_in, &group, err) ||
        !number_in(a, "axis", -1, &axis, err) || !number_in(a, "view_as_float", 0, &viewed, err))
        return false;
    for (size_t i = 0; i < 2; i++) {
        if (!number_in(a, nested[i], 0, &on, err))
            return false;
        if (on)
            return error_set(
                err, "%s: tensor %s: its %s is set: quantised scales and zeros are not supported",
                a->path, l->data->name, nested[i]);
    }
    if (bits < 1 || bits > 8 || (bits > 4 && bits < 8) || axis < 0 || axis > 1)
        return error_set(err,
                         "%s: tensor %s: nbits %" PRId64 ", axis %" PRId64 " are not supported",
                         a->path, l->data->name, bits, axis);
    if (viewed ? !is_float(l->data) : !is_type(l->data, bits == 3 ? "I32" : "U8"))
        return bad_type(a, l->data, viewed ? "F32, F16 or BF16" : bits == 3 ? "I32" : "U8", err);
    if (t && is_type(t, "U8") && t->bytes < sizeof packing)
        memcpy(packing, t->data, t->bytes);
    snprintf(want, sizeof want, bits == 3 ? "%dbit_32" : "%dbit_u8", (int)bits);
    if (t && strcmp(packing, want) != 0)
        return error_set(err, "%s: tensor %s: packing \"%s\" of %d bits is not supported (%s is)",
                         a->path, l->data->name, packing, (int)bits, want);
    int64_t all = (int64_t)a->n_in * a->n_out;
    if (group < 1 || group > all || all % group)
        return error_set(err, "%s: tensor %s: groups of %" PRId64 " of %" PRId64 " values", a->path,
                         l->data->name, group, all);
    l->bits = (int)bits;
    l->group_len = (int)group;
    l->across = axis == 0;
    l->type = bits == 8 || l->across ? DT_F16 : DT_Q4_1;
    if (!l->across && (group % QK_32 || a->n_in % QK_32)) /* groups may go on in the next row */
        return error_set(err, "%s: tensor %s: groups of %d in rows of %d are not supported",
                         a->path, l->data->name, l->group_len, a->n_in);
    int64_t groups = all / group, high = l->across ? group : groups, wide = all / high;
    int64_t per = bits == 3 ? 10 : 8 / bits, step = (high + per - 1) / per;
    if (bits != 3 && high % per)
        return error_set(err, "%s: tensor %s: %" PRId64 " rows of codes in %" PRId64 " slices",
                         a->path, l->data->name, high, per);
    if ((int64_t)l->data->bytes != step * wide * (bits == 3 ? 4 : 1))
        return error_set(err, "%s: tensor %s: %zu bytes, expected %" PRId64, a->path, l->data->name,
                         l->data->bytes, step * wide * (bits == 3 ? 4 : 1));
    const struct tensor *const both[] = {l->scale, l->zero};
    for (int i = 0; i < 2; i++)
        if (entries(both[i]) != groups)
            return error_set(err, "%s: tensor %s: %" PRId64 " entries for %" PRId64 " groups of %s",
                             a->path, both[i]->name, entries(both[i]), groups, l->data->name);
    return true;
}

/* GPTQ: qweight (in/8, out) I32, qzeros (groups, out/8), scales (groups, out), g_idx (in). AWQ:
 * qweight (in, out/8), otherwise the same, with its own nibble order. */
static bool find_gptq(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    bool awq = a->config->awq;
    if (a->config->gemv_fast)
        return find_gemv_fast(a, l, err);
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
    if (awq && a->config->gemv)
        return find_gemv(a, l, err);
    if (!awq && l->data->dims[0] == a->n_out && l->data->dims[1] == a->n_in / 4)
        return find_gptq8(a, l, err);
    return check_shape(a, l->data, awq ? a->n_out / 8 : a->n_out, awq ? a->n_in : a->n_in / 8,
                       err) &&
           check_shape(a, l->zero, a->n_out / 8, l->n_groups, err) &&
           check_shape(a, l->scale, a->n_out, l->n_groups, err) &&
           (!l->order || check_shape(a, l->order, a->n_in, 1, err));
}

/* Derives the groups from the number of scales per row. */
static bool count_groups(const struct layout_ask *a, struct packed_layout *l, struct error *err)
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
static bool find_int4(const struct layout_ask *a, struct packed_layout *l, struct error *err)
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

/* Bytes: weight (out, in) I8. weight_scale is one number, (out), (out, 1) or (out, groups).
 * bitsandbytes has SCB (out), the largest absolute value of each row, instead. */
static bool find_bytes(const struct layout_ask *a, struct packed_layout *l, struct error *err)
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

/* FP8: weight (out, in). weight_scale or weight_scale_inv is one number, (out), (out, 1) or per
 * block. Stacks may be transposed. */
static bool find_fp8(const struct layout_ask *a, struct packed_layout *l,
                     const struct tensor *scale, struct error *err)
{
    l->kind = LAYOUT_FP8;
    l->type = DT_F8_E4M3;
    l->scale = scale;
    find(a, "input_scale"); /* of activations, which are not quantised here */
    find(a, "activation_scale");
    l->transposed = is_transposed(a, l->data, a->n_in);
    bool exponents = is_type(scale, "F8_E8M0");
    if (!check_wide(a, l, l->data, a->n_in, err) ||
        (!exponents && !check_beside(a, l->data, "weight_scale", scale, "float", err)))
        return false;
    int64_t per = exponents ? 1 : dtype_table[scale->type].block_bytes;
    int64_t n = (int64_t)scale->bytes / per;
    int64_t stack = a->n_stack ? a->n_stack : 1;
    l->block[0] = a->n_out;
    l->block[1] = a->n_in;
    if (n == stack || n == 1)
        return true;
    l->block[0] = 1;
    if (n == stack * a->n_out && (scale->dims[0] == 1 || scale->dims[0] == a->n_out))
        return true;
    l->block[0] = a->n_out / 2; /* gate and up fused in one tensor */
    if (a->n_stack && a->n_out % 2 == 0 && scale->dims[0] == 1 && scale->dims[1] == 2 &&
        scale->dims[2] == stack && scale->dims[3] == 1)
        return true;
    if (l->transposed)
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
    const int64_t *d = scale->dims; /* ModelOpt adds a dimension of 1 after each */
    bool apart = !a->n_stack && d[0] == 1 && d[1] == wide && d[2] == 1 && d[3] == high;
    return apart || check_shape(a, scale, wide, high, err);
}

/* torchao. Float8Tensor: qdata (out, in) FP8. Int4Tensor: qdata (out, in/2), signed, the low nibble first; scale and
 * zero_point (groups, out): value = code * scale + zero_point. Int8Tensor and IntxUnpackedToInt8Tensor: qdata (out, in) I8,
 * scale and zero_point (out, groups): value = (code - zero_point) * scale. */
static bool find_torchao(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    l->scale = find(a, "_weight_scale");
    l->zero = find(a, "_weight_zero_point");
    bool bytes = l->data->type == DT_I8 || is_type(l->data, "U8");
    if (l->data->type == DT_F8_E4M3 && l->scale)
        return find_fp8(a, l, l->scale, err);
    if (!bytes)
        return error_set(err,
                         "%s: tensor %s: type %s: only torchao's Int4Tensor (plain packing), "
                         "Int8Tensor, IntxUnpackedToInt8Tensor and Float8Tensor are supported",
                         a->path, l->data->name, l->data->type_name);
    if (!no_stack(a, l->data, err) ||
        !check_beside(a, l->data, "_weight_scale", l->scale, "float", err))
        return false;
    if (l->data->dims[0] == a->n_in / 2) {
        l->kind = LAYOUT_AO4;
        l->type = DT_Q4_1;
        int64_t groups = l->scale->dims[1];
        if (groups < 1 || groups > a->n_in || a->n_in % groups)
            return error_set(err, "%s: tensor %s: %" PRId64 " scales for rows of %d", a->path,
                             l->scale->name, groups, a->n_in);
        l->group_len = a->n_in / (int)groups;
        return check_beside(a, l->data, "_weight_zero_point", l->zero, "float", err) &&
               check_groups(a, l, err) && check_shape(a, l->data, a->n_in / 2, a->n_out, err) &&
               check_shape(a, l->scale, a->n_out, l->n_groups, err) &&
               check_shape(a, l->zero, a->n_out, l->n_groups, err);
    }
    int64_t n = entries(l->scale);
    l->shifts = l->zero != NULL;
    l->block[0] = n == 1 ? a->n_out : 1;
    l->n_groups = 1;
    l->group_len = a->n_in;
    bool row = n == 1 || (n == a->n_out && (l->scale->dims[0] == 1 || l->scale->dims[1] == 1));
    if (!check_shape(a, l->data, a->n_in, a->n_out, err) ||
        (!row &&
         (!count_groups(a, l, err) || !check_shape(a, l->scale, l->n_groups, a->n_out, err))))
        return false;
    if (l->zero && (l->zero->type != DT_I8 || (int64_t)l->zero->bytes != n))
        return error_set(err,
                         "%s: tensor %s: type %s, %zu bytes: an I8 for each of %" PRId64
                         " scales is expected",
                         a->path, l->zero->name, l->zero->type_name, l->zero->bytes, n);
    return check_int8(a, l, err);
}

/* NVFP4: codes (out, in/2) U8, scales (out, in/16) FP8, and one scale per tensor. In a stack, codes
 * and scales may be transposed: (in/2, out), (in/16, out). */
static bool find_nvfp4(const struct layout_ask *a, struct packed_layout *l, struct error *err)
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
        return error_set(err, "%s: tensor %s: row of %d is not a multiple of NVFP4's %d", a->path,
                         l->data->name, a->n_in, QK_NVFP4);
    l->transposed = is_transposed(a, l->data, a->n_in / 2);
    return check_wide(a, l, l->data, a->n_in / 2, err) &&
           check_wide(a, l, l->scale, a->n_in / 16, err) && check_one(a, l->global, err);
}

/* MXFP4: codes (out, in/2) U8 or I8, or (out, in/32, 16); exponents (out, in/32) U8. */
static bool find_mxfp4(const struct layout_ask *a, struct packed_layout *l, const char *scale,
                       struct error *err)
{
    l->kind = LAYOUT_MXFP4;
    l->type = DT_MXFP4;
    l->scale = find(a, scale);
    if (!l->scale || !is_exponent(l->scale))
        return check_beside(a, l->data, scale, l->scale, "U8", err);
    bool words = is_type(l->data, "U32"); /* MLX's */
    if (!words && !is_type(l->data, "U8") && l->data->type != DT_I8)
        return bad_type(a, l->data, "U8", err);
    if (a->n_in % QK_32)
        return error_set(err, "%s: tensor %s: row of %d is not a multiple of MXFP4's %d", a->path,
                         l->data->name, a->n_in, QK_32);
    int64_t stack = a->n_stack ? a->n_stack : 1;
    const int64_t *d = l->data->dims;
    bool flat = d[0] == a->n_in / (words ? 8 : 2) && d[1] == a->n_out && d[2] == stack && d[3] == 1;
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

/* The type with these 16 levels, which tools write with 7 digits or more. F16: neither NF4 nor FP4. */
static enum dtype type_of_levels(const struct tensor *levels)
{
    static const enum dtype types[] = {DT_NF4, DT_FP4};
    for (int i = 0; i < 2; i++) {
        const float *of = quant_levels(types[i]);
        int same = 0;
        for (size_t k = 0; k < 16; k++) {
            float level;
            memcpy(&level, levels->data + 4 * k, 4);
            same += fabsf(level - of[k]) < 1e-6f;
        }
        if (same == 16)
            return types[i];
    }
    return DT_F16;
}

/* bitsandbytes 4-bit: weight (out * in / 2, 1) U8 in blocks that run across rows, weight.quant_map
 * (16). Blocks that straddle rows, and other levels than NF4's and FP4's, become F16. weight.absmax has one scale per block: floats, or bytes that index nested_quant_map, scaled
 * by nested_absmax per 256. The other parameters are JSON in a tensor. */
static bool find_bnb4(const struct layout_ask *a, struct packed_layout *l,
                      const struct tensor *state, struct error *err)
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
    if (len % QK_NF4 == 0 && a->n_in % QK_NF4 == 0)
        l->type = type_of_levels(l->levels);
    if (!nested)
        return true;
    l->scale_levels = find(a, "weight.nested_quant_map");
    l->scale_scales = find(a, "weight.nested_absmax");
    return check_beside(a, l->data, "nested_quant_map", l->scale_levels, "F32", err) &&
           check_beside(a, l->data, "nested_absmax", l->scale_scales, "F32", err) &&
           check_shape(a, l->scale_levels, 256, 1, err) &&
           check_shape(a, l->scale_scales, (blocks + 255) / 256, 1, err);
}

/* BitNet: weight (out/4, in) U8; matrix row i * out/4 + r is bits 2i of row r, plus 1. One scale. */
static bool find_ternary(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    l->kind = LAYOUT_TERNARY;
    l->type = a->n_in % QK_K ? DT_Q4_0 : DT_TQ2_0;
    l->scale = find(a, "weight_scale");
    l->reciprocal = a->config->divides;
    if (!no_stack(a, l->data, err) ||
        !check_beside(a, l->data, "weight_scale", l->scale, "float", err) ||
        !check_one(a, l->scale, err))
        return false;
    if (a->n_out % 4 || a->n_in % QK_32)
        return error_set(err, "%s: tensor %s: %d x %d ternary weights are not supported", a->path,
                         l->data->name, a->n_out, a->n_in);
    return check_shape(a, l->data, a->n_in, a->n_out / 4, err);
}

/* MXFP8: weight (out, in) FP8; exponents (out, in/32). */
static bool find_mxfp8(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    l->kind = LAYOUT_MXFP8;
    l->type = DT_BF16;
    if (a->n_in % QK_32)
        return error_set(err, "%s: tensor %s: row of %d is not a multiple of MXFP8's %d", a->path,
                         l->data->name, a->n_in, QK_32);
    find(a, "input_scale");
    return check_shape(a, l->data, a->n_in, a->n_out, err) &&
           check_shape(a, l->scale, a->n_in / QK_32, a->n_out, err);
}

/* MLX's formats without biases: words of codes in order, and scales U8 of 32 values (MXFP4, MXFP8) or 16 (NVFP4). The
 * shapes tell which, since modules differ. */
static bool find_mlx_float(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    bool eight = l->data->dims[0] == a->n_in / 4;
    if (eight && a->n_in % QK_32 == 0) {
        l->kind = LAYOUT_MXFP8;
        l->type = DT_BF16;
        return check_shape(a, l->data, a->n_in / 4, a->n_out, err) &&
               check_shape(a, l->scale, a->n_in / QK_32, a->n_out, err);
    }
    if (l->scale->dims[0] != a->n_in / 16 || a->n_in % 16)
        return find_mxfp4(a, l, "scales", err);
    l->kind = LAYOUT_NVFP4;
    l->type = DT_NVFP4;
    if (a->n_in % QK_NVFP4)
        return error_set(err, "%s: tensor %s: row of %d is not a multiple of NVFP4's %d", a->path,
                         l->data->name, a->n_in, QK_NVFP4);
    return check_shape(a, l->data, a->n_in / 8, a->n_out, err) &&
           check_shape(a, l->scale, a->n_in / 16, a->n_out, err);
}

/* MLX: weight (out, in * bits / 32) U32, a stream of codes, lowest bits first; scales and biases (out, groups). Groups
 * and bits follow from the shapes, since they differ by module. */
static bool find_mlx(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    l->scale = find(a, "scales");
    l->zero = find(a, "biases");
    if (!l->zero && is_type(l->scale, "U8"))
        return find_mlx_float(a, l, err);
    l->kind = LAYOUT_MLX;
    if (!check_beside(a, l->data, "scales", l->scale, "float", err) ||
        !check_beside(a, l->data, "biases", l->zero, "float", err) || !count_groups(a, l, err))
        return false;
    int64_t bits = l->data->dims[0] * 32 / a->n_in;
    if (l->group_len % QK_32 || bits < 2 || bits > 8 || bits == 7)
        return error_set(err, "%s: tensor %s: %" PRId64 " bits in groups of %d are not supported",
                         a->path, l->data->name, bits, l->group_len);
    l->bits = (int)bits;
    l->type = bits <= 4 ? DT_Q4_1 : bits == 5 ? DT_Q5_1 : DT_F16;
    return check_shape(a, l->data, (int64_t)a->n_in * bits / 32, a->n_out, err) &&
           check_shape(a, l->scale, l->n_groups, a->n_out, err) &&
           check_shape(a, l->zero, l->n_groups, a->n_out, err);
}

static bool find_kind(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    *l = (struct packed_layout){.n_in = a->n_in, .n_out = a->n_out, .n_stack = a->n_stack};
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
    if ((l->data = find(a, "W_q")))
        return find_hqq(a, l, err);
    if ((l->data = find(a, "_weight_qdata")))
        return find_torchao(a, l, err);
    if (!(t = find(a, "weight")))
        return true; /* the caller that needs it reports it missing */
    l->data = t;
    if (is_type(t, "U32"))
        return find_mlx(a, l, err);
    if (is_type(t, "U8") && a->config->ternary)
        return find_ternary(a, l, err);
    const struct tensor *state = is_type(t, "U8") ? quant_state(a) : NULL;
    if (state)
        return find_bnb4(a, l, state, err);
    if (is_type(t, "U8")) {
        bool mx = is_type(find(a, "weight_scale"), "U8");
        return mx ? find_mxfp4(a, l, "weight_scale", err) : find_nvfp4(a, l, err);
    }
    const struct tensor *own = find(a, "scale"); /* DeepSeek V4's */
    if (t->type == DT_I8)
        return own && is_exponent(own) ? find_mxfp4(a, l, "scale", err) : find_bytes(a, l, err);
    const struct tensor *scale = find(a, "weight_scale_inv");
    scale = scale ? scale : find(a, "weight_scale");
    scale = scale ? scale : own;
    l->scale = scale;
    bool by_group = scale && is_exponent(scale) && scale->dims[0] == a->n_in / QK_32 &&
                    scale->dims[1] == a->n_out;
    if (t->type == DT_F8_E4M3 && (by_group || is_type(scale, "U8")))
        return find_mxfp8(a, l, err);
    if (t->type == DT_F8_E4M3 && scale)
        return find_fp8(a, l, scale, err);
    l->data = NULL;
    return true;
}

bool layout_find(const struct layout_ask *a, struct packed_layout *l, struct error *err)
{
    return find_kind(a, l, err) && (l->kind == LAYOUT_PLAIN || no_transform(a, err));
}

static const char *suffix_of(const char *name)
{
    const char *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

/* Whether suffix is one of a NULL-terminated list, alone or after a '_'. */
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
                                         "biases",
                                         "g_idx",
                                         "weight_scale_inv",
                                         "weight_scale",
                                         "scale",
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
                                         "scaled_zeros",
                                         "zero",
                                         "nbits",
                                         "group_size",
                                         "axis",
                                         "packing",
                                         "shape",
                                         "view_as_float",
                                         "compute_dtype",
                                         "offload_meta",
                                         "channel_wise",
                                         "unpack_view_dtype",
                                         "optimize",
                                         "round_zero",
                                         "stores_quant_config",
                                         "quant_scale",
                                         "quant_zero",
                                         "bitsandbytes__nf4",
                                         "bitsandbytes__fp4",
                                         NULL};
    int64_t n = t->dims[0] * t->dims[1] * t->dims[2] * t->dims[3];
    const char *suffix = suffix_of(t->name);
    if (is_type(t, "U8") && config->ternary)
        return n * 4;
    if (is_type(t, "U32") && config->mlx_bits)
        return n * 32 / config->mlx_bits;
    if (layout_is_spare(t->name) || ends_as(suffix, beside))
        return 0;
    size_t len = strlen(suffix);
    if (!strcmp(suffix, "W_q"))
        return config->bits == 3 ? n * 10 : config->bits ? n * 8 / config->bits : n;
    if (!strcmp(suffix, "_weight_qdata"))
        return config->bits == 4 ? n * 2 : n;
    if (!strcmp(suffix, "qweight") && config->gemv_fast)
        return n * 4;
    if (!strcmp(suffix, "qweight") || (!strcmp(suffix, "weight_packed") && t->type == DT_I32))
        return n * (config->bits == 8 ? 4 : 8);
    bool blocks = len > 7 && !strcmp(suffix + len - 7, "_blocks");
    bool stack = strstr(suffix, "_proj") != NULL; /* experts in one tensor */
    return is_type(t, "U8") && (blocks || stack || !strncmp(suffix, "weight", 6)) ? n * 2 : n;
}
