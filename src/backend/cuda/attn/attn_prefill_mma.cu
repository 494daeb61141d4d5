/*
 * Prefill attention with mma.sync: a block has 64 rows of one head and double-buffers tiles of 64
 * keys and values in shared memory. fp16 or bf16 cache, head_dim 64 or 128.
 */
#include "backend/cuda/attn/attn.cuh"
#include "backend/cuda/attn/attn_softmax.cuh"

enum { PRE_ROWS = 64, PRE_KEYS = 64 };

/*
 * Grid: (heads, tiles of 64 rows). Four warps with 16 rows each. K and V tiles are 64 keys x D in
 * shared memory: rows of 2D bytes, their 16-byte pieces swizzled by the row, double-buffered.
 */
template <int D, bool BF16>
static __global__ void __launch_bounds__(128, 3)
    attn_prefill_mma_kernel(const __grid_constant__ struct attn_args p, const int2 *tiles)
{
    enum { ROW = 2 * D, PIECES = D / 8, TILE = PRE_KEYS * ROW };
    SHARED_BYTES(shared); /* [2][K, V] */
    dependency_wait();
    dependency_trigger();
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3;
    int h = (int)blockIdx.x, H = p.n_heads, kv_head = h * p.kv.n_kv / H;
    int2 tile = tiles[blockIdx.y]; /* sequence, first row */
    int seq = tile.x, row0 = tile.y, rows = min((int)PRE_ROWS, p.step.q_start[seq + 1] - row0);
    const int32_t *pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    int first_pos = p.step.pos[row0], last_pos = first_pos + rows - 1;
    int from = p.window && first_pos - p.window + 1 > 0 ? first_pos - p.window + 1 : 0;
    from &= ~(PRE_KEYS - 1);

    auto fetch = [&](int base, int buffer) {
        uint8_t *to = shared + buffer * 2 * TILE;
        for (int i = (int)threadIdx.x; i < PRE_KEYS * PIECES; i += 128) {
            int key = i / PIECES, piece = i % PIECES, real = min(base + key, last_pos);
            size_t at = 2 * key_offset(p.kv, pages, real, kv_head, D) + (size_t)piece * 16;
            int where = key * ROW + ((piece ^ (key & 7)) << 4);
            copy_async16(to + where, p.kv.k + at);
            copy_async16(to + TILE + where, p.kv.v + at);
        }
        copy_async_commit();
    };
    fetch(from, 0);

    /* A fragments of the queries of this warp's rows g and g+8, scaled to units of log2. */
    uint32_t qf[D / 16][4];
    const float to_log2 = 1.4426950408889634f * p.scale;
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = min(w * 16 + g + 8 * (j & 1), rows - 1), d = i * 16 + 2 * c + 8 * (j >> 1);
            const float *e = p.q + ((size_t)(row0 + r) * (size_t)H + (size_t)h) * D + (size_t)d;
            qf[i][j] = pack_kv<BF16>(e[0] * to_log2, e[1] * to_log2);
        }
    float out[D / 8][4] = {};
    struct softmax_rows st;
    softmax_clear(st);
    const int pos[2] = {first_pos + w * 16 + g, first_pos + w * 16 + g + 8};
    for (int base = from, n = 0; base <= last_pos; base += PRE_KEYS, n++) {
        bool more = base + PRE_KEYS <= last_pos;
        if (more)
            fetch(base + PRE_KEYS, (n + 1) & 1);
        else
            copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const uint8_t *ks = shared + (n & 1) * 2 * TILE, *vs = ks + TILE;
        float s[PRE_KEYS / 8][4] = {};
#pragma unroll
        for (int i = 0; i < D / 16; i++)
#pragma unroll
            for (int j = 0; j < PRE_KEYS / 16; j++) {
                /* matrices: keys 0-7 k 0-7, keys 0-7 k 8-15, keys 8-15 k 0-7, keys 8-15 k 8-15 */
                int key = j * 16 + (lane >> 4) * 8 + (lane & 7), piece = i * 2 + (lane >> 3 & 1);
                uint32_t b[4];
                ldmatrix4(b, ks + key * ROW + ((piece ^ (key & 7)) << 4));
                mma_kv<BF16>(s[2 * j], qf[i], b[0], b[1]);
                mma_kv<BF16>(s[2 * j + 1], qf[i], b[2], b[3]);
            }
        auto sum = [&](int i) -> float & { return s[i >> 2][i & 3]; };
        if (base + PRE_KEYS - 1 > first_pos + w * 16 || p.window)
            softmax_mask<PRE_KEYS / 2>(sum, pos, base, p.window);
        softmax_tile<PRE_KEYS / 2>(sum, st);
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[j][i] *= st.shrink[i >> 1];
#pragma unroll
        for (int i = 0; i < PRE_KEYS / 16; i++) {
            uint32_t pf[4] = {pack_kv<BF16>(s[2 * i][0], s[2 * i][1]),
                              pack_kv<BF16>(s[2 * i][2], s[2 * i][3]),
                              pack_kv<BF16>(s[2 * i + 1][0], s[2 * i + 1][1]),
                              pack_kv<BF16>(s[2 * i + 1][2], s[2 * i + 1][3])};
#pragma unroll
            for (int j = 0; j < D / 16; j++) {
                /* transposed: keys 0-7 d 0-7, keys 8-15 d 0-7, keys 0-7 d 8-15, keys 8-15 d 8-15 */
                int key = i * 16 + (lane & 15), piece = j * 2 + (lane >> 4);
                uint32_t b[4];
                ldmatrix4_trans(b, vs + key * ROW + ((piece ^ (key & 7)) << 4));
                mma_kv<BF16>(out[2 * j], pf, b[0], b[1]);
                mma_kv<BF16>(out[2 * j + 1], pf, b[2], b[3]);
            }
        }
        __syncthreads(); /* the next round overwrites this buffer */
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = softmax_total(st, r);
        int row = w * 16 + g + 8 * r;
        if (row >= rows)
            continue;
        bool hidden = p.step.slot[row0 + row] < 0;
        float inv = hidden ? 0.0f : 1.0f / total;
        float *to = p.a + ((size_t)(row0 + row) * (size_t)H + (size_t)h) * D;
#pragma unroll
        for (int j = 0; j < D / 8; j++)
            *(float2 *)(to + j * 8 + 2 * c) =
                hidden ? make_float2(0.0f, 0.0f)
                       : make_float2(out[j][2 * r] * inv, out[j][2 * r + 1] * inv);
    }
}

template <int D, bool BF16>
static void attn_prefill_mma_launch(struct cuda_backend *cu, const struct attn_args &p,
                                    const int2 *tiles, int n_tiles)
{
    cuda_launch(cu, attn_prefill_mma_kernel<D, BF16>, dim3((unsigned)p.n_heads, (unsigned)n_tiles),
                128, (size_t)4 * PRE_KEYS * 2 * D, LAUNCH_EARLY, p, tiles);
}

void attn_prefill_mma(struct cuda_backend *cu, const struct attn_args &p, const int2 *tiles,
                      int n_tiles)
{
    bool f16 = p.kv.type == DT_F16;
    if (p.kv.head_dim == 64)
        f16 ? attn_prefill_mma_launch<64, false>(cu, p, tiles, n_tiles)
            : attn_prefill_mma_launch<64, true>(cu, p, tiles, n_tiles);
    else
        f16 ? attn_prefill_mma_launch<128, false>(cu, p, tiles, n_tiles)
            : attn_prefill_mma_launch<128, true>(cu, p, tiles, n_tiles);
}
