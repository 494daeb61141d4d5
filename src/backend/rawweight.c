/* Weights in host memory: sizes, exact rows, copies. See rawweight.h. */
#include "backend/rawweight.h"
#include "base/error.h"
#include "base/mem.h"

#include <string.h>

static int ceil_div(int a, int b)
{
    return (a + b - 1) / b;
}

size_t raw_seg_row_bytes(const struct raw_seg *s, int n_in)
{
    return dtype_bytes(s->type, (size_t)n_in);
}

/* Bytes of each of a segment's four planes, per expert. */
struct plane_bytes {
    size_t data, scale, zero, perm;
};

static struct plane_bytes plane_bytes(const struct raw_seg *s, int n_in)
{
    struct plane_bytes b = {.data = raw_seg_row_bytes(s, n_in) * (size_t)s->rows};
    if (s->type == DT_F8_E4M3 && s->scale)
        b.scale = sizeof(float) * (size_t)s->rows * (size_t)ceil_div(n_in, 128);
    if (s->type == DT_NVFP4 && s->scale)
        b.scale = sizeof(float);
    if (s->type == DT_GPTQ4) {
        size_t groups = (size_t)s->rows * (size_t)ceil_div(n_in, s->group_len);
        b.scale = groups * sizeof(uint16_t);
        b.zero = groups;
        b.perm = s->perm ? (size_t)n_in * sizeof(int32_t) : 0;
    }
    return b;
}

size_t raw_weight_bytes(const struct raw_weight *w)
{
    size_t sum = 0;
    for (int i = 0; i < w->n_seg; i++) {
        struct plane_bytes b = plane_bytes(&w->seg[i], w->n_in);
        sum += (b.data + b.scale + b.zero + b.perm) * (size_t)w->n_expert;
    }
    return sum;
}

static void row_f8(const struct raw_weight *w, const struct raw_seg *s, int e, int row, float *dst)
{
    const uint8_t *codes = s->data[e] + (size_t)row * (size_t)w->n_in;
    const float *scale = s->scale ? s->scale[e] : NULL;
    if (scale)
        scale += (size_t)row * (size_t)ceil_div(w->n_in, 128);
    for (int j = 0; j < w->n_in; j++)
        dst[j] = f8e4m3_to_f32(codes[j]) * (scale ? scale[j / 128] : 1.0f);
}

static void row_gptq(const struct raw_weight *w, const struct raw_seg *s, int e, int row,
                     float *dst)
{
    int groups = ceil_div(w->n_in, s->group_len);
    const uint8_t *codes = s->data[e] + (size_t)row * (size_t)(w->n_in / 2);
    const uint16_t *scale = (const uint16_t *)s->scale[e] + (size_t)row * (size_t)groups;
    const uint8_t *zero = s->zero[e] + (size_t)row * (size_t)groups;
    const int32_t *perm = s->perm ? s->perm[e] : NULL;
    for (int j = 0; j < w->n_in; j++) {
        int code = j & 1 ? codes[j / 2] >> 4 : codes[j / 2] & 15;
        int g = j / s->group_len;
        dst[perm ? perm[j] : j] = (float)(code - zero[g]) * f16_to_f32(scale[g]);
    }
}

void raw_weight_row(const struct raw_weight *w, int e, int row, float *dst)
{
    const struct raw_seg *s = w->seg;
    for (; row >= s->rows; s++)
        row -= s->rows;
    CHECK(s < w->seg + w->n_seg, "row past the end of a weight");
    if (s->type == DT_F8_E4M3)
        row_f8(w, s, e, row, dst);
    else if (s->type == DT_GPTQ4)
        row_gptq(w, s, e, row, dst);
    else
        quant_dequantize(s->type, s->data[e] + (size_t)row * raw_seg_row_bytes(s, w->n_in), dst,
                         (size_t)w->n_in);
    if (s->type == DT_NVFP4 && s->scale)
        for (int j = 0; j < w->n_in; j++)
            dst[j] *= *(const float *)s->scale[e];
}

/* Lays out [struct][pointer tables][planes, 64-byte aligned][bias] in one block. */
struct layout {
    uint8_t *base; /* NULL while sizes are counted */
    size_t used;
};

static void *carve(struct layout *l, size_t bytes)
{
    l->used = (l->used + 63) & ~(size_t)63;
    void *p = l->base ? l->base + l->used : NULL;
    l->used += bytes;
    return p;
}

static const void *const *carve_plane(struct layout *l, const void *const *src, int n_expert,
                                      size_t bytes, bool deep)
{
    if (!src)
        return NULL;
    const void **table = carve(l, (size_t)n_expert * sizeof *table);
    for (int e = 0; e < n_expert; e++) {
        void *copy = deep ? carve(l, bytes) : NULL;
        if (!l->base)
            continue;
        table[e] = deep ? copy : src[e];
        if (deep)
            memcpy(copy, src[e], bytes);
    }
    return table;
}

static void fill(struct layout *l, const struct raw_weight *w, bool deep)
{
    struct raw_weight *out = carve(l, sizeof *out);
    struct raw_weight head = *w;
    for (int i = 0; i < w->n_seg; i++) {
        struct plane_bytes b = plane_bytes(&w->seg[i], w->n_in);
        struct raw_seg *s = &head.seg[i];
        s->data = (const uint8_t *const *)carve_plane(l, (const void *const *)s->data, w->n_expert,
                                                      b.data, deep);
        s->scale = carve_plane(l, s->scale, w->n_expert, b.scale, deep);
        s->zero = (const uint8_t *const *)carve_plane(l, (const void *const *)s->zero, w->n_expert,
                                                      b.zero, deep);
        s->perm = (const int32_t *const *)carve_plane(l, (const void *const *)s->perm, w->n_expert,
                                                      b.perm, deep);
    }
    if (w->bias) {
        size_t bytes = (size_t)w->n_expert * (size_t)w->n_out * sizeof(float);
        float *bias = carve(l, bytes);
        if (l->base)
            memcpy(bias, w->bias, bytes);
        head.bias = bias;
    }
    if (deep)
        head.transient = false;
    if (l->base)
        *out = head;
}

static struct raw_weight *clone(const struct raw_weight *w, bool deep)
{
    struct layout count = {0};
    carve(&count, sizeof(size_t));
    fill(&count, w, deep);
    struct layout l = {.base = mem_aligned(count.used)};
    if (!l.base)
        return NULL;
    /* The block starts with its size, for mem_aligned_free. */
    *(size_t *)carve(&l, sizeof(size_t)) = count.used;
    fill(&l, w, deep);
    return (struct raw_weight *)(l.base + 64);
}

struct raw_weight raw_weight_experts(const struct raw_weight *src, int first, int n)
{
    struct raw_weight w = *src;
    CHECK(first >= 0 && n >= 0 && first + n <= src->n_expert, "experts %d to %d of %d", first,
          first + n, src->n_expert);
    w.n_expert = n;
    w.n_host = 0;
    if (w.bias)
        w.bias += (size_t)first * (size_t)w.n_out;
    for (int i = 0; i < w.n_seg; i++) {
        struct raw_seg *s = &w.seg[i];
        s->data = s->data ? s->data + first : NULL;
        s->scale = s->scale ? s->scale + first : NULL;
        s->zero = s->zero ? s->zero + first : NULL;
        s->perm = s->perm ? s->perm + first : NULL;
    }
    return w;
}

struct raw_weight *raw_weight_copy(const struct raw_weight *w)
{
    return clone(w, true);
}

struct raw_weight *raw_weight_view(const struct raw_weight *w)
{
    return clone(w, false);
}

void raw_weight_free(struct raw_weight *w)
{
    if (!w)
        return;
    uint8_t *base = (uint8_t *)w - 64;
    mem_aligned_free(base, *(size_t *)base);
}
