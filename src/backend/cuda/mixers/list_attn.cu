/*
 * Attention of rows over lists of keys whose first 512 values are also the values (fp16 or bf16), with mma.sync: compressed
 * attention, and latents that an indexer chose. The heads of a row are the rows of one product. A block has 16 MT heads of a
 * row and every n_split-th part of its keys, which a second kernel combines. struct P says where keys, queries and results
 * are.
 * Limit: for decodes the latency of a chain of tiles, and of gathering them; for prompts mma.sync.
 */
#include "backend/cuda/mixers/compressed.cuh"
#include "backend/cuda/mixers/latent_mma.cuh"

/* What a kernel asks of compressed attention. */
struct compressed_list {
    enum { ROW = LATENT_RANK * 2 };
    struct compressed_args a;
    typedef struct compressed_view view;
};
DEVICE struct compressed_view list_view(const struct compressed_list &p, int t)
{
    return compressed_view_of(p.a, t);
}
DEVICE size_t list_row(const struct compressed_list &p, const struct compressed_view &v, int i)
{
    return compressed_row(p.a, v, i);
}
DEVICE const float *list_query(const struct compressed_list &p, int t, int h, int i)
{
    return p.a.q + ((size_t)t * (size_t)p.a.n_heads + (size_t)h) * LATENT_RANK + (size_t)i;
}
DEVICE float list_sink(const struct compressed_list &p, int h, float top)
{
    return p.a.sinks ? fast_exp2(p.a.sinks[h] * 1.4426950408889634f - top) : 0.0f;
}
DEVICE void list_put(const struct compressed_list &p, int t, int h, int i, float x, float y)
{
    compressed_turn_back(p.a, t, i, &x, &y);
    *(uint32_t *)compressed_sum_at(p.a, t, h, i) = pack_half2(clamp_half(x), clamp_half(y));
}

/* What a kernel asks of latents. */
struct latent_list {
    enum { ROW = LATENT_WIDTH * 2 };
    struct latent_args a;
    struct index_choice choice;
    typedef struct compressed_view view; /* first 0: all keys are before the list's */
};
DEVICE struct compressed_view list_view(const struct latent_list &p, int t)
{
    struct compressed_view v;
    const struct step &s = p.a.step;
    v.pages = s.pages + (size_t)s.seq_of[t] * (size_t)s.head[STEP_PAGE_STRIDE];
    v.first = v.n_keys = 0;
    v.n = s.slot[t] < 0 ? 0 : p.choice.n[t] < 0 ? s.pos[t] + 1 : p.choice.n[t];
    v.list = p.choice.n[t] < 0 ? NULL : p.choice.list + (size_t)t * (size_t)p.choice.n_chosen;
    return v;
}
DEVICE size_t list_row(const struct latent_list &p, const struct compressed_view &v, int i)
{
    int key = v.list ? v.list[i] : i, page = key / p.a.page_len;
    return (size_t)v.pages[page] * (size_t)p.a.page_len + (size_t)(key - page * p.a.page_len);
}
DEVICE const float *list_query(const struct latent_list &p, int t, int h, int i)
{
    size_t row = (size_t)t * (size_t)p.a.n_heads + (size_t)h;
    return i < LATENT_RANK ? p.a.q + row * LATENT_RANK + (size_t)i
                           : p.a.qr + row * (size_t)(p.a.nope_dim + LATENT_ROPE) +
                                 (size_t)(p.a.nope_dim + i - LATENT_RANK);
}
DEVICE float list_sink(const struct latent_list &, int, float)
{
    return 0.0f;
}
DEVICE void list_put(const struct latent_list &p, int t, int h, int i, float x, float y)
{
    *(uint32_t *)latent_sum_at(p.a, t, h, i) = pack_half2(clamp_half(x), clamp_half(y));
}

/* The rows of part and ml of a row's heads from h0 on, of a split. */
template <int MT, class P> DEVICE size_t list_part(const P &p, int unit, int split)
{
    return ((size_t)unit * (size_t)p.a.n_split + (size_t)split) * (size_t)(16 * MT);
}

/* Keys of a split: whole tiles. */
DEVICE int list_part_keys(int n, int n_split)
{
    int tiles = (n + LAT_KEYS - 1) / LAT_KEYS;
    return (tiles + n_split - 1) / n_split * LAT_KEYS;
}

/* Stores the queries in shared memory, scaled to units of log2. */
template <int MT, bool BF16, class P>
DEVICE void list_queries(const P &p, int t, int h0, int n_heads,
                         struct latent_shared<MT, P::ROW> *sh)
{
    float scale = p.a.scale * 1.4426950408889634f;
    enum { PIECES = P::ROW / 16 };
#pragma unroll 4
    for (int i = (int)threadIdx.x; i < 16 * MT * PIECES; i += LAT_WARPS * 32) {
        int r = i / PIECES, piece = i % PIECES;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (r < n_heads) {
            const float4 *from = (const float4 *)list_query(p, t, h0 + r, piece * 8);
            float4 a = from[0], b = from[1];
            float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 8; j++)
                x[j] = clamp_half(x[j] * scale);
            v = make_uint4(pack_kv<BF16>(x[0], x[1]), pack_kv<BF16>(x[2], x[3]),
                           pack_kv<BF16>(x[4], x[5]), pack_kv<BF16>(x[6], x[7]));
        }
        *(uint4 *)(sh->q + r * P::ROW + ((piece ^ (r & 7)) << 4)) = v;
    }
}

/* Grid: (n_split, rows * groups of 16 MT heads). For the scores a warp has one m tile and 8 MT keys; for P V it has 64
 * columns of all heads. */
template <int MT, bool BF16, class P>
static __global__ void __launch_bounds__(LAT_WARPS * 32, 1)
    list_attn_kernel(const __grid_constant__ P p, int stages)
{
    enum { M = 16 * MT, GROUPS = LAT_WARPS / MT, ROW = P::ROW, PIECES = ROW / 16 };
    SHARED_BYTES(shared);
    struct latent_shared<MT, ROW> *sh = (struct latent_shared<MT, ROW> *)shared;
    int lane = lane_id(), w = warp_id(), g = lane >> 2, c = lane & 3, mt = w % MT, group = w / MT;
    int groups = (p.a.n_heads + M - 1) / M, t = (int)blockIdx.y / groups;
    int h0 = ((int)blockIdx.y - t * groups) * M, heads = min((int)M, p.a.n_heads - h0);
    size_t part_row = list_part<MT>(p, (int)blockIdx.y, (int)blockIdx.x);
    dependency_trigger();
    dependency_wait();
    typename P::view view = list_view(p, t);
    int per = list_part_keys(view.n, p.a.n_split), from = (int)blockIdx.x * per;
    int last = min(view.n, from + per) - 1;
    if (from > last) {
        for (int r = (int)threadIdx.x; r < M && p.a.n_split > 1; r += LAT_WARPS * 32)
            p.a.ml[2 * (part_row + (size_t)r) + 1] = 0.0f;
        for (int i = (int)threadIdx.x; i < heads * LATENT_RANK / 2 && p.a.n_split == 1;
             i += LAT_WARPS * 32) /* padding */
            list_put(p, t, h0 + i / (LATENT_RANK / 2), i % (LATENT_RANK / 2) * 2, 0.0f, 0.0f);
        return;
    }
    for (int r = (int)threadIdx.x; r < M; r += LAT_WARPS * 32)
        sh->pos[r] = r < heads ? view.n - 1 : -1;
    /* Warp w copies keys w, w + 8, ..; lane i holds the cache row of the i-th of them. */
    auto fetch = [&](int base, int buffer) {
        uint8_t *to = sh->keys + buffer * (LAT_KEYS * ROW);
        size_t row = list_row(p, view, min(base + w + (lane & 7) * LAT_WARPS, last));
        uint32_t slot = (uint32_t)row;
#pragma unroll
        for (int i = 0; i < LAT_KEYS / LAT_WARPS; i++) {
            int key = w + i * LAT_WARPS;
            const uint8_t *at = p.a.cache + (size_t)__shfl_sync(FULL_WARP, slot, i) * ROW;
#pragma unroll
            for (int j = 0; j < PIECES; j += 32)
                if (j + lane < PIECES)
                    copy_async16(to + key * ROW + (((j + lane) ^ (key & 7)) << 4),
                                 at + (j + lane) * 16);
        }
        copy_async_commit();
    };
    fetch(from, 0);
    list_queries<MT, BF16>(p, t, h0, heads, sh);
    float out[MT][8][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {0.0f, 0.0f};
    for (int base = from, n = 0; base <= last; base += LAT_KEYS, n++) {
        int buffer = stages == 2 ? n & 1 : 0;
        if (stages == 2 && base + LAT_KEYS <= last)
            fetch(base + LAT_KEYS, buffer ^ 1);
        else
            copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        const uint8_t *keys = sh->keys + buffer * (LAT_KEYS * ROW);
        float s[MT][4] = {};
        latent_scores<MT, BF16, ROW>(sh->q, keys, mt, group * 8 * MT, s);
        latent_softmax<MT, BF16, ROW>(sh, mt, group, base, last, s, top, total);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            float shrink[2] = {sh->shrink[m * 16 + g], sh->shrink[m * 16 + g + 8]};
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    out[m][j][i] *= shrink[i >> 1];
        }
        latent_gather<MT, BF16, ROW>(sh->p, keys, w * 64, out);
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
            int row = m * 16 + g + 8 * r;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < GROUPS; i++)
                sum += sh->most[i][row];
            if (row >= heads)
                continue;
            size_t at = part_row + (size_t)row;
            if (p.a.n_split > 1 && w == 0 && c == 0) {
                p.a.ml[2 * at] = sh->shrink[row];
                p.a.ml[2 * at + 1] = sum;
            }
            float all = sum;
            if (p.a.n_split == 1)
                all += list_sink(p, h0 + row, sh->shrink[row]);
            float f = all > 0.0f ? 1.0f / all : 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                int i = w * 64 + j * 8 + 2 * c;
                float x = out[m][j][2 * r] * f, y = out[m][j][2 * r + 1] * f;
                if (p.a.n_split > 1)
                    *(float2 *)(p.a.part + at * LATENT_RANK + (size_t)i) = make_float2(x, y);
                else
                    list_put(p, t, h0 + row, i, x, y);
            }
        }
}

/* Combines the splits of a head. Grid: (heads, rows). */
template <int MT, class P>
static __global__ void __launch_bounds__(128) list_combine_kernel(const __grid_constant__ P p)
{
    __shared__ float weight[LATENT_MAX_SPLIT];
    dependency_trigger();
    dependency_wait();
    enum { M = 16 * MT };
    int h = (int)blockIdx.x, t = (int)blockIdx.y, groups = (p.a.n_heads + M - 1) / M;
    int tid = (int)threadIdx.x, unit = t * groups + h / M;
    size_t row0 = list_part<MT>(p, unit, 0) + (size_t)(h % M);
    if (tid < 32) {
        float top = -INFINITY, sum = 0.0f, m[LATENT_MAX_SPLIT / 32], l[LATENT_MAX_SPLIT / 32];
#pragma unroll
        for (int i = 0; i < LATENT_MAX_SPLIT / 32; i++) {
            int split = tid + 32 * i;
            const float *ml = p.a.ml + 2 * (row0 + (size_t)(split * M));
            l[i] = split < p.a.n_split ? ml[1] : 0.0f;
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
        float all = sum + list_sink(p, h, top);
#pragma unroll
        for (int i = 0; i < LATENT_MAX_SPLIT / 32; i++)
            if (tid + 32 * i < p.a.n_split)
                weight[tid + 32 * i] = sum > 0.0f ? l[i] / all : 0.0f;
    }
    __syncthreads();
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int i = 0; i < p.a.n_split; i++) {
        float f = weight[i];
        if (f == 0.0f) /* an empty split has written nothing */
            continue;
        float4 x = *(const float4 *)(p.a.part + (row0 + (size_t)(i * M)) * LATENT_RANK +
                                     (size_t)(tid * 4));
        v.x += f * x.x, v.y += f * x.y, v.z += f * x.z, v.w += f * x.w;
    }
    list_put(p, t, h, tid * 4, v.x, v.y);
    list_put(p, t, h, tid * 4 + 2, v.z, v.w);
}

/* Host */

template <int MT, class P> static size_t list_shared(int stages)
{
    return sizeof(struct latent_shared<MT, P::ROW>) + (size_t)((stages - 1) * LAT_KEYS * P::ROW);
}

/* m tiles of a block: enough for all heads if shared memory allows. */
template <class P> static int list_mt(const struct cuda_backend *cu, int n_heads)
{
    if (n_heads > 32 && list_shared<4, P>(1) <= cu->shared_limit)
        return 4;
    return n_heads > 16 && list_shared<2, P>(1) <= cu->shared_limit ? 2 : 1;
}

/* Splits of rows that see at most `keys` keys. A row's result must not depend on others in an exact step. */
static int list_splits(const struct cuda_backend *cu, int units, int keys)
{
    int most = ceil_div(keys, LAT_KEYS), n = cu->exact ? 1 : cu->n_sm / units;
    n = n < most ? n : most;
    return n < 1 ? 1 : n > LATENT_MAX_SPLIT ? LATENT_MAX_SPLIT : n;
}

template <int MT, class P> static void list_launch(struct cuda_backend *cu, P p, int rows, int keys)
{
    int units = rows * ceil_div(p.a.n_heads, 16 * MT);
    int stages = list_shared<MT, P>(2) <= cu->shared_limit ? 2 : 1;
    p.a.n_split = list_splits(cu, units, keys);
    /* A grid has no more than MAX_GRID blocks along y. */
    auto kernel =
        p.a.type == DT_BF16 ? list_attn_kernel<MT, true, P> : list_attn_kernel<MT, false, P>;
    cuda_launch(cu, kernel, dim3((unsigned)p.a.n_split, (unsigned)units), LAT_WARPS * 32,
                list_shared<MT, P>(stages), LAUNCH_EARLY, p, stages);
    if (p.a.n_split > 1)
        cuda_launch(cu, list_combine_kernel<MT, P>, dim3((unsigned)p.a.n_heads, (unsigned)rows),
                    128, 0, LAUNCH_EARLY, p);
}

template <class P> static void list_attn(struct cuda_backend *cu, const P &p, int rows, int keys)
{
    int mt = list_mt<P>(cu, p.a.n_heads);
    if (mt == 4)
        list_launch<4>(cu, p, rows, keys);
    else if (mt == 2)
        list_launch<2>(cu, p, rows, keys);
    else
        list_launch<1>(cu, p, rows, keys);
}

size_t list_attn_rows(const struct cuda_backend *cu)
{
    return (size_t)cu->n_sm * 16 * LAT_MAX_MT; /* more units have no splits */
}

bool compressed_attn_fits(const struct cuda_backend *cu, const struct compressed_args &p)
{
    return p.dim == LATENT_RANK && p.half % 2 == 0 && (p.type == DT_F16 || p.type == DT_BF16) &&
           list_shared<1, compressed_list>(1) <= cu->shared_limit &&
           p.step.n_tokens * ceil_div(p.n_heads, 16) <= MAX_GRID;
}

void compressed_attn(struct cuda_backend *cu, struct compressed_args p)
{
    struct compressed_list l = {p};
    list_attn(cu, l, p.step.n_tokens, p.most_keys);
}

bool latent_list_fits(const struct cuda_backend *cu, const struct latent_args &p)
{
    return latent_attn_fits(cu, p) && list_shared<1, latent_list>(1) <= cu->shared_limit &&
           p.step.n_tokens * ceil_div(p.n_heads, 16) <= MAX_GRID;
}

void latent_list_attn(struct cuda_backend *cu, struct latent_args p)
{
    struct latent_list l = {p, *p.choice};
    list_attn(cu, l, p.step.n_tokens, p.choice->n_chosen);
}
