/*
 * Reads rows of codes and scales from packed matrices that layout.c has found, in the formats of
 * struct raw_seg. Scales are checked as they are read.
 */
#include "model/layout.h"
#include "base/mem.h"

#include <math.h>
#include <string.h>

static uint32_t load_u32(const uint8_t *p, size_t i)
{
    uint32_t v;
    memcpy(&v, p + 4 * i, 4);
    return v;
}

static float load_float(const struct tensor *t, size_t i)
{
    float v;
    if (t->type == DT_NONE) /* F8_E8M0: an exponent */
        return t->data[i] == 255 ? NAN : ldexpf(1, (int)t->data[i] - 127);
    quant_dequantize(t->type, t->data + i * dtype_bytes(t->type, 1), &v, 1);
    return v;
}

/* The matrix row of the i-th row of r. */
static size_t row_at(const struct layout_rows *r, int i)
{
    int run = r->run_length ? r->run_length : 1;
    return (size_t)(r->first + r->step * (i / run) + i % run);
}

/* Row i of r from codes of `wide` bytes per row. It points into the file or, if the matrix is
 * transposed, into a copy of this row and the next ones. */
struct row_reader {
    const struct packed_layout *l;
    const struct layout_rows *r;
    const uint8_t *data;
    size_t wide;
    uint8_t *copy; /* (ROWS_AT_ONCE, wide) */
    int first;     /* first row in the copy; -1 = none */
};

enum { ROWS_AT_ONCE = 64 };

static struct row_reader rows_of(const struct packed_layout *l, const struct layout_rows *r,
                                 const struct tensor *t, size_t wide)
{
    return (struct row_reader){.l = l,
                               .r = r,
                               .data = t->data,
                               .wide = wide,
                               .copy = l->transposed ? mem_alloc(ROWS_AT_ONCE * wide) : NULL,
                               .first = -1};
}

static const uint8_t *row_get(struct row_reader *x, int i)
{
    if (!x->l->transposed)
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
    return error_set(err, "%s: tensor %s: entry %zu: %g is not a valid scale", path,
                     t ? t->name : "of scales", i, (double)v);
}

struct layout_bytes layout_bytes(const struct packed_layout *l, int n)
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

/* order[j] = input column stored at j: columns sorted by group, stable. Each group must be full, or
 * blocks would straddle groups. */
static bool read_order(const struct packed_layout *l, const char *path, int32_t *order,
                       bool *permuted, struct error *err)
{
    *permuted = false;
    for (int j = 0; j < l->n_in; j++)
        order[j] = j;
    bool unset = true; /* compressed-tensors: all -1 if columns are in order */
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

/* Rows of codes from (n_in/8, n_out) words of 8 columns. Without a column order a word is 4 bytes
 * of a row as it is. Works in blocks that fit the L1 cache in both directions. */
static void codes_gptq(const struct packed_layout *l, const struct layout_rows *r,
                       const int32_t *order, uint8_t *out)
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

/* Shift of output o of eight in an AWQ word. */
static int awq_shift(int o)
{
    return 4 * (o % 8 / 2 + o % 2 * 4);
}

/* Rows of codes from (n_in, n_out/8) words of 8 rows. Works on a few columns at a time, so that
 * their cache lines stay in L1 while all rows are extracted. */
static void codes_awq(const struct packed_layout *l, const struct layout_rows *r, uint8_t *out)
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

/* Rows of codes already in our format, with columns reordered if needed. */
static void codes_int4(const struct packed_layout *l, const struct layout_rows *r,
                       const int32_t *order, bool permuted, uint8_t *out)
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

/* The zero point of (group g, row o) on the scale of codes. */
static int zero_at(const struct packed_layout *l, size_t g, size_t o)
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
        if (l->stride)
            return (int)(load_u32(l->zero->data, o * (size_t)(l->stride / 8) + g / 8) >>
                             4 * (g % 8) &
                         15);
        if (l->zero->type == DT_I8)
            return (int8_t)l->zero->data[o * groups + g] + 8;
        return (int)(load_u32(l->zero->data, o / 8 * groups + g) >> 4 * (o % 8) & 15);
    }
}

static bool read_int4(const struct packed_layout *l, const char *path, const struct layout_rows *r,
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
    size_t groups = (size_t)l->n_groups, n_out = (size_t)l->n_out;
    uint16_t *scale = to->scale;
    for (size_t i = 0; i < (size_t)r->n; i++) {
        size_t o = row_at(r, (int)i);
        for (size_t g = 0; g < groups; g++) {
            size_t wide = l->stride ? (size_t)l->stride : groups;
            size_t at = l->kind == LAYOUT_INT4 ? o * wide + g : g * n_out + o;
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

/* Q8_0 has no zero points, so every zero of 8-bit codes must be the middle value. */
static bool check_zeros(const struct packed_layout *l, const char *path, struct error *err)
{
    for (size_t i = 0; l->zero && !l->shifts && i < l->zero->bytes; i++) {
        int zero = l->words ? l->zero->data[i] + l->zero_plus - 128 : (int8_t)l->zero->data[i];
        if (zero)
            return error_set(err,
                             "%s: tensor %s: entry %zu: 8 bits with zero points are not supported",
                             path, l->zero->name, i);
    }
    return true;
}

static bool read_int8(const struct packed_layout *l, const char *path, const struct layout_rows *r,
                      const struct layout_planes *to, struct error *err)
{
    struct block_q8_0 *out = (struct block_q8_0 *)to->data;
    size_t n_in = (size_t)l->n_in, groups = (size_t)l->n_groups, len = (size_t)l->group_len;
    bool gptq = l->words && l->zero; /* has zeros, and words of four columns */
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
                int code = (int8_t)(l->data->data[from] ^ flip);
                code -= l->shifts ? (int8_t)l->zero->data[at] : 0;
                if (code < -128 || code > 127)
                    return error_set(err,
                                     "%s: tensor %s: entry %zu: minus its zero point it has more "
                                     "than 8 bits",
                                     path, l->data->name, from);
                out->qs[k] = (int8_t)code;
            }
        }
    }
    return true;
}

static bool read_fp8(const struct packed_layout *l, const char *path, const struct layout_rows *r,
                     const struct layout_planes *to, struct error *err)
{
    size_t n_in = (size_t)l->n_in, cols = (n_in + 127) / 128;
    size_t n_across = (n_in + (size_t)l->block[1] - 1) / (size_t)l->block[1];
    float *scale = to->scale;
    struct row_reader codes = rows_of(l, r, l->data, n_in);
    bool ok = true;
    for (size_t i = 0; ok && i < (size_t)r->n; i++) {
        size_t first = row_at(r, (int)i) / (size_t)l->block[0] * n_across;
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

static bool row_nvfp4(const struct packed_layout *l, const char *path, size_t row,
                      const uint8_t *codes, const uint8_t *scales, struct block_nvfp4 *out,
                      struct error *err)
{
    size_t blocks = (size_t)l->n_in / QK_NVFP4;
    for (size_t b = 0; b < blocks; b++, out++)
        for (size_t g = 0; g < 4; g++) {
            uint8_t s = scales[4 * b + g];
            if (s >= 0x7f)
                return bad_scale(path, l->scale, row * blocks * 4 + 4 * b + g, f8e4m3_to_f32(s),
                                 err);
            out->d[g] = s;
            /* the file's low nibbles hold even values, ours hold the first half */
            const uint8_t *in = codes + 32 * b + 8 * g;
            for (int k = 0; k < 8; k++) {
                int lo = in[k / 2] >> k % 2 * 4 & 15, hi = in[4 + k / 2] >> k % 2 * 4 & 15;
                out->qs[8 * g + (size_t)k] = (uint8_t)(lo | hi << 4);
            }
        }
    return true;
}

static bool read_nvfp4(const struct packed_layout *l, const char *path, const struct layout_rows *r,
                       const struct layout_planes *to, struct error *err)
{
    float global = l->global ? load_float(l->global, 0) : 1; /* MLX has none */
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

static bool read_mxfp4(const struct packed_layout *l, const char *path, const struct layout_rows *r,
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

/* The scale of block b. */
static float scale_bnb4(const struct packed_layout *l, size_t b)
{
    if (!l->scale_levels)
        return load_float(l->scale, b);
    return load_float(l->scale_levels, l->scale->data[b]) * load_float(l->scale_scales, b / 256) +
           l->scale_add;
}

/* As blocks of NF4 or FP4: 64 values of one row never have two scales. */
static bool read_nf4(const struct packed_layout *l, const char *path, const struct layout_rows *r,
                     const struct layout_planes *to, struct error *err)
{
    struct block_nf4 *out = (struct block_nf4 *)to->data;
    size_t blocks = (size_t)l->n_in / QK_NF4;
    for (int i = 0; i < r->n; i++)
        for (size_t b = row_at(r, i) * blocks, end = b + blocks; b < end; b++, out++) {
            size_t at = b * QK_NF4 / (size_t)l->group_len;
            out->d = scale_bnb4(l, at);
            if (!isfinite(out->d))
                return bad_scale(path, l->scale, at, out->d, err);
            const uint8_t *codes = l->data->data + b * sizeof out->qs;
            for (size_t k = 0; k < sizeof out->qs; k++)
                out->qs[k] = (uint8_t)(codes[k] << 4 | codes[k] >> 4);
        }
    return true;
}

static bool read_bnb4(const struct packed_layout *l, const char *path, const struct layout_rows *r,
                      const struct layout_planes *to, struct error *err)
{
    if (l->type != DT_F16)
        return read_nf4(l, path, r, to, err);
    size_t n_in = (size_t)l->n_in, len = (size_t)l->group_len, last = SIZE_MAX;
    uint16_t values[16] = {0}; /* levels scaled for the block */
    for (int i = 0; i < r->n; i++)
        for (size_t j = 0, at = row_at(r, i) * n_in; j < n_in; j++, at++) {
            if (at / len != last) {
                float scale = scale_bnb4(l, last = at / len);
                for (size_t k = 0; k < 16; k++) {
                    values[k] = f32_to_f16(load_float(l->levels, k) * scale);
                    if (!isfinite(f16_to_f32(values[k])))
                        return bad_scale(path, l->scale, last, scale, err);
                }
            }
            uint8_t byte = l->data->data[at / 2];
            memcpy(to->data + ((size_t)i * n_in + j) * 2, &values[at % 2 ? byte & 15 : byte >> 4],
                   2);
        }
    return true;
}

/* Code j of a row's stream of codes. */
static unsigned code_at(const uint8_t *row, size_t j, unsigned bits)
{
    size_t at = j * bits;
    unsigned low = row[at / 8], shift = at % 8;
    if (shift + bits > 8)
        low |= (unsigned)row[at / 8 + 1] << 8;
    return low >> shift & ((1u << bits) - 1);
}

/* One block of 32 codes, of values scale * code + least, as Q4_1, Q5_1 or F16. */
static void put_block(const struct packed_layout *l, const unsigned *code, float scale, float least,
                      uint8_t *to)
{
    if (l->type == DT_F16) {
        for (size_t k = 0; k < QK_32; k++) {
            uint16_t half = f32_to_f16(scale * (float)code[k] + least);
            memcpy(to + 2 * k, &half, 2);
        }
        return;
    }
    struct block_q5_1 five = {f32_to_f16(scale), f32_to_f16(least), {0}, {0}};
    struct block_q4_1 four = {five.d, five.m, {0}};
    uint32_t high = 0;
    for (size_t k = 0; k < QK_32; k++) {
        high |= (uint32_t)(code[k] >> 4) << k;
        four.qs[k % 16] |= (uint8_t)((code[k] & 15) << (k < 16 ? 0 : 4));
    }
    memcpy(five.qh, &high, sizeof high);
    memcpy(five.qs, four.qs, sizeof four.qs);
    if (l->type == DT_Q4_1)
        memcpy(to, &four, sizeof four);
    else
        memcpy(to, &five, sizeof five);
}

static bool read_mlx(const struct packed_layout *l, const char *path, const struct layout_rows *r,
                     const struct layout_planes *to, struct error *err)
{
    size_t n_in = (size_t)l->n_in, groups = (size_t)l->n_groups, len = (size_t)l->group_len;
    size_t wide = n_in * (size_t)l->bits / 8, block = dtype_bytes(l->type, QK_32);
    float most = (float)((1 << l->bits) - 1);
    uint8_t *out = to->data;
    for (int i = 0; i < r->n; i++) {
        size_t o = row_at(r, i);
        for (size_t j = 0; j < n_in; j += QK_32, out += block) {
            size_t at = o * groups + j / len;
            float scale = load_float(l->scale, at), least = load_float(l->zero, at);
            if (!isfinite(f16_to_f32(f32_to_f16(scale))))
                return bad_scale(path, l->scale, at, scale, err);
            if (!isfinite(f16_to_f32(f32_to_f16(least))) ||
                !isfinite(f16_to_f32(f32_to_f16(scale * most + least))))
                return bad_scale(path, l->zero, at, least, err);
            unsigned code[QK_32];
            for (size_t k = 0; k < QK_32; k++)
                code[k] = code_at(l->data->data + o * wide, j + k, (unsigned)l->bits);
            put_block(l, code, scale, least, out);
        }
    }
    return true;
}

/* Code j of row o in AWQ's gemv_fast order: in 32 columns, bits of the column's number change places; four rows of 64
 * columns follow each other, four values a word. */
static unsigned code_gemv_fast(const struct packed_layout *l, size_t o, size_t j)
{
    size_t in = j % 32, place = in / 2 % 4 * 8 + in % 2 * 4 + in / 8;
    size_t at = o % 4 * 64 + j % 64 / 32 * 32 + place;
    uint16_t word;
    memcpy(&word, l->data->data + 2 * (o / 4 * (size_t)l->n_in + j / 64 * 64 + at / 4), 2);
    return word >> at % 4 * 4 & 15;
}

/* The code of value e of group g of an HQQ matrix. */
static unsigned code_hqq(const struct packed_layout *l, size_t g, size_t e)
{
    CHECK(l->bits > 0 && l->group_len > 0, "%d bits in groups of %d", l->bits, l->group_len);
    size_t len = (size_t)l->group_len, groups = (size_t)l->n_out * (size_t)l->n_in / len;
    size_t row = l->across ? e : g, column = l->across ? g : e;
    size_t high = l->across ? len : groups, wide = l->across ? groups : len;
    size_t bits = (size_t)l->bits, per = bits == 3 ? 10 : 8 / bits, step = (high + per - 1) / per;
    size_t at = row % step * wide + column, shift = (per - 1 - row / step) * bits;
    uint32_t word = bits == 3 ? load_u32(l->data->data, at) : l->data->data[at];
    return word >> shift & ((1u << bits) - 1);
}

/* Codes of columns j to j + 31 of row o, their scale and what is added to it times the code. *at: the scale's entry. */
static void affine_block(const struct packed_layout *l, size_t o, size_t j, unsigned *code,
                         float *scale, float *least, size_t *at)
{
    size_t len = (size_t)l->group_len, n_out = (size_t)l->n_out, n_in = (size_t)l->n_in;
    bool hqq = l->kind == LAYOUT_HQQ;
    *at = hqq ? (o * n_in + j) / len : j / len * n_out + o;
    *scale = load_float(l->scale, *at);
    *least = load_float(l->zero, *at);
    if (hqq)
        *least = -*least * *scale;
    else if (l->kind == LAYOUT_AO4)
        *least -= 8 * *scale; /* codes are signed */
    for (size_t k = 0; k < QK_32; k++) {
        size_t c = j + k;
        code[k] = hqq ? code_hqq(l, *at, (o * n_in + c) % len)
                  : l->kind == LAYOUT_GEMV_FAST
                      ? code_gemv_fast(l, o, c)
                      : (l->data->data[o * (n_in / 2) + c / 2] >> c % 2 * 4 & 15) ^ 8u;
    }
}

static bool is_half(float v)
{
    return isfinite(f16_to_f32(f32_to_f16(v)));
}

/* HQQ's groups across rows, as F16: neighbours have different scales. */
static bool read_across(const struct packed_layout *l, const char *path,
                        const struct layout_rows *r, const struct layout_planes *to,
                        struct error *err)
{
    size_t n_in = (size_t)l->n_in, groups = (size_t)l->n_out * n_in / (size_t)l->group_len;
    uint16_t *out = (uint16_t *)to->data;
    for (int i = 0; i < r->n; i++)
        for (size_t j = 0, at = row_at(r, i) * n_in; j < n_in; j++, at++) {
            size_t g = at % groups;
            float v = ((float)code_hqq(l, g, at / groups) - load_float(l->zero, g)) *
                      load_float(l->scale, g);
            if (!is_half(v))
                return bad_scale(path, l->scale, g, v, err);
            *out++ = f32_to_f16(v);
        }
    return true;
}

static bool read_affine(const struct packed_layout *l, const char *path,
                        const struct layout_rows *r, const struct layout_planes *to,
                        struct error *err)
{
    size_t n_in = (size_t)l->n_in, block = dtype_bytes(l->type, QK_32), at;
    float most = (float)((1 << (l->bits ? l->bits : 4)) - 1), scale, least;
    uint8_t *out = to->data;
    if (l->across)
        return read_across(l, path, r, to, err);
    for (int i = 0; i < r->n; i++)
        for (size_t j = 0; j < n_in; j += QK_32, out += block) {
            unsigned code[QK_32];
            affine_block(l, row_at(r, i), j, code, &scale, &least, &at);
            if (!is_half(scale))
                return bad_scale(path, l->scale, at, scale, err);
            if (!is_half(least) || !is_half(scale * most + least))
                return bad_scale(path, l->zero, at, least, err);
            put_block(l, code, scale, least, out);
        }
    return true;
}

/* The ternary weights of one row, 0 to 2, as codes of TQ2_0 blocks. */
static void put_ternary(const uint8_t *row, int shift, size_t n_in, uint16_t d,
                        struct block_tq2_0 *out)
{
    for (size_t b = 0; b < n_in / QK_K; b++, out++, row += QK_K) {
        *out = (struct block_tq2_0){.d = d};
        for (size_t e = 0; e < QK_K; e++)
            out->qs[e / 128 * 32 + e % 32] |= (uint8_t)((row[e] >> shift & 3) << e % 128 / 32 * 2);
    }
}

static void put_ternary_q4(const uint8_t *row, int shift, size_t n_in, uint16_t d,
                           struct block_q4_0 *out)
{
    for (size_t b = 0; b < n_in / QK_32; b++, out++, row += QK_32) {
        out->d = d;
        for (size_t k = 0; k < 16; k++)
            out->qs[k] =
                (uint8_t)(((row[k] >> shift & 3) + 7) | ((row[k + 16] >> shift & 3) + 7) << 4);
    }
}

static bool read_ternary(const struct packed_layout *l, const char *path,
                         const struct layout_rows *r, const struct layout_planes *to,
                         struct error *err)
{
    size_t n_in = (size_t)l->n_in, part = (size_t)l->n_out / 4;
    float scale = load_float(l->scale, 0);
    uint16_t d = f32_to_f16(l->reciprocal ? 1 / scale : scale);
    if (!isfinite(f16_to_f32(d)) || scale == 0)
        return bad_scale(path, l->scale, 0, scale, err);
    for (int i = 0; i < r->n; i++) {
        size_t o = row_at(r, i);
        const uint8_t *row = l->data->data + o % part * n_in;
        int shift = (int)(o / part) * 2;
        for (size_t j = 0; j < n_in; j++)
            if ((row[j] >> shift & 3) == 3)
                return error_set(err, "%s: tensor %s: entry %zu: no ternary weight", path,
                                 l->data->name, o % part * n_in + j);
        uint8_t *out = to->data + (size_t)i * dtype_bytes(l->type, n_in);
        if (l->type == DT_TQ2_0)
            put_ternary(row, shift, n_in, d, (struct block_tq2_0 *)out);
        else
            put_ternary_q4(row, shift, n_in, d, (struct block_q4_0 *)out);
    }
    return true;
}

static bool read_mxfp8(const struct packed_layout *l, const char *path, const struct layout_rows *r,
                       const struct layout_planes *to, struct error *err)
{
    size_t n_in = (size_t)l->n_in, groups = n_in / QK_32;
    uint16_t *out = (uint16_t *)to->data;
    for (int i = 0; i < r->n; i++) {
        size_t o = row_at(r, i);
        for (size_t j = 0; j < n_in; j++) {
            uint8_t code = l->data->data[o * n_in + j];
            uint8_t e = l->scale->data[o * groups + j / QK_32];
            float v = ldexpf(f8e4m3_to_f32(code), (int)e - 127);
            if (e == 255 || (code & 0x7f) == 0x7f || !isfinite(v))
                return e == 255
                           ? bad_scale(path, l->scale, o * groups + j / QK_32, NAN, err)
                           : error_set(err,
                                       "%s: tensor %s: entry %zu: FP8 code 0x%02x is not a number",
                                       path, l->data->name, o * n_in + j, code);
            *out++ = f32_to_bf16(v);
        }
    }
    return true;
}

/* Matrix `index` of a stack: its part of t, or all of t if it is one number. */
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

static bool read_one(const struct packed_layout *l, const char *path,
                     const struct layout_rows *rows, const struct layout_planes *to, bool *permuted,
                     struct error *err)
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
    case LAYOUT_MLX:
        return read_mlx(l, path, rows, to, err);
    case LAYOUT_TERNARY:
        return read_ternary(l, path, rows, to, err);
    case LAYOUT_GEMV_FAST:
    case LAYOUT_HQQ:
    case LAYOUT_AO4:
        return read_affine(l, path, rows, to, err);
    case LAYOUT_MXFP8:
        return read_mxfp8(l, path, rows, to, err);
    case LAYOUT_PLAIN:
        break;
    }
    CHECK(false, "%s: nothing to undo", path);
}

bool layout_read(const struct packed_layout *l, const char *path, const struct layout_rows *rows,
                 const struct layout_planes *to, bool *permuted, struct error *err)
{
    if (!l->n_stack)
        return read_one(l, path, rows, to, permuted, err);
    struct packed_layout one = *l;
    struct tensor parts[4];
    one.data = part_of(l->data, l->n_stack, rows->index, &parts[0]);
    one.scale = part_of(l->scale, l->n_stack, rows->index, &parts[1]);
    one.zero = part_of(l->zero, l->n_stack, rows->index, &parts[2]);
    one.global = part_of(l->global, l->n_stack, rows->index, &parts[3]);
    return read_one(&one, path, rows, to, permuted, err);
}

const uint8_t *layout_direct(const struct packed_layout *l, const struct layout_rows *rows)
{
    if (l->kind != LAYOUT_FP8 || l->transposed || rows->step != 1 || rows->run_length > 1)
        return NULL;
    size_t row = (size_t)rows->index * (size_t)l->n_out + (size_t)rows->first;
    return l->data->data + row * (size_t)l->n_in;
}
