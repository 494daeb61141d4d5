/*
 * Attention of one decode, or of a few: one wave of blocks, at most one to an SM, so that each
 * may wait for the others. A block takes (sequence, up to 8 heads of one kv head, a stretch of
 * keys). Keys and values go by the copy engine straight into shared memory, as much as fits
 * beside the kernel in front (120 KB, at depth 8,192 of a 30B-A3B all of it), and are asked for
 * before that kernel has finished; no register waits for them.
 *
 * A warp takes 16 keys at a time, "a tile". Products have the keys, then the values' elements as
 * rows and the 8 heads as columns; queries and probabilities go in as two numbers of the cache's
 * type, what rounds and what that rounding lost, so they keep about 22 bits. Which key is which
 * row is chosen so that 16-byte reads of rows as they lie in the cache meet no bank twice: see
 * key_of_row.
 *
 * Blocks of one kv head join through the L2: everyone leaves its part there, in records that say by
 * themselves whether they have been written, and adds up its share of the elements as they come.
 */
#include "backend/cuda/attn.cuh"

#include <math.h>

enum {
    SPLIT_WARPS = 8,
    SPLIT_THREADS = SPLIT_WARPS * 32,
    SPLIT_KEYS = 16,
    SPLIT_SLOTS = 2 * SPLIT_WARPS, /* tiles in shared memory */
    SPLIT_PARTS = 32,              /* most stretches; a power of two */
    SPLIT_RECORD = 8,              /* floats: four elements, maximum, sum, nothing */
    SPLIT_ALONE = 20,              /* most tiles in a context of one stretch */
    SPLIT_SHARE = 8                /* most in a stretch while there are blocks left */
};
static const uint32_t NOT_YET = 0xffffffffu; /* of a word of a record; no arithmetic gives it */

/* Tiles in shared memory: K as two runs of 8 keys that lie 64 bytes further apart than in the
 * cache, V as four runs of 4 keys, 32 bytes further. */
template <int D> struct attn_decode_split_tile {
    enum {
        ROW = 2 * D,
        V = 16 * ROW + 64, /* where V begins */
        BYTES = V + 16 * ROW + 96,
        Q_PITCH = 2 * ROW + 64, /* of a head's query: halves, and what they lost */
        PART_ROW = D + 4,
    };
};
/* Row r of a fragment. Rows 2c and 2c+1 are in different runs of K; of V, the keys of lanes c =
 * 0..3 are in four. */
DEVICE int key_of_row(int r)
{
    int odd = r & 1;
    return (((r >> 1) + 2 * odd) & 3) * 4 + odd + (r >> 3) * 2;
}

/* The last tile's place first serves to make the queries. */
template <int D> static size_t attn_decode_split_shared()
{
    return (size_t)SPLIT_SLOTS * attn_decode_split_tile<D>::BYTES + 2 * D * 2 +
           SPLIT_WARPS * 16 * 4 + SPLIT_SLOTS * 8 + SPLIT_WARPS * 4 + 16;
}

/* Grid: (stretches, kv heads x groups of 8 heads, sequences). */
template <int D, bool BF16>
static __global__ void __launch_bounds__(640)
    attn_decode_split_kernel(const __grid_constant__ struct attn_args p)
{
    typedef attn_decode_split_tile<D> T;
    enum { PIECES = D / 32, VP = D / 64, M_TILES = D / 16, GROUPS = D / 4 };
    SHARED_BYTES(shared);
    struct marks mk;
    marks_begin(mk);
    uint8_t *ring = shared;
    uint8_t *query = ring + (SPLIT_SLOTS - 1) * T::BYTES; /* (8): row of D, D of the cache's type */
    float *staged = (float *)(query + 8 * T::Q_PITCH);    /* (2, D) this step's k and v */
    uint16_t *fresh =
        (uint16_t *)(ring + SPLIT_SLOTS * T::BYTES);     /* (2, D) as the cache has them */
    float *ml = (float *)(fresh + 2 * D);                /* (warps, 8, 2) maximum, sum */
    uint64_t *bar = (uint64_t *)(ml + SPLIT_WARPS * 16); /* (slots) */
    int *part_at = (int *)(bar + SPLIT_SLOTS);           /* (warps) */
    int *is_last = part_at + SPLIT_WARPS;

    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3, tid = (int)threadIdx.x;
    int H = p.n_heads, K = p.kv.n_kv, G = H / K, t = (int)blockIdx.z; /* decodes: row = sequence */
    int kv_head = (int)blockIdx.y, h0 = kv_head * G, heads = G;
    if (G > 8) {
        int groups = (G + 7) >> 3, group = (int)blockIdx.y % groups;
        kv_head = (int)blockIdx.y / groups;
        h0 = kv_head * G + group * 8;
        heads = min(8, G - group * 8);
    }
    int slot = p.step.slot[t], last = p.step.pos[t], split = (int)blockIdx.x;
    const int32_t *pages = p.step.pages + (size_t)t * (size_t)p.step.head[STEP_PAGE_STRIDE];
    int from = p.window && last - p.window + 1 > 0 ? last - p.window + 1 : 0;
    int start = from / SPLIT_KEYS, n_tiles = last / SPLIT_KEYS + 1 - start;
    int shift = 0; /* 2^shift stretches: one of a short context, since joining costs more */
    if (n_tiles > SPLIT_ALONE)
#pragma unroll 1
        while (1 << shift < p.n_split && n_tiles > SPLIT_SHARE << shift)
            shift++;
    int used = 1 << shift;
    if (slot < 0 || split >= used) { /* a padding row, or fewer stretches than blocks */
        dependency_trigger();
        if (slot >= 0)
            return;
        dependency_wait();
        if (split == 0)
            for (int i = tid; i < heads * D; i += SPLIT_THREADS)
                p.a[((size_t)t * (size_t)H + (size_t)h0) * D + (size_t)i] = 0.0f;
        return;
    }
    /* What does not divide goes to the first: the last has this step's key to see to. */
    int first = (n_tiles * split + used - 1) >> shift;
    int count = ((n_tiles * (split + 1) + used - 1) >> shift) - first;
    first += start;
    bool owns_fresh = split == used - 1;
    int fresh_tile = owns_fresh ? count - 1 : -1;

    /* Tile i of this warp is w + 8i of the block; it has two places, by turns. Lane i knows the
     * page of tile i, for 32 of them. */
    int32_t warp_pages;
    auto page_of = [&](int i) {
        return pages[(first + min(w + SPLIT_WARPS * i, count - 1)) * SPLIT_KEYS >> p.kv.page_shift];
    };
    auto tile_at = [&](int i) { return ring + ((i & 1) * SPLIT_WARPS + w) * T::BYTES; };
    /* Where lane i's page has tile i, in rows of the cache */
    auto row_of = [&](int i) {
        size_t page = (size_t)__shfl_sync(FULL_WARP, warp_pages, i & 31);
        return ((page * (size_t)K + (size_t)kv_head) << p.kv.page_shift) +
               (size_t)((first + w + SPLIT_WARPS * i) * SPLIT_KEYS & (p.kv.page_len - 1));
    };
    warp_pages = page_of(lane);
#if BULK_COPIES
    uint64_t *bars = bar + 2 * w;
    if (lane < 2)
        bulk_init(bars + lane);
    __syncwarp();
    /* A lane for each run of keys: 2 of K, 4 of V */
    auto bring = [&](int i) {
        size_t at = row_of(i) * T::ROW;
        bool k = lane < 2;
        int n = k ? lane : lane - 2, bytes = (k ? 8 : 4) * T::ROW;
        if (lane == 0)
            bulk_expect(bars + (i & 1), 32 * T::ROW);
        if (lane < 6)
            bulk_piece(tile_at(i) + (k ? n * 64 : T::V + n * 32) + n * bytes,
                       (k ? p.kv.k : p.kv.v) + at + n * bytes, bytes, bars + (i & 1));
    };
#else
    auto bring = [&](int i) {
        size_t at = row_of(i) * T::ROW;
        uint8_t *to = tile_at(i);
        for (int j = lane; j < T::ROW; j += 32) { /* 16 rows in pieces of 16 bytes */
            int key = j * 16 / T::ROW;
            copy_async16(to + j * 16 + key / 8 * 64, p.kv.k + at + j * 16);
            copy_async16(to + T::V + j * 16 + key / 4 * 32, p.kv.v + at + j * 16);
        }
    };
#endif
    /* Ends a group of copies, where they come in groups, whether or not there is a tile. */
    auto bring_if_any = [&](int i) {
        if (w + SPLIT_WARPS * i < count)
            bring(i);
        copy_async_commit();
    };
    bool late = w == SPLIT_WARPS - 1; /* its second place is in use for now */
#pragma unroll 1
    for (int i = 0; i < (late ? 1 : 2); i++)
        bring_if_any(i);
    int ahead = late ? 1 : 2; /* the next, at least to the L2 */
    if (w + SPLIT_WARPS * ahead < count) {
        size_t line = row_of(ahead) * T::ROW + (size_t)lane * 128;
        if (lane * 128 < SPLIT_KEYS * T::ROW) {
            prefetch_l2(p.kv.k + line);
            prefetch_l2(p.kv.v + line);
        }
    }

    /* Groups of four elements are added up by the blocks of a kv head, `each` in every one, a
     * lane for each part. The records are asked for now: those of the layer before have long left
     * the L2. */
    int groups = heads * GROUPS, each = (groups + used - 1) >> shift;
    int part = lane & (used - 1), share = tid >> shift;
    auto record_of = [&](int of, int group) {
        size_t unit = (size_t)t * gridDim.y + blockIdx.y;
        return p.records +
               ((unit * (size_t)p.n_split + (size_t)of) * (8 * GROUPS) + (size_t)group) *
                   SPLIT_RECORD;
    };
    if (used > 1 && share < each && split * each + share < groups)
        prefetch_l2(record_of(part, split * each + share));

    /* A warp prepares a head; the first two, this step's key and value besides. */
    enum { PER = D / 32, JOBS = 8 / SPLIT_WARPS + 1 };
    const float *gain[2] = {p.q_norm, p.k_norm};
    int half = p.n_rot >> 1;
    float gains[2][PER];
    float2 turns[D / 64];
    head_load<D>(p, t, gain, half, gains, turns);
    mark(mk, 2);
    (dependency_wait)();
    mark(mk, 3);
    const float *row = p.q + (size_t)t * (size_t)(H + 2 * K) * D;
    int jobs = owns_fresh && w < 2 ? JOBS : JOBS - 1;
    float x[JOBS][PER];
#pragma unroll
    for (int j = 0; j < JOBS; j++) {
        int from_head =
            j < JOBS - 1 ? h0 + min(w + j * SPLIT_WARPS, heads - 1) : H + w * K + kv_head;
#pragma unroll
        for (int i = 0; i < PER; i++)
            x[j][i] = j < jobs ? row[from_head * D + lane + 32 * i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < JOBS; j++) {
        bool fresh_one = j == JOBS - 1;
        if (j == 0)
            mark(mk, 4);
        if (j >= jobs)
            break;
        uint8_t *q = query + (w + j * SPLIT_WARPS) * T::Q_PITCH;
        float *mine = fresh_one ? staged + w * D : (float *)q;
        bool is_value = fresh_one && w == 1;
        head_turn<D>(x[j], gain[fresh_one] && !is_value, p.eps, gains[fresh_one], !is_value, turns,
                     half, mine);
        if (!fresh_one) { /* in place: as two numbers of the cache's type */
            const float to_log2 = 1.4426950408889634f * p.scale;
            float2 e[D / 64];
#pragma unroll
            for (int i = 0; i < D / 64; i++)
                e[i] = *(const float2 *)(mine + 2 * lane + 64 * i);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < D / 64; i++) {
                uint32_t *to = (uint32_t *)q + lane + 32 * i;
                split_pair<BF16>(e[i].x * to_log2, e[i].y * to_log2, to, to + T::ROW / 4);
            }
        } else {
            fresh_put<D, BF16>(p, slot, K, kv_head, w, mine, fresh, h0, G);
        }
    }
    __syncthreads();
    mark(mk, 5);

    uint4 q_hi[PIECES], q_lo[PIECES]; /* of head g */
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        q_hi[j] = *(const uint4 *)(query + g * T::Q_PITCH + c * 16 + j * 64);
        q_lo[j] = *(const uint4 *)(query + g * T::Q_PITCH + c * 16 + j * 64 + T::ROW);
    }
    shared_to_copies();
    __syncthreads();            /* the last place is free */
    float out[M_TILES][4] = {}; /* rows: elements of a piece; columns: heads 2c, 2c+1 */
    float top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    const int k_at = key_of_row(g) * T::ROW + key_of_row(g) / 8 * 64 + c * 16;
    int v_at[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int key = key_of_row(2 * c + i);
        v_at[i] = T::V + key * T::ROW + key / 4 * 32 + g * 16;
    }
#pragma unroll 1
    for (int i = 0; w + SPLIT_WARPS * i < count; i++) {
        uint8_t *tile = tile_at(i);
        int n = w + SPLIT_WARPS * i, key0 = (first + n) * SPLIT_KEYS;
        if (i || late) { /* in the place of the one before */
            if (((i + 1) & 31) == 0)
                warp_pages = page_of(i + 1 + lane);
            bring_if_any(i + 1);
        }
#if BULK_COPIES
        bulk_wait(bars + (i & 1), (uint32_t)i >> 1 & 1);
#else
        copy_async_wait<1>(); /* two groups under way, the older is wanted */
        __syncwarp();
#endif
        if (n == fresh_tile) { /* this step's key and value, and for values past them zeros */
            int at = last & (SPLIT_KEYS - 1), piece = lane % (D / 8);
            uint4 k = ((const uint4 *)fresh)[piece], v = ((const uint4 *)(fresh + D))[piece];
            *(uint4 *)(tile + at / 8 * 64 + at * T::ROW + piece * 16) = k;
#pragma unroll
            for (int i0 = 0; i0 < SPLIT_KEYS; i0 += 256 / D) {
                int r = i0 + lane / (D / 8);
                if (r >= at)
                    *(uint4 *)(tile + T::V + r / 4 * 32 + r * T::ROW + piece * 16) =
                        r == at ? v : make_uint4(0, 0, 0, 0);
            }
            __syncwarp();
        }
        float s[4][4] = {};
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            uint4 ka = *(const uint4 *)(tile + k_at + j * 64);
            uint4 kb = *(const uint4 *)(tile + k_at + 2 * T::ROW + j * 64);
            const uint32_t a0[4] = {ka.x, kb.x, ka.y, kb.y}, a1[4] = {ka.z, kb.z, ka.w, kb.w};
            mma_kv<BF16>(s[0], a0, q_hi[j].x, q_hi[j].y);
            mma_kv<BF16>(s[1], a1, q_hi[j].z, q_hi[j].w);
            mma_kv<BF16>(s[2], a0, q_lo[j].x, q_lo[j].y);
            mma_kv<BF16>(s[3], a1, q_lo[j].z, q_lo[j].w);
        }
        float m[2] = {top[0], top[1]}, shrink[2]; /* of s: rows g, g+8; heads 2c, 2c+1 */
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int key = key0 + key_of_row(g) + (e >> 1) * 2;
            s[0][e] = (s[0][e] + s[1][e]) + (s[2][e] + s[3][e]);
            if (key < from || key > last)
                s[0][e] = -INFINITY;
            m[e & 1] = fmaxf(m[e & 1], s[0][e]);
        }
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) {
            m[0] = fmaxf(m[0], __shfl_xor_sync(FULL_WARP, m[0], d));
            m[1] = fmaxf(m[1], __shfl_xor_sync(FULL_WARP, m[1], d));
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float anchor = m[h] == -INFINITY ? 0.0f : m[h]; /* nothing visible yet */
            shrink[h] = fast_exp2(top[h] - anchor);
            top[h] = m[h];
            m[h] = anchor;
            total[h] *= shrink[h];
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[0][e] = fast_exp2(s[0][e] - m[e & 1]);
            total[e & 1] += s[0][e];
        }
        uint32_t hi[2], lo[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            split_pair<BF16>(s[0][2 * r], s[0][2 * r + 1], &hi[r], &lo[r]);
            hi[r] = transpose8(hi[r]);
            lo[r] = transpose8(lo[r]);
        }
        if (__any_sync(FULL_WARP, shrink[0] != 1.0f || shrink[1] != 1.0f))
#pragma unroll
            for (int e = 0; e < 4 * M_TILES; e++)
                out[e >> 2][e & 3] *= shrink[e & 1];
#pragma unroll
        for (int j = 0; j < VP; j++) {
            uint4 v[4]; /* keys of rows 2c, 2c+1, 2c+8, 2c+9; elements 8(g + 8j) on */
#pragma unroll
            for (int r = 0; r < 4; r++)
                v[r] = *(const uint4 *)(tile + v_at[r & 1] + (r >> 1) * 2 * T::ROW + j * 128);
#pragma unroll
            for (int e = 0; e < 4; e++) { /* row g: element e of these eight; g+8: e+4 */
                uint32_t sel = e & 1 ? 0x7632 : 0x5410;
                const uint32_t a[4] = {
                    byte_perm(word_of(v[0], e >> 1), word_of(v[1], e >> 1), sel),
                    byte_perm(word_of(v[0], 2 + (e >> 1)), word_of(v[1], 2 + (e >> 1)), sel),
                    byte_perm(word_of(v[2], e >> 1), word_of(v[3], e >> 1), sel),
                    byte_perm(word_of(v[2], 2 + (e >> 1)), word_of(v[3], 2 + (e >> 1)), sel)};
                mma_kv<BF16>(out[4 * j + e], a, hi[0], hi[1]);
                mma_kv<BF16>(out[4 * j + e], a, lo[0], lo[1]);
            }
        }
        __syncwarp();
    }
    mark(mk, 6);
#pragma unroll
    for (int i = 4; i < 32; i <<= 1) {
        total[0] += __shfl_xor_sync(FULL_WARP, total[0], i);
        total[1] += __shfl_xor_sync(FULL_WARP, total[1], i);
    }

    /* Join the warps, through the places of the last tiles they read. */
    {
        uint8_t *place = tile_at(w < count ? (count - 1 - w) / SPLIT_WARPS : 0);
        float *mine = (float *)place; /* (8, PART_ROW) */
#pragma unroll
        for (int i = 0; i < 4; i++) { /* row g or g+8, head 2c or 2c+1 */
            float *to = mine + (2 * c + (i & 1)) * T::PART_ROW + 8 * g + (i >> 1) * 4;
#pragma unroll
            for (int j = 0; j < M_TILES; j += 4)
                *(float4 *)(to + 16 * j) =
                    make_float4(out[j][i], out[j + 1][i], out[j + 2][i], out[j + 3][i]);
        }
        part_at[w] = (int)(place - ring);
        if (g == 0) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                ml[(w * 8 + 2 * c + i) * 2] = top[i];
                ml[(w * 8 + 2 * c + i) * 2 + 1] = total[i];
            }
        }
    }
    __syncthreads();
    mark(mk, 7);
    float *to = p.a + ((size_t)t * (size_t)H + (size_t)h0) * D;
    if (tid < groups) {
        int h = tid / GROUPS, at = tid % GROUPS * 4;
        float m = -INFINITY, l = 0.0f;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int j = 0; j < SPLIT_WARPS; j++)
            m = fmaxf(m, ml[(j * 8 + h) * 2]);
        float anchor = m == -INFINITY ? 0.0f : m;
#pragma unroll
        for (int j = 0; j < SPLIT_WARPS; j++) {
            float f = fast_exp2(ml[(j * 8 + h) * 2] - anchor);
            float4 e = *(const float4 *)((const float *)(ring + part_at[j]) + h * T::PART_ROW + at);
            l += f * ml[(j * 8 + h) * 2 + 1];
            v.x += f * e.x, v.y += f * e.y, v.z += f * e.z, v.w += f * e.w;
        }
        if (used == 1) {
            *(float4 *)(to + h * D + at) = make_float4(fast_divide(v.x, l), fast_divide(v.y, l),
                                                       fast_divide(v.z, l), fast_divide(v.w, l));
        } else {
            float *r = record_of(split, tid);
            auto word = [](float f) { return bits_of(f) == NOT_YET ? 0x7fffffffu : bits_of(f); };
            store_now((uint4 *)r, make_uint4(word(v.x), word(v.y), word(v.z), word(v.w)));
            store_now((uint4 *)r + 1, make_uint4(word(m), word(l), 0, 0)); /* a whole sector */
        }
    }
    mark(mk, 8);
    dependency_trigger(); /* not before: the next kernel's start takes issue slots */
    if (used == 1) {
        marks_end(mk, 7);
        return;
    }
    /* Everyone adds up its share of the elements: a lane for each part. */
    int mine = split, owners = 1;
#if !BULK_COPIES /* blocks that may not wait for each other: the last one adds up all */
    __threadfence();
    __syncthreads();
    if (tid == 0) {
        int32_t *count_of = p.split_count + ((size_t)t * gridDim.y + blockIdx.y) * 8;
        *is_last = atomicAdd(count_of, 1) == used - 1;
        if (*is_last)
            *count_of = 0;
    }
    __syncthreads();
    if (!*is_last)
        return;
    __threadfence();
    mine = 0, owners = used;
#else
    (void)is_last;
#endif
#pragma unroll 1
    for (int owner = mine; owner < mine + owners; owner++) {
        int group = owner * each + share;
        bool real = share < each && group < groups;
        float *r = record_of(part, group);
        uint4 v = make_uint4(0, 0, 0, 0);
        uint4 e = make_uint4(bits_of(-INFINITY), 0, 0, 0);
        if (real) {
            do {
                v = load_now((const uint4 *)r);
                e = load_now((const uint4 *)r + 1);
            } while (v.x == NOT_YET || v.y == NOT_YET || v.z == NOT_YET || v.w == NOT_YET ||
                     e.x == NOT_YET || e.y == NOT_YET);
            const uint4 none = make_uint4(NOT_YET, NOT_YET, NOT_YET, NOT_YET);
            store_now((uint4 *)r, none); /* for the next launch */
            store_now((uint4 *)r + 1, none);
        }
        __syncwarp();
        if (owner == mine)
            mark(mk, 1);
        float m = float_of(e.x);
#pragma unroll 1
        for (int d = used >> 1; d; d >>= 1)
            m = fmaxf(m, __shfl_xor_sync(FULL_WARP, m, d));
        float f = real ? fast_exp2(float_of(e.x) - m) : 0.0f;
        float sum[5] = {f * float_of(v.x), f * float_of(v.y), f * float_of(v.z), f * float_of(v.w),
                        f * float_of(e.y)};
#pragma unroll 1
        for (int d = used >> 1; d; d >>= 1)
#pragma unroll
            for (int j = 0; j < 5; j++)
                sum[j] += __shfl_xor_sync(FULL_WARP, sum[j], d);
        if (real && part == 0)
            *(float4 *)(to + 4 * group) =
                make_float4(fast_divide(sum[0], sum[4]), fast_divide(sum[1], sum[4]),
                            fast_divide(sum[2], sum[4]), fast_divide(sum[3], sum[4]));
    }
    marks_end(mk, 8);
}

/* Host */

size_t attn_decode_split_record_bytes(const struct cuda_backend *cu)
{
    return (size_t)cu->n_sm * 8 * (size_t)(cu->shape.head_dim / 4) * SPLIT_RECORD * 4;
}

bool attn_decode_split_fits(const struct cuda_backend *cu)
{
    const struct shape *s = &cu->shape;
#ifndef STEEL_CUDA_SIM
    if (!cu->clusters) /* nor a copy engine */
        return false;
#endif
    return cu->may_wait && attn_tensor(cu) &&
           (s->head_dim == 64 ? attn_decode_split_shared<64>() : attn_decode_split_shared<128>()) <=
               cu->shared_limit;
}

template <int D> static void attn_decode_split_launch(struct cuda_backend *cu, struct attn_args p)
{
    int groups = ceil_div(p.n_heads / p.kv.n_kv, 8), units = p.kv.n_kv * groups * p.step.n_decode;
    p.n_split = 1;
    while (2 * p.n_split * units <= cu->n_sm && p.n_split < SPLIT_PARTS)
        p.n_split *= 2;
    p.records = cu->split_records;
    dim3 grid((unsigned)p.n_split, (unsigned)(p.kv.n_kv * groups), (unsigned)p.step.n_decode);
    auto kernel = p.kv.type == DT_F16 ? attn_decode_split_kernel<D, false>
                                      : attn_decode_split_kernel<D, true>;
    cuda_launch(cu, kernel, grid, SPLIT_THREADS, attn_decode_split_shared<D>(), LAUNCH_EARLY, p);
}

void attn_decode_split(struct cuda_backend *cu, struct attn_args p)
{
    if (p.kv.head_dim == 64)
        attn_decode_split_launch<64>(cu, p);
    else
        attn_decode_split_launch<128>(cu, p);
}
