/*
 * Encoder attention with mma.sync: bidirectional, over the whole text or image, within a window, or
 * within each row's span. A step contains whole texts and images, so queries, keys and values are
 * rows of one projection (fp16, scaled by HIDDEN_SCALE) and no cache is read. A block has 64 rows of
 * a sequence and one head, and double-buffers tiles of 64 keys and values in shared memory. Texts
 * are short: warps without rows and groups of sixteen keys past the last are skipped. Heads whose
 * size is no multiple of 16 (72 in SigLIP's and Qwen's image towers) are padded with zeros in shared
 * memory and in the fragments of the queries.
 */
#include "backend/cuda/attn/attn_encode.cuh"

enum { ENCODE_ROWS = 64, ENCODE_KEYS = 64, ENCODE_THREADS = 128 };

/* [first, last]: the keys that row t at position `pos` of a sequence of `n` rows sees. */
DEVICE int2 encode_keys(const struct encode_args &p, int t, int pos, int n)
{
    int2 keys = {0, n - 1};
    if (p.window) {
        keys.x = max(0, pos - p.window + 1);
        keys.y = min(n - 1, pos + p.window - 1);
    }
    if (p.spans && p.spans[2 * t] < p.spans[2 * t + 1]) {
        keys.x = p.spans[2 * t];
        keys.y = p.spans[2 * t + 1] - 1;
    }
    return keys;
}

/* Grid: (heads, tiles of 64 rows). Four warps with 16 rows each. Rows of shared memory are
 * padded by 16 bytes, so that eight consecutive rows are free of bank conflicts. */
template <int D>
static __global__ void __launch_bounds__(ENCODE_THREADS)
    attn_encode_kernel(const __grid_constant__ struct encode_args p)
{
    enum { ROW = 2 * D + 16, PIECES = D / 8, TILE = ENCODE_KEYS * ROW };
    SHARED_BYTES(shared); /* [2][K, V] */
    dependency_wait();
    dependency_trigger();
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3;
    int h = (int)blockIdx.x, H = p.n_heads, kv_head = h * p.n_kv / H;
    int2 tile = p.tiles[blockIdx.y];
    int start = p.q_start[tile.x], end = p.q_start[tile.x + 1], row0 = tile.y;
    int rows = min((int)ENCODE_ROWS, end - row0), first = row0 - start, dim = p.dim;
    /* Keys that any of the tile's rows sees, and keys that all of them see. */
    int from = end - start, last = 0, all_from = 0, all_last = from - 1;
    for (int i = lane; i < rows; i += 32) {
        int2 k = encode_keys(p, row0 + i, first + i, end - start);
        from = min(from, k.x);
        last = max(last, k.y);
        all_from = max(all_from, k.x);
        all_last = min(all_last, k.y);
    }
#pragma unroll
    for (int i = 16; i; i >>= 1) {
        from = min(from, __shfl_xor_sync(FULL_WARP, from, i));
        last = max(last, __shfl_xor_sync(FULL_WARP, last, i));
        all_from = max(all_from, __shfl_xor_sync(FULL_WARP, all_from, i));
        all_last = min(all_last, __shfl_xor_sync(FULL_WARP, all_last, i));
    }
    from &= ~15;
    const uint16_t *keys = p.qkv + (size_t)start * (size_t)p.stride + (size_t)((H + kv_head) * dim);
    for (int i = (int)threadIdx.x; i < 4 * ENCODE_KEYS; i += ENCODE_THREADS)
        for (int k = dim; k < D; k += 8)
            *(uint4 *)(shared + i * ROW + 2 * k) = make_uint4(0, 0, 0, 0);
    auto fetch = [&](int base, int buffer) {
        uint8_t *to = shared + buffer * 2 * TILE;
        int n = min((int)ENCODE_KEYS, (last - base + 16) & ~15);
        for (int i = (int)threadIdx.x; i < n * PIECES; i += ENCODE_THREADS) {
            int key = i / PIECES, piece = i - key * PIECES, real = min(base + key, last);
            if (piece * 8 >= dim)
                continue;
            const uint16_t *at = keys + (size_t)real * (size_t)p.stride + (size_t)(piece * 8);
            copy_async16(to + key * ROW + piece * 16, at);
            copy_async16(to + TILE + key * ROW + piece * 16, at + p.n_kv * dim);
        }
        copy_async_commit();
    };
    fetch(from, 0);

    uint32_t qf[D / 16][4]; /* A fragments of the queries of rows g and g+8 */
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = min(w * 16 + g + 8 * (j & 1), rows - 1), d = i * 16 + 2 * c + 8 * (j >> 1);
            qf[i][j] = d < dim ? *(const uint32_t *)(p.qkv + (size_t)(row0 + r) * (size_t)p.stride +
                                                     (size_t)(h * dim + d))
                               : 0;
        }
    float out[D / 8][4] = {};
    struct softmax_rows st;
    softmax_clear(st);
    int2 seen[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = min(w * 16 + g + 8 * r, rows - 1);
        seen[r] = encode_keys(p, row0 + row, first + row, end - start);
    }
    bool busy = w * 16 < rows;
    for (int base = from, n = 0; base <= last; base += ENCODE_KEYS, n++) {
        if (base + ENCODE_KEYS <= last)
            fetch(base + ENCODE_KEYS, (n + 1) & 1);
        else
            copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const uint8_t *ks = shared + (n & 1) * 2 * TILE, *vs = ks + TILE;
        int groups = busy ? min((int)ENCODE_KEYS, last - base + 16) >> 4 : 0; /* of 16 keys */
        float s[ENCODE_KEYS / 8][4] = {};
#pragma unroll
        for (int j = 0; j < ENCODE_KEYS / 16; j++)
            if (j < groups)
#pragma unroll
                for (int i = 0; i < D / 16; i++) {
                    /* keys 0-7 k 0-7, keys 0-7 k 8-15, keys 8-15 k 0-7, keys 8-15 k 8-15 */
                    int key = j * 16 + (lane >> 4) * 8 + (lane & 7);
                    uint32_t b[4];
                    ldmatrix4(b, ks + key * ROW + i * 32 + (lane >> 3 & 1) * 16);
                    mma_f16(s[2 * j], qf[i], b[0], b[1]);
                    mma_f16(s[2 * j + 1], qf[i], b[2], b[3]);
                }
        bool edge = base < all_from || base + ENCODE_KEYS - 1 > all_last;
#pragma unroll
        for (int j = 0; j < ENCODE_KEYS / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = base + j * 8 + 2 * c + (i & 1);
                s[j][i] *= p.to_log2;
                if (edge && (key < seen[i >> 1].x || key > seen[i >> 1].y))
                    s[j][i] = -INFINITY;
            }
        softmax_tile<ENCODE_KEYS / 2>([&](int i) -> float & { return s[i >> 2][i & 3]; }, st);
#pragma unroll
        for (int j = 0; j < D / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                out[j][i] *= st.shrink[i >> 1];
#pragma unroll
        for (int i = 0; i < ENCODE_KEYS / 16; i++)
            if (i < groups) {
                uint32_t pf[4] = {pack_half2(s[2 * i][0], s[2 * i][1]),
                                  pack_half2(s[2 * i][2], s[2 * i][3]),
                                  pack_half2(s[2 * i + 1][0], s[2 * i + 1][1]),
                                  pack_half2(s[2 * i + 1][2], s[2 * i + 1][3])};
#pragma unroll
                for (int j = 0; j < D / 16; j++) {
                    /* transposed: keys 0-7 d 0-7, 8-15 d 0-7, 0-7 d 8-15, 8-15 d 8-15 */
                    uint32_t b[4];
                    ldmatrix4_trans(b,
                                    vs + (i * 16 + (lane & 15)) * ROW + j * 32 + (lane >> 4) * 16);
                    mma_f16(out[2 * j], pf, b[0], b[1]);
                    mma_f16(out[2 * j + 1], pf, b[2], b[3]);
                }
            }
        __syncthreads(); /* the next round overwrites this buffer */
    }
    attn_encode_write<D>(
        p, st, [&](int j, int k) { return out[j][k]; }, h, row0 + w * 16, rows - w * 16);
}

/* Host */

template <int D>
static void attn_encode_launch(struct cuda_backend *cu, const struct encode_args &p, int tiles)
{
    cuda_launch(cu, attn_encode_kernel<D>, dim3((unsigned)p.n_heads, (unsigned)tiles),
                ENCODE_THREADS, (size_t)(4 * ENCODE_KEYS * (2 * D + 16)), LAUNCH_EARLY, p);
}

bool attn_encode_fits(const struct attn_layer *l)
{
    int D = l->k_dim;
    return l->bidirectional && D >= 16 && D % 8 == 0 && D <= 128 && l->v_dim == D &&
           l->n_heads % l->n_kv == 0 && !l->gated && !l->k_is_v && !l->shares_kv &&
           l->temp_beta == 0 && !l->sinks && l->softcap == 0;
}

struct encode_args attn_encode_args(struct cuda_backend *cu, const struct attn_layer *l,
                                    const struct step *s, struct rows *a)
{
    struct encode_args p = {};
    a->fp16 = pick_fp16_only(cu, s->n_tokens);
    a->n_floats = a->fp16 ? 0 : a->n;
    p.qkv = cu->encoder->qkv;
    p.tiles = (const int2 *)(cu->step.dev + cu->step.layout.q_tiles);
    p.q_start = s->q_start;
    p.slot = s->slot;
    p.a = a->floats;
    p.fp16_out = a->fp16 ? cu->forms.fp16 : NULL;
    p.fp16_scale = cu->forms.scale;
    p.to_log2 = 1.4426950408889634f * l->scale / (HIDDEN_SCALE * HIDDEN_SCALE);
    p.stride = l->wqkv->n_out;
    p.padded = ceil_div(a->width, TILE_K) * TILE_K;
    p.n_heads = l->n_heads;
    p.n_kv = l->n_kv;
    p.window = l->window;
    p.spans = l->spans;
    p.dim = l->k_dim;
    return p;
}

void attn_encode(struct cuda_backend *cu, const struct attn_layer *l, const struct step *s,
                 struct rows *a)
{
    struct encode_args p = attn_encode_args(cu, l, s, a);
    int tiles = cu->step.layout.n_q_tiles;
    switch (ceil_div(l->k_dim, 16) * 16) {
    case 16:
        attn_encode_launch<16>(cu, p, tiles);
        break;
    case 32:
        attn_encode_launch<32>(cu, p, tiles);
        break;
    case 48:
    case 64:
        attn_encode_launch<64>(cu, p, tiles);
        break;
    case 80:
        attn_encode_launch<80>(cu, p, tiles);
        break;
    case 96:
        attn_encode_launch<96>(cu, p, tiles);
        break;
    default:
        attn_encode_launch<128>(cu, p, tiles);
        break;
    }
}
