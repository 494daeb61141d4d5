/*
 * MLA prefill on Hopper, expanded. With many rows it takes fewer operations to expand the keys and
 * values of all heads from the latents (Dn + Dr and Dv wide) than to attend over the latents
 * themselves (512 + 64, and 512).
 *
 * Steps: gather the latents of the prompts' sequences from the cache as fp16, whatever the cache's
 * type; two GEMMs (gemm_wgmma.cu) with the per-head matrices give keys and values (the first uses
 * an fp16 transposed copy of its matrix, made for the step); then multi-head attention. A block has
 * 128 rows of one head: two consumer warpgroups of 64 rows and a producer warpgroup, with rings of
 * two stages of 64 keys and 64 values. q K^T of a round overlaps with P V of the previous one, as
 * in attn_prefill.cu.
 */
#include "backend/cuda/attn/attn_softmax.cuh"
#include "backend/cuda/core/host.h"
#include "backend/cuda/mixers/latent_row.cuh"
#include "backend/cuda/core/wgmma.cuh"

enum {
    EXPANDED_ROWS = 64, /* per warpgroup */
    EXPANDED_KEYS = 64,
    EXPANDED_STAGES = 2,
    EXPANDED_PANEL = EXPANDED_KEYS * 128, /* 64 elements of each key, or row */
    EXPANDED_CONSUMERS = 2 * 128,
    EXPANDED_THREADS = EXPANDED_CONSUMERS + 128,
    EXPANDED_BYTES = 384 << 20, /* most scratch */
    EXPANDED_CONSUMER_REGS = 232,
    EXPANDED_PRODUCER_REGS = 40
};

/* Barriers per stage: keys or values loaded, and stage free. */
struct expanded_bars {
    uint64_t keys[EXPANDED_STAGES], values[EXPANDED_STAGES];
    uint64_t keys_empty[EXPANDED_STAGES], values_empty[EXPANDED_STAGES];
};

/* PK, PV: 64-element panels of a key and of a value. Layout: queries of both warpgroups, keys,
 * values, barriers. */
template <int PK, int PV> struct expanded_shared {
    enum {
        QUERIES = PK * EXPANDED_PANEL,
        KEYS = PK * EXPANDED_PANEL,
        VALUES = PV * EXPANDED_PANEL,
        KEYS_AT = 2 * QUERIES,
        VALUES_AT = KEYS_AT + EXPANDED_STAGES * KEYS,
        BARS_AT = VALUES_AT + EXPANDED_STAGES * VALUES,
        BYTES = 1024 + BARS_AT + 256
    };
};

struct expanded_args {
    struct step step;
    const float *q; /* (n_tokens, H, Dn + 64), the last 64 with RoPE */
    /* fp16: (H, n_keys, Dn), (n_keys, 64), (H, n_keys, Dv); k and v are scaled by HIDDEN_SCALE */
    const uint16_t *k, *kr, *v;
    float *a;           /* (n_tokens, H, Dv) */
    uint16_t *fp16_out; /* the same as the next GEMM reads it, instead of a; or NULL */
    float *fp16_scale;  /* (n_tokens) */
    const int2 *tiles;
    int n_tiles, n_heads, n_keys;
    float scale;
};

/* One warp: the index of the first expanded key of sequence seq. Expanded keys are those of all
 * prompts, in order, without decodes. */
DEVICE int expanded_first_key(const struct step &s, int seq)
{
    int n = 0;
    for (int i = s.n_decode + lane_id(); i < seq; i += 32)
        n += s.kv_len[i];
#pragma unroll
    for (int i = 1; i < 32; i <<= 1)
        n += __shfl_xor_sync(FULL_WARP, n, i);
    return n;
}

/* Grid: (n_keys / 8). One warp per key: its latent as fp16 in GEMM input order, and its RoPE
 * part. */
template <bool QUANT>
static __global__ void __launch_bounds__(256)
    expanded_gather_kernel(const __grid_constant__ struct latent_args p, int n_keys, uint16_t *x,
                           uint16_t *kr)
{
    dependency_wait();
    dependency_trigger();
    int key = (int)blockIdx.x * 8 + warp_id(), seq = p.step.n_decode, pos = key;
    if (key >= n_keys)
        return;
    while (seq + 1 < p.step.n_seqs && pos >= p.step.kv_len[seq])
        pos -= p.step.kv_len[seq++];
    const int32_t *pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    size_t slot = (size_t)pages[pos / p.page_len] * (size_t)p.page_len + (size_t)(pos % p.page_len);
    size_t at = slot * LATENT_WIDTH;
#pragma unroll
    for (int j = 0; j < LATENT_WIDTH / 64; j++) {
        int i = 64 * j + 2 * lane_id();
        float a = latent_get<QUANT>(p.cache, p.type, at + (size_t)i);
        float b = latent_get<QUANT>(p.cache, p.type, at + (size_t)(i + 1));
        uint16_t *to = i < LATENT_RANK ? x + (size_t)key * LATENT_RANK + (size_t)fragment_slot(i)
                                       : kr + (size_t)key * LATENT_ROPE + (size_t)(i - LATENT_RANK);
        *(uint32_t *)to = pack_half2(clamp_half(a), clamp_half(b));
    }
}

/* Transposes w per head. Grid: (tiles of the transposed matrix, heads). w: H x (C, Dn); to: H x
 * (Dn, C) as fp16 tiles. */
static __global__ void __launch_bounds__(256)
    expanded_transpose_kernel(const struct matrix w, uint8_t *to)
{
    const int n_kt = LATENT_RANK / TILE_K;
    int tile = (int)blockIdx.x / n_kt, kt = (int)blockIdx.x % n_kt, h = (int)blockIdx.y;
    dependency_trigger();
    dependency_wait();
    to += ((size_t)h * gridDim.x + blockIdx.x) * F16_BYTES;
    for (int u = (int)threadIdx.x; u < F16_BYTES / 16; u += 256) {
        int g = (u & 31) >> 2, c = u & 3, in = kt * TILE_K + (u >> 5) * 16 + 4 * c;
        const struct seg *s = seg_of(w, in / TILE_ROWS);
        uint32_t v[4];
#pragma unroll
        for (int j = 0; j < 4;
             j++) { /* row g + 8 (j / 2), columns in + 2 (j % 2), in + 2 (j % 2) + 1 */
            int n = tile * TILE_ROWS + g + 8 * (j >> 1), i = in + 2 * (j & 1);
            const uint8_t *from = tile_address(w, s, h, i / TILE_ROWS, n / TILE_K);
            v[j] = pack_half2(tile_value_call(s, from, i % TILE_ROWS, n % TILE_K),
                              tile_value_call(s, from, (i + 1) % TILE_ROWS, n % TILE_K));
        }
        *(uint4 *)(to + u * 16) = make_uint4(v[0], v[1], v[2], v[3]);
    }
}

/* The producer warpgroup. first: index of the sequence's first key. last: the last position its
 * rows see. */
template <int PK, int PV>
DEVICE void expanded_producer(const struct expanded_args &p, int h, int first, int last,
                              uint8_t *shared, struct expanded_bars *bars)
{
    typedef expanded_shared<PK, PV> S;
    const int PER = EXPANDED_KEYS / 16;
    int id = (int)threadIdx.x & 127, piece = id & 7, key0 = id >> 3;
    const uint8_t *k = (const uint8_t *)p.k + (size_t)h * (size_t)p.n_keys * ((PK - 1) * 128);
    const uint8_t *v = (const uint8_t *)p.v + (size_t)h * (size_t)p.n_keys * (PV * 128);
    uint8_t *to = shared + key0 * 128 + ((piece ^ (key0 & 7)) << 4);
    k += piece * 16;
    v += piece * 16;
    const uint8_t *kr = (const uint8_t *)p.kr + piece * 16;
#pragma unroll 1
    for (int round = 0; round <= last / EXPANDED_KEYS; round++) {
        int stage = round % EXPANDED_STAGES, phase = (round / EXPANDED_STAGES & 1) ^ 1;
        size_t row[PER];
#pragma unroll
        for (int i = 0; i < PER; i++)
            row[i] = (size_t)(first + min(round * EXPANDED_KEYS + i * 16 + key0, last));
        bar_wait(&bars->keys_empty[stage], phase);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            uint8_t *at = to + S::KEYS_AT + stage * S::KEYS + i * 2048;
#pragma unroll
            for (int j = 0; j < PK - 1; j++)
                copy_async16(at + j * EXPANDED_PANEL, k + row[i] * ((PK - 1) * 128) + j * 128);
            copy_async16(at + (PK - 1) * EXPANDED_PANEL, kr + row[i] * 128);
        }
        bar_arrive_copies(&bars->keys[stage]);
        bar_wait(&bars->values_empty[stage], phase);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            uint8_t *at = to + S::VALUES_AT + stage * S::VALUES + i * 2048;
#pragma unroll
            for (int j = 0; j < PV; j++)
                copy_async16(at + j * EXPANDED_PANEL, v + row[i] * (PV * 128) + j * 128);
        }
        bar_arrive_copies(&bars->values[stage]);
    }
    copy_async_commit();
    copy_async_wait<0>();
}

/* Stores a warpgroup's queries in shared memory, scaled to units of log2. Rows past the last are
 * copies of the last. */
template <int PK>
DEVICE void expanded_queries(const struct expanded_args &p, int h, int row0, int rows, uint8_t *to)
{
    float scale = p.scale * (1.4426950408889634f / HIDDEN_SCALE);
    float rope = p.scale * 1.4426950408889634f;
    for (int i = (int)threadIdx.x & 127; i < EXPANDED_ROWS * PK * 8; i += 128) {
        int r = i / (PK * 8), piece = i % (PK * 8);
        const float4 *from =
            (const float4 *)(p.q +
                             ((size_t)(row0 + min(r, rows - 1)) * (size_t)p.n_heads + (size_t)h) *
                                 (PK * 64) +
                             (size_t)(piece * 8));
        float4 a = from[0], b = from[1];
        float f = piece < (PK - 1) * 8 ? scale : rope;
        *(uint4 *)(to + (piece >> 3) * EXPANDED_PANEL + r * 128 + (((piece & 7) ^ (r & 7)) << 4)) =
            make_uint4(pack_half2(clamp_half(a.x * f), clamp_half(a.y * f)),
                       pack_half2(clamp_half(a.z * f), clamp_half(a.w * f)),
                       pack_half2(clamp_half(b.x * f), clamp_half(b.y * f)),
                       pack_half2(clamp_half(b.z * f), clamp_half(b.w * f)));
    }
    wgmma_publish();
}

/* Scores of keys from `base` on to probabilities. edge: the mask hides some of these keys from
 * some rows. */
DEVICE void expanded_softmax(float (&s)[EXPANDED_KEYS / 2], struct softmax_rows &st,
                             const int (&pos)[2], int base, bool edge)
{
    auto sum = [&](int i) -> float & { return s[i]; };
    if (edge)
        softmax_mask<EXPANDED_KEYS / 2>(sum, pos, base, 0);
    softmax_tile<EXPANDED_KEYS / 2>(sum, st);
}

/* Epilogue: writes a warpgroup's rows, of which `rows` exist, as floats or as fp16. */
template <int PV>
DEVICE void expanded_write(const struct expanded_args &p, const struct softmax_rows &st,
                           const float (&out)[PV / 2][64], int h, int row0, int rows)
{
    int w = warp_id() & 3, g = lane_id() >> 2, c = lane_id() & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = softmax_total(st, r);
        int row = w * 16 + g + 8 * r;
        bool mine = row < rows, hidden = !mine || p.step.slot[row0 + row] < 0;
        float f = hidden ? 0.0f : 1.0f / (HIDDEN_SCALE * total);
        size_t at = ((size_t)(row0 + row) * (size_t)p.n_heads + (size_t)h) * (PV * 64);
#pragma unroll
        for (int j = 0; j < PV * 8; j += 2) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                v[i] = hidden ? 0.0f : out[j >> 4][4 * ((j & 15) + i / 2) + 2 * r + i % 2] * f;
            if (!p.fp16_out) {
                if (mine) {
                    *(float2 *)(p.a + at + j * 8 + 2 * c) = make_float2(v[0], v[1]);
                    *(float2 *)(p.a + at + j * 8 + 2 * c + 8) = make_float2(v[2], v[3]);
                }
                continue;
            }
            softmax_fp16_put(pack_half2(clamp_half(v[0]), clamp_half(v[1])),
                             pack_half2(clamp_half(v[2]), clamp_half(v[3])),
                             p.fp16_out + at + j * 8, mine);
        }
        if (p.fp16_out && mine && h == 0 && c == 0)
            p.fp16_scale[row0 + row] = 1.0f;
    }
}

/* Grid: (heads, tiles of 64 rows). The last tiles start first because they have the most keys. A
 * block handles two tiles of a sequence: blocks of odd tiles exit. */
template <int PK, int PV>
static __global__ void __launch_bounds__(EXPANDED_THREADS, 1)
    latent_expanded_kernel(const __grid_constant__ struct expanded_args p)
{
    typedef expanded_shared<PK, PV> S;
    SHARED_BYTES(raw);
    uint8_t *shared = shared_align(raw, 1024);
    struct expanded_bars *bars = (struct expanded_bars *)(shared + S::BARS_AT);
    int2 tile = p.tiles[p.n_tiles - 1 - (int)blockIdx.y];
    int h = (int)blockIdx.x, seq = tile.x, row0 = tile.y;
    if ((row0 - p.step.q_start[seq]) / EXPANDED_ROWS & 1)
        return;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < EXPANDED_STAGES; i++) {
            bar_init(&bars->keys[i], 128);
            bar_init(&bars->values[i], 128);
            bar_init(&bars->keys_empty[i], EXPANDED_CONSUMERS / 32);
            bar_init(&bars->values_empty[i], EXPANDED_CONSUMERS / 32);
        }
        bar_ready();
    }
    int rows = min(2 * EXPANDED_ROWS, p.step.q_start[seq + 1] - row0);
    int first_pos = p.step.pos[row0], last = first_pos + rows - 1;
    int lane = lane_id(), w = warp_id() & 3, g = lane >> 2, wg = warp_id() >> 2;
    dependency_wait();
    dependency_trigger();
    __syncthreads();
    if (wg == 2) {
        registers_lower<EXPANDED_PRODUCER_REGS>();
        expanded_producer<PK, PV>(p, h, expanded_first_key(p.step, seq), last, shared, bars);
        return;
    }
    registers_raise<EXPANDED_CONSUMER_REGS>();
    int rounds = last / EXPANDED_KEYS + 1;
    uint8_t *queries = shared + wg * S::QUERIES;
    expanded_queries<PK>(p, h, row0 + wg * EXPANDED_ROWS, rows - wg * EXPANDED_ROWS, queries);
    named_barrier_sync(3 + wg, 128);
    struct softmax_rows st;
    softmax_clear(st);
    int row_pos = first_pos + wg * EXPANDED_ROWS + w * 16 + g;
    const int pos[2] = {row_pos, row_pos + 8};
    float out[PV / 2][64] = {}, s[EXPANDED_KEYS / 2] = {};
    uint32_t pf[EXPANDED_KEYS / 16][4];
#pragma unroll
    for (int j = 0; j < PV / 2; j++)
        wgmma_use(out[j]);
    wgmma_use(s);
    uint64_t q_desc = wgmma_desc(queries);
    auto keys = [&](int round) {
        bar_wait(&bars->keys[round % EXPANDED_STAGES], round / EXPANDED_STAGES);
        wgmma_publish();
        wgmma_fence();
        uint64_t desc = wgmma_desc(shared + S::KEYS_AT + round % EXPANDED_STAGES * S::KEYS);
#pragma unroll
        for (int i = 0; i < PK * 4; i++) {
            uint64_t at = (uint64_t)((i >> 2) * (EXPANDED_PANEL >> 4) + (i & 3) * 2);
            if (i == 0)
                wgmma_shared<true>(s, q_desc + at, desc + at);
            else
                wgmma_shared<false>(s, q_desc + at, desc + at);
        }
        wgmma_commit();
    };
    auto values = [&](int round) {
        bar_wait(&bars->values[round % EXPANDED_STAGES], round / EXPANDED_STAGES);
        wgmma_publish();
        wgmma_fence();
        const uint8_t *vs = shared + S::VALUES_AT + round % EXPANDED_STAGES * S::VALUES;
        uint64_t desc = wgmma_desc_transposed(vs, EXPANDED_PANEL);
#pragma unroll
        for (int i = 0; i < EXPANDED_KEYS / 16; i++)
#pragma unroll
            for (int j = 0; j < PV / 2; j++)
                wgmma<128, false, false, true>(
                    out[j], pf[i],
                    desc + (uint64_t)(i * (2048 >> 4) + j * (2 * EXPANDED_PANEL >> 4)));
        wgmma_commit();
    };
    auto edge = [&](int round) {
        return (round + 1) * EXPANDED_KEYS - 1 > first_pos + wg * EXPANDED_ROWS + w * 16;
    };
    auto pack = [&]() {
#pragma unroll
        for (int i = 0; i < EXPANDED_KEYS / 16; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                pf[i][j] = pack_half2(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
    };
    keys(0);
    wgmma_wait<0>();
    wgmma_use(s);
    if (lane == 0)
        bar_arrive(&bars->keys_empty[0]);
    expanded_softmax(s, st, pos, 0, edge(0));
    pack();
    if (wg == 1 && rounds > 1)
        named_barrier_arrive(1, 256);
#pragma unroll 1
    for (int round = 1; round < rounds; round++) {
        named_barrier_sync(1 + wg, 256);
        keys(round);
        values(round - 1);
        if (wg == 0 || round + 1 < rounds)
            named_barrier_arrive(2 - wg, 256);
        wgmma_wait<1>();
        wgmma_use(s);
        if (lane == 0)
            bar_arrive(&bars->keys_empty[round % EXPANDED_STAGES]);
        expanded_softmax(s, st, pos, round * EXPANDED_KEYS, edge(round));
        wgmma_wait<0>();
        if (lane == 0)
            bar_arrive(&bars->values_empty[(round - 1) % EXPANDED_STAGES]);
#pragma unroll
        for (int j = 0; j < PV / 2; j++)
            wgmma_use(out[j]);
        wgmma_use(s); /* the fragments pf must not be overwritten before P V has finished */
        pack();
#pragma unroll
        for (int j = 0; j < PV / 2; j++)
#pragma unroll
            for (int i = 0; i < 64; i++)
                out[j][i] *= st.shrink[i >> 1 & 1];
    }
    values(rounds - 1);
    wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < PV / 2; j++)
        wgmma_use(out[j]);
    expanded_write<PV>(p, st, out, h, row0 + wg * EXPANDED_ROWS, rows - wg * EXPANDED_ROWS);
}

/* Host */

/* Number of keys over the step's prompts. */
static int expanded_keys(const struct cuda_backend *cu)
{
    const int32_t *len = cu->step.host + cu->step.layout.kv_len;
    int64_t n = 0;
    for (int i = cu->step.layout.n_decode; i < cu->step.layout.n_seqs; i++)
        n += len[i];
    return n > INT32_MAX ? INT32_MAX : (int)n;
}

/* Compiled sizes: keys of 192 + 64 with values of 256 (GLM-4.7-Flash), and of 128 + 64 with 128
 * (DeepSeek V3). */
static bool expanded_sizes(int nope, int v)
{
    return (nope == 192 && v == 256) || (nope == 128 && v == 128);
}

/* Allocates scratch for as many keys as the cache has, limited by EXPANDED_BYTES. A step whose
 * prompts have more keys is absorbed instead. */
bool latent_expand_prepare(struct cuda_backend *cu, struct latent_expand *e, const struct bounds *b,
                           struct error *err)
{
    const struct network *net = cu->net;
    size_t k = 0, v = 0, heads = 0, transposed = 0, keys = (size_t)b->n_pages * (size_t)b->page_len;
    for (int i = 0; i < net->n_layers && cu->can.wgmma; i++) {
        const struct latent *l = &net->layers[i].mixer.latent;
        if (net->layers[i].mixer.kind != MIXER_LATENT || !expanded_sizes(l->nope_dim, l->v_dim))
            continue;
        size_t H = (size_t)l->n_heads, n = H * (size_t)l->nope_dim;
        k = n > k ? n : k;
        v = H * (size_t)l->v_dim > v ? H * (size_t)l->v_dim : v;
        heads = H > heads ? H : heads;
        transposed = n * (size_t)l->kv_rank > transposed ? n * (size_t)l->kv_rank : transposed;
    }
    if (!heads)
        return true;
    size_t most = EXPANDED_BYTES / (2 * (LATENT_WIDTH + k + v) + 4 * heads);
    keys = keys < most ? keys : most;
    size_t tiles = heads * (keys / WGMMA_ROWS + 1);
    struct route_tables *t = &e->list->list;
    const struct device_buffer list[] = {{(void **)&e->x, keys * LATENT_RANK * 2},
                                         {(void **)&e->kr, keys * LATENT_ROPE * 2},
                                         {(void **)&e->k, keys * k * 2},
                                         {(void **)&e->v, keys * v * 2},
                                         {(void **)&e->wkb_transposed, transposed * 2},
                                         {(void **)&t->n_tiles, 64},
                                         {(void **)&t->tiles, 3 * tiles * 4},
                                         {(void **)&t->pairs, heads * keys * 4}};
    if (!cuda_own(cu, list, (int)(sizeof list / sizeof *list), err))
        return false;
    e->max_keys = (int)keys;
    return true;
}

bool latent_expanded_fits(const struct cuda_backend *cu, const struct latent_args &p)
{
    const struct latent_expand *e = p.expand;
    return e && cu->can.wgmma && p.rank == LATENT_RANK && p.rope_dim == LATENT_ROPE &&
           expanded_sizes(p.nope_dim, e->v_dim) && gemm_wgmma_suits(cu, e->wvb, false) &&
           expanded_keys(cu) <= e->max_keys &&
           (size_t)expanded_shared<4, 4>::BYTES <= cu->shared_limit;
}

/* The fp16 matrix H x (Dn, C), transposed from H x (C, Dn). */
static struct matrix expanded_transpose(struct cuda_backend *cu, const struct matrix *w,
                                        uint8_t *to)
{
    struct matrix m = {};
    m.n_in = w->n_out;
    m.n_out = w->n_in;
    m.n_expert = w->n_expert;
    m.n_kt = m.n_in / TILE_K;
    m.n_tiles = m.n_out / TILE_ROWS;
    m.n_seg = 1;
    m.set = SET_FAST;
    m.max_tile_bytes = F16_BYTES;
    struct seg *s = &m.seg[0];
    s->base = to;
    s->kind = TILE_F16;
    s->dtype = DT_F16;
    s->tile_bytes = F16_BYTES;
    s->rows = m.n_out;
    s->n_tiles = m.n_tiles;
    s->expert_bytes = (size_t)m.n_tiles * (size_t)m.n_kt * F16_BYTES;
    cuda_launch(cu, expanded_transpose_kernel,
                dim3((unsigned)(m.n_tiles * m.n_kt), (unsigned)m.n_expert), 256, 0, LAUNCH_EARLY,
                *w, to);
    return m;
}

/* y (H, n_keys, n_out) = latents times each head's matrix, fp16 scaled by HIDDEN_SCALE. */
static void expanded_product(struct cuda_backend *cu, const struct matrix *w,
                             const struct latent_expand *e, int n_keys, uint16_t *y)
{
    struct gemm_args g = {};
    g.w = *w;
    g.x = e->x;
    g.ldx = LATENT_RANK;
    g.rows = n_keys;
    g.unscale = 1.0f;
    g.y = (float *)y;
    g.ldy = w->n_out;
    g.narrow = true;
    g.moe = true;
    g.used = w->n_expert;
    g.route = e->list->list;
    gemm_wgmma(cu, g, false, w->n_expert * ceil_div(n_keys, WGMMA_ROWS));
}

void latent_expanded(struct cuda_backend *cu, const struct latent_args &p, const int2 *tiles,
                     int n_tiles)
{
    const struct latent_expand *e = p.expand;
    int n_keys = expanded_keys(cu), H = p.n_heads;
    bool quant = p.type == DT_Q8_0 || p.type == DT_Q4_0 || p.type == DT_F8_E4M3;
    cuda_launch(cu, quant ? expanded_gather_kernel<true> : expanded_gather_kernel<false>,
                dim3((unsigned)ceil_div(n_keys, 8)), 256, 0, LAUNCH_EARLY, p, n_keys, e->x, e->kr);
    latent_heads_list(cu, e->list, n_keys, WGMMA_ROWS);
    struct matrix transposed = expanded_transpose(cu, e->wkb, e->wkb_transposed);
    expanded_product(cu, &transposed, e, n_keys, e->k);
    expanded_product(cu, e->wvb, e, n_keys, e->v);
    struct expanded_args a = {};
    a.step = p.step;
    a.q = p.qr;
    a.k = e->k;
    a.kr = e->kr;
    a.v = e->v;
    a.a = e->a;
    a.fp16_out = e->fp16_out ? cu->forms.fp16 : NULL;
    a.fp16_scale = cu->forms.scale;
    a.tiles = tiles;
    a.n_tiles = n_tiles;
    a.n_heads = H;
    a.n_keys = n_keys;
    a.scale = p.scale;
    bool wide = p.nope_dim == 192;
    cuda_launch(cu, wide ? latent_expanded_kernel<4, 4> : latent_expanded_kernel<3, 2>,
                dim3((unsigned)H, (unsigned)n_tiles), EXPANDED_THREADS,
                wide ? (size_t)expanded_shared<4, 4>::BYTES : (size_t)expanded_shared<3, 2>::BYTES,
                LAUNCH_EARLY, a);
}
