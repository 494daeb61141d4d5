/*
 * Weights: from the file's blocks in host memory to tiles on the device. Bytes go through a ring
 * of pinned buffers, filled by several threads while earlier pieces travel; the GPU does the
 * rearranging, a thread per 32-bit word of output. No second copy of a weight ever exists. Also
 * here, since they need single elements of a tile: embedding rows.
 */
#include "backend/cuda/format.cuh"
#include "backend/cuda/host.h"

extern "C" {
#include "base/mem.h"
#include "base/pool.h"
const uint16_t *quant_grid(enum dtype t);
const uint16_t *quant_grids(void);
}

#include <string.h>

/* One piece of a segment on its way: `rows` rows of the file's blocks, and where they go. */
struct repack {
    int kind, dtype, n_in, n_kt, rows, tile_bytes;
    size_t row_bytes;
    const uint8_t *data; /* (rows, row_bytes) */
    /* GPTQ: half (rows, n_groups); FP8: float (rows, n_groups); NVFP4: one float */
    const uint8_t *scale;
    const uint8_t *zero;    /* GPTQ: (rows, n_groups) */
    const int32_t *inverse; /* GPTQ act-order: stored column of input column k */
    int n_groups, group_len;
    int raw_bytes; /* of 256 columns of a row in the file */
    const void *aux;
    uint8_t *out; /* (tiles, n_kt, tile_bytes) */
};

/* The code of (row, column) in formats that repack codes; padding is 0. */
DEVICE uint32_t repack_code(const struct repack &p, int row, int col)
{
    if (row >= p.rows || col >= p.n_in)
        return p.kind == TILE_Q8_0 ? 128 : 0;
    const uint8_t *r = p.data + (size_t)row * p.row_bytes;
    int k = col & 255, j = k & 31, blk = k >> 5;
    switch (p.kind) {
    case TILE_Q4_K:
        return r[(size_t)(col >> 8) * 144 + 16 + blk / 2 * 32 + j] >> (blk & 1) * 4 & 15;
    case TILE_Q6_K: {
        const uint8_t *b = r + (size_t)(col >> 8) * 210;
        int half = k / 128, part = k % 128 / 32;
        uint32_t low = b[64 * half + part % 2 * 32 + j] >> (part / 2 * 4) & 15;
        uint32_t top = b[128 + 32 * half + j] >> (2 * part) & 3;
        return low | top << 4;
    }
    case TILE_Q8_0:
        return r[(size_t)(col >> 5) * 34 + 2 + (col & 31)] ^ 0x80u;
    default: /* GPTQ4 */
        return r[col >> 1] >> (col & 1) * 4 & 15;
    }
}

DEVICE float repack_value(const struct repack &p, int row, int col)
{
    if (row >= p.rows || col >= p.n_in)
        return 0.0f;
    const uint8_t *r = p.data + (size_t)row * p.row_bytes;
    if (p.dtype == DT_GPTQ4) {
        int at = p.inverse ? p.inverse[col] : col;
        size_t g = (size_t)row * (size_t)p.n_groups + (size_t)(at / p.group_len);
        int code = r[at >> 1] >> (at & 1) * 4 & 15;
        return (float)(code - p.zero[g]) * raw_half(p.scale + 2 * g);
    }
    if (p.dtype == DT_F8_E4M3) {
        float v = f8_to_float(r[col]);
        size_t g = (size_t)row * (size_t)p.n_groups + (size_t)(col / 128);
        return p.scale ? v * ((const float *)p.scale)[g] : v;
    }
    if (p.dtype == DT_F32)
        return raw_value(DT_F32, r + (size_t)col * 4, 0, p.aux);
    if (p.dtype == DT_F16 || p.dtype == DT_BF16)
        return raw_value(p.dtype, r + (size_t)col * 2, 0, p.aux);
    size_t chunk = p.row_bytes * TILE_K / (size_t)p.n_in; /* bytes of 256 columns */
    float v = raw_value(p.dtype, r + (size_t)(col >> 8) * chunk, col & 255, p.aux);
    return p.dtype == DT_NVFP4 && p.scale ? v * *(const float *)p.scale : v;
}

DEVICE uint32_t q4k_word(const struct repack &p, int row0, int kt, int w)
{
    if (w >= (Q4K_D >> 2)) {
        int g = (w - (Q4K_D >> 2)) >> 1, off = (w & 1) * 2;
        uint32_t v = 0;
        for (int h = 0; h < 2; h++)
            if (row0 + g + 8 * h < p.rows) {
                const uint8_t *b =
                    p.data + (size_t)(row0 + g + 8 * h) * p.row_bytes + (size_t)kt * 144;
                v |= (uint32_t)(b[off] | b[off + 1] << 8) << 16 * h;
            }
        return v;
    }
    bool mins = w >= (Q4K_MINS >> 2);
    int s = w - ((mins ? Q4K_MINS : Q4K_SCALES) >> 2), g = s >> 2, q = s & 3;
    uint32_t v = 0;
    for (int b = 0; b < 4; b++) {
        int row = row0 + g + 8 * (b >> 1), sc = 0, mn = 0;
        if (row < p.rows)
            k4_scale_min(p.data + (size_t)row * p.row_bytes + (size_t)kt * 144 + 4, 2 * q + (b & 1),
                         &sc, &mn);
        v |= (uint32_t)(mins ? mn : sc) << 8 * b;
    }
    return v;
}

DEVICE uint32_t q6k_word(const struct repack &p, int row0, int kt, int w)
{
    if (w >= (Q6K_D >> 2)) {
        int g = w - (Q6K_D >> 2);
        uint32_t v = 0;
        for (int h = 0; h < 2; h++)
            if (row0 + g + 8 * h < p.rows) {
                const uint8_t *b =
                    p.data + (size_t)(row0 + g + 8 * h) * p.row_bytes + (size_t)kt * 210 + 208;
                v |= (uint32_t)(b[0] | b[1] << 8) << 16 * h;
            }
        return v;
    }
    if (w >= (Q6K_SCALES >> 2)) {
        int s = w - (Q6K_SCALES >> 2), q = s >> 4, g = s >> 1 & 7, h = s & 1;
        int row = row0 + g + 8 * h;
        uint32_t v = 0;
        for (int j = 0; j < 4; j++) {
            int sc = 0;
            if (row < p.rows)
                sc = (int8_t)p.data[(size_t)row * p.row_bytes + (size_t)kt * 210 + 192 +
                                    (size_t)(4 * q + j)];
            v |= (uint32_t)(sc + 128) << 8 * j;
        }
        return v;
    }
    int s = w - (Q6K_HIGH >> 2), q = s >> 6, lane = s >> 1 & 31, pair = s & 1;
    int g = lane >> 2, c = lane & 3;
    uint32_t v = 0;
    for (int jj = 0; jj < 2; jj++)
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 2; e++) {
                int col = kt * 256 + 64 * q + 16 * (2 * pair + jj) + 4 * c + 2 * (i >> 1) + e;
                uint32_t code = repack_code(p, row0 + g + 8 * (i & 1), col);
                v |= (code >> 4) << (8 * jj + q6k_high_bit(i) + 16 * e);
            }
    return v;
}

/* Half scales and byte zeros of GPTQ4 and Q8_0, a group of 32 columns each. */
DEVICE uint32_t half_scale(const struct repack &p, int row, int col)
{
    if (row >= p.rows || col >= p.n_in)
        return 0;
    const uint8_t *b;
    if (p.kind == TILE_Q8_0)
        b = p.data + (size_t)row * p.row_bytes + (size_t)(col >> 5) * 34;
    else
        b = p.scale + 2 * ((size_t)row * (size_t)p.n_groups + (size_t)(col / p.group_len));
    return (uint32_t)(b[0] | b[1] << 8);
}

DEVICE uint32_t repack_word(const struct repack &p, int tile, int kt, int w)
{
    int row0 = tile * TILE_ROWS;
    bool nibbles = p.kind == TILE_Q4_K || p.kind == TILE_Q6_K || p.kind == TILE_GPTQ4;
    if (nibbles && w < 512) {
        int q = w >> 7, lane = w >> 2 & 31, j = w & 3, g = lane >> 2, c = lane & 3;
        uint32_t v = 0;
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 2; e++) {
                int col = kt * 256 + 64 * q + 16 * j + 4 * c + 2 * (i >> 1) + e;
                v |= (repack_code(p, row0 + g + 8 * (i & 1), col) & 15) << (4 * i + 16 * e);
            }
        return v;
    }
    switch (p.kind) {
    case TILE_Q4_K:
        return q4k_word(p, row0, kt, w);
    case TILE_Q6_K:
        return q6k_word(p, row0, kt, w);
    case TILE_GPTQ4:
        if (w >= (GPTQ_ZEROS >> 2)) {
            int s = w - (GPTQ_ZEROS >> 2), q = s >> 3, g = s & 7;
            uint32_t v = 0;
            for (int b = 0; b < 4; b++) {
                int row = row0 + g + 8 * (b >> 1), col = kt * 256 + 64 * q + 32 * (b & 1);
                if (row < p.rows && col < p.n_in)
                    v |= (uint32_t)
                             p.zero[(size_t)row * (size_t)p.n_groups + (size_t)(col / p.group_len)]
                         << 8 * b;
            }
            return v;
        } else {
            int s = w - (GPTQ_SCALES >> 2), q = s >> 4, g = s >> 1 & 7, h = s & 1;
            int col = kt * 256 + 64 * q;
            return half_scale(p, row0 + g + 8 * h, col) | half_scale(p, row0 + g + 8 * h, col + 32)
                                                              << 16;
        }
    case TILE_Q8_0:
        if (w >= (Q80_SCALES >> 2)) {
            int s = w - (Q80_SCALES >> 2), q = s >> 4, g = s >> 1 & 7, h = s & 1;
            int col = kt * 256 + 64 * q;
            return half_scale(p, row0 + g + 8 * h, col) | half_scale(p, row0 + g + 8 * h, col + 32)
                                                              << 16;
        } else {
            int pair = w >> 7, lane = w >> 2 & 31, i = w >> 1 & 1, h = w & 1;
            int col = kt * 256 + 32 * pair + 16 * i + 4 * (lane & 3);
            uint32_t v = 0;
            for (int e = 0; e < 4; e++)
                v |= repack_code(p, row0 + (lane >> 2) + 8 * h, col + e) << 8 * e;
            return v;
        }
    case TILE_F16: {
        int grp = w >> 7, lane = w >> 2 & 31, h = w >> 1 & 1, pair = w & 1;
        int row = row0 + (lane >> 2) + 8 * h, col = kt * 256 + 16 * grp + 4 * (lane & 3) + 2 * pair;
        float x = repack_value(p, row, col), y = repack_value(p, row, col + 1);
        return pack_half2(fminf(fmaxf(x, -65504.0f), 65504.0f),
                          fminf(fmaxf(y, -65504.0f), 65504.0f));
    }
    case TILE_F32:
        return bits_of(repack_value(p, row0 + (w >> 8), kt * 256 + (w & 255)));
    }
    if (p.dtype == DT_F8_E4M3 && w >= (F8_SCALES >> 2)) {
        int s = w - (F8_SCALES >> 2), row = row0 + (s >> 1), col = kt * 256 + 128 * (s & 1);
        if (row >= p.rows || col >= p.n_in)
            return 0;
        size_t g = (size_t)row * (size_t)p.n_groups + (size_t)(col / 128);
        return bits_of(p.scale ? ((const float *)p.scale)[g] : 1.0f);
    }
    /* The file's own bytes, 256 columns of each row; past the row's end zeros, which every format
     * reads as zero. */
    int chunk = p.dtype == DT_F8_E4M3 ? TILE_K : p.tile_bytes / TILE_ROWS;
    if (p.dtype == DT_NVFP4 && 4 * w % chunk == NVFP4_SCALE)
        return bits_of(p.scale ? *(const float *)p.scale : 1.0f);
    uint32_t v = 0;
    for (int b = 0; b < 4; b++) {
        int at = 4 * w + b, row = row0 + at / chunk, in = at % chunk;
        size_t off = (size_t)kt * (size_t)p.raw_bytes + (size_t)in;
        if (row < p.rows && in < p.raw_bytes && off < p.row_bytes)
            v |= (uint32_t)p.data[(size_t)row * p.row_bytes + off] << 8 * b;
    }
    return v;
}

/* Blocks: x along the words of a tile, y over (tile, kt). */
static __global__ void repack_kernel(const struct repack p)
{
    int w = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (w * 4 >= p.tile_bytes)
        return;
    int tile = (int)blockIdx.y / p.n_kt, kt = (int)blockIdx.y % p.n_kt;
    uint32_t *out = (uint32_t *)(p.out + (size_t)blockIdx.y * (size_t)p.tile_bytes);
    out[w] = repack_word(p, tile, kt, w);
}

/* x[t,:] = row tokens[t] of the table; blocks: x over 256 columns, y over rows. */
static __global__ void embed_kernel(const struct matrix w, const int32_t *tokens, float *x)
{
    dependency_wait();
    dependency_trigger();
    int t = (int)blockIdx.y, kt = (int)blockIdx.x, k = (int)threadIdx.x, row = tokens[t];
    int i = 0;
    while (i + 1 < w.n_seg && row >= w.seg[i + 1].row0)
        i++;
    const struct seg *s = &w.seg[i];
    int r = row - s->row0, tile = s->tile0 + r / TILE_ROWS;
    const uint8_t *p = tile_address(w, s, 0, tile, kt);
    if (kt * TILE_K + k < w.n_in)
        x[(size_t)t * (size_t)w.n_in + (size_t)(kt * TILE_K + k)] =
            tile_value(s, p, r % TILE_ROWS, k);
}

void cuda_embed(struct cuda_backend *cu, const struct matrix *w, const struct step *s, float *x)
{
    cuda_launch(cu, embed_kernel, dim3((unsigned)w->n_kt, (unsigned)s->n_tokens), TILE_K, 0,
                LAUNCH_EARLY, *w, s->tokens, x);
}

/* Host side */

enum { RING_PIECE = 16 << 20, RING_SLOTS = 4 };

static bool ring_open(struct cuda_backend *cu, struct error *err)
{
    if (cu->ring.piece)
        return true;
    for (int i = 0; i < RING_SLOTS; i++) {
        void *p = NULL;
        if (cudaHostAlloc(&p, RING_PIECE, cudaHostAllocDefault) != cudaSuccess)
            return error_set(err, "no pinned host memory for loading (%d MiB)", RING_PIECE >> 20);
        cu->ring.host[i] = (uint8_t *)p;
        CUDA_TRY(cu, cudaEventCreateWithFlags(&cu->ring.done[i], cudaEventDisableTiming));
    }
    void *p = NULL;
    if (cudaMalloc(&p, (size_t)RING_PIECE * RING_SLOTS) != cudaSuccess)
        return error_set(err, "out of GPU memory: no %d MiB for loading",
                         (RING_PIECE >> 20) * RING_SLOTS);
    cu->ring.dev = (uint8_t *)p;
    cu->ring.piece = RING_PIECE;
    int threads = pool_cpu_count();
    cu->ring.pool = pool_new(threads < 8 ? threads : 8);
    return true;
}

void cuda_ring_free(struct cuda_backend *cu)
{
    for (int i = 0; i < RING_SLOTS; i++) {
        if (cu->ring.done[i])
            cudaEventDestroy(cu->ring.done[i]);
        if (cu->ring.host[i])
            cudaFreeHost(cu->ring.host[i]);
    }
    if (cu->ring.dev)
        cudaFree(cu->ring.dev);
    if (cu->ring.pool)
        pool_free(cu->ring.pool);
    memset(&cu->ring, 0, sizeof cu->ring);
}

struct copy_job {
    uint8_t *dst;
    const uint8_t *src;
    size_t bytes;
};

static void copy_part(void *arg, int ith, int nth)
{
    const struct copy_job *j = (const struct copy_job *)arg;
    size_t part = align_up(j->bytes / (size_t)nth + 1, 4096), at = part * (size_t)ith;
    if (at < j->bytes)
        memcpy(j->dst + at, j->src + at, j->bytes - at < part ? j->bytes - at : part);
}

/* The planes that travel with a piece, one after another in its slot. */
struct slot_fill {
    struct cuda_backend *cu;
    int slot;
    size_t used;
};

static const uint8_t *slot_add(struct slot_fill *f, const void *src, size_t bytes)
{
    struct cuda_backend *cu = f->cu;
    size_t at = align_up(f->used, 16);
    CHECK(at + bytes <= cu->ring.piece, "a piece of %zu bytes", at + bytes);
    struct copy_job job = {cu->ring.host[f->slot] + at, (const uint8_t *)src, bytes};
    if (bytes > 256 << 10)
        pool_run(cu->ring.pool, copy_part, &job);
    else
        memcpy(job.dst, job.src, bytes);
    f->used = at + bytes;
    return cu->ring.dev + (size_t)f->slot * cu->ring.piece + at;
}

/* Sends rows [first, first + rows) of one expert's segment (or, where experts are contiguous, of
 * several) and repacks them to `out`. */
static void send_piece(struct cuda_backend *cu, const struct raw_seg *s, int expert,
                       struct repack p, int first, int rows, const int32_t *inverse, uint8_t *out)
{
    int slot = cu->ring.next++ % RING_SLOTS;
    CUDA_TRY(cu, cudaEventSynchronize(cu->ring.done[slot]));
    struct slot_fill f = {cu, slot, 0};
    p.rows = rows;
    p.out = out;
    p.data =
        slot_add(&f, s->data[expert] + (size_t)first * p.row_bytes, (size_t)rows * p.row_bytes);
    if (s->type == DT_GPTQ4) {
        size_t at = (size_t)first * (size_t)p.n_groups, n = (size_t)rows * (size_t)p.n_groups;
        p.scale = slot_add(&f, (const uint8_t *)s->scale[expert] + 2 * at, 2 * n);
        p.zero = slot_add(&f, s->zero[expert] + at, n);
        if (inverse)
            p.inverse = (const int32_t *)slot_add(&f, inverse, (size_t)p.n_in * sizeof(int32_t));
    } else if (s->type == DT_F8_E4M3 && s->scale) {
        p.scale = slot_add(&f, (const float *)s->scale[expert] + (size_t)first * (size_t)p.n_groups,
                           sizeof(float) * (size_t)rows * (size_t)p.n_groups);
    } else if (s->type == DT_NVFP4 && s->scale) {
        p.scale = slot_add(&f, s->scale[expert], sizeof(float));
    }
    CUDA_TRY(cu, cudaMemcpyAsync(cu->ring.dev + (size_t)slot * cu->ring.piece, cu->ring.host[slot],
                                 f.used, cudaMemcpyHostToDevice, cu->stream));
    int tiles = ceil_div(rows, TILE_ROWS);
    for (int t = 0; t < tiles * p.n_kt; t += 65535 / p.n_kt * p.n_kt) { /* grid.y has 16 bits */
        int n = tiles * p.n_kt - t, limit = 65535 / p.n_kt * p.n_kt;
        struct repack part = p;
        int skip = t / p.n_kt * TILE_ROWS;
        part.rows = rows - skip;
        part.data += (size_t)skip * p.row_bytes;
        if (s->type == DT_GPTQ4) {
            part.scale += 2 * (size_t)skip * (size_t)p.n_groups;
            part.zero += (size_t)skip * (size_t)p.n_groups;
        } else if (s->type == DT_F8_E4M3 && p.scale) {
            part.scale += sizeof(float) * (size_t)skip * (size_t)p.n_groups;
        }
        part.out += (size_t)t * (size_t)p.tile_bytes;
        cuda_launch(
            cu, repack_kernel,
            dim3((unsigned)ceil_div(p.tile_bytes / 4, 256), (unsigned)(n < limit ? n : limit)), 256,
            0, LAUNCH_PLAIN, part);
    }
    CUDA_TRY(cu, cudaEventRecord(cu->ring.done[slot], cu->stream));
}

static bool contiguous_experts(const struct raw_weight *w, const struct raw_seg *s, size_t bytes)
{
    if (s->rows % TILE_ROWS || s->type == DT_GPTQ4 || s->scale)
        return false;
    for (int e = 1; e < w->n_expert; e++)
        if (s->data[e] != s->data[e - 1] + bytes)
            return false;
    return true;
}

/* Bytes of 256 columns in the file. */
static int raw_bytes(enum dtype t)
{
    return TILE_K / dtype_table[t].block_len * dtype_table[t].block_bytes;
}

static void send_segment(struct cuda_backend *cu, const struct raw_weight *w,
                         const struct raw_seg *s, const struct seg *to, int n_kt)
{
    struct repack p = {};
    p.kind = to->kind;
    p.dtype = to->dtype;
    p.n_in = w->n_in;
    p.n_kt = n_kt;
    p.tile_bytes = to->tile_bytes;
    p.row_bytes = (size_t)(w->n_in / dtype_table[s->type].block_len) *
                  (size_t)dtype_table[s->type].block_bytes;
    p.aux = to->aux;
    p.raw_bytes = raw_bytes(s->type);
    p.group_len = s->group_len;
    p.n_groups = s->type == DT_GPTQ4 ? ceil_div(w->n_in, s->group_len) : ceil_div(w->n_in, 128);
    int experts = w->n_expert, rows = s->rows;
    if (contiguous_experts(w, s, (size_t)rows * p.row_bytes)) {
        rows *= experts;
        experts = 1;
    }
    size_t per_row = p.row_bytes + (size_t)p.n_groups * 4, fixed = (size_t)w->n_in * 4 + 4096;
    int most = (int)((cu->ring.piece - fixed) / per_row) / 128 * 128; /* whole tiles */
    int32_t *inverse = (int32_t *)mem_zalloc((size_t)w->n_in, sizeof *inverse);
    for (int e = 0; e < experts; e++) {
        const int32_t *perm = s->type == DT_GPTQ4 && s->perm ? s->perm[e] : NULL;
        for (int j = 0; perm && j < w->n_in; j++)
            inverse[perm[j]] = j;
        for (int first = 0; first < rows; first += most) {
            int n = rows - first < most ? rows - first : most;
            send_piece(cu, s, e, p, first, n, perm ? inverse : NULL,
                       (uint8_t *)to->base + (size_t)e * to->expert_bytes +
                           (size_t)(first / TILE_ROWS) * (size_t)n_kt * (size_t)to->tile_bytes);
        }
    }
    mem_free(inverse);
}

/* The tile kind a segment gets and its size. A router is kept in floats, since choices hang on its
 * last bits. */
static void choose_kind(const struct raw_seg *s, bool router, struct seg *to)
{
    to->dtype = s->type;
    to->kind = TILE_RAW;
    int row = s->type == DT_NVFP4 ? NVFP4_ROW : raw_bytes(s->type);
    to->tile_bytes = TILE_ROWS * (row > RAW_ROW_LEAST ? row : RAW_ROW_LEAST);
    if (router || s->type == DT_F32) {
        to->kind = TILE_F32;
        to->tile_bytes = F32_BYTES;
        return;
    }
    switch (s->type) {
    case DT_Q4_K:
        to->kind = TILE_Q4_K;
        to->tile_bytes = Q4K_BYTES;
        break;
    case DT_Q6_K:
        to->kind = TILE_Q6_K;
        to->tile_bytes = Q6K_BYTES;
        break;
    case DT_Q8_0:
        to->kind = TILE_Q8_0;
        to->tile_bytes = Q80_BYTES;
        break;
    case DT_GPTQ4:
        /* A group of 32 columns must have one scale; act-order is undone by spelling values out. */
        if (!s->perm && s->group_len % 32 == 0) {
            to->kind = TILE_GPTQ4;
            to->tile_bytes = GPTQ_BYTES;
            break;
        }
        to->kind = TILE_F16;
        to->tile_bytes = F16_BYTES;
        break;
    case DT_F16:
    case DT_BF16:
        to->kind = TILE_F16;
        to->tile_bytes = F16_BYTES;
        break;
    case DT_F8_E4M3:
        to->tile_bytes = F8_BYTES;
        break;
    default:
        break;
    }
}

static bool any_perm(const struct raw_weight *w, const struct raw_seg *s)
{
    for (int e = 0; s->perm && e < w->n_expert; e++)
        if (s->perm[e])
            return true;
    return false;
}

bool cuda_upload(struct backend *be, const struct raw_weight *src, enum weight_role role,
                 struct weight *w, struct error *err)
{
    struct cuda_backend *cu = cuda_self(be);
    if (!ring_open(cu, err))
        return false;
    struct raw_weight raw = *src;
    CHECK(!src->bias || src->n_expert == 1, "a bias of experts");
    struct cuda_weight *cw = (struct cuda_weight *)mem_zalloc(1, sizeof *cw);
    struct matrix *m = &cw->m;
    m->n_in = src->n_in;
    m->n_out = src->n_out;
    m->n_expert = src->n_expert;
    m->n_kt = ceil_div(src->n_in, TILE_K);
    m->n_seg = src->n_seg;
    m->set = SET_K;
    size_t total = 0, offset[MAX_SEGS] = {0};
    int row0 = 0;
    for (int i = 0; i < src->n_seg; i++) {
        struct raw_seg *s = &raw.seg[i];
        struct seg *to = &m->seg[i];
        if (!any_perm(src, s))
            s->perm = NULL;
        choose_kind(s, role == WEIGHT_ROUTER, to);
        to->row0 = row0;
        to->rows = s->rows;
        to->tile0 = m->n_tiles;
        to->n_tiles = ceil_div(s->rows, TILE_ROWS);
        to->expert_bytes = (size_t)to->n_tiles * (size_t)m->n_kt * (size_t)to->tile_bytes;
        const uint16_t *grid = quant_grid(s->type);
        to->aux = grid ? cu->grids + (grid - quant_grids()) : NULL;
        offset[i] = total;
        total += align_up(to->expert_bytes * (size_t)src->n_expert, 256);
        row0 += s->rows;
        m->n_tiles += to->n_tiles;
        m->max_tile_bytes = to->tile_bytes > m->max_tile_bytes ? to->tile_bytes : m->max_tile_bytes;
        int set = to->kind <= TILE_Q6_K ? SET_K : to->kind <= TILE_F16 ? SET_FAST : SET_ALL;
        m->set = set > m->set ? set : m->set;
    }
    size_t bias_at = total;
    if (src->bias)
        total += align_up((size_t)src->n_out * sizeof(float), 256);
    uint8_t *data = (uint8_t *)be->ops->alloc(be, total, "a weight", err);
    if (!data) {
        mem_free(cw);
        return false;
    }
    cw->data = data;
    cw->bytes = total;
    for (int i = 0; i < m->n_seg; i++) {
        m->seg[i].base = data + offset[i];
        send_segment(cu, &raw, &raw.seg[i], &m->seg[i], m->n_kt);
    }
    if (src->bias) {
        m->bias = (const float *)(data + bias_at);
        be->ops->copy_in(be, data + bias_at, src->bias, (size_t)src->n_out * sizeof(float));
    }
    *w = (struct weight){src->n_in, src->n_out, src->n_expert, src->bias != NULL, total, cw, true};
    if (cu->failed) {
        if (err)
            *err = cu->error;
        cuda_release(be, w);
        return false;
    }
    return true;
}

void cuda_release(struct backend *be, struct weight *w)
{
    struct cuda_weight *cw = (struct cuda_weight *)w->impl;
    if (cw) {
        be->ops->free(be, cw->data, cw->bytes);
        mem_free(cw);
    }
    *w = (struct weight){};
}
