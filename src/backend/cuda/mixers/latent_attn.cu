/*
 * MLA attention over latents of 512 + 64 values (fp16 or bf16) with mma.sync. All heads of a row
 * read the same latents, so the queries of many heads (and of neighbouring rows of a prompt) are
 * the rows of one GEMM, and a latent tile in shared memory serves as keys and as values. A block
 * has 16 MT queries: either of one decode, with the keys cut into n_split splits that a second
 * kernel combines, or of a prompt's rows, heads fastest.
 */
#include "backend/cuda/mixers/latent_mma.cuh"

enum { LAT_ROW = LATENT_WIDTH * 2, LAT_PIECES = LAT_ROW / 16, LAT_TILE = LAT_KEYS * LAT_ROW };

/* Fills in which queries the block has. Returns the last key they see, or -1 if there are none. */
template <int MT, bool PROMPT>
DEVICE int latent_rows(const struct latent_args &p, const int2 *tiles, int n_tiles,
                       struct latent_shared<MT, LAT_ROW> *sh, int *seq)
{
    enum { M = 16 * MT };
    int H = p.n_heads, groups = (H + M - 1) / M, row0, pair0, pairs;
    if (PROMPT) { /* the last rows start first: they see the most keys */
        int2 tile = tiles[n_tiles - 1 - (int)blockIdx.y];
        *seq = tile.x;
        row0 = tile.y;
        pair0 = (int)blockIdx.x * M;
        pairs = min(64, p.step.q_start[tile.x + 1] - row0) * H;
    } else {
        row0 = (int)blockIdx.y / groups;
        *seq = row0; /* decodes come first */
        pair0 = (int)blockIdx.y % groups * M;
        pairs = H;
    }
    if (pair0 >= pairs)
        return -1;
    for (int r = (int)threadIdx.x; r < M; r += LAT_WARPS * 32) {
        int t = row0 + (pair0 + r) / H;
        bool there = pair0 + r < pairs;
        sh->token[r] = there ? t : -1;
        sh->head[r] = (pair0 + r) % H;
        sh->pos[r] = there && p.step.slot[t] >= 0 ? p.step.pos[t] : -1;
    }
    __syncthreads();
    return p.step.pos[row0 + (min(pair0 + M, pairs) - 1) / H];
}

/* Stores the queries in shared memory, scaled to units of log2. */
template <int MT, bool BF16>
DEVICE void latent_queries(const struct latent_args &p, struct latent_shared<MT, LAT_ROW> *sh)
{
    float scale = p.scale * 1.4426950408889634f;
#pragma unroll(MT == 1 ? 5 : 3)
    for (int i = (int)threadIdx.x; i < 16 * MT * LAT_PIECES; i += LAT_WARPS * 32) {
        int r = i / LAT_PIECES, piece = i % LAT_PIECES, t = sh->token[r];
        uint4 v = make_uint4(0, 0, 0, 0);
        if (t >= 0) {
            size_t row = (size_t)t * (size_t)p.n_heads + (size_t)sh->head[r];
            const float *from = piece < LATENT_RANK / 8
                                    ? p.q + row * LATENT_RANK + (size_t)(piece * 8)
                                    : p.qr + row * (size_t)(p.nope_dim + LATENT_ROPE) +
                                          (size_t)(p.nope_dim + piece * 8 - LATENT_RANK);
            float4 a = ((const float4 *)from)[0], b = ((const float4 *)from)[1];
            float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 8; j++)
                x[j] = clamp_half(x[j] * scale);
            v = make_uint4(pack_kv<BF16>(x[0], x[1]), pack_kv<BF16>(x[2], x[3]),
                           pack_kv<BF16>(x[4], x[5]), pack_kv<BF16>(x[6], x[7]));
        }
        *(uint4 *)(sh->q + r * LAT_ROW + ((piece ^ (r & 7)) << 4)) = v;
    }
}

/* Writes a pair of columns of a row: as fp16 for the next product, or to the split's sums. */
DEVICE void latent_put_pair(const struct latent_args &p, int t, int h, size_t part_row, int col,
                            float x, float y)
{
    if (p.n_split > 1)
        *(float2 *)(p.part + part_row * LATENT_RANK + (size_t)col) = make_float2(x, y);
    else
        *(uint32_t *)latent_sum_at(p, t, h, col) = pack_half2(clamp_half(x), clamp_half(y));
}

/* Grid: PROMPT: ((row, head) pairs of 64 rows / M, tiles of rows); else (n_split, decodes *
 * groups of M heads). For the scores a warp has one m tile and 8 MT keys; for P V it has 64
 * columns of all rows. */
template <int MT, bool BF16, bool PROMPT>
static __global__ void __launch_bounds__(LAT_WARPS * 32, 1)
    latent_attn_kernel(const __grid_constant__ struct latent_args p, const int2 *tiles, int n_tiles,
                       int stages)
{
    enum { M = 16 * MT, GROUPS = LAT_WARPS / MT };
    SHARED_BYTES(shared);
    struct latent_shared<MT, LAT_ROW> *sh = (struct latent_shared<MT, LAT_ROW> *)shared;
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3, mt = w % MT, group = w / MT;
    int seq = 0, last = latent_rows<MT, PROMPT>(p, tiles, n_tiles, sh, &seq), from = 0, now = last;
    if (last < 0)
        return;
    size_t part_row = ((size_t)blockIdx.y * (size_t)p.n_split + (size_t)blockIdx.x) * M;
    if (!PROMPT && p.n_split > 1) {
        int per = latent_part_keys(last, p.n_split);
        from = (int)blockIdx.x * per;
        if (from > last) {
            dependency_wait();
            for (int r = (int)threadIdx.x; r < M; r += LAT_WARPS * 32)
                p.ml[2 * (part_row + (size_t)r) + 1] = 0.0f;
            return;
        }
        last = min(last, from + per - 1);
    }
    const int32_t *pages = p.step.pages + (size_t)seq * (size_t)p.step.head[STEP_PAGE_STRIDE];
    /* Warp w copies keys w, w + 8, ..; lane i holds the cache row of the i-th of them. */
    auto fetch = [&](int base, int buffer) {
        uint8_t *to = sh->keys + buffer * LAT_TILE;
        int real = min(base + w + (lane & 7) * LAT_WARPS, last), page = real / p.page_len;
        uint32_t slot = (uint32_t)pages[page] * (uint32_t)p.page_len;
        slot += (uint32_t)(real - page * p.page_len);
#pragma unroll
        for (int i = 0; i < LAT_KEYS / LAT_WARPS; i++) {
            int key = w + i * LAT_WARPS;
            const uint8_t *from = p.cache + (size_t)__shfl_sync(FULL_WARP, slot, i) * LAT_ROW;
#pragma unroll
            for (int j = 0; j < LAT_PIECES; j += 32)
                if (j + lane < LAT_PIECES)
                    copy_async16(to + key * LAT_ROW + (((j + lane) ^ (key & 7)) << 4),
                                 from + (j + lane) * 16);
        }
        copy_async_commit();
    };
    /* Latents of earlier steps do not depend on the preceding kernel. */
    bool early = !PROMPT && from + LAT_KEYS <= now;
    if (early)
        fetch(from, 0);
    dependency_trigger();
    dependency_wait();
    if (!early)
        fetch(from, 0);
    latent_queries<MT, BF16>(p, sh);
    float out[MT][8][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    for (int base = from, n = 0; base <= last; base += LAT_KEYS, n++) {
        int buffer = stages == 2 ? n & 1 : 0;
        if (stages == 2 && base + LAT_KEYS <= last)
            fetch(base + LAT_KEYS, buffer ^ 1);
        else
            copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const uint8_t *keys = sh->keys + buffer * LAT_TILE;
        float s[MT][4] = {};
        latent_scores<MT, BF16, LAT_ROW>(sh->q, keys, mt, group * 8 * MT, s);
        latent_softmax<MT, BF16, LAT_ROW>(sh, mt, group, base, last, s, top, total);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            float shrink[2] = {sh->shrink[m * 16 + g], sh->shrink[m * 16 + g + 8]};
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    out[m][j][i] *= shrink[i >> 1];
        }
        latent_gather<MT, BF16, LAT_ROW>(sh->p, keys, w * 64, out);
        __syncthreads(); /* all warps have read the tile and the probabilities */
        if (stages == 1 && base + LAT_KEYS <= last)
            fetch(base + LAT_KEYS, 0);
    }
    copy_async_wait<0>();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] += __shfl_xor_sync(FULL_WARP, total[r], 1);
        total[r] += __shfl_xor_sync(FULL_WARP, total[r], 2);
        if (c == 0)
            sh->most[group][mt * 16 + g + 8 * r] = total[r];
        if (c == 0 && group == 0)
            sh->shrink[mt * 16 + g + 8 * r] = top[r];
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = m * 16 + g + 8 * r, t = sh->token[row];
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
                sum += sh->most[i][row];
            if (t < 0)
                continue;
            float f = sum > 0.0f ? 1.0f / sum : 0.0f;
            if (p.n_split > 1 && w == 0 && c == 0) {
                p.ml[2 * (part_row + (size_t)row)] = sh->shrink[row];
                p.ml[2 * (part_row + (size_t)row) + 1] = sum;
            }
#pragma unroll
            for (int j = 0; j < 8; j++)
                latent_put_pair(p, t, sh->head[row], part_row + (size_t)row, w * 64 + j * 8 + 2 * c,
                                out[m][j][2 * r] * f, out[m][j][2 * r + 1] * f);
        }
}

/* Combines the splits of a row. Grid: (heads, decodes). M: rows per unit. */
static __global__ void __launch_bounds__(128)
    latent_combine_kernel(const __grid_constant__ struct latent_args p, int M)
{
    SHARED_BYTES(shared);
    float *weight = (float *)shared; /* (n_split) */
    dependency_wait();
    dependency_trigger();
    int h = (int)blockIdx.x, t = (int)blockIdx.y, groups = (p.n_heads + M - 1) / M;
    int tid = (int)threadIdx.x;
    size_t unit = (size_t)t * (size_t)groups + (size_t)(h / M);
    size_t row0 = unit * (size_t)p.n_split * (size_t)M + (size_t)(h % M);
    if (tid < 32) {
        float top = -INFINITY, sum = 0.0f, m[LATENT_MAX_SPLIT / 32], l[LATENT_MAX_SPLIT / 32];
#pragma unroll
        for (int i = 0; i < LATENT_MAX_SPLIT / 32; i++) {
            int part = tid + 32 * i;
            const float *ml = p.ml + 2 * (row0 + (size_t)part * (size_t)M);
            l[i] = part < p.n_split ? ml[1] : 0.0f;
            m[i] = l[i] > 0.0f ? ml[0] : -INFINITY;
            top = fmaxf(top, m[i]);
        }
        top = warp_max(top);
        top = top == -INFINITY ? 0.0f : top;
#pragma unroll
        for (int i = 0; i < LATENT_MAX_SPLIT / 32; i++) {
            l[i] *= fast_exp2(m[i] - top);
            sum += l[i];
        }
        sum = warp_sum(sum);
#pragma unroll
        for (int i = 0; i < LATENT_MAX_SPLIT / 32; i++)
            if (tid + 32 * i < p.n_split)
                weight[tid + 32 * i] = sum > 0.0f ? l[i] / sum : 0.0f;
    }
    __syncthreads();
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < p.n_split; i++) {
        float f = weight[i];
        if (f == 0.0f) /* an empty split has written nothing */
            continue;
        float4 x = *(const float4 *)(p.part + (row0 + (size_t)i * (size_t)M) * LATENT_RANK +
                                     (size_t)(tid * 4));
        v.x += f * x.x, v.y += f * x.y, v.z += f * x.z, v.w += f * x.w;
    }
    *(uint32_t *)latent_sum_at(p, t, h, tid * 4) = pack_half2(clamp_half(v.x), clamp_half(v.y));
    *(uint32_t *)latent_sum_at(p, t, h, tid * 4 + 2) = pack_half2(clamp_half(v.z), clamp_half(v.w));
}

/* Host */

template <int MT> static size_t latent_attn_shared(int stages)
{
    return sizeof(struct latent_shared<MT, LAT_ROW>) + (size_t)(stages - 1) * LAT_TILE;
}

static size_t latent_attn_least(int mt)
{
    return mt == 1   ? latent_attn_shared<1>(1)
           : mt == 2 ? latent_attn_shared<2>(1)
                     : latent_attn_shared<4>(1);
}

/* The number of 16-row m tiles per block: enough for all rows if shared memory allows. */
static int latent_attn_mt(const struct cuda_backend *cu, int rows)
{
    int mt = rows <= 16 ? 1 : rows <= 32 ? 2 : LAT_MAX_MT;
    while (mt > 1 && latent_attn_least(mt) > cu->shared_limit)
        mt /= 2;
    return mt;
}

bool latent_attn_fits(const struct cuda_backend *cu, const struct latent_args &p)
{
    return p.rank == LATENT_RANK && p.rope_dim == LATENT_ROPE && p.nope_dim % 4 == 0 &&
           (p.type == DT_F16 || p.type == DT_BF16) && latent_attn_least(1) <= cu->shared_limit;
}

/* The same for decodes. One decode, or a few with short contexts, are limited by latency: two
 * blocks of 16 heads finish sooner than one of 32, although each reads all keys. */
static int latent_decode_mt(const struct cuda_backend *cu, int n_heads, int rows, bool deep)
{
    bool few = rows == 1 || (rows <= 4 && !deep);
    return few && n_heads <= 32 ? 1 : latent_attn_mt(cu, n_heads);
}

static int latent_attn_splits(const struct cuda_backend *cu, int units)
{
    int n = cu->n_sm / units;
    return n < 1 ? 1 : n > LATENT_MAX_SPLIT ? LATENT_MAX_SPLIT : n;
}

size_t latent_attn_units(const struct cuda_backend *cu, int max_seqs, int n_heads)
{
    size_t most = 0;
    for (int i = 0; i < 2 * max_seqs; i++) {
        int n = i / 2 + 1, mt = latent_decode_mt(cu, n_heads, n, i % 2);
        int units = n * ceil_div(n_heads, 16 * mt), splits = latent_attn_splits(cu, units);
        size_t rows = splits > 1 ? (size_t)(units * splits * 16 * mt) : 0;
        most = rows > most ? rows : most;
    }
    return most;
}

template <int MT, bool PROMPT>
static void latent_attn_launch(struct cuda_backend *cu, const struct latent_args &p, dim3 grid,
                               const int2 *tiles, int n_tiles)
{
    int stages = latent_attn_shared<MT>(2) <= cu->shared_limit ? 2 : 1;
    if (p.type == DT_BF16)
        cuda_launch(cu, latent_attn_kernel<MT, true, PROMPT>, grid, LAT_WARPS * 32,
                    latent_attn_shared<MT>(stages), LAUNCH_EARLY, p, tiles, n_tiles, stages);
    else
        cuda_launch(cu, latent_attn_kernel<MT, false, PROMPT>, grid, LAT_WARPS * 32,
                    latent_attn_shared<MT>(stages), LAUNCH_EARLY, p, tiles, n_tiles, stages);
}

void latent_attn_decode(struct cuda_backend *cu, struct latent_args p, int rows)
{
    int mt = latent_decode_mt(cu, p.n_heads, rows, cu->step.layout.deep);
    int units = rows * ceil_div(p.n_heads, 16 * mt);
    p.n_split = latent_attn_splits(cu, units);
    dim3 grid((unsigned)p.n_split, (unsigned)units);
    if (mt == 1)
        latent_attn_launch<1, false>(cu, p, grid, NULL, 0);
    else if (mt == 2)
        latent_attn_launch<2, false>(cu, p, grid, NULL, 0);
    else
        latent_attn_launch<4, false>(cu, p, grid, NULL, 0);
    if (p.splits)
        *p.splits = latent_splits{p.n_split, 16 * mt};
    else if (p.n_split > 1)
        cuda_launch(cu, latent_combine_kernel, dim3((unsigned)p.n_heads, (unsigned)rows), 128,
                    LATENT_MAX_SPLIT * 4, LAUNCH_EARLY, p, 16 * mt);
}

void latent_attn_prompt(struct cuda_backend *cu, struct latent_args p, const int2 *tiles,
                        int n_tiles)
{
    int mt = latent_attn_mt(cu, 64);
    p.n_split = 1;
    dim3 grid((unsigned)ceil_div(64 * p.n_heads, 16 * mt), (unsigned)n_tiles);
    if (mt == 1)
        latent_attn_launch<1, true>(cu, p, grid, tiles, n_tiles);
    else if (mt == 2)
        latent_attn_launch<2, true>(cu, p, grid, tiles, n_tiles);
    else
        latent_attn_launch<4, true>(cu, p, grid, tiles, n_tiles);
}
