/*
 * Weights: from the file's blocks in host memory to tiles on the device. Bytes go through a ring of
 * pinned buffers, which several threads fill while earlier pieces are being copied. The GPU
 * rearranges them, one thread per 32-bit word of output. There is never a second copy of a weight.
 */
#include "backend/cuda/core/host.h"
#include "backend/cuda/core/pack.cuh"
#include "backend/cuda/moe/offload.h"

extern "C" {
#include "base/mem.h"
#include "base/pool.h"
const uint16_t *quant_grid(enum dtype t);
const uint16_t *quant_grids(void);
}

#include <string.h>

/* Grid: x along the words of a tile, y over (tile, kt). */
static __global__ void repack_kernel(const struct repack p)
{
    int w = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (w * 4 >= p.tile_bytes)
        return;
    int tile = (int)blockIdx.y / p.n_kt, kt = (int)blockIdx.y % p.n_kt;
    uint32_t *out = (uint32_t *)(p.out + (size_t)blockIdx.y * (size_t)p.tile_bytes);
    out[w] = repack_word(p, tile, kt, w);
}

/* Host side */

enum { RING_PIECE = 16 << 20, RING_SLOTS = 4 };

static bool ring_open(struct cuda_backend *cu, struct error *err)
{
    if (cu->upload.piece)
        return true;
    for (int i = 0; i < RING_SLOTS; i++) {
        void *p = NULL;
        if (cudaHostAlloc(&p, RING_PIECE, cudaHostAllocDefault) != cudaSuccess)
            return error_set(err, "no pinned host memory for loading (%d MiB)", RING_PIECE >> 20);
        cu->upload.host[i] = (uint8_t *)p;
        CUDA_TRY(cu, cudaEventCreateWithFlags(&cu->upload.done[i], cudaEventDisableTiming));
    }
    void *p = NULL;
    if (cudaMalloc(&p, (size_t)RING_PIECE * RING_SLOTS) != cudaSuccess)
        return error_set(err, "out of GPU memory: no %d MiB for loading",
                         (RING_PIECE >> 20) * RING_SLOTS);
    cu->upload.dev = (uint8_t *)p;
    cu->upload.piece = RING_PIECE;
    int threads = pool_cpu_count();
    cu->upload.pool = pool_new(threads < 8 ? threads : 8);
    return true;
}

void cuda_ring_free(struct cuda_backend *cu)
{
    for (int i = 0; i < RING_SLOTS; i++) {
        if (cu->upload.done[i])
            cudaEventDestroy(cu->upload.done[i]);
        if (cu->upload.host[i])
            cudaFreeHost(cu->upload.host[i]);
    }
    if (cu->upload.dev)
        cudaFree(cu->upload.dev);
    if (cu->upload.pool)
        pool_free(cu->upload.pool);
    memset(&cu->upload, 0, sizeof cu->upload);
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

/* The planes of a piece, stored one after another in its slot. */
struct slot_fill {
    struct cuda_backend *cu;
    int slot;
    size_t used;
};

static const uint8_t *slot_add(struct slot_fill *f, const void *src, size_t bytes)
{
    struct cuda_backend *cu = f->cu;
    size_t at = align_up(f->used, 16);
    CHECK(at + bytes <= cu->upload.piece, "a piece of %zu bytes", at + bytes);
    struct copy_job job = {cu->upload.host[f->slot] + at, (const uint8_t *)src, bytes};
    if (bytes > 256 << 10)
        pool_run(cu->upload.pool, copy_part, &job);
    else
        memcpy(job.dst, job.src, bytes);
    f->used = at + bytes;
    return cu->upload.dev + (size_t)f->slot * cu->upload.piece + at;
}

void cuda_repack(struct cuda_backend *cu, const struct repack &p, int tiles)
{
    int limit = 65535 / p.n_kt; /* grid.y has 16 bits */
    for (int t = 0; t < tiles; t += limit) {
        int n = tiles - t < limit ? tiles - t : limit;
        struct repack part = p;
        part.rows = p.rows - t * TILE_ROWS;
        part.data += p.panel.panel_bytes * (size_t)t;
        part.out += (size_t)(t * p.n_kt) * (size_t)p.tile_bytes;
        cuda_launch(cu, repack_kernel,
                    dim3((unsigned)ceil_div(p.tile_bytes / 4, 256), (unsigned)(n * p.n_kt)), 256, 0,
                    LAUNCH_PLAIN, part);
    }
}

/* Copies rows [first, first + rows) of one expert's segment (or of several, where experts are
 * contiguous) and repacks them to `out`. */
static void send_piece(struct cuda_backend *cu, const struct raw_seg *s, int expert,
                       struct repack p, int first, int rows, const int32_t *inverse, uint8_t *out)
{
    int slot = cu->upload.next++ % RING_SLOTS;
    if (cu->failed)
        return;
    CUDA_TRY(cu, cudaEventSynchronize(cu->upload.done[slot]));
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
    CUDA_TRY(cu,
             cudaMemcpyAsync(cu->upload.dev + (size_t)slot * cu->upload.piece,
                             cu->upload.host[slot], f.used, cudaMemcpyHostToDevice, cu->stream));
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
    CUDA_TRY(cu, cudaEventRecord(cu->upload.done[slot], cu->stream));
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

static void send_segment(struct cuda_backend *cu, const struct raw_weight *w,
                         const struct raw_seg *s, const struct seg *to, int n_kt)
{
    struct repack p = {};
    p.kind = to->kind;
    p.dtype = to->dtype;
    p.n_in = w->n_in;
    p.n_kt = n_kt;
    p.tile_bytes = to->tile_bytes;
    p.block_len = dtype_table[s->type].block_len;
    p.block_bytes = dtype_table[s->type].block_bytes;
    p.row_bytes = (size_t)(w->n_in / p.block_len) * (size_t)p.block_bytes;
    const uint16_t *grid = quant_grid(s->type);
    p.aux = grid ? cu->grids + (grid - quant_grids()) : NULL;
    p.group_len = s->group_len;
    p.n_groups = s->type == DT_GPTQ4 ? ceil_div(w->n_in, s->group_len) : ceil_div(w->n_in, 128);
    int experts = w->n_expert, rows = s->rows;
    if (contiguous_experts(w, s, (size_t)rows * p.row_bytes)) {
        rows *= experts;
        experts = 1;
    }
    size_t per_row = p.row_bytes + (size_t)p.n_groups * 4, fixed = (size_t)w->n_in * 4 + 4096;
    int most = (int)((cu->upload.piece - fixed) / per_row) / 128 * 128; /* only whole tiles */
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

/* Types that always map to one kind. */
static const struct {
    enum dtype dtype;
    int kind, bytes;
} tile_kinds[] = {
#define KIND(dtype, kind)                                                                          \
    {                                                                                              \
        dtype, kind, format<kind>::BYTES                                                           \
    }
    KIND(DT_Q4_K, TILE_Q4_K),     KIND(DT_Q6_K, TILE_Q6_K),      KIND(DT_Q8_0, TILE_Q8_0),
    KIND(DT_Q4_0, TILE_Q4_0),     KIND(DT_Q4_1, TILE_Q4_1),      KIND(DT_Q5_0, TILE_Q5_1),
    KIND(DT_Q5_1, TILE_Q5_1),     KIND(DT_Q5_K, TILE_Q5_K),      KIND(DT_Q3_K, TILE_Q3_K),
    KIND(DT_Q2_K, TILE_Q2_K),     KIND(DT_TQ1_0, TILE_Q2_K),     KIND(DT_TQ2_0, TILE_Q2_K),
    KIND(DT_IQ4_NL, TILE_IQ4_NL), KIND(DT_IQ4_XS, TILE_IQ4_XS),  KIND(DT_MXFP4, TILE_MXFP4),
    KIND(DT_NVFP4, TILE_NVFP4),   KIND(DT_IQ3_S, TILE_IQ3_S),    KIND(DT_IQ3_XXS, TILE_IQ3_XXS),
    KIND(DT_IQ2_XXS, TILE_IQ2),   KIND(DT_IQ2_XS, TILE_IQ2),     KIND(DT_IQ2_S, TILE_IQ2),
    KIND(DT_IQ1_S, TILE_IQ1),     KIND(DT_IQ1_M, TILE_IQ1),      KIND(DT_F16, TILE_F16),
    KIND(DT_BF16, TILE_F16),      KIND(DT_F8_E4M3, TILE_F8),     KIND(DT_NF4, TILE_LEVELS),
    KIND(DT_FP4, TILE_LEVELS),    {DT_F32, TILE_F32, F32_BYTES},
#undef KIND
};

/* Chooses the tile kind of a segment and its size. A router is kept in floats, since choices depend
 * on its last bits. */
static void choose_kind(const struct raw_seg *s, bool router, struct seg *to)
{
    enum dtype type = router ? DT_F32 : s->type;
    to->dtype = s->type;
    if (type == DT_GPTQ4) {
        /* GPTQ4 needs one scale per group of 32 columns. With act-order, values are converted to
         * F16. */
        bool grouped = !s->perm && s->group_len % 32 == 0;
        to->kind = grouped ? TILE_GPTQ4 : TILE_F16;
        to->tile_bytes = grouped ? (int)format<TILE_GPTQ4>::BYTES : (int)F16_BYTES;
        return;
    }
    for (size_t i = 0; i < sizeof tile_kinds / sizeof *tile_kinds; i++)
        if (tile_kinds[i].dtype == type) {
            to->kind = tile_kinds[i].kind;
            to->tile_bytes = tile_kinds[i].bytes;
            return;
        }
    CHECK(false, "no tile for %s", dtype_table[type].name);
}

static bool any_perm(const struct raw_weight *w, const struct raw_seg *s)
{
    for (int e = 0; s->perm && e < w->n_expert; e++)
        if (s->perm[e])
            return true;
    return false;
}

/* The form of src's tiles, whose segments begin at offset[i] and whose bias begins at *bias_at. Returns its bytes. */
static size_t lay_out(const struct raw_weight *src, enum weight_role role, struct raw_weight *raw,
                      struct matrix *m, bool room, size_t *offset, size_t *bias_at)
{
    *raw = raw_weight_experts(src, 0, src->n_expert - src->n_host); /* the device's */
    m->n_in = src->n_in;
    m->n_out = src->n_out;
    m->n_expert = raw->n_expert;
    m->n_kt = ceil_div(src->n_in, TILE_K);
    m->n_seg = src->n_seg;
    m->set = SET_K;
    size_t total = 0, places = (size_t)raw->n_expert + room;
    int row0 = 0;
    for (int i = 0; i < src->n_seg; i++) {
        struct raw_seg *s = &raw->seg[i];
        struct seg *to = &m->seg[i];
        if (!any_perm(src, &src->seg[i]))
            s->perm = NULL;
        choose_kind(s, role == WEIGHT_ROUTER, to);
        to->row0 = row0;
        to->rows = s->rows;
        to->tile0 = m->n_tiles;
        to->n_tiles = ceil_div(s->rows, TILE_ROWS);
        to->expert_bytes = (size_t)to->n_tiles * (size_t)m->n_kt * (size_t)to->tile_bytes;
        offset[i] = total;
        total += align_up(to->expert_bytes * places, 256);
        row0 += s->rows;
        m->n_tiles += to->n_tiles;
        m->max_tile_bytes = to->tile_bytes > m->max_tile_bytes ? to->tile_bytes : m->max_tile_bytes;
        int set = to->kind <= TILE_Q6_K     ? SET_K
                  : to->kind <= TILE_GPTQ4  ? SET_CODES
                  : to->kind <= TILE_LEVELS ? SET_FAST
                                            : SET_ALL;
        m->set = set > m->set ? set : m->set;
    }
    *bias_at = total;
    if (src->bias)
        total += align_up((size_t)src->n_out * places * sizeof(float), 256);
    return total;
}

size_t cuda_weight_bytes(const struct raw_weight *src, enum weight_role role)
{
    struct raw_weight raw;
    struct matrix m = {};
    size_t offset[MAX_SEGS] = {0}, bias_at;
    return lay_out(src, role, &raw, &m, role == WEIGHT_EXPERTS_SHARED && !src->n_host, offset,
                   &bias_at);
}

bool cuda_upload(struct backend *be, const struct raw_weight *src, enum weight_role role,
                 struct weight *w, struct error *err)
{
    struct cuda_backend *cu = cuda_self(be);
    if (!ring_open(cu, err))
        return false;
    struct raw_weight raw;
    struct cuda_weight *cw = (struct cuda_weight *)mem_zalloc(1, sizeof *cw);
    struct matrix *m = &cw->m;
    size_t offset[MAX_SEGS] = {0}, bias_at;
    cw->room = role == WEIGHT_EXPERTS_SHARED && !src->n_host;
    size_t total = lay_out(src, role, &raw, m, cw->room, offset, &bias_at);
    size_t bias_bytes = (size_t)src->n_out * (size_t)raw.n_expert * sizeof(float);
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
        be->ops->copy_in(be, data + bias_at, src->bias, bias_bytes);
    }
    bool owns = true, ok = !src->n_host || offload_upload(cu, src, cw, &owns, err);
    *w = (struct weight){src->n_in, src->n_out, src->n_expert, src->bias != NULL, total, cw, owns};
    if (cu->failed || !ok) {
        if (err && ok)
            *err = cu->error;
        cuda_release(be, w);
        return false;
    }
    return true;
}

void cuda_release(struct backend *be, struct weight *w)
{
    struct cuda_backend *cu = cuda_self(be);
    struct cuda_weight *cw = (struct cuda_weight *)w->impl;
    if (cw) {
        offload_release(cu, cw);
        be->ops->free(be, cw->data, cw->bytes);
        mem_free(cw);
    }
    *w = (struct weight){};
}
