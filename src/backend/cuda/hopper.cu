/*
 * Products of many rows on Hopper (sm_90a): wgmma with the weights as the operand in registers. out^T
 * = W x^T: a warpgroup takes two times 64 output rows (each warp a 16-row tile of either; PAIR: gate
 * and up of the same hidden units) and up to 128 rows of the step. Codes stream through a ring of
 * each warp's own and become fragments of halves one step ahead of the products that eat them;
 * activations go by 64 columns through a ring of the block. Two blocks share a multiprocessor, so one
 * starts or ends while the other multiplies. The work list, the rows and the results are large.cu's.
 */
#include "backend/cuda/codes.cuh"

enum { WIDE_N = WIDE_ROWS, WIDE_THREADS = 128, WIDE_ALIGN = 1024 };

/* Chunks of activations asked for ahead of the one in use: what the ring of codes leaves room for. */
static __host__ __device__ constexpr int wide_ahead(int tile_bytes)
{
    return tile_bytes <= GPTQ_BYTES ? 2 : 1;
}

struct wide_block {
    const uint8_t *from[2]; /* this warp's two rows of tiles */
    uint8_t *ring;          /* (2, 2, tile) of this warp */
    uint8_t *slots;         /* (ahead + 2, N, 128 bytes) */
    const uint16_t *x;      /* (., ldx) */
    const int *rows_in;     /* (N) */
    int ldx, n_kt;
};

/* One warp starts copying both tiles of k tile kt. */
template <int BYTES> DEVICE void wide_codes(const struct wide_block &k, int kt)
{
    int at = lane_id() * 16;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const uint8_t *from = k.from[t] + (size_t)kt * BYTES + at;
        uint8_t *to = k.ring + ((kt & 1) * 2 + t) * BYTES + at;
#pragma unroll
        for (int i = 0; i < BYTES; i += 512)
            if (i + 512 <= BYTES || at < BYTES - i)
                copy_async16(to + i, from + i);
    }
}

/* acc += the block's weights x N rows. A chunk is 64 columns, a k tile four of them. Slots: in use,
 * asked for, and one whose products may still be under way. */
template <int KIND, int N>
DEVICE void wide_loop(const struct wide_block &k, float (&acc)[2][WIDE_N / 2])
{
    const int BYTES = codes<KIND>::BYTES, AHEAD = wide_ahead(BYTES), SLOTS = AHEAD + 2;
    const int PER = N / 16, SLOT = N * 128; /* rows a thread copies a piece of */
    int tid = (int)threadIdx.x, lane = lane_id(), piece = tid & 7, row0 = tid >> 3;
    const uint16_t *src[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int in = k.rows_in[row0 + i * 16];
        in = in < 0 ? k.rows_in[0] : in; /* columns nobody reads */
        src[i] = k.x + (size_t)in * (size_t)k.ldx + piece * 8;
    }
    uint8_t *dst = k.slots + row0 * 128 + ((piece ^ (row0 & 7)) << 4);
    auto fetch = [&](int c, int slot) { /* c chunks from here */
#pragma unroll
                                        for (int i = 0; i < PER; i++)
                                            copy_async16(dst + slot * SLOT + i * (16 * 128),
                                                         src[i] + c * 64);
    };
    wide_codes<BYTES>(k, 0);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        fetch(i, i);
        copy_async_commit();
    }
    copy_async_wait<AHEAD - 1>();
    __syncthreads();
    codes<KIND> w[2];
    w[0].fetch(k.ring, 0, lane);
    w[1].fetch(k.ring + BYTES, 0, lane);
    uint32_t a[4][2][4];
    int slot = 0, next = AHEAD, chunks = k.n_kt * 4;
#pragma unroll 1
    for (int c = 0; c < chunks; c++) {
        copy_async_wait<AHEAD - 1>();
        wgmma_publish();
        __syncthreads(); /* chunk c is there for all; products of chunk c - 2 are through */
        if ((c & 3) == 0 && c + 4 < chunks)
            wide_codes<BYTES>(k, (c >> 2) + 1);
        if (c + AHEAD < chunks)
            fetch(AHEAD, next);
        copy_async_commit();
        w[0].ready();
        w[1].ready();
        uint64_t desc = wgmma_rows(k.slots + slot * SLOT);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            wgmma_wait<2>(); /* a[j] of the chunk before has been read */
#pragma unroll
            for (int t = 0; t < 2; t++)
                w[t].frag(j, a[j][t]);
            wgmma_fence();
            wgmma<N>(acc[0], a[j][0], desc + 2 * (uint64_t)j);
            wgmma<N>(acc[1], a[j][1], desc + 2 * (uint64_t)j);
            wgmma_commit();
        }
        const uint8_t *tile = k.ring + ((c + 1) >> 2 & 1) * 2 * BYTES; /* of the next chunk */
        w[0].fetch(tile, (c + 1) & 3, lane);
        w[1].fetch(tile + BYTES, (c + 1) & 3, lane);
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        next = next + 1 == SLOTS ? 0 : next + 1;
#pragma unroll
        for (int i = 0; i < PER; i++)
            src[i] += 64;
    }
    wgmma_wait<0>();
    copy_async_wait<0>();
}

/* FEW: compiling takes its time, so not every kernel has every width. */
template <int KIND, bool FEW>
DEVICE void wide_width(const struct wide_block &k, int count, float (&acc)[2][WIDE_N / 2])
{
    if (count > 112 || (FEW && count > 64))
        wide_loop<KIND, 128>(k, acc);
    else if (FEW)
        wide_loop<KIND, 64>(k, acc);
    else if (count > 96)
        wide_loop<KIND, FEW ? 64 : 112>(k, acc);
    else if (count > 80)
        wide_loop<KIND, FEW ? 64 : 96>(k, acc);
    else if (count > 64)
        wide_loop<KIND, FEW ? 64 : 80>(k, acc);
    else if (count > 32)
        wide_loop<KIND, 64>(k, acc);
    else
        wide_loop<KIND, FEW ? 64 : 32>(k, acc);
}

/* The two tiles of a warp. What lies past the end is taken along and not kept. */
struct wide_tiles {
    int first, tile[2];
    bool mine[2];
    const struct seg *s[2];
};

DEVICE struct wide_tiles wide_tiles_of(const struct gemm_args &p, int block, int warp)
{
    struct wide_tiles t;
    bool pair = p.y_half;
    int half = p.w.n_tiles / 2, end = pair ? half : p.w.n_tiles;
    t.first = block * (pair ? 4 : 8) + warp;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int tile = pair ? t.first : t.first + 4 * i;
        t.mine[i] = tile < end;
        t.tile[i] = (t.mine[i] ? tile : end - 1) + (pair ? i * half : 0);
        t.s[i] = seg_of(p.w, t.tile[i]);
    }
    return t;
}

/*
 * Results leave through shared memory: the sums of a column of the block, 128 of them, lie next to
 * each other there, and a warp takes a column at a time. Little code matters here, since every block
 * runs it but once: what a lane does is the same for all columns. It has rows 4 lane.. of the block
 * (pair: gate and up of the hidden units 2 lane, 2 lane + 1).
 */
enum { WIDE_STRIDE = 128 + 4 };

struct wide_lane {
    int at, left; /* place of its first row in a row of the results (-1: none); rows that exist */
    float bias[4];
};

DEVICE struct wide_lane wide_lane_of(const struct gemm_args &p, int block)
{
    struct wide_lane l = {};
    int lane = lane_id();
    if (p.y_half) {
        int row = block * 64 + 2 * lane;
        l.at = row < p.ldy ? half_slot(row) : -1;
        l.left = p.w.seg[0].rows - row; /* zeros from there up to whole k tiles */
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (p.w.bias && (i & 1) < l.left)
                l.bias[i] = p.w.bias[(i >> 1) * (p.w.n_out / 2) + row + (i & 1)];
        return l;
    }
    int tile = block * 8 + (lane >> 2);
    const struct seg *s = seg_of(p.w, tile);
    int row = (tile - s->tile0) * TILE_ROWS + (lane & 3) * 4;
    l.at = s->row0 + row;
    l.left = tile < p.w.n_tiles ? s->rows - row : 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (p.w.bias && i < l.left)
            l.bias[i] = p.w.bias[l.at + i];
    return l;
}

/* A lane's part of a column of 128 sums. */
DEVICE float4 wide_take(const struct gemm_args &p, const float *column)
{
    if (!p.y_half)
        return *(const float4 *)(column + 4 * lane_id());
    float2 gate = *(const float2 *)(column + 2 * lane_id());
    float2 up = *(const float2 *)(column + 64 + 2 * lane_id());
    return make_float4(gate.x, gate.y, up.x, up.y);
}

DEVICE void wide_store(const struct gemm_args &p, const struct wide_lane &l,
                       const struct gemm_rows &rows, int col, float4 sums)
{
    float scale = rows.scale[col];
    size_t at = (size_t)rows.out[col] * (size_t)p.ldy + (size_t)l.at;
    float v[4] = {sums.x * scale + l.bias[0], sums.y * scale + l.bias[1],
                  sums.z * scale + l.bias[2], sums.w * scale + l.bias[3]};
    if (p.y_half) {
        if (l.at < 0)
            return;
#pragma unroll
        for (int i = 0; i < 2; i++)
            v[i] = i < l.left ? clamp_half(silu(v[i]) * v[i + 2] * HIDDEN_SCALE) : 0.0f;
        *(uint32_t *)(p.y_half + at) = pack_half2(v[0], v[1]);
    } else if (p.narrow) { /* rows are multiples of four */
        if (l.left > 0) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = clamp_half(v[i] * HIDDEN_SCALE);
            *(uint2 *)((uint16_t *)p.y + at) =
                make_uint2(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]));
        }
    } else if (l.left >= 4 && !((p.ldy | l.at) & 3))
        *(float4 *)(p.y + at) = make_float4(v[0], v[1], v[2], v[3]);
    else
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (i < l.left)
                p.y[at + (size_t)i] = v[i];
}

/* Where a column's sums lie when k is cut: (pieces of k, row tiles, blocks, columns, 128). */
DEVICE float *wide_part(const struct gemm_args &p, int piece, int col)
{
    size_t block = ((size_t)piece * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    return p.part + (block * WIDE_N + (size_t)col) * 128;
}

DEVICE void wide_tables(struct gemm_rows &rows, uint8_t *at)
{
    rows.in = (int *)at;
    rows.out = rows.in + WIDE_N;
    rows.scale = (float *)(rows.out + WIDE_N);
}

/* Grid: (blocks of WIDE_THREADS output rows, tiles of the step's rows, pieces of k). */
template <int SET>
static __global__ void __launch_bounds__(WIDE_THREADS, 2)
    wide_kernel(const __grid_constant__ struct gemm_args p)
{
    SHARED_BYTES(raw);
#ifdef STEEL_CUDA_SIM
    uint8_t *shared = raw;
#else
    uint8_t *shared = raw + (-(int)__cvta_generic_to_shared(raw) & (WIDE_ALIGN - 1));
#endif
    struct gemm_rows rows;
    dependency_wait();
    dependency_trigger();
    /* behind the slots and the rings, which depend on the kind of weights */
    wide_tables(rows, shared + p.slot);
    if (!gemm_rows_load(p, rows, (int)blockIdx.y, WIDE_N))
        return;
    int w = warp_id(), kt0 = (int)blockIdx.z * p.kt_per;
    struct wide_tiles t = wide_tiles_of(p, (int)blockIdx.x, w);
    struct wide_block k;
#pragma unroll
    for (int i = 0; i < 2; i++)
        k.from[i] = tile_address(p.w, t.s[i], rows.expert, t.tile[i], kt0);
    int kind = t.s[0]->kind;
    k.slots = shared;
    k.ring = shared + p.slot - (4 - w) * 4 * t.s[0]->tile_bytes;
    k.x = p.x + kt0 * TILE_K;
    k.rows_in = rows.in;
    k.ldx = p.ldx;
    k.n_kt = min(p.kt_per, p.w.n_kt - kt0);
    float acc[2][WIDE_N / 2] = {};
    wgmma_use(acc[0]);
    wgmma_use(acc[1]);
    const bool FEW = SET != SET_K;
    if (kind == TILE_Q4_K)
        wide_width<TILE_Q4_K, FEW>(k, rows.count, acc);
    else if (SET == SET_K || kind == TILE_Q6_K)
        wide_width<TILE_Q6_K, FEW>(k, rows.count, acc);
    else if constexpr (SET != SET_K) {
        if (kind == TILE_Q8_0)
            wide_width<TILE_Q8_0, FEW>(k, rows.count, acc);
        else if (kind == TILE_GPTQ4)
            wide_width<TILE_GPTQ4, FEW>(k, rows.count, acc);
        else
            wide_width<TILE_F16, FEW>(k, rows.count, acc);
    }
    wgmma_use(acc[0]);
    wgmma_use(acc[1]);
    __syncthreads();               /* nobody reads slots or rings any more */
    float *sums = (float *)shared; /* (columns, WIDE_STRIDE) */
    {
        int lane = lane_id();
        float *to = sums + 2 * (lane & 3) * WIDE_STRIDE + w * 16 + (lane >> 2);
#pragma unroll
        for (int n = 0; n < WIDE_N / 8; n++) {
            if (n * 8 >= rows.count)
                break;
#pragma unroll
            for (int i = 0; i < 8; i++)
                to[(n * 8 + (i & 1)) * WIDE_STRIDE + (i >> 2) * 64 + (i >> 1 & 1) * 8] =
                    acc[i >> 2][4 * n + (i & 3)];
        }
    }
    __syncthreads();
    struct wide_lane l = wide_lane_of(p, (int)blockIdx.x);
#pragma unroll 2
    for (int col = w; col < rows.count; col += 4) {
        const float *column = sums + col * WIDE_STRIDE;
        if (p.part)
            ((float4 *)wide_part(p, (int)blockIdx.z, col))[lane_id()] =
                ((const float4 *)column)[lane_id()];
        else
            wide_store(p, l, rows, col, wide_take(p, column));
    }
}

/* Adds up what the pieces of k came to, in their order. Grid: (as above, as above, columns / 8). */
static __global__ void __launch_bounds__(WIDE_THREADS)
    wide_sum_kernel(const __grid_constant__ struct gemm_args p)
{
    SHARED_BYTES(shared);
    struct gemm_rows rows;
    dependency_wait();
    dependency_trigger();
    wide_tables(rows, shared);
    if (!gemm_rows_load(p, rows, (int)blockIdx.y, WIDE_N))
        return;
    struct wide_lane l = wide_lane_of(p, (int)blockIdx.x);
    int first = (int)blockIdx.z * 8 + warp_id();
#pragma unroll
    for (int col = first; col < first + 8; col += 4) {
        if (col >= rows.count)
            break;
        float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int i = 0; i * p.kt_per < p.w.n_kt; i++) {
            float4 f = wide_take(p, wide_part(p, i, col));
            sums.x += f.x, sums.y += f.y, sums.z += f.z, sums.w += f.w;
        }
        wide_store(p, l, rows, col, sums);
    }
}

/* Blocks that run at a time. Fewer cut k between them. */
static int wide_blocks(const struct cuda_backend *cu)
{
    return 2 * cu->n_sm;
}

size_t wide_part_bytes(const struct cuda_backend *cu)
{
    return cu->wgmma ? (size_t)wide_blocks(cu) * 128 * WIDE_N * sizeof(float) : 0;
}

/* Bytes in front of the tables of rows, and all. */
static size_t wide_shared(const struct matrix &w, size_t *tables)
{
    size_t slots = 0;
    for (int i = 0; i < w.n_seg; i++) {
        size_t n = (size_t)(wide_ahead(w.seg[i].tile_bytes) + 2) * WIDE_N * 128 +
                   16 * (size_t)w.seg[i].tile_bytes;
        slots = n > slots ? n : slots;
    }
    size_t sums = (size_t)(WIDE_N * WIDE_STRIDE) * sizeof(float);
    slots = slots > sums ? slots : sums;
    *tables = slots;
    return WIDE_ALIGN + slots + 3 * WIDE_N * 4;
}

/* Every block must see one kind of tiles. */
bool wide_suits(const struct cuda_backend *cu, const struct matrix *w, bool pair)
{
    size_t tables;
    if (!cu->wgmma || w->set == SET_ALL || wide_shared(*w, &tables) > cu->shared_limit)
        return false;
    for (int i = 1; i < w->n_seg; i++)
        if (w->seg[i].kind != w->seg[0].kind && (pair || w->seg[i].tile0 % 8))
            return false;
    return !pair || (w->n_seg == 2 && w->seg[0].n_tiles == w->seg[1].n_tiles);
}

template <int SET>
static void wide_launch(struct cuda_backend *cu, struct gemm_args p, bool pair, int y)
{
    size_t tables, shared = wide_shared(p.w, &tables);
    p.slot = (int)tables;
    int tiles = pair ? p.ldy / TILE_ROWS : p.w.n_tiles;
    int x = ceil_div(tiles, pair ? 4 : 8), pieces = p.moe ? 1 : wide_blocks(cu) / (x * y);
    p.kt_per = p.w.n_kt;
    if (pieces > 1) {
        p.kt_per = ceil_div(p.w.n_kt, pieces);
        p.part = cu->wide_part;
    }
    pieces = ceil_div(p.w.n_kt, p.kt_per);
    p.part = pieces > 1 ? p.part : NULL;
    cuda_launch(cu, wide_kernel<SET>, dim3((unsigned)x, (unsigned)y, (unsigned)pieces),
                WIDE_THREADS, shared, LAUNCH_EARLY, p);
    if (pieces > 1)
        cuda_launch(cu, wide_sum_kernel, dim3((unsigned)x, (unsigned)y, WIDE_N / 8), WIDE_THREADS,
                    (size_t)(3 * WIDE_N * 4), LAUNCH_EARLY, p);
}

void wide_gemm(struct cuda_backend *cu, const struct gemm_args &p, bool pair, int y)
{
    if (p.w.set == SET_K)
        wide_launch<SET_K>(cu, p, pair, y);
    else
        wide_launch<SET_FAST>(cu, p, pair, y);
}

static __global__ void probe_kernel(int *there)
{
    *there = wgmma_compiled();
}

/* Whether this program was built for this very GPU: code for sm_90a runs nowhere else, and code for
 * anything else has no wgmma. */
bool wide_there(struct cuda_backend *cu, int *scratch)
{
    int there = 0;
    if (cu->sm != 90)
        return false;
    cuda_launch(cu, probe_kernel, dim3(1), 32, 0, LAUNCH_PLAIN, scratch);
    CUDA_TRY(cu,
             cudaMemcpyAsync(&there, scratch, sizeof there, cudaMemcpyDeviceToHost, cu->stream));
    CUDA_TRY(cu, cudaStreamSynchronize(cu->stream));
    return there;
}
