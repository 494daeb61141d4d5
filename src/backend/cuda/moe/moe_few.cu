/*
 * Experts of 3 to 8 rows, quantised weights, where moe_quad.cu does not apply (more than 128
 * experts): y = sum over the chosen of weight * Wd act(Wg x, Wu x).
 * Mapping: the tensor core's eight columns are the eight rows. Each distinct chosen expert is read
 * once. The norm and the router run before (router.cu).
 * Limit: the read of the distinct experts.
 */
#include "backend/cuda/core/rows.cuh"

#include <math.h>

enum { FEW_WARPS = 16, DOWN_STAGES = 3, PAIR_SLOTS = 4, FEW_EXPERTS = FEW_ROWS * MAX_USED };

struct moe_few_args {
    struct matrix w;
    const float *logits;  /* (rows, n_expert) */
    const uint8_t *x;     /* up: (rows, n_kt) records */
    const float *x_scale; /* (rows) */
    uint8_t *hidden;      /* (distinct experts, FEW_ROWS, n_kt of down) records, scaled by 1/16 */
    const uint8_t *zeros; /* one record */
    float *y;             /* down: (rows, n_embd) */
    int rows, slot, hidden_kt;
    struct gating act; /* up */
    uint32_t per_kt;   /* 65536 / n_kt of down, rounded up: i * per_kt >> 16 equals i / n_kt */
    struct route_rule rule;
};

/* The experts chosen by each row. Every block has a copy in shared memory. */
struct __align__(16) moe_few_choice
{
    uint32_t rows[MAX_EXPERTS];          /* bit r of rows[e]: row r chose expert e */
    float weight[FEW_EXPERTS][FEW_ROWS]; /* weight of the i-th distinct expert for row r */
    int expert[FEW_EXPERTS];             /* distinct, ascending */
    uint8_t place[MAX_EXPERTS];          /* index of expert e in `expert` */
    uint16_t chosen[FEW_ROWS][MAX_USED]; /* SPREAD: an expert or NO_EXPERT */
    float chosen_weight[FEW_ROWS][MAX_USED];
};

/* One warp chooses the experts of a row and, if `weights`, their weights. SPREAD:
 * route_rule.spread. */
template <int PER, bool SPREAD>
DEVICE void moe_few_choose_row(struct moe_few_choice *ch, const struct moe_few_args &p, int row,
                               bool weights)
{
    const float *logits = p.logits + row * p.rule.n_expert;
    int lane = lane_id();
    float v[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        v[i] = i * 32 + lane < p.rule.n_expert ? load_float_l2(logits + i * 32 + lane) : -INFINITY;
    if constexpr (SPREAD) {
        int here, e = route_present(v, p.rule, &here);
        if (lane < p.rule.used)
            ch->chosen[row][lane] = (uint16_t)(lane < here ? e : (int)NO_EXPERT);
        if (lane < here) {
            atomicOr(&ch->rows[e], 1u << row);
            ch->chosen_weight[row][lane] = load_float_l2(logits + e);
        }
        return;
    }
    int e = route_choose(v, p.rule);
    if (lane < p.rule.used) {
        ch->chosen[row][lane] = (uint16_t)e;
        atomicOr(&ch->rows[e], 1u << row);
    }
    if (!weights)
        return;
    float w = route_weigh(p.rule, e, v);
    if (lane < p.rule.used)
        ch->chosen_weight[row][lane] = w;
}

/* Called by the whole block. Returns the number of distinct experts. */
template <bool SPREAD>
DEVICE int moe_few_choose(struct moe_few_choice *ch, const struct moe_few_args &p, bool weights)
{
    int warps = (int)blockDim.x >> 5, lane = lane_id(), tid = (int)threadIdx.x, n = 0;
#pragma unroll 1
    for (int i = tid; i < p.rule.n_expert; i += (int)blockDim.x)
        ch->rows[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int row = warp_id(); row < p.rows; row += warps) {
        if (p.rule.n_expert <= 128)
            moe_few_choose_row<4, SPREAD>(ch, p, row, weights);
        else
            moe_few_choose_row<MAX_EXPERTS / 32, SPREAD>(ch, p, row, weights);
    }
    __syncthreads();
    /* Every warp counts; the first one also writes the list. */
#pragma unroll 4
    for (int e0 = 0; e0 < p.rule.n_expert; e0 += 32) {
        bool some = e0 + lane < p.rule.n_expert && ch->rows[e0 + lane];
        uint32_t all = __ballot_sync(FULL_WARP, some);
        if (some && warp_id() == 0) {
            int at = n + __popc(all & ((1u << lane) - 1));
            ch->expert[at] = e0 + lane;
            ch->place[e0 + lane] = (uint8_t)at;
        }
        n += __popc(all);
    }
    __syncthreads();
    if (weights) {
#pragma unroll 1
        for (int i = tid; i < p.rows * MAX_USED; i += (int)blockDim.x) {
            int row = i / MAX_USED, k = i % MAX_USED;
            if (k < p.rule.used && (!SPREAD || ch->chosen[row][k] != NO_EXPERT))
                ch->weight[ch->place[ch->chosen[row][k]]][row] = ch->chosen_weight[row][k];
        }
        __syncthreads();
    }
    return n;
}

/* hidden = act(x Wg^T, x Wu^T) for every distinct expert. A unit is 16 hidden units of an expert. A
 * warp owns a unit over all of k. Units are dealt round-robin over the SMs, so that all SMs read
 * equally much. The rows are in shared memory: (n_kt, 8) records. Persistent, one block per SM. */
template <int KIND, bool SPREAD>
static __global__ void __launch_bounds__(FEW_WARPS * 32, 1)
    moe_few_up_kernel(const __grid_constant__ struct moe_few_args p)
{
    SHARED_BYTES(shared);
    struct moe_few_choice *ch = (struct moe_few_choice *)shared;
    int warps = (int)blockDim.x >> 5, w = warp_id(), g = lane_id() >> 2;
    int half = p.w.n_tiles / 2, n_kt = p.w.n_kt;
    uint8_t *rows = shared + sizeof *ch, *rings = rows + 8 * n_kt * RECORD;
    struct pair_schedule<PAIR_SLOTS> walk;
    walk.gate = plane_of(p.w, 0, 0);
    walk.up = plane_of(p.w, half, 0);
    walk.n_kt = n_kt;
    ring_init(walk.ring, rings + w * ring_bytes(PAIR_SLOTS, p.slot), p.slot);

    dependency_wait();
    dependency_trigger(); /* after the wait: the next kernel may read the logits at once */
    for (int i = (int)threadIdx.x; i < p.rows * n_kt * (RECORD / 16); i += (int)blockDim.x) {
        int r = i / (RECORD / 16), kt = r / p.rows, row = r - kt * p.rows;
        copy_async16(rows + (kt * 8 + row) * RECORD + (i - r * (RECORD / 16)) * 16,
                     p.x + (size_t)(row * n_kt + kt) * (size_t)RECORD +
                         (i - r * (RECORD / 16)) * 16);
    }
    copy_async_commit();
    float undo[2];
    to_columns(p.x_scale[g < p.rows ? g : 0], undo);
    int n = moe_few_choose<SPREAD>(ch, p, false) * half;
    int step = (int)gridDim.x * warps, unit = (int)blockIdx.x + (int)gridDim.x * w, f_unit = unit;
    auto next = [&](int *expert, int *tile) {
        if (f_unit >= n)
            return false;
        int pick = f_unit / half;
        *expert = ch->expert[pick];
        *tile = f_unit - pick * half;
        f_unit += step;
        return true;
    };
    pair_start(walk, next);
    copy_async_wait<0>();
    __syncthreads();

    struct row_frag x[1];
#pragma unroll 1
    for (; unit < n; unit += step) {
        float acc[2][1][4] = {};
#pragma unroll 1
        for (int kt = 0; kt < n_kt; kt++) {
            frag_load(x[0], rows + (kt * 8 + g) * RECORD);
            pair_slice<1, KIND>(walk, x, acc, next);
        }
        int pick = unit / half, expert = ch->expert[pick];
        uint32_t chose = ch->rows[expert];
        store_hidden_tile<false>(acc[0][0], acc[1][0], undo, p.w, p.act, expert, unit - pick * half,
                                 p.hidden_kt, [&](int col) {
                                     return chose >> col & 1
                                                ? p.hidden + (size_t)((pick * FEW_ROWS + col) *
                                                                      p.hidden_kt) *
                                                                 (size_t)RECORD
                                                : NULL;
                                 });
    }
    copy_async_wait<0>();
}

/* y = sum over the chosen of weight * hidden Wd^T. A block owns 16 outputs. Its warps divide the
 * (distinct expert, slice) pairs among them, and sum over the rows that chose the expert. */
template <int KIND, bool SPREAD>
static __global__ void __launch_bounds__(FEW_WARPS * 32)
    moe_few_down_kernel(const __grid_constant__ struct moe_few_args p)
{
    SHARED_BYTES(shared);
    struct moe_few_choice *ch = (struct moe_few_choice *)shared;
    int warps = (int)blockDim.x >> 5, w = warp_id(), lane = lane_id(), g = lane >> 2, c = lane & 3;
    int tile = (int)blockIdx.x, n_kt = p.w.n_kt, one_ring = ring_bytes(DOWN_STAGES, p.slot);
    const struct seg *s = seg_of(p.w, tile);
    float *sums = (float *)(shared + sizeof *ch + warps * one_ring);
    struct tile_plane plane = plane_of(p.w, tile, 0);
    struct tile_ring<DOWN_STAGES> ring;
    ring_init(ring, shared + sizeof *ch + w * one_ring, p.slot);

    dependency_trigger();
    int n = moe_few_choose<SPREAD>(ch, p, true) *
            n_kt; /* logits are two kernels old, see moe_few_up_kernel */
    int f_item = w;
    auto fetch = [&]() {
        bool real = f_item < n;
        int pick = real ? (int)((uint32_t)f_item * p.per_kt >> 16) : 0, kt = f_item - pick * n_kt;
        ring_fetch(ring, plane_tile(plane, ch->expert[pick], 0) + kt * plane.bytes, plane.bytes,
                   real);
        f_item += warps;
    };
#pragma unroll 1
    for (int i = 0; i < DOWN_STAGES; i++)
        fetch();
    dependency_wait();

    float acc[4] = {};
#pragma unroll 1
    for (int item = w; item < n; item += warps) {
        float part[1][4] = {};
        struct row_frag x[1];
        int pick = (int)((uint32_t)item * p.per_kt >> 16);
        uint32_t rows = ch->rows[ch->expert[pick]];
        frag_load(x[0], rows >> g & 1 ? p.hidden + (size_t)((pick * FEW_ROWS + g) * n_kt + item -
                                                            pick * n_kt) *
                                                       (size_t)RECORD
                                      : p.zeros);
        float w0 = rows >> 2 * c & 1 ? ch->weight[pick][2 * c] : 0.0f;
        float w1 = rows >> (2 * c + 1) & 1 ? ch->weight[pick][2 * c + 1] : 0.0f;
        frag_tile<KIND>(plane.kind, ring_wait(ring), x, part);
        ring_release(ring);
        fetch();
#pragma unroll
        for (int e = 0; e < 4; e++)
            acc[e] += (e & 1 ? w1 : w0) * part[0][e];
    }
    copy_async_wait<0>();
    const float undo[2] = {1.0f / HIDDEN_SCALE, 1.0f / HIDDEN_SCALE};
    store_tile(sums + w * SUM_TILE, acc, undo);
    __syncthreads();
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < p.rows * TILE_ROWS; i += (int)blockDim.x) {
        int row = (tile - s->tile0) * TILE_ROWS + (i & 15);
        if (row >= s->rows)
            continue;
        float v = take_tile(sums, warps, SUM_TILE, i >> 4, i & 15);
        if (p.w.bias)
#pragma unroll 1
            for (int k = 0; k < p.rule.used; k++) {
                if (SPREAD && ch->chosen[i >> 4][k] == NO_EXPERT)
                    break;
                v += ch->chosen_weight[i >> 4][k] *
                     p.w.bias[ch->chosen[i >> 4][k] * p.w.n_out + s->row0 + row];
            }
        p.y[(size_t)(i >> 4) * (size_t)p.w.n_out + (size_t)(s->row0 + row)] = v;
    }
}

static size_t moe_few_shared(int warps, int stages, int tiles, int slot)
{
    return sizeof(struct moe_few_choice) +
           (size_t)warps * (size_t)(ring_bytes(stages, slot) + tiles * SUM_TILE * 4);
}

static size_t moe_few_up_shared(const struct matrix *w, int warps)
{
    return sizeof(struct moe_few_choice) + (size_t)(w->n_kt * 8 * RECORD) +
           (size_t)(warps * ring_bytes(PAIR_SLOTS, w->max_tile_bytes));
}

bool moe_few_fits(const struct cuda_backend *cu, const struct matrix *gate_up,
                  const struct matrix *down, int rows)
{
    return gemm_few_fits(cu, gate_up, rows) && down->set <= SET_CODES && gate_up->n_seg <= 2 &&
           down->n_kt <= 16 && rows * gate_up->n_kt <= cu->forms.n_records &&
           moe_few_up_shared(gate_up, 4) <= cu->shared_limit &&
           moe_few_shared(8, DOWN_STAGES, 1, down->max_tile_bytes) <= cu->shared_limit;
}

void moe_few(struct cuda_backend *cu, const struct experts *e, float *y, int rows)
{
    const struct matrix *gate_up = e->gate_up, *down = e->down;
    struct moe_few_args p = {};
    p.w = *gate_up;
    p.logits = router_selected(cu, e);
    p.x = cu->forms.records;
    p.x_scale = cu->forms.scale;
    p.hidden = cu->mlp.hidden_records;
    p.zeros =
        cu->mlp.hidden_records + (size_t)(moe_grouped_hidden_records(&cu->shape) - 1) * RECORD;
    p.rows = rows;
    p.act = e->act;
    p.rule = e->rule;
    p.slot = gate_up->max_tile_bytes;
    p.hidden_kt = down->n_kt;
    int warps = FEW_WARPS;
    while (warps > 4 && moe_few_up_shared(gate_up, warps) > cu->shared_limit)
        warps /= 2;
    bool spread = e->rule.spread, k = gate_up->set == SET_K;
    cuda_launch(
        cu,
        spread ? (k ? moe_few_up_kernel<ANY_K, true> : moe_few_up_kernel<ANY_CODES, true>)
               : (k ? moe_few_up_kernel<ANY_K, false> : moe_few_up_kernel<ANY_CODES, false>),
        dim3((unsigned)cu->n_sm), warps * 32, moe_few_up_shared(gate_up, warps), LAUNCH_EARLY, p);
    p.w = *down;
    p.per_kt = 65535u / (uint32_t)down->n_kt + 1;
    p.slot = down->max_tile_bytes;
    p.y = y;
    warps = FEW_WARPS;
    while (warps > 8 && moe_few_shared(warps, DOWN_STAGES, 1, p.slot) > cu->shared_limit)
        warps /= 2;
    k = down->set == SET_K;
    cuda_launch(
        cu,
        spread ? (k ? moe_few_down_kernel<ANY_K, true> : moe_few_down_kernel<ANY_CODES, true>)
               : (k ? moe_few_down_kernel<ANY_K, false> : moe_few_down_kernel<ANY_CODES, false>),
        dim3((unsigned)down->n_tiles), warps * 32, moe_few_shared(warps, DOWN_STAGES, 1, p.slot),
        LAUNCH_EARLY, p);
}
