/*
 * Experts of a batched decode, 9 to LIST_ROWS rows, quantised weights: hidden = act(x Wg^T, x
 * Wu^T), y[pair] = hidden Wd^T.
 * Mapping: routing sorts the rows by expert into a list of (expert, up to 16 of its rows; 8 where
 * shared memory is short). Persistent blocks, one per SM. The product list x tiles of an expert is
 * divided among the blocks by cost, so that all finish at about the same time, and the weight rings
 * run across experts. A warp owns its tiles; the rows of the experts that its block meets are in
 * shared memory. An entry of up to eight rows costs the tensor cores half of a larger one.
 * The weighted sum over a row's experts is added by the next norm, or by another kernel (pick.cu).
 * Limit: instruction issue before bytes: 315 instructions per Q4_K tile of up to eight rows, 510
 * per Q6_K tile. On an H200 (30B-A3B) experts with norm and router take 115 us at 32 rows, 127 at
 * 64, 156 at 128; reading the distinct experts would take 67, 76 and 78 us. Weights are read at 3.1
 * TB/s at 32 rows, 2.3 at 128.
 */
#include "backend/cuda/core/dot_one.cuh"
#include "backend/cuda/core/rows.cuh"

#include <math.h>

/* Warps of a block and ring stages per warp: registers and shared memory are used up. */
enum { UNIT_WARPS = 16, DOWN_WARPS = 16, LIST_SLOTS = 3 };
/* Relative time of an entry of up to eight rows (ONE) and of more rows (TWO). */
enum { UNIT_ONE = 2, UNIT_TWO = 3, DOWN_ONE = 4, DOWN_TWO = 5 };

struct moe_grouped_args {
    struct matrix w;
    struct route_tables route;
    const uint8_t *x;     /* up: (rows, n_kt) records; down: (sorted pairs, n_kt) */
    const float *x_scale; /* up: (rows) inverse of a row's scale */
    uint8_t *hidden;      /* up: (sorted pairs, hidden_kt) records, scaled by 1/16 */
    float *y;             /* down: (pairs, n_out), floats or, if narrow, fp16 scaled by 1/16 */
    int used, slot, hidden_kt, n_pairs, most; /* most: capacity of the list in entries */
    int pool;                                 /* up: capacity of the rows' pool */
    struct gating act;                        /* up */
    bool narrow, plain;                       /* plain: experts_are_plain */
};

/* One block builds the list from the rows' choices. The order of an expert's rows depends on the
 * atomics. No result depends on it. */
struct moe_grouped_route_args {
    struct route_tables route;
    int n_pairs, n_expert, width;
};

struct moe_grouped_route_shared {
    int count[MAX_EXPERTS], start[MAX_EXPERTS], tile0[MAX_EXPERTS];
    uint16_t chosen[LIST_ROWS * MAX_USED], rank[LIST_ROWS * MAX_USED]; /* of a pair */
};

static __global__ void __launch_bounds__(1024)
    moe_grouped_route_kernel(const __grid_constant__ struct moe_grouped_route_args p)
{
    SHARED_BYTES(shared);
    struct moe_grouped_route_shared *s = (struct moe_grouped_route_shared *)shared;
    int tid = (int)threadIdx.x, lane = lane_id();
    if (tid < MAX_EXPERTS)
        s->count[tid] = 0;
    __syncthreads();
    dependency_wait();
    dependency_trigger();
#pragma unroll 2
    for (int i = tid; i < p.n_pairs; i += 1024) {
        int e = p.route.chosen[i];
        s->chosen[i] = (uint16_t)e;
        s->rank[i] = (uint16_t)atomicAdd(&s->count[e], 1);
    }
    __syncthreads();
    if (tid < 32) { /* one warp: prefix sums over the experts */
        int pairs = 0, tiles = 0;
#pragma unroll 1
        for (int e0 = 0; e0 < p.n_expert; e0 += 32) {
            int e = e0 + lane, c = e < p.n_expert ? s->count[e] : 0;
            int t = (c + p.width - 1) / p.width, sc = c, st = t;
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                int a = __shfl_up_sync(FULL_WARP, sc, d), b = __shfl_up_sync(FULL_WARP, st, d);
                sc += lane >= d ? a : 0;
                st += lane >= d ? b : 0;
            }
            if (e < p.n_expert) {
                s->start[e] = pairs + sc - c;
                s->tile0[e] = tiles + st - t;
            }
            pairs += __shfl_sync(FULL_WARP, sc, 31);
            tiles += __shfl_sync(FULL_WARP, st, 31);
        }
        if (lane == 0)
            p.route.n_tiles[0] = tiles;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < p.n_pairs; i += 1024)
        p.route.pairs[s->start[s->chosen[i]] + s->rank[i]] = i;
    if (tid < p.n_expert)
#pragma unroll 1
        for (int i = 0; i * p.width < s->count[tid]; i++) {
            int32_t *t = p.route.tiles + 3 * (s->tile0[tid] + i);
            t[0] = tid;
            t[1] = s->start[tid] + i * p.width;
            t[2] = min(p.width, s->count[tid] - i * p.width);
        }
}

void moe_grouped_route(struct cuda_backend *cu, const struct route_tables *route,
                       const struct route_rule &rule, int rows, int width)
{
    CHECK(rule.used <= MAX_USED && rule.n_expert <= MAX_EXPERTS && rows <= LIST_ROWS,
          "%d of %d experts for %d rows", rule.used, rule.n_expert, rows);
    struct moe_grouped_route_args p = {*route, rows * rule.used, rule.n_expert, width};
    cuda_launch(cu, moe_grouped_route_kernel, dim3(1), 1024,
                sizeof(struct moe_grouped_route_shared), LAUNCH_EARLY, p);
}

/* The list and the pairs in shared memory, loaded together. */
struct moe_grouped_tables {
    int *n, *tiles, *pairs;
};
DEVICE struct moe_grouped_tables moe_grouped_load(const struct moe_grouped_args &p, uint8_t *to)
{
    int tid = (int)threadIdx.x;
    struct moe_grouped_tables t;
    t.n = (int *)to;
    t.tiles = t.n + 4;
    t.pairs = t.tiles + 3 * p.most;
#pragma unroll 4
    for (int i = tid; i < 3 * p.most; i += (int)blockDim.x)
        t.tiles[i] = p.route.tiles[i];
#pragma unroll 4
    for (int i = tid; i < p.n_pairs; i += (int)blockDim.x)
        t.pairs[i] = p.route.pairs[i];
    if (tid == 0)
        t.n[0] = p.route.n_tiles[0];
    __syncthreads();
    return t;
}
/* This block's share of the list, *first .. *end, in units; an entry has `per` units. An entry of
 * more than eight rows has cost `two`, others `one`, so that all blocks finish at about the same
 * time. Ends with a barrier. */
DEVICE void moe_grouped_share(const struct moe_grouped_tables &list, int per, int one, int two,
                              int *first, int *end)
{
    int n = list.n[0], lane = lane_id();
    if (warp_id() == 0) {
        int total = 0, before = 0, at[2] = {n * per, n * per};
#pragma unroll 1
        for (int i = lane; i < n; i += 32)
            total += list.tiles[3 * i + 2] > 8 ? two : one;
#pragma unroll
        for (int d = 16; d; d >>= 1)
            total += __shfl_xor_sync(FULL_WARP, total, d);
        long long all = (long long)total * per, share[2];
        share[0] = all * (long long)blockIdx.x / (long long)gridDim.x;
        share[1] = all * (long long)(blockIdx.x + 1) / (long long)gridDim.x;
#pragma unroll 1
        for (int i0 = 0; i0 < n; i0 += 32) {
            int i = i0 + lane, cost = i < n ? list.tiles[3 * i + 2] > 8 ? two : one : 0;
            int sum = cost;
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                int a = __shfl_up_sync(FULL_WARP, sum, d);
                sum += lane >= d ? a : 0;
            }
            long long from = (long long)(before + sum - cost) * per;
#pragma unroll
            for (int j = 0; j < 2; j++) {
                bool here = share[j] >= from && share[j] < from + (long long)cost * per;
                uint32_t who = __ballot_sync(FULL_WARP, here);
                int unit = here ? i * per + (int)(share[j] - from) / cost : 0;
                if (who)
                    at[j] = __shfl_sync(FULL_WARP, unit, __ffs((int)who) - 1);
            }
            before += __shfl_sync(FULL_WARP, sum, 31);
        }
        if (lane == 0) {
            list.n[1] = at[0];
            list.n[2] = at[1];
        }
    }
    __syncthreads();
    *first = list.n[1];
    *end = list.n[2];
}
static __host__ __device__ size_t moe_grouped_bytes(int n_pairs, int most)
{
    return (size_t)(4 + 3 * most + n_pairs + 3) / 4 * 16;
}

/* Row stride in shared memory: odd multiples of 64 bytes avoid bank conflicts. */
static __host__ __device__ int unit_stride(int n_kt)
{
    return n_kt * RECORD + (n_kt & 1 ? 0 : 64);
}

/* hidden = act(x Wg^T, x Wu^T). A unit is 16 hidden units of an entry. A block takes a range of
 * units and deals them to its warps, one unit each. The rows of the entries it meets are in shared
 * memory, as many as fit (usually all, since there are about as many experts as SMs). */
template <int NT, int KIND, class F>
DEVICE void unit_slices(struct tile_ring<LIST_SLOTS> &ring, int gate, int up, int n_kt,
                        const uint8_t *const *row, float (*gates)[4], float (*ups)[4], F fetch)
{
    float sum[2][NT][4] = {};
#pragma unroll 1
    for (int kt = 0; kt < n_kt; kt++) {
        struct row_in_shared x[NT];
#pragma unroll
        for (int i = 0; i < NT; i++)
            x[i] = frag_at(row[i] + kt * RECORD);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            frag_tile<KIND>(j ? up : gate, ring_wait(ring), x, sum[j]);
            ring_release(ring);
            fetch();
        }
    }
#pragma unroll
    for (int i = 0; i < NT; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            gates[i][e] = sum[0][i][e];
            ups[i][e] = sum[1][i][e];
        }
}

template <int KIND, int NT, bool PLAIN>
static __global__ void __launch_bounds__(UNIT_WARPS * 32, 1)
    moe_grouped_up_kernel(const __grid_constant__ struct moe_grouped_args p)
{
    SHARED_BYTES(shared);
    int warps = (int)blockDim.x >> 5, w = warp_id(), g = lane_id() >> 2, half = p.w.n_tiles / 2;
    int stride = unit_stride(p.w.n_kt);
    uint8_t *pool = shared + moe_grouped_bytes(p.n_pairs, p.most); /* (p.pool, stride) */
    uint8_t *rings = pool + p.pool * stride;
    struct tile_plane gate = plane_of(p.w, 0, 0), up = plane_of(p.w, half, 0);
    struct tile_ring<LIST_SLOTS> ring;
    ring_init(ring, rings + w * ring_bytes(LIST_SLOTS, p.slot), p.slot);
#if BULK_COPIES
    uint64_t *landed = (uint64_t *)(rings + warps * ring_bytes(LIST_SLOTS, p.slot));
    if (threadIdx.x == 0)
        bulk_init(landed);
    uint32_t parity = 0;
#endif
    dependency_wait();
    dependency_trigger(); /* after the wait: the next kernel may read the list at once */
    struct moe_grouped_tables list = moe_grouped_load(p, shared);
    int first, end;
    moe_grouped_share(list, half, UNIT_ONE, UNIT_TWO, &first, &end);
    int unit = first + w, last = (end - 1) / half;
    int f_unit = unit, f_kt = p.w.n_kt;
    bool f_up = true;
    const uint8_t *gate_at = NULL, *up_at = NULL; /* the next tiles to copy */
    auto fetch = [&]() {                          /* gate, up, gate, up */
                         if (f_up && f_kt == p.w.n_kt && f_unit < end) {
                             int entry = f_unit / half, tile = f_unit - entry * half;
                             int expert = list.tiles[3 * entry];
                             gate_at = plane_tile(gate, expert, tile);
                             up_at = plane_tile(up, expert, tile);
                             f_unit += warps;
                             f_kt = 0;
                         }
                         f_up = !f_up;
                         bool real = f_kt < p.w.n_kt;
                         ring_fetch(ring, f_up ? up_at : gate_at, f_up ? up.bytes : gate.bytes,
                                    real);
                         if (f_up) {
                             gate_at += gate.bytes;
                             up_at += up.bytes;
                             f_kt += real;
                         }
    };
#pragma unroll 1
    for (int i = 0; i < LIST_SLOTS; i++)
        fetch();
#pragma unroll 1
    for (int entry = first / half; first < end && entry <= last;) {
        /* The entries from here on whose rows fit: sorted pairs from `base` to `stop`. */
        int base = list.tiles[3 * entry + 1], stop = base, units = 0;
        for (; entry <= last; entry++) {
            int to = list.tiles[3 * entry + 1] + list.tiles[3 * entry + 2];
            if (to - base > p.pool)
                break;
            stop = to;
            units = min((entry + 1) * half, end);
        }
#if BULK_COPIES
        if (w == 0) {
            int bytes = p.w.n_kt * RECORD;
            if (lane_id() == 0)
                bulk_expect(landed, (stop - base) * bytes);
            __syncwarp();
            for (int i = lane_id(); i < stop - base; i += 32)
                bulk_piece(pool + i * stride,
                           p.x + (size_t)(list.pairs[base + i] / p.used) * (size_t)bytes, bytes,
                           landed);
        }
        bulk_wait(landed, parity);
        parity ^= 1;
#else
        int pieces = p.w.n_kt * (RECORD / 16);
        for (int i = (int)threadIdx.x; i < (stop - base) * pieces; i += (int)blockDim.x) {
            int r = i / pieces, at = (i - r * pieces) * 16;
            copy_async16(
                pool + r * stride + at,
                p.x + (size_t)(list.pairs[base + r] / p.used) * (size_t)(p.w.n_kt * RECORD) + at);
        }
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
#endif
#pragma unroll 1
        for (; unit < units; unit += warps) {
            int at = unit / half, from = list.tiles[3 * at + 1], count = list.tiles[3 * at + 2];
            const uint8_t *row[NT];
            float scale[NT], gates[NT][4], ups[NT][4];
#pragma unroll
            for (int i = 0; i < NT; i++) {
                int r = from + min(8 * i + g, count - 1);
                row[i] = pool + (r - base) * stride;
                scale[i] = p.x_scale[list.pairs[r] / p.used];
            }
            if (NT == 1 || count <= 8)
                unit_slices<1, KIND>(ring, gate.kind, up.kind, p.w.n_kt, row, gates, ups, fetch);
            else
                unit_slices<NT, KIND>(ring, gate.kind, up.kind, p.w.n_kt, row, gates, ups, fetch);
#pragma unroll
            for (int i = 0; i < NT; i++) {
                float undo[2];
                int left = count - 8 * i;
                if (left <= 0)
                    break;
                uint8_t *to = p.hidden + (size_t)((from + 8 * i) * p.hidden_kt) * (size_t)RECORD;
                to_columns(scale[i], undo);
                store_hidden_tile<PLAIN>(gates[i], ups[i], undo, p.w, p.act, list.tiles[3 * at],
                                         unit - at * half, p.hidden_kt, [&](int col) {
                                             return col < left ? to + (size_t)(col * p.hidden_kt) *
                                                                          (size_t)RECORD
                                                               : NULL;
                                         });
            }
        }
        __syncthreads(); /* these rows are no longer read */
    }
    copy_async_wait<0>();
}

/* y[pair] = hidden Wd^T. Items are (entry of the list, 16 outputs); a warp takes every eighth. */
template <int KIND, int NT, bool PLAIN>
static __global__ void __launch_bounds__(DOWN_WARPS * 32, 1)
    moe_grouped_down_kernel(const __grid_constant__ struct moe_grouped_args p)
{
    SHARED_BYTES(shared);
    int warps = (int)blockDim.x >> 5, w = warp_id(), lane = lane_id(), g = lane >> 2, c = lane & 3;
    int n_kt = p.w.n_kt, n_tiles = p.w.n_tiles, rows_bytes = NT * 8 * n_kt * RECORD;
    uint8_t *bs = shared + moe_grouped_bytes(p.n_pairs, p.most); /* (2, n_kt, 8 NT) records */
    int one_ring = ring_bytes(LIST_SLOTS, p.slot);
    struct tile_plane plane = plane_of(p.w, 0, 0);
    struct tile_ring<LIST_SLOTS> ring;
    ring_init(ring, bs + 2 * rows_bytes + w * one_ring, p.slot);

    dependency_trigger();
    /* The list was complete before the preceding kernel started. */
    struct moe_grouped_tables list = moe_grouped_load(p, shared);
    int first, end;
    moe_grouped_share(list, n_tiles, DOWN_ONE, DOWN_TWO, &first, &end);
    int entry = first / n_tiles, item = first + w;
    int f_item = item, f_kt = 0, f_entry = entry, f_tile = item - entry * n_tiles;
    const uint8_t *f_from = NULL;
    auto fetch = [&]() {
        bool real = f_item < end;
        if (!f_kt && real) {
            if (f_tile >= n_tiles) {
                f_tile -= n_tiles;
                f_entry++;
            }
            f_from = plane_tile(plane, list.tiles[3 * f_entry], f_tile);
        }
        ring_fetch(ring, f_from, plane.bytes, real);
        f_from += plane.bytes;
        if (++f_kt == n_kt) {
            f_kt = 0;
            f_item += warps;
            f_tile += warps;
        }
    };
    /* Copies the rows of an entry to the buffer of its parity: slice by slice, one record per
     * row. */
    auto fetch_rows = [&](int entry) {
        if (entry * n_tiles < end) {
            int from = list.tiles[3 * entry + 1], count = list.tiles[3 * entry + 2];
            uint8_t *to = bs + (entry & 1) * rows_bytes;
#pragma unroll 1
            for (int i = (int)threadIdx.x; i < n_kt * NT * 8 * (RECORD / 16);
                 i += (int)blockDim.x) {
                int r = i / (RECORD / 16), piece = i - r * (RECORD / 16);
                int kt = r / (NT * 8), row = r - kt * (NT * 8);
                bool real = row < count;
                copy_async16_or_zero(
                    to + r * RECORD + piece * 16,
                    p.x + (size_t)((from + (real ? row : 0)) * n_kt + kt) * (size_t)RECORD +
                        piece * 16,
                    real);
            }
        }
        copy_async_commit();
    };
#pragma unroll 1
    for (int i = 0; i < LIST_SLOTS; i++)
        fetch();
    dependency_wait();
    fetch_rows(entry);
    copy_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (; entry * n_tiles < end; entry++) {
        int from = list.tiles[3 * entry + 1], count = list.tiles[3 * entry + 2];
        int stop = min((entry + 1) * n_tiles, end);
        const uint8_t *rows = bs + (entry & 1) * rows_bytes + g * RECORD;
        fetch_rows(entry + 1);
#pragma unroll 1
        for (; item < stop; item += warps) {
            int tile = item - entry * n_tiles;
            float acc[NT][4] = {};
#pragma unroll 1
            for (int kt = 0; kt < n_kt; kt++) {
                const uint8_t *from_row = rows + kt * NT * 8 * RECORD;
                const uint8_t *taken = ring_wait(ring);
                if (NT == 1 || count > 8) {
                    struct row_in_shared x[NT];
#pragma unroll
                    for (int i = 0; i < NT; i++)
                        x[i] = frag_at(from_row + i * 8 * RECORD);
                    frag_tile<KIND>(plane.kind, taken, x, acc);
                } else { /* one tensor-core tile of rows suffices */
                    struct row_in_shared x[1] = {frag_at(from_row)};
                    float sum[1][4] = {};
                    frag_tile<KIND>(plane.kind, taken, x, sum);
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        acc[0][e] += sum[0][e];
                }
                ring_release(ring);
                fetch();
            }
            int row = tile * TILE_ROWS + g;
#pragma unroll
            for (int i = 0; i < NT; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int col = i * 8 + 2 * c + (e & 1), r = row + 8 * (e >> 1);
                    if (col >= count || r >= p.w.n_out)
                        continue;
                    size_t at = (size_t)list.pairs[from + col] * (size_t)p.w.n_out + (size_t)r;
                    float v = acc[i][e];
                    if (!PLAIN && p.w.bias)
                        v += HIDDEN_SCALE * p.w.bias[list.tiles[3 * entry] * p.w.n_out + r];
                    if (p.narrow)
                        ((uint16_t *)p.y)[at] = (uint16_t)float_to_half(clamp_half(v));
                    else
                        p.y[at] = v * (1.0f / HIDDEN_SCALE);
                }
        }
        copy_async_wait<
            0>(); /* the next rows have landed (and tiles, if they share a copy group) */
        __syncthreads();
    }
    copy_async_wait<0>();
}

static size_t down_shared(const struct moe_grouped_args &p, int nt, int warps)
{
    return moe_grouped_bytes(p.n_pairs, p.most) + (size_t)(2 * nt * 8 * p.w.n_kt * RECORD) +
           (size_t)(warps * ring_bytes(LIST_SLOTS, p.slot));
}

/* Shared memory of a block with `warps` warps. The rest of `limit` becomes room for rows. */
static size_t unit_shared(struct moe_grouped_args *p, int warps, size_t limit)
{
    size_t fixed = moe_grouped_bytes(p->n_pairs, p->most) +
                   (size_t)(warps * ring_bytes(LIST_SLOTS, p->slot)) + 16;
    size_t stride = (size_t)unit_stride(p->w.n_kt), room = limit > fixed ? limit - fixed : 0;
    p->pool = room / stride < 32 ? (int)(room / stride) : 32;
    return fixed + (size_t)p->pool * stride;
}

/* Warps of a block: as many as leave room for the rows of an entry; 0: too few. */
static int unit_warps(const struct cuda_backend *cu, struct moe_grouped_args *p, int width,
                      size_t *shared)
{
    int warps = UNIT_WARPS;
    while ((*shared = unit_shared(p, warps, cu->shared_limit)), p->pool < width)
        if (--warps < 4)
            return 0;
    return warps;
}

template <int NT> static void unit_launch(struct cuda_backend *cu, struct moe_grouped_args p)
{
    size_t shared;
    int warps = unit_warps(cu, &p, 8 * NT, &shared);
    auto kernel = moe_grouped_up_kernel<ANY_K, NT, false>;
    if (matrix_kind(&p.w) == TILE_Q4_K)
        kernel = p.plain ? moe_grouped_up_kernel<TILE_Q4_K, NT, true>
                         : moe_grouped_up_kernel<TILE_Q4_K, NT, false>;
    else if (p.w.set != SET_K)
        codes_set(&p.w, [&](auto k) { kernel = moe_grouped_up_kernel<k.VALUE, NT, false>; });
    cuda_launch(cu, kernel, dim3((unsigned)cu->n_sm), warps * 32, shared, LAUNCH_EARLY, p);
}

static void moe_grouped_up(struct cuda_backend *cu, const struct moe_grouped_args &p, int width)
{
    if (width == 8)
        unit_launch<1>(cu, p);
    else
        unit_launch<2>(cu, p);
}

template <int NT> static void down_launch(struct cuda_backend *cu, const struct moe_grouped_args &p)
{
    int warps = DOWN_WARPS;
    while (warps > 1 && down_shared(p, NT, warps) > cu->shared_limit)
        warps--;
    auto kernel = p.plain ? moe_grouped_down_kernel<ANY_K, NT, true>
                          : moe_grouped_down_kernel<ANY_K, NT, false>;
    if (p.w.set != SET_K)
        codes_set(&p.w, [&](auto k) { kernel = moe_grouped_down_kernel<k.VALUE, NT, false>; });
    cuda_launch(cu, kernel, dim3((unsigned)cu->n_sm), warps * 32, down_shared(p, NT, warps),
                LAUNCH_EARLY, p);
}

static void moe_grouped_down(struct cuda_backend *cu, const struct moe_grouped_args &p, int width)
{
    if (width == 8)
        down_launch<1>(cu, p);
    else
        down_launch<2>(cu, p);
}

static struct moe_grouped_args moe_grouped_args_of(const struct matrix *w, int n_pairs, int most)
{
    struct moe_grouped_args p = {};
    p.w = *w;
    p.slot = w->max_tile_bytes;
    p.n_pairs = n_pairs;
    p.most = most;
    return p;
}

int moe_grouped_records(const struct model_shape *s)
{
    int rows = s->max_tokens < LIST_ROWS ? s->max_tokens : LIST_ROWS;
    int width = s->heads > s->n_embd ? s->heads : s->n_embd;
    return rows * ceil_div(width, TILE_K);
}
int moe_grouped_hidden_records(const struct model_shape *s)
{
    /* moe_grouped.cu: one record per pair; moe_quad.cu: four per possible entry */
    int rows = s->max_tokens < LIST_ROWS ? s->max_tokens : LIST_ROWS;
    rows = rows > 4 * QUAD_ROWS ? rows : 4 * QUAD_ROWS;
    return rows * s->n_expert_used * ceil_div(s->n_ff_exp, TILE_K) + 1; /* and one zero record */
}

bool moe_grouped_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                      const struct matrix *down, int n_pairs, int most, int width)
{
    struct moe_grouped_args up = moe_grouped_args_of(gate_up, n_pairs, most);
    size_t shared;
    return gate_up->set <= SET_CODES && down->set <= SET_CODES && gate_up->n_seg <= 2 &&
           down->n_seg == 1 && down->n_tiles >= DOWN_WARPS &&
           unit_warps(cu, &up, width, &shared) > 0 &&
           down_shared(moe_grouped_args_of(down, n_pairs, most), width / 8, 4) <= cu->shared_limit;
}

void moe_grouped(struct cuda_backend *cu, const struct experts *e, const struct route_tables *route,
                 int n_pairs, int most, int width, bool narrow)
{
    const struct matrix *gate_up = e->gate_up, *down = e->down;
    struct moe_grouped_args p = moe_grouped_args_of(gate_up, n_pairs, most);
    p.route = *route;
    p.used = e->rule.used;
    p.act = e->act;
    p.plain = experts_are_plain(e);
    p.hidden_kt = down->n_kt;
    p.x = cu->forms.records;
    p.x_scale = cu->forms.scale;
    p.hidden = cu->mlp.hidden_records;
    struct moe_grouped_args q = moe_grouped_args_of(down, n_pairs, most);
    q.route = *route;
    q.x = cu->mlp.hidden_records;
    q.y = cu->mlp.expert_out;
    q.narrow = narrow;
    q.plain = p.plain;
    moe_grouped_up(cu, p, width);
    moe_grouped_down(cu, q, width);
}
