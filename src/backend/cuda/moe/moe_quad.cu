/*
 * Experts of a batched decode, up to QUAD_ROWS rows, quantised weights: hidden = act(x Wg^T, x
 * Wu^T), y = sum over the chosen of weight * hidden Wd^T, in one kernel.
 * Work list: so few rows rarely share an expert (of 24 rows with eight of 128 experts each, two
 * do), so an entry is (expert, up to four of the rows that chose it). Every block builds the list
 * from the router's logits.
 * Mapping: one block per SM. Gate and up: the warps of a block split k in slices of 256 columns.
 * The slices' rows stay in registers while the block works through its share of list x tiles of an
 * expert, and it meets every few tiles to add up. Then all blocks meet at a grid barrier, with the
 * first tiles of down already in flight. Down: a block owns 16 outputs for the whole list, and the
 * weighted sum of every row.
 * Where a grid barrier is impossible (in the simulator; where backends share a GPU; where there are
 * more outputs than SMs), the kernel is launched once per phase.
 * Limit: the read of the chosen experts, then start, waits and the slowest SM. On an H200, 4 rows
 * and 16: norm and logits 3.0 us (16: a kernel of its own), choice 1.6 and 2.6, first tile after
 * 4.9, gate and up 11 and 32, grid barrier 2.6 and 2.9, down 7.6 and 21 (slowest block 11 and 28),
 * end 0.7 and 0.9. In all 37 and 75 us, where reading takes 18 and 50.
 */
#include "backend/cuda/core/dot_one.cuh"
#include "backend/cuda/core/quad.cuh"

#include <math.h>

enum { UP_BATCH = 4 };
enum { QUAD_EXPERTS = 128, MAX_ENTRIES = QUAD_ROWS * MAX_USED };

struct grid_barrier;

/* Phases of a launch; with both, blocks meet at the grid barrier. */
enum { QUAD_UP = 1, QUAD_DOWN = 2 };

struct moe_quad_args {
    struct matrix up, down;
    const float *logits;  /* (rows, n_expert) */
    const uint8_t *x;     /* (rows, n_kt) records */
    const float *x_scale; /* (rows) inverse of a row's scale */
    uint8_t *hidden;      /* (entries, 4, n_kt of down) records, scaled by 1/16 */
    float *y;             /* (rows, n_out) */
    struct grid_barrier *meeting;
    int rows, slot, phases;
    struct gating act;
    struct route_rule rule;
};

/* Grid barrier in global memory. Successive launches alternate between the two counters. */
struct grid_barrier {
    uint32_t turn, arrived[2];
};

size_t grid_barrier_bytes(void)
{
    return sizeof(struct grid_barrier);
}

/* The list; every block has a copy in shared memory. An entry is an expert and up to four of the
 * rows that chose it. */
struct __align__(16) moe_quad_list
{
    float weight[MAX_ENTRIES][4];         /* weights of an entry's rows */
    uint32_t rows[MAX_ENTRIES];           /* rows of an entry, one byte each; 255: none */
    uint32_t chose[QUAD_EXPERTS];         /* bit r of chose[e]: row r chose expert e */
    uint16_t expert[MAX_ENTRIES];         /* expert of an entry; ascending */
    uint16_t first[QUAD_EXPERTS];         /* first entry of an expert */
    uint16_t chosen[QUAD_ROWS][MAX_USED]; /* QUAD_SPREAD: an expert or NO_EXPERT */
};

/* Compile-time knowledge of the experts: none, experts_are_plain, route_rule.spread. */
enum { QUAD_ANY, QUAD_PLAIN, QUAD_SPREAD };

/* One warp chooses the experts of a row. */
template <int WHAT>
DEVICE void moe_quad_choose_row(struct moe_quad_list *l, const struct moe_quad_args &p, int row)
{
    enum { PER = QUAD_EXPERTS / 32 };
    const float *logits = p.logits + row * p.rule.n_expert;
    int lane = lane_id();
    float v[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        v[i] = i * 32 + lane < p.rule.n_expert ? load_float_l2(logits + i * 32 + lane) : 0.0f;
    if constexpr (WHAT == QUAD_SPREAD) {
        int here, e = route_present(v, p.rule, &here);
        if (lane < here)
            atomicOr(&l->chose[e], 1u << row);
        if (lane < p.rule.used)
            l->chosen[row][lane] = (uint16_t)(lane < here ? e : (int)NO_EXPERT);
        return;
    }
    int e = route_choose(v, rule_as<WHAT == QUAD_PLAIN>(p.rule));
    if (lane < p.rule.used) {
        atomicOr(&l->chose[e], 1u << row);
        l->chosen[row][lane] = (uint16_t)e;
    }
}

/* Called before the wait. */
DEVICE void moe_quad_clear(struct moe_quad_list *l)
{
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < QUAD_EXPERTS; i += (int)blockDim.x)
        l->chose[i] = 0;
    __syncthreads();
}

/* Index of the list, in the registers of each warp. */
struct moe_quad_index {
    uint32_t chose[QUAD_EXPERTS / 32]; /* rows that chose expert 32 i + lane */
    int first[QUAD_EXPERTS / 32];      /* its first entry */
    int n;                             /* entries in all */
};

/* Called by the whole block; every warp counts for itself. Code that runs once waits for its
 * instructions to be fetched, so it is short. */
template <int WHAT>
DEVICE void moe_quad_choose(struct moe_quad_list *l, const struct moe_quad_args &p,
                            struct moe_quad_index &f)
{
    int warps = (int)blockDim.x >> 5, lane = lane_id();
#pragma unroll 1
    for (int row = warp_id(); row < p.rows; row += warps)
        moe_quad_choose_row<WHAT>(l, p, row);
    __syncthreads();
    f.n = 0;
#pragma unroll
    for (int i = 0; i < QUAD_EXPERTS / 32; i++) {
        f.chose[i] = l->chose[i * 32 + lane];
        f.first[i] = f.n;
        uint32_t some = __ballot_sync(FULL_WARP, f.chose[i]);
#pragma unroll 1
        for (int k = 0; some; some = __ballot_sync(FULL_WARP, __popc(f.chose[i]) > 4 * ++k)) {
            f.first[i] += __popc(some & ((1u << lane) - 1));
            f.n += __popc(some);
        }
    }
}

/* The expert of an entry. */
DEVICE int moe_quad_expert(const struct moe_quad_index &f, int entry)
{
    int e = 0;
#pragma unroll
    for (int i = 0; i < QUAD_EXPERTS / 32; i++) {
        uint32_t here = __ballot_sync(FULL_WARP, f.first[i] <= entry && f.chose[i]);
        e = here ? i * 32 + 31 - __clz((int)here) : e;
    }
    return e;
}

/* Writes the list; a warp has 32 experts. The block meets before it is read. */
DEVICE void moe_quad_write(struct moe_quad_list *l, const struct moe_quad_index &f)
{
    int lane = lane_id(), warps = (int)blockDim.x >> 5;
#pragma unroll 1
    for (int i = warp_id(); i < QUAD_EXPERTS / 32; i += warps) {
        uint32_t m = l->chose[i * 32 + lane];
        int at = i < 2 ? (i ? f.first[1] : f.first[0]) : (i > 2 ? f.first[3] : f.first[2]);
        l->first[i * 32 + lane] = (uint16_t)at;
#pragma unroll 1
        for (; m; at++) {
            uint32_t rows = ~0u;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (!m)
                    continue;
                rows &= ~((uint32_t)(256 - __ffs((int)m)) << 8 * j);
                m &= m - 1;
            }
            l->rows[at] = rows;
            l->expert[at] = (uint16_t)(i * 32 + lane);
        }
    }
}

/* Computes what down needs: the weights of every row. Called by the whole block; a row belongs to
 * the warp that chose its experts. */
template <int WHAT>
DEVICE void moe_quad_weigh(struct moe_quad_list *l, const struct moe_quad_args &p)
{
    int warps = (int)blockDim.x >> 5, lane = lane_id();
#pragma unroll 1
    for (int row = warp_id(); row < p.rows; row += warps) {
        const float *logits = p.logits + row * p.rule.n_expert;
        int e = lane < p.rule.used ? l->chosen[row][lane] : 0;
        if constexpr (WHAT == QUAD_SPREAD) {
            if (lane < p.rule.used && e != NO_EXPERT) {
                int rank = __popc(l->chose[e] & ((1u << row) - 1));
                l->weight[l->first[e] + rank / 4][rank % 4] =
                    load_float_l2(logits + e) * (1.0f / HIDDEN_SCALE);
            }
            continue;
        }
        float w = route_weigh(rule_as<WHAT == QUAD_PLAIN>(p.rule), e,
                              [&](int i) { return load_float_l2(logits + i); });
        int rank = __popc(l->chose[e] & ((1u << row) - 1));
        if (lane < p.rule.used)
            l->weight[l->first[e] + rank / 4][rank % 4] = w * (1.0f / HIDDEN_SCALE);
    }
}

/* The weighted biases of a row's experts, for output `at`. */
template <int WHAT>
DEVICE float moe_quad_bias(const struct moe_quad_list *l, const struct moe_quad_args &p, int row,
                           int at)
{
    float v = 0.0f;
#pragma unroll 1
    for (int k = 0; k < p.rule.used; k++) {
        int e = l->chosen[row][k];
        if (WHAT == QUAD_SPREAD && e == NO_EXPERT)
            break;
        int rank = __popc(l->chose[e] & ((1u << row) - 1));
        v += l->weight[l->first[e] + rank / 4][rank % 4] * p.down.bias[e * p.down.n_out + at];
    }
    return v * HIDDEN_SCALE;
}

/* Barrier over all blocks of the launch, with release and acquire. */
DEVICE void grid_barrier_arrive(struct grid_barrier *m, uint32_t turn) /* one thread */
{
    add_release(&m->arrived[turn & 1], 1);
    if (blockIdx.x == 0)
        m->arrived[~turn & 1] = 0; /* of the previous launch, and the next */
}
DEVICE void grid_barrier_wait(struct grid_barrier *m, uint32_t turn) /* one thread */
{
    while (load_acquire(&m->arrived[turn & 1]) < gridDim.x)
        ;
    if (blockIdx.x == 0)
        m->turn = turn + 1;
}

/* Adds up the warps' sums of a batch of items and writes their hidden units. Half a warp per row of
 * an item. */
template <bool PLAIN>
DEVICE void moe_quad_hidden(const struct moe_quad_args &p, const struct moe_quad_list *list,
                            const float *to, const float *scales, int item, int batch)
{
    int slices = p.up.n_kt, half = p.up.n_tiles / 2, n_kt = p.down.n_kt;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < batch * 64; i += (int)blockDim.x) {
        int it = item + (i >> 6), e = it / half, u = it - e * half, s = i >> 4 & 3;
        int r = i & 15, row = (int)(list->rows[e] >> 8 * s & 255), k = u * TILE_ROWS + r;
        float v = 0.0f;
        if (row < p.rows && k < p.up.seg[0].rows) {
            const float *from = to + (i >> 6) * slices * 128 + r * 4 + s;
            float gate = 0.0f, h = 0.0f;
#pragma unroll 8
            for (int j = 0; j < slices; j++) {
                gate += from[j * 128];
                h += from[j * 128 + 64];
            }
            gate *= scales[row];
            h *= scales[row];
            if (!PLAIN && p.up.bias) {
                const float *bias = p.up.bias + list->expert[e] * p.up.n_out + k;
                gate += bias[0];
                h += bias[p.up.n_out / 2];
            }
            v = clamp_half(gated_as<PLAIN>(p.act, gate, h) * HIDDEN_SCALE);
        }
        store_hidden(p.hidden + (size_t)((e * 4 + s) * n_kt) * (size_t)RECORD, k, v, row < p.rows,
                     u == half - 1, n_kt);
    }
}

/* A warp's place among a block's items of down: (tile of 16 outputs, entry, slice), the slice
 * fastest. */
struct moe_quad_item {
    int at, entry, kt; /* at: counts the items of all tiles */
};

/* The items of a block. EVEN: all items are divided evenly among the blocks, so two may share a
 * tile; otherwise a block has one tile. */
template <bool EVEN> struct moe_quad_span {
    int begin, end, per; /* EVEN: the block's first item, its last + 1; items of a tile */
    int entries, n_kt, step_entry, step_kt;
    __device__ __forceinline__ bool has(const struct moe_quad_item &i) const
    {
        return EVEN ? i.at < end : i.entry < entries;
    }
    /* True: the item is of another tile than the one before. */
    __device__ __forceinline__ bool advance(struct moe_quad_item &i) const
    {
        i.at += (int)blockDim.x >> 5;
        i.entry += step_entry;
        i.kt += step_kt;
        if (i.kt >= n_kt) {
            i.kt -= n_kt;
            i.entry++;
        }
        bool other = EVEN && i.entry >= entries;
        while (EVEN && i.entry >= entries)
            i.entry -= entries;
        return other;
    }
};
/* entries: 0 if the block computes nothing of down. first: the warp's first item. */
template <bool EVEN>
DEVICE struct moe_quad_span<EVEN> moe_quad_span_of(const struct matrix &down, int entries,
                                                   struct moe_quad_item &first) {
    struct moe_quad_span<EVEN> s;
    int warps = (int)blockDim.x >> 5, n_kt = down.n_kt;
    s.entries = EVEN ? max(entries, 1) : entries;
    s.n_kt = n_kt;
    s.step_entry = warps / n_kt;
    s.step_kt = warps - s.step_entry * n_kt;
    first.entry = warp_id() / n_kt;
    first.kt = warp_id() - first.entry * n_kt;
    first.at = s.begin = s.end = s.per = 0;
    if constexpr (EVEN) {
        s.per = s.entries * n_kt;
        uint32_t all =
            (uint32_t)(entries ? down.n_tiles * s.per : 0); /* times blocks: below 2^32 */
        uint32_t blocks =
            min(gridDim.x, (uint32_t)down.n_tiles); /* each has a tile's items or more */
        s.begin = (int)(all * min(blockIdx.x, blocks) / blocks);
        s.end = (int)(all * min(blockIdx.x + 1, blocks) / blocks);
        first.at = s.begin + warp_id();
        int in_tile = first.at % s.per;
        first.entry = in_tile / n_kt;
        first.kt = in_tile - first.entry * n_kt;
    }
    return s;
}

/* The order in which a warp copies tiles: its tiles of gate and up (PARTS 1: alternating), then
 * those of down. */
template <int PARTS, int STAGES, bool EVEN>
struct moe_quad_schedule {
    struct tile_ring<STAGES> ring;
    struct tile_plane plane[2], below;
    const struct moe_quad_list *list;
    const struct matrix *down;
    const uint8_t *gate_at, *up_at;
    int left, entry, unit, half; /* of gate and up; half: tiles of each */
    bool is_up;
    struct moe_quad_span<EVEN> span;
    struct moe_quad_item next; /* of down */
    __device__ __forceinline__ void find(int expert)
    {
        gate_at = plane_tile(plane[0], expert, unit);
        if (PARTS == 1)
            up_at = plane_tile(plane[1], expert, unit);
    }
    __device__ __forceinline__ void fetch_down()
    {
        bool real = span.has(next);
        ring_fetch<STAGES, true>(
            ring, plane_tile(below, list->expert[real ? next.entry : 0], 0) + next.kt * below.bytes,
            below.bytes, real);
        if (span.advance(next) && span.has(next))
            below = plane_of(*down, next.at / span.per, 0);
    }
    __device__ __forceinline__ void fetch()
    {
        if (left <= 0) {
            fetch_down();
            return;
        }
        if (PARTS == 1 && is_up) {
            ring_fetch<STAGES, true>(ring, up_at, plane[1].bytes, true);
            up_at += plane[1].row;
        } else {
            ring_fetch<STAGES, true>(ring, gate_at, plane[0].bytes, true);
            gate_at += plane[0].row;
        }
        is_up = PARTS == 1 && !is_up;
        if (is_up)
            return;
        left--;
        if (++unit == half) {
            unit = 0;
            entry++;
            if (left > 0)
                find(list->expert[entry]);
        }
    }
};

/* Loads slice w of this lane's row of an entry; if it has none, of some valid row. */
DEVICE void moe_quad_load(const struct moe_quad_args &p, struct row_frag &x, uint32_t rows, int w)
{
    int row = (int)(rows >> 8 * (lane_id() >> 3) & 255);
    row = row < p.rows ? row : 0;
    frag_load(x, p.x + (size_t)(row * p.up.n_kt + w) * (size_t)RECORD);
}
/* Like moe_quad_load, for hidden rows. */
DEVICE void moe_quad_load_hidden(const struct moe_quad_args &p, struct row_frag &x, uint32_t rows,
                                 int entry, int kt)
{
    int at = lane_id() >> 3;
    at = (rows >> 8 * at & 255) < 255 ? at : (__ffs((int)(~rows)) - 1) >> 3;
    frag_load(x, p.hidden + (size_t)((entry * 4 + at) * p.down.n_kt + kt) * (size_t)RECORD);
}

/* Adds up the warps' sums and writes y of a tile's 16 outputs. EVEN: each of the two
 * blocks that may share a tile adds its part to zeros (moe_quad_clear_y), so the order does not
 * matter; the one with the tile's first item adds the biases. */
template <int WHAT, bool EVEN>
DEVICE void moe_quad_reduce(const struct moe_quad_args &p, const struct moe_quad_list *list,
                            const float *sums, int tile, bool first)
{
    const struct seg *s = seg_of(p.down, tile);
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < p.rows * TILE_ROWS; i += (int)blockDim.x) {
        int row = (tile - s->tile0) * TILE_ROWS + (i & 15);
        if (row >= s->rows)
            continue;
        float *y = p.y + (size_t)(i >> 4) * (size_t)p.down.n_out + (size_t)(s->row0 + row);
        float v = take_tile(sums, (int)blockDim.x >> 5, p.rows * SUM_ROW, i >> 4, i & 15);
        if (WHAT != QUAD_PLAIN && p.down.bias && (!EVEN || first))
            v += moe_quad_bias<WHAT>(list, p, i >> 4, s->row0 + row);
        if (EVEN)
            atomicAdd(y, v);
        else
            *y = v;
    }
}

/* Clears y before blocks add to it. */
DEVICE void moe_quad_clear_y(const struct moe_quad_args &p)
{
    int n = p.rows * p.down.n_out, step = (int)(gridDim.x * blockDim.x);
#pragma unroll 1
    for (int i = (int)(blockIdx.x * blockDim.x + threadIdx.x); i < n; i += step)
        p.y[i] = 0.0f;
}

/*
 * hidden = act(x Wg^T, x Wu^T), then y = sum over the chosen of weight * hidden Wd^T. Gate and up:
 * items are (entry, 16 hidden units), divided evenly among blocks; PARTS 2: half of the warps have
 * gate tiles, the others up tiles. Down: a block owns 16 outputs, or where there are more of them
 * than blocks, its share of all items. Its warps divide the items and keep sums for every row. The rings run from one phase into the next: down's
 * first tiles are in flight while blocks wait at the grid barrier. UP, DOWN: kinds of tiles. WHAT
 * is known of the experts.
 */
template <int UP, int DOWN, int PARTS, int STAGES, int WHAT>
static __global__ void __launch_bounds__(512)
    moe_quad_kernel(const __grid_constant__ struct moe_quad_args p)
{
    SHARED_BYTES(shared);
    struct moe_quad_list *list = (struct moe_quad_list *)shared;
    struct marks mk;
    marks_begin(mk);
    int slices = p.up.n_kt, lane = lane_id(), half = p.up.n_tiles / 2;
    int warps = (int)blockDim.x >> 5, g = lane >> 2, c = lane & 3;
    int part0 = PARTS == 2 ? warp_id() / slices : 0, w = warp_id() - part0 * slices;
    int one_ring = ring_bytes(STAGES, p.slot);
    uint8_t *rings = shared + sizeof *list;
    float *scales = (float *)(rings + warps * one_ring); /* (QUAD_ROWS) */
    float *sums =
        scales + QUAD_ROWS; /* up: (2, batch, slices, gate up, 64); down: (warps, rows, 20) */
    constexpr bool EVEN = PARTS == 1;
    bool ups = p.phases & QUAD_UP, downs = p.phases & QUAD_DOWN;
    int tile = (int)blockIdx.x;
    downs &= EVEN || tile < p.down.n_tiles;
    bool together = ups && p.phases & QUAD_DOWN;
    struct moe_quad_schedule<PARTS, STAGES, EVEN> f;
    f.plane[0] = plane_of(p.up, part0 * half, w);
    f.plane[1] = plane_of(p.up, half, w);
    f.list = list;
    f.half = half;
    f.down = &p.down;
    f.is_up = false;
    struct row_frag x;
    ring_init(f.ring, rings + warp_id() * one_ring, p.slot);
    moe_quad_clear(list);
    mark(mk, 2);
    dependency_wait();
    dependency_trigger();
    for (int i = (int)threadIdx.x; i < p.rows; i += (int)blockDim.x)
        scales[i] = p.x_scale[i];
    mark(mk, 3);
    uint32_t turn = together ? load_acquire(&p.meeting->turn) : 0;
    struct moe_quad_index found;
    moe_quad_choose<WHAT>(list, p, found);
    int entries = found.n;
    mark(mk, 4);
    uint32_t n =
        ups ? (uint32_t)(entries * half) : 0; /* times the number of blocks: far below 2^32 */
    int first = (int)(n * blockIdx.x / gridDim.x), end = (int)(n * (blockIdx.x + 1) / gridDim.x);
    int entry = first / half, unit = first - entry * half, odd = 0;
    f.left = end - first;
    f.entry = entry;
    f.unit = unit;
    struct moe_quad_item now, load;
    f.span = moe_quad_span_of<EVEN>(p.down, downs ? entries : 0, now);
    f.next = load = now;
    if (EVEN)
        tile = min(now.at / f.span.per, p.down.n_tiles - 1);
    f.below = plane_of(p.down, downs ? tile : 0, 0);
    /* Issues the first tiles before the list is complete, except those of the next expert. */
    int asked = max(min(min(STAGES - 1, f.left - 1), half - unit - 1), 0);
    if (f.left > 0)
        f.find(moe_quad_expert(found, entry));
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) {
        if (i == asked) {
            moe_quad_write(list, found);
            __syncthreads();
        }
        f.fetch();
    }
    mark(mk, 1);
    moe_quad_weigh<WHAT>(list, p);
    if (EVEN && ups)
        moe_quad_clear_y(p);
    if (first < end)
        moe_quad_load(p, x, list->rows[entry], w);
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
                const uint8_t *there = ring_wait(f.ring);
                if (item + b == first && i == 0)
                    mark(mk, 5);
                quad_tile<UP>(f.plane[i].kind, there, x, acc);
                ring_release(f.ring);
                f.fetch();
                mine[i * 64] = acc[0];
                mine[i * 64 + 32] = acc[1];
            }
            if (++unit == half) { /* next expert, other rows */
                unit = 0;
                entry++;
                if (item + b + 1 < end)
                    moe_quad_load(p, x, list->rows[entry], w);
            }
        }
        __syncthreads();
        moe_quad_hidden<WHAT == QUAD_PLAIN>(p, list, to, scales, item, batch);
    }
    mark(mk, 6);
    __syncthreads();
    if (together && threadIdx.x == 0) {
        grid_barrier_arrive(p.meeting, turn);
        grid_barrier_wait(p.meeting, turn);
    }
    __syncthreads();
    mark(mk, 7);
    float *mine = sums + warp_id() * p.rows * SUM_ROW;
    struct row_frag prefetched;
    auto load_hidden = [&]() {
        if (f.span.has(load))
            moe_quad_load_hidden(p, prefetched, list->rows[load.entry], load.entry, load.kt);
        f.span.advance(load);
    };
    load_hidden();
    int begin = f.span.begin, stop = 0;
#pragma unroll 1
    do {
        if (EVEN) {
            tile = begin / f.span.per;
            stop = min((tile + 1) * f.span.per, f.span.end);
        }
        int kind = f.below.kind;
        if (EVEN && DOWN < 0)
            kind = seg_of(p.down, tile)->kind;
#pragma unroll 1
        for (int i = lane; i < p.rows * SUM_ROW && downs; i += 32)
            mine[i] = 0.0f;
        __syncwarp();
#pragma unroll 1
        for (; EVEN ? now.at < stop : f.span.has(now); f.span.advance(now)) {
            float acc[2] = {};
            x = prefetched;
            load_hidden();
            quad_tile<DOWN>(kind, ring_wait(f.ring), x, acc);
            ring_release(f.ring);
            f.fetch_down();
            int row = (int)(list->rows[now.entry] >> 8 * c & 255);
            if (row < p.rows) {
                float weight = list->weight[now.entry][c];
                mine[row * SUM_ROW + g] += weight * acc[0];
                mine[row * SUM_ROW + g + 8] += weight * acc[1];
            }
        }
        mark(mk, 8);
        __syncthreads();
        if (downs && (!EVEN || begin < stop))
            moe_quad_reduce<WHAT, EVEN>(p, list, sums, tile, begin == tile * f.span.per);
        begin = stop;
        if (EVEN && begin < f.span.end)
            __syncthreads(); /* the sums have been read */
    } while (EVEN && begin < f.span.end);
    copy_async_wait<0>();
    marks_end(mk, 9);
}

/* Launch configuration of a layer's experts. */
struct moe_quad_plan {
    int parts, stages, slot;
    size_t shared; /* 0: does not fit */
};
/* Wide experts of MXFP4 (gpt-oss) have a kernel without a switch over formats. */
static bool moe_quad_is_mxfp4(const struct matrix *gate_up, const struct matrix *down, int parts)
{
    return parts == 1 && matrix_kind(gate_up) == TILE_MXFP4 && matrix_kind(down) == TILE_MXFP4;
}
static struct moe_quad_plan moe_quad_plan_of(const struct cuda_backend *cu,
                                             const struct matrix *gate_up,
                                             const struct matrix *down, int rows)
{
    struct moe_quad_plan plan = {gate_up->n_kt <= 8 ? 2 : 1, 3, gate_up->max_tile_bytes, 0};
    if (down->max_tile_bytes > plan.slot)
        plan.slot = down->max_tile_bytes;
    for (; plan.parts; plan.parts--) {
        int warps = plan.parts * gate_up->n_kt;
        int sums = 2 * UP_BATCH * 128 * gate_up->n_kt, below = warps * rows * SUM_ROW;
        bool q4 = plan.slot <= format<TILE_Q4_K>::BYTES && plan.parts == 2;
        plan.stages = q4 || moe_quad_is_mxfp4(gate_up, down, plan.parts) ? 4 : 3;
        plan.shared = sizeof(struct moe_quad_list) +
                      (size_t)(QUAD_ROWS + (sums > below ? sums : below)) * sizeof(float) +
                      (size_t)(warps * ring_bytes(plan.stages, plan.slot));
        if (plan.shared <= cu->shared_limit)
            return plan;
    }
    plan.shared = 0;
    return plan;
}

bool moe_quad_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                   const struct matrix *down, int rows)
{
    return gate_up->n_expert <= QUAD_EXPERTS && rows >= 1 && rows <= QUAD_ROWS &&
           gate_up->set <= SET_CODES && down->set <= SET_CODES && gate_up->n_seg <= 2 &&
           gate_up->n_kt <= 16 && rows * gate_up->n_kt <= cu->forms.n_records &&
           moe_quad_plan_of(cu, gate_up, down, rows).shared;
}

template <int UP, int DOWN, int PARTS, int STAGES, bool PLAIN>
static void moe_quad_launch(struct cuda_backend *cu, struct moe_quad_args p, int threads,
                            size_t shared)
{
    auto kernel = moe_quad_kernel < UP, DOWN, PARTS, STAGES, PLAIN ? QUAD_PLAIN : QUAD_ANY > ;
    if constexpr (!PLAIN)
        if (p.rule.spread)
            kernel = moe_quad_kernel<UP, DOWN, PARTS, STAGES, QUAD_SPREAD>;
    dim3 grid((unsigned)cu->n_sm), outputs((unsigned)p.down.n_tiles);
    if (PARTS == 1 && p.down.n_tiles > cu->n_sm)
        outputs = grid;
    if (cu->can.grid_barrier && (PARTS == 1 || p.down.n_tiles <= cu->n_sm)) {
        p.phases = QUAD_UP | QUAD_DOWN;
        cuda_launch(cu, kernel, grid, threads, shared, LAUNCH_EARLY, p);
        return;
    }
    p.phases = QUAD_UP;
    cuda_launch(cu, kernel, grid, threads, shared, LAUNCH_EARLY, p);
    p.phases = QUAD_DOWN;
    cuda_launch(cu, kernel, outputs, threads, shared, LAUNCH_EARLY, p);
}

void moe_quad(struct cuda_backend *cu, const struct experts *e, float *y, int rows)
{
    struct moe_quad_args p = {};
    bool plain = experts_are_plain(e);
    p.up = *e->gate_up;
    p.down = *e->down;
    p.y = y;
    p.act = e->act;
    p.rule = e->rule;
    struct moe_quad_plan plan = moe_quad_plan_of(cu, &p.up, &p.down, rows);
    CHECK(p.rule.used <= MAX_USED && p.rule.n_expert <= QUAD_EXPERTS && plan.shared,
          "%d of %d experts", p.rule.used, p.rule.n_expert);
    p.logits = router_selected(cu, e);
    p.x = cu->forms.records;
    p.x_scale = cu->forms.scale;
    p.hidden = cu->mlp.hidden_records;
    p.rows = rows;
    p.slot = plan.slot;
    p.meeting = (struct grid_barrier *)cu->mlp.grid_barrier;
    bool q4 = p.up.seg[0].kind == TILE_Q4_K && p.up.seg[p.up.n_seg - 1].kind == TILE_Q4_K;
    int threads = plan.parts * p.up.n_kt * 32, kind = p.down.n_seg == 1 ? p.down.seg[0].kind : -1;
    if (q4 && kind == TILE_Q4_K && plan.parts == 2 && plain)
        moe_quad_launch<TILE_Q4_K, TILE_Q4_K, 2, 4, true>(cu, p, threads, plan.shared);
    else if (q4 && kind == TILE_Q6_K && plan.parts == 2 && plain)
        moe_quad_launch<TILE_Q4_K, TILE_Q6_K, 2, 3, true>(cu, p, threads, plan.shared);
    else if (q4 && kind == TILE_Q4_K && plan.parts == 2)
        moe_quad_launch<TILE_Q4_K, TILE_Q4_K, 2, 4, false>(cu, p, threads, plan.shared);
    else if (q4 && kind == TILE_Q6_K && plan.parts == 2)
        moe_quad_launch<TILE_Q4_K, TILE_Q6_K, 2, 3, false>(cu, p, threads, plan.shared);
    else if (moe_quad_is_mxfp4(&p.up, &p.down, plan.parts))
        moe_quad_launch<TILE_MXFP4, TILE_MXFP4, 1, 4, false>(cu, p, threads, plan.shared);
    else if (p.up.set == SET_K && p.down.set == SET_K && plan.parts == 2)
        moe_quad_launch<ANY_K, ANY_K, 2, 3, false>(cu, p, threads, plan.shared);
    else if (p.up.set == SET_K && p.down.set == SET_K)
        moe_quad_launch<ANY_K, ANY_K, 1, 3, false>(cu, p, threads, plan.shared);
    else if (plan.parts == 2)
        moe_quad_launch<ANY_CODES, ANY_CODES, 2, 3, false>(cu, p, threads, plan.shared);
    else
        moe_quad_launch<ANY_CODES, ANY_CODES, 1, 3, false>(cu, p, threads, plan.shared);
}
