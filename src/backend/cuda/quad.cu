/*
 * Few rows of K-quants, four at a time. A tile goes to the tensor core as in rows.cuh, with four
 * rows in the even columns of the eight: half the sums to scale.
 *
 * Products of 2 to 4 rows: as in small.cu the warps of a block cut k, a norm in front is folded
 * in, and the weights are on their way before the wait.
 *
 * Experts of a batched decode, up to QUAD_ROWS rows: so few rows rarely choose the same
 * expert (of 24 rows over 128 experts, eight each, two do), so work is a list of (expert, up to
 * four of the rows that chose it), which every block makes for itself from the router's logits.
 * Gate and up: the warps of a block cut k, a slice of 256 columns each, whose rows stay in
 * registers while the block works through its share of the list times an expert's tiles; it
 * meets once every few tiles to add up. Down: a block owns 16 outputs, all of the list, and the
 * weighted sum of every row.
 */
#include "backend/cuda/rows.cuh"

#include <math.h>

enum { LINEAR_WARPS = 16, LINEAR_STAGES = 4, LINEAR_BATCH = 4 };
enum { UP_STAGES = 4, UP_BATCH = 4, DOWN_WARPS = 16, DOWN_STAGES = 3 };
enum { MAX_USED = 16, MAX_EXPERTS = 128, MAX_ENTRIES = QUAD_ROWS * MAX_USED };

struct quad_table;

struct quad_args {
    struct matrix w;
    const float *logits;  /* (rows, n_expert) */
    const uint8_t *x;     /* up: (rows, n_kt) records */
    const float *x_scale; /* up: (rows) what undoes their scale */
    uint8_t *hidden;      /* (entries, 4, n_kt of down) records, over 16 */
    float *y;             /* down: (rows, n_out) */
    struct quad_table *table;
    int rows, n_expert, used, slot, hidden_kt;
    bool renormalise;
    float scale;
};

/* acc[0], acc[1] += rows g, g+8 of the tile times row c of four: x has row g/2 for column g. A
 * warp waits for each result it uses, so products that do not need each other stand side by
 * side. */
DEVICE void quad_q4_k(const uint8_t *tile, const struct row_frag &x, float (&acc)[2])
{
    int lane = lane_id(), g = lane >> 2;
    const float zero[4] = {};
    float sum[2] = {}, ts[4], tm[4];
    uint4 s4 = load16(tile + Q4K_SCALES + g * 16);
    uint32_t scales[4] = {s4.x, s4.y, s4.z, s4.w};
    /* What offsets and minima add: see frag_q4_k. */
    uint32_t sc = load4(tile + Q4K_SCALES + lane * 4), mn = load4(tile + Q4K_MINS + lane * 4);
    uint2 d = load8(tile + Q4K_D + g * 8);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t w[2][4], a[4];
        float c[4][4];
#pragma unroll
        for (int q = 0; q < 2; q++) {
            uint4 w4 = load16(tile + (2 * half + q) * 512 + lane * 16);
            w[q][0] = w4.x, w[q][1] = w4.y, w[q][2] = w4.z, w[q][3] = w4.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) { /* the first 16 columns of every group, then the second */
            int j = 8 * half + 2 * i;
            nibble_frag(w[i >> 1][2 * (i & 1)], a);
            mma_f16_from(c[i], a, x.b[j][0], x.b[j][1], zero);
        }
        if (half == 0) {
            uint32_t as[4], am[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int byte = (i & 1) * 2 + (i >> 1);
                as[i] = half2_add(byte_1024(sc, byte), H2_M1024);
                am[i] = half2_add(byte_1024(mn, byte), H2_M1024);
            }
            mma_f16_from(ts, as, x.t[0], x.t[1], zero);
            mma_f16_from(tm, am, x.t[0], x.t[1], zero);
            mma_f16(ts, as, x.t[2], x.t[3]);
            mma_f16(tm, am, x.t[2], x.t[3]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int j = 8 * half + 2 * i + 1;
            nibble_frag(w[i >> 1][2 * (i & 1) + 1], a);
            mma_f16(c[i], a, x.b[j][0], x.b[j][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t scale = scales[2 * half + (i >> 1)];
            sum[0] += byte_float(scale, i & 1) * c[i][0];
            sum[1] += byte_float(scale, 2 + (i & 1)) * c[i][2];
        }
    }
    acc[0] += half_to_float(d.x & 0xffff) * (sum[0] - 1024.0f * ts[0]) -
              half_to_float(d.y & 0xffff) * tm[0];
    acc[1] += half_to_float(d.x >> 16) * 0.0625f * (sum[1] - 1024.0f * ts[2]) -
              half_to_float(d.y >> 16) * tm[2];
}

DEVICE void quad_q6_k(const uint8_t *tile, const struct row_frag &x, float (&acc)[2])
{
    int lane = lane_id(), g = lane >> 2;
    const float zero[4] = {};
    float sum[2] = {}, ts[4];
    /* As in frag_q6_k. */
    uint2 all = load8(tile + Q6K_SCALES + (lane & 3) * 64 + g * 8);
    uint32_t as[4], d = load4(tile + Q6K_D + g * 4);
#pragma unroll
    for (int i = 0; i < 4; i++)
        as[i] = half2_add(byte_perm(i & 1 ? all.y : all.x, 0x64646464u, i & 2 ? 0x4342u : 0x4140u),
                          H2_M1152);
    mma_f16_from(ts, as, x.t[0], x.t[1], zero);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        uint4 w4 = load16(tile + q * 512 + lane * 16);
        uint2 high = load8(tile + Q6K_HIGH + q * 256 + lane * 8);
        uint2 sc = load8(tile + Q6K_SCALES + q * 64 + g * 8);
        sc.x ^= 0x80808080u; /* stored 128 too large */
        sc.y ^= 0x80808080u;
        uint32_t w[4] = {w4.x, w4.y, w4.z, w4.w};
        float c[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t a[4], top = i & 2 ? high.y : high.x;
            uint32_t t0 = i & 1 ? top >> 4 : top << 4, t1 = i & 1 ? top >> 6 : top << 2;
            nibble_frag(w[i], a);
            a[0] = and_or(t0, 0x00300030u, a[0]);
            a[1] = and_or(t0, 0x03000300u, a[1]);
            a[2] = and_or(t1, 0x00300030u, a[2]);
            a[3] = and_or(t1, 0x03000300u, a[3]);
            mma_f16_from(c[i], a, x.b[4 * q + i][0], x.b[4 * q + i][1], zero);
        }
        if (q == 0)
            mma_f16(ts, as, x.t[2], x.t[3]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sum[0] += signed_byte_float(sc.x, i) * c[i][0];
            sum[1] += signed_byte_float(sc.y, i) * c[i][2];
        }
    }
    acc[0] += half_to_float(d & 0xffff) * (sum[0] - 1056.0f * ts[0]);
    acc[1] += half_to_float(d >> 16) * 0.0625f * (sum[1] - 1536.0f * ts[2]);
}

/* KIND: of the tile; -1: as it comes. */
template <int KIND>
DEVICE void quad_tile(int kind, const uint8_t *tile, const struct row_frag &x, float (&acc)[2])
{
    if ((KIND < 0 ? kind : KIND) == TILE_Q4_K)
        quad_q4_k(tile, x, acc);
    else
        quad_q6_k(tile, x, acc);
}

/* Dense products of up to four rows: y = [norm](x) W^T (+ bias). As in small.cu a block's warps
 * cut k, a norm in front is folded in, and weights are on their way before the wait. */
struct quad_linear_args {
    struct matrix w;
    struct norm_in in;                      /* (rows, n_in) */
    float *y;                               /* (rows, n_out) */
    int rows, tiles_per_block, batch, slot; /* batch: tiles between two meetings */
};

/* This lane's part of a slice of row lane / 8: of 32 columns the first or the second 16, four of
 * them. */
DEVICE int quad_column(int slice)
{
    return slice * TILE_K + (lane_id() >> 2 & 1) * 16 + (lane_id() & 3) * 4;
}
DEVICE void quad_load(float (&v)[8][4], const float *row, int slice, int n)
{
    int k = quad_column(slice);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float4 a = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (k + i * 32 < n)
            a = *(const float4 *)(row + k + i * 32);
        v[i][0] = a.x, v[i][1] = a.y, v[i][2] = a.z, v[i][3] = a.w;
    }
}

/* Their halves in the order of fragments, times a power of two that takes the slice's largest to
 * about 1024: the other 16 of 32 columns are four lanes away. Returns what undoes the scale, for
 * row c. */
DEVICE float quad_pack(struct row_frag &f, const float (&v)[8][4])
{
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++)
        top = fmaxf(top, fabsf(v[i / 4][i % 4]));
#pragma unroll
    for (int i = 1; i < 8; i <<= 1)
        top = fmaxf(top, __shfl_xor_sync(FULL_WARP, top, i));
    uint32_t e = bits_of(top) >> 23;
    e = e < 16 ? 16 : e;
    float scale = float_of((264 - e) << 23);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            uint32_t h = pack_half2(v[i][2 * j] * scale, v[i][2 * j + 1] * scale);
            f.b[2 * i][j] = h;
            f.b[2 * i + 1][j] = __shfl_xor_sync(FULL_WARP, h, 4);
        }
    frag_sums(f);
    return __shfl_sync(FULL_WARP, float_of((e - 10) << 23), 8 * (lane_id() & 3));
}

template <bool NORM>
static __global__ void __launch_bounds__(LINEAR_WARPS * 32)
    quad_linear_kernel(const __grid_constant__ struct quad_linear_args p)
{
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    int warps = (int)blockDim.x >> 5, w = warp_id(), lane = lane_id(), n_in = p.w.n_in;
    int one_ring = ring_bytes(LINEAR_STAGES, p.slot);
    float *sums = (float *)(shared + warps * one_ring); /* (2, batch, warps, 64) */
    float *squares = sums + 2 * p.batch * warps * 64;   /* (warps, 4) */
    int first = (int)blockIdx.x * p.tiles_per_block;
    int end = min(first + p.tiles_per_block, p.w.n_tiles), f_tile = first;
    struct tile_ring<LINEAR_STAGES> ring;
    ring_init(ring, shared + w * one_ring, p.slot);
    const uint8_t *f_at = NULL; /* the tile to ask for next; tiles of a segment lie side by side */
    int f_bytes = 0, f_end = 0;
    auto fetch = [&]() {
        if (f_tile < end && f_tile >= f_end) {
            const struct seg *s = seg_of(p.w, f_tile);
            f_at = tile_address(p.w, s, 0, f_tile, w);
            f_bytes = s->tile_bytes;
            f_end = s->tile0 + s->n_tiles;
        }
        ring_fetch(ring, f_at, f_bytes, f_tile < end);
        f_at += p.w.n_kt * f_bytes;
        f_tile++;
    };
#pragma unroll 1
    for (int i = 0; i < LINEAR_STAGES; i++)
        fetch();
    dependency_trigger();

    /* Which tiles of a batch are Q6_K, and where number i of its sums goes: looked up before the
     * wait. */
    auto kinds = [&](int tile) {
        return __ballot_sync(FULL_WARP, lane < min(p.batch, end - tile) &&
                                            seg_of(p.w, tile + lane)->kind == TILE_Q6_K);
    };
    auto place = [&](int tile, int i, float *bias) {
        int b = (i >> 4) / p.rows, col = (i >> 4) - b * p.rows;
        *bias = 0.0f;
        if (tile + b >= end || b >= p.batch)
            return (float *)NULL;
        const struct seg *s = seg_of(p.w, tile + b);
        int out = (tile + b - s->tile0) * TILE_ROWS + (i & 15);
        if (out >= s->rows)
            return (float *)NULL;
        out += s->row0;
        if (p.w.bias)
            *bias = p.w.bias[out];
        return p.y + (size_t)col * (size_t)p.w.n_out + (size_t)out;
    };
    float bias, *to = place(first, (int)threadIdx.x, &bias);
    uint32_t six = kinds(first);
    int row = lane >> 3;
    size_t at = (size_t)(row < p.rows ? row : 0) * (size_t)n_in;
    float v[8][4], d[8][4], gain[8][4], square = 0.0f;
    if (NORM)
        quad_load(gain, p.in.gain, w, n_in);
    mark(mk, 2);
    dependency_wait();
    mark(mk, 3);
    quad_load(v, p.in.x + at, w, n_in);
    if (NORM) {
        if (p.in.d) {
            quad_load(d, p.in.d + at, w, n_in);
#pragma unroll
            for (int j = 0; j < 32; j++)
                v[j / 4][j % 4] += d[j / 4][j % 4];
        }
        if (blockIdx.x == gridDim.x - 1 && p.in.x_out && row < p.rows) {
            int k = quad_column(w);
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (k + j * 32 < n_in)
                    *(float4 *)(p.in.x_out + at + k + j * 32) =
                        make_float4(v[j][0], v[j][1], v[j][2], v[j][3]);
        }
#pragma unroll
        for (int j = 0; j < 32; j++) {
            square += v[j / 4][j % 4] * v[j / 4][j % 4];
            v[j / 4][j % 4] *= gain[j / 4][j % 4];
        }
    }
    if (NORM) {
#pragma unroll
        for (int i = 1; i < 8; i <<= 1)
            square += __shfl_xor_sync(FULL_WARP, square, i);
        if (!(lane & 7))
            squares[w * 4 + row] = square;
    }
    struct row_frag x;
    float undo = quad_pack(x, v);
    mark(mk, 4);
    int odd = 0;
#pragma unroll 1
    for (int tile = first; tile < end; tile += p.batch, odd ^= 1) {
        int n = min(p.batch, end - tile);
        float *from = sums + odd * p.batch * warps * 64;
#pragma unroll 1
        for (int b = 0; b < n; b++) {
            float acc[2] = {}, *mine = from + (b * warps + w) * 64 + lane;
            const uint8_t *there = ring_take(ring);
            if (tile + b == first)
                mark(mk, 5);
            quad_tile<-1>(six >> b & 1 ? TILE_Q6_K : TILE_Q4_K, there, x, acc);
            ring_give(ring);
            fetch();
            mine[0] = acc[0] * undo;
            mine[32] = acc[1] * undo;
        }
        mark(mk, 6);
        __syncthreads();
        mark(mk, 7);
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < n * p.rows * TILE_ROWS; i += (int)blockDim.x) {
            int b = (i >> 4) / p.rows, col = (i >> 4) - b * p.rows;
            const float *share = from + b * warps * 64 + (i & 15) * 4 + col;
            float sum = 0.0f, y = 0.0f;
            if (i != (int)threadIdx.x)
                to = place(tile, i, &bias);
#pragma unroll 8
            for (int j = 0; j < warps; j++)
                y += share[j * 64];
            if (NORM) {
#pragma unroll 8
                for (int j = 0; j < warps; j++)
                    sum += squares[j * 4 + col];
                y *= rsqrtf(sum / (float)n_in + p.in.eps);
            }
            if (to)
                *to = y + bias;
        }
        if (tile + p.batch < end) {
            to = place(tile + p.batch, (int)threadIdx.x, &bias);
            six = kinds(tile + p.batch);
        }
    }
    copy_async_wait<0>();
    marks_end(mk, 11);
}

static size_t quad_linear_shared(const struct matrix *w, int batch)
{
    return (size_t)w->n_kt *
           (size_t)(ring_bytes(LINEAR_STAGES, w->max_tile_bytes) + 2 * batch * 64 * 4 + 16);
}

bool quad_linear_fits(const struct cuda_backend *cu, const struct matrix *w, int rows)
{
    return rows >= 2 && rows <= 4 && w->set == SET_K && w->n_in % 8 == 0 &&
           w->n_kt <= LINEAR_WARPS && quad_linear_shared(w, LINEAR_BATCH) <= cu->shared_limit;
}

void quad_linear(struct cuda_backend *cu, const struct matrix *w, const struct norm_in *in,
                 float *y, int rows)
{
    int per = ceil_div(w->n_tiles, cu->n_sm); /* a block to an SM: rows are made once */
    int batch = per < LINEAR_BATCH ? per : LINEAR_BATCH;
    struct quad_linear_args p = {*w, *in, y, rows, per, batch, w->max_tile_bytes};
    dim3 grid((unsigned)ceil_div(w->n_tiles, per));
    cuda_launch(cu, in->gain ? quad_linear_kernel<true> : quad_linear_kernel<false>, grid,
                w->n_kt * 32, quad_linear_shared(w, batch), LAUNCH_EARLY, p);
}

/* Experts */

/* One entry of the list: an expert and up to four of the rows that chose it. */
struct __align__(16) quad_entry
{
    int expert;
    uint32_t rows; /* a byte each; 255: none */
    int pad[2];
    float weight[4];
};
/* The list as gate and up leave it for down. */
struct __align__(16) quad_table
{
    int n, pad[3];
    struct quad_entry entry[MAX_ENTRIES];
};
size_t quad_table_bytes(void)
{
    return sizeof(struct quad_table);
}

/* Who chose what; in shared memory of every block of gate and up. */
struct __align__(16) quad_list
{
    uint32_t rows[MAX_ENTRIES];                 /* of an entry, as above */
    uint32_t mask[QUAD_ROWS][MAX_EXPERTS / 32]; /* bits: experts a row chose */
    uint32_t chose[MAX_EXPERTS];                /* bits: rows that chose an expert */
    int total[MAX_EXPERTS / 32];                /* entries of 32 experts */
    uint16_t expert[MAX_ENTRIES];               /* of an entry; ascending */
    uint16_t first[MAX_EXPERTS];                /* entry of an expert */
    uint16_t chosen[QUAD_ROWS][MAX_USED];
};

/* One warp chooses for a row, in the order of rows.cuh. */
DEVICE void quad_choose_row(struct quad_list *l, const struct quad_args &p, int row)
{
    enum { PER = MAX_EXPERTS / 32, BITS = 7 };
    const float *logits = p.logits + row * p.n_expert;
    int lane = lane_id();
    float v[PER];
    uint32_t key[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        v[i] = i * 32 + lane < p.n_expert ? load_float_l2(logits + i * 32 + lane) : 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++)
        key[i] = i * 32 + lane < p.n_expert ? choice_key<BITS>(v[i], i * 32 + lane) : 0;
    int e = choose_largest<PER, BITS>(key, p.used, p.n_expert);
    if (lane < p.used) {
        atomicOr(&l->mask[row][e >> 5], 1u << (e & 31));
        l->chosen[row][lane] = (uint16_t)e;
    }
}

/* Before the wait. */
DEVICE void quad_clear(struct quad_list *l)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < QUAD_ROWS * MAX_EXPERTS / 32; i += (int)blockDim.x)
        l->mask[i / (MAX_EXPERTS / 32)][i % (MAX_EXPERTS / 32)] = 0;
    __syncthreads();
}

/* The block. Returns the number of entries. */
DEVICE int quad_choose(struct quad_list *l, const struct quad_args &p)
{
    enum { GROUPS = MAX_EXPERTS / 32 };
    int warps = (int)blockDim.x >> 5, w = warp_id(), lane = lane_id(), n = 0;
#pragma unroll 1
    for (int row = w; row < p.rows; row += warps)
        quad_choose_row(l, p, row);
    __syncthreads();
    /* A warp has 32 experts: how many entries they make, then where those go. */
    auto count = [&](uint32_t m, int *before) {
        int t = (__popc(m) + 3) >> 2, all = 0;
        *before = 0;
#pragma unroll 1
        for (int k = 0; 4 * k < p.rows; k++) {
            uint32_t some = __ballot_sync(FULL_WARP, t > k);
            *before += __popc(some & ((1u << lane) - 1));
            all += __popc(some);
        }
        return all;
    };
#pragma unroll 1
    for (int i = w; i < GROUPS; i += warps) {
        uint32_t m = 0;
        int before;
#pragma unroll 4
        for (int r = 0; r < p.rows; r++)
            m |= (l->mask[r][i] >> lane & 1) << r;
        l->chose[i * 32 + lane] = m;
        l->total[i] = count(m, &before);
        l->first[i * 32 + lane] = (uint16_t)before;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = w; i < GROUPS; i += warps) {
        uint32_t m = l->chose[i * 32 + lane];
        int at = l->first[i * 32 + lane];
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
            at += j < i ? l->total[j] : 0;
        l->first[i * 32 + lane] = (uint16_t)at;
#pragma unroll 1
        for (; m; at++) {
            uint32_t rows = ~0u;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (!m)
                    break;
                rows &= ~((uint32_t)(256 - __ffs((int)m)) << 8 * j);
                m &= m - 1;
            }
            l->rows[at] = rows;
            l->expert[at] = (uint16_t)(i * 32 + lane);
        }
    }
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
        n += l->total[i];
    __syncthreads();
    return n;
}

/* What down will want to know, weights included; one block. */
DEVICE void quad_publish(const struct quad_list *l, const struct quad_args &p, int n)
{
    struct quad_entry *to = p.table->entry;
    int warps = (int)blockDim.x >> 5, lane = lane_id();
    if (threadIdx.x == 0)
        p.table->n = n;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
        to[i].expert = l->expert[i];
        to[i].rows = l->rows[i];
    }
#pragma unroll 1
    for (int row = warp_id(); row < p.rows; row += warps) {
        const float *logits = p.logits + row * p.n_expert;
        int e = lane < p.used ? l->chosen[row][lane] : 0;
        float v = load_float_l2(logits + e), top = __shfl_sync(FULL_WARP, v, 0);
        float w = lane < p.used ? fast_exp(v - top) : 0.0f, total = w;
        if (!p.renormalise) {
            total = 0.0f;
#pragma unroll 1
            for (int i = lane; i < p.n_expert; i += 32)
                total += fast_exp(load_float_l2(logits + i) - top);
        }
        total = warp_sum(total);
        int rank = __popc(l->chose[e] & ((1u << row) - 1));
        if (lane < p.used)
            to[l->first[e] + rank / 4].weight[rank % 4] = w / total * p.scale;
    }
}

/* hidden = silu(x Wg^T) * (x Wu^T). Items are (entry, 16 hidden units), cut evenly between
 * blocks. PARTS 2: half of the warps have gate tiles, the others up. */
template <int KIND, int PARTS>
static __global__ void __launch_bounds__(512)
    quad_up_kernel(const __grid_constant__ struct quad_args p)
{
    SHARED_BYTES(shared);
    struct quad_list *list = (struct quad_list *)shared;
    struct marks mk;
    marks_begin(mk);
    int slices = p.w.n_kt, lane = lane_id(), half = p.w.n_tiles / 2;
    int part0 = PARTS == 2 ? warp_id() / slices : 0, w = warp_id() - part0 * slices;
    int one_ring = ring_bytes(UP_STAGES, p.slot);
    uint8_t *rings = shared + sizeof *list;
    float *scales = (float *)(rings + (blockDim.x >> 5) * one_ring); /* (QUAD_ROWS) */
    float *sums = scales + QUAD_ROWS; /* (2, batch, slices, gate up, 64) */
    struct tile_plane plane[2] = {plane_of(p.w, part0 * half, w), plane_of(p.w, half, w)};
    struct tile_ring<UP_STAGES> ring;
    struct row_frag x;
    ring_init(ring, rings + warp_id() * one_ring, p.slot);
    auto load_rows = [&](uint32_t rows) { /* none: of some row */
                                          int row = (int)(rows >> 8 * (lane >> 3) & 255);
                                          row = row < p.rows ? row : 0;
                                          frag_load(x, p.x + (size_t)(row * slices + w) *
                                                                 (size_t)RECORD);
    };

    quad_clear(list);
    mark(mk, 2);
    dependency_wait();
    mark(mk, 3);
    dependency_trigger();
    for (int i = (int)threadIdx.x; i < p.rows; i += (int)blockDim.x)
        scales[i] = p.x_scale[i];
    int entries = quad_choose(list, p);
    mark(mk, 4);
    uint32_t n = (uint32_t)(entries * half); /* times the blocks: far from 2^32 */
    int first = (int)(n * blockIdx.x / gridDim.x), end = (int)(n * (blockIdx.x + 1) / gridDim.x);
    int entry = first / half, unit = first - entry * half, odd = 0;
    int f_left = end - first, f_entry = entry, f_unit = unit;
    const uint8_t *f_at[2] = {};
    auto find = [&]() {
        int e = list->expert[f_entry];
        f_at[0] = plane_tile(plane[0], e, f_unit);
        if (PARTS == 1)
            f_at[1] = plane_tile(plane[1], e, f_unit);
    };
    auto fetch = [&](int i) {
        ring_fetch<UP_STAGES, true>(ring, f_at[i], plane[i].bytes, f_left > 0);
        f_at[i] += plane[i].row;
        if (i + PARTS < 2)
            return;
        f_left--;
        if (++f_unit == half) {
            f_unit = 0;
            f_entry++;
            if (f_left > 0)
                find();
        }
    };
    if (f_left > 0)
        find();
#pragma unroll 1
    for (int i = 0; i < UP_STAGES / (3 - PARTS); i++) {
        fetch(0);
        if (PARTS == 1)
            fetch(1);
    }
    mark(mk, 1);
    if (blockIdx.x == gridDim.x - 1)
        quad_publish(list, p, entries);
    if (first < end)
        load_rows(list->rows[entry]);
#pragma unroll 1
    for (int item = first; item < end; item += UP_BATCH, odd ^= 1) {
        int batch = min((int)UP_BATCH, end - item);
        float *to = sums + odd * UP_BATCH * slices * 128;
#pragma unroll 1
        for (int b = 0; b < batch; b++) {
            float *mine = to + (b * slices + w) * 128 + part0 * 64 + lane;
#pragma unroll
            for (int i = 0; i < 3 - PARTS; i++) {
                float acc[2] = {};
                const uint8_t *tile = ring_take(ring);
                if (item + b == first && i == 0)
                    mark(mk, 5);
                quad_tile<KIND>(plane[i].kind, tile, x, acc);
                ring_give(ring);
                fetch(i);
                mine[i * 64] = acc[0];
                mine[i * 64 + 32] = acc[1];
            }
            if (++unit == half) { /* another expert, other rows */
                unit = 0;
                entry++;
                if (item + b + 1 < end)
                    load_rows(list->rows[entry]);
            }
        }
        mark(mk, 6);
        __syncthreads();
        mark(mk, 7);
        /* Half a warp to a row of an item. */
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < batch * 64; i += (int)blockDim.x) {
            int it = item + (i >> 6), e = it / half, u = it - e * half, s = i >> 4 & 3;
            int r = i & 15, row = (int)(list->rows[e] >> 8 * s & 255), k = u * TILE_ROWS + r;
            float v = 0.0f;
            if (row < p.rows && k < p.w.seg[0].rows) {
                const float *from = to + (i >> 6) * slices * 128 + r * 4 + s;
                float g = 0.0f, h = 0.0f;
#pragma unroll 8
                for (int j = 0; j < slices; j++) {
                    g += from[j * 128];
                    h += from[j * 128 + 64];
                }
                g *= scales[row];
                h *= scales[row];
                if (p.w.bias) {
                    g += p.w.bias[k];
                    h += p.w.bias[p.w.n_out / 2 + k];
                }
                v = clamp_half(silu(g) * h * HIDDEN_SCALE);
            }
            put_hidden(p.hidden + (size_t)((e * 4 + s) * p.hidden_kt) * (size_t)RECORD, k, v,
                       row < p.rows, u == half - 1, p.hidden_kt);
        }
    }
    copy_async_wait<0>();
    marks_end(mk, 9);
}

/* y = sum over the chosen of weight * hidden Wd^T. A block owns 16 outputs; its warps share out the
 * (entry, slice) pairs, and have sums of their own for every row. */
template <int KIND>
static __global__ void __launch_bounds__(512)
    quad_down_kernel(const __grid_constant__ struct quad_args p)
{
    SHARED_BYTES(shared);
    struct quad_entry *list = (struct quad_entry *)shared; /* (rows * used) */
    struct marks mk;
    marks_begin(mk);
    int warps = (int)blockDim.x >> 5, w = warp_id(), lane = lane_id(), g = lane >> 2, c = lane & 3;
    int tile = (int)blockIdx.x, n_kt = p.w.n_kt, one_ring = ring_bytes(DOWN_STAGES, p.slot);
    int most = p.rows * p.used;
    const struct seg *s = seg_of(p.w, tile);
    uint8_t *rings = (uint8_t *)(list + most);
    float *sums = (float *)(rings + warps * one_ring); /* (warps, rows, 20) */
    float *mine = sums + w * p.rows * SUM_ROW;
    struct tile_plane plane = plane_of(p.w, tile, 0);
    struct tile_ring<DOWN_STAGES> ring;
    ring_init(ring, rings + w * one_ring, p.slot);

    dependency_trigger();
#pragma unroll 1
    for (int i = lane; i < p.rows * SUM_ROW; i += 32)
        mine[i] = 0.0f;
    mark(mk, 2);
    dependency_wait();
    mark(mk, 3);
    int n = p.table->n; /* one trip for all of it: there are no more than `most` */
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < 2 * most; i += (int)blockDim.x)
        ((uint4 *)list)[i] = ((const uint4 *)p.table->entry)[i];
    __syncthreads();
    mark(mk, 4);
    int step_entry = warps / n_kt, step_kt = warps - step_entry * n_kt;
    auto advance = [&](int &entry, int &kt) {
        entry += step_entry;
        kt += step_kt;
        if (kt >= n_kt) {
            kt -= n_kt;
            entry++;
        }
    };
    int entry = w / n_kt, kt = w - entry * n_kt, f_entry = entry, f_kt = kt;
    auto fetch = [&]() {
        bool real = f_entry < n;
        ring_fetch(ring, plane_tile(plane, list[real ? f_entry : 0].expert, 0) + f_kt * plane.bytes,
                   plane.bytes, real);
        advance(f_entry, f_kt);
    };
    struct row_frag x, ahead;
    int l_entry = entry, l_kt = kt;
    auto load_rows =
        [&]() { /* of an entry's row that is not there: of some other */
                if (l_entry < n) {
                    uint32_t rows = list[l_entry].rows;
                    int at = lane >> 3;
                    at = (rows >> 8 * at & 255) < 255 ? at : (__ffs((int)(~rows)) - 1) >> 3;
                    frag_load(ahead, p.hidden + (size_t)((l_entry * 4 + at) * n_kt + l_kt) *
                                                    (size_t)RECORD);
                }
                advance(l_entry, l_kt);
        };
#pragma unroll 1
    for (int i = 0; i < DOWN_STAGES; i++)
        fetch();
    load_rows();
    bool begun = false;
#pragma unroll 1
    for (; entry < n; advance(entry, kt)) {
        float acc[2] = {};
        x = ahead;
        load_rows();
        const uint8_t *there = ring_take(ring);
        if (!begun)
            mark(mk, 5);
        begun = true;
        quad_tile<KIND>(plane.kind, there, x, acc);
        ring_give(ring);
        fetch();
        int row = (int)(list[entry].rows >> 8 * c & 255);
        if (row < p.rows) {
            float weight = list[entry].weight[c] * (1.0f / HIDDEN_SCALE);
            mine[row * SUM_ROW + g] += weight * acc[0];
            mine[row * SUM_ROW + g + 8] += weight * acc[1];
        }
    }
    copy_async_wait<0>();
    mark(mk, 6);
    __syncthreads();
    mark(mk, 7);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < p.rows * TILE_ROWS; i += (int)blockDim.x) {
        int row = (tile - s->tile0) * TILE_ROWS + (i & 15);
        if (row < s->rows)
            p.y[(size_t)(i >> 4) * (size_t)p.w.n_out + (size_t)(s->row0 + row)] =
                take_tile(sums, warps, p.rows * SUM_ROW, i >> 4, i & 15);
    }
    marks_end(mk, 10);
}

static size_t quad_up_shared(const struct matrix *w, int parts)
{
    return sizeof(struct quad_list) + QUAD_ROWS * 4 +
           (size_t)w->n_kt *
               (size_t)(parts * ring_bytes(UP_STAGES, w->max_tile_bytes) + 2 * UP_BATCH * 128 * 4);
}

static size_t quad_down_shared(const struct matrix *w, int warps, int rows, int used)
{
    return (size_t)(rows * used) * sizeof(struct quad_entry) +
           (size_t)(warps * (ring_bytes(DOWN_STAGES, w->max_tile_bytes) + rows * SUM_ROW * 4));
}

bool quad_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
               const struct matrix *down, int rows)
{
    return gate_up->n_expert <= MAX_EXPERTS && cu->shape.n_expert_used <= MAX_USED && rows >= 2 &&
           rows <= QUAD_ROWS && gate_up->set == SET_K && down->set == SET_K &&
           gate_up->n_seg <= 2 && gate_up->n_kt <= 16 && rows * gate_up->n_kt <= cu->n_records &&
           quad_up_shared(gate_up, 1) <= cu->shared_limit &&
           quad_down_shared(down, 8, rows, MAX_USED) <= cu->shared_limit;
}

void quad_experts(struct cuda_backend *cu, const struct matrix *gate_up, const struct matrix *down,
                  float *y, int n_expert, int rows)
{
    const struct shape *s = &cu->shape;
    CHECK(s->n_expert_used <= MAX_USED && n_expert <= MAX_EXPERTS, "%d of %d experts",
          s->n_expert_used, n_expert);
    struct quad_args p = {};
    p.w = *gate_up;
    p.logits = cu->router;
    p.x = cu->records;
    p.x_scale = cu->half_scale;
    p.hidden = cu->hidden_records;
    p.rows = rows;
    p.n_expert = n_expert;
    p.used = s->n_expert_used;
    p.slot = gate_up->max_tile_bytes;
    p.hidden_kt = down->n_kt;
    p.renormalise = s->norm_topk;
    p.scale = s->expert_scale;
    p.table = (struct quad_table *)cu->quad_table;
    bool q4 =
        gate_up->seg[0].kind == TILE_Q4_K && gate_up->seg[gate_up->n_seg - 1].kind == TILE_Q4_K;
    bool two = gate_up->n_kt <= 8 && quad_up_shared(gate_up, 2) <= cu->shared_limit;
    size_t shared = quad_up_shared(gate_up, two ? 2 : 1);
    dim3 grid((unsigned)cu->n_sm);
    int threads = gate_up->n_kt * (two ? 64 : 32);
    if (two && q4)
        cuda_launch(cu, quad_up_kernel<TILE_Q4_K, 2>, grid, threads, shared, LAUNCH_EARLY, p);
    else if (two)
        cuda_launch(cu, quad_up_kernel<-1, 2>, grid, threads, shared, LAUNCH_EARLY, p);
    else
        cuda_launch(cu, quad_up_kernel<-1, 1>, grid, threads, shared, LAUNCH_EARLY, p);
    p.w = *down;
    p.slot = down->max_tile_bytes;
    p.y = y;
    int warps = DOWN_WARPS;
    while (warps > 8 && quad_down_shared(down, warps, rows, p.used) > cu->shared_limit)
        warps--;
    shared = quad_down_shared(down, warps, rows, p.used);
    grid = dim3((unsigned)down->n_tiles);
    threads = warps * 32;
    if (down->seg[0].kind == TILE_Q4_K && down->n_seg == 1)
        cuda_launch(cu, quad_down_kernel<TILE_Q4_K>, grid, threads, shared, LAUNCH_EARLY, p);
    else if (down->n_seg == 1)
        cuda_launch(cu, quad_down_kernel<TILE_Q6_K>, grid, threads, shared, LAUNCH_EARLY, p);
    else
        cuda_launch(cu, quad_down_kernel<-1>, grid, threads, shared, LAUNCH_EARLY, p);
}
