/*
 * Experts of a batched decode, 9 to LIST_ROWS rows of K-quants. Routing sorts the rows by expert into a
 * list of which rows go to which expert, eight (or sixteen) at a time. Blocks stay: the list times the
 * tiles of an expert is cut evenly between them, so that all of them read as many bytes, and the rings
 * of weights run on from one expert into the next.
 *
 * Down: k is short, so a warp owns its tiles and takes fragments from shared memory, where the rows of
 * this expert and of the next one lie. The weighted sum over a row's experts is another kernel
 * (large.cu).
 *
 * H200, 32 rows over 128 experts: 2.9 TB/s of 4.4, at 48 to 55 % of the issue slots: 310
 * instructions a Q4_K tile (230 of them decoding and multiplying), 530 a Q6_K tile.
 */
#include "backend/cuda/rows.cuh"

#include <math.h>

enum { LIST_WARPS = 8, PAIR_WARPS = 12, PAIR_SLOTS = 6, MAX_USED = 16, MAX_EXPERTS = 512 };

struct list_args {
    struct matrix w;
    struct route_tables route;
    const uint8_t *x;     /* up: (rows, n_kt) records; down: (sorted pairs, n_kt) */
    const float *x_scale; /* up: (rows) what undoes a row's scale */
    uint8_t *hidden;      /* up: (sorted pairs, hidden_kt) records, over 16 */
    float *y;             /* down: (pairs, n_out) */
    int used, slot, hidden_kt, n_pairs, most; /* most: entries the list may have */
};

/* Routing: one block chooses the experts of every row, a warp to a row, and makes the list. Chosen
 * are the largest, in the order of rows.cuh. The order of
 * an expert's rows is whatever the atomics give: no result depends on it. */
struct list_route_args {
    const float *logits; /* (parts, rows, n_expert), to be added up */
    struct route_tables route;
    float *weight; /* (rows * used) */
    int parts, rows, n_expert, used, width;
    bool renormalise;
    float scale;
};

struct list_route_shared {
    int count[MAX_EXPERTS], start[MAX_EXPERTS], tile0[MAX_EXPERTS];
    uint16_t chosen[LIST_ROWS * MAX_USED], rank[LIST_ROWS * MAX_USED]; /* of a pair */
};

template <int PER, int BITS>
DEVICE void list_route_row(struct list_route_shared *s, const struct list_route_args &p, int row)
{
    const float *logits = p.logits + row * p.n_expert;
    int lane = lane_id();
    float v[PER], top = -INFINITY, total = 0.0f, mine_v = 0.0f;
    uint32_t key[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int e = i * 32 + lane;
        bool on = e < p.n_expert;
        v[i] = on ? logits[e] : -INFINITY;
#pragma unroll 4
        for (int j = 1; j < p.parts; j++)
            v[i] += on ? logits[j * p.rows * p.n_expert + e] : 0.0f;
        key[i] = on ? choice_key<BITS>(v[i], e) : 0;
        top = fmaxf(top, v[i]);
    }
    top = warp_max(top);
    int e = choose_largest<PER, BITS>(key, p.used, p.n_expert);
    bool on = lane < p.used;
#pragma unroll
    for (int i = 0; i < PER; i++) { /* the logit of the chosen: lane e % 32 has it */
        float u = __shfl_sync(FULL_WARP, v[i], e & 31);
        mine_v = e >> 5 == i ? u : mine_v;
    }
    float w = on ? fast_exp(mine_v - top) : 0.0f;
    if (p.renormalise)
        total = w;
    else
#pragma unroll
        for (int i = 0; i < PER; i++)
            total += fast_exp(v[i] - top);
    total = warp_sum(total);
    if (on) {
        int pair = row * p.used + lane;
        p.weight[pair] = w / total * p.scale;
        s->chosen[pair] = (uint16_t)e;
        s->rank[pair] = (uint16_t)atomicAdd(&s->count[e], 1);
    }
}

static __global__ void __launch_bounds__(1024)
    list_route_kernel(const __grid_constant__ struct list_route_args p)
{
    SHARED_BYTES(shared);
    struct list_route_shared *s = (struct list_route_shared *)shared;
    int tid = (int)threadIdx.x, lane = lane_id();
    if (tid < MAX_EXPERTS)
        s->count[tid] = 0;
    __syncthreads();
    dependency_wait();
    dependency_trigger();
#pragma unroll 1
    for (int row = warp_id(); row < p.rows; row += 32) {
        if (p.n_expert <= 128)
            list_route_row<4, 7>(s, p, row);
        else
            list_route_row<MAX_EXPERTS / 32, 9>(s, p, row);
    }
    __syncthreads();
    if (tid < 32) { /* one warp: running sums over the experts */
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
    for (int i = tid; i < p.rows * p.used; i += 1024)
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

void list_route(struct cuda_backend *cu, const struct route_tables *route, int parts, int n_expert,
                int rows, int width)
{
    const struct shape *s = &cu->shape;
    struct list_route_args p = {};
    CHECK(s->n_expert_used <= MAX_USED && n_expert <= MAX_EXPERTS && rows <= LIST_ROWS,
          "%d of %d experts for %d rows", s->n_expert_used, n_expert, rows);
    p.logits = cu->router;
    p.route = *route;
    p.weight = cu->route_weight;
    p.parts = parts;
    p.rows = rows;
    p.n_expert = n_expert;
    p.used = s->n_expert_used;
    p.width = width;
    p.renormalise = s->norm_topk;
    p.scale = s->expert_scale;
    cuda_launch(cu, list_route_kernel, dim3(1), 1024, sizeof(struct list_route_shared),
                LAUNCH_EARLY, p);
}

/* The list and the pairs, in shared memory: one trip for all of it. */
struct list_tables {
    int *n, *tiles, *pairs;
};
DEVICE struct list_tables list_load(const struct list_args &p, uint8_t *to)
{
    int tid = (int)threadIdx.x;
    struct list_tables t;
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
static __host__ __device__ size_t list_bytes(int n_pairs, int most)
{
    return (size_t)(4 + 3 * most + n_pairs + 3) / 4 * 16;
}

/* hidden = silu(x Wg^T) * (x Wu^T), sixteen rows to an entry: items are (entry of the list, 16 hidden
 * units), which the warps of a block share, a slice of k each. */
template <int STAGES>
static __global__ void __launch_bounds__(16 * 32)
    list_up_kernel(const __grid_constant__ struct list_args p)
{
    SHARED_BYTES(shared);
    enum { NT = 2 };
    int warps = (int)blockDim.x >> 5, w = warp_id(), g = lane_id() >> 2, half = p.w.n_tiles / 2;
    int one_ring = ring_bytes(STAGES, p.slot);
    uint8_t *rings = shared + list_bytes(p.n_pairs, p.most);
    float *sums = (float *)(rings + warps * one_ring); /* (2, warps, 2, NT) tiles */
    const int sum_warp = 2 * NT * SUM_TILE;
    struct tile_plane gate = plane_of(p.w, 0, w), up = plane_of(p.w, half, w);
    struct tile_ring<STAGES> ring;
    ring_init(ring, rings + w * one_ring, p.slot);

    dependency_wait();
    dependency_trigger(); /* after the wait: the next kernel may read the list at once */
    struct list_tables list = list_load(p, shared);
    long long n = (long long)list.n[0] * half;
    int first = (int)(n * (long long)blockIdx.x / (long long)gridDim.x);
    int end = (int)(n * (long long)(blockIdx.x + 1) / (long long)gridDim.x);
    int entry = first / half, unit = first - entry * half, from = 0, count = 0, turn = 0;
    int f_left = 2 * (end - first), f_entry = entry, f_unit = unit;
    auto fetch = [&]() { /* gate, up, gate, up */
                         bool odd = f_left & 1, real = f_left > 0;
                         const struct tile_plane &q = odd ? up : gate;
                         ring_fetch(ring, plane_tile(q, list.tiles[real ? 3 * f_entry : 0], f_unit),
                                    q.bytes, real);
                         f_left--;
                         if (odd && ++f_unit == half) {
                             f_unit = 0;
                             f_entry++;
                         }
    };
#pragma unroll 1
    for (int i = 0; i < STAGES; i++)
        fetch();

    struct row_frag x[NT];
    float undo[NT][2];
#pragma unroll 1
    for (int item = first; item < end; item++) {
        if (item == first || unit == 0) { /* another expert, other rows */
            from = list.tiles[3 * entry + 1];
            count = list.tiles[3 * entry + 2];
#pragma unroll
            for (int i = 0; i < NT; i++) {
                bool real = i * 8 + g < count;
                int row = list.pairs[from + (real ? i * 8 + g : 0)] / p.used;
                frag_load(x[i], p.x + (size_t)(row * p.w.n_kt + w) * (size_t)RECORD);
                to_columns(p.x_scale[row], undo[i]);
            }
        }
        float *to = sums + (item & 1) * warps * sum_warp;
#pragma unroll 1
        for (int i = 0; i < 2; i++) {
            float acc[NT][4] = {};
            frag_tile<NT>(i ? up.kind : gate.kind, ring_take(ring), x, acc);
            ring_give(ring);
            fetch();
#pragma unroll
            for (int j = 0; j < NT; j++)
                put_tile(to + w * sum_warp + (i * NT + j) * SUM_TILE, acc[j], undo[j]);
        }
        __syncthreads();
        /* Half a warp to a row of the step; another warp's turn every time. */
        int t = (int)threadIdx.x - turn * 32;
        t += t < 0 ? (int)blockDim.x : 0;
        turn = turn + 1 == warps ? 0 : turn + 1;
        int r = t & 15, row = unit * TILE_ROWS + r;
#pragma unroll 1
        for (int col = t >> 4; col < ((count + 1) & ~1); col += (int)blockDim.x >> 4) {
            float v = 0.0f;
            if (col < count && row < p.w.seg[0].rows) {
                const float *sum = to + col * SUM_ROW; /* tiles of eight rows follow each other */
                v = take_tile(sum, warps, sum_warp, 0, r);
                float up = take_tile(sum + NT * SUM_TILE, warps, sum_warp, 0, r);
                if (p.w.bias) {
                    v += p.w.bias[row];
                    up += p.w.bias[p.w.n_out / 2 + row];
                }
                v = clamp_half(silu(v) * up * HIDDEN_SCALE);
            }
            put_hidden(p.hidden + (size_t)((from + col) * p.hidden_kt) * (size_t)RECORD, row, v,
                       col < count, unit == half - 1, p.hidden_kt);
        }
        if (++unit == half) {
            unit = 0;
            entry++;
        }
    }
    copy_async_wait<0>();
}

/* The same, eight rows to an entry: a warp owns its units outright, and takes its rows from where they
 * are (the L2: few to an expert, they add little to what is read). Units are dealt out SM by SM; one
 * block to an SM, since registers for the next slice's rows pay better than more warps. */
template <int KIND>
static __global__ void __launch_bounds__(PAIR_WARPS * 32, 1)
    pair_kernel(const __grid_constant__ struct list_args p)
{
    SHARED_BYTES(shared);
    int warps = (int)blockDim.x >> 5, w = warp_id(), g = lane_id() >> 2, half = p.w.n_tiles / 2;
    struct pair_walk<PAIR_SLOTS> walk;
    walk.gate = plane_of(p.w, 0, 0);
    walk.up = plane_of(p.w, half, 0);
    walk.n_kt = p.w.n_kt;
    ring_init(walk.ring,
              shared + list_bytes(p.n_pairs, p.most) + w * ring_bytes(PAIR_SLOTS, p.slot), p.slot);
    dependency_wait();
    dependency_trigger(); /* after the wait: the next kernel may read the list at once */
    struct list_tables list = list_load(p, shared);
    int n = list.n[0] * half;
    int step = (int)gridDim.x * warps, unit = (int)blockIdx.x + (int)gridDim.x * w, f_unit = unit;
    auto next = [&](int *expert, int *tile) {
        if (f_unit >= n)
            return false;
        int entry = f_unit / half;
        *expert = list.tiles[3 * entry];
        *tile = f_unit - entry * half;
        f_unit += step;
        return true;
    };
    pair_start(walk, next);
#pragma unroll 1
    for (; unit < n; unit += step) {
        int entry = unit / half, from = list.tiles[3 * entry + 1],
            count = list.tiles[3 * entry + 2];
        int row = list.pairs[from + (g < count ? g : 0)] / p.used;
        const uint8_t *record = p.x + (size_t)(row * p.w.n_kt) * (size_t)RECORD;
        float acc[2][1][4] = {}, undo[2];
        to_columns(p.x_scale[row], undo);
        struct row_frag x[1], ahead;
        frag_load(ahead, record);
#pragma unroll 2
        for (int kt = 0; kt < p.w.n_kt; kt++) {
            x[0] = ahead;
            if (kt + 1 < p.w.n_kt) /* on its way during the products */
                frag_load(ahead, record += RECORD);
            pair_slice<1, KIND>(walk, x, acc, next);
        }
        put_hidden_tile(
            acc[0][0], acc[1][0], undo, p.w, unit - entry * half, p.hidden_kt, [&](int col) {
                return col < count
                           ? p.hidden + (size_t)((from + col) * p.hidden_kt) * (size_t)RECORD
                           : NULL;
            });
    }
    copy_async_wait<0>();
}

/* y[pair] = hidden Wd^T: items are (entry of the list, 16 outputs); a warp takes every eighth. */
template <int NT, int STAGES>
static __global__ void __launch_bounds__(LIST_WARPS * 32, 2)
    list_down_kernel(const __grid_constant__ struct list_args p)
{
    SHARED_BYTES(shared);
    int w = warp_id(), lane = lane_id(), g = lane >> 2, c = lane & 3;
    int n_kt = p.w.n_kt, n_tiles = p.w.n_tiles, rows_bytes = NT * 8 * n_kt * RECORD;
    uint8_t *bs = shared + list_bytes(p.n_pairs, p.most); /* (2, n_kt, 8 NT) records */
    int one_ring = ring_bytes(STAGES, p.slot);
    struct tile_plane plane = plane_of(p.w, 0, 0);
    struct tile_ring<STAGES> ring;
    ring_init(ring, bs + 2 * rows_bytes + w * one_ring, p.slot);

    dependency_trigger();
    /* The list was made before the kernel in front began. */
    struct list_tables list = list_load(p, shared);
    long long n = (long long)list.n[0] * n_tiles;
    int first = (int)(n * (long long)blockIdx.x / (long long)gridDim.x);
    int end = (int)(n * (long long)(blockIdx.x + 1) / (long long)gridDim.x);
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
            f_item += LIST_WARPS;
            f_tile += LIST_WARPS;
        }
    };
    /* The rows of an entry, to the buffer of its parity: slice by slice, a record a row. */
    auto fetch_rows = [&](int entry) {
        if (entry * n_tiles < end) {
            int from = list.tiles[3 * entry + 1], count = list.tiles[3 * entry + 2];
            uint8_t *to = bs + (entry & 1) * rows_bytes;
#pragma unroll 1
            for (int i = (int)threadIdx.x; i < n_kt * NT * 8 * (RECORD / 16);
                 i += LIST_WARPS * 32) {
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
    for (int i = 0; i < STAGES; i++)
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
        for (; item < stop; item += LIST_WARPS) {
            int tile = item - entry * n_tiles;
            float acc[NT][4] = {};
#pragma unroll 1
            for (int kt = 0; kt < n_kt; kt++) {
                struct row_frag x[NT];
#pragma unroll
                for (int i = 0; i < NT; i++)
                    frag_load(x[i], rows + (kt * NT + i) * 8 * RECORD);
                frag_tile<NT>(plane.kind, ring_take(ring), x, acc);
                ring_give(ring);
                fetch();
            }
            int row = tile * TILE_ROWS + g;
#pragma unroll
            for (int i = 0; i < NT; i++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    int col = i * 8 + 2 * c + (e & 1), r = row + 8 * (e >> 1);
                    if (col < count && r < p.w.n_out)
                        p.y[(size_t)list.pairs[from + col] * (size_t)p.w.n_out + (size_t)r] =
                            acc[i][e] * (1.0f / HIDDEN_SCALE);
                }
        }
        copy_async_wait<
            0>(); /* the next rows have landed (and where the ring shares the count, it) */
        __syncthreads();
    }
    copy_async_wait<0>();
}

static size_t up_shared(const struct list_args &p, int stages)
{
    return list_bytes(p.n_pairs, p.most) +
           (size_t)p.w.n_kt * (size_t)(ring_bytes(stages, p.slot) + 8 * SUM_TILE * 4);
}
static size_t down_shared(const struct list_args &p, int nt, int stages)
{
    return list_bytes(p.n_pairs, p.most) + (size_t)(2 * nt * 8 * p.w.n_kt * RECORD) +
           (size_t)(LIST_WARPS * ring_bytes(stages, p.slot));
}

/* Two blocks to an SM where they fit. */
static dim3 list_grid(const struct cuda_backend *cu, size_t shared, int threads)
{
    bool two = threads <= 256 && shared <= cu->shared_per_sm / 2 - 1024;
    return dim3((unsigned)(cu->n_sm * (two ? 2 : 1)));
}

static size_t pair_shared(const struct list_args &p, int warps)
{
    return list_bytes(p.n_pairs, p.most) + (size_t)(warps * ring_bytes(PAIR_SLOTS, p.slot));
}

static void list_up(struct cuda_backend *cu, const struct list_args &p, int width)
{
    if (width == 8) {
        int warps = PAIR_WARPS;
        while (warps > 1 && pair_shared(p, warps) > cu->shared_limit)
            warps--;
        size_t shared = pair_shared(p, warps);
        dim3 grid((unsigned)cu->n_sm);
        if (p.w.seg[0].kind == TILE_Q4_K && p.w.seg[p.w.n_seg - 1].kind == TILE_Q4_K)
            cuda_launch(cu, pair_kernel<TILE_Q4_K>, grid, warps * 32, shared, LAUNCH_EARLY, p);
        else
            cuda_launch(cu, pair_kernel<-1>, grid, warps * 32, shared, LAUNCH_EARLY, p);
        return;
    }
    int threads = p.w.n_kt * 32;
    size_t shared = up_shared(p, 3);
    if (shared <= cu->shared_per_sm / 2 - 1024)
        cuda_launch(cu, list_up_kernel<3>, list_grid(cu, shared, threads), threads, shared,
                    LAUNCH_EARLY, p);
    else {
        shared = up_shared(p, 2);
        cuda_launch(cu, list_up_kernel<2>, list_grid(cu, shared, threads), threads, shared,
                    LAUNCH_EARLY, p);
    }
}

static void list_down(struct cuda_backend *cu, const struct list_args &p, int width)
{
    int threads = LIST_WARPS * 32;
    size_t shared = down_shared(p, width / 8, 3);
    bool three = shared <= cu->shared_per_sm / 2 - 1024;
    shared = three ? shared : down_shared(p, width / 8, 2);
    dim3 grid = list_grid(cu, shared, threads);
    if (width == 8 && three)
        cuda_launch(cu, list_down_kernel<1, 3>, grid, threads, shared, LAUNCH_EARLY, p);
    else if (width == 8)
        cuda_launch(cu, list_down_kernel<1, 2>, grid, threads, shared, LAUNCH_EARLY, p);
    else if (three)
        cuda_launch(cu, list_down_kernel<2, 3>, grid, threads, shared, LAUNCH_EARLY, p);
    else
        cuda_launch(cu, list_down_kernel<2, 2>, grid, threads, shared, LAUNCH_EARLY, p);
}

static struct list_args list_args_of(const struct matrix *w, int n_pairs, int most)
{
    struct list_args p = {};
    p.w = *w;
    p.slot = w->max_tile_bytes;
    p.n_pairs = n_pairs;
    p.most = most;
    return p;
}

int list_records(const struct shape *s)
{
    int rows = s->max_tokens < LIST_ROWS ? s->max_tokens : LIST_ROWS;
    int width = s->n_heads * s->head_dim;
    width = width > s->n_embd ? width : s->n_embd;
    return rows * ceil_div(width, TILE_K);
}
int list_hidden_records(const struct shape *s)
{
    /* list.cu: a record a pair; few.cu: one for every row of every expert there may be */
    int rows = s->max_tokens < LIST_ROWS ? s->max_tokens : LIST_ROWS;
    rows = rows > FEW_ROWS * FEW_ROWS ? rows : FEW_ROWS * FEW_ROWS;
    return rows * s->n_expert_used * ceil_div(s->n_ff_exp, TILE_K) + 1; /* and one of zeros */
}

bool list_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
               const struct matrix *down, int n_pairs, int most, int width)
{
    struct list_args up = list_args_of(gate_up, n_pairs, most);
    return gate_up->set == SET_K && down->set == SET_K && gate_up->n_kt <= 16 &&
           gate_up->n_seg <= 2 && down->n_seg == 1 && down->n_tiles >= LIST_WARPS &&
           (width == 8 ? pair_shared(up, 4) : up_shared(up, 2)) <= cu->shared_limit &&
           down_shared(list_args_of(down, n_pairs, most), width / 8, 2) <= cu->shared_limit;
}

void list_experts(struct cuda_backend *cu, const struct matrix *gate_up, const struct matrix *down,
                  const struct route_tables *route, int n_pairs, int most, int width)
{
    struct list_args p = list_args_of(gate_up, n_pairs, most);
    p.route = *route;
    p.used = cu->shape.n_expert_used;
    p.hidden_kt = down->n_kt;
    p.x = cu->records;
    p.x_scale = cu->half_scale;
    p.hidden = cu->hidden_records;
    struct list_args q = list_args_of(down, n_pairs, most);
    q.route = *route;
    q.x = cu->hidden_records;
    q.y = cu->expert_out;
    list_up(cu, p, width);
    list_down(cu, q, width);
}
