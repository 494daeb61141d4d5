/*
 * Attention of prompts on Hopper (wgmma): heads of 128, halves or bf16 in the cache. A block takes 64
 * rows of two heads that share a kv head, a warpgroup each; keys and values come by 128 through a
 * ring of three. A round multiplies q with its keys while the probabilities of the round before
 * multiply their values, and works out its own probabilities while that still runs. Everything
 * else is attention.cu's prefill.
 */
#include "backend/cuda/cuda.h"
#include "backend/cuda/wgmma.cuh"

#include <math.h>

enum { FLASH_ROWS = 64, FLASH_KEYS = 128, FLASH_D = 128, FLASH_STAGES = 3, FLASH_HEADS = 2 };
enum {
    FLASH_PANEL = FLASH_KEYS * 128, /* 64 elements of every key */
    FLASH_TILE = 2 * FLASH_PANEL,   /* keys or values */
    FLASH_STAGE = 2 * FLASH_TILE,   /* both */
    FLASH_SHARED = 1024 + FLASH_STAGES * FLASH_STAGE
};

struct flash_args {
    const uint8_t *k, *v; /* (n_pages, K, page_len, D) */
    struct step step;
    const float *q;    /* (n_tokens, H, D) */
    float *a;          /* (n_tokens, H, D) */
    const int2 *tiles; /* sequence, first row */
    int n_tiles, n_heads, n_kv, page_len, page_shift, window;
    float scale;
};

template <bool BF16> DEVICE uint32_t pack_pair(float x, float y)
{
    return BF16 ? pack_bf162(x, y) : pack_half2(x, y);
}

/* The state of a row's softmax: rows g and g+8 of the warp. */
struct flash_state {
    float top[2], total[2], shrink[2];
    int pos[2];
};

/* Logits to probabilities. edge: some of these keys may be hidden from some rows. */
DEVICE void flash_softmax(float (&s)[FLASH_KEYS / 2], struct flash_state &st, int base, bool edge,
                          int window)
{
    int c = lane_id() & 3;
    if (edge)
#pragma unroll
        for (int i = 0; i < FLASH_KEYS / 2; i++) {
            int key = base + (i >> 2) * 8 + 2 * c + (i & 1), pos = st.pos[i >> 1 & 1];
            if (key > pos || (window && key <= pos - window))
                s[i] = -INFINITY;
        }
    float m[2] = {st.top[0], st.top[1]};
#pragma unroll
    for (int i = 0; i < FLASH_KEYS / 2; i++)
        m[i >> 1 & 1] = fmaxf(m[i >> 1 & 1], s[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        m[r] = fmaxf(m[r], __shfl_xor_sync(FULL_WARP, m[r], 1));
        m[r] = fmaxf(m[r], __shfl_xor_sync(FULL_WARP, m[r], 2));
        float anchor = m[r] == -INFINITY ? 0.0f : m[r]; /* nothing visible yet */
        st.shrink[r] = fast_exp2(st.top[r] - anchor);
        st.top[r] = m[r];
        m[r] = anchor;
        st.total[r] *= st.shrink[r];
    }
#pragma unroll
    for (int i = 0; i < FLASH_KEYS / 2; i++) {
        s[i] = fast_exp2(s[i] - m[i >> 1 & 1]);
        st.total[i >> 1 & 1] += s[i];
    }
}

template <bool BF16>
DEVICE void flash_pack(const float (&s)[FLASH_KEYS / 2], uint32_t (&pf)[FLASH_KEYS / 16][4])
{
#pragma unroll
    for (int i = 0; i < FLASH_KEYS / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            pf[i][j] = pack_pair<BF16>(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
}

/* Grid: (pairs of heads, tiles of 64 rows, the last first: they have the most keys). */
template <bool BF16>
static __global__ void __launch_bounds__(FLASH_HEADS * 128, 1)
    flash_kernel(const __grid_constant__ struct flash_args p)
{
    SHARED_BYTES(raw);
#ifdef STEEL_CUDA_SIM
    uint8_t *shared = raw;
#else
    uint8_t *shared = raw + (-(int)__cvta_generic_to_shared(raw) & 1023);
#endif
    dependency_wait();
    dependency_trigger();
    int lane = lane_id(), w = warp_id() & 3, g = lane >> 2, c = lane & 3, tid = (int)threadIdx.x;
    int h = (int)blockIdx.x * FLASH_HEADS + (warp_id() >> 2), H = p.n_heads;
    int kv_head = h * p.n_kv / H;
    int2 tile = p.tiles[p.n_tiles - 1 - (int)blockIdx.y];
    int seq = tile.x, row0 = tile.y, rows = min((int)FLASH_ROWS, p.step.q_start[seq + 1] - row0);
    const int32_t *pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    int first_pos = p.step.pos[row0], last_pos = first_pos + rows - 1;
    int from = p.window && first_pos - p.window + 1 > 0 ? first_pos - p.window + 1 : 0;
    from &= ~(FLASH_KEYS - 1);
    int rounds = (last_pos - from) / FLASH_KEYS + 1;

    int piece = tid & 15, key0 = tid >> 4;
    auto fetch = [&](int round) {
        if (round < rounds) {
            uint8_t *to = shared + round % FLASH_STAGES * FLASH_STAGE + (piece >> 3) * FLASH_PANEL +
                          key0 * 128 + (((piece ^ key0) & 7) << 4);
#pragma unroll
            for (int i = 0; i < FLASH_KEYS / 16; i++) {
                int key = min(from + round * FLASH_KEYS + i * 16 + key0, last_pos);
                int page = pages[key >> p.page_shift], off = key & (p.page_len - 1);
                size_t at = ((((size_t)page * (size_t)p.n_kv + (size_t)kv_head) << p.page_shift) +
                             (size_t)off) *
                                (FLASH_D * 2) +
                            (size_t)piece * 16;
                copy_async16(to + i * 16 * 128, p.k + at);
                copy_async16(to + FLASH_TILE + i * 16 * 128, p.v + at);
            }
        }
        copy_async_commit();
    };
    fetch(0);

    /* Queries of rows g and g+8 of this warp, already in units of log2. */
    uint32_t qf[FLASH_D / 16][4];
    const float to_log2 = 1.4426950408889634f * p.scale;
#pragma unroll
    for (int i = 0; i < FLASH_D / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = min(w * 16 + g + 8 * (j & 1), rows - 1), d = i * 16 + 2 * c + 8 * (j >> 1);
            float2 e =
                *(const float2 *)(p.q + ((size_t)(row0 + r) * (size_t)H + (size_t)h) * FLASH_D +
                                  (size_t)d);
            qf[i][j] = pack_pair<BF16>(e.x * to_log2, e.y * to_log2);
        }
    struct flash_state st;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        st.top[r] = -INFINITY;
        st.total[r] = 0.0f;
        st.pos[r] = first_pos + w * 16 + g + 8 * r;
    }
    float out[FLASH_D / 2] = {}, s[FLASH_KEYS / 2] = {};
    uint32_t pf[FLASH_KEYS / 16][4];
    wgmma_use(out);
    wgmma_use(s);
    auto arrive =
        [&](int round) { /* its keys and values are there for all; the next are asked for */
                         copy_async_wait<0>();
                         wgmma_publish();
                         __syncthreads();
                         fetch(round + 1);
        };
    auto keys = [&](int round) {
        const uint8_t *ks = shared + round % FLASH_STAGES * FLASH_STAGE;
        uint64_t desc = wgmma_rows(ks);
#pragma unroll
        for (int i = 0; i < FLASH_D / 16; i++) {
            uint64_t at = desc + (uint64_t)((i >> 2) * (FLASH_PANEL >> 4) + (i & 3) * 2);
            if (i == 0)
                wgmma<FLASH_KEYS, BF16, true>(s, qf[i], at);
            else
                wgmma<FLASH_KEYS, BF16>(s, qf[i], at);
        }
        wgmma_commit();
    };
    auto values = [&](int round) {
        const uint8_t *vs = shared + round % FLASH_STAGES * FLASH_STAGE + FLASH_TILE;
        uint64_t desc = wgmma_turned(vs, FLASH_PANEL);
#pragma unroll
        for (int i = 0; i < FLASH_KEYS / 16; i++)
            wgmma<FLASH_D, BF16, false, true>(out, pf[i], desc + (uint64_t)(i * (2048 >> 4)));
        wgmma_commit();
    };
    auto edge = [&](int round) {
        return from + (round + 1) * FLASH_KEYS - 1 > first_pos + w * 16 || p.window;
    };
    arrive(0);
    wgmma_fence();
    keys(0);
    wgmma_wait<0>();
    wgmma_use(s);
    flash_softmax(s, st, from, edge(0), p.window);
    flash_pack<BF16>(s, pf);
#pragma unroll 1
    for (int round = 1; round < rounds; round++) {
        arrive(round);
        wgmma_fence();
        keys(round);
        values(round - 1);
        wgmma_wait<1>();
        wgmma_use(s);
        flash_softmax(s, st, from + round * FLASH_KEYS, edge(round), p.window);
        wgmma_wait<0>();
        wgmma_use(out);
        wgmma_use(s); /* fragments still in use are not overwritten before this */
        flash_pack<BF16>(s, pf);
#pragma unroll
        for (int i = 0; i < FLASH_D / 2; i++)
            out[i] *= st.shrink[i >> 1 & 1];
    }
    wgmma_fence();
    values(rounds - 1);
    wgmma_wait<0>();
    wgmma_use(out);
    copy_async_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = st.total[r];
        total += __shfl_xor_sync(FULL_WARP, total, 1);
        total += __shfl_xor_sync(FULL_WARP, total, 2);
        int row = w * 16 + g + 8 * r;
        if (row >= rows)
            continue;
        bool hidden = p.step.slot[row0 + row] < 0;
        float inv = hidden ? 0.0f : 1.0f / total;
        float *to = p.a + ((size_t)(row0 + row) * (size_t)H + (size_t)h) * FLASH_D;
#pragma unroll
        for (int j = 0; j < FLASH_D / 8; j++)
            *(float2 *)(to + j * 8 + 2 * c) =
                hidden ? make_float2(0.0f, 0.0f)
                       : make_float2(out[4 * j + 2 * r] * inv, out[4 * j + 2 * r + 1] * inv);
    }
}

bool flash_suits(const struct cuda_backend *cu)
{
    const struct shape *s = &cu->shape;
    return cu->wgmma && s->head_dim == FLASH_D && s->n_heads / s->n_kv_heads % FLASH_HEADS == 0 &&
           FLASH_SHARED <= cu->shared_limit;
}

void flash_attend(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                  const float *q, float *a)
{
    const struct shape *sh = &cu->shape;
    struct flash_args p = {};
    p.k = (const uint8_t *)l->kv.k;
    p.v = (const uint8_t *)l->kv.v;
    p.step = *s;
    p.q = q;
    p.a = a;
    p.tiles = (const int2 *)(cu->step_dev + cu->layout.q_tiles);
    p.n_tiles = cu->layout.n_q_tiles;
    p.n_heads = sh->n_heads;
    p.n_kv = sh->n_kv_heads;
    p.page_len = sh->page_len;
    while (2 << p.page_shift <= sh->page_len)
        p.page_shift++;
    p.window = l->window;
    p.scale = sh->attn_scale;
    dim3 grid((unsigned)(p.n_heads / FLASH_HEADS), (unsigned)p.n_tiles);
    if (sh->kv_type == DT_F16)
        cuda_launch(cu, flash_kernel<false>, grid, FLASH_HEADS * 128, FLASH_SHARED, LAUNCH_EARLY,
                    p);
    else
        cuda_launch(cu, flash_kernel<true>, grid, FLASH_HEADS * 128, FLASH_SHARED, LAUNCH_EARLY, p);
}
