/*
 * Weights of the Vulkan backend. A row keeps the file's blocks, with one change: the part that would leave blocks
 * unaligned, such as a scale of two bytes, moves behind the blocks of its row. So kernels read aligned words of every
 * format (shaders/formats.glsl).
 */
#include "backend/vulkan/vulkan.h"
#include "base/mem.h"

#include <string.h>

enum { CHUNK = 8 << 20 };

/* The piece of a block that moves: where it is, and its bytes. 0 bytes: the block stays whole. */
struct packing {
    uint8_t known, format, piece_at, piece;
};

static const struct packing packings[DT_COUNT] = {
    [DT_F32] = {1, FORMAT_F32, 0, 0},         [DT_F16] = {1, FORMAT_F16, 0, 0},
    [DT_BF16] = {1, FORMAT_BF16, 0, 0},       [DT_Q4_0] = {1, FORMAT_Q4_0, 0, 2},
    [DT_Q4_1] = {1, FORMAT_Q4_1, 0, 0},       [DT_Q5_0] = {1, FORMAT_Q5_0, 0, 2},
    [DT_Q5_1] = {1, FORMAT_Q5_1, 0, 0},       [DT_Q8_0] = {1, FORMAT_Q8_0, 0, 2},
    [DT_Q2_K] = {1, FORMAT_Q2_K, 0, 0},       [DT_Q3_K] = {1, FORMAT_Q3_K, 108, 2},
    [DT_Q4_K] = {1, FORMAT_Q4_K, 0, 0},       [DT_Q5_K] = {1, FORMAT_Q5_K, 0, 0},
    [DT_Q6_K] = {1, FORMAT_Q6_K, 208, 2},     [DT_IQ4_NL] = {1, FORMAT_IQ4_NL, 0, 2},
    [DT_IQ4_XS] = {1, FORMAT_IQ4_XS, 0, 0},   [DT_MXFP4] = {1, FORMAT_MXFP4, 0, 1},
    [DT_IQ3_S] = {1, FORMAT_IQ3_S, 0, 2},     [DT_IQ1_S] = {1, FORMAT_IQ1_S, 0, 2},
    [DT_IQ1_M] = {1, FORMAT_IQ1_M, 0, 0},     [DT_IQ2_XXS] = {1, FORMAT_IQ2_XXS, 0, 2},
    [DT_IQ2_XS] = {1, FORMAT_IQ2_XS, 0, 2},   [DT_IQ2_S] = {1, FORMAT_IQ2_S, 0, 2},
    [DT_IQ3_XXS] = {1, FORMAT_IQ3_XXS, 0, 2}, [DT_TQ1_0] = {1, FORMAT_TQ1_0, 52, 2},
    [DT_TQ2_0] = {1, FORMAT_TQ2_0, 64, 2},    [DT_NVFP4] = {1, FORMAT_NVFP4, 0, 0},
    [DT_Q1_0] = {1, FORMAT_Q1_0, 0, 2},       [DT_Q2_0] = {1, FORMAT_Q2_0, 0, 2},
    [DT_F8_E4M3] = {1, FORMAT_F8_E4M3, 0, 0}, [DT_GPTQ4] = {1, FORMAT_GPTQ4, 0, 0},
    [DT_NF4] = {1, FORMAT_NF4, 0, 0},         [DT_FP4] = {1, FORMAT_FP4, 0, 0},
};

uint32_t vulkan_cache_format(enum dtype t)
{
    return packings[t].format;
}

static size_t align_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

static size_t groups_of(const struct raw_seg *s, int n_in)
{
    return ((size_t)n_in + (size_t)s->group_len - 1) / (size_t)s->group_len;
}

/* Sets tail and row_words. */
static void measure(const struct raw_seg *s, int n_in, struct vulkan_segment *out)
{
    const struct packing *p = &packings[s->type];
    const struct dtype_info *t = &dtype_table[s->type];
    size_t n = (size_t)n_in, blocks = n / (size_t)t->block_len, body, tail;
    if (t->block_len < 32) /* whole units of eight values */
        body = align_up(n, 8) / (size_t)t->block_len * (size_t)t->block_bytes;
    else
        body = blocks * (size_t)(t->block_bytes - p->piece);
    tail = blocks * p->piece;
    if (s->type == DT_F8_E4M3)
        tail = (n + 127) / 128 * sizeof(float);
    if (s->type == DT_NVFP4)
        tail = sizeof(float);
    if (s->type == DT_GPTQ4)
        tail = align_up(2 * groups_of(s, n_in), 4) + groups_of(s, n_in);
    out->format = p->format;
    out->tail = (uint32_t)(body / 4);
    out->row_words = (uint32_t)(align_up(body + tail, 16) / 4);
    out->group_len = s->type == DT_GPTQ4 ? (uint32_t)s->group_len : 128;
}

/* One row into `to`, which is zeros. src: the row's blocks. */
static void pack_row(const struct raw_seg *s, int n_in, int e, int row, const uint8_t *src,
                     const struct vulkan_segment *seg, uint8_t *to)
{
    const struct packing *p = &packings[s->type];
    const struct dtype_info *t = &dtype_table[s->type];
    uint8_t *tail = to + 4 * (size_t)seg->tail;
    size_t n = (size_t)n_in, block = (size_t)t->block_bytes, piece = p->piece;
    if (!piece)
        memcpy(to, src, raw_seg_row_bytes(s, n_in));
    for (size_t i = 0; piece && i < n / (size_t)t->block_len; i++, src += block) {
        uint8_t *body = to + i * (block - piece);
        memcpy(tail + i * piece, src + p->piece_at, piece);
        memcpy(body, src, p->piece_at);
        memcpy(body + p->piece_at, src + p->piece_at + piece, block - piece - p->piece_at);
    }
    if (s->type == DT_F8_E4M3) {
        size_t scales = (n + 127) / 128;
        const float *from = s->scale ? (const float *)s->scale[e] + (size_t)row * scales : NULL;
        for (size_t i = 0; i < scales; i++) {
            float one = from ? from[i] : 1.0f;
            memcpy(tail + 4 * i, &one, 4);
        }
    } else if (s->type == DT_NVFP4) {
        float one = s->scale ? *(const float *)s->scale[e] : 1.0f;
        memcpy(tail, &one, 4);
    } else if (s->type == DT_GPTQ4) {
        size_t g = groups_of(s, n_in);
        memcpy(tail, (const uint16_t *)s->scale[e] + (size_t)row * g, 2 * g);
        memcpy(tail + align_up(2 * g, 4), s->zero[e] + (size_t)row * g, g);
    }
}

/* Packs the rows of one expert's segment and copies them to the device, some at a time. */
static bool copy_rows(struct vulkan *v, const struct raw_weight *src, const struct raw_seg *s,
                      int e, const struct vulkan_segment *seg, uint8_t *packed, uint8_t *read,
                      struct error *err)
{
    size_t bytes = raw_seg_row_bytes(s, src->n_in), each = 4 * (size_t)seg->row_words;
    CHECK(each, "rows of no words");
    int step = (int)(CHUNK / each) > 0 ? (int)(CHUNK / each) : 1;
    uint64_t to = seg->at + (uint64_t)e * seg->rows * each;
    for (int row = 0; row < s->rows; row += step) {
        int n = s->rows - row < step ? s->rows - row : step;
        const uint8_t *data = s->data[e] + (size_t)row * bytes;
        if (src->read)
            data = src->read(src->read_arg, data, (size_t)n * bytes, read);
        if (!data)
            return error_set(err, "a weight could not be read");
        memset(packed, 0, (size_t)n * each);
        for (int i = 0; i < n; i++)
            pack_row(s, src->n_in, e, row + i, data + (size_t)i * bytes, seg,
                     packed + (size_t)i * each);
        vulkan_copy_in(&v->be, (void *)(uintptr_t)(to + (uint64_t)row * each), packed,
                       (size_t)n * each);
    }
    return true;
}

/* Sets where everything of the weight begins. Returns the bytes of all. */
static size_t lay_out(const struct raw_weight *src, struct vulkan_weight *m, uint64_t base)
{
    size_t at = 0;
    int first = 0;
    m->n_seg = src->n_seg;
    for (int i = 0; i < src->n_seg; i++) {
        const struct raw_seg *s = &src->seg[i];
        struct vulkan_segment *seg = &m->seg[i];
        measure(s, src->n_in, seg);
        seg->rows = (uint32_t)s->rows;
        seg->first = (uint32_t)first;
        first += s->rows;
        seg->at = base + at;
        at += align_up(4 * (size_t)seg->row_words * (size_t)s->rows * (size_t)src->n_expert, 16);
        if (s->type == DT_GPTQ4 && s->perm) {
            seg->perm = base + at;
            at += align_up(4 * (size_t)src->n_in * (size_t)src->n_expert, 16);
        }
    }
    m->bias = src->bias ? base + at : 0;
    return at + (src->bias ? 4 * (size_t)src->n_out * (size_t)src->n_expert : 0);
}

static bool copy_all(struct vulkan *v, const struct raw_weight *src, struct vulkan_weight *m,
                     struct error *err)
{
    size_t widest = 0, raw = 0;
    for (int i = 0; i < src->n_seg; i++) {
        size_t bytes = 4 * (size_t)m->seg[i].row_words;
        size_t source = raw_seg_row_bytes(&src->seg[i], src->n_in);
        widest = bytes > widest ? bytes : widest;
        raw = source > raw ? source : raw;
    }
    size_t room = widest > CHUNK ? widest : CHUNK;
    uint8_t *packed = mem_ask(room), *read = mem_ask(room + raw);
    bool ok = packed && read;
    if (!ok)
        error_set(err, "out of memory: %zu bytes to pack a weight", 2 * room);
    for (int i = 0; ok && i < src->n_seg; i++)
        for (int e = 0; ok && e < src->n_expert; e++) {
            const struct raw_seg *s = &src->seg[i];
            ok = copy_rows(v, src, s, e, &m->seg[i], packed, read, err);
            if (m->seg[i].perm)
                vulkan_copy_in(
                    &v->be,
                    (void *)(uintptr_t)(m->seg[i].perm + 4 * (uint64_t)e * (uint64_t)src->n_in),
                    s->perm[e], 4 * (size_t)src->n_in);
        }
    if (m->bias)
        vulkan_copy_in(&v->be, (void *)(uintptr_t)m->bias, src->bias,
                       4 * (size_t)src->n_out * (size_t)src->n_expert);
    mem_free(packed);
    mem_free(read);
    if (ok && v->failed && err)
        *err = v->error;
    return ok && !v->failed;
}

bool vulkan_upload(struct backend *be, const struct raw_weight *src, enum weight_role role,
                   struct weight *w, struct error *err)
{
    struct vulkan *v = vulkan_self(be);
    for (int i = 0; i < src->n_seg; i++) {
        const struct raw_seg *s = &src->seg[i];
        if (!packings[s->type].known)
            return error_set(err, "weights of %s are not supported on vulkan", dtype_name(s->type));
        if (s->type == DT_GPTQ4 && s->group_len % 8)
            return error_set(err, "GPTQ groups of %d are not supported on vulkan", s->group_len);
    }
    struct vulkan_weight *m = mem_zalloc(1, sizeof *m);
    m->bytes = lay_out(src, m, 0);
    m->memory = vulkan_alloc(be, m->bytes, "weights", err);
    if (!m->memory) {
        mem_free(m);
        return false;
    }
    lay_out(src, m, vulkan_address(m->memory));
    if (!copy_all(v, src, m, err)) {
        vulkan_free(be, m->memory, m->bytes);
        mem_free(m);
        return false;
    }
    /* Pipelines are made here, not in the first step. */
    for (int i = 0; i < m->n_seg; i++) {
        uint32_t f = m->seg[i].format;
        vulkan_pipeline(v, KERNEL_GEMV, f, 1);
        vulkan_pipeline(v, KERNEL_GEMV, f, 9);
        bool experts = role == WEIGHT_EXPERTS || role == WEIGHT_EXPERTS_SHARED;
        if (role != WEIGHT_HEADS)
            vulkan_pipeline(v, KERNEL_GEMM, f, experts);
        if (role == WEIGHT_EMBED || role == WEIGHT_HEAD)
            vulkan_pipeline(v, KERNEL_EMBED, f, 0);
    }
    *w = (struct weight){.n_in = src->n_in,
                         .n_out = src->n_out,
                         .n_expert = src->n_expert,
                         .bias = src->bias != NULL,
                         .bytes = raw_weight_bytes(src),
                         .owns = true,
                         .impl = m};
    return true;
}

void vulkan_release(struct backend *be, struct weight *w)
{
    struct vulkan_weight *m = w->impl;
    if (m) {
        vulkan_free(be, m->memory, m->bytes);
        mem_free(m);
    }
    *w = (struct weight){0};
}
