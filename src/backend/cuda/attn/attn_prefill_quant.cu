/*
 * Prefill attention over a quantised KV cache, heads of 128: dequantises the sequences' keys and
 * values to fp16 pages once per layer, and attn_prefill.cu reads those. Every 64 rows of every pair
 * of heads read each key again, so one dequantisation is cheap: 3 bytes of memory traffic per
 * value, against the 2,048 multiply-adds of each tile that reads it. The Hadamard rotation of
 * values (kv_quant.cuh) is undone on the way.
 *
 * The buffer holds the longest sequence. Sequences are processed in groups that fit into it: each
 * group is dequantised, then attended to.
 */
#include "backend/cuda/attn/attn.cuh"
#include "backend/cuda/attn/kv_quant.cuh"
#include "backend/cuda/core/host.h"

enum {
    QUANT_D = 128,
    QUANT_THREADS = 128,
    QUANT_LANES = 16, /* per row, eight values each */
    QUANT_ROUND = 128 /* attn_prefill.cu starts windows at multiples of this */
};

struct attn_prefill_quant_args {
    struct kv_view kv;
    struct step step;
    uint16_t *k, *v; /* (pages, K, page_len, D) */
    int32_t *pages;  /* (n_seqs, stride) block table of those pages */
    int first_seq, window;
};

/* One block: dequantises n rows of D values to fp16, 16 lanes per row. */
template <class T>
DEVICE void attn_prefill_quant_rows(const uint8_t *tile, int page_len, int n, bool rotated,
                                    uint16_t *to)
{
    enum { ROW = QUANT_D / 32 * T::BLOCK, EIGHT = T::BLOCK / 4 };
    const uint16_t *scales = (const uint16_t *)(tile + page_len * ROW);
    int l = (int)threadIdx.x % QUANT_LANES, at_once = QUANT_THREADS / QUANT_LANES;
#pragma unroll 2
    for (int r0 = 0; r0 < n; r0 += at_once) {
        int r = r0 + (int)threadIdx.x / QUANT_LANES, real = min(r, n - 1);
        uint32_t scale = T::SCALED ? kv_scale_pair(scales + real * (QUANT_D / 32) + l / 4) : 0;
        uint4 v = T::eight(tile + real * ROW + l * EIGHT, scale);
        if (rotated) {
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i] = half_to_float(word_of(v, i >> 1) >> 16 * (i & 1) & 0xffff);
            kv_lanes_rotate<8, QUANT_LANES>(x);
            v = make_uint4(pack_half2(x[0], x[1]), pack_half2(x[2], x[3]), pack_half2(x[4], x[5]),
                           pack_half2(x[6], x[7]));
        }
        if (r < n)
            *(uint4 *)(to + r * QUANT_D + l * 8) = v;
    }
}

/* Grid: (pages of the longest sequence, kv heads, sequences from first_seq on). */
static __global__ void __launch_bounds__(QUANT_THREADS)
    attn_prefill_quant_kernel(const __grid_constant__ struct attn_prefill_quant_args p)
{
    dependency_wait();
    dependency_trigger();
    int at = (int)blockIdx.x, head = (int)blockIdx.y, seq = p.first_seq + (int)blockIdx.z;
    int page_len = p.kv.page_len, shift = p.kv.page_shift, len = p.step.kv_len[seq];
    int n = min(page_len, len - at * page_len);
    int first_pos = p.step.pos[p.step.q_start[seq]];
    int from = p.window && first_pos - p.window + 1 > 0 ? first_pos - p.window + 1 : 0;
    if (n <= 0 || (at + 1) * page_len <= (from & ~(QUANT_ROUND - 1)))
        return;
    int base = 0; /* pages of the preceding sequences */
    for (int i = p.first_seq + lane_id(); i < seq; i += 32)
        base += (p.step.kv_len[i] + page_len - 1) >> shift;
#pragma unroll
    for (int i = 16; i; i >>= 1)
        base += __shfl_xor_sync(FULL_WARP, base, i);
    int entry = seq * p.step.head[STEP_PAGE_STRIDE] + at;
    size_t tile = (size_t)p.step.pages[entry] * (size_t)p.kv.n_kv + (size_t)head;
    size_t to = (((size_t)(base + at) * (size_t)p.kv.n_kv + (size_t)head) << shift) * QUANT_D;
    if (head == 0 && threadIdx.x == 0)
        p.pages[entry] = base + at;
    kv_with(kv_keys(p.kv.type), [&](auto t) {
        typedef decltype(t) T;
        size_t bytes = (size_t)page_len * (QUANT_D / 32) * (T::BLOCK + (T::SCALED ? 2 : 0));
        attn_prefill_quant_rows<T>(p.kv.k + tile * bytes, page_len, n, false, p.k + to);
    });
    int v_type = kv_values(p.kv.type);
    kv_with(v_type, [&](auto t) {
        typedef decltype(t) T;
        size_t bytes = (size_t)page_len * (QUANT_D / 32) * (T::BLOCK + (T::SCALED ? 2 : 0));
        attn_prefill_quant_rows<T>(p.kv.v + tile * bytes, page_len, n, kv_is_rotated(v_type),
                                   p.v + to);
    });
}

/* Host */

/* Bytes of one page's keys and values as fp16. */
static size_t attn_prefill_quant_page(const struct cuda_backend *cu, int n_kv)
{
    return (size_t)n_kv * (size_t)cu->shape.page_len * QUANT_D * 2 * 2;
}

size_t attn_prefill_quant_bytes(const struct cuda_backend *cu)
{
    const struct model_shape *s = &cu->shape;
    int n_kv = 0;
    for (int i = 0; i < cu->net->n_layers; i++) {
        const struct attention *a = &cu->net->layers[i].mixer.attention;
        if (cu->net->layers[i].mixer.kind == MIXER_ATTENTION && a->k_dim == QUANT_D)
            n_kv = a->n_kv_heads > n_kv ? a->n_kv_heads : n_kv;
    }
    if (s->kv_type || !cu->can.wgmma)
        return 0;
    int fresh = ceil_div(s->max_tokens, s->page_len) + s->max_seqs;
    int pages = fresh > s->max_pages ? fresh : s->max_pages;
    pages = pages < s->n_pages ? pages : s->n_pages;
    return (size_t)pages * attn_prefill_quant_page(cu, n_kv);
}

size_t attn_prefill_quant_page_ints(const struct cuda_backend *cu)
{
    return attn_prefill_quant_bytes(cu) ? (size_t)cu->shape.max_seqs * (size_t)cu->shape.max_pages
                                        : 0;
}

/* Number of pages of a sequence of this step. */
static int attn_prefill_quant_pages(const struct cuda_backend *cu, int seq)
{
    return ceil_div(cu->step.host[cu->step.layout.kv_len + seq], cu->shape.page_len);
}

bool attn_prefill_quant_suits(const struct cuda_backend *cu, const struct attn_layer *l)
{
    return attn_prefill_suits(cu, l) && attn_quant_suits(cu, l) && !l->sinks && l->softcap == 0 &&
           !l->gated;
}

void attn_prefill_quant(struct cuda_backend *cu, const struct attn_args &from, bool fp16_out)
{
    const struct step_layout *l = &cu->step.layout;
    const int32_t *q_start = cu->step.host + l->q_start;
    size_t room = attn_prefill_quant_bytes(cu) / attn_prefill_quant_page(cu, from.kv.n_kv);
    struct attn_prefill_quant_args e = {};
    e.kv = from.kv;
    e.step = from.step;
    e.k = (uint16_t *)cu->dequant.kv;
    e.v = (uint16_t *)(cu->dequant.kv + attn_prefill_quant_bytes(cu) / 2);
    e.pages = cu->dequant.pages;
    e.window = from.window;
    struct attn_args p = from;
    p.kv.k = (const uint8_t *)e.k;
    p.kv.v = (const uint8_t *)e.v;
    p.kv.type = DT_F16;
    p.step.pages = e.pages;
    for (int seq = l->n_decode, end, tile = 0, tiles; seq < l->n_seqs; seq = end, tile += tiles) {
        size_t used = 0;
        int most = 1;
        tiles = 0;
        for (end = seq; end < l->n_seqs; end++) {
            int n = attn_prefill_quant_pages(cu, end);
            if (used + (size_t)n > room)
                break;
            used += (size_t)n;
            most = n > most ? n : most;
            tiles += ceil_div(q_start[end + 1] - q_start[end], 64);
        }
        CHECK(end > seq, "the sequence has more pages than the buffer for dequantised keys");
        e.first_seq = seq;
        cuda_launch(cu, attn_prefill_quant_kernel,
                    dim3((unsigned)most, (unsigned)e.kv.n_kv, (unsigned)(end - seq)), QUANT_THREADS,
                    0, LAUNCH_EARLY, e);
        attn_prefill_part(cu, p, fp16_out, tile, tiles);
    }
}
